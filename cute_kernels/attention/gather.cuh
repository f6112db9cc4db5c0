// Sparse attention, gather kernel: each warp brings the rows of K and V that its vector row names, a step at a time, into a
// ring of its own. For chips without tensor copies, and for few vector rows.
#pragma once

#include "attention/common.cuh"

namespace magicube {

template <class C>
struct GatherRing {
  using S = AttentionShape<C>;
  static constexpr int kMatrixBytes = S::kStep * C::kHead, kFactorBytes = 4 * S::kStep;
  static constexpr int kStageBytes = 2 * kMatrixBytes + (S::kKeyed ? 2 * kFactorBytes : 0);
  static constexpr int kDown = 32 / S::kChunks;  // rows that a warp copies at once
  struct Keys { int32_t of[S::kStep / kDown]; };  // whose rows a lane copies

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
    for (int i = 0; i < S::kStep / kDown; ++i) found.of[i] = __ldg(from + i * kDown);
    return found;
  }
  // Rows of K and V of one step to one stage, and behind them the keys' scales and biases.
  __device__ void fetch(int stage, int step, const Keys& of) const {
    const uint32_t to = base + stage * kStageBytes;
    CUTE_UNROLL
    for (int i = 0; i < S::kStep / kDown; ++i) {
      const int slot = i * kDown + lane / S::kChunks, chunk = lane % S::kChunks;
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
        if constexpr (C::kBias) copy_async_word(at + kFactorBytes, biases + key);
      }
    }
  }

  __device__ StepPlaces<C> places(int stage) const {
    StepPlaces<C> at;
    at.values = kMatrixBytes;
    at.biases = kFactorBytes;
    CUTE_UNROLL
    for (int i = 0; i < C::kGroups; ++i) {
      const int slot = i * S::kGroup + lane;
      at.rows[i] = base + stage * kStageBytes + swizzled<C::kHead>(slot, 0);
      if constexpr (S::kKeyed) at.scales[i] = base + stage * kStageBytes + 2 * kMatrixBytes + slot * 4;
    }
    return at;
  }
};

// One vector row of the matrix to which the ring's pointers lead, of which the steps from `begin` to `end` are.
template <class C>
__device__ __forceinline__ void gather_row(const GatherRing<C>& ring, const AttentionOperands& operands, const uint32_t* words,
                                           int begin, int end, int64_t batch, int64_t vector_row) {
  // Keys are loaded a step before their rows are fetched, and what is known of them a step before it is used.
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
  int stage = 0;
  for (int step = begin; step < end; ++step) {
    const StepKeys<C> step_keys = upcoming;
    cp_async_wait<C::kStages - 2>();
    __syncwarp();
    const int far = step + C::kStages - 1;
    if (far < end) ring.fetch(stage == 0 ? C::kStages - 1 : stage - 1, far, keys);
    cp_async_commit();
    if (far + 1 < end) keys = ring.keys_at(far + 1);
    if (step + 1 < end) upcoming.load(words, step + 1, ring.lane);
    attend_step(row, step_keys, ring.places(stage), operands.top, ring.lane);
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }
  write_row(operands, row, batch, vector_row, ring.lane);
}

// step_start: (patterns * vector rows + 1); words and keys_of: (steps, kStep).
template <class C>
__global__ void __launch_bounds__(C::kWarps * 32, 1)  // without the 1, registers spill for one block more
attention_gather(const uint8_t* k, const uint8_t* v, const int32_t* step_start, const uint32_t* words,
                 const int32_t* keys_of, const uint8_t* q, void* out, float* lse, const float* q_scale, int64_t q_step,
                 int64_t q_batch, const float* k_scale, int64_t k_batch, const int* alike, const float* v_scale,
                 int64_t v_step, int64_t v_batch, const float* bias, int64_t bias_batch, const uint32_t* ready, int64_t parts,
                 float scale, float top, float empty, int64_t queries, int64_t keys, int64_t vector_rows, int64_t row_blocks,
                 int64_t patterns) {
  extern __shared__ __align__(1024) uint8_t shared[];
  wait_for_operands(ready);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t vector_row = int64_t{blockIdx.x % uint32_t(row_blocks)} * C::kWarps + warp;
  if (vector_row >= vector_rows) return;
  const uint32_t number = blockIdx.x / uint32_t(row_blocks);
  const int32_t* steps = step_start + int64_t{number % uint32_t(patterns)} * vector_rows + vector_row;
  const int begin = __ldg(steps), end = __ldg(steps + 1);
  const int64_t batch = wait_for_matrix(ready, parts, number, lane);
  const AttentionOperands operands{q, out, lse, q_scale, k_scale, v_scale, bias, q_step, q_batch, k_batch, v_step, v_batch,
                                   bias_batch, queries, scale, top, empty};
  const int64_t matrix = batch * keys * C::kHead;
  const auto attend = [&](auto config) {
    using D = decltype(config);
    using Ring = GatherRing<D>;
    const Ring ring{shared_address(shared) + warp * D::kStages * Ring::kStageBytes, k + matrix, v + matrix,
                    k_scale + batch * k_batch, bias + batch * bias_batch, keys_of, lane};
    gather_row<D>(ring, operands, words, begin, end, batch, vector_row);
  };
  if (are_alike<C>(alike, batch)) attend(Alike<C>{});
  else attend(C{});
  if (blockIdx.x + row_blocks >= gridDim.x) end_after_operands(ready);  // the last matrix; others would only wait
}

}  // namespace magicube
