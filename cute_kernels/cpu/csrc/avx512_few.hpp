// Products with one or with up to sixteen columns of B on AVX512-VNNI.
//
// They are bound by the bytes of A. One column: its entries are put one behind another, by a bit per column of A where there are
// masks, and multiplied by blocks of values. Eight and sixteen: a row of B for each column of A, eight and four of them interleaved.
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
  static constexpr int kFewWidth = 8;
  static constexpr int64_t kAhead = 8192;  // bytes of A fetched meanwhile: a row ends before the hardware has followed it

  template <bool Signed>
  static void multiply_add(__m512i& sum, __m512i sparse, __m512i dense) {  // a sum by value is copied from register to register
    Signed ? dot_bytes(sum, dense, sparse) : dot_bytes(sum, sparse, dense);
  }

  // The same four values of A in all lanes.
  template <bool Signed>
  static void dot_four(__m512i& sum, __m512i dense, const uint8_t* four) {
    if (Signed) asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(dense), "m"(*reinterpret_cast<const int32_t*>(four)));
    else dot_bytes(sum, _mm512_set1_epi32(four_bytes(four)), dense);
  }

  template <bool Signed>
  static __m512i dense_side(__m512i bytes) {
    return Signed ? bytes : _mm512_xor_si512(bytes, _mm512_set1_epi8(static_cast<char>(0x80)));
  }

  // vpcompressb, of VBMI2: a function that GCC compiles for that would not be inlined.
  static __m512i compress(uint64_t mask, const uint8_t* x) {
    const __m512i bytes = _mm512_loadu_si512(x);
    __m512i kept;
    asm("vpcompressb %1, %0%{%2%}%{z%}" : "=v"(kept) : "v"(bytes), "Yk"(mask));
    return kept;
  }

  // A store of 32 bytes seldom crosses a line.
  static uint8_t* store_kept(uint64_t mask, __m512i kept, int narrow, uint8_t* to) {
    const int here = __builtin_popcountll(mask);
    if (here > narrow) _mm512_storeu_si512(to, kept);
    else _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(kept));
    return to + here;
  }

  // The bytes of x whose bits are set, one behind another. vpcompressb waits for the old value of its destination, zeroed or not:
  // four destinations take turns.
  static uint8_t* keep_four(const uint64_t* masks, const uint8_t* x, int narrow, uint8_t* to) {
    __m512i kept[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) kept[i] = compress(masks[i], x + i * 64);
    asm volatile("" : "+v"(kept[0]), "+v"(kept[1]), "+v"(kept[2]), "+v"(kept[3]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) to = store_kept(masks[i], kept[i], narrow, to);
    return to;
  }

  static uint8_t* keep_one(const uint64_t* masks, const uint8_t* x, int narrow, uint8_t* to) {
    return store_kept(*masks, compress(*masks, x), narrow, to);
  }

  static void keep(const uint64_t* masks, const uint64_t* stop, const uint8_t* x, int narrow, uint8_t* to) {
    for (; masks + 4 <= stop; masks += 4, x += 256) to = keep_four(masks, x, narrow, to);
    for (; masks < stop; ++masks, x += 64) to = keep_one(masks, x, narrow, to);
  }

  // The entries of one column of B at the columns of a vector row.
  static void gather_one(const FewTile& at, uint8_t* x) {
    for (int64_t i = 0; i < at.count; i += 8) {  // whole blocks
#pragma GCC unroll 8
      for (int64_t j = i; j < i + 8; ++j) x[j] = at.panel[at.columns[j]];
    }
  }

  // A row of a block of what was gathered, once for each row of values in a vector.
  template <int Stride>
  static __m512i repeated(const uint8_t* x) {
    if (Stride == 16) return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    if (Stride == 32) return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    return _mm512_loadu_si512(x);
  }

  // The lanes of a row, added to four.
  template <int Stride>
  static __m128i row_of(const __m512i* sum, int r) {
    const __m512i all = sum[r * Stride / 64];
    const __m256i half = r * Stride % 64 < 32 ? _mm512_castsi512_si256(all) : _mm512_extracti64x4_epi64(all, 1);
    if (Stride == 16) return r % 2 ? _mm256_extracti128_si256(half, 1) : _mm256_castsi256_si128(half);
    const __m256i both = Stride == 32 ? half : _mm256_add_epi32(half, _mm512_extracti64x4_epi64(all, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  }

  // Sums of rows of values times what was gathered: the rows of a block fill whole vectors, or a part of one. What the next row
  // keeps is kept between the blocks, in equal shares.
  template <int Rows, int Stride, bool Signed, bool Keeps>
  static void dots_one(const FewTile& at, const uint8_t* x) {
    constexpr int kBytes = Rows * Stride, kVectors = (kBytes + 63) / 64;
    constexpr __mmask64 kPart = kBytes < 64 ? (uint64_t{1} << kBytes % 64) - 1 : ~uint64_t{0};
    __m512i sum[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] = _mm512_setzero_si512();
    const int64_t step = (at.next.words & -4) * Stride, full = 4 * at.count, skip = int64_t{Stride} * at.vector_length;
    const uint64_t* masks = at.next.masks;
    const uint8_t* from = at.next.x;
    const int narrow = at.next.narrow;
    uint8_t* to = at.next.to;  // in registers: a store through it could change a struct
    if (Keeps) {
      for (const uint64_t* const stop = masks + at.next.words % 4; masks < stop; ++masks, from += 64) to = keep_one(masks, from, narrow, to);
    }
    int64_t due = full - 1;  // words, times what is stored: each four as early as it can be, for the next row waits for these stores
    const uint8_t* block = at.values;
    for (const uint8_t* const stop = x + at.count; x < stop; x += Stride, block += skip) {
      const __m512i right = dense_side<Signed>(repeated<Stride>(x));
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) multiply_add<Signed>(sum[v], _mm512_maskz_loadu_epi8(kPart, block + v * 64), right);
      if (!Keeps) continue;
      for (due += step; due >= full; due -= full, masks += 4, from += 256) to = keep_four(masks, from, narrow, to);
    }
    if (Keeps && at.count == 0) keep(masks, at.next.masks + at.next.words, from, narrow, to);
#pragma GCC unroll 2
    for (int r = 0; r < Rows; r += 4) {
      __m128i row[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) row[i] = r + i < Rows ? row_of<Stride>(sum, r + i) : _mm_setzero_si128();
      const __m128i four = _mm_hadd_epi32(_mm_hadd_epi32(row[0], row[1]), _mm_hadd_epi32(row[2], row[3]));
      const __m128i start = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at.start + r));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(at.sums + r), _mm_add_epi32(start, four));
    }
  }

  static __m128i sixteen(const FewTile& at, int32_t column) {
    return _mm_load_si128(reinterpret_cast<const __m128i*>(at.panel + int64_t{column} * 16));
  }

  // Four rows of sixteen columns of B, interleaved. With VBMI one instruction does it; a function that GCC compiles for VBMI would
  // not be inlined.
  template <bool HasVbmi>
  static __m512i quads_of_sixteen(const FewTile& at, const int32_t* columns) {
    __m512i k = _mm512_mask_broadcast_i32x4(_mm512_castsi128_si512(sixteen(at, columns[0])), 0x00f0, sixteen(at, columns[1]));
    k = _mm512_mask_broadcast_i32x4(k, 0x0f00, sixteen(at, columns[2]));
    k = _mm512_mask_broadcast_i32x4(k, 0xf000, sixteen(at, columns[3]));  // (4, 16)
    if (HasVbmi) {
      constexpr auto four = [](int column) { return 0x30201000 + column * 0x01010101; };
      const __m512i order = _mm512_setr_epi32(four(0), four(1), four(2), four(3), four(4), four(5), four(6), four(7), four(8), four(9),
                                              four(10), four(11), four(12), four(13), four(14), four(15));
      __m512i quads;
      asm("vpermb %1, %2, %0" : "=v"(quads) : "v"(k), "v"(order));
      return quads;  // (16, 4)
    }
    const __m512i dwords = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(dwords, k), bytes);  // (16, 4)
  }

  // What A has further on, to L2: rows of B need L1.
  template <int Rows, int Stride>
  static void fetch_ahead(const uint8_t* block, const int32_t* columns) {
#pragma GCC unroll 8
    for (int i = 0; i < Rows * Stride; i += 64) __builtin_prefetch(block + kAhead + i, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < Stride; i += 16) __builtin_prefetch(columns + kAhead / 8 + i, 0, 2);
  }

  // Sixteen columns of B: four of its rows, interleaved, times four values of each row of A.
  template <int Rows, int Stride, bool Signed, bool HasVbmi>
  __attribute__((noinline)) static void few_sixteen(const FewTile& at) {
    __m512i sum[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) sum[r] = _mm512_set1_epi32(at.start[r]);
    const uint8_t* block = at.values;
    const int32_t* columns = at.columns;
    const int64_t skip = int64_t{Stride} * at.vector_length;
    for (const int32_t* const stop = columns + at.used; columns < stop; block += skip) {
      fetch_ahead<Rows, Stride>(block, columns);
      for (const uint8_t *values = block, *const end = block + lesser(Stride, stop - columns); values < end; values += kQuad, columns += kQuad) {
        const __m512i right = dense_side<Signed>(quads_of_sixteen<HasVbmi>(at, columns));  // (16, 4)
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) dot_four<Signed>(sum[r], right, values + r * Stride);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) _mm512_store_si512(at.sums + r * 16, sum[r]);
  }

  // Eight rows of eight columns of B, transposed: bytes of two rows side by side, then words of four such pairs.
  static __m512i octets(const FewTile& at, const int32_t* columns) {
    const auto row = [&](int i) {
      int64_t bytes;
      std::memcpy(&bytes, at.panel + int64_t{columns[i]} * 8, sizeof bytes);
      return bytes;
    };
    __m512i k = _mm512_set1_epi64(row(0));
#pragma GCC unroll 8
    for (int i = 1; i < 8; ++i) k = _mm512_mask_set1_epi64(k, static_cast<__mmask8>(1 << i), row(i));  // (8, 8)
    const __m512i pairs = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
    const __m512i order = _mm512_set_epi16(31, 23, 15, 7, 30, 22, 14, 6, 29, 21, 13, 5, 28, 20, 12, 4, 27, 19, 11, 3, 26, 18, 10, 2,
                                           25, 17, 9, 1, 24, 16, 8, 0);
    return _mm512_permutexvar_epi16(order, _mm512_shuffle_epi8(k, pairs));  // (8, 8)
  }

  // Eight columns of B: eight of its rows, transposed, times eight values of each row of A. Sums of a column are two.
  template <int Rows, int Stride, bool Signed>
  __attribute__((noinline)) static void few_eight(const FewTile& at) {
    __m512i sum[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) sum[r] = _mm512_set1_epi64(static_cast<uint32_t>(at.start[r]));
    const uint8_t* block = at.values;
    const int32_t* columns = at.columns;
    const int64_t skip = int64_t{Stride} * at.vector_length;
    for (const int32_t* const stop = columns + at.used; columns < stop; block += skip) {
      fetch_ahead<Rows, Stride>(block, columns);
      for (const uint8_t *values = block, *const end = block + lesser(Stride, stop - columns); values < end; values += 8, columns += 8) {
        const __m512i right = dense_side<Signed>(octets(at, columns));  // (8, 8)
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          int64_t eight;
          std::memcpy(&eight, values + r * Stride, sizeof eight);
          multiply_add<Signed>(sum[r], _mm512_set1_epi64(eight), right);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const __m512i both = _mm512_add_epi32(sum[r], _mm512_srli_epi64(sum[r], 32));
      _mm256_store_si256(reinterpret_cast<__m256i*>(at.sums + r * 8), _mm512_cvtepi64_epi32(both));
    }
  }

  template <int Rows, int Stride, bool Signed>
  static void few_as(const FewTile& at) {
    if (at.width == 8) return few_eight<Rows, Stride, Signed>(at);
    if (at.width == 16) {
      return __builtin_cpu_supports("avx512vbmi") ? few_sixteen<Rows, Stride, Signed, true>(at) : few_sixteen<Rows, Stride, Signed, false>(at);
    }
    if (!at.columns && at.next.words) return dots_one<Rows, Stride, Signed, true>(at, at.panel);
    if (!at.columns) return dots_one<Rows, Stride, Signed, false>(at, at.panel);
    alignas(64) uint8_t x[magicube::kExactRun + kPanel];
    gather_one(at, x);
    dots_one<Rows, Stride, Signed, false>(at, x);
  }

  template <int Rows, bool Signed>
  static void few_rows(const FewTile& at) {
    if (at.stride == 16) return few_as<Rows, 16, Signed>(at);
    at.stride == 32 ? few_as<Rows, 32, Signed>(at) : few_as<Rows, 64, Signed>(at);
  }

  template <bool Signed>
  static void few_signed(const FewTile& at) {
    switch (at.rows) {
      case 8: return few_rows<8, Signed>(at);
      case 4: return few_rows<4, Signed>(at);
      case 2: return few_rows<2, Signed>(at);
      default: return few_rows<1, Signed>(at);
    }
  }

  static void few(const FewTile& at) { at.a_signed ? few_signed<true>(at) : few_signed<false>(at); }
};

}  // namespace
