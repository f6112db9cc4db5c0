// Dense integer product, D = sum over digit products of A_i B_j: A (M, K) and B^T (N, K) int8, K-major. With kBits = 4 a row is
// of K packed 4-bit integers, k counts their bytes, and an instruction multiplies twice as many.
//
// sm_80 and later. Work: one output tile per CTA; each of eight warps has 32 columns and a share of the rows, with the
// accumulators of all levels in registers. Pipeline: kStages K tiles in shared memory, filled by cp.async.
// Source: CUTLASS, SM80 multistage mainloop.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "device/copy.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/tile_scheduler.cuh"

namespace magicube {

template <class C>
struct WarpGemm {
  static constexpr int kTileM = C::kTileM, kTileN = C::kTileN, kTileK = C::kTileK;
  static constexpr int kRowBytes = C::kFloatAccum ? 2 * kTileK : kTileK;  // bfloat16, or bytes
  static constexpr int kThreads = 256, kChunks = kRowBytes / 16;
  static constexpr int kWarpColumns = 32, kWarpsN = kTileN / kWarpColumns, kWarpsM = 8 / kWarpsN;
  static constexpr int kWarpRows = kTileM / kWarpsM, kBlocks = kWarpRows / 16;
  static constexpr int kRegisters = kWarpColumns / 2;  // accumulators of 16 rows and one level, per lane
  static constexpr int kPlaneA = kTileM * kRowBytes, kPlaneB = kTileN * kRowBytes;
  static constexpr int kStageBytes = C::kPlanesA * kPlaneA + C::kPlanesB * kPlaneB;
  static_assert(kWarpsM * kWarpsN == 8 && kBlocks * 16 * kWarpsM == kTileM, "eight warps share a tile");
  static_assert(kTileK == 64, "a row in shared memory is of 64 elements");
};

struct GemmOperand {
  const uint8_t* planes[3];
  int64_t pitches[3];
  int64_t rows, k;
};

// Load rows from `first` and K from `at` of all planes into shared memory, zeros beyond the matrix.
template <class G, int kPlanes, int kRows>
__device__ __forceinline__ void load_part(const GemmOperand& from, uint32_t to, int64_t first, int64_t at) {
  CUTE_UNROLL
  for (int plane = 0; plane < kPlanes; ++plane) {
    CUTE_UNROLL
    for (int i = 0; i < kRows * G::kChunks / G::kThreads; ++i) {
      const int unit = i * G::kThreads + threadIdx.x, row = unit / G::kChunks, chunk = unit % G::kChunks;
      const int64_t k = at + 16 * chunk, remaining = first + row < from.rows ? from.k - k : 0;
      const int valid = remaining >= 16 ? 16 : remaining > 0 ? int(remaining) : 0;
      const uint8_t* source = from.planes[plane] + (valid ? (first + row) * from.pitches[plane] + k : 0);
      cp_async(to + plane * kRows * G::kTileK + swizzled<G::kTileK>(row, chunk), source, valid);
    }
  }
}

__device__ __forceinline__ void load_matrices(const uint8_t* from, uint32_t (&to)[4]) {
  SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const uint128_t*>(from), to[0], to[1], to[2], to[3]);
}

// d += a b for 16 rows and 8 columns; accumulators are int32, or the bits of floats.
template <class C>
__device__ __forceinline__ void mma_warp(uint32_t* d, const uint32_t (&a)[4], const uint32_t* b) {
  if constexpr (C::kFloatAccum) {
    float sum[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) sum[i] = __uint_as_float(d[i]);
    SM80_16x8x16_F32BF16BF16F32_TN::fma(sum[0], sum[1], sum[2], sum[3], a[0], a[1], a[2], a[3], b[0], b[1], sum[0], sum[1],
                                        sum[2], sum[3]);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) d[i] = __float_as_uint(sum[i]);
  } else if constexpr (C::kBits == 4) {
    SM80_16x8x64_S32S4S4S32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[0], b[1], d[0], d[1], d[2], d[3]);
  } else {
    SM80_16x8x32_S32S8S8S32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[0], b[1], d[0], d[1], d[2], d[3]);
  }
}

template <class C>
using WarpAccumulators = uint32_t[WarpGemm<C>::kBlocks][C::kLevels][WarpGemm<C>::kRegisters];

// Mainloop step: all digit products of one K tile for a warp's rows and columns.
template <class C>
__device__ __forceinline__ void mma_stage(WarpAccumulators<C>& accum, const uint8_t* stage, int row, int column, int lane) {
  using G = WarpGemm<C>;
  CUTE_UNROLL
  for (int k = 0; k < G::kChunks; k += 2) {
    uint32_t b[C::kPlanesB][2][4];  // (planes, pairs of eight columns, 4 registers)
    CUTE_UNROLL
    for (int j = 0; j < C::kPlanesB; ++j) {
      CUTE_UNROLL
      for (int pair = 0; pair < 2; ++pair) {
        const int from = column + 16 * pair + lane / 16 * 8 + lane % 8;
        load_matrices(stage + C::kPlanesA * G::kPlaneA + j * G::kPlaneB + swizzled<G::kRowBytes>(from, k + lane / 8 % 2),
                      b[j][pair]);
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < C::kPlanesA; ++i) {
      CUTE_UNROLL
      for (int block = 0; block < G::kBlocks; ++block) {
        uint32_t a[4];
        load_matrices(stage + i * G::kPlaneA + swizzled<G::kRowBytes>(row + 16 * block + lane % 16, k + lane / 16), a);
        CUTE_UNROLL
        for (int j = 0; j < C::kPlanesB; ++j) {
          if (i + j >= C::kLevels) continue;
          CUTE_UNROLL
          for (int n = 0; n < 4; ++n) {
            uint32_t* d = accum[block][i + j < C::kLevels ? i + j : 0] + 4 * n;
            mma_warp<C>(d, a, b[j][n / 2] + n % 2 * 2);
          }
        }
      }
    }
  }
}

template <class C>
__global__ void __launch_bounds__(WarpGemm<C>::kThreads, 1)
gemm_mma(const uint8_t* a0, const uint8_t* a1, const uint8_t* a2, int64_t pitch_a0, int64_t pitch_a1, int64_t pitch_a2,
         const uint8_t* b0, const uint8_t* b1, const uint8_t* b2, int64_t pitch_b0, int64_t pitch_b1, int64_t pitch_b2,
         int64_t k, typename C::Out* out, int64_t pitch, int64_t m, int64_t n, const float* row_scales, int64_t row_step,
         const float* col_scales, int64_t column_step, const float* bias, const typename C::Source* c, int64_t c_pitch,
         int64_t vector, float alpha, float beta, float weight1, float weight2, const float* out_scale) {
  using G = WarpGemm<C>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const TileScheduler<C::kBand> scheduler{int((m + G::kTileM - 1) / G::kTileM), int((n + G::kTileN - 1) / G::kTileN)};
  int tile_row, tile_column;
  scheduler.place(blockIdx.x, tile_row, tile_column);
  const GemmOperand a{{a0, a1, a2}, {pitch_a0, pitch_a1, pitch_a2}, m, k};
  const GemmOperand b{{b0, b1, b2}, {pitch_b0, pitch_b1, pitch_b2}, n, k};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp / G::kWarpsN * G::kWarpRows, column = warp % G::kWarpsN * G::kWarpColumns;
  const int parts = int((k + G::kTileK - 1) / G::kTileK);
  const uint32_t base = shared_address(shared);
  const auto load = [&](int part, int stage) {
    const uint32_t to = base + stage * G::kStageBytes;
    if (part < parts) {
      load_part<G, C::kPlanesA, G::kTileM>(a, to, int64_t{tile_row} * G::kTileM, int64_t{part} * G::kTileK);
      load_part<G, C::kPlanesB, G::kTileN>(b, to + C::kPlanesA * G::kPlaneA, int64_t{tile_column} * G::kTileN,
                                           int64_t{part} * G::kTileK);
    }
    cp_async_commit();
  };
  for (int stage = 0; stage < C::kStages - 1; ++stage) load(stage, stage);
  WarpAccumulators<C> accum = {};
  for (int part = 0, stage = 0; part < parts; ++part) {
    cp_async_wait<C::kStages - 2>();
    __syncthreads();  // the K tile has landed, and the stage before it is free
    load(part + C::kStages - 1, stage == 0 ? C::kStages - 1 : stage - 1);
    mma_stage<C>(accum, shared + stage * G::kStageBytes, row, column, lane);
    if (++stage == C::kStages) stage = 0;
  }
  if (row_scales && row_step == 0) alpha *= __ldg(row_scales);
  if (col_scales && column_step == 0) alpha *= __ldg(col_scales);
  const GemmOutput<C> to{out, c, row_step ? row_scales : nullptr, column_step ? col_scales : nullptr, bias, pitch, c_pitch, int(m),
                         int(n), alpha, beta, weight1, weight2, vector != 0,
                         GemmOutput<C>::kQuantized ? 1.0f / __ldg(out_scale) : 0.0f};
  CUTE_UNROLL
  for (int block = 0; block < G::kBlocks; ++block) {
    write_fragment(to, accum[block], tile_row * G::kTileM + row + 16 * block, tile_column * G::kTileN + column, lane);
  }
}

}  // namespace magicube
