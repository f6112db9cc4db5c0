// Fused sparse attention, gather kernel: O = softmax(scale Q K^T + bias) V at the vectors of a mask.
//
// Architectures: sm_80 and later; the choice without TMA and for few vector rows.
// Work: a CTA has kWarps warps, each with one vector row (8 queries).
// Pipeline: each warp copies the rows of K and V of a step by cp.async into its own ring of kStages stages. No CTA barrier.
// Source: Li, Osawa, Hoefler, SC'22, section V-C.
#pragma once

#include "attention/common.cuh"

namespace magicube {

template <class C>
struct GatherRing {
  using S = AttentionShape<C>;
  static constexpr int kMatrixBytes = S::kStep * C::kHead, kScaleBytes = 4 * S::kStep;
  static constexpr int kStageBytes = 2 * kMatrixBytes + (S::kKeyed ? 2 * kScaleBytes : 0);
  static constexpr int kRowsPerCopy = 32 / S::kChunks;  // rows per copy of a warp
  struct Keys { int32_t of[S::kStep / kRowsPerCopy]; };  // keys whose rows a lane copies

  uint32_t base;
  const uint8_t* keys;
  const uint8_t* values;
  const float* scales;
  const float* biases;
  const int32_t* keys_of;
  int lane;

  __device__ Keys keys_at(int step) const {
    Keys found;
    const int32_t* from = keys_of + int64_t{step} * S::kStep + lane / S::kChunks;
    CUTE_UNROLL
    for (int i = 0; i < S::kStep / kRowsPerCopy; ++i) found.of[i] = __ldg(from + i * kRowsPerCopy);
    return found;
  }
  // Copy the rows of K and V of one step to a stage, then the scales and biases of its keys.
  __device__ void fetch(int stage, int step, const Keys& of) const {
    const uint32_t to = base + stage * kStageBytes;
    CUTE_UNROLL
    for (int i = 0; i < S::kStep / kRowsPerCopy; ++i) {
      const int slot = i * kRowsPerCopy + lane / S::kChunks, chunk = lane % S::kChunks;
      const int64_t source = int64_t{of.of[i]} * C::kHead + chunk * 16;
      const uint32_t at = to + swizzled<C::kHead>(slot, chunk);
      cp_async(at, keys + source, 16);
      cp_async(at + kMatrixBytes, values + source, 16);
    }
    if constexpr (S::kKeyed) {
      CUTE_UNROLL
      for (int slot = lane; slot < S::kStep; slot += S::kGroup) {
        const uint32_t at = to + 2 * kMatrixBytes + slot * 4;
        const int32_t key = __ldg(keys_of + int64_t{step} * S::kStep + slot);
        if constexpr (C::kKeyScale) copy_async_word(at, scales + key);
        if constexpr (C::kBias) copy_async_word(at + kScaleBytes, biases + key);
      }
    }
  }

  __device__ StepAddresses<C> addresses(int stage) const {
    StepAddresses<C> at;
    at.values = kMatrixBytes;
    at.biases = kScaleBytes;
    CUTE_UNROLL
    for (int i = 0; i < C::kGroups; ++i) {
      const int slot = i * S::kGroup + lane;
      at.rows[i] = base + stage * kStageBytes + swizzled<C::kHead>(slot, 0);
      if constexpr (S::kKeyed) at.scales[i] = base + stage * kStageBytes + 2 * kMatrixBytes + slot * 4;
    }
    return at;
  }
};

// Compute one vector row, steps [begin, end), of the matrix of the ring's pointers.
template <class C>
__device__ __forceinline__ void gather_row(const GatherRing<C>& ring, const AttentionOperands& operands, const uint32_t* words,
                                           int begin, int end, int64_t batch, int64_t vector_row) {
  // Prologue. Keys are loaded one step before their rows are copied; words one step before their use.
  typename GatherRing<C>::Keys keys;
  StepKeys<C> upcoming;
  if (begin < end) {
    keys = ring.keys_at(begin);
    upcoming.load(words, begin, ring.lane);
  }
  CUTE_UNROLL
  for (int i = 0; i < C::kStages - 1; ++i) {
    if (begin + i < end) ring.fetch(i, begin + i, keys);
    cp_async_commit();
    if (begin + i + 1 < end) keys = ring.keys_at(begin + i + 1);
  }
  AttentionRow<C> row;
  row.open(operands, batch, vector_row, true, ring.lane);
  int stage = 0;  // mainloop
  for (int step = begin; step < end; ++step) {
    const StepKeys<C> step_keys = upcoming;
    cp_async_wait<C::kStages - 2>();
    __syncwarp();
    const int next_load = step + C::kStages - 1;
    if (next_load < end) ring.fetch(stage == 0 ? C::kStages - 1 : stage - 1, next_load, keys);
    cp_async_commit();
    if (next_load + 1 < end) keys = ring.keys_at(next_load + 1);
    if (step + 1 < end) upcoming.load(words, step + 1, ring.lane);
    process_step(row, step_keys, ring.addresses(stage), operands.log2_max, ring.lane);
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }
  write_row(operands, row, batch, vector_row, ring.lane);
}

// step_start: (patterns * vector rows + 1,); words, keys_of: (steps, kStep).
template <class C>
__global__ void __launch_bounds__(C::kWarps * 32, 1)  // without the 1, registers spill to fit one more CTA
attention_gather(const uint8_t* k, const uint8_t* v, const int32_t* step_start, const uint32_t* words,
                 const int32_t* keys_of, const uint8_t* q, void* out, float* lse, const float* q_scale, int64_t q_stride,
                 int64_t q_batch, const float* k_scale, int64_t k_batch, const int* shared_scale, const float* v_scale,
                 int64_t v_stride, int64_t v_batch, const float* bias, int64_t bias_batch, const uint32_t* ready, int64_t parts,
                 float scale, float log2_max, float empty, int64_t queries, int64_t keys, int64_t vector_rows,
                 int64_t row_blocks, int64_t patterns) {
  extern __shared__ __align__(1024) uint8_t shared[];
  wait_for_operands(ready);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t vector_row = int64_t{blockIdx.x % uint32_t(row_blocks)} * C::kWarps + warp;
  if (vector_row >= vector_rows) return;
  const uint32_t number = blockIdx.x / uint32_t(row_blocks);
  const int32_t* steps = step_start + int64_t{number % uint32_t(patterns)} * vector_rows + vector_row;
  const int begin = __ldg(steps), end = __ldg(steps + 1);
  const int64_t batch = wait_for_matrix(ready, parts, number, lane);
  const AttentionOperands operands{q, out, lse, q_scale, k_scale, v_scale, bias, q_stride, q_batch, k_batch, v_stride, v_batch,
                                   bias_batch, queries, scale, log2_max, empty};
  const int64_t matrix = batch * keys * C::kHead;
  const auto run = [&](auto config) {
    using D = decltype(config);
    using Ring = GatherRing<D>;
    const Ring ring{shared_address(shared) + warp * D::kStages * Ring::kStageBytes, k + matrix, v + matrix,
                    k_scale + batch * k_batch, bias + batch * bias_batch, keys_of, lane};
    gather_row<D>(ring, operands, words, begin, end, batch, vector_row);
  };
  if (keys_share_scale<C>(shared_scale, batch)) run(SharedKeyScale<C>{});
  else run(C{});
  if (blockIdx.x + row_blocks >= gridDim.x) end_after_operands(ready);  // CTAs of the last matrix suffice
}

}  // namespace magicube
