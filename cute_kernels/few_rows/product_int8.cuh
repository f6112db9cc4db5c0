// Few-rows product of integers, D = X W^T: X (M, K) int8, W (N, K) packed int4 or int8 with scales per group or row.
//
// sm_90a. Work, pipeline and epilogue as in few_rows/product.cuh. Bottleneck: weights up to about 64 rows, Tensor Cores from 128 on.
// Weights are the A operand of int8 WGMMA, from registers: an int4 code is the upper half of a byte, so a byte is 16 q, and the
// row's scale has the 1/16. The sums of a group are exact int32, at most 2^21 in magnitude, as |16 q| <= 128 and |x| <= 128. They
// become floats by a conversion, exactly, and an FMA with the group's scale adds them to a float32 accumulator: of two sets of
// sums one is added while the other is multiplied. Without groups, int32 sums run over all of K.
// Source: PTX ISA, wgmma.mma_async register fragments.
#pragma once

#include "few_rows/product.cuh"

namespace magicube::few {

#define MAGICUBE_FEW_OP(N)                                     \
  template <>                                                  \
  struct Op<N, INT8> {                                         \
    using type = SM90::GMMA::MMA_64x##N##x32_S32S8S8_RS_TN;    \
  };
MAGICUBE_FEW_OP(16)
MAGICUBE_FEW_OP(32)
MAGICUBE_FEW_OP(64)
MAGICUBE_FEW_OP(128)
#undef MAGICUBE_FEW_OP

template <class C>
struct FewRowsInt8 : FewRows<C> {
  using G = FewRows<C>;
  static constexpr bool kGrouped = C::Scale::kBytes > 0;
  static constexpr int kParts = kUnitK / C::kGroup, kSteps = C::kGroup / 32;  // groups of a unit; instructions of a group
  static constexpr int kSums = G::kUnits * kParts;  // groups of a stage
  using Sums = uint32_t[G::kRegisters];
  using Operand = uint32_t[4][4];  // a unit of a lane, as four instructions read it

  static_assert(!C::Scale::kMinimum && kParts * C::kGroup == kUnitK && kSteps * 32 == C::kGroup, "groups are whole instructions");
};

// Bytes of a lane's rows g and g + 8 of a unit: the instruction at 32 s has k = 4 t to 4 t + 3 and, 16 further, as many. Of int4,
// the upper halves of the bytes of a word are the former.
template <class C>
__device__ __forceinline__ void decode_unit(const uint32_t (&words)[2][FewRows<C>::kWords], uint32_t (&to)[4][4]) {
  CUTE_UNROLL
  for (int s = 0; s < 4; ++s) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      if constexpr (C::Weights::kBits == 4) {
        to[s][half] = words[half][s] & 0xF0F0F0F0;
        to[s][2 + half] = words[half][s] << 4 & 0xF0F0F0F0;
      } else {
        to[s][half] = words[half][2 * s];
        to[s][2 + half] = words[half][2 * s + 1];
      }
    }
  }
}

// Scale of group i of a row of a unit: a float32, or a float16 of a pair.
template <class C>
__device__ __forceinline__ float group_scale(const uint32_t (&words)[8], int i) {
  if constexpr (C::Scale::kBytes == 4) {
    return __uint_as_float(words[i]);
  } else {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i / 2]));
    return i % 2 ? pair.y : pair.x;
  }
}

template <class Op, int kRegisters, int... I>
__device__ __forceinline__ void wgmma_int8(const uint32_t (&a)[4], uint64_t b, uint32_t (&sums)[kRegisters],
                                           SM90::GMMA::ScaleOut scale, int_sequence<I...>) {
  Op::fma(a[0], a[1], a[2], a[3], b, sums[I]..., scale);
}

template <int kRegisters>
__device__ __forceinline__ void fence_sums(uint32_t (&sums)[kRegisters]) {
  CUTE_UNROLL
  for (int r = 0; r < kRegisters; ++r) warpgroup_fence_operand(sums[r]);
}

// Keep the operands of instructions `first` to `first + count - 1` as they are until here.
__device__ __forceinline__ void fence_operand(uint32_t (&a)[4][4], int first, int count) {
  CUTE_UNROLL
  for (int s = 0; s < count; ++s) {
    CUTE_UNROLL
    for (int r = 0; r < 4; ++r) warpgroup_fence_operand(a[first + s][r]);
  }
}

// Start the products of `count` instructions of a unit, which add to `sums`.
template <class C>
__device__ __forceinline__ void start_sums(const FewRowsInt8<C>& gemm, uint32_t (&a)[4][4], int stage, int unit, int first, int count,
                                           bool from_zero, typename FewRowsInt8<C>::Sums& sums) {
  using G = FewRowsInt8<C>;
  fence_sums(sums);
  fence_operand(a, first, count);
  warpgroup_arrive();
  const uint64_t b = smem_descriptor<128>(gemm.box(stage, unit));
  CUTE_UNROLL
  for (int s = first; s < first + count; ++s) {
    using Instruction = typename Op<C::kRows, INT8>::type;
    wgmma_int8<Instruction>(a[s], b + (32 * s >> 4), sums,
                            from_zero && s == first ? SM90::GMMA::ScaleOut::Zero : SM90::GMMA::ScaleOut::One,
                            make_int_sequence<G::kRegisters>{});
  }
  warpgroup_commit_batch();
}

// accum += scale of the row times the sums of a group.
template <int kRegisters>
__device__ __forceinline__ void add_sums(float (&accum)[kRegisters], uint32_t (&sums)[kRegisters], const float (&scale)[2]) {
  fence_sums(sums);
  CUTE_UNROLL
  for (int r = 0; r < kRegisters; ++r) {
    accum[r] = __fmaf_rn(static_cast<float>(static_cast<int32_t>(sums[r])), scale[r / 2 % 2], accum[r]);
  }
}

// A stage with scales of groups: a group is added while the next one is multiplied.
template <class C>
__device__ __forceinline__ void multiply_groups(const FewRowsInt8<C>& gemm, const uint8_t* weights, int stage,
                                                typename FewRows<C>::Accumulators& accum) {
  using G = FewRowsInt8<C>;
  typename G::Operand a[2];  // of units by turns
  typename G::Sums sums[2];  // of groups by turns
  uint32_t scales[2][2][8];  // of units by turns: of both rows, as they are packed
  const auto add = [&](int i) {  // group i of the stage, whose products are complete
    const int u = i / G::kParts, group = i % G::kParts;
    fence_operand(a[u % 2], group * G::kSteps, G::kSteps);
    add_sums(accum, sums[i % 2], {group_scale<C>(scales[u % 2][0], group), group_scale<C>(scales[u % 2][1], group)});
  };
  CUTE_UNROLL
  for (int i = 0; i < G::kSums; ++i) {
    const int u = i / G::kParts, group = i % G::kParts;
    auto& operand = a[u % 2];
    if (group == 0) {
      uint32_t words[2][G::kWords];
      load_unit<C>(weights + u * G::kUnitBytes, words, scales[u % 2]);
      decode_unit<C>(words, operand);
    }
    start_sums<C>(gemm, operand, stage, u, group * G::kSteps, G::kSteps, true, sums[i % 2]);
    if (i > 0) {
      warpgroup_wait<1>();
      add(i - 1);
    }
  }
  warpgroup_wait<0>();
  add(G::kSums - 1);
}

// A stage without groups: sums of all of K.
template <class C>
__device__ __forceinline__ void multiply_rows(const FewRowsInt8<C>& gemm, const uint8_t* weights, int stage,
                                              typename FewRowsInt8<C>::Sums& sums) {
  using G = FewRowsInt8<C>;
  typename G::Operand a[G::kUnits];
  CUTE_UNROLL
  for (int u = 0; u < G::kUnits; ++u) {
    uint32_t words[2][G::kWords];
    Scales scales;
    load_unit<C>(weights + u * G::kUnitBytes, words, scales);
    decode_unit<C>(words, a[u]);
    start_sums<C>(gemm, a[u], stage, u, 0, 4, false, sums);
  }
  warpgroup_wait<0>();
  CUTE_UNROLL
  for (int u = 0; u < G::kUnits; ++u) fence_operand(a[u], 0, 4);
  fence_sums(sums);
}

template <class C>
__device__ __forceinline__ void consume_int8(const FewRowsInt8<C>& gemm, uint8_t* shared, const GemmOutput<C>& to, int begin, int last,
                                             int column) {
  using G = FewRowsInt8<C>;
  const int lane = threadIdx.x % 32, group = warp_of_block() / 4;
  const int block = G::kDepth == 1 ? group : group % G::kBlocks, depth = G::kDepth == 1 ? 0 : group / G::kBlocks;
  GemmPipelineState<G::kStages> at;
  typename G::Accumulators accum = {};
  typename G::Sums sums = {};  // without groups
  at.skip(depth);
  for (int part = begin + depth; part < last; part += G::kDepth, at.skip(G::kDepth)) {
    barrier_wait(gemm.full(at.stage), at.parity);
    const uint8_t* const weights = shared + G::weights_at(at.stage) + block * G::kBlockBytes;
    if constexpr (G::kGrouped) multiply_groups<C>(gemm, weights, at.stage, accum);
    else multiply_rows<C>(gemm, weights, at.stage, sums);
    if (lane == 0) barrier_arrive(gemm.empty(at.stage));
  }
  if constexpr (!G::kGrouped) {
    CUTE_UNROLL
    for (int r = 0; r < G::kRegisters; ++r) accum[r] = static_cast<float>(static_cast<int32_t>(sums[r]));
  }
  write_tile<C>(gemm, shared, to, column, block, depth, accum);
}

// Arguments as of few_rows_product; x: map of int8.
template <class C>
__global__ void __launch_bounds__(FewRows<C>::kThreads, C::kResident)
few_rows_int8(const __grid_constant__ TmaDescriptor x, const uint8_t* weights, int64_t units, typename C::Out* out, int64_t pitch,
              int64_t m, int64_t n, const float* row_scales, int64_t row_step, const float* col_scales, const float* bias,
              int64_t vector) {
  run_few_rows<C>(x, weights, units, out, pitch, m, n, row_scales, row_step, col_scales, bias, vector != 0,
                  [](const FewRows<C>& gemm, auto&&... args) { consume_int8<C>(FewRowsInt8<C>{gemm}, args...); });
}

}  // namespace magicube::few
