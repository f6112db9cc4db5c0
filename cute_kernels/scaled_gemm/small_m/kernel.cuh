// Small-M product of low-precision floats, D = X W: X (M, K) with M <= 64, W^T (N, K) packed weights.
//
// sm_90a; memory-bound by the weights. Work: kGroups warp groups have 64 rows of weights each, kDepth of them the same rows and
// every kDepth-th K tile; kSplit CTAs of a cluster share K. Pipeline: TMA brings K slices of 64 bytes of weights; a lane reads 16
// of these bytes, decodes them in registers, and multiplies them from there as the A operand of WGMMA. A lane so has neighbors
// along K where the instruction has one run of four per lane: the order along K is free if X has the same, so `order_few_rows`
// writes X decoded and in that order first. Partial accumulators of a K slice of bytes are added in float32. With block scales,
// values become bfloat16 times their scale (kBfloat16), and so does X; or scales multiply the sums of their block (kBlockSums,
// scaled_gemm/small_m/blocks.cuh). Source: PTX ISA, wgmma.mma_async register fragments.
#pragma once

#include "scaled_gemm/small_m/order.cuh"
#include "scaled_gemm/wgmma.cuh"

namespace magicube {

template <int kColumns, class W, class X, bool kBfloat16>
struct SmallMOp;
#define MAGICUBE_SMALL_M_OP(N, W, X)                                    \
  template <>                                                       \
  struct SmallMOp<N, W, X, false> {                                \
    using type = SM90::GMMA::MMA_64x##N##x32_F32##W##X##_RS_TN<>;   \
  };
#define MAGICUBE_SMALL_M_OPS(N)                                         \
  MAGICUBE_SMALL_M_OP(N, E4M3, E4M3)                                    \
  MAGICUBE_SMALL_M_OP(N, E4M3, E5M2)                                    \
  MAGICUBE_SMALL_M_OP(N, E5M2, E4M3)                                    \
  MAGICUBE_SMALL_M_OP(N, E5M2, E5M2)                                    \
  template <class W, class X>                                       \
  struct SmallMOp<N, W, X, true> {                                 \
    using type = SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_RS<SM90::GMMA::Major::K, SM90::GMMA::Major::K>; \
  };
MAGICUBE_SMALL_M_OPS(8)
MAGICUBE_SMALL_M_OPS(16)
MAGICUBE_SMALL_M_OPS(32)
MAGICUBE_SMALL_M_OPS(64)
#undef MAGICUBE_SMALL_M_OPS
#undef MAGICUBE_SMALL_M_OP

template <class C>
struct SmallMGemm {
  using Format = typename C::FormatB;
  using Order = SmallMOrder<Format::kBits, C::kBfloat16, C::kBlockSums>;
  using Op = typename SmallMOp<C::kRows, ReadyFormat<Format>, ReadyFormat<typename C::FormatA>, C::kBfloat16>::type;
  static constexpr int kKSlices = C::kKSlices, kTileK = kKSlices * Order::kSliceK, kDepth = C::kDepth;
  static constexpr int kHeight = 64 * C::kGroups / kDepth;
  static constexpr int kWeightsPitch = kKSlices * 64, kBoxBytes = C::kRows * 128;  // a box: 128 bytes of each row of X
  static constexpr int kBoxes = kTileK * Order::kSize / 128;
  static constexpr int kStages = C::kStages, kRegisters = C::kRows / 2;
  // With kBlockSums: boxes of 128 bytes of each row of weights, one of its scales, 16 or more, and the scales of X of a stage.
  static constexpr int kOfScales = C::kBlockSums && C::kBlock ? kTileK / C::kBlock : 0, kScaleBox = kOfScales < 16 ? 16 : kOfScales;
  static constexpr int kWeightBoxes = kKSlices / 2, kScaleBytes = kOfScales ? kHeight * kScaleBox : 0;
  static constexpr int kStageBytes = kHeight * kWeightsPitch + kBoxes * kBoxBytes + kScaleBytes;
  static constexpr int kFactorBytes = C::kBlockX ? kTileK / (C::kBlockX ? C::kBlockX : 1) * C::kRows * 4 : 0;
  // With many warp groups registers are scarce: one K slice at a time, and the producer gives up its own.
  static constexpr bool kShare = C::kGroups > 2, kOverlap = !kShare && (!C::kBfloat16 || C::kResident == 1);
  static constexpr int kThreads = 128 * C::kGroups + (kShare ? 128 : 32);
  // Registers that the CTA starts with: all of the SM's.
  static constexpr int kPool = 65536 / kThreads / 8 * 8 * (C::kGroups + 1), kProducerRegisters = C::kBlockSums ? 32 : 24;
  static constexpr int kConsumerRegisters = (kPool - kProducerRegisters) / C::kGroups / 8 * 8;
  using Accumulators = float[kRegisters];
  using KSlice = uint32_t[Order::kSteps][4];  // a lane's part, as the instruction reads it
  // Block scales of a lane's part of a row of a K slice.
  static constexpr int kOwnBlocks = C::kBlock == 0 ? 0 : Order::kOwn > C::kBlock ? Order::kOwn / C::kBlock : 1;
  using Scales = uint32_t[kKSlices][2][kOwnBlocks > 0 ? kOwnBlocks : 1];
  // Accumulators in shared memory, in place of the pipeline: rows of the output. The pitch avoids bank conflicts.
  static constexpr int kPitch = kHeight + 4;

  static_assert(kKSlices % 2 == 0, "K slices are processed in pairs");
  static_assert(C::kRows % C::kSplit == 0, "blocks of a cluster share the rows");
  static_assert(!kShare || C::kResident == 1, "a block takes the registers of all");
  static_assert(C::kGroups % kDepth == 0 && kStages > kDepth, "parts are read side by side, and one is fetched");
  static_assert(kStages % kDepth == 0, "the same warp groups read a stage in each round: a parity tells two rounds apart");
  static_assert(!C::kBlockSums || !C::kBfloat16, "blocks of bytes");
  static_assert(!C::kBlockSums || C::kBlock != 16 || Format::kBits == 4, "a lane's 8 values of a step are of one block");
  static_assert(!C::kBlockSums || C::kBlockX != 16 || C::kBlock == 16, "steps are blocks of both");
  static_assert(kStages * kStageBytes >= kDepth * C::kRows * kPitch * 4, "the reduction reuses the memory of the pipeline");

  uint32_t base;

  __device__ uint32_t weights(int stage) const { return base + stage * kStageBytes; }
  __device__ uint32_t box(int stage, int i) const { return weights(stage) + kHeight * kWeightsPitch + i * kBoxBytes; }
  __device__ static int scales_at(int stage) { return (stage + 1) * kStageBytes - kScaleBytes; }
  __device__ static int factors_at(int stage) { return kStages * kStageBytes + stage * kFactorBytes; }
  __device__ uint32_t full(int stage) const { return base + kStages * (kStageBytes + kFactorBytes) + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8 * kStages; }
};

template <class C>
__device__ void producer_loop(const SmallMGemm<C>& gemm, const TmaDescriptor& x, const TmaDescriptor& weights, int begin, int last,
                              int row) {
  using G = SmallMGemm<C>;
  GemmPipelineState<G::kStages> at;
  for (int part = begin; part < last; ++part, at.advance()) {
    const uint32_t full = gemm.full(at.stage);
    barrier_wait(gemm.empty(at.stage), at.parity ^ 1);
    mbarrier_arrive_expect_tx(full, G::kStageBytes);
    tma_load_2d(gemm.weights(at.stage), &weights, part * G::kWeightsPitch, row, full);
    // One K tile of weights comes while X is reordered: more would compete with X for bandwidth.
    if (part == begin) pdl_wait();
    CUTE_UNROLL
    for (int i = 0; i < G::kBoxes; ++i) tma_load_2d(gemm.box(at.stage, i), &x, (part * G::kBoxes + i) * 128, 0, full);
  }
}

// Block scales of a lane in one K tile. Beyond the last row and block they are those of others, of results that are not written,
// or zero.
template <class C>
__device__ __forceinline__ void load_scales(const uint8_t* const (&rows)[2], int blocks, int part,
                                             typename SmallMGemm<C>::Scales& to) {
  using G = SmallMGemm<C>;
  if constexpr (C::kBlock > 0) {
    const int first = (part * G::kTileK + int(threadIdx.x) % 4 * G::Order::kOwn) / C::kBlock;
    CUTE_UNROLL
    for (int i = 0; i < G::kKSlices; ++i) {
      CUTE_UNROLL
      for (int b = 0; b < G::kOwnBlocks; ++b) {
        const int block = first + i * (G::Order::kSliceK / C::kBlock) + b, there = block < blocks ? block : blocks - 1;
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) to[i][half][b] = __ldg(rows[half] + there);
      }
    }
  }
}

// Decode a lane's 16 bytes of one of its two rows of a K slice, as the instruction reads them.
template <class C>
__device__ __forceinline__ void decode_row(const uint32_t (&words)[4], int half,
                                           const uint32_t (&lane_scales)[sizeof(typename SmallMGemm<C>::Scales) / 8 / C::kKSlices],
                                           typename SmallMGemm<C>::KSlice& to) {
  using Format = typename C::FormatB;
  if constexpr (C::kBfloat16) {
    constexpr int kPairs = 16 / Format::kBits, kOfFactor = 4 * kPairs / (C::kBlock > 0 ? SmallMGemm<C>::kOwnBlocks : 1);
    uint32_t factor = 0;
    CUTE_UNROLL
    for (int p = 0; p < 4 * kPairs; ++p) {  // of 4 bits: values p % 4 and p % 4 + 4 of a word
      const uint32_t word = words[p / kPairs];
      uint32_t& pair = to[p / 2][half + 2 * (p % 2)];
      if constexpr (Format::kBits == 8) pair = to_halves<Format>(__byte_perm(word, 0, p % 2 ? 0x4342 : 0x4140));
      else if (p % 4 == 0) pair = to_halves_from<Format, 0>(word);
      else if (p % 4 == 1) pair = to_halves_from<Format, 4>(word);
      else if (p % 4 == 2) pair = to_halves_from<Format, 8>(word);
      else pair = to_halves_from<Format, 12>(word);
      if constexpr (C::kBlock > 0) {
        if (p % kOfFactor == 0) factor = scale_halves<typename C::Scale>(lane_scales[p / kOfFactor]);
        pair = multiply_halves(pair, factor);
      }
    }
  } else {
    CUTE_UNROLL
    for (int s = 0; s < SmallMGemm<C>::Order::kSteps; ++s) {
      if constexpr (Format::kBits == 8) {
        to[s][half] = words[2 * s], to[s][2 + half] = words[2 * s + 1];
      } else {
        to[s][half] = to_bytes<Format>(words[s]), to[s][2 + half] = to_bytes<Format>(words[s] >> 4);
      }
    }
  }
}

// Load a lane's part of K slice i of a stage: 16 bytes of rows g and g + 8 of its warp's 16. Rows read together have 2-way bank
// conflicts; boxes of 64 bytes, which have none, were 3 to 6% slower (H200).
template <class C>
__device__ __forceinline__ void load_k_slice(const uint8_t* stage, int i, const typename SmallMGemm<C>::Scales& lane_scales,
                                          typename SmallMGemm<C>::KSlice& to) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % (SmallMGemm<C>::kHeight / 16) * 16 + lane / 4;
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const uint8_t* const from = stage + 64 * i + (row + 8 * half) * SmallMGemm<C>::kWeightsPitch + lane % 4 * 16;
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    decode_row<C>({x.x, x.y, x.z, x.w}, half, lane_scales[i][half], to);
  }
}

template <class Op, int kRegisters, int... I>
__device__ __forceinline__ void wgmma_rs(const uint32_t (&a)[4], uint64_t b, float (&accum)[kRegisters],
                                                        SM90::GMMA::ScaleOut scale, int_sequence<I...>) {
  Op::fma(a[0], a[1], a[2], a[3], b, accum[I]..., scale);
}

// Start the products of a K slice. Of bytes, `partial` starts from zero.
template <class C>
__device__ __forceinline__ void start_k_slice(const SmallMGemm<C>& gemm, typename SmallMGemm<C>::KSlice& a, int stage, int i,
                                           typename SmallMGemm<C>::Accumulators& partial) {
  using G = SmallMGemm<C>;
  fence_accumulators(partial);
  CUTE_UNROLL
  for (int s = 0; s < G::Order::kSteps; ++s) {
    CUTE_UNROLL
    for (int r = 0; r < 4; ++r) warpgroup_fence_operand(a[s][r]);
  }
  warpgroup_arrive();
  CUTE_UNROLL
  for (int s = 0; s < G::Order::kSteps; ++s) {
    const int at = (i * G::Order::kSliceK + G::Order::kStepK * s) * G::Order::kSize;
    const uint64_t b = smem_descriptor<128>(gemm.box(stage, at / 128)) + (at % 128 >> 4);
    const bool fresh = !C::kBfloat16 && s == 0;
    wgmma_rs<typename G::Op>(a[s], b, partial, fresh ? SM90::GMMA::ScaleOut::Zero : SM90::GMMA::ScaleOut::One,
                                            make_int_sequence<G::kRegisters>{});
  }
  warpgroup_commit_batch();
}

// Keep the operands alive until the products are complete. Products of bfloat16 accumulate in `accum` directly.
template <class C>
__device__ __forceinline__ void finish_k_slice(typename SmallMGemm<C>::KSlice& a, typename SmallMGemm<C>::Accumulators& partial,
                                         typename SmallMGemm<C>::Accumulators& accum) {
  fence_accumulators(C::kBfloat16 ? accum : partial);
  CUTE_UNROLL
  for (int s = 0; s < SmallMGemm<C>::Order::kSteps; ++s) {
    CUTE_UNROLL
    for (int r = 0; r < 4; ++r) warpgroup_fence_operand(a[s][r]);
  }
  if constexpr (!C::kBfloat16) add_accumulators(accum, partial);
}

// Epilogue of rows from `first`: add the accumulators of all warp groups and CTAs, eight columns per thread; the tile starts at
// `column`. A small loop body: all CTAs arrive at the same time, and code that runs once is an instruction cache miss.
template <class G, class C>
__device__ __forceinline__ void write_rows(const G& gemm, const uint8_t* shared, const GemmOutput<C>& to, int first, int column) {
  using Source = typename C::Source;
  constexpr int kRuns = G::kHeight / 8, kOwn = C::kRows / C::kSplit;
#pragma unroll 1
  for (int i = threadIdx.x; i < kOwn * kRuns; i += 128 * C::kGroups) {
    const int m = first + i / kRuns, at = i % kRuns * 8, n = column + at, present = m < to.m ? to.n - n : 0;
    if (present <= 0) continue;
    float total[8] = {};
    CUTE_UNROLL
    for (int part = 0; part < C::kSplit * G::kDepth; ++part) {  // fixed order: deterministic
      const uint32_t place = ((part % G::kDepth * C::kRows + m) * G::kPitch + at) * 4;
      CUTE_UNROLL
      for (int j = 0; j < 8; j += 4) {
        float4 x;
        if constexpr (C::kSplit == 1) x = *reinterpret_cast<const float4*>(shared + place + 4 * j);
        else x = cluster::load_four_of(gemm.base + place + 4 * j, part / G::kDepth);
        total[j] += x.x, total[j + 1] += x.y, total[j + 2] += x.z, total[j + 3] += x.w;
      }
    }
    float col_scale[8], bias[8];
    Source source[8] = {};
    CUTE_UNROLL
    for (int j = 0; j < 8; ++j) col_scale[j] = 1.0f, bias[j] = 0.0f;
    const auto load = [&](const auto* from, auto& values) {
      CUTE_UNROLL
      for (int j = 0; j < 8; ++j) {
        if (j < present) values[j] = from[j];
      }
    };
    if (to.col_scales) load(to.col_scales + n, col_scale);
    if (to.bias) load(to.bias + n, bias);
    if constexpr (GemmOutput<C>::kHasSource) load(to.c + int64_t{m} * to.c_pitch + n, source);
    const float row_scale = to.row_scale(m);
    alignas(16) typename C::Out out[8];
    CUTE_UNROLL
    for (int j = 0; j < 8; ++j) out[j] = to.finish(__float_as_uint(total[j]), source[j], row_scale, col_scale[j], bias[j]);
    typename C::Out* const row = to.out + int64_t{m} * to.pitch + n;
    if (to.vector) {
      CUTE_UNROLL
      for (int j = 0; j < int(sizeof(out) / 16); ++j) reinterpret_cast<uint4*>(row)[j] = reinterpret_cast<const uint4*>(out)[j];
    } else {
      CUTE_UNROLL
      for (int j = 0; j < 8; ++j) {
        if (j < present) row[j] = out[j];
      }
    }
  }
}

// Leave a lane's sums of rows from depth * kRows on in shared memory, columns `own` and own + 8 of the tile, then write the tile.
template <class G, class C>
__device__ __forceinline__ void write_tile(const G& gemm, uint8_t* shared, const GemmOutput<C>& to, int column, int own, int depth,
                                           int lane, const typename G::Accumulators& accum) {
  constexpr int kAll = 128 * C::kGroups;
  warp_group::named_barrier_sync(1, kAll);  // all warps have read the pipeline
  CUTE_UNROLL
  for (int r = 0; r < G::kRegisters; ++r) {  // rows 2t and 2t + 1 of every eight
    const int m = depth * C::kRows + r / 4 * 8 + lane % 4 * 2 + r % 2, n = own + r / 2 % 2 * 8;
    reinterpret_cast<float*>(shared)[m * G::kPitch + n] = accum[r];
  }
  if constexpr (C::kSplit == 1) {
    warp_group::named_barrier_sync(1, kAll);
    write_rows(gemm, shared, to, 0, column);
  } else {  // the CTAs of a cluster reduce: each writes a share of the rows
    cluster::sync();
    write_rows(gemm, shared, to, int(cluster::rank()) * (C::kRows / C::kSplit), column);
  }
}

template <class C>
__device__ void consumer_loop(const SmallMGemm<C>& gemm, uint8_t* shared, const BlockScales& scales, const GemmOutput<C>& to,
                                  int begin, int last, int column) {
  using G = SmallMGemm<C>;
  const int lane = threadIdx.x % 32, depth = threadIdx.x / (128 * C::kGroups / G::kDepth);
  const int own = threadIdx.x / 32 % (G::kHeight / 16) * 16 + lane / 4;  // columns of the tile: own and own + 8
  GemmPipelineState<G::kStages> at;
  typename G::Accumulators accum = {}, partial = {};
  typename G::Scales lane_scales, next;
  const uint8_t* of_rows[2];  // block scales of the lane's rows
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = column + own + 8 * half;
    of_rows[half] = scales.codes + (row < scales.rows ? row : scales.rows - 1) * scales.pitch;
  }
  load_scales<C>(of_rows, scales.blocks, begin + depth, next);
  at.skip(depth);
  for (int part = begin + depth; part < last; part += G::kDepth, at.skip(G::kDepth)) {
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(lane_scales) / 4); ++i) (&lane_scales[0][0][0])[i] = (&next[0][0][0])[i];
    load_scales<C>(of_rows, scales.blocks, part + G::kDepth, next);  // prefetch during the products of this K tile
    barrier_wait(gemm.full(at.stage), at.parity);
    const uint8_t* stage = shared + at.stage * G::kStageBytes;
    CUTE_UNROLL
    for (int i = 0; i < G::kKSlices; i += 2) {
      typename G::KSlice first, second;
      load_k_slice<C>(stage, i, lane_scales, first);
      start_k_slice(gemm, first, at.stage, i, C::kBfloat16 ? accum : partial);
      if constexpr (!G::kOverlap) {
        warpgroup_wait<0>();
        finish_k_slice<C>(first, partial, accum);
      }
      load_k_slice<C>(stage, i + 1, lane_scales, second);
      if constexpr (C::kBfloat16) {
        start_k_slice(gemm, second, at.stage, i + 1, accum);
        warpgroup_wait<0>();
        if constexpr (G::kOverlap) finish_k_slice<C>(first, partial, accum);
        finish_k_slice<C>(second, partial, accum);
      } else if constexpr (G::kOverlap) {
        typename G::Accumulators other = {};
        start_k_slice(gemm, second, at.stage, i + 1, other);
        warpgroup_wait<1>();
        finish_k_slice<C>(first, partial, accum);
        warpgroup_wait<0>();
        finish_k_slice<C>(second, other, accum);
      } else {
        start_k_slice(gemm, second, at.stage, i + 1, partial);
        warpgroup_wait<0>();
        finish_k_slice<C>(second, partial, accum);
      }
    }
    if (lane == 0) barrier_arrive(gemm.empty(at.stage));
  }
  write_tile(gemm, shared, to, column, own, depth, lane, accum);
}

// Set up the pipeline; produce(gemm, begin, last, column) and consume(gemm, shared, begin, last, column) are run for the K tiles
// and the columns of a CTA.
template <class C, class Produce, class Consume>
__device__ __forceinline__ void run_small_m(int64_t k, Produce produce, Consume consume) {
  using G = SmallMGemm<C>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const G gemm{shared_address(shared)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < G::kStages; ++stage) {
      barrier_init(gemm.full(stage), 1);
      barrier_init(gemm.empty(stage), 4 * C::kGroups / C::kDepth);
    }
    barrier_fence();
  }
  __syncthreads();
  const int rank = C::kSplit == 1 ? 0 : int(cluster::rank()), column = int(blockIdx.x) / C::kSplit * G::kHeight;
  const int parts = int((k + G::kTileK - 1) / G::kTileK), begin = parts * rank / C::kSplit, last = parts * (rank + 1) / C::kSplit;
  if (threadIdx.x < 128 * C::kGroups) {
    if constexpr (G::kShare) warp_group::setmaxnreg_inc<G::kConsumerRegisters>();
    consume(gemm, shared, begin, last, column);
  } else {
    if constexpr (G::kShare) warp_group::setmaxnreg_dec<G::kProducerRegisters>();
    if (threadIdx.x == 128 * C::kGroups) produce(gemm, begin, last, column);
    __syncwarp();
    if constexpr (C::kSplit > 1) cluster::sync();
  }
  if constexpr (C::kSplit > 1) cluster::sync();  // other CTAs read this CTA's shared memory
}

// Where results go; steps: 0 for a scale of all rows or columns.
template <class C>
__device__ __forceinline__ GemmOutput<C>
output_of(typename C::Out* out, int64_t pitch, int64_t m, int64_t n, const float* row_scales, int64_t row_step,
          const float* col_scales, int64_t column_step, const float* bias, const typename C::Source* c, int64_t c_pitch,
          int64_t vector, float alpha, float beta) {
  if (row_scales && row_step == 0) alpha *= __ldg(row_scales);
  if (col_scales && column_step == 0) alpha *= __ldg(col_scales);
  return {out, c, row_step ? row_scales : nullptr, column_step ? col_scales : nullptr, bias, pitch, c_pitch,
          int(m), int(n), alpha, beta, 0.0f, 0.0f, vector != 0};
}

template <class C>
__global__ void __launch_bounds__(SmallMGemm<C>::kThreads, C::kResident)
gemm_floats_few(const __grid_constant__ TmaDescriptor x, const __grid_constant__ TmaDescriptor weights, int64_t k,
                const uint8_t* scales, int64_t scales_pitch, int64_t blocks, typename C::Out* out, int64_t pitch, int64_t m,
                int64_t n, const float* row_scales, int64_t row_step, const float* col_scales, int64_t column_step, const float*
                bias, const typename C::Source* c, int64_t c_pitch, int64_t vector, float alpha, float beta) {
  run_small_m<C>(
      k, [&](const auto& gemm, int begin, int last, int column) { producer_loop<C>(gemm, x, weights, begin, last, column); },
      [&](const auto& gemm, uint8_t* shared, int begin, int last, int column) {
        const GemmOutput<C> to = output_of<C>(out, pitch, m, n, row_scales, row_step, col_scales, column_step, bias, c, c_pitch,
                                              vector, alpha, beta);
        consumer_loop<C>(gemm, shared, {scales, scales_pitch, int(n), int(blocks)}, to, begin, last, column);
      });
}

}  // namespace magicube
