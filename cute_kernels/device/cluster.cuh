// Blocks that share their memory: meeting, arriving at each other's barriers, one fetch for all (sm_90 on).
#pragma once

#include "device/copy.cuh"

namespace magicube::cluster {

// They meet, in two steps; shared memory of all of them is ready before, or out of use after.
__device__ __forceinline__ void arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void sync() {
  arrive();
  wait();
}
// The same after barrier_fence, which orders the barriers; ordering the rest takes a fence of all memory.
__device__ __forceinline__ void sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  wait();
}

__device__ __forceinline__ uint32_t rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Arrives on the barrier at the same address in block `rank` of the cluster. Of the scope of a block: what this thread
// has read by the tensor cores is behind it, and a wider scope costs a fence of all memory.
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(rank) : "memory");
}

// A box to the same address in all blocks of `mask`; completes on the barrier at the same address in each.
__device__ __forceinline__ void tma_load_2d_multicast(uint16_t mask, uint32_t to, const TmaDescriptor* map, int x, int y,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(mask) : "memory");
}

// A word of the shared memory of block `rank` of the cluster, at the address that it has in this one.
__device__ __forceinline__ uint32_t load_of(uint32_t from, uint32_t rank) {
  uint32_t word;
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %1, %2;\n"
      "ld.shared::cluster.u32 %0, [there];\n}" : "=r"(word) : "r"(from), "r"(rank) : "memory");
  return word;
}

// Four neighbouring words of floats of it.
__device__ __forceinline__ float4 load_four_of(uint32_t from, uint32_t rank) {
  float4 x;
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from), "r"(rank) : "memory");
  return x;
}

}  // namespace magicube::cluster
