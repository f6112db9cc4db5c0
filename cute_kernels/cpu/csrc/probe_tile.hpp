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
template <class Isa>
void multiply_tile(const double* block, int64_t row_step, int64_t k_step, int64_t count, const double* v, double* totals) {
  constexpr int kRows = Isa::kRows, kVectors = kProbes / Isa::kLanes;
  typename Isa::Vector sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int q = 0; q < kVectors; ++q) sum[r][q] = Isa::zero();
  }
  for (int64_t k = 0; k < count; ++k, block += k_step, v += kProbes) {
    typename Isa::Vector right[kVectors];
#pragma GCC unroll 8
    for (int q = 0; q < kVectors; ++q) right[q] = Isa::load(v + q * Isa::kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto left = Isa::broadcast(block[r * row_step]);
#pragma GCC unroll 8
      for (int q = 0; q < kVectors; ++q) sum[r][q] = Isa::fma(left, right[q], sum[r][q]);
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

// One row of a block: doubles in `out`, sum |x| weights added to *bound, sum x^2 to *square.
template <class Isa, class Real>
void convert_row(const Real* x, int64_t count, const double* weights, double* out, double* bound, double* square) {
  constexpr int kLanes = Isa::kLanes;
  auto bounds = Isa::zero(), squares = Isa::zero();
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) {
    const auto value = Isa::load(x + k);
    Isa::store(out + k, value);
    bounds = Isa::fma(Isa::abs(value), Isa::load(weights + k), bounds);
    squares = Isa::fma(value, value, squares);
  }
  double lanes[2][kLanes];
  Isa::store(lanes[0], bounds);
  Isa::store(lanes[1], squares);
  for (; k < count; ++k) {
    const double value = static_cast<double>(x[k]);
    out[k] = value;
    lanes[0][0] = fused(std::fabs(value), weights[k], lanes[0][0]);
    lanes[1][0] = fused(value, value, lanes[1][0]);
  }
  for (int l = 1; l < kLanes; ++l) lanes[0][0] += lanes[0][l], lanes[1][0] += lanes[1][l];
  *bound += lanes[0][0];
  *square += lanes[1][0];
}

// One column of `rows` elements of a block; the sums of a block start at zero.
template <class Real>
void convert_column(const Real* __restrict x, int64_t rows, double weight, double* __restrict out, double* __restrict bounds,
                    double* __restrict squares) {
  for (int64_t r = 0; r < rows; ++r) {
    const double value = static_cast<double>(x[r]);
    out[r] = value;
    bounds[r] = fused(std::fabs(value), weight, bounds[r]);
    squares[r] = fused(value, value, squares[r]);
  }
}

// Sums of a group of rows.
struct GroupSums {
  double products[kGroupRows * kProbes];  // X V
  double bounds[kGroupRows];              // |X| weights
  double squares[kGroupRows];             // sum of squares of each row
};

// Rows [row, row + rows) of `x` times `v` (columns, kProbes), into `sums`.
template <class Isa, class Real>
void multiply_group(const magicube::RealMatrix& x, int64_t row, int64_t rows, const double* v, const double* weights,
                    double* scratch, GroupSums& sums) {
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
      for (int64_t r = 0; r < rows; ++r) sums.bounds[r] += bounds[r], sums.squares[r] += squares[r];
    } else {
      for (int64_t r = 0; r < rows; ++r) {
        convert_row<Isa>(data + (row + r) * x.stride + k0, count, weights + k0, scratch + r * pitch, sums.bounds + r,
                         sums.squares + r);
      }
      for (int64_t r = rows; r < padded; ++r) std::memset(scratch + r * pitch, 0, static_cast<size_t>(count) * 8);
    }
    for (int64_t r = 0; r < padded; r += Isa::kRows) {
      multiply_tile<Isa>(scratch + r * row_step, row_step, k_step, count, v + k0 * kProbes, sums.products + r * kProbes);
    }
  }
}

template <class Isa>
void multiply_group_as(const magicube::RealMatrix& x, int64_t row, int64_t rows, const double* v, const double* weights,
                       double* scratch, GroupSums& sums) {
  if (x.is_double) multiply_group<Isa, double>(x, row, rows, v, weights, scratch, sums);
  else multiply_group<Isa, float>(x, row, rows, v, weights, scratch, sums);
}

// gram (kProbes, kProbes) += y^T y for `rows` rows of kProbes.
template <class Isa>
void add_gram(const double* y, int64_t rows, double* gram) {
  constexpr int kVectors = kProbes / Isa::kLanes;
  for (int64_t r = 0; r < rows; ++r, y += kProbes) {
    typename Isa::Vector right[kVectors];
#pragma GCC unroll 8
    for (int q = 0; q < kVectors; ++q) right[q] = Isa::load(y + q * Isa::kLanes);
    for (int i = 0; i < kProbes; ++i) {
      const auto left = Isa::broadcast(y[i]);
#pragma GCC unroll 8
      for (int q = 0; q < kVectors; ++q) {
        double* const at = gram + i * kProbes + q * Isa::kLanes;
        Isa::store(at, Isa::fma(left, right[q], Isa::load(at)));
      }
    }
  }
}

}  // namespace
