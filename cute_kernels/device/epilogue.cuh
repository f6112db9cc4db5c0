// Epilogue: out = total * row_scale * col_scale + bias, from exact integer totals or float sums to the output type.
#pragma once

#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace magicube {

// x * 2^shift; int32 intermediates may wrap if the result fits.
template <class Total>
__device__ __forceinline__ Total weighted(Total x, int shift) {
  using Unsigned = cuda::std::make_unsigned_t<Total>;
  return static_cast<Total>(static_cast<Unsigned>(x) << shift);
}

// Accumulator type of a config, before scaling.
template <class C>
using TotalOf = cuda::std::conditional_t<C::kFloat, float, cuda::std::conditional_t<C::kLongTotal, int64_t, int32_t>>;

template <class Total>
__device__ __forceinline__ float scaled(Total total, float row_scale, float col_scale, float bias) {
  return static_cast<float>(total) * row_scale * col_scale + bias;
}

template <class Out, class Total>
__device__ __forceinline__ Out convert(Total total, float row_scale, float col_scale, float bias) {
  if constexpr (cuda::std::is_integral_v<Out>) return static_cast<Out>(total);
  else if constexpr (cuda::std::is_same_v<Out, __half>)
    return __float2half_rn(scaled(total, row_scale, col_scale, bias));
  else if constexpr (cuda::std::is_same_v<Out, __nv_bfloat16>)
    return __float2bfloat16_rn(scaled(total, row_scale, col_scale, bias));
  else return scaled(total, row_scale, col_scale, bias);
}

// Convert consecutive results of one row; 16-bit floats in pairs, by one instruction.
template <class Out, class Total, int kCount>
__device__ __forceinline__ void convert_run(const Total (&run)[kCount], float row_scale, const float (&col_scale)[kCount],
                                            float bias, Out (&out)[kCount]) {
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof(Out) == 2 && kCount % 2 == 0) {
      if (i % 2) continue;
      const float first = scaled(run[i], row_scale, col_scale[i], bias);
      const float second = scaled(run[i + 1], row_scale, col_scale[i + 1], bias);
      if constexpr (cuda::std::is_same_v<Out, __half>) {
        *reinterpret_cast<__half2*>(out + i) = __floats2half2_rn(first, second);
      } else {
        *reinterpret_cast<__nv_bfloat162*>(out + i) = __floats2bfloat162_rn(first, second);
      }
    } else {
      out[i] = convert<Out>(run[i], row_scale, col_scale[i], bias);
    }
  }
}

template <int kBytes>
struct Store;
template <>
struct Store<4> { using type = uint32_t; };
template <>
struct Store<8> { using type = uint2; };
template <>
struct Store<16> { using type = uint4; };

// Store kCount consecutive results of one row: vectorized, or element-wise for the first `inside` at the edge.
template <bool kTogether, class Out, class Total, int kCount>
__device__ __forceinline__ void write_run(const Total (&run)[kCount], Out* to, int inside, float row_scale,
                                          const float (&col_scale)[kCount], float bias) {
  constexpr int kBytes = kCount * sizeof(Out);
  alignas(kBytes < 16 ? kBytes : 16) Out result[kCount];
  convert_run(run, row_scale, col_scale, bias, result);
  if constexpr (kTogether && kBytes >= 4) {
    constexpr int kPart = kBytes < 16 ? kBytes : 16;
    using Word = typename Store<kPart>::type;
    CUTE_UNROLL
    for (int i = 0; i < kBytes / kPart; ++i) reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(result)[i];
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (kTogether || i < inside) to[i] = result[i];
    }
  }
}

// Store kCount consecutive results of one row added to those `before`; as write_run, for float32.
template <bool kTogether, class Total, int kCount>
__device__ __forceinline__ void add_run(const Total (&run)[kCount], const float (&before)[kCount], float* to, int inside,
                                        float row_scale, const float (&col_scale)[kCount]) {
  constexpr int kPart = kCount < 4 ? kCount : 4;
  using Word = typename Store<kPart * 4>::type;
  alignas(16) float sum[kCount];
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) sum[i] = scaled(run[i], row_scale, col_scale[i], before[i]);
  CUTE_UNROLL
  for (int i = 0; i < kCount; i += kPart) {
    if constexpr (kTogether) {
      *reinterpret_cast<Word*>(to + i) = *reinterpret_cast<const Word*>(sum + i);
    } else {
      CUTE_UNROLL
      for (int j = i; j < i + kPart; ++j) {
        if (j < inside) to[j] = sum[j];
      }
    }
  }
}

}  // namespace magicube
