// exp2 for softmax.
#pragma once

namespace magicube {

// 2^x with at most 2 ulp of error; results below the smallest normal number flush to zero.
__device__ __forceinline__ float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace magicube
