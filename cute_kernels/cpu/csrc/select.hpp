// Entries of float32 above a level, to SR-BCRS integers: Reduce of Algorithm 1.
// Source: Gu, arXiv 2403.06924, Algorithm 1, line 7.
#pragma once

#include "split.hpp"

namespace {  // compiled once per instruction set

using magicube::SelectArgs;

// Whether entries are above their level, as bytes of 0 and 1, or added to such bytes.
template <bool Signed, int Step>
void mask_run(const float* __restrict x, const float* __restrict levels, int64_t count, uint8_t first, uint8_t* __restrict mask) {
  for (int64_t j = 0; j < count; ++j) {
    const float key = Signed ? x[j] : std::fabs(x[j]);
    mask[j] = static_cast<uint8_t>((first ? 0 : mask[j]) | (key > levels[j * Step] ? 1 : 0));
  }
}

template <class Body>
inline void for_kept(const uint8_t* mask, int64_t count, Body body) {
  int64_t j = 0;
  for (; j + 8 <= count; j += 8) {
    uint64_t word;
    std::memcpy(&word, mask + j, 8);  // little-endian
    for (; word; word &= word - 1) body(j + (__builtin_ctzll(word) >> 3));
  }
  for (; j < count; ++j) {
    if (mask[j]) body(j);
  }
}

class Select {
 public:
  Select(const SelectArgs& arguments, ThreadGroup& threads)
      : args(arguments), group(threads), x(arguments.x), v_(arguments.vector_length), mask(threads.local()) {}

  void run() const { args.across ? across() : along(); }

 private:
  void mark(const float* from, const float* levels, int step, int64_t count, bool first) const {
    if (args.is_signed) step ? mask_run<true, 1>(from, levels, count, first, mask) : mask_run<true, 0>(from, levels, count, first, mask);
    else step ? mask_run<false, 1>(from, levels, count, first, mask) : mask_run<false, 0>(from, levels, count, first, mask);
  }
  const float* level(int64_t slice) const { return args.levels + (args.one_level ? 0 : slice); }

  int8_t digit(float value, int64_t slice) const {
    const double scale = args.scales[args.one_scale ? 0 : slice], inverse = 1.0 / scale;
    return byte(args.truncate ? digit_of<true>(value, scale, inverse) : digit_of<false>(value, scale, inverse));
  }

  int8_t* value_at(int64_t position, int64_t v) const {
    return args.out_values + (position / args.stride * v_ + v) * args.stride + position % args.stride;
  }

  void pad(int64_t r, int64_t end) const {
    for (; end < args.row_start[r + 1]; ++end) {
      args.out_columns[end] = -1;
      for (int64_t v = 0; v < v_; ++v) *value_at(end, v) = 0;
    }
  }

  void along() const {
    const int64_t step = greater(1, kAtOnce / greater(1, x.columns * v_)), total = args.vector_rows();
    for (int64_t r0 = group.ticket() * step; r0 < total; r0 = group.ticket() * step) {
      for (int64_t r = r0; r < lesser(total, r0 + step); ++r) {
        const int64_t i0 = r * v_, i1 = lesser(x.rows, i0 + v_);
        for (int64_t i = i0; i < i1; ++i) mark(x.row(i), level(i), 0, x.columns, i == i0);
        args.lengths ? count_row(r, i0, i1) : fill_row(r, i0, i1);
      }
    }
  }

  void count_row(int64_t r, int64_t i0, int64_t i1) const {
    int64_t kept = 0;
    for (int64_t j = 0; j < x.columns; ++j) kept += mask[j];
    args.lengths[r] = kept;
    for (int64_t i = i0; i < i1; ++i) {
      const float* const row = x.row(i);
      int32_t bits = 0;
      for (int64_t j = 0; j < x.columns; ++j) {
        const int32_t here = magnitude(row[j]) & -int32_t{mask[j]};
        bits = here > bits ? here : bits;
      }
      args.largest[i] = from_bits<float>(bits);
    }
  }

  void fill_row(int64_t r, int64_t i0, int64_t i1) const {
    int64_t at = args.row_start[r], sums[magicube::kMaxVector] = {};
    for_kept(mask, x.columns, [&](int64_t j) {
      args.out_columns[at] = static_cast<int32_t>(j);
      for (int64_t v = 0; v < v_; ++v) {
        const int8_t q = i0 + v < i1 ? digit(x.row(i0 + v)[j], i0 + v) : int8_t{0};
        *value_at(at, v) = q;
        sums[v] += q;
      }
      ++at;
    });
    pad(r, at);
    std::memcpy(args.row_sums + i0, sums, static_cast<size_t>(v_) * sizeof(int64_t));
  }

  // Vector rows of a strip of columns, a row of x after the other.
  void across() const {
    const int64_t width = magicube::strip_columns(x.columns, group.size()), strips = (x.columns + width - 1) / width;
    static_assert(64 % magicube::kMaxVector == 0 && magicube::kLeastStrip % 64 == 0, "a strip has whole vectors");
    for (int64_t strip = group.ticket(); strip < strips; strip = group.ticket()) {
      const int64_t j0 = strip * width, count = lesser(width, x.columns - j0);
      args.lengths ? count_strip(j0, count) : fill_strip(j0, count);
    }
  }

  void mark_strip(int64_t k, int64_t j0, int64_t count) const {
    mark(x.row(k) + j0, level(j0), !args.one_level, count, true);
    for (int64_t j = 0; v_ > 1 && j < count; j += v_) {
      uint8_t any = 0;
      for (int64_t i = j; i < lesser(count, j + v_); ++i) any |= mask[i];
      for (int64_t i = j; i < lesser(count, j + v_); ++i) mask[i] = any;
    }
  }

  static void count_run(const float* __restrict x, const uint8_t* __restrict mask, int64_t count, int32_t* __restrict lengths,
                        int32_t* __restrict maxima) {
    for (int64_t j = 0; j < count; ++j) {
      const int32_t here = magnitude(x[j]) & -int32_t{mask[j]};
      lengths[j] += mask[j];
      maxima[j] = here > maxima[j] ? here : maxima[j];
    }
  }

  void count_strip(int64_t j0, int64_t count) const {
    int32_t lengths[kStripColumns] = {}, maxima[kStripColumns] = {};
    for (int64_t k = 0; k < x.rows; ++k) {
      mark_strip(k, j0, count);
      count_run(x.row(k) + j0, mask, count, lengths, maxima);
    }
    for (int64_t j = 0; j < count; ++j) args.largest[j0 + j] = from_bits<float>(maxima[j]);
    for (int64_t j = 0; j < count; j += v_) args.lengths[(j0 + j) / v_] = lengths[j];
  }

  void fill_strip(int64_t j0, int64_t count) const {
    int64_t at[kStripColumns], sums[kStripColumns + magicube::kMaxVector] = {};  // of vector rows; of their rows
    const int64_t r0 = j0 / v_, rows = (count + v_ - 1) / v_;
    std::memcpy(at, args.row_start + r0, static_cast<size_t>(rows) * sizeof(int64_t));
    for (int64_t k = 0; k < x.rows; ++k) {
      mark_strip(k, j0, count);
      const float* const from = x.row(k) + j0;
      for_kept(mask, count, [&](int64_t j) {
        const int64_t r = j / v_;
        if (j % v_ == 0) args.out_columns[at[r]] = static_cast<int32_t>(k);
        const int8_t q = digit(from[j], j0 + j);
        *value_at(at[r], j % v_) = q;
        sums[j] += q;
        if (j % v_ == v_ - 1 || j + 1 == count) ++at[r];
      });
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t absent = greater(0, (r + 1) * v_ - count);  // rows of the last vector
      for (int64_t p = args.row_start[r0 + r]; absent && p < at[r]; ++p) {
        for (int64_t v = v_ - absent; v < v_; ++v) *value_at(p, v) = 0;
      }
      pad(r0 + r, at[r]);
    }
    std::memcpy(args.row_sums + j0, sums, static_cast<size_t>(rows * v_) * sizeof(int64_t));
  }

  const SelectArgs& args;
  ThreadGroup& group;
  const FloatMatrix& x;
  const int64_t v_;
  uint8_t* const mask;
};

void select_entries(const SelectArgs& args, ThreadGroup& group) { Select(args, group).run(); }

}  // namespace
