// Moving bytes: cp.async, ldmatrix, the bulk tensor copy and its barriers. Every PTX word that is no mma lives here.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/util.hpp>

#include "device/mma.cuh"

namespace magicube {

__device__ __forceinline__ uint32_t shared_address(const void* at) { return cast_smem_ptr_to_uint(at); }

// x, which the compiler then keeps in a register instead of computing it anew wherever it is used.
__device__ __forceinline__ uint32_t held(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// x, the same in all lanes of the warp, which the compiler sees by the shuffle: branches on it then leave no lane behind.
template <class T>
__device__ __forceinline__ T uniform(T x) { return __shfl_sync(~0u, x, 0); }

// The warp's number in its block.
__device__ __forceinline__ int warp_of_block() { return uniform(int(threadIdx.x) / 32); }

// 16 bytes from global to shared memory; bytes from `valid` on become zero.
__device__ __forceinline__ void cp_async(uint32_t to, const void* from, int valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}
// The same of 16 bytes or 8.
template <int kBytes>
__device__ __forceinline__ void copy_async_run(uint32_t to, const void* from, int valid) {
  if constexpr (kBytes == 16) cp_async(to, from, valid);
  else asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}
__device__ __forceinline__ void copy_async_word(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 8x8 matrices of 16-bit units, transposed: lane (g, t) gets units (2t, g) and (2t + 1, g) of each matrix.
__device__ __forceinline__ void load_transposed_pair(uint32_t from, uint32_t* to) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(to[0]), "=r"(to[1]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t from, uint32_t* to) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
__device__ __forceinline__ uint32_t load_shared_half(uint32_t from) {
  uint16_t half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(from) : "memory");
  return half;
}
template <int kWords>
__device__ __forceinline__ void load_shared(uint32_t from, uint32_t (&to)[kWords]) {
  if constexpr (kWords == 4) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from) : "memory");
  } else {
    static_assert(kWords == 1, "a lane reads 1, 2 or 4 words");
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(from) : "memory");
  }
}

// Where 16-byte chunk `chunk` of row `row` lies when rows of kRowBytes are swizzled over the banks (CuTe's
// Swizzle<log2(kRowBytes / 16), 4, 3>, the tensor copy's 32-, 64- and 128-byte modes).
template <int kRowBytes, bool kSwizzle = true>
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) {
  constexpr uint32_t kChunks = kRowBytes / 16;
  constexpr uint32_t kRowsALine = 128 / kRowBytes;
  return row * kRowBytes + ((chunk ^ (kSwizzle ? row / kRowsALine % kChunks : 0)) * 16);
}

// kWords neighbouring words through the read-only path.
template <int kWords>
__device__ __forceinline__ void load_words(uint32_t* to, const uint32_t* from) {
  if constexpr (kWords == 4) {
    const uint4 x = __ldg(reinterpret_cast<const uint4*>(from));
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  } else if constexpr (kWords == 2) {
    const uint2 x = __ldg(reinterpret_cast<const uint2*>(from));
    to[0] = x.x, to[1] = x.y;
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) to[i] = __ldg(from + i);
  }
}

// A kernel may be launched while the one before it on the stream still runs (sm_90 on). Nothing that one may write is
// read, and nothing that it may read is written, before its end; only then may the next kernel start likewise, so
// that what was written two kernels ago can be read without waiting.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// From when all blocks have come here.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void pdl_wait() {
  griddepcontrol_wait();
  pdl_launch_dependents();
}

// One kernel's word to another that runs beside it: what its block wrote before is there when the word is heard.
__device__ __forceinline__ void flag_store_release(uint32_t* at, uint32_t word) {
  asm volatile("fence.acq_rel.gpu;\n st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}
__device__ __forceinline__ void flag_wait_acquire(const uint32_t* at, uint32_t word) {
  for (uint32_t now = ~word; now != word;) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(at) : "memory");
    if (now != word) __nanosleep(100);
  }
}
// A word that such a kernel wrote. The compiler may move this: its address must depend on something that came after waiting.
template <class T>
__device__ __forceinline__ T load_after_flag(const T* at) {
  static_assert(sizeof(T) == 4, "a word");
  uint32_t word;
  asm("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(at));
  return reinterpret_cast<const T&>(word);
}
// What was heard of is there for the copy engine too.
__device__ __forceinline__ void fence_proxy_async_global() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// Barriers in shared memory that count arriving threads and arriving bytes (sm_90 on).
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes barriers known to the copy engine before any thread uses them.
__device__ __forceinline__ void barrier_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// Neighbouring bytes, whole pieces of 16, to shared memory; completes on the barrier.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier) : "memory");
}

// A box of a two-dimensional tensor to shared memory; completes on the barrier.
__device__ __forceinline__ void tma_load_2d(uint32_t to, const TmaDescriptor* map, int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}

}  // namespace magicube
