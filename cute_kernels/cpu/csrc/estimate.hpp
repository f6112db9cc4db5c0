// Sums for the error bound of a product C ~ A B by sixteen probes W: B W, then A (B W) - C W, in float64. The products of a real
// matrix with a (K, 16) matrix of doubles are summed in two levels.
//
// Rows come in groups of kGroupRows. A block of about sqrt(K) columns is converted to double, then multiplied by register tiles
// of Isa::kRows rows, whose accumulators are added to the totals of the group. A sum over n terms is thus rounded at most
// kb + ceil(n / kb) - 1 <= 2 sqrt(n) times, kb = ceil(sqrt(n)) (Higham, Accuracy and Stability of Numerical Algorithms,
// 2nd ed., sections 3.1 and 4.2).
//
// The bounds of float32 products take squared norms, and three probes whose vectors lie one after the other, (kFewProbes, columns).
// Three rows of a row-major matrix, or three vectors of rows of a column-major one, are multiplied at a time: with 9 sums of
// products and 3 of squares, all 16 registers of AVX2.
#pragma once

#include <cmath>
#include <cstdint>

#include "engine.hpp"
#include "integers.hpp"

namespace {  // compiled once per instruction set

using magicube::BoundArgs;
using magicube::BoundSums;
using magicube::kGroupRows;
using magicube::JudgeArgs;
using magicube::JudgeSums;
using magicube::kBoundRows;
using magicube::kFewProbes;
using magicube::kProbes;
using magicube::ProbeArgs;
using magicube::ThreadGroup;

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

// The float32 probes of a call as doubles, in the shared buffer; false if the call is over.
inline bool share_probes(const float* w, int64_t rows, ThreadGroup& group) {
  constexpr int64_t kPiece = 4096;  // per ticket
  auto* const out = reinterpret_cast<double*>(group.shared());
  const int64_t count = rows * kProbes;
  for (int64_t at = group.ticket() * kPiece; at < count; at = group.ticket() * kPiece) {
    for (int64_t i = at; i < lesser(count, at + kPiece); ++i) out[i] = w[i];
  }
  return group.barrier();
}

template <class Isa>
void probe_right(const ProbeArgs& args, ThreadGroup& group) {
  const int64_t rows = args.b.rows, groups = (rows + kGroupRows - 1) / kGroupRows;
  if (!share_probes(args.w, args.b.columns, group)) return;
  const auto* const w = reinterpret_cast<const double*>(group.shared());
  auto* const scratch = reinterpret_cast<double*>(group.local());
  GroupSums sums;
  for (int64_t g = group.ticket(); g < groups; g = group.ticket()) {
    const int64_t row = g * kGroupRows, count = lesser(kGroupRows, rows - row);
    multiply_group<Isa, false>(args.b, row, count, w, args.wbar, scratch, sums);
    std::memcpy(args.products + row * kProbes, sums.products, static_cast<size_t>(count) * kProbes * 8);
    for (int64_t r = 0; r < count; ++r) args.bounds[row + r] = GroupSums::total(sums.bounds[r]);
  }
}

template <class Isa>
void add_rows(const GroupSums& product, const GroupSums& claimed, int64_t rows, JudgeSums& part) {
  double y[(kGroupRows + 1) * kProbes] = {};
  for (int64_t r = 0; r < rows; ++r) {
    const double *left = product.products + r * kProbes, *right = claimed.products + r * kProbes;
    double squares[2] = {};
    for (int p = 0; p < kProbes; ++p) {
      y[r * kProbes + p] = left[p] - right[p];
      squares[0] = fused(left[p], left[p], squares[0]);
      squares[1] = fused(right[p], right[p], squares[1]);
    }
    part.product += squares[0];
    part.claimed += squares[1];
    part.norm += GroupSums::total(claimed.squares[r]);
    const double a_bound = GroupSums::total(product.bounds[r]), c_bound = GroupSums::total(claimed.bounds[r]);
    part.a_bound = fused(a_bound, a_bound, part.a_bound);
    part.c_bound = fused(c_bound, c_bound, part.c_bound);
  }
  add_gram<Isa>(y, rows, part.gram);
}

// Chunks of about sqrt(M) rows have sums of their own, which one thread adds in order: results do not depend on the threads.
template <class Isa>
void judge(const JudgeArgs& args, ThreadGroup& group) {
  const int64_t rows = args.a.rows, chunk_rows = magicube::judge_chunk_rows(rows);
  const int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;
  if (!share_probes(args.w, args.c.columns, group)) return;
  const auto* const w = reinterpret_cast<const double*>(group.shared());
  auto* const parts = reinterpret_cast<JudgeSums*>(group.shared() + magicube::probe_bytes(args.c.columns));
  auto* const scratch = reinterpret_cast<double*>(group.local());
  GroupSums product, claimed;
  for (int64_t chunk = group.ticket(); chunk < chunks; chunk = group.ticket()) {
    JudgeSums& part = parts[chunk];
    part = JudgeSums{};
    const int64_t end = lesser(rows, (chunk + 1) * chunk_rows);
    for (int64_t row = chunk * chunk_rows; row < end; row += kGroupRows) {
      const int64_t count = lesser(kGroupRows, end - row);
      multiply_group<Isa, false>(args.a, row, count, args.products, args.bounds, scratch, product);
      multiply_group<Isa, true>(args.c, row, count, w, args.wbar, scratch, claimed);
      add_rows<Isa>(product, claimed, count, part);
    }
  }
  if (!group.barrier()) return;
  if (group.rank() == 0) add_in_order(parts, chunks, *args.out);
}

constexpr int64_t kFewBlock = 512;  // columns whose vectors stay in L1
constexpr int kTriple = 3;

template <class Isa>
double sum_lanes(typename Isa::Vector value) {
  double lanes[Isa::kLanes], total = 0.0;
  Isa::store(lanes, value);
  for (int l = 0; l < Isa::kLanes; ++l) total += lanes[l];
  return total;
}

template <class Isa>
double squares_of_run(const float* x, int64_t count) {
  constexpr int kLanes = Isa::kLanes, kSums = 4;  // independent sums hide the latency of an FMA
  typename Isa::Vector squares[kSums];
#pragma GCC unroll 4
  for (int i = 0; i < kSums; ++i) squares[i] = Isa::zero();
  int64_t k = 0;
  for (; k + kSums * kLanes <= count; k += kSums * kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kSums; ++i) {
      const auto value = Isa::load(x + k + i * kLanes);
      squares[i] = Isa::fma(value, value, squares[i]);
    }
  }
  double last = 0.0;
  for (; k < count; ++k) last = fused(x[k], x[k], last);
  for (int i = 0; i < kSums; ++i) last += sum_lanes<Isa>(squares[i]);
  return last;
}

// Squares of some contiguous runs: rows, or columns if they are contiguous.
template <class Isa>
double squares_of(const magicube::RealMatrix& x, int64_t first, int64_t runs) {
  const int64_t length = x.column_major ? x.rows : x.columns;
  const auto* data = static_cast<const float*>(x.data) + first * x.stride;
  if (x.stride == length) return squares_of_run<Isa>(data, runs * length);
  double total = 0.0;
  for (int64_t i = 0; i < runs; ++i) total += squares_of_run<Isa>(data + i * x.stride, length);
  return total;
}

// y (rows, kFewProbes) += x v^T for some rows of `count` columns; returns the sum of the squares of x.
template <class Isa, int Rows>
__attribute__((noinline)) double multiply_few_rows(const float* x, int64_t stride, int64_t count, const double* v, int64_t pitch,
                                                   double* y) {
  typename Isa::Vector sum[Rows][kFewProbes], square[Rows];
#pragma GCC unroll 3
  for (int r = 0; r < Rows; ++r) {
    square[r] = Isa::zero();
#pragma GCC unroll 3
    for (int p = 0; p < kFewProbes; ++p) sum[r][p] = Isa::zero();
  }
  int64_t k = 0;
  for (; k + Isa::kLanes <= count; k += Isa::kLanes) {
    typename Isa::Vector left[Rows];
#pragma GCC unroll 3
    for (int r = 0; r < Rows; ++r) {
      left[r] = Isa::load(x + r * stride + k);
      square[r] = Isa::fma(left[r], left[r], square[r]);
    }
#pragma GCC unroll 3
    for (int p = 0; p < kFewProbes; ++p) {
      const auto right = Isa::load(v + p * pitch + k);
#pragma GCC unroll 3
      for (int r = 0; r < Rows; ++r) sum[r][p] = Isa::fma(left[r], right, sum[r][p]);
    }
  }
  double squares = 0.0;
#pragma GCC unroll 3
  for (int r = 0; r < Rows; ++r) {
    squares += sum_lanes<Isa>(square[r]);
#pragma GCC unroll 3
    for (int p = 0; p < kFewProbes; ++p) y[r * kFewProbes + p] += sum_lanes<Isa>(sum[r][p]);
  }
  for (; k < count; ++k) {
    for (int r = 0; r < Rows; ++r) {
      const double value = x[r * stride + k];
      squares = fused(value, value, squares);
      for (int p = 0; p < kFewProbes; ++p) y[r * kFewProbes + p] = fused(value, v[p * pitch + k], y[r * kFewProbes + p]);
    }
  }
  return squares;
}

// The same for kTriple * Isa::kLanes rows of contiguous columns.
template <class Isa>
__attribute__((noinline)) double multiply_few_columns(const float* x, int64_t stride, int64_t count, const double* v, int64_t pitch,
                                                      double* y) {
  typename Isa::Vector sum[kTriple][kFewProbes], square[kTriple];
#pragma GCC unroll 3
  for (int i = 0; i < kTriple; ++i) {
    square[i] = Isa::zero();
#pragma GCC unroll 3
    for (int p = 0; p < kFewProbes; ++p) sum[i][p] = Isa::zero();
  }
  for (int64_t k = 0; k < count; ++k, x += stride) {
    typename Isa::Vector left[kTriple];
#pragma GCC unroll 3
    for (int i = 0; i < kTriple; ++i) {
      left[i] = Isa::load(x + i * Isa::kLanes);
      square[i] = Isa::fma(left[i], left[i], square[i]);
    }
#pragma GCC unroll 3
    for (int p = 0; p < kFewProbes; ++p) {
      const auto right = Isa::broadcast(v[p * pitch + k]);
#pragma GCC unroll 3
      for (int i = 0; i < kTriple; ++i) sum[i][p] = Isa::fma(left[i], right, sum[i][p]);
    }
  }
  double lanes[Isa::kLanes], squares = 0.0;
#pragma GCC unroll 3
  for (int i = 0; i < kTriple; ++i) {
    squares += sum_lanes<Isa>(square[i]);
#pragma GCC unroll 3
    for (int p = 0; p < kFewProbes; ++p) {
      Isa::store(lanes, sum[i][p]);
      for (int l = 0; l < Isa::kLanes; ++l) y[(i * Isa::kLanes + l) * kFewProbes + p] += lanes[l];
    }
  }
  return squares;
}

// y (rows, kFewProbes) = x v^T for rows [row, row + rows) of `x`; returns the sum of their squares.
template <class Isa>
double multiply_few(const magicube::RealMatrix& x, int64_t row, int64_t rows, const double* v, double* y) {
  const auto* const data = static_cast<const float*>(x.data);
  std::memset(y, 0, static_cast<size_t>(rows) * kFewProbes * sizeof(double));
  double squares = 0.0;
  for (int64_t k0 = 0; k0 < x.columns; k0 += kFewBlock) {
    const int64_t count = lesser(kFewBlock, x.columns - k0);
    const double* const part = v + k0;
    int64_t r = 0;
    if (x.column_major) {
      constexpr int64_t kRows = kTriple * Isa::kLanes;
      const float* const from = data + k0 * x.stride + row;
      for (; r + kRows <= rows; r += kRows) {
        squares += multiply_few_columns<Isa>(from + r, x.stride, count, part, x.columns, y + r * kFewProbes);
      }
      for (; r < rows; ++r) {
        for (int64_t k = 0; k < count; ++k) {
          const double value = from[k * x.stride + r];
          squares = fused(value, value, squares);
          for (int p = 0; p < kFewProbes; ++p) y[r * kFewProbes + p] = fused(value, part[p * x.columns + k], y[r * kFewProbes + p]);
        }
      }
    } else {
      const float* const from = data + row * x.stride + k0;
      for (; r + kTriple <= rows; r += kTriple) {
        squares += multiply_few_rows<Isa, kTriple>(from + r * x.stride, x.stride, count, part, x.columns, y + r * kFewProbes);
      }
      for (; r < rows; ++r) squares += multiply_few_rows<Isa, 1>(from + r * x.stride, x.stride, count, part, x.columns, y + r * kFewProbes);
    }
  }
  return squares;
}

inline int64_t bound_chunks(int64_t rows) { return (rows + kBoundRows - 1) / kBoundRows; }

// Norms alone: contiguous runs of the three matrices.
template <class Isa>
void sum_norms(const BoundArgs& args, BoundSums* parts, ThreadGroup& group) {
  const magicube::RealMatrix* const matrices[] = {&args.a, &args.b, &args.c};
  int64_t runs[3], ends[3], chunks = 0;
  for (int i = 0; i < 3; ++i) {
    runs[i] = matrices[i]->column_major ? matrices[i]->columns : matrices[i]->rows;
    ends[i] = chunks += bound_chunks(runs[i]);
  }
  for (int64_t chunk = group.ticket(); chunk < chunks; chunk = group.ticket()) {
    const int i = chunk < ends[0] ? 0 : chunk < ends[1] ? 1 : 2;
    const int64_t first = (chunk - (i ? ends[i - 1] : 0)) * kBoundRows;
    double sums[3] = {};
    sums[i] = squares_of<Isa>(*matrices[i], first, lesser(kBoundRows, runs[i] - first));
    parts[chunk] = BoundSums{sums[0], sums[1], sums[2], 0.0};
  }
  if (!group.barrier()) return;
  if (group.rank() == 0) add_in_order(parts, chunks, *args.out);
}

// Chunks have sums of their own, which one thread adds in order: results do not depend on the threads.
template <class Isa>
void bound_sums(const BoundArgs& args, ThreadGroup& group) {
  auto* const parts = reinterpret_cast<BoundSums*>(group.shared());
  if (args.w == nullptr) return sum_norms<Isa>(args, parts, group);
  const int64_t inner = args.b.rows, right_chunks = bound_chunks(inner), left_chunks = bound_chunks(args.a.rows);
  auto* const products = reinterpret_cast<double*>(parts + right_chunks + left_chunks);  // (kFewProbes, inner), B W
  double y[kBoundRows * kFewProbes], claimed[kBoundRows * kFewProbes];
  for (int64_t chunk = group.ticket(); chunk < right_chunks; chunk = group.ticket()) {
    const int64_t row = chunk * kBoundRows, rows = lesser(kBoundRows, inner - row);
    parts[chunk] = BoundSums{0.0, multiply_few<Isa>(args.b, row, rows, args.w, y), 0.0, 0.0};
    for (int p = 0; p < kFewProbes; ++p) {
      for (int64_t r = 0; r < rows; ++r) products[p * inner + row + r] = y[r * kFewProbes + p];
    }
  }
  if (!group.barrier()) return;
  for (int64_t chunk = group.ticket(); chunk < left_chunks; chunk = group.ticket()) {
    const int64_t row = chunk * kBoundRows, rows = lesser(kBoundRows, args.a.rows - row);
    BoundSums& part = parts[right_chunks + chunk];
    part = BoundSums{multiply_few<Isa>(args.a, row, rows, products, y), 0.0, multiply_few<Isa>(args.c, row, rows, args.w, claimed),
                     0.0};
    for (int64_t i = 0; i < rows * kFewProbes; ++i) part.error = fused(y[i] - claimed[i], y[i] - claimed[i], part.error);
  }
  if (!group.barrier()) return;
  if (group.rank() == 0) add_in_order(parts, right_chunks + left_chunks, *args.out);
}

}  // namespace
