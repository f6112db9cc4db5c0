// The engine on AVX2: bytes widen to 16 bits, and vpmaddwd adds pairs of products exactly. Dense products do not widen.
#include <immintrin.h>

#include "attention.hpp"
#include "avx2_dense.hpp"
#include "correct.hpp"
#include "dense_to_sparse.hpp"
#include "direct.hpp"
#include "estimate.hpp"
#include "sddmm.hpp"
#include "select.hpp"
#include "spmm.hpp"
#include "vectors256.hpp"

namespace {

struct Avx2 : Tiles256<Avx2, int16_t> {
  static constexpr bool kOffset = false;
  static constexpr int kColumns = 32, kParts = 2, kSums = kColumns * kParts;  // 16 bits of a column in a row of a part; of a row
  static constexpr int64_t kScratchBytes = kChunk * 4 + kTileRows * kChunk * 2;  // eight times each column; widened values

  // Unpacks work inside 128-bit lanes: of each 16 columns a lane holds 0-3 and 8-11, the other 4-7 and 12-15.
  static void place(const uint8_t* bytes, int64_t pitch, int64_t rows, bool is_signed, uint8_t* panel) {
    for (int64_t i = 0; i < rows; ++i, bytes += pitch, panel += kPanel) {
      for (int half = 0; half < 2; ++half) {
        const __m128i sixteen = _mm_load_si128(reinterpret_cast<const __m128i*>(bytes) + half);
        _mm256_store_si256(reinterpret_cast<__m256i*>(panel) + half, widen(_mm_shuffle_epi32(sixteen, 0xd8), is_signed));
      }
    }
  }

  // Sixty-four bytes of each of up to 32 runs to rows of a part of a panel, placed; absent runs become any bytes. In each 128-bit
  // lane four rounds of unpacks interleave sixteen runs.
  static void turn(const uint8_t* from, int64_t run_bytes, int64_t width, bool is_signed, uint8_t* panel) {
    for (int64_t run = 0; run < width; run += 16, panel += 32) {
      for (int64_t k = 0; k < 64; k += 32) {
        __m256i x[16], y[16];
#pragma GCC unroll 16
        for (int e = 0; e < 16; ++e) {
          const int64_t placed = run + ((e & 4) << 1 | (e & 8) >> 1 | (e & 3));
          x[e] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + lesser(placed, width - 1) * run_bytes + k));
        }
#pragma GCC unroll 4
        for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
          for (int e = 0; e < 8; ++e) {
            y[2 * e] = _mm256_unpacklo_epi8(x[e], x[e + 8]);
            y[2 * e + 1] = _mm256_unpackhi_epi8(x[e], x[e + 8]);
          }
#pragma GCC unroll 16
          for (int e = 0; e < 16; ++e) x[e] = y[e];
        }
        auto* const to = reinterpret_cast<__m256i*>(panel + k * kPanel);
#pragma GCC unroll 16
        for (int e = 0; e < 16; ++e) {  // lane i holds row 16 i + e
          _mm256_store_si256(to + 2 * e, widen(_mm256_castsi256_si128(x[e]), is_signed));
          _mm256_store_si256(to + 2 * (16 + e), widen(_mm256_extracti128_si256(x[e], 1), is_signed));
        }
      }
    }
  }

  // Sixteen columns of two panel rows. GCC would load the second row to a register: one more instruction for a full front end.
  static void interleave(const uint8_t* row0, const uint8_t* row1, __m256i& low, __m256i& high) {
    const __m256i k0 = _mm256_load_si256(reinterpret_cast<const __m256i*>(row0));
    const auto& k1 = *reinterpret_cast<const __m256i*>(row1);
    asm("vpunpcklwd %2, %1, %0" : "=x"(low) : "x"(k0), "m"(k1));
    asm("vpunpckhwd %2, %1, %0" : "=x"(high) : "x"(k0), "m"(k1));
  }

  static void copy_sixteen(const uint8_t* from, bool is_signed, int16_t* to) { widen_sixteen(from, is_signed, to); }

  static const uint8_t* columns_from(const RowTile& at, int column) {
    return at.panel + column / kColumns * at.part_bytes + column % kColumns * 2;
  }

  // Sixteen columns of the panel rows of each pair.
  template <int Rows, bool, bool>
  __attribute__((always_inline)) static void step(const uint8_t* panel, const int32_t* eighths, const int16_t* a, __m256i (&sum)[Rows][2]) {
#pragma GCC unroll 4
    for (int k = 0; k < kAtOnce; k += 2) {
      __m256i b0, b1;  // (8, 2)
      interleave(panel + int64_t{eighths[k]} * 8, panel + int64_t{eighths[k + 1]} * 8, b0, b1);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const __m256i left = four_bytes(a + r * kChunk + k);
        add(sum[r][0], _mm256_madd_epi16(left, b0));
        add(sum[r][1], _mm256_madd_epi16(left, b1));
      }
    }
  }

  template <bool>
  static __m256i dense_side(__m256i digits) { return digits; }

  template <bool>
  static void multiply_add(__m256i& sum, __m256i left, __m256i right) { add(sum, _mm256_madd_epi16(left, right)); }

  using Sixteen = __m256i;

  template <bool Signed>
  static int16_t digit_of(uint8_t byte) { return Signed ? static_cast<int8_t>(byte) : static_cast<int16_t>(byte); }

  template <bool>
  static void add_sixteen(__m256i& sum, __m128i values, __m256i right, bool is_signed) {
    add(sum, _mm256_madd_epi16(widen(values, is_signed), right));
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
        _mm256_store_si256(to, widen(_mm_unpacklo_epi8(eight_bytes(k0), eight_bytes(k1)), Signed));
      } else {
        _mm256_store_si256(to, widen(_mm_unpacklo_epi8(sixteen_bytes(k0), sixteen_bytes(k1)), Signed));
        _mm256_store_si256(to + 1, widen(_mm_unpackhi_epi8(sixteen_bytes(k0), sixteen_bytes(k1)), Signed));
      }
    }
  }

  // sums += rows of A from `first` on times what was gathered for a chunk.
  template <int Rows, int Vectors, bool>
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
};

struct Direct {
  using Doubles = ::Doubles;
  using Floats = ::Floats;
  using Product = ::Product;
};

}  // namespace

namespace magicube {
const Engine kAvx2 = {"avx2", &spmm<Avx2>, &spmm_transposed, &sddmm<Avx2>, &attention<Avx2>, &quantize, &digits, &compress,
                      &probe_right<Doubles>, &judge<Doubles>, &bound_sums<Doubles>, &pack_digits, &probe_digits<Doubles>,
                      &direct<Direct>, &dense<Product, Nibbles>, &split_residual, &magnitude_sums, &select_entries, &correct<Avx2>, &is_structure_valid,
                      Avx2::kColumns, Avx2::kParts, Avx2::kScratchBytes, sizeof(Avx2::Dot), int64_t{1} << 25, Avx2::kQuantizesPanels};
}
