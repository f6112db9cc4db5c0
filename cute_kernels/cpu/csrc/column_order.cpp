// Order of the columns of a matrix for kernels with a window of tiles, by the code of the GPU.
#include "engine.hpp"

#include "../../layout/column_order_search.cuh"

namespace magicube {

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

}  // namespace magicube
