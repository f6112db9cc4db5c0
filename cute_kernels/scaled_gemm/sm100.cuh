// Dense product of low-precision floats, D = A B: A (M, K) and B^T (N, K) packed, K-major.
//
// sm_100a and sm_103a; never run, see docs/lab/blackwell.md. One binary for all pairs of formats: TMA unpacks values, 16 to 16 bytes,
// and the instruction descriptor has the formats. Work: persistent CTAs take output tiles. Pipeline: a producer warp fills
// stages of K tiles by TMA, one warp issues tcgen05.mma into tensor memory, and four epilogue warps write a tile while the next
// is accumulated. kBlock: values per block scale along K (0: none); four more warps produce block scales. kPacked: both operands
// are e2m1, two per byte. kBitsA: 0, or bits of a value of A, which tcgen05.cp copies to tensor memory, a byte a value, from where
// it is multiplied. kPairRows: 0, or rows of a tile that two CTAs of a cluster multiply with two-SM instructions (cta_group::2):
// each has half of the rows of either operand in shared memory, the even one issues. Source: PTX ISA 9.0, section 9.7.16; CUTLASS 4.2, SM100 block-scaled kernels.
#pragma once

#include <cute/numeric/numeric_types.hpp>

#include "device/cluster.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/tile_scheduler.cuh"
#include "scaled_gemm/tcgen05.cuh"
#include "gemm/wgmma.cuh"

namespace magicube {

template <int kBlock, bool kPacked, int kColumns>
struct Tcgen05Op;
template <int kColumns>
struct Tcgen05Op<0, false, kColumns> { using type = SM100_MMA_F8F6F4_SS; };
template <int kColumns>
struct Tcgen05Op<32, false, kColumns> {
  using type = SM100_MMA_MXF8F6F4_SS<float_e4m3_t, float_e4m3_t, float, float_ue8m0_t, 128, kColumns, UMMA::Major::K,
                                     UMMA::Major::K>;
};
template <int kColumns>
struct Tcgen05Op<32, true, kColumns> {
  using type = SM100_MMA_MXF4_SS<float_e2m1_t, float_e2m1_t, float, float_ue8m0_t, 128, kColumns, 32, UMMA::Major::K,
                                 UMMA::Major::K>;
};
template <int kColumns>
struct Tcgen05Op<16, true, kColumns> {
  using type = SM100_MMA_MXF4_SS<float_e2m1_t, float_e2m1_t, float, float_ue4m3_t, 128, kColumns, 16, UMMA::Major::K,
                                 UMMA::Major::K>;
};

template <int kColumns>
using Tcgen05FromMemory =
    SM100_MMA_F8F6F4_TS<float_e4m3_t, float_e4m3_t, float, 128, kColumns, UMMA::Major::K, UMMA::Major::K>;

template <bool kPair, class C>
struct Tcgen05OpOf { using type = typename Tcgen05Op<C::kBlock, C::kPacked, C::kTileN>::type; };
template <class C>
struct Tcgen05OpOf<true, C> { using type = SM100_MMA_F8F6F4_2x1SM_SS; };

template <class C>
struct FloatTcgen05 {
  using Op = typename Tcgen05OpOf<(C::kPairRows > 0), C>::type;  // 32 bytes of K
  static constexpr bool kPair = C::kPairRows > 0;
  static constexpr int kCtas = kPair ? 2 : 1;  // that share a tile
  static constexpr int kTileM = kPair ? C::kPairRows : 128, kTileN = C::kTileN, kTileK = C::kPacked ? 256 : 128;
  static constexpr int kRowsA = kTileM / kCtas, kRowsB = kTileN / kCtas;  // in shared memory of a CTA
  static constexpr int kStages = C::kStages;
  static constexpr bool kScaled = C::kBlock > 0;
  static constexpr int kScalesPerRow = kScaled ? kTileK / 4 / C::kBlock : 0;  // block scales of a row per instruction
  static constexpr int kWords = kScalesPerRow;  // words of four block scales of a row, for the four instructions of a K tile
  static constexpr int kPlaneA = kRowsA * 128, kPlaneB = kRowsB * 128, kScaleBytes = 2 * kWords * 512;
  static constexpr int kStageBytes = kPlaneA + kPlaneB + kScaleBytes;
  static constexpr int kAccumulators = 2;  // tiles in tensor memory
  // Of 128 rows each CTA has 64: lanes 0 to 63 hold the left half of their columns, lanes 64 to 127 the right half.
  static constexpr int kTileColumns = kRowsA == 64 ? kTileN / 2 : kTileN;  // of tensor memory, of an accumulator
  static constexpr int kScaleColumns = kAccumulators * kTileColumns;  // columns before those of block scales
  static constexpr int kCopied = C::kBitsA ? 2 : 0;  // K tiles of A in tensor memory
  static constexpr int kColumns = kScaled ? 512 : kCopied ? 2 * kScaleColumns : kScaleColumns;  // allocated columns
  static constexpr int kEpilogueWarps = 4, kProducer = 4, kMma = 5, kScaleProducer = 6;  // warps; first scale producer
  static constexpr int kThreads = 32 * (kScaled ? 10 : 6);

  static_assert(kTileN % 64 == 0 && kTileN <= 256, "the Tensor Cores allocate 256 columns, and a fragment has 64");
  static_assert(kStageBytes % 1024 == 0, "swizzled boxes start at multiples of 1024 bytes");
  static_assert(!kScaled || kTileN == 128, "a thread feeds the scales of one row of each operand");
  static_assert(kScaleColumns + 8 * kWords <= kColumns || !kScaled, "tensor memory must hold the scales");
  static_assert(!kPair || (!kScaled && !kCopied && kRowsA * 2 == kTileM && kTileColumns % 64 == 0), "pairs are plain");
  static_assert(!kCopied || (!kScaled && kScaleColumns + 32 * kCopied <= kColumns && kColumns <= 512), "and copies of A");

  uint8_t* shared;
  TileScheduler<C::kBand> scheduler;
  int parts;  // K tiles
  int rank;  // of this CTA in its pair

  __device__ uint32_t base() const { return shared_address(shared); }
  __device__ uint32_t tile_a(int stage) const { return base() + stage * kStageBytes; }
  __device__ uint32_t tile_b(int stage) const { return tile_a(stage) + kPlaneA; }
  __device__ uint32_t scales(int stage) const { return tile_b(stage) + kPlaneB; }
  __device__ uint32_t full(int stage) const { return base() + kStages * kStageBytes + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8 * kStages; }
  __device__ uint32_t accumulated(int buffer) const { return full(2 * kStages) + 8 * buffer; }
  __device__ uint32_t written(int buffer) const { return accumulated(buffer) + 8 * kAccumulators; }
  __device__ uint32_t* tmem_address() const {
    return reinterpret_cast<uint32_t*>(shared + kStages * kStageBytes + 8 * (2 * kStages + 2 * kAccumulators));
  }

  // Call f(row, column) with the corner of each tile of this CTA, or of its pair.
  template <class F>
  __device__ __forceinline__ void for_tiles(F f) const {
    for (int index = blockIdx.x / kCtas; index < scheduler.count(); index += gridDim.x / kCtas) {
      int row, column;
      scheduler.place(index, row, column);
      f(row * kTileM, column * kTileN);
    }
  }
};

// A K tile is 128 units of the tensor maps: values, or bytes with kPacked. bytes: those of both packed tiles, which is what the
// barrier counts, including values beyond the matrix and without gaps between values.
template <class C>
__device__ void producer_loop(const FloatTcgen05<C>& gemm, const TmaDescriptor& a, const TmaDescriptor& b, uint32_t bytes) {
  using G = FloatTcgen05<C>;
  GemmPipelineState<G::kStages> at;
  gemm.for_tiles([&](int row, int column) {
    for (int part = 0; part < gemm.parts; ++part, at.advance()) {
      const uint32_t full = gemm.full(at.stage);
      barrier_wait(gemm.empty(at.stage), at.parity ^ 1);
      if constexpr (G::kPair) {  // both fill the barrier of the even CTA, which expects the bytes of both
        if (gemm.rank == 0) mbarrier_arrive_expect_tx(full, bytes);
        tensor_memory::tma_load_2d_pair(gemm.tile_a(at.stage), &a, part * 128, row + gemm.rank * G::kRowsA, full);
        tensor_memory::tma_load_2d_pair(gemm.tile_b(at.stage), &b, part * 128, column + gemm.rank * G::kRowsB, full);
      } else {
        mbarrier_arrive_expect_tx(full, bytes);
        tma_load_2d(gemm.tile_a(at.stage), &a, part * 128, row, full);
        tma_load_2d(gemm.tile_b(at.stage), &b, part * 128, column, full);
      }
    }
  });
  if constexpr (G::kPair) {  // the even CTA's products arrive here until all stages are empty: a CTA may not end before
    for (int stage = 0; stage < G::kStages; ++stage, at.advance()) barrier_wait(gemm.empty(at.stage), at.parity ^ 1);
  }
}

// Words of four block scales, row-major: (rows, count).
struct ScaleWords {
  const uint32_t* words;
  int rows, count;  // count: words per row
  __device__ uint32_t at(int row, int word) const {
    return row < rows && word < count ? __ldg(words + int64_t{row} * count + word) : 0;
  }
};

template <class C>
__device__ void scale_producer_loop(const FloatTcgen05<C>& gemm, const ScaleWords& a, const ScaleWords& b, int thread) {
  using G = FloatTcgen05<C>;
  const int own = thread % 4 * 32 + thread / 4;  // row, whose words are at 4 * thread of each 512 bytes
  GemmPipelineState<G::kStages> at;
  gemm.for_tiles([&](int row, int column) {
    for (int part = 0; part < gemm.parts; ++part, at.advance()) {
      uint32_t words[2 * G::kWords];
      CUTE_UNROLL
      for (int w = 0; w < G::kWords; ++w) {
        words[w] = a.at(row + own, part * G::kWords + w);
        words[G::kWords + w] = b.at(column + own, part * G::kWords + w);
      }
      barrier_wait(gemm.empty(at.stage), at.parity ^ 1);
      uint32_t* to = reinterpret_cast<uint32_t*>(gemm.shared + at.stage * G::kStageBytes + G::kPlaneA + G::kPlaneB) + thread;
      CUTE_UNROLL
      for (int w = 0; w < 2 * G::kWords; ++w) to[w * 128] = words[w];
      warp_group::fence_proxy_async_shared();
      __syncwarp();
      if (thread % 32 == 0) barrier_arrive(gemm.full(at.stage));
    }
  });
}

// One K tile; fresh: overwrite the accumulator, else add to it.
template <class C>
__device__ __forceinline__ void mma_stage(const FloatTcgen05<C>& gemm, uint32_t tmem, uint32_t to, int stage,
                                              uint64_t instruction, bool fresh) {
  using G = FloatTcgen05<C>;
  const uint64_t a = tensor_memory::smem_descriptor(gemm.tile_a(stage)), b = tensor_memory::smem_descriptor(gemm.tile_b(stage));
  const uint32_t scales = tmem + G::kScaleColumns;
  if constexpr (G::kCopied > 0) {
    const uint32_t copy = scales + stage % G::kCopied * 32;
    CUTE_UNROLL
    for (int step = 0; step < 4; ++step) tensor_memory::copy_operand<C::kBitsA>(copy + 8 * step, a + 2 * step);
    CUTE_UNROLL
    for (int step = 0; step < 4; ++step) {
      Tcgen05FromMemory<G::kTileN>::fma(copy + 8 * step, b + 2 * step, to, !fresh || step > 0, instruction);
    }
    return;
  }
  CUTE_UNROLL
  for (int w = 0; w < 2 * G::kWords; ++w) tensor_memory::copy_scales(scales + 4 * w, gemm.scales(stage) + 512 * w);
  CUTE_UNROLL
  for (int step = 0; step < 4; ++step) {
    const uint32_t add = !fresh || step > 0;
    if constexpr (G::kScaled) {
      const int word = step * G::kScalesPerRow / 4;
      const uint32_t first = step * G::kScalesPerRow % 4;  // block scale in the word
      G::Op::fma(a + 2 * step, b + 2 * step, to, add, instruction | uint64_t(first << 4 | first << 29) << 32,
                 scales + 4 * word, scales + 4 * (G::kWords + word));
    } else {
      G::Op::fma(a + 2 * step, b + 2 * step, to, add, instruction);
    }
  }
}

// Called by a whole warp, of a pair in the even CTA; one thread issues the instructions. instruction: the descriptor, in the upper half.
template <class C>
__device__ void mma_loop(const FloatTcgen05<C>& gemm, uint32_t tmem, uint64_t instruction) {
  using G = FloatTcgen05<C>;
  GemmPipelineState<G::kStages> at;
  GemmPipelineState<G::kAccumulators> buffer;
  gemm.for_tiles([&](int, int) {
    const uint32_t to = tmem + buffer.stage * G::kTileColumns;
    barrier_wait(gemm.written(buffer.stage), buffer.parity ^ 1);
    tensor_memory::fence_after_sync();
    for (int part = 0; part < gemm.parts; ++part, at.advance()) {
      barrier_wait(gemm.full(at.stage), at.parity);
      tensor_memory::fence_after_sync();
      mma_stage(gemm, tmem, to, at.stage, instruction, part == 0);
      tensor_memory::commit_arrive<G::kCtas>(gemm.empty(at.stage));
    }
    tensor_memory::commit_arrive<G::kCtas>(gemm.accumulated(buffer.stage));
    buffer.advance();
  });
}

template <class C>
__device__ void epilogue_loop(const FloatTcgen05<C>& gemm, const GemmOutput<C>& to, uint32_t tmem, int warp) {
  using G = FloatTcgen05<C>;
  const int lane = threadIdx.x % 32;
  GemmPipelineState<G::kAccumulators> buffer;
  gemm.for_tiles([&](int row, int column) {
    barrier_wait(gemm.accumulated(buffer.stage), buffer.parity);
    tensor_memory::fence_after_sync();
    for (int half = 0; half < 2; ++half) {
      const int first = 32 * warp + 16 * half;  // lane
      int at = row + first, left = column;
      if constexpr (G::kPair) {
        at = row + gemm.rank * G::kRowsA + first % G::kRowsA;
        left = column + first / G::kRowsA * G::kTileColumns;
      }
      for (int part = 0; part < G::kTileColumns; part += 64) {
        uint32_t words[1][32];
        tensor_memory::load_fragment(tmem + (first << 16) + buffer.stage * G::kTileColumns + part, words[0]);
        write_fragment(to, words, at, left + part, lane);
      }
    }
    tensor_memory::fence_before_sync();
    __syncwarp();
    if (lane == 0) {
      if constexpr (G::kPair) {
        cluster::arrive_at(gemm.written(buffer.stage), 0);
      } else {
        barrier_arrive(gemm.written(buffer.stage));
      }
    }
    buffer.advance();
  });
}

template <class C>
__device__ __forceinline__ void init_barriers(const FloatTcgen05<C>& gemm) {
  using G = FloatTcgen05<C>;
  for (int stage = 0; stage < G::kStages; ++stage) {
    barrier_init(gemm.full(stage), G::kScaled ? 5 : 1);
    barrier_init(gemm.empty(stage), 1);
  }
  for (int buffer = 0; buffer < G::kAccumulators; ++buffer) {
    barrier_init(gemm.accumulated(buffer), 1);
    barrier_init(gemm.written(buffer), G::kCtas * G::kEpilogueWarps);
  }
  barrier_fence();
}

// All threads of this CTA, or of the pair, and what they have done to tensor memory and barriers.
template <class C>
__device__ __forceinline__ void meet(const FloatTcgen05<C>&) {
  tensor_memory::fence_before_sync();
  if constexpr (FloatTcgen05<C>::kPair) {
    cluster::sync();
  } else {
    __syncthreads();
  }
  tensor_memory::fence_after_sync();
}

template <class C>
__global__ void __launch_bounds__(FloatTcgen05<C>::kThreads, 1)
gemm_floats_sm100(const __grid_constant__ TmaDescriptor a, const __grid_constant__ TmaDescriptor b, int64_t k,
                  int64_t part_bytes, int64_t instruction, const uint32_t* scales_a, const uint32_t* scales_b,
                  int64_t scale_words, typename C::Out* out, int64_t pitch, int64_t m, int64_t n,
                  const float* row_scales, int64_t row_step, const float* col_scales, int64_t column_step, const float* bias,
                  const typename C::Source* c, int64_t c_pitch, int64_t vector, float alpha, float beta) {
  using G = FloatTcgen05<C>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const G gemm{shared, {int((m + G::kTileM - 1) / G::kTileM), int((n + G::kTileN - 1) / G::kTileN)},
               int((k + G::kTileK - 1) / G::kTileK), G::kPair ? int(cluster::rank()) : 0};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) init_barriers(gemm);
  if (warp == G::kMma) tensor_memory::allocate<G::kColumns, G::kCtas>(gemm.tmem_address());
  meet(gemm);
  const uint32_t tmem = *gemm.tmem_address();
  if (warp == G::kProducer) {
    if (threadIdx.x % 32 == 0) producer_loop(gemm, a, b, uint32_t(part_bytes));
    __syncwarp();
  } else if (warp == G::kMma) {
    if (gemm.rank == 0) mma_loop(gemm, tmem, uint64_t(instruction) << 32);
  } else if (G::kScaled && warp >= G::kScaleProducer) {
    if constexpr (G::kScaled) {
      scale_producer_loop(gemm, {scales_a, int(m), int(scale_words)}, {scales_b, int(n), int(scale_words)},
                   threadIdx.x - 32 * G::kScaleProducer);
    }
  } else {
    if (row_scales && row_step == 0) alpha *= __ldg(row_scales);
    if (col_scales && column_step == 0) alpha *= __ldg(col_scales);
    const GemmOutput<C> to{out, c, row_step ? row_scales : nullptr, column_step ? col_scales : nullptr, bias, pitch, c_pitch,
                           int(m), int(n), alpha, beta, 0.0f, 0.0f, vector != 0};
    epilogue_loop(gemm, to, tmem, warp);
  }
  meet(gemm);
  if (warp == G::kMma) tensor_memory::deallocate<G::kColumns, G::kCtas>(tmem);
}

}  // namespace magicube
