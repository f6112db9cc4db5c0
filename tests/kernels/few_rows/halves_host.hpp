// float16 and bfloat16 of a GPU in integers and doubles: each operation is exact, then rounded once, subnormals included.
#pragma once

#include "../gemm/epilogue_host.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>

struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };
struct __half2 { __half x, y; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };

namespace host {

template <class Half>
struct Layout;
template <>
struct Layout<__half> { static constexpr int kMantissa = 10, kBias = 15; };
template <>
struct Layout<__nv_bfloat16> { static constexpr int kMantissa = 7, kBias = 127; };

template <class Half>
double value(Half x) {
  constexpr int kMantissa = Layout<Half>::kMantissa, kBias = Layout<Half>::kBias;
  const int exponent = x.bits >> kMantissa & (2 * kBias + 1), mantissa = x.bits & ((1 << kMantissa) - 1);
  const double sign = x.bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 2 * kBias + 1) return mantissa ? NAN : sign * INFINITY;
  const int own = exponent > 0 ? mantissa | 1 << kMantissa : mantissa;
  return sign * std::ldexp(own, (exponent > 0 ? exponent : 1) - kBias - kMantissa);
}

// To nearest even. The exponent is in front of the mantissa: a carry is right, also from subnormals and to infinity.
template <class Half>
Half rounded(double x) {
  constexpr int kMantissa = Layout<Half>::kMantissa, kBias = Layout<Half>::kBias;
  if (std::isnan(x)) return {0x7FFF};
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double size = std::fabs(x);
  constexpr uint16_t kInfinity = (2 * kBias + 1) << kMantissa;
  if (std::isinf(x) || size >= std::ldexp(1.0, kBias + 1)) return {uint16_t(sign | kInfinity)};
  int exponent = size == 0 ? 0 : std::ilogb(size);
  if (exponent < 1 - kBias || size == 0) exponent = 1 - kBias;
  const int units = int(std::nearbyint(std::ldexp(size, kMantissa - exponent)));
  return {uint16_t(sign | (((exponent + kBias - 1) << kMantissa) + units))};
}

// a b + c, to odd: the product is exact in double, and a later rounding to fewer bits sees on which side the sum is.
inline double fma_to_odd(double a, double b, double c) {
  const double product = a * b, sum = product + c;
  if (!std::isfinite(sum)) return sum;
  const double back = sum - product, lost = (product - (sum - back)) + (c - back);
  uint64_t bits;
  std::memcpy(&bits, &sum, 8);
  return lost == 0 || bits & 1 ? sum : std::nextafter(sum, lost > 0 ? INFINITY : -INFINITY);
}

template <class Pair>
Pair fma_pair(Pair a, Pair b, Pair c) {
  using Half = decltype(Pair::x);
  return {rounded<Half>(fma_to_odd(value(a.x), value(b.x), value(c.x))), rounded<Half>(fma_to_odd(value(a.y), value(b.y), value(c.y)))};
}
template <class Pair>
Pair multiply_pair(Pair a, Pair b) {
  using Half = decltype(Pair::x);
  return {rounded<Half>(value(a.x) * value(b.x)), rounded<Half>(value(a.y) * value(b.y))};
}
template <class Pair>
Pair subtract_pair(Pair a, Pair b) {
  using Half = decltype(Pair::x);
  return {rounded<Half>(fma_to_odd(value(a.x), 1.0, -value(b.x))), rounded<Half>(fma_to_odd(value(a.y), 1.0, -value(b.y)))};
}

// LOP3: bit by bit, the entry of a table that the three inputs number.
inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t found = 0;
  for (int i = 0; i < 32; ++i) found |= (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i;
  return found;
}

}  // namespace host

inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return host::fma_pair(a, b, c); }
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) { return host::fma_pair(a, b, c); }
inline __half2 __hmul2(__half2 a, __half2 b) { return host::multiply_pair(a, b); }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return host::multiply_pair(a, b); }
inline __half2 __hsub2(__half2 a, __half2 b) { return host::subtract_pair(a, b); }
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) { return host::subtract_pair(a, b); }
inline __half2 __low2half2(__half2 x) { return {x.x, x.x}; }
inline __half2 __high2half2(__half2 x) { return {x.y, x.y}; }
inline __nv_bfloat162 __low2bfloat162(__nv_bfloat162 x) { return {x.x, x.x}; }
inline __nv_bfloat162 __high2bfloat162(__nv_bfloat162 x) { return {x.y, x.y}; }
inline __half __float2half_rn(float x) { return host::rounded<__half>(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return host::rounded<__nv_bfloat16>(x); }
inline __half2 __float2half2_rn(float x) { return {__float2half_rn(x), __float2half_rn(x)}; }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(x)}; }

inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }

inline float __uint_as_float(uint32_t x) { float y; std::memcpy(&y, &x, 4); return y; }
inline uint32_t __float_as_uint(float x) { uint32_t y; std::memcpy(&y, &x, 4); return y; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
// PRMT: a selector's nibble is the number of a byte; its upper bit, for the byte's sign, is not used here.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t{b} << 32 | a;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= uint32_t(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return found;
}
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
  return uint32_t((uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return uint32_t((uint64_t{high} << 32 | low) >> (shift & 31));
}
