// Tensor memory, and the Tensor Cores' way into it (sm_100a, sm_103a): 128 lanes, a tile's rows, of 512 words.
//
// An address has the lane in its upper half and the column in its lower one. Warps reach the 32 lanes of their number
// modulo 4 only.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm100.hpp>
#include <cute/arch/mma_sm100_desc.hpp>
#include <cute/arch/mma_sm100_umma.hpp>
#include <cute/arch/tmem_allocator_sm100.hpp>

#include "device/copy.cuh"

namespace magicube::tensor_memory {

// Rows of 128 bytes, k along them, in shared memory as the tensor copy swizzles them: 8 rows are 1024 bytes.
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t address) {
  UMMA::SmemDescriptor descriptor;
  descriptor.start_address_ = address >> 4;
  descriptor.leading_byte_offset_ = 1;
  descriptor.stride_byte_offset_ = 8 * 128 >> 4;
  descriptor.version_ = 1;
  descriptor.layout_type_ = uint8_t(UMMA::LayoutType::SWIZZLE_128B);
  return descriptor;
}

// A whole warp takes kColumns columns, whose address goes to shared memory, and gives them back in the end.
template <int kColumns>
__device__ __forceinline__ void allocate(uint32_t* address) {
  static_assert(kColumns >= 32 && kColumns <= 512 && (kColumns & (kColumns - 1)) == 0, "32, 64, 128, 256 or 512 columns");
  TMEM::Allocator1Sm allocator;
  allocator.allocate(kColumns, address);
  allocator.release_allocation_lock();
}
template <int kColumns>
__device__ __forceinline__ void deallocate(uint32_t address) {
  TMEM::Allocator1Sm().free(address, kColumns);
}

// Between accesses to tensor memory and a barrier of threads that orders them, on either side.
__device__ __forceinline__ void fence_before_sync() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ __forceinline__ void fence_after_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// Arrives on the barrier when all that this warp has had multiplied is done.
__device__ __forceinline__ void commit_arrive(uint32_t barrier) {
  if (elect_one_sync()) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier) : "memory");
  }
}

// Factors of 128 rows, a word of four for each: 512 bytes of shared memory, rows 32 i + j at 16 j + 4 i. They become four
// columns: a word of row 32 i + j is in column i and lane j, and in that lane of the other three quarters.
__device__ __forceinline__ void copy_scales(uint32_t to, uint32_t from) {
  UMMA::SmemDescriptor descriptor;  // eight rows of 16 bytes after eight rows
  descriptor.start_address_ = from >> 4;
  descriptor.stride_byte_offset_ = 8 * 16 >> 4;
  descriptor.version_ = 1;
  if (elect_one_sync()) {
    asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(uint64_t(descriptor)) : "memory");
  }
}

template <int... I>
__device__ __forceinline__ void load_words(uint32_t from, uint32_t (&to)[32], int_sequence<I...>) {
  SM100::TMEM::LOAD::SM100_TMEM_LOAD_16dp256b8x::copy(from, to[I]...);
}

// 16 lanes by 64 columns, in the order of an mma's accumulators: of each eight columns, lane (g, t) of a warp gets two of
// row g, then the same two of row g + 8.
__device__ __forceinline__ void load_fragment(uint32_t from, uint32_t (&to)[32]) {
  load_words(from, to, make_int_sequence<32>{});
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
  CUTE_UNROLL
  for (int i = 0; i < 32; ++i) asm volatile("" : "+r"(to[i]));  // nothing is read before the wait
}

}  // namespace magicube::tensor_memory
