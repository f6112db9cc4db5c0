// The instructions of cpu/csrc/avx512.cpp in portable C++, in the place of <immintrin.h>, for machines without AVX-512.
//
// Aligned loads and stores abort at addresses at which the hardware would fault.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

using __m128i = int32_t __attribute__((vector_size(16), may_alias));
using __m256i = int32_t __attribute__((vector_size(32), may_alias));
using __m512i = int32_t __attribute__((vector_size(64), may_alias));
using __m256 = float __attribute__((vector_size(32), may_alias));
using __m512 = float __attribute__((vector_size(64), may_alias));
using __m512d = double __attribute__((vector_size(64), may_alias));
using __mmask8 = uint8_t;
using __mmask16 = uint16_t;
using __mmask64 = uint64_t;

namespace emulated {

inline bool has_vbmi = true;

template <class To, class From>
To bits(const From& from) {
  static_assert(sizeof(To) <= sizeof(From), "reads beyond the vector");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class Vector>
Vector load(const void* from) {
  Vector to;
  std::memcpy(&to, from, sizeof to);
  return to;
}

inline void check_aligned(const void* address, int bytes = 64) {
  if (reinterpret_cast<uintptr_t>(address) % bytes) std::abort();
}

template <class Vector, class Element>
Vector load_masked(uint64_t mask, const void* from) {  // reads no element whose bit is 0
  Vector to{};
  for (unsigned i = 0; i < sizeof to / sizeof(Element); ++i) {
    if (mask >> i & 1) std::memcpy(reinterpret_cast<Element*>(&to) + i, static_cast<const Element*>(from) + i, sizeof(Element));
  }
  return to;
}

template <class Element, class Vector>
void store_masked(unsigned mask, Vector x, void* to) {
  for (unsigned i = 0; i < sizeof x / sizeof(Element); ++i) {
    if (mask >> i & 1) static_cast<Element*>(to)[i] = x[i];
  }
}

template <class Vector, class Element>
Vector fill(Element value) {
  Element each[sizeof(Vector) / sizeof(Element)];
  for (Element& element : each) element = value;
  return load<Vector>(each);
}

template <class Vector>
Vector wrapped_sum(Vector a, Vector b) {
  for (unsigned i = 0; i < sizeof a / 4; ++i) {
    a[i] = static_cast<int32_t>(static_cast<uint32_t>(a[i]) + static_cast<uint32_t>(b[i]));
  }
  return a;
}

// Interleave the low or high halves of each of the four 128-bit lanes.
template <class Element>
__m512i unpack(__m512i a, __m512i b, bool high) {
  constexpr int kPerLane = 16 / sizeof(Element), kHalf = kPerLane / 2;
  Element x[4 * kPerLane], y[4 * kPerLane], out[4 * kPerLane];
  std::memcpy(x, &a, 64);
  std::memcpy(y, &b, 64);
  for (int lane = 0; lane < 4; ++lane) {
    for (int i = 0; i < kHalf; ++i) {
      const int at = lane * kPerLane;
      out[at + 2 * i] = x[at + i + high * kHalf];
      out[at + 2 * i + 1] = y[at + i + high * kHalf];
    }
  }
  return load<__m512i>(out);
}

template <class Int, class Vector>
Vector and_not(Vector a, Vector b) {
  Int x[64 / sizeof(Int)], y[64 / sizeof(Int)];
  std::memcpy(x, &a, 64);
  std::memcpy(y, &b, 64);
  for (unsigned i = 0; i < 64 / sizeof(Int); ++i) x[i] = ~x[i] & y[i];
  return load<Vector>(x);
}

}  // namespace emulated

inline __m512i _mm512_setzero_si512() { return __m512i{}; }
inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512d _mm512_setzero_pd() { return __m512d{}; }
inline __m512i _mm512_set1_epi32(int32_t x) { return emulated::fill<__m512i>(x); }
inline __m512i _mm512_set1_epi8(char x) { return emulated::fill<__m512i>(x); }
inline __m512i _mm512_set1_epi64(int64_t x) { return emulated::fill<__m512i>(x); }
inline __m512i _mm512_mask_set1_epi64(__m512i from, __mmask8 mask, int64_t x) {
  int64_t each[8];
  std::memcpy(each, &from, 64);
  for (int i = 0; i < 8; ++i) each[i] = mask >> i & 1 ? x : each[i];
  return emulated::load<__m512i>(each);
}
inline __m512 _mm512_set1_ps(float x) { return emulated::fill<__m512>(x); }
inline __m512d _mm512_set1_pd(double x) { return emulated::fill<__m512d>(x); }

template <class... Int>
__m512i _mm512_setr_epi32(Int... each) {
  return __m512i{each...};
}

template <class... Int>
__m512i _mm512_set_epi16(Int... each) {  // the last one first
  const int16_t words[] = {static_cast<int16_t>(each)...};
  int16_t turned[32];
  for (int i = 0; i < 32; ++i) turned[i] = words[31 - i];
  return emulated::load<__m512i>(turned);
}

template <class... Int>
__m128i _mm_setr_epi8(Int... each) {
  const int8_t bytes[] = {static_cast<int8_t>(each)...};
  return emulated::load<__m128i>(bytes);
}
inline __m128i _mm_setzero_si128() { return __m128i{}; }

inline __m128i _mm_loadu_si128(const __m128i* from) { return emulated::load<__m128i>(from); }
inline __m128i _mm_load_si128(const __m128i* from) {
  emulated::check_aligned(from, 16);
  return emulated::load<__m128i>(from);
}
inline void _mm_store_si128(__m128i* to, __m128i x) {
  emulated::check_aligned(to, 16);
  std::memcpy(static_cast<void*>(to), &x, sizeof x);
}
inline __m256i _mm256_loadu_si256(const __m256i* from) { return emulated::load<__m256i>(from); }
inline __m512i _mm512_maskz_loadu_epi8(__mmask64 mask, const void* from) { return emulated::load_masked<__m512i, uint8_t>(mask, from); }
inline __m512 _mm512_maskz_loadu_ps(unsigned mask, const float* from) { return emulated::load_masked<__m512, float>(mask, from); }
inline void _mm512_mask_storeu_ps(float* to, unsigned mask, __m512 x) { emulated::store_masked<float>(mask, x, to); }
inline void _mm512_mask_storeu_epi32(void* to, unsigned mask, __m512i x) { emulated::store_masked<int32_t>(mask, x, static_cast<int32_t*>(to)); }
inline __m256 _mm256_loadu_ps(const float* from) { return emulated::load<__m256>(from); }
inline __m512 _mm512_loadu_ps(const float* from) { return emulated::load<__m512>(from); }
inline __m512d _mm512_loadu_pd(const double* from) { return emulated::load<__m512d>(from); }
inline __m512i _mm512_loadu_si512(const void* from) { return emulated::load<__m512i>(from); }
inline __m512i _mm512_load_si512(const void* from) {
  emulated::check_aligned(from);
  return emulated::load<__m512i>(from);
}
inline void _mm_storeu_si128(__m128i* to, __m128i x) { std::memcpy(static_cast<void*>(to), &x, sizeof x); }
inline void _mm256_storeu_si256(__m256i* to, __m256i x) { std::memcpy(static_cast<void*>(to), &x, sizeof x); }
inline void _mm256_store_si256(__m256i* to, __m256i x) {
  emulated::check_aligned(to, 32);
  std::memcpy(static_cast<void*>(to), &x, sizeof x);
}
inline void _mm512_storeu_ps(float* to, __m512 x) { std::memcpy(to, &x, sizeof x); }
inline void _mm512_storeu_pd(double* to, __m512d x) { std::memcpy(to, &x, sizeof x); }
inline void _mm512_storeu_si512(void* to, __m512i x) { std::memcpy(to, &x, sizeof x); }
inline void _mm512_store_si512(void* to, __m512i x) {
  emulated::check_aligned(to);
  std::memcpy(to, &x, sizeof x);
}
inline void _mm512_stream_si512(__m512i* to, __m512i x) { _mm512_store_si512(to, x); }
inline void _mm512_stream_ps(float* to, __m512 x) {
  emulated::check_aligned(to);
  std::memcpy(to, &x, sizeof x);
}
inline void _mm_sfence() {}

inline __m128i _mm_add_epi32(__m128i a, __m128i b) { return emulated::wrapped_sum(a, b); }
inline __m256i _mm256_add_epi32(__m256i a, __m256i b) { return emulated::wrapped_sum(a, b); }
inline __m512i _mm512_add_epi32(__m512i a, __m512i b) { return emulated::wrapped_sum(a, b); }
inline __m128i _mm_hadd_epi32(__m128i a, __m128i b) {
  return emulated::wrapped_sum(__m128i{a[0], a[2], b[0], b[2]}, __m128i{a[1], a[3], b[1], b[3]});
}
inline __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }
inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i _mm512_srli_epi16(__m512i a, int count) {
  uint16_t x[32];
  std::memcpy(x, &a, 64);
  for (uint16_t& each : x) each = static_cast<uint16_t>(each >> count);
  return emulated::load<__m512i>(x);
}
inline __m512i _mm512_srli_epi64(__m512i a, int count) {
  uint64_t x[8];
  std::memcpy(x, &a, 64);
  for (uint64_t& each : x) each >>= count;
  return emulated::load<__m512i>(x);
}
inline __m512i _mm512_slli_epi32(__m512i a, int count) {
  for (int i = 0; i < 16; ++i) a[i] = static_cast<int32_t>(static_cast<uint32_t>(a[i]) << count);
  return a;
}

// vpdpbusd: four unsigned by four signed bytes per lane; the sum wraps.
template <class Vector>
Vector vpdpbusd(Vector sum, Vector left, Vector right) {
  uint8_t a[sizeof sum];
  int8_t b[sizeof sum];
  std::memcpy(a, &left, sizeof a);
  std::memcpy(b, &right, sizeof b);
  for (unsigned i = 0; i < sizeof sum / 4; ++i) {
    int32_t product = 0;
    for (unsigned k = 4 * i; k < 4 * i + 4; ++k) product += a[k] * b[k];
    sum[i] = static_cast<int32_t>(static_cast<uint32_t>(sum[i]) + static_cast<uint32_t>(product));
  }
  return sum;
}

inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i left, __m512i right) { return vpdpbusd(sum, left, right); }

inline __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) { return emulated::unpack<uint8_t>(a, b, false); }
inline __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) { return emulated::unpack<uint8_t>(a, b, true); }
inline __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) { return emulated::unpack<uint16_t>(a, b, false); }
inline __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) { return emulated::unpack<uint16_t>(a, b, true); }
inline __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) { return emulated::unpack<uint32_t>(a, b, false); }
inline __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) { return emulated::unpack<uint32_t>(a, b, true); }
inline __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) { return emulated::unpack<uint64_t>(a, b, false); }
inline __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) { return emulated::unpack<uint64_t>(a, b, true); }

inline __m512i _mm512_permutexvar_epi32(__m512i order, __m512i x) {
  __m512i out;
  for (int i = 0; i < 16; ++i) out[i] = x[order[i] & 15];
  return out;
}
inline __m512i _mm512_permutexvar_epi16(__m512i order, __m512i x) {
  uint16_t from[32], at[32], out[32];
  std::memcpy(from, &x, 64);
  std::memcpy(at, &order, 64);
  for (int i = 0; i < 32; ++i) out[i] = from[at[i] & 31];
  return emulated::load<__m512i>(out);
}
inline __m256i _mm512_cvtepi64_epi32(__m512i a) {  // the lower half of each
  __m256i out;
  for (int i = 0; i < 8; ++i) out[i] = a[2 * i];
  return out;
}
inline __m512i _mm512_shuffle_epi8(__m512i a, __m512i order) {
  uint8_t x[64], at[64], out[64];
  std::memcpy(x, &a, 64);
  std::memcpy(at, &order, 64);
  for (int i = 0; i < 64; ++i) out[i] = at[i] & 128 ? 0 : x[i / 16 * 16 + (at[i] & 15)];
  return emulated::load<__m512i>(out);
}
inline __m512i _mm512_maskz_compress_epi8(uint64_t mask, __m512i a) {
  uint8_t x[64], out[64] = {};
  std::memcpy(x, &a, 64);
  for (int i = 0, to = 0; i < 64; ++i) {
    if (mask >> i & 1) out[to++] = x[i];
  }
  return emulated::load<__m512i>(out);
}
inline __m512i _mm512_mask_broadcast_i32x4(__m512i from, unsigned mask, __m128i x) {
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) from[i] = x[i % 4];
  }
  return from;
}
inline __m512i _mm512_broadcast_i32x4(__m128i x) { return _mm512_mask_broadcast_i32x4(__m512i{}, 0xffff, x); }
inline __m512i _mm512_broadcast_i64x4(__m256i x) {
  __m512i out;
  for (int i = 0; i < 16; ++i) out[i] = x[i % 8];
  return out;
}
inline __m512 _mm512_castsi512_ps(__m512i a) { return emulated::bits<__m512>(a); }
// vpermb: bits 0 to 5 of a byte of the order pick a byte.
inline __m512i vpermb(__m512i order, __m512i a) {
  uint8_t x[64], at[64], out[64];
  std::memcpy(x, &a, 64);
  std::memcpy(at, &order, 64);
  for (int i = 0; i < 64; ++i) out[i] = x[at[i] & 63];
  return emulated::load<__m512i>(out);
}
inline __m512i _mm512_castsi128_si512(__m128i x) { return _mm512_mask_broadcast_i32x4(_mm512_set1_epi32(0x5a5a5a5a), 15, x); }
inline __m128i _mm512_extracti32x4_epi32(__m512i a, int lane) {
  return emulated::load<__m128i>(reinterpret_cast<const char*>(&a) + 16 * lane);
}
inline __m128i _mm512_castsi512_si128(__m512i a) { return emulated::bits<__m128i>(a); }
inline __m256i _mm512_castsi512_si256(__m512i a) { return emulated::bits<__m256i>(a); }
inline __m128i _mm256_castsi256_si128(__m256i a) { return emulated::bits<__m128i>(a); }
inline __m256i _mm512_extracti64x4_epi64(__m512i a, int half) {
  return emulated::load<__m256i>(reinterpret_cast<const char*>(&a) + 32 * half);
}
inline __m128i _mm256_extracti128_si256(__m256i a, int half) {
  return emulated::load<__m128i>(reinterpret_cast<const char*>(&a) + 16 * half);
}

inline __m512 _mm512_cvtepi32_ps(__m512i a) {
  __m512 out;
  for (int i = 0; i < 16; ++i) out[i] = static_cast<float>(a[i]);
  return out;
}
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512d _mm512_add_pd(__m512d a, __m512d b) { return a + b; }
inline __m512 _mm512_andnot_ps(__m512 a, __m512 b) { return emulated::and_not<uint32_t>(a, b); }
inline __m512d _mm512_andnot_pd(__m512d a, __m512d b) { return emulated::and_not<uint64_t>(a, b); }
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  for (int i = 0; i < 16; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
inline __m512d _mm512_fmadd_pd(__m512d a, __m512d b, __m512d c) {
  for (int i = 0; i < 8; ++i) c[i] = __builtin_fma(a[i], b[i], c[i]);
  return c;
}
inline __m512d _mm512_cvtps_pd(__m256 a) {
  __m512d out;
  for (int i = 0; i < 8; ++i) out[i] = static_cast<double>(a[i]);
  return out;
}

// Tiles: eight of up to 16 rows of up to 64 bytes. A shape beyond that of the loaded configuration aborts, as the hardware faults.
namespace emulated {
struct Tiles {
  uint8_t rows[8], bytes[8];
  uint8_t data[8][16][64];
};
inline thread_local Tiles tiles;

// Left and Right: int8_t or uint8_t.
template <class Left, class Right>
void multiply_tiles(int sum, int left, int right) {
  if (tiles.rows[sum] != tiles.rows[left] || tiles.bytes[left] != 4 * tiles.rows[right] || tiles.bytes[right] != 64) std::abort();
  for (int r = 0; r < tiles.rows[sum]; ++r) {
    for (int n = 0; n < 16; ++n) {
      uint32_t total;
      std::memcpy(&total, &tiles.data[sum][r][4 * n], 4);
      for (int k = 0; k < tiles.bytes[left]; ++k) {
        total += static_cast<uint32_t>(static_cast<Left>(tiles.data[left][r][k]) * static_cast<Right>(tiles.data[right][k / 4][4 * n + k % 4]));
      }
      std::memcpy(&tiles.data[sum][r][4 * n], &total, 4);
    }
  }
}
}  // namespace emulated

inline void _tile_loadconfig(const void* from) {
  const auto* const bytes = static_cast<const uint8_t*>(from);
  if (bytes[0] != 1) std::abort();
  for (int t = 0; t < 8; ++t) {
    emulated::tiles.rows[t] = bytes[48 + t], emulated::tiles.bytes[t] = bytes[16 + 2 * t];
    if (bytes[48 + t] > 16 || bytes[16 + 2 * t] > 64 || bytes[17 + 2 * t] != 0) std::abort();
  }
  std::memset(emulated::tiles.data, 0, sizeof emulated::tiles.data);
}
inline void _tile_release() { std::memset(&emulated::tiles, 0, sizeof emulated::tiles); }
inline void _tile_zero(int tile) { std::memset(emulated::tiles.data[tile], 0, sizeof emulated::tiles.data[tile]); }
inline void _tile_loadd(int tile, const void* from, int64_t pitch) {
  _tile_zero(tile);
  for (int r = 0; r < emulated::tiles.rows[tile]; ++r) {
    std::memcpy(emulated::tiles.data[tile][r], static_cast<const uint8_t*>(from) + r * pitch, emulated::tiles.bytes[tile]);
  }
}
inline void _tile_stored(int tile, void* to, int64_t pitch) {
  for (int r = 0; r < emulated::tiles.rows[tile]; ++r) {
    std::memcpy(static_cast<uint8_t*>(to) + r * pitch, emulated::tiles.data[tile][r], emulated::tiles.bytes[tile]);
  }
}
inline void _tile_dpbusd(int sum, int left, int right) { emulated::multiply_tiles<uint8_t, int8_t>(sum, left, right); }
inline void _tile_dpbsud(int sum, int left, int right) { emulated::multiply_tiles<int8_t, uint8_t>(sum, left, right); }
