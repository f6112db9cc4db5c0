// The engine on AVX2: bytes widen to 16 bits, and vpmaddwd adds pairs of products exactly.
#include <immintrin.h>

#include "attention.hpp"
#include "correct.hpp"
#include "dense.hpp"
#include "dense_to_sparse.hpp"
#include "direct.hpp"
#include "estimate.hpp"
#include "sddmm.hpp"
#include "select.hpp"
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

struct Avx2 {
  static constexpr bool kOffset = false;
  static constexpr int kFewWidth = 8, kColumns = 32, kParts = 2, kSums = kColumns * kParts;  // 16 bits of a column in a row of a part; of a row
  static constexpr int kChunkGroups = 64;  // their panel rows fill half of L1
  static constexpr int kChunk = kChunkGroups * kQuad;
  static constexpr int64_t kScratchBytes = kChunk * 4 + kTileRows * kChunk * 2;  // eight times each column; widened values
  static constexpr bool kFew = true, kKeeps = false, kStreams = true, kWrites = false, kTurns = false;

  // Unpacks work inside 128-bit lanes: of each 16 columns a lane holds 0-3 and 8-11, the other 4-7 and 12-15.
  static void place(const uint8_t* bytes, int64_t pitch, int64_t rows, bool is_signed, uint8_t* panel) {
    for (int64_t i = 0; i < rows; ++i, bytes += pitch, panel += kPanel) {
      for (int half = 0; half < 2; ++half) {
        const __m128i sixteen = _mm_load_si128(reinterpret_cast<const __m128i*>(bytes) + half);
        _mm256_store_si256(reinterpret_cast<__m256i*>(panel) + half, widen(_mm_shuffle_epi32(sixteen, 0xd8), is_signed));
      }
    }
  }

  static void stream(const void* from, void* to, int64_t bytes) {
    for (int64_t i = 0; i < bytes / 32; ++i) {
      _mm256_stream_si256(static_cast<__m256i*>(to) + i, _mm256_load_si256(static_cast<const __m256i*>(from) + i));
    }
  }

  static void finish_streams() { _mm_sfence(); }  // orders streamed stores before other threads read them

  static void widen_sixteen(const uint8_t* from, bool is_signed, int16_t* to) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), widen(whole(from), is_signed));
  }

  // `eighth` is eight times the column; the addressing mode multiplies by the other eight.
  static __m256i row(const uint8_t* panel, int32_t eighth) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(panel + int64_t{eighth} * 8));
  }

  // Rows of widened values times sixteen columns of the panel rows of each pair: Rows x 2 accumulators.
  template <int Rows>
  __attribute__((noinline)) static void strip(const uint8_t* panel, const int32_t* eighths, int64_t pairs, const int16_t* a,
                                              bool fresh, int32_t* sums) {
    __m256i sum[Rows][2];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const auto* const from = reinterpret_cast<const __m256i*>(sums + r * kSums);
      sum[r][0] = fresh ? _mm256_setzero_si256() : _mm256_load_si256(from);
      sum[r][1] = fresh ? _mm256_setzero_si256() : _mm256_load_si256(from + 1);
    }
    for (const int32_t* const stop = eighths + 2 * pairs; eighths < stop; eighths += 2, a += 2) {
      const __m256i k0 = row(panel, eighths[0]), k1 = row(panel, eighths[1]);  // (16)
      const __m256i b0 = _mm256_unpacklo_epi16(k0, k1), b1 = _mm256_unpackhi_epi16(k0, k1);  // (8, 2)
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const __m256i left = four_bytes(a + r * kChunk);
        add(sum[r][0], _mm256_madd_epi16(left, b0));
        add(sum[r][1], _mm256_madd_epi16(left, b1));
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      auto* const to = reinterpret_cast<__m256i*>(sums + r * kSums);
      _mm256_store_si256(to, sum[r][0]);
      _mm256_store_si256(to + 1, sum[r][1]);
    }
  }

  // Whole blocks of values, widened, and eight times their columns.
  template <int Rows>
  static void widen_blocks(const RowTile& at, int32_t* eighths, int16_t* a) {
    const int stride = at.stride;
    const uint8_t* block = at.values;
    for (int64_t first = 0; first < at.count; first += stride, block += stride * at.vector_length) {
      for (int i = 0; i < stride; i += 16, eighths += 16, a += 16) {
        for (int j = 0; j < 16; j += 8) {
          const __m256i columns = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at.columns + first + i + j));
          _mm256_store_si256(reinterpret_cast<__m256i*>(eighths + j), _mm256_slli_epi32(columns, 3));
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) widen_sixteen(block + r * stride + i, at.a_signed, a + r * kChunk);
      }
    }
  }

  template <int Rows>
  __attribute__((noinline)) static void tile_rows(const RowTile& at) {
    constexpr int kStep = Rows < 4 ? Rows : 4;
    auto* const eighths = reinterpret_cast<int32_t*>(at.scratch);
    auto* const a = reinterpret_cast<int16_t*>(at.scratch + kChunk * 4);  // (Rows, kChunk)
    widen_blocks<Rows>(at, eighths, a);
    for (int first = 0; first < at.width; first += 16) {
      const uint8_t* const panel = at.panel + first / kColumns * at.part_bytes + first % kColumns * 2;
      for (int r = 0; r < Rows; r += kStep) {
        strip<kStep>(panel, eighths, (at.count + 1) / 2, a + r * kChunk, at.fresh, at.sums + r * kSums + first);
      }
    }
  }

  static void row_tile(const RowTile& at) {
    switch (at.rows) {
      case 8: return tile_rows<8>(at);
      case 4: return tile_rows<4>(at);
      case 2: return tile_rows<2>(at);
      default: return tile_rows<1>(at);
    }
  }

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
    alignas(32) int16_t a[Rows][kFewChunk];
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
    alignas(32) int16_t gathered[kFewChunk * 8 * Vectors];
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

// Digits of A are 16 bits, those of B widen in the loop: vpmaddwd sums pairs of products exactly, vpmaddubsw would saturate.
struct Product {
  using Micro = Avx2;
  using Digit = int16_t;
  static constexpr Digit kOffset = 0;
  static constexpr int kRows = 6, kStep = kQuad;  // times 8 columns, with two sums each: 12 accumulators

  // sums (rows, kPanel) += a b. Blocks of k whose part of the panel stays in L1 are multiplied by all rows: a slice of 8 columns
  // reads 32 of every 256 bytes, which are few sets of a cache.
  static void multiply(const Digit* a, int64_t pitch, int rows, const int8_t* b, int64_t quads, int columns, int32_t* sums) {
    const int64_t most = quads <= kFewQuads ? kFewQuads : kBlockQuads;
    const int64_t ahead = rows > 1 ? most * kQuad / ((rows + kRows - 1) / kRows) : 0;
    for (; quads > 0; quads -= most, a += most * kQuad, b += most * kPanel * kQuad) {
      const int64_t count = lesser(most, quads);
      for (int r = 0; r < rows; r += kRows) {
        const Ahead next{b + most * kPanel * kQuad + r / kRows * ahead * kPanel, ahead};
        multiply_rows(a + r * pitch, pitch, static_cast<int>(lesser(kRows, rows - r)), b, count, columns, sums + r * kPanel, next);
      }
    }
  }

 private:
  static constexpr int64_t kFewQuads = 96, kBlockQuads = 64;

  // Bytes of the next block to fetch beside each column of a tile: spread over its steps, else they wait for one another.
  struct Ahead {
    const int8_t* from;
    int64_t bytes;
  };

  static void multiply_rows(const Digit* a, int64_t pitch, int rows, const int8_t* b, int64_t quads, int columns, int32_t* sums,
                            Ahead next) {
    switch (rows) {
      case 6: return multiply_tile<6, 2>(a, pitch, b, quads, columns, sums, next);
      case 5: return multiply_tile<5, 2>(a, pitch, b, quads, columns, sums, next);
      case 4: return multiply_tile<4, 2>(a, pitch, b, quads, columns, sums, next);
      case 3: return multiply_tile<3, 2>(a, pitch, b, quads, columns, sums, next);
      case 2: return multiply_tile<2, 4>(a, pitch, b, quads, columns, sums, next);
      default: return multiply_tile<1, 8>(a, pitch, b, quads, columns, sums, next);
    }
  }

  template <int Rows, int Vectors>
  static void multiply_tile(const Digit* a, int64_t pitch, const int8_t* b, int64_t quads, int columns, int32_t* sums, Ahead next) {
    constexpr int kColumns = 4 * Vectors;
    for (int j = 0; j < columns; j += kColumns) {
      slice<Rows, Vectors>(a, pitch, b + j * kQuad, quads, sums + j, next.from + j * next.bytes, next.bytes * kColumns / quads);
    }
  }

  static __m256i load(const int8_t* from) { return widen(_mm_load_si128(reinterpret_cast<const __m128i*>(from)), true); }

  // Four k of a row in each 64-bit lane.
  static __m256i four(const Digit* a) {
    int64_t both;
    std::memcpy(&both, a, sizeof both);
    return _mm256_set1_epi64x(both);
  }

  // Adds to rows times 4 Vectors columns, with two sums each. Inlined, it would lack registers for the accumulators and addresses.
  // `ahead` is fetched meanwhile, `step` bytes at a time, but by a single row, which is bound by bytes already.
  template <int Rows, int Vectors>
  __attribute__((noinline)) static void slice(const Digit* a, int64_t pitch, const int8_t* b, int64_t quads, int32_t* out,
                                              const int8_t* ahead, int64_t step) {
    __m256i sum[Rows][Vectors];
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[r][v] = _mm256_setzero_si256();
    }
    for (int64_t q = 0; q < quads; ++q, a += kQuad, b += kPanel * kQuad) {
      if constexpr (Rows > 1) __builtin_prefetch(ahead, 0, 2), ahead += step;
      if constexpr (Rows > 2) {
        __m256i right[Vectors];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) right[v] = load(b + v * 16);  // (4, 4)
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) {
          const __m256i left = four(a + r * pitch);
#pragma GCC unroll 8
          for (int v = 0; v < Vectors; ++v) add(sum[r][v], _mm256_madd_epi16(left, right[v]));
        }
      } else {
        __m256i left[Rows];
#pragma GCC unroll 2
        for (int r = 0; r < Rows; ++r) left[r] = four(a + r * pitch);
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) {
          const __m256i right = load(b + v * 16);  // (4, 4)
#pragma GCC unroll 2
          for (int r = 0; r < Rows; ++r) add(sum[r][v], _mm256_madd_epi16(left[r], right));
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v += 2) {
        const __m256i pairs = _mm256_hadd_epi32(sum[r][v], sum[r][v + 1]);  // columns 0, 1, 4, 5, 2, 3, 6, 7
        auto* const to = reinterpret_cast<__m256i*>(out + r * kPanel + v * 4);
        _mm256_store_si256(to, _mm256_add_epi32(_mm256_load_si256(to), _mm256_permute4x64_epi64(pairs, 0xd8)));
      }
    }
  }
};

// vpmaddubsw of nibbles does not saturate, and 16 bits hold eight of its sums: 16 * 15 * 128 < 2^15.
struct Nibbles {
  using Micro = Avx2;
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
                      Avx2::kColumns, Avx2::kParts, Avx2::kScratchBytes, sizeof(Avx2::Dot), int64_t{1} << 25};
}
