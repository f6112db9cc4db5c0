// Rows to e4m3 with a scale per row or per 128 values, code = e4m3(x / scale), or with block scales of 32 (mxfp8); to nearest even,
// saturating.
//
// sm_89 and later (cvt to e4m3). Work: a CTA per row, which reads it twice; of scales of 128 and mxfp8, 8 values per thread.
// Quotients are those of double, rounded once: toward zero with a sticky bit to float32, then by the conversion. Source: PTX ISA,
// cvt.
#pragma once

#include "device/copy.cuh"
#include "few_rows/formats.cuh"

namespace magicube::few {

constexpr int kRun = 8;  // values of a thread at a time

// Eight values; zeros beyond the `valid` first.
template <class Source>
__device__ __forceinline__ void load_values(const Source* from, int64_t valid, bool vector, float (&to)[kRun]) {
  alignas(16) Source run[kRun];
  if (vector && valid >= kRun) {
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(run) / 16); ++i) reinterpret_cast<uint4*>(run)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kRun; ++i) run[i] = i < valid ? from[i] : Source(0.0f);
  }
  CUTE_UNROLL
  for (int i = 0; i < kRun; ++i) to[i] = static_cast<float>(run[i]);
}

// Bits of the largest magnitude; infinity and NaN are above all others.
__device__ __forceinline__ uint32_t absmax_bits(const float (&x)[kRun]) {
  uint32_t found = 0;
  CUTE_UNROLL
  for (int i = 0; i < kRun; ++i) found = max(found, __float_as_uint(x[i]) & 0x7FFFFFFF);
  return found;
}

// amax / 448, of the bits of amax: 1 for zero, NaN for what is not finite, never 0.
__device__ __forceinline__ float absmax_scale(uint32_t bits) {
  if (bits >= 0x7F800000) return __uint_as_float(0x7FC00000);
  if (bits == 0) return 1.0f;
  return fmaxf(__double2float_rn(static_cast<double>(__uint_as_float(bits)) / 448.0), __uint_as_float(1));
}

// x as a float32 that rounds to e4m3 as x does.
__device__ __forceinline__ float sticky_float(double x) {
  const float found = __double2float_rz(x);
  return static_cast<double>(found) == x ? found : __uint_as_float(__float_as_uint(found) | 1);
}

// Store the codes of eight quotients, of which `valid` exist.
__device__ __forceinline__ void store_codes(const double (&quotients)[kRun], uint8_t* to, int64_t valid, bool vector) {
  alignas(8) uint16_t codes[kRun / 2];
  CUTE_UNROLL
  for (int i = 0; i < kRun / 2; ++i) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;"
        : "=h"(codes[i]) : "f"(sticky_float(quotients[2 * i])), "f"(sticky_float(quotients[2 * i + 1])));
  }
  if (vector && valid >= kRun) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(codes);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kRun; ++i) {
      if (i < valid) to[i] = reinterpret_cast<const uint8_t*>(codes)[i];
    }
  }
}

// scales: (rows,), written; read, one for all rows, if `given`.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
encode_e4m3_rows(const typename C::Source* x, int64_t pitch, int64_t columns, float* scales, int64_t given, uint8_t* out,
                 int64_t out_pitch, int64_t vector) {
  pdl_wait();
  __shared__ uint32_t largest[C::kThreads / 32];
  const int64_t row = blockIdx.x, first = int64_t{threadIdx.x} * kRun, step = int64_t{C::kThreads} * kRun;
  const auto* const from = x + row * pitch;
  float values[kRun];
  float scale = given ? __ldg(scales) : 1.0f;
  if (!given) {
    uint32_t bits = 0;
    for (int64_t column = first; column < columns; column += step) {
      load_values(from + column, columns - column, vector != 0, values);
      bits = max(bits, absmax_bits(values));
    }
    bits = __reduce_max_sync(~0u, bits);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = bits;
    __syncthreads();
    CUTE_UNROLL
    for (int i = 0; i < C::kThreads / 32; ++i) bits = max(bits, largest[i]);
    scale = absmax_scale(bits);
    if (threadIdx.x == 0) scales[row] = scale;
  }
  for (int64_t column = first; column < columns; column += step) {
    load_values(from + column, columns - column, vector != 0, values);
    double quotients[kRun];
    CUTE_UNROLL
    for (int i = 0; i < kRun; ++i) quotients[i] = static_cast<double>(values[i]) / static_cast<double>(scale);
    store_codes(quotients, out + row * out_pitch + column, columns - column, vector != 0);
  }
}

// scales: of row r and block b at r * row_step + b * block_step. Sixteen lanes share a block.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
encode_e4m3_groups(const typename C::Source* x, int64_t pitch, int64_t columns, float* scales, int64_t row_step, int64_t block_step,
                   uint8_t* out, int64_t out_pitch, int64_t vector) {
  pdl_wait();
  const int64_t row = blockIdx.x, column = (int64_t{blockIdx.y} * C::kThreads + threadIdx.x) * kRun;
  float values[kRun];
  load_values(x + row * pitch + column, columns - column, vector != 0, values);
  uint32_t bits = absmax_bits(values);
  CUTE_UNROLL
  for (int step = 1; step < 16; step *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, step));
  const float scale = absmax_scale(bits);
  double quotients[kRun];
  CUTE_UNROLL
  for (int i = 0; i < kRun; ++i) quotients[i] = static_cast<double>(values[i]) / static_cast<double>(scale);
  if (column >= columns) return;
  if (threadIdx.x % 16 == 0) scales[row * row_step + column / 128 * block_step] = scale;
  store_codes(quotients, out + row * out_pitch + column, columns - column, vector != 0);
}

// scales: (rows, blocks) of ue8m0, 2^(floor(log2 amax) - 8); 1 for zeros, NaN for non-finite blocks. Four lanes share a block.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
encode_mxfp8_rows(const typename C::Source* x, int64_t pitch, int64_t columns, uint8_t* scales, int64_t blocks, uint8_t* out,
                  int64_t out_pitch, int64_t vector) {
  pdl_wait();
  const int64_t row = blockIdx.x, column = (int64_t{blockIdx.y} * C::kThreads + threadIdx.x) * kRun;
  float values[kRun];
  load_values(x + row * pitch + column, columns - column, vector != 0, values);
  uint32_t bits = absmax_bits(values);
  bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
  bits = max(bits, __shfl_xor_sync(~0u, bits, 2));
  // floor(log2): of subnormal numbers from the place of the highest bit
  const int exponent = bits >> 23 ? int(bits >> 23) - 127 : -118 - __clz(bits);
  const int code = bits >= 0x7F800000 ? 255 : bits == 0 ? 127 : max(exponent - 8, -127) + 127;
  const double inverse = code == 255 ? __longlong_as_double(0x7FF8000000000000) : __longlong_as_double(int64_t{1150 - code} << 52);
  double quotients[kRun];
  CUTE_UNROLL
  for (int i = 0; i < kRun; ++i) quotients[i] = static_cast<double>(values[i]) * inverse;
  if (column >= columns) return;
  if (threadIdx.x % 4 == 0) scales[row * blocks + column / 32] = uint8_t(code);
  store_codes(quotients, out + row * out_pitch + column, columns - column, vector != 0);
}

}  // namespace magicube::few
