// Dequantize an operand before the product: out = packed values as e4m3 or e5m2 bytes, or as bfloat16 times the block scales.
//
// All architectures from sm_80. Work: a thread decodes a run of 16 values of each of kEach rows; memory-bound, no pipeline.
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

}  // namespace magicube
