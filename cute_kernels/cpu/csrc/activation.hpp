// Activations of results that are in cache, by operations that every instruction set rounds alike.
//
// Largest error of all floats, in float32: GELU 3.4e-7, its tanh form and SiLU 1e-7 or 2 units in the last place. NaN stays;
// -inf gives the limit 0.
#pragma once

#include "engine.hpp"
#include "quantize.hpp"

namespace {  // compiled once per instruction set

using magicube::Activation;

// One of two numbers without a branch, which GCC would not vectorize.
inline int32_t select(bool condition, int32_t yes, int32_t no) {
  const int32_t mask = -static_cast<int32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// exp(x) for x <= 0 to about one unit in the last place: 2^n by its bits, a polynomial of Cephes for what is left. Below -87 the
// least number in range, of which no sum of a softmax holds a bit.
inline float exponential(float x) {
  const int32_t size = magnitude(x), most = 0x42ae0000;  // of 87
  x = -from_bits<float>(select(size < most, size, most));
  const float shifted = x * 1.44269504088896341f + kShift;
  const float n = shifted - kShift;
  const float r = x - n * 0.693359375f - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * from_bits<float>((bits_of(shifted) - bits_of(kShift) + 127) << 23);
}

// x, at least `low`; NaN stays.
inline float at_least(float x, float low) { return x < low ? low : x; }

// x / (1 + exp(-v)), for x and v of the same sign.
inline float times_sigmoid(float x, float v) {
  const float e = exponential(v), one = 1.0f;
  return at_least(x, -100.0f) * from_bits<float>(select(bits_of(v) < 0, bits_of(e), bits_of(one))) / (1.0f + e);
}

// x Phi(x) = max(x, 0) - |x| Phi(-|x|), with 2 Phi(-a) = p(a)^-8. The polynomial is fitted for the least error of a Phi(-a).
inline float gelu(float x) {
  const int32_t size = magnitude(x), most = 0x41200000;  // of 10
  const float a = from_bits<float>(select(size < most, size, most));
  const float b = a * a;  // pairs of terms are chains of half the length
  const float low = fma(fma(8.591630496e-03f, a, 4.478880018e-02f), b, fma(9.973249584e-02f, a, 1.0f));
  const float high = fma(fma(-1.674728082e-05f, a, 9.758250235e-05f), b, fma(1.113500330e-04f, a, 9.806635790e-04f));
  float p = fma(fma(2.932499001e-06f, b * b, high), b * b, low);
  p *= p;
  p *= p;
  return at_least(x, 0.0f) - 0.5f * a / (p * p);
}

inline float relu(float x) { return at_least(x, 0.0f); }
inline float silu(float x) { return times_sigmoid(x, x); }
inline float gelu_tanh(float x) { return times_sigmoid(x, x * (1.5957691216f + 0.0713548163f * (x * x))); }

template <float (*Function)(float)>
__attribute__((noinline)) void apply(float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = Function(x[i]);
}

inline void activate(Activation activation, float* x, int64_t count) {
  switch (activation) {
    case Activation::kNone: return;
    case Activation::kRelu: return apply<relu>(x, count);
    case Activation::kGelu: return apply<gelu>(x, count);
    case Activation::kGeluTanh: return apply<gelu_tanh>(x, count);
    case Activation::kSilu: return apply<silu>(x, count);
  }
}

}  // namespace
