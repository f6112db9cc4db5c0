// SDDMM: S[i, j] = sum_k X[i, k] * Y[j, k] at the vectors of a pattern, exact in integers.
//
// A block of rows of Y is staged as digit planes of bytes. Every vector row stages its V rows of X and computes the dot products
// with the staged rows of its columns, four columns at a time.
// Source: Li, Osawa, Hoefler, SC'22, section IV-E.
#pragma once

#include "engine.hpp"
#include "integers.hpp"
#include "epilogue.hpp"

namespace {  // compiled once per instruction set

using magicube::kExactRun;
using magicube::kMaxVector;
using magicube::SddmmArgs;
using magicube::ThreadGroup;

inline int64_t first_not_below(const int32_t* columns, int64_t begin, int64_t end, int64_t bound) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (columns[middle] < bound) begin = middle + 1;
    else end = middle;
  }
  return begin;
}

template <class Micro>
struct SddmmRow {
  const SddmmArgs& args;
  const uint8_t* staged;  // (digits of Y, staged rows, padded inner)
  uint8_t* staged_x;      // (digits of X, V, padded inner)
  int64_t padded;         // inner, rounded up to 64
  int64_t y_digit_bytes;

  bool x_signed(int d) const { return args.x.is_signed && d == args.x.digits() - 1; }
  int64_t x_digit_bytes() const { return args.vector_length * padded; }

  int64_t stage_x(int64_t vector_row, const uint8_t* x) const {
    const int64_t first = vector_row * args.vector_length;
    const int64_t rows = lesser(args.vector_length, args.rows - first);
    std::memset(staged_x, 0, static_cast<size_t>(x_digit_bytes() * args.x.digits()));
    stage(args.x, x, args.x.runs_along_inner, first, rows, 0, args.inner, 0, staged_x, padded, x_digit_bytes());
    return rows;
  }

  // Contribution of the offset form of Y's digits to the products of each row of X.
  void offsets(int64_t rows, int64_t* out) const {
    for (int64_t v = 0; v < rows; ++v) {
      out[v] = 0;
      for (int dx = 0; Micro::kOffset && dx < args.x.digits(); ++dx) {
        const uint8_t* bytes = staged_x + dx * x_digit_bytes() + v * padded;
        int64_t sum = 0;
        for (int64_t i = 0; i < padded; ++i) sum += x_signed(dx) ? static_cast<int8_t>(bytes[i]) : int{bytes[i]};
        for (int dy = 0; dy < args.y.digits(); ++dy) {
          const int in_offset_form = args.y.is_signed && dy == args.y.digits() - 1 ? 128 : 0;
          const int multiplied = in_offset_form - (x_signed(dx) ? 0 : 128);
          out[v] += multiplied * sum * (int64_t{1} << (8 * (dx + dy)));
        }
      }
    }
  }

  // Four dot products for each of up to four rows from v on: totals[row][column].
  void dots(const int64_t* y_rows, int v, int rows, int64_t totals[4][4]) const {
    for (int dx = 0; dx < args.x.digits(); ++dx) {
      for (int dy = 0; dy < args.y.digits(); ++dy) {
        const bool y_signed = args.y.is_signed && dy == args.y.digits() - 1;
        const uint8_t* x = staged_x + dx * x_digit_bytes() + v * padded;
        const uint8_t* y[4];
        for (int j = 0; j < 4; ++j) y[j] = staged + dy * y_digit_bytes + y_rows[j] * padded;
        for (int64_t k0 = 0; k0 < padded; k0 += kExactRun) {
          int32_t part[4][4];
          Micro::dots(x + k0, padded, rows, y, k0, lesser(kExactRun, padded - k0), x_signed(dx), y_signed, part);
          for (int i = 0; i < rows; ++i) {
            for (int j = 0; j < 4; ++j) totals[i][j] += part[i][j] * (int64_t{1} << (8 * (dx + dy)));
          }
        }
      }
    }
  }

  void write(const int64_t* line, int64_t count, int64_t less, int64_t batch, int64_t row, int v, int64_t position,
             const int32_t* columns) const {
    const auto& scales = args.scales;
    float column_scales[4];
    for (int64_t j = 0; j < count; ++j) {
      column_scales[j] = scales.columns ? scales.columns[batch * scales.column_batch + columns[j]] : 1.0f;
    }
    const float factor = scales.rows ? scales.rows[batch * scales.row_batch + row] : 1.0f;
    const int64_t block = position / args.stride;  // four positions of one aligned group share a block
    const int64_t offset = (block * args.vector_length + v) * args.stride + position % args.stride;
    write_run(line, count, less, factor, column_scales, 0.0f, args.out_type, args.out, batch * args.out_batch + offset);
  }

  void run(int64_t vector_row, int64_t batch, const uint8_t* x, int64_t j0, int64_t j1) const {
    const int64_t end = args.row_end[vector_row];
    const int64_t begin = first_not_below(args.columns, args.row_start[vector_row], end, j0);
    const int64_t stop = first_not_below(args.columns, begin, end, j1);
    if (begin == stop) return;
    const int64_t rows = stage_x(vector_row, x);
    int64_t offset[kMaxVector];
    offsets(rows, offset);
    int64_t count;
    for (int64_t at = begin; at < stop; at += count) {
      count = lesser(4 - at % 4, stop - at);
      int64_t y_rows[4];
      for (int64_t j = 0; j < 4; ++j) y_rows[j] = args.columns[at + (j < count ? j : 0)] - j0;
      for (int v = 0; v < rows; v += 4) {
        int64_t totals[4][4] = {};
        const int height = static_cast<int>(lesser(4, rows - v));
        dots(y_rows, v, height, totals);
        for (int i = 0; i < height; ++i) {
          write(totals[i], count, offset[v + i], batch, vector_row * args.vector_length + v + i, v + i, at, args.columns + at);
        }
      }
    }
  }
};

template <class Micro>
void sddmm(const SddmmArgs& args, ThreadGroup& group) {
  if (args.inner == 0) return;  // an empty sum is zero, as out is
  const int64_t padded = (args.inner + 63) / 64 * 64;
  const int64_t block = magicube::sddmm_staged_rows(args);
  const int64_t digit_bytes = block * padded;
  const uint8_t flip = Micro::kOffset && args.y.is_signed ? 0x80 : 0;
  uint8_t* staged = group.shared();
  const SddmmRow<Micro> row{args, staged, group.local(), padded, digit_bytes};
  constexpr int64_t kStagedRows = 16, kRows = 4;  // rows per ticket: staged, and multiplied
  for (int64_t batch = 0; batch < args.batch; ++batch) {
    const uint8_t* x = args.x.data + batch * args.x.batch_bytes;
    const uint8_t* y = args.y.data + batch * args.y.batch_bytes;
    for (int64_t j0 = 0; j0 < args.n; j0 += block) {
      const int64_t rows_here = lesser(block, args.n - j0);
      for (int64_t i = group.ticket() * kStagedRows; i < rows_here; i = group.ticket() * kStagedRows) {
        const int64_t count = lesser(kStagedRows, rows_here - i);
        stage(args.y, y, args.y.runs_along_inner, j0 + i, count, 0, args.inner, flip, staged + i * padded, padded,
              digit_bytes);
        for (int d = 0; d < args.y.digits(); ++d) {
          for (int64_t line = i; line < i + count; ++line) {
            std::memset(staged + d * digit_bytes + line * padded + args.inner, 0, static_cast<size_t>(padded - args.inner));
          }
        }
      }
      if (!group.barrier()) return;
      for (int64_t r0 = group.ticket() * kRows; r0 < args.vector_rows; r0 = group.ticket() * kRows) {
        const int64_t r1 = lesser(r0 + kRows, args.vector_rows);
        for (int64_t r = r0; r < r1; ++r) row.run(r, batch, x, j0, j0 + rows_here);
      }
      if (!group.barrier()) return;
    }
  }
}

}  // namespace
