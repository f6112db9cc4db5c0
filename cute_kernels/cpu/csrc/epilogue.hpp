// From exact integer totals to the output type: out = f((total - offset) * row_scale * column_scale + bias).
#pragma once

#include <cstdint>
#include <cstring>

#include "engine.hpp"
#include "floats16.hpp"
#include "quantize.hpp"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {  // compiled once per instruction set

using magicube::Activation;
using magicube::Out;

inline int64_t element_bytes(Out type) { return type == Out::kInt64 ? 8 : type >= Out::kFloat16 ? 2 : 4; }

// Accumulators may wrap; the result fits.
inline int32_t minus(int32_t total, int32_t offset) {
  return static_cast<int32_t>(static_cast<uint32_t>(total) - static_cast<uint32_t>(offset));
}
inline int64_t minus(int64_t total, int64_t offset) { return total - offset; }

// Totals of a run minus an offset, as integers; false if the output type is a float.
template <class Total>
inline bool store_integers(const Total* totals, int64_t count, Total offset, Out type, void* out, int64_t at) {
  if (type == Out::kInt32) {
    int32_t* const to = static_cast<int32_t*>(out) + at;
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int32_t>(minus(totals[i], offset));
  } else if (type == Out::kInt64) {
    int64_t* const to = static_cast<int64_t*>(out) + at;
    for (int64_t i = 0; i < count; ++i) to[i] = minus(totals[i], offset);
  } else {
    return false;
  }
  return true;
}

// Totals of a run of results of the same row as floats. `row_scale` and `bias` belong to the row, `column_scales` to each
// result; null means absent.
template <class Total>
inline void scale_run(const Total* __restrict totals, int64_t count, Total offset, float row_scale,
                      const float* __restrict column_scales, float bias, float* __restrict out) {
  if (column_scales) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(minus(totals[i], offset)) * row_scale * column_scales[i] + bias;
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(minus(totals[i], offset)) * row_scale + bias;
  }
}

// A run of results of the same row: its totals minus an offset, scaled if the output type is a float.
template <class Total>
inline void write_run(const Total* totals, int64_t count, Total offset, float row_scale, const float* column_scales, float bias,
                      Out type, void* out, int64_t at) {
  if (store_integers(totals, count, offset, type, out, at)) return;
  if (type == Out::kFloat32) return scale_run(totals, count, offset, row_scale, column_scales, bias, static_cast<float*>(out) + at);
  float scaled[magicube::kPanel];  // count <= kPanel
  scale_run(totals, count, offset, row_scale, column_scales, bias, scaled);
  store_floats(scaled, count, type, out, at);
}

// Of a matrix whose rows become columns. Passed by reference: a copy is read in other pieces than it was stored in, and waits.
struct TurnedScales {
  const float *rows, *columns, *bias;

  TurnedScales from(int64_t row, int64_t column) const { return {rows + row, columns + column, bias + row}; }
};

#ifdef __AVX2__
// A line of a turned square to column c.
template <bool Scales, class Real>
inline void store_turned_line(FloatVector line, int c, const TurnedScales& by, Real* out, int64_t pitch) {
  if (Scales) {
    using Integers = int32_t __attribute__((vector_size(4 * kLanes)));
    line = __builtin_convertvector(reinterpret_cast<Integers>(line), FloatVector) * load_vector(by.rows) * by.columns[c] + load_vector(by.bias);
  }
  store_vector(out + c * pitch, line);
}
#endif

#ifdef __AVX512F__
// Sixteen rows and columns of floats, or of int32 that are scaled, turned: whole cache lines of float32 are stored.
template <bool Scales, class Real>
void store_turned_square(const float* from, int64_t from_pitch, Real* out, int64_t pitch, const TurnedScales& by) {
  const auto store = [&](int c, __m512 line) { store_turned_line<Scales>(line, c, by, out, pitch); };
#pragma GCC unroll 2
  for (int half = 0; half < 16; half += 8, from += 8) {  // columns
    __m512 x[8], y[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {  // rows i, i + 4, then i + 4 and i + 8
      const float* const row = from + (i + i / 4 * 4) * from_pitch;
      x[i] = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(row)), _mm256_loadu_ps(row + 4 * from_pitch), 1);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {  // pairs of rows
      y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
      y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        x[i + 2 * h] = _mm512_shuffle_ps(y[i + h], y[i + 2 + h], 0x44);
        x[i + 2 * h + 1] = _mm512_shuffle_ps(y[i + h], y[i + 2 + h], 0xee);
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      store(half + c, _mm512_shuffle_f32x4(x[c], x[c + 4], 0x88));
      store(half + c + 4, _mm512_shuffle_f32x4(x[c], x[c + 4], 0xdd));
    }
  }
}
#elif defined(__AVX2__)
// Eight rows and columns of floats, or of int32 that are scaled, turned.
template <bool Scales, class Real>
void store_turned_square(const float* from, int64_t from_pitch, Real* out, int64_t pitch, const TurnedScales& by) {
  const auto store = [&](int c, __m256 line) { store_turned_line<Scales>(line, c, by, out, pitch); };
  __m256 x[8], y[8];
  for (int i = 0; i < 8; ++i) x[i] = _mm256_loadu_ps(from + i * from_pitch);
  for (int i = 0; i < 8; i += 2) {  // pairs of rows
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {  // four rows of columns i, i + 1 and those 4 on
    for (int h = 0; h < 2; ++h) {
      x[i + 2 * h] = _mm256_shuffle_ps(y[i + h], y[i + 2 + h], 0x44);
      x[i + 2 * h + 1] = _mm256_shuffle_ps(y[i + h], y[i + 2 + h], 0xee);
    }
  }
  for (int i = 0; i < 4; ++i) {
    store(i, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
    store(i + 4, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
  }
}
#endif

// Rows as columns: out[j * pitch + r] = from[r * from_pitch + j], which with Scales are int32. All of a row of the output comes
// before the next: the rows may share a set of a cache.
template <bool Scales, class Real>
void store_turned(const float* from, int64_t from_pitch, int64_t rows, int64_t width, Real* out, int64_t pitch, const TurnedScales& by) {
  constexpr int64_t kSide = kLanes ? kLanes : 8;
  for (int64_t j0 = 0; j0 < width; j0 += kSide) {
    const int64_t columns = width - j0 < kSide ? width - j0 : kSide;
    int64_t r0 = 0;
#ifdef __AVX2__
    for (; columns == kSide && r0 + kSide <= rows; r0 += kSide) {
      store_turned_square<Scales>(from + r0 * from_pitch + j0, from_pitch, out + j0 * pitch + r0, pitch, by.from(r0, j0));
    }
#endif
    for (int64_t j = j0; j < j0 + columns; ++j) {
      for (int64_t r = r0; r < rows; ++r) {
        float value = from[r * from_pitch + j];
        if (Scales) {
          int32_t integer;
          std::memcpy(&integer, &value, sizeof integer);
          value = static_cast<float>(integer) * by.rows[r] * by.columns[j] + by.bias[r];
        }
        store_float(out + j * pitch + r, value);
      }
    }
  }
}

constexpr int kScaledColumns = 16;

// Up to kMaxVector rows of multiples of kScaledColumns results as float32. Separate function: compilers honor `restrict` on
// parameters.
template <int Columns>
__attribute__((noinline)) void scale_rows(const int32_t* __restrict sums, int64_t rows, int64_t width, const int32_t* __restrict offsets,
                                          const float* __restrict row_scales, const float* __restrict column_scales,
                                          const float* __restrict bias, float* __restrict out, int64_t pitch) {
  for (int64_t r = 0; r < rows; ++r, sums += Columns, out += pitch) {
    const float scale = row_scales[r], add = bias[r];
    for (int64_t j0 = 0; j0 < width; j0 += kScaledColumns) {
      for (int64_t j = j0; j < j0 + kScaledColumns; ++j) out[j] = static_cast<float>(minus(sums[j], offsets[r])) * scale * column_scales[j] + add;
    }
  }
}

// Activations, by operations that every instruction set rounds alike. Largest error of all floats, in float32: GELU 3.4e-7, its tanh
// form and SiLU 1e-7 or 2 units in the last place. NaN stays; -inf gives the limit 0.

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
