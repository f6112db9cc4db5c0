// Dense products on AVX2: bytes are multiplied and added in pairs by vpmaddubsw, and its 16 bits hold each sum.
#pragma once

#include <immintrin.h>

#include "dense.hpp"
#include "vectors256.hpp"

namespace {

// vpmaddubsw adds pairs of products to 16 bits: of unsigned bytes b + 128 it is exact if the digits of a pair of A, of one sign, are 128
// together at most. What is beyond is split off and multiplied besides: of normal numbers, 1 to 5% of the quads have some.
struct Product {
  using Micro = Streams2;
  using Digit = int8_t;
  static constexpr Digit kOffset = 0;
  static constexpr int kRowOffset = 128, kMost = 128;  // sum a b = sum a (b + 128) - 128 sum a; of a pair
  static constexpr bool kSplits = true;
  static constexpr int kRows = 4, kStep = kQuad;  // times 16 columns: 8 accumulators
  static constexpr int64_t kBlockRows = magicube::kDirectRows;

  static void split(Digit* digits, int64_t pitch, int64_t rows, const Chunks& chunks, uint32_t* starts, Excess* to) {
    uint32_t found = 0;
    for (int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
      const int64_t first = chunks.first(chunk), end = chunks.end(chunk);
      starts[chunk] = found;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t q = first; q < end; q += 8) {
          alignas(32) int8_t beyond[8][kQuad];
          for (uint32_t wide = split_eight(digits + r * pitch + q * kQuad, lesser(8, end - q), beyond); wide; wide &= wide - 1) {
            const int i = __builtin_ctz(wide);
            to[found].at = static_cast<uint32_t>((q - first + i) * kTogether + r);
            std::memcpy(to[found++].digits, beyond[i], kQuad);
          }
        }
      }
    }
    starts[chunks.count()] = found;
  }

  // sums (rows, kPanel) += a (b + 128). Chunks of k, whose part of the panel stays in L1 beside the next one's, are multiplied by all
  // rows: a slice of 16 columns reads 64 of every 256 bytes, which are few sets of a cache.
  static void multiply(const Digit* a, int64_t pitch, int rows, const int8_t* b, int64_t quads, int columns, int32_t* sums,
                       const ExcessLists& lists) {
    constexpr int64_t kChunk = Chunks::kMost;
    const int64_t ahead = rows > 1 ? kChunk * kQuad / ((rows + kRows - 1) / kRows) : 0;
    for (int64_t chunk = 0; quads > 0; ++chunk, quads -= kChunk, a += kChunk * kQuad, b += kChunk * kPanel * kQuad) {
      const int64_t count = lesser(kChunk, quads);
      for (int r = 0; r < rows; r += kRows) {
        const Ahead next{b + kChunk * kPanel * kQuad + r / kRows * ahead * kPanel, ahead};
        multiply_rows(a + r * pitch, pitch, static_cast<int>(lesser(kRows, rows - r)), b, count, columns, sums + r * kPanel, next);
      }
      for (int64_t r = 0; r < rows; r += kTogether) {
        const uint32_t* const start = lists.start(r) + chunk;
        add_excess(lists.list(r) + start[0], lists.list(r) + start[1], b, sums + r * kPanel);
      }
    }
  }

 private:
  // Bytes of the next chunk to fetch beside each column of a tile: spread over its steps, else they wait for one another.
  struct Ahead {
    const int8_t* from;
    int64_t bytes;
  };

  // Takes what is beyond kMost from the larger digit of each pair of up to eight quads. A bit for each: whether there is any.
  static uint32_t split_eight(Digit* digits, int64_t quads, int8_t (&beyond)[8][kQuad]) {
    auto* const at = reinterpret_cast<__m256i*>(digits);
    const __m256i both = _mm256_loadu_si256(at);  // (8, 2) pairs
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(both, 8), 8), odd = _mm256_srai_epi16(both, 8);
    const __m256i sum = _mm256_add_epi16(even, odd), most = _mm256_set1_epi16(kMost), least = _mm256_set1_epi16(-kMost);
    const __m256i more = _mm256_sub_epi16(sum, _mm256_max_epi16(_mm256_min_epi16(sum, most), least));
    const __m256i of_odd = _mm256_cmpgt_epi16(_mm256_abs_epi16(odd), _mm256_abs_epi16(even));
    const __m256i low = _mm256_and_si256(_mm256_andnot_si256(of_odd, more), _mm256_set1_epi16(0xff));
    const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(quads)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i taken = _mm256_and_si256(_mm256_or_si256(low, _mm256_slli_epi16(_mm256_and_si256(of_odd, more), 8)), inside);
    const __m256i none = _mm256_cmpeq_epi32(taken, _mm256_setzero_si256());  // (8)
    _mm256_storeu_si256(at, _mm256_sub_epi8(both, taken));
    _mm256_store_si256(reinterpret_cast<__m256i*>(beyond), taken);
    return ~static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(none))) & 0xff;
  }

  static void multiply_rows(const Digit* a, int64_t pitch, int rows, const int8_t* b, int64_t quads, int columns, int32_t* sums,
                            Ahead next) {
    switch (rows) {
      case 4: return multiply_tile<4, 2>(a, pitch, b, quads, columns, sums, next);
      case 3: return multiply_tile<3, 2>(a, pitch, b, quads, columns, sums, next);
      case 2: return multiply_tile<2, 2>(a, pitch, b, quads, columns, sums, next);
      default: break;
    }
    return next.bytes ? multiply_tile<1, 4>(a, pitch, b, quads, columns, sums, next) : multiply_tile<1, 8>(a, pitch, b, quads, columns, sums, next);
  }

  template <int Rows, int Vectors>
  static void multiply_tile(const Digit* a, int64_t pitch, const int8_t* b, int64_t quads, int columns, int32_t* sums, Ahead next) {
    constexpr int kColumns = 8 * Vectors;
    for (int j = 0; j < columns; j += kColumns) {
      slice<Rows, Vectors>(a, pitch, b + j * kQuad, quads, sums + j, next.from + j * next.bytes, next.bytes * kColumns / quads);
    }
  }

  static __m256i load(const int8_t* from) {  // of B, unsigned
    return _mm256_xor_si256(_mm256_load_si256(reinterpret_cast<const __m256i*>(from)), _mm256_set1_epi8(-128));
  }

  static __m256i products(__m256i right, __m256i left) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(right, left), _mm256_set1_epi16(1));  // (8)
  }

  // Adds to rows times 8 Vectors columns. Inlined, it would lack registers for the accumulators and addresses. `ahead` is fetched
  // meanwhile, `step` bytes at a time, but not beside 64 columns: a single row is bound by bytes already.
  template <int Rows, int Vectors>
  __attribute__((noinline)) static void slice(const Digit* a, int64_t pitch, const int8_t* b, int64_t quads, int32_t* out,
                                              const int8_t* ahead, int64_t step) {
    __m256i sum[Rows][Vectors];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[r][v] = _mm256_load_si256(reinterpret_cast<const __m256i*>(out + r * kPanel) + v);
    }
    for (int64_t q = 0; q < quads; ++q, a += kQuad, b += kPanel * kQuad) {
      if constexpr (Vectors < 8) __builtin_prefetch(ahead), ahead += step;
      __m256i left[Rows];
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) left[r] = four_bytes(a + r * pitch);
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) {
        const __m256i right = load(b + v * 32);  // (8, 4)
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) add(sum[r][v], products(right, left[r]));
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) _mm256_store_si256(reinterpret_cast<__m256i*>(out + r * kPanel) + v, sum[r][v]);
    }
  }

  // sums (kTogether, kPanel) += what was split off, times a chunk of the panel.
  __attribute__((noinline)) static void add_excess(const Excess* from, const Excess* end, const int8_t* b, int32_t* sums) {
    constexpr int kVectors = kPanel / 8;
    while (from < end) {
      const uint32_t row = from->at % kTogether;
      auto* const to = reinterpret_cast<__m256i*>(sums + row * kPanel);
      __m256i sum[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[v] = _mm256_load_si256(to + v);
      do {
        const __m256i left = four_bytes(from->digits);
        const int8_t* const right = b + from->at / kTogether * kPanel * kQuad;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) add(sum[v], products(load(right + v * 32), left));
        ++from;
      } while (from < end && from->at % kTogether == row);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) _mm256_store_si256(to + v, sum[v]);
    }
  }
};

// vpmaddubsw of nibbles does not saturate, and 16 bits hold eight of its sums: 16 * 15 * 128 < 2^15.
struct Nibbles {
  using Micro = Streams2;
  static constexpr int kRows = 4;

  template <int Rows>
  __attribute__((noinline)) static void tile(const int8_t* a, int64_t pitch, const int8_t* b, int64_t steps, int columns, int32_t* sums) {
    constexpr int kVectors = 8 / Rows;  // of 8 columns: 8 accumulators
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (int j = 0; j < columns; j += 8 * kVectors) {
      for (int64_t i = 0; i < steps; i += 4) {
        __m256i sum[Rows][kVectors] = {};  // (8, 2)
        for (int64_t step = i; step < lesser(i + 4, steps); ++step) {
          const int8_t *const x = a + step * 2 * kQuad, *const y = b + (step * kPanel + j) * kQuad;
          for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
              const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(y) + v);  // (8, 4)
              const __m256i right = _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, low);
#pragma GCC unroll 4
              for (int r = 0; r < Rows; ++r) add16(sum[r][v], _mm256_maddubs_epi16(right, four_bytes(x + r * pitch + half * kQuad)));
            }
          }
        }
#pragma GCC unroll 8
        for (int n = 0; n < Rows * kVectors; ++n) {
          auto* const to = reinterpret_cast<__m256i*>(sums + n / kVectors * kPanel + j) + n % kVectors;
          *to = _mm256_add_epi32(*to, _mm256_madd_epi16(sum[n / kVectors][n % kVectors], ones));
        }
      }
    }
  }
};

}  // namespace
