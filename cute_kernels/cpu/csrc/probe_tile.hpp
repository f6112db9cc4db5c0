// Sixteen probes: products of a real matrix with a (K, 16) matrix of doubles, summed in two levels.
//
// Rows come in groups of kGroupRows. A block of about sqrt(K) columns is converted to double, then multiplied by register tiles
// of Isa::kRows rows, whose accumulators are added to the totals of the group. A sum over n terms is thus rounded at most
// kb + ceil(n / kb) - 1 <= 2 sqrt(n) times, kb = ceil(sqrt(n)) (Higham, Accuracy and Stability of Numerical Algorithms,
// 2nd ed., sections 3.1 and 4.2).
#pragma once

#include <cmath>
#include <cstdint>

#include "engine.hpp"
#include "integers.hpp"

namespace {  // compiled once per instruction set

using magicube::kGroupRows;
using magicube::kProbes;

inline double fused(double a, double b, double c) {
#ifdef __FMA__
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

// totals (Isa::kRows, kProbes) += block (Isa::kRows, count) v (count, kProbes). Every loop over the accumulators must unroll.
// Inlined, the loop would lack registers for addresses.
template <class Isa>
__attribute__((noinline)) void multiply_tile(const double* block, int64_t row_step, int64_t k_step, int64_t count, const double* v,
                                             double* totals) {
  constexpr int kRows = Isa::kRows, kVectors = kProbes / Isa::kLanes;
  typename Isa::Vector sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int q = 0; q < kVectors; ++q) sum[r][q] = Isa::zero();
  }
  for (int64_t k = 0; k < count; ++k, block += k_step, v += kProbes) {
    typename Isa::Vector left[kRows];  // with the accumulators and one vector of v, all 16 registers of AVX2
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) left[r] = Isa::broadcast(block[r * row_step]);
#pragma GCC unroll 8
    for (int q = 0; q < kVectors; ++q) {
      const auto right = Isa::load(v + q * Isa::kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum[r][q] = Isa::fma(left[r], right, sum[r][q]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int q = 0; q < kVectors; ++q) {
      double* const at = totals + r * kProbes + q * Isa::kLanes;
      Isa::store(at, Isa::add(Isa::load(at), sum[r][q]));
    }
  }
}

// Sums of a group of rows.
struct GroupSums {
  static constexpr int kLanes = 8;              // at least those of a vector
  double products[kGroupRows * kProbes];        // X V
  double bounds[kGroupRows][kLanes];            // |X| weights: the sum of the lanes
  double squares[kGroupRows][kLanes];           // sum of squares of each row, likewise

  static double total(const double* lanes) {
    double pairs[kLanes / 2];
    for (int l = 0; l < kLanes / 2; ++l) pairs[l] = lanes[l] + lanes[l + kLanes / 2];
    return (pairs[0] + pairs[2]) + (pairs[1] + pairs[3]);
  }
};

// One row of a block: doubles in `out`; sums of |x| weights and x^2 are added to the lanes.
template <class Isa, bool Squares, class Real>
void convert_row(const Real* x, int64_t count, const double* weights, double* out, double* bound, double* square) {
  constexpr int kLanes = Isa::kLanes;
  auto bounds = Isa::zero(), squares = Isa::zero();
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) {
    const auto value = Isa::load(x + k);
    Isa::store(out + k, value);
    bounds = Isa::fma(Isa::abs(value), Isa::load(weights + k), bounds);
    if (Squares) squares = Isa::fma(value, value, squares);
  }
  Isa::store(bound, Isa::add(Isa::load(bound), bounds));
  if (Squares) Isa::store(square, Isa::add(Isa::load(square), squares));
  double last_bound = 0.0, last_square = 0.0;
  for (; k < count; ++k) {
    const double value = static_cast<double>(x[k]);
    out[k] = value;
    last_bound = fused(__builtin_fabs(value), weights[k], last_bound);
    if (Squares) last_square = fused(value, value, last_square);
  }
  bound[0] += last_bound;
  if (Squares) square[0] += last_square;
}

// One column of `rows` elements of a block, likewise, into one lane per row.
template <class Real>
void convert_column(const Real* __restrict x, int64_t rows, double weight, double* __restrict out, double* __restrict bounds,
                    double* __restrict squares) {
  for (int64_t r = 0; r < rows; ++r) {
    const double value = static_cast<double>(x[r]);
    out[r] = value;
    bounds[r] = fused(__builtin_fabs(value), weight, bounds[r]);
    squares[r] = fused(value, value, squares[r]);
  }
}

// Rows [row, row + rows) of `x` times `v` (columns, kProbes), into `sums`; those of squares only if requested.
template <class Isa, bool Squares, class Real>
void multiply_group_of(const magicube::RealMatrix& x, int64_t row, int64_t rows, const double* v, const double* weights,
                       double* scratch, GroupSums& sums) {
  constexpr int64_t kLine = 64 / sizeof(Real);
  const auto* data = static_cast<const Real*>(x.data);
  const int64_t step = magicube::sum_block(x.columns), pitch = magicube::block_pitch(x.columns);
  const int64_t row_step = x.column_major ? 1 : pitch, k_step = x.column_major ? kGroupRows : 1;  // of the converted block
  const int64_t padded = (rows + Isa::kRows - 1) / Isa::kRows * Isa::kRows;
  std::memset(&sums, 0, sizeof sums);
  for (int64_t k0 = 0; k0 < x.columns; k0 += step) {
    const int64_t count = lesser(step, x.columns - k0);
    if (x.column_major) {
      double bounds[kGroupRows] = {}, squares[kGroupRows] = {};
      for (int64_t k = 0; k < count; ++k) {
        double* const out = scratch + k * kGroupRows;
        for (int64_t r = rows; r < padded; ++r) out[r] = 0.0;
        convert_column(data + (k0 + k) * x.stride + row, rows, weights[k0 + k], out, bounds, squares);
      }
      for (int64_t r = 0; r < rows; ++r) sums.bounds[r][0] += bounds[r], sums.squares[r][0] += squares[r];
    } else {
      for (int64_t r = 0; r < rows; ++r) {
        const Real* const from = data + (row + r) * x.stride + k0;
        // of the next block, into L2: hardware prefetchers do not follow runs as short as a block
        for (int64_t k = 0; k < count; k += kLine) __builtin_prefetch(from + count + k, 0, 2);
        convert_row<Isa, Squares>(from, count, weights + k0, scratch + r * pitch, sums.bounds[r], sums.squares[r]);
      }
      for (int64_t r = rows; r < padded; ++r) std::memset(scratch + r * pitch, 0, static_cast<size_t>(count) * 8);
    }
    for (int64_t r = 0; r < padded; r += Isa::kRows) {
      multiply_tile<Isa>(scratch + r * row_step, row_step, k_step, count, v + k0 * kProbes, sums.products + r * kProbes);
    }
  }
}

template <class Isa, bool Squares>
void multiply_group(const magicube::RealMatrix& x, int64_t row, int64_t rows, const double* v, const double* weights,
                    double* scratch, GroupSums& sums) {
  if (x.is_double) multiply_group_of<Isa, Squares, double>(x, row, rows, v, weights, scratch, sums);
  else multiply_group_of<Isa, Squares, float>(x, row, rows, v, weights, scratch, sums);
}

// gram (kProbes, kProbes) += y^T y for up to kGroupRows rows of kProbes, and one more row of memory: tiles that do not divide
// kProbes read beyond a row, into rows that are left out.
template <class Isa>
void add_gram(const double* y, int64_t rows, double* gram) {
  double sums[(kProbes + Isa::kRows) * kProbes] = {};
  for (int i = 0; i < kProbes; i += Isa::kRows) multiply_tile<Isa>(y + i, 1, kProbes, rows, y, sums + i * kProbes);
  for (int i = 0; i < kProbes * kProbes; ++i) gram[i] += sums[i];
}

// Add sums of chunks, all doubles, in order; all are NaN if one is not finite.
template <class Sums>
void add_in_order(const Sums* parts, int64_t count, Sums& total) {
  constexpr int64_t kSums = sizeof(Sums) / sizeof(double);
  double sums[kSums] = {};
  for (int64_t part = 0; part < count; ++part) {
    const auto* const add = reinterpret_cast<const double*>(parts + part);
    for (int64_t i = 0; i < kSums; ++i) sums[i] += add[i];
  }
  bool finite = true;
  for (int64_t i = 0; i < kSums; ++i) finite &= __builtin_isfinite(sums[i]);
  for (int64_t i = 0; i < kSums && !finite; ++i) sums[i] = NAN;
  std::memcpy(&total, sums, sizeof total);
}

}  // namespace
