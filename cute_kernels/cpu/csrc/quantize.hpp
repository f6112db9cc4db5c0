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

// Floats on both sides of the normal inverse of a scale: where the quotients by both round to the same integer, so does the exact
// one. The same twice if float32 is sure.
struct FloatInverse {
  float under, over;
};

// The same in float32 for integers of at most 8 bits. Returns whether both inverses gave all of them, and nothing is NaN. Separate
// function: compilers honor `restrict` on parameters.
template <class Code>
bool round_in_float(const float* __restrict x, FloatInverse inverse, float low, float high, int64_t count, int offset,
                    Code* __restrict out) {
  const float least = kShift + low, most = kShift + high;
  const int32_t less = bits_of(kShift) - offset;
  int32_t apart = 0;
  for (int64_t j = 0; j < count; ++j) {
    float shifted = __builtin_fmaf(x[j], inverse.under, kShift);
    apart |= (bits_of(shifted) ^ bits_of(__builtin_fmaf(x[j], inverse.over, kShift))) | (shifted != shifted);
    shifted = shifted > least ? shifted : least;
    shifted = shifted < most ? shifted : most;
    out[j] = static_cast<Code>(bits_of(shifted) - less);
  }
  return apart == 0;
}

constexpr int64_t kRoundBlock = 64, kRoundMost = 1024;  // a branch a block costs as much as its arithmetic

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

// round_in_float of blocks; entries `ahead` of them are fetched. Without Clamps, quotients are numbers between low and high.
template <bool Clamps, bool Sure, class Real, class Code>
bool round_blocks(const Real* x, FloatInverse inverse, float low, float high, int64_t count, int64_t ahead, int offset, Code* out) {
  const __m512 under = _mm512_set1_ps(inverse.under), over = _mm512_set1_ps(inverse.over), shift = _mm512_set1_ps(kShift);
  const __m512 least = _mm512_set1_ps(kShift + low), most = _mm512_set1_ps(kShift + high);
  const __m512i less = _mm512_set1_epi32(bits_of(kShift) - offset);
  __m512i apart = _mm512_setzero_si512();
  uint32_t numbers = 0xffff;
  for (int64_t at = 0; at < count; at += kRoundBlock) {
    __m512 shifted[4];
    __m512i q[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __builtin_prefetch(x + ahead + at + i * 16);
      const __m512 value = load_vector(x + at + i * 16);
      shifted[i] = _mm512_fmadd_ps(value, under, shift);
      if (!Sure) {
        const __m512 other = _mm512_fmadd_ps(value, over, shift);
        apart = _mm512_ternarylogic_epi32(apart, _mm512_castps_si512(shifted[i]), _mm512_castps_si512(other), 0xf6);  // a | (b ^ c)
      }
    }
    if (Clamps) {
      numbers &= _mm512_cmp_ps_mask(shifted[0], shifted[1], _CMP_ORD_Q) & _mm512_cmp_ps_mask(shifted[2], shifted[3], _CMP_ORD_Q);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) shifted[i] = _mm512_min_ps(_mm512_max_ps(shifted[i], least), most);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) q[i] = _mm512_sub_epi32(_mm512_castps_si512(shifted[i]), less);
    store_codes(q, out + at);
  }
  return numbers == 0xffff && _mm512_test_epi32_mask(apart, apart) == 0;
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

// round_in_float of blocks; entries `ahead` of them are fetched. Without Clamps, quotients are numbers between low and high.
template <bool Clamps, bool Sure, class Real, class Code>
bool round_blocks(const Real* x, FloatInverse inverse, float low, float high, int64_t count, int64_t ahead, int offset, Code* out) {
  const __m256 under = _mm256_set1_ps(inverse.under), over = _mm256_set1_ps(inverse.over), shift = _mm256_set1_ps(kShift);
  const __m256 least = _mm256_set1_ps(kShift + low), most = _mm256_set1_ps(kShift + high);
  const __m256i less = _mm256_set1_epi32(bits_of(kShift) - offset);
  __m256 apart = _mm256_setzero_ps();
  for (int64_t at = 0; at < count; at += 32) {
    __m256 shifted[4];
    __m256i q[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      if (i % 2 == 0) __builtin_prefetch(x + ahead + at + i * 8);
      const __m256 value = load_vector(x + at + i * 8);
      shifted[i] = _mm256_fmadd_ps(value, under, shift);
      if (!Sure) apart = _mm256_or_ps(apart, _mm256_xor_ps(shifted[i], _mm256_fmadd_ps(value, over, shift)));
    }
    if (Clamps) {
      const __m256 first = _mm256_cmp_ps(shifted[0], shifted[1], _CMP_UNORD_Q), second = _mm256_cmp_ps(shifted[2], shifted[3], _CMP_UNORD_Q);
      apart = _mm256_or_ps(apart, _mm256_or_ps(first, second));
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) shifted[i] = _mm256_min_ps(_mm256_max_ps(shifted[i], least), most);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) q[i] = _mm256_sub_epi32(_mm256_castps_si256(shifted[i]), less);
    store_codes(q, out + at);
  }
  return _mm256_testz_si256(_mm256_castps_si256(apart), _mm256_castps_si256(apart));
}
#else
template <bool Clamps, bool, class Real, class Code>
bool round_blocks(const Real* x, FloatInverse inverse, float low, float high, int64_t count, int64_t, int offset, Code* out) {
  float block[kRoundMost];
  return round_in_float(as_floats(x, count, block), inverse, low, high, count, offset, out);
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
  const FloatInverse inverses = Sure ? FloatInverse{inverse32, inverse32}
                                     : FloatInverse{from_bits<float>(bits_of(inverse32) - 1), from_bits<float>(bits_of(inverse32) + 1)};
  float block[kRoundMost];
  int64_t here = 0;
  for (int64_t at = 0; at < count; at += here) {
    const int64_t blocks = lesser(kRoundMost, count - at) / kRoundBlock * kRoundBlock;
    here = blocks ? blocks : count - at;
    if (normal) {
      const bool holds = blocks ? round_blocks<Clamps, Sure>(x + at, inverses, low32, high32, here, count, offset, out + at)
                                : round_in_float(as_floats(x + at, here, block), inverses, low32, high32, here, offset, out + at);
      if (Sure || holds) continue;
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

// How a row becomes integers.
struct RowRounding {
  float scale;
  double inverse;
  bool is_sure;  // float32 rounds all of them right
};

template <class Real>
RowRounding rounding_of(const Real* x, const DenseLeft& left, int64_t columns) {
  if (left.scale) return {*left.scale, inverse_of(*left.scale), false};
  const int32_t absmax_bits = row_absmax(x, columns);
  const float scale = scale_of<float>(absmax_bits, left.high);
  const double inverse = inverse_of(scale);
  if constexpr (sizeof(Real) == 2) {
    // A quotient of 16-bit floats is 2^-20 of itself away from the middle of two integers, or would be the middle if scale * high
    // were the amax: the sign of their difference gives the side, to which the inverse is biased. Rounded to float32, such middles
    // would be met often.
    const double excess = static_cast<double>(from_bits<float>(absmax_bits)) - scale * left.high;  // exact
    if (left.high == 127.0 && excess != 0.0 && rounds_in_float(inverse)) {
      return {scale, inverse * (excess > 0.0 ? 1.0 + 0x1p-22 : 1.0 - 0x1p-22), true};
    }
  }
  return {scale, inverse, false};
}

// Quotients by a row's own scale are at most high, but for a scale below 2^-127.
template <class Real, class Code>
void round_row_by(const RowRounding& by, const Real* x, const DenseLeft& left, int64_t columns, int offset, Code* out) {
  if (left.scale) return round_row<true>(x, by.inverse, left.low, left.high, columns, offset, out);
  if constexpr (sizeof(Real) == 2) {
    if (by.is_sure) return round_row<false, true>(x, by.inverse, left.low, left.high, columns, offset, out);
  }
  round_row<false>(x, by.inverse, left.low, left.high, columns, offset, out);
}

constexpr int64_t kRowsAtOnce = 8, kRowBytesAtOnce = 1 << 14;  // of float32, in L1

// Rows for a call of quantize_rows().
inline int64_t rows_at_once(int64_t columns) { return lesser(kRowsAtOnce, greater(1, kRowBytesAtOnce / (4 * greater(1, columns)))); }

// The integers of rows from `first` on, plus an offset, and their scales. What comes before the rounding of a short row takes as long
// as that: several rows do not wait for each other.
template <class Code>
void quantize_rows(const DenseLeft& left, int64_t first, int64_t count, int64_t columns, int offset, Code* out, int64_t pitch, float* scales) {
  const auto quantize_as = [&](const auto* reals) {
    RowRounding by[kRowsAtOnce];
    reals += first * left.row_elements;
    for (int64_t i = 0; i < count; ++i) by[i] = rounding_of(reals + i * left.row_elements, left, columns);
    for (int64_t i = 0; i < count; ++i) {
      scales[i] = by[i].scale;
      round_row_by(by[i], reals + i * left.row_elements, left, columns, offset, out + i * pitch);
    }
  };
  if (left.reals_type == magicube::Out::kFloat16) return quantize_as(static_cast<const Float16*>(left.reals));
  if (left.reals_type == magicube::Out::kBFloat16) return quantize_as(static_cast<const BFloat16*>(left.reals));
  return quantize_as(static_cast<const float*>(left.reals));
}

// The same of row i. Returns its scale.
template <class Code>
float quantize_row(const DenseLeft& left, int64_t i, int64_t columns, int offset, Code* out) {
  float scale;
  quantize_rows(left, i, 1, columns, offset, out, 0, &scale);
  return scale;
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
