// The engine on AVX512-VNNI: vpdpbusd multiplies unsigned by signed bytes, four k per 32-bit lane.
//
// The dense operand is staged in offset form (unsigned). A signed digit of the sparse operand is the signed side; for an
// unsigned digit the dense bytes become signed again (x ^ 0x80) and the sparse digit is the unsigned side.
#include <immintrin.h>

#include "amx.hpp"
#include "attention.hpp"
#include "avx512_few.hpp"
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

namespace {

struct Avx512 : FewColumns512 {
  static constexpr bool kOffset = true;
  static constexpr int kColumns = 64, kParts = 1;
  static constexpr bool kStreams = true, kWrites = true, kTurns = true, kQuantizesPanels = true;
  static constexpr int64_t kStreamBytes = magicube::kStreamBytes;
  static constexpr int kChunkGroups = magicube::kExactRun / kQuad;  // rows of A are split only where int32 would overflow
  static constexpr int64_t kScratchBytes = 0;

  // The unpacks below leave bytes 16 j + 4 q and the three after it in lane j of vector q: dwords are placed so that these are
  // columns 16 q + 4 j and the three after it.
  static void place(const uint8_t* bytes, int64_t, int64_t rows, bool, uint8_t* panel) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int64_t i = 0; i < rows * kPanel; i += kPanel) {
      _mm512_store_si512(panel + i, _mm512_permutexvar_epi32(order, _mm512_load_si512(bytes + i)));
    }
  }

  // Sixty-four bytes of each of up to 64 runs to rows of a panel, placed; absent runs become any bytes. In each 128-bit lane four
  // rounds of unpacks interleave sixteen runs: those of a slot of sixteen columns.
  static void turn(const uint8_t* from, int64_t run_bytes, int64_t width, uint8_t flip, uint8_t* panel) {
    const __m512i flips = _mm512_set1_epi8(static_cast<char>(flip));
    for (int64_t slot = 0; slot < 4; ++slot, panel += 16) {
      __m512i x[16], y[16];
#pragma GCC unroll 16
      for (int e = 0; e < 16; ++e) {
        const int64_t run = 16 * (e / 4) + 4 * slot + e % 4;
        x[e] = _mm512_xor_si512(_mm512_loadu_si512(from + lesser(run, width - 1) * run_bytes), flips);
      }
#pragma GCC unroll 4
      for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
        for (int e = 0; e < 8; ++e) {
          y[2 * e] = _mm512_unpacklo_epi8(x[e], x[e + 8]);
          y[2 * e + 1] = _mm512_unpackhi_epi8(x[e], x[e + 8]);
        }
#pragma GCC unroll 16
        for (int e = 0; e < 16; ++e) x[e] = y[e];
      }
#pragma GCC unroll 16
      for (int e = 0; e < 16; ++e) {  // lane i holds row 16 i + e
        uint8_t* const to = panel + e * kPanel;
        _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm512_castsi512_si128(x[e]));
        _mm_store_si128(reinterpret_cast<__m128i*>(to + 16 * kPanel), _mm512_extracti32x4_epi32(x[e], 1));
        _mm_store_si128(reinterpret_cast<__m128i*>(to + 32 * kPanel), _mm512_extracti32x4_epi32(x[e], 2));
        _mm_store_si128(reinterpret_cast<__m128i*>(to + 48 * kPanel), _mm512_extracti32x4_epi32(x[e], 3));
      }
    }
  }

  static void stream(const void* from, void* to, int64_t bytes) {
    for (int64_t i = 0; i < bytes / 64; ++i) _mm512_stream_si512(static_cast<__m512i*>(to) + i, _mm512_load_si512(static_cast<const __m512i*>(from) + i));
  }

  static void finish_streams() { _mm_sfence(); }  // orders streamed stores before other threads read them

  // Column -1, of a place without a vector, is what lies before the panel.
  static __m512i row(const uint8_t* panel, int32_t column) { return _mm512_load_si512(panel + int64_t{column} * kPanel); }

  // Vectors First, ... of the quads that four panel rows give: two unpacks of bytes and two of pairs for every two.
  template <bool Signed, int First, int Vectors>
  static void interleave(const __m512i k[4], __m512i b[Vectors]) {
    for (int q = 0; q < Vectors; q += 2) {
      const bool high = First + q == 2;
      const __m512i k01 = high ? _mm512_unpackhi_epi8(k[0], k[1]) : _mm512_unpacklo_epi8(k[0], k[1]);  // (4, 8, 2)
      const __m512i k23 = high ? _mm512_unpackhi_epi8(k[2], k[3]) : _mm512_unpacklo_epi8(k[2], k[3]);  // (4, 8, 2)
      b[q] = dense_side<Signed>(_mm512_unpacklo_epi16(k01, k23));                                      // (4, 4, 4)
      if constexpr (Vectors > 1) b[q + 1] = dense_side<Signed>(_mm512_unpackhi_epi16(k01, k23));       // (4, 4, 4)
    }
  }

  // The columns of vector q that the output has.
  static __mmask16 columns_of(int64_t width, int q) {
    const int64_t left = width - 16 * q;
    return static_cast<__mmask16>(left >= 16 ? 0xffff : (1 << (left > 0 ? left : 0)) - 1);
  }

  // Add what the groups of four columns of A from `columns` on give to Rows x Vectors accumulators, which fill half of the registers;
  // quads stay in registers. Storing them for a second use costs more than recomputing them: later loads stall behind stores 4 KiB
  // away (aliasing). Every loop over the accumulator array must unroll, or the compiler keeps it in memory; without the last one
  // GCC 12 copies all sums in each group, wherever more than one statement uses them later.
  // What is read of A next is fetched block by block: a row's at once would fill the buffers of misses.
  template <int Rows, bool Signed, int First, int Vectors>
  __attribute__((always_inline)) static void accumulate(const uint8_t* panel, const int32_t* columns, int64_t groups, const uint8_t* values,
                                                        int64_t stride, int vector_length, __m512i sum[Rows][Vectors]) {
    const int64_t skip = stride * (vector_length - 1);
    const uint8_t* values3 = values + 3 * stride;  // x86 adds 0, 1 or 2 strides in a load
    int in_block = static_cast<int>(stride) / kQuad;
    for (; groups > 0; --groups, columns += kQuad) {
      const __m512i k[4] = {row(panel, columns[0]), row(panel, columns[1]), row(panel, columns[2]),
                            row(panel, columns[3])};  // (4, 64)
      __m512i b[Vectors];
      interleave<Signed, First, Vectors>(k, b);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const uint8_t* const four_at = r < 3 ? values + r * stride : values3 + (r - 3) * stride;
        if constexpr (Vectors == 1) {
          dot_four<Signed>(sum[r][0], b[0], four_at);
          continue;
        }
        int32_t four;
        std::memcpy(&four, four_at, 4);
        const __m512i a = _mm512_set1_epi32(four);
#pragma GCC unroll 4
        for (int q = 0; q < Vectors; ++q) sum[r][q] = Signed ? _mm512_dpbusd_epi32(sum[r][q], b[q], a) : _mm512_dpbusd_epi32(sum[r][q], a, b[q]);
      }
      values += kQuad;
      values3 += kQuad;
      if (__builtin_expect(--in_block == 0, 0)) {  // unlikely branch: a second jump per group costs 5%
        if (First == 0) {
          for (int64_t i = 0; i < stride; i += 16) __builtin_prefetch(columns + kAhead / 8 + i);
          for (int64_t byte = 0; byte < stride * Rows; byte += 64) __builtin_prefetch(values + kAhead + byte);
        }
        values += skip;
        values3 += skip;
        in_block = static_cast<int>(stride) / kQuad;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int q = 0; q < Vectors; ++q) asm("" : "+v"(sum[r][q]));
    }
  }

  template <int Rows, bool Signed, int First, int Vectors>
  __attribute__((noinline)) static void pass(const RowTile& at) {
    __m512i sum[Rows][Vectors];
    int32_t* const sums = at.sums + First * 16;
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int q = 0; q < Vectors; ++q) {
        sum[r][q] = at.fresh ? _mm512_setzero_si512() : _mm512_load_si512(sums + r * kPanel + q * 16);
      }
    }
    accumulate<Rows, Signed, First, Vectors>(at.panel, at.columns, (at.count + kQuad - 1) / kQuad, at.values, at.stride, at.vector_length, sum);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int q = 0; q < Vectors; ++q) _mm512_store_si512(sums + r * kPanel + q * 16, sum[r][q]);
    }
  }

  // A sum as a result, int32 or scaled, to the columns of `mask`.
  template <bool Scales>
  __attribute__((always_inline)) static void put(__m512i sum, float scale, __m512 columns, float bias, bool streams, __mmask16 mask, float* to) {
    __m512 result = _mm512_castsi512_ps(sum);
    if (Scales) {
      const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scale));
      result = _mm512_add_ps(_mm512_mul_ps(scaled, columns), _mm512_set1_ps(bias));
    }
    if (streams) _mm512_stream_ps(to, result);
    else if (mask == 0xffff) _mm512_storeu_ps(to, result);  // one with a mask is slower
    else _mm512_mask_storeu_ps(to, mask, result);
  }

  // Rows of the vector row r from row v of its vectors on. Sums start at the negated offsets.
  template <int Rows, bool Signed, bool Scales, int First, int Vectors>
  __attribute__((noinline)) static void whole_pass(const WholeRows& at, int64_t r, int v, float* out) {
    const auto& a = at.a;
    const int64_t begin = a.row_start[r], row = r * a.vector_length + v, pitch = at.pitch, width = at.width;
    __m512i sum[Rows][Vectors];
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      sum[i][0] = _mm512_set1_epi32(-at.shift * static_cast<int32_t>(a.row_sums[row + i]));
#pragma GCC unroll 4
      for (int q = 1; q < Vectors; ++q) sum[i][q] = sum[i][0];
    }
    accumulate<Rows, Signed, First, Vectors>(at.panel, a.columns + begin, (a.row_end[r] - begin + kQuad - 1) / kQuad,
                                             a.planes + begin * a.vector_length + v * a.stride, a.stride, a.vector_length, sum);
    const bool streams = at.streams && width >= 16 * (First + Vectors);
    const float *const scales = at.row_scales ? at.row_scales + row : kOnes, *const biases = at.bias ? at.bias + row : kZeros;
    __mmask16 masks[Vectors];
    __m512 columns[Vectors];
#pragma GCC unroll 4
    for (int q = 0; q < Vectors; ++q) {
      masks[q] = columns_of(width, First + q);
      if (Scales) columns[q] = _mm512_maskz_loadu_ps(masks[q], at.column_scales + (First + q) * 16);
    }
    out += First * 16;
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i, out += pitch) {
#pragma GCC unroll 4
      for (int q = 0; q < Vectors; ++q) {
        put<Scales>(sum[i][q], scales[i], columns[q], biases[i], streams, masks[q], out + q * 16);
      }
    }
  }

  template <int Rows, bool Signed, bool Scales>
  static void whole_rows(const WholeRows& at, int64_t first, int64_t last, float* out) {
    for (int64_t r = first; r < last; ++r) {
      for (int v = 0; v < at.a.vector_length; v += Rows, out += Rows * at.pitch) {
        if (at.width <= 16) {
          whole_pass<Rows, Signed, Scales, 0, 1>(at, r, v, out);
        } else if (at.width <= 32) {
          whole_pass<Rows, Signed, Scales, 0, 2>(at, r, v, out);
        } else if (Rows < 8) {
          whole_pass<Rows < 8 ? Rows : 4, Signed, Scales, 0, 4>(at, r, v, out);
        } else {
          whole_pass<Rows, Signed, Scales, 0, 2>(at, r, v, out);
          at.width <= 48 ? whole_pass<Rows, Signed, Scales, 2, 1>(at, r, v, out) : whole_pass<Rows, Signed, Scales, 2, 2>(at, r, v, out);
        }
      }
    }
  }

  template <bool Signed, bool Scales>
  static void whole_as(const WholeRows& at, int64_t first, int64_t last, float* out) {
    switch (at.a.vector_length) {
      case 1: return whole_rows<1, Signed, Scales>(at, first, last, out);
      case 2: return whole_rows<2, Signed, Scales>(at, first, last, out);
      case 4: return whole_rows<4, Signed, Scales>(at, first, last, out);
      default: return whole_rows<8, Signed, Scales>(at, first, last, out);
    }
  }

  static void whole(const WholeRows& at, int64_t first, int64_t last, float* out) {
    if (at.scales) at.a.is_signed ? whole_as<true, true>(at, first, last, out) : whole_as<false, true>(at, first, last, out);
    else at.a.is_signed ? whole_as<true, false>(at, first, last, out) : whole_as<false, false>(at, first, last, out);
  }

  template <int Rows, bool Signed>
  static void tile_rows(const RowTile& at) {
    if (at.width <= 16) return pass<Rows, Signed, 0, 1>(at);
    if (at.width <= 32) return pass<Rows, Signed, 0, 2>(at);
    if (Rows < 8) return pass<Rows < 8 ? Rows : 4, Signed, 0, 4>(at);
    pass<Rows, Signed, 0, 2>(at);
    at.width <= 48 ? pass<Rows, Signed, 2, 1>(at) : pass<Rows, Signed, 2, 2>(at);
  }

  template <bool Signed>
  static void tile_as(const RowTile& at) {
    switch (at.rows) {
      case 8: return tile_rows<8, Signed>(at);
      case 4: return tile_rows<4, Signed>(at);
      case 2: return tile_rows<2, Signed>(at);
      default: return tile_rows<1, Signed>(at);
    }
  }

  static void row_tile(const RowTile& at) {
    at.a_signed ? tile_as<true>(at) : tile_as<false>(at);
  }

  // Sixteen lanes of each of four vectors to four totals.
  static __m128i totals(const __m512i* sum) {
    const __m512i low = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[0], sum[1]), _mm512_unpackhi_epi32(sum[0], sum[1]));
    const __m512i high = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[2], sum[3]), _mm512_unpackhi_epi32(sum[2], sum[3]));
    const __m512i both = _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  }

  using Dot = uint8_t;

  template <int Rows, bool Signed>
  static void dot_rows(const DotTile<Dot>& tile, const Dot* x, const Dot* const* y, int32_t* out) {
    __m512i sum[Rows][4];
    for (int i = 0; i < Rows; ++i) {
      for (int j = 0; j < 4; ++j) sum[i][j] = _mm512_setzero_si512();
    }
    for (int64_t k = 0; k < tile.inner; k += 64) {
      __m512i right[4];
      for (int j = 0; j < 4; ++j) right[j] = dense_side<Signed>(_mm512_load_si512(y[j] + k));
      for (int i = 0; i < Rows; ++i) {
        const __m512i left = _mm512_load_si512(x + i * tile.x_pitch + k);
        for (int j = 0; j < 4; ++j) multiply_add<Signed>(sum[i][j], left, right[j]);
      }
    }
    for (int i = 0; i < Rows; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * tile.out_pitch), totals(sum[i]));
  }

  template <bool Signed>
  static void dots_as(const DotTile<Dot>& tile) {
    for (int64_t at = 0; at < tile.count; at += kDotColumns) {
      const Dot* y[kDotColumns];
      dot_rows_of(tile, at, y);
      for (int64_t j = 0; j < kDotColumns && at + j < tile.count; j += 4) {
        for (int r = 0; r < tile.rows;) {
          const Dot* const x = tile.x + r * tile.x_pitch;
          int32_t* const out = tile.out + r * tile.out_pitch + at + j;
          const int here = tile.rows - r >= 4 ? 4 : tile.rows - r >= 2 ? 2 : 1;
          if (here == 4) dot_rows<4, Signed>(tile, x, y + j, out);
          else if (here == 2) dot_rows<2, Signed>(tile, x, y + j, out);
          else dot_rows<1, Signed>(tile, x, y + j, out);
          r += here;
        }
      }
    }
  }

  static void dots(const DotTile<Dot>& tile) { tile.x_signed ? dots_as<true>(tile) : dots_as<false>(tile); }
};

struct Doubles {
  using Vector = __m512d;
  static constexpr int kLanes = 8, kRows = 8;  // 16 accumulators

  static Vector zero() { return _mm512_setzero_pd(); }
  static Vector load(const double* from) { return _mm512_loadu_pd(from); }
  static Vector load(const float* from) { return _mm512_cvtps_pd(_mm256_loadu_ps(from)); }
  static void store(double* to, Vector value) { _mm512_storeu_pd(to, value); }
  static Vector broadcast(double value) { return _mm512_set1_pd(value); }
  static Vector abs(Vector value) { return _mm512_andnot_pd(_mm512_set1_pd(-0.0), value); }
  static Vector add(Vector a, Vector b) { return _mm512_add_pd(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_pd(a, b, c); }
};

struct Floats {
  using Vector = __m512;
  static constexpr int kLanes = 16, kRows = 8;  // 16 accumulators

  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Vector value) { _mm512_storeu_ps(to, value); }
  static Vector broadcast(float value) { return _mm512_set1_ps(value); }
  static Vector abs(Vector value) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), value); }
  static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
};

// Digits of A are staged with the offset 128, unsigned; accumulators start at -128 times the sums of the columns of B.
struct Product {
  using Micro = Avx512;
  using Digit = uint8_t;
  static constexpr Digit kOffset = 128;
  static constexpr int kRowOffset = 0;
  static constexpr bool kSplits = false;
  static constexpr int kRows = 6, kStep = kQuad;  // times 64 columns: 24 accumulators
  static constexpr int64_t kBlockRows = magicube::kDirectRows;

  // sums (rows, kPanel) = start (kPanel) + a b.
  static void multiply(const Digit* a, int64_t pitch, int rows, const int8_t* b, int64_t quads, int columns, const int32_t* start,
                       int32_t* sums) {
    for (int r = 0; r < rows; r += kRows, a += kRows * pitch, sums += kRows * kPanel) {
      const int count = static_cast<int>(lesser(kRows, rows - r));
      if (columns > 32) multiply_as<4>(a, pitch, count, b, quads, start, sums);
      else if (columns > 16) multiply_as<2>(a, pitch, count, b, quads, start, sums);
      else multiply_as<1>(a, pitch, count, b, quads, start, sums);
    }
  }

 private:
  static constexpr int64_t kAhead = 4096;  // bytes of b fetched meanwhile: few rows multiply as fast as memory comes

  template <int Vectors>
  static void multiply_as(const Digit* a, int64_t pitch, int rows, const int8_t* b, int64_t quads, const int32_t* start, int32_t* out) {
    switch (rows) {
      case 6: return multiply_rows<6, Vectors>(a, pitch, b, quads, start, out);
      case 5: return multiply_rows<5, Vectors>(a, pitch, b, quads, start, out);
      case 4: return multiply_rows<4, Vectors>(a, pitch, b, quads, start, out);
      case 3: return multiply_rows<3, Vectors>(a, pitch, b, quads, start, out);
      case 2: return multiply_rows<2, Vectors>(a, pitch, b, quads, start, out);
      default: return multiply_rows<1, Vectors>(a, pitch, b, quads, start, out);
    }
  }

  template <int Rows, int Vectors>
  __attribute__((noinline)) static void multiply_rows(const Digit* a, int64_t pitch, const int8_t* b, int64_t quads, const int32_t* start,
                                                      int32_t* out) {
    __m512i sum[Rows][Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
#pragma GCC unroll 6
      for (int r = 0; r < Rows; ++r) sum[r][v] = _mm512_load_si512(start + v * 16);
    }
    for (int64_t q = 0; q < quads; ++q, a += kQuad, b += kPanel * kQuad) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) __builtin_prefetch(b + kAhead + v * 64);
      __m512i right[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) right[v] = _mm512_load_si512(b + v * 64);  // (16, 4)
#pragma GCC unroll 6
      for (int r = 0; r < Rows; ++r) {
        int32_t four;
        std::memcpy(&four, a + r * pitch, sizeof four);
        const __m512i left = _mm512_set1_epi32(four);  // (16, 4), the same four k
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) dot_bytes(sum[r][v], left, right[v]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) _mm512_store_si512(out + r * kPanel + v * 16, sum[r][v]);
    }
  }
};

// Nibbles are the unsigned operand.
struct Nibbles {
  using Micro = Avx512;
  static constexpr int kRows = 6;  // times 64 columns: 24 accumulators

  template <int Rows>
  static void tile(const int8_t* a, int64_t pitch, const int8_t* b, int64_t steps, int columns, int32_t* sums) {
    if (columns > 32) tile_of<Rows, 4>(a, pitch, b, steps, sums);
    else if (columns > 16) tile_of<Rows, 2>(a, pitch, b, steps, sums);
    else tile_of<Rows, 1>(a, pitch, b, steps, sums);
  }

 private:
  template <int Rows, int Vectors>
  __attribute__((noinline)) static void tile_of(const int8_t* a, int64_t pitch, const int8_t* b, int64_t steps, int32_t* out) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512i sum[Rows][Vectors];
#pragma GCC unroll 24
    for (int i = 0; i < Rows * Vectors; ++i) sum[i / Vectors][i % Vectors] = _mm512_load_si512(out + i / Vectors * kPanel + i % Vectors * 16);
    for (int64_t step = 0; step < steps; ++step, a += 2 * kQuad, b += kPanel * kQuad) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        __m512i right[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) {
          const __m512i both = _mm512_load_si512(b + v * 64);  // (16, 4)
          right[v] = _mm512_and_si512(half ? _mm512_srli_epi16(both, 4) : both, low);
        }
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) {
          int32_t four;
          std::memcpy(&four, a + r * pitch + half * kQuad, sizeof four);
          const __m512i left = _mm512_set1_epi32(four);  // (16, 4), the same four k
#pragma GCC unroll 4
          for (int v = 0; v < Vectors; ++v) dot_bytes(sum[r][v], right[v], left);
        }
      }
    }
#pragma GCC unroll 24
    for (int i = 0; i < Rows * Vectors; ++i) _mm512_store_si512(out + i / Vectors * kPanel + i % Vectors * 16, sum[i / Vectors][i % Vectors]);
  }
};

template <class Digits>
struct DirectBy {
  using Doubles = ::Doubles;
  using Floats = ::Floats;
  using Product = Digits;
};

}  // namespace

namespace magicube {
namespace {

template <class Rows, class Digits>
constexpr Engine engine_of(const char* name) {
  return {name, &spmm<Rows>, &spmm_transposed, &sddmm<Avx512>, &attention<Avx512>, &quantize, &digits, &compress,
          &probe_right<Doubles>, &judge<Doubles>, &bound_sums<Doubles>, &pack_digits, &probe_digits<Doubles>,
          &direct<DirectBy<Digits>>, &dense<Digits, Nibbles>, &split_residual, &magnitude_sums, &select_entries, &correct<Avx512>,
          &is_structure_valid, Avx512::kColumns, Avx512::kParts, Avx512::kScratchBytes, sizeof(Avx512::Dot), int64_t{1} << 27,
          Avx512::kQuantizesPanels};
}

}  // namespace

const Engine kAvx512 = engine_of<Avx512, Product>("avx512");
const Engine kAmx = engine_of<AmxRows<Avx512>, AmxProduct<Product>>("amx");
}  // namespace magicube
