// Sums for the error bound of a product C ~ A B by sixteen probes W: B W, then A (B W) - C W, in float64.
#pragma once

#include "probe_tile.hpp"

namespace {  // compiled once per instruction set

using magicube::JudgeArgs;
using magicube::JudgeSums;
using magicube::kProbes;
using magicube::ProbeArgs;
using magicube::ThreadGroup;

// The float32 probes of a call as doubles, in the shared buffer.
inline const double* shared_probes(const float* w, int64_t rows, ThreadGroup& group) {
  auto* const out = reinterpret_cast<double*>(group.shared());
  const int64_t count = rows * kProbes;
  for (int64_t i = count * group.rank() / group.size(); i < count * (group.rank() + 1) / group.size(); ++i) out[i] = w[i];
  group.barrier();
  return out;
}

template <class Isa>
void probe_right(const ProbeArgs& args, ThreadGroup& group) {
  const int64_t rows = args.b.rows, groups = (rows + kGroupRows - 1) / kGroupRows;
  const double* const w = shared_probes(args.w, args.b.columns, group);
  auto* const scratch = reinterpret_cast<double*>(group.local());
  GroupSums sums;
  for (int64_t g = group.ticket(); g < groups; g = group.ticket()) {
    const int64_t row = g * kGroupRows, count = lesser(kGroupRows, rows - row);
    multiply_group<Isa, false>(args.b, row, count, w, args.wbar, scratch, sums);
    std::memcpy(args.products + row * kProbes, sums.products, static_cast<size_t>(count) * kProbes * 8);
    for (int64_t r = 0; r < count; ++r) args.bounds[row + r] = GroupSums::total(sums.bounds[r]);
  }
}

template <class Isa>
void add_rows(const GroupSums& product, const GroupSums& claimed, int64_t rows, JudgeSums& part) {
  double y[(kGroupRows + 1) * kProbes] = {};
  for (int64_t r = 0; r < rows; ++r) {
    const double *left = product.products + r * kProbes, *right = claimed.products + r * kProbes;
    double squares[2] = {};
    for (int p = 0; p < kProbes; ++p) {
      y[r * kProbes + p] = left[p] - right[p];
      squares[0] = fused(left[p], left[p], squares[0]);
      squares[1] = fused(right[p], right[p], squares[1]);
    }
    part.product += squares[0];
    part.claimed += squares[1];
    part.norm += GroupSums::total(claimed.squares[r]);
    const double a_bound = GroupSums::total(product.bounds[r]), c_bound = GroupSums::total(claimed.bounds[r]);
    part.a_bound = fused(a_bound, a_bound, part.a_bound);
    part.c_bound = fused(c_bound, c_bound, part.c_bound);
  }
  add_gram<Isa>(y, rows, part.gram);
}

// Chunks of about sqrt(M) rows have sums of their own, which one thread adds in order: results do not depend on the threads.
template <class Isa>
void judge(const JudgeArgs& args, ThreadGroup& group) {
  const int64_t rows = args.a.rows, chunk_rows = magicube::judge_chunk_rows(rows);
  const int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;
  const double* const w = shared_probes(args.w, args.c.columns, group);
  auto* const parts = reinterpret_cast<JudgeSums*>(group.shared() + magicube::probe_bytes(args.c.columns));
  auto* const scratch = reinterpret_cast<double*>(group.local());
  GroupSums product, claimed;
  for (int64_t chunk = group.ticket(); chunk < chunks; chunk = group.ticket()) {
    JudgeSums& part = parts[chunk];
    part = JudgeSums{};
    const int64_t end = lesser(rows, (chunk + 1) * chunk_rows);
    for (int64_t row = chunk * chunk_rows; row < end; row += kGroupRows) {
      const int64_t count = lesser(kGroupRows, end - row);
      multiply_group<Isa, false>(args.a, row, count, args.products, args.bounds, scratch, product);
      multiply_group<Isa, true>(args.c, row, count, w, args.wbar, scratch, claimed);
      add_rows<Isa>(product, claimed, count, part);
    }
  }
  group.barrier();
  if (group.rank() == 0) add_in_order(parts, chunks, *args.out);
}

}  // namespace
