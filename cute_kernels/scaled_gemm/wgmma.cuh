// Dense product of low-precision floats, D = A B: A (M, K) and B^T (N, K) packed, K-major.
//
// sm_90a. Work: persistent CTAs take output tiles. Pipeline: one producer warp fills two pipelines by TMA: packed K tiles of the
// operands to decode, and K tiles of the others. kDecoders warp groups take turns to decode packed tiles; kGroups consumer warp
// groups multiply decoded ones by WGMMA, 64 rows of the tile each.
// kPromote: Tensor Cores accumulate one K tile at a time and float32 additions do the rest; else all of K. A tile of 256 columns
// reads less shared memory per product than one of 128; one of 192 has wider instructions than the two spans of 256.
// kLines: A has scales of 128 values of a row, kTiledA, kTiledB: of 128 x 128 tiles; they multiply the sums of a K tile as
// these are added to those of the tile.
// kSplit CTAs of a cluster share K (split-K) and reduce through distributed shared memory.
// Source: CUTLASS, SM90 warp-specialized kernels with fp8 promotion; OCP MX v1.0, section 6 (block scales).
#pragma once

#include "scaled_gemm/common.cuh"
#include "gemm/wgmma.cuh"

namespace magicube {

template <int kColumns, class A, class B, bool kBfloat16>
struct FloatGroupOp;
#define MAGICUBE_BYTES_OP(N, A, B)                                  \
  template <>                                                       \
  struct FloatGroupOp<N, A, B, false> {                             \
    using type = SM90::GMMA::MMA_64x##N##x32_F32##A##B##_SS_TN<>;   \
  };
#define MAGICUBE_GROUP_OPS(N)                                       \
  MAGICUBE_BYTES_OP(N, E4M3, E4M3)                                  \
  MAGICUBE_BYTES_OP(N, E4M3, E5M2)                                  \
  MAGICUBE_BYTES_OP(N, E5M2, E4M3)                                  \
  MAGICUBE_BYTES_OP(N, E5M2, E5M2)                                  \
  template <class A, class B>                                       \
  struct FloatGroupOp<N, A, B, true> {                              \
    using type = SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_SS<SM90::GMMA::Major::K, SM90::GMMA::Major::K>; \
  };
MAGICUBE_GROUP_OPS(64)
MAGICUBE_GROUP_OPS(128)
MAGICUBE_GROUP_OPS(192)
MAGICUBE_GROUP_OPS(256)
#undef MAGICUBE_GROUP_OPS
#undef MAGICUBE_BYTES_OP

// Format that Tensor Cores multiply for a packed one.
template <class Format>
using ReadyFormat = cuda::std::conditional_t<cuda::std::is_same_v<Format, E5M2>, E5M2, E4M3>;

template <class C>
struct FloatGemm {
  using A = FloatPlane<typename C::FormatA, typename C::ScaleA, C::kBlockA, C::kBfloat16, C::kTileM>;
  using B = FloatPlane<typename C::FormatB, typename C::ScaleB, C::kBlockB, C::kBfloat16, C::kTileN>;
  // Columns per instruction. Accumulators of a K tile beside those of 256 columns exceed the registers: two spans.
  static constexpr int kColumns = C::kPromote && C::kTileN == 256 ? 128 : C::kTileN, kSpans = C::kTileN / kColumns;
  using Op = typename FloatGroupOp<kColumns, ReadyFormat<typename C::FormatA>, ReadyFormat<typename C::FormatB>,
                                   C::kBfloat16>::type;
  static constexpr int kTileM = C::kTileM, kTileN = C::kTileN, kTileK = A::kTileK;
  static constexpr int kStages = C::kStages, kPackedStages = C::kPackedStages;
  static constexpr int kGroups = C::kGroups, kDecoders = C::kDecoders, kSplit = C::kSplit;
  static constexpr int kRegisters = kColumns / 2;  // accumulators of a span, per thread
  static constexpr int kStageBytes = A::kBytes + B::kBytes, kPackedBytes = A::kPackedBytes + B::kPackedBytes;
  static constexpr bool kDirect = !A::kDecoded || !B::kDecoded;
  static constexpr int kRings = kStages * kStageBytes + kPackedStages * kPackedBytes;
  static constexpr int kThreads = 128 * (kGroups + kDecoders + 1);
  static constexpr int kMany = kGroups + kDecoders;
  // Registers per thread of the three warp group roles, out of those of the CTA; with one warp group there are enough.
  static constexpr bool kShare = kMany > 1 || C::kResident > 1;
  static constexpr int kPool = 65536 / C::kResident / kThreads / 8 * 8 * (kMany + 1);
  static constexpr int kProducerRegisters = kSplit > 1 ? 56 : kMany == 4 ? 32 : 40;
  static constexpr int kDecoderRegisters =
      kDecoders == 0 ? 0 : kGroups == 1 ? 80 : !C::kPromote ? 88 : C::kBfloat16 ? 80 : 72;
  static constexpr int kMost = (kPool - kDecoders * kDecoderRegisters - kProducerRegisters) / kGroups / 8 * 8;
  static constexpr int kConsumerRegisters = kMost < 240 ? kMost : 240;
  // Whether registers hold the accumulators of two K tiles beside those of the tile, so that one K tile is multiplied while the
  // other is added. K tiles then go in pairs, of which the last can be beyond the matrix. No product is in flight between pairs:
  // at the end of a loop, the assembler would wait after each instruction.
  static constexpr bool kOverlap = C::kPromote && kDecoders == 0 && kTileN <= 128;
  static constexpr int kPair = kOverlap ? 2 : 1;
  static constexpr bool kScaled = C::kLines || C::kTiledA || C::kTiledB;
  using Accumulators = float[kRegisters];
  using Tile = float[kSpans][kRegisters];

  static_assert(kGroups * 64 == kTileM, "a group has 64 rows");
  static_assert(!kScaled || C::kPromote, "sums of a K tile are scaled");
  static_assert((kDecoders > 0) == (A::kDecoded || B::kDecoded), "decoders where something is to be decoded");
  static_assert(kSplit == 1 || (kGroups == 1 && kSpans == 1 && kRegisters % (16 * kSplit) == 0),
                "blocks share a tile by 32 columns");
  static_assert(kSplit == 1 || kRings >= kRegisters * 512, "the split-K reduction reuses the memory of the pipeline");

  uint8_t* shared;
  TileScheduler<C::kBand> scheduler;
  int begin, last;  // K tiles of this CTA
  int rows;         // of a TMA box of A: at most M, since the copy engine is slow to fill rows that do not exist

  __device__ uint32_t base() const { return shared_address(shared); }
  __device__ uint32_t full(int stage) const { return base() + kRings + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8 * kStages; }
  __device__ uint32_t packed_full(int stage) const { return full(2 * kStages) + 8 * stage; }
  __device__ uint32_t packed_empty(int stage) const { return packed_full(stage) + 8 * kPackedStages; }
  __device__ uint8_t* ready_a(int stage) const { return shared + stage * kStageBytes; }
  __device__ uint8_t* ready_b(int stage) const { return ready_a(stage) + A::kBytes; }
  __device__ uint8_t* packed_a(int stage) const { return shared + kStages * kStageBytes + stage * kPackedBytes; }
  __device__ uint8_t* packed_b(int stage) const { return packed_a(stage) + A::kPackedBytes; }

  // Call f(row, column) with the corner of each tile of this CTA.
  template <class F>
  __device__ __forceinline__ void for_tiles(F f) const {
    for (int index = blockIdx.x / kSplit; index < scheduler.count(); index += gridDim.x / kSplit) {
      int row, column;
      scheduler.place(index, row, column);
      f(row * kTileM, column * kTileN);
    }
  }
};

template <class C>
__device__ void producer_loop(const FloatGemm<C>& gemm, const TmaDescriptor& a, const TmaDescriptor& b) {
  using G = FloatGemm<C>;
  GemmPipelineState<G::kStages> at;
  GemmPipelineState<G::kPackedStages> packed;
  gemm.for_tiles([&](int row, int column) {
    for (int part = gemm.begin; part < gemm.last; ++part, at.advance(), packed.advance()) {
      if constexpr (G::kPackedBytes > 0) {
        const uint32_t full = gemm.packed_full(packed.stage);
        barrier_wait(gemm.packed_empty(packed.stage), packed.parity ^ 1);
        mbarrier_arrive_expect_tx(full, (G::A::kDecoded ? gemm.rows * G::A::kPackedRow : 0) + G::B::kPackedBytes);
        if (G::A::kDecoded) tma_load_2d(shared_address(gemm.packed_a(packed.stage)), &a, part * G::A::kPackedRow, row, full);
        if (G::B::kDecoded) tma_load_2d(shared_address(gemm.packed_b(packed.stage)), &b, part * G::B::kPackedRow, column, full);
      }
      if constexpr (G::kDirect) {
        const uint32_t full = gemm.full(at.stage);
        barrier_wait(gemm.empty(at.stage), at.parity ^ 1);
        mbarrier_arrive_expect_tx(full, (G::A::kDecoded ? 0 : gemm.rows * 128) + (G::B::kDecoded ? 0 : G::B::kBytes));
        if (!G::A::kDecoded) tma_load_2d(shared_address(gemm.ready_a(at.stage)), &a, part * 128, row, full);
        if constexpr (C::kAdjacent > 0) {
          tma_load_5d(shared_address(gemm.ready_b(at.stage)), &b, part * 128, column / (4 * C::kAdjacent), full);
        } else {
          if (!G::B::kDecoded) tma_load_2d(shared_address(gemm.ready_b(at.stage)), &b, part * 128, column, full);
        }
      }
    }
  });
}

template <class C>
__device__ void decoder_loop(const FloatGemm<C>& gemm, const BlockScales& scales_a, const BlockScales& scales_b, int own,
                             int thread) {
  using G = FloatGemm<C>;
  using A = typename G::A;
  using B = typename G::B;
  GemmPipelineState<G::kStages> at;
  GemmPipelineState<G::kPackedStages> packed;
  int turn = 0;
  gemm.for_tiles([&](int row, int column) {
    uint32_t a[FloatRun<A, 128>::kCount], b[FloatRun<B, 128>::kCount];
    const auto load_scales = [&](int part) {
      load_block_scales<A, 128>(scales_a, row, part * G::kTileK, thread, a);
      load_block_scales<B, 128>(scales_b, column, part * G::kTileK, thread, b);
    };
    load_scales(gemm.begin + (own + G::kDecoders - turn) % G::kDecoders);
    for (int part = gemm.begin; part < gemm.last; ++part, at.advance(), packed.advance()) {
      const bool mine = turn == own;
      turn = turn + 1 == G::kDecoders ? 0 : turn + 1;
      if (!mine) continue;
      barrier_wait(gemm.packed_full(packed.stage), packed.parity);
      barrier_wait(gemm.empty(at.stage), at.parity ^ 1);
      if constexpr (A::kDecoded) decode_plane<A, 128>(gemm.packed_a(packed.stage), gemm.ready_a(at.stage), thread, a);
      if constexpr (B::kDecoded) decode_plane<B, 128>(gemm.packed_b(packed.stage), gemm.ready_b(at.stage), thread, b);
      warp_group::fence_proxy_async_shared();
      __syncwarp();
      if (thread % 32 == 0) {
        barrier_arrive(gemm.full(at.stage));
        barrier_arrive(gemm.packed_empty(packed.stage));
      }
      load_scales(part + G::kDecoders);  // prefetch while the others decode
    }
  });
}

// The products of one K tile for a warp group's rows; kAJustWritten: overwrite `accum`, else add to it.
template <class C, bool kAJustWritten>
__device__ __forceinline__ void mma_k_tile(const FloatGemm<C>& gemm, typename FloatGemm<C>::Accumulators& accum, int stage,
                                               int group, int span = 0) {
  using G = FloatGemm<C>;
  const uint64_t a = smem_descriptor<128>(shared_address(gemm.ready_a(stage))) + (group * 64 * 128 >> 4);
  const uint64_t b = smem_descriptor<128>(shared_address(gemm.ready_b(stage))) + (span * G::kColumns * 128 >> 4);
  warpgroup_arrive();
  CUTE_UNROLL
  for (int k = 0; k < 128; k += 32) {
    wgmma<typename G::Op>(accum, a + (k >> 4), b + (k >> 4), make_int_sequence<G::kRegisters>{},
                                   kAJustWritten && k == 0 ? SM90::GMMA::ScaleOut::Zero : SM90::GMMA::ScaleOut::One);
  }
  warpgroup_commit_batch();
}

template <int kRegisters>
__device__ __forceinline__ void fence_accumulators(float (&accum)[kRegisters]) {
  CUTE_UNROLL
  for (int r = 0; r < kRegisters; ++r) warpgroup_fence_operand(accum[r]);
}

template <int kRegisters>
__device__ __forceinline__ void add_accumulators(float (&accum)[kRegisters], const float (&partial)[kRegisters]) {
  CUTE_UNROLL
  for (int r = 0; r < kRegisters; ++r) accum[r] += partial[r];
}

// Scales of the sums of kPair K tiles, loaded while those before are multiplied: of a thread's two rows and of the spans.
template <class C>
struct SumScales {
  using G = FloatGemm<C>;
  const float* rows[2];
  const float* spans[G::kSpans];
  int tiles;  // scales along K
  float of_rows[G::kPair][2], of_spans[G::kPair][G::kSpans];

  template <class ScalesA>
  __device__ SumScales(const ScalesA& scales_a, const TileScales& scales_b, int tiles, int row, int column, int group) : tiles(tiles) {
    const int first = row + group * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) rows[i] = scales_a.of(first + 8 * i);
    CUTE_UNROLL
    for (int i = 0; i < G::kSpans; ++i) spans[i] = scales_b.of(column + i * G::kColumns);
  }
  // K tiles `part` to `part + kPair - 1`; beyond the matrix, where sums are zeros, 0.
  __device__ void load(int part) {
    CUTE_UNROLL
    for (int i = 0; G::kScaled && i < G::kPair; ++i) {
      const int of_k = (part + i) * G::kTileK / 128;
      const bool exists = of_k < tiles;
      const int at = exists ? of_k : 0;
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        if constexpr (C::kLines || C::kTiledA) of_rows[i][half] = half == 0 || C::kLines ? __ldg(rows[half] + at) : of_rows[i][0];
        else of_rows[i][half] = 1.0f;
        of_rows[i][half] = exists ? of_rows[i][half] : 0.0f;
      }
      CUTE_UNROLL
      for (int span = 0; C::kTiledB && span < G::kSpans; ++span) of_spans[i][span] = exists ? __ldg(spans[span] + at) : 0.0f;
    }
  }
  // Add the sums of a span of K tile `part + i`.
  __device__ void add(typename G::Accumulators& accum, const typename G::Accumulators& partial, int i, int span) const {
    if constexpr (G::kScaled) {
      float factors[2];
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) factors[half] = C::kTiledB ? of_rows[i][half] * of_spans[i][span] : of_rows[i][half];
      CUTE_UNROLL
      for (int r = 0; r < G::kRegisters; ++r) accum[r] = __fmaf_rn(partial[r], factors[r / 2 % 2], accum[r]);
    } else {
      add_accumulators(accum, partial);
    }
  }
};

template <class C>
__device__ __forceinline__ void mma_tile(const FloatGemm<C>& gemm, typename FloatGemm<C>::Tile& accum,
                                         GemmPipelineState<C::kStages>& at, int group, const SumScales<C>& scales) {
  using G = FloatGemm<C>;
  const auto free_stage = [&](int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(gemm.empty(stage));
  };
  if constexpr (C::kPromote) {
    SumScales<C> ahead = scales;
    ahead.load(gemm.begin);
    typename G::Accumulators even = {};
    [[maybe_unused]] typename G::Accumulators odd = {};
    int stage = at.stage;  // of the K tile that is added next
    const auto start = [&](typename G::Accumulators& partial, int span = 0) {
      if (span == 0) barrier_wait(gemm.full(at.stage), at.parity);
      fence_accumulators(partial);
      mma_k_tile<C, true>(gemm, partial, at.stage, group, span);
      if (span + 1 == G::kSpans) at.advance();
    };
    const auto add = [&](typename G::Accumulators& partial, const SumScales<C>& now, int i, int span = 0) {
      fence_accumulators(partial);
      if (span + 1 == G::kSpans) {
        free_stage(stage);
        stage = stage + 1 == G::kStages ? 0 : stage + 1;
      }
      now.add(accum[span], partial, i, span);
    };
    for (int part = gemm.begin; part < gemm.last; part += G::kPair) {
      const SumScales<C> now = ahead;
      ahead.load(part + G::kPair);
      if constexpr (G::kOverlap) {
        start(even);
        start(odd);
        warpgroup_wait<1>();
        add(even, now, 0);
        warpgroup_wait<0>();
        add(odd, now, 1);
      } else {
        CUTE_UNROLL
        for (int span = 0; span < G::kSpans; ++span) {
          start(even, span);
          warpgroup_wait<0>();
          add(even, now, 0, span);
        }
      }
    }
  } else {
    int before = 0;
    fence_accumulators(accum[0]);
    for (int part = gemm.begin; part < gemm.last; ++part, at.advance()) {
      barrier_wait(gemm.full(at.stage), at.parity);
      mma_k_tile<C, false>(gemm, accum[0], at.stage, group);
      warpgroup_wait<1>();
      if (part > gemm.begin) free_stage(before);
      before = at.stage;
    }
    warpgroup_wait<0>();
    fence_accumulators(accum[0]);
    if (gemm.begin < gemm.last) free_stage(before);
  }
}

// Reduce the accumulators of a cluster's CTAs: each writes a share of the columns.
template <class C>
__device__ __forceinline__ void reduce_and_write_tile(const FloatGemm<C>& gemm, const GemmOutput<C>& to,
                                                  const typename FloatGemm<C>::Accumulators& accum, int row, int column) {
  using G = FloatGemm<C>;
  constexpr int kOwn = G::kRegisters / G::kSplit;
  const int thread = threadIdx.x, rank = int(cluster::rank());
  warp_group::named_barrier_sync(1, 128);  // all warps have read the pipelines
  float* own = reinterpret_cast<float*>(gemm.shared);
  CUTE_UNROLL
  for (int r = 0; r < G::kRegisters; ++r) own[r * 128 + thread] = accum[r];
  cluster::sync();
  uint32_t total[1][kOwn];
  CUTE_UNROLL
  for (int r = 0; r < kOwn; ++r) {
    float sum = 0;
    CUTE_UNROLL
    for (int other = 0; other < G::kSplit; ++other) {
      sum += __uint_as_float(cluster::load_of(gemm.base() + ((rank * kOwn + r) * 128 + thread) * 4, other));
    }
    total[0][r] = __float_as_uint(sum);
  }
  write_fragment(to, total, row + thread / 32 * 16, column + 2 * kOwn * rank, thread % 32);
}

// ScalesA: LineScales or TileScales.
template <class C, class ScalesA>
__device__ void multiply_tiles(const FloatGemm<C>& gemm, const GemmOutput<C>& to, int group, const ScalesA& scales_a,
                              const TileScales& scales_b, int tiles) {
  using G = FloatGemm<C>;
  GemmPipelineState<G::kStages> at;
  gemm.for_tiles([&](int row, int column) {
    typename G::Tile accum = {};
    mma_tile(gemm, accum, at, group, SumScales<C>(scales_a, scales_b, tiles, row, column, group));
    if constexpr (G::kSplit > 1) {
      reduce_and_write_tile(gemm, to, accum[0], row, column);
    } else {
      uint32_t bits[1][1][G::kSpans * G::kRegisters];
      CUTE_UNROLL
      for (int r = 0; r < G::kSpans * G::kRegisters; ++r) {
        bits[0][0][r] = __float_as_uint(accum[r / G::kRegisters][r % G::kRegisters]);
      }
      const int first = row + group * 64 + threadIdx.x / 32 % 4 * 16, lane = threadIdx.x % 32;
      if constexpr (C::kAdjacent > 0) {
        SourceRuns<C, 1, C::kTileN> sources(to, first, 64, column, lane);
        write_adjacent(to, bits, first, 64, column, lane, RowFactors<C, 1>(to, first, 64, lane),
                       ColumnFactors<C, C::kTileN>(to, column, lane), sources, NoVisitor{});
      } else {
        write_fragment(to, bits[0], first, column, lane);
      }
    }
  });
}

template <class C>
__device__ __forceinline__ void init_barriers(const FloatGemm<C>& gemm) {
  using G = FloatGemm<C>;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < G::kStages; ++stage) {
      barrier_init(gemm.full(stage), G::kDirect + (G::kDecoders > 0 ? 4 : 0));
      barrier_init(gemm.empty(stage), 4 * G::kGroups);
    }
    for (int stage = 0; G::kPackedBytes > 0 && stage < G::kPackedStages; ++stage) {
      barrier_init(gemm.packed_full(stage), 1);
      barrier_init(gemm.packed_empty(stage), 4);
    }
    barrier_fence();
  }
  __syncthreads();
}

template <class C>
__global__ void __launch_bounds__(FloatGemm<C>::kThreads, C::kResident)
gemm_floats_wgmma(const __grid_constant__ TmaDescriptor a, const __grid_constant__ TmaDescriptor b, int64_t k,
                  const void* scales_a, int64_t scales_a_pitch, int64_t blocks_a, const void* scales_b,
                  int64_t scales_b_pitch, int64_t blocks_b, typename C::Out* out, int64_t pitch, int64_t m, int64_t n,
                  const float* row_scales, int64_t row_step, const float* col_scales, int64_t column_step, const float* bias,
                  const typename C::Source* c, int64_t c_pitch, int64_t vector, float alpha, float beta) {
  using G = FloatGemm<C>;
  extern __shared__ __align__(1024) uint8_t shared[];
  constexpr int kDepth = G::kPair * G::kTileK;
  const int pairs = int((k + kDepth - 1) / kDepth), rank = G::kSplit == 1 ? 0 : int(cluster::rank());
  const G gemm{shared, {int((m + G::kTileM - 1) / G::kTileM), int((n + G::kTileN - 1) / G::kTileN)},
               pairs * rank / G::kSplit * G::kPair, pairs * (rank + 1) / G::kSplit * G::kPair, m < G::kTileM ? int(m) : G::kTileM};
  const FloatScales scale_args_a{scales_a, scales_a_pitch, blocks_a}, scale_args_b{scales_b, scales_b_pitch, blocks_b};
  init_barriers(gemm);
  const int group = threadIdx.x / 128;
  if (group < G::kGroups) {
    if constexpr (G::kShare) warp_group::setmaxnreg_inc<G::kConsumerRegisters>();
    if (row_scales && row_step == 0) alpha *= __ldg(row_scales);
    if (col_scales && column_step == 0) alpha *= __ldg(col_scales);
    const GemmOutput<C> to{out, c, row_step ? row_scales : nullptr, column_step ? col_scales : nullptr, bias, pitch, c_pitch,
                           int(m), int(n), alpha, beta, 0.0f, 0.0f, vector != 0};
    const TileScales tiles_b = scale_args_b.of_tiles<typename G::B>();
    const int tiles = int((k + 127) / 128);
    if constexpr (C::kLines) multiply_tiles(gemm, to, group, scale_args_a.of_lines(m), tiles_b, tiles);
    else multiply_tiles(gemm, to, group, scale_args_a.of_tiles<typename G::A>(), tiles_b, tiles);
  } else if (G::kDecoders > 0 && group < G::kMany) {
    if constexpr (G::kShare) warp_group::setmaxnreg_dec<G::kDecoderRegisters>();
    if constexpr (G::kDecoders > 0) {
      decoder_loop(gemm, scale_args_a.of_blocks<typename G::A>(m), scale_args_b.of_blocks<typename G::B>(n), group - G::kGroups,
                   threadIdx.x % 128);
    }
    if constexpr (G::kSplit > 1) cluster::sync();
  } else {
    if constexpr (G::kShare) warp_group::setmaxnreg_dec<G::kProducerRegisters>();
    if (threadIdx.x == 128 * G::kMany) producer_loop(gemm, a, b);
    __syncwarp();
    if constexpr (G::kSplit > 1) cluster::sync();
  }
  if constexpr (G::kSplit > 1) cluster::sync();  // other CTAs read this CTA's shared memory
}

}  // namespace magicube
