// Rows to e4m3 with a scale per row or per 128 values, code = e4m3(x / scale), or with block scales of 32 (mxfp8), or to e2m1 with
// e4m3 scales of blocks of 16 and a scale per row (nvfp4); to nearest even, saturating.
//
// sm_89 and later (cvt to e4m3). Work: a CTA per row, which reads it twice; of scales of 128 and mxfp8, 8 values per thread.
// Quotients are rounded once: float32 ones that are ties of the format are moved off to the side of the true one. Source: PTX ISA,
// cvt.
#pragma once

#include "device/copy.cuh"
#include "few_rows/formats.cuh"

namespace magicube::few {

constexpr int kRun = 8;  // values of a thread at a time

// Eight values; zeros beyond the `valid` first.
template <class Source>
__device__ __forceinline__ void load_values(const Source* from, int64_t valid, bool vector, float (&to)[kRun]) {
  alignas(16) Source run[kRun];
  if (vector && valid >= kRun) {
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(run) / 16); ++i) reinterpret_cast<uint4*>(run)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kRun; ++i) run[i] = i < valid ? from[i] : Source(0.0f);
  }
  CUTE_UNROLL
  for (int i = 0; i < kRun; ++i) to[i] = static_cast<float>(run[i]);
}

// Bits of the largest magnitude; infinity and NaN are above all others.
__device__ __forceinline__ uint32_t absmax_bits(const float (&x)[kRun]) {
  uint32_t found = 0;
  CUTE_UNROLL
  for (int i = 0; i < kRun; ++i) found = max(found, __float_as_uint(x[i]) & 0x7FFFFFFF);
  return found;
}

// amax / 448, of the bits of amax: 1 for zero, NaN for what is not finite, never 0.
__device__ __forceinline__ float absmax_scale(uint32_t bits) {
  if (bits >= 0x7F800000) return __uint_as_float(0x7FC00000);
  if (bits == 0) return 1.0f;
  return fmaxf(__double2float_rn(static_cast<double>(__uint_as_float(bits)) / 448.0), __uint_as_float(1));
}

// Divides float32 by a scale so that the result rounds to a format of few bits as the quotient does.
struct Quotient {
  float divisor, inverse, factor;

  // A tiny scale, and what it divides, grow by 2^64, so that remainders are no subnormal numbers.
  __device__ __forceinline__ explicit Quotient(float scale) : factor(fabsf(scale) < 0x1p-64f ? 0x1p64f : 1.0f) {
    divisor = scale * factor;
    inverse = __fdiv_rn(1.0f, divisor);
  }

  // A float32 less than its last bit away, but for a tie of the format, which the remainder tells from what is next to it. A tie
  // has zeros where float32 has its last bit, so that numbers which end in one stay: a step could make them ties.
  __device__ __forceinline__ float operator()(float x) const {
    const float scaled = x * factor, first = scaled * inverse;
    const float corrected = __fmaf_rn(__fmaf_rn(-first, divisor, scaled), inverse, first);
    const float near = corrected == corrected && first != 0.0f ? corrected : first;  // NaN of infinity, and zeros lose their sign
    const float rest = __fmaf_rn(-near, divisor, scaled);
    const uint32_t bits = __float_as_uint(near);
    const bool stays = bits & 1 || !(fabsf(rest) > 0.0f);  // NaN stays
    const uint32_t away = (__float_as_uint(rest) ^ __float_as_uint(x)) >> 31 ? bits - 1 : bits + 1;  // from the tie
    return __uint_as_float(stays ? bits : away);
  }
};

// e4m3 codes of two numbers, the first in the low byte.
__device__ __forceinline__ uint16_t e4m3_codes(float low, float high) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(codes) : "f"(low), "f"(high));
  return codes;
}

// Store the codes of eight quotients, of which `valid` exist.
__device__ __forceinline__ void store_codes(const float (&quotients)[kRun], uint8_t* to, int64_t valid, bool vector) {
  alignas(8) uint16_t codes[kRun / 2];
  CUTE_UNROLL
  for (int i = 0; i < kRun / 2; ++i) codes[i] = e4m3_codes(quotients[2 * i], quotients[2 * i + 1]);
  if (vector && valid >= kRun) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(codes);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kRun; ++i) {
      if (i < valid) to[i] = reinterpret_cast<const uint8_t*>(codes)[i];
    }
  }
}

// scales: (rows,), written; read, one for all rows, if `given`.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
encode_e4m3_rows(const typename C::Source* x, int64_t pitch, int64_t columns, float* scales, int64_t given, uint8_t* out,
                 int64_t out_pitch, int64_t vector) {
  pdl_wait();
  __shared__ uint32_t largest[C::kThreads / 32];
  const int64_t row = blockIdx.x, first = int64_t{threadIdx.x} * kRun, step = int64_t{C::kThreads} * kRun;
  const auto* const from = x + row * pitch;
  float values[kRun];
  float scale = given ? __ldg(scales) : 1.0f;
  if (!given) {
    uint32_t bits = 0;
    for (int64_t column = first; column < columns; column += step) {
      load_values(from + column, columns - column, vector != 0, values);
      bits = max(bits, absmax_bits(values));
    }
    bits = __reduce_max_sync(~0u, bits);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = bits;
    __syncthreads();
    CUTE_UNROLL
    for (int i = 0; i < C::kThreads / 32; ++i) bits = max(bits, largest[i]);
    scale = absmax_scale(bits);
    if (threadIdx.x == 0) scales[row] = scale;
  }
  const Quotient quotient(scale);
  for (int64_t column = first; column < columns; column += step) {
    load_values(from + column, columns - column, vector != 0, values);
    CUTE_UNROLL
    for (int i = 0; i < kRun; ++i) values[i] = quotient(values[i]);
    store_codes(values, out + row * out_pitch + column, columns - column, vector != 0);
  }
}

// scales: of row r and block b at r * row_step + b * block_step. Sixteen lanes share a block.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
encode_e4m3_groups(const typename C::Source* x, int64_t pitch, int64_t columns, float* scales, int64_t row_step, int64_t block_step,
                   uint8_t* out, int64_t out_pitch, int64_t vector) {
  pdl_wait();
  const int64_t row = blockIdx.x, column = (int64_t{blockIdx.y} * C::kThreads + threadIdx.x) * kRun;
  float values[kRun];
  load_values(x + row * pitch + column, columns - column, vector != 0, values);
  uint32_t bits = absmax_bits(values);
  CUTE_UNROLL
  for (int step = 1; step < 16; step *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, step));
  const float scale = absmax_scale(bits);
  const Quotient quotient(scale);
  CUTE_UNROLL
  for (int i = 0; i < kRun; ++i) values[i] = quotient(values[i]);
  if (column >= columns) return;
  if (threadIdx.x % 16 == 0) scales[row * row_step + column / 128 * block_step] = scale;
  store_codes(values, out + row * out_pitch + column, columns - column, vector != 0);
}

// scales: (rows, blocks) of ue8m0, 2^(floor(log2 amax) - 8); 1 for zeros, NaN for non-finite blocks. Four lanes share a block.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
encode_mxfp8_rows(const typename C::Source* x, int64_t pitch, int64_t columns, uint8_t* scales, int64_t blocks, uint8_t* out,
                  int64_t out_pitch, int64_t vector) {
  pdl_wait();
  const int64_t row = blockIdx.x, column = (int64_t{blockIdx.y} * C::kThreads + threadIdx.x) * kRun;
  float values[kRun];
  load_values(x + row * pitch + column, columns - column, vector != 0, values);
  uint32_t bits = absmax_bits(values);
  bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
  bits = max(bits, __shfl_xor_sync(~0u, bits, 2));
  // floor(log2): of subnormal numbers from the place of the highest bit
  const int exponent = bits >> 23 ? int(bits >> 23) - 127 : -118 - __clz(bits);
  const int code = bits >= 0x7F800000 ? 255 : bits == 0 ? 127 : max(exponent - 8, -127) + 127;
  // 2^(127 - code), of at least 2^-119; products below float32's normal numbers round to zero anyway
  const float inverse = __uint_as_float(code == 255 ? 0x7FC00000 : uint32_t(254 - code) << 23);
  CUTE_UNROLL
  for (int i = 0; i < kRun; ++i) values[i] *= inverse;
  if (column >= columns) return;
  if (threadIdx.x % 4 == 0) scales[row * blocks + column / 32] = uint8_t(code);
  store_codes(values, out + row * out_pitch + column, columns - column, vector != 0);
}

// e2m1 code of a magnitude that rounds as the quotient does: one more from each midpoint of two values on, which has the even code.
__device__ __forceinline__ uint32_t e2m1_code(float x) {
  return (x > 0.25f) + (x >= 0.75f) + (x > 1.25f) + (x >= 1.75f) + (x > 2.5f) + (x >= 3.5f) + (x > 5.0f);
}

// x as a float32 that rounds to e4m3 as x does.
__device__ __forceinline__ float sticky_float(double x) {
  const float found = __double2float_rz(x);
  return static_cast<double>(found) == x ? found : __uint_as_float(__float_as_uint(found) | 1);
}

constexpr uint32_t kNotFinite = 0x7F;  // e4m3 code of NaN, which a block with inf or NaN has

// Eight values of a block of 16, which two lanes share, and the bits of its amax.
template <class Source>
__device__ __forceinline__ uint32_t load_block(const Source* from, int64_t valid, bool vector, float (&to)[kRun]) {
  load_values(from, valid, vector, to);
  const uint32_t bits = absmax_bits(to);
  return max(bits, __shfl_xor_sync(~0u, bits, 1));
}

// scales: (rows, blocks) of e4m3, amax / (6 row scale), at least the smallest; 1 for zeros. row_scales: (rows,), amax / 448 / 6
// of the finite blocks, 1 for zeros. out: two codes a byte, the first in the low half; those of a block that is not finite are 7.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
encode_nvfp4_rows(const typename C::Source* x, int64_t pitch, int64_t columns, uint8_t* scales, int64_t blocks, float* row_scales,
                  uint8_t* out, int64_t out_pitch, int64_t vector) {
  pdl_wait();
  __shared__ uint32_t largest[C::kThreads / 32];
  const int64_t row = blockIdx.x, step = int64_t{C::kThreads} * kRun;
  const auto* const from = x + row * pitch;
  float values[kRun];
  uint32_t top = 0;
  for (int64_t begin = 0; begin < columns; begin += step) {  // for all lanes alike, which exchange amaxes
    const int64_t column = begin + threadIdx.x * kRun;
    const uint32_t bits = load_block(from + column, columns - column, vector != 0, values);
    if (bits < 0x7F800000) top = max(top, bits);
  }
  top = __reduce_max_sync(~0u, top);
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = top;
  __syncthreads();
  CUTE_UNROLL
  for (int i = 0; i < C::kThreads / 32; ++i) top = max(top, largest[i]);
  const float part = __fdiv_rn(__uint_as_float(top), 448.0f);
  const float row_scale = part == 0.0f ? 1.0f : fmaxf(__double2float_rn(static_cast<double>(part) / 6.0), __uint_as_float(1));
  if (threadIdx.x == 0) row_scales[row] = row_scale;
  for (int64_t begin = 0; begin < columns; begin += step) {
    const int64_t column = begin + threadIdx.x * kRun, valid = columns - column;
    const uint32_t bits = load_block(from + column, valid, vector != 0, values);
    if (valid <= 0) continue;
    uint32_t code = kNotFinite;
    if (bits == 0) code = 0x38;
    else if (bits < 0x7F800000) {
      const double quotient = static_cast<double>(__uint_as_float(bits)) / (static_cast<double>(row_scale) * 6.0);
      code = max(e4m3_codes(sticky_float(quotient), 0.0f) & 0xFF, 1);
    }
    if (threadIdx.x % 2 == 0) scales[row * blocks + column / 16] = uint8_t(code);
    const float value = code < 8 ? code * 0x1p-9f : __uint_as_float((code << 20) + (120u << 23));  // of the e4m3 code
    const Quotient quotient(value * row_scale);
    uint32_t word = 0;
    CUTE_UNROLL
    for (int i = 0; i < kRun; ++i) {
      const uint32_t sign = __float_as_uint(values[i]) >> 31 << 3;
      const uint32_t own = e2m1_code(fabsf(quotient(values[i]))) | sign;
      if (i < valid) word |= (code == kNotFinite ? 7u : own) << (4 * i);
    }
    uint8_t* const to = out + row * out_pitch + column / 2;
    if (vector && valid >= kRun) {
      *reinterpret_cast<uint32_t*>(to) = word;
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kRun / 2; ++i) {
        if (2 * i < valid) to[i] = uint8_t(word >> (8 * i));
      }
    }
  }
}

}  // namespace magicube::few
