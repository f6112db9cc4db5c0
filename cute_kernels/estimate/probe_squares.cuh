// Probes with sums in float64: Y = X W with sums of squares and a copy of X in float16, and the comparison of C W with P.
//
// sm_90 and later; memory-bound: float64 Tensor Cores take half of the time that reading takes. Work and pipeline: those of
// estimate/probes.cuh and estimate/probe_compare.cuh. Each sum is a chain of multiply-adds that round to nearest, so its error has a
// bound. Source: Fasi, Higham, Mikaitis, Pranesh, PeerJ Comput. Sci. 7, e330, 2021 (rounding of float64 Tensor Cores).
#pragma once

#include "estimate/probe_compare.cuh"

namespace magicube {

// Power of two that brings the largest magnitude of a sample of X near one, or 1 where it lies in [2^-6, 2^9) or is no normal
// number. All CTAs take the same sample: an entry a thread.
template <class Source>
__device__ __forceinline__ float sampled_scale(const ProbeMatrix<Source>& x, bool transposed) {
  __shared__ uint32_t tops[kWarps];
  const int64_t slices = transposed ? x.columns : x.rows, length = transposed ? x.rows : x.columns;
  const int64_t slice = int64_t{threadIdx.x} * slices / kProbeThreads, place = int64_t{threadIdx.x} * 797 % length;
  const uint32_t top = __reduce_max_sync(~0u, magnitude_bits(static_cast<float>(x.x[slice * x.pitch + place])));
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
  uint32_t largest = 0;
  CUTE_UNROLL
  for (int warp = 0; warp < kWarps; ++warp) largest = max(largest, tops[warp]);
  const int exponent = int(largest >> 23) - 127;  // -127: zero or subnormal; 128: inf or NaN
  const bool near = exponent >= -6 && exponent < 9, normal = exponent > -127 && exponent < 128;
  return near || !normal ? 1.0f : __uint_as_float(uint32_t(128 - exponent) << 23);
}

// Y = X W, rounded to float32, without parts, and the sums of squares of X and of Y: `squares` (tiles, 2), of a CTA each. With
// C::kEmitFloat16 also `scaled`, a power of two times X in float16, contiguous in the order of X, and that `scale`.
template <class C>
__global__ void __launch_bounds__(kProbeThreads)
probe_squares(const typename C::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t vector, const float* w,
              int64_t w_pitch, float* y, int64_t y_pitch, double* squares, __half* scaled, float* scale) {
  pdl_wait();
  using Tile = ProbeTile<C::kGroups>;
  using Runs = ProbeRuns<typename C::Source, C::kTransposed>;
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ double warps[2][kWarps];
  const ProbeMatrix<typename C::Source> matrix{x, pitch, rows, columns, vector != 0};
  float factor = 1.0f;
  if constexpr (C::kEmitFloat16) {
    factor = sampled_scale(matrix, C::kTransposed);
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale = factor;
  }
  const auto emit = [&](const Runs& runs, int at, int64_t own, int present) {
    if constexpr (C::kEmitFloat16) {
      const int place = at + int(threadIdx.x % 4) * kRun;  // runs are whole
      CUTE_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        const auto& run = runs.entries[i];
        const __half2 pairs[2] = {__floats2half2_rn(run[0] * factor, run[1] * factor),
                                  __floats2half2_rn(run[2] * factor, run[3] * factor)};
        const bool exists = C::kTransposed ? present && place + i < columns : i < present && place < columns;
        __half* to = scaled + (C::kTransposed ? (place + i) * rows + own : (own + 8 * i) * columns + place);
        if (exists) *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(pairs);
      }
    }
  };
  double sums[2] = {probe_tile<C, C::kTransposed, true, Absmax::kNone>(matrix, w, w_pitch, blockIdx.x, shared, nullptr, emit)};
  __syncthreads();
  const auto& parts = *reinterpret_cast<const ProbeParts<double>*>(shared);
  const int64_t corner = int64_t{blockIdx.x} * Tile::kRows;
  CUTE_UNROLL
  for (int i = threadIdx.x; i < Tile::kSums; i += kProbeThreads) {
    const int probe = i / Tile::kRows, row = i % Tile::kRows;
    if (corner + row < y_pitch) {
      const float value = static_cast<float>(parts.template sum<C::kGroups>(probe, row));
      y[probe * y_pitch + corner + row] = value;
      sums[1] += double{value} * value;
    }
  }
  CUTE_UNROLL
  for (int s = 0; s < 2; ++s) {
    const double sum = warp_sum(sums[s]);
    if (threadIdx.x % 32 == 0) warps[s][threadIdx.x / 32] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= 2) return;
  double sum = 0.0;
  for (int warp = 0; warp < kWarps; ++warp) sum += warps[threadIdx.x][warp];
  squares[2 * blockIdx.x + threadIdx.x] = sum;
}

// compare_tiles of a C that is first divided by two scales, powers of two, and written where they are not 1.
template <class C>
__global__ void __launch_bounds__(kProbeThreads)
compare_double(typename C::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t vector, const float* w, int64_t w_pitch,
               const float* product, int64_t y_pitch, const float* scale_a, const float* scale_b, double* out) {
  pdl_wait();
  using Source = typename C::Source;
  using Runs = ProbeRuns<Source, false>;
  extern __shared__ __align__(16) uint8_t shared[];
  const ProbeMatrix<Source> matrix{x, pitch, rows, columns, vector != 0};
  const double inverse = 1.0 / (double{*scale_a} * *scale_b);
  const auto unscale = [&](Runs& runs, int at, int64_t own, int present) {
    if (inverse == 1.0) return;
    const int place = at + int(threadIdx.x % 4) * kRun;
    CUTE_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      CUTE_UNROLL
      for (int c = 0; c < kRun; ++c) {
        if (i >= present || place + c >= columns) continue;
        const Source value = static_cast<Source>(static_cast<float>(static_cast<float>(runs.entries[i][c]) * inverse));
        runs.entries[i][c] = x[(own + 8 * i) * pitch + place + c] = value;
      }
    }
  };
  compare_tiles<C>(matrix, w, w_pitch, product, y_pitch, shared, nullptr, 0, nullptr, 0, 0.0f, 0.0f, out, unscale);
}

}  // namespace magicube
