// Quantization with per-row scales: q = clamp(round(x / scale)), scale = amax / q_max of a row; one launch.
//
// Architectures: sm_80 and later.
// Work: `lanes` threads share a row. encode_rows keeps the row in registers between amax and encoding and loads longer rows
// again; encode_short_rows loops over many short rows per warp.
// Pipeline: kSteps loads of 16 bytes in flight per thread; encode_short_rows prefetches the next row.
#pragma once

#include "convert/quantize.cuh"

namespace magicube {

// Scales and integers of rows (rows, columns). `lanes` threads share a row and keep kSteps * kVec entries each in registers.
// CTAs with blockIdx.y == 1 process another matrix of the same shape and pitches. The scales of the first matrix are stored
// times `factor`.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
encode_rows(const typename Config::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t lanes,
            typename Quantizer<Config>::Real* scales, int64_t given, uint8_t* out, int64_t out_pitch, int* flags,
            int64_t vector_loads, int64_t vector_stores, const typename Config::Source* other_x,
            typename Quantizer<Config>::Real* other_scales, uint8_t* other_out, float factor) {
  pdl_wait();
  using Q = Quantizer<Config>;
  using Real = typename Q::Real;
  __shared__ typename Q::Bits scratch[Q::kWarps];
  __shared__ Real shared_scales[Q::kThreads];
  if (blockIdx.y == 1) x = other_x, scales = other_scales, out = other_out, factor = 1.0f;
  const int width = int(lanes) * Q::kVec, groups = Q::kThreads / int(lanes);
  const int first = int(threadIdx.x & (lanes - 1)) * Q::kVec;
  const int64_t row = int64_t{blockIdx.x} * groups + threadIdx.x / int(lanes);
  const int64_t length = row < rows ? columns : 0;
  const auto* from = x + row * pitch;
  const bool vector = vector_loads != 0;
  alignas(16) typename Q::Source held[Q::kSteps][Q::kVec];
  AbsmaxState<Q> state;
  CUTE_UNROLL
  for (int s = 0; s < Q::kSteps; ++s) {
    const int64_t column = int64_t{s} * width + first;
    load<Q>(from + column, length - column, vector, held[s]);
  }
  CUTE_UNROLL
  for (int s = 0; s < Q::kSteps; ++s) state.update(held[s]);
  for (int64_t column = int64_t{Q::kSteps} * width + first; column < length; column += width) {
    alignas(16) typename Q::Source part[Q::kVec];
    load<Q>(from + column, length - column, vector, part);
    state.update(part);
  }
  state.write_flags(flags);
  const auto absmax = group_reduce_max(state.absmax, int(lanes), scratch);
  if (first == 0 && length) {  // one division per row
    const Real scale = given ? scales[row] : scale_of<Real, Range<Config>::kHigh>(absmax);
    if (!given) scales[row] = scale * static_cast<Real>(factor);
    shared_scales[threadIdx.x / int(lanes)] = scale;
  }
  __syncthreads();
  const Real scale = shared_scales[threadIdx.x / int(lanes)];
  const Rule<Config> rule(scale, absmax, given != 0, state);
  const auto fast = [&](int) { return rule.inverse; };
  const auto exact = [&](int) { return inverse_of(scale); };
  const Output output{out, out_pitch, vector_stores != 0};
  CUTE_UNROLL
  for (int s = 0; s < Q::kSteps; ++s) {
    const int64_t column = int64_t{s} * width + first;
    encode_run<Config>(output, row, column, length - column, held[s], from + column, rule.entries, fast, exact);
  }
  for (int64_t column = int64_t{Q::kSteps} * width + first; column < length; column += width) {
    alignas(16) typename Q::Source part[Q::kVec];
    load<Q>(from + column, length - column, vector, part);
    encode_run<Config>(output, row, column, length - column, part, from + column, rule.entries, fast, exact);
  }
}

// Loop of a thread group over its short rows. kWhole: a row is exactly the loads of the group, and loads and stores are
// aligned; then a row needs only running pointers besides its entries.
template <class Config, bool kWhole>
struct ShortRows {
  using Q = Quantizer<Config>;
  using Source = typename Q::Source;
  using Real = typename Q::Real;

  const Source* next_from;  // the thread's first entry of the row that is loaded next
  const Source* from;
  uint8_t* to;
  Real* scale_at;
  int64_t row_step, out_step, scale_step;  // from one row of the thread to its next, in entries, bytes and scales
  int64_t columns;
  int width, first, lanes;
  bool vector_loads, vector_stores, given;
  alignas(16) Source next[Q::kSteps][Q::kVec];

  __device__ int64_t valid(int s) const { return kWhole ? Q::kVec : columns - s * width - first; }
  __device__ void fetch(bool exists) {
    CUTE_UNROLL
    for (int s = 0; s < Q::kSteps; ++s) {
      load<Q>(next_from + s * width, exists ? valid(s) : 0, kWhole || vector_loads, next[s]);
    }
    if (exists) next_from += row_step;
  }
  // Encode one row while the next one is loaded. exists, more: whether this row and the next one exist.
  __device__ void encode(bool exists, bool more, float factor, AbsmaxState<Q>& all) {
    alignas(16) Source held[Q::kSteps][Q::kVec];
    AbsmaxState<Q> state;
    CUTE_UNROLL
    for (int s = 0; s < Q::kSteps; ++s) {
      CUTE_UNROLL
      for (int i = 0; i < Q::kVec; ++i) held[s][i] = next[s][i];
      state.update(held[s]);
    }
    fetch(more);
    all.update(state);
    auto absmax = state.absmax;
    for (int lane = 1; lane < lanes; lane *= 2) {
      const auto other = __shfl_xor_sync(~0u, absmax, lane);
      absmax = other > absmax ? other : absmax;
    }
    if (!exists) return;
    const Real scale = given ? *scale_at : scale_of<Real, Range<Config>::kHigh>(absmax);
    if (first == 0 && !given) *scale_at = scale * static_cast<Real>(factor);
    const Rule<Config> rule(scale, absmax, given, state);
    const Output output{to, 0, kWhole || vector_stores};
    CUTE_UNROLL
    for (int s = 0; s < Q::kSteps; ++s) {
      encode_run<Config>(output, 0, s * width + first, valid(s), held[s], from + s * width, rule.entries,
                         [&](int) { return rule.inverse; }, [&](int) { return inverse_of(scale); });
    }
    from += row_step;
    to += out_step;
    scale_at += scale_step;
  }
};

// As encode_rows, for rows that up to 32 lanes load at once. A warp loops over many rows and prefetches the next ones: with a
// CTA per few short rows, prologue and epilogue would dominate.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
encode_short_rows(const typename Config::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t lanes,
                  typename Quantizer<Config>::Real* scales, int64_t given, uint8_t* out, int64_t out_pitch, int* flags,
                  int64_t vector_loads, int64_t vector_stores, const typename Config::Source* other_x,
                  typename Quantizer<Config>::Real* other_scales, uint8_t* other_out, float factor) {
  pdl_wait();
  using Q = Quantizer<Config>;
  if (blockIdx.y == 1) x = other_x, scales = other_scales, out = other_out, factor = 1.0f;
  const int width = int(lanes) * Q::kVec, first = int(threadIdx.x & (lanes - 1)) * Q::kVec;
  const int shift = 31 - __clz(int(lanes)), row_groups = Q::kThreads >> shift;
  const int64_t step = int64_t{gridDim.x} * row_groups, own = int64_t{blockIdx.x} * row_groups + (threadIdx.x >> shift);
  const int64_t ahead = (threadIdx.x % 32) >> shift;  // offset from the warp's first row: all its lanes run as long
  AbsmaxState<Q> all;
  const auto loop = [&](auto whole) {
    ShortRows<Config, decltype(whole)::value> group{};
    group.next_from = group.from = x + (own < rows ? own * pitch : 0) + first;
    group.to = out + own * out_pitch, group.scale_at = scales + own;
    group.row_step = step * pitch, group.out_step = step * out_pitch, group.scale_step = step;
    group.columns = columns, group.width = width, group.first = first, group.lanes = int(lanes);
    group.vector_loads = vector_loads != 0, group.vector_stores = vector_stores != 0, group.given = given != 0;
    group.fetch(own < rows);
    for (int64_t row = own; row - ahead < rows; row += step) {
      group.encode(row < rows, row + step < rows, factor, all);
    }
  };
  if (vector_loads && vector_stores && columns == int64_t{width} * Q::kSteps) loop(cuda::std::true_type{});
  else loop(cuda::std::false_type{});
  all.write_flags(flags);
}

}  // namespace magicube
