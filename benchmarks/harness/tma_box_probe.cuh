// One box of the tensor copy, to see what it writes and how many bytes a barrier counts for it (sm_90 on).
#pragma once

#include "device/warpgroup.cuh"

namespace magicube {

// Whether the barrier's phase of this parity is over.
__device__ __forceinline__ bool barrier_is_over(uint32_t barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}" : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
  return over != 0;
}

// By one block. bytes: what the barrier is to expect; over: whether it got as many in kTries looks; out: the first `size`
// bytes of shared memory, which was kFill before, a multiple of 16.
template <class C>
__global__ void probe_box(const __grid_constant__ TmaDescriptor map, int64_t x, int64_t y, int64_t bytes, int64_t size,
                          uint8_t* out, int* over) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t barrier = shared_address(shared + size);
  for (int i = threadIdx.x; i < size; i += blockDim.x) shared[i] = C::kFill;
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    barrier_fence();
  }
  warp_group::fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(barrier, uint32_t(bytes));
    tma_load_2d(shared_address(shared), &map, int(x), int(y), barrier);
    int tries = 0;
    while (tries < C::kTries && !barrier_is_over(barrier, 0)) ++tries;
    *over = tries < C::kTries;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += blockDim.x) out[i] = shared[i];
}

}  // namespace magicube
