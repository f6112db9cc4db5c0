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
  static constexpr int64_t kTile = 512;  // entries encoded at a time

  explicit Quantizer(const QuantizeArgs& arguments)
      : args(arguments),
        low(arguments.is_signed ? -static_cast<double>(1 << (arguments.bits - 1)) : 0.0),
        high(static_cast<double>((1 << (arguments.is_signed ? arguments.bits - 1 : arguments.bits)) - 1)) {}

  const QuantizeArgs& args;
  const double low, high;

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
    const auto scale = static_cast<Real>(static_cast<double>(top) / high);
    return scale > Real{0} ? scale : Bits<Real>::kSmallest;
  }

  // A slice with inf or NaN has scale NaN; its integers are zero, so that they do not depend on the machine.
  static double inverse(Real scale) { return scale == scale ? 1.0 / static_cast<double>(scale) : 0.0; }

  template <bool Truncate>
  void codes(const Real* x, const double* inverses, int64_t count, int32_t* out) const {
    for (int64_t j = 0; j < count; ++j) {
      double q = static_cast<double>(x[j]) * inverses[j];
      q = Truncate ? std::trunc(q) : std::nearbyint(q);
      q = q == q ? q : 0.0;  // NaN, or zero over a scale so small that its inverse is infinite
      q = q > low ? q : low;
      q = q < high ? q : high;
      out[j] = inverses[j] == 0.0 ? 0 : static_cast<int32_t>(q);
    }
  }

  void put(const int32_t* from, int64_t count, int64_t at, uint8_t* out) const {
    if (args.bits == 4) {
      for (int64_t j = 0; j + 1 < count; j += 2) {
        out[(at + j) / 2] = static_cast<uint8_t>((from[j] & 15) | (from[j + 1] & 15) << 4);
      }
      if (count % 2) out[(at + count) / 2] = static_cast<uint8_t>(from[count - 1] & 15);
    } else if (args.bits == 8) {
      for (int64_t j = 0; j < count; ++j) out[at + j] = static_cast<uint8_t>(from[j]);
    } else {
      auto* wide = reinterpret_cast<uint16_t*>(out) + at;
      for (int64_t j = 0; j < count; ++j) wide[j] = static_cast<uint16_t>(from[j]);
    }
  }

  void encode(int64_t i, const Real* scale, bool one_a_column) const {
    const Real* x = row(i);
    uint8_t* out = static_cast<uint8_t*>(args.out) + i * args.out_row_bytes;
    double inverses[kTile];
    int32_t tile[kTile];
    for (int64_t j = 0; j < kTile && !one_a_column; ++j) inverses[j] = inverse(*scale);
    for (int64_t at = 0; at < args.columns; at += kTile) {
      const int64_t count = lesser(kTile, args.columns - at);
      for (int64_t j = 0; j < count && one_a_column; ++j) inverses[j] = inverse(scale[at + j]);
      if (args.truncate) codes<true>(x + at, inverses, count, tile);
      else codes<false>(x + at, inverses, count, tile);
      put(tile, count, at, out);
    }
  }
};

template <class Real>
void quantize_as(const QuantizeArgs& args) {
  const Quantizer<Real> q(args);
  using Int = typename Bits<Real>::Int;
  Int largest = 0;
  bool negative = false;
  Real* scales = q.scales();
  if (args.scale_mode == 2 && !args.given_scale) {  // columns: largest magnitudes first, kept as bits in the scales
    for (int64_t j = 0; j < args.columns; ++j) scales[j] = Real{0};
    for (int64_t i = 0; i < args.rows; ++i) {
      const Real* x = q.row(i);
      int below = 0;
      for (int64_t j = 0; j < args.columns; ++j) {
        const Int bits = magnitude(x[j]);
        Int top;
        std::memcpy(&top, &scales[j], sizeof top);
        top = bits > top ? bits : top;
        std::memcpy(&scales[j], &top, sizeof top);
        below |= x[j] < Real{0};
      }
      negative = negative || below;
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
    q.encode(i, scale, args.scale_mode == 2);
  }
  *args.flags = static_cast<uint8_t>((negative ? magicube::kNegative : 0) |
                                     (largest >= Bits<Real>::kInfinity ? magicube::kNonFinite : 0));
}

void quantize(const QuantizeArgs& args, Team&) {
  if (args.is_double) quantize_as<double>(args);
  else quantize_as<float>(args);
}

}  // namespace
