// Dense product of low-precision floats, D = A B: A (M, K) and B^T (N, K) packed, K-major.
//
// sm_80 and later. Work: one output tile per CTA of eight warps. Pipeline: kStages packed K tiles of 64 in shared memory, filled
// by cp.async; all warps decode one to bfloat16, which holds every format exactly, and multiply it.
// Source: CUTLASS, SM80 multistage mainloop; OCP MX v1.0, section 6 (block scales).
#pragma once

#include "scaled_gemm/common.cuh"
#include "gemm/mma.cuh"

namespace magicube {

template <class C>
struct FloatWarps {
  using A = FloatPlane<typename C::FormatA, typename C::ScaleA, C::kBlockA, true, C::kTileM>;
  using B = FloatPlane<typename C::FormatB, typename C::ScaleB, C::kBlockB, true, C::kTileN>;
  using G = WarpGemm<C>;
  static constexpr int kThreads = G::kThreads, kPackedBytes = A::kPackedBytes + B::kPackedBytes;
  static_assert(A::kTileK == C::kTileK && G::kPlaneA == A::kBytes && G::kPlaneB == B::kBytes, "rows of 128 bytes");
};

struct PackedOperand {
  const uint8_t* codes;  // (rows, bytes)
  int64_t pitch, rows, bytes;
};

// Load rows from `first` and bytes from `at` into shared memory, zeros beyond the matrix.
template <class Plane, int kThreads>
__device__ __forceinline__ void load_packed(const PackedOperand& from, uint32_t to, int64_t first, int64_t at) {
  constexpr int kChunks = Plane::kPackedRow / 16, kAll = Plane::kRows * kChunks;
  CUTE_UNROLL
  for (int i = 0; i < (kAll + kThreads - 1) / kThreads; ++i) {
    const int unit = i * kThreads + threadIdx.x, row = unit / kChunks;
    if (kAll % kThreads != 0 && unit >= kAll) break;
    const int64_t byte = at + unit % kChunks * 16, remaining = first + row < from.rows ? from.bytes - byte : 0;
    const int valid = remaining >= 16 ? 16 : remaining > 0 ? int(remaining) : 0;
    cp_async(to + unit * 16, from.codes + (valid ? (first + row) * from.pitch + byte : 0), valid);
  }
}

template <class C>
__global__ void __launch_bounds__(WarpGemm<C>::kThreads, C::kResident)
gemm_floats_mma(const uint8_t* codes_a, int64_t pitch_a, int64_t bytes_a, const uint8_t* codes_b, int64_t pitch_b,
                int64_t bytes_b, int64_t k, const void* scales_a, int64_t scales_a_pitch, int64_t blocks_a,
                const void* scales_b, int64_t scales_b_pitch, int64_t blocks_b, typename C::Out* out, int64_t pitch,
                int64_t m, int64_t n, const float* row_scales, int64_t row_step, const float* col_scales, int64_t column_step,
                const float* bias, const typename C::Source* c, int64_t c_pitch, int64_t vector, float alpha, float beta) {
  using W = FloatWarps<C>;
  using G = typename W::G;
  using A = typename W::A;
  using B = typename W::B;
  extern __shared__ __align__(1024) uint8_t shared[];
  uint8_t* const ready = shared + C::kStages * W::kPackedBytes;
  const TileScheduler<C::kBand> scheduler{int((m + G::kTileM - 1) / G::kTileM), int((n + G::kTileN - 1) / G::kTileN)};
  int tile_row, tile_column;
  scheduler.place(blockIdx.x, tile_row, tile_column);
  tile_row *= G::kTileM, tile_column *= G::kTileN;
  const PackedOperand a{codes_a, pitch_a, m, bytes_a}, b{codes_b, pitch_b, n, bytes_b};
  const FloatScales scale_args_a{scales_a, scales_a_pitch, blocks_a}, scale_args_b{scales_b, scales_b_pitch, blocks_b};
  const BlockScales block_a = scale_args_a.of_blocks<A>(m), block_b = scale_args_b.of_blocks<B>(n);
  const TileScales tiles_a = scale_args_a.of_tiles<A>(), tiles_b = scale_args_b.of_tiles<B>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp / G::kWarpsN * G::kWarpRows, column = warp % G::kWarpsN * G::kWarpColumns;
  const int parts = int((k + G::kTileK - 1) / G::kTileK);
  const auto load = [&](int part, int stage) {
    const uint32_t to = shared_address(shared) + stage * W::kPackedBytes;
    if (part < parts) {
      load_packed<A, W::kThreads>(a, to, tile_row, int64_t{part} * A::kPackedRow);
      load_packed<B, W::kThreads>(b, to + A::kPackedBytes, tile_column, int64_t{part} * B::kPackedRow);
    }
    cp_async_commit();
  };
  for (int stage = 0; stage < C::kStages - 1; ++stage) load(stage, stage);
  WarpAccumulators<C> accum = {};
  for (int part = 0, stage = 0; part < parts; ++part) {
    uint32_t scales_of_a[FloatRun<A, W::kThreads>::kCount], scales_of_b[FloatRun<B, W::kThreads>::kCount];
    load_block_scales<A, W::kThreads>(block_a, tile_row, part * G::kTileK, threadIdx.x, scales_of_a);
    load_block_scales<B, W::kThreads>(block_b, tile_column, part * G::kTileK, threadIdx.x, scales_of_b);
    cp_async_wait<C::kStages - 2>();
    __syncthreads();  // the packed tile has landed, and the decoded tile is free
    load(part + C::kStages - 1, stage == 0 ? C::kStages - 1 : stage - 1);
    const uint8_t* packed = shared + stage * W::kPackedBytes;
    decode_plane<A, W::kThreads>(packed, ready, threadIdx.x, scales_of_a);
    decode_plane<B, W::kThreads>(packed + A::kPackedBytes, ready + G::kPlaneA, threadIdx.x, scales_of_b);
    __syncthreads();
    if constexpr (C::kPromote) {
      WarpAccumulators<C> partial = {};
      mma_stage<C>(partial, ready, row, column, lane);
      const float factor = tiles_a.at(tile_row, part * G::kTileK) * tiles_b.at(tile_column, part * G::kTileK);
      CUTE_UNROLL
      for (int block = 0; block < G::kBlocks; ++block) {
        CUTE_UNROLL
        for (int r = 0; r < G::kRegisters; ++r) {
          uint32_t& sum = accum[block][0][r];
          sum = __float_as_uint(__fmaf_rn(__uint_as_float(partial[block][0][r]), factor, __uint_as_float(sum)));
        }
      }
    } else {
      mma_stage<C>(accum, ready, row, column, lane);
    }
    if (++stage == C::kStages) stage = 0;
  }
  if (row_scales && row_step == 0) alpha *= __ldg(row_scales);
  if (col_scales && column_step == 0) alpha *= __ldg(col_scales);
  const GemmOutput<C> to{out, c, row_step ? row_scales : nullptr, column_step ? col_scales : nullptr, bias, pitch, c_pitch, int(m),
                         int(n), alpha, beta, 0.0f, 0.0f, vector != 0};
  CUTE_UNROLL
  for (int block = 0; block < G::kBlocks; ++block) {
    write_fragment(to, accum[block], tile_row + row + 16 * block, tile_column + column, lane);
  }
}

}  // namespace magicube
