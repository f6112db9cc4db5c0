// Quantization with per-column scales: q = clamp(round(x / scale)), scale = amax / q_max of a column.
//
// Architectures: sm_80 and later.
// Work: a CTA has lanes * kVec columns and a part of the rows; a thread has kVec columns of kSteps rows at a time.
// Pipeline: absmax_columns, then encode_columns in reverse order of the rows; one launch for given scales.
#pragma once

#include "convert/quantize.cuh"

namespace magicube {

// Part of a CTA in (slices, rows, columns): lanes * kVec columns, and every splits-th group of rows.
template <class Q>
struct ColumnTile {
  int lanes, groups, lane, group;
  int64_t tile, split, slice, column, valid;

  __device__ ColumnTile(int64_t columns, int64_t tiles, int64_t splits, int64_t lanes_)
      : lanes(int(lanes_)), groups(Q::kThreads / int(lanes_)), lane(int(threadIdx.x) & (int(lanes_) - 1)),
        group(int(threadIdx.x) / int(lanes_)), tile(blockIdx.x % uint32_t(tiles)),
        split(blockIdx.x / uint32_t(tiles) % uint32_t(splits)), slice(blockIdx.x / uint32_t(tiles) / uint32_t(splits)),
        column((tile * lanes + lane) * Q::kVec), valid(columns - column) {}

  __device__ int columns() const { return lanes * Q::kVec; }

  // Call body(row, entries) for the rows of this thread, kSteps at a time. Backwards in the second pass: the first one left
  // the last rows in L2.
  template <class Body>
  __device__ void each_row(const typename Q::Source* slice_at, int64_t pitch, int64_t rows, int64_t splits, int64_t passes,
                           bool vector, bool backwards, Body&& body) const {
    const int64_t step = splits * groups, first = split * groups + group;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t row = first + (backwards ? passes - 1 - pass : pass) * step * Q::kSteps;
      alignas(16) typename Q::Source part[Q::kSteps][Q::kVec];
      CUTE_UNROLL
      for (int s = 0; s < Q::kSteps; ++s) {
        const int64_t at = row + s * step;
        load<Q>(slice_at + at * pitch + column, at < rows ? valid : 0, vector, part[s]);
      }
      CUTE_UNROLL
      for (int s = 0; s < Q::kSteps; ++s) {
        if (row + s * step < rows) body(row + s * step, part[s]);
      }
    }
  }

  // Amax of each column over the groups; thread c < columns() gets that of column c of the tile.
  __device__ typename Q::Bits reduce_groups(const typename Q::Bits (&absmax)[Q::kVec], typename Q::Bits* shared) const {
    CUTE_UNROLL
    for (int i = 0; i < Q::kVec; ++i) shared[threadIdx.x * Q::kVec + i] = absmax[i];  // (groups, columns)
    __syncthreads();
    typename Q::Bits column_absmax = 0;
    if (int(threadIdx.x) < columns()) {
      for (int g = 0; g < groups; ++g) {
        const auto other = shared[g * columns() + threadIdx.x];
        column_absmax = other > column_absmax ? other : column_absmax;
      }
    }
    return column_absmax;
  }
};

// Partial amaxes of columns; the rows are split over `splits` CTAs.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
absmax_columns(const typename Config::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t tiles, int64_t splits,
               int64_t passes, int64_t lanes, typename Quantizer<Config>::Bits* partials, int* flags, int64_t vector_loads) {
  pdl_wait();
  using Q = Quantizer<Config>;
  static_assert(Q::kTileColumns <= Q::kThreads, "a thread for each column of a tile");
  __shared__ typename Q::Bits shared[Q::kThreads * Q::kVec];
  const ColumnTile<Q> own(columns, tiles, splits, lanes);
  AbsmaxState<Q> state;
  typename Q::Bits absmax[Q::kVec] = {};
  own.each_row(x + own.slice * rows * pitch, pitch, rows, splits, passes, vector_loads != 0, false,
               [&](int64_t, const typename Q::Source (&part)[Q::kVec]) {
                 CUTE_UNROLL
                 for (int i = 0; i < Q::kVec; ++i) state.update(part[i], absmax[i]);
               });
  CUTE_UNROLL
  for (int i = 0; i < Q::kVec; ++i) state.absmax = absmax[i] > state.absmax ? absmax[i] : state.absmax;
  state.write_flags(flags);
  const auto column_absmax = own.reduce_groups(absmax, shared);
  const int64_t column = own.tile * own.columns() + threadIdx.x;
  if (int(threadIdx.x) < own.columns() && column < columns) {
    partials[(own.slice * splits + own.split) * columns + column] = column_absmax;  // (slices, splits, columns)
  }
}

// Integers of columns. Scales are given (parts == 0), or follow from `parts` partial amaxes per column.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
encode_columns(const typename Config::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t tiles, int64_t splits,
               int64_t passes, int64_t lanes, const typename Quantizer<Config>::Bits* partials, int64_t parts,
               typename Quantizer<Config>::Real* scales, uint8_t* out, int64_t out_pitch, int* flags,
               int64_t vector_loads, int64_t vector_stores) {
  pdl_wait();
  using Q = Quantizer<Config>;
  using Real = typename Q::Real;
  __shared__ typename Q::Bits shared[Q::kThreads * Q::kVec];
  __shared__ Real shared_scales[Q::kTileColumns];
  __shared__ Rule<Config> rules[Q::kTileColumns];
  const ColumnTile<Q> own(columns, tiles, splits, lanes);
  typename Q::Bits absmax[Q::kVec] = {};
#pragma unroll 4
  for (int p = own.group; p < int(parts); p += own.groups) {
    CUTE_UNROLL
    for (int i = 0; i < Q::kVec; ++i) {
      const auto other = i < own.valid ? partials[(own.slice * parts + p) * columns + own.column + i] : 0;
      absmax[i] = other > absmax[i] ? other : absmax[i];
    }
  }
  const auto column_absmax = own.reduce_groups(absmax, shared);
  const int64_t column = own.tile * own.columns() + threadIdx.x;
  if (int(threadIdx.x) < own.columns() && column < columns) {
    Real* at = scales + own.slice * columns + column;  // (slices, columns)
    const Real scale = parts ? scale_of<Real, Range<Config>::kHigh>(column_absmax) : *at;
    if (parts && own.split == 0) *at = scale;
    shared_scales[threadIdx.x] = scale;
    rules[threadIdx.x] = Rule<Config>(scale, column_absmax, parts == 0);
  }
  __syncthreads();
  const Real* own_scales = shared_scales + own.lane * Q::kVec;
  FloatInverse inverse[Q::kVec];
  Entries entries = Entries::kCertain;  // as the columns allow
  CUTE_UNROLL
  for (int i = 0; i < Q::kVec; ++i) {
    const Rule<Config> rule = i < own.valid ? rules[own.lane * Q::kVec + i] : Rule<Config>(Real(1), 0, false);
    inverse[i] = rule.inverse;
    entries = rule.entries < entries ? rule.entries : entries;
  }
  if (entries != Entries::kCertain) {
    CUTE_UNROLL
    for (int i = 0; i < Q::kVec; ++i) inverse[i] = FloatInverse(i < own.valid ? own_scales[i] : Real(1));
  }
  const Output output{out + own.slice * rows * out_pitch, out_pitch, vector_stores != 0};
  AbsmaxState<Q> state;
  own.each_row(x + own.slice * rows * pitch, pitch, rows, splits, passes, vector_loads != 0, true,
               [&](int64_t row, const typename Q::Source (&part)[Q::kVec]) {
                 if (!parts) state.update(part);
                 encode_run<Config>(output, row, own.column, own.valid, part, x + (own.slice * rows + row) * pitch + own.column,
                                    entries, [&](int i) { return inverse[i]; },
                                    [&](int i) { return i < own.valid ? inverse_of(own_scales[i]) : 0.0; });
               });
  state.write_flags(flags);
}

}  // namespace magicube
