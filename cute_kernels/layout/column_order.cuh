// Assign the columns of a matrix to slots, one warp per vector row: each lane tries one order, the cheapest is written.
#pragma once

#include <cuda/std/cstdint>

#include "layout/column_order_search.cuh"

namespace magicube {

// until: (rows, tiles, kPhase); first: (rows, kPhase); order, slots: (vectors,). `order` lists the columns of a row sorted by
// residue mod kPhase; `first` is the start of each residue class in it.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
spread_slots(const int* until, const int64_t* first, const int64_t* order, int64_t rows, int64_t tiles, int64_t group,
             int64_t window, int64_t* slots) {
  const int64_t row_number = (int64_t{blockIdx.x} * C::kThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row_number >= rows) return;
  const RowColumns row{until + row_number * tiles * kPhase, int(tiles), int(group), int(window)};
  static_assert(kTrials == 32, "a lane a trial");
  const unsigned cost = unsigned(order_row(row, lane, [](int, const int (&)[kPhase]) {})), best = __reduce_min_sync(~0u, cost);
  const int trial = __ffs(__ballot_sync(~0u, cost == best)) - 1;
  const int64_t* mine = order + first[row_number * kPhase + lane % kPhase];
  order_row(row, trial, [&](int step, const int (&take)[kPhase]) {
    int before = 0, own = 0;  // slots of the step taken by lower residues, and by this lane's
    for (int i = 0; i < kPhase; ++i) {
      before += i < lane ? take[i] : 0;
      own = i == lane ? take[i] : own;
    }
    for (int i = 0; i < own; ++i) slots[*mine++] = int64_t{step} * kPhase + before + i;
  });
}

}  // namespace magicube
