// Dense product of small floats whose left operand has few rows (sm_90a): D = X W, X (M, K) with M <= 64, W^T (N, K) packed.
//
// The weights are what is read from memory, so they take the shortest way: the tensor copy engine brings slabs of 64 bytes of
// their rows, a lane reads 16 of these, decodes them in registers, and multiplies them from there, as the operand of 64 rows.
// A lane so has neighbours of k where an instruction has one run of four for each lane; the order of k in a product is free as
// long as X has the same, and X is small: `order_few_rows` writes it decoded and in that order before.
// kGroups warp groups have 64 rows of weights each; kSplit blocks of a cluster have a share of k each. Sums of a slab of bytes
// are added in float32. Where blocks of k have factors, codes become bfloat16 times their factor (kHalves), as X does before.
#pragma once

#include "gemm_floats_wgmma.cuh"

namespace magicube {

template <int kColumns, class W, class X, bool kHalves>
struct FewRowsOp;
#define MAGICUBE_FEW_OP(N, W, X)                                    \
  template <>                                                       \
  struct FewRowsOp<N, W, X, false> {                                \
    using type = SM90::GMMA::MMA_64x##N##x32_F32##W##X##_RS_TN<>;   \
  };
#define MAGICUBE_FEW_OPS(N)                                         \
  MAGICUBE_FEW_OP(N, E4M3, E4M3)                                    \
  MAGICUBE_FEW_OP(N, E4M3, E5M2)                                    \
  MAGICUBE_FEW_OP(N, E5M2, E4M3)                                    \
  MAGICUBE_FEW_OP(N, E5M2, E5M2)                                    \
  template <class W, class X>                                       \
  struct FewRowsOp<N, W, X, true> {                                 \
    using type = SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_RS<SM90::GMMA::Major::K, SM90::GMMA::Major::K>; \
  };
MAGICUBE_FEW_OPS(8)
MAGICUBE_FEW_OPS(16)
MAGICUBE_FEW_OPS(32)
MAGICUBE_FEW_OPS(64)
#undef MAGICUBE_FEW_OPS
#undef MAGICUBE_FEW_OP

// Where in its slab of X the k go that a lane's slab of weights of kBits has. A lane t has codes t kOwn to t kOwn + kOwn - 1.
template <int kBits, bool kHalves>
struct FewRowsOrder {
  static_assert(kBits == 4 || kBits == 8, "a lane's 16 bytes are whole steps");
  static constexpr int kSlabK = 512 / kBits, kOwn = 128 / kBits, kStepK = kHalves ? 16 : 32, kSteps = kSlabK / kStepK;
  static constexpr int kSize = kHalves ? 2 : 1;  // bytes of a number

  // Of sixteen numbers from `k` on, inside their slab, where the words lie, in bytes, and what they are. An instruction takes
  // words 2 t and 2 t + 1 of a step, or, of bytes, t and t + 4. Of 4 bits the even and the odd codes of eight come together,
  // or, of halves, codes i and i + 4.
  __device__ static void put(uint8_t* slab, int k, const uint32_t (&numbers)[4 * kSize]) {
    CUTE_UNROLL
    for (int i = 0; i < 4 * kSize; ++i) {
      const int eight = i / (2 * kSize), at = k % kOwn + 8 * eight, part = i % (2 * kSize), t = k / kOwn % 4;
      uint32_t* const to = reinterpret_cast<uint32_t*>(slab);
      if constexpr (!kHalves) {
        const uint32_t low = numbers[2 * eight], high = numbers[2 * eight + 1];
        to[at / 8 * 8 + part * 4 + t] = kBits == 8 ? (part ? high : low) : __byte_perm(low, high, part ? 0x7531 : 0x6420);
      } else if constexpr (kBits == 8) {
        to[(at / 4 + part / 2) * 8 + part % 2 * 4 + t] = numbers[i];
      } else {
        const uint32_t low = numbers[4 * eight + part / 2], high = numbers[4 * eight + 2 + part / 2];
        to[(at / 4 + part / 2) * 8 + part % 2 * 4 + t] = __byte_perm(low, high, part % 2 ? 0x7632 : 0x5410);
      }
    }
  }
};

// X (rows, k) of codes as numbers that are multiplied, (rows, pitch bytes), in the order of FewRowsOrder; zero beyond k.
template <class C>
__global__ void __launch_bounds__(128)
order_few_rows(const uint8_t* x, int64_t x_pitch, int64_t row_bytes, int64_t rows, const uint8_t* factors,
               int64_t factors_pitch, int64_t blocks, uint8_t* ordered, int64_t pitch) {
  using Format = typename C::Format;
  using Order = FewRowsOrder<C::kBits, C::kHalves>;
  wait_for_predecessor();
  const int64_t runs = pitch / (16 * Order::kSize), index = int64_t{blockIdx.x} * 128 + threadIdx.x;
  const int64_t row = index / runs, run = index % runs;
  if (row >= rows) return;
  constexpr int kRunBytes = 4 * Format::kWords;
  uint32_t codes[Format::kWords], numbers[4 * Order::kSize];
  load_ragged_run<Format>(x + row * x_pitch + run * kRunBytes, row_bytes - run * kRunBytes, codes);
  if constexpr (C::kHalves) {
    uint32_t factor = 0;
    if constexpr (C::kBlock > 0) {
      const int64_t block = run * 16 / C::kBlock;
      factor = scale_halves<typename C::Scale>(block < blocks ? __ldg(factors + row * factors_pitch + block) : 0);
    }
    decode_halves<Format, (C::kBlock > 0)>(codes, factor, numbers);
  } else {
    decode_bytes<Format>(codes, numbers);
  }
  const int first = int(run * 16 % Order::kSlabK);
  Order::put(ordered + row * pitch + (run * 16 - first) * Order::kSize, first, numbers);
}

template <class C>
struct FewRows {
  using Format = typename C::FormatB;
  using Order = FewRowsOrder<Format::kBits, C::kHalves>;
  using Op = typename FewRowsOp<C::kRows, ReadyFormat<Format>, ReadyFormat<typename C::FormatA>, C::kHalves>::type;
  static constexpr int kSlabs = C::kSlabs, kTileK = kSlabs * Order::kSlabK, kHeight = 64 * C::kGroups;
  static constexpr int kWeightsPitch = kSlabs * 64, kBoxBytes = C::kRows * 128;  // a box has 128 bytes of X's rows
  static constexpr int kBoxes = kTileK * Order::kSize / 128, kStageBytes = kHeight * kWeightsPitch + kBoxes * kBoxBytes;
  static constexpr int kStages = C::kStages, kRegisters = C::kRows / 2;
  // With many groups registers are few: one slab at a time, and the feeder's warp group gives of its own.
  static constexpr bool kShare = C::kGroups > 2, kOverlap = !kShare && (C::kHalves ? C::kResident == 1 : C::kRows <= 32);
  static constexpr int kThreads = 128 * C::kGroups + (kShare ? 128 : 32);
  // Of what the block starts with, which is all that there is.
  static constexpr int kPool = 65536 / kThreads / 8 * 8 * (C::kGroups + 1), kFeederRegisters = 24;
  static constexpr int kGroupRegisters = (kPool - kFeederRegisters) / C::kGroups / 8 * 8;
  using Sums = float[kRegisters];
  using Slab = uint32_t[Order::kSteps][4];  // a lane's part, as the instruction takes it
  // Factors of what a lane has of a slab's row.
  static constexpr int kOwnBlocks = C::kBlock == 0 ? 0 : Order::kOwn > C::kBlock ? Order::kOwn / C::kBlock : 1;
  using Factors = uint32_t[kSlabs][2][kOwnBlocks > 0 ? kOwnBlocks : 1];

  static_assert(kSlabs % 2 == 0, "slabs go in pairs");
  static_assert(kRegisters % C::kSplit == 0, "blocks of a cluster share the columns");
  static_assert(C::kSplit == 1 || kStages * kStageBytes >= kRegisters * 512 * C::kGroups, "sums meet where the ring was");

  uint32_t base;

  __device__ uint32_t weights(int stage) const { return base + stage * kStageBytes; }
  __device__ uint32_t box(int stage, int i) const { return weights(stage) + kHeight * kWeightsPitch + i * kBoxBytes; }
  __device__ uint32_t full(int stage) const { return base + kStages * kStageBytes + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8 * kStages; }
};

template <class C>
__device__ void feed_few_rows(const FewRows<C>& gemm, const TmaDescriptor& x, const TmaDescriptor& weights, int begin, int last,
                              int row) {
  using G = FewRows<C>;
  GemmPosition<G::kStages> at;
  bool waited = false;
  int ordered = begin;  // the first part whose X has not been asked for
  GemmPosition<G::kStages> of_x;
  const auto fetch_x = [&]() {
    CUTE_UNROLL
    for (int i = 0; i < G::kBoxes; ++i) {
      copy_box(gemm.box(of_x.stage, i), &x, (ordered * G::kBoxes + i) * 128, 0, gemm.full(of_x.stage));
    }
    ++ordered, of_x.advance();
  };
  for (int part = begin; part < last; ++part, at.advance()) {
    const uint32_t full = gemm.full(at.stage);
    barrier_wait(gemm.empty(at.stage), at.parity ^ 1);
    barrier_expect(full, G::kStageBytes);
    copy_box(gemm.weights(at.stage), &weights, part * G::kWeightsPitch, row, full);
    // The weights of a whole ring come while X is put in order.
    if (!waited && (part - begin + 1 == G::kStages || part + 1 == last)) wait_for_predecessor(), waited = true;
    while (waited && ordered <= part) fetch_x();
  }
}

// The codes of a lane's factors in one part of k. Beyond the last row and the last block are factors of others, of products
// that are not written, or zero.
template <class C>
__device__ __forceinline__ void load_factors(const uint8_t* const (&rows)[2], int blocks, int part,
                                             typename FewRows<C>::Factors& to) {
  using G = FewRows<C>;
  if constexpr (C::kBlock > 0) {
    const int first = (part * G::kTileK + int(threadIdx.x) % 4 * G::Order::kOwn) / C::kBlock;
    CUTE_UNROLL
    for (int i = 0; i < G::kSlabs; ++i) {
      CUTE_UNROLL
      for (int b = 0; b < G::kOwnBlocks; ++b) {
        const int block = first + i * (G::Order::kSlabK / C::kBlock) + b, there = block < blocks ? block : blocks - 1;
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) to[i][half][b] = __ldg(rows[half] + there);
      }
    }
  }
}

// A lane's 16 bytes of one of its two rows of a slab, as the instruction takes them.
template <class C>
__device__ __forceinline__ void decode_row(const uint32_t (&words)[4], int half,
                                           const uint32_t (&factors)[sizeof(typename FewRows<C>::Factors) / 8 / C::kSlabs],
                                           typename FewRows<C>::Slab& to) {
  using Format = typename C::FormatB;
  if constexpr (C::kHalves) {
    constexpr int kPairs = 16 / Format::kBits, kOfFactor = 4 * kPairs / (C::kBlock > 0 ? FewRows<C>::kOwnBlocks : 1);
    uint32_t factor = 0;
    CUTE_UNROLL
    for (int p = 0; p < 4 * kPairs; ++p) {  // of 4 bits, codes p % 4 and p % 4 + 4 of a word
      const uint32_t word = words[p / kPairs];
      uint32_t& pair = to[p / 2][half + 2 * (p % 2)];
      if constexpr (Format::kBits == 8) pair = to_halves<Format>(__byte_perm(word, 0, p % 2 ? 0x4342 : 0x4140));
      else if (p % 4 == 0) pair = to_halves_from<Format, 0>(word);
      else if (p % 4 == 1) pair = to_halves_from<Format, 4>(word);
      else if (p % 4 == 2) pair = to_halves_from<Format, 8>(word);
      else pair = to_halves_from<Format, 12>(word);
      if constexpr (C::kBlock > 0) {
        if (p % kOfFactor == 0) factor = scale_halves<typename C::Scale>(factors[p / kOfFactor]);
        pair = multiply_halves(pair, factor);
      }
    }
  } else {
    CUTE_UNROLL
    for (int s = 0; s < FewRows<C>::Order::kSteps; ++s) {
      if constexpr (Format::kBits == 8) {
        to[s][half] = words[2 * s], to[s][2 + half] = words[2 * s + 1];
      } else {
        to[s][half] = to_bytes<Format>(words[s]), to[s][2 + half] = to_bytes<Format>(words[s] >> 4);
      }
    }
  }
}

// A lane's part of slab i of a stage: 16 bytes of rows g and g + 8 of its warp's sixteen. Rows that are read together meet in
// their banks, two and two; with boxes of 64 bytes, in which they do not, the whole took 3 to 6% longer.
template <class C>
__device__ __forceinline__ void load_slab(const uint8_t* stage, int i, const typename FewRows<C>::Factors& factors,
                                          typename FewRows<C>::Slab& to) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const uint8_t* const from = stage + 64 * i + (row + 8 * half) * FewRows<C>::kWeightsPitch + lane % 4 * 16;
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    decode_row<C>({x.x, x.y, x.z, x.w}, half, factors[i][half], to);
  }
}

template <class Op, int kRegisters, int... I>
__device__ __forceinline__ void multiply_from_registers(const uint32_t (&a)[4], uint64_t b, float (&sums)[kRegisters],
                                                        SM90::GMMA::ScaleOut scale, int_sequence<I...>) {
  Op::fma(a[0], a[1], a[2], a[3], b, sums[I]..., scale);
}

// Starts the products of a slab. Of bytes, `partial` begins with zero.
template <class C>
__device__ __forceinline__ void start_slab(const FewRows<C>& gemm, typename FewRows<C>::Slab& a, int stage, int i,
                                           typename FewRows<C>::Sums& partial) {
  using G = FewRows<C>;
  hold_sums(partial);
  CUTE_UNROLL
  for (int s = 0; s < G::Order::kSteps; ++s) {
    CUTE_UNROLL
    for (int r = 0; r < 4; ++r) warpgroup_fence_operand(a[s][r]);
  }
  warpgroup_arrive();
  CUTE_UNROLL
  for (int s = 0; s < G::Order::kSteps; ++s) {
    const int at = (i * G::Order::kSlabK + G::Order::kStepK * s) * G::Order::kSize;
    const uint64_t b = describe<128>(gemm.box(stage, at / 128)) + (at % 128 >> 4);
    const bool fresh = !C::kHalves && s == 0;
    multiply_from_registers<typename G::Op>(a[s], b, partial, fresh ? SM90::GMMA::ScaleOut::Zero : SM90::GMMA::ScaleOut::One,
                                            make_int_sequence<G::kRegisters>{});
  }
  warpgroup_commit_batch();
}

// All of what the products have read stays until here. Halves are summed in `sums` straight away.
template <class C>
__device__ __forceinline__ void end_slab(typename FewRows<C>::Slab& a, typename FewRows<C>::Sums& partial,
                                         typename FewRows<C>::Sums& sums) {
  hold_sums(C::kHalves ? sums : partial);
  CUTE_UNROLL
  for (int s = 0; s < FewRows<C>::Order::kSteps; ++s) {
    CUTE_UNROLL
    for (int r = 0; r < 4; ++r) warpgroup_fence_operand(a[s][r]);
  }
  if constexpr (!C::kHalves) add_sums(sums, partial);
}

// Of D what the lane has in registers `first` on of the accumulators: columns `column` and column + 8, rows 2t and 2t + 1 of
// every eight.
template <class C, int kOwn>
__device__ __forceinline__ void write_few_rows(const GemmOutput<C>& to, const float (&sums)[kOwn], int first, int column) {
  using Source = typename C::Source;
  const int t = threadIdx.x % 4;
  CUTE_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    const int r = first + i, n = column + r / 2 % 2 * 8, m = r / 4 * 8 + 2 * t + r % 2;
    if (m >= to.m || n >= to.n) continue;
    Source prior{};
    if constexpr (GemmOutput<C>::kHasSource) prior = to.c[int64_t{m} * to.c_pitch + n];
    const float factor = to.columns ? __ldg(to.columns + n) : 1.0f, shift = to.bias ? __ldg(to.bias + n) : 0.0f;
    to.out[int64_t{m} * to.pitch + n] = to.finish(__float_as_uint(sums[i]), prior, to.row_factor(m), factor, shift);
  }
}

template <class C>
__device__ void multiply_few_rows(const FewRows<C>& gemm, const uint8_t* shared, const BlockScales& scales,
                                  const GemmOutput<C>& to, int begin, int last, int column) {
  using G = FewRows<C>;
  const int lane = threadIdx.x % 32;
  column += threadIdx.x / 32 * 16 + lane / 4;
  GemmPosition<G::kStages> at;
  typename G::Sums sums = {}, partial = {};
  typename G::Factors factors, next;
  const uint8_t* of_rows[2];  // the factors of the lane's rows
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = column + 8 * half;
    of_rows[half] = scales.codes + (row < scales.rows ? row : scales.rows - 1) * scales.pitch;
  }
  load_factors<C>(of_rows, scales.blocks, begin, next);
  for (int part = begin; part < last; ++part, at.advance()) {
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(factors) / 4); ++i) (&factors[0][0][0])[i] = (&next[0][0][0])[i];
    load_factors<C>(of_rows, scales.blocks, part + 1, next);  // they come while this part is multiplied
    barrier_wait(gemm.full(at.stage), at.parity);
    const uint8_t* stage = shared + at.stage * G::kStageBytes;
    CUTE_UNROLL
    for (int i = 0; i < G::kSlabs; i += 2) {
      typename G::Slab first, second;
      load_slab<C>(stage, i, factors, first);
      start_slab(gemm, first, at.stage, i, C::kHalves ? sums : partial);
      if constexpr (!G::kOverlap) {
        warpgroup_wait<0>();
        end_slab<C>(first, partial, sums);
      }
      load_slab<C>(stage, i + 1, factors, second);
      if constexpr (C::kHalves) {
        start_slab(gemm, second, at.stage, i + 1, sums);
        warpgroup_wait<0>();
        if constexpr (G::kOverlap) end_slab<C>(first, partial, sums);
        end_slab<C>(second, partial, sums);
      } else if constexpr (G::kOverlap) {
        typename G::Sums other = {};
        start_slab(gemm, second, at.stage, i + 1, other);
        warpgroup_wait<1>();
        end_slab<C>(first, partial, sums);
        warpgroup_wait<0>();
        end_slab<C>(second, other, sums);
      } else {
        start_slab(gemm, second, at.stage, i + 1, partial);
        warpgroup_wait<0>();
        end_slab<C>(second, partial, sums);
      }
    }
    if (lane == 0) barrier_arrive(gemm.empty(at.stage));
  }
  if constexpr (C::kSplit == 1) {
    write_few_rows(to, sums, 0, column);
  } else {  // the blocks of a cluster add up their sums: each has a share of the registers in the end
    constexpr int kOwn = G::kRegisters / C::kSplit, kAll = 128 * C::kGroups;
    const int rank = int(cluster::rank());
    warp_group::turn_wait(1, kAll);  // all have read what the ring held
    float* own = reinterpret_cast<float*>(const_cast<uint8_t*>(shared));
    CUTE_UNROLL
    for (int r = 0; r < G::kRegisters; ++r) own[r * kAll + threadIdx.x] = sums[r];
    cluster::meet();
    float total[kOwn] = {};
    CUTE_UNROLL
    for (int r = 0; r < kOwn; ++r) {
      CUTE_UNROLL
      for (int other = 0; other < C::kSplit; ++other) {
        total[r] += __uint_as_float(cluster::load_of(gemm.base + ((rank * kOwn + r) * kAll + threadIdx.x) * 4, other));
      }
    }
    write_few_rows(to, total, rank * kOwn, column);
  }
}

template <class C>
__global__ void __launch_bounds__(FewRows<C>::kThreads, C::kResident)
gemm_floats_few(const __grid_constant__ TmaDescriptor x, const __grid_constant__ TmaDescriptor weights, int64_t k,
                const uint8_t* factors, int64_t factors_pitch, int64_t blocks, typename C::Out* out, int64_t pitch, int64_t m,
                int64_t n, const float* rows, int64_t row_step, const float* columns, int64_t column_step, const float* bias,
                const typename C::Source* c, int64_t c_pitch, int64_t vector, float alpha, float beta) {
  using G = FewRows<C>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const G gemm{shared_address(shared)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < G::kStages; ++stage) {
      barrier_init(gemm.full(stage), 1);
      barrier_init(gemm.empty(stage), 4 * C::kGroups);
    }
    barrier_fence();
  }
  __syncthreads();
  const int rank = C::kSplit == 1 ? 0 : int(cluster::rank()), column = int(blockIdx.x) / C::kSplit * G::kHeight;
  const int parts = int((k + G::kTileK - 1) / G::kTileK), begin = parts * rank / C::kSplit, last = parts * (rank + 1) / C::kSplit;
  if (threadIdx.x < 128 * C::kGroups) {
    if constexpr (G::kShare) warp_group::take_registers<G::kGroupRegisters>();
    if (rows && row_step == 0) alpha *= __ldg(rows);
    if (columns && column_step == 0) alpha *= __ldg(columns);
    const GemmOutput<C> to{out, c, row_step ? rows : nullptr, column_step ? columns : nullptr, bias, pitch, c_pitch, int(m),
                           int(n), alpha, beta, 0.0f, 0.0f, vector != 0};
    multiply_few_rows(gemm, shared, {factors, factors_pitch, int(n), int(blocks)}, to, begin, last, column);
  } else {
    if constexpr (G::kShare) warp_group::give_registers<G::kFeederRegisters>();
    if (threadIdx.x == 128 * C::kGroups) feed_few_rows(gemm, x, weights, begin, last, column);
    __syncwarp();
    if constexpr (C::kSplit > 1) cluster::meet();
  }
  if constexpr (C::kSplit > 1) cluster::meet();  // a block's memory is read by the others
}

}  // namespace magicube
