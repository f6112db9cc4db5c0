// SpMM on SR-BCRS with few columns of B, which is bound by the bytes of A.
#pragma once

#include "engine.hpp"
#include "epilogue.hpp"
#include "integers.hpp"

namespace {  // compiled once per instruction set

using magicube::kExactRun;
using magicube::kPanel;
using magicube::SpmmArgs;
using magicube::ThreadGroup;

constexpr int64_t kStagedRows = 64;  // rows of B per ticket
constexpr int64_t kTicketRows = 8;   // vector rows
constexpr int kTileRows = 8;
constexpr int64_t kPage = 4096;
constexpr int64_t kThreeShare = 12;  // stored columns per word of a mask, from which three panels beat a row of eight bytes

// What the masks of a vector row keep of one column of B.
struct KeptRow {
  const uint64_t* masks;
  int64_t words;
  const uint8_t* x;  // 64 bytes a word
  uint8_t* to;
  int narrow;  // words that keep no more are stored as 32 bytes; 0 for rows of which many keep more
};

// Up to eight rows of one vector row times at most kFewColumns columns of B, all in registers.
struct FewTile {
  const uint8_t* panel;  // (k + 1, width), from row 0 on; row -1 is what padding columns name
  int width;             // 1, 16, or 8 if the micro-kernel has that
  const int32_t* columns;  // null: the panel holds the rows of B that they would name, width 1
  int64_t count;         // whole blocks
  int64_t used;          // of them, without the padding
  const uint8_t* values;  // as of RowTile
  int stride;
  int vector_length;
  int rows;  // 1, 2, 4 or 8
  bool a_signed;
  bool b_signed;
  const int32_t* start;  // (rows), what sums start from
  int32_t* sums;         // (rows, width); where one column has less than four rows, as many as of four are written
  KeptRow next;          // of another vector row, kept meanwhile; no words: none
};

inline bool has_few_columns(const SpmmArgs& args) {
  return !args.turned && args.n <= magicube::kFewColumns && args.a.digits() * args.b.digits() == 1 && args.a.columns_total <= kExactRun;
}

// Products with few columns are bound by the bytes of A: B is staged in rows of 1, 8 or 16 bytes. Two contiguous columns are
// staged as two panels of one, three where masks are read faster than the indices.
template <class Micro>
struct SpmmFew {
  const SpmmArgs& args;
  ThreadGroup& group;
  const int64_t panels;
  const int width;

  SpmmFew(const SpmmArgs& args, ThreadGroup& group)
      : args(args), group(group), panels(panels_of(args)), width(args.n == panels ? 1 : args.n <= Micro::kFewWidth ? Micro::kFewWidth : 16) {}

  static int64_t panels_of(const SpmmArgs& args) {
    const auto& a = args.a;
    const bool dense = a.plane_bytes >= kThreeShare * ((a.columns_total + 63) / 64) * a.vector_rows * a.vector_length;
    const int64_t most = Micro::kKeeps && a.masks && dense ? 3 : 2;
    return args.n <= most && args.b.runs_along_inner && a.columns_total > 0 ? args.n : 1;
  }
  uint8_t flip() const { return Micro::kOffset && args.b.is_signed ? 0x80 : 0; }
  int64_t panel_bytes() const { return args.a.columns_total + 1 + kPanel; }  // of one column; whole words of masks are read

  void stage_rows(const uint8_t* data, int64_t k0, int64_t k1, uint8_t* panel) const {
    const auto& b = args.b;
    for (int64_t p = 0; p < panels; ++p) {
      uint8_t* const to = panel + p * panel_bytes() + k0 * width;
      if (k0 == 0) std::memset(to - width, 0, static_cast<size_t>(width));  // of padding columns
      if (width == 1 && b.runs_along_inner) {
        load_digits(data + p * b.run_bytes, b.bits, b.is_signed, k0, k1 - k0, flip(), to, 0);
      } else {
        const auto stage_rows_of = [&](int64_t bytes) {  // inlined, with a constant
          stage(b, data, !b.runs_along_inner, k0, k1 - k0, p, bytes == 1 ? 1 : args.n, flip(), to, bytes, 0);
        };
        width == 16 ? stage_rows_of(16) : width == 8 ? stage_rows_of(8) : stage_rows_of(1);
      }
    }
  }

  // A vector row times a panel, or what was gathered of it: sums (V, width).
  void multiply(int64_t vector_row, const uint8_t* panel, bool is_gathered, KeptRow next, const int32_t* start, int32_t* sums) const {
    const auto& a = args.a;
    const int64_t begin = a.row_start[vector_row], used = a.row_end[vector_row] - begin, count = (used + a.stride - 1) & -int64_t{a.stride};
    const int rows = a.vector_length < kTileRows ? a.vector_length : kTileRows;
    for (int v = 0; v < a.vector_length; v += rows) {
      Micro::few({panel, width, is_gathered ? nullptr : a.columns + begin, count, used, a.planes + begin * a.vector_length + v * a.stride,
                  a.stride, a.vector_length, rows, a.is_signed, args.b.is_signed, start + v, sums + v * width, next});
      next.words = 0;
    }
  }

  // What the sums of rows start from: those of the staged bytes' offset, negated.
  void start_sums(int64_t row, int64_t rows, int32_t* start) const {
    const int32_t shift = Micro::kOffset ? (args.a.is_signed ? 0 : 128) - (args.b.is_signed ? 128 : 0) : 0;
    for (int64_t r = 0; r < rows; ++r) start[r] = shift * static_cast<int32_t>(args.a.row_sums[row + r]);
  }

  // Vector rows whose entries of B their masks keep, each row's while the row before is multiplied: values come from memory
  // meanwhile, and no load waits for a store of its own bytes. Short rows cross no page, which would make their stores slow.
  template <class Body>
  void with_kept(int64_t r0, int64_t r1, const uint8_t* panel, const Body& body) const {
    alignas(kPage) uint8_t kept[2][magicube::kExactRun + kPage / 2];
    const int64_t words = (args.a.columns_total + 63) / 64;
    const auto row = [&](int64_t r) {
      const int narrow = args.a.row_end[r] - args.a.row_start[r] <= words * 16 ? 32 : 0;
      return KeptRow{args.a.masks + r * words, words, panel, kept[r & 1], narrow};
    };
    const KeptRow first = row(r0);
    Micro::keep(first.masks, first.masks + words, first.x, first.narrow, first.to);
    for (int64_t r = r0; r < r1; ++r) body(r, kept[r & 1], r + 1 < r1 ? row(r + 1) : KeptRow{});
  }

  // The vector rows of a ticket.
  void multiply_rows(int64_t r0, int64_t r1, int64_t batch, const uint8_t* panels_of) const {
    constexpr int64_t kRows = kTicketRows * magicube::kMaxVector;
    const int64_t v = args.a.vector_length, row = r0 * v;
    int32_t start[kRows];
    alignas(64) int32_t sums[kRows * magicube::kFewColumns];
    start_sums(row, (r1 - r0) * v, start);
    const bool keeps = Micro::kKeeps && width == 1 && args.a.masks;
    const auto multiply_at = [&](int64_t r, const uint8_t* x, const KeptRow& next) {
      multiply(r, x, keeps, next, start + (r - r0) * v, sums + (r - r0) * v * width);
    };
    for (int64_t p = 0; p < panels; ++p) {
      const uint8_t* const panel = panels_of + p * panel_bytes();
      if constexpr (Micro::kKeeps) {
        if (keeps) with_kept(r0, r1, panel, multiply_at);
      }
      for (int64_t r = r0; r < r1 && !keeps; ++r) multiply_at(r, panel, KeptRow{});
      write(sums, row, lesser(r1 * v, args.a.rows) - row, batch, p, panels > 1 ? 1 : args.n);
    }
  }

  // Rows of results from column n0 on.
  void write(const int32_t* sums, int64_t row, int64_t rows, int64_t batch, int64_t n0, int64_t count) const {
    const auto& scales = args.scales;
    const float* const columns = scales.columns ? scales.columns + batch * scales.column_batch + n0 : nullptr;
    const float* const row_scales = scales.rows ? scales.rows + batch * scales.row_batch + row : nullptr;
    const float* const bias = scales.bias ? scales.bias + row : nullptr;
    const int64_t at = (batch * args.a.rows + row) * args.n + n0;
    if (args.out_type < Out::kFloat32) {
      for (int64_t r = 0; r < rows; ++r) write_run(sums + r * width, count, 0, 1.0f, nullptr, 0.0f, args.out_type, args.out, at + r * args.n);
      return;
    }
    alignas(64) float block[kTicketRows * magicube::kMaxVector * magicube::kFewColumns];  // of 16-bit floats, as float32
    const bool in_place = args.out_type == Out::kFloat32;
    float* const out = in_place ? static_cast<float*>(args.out) + at : block;
    const int64_t pitch = in_place ? args.n : count;
    if (count == 1) {
      write_column(sums, rows, row_scales, columns ? *columns : 1.0f, bias, out, pitch);
    } else {
      const auto each_row = [&](int64_t most) {  // inlined, with a constant
        for (int64_t r = 0; r < rows; ++r, sums += width) {
          const float scale = row_scales ? row_scales[r] : 1.0f, added = bias ? bias[r] : 0.0f;
          for (int64_t j = 0; j < most; ++j) out[r * pitch + j] = static_cast<float>(sums[j]) * scale * (columns ? columns[j] : 1.0f) + added;
        }
      };
      count == 16 ? each_row(16) : each_row(count);
    }
    if (in_place) return;
    const int64_t run = count == args.n ? rows * count : count;  // whole rows follow each other
    for (int64_t i = 0; i < rows * count; i += run) store_floats(block + i, run, args.out_type, args.out, at + i / count * args.n);
  }

  // One column of the output.
  void write_column(const int32_t* __restrict sums, int64_t rows, const float* __restrict scale, float column,
                    const float* __restrict bias, float* __restrict out, int64_t step) const {
    for (int64_t r = 0; r < rows; ++r) {
      out[r * step] = static_cast<float>(sums[r]) * (scale ? scale[r] : 1.0f) * column + (bias ? bias[r] : 0.0f);
    }
  }

  void run() const {
    const int64_t k = args.a.columns_total;
    uint8_t* const panel = group.shared() + kPanel;
    for (int64_t batch = 0; batch < args.batch; ++batch) {
      for (int64_t k0 = group.ticket() * kStagedRows; k0 < k; k0 = group.ticket() * kStagedRows) {
        stage_rows(args.b.data + batch * args.b.batch_bytes, k0, lesser(k0 + kStagedRows, k), panel);
      }
      if (!group.barrier()) return;
      for (int64_t r0 = group.ticket() * kTicketRows; r0 < args.a.vector_rows; r0 = group.ticket() * kTicketRows) {
        multiply_rows(r0, lesser(r0 + kTicketRows, args.a.vector_rows), batch, panel);
      }
      if (!group.barrier()) return;
    }
  }
};

}  // namespace
