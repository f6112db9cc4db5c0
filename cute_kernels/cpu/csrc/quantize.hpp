// q = round(x / scale), scale = max|x| / q_max, written in storage form, with flags.
//
// The quotient is x * (1 / scale) in double: a row of magnitude 1e-36 keeps its relative accuracy, and the same rule in
// torch float64 gives the same integers.
#pragma once

#include <cmath>

#include "scaled_rows.hpp"

namespace {  // compiled once per instruction set

using magicube::QuantizeArgs;

template <class Real>
class Quantizer {
 public:
  using Int = typename Bits<Real>::Int;

  Quantizer(const QuantizeArgs& arguments, ThreadGroup& group)
      : args_(arguments),
        low_(arguments.is_signed ? -static_cast<double>(1 << (arguments.bits - 1)) : 0.0),
        high_(static_cast<double>((1 << (arguments.is_signed ? arguments.bits - 1 : arguments.bits)) - 1)),
        inverses_(mode() == magicube::kScaleRows
                      ? &inverse_
                      : reinterpret_cast<double*>(slice_factors(group, mode() == magicube::kScaleColumns ? columns() : 1, sizeof(Int)))) {}

  int64_t rows() const { return args_.rows; }
  int64_t columns() const { return args_.columns; }
  int mode() const { return args_.scale_mode; }

  Int row_absmax(int64_t i, Int absmax_bits) const {
    const Real* x = row(i);
    int below = 0;
    for (int64_t j = 0; j < args_.columns; ++j) {
      const Int bits = magnitude(x[j]);
      absmax_bits = bits > absmax_bits ? bits : absmax_bits;
      below |= x[j] < Real{0};
    }
    set_flag(args_.flags, below, magicube::kNegative);
    return absmax_bits;
  }

  void update_column_absmax(int64_t i, Int* __restrict absmax) const {
    const Real* __restrict x = row(i);
    int below = 0;
    for (int64_t j = 0; j < args_.columns; ++j) {
      const Int bits = magnitude(x[j]);
      absmax[j] = bits > absmax[j] ? bits : absmax[j];
      below |= x[j] < Real{0};
    }
    set_flag(args_.flags, below, magicube::kNegative);
  }

  void set(int64_t slice, Int absmax_bits) {
    set_flag(args_.flags, absmax_bits >= Bits<Real>::kInfinity, magicube::kNonFinite);
    Real& scale = static_cast<Real*>(args_.scale)[slice];
    if (!args_.given_scale) scale = scale_of(absmax_bits);
    // A slice with inf or NaN has scale NaN; its integers are zero, so that they do not depend on the machine.
    inverses_[mode() == magicube::kScaleRows ? 0 : slice] = scale == scale ? 1.0 / static_cast<double>(scale) : 0.0;
  }

  void encode(int64_t i) const {
    if (mode() == magicube::kScaleColumns) args_.truncate ? encode_as<true, true>(i) : encode_as<false, true>(i);
    else args_.truncate ? encode_as<true, false>(i) : encode_as<false, false>(i);
  }

 private:
  static constexpr int64_t kTile = 512;  // entries per tile

  const Real* row(int64_t i) const { return static_cast<const Real*>(args_.x) + i * args_.row_elements; }

  Real scale_of(Int largest) const {
    const Real absmax_bits = from_bits<Real>(largest);
    if (largest >= Bits<Real>::kInfinity) return static_cast<Real>(NAN);
    if (absmax_bits == Real{0}) return Real{1};
    const auto scale = static_cast<Real>(static_cast<double>(absmax_bits) / high_);
    return scale > Real{0} ? scale : Bits<Real>::kSmallest;
  }

  template <bool Truncate, bool ByColumns>
  void encode_as(int64_t i) const {
    uint8_t* out = static_cast<uint8_t*>(args_.out) + i * args_.out_row_bytes;
    int32_t tile[kTile];
    for (int64_t at = 0; at < args_.columns; at += kTile) {
      const int64_t count = lesser(kTile, args_.columns - at);
      codes<Truncate, ByColumns>(row(i) + at, inverses_ + (ByColumns ? at : 0), count, tile);
      put(tile, count, at, out);
    }
  }

  template <bool Truncate, bool ByColumns>
  void codes(const Real* __restrict x, const double* __restrict inverses, int64_t count, int32_t* __restrict out) const {
    for (int64_t j = 0; j < count; ++j) {
      const double inverse = inverses[ByColumns ? j : 0];
      double q = static_cast<double>(x[j]) * inverse;
      q = Truncate ? std::trunc(q) : std::nearbyint(q);
      q = q == q ? q : 0.0;  // NaN, or zero over a scale so small that its inverse is infinite
      q = q > low_ ? q : low_;
      q = q < high_ ? q : high_;
      out[j] = inverse == 0.0 ? 0 : static_cast<int32_t>(q);
    }
  }

  void put(const int32_t* from, int64_t count, int64_t at, uint8_t* out) const {
    if (args_.bits == 4) {
      for (int64_t j = 0; j + 1 < count; j += 2) {
        out[(at + j) / 2] = static_cast<uint8_t>((from[j] & 15) | (from[j + 1] & 15) << 4);
      }
      if (count % 2) out[(at + count) / 2] = static_cast<uint8_t>(from[count - 1] & 15);
    } else if (args_.bits == 8) {
      for (int64_t j = 0; j < count; ++j) out[at + j] = static_cast<uint8_t>(from[j]);
    } else {
      auto* wide = reinterpret_cast<uint16_t*>(out) + at;
      for (int64_t j = 0; j < count; ++j) wide[j] = static_cast<uint16_t>(from[j]);
    }
  }

  const QuantizeArgs& args_;
  const double low_, high_;
  double inverse_ = 0.0;  // of the current row
  double* const inverses_;
};

void quantize(const QuantizeArgs& args, ThreadGroup& group) {
  if (args.is_double) {
    Quantizer<double> work(args, group);
    over_slices(work, group);
  } else {
    Quantizer<float> work(args, group);
    over_slices(work, group);
  }
}

}  // namespace
