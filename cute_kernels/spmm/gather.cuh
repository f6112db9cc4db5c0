// SpMM, gather kernel: every warp fetches the rows of B that its groups name into a ring of its own, with no barrier
// between warps. kSplitKWarps warps share the groups of one vector row and add their sums up in the end.
#pragma once

#include "spmm/common.cuh"

namespace magicube {

// A ring of kStages groups of gathered rows: (stages, K slots, kTileNBytes), swizzled.
template <class C>
struct GatherRing {
  using S = SpmmShape<C>;
  static constexpr int kSlots = S::Shape::kK;
  static constexpr int kSlotLanes = (kSlots + 31) / 32;  // columns a lane holds
  static constexpr int kStageBytes = kSlots * C::kTileNBytes;
  static constexpr int kPieces = kSlots * S::kChunks / 32;  // 16-byte pieces a lane fetches
  static_assert(kSlots * S::kChunks % 32 == 0, "a stage is whole warps of 16-byte pieces");

  uint32_t base;
  const uint8_t* strip;  // B at the strip's first byte
  int64_t pitch;         // bytes from one row of B to the next
  int valid;             // bytes of this lane's chunk that exist
  int lane;

  __device__ void fetch(int stage, const int32_t (&columns)[kSlotLanes]) const {
    CUTE_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const int piece = lane + 32 * i;
      const int slot = piece / S::kChunks, chunk = piece % S::kChunks;
      const int32_t column = __shfl_sync(~0u, columns[32 * i / S::kChunks / 32], slot % 32);
      const uint32_t to = base + stage * kStageBytes + swizzled<C::kTileNBytes, C::kSwizzle>(slot, chunk);
      // Padding is not fetched: all warps at one row of B would wait for each other, and its values are 0 anyway. Floats
      // get zeros there, because 0 times what an earlier row left may be NaN.
      if constexpr (C::kFloat) cp_async(to, strip + (column < 0 ? 0 : column * pitch) + chunk * 16, column < 0 ? 0 : valid);
      else if (column >= 0) cp_async(to, strip + column * pitch + chunk * 16, valid);
    }
  }

  // (matrices) units of one chunk.
  __device__ void read(int stage, int chunk, uint32_t (&raw)[S::Units::kMatrices]) const {
    const uint32_t at = base + stage * kStageBytes;
    if constexpr (kSlots % 32 == 0) {
      CUTE_UNROLL
      for (int i = 0; i < kSlots / 32; ++i) {
        load_transposed(at + swizzled<C::kTileNBytes, C::kSwizzle>(32 * i + lane, chunk), raw + 4 * i);
      }
    } else {
      static_assert(kSlots == 16, "groups are of 16 slots or a multiple of 32");
      load_transposed_pair(at + swizzled<C::kTileNBytes, C::kSwizzle>(lane % 16, chunk), raw);
    }
  }
};

template <class C>
__device__ void add_group(Sums<C>& sums, const SparseFragment<C>& values, const GatherRing<C>& ring, int stage) {
  using S = SpmmShape<C>;
  CUTE_UNROLL
  for (int chunk = 0; chunk < S::kChunks; chunk += S::kStep) {
    uint32_t raw[S::kStep][S::Units::kMatrices];
    CUTE_UNROLL
    for (int c = 0; c < S::kStep; ++c) ring.read(stage, chunk + c, raw[c]);
    sums.add(values, chunk, raw);
  }
}

// Totals of one row tile that outlive int32: sums move here before they can overflow.
template <class C>
struct WideTotals {
  int64_t total[SpmmShape<C>::kRowTiles][SpmmShape<C>::kUnits][2];
};

// The totals of the warps of one vector row meet in the first one's registers, through shared memory.
template <class C, class Total>
__device__ void reduce_team(Total (&total)[SpmmShape<C>::kUnits][2], uint8_t* scratch, int warp, int lane) {
  constexpr int kValues = SpmmShape<C>::kUnits * 2;
  static_assert(kValues * 32 * sizeof(Total) <= C::kStages * GatherRing<C>::kStageBytes, "totals go where the ring was");
  Total* flat = &total[0][0];
  Total* mine = reinterpret_cast<Total*>(scratch + warp * (C::kStages * GatherRing<C>::kStageBytes)) + lane;
  const bool first = warp % C::kSplitKWarps == 0;
  __syncthreads();
  if (!first) {
    CUTE_UNROLL
    for (int i = 0; i < kValues; ++i) mine[32 * i] = flat[i];
  }
  __syncthreads();
  if (first) {
    for (int other = 1; other < C::kSplitKWarps; ++other) {
      const Total* theirs = mine + other * (C::kStages * GatherRing<C>::kStageBytes / sizeof(Total));
      CUTE_UNROLL
      for (int i = 0; i < kValues; ++i) flat[i] += theirs[32 * i];
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kWarps * 32)
spmm_gather(const int64_t* group_start, const int32_t* columns, const uint32_t* values, const uint8_t* b, int64_t b_pitch,
            int64_t b_batch, int64_t b_bytes, void* out, const float* left, int64_t left_step, const float* right,
            int64_t right_step, int64_t right_batch, const float* bias, int64_t rows, int64_t vector_rows, int64_t n,
            int64_t vector_stores) {
  using S = SpmmShape<C>;
  using Ring = GatherRing<C>;
  using Total = cuda::std::conditional_t<C::kInt64Accum, int64_t, TotalOf<C>>;
  extern __shared__ __align__(128) uint8_t shared[];
  if constexpr (C::kAJustWritten) pdl_wait();
  constexpr int kTeams = C::kWarps / C::kSplitKWarps;
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  // 32 bits, because a division of 64 is a call; the grid's size has no more.
  const uint32_t strips = uint32_t((n + S::kColumns - 1) / S::kColumns);
  const uint32_t row_blocks = uint32_t((vector_rows + kTeams - 1) / kTeams);
  // Blocks in flight share a strip of B, which the second-level cache then holds.
  const int64_t row_block = blockIdx.x % row_blocks;
  const int64_t strip = blockIdx.x / row_blocks % strips, batch = blockIdx.x / row_blocks / strips;
  const int64_t vector_row = row_block * kTeams + warp / C::kSplitKWarps;
  const bool present = vector_row < vector_rows;
  const int64_t strip_byte = strip * C::kTileNBytes + lane % S::kChunks * 16;
  const int64_t valid = b_bytes - strip_byte;
  const Ring ring{held(shared_address(shared)) + warp * (C::kStages * Ring::kStageBytes), b + batch * b_batch + strip * C::kTileNBytes,
                  b_pitch, valid < 0 ? 0 : valid < 16 ? int(valid) : 16, lane};
  const int64_t begin = uniform(present ? group_start[vector_row] : 0) + warp % C::kSplitKWarps;
  const int64_t end = uniform(present ? group_start[vector_row + 1] : 0);
  const int count = end > begin ? int((end - begin + C::kSplitKWarps - 1) / C::kSplitKWarps) : 0;

  const auto load_columns = [&](int i, int32_t (&to)[Ring::kSlotLanes]) {
    if (i >= count) return;
    CUTE_UNROLL
    for (int s = 0; s < Ring::kSlotLanes; ++s) {
      const int slot = 32 * s + lane;
      to[s] = slot < Ring::kSlots ? __ldg(columns + (begin + int64_t{i} * C::kSplitKWarps) * Ring::kSlots + slot) : 0;
    }
  };
  const auto load_values = [&](int i, SparseFragment<C>& to) {
    if (i < count) to.load(values + (begin + int64_t{i} * C::kSplitKWarps) * S::kGroupWords, lane);
  };

  int32_t first[C::kStages - 1][Ring::kSlotLanes];
  CUTE_UNROLL
  for (int i = 0; i < C::kStages - 1; ++i) load_columns(i, first[i]);
  SparseFragment<C> fragment, next;
  load_values(0, fragment);
  if constexpr (!C::kAJustWritten) pdl_wait();
  CUTE_UNROLL
  for (int i = 0; i < C::kStages - 1; ++i) {
    if (i < count) ring.fetch(i, first[i]);
    cp_async_commit();
  }
  int32_t ahead[Ring::kSlotLanes];
  load_columns(C::kStages - 1, ahead);
  Sums<C> sums;
  sums.clear();
  WideTotals<C> wide;
  if constexpr (C::kInt64Accum) {
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(wide) / 8); ++i) (&wide.total[0][0][0])[i] = 0;
  }
  const auto fold = [&] {
    CUTE_UNROLL
    for (int tile = 0; tile < S::kRowTiles; ++tile) {
      int64_t part[S::kUnits][2];
      sums.totals(tile, part);
      CUTE_UNROLL
      for (int i = 0; i < S::kUnits * 2; ++i) (&wide.total[tile][0][0])[i] += (&part[0][0])[i];
    }
    sums.clear();
  };

  for (int i = 0, stage = 0; i < count; ++i) {
    load_values(i + 1, next);
    cp_async_wait<C::kStages - 2>();
    __syncwarp();
    const int refill = stage == 0 ? C::kStages - 1 : stage - 1;  // the stage that the step before this one has read
    if (i + C::kStages - 1 < count) ring.fetch(refill, ahead);
    cp_async_commit();
    load_columns(i + C::kStages, ahead);
    add_group(sums, fragment, ring, stage);
    fragment = next;
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
    if constexpr (C::kInt64Accum) {
      if (i % kSafeGroups<typename S::Shape> == kSafeGroups<typename S::Shape> - 1) fold();
    }
  }
  if constexpr (C::kInt64Accum) fold();
  cp_async_wait<0>();

  const SpmmOperands operands{left, right, bias, out, rows, n, left_step, right_step, right_batch, vector_stores != 0};
  CUTE_UNROLL
  for (int tile = 0; tile < S::kRowTiles; ++tile) {
    Total total[S::kUnits][2];
    if constexpr (C::kInt64Accum) {
      CUTE_UNROLL
      for (int i = 0; i < S::kUnits * 2; ++i) (&total[0][0])[i] = (&wide.total[tile][0][0])[i];
    } else {
      sums.totals(tile, total);
    }
    if constexpr (C::kSplitKWarps > 1) reduce_team<C>(total, shared, warp, lane);
    if (present && warp % C::kSplitKWarps == 0) {
      write_tile<C>(operands, batch, vector_row, tile, strip * S::kColumns, lane, total);
    }
  }
}

}  // namespace magicube
