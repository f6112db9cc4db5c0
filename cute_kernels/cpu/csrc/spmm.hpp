// SpMM on SR-BCRS: C (rows x n) = A (rows x k, vectors) * B (k x n, dense), exact in integers.
//
// A panel of B is staged as digit planes, in one or two parts of 64 bytes of each row. Every vector row gathers the panel rows of
// its columns, and multiplies them by the values of up to eight of its rows. Threads stage several panels, then multiply them; small
// panels each by one thread, without barriers.
// Source: Li, Osawa, Hoefler, SC'22, sections IV-A to IV-D.
#pragma once

#include "engine.hpp"
#include "integers.hpp"
#include "epilogue.hpp"
#include "quantize.hpp"
#include "spmm_few.hpp"
#include "transposed.hpp"

namespace {  // compiled once per instruction set

using magicube::kQuad;

alignas(64) constexpr float kZeros[kPanel] = {};  // absent bias
alignas(64) constexpr float kOnes[kPanel] = {       // absent scales
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// Up to eight rows of one vector row times the panel rows of its columns, added to the accumulators of a panel per row.
struct RowTile {
  const uint8_t* panel;  // one digit of B: 64 bytes per row of a part, as the micro-kernel places them
  int64_t part_bytes;    // from one part of the panel to the next
  int64_t width;         // columns of B in the panel; accumulators of others may keep what they held
  const int32_t* columns;
  int64_t count;
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

// Vector rows of A times a panel whose sums, of one digit of each operand, are not split, and where they go.
struct WholeRows {
  const magicube::Sparse& a;
  const uint8_t* panel;  // as of RowTile
  int64_t part_bytes;
  int64_t width;
  int32_t shift;  // what the offset form adds to a sum for each unit of the sum of its row of A
  bool scales;    // results are float32, not int32
  const float* row_scales;  // null for ones
  const float* column_scales;  // of the panel
  const float* bias;  // null for zeros
  int64_t pitch;      // of the results
  bool streams;       // past the caches: rows are whole cache lines
  int32_t* sums;
  uint8_t* scratch;
};

template <class Micro>
struct SpmmRow {
  static constexpr int kColumns = Micro::kColumns * Micro::kParts;
  static constexpr int kTurnedRows = 64;  // of results that are turned at once
  static constexpr int64_t kMostWhole = int64_t{Micro::kChunkGroups} * kQuad;  // nonzeros of a vector row that is not split
  static_assert(kMostWhole % 64 == 0 && kMostWhole <= kExactRun, "a chunk is whole blocks; its sums fit int32");

  const SpmmArgs& args;
  uint8_t* scratch;  // of the micro-kernel
  bool streams;      // results are stored past the caches
  int32_t* sums;     // (digits of A, digits of B, V, kColumns) accumulators
  int64_t* totals;   // (V, kColumns)

  int64_t part_bytes() const { return (args.a.columns_total + 1) * kPanel; }
  int64_t row_values() const { return int64_t{args.a.vector_length} * kColumns; }
  int32_t* plane(int da, int db) const { return sums + (da * args.b.digits() + db) * row_values(); }
  bool digit_signed(int d) const { return args.a.is_signed && d == args.a.digits() - 1; }

  // Accumulate the nonzeros [begin, begin + count); begin is a multiple of the stride.
  void multiply(const uint8_t* panel, int64_t width, int64_t begin, int64_t count, bool fresh) const {
    const auto& a = args.a;
    for (int db = 0; db < args.b.digits(); ++db) {
      const bool b_signed = args.b.is_signed && db == args.b.digits() - 1;
      for (int da = 0; da < a.digits(); ++da) {
        const uint8_t* values = a.planes + da * a.plane_bytes + begin * a.vector_length;
        for (int v = 0; v < a.vector_length; v += kTileRows) {
          const int rows = a.vector_length < kTileRows ? a.vector_length : kTileRows;
          Micro::row_tile({panel + db * args.parts * part_bytes(), part_bytes(), width, a.columns + begin, count, values + v * a.stride,
                        a.stride, a.vector_length, rows, digit_signed(da), b_signed, fresh,
                        plane(da, db) + v * kColumns, scratch});
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

  // What the offset forms of two digits add to a sum, for each unit of the sum of a row of A.
  int shift_of(int da, int db) const {
    const int staged = args.b.is_signed && db == args.b.digits() - 1 ? 128 : 0;
    return Micro::kOffset ? staged - (digit_signed(da) ? 0 : 128) : 0;
  }

  // Contribution of the offset form of B's digits to one row of the product.
  int64_t offset_of(int64_t vector_row, int v) const {
    int64_t offset = 0;
    for (int da = 0; Micro::kOffset && da < args.a.digits(); ++da) {
      const int64_t at = (da * args.a.vector_rows + vector_row) * args.a.vector_length + v;
      for (int db = 0; db < args.b.digits(); ++db) {
        offset += int64_t{shift_of(da, db)} * args.a.row_sums[at] * (int64_t{1} << (8 * (da + db)));
      }
    }
    return offset;
  }

  bool is_16_bit() const { return args.out_type > Out::kFloat32; }

  // Whether results that are to be turned are int32 until then: beside the products, those of floats would wait for their ports.
  bool scales_turned() const {
    return args.turned && args.a.digits() * args.b.digits() == 1 && args.a.columns_total <= kExactRun;
  }

  // Of results to the output, or to rows of kColumns that go on from there.
  Out type_of(const float* floats) const { return !floats ? args.out_type : scales_turned() ? Out::kInt32 : Out::kFloat32; }

  // Results of the accumulators or totals, minus the offset of their row.
  template <class Total>
  void write(const Total* from, int64_t vector_row, int64_t batch, int64_t n0, int64_t width, float* floats) const {
    const auto& scales = args.scales;
    const float* const columns = scales.columns ? scales.columns + batch * scales.column_batch + n0 : nullptr;
    const int64_t row0 = vector_row * args.a.vector_length, rows = lesser(args.a.vector_length, args.a.rows - row0);
    if constexpr (sizeof(Total) == sizeof(int32_t)) {
      if (type_of(floats) == Out::kFloat32 && width % kScaledColumns == 0) {
        int32_t offsets[magicube::kMaxVector];
        for (int64_t v = 0; v < rows; ++v) offsets[v] = shift_of(0, 0) * static_cast<int32_t>(args.a.row_sums[row0 + v]);
        alignas(64) float results[magicube::kMaxVector * kColumns];
        float* const out = floats ? floats : static_cast<float*>(args.out) + (batch * args.a.rows + row0) * args.n + n0;
        const bool past = !floats && streams;
        const int64_t pitch = floats ? kColumns : args.n;
        scale_rows<kColumns>(from, rows, width, offsets, scales.rows ? scales.rows + batch * scales.row_batch + row0 : kOnes,
                             columns ? columns : kOnes, scales.bias ? scales.bias + row0 : kZeros, past ? results : out, past ? kColumns : pitch);
        for (int64_t v = 0; past && v < rows; ++v) Micro::stream(results + v * kColumns, out + v * pitch, width * 4);
        return;
      }
    }
    Total offsets[magicube::kMaxVector];
    for (int64_t v = 0; v < rows; ++v) offsets[v] = static_cast<Total>(offset_of(vector_row, static_cast<int>(v)));
    const int64_t at = (batch * args.a.rows + row0) * args.n + n0;
    const float* const row_scales = scales.rows ? scales.rows + batch * scales.row_batch + row0 : kOnes;
    const float* const bias = scales.bias ? scales.bias + row0 : kZeros;
    for (int64_t v = 0; floats && v < rows; ++v, from += kColumns) {
      write_run(from, width, offsets[v], row_scales[v], columns, bias[v], type_of(floats), floats, v * kColumns);
    }
    if (floats) return;
    const int64_t element = element_bytes(args.out_type);
    for (int64_t v = 0; v < rows; ++v, from += kColumns) {
      const int64_t here = at + v * args.n;
      if (streams && width * element % 64 == 0) {
        alignas(64) uint8_t results[kColumns * sizeof(int64_t)];
        write_run(from, width, offsets[v], row_scales[v], columns, bias[v], args.out_type, results, 0);
        Micro::stream(results, static_cast<char*>(args.out) + here * element, width * element);
      } else {
        write_run(from, width, offsets[v], row_scales[v], columns, bias[v], args.out_type, args.out, here);
      }
    }
  }

  // The output rows of a panel are far apart: hardware prefetchers do not follow them.
  void prefetch_out(int64_t vector_row, int64_t batch, int64_t n0, int64_t width) const {
    const int64_t element = element_bytes(args.out_type), row0 = vector_row * args.a.vector_length;
    const int64_t rows = lesser(args.a.vector_length, args.a.rows - row0);
    const char* to = static_cast<const char*>(args.out) + ((batch * args.a.rows + row0) * args.n + n0) * element;
    for (int64_t v = 0; v < rows; ++v, to += args.n * element) {
      for (int64_t byte = 0; byte < width * element; byte += 64) __builtin_prefetch(to + byte, 1);
    }
  }

  // Nonzeros per chunk: a row is split into equal chunks of whole blocks.
  int64_t chunk_of(int64_t count) const {
    const int64_t chunks = (count + kMostWhole - 1) / kMostWhole;
    return chunks < 2 ? kMostWhole : ((count + chunks - 1) / chunks + args.a.stride - 1) / args.a.stride * args.a.stride;
  }

  // Whether the sums of a vector row are not split.
  bool is_whole(int64_t vector_row) const {
    return args.a.digits() * args.b.digits() == 1 && args.a.row_end[vector_row] - args.a.row_start[vector_row] <= kMostWhole &&
           (vector_row + 1) * args.a.vector_length <= args.a.rows;
  }

  // Vector rows [first, last): results to the output, or as float32, or int32 to be scaled later, to rows of kColumns.
  void run(const uint8_t* panel, int64_t first, int64_t last, int64_t batch, int64_t n0, int64_t width, float* floats) const {
    const int64_t v = args.a.vector_length;
    for (int64_t r = first, until; r < last; r = until) {
      float* const buffer = floats ? floats + (r - first) * v * kColumns : nullptr;
      until = r;
      if constexpr (Micro::kWrites) {
        const Out type = type_of(floats);
        if (type == Out::kFloat32 || type == Out::kInt32) {
          while (until < last && is_whole(until)) ++until;
        }
        if (until > r) {
          const auto& scales = args.scales;
          const float* const row_scales = scales.rows ? scales.rows + batch * scales.row_batch : nullptr;
          const float* const column_scales = scales.columns ? scales.columns + batch * scales.column_batch + n0 : kOnes;
          float* const out = floats ? buffer : static_cast<float*>(args.out) + (batch * args.a.rows + r * v) * args.n + n0;
          const WholeRows rows{args.a, panel, part_bytes(), width, shift_of(0, 0), type == Out::kFloat32, row_scales, column_scales,
                               scales.bias, floats ? kColumns : args.n, !floats && streams, sums, scratch};
          Micro::whole(rows, r, until, out);
          continue;
        }
      }
      run_split(panel, until++, batch, n0, width, buffer);
    }
  }

  void run_split(const uint8_t* panel, int64_t vector_row, int64_t batch, int64_t n0, int64_t width, float* floats) const {
    const int64_t begin = args.a.row_start[vector_row], end = args.a.row_end[vector_row];
    const int planes = args.a.digits() * args.b.digits();
    const bool direct = planes == 1 && (args.out_type == Out::kInt32 || end - begin <= kExactRun);
    if (begin == end) std::memset(sums, 0, static_cast<size_t>(planes * row_values()) * sizeof(int32_t));
    if (!direct) std::memset(totals, 0, static_cast<size_t>(row_values()) * sizeof(int64_t));
    const int64_t chunk = chunk_of(end - begin);
    int64_t unfolded = 0;
    for (int64_t at = begin; at < end; at += chunk) {
      multiply(panel, width, at, lesser(chunk, end - at), unfolded == 0);
      unfolded += chunk;
      if (!direct && unfolded + chunk > kExactRun && at + chunk < end) {
        fold();
        unfolded = 0;
      }
    }
    if (direct) {
      write(sums, vector_row, batch, n0, width, floats);
    } else {
      fold();
      write(totals, vector_row, batch, n0, width, floats);
    }
  }

  // For an output (n, rows): results of several vector rows, whole cache lines of a row of the output, are turned at once.
  void run_turned(const uint8_t* panel, int64_t r0, int64_t r1, int64_t n0, int64_t width) const {
    alignas(64) float results[kTurnedRows * kColumns];
    const int64_t v = args.a.vector_length, most = kTurnedRows / v;
    for (int64_t first = r0; first < r1; first += most) {
      const int64_t last = lesser(first + most, r1), rows = lesser(last * v, args.a.rows) - first * v;
      const int64_t at = n0 * args.a.rows + first * v;
      if (kLanes < 16 && !is_16_bit()) {
        const float* const to = static_cast<const float*>(args.out) + at;
        for (int64_t j = 0; j < width; ++j) {  // far apart: hardware prefetchers do not follow them
          for (int64_t i = 0; i < rows; i += 16) __builtin_prefetch(to + j * args.a.rows + i, 1, 2);
        }
      }
      run(panel, first, last, 0, n0, width, results);
      const auto& scales = args.scales;
      const TurnedScales by{scales.rows ? scales.rows + first * v : kOnes, scales.columns ? scales.columns + n0 : kOnes,
                            scales.bias ? scales.bias + first * v : kZeros};
      const auto turn = [&](auto* to) {
        if (scales_turned()) store_turned<true>(results, kColumns, rows, width, to + at, args.a.rows, by);
        else store_turned<false>(results, kColumns, rows, width, to + at, args.a.rows, by);
      };
      if (!is_16_bit()) turn(static_cast<float*>(args.out));
      else if (args.out_type == Out::kFloat16) turn(static_cast<Float16*>(args.out));
      else turn(static_cast<BFloat16*>(args.out));
    }
  }

  // A vector row of 16-bit floats, which float32 results are rounded to.
  void run_16_bit(const uint8_t* panel, int64_t vector_row, int64_t batch, int64_t n0, int64_t width) const {
    alignas(64) float results[magicube::kMaxVector * kColumns];
    alignas(64) uint16_t rounded[kColumns];
    const int64_t row0 = vector_row * args.a.vector_length, rows = lesser(args.a.vector_length, args.a.rows - row0);
    run(panel, vector_row, vector_row + 1, batch, n0, width, results);
    for (int64_t v = 0; v < rows; ++v) {
      const int64_t at = (batch * args.a.rows + row0 + v) * args.n + n0;
      if (streams && width * 2 % 64 == 0) {
        store_floats(results + v * kColumns, width, args.out_type, rounded, 0);
        Micro::stream(rounded, static_cast<uint16_t*>(args.out) + at, width * 2);
      } else {
        store_floats(results + v * kColumns, width, args.out_type, args.out, at);
      }
    }
  }

  void run_rows(const uint8_t* panel, int64_t r0, int64_t r1, int64_t batch, int64_t n0, int64_t width) const {
    if (args.turned) return run_turned(panel, r0, r1, n0, width);
    if (!streams) prefetch_out(r0, batch, n0, width);
    for (int64_t r = r0; r < r1; ++r) {
      if (!streams && r + 1 < r1) prefetch_out(r + 1, batch, n0, width);
      is_16_bit() ? run_16_bit(panel, r, batch, n0, width) : run(panel, r, r + 1, batch, n0, width, nullptr);
    }
  }
};

// Whether results are stored past the caches, so that no cache line is read before it is written.
template <class Micro>
bool streams_out(const SpmmArgs& args) {
  const int64_t row_bytes = args.n * element_bytes(args.out_type);
  return Micro::kStreams && !args.turned && reinterpret_cast<uintptr_t>(args.out) % 64 == 0 && row_bytes % 64 == 0 &&
         row_bytes * args.a.rows * args.batch >= Micro::kStreamBytes;
}

constexpr int64_t kEvenTickets = 8;      // of a thread, which then ends at about the same time as the others
constexpr int64_t kNearBytes = 5 << 17;  // of panels, which stay in L2

// Panels of one call, numbered through the batch.
template <class Micro>
struct SpmmPanels {
  const SpmmArgs& args;
  ThreadGroup& group;
  uint8_t* staged;  // (staged panels, digits of B, 1 + K, 64)
  SpmmRow<Micro> row;

  int64_t columns() const { return Micro::kColumns * args.parts; }
  int64_t across() const { return (args.n + columns() - 1) / columns(); }
  uint8_t* panel(int64_t slot) const { return staged + slot * magicube::spmm_panel_bytes(args) + kPanel; }  // of row 0
  bool quantizes() const { return Micro::kQuantizesPanels && args.columns.reals; }

  void quantize_columns(int64_t column, int64_t count, uint8_t* to) const {
    quantize_rows(args.columns, column, count, args.a.columns_total, 0, reinterpret_cast<int8_t*>(to), args.b.run_bytes,
                  const_cast<float*>(args.scales.columns) + column);
  }

  // The columns of panels [first, first + count); false if the call is over.
  bool quantize(int64_t first, int64_t count) const {
    const int64_t begin = first * columns(), end = lesser(args.n, (first + count) * columns());
    auto* const ints = const_cast<uint8_t*>(args.b.data);
    const int64_t most = rows_at_once(args.a.columns_total);
    for (int64_t i = begin + group.ticket() * most; i < end; i = begin + group.ticket() * most) {
      quantize_columns(i, lesser(most, end - i), ints + (i - begin) * args.b.run_bytes);
    }
    return group.barrier();
  }

  // Rows [k0, k1) of a panel; with the first ones the row that padding columns multiply by zero.
  void stage_rows(int64_t slot, int64_t index, int64_t k0, int64_t k1) const {
    const int64_t n0 = index % across() * columns(), width = lesser(columns(), args.n - n0);
    const int64_t from = quantizes() ? slot * columns() : n0;
    const uint8_t* const data = args.b.data + index / across() * args.b.batch_bytes;
    const uint8_t flip = Micro::kOffset && args.b.is_signed ? 0x80 : 0;
    if constexpr (Micro::kTurns) {
      if (args.b.bits == 8 && args.b.runs_along_inner && k1 - k0 == kStagedRows) {
        if constexpr (Micro::kParts == 1) {
          if (k0 == 0) std::memset(panel(slot) - kPanel, 0, kPanel);
          return Micro::turn(data + from * args.b.run_bytes + k0, args.b.run_bytes, width, flip, panel(slot) + k0 * kPanel);
        }
        for (int64_t part = 0, first = 0; first < width; ++part, first += Micro::kColumns) {
          uint8_t* const to = panel(slot) + part * row.part_bytes();
          if (k0 == 0) std::memset(to - kPanel, 0, kPanel);
          Micro::turn(data + (from + first) * args.b.run_bytes + k0, args.b.run_bytes, lesser(Micro::kColumns, width - first),
                      args.b.is_signed, to + k0 * kPanel);
        }
        return;
      }
    }
    constexpr int64_t kDigit = kStagedRows * row.kColumns;
    alignas(64) uint8_t bytes[magicube::kMaxDigits * kDigit];
    stage(args.b, data, !args.b.runs_along_inner, k0, k1 - k0, from, width, flip, bytes, columns(), kDigit);
    for (int d = 0; d < args.b.digits(); ++d) {
      const bool is_signed = args.b.is_signed && d == args.b.digits() - 1;
      for (int64_t part = 0; part < args.parts; ++part) {
        uint8_t* const to = panel(slot) + (d * args.parts + part) * row.part_bytes();
        if (k0 == 0) std::memset(to - kPanel, 0, kPanel);
        Micro::place(bytes + d * kDigit + part * Micro::kColumns, columns(), k1 - k0, is_signed, to + k0 * kPanel);
      }
    }
  }

  // A whole panel by this thread, in buffers of its own: a panel, and its integers.
  void run_alone(int64_t index, uint8_t* own) const {
    const int64_t k = args.a.columns_total, n0 = index % across() * columns(), width = lesser(columns(), args.n - n0);
    SpmmArgs mine = args;
    if (quantizes()) {
      uint8_t* const ints = own + magicube::spmm_panel_bytes(args);
      for (int64_t i = 0, most = rows_at_once(k); i < width; i += most) {
        quantize_columns(n0 + i, lesser(most, width - i), ints + i * args.b.run_bytes);
      }
      mine.b.data = ints;
    }
    const SpmmPanels alone{mine, group, own, row};
    for (int64_t k0 = 0; k0 < k; k0 += kStagedRows) alone.stage_rows(0, index, k0, lesser(k0 + kStagedRows, k));
    row.run_rows(alone.panel(0), 0, args.a.vector_rows, index / across(), n0, width);
  }

  // Panels [first, first + count); false if the call is over.
  bool run(int64_t first, int64_t count) const {
    const int64_t k = args.a.columns_total, rows = args.a.vector_rows;
    const int64_t pieces = (k + kStagedRows - 1) / kStagedRows, tickets = (rows + kTicketRows - 1) / kTicketRows;
    if constexpr (Micro::kQuantizesPanels) {
      if (quantizes() && !quantize(first, count)) return false;
    }
    for (int64_t t = group.ticket(); t < count * pieces; t = group.ticket()) {
      const int64_t k0 = t % pieces * kStagedRows;
      stage_rows(t / pieces, first + t / pieces, k0, lesser(k0 + kStagedRows, k));
    }
    if (!group.barrier()) return false;
    // With all panels near, rows of A are read once, and those of the output are written as a whole: by one thread.
    const bool together = tickets >= kEvenTickets * group.size() && count * magicube::spmm_panel_bytes(args) <= kNearBytes;
    for (int64_t t = group.ticket(); t < (together ? 1 : count) * tickets; t = group.ticket()) {
      const int64_t r0 = t % tickets * kTicketRows, begin = t / tickets;
      for (int64_t slot = begin; slot < (together ? count : begin + 1); ++slot) {
        const int64_t index = first + slot, n0 = index % across() * columns();
        row.run_rows(panel(slot), r0, lesser(r0 + kTicketRows, rows), index / across(), n0, lesser(columns(), args.n - n0));
      }
    }
    if constexpr (Micro::kStreams) Micro::finish_streams();
    return group.barrier();
  }
};

template <class Micro>
void spmm_panels(const SpmmArgs& args, ThreadGroup& group) {
  static_assert(Micro::kScratchBytes % 64 == 0, "what follows is aligned");
  uint8_t* const local = group.local();
  auto* const totals = reinterpret_cast<int64_t*>(local + Micro::kScratchBytes);
  auto* const sums = reinterpret_cast<int32_t*>(totals + int64_t{args.a.vector_length} * SpmmRow<Micro>::kColumns);
  const SpmmPanels<Micro> work{args, group, group.shared(), SpmmRow<Micro>{args, local, streams_out<Micro>(args), sums, totals}};
  const int64_t panels = work.across() * args.batch;
  int64_t alone = 0;
  if constexpr (Micro::kQuantizesPanels) {
    if (group.size() > 1 && magicube::spmm_own_bytes(args, work.columns()) > 0) {
      auto* const own = reinterpret_cast<uint8_t*>(sums + work.row.row_values() * args.a.digits() * args.b.digits());
      alone = panels / group.size() * group.size();  // as many for each thread
      for (int64_t t = group.ticket(); t < alone; t = group.ticket()) work.run_alone(t, own);
      if constexpr (Micro::kStreams) Micro::finish_streams();
      if (alone < panels && !group.barrier()) return;
    }
  }
  for (int64_t first = alone; first < panels; first += args.staged_panels) {
    if (!work.run(first, lesser(args.staged_panels, panels - first))) return;
  }
}

// Quantize the columns of B into the shared buffer, behind the panels; `found`: the arguments of their product. False if the
// call is over.
inline bool quantize_columns(const SpmmArgs& args, ThreadGroup& group, SpmmArgs& found) {
  found = args;
  const int64_t pitch = magicube::spmm_row_bytes(args);
  found.columns.reals = nullptr;
  auto* const ints = group.shared() + magicube::spmm_shared_bytes(found);
  auto* const scales = reinterpret_cast<float*>(ints + args.n * pitch);
  const int64_t most = rows_at_once(args.a.columns_total);
  for (int64_t i = group.ticket() * most; i < args.n; i = group.ticket() * most) {
    quantize_rows(args.columns, i, lesser(most, args.n - i), args.a.columns_total, 0, reinterpret_cast<int8_t*>(ints + i * pitch), pitch, scales + i);
  }
  found.b.data = ints;
  found.b.run_bytes = pitch;
  found.scales.columns = scales;
  return group.barrier();
}

template <class Micro>
void spmm(const SpmmArgs& args, ThreadGroup& group) {
  if (args.columns.reals) {
    SpmmArgs found;
    if constexpr (Micro::kQuantizesPanels) {
      if (!has_few_columns(args) && args.batch == 1) {  // panel by panel: their integers stay in L2
        found = args;
        found.columns.reals = nullptr;
        uint8_t* const ints = group.shared() + magicube::spmm_shared_bytes(found);
        found.b.data = ints;
        found.b.run_bytes = magicube::spmm_row_bytes(args);
        found.scales.columns = reinterpret_cast<float*>(ints + args.n * found.b.run_bytes);
        found.columns.reals = args.columns.reals;
        return spmm_panels<Micro>(found, group);
      }
    }
    if (quantize_columns(args, group, found)) spmm<Micro>(found, group);
    return;
  }
  if constexpr (Micro::kFew) {
    if (has_few_columns(args)) return SpmmFew<Micro>{args, group}.run();
  }
  spmm_panels<Micro>(args, group);
}

}  // namespace
