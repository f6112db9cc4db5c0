// Data movement in PTX: cp.async, ldmatrix, TMA, mbarrier, PDL. All inline PTX that is no MMA lives here.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/util.hpp>

#include "device/mma.cuh"

namespace magicube {

__device__ __forceinline__ uint32_t shared_address(const void* at) { return cast_smem_ptr_to_uint(at); }

// x, opaque to the compiler, so that it stays in a register instead of being rematerialized at each use.
__device__ __forceinline__ uint32_t held(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// x, warp-uniform: by the shuffle the compiler sees that branches on it do not diverge.
template <class T>
__device__ __forceinline__ T uniform(T x) { return __shfl_sync(~0u, x, 0); }

// Warp index in the CTA.
__device__ __forceinline__ int warp_of_block() { return uniform(int(threadIdx.x) / 32); }

// cp.async of 16 bytes; bytes from `valid` on are zero-filled.
__device__ __forceinline__ void cp_async(uint32_t to, const void* from, int valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}
// cp.async of 16 or 8 bytes, likewise.
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

// ldmatrix.trans of 8x8 matrices of 16-bit units: lane (g, t) gets units (2t, g) and (2t + 1, g) of each matrix.
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
__device__ __forceinline__ void store_shared(uint32_t to, const uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
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

// Swizzled position of 16-byte chunk `chunk` of row `row` in rows of kRowBytes (CuTe's
// Swizzle<log2(kRowBytes / 16), 4, 3>; the 32-, 64- and 128-byte modes of TMA).
template <int kRowBytes, bool kSwizzle = true>
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) {
  constexpr uint32_t kChunks = kRowBytes / 16;
  constexpr uint32_t kRowsALine = 128 / kRowBytes;
  return row * kRowBytes + ((chunk ^ (kSwizzle ? row / kRowsALine % kChunks : 0)) * 16);
}

// Vector load of kWords words through the read-only path (ld.global.nc).
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

// Programmatic dependent launch (PDL, sm_90+): a kernel starts while its predecessor on the stream still runs. It must
// neither read what the predecessor writes nor write what it reads before griddepcontrol.wait, and lets its successor start
// only after that: results of the kernel two launches back are readable without waiting.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Allow the dependent grid to launch once all CTAs have arrived here.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void pdl_wait() {
  griddepcontrol_wait();
  pdl_launch_dependents();
}

// Store-release of a flag to a concurrent kernel: what this CTA wrote before is visible to whoever acquires the flag.
__device__ __forceinline__ void flag_store_release(uint32_t* at, uint32_t word) {
  asm volatile("fence.acq_rel.gpu;\n st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}
__device__ __forceinline__ void flag_wait_acquire(const uint32_t* at, uint32_t word) {
  for (uint32_t now = ~word; now != word;) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(at) : "memory");
    if (now != word) __nanosleep(100);
  }
}
// Load of data that such a kernel wrote. The compiler may move it: its address must depend on a value read after the wait
template <class T>
__device__ __forceinline__ T load_after_flag(const T* at) {
  static_assert(sizeof(T) == 4, "a word");
  uint32_t word;
  asm("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(at));
  return reinterpret_cast<const T&>(word);
}
// Make acquired data visible to the async proxy (TMA) as well.
__device__ __forceinline__ void fence_proxy_async_global() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// mbarrier (sm_90+): counts arriving threads and transaction bytes.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Make initialized mbarriers visible to the async proxy before first use.
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

// 1-D bulk copy to shared memory, a multiple of 16 bytes; completes on the mbarrier.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier) : "memory");
}

// Bring a tensor map, and a line of data, closer before their first use.
__device__ __forceinline__ void prefetch_tensor_map(const TmaDescriptor* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Load a word for its line's sake; nothing waits for it.
__device__ __forceinline__ void touch(const float* at) {
  float word;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(word) : "l"(at));
}
__device__ __forceinline__ void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// TMA load of a box of a 2-D tensor to shared memory; completes on the mbarrier.
__device__ __forceinline__ void tma_load_2d(uint32_t to, const TmaDescriptor* map, int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}

// The same of a 5-D tensor whose rows are counted by four indices, from `w` of the last on.
__device__ __forceinline__ void tma_load_5d(uint32_t to, const TmaDescriptor* map, int x, int w, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %5, %5, %5, %4}], [%2];" ::
      "r"(to), "l"(map), "r"(barrier), "r"(x), "r"(w), "r"(0) : "memory");
}

}  // namespace magicube
