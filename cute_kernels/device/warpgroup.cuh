// What the dense product needs beside device/copy.cuh: clusters, named barriers, registers on loan (sm_90 on).
#pragma once

#include "device/cluster.cuh"

namespace magicube {

// What concerns whole warp groups of a block.
namespace warp_group {

// A barrier at which `threads` meet, those that arrive without waiting among them.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// What a thread has written to shared memory is there for the tensor cores, once a barrier is behind it.
__device__ __forceinline__ void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Registers of a thread from here on, for all of a warp group.
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
