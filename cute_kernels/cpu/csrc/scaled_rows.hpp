// Passes over the rows of a real matrix that has one scale, one a row or one a column: largest magnitudes, then integers.
//
// With a scale a row, a row is read again while a first-level cache still holds it. Otherwise threads share the rows
// twice, with the maxima of each thread in between.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "engine.hpp"
#include "integers.hpp"

namespace {  // compiled once per instruction set

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

// As integers, the bits of non-negative floats have the floats' order, with infinity and NaN on top.
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

constexpr int64_t kAtOnce = 1 << 14;  // entries of the rows that a ticket is for

// `work` says what the matrix is (kMode, rows, columns, row), takes what it has seen (see_row, see_columns), makes the
// factors of a line from the bits of its largest magnitude (set) and writes integers (encode).
template <class Work>
void over_slices(Work& work, Team& team) {
  using Int = typename Work::Int;
  const int64_t rows = work.rows(), columns = work.columns();
  const int64_t step = greater(1, kAtOnce / greater(1, columns)), chunks = (rows + step - 1) / step;
  const auto each_row = [&](auto body) {
    for (int64_t chunk = team.ticket(); chunk < chunks; chunk = team.ticket()) {
      for (int64_t i = chunk * step; i < lesser(rows, (chunk + 1) * step); ++i) body(i);
    }
  };
  if (work.mode() == magicube::kScaleRows) {
    each_row([&](int64_t i) {
      work.set(i, work.see_row(i, 0));
      work.encode(i);
    });
    return;
  }
  const bool by_columns = work.mode() == magicube::kScaleColumns;
  const int64_t lines = by_columns ? columns : 1;
  auto* const all = reinterpret_cast<Int*>(team.shared());
  const int64_t pitch = magicube::slice_maxima_bytes(lines, sizeof(Int)) / static_cast<int64_t>(sizeof(Int));
  Int* const mine = all + team.rank() * pitch;
  std::fill_n(mine, lines, Int{0});
  each_row([&](int64_t i) {
    if (by_columns) work.see_columns(i, mine);
    else *mine = work.see_row(i, *mine);
  });
  team.barrier();
  for (int64_t j = lines * team.rank() / team.size(); j < lines * (team.rank() + 1) / team.size(); ++j) {
    Int top = 0;
    for (int r = 0; r < team.size(); ++r) top = all[r * pitch + j] > top ? all[r * pitch + j] : top;
    work.set(j, top);
  }
  team.barrier();
  each_row([&](int64_t i) { work.encode(i); });
}

// Where factors of lines lie, behind the maxima of all threads.
inline uint8_t* slice_factors(Team& team, int64_t lines, int64_t real_bytes) {
  return team.shared() + magicube::slice_maxima_bytes(lines, real_bytes) * team.size();
}

inline void raise(uint8_t* flags, bool holds, uint8_t flag) {
  if (holds) __atomic_fetch_or(flags, flag, __ATOMIC_RELAXED);
}

}  // namespace
