// Sparse corrections in place: C += A (SR-BCRS) * B (dense), scaled; C has contiguous rows or columns.
// Source: Gu, arXiv 2403.06924, Algorithm 1, lines 8 to 10, 16 and 17.
#pragma once

#include "compensate_args.hpp"
#include "spmm.hpp"

namespace {  // compiled once per instruction set

using magicube::CorrectArgs;

// out (width columns of rows entries) += results (rows, kPanel). Whole cache lines of 16 entries at once.
inline void add_turned(const float* __restrict from, int64_t rows, int64_t width, float* __restrict out, int64_t step) {
  for (int64_t j = 0; j < width; ++j) {
    for (int64_t i = 0; i < rows; ++i) out[j * step + i] += from[i * kPanel + j];
  }
}

template <class Micro>
class Correction {
 public:
  static constexpr int kColumns = SpmmRow<Micro>::kColumns;

  Correction(const CorrectArgs& arguments, ThreadGroup& threads, int32_t* sums, float* results)
      : args(arguments),
        group(threads),
        panels_{arguments.product, threads, threads.shared(), {arguments.product, threads.local(), false, sums, nullptr}},
        results_(results) {}

  void run() const {
    const auto& product = args.product;
    const int64_t k = product.a.columns_total, all = panels_.across(), pieces = (k + kStagedRows - 1) / kStagedRows;
    const int64_t step = greater(1, magicube::kTurnedRows / product.a.vector_length);
    const int64_t tickets = (product.a.vector_rows + step - 1) / step;
    for (int64_t first = 0; first < all; first += product.staged_panels) {
      const int64_t count = lesser(product.staged_panels, all - first);
      for (int64_t t = group.ticket(); t < count * pieces; t = group.ticket()) {
        const int64_t k0 = t % pieces * kStagedRows;
        panels_.stage_rows(t / pieces, first + t / pieces, k0, lesser(k0 + kStagedRows, k));
      }
      if (!group.barrier()) return;
      for (int64_t t = group.ticket(); t < count * tickets; t = group.ticket()) {
        const int64_t slot = t / tickets, r0 = t % tickets * step;
        add_rows(panels_.panel(slot), r0, lesser(r0 + step, product.a.vector_rows), (first + slot) * panels_.columns());
      }
      if (!group.barrier()) return;
    }
  }

 private:
  // Vector rows [r0, r1) of a panel from column n0 on.
  void add_rows(const uint8_t* panel, int64_t r0, int64_t r1, int64_t n0) const {
    const auto& a = args.product.a;
    const int64_t row0 = r0 * a.vector_length, rows = lesser(r1 * a.vector_length, a.rows) - row0;
    const int64_t width = lesser(panels_.columns(), args.product.n - n0);
    float* const out = args.out + row0 * args.row_step + n0 * args.column_step;
    if (args.row_step == 1) {
      for (int64_t j = 0; j < width; ++j) __builtin_prefetch(out + j * args.column_step, 1);
    } else {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < width; j += 16) __builtin_prefetch(out + i * args.row_step + j, 1);
      }
    }
    for (int64_t r = r0; r < r1; ++r) multiply(panel, r, n0, width, results_ + (r - r0) * a.vector_length * kColumns);
    if (args.row_step == 1) return add_turned(results_, rows, width, out, args.column_step);
    for (int64_t i = 0; i < rows; ++i) add_run(results_ + i * kColumns, width, out + i * args.row_step);
  }

  // Scaled results of a vector row; zeros if it is empty.
  void multiply(const uint8_t* panel, int64_t r, int64_t n0, int64_t width, float* results) const {
    const auto& a = args.product.a;
    const auto& scales = args.product.scales;
    const int64_t begin = a.row_start[r], end = a.row_end[r], row0 = r * a.vector_length;
    const int64_t rows = lesser(a.vector_length, a.rows - row0);
    if (begin == end) return static_cast<void>(std::memset(results, 0, static_cast<size_t>(rows * kColumns) * sizeof(float)));
    const int64_t chunk = panels_.row.chunk_of(end - begin);
    for (int64_t at = begin; at < end; at += chunk) panels_.row.multiply(panel, width, at, lesser(chunk, end - at), at == begin);
    for (int64_t v = 0; v < rows; ++v) {
      const auto offset = static_cast<int32_t>(panels_.row.offset_of(r, static_cast<int>(v)));
      scale_run(panels_.row.sums + v * kColumns, width, offset, scales.rows[row0 + v], scales.columns + n0, -0.0f, results + v * kColumns);
    }
  }

  static void add_run(const float* __restrict from, int64_t count, float* __restrict out) {
    for (int64_t j = 0; j < count; ++j) out[j] += from[j];
  }

  const CorrectArgs& args;
  ThreadGroup& group;
  const SpmmPanels<Micro> panels_;
  float* const results_;  // (rows of some vector rows, kColumns)
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// Single entries (V = 1): pairs of nonzeros times 64 columns, which all stay in registers. A panel has bytes, a cache line per
// row of B: widened when it is staged, as for the SpMM, it would be read in twice the lines.
class PairCorrection {
 public:
  PairCorrection(const CorrectArgs& arguments, ThreadGroup& threads)
      : args(arguments), group(threads), results_(reinterpret_cast<float*>(threads.local())) {}

  void run() const {
    const auto& product = args.product;
    const int64_t k = product.a.columns_total, all = (product.n + kPanel - 1) / kPanel, pieces = (k + kStagedRows - 1) / kStagedRows;
    const int64_t tickets = (product.a.vector_rows + kTurnedRows - 1) / kTurnedRows;
    for (int64_t first = 0; first < all; first += product.staged_panels) {
      const int64_t count = lesser(product.staged_panels, all - first);
      for (int64_t t = group.ticket(); t < count * pieces; t = group.ticket()) {
        const int64_t k0 = t % pieces * kStagedRows, n0 = (first + t / pieces) * kPanel;
        stage_rows(panel(t / pieces), k0, lesser(k0 + kStagedRows, k), n0, lesser(kPanel, product.n - n0));
      }
      if (!group.barrier()) return;
      for (int64_t t = group.ticket(); t < count * tickets; t = group.ticket()) {
        const int64_t slot = t / tickets, r0 = t % tickets * kTurnedRows, n0 = (first + slot) * kPanel;
        add_rows(panel(slot), r0, lesser(r0 + kTurnedRows, product.a.rows), n0, lesser(kPanel, product.n - n0));
      }
      if (!group.barrier()) return;
    }
  }

 private:
  static constexpr int64_t kTurnedRows = magicube::kTurnedRows;

  // Of row 0; row -1, of zeros, is what padding columns name.
  uint8_t* panel(int64_t slot) const { return group.shared() + slot * (args.product.a.columns_total + 1) * kPanel + kPanel; }

  void stage_rows(uint8_t* to, int64_t k0, int64_t k1, int64_t n0, int64_t width) const {
    const auto& b = args.product.b;
    if (k0 == 0) std::memset(to - kPanel, 0, kPanel);
    stage(b, b.data, !b.runs_along_inner, k0, k1 - k0, n0, width, 0, to + k0 * kPanel, kPanel, 0);
  }

  void add_rows(const uint8_t* from, int64_t r0, int64_t r1, int64_t n0, int64_t width) const {
    const auto& a = args.product.a;
    const auto& scales = args.product.scales;
    const bool turned = args.row_step == 1;
    float* const out = args.out + r0 * args.row_step + n0 * args.column_step;
    alignas(32) float columns[kPanel] = {};
    std::memcpy(columns, scales.columns + n0, static_cast<size_t>(width) * sizeof(float));
    if (turned) {
      for (int64_t j = 0; j < width; ++j) __builtin_prefetch(out + j * args.column_step, 1);
    }
    for (int64_t r = r0; r < r1; ++r) {
      float* const to = turned || width < kPanel ? results_ + (r - r0) * kPanel : out + (r - r0) * args.row_step;
      if (!turned && r + 1 < r1) {
        for (int64_t j = 0; j < width; j += 16) __builtin_prefetch(out + (r + 1 - r0) * args.row_step + j, 1);
      }
      const int64_t begin = a.row_start[r], count = a.row_end[r] - begin;
      const auto* const values = reinterpret_cast<const int8_t*>(a.planes) + begin;
      if (turned || width < kPanel) multiply_row<false>(from, a.columns + begin, values, count, scales.rows[r], columns, to);
      else if (count) multiply_row<true>(from, a.columns + begin, values, count, scales.rows[r], columns, to);
      for (int64_t j = 0; !turned && width < kPanel && j < width; ++j) out[(r - r0) * args.row_step + j] += to[j];
    }
    if (turned) add_turned(results_, r1 - r0, width, out, args.column_step);
  }

  static void accumulate(__m256i& sum, __m256i products) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products)); }

  // out = or += scaled sums of a row. Whole pairs: blocks are padded.
  template <bool Adds>
  __attribute__((noinline)) static void multiply_row(const uint8_t* panel, const int32_t* columns, const int8_t* values, int64_t count,
                                                     float row, const float* column_scales, float* out) {
    __m256i sum[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sum[i] = _mm256_setzero_si256();
    for (int64_t k = 0; k < count; k += 2) {
      const auto* const k0 = reinterpret_cast<const __m128i*>(panel + int64_t{columns[k]} * kPanel);
      const auto* const k1 = reinterpret_cast<const __m128i*>(panel + int64_t{columns[k + 1]} * kPanel);
      int16_t two;
      std::memcpy(&two, values + k, 2);
      const __m256i left = _mm256_cvtepi8_epi16(_mm_set1_epi16(two));
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        const __m128i x = _mm_load_si128(k0 + q), y = _mm_load_si128(k1 + q);
        accumulate(sum[2 * q], _mm256_madd_epi16(left, _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(x, y))));
        accumulate(sum[2 * q + 1], _mm256_madd_epi16(left, _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(x, y))));
      }
    }
    const __m256 scale = _mm256_set1_ps(row);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      __m256 total = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sum[i]), scale), _mm256_load_ps(column_scales + i * 8));
      if (Adds) total = _mm256_add_ps(_mm256_loadu_ps(out + i * 8), total);
      _mm256_storeu_ps(out + i * 8, total);
    }
  }

  const CorrectArgs& args;
  ThreadGroup& group;
  float* const results_;  // (kTurnedRows, kPanel)
};
#endif

template <class Micro>
void correct(const CorrectArgs& args, ThreadGroup& group) {
  static_assert(Correction<Micro>::kColumns == kPanel, "a row of results");
  const int64_t rows = args.product.a.vector_length;
#if defined(__AVX2__) && !defined(__AVX512F__)
  if (rows == 1 && args.product.a.is_signed && args.product.b.is_signed) return PairCorrection(args, group).run();
#endif
  auto* const sums = reinterpret_cast<int32_t*>(group.local() + Micro::kScratchBytes + rows * kPanel * 8);
  Correction<Micro>(args, group, sums, reinterpret_cast<float*>(sums + rows * kPanel)).run();
}

}  // namespace
