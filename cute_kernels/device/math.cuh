// The exponential of attention's weights.
#pragma once

namespace magicube {

// 2^x to 2 units of the last place; zero where it is below the smallest normal number.
__device__ __forceinline__ float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace magicube
