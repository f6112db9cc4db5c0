// q = round(x / scale), scale = max|x| / q_max, written in its storage form, with the slice's flags.
//
// The quotient is taken in double as x * (1 / scale): then a row of magnitude 1e-36 keeps its relative accuracy, and
// the same rule in torch's double gives the same integers.
#pragma once

#include <cmath>
#include <type_traits>
#include <cstdint>

#include "engine.hpp"
#include "integers.hpp"

namespace {  // compiled once per instruction set

using magicube::QuantizeArgs;
using magicube::Team;

template <class Real>
struct Bits;
template <>
struct Bits<float> {
  using Int = int32_t;
  static constexpr Int kInfinity = 0x7f800000;
  static constexpr float kSmallest = 1.4e-45f;
};
template <>
struct Bits<double> {
  using Int = int64_t;
  static constexpr Int kInfinity = 0x7ff0000000000000;
  static constexpr double kSmallest = 5e-324;
};

// As integers, the bit patterns of non-negative floats have the floats' order, with infinity and NaN on top.
template <class Real>
typename Bits<Real>::Int magnitude(Real value) {
  typename Bits<Real>::Int bits;
  std::memcpy(&bits, &value, sizeof bits);
  constexpr auto kSign = static_cast<typename Bits<Real>::Int>(typename std::make_unsigned<typename Bits<Real>::Int>::type{1} << (8 * sizeof(Real) - 1));
  return bits & ~kSign;
}

template <class Real>
struct Quantizer {
  using Int = typename Bits<Real>::Int;
  const QuantizeArgs& args;

  double low() const { return args.is_signed ? -std::ldexp(1.0, args.bits - 1) : 0.0; }
  double high() const { return std::ldexp(1.0, args.is_signed ? args.bits - 1 : args.bits) - 1.0; }
  const Real* row(int64_t i) const { return static_cast<const Real*>(args.x) + i * args.row_elements; }
  Real* scales() const { return static_cast<Real*>(args.scale); }

  void extremes(const Real* x, Int& largest, bool& negative) const {
    Int top = largest;
    int below = 0;
    for (int64_t i = 0; i < args.columns; ++i) {
      const Int bits = magnitude(x[i]);
      top = bits > top ? bits : top;
      below |= x[i] < Real{0};
    }
    largest = top;
    negative = negative || below;
  }

  Real scale_of(Int largest) const {
    Real top;
    std::memcpy(&top, &largest, sizeof top);
    if (largest >= Bits<Real>::kInfinity) return static_cast<Real>(NAN);
    if (top == Real{0}) return Real{1};
    const auto scale = static_cast<Real>(static_cast<double>(top) / high());
    return scale > Real{0} ? scale : Bits<Real>::kSmallest;
  }

  // A slice with inf or NaN has scale NaN; its integers are zero, so that the result does not depend on the machine.
  int32_t code(Real x, double inverse) const {
    double q = static_cast<double>(x) * inverse;
    q = args.truncate ? std::trunc(q) : std::nearbyint(q);
    q = q > low() ? q : low();  // a NaN becomes the lower bound; see encode
    return static_cast<int32_t>(q < high() ? q : high());
  }

  void encode(int64_t i, const Real* inverse_of, int64_t inverse_step) const {
    const Real* x = row(i);
    uint8_t* out = static_cast<uint8_t*>(args.out) + i * args.out_row_bytes;
    const auto at = [&](int64_t j) {
      const Real scale = inverse_of[j * inverse_step];
      return scale == scale ? code(x[j], 1.0 / static_cast<double>(scale)) : 0;
    };
    if (args.bits == 4) {
      for (int64_t j = 0; j < args.columns; j += 2) {
        const int low_nibble = at(j) & 15, high_nibble = j + 1 < args.columns ? at(j + 1) & 15 : 0;
        out[j / 2] = static_cast<uint8_t>(low_nibble | (high_nibble << 4));
      }
    } else if (args.bits == 8) {
      if (inverse_step == 0) return encode_run<uint8_t>(x, out, *inverse_of);
      for (int64_t j = 0; j < args.columns; ++j) out[j] = static_cast<uint8_t>(at(j));
    } else {
      auto* wide = reinterpret_cast<uint16_t*>(out);
      if (inverse_step == 0) return encode_run<uint16_t>(x, wide, *inverse_of);
      for (int64_t j = 0; j < args.columns; ++j) wide[j] = static_cast<uint16_t>(at(j));
    }
  }

  template <class Code>
  void encode_run(const Real* x, Code* out, Real scale) const {
    const bool finite = scale == scale;
    const double inverse = finite ? 1.0 / static_cast<double>(scale) : 0.0;
    for (int64_t j = 0; j < args.columns; ++j) out[j] = finite ? static_cast<Code>(code(x[j], inverse)) : Code{0};
  }
};

template <class Real>
void quantize_as(const QuantizeArgs& args, Team& team) {
  const Quantizer<Real> q{args};
  using Int = typename Bits<Real>::Int;
  Int largest = 0;
  bool negative = false;
  Real* scales = q.scales();
  if (args.scale_mode == 2 && !args.given_scale) {  // columns: largest magnitudes first, kept as bits in the scales
    for (int64_t j = 0; j < args.columns; ++j) scales[j] = Real{0};
    for (int64_t i = 0; i < args.rows; ++i) {
      const Real* x = q.row(i);
      for (int64_t j = 0; j < args.columns; ++j) {
        const Int bits = magnitude(x[j]);
        Int top;
        std::memcpy(&top, &scales[j], sizeof top);
        top = bits > top ? bits : top;
        std::memcpy(&scales[j], &top, sizeof top);
        negative = negative || x[j] < Real{0};
      }
    }
    for (int64_t j = 0; j < args.columns; ++j) {
      Int top;
      std::memcpy(&top, &scales[j], sizeof top);
      largest = top > largest ? top : largest;
      scales[j] = q.scale_of(top);
    }
  } else if (args.scale_mode == 0 || args.given_scale) {
    for (int64_t i = 0; i < args.rows; ++i) q.extremes(q.row(i), largest, negative);
    if (!args.given_scale) scales[0] = q.scale_of(largest);
  }
  for (int64_t i = 0; i < args.rows; ++i) {
    if (args.scale_mode == 1 && !args.given_scale) {
      Int top = 0;
      q.extremes(q.row(i), top, negative);
      largest = top > largest ? top : largest;
      scales[i] = q.scale_of(top);
    }
    const Real* scale = args.scale_mode == 2 ? scales : scales + (args.scale_mode == 1 ? i : 0);
    q.encode(i, scale, args.scale_mode == 2 ? 1 : 0);
  }
  *args.flags = static_cast<uint8_t>((negative ? magicube::kNegative : 0) |
                                     (largest >= Bits<Real>::kInfinity ? magicube::kNonFinite : 0));
  (void)team;
}

void quantize(const QuantizeArgs& args, Team& team) {
  if (args.is_double) quantize_as<double>(args, team);
  else quantize_as<float>(args, team);
}

}  // namespace
