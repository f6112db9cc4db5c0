// Tensor memory and tcgen05 instructions (sm_100a, sm_103a): 128 lanes, the rows of a tile, of 512 words.
//
// An address has the lane in its upper half and the column in its lower half. A warp accesses the 32 lanes of its index modulo 4.
// Source: PTX ISA 9.0, section 9.7.16.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm100.hpp>
#include <cute/arch/mma_sm100_desc.hpp>
#include <cute/arch/mma_sm100_umma.hpp>
#include <cute/arch/tmem_allocator_sm100.hpp>

#include "device/copy.cuh"

namespace magicube::tensor_memory {

// Shared memory descriptor of K-major rows of 128 bytes, swizzled by TMA: 8 rows are 1024 bytes.
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t address) {
  UMMA::SmemDescriptor descriptor;
  descriptor.start_address_ = address >> 4;
  descriptor.leading_byte_offset_ = 1;
  descriptor.stride_byte_offset_ = 8 * 128 >> 4;
  descriptor.version_ = 1;
  descriptor.layout_type_ = uint8_t(UMMA::LayoutType::SWIZZLE_128B);
  return descriptor;
}

// A whole warp allocates kColumns columns, whose address it writes to shared memory, and deallocates them at the end. kCtas: 2 if
// the same warp of the other CTA of a pair does so too, with the same address in shared memory.
template <int kCtas> struct AllocatorOf { using type = TMEM::Allocator1Sm; };
template <> struct AllocatorOf<2> { using type = TMEM::Allocator2Sm; };
template <int kColumns, int kCtas>
__device__ __forceinline__ void allocate(uint32_t* address) {
  static_assert(kColumns >= 32 && kColumns <= 512 && (kColumns & (kColumns - 1)) == 0, "32, 64, 128, 256 or 512 columns");
  typename AllocatorOf<kCtas>::type allocator;
  allocator.allocate(kColumns, address);
  allocator.release_allocation_lock();
}
template <int kColumns, int kCtas>
__device__ __forceinline__ void deallocate(uint32_t address) {
  typename AllocatorOf<kCtas>::type().free(address, kColumns);
}

// Fences between accesses to tensor memory and a thread barrier, on either side of it.
__device__ __forceinline__ void fence_before_sync() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ __forceinline__ void fence_after_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// Arrive on the barrier, or with kCtas = 2 on the barriers at this address of both CTAs, once all tcgen05 operations of this warp
// are complete.
template <int kCtas>
__device__ __forceinline__ void commit_arrive(uint32_t barrier) {
  if (!elect_one_sync()) return;
  if constexpr (kCtas == 2) {
    asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(
                     barrier), "h"(uint16_t(3)) : "memory");
  } else {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier) : "memory");
  }
}

constexpr uint32_t kEvenCta = 0xFEFFFFFF;  // bit 24 of a shared::cluster address is the odd CTA's; CUTLASS 4.2, copy_sm100_tma.hpp

// TMA load of a box to this CTA of a pair; completes on the mbarrier at `barrier` of the even CTA.
__device__ __forceinline__ void tma_load_2d_pair(uint32_t to, const TmaDescriptor* map, int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to), "l"(map), "r"(barrier & kEvenCta), "r"(x), "r"(y) : "memory");
}

// Copy the block scales of 128 rows, a word of four each: 512 bytes of shared memory, rows 32 i + j at 16 j + 4 i, to four
// columns: the word of row 32 i + j is in column i and lane j, and in that lane of the other three quarters.
__device__ __forceinline__ void copy_scales(uint32_t to, uint32_t from) {
  UMMA::SmemDescriptor descriptor;  // core matrices: eight rows of 16 bytes
  descriptor.start_address_ = from >> 4;
  descriptor.stride_byte_offset_ = 8 * 16 >> 4;
  descriptor.version_ = 1;
  if (elect_one_sync()) {
    asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(uint64_t(descriptor)) : "memory");
  }
}

// Copy 32 values of each of 128 rows, 32 bytes of shared memory from a descriptor of swizzled rows, to eight columns, a byte a
// value. kBits: of a value; 16 values of 4 or 6 bits lie in 16 bytes there and are unpacked on the way.
template <int kBits>
__device__ __forceinline__ void copy_operand(uint32_t to, uint64_t from) {
  if (!elect_one_sync()) return;
  if constexpr (kBits == 4) {
    asm volatile("tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [%0], %1;" ::"r"(to), "l"(from) : "memory");
  } else if constexpr (kBits == 6) {
    asm volatile("tcgen05.cp.cta_group::1.128x256b.b8x16.b6x16_p32 [%0], %1;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("tcgen05.cp.cta_group::1.128x256b [%0], %1;" ::"r"(to), "l"(from) : "memory");
  }
}

template <int... I>
__device__ __forceinline__ void load_words(uint32_t from, uint32_t (&to)[32], int_sequence<I...>) {
  SM100::TMEM::LOAD::SM100_TMEM_LOAD_16dp256b8x::copy(from, to[I]...);
}

// Load 16 lanes by 64 columns in accumulator order: of each eight columns, lane (g, t) of a warp gets two of row g, then the same
// two of row g + 8.
__device__ __forceinline__ void load_fragment(uint32_t from, uint32_t (&to)[32]) {
  load_words(from, to, make_int_sequence<32>{});
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
  CUTE_UNROLL
  for (int i = 0; i < 32; ++i) asm volatile("" : "+r"(to[i]));  // no read before the wait
}

}  // namespace magicube::tensor_memory
