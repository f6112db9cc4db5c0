// The product to run, from the sums of the pass over A: bounds of both errors by the spread of their Gram matrices.
//
// Formula: of 16 probes, sqrt(||E W||^2 / 16) times a factor is at least ||E||. The factor follows from the share of the largest
// eigenvalue, lambda <= trace(G^32)^(1/32) for a Gram matrix G of trace 1. See look.py for the factors.
//
// sm_80 and later. Work: one CTA, entry (i, j) of both matrices per thread. Code that one CTA runs once binds: it is short.
#pragma once

#include "estimate/look_pack.cuh"

namespace magicube {

constexpr int kLookWarps = 8, kLookThreads = 32 * kLookWarps;
constexpr int kTriangle = kProbes * (kProbes + 1) / 2;
// A record: both Gram matrices by their upper triangles, ||A V_0||^2, the squares of both bounds, scales out of range.
constexpr int kSums = 2 * kTriangle, kRecord = kSums + 4;
constexpr int kFactors = 1025;  // of shares 0/1024 to 1024/1024
constexpr int kGroup = 16;  // CTAs whose records are added first

// What the choice takes beside the sums.
struct LookLimits {
  double floor;  // what numbers below the range of float32 lose
  double product[2];  // rounding of the products, relative to C
  double allowed;  // tol / (1 + tol)
};

using Grams = double[2][kProbes][kProbes + 1];  // (error, probe, probe)

struct ChoiceScratch {
  Grams grams, other;
  double warp_sums[2][kLookWarps];
};

// Number of scales of A's rows and B's columns that this thread sees to be NaN or out of [least, most].
__device__ __forceinline__ int out_of_range(const float* scales, int64_t rows, const float* other_scales, int64_t columns,
                                            float least, float most) {
  int found = 0;
  const int64_t count = max(rows, columns);
  for (int64_t i = int64_t{blockIdx.x} * kLookThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kLookThreads) {
    const float both[2] = {scales[min(i, rows - 1)], other_scales[min(i, columns - 1)]};
    found += i < rows && !(both[0] >= least && both[0] <= most) ? 1 : 0;
    found += i < columns && !(both[1] >= least && both[1] <= most) ? 1 : 0;
  }
  return found;
}

// Whether this CTA is the last of `count` to come here, which sees what the others wrote. `ticket` is 0 before and after.
__device__ __forceinline__ bool comes_last(uint32_t* ticket, int count) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(ticket, 1u) + 1 == uint32_t(count);
    if (is_last) *ticket = 0;
  }
  __syncthreads();
  if (is_last) __threadfence();
  return is_last;
}

// Sum of `count` records, every `step`-th of `from`, in their order. `to` may be the first one.
__device__ __forceinline__ void add_records(const double* from, int step, int count, double* to) {
  constexpr int kPairs = kRecord / 2;  // a thread has two columns
  if (threadIdx.x >= kPairs) return;
  const auto* pairs = reinterpret_cast<const double2*>(from) + threadIdx.x;
  double2 sum = {0.0, 0.0};
  for (int first = 0; first < count; first += kGroup) {
    double2 next[kGroup];
    CUTE_UNROLL
    for (int r = 0; r < kGroup; ++r) next[r] = __ldcg(pairs + min(first + r, count - 1) * step * kPairs);  // all on their way
    CUTE_UNROLL
    for (int r = 0; r < kGroup; ++r) {
      if (first + r < count) sum.x += next[r].x, sum.y += next[r].y;
    }
  }
  to[2 * threadIdx.x] = sum.x, to[2 * threadIdx.x + 1] = sum.y;
}

// Upper bound of the largest eigenvalue of scratch.grams[threadIdx.x % 2], of trace 1. All threads take part.
__device__ __forceinline__ float largest_share(ChoiceScratch& scratch) {
  const int i = threadIdx.x / kProbes, j = threadIdx.x % kProbes;
  auto *from = &scratch.grams, *to = &scratch.other;
  CUTE_NO_UNROLL
  for (int power = 0; power < 4; ++power) {
    double sum[2] = {};
    CUTE_UNROLL
    for (int k = 0; k < kProbes; ++k) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) sum[r] += (*from)[r][i][k] * (*from)[r][k][j];
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) (*to)[r][i][j] = sum[r];
    __syncthreads();
    auto* const swapped = from;
    from = to, to = swapped;
  }
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    double sum = (*from)[r][i][j] * (*from)[r][i][j];
    CUTE_UNROLL
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    if (threadIdx.x % 32 == 0) scratch.warp_sums[r][threadIdx.x / 32] = sum;
  }
  __syncthreads();
  double sum = 0.0;
  CUTE_UNROLL
  for (int warp = 0; warp < kLookWarps; ++warp) sum += scratch.warp_sums[threadIdx.x % 2][warp];
  float root = __double2float_ru(sum * (1.0 + 1e-12));
  CUTE_NO_UNROLL
  for (int s = 0; s < 5; ++s) root = __fsqrt_ru(root);
  return fminf(root, 1.0f);
}

// Bound both errors from the sums of all CTAs and pick the first product that is predicted to be within the tolerance.
// `record` (8): error, bound and the part of the bound that the probes' rounding takes, of both; the norm of A B; scales out of
// range. `gate`: levels of the picked product, minus 1; -1 for none.
__device__ __forceinline__ void choose(const double (&sums)[kRecord], ChoiceScratch& scratch, const LookLimits& limits,
                                       const double* factors, int first, double* record, int* gate) {
  const int i = threadIdx.x / kProbes, j = threadIdx.x % kProbes, low = min(i, j), high = max(i, j);
  const int own = threadIdx.x % 2;  // error of this thread's numbers: lanes have both, and the code is fetched once
  const double* of = sums + own * kTriangle;
  double trace = 0.0;
  CUTE_UNROLL
  for (int k = 0; k < kProbes; ++k) trace += of[k * (k + 1) / 2 + k];
  const double inverse = 1.0 / trace, other = __shfl_xor_sync(~0u, inverse, 1);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    scratch.grams[r][i][j] = sums[r * kTriangle + high * (high + 1) / 2 + low] * (r == own ? inverse : other);
  }
  __syncthreads();
  const double largest = largest_share(scratch), size = sqrt(sums[kSums] / kProbes), norm = sqrt(trace);
  const double noise = 1.01 * sqrt(sums[kSums + 1 + own]) + limits.floor + 0x1p-52 * norm;
  const double relative = noise / norm, spread = (sqrt(largest) + relative) / (1.0 - relative);
  const double share = relative < 1.0 && spread < 1.0 ? spread * spread : 1.0;
  const double factor = factors[own * kFactors + int(ceil(share * (kFactors - 1)))];
  double bound = factor * (norm + noise) / 4.0;  // sqrt(kProbes)
  const double infinity = __longlong_as_double(0x7ff0000000000000ll);
  if (!(bound < infinity)) bound = infinity;
  const double total = bound + (own == 0 ? limits.product[0] : limits.product[1]) * size;
  const int fits = sums[kSums + 3] == 0.0 && total <= limits.allowed * size, other_fits = __shfl_xor_sync(~0u, fits, 1);
  if (threadIdx.x < 2) {
    record[3 * own] = norm / 4.0, record[3 * own + 1] = bound, record[3 * own + 2] = factor * noise / 4.0;
  }
  if (threadIdx.x == 0) record[6] = size, record[7] = sums[kSums + 3], *gate = fits ? first : other_fits ? first + 1 : -1;
}

}  // namespace magicube
