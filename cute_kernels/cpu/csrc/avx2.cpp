// The engine on AVX2: bytes widen to 16 bits, and vpmaddwd adds pairs of products exactly. Dense products do not widen.
#include <immintrin.h>

#include "attention.hpp"
#include "avx2_dense.hpp"
#include "avx2_few.hpp"
#include "correct.hpp"
#include "dense_to_sparse.hpp"
#include "direct.hpp"
#include "estimate.hpp"
#include "sddmm.hpp"
#include "select.hpp"
#include "spmm.hpp"

namespace {

struct Avx2 : FewColumns2 {
  static constexpr bool kOffset = false;
  static constexpr int kColumns = 32, kParts = 2, kSums = kColumns * kParts;  // 16 bits of a column in a row of a part; of a row
  static constexpr int kChunkGroups = 64;  // their panel rows fill half of L1
  static constexpr int kChunk = kChunkGroups * kQuad;
  static constexpr int64_t kScratchBytes = kChunk * 4 + kTileRows * kChunk * 2;  // eight times each column; widened values
  static constexpr bool kWrites = true, kTurns = true, kQuantizesPanels = true;
  static constexpr int64_t kStreamBytes = 1 << 19;  // of an SpMM, whose output lines would be read first

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

  static constexpr int kAtOnce = 4;  // columns of A in a step of a strip

  // Where a strip ends: in the accumulators, or as float32 or int32 results of whole sums, to the caches or past them.
  enum class End { kSums, kFloats, kFloatStream, kIntegers, kIntegerStream };

  struct Output {  // of the rows of a tile
    const float* row_scales;
    const float* bias;
    const float* column_scales;
    float* out;
    int64_t pitch;
    bool scales;
    bool streams;
  };

  template <End How>
  static void put(float* out, __m256 result) {
    if constexpr (How == End::kFloatStream || How == End::kIntegerStream) _mm256_stream_ps(out, result);
    else _mm256_storeu_ps(out, result);
  }

  // Sums of sixteen columns as results. Inlined, or the sums would pass through memory.
  template <int Rows, End How>
  __attribute__((always_inline)) static void write(const Output* output, int row, int column, const __m256i sum[Rows][2]) {
    const int64_t pitch = output->pitch;
    float* out = output->out + row * pitch + column;
    if constexpr (How == End::kIntegers || How == End::kIntegerStream) {
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r, out += pitch) {
        put<How>(out, _mm256_castsi256_ps(sum[r][0]));
        put<How>(out + 8, _mm256_castsi256_ps(sum[r][1]));
      }
      return;
    }
    const float *const row_scales = output->row_scales + row, *const biases = output->bias + row;
    const __m256 column0 = _mm256_loadu_ps(output->column_scales + column), column1 = _mm256_loadu_ps(output->column_scales + column + 8);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r, out += pitch) {
      const __m256 scale = _mm256_broadcast_ss(row_scales + r), bias = _mm256_broadcast_ss(biases + r);
      const __m256 scaled0 = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sum[r][0]), scale), column0);
      const __m256 scaled1 = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sum[r][1]), scale), column1);
      put<How>(out, _mm256_add_ps(scaled0, bias));
      put<How>(out + 8, _mm256_add_ps(scaled1, bias));
    }
  }

  // Rows of widened values from `first` on times sixteen columns of the panel rows of each pair: Rows x 2 accumulators.
  template <int Rows, End How>
  __attribute__((noinline)) static void strip(const RowTile& at, const Output* output, const int32_t* eighths, const int16_t* a, int first, int column) {
    __m256i sum[Rows][2];
    int32_t* const sums = at.sums + first * kSums + column;
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const auto* const from = reinterpret_cast<const __m256i*>(sums + r * kSums);
      sum[r][0] = How != End::kSums || at.fresh ? _mm256_setzero_si256() : _mm256_load_si256(from);
      sum[r][1] = How != End::kSums || at.fresh ? _mm256_setzero_si256() : _mm256_load_si256(from + 1);
    }
    const uint8_t* const panel = at.panel + column / kColumns * at.part_bytes + column % kColumns * 2;
    for (const int32_t* const stop = eighths + at.count; eighths < stop; eighths += kAtOnce, a += kAtOnce) {
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
    if constexpr (How != End::kSums) {
      write<Rows, How>(output, first, column, sum);
    } else {
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        auto* const to = reinterpret_cast<__m256i*>(sums + r * kSums);
        _mm256_store_si256(to, sum[r][0]);
        _mm256_store_si256(to + 1, sum[r][1]);
      }
    }
  }

  template <int Rows, End How>
  static void strips(const RowTile& at, const Output* output, const int32_t* eighths, const int16_t* a, int first, int column, int end) {
    for (; column < end; column += 16) strip<Rows, How>(at, output, eighths, a, first, column);
  }

  // Whole blocks of values, widened, and eight times their columns.
  template <int Rows, bool Signed>
  static void widen_blocks(const RowTile& at, int32_t* eighths, int16_t* a) {
    const int64_t stride = at.stride, skip = stride * (at.vector_length - 1);
    const int32_t* columns = at.columns;
    const uint8_t* values = at.values;
    for (const int32_t* const stop = columns + at.count; columns < stop; values += skip) {
      for (int64_t i = 0; i < stride; i += 16, columns += 16, eighths += 16, values += 16, a += 16) {
        for (int j = 0; j < 16; j += 8) {
          const __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(columns + j));
          _mm256_store_si256(reinterpret_cast<__m256i*>(eighths + j), _mm256_slli_epi32(eight, 3));
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) widen_sixteen(values + r * stride, Signed, a + r * kChunk);
      }
    }
  }

  template <int Rows>
  __attribute__((noinline)) static void tile_rows(const RowTile& at, const Output* output) {
    constexpr int kStep = Rows < 4 ? Rows : 4;
    auto* const eighths = reinterpret_cast<int32_t*>(at.scratch);
    auto* const a = reinterpret_cast<int16_t*>(at.scratch + kChunk * 4);  // (Rows, kChunk)
    at.a_signed ? widen_blocks<Rows, true>(at, eighths, a) : widen_blocks<Rows, false>(at, eighths, a);
    const int written = output ? static_cast<int>(at.width) / 16 * 16 : 0;
    const bool is_integer = output && !output->scales, streams = output && output->streams;
    for (int r = 0; r < Rows; r += kStep) {
      const int16_t* const left = a + r * kChunk;
      if (is_integer) streams ? strips<kStep, End::kIntegerStream>(at, output, eighths, left, r, 0, written) : strips<kStep, End::kIntegers>(at, output, eighths, left, r, 0, written);
      else streams ? strips<kStep, End::kFloatStream>(at, output, eighths, left, r, 0, written) : strips<kStep, End::kFloats>(at, output, eighths, left, r, 0, written);
      strips<kStep, End::kSums>(at, output, eighths, left, r, written, static_cast<int>(at.width));
    }
    if (!output || written == at.width) return;
    for (int r = 0; r < Rows; ++r) {
      const int32_t* const sums = at.sums + r * kSums + written;
      float* const out = output->out + r * output->pitch + written;
      if (is_integer) std::memcpy(out, sums, static_cast<size_t>(at.width - written) * sizeof(int32_t));
      else scale_run(sums, at.width - written, 0, output->row_scales[r], output->column_scales + written, output->bias[r], out);
    }
  }

  static void tile(const RowTile& at, const Output* output) {
    switch (at.rows) {
      case 8: return tile_rows<8>(at, output);
      case 4: return tile_rows<4>(at, output);
      case 2: return tile_rows<2>(at, output);
      default: return tile_rows<1>(at, output);
    }
  }

  static void row_tile(const RowTile& at) { tile(at, nullptr); }

  static void whole(const WholeRows& at, int64_t first, int64_t last, float* out) {
    const auto& a = at.a;
    const int rows = a.vector_length < kTileRows ? a.vector_length : kTileRows;
    for (int64_t r = first; r < last; ++r) {
      const int64_t begin = a.row_start[r], count = a.row_end[r] - begin;
      for (int v = 0; v < a.vector_length; v += rows, out += rows * at.pitch) {
        const int64_t row = r * a.vector_length + v;
        const Output output{at.row_scales ? at.row_scales + row : kOnes, at.bias ? at.bias + row : kZeros, at.column_scales, out, at.pitch, at.scales,
                            at.streams};
        tile({at.panel, at.part_bytes, at.width, a.columns + begin, count, a.planes + begin * a.vector_length + v * a.stride, a.stride,
              a.vector_length, rows, a.is_signed, true, true, at.sums, at.scratch}, &output);
      }
    }
  }

  using Dot = int16_t;

  static __m256i dot_vector(const Dot* from) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(from)); }

  // Totals of the lanes of four vectors, in the order of the vectors, twice: of the lower and of the upper half of each.
  static __m256i halves(const __m256i* sum) {
    return _mm256_hadd_epi32(_mm256_hadd_epi32(sum[0], sum[1]), _mm256_hadd_epi32(sum[2], sum[3]));
  }

  // Two rows of X with four rows of Y, or one with eight: eight accumulators.
  template <int Rows>
  static void dots_of(const DotTile<Dot>& tile, const Dot* x, const Dot* const* y, int32_t* out) {
    constexpr int kColumns = 8 / Rows;
    __m256i sum[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sum[i] = _mm256_setzero_si256();
    for (int64_t k = 0; k < tile.inner; k += 16) {
      __m256i left[Rows];
#pragma GCC unroll 2
      for (int r = 0; r < Rows; ++r) left[r] = dot_vector(x + r * tile.x_pitch + k);
#pragma GCC unroll 8
      for (int j = 0; j < kColumns; ++j) {
        const __m256i right = dot_vector(y[j] + k);
#pragma GCC unroll 2
        for (int r = 0; r < Rows; ++r) add(sum[r * kColumns + j], _mm256_madd_epi16(left[r], right));
      }
    }
    const __m256i first = halves(sum), second = halves(sum + 4);
    const __m256i totals = _mm256_add_epi32(_mm256_permute2x128_si256(first, second, 0x20), _mm256_permute2x128_si256(first, second, 0x31));
    if constexpr (Rows == 1) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), totals);
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(totals));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + tile.out_pitch), _mm256_extracti128_si256(totals, 1));
    }
  }

  __attribute__((noinline)) static void dots(const DotTile<Dot>& tile) {
    for (int64_t at = 0; at < tile.count; at += kDotColumns) {
      const Dot* y[kDotColumns];
      dot_rows_of(tile, at, y);
      int r = 0;
      for (; r + 2 <= tile.rows; r += 2) {
        const Dot* const x = tile.x + r * tile.x_pitch;
        int32_t* const out = tile.out + r * tile.out_pitch + at;
        dots_of<2>(tile, x, y, out);
        dots_of<2>(tile, x, y + 4, out + 4);
      }
      if (r < tile.rows) dots_of<1>(tile, tile.x + r * tile.x_pitch, y, tile.out + r * tile.out_pitch + at);
    }
  }
};

struct Doubles {
  using Vector = __m256d;
  static constexpr int kLanes = 4, kRows = 3;  // 12 accumulators

  static Vector zero() { return _mm256_setzero_pd(); }
  static Vector load(const double* from) { return _mm256_loadu_pd(from); }
  static Vector load(const float* from) { return _mm256_cvtps_pd(_mm_loadu_ps(from)); }
  static void store(double* to, Vector value) { _mm256_storeu_pd(to, value); }
  static Vector broadcast(double value) { return _mm256_set1_pd(value); }
  static Vector abs(Vector value) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), value); }
  static Vector add(Vector a, Vector b) { return _mm256_add_pd(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_pd(a, b, c); }
};

struct Floats {
  using Vector = __m256;
  static constexpr int kLanes = 8, kRows = 3;  // 12 accumulators

  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Vector value) { _mm256_storeu_ps(to, value); }
  static Vector broadcast(float value) { return _mm256_set1_ps(value); }
  static Vector abs(Vector value) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), value); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
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
