// What the instruction sets with vectors of 256 bits share: products with the panels of an SpMM in strips of sixteen columns, or with
// few columns, and dot products, whose steps are those of an instruction set; vectors of floats.
#pragma once

#include <immintrin.h>

#include "sddmm.hpp"
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

inline __m128i eight_bytes(const uint8_t* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); }
inline __m128i sixteen_bytes(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

inline void widen_sixteen(const uint8_t* from, bool is_signed, int16_t* to) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), widen(sixteen_bytes(from), is_signed));
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
  const int64_t* row_sums;
  int32_t shift;  // sums start at the negated offsets: those of the rows times this
};

// `Digit`: what a digit of A, and of both operands of an SDDMM, becomes. `Isa` says whether those of B are in offset form, kOffset,
// and has the steps of a strip and of dot products.
template <class Isa, class Digit>
struct Tiles256 : Streams2 {
  using Dot = Digit;
  static constexpr int kChunkGroups = 64;  // their panel rows fill half of L1
  static constexpr int kChunk = kChunkGroups * kQuad;
  static constexpr int kAtOnce = 4;  // columns of A in a step of a strip
  static constexpr int64_t kFewChunk = 256;  // what is gathered for it takes half of L1 at most
  static constexpr bool kWrites = true, kTurns = true, kQuantizesPanels = true;
  static constexpr int64_t kStreamBytes = 1 << 19;  // of an SpMM, whose output lines would be read first

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

  // Rows of values from `first` on times sixteen columns of panel rows: Rows x 2 accumulators.
  template <int Rows, End How, bool Signed, bool High>
  __attribute__((noinline)) static void strip(const RowTile& at, const Output* output, const int32_t* eighths, const Digit* a, int first, int column) {
    constexpr int kSums = Isa::kSums;
    __m256i sum[Rows][2];
    int32_t* const sums = at.sums + first * kSums + column;
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const auto* const from = reinterpret_cast<const __m256i*>(sums + r * kSums);
      if (Isa::kOffset && output) {
        sum[r][0] = sum[r][1] = _mm256_set1_epi32(-output->shift * static_cast<int32_t>(output->row_sums[first + r]));
      } else {
        sum[r][0] = How != End::kSums || at.fresh ? _mm256_setzero_si256() : _mm256_load_si256(from);
        sum[r][1] = How != End::kSums || at.fresh ? _mm256_setzero_si256() : _mm256_load_si256(from + 1);
      }
    }
    const uint8_t* const panel = Isa::columns_from(at, column);
    for (const int32_t* const stop = eighths + at.count; eighths < stop; eighths += kAtOnce, a += kAtOnce) {
      Isa::template step<Rows, Signed, High>(panel, eighths, a, sum);
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

  template <int Rows, End How, bool Signed>
  static void strips(const RowTile& at, const Output* output, const int32_t* eighths, const Digit* a, int first, int column, int end) {
    for (; column < end; column += 16) {
      if (Isa::kOffset && column % 32) strip<Rows, How, Signed, Isa::kOffset>(at, output, eighths, a, first, column);
      else strip<Rows, How, Signed, false>(at, output, eighths, a, first, column);
    }
  }

  // Whole blocks of values, a row of the tile one behind another, and eight times their columns.
  template <int Rows, bool Signed>
  static void copy_blocks(const RowTile& at, int32_t* eighths, Digit* a) {
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
        for (int r = 0; r < Rows; ++r) Isa::copy_sixteen(values + r * stride, Signed, a + r * kChunk);
      }
    }
  }

  template <int Rows, bool Signed>
  static void multiply_rows(const RowTile& at, const Output* output, const int32_t* eighths, const Digit* a) {
    constexpr int kStep = Rows < 4 ? Rows : 4;
    const int written = output ? static_cast<int>(at.width) / 16 * 16 : 0;
    const bool is_integer = output && !output->scales, streams = output && output->streams;
    for (int r = 0; r < Rows; r += kStep) {
      const Digit* const left = a + r * kChunk;
      if (is_integer) streams ? strips<kStep, End::kIntegerStream, Signed>(at, output, eighths, left, r, 0, written) : strips<kStep, End::kIntegers, Signed>(at, output, eighths, left, r, 0, written);
      else streams ? strips<kStep, End::kFloatStream, Signed>(at, output, eighths, left, r, 0, written) : strips<kStep, End::kFloats, Signed>(at, output, eighths, left, r, 0, written);
      strips<kStep, End::kSums, Signed>(at, output, eighths, left, r, written, static_cast<int>(at.width));
    }
    if (!output || written == at.width) return;
    for (int r = 0; r < Rows; ++r) {
      const int32_t* const sums = at.sums + r * Isa::kSums + written;
      float* const out = output->out + r * output->pitch + written;
      if (is_integer) std::memcpy(out, sums, static_cast<size_t>(at.width - written) * sizeof(int32_t));
      else scale_run(sums, at.width - written, 0, output->row_scales[r], output->column_scales + written, output->bias[r], out);
    }
  }

  template <int Rows>
  __attribute__((noinline)) static void tile_rows(const RowTile& at, const Output* output) {
    auto* const eighths = reinterpret_cast<int32_t*>(at.scratch);
    auto* const a = reinterpret_cast<Digit*>(at.scratch + kChunk * 4);  // (Rows, kChunk)
    at.a_signed ? copy_blocks<Rows, true>(at, eighths, a) : copy_blocks<Rows, false>(at, eighths, a);
    if (Isa::kOffset && !at.a_signed) multiply_rows<Rows, !Isa::kOffset>(at, output, eighths, a);
    else multiply_rows<Rows, true>(at, output, eighths, a);
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
                            at.streams, a.row_sums + row, at.shift};
        tile({at.panel, at.part_bytes, at.width, a.columns + begin, count, a.planes + begin * a.vector_length + v * a.stride, a.stride,
              a.vector_length, rows, a.is_signed, true, true, at.sums, at.scratch}, &output);
      }
    }
  }

  // Totals of four vectors in their order, twice: of the lower and of the upper 128 bits of each.
  static __m256i lane_totals(const __m256i* sum) {
    return _mm256_hadd_epi32(_mm256_hadd_epi32(sum[0], sum[1]), _mm256_hadd_epi32(sum[2], sum[3]));
  }

  // Two rows of X with four rows of Y, or one with eight: eight accumulators.
  template <int Rows, bool Signed>
  static void dots_of(const DotTile<Dot>& tile, const Dot* x, const Dot* const* y, int32_t* out) {
    constexpr int kColumns = 8 / Rows;
    __m256i sum[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sum[i] = _mm256_setzero_si256();
    for (int64_t k = 0; k < tile.inner; k += 32 / sizeof(Dot)) {
      __m256i left[Rows];
#pragma GCC unroll 2
      for (int r = 0; r < Rows; ++r) left[r] = _mm256_load_si256(reinterpret_cast<const __m256i*>(x + r * tile.x_pitch + k));
#pragma GCC unroll 8
      for (int j = 0; j < kColumns; ++j) {
        const __m256i right = Isa::template dense_side<Signed>(_mm256_load_si256(reinterpret_cast<const __m256i*>(y[j] + k)));
#pragma GCC unroll 2
        for (int r = 0; r < Rows; ++r) Isa::template multiply_add<Signed>(sum[r * kColumns + j], left[r], right);
      }
    }
    const __m256i first = lane_totals(sum), second = lane_totals(sum + 4);
    const __m256i totals = _mm256_add_epi32(_mm256_permute2x128_si256(first, second, 0x20), _mm256_permute2x128_si256(first, second, 0x31));
    if constexpr (Rows == 1) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), totals);
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(totals));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + tile.out_pitch), _mm256_extracti128_si256(totals, 1));
    }
  }

  template <bool Signed>
  __attribute__((noinline)) static void dots_as(const DotTile<Dot>& tile) {
    for (int64_t at = 0; at < tile.count; at += kDotColumns) {
      const Dot* y[kDotColumns];
      dot_rows_of(tile, at, y);
      int r = 0;
      for (; r + 2 <= tile.rows; r += 2) {
        const Dot* const x = tile.x + r * tile.x_pitch;
        int32_t* const out = tile.out + r * tile.out_pitch + at;
        dots_of<2, Signed>(tile, x, y, out);
        dots_of<2, Signed>(tile, x, y + 4, out + 4);
      }
      if (r < tile.rows) dots_of<1, Signed>(tile, tile.x + r * tile.x_pitch, y, tile.out + r * tile.out_pitch + at);
    }
  }

  static void dots(const DotTile<Dot>& tile) {
    if (Isa::kOffset && !tile.x_signed) dots_as<!Isa::kOffset>(tile);
    else dots_as<true>(tile);
  }

  static constexpr bool kFew = true, kKeeps = false;
  static constexpr int kFewWidth = 8;

  // One column of B: its entries at the columns of a chunk are gathered, then multiplied by the rows, sixteen at a time.
  template <int Rows, bool Signed>
  __attribute__((noinline)) static void few_one(const FewTile& at) {
    constexpr int64_t kMost = 1024, kAhead = 512;  // columns: those and the values of a vector row are short runs of two streams
    alignas(32) Digit x[kMost];
    typename Isa::Sixteen sum[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) sum[r] = typename Isa::Sixteen{};
    const int stride = at.stride;
    for (int64_t first = 0; first < at.count; first += kMost) {
      const int64_t count = lesser(kMost, at.count - first);
      const int32_t* const columns = at.columns + first;
      const uint8_t* values = at.values + first * at.vector_length;
      for (int64_t i = 0; i < count; i += 8) {  // whole blocks
        __builtin_prefetch(values + i * at.vector_length);
        __builtin_prefetch(columns + i + kAhead);
#pragma GCC unroll 8
        for (int64_t j = i; j < i + 8; ++j) x[j] = Isa::template digit_of<Signed>(at.panel[columns[j]]);
      }
      for (int64_t block = 0; block < count; block += stride, values += int64_t{stride} * at.vector_length) {
        for (int i = 0; i < stride; i += 16) {
          const auto right = *reinterpret_cast<const typename Isa::Sixteen*>(x + block + i);
#pragma GCC unroll 8
          for (int r = 0; r < Rows; ++r) Isa::template add_sixteen<Signed>(sum[r], sixteen_bytes(values + r * stride + i), right, at.a_signed);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) at.sums[r] = at.start[r] + total(sum[r]);
  }

  static int32_t total(__m256i sum) { return total(_mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1))); }
  static int32_t total(__m128i sum) {
    const __m128i two = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
  }

  template <int Rows, int Vectors, bool Signed>
  static void few_chunks(const FewTile& at) {
    constexpr int kStep = Rows * Vectors > 8 ? 8 / Vectors : Rows;
    alignas(64) Digit gathered[kFewChunk * 8 * Vectors];
    for (int r = 0; r < Rows; ++r) {
      for (int j = 0; j < 8 * Vectors; ++j) at.sums[r * 8 * Vectors + j] = at.start[r];
    }
    for (int64_t k = 0; k < at.count; k += kFewChunk) {
      const int64_t count = lesser(kFewChunk, at.count - k);
      Isa::template gather_few<Vectors, Signed>(at, at.columns + k, count, gathered);
      for (int first = 0; first < Rows; first += kStep) {
        Isa::template few_rows<kStep, Vectors, Signed>(at, first, at.values + k * at.vector_length, count, gathered);
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

  static void few(const FewTile& at) { (Isa::kOffset ? at.a_signed : at.b_signed) ? few_signed<true>(at) : few_signed<false>(at); }
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

}  // namespace
