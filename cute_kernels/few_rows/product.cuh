// Few-rows product with packed weights, D = X W^T: X (M, K) float16 or bfloat16 with M <= 64, W (N, K) packed.
//
// sm_90a; memory-bound by the weights. Work: kGroups warp groups have 64 rows of weights each, kDepth of them the same rows and
// every kDepth-th K tile; kSplit CTAs of a cluster share K. Pipeline: bulk copies bring units of weights with their scales, TMA
// brings X as it is. A lane reads its part of a unit by 16-byte loads, decodes half a unit in registers while the other half is
// multiplied, and multiplies from registers: weights are the A operand of WGMMA, or of mma.sync, whose fragments are the same, for
// up to eight rows of X (up to a tenth faster). Partial sums of split-K are added in a fixed order. Source: PTX ISA, register
// fragments of wgmma.mma_async and mma.m16n8k16.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "few_rows/formats.cuh"
#include "scaled_gemm/small_m/kernel.cuh"

namespace magicube::few {

template <int kColumns, class Half>
struct Op;
#define MAGICUBE_FEW_OP(N)                                                                                       \
  template <>                                                                                                    \
  struct Op<N, BFLOAT16> {                                                                                       \
    using type = SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_RS<SM90::GMMA::Major::K, SM90::GMMA::Major::K>;         \
  };                                                                                                             \
  template <>                                                                                                    \
  struct Op<N, FLOAT16> {                                                                                        \
    using type = SM90::GMMA::MMA_64x##N##x16_F32F16F16_RS<SM90::GMMA::Major::K, SM90::GMMA::Major::K>;           \
  };
MAGICUBE_FEW_OP(16)
MAGICUBE_FEW_OP(32)
MAGICUBE_FEW_OP(64)
#undef MAGICUBE_FEW_OP

template <class C>
struct FewRows {
  using Weights = typename C::Weights;
  using Scale = typename C::Scale;
  static constexpr int kUnits = C::kUnits, kStages = C::kStages, kDepth = C::kDepth;
  static constexpr int kBlocks = C::kGroups / kDepth, kHeight = kUnitRows * kBlocks;  // 64-row blocks and rows of a tile
  static constexpr int kUnitBytes = Unit<C>::kBytes, kWords = Unit<C>::kWords;
  static constexpr bool kIntegers = cuda::std::is_same_v<typename C::Half, INT8>;  // X of int8: product_int8.cuh
  static constexpr int kBoxes = kIntegers ? 1 : 2, kBoxK = kUnitK / kBoxes;  // of a unit; a box: 128 bytes of each row of X
  static constexpr int kBoxBytes = C::kRows * 128, kXBytes = kBoxes * kUnits * kBoxBytes;
  static constexpr int kBlockBytes = kUnits * kUnitBytes, kStageBytes = kXBytes + kBlocks * kBlockBytes;
  static constexpr int kRegisters = C::kRows / 2;
  // With many warp groups, or sums of groups, registers are scarce: the producer is a warp group of its own, and gives up its registers.
  static constexpr bool kShare = C::kGroups > 2 || kIntegers;
  static constexpr int kThreads = 128 * C::kGroups + (kShare ? 128 : 32);
  static constexpr int kPool = 65536 / kThreads / 8 * 8 * (C::kGroups + 1), kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = (kPool - kProducerRegisters) / C::kGroups / 8 * 8;
  static constexpr int kPitch = kHeight + 4;  // floats: a row of the output in shared memory, without bank conflicts
  using Accumulators = float[kRegisters];
  using Piece = uint32_t[4][4];  // half a unit of a lane, as four instructions read it

  static_assert(!kShare || C::kResident == 1, "a CTA takes the registers of all");
  static_assert(C::kGroup <= kUnitK && kUnitK % C::kGroup == 0, "a unit holds whole groups");
  static_assert(C::kGroups % kDepth == 0 && kStages > kDepth, "tiles are read side by side, and one is fetched");
  static_assert(kStages % kDepth == 0, "the same warp groups read a stage in each round: a parity tells two rounds apart");
  static_assert(C::kRows % C::kSplit == 0, "blocks of a cluster share the rows");
  static_assert(kStages * kStageBytes >= kDepth * C::kRows * kPitch * 4, "the reduction reuses the memory of the pipeline");

  uint32_t base;

  __device__ uint32_t box(int stage, int i) const { return base + stage * kXBytes + i * kBoxBytes; }
  __device__ static int weights_at(int stage) { return kStages * kXBytes + stage * kBlocks * kBlockBytes; }
  __device__ uint32_t full(int stage) const { return base + kStages * kStageBytes + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8 * kStages; }
};

// The thread that fetches. It fills the first stage before the CTA's barrier.
template <class C>
struct Producer {
  using G = FewRows<C>;
  using State = GemmPipelineState<G::kStages>;
  const G& gemm;
  const TmaDescriptor& x;
  const uint8_t* weights;  // the tile's first block
  int64_t block_bytes;
  int blocks, begin, last, row;  // blocks and K tiles of the tile; first row of X

  __device__ void fetch(const State& at, int part) const {
    const uint32_t full = gemm.full(at.stage), to = gemm.base + G::weights_at(at.stage);
    mbarrier_arrive_expect_tx(full, G::kXBytes + blocks * G::kBlockBytes);
    for (int b = 0; b < blocks; ++b) {
      bulk_copy(to + b * G::kBlockBytes, weights + b * block_bytes + int64_t{part} * G::kBlockBytes, G::kBlockBytes, full);
    }
    CUTE_UNROLL
    for (int i = 0; i < G::kBoxes * G::kUnits; ++i) {
      tma_load_2d(gemm.box(at.stage, i), &x, (part * G::kBoxes * G::kUnits + i) * G::kBoxK, row, full);
    }
  }
  __device__ void start() const {
    for (int stage = 0; stage < G::kStages; ++stage) {
      barrier_init(gemm.full(stage), 1);
      barrier_init(gemm.empty(stage), 4 * C::kGroups / C::kDepth);
    }
    barrier_fence();
    if (begin < last) fetch(State{}, begin);
  }
  __device__ void run() const {
    State at;
    for (int part = begin; part < last; ++part, at.advance()) {
      if (part == begin) continue;
      barrier_wait(gemm.empty(at.stage), at.parity ^ 1);
      fetch(at, part);
    }
  }
};

template <class C, int kPiece, int... P>
__device__ __forceinline__ void decode_piece(const uint32_t (&words)[2][FewRows<C>::kWords], const Scales& scales,
                                             typename FewRows<C>::Piece& to, int_sequence<P...>) {
  ((to[P / 2][2 * (P % 2)] = scaled_pair<C, 8 * kPiece + P, 0>(words[0], scales),
    to[P / 2][2 * (P % 2) + 1] = scaled_pair<C, 8 * kPiece + P, 1>(words[1], scales)), ...);
}

// Start the products of half a unit.
template <class C>
__device__ __forceinline__ void start_piece(const FewRows<C>& gemm, typename FewRows<C>::Piece& a, int stage, int box, bool from_zero,
                                            typename FewRows<C>::Accumulators& accum) {
  using G = FewRows<C>;
  CUTE_UNROLL
  for (int s = 0; s < 16; ++s) warpgroup_fence_operand(a[s / 4][s % 4]);
  warpgroup_arrive();
  CUTE_UNROLL
  for (int s = 0; s < 4; ++s) {
    const uint64_t b = smem_descriptor<128>(gemm.box(stage, box)) + (32 * s >> 4);
    using Instruction = typename Op<C::kRows, typename C::Half>::type;
    wgmma_rs<Instruction>(a[s], b, accum, from_zero && s == 0 ? SM90::GMMA::ScaleOut::Zero : SM90::GMMA::ScaleOut::One,
                          make_int_sequence<G::kRegisters>{});
  }
  warpgroup_commit_batch();
}

// Wait until all but kPending pieces are multiplied, and keep the operands of the others alive until here.
template <int kPending>
__device__ __forceinline__ void finish_piece(uint32_t (&a)[4][4]) {
  warpgroup_wait<kPending>();
  CUTE_UNROLL
  for (int s = 0; s < 16; ++s) warpgroup_fence_operand(a[s / 4][s % 4]);
}

// accum += scale of the row times the partial sums of a unit.
template <int kRegisters>
__device__ __forceinline__ void add_scaled(float (&accum)[kRegisters], float (&partial)[kRegisters], const float (&scale)[2]) {
  fence_accumulators(partial);
  CUTE_UNROLL
  for (int r = 0; r < kRegisters; ++r) accum[r] = __fmaf_rn(partial[r], scale[r / 2 % 2], accum[r]);
}

// Write the tile that starts at `column`: the accumulators of all warp groups go through shared memory.
template <class C>
__device__ __forceinline__ void write_tile(const FewRows<C>& gemm, uint8_t* shared, const GemmOutput<C>& to, int column, int block,
                                           int depth, const typename FewRows<C>::Accumulators& accum) {
  const int lane = threadIdx.x % 32;
  const int own = block * kUnitRows + threadIdx.x / 32 % 4 * 16 + lane / 4;  // columns of the tile: own and own + 8
  magicube::write_tile(gemm, shared, to, column, own, depth, lane, accum);
}

template <class C>
__device__ __forceinline__ void consumer_loop(const FewRows<C>& gemm, uint8_t* shared, const GemmOutput<C>& to, int begin, int last,
                                              int column) {
  using G = FewRows<C>;
  constexpr bool kSum = G::Scale::kSum;
  const int lane = threadIdx.x % 32, group = warp_of_block() / 4;
  const int block = G::kDepth == 1 ? group : group % G::kBlocks, depth = G::kDepth == 1 ? 0 : group / G::kBlocks;
  GemmPipelineState<G::kStages> at;
  typename G::Accumulators accum = {}, partial;
  at.skip(depth);
  fence_accumulators(accum);
  for (int part = begin + depth; part < last; part += G::kDepth, at.skip(G::kDepth)) {
    barrier_wait(gemm.full(at.stage), at.parity);
    const uint8_t* const stage = shared + G::weights_at(at.stage) + block * G::kBlockBytes;
    typename G::Piece a, b;
    float unit_scale[2];
    auto& sums = kSum ? partial : accum;
    CUTE_UNROLL
    for (int u = 0; u < G::kUnits; ++u) {
      uint32_t words[2][G::kWords];
      Scales scales;
      load_unit<C>(stage + u * G::kUnitBytes, words, scales);
      if (u > 0) finish_piece<1>(a);
      decode_piece<C, 0>(words, scales, a, make_int_sequence<8>{});
      if constexpr (kSum) {
        if (u > 0) {
          finish_piece<0>(b);
          add_scaled(accum, partial, unit_scale);
        }
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) unit_scale[half] = __uint_as_float(scales[half][0]);
      }
      start_piece<C>(gemm, a, at.stage, 2 * u, kSum, sums);
      if (!kSum && u > 0) finish_piece<1>(b);
      decode_piece<C, 1>(words, scales, b, make_int_sequence<8>{});
      start_piece<C>(gemm, b, at.stage, 2 * u + 1, false, sums);
    }
    finish_piece<0>(a);  // a loop that products are under way across needs more registers, or the assembler makes them wait
    finish_piece<0>(b);
    if (lane == 0) barrier_arrive(gemm.empty(at.stage));
    if constexpr (kSum) add_scaled(accum, partial, unit_scale);
    else fence_accumulators(accum);
  }
  write_tile<C>(gemm, shared, to, column, block, depth, accum);
}

// sum += weights X^T of 16 x 8 x 16.
template <class Half>
__device__ __forceinline__ void multiply_eight(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&sum)[4]) {
  using Op = cuda::std::conditional_t<kIsBfloat16<Half>, SM80_16x8x16_F32BF16BF16F32_TN, SM80_16x8x16_F32F16F16F32_TN>;
  Op::fma(sum[0], sum[1], sum[2], sum[3], a[0], a[1], a[2], a[3], b0, b1, sum[0], sum[1], sum[2], sum[3]);
}

// Multiply half a unit by eight rows of X.
template <class C>
__device__ __forceinline__ void multiply_piece(const FewRows<C>& gemm, const uint8_t* shared, const typename FewRows<C>::Piece& a,
                                               int stage, int box, float (&sum)[4]) {
  const int lane = threadIdx.x % 32;
  CUTE_UNROLL
  for (int s = 0; s < 4; s += 2) {
    const uint8_t* const from = shared + (gemm.box(stage, box) - gemm.base) + swizzled<128>(lane % 8, 2 * s + lane / 8);
    uint32_t b[4];  // (2 steps, lower and upper 8 of their k)
    SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const uint128_t*>(from), b[0], b[1], b[2], b[3]);
    multiply_eight<typename C::Half>(a[s], b[0], b[1], sum);
    multiply_eight<typename C::Half>(a[s + 1], b[2], b[3], sum);
  }
}

// As `consumer_loop`, of up to eight rows of X.
template <class C>
__device__ __forceinline__ void eight_rows_loop(const FewRows<C>& gemm, uint8_t* shared, const GemmOutput<C>& to, int begin, int last,
                                                int column) {
  using G = FewRows<C>;
  constexpr bool kSum = G::Scale::kSum;
  const int lane = threadIdx.x % 32, group = warp_of_block() / 4;
  const int block = G::kDepth == 1 ? group : group % G::kBlocks, depth = G::kDepth == 1 ? 0 : group / G::kBlocks;
  GemmPipelineState<G::kStages> at;
  typename G::Accumulators accum = {};  // (2 rows of weights, 2 rows of X)
  at.skip(depth);
  for (int part = begin + depth; part < last; part += G::kDepth, at.skip(G::kDepth)) {
    barrier_wait(gemm.full(at.stage), at.parity);
    const uint8_t* const stage = shared + G::weights_at(at.stage) + block * G::kBlockBytes;
    CUTE_UNROLL
    for (int u = 0; u < G::kUnits; ++u) {
      uint32_t words[2][G::kWords];  // (2 rows, words)
      Scales scales;
      typename G::Piece a, b;  // (4 steps, 4 registers)
      typename G::Accumulators partial = {};  // (2 rows of weights, 2 rows of X)
      auto& sum = kSum ? partial : accum;
      load_unit<C>(stage + u * G::kUnitBytes, words, scales);
      decode_piece<C, 0>(words, scales, a, make_int_sequence<8>{});
      multiply_piece<C>(gemm, shared, a, at.stage, 2 * u, sum);
      decode_piece<C, 1>(words, scales, b, make_int_sequence<8>{});
      multiply_piece<C>(gemm, shared, b, at.stage, 2 * u + 1, sum);
      if constexpr (kSum) {
        CUTE_UNROLL
        for (int r = 0; r < G::kRegisters; ++r) accum[r] = __fmaf_rn(partial[r], __uint_as_float(scales[r / 2][0]), accum[r]);
      }
    }
    __syncwarp();  // all lanes have read the stage
    if (lane == 0) barrier_arrive(gemm.empty(at.stage));
  }
  write_tile<C>(gemm, shared, to, column, block, depth, accum);
}

// A CTA: its last warp fetches, the others run `consume` as they would `consumer_loop`. Arguments as of the kernel below.
template <class C, class Consume>
__device__ __forceinline__ void run_few_rows(const TmaDescriptor& x, const uint8_t* weights, int64_t units, typename C::Out* out,
                                             int64_t pitch, int64_t m, int64_t n, const float* row_scales, int64_t row_step,
                                             const float* col_scales, const float* bias, bool vector, Consume consume) {
  using G = FewRows<C>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const G gemm{shared_address(shared)};
  const int rank = C::kSplit == 1 ? 0 : int(cluster::rank()), tile = int(blockIdx.x) / C::kSplit, column = tile * G::kHeight;
  const int64_t row = int64_t{blockIdx.y} * C::kRows;
  const int parts = int(units) / G::kUnits, begin = parts * rank / C::kSplit, last = parts * (rank + 1) / C::kSplit;
  const int64_t block_bytes = units * G::kUnitBytes;
  const int present = (int(n) + kUnitRows - 1) / kUnitRows - tile * G::kBlocks;  // blocks from here on
  const Producer<C> producer{gemm, x, weights + tile * G::kBlocks * block_bytes, block_bytes,
                             present < G::kBlocks ? present : G::kBlocks, begin, last, int(row)};
  const bool fetches = threadIdx.x == 128 * C::kGroups;
  if (fetches) {
    prefetch_tensor_map(&x);
    producer.start();
  }
  // Scales of the tile are read last, when nothing else is under way: they come to the cache now.
  const int64_t own = column + int64_t{threadIdx.x} * 8;
  if (int(threadIdx.x) < G::kHeight / 8 && own < n) prefetch_l2(col_scales + own);
  __syncthreads();
  if (threadIdx.x < 128 * C::kGroups) {
    if constexpr (G::kShare) warp_group::setmaxnreg_inc<G::kConsumerRegisters>();
    const float alpha = row_scales && row_step == 0 ? __ldg(row_scales) : 1.0f;
    const GemmOutput<C> to{out + row * pitch, nullptr, row_step ? row_scales + row : nullptr, col_scales, bias, pitch, 0,
                           int(m - row), int(n), alpha, 0.0f, 0.0f, 0.0f, vector};
    consume(gemm, shared, to, begin, last, column);
  } else {
    if constexpr (G::kShare) warp_group::setmaxnreg_dec<G::kProducerRegisters>();
    if (fetches) producer.run();
    __syncwarp();
    if constexpr (C::kSplit > 1) cluster::sync();
  }
  if constexpr (C::kSplit > 1) cluster::sync();  // other CTAs read this CTA's shared memory
}

// x: map of X. weights: (blocks of 64 rows, units, unit bytes); the units of a row are whole stages. blockIdx.y: kRows rows of X.
// row_scales: (m,), one, if row_step is 0, or null.
template <class C>
__global__ void __launch_bounds__(FewRows<C>::kThreads, C::kResident)
few_rows_product(const __grid_constant__ TmaDescriptor x, const uint8_t* weights, int64_t units, typename C::Out* out, int64_t pitch,
                 int64_t m, int64_t n, const float* row_scales, int64_t row_step, const float* col_scales, const float* bias,
                 int64_t vector) {
  run_few_rows<C>(x, weights, units, out, pitch, m, n, row_scales, row_step, col_scales, bias, vector != 0,
                  [](auto&&... args) {
                    if constexpr (C::kRows == 8) eight_rows_loop<C>(args...);
                    else consumer_loop<C>(args...);
                  });
}

}  // namespace magicube::few
