// Products with one or with up to sixteen columns of B on AVX512-VNNI.
//
// They are bound by the bytes of A. One column: its entries are put one behind another, by a bit per column of A where there are
// masks, and multiplied by blocks of values. Sixteen: a row of B for each column of A, four of them interleaved.
#pragma once

#include <immintrin.h>

#include "spmm.hpp"

namespace {

// GCC moves the accumulators of _mm512_dpbusd_epi32 to memory, which halves the speed. Bytes of `left` are unsigned.
template <class Vector>
inline void dot_bytes(Vector& sum, Vector left, Vector right) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right));
}

inline int32_t four_bytes(const uint8_t* from) {
  int32_t all;
  std::memcpy(&all, from, sizeof all);
  return all;
}

struct FewColumns512 {
  static constexpr bool kFew = true, kKeeps = true;
  static constexpr int kFewWidth = 16;

  template <bool Signed>
  static __m512i multiply_add(__m512i sum, __m512i sparse, __m512i dense) {
    Signed ? dot_bytes(sum, dense, sparse) : dot_bytes(sum, sparse, dense);
    return sum;
  }

  template <bool Signed>
  static __m512i dense_side(__m512i bytes) {
    return Signed ? bytes : _mm512_xor_si512(bytes, _mm512_set1_epi8(static_cast<char>(0x80)));
  }

  // The bytes of x whose bits are set, one behind another. vpcompressb waits for the old value of its destination, zeroed or not:
  // four destinations take turns.
  __attribute__((target("avx512vbmi2"))) static void keep(const uint64_t* masks, int64_t words, const uint8_t* x, uint8_t* to) {
    for (; words >= 4; words -= 4, masks += 4, x += 4 * 64) {
      __m512i kept[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) kept[i] = _mm512_maskz_compress_epi8(masks[i], _mm512_loadu_si512(x + i * 64));
      asm volatile("" : "+v"(kept[0]), "+v"(kept[1]), "+v"(kept[2]), "+v"(kept[3]));
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        _mm512_storeu_si512(to, kept[i]);
        to += __builtin_popcountll(masks[i]);
      }
    }
    for (; words > 0; --words, ++masks, x += 64) {
      _mm512_storeu_si512(to, _mm512_maskz_compress_epi8(*masks, _mm512_loadu_si512(x)));
      to += __builtin_popcountll(*masks);
    }
  }

  // The entries of one column of B at the columns of a vector row.
  static void gather_one(const FewTile& at, uint8_t* x) {
    for (int64_t i = 0; i < at.count; i += 8) {  // whole blocks
#pragma GCC unroll 8
      for (int64_t j = i; j < i + 8; ++j) x[j] = at.panel[at.columns[j]];
    }
  }

  // Sums of rows of values times what was gathered, sixteen at a time.
  template <int Rows, bool Signed>
  static void dots_one(const FewTile& at, const uint8_t* x) {
    __m128i sum[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) sum[r] = _mm_setzero_si128();
    const uint8_t* block = at.values;
    for (int64_t first = 0; first < at.count; first += at.stride, block += int64_t{at.stride} * at.vector_length) {
      for (int i = 0; i < at.stride; i += 16) {
        __m128i right = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + first + i));
        if (!Signed) right = _mm_xor_si128(right, _mm_set1_epi8(static_cast<char>(0x80)));
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          const __m128i left = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + r * at.stride + i));
          Signed ? dot_bytes(sum[r], right, left) : dot_bytes(sum[r], left, right);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const __m128i two = _mm_add_epi32(sum[r], _mm_shuffle_epi32(sum[r], 0x4e));
      at.sums[r] = at.start[r] + _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
    }
  }

  static __m128i sixteen(const FewTile& at, int32_t column) {
    return _mm_load_si128(reinterpret_cast<const __m128i*>(at.panel + int64_t{column} * 16));
  }

  // Sixteen columns of B: four of its rows, interleaved, times four values of each row of A.
  template <int Rows, bool Signed>
  __attribute__((noinline)) static void few_sixteen(const FewTile& at) {
    const __m512i dwords = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m512i sum[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) sum[r] = _mm512_set1_epi32(at.start[r]);
    const uint8_t* block = at.values;
    const int32_t* columns = at.columns;
    const int64_t stride = at.stride;
    for (const int32_t* const stop = columns + at.count; columns < stop; block += stride * at.vector_length) {
      for (const uint8_t *values = block, *const end = block + stride; values < end; values += kQuad, columns += kQuad) {
        __m512i k = _mm512_castsi128_si512(sixteen(at, columns[0]));
        k = _mm512_mask_broadcast_i32x4(k, 0x00f0, sixteen(at, columns[1]));
        k = _mm512_mask_broadcast_i32x4(k, 0x0f00, sixteen(at, columns[2]));
        k = _mm512_mask_broadcast_i32x4(k, 0xf000, sixteen(at, columns[3]));  // (4, 16)
        const __m512i right = dense_side<Signed>(_mm512_shuffle_epi8(_mm512_permutexvar_epi32(dwords, k), bytes));  // (16, 4)
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          const __m512i left = _mm512_set1_epi32(four_bytes(values + r * stride));
          Signed ? dot_bytes(sum[r], right, left) : dot_bytes(sum[r], left, right);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) _mm512_store_si512(at.sums + r * 16, sum[r]);
  }

  template <int Rows, bool Signed>
  static void few_as(const FewTile& at) {
    if (at.width == 16) return few_sixteen<Rows, Signed>(at);
    if (!at.columns) return dots_one<Rows, Signed>(at, at.panel);
    alignas(64) uint8_t x[magicube::kExactRun + kPanel];
    gather_one(at, x);
    dots_one<Rows, Signed>(at, x);
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

  static void few(const FewTile& at) { at.a_signed ? few_signed<true>(at) : few_signed<false>(at); }
};

}  // namespace
