// Warpgroup primitives (sm_90+): operands in shared memory, named barriers, proxy fence, setmaxnreg.
#pragma once

#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>

#include "device/cluster.cuh"

namespace magicube {

// Shared memory descriptor of K-major rows of kRowBytes, swizzled by TMA.
template <int kRowBytes>
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t address) {
  static_assert(kRowBytes == 64 || kRowBytes == 128, "a row is as wide as a swizzle");
  GmmaDescriptor descriptor;
  descriptor.bitfield.start_address_ = address >> 4;
  descriptor.bitfield.leading_byte_offset_ = 1;
  descriptor.bitfield.stride_byte_offset_ = 8 * kRowBytes >> 4;
  descriptor.bitfield.layout_type_ = uint8_t(kRowBytes == 128 ? SM90::GMMA::LayoutType::B128 : SM90::GMMA::LayoutType::B64);
  return descriptor;
}

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
