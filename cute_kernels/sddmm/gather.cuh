// SDDMM, gather kernel: S = row_scale * col_scale * (X Y^T) at the vectors of a pattern.
//
// Architectures: sm_80 and later (cp.async).
// Work: a warp computes up to 32 consecutive vectors of one vector row.
// Pipeline: each warp copies the gathered rows of Y and the V rows of X by cp.async into its own ring of kStages stages of
// kTileK elements along K; no CTA barrier. One stage: no prefetch, a tile is loaded when it is multiplied (for measurements).
// Source: Li, Osawa, Hoefler, SC'22, section IV-C.
#pragma once

#include "device/copy.cuh"
#include "sddmm/common.cuh"

namespace magicube {

// Row that lanes 4g to 4g + 3 read: a permutation of the rows of the MMA without bank conflicts, for kChunks chunks per 32 k.
template <int kRowBytes, int kChunks>
__device__ __forceinline__ int spread_row(int g) {
  constexpr int kFirst = kChunks == 1 ? 0 : kRowBytes == 128 ? (kChunks == 2 ? 1 : 2) : 0;
  if constexpr (kChunks == 1 || (kRowBytes == 32 && kChunks == 2) || (kRowBytes == 64 && kChunks == 4)) {
    return g;
  } else if constexpr (kRowBytes == 64) {  // bits 0 and 1 of g become row bits 0 and 2
    return (g & 1) | (g & 2) << 1 | (g & 4) >> 1;
  } else {  // the low bits of g become the high bits of the row
    return (g << kFirst | g >> (3 - kFirst)) & 7;
  }
}

template <class C>
struct SddmmShape : SampleShape<C, (C::kStride < 32 ? C::kStride : 32)> {
  using Base = SampleShape<C, (C::kStride < 32 ? C::kStride : 32)>;
  using typename Base::Shape, typename Base::RunX, typename Base::RunY;
  static constexpr int kWidest = RunX::kElement > RunY::kElement ? RunX::kElement : RunY::kElement;
  static constexpr int kTileK = C::kTileKBytes * 8 / kWidest;                  // K per stage
  static constexpr int kBytesX = kTileK * RunX::kElement / 8, kBytesY = kTileK * RunY::kElement / 8;
  static_assert(kBytesX >= 32 && kBytesY >= 32, "the narrower operand must have rows of 32 bytes");
  static constexpr int kStageBytes = Base::kSlots * kBytesY + Base::kRowsX * kBytesX;
  static constexpr int kRuns = Shape::kDepth > Base::kRegisters ? Shape::kDepth / Base::kRegisters : 1;  // runs of 32 k per MMA
  static_assert(kRuns * Base::kRegisters % Shape::kDepth == 0, "an MMA must be whole runs of 32 k");
};

// Read runs of 32 k of one row from shared memory: (digits, registers along k).
template <class S, class Run, int kRowBytes>
struct RowReader {
  uint32_t base;

  __device__ void read(int row, int run, int lane, uint32_t (&out)[Run::kDigits][S::kRuns * S::kRegisters]) const {
    const int t = lane % 4;
    const int spread = (row & ~7) | spread_row<kRowBytes, Run::kChunks>(row & 7);
    CUTE_UNROLL
    for (int r = 0; r < S::kRuns; ++r) {
      const int byte = t * 4 * Run::kWords;
      const uint32_t at = base + swizzled<kRowBytes>(spread, (run + r) * Run::kChunks + byte / 16) + byte % 16;
      uint32_t words[Run::kWords];
      load_shared(at, words);
      uint32_t part[Run::kDigits][S::kRegisters];
      split_run<Run, S::kSplit, S::Shape::kBits>(words, part);
      CUTE_UNROLL
      for (int d = 0; d < Run::kDigits; ++d) {
        CUTE_UNROLL
        for (int i = 0; i < S::kRegisters; ++i) out[d][r * S::kRegisters + i] = part[d][i];
      }
    }
  }
};

// Rows of an operand in global memory.
struct RowSource {
  const uint8_t* data;
  int64_t pitch;  // bytes between rows
  int64_t bytes;  // bytes per row
};

template <class C>
struct PieceRing {
  using S = SddmmShape<C>;
  uint32_t base;
  RowSource x, y;
  int64_t first_row, rows;
  int32_t column;  // column of the slot of this lane
  int lane;

  template <int kRowBytes>
  __device__ void copy_piece(uint32_t to, const RowSource& from, int64_t source_row, bool exists, int row, int chunk,
                             int64_t byte) const {
    const int64_t remaining = from.bytes - byte;
    const int valid = !exists || remaining <= 0 ? 0 : remaining < 16 ? int(remaining) : 16;
    const uint8_t* at = valid ? from.data + source_row * from.pitch + byte : from.data;
    cp_async(to + swizzled<kRowBytes>(row, chunk), at, valid);
  }

  __device__ void fetch(int stage, int64_t step) const {
    const uint32_t at_y = base + stage * S::kStageBytes, at_x = at_y + S::kSlots * S::kBytesY;
    constexpr int kChunksY = S::kBytesY / 16, kChunksX = S::kBytesX / 16;
    CUTE_UNROLL
    for (int i = 0; i < S::kSlots * kChunksY / 32; ++i) {
      const int piece = lane + 32 * i, row = piece / kChunksY, chunk = piece % kChunksY;
      const int32_t source = __shfl_sync(~0u, column, row);
      copy_piece<S::kBytesY>(at_y, y, source, source >= 0, row, chunk, step * S::kBytesY + chunk * 16);
    }
    CUTE_UNROLL
    for (int i = 0; i < (C::kVector * kChunksX + 31) / 32; ++i) {
      const int piece = lane + 32 * i, row = piece / kChunksX, chunk = piece % kChunksX;
      if (piece >= C::kVector * kChunksX) break;
      copy_piece<S::kBytesX>(at_x, x, first_row + row, first_row + row < rows, row, chunk, step * S::kBytesX + chunk * 16);
    }
  }
};

template <class C>
__device__ void add_stage(PieceAccumulators<SddmmShape<C>>& acc, uint32_t at, int runs, int lane) {
  using S = SddmmShape<C>;
  const RowReader<S, typename S::RunY, S::kBytesY> read_y{at};
  const RowReader<S, typename S::RunX, S::kBytesX> read_x{at + S::kSlots * S::kBytesY};
  for (int run = 0; run < runs; run += S::kRuns) {
    uint32_t y[S::kBlocks][S::RunY::kDigits][S::kRuns * S::kRegisters];
    CUTE_UNROLL
    for (int b = 0; b < S::kBlocks; ++b) read_y.read(8 * b + lane / 4, run, lane, y[b]);
    CUTE_UNROLL
    for (int tile = 0; tile < S::kRowTiles; ++tile) {
      uint32_t x[S::RunX::kDigits][S::kRuns * S::kRegisters];
      read_x.read(8 * tile + lane / 4, run, lane, x);
      acc.template add<0, 0>(tile, x, y);
    }
  }
}

struct SddmmOutput {
  void* out;  // (batch, blocks, V, stride)
  const float* row_scale;
  const float* col_scale;
  int64_t row_scale_stride, col_scale_stride;
};

template <class C, class TotalAt>
__device__ void write_piece(const SddmmOutput& at, int64_t block, int piece, const PieceRing<C>& ring, TotalAt&& total) {
  using S = SddmmShape<C>;
  const int g = ring.lane / 4, t = ring.lane % 4;
  CUTE_UNROLL
  for (int b = 0; b < S::kBlocks; ++b) {
    const int slot = 8 * b + spread_row<S::kBytesY, S::RunY::kChunks>(g);
    const int32_t column = __shfl_sync(~0u, ring.column, slot);
    const float col_scale = at.col_scale && column >= 0 ? at.col_scale[column * at.col_scale_stride] : 1.0f;
    CUTE_UNROLL
    for (int tile = 0; tile < S::kRowTiles; ++tile) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        const int v = 8 * tile + spread_row<S::kBytesX, S::RunX::kChunks>(2 * t + j);
        if (v >= C::kVector) continue;
        const int64_t row = ring.first_row + v;
        const bool exists = column >= 0 && row < ring.rows;
        const float row_scale = at.row_scale && exists ? at.row_scale[row * at.row_scale_stride] : 1.0f;
        using Out = typename C::Out;
        static_cast<Out*>(at.out)[(block * C::kVector + v) * C::kStride + piece * S::kSlots + slot] =
            exists ? convert<Out>(total(tile, b, j), row_scale, col_scale, 0.0f) : Out(0);
      }
    }
  }
}

// CTAs per SM for the register allocation: by default, the compiler assumes more CTAs, and the accumulators of many float
// rows spill.
template <class C>
constexpr int kSddmmBlocks = C::kFloat && C::kVector == 32 ? 16 / C::kWarps : 0;

template <class C>
__global__ void __launch_bounds__(C::kWarps * 32, kSddmmBlocks<C>)
sddmm(const int32_t* block_rows, const int32_t* columns, const uint8_t* x, int64_t x_pitch, int64_t x_batch, int64_t x_bytes,
      const uint8_t* y, int64_t y_pitch, int64_t y_batch, int64_t y_bytes, void* out, const float* row_scale, int64_t row_scale_stride,
      int64_t row_scale_batch, const float* col_scale, int64_t col_scale_stride, int64_t col_scale_batch, int64_t rows, int64_t inner,
      int64_t blocks) {
  using S = SddmmShape<C>;
  extern __shared__ __align__(128) uint8_t shared[];
  constexpr int kPieces = C::kStride / S::kSlots;
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  const int64_t tasks = blocks * kPieces;
  const uint32_t task_blocks = uint32_t((tasks + C::kWarps - 1) / C::kWarps);  // a 64-bit division is a call
  const int64_t batch = blockIdx.x / task_blocks, task = int64_t{blockIdx.x % task_blocks} * C::kWarps + warp;
  if (task >= tasks) return;
  const int64_t block = task / kPieces;
  const int piece = int(task % kPieces);
  const int32_t column = lane < S::kSlots ? columns[block * C::kStride + piece * S::kSlots + lane] : -1;
  const PieceRing<C> ring{shared_address(shared) + warp * (C::kStages * S::kStageBytes),
                          {x + batch * x_batch, x_pitch, x_bytes},
                          {y + batch * y_batch, y_pitch, y_bytes},
                          int64_t{block_rows[block]} * C::kVector,
                          rows,
                          column,
                          lane};
  pdl_wait();
  const int64_t steps = (inner + S::kTileK - 1) / S::kTileK;
  CUTE_UNROLL
  for (int i = 0; i < C::kStages - 1; ++i) {
    if (i < steps) ring.fetch(i, i);
    cp_async_commit();
  }
  PieceAccumulators<SddmmShape<C>> acc;
  acc.clear();
  using Total = cuda::std::conditional_t<C::kInt64Accum, int64_t, typename S::Total>;
  constexpr int kSafeSteps = 32768 / S::kTileK;
  Total totals[S::kRowTiles][S::kBlocks][2] = {};
  const auto flush = [&] {
    CUTE_UNROLL
    for (int i = 0; i < S::kRowTiles * S::kBlocks * 2; ++i) {
      (&totals[0][0][0])[i] += acc.template total<Total>(i / 2 / S::kBlocks, i / 2 % S::kBlocks, i % 2);
    }
    acc.clear();
  };
  int stage = 0;
  for (int64_t i = 0; i < steps; ++i) {
    if constexpr (C::kStages > 1) {
      cp_async_wait<C::kStages - 2>();
      __syncwarp();
      const int refill = stage == 0 ? C::kStages - 1 : stage - 1;
      if (i + C::kStages - 1 < steps) ring.fetch(refill, i + C::kStages - 1);
      cp_async_commit();
    } else {
      __syncwarp();  // all lanes have read the previous tile
      ring.fetch(0, i);
      cp_async_commit();
      cp_async_wait<0>();
      __syncwarp();
    }
    const int64_t remaining = (inner - i * S::kTileK + 31) / 32;
    constexpr int kAll = S::kTileK / 32;
    add_stage<C>(acc, ring.base + stage * S::kStageBytes, remaining < kAll ? int(remaining) : kAll, lane);
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
    if constexpr (C::kInt64Accum) {
      if (i % kSafeSteps == kSafeSteps - 1) flush();
    }
  }
  flush();
  cp_async_wait<0>();
  const SddmmOutput output{out, row_scale ? row_scale + batch * row_scale_batch : nullptr, col_scale ? col_scale + batch * col_scale_batch : nullptr,
                           row_scale_stride, col_scale_stride};
  write_piece<C>(output, batch * blocks + block, piece, ring,
                 [&](int tile, int b, int j) { return totals[tile][b][j]; });
}

}  // namespace magicube
