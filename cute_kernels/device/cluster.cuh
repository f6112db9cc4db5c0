// Thread block clusters (sm_90+): cluster barrier, remote mbarrier arrive, multicast TMA, distributed shared memory.
#pragma once

#include "device/copy.cuh"

namespace magicube::cluster {

// Cluster barrier, split into arrive and wait: before shared memory of another CTA is accessed, and before a CTA exits.
__device__ __forceinline__ void arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void sync() {
  arrive();
  wait();
}
// As above with relaxed arrive, after barrier_fence, which orders the mbarriers: acquire/release fences all memory.
__device__ __forceinline__ void sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  wait();
}

__device__ __forceinline__ uint32_t rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// CTAs of the cluster.
__device__ __forceinline__ uint32_t size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// Arrive on the mbarrier at the same shared address in CTA `rank` of the cluster. CTA scope suffices: the only accesses
// to order are Tensor Core reads, which have completed; cluster scope costs a fence of all memory.
__device__ __forceinline__ void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(rank) : "memory");
}

// Multicast TMA load of a box to the same shared address in all CTAs of `mask`; completes on the mbarrier of each.
__device__ __forceinline__ void tma_load_2d_multicast(uint16_t mask, uint32_t to, const TmaDescriptor* map, int x, int y,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(mask) : "memory");
}

// The same of a 5-D tensor: see tma_load_5d.
__device__ __forceinline__ void tma_load_5d_multicast(uint16_t mask, uint32_t to, const TmaDescriptor* map, int x, int w,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %6, %6, %6, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(w), "h"(mask), "r"(0) : "memory");
}

// Load a 32-bit word from the shared memory of CTA `rank` of the cluster, at this CTA's address.
__device__ __forceinline__ uint32_t load_of(uint32_t from, uint32_t rank) {
  uint32_t word;
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %1, %2;\n"
      "ld.shared::cluster.u32 %0, [there];\n}" : "=r"(word) : "r"(from), "r"(rank) : "memory");
  return word;
}

// Send a 32-bit word there; completes 4 bytes of the mbarrier at this CTA's address `barrier` there.
__device__ __forceinline__ void send_to(uint32_t to, uint32_t barrier, uint32_t rank, uint32_t word) {
  asm volatile(
      "{\n.reg .b32 there, barrier;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 barrier, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [there], %3, [barrier];\n}" ::"r"(to), "r"(barrier),
      "r"(rank), "r"(word) : "memory");
}

// Load float4, likewise.
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
