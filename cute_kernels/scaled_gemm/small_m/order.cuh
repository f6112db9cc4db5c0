// X (M, K) of the small-M product, decoded and in the order along K in which lanes have their weights.
//
// sm_90a; bound by latency: M <= 64 rows. Work: a thread makes 64 values.
// Source: PTX ISA, wgmma.mma_async register fragments.
#pragma once

#include "scaled_gemm/common.cuh"

namespace magicube {

// Order along K of a K slice of X for weights of kBits: lane t has values t kOwn to t kOwn + kOwn - 1 of a K slice of weights; with
// kBlockSums, 8 of each 32.
template <int kBits, bool kBfloat16, bool kBlockSums>
struct SmallMOrder {
  static_assert(kBits == 4 || kBits == 8, "a lane's 16 bytes are whole steps");
  static constexpr int kSliceK = 512 / kBits, kOwn = 128 / kBits, kStepK = kBfloat16 ? 16 : 32, kSteps = kSliceK / kStepK;
  static constexpr int kSize = kBfloat16 ? 2 : 1;  // bytes per value
  static constexpr int kWords = 4 * kSize;  // words of 16 values
  static constexpr int kUnits = kBlockSums ? 1 : kOwn / 16;  // units of a K slice: 16 values of each lane, or 64 in order

  // Word `part` of those that an instruction reads, from eight values: in order, or, of 4 bits, even and odd values apart, or, as
  // bfloat16, values i and i + 4 together.
  __device__ static uint32_t pick(const uint32_t* eight, int part) {
    if constexpr (kBits == 8) return eight[part];
    else if constexpr (kBfloat16) return __byte_perm(eight[part / 2], eight[2 + part / 2], part % 2 ? 0x7632 : 0x5410);
    else return __byte_perm(eight[0], eight[1], part ? 0x7531 : 0x6420);
  }
  // Store a unit of 64 kSize contiguous bytes: eight values, then their words, then those of four lanes. With kBlockSums: two
  // blocks of 32 in order, or, for weights of 4 bits, their even and their odd values.
  __device__ static void put(uint8_t* to, const uint32_t (&numbers)[4][kWords]) {
    if constexpr (kBlockSums) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const auto& a = numbers[kBits == 8 ? i : i / 2 * 2];  // (4 words)
        const auto& b = numbers[i / 2 * 2 + 1];  // (4 words)
        if constexpr (kBits == 8) reinterpret_cast<uint4*>(to)[i] = make_uint4(a[0], a[1], a[2], a[3]);
        else reinterpret_cast<uint4*>(to)[i] = make_uint4(pick(a, i % 2), pick(a + 2, i % 2), pick(b, i % 2), pick(b + 2, i % 2));
      }
      return;
    }
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      const int first = i / (kWords / 2) * (kWords / 2), part = i % (kWords / 2);
      reinterpret_cast<uint4*>(to)[i] = make_uint4(pick(numbers[0] + first, part), pick(numbers[1] + first, part),
                                                   pick(numbers[2] + first, part), pick(numbers[3] + first, part));
    }
  }
};

// A block scale as a float. ue8m0: 2^(code - 127), NaN of 255.
template <class Scale>
__device__ __forceinline__ float block_scale(uint32_t code) {
  if constexpr (cuda::std::is_same_v<Scale, UE8M0>) {
    return __uint_as_float(code << 23 | (code == 0 || code == 255 ? 0x400000u : 0u));
  } else {
    return __uint_as_float(scale_halves<Scale>(code) << 16);
  }
}

// Write X (rows, k), decoded and in the order of SmallMOrder, to (rows, pitch bytes); zero beyond k. A thread makes a unit:
// stores of less than 32 bytes cost microseconds of the product, which waits for this kernel. With kBlockSums, scales of X go to
// factors (blocks, factors_pitch); any beyond the last block.
template <class C>
__global__ void __launch_bounds__(128)
order_few_rows(const uint8_t* x, int64_t x_pitch, int64_t row_bytes, int64_t rows, const uint8_t* scales,
               int64_t scales_pitch, int64_t blocks, uint8_t* ordered, int64_t pitch, float* factors, int64_t factors_pitch) {
  using Format = typename C::Format;
  using Order = SmallMOrder<C::kBits, C::kBfloat16, C::kBlockSums>;
  pdl_wait();
  const int64_t units = pitch / (64 * Order::kSize), index = int64_t{blockIdx.x} * 128 + threadIdx.x;
  const int64_t row = index / units, unit = index % units;
  if (row >= rows) return;
  constexpr int kRunBytes = 4 * Format::kWords;  // 16 packed values
  uint32_t codes[4][Format::kWords], numbers[4][Order::kWords];
  const auto run_of = [&](int t) { return (unit / Order::kUnits * 4 + t) * Order::kUnits + unit % Order::kUnits; };
  CUTE_UNROLL
  for (int t = 0; t < 4; ++t) {
    const int64_t at = run_of(t) * kRunBytes;
    load_ragged_run<Format>(x + row * x_pitch + at, row_bytes - at, codes[t]);
  }
  CUTE_UNROLL
  for (int t = 0; t < 4; ++t) {
    if constexpr (C::kBfloat16) {
      uint32_t factor = 0;
      if constexpr (C::kBlock > 0) {
        const int64_t block = run_of(t) * 16 / C::kBlock;
        factor = scale_halves<typename C::Scale>(block < blocks ? __ldg(scales + row * scales_pitch + block) : 0);
      }
      decode_halves<Format, (C::kBlock > 0)>(codes[t], factor, numbers[t]);
    } else {
      decode_bytes<Format>(codes[t], numbers[t]);
    }
  }
  if constexpr (C::kBlockSums && C::kBlock > 0) {
    constexpr int kCount = 64 / C::kBlock;
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const int64_t block = kCount * unit + i;
      const uint32_t code = block < blocks ? __ldg(scales + row * scales_pitch + block) : 0;
      factors[block * factors_pitch + row] = block_scale<typename C::Scale>(code);
    }
  }
  Order::put(ordered + row * pitch + unit * 64 * Order::kSize, numbers);
}

}  // namespace magicube
