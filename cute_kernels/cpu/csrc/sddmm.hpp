// SDDMM: S[i, j] = sum_k X[i, k] * Y[j, k] at the vectors of a pattern, exact in integers.
//
// A block of rows of Y is staged as digit planes. Every vector row stages its V rows of X and computes the dot products with the
// staged rows of its columns, a block of positions at a time.
// Source: Li, Osawa, Hoefler, SC'22, section IV-C.
#pragma once

#include "engine.hpp"
#include "integers.hpp"
#include "epilogue.hpp"

namespace {  // compiled once per instruction set

using magicube::kDotColumns;
using magicube::kExactRun;
using magicube::kMaxVector;
using magicube::SddmmArgs;
using magicube::ThreadGroup;

// Dot products of rows of X with listed rows of Y, of staged digits; pitches and the inner size are multiples of 64.
template <class Digit>
struct DotTile {
  const Digit* x;
  int64_t x_pitch;
  int rows;
  const Digit* y;
  int64_t y_pitch;
  const int32_t* columns;  // rows of Y
  int64_t count;
  int64_t inner;  // at most kExactRun
  bool x_signed;
  bool y_signed;
  int32_t* out;  // (rows, out_pitch), with room for `count` rounded up to kDotColumns
  int64_t out_pitch;
};

// Addresses of kDotColumns rows of Y from column `at` on; the last one stands for those behind it.
template <class Digit>
inline void dot_rows_of(const DotTile<Digit>& tile, int64_t at, const Digit* y[kDotColumns]) {
  for (int64_t j = 0; j < kDotColumns; ++j) y[j] = tile.y + int64_t{tile.columns[lesser(at + j, tile.count - 1)]} * tile.y_pitch;
}

inline int64_t first_not_below(const int32_t* columns, int64_t begin, int64_t end, int64_t bound) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (columns[middle] < bound) begin = middle + 1;
    else end = middle;
  }
  return begin;
}

// Stage rows of digits as a micro-kernel has them: `pitch` digits from one to the next, zeros behind `inner`.
template <class Micro>
void stage_dots(const Operand& op, const uint8_t* data, int64_t row0, int64_t rows, int64_t inner, uint8_t flip,
                typename Micro::Dot* out, int64_t pitch, int64_t digit_pitch) {
  using Dot = typename Micro::Dot;
  constexpr int64_t kRows = 16, kInner = 512;
  if constexpr (sizeof(Dot) == 1) {
    stage(op, data, op.runs_along_inner, row0, rows, 0, inner, flip, out, pitch, digit_pitch);
  } else {
    alignas(64) uint8_t bytes[magicube::kMaxDigits * kRows * kInner];
    for (int64_t i = 0; i < rows; i += kRows) {
      const int64_t here = lesser(kRows, rows - i);
      for (int64_t k = 0; k < inner; k += kInner) {
        const int64_t width = lesser(kInner, inner - k);
        stage(op, data, op.runs_along_inner, row0 + i, here, k, width, flip, bytes, kInner, kRows * kInner);
        for (int d = 0; d < op.digits(); ++d) {
          const bool is_signed = op.is_signed && d == op.digits() - 1;
          for (int64_t r = 0; r < here; ++r) {
            const uint8_t* const from = bytes + (d * kRows + r) * kInner;
            Dot* const to = out + d * digit_pitch + (i + r) * pitch + k;
            if (is_signed) for (int64_t j = 0; j < width; ++j) to[j] = static_cast<int8_t>(from[j]);
            else for (int64_t j = 0; j < width; ++j) to[j] = from[j];
          }
        }
      }
    }
  }
  for (int d = 0; d < op.digits(); ++d) {
    for (int64_t r = 0; r < rows; ++r) {
      std::memset(out + d * digit_pitch + r * pitch + inner, 0, static_cast<size_t>(pitch - inner) * sizeof(Dot));
    }
  }
}

template <class Micro>
struct SddmmRow {
  using Dot = typename Micro::Dot;
  static constexpr int kRows = 8;
  static constexpr int kMost = 64;  // positions of a block

  const SddmmArgs& args;
  const Dot* staged;  // (digits of Y, staged rows, padded inner)
  Dot* staged_x;      // (digits of X, V, padded inner)
  int64_t padded;     // inner, rounded up to 64
  int64_t y_digits;   // from one digit of Y to the next

  bool x_signed(int d) const { return args.x.is_signed && d == args.x.digits() - 1; }
  int64_t x_digits() const { return args.vector_length * padded; }

  // Contribution of the offset form of Y's digits to the products of each row of X.
  void offsets(int64_t rows, int64_t* out) const {
    for (int64_t v = 0; v < rows; ++v) {
      out[v] = 0;
      for (int dx = 0; Micro::kOffset && dx < args.x.digits(); ++dx) {
        const Dot* const digits = staged_x + dx * x_digits() + v * padded;
        int64_t sum = 0;
        for (int64_t i = 0; i < padded; ++i) sum += x_signed(dx) ? static_cast<int8_t>(digits[i]) : int{digits[i]};
        for (int dy = 0; dy < args.y.digits(); ++dy) {
          const int in_offset_form = args.y.is_signed && dy == args.y.digits() - 1 ? 128 : 0;
          const int multiplied = in_offset_form - (x_signed(dx) ? 0 : 128);
          out[v] += multiplied * sum * (int64_t{1} << (8 * (dx + dy)));
        }
      }
    }
  }

  // Dot products of up to kRows rows from v on with listed staged rows of Y, of one pair of digits and a part of the inner size.
  void dots(int dx, int dy, int v, int rows, const int32_t* columns, int64_t count, int64_t k0, int32_t* out) const {
    const bool y_signed = args.y.is_signed && dy == args.y.digits() - 1;
    Micro::dots({staged_x + dx * x_digits() + v * padded + k0, padded, rows, staged + dy * y_digits + k0, padded, columns, count,
                 lesser(kExactRun, padded - k0), x_signed(dx), y_signed, out, kMost});
  }

  // Results of `rows` rows from v on at `count` positions of a block from `at` on.
  template <class Total>
  void write(const Total* totals, const int64_t* less, int64_t vector_row, int v, int rows, int64_t at, int64_t count,
             int64_t batch, const float* column_scales) const {
    const auto& scales = args.scales;
    for (int i = 0; i < rows; ++i) {
      const int64_t row = vector_row * args.vector_length + v + i;
      const float scale = scales.rows ? scales.rows[batch * scales.row_batch + row] : 1.0f;
      const int64_t to = (at / args.stride * args.vector_length + v + i) * args.stride + at % args.stride;
      write_run(totals + i * kMost, count, static_cast<Total>(less[v + i]), scale, column_scales, 0.0f, args.out_type, args.out,
                batch * args.out_batch + to);
    }
  }

  void run(int64_t vector_row, int64_t batch, const uint8_t* x, int64_t j0, int64_t j1) const {
    const int64_t end = args.row_end[vector_row];
    const int64_t begin = first_not_below(args.columns, args.row_start[vector_row], end, j0);
    const int64_t stop = first_not_below(args.columns, begin, end, j1);
    if (begin == stop) return;
    const int64_t rows = lesser(args.vector_length, args.rows - vector_row * args.vector_length);
    stage_dots<Micro>(args.x, x, vector_row * args.vector_length, rows, args.inner, 0, staged_x, padded, x_digits());
    int64_t offset[kMaxVector];
    offsets(rows, offset);
    const float* const scales = args.scales.columns ? args.scales.columns + batch * args.scales.column_batch : nullptr;
    const bool direct = args.x.digits() * args.y.digits() == 1 && padded <= kExactRun;
    int64_t count;
    for (int64_t at = begin; at < stop; at += count) {
      count = lesser(args.stride - at % args.stride, stop - at);
      int32_t columns[kMost];
      float column_scales[kMost];
      for (int64_t j = 0; j < count; ++j) {
        columns[j] = static_cast<int32_t>(args.columns[at + j] - j0);
        if (scales) column_scales[j] = scales[args.columns[at + j]];
      }
      for (int v = 0; v < rows; v += kRows) {
        const int height = static_cast<int>(lesser(kRows, rows - v));
        alignas(64) int32_t part[kRows * kMost];
        if (direct) {
          dots(0, 0, v, height, columns, count, 0, part);
          write(part, offset, vector_row, v, height, at, count, batch, scales ? column_scales : nullptr);
          continue;
        }
        int64_t totals[kRows * kMost] = {};
        for (int dx = 0; dx < args.x.digits(); ++dx) {
          for (int dy = 0; dy < args.y.digits(); ++dy) {
            for (int64_t k0 = 0; k0 < padded; k0 += kExactRun) {
              dots(dx, dy, v, height, columns, count, k0, part);
              for (int i = 0; i < height; ++i) {
                for (int64_t j = 0; j < count; ++j) totals[i * kMost + j] += part[i * kMost + j] * (int64_t{1} << (8 * (dx + dy)));
              }
            }
          }
        }
        write(totals, offset, vector_row, v, height, at, count, batch, scales ? column_scales : nullptr);
      }
    }
  }
};

template <class Micro>
void sddmm(const SddmmArgs& args, ThreadGroup& group) {
  using Dot = typename Micro::Dot;
  if (args.inner == 0) return;  // an empty sum is zero, as out is
  const int64_t padded = (args.inner + 63) / 64 * 64;
  const int64_t block = magicube::sddmm_staged_rows(args, sizeof(Dot));
  const uint8_t flip = Micro::kOffset && args.y.is_signed ? 0x80 : 0;
  auto* const staged = reinterpret_cast<Dot*>(group.shared());
  const SddmmRow<Micro> row{args, staged, reinterpret_cast<Dot*>(group.local()), padded, block * padded};
  constexpr int64_t kStaged = 16, kTicket = 4;  // rows per ticket: staged, and multiplied
  for (int64_t batch = 0; batch < args.batch; ++batch) {
    const uint8_t* x = args.x.data + batch * args.x.batch_bytes;
    const uint8_t* y = args.y.data + batch * args.y.batch_bytes;
    for (int64_t j0 = 0; j0 < args.n; j0 += block) {
      const int64_t rows_here = lesser(block, args.n - j0);
      for (int64_t i = group.ticket() * kStaged; i < rows_here; i = group.ticket() * kStaged) {
        stage_dots<Micro>(args.y, y, j0 + i, lesser(kStaged, rows_here - i), args.inner, flip, staged + i * padded, padded,
                          block * padded);
      }
      if (!group.barrier()) return;
      for (int64_t r0 = group.ticket() * kTicket; r0 < args.vector_rows; r0 = group.ticket() * kTicket) {
        const int64_t r1 = lesser(r0 + kTicket, args.vector_rows);
        for (int64_t r = r0; r < r1; ++r) row.run(r, batch, x, j0, j0 + rows_here);
      }
      if (!group.barrier()) return;
    }
  }
}

}  // namespace
