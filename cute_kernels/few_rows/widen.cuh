// int8 rows to the 16-bit floats that the few-rows product reads; exact.
//
// sm_80 and later. Work: a thread has 16 values. Memory-bound, and small beside the product that starts behind it.
#pragma once

#include "device/copy.cuh"
#include "few_rows/formats.cuh"

namespace magicube::few {

// Bytes 0 and 2 of a word, two's complement. As bfloat16: 128 + the lower seven bits, less 128 + the upper bit, all exact.
template <class Half>
__device__ __forceinline__ uint32_t integer_pair(uint32_t word) {
  if constexpr (kIsBfloat16<Half>) {
    return subtract_pair<Half>(mask_flip<0x007F007F, 0x43004300>(word), mask_flip<0x00800080, 0x43004300>(word));
  } else {
    return INT8::pair<Half, 1>(&word);
  }
}

// ints: (rows, columns), rows at multiples of 16 bytes if vector. out: (rows, pitch), zero from `columns` on.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
widen_rows(const uint8_t* ints, int64_t int_pitch, int64_t columns, uint16_t* out, int64_t pitch, int64_t vector) {
  using Half = typename C::Half;
  const int64_t row = blockIdx.x, column = (int64_t{blockIdx.y} * C::kThreads + threadIdx.x) * 16;
  if (column >= pitch) return;
  const uint8_t* const from = ints + row * int_pitch + column;
  alignas(16) uint8_t run[16];
  if (vector && column + 16 <= columns) {
    *reinterpret_cast<uint4*>(run) = *reinterpret_cast<const uint4*>(from);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < 16; ++i) run[i] = column + i < columns ? from[i] : 0;
  }
  alignas(16) uint32_t wide[8];
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    wide[i] = integer_pair<Half>(uint32_t(run[2 * i]) | uint32_t(run[2 * i + 1]) << 16);
  }
  uint16_t* const to = out + row * pitch + column;
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    if (column + 8 * i < pitch) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(wide)[i];
  }
}

}  // namespace magicube::few
