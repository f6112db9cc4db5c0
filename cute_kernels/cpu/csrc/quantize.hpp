// q = round(x / scale), scale = max|x| / q_max, written in storage form, with flags.
//
// The quotient is x * (1 / scale) in double: a row of magnitude 1e-36 keeps its relative accuracy, and the same rule in
// torch float64 gives the same integers.
#pragma once

#include <cmath>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "floats16.hpp"
#include "scaled_rows.hpp"

namespace {  // compiled once per instruction set

using magicube::QuantizeArgs;

// The integers of a row by the rule of this file, plus an offset: the rule itself.
template <class Code>
void round_in_double(const float* __restrict x, double inverse, double low, double high, int64_t count, int offset,
                     Code* __restrict out) {
  for (int64_t j = 0; j < count; ++j) {
    double q = std::nearbyint(static_cast<double>(x[j]) * inverse);
    q = q == q ? q : 0.0;  // NaN, or zero over a scale so small that its inverse is infinite
    q = q > low ? q : low;
    q = q < high ? q : high;
    out[j] = static_cast<Code>((inverse == 0.0 ? 0 : static_cast<int32_t>(q)) + offset);
  }
}

constexpr float kShift = 0x1.8p23f;  // adding it rounds to an integer, which the lowest bits of the sum hold
constexpr float kSafe = 0.5f - 0x1p-16f;

// The same in float32 for integers of at most 8 bits. With the quotient v, whose relative error is 2^-24, an integer q within
// kSafe of v is the nearest one to the exact quotient: 129 2^-24 < 2^-16. Returns the bits of the largest |v - q|, above those of
// kSafe if NaN occurs. Separate function: compilers honor `restrict` on parameters.
template <class Code>
int32_t round_in_float(const float* __restrict x, float inverse, float low, float high, int64_t count, int offset,
                       Code* __restrict out) {
  const float least = kShift + low, most = kShift + high;
  const int32_t less = bits_of(kShift) - offset;
  int32_t worst = 0;
  for (int64_t j = 0; j < count; ++j) {
    float shifted = __builtin_fmaf(x[j], inverse, kShift);
    const int32_t distance = magnitude(__builtin_fmaf(x[j], inverse, kShift - shifted));
    worst = distance > worst ? distance : worst;
    shifted = shifted > least ? shifted : least;
    shifted = shifted < most ? shifted : most;
    out[j] = static_cast<Code>(bits_of(shifted) - less);
  }
  return worst;
}

constexpr int64_t kRoundBlock = 64;

#ifdef __AVX512F__
// Integers of four vectors as codes.
inline void store_codes(const __m512i q[4], int16_t* out) {
  for (int i = 0; i < 4; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + i, _mm512_cvtepi32_epi16(q[i]));
}

inline void store_codes(const __m512i q[4], int8_t* out) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3]));
  _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, bytes));
}

inline void store_codes(const __m512i q[4], uint8_t* out) {
  for (int i = 0; i < 4; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(out) + i, _mm512_cvtepi32_epi8(q[i]));
}

// round_in_float of kRoundBlock entries. Without Clamps, quotients lie between low and high. Sure: float32 rounds all of them right.
template <bool Clamps, bool Sure, class Real, class Code>
int32_t round_block(const Real* x, float inverse32, float low, float high, int offset, Code* out) {
  const __m512 inverse = _mm512_set1_ps(inverse32), shift = _mm512_set1_ps(kShift);
  const __m512 least = _mm512_set1_ps(kShift + low), most = _mm512_set1_ps(kShift + high);
  const __m512i less = _mm512_set1_epi32(bits_of(kShift) - offset), positive = _mm512_set1_epi32(0x7fffffff);
  __m512i q[4], worst = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 value = load_vector(x + i * 16);
    __m512 shifted = _mm512_fmadd_ps(value, inverse, shift);
    if (!Sure) {
      const __m512 distance = _mm512_fmadd_ps(value, inverse, _mm512_sub_ps(shift, shifted));
      worst = _mm512_max_epi32(worst, _mm512_and_si512(_mm512_castps_si512(distance), positive));
    }
    if (Clamps) shifted = _mm512_min_ps(_mm512_max_ps(shifted, least), most);
    q[i] = _mm512_sub_epi32(_mm512_castps_si512(shifted), less);
  }
  store_codes(q, out);
  return _mm512_cmpgt_epi32_mask(worst, _mm512_set1_epi32(bits_of(kSafe))) ? bits_of(1.0f) : 0;
}
#elif defined(__AVX2__)
// Integers of four vectors as codes. GCC narrows by a mask and a permutation for every two vectors.
inline void store_codes(const __m256i q[4], int16_t* out) {
  for (int i = 0; i < 2; ++i) {
    const __m256i words = _mm256_packs_epi32(q[2 * i], q[2 * i + 1]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + i, _mm256_permute4x64_epi64(words, 0xd8));
  }
}

inline __m256i in_order(__m256i bytes) { return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); }

inline void store_codes(const __m256i q[4], int8_t* out) {
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), in_order(bytes));
}

inline void store_codes(const __m256i q[4], uint8_t* out) {
  const __m256i low = _mm256_set1_epi32(255);
  __m256i b[4];
  for (int i = 0; i < 4; ++i) b[i] = _mm256_and_si256(q[i], low);
  const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(b[0], b[1]), _mm256_packs_epi32(b[2], b[3]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), in_order(bytes));
}

// round_in_float of kRoundBlock entries. Without Clamps, quotients lie between low and high. Sure: float32 rounds all of them right.
template <bool Clamps, bool Sure, class Real, class Code>
int32_t round_block(const Real* x, float inverse32, float low, float high, int offset, Code* out) {
  const __m256 inverse = _mm256_set1_ps(inverse32), shift = _mm256_set1_ps(kShift);
  const __m256 least = _mm256_set1_ps(kShift + low), most = _mm256_set1_ps(kShift + high);
  const __m256i less = _mm256_set1_epi32(bits_of(kShift) - offset), positive = _mm256_set1_epi32(0x7fffffff);
  __m256i worst = _mm256_setzero_si256();
#pragma GCC unroll 2
  for (int64_t at = 0; at < kRoundBlock; at += 32) {
    __m256i q[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256 value = load_vector(x + at + i * 8);
      __m256 shifted = _mm256_fmadd_ps(value, inverse, shift);
      if (!Sure) {
        const __m256 distance = _mm256_fmadd_ps(value, inverse, _mm256_sub_ps(shift, shifted));
        worst = _mm256_max_epi32(worst, _mm256_and_si256(_mm256_castps_si256(distance), positive));
      }
      if (Clamps) shifted = _mm256_min_ps(_mm256_max_ps(shifted, least), most);
      q[i] = _mm256_sub_epi32(_mm256_castps_si256(shifted), less);
    }
    store_codes(q, out + at);
  }
  const __m256i far = _mm256_cmpgt_epi32(worst, _mm256_set1_epi32(bits_of(kSafe)));
  return _mm256_testz_si256(far, far) ? 0 : bits_of(1.0f);
}
#else
template <bool Clamps, bool, class Real, class Code>
int32_t round_block(const Real* x, float inverse, float low, float high, int offset, Code* out) {
  float block[kRoundBlock];
  return round_in_float(as_floats(x, kRoundBlock, block), inverse, low, high, kRoundBlock, offset, out);
}
#endif

inline bool is_normal(double inverse) { return inverse >= 0x1p-126 && inverse <= 0x1p127; }  // also as a float

// Whether float32 is right about quotients by this inverse, but for those near the middle of two integers.
inline bool rounds_in_float(double inverse) {
#ifdef __FMA__
  return is_normal(inverse);
#else
  (void)inverse;
  return false;  // a fused multiply-add would be a call
#endif
}

// Blocks in float32, those with a quotient near the middle of two integers again in double, unless float32 is Sure. Without
// Clamps, quotients of a normal inverse lie between low and high. What follows the row is fetched meanwhile: often the next one.
template <bool Clamps, bool Sure = false, class Real, class Code>
void round_row(const Real* x, double inverse, double low, double high, int64_t count, int offset, Code* out) {
  const bool normal = rounds_in_float(inverse);
  const auto inverse32 = static_cast<float>(normal ? inverse : 1.0), low32 = static_cast<float>(low);
  const auto high32 = static_cast<float>(high);
  float block[kRoundBlock];
  for (int64_t at = 0; at < count; at += kRoundBlock) {
    const int64_t here = lesser(kRoundBlock, count - at);
    for (int64_t i = 0; i < here; i += 64 / static_cast<int64_t>(sizeof(Real))) __builtin_prefetch(x + count + at + i);
    if (normal) {
      const int32_t worst = here == kRoundBlock
                                ? round_block<Clamps, Sure>(x + at, inverse32, low32, high32, offset, out + at)
                                : round_in_float(as_floats(x + at, here, block), inverse32, low32, high32, here, offset, out + at);
      if (Sure || worst <= bits_of(kSafe)) continue;
    }
    round_in_double(as_floats(x + at, here, block), inverse, low, high, here, offset, out + at);
  }
}

// The scale of a slice from the bits of its amax: NaN for a slice with inf or NaN, 1 for zeros.
template <class Real>
Real scale_of(typename Bits<Real>::Int absmax_bits, double high) {
  const Real absmax = from_bits<Real>(absmax_bits);
  if (absmax_bits >= Bits<Real>::kInfinity) return static_cast<Real>(NAN);
  if (absmax == Real{0}) return Real{1};
  const auto scale = static_cast<Real>(static_cast<double>(absmax) / high);
  return scale > Real{0} ? scale : Bits<Real>::kSmallest;
}

// A slice of scale NaN has the inverse 0, so that its integers are zero on every machine.
template <class Real>
double inverse_of(Real scale) {
  return scale == scale ? 1.0 / static_cast<double>(scale) : 0.0;
}

using magicube::DenseLeft;

// The largest magnitude of 16-bit floats as bits of float32. Bits have the order of their floats.
template <class Real16>
int32_t row_absmax(const Real16* __restrict x, int64_t count) {
  uint16_t most = 0;
  for (int64_t k = 0; k < count; ++k) {
    const auto bits = static_cast<uint16_t>(x[k].bits & 0x7fff);
    most = bits > most ? bits : most;
  }
  const Real16 largest{most};
  return bits_of(load_float(&largest));
}

// The integers of a row, plus an offset. Returns its scale.
template <class Real, class Code>
float quantize_reals(const Real* x, const DenseLeft& left, int64_t columns, int offset, Code* out) {
  if (left.scale) {
    round_row<true>(x, inverse_of(*left.scale), left.low, left.high, columns, offset, out);
    return *left.scale;
  }
  const int32_t absmax_bits = row_absmax(x, columns);
  const float scale = scale_of<float>(absmax_bits, left.high);
  const double inverse = inverse_of(scale);
  if constexpr (sizeof(Real) == 2) {
    // A quotient of 16-bit floats is 2^-20 of itself away from the middle of two integers, or would be the middle if scale * high
    // were the amax: the sign of their difference gives the side, to which the inverse is biased. Rounded to float32, such middles
    // would be met often.
    const double excess = static_cast<double>(from_bits<float>(absmax_bits)) - scale * left.high;  // exact
    if (left.high == 127.0 && excess != 0.0 && rounds_in_float(inverse)) {
      const double biased = inverse * (excess > 0.0 ? 1.0 + 0x1p-22 : 1.0 - 0x1p-22);
      round_row<false, true>(x, biased, left.low, left.high, columns, offset, out);
      return scale;
    }
  }
  round_row<false>(x, inverse, left.low, left.high, columns, offset, out);  // at most high, but for a scale below 2^-127
  return scale;
}

// The same of row i.
template <class Code>
float quantize_row(const DenseLeft& left, int64_t i, int64_t columns, int offset, Code* out) {
  const auto quantize_as = [&](auto* reals) { return quantize_reals(reals + i * left.row_elements, left, columns, offset, out); };
  if (left.reals_type == magicube::Out::kFloat16) return quantize_as(static_cast<const Float16*>(left.reals));
  if (left.reals_type == magicube::Out::kBFloat16) return quantize_as(static_cast<const BFloat16*>(left.reals));
  return quantize_as(static_cast<const float*>(left.reals));
}

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
    if (!args_.given_scale) scale = scale_of<Real>(absmax_bits, high_);
    inverses_[mode() == magicube::kScaleRows ? 0 : slice] = inverse_of(scale);
  }

  void encode(int64_t i) const {
    if (mode() == magicube::kScaleColumns) args_.truncate ? encode_as<true, true>(i) : encode_as<false, true>(i);
    else args_.truncate ? encode_as<true, false>(i) : encode_as<false, false>(i);
  }

 private:
  static constexpr int64_t kTile = 512;  // entries per tile

  const Real* row(int64_t i) const { return static_cast<const Real*>(args_.x) + i * args_.row_elements; }

  template <bool Truncate, bool ByColumns>
  void encode_as(int64_t i) const {
    uint8_t* out = static_cast<uint8_t*>(args_.out) + i * args_.out_row_bytes;
    if constexpr (std::is_same<Real, float>::value && !Truncate && !ByColumns) {
      if (args_.bits == 8 && args_.is_signed) {
        return round_row<true>(row(i), *inverses_, low_, high_, args_.columns, 0, reinterpret_cast<int8_t*>(out));
      }
      if (args_.bits == 8) return round_row<true>(row(i), *inverses_, low_, high_, args_.columns, 0, out);
    }
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
