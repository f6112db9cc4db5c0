// What an epilogue of products refers to and kernels of floats have not: activations, and integers of 8 bits.
#pragma once

#include <cmath>
#include <cstdint>

inline float __expf(float x) { return std::exp(x); }
int __float2int_rn(float);
namespace magicube {
float reciprocal_of_normal(float);
float at_least(float, float);
float tanh_of(float);
template <int, bool> uint32_t pack_nearest(int, int, uint32_t);
}  // namespace magicube
