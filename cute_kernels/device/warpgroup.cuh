// Warpgroup primitives (sm_90+): named barriers, proxy fence, setmaxnreg.
#pragma once

#include "device/cluster.cuh"

namespace magicube {

// Warpgroup-wide operations.
namespace warp_group {

// Named barrier of `threads` threads, including those that arrive without waiting.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Proxy fence: shared memory written by this thread becomes visible to wgmma after the next barrier.
__device__ __forceinline__ void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// setmaxnreg: registers per thread from here on, for the whole warpgroup.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace warp_group

}  // namespace magicube
