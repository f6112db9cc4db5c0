// Passes over the rows of a real matrix with a per-tensor, per-row or per-column scale: amax, then integers.
//
// With per-row scales, a row is read again while it is in L1. Otherwise the threads split the rows twice, with a reduction of
// their amaxes in between.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "engine.hpp"
#include "integers.hpp"

namespace {  // compiled once per instruction set

using magicube::ThreadGroup;

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

// As integers, the bits of non-negative floats have the order of the floats, with infinity and NaN above.
template <class Real>
typename Bits<Real>::Int bits_of(Real value) {
  typename Bits<Real>::Int bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The bits without their sign.
template <class Real>
typename Bits<Real>::Int magnitude(Real value) {
  using Int = typename Bits<Real>::Int;
  return bits_of(value) & static_cast<Int>(~typename std::make_unsigned<Int>::type{0} >> 1);
}

template <class Real>
Real from_bits(typename Bits<Real>::Int bits) {
  Real value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

#ifdef __AVX512F__
inline int32_t row_absmax(const float* x, int64_t count) {
  const __m512i positive = _mm512_set1_epi32(0x7fffffff);
  __m512i most[4] = {};  // four do not wait for each other
  int64_t k = 0;
  for (; k + 64 <= count; k += 64) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) most[i] = _mm512_max_epi32(most[i], _mm512_and_si512(_mm512_loadu_si512(x + k + i * 16), positive));
  }
  for (; k < count; k += 16) {
    const auto mask = static_cast<__mmask16>(count - k >= 16 ? 0xffff : (1 << (count - k)) - 1);
    most[0] = _mm512_max_epi32(most[0], _mm512_and_si512(_mm512_maskz_loadu_epi32(mask, x + k), positive));
  }
  return _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_max_epi32(most[0], most[1]), _mm512_max_epi32(most[2], most[3])));
}
#else
inline int32_t row_absmax(const float* x, int64_t count) {
  int32_t absmax_bits = 0;
  for (int64_t k = 0; k < count; ++k) {
    const int32_t bits = magnitude(x[k]);
    absmax_bits = bits > absmax_bits ? bits : absmax_bits;
  }
  return absmax_bits;
}
#endif

constexpr int64_t kAtOnce = 1 << 14;  // entries per ticket
constexpr int64_t kSlicesAtOnce = 256;

// `work` describes the matrix (mode, rows, columns), updates amaxes (row_absmax, update_column_absmax), prepares the
// scale of a slice from the bits of its amax (set) and writes integers (encode).
template <class Work>
void over_slices(Work& work, ThreadGroup& group) {
  using Int = typename Work::Int;
  const int64_t rows = work.rows(), columns = work.columns();
  const int64_t step = greater(1, kAtOnce / greater(1, columns)), chunks = (rows + step - 1) / step;
  const auto each_row = [&](auto body) {
    for (int64_t chunk = group.ticket(); chunk < chunks; chunk = group.ticket()) {
      for (int64_t i = chunk * step; i < lesser(rows, (chunk + 1) * step); ++i) body(i);
    }
  };
  if (work.mode() == magicube::kScaleRows) {
    each_row([&](int64_t i) {
      work.set(i, work.row_absmax(i, 0));
      work.encode(i);
    });
    return;
  }
  const bool by_columns = work.mode() == magicube::kScaleColumns;
  const int64_t slices = by_columns ? columns : 1;
  auto* const all = reinterpret_cast<Int*>(group.shared());
  const int64_t pitch = magicube::slice_maxima_bytes(slices, sizeof(Int)) / static_cast<int64_t>(sizeof(Int));
  Int* const mine = all + group.rank() * pitch;
  for (int64_t r = group.ticket(); r < group.size(); r = group.ticket()) std::fill_n(all + r * pitch, slices, Int{0});
  if (!group.barrier()) return;
  each_row([&](int64_t i) {
    if (by_columns) work.update_column_absmax(i, mine);
    else *mine = work.row_absmax(i, *mine);
  });
  if (!group.barrier()) return;
  for (int64_t j0 = group.ticket() * kSlicesAtOnce; j0 < slices; j0 = group.ticket() * kSlicesAtOnce) {
    for (int64_t j = j0; j < lesser(slices, j0 + kSlicesAtOnce); ++j) {
      Int absmax_bits = 0;
      for (int r = 0; r < group.size(); ++r) absmax_bits = all[r * pitch + j] > absmax_bits ? all[r * pitch + j] : absmax_bits;
      work.set(j, absmax_bits);
    }
  }
  if (!group.barrier()) return;
  each_row([&](int64_t i) { work.encode(i); });
}

// Prepared scales of the slices, after the amaxes of all threads.
inline uint8_t* slice_factors(ThreadGroup& group, int64_t slices, int64_t real_bytes) {
  return group.shared() + magicube::slice_maxima_bytes(slices, real_bytes) * group.size();
}

inline void set_flag(uint8_t* flags, bool holds, uint8_t flag) {
  if (holds) __atomic_fetch_or(flags, flag, __ATOMIC_RELAXED);
}

}  // namespace
