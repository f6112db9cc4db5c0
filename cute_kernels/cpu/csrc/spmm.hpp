// SpMM on SR-BCRS: C (rows x n) = A (rows x k, vectors) * B (k x n, dense), exact in integers.
//
// A panel of 64 columns of B is staged as digit planes of bytes. Every vector row gathers the panel rows of its columns, four at
// a time, interleaves them so that a 32-bit lane holds four k of one column (a quad), and multiplies them by four values of
// each of up to eight of its rows.
// Source: Li, Osawa, Hoefler, SC'22, sections IV-A to IV-D.
#pragma once

#include "engine.hpp"
#include "integers.hpp"
#include "epilogue.hpp"
#include "quantize.hpp"

namespace {  // compiled once per instruction set

using magicube::kExactRun;
using magicube::kPanel;
using magicube::kQuad;
using magicube::SpmmArgs;
using magicube::ThreadGroup;

constexpr int64_t kStagedRows = 64;  // rows of B per ticket
constexpr int64_t kLargeTicket = 8, kSmallTicket = 2;  // vector rows
constexpr int kTileRows = 8;

// Up to eight rows of one vector row times the panel rows of its columns, added to 64 accumulators per row.
struct RowTile {
  const uint8_t* panel;  // one digit of B
  const int32_t* columns;
  int groups;
  const uint8_t* values;  // of the first row; the next row is `stride` bytes on, the next block `stride * vector_length`
  int stride;
  int vector_length;
  int rows;  // 1, 2, 4 or 8
  bool a_signed;
  bool b_signed;
  bool fresh;  // accumulators start from zero
  int32_t* sums;
  uint8_t* scratch;
};

template <class Micro>
struct SpmmRow {
  const SpmmArgs& args;
  const uint8_t* panel;  // (digits of B, k + 1, 64), from row 0 on; row -1 is what padding columns name
  uint8_t* scratch;      // scratch of the micro-kernel
  bool streams;          // results are stored past the caches
  int32_t* sums;         // (digits of A, digits of B, V, 64) accumulators, columns in the order of the micro-kernel
  int64_t* totals;       // (V, 64)

  int64_t row_values() const { return int64_t{args.a.vector_length} * kPanel; }
  int32_t* plane(int da, int db) const { return sums + (da * args.b.digits() + db) * row_values(); }
  bool digit_signed(int d) const { return args.a.is_signed && d == args.a.digits() - 1; }

  // Accumulate the nonzeros [begin, begin + count); begin is a multiple of the stride.
  void multiply(int64_t begin, int64_t count, bool fresh) const {
    const auto& a = args.a;
    const int groups = static_cast<int>((count + kQuad - 1) / kQuad);
    for (int db = 0; db < args.b.digits(); ++db) {
      const bool b_signed = args.b.is_signed && db == args.b.digits() - 1;
      for (int da = 0; da < a.digits(); ++da) {
        const uint8_t* values = a.planes + da * a.plane_bytes + begin * a.vector_length;
        for (int v = 0; v < a.vector_length; v += kTileRows) {
          const int rows = a.vector_length < kTileRows ? a.vector_length : kTileRows;
          Micro::row_tile({panel + db * (a.columns_total + 1) * kPanel, a.columns + begin, groups, values + v * a.stride,
                        a.stride, a.vector_length, rows, digit_signed(da), b_signed, fresh,
                        plane(da, db) + v * kPanel, scratch});
        }
      }
    }
  }

  // Add the accumulators to the totals with their digit weights.
  void fold() const {
    for (int da = 0; da < args.a.digits(); ++da) {
      for (int db = 0; db < args.b.digits(); ++db) {
        const int32_t* from = plane(da, db);
        const int64_t weight = int64_t{1} << (8 * (da + db));
        for (int64_t i = 0; i < row_values(); ++i) totals[i] += from[i] * weight;
      }
    }
  }

  // Contribution of the offset form of B's digits to one row of the product.
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

  // Results of one row, in column order.
  static void order(const int32_t* from, int64_t offset, int32_t* to) {
    Micro::order(from, static_cast<int32_t>(offset), to, false);
  }
  static void order(const int64_t* from, int64_t offset, int64_t* to) {
    for (int chunk = 0; chunk < kPanel / 4; ++chunk) {
      for (int i = 0; i < 4; ++i) to[Micro::column_of(chunk) + i] = from[chunk * 4 + i] - offset;
    }
  }

  template <class Total>
  void write(const Total* from, int64_t vector_row, int64_t batch, int64_t n0, int64_t width) const {
    const auto& scales = args.scales;
    for (int v = 0; v < args.a.vector_length; ++v) {
      const int64_t row = vector_row * args.a.vector_length + v;
      if (row >= args.a.rows) return;
      const int64_t offset = offset_of(vector_row, v);
      const int64_t at = (batch * args.a.rows + row) * args.n + n0;
      if (sizeof(Total) == sizeof(int32_t) && args.out_type == Out::kInt32 && width == kPanel) {
        Micro::order(reinterpret_cast<const int32_t*>(from) + v * kPanel, static_cast<int32_t>(offset),
                     static_cast<int32_t*>(args.out) + at, streams);
        continue;
      }
      alignas(64) Total row_totals[kPanel];
      order(from + v * kPanel, offset, row_totals);
      const float row_scale = scales.rows ? scales.rows[batch * scales.row_batch + row] : 1.0f;
      const float* columns = scales.columns ? scales.columns + batch * scales.column_batch + n0 : nullptr;
      const float bias = scales.bias ? scales.bias[row] : 0.0f;
      if constexpr (Micro::kStreams) {
        if (streams && width == kPanel) {
          alignas(64) uint8_t results[kPanel * sizeof(int64_t)];
          write_run(row_totals, width, row_scale, columns, bias, args.out_type, results, 0);
          const int64_t element = element_bytes(args.out_type);
          Micro::stream(results, static_cast<uint8_t*>(args.out) + at * element, kPanel * element);
          continue;
        }
      }
      write_run(row_totals, width, row_scale, columns, bias, args.out_type, args.out, at);
    }
  }

  // The output rows of a panel are far apart: hardware prefetchers do not follow them.
  void prefetch_out(int64_t vector_row, int64_t batch, int64_t n0, int64_t width) const {
    const int64_t element = element_bytes(args.out_type);
    for (int v = 0; v < args.a.vector_length; ++v) {
      const int64_t row = vector_row * args.a.vector_length + v;
      if (row >= args.a.rows) return;
      const char* to = static_cast<const char*>(args.out) + ((batch * args.a.rows + row) * args.n + n0) * element;
      for (int64_t byte = 0; byte < width * element; byte += 64) __builtin_prefetch(to + byte, 1);
    }
  }

  // Nonzeros per chunk: a row is split into equal chunks of whole blocks.
  int64_t chunk_of(int64_t count) const {
    constexpr int64_t kMost = int64_t{Micro::kChunkGroups} * kQuad;
    static_assert(kMost % 64 == 0, "a chunk is rounded up to whole blocks");
    const int64_t chunks = (count + kMost - 1) / kMost;
    return chunks < 2 ? kMost : ((count + chunks - 1) / chunks + args.a.stride - 1) / args.a.stride * args.a.stride;
  }

  void run(int64_t vector_row, int64_t batch, int64_t n0, int64_t width) const {
    const int64_t begin = args.a.row_start[vector_row], end = args.a.row_end[vector_row];
    const int planes = args.a.digits() * args.b.digits();
    const bool direct = planes == 1 && (args.out_type == Out::kInt32 || end - begin <= kExactRun);
    if (begin == end) std::memset(sums, 0, static_cast<size_t>(planes * row_values()) * sizeof(int32_t));
    if (!direct) std::memset(totals, 0, static_cast<size_t>(row_values()) * sizeof(int64_t));
    const int64_t chunk = chunk_of(end - begin);
    int64_t unfolded = 0;
    for (int64_t at = begin; at < end; at += chunk) {
      multiply(at, lesser(chunk, end - at), unfolded == 0);
      unfolded += chunk;
      if (!direct && unfolded + chunk > kExactRun && at + chunk < end) {
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

  void run_rows(int64_t r0, int64_t r1, int64_t batch, int64_t n0, int64_t width) const {
    if (!streams) prefetch_out(r0, batch, n0, width);
    for (int64_t r = r0; r < r1; ++r) {
      if (!streams && r + 1 < r1) prefetch_out(r + 1, batch, n0, width);
      run(r, batch, n0, width);
    }
  }
};

// Rows [*r0, *r1) of a ticket; smaller tickets at the end balance the threads.
inline bool rows_of(int64_t ticket, int64_t rows, int threads, int64_t* r0, int64_t* r1) {
  const int64_t last = lesser(rows, int64_t{threads} * 2 * kLargeTicket), large = (rows - last) / kLargeTicket;
  const int64_t size = ticket < large ? kLargeTicket : kSmallTicket;
  *r0 = lesser(ticket, large) * kLargeTicket + greater(ticket - large, 0) * kSmallTicket;
  *r1 = lesser(*r0 + size, rows);
  return *r0 < rows;
}

// Whether results are stored past the caches, so that no cache line is read before it is written.
template <class Micro>
bool streams_out(const SpmmArgs& args) {
  const int64_t row_bytes = args.n * element_bytes(args.out_type);
  return Micro::kStreams && reinterpret_cast<uintptr_t>(args.out) % 64 == 0 && row_bytes % 64 == 0 &&
         row_bytes * args.a.rows * args.batch >= magicube::kStreamBytes;
}

// Panels of one call, numbered through the batch.
template <class Micro>
struct SpmmPanels {
  const SpmmArgs& args;
  ThreadGroup& group;
  uint8_t* panel;  // starts at row 0
  SpmmRow<Micro> row;

  int64_t across() const { return (args.n + kPanel - 1) / kPanel; }
  int64_t digit_bytes() const { return (args.a.columns_total + 1) * kPanel; }

  // A padding column multiplies its row by zero.
  void clear_padding() const {
    for (int d = 0; d < args.b.digits(); ++d) std::memset(panel + d * digit_bytes() - kPanel, 0, kPanel);
  }

  void stage_rows(int64_t index, int64_t k0, int64_t k1) const {
    const uint8_t flip = Micro::kOffset && args.b.is_signed ? 0x80 : 0;
    const int64_t n0 = index % across() * kPanel;
    stage(args.b, args.b.data + index / across() * args.b.batch_bytes, !args.b.runs_along_inner, k0, k1 - k0, n0,
          lesser(kPanel, args.n - n0), flip, panel + k0 * kPanel, kPanel, digit_bytes());
  }

  void multiply_rows(int64_t index, int64_t r0, int64_t r1) const {
    const int64_t n0 = index % across() * kPanel;
    row.run_rows(r0, r1, index / across(), n0, lesser(kPanel, args.n - n0));
  }

  // One thread computes a panel.
  void alone(int64_t index) const {
    stage_rows(index, 0, args.a.columns_total);
    multiply_rows(index, 0, args.a.vector_rows);
  }

  // All threads compute a panel.
  void together(int64_t index) const {
    const int64_t k = args.a.columns_total;
    for (int64_t k0 = group.ticket() * kStagedRows; k0 < k; k0 = group.ticket() * kStagedRows) {
      stage_rows(index, k0, lesser(k0 + kStagedRows, k));
    }
    group.barrier();
    int64_t r0, r1;
    while (rows_of(group.ticket(), args.a.vector_rows, group.size(), &r0, &r1)) multiply_rows(index, r0, r1);
    group.barrier();
  }
};

template <class Micro>
void spmm_panels(const SpmmArgs& args, ThreadGroup& group) {
  static_assert(Micro::kScratchBytes % 64 == 0, "what follows is aligned");
  const bool own = args.staged_panels >= group.size();
  const int64_t panel_bytes = magicube::spmm_panel_bytes(args);
  uint8_t* const first = group.shared() + kPanel;
  uint8_t* const mine = first + (own ? group.rank() * panel_bytes : 0);
  uint8_t* const local = group.local();
  auto* totals = reinterpret_cast<int64_t*>(local + Micro::kScratchBytes);
  auto* sums = reinterpret_cast<int32_t*>(totals + int64_t{args.a.vector_length} * kPanel);
  const bool streams = streams_out<Micro>(args);
  const auto panels_in = [&](uint8_t* panel) {
    return SpmmPanels<Micro>{args, group, panel, SpmmRow<Micro>{args, panel, local, streams, sums, totals}};
  };
  const auto separate = panels_in(mine), shared = panels_in(first);
  if (own || group.rank() == 0) separate.clear_padding();
  const int64_t panels = separate.across() * args.batch;
  const int64_t alone = own ? panels - panels % group.size() : 0;
  if (alone > 0) {
    for (int64_t index = group.ticket(); index < alone; index = group.ticket()) separate.alone(index);
    if (alone < panels) group.barrier();
  }
  for (int64_t index = alone; index < panels; ++index) shared.together(index);
  if constexpr (Micro::kStreams) Micro::finish_streams();
}

// Up to eight rows of one vector row times at most kFewColumns columns of B, all in registers.
struct FewTile {
  const uint8_t* panel;  // (k + 1, width), from row 0 on; row -1 is what padding columns name
  int width;             // 1, 8 or 16
  const int32_t* columns;
  int64_t count;         // whole blocks
  const uint8_t* values;  // as of RowTile
  int stride;
  int vector_length;
  int rows;  // 1, 2, 4 or 8
  bool a_signed;
  bool b_signed;
  int32_t* sums;  // (rows, width)
};

inline bool has_few_columns(const SpmmArgs& args) {
  return args.n <= magicube::kFewColumns && args.a.digits() * args.b.digits() == 1 && args.a.columns_total <= kExactRun;
}

// Products with few columns are bound by the bytes of A: B is staged in rows of 1, 8 or 16 bytes. Two contiguous
// columns are staged as two panels of one.
template <class Micro>
struct SpmmFew {
  const SpmmArgs& args;
  ThreadGroup& group;

  int64_t panels() const { return args.n == 2 && args.b.runs_along_inner && args.a.columns_total > 0 ? 2 : 1; }
  int width() const { return args.n == panels() ? 1 : args.n <= 8 ? 8 : 16; }
  int64_t panel_bytes() const { return args.a.columns_total + 1; }  // of one column, with its padding

  void stage_rows(const uint8_t* data, int64_t k0, int64_t k1, uint8_t* panel) const {
    const auto& b = args.b;
    for (int64_t p = 0; p < panels(); ++p) {
      uint8_t* const to = panel + p * panel_bytes() + k0 * width();
      if (width() == 1 && b.runs_along_inner) {
        load_digits(data + p * b.run_bytes, b.bits, b.is_signed, k0, k1 - k0, 0, to, 0);
      } else {
        stage(b, data, !b.runs_along_inner, k0, k1 - k0, p, width() == 1 ? 1 : args.n, 0, to, width(), 0);
      }
    }
  }

  void multiply(int64_t vector_row, int64_t batch, const uint8_t* panel) const {
    const auto& a = args.a;
    const int64_t begin = a.row_start[vector_row];
    const int64_t count = (a.row_end[vector_row] - begin + a.stride - 1) / a.stride * a.stride;
    const int rows = a.vector_length < kTileRows ? a.vector_length : kTileRows;
    for (int v = 0; v < a.vector_length; v += rows) {
      for (int64_t p = 0; p < panels(); ++p) {
        alignas(64) int32_t sums[kTileRows * magicube::kFewColumns];
        Micro::few({panel + p * panel_bytes(), width(), a.columns + begin, count, a.planes + begin * a.vector_length + v * a.stride,
                    a.stride, a.vector_length, rows, a.is_signed, args.b.is_signed, sums});
        const int64_t row = vector_row * a.vector_length + v;
        write(sums, row, lesser(rows, a.rows - row), batch, p, panels() > 1 ? 1 : args.n);
      }
    }
  }

  // Rows of results from column n0 on; one of float32 is as short as a call of write_run is long.
  void write(const int32_t* sums, int64_t row, int64_t rows, int64_t batch, int64_t n0, int64_t count) const {
    const auto& scales = args.scales;
    const float* const columns = scales.columns ? scales.columns + batch * scales.column_batch + n0 : nullptr;
    for (int64_t r = 0; r < rows; ++r, ++row, sums += width()) {
      const float scale = scales.rows ? scales.rows[batch * scales.row_batch + row] : 1.0f;
      const float bias = scales.bias ? scales.bias[row] : 0.0f;
      const int64_t at = (batch * args.a.rows + row) * args.n + n0;
      if (args.out_type != Out::kFloat32) {
        write_run(sums, count, scale, columns, bias, args.out_type, args.out, at);
        continue;
      }
      float* const out = static_cast<float*>(args.out) + at;
      if (count == 1) {
        *out = static_cast<float>(*sums) * scale * (columns ? *columns : 1.0f) + bias;
        continue;
      }
      for (int64_t j = 0; j < count; ++j) out[j] = static_cast<float>(sums[j]) * scale * (columns ? columns[j] : 1.0f) + bias;
    }
  }

  void run() const {
    const int64_t k = args.a.columns_total;
    uint8_t* const panel = group.shared() + kPanel;
    if (group.rank() == 0) {
      for (int64_t p = 0; p < panels(); ++p) std::memset(panel + p * panel_bytes() - width(), 0, static_cast<size_t>(width()));
    }
    for (int64_t batch = 0; batch < args.batch; ++batch) {
      for (int64_t k0 = group.ticket() * kStagedRows; k0 < k; k0 = group.ticket() * kStagedRows) {
        stage_rows(args.b.data + batch * args.b.batch_bytes, k0, lesser(k0 + kStagedRows, k), panel);
      }
      group.barrier();
      int64_t r0, r1;
      while (rows_of(group.ticket(), args.a.vector_rows, group.size(), &r0, &r1)) {
        for (int64_t r = r0; r < r1; ++r) multiply(r, batch, panel);
      }
      group.barrier();
    }
  }
};

// Quantize the columns of B into the shared buffer, behind the panels; returns the arguments of their product.
inline SpmmArgs with_quantized_columns(const SpmmArgs& args, ThreadGroup& group) {
  SpmmArgs found = args;
  const int64_t pitch = magicube::spmm_row_bytes(args);
  found.columns.reals = nullptr;
  auto* const ints = group.shared() + magicube::spmm_shared_bytes(found);
  auto* const scales = reinterpret_cast<float*>(ints + args.n * pitch);
  for (int64_t i = group.ticket(); i < args.n; i = group.ticket()) {
    scales[i] = quantize_row(args.columns, i, args.a.columns_total, 0, ints + i * pitch);
  }
  found.b.data = ints;
  found.b.run_bytes = pitch;
  found.scales.columns = scales;
  group.barrier();
  return found;
}

template <class Micro>
void spmm(const SpmmArgs& args, ThreadGroup& group) {
  if (args.columns.reals) return spmm<Micro>(with_quantized_columns(args, group), group);
  if constexpr (Micro::kFew) {
    if (has_few_columns(args)) return SpmmFew<Micro>{args, group}.run();
  }
  spmm_panels<Micro>(args, group);
}

}  // namespace
