// Sparse attention, panel kernel (sm_90 on): tiles of K and V pass through shared memory while many vector rows use them.
//
// One warp feeds a ring of kStages tiles by the tensor copy engine, K's kTile rows and V's behind them; kWarps warps attend,
// each for kRows vector rows whose sums stay in registers. Barriers count full and empty tiles; the block never meets at
// one. A step takes its keys from kWindow neighbouring tiles at most and names them by where they lie in the ring. The
// kCluster blocks of a cluster work on the same matrix, and fetch a part of every tile each, for all of them.
#pragma once

#include "attention/common.cuh"
#include "device/pipeline.cuh"

namespace magicube {

template <class C>
struct AttentionRing : TmaPipeline<C, C::kStages * 2 * C::kTile * C::kHead> {
  static constexpr int kMatrixBytes = C::kTile * C::kHead;    // of a tile of K or V
  static constexpr int kTileBytes = 2 * kMatrixBytes;
  static constexpr int kPart = C::kTile / C::kCluster;        // rows that one block fetches
  static constexpr int kBoxRows = kPart < 256 ? kPart : 256;  // the copy engine's limit
  static constexpr int kRingBytes = C::kStages * kTileBytes;
  static_assert(C::kStages > C::kWindow, "a tile must be able to arrive while a step's window is in use");
  static_assert(C::kTile % kBoxRows == 0 && kRingBytes <= 16 << 16, "a tile is whole boxes; places have 16 bits");

  // Behind the tiles: two barriers a stage, whether the keys of its matrix are alike, then scales and biases of the keys, in
  // stages like the tiles.
  static constexpr int kAlikeAt = kRingBytes + 16 * C::kStages, kFactorsAt = kAlikeAt + (4 * C::kStages + 15) / 16 * 16;
  static constexpr int kFactorBytes = 4 * C::kTile;

  __device__ uint32_t alike(int stage) const { return this->base + kAlikeAt + stage * 4; }

  template <class D>  // C, or C for keys with one scale
  __device__ StepPlaces<D> places(const StepKeys<D>& step) const {
    constexpr int kChunks = AttentionShape<C>::kChunks;
    StepPlaces<D> at;
    at.values = kMatrixBytes;
    at.biases = kFactorBytes;
    CUTE_UNROLL
    for (int i = 0; i < C::kGroups; ++i) {
      const uint32_t place = step.words[i] & 0xFFFF;
      at.rows[i] = this->base + place * 16;
      if constexpr (AttentionShape<D>::kKeyed) at.scales[i] = this->base + kFactorsAt + place / kChunks * 4;
    }
    return at;
  }
};

// What a cluster works on: a block of vector rows of one matrix. Blocks that run at the same time share a matrix, which the
// second-level cache then holds. 32 bits, because a division of 64 is a call; the host sees to it that they suffice.
struct AttentionItem {
  uint32_t row_blocks, batches, patterns;
  uint32_t row_block, batch;

  template <class C>
  __device__ static AttentionItem first(int64_t row_blocks, int64_t batches, int64_t patterns) {
    AttentionItem item{uint32_t(row_blocks), uint32_t(batches), uint32_t(patterns), 0, 0};
    item.row_block = blockIdx.x / C::kCluster % item.row_blocks;
    item.batch = blockIdx.x / C::kCluster / item.row_blocks;
    return item;
  }
  __device__ bool exists() const { return batch < batches; }
  template <class C>
  __device__ void advance() {
    row_block += gridDim.x / C::kCluster;
    batch += row_block / row_blocks;
    row_block %= row_blocks;
  }
  // Of the item's vector rows in the patterns, and of its tiles.
  __device__ int64_t pattern() const { return batch % patterns; }
  __device__ int2 tiles(const int2* ranges) const { return __ldg(ranges + pattern() * row_blocks + row_block); }
};

// What a ring is fed with.
struct TileSource {
  const TmaDescriptor* keys;
  const TmaDescriptor* values;
  const float* scales;
  const int* alike;
  const float* biases;
  int64_t scale_batch, bias_batch;
  int rows;  // of K, of one matrix
  const uint32_t* ready;
  int64_t parts;
};

template <class C>
__device__ __forceinline__ void feed_item(const AttentionRing<C>& ring, PipelineState<C>& position, const AttentionItem& item,
                                          int2 tiles, const TileSource& source) {
  using Ring = AttentionRing<C>;
  const int first = int(item.batch) * source.rows;
  const bool alike = are_alike<C>(source.alike, item.batch), scaled = C::kKeyScale && !alike;
  position.stage = tiles.x % C::kStages;  // tile t always lies in stage t % kStages
  for (int tile = tiles.x; tile < tiles.y; ++tile, position.advance()) {
    const int stage = position.stage;
    barrier_wait(ring.empty(stage), position.parity() ^ 1);
    store_shared(ring.alike(stage), alike);
    const int left = source.rows - tile * C::kTile, exist = left < C::kTile ? left : C::kTile;
    const int boxes = (exist + Ring::kBoxRows - 1) / Ring::kBoxRows;
    const int of_factors = (int(scaled) + int(C::kBias)) * 4 * exist;
    mbarrier_arrive_expect_tx(ring.full(stage), 2 * boxes * Ring::kBoxRows * C::kHead + of_factors);
    const uint32_t factors = ring.base + Ring::kFactorsAt + stage * 2 * Ring::kFactorBytes;
    const int64_t key = int64_t{tile} * C::kTile;
    if (scaled) {
      bulk_copy(factors, source.scales + item.batch * source.scale_batch + key, 4 * exist, ring.full(stage));
    }
    if constexpr (C::kBias) {
      bulk_copy(factors + Ring::kFactorBytes, source.biases + item.batch * source.bias_batch + key, 4 * exist, ring.full(stage));
    }
    for (int box = C::kCluster == 1 ? 0 : cluster::rank(); box < boxes; box += C::kCluster) {
      const uint32_t to = ring.base + stage * Ring::kTileBytes + box * Ring::kBoxRows * C::kHead;
      const int y = first + tile * C::kTile + box * Ring::kBoxRows;
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const TmaDescriptor* map = i ? source.values : source.keys;
        if constexpr (C::kCluster == 1) tma_load_2d(to + i * Ring::kMatrixBytes, map, 0, y, ring.full(stage));
        else cluster::tma_load_2d_multicast((1 << C::kCluster) - 1, to + i * Ring::kMatrixBytes, map, 0, y, ring.full(stage));
      }
    }
  }
}

// All items of the block, by one warp, of which one lane does the work.
template <class C>
__device__ void feed_items(const AttentionRing<C>& ring, AttentionItem item, const int2* ranges, const TileSource& source, int lane) {
  PipelineState<C> position;
  for (; item.exists(); item.advance<C>()) {
    item.batch = wait_for_matrix(source.ready, source.parts, item.batch, lane);
    if (lane != 0) continue;
    fence_proxy_async_global();
    feed_item(ring, position, item, item.tiles(ranges), source);
  }
  if (lane == 0) ring.close(position.parities);
}

// Where a warp is in one vector row; the next step's keys are in registers or on their way.
template <class C>
struct AttentionCursor {
  int ahead;  // number of the step after that
  StepKeys<C> upcoming;

  __device__ void open(const uint32_t* words, int first, int lane) {
    ahead = first + 1;
    upcoming.load(words, first, lane);
  }
  // Whether the next step's last tile is this one. Every tile is looked at; there are no more than 255, and behind the last
  // step of a row is one that waits for tile 255.
  __device__ bool wants(int tile) const { return (upcoming.words[0] >> 16 & 0xFF) == uint32_t(tile); }
  __device__ StepKeys<C> take(const uint32_t* words, int lane) {
    const StepKeys<C> step = upcoming;
    upcoming.load(words, ahead, lane);
    ++ahead;
    return step;
  }
};

template <class D, class C>  // D: C, or C for keys with one scale
__device__ void attend_item(const AttentionRing<C>& ring, PipelineState<C>& position, AttentionCursor<D> (&cursors)[C::kRows],
                            AttentionRow<D> (&rows)[C::kRows], const uint32_t* words, int2 tiles, float top,
                            int lane) {
  position.stage = tiles.x % C::kStages;
  for (int tile = tiles.x; tile < tiles.y; ++tile) {
    barrier_wait(ring.full(position.stage), position.parity());
    CUTE_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      while (cursors[i].wants(tile)) {
        const StepKeys<D> step = cursors[i].take(words, lane);
        attend_step(rows[i], step, ring.places(step), top, lane);
      }
    }
    // What needs this tile and later ones is still to come; the oldest tile of the window is done with.
    __syncwarp();
    if (tile - tiles.x >= C::kWindow - 1) ring.release(position.before(C::kWindow - 1), lane);
    position.advance();
  }
  CUTE_UNROLL
  for (int i = C::kWindow - 1; i > 0; --i) {
    if (tiles.y - tiles.x >= i) ring.release(position.before(i), lane);
  }
}

// ranges: (patterns, row blocks of a cluster), the first tile that is needed and the one after the last; step_start:
// (patterns * vector rows + 1);
// words: (steps, kStep).
template <class C>
__global__ void __launch_bounds__((C::kWarps + 1) * 32, 1)
attention_panel(const __grid_constant__ TmaDescriptor keys_map, const __grid_constant__ TmaDescriptor values_map,
                const int2* ranges, const int32_t* step_start, const uint32_t* words, const uint8_t* q, void* out, float* lse,
                const float* q_scale, int64_t q_step, int64_t q_batch, const float* k_scale, int64_t k_batch,
                const int* alike, const float* v_scale, int64_t v_step, int64_t v_batch, const float* bias,
                int64_t bias_batch, const uint32_t* ready, int64_t parts, float scale, float top, float empty,
                int64_t queries, int64_t keys, int64_t vector_rows, int64_t row_blocks, int64_t batches, int64_t patterns) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  const AttentionRing<C> ring{{held(shared_address(shared))}};
  ring.open();
  wait_for_operands(ready);
  AttentionItem item = AttentionItem::first<C>(row_blocks, batches, patterns);
  if (warp == C::kWarps) {
    const TileSource source{&keys_map, &values_map, k_scale, alike, bias, k_batch, bias_batch, int(keys), ready, parts};
    feed_items(ring, item, ranges, source, lane);
    return;
  }
  const AttentionOperands operands{q, out, lse, q_scale, k_scale, v_scale, bias, q_step, q_batch, k_batch, v_step,
                                   v_batch, bias_batch, queries, scale, top, empty};
  constexpr int kBlockRows = C::kWarps * C::kRows;
  PipelineState<C> position;
  for (; item.exists(); item.advance<C>()) {
    const int64_t block = int64_t{item.row_block} * C::kCluster + (C::kCluster == 1 ? 0 : cluster::rank());
    const int64_t first = block * kBlockRows + warp * C::kRows, number = item.pattern() * vector_rows + first;
    const int present = first >= vector_rows ? 0 : vector_rows - first < C::kRows ? int(vector_rows - first) : C::kRows;
    int starts[C::kRows];
    CUTE_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      // Behind the last row is one without keys.
      starts[i] = __ldg(step_start + (i < present ? number + i : patterns * vector_rows));
    }
    const int2 tiles = item.tiles(ranges);
    uint32_t batch = item.batch, same[1];
    if (ready && tiles.x < tiles.y) {
      // The matrix is there when its first tile has come: the warp that feeds has waited for it.
      position.stage = tiles.x % C::kStages;
      barrier_wait(ring.full(position.stage), position.parity());
      load_shared(ring.alike(position.stage), same);
      batch = held(batch);
    } else {
      batch = wait_for_matrix(ready, parts, batch, lane);
      same[0] = are_alike<C>(alike, batch);
    }
    const auto attend = [&](auto config) {
      using D = decltype(config);
      AttentionCursor<D> cursors[C::kRows];
      AttentionRow<D> rows[C::kRows];
      CUTE_UNROLL
      for (int i = 0; i < C::kRows; ++i) {
        cursors[i].open(words, starts[i], lane);
        rows[i].open(operands, batch, first + i, i < present, lane);
      }
      attend_item(ring, position, cursors, rows, words, tiles, top, lane);
      CUTE_UNROLL
      for (int i = 0; i < C::kRows; ++i) {
        if (i < present) write_row(operands, rows[i], batch, first + i, lane);
      }
    };
    if (C::kKeyScale && uniform(same[0])) attend(Alike<C>{});
    else attend(C{});
  }
  end_after_operands(ready);
}

}  // namespace magicube
