// SpMM on SR-BCRS: C (rows x n) = A (rows x k, vectors) * B (k x n, dense), exact in integers.
//
// A panel of 64 columns of B is staged as digit planes of bytes; every vector row then gathers the panel rows its
// columns name, four at a time, interleaves them so that a 32-bit lane holds four k of one column (a quad), and
// multiplies them by four values of each of up to eight of its rows.
#pragma once

#include "engine.hpp"
#include "integers.hpp"
#include "output.hpp"

namespace {  // compiled once per instruction set

using magicube::kExactRun;
using magicube::kPanel;
using magicube::kQuad;
using magicube::SpmmArgs;
using magicube::Team;

constexpr int64_t kStageLines = 64;  // rows of B one ticket stages
constexpr int64_t kRowsPerTicket = 8;
constexpr int kStripRows = 8;

// Up to eight rows of one vector row times the panel rows that its columns name, added to 64 sums a row.
struct Strip {
  const uint8_t* panel;  // one digit of B
  const int32_t* columns;
  int groups;
  const uint8_t* values;  // of the first row; the next row is `stride` bytes on, the next block `stride * vector_length`
  int stride;
  int vector_length;
  int rows;  // 1, 2, 4 or 8
  bool a_signed;
  bool b_signed;
  int32_t* sums;
  uint8_t* scratch;
};

template <class Micro>
struct SpmmRow {
  const SpmmArgs& args;
  const uint8_t* panel;  // (digits of B, k + 1, 64), from row 0 on; row -1 is what padding columns name
  uint8_t* scratch;      // the micro-kernel's own
  int32_t* sums;         // (digits of A, digits of B, V, 64), columns in the micro-kernel's order
  int64_t* totals;       // (V, 64)

  int64_t row_values() const { return int64_t{args.a.vector_length} * kPanel; }
  int32_t* plane(int da, int db) const { return sums + (da * args.b.digits() + db) * row_values(); }
  bool digit_signed(int d) const { return args.a.is_signed && d == args.a.digits() - 1; }

  // Adds the chunk of nonzeros [begin, begin + count) to the sums; begin is a multiple of the stride.
  void multiply(int64_t begin, int64_t count) const {
    const auto& a = args.a;
    const int groups = static_cast<int>((count + kQuad - 1) / kQuad);
    for (int db = 0; db < args.b.digits(); ++db) {
      const bool b_signed = args.b.is_signed && db == args.b.digits() - 1;
      for (int da = 0; da < a.digits(); ++da) {
        const uint8_t* values = a.planes + da * a.plane_bytes + begin * a.vector_length;
        for (int v = 0; v < a.vector_length; v += kStripRows) {
          const int rows = a.vector_length < kStripRows ? a.vector_length : kStripRows;
          Micro::strip({panel + db * (a.columns_total + 1) * kPanel, a.columns + begin, groups, values + v * a.stride, a.stride,
                        a.vector_length, rows, digit_signed(da), b_signed, plane(da, db) + v * kPanel, scratch});
        }
      }
    }
  }

  // Folds the sums into the totals, digit weights applied, and clears them.
  void fold() const {
    for (int da = 0; da < args.a.digits(); ++da) {
      for (int db = 0; db < args.b.digits(); ++db) {
        int32_t* from = plane(da, db);
        const int64_t weight = int64_t{1} << (8 * (da + db));
        for (int64_t i = 0; i < row_values(); ++i) totals[i] += from[i] * weight;
        std::memset(from, 0, static_cast<size_t>(row_values()) * sizeof(int32_t));
      }
    }
  }

  // What the offset form of B's digits has added to one row of the product.
  int64_t offset_of(int64_t vector_row, int v) const {
    if (!Micro::kOffset) return 0;
    int64_t offset = 0;
    for (int da = 0; da < args.a.digits(); ++da) {
      const int64_t at = (da * args.a.vector_rows + vector_row) * args.a.vector_length + v;
      for (int db = 0; db < args.b.digits(); ++db) {
        const int staged = args.b.is_signed && db == args.b.digits() - 1 ? 128 : 0;
        const int multiplied = staged - (digit_signed(da) ? 0 : 128);
        offset += int64_t{multiplied} * args.a.row_sums[at] * (int64_t{1} << (8 * (da + db)));
      }
    }
    return offset;
  }

  template <class Total>
  void write(const Total* from, int64_t vector_row, int64_t batch, int64_t n0, int64_t width) const {
    const auto& scales = args.scales;
    for (int v = 0; v < args.a.vector_length; ++v) {
      const int64_t row = vector_row * args.a.vector_length + v;
      if (row >= args.a.rows) return;
      const auto offset = static_cast<Total>(offset_of(vector_row, v));
      const int64_t at = (batch * args.a.rows + row) * args.n + n0;
      Total line[kPanel];
      if (sizeof(Total) == sizeof(int32_t) && args.out_type == Out::kInt32 && width == kPanel) {
        int32_t* to = static_cast<int32_t*>(args.out) + at;
        for (int chunk = 0; chunk < kPanel / 4; ++chunk) {
          int32_t four[4];
          std::memcpy(four, from + v * kPanel + chunk * 4, sizeof four);
          for (int i = 0; i < 4; ++i) four[i] = wrap_subtract(four[i], static_cast<int32_t>(offset));
          std::memcpy(to + Micro::column_of(chunk), four, sizeof four);
        }
        continue;
      }
      for (int chunk = 0; chunk < kPanel / 4; ++chunk) {
        std::memcpy(line + Micro::column_of(chunk), from + v * kPanel + chunk * 4, 4 * sizeof(Total));
      }
      for (int i = 0; i < kPanel; ++i) line[i] = wrap_subtract(line[i], offset);
      const float left = scales.left ? scales.left[batch * scales.left_batch + row] : 1.0f;
      const float* right = scales.right ? scales.right + batch * scales.right_batch + n0 : nullptr;
      const float bias = scales.bias ? scales.bias[row] : 0.0f;
      write_run(line, width, left, right, bias, args.out_type, args.out, at);
    }
  }

  // int32 sums may wrap on the way when the final value is known to fit.
  static int32_t wrap_subtract(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
  }
  static int64_t wrap_subtract(int64_t a, int64_t b) { return a - b; }

  // The output rows of a panel are far apart, which no hardware prefetcher follows.
  void prefetch_out(int64_t vector_row, int64_t batch, int64_t n0, int64_t width) const {
    const int64_t element = args.out_type == Out::kInt64 ? 8 : args.out_type >= Out::kFloat16 ? 2 : 4;
    for (int v = 0; v < args.a.vector_length; ++v) {
      const int64_t row = vector_row * args.a.vector_length + v;
      if (row >= args.a.rows) return;
      const char* to = static_cast<const char*>(args.out) + ((batch * args.a.rows + row) * args.n + n0) * element;
      for (int64_t byte = 0; byte < width * element; byte += 64) __builtin_prefetch(to + byte, 1);
    }
  }

  void run(int64_t vector_row, int64_t batch, int64_t n0, int64_t width) const {
    const int64_t begin = args.a.row_start[vector_row], end = args.a.row_end[vector_row];
    const int planes = args.a.digits() * args.b.digits();
    const bool direct = planes == 1 && (args.out_type == Out::kInt32 || end - begin <= kExactRun);
    std::memset(sums, 0, static_cast<size_t>(planes * row_values()) * sizeof(int32_t));
    if (!direct) std::memset(totals, 0, static_cast<size_t>(row_values()) * sizeof(int64_t));
    constexpr int64_t kChunk = int64_t{Micro::kChunkGroups} * kQuad;
    int64_t unfolded = 0;
    for (int64_t at = begin; at < end; at += kChunk) {
      multiply(at, lesser(kChunk, end - at));
      unfolded += kChunk;
      if (!direct && unfolded >= kExactRun) {
        fold();
        unfolded = 0;
      }
    }
    if (direct) {
      write(sums, vector_row, batch, n0, width);
    } else {
      fold();
      write(totals, vector_row, batch, n0, width);
    }
  }
};

template <class Micro>
void spmm(const SpmmArgs& args, Team& team) {
  static_assert(Micro::kScratchBytes <= magicube::kScratchBytes, "team.cpp sizes the workspace");
  const auto& a = args.a;
  const int64_t k = a.columns_total, digit_bytes = (k + 1) * kPanel;
  uint8_t* panel = team.shared() + kPanel;
  // A padding column multiplies its row by zero.
  if (team.rank() == 0) {
    for (int d = 0; d < args.b.digits(); ++d) std::memset(panel + d * digit_bytes - kPanel, 0, kPanel);
  }
  uint8_t* local = team.local();
  auto* totals = reinterpret_cast<int64_t*>(local + Micro::kScratchBytes);
  auto* sums = reinterpret_cast<int32_t*>(totals + int64_t{a.vector_length} * kPanel);
  const SpmmRow<Micro> row{args, panel, local, sums, totals};
  const uint8_t flip = Micro::kOffset && args.b.is_signed ? 0x80 : 0;
  for (int64_t batch = 0; batch < args.batch; ++batch) {
    const uint8_t* b = args.b.data + batch * args.b.batch_bytes;
    for (int64_t n0 = 0; n0 < args.n; n0 += kPanel) {
      const int64_t width = lesser(kPanel, args.n - n0);
      for (int64_t k0 = team.ticket() * kStageLines; k0 < k; k0 = team.ticket() * kStageLines) {
        stage(args.b, b, !args.b.runs_along_inner, k0, lesser(kStageLines, k - k0), n0, width, flip, panel + k0 * kPanel,
              kPanel, digit_bytes);
      }
      team.barrier();
      for (int64_t r0 = team.ticket() * kRowsPerTicket; r0 < a.vector_rows; r0 = team.ticket() * kRowsPerTicket) {
        const int64_t r1 = lesser(r0 + kRowsPerTicket, a.vector_rows);
        row.prefetch_out(r0, batch, n0, width);
        for (int64_t r = r0; r < r1; ++r) {
          if (r + 1 < r1) row.prefetch_out(r + 1, batch, n0, width);
          row.run(r, batch, n0, width);
        }
      }
      team.barrier();
    }
  }
}

}  // namespace
