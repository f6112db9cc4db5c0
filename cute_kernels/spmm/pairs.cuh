// SpMM: results of pairs of neighboring vector rows, written to the transpose of C in whole sectors of 32 bytes.
//
// Of 16-bit results and vectors of 8 rows, a lane has two rows of some columns: four lanes have 16 bytes of a column, and with the
// neighboring vector row 32.
#pragma once

#include "device/warpgroup.cuh"
#include "spmm/common.cuh"

namespace magicube {

// What a lane needs to scale its two rows of a vector row, and to write them to the transpose of C (batch, n, rows). kForm: as of
// write_rows; whole: all columns of the N tile exist, and all rows of both vector rows of a pair.
template <class C, RowStore kForm>
struct PairOutput {
  using S = SpmmShape<C>;
  using Out = typename C::Out;
  static_assert(S::kTileRows == 8 && S::kRowTiles == 1 && sizeof(Out) == 2, "a lane has two rows of 16-bit results");
  static constexpr int kSubs = S::Units::kSubs;
  static constexpr bool kWhole = kForm != RowStore::kPredicated;

  const SpmmOperands& at;
  Out* out;                // of the matrix of the batch
  const float* col_scale;  // of the first column of the lane, or null
  int64_t n0;
  int group, two;  // four lanes have the columns of a group; first of the two rows

  __device__ PairOutput(const SpmmOperands& operands, int64_t batch, int64_t n0, int lane)
      : at(operands), out(static_cast<Out*>(at.out) + batch * at.n * at.rows),
        col_scale(at.col_scale ? at.col_scale + batch * at.col_scale_batch + (n0 + lane / 4 * kSubs) * at.col_scale_stride : nullptr),
        n0(n0), group(lane / 4), two(lane % 4 * 2) {}
  // Column of unit u, from the first of its group on.
  __device__ static constexpr int column_of(int u) { return u / kSubs * 8 * kSubs + u % kSubs; }
  struct Rows {
    float scale[2], bias[2];
  };
  __device__ Rows rows_of(int64_t vector_row) const {
    Rows found;
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      const int64_t row = vector_row * 8 + two + j;
      found.scale[j] = at.row_scale && (kWhole || row < at.rows) ? at.row_scale[row * at.row_scale_stride] : 1.0f;
      found.bias[j] = at.bias && (kWhole || row < at.rows) ? at.bias[row] : 0.0f;
    }
    return found;
  }
  // Scales of the units of chunk c.
  struct Columns {
    float scale[kSubs];
  };
  __device__ Columns columns_of(int c) const {
    Columns found;
    if constexpr (kForm == RowStore::kPerTensor) {
      CUTE_UNROLL
      for (int s = 0; s < kSubs; ++s) found.scale[s] = col_scale ? *col_scale : 1.0f;
    } else {
      load_col_scales<C, kForm>(found.scale, col_scale, at.col_scale_stride, c, at.n - n0 - group * kSubs);
    }
    return found;
  }
  // Results of a unit in both rows.
  template <class Total>
  __device__ static uint32_t word(const Total (&total)[2], const Rows& rows, float scale) {
    alignas(4) Out both[2];
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) both[j] = convert<Out>(total[j], rows.scale[j], scale, rows.bias[j]);
    return *reinterpret_cast<const uint32_t*>(both);
  }

  // Where the two rows of a vector row are in the columns of the even (0) or odd (1) group of a pair of groups.
  struct Place {
    Out* first;  // in the first column of the group
    int64_t column, row;
  };
  __device__ Place place(int64_t vector_row, int odd) const {
    const int64_t column = n0 + (group & ~1 | odd) * kSubs, row = vector_row * 8 + two;
    return {out + column * at.rows + row, column, row};
  }
  // Store results of both rows in the column of unit u.
  __device__ void store(uint32_t value, const Place& place, int u) const {
    Out* const to = place.first + column_of(u) * at.rows;
    if constexpr (kWhole) {
      *reinterpret_cast<uint32_t*>(to) = value;
      return;
    }
    if (place.column + column_of(u) >= at.n || place.row >= at.rows) return;
    if (at.rows % 2 == 0) {
      *reinterpret_cast<uint32_t*>(to) = value;
    } else {
      to[0] = reinterpret_cast<const Out*>(&value)[0];
      if (place.row + 1 < at.rows) to[1] = reinterpret_cast<const Out*>(&value)[1];
    }
  }
};

// Write two neighboring vector rows of a warp to the transpose of C: eight lanes write 32 bytes of a column, a whole sector, where 16
// would have the L2 cache read the rest first.
template <class C>
struct OwnPair {
  using S = SpmmShape<C>;
  const Accumulators<C>&even, &odd;
  int64_t vector_row;

  template <RowStore kForm>
  __device__ void write(const PairOutput<C, kForm>& out) const {
    constexpr int kSubs = S::Units::kSubs;
    TotalOf<C> first[S::kUnits][2], second[S::kUnits][2];
    even.totals(0, first), odd.totals(0, second);
    const auto first_rows = out.rows_of(vector_row), second_rows = out.rows_of(vector_row + 1);
    const bool is_odd = out.group & 1;  // writes the second vector row
    const auto to_even = out.place(vector_row + is_odd, 0), to_odd = out.place(vector_row + is_odd, 1);
    CUTE_UNROLL
    for (int c = 0; c < S::kChunks; ++c) {
      const auto columns = out.columns_of(c);
      CUTE_UNROLL
      for (int s = 0; s < kSubs; ++s) {
        const int u = c * kSubs + s;
        const uint32_t words[2] = {out.word(first[u], first_rows, columns.scale[s]), out.word(second[u], second_rows, columns.scale[s])};
        const uint32_t gotten = __shfl_xor_sync(~0u, is_odd ? words[0] : words[1], 4), kept = is_odd ? words[1] : words[0];
        out.store(is_odd ? gotten : kept, to_even, u);
        out.store(is_odd ? kept : gotten, to_odd, u);
      }
    }
  }
};

// As OwnPair, of two warps: each writes half of the columns, with the other's results from `exchange` (kWarps, kHalf, 32).
template <class C>
struct SharedPair {
  using S = SpmmShape<C>;
  const Accumulators<C>& acc;
  int64_t vector_row;  // of this warp
  int warp, lane;
  uint32_t exchange;

  template <RowStore kForm>
  __device__ void write(const PairOutput<C, kForm>& out) const {
    static_assert(S::kUnits % 2 == 0, "both warps must have columns");
    constexpr int kHalf = S::kUnits / 2, kSubs = S::Units::kSubs;
    constexpr int kChunks = (S::kChunks + 1) / 2, kOwn = S::kChunks > 1 ? kSubs : kSubs / 2;  // of a half, and units of one of them
    TotalOf<C> total[S::kUnits][2];
    acc.totals(0, total);
    const auto rows = out.rows_of(vector_row);
    const bool upper = warp & 1;  // half of the columns
    uint32_t kept[kHalf], gotten[kHalf];
    CUTE_UNROLL
    for (int c = 0; c < kChunks; ++c) {
      const auto low = out.columns_of(c), high = out.columns_of(c + S::kChunks / 2);
      CUTE_UNROLL
      for (int s = 0; s < kOwn; ++s) {
        const int i = c * kSubs + s;
        const uint32_t words[2] = {out.word(total[i], rows, low.scale[s]), out.word(total[i + kHalf], rows, high.scale[s + kSubs - kOwn])};
        kept[i] = upper ? words[1] : words[0];
        store_shared(exchange + (warp * kHalf + i) * 128 + lane * 4, upper ? words[0] : words[1]);
      }
    }
    const int barrier = 1 + warp / 2;
    warp_group::named_barrier_sync(barrier, 64);
    CUTE_UNROLL
    for (int i = 0; i < kHalf; ++i) {  // of the other group of a pair of groups
      uint32_t one[1];
      load_shared(exchange + ((warp ^ 1) * kHalf + i) * 128 + (lane ^ 4) * 4, one);
      gotten[i] = one[0];
    }
    warp_group::named_barrier_sync(barrier, 64);  // read before they are written again
    const bool is_odd = out.group & 1;
    const auto to_even = out.place(is_odd ? vector_row ^ 1 : vector_row, 0), to_odd = out.place(is_odd ? vector_row : vector_row ^ 1, 1);
    CUTE_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      const uint32_t even = is_odd ? gotten[i] : kept[i], odd = is_odd ? kept[i] : gotten[i];
      if (upper) out.store(even, to_even, i + kHalf), out.store(odd, to_odd, i + kHalf);
      else out.store(even, to_even, i), out.store(odd, to_odd, i);
    }
  }
};

// Write a pair of vector rows, of which `even` is the first, by the form that fits it.
template <class C, class Pair>
__device__ void write_pair(const Pair& pair, const SpmmOperands& at, int64_t batch, int64_t even, int64_t n0, int lane) {
  if (n0 + SpmmShape<C>::kTileN > at.n || (even + 2) * 8 > at.rows || at.rows % 2 != 0) {
    pair.write(PairOutput<C, RowStore::kPredicated>{at, batch, n0, lane});
  } else if (at.col_scale && at.col_scale_stride != 0) {  // staged
    pair.write(PairOutput<C, RowStore::kPerColumn>{at, batch, n0, lane});
  } else {
    pair.write(PairOutput<C, RowStore::kPerTensor>{at, batch, n0, lane});
  }
}

}  // namespace magicube
