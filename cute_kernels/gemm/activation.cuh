// Activations of float32 results.
//
// sm_80 and later. Largest error, in float32: GELU 4e-7, its tanh form and SiLU 3e-7, or 4 units in the last place. NaN stays; -inf gives
// the limit 0.
#pragma once

#include <cute/config.hpp>

#include "device/math.cuh"

namespace magicube {

enum Activation { kIdentity, kRelu, kGelu, kGeluTanh, kSilu };  // as in gemm/epilogue.py

// x / (1 + exp(-v)), for x and v of the same sign.
__device__ __forceinline__ float times_sigmoid(float x, float v) {
  return at_least(x, -100.0f) * reciprocal_of_normal(1.0f + __expf(-at_least(v, -80.0f)));
}

// x Phi(x) = max(x, 0) - |x| Phi(-|x|), with Phi(-a) = p(a)^-8. The polynomial is that of the CPU engine, times 2^(1/8).
__device__ __forceinline__ float gelu(float x) {
  const float a = fminf(fabsf(x), 10.0f), b = a * a;
  const float low = fmaf(fmaf(9.369239492e-03f, a, 4.884253293e-02f), b, fmaf(1.087590579e-01f, a, 1.090507733e+00f));
  const float high = fmaf(fmaf(-1.826303924e-05f, a, 1.064144734e-04f), b, fmaf(1.214280720e-04f, a, 1.069421216e-03f));
  float p = fmaf(fmaf(3.197912837e-06f, b * b, high), b * b, low);
  p *= p;
  p *= p;
  return fmaf(-a, reciprocal_of_normal(p * p), at_least(x, 0.0f));
}

// The same functions of x as x (1 + tanh(u)) / 2, by one instruction for tanh: within 2^-12 |x| + 4e-5, for results of int8. The largest
// error of GELU's u is 2.6e-5 of x Phi(x); beyond 4 its polynomial is that of 4.
template <int kActivation>
__device__ __forceinline__ float activate_coarsely(float x) {
  float u = 0.5f * x;
  if constexpr (kActivation == kGelu) {
    const float square = fminf(x * x, 16.0f);
    u = x * fmaf(fmaf(-3.51516809e-4f, square, 3.70056462e-2f), square, 7.97507884e-1f);
  } else if constexpr (kActivation == kGeluTanh) {
    u = x * fmaf(0.0356774081f, x * x, 0.7978845608f);
  }
  const float part = 0.5f * x;
  return fmaf(part, tanh_of(u), part);
}

template <int kActivation, bool kCoarse>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == kIdentity) return x;
  else if constexpr (kActivation == kRelu) return at_least(x, 0.0f);
  else if constexpr (kCoarse) return activate_coarsely<kActivation>(x);
  else if constexpr (kActivation == kGelu) return gelu(x);
  else if constexpr (kActivation == kGeluTanh) return times_sigmoid(x, x * (1.5957691216f + 0.0713548163f * (x * x)));
  else return times_sigmoid(x, x);
}

}  // namespace magicube
