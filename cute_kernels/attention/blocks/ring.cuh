// Fused sparse attention on whole blocks: shapes, the ring of tiles in shared memory, the thread that fills it, and floats of Q.
#pragma once

#include "attention/common.cuh"
#include "device/pipeline.cuh"
#include "device/smem_descriptor.cuh"
#include "device/warpgroup.cuh"

namespace magicube {

template <int kHead>
struct ValueOpFor;
template <>
struct ValueOpFor<64> { using type = SM90::GMMA::MMA_64x64x32_S32U8S8_RS_TN; };
template <>
struct ValueOpFor<128> { using type = SM90::GMMA::MMA_64x128x32_S32U8S8_RS_TN; };

template <class C>
struct BlockShape {
  using ScoreOp = SM90::GMMA::MMA_64x64x32_S32S8S8_RS_TN;
  using ValueOp = typename ValueOpFor<C::kHead>::type;
  static constexpr int kBlock = 64, kThreads = 128;  // queries and keys of a block
  static constexpr int kScores = kBlock / 2, kValues = C::kHead / 2;  // accumulators of a lane
  static constexpr int kMatrixBytes = kBlock * C::kHead, kStageBytes = 3 * kMatrixBytes;
  static constexpr int kWarps = 4;
  using Scores = float[kScores];
  using Weights = uint32_t[kBlock / 32][4];
  static_assert(kBlock * 255 * 128 < 1 << 22 && C::kHead * 128 * 128 < 1 << 22, "sums must be exact as floats");
};

// Stages: a tile of K, one of V, and a third one: Q of integers where the tile is the first of a block, then V^T.
template <class C>
struct BlockRing : TmaPipeline<C, C::kStages * BlockShape<C>::kStageBytes> {
  using S = BlockShape<C>;
  __device__ uint32_t keys(int stage) const { return this->base + stage * S::kStageBytes; }
  __device__ uint32_t values(int stage) const { return keys(stage) + S::kMatrixBytes; }
  __device__ uint32_t third(int stage) const { return keys(stage) + 2 * S::kMatrixBytes; }
};

// Blocks of queries of all matrices. 32 bits because a 64-bit division is a call; the host checks that they suffice.
struct BlockList {
  const int32_t* starts;  // (patterns * rows + 1,)
  const int32_t* tiles;
  uint32_t items, rows, patterns;
};

// A block of queries of one matrix, and its tiles in the list.
struct BlockItem {
  uint32_t batch, row;
  int begin, end;

  __device__ BlockItem(const BlockList& list, uint32_t index) {
    batch = index / list.rows, row = index % list.rows;
    const int32_t* const at = list.starts + (batch % list.patterns * list.rows + row);
    begin = __ldg(at), end = __ldg(at + 1);
  }
};

// The thread that loads. Blocks without tiles are left out. Q of integers is in the stage of the block's first tile.
template <class C>
struct BlockLoader {
  using S = BlockShape<C>;
  const BlockRing<C>& ring;
  const BlockList& list;
  const TmaDescriptor &queries_map, &keys_map, &values_map;
  int queries, keys;
  PipelineState<C> at;
  uint32_t index = blockIdx.x, batch = 0, row = 0;
  int tile = 0, end = 0;  // places in the list
  bool first = false;

  __device__ void step() {
    while (tile == end) {
      if (index >= list.items) return;
      const BlockItem item(list, index);
      batch = item.batch, row = item.row, tile = item.begin, end = item.end;
      index += gridDim.x;
      first = !C::kTiled;
    }
    const uint32_t full = ring.full(at.stage);
    const int place = __ldg(list.tiles + tile) * S::kBlock;
    barrier_wait(ring.empty(at.stage), at.parity() ^ 1);
    mbarrier_arrive_expect_tx(full, (first ? 3 : 2) * S::kMatrixBytes);
    if (first) tma_load_2d(ring.third(at.stage), &queries_map, 0, int(batch) * queries + int(row) * S::kBlock, full);
    tma_load_2d(ring.keys(at.stage), &keys_map, 0, int(batch) * keys + place, full);
    tma_load_2d(ring.values(at.stage), &values_map, 0, int(batch) * keys + place, full);
    first = false;
    ++tile;
    at.advance();
  }
};

// Q of the next block of queries, as floats (64, kHead). A lane fetches what it quantizes itself: 4 of every 16 entries of rows
// g and g + 8 of its warp's 16.
template <class C>
struct QueryBuffer {
  static constexpr int kPiece = 4 * int(sizeof(typename C::Source)), kPieces = C::kHead / 16;  // bytes; pieces of a row
  uint32_t own;

  __device__ explicit QueryBuffer(uint32_t base) : own(base + threadIdx.x * kPiece) {}
  __device__ uint32_t piece(int half, int i) const {
    return own + (half * kPieces + i) * BlockShape<C>::kThreads * kPiece;
  }
  __device__ void fetch(const AttentionOperands& at, const BlockList& list, uint32_t index) const {
    const int64_t batch = index / list.rows;
    const int first = int(index % list.rows) * BlockShape<C>::kBlock + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = first + 8 * half;
      const bool there = index < list.items && row < at.queries;
      const int64_t place = there ? (batch * at.queries + row) * C::kHead * (kPiece / 4) : 0;
      const uint8_t* const from = at.q + place + threadIdx.x % 4 * kPiece;
      CUTE_UNROLL
      for (int i = 0; i < kPieces; ++i) copy_async_run<kPiece>(piece(half, i), from + i * 4 * kPiece, there ? kPiece : 0);
    }
    cp_async_commit();
  }
};

}  // namespace magicube
