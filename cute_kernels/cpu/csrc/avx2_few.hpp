// Products with one or with up to sixteen columns of B on AVX2, bound by the bytes of A: sums in registers, B in rows of 1, 8 or
// 16 bytes of which those at the columns of A are gathered.
#pragma once

#include <immintrin.h>

#include "spmm.hpp"

namespace {

inline __m256i widen(__m128i bytes, bool is_signed) {
  return is_signed ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes);
}

// GCC copies the accumulators of _mm256_add_epi32 from register to register.
inline void add(__m256i& sum, __m256i products) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products)); }
inline void add16(__m256i& sum, __m256i products) { asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(products)); }

inline __m256i four_bytes(const void* from) {
  int32_t all;
  std::memcpy(&all, from, sizeof all);
  return _mm256_set1_epi32(all);
}

inline __m128i half(const uint8_t* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); }
inline __m128i whole(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

inline void widen_sixteen(const uint8_t* from, bool is_signed, int16_t* to) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), widen(whole(from), is_signed));
}

// Stores past the caches.
struct Streams2 {
  static constexpr bool kStreams = true;

  static void stream(const void* from, void* to, int64_t bytes) {
    for (int64_t i = 0; i < bytes / 32; ++i) {
      _mm256_stream_si256(static_cast<__m256i*>(to) + i, _mm256_load_si256(static_cast<const __m256i*>(from) + i));
    }
  }

  static void finish_streams() { _mm_sfence(); }  // orders streamed stores before other threads read them
};

struct FewColumns2 : Streams2 {
  static constexpr bool kFew = true, kKeeps = false;
  static constexpr int kFewWidth = 8;

  static constexpr int64_t kAhead = 512;  // columns: those and the values of a vector row are short runs of two streams

  static constexpr int64_t kFewChunk = 256;  // what is gathered for it takes a quarter of L1, or half

  static void fetch(const void* from) { __builtin_prefetch(from, 0, 3); }

  // One column of B: its entries at the columns of a chunk are gathered, then multiplied by the rows, sixteen at a time.
  template <int Rows, bool Signed>
  __attribute__((noinline)) static void few_one(const FewTile& at) {
    constexpr int64_t kChunk = 1024;
    alignas(32) int16_t x[kChunk];
    __m256i sum[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) sum[r] = _mm256_setzero_si256();
    const int stride = at.stride;
    for (int64_t first = 0; first < at.count; first += kChunk) {
      const int64_t count = lesser(kChunk, at.count - first);
      const int32_t* const columns = at.columns + first;
      const uint8_t* values = at.values + first * at.vector_length;
      for (int64_t i = 0; i < count; i += 8) {  // whole blocks
        fetch(values + i * at.vector_length);
        fetch(columns + i + kAhead);
#pragma GCC unroll 8
        for (int64_t j = i; j < i + 8; ++j) {
          const uint8_t byte = at.panel[columns[j]];
          x[j] = Signed ? static_cast<int8_t>(byte) : static_cast<int16_t>(byte);
        }
      }
      for (int64_t block = 0; block < count; block += stride, values += int64_t{stride} * at.vector_length) {
        for (int i = 0; i < stride; i += 16) {
          const __m256i right = _mm256_load_si256(reinterpret_cast<const __m256i*>(x + block + i));
#pragma GCC unroll 8
          for (int r = 0; r < Rows; ++r) add(sum[r], _mm256_madd_epi16(widen(whole(values + r * stride + i), at.a_signed), right));
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) at.sums[r] = total(sum[r]);
  }

  static int32_t total(__m256i sum) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
  }

  // Two rows of B for each pair of columns of A, interleaved: a 32-bit lane holds two k of one column of B, eight to a vector.
  template <int Vectors, bool Signed>
  static void gather_few(const FewTile& at, const int32_t* columns, int64_t count, int16_t* out) {
    constexpr int kWidth = 8 * Vectors;
    auto* to = reinterpret_cast<__m256i*>(out);
    for (int64_t i = 0; i < count; i += 2, columns += 2, to += Vectors) {
      const uint8_t* const k0 = at.panel + int64_t{columns[0]} * kWidth;
      const uint8_t* const k1 = at.panel + int64_t{columns[1]} * kWidth;
      if constexpr (Vectors == 1) {
        _mm256_store_si256(to, widen(_mm_unpacklo_epi8(half(k0), half(k1)), Signed));
      } else {
        _mm256_store_si256(to, widen(_mm_unpacklo_epi8(whole(k0), whole(k1)), Signed));
        _mm256_store_si256(to + 1, widen(_mm_unpackhi_epi8(whole(k0), whole(k1)), Signed));
      }
    }
  }

  // sums += rows of A from `first` on times what was gathered for a chunk.
  template <int Rows, int Vectors>
  __attribute__((noinline)) static void few_rows(const FewTile& at, int first, const uint8_t* values, int64_t count, const int16_t* gathered) {
    constexpr int kWidth = 8 * Vectors;
    const int stride = at.stride;
    alignas(64) int16_t a[Rows][kFewChunk];
    for (int64_t k = 0; k < count; k += 16) {  // a block holds at least sixteen columns
      const uint8_t* const from = values + first * stride + k / stride * stride * at.vector_length + k % stride;
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) widen_sixteen(from + r * stride, at.a_signed, a[r] + k);
    }
    __m256i sum[Rows][Vectors];
    auto* const sums = reinterpret_cast<__m256i*>(at.sums + first * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) sum[r][v] = _mm256_load_si256(sums + r * Vectors + v);
    }
    const auto* right = reinterpret_cast<const __m256i*>(gathered);
    for (int64_t k = 0; k < count; k += 2, right += Vectors) {
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const __m256i left = four_bytes(a[r] + k);
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) add(sum[r][v], _mm256_madd_epi16(left, _mm256_load_si256(right + v)));
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) _mm256_store_si256(sums + r * Vectors + v, sum[r][v]);
    }
  }

  template <int Rows, int Vectors, bool Signed>
  static void few_chunks(const FewTile& at) {
    constexpr int kStep = Rows * Vectors > 8 ? 8 / Vectors : Rows;
    alignas(64) int16_t gathered[kFewChunk * 8 * Vectors];
    std::memset(at.sums, 0, static_cast<size_t>(Rows) * 8 * Vectors * sizeof(int32_t));
    for (int64_t k = 0; k < at.count; k += kFewChunk) {
      const int64_t count = lesser(kFewChunk, at.count - k);
      gather_few<Vectors, Signed>(at, at.columns + k, count, gathered);
      for (int first = 0; first < Rows; first += kStep) {
        few_rows<kStep, Vectors>(at, first, at.values + k * at.vector_length, count, gathered);
      }
    }
  }

  template <int Rows, bool Signed>
  static void few_as(const FewTile& at) {
    if (at.width == 1) few_one<Rows, Signed>(at);
    else if (at.width == 8) few_chunks<Rows, 1, Signed>(at);
    else few_chunks<Rows, 2, Signed>(at);
  }

  template <bool Signed>
  static void few_signed(const FewTile& at) {
    switch (at.rows) {
      case 8: return few_as<8, Signed>(at);
      case 4: return few_as<4, Signed>(at);
      case 2: return few_as<2, Signed>(at);
      default: return few_as<1, Signed>(at);
    }
  }

  static void few(const FewTile& at) { at.b_signed ? few_signed<true>(at) : few_signed<false>(at); }
};

}  // namespace
