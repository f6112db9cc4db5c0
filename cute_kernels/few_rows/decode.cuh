// Packed weights to a dense matrix (N, K) of float16 or bfloat16, which cuBLAS multiplies by many rows.
//
// sm_80 and later; memory-bound by the stores. Work: a warp has 16 rows x 128 k, a CTA 64 rows and kThreads / 128 units. A lane
// reads its codes by 16-byte loads and decodes pairs of them; the four lanes of a row exchange pairs, so that each stores 16 bytes.
// A value is code times scale times the scale of its row, in float32, rounded once.
#pragma once

#include "device/copy.cuh"
#include "device/quad.cuh"
#include "few_rows/formats.cuh"

namespace magicube::few {

template <class Half>
__device__ __forceinline__ float2 widen_pair(uint32_t pair) {
  if constexpr (kIsBfloat16<Half>) return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000)};
  else return __half22float2(reinterpret_cast<const __half2&>(pair));
}

template <class Half>
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  typename Half::Pair pair;
  if constexpr (kIsBfloat16<Half>) pair = __floats2bfloat162_rn(low, high);
  else pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Pair p of a row. Code times 16-bit scale has at most 19 bits and is exact; a float32 scale or a minimum takes one rounding.
// The row's scale comes last: its product with the lift of a code's exponent could be infinite.
template <class C, int p, int row>
__device__ __forceinline__ uint32_t dense_pair(const uint32_t* words, const Scales& scales, float row_scale) {
  using Half = typename C::Half;
  using Weights = typename C::Weights;
  using Scale = typename C::Scale;
  constexpr int kLift = Weights::template kLift<Half>, i = p / 2 * 16 / C::kGroup;
  float2 value = widen_pair<Half>(Weights::template pair<Half, p>(words));  // (2,)
  float scale = widen_pair<Half>(Scale::template factor<Half, kLift, i, row>(scales)).x;  // ()
  if constexpr (Scale::kSum) scale *= __uint_as_float(scales[row][i]);  // ()
  if constexpr (Scale::kMinimum) {
    const float minimum = widen_pair<Half>(Scale::template minimum<Half, i, row>(scales)).x;  // ()
    value = {__fmaf_rn(value.x, scale, minimum), __fmaf_rn(value.y, scale, minimum)};  // (2,)
  } else {
    value = {value.x * scale, value.y * scale};  // (2,)
  }
  return round_pair<Half>(value.x * row_scale, value.y * row_scale);  // (2,)
}

// Store 32 k of a row: chunks 4 j to 4 j + 3, of which each lane has one. `to` is the row's, `left` the columns from there on.
template <class C, int row, int j, int... c>
__device__ __forceinline__ void store_chunks(const uint32_t* words, const Scales& scales, float row_scale, uint4* to, int left,
                                             int_sequence<c...>) {
  const int t = threadIdx.x % 4;
  alignas(16) uint32_t run[4] = {dense_pair<C, 4 * j + c, row>(words, scales, row_scale)...};  // (4 chunks, 2)
  transpose_quad(run, t);  // (8,)
  if (32 * j + 8 * t < left) to[4 * j + t] = *reinterpret_cast<const uint4*>(run);
}
template <class C, int row, int... j>
__device__ __forceinline__ void store_row(const uint32_t* words, const Scales& scales, float row_scale, uint4* to, int left,
                                          int_sequence<j...>) {
  (store_chunks<C, row, j>(words, scales, row_scale, to, left, make_int_sequence<4>{}), ...);
}

// weights: (blocks of 64 rows, units, unit bytes). row_scales: (n,). out: (n, pitch), of which `columns` are written; both are
// multiples of 8. Columns from K on hold what stands for a code of the padding.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
decode_weight(const uint8_t* weights, int64_t units, const float* row_scales, uint16_t* out, int64_t pitch, int64_t n,
              int64_t columns) {
  using U = Unit<C>;
  const int64_t block = blockIdx.y, unit = int64_t{blockIdx.x} * (C::kThreads / 128) + threadIdx.x / 128;
  if (unit >= units) return;  // of whole warps
  uint32_t words[2][U::kWords];
  Scales scales;
  load_unit<C>(weights + (block * units + unit) * U::kBytes, words, scales);
  const int64_t first = block * kUnitRows + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = unit * kUnitK;
  const auto store = [&](auto which) {  // of rows g and g + 8
    constexpr int kRow = decltype(which)::value;
    const int64_t row = first + 8 * kRow;
    const bool present = row < n;  // lanes of other rows take part in the exchange
    const float row_scale = present ? __ldg(row_scales + row) : 0.0f;  // ()
    uint4* const to = reinterpret_cast<uint4*>(out + row * pitch + column);
    store_row<C, kRow>(words[kRow], scales, row_scale, to, present ? int(columns - column) : 0, make_int_sequence<4>{});
  };
  store(cuda::std::integral_constant<int, 0>{});
  store(cuda::std::integral_constant<int, 1>{});
}

}  // namespace magicube::few
