// The engine in portable C++: runs on every machine, and is the reference for the other two.
#include "attention.hpp"
#include "correct.hpp"
#include "dense.hpp"
#include "dense_to_sparse.hpp"
#include "digits.hpp"
#include "direct.hpp"
#include "estimate.hpp"
#include "quantize.hpp"
#include "sddmm.hpp"
#include "select.hpp"
#include "spmm.hpp"
#include "../../layout/column_order_search.cuh"

namespace {

struct Portable {
  static constexpr bool kOffset = false;
  static constexpr int kColumns = 64, kParts = 1;
  static constexpr int kChunkGroups = 32;
  static constexpr int kQuadBytes = kPanel * kQuad * 2;  // int16 quads, [column][k]
  static constexpr int64_t kScratchBytes = int64_t{kChunkGroups} * kQuadBytes;

  static constexpr bool kFew = false;
  static constexpr bool kStreams = false, kWrites = false, kTurns = false, kQuantizesPanels = false;
  static constexpr int64_t kStreamBytes = magicube::kStreamBytes;

  static void place(const uint8_t* bytes, int64_t, int64_t rows, bool, uint8_t* panel) {
    std::memcpy(panel, bytes, static_cast<size_t>(rows * kPanel));
  }

  static void stream(const void*, void*, int64_t) {}

  static void gather(const uint8_t* panel, const int32_t* columns, int groups, bool b_signed, uint8_t* quads) {
    auto* to = reinterpret_cast<int16_t*>(quads);
    for (int g = 0; g < groups; ++g, to += kPanel * kQuad) {
      for (int i = 0; i < kQuad; ++i) {
        const uint8_t* from = panel + int64_t{columns[g * kQuad + i]} * kPanel;
        for (int n = 0; n < kPanel; ++n) {
          to[n * kQuad + i] = b_signed ? static_cast<int8_t>(from[n]) : static_cast<int16_t>(from[n]);
        }
      }
    }
  }

  static void row_tile(const RowTile& s) {
    if (s.fresh) std::memset(s.sums, 0, static_cast<size_t>(s.rows) * kPanel * sizeof(int32_t));
    const int groups = static_cast<int>((s.count + kQuad - 1) / kQuad);
    gather(s.panel, s.columns, groups, s.b_signed, s.scratch);
    for (int g = 0; g < groups; ++g) {
      const auto* b = reinterpret_cast<const int16_t*>(s.scratch) + int64_t{g} * kPanel * kQuad;
      const int64_t at = int64_t{g * kQuad / s.stride} * s.stride * s.vector_length + g * kQuad % s.stride;
      for (int r = 0; r < s.rows; ++r) {
        const uint8_t* bytes = s.values + at + r * s.stride;
        int32_t a[kQuad];
        for (int i = 0; i < kQuad; ++i) a[i] = s.a_signed ? static_cast<int8_t>(bytes[i]) : int32_t{bytes[i]};
        int32_t* sum = s.sums + r * kPanel;
        for (int n = 0; n < kPanel; ++n) {
          const int32_t product = a[0] * b[n * 4] + a[1] * b[n * 4 + 1] + a[2] * b[n * 4 + 2] + a[3] * b[n * 4 + 3];
          sum[n] = static_cast<int32_t>(static_cast<uint32_t>(sum[n]) + static_cast<uint32_t>(product));
        }
      }
    }
  }

  using Dot = uint8_t;

  template <class Left, class Right>
  static void dots_of(const DotTile<Dot>& tile) {
    for (int i = 0; i < tile.rows; ++i) {
      for (int64_t j = 0; j < tile.count; ++j) {
        const auto* const a = reinterpret_cast<const Left*>(tile.x + i * tile.x_pitch);
        const auto* const b = reinterpret_cast<const Right*>(tile.y + tile.columns[j] * tile.y_pitch);
        int32_t sum = 0;
        for (int64_t k = 0, inner = tile.inner; k < inner; ++k) sum += a[k] * b[k];
        tile.out[i * tile.out_pitch + j] = sum;
      }
    }
  }

  static void dots(const DotTile<Dot>& tile) {
    if (tile.x_signed) tile.y_signed ? dots_of<int8_t, int8_t>(tile) : dots_of<int8_t, uint8_t>(tile);
    else tile.y_signed ? dots_of<uint8_t, int8_t>(tile) : dots_of<uint8_t, uint8_t>(tile);
  }
};

struct Doubles {
  using Vector = double __attribute__((vector_size(16)));
  static constexpr int kLanes = 2, kRows = 1;  // 8 accumulators

  static Vector zero() { return Vector{}; }
  static Vector load(const double* from) { return Vector{from[0], from[1]}; }
  static Vector load(const float* from) { return Vector{from[0], from[1]}; }
  static void store(double* to, Vector value) { to[0] = value[0], to[1] = value[1]; }
  static Vector broadcast(double value) { return Vector{value, value}; }
  static Vector abs(Vector value) { return Vector{__builtin_fabs(value[0]), __builtin_fabs(value[1])}; }
  static Vector add(Vector a, Vector b) { return a + b; }
  static Vector fma(Vector a, Vector b, Vector c) { return a * b + c; }
};

struct Floats {
  using Vector = float __attribute__((vector_size(16)));
  static constexpr int kLanes = 4, kRows = 1;  // 8 accumulators

  static Vector zero() { return Vector{}; }
  static Vector load(const float* from) { return Vector{from[0], from[1], from[2], from[3]}; }
  static void store(float* to, Vector value) { std::memcpy(to, &value, sizeof value); }
  static Vector broadcast(float value) { return Vector{value, value, value, value}; }
  static Vector abs(Vector value) { return value < 0 ? -value : value; }
  static Vector add(Vector a, Vector b) { return a + b; }
  static Vector fma(Vector a, Vector b, Vector c) { return a * b + c; }
};

struct Product {
  using Micro = Portable;
  using Digit = int8_t;
  static constexpr Digit kOffset = 0;
  static constexpr int kRowOffset = 0;
  static constexpr bool kSplits = false;
  static constexpr int kRows = 4, kStep = kQuad;
  static constexpr int64_t kBlockRows = magicube::kDirectRows;

  // sums (rows, kPanel) += a b.
  static void multiply(const Digit* a, int64_t pitch, int rows, const int8_t* b, int64_t quads, int columns, int32_t* sums) {
    for (int64_t q = 0; q < quads; ++q, a += kQuad, b += kPanel * kQuad) {
      for (int r = 0; r < rows; ++r) {
        const Digit* const left = a + r * pitch;
        int32_t* const sum = sums + r * kPanel;
        for (int j = 0; j < columns; ++j) {
          const int8_t* const right = b + j * kQuad;
          sum[j] += left[0] * right[0] + left[1] * right[1] + left[2] * right[2] + left[3] * right[3];
        }
      }
    }
  }
};

struct Nibbles {
  using Micro = Portable;
  static constexpr int kRows = 1;

  template <int Rows>
  static void tile(const int8_t* a, int64_t, const int8_t* b, int64_t steps, int columns, int32_t* sums) {
    for (int64_t i = 0; i < steps; ++i, a += 2 * kQuad, b += kPanel * kQuad) {
      for (int j = 0; j < columns; ++j) {
        for (int k = 0; k < kQuad; ++k) sums[j] += a[k] * (b[j * kQuad + k] & 15) + a[kQuad + k] * (b[j * kQuad + k] >> 4 & 15);
      }
    }
  }
};

struct Direct {
  using Doubles = ::Doubles;
  using Floats = ::Floats;
  using Product = ::Product;
};

}  // namespace

namespace magicube {
// Order of the columns of a matrix for kernels with a window of tiles, by the code of the GPU.
void order_columns(const ReorderArgs& args, ThreadGroup& group) {
  for (int64_t r = group.ticket(); r < args.rows; r = group.ticket()) {
    const RowColumns row{args.until + r * args.tiles * kPhase, args.tiles, args.group, args.window};
    int trial = 0, best = 0;
    for (int i = 0; i < kTrials; ++i) {
      const int cost = order_row(row, i, [](int, const int (&)[kPhase]) {});
      if (i == 0 || cost < best) trial = i, best = cost;
    }
    const int64_t* const first = args.first + r * kPhase;
    int64_t placed[kPhase] = {};
    order_row(row, trial, [&](int step, const int (&take)[kPhase]) {
      int64_t slot = int64_t{step} * kPhase;
      for (int i = 0; i < kPhase; ++i) {
        for (int j = 0; j < take[i]; ++j) args.slots[args.order[first[i] + placed[i]++]] = slot++;
      }
    });
  }
}

const Engine kPortable = {"portable", &spmm<Portable>, &spmm_transposed, &sddmm<Portable>, &attention<Portable>, &quantize, &digits, &compress,
                          &probe_right<Doubles>, &judge<Doubles>, &bound_sums<Doubles>, &pack_digits, &probe_digits<Doubles>,
                          &direct<Direct>, &dense<Product, Nibbles>, &split_residual, &magnitude_sums, &select_entries, &correct<Portable>, &is_structure_valid, Portable::kColumns, Portable::kParts, Portable::kScratchBytes, sizeof(Portable::Dot), int64_t{1} << 22};
}
