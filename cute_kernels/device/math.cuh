// exp2, tanh, reciprocals and maxima by one instruction each.
#pragma once

namespace magicube {

// 2^x with at most 2 ulp of error; results below the smallest normal number flush to zero.
__device__ __forceinline__ float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x, where neither is denormal; __fdividef scales what is not normal first.
__device__ __forceinline__ float reciprocal_of_normal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// tanh x with a relative error of 2^-11.
__device__ __forceinline__ float tanh_of(float x) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// x, at least `low`; NaN stays.
__device__ __forceinline__ float at_least(float x, float low) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(low));
  return result;
}

}  // namespace magicube
