// Direct product of one int8 digit per entry, with its error by sixteen probes: C = s_a (A1 B1) s_b, A ~ s_a A1, B ~ B1 s_b.
//
// What the digits leave, dA = A - s_a A1 and dB, is exact in float32, so that A B - s_a (A1 B1) s_b = A dB + dA (B - dB) is no
// difference of large numbers. Its product with the probes W needs only dB W and (B - dB) W, prepared with B: the sums of a row
// of A run while its digits are made. They are float32 over blocks of kErrorBlock k, then float64.
//
// Packed digits of B: [panel of kPanel columns][k / 4][column][k % 4], zeros in the padding.
#pragma once

#include "dense.hpp"
#include "digits.hpp"
#include "estimate.hpp"

namespace {  // compiled once per instruction set

using magicube::DirectArgs;
using magicube::DirectSums;
using magicube::kDirectRows;
using magicube::kErrorBlock;
using magicube::ProbeDigitsArgs;

// dB W and (B - dB) W with |dB| wbar and |B - dB| wbar, in float64 as probe_right; digits and their scales are exact there.
template <class Isa>
void probe_digits(const ProbeDigitsArgs& args, ThreadGroup& group) {
  const int64_t rows = args.rows, columns = args.columns, groups = (rows + kGroupRows - 1) / kGroupRows;
  const int64_t step = magicube::sum_block(columns), pitch = magicube::block_pitch(columns);
  double* const parts[2] = {reinterpret_cast<double*>(group.local()),
                            reinterpret_cast<double*>(group.local() + magicube::probe_local_bytes(columns))};
  GroupSums sums[2];
  for (int64_t g = group.ticket(); g < groups; g = group.ticket()) {
    const int64_t row = g * kGroupRows, count = lesser(kGroupRows, rows - row);
    std::memset(sums, 0, sizeof sums);
    for (int64_t k0 = 0; k0 < columns; k0 += step) {
      const int64_t length = lesser(step, columns - k0);
      for (int64_t r = 0; r < kGroupRows; ++r) {
        double *const residual = parts[0] + r * pitch, *const coarse = parts[1] + r * pitch;
        const int64_t at = (row + lesser(r, count - 1)) * columns + k0;  // rows beyond the last repeat it
        for (int64_t k = 0; k < length; ++k) {
          coarse[k] = static_cast<double>(args.scale[k0 + k]) * args.digits[at + k];
          residual[k] = static_cast<double>(args.b[at + k]) - coarse[k];
        }
        for (int part = 0; part < 2; ++part) {
          double* const x = parts[part] + r * pitch;
          convert_row<Isa, false>(x, length, args.wbar + k0, x, sums[part].bounds[r], sums[part].squares[r]);
        }
      }
      for (int part = 0; part < 2; ++part) {
        for (int64_t r = 0; r < kGroupRows; r += Isa::kRows) {
          multiply_tile<Isa>(parts[part] + r * pitch, pitch, 1, length, args.w + k0 * kProbes, sums[part].products + r * kProbes);
        }
      }
    }
    for (int part = 0; part < 2; ++part) {
      std::memcpy(args.products + (part * rows + row) * kProbes, sums[part].products, static_cast<size_t>(count) * kProbes * 8);
      for (int64_t r = 0; r < count; ++r) args.bounds[part * rows + row + r] = GroupSums::total(sums[part].bounds[r]);
    }
  }
}

// A row of A: its scale, and the power of two that brings its amax to [1, 2), or as near as float32 allows.
struct RowScale {
  float scale;           // s_a; NaN for a row with non-finite entries, whose digits are zero
  float power;
  float unit, inverse;   // scale * power and its inverse
  float mask;            // all bits, or none for a non-finite row

  void set(int32_t absmax_bits) {
    scale = digit_scale(absmax_bits, 127.0, false);
    const bool finite = scale == scale;
    const int exponent = absmax_bits >> 23;  // biased; 0 for zeros and subnormal numbers
    power = from_bits<float>(!finite ? 0x3f800000 : (exponent < 1 ? 253 : 254 - exponent < 1 ? 1 : 254 - exponent) << 23);
    unit = finite ? scale * power : 1.0f;
    inverse = 1.0f / unit;
    mask = from_bits<float>(finite ? ~0 : 0);
  }
};

// A block of a row: digits, and the row and its residual times the power of two. The digits are those of SingleDigits.
template <class Digit>
void split_row(const float* __restrict x, const RowScale& row, int64_t count, Digit offset, Digit* __restrict digits,
               float* __restrict values, float* __restrict residuals) {
  const float power = row.power, inverse = row.inverse, unit = row.unit, mask = row.mask;
  for (int64_t k = 0; k < count; ++k) {
    const float value = masked(x[k] * power, mask), q = nearest(value * inverse);
    digits[k] = static_cast<Digit>(static_cast<int32_t>(q) + offset);
    values[k] = value;
    residuals[k] = Divide::less(value, q, unit);
  }
}

// totals (Isa::kRows, kProbes) += values v[:, 0] + residuals v[:, 1] of one block; `block` has rows of values, then residuals, of
// kErrorBlock each. Every loop over the accumulators must unroll.
template <class Isa>
__attribute__((noinline)) void add_error_tile(const float* block, int64_t count, const float* v, double* totals) {
  constexpr int kRows = Isa::kRows, kVectors = kProbes / Isa::kLanes;
  typename Isa::Vector sum[2][kRows][kVectors];
#pragma GCC unroll 2
  for (int part = 0; part < 2; ++part) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int q = 0; q < kVectors; ++q) sum[part][r][q] = Isa::zero();
    }
  }
  for (int64_t k = 0; k < count; ++k, ++block, v += 2 * kProbes) {
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      typename Isa::Vector left[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) left[r] = Isa::broadcast(block[(2 * r + part) * kErrorBlock]);
#pragma GCC unroll 8
      for (int q = 0; q < kVectors; ++q) {
        const auto right = Isa::load(v + part * kProbes + q * Isa::kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sum[part][r][q] = Isa::fma(left[r], right, sum[part][r][q]);
      }
    }
  }
  float lanes[2][kRows][kProbes];
#pragma GCC unroll 2
  for (int part = 0; part < 2; ++part) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int q = 0; q < kVectors; ++q) Isa::store(lanes[part][r] + q * Isa::kLanes, sum[part][r][q]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kProbes; ++p) {
      totals[r * kProbes + p] += static_cast<double>(lanes[0][r][p]) + static_cast<double>(lanes[1][r][p]);
    }
  }
}

// Bounds of the magnitudes in the sums of a block of one row, added to lanes. A lane sums at most 2^17 / kLanes pairs in float32,
// whose rounding is far below the 1% by which the bound is enlarged.
template <class Isa>
void add_bounds(const float* values, const float* residuals, int64_t count, const float* bounds, const float* residual_bounds,
                float* lanes) {
  constexpr int kLanes = Isa::kLanes;
  auto sum = Isa::load(lanes), residual_sum = Isa::zero();
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) {
    sum = Isa::fma(Isa::abs(Isa::load(values + k)), Isa::load(bounds + k), sum);
    residual_sum = Isa::fma(Isa::abs(Isa::load(residuals + k)), Isa::load(residual_bounds + k), residual_sum);
  }
  Isa::store(lanes, Isa::add(sum, residual_sum));
  for (; k < count; ++k) {
    lanes[0] += __builtin_fabsf(values[k]) * bounds[k] + __builtin_fabsf(residuals[k]) * residual_bounds[k];
  }
}

// Digits of up to kGroupRows rows from `row` on, staged from row `at` on, with their scales, and the sums of their error in `sums`.
template <class Isa>
void stage_group(const DirectArgs& args, int64_t row, int64_t rows, const StagedRows<typename Isa::Product>& staged, int64_t at,
                 float* scales, DirectSums& sums) {
  using Floats = typename Isa::Floats;
  using Product = typename Isa::Product;
  alignas(64) float block[kGroupRows * 2 * kErrorBlock];
  double y[(kGroupRows + 1) * kProbes] = {};
  alignas(64) float bounds[kGroupRows][Floats::kLanes] = {};
  RowScale row_scales[kGroupRows];
  for (int64_t r = 0; r < rows; ++r) {
    row_scales[r].set(row_absmax(args.a + (row + r) * args.a_stride, args.inner));
    scales[r] = row_scales[r].scale;
  }
  const int64_t padded = (rows + Floats::kRows - 1) / Floats::kRows * Floats::kRows;
  std::memset(block + rows * 2 * kErrorBlock, 0, static_cast<size_t>(padded - rows) * 2 * kErrorBlock * sizeof(float));
  for (int64_t k0 = 0; k0 < args.inner; k0 += kErrorBlock) {
    const int64_t count = lesser(kErrorBlock, args.inner - k0);
    for (int64_t r = 0; r < rows; ++r) {
      float *const values = block + r * 2 * kErrorBlock, *const residuals = values + kErrorBlock;
      split_row(args.a + (row + r) * args.a_stride + k0, row_scales[r], count, Product::kOffset, staged.row(at + r) + k0, values,
                residuals);
      add_bounds<Floats>(values, residuals, count, args.bounds + k0, args.bounds + args.inner + k0, bounds[r]);
    }
    for (int64_t r = 0; r < padded; r += Floats::kRows) {
      add_error_tile<Floats>(block + r * 2 * kErrorBlock, count, args.vectors + k0 * 2 * kProbes, y + r * kProbes);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const double unit = args.unit / static_cast<double>(row_scales[r].power);
    for (int p = 0; p < kProbes; ++p) y[r * kProbes + p] *= unit;
    double bound = 0.0;
    for (int l = 0; l < Floats::kLanes; ++l) bound += static_cast<double>(bounds[r][l]);
    bound *= unit;
    sums.bound = fused(bound, bound, sums.bound);
  }
  for (int64_t r = 0; r < rows; r += kTogether) staged.finish(at + r, lesser(kTogether, rows - r));
  add_gram<typename Isa::Doubles>(y, rows, sums.gram);
}

// A row of a tile of C from its integer sums. Separate function: compilers honor `restrict` on parameters.
inline void scale_row(const int32_t* __restrict sums, int64_t columns, float row_scale, const float* __restrict col_scale,
                      float* __restrict out) {
  for (int64_t j = 0; j < columns; ++j) out[j] = static_cast<float>(sums[j]) * row_scale * col_scale[j];
}

// One tile of C, and the sum of the squares of its entries.
template <class Doubles>
double store_tile(const int32_t* sums, int64_t rows, int64_t columns, const float* row_scale, const float* col_scale, float* out,
                  int64_t out_stride) {
  constexpr int kLanes = Doubles::kLanes, kSums = 4;  // independent sums hide the latency of an FMA
  typename Doubles::Vector squares[kSums];
#pragma GCC unroll 4
  for (int i = 0; i < kSums; ++i) squares[i] = Doubles::zero();
  double last = 0.0;
  for (int64_t r = 0; r < rows; ++r, sums += kPanel, out += out_stride) {
    if (columns == kPanel) scale_row(sums, kPanel, row_scale[r], col_scale, out);
    else scale_row(sums, columns, row_scale[r], col_scale, out);
    int64_t j = 0;
    for (; j + kSums * kLanes <= columns; j += kSums * kLanes) {
#pragma GCC unroll 4
      for (int i = 0; i < kSums; ++i) {
        const auto value = Doubles::load(out + j + i * kLanes);
        squares[i] = Doubles::fma(value, value, squares[i]);
      }
    }
    for (; j < columns; ++j) last = fused(out[j], out[j], last);
  }
  double lanes[kLanes];
  for (int i = 0; i < kSums; ++i) {
    Doubles::store(lanes, squares[i]);
    for (int l = 0; l < kLanes; ++l) last += lanes[l];
  }
  return last;
}

// Staged rows times all panels.
template <class Isa>
void multiply_staged(const DirectArgs& args, int64_t row, int64_t rows, const StagedRows<typename Isa::Product>& staged,
                     const float* scales, DirectSums& sums) {
  using Product = typename Isa::Product;
  const int64_t quads = (args.inner + kQuad - 1) / kQuad;
  alignas(64) int32_t sums_of_rows[kDirectRows * kPanel];
  for (int64_t column = 0; column < args.n; column += kPanel) {
    const int8_t* const panel = args.packed + column * quads * kQuad;
    const int64_t columns = lesser(kPanel, args.n - column);
    staged.multiply(0, rows, panel, 0, quads, columns, args.column_sums + column, sums_of_rows);
    for (int64_t r = 0; r < rows; r += Product::kRows) {
      const int64_t count = lesser(Product::kRows, rows - r);
      sums.norm += store_tile<typename Isa::Doubles>(sums_of_rows + r * kPanel, count, columns, scales + r, args.col_scale + column,
                                                     args.out + (row + r) * args.n + column, args.n);
    }
  }
}

template <class Isa>
void direct(const DirectArgs& args, ThreadGroup& group) {
  const int64_t chunk_rows = magicube::judge_chunk_rows(args.rows), chunks = (args.rows + chunk_rows - 1) / chunk_rows;
  auto* const parts = reinterpret_cast<DirectSums*>(group.shared());
  const StagedRows<typename Isa::Product> staged(reinterpret_cast<int8_t*>(group.local()), kDirectRows,
                                                 {args.packed, args.column_sums, args.inner, args.n}, false);
  float scales[kDirectRows];
  for (int64_t chunk = group.ticket(); chunk < chunks; chunk = group.ticket()) {
    parts[chunk] = DirectSums{};
    const int64_t end = lesser(args.rows, (chunk + 1) * chunk_rows);
    for (int64_t row = chunk * chunk_rows; row < end; row += kDirectRows) {
      const int64_t rows = lesser(kDirectRows, end - row);
      for (int64_t r = 0; r < rows; r += kGroupRows) {
        stage_group<Isa>(args, row + r, lesser(kGroupRows, rows - r), staged, r, scales + r, parts[chunk]);
      }
      multiply_staged<Isa>(args, row, rows, staged, scales, parts[chunk]);
    }
  }
  if (!group.barrier()) return;
  if (group.rank() == 0) add_in_order(parts, chunks, *args.sums);
}

}  // namespace
