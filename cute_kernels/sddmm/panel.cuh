// SDDMM, panel kernel: S = row_scale * col_scale * (X Y^T) at the vectors of a pattern.
//
// Architectures: sm_90a and later (TMA).
// Work: a CTA holds a tile of kTile rows of Y, all of K, in shared memory. Each of kWarps warps computes vector rows: it keeps
// V rows of X in registers and computes kSlots vectors at a time. Columns increase in a vector row, so the vectors of a tile
// are consecutive in the output. Four lanes (a quad) own a unit of kSlots / 8 consecutive vectors.
// Pipeline: one thread loads the tile by TMA in boxes of kBoxBytes, one mbarrier per kSub rows; a warp loads the rows of X of
// its next vector row by cp.async.
// Source: Li, Osawa, Hoefler, SC'22, section IV-C.
#pragma once

#include "device/copy.cuh"
#include "sddmm/common.cuh"

namespace magicube {

template <class C>
struct SddmmPanelShape : SampleShape<C, C::kSlots> {
  using Base = SampleShape<C, C::kSlots>;
  using typename Base::RunX, typename Base::RunY;
  static_assert(Base::Shape::kBits == 8 && C::kStride % Base::kBlocks == 0, "the MMA must be 8-bit and the stride whole units");
  static constexpr int kBoxBytes = C::kBoxBytes;                             // of a row
  static constexpr int kHalves = kBoxBytes / 64;                             // 64-byte halves, one read of a quad each
  static_assert(kHalves == 2 || (kHalves == 1 && C::kBoxes == 1), "boxes must have 128 bytes, or a single one 64");
  static constexpr int kRuns = kBoxBytes / 4 / RunY::kElement;               // runs of eight k per lane and box
  static constexpr int kCount = kRuns * Base::kRegisters;                    // registers per digit and box
  static constexpr int kSub = C::kTile < 128 ? C::kTile : 128, kSubs = C::kTile / kSub;
  static constexpr int kBoxesBytes = C::kTile * kBoxBytes;                   // one box of all rows of the tile
  static constexpr int kTileBytes = C::kBoxes * kBoxesBytes;
  // The memory stride of X is an odd multiple of a load of a quad: consecutive rows have no bank conflicts.
  static constexpr int kLaneWordsX = 4 * RunX::kElement / RunY::kElement;    // words of X per 16 bytes of Y
  static constexpr int kLoadX = kLaneWordsX < 4 ? kLaneWordsX : 4;
  static constexpr int kRowBytesX = C::kBoxes * kBoxBytes * RunX::kElement / RunY::kElement;
  static constexpr int kPitchX = kRowBytesX + (kRowBytesX / (16 * kLoadX) % 2 ? 0 : 16 * kLoadX);
  static constexpr int kWarpBytesX = C::kVector * kPitchX;
};

// Copy of V rows of X to the shared memory of a warp.
template <class C>
struct FetchOfX {
  using S = SddmmPanelShape<C>;
  static constexpr int kChunks = S::kRowBytesX / 16;                         // 16-byte chunks per row
  static constexpr int kAcross = kChunks < 32 ? kChunks : 32, kGroups = kChunks / kAcross, kDown = 32 / kAcross;
  const uint8_t* from;  // chunk of this lane in the first vector row
  int64_t pitch, bytes;
  uint32_t to;
  int lane;

  __device__ FetchOfX(uint32_t shared, const uint8_t* x, int64_t pitch, int64_t bytes, int lane)
      : from(x + lane / kAcross * pitch + lane % kAcross * 16),
        pitch(pitch),
        bytes(bytes),
        to(shared + lane / kAcross * S::kPitchX + lane % kAcross * 16),
        lane(lane) {}

  // Copy (V, K) of X. count: rows that exist; other rows and K beyond the matrix become zeros.
  __device__ void start(int vector_row, int count) const {
    const uint8_t* at = from + int64_t{vector_row} * (C::kVector * pitch);
    if (bytes >= S::kRowBytesX && count == C::kVector && C::kVector >= kDown) {
      each([&](int r, int i) { cp_async(place(r, i), at + r * pitch + i * kAcross * 16, 16); });
    } else {
      each([&](int r, int i) {
        const int v = r + lane / kAcross;
        const int64_t remaining = v < count ? bytes - (i * kAcross + lane % kAcross) * 16 : 0;
        const int valid = remaining <= 0 ? 0 : remaining < 16 ? int(remaining) : 16;
        if (v < C::kVector) cp_async(place(r, i), valid ? at + r * pitch + i * kAcross * 16 : from, valid);
      });
    }
  }

 private:
  template <class Each>
  __device__ static void each(Each&& act) {
    CUTE_UNROLL
    for (int r = 0; r < C::kVector; r += kDown) {
      CUTE_UNROLL
      for (int i = 0; i < kGroups; ++i) act(r, i);
    }
  }
  __device__ uint32_t place(int r, int i) const { return to + r * S::kPitchX + i * kAcross * 16; }
};

// Rows of X as operand B: (boxes, row tiles, digits, registers along k).
template <class C>
struct RowsOfX {
  using S = SddmmPanelShape<C>;
  using Run = typename S::RunX;
  uint32_t word[C::kBoxes][S::kRowTiles][Run::kDigits][S::kCount];

  __device__ void read(uint32_t from, int lane) {
    CUTE_UNROLL
    for (int tile = 0; tile < S::kRowTiles; ++tile) {
      const uint32_t row = from + (8 * tile + lane / 4 % C::kVector) * S::kPitchX + lane % 4 * S::kLaneWordsX * 4;
      CUTE_UNROLL
      for (int box = 0; box < C::kBoxes; ++box) {
        uint32_t raw[S::kHalves * S::kLaneWordsX];
        CUTE_UNROLL
        for (int i = 0; i < S::kHalves * S::kLaneWordsX; i += S::kLoadX) {
          const int half = S::kHalves * box + i / S::kLaneWordsX;
          uint32_t part[S::kLoadX];
          load_shared(row + (4 * half * S::kLaneWordsX + i % S::kLaneWordsX) * 4, part);
          CUTE_UNROLL
          for (int j = 0; j < S::kLoadX; ++j) raw[i + j] = part[j];
        }
        split_runs<S, Run>(raw, word[box][tile]);
      }
    }
  }
};

// One row of Y as operand A. In boxes of 128 bytes, even and odd quads read different halves of their rows, so that any two
// rows are free of bank conflicts. In boxes of 64 bytes, rows with numbers of the same parity conflict.
template <class C>
struct RowOfY {
  using S = SddmmPanelShape<C>;
  uint32_t at;
  bool crossed;  // the swizzle exchanges the halves of the row

  // lane_base: result of base_of.
  __device__ RowOfY(uint32_t lane_base, uint32_t row)
      : at((S::kHalves == 2 ? lane_base ^ (row & 3) << 4 : lane_base) + row * S::kBoxBytes),
        crossed(((row >> 2 ^ lane_base >> 6) & 1) != 0) {}
  __device__ static uint32_t base_of(uint32_t tile, int lane) {
    return tile + (lane % 4 + (S::kHalves == 2 ? lane / 4 % 2 * 4 : 0)) * 16;
  }

  // -> (digits, registers along k)
  __device__ void read(int box, uint32_t (&out)[S::RunY::kDigits][S::kCount]) const {
    uint32_t raw[4 * S::kHalves];
    if constexpr (S::kHalves == 1) {
      load_shared(at, raw);
    } else {
      uint32_t one[4], other[4];
      load_shared(at + box * S::kBoxesBytes, one);
      load_shared((at ^ 64) + box * S::kBoxesBytes, other);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        raw[i] = crossed ? other[i] : one[i];
        raw[4 + i] = crossed ? one[i] : other[i];
      }
    }
    split_runs<S, typename S::RunY>(raw, out);
  }
};

// Columns of the unit of a quad; -1 if the unit is not below `end`.
template <class C>
struct UnitColumns {
  static constexpr int kBlocks = SddmmPanelShape<C>::kBlocks;
  int32_t column[kBlocks];

  __device__ void load(const int32_t* columns, int unit, int end) {
    CUTE_UNROLL
    for (int b = 0; b < kBlocks; ++b) column[b] = -1;
    if (unit < end) {
      load_words<kBlocks>(reinterpret_cast<uint32_t*>(column),
                          reinterpret_cast<const uint32_t*>(columns + int64_t{unit} * kBlocks));
    }
  }
};

// Row scales, and column scales of the tile, per row and column or per tensor.
template <class C>
struct SampleScales {
  const float* row_scale;  // (rows,), or null if per tensor
  uint32_t col_scale;     // (kTile,) in shared memory, or 0 if per tensor
  float tensor_row_scale, tensor_col_scale;

  // Strides are 0 or 1. count: columns of the tile that exist. Column scales are visible after cp_async_wait and a CTA
  // barrier.
  __device__ SampleScales(const float* row_scale, int64_t row_scale_stride, const float* col_scale, int64_t col_scale_stride, int count,
                           uint32_t shared)
      : row_scale(row_scale_stride ? row_scale : nullptr), col_scale(col_scale && col_scale_stride ? shared : 0), tensor_row_scale(row_scale ? *row_scale : 1.0f),
        tensor_col_scale(col_scale ? *col_scale : 1.0f) {
    if (this->col_scale == 0) return;
    for (int i = threadIdx.x; i < C::kTile && i < count; i += 32 * C::kWarps) copy_async_word(shared + 4 * i, col_scale + i);
  }
  __device__ float of_row(int64_t row) const { return row_scale ? row_scale[row] : tensor_row_scale; }
  __device__ float of_column(unsigned place) const {
    if (!col_scale) return tensor_col_scale;
    uint32_t word[1];
    load_shared(col_scale + 4 * place, word);
    return __uint_as_float(word[0]);
  }
};

// Rows in the tile of the vectors of a quad.
template <class C>
struct UnitPlaces {
  static constexpr int kBlocks = SddmmPanelShape<C>::kBlocks;
  unsigned place[kBlocks];  // row of the tile; 0 if it is in another tile
  unsigned present;         // bit mask of the vectors in this tile

  __device__ UnitPlaces(const UnitColumns<C>& columns, int first) : present(0) {
    CUTE_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      const unsigned row = unsigned(columns.column[b]) - unsigned(first);
      present |= unsigned(row < C::kTile) << b;
      place[b] = row < C::kTile ? row : 0;
    }
  }
};

// Address of the first vector of a unit in the output.
template <class C>
__device__ __forceinline__ typename C::Out* unit_of(typename C::Out* out, int unit) {
  constexpr unsigned kUnits = C::kStride / SddmmPanelShape<C>::kBlocks;  // of a block of the output
  const unsigned number = unit;
  return out + (uint64_t{number / kUnits} * (C::kVector * kUnits) + number % kUnits) * SddmmPanelShape<C>::kBlocks;
}

// Store consecutive results of one row of X, predicated by `mask`.
template <class Out, int kCount>
__device__ __forceinline__ void store_masked(Out* to, const Out (&result)[kCount], unsigned mask) {
  if (mask == (1u << kCount) - 1) {
    constexpr int kBytes = kCount * int(sizeof(Out)), kPart = kBytes < 16 ? kBytes : 16;
    using Word = typename Store<kPart>::type;
    CUTE_UNROLL
    for (int i = 0; i < kBytes / kPart; ++i) reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(result)[i];
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (mask >> i & 1) to[i] = result[i];
    }
  }
}

// Row scales of one vector row for a lane.
template <class C>
struct RowScales {
  using S = SddmmPanelShape<C>;
  float row_scale[S::kRowTiles][2];
  int count;  // of the V rows that exist

  __device__ void load(const SampleScales<C>& scales, int vector_row, int64_t rows, int lane) {
    const int64_t first = int64_t{vector_row} * C::kVector;
    count = rows - first < C::kVector ? int(rows - first) : C::kVector;
    CUTE_UNROLL
    for (int i = 0; i < 2 * S::kRowTiles; ++i) {
      const int v = i / 2 * 8 + lane % 4 * 2 + i % 2;
      row_scale[i / 2][i % 2] = v < count ? scales.of_row(first + v) : 1.0f;
    }
  }
};

// State of one vector row in a warp.
template <class C>
struct SampleRow : RowScales<C> {
  RowsOfX<C> x;
};

// Tile of Y in shared memory.
template <class C>
struct TileOfY {
  using S = SddmmPanelShape<C>;
  uint32_t base, full;
  int first;      // row of Y
  int ready = 0;  // mbarriers that this thread has waited for

  __device__ void producer_loop(const TmaDescriptor* map, int y) const {
    CUTE_UNROLL
    for (int i = 0; i < S::kSubs; ++i) {
      mbarrier_arrive_expect_tx(full + 8 * i, C::kBoxes * S::kSub * S::kBoxBytes);
      CUTE_UNROLL
      for (int box = 0; box < C::kBoxes; ++box) {
        const uint32_t to = base + box * S::kBoxesBytes + i * S::kSub * S::kBoxBytes;
        tma_load_2d(to, map, box * S::kBoxBytes, y + i * S::kSub, full + 8 * i);
      }
    }
  }
  __device__ void wait_for(int part) {
    CUTE_NO_UNROLL
    for (; ready <= part; ++ready) barrier_wait(full + 8 * ready, 0);
  }
};

template <class C>
__device__ void sample_units(const SampleRow<C>& row, const UnitPlaces<C>& at, int unit, const SampleScales<C>& scales,
                             typename C::Out* out, TileOfY<C>& tile, int lane) {
  using S = SddmmPanelShape<C>;
  using Out = typename C::Out;
  if (tile.ready < S::kSubs) {
    unsigned last = 0;
    CUTE_UNROLL
    for (int b = 0; b < S::kBlocks; ++b) last = at.place[b] > last ? at.place[b] : last;
    tile.wait_for(int(__reduce_max_sync(~0u, last)) / S::kSub);
  }
  const uint32_t lane_base = RowOfY<C>::base_of(tile.base, lane);
  PieceAccumulators<S> acc;
  acc.clear();
  CUTE_UNROLL
  for (int box = 0; box < C::kBoxes; ++box) {
    uint32_t y[S::kBlocks][S::RunY::kDigits][S::kCount];  // (row blocks, digits, registers along k)
    CUTE_UNROLL
    for (int b = 0; b < S::kBlocks; ++b) RowOfY<C>(lane_base, at.place[b]).read(box, y[b]);
    CUTE_UNROLL
    for (int i = 0; i < S::kRowTiles; ++i) acc.template add<0, 0>(i, row.x.word[box][i], y);
  }
  float col_scale[S::kBlocks];
  CUTE_UNROLL
  for (int b = 0; b < S::kBlocks; ++b) col_scale[b] = scales.of_column(at.place[b]);
  Out* to = unit_of<C>(out, unit) + lane % 4 * (2 * C::kStride);
  const auto write = [&](auto whole) {  // whether all of the V rows exist
    CUTE_UNROLL
    for (int i = 0; i < 2 * S::kRowTiles; ++i) {
      const int v = i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (C::kVector < 8 && v >= C::kVector) continue;
      typename S::Total total[S::kBlocks];
      CUTE_UNROLL
      for (int b = 0; b < S::kBlocks; ++b) total[b] = acc.template total<typename S::Total>(i / 2, b, i % 2);
      alignas(16) Out result[S::kBlocks];  // (vectors of the unit)
      convert_run(total, row.row_scale[i / 2][i % 2], col_scale, 0.0f, result);
      if (!decltype(whole)::value && v >= row.count) {
        CUTE_UNROLL
        for (int b = 0; b < S::kBlocks; ++b) result[b] = Out(0);
      }
      store_masked(to + (i / 2 * 8 + i % 2) * C::kStride, result, at.present);
    }
  };
  if (row.count == C::kVector) write(cuda::std::true_type{});
  else write(cuda::std::false_type{});
}

// Write zeros to the slots from range.x to range.y.
template <class C>
__device__ void clear_padding(typename C::Out* out, int2 range, int lane) {
  for (int slot = range.x + lane; slot < range.y; slot += 32) {
    typename C::Out* to = out + int64_t{slot / C::kStride} * (C::kVector * C::kStride) + slot % C::kStride;
    CUTE_UNROLL
    for (int v = 0; v < C::kVector; ++v) to[v * C::kStride] = typename C::Out(0);
  }
}

// ranges: (tiles + 1, vector rows), first unit of a tile and the one after the last; in the last entry the slots of the padding.
// slots: slots of the output per matrix.
template <class C>
__global__ void __launch_bounds__(C::kWarps * 32, 1)
sddmm_panel(const __grid_constant__ TmaDescriptor map, const int2* ranges, const int32_t* columns, const uint8_t* x,
            int64_t x_pitch, int64_t x_batch, int64_t x_bytes, void* out, const float* row_scale, int64_t row_scale_stride,
            int64_t row_scale_batch, const float* col_scale, int64_t col_scale_stride, int64_t col_scale_batch, int64_t rows,
            int64_t vector_rows, int64_t n, int64_t slots, int64_t tiles, int64_t row_blocks, int64_t block_rows,
            int64_t y_step) {
  using S = SddmmPanelShape<C>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  const uint32_t base = shared_address(shared), at_x = base + S::kTileBytes + warp * S::kWarpBytesX;
  // 32 bits: a 64-bit division is a call
  const int tile_number = int(blockIdx.x % uint32_t(tiles));
  const int row_block = int(blockIdx.x / uint32_t(tiles) % uint32_t(row_blocks));
  const int64_t batch = blockIdx.x / uint32_t(tiles) / uint32_t(row_blocks);
  const uint32_t at_scales = base + S::kTileBytes + C::kWarps * S::kWarpBytesX;
  TileOfY<C> tile{base, at_scales + 4 * C::kTile, tile_number * C::kTile};
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kSubs; ++i) barrier_init(tile.full + 8 * i, 1);
    barrier_fence();
  }
  const int begin = row_block * int(block_rows), count = int(vector_rows);
  const int end = count - begin < int(block_rows) ? count : begin + int(block_rows);
  const auto range_of = [&](int r) {
    return r < end ? __ldg(ranges + (tile_number * count + r)) : make_int2(0, 0);
  };
  int vector_row = begin + warp;
  int2 range = range_of(vector_row), next = range_of(vector_row + C::kWarps);
  UnitColumns<C> upcoming;
  upcoming.load(columns, range.x + lane / 4, range.y);
  __syncthreads();
  pdl_wait();
  if (threadIdx.x == 0) tile.producer_loop(&map, int(batch * y_step) + tile.first);
  __syncwarp();
  const FetchOfX<C> fetch(at_x, x + batch * x_batch, x_pitch, x_bytes, lane);
  const SampleScales<C> scales(row_scale ? row_scale + batch * row_scale_batch : nullptr, row_scale_stride,
                                 col_scale ? col_scale + batch * col_scale_batch + tile.first * col_scale_stride : nullptr, col_scale_stride,
                                 int(n - tile.first), at_scales);
  typename C::Out* to = static_cast<typename C::Out*>(out) + batch * slots * C::kVector;
  const auto start = [&](int r) {
    const int64_t remaining_rows = rows - int64_t{r} * C::kVector;
    if (r < end) fetch.start(r, remaining_rows < C::kVector ? int(remaining_rows) : C::kVector);
    cp_async_commit();
  };
  start(vector_row);
  RowScales<C> ahead;
  if (vector_row < end) ahead.load(scales, vector_row, rows, lane);
  // CTAs of the same vector rows share the padding.
  for (int r = begin + warp * int(tiles) + tile_number; r < end; r += C::kWarps * int(tiles)) {
    clear_padding<C>(to, __ldg(ranges + (int(tiles) * count + r)), lane);
  }
  if (scales.col_scale) {  // uniform in the CTA
    cp_async_wait<0>();
    __syncthreads();
  }
  for (; vector_row < end; vector_row += C::kWarps) {
    SampleRow<C> row{ahead};
    if (vector_row + C::kWarps < end) ahead.load(scales, vector_row + C::kWarps, rows, lane);
    cp_async_wait<0>();
    __syncwarp();
    row.x.read(at_x, lane);
    __syncwarp();
    start(vector_row + C::kWarps);
    if (range.x == range.y) upcoming.load(columns, next.x + lane / 4, next.y);
    for (int unit = range.x + lane / 4; unit - lane / 4 < range.y; unit += 8) {
      const UnitPlaces<C> places(upcoming, tile.first);
      const bool more = unit - lane / 4 + 8 < range.y;
      upcoming.load(columns, more ? unit + 8 : next.x + lane / 4, more ? range.y : next.y);
      sample_units(row, places, unit, scales, to, tile, lane);
    }
    range = next;
    next = range_of(vector_row + 2 * C::kWarps);
  }
  tile.wait_for(S::kSubs - 1);  // TMA must complete before the CTA exits
}

}  // namespace magicube
