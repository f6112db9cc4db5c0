// Digit planes of a float32 matrix and their scales, by one of two rules.
//
// Single: x = scale (q0 + q1 / radix + q2 / radix^2), all in float32, the operations of convert/digits.py in their order.
// Exact: the correctly rounded quotient x / scale in double, then its two digits, as in residual/operand/decompose.py.
#pragma once

#include <cmath>

#include "scaled_rows.hpp"

namespace {  // compiled once per instruction set

using magicube::DigitsArgs;

// Round to nearest even, for numbers far smaller than the constant.
inline float nearest(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }
inline double nearest(double x) { return (x + 0x1.8p52) - 0x1.8p52; }
inline double truncated(double x) { return static_cast<double>(static_cast<int32_t>(x)); }

inline float masked(float x, float mask) { return from_bits<float>(bits_of(x) & bits_of(mask)); }

template <class T>
inline int8_t byte(T integer) {
  return static_cast<int8_t>(static_cast<int32_t>(integer));
}

template <class T>
inline T between(T low, T x, T high) {
  x = x > low ? x : low;
  return x < high ? x : high;
}

template <bool Fused>
struct Quotient;
template <>
struct Quotient<false> {
  static double of(double x, double y, double) { return x / y; }
  static float less(float x, float q, float unit) {  // exact in double, then rounded once
    return static_cast<float>(static_cast<double>(x) - static_cast<double>(q) * static_cast<double>(unit));
  }
};
// Markstein: with the correctly rounded inverse of y and a quotient within one unit of the last place, one correction
// by a fused remainder gives the correctly rounded quotient; the correction before it brings it that near.
template <>
struct Quotient<true> {
  static double of(double x, double y, double inverse) {
    double q = x * inverse;
    q = __builtin_fma(__builtin_fma(-q, y, x), inverse, q);
    return __builtin_fma(__builtin_fma(-q, y, x), inverse, q);
  }
  static float less(float x, float q, float unit) { return __builtin_fmaf(-q, unit, x); }
};
#ifdef __FMA__
using Divide = Quotient<true>;
#else
using Divide = Quotient<false>;
#endif

// Shared by both rules: the matrix, its amaxes, and the prepared scales of its slices in kFactors arrays.
template <class Factor, int kFactors>
class DigitWork {
 public:
  using Int = Bits<float>::Int;

  DigitWork(const DigitsArgs& arguments, ThreadGroup& group)
      : args(arguments), slices_(mode() == magicube::kScaleColumns ? columns() : 1) {
    const bool own = mode() == magicube::kScaleRows;
    auto* at = own ? own_ : reinterpret_cast<Factor*>(slice_factors(group, slices_, sizeof(Int)));
    for (int f = 0; f < kFactors; ++f) factors[f] = at + f * (own ? 1 : slices_);
  }

  int64_t rows() const { return args.rows; }
  int64_t columns() const { return args.columns; }
  int mode() const { return args.scale_mode; }

  Int row_absmax(int64_t i, Int absmax_bits) const {
    const float* x = row(i);
    for (int64_t j = 0; j < args.columns; ++j) {
      const Int bits = magnitude(x[j]);
      absmax_bits = bits > absmax_bits ? bits : absmax_bits;
    }
    return absmax_bits;
  }

  void update_column_absmax(int64_t i, Int* __restrict absmax) const {
    const float* __restrict x = row(i);
    for (int64_t j = 0; j < args.columns; ++j) {
      const Int bits = magnitude(x[j]);
      absmax[j] = bits > absmax[j] ? bits : absmax[j];
    }
  }

 protected:
  const float* row(int64_t i) const { return args.x + i * args.row_elements; }
  int8_t* plane(int index, int64_t i) const { return args.planes + index * args.plane_bytes + i * args.out_row_bytes; }
  int64_t slot(int64_t slice) const { return mode() == magicube::kScaleRows ? 0 : slice; }

  const DigitsArgs& args;
  Factor* factors[kFactors];

 private:
  const int64_t slices_;
  Factor own_[kFactors];  // of the current row
};

constexpr float kZeroScale = 0x1p-38f;  // of zeros: never the largest scale of a matrix

// Scale of a slice from the bits of its amax: rounded up, so that the leading digit is in range; kZeroScale for zeros, NaN
// for non-finite slices.
inline float digit_scale(Bits<float>::Int absmax_bits, double high, bool power) {
  if (absmax_bits >= Bits<float>::kInfinity) return NAN;
  const double absmax = from_bits<float>(absmax_bits);
  if (absmax == 0.0) return kZeroScale;
  auto scale = static_cast<float>(absmax / high);
  if (power) {
    int exponent;
    const double mantissa = frexp(absmax / high, &exponent);
    scale = static_cast<float>(ldexp(1.0, exponent - (mantissa == 0.5)));
  } else if (static_cast<double>(scale) * high < absmax) {
    scale = nextafterf(scale, HUGE_VALF);
  }
  return scale > Bits<float>::kSmallest ? scale : Bits<float>::kSmallest;
}

class SingleDigits : public DigitWork<float, 4> {
 public:
  using DigitWork::DigitWork;

  // Prepared scale: exponent bias factor, inverse of scale * factor, scale * factor, and a mask of all bits, or none for a
  // non-finite slice. The factor is 2^100 for slices of tiny numbers, so that only the scale is subnormal.
  void set(int64_t slice, Int absmax_bits) {
    const float scale = digit_scale(absmax_bits, args.high, args.power);
    static_cast<float*>(args.scale)[slice] = scale;
    const float bias_factor = scale * 128.0f < 0x1p-100f ? 0x1p100f : 1.0f;
    const bool finite = scale == scale;
    set_flag(args.flags, !finite, magicube::kNonFinite);
    const int64_t at = slot(slice);
    factors[0][at] = finite ? bias_factor : 1.0f;
    factors[2][at] = finite ? scale * bias_factor : 1.0f;
    factors[1][at] = 1.0f / factors[2][at];
    factors[3][at] = from_bits<float>(finite ? ~0 : 0);
  }

  void encode(int64_t i) const {
    const bool by_columns = mode() == magicube::kScaleColumns;
    if (args.count == 1) by_columns ? encode_as<1, true>(i) : encode_as<1, false>(i);
    else if (args.count == 2) by_columns ? encode_as<2, true>(i) : encode_as<2, false>(i);
    else by_columns ? encode_as<3, true>(i) : encode_as<3, false>(i);
  }

 private:
  template <int Count, bool ByColumns>
  void encode_as(int64_t i) const {
    split<Count, ByColumns>(row(i), factors[0], factors[1], factors[2], factors[3], args, args.columns, plane(0, i),
                            plane(Count > 1 ? 1 : 0, i), plane(Count > 2 ? 2 : 0, i));
  }

  // Separate function: compilers honor `restrict` on parameters.
  template <int Count, bool ByColumns>
  static void split(const float* __restrict x, const float* __restrict bias_factors, const float* __restrict inverses,
                    const float* __restrict units, const float* __restrict masks, const DigitsArgs& rule, int64_t count,
                    int8_t* __restrict first, int8_t* __restrict second, int8_t* __restrict third) {
    const float radix = rule.radix, part = 1.0f / radix, low = -0.5f * radix, high = 0.5f * radix < 127.0f ? 0.5f * radix : 127.0f;
    const float ahead0 = rule.ahead[0], ahead1 = rule.ahead[1];
    for (int64_t j = 0; j < count; ++j) {
      const int64_t slice = ByColumns ? j : 0;
      float unit = units[slice], inverse = inverses[slice];
      float residual = masked(x[j] * bias_factors[slice], masks[slice]);
      float q = nearest(Count == 3 ? residual * inverse + ahead0 : residual * inverse);
      first[j] = byte(q);
      if constexpr (Count > 1) {
        residual = Divide::less(residual, q, unit);
        inverse *= radix;
        unit *= part;
        q = between(low, nearest(Count == 3 ? residual * inverse + ahead1 : residual * inverse), high);
        second[j] = byte(q);
      }
      if constexpr (Count > 2) {
        residual = Divide::less(residual, q, unit);
        third[j] = byte(between(low, nearest(residual * (inverse * radix)), high));
      }
    }
  }
};

class ExactDigits : public DigitWork<double, 2> {
 public:
  using DigitWork::DigitWork;

  // Prepared scale: scale and its inverse.
  void set(int64_t slice, Int absmax_bits) {
    set_flag(args.flags, absmax_bits >= Bits<float>::kInfinity, magicube::kNonFinite);
    const double scale = static_cast<double>(from_bits<float>(absmax_bits)) / args.high;
    static_cast<double*>(args.scale)[slice] = factors[0][slot(slice)] = scale > 0.0 ? scale : 1.0;
    factors[1][slot(slice)] = 1.0 / factors[0][slot(slice)];
  }

  void encode(int64_t i) const {
    if (mode() == magicube::kScaleColumns) args.truncate ? encode_as<true, true>(i) : encode_as<false, true>(i);
    else args.truncate ? encode_as<true, false>(i) : encode_as<false, false>(i);
  }

 private:
  template <bool Truncate, bool ByColumns>
  void encode_as(int64_t i) const {
    split<Truncate, ByColumns>(row(i), factors[0], factors[1], args.limit, args.radix, args.columns, plane(0, i), plane(1, i));
  }

  template <bool Truncate, bool ByColumns>
  static void split(const float* __restrict x, const double* __restrict scales, const double* __restrict inverses,
                    double limit, double steps, int64_t count, int8_t* __restrict first, int8_t* __restrict second) {
    constexpr double kHair = 1 + 0x1p-49;  // the quotient may be slightly below an integer, such as that of the amax
    for (int64_t j = 0; j < count; ++j) {
      const int64_t slice = ByColumns ? j : 0;
      const double ratio = Divide::of(x[j], scales[slice], inverses[slice]);
      const double digit = Truncate ? truncated(ratio * kHair) : nearest(ratio);
      const double residual = (ratio - digit) * steps;  // in one step (truncate) or half a step (nearest)
      first[j] = byte(digit);
      if constexpr (Truncate) {
        second[j] = byte(residual);
      } else {
        const double low = nearest(residual);
        second[j] = byte(low < limit ? low : limit);
      }
    }
  }
};

void digits(const DigitsArgs& args, ThreadGroup& group) {
  if (args.exact) {
    ExactDigits work(args, group);
    over_slices(work, group);
  } else {
    SingleDigits work(args, group);
    over_slices(work, group);
  }
}

}  // namespace
