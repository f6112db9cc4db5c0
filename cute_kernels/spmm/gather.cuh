// SpMM, gather kernel: C = row_scale * col_scale * (A B) + bias, A sparse.
//
// Architectures: sm_80 and later (cp.async).
// Work: a warp computes one vector row and one N tile; kSplitKWarps warps split the groups of a vector row (split-K) and add
// their results through shared memory. All warps of a CTA split a long row; these CTAs come first.
// Pipeline: each warp copies the rows of B of its groups by cp.async into its own ring of kStages stages; no CTA barrier in
// the mainloop. Columns of A are loaded kStages groups ahead, values one group ahead. One stage: no prefetch, a group is
// loaded when it is multiplied (for measurements).
// Source: Li, Osawa, Hoefler, SC'22, sections IV-A to IV-D.
#pragma once

#include "spmm/common.cuh"

namespace magicube {

// Pipeline of gathered rows: (kStages, kSlots, kTileNBytes), swizzled.
template <class C>
struct GatherRing {
  using S = SpmmShape<C>;
  static constexpr int kSlots = S::Shape::kK;
  static constexpr int kSlotLanes = (kSlots + 31) / 32;  // columns per lane
  static constexpr int kStageBytes = kSlots * C::kTileNBytes;
  static constexpr int kPieces = kSlots * S::kChunks / 32;  // 16-byte copies per lane
  static_assert(kSlots * S::kChunks % 32 == 0, "a stage must be whole warps of 16-byte copies");

  uint32_t base;
  const uint8_t* n_tile;  // first byte of the N tile of B
  int64_t pitch;         // bytes between rows of B
  int valid;             // bytes of the chunk of this lane that exist
  int lane;

  __device__ void fetch(int stage, const int32_t (&columns)[kSlotLanes]) const {
    CUTE_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const int piece = lane + 32 * i;
      const int slot = piece / S::kChunks, chunk = piece % S::kChunks;
      const int32_t column = __shfl_sync(~0u, columns[32 * i / S::kChunks / 32], slot % 32);
      const uint32_t to = base + stage * kStageBytes + swizzled<C::kTileNBytes, C::kSwizzle>(slot, chunk);
      // Integer padding is not copied: its values are 0, and one row of B for all warps would serialize their loads. Floats
      // get zeros, because 0 times a stale row can be NaN.
      if constexpr (C::kFloat) cp_async(to, n_tile + (column < 0 ? 0 : column * pitch) + chunk * 16, column < 0 ? 0 : valid);
      else if (column >= 0) cp_async(to, n_tile + column * pitch + chunk * 16, valid);
    }
  }

  // Read one chunk of all rows: (matrices,).
  __device__ void read(int stage, int chunk, uint32_t (&raw)[S::Units::kMatrices]) const {
    const uint32_t at = base + stage * kStageBytes;
    if constexpr (kSlots % 32 == 0) {
      CUTE_UNROLL
      for (int i = 0; i < kSlots / 32; ++i) {
        load_transposed(at + swizzled<C::kTileNBytes, C::kSwizzle>(32 * i + lane, chunk), raw + 4 * i);
      }
    } else {
      static_assert(kSlots == 16, "a group must have 16 slots or a multiple of 32");
      load_transposed_pair(at + swizzled<C::kTileNBytes, C::kSwizzle>(lane % 16, chunk), raw);
    }
  }
};

template <class C>
__device__ void add_group(Accumulators<C>& acc, const SparseFragment<C>& values, const GatherRing<C>& ring, int stage) {
  using S = SpmmShape<C>;
  CUTE_UNROLL
  for (int chunk = 0; chunk < S::kChunks; chunk += S::kStep) {
    uint32_t raw[S::kStep][S::Units::kMatrices];
    CUTE_UNROLL
    for (int c = 0; c < S::kStep; ++c) ring.read(stage, chunk + c, raw[c]);
    acc.add(values, chunk, raw);
  }
}

// int64 accumulators; int32 accumulators are added before they can overflow.
template <class C>
struct Int64Totals {
  int64_t total[SpmmShape<C>::kRowTiles][SpmmShape<C>::kUnits][2];
};

// Split-K reduction: add the results of the `split` warps of a vector row in the registers of the first one, part 0.
template <class C, class Total>
__device__ void reduce_split_k(Total (&total)[SpmmShape<C>::kUnits][2], uint8_t* scratch, int warp, int lane, int part, int split) {
  constexpr int kValues = SpmmShape<C>::kUnits * 2;
  static_assert(kValues * 32 * sizeof(Total) <= C::kStages * GatherRing<C>::kStageBytes, "the results must fit the pipeline's memory");
  Total* flat = &total[0][0];
  Total* mine = reinterpret_cast<Total*>(scratch + warp * (C::kStages * GatherRing<C>::kStageBytes)) + lane;
  const bool first = part == 0;
  __syncthreads();
  if (!first) {
    CUTE_UNROLL
    for (int i = 0; i < kValues; ++i) mine[32 * i] = flat[i];
  }
  __syncthreads();
  if (first) {
    for (int other = 1; other < split; ++other) {
      const Total* theirs = mine + other * (C::kStages * GatherRing<C>::kStageBytes / sizeof(Total));
      CUTE_UNROLL
      for (int i = 0; i < kValues; ++i) flat[i] += theirs[32 * i];
    }
  }
}

// Grid: x first the `long_count` long rows, then the blocks of vector rows, so that concurrent CTAs share an N tile of B, which stays in
// L2; y the N tiles; z the batch times `folds`, the N tiles beyond the limit of y. No CTA divides: a kernel of 3 us would notice.
// `long_rows` (long_count,): the vector rows of more than `long_groups` groups; none unless C::kSharesLongRows.
template <class C>
__global__ void __launch_bounds__(C::kWarps * 32)
spmm_gather(const int64_t* group_start, const int32_t* columns, const uint32_t* values, const int32_t* long_rows, int64_t long_count,
            int64_t long_groups, int64_t folds, const uint8_t* b, int64_t b_pitch,
            int64_t b_batch, int64_t b_bytes, void* out, const float* row_scale, int64_t row_scale_stride, const float* col_scale,
            int64_t col_scale_stride, int64_t col_scale_batch, const float* bias, int64_t rows, int64_t vector_rows, int64_t n,
            int64_t vector_stores) {
  using S = SpmmShape<C>;
  using Ring = GatherRing<C>;
  using Total = cuda::std::conditional_t<C::kInt64Accum, int64_t, TotalOf<C>>;
  extern __shared__ __align__(128) uint8_t shared[];
  if constexpr (C::kAJustWritten) pdl_wait();
  constexpr int kVectorRows = C::kWarps / C::kSplitKWarps;
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  int64_t n_tile = blockIdx.y, batch = blockIdx.z;
  if (folds > 1) {
    n_tile += int64_t{blockIdx.z % uint32_t(folds)} * gridDim.y;
    batch = blockIdx.z / uint32_t(folds);
    if (n_tile * S::kTileN >= n) return;
  }
  const bool is_long = C::kSharesLongRows && blockIdx.x < uint32_t(long_count);
  const int64_t row_block = is_long ? blockIdx.x : blockIdx.x - uint32_t(long_count);
  const int part = is_long ? warp : warp % C::kSplitKWarps, split = is_long ? C::kWarps : C::kSplitKWarps;
  const int64_t vector_row = is_long ? __ldg(long_rows + row_block) : row_block * kVectorRows + warp / C::kSplitKWarps;
  const int64_t row_begin = uniform(vector_row < vector_rows ? group_start[vector_row] : 0);
  const int64_t end = uniform(vector_row < vector_rows ? group_start[vector_row + 1] : 0);
  const bool present = vector_row < vector_rows && (is_long || end - row_begin <= long_groups);
  const int64_t n_tile_byte = n_tile * C::kTileNBytes + lane % S::kChunks * 16;
  const int64_t valid = b_bytes - n_tile_byte;
  const Ring ring{held(shared_address(shared)) + warp * (C::kStages * Ring::kStageBytes), b + batch * b_batch + n_tile * C::kTileNBytes,
                  b_pitch, valid < 0 ? 0 : valid < 16 ? int(valid) : 16, lane};
  const int64_t begin = row_begin + part;
  const int64_t own = end - begin;  // groups from the first of this warp on
  const int count = !present || own <= 0 ? 0 : int(is_long ? (own + C::kWarps - 1) / C::kWarps : (own + C::kSplitKWarps - 1) / C::kSplitKWarps);

  // Columns and values are loaded in the order of the groups: a pointer to the next group of each.
  const int32_t* next_columns = columns + begin * Ring::kSlots + lane;
  const uint32_t* next_values = values + begin * S::kGroupWords;
  const auto load_columns = [&](int i, int32_t (&to)[Ring::kSlotLanes]) {
    if (i >= count) return;
    CUTE_UNROLL
    for (int s = 0; s < Ring::kSlotLanes; ++s) to[s] = 32 * s + lane < Ring::kSlots ? __ldg(next_columns + 32 * s) : 0;
    next_columns += split * Ring::kSlots;
  };
  const auto load_values = [&](int i, SparseFragment<C>& to) {
    if (i >= count) return;
    to.load(next_values, lane);
    next_values += split * int(S::kGroupWords);
  };

  int32_t first[C::kStages > 1 ? C::kStages - 1 : 1][Ring::kSlotLanes];
  CUTE_UNROLL
  for (int i = 0; i < C::kStages - 1; ++i) load_columns(i, first[i]);
  SparseFragment<C> fragment, next;
  if constexpr (C::kStages > 1) load_values(0, fragment);
  if constexpr (!C::kAJustWritten) pdl_wait();
  CUTE_UNROLL
  for (int i = 0; i < C::kStages - 1; ++i) {
    if (i < count) ring.fetch(i, first[i]);
    cp_async_commit();
  }
  Before<C> before[S::kRowTiles];
  if constexpr (C::kAccumulate) {
    const SpmmOperands target{nullptr, nullptr, nullptr, out, rows, n, 0, 0, 0, false};
    CUTE_UNROLL
    for (int tile = 0; tile < S::kRowTiles; ++tile) {
      if (present && part == 0 && row_begin < end) before[tile].load(target, batch, vector_row, tile, n_tile * S::kTileN, lane);
    }
  }
  int32_t ahead[Ring::kSlotLanes];
  if constexpr (C::kStages > 1) load_columns(C::kStages - 1, ahead);
  Accumulators<C> acc;
  acc.clear();
  Int64Totals<C> int64_totals;
  if constexpr (C::kInt64Accum) {
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(int64_totals) / 8); ++i) (&int64_totals.total[0][0][0])[i] = 0;
  }
  const auto flush = [&] {
    CUTE_UNROLL
    for (int tile = 0; tile < S::kRowTiles; ++tile) {
      int64_t part[S::kUnits][2];
      acc.totals(tile, part);
      CUTE_UNROLL
      for (int i = 0; i < S::kUnits * 2; ++i) (&int64_totals.total[tile][0][0])[i] += (&part[0][0])[i];
    }
    acc.clear();
  };

  for (int i = 0, stage = 0; i < count; ++i) {
    if constexpr (C::kStages > 1) {
      load_values(i + 1, next);
      cp_async_wait<C::kStages - 2>();
      __syncwarp();
      const int refill = stage == 0 ? C::kStages - 1 : stage - 1;  // the stage of the previous iteration
      if (i + C::kStages - 1 < count) ring.fetch(refill, ahead);
      cp_async_commit();
      load_columns(i + C::kStages, ahead);
    } else {
      load_columns(i, ahead);
      __syncwarp();  // all lanes have read the previous group
      ring.fetch(0, ahead);
      cp_async_commit();
      load_values(i, fragment);
      cp_async_wait<0>();
      __syncwarp();
    }
    add_group(acc, fragment, ring, stage);
    if constexpr (C::kStages > 1) fragment = next;
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
    if constexpr (C::kInt64Accum) {
      if (i % kSafeGroups<typename S::Shape> == kSafeGroups<typename S::Shape> - 1) flush();
    }
  }
  if constexpr (C::kInt64Accum) flush();
  cp_async_wait<0>();

  const SpmmOperands operands{row_scale, col_scale, bias, out, rows, n, row_scale_stride, col_scale_stride, col_scale_batch, vector_stores != 0};
  CUTE_UNROLL
  for (int tile = 0; tile < S::kRowTiles; ++tile) {
    Total total[S::kUnits][2];
    if constexpr (C::kInt64Accum) {
      CUTE_UNROLL
      for (int i = 0; i < S::kUnits * 2; ++i) (&total[0][0])[i] = (&int64_totals.total[tile][0][0])[i];
    } else {
      acc.totals(tile, total);
    }
    if constexpr (C::kSplitKWarps > 1 || C::kSharesLongRows) {
      if (split > 1) reduce_split_k<C>(total, shared, warp, lane, part, split);
    }
    if (present && part == 0 && (!C::kAccumulate || row_begin < end)) {
      write_tile<C>(operands, batch, vector_row, tile, n_tile * S::kTileN, lane, total, before[tile]);
    }
  }
}

}  // namespace magicube
