// Packing of 4-, 8- and 16-bit integers into 1- to 16-byte stores; maxima and prefix sums over groups of threads.
#pragma once

#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
#include <cute/config.hpp>

namespace magicube {

// Saturate two integers to kBits (4, 8 or 16) and pack them below `rest`.
template <int kBits, bool kSigned>
__device__ __forceinline__ uint32_t pack_nearest(int32_t low, int32_t high, uint32_t rest) {
  uint32_t word;
  if constexpr (kBits == 16) {
    if constexpr (kSigned) asm("cvt.pack.sat.s16.s32 %0, %1, %2;" : "=r"(word) : "r"(high), "r"(low));
    else asm("cvt.pack.sat.u16.s32 %0, %1, %2;" : "=r"(word) : "r"(high), "r"(low));
  } else if constexpr (kBits == 8) {
    if constexpr (kSigned) asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(high), "r"(low), "r"(rest));
    else asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(high), "r"(low), "r"(rest));
  } else {
    if constexpr (kSigned) asm("cvt.pack.sat.s4.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(high), "r"(low), "r"(rest));
    else asm("cvt.pack.sat.u4.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(high), "r"(low), "r"(rest));
  }
  return word;
}

// kCount integers of kBits (4, 8 or 16), packed low bits first.
template <int kBits, int kCount>
struct PackedRun {
  static constexpr int kBytes = kCount * kBits / 8;
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16, "one store takes a run");
  using Unit = cuda::std::conditional_t<kBits == 16, uint16_t, uint8_t>;  // the smallest store
  static constexpr int kUnits = kBytes / int(sizeof(Unit));
  static constexpr int kUnitValues = kCount / kUnits;
  static constexpr int kWords = (kBytes + 3) / 4;

  uint32_t word[kWords];

  __device__ PackedRun() = default;
  __device__ explicit PackedRun(const int32_t (&values)[kCount]) : word{} {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      word[i * kBits / 32] |= (uint32_t(values[i]) & ((1u << kBits) - 1)) << (i * kBits % 32);
    }
  }

  // Pack the low kBits of each; higher bits are ignored.
  __device__ static PackedRun lowest(const int32_t (&values)[kCount]) {
    if constexpr (kBits != 8 || kCount % 4 != 0) return PackedRun(values);
    PackedRun run;
    CUTE_UNROLL
    for (int w = 0; w < kWords; ++w) {  // three PRMT instead of masks and shifts
      const uint32_t low = __byte_perm(values[4 * w], values[4 * w + 1], 0x0040);
      run.word[w] = __byte_perm(low, __byte_perm(values[4 * w + 2], values[4 * w + 3], 0x0040), 0x5410);
    }
    return run;
  }

  // Pack with saturation.
  template <bool kSigned>
  __device__ static PackedRun nearest(const int32_t (&values)[kCount]) {
    constexpr int kPerWord = 32 / kBits < kCount ? 32 / kBits : kCount;
    PackedRun run;
    CUTE_UNROLL
    for (int w = 0; w < kWords; ++w) {
      uint32_t word = 0;
      CUTE_UNROLL
      for (int i = kPerWord - 2; i >= 0; i -= 2) {
        word = pack_nearest<kBits, kSigned>(values[w * kPerWord + i], values[w * kPerWord + i + 1], word);
      }
      run.word[w] = word;
    }
    return run;
  }

  // Store to an address aligned to kBytes.
  __device__ void store(void* to) const {
    if constexpr (kBytes == 16) *static_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
    else if constexpr (kBytes == 8) *static_cast<uint2*>(to) = make_uint2(word[0], word[1]);
    else if constexpr (kBytes == 4) *static_cast<uint32_t*>(to) = word[0];
    else if constexpr (kBytes == 2) *static_cast<uint16_t*>(to) = uint16_t(word[0]);
    else *static_cast<uint8_t*>(to) = uint8_t(word[0]);
  }

  // Store the units of the first `valid` values one by one.
  __device__ void store_part(void* to, int64_t valid) const {
    CUTE_UNROLL
    for (int i = 0; i < kUnits; ++i) {
      const uint32_t bits = word[i * int(sizeof(Unit)) / 4] >> (i * int(sizeof(Unit)) % 4 * 8);
      if (i * kUnitValues < valid) static_cast<Unit*>(to)[i] = Unit(bits);
    }
  }
};

// Maximum over each group of `lanes` consecutive threads, a power of two; `scratch`: one word per warp.
// All threads of the block must call it.
template <class Value>
__device__ Value group_reduce_max(Value value, int lanes, Value* scratch) {
  for (int step = 1; step < lanes && step < 32; step *= 2) {
    const Value other = __shfl_xor_sync(~0u, value, step);
    value = other > value ? other : value;
  }
  if (lanes <= 32) return value;
  const int warp = threadIdx.x / 32, warps = lanes / 32;
  if (threadIdx.x % 32 == 0) scratch[warp] = value;
  __syncthreads();
  for (int i = 0; i < warps; ++i) {
    const Value other = scratch[warp / warps * warps + i];
    value = other > value ? other : value;
  }
  return value;
}

template <int kWarps>
__device__ __forceinline__ void team_sync() {
  if constexpr (kWarps == 1) __syncwarp();
  else __syncthreads();
}

// Exclusive prefix sum and total over kWarps warps: one warp or the block.
template <int kWarps, class Value>
__device__ Value group_exclusive_sum(Value value, Value& total, Value* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarps;
  Value sum = value;
  CUTE_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    const Value other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if constexpr (kWarps == 1) {
    total = __shfl_sync(~0u, sum, 31);
    return sum - value;
  } else {
    __syncthreads();  // scratch may still be read by the preceding call
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    Value before = 0;
    total = 0;
    CUTE_UNROLL
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) before += scratch[i];
      total += scratch[i];
    }
    return before + sum - value;
  }
}

// OR the bits found by any lane of the warp into the flags, unless the pointer is null.
__device__ __forceinline__ void report(int found, int* flags) {
  const int all = int(__reduce_or_sync(~0u, unsigned(found)));
  if (flags && all && threadIdx.x % 32 == 0 && (*static_cast<volatile int*>(flags) & all) != all) atomicOr(flags, all);
}

}  // namespace magicube
