// Dense product: C (rows x n) = A (rows x inner) * B (inner x n, packed), exact in int32, for int8 or quantized float32 rows.
//
// Rows come in blocks of Product::kBlockRows per thread. The threads stage the digits of their blocks, quantized if A is float32, then
// multiply blocks by panels with the tile of the instruction set, and write each tile in the output type. Nibbles of B are
// unpacked in registers: sum a v = sum a (v + 8) - 8 sum a. With group scales the int32 sums of a group are scaled in float32.
#pragma once

#include "engine.hpp"
#include "epilogue.hpp"
#include "quantize.hpp"

namespace {  // compiled once per instruction set

using magicube::DenseArgs;
using magicube::kPanel;
using magicube::kQuad;
using magicube::PackArgs;
using magicube::PackedRight;

// Four rows of a panel, interleaved. Separate function: compilers honor `restrict` on parameters.
inline void interleave_rows(const int8_t* __restrict k0, const int8_t* __restrict k1, const int8_t* __restrict k2,
                            const int8_t* __restrict k3, int64_t columns, int32_t* __restrict out, int32_t* __restrict sums) {
  for (int64_t j = 0; j < columns; ++j) {
    out[j] = static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint8_t>(k0[j])) | static_cast<uint32_t>(static_cast<uint8_t>(k1[j])) << 8 |
                                  static_cast<uint32_t>(static_cast<uint8_t>(k2[j])) << 16 | static_cast<uint32_t>(static_cast<uint8_t>(k3[j])) << 24);
    sums[j] += k0[j] + k1[j] + k2[j] + k3[j];
  }
}

// A panel of contiguous rows.
inline void pack_rows(const PackArgs& args, int64_t column, int64_t columns, int32_t* out, int32_t* sums) {
  static const int8_t kZeros[kPanel] = {};
  for (int64_t k = 0; k < args.rows; k += kQuad, out += kPanel) {
    const int8_t* rows[kQuad];
    for (int i = 0; i < kQuad; ++i) rows[i] = k + i < args.rows ? args.digits + (k + i) * args.row_elements + column : kZeros;
    if (columns == kPanel) interleave_rows(rows[0], rows[1], rows[2], rows[3], kPanel, out, sums);
    else interleave_rows(rows[0], rows[1], rows[2], rows[3], columns, out, sums);
  }
}

// A panel of contiguous columns, in pieces that stay in L1.
inline void pack_columns(const PackArgs& args, int64_t column, int64_t columns, int32_t* out, int32_t* sums) {
  constexpr int64_t kPiece = 64;
  for (int64_t k = 0; k < args.rows; k += kPiece, out += kPiece / kQuad * kPanel) {
    const int64_t count = lesser(kPiece, args.rows - k);
    for (int64_t j = 0; j < columns; ++j) {
      const int8_t* const from = args.digits + (column + j) * args.column_elements + k;
      alignas(64) int8_t piece[kPiece] = {};
      std::memcpy(piece, from, static_cast<size_t>(count));
      int32_t sum = 0;
      for (int64_t i = 0; i < kPiece; ++i) sum += piece[i];
      sums[j] += sum;
      for (int64_t q = 0; q * kQuad < count; ++q) std::memcpy(out + q * kPanel + j, piece + q * kQuad, kQuad);
    }
  }
}

inline void pack_digits(const PackArgs& args, ThreadGroup& group) {
  const int64_t panels = (args.columns + kPanel - 1) / kPanel, quads = (args.rows + kQuad - 1) / kQuad;
  for (int64_t panel = group.ticket(); panel < panels; panel = group.ticket()) {
    const int64_t column = panel * kPanel, columns = lesser(kPanel, args.columns - column);
    auto* const out = reinterpret_cast<int32_t*>(args.packed) + panel * quads * kPanel;
    if (columns < kPanel && quads > 0) std::memset(out, 0, static_cast<size_t>(quads * kPanel) * sizeof(int32_t));
    std::memset(args.column_sums + column, 0, kPanel * sizeof(int32_t));
    (args.column_elements == 1 ? pack_rows : pack_columns)(args, column, columns, out, args.column_sums + column);
  }
}

template <class Digit>
int32_t sum_of(const Digit* __restrict digits, int64_t count, int offset) {
  int32_t sum = 0;
  for (int64_t k = 0; k < count; ++k) sum += digits[k] - offset;
  return sum;
}

constexpr int64_t kTogether = 4;  // rows that are staged at a time

// What is split off from the digits of a quad of k, of one of kTogether rows.
struct Excess {
  uint32_t at;  // kTogether times the quad of its chunk, and the row
  int8_t digits[kQuad];
};

// Parts of k, each of one group and of so many quads at most.
struct Chunks {
  static constexpr int64_t kMost = 64;
  int64_t quads, group;  // quads of a group, or all of them

  int64_t of_group() const { return (group + kMost - 1) / kMost; }
  int64_t count() const { return of_group() * (quads ? (quads + group - 1) / group : 0); }
  int64_t first(int64_t chunk) const { return chunk / of_group() * group + chunk % of_group() * kMost; }
  int64_t end(int64_t chunk) const {  // the last group may end early
    return lesser(quads, lesser(first(chunk) + kMost, (chunk / of_group() + 1) * group));
  }
};

// What was split off from every kTogether rows: where each chunk starts, then all of it.
struct ExcessLists {
  uint32_t* words;
  int64_t step, starts, chunk;  // words of kTogether rows, those before their lists; the first chunk to be read

  ExcessLists from(int64_t row, int64_t at) const { return {words + row / kTogether * step, step, starts, at}; }
  uint32_t* start(int64_t row) const { return words + row / kTogether * step + chunk; }
  Excess* list(int64_t row) const { return reinterpret_cast<Excess*>(words + row / kTogether * step + starts); }
};

// Rows of digits as a product reads them: sums of each row and group, and what is split off.
template <class Product>
class StagedRows {
 public:
  using Digit = typename Product::Digit;

  // `memory`: magicube::staged_bytes().
  StagedRows(int8_t* memory, int64_t rows, const PackedRight& right, bool has_sums)
      : right_(right),
        pitch_(magicube::digit_pitch(right.inner)),
        groups_(right.groups()),
        has_sums_(has_sums || Product::kRowOffset != 0),
        chunks_{(right.inner + kQuad - 1) / kQuad, right.group ? right.group / kQuad : (right.inner + kQuad - 1) / kQuad},
        digits_(reinterpret_cast<Digit*>(memory)) {
    const int64_t fours = (rows + kTogether - 1) / kTogether, starts = (chunks_.quads ? chunks_.count() + 2 : 0) / 2 * 2;
    auto* const words = reinterpret_cast<uint32_t*>(digits_ + fours * kTogether * pitch_);
    lists_ = {words, starts + chunks_.quads * kTogether * 2, starts, 0};
    sums_ = reinterpret_cast<int32_t*>(Product::kSplits ? words + fours * lists_.step : words);
  }

  Digit* row(int64_t r) const { return digits_ + r * pitch_; }
  const int32_t* sums(int64_t r) const { return sums_ + r * groups_; }

  // To be called when the digits of up to kTogether rows from `first` on, a multiple of it, are there.
  void finish(int64_t first, int64_t rows) const {
    for (int64_t r = first; has_sums_ && r < first + rows; ++r) sum_groups(row(r), sums_ + r * groups_);
    if constexpr (Product::kSplits) {
      for (int64_t r = first; r < first + rows; ++r) std::memset(row(r) + right_.inner, 0, kQuad);
      const ExcessLists lists = lists_.from(first, 0);
      Product::split(row(first), pitch_, rows, chunks_, lists.start(0), lists.list(0));
    }
  }

  // Integer sums of rows from `first` on times a group of a panel, kPanel for each row.
  void multiply(int64_t first, int64_t rows, const int8_t* panel, int64_t g, int64_t steps, int64_t columns,
                const int32_t* column_sums, int32_t* sums) const {
    const Digit* const digits = row(first) + g * right_.group;
    const int count = static_cast<int>(rows), width = static_cast<int>(columns);
    if constexpr (Product::kOffset != 0) {
      alignas(64) int32_t start[kPanel];
      for (int j = 0; j < kPanel; ++j) {  // accumulators may wrap; the result fits
        start[j] = static_cast<int32_t>(0u - static_cast<uint32_t>(column_sums[j]) * static_cast<uint32_t>(Product::kOffset));
      }
      Product::multiply(digits, pitch_, count, panel, steps, width, start, sums);
    } else {
      for (int64_t r = 0; r < rows; ++r) {
        const int32_t start = Product::kRowOffset ? -Product::kRowOffset * this->sums(first + r)[g] : 0;
        for (int j = 0; j < kPanel; ++j) sums[r * kPanel + j] = start;
      }
      if constexpr (Product::kSplits) {
        Product::multiply(digits, pitch_, count, panel, steps, width, sums, lists_.from(first, g * chunks_.of_group()));
      } else {
        Product::multiply(digits, pitch_, count, panel, steps, width, sums);
      }
    }
  }

 private:
  void sum_groups(const Digit* digits, int32_t* sums) const {
    const int64_t length = right_.group ? right_.group : right_.inner;
    for (int64_t g = 0; g < groups_; ++g) {
      sums[g] = sum_of(digits + g * length, lesser(length, right_.inner - g * length), Product::kOffset);
    }
  }

  const PackedRight right_;
  const int64_t pitch_, groups_;
  const bool has_sums_;
  const Chunks chunks_;
  Digit* const digits_;
  ExcessLists lists_;
  int32_t* sums_;  // (rows, groups)
};

// Rows of int8 digits times nibbles: the tiles of Isa, on parts of k that stay in L1.
template <class Isa>
struct NibbleProduct {
  using Micro = typename Isa::Micro;
  using Digit = int8_t;
  static constexpr Digit kOffset = 0;
  static constexpr int kRowOffset = 8;
  static constexpr bool kSplits = false;
  static constexpr int kStep = 2 * kQuad;  // k in kPanel * kQuad bytes
  static constexpr int64_t kBlockRows = magicube::kDirectRows;

  // sums (rows, kPanel) += a (b + 8).
  static void multiply(const Digit* a, int64_t pitch, int64_t rows, const int8_t* b, int64_t steps, int columns, int32_t* sums) {
    constexpr int64_t kMost = 64;
    for (; steps > 0; steps -= kMost, a += kMost * kStep, b += kMost * kPanel * kQuad) {
      for (int64_t r = 0; r < rows; r += Isa::kRows) {
        tile<Isa::kRows>(lesser(Isa::kRows, rows - r), a + r * pitch, pitch, b, lesser(kMost, steps), columns, sums + r * kPanel);
      }
    }
  }

 private:
  template <int Rows>
  static void tile(int64_t rows, const Digit* a, int64_t pitch, const int8_t* b, int64_t steps, int columns, int32_t* sums) {
    if constexpr (Rows > 1) {
      if (rows < Rows) return tile<Rows - 1>(rows, a, pitch, b, steps, columns, sums);
    }
    Isa::template tile<Rows>(a, pitch, b, steps, columns, sums);
  }
};

inline void multiply_row(float* __restrict x, const float* __restrict factors, int64_t count) {
  for (int64_t k = 0; k < count; ++k) x[k] *= factors[k];
}

// Digits of row i, and its scale if the row is floats. `scratch` holds a row of float32 if the columns have factors.
template <class Digit>
void stage_row(const DenseArgs& args, int64_t i, int offset, Digit* __restrict digits, float* scale, float* scratch) {
  const auto& left = args.left;
  const int64_t inner = args.right.inner;
  if (!left.reals) {
    const int8_t* __restrict ints = left.ints + i * left.row_elements;
    for (int64_t k = 0; k < inner; ++k) digits[k] = static_cast<Digit>(ints[k] + offset);
    return;
  }
  if (left.factors) {
    load_floats(left.reals, i * left.row_elements, inner, left.reals_type, scratch);
    multiply_row(scratch, left.factors, inner);
    *scale = quantize_row({nullptr, scratch, inner, left.scale, left.low, left.high}, 0, inner, offset, digits);
    return;
  }
  *scale = quantize_row(left, i, inner, offset, digits);
}

// Results of a row of a tile. The scales of absent columns are 1, the bias -0.
template <bool ColumnsFirst, class Total>
void scale_sums(const Total* __restrict sums, int64_t count, float row, const float* __restrict columns,
                const float* __restrict bias, float* __restrict out) {
  for (int64_t j = 0; j < count; ++j) {
    const float total = static_cast<float>(sums[j]);
    out[j] = (ColumnsFirst ? total * columns[j] * row : total * row * columns[j]) + bias[j];
  }
}

#ifdef __AVX2__
inline FloatVector vector_of(const float* from) { return load_vector(from); }
inline FloatVector vector_of(const int32_t* from) {
  int32_t __attribute__((vector_size(4 * kLanes))) integers;
  std::memcpy(&integers, from, sizeof integers);
  return __builtin_convertvector(integers, FloatVector);
}

// As scale_sums(), of a whole panel, past the caches.
template <bool ColumnsFirst, class Total>
void stream_sums(const Total* sums, float row, const float* columns, const float* bias, float* out) {
  for (int64_t j = 0; j < kPanel; j += kLanes) {
    const FloatVector total = vector_of(sums + j), scales = load_vector(columns + j);
    stream_vector(out + j, (ColumnsFirst ? total * scales * row : total * row * scales) + load_vector(bias + j));
  }
}
#endif

// totals += sums * scales, and + minima * row_sum. Separate functions: compilers honor `restrict` on parameters.
inline void add_group(const int32_t* __restrict sums, const float* __restrict scales, float* __restrict totals) {
  for (int j = 0; j < kPanel; ++j) totals[j] += static_cast<float>(sums[j]) * scales[j];
}

inline void add_minima(float row_sum, const float* __restrict minima, float* __restrict totals) {
  for (int j = 0; j < kPanel; ++j) totals[j] += row_sum * minima[j];
}

inline void add_floats(const float* __restrict from, int64_t count, float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) out[i] += from[i];
}

// A block of rows times one panel.
template <class Product>
class DenseTask {
 public:
  DenseTask(const DenseArgs& args, int64_t row, int64_t rows, int64_t column)
      : args_(args),
        row_(row),
        rows_(rows),
        column_(column),
        columns_(lesser(kPanel, args.right.n - column)),
        streams_(columns_ == kPanel && !args.adds && streams_rows(args)) {
    for (int64_t j = 0; j < columns_; ++j) {
      scales_[j] = args.scales.columns ? args.scales.columns[column + j] : 1.0f;
      bias_[j] = args.scales.bias ? args.scales.bias[column + j] : -0.0f;
    }
  }

  // The block begins at row `first` of those staged; `scales`: of its first row.
  void run(const StagedRows<Product>& staged, int64_t first, const float* scales) {
    const int64_t steps = (args_.right.inner + Product::kStep - 1) / Product::kStep;
    const int8_t* const panel = args_.right.packed + column_ * steps * kQuad;
    if (args_.right.group) return run_groups(staged, first, steps, panel, scales);
    alignas(64) int32_t sums[Product::kBlockRows * kPanel];
    staged.multiply(first, rows_, panel, 0, steps, columns_, args_.right.column_sums + column_, sums);
    for (int64_t r = 0; r < rows_; ++r) write_row(sums + r * kPanel, r, scales);
    if (args_.column_step != 1) write_columns();
  }

 private:
  // As run(): each group by a product of its own.
  void run_groups(const StagedRows<Product>& staged, int64_t row, int64_t steps, const int8_t* panel, const float* scales) {
    const PackedRight& right = args_.right;
    const int64_t groups = right.groups(), step = right.group / Product::kStep, first = column_ / kPanel * groups * kPanel;
    alignas(64) int32_t sums[Product::kBlockRows * kPanel];
    alignas(64) float totals[Product::kBlockRows * kPanel];
    std::memset(totals, 0, static_cast<size_t>(rows_ * kPanel) * sizeof(float));
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t here = lesser(step, steps - g * step), at = first + g * kPanel;
      staged.multiply(row, rows_, panel + g * step * kPanel * kQuad, g, here, columns_, right.column_sums + at, sums);
      for (int64_t r = 0; r < rows_; ++r) {
        add_group(sums + r * kPanel, right.group_scales + at, totals + r * kPanel);
        if (right.group_minima) {
          add_minima(static_cast<float>(staged.sums(row + r)[g]), right.group_minima + at, totals + r * kPanel);
        }
      }
    }
    for (int64_t r = 0; r < rows_; ++r) write_floats(totals + r * kPanel, r, scales);
    if (args_.column_step != 1) write_columns();
  }

  // Whether rows of float32 results are stored past the caches, in whole cache lines.
  static bool streams_rows(const DenseArgs& args) {
    return Product::Micro::kStreams && args.out_type == Out::kFloat32 && args.column_step == 1 && args.row_step % 16 == 0 &&
           reinterpret_cast<uintptr_t>(args.out) % 64 == 0 && args.rows * args.right.n * 4 >= magicube::kStreamBytes;
  }

  bool is_integer() const { return args_.out_type == Out::kInt32 || args_.out_type == Out::kInt64; }

  // Row r of the block: to the output if its rows are contiguous, else to block_.
  void write_row(const int32_t* sums, int64_t r, const float* scales) {
    const bool by_rows = args_.column_step == 1;
    const int64_t at = (row_ + r) * args_.row_step + column_;
    if (is_integer()) {
      if (by_rows) store_integers(sums, columns_, 0, args_.out_type, args_.out, at);
      else std::memcpy(block_ + r * kPanel, sums, static_cast<size_t>(columns_) * sizeof(int32_t));
      return;
    }
    write_floats(sums, r, scales);
  }

  // As write_row(), to a float type.
  template <class Total>
  void write_floats(const Total* sums, int64_t r, const float* scales) {
    const bool by_rows = args_.column_step == 1;
    const int64_t at = (row_ + r) * args_.row_step + column_;
    const float scale = args_.left.reals ? scales[r] : args_.scales.rows ? args_.scales.rows[row_ + r] : 1.0f;
#ifdef __AVX2__
    if (streams_ && args_.activation == magicube::Activation::kNone) {
      const auto streamed = args_.columns_first ? stream_sums<true, Total> : stream_sums<false, Total>;
      return streamed(sums, scale, scales_, bias_, static_cast<float*>(args_.out) + at);
    }
#endif
    const bool in_place = by_rows && args_.out_type == Out::kFloat32 && !streams_ && !args_.adds;
    float* const to = in_place ? static_cast<float*>(args_.out) + at : block_ + r * kPanel;
    const auto scaled = args_.columns_first ? scale_sums<true, Total> : scale_sums<false, Total>;
    scaled(sums, columns_, scale, scales_, bias_, to);
    activate(args_.activation, to, columns_);
    if (by_rows && args_.adds) add_floats(to, columns_, static_cast<float*>(args_.out) + at);
    else if (streams_) Product::Micro::stream(to, static_cast<float*>(args_.out) + at, columns_ * 4);
    else if (by_rows && !in_place) store_floats(to, columns_, args_.out_type, args_.out, at);
  }

  void write_columns() const {
    const bool copies = args_.out_type == Out::kInt32 || (args_.out_type == Out::kFloat32 && !args_.adds);
    if (copies && rows_ <= kFewRows) return copy_columns(static_cast<float*>(args_.out) + column_ * args_.column_step + row_);
    for (int64_t j = 0; j < columns_; ++j) {
      const int64_t at = (column_ + j) * args_.column_step + row_;
      if (is_integer()) {
        int32_t run[Product::kBlockRows];
        for (int64_t r = 0; r < rows_; ++r) std::memcpy(run + r, block_ + r * kPanel + j, sizeof run[r]);
        store_integers(run, rows_, 0, args_.out_type, args_.out, at);
      } else {
        float run[Product::kBlockRows];
        for (int64_t r = 0; r < rows_; ++r) run[r] = block_[r * kPanel + j];
        if (args_.adds) add_floats(run, rows_, static_cast<float*>(args_.out) + at);
        else store_floats(run, rows_, args_.out_type, args_.out, at);
      }
    }
  }

  // 32 bits each. Apart from write_columns(), whose calls for each column would take longer than a few rows.
  void copy_columns(float* out) const {
    for (int64_t j = 0; j < columns_; ++j, out += args_.column_step) {
      for (int64_t r = 0; r < rows_; ++r) std::memcpy(out + r, block_ + r * kPanel + j, sizeof *out);
    }
  }

  static constexpr int64_t kFewRows = 16;
  const DenseArgs& args_;
  const int64_t row_, rows_, column_, columns_;
  const bool streams_;  // results are stored past the caches
  float scales_[kPanel], bias_[kPanel];
  alignas(64) float block_[Product::kBlockRows * kPanel];  // results in 32 bits, integers too
};

template <class Product>
void dense_by(const DenseArgs& args, ThreadGroup& group) {
  const int64_t most = lesser(args.rows, Product::kBlockRows * group.size()), panels = (args.right.n + kPanel - 1) / kPanel;
  auto* const scales = reinterpret_cast<float*>(group.shared());
  auto* const memory = reinterpret_cast<int8_t*>(scales + (most + 15) / 16 * 16);
  const StagedRows<Product> staged(memory, most, args.right, args.right.group_minima != nullptr);
  for (int64_t first = 0; first < args.rows; first += most) {
    const int64_t rows = lesser(most, args.rows - first), tasks = (rows + Product::kBlockRows - 1) / Product::kBlockRows * panels;
    for (int64_t r0 = group.ticket() * kTogether; r0 < rows; r0 = group.ticket() * kTogether) {
      const int64_t count = lesser(kTogether, rows - r0);
      for (int64_t r = r0; r < r0 + count; ++r) {
        stage_row(args, first + r, Product::kOffset, staged.row(r), scales + r, reinterpret_cast<float*>(group.local()));
      }
      staged.finish(r0, count);
    }
    if (!group.barrier()) return;
    for (int64_t task = group.ticket(); task < tasks; task = group.ticket()) {
      const int64_t r = task / panels * Product::kBlockRows;
      DenseTask<Product> block(args, first + r, lesser(Product::kBlockRows, rows - r), task % panels * kPanel);
      block.run(staged, r, scales + r);
    }
    if constexpr (Product::Micro::kStreams) Product::Micro::finish_streams();
    if (!group.barrier()) return;
  }
}

template <class Product, class Nibbles>
void dense(const DenseArgs& args, ThreadGroup& group) {
  args.right.nibbles ? dense_by<NibbleProduct<Nibbles>>(args, group) : dense_by<Product>(args, group);
}

}  // namespace
