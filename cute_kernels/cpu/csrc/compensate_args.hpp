// Arguments of split.hpp, select.hpp and correct.hpp: steps of Algorithm 1 on float32.
#pragma once

#include "engine.hpp"

namespace magicube {

// Columns of a strip of a matrix that is read down its columns. Short pieces of rows are read at half the rate of whole ones.
constexpr int64_t kStripColumns = 2048, kLeastStrip = 512;

inline int64_t strip_columns(int64_t columns, int64_t threads) {
  const int64_t share = (columns / threads + 63) / 64 * 64;
  return share < kLeastStrip ? kLeastStrip : share < kStripColumns ? share : kStripColumns;
}

// float32 with contiguous rows.
struct FloatMatrix {
  const float* data;
  int64_t rows;
  int64_t columns;
  int64_t row_elements;  // from one row to the next

  const float* row(int64_t i) const { return data + i * row_elements; }
};

// Integers of a matrix and of what their rounding left over, each with its own scales.
struct SplitArgs {
  FloatMatrix x;
  int8_t* leading;   // (rows, columns)
  int8_t* residual;  // (rows, columns)
  double* scales;    // (2, slices): of the leading integers, of the residual ones
  double* sums;      // (slices,) of magnitudes, or null
  uint8_t* flags;    // one byte, zero on entry: kNonFinite
  double high;       // integer of the amax
  bool truncate;
  int scale_mode;
};

// Sums of magnitudes.
struct MagnitudeArgs {
  FloatMatrix x;
  double* rows;     // (rows,)
  double* columns;  // (columns,)
};

// Entries above a level, as SR-BCRS. Two calls: with `lengths` they are counted, without it they are written.
struct SelectArgs {
  FloatMatrix x;
  const float* levels;  // (slices,) or one; a slice is a row of x, or a column if `across`
  bool one_level;
  bool is_signed;       // entries are compared, not magnitudes
  bool across;          // vector rows are columns of x
  int vector_length;
  int64_t* lengths;     // (vector rows,) or null
  float* largest;       // (slices,) magnitudes of what is kept
  const double* scales;  // (slices,) or one
  bool one_scale;
  bool truncate;
  int stride;
  const int64_t* row_start;  // (vector rows + 1)
  int32_t* out_columns;      // -1 in the padding
  int8_t* out_values;        // [block][row of the vector][position in the stride], zero in the padding
  int64_t* row_sums;         // (vector rows, V)

  int64_t slices() const { return across ? x.columns : x.rows; }
  int64_t vector_rows() const { return (slices() + vector_length - 1) / vector_length; }
};

// out += (A B) * row scale * column scale.
struct CorrectArgs {
  SpmmArgs product;  // one matrix of one digit each, both scales given
  float* out;
  int64_t row_step;  // elements of the output from one row to the next, and from one column: one of the two is 1
  int64_t column_step;
};

inline int64_t split_shared_bytes(const SplitArgs& args) {  // sums and maxima of rows, scales of both integers
  return args.scale_mode == kScaleAll ? (args.x.rows * 12 + 2 * 8 + 63) / 64 * 64 : 0;
}
inline int64_t split_local_bytes(const SplitArgs& args) {  // a residual row
  return ((args.scale_mode == kScaleRows ? args.x.columns : kStripColumns) * 4 + 63) / 64 * 64;
}
inline int64_t select_local_bytes(const SelectArgs& args) {  // two masks
  return 2 * ((args.across ? kStripColumns : args.x.columns) + 63) / 64 * 64 + 64;
}
constexpr int64_t kTurnedRows = 16;  // results that fill a cache line of a column-major output
inline int64_t correct_local_bytes(const CorrectArgs& args, int64_t scratch_bytes) {  // and a block of results
  return spmm_local_bytes(args.product, scratch_bytes) + int64_t{kMaxVector} * kPanel * 4;
}

}  // namespace magicube
