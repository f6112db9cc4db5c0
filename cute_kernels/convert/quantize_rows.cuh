// Quantization with a scale a row: threads of a team keep a row while they look for its largest magnitude.
#pragma once

#include "convert/quantize.cuh"

namespace magicube {

// Scales and integers of rows (rows, columns), each by `lanes` threads that keep its first kSteps * kVec entries a lane. The
// blocks of a second line of the grid do so for another matrix of this shape and these pitches. The first one's scales are
// stored times `factor`.
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
  Extremes<Q> extremes;
  CUTE_UNROLL
  for (int s = 0; s < Q::kSteps; ++s) {
    const int64_t column = int64_t{s} * width + first;
    load<Q>(from + column, length - column, vector, held[s]);
  }
  CUTE_UNROLL
  for (int s = 0; s < Q::kSteps; ++s) extremes.see(held[s]);
  for (int64_t column = int64_t{Q::kSteps} * width + first; column < length; column += width) {
    alignas(16) typename Q::Source part[Q::kVec];
    load<Q>(from + column, length - column, vector, part);
    extremes.see(part);
  }
  extremes.report_to(flags);
  const auto top = group_reduce_max(extremes.top, int(lanes), scratch);
  if (first == 0 && length) {  // the division, once a row
    const Real scale = given ? scales[row] : scale_of<Real, Range<Config>::kHigh>(top);
    if (!given) scales[row] = scale * static_cast<Real>(factor);
    shared_scales[threadIdx.x / int(lanes)] = scale;
  }
  __syncthreads();
  const Real scale = shared_scales[threadIdx.x / int(lanes)];
  const FloatInverse near(scale);
  const bool inside = is_inside<Config>(extremes, near);
  const auto fast = [&](int) { return near; };
  const auto exact = [&](int) { return inverse_of(scale); };
  const Output output{out, out_pitch, vector_stores != 0};
  CUTE_UNROLL
  for (int s = 0; s < Q::kSteps; ++s) {
    const int64_t column = int64_t{s} * width + first;
    encode_run<Config>(output, row, column, length - column, held[s], from + column, inside, fast, exact);
  }
  for (int64_t column = int64_t{Q::kSteps} * width + first; column < length; column += width) {
    alignas(16) typename Q::Source part[Q::kVec];
    load<Q>(from + column, length - column, vector, part);
    encode_run<Config>(output, row, column, length - column, part, from + column, inside, fast, exact);
  }
}

// What the threads of a team do for one short row after the other; `kWhole`: rows are as long as the team's loads, which are
// aligned, and so are its stores. Then running pointers are all that a row needs besides its entries.
template <class Config, bool kWhole>
struct ShortRows {
  using Q = Quantizer<Config>;
  using Source = typename Q::Source;
  using Real = typename Q::Real;

  const Source* next_from;  // the thread's first entry of the row that is fetched next
  const Source* from;
  uint8_t* to;
  Real* scale_at;
  int64_t apart, out_apart, scale_apart;  // from one row of the thread to its next, in entries, bytes and scales
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
    if (exists) next_from += apart;
  }
  // One row, the next one on its way; `exists` and `more`: whether there are these.
  __device__ void encode(bool exists, bool more, float factor, Extremes<Q>& all) {
    alignas(16) Source held[Q::kSteps][Q::kVec];
    Extremes<Q> extremes;
    CUTE_UNROLL
    for (int s = 0; s < Q::kSteps; ++s) {
      CUTE_UNROLL
      for (int i = 0; i < Q::kVec; ++i) held[s][i] = next[s][i];
      extremes.see(held[s]);
    }
    fetch(more);
    all.see(extremes);
    auto top = extremes.top;
    for (int lane = 1; lane < lanes; lane *= 2) {
      const auto other = __shfl_xor_sync(~0u, top, lane);
      top = other > top ? other : top;
    }
    if (!exists) return;
    const Real scale = given ? *scale_at : scale_of<Real, Range<Config>::kHigh>(top);
    if (first == 0 && !given) *scale_at = scale * static_cast<Real>(factor);
    const FloatInverse near(scale);
    const bool inside = is_inside<Config>(extremes, near);
    const Output output{to, 0, kWhole || vector_stores};
    CUTE_UNROLL
    for (int s = 0; s < Q::kSteps; ++s) {
      encode_run<Config>(output, 0, s * width + first, valid(s), held[s], from + s * width, inside,
                         [&](int) { return near; }, [&](int) { return inverse_of(scale); });
    }
    from += apart;
    to += out_apart;
    scale_at += scale_apart;
  }
};

// As encode_rows, of rows that up to 32 lanes load at once. A warp goes through many of them, the next ones on their way: of
// short rows a block of its own for each few would spend most of its time on what surrounds them.
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
  const int shift = 31 - __clz(int(lanes)), teams = Q::kThreads >> shift;
  const int64_t step = int64_t{gridDim.x} * teams, own = int64_t{blockIdx.x} * teams + (threadIdx.x >> shift);
  const int64_t ahead = (threadIdx.x % 32) >> shift;  // of the warp's first row: its lanes go on together
  Extremes<Q> all;
  const auto walk = [&](auto whole) {
    ShortRows<Config, decltype(whole)::value> team{};
    team.next_from = team.from = x + (own < rows ? own * pitch : 0) + first;
    team.to = out + own * out_pitch, team.scale_at = scales + own;
    team.apart = step * pitch, team.out_apart = step * out_pitch, team.scale_apart = step;
    team.columns = columns, team.width = width, team.first = first, team.lanes = int(lanes);
    team.vector_loads = vector_loads != 0, team.vector_stores = vector_stores != 0, team.given = given != 0;
    team.fetch(own < rows);
    for (int64_t row = own; row - ahead < rows; row += step) {
      team.encode(row < rows, row + step < rows, factor, all);
    }
  };
  if (vector_loads && vector_stores && columns == int64_t{width} * Q::kSteps) walk(cuda::std::true_type{});
  else walk(cuda::std::false_type{});
  all.report_to(flags);
}

}  // namespace magicube
