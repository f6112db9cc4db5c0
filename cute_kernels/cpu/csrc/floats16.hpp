// 16-bit floats: float16 and bfloat16 from float32, rounded to nearest even, and back.
#pragma once

#include <cstdint>
#include <cstring>

#include "engine.hpp"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {  // compiled once per instruction set

using magicube::Out;

inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // stays a NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline uint16_t to_float16(float value) {  // overflow to infinity, with subnormals
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (bits < 0x38800000u) {  // subnormal: adding 0.5 lets the FPU round at the right bit
    float shifted;
    std::memcpy(&shifted, &bits, 4);
    shifted += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &shifted, 4);
    return static_cast<uint16_t>(sign | (rounded - 0x3f000000u));
  }
  bits += 0xc8000000u + 0xfffu + ((bits >> 13) & 1u);
  return static_cast<uint16_t>(sign | (bits >> 13));
}

inline float from_bfloat16(uint16_t code) {
  const uint32_t bits = uint32_t{code} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float from_float16(uint16_t code) {
  const uint32_t sign = (code & 0x8000u) << 16, rest = code & 0x7fffu;
  const float subnormal = static_cast<float>(rest) * 0x1p-24f;
  uint32_t bits = (rest << 13) + 0x38000000u + (rest >= 0x7c00u ? 0x38000000u : 0);
  if (rest < 0x400u) std::memcpy(&bits, &subnormal, 4);
  bits |= sign;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline void store_float(float* to, float value) { *to = value; }
inline void store_float(Float16* to, float value) { to->bits = to_float16(value); }
inline void store_float(BFloat16* to, float value) { to->bits = to_bfloat16(value); }
inline float load_float(const Float16* from) { return from_float16(from->bits); }
inline float load_float(const BFloat16* from) { return from_bfloat16(from->bits); }

#ifdef __AVX512F__
using FloatVector = __m512;
constexpr int64_t kLanes = 16;

inline FloatVector load_vector(const float* from) { return _mm512_loadu_ps(from); }
inline FloatVector load_vector(const Float16* from) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline FloatVector load_vector(const BFloat16* from) {
  const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(codes), 16));
}

inline __mmask16 nans(__m512 x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }

inline void store_vector(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
inline void stream_vector(float* to, __m512 x) { _mm512_stream_ps(to, x); }
inline void store_vector(Float16* to, __m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i nan = _mm512_or_si512(_mm512_and_si512(bits, _mm512_set1_epi32(INT32_MIN)), _mm512_set1_epi32(0x7fc00000));
  const __m512 quiet = _mm512_castsi512_ps(_mm512_mask_blend_epi32(nans(x), bits, nan));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(quiet, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_vector(BFloat16* to, __m512 x) {
  const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16), odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __m512i nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nans(x), rounded, nan)));
}
#elif defined(__AVX2__)
using FloatVector = __m256;
constexpr int64_t kLanes = 8;

inline FloatVector load_vector(const float* from) { return _mm256_loadu_ps(from); }
inline FloatVector load_vector(const Float16* from) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }
inline FloatVector load_vector(const BFloat16* from) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(codes), 16));
}

inline void store_vector(float* to, __m256 x) { _mm256_storeu_ps(to, x); }
inline void stream_vector(float* to, __m256 x) { _mm256_stream_ps(to, x); }
inline void store_vector(Float16* to, __m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i nan = _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(INT32_MIN)), _mm256_set1_epi32(0x7fc00000));
  const __m256 quiet = _mm256_blendv_ps(x, _mm256_castsi256_ps(nan), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(quiet, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_vector(BFloat16* to, __m256 x) {
  const __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16), odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i both = _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  const __m128i codes = _mm_packus_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), codes);
}
#else
constexpr int64_t kLanes = 0;
#endif

template <class Real16>
void store_16_bit(const float* __restrict from, int64_t count, Real16* __restrict to) {
  int64_t i = 0;
#ifdef __AVX2__
  for (; i + kLanes <= count; i += kLanes) store_vector(to + i, load_vector(from + i));
#endif
  for (; i < count; ++i) store_float(to + i, from[i]);
}

template <class Real16>
void load_16_bit(const Real16* __restrict from, int64_t count, float* __restrict to) {
  int64_t i = 0;
#ifdef __AVX2__
  for (; i + kLanes <= count; i += kLanes) store_vector(to + i, load_vector(from + i));
#endif
  for (; i < count; ++i) to[i] = load_float(from + i);
}

// The same as float32, in `block` unless they are.
inline const float* as_floats(const float* from, int64_t, float*) { return from; }
template <class Real16>
const float* as_floats(const Real16* from, int64_t count, float* block) {
  load_16_bit(from, count, block);
  return block;
}

// Floats of a run in the output type.
inline void store_floats(const float* from, int64_t count, Out type, void* out, int64_t offset) {
  if (type == Out::kFloat32) {
    std::memcpy(static_cast<float*>(out) + offset, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  if (type == Out::kFloat16) store_16_bit(from, count, static_cast<Float16*>(out) + offset);
  else store_16_bit(from, count, static_cast<BFloat16*>(out) + offset);
}

// A run of floats of a type, from `offset` on, as float32.
inline void load_floats(const void* from, int64_t offset, int64_t count, Out type, float* to) {
  if (type == Out::kFloat32) {
    std::memcpy(to, static_cast<const float*>(from) + offset, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  if (type == Out::kFloat16) load_16_bit(static_cast<const Float16*>(from) + offset, count, to);
  else load_16_bit(static_cast<const BFloat16*>(from) + offset, count, to);
}

}  // namespace
