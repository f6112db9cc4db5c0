// Dense matrix and mask to SR-BCRS: columns of the stored vectors, then their values block by block; scan of a structure.
#pragma once

#include "integers.hpp"

namespace {  // compiled once per instruction set

using magicube::CompressArgs;
using magicube::ThreadGroup;

// any: (columns,) bytes, whether the mask has an element of vector row r in the column.
inline void any_of_rows(const CompressArgs& args, int64_t r, uint8_t* __restrict any) {
  const int64_t first = r * args.vector_length, last = lesser(args.rows, first + args.vector_length);
  std::memcpy(any, args.mask + first * args.mask_row, static_cast<size_t>(args.columns));
  for (int64_t i = first + 1; i < last; ++i) {
    const uint8_t* __restrict mask = args.mask + i * args.mask_row;
    for (int64_t j = 0; j < args.columns; ++j) any[j] |= mask[j];
  }
}

template <class Element>
void fill_block(const CompressArgs& args, int64_t r, const int32_t* columns, int count, Element* out) {
  for (int v = 0; v < args.vector_length; ++v, out += args.stride) {
    const int64_t row = r * args.vector_length + v;
    int t = 0;
    if (row < args.rows) {
      const auto* values = reinterpret_cast<const Element*>(args.values + row * args.values_row_bytes);
      const uint8_t* mask = args.mask + row * args.mask_row;
      for (; t < count; ++t) out[t] = static_cast<Element>(values[columns[t]] & -int{mask[columns[t]]});
    }
    for (; t < args.stride; ++t) out[t] = 0;
  }
}

template <class Element>
void fill_row(const CompressArgs& args, int64_t r, uint8_t* any, int32_t* columns) {
  any_of_rows(args, r, any);
  int64_t kept = 0;
  for (int64_t j = 0; j < args.columns; ++j) {  // branch-free: every column is written, and counted if it is stored
    columns[kept] = static_cast<int32_t>(j);
    kept += any[j];
  }
  const int64_t start = args.row_start[r], end = args.row_start[r + 1];
  auto* out = reinterpret_cast<Element*>(args.out_values) + start * args.vector_length;
  for (int64_t t = 0; t < end - start; ++t) args.out_columns[start + t] = t < kept ? columns[t] : -1;
  for (int64_t t = 0; t < end - start; t += args.stride, out += args.stride * args.vector_length) {
    fill_block(args, r, columns + t, static_cast<int>(greater(0, lesser(args.stride, kept - t))), out);
  }
}

void compress(const CompressArgs& args, ThreadGroup& group) {
  constexpr int64_t kAtOnce = 1 << 14;  // elements per ticket
  const int64_t vector_rows = (args.rows + args.vector_length - 1) / args.vector_length;
  const int64_t step = greater(1, kAtOnce / greater(1, args.columns * args.vector_length));
  uint8_t* const any = group.local();
  auto* const columns = reinterpret_cast<int32_t*>(any + magicube::compress_mask_bytes(args.columns));
  for (int64_t at = group.ticket() * step; at < vector_rows; at = group.ticket() * step) {
    for (int64_t r = at; r < lesser(vector_rows, at + step); ++r) {
      if (args.lengths) {
        any_of_rows(args, r, any);
        int64_t kept = 0;
        for (int64_t j = 0; j < args.columns; ++j) kept += any[j];
        args.lengths[r] = kept;
      } else if (args.element_bytes == 1) {
        fill_row<uint8_t>(args, r, any, columns);
      } else {
        fill_row<uint16_t>(args, r, any, columns);
      }
    }
  }
}

// Whether a structure has every property that the kernels rely on. Inner loops are branch-free, so they vectorize.
bool is_structure_valid(const magicube::Structure& s) {
  int64_t at = 0;
  for (int64_t row = 0; row < s.vector_rows; ++row) {
    const int64_t end = s.row_end[row];
    if (s.row_start[row] != at || end < at || end > s.padded) return false;
    const int64_t next = (end + s.stride - 1) & -s.stride;
    if (next > s.padded) return false;
    int bad = 0;
    for (int64_t i = at + 1; i < end; ++i) bad |= s.columns[i] <= s.columns[i - 1];
    for (int64_t i = end; i < next; ++i) bad |= s.columns[i] != -1;
    if (bad || (end > at && (s.columns[at] < 0 || s.columns[end - 1] >= s.columns_total))) return false;
    at = next;
  }
  return at == s.padded;
}

}  // namespace
