// SpMM, panel kernel (sm_90 on): a block keeps tiles of a strip of B in shared memory and runs many vector rows on them.
//
// One warp feeds a ring of kStages tiles of kTile rows by the tensor copy engine; kWarps warps multiply, each kRowsPerWarp vector
// rows whose sums stay in registers over all of k. Barriers count full and empty tiles; the block never meets at one.
// The kCluster blocks of a cluster work on the same strip, and fetch a part of every tile each, for all of them.
// The execution copy is made so that a group takes its rows from kTileWindow neighbouring tiles at most, and names them by
// where they lie in the ring.
#pragma once

#include "device/pipeline.cuh"
#include "spmm/common.cuh"

namespace magicube {

template <class C>
struct PanelRing : TmaPipeline<C, C::kStages * C::kTile * C::kTileNBytes> {
  static constexpr int kTileBytes = C::kTile * C::kTileNBytes;
  static constexpr int kPart = C::kTile / C::kCluster;        // rows that one block fetches
  static constexpr int kBoxRows = kPart < 256 ? kPart : 256;  // the copy engine's limit
  static constexpr int kRingBytes = C::kStages * kTileBytes;
  static_assert(C::kStages > C::kTileWindow, "a tile must be able to arrive while a group's window is in use");
  static_assert(C::kTile % kBoxRows == 0, "a tile is whole boxes");

  // Behind the tiles: two barriers a stage, then the factors of each warp's strip, then its records of A on their way.
  static constexpr int kFactorsAt = kRingBytes + 16 * C::kStages;
  static constexpr int kRecordsAt = kFactorsAt + 4 * SpmmShape<C>::kColumns * C::kWarps;

  int tiles;  // every item walks all of them from stage 0 on, so that a row of B always lies at the same place
};

// What a cluster works on: a block of vector rows times a strip of B. Blocks that run at the same time share a strip, which
// the second-level cache then holds. 32 bits, because a division of 64 is a call; the host sees to it that they suffice.
template <class C>
struct PanelItem {
  uint32_t row_blocks, strips, batches;
  uint32_t row_block, strip, batch;
  uint32_t row_step, strip_step;  // from one item of a cluster to its next one

  __device__ PanelItem(int64_t vector_rows, int64_t block_rows, int64_t n, int64_t columns, int64_t batch_count,
                       int64_t row_step, int64_t strip_step)
      : row_blocks(uint32_t((vector_rows + block_rows - 1) / block_rows)),
        strips(uint32_t((n + columns - 1) / columns)),
        batches(uint32_t(batch_count)),
        row_block(blockIdx.x / C::kCluster % row_blocks),
        strip(blockIdx.x / C::kCluster / row_blocks),
        batch(0),
        row_step(uint32_t(row_step)),
        strip_step(uint32_t(strip_step)) {
    settle();
  }
  __device__ bool exists() const { return batch < batches; }
  // This block's block of vector rows.
  __device__ int64_t block() const {
    if constexpr (C::kCluster == 1) return row_block;
    else return int64_t{row_block} * C::kCluster + cluster::rank();
  }
  __device__ void advance() {
    strip += strip_step;
    row_block += row_step;
    if (row_block >= row_blocks) {
      row_block -= row_blocks;
      ++strip;
    }
    settle();
  }

 private:
  __device__ void settle() {
    for (; strip >= strips; ++batch) strip -= strips;
  }
};

// `fold`: rows of B that are one of the map's lie behind each other without gaps, 2^fold of them.
template <class C>
__device__ void producer_loop(const PanelRing<C>& ring, PanelItem<C> item, const TmaDescriptor* map, int64_t inner, int64_t batch_rows,
                     int fold) {
  using Ring = PanelRing<C>;
  PipelineState<C> position;
  for (; item.exists(); item.advance(), position.stage = 0) {
    const int x = int(item.strip * C::kTileNBytes), first = int(item.batch * batch_rows);
    for (int tile = 0; tile < ring.tiles; ++tile, position.advance()) {
      const int stage = position.stage;
      barrier_wait(ring.empty(stage), position.parity() ^ 1);
      const int64_t left = inner - int64_t{tile} * C::kTile;
      const int boxes = left >= C::kTile ? C::kTile / Ring::kBoxRows : int((left + Ring::kBoxRows - 1) / Ring::kBoxRows);
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

// One group as a lane holds it: where its rows lie in the ring, and its values.
template <class C>
struct PanelGroup {
  using S = SpmmShape<C>;
  static constexpr int kSlots = S::Shape::kK;
  static constexpr int kSlotLanes = (kSlots + 31) / 32;
  static constexpr int kRecordWords = int(S::kGroupWords) + kSlots / 2;

  uint32_t place[kSlotLanes];  // in units of 16 bytes, swizzled
  SparseFragment<C> values;

  // A record is the values in fragment order, then the places, 16 bits each.
  __device__ void load(const uint32_t* record, int lane) {
    const uint16_t* places = reinterpret_cast<const uint16_t*>(record + S::kGroupWords);
    CUTE_UNROLL
    for (int i = 0; i < kSlotLanes; ++i) place[i] = __ldg(places + 32 * i + lane % kSlots);
    values.load(record, lane);
  }
  // The same from shared memory.
  __device__ void read(uint32_t at, int lane) {
    CUTE_UNROLL
    for (int i = 0; i < kSlotLanes; ++i) place[i] = load_shared_half(at + S::kGroupWords * 4 + 2 * (32 * i + lane % kSlots));
    values.read(at, lane);
  }
};

// The execution copy of A, as the host makes it.
struct PanelMatrix {
  const int64_t* group_start;
  const uint32_t* counts;
  const uint32_t* records;
  const int32_t* order;

  __device__ const uint32_t* counted(int64_t unit, int words) const { return counts + unit * words; }
};

// What a warp goes through: the groups of its vector rows, tile after tile, in the order of their use. The next two are in
// registers or on their way.
template <class C, bool kRing = (C::kAStages > 0)>
struct GroupStream {
  using Group = PanelGroup<C>;

  const uint32_t* first;
  uint32_t after;  // words from there to the record after those
  Group current, next;

  __device__ void open(const uint32_t* records, uint32_t, int lane) {
    // Two records beyond the last one exist, so that nothing need be asked before a load.
    first = records;
    current.load(first, lane);
    next.load(first + Group::kRecordWords, lane);
    after = 2 * Group::kRecordWords;
  }

  __device__ void take(int) {}  // before a group is multiplied
  __device__ void leave(int lane) {
    current = next;
    next.load(first + after, lane);
    after += Group::kRecordWords;
  }
};

// The same with kAStages of them in shared memory or on their way there: where B's rows are short, a group is done with long
// before the one after the next has come from memory.
template <class C>
struct GroupStream<C, true> {
  using Group = PanelGroup<C>;
  static constexpr int kRecordBytes = 4 * Group::kRecordWords, kPieces = kRecordBytes / 16;
  static_assert(kRecordBytes % 16 == 0, "a record is copied in pieces of 16 bytes");
  static_assert(kRecordBytes == C::kRecordBytes, "the host has made room for them");

  const uint8_t* next;
  uint32_t ring;
  int slot;  // of the group that is taken next
  Group current;

  // As many records beyond the last one exist. What was on its way here before must have come.
  __device__ void open(const uint32_t* records, uint32_t at, int lane) {
    next = reinterpret_cast<const uint8_t*>(records);
    ring = at;
    slot = 0;
    CUTE_UNROLL
    for (int i = 0; i < C::kAStages - 1; ++i) fetch(i, lane);
  }
  __device__ void take(int lane) {
    cp_async_wait<C::kAStages - 2>();  // a strip's factors, behind the first records, only make it wait for one more
    __syncwarp();
    current.read(ring + slot * kRecordBytes, lane);
    fetch(slot == 0 ? C::kAStages - 1 : slot - 1, lane);  // which was read the time before
    slot = slot + 1 == C::kAStages ? 0 : slot + 1;
  }
  __device__ void leave(int) {}

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

// How many groups of each vector row of a warp need a tile, and none beyond it: 16 bits each. Lane i holds those of tile
// 32 n + i.
template <class C>
struct TileCounts {
  static constexpr int kWords = (C::kRowsPerWarp + 1) / 2;
  uint32_t words[kWords];

  // from: (tiles, words) of this warp.
  __device__ void load(const uint32_t* from, int tile, int tiles) {
    load_words<kWords>(words, from + (tile < tiles ? tile : tiles) * kWords);  // one more tile can be read
  }
  // A shuffle waits for what was loaded. Elsewhere the compiler would wait at each tile, for records on their way too.
  __device__ void settle(int lane) {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) words[i] = __shfl_sync(~0u, words[i], lane);
  }
  // The same for all lanes, which the compiler sees by the shuffle.
  __device__ void of(int tile, uint32_t (&counts)[kWords]) const {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) counts[i] = __shfl_sync(~0u, words[i], tile % 32);
  }
};

template <class C>
__device__ void add_panel_group(Sums<C>& sums, const PanelGroup<C>& group, uint32_t ring) {
  using S = SpmmShape<C>;
  using Group = PanelGroup<C>;
  CUTE_UNROLL
  for (int chunk = 0; chunk < S::kChunks; chunk += S::kStep) {
    uint32_t raw[S::kStep][S::Units::kMatrices];
    CUTE_UNROLL
    for (int c = 0; c < S::kStep; ++c) {
      // The swizzle is an exclusive or of the chunk's number with the row's, so a chunk is one more.
      if constexpr (Group::kSlots % 32 == 0) {
        CUTE_UNROLL
        for (int i = 0; i < Group::kSlotLanes; ++i) {
          load_transposed((ring + group.place[i] * 16) ^ ((chunk + c) * 16), raw[c] + 4 * i);
        }
      } else {
        static_assert(Group::kSlots == 16, "groups are of 16 slots or a multiple of 32");
        load_transposed_pair((ring + group.place[0] * 16) ^ ((chunk + c) * 16), raw[c]);
      }
    }
    sums.add(group.values, chunk, raw);
  }
}

// What a warp reads of A for an item: its groups, how many of them each tile ends, and which vector rows they belong to.
template <class C>
struct PanelStream {
  GroupStream<C> groups;
  TileCounts<C> counts;
  int rows[C::kRowsPerWarp];

  // start: its first group; ring: where its records may lie in shared memory.
  __device__ void open(const PanelMatrix& matrix, int64_t unit, int64_t start, int tiles, uint32_t ring, int lane) {
    CUTE_UNROLL
    for (int i = 0; i < C::kRowsPerWarp; ++i) rows[i] = matrix.order[unit * C::kRowsPerWarp + i];
    groups.open(matrix.records + uniform(start) * PanelGroup<C>::kRecordWords, ring, lane);
    counts.load(matrix.counted(unit, tiles * TileCounts<C>::kWords), lane, tiles);
  }
};

template <class C, class UnitOf>
__device__ void multiply_item(const PanelRing<C>& ring, PipelineState<C>& position, const PanelMatrix& matrix,
                              PanelStream<C>& stream, const UnitOf& unit, Sums<C> (&sums)[C::kRowsPerWarp], int lane) {
  // Two loops, because at a branch the compiler waits for what is on its way.
  for (int first = 0; first < ring.tiles; first += 32) {
    uint32_t counts[TileCounts<C>::kWords], next[TileCounts<C>::kWords];
    if (first > 0) {
      stream.counts.load(matrix.counted(unit(), ring.tiles * TileCounts<C>::kWords), first + lane, ring.tiles);
    }
    stream.counts.settle(lane);
    stream.counts.of(0, next);
    const int end = ring.tiles < first + 32 ? ring.tiles : first + 32;
    for (int tile = first; tile < end; ++tile) {
      CUTE_UNROLL
      for (int i = 0; i < TileCounts<C>::kWords; ++i) counts[i] = next[i];
      stream.counts.of(tile + 1, next);  // ahead of need: a shuffle waits behind reads of shared memory
      barrier_wait(ring.full(position.stage), position.parity());
      CUTE_UNROLL
      for (int i = 0; i < C::kRowsPerWarp; ++i) {
        CUTE_NO_UNROLL
        for (int left = i % 2 ? counts[i / 2] >> 16 : counts[i / 2] & 0xFFFF; left > 0; --left) {
          stream.groups.take(lane);
          add_panel_group(sums[i], stream.groups.current, ring.base);
          stream.groups.leave(lane);
        }
      }
      // What needs this tile and later ones is still to come; the oldest tile of the window is done with.
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

// The factors of a strip's columns, those that exist.
template <class C>
__device__ void stage_factors(float* to, const float* from, int64_t count, int lane) {
  __syncwarp();  // those of the item before have been read
  for (int i = lane; i < SpmmShape<C>::kColumns && i < count; i += 32) copy_async_word(shared_address(to + i), from + i);
  cp_async_commit();
}

template <class C>
__global__ void __launch_bounds__((C::kWarps + 1) * 32, 1)
spmm_panel(const __grid_constant__ TmaDescriptor map, const int64_t* group_start, const uint32_t* counts,
           const uint32_t* records, const int32_t* order, void* out, const float* left, int64_t left_step,
           const float* right, int64_t right_step, int64_t right_batch, const float* bias, int64_t rows,
           int64_t vector_rows, int64_t n, int64_t inner, int64_t batches, int64_t batch_rows, int64_t row_step,
           int64_t strip_step, int64_t vector_stores, int64_t fold) {
  using S = SpmmShape<C>;
  using Total = TotalOf<C>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  const PanelRing<C> ring{{held(shared_address(shared))}, int((inner + C::kTile - 1) / C::kTile)};
  constexpr int kBlockRows = C::kWarps * C::kRowsPerWarp;
  PanelItem<C> item(vector_rows, kBlockRows * C::kCluster, n, S::kColumns, batches, row_step, strip_step);
  const auto unit = [&] {
    // A block without vector rows has the unit beyond the last one, which has no groups and rows that do not exist.
    const int64_t units = (vector_rows + kBlockRows - 1) / kBlockRows * C::kWarps, own = item.block() * C::kWarps + warp;
    return own < units ? own : units;
  };
  const int64_t start = group_start[unit()];  // on its way while the barriers are made
  ring.open();
  if (warp == C::kWarps) {
    if (lane == 0) {
      pdl_wait();
      producer_loop(ring, item, &map, inner, batch_rows, int(fold));
    }
    return;
  }
  float* const factors = reinterpret_cast<float*>(shared + PanelRing<C>::kFactorsAt) + warp * S::kColumns;
  // A factor a column comes from shared memory, where it is put while the warp multiplies.
  const bool staged = right && right_step == 1;
  PanelStream<C> stream;
  Sums<C> sums[C::kRowsPerWarp];
  PipelineState<C> position;
  const PanelMatrix matrix{group_start, counts, records, order};
  const uint32_t records_at =
      shared_address(shared) + PanelRing<C>::kRecordsAt + warp * C::kAStages * PanelGroup<C>::kRecordWords * 4;
  stream.open(matrix, unit(), start, ring.tiles, records_at, lane);
  pdl_wait();
  while (item.exists()) {
    const int64_t n0 = int64_t{item.strip} * S::kColumns;
    CUTE_UNROLL
    for (int i = 0; i < C::kRowsPerWarp; ++i) sums[i].clear();
    if (staged) stage_factors<C>(factors, right + item.batch * right_batch + n0, n - n0, lane);
    multiply_item(ring, position, matrix, stream, unit, sums, lane);
    cp_async_wait<0>();
    __syncwarp();
    const SpmmOperands operands{left, staged ? factors - n0 : right, bias, out, rows, n, left_step, right_step,
                                staged ? 0 : right_batch, vector_stores != 0};
    const uint32_t batch = item.batch;
    int own[C::kRowsPerWarp];
    CUTE_UNROLL
    for (int i = 0; i < C::kRowsPerWarp; ++i) own[i] = stream.rows[i];
    item.advance();
    // What the next item begins with is on its way while this one is written.
    if (item.exists()) stream.open(matrix, unit(), group_start[unit()], ring.tiles, records_at, lane);
    CUTE_UNROLL
    for (int i = 0; i < C::kRowsPerWarp; ++i) {
      if (own[i] < vector_rows) write_sums<Total>(operands, sums[i], batch, own[i], n0, lane);
    }
  }
}

}  // namespace magicube
