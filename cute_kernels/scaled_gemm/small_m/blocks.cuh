// Small-M product with scales of 32 or 16 values: bytes are multiplied, and the sums of a block are scaled.
//
// sm_90a; memory-bound by the weights up to 32 rows of X, compute-bound by the additions with 64. Work, pipeline and epilogue as
// in scaled_gemm/small_m/kernel.cuh. An instruction of 32 k has one block of each row of weights: its sums times the scale of the
// row, and of X where that has block scales, are added in float32. So a lane reads 4 bytes of each block of 4-bit weights, of
// 8-bit weights two times 4; rows are swizzled, so that eight of them meet no bank twice. TMA brings the scales, 16 of a row: of
// what lanes read of them from memory, sectors of 32 bytes, they use 8, half as much traffic as the weights. A lane converts one
// scale of four, and has the others by shuffles. kWays instructions are under way, each with sums of its own. Scales of 16 values
// take two instructions a step, in each of which half of the lanes, those of the other block, have zeros.
// Source: PTX ISA, wgmma.mma_async register fragments.
#pragma once

#include "scaled_gemm/small_m/kernel.cuh"

namespace magicube {

// As `producer_loop`, with boxes of 128 bytes of rows of weights, their scales, and those of X.
template <class C>
__device__ __forceinline__ void produce_blocks(const SmallMGemm<C>& gemm, const TmaDescriptor& x, const TmaDescriptor& weights,
                                               const TmaDescriptor& scales, const float* factors, int begin, int last, int row) {
  using G = SmallMGemm<C>;
  GemmPipelineState<G::kStages> at;
  for (int part = begin; part < last; ++part, at.advance()) {
    const uint32_t full = gemm.full(at.stage);
    barrier_wait(gemm.empty(at.stage), at.parity ^ 1);
    mbarrier_arrive_expect_tx(full, G::kStageBytes + G::kFactorBytes);
    CUTE_UNROLL
    for (int i = 0; i < G::kWeightBoxes; ++i) {
      tma_load_2d(gemm.weights(at.stage) + i * G::kHeight * 128, &weights, (part * G::kWeightBoxes + i) * 128, row, full);
    }
    if constexpr (C::kBlock > 0) {  // from a multiple of 16 bytes on: elsewhere the copy is an illegal instruction
      tma_load_2d(gemm.base + G::scales_at(at.stage), &scales, part * G::kOfScales / 16 * 16, row, full);
    }
    if (part == begin) pdl_wait();
    CUTE_UNROLL
    for (int i = 0; i < G::kBoxes; ++i) tma_load_2d(gemm.box(at.stage, i), &x, (part * G::kBoxes + i) * 128, 0, full);
    if constexpr (C::kBlockX > 0) {
      const float* const from = factors + int64_t{part} * (G::kFactorBytes / 4);
      bulk_copy(gemm.base + G::factors_at(at.stage), from, G::kFactorBytes, full);
    }
  }
}

// Instructions of 32 k.
template <class C>
constexpr int kBlocksOfStep = C::kBlock == 16 ? 2 : 1;

// What a lane reads of four steps: words of the rows g and g + 8 of its warp's 16, and the scales of step t of both.
template <class C>
struct SmallMQuad {
  using G = SmallMGemm<C>;
  static constexpr int kWords = G::Format::kBits;  // of a row: one a step of 4-bit weights, else two
  uint32_t words[2][kWords];  // (rows, words)
  uint32_t codes[2];  // (rows,): of scales, a byte a block

  __device__ __forceinline__ void load(const uint8_t* weights, const uint8_t* scales, int row, int quad) {
    constexpr int kBytes = 16 * kWords;  // of a row
    const int lane = threadIdx.x % 4, box = quad * kBytes / 128, chunk = quad * kBytes % 128 / 16;  // chunks of 16 bytes
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      CUTE_UNROLL
      for (int i = 0; i < kWords; ++i) {
        const uint8_t* const from = weights + box * G::kHeight * 128 + swizzled<128>(row + 8 * half, chunk + i);
        words[half][i] = reinterpret_cast<const uint32_t*>(from)[lane];
      }
      const uint8_t* const from = scales + (row + 8 * half) * G::kScaleBox + (4 * quad + lane) * kBlocksOfStep<C>;
      if constexpr (C::kBlock == 16) codes[half] = *reinterpret_cast<const uint16_t*>(from);
      else if constexpr (C::kBlock > 0) codes[half] = *from;
    }
  }
  // The operand of step `step` of the four, of its block `block` alone.
  __device__ __forceinline__ void decode(int step, int block, uint32_t (&to)[4]) const {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      if constexpr (kWords == 8) {
        to[half] = words[half][2 * step], to[2 + half] = words[half][2 * step + 1];
      } else {
        to[half] = to_bytes<typename G::Format>(words[half][step]);
        to[2 + half] = to_bytes<typename G::Format>(words[half][step] >> 4);
      }
    }
    if constexpr (C::kBlock == 16) {
      const uint32_t mask = threadIdx.x / 2 % 2 == block ? 0xFFFFFFFFu : 0u;
      CUTE_UNROLL
      for (int r = 0; r < 4; ++r) to[r] &= mask;
    }
  }
};

// What a step has until its sums are added: its operand, which must not change before, its sums, and their scales.
template <class C>
struct SmallMStep {
  using G = SmallMGemm<C>;
  uint32_t a[4];  // (2 runs of 16 k, 2 rows of weights)
  typename G::Accumulators sums;  // (kRows / 8, 2 rows of weights, 2 rows of X)
  float2 x[C::kRows / 8];  // (kRows / 8,): rows 2t and 2t + 1 of every eight of X
  float scale[2];  // (rows of weights,)

  // Start the products, from zero.
  __device__ __forceinline__ void start(const G& gemm, int stage, int step) {
    fence_accumulators(sums);
    CUTE_UNROLL
    for (int r = 0; r < 4; ++r) warpgroup_fence_operand(a[r]);
    warpgroup_arrive();
    const uint64_t b = smem_descriptor<128>(gemm.box(stage, step / 4)) + (32 * (step % 4) >> 4);
    wgmma_rs<typename G::Op>(a, b, sums, SM90::GMMA::ScaleOut::Zero, make_int_sequence<G::kRegisters>{});
    warpgroup_commit_batch();
  }
  // accum += sums times scales.
  __device__ __forceinline__ void add_to(typename G::Accumulators& accum) {
    fence_accumulators(sums);
    CUTE_UNROLL
    for (int r = 0; r < 4; ++r) warpgroup_fence_operand(a[r]);
    CUTE_UNROLL
    for (int r = 0; r < G::kRegisters; ++r) {
      float sum = sums[r];
      if constexpr (C::kBlockX > 0) sum *= r % 2 ? x[r / 4].y : x[r / 4].x;
      if constexpr (C::kBlock > 0) accum[r] = __fmaf_rn(sum, scale[r / 2 % 2], accum[r]);
      else accum[r] += sum;
    }
  }
};

template <class C>
__device__ __forceinline__ void multiply_stage(const SmallMGemm<C>& gemm, const uint8_t* shared, int stage, int part, int row,
                                               typename SmallMGemm<C>::Accumulators& accum) {
  using G = SmallMGemm<C>;
  constexpr int kSteps = G::kTileK / 32, kOfStep = kBlocksOfStep<C>, kAll = kSteps * kOfStep, kSlots = C::kWays + 1;
  const uint8_t* const weights = shared + stage * G::kStageBytes;
  const float* const factors = reinterpret_cast<const float*>(shared + G::factors_at(stage)) + threadIdx.x % 4 * 2;  // (steps, kRows)
  const uint8_t* const codes = shared + G::scales_at(stage) + part * G::kOfScales % 16;
  SmallMQuad<C> quads[2];  // by turns
  SmallMStep<C> steps[kSlots];  // by turns
  float scales[2][kOfStep];  // (rows of weights, blocks): of step t of a quad
  quads[0].load(weights, codes, row, 0);
  CUTE_UNROLL
  for (int j = 0; j < kAll; ++j) {
    const int i = j / kOfStep, block = j % kOfStep;
    auto& quad = quads[i / 4 % 2];
    auto& step = steps[j % kSlots];
    if (i % 4 == 0 && block == 0) {
      if (i + 4 < kSteps) quads[(i / 4 + 1) % 2].load(weights, codes, row, i / 4 + 1);
      if constexpr (C::kBlock > 0) {
        CUTE_UNROLL
        for (int b = 0; b < 2 * kOfStep; ++b) {
          scales[b / kOfStep][b % kOfStep] = block_scale<typename C::Scale>(quad.codes[b / kOfStep] >> 8 * (b % kOfStep) & 0xFF);
        }
      }
    }
    quad.decode(i % 4, block, step.a);
    if constexpr (C::kBlockX > 0) {
      const float* const from = factors + (C::kBlockX == 16 ? j : i) * C::kRows;
      CUTE_UNROLL
      for (int r = 0; r < C::kRows / 8; ++r) step.x[r] = *reinterpret_cast<const float2*>(from + 8 * r);
    }
    if constexpr (C::kBlock > 0) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) step.scale[half] = __shfl_sync(0xFFFFFFFFu, scales[half][block], i % 4, 4);
    }
    step.start(gemm, stage, i);
    if (j + 1 >= C::kWays) {
      warpgroup_wait<C::kWays - 1>();
      steps[(j + 1 - C::kWays) % kSlots].add_to(accum);
    }
  }
  warpgroup_wait<0>();
  CUTE_UNROLL
  for (int j = kAll - C::kWays + 1; j < kAll; ++j) steps[j % kSlots].add_to(accum);
}

// Multiply the K tiles of a warp group; own: the lane's columns of the tile are own and own + 8.
template <class C>
__device__ __forceinline__ void consume_blocks(const SmallMGemm<C>& gemm, const uint8_t* shared, int begin, int last, int own,
                                               int depth, typename SmallMGemm<C>::Accumulators& accum) {
  using G = SmallMGemm<C>;
  GemmPipelineState<G::kStages> at;
  at.skip(depth);
  for (int part = begin + depth; part < last; part += G::kDepth, at.skip(G::kDepth)) {
    barrier_wait(gemm.full(at.stage), at.parity);
    multiply_stage<C>(gemm, shared, at.stage, part, own, accum);
    __syncwarp();  // all lanes have read the stage
    if (threadIdx.x % 32 == 0) barrier_arrive(gemm.empty(at.stage));
  }
}

// factors: scales of X, (blocks of whole K tiles, kRows), or null.
template <class C>
__global__ void __launch_bounds__(SmallMGemm<C>::kThreads, C::kResident)
gemm_floats_few_blocks(const __grid_constant__ TmaDescriptor x, const __grid_constant__ TmaDescriptor weights,
                       const __grid_constant__ TmaDescriptor scales, const float* factors, int64_t k, typename C::Out* out,
                       int64_t pitch, int64_t m, int64_t n, const float* row_scales, int64_t row_step, const float* col_scales,
                       int64_t column_step, const float* bias, const typename C::Source* c, int64_t c_pitch, int64_t vector,
                       float alpha, float beta) {
  run_small_m<C>(
      k,
      [&](const auto& gemm, int begin, int last, int column) {
        produce_blocks<C>(gemm, x, weights, scales, factors, begin, last, column);
      },
      [&](const auto& gemm, uint8_t* shared, int begin, int last, int column) {
        using G = SmallMGemm<C>;
        const int lane = threadIdx.x % 32, depth = threadIdx.x / (128 * C::kGroups / G::kDepth);
        const int own = threadIdx.x / 32 % (G::kHeight / 16) * 16 + lane / 4;
        typename G::Accumulators accum = {};  // (kRows / 8, 2 rows of weights, 2 rows of X)
        consume_blocks<C>(gemm, shared, begin, last, own, depth, accum);
        // Not before: the products leave no registers for it.
        const GemmOutput<C> to = output_of<C>(out, pitch, m, n, row_scales, row_step, col_scales, column_step, bias, c, c_pitch,
                                              vector, alpha, beta);
        write_tile(gemm, shared, to, column, own, depth, lane, accum);
      });
}

}  // namespace magicube
