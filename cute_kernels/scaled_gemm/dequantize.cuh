// Dequantize an operand before the product: out = packed values as e4m3 or e5m2 bytes, or as bfloat16 times the block scales; or
// fold it: ue8m0 block scales become part of e4m3 values, and float32 scales of rows or of 128 values stay.
//
// decode_floats: sm_80 and later; a thread decodes a run of 16 values of each of kEach rows. fold_floats: sm_90a (cvt to e4m3); a
// thread folds a run of 16 values at a time. Memory-bound, no pipeline. Source: PTX ISA, cvt.
#pragma once

#include "scaled_gemm/common.cuh"

namespace magicube {

// packed (rows, row_bytes) -> out (rows, out_pitch bytes), whole runs of 16. A CTA has 1 << shift runs of each of its rows.
template <class C>
__global__ void __launch_bounds__(128)
decode_floats(const uint8_t* codes, int64_t pitch, int64_t row_bytes, int64_t rows, int64_t runs, int64_t shift,
              const uint8_t* scales, int64_t scales_pitch, uint8_t* out, int64_t out_pitch) {
  using Format = typename C::Format;
  constexpr int kEach = 4, kRunBytes = 4 * Format::kWords;
  const int64_t run = (int64_t{blockIdx.y} << shift) + (threadIdx.x & ((1 << shift) - 1));
  const int64_t step = 128 >> shift, first = int64_t{blockIdx.x} * step * kEach + (threadIdx.x >> shift);
  if (run >= runs) return;
  uint32_t packed[kEach][Format::kWords], block_scales[kEach] = {};  // all loads come before all stores
  CUTE_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int64_t row = first + i * step;
    if (row >= rows) continue;
    load_ragged_run<Format>(codes + row * pitch + run * kRunBytes, row_bytes - run * kRunBytes, packed[i]);
    if constexpr (C::kBlock > 0) {
      block_scales[i] = scale_halves<typename C::Scale>(__ldg(scales + row * scales_pitch + run * 16 / C::kBlock));
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int64_t row = first + i * step;
    if (row >= rows) continue;
    constexpr int kWords = C::kBfloat16 ? 8 : 4;
    uint32_t numbers[kWords];
    if constexpr (C::kBfloat16) decode_halves<Format, (C::kBlock > 0)>(packed[i], block_scales[i], numbers);
    else decode_bytes<Format>(packed[i], numbers);
    uint4* const to = reinterpret_cast<uint4*>(out + row * out_pitch + run * 4 * kWords);
    CUTE_UNROLL
    for (int w = 0; w < kWords; w += 4) to[w / 4] = make_uint4(numbers[w], numbers[w + 1], numbers[w + 2], numbers[w + 3]);
  }
}

constexpr int kNoExponent = -100000;  // of zeros

// The least exponent of two that makes the largest of sixteen e4m3 codes no more than 1.75 times it, which e4m3 holds with any
// exponent: 1.875 times 2^8 is NaN. Of NaN that of the largest number, or one more.
__device__ __forceinline__ int ceiling_exponent(const uint32_t (&codes)[4]) {
  uint32_t pair = 0;  // maxima of the bytes at even and at odd places
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) pair = __vimax3_u16x2(pair, codes[i] & 0x7F * kEachHalf, codes[i] >> 8 & 0x7F * kEachHalf);
  const uint32_t largest = max(pair & 0xFFFF, pair >> 16);
  if (largest == 0) return kNoExponent;
  if (largest < 8) return 22 - __clz(largest);  // subnormal numbers are codes times 2^-9
  return int(largest + 1 >> 3) - 7;
}

// As above of sixteen e2m1 codes: of 4 and 6, 2 and 3, 1 and 1.5, 0.5.
__device__ __forceinline__ int ceiling_exponent(const uint32_t (&packed)[2]) {
  const uint32_t any = packed[0] | packed[1], top = packed[0] & packed[0] << 1 | packed[1] & packed[1] << 1;
  return top & 0x44444444 ? 2 : any & 0x44444444 ? 1 : any & 0x22222222 ? 0 : any & 0x11111111 ? -1 : kNoExponent;
}

// bfloat16x2 to two e4m3 codes, the first in the low byte; to nearest even, saturating.
__device__ __forceinline__ uint32_t narrow_halves(uint32_t pair) {
  const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xFFFF0000);
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(codes) : "f"(low), "f"(high));
  return codes;
}

// A run of values with a ue8m0 block scale.
template <class C>
struct ScaledRun {
  using Format = typename C::Format;
  uint32_t packed[Format::kWords], scale;

  // Run `run` of a row; zeros, scaled by 1, beyond its end.
  __device__ void load(const uint8_t* codes, int64_t row_bytes, const uint8_t* scales, int64_t run, bool exists) {
    const int64_t at = run * 4 * Format::kWords;
    CUTE_UNROLL
    for (int w = 0; w < Format::kWords; ++w) packed[w] = 0;
    scale = 127;
    if (!exists) return;
    load_ragged_run<Format>(codes + at, row_bytes - at, packed);
    scale = __ldg(scales + run * 16 / C::kBlock);
  }
  // That of the largest value.
  __device__ int exponent() const {
    int own;
    if constexpr (Format::kBits == 4) {
      own = ceiling_exponent(packed);
    } else {
      uint32_t codes[4];
      decode_bytes<Format>(packed, codes);
      own = ceiling_exponent(codes);
      if (own != kNoExponent) own += 7 - Format::kBias;  // 2^(7 - bias) too small
    }
    return scale == 255 || own == kNoExponent ? kNoExponent : own + int(scale) - 127;
  }
  // The values over 2^base as e4m3.
  __device__ uint4 over(int base) const {
    const int shift = min(int(scale) - 127 - base, 127);
    uint32_t codes[4];
    if (scale == 255 || !shifted(shift, codes)) rounded(shift, codes);
    return make_uint4(codes[0], codes[1], codes[2], codes[3]);
  }
  // The values times 2^shift by their exponents alone; false where that is not all.
  __device__ __forceinline__ bool shifted(int shift, uint32_t (&codes)[4]) const {
    if constexpr (cuda::std::is_same_v<Format, E4M3>) {
      if (shift > 0 || shift < -14) return false;
      uint32_t fits = 0x80 * kEachByte;  // normal numbers that stay so, none of them NaN
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const uint32_t magnitude = packed[i] & 0x7F * kEachByte;
        fits &= magnitude + (0x78 + 8 * shift) * kEachByte & ~(magnitude + kEachByte);
        codes[i] = packed[i] + 8 * shift * kEachByte;
      }
      return fits == 0x80 * kEachByte;
    } else if constexpr (cuda::std::is_same_v<Format, E2M1>) {
      if (shift > 9 || shift < -5) return false;
      // a byte for each of 0, 0.5, 1, 1.5 and 2, 3, 4, 6, which its code selects
      const uint32_t low = 0x3C383000 + 8 * shift * (kEachByte - 1), high = 0x4C484440 + 8 * shift * kEachByte;
      uint32_t spread[4];
      spread_codes<Format>(packed, spread);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const uint32_t selected = __byte_perm(low, high, packed[i / 2] >> i % 2 * 16 & 0x7777);
        codes[i] = selected | spread[i] << 4 & 0x80 * kEachByte;
      }
      return true;
    } else {
      return false;
    }
  }
  // The same to nearest even.
  __device__ void rounded(int shift, uint32_t (&codes)[4]) const {
    const uint32_t factor = scale == 255 ? 0x7FC0 : shift < -126 ? 0 : shift + 127 << 7;
    uint32_t pairs[8];
    decode_halves<Format, true>(packed, factor * kEachHalf, pairs);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) codes[i] = narrow_halves(pairs[2 * i]) | narrow_halves(pairs[2 * i + 1]) << 16;
  }
};

// What values are divided by, 2^base, so that the largest is within 2^7..448. 1 for zeros.
__device__ __forceinline__ int base_of(int largest) { return largest == kNoExponent ? 0 : min(max(largest - 8, -126), 127); }

// packed (rows, row_bytes), scales of blocks (rows, ceil(K / kBlock)) -> out (rows, out_pitch bytes), whole runs of 16.
// kLines: out_scales (rows, parts), of 128 values, eight threads each; a CTA has 1 << shift runs of kHeld rows a thread. Else (rows,),
// times `given` if there are any; a CTA a row, of which kHeld runs a thread stay in registers.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
fold_floats(const uint8_t* codes, int64_t pitch, int64_t row_bytes, int64_t rows, int64_t runs, int64_t shift, const uint8_t* scales,
            int64_t scales_pitch, const float* given, int64_t given_step, float* out_scales, uint8_t* out, int64_t out_pitch) {
  constexpr int kHeld = C::kHeld;
  ScaledRun<C> held[kHeld];
  if constexpr (C::kLines) {
    const int64_t run = (int64_t{blockIdx.y} << shift) + (threadIdx.x & ((1 << shift) - 1));
    const int64_t step = C::kThreads >> shift, first = int64_t{blockIdx.x} * step * kHeld + (threadIdx.x >> shift);
    CUTE_UNROLL
    for (int i = 0; i < kHeld; ++i) {  // all loads come before all stores
      const int64_t row = first + i * step;
      held[i].load(codes + row * pitch, row_bytes, scales + row * scales_pitch, run, row < rows && run < runs);
    }
    CUTE_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const int64_t row = first + i * step;
      int largest = held[i].exponent();
      CUTE_UNROLL
      for (int lanes = 1; lanes < 8; lanes *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
      if (row >= rows || run >= runs) continue;
      const int base = base_of(largest);
      *reinterpret_cast<uint4*>(out + row * out_pitch + run * 16) = held[i].over(base);
      if (run % 8 == 0) out_scales[row * ((runs + 7) / 8) + run / 8] = ldexpf(1.0f, base);
    }
  } else {
    __shared__ int tops[C::kThreads / 32];
    const int64_t row = blockIdx.x;
    const uint8_t* const from = codes + row * pitch;
    const uint8_t* const of_blocks = scales + row * scales_pitch;
    CUTE_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const int64_t run = i * C::kThreads + threadIdx.x;
      held[i].load(from, row_bytes, of_blocks, run, run < runs);
    }
    ScaledRun<C> values;
    int largest = kNoExponent;
    CUTE_UNROLL
    for (int i = 0; i < kHeld; ++i) largest = max(largest, held[i].exponent());
    for (int64_t run = kHeld * C::kThreads + threadIdx.x; run < runs; run += C::kThreads) {
      values.load(from, row_bytes, of_blocks, run, true);
      largest = max(largest, values.exponent());
    }
    largest = __reduce_max_sync(~0u, largest);
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = largest;
    __syncthreads();
    CUTE_UNROLL
    for (int i = 0; i < C::kThreads / 32; ++i) largest = max(largest, tops[i]);
    const int base = base_of(largest);
    if (threadIdx.x == 0) out_scales[row] = ldexpf(given ? __ldg(given + row * given_step) : 1.0f, base);
    uint8_t* const to = out + row * out_pitch;
    CUTE_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const int64_t run = i * C::kThreads + threadIdx.x;
      if (run < runs) *reinterpret_cast<uint4*>(to + run * 16) = held[i].over(base);
    }
    for (int64_t run = kHeld * C::kThreads + threadIdx.x; run < runs; run += C::kThreads) {
      values.load(from, row_bytes, of_blocks, run, true);
      *reinterpret_cast<uint4*>(to + run * 16) = values.over(base);
    }
  }
}

}  // namespace magicube
