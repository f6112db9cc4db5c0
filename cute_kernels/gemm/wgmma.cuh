// Dense integer product, D = sum over digit products of A_i B_j: A (M, K) and B^T (N, K) int8, K-major.
//
// sm_90a. Work: persistent CTAs take output tiles. Pipeline: one producer warp fills kStages stages by TMA with the K tiles of
// all planes; kGroups consumer warp groups multiply them by WGMMA, with the accumulators of all levels in registers.
// kPingPong: each consumer warp group has its own tile, and one runs its epilogue while the other runs its mainloop; else they
// share a tile. Two CTAs of a cluster have tiles below each other: each loads half of the B tile and multicasts it to both.
// kGlu: B^T has (N, K) rows of gates and as many that they gate. A tile of kTileN / 2 outputs takes as many rows of both, which a warp group
// multiplies side by side: D = f(gates) * others.
// kGated: all CTAs return at once unless another kernel has picked this product by its number of levels.
// Source: CUTLASS, SM90 warp-specialized persistent kernels (cooperative and ping-pong).
#pragma once

#include "device/smem_descriptor.cuh"
#include "device/warpgroup.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/tile_scheduler.cuh"

namespace magicube {

constexpr int kGateWords = 4;  // a gate: int32 levels - 1 of the picked product, padded to 16 bytes; two sums per warp follow

template <int kColumns>
struct WarpGroupOp;
template <>
struct WarpGroupOp<32> { using type = SM90::GMMA::MMA_64x32x32_S32S8S8_SS_TN; };
template <>
struct WarpGroupOp<64> { using type = SM90::GMMA::MMA_64x64x32_S32S8S8_SS_TN; };
template <>
struct WarpGroupOp<96> { using type = SM90::GMMA::MMA_64x96x32_S32S8S8_SS_TN; };
template <>
struct WarpGroupOp<128> { using type = SM90::GMMA::MMA_64x128x32_S32S8S8_SS_TN; };
template <>
struct WarpGroupOp<192> { using type = SM90::GMMA::MMA_64x192x32_S32S8S8_SS_TN; };
template <>
struct WarpGroupOp<256> { using type = SM90::GMMA::MMA_64x256x32_S32S8S8_SS_TN; };

// One instruction into the registers of `accum` from kFirst on.
template <class Op, int kFirst = 0, class Sum, int kRegisters, int... I, class... Options>
__device__ __forceinline__ void wgmma(Sum (&accum)[kRegisters], uint64_t a, uint64_t b, int_sequence<I...>,
                                               Options... options) {
  Op::fma(a, b, accum[kFirst + I]..., options...);
}

template <class C>
struct GroupGemm {
  static constexpr int kTileM = C::kTileM, kTileN = C::kTileN, kTileK = C::kTileK;  // one byte per element
  static constexpr int kStages = C::kStages, kGroups = C::kGroups, kCluster = C::kCluster;
  static constexpr int kBlocks = kTileM / 64 / (C::kPingPong ? 1 : kGroups);  // blocks of 64 rows per warp group
  static constexpr int kRegisters = kTileN / 2;  // accumulators of a block and level, per thread
  static constexpr int kColumns = C::kGlu ? kTileN / 2 : kTileN;  // of the output
  static constexpr int kBoxesB = C::kGlu ? 2 : kCluster;  // TMA boxes of a tile of B, of different rows; those of a cluster load one each
  static constexpr int kBoxK = kTileK < 128 ? kTileK : 128;  // of a TMA box, and of its swizzle
  static constexpr int kPlaneA = kTileM * kTileK, kPlaneB = kTileN * kTileK;
  static constexpr int kStageBytes = C::kPlanesA * kPlaneA + C::kPlanesB * kPlaneB;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kConsumersPerStage = C::kPingPong ? 1 : kGroups;  // warp groups that read a stage
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  // A tile of 224 columns takes two instructions a step: CUTLASS's single one is in a header of 60,000 lines.
  static constexpr int kFirstColumns = kTileN == 224 ? 128 : kTileN, kOtherColumns = kTileN - kFirstColumns;
  using Op = typename WarpGroupOp<kFirstColumns>::type;
  using Accumulators = uint32_t[kBlocks][C::kLevels][kRegisters];

  static_assert(kBlocks * 64 * (C::kPingPong ? 1 : kGroups) == kTileM, "a group has whole blocks of 64 rows");
  static_assert(!C::kPingPong || kGroups == 2, "two groups take turns");
  static_assert(!C::kGlu || (C::kLevels == 1 && C::kAdjacent > 0 && kColumns % 32 == 0), "one product of runs of columns");
  static_assert(kCluster <= 2 && kTileN / kBoxesB <= 256, "boxes are of 256 rows at most");
  static_assert(C::kAdjacent == 0 || kTileN / kBoxesB % (4 * C::kAdjacent) == 0, "boxes hold whole runs of columns");
  static_assert(kPlaneA % 1024 == 0 && kPlaneB / kBoxesB % 1024 == 0, "swizzled boxes start at multiples of 1024 bytes");

  uint32_t base;
  TileScheduler<C::kBand> scheduler;  // in units of clusters
  int parts;  // K tiles
  int rows_a, rows_b;  // of a TMA box
  int others;  // first row of B^T that is gated

  __device__ uint32_t full(int stage) const { return base + kStages * kStageBytes + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8 * kStages; }
  __device__ uint32_t plane_a(int stage, int i) const { return base + stage * kStageBytes + i * kPlaneA; }
  __device__ uint32_t plane_b(int stage, int j) const { return plane_a(stage, C::kPlanesA) + j * kPlaneB; }
};

// Rows of a TMA box: of a tile, or of all that there are, since the copy engine is slow to fill rows that do not exist with zeros.
// What the stage holds instead goes to results that are not written.
template <class C>
__device__ __forceinline__ int box_rows(int tile, int64_t rows) {
  return C::kGated || rows >= tile ? tile : int(rows);
}

// Stage of a K tile and parity of its barriers.
template <int kStages>
struct GemmPipelineState {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ void skip(int parts) {
    const int to = stage + parts;
    parity ^= uint32_t(to / kStages) & 1;
    stage = to % kStages;
  }
};

template <class C>
__device__ void producer_loop(const GroupGemm<C>& gemm, const TmaDescriptor* const (&a)[3], const TmaDescriptor* const (&b)[3],
                           int rank) {
  using G = GroupGemm<C>;
  GemmPipelineState<G::kStages> at;
  for (int index = blockIdx.x / G::kCluster; index < gemm.scheduler.count(); index += gridDim.x / G::kCluster) {
    int row, column;
    gemm.scheduler.place(index, row, column);
    const int m = (row * G::kCluster + rank) * G::kTileM, n = column * G::kColumns;
    for (int part = 0; part < gemm.parts; ++part, at.advance()) {
      const uint32_t full = gemm.full(at.stage);
      const int k = part * G::kTileK;
      barrier_wait(gemm.empty(at.stage), at.parity ^ 1);
      mbarrier_arrive_expect_tx(full, (C::kPlanesA * gemm.rows_a + C::kPlanesB * gemm.rows_b * G::kBoxesB) * G::kTileK);
      CUTE_UNROLL
      for (int own = 0; own < G::kTileK; own += G::kBoxK) {
        CUTE_UNROLL
        for (int i = 0; i < C::kPlanesA; ++i) tma_load_2d(gemm.plane_a(at.stage, i) + own * G::kTileM, a[i], k + own, m, full);
        CUTE_UNROLL
        for (int j = 0; j < C::kPlanesB; ++j) {
          const uint32_t to = gemm.plane_b(at.stage, j) + own * G::kTileN;
          constexpr int kRows = G::kTileN / G::kBoxesB;
          if constexpr (C::kGlu && G::kCluster == 1) {
            tma_load_5d(to, b[j], k + own, n / (4 * C::kAdjacent), full);
            tma_load_5d(to + kRows * G::kBoxK, b[j], k + own, (n + gemm.others) / (4 * C::kAdjacent), full);
          } else if constexpr (G::kCluster == 1) {
            if constexpr (C::kAdjacent > 0) tma_load_5d(to, b[j], k + own, n / (4 * C::kAdjacent), full);
            else tma_load_2d(to, b[j], k + own, n, full);
          } else {
            constexpr uint16_t kAll = (1 << G::kCluster) - 1;
            const uint32_t part = to + rank * kRows * G::kBoxK;
            const int first = n + rank * (C::kGlu ? gemm.others : kRows);
            if constexpr (C::kAdjacent > 0) cluster::tma_load_5d_multicast(kAll, part, b[j], k + own, first / (4 * C::kAdjacent), full);
            else cluster::tma_load_2d_multicast(kAll, part, b[j], k + own, first, full);
          }
        }
      }
    }
  }
}

// Signal to the producers of all CTAs that wrote a stage that this warp has read it.
template <class C>
__device__ __forceinline__ void consumer_release(const GroupGemm<C>& gemm, int stage) {
  const int lane = threadIdx.x % 32;
  if constexpr (C::kCluster == 1) {
    if (lane == 0) barrier_arrive(gemm.empty(stage));
  } else {
    if (lane < C::kCluster) cluster::arrive_at(gemm.empty(stage), lane);
  }
}

// Mainloop step: all digit products of one K tile for a warp group's rows.
template <class C>
__device__ __forceinline__ void mma_stage(const GroupGemm<C>& gemm, typename GroupGemm<C>::Accumulators& accum, int stage,
                                              int block) {
  using G = GroupGemm<C>;
  const uint64_t a = smem_descriptor<G::kBoxK>(gemm.plane_a(stage, 0)) + (block * 64 * G::kBoxK >> 4);
  const uint64_t b = smem_descriptor<G::kBoxK>(gemm.plane_b(stage, 0));
  warpgroup_arrive();
  CUTE_UNROLL
  for (int k = 0; k < G::kTileK; k += 32) {
    CUTE_UNROLL
    for (int level = 0; level < C::kLevels; ++level) {
      CUTE_UNROLL
      for (int i = 0; i < C::kPlanesA; ++i) {
        const int j = level - i;
        if (j < 0 || j >= C::kPlanesB) continue;
        CUTE_UNROLL
        for (int own = 0; own < G::kBlocks; ++own) {
          const int box = k / G::kBoxK * G::kBoxK, inside = k % G::kBoxK;
          const uint64_t from_a = a + ((i * G::kPlaneA + box * G::kTileM + own * 64 * G::kBoxK + inside) >> 4);
          const uint64_t from_b = b + ((j * G::kPlaneB + box * G::kTileN + inside) >> 4);
          wgmma<typename G::Op>(accum[own][level], from_a, from_b, make_int_sequence<G::kFirstColumns / 2>{});
          if constexpr (G::kOtherColumns > 0) {
            using Other = typename WarpGroupOp<G::kOtherColumns>::type;
            constexpr int kFirst = G::kFirstColumns / 2;
            wgmma<Other, kFirst>(accum[own][level], from_a, from_b + (G::kFirstColumns * G::kBoxK >> 4),
                                 make_int_sequence<G::kOtherColumns / 2>{});
          }
        }
      }
    }
  }
  warpgroup_commit_batch();
}

template <class C>
__device__ __forceinline__ void fence_tile_accumulators(typename GroupGemm<C>::Accumulators& accum) {
  using G = GroupGemm<C>;
  CUTE_UNROLL
  for (int block = 0; block < G::kBlocks; ++block) {
    CUTE_UNROLL
    for (int level = 0; level < C::kLevels; ++level) {
      CUTE_UNROLL
      for (int r = 0; r < G::kRegisters; ++r) warpgroup_fence_operand(accum[block][level][r]);
    }
  }
}

template <class C>
__device__ __forceinline__ void mma_tile(const GroupGemm<C>& gemm, typename GroupGemm<C>::Accumulators& accum,
                                              GemmPipelineState<C::kStages>& at, int block) {
  int before = 0;
  fence_tile_accumulators<C>(accum);
  for (int part = 0; part < gemm.parts; ++part) {
    barrier_wait(gemm.full(at.stage), at.parity);
    mma_stage(gemm, accum, at.stage, block);
    warpgroup_wait<1>();
    if (part > 0) consumer_release(gemm, before);
    before = at.stage;
    at.advance();
  }
}

// `gate`: with C::kGated the gate, and per warp of the grid the sums of squares of the results and of the sums of their levels'
// magnitudes.
template <class C>
__device__ void consumer_loop(const GroupGemm<C>& gemm, const GemmOutput<C>& to, int rank, int group, float* gate) {
  using G = GroupGemm<C>;
  const int step = int(gridDim.x) / G::kCluster, count = gemm.scheduler.count();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  int index = int(blockIdx.x) / G::kCluster;
  GemmPipelineState<G::kStages> at;
  float seen = 0.0f;  // sum of squares of this thread's results
  float levels = 0.0f;  // of the sums of their levels' magnitudes
  const int block = C::kPingPong ? 0 : group * G::kBlocks;  // first block of the warp group
  if (C::kPingPong && group == 1) {
    warp_group::named_barrier_arrive(1, 256);  // warp group 0 starts
    index += step;
    at.skip(gemm.parts);
  }
  for (; index < count; index += C::kPingPong ? 2 * step : step) {
    int row, column;
    gemm.scheduler.place(index, row, column);
    const int m = (row * G::kCluster + rank) * G::kTileM + block * 64 + warp * 16, n = column * G::kColumns;
    const RowFactors<C, G::kBlocks> rows(to, m, 64, lane);
    const ColumnFactors<C, G::kColumns> columns(to, n, lane);
    const cuda::std::conditional_t<C::kGlu, ColumnFactors<C, G::kColumns>, NoFactors> others(to, n, lane, to.n);
    cuda::std::conditional_t<(C::kAdjacent > 0), SourceRuns<C, G::kBlocks, G::kColumns>, NoFactors> sources(to, m, 64, n, lane);
    typename G::Accumulators accum = {};  // zeroed here: with ScaleOut::Zero, the old registers would stay live
    if (C::kPingPong) warp_group::named_barrier_sync(1 + group, 256);
    mma_tile(gemm, accum, at, block);
    if (C::kPingPong && index + step < count) warp_group::named_barrier_arrive(2 - group, 256);
    warpgroup_wait<0>();
    fence_tile_accumulators<C>(accum);
    consumer_release(gemm, at.stage == 0 ? G::kStages - 1 : at.stage - 1);
    if (C::kPingPong) at.skip(gemm.parts);
    const auto write = [&](const auto& visitor) {
      if constexpr (C::kGlu) {
        write_glu(to, accum, m, 64, n, lane, rows, columns, others);
      } else if constexpr (C::kAdjacent > 0) {
        write_adjacent(to, accum, m, 64, n, lane, rows, columns, sources, visitor);
      } else {
        CUTE_UNROLL
        for (int own = 0; own < G::kBlocks; ++own) {
          const float scales[2] = {rows.scale(to, own, 0), rows.scale(to, own, 1)};
          write_fragment(to, accum[own], m + own * 64, n, lane, scales, columns, visitor);
        }
      }
    };
    if constexpr (C::kGated && C::kLevels > 1) {
      write([&](float x, float magnitude) { seen = fmaf(x, x, seen), levels = fmaf(magnitude, magnitude, levels); });
    } else if constexpr (C::kGated) {
      write([&](float x) { seen = fmaf(x, x, seen); });
    } else {
      write(NoVisitor{});
    }
  }
  if constexpr (C::kGated) {
    CUTE_UNROLL
    for (int other = 16; other > 0; other /= 2) {
      seen += __shfl_xor_sync(~0u, seen, other);
      levels += __shfl_xor_sync(~0u, levels, other);
    }
    const int own = (int(blockIdx.x) * G::kGroups + group) * 4 + warp;
    if (lane == 0) *reinterpret_cast<float2*>(gate + kGateWords + 2 * own) = make_float2(seen, C::kLevels > 1 ? levels : seen);
  }
}

template <class C>
__global__ void __launch_bounds__(GroupGemm<C>::kThreads, 1)
gemm_wgmma(const __grid_constant__ TmaDescriptor a0, const __grid_constant__ TmaDescriptor a1,
           const __grid_constant__ TmaDescriptor a2, const __grid_constant__ TmaDescriptor b0,
           const __grid_constant__ TmaDescriptor b1, const __grid_constant__ TmaDescriptor b2, int64_t k,
           typename C::Out* out, int64_t pitch, int64_t m, int64_t n, const float* row_scales, int64_t row_step,
           const float* col_scales, int64_t column_step, const float* bias, const typename C::Source* c, int64_t c_pitch,
           int64_t vector, float alpha, float beta, float weight1, float weight2, float* gate, const float* out_scale) {
  using G = GroupGemm<C>;
  if constexpr (C::kGated) {
    pdl_wait();
    if (*reinterpret_cast<const int*>(gate) != C::kLevels - 1) return;
  }
  extern __shared__ __align__(1024) uint8_t shared[];
  const int rank = G::kCluster == 1 ? 0 : int(cluster::rank());
  constexpr int kHeight = G::kTileM * G::kCluster;
  const G gemm{shared_address(shared), {int((m + kHeight - 1) / kHeight), int((n + G::kColumns - 1) / G::kColumns)},
               int((k + G::kTileK - 1) / G::kTileK), box_rows<C>(G::kTileM, m),
               G::kCluster == 1 ? box_rows<C>(G::kColumns, n) : G::kTileN / G::kCluster, int(n)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < G::kStages; ++stage) {
      barrier_init(gemm.full(stage), 1);
      barrier_init(gemm.empty(stage), 4 * G::kConsumersPerStage * G::kCluster);
    }
    barrier_fence();
  }
  if constexpr (G::kCluster == 1) __syncthreads();
  else cluster::sync();
  const int group = threadIdx.x / 128;
  if (group == G::kGroups) {
    if constexpr (G::kGroups == 2) warp_group::setmaxnreg_dec<G::kProducerRegisters>();
    if (threadIdx.x == 128 * G::kGroups) {
      const TmaDescriptor* const a[3] = {&a0, &a1, &a2};
      const TmaDescriptor* const b[3] = {&b0, &b1, &b2};
      producer_loop(gemm, a, b, rank);
    }
  } else {
    if constexpr (G::kGroups == 2) warp_group::setmaxnreg_inc<G::kConsumerRegisters>();
    if (row_scales && row_step == 0) alpha *= __ldg(row_scales);
    if (col_scales && column_step == 0) alpha *= __ldg(col_scales);
    const GemmOutput<C> to{out, c, row_step ? row_scales : nullptr, column_step ? col_scales : nullptr, bias, pitch, c_pitch,
                           int(m), int(n), alpha, beta, weight1, weight2, vector != 0,
                           GemmOutput<C>::kQuantized ? 1.0f / __ldg(out_scale) : 0.0f};
    consumer_loop(gemm, to, rank, group, gate);
  }
  if constexpr (G::kCluster > 1) cluster::sync();  // the other CTA writes to this CTA's shared memory
}

}  // namespace magicube
