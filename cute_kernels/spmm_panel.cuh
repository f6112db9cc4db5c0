// SpMM, panel kernel (sm_90 on): a block keeps tiles of a strip of B in shared memory and runs many vector rows on them.
//
// One warp feeds a ring of kStages tiles of kTile rows by the tensor copy engine; kWarps warps multiply, each kRows vector
// rows whose sums stay in registers over all of k. Barriers count full and empty tiles; the block never meets at one.
// The kCluster blocks of a cluster work on the same strip, and fetch a part of every tile each, for all of them.
// The execution copy is made so that a group takes its rows from kWindow neighbouring tiles at most, and names them by
// where they lie in the ring.
#pragma once

#include "cluster.cuh"
#include "spmm.cuh"

namespace magicube {

template <class C>
struct PanelRing {
  static constexpr int kTileBytes = C::kTile * C::kRowBytes;
  static constexpr int kPart = C::kTile / C::kCluster;        // rows that one block fetches
  static constexpr int kBoxRows = kPart < 256 ? kPart : 256;  // the copy engine's limit
  static constexpr int kRingBytes = C::kStages * kTileBytes;
  static_assert(C::kStages > C::kWindow, "a tile must be able to arrive while a group's window is in use");
  static_assert(C::kTile % kBoxRows == 0, "a tile is whole boxes");

  // Behind the tiles: two barriers a stage, then the factors of each warp's strip.
  static constexpr int kFactorsAt = kRingBytes + 16 * C::kStages;

  uint32_t base;
  int tiles;

  __device__ uint32_t full(int stage) const { return base + kRingBytes + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return base + kRingBytes + 8 * (C::kStages + stage); }

  // A warp is done with a stage, and tells all blocks that fetch into it.
  __device__ void release(int stage, int lane) const {
    if constexpr (C::kCluster == 1) {
      if (lane == 0) barrier_arrive(empty(stage));
    } else {
      if (lane < C::kCluster) cluster::arrive_at(empty(stage), lane);
    }
  }
};

// The stage of a tile and the parity of each stage's uses so far. Every item walks all tiles and starts at stage 0, so
// that a row of B always lies at the same place in the ring.
template <class C>
struct RingPosition {
  int stage = 0;
  uint32_t parities = 0;

  __device__ uint32_t parity() const { return parities >> stage & 1; }
  __device__ void advance() {
    parities ^= 1u << stage;
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }
};

// What a cluster works on: a block of vector rows times a strip of B. Blocks that run at the same time share a strip, which
// the second-level cache then holds. 32 bits, because a division of 64 is a call; the host sees to it that they suffice.
template <class C>
struct PanelItem {
  uint32_t row_blocks, strips, batches;
  uint32_t row_block, strip, batch;

  __device__ PanelItem(int64_t vector_rows, int64_t block_rows, int64_t n, int64_t columns, int64_t batch_count)
      : row_blocks(uint32_t((vector_rows + block_rows - 1) / block_rows)),
        strips(uint32_t((n + columns - 1) / columns)),
        batches(uint32_t(batch_count)),
        row_block(blockIdx.x / C::kCluster % row_blocks),
        strip(blockIdx.x / C::kCluster / row_blocks),
        batch(0) {
    settle();
  }
  __device__ bool exists() const { return batch < batches; }
  // This block's block of vector rows.
  __device__ int64_t block() const {
    if constexpr (C::kCluster == 1) return row_block;
    else return int64_t{row_block} * C::kCluster + cluster::rank();
  }
  // What follows from the numbers is computed again, rather than kept in registers while all of them are wanted.
  __device__ void forget() { asm volatile("" : "+r"(row_block), "+r"(strip)); }
  __device__ void advance() {
    strip += gridDim.x / C::kCluster / row_blocks;
    row_block += gridDim.x / C::kCluster % row_blocks;
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

template <class C>
__device__ void feed(const PanelRing<C>& ring, PanelItem<C> item, const TmaDescriptor* map, int64_t inner, int64_t batch_rows) {
  using Ring = PanelRing<C>;
  RingPosition<C> position;
  for (; item.exists(); item.advance(), position.stage = 0) {
    const int x = int(item.strip * C::kRowBytes), first = int(item.batch * batch_rows);
    for (int tile = 0; tile < ring.tiles; ++tile, position.advance()) {
      const int stage = position.stage;
      barrier_wait(ring.empty(stage), position.parity() ^ 1);
      const int64_t left = inner - int64_t{tile} * C::kTile;
      const int boxes = left >= C::kTile ? C::kTile / Ring::kBoxRows : int((left + Ring::kBoxRows - 1) / Ring::kBoxRows);
      barrier_expect(ring.full(stage), boxes * Ring::kBoxRows * C::kRowBytes);
      for (int box = C::kCluster == 1 ? 0 : cluster::rank(); box < boxes; box += C::kCluster) {
        const uint32_t to = ring.base + stage * Ring::kTileBytes + box * Ring::kBoxRows * C::kRowBytes;
        const int y = first + tile * C::kTile + box * Ring::kBoxRows;
        if constexpr (C::kCluster == 1) copy_box(to, map, x, y, ring.full(stage));
        else cluster::copy_box_to((1 << C::kCluster) - 1, to, map, x, y, ring.full(stage));
      }
    }
  }
}

// One group as a lane holds it: where its rows lie in the ring, and its values.
template <class C, bool kHalved = C::kHalved>
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
};

// The same where ldmatrix reads four rows at once, one unit of each half of the strip: such a read has conflicts among four
// rows mod 4 instead of eight mod 8. Lanes t = 0, 1 then hold columns of the lower half and t = 2, 3 the same slots' of the
// upper one, so each half takes an mma of its own, in which the other lanes' values are zero.
template <class C>
struct PanelGroup<C, true> {
  using S = SpmmShape<C>;
  static constexpr int kSlots = S::Shape::kK;
  static constexpr int kReads = kSlots / 16;  // ldmatrix of four matrices of four slots
  static constexpr int kRecordWords = int(S::kGroupWords) + kSlots / 2;
  static_assert(!C::kFloat, "zeros must not meet infinities of other columns");
  static_assert(kReads == 2 && S::Units::kMatrices == 4, "places of two slots share a word");
  static_assert(S::kChunks / 2 % S::kStep == 0, "a half must be whole steps");

  uint32_t places;  // of one slot in each read, 16 bits each
  uint32_t words[S::kPlanes][S::kRowTiles][kReads * S::kWords];

  __device__ void load(const uint32_t* record, int lane) {
    places = __ldg(record + S::kGroupWords + lane / 8 * 4 + lane % 4);
    CUTE_UNROLL
    for (int p = 0; p < S::kPlanes; ++p) {
      CUTE_UNROLL
      for (int tile = 0; tile < S::kRowTiles; ++tile) {
        if (S::kUsedRows == 8 || lane < 4 * S::kUsedRows) {
          const int at = ((p * S::kRowTiles + tile) * S::kUsedRows + lane / 4) * 2 + lane % 2;
          load_words<kReads * S::kWords>(words[p][tile], record + at * kReads * S::kWords);
        } else {
          CUTE_UNROLL
          for (int w = 0; w < kReads * S::kWords; ++w) words[p][tile][w] = 0;
        }
      }
    }
  }

  // The values of one read's slots in the lanes of a half, zero in the others.
  __device__ SparseFragment<C> part(int read, bool mine) const {
    SparseFragment<C> values;
    CUTE_UNROLL
    for (int p = 0; p < S::kPlanes; ++p) {
      CUTE_UNROLL
      for (int tile = 0; tile < S::kRowTiles; ++tile) {
        CUTE_UNROLL
        for (int w = 0; w < S::kWords; ++w) values.words[p][tile][w] = mine ? words[p][tile][read * S::kWords + w] : 0;
      }
    }
    return values;
  }
};

// What a warp goes through: the groups of its vector rows, tile after tile, in the order of their use. The next two are in
// registers or on their way.
template <class C>
struct GroupStream {
  using Group = PanelGroup<C>;

  const uint32_t* record;  // of the group after those
  Group current, next;

  __device__ void open(const uint32_t* first, int lane) {
    // Two records beyond the last one exist, so that nothing need be asked before a load.
    current.load(first, lane);
    next.load(first + Group::kRecordWords, lane);
    record = first + 2 * Group::kRecordWords;
  }

  __device__ void advance(int lane) {
    current = next;
    next.load(record, lane);
    record += Group::kRecordWords;
  }
};

// How many groups of each vector row of a warp need a tile, and none beyond it: 16 bits each.
template <class C>
struct TileCounts {
  static constexpr int kWords = (C::kRows + 1) / 2;
  uint32_t words[kWords];

  __device__ void load(const uint32_t* from) { load_words<kWords>(words, from); }
  __device__ int of(int row) const { return row % 2 ? words[row / 2] >> 16 : words[row / 2] & 0xFFFF; }
};

template <class C>
__device__ void add_panel_group(Sums<C>& sums, const PanelGroup<C, true>& group, uint32_t ring, int lane) {
  using S = SpmmShape<C>;
  constexpr int kHalf = S::kChunks / 2;
  const bool upper = lane & 2;                           // of the fragment
  const uint32_t unit = lane & 4 ? kHalf * 16 : 0;       // of the address: rows 4 to 7 of a matrix
  CUTE_UNROLL
  for (int read = 0; read < PanelGroup<C, true>::kReads; ++read) {
    const SparseFragment<C> low = group.part(read, !upper), high = group.part(read, upper);
    const uint32_t row = (ring + (read ? group.places >> 16 : group.places & 0xFFFF) * 16) ^ unit;
    CUTE_UNROLL
    for (int chunk = 0; chunk < kHalf; chunk += S::kStep) {
      uint32_t raw[S::kStep][S::Units::kMatrices];
      CUTE_UNROLL
      for (int c = 0; c < S::kStep; ++c) load_transposed(row ^ ((chunk + c) * 16), raw[c]);
      sums.add(low, chunk, raw);
      sums.add(high, chunk + kHalf, raw);
    }
  }
}

template <class C>
__device__ void add_panel_group(Sums<C>& sums, const PanelGroup<C, false>& group, uint32_t ring, int) {
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

template <class C>
__device__ int stage_before(int stage, int tiles) {
  return stage >= tiles ? stage - tiles : stage + C::kStages - tiles;
}

// counts: (tiles + 1, words), the last ones read and not used.
template <class C>
__device__ void multiply_item(const PanelRing<C>& ring, RingPosition<C>& position, GroupStream<C>& stream,
                              Sums<C> (&sums)[C::kRows], const uint32_t* counts, int lane) {
  TileCounts<C> groups, next;
  next.load(counts);
  for (int tile = 0; tile < ring.tiles; ++tile) {
    barrier_wait(ring.full(position.stage), position.parity());
    groups = next;
    counts += TileCounts<C>::kWords;
    next.load(counts);
    CUTE_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      CUTE_NO_UNROLL
      for (int left = groups.of(i); left > 0; --left) {
        add_panel_group(sums[i], stream.current, ring.base, lane);
        stream.advance(lane);
      }
    }
    // What needs this tile and later ones is still to come; the oldest tile of the window is done with.
    __syncwarp();
    if (tile >= C::kWindow - 1) ring.release(stage_before<C>(position.stage, C::kWindow - 1), lane);
    position.advance();
  }
  CUTE_UNROLL
  for (int i = C::kWindow - 1; i > 0; --i) {
    if (ring.tiles >= i) ring.release(stage_before<C>(position.stage, i), lane);
  }
  position.stage = 0;
}

// The factors of a strip's columns, those that exist.
template <class C>
__device__ void stage_factors(float* to, const float* from, int64_t count, int lane) {
  __syncwarp();  // those of the item before have been read
  for (int i = lane; i < SpmmShape<C>::kColumns && i < count; i += 32) copy_async_word(shared_address(to + i), from + i);
  copy_async_commit();
}

template <class C>
__global__ void __launch_bounds__((C::kWarps + 1) * 32, 1)
spmm_panel(const __grid_constant__ TmaDescriptor map, const int64_t* group_start, const uint32_t* counts,
           const uint32_t* records, void* out, const float* left, int64_t left_step, const float* right,
           int64_t right_step, int64_t right_batch, const float* bias, int64_t rows, int64_t vector_rows, int64_t n,
           int64_t inner, int64_t batches, int64_t batch_rows, int64_t vector_stores) {
  using S = SpmmShape<C>;
  using Total = TotalOf<C>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const PanelRing<C> ring{shared_address(shared), int((inner + C::kTile - 1) / C::kTile)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < C::kStages; ++stage) {
      barrier_init(ring.full(stage), 1);
      barrier_init(ring.empty(stage), C::kWarps * C::kCluster);
    }
    barrier_fence();
  }
  if constexpr (C::kCluster == 1) __syncthreads();
  else cluster::meet();
  constexpr int kBlockRows = C::kWarps * C::kRows;
  PanelItem<C> item(vector_rows, kBlockRows * C::kCluster, n, S::kColumns, batches);
  if (warp == C::kWarps) {
    if (lane == 0) {
      wait_for_predecessor();
      feed(ring, item, &map, inner, batch_rows);
    }
    // Others may still fetch for this block, and arrive at its barriers.
    if constexpr (C::kCluster > 1) cluster::meet();
    return;
  }
  float* const factors = reinterpret_cast<float*>(shared + PanelRing<C>::kFactorsAt) + warp * S::kColumns;
  // A factor a column comes from shared memory, where it is put while the warp multiplies.
  const bool staged = right && right_step == 1;
  GroupStream<C> stream;
  Sums<C> sums[C::kRows];
  const uint32_t* counted;
  RingPosition<C> position;
  bool waiting = true;
  for (; item.exists(); item.advance()) {
    {
      // A warp without vector rows has the unit beyond the last one, which has no groups.
      const int64_t units = (vector_rows + C::kRows - 1) / C::kRows, own = item.block() * C::kWarps + warp;
      const int64_t unit = own < units ? own : units;
      stream.open(records + group_start[unit] * PanelGroup<C>::kRecordWords, lane);
      counted = counts + unit * ring.tiles * TileCounts<C>::kWords;
    }
    CUTE_UNROLL
    for (int i = 0; i < C::kRows; ++i) sums[i].clear();
    if (waiting) wait_for_predecessor();
    waiting = false;
    if (staged) {
      const int64_t n0 = int64_t{item.strip} * S::kColumns;
      stage_factors<C>(factors, right + item.batch * right_batch + n0, n - n0, lane);
    }
    multiply_item(ring, position, stream, sums, counted, lane);
    copy_async_wait<0>();
    __syncwarp();
    item.forget();
    const int64_t first = (item.block() * C::kWarps + warp) * C::kRows, n0 = int64_t{item.strip} * S::kColumns;
    const SpmmOperands operands{left, staged ? factors - n0 : right, bias, out, rows, n, left_step, right_step,
                                staged ? 0 : right_batch, vector_stores != 0};
    CUTE_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      if (first + i < vector_rows) write_sums<Total>(operands, sums[i], item.batch, first + i, n0, lane);
    }
  }
  if constexpr (C::kCluster > 1) cluster::meet();
}

}  // namespace magicube
