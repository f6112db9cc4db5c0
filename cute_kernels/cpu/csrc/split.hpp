// Integers of float32 and of what their rounding left over, each with its own scales; sums of magnitudes.
//
// Integers are those of digits.hpp's exact rule. Sums have one order, whatever the threads and the instruction set.
// Source: Gu, arXiv 2403.06924, Algorithm 1, lines 1 and 4 to 6.
#pragma once

#include "compensate_args.hpp"
#include "digits.hpp"
#include "quantize.hpp"

namespace {  // compiled once per instruction set

using magicube::FloatMatrix;
using magicube::kStripColumns;
using magicube::MagnitudeArgs;
using magicube::SplitArgs;

constexpr double kHair = 1 + 0x1p-49;  // as in digits.hpp

template <bool Truncate>
inline double digit_of(double x, double scale, double inverse) {
  const double ratio = Divide::of(x, scale, inverse);
  return Truncate ? truncated(ratio * kHair) : nearest(ratio);
}

// Units of a run: scales and inverses of each entry, or one of all.
struct Units {
  const double* scales;
  const double* inverses;
  const float* inverses32;
  bool is_normal;  // all inverses are normal floats
};

// Step is 1 if each entry has its own scale, else 0. Separate functions: compilers honor `restrict` on parameters.
template <bool Truncate, int Step, bool Residual>
void digits_in_double(const float* __restrict x, const double* __restrict scales, const double* __restrict inverses, int64_t count,
                      int8_t* __restrict digits, float* __restrict residual) {
  for (int64_t j = 0; j < count; ++j) {
    const double digit = digit_of<Truncate>(x[j], scales[j * Step], inverses[j * Step]);
    digits[j] = byte(digit);
    if constexpr (Residual) residual[j] = static_cast<float>(static_cast<double>(x[j]) - digit * scales[j * Step]);
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
inline __m256d four_scales(const double* scales, int step) { return step ? _mm256_loadu_pd(scales) : _mm256_broadcast_sd(scales); }

inline __m128 four_residuals(__m128 x, __m128i q, __m256d scales) {
  return _mm256_cvtpd_ps(_mm256_sub_pd(_mm256_cvtps_pd(x), _mm256_mul_pd(_mm256_cvtepi32_pd(q), scales)));
}

// Digits of 32 entries by float32 quotients, whose error is below 127 2^-23. False if one is that near where the digit changes.
template <bool Truncate, int Step, bool Residual>
bool digits_block(const float* x, const float* inverses, const double* scales, int8_t* digits, float* residual) {
  const __m256 positive = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)), close = _mm256_set1_ps(0x1p-15f);
  const __m256 half = _mm256_set1_ps(0.5f), most = _mm256_set1_ps(0.5f - 0x1p-15f);
  __m256 doubtful = _mm256_setzero_ps();
  __m256i q[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256 value = _mm256_loadu_ps(x + i * 8);
    const __m256 ratio = _mm256_mul_ps(value, Step ? _mm256_loadu_ps(inverses + i * 8) : _mm256_broadcast_ss(inverses));
    const __m256i whole = _mm256_cvtps_epi32(ratio);
    const __m256 distance = _mm256_and_ps(_mm256_sub_ps(ratio, _mm256_cvtepi32_ps(whole)), positive);
    if constexpr (Truncate) {
      q[i] = _mm256_cvttps_epi32(ratio);
      const __m256 above = _mm256_cmp_ps(_mm256_and_ps(ratio, positive), half, _CMP_GT_OQ);
      doubtful = _mm256_or_ps(doubtful, _mm256_and_ps(above, _mm256_cmp_ps(distance, close, _CMP_LT_OQ)));
    } else {
      q[i] = whole;
      doubtful = _mm256_or_ps(doubtful, _mm256_cmp_ps(distance, most, _CMP_GT_OQ));
    }
    if constexpr (Residual) {
      const double* const at = scales + i * 8 * Step;
      const __m128 low = four_residuals(_mm256_castps256_ps128(value), _mm256_castsi256_si128(q[i]), four_scales(at, Step));
      const __m128 high = four_residuals(_mm256_extractf128_ps(value, 1), _mm256_extracti128_si256(q[i], 1), four_scales(at + 4 * Step, Step));
      _mm256_storeu_ps(residual + i * 8, _mm256_set_m128(high, low));
    }
  }
  store_codes(q, digits);
  return _mm256_testz_ps(doubtful, doubtful);
}
#endif

// Digits of a run and, if Residual, what they leave over.
template <bool Truncate, int Step, bool Residual>
void digits_run(const float* x, const Units& units, int64_t count, int8_t* digits, float* residual) {
  int64_t j = 0;
#if defined(__AVX2__) && !defined(__AVX512F__)
  for (; units.is_normal && j + 32 <= count; j += 32) {
    const double* const scales = units.scales + j * Step;
    float* const left = Residual ? residual + j : nullptr;
    if (digits_block<Truncate, Step, Residual>(x + j, units.inverses32 + j * Step, scales, digits + j, left)) continue;
    digits_in_double<Truncate, Step, Residual>(x + j, scales, units.inverses + j * Step, 32, digits + j, left);
  }
#endif
  digits_in_double<Truncate, Step, Residual>(x + j, units.scales + j * Step, units.inverses + j * Step, count - j, digits + j,
                                             Residual ? residual + j : nullptr);
}

template <int Step>
void residual_run(const float* __restrict x, const int8_t* __restrict digits, const double* __restrict scales, int64_t count,
                  float* __restrict residual) {
  for (int64_t j = 0; j < count; ++j) residual[j] = static_cast<float>(static_cast<double>(x[j]) - static_cast<double>(digits[j]) * scales[j * Step]);
}

inline void column_maxima(const float* __restrict x, int64_t count, int32_t* __restrict maxima) {
  for (int64_t j = 0; j < count; ++j) {
    const int32_t bits = magnitude(x[j]);
    maxima[j] = bits > maxima[j] ? bits : maxima[j];
  }
}

inline void column_sums(const float* __restrict x, int64_t count, double* __restrict sums) {
  for (int64_t j = 0; j < count; ++j) sums[j] += static_cast<double>(std::fabs(x[j]));
}

// Eight sums of every eighth entry: the order of every instruction set.
inline double magnitude_sum(const float* x, int64_t count) {
  double sums[8] = {};
  int64_t j = 0;
  for (; j + 8 <= count; j += 8) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sums[i] += static_cast<double>(std::fabs(x[j + i]));
  }
  for (int i = 0; j < count; ++i, ++j) sums[i] += static_cast<double>(std::fabs(x[j]));
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

inline double scale_of_amax(int32_t absmax_bits, double high) {
  const double scale = static_cast<double>(from_bits<float>(absmax_bits)) / high;
  return scale > 0.0 ? scale : 1.0;
}

// One unit of all entries.
class Unit {
 public:
  explicit Unit(double scale)
      : scale_(scale), inverse_(1.0 / scale), inverse32_(static_cast<float>(is_normal(inverse_) ? inverse_ : 1.0)) {}
  Units units() const { return {&scale_, &inverse_, &inverse32_, is_normal(inverse_)}; }

 private:
  double scale_, inverse_;
  float inverse32_;
};

template <bool Truncate>
class Split {
 public:
  Split(const SplitArgs& arguments, ThreadGroup& threads)
      : args(arguments), group(threads), x(arguments.x), r(reinterpret_cast<float*>(threads.local())) {}

  void run() {
    if (args.scale_mode == magicube::kScaleRows) return by_rows();
    if (args.scale_mode == magicube::kScaleColumns) return by_columns();
    by_tensor();
  }

 private:
  int8_t* leading(int64_t i) const { return args.leading + i * x.columns; }
  int8_t* residual(int64_t i) const { return args.residual + i * x.columns; }
  void check(int32_t bits) const { set_flag(args.flags, bits >= Bits<float>::kInfinity, magicube::kNonFinite); }

  void by_rows() {
    for_row_blocks([&](int64_t i) {
      const int32_t bits = row_absmax(x.row(i), x.columns);
      check(bits);
      if (args.sums) args.sums[i] = magnitude_sum(x.row(i), x.columns);
      const Unit first(args.scales[i] = scale_of_amax(bits, args.high));
      digits_run<Truncate, 0, true>(x.row(i), first.units(), x.columns, leading(i), r);
      const Unit second(args.scales[x.rows + i] = scale_of_amax(row_absmax(r, x.columns), args.high));
      digits_run<Truncate, 0, false>(r, second.units(), x.columns, residual(i), nullptr);
    });
  }

  // A strip is read three times.
  void by_columns() {
    const int64_t width = magicube::strip_columns(x.columns, group.size()), strips = (x.columns + width - 1) / width;
    int32_t maxima[kStripColumns];
    double sums[kStripColumns], inverses[kStripColumns];
    float inverses32[kStripColumns];
    for (int64_t strip = group.ticket(); strip < strips; strip = group.ticket()) {
      const int64_t j0 = strip * width, count = lesser(width, x.columns - j0);
      double* const scales = args.scales + j0;
      double* const scales2 = scales + x.columns;
      std::fill_n(maxima, count, 0);
      std::fill_n(sums, count, 0.0);
      for (int64_t i = 0; i < x.rows; ++i) {
        column_maxima(x.row(i) + j0, count, maxima);
        if (args.sums) column_sums(x.row(i) + j0, count, sums);
      }
      for (int64_t j = 0; j < count; ++j) check(maxima[j]);
      if (args.sums) std::memcpy(args.sums + j0, sums, static_cast<size_t>(count) * sizeof(double));
      Units units{scales, inverses, inverses32, set_scales(maxima, count, scales, inverses, inverses32)};
      std::fill_n(maxima, count, 0);
      for (int64_t i = 0; i < x.rows; ++i) {
        digits_run<Truncate, 1, true>(x.row(i) + j0, units, count, leading(i) + j0, r);
        column_maxima(r, count, maxima);
      }
      units = {scales2, inverses, inverses32, set_scales(maxima, count, scales2, inverses, inverses32)};
      for (int64_t i = 0; i < x.rows; ++i) {
        residual_run<1>(x.row(i) + j0, leading(i) + j0, scales, count, r);
        digits_run<Truncate, 1, false>(r, units, count, residual(i) + j0, nullptr);
      }
    }
  }

  // Whether all inverses are normal floats.
  bool set_scales(const int32_t* maxima, int64_t count, double* scales, double* inverses, float* inverses32) const {
    bool normal = true;
    for (int64_t j = 0; j < count; ++j) {
      scales[j] = scale_of_amax(maxima[j], args.high);
      inverses[j] = 1.0 / scales[j];
      normal &= is_normal(inverses[j]);
      inverses32[j] = static_cast<float>(is_normal(inverses[j]) ? inverses[j] : 1.0);
    }
    return normal;
  }

  void by_tensor() {
    auto* const factors = reinterpret_cast<double*>(group.shared());  // scales of both integers
    double* const sums = factors + 2;
    auto* const maxima = reinterpret_cast<int32_t*>(sums + x.rows);
    for_row_blocks([&](int64_t i) {
      maxima[i] = row_absmax(x.row(i), x.columns);
      if (args.sums) sums[i] = magnitude_sum(x.row(i), x.columns);
    });
    if (!group.barrier() || !set_tensor_scale(maxima, args.sums ? sums : nullptr, 0, factors)) return;
    const Unit first(factors[0]);
    for_row_blocks([&](int64_t i) {
      maxima[i] = 0;
      for (int64_t j = 0; j < x.columns; j += kStripColumns) {
        const int64_t count = lesser(kStripColumns, x.columns - j);
        digits_run<Truncate, 0, true>(x.row(i) + j, first.units(), count, leading(i) + j, r);
        const int32_t bits = row_absmax(r, count);
        maxima[i] = bits > maxima[i] ? bits : maxima[i];
      }
    });
    if (!group.barrier() || !set_tensor_scale(maxima, nullptr, 1, factors)) return;
    const Unit second(factors[1]);
    for_row_blocks([&](int64_t i) {
      for (int64_t j = 0; j < x.columns; j += kStripColumns) {
        const int64_t count = lesser(kStripColumns, x.columns - j);
        residual_run<0>(x.row(i) + j, leading(i) + j, factors, count, r);
        digits_run<Truncate, 0, false>(r, second.units(), count, residual(i) + j, nullptr);
      }
    });
  }

  // False if the call is over.
  bool set_tensor_scale(const int32_t* maxima, const double* sums, int which, double* factors) const {
    if (group.ticket() == 0) {
      int32_t bits = 0;
      double total = 0.0;
      for (int64_t i = 0; i < x.rows; ++i) {
        bits = maxima[i] > bits ? maxima[i] : bits;
        if (sums) total += sums[i];
      }
      if (which == 0) check(bits);
      if (sums) *args.sums = total;
      args.scales[which] = factors[which] = scale_of_amax(bits, args.high);
    }
    return group.barrier();
  }

  template <class Body>
  void for_row_blocks(Body body) const {
    const int64_t step = greater(1, kAtOnce / greater(1, x.columns));
    for (int64_t i0 = group.ticket() * step; i0 < x.rows; i0 = group.ticket() * step) {
      for (int64_t i = i0; i < lesser(x.rows, i0 + step); ++i) body(i);
    }
  }

  const SplitArgs& args;
  ThreadGroup& group;
  const FloatMatrix& x;
  float* const r;  // residuals of a run
};

void split_residual(const SplitArgs& args, ThreadGroup& group) {
  args.truncate ? Split<true>(args, group).run() : Split<false>(args, group).run();
}

// Tickets are strips of columns, then blocks of rows.
void magnitude_sums(const MagnitudeArgs& args, ThreadGroup& group) {
  const auto& x = args.x;
  const int64_t width = magicube::strip_columns(x.columns, group.size()), strips = (x.columns + width - 1) / width;
  const int64_t step = greater(1, kAtOnce / greater(1, x.columns));
  const int64_t tickets = strips + (x.rows + step - 1) / step;
  for (int64_t t = group.ticket(); t < tickets; t = group.ticket()) {
    if (t < strips) {
      const int64_t j0 = t * width, count = lesser(width, x.columns - j0);
      double sums[kStripColumns] = {};
      for (int64_t i = 0; i < x.rows; ++i) column_sums(x.row(i) + j0, count, sums);
      std::memcpy(args.columns + j0, sums, static_cast<size_t>(count) * sizeof(double));
    } else {
      const int64_t i0 = (t - strips) * step;
      for (int64_t i = i0; i < lesser(x.rows, i0 + step); ++i) args.rows[i] = magnitude_sum(x.row(i), x.columns);
    }
  }
}

}  // namespace
