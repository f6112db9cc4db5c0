// Fused sparse attention, panel kernel: O = softmax(scale Q K^T + bias) V at the vectors of a mask.
//
// Architectures: sm_90a and later (TMA, clusters).
// Work: a persistent CTA computes blocks of kWarps * kRowsPerWarp vector rows (8 queries each); each of kWarps consumer warps holds
// the accumulators of kRowsPerWarp vector rows in registers.
// Pipeline: one producer warp loads tiles of kTile rows of K, then of V, by TMA into a ring of kStages stages; full and empty
// mbarriers per stage, no CTA barrier. A step takes its keys from at most kTileWindow consecutive tiles and addresses them by
// their offset in the ring. The kCluster CTAs of a cluster share a matrix; each loads a part of every tile by multicast.
// Source: Li, Osawa, Hoefler, SC'22, section V-C.
#pragma once

#include "attention/common.cuh"
#include "device/pipeline.cuh"

namespace magicube {

template <class C>
struct AttentionRing : TmaPipeline<C, C::kStages * 2 * C::kTile * C::kHead> {
  static constexpr int kMatrixBytes = C::kTile * C::kHead;    // bytes of a tile of K or V
  static constexpr int kTileBytes = 2 * kMatrixBytes;
  static constexpr int kPart = C::kTile / C::kCluster;        // rows that one CTA loads
  static constexpr int kBoxRows = kPart < 256 ? kPart : 256;  // limit of a TMA box
  static constexpr int kRingBytes = C::kStages * kTileBytes;
  static_assert(C::kStages > C::kTileWindow, "a tile must be able to arrive while a step's window is in use");
  static_assert(C::kTile % kBoxRows == 0 && kRingBytes <= 16 << 16, "a tile is whole boxes; offsets have 16 bits");

  // After the tiles: two mbarriers per stage; per stage whether the keys of its matrix share one scale; per stage the scales
  // and the biases of the keys.
  static constexpr int kSharedScaleAt = kRingBytes + 16 * C::kStages;
  static constexpr int kScalesAt = kSharedScaleAt + (4 * C::kStages + 15) / 16 * 16;
  static constexpr int kScaleBytes = 4 * C::kTile;

  __device__ uint32_t shared_scale(int stage) const { return this->base + kSharedScaleAt + stage * 4; }

  template <class D>  // D: C or SharedKeyScale<C>
  __device__ StepAddresses<D> addresses(const StepKeys<D>& step) const {
    constexpr int kChunks = AttentionShape<C>::kChunks;
    StepAddresses<D> at;
    at.values = kMatrixBytes;
    at.biases = kScaleBytes;
    CUTE_UNROLL
    for (int i = 0; i < C::kGroups; ++i) {
      const uint32_t place = step.words[i] & 0xFFFF;
      at.rows[i] = this->base + place * 16;
      if constexpr (AttentionShape<D>::kKeyed) at.scales[i] = this->base + kScalesAt + place / kChunks * 4;
    }
    return at;
  }
};

// Work item of a cluster: a block of vector rows of one matrix. Concurrent CTAs share a matrix, which L2 then holds. 32 bits
// because a 64-bit division is a call; the host checks that they suffice.
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
  // Pattern of the item, and the range of its tiles.
  __device__ int64_t pattern() const { return batch % patterns; }
  __device__ int2 tiles(const int2* ranges) const { return __ldg(ranges + pattern() * row_blocks + row_block); }
};

// Source of the producer.
struct TileSource {
  const TmaDescriptor* keys;
  const TmaDescriptor* values;
  const float* scales;
  const int* shared_scale;
  const float* biases;
  int64_t scale_batch, bias_batch;
  int rows;  // rows of K per matrix
  const uint32_t* ready;
  int64_t parts;
};

template <class C>
__device__ __forceinline__ void load_item(const AttentionRing<C>& ring, PipelineState<C>& position, const AttentionItem& item,
                                          int2 tiles, const TileSource& source) {
  using Ring = AttentionRing<C>;
  const int first = int(item.batch) * source.rows;
  const bool shared_scale = keys_share_scale<C>(source.shared_scale, item.batch), scaled = C::kKeyScale && !shared_scale;
  position.stage = tiles.x % C::kStages;  // tile t is always in stage t % kStages
  for (int tile = tiles.x; tile < tiles.y; ++tile, position.advance()) {
    const int stage = position.stage;
    barrier_wait(ring.empty(stage), position.parity() ^ 1);
    store_shared(ring.shared_scale(stage), shared_scale);
    const int left = source.rows - tile * C::kTile, exist = left < C::kTile ? left : C::kTile;
    const int boxes = (exist + Ring::kBoxRows - 1) / Ring::kBoxRows;
    const int scale_bytes = (int(scaled) + int(C::kBias)) * 4 * exist;
    mbarrier_arrive_expect_tx(ring.full(stage), 2 * boxes * Ring::kBoxRows * C::kHead + scale_bytes);
    const uint32_t factors = ring.base + Ring::kScalesAt + stage * 2 * Ring::kScaleBytes;
    const int64_t key = int64_t{tile} * C::kTile;
    if (scaled) {
      bulk_copy(factors, source.scales + item.batch * source.scale_batch + key, 4 * exist, ring.full(stage));
    }
    if constexpr (C::kBias) {
      bulk_copy(factors + Ring::kScaleBytes, source.biases + item.batch * source.bias_batch + key, 4 * exist, ring.full(stage));
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

// Producer warp: load the tiles of all items of the CTA; one lane issues.
template <class C>
__device__ void producer_loop(const AttentionRing<C>& ring, AttentionItem item, const int2* ranges, const TileSource& source,
                              int lane) {
  PipelineState<C> position;
  for (; item.exists(); item.advance<C>()) {
    item.batch = wait_for_matrix(source.ready, source.parts, item.batch, lane);
    if (lane != 0) continue;
    fence_proxy_async_global();
    load_item(ring, position, item, item.tiles(ranges), source);
  }
  if (lane == 0) ring.close(position.parities);
}

// Position of a warp in one vector row. The words of the next step are in registers or in flight.
template <class C>
struct AttentionCursor {
  int ahead;  // index of the step after the next
  StepKeys<C> upcoming;

  __device__ void open(const uint32_t* words, int first, int lane) {
    ahead = first + 1;
    upcoming.load(words, first, lane);
  }
  // Whether the next step can run once `tile` has arrived. Tile numbers are below 255; the sentinel after the last step of a
  // row waits for tile 255.
  __device__ bool is_due(int tile) const { return (upcoming.words[0] >> 16 & 0xFF) == uint32_t(tile); }
  __device__ StepKeys<C> take(const uint32_t* words, int lane) {
    const StepKeys<C> step = upcoming;
    upcoming.load(words, ahead, lane);
    ++ahead;
    return step;
  }
};

template <class D, class C>  // D: C or SharedKeyScale<C>
__device__ void consume_item(const AttentionRing<C>& ring, PipelineState<C>& position, AttentionCursor<D> (&cursors)[C::kRowsPerWarp],
                            AttentionRow<D> (&rows)[C::kRowsPerWarp], const uint32_t* words, int2 tiles, float log2_max,
                            int lane) {
  position.stage = tiles.x % C::kStages;
  for (int tile = tiles.x; tile < tiles.y; ++tile) {
    barrier_wait(ring.full(position.stage), position.parity());
    CUTE_UNROLL
    for (int i = 0; i < C::kRowsPerWarp; ++i) {
      while (cursors[i].is_due(tile)) {
        const StepKeys<D> step = cursors[i].take(words, lane);
        process_step(rows[i], step, ring.addresses(step), log2_max, lane);
      }
    }
    // No later step needs the oldest tile of the window.
    __syncwarp();
    if (tile - tiles.x >= C::kTileWindow - 1) ring.release(position.before(C::kTileWindow - 1), lane);
    position.advance();
  }
  CUTE_UNROLL
  for (int i = C::kTileWindow - 1; i > 0; --i) {
    if (tiles.y - tiles.x >= i) ring.release(position.before(i), lane);
  }
}

// ranges: (patterns, row blocks of a cluster), first tile and the one after the last;
// step_start: (patterns * vector rows + 1,); words: (steps, kStep).
template <class C>
__global__ void __launch_bounds__((C::kWarps + 1) * 32, 1)
attention_panel(const __grid_constant__ TmaDescriptor keys_map, const __grid_constant__ TmaDescriptor values_map,
                const int2* ranges, const int32_t* step_start, const uint32_t* words, const uint8_t* q, void* out, float* lse,
                const float* q_scale, int64_t q_stride, int64_t q_batch, const float* k_scale, int64_t k_batch,
                const int* shared_scale, const float* v_scale, int64_t v_stride, int64_t v_batch, const float* bias,
                int64_t bias_batch, const uint32_t* ready, int64_t parts, float scale, float log2_max, float empty,
                int64_t queries, int64_t keys, int64_t vector_rows, int64_t row_blocks, int64_t batches, int64_t patterns) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  const AttentionRing<C> ring{{held(shared_address(shared))}};
  ring.open();
  wait_for_operands(ready);
  AttentionItem item = AttentionItem::first<C>(row_blocks, batches, patterns);
  if (warp == C::kWarps) {
    const TileSource source{&keys_map, &values_map, k_scale, shared_scale, bias, k_batch, bias_batch, int(keys), ready, parts};
    producer_loop(ring, item, ranges, source, lane);
    return;
  }
  const AttentionOperands operands{q, out, lse, q_scale, k_scale, v_scale, bias, q_stride, q_batch, k_batch, v_stride,
                                   v_batch, bias_batch, queries, scale, log2_max, empty};
  constexpr int kBlockRows = C::kWarps * C::kRowsPerWarp;
  PipelineState<C> position;
  for (; item.exists(); item.advance<C>()) {
    const int64_t block = int64_t{item.row_block} * C::kCluster + (C::kCluster == 1 ? 0 : cluster::rank());
    const int64_t first = block * kBlockRows + warp * C::kRowsPerWarp, number = item.pattern() * vector_rows + first;
    const int present = first >= vector_rows ? 0 : vector_rows - first < C::kRowsPerWarp ? int(vector_rows - first) : C::kRowsPerWarp;
    int starts[C::kRowsPerWarp];
    CUTE_UNROLL
    for (int i = 0; i < C::kRowsPerWarp; ++i) {
      // The row after the last one has no keys.
      starts[i] = __ldg(step_start + (i < present ? number + i : patterns * vector_rows));
    }
    const int2 tiles = item.tiles(ranges);
    uint32_t batch = item.batch, same[1];
    if (ready && tiles.x < tiles.y) {
      // The producer has waited for the matrix: it is written once its first tile has arrived.
      position.stage = tiles.x % C::kStages;
      barrier_wait(ring.full(position.stage), position.parity());
      load_shared(ring.shared_scale(position.stage), same);
      batch = held(batch);
    } else {
      batch = wait_for_matrix(ready, parts, batch, lane);
      same[0] = keys_share_scale<C>(shared_scale, batch);
    }
    const auto run = [&](auto config) {
      using D = decltype(config);
      AttentionCursor<D> cursors[C::kRowsPerWarp];
      AttentionRow<D> rows[C::kRowsPerWarp];
      CUTE_UNROLL
      for (int i = 0; i < C::kRowsPerWarp; ++i) {
        cursors[i].open(words, starts[i], lane);
        rows[i].open(operands, batch, first + i, i < present, lane);
      }
      consume_item(ring, position, cursors, rows, words, tiles, log2_max, lane);
      CUTE_UNROLL
      for (int i = 0; i < C::kRowsPerWarp; ++i) {
        if (i < present) write_row(operands, rows[i], batch, first + i, lane);
      }
    };
    if (C::kKeyScale && uniform(same[0])) run(SharedKeyScale<C>{});
    else run(C{});
  }
  end_after_operands(ready);
}

}  // namespace magicube
