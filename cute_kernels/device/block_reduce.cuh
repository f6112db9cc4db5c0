// Block-wide reductions: sum, maximum, order statistics. Deterministic.
#pragma once

#include <cuda/std/cstdint>
#include <cute/config.hpp>

namespace magicube {

// Block-wide sums of kCount values, returned in every thread.
template <int kThreads, int kCount>
__device__ __forceinline__ void block_sums(double (&values)[kCount], double (*scratch)[kThreads / 32 + 1]) {
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    CUTE_UNROLL
    for (int lane = 16; lane > 0; lane /= 2) values[i] += __shfl_xor_sync(~0u, values[i], lane);
    if (threadIdx.x % 32 == 0) scratch[i][threadIdx.x / 32] = values[i];
  }
  __syncthreads();
  if (threadIdx.x < kCount) {
    double sum = 0.0;
    for (int warp = 0; warp < kThreads / 32; ++warp) sum += scratch[threadIdx.x][warp];
    scratch[threadIdx.x][kThreads / 32] = sum;
  }
  __syncthreads();
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) values[i] = scratch[i][kThreads / 32];
  __syncthreads();  // scratch may be reused
}

// Block-wide maxima of kCount non-negative values, returned in every thread.
template <int kThreads, int kCount>
__device__ __forceinline__ void block_maxima(float (&values)[kCount], uint32_t (*scratch)[kThreads / 32]) {
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const uint32_t most = __reduce_max_sync(~0u, __float_as_uint(values[i]));
    if (threadIdx.x % 32 == 0) scratch[i][threadIdx.x / 32] = most;
  }
  __syncthreads();
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const int lane = threadIdx.x % 32;
    values[i] = __uint_as_float(__reduce_max_sync(~0u, lane < kThreads / 32 ? scratch[i][lane] : 0));
  }
  __syncthreads();
}

// Bits of the order statistics of ranks (0: smallest) among `count` non-negative values, in every thread; bits below
// kLowest are 0. `scratch`: two counts per warp and rank.
template <int kThreads, int kLowest, int kRanks>
__device__ __forceinline__ void select_ranks(const float* values, int count, const int (&ranks)[kRanks],
                                             uint32_t (&found)[kRanks], int (*scratch)[kRanks][kThreads / 32]) {
  CUTE_UNROLL
  for (int r = 0; r < kRanks; ++r) found[r] = 0;
  for (int bit = 30; bit >= kLowest; --bit) {
    int below[kRanks] = {};
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const uint32_t value = __float_as_uint(values[i]);
      CUTE_UNROLL
      for (int r = 0; r < kRanks; ++r) below[r] += value < (found[r] | 1u << bit) ? 1 : 0;
    }
    CUTE_UNROLL
    for (int r = 0; r < kRanks; ++r) {
      const int sum = __reduce_add_sync(~0u, below[r]);
      if (threadIdx.x % 32 == 0) scratch[bit % 2][r][threadIdx.x / 32] = sum;
    }
    __syncthreads();  // one is enough: the next bit uses the other half of the scratch
    CUTE_UNROLL
    for (int r = 0; r < kRanks; ++r) {
      const int lane = threadIdx.x % 32;
      const int sum = __reduce_add_sync(~0u, lane < kThreads / 32 ? scratch[bit % 2][r][lane] : 0);
      found[r] |= sum <= ranks[r] ? 1u << bit : 0;
    }
  }
  __syncthreads();
}

}  // namespace magicube
