// SpMM with the transpose of a sparse matrix: C (K x n) = A^T B, exact in int32, for vectors of an even length.
//
// A row of A^T holds the vectors of one column of A, each V consecutive rows of B: nothing is filled in. A thread stages 32
// columns of B as pairs of rows of 16 bits, then multiplies every row of A^T with them.
#pragma once

#include "engine.hpp"
#include "integers.hpp"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {  // compiled once per instruction set

using magicube::kTransposedColumns;
using magicube::TransposedArgs;

constexpr int kPairValues = 2 * kTransposedColumns;  // of two rows of B

// Columns from j0 on of B as pairs of rows: panel[pair][column] holds rows 2 pair and 2 pair + 1; zero beyond B.
inline void stage_pairs(const TransposedArgs& args, const uint8_t* b, int64_t j0, int16_t* panel) {
  const int64_t width = lesser(kTransposedColumns, args.n - j0);
  const auto value = [&](int64_t i, int64_t j) {
    const uint8_t byte = b[i * args.n + j0 + j];
    return static_cast<int16_t>(args.b_signed ? static_cast<int8_t>(byte) : byte);
  };
  for (int64_t pair = 0; pair < args.pairs; ++pair, panel += kPairValues) {
    if (2 * pair + 1 < args.inner) {
      for (int64_t j = 0; j < width; ++j) panel[2 * j] = value(2 * pair, j), panel[2 * j + 1] = value(2 * pair + 1, j);
    } else {
      for (int64_t j = 0; j < width; ++j) panel[2 * j] = 2 * pair < args.inner ? value(2 * pair, j) : 0, panel[2 * j + 1] = 0;
    }
    for (int64_t j = 2 * width; j < kPairValues; ++j) panel[j] = 0;
  }
}

#ifdef __AVX2__
template <int Pairs>
__m128i widened_values(const uint8_t* from, bool is_signed) {
  uint64_t bytes = 0;
  std::memcpy(&bytes, from, 2 * Pairs);
  const __m128i eight = _mm_cvtsi64_si128(static_cast<int64_t>(bytes));
  return is_signed ? _mm_cvtepi8_epi16(eight) : _mm_cvtepu8_epi16(eight);  // (8)
}

template <int Pair>
void add_pair(__m256i both, const __m256i* row, __m256i (&sum)[4]) {
  const __m256i values = _mm256_shuffle_epi32(both, Pair * 0x55);  // one pair in all lanes
  for (int i = 0; i < 4; ++i) sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(values, _mm256_load_si256(row + i)));
}

template <int Pairs>  // at most 4 of them
void add_pairs(const uint8_t* values, bool is_signed, const __m256i* rows, __m256i (&sum)[4]) {
  const __m256i both = _mm256_broadcastsi128_si256(widened_values<Pairs>(values, is_signed));
  add_pair<0>(both, rows, sum);
  if constexpr (Pairs > 1) add_pair<1>(both, rows + 4, sum);
  if constexpr (Pairs > 2) add_pair<2>(both, rows + 8, sum), add_pair<3>(both, rows + 12, sum);
}

template <int Length>
void transposed_row(const TransposedArgs& args, const int16_t* panel, int64_t from, int64_t to, int32_t* out) {
  constexpr int kPairs = Length < 8 ? Length / 2 : 4;
  __m256i sum[4] = {};  // (8)
  for (int64_t i = from; i < to; ++i) {
    const auto* rows = reinterpret_cast<const __m256i*>(panel + int64_t{args.blocks[i]} * (Length / 2) * kPairValues);
    const uint8_t* values = args.values + i * Length;
    for (int done = 0; done < Length; done += 2 * kPairs, values += 2 * kPairs, rows += 4 * kPairs) {
      add_pairs<kPairs>(values, args.a_signed, rows, sum);
    }
  }
  for (int i = 0; i < 4; ++i) _mm256_store_si256(reinterpret_cast<__m256i*>(out) + i, sum[i]);
}
#else
template <int Length>
void transposed_row(const TransposedArgs& args, const int16_t* panel, int64_t from, int64_t to, int32_t* out) {
  for (int j = 0; j < kTransposedColumns; ++j) out[j] = 0;
  for (int64_t i = from; i < to; ++i) {
    const int16_t* rows = panel + int64_t{args.blocks[i]} * (Length / 2) * kPairValues;
    for (int v = 0; v < Length; v += 2, rows += kPairValues) {
      const uint8_t *const at = args.values + i * Length + v;
      const int32_t a0 = args.a_signed ? static_cast<int8_t>(at[0]) : at[0], a1 = args.a_signed ? static_cast<int8_t>(at[1]) : at[1];
      for (int j = 0; j < kTransposedColumns; ++j) out[j] += a0 * rows[2 * j] + a1 * rows[2 * j + 1];
    }
  }
}
#endif

template <int Length>
void transposed_panel(const TransposedArgs& args, const int16_t* panel, int64_t j0, int32_t* out) {
  const auto width = static_cast<size_t>(lesser(kTransposedColumns, args.n - j0));
  alignas(64) int32_t sums[kTransposedColumns];
  for (int64_t row = 0; row < args.rows; ++row) {
    transposed_row<Length>(args, panel, args.offsets[row], args.offsets[row + 1], sums);
    std::memcpy(out + row * args.n + j0, sums, width * sizeof(int32_t));
  }
}

void spmm_transposed(const TransposedArgs& args, magicube::ThreadGroup& group) {
  const int64_t panels = (args.n + kTransposedColumns - 1) / kTransposedColumns;
  auto* const panel = reinterpret_cast<int16_t*>(group.local());
  for (int64_t at = group.ticket(); at < panels * args.batch; at = group.ticket()) {
    const int64_t matrix = at / panels, j0 = at % panels * kTransposedColumns;
    int32_t* const out = args.out + matrix * args.rows * args.n;
    stage_pairs(args, args.b + matrix * args.inner * args.n, j0, panel);
    switch (args.vector_length) {
      case 2: transposed_panel<2>(args, panel, j0, out); break;
      case 4: transposed_panel<4>(args, panel, j0, out); break;
      case 8: transposed_panel<8>(args, panel, j0, out); break;
      case 16: transposed_panel<16>(args, panel, j0, out); break;
      default: transposed_panel<32>(args, panel, j0, out);
    }
  }
}

}  // namespace
