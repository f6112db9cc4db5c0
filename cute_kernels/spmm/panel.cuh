// SpMM, panel kernel: C = row_scale * col_scale * (A B) + bias, A sparse.
//
// Architectures: sm_90a and later (TMA, clusters).
// Work: a persistent CTA computes kWarps * kRowsPerWarp vector rows and one N tile at a time; each of kWarps consumer warps
// holds the accumulators of kRowsPerWarp vector rows in registers over all of K.
// Pipeline: one producer warp loads tiles of kTile rows of B by TMA into a ring of kStages stages; full and empty mbarriers
// per stage, no CTA barrier. The kCluster CTAs of a cluster share an N tile; each loads a part of every tile by multicast.
// A: a record is one group. It takes its rows of B from at most kTileWindow consecutive tiles and addresses them by their
// offset in the ring. Records are loaded ahead into registers, or by cp.async into kAStages stages per warp.
// Source: Li, Osawa, Hoefler, SC'22, sections IV-A to IV-D.
#pragma once

#include "device/pipeline.cuh"
#include "device/warpgroup.cuh"
#include "spmm/pairs.cuh"
#include "spmm/record.cuh"

namespace magicube {

template <class C>
struct PanelRing : TmaPipeline<C, C::kStages * C::kTile * C::kTileNBytes> {
  static constexpr int kTileBytes = C::kTile * C::kTileNBytes;
  static constexpr int kPart = C::kTile / C::kCluster;        // rows that one CTA loads
  static constexpr int kBoxRows = kPart < 256 ? kPart : 256;  // limit of a TMA box
  static constexpr int kRingBytes = C::kStages * kTileBytes;
  // A single stage: no prefetch, a tile is loaded once no warp needs the one before.
  static_assert(C::kStages > C::kTileWindow || (C::kStages == 1 && C::kTileWindow == 1),
                "a tile must be able to arrive while a group's window is in use");
  static_assert(C::kTile % kBoxRows == 0, "a tile must be whole boxes");

  // After the tiles: two mbarriers per stage; per warp column scales, stages of A and, if C::kPairs, results that its neighbor writes.
  static constexpr int kScalesAt = kRingBytes + 16 * C::kStages;
  static constexpr int kRecordsAt = kScalesAt + 4 * SpmmShape<C>::kTileN * C::kWarps;
  static constexpr int kExchangeAt = kRecordsAt + C::kWarps * C::kAStages * C::kRecordBytes;
  static constexpr int kExchangeBytes = C::kPairs && C::kRowsPerWarp == 1 ? SpmmShape<C>::kTileN / 2 * 16 : 0;  // half of a warp's results

  int tiles;  // per work item; each item starts at stage 0, so that a row of B always has the same offset in the ring
};

// Work item of a cluster: a block of vector rows and an N tile. Concurrent CTAs share an N tile, which L2 then holds. 32 bits
// because a 64-bit division is a call; the host checks that they suffice.
template <class C>
struct PanelItem {
  uint32_t row_blocks, n_tiles, batches;
  uint32_t row_block, n_tile, batch;
  uint32_t row_step, n_tile_step;  // from an item of a cluster to its next one

  __device__ PanelItem(int64_t vector_rows, int64_t block_rows, int64_t n, int64_t columns, int64_t batch_count,
                       int64_t row_step, int64_t n_tile_step)
      : row_blocks(uint32_t((vector_rows + block_rows - 1) / block_rows)),
        n_tiles(uint32_t((n + columns - 1) / columns)),
        batches(uint32_t(batch_count)),
        row_block(blockIdx.x / C::kCluster % row_blocks),
        n_tile(blockIdx.x / C::kCluster / row_blocks),
        batch(0),
        row_step(uint32_t(row_step)),
        n_tile_step(uint32_t(n_tile_step)) {
    wrap();
  }
  __device__ bool exists() const { return batch < batches; }
  // Block of vector rows of this CTA.
  __device__ int64_t block() const {
    if constexpr (C::kCluster == 1) return row_block;
    else return int64_t{row_block} * C::kCluster + cluster::rank();
  }
  __device__ void advance() {
    n_tile += n_tile_step;
    row_block += row_step;
    if (row_block >= row_blocks) {
      row_block -= row_blocks;
      ++n_tile;
    }
    wrap();
  }

 private:
  __device__ void wrap() {
    for (; n_tile >= n_tiles; ++batch) n_tile -= n_tiles;
  }
};

// Producer: load the tiles of all items. fold: a row of the tensor map is 2^fold contiguous rows of B.
template <class C>
__device__ void producer_loop(const PanelRing<C>& ring, PanelItem<C> item, const TmaDescriptor* map, int64_t inner, int64_t batch_rows,
                     int fold) {
  using Ring = PanelRing<C>;
  PipelineState<C> position;
  for (; item.exists(); item.advance(), position.stage = 0) {
    const int x = int(item.n_tile * C::kTileNBytes), first = int(item.batch * batch_rows);
    for (int tile = 0; tile < ring.tiles; ++tile, position.advance()) {
      const int stage = position.stage;
      barrier_wait(ring.empty(stage), position.parity() ^ 1);
      const int64_t remaining = inner - int64_t{tile} * C::kTile;
      const int boxes = remaining >= C::kTile ? C::kTile / Ring::kBoxRows : int((remaining + Ring::kBoxRows - 1) / Ring::kBoxRows);
      mbarrier_arrive_expect_tx(ring.full(stage), boxes * Ring::kBoxRows * C::kTileNBytes);
      for (int box = C::kCluster == 1 ? 0 : cluster::rank(); box < boxes; box += C::kCluster) {
        const uint32_t to = ring.base + stage * Ring::kTileBytes + box * Ring::kBoxRows * C::kTileNBytes;
        const int row = first + tile * C::kTile + box * Ring::kBoxRows, y = C::kAStages > 0 ? row >> fold : row;
        if constexpr (C::kCluster == 1) tma_load_2d(to, map, x, y, ring.full(stage));
        else cluster::tma_load_2d_multicast((1 << C::kCluster) - 1, to, map, x, y, ring.full(stage));
      }
    }
  }
  ring.close(position.parities);
}

// Packed operand A.
struct PanelMatrix {
  const int64_t* group_start;  // (units + 1,)
  const uint32_t* counts;      // (units + 2, tiles, words), two 16-bit counts per word
  const uint32_t* records;     // (records, record words)
  const int32_t* order;        // ((units + 1) * kRowsPerWarp,); if C::kPairs, vector rows 2 p and 2 p + 1 are side by side

  __device__ const uint32_t* counted(int64_t unit, int words) const { return counts + unit * words; }
};

// Records of the vector rows of a warp, in order of their tiles. The next two are in registers or in flight.
template <class C, bool kRing = (C::kAStages > 0)>
struct GroupStream {
  using Group = Record<C>;

  const uint32_t* first;
  uint32_t after;  // words from `first` to the record after those
  Group current, next;

  __device__ void open(const uint32_t* records, uint32_t, int lane) {
    // Two records exist beyond the last one, so that loads need no predication.
    first = records;
    current.load(first, lane);
    next.load(first + Group::kRecordWords, lane);
    after = 2 * Group::kRecordWords;
  }

  __device__ void begin(int) {}  // before a record is multiplied
  __device__ void end(int lane) {
    current = next;
    next.load(first + after, lane);
    after += Group::kRecordWords;
  }
};

// As above, with kAStages records in shared memory or in flight: with short rows of B, two records do not hide the latency.
template <class C>
struct GroupStream<C, true> {
  using Group = Record<C>;
  static constexpr int kRecordBytes = 4 * Group::kRecordWords, kPieces = kRecordBytes / 16;
  static_assert(kRecordBytes % 16 == 0, "a record must be whole 16-byte copies");
  static_assert(kRecordBytes == C::kRecordBytes, "host and device must agree");

  const uint8_t* next;
  uint32_t ring;
  int slot;  // stage of the next record
  Group current;

  // kAStages records exist beyond the last one. Earlier copies must have completed.
  __device__ void open(const uint32_t* records, uint32_t at, int lane) {
    next = reinterpret_cast<const uint8_t*>(records);
    ring = at;
    slot = 0;
    CUTE_UNROLL
    for (int i = 0; i < C::kAStages - 1; ++i) fetch(i, lane);
  }
  __device__ void begin(int lane) {
    cp_async_wait<C::kAStages - 2>();  // the column scales are in a later cp.async group
    __syncwarp();
    current.read(ring + slot * kRecordBytes, lane);
    fetch(slot == 0 ? C::kAStages - 1 : slot - 1, lane);  // the stage of the previous record
    slot = slot + 1 == C::kAStages ? 0 : slot + 1;
  }
  __device__ void end(int) {}

 private:
  __device__ void fetch(int to, int lane) {
    CUTE_UNROLL
    for (int i = 0; i < kPieces; i += 32) {
      if (i + lane < kPieces) cp_async(ring + to * kRecordBytes + (i + lane) * 16, next + (i + lane) * 16, 16);
    }
    cp_async_commit();
    next += kRecordBytes;
  }
};

// Records of each vector row of a warp whose last tile is the current one: 16-bit counts. Lane i holds those of tile 32 n + i.
template <class C>
struct TileCounts {
  static constexpr int kWords = (C::kRowsPerWarp + 1) / 2;
  uint32_t words[kWords];

  // from: (tiles, words).
  __device__ void load(const uint32_t* from, int tile, int tiles) {
    load_words<kWords>(words, from + (tile < tiles ? tile : tiles) * kWords);  // one more tile exists
  }
  // A shuffle waits for the load here; else the compiler waits at each tile, for the records in flight too.
  __device__ void wait_for_load(int lane) {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) words[i] = __shfl_sync(~0u, words[i], lane);
  }
  // Broadcast the counts of a tile; the shuffle makes them warp-uniform for the compiler.
  __device__ void broadcast(int tile, uint32_t (&counts)[kWords]) const {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) counts[i] = __shfl_sync(~0u, words[i], tile % 32);
  }
};

// A for one work item of a warp: records, counts per tile, and vector rows.
template <class C>
struct PanelStream {
  GroupStream<C> groups;
  TileCounts<C> counts;
  int rows[C::kRowsPerWarp];

  // start: first record; ring: shared memory of the stages of A.
  __device__ void open(const PanelMatrix& matrix, int64_t unit, int64_t start, int tiles, uint32_t ring, int lane) {
    CUTE_UNROLL
    for (int i = 0; i < C::kRowsPerWarp; ++i) rows[i] = matrix.order[unit * C::kRowsPerWarp + i];
    groups.open(matrix.records + uniform(start) * Record<C>::kRecordWords, ring, lane);
    counts.load(matrix.counted(unit, tiles * TileCounts<C>::kWords), lane, tiles);
  }
};

template <class C, class UnitOf>
__device__ void consume_item(const PanelRing<C>& ring, PipelineState<C>& position, const PanelMatrix& matrix,
                              PanelStream<C>& stream, const UnitOf& unit, Accumulators<C> (&acc)[C::kRowsPerWarp], int lane) {
  // Two loops: at a branch the compiler waits for loads in flight.
  for (int first = 0; first < ring.tiles; first += 32) {
    uint32_t counts[TileCounts<C>::kWords], next[TileCounts<C>::kWords];
    if (first > 0) {
      stream.counts.load(matrix.counted(unit(), ring.tiles * TileCounts<C>::kWords), first + lane, ring.tiles);
    }
    stream.counts.wait_for_load(lane);
    stream.counts.broadcast(0, next);
    const int end = ring.tiles < first + 32 ? ring.tiles : first + 32;
    for (int tile = first; tile < end; ++tile) {
      CUTE_UNROLL
      for (int i = 0; i < TileCounts<C>::kWords; ++i) counts[i] = next[i];
      stream.counts.broadcast(tile + 1, next);  // early: a shuffle waits behind shared-memory reads
      barrier_wait(ring.full(position.stage), position.parity());
      CUTE_UNROLL
      for (int i = 0; i < C::kRowsPerWarp; ++i) {
        CUTE_NO_UNROLL
        for (int remaining = i % 2 ? counts[i / 2] >> 16 : counts[i / 2] & 0xFFFF; remaining > 0; --remaining) {
          stream.groups.begin(lane);
          add_record(acc[i], stream.groups.current, ring.base);
          stream.groups.end(lane);
        }
      }
      // No later record needs the oldest tile of the window.
      __syncwarp();
      if (tile >= C::kTileWindow - 1) ring.release(position.before(C::kTileWindow - 1), lane);
      position.advance();
    }
  }
  CUTE_UNROLL
  for (int i = C::kTileWindow - 1; i > 0; --i) {
    if (ring.tiles >= i) ring.release(position.before(i), lane);
  }
  position.stage = 0;
}

// Copy the column scales of an N tile to shared memory.
template <class C>
__device__ void stage_col_scales(float* to, const float* from, int64_t count, int lane) {
  __syncwarp();  // the scales of the previous item have been read
  for (int i = lane; i < SpmmShape<C>::kTileN && i < count; i += 32) copy_async_word(shared_address(to + i), from + i);
  cp_async_commit();
}

template <class C>
__global__ void __launch_bounds__((C::kWarps + 1) * 32, 1)
spmm_panel(const __grid_constant__ TmaDescriptor map, const int64_t* group_start, const uint32_t* counts,
           const uint32_t* records, const int32_t* order, void* out, const float* row_scale, int64_t row_scale_stride,
           const float* col_scale, int64_t col_scale_stride, int64_t col_scale_batch, const float* bias, int64_t rows,
           int64_t vector_rows, int64_t n, int64_t inner, int64_t batches, int64_t batch_rows, int64_t row_step,
           int64_t n_tile_step, int64_t vector_stores, int64_t fold) {
  using S = SpmmShape<C>;
  using Total = TotalOf<C>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  const PanelRing<C> ring{{held(shared_address(shared))}, int((inner + C::kTile - 1) / C::kTile)};
  constexpr int kBlockRows = C::kWarps * C::kRowsPerWarp;
  PanelItem<C> item(vector_rows, kBlockRows * C::kCluster, n, S::kTileN, batches, row_step, n_tile_step);
  const auto unit = [&] {
    // A warp without vector rows has the unit after the last one, which has no records.
    const int64_t units = (vector_rows + kBlockRows - 1) / kBlockRows * C::kWarps, own = item.block() * C::kWarps + warp;
    return own < units ? own : units;
  };
  const int64_t start = group_start[unit()];  // in flight during the initialization of the mbarriers
  ring.open();
  if (warp == C::kWarps) {
    if (lane == 0) {
      pdl_wait();
      producer_loop(ring, item, &map, inner, batch_rows, int(fold));
    }
    return;
  }
  float* const scales = reinterpret_cast<float*>(shared + PanelRing<C>::kScalesAt) + warp * S::kTileN;
  // Per-column scales are copied to shared memory during the mainloop.
  const bool staged = col_scale && col_scale_stride == 1;
  PanelStream<C> stream;
  Accumulators<C> acc[C::kRowsPerWarp];
  PipelineState<C> position;
  const PanelMatrix matrix{group_start, counts, records, order};
  const uint32_t records_at =
      shared_address(shared) + PanelRing<C>::kRecordsAt + warp * C::kAStages * Record<C>::kRecordWords * 4;
  stream.open(matrix, unit(), start, ring.tiles, records_at, lane);
  pdl_wait();
  while (item.exists()) {
    const int64_t n0 = int64_t{item.n_tile} * S::kTileN;
    CUTE_UNROLL
    for (int i = 0; i < C::kRowsPerWarp; ++i) acc[i].clear();
    if (staged) stage_col_scales<C>(scales, col_scale + item.batch * col_scale_batch + n0, n - n0, lane);
    consume_item(ring, position, matrix, stream, unit, acc, lane);
    cp_async_wait<0>();
    __syncwarp();
    const SpmmOperands operands{row_scale, staged ? scales - n0 : col_scale, bias, out, rows, n, row_scale_stride, col_scale_stride,
                                staged ? 0 : col_scale_batch, vector_stores != 0};
    const uint32_t batch = item.batch;
    int own[C::kRowsPerWarp];
    CUTE_UNROLL
    for (int i = 0; i < C::kRowsPerWarp; ++i) own[i] = stream.rows[i];
    item.advance();
    // The first loads of the next item are in flight during the epilogue.
    if (item.exists()) stream.open(matrix, unit(), group_start[unit()], ring.tiles, records_at, lane);
    if constexpr (C::kPairs && C::kRowsPerWarp > 1) {
      CUTE_UNROLL
      for (int i = 0; i < C::kRowsPerWarp; i += 2) {
        if (own[i] < vector_rows) write_pair<C>(OwnPair<C>{acc[i], acc[i + 1], own[i]}, operands, batch, own[i], n0, lane);
      }
    } else if constexpr (C::kPairs) {  // both warps of a pair that exists come here
      const uint32_t exchange = shared_address(shared) + PanelRing<C>::kExchangeAt;
      const int even = own[0] & ~1;
      if (even < vector_rows) write_pair<C>(SharedPair<C>{acc[0], own[0], warp, lane, exchange}, operands, batch, even, n0, lane);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < C::kRowsPerWarp; ++i) {
        if (own[i] < vector_rows) write_accumulators<Total>(operands, acc[i], batch, own[i], n0, lane);
      }
    }
  }
}

}  // namespace magicube
