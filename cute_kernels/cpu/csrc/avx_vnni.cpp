// The engine on AVX-VNNI: vpdpbusd of AVX512-VNNI in vectors of 256 bits, on processors that have AVX2 and not AVX-512.
//
// As in avx512.cpp the dense operand is staged in offset form (unsigned). A signed digit of the sparse operand is the signed side; for
// an unsigned digit the dense bytes become signed again (x ^ 0x80) and the sparse digit is the unsigned side.
#include <immintrin.h>

#include "attention.hpp"
#include "correct.hpp"
#include "dense.hpp"
#include "dense_to_sparse.hpp"
#include "digits.hpp"
#include "direct.hpp"
#include "estimate.hpp"
#include "quantize.hpp"
#include "sddmm.hpp"
#include "select.hpp"
#include "spmm.hpp"
#include "vectors256.hpp"

namespace {

// GCC copies the accumulators of _mm256_dpbusd_avx_epi32 from register to register. Bytes of `left` are unsigned.
template <class Vector>
inline void dot_bytes(Vector& sum, Vector left, Vector right) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(left), "xm"(right));
}

struct AvxVnni : Tiles256<AvxVnni, uint8_t> {
  static constexpr bool kOffset = true;
  static constexpr int kColumns = 64, kParts = 1, kSums = kColumns;
  static constexpr int64_t kScratchBytes = kChunk * 4 + kTileRows * kChunk;  // eight times each column; values

  // Unpacks work inside 128-bit lanes: of each 32 columns the lower lane holds 0-3, 8-11, 16-19 and 24-27, the upper one the others.
  static void place(const uint8_t* bytes, int64_t, int64_t rows, bool, uint8_t* panel) {
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    for (int64_t i = 0; i < rows * kPanel; i += 32) {
      const __m256i columns = _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes + i));
      _mm256_store_si256(reinterpret_cast<__m256i*>(panel + i), _mm256_permutevar8x32_epi32(columns, order));
    }
  }

  // Sixty-four bytes of each of up to 64 runs to rows of a panel, placed; absent runs become any bytes. In each 128-bit lane four
  // rounds of unpacks interleave sixteen runs: those of a lane of columns.
  static void turn(const uint8_t* from, int64_t run_bytes, int64_t width, uint8_t flip, uint8_t* panel) {
    const __m256i flips = _mm256_set1_epi8(static_cast<char>(flip));
    for (int64_t lane = 0; lane < 4 && lane / 2 * 32 < width; ++lane, panel += 16) {
      for (int64_t k = 0; k < 64; k += 32) {
        __m256i x[16], y[16];
#pragma GCC unroll 16
        for (int e = 0; e < 16; ++e) {
          const int64_t run = lane / 2 * 32 + e / 4 * 8 + lane % 2 * 4 + e % 4;
          const auto* const at = reinterpret_cast<const __m256i*>(from + lesser(run, width - 1) * run_bytes + k);
          x[e] = _mm256_xor_si256(_mm256_loadu_si256(at), flips);
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
#pragma GCC unroll 16
        for (int e = 0; e < 16; ++e) {  // lane i holds row 16 i + e
          auto* const to = reinterpret_cast<__m128i*>(panel + (k + e) * kPanel);
          _mm_store_si128(to, _mm256_castsi256_si128(x[e]));
          _mm_store_si128(to + 16 * kPanel / 16, _mm256_extracti128_si256(x[e], 1));
        }
      }
    }
  }

  static void copy_sixteen(const uint8_t* from, bool, uint8_t* to) { _mm_store_si128(reinterpret_cast<__m128i*>(to), sixteen_bytes(from)); }

  static const uint8_t* columns_from(const RowTile& at, int column) { return at.panel + column / 32 * 32; }

  template <bool Signed>
  static __m256i dense_side(__m256i bytes) {
    return Signed ? bytes : _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
  }

  template <bool Signed>
  static void multiply_add(__m256i& sum, __m256i sparse, __m256i dense) {
    Signed ? dot_bytes(sum, dense, sparse) : dot_bytes(sum, sparse, dense);
  }

  // Sixteen columns, the lower or upper ones of 32, of four panel rows.
  template <int Rows, bool Signed, bool High>
  __attribute__((always_inline)) static void step(const uint8_t* panel, const int32_t* eighths, const uint8_t* a, __m256i (&sum)[Rows][2]) {
    const auto row = [&](int k) { return reinterpret_cast<const __m256i*>(panel + int64_t{eighths[k]} * 8); };
    const __m256i k0 = _mm256_load_si256(row(0)), k2 = _mm256_load_si256(row(2));
    const __m256i k01 = High ? _mm256_unpackhi_epi8(k0, *row(1)) : _mm256_unpacklo_epi8(k0, *row(1));  // (2, 8, 2)
    const __m256i k23 = High ? _mm256_unpackhi_epi8(k2, *row(3)) : _mm256_unpacklo_epi8(k2, *row(3));  // (2, 8, 2)
    const __m256i b0 = dense_side<Signed>(_mm256_unpacklo_epi16(k01, k23));                            // (8, 4)
    const __m256i b1 = dense_side<Signed>(_mm256_unpackhi_epi16(k01, k23));                            // (8, 4)
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const __m256i left = four_bytes(a + r * kChunk);
      multiply_add<Signed>(sum[r][0], left, b0);
      multiply_add<Signed>(sum[r][1], left, b1);
    }
  }

  using Sixteen = __m128i;

  template <bool Signed>
  static uint8_t digit_of(uint8_t byte) { return Signed ? byte : byte ^ 0x80; }

  template <bool Signed>
  static void add_sixteen(__m128i& sum, __m128i values, __m128i right, bool) {
    Signed ? dot_bytes(sum, right, values) : dot_bytes(sum, values, right);
  }

  // Four rows of B for each four columns of A, interleaved: a 32-bit lane holds four k of one column of B, eight to a vector.
  template <int Vectors, bool Signed>
  static void gather_few(const FewTile& at, const int32_t* columns, int64_t count, uint8_t* out) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    const auto row = [&](int k) { return at.panel + int64_t{columns[k]} * (8 * Vectors); };
    auto* to = reinterpret_cast<__m256i*>(out);
    for (int64_t k = 0; k < count; k += kQuad, columns += kQuad, to += Vectors) {
      if constexpr (Vectors == 1) {
        const __m128i k01 = _mm_unpacklo_epi8(eight_bytes(row(0)), eight_bytes(row(1))), k23 = _mm_unpacklo_epi8(eight_bytes(row(2)), eight_bytes(row(3)));  // (8, 2)
        _mm256_store_si256(to, dense_side<Signed>(_mm256_set_m128i(_mm_unpackhi_epi16(k01, k23), _mm_unpacklo_epi16(k01, k23))));  // (8, 4)
      } else {
        const __m256i k02 = _mm256_inserti128_si256(_mm256_castsi128_si256(sixteen_bytes(row(0))), sixteen_bytes(row(2)), 1);  // (2, 16)
        const __m256i k13 = _mm256_inserti128_si256(_mm256_castsi128_si256(sixteen_bytes(row(1))), sixteen_bytes(row(3)), 1);  // (2, 16)
        const __m256i low = _mm256_permute4x64_epi64(_mm256_unpacklo_epi8(k02, k13), 0xd8);    // (2, 2, 4, 2): columns 4 i + j, k
        const __m256i high = _mm256_permute4x64_epi64(_mm256_unpackhi_epi8(k02, k13), 0xd8);  // likewise
        _mm256_store_si256(to, dense_side<Signed>(_mm256_shuffle_epi8(low, order)));           // (8, 4)
        _mm256_store_si256(to + 1, dense_side<Signed>(_mm256_shuffle_epi8(high, order)));      // (8, 4)
      }
    }
  }

  // sums += rows of A from `first` on times what was gathered for a chunk.
  template <int Rows, int Vectors, bool Signed>
  __attribute__((noinline)) static void few_rows(const FewTile& at, int first, const uint8_t* values, int64_t count, const uint8_t* gathered) {
    const int stride = at.stride;
    __m256i sum[Rows][Vectors];
    auto* const sums = reinterpret_cast<__m256i*>(at.sums + first * 8 * Vectors);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) sum[r][v] = _mm256_load_si256(sums + r * Vectors + v);
    }
    const auto* right = reinterpret_cast<const __m256i*>(gathered);
    values += first * stride;
    for (int64_t block = 0; block < count; block += stride, values += int64_t{stride} * at.vector_length) {
      for (int k = 0; k < stride; k += kQuad, right += Vectors) {
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          const __m256i left = four_bytes(values + r * stride + k);
#pragma GCC unroll 2
          for (int v = 0; v < Vectors; ++v) multiply_add<Signed>(sum[r][v], left, _mm256_load_si256(right + v));
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) _mm256_store_si256(sums + r * Vectors + v, sum[r][v]);
    }
  }
};

// Digits of A are staged with the offset 128, unsigned; accumulators start at -128 times the sums of the columns of B.
struct Product {
  using Micro = AvxVnni;
  using Digit = uint8_t;
  static constexpr Digit kOffset = 128;
  static constexpr int kRowOffset = 0;
  static constexpr bool kSplits = false;
  static constexpr int kRows = 6, kStep = kQuad;  // times 16 columns: 12 accumulators
  static constexpr int64_t kBlockRows = magicube::kDirectRows;

  // sums (rows, kPanel) = start (kPanel) + a b. Chunks of k, whose part of the panel stays in L1 beside the next one's, are multiplied by
  // all rows.
  static void multiply(const Digit* a, int64_t pitch, int rows, const int8_t* b, int64_t quads, int columns, const int32_t* start,
                       int32_t* sums) {
    constexpr int64_t kChunk = 64;
    const int64_t ahead = kChunk * kQuad / ((rows + kRows - 1) / kRows);
    for (int r = 0; r < rows; ++r) std::memcpy(sums + r * kPanel, start, kPanel * sizeof *start);
    for (; quads > 0; quads -= kChunk, a += kChunk * kQuad, b += kChunk * kPanel * kQuad) {
      for (int r = 0; r < rows; r += kRows) {
        const Ahead next{b + kChunk * kPanel * kQuad + r / kRows * ahead * kPanel, ahead};
        multiply_rows(lesser(kRows, rows - r), a + r * pitch, pitch, b, lesser(kChunk, quads), columns, sums + r * kPanel, next);
      }
    }
  }

 private:
  // Bytes of the next chunk to fetch beside each column of a tile: spread over its steps, else they wait for one another.
  struct Ahead {
    const int8_t* from;
    int64_t bytes;
  };

  static void multiply_rows(int64_t rows, const Digit* a, int64_t pitch, const int8_t* b, int64_t quads, int columns, int32_t* sums,
                            Ahead next) {
    switch (rows) {
      case 6: return tile<6, 2>(a, pitch, b, quads, columns, sums, next);
      case 5: return tile<5, 2>(a, pitch, b, quads, columns, sums, next);
      case 4: return tile<4, 2>(a, pitch, b, quads, columns, sums, next);
      case 3: return tile<3, 2>(a, pitch, b, quads, columns, sums, next);
      case 2: return tile<2, 4>(a, pitch, b, quads, columns, sums, next);
      default: return tile<1, 8>(a, pitch, b, quads, columns, sums, next);
    }
  }

  template <int Rows, int Vectors>
  static void tile(const Digit* a, int64_t pitch, const int8_t* b, int64_t quads, int columns, int32_t* sums, Ahead next) {
    constexpr int kColumns = 8 * Vectors;
    for (int j = 0; j < columns; j += kColumns) {
      slice<Rows, Vectors>(a, pitch, b + j * kQuad, quads, sums + j, next.from + j * next.bytes, next.bytes * kColumns / quads);
    }
  }

  // Inlined, it would lack registers. `ahead` is fetched meanwhile, `step` bytes at a time.
  template <int Rows, int Vectors>
  __attribute__((noinline)) static void slice(const Digit* a, int64_t pitch, const int8_t* b, int64_t quads, int32_t* out,
                                              const int8_t* ahead, int64_t step) {
    __m256i sum[Rows][Vectors];
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[r][v] = _mm256_load_si256(reinterpret_cast<const __m256i*>(out + r * kPanel) + v);
    }
    for (int64_t q = 0; q < quads; ++q, a += kQuad, b += kPanel * kQuad) {
      for (int64_t i = 0; i < (Vectors + 1) / 2; ++i) __builtin_prefetch(ahead + i * 64);
      ahead += step;
      __m256i right[Vectors];
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) right[v] = _mm256_load_si256(reinterpret_cast<const __m256i*>(b) + v);  // (8, 4)
#pragma GCC unroll 6
      for (int r = 0; r < Rows; ++r) {
        const __m256i left = four_bytes(a + r * pitch);  // (8, 4), the same four k
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) dot_bytes(sum[r][v], left, right[v]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) _mm256_store_si256(reinterpret_cast<__m256i*>(out + r * kPanel) + v, sum[r][v]);
    }
  }
};

// Nibbles are the unsigned operand.
struct Nibbles {
  using Micro = AvxVnni;
  static constexpr int kRows = 4;

  template <int Rows>
  __attribute__((noinline)) static void tile(const int8_t* a, int64_t pitch, const int8_t* b, int64_t steps, int columns, int32_t* sums) {
    constexpr int kVectors = 8 / Rows;  // of 8 columns: 8 accumulators
    const __m256i low = _mm256_set1_epi8(15);
    for (int j = 0; j < columns; j += 8 * kVectors) {
      __m256i sum[Rows][kVectors];
#pragma GCC unroll 8
      for (int n = 0; n < Rows * kVectors; ++n) {
        sum[n / kVectors][n % kVectors] = _mm256_load_si256(reinterpret_cast<const __m256i*>(sums + n / kVectors * kPanel + j) + n % kVectors);
      }
      for (int64_t step = 0; step < steps; ++step) {
        const int8_t *const x = a + step * 2 * kQuad, *const y = b + (step * kPanel + j) * kQuad;
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) {
            const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(y) + v);  // (8, 4)
            const __m256i right = _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, low);
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) dot_bytes(sum[r][v], right, four_bytes(x + r * pitch + half * kQuad));
          }
        }
      }
#pragma GCC unroll 8
      for (int n = 0; n < Rows * kVectors; ++n) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(sums + n / kVectors * kPanel + j) + n % kVectors, sum[n / kVectors][n % kVectors]);
      }
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
const Engine kAvxVnni = {"avx_vnni", &spmm<AvxVnni>, &spmm_transposed, &sddmm<AvxVnni>, &attention<AvxVnni>, &quantize, &digits, &compress,
                         &probe_right<Doubles>, &judge<Doubles>, &bound_sums<Doubles>, &pack_digits, &probe_digits<Doubles>,
                         &direct<Direct>, &dense<Product, Nibbles>, &split_residual, &magnitude_sums, &select_entries, &correct<AvxVnni>,
                         &is_structure_valid, AvxVnni::kColumns, AvxVnni::kParts, AvxVnni::kScratchBytes, sizeof(AvxVnni::Dot),
                         int64_t{1} << 26, AvxVnni::kQuantizesPanels};
}
