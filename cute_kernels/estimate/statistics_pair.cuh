// Sums over k for a pair of operands, from the slices that estimate/statistics.cuh sampled.
//
// sm_80 and later. Work: 64 columns of K per CTA; the last CTA to arrive adds the partial sums in a fixed order. No pipeline.
// Source: docs/lab/residual.md.
#pragma once

#include "estimate/statistics.cuh"

namespace magicube {

// Sums of squares of a column of K: of the quantities without the means of their slices; of x, R1 and x below each level with
// them.
constexpr int kRaw = 5, kSquares = kLevels + kRaw;

// Sums of squares of element k over a thread's slices, by quantity.
template <class C, int kEach, int kParts>
__device__ __forceinline__ void column_squares(const SampledSide<C>& side, const DigitFormat& kind, int64_t k, bool is_outlier,
                                               int part, float (&squares)[kSquares]) {
  CUTE_UNROLL
  for (int s = 0; s < kSquares; ++s) squares[s] = 0.0f;
  CUTE_UNROLL
  for (int e = 0; e < kEach; ++e) {
    const int slice = part + e * kParts;
    const float* form = side.forms + slice * C::kForms;
    const float x = side.slices[slice * side.pitch + k], centered = x - form[kX];
    float digit, first, second;
    residuals(x, kind, digit, first, second);
    const float remainder = DigitStep(form[kAbsmaxC], kind.limit).remainder_of(centered);
    const float masked = is_outlier ? 0.0f : x, remainder_masked = DigitStep(form[kAbsmaxO], kind.limit).remainder_of(masked);
    const float values[kSquares] = {
        centered, first - form[kR1], second - form[kR2], centered, remainder - form[kRC], masked - form[kXO], remainder_masked
        - form[kRO], x, first, fabsf(digit) < kind.levels[0] ? x : 0.0f, fabsf(digit) < kind.levels[1] ? x : 0.0f,
        fabsf(digit) < kind.levels[2] ? x : 0.0f};
    CUTE_UNROLL
    for (int s = 0; s < kSquares; ++s) squares[s] = fmaf(values[s], values[s], squares[s]);
  }
}

// Shared memory of a CTA: sums of squares per column, by quantity of one operand and of the other, and reductions.
template <class C>
struct PairReduction {
  static constexpr int kThreads = C::kThreads, kChunk = C::kChunk, kParts = kThreads / kChunk, kEach = C::kSlices / kParts;
  static constexpr int kTables = kLevels * kLevels + kRaw * kRaw, kSums = kTables + 2;  // outlier columns; squares of P
  static constexpr int kShares = 4;  // of the columns of K
  static constexpr int kMeans = kLevels + 3;  // quantities with products of means: also below each sparse level

  float squares[kParts][2 * kSquares][kChunk + 1];
  double sums[2][kThreads / 32 + 1];
  int counts[2][kShares][kThreads / 32];
  bool last;
};

// Part of the cross energy (second half of slices) in the columns of K with the largest weight by the first half, per share.
template <class C>
__device__ void share_columns(const float* cross_weight, int64_t pitch, int count, const int (&share_counts)[4], double* out,
                              PairReduction<C>& shared) {
  constexpr int kLowest = 12;  // weights that differ below that bit count as equal
  int ranks[4];
  CUTE_UNROLL
  for (int r = 0; r < 4; ++r) ranks[r] = count - share_counts[r];
  uint32_t found[4];
  select_ranks<C::kThreads, kLowest>(cross_weight, count, ranks, found, shared.counts);
  double all[1] = {0.0};
  for (int k = threadIdx.x; k < count; k += C::kThreads) all[0] += cross_weight[pitch + k];
  block_sums<C::kThreads>(all, shared.sums);
  CUTE_UNROLL
  for (int r = 0; r < 4; ++r) {
    double sums[2] = {0.0, 0.0}, counts[2] = {0.0, 0.0};  // above the value of that rank; equal to it
    for (int k = threadIdx.x; k < count; k += C::kThreads) {
      const uint32_t value = __float_as_uint(cross_weight[k]) >> kLowest, level = found[r] >> kLowest;
      const double part = cross_weight[pitch + k];
      sums[0] += value > level ? part : 0.0, counts[0] += value > level ? 1.0 : 0.0;
      sums[1] += value == level ? part : 0.0, counts[1] += value == level ? 1.0 : 0.0;
    }
    block_sums<C::kThreads>(sums, shared.sums);
    block_sums<C::kThreads>(counts, shared.sums);
    if (threadIdx.x == 0) {
      const double part = sums[0] + sums[1] * (share_counts[r] - counts[0]) / counts[1];
      out[r] = all[0] > 0.0 ? part / all[0] : 0.0;
    }
  }
}

// Write the statistics of a pair to `out`: kSums sums (two tables of products over k, the number of outlier columns, the sum
// of squares of `product`), kShares shares, for each operand kMeans x kMeans products of means, then 3 densities, then its
// facts. `partials` (CTAs, kSums); `cross_weight` (2, pitch): cross energy of each column from even slices and from odd ones;
// `arrived` is zero before.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
meet_lines(double* lhs, const uint8_t* lhs_outliers, double* rhs, const uint8_t* rhs_outliers, int64_t inner, float limit,
           float radix, float level0, float level1, float level2, const float* product, int64_t product_count,
           float* cross_weight, double* partials, uint32_t* arrived, int64_t taken0, int64_t taken1, int64_t taken2,
           int64_t taken3, double* out) {
  using M = PairReduction<C>;
  static_assert(M::kParts % 2 == 0, "a thread's slices are all even or all odd ones");
  __shared__ M shared;
  const SampledSide<C> a(lhs, inner), b(rhs, inner);
  const DigitFormat kind(limit, radix, level0, level1, level2);
  const int column = threadIdx.x % M::kChunk, part = threadIdx.x / M::kChunk;
  const int64_t k = int64_t{blockIdx.x} * M::kChunk + column;
  const bool in_bounds = k < inner, outlier_a = in_bounds && lhs_outliers[k], outlier_b = in_bounds && rhs_outliers[k];
  {
    float squares[kSquares];
    column_squares<C, M::kEach, M::kParts>(a, kind, k, outlier_a, part, squares);
    CUTE_UNROLL
    for (int s = 0; s < kSquares; ++s) shared.squares[part][s][column] = in_bounds ? squares[s] : 0.0f;
    column_squares<C, M::kEach, M::kParts>(b, kind, k, outlier_b, part, squares);
    CUTE_UNROLL
    for (int s = 0; s < kSquares; ++s) shared.squares[part][kSquares + s][column] = in_bounds ? squares[s] : 0.0f;
  }
  double others[2] = {part == 0 && (outlier_a || outlier_b) ? 1.0 : 0.0, 0.0};
  for (int i = int(blockIdx.x) * C::kThreads + int(threadIdx.x); i < int(product_count); i += int(gridDim.x) * C::kThreads) {
    const double value = product[i];
    others[1] += value * value;
  }
  block_sums<C::kThreads>(others, shared.sums);  // its barriers publish the sums of squares too
  if (part < 2) {  // even or odd slices
    constexpr int kRawX = kLevels, kRawFirst = kLevels + 1;
    float half[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // x and R1 of A, of B
    CUTE_UNROLL
    for (int p = 0; p < M::kParts; p += 2) {
      half[0] += shared.squares[part + p][kRawX][column];
      half[1] += shared.squares[part + p][kRawFirst][column];
      half[2] += shared.squares[part + p][kSquares + kRawX][column];
      half[3] += shared.squares[part + p][kSquares + kRawFirst][column];
    }
    cross_weight[part * a.pitch + k] = half[1] * half[2] + half[0] * half[3];  // (2, pitch)
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * kSquares * M::kChunk; i += C::kThreads) {
    float sum = 0.0f;
    CUTE_UNROLL
    for (int p = 0; p < M::kParts; ++p) sum += shared.squares[p][i / M::kChunk][i % M::kChunk];
    shared.squares[0][i / M::kChunk][i % M::kChunk] = sum;
  }
  __syncthreads();
  double* const mine = partials + int64_t{blockIdx.x} * M::kSums;
  for (int i = threadIdx.x; i < M::kSums; i += C::kThreads) {
    const int raw = i - kLevels * kLevels;
    const int x = raw < 0 ? i / kLevels : kLevels + raw / kRaw, y = raw < 0 ? i % kLevels : kLevels + raw % kRaw;
    float sum = 0.0f;
    if (i < M::kTables) {
      for (int c = 0; c < M::kChunk; ++c) sum = fmaf(shared.squares[0][x][c], shared.squares[0][kSquares + y][c], sum);
    }
    mine[i] = i < M::kTables ? sum : i == M::kTables ? others[0] : others[1];
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared.last = atomicAdd(arrived, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!shared.last) return;
  __threadfence();
  constexpr double kPerSlice = 1.0 / C::kSlices;
  for (int i = threadIdx.x; i < M::kSums; i += C::kThreads) {
    double sum = 0.0;
    for (uint32_t block = 0; block < gridDim.x; ++block) sum += __ldcg(partials + int64_t{block} * M::kSums + i);
    out[i] = i < M::kTables ? sum * kPerSlice * kPerSlice : sum;
  }
  double* const behind = out + M::kSums;
  const int share_counts[4] = {int(taken0), int(taken1), int(taken2), int(taken3)};
  share_columns(cross_weight, a.pitch, int(inner), share_counts, behind, shared);
  for (int i = threadIdx.x; i < 2 * M::kMeans * M::kMeans; i += C::kThreads) {
    const float* forms = i < M::kMeans * M::kMeans ? a.forms : b.forms;
    const int x = i / M::kMeans % M::kMeans, y = i % M::kMeans;
    double sum = 0.0;
    for (int slice = 0; slice < C::kSlices; ++slice) {
      sum += static_cast<double>(forms[slice * C::kForms + x]) * forms[slice * C::kForms + y];
    }
    behind[M::kShares + i] = sum * kPerSlice;
  }
  double* const ends = behind + M::kShares + 2 * M::kMeans * M::kMeans;
  if (threadIdx.x < 6) {
    const float* forms = threadIdx.x < 3 ? a.forms : b.forms;
    double sum = 0.0;
    for (int slice = 0; slice < C::kSlices; ++slice) sum += forms[slice * C::kForms + kAbove + threadIdx.x % 3];
    ends[threadIdx.x] = sum * kPerSlice;
  } else if (threadIdx.x < 10) {
    const int i = threadIdx.x - 6;
    ends[threadIdx.x] = (i < 2 ? a.facts : b.facts)[i % 2];
  }
}

}  // namespace magicube
