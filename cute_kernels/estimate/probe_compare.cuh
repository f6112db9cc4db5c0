// Error estimate of C = A B from probes W: the Gram matrix of the differences P - C W, P = A B W, and norms.
//
// sm_80 and later. Work: persistent CTAs of 16 warps take tiles of rows; a last kernel adds the partial sums of all CTAs in a
// fixed order. Pipeline: that of estimate/probes.cuh. Source: docs/lab/residual.md.
#pragma once

#include "estimate/probes.cuh"

namespace magicube {

// Number of `scales` that this thread sees to be NaN or out of bounds; zeros are in range.
__device__ __forceinline__ double count_out_of_range(const float* scales, int64_t count, float least, float most) {
  const int64_t step = int64_t{gridDim.x} * kProbeThreads;
  int out_of_range = 0;
  for (int64_t i = int64_t{blockIdx.x} * kProbeThreads + threadIdx.x; i < count; i += step) {
    const float scale = scales[i];
    out_of_range += scale == 0.0f || (scale >= least && scale <= most) ? 0 : 1;
  }
  return out_of_range;
}

constexpr int kGram = kProbes * kProbes, kOthers = 4, kComparison = kGram + kOthers;

// One probe and row: the value of the true product, that of the computed product, and their difference.
struct ProbeValues {
  double wanted, claimed, difference;
};

// Partial sums of a CTA: the Gram matrix of the differences (16 x 16), the sums of squares of wanted and claimed values, the
// sum of what take(tile) returns, and the number of scales out of range. take(tile) computes the sums of a tile;
// values_of(probe, row, place) returns its values, with `place` the row of the matrix. `out` (CTAs, 260).
template <class C, class Take, class Values>
__device__ __forceinline__ void estimate_tiles(int64_t rows, uint8_t* shared, const float* row_scales, int64_t row_count,
                                            const float* col_scales, int64_t col_count, float least, float most, double* out,
                                            const Take& take, const Values& values_of) {
  static_assert(kGram <= kProbeThreads, "a thread has one entry of the Gram matrix, or none");
  using Tile = ProbeTile<C::kGroups>;
  using Differences = double[kProbes][Tile::kRows + 1];
  static_assert(sizeof(Differences) <= sizeof(ProbeParts<float>), "Differences reuse the memory of the parts");
  Differences& difference = *reinterpret_cast<Differences*>(shared);
  __shared__ double others[kOthers][kWarps];
  const int i = threadIdx.x / kProbes % kProbes, j = threadIdx.x % kProbes;
  double sums[kOthers] = {}, gram = 0.0;
  for (int64_t tile = blockIdx.x; tile * Tile::kRows < rows; tile += gridDim.x) {
    sums[2] += take(tile);
    __syncthreads();
    double differences[C::kGroups];
    CUTE_UNROLL
    for (int s = 0; s < C::kGroups; ++s) {
      const int index = threadIdx.x + s * kProbeThreads, probe = index / Tile::kRows, row = index % Tile::kRows;
      const ProbeValues found = values_of(probe, row, tile * Tile::kRows + row);
      differences[s] = found.difference;
      sums[0] += found.wanted * found.wanted;
      sums[1] += found.claimed * found.claimed;
    }
    __syncthreads();
    CUTE_UNROLL
    for (int s = 0; s < C::kGroups; ++s) {
      const int index = threadIdx.x + s * kProbeThreads;
      difference[index / Tile::kRows][index % Tile::kRows] = differences[s];
    }
    __syncthreads();
    double products[4] = {};  // independent sums hide the latency of additions
    for (int row = 0; row < Tile::kRows; row += 4) {
      CUTE_UNROLL
      for (int r = 0; r < 4; ++r) products[r] += difference[i][row + r] * difference[j][row + r];
    }
    gram += (products[0] + products[1]) + (products[2] + products[3]);
    __syncthreads();  // the pipelines can be written again
  }
  sums[3] = count_out_of_range(row_scales, row_count, least, most) + count_out_of_range(col_scales, col_count, least, most);
  for (int s = 0; s < kOthers; ++s) {
    const double sum = warp_sum(sums[s]);
    if (threadIdx.x % 32 == 0) others[s][threadIdx.x / 32] = sum;
  }
  __syncthreads();
  double* to = out + int64_t{blockIdx.x} * kComparison;
  if (threadIdx.x < kGram) to[threadIdx.x] = gram;
  if (threadIdx.x < kOthers) {
    double sum = 0.0;
    for (int warp = 0; warp < kWarps; ++warp) sum += others[threadIdx.x][warp];
    to[kGram + threadIdx.x] = sum;
  }
}

// estimate_tiles of P and C W, and ||C||^2. `product` is P (16, y_pitch); `see`: of probe_tile.
template <class C, class See>
__device__ __forceinline__ void compare_tiles(const ProbeMatrix<typename C::Source>& matrix, const float* w, int64_t w_pitch,
                                              const float* product, int64_t y_pitch, uint8_t* shared, const float* row_scales,
                                              int64_t row_count, const float* col_scales, int64_t col_count, float least,
                                              float most, double* out, const See& see) {
  const auto& parts = *reinterpret_cast<const ProbeParts<ProbeSum<C>>*>(shared);
  estimate_tiles<C>(
      matrix.rows, shared, row_scales, row_count, col_scales, col_count, least, most, out,
      [&](int64_t tile) { return probe_tile<C, false, true, Absmax::kNone>(matrix, w, w_pitch, tile, shared, nullptr, see); },
      [&](int probe, int row, int64_t place) {
        const double claimed = parts.template sum<C::kGroups>(probe, row);
        const double wanted = place < y_pitch ? product[probe * y_pitch + place] : 0.0f;
        return ProbeValues{wanted, claimed, wanted - claimed};
      });
}

// compare_tiles of C as it is, with scales that are to be counted where they are out of bounds.
template <class C>
__global__ void __launch_bounds__(kProbeThreads)
compare_rows(const typename C::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t vector, const float* w,
             int64_t w_pitch, const float* product, int64_t y_pitch, const float* row_scales, int64_t row_count,
             const float* col_scales, int64_t col_count, float least, float most, double* out) {
  pdl_wait();
  extern __shared__ __align__(16) uint8_t shared[];
  const ProbeMatrix<typename C::Source> matrix{x, pitch, rows, columns, vector != 0};
  compare_tiles<C>(matrix, w, w_pitch, product, y_pitch, shared, row_scales, row_count, col_scales, col_count, least, most, out,
                   SeeNothing{});
}

// Add the partial sums of all CTAs (CTAs, 260) in a fixed order. A CTA has 32 columns, and a warp every 16th row. A CTA behind them
// adds two tables of squares, to places 260 to 263.
template <class C>
__global__ void __launch_bounds__(kProbeThreads)
sum_comparison(const double* parts, int64_t blocks, double* out, const double* squares_a, int64_t tiles_a,
               const double* squares_b, int64_t tiles_b) {
  pdl_wait();
  __shared__ double sums[kWarps][32];
  constexpr int kAtOnce = 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = blockIdx.x * 32 + lane;
  if (blockIdx.x * 32 >= kComparison) {
    if (warp >= 4) return;
    const double* squares = warp < 2 ? squares_a : squares_b;
    const int64_t tiles = warp < 2 ? tiles_a : tiles_b;
    double sum = 0.0;
    for (int64_t tile = lane; tile < tiles; tile += 32) sum += squares[2 * tile + warp % 2];
    sum = warp_sum(sum);
    if (lane == 0) out[kComparison + warp] = sum;
    return;
  }
  const double* from = parts + (own < kComparison ? own : 0);
  double found = 0.0;
  for (int64_t block = warp; block < blocks; block += kAtOnce * kWarps) {
    double some[kAtOnce];
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = block + i * kWarps;
      some[i] = at < blocks ? from[at * kComparison] : 0.0;
    }
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) found += some[i];
  }
  sums[warp][lane] = found;
  __syncthreads();
  if (warp > 0 || own >= kComparison) return;
  double sum = 0.0;
  for (int i = 0; i < kWarps; ++i) sum += sums[i][lane];
  out[own] = sum;
}

}  // namespace magicube
