// SpMM, panel kernel (sm_90 on): a block keeps tiles of a strip of B in shared memory and runs many vector rows on them.
//
// One warp feeds a ring of kStages tiles of kTile rows by the tensor copy engine; kWarps warps multiply, each kRows vector
// rows whose sums stay in registers over all of k. Barriers count full and empty tiles; the block never meets at one.
// The execution copy is made so that a group takes its rows from two neighbouring tiles at most, and names them by where
// they lie in the ring.
#pragma once

#include "spmm.cuh"

namespace magicube {

template <class C>
struct PanelRing {
  static constexpr int kTileBytes = C::kTile * C::kRowBytes;
  static constexpr int kBoxRows = C::kTile < 256 ? C::kTile : 256;  // the copy engine's limit
  static constexpr int kRingBytes = C::kStages * kTileBytes;
  static_assert(C::kStages >= 3, "a group may take rows of two tiles while a third arrives");
  static_assert(C::kTile % kBoxRows == 0, "a tile is whole boxes");

  uint32_t base;
  int64_t tiles;

  __device__ uint32_t full(int stage) const { return base + kRingBytes + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return base + kRingBytes + 8 * (C::kStages + stage); }
  // How often the ring's stages were used before: every item walks all tiles and starts at stage 0.
  __device__ uint32_t use(int64_t item, int64_t tile) const {
    const int64_t stage = tile % C::kStages;
    return static_cast<uint32_t>(item * ((tiles - stage + C::kStages - 1) / C::kStages) + tile / C::kStages);
  }
};

struct PanelItems {
  int64_t row_blocks, strips, count;

  // Items that run at the same time share a strip, which the second-level cache then holds.
  __device__ int64_t row_block(int64_t item) const { return item % row_blocks; }
  __device__ int64_t strip(int64_t item) const { return item / row_blocks % strips; }
  __device__ int64_t batch(int64_t item) const { return item / row_blocks / strips; }
};

template <class C>
__device__ void feed(const PanelRing<C>& ring, const PanelItems& items, const TmaDescriptor* map, int64_t inner,
                     int64_t batch_rows) {
  using Ring = PanelRing<C>;
  int64_t nth = 0;
  for (int64_t item = blockIdx.x; item < items.count; item += gridDim.x, ++nth) {
    const int x = int(items.strip(item) * C::kRowBytes);
    const int64_t first = items.batch(item) * batch_rows;
    for (int64_t tile = 0; tile < ring.tiles; ++tile) {
      const int stage = int(tile % C::kStages);
      barrier_wait(ring.empty(stage), (ring.use(nth, tile) & 1) ^ 1);
      const int64_t left = inner - tile * C::kTile;
      const int boxes = left >= C::kTile ? C::kTile / Ring::kBoxRows : int((left + Ring::kBoxRows - 1) / Ring::kBoxRows);
      barrier_expect(ring.full(stage), boxes * Ring::kBoxRows * C::kRowBytes);
      for (int box = 0; box < boxes; ++box) {
        copy_box(ring.base + stage * Ring::kTileBytes + box * Ring::kBoxRows * C::kRowBytes, map, x,
                 int(first + tile * C::kTile + box * Ring::kBoxRows), ring.full(stage));
      }
    }
  }
}

// Where a warp is in one vector row: the next group's places in the ring and values are in registers already.
template <class C>
struct RowCursor {
  using S = SpmmShape<C>;
  static constexpr int kSlots = S::Shape::kK;
  static constexpr int kSlotLanes = (kSlots + 31) / 32;

  const uint16_t* places;  // of the row's first group: (groups, K slots), in units of 16 bytes, swizzled
  const uint32_t* values;
  const int32_t* tile_ends;  // groups that need no tile beyond t, for each t
  int count, at;
  int ends;  // of the tile that is this lane's, of 32 tiles
  uint32_t place[kSlotLanes];
  SparseFragment<C> fragment;

  __device__ void open(const int64_t* group_start, const int32_t* ends_of, const uint16_t* all_places, const uint32_t* all_values,
                       int64_t vector_row, bool exists, int64_t tiles, int lane) {
    const int64_t begin = exists ? group_start[vector_row] : 0;
    count = exists ? int(group_start[vector_row + 1] - begin) : 0;
    places = all_places + begin * kSlots;
    values = all_values + begin * S::kGroupWords;
    tile_ends = ends_of + vector_row * tiles;
    at = 0;
    load(lane);
  }

  __device__ void load(int lane) {
    if (at >= count) return;
    CUTE_UNROLL
    for (int i = 0; i < kSlotLanes; ++i) place[i] = __ldg(places + at * kSlots + 32 * i + lane % kSlots);
    fragment.load(values + at * S::kGroupWords, lane);
  }

  __device__ int end_of(int64_t tile, int64_t tiles, int lane) {
    if (tile % 32 == 0) ends = count && tile + lane < tiles ? __ldg(tile_ends + tile + lane) : count;
    return __shfl_sync(~0u, ends, int(tile % 32));
  }
};

template <class C>
__device__ void add_panel_group(Sums<C>& sums, const SparseFragment<C>& values, uint32_t ring,
                                const uint32_t (&place)[RowCursor<C>::kSlotLanes]) {
  using S = SpmmShape<C>;
  CUTE_UNROLL
  for (int chunk = 0; chunk < S::kChunks; chunk += S::kStep) {
    uint32_t raw[S::kStep][S::Units::kMatrices];
    CUTE_UNROLL
    for (int c = 0; c < S::kStep; ++c) {
      // The swizzle is an exclusive or of the chunk's number with the row's, so a chunk is one more.
      if constexpr (RowCursor<C>::kSlots % 32 == 0) {
        CUTE_UNROLL
        for (int i = 0; i < RowCursor<C>::kSlotLanes; ++i) {
          load_transposed((ring + place[i] * 16) ^ ((chunk + c) * 16), raw[c] + 4 * i);
        }
      } else {
        static_assert(RowCursor<C>::kSlots == 16, "groups are of 16 slots or a multiple of 32");
        load_transposed_pair((ring + place[0] * 16) ^ ((chunk + c) * 16), raw[c]);
      }
    }
    sums.add(values, chunk, raw);
  }
}

template <class C>
__device__ void multiply_item(const PanelRing<C>& ring, RowCursor<C> (&rows)[C::kRows], Sums<C> (&sums)[C::kRows], int64_t nth,
                              int lane) {
  for (int64_t tile = 0; tile < ring.tiles; ++tile) {
    barrier_wait(ring.full(int(tile % C::kStages)), ring.use(nth, tile) & 1);
    CUTE_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      const int end = rows[i].end_of(tile, ring.tiles, lane);
      while (rows[i].at < end) {
        const SparseFragment<C> values = rows[i].fragment;
        uint32_t place[RowCursor<C>::kSlotLanes];
        CUTE_UNROLL
        for (int s = 0; s < RowCursor<C>::kSlotLanes; ++s) place[s] = rows[i].place[s];
        ++rows[i].at;
        rows[i].load(lane);
        add_panel_group(sums[i], values, ring.base, place);
      }
    }
    // What needs this tile and the next one is still to come; the tile before is done with.
    __syncwarp();
    if (lane == 0 && tile > 0) barrier_arrive(ring.empty(int((tile - 1) % C::kStages)));
  }
  if (lane == 0 && ring.tiles > 0) barrier_arrive(ring.empty(int((ring.tiles - 1) % C::kStages)));
}

template <class C>
__global__ void __launch_bounds__((C::kWarps + 1) * 32, 1)
spmm_panel(const __grid_constant__ TmaDescriptor map, const int64_t* group_start, const int32_t* tile_ends,
           const uint16_t* places, const uint32_t* values, void* out, const float* left, int64_t left_step, const float* right,
           int64_t right_step, int64_t right_batch, const float* bias, int64_t rows, int64_t vector_rows, int64_t n,
           int64_t inner, int64_t batches, int64_t batch_rows, int64_t vector_stores) {
  using S = SpmmShape<C>;
  using Total = cuda::std::conditional_t<C::kLongTotal, int64_t, int32_t>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const PanelRing<C> ring{shared_address(shared), (inner + C::kTile - 1) / C::kTile};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < C::kStages; ++stage) {
      barrier_init(ring.full(stage), 1);
      barrier_init(ring.empty(stage), C::kWarps);
    }
    barrier_fence();
  }
  __syncthreads();
  constexpr int kBlockRows = C::kWarps * C::kRows;
  const int64_t row_blocks = (vector_rows + kBlockRows - 1) / kBlockRows, strips = (n + S::kColumns - 1) / S::kColumns;
  const PanelItems items{row_blocks, strips, row_blocks * strips * batches};
  if (warp == C::kWarps) {
    if (lane == 0) feed(ring, items, &map, inner, batch_rows);
    return;
  }
  const SpmmOperands operands{left, right, bias, out, rows, n, left_step, right_step, right_batch, vector_stores != 0};
  int64_t nth = 0;
  for (int64_t item = blockIdx.x; item < items.count; item += gridDim.x, ++nth) {
    const int64_t first = items.row_block(item) * kBlockRows + warp * C::kRows;
    RowCursor<C> cursors[C::kRows];
    Sums<C> sums[C::kRows];
    CUTE_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      cursors[i].open(group_start, tile_ends, places, values, first + i, first + i < vector_rows, ring.tiles, lane);
      sums[i].clear();
    }
    multiply_item(ring, cursors, sums, nth, lane);
    CUTE_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      if (first + i >= vector_rows) break;
      CUTE_UNROLL
      for (int tile = 0; tile < S::kRowTiles; ++tile) {
        Total total[S::kUnits][2];
        sums[i].totals(tile, total);
        write_tile<C>(operands, items.batch(item), first + i, tile, items.strip(item) * S::kColumns, lane, total);
      }
    }
  }
}

}  // namespace magicube
