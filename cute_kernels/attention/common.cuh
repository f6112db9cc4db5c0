// Fused sparse attention: what the gather and the panel kernel share.
//
// Formula: O = softmax(scale Q K^T + bias) V at the vectors of a mask (8 queries x 1 key), over int8 Q, K and V.
// Architectures: sm_80 and later (mma.m16n8k32 of int8, movmatrix).
// Work: a warp computes one vector row, 8 queries, against steps of 32 * kGroups keys.
// Scores: S^T = K Q^T. Gathered rows of K are operand A, the queries operand B. Lane (g, t) = (lane / 4, lane % 4) holds the
// keys g and g + 8 of sixteen for the queries 2t and 2t + 1.
// Softmax: online; the accumulators are rescaled if the running maximum grows. Weights are rounded to 8 bits.
// Output: O^T = V^T P. `movmatrix` transposes the 16-bit units of keys g and g + 8 into operand B. Operand A is V^T, pairs of
// columns of V from ldmatrix.trans, with the keys in the same order.
// Source: Li, Osawa, Hoefler, SC'22, section V-C; Milakov, Gimelshein, 2018 (online softmax).
#pragma once

#include <cuda_fp16.h>

#include "device/copy.cuh"
#include "device/epilogue.cuh"
#include "device/math.cuh"

namespace magicube {

// Integer accumulators start at these bits: while a sum is below 2^22 in magnitude, they are the bits of the float
// kAccumulatorBias + sum, and no conversion is needed.
constexpr float kAccumulatorBias = 12582912.0f;  // 1.5 * 2^23
constexpr uint32_t kAccumulatorBiasBits = 0x4B400000;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000); }
// NaN if either is.
__device__ __forceinline__ float max_nan(float x, float y) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}
// Four 8x8 matrices of 16-bit units: lane (g, t) gets the units (g, 2t) and (g, 2t + 1) of each.
__device__ __forceinline__ void ldmatrix_x4(uint32_t from, uint32_t* to) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}
// Transpose an 8x8 matrix of 16-bit units; lane (g, t) holds (g, 2t) and (g, 2t + 1).
__device__ __forceinline__ uint32_t movmatrix_transpose(uint32_t units) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(units));
  return result;
}

template <class C>
struct AttentionShape {
  using ScoreOp = typename AtomFor<Integer<true>, Integer<true>>::type;
  using ValueOp = typename AtomFor<Integer<true>, Integer<false>>::type;  // weights are unsigned
  static_assert(AtomShape<ScoreOp>::kM == 16 && AtomShape<ScoreOp>::kK == 32, "written for m16n8k32");
  static constexpr int kQueries = 8;
  static constexpr int kGroup = 32;                        // keys
  static constexpr int kStep = C::kGroups * kGroup;        // keys per update of the maximum
  static_assert(kStep * 255 * 128 < 1 << 22 && C::kHead * 128 * 128 < 1 << 22, "sums must be exact as floats");
  static constexpr int kChunks = C::kHead / 16;            // 16-byte chunks per row of K or V
  static constexpr int kSteps = C::kHead / 32;             // MMAs along a row
  static constexpr bool kKeyed = C::kKeyScale || C::kBias; // scores have a term per key
  // prmt selectors: bytes 0 and 2 of both registers, alternating; bytes 1 and 3.
  static constexpr uint32_t kFirsts = 0x6240, kSeconds = 0x7351;
};

// Operands besides K and V, and outputs. Scales have a stride per row (0: one for all) and one per matrix, in elements.
struct AttentionOperands {
  const uint8_t* q;      // (batch, queries, kHead) int8
  void* out;             // (batch, queries, kHead) Out
  float* lse;            // (batch, queries) float32
  const float* q_scale;
  const float* k_scale;
  const float* v_scale;
  const float* bias;
  int64_t q_stride, q_batch, k_batch, v_stride, v_batch, bias_batch;
  int64_t queries;
  float scale;           // scale of the logits times log2(e)
  float log2_max;             // log2 of the largest integer weight
  float empty;           // result of queries without keys
};

// Wait, by a warp, until the `parts` flags of a matrix are 1: the kernel that quantizes the operands may still run (PDL).
// Returns `batch`; addresses derived from it depend on the wait, so that no load moves before it.
__device__ __forceinline__ uint32_t wait_for_matrix(const uint32_t* ready, int64_t parts, uint32_t batch, int lane) {
  if (ready) {
    for (int64_t i = lane; i < parts; i += 32) flag_wait_acquire(ready + batch * parts + i, 1);
    __syncwarp();
  }
  return held(batch);
}
__device__ __forceinline__ void wait_for_operands(const uint32_t* ready) {
  if (!ready) pdl_wait();
}
// At the end of a CTA: the kernel after this one must not start before the quantizing kernel has ended.
__device__ __forceinline__ void end_after_operands(const uint32_t* ready) {
  if (ready) griddepcontrol_wait();
}

// C for matrices whose keys share the scale of the first key.
template <class C>
struct SharedKeyScale : C {
  static constexpr bool kKeyScale = false;
};
// shared_scale: (batch,) int32 or null; nonzero if the keys of a matrix share one scale although C has one per key.
template <class C>
__device__ __forceinline__ bool keys_share_scale(const int* shared_scale, int64_t batch) {
  return C::kKeyScale && shared_scale && load_after_flag(shared_scale + batch);
}

// State of one vector row in a warp.
template <class C>
struct AttentionRow {
  using S = AttentionShape<C>;
  uint32_t q[2 * S::kSteps];      // query g: bytes 4t to 4t + 3 of every 16
  float logit_scale[2];                // scale of the scores of queries 2t and 2t + 1; gives logits times log2(e)
  float row_max[2];                  // largest score: logit times log2(e) if kKeyed, else kAccumulatorBias + integer
  float total[2];                 // sum of the rounded weights
  float exact_sum[2];                 // sum of the unrounded weights of this lane's keys
  float acc[S::kChunks][4];       // accumulators: columns 2g and 2g + 1 of each 16 of V, both queries

  __device__ void open(const AttentionOperands& at, int64_t batch, int64_t vector_row, bool exists, int lane) {
    const int64_t first = vector_row * S::kQueries, query = first + lane / 4;
    const bool present = exists && query < at.queries;
    const uint32_t* from = reinterpret_cast<const uint32_t*>(at.q + (batch * at.queries + query) * C::kHead) + lane % 4;
    CUTE_UNROLL
    for (int i = 0; i < 2 * S::kSteps; ++i) q[i] = present ? load_after_flag(from + 4 * i) : 0;
    const float key_scale = C::kKeyScale ? at.scale : at.scale * load_after_flag(at.k_scale + batch * at.k_batch);
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      const int64_t own = first + lane % 4 * 2 + j;
      const bool there = exists && own < at.queries;
      // Positive, so that -inf times the scale stays -inf.
      const float q_scale = there ? load_after_flag(at.q_scale + batch * at.q_batch + own * at.q_stride) : 1.0f;
      logit_scale[j] = max_nan(key_scale * q_scale, 1.17549435e-38f);
      row_max[j] = S::kKeyed ? -1e30f : kAccumulatorBias - (1 << 22);
      total[j] = exact_sum[j] = 0.0f;
    }
    CUTE_UNROLL
    for (int c = 0; c < S::kChunks; ++c) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) acc[c][i] = 0.0f;
    }
  }
};

// The keys of one step, one word each: bits 0 to 15 locate the row, 16 to 23 name a tile, 24 to 31 are the visible bits.
template <class C>
struct StepKeys {
  using S = AttentionShape<C>;
  uint32_t words[C::kGroups];

  // all: (steps, kStep)
  __device__ void load(const uint32_t* all, int step, int lane) {
    const uint32_t* from = all + int64_t{step} * S::kStep + lane;
    CUTE_UNROLL
    for (int i = 0; i < C::kGroups; ++i) words[i] = __ldg(from + i * S::kGroup);
  }
};

// Shared-memory addresses of a lane's key in each group: the row of K, V's row `values` bytes after it, the scale, and the
// bias `biases` bytes after that.
template <class C>
struct StepAddresses {
  uint32_t rows[C::kGroups];
  uint32_t scales[AttentionShape<C>::kKeyed ? C::kGroups : 1];
  uint32_t values, biases;
};

// Scores of one group, kAccumulatorBias + integer: (2 x 16 keys, 4).
template <class C>
__device__ __forceinline__ void score_group(const AttentionRow<C>& row, uint32_t at, float (&out)[2][4]) {
  using S = AttentionShape<C>;
  uint32_t sums[2][4];
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] = kAccumulatorBiasBits;
  CUTE_UNROLL
  for (int step = 0; step < S::kSteps; ++step) {
    uint32_t raw[2][4];  // (16 bytes, eight keys)
    ldmatrix_x4(at ^ (2 * step * 16), raw[0]);
    ldmatrix_x4(at ^ ((2 * step + 1) * 16), raw[1]);
    CUTE_UNROLL
    for (int b = 0; b < 2; ++b) {
      const uint32_t keys[4] = {raw[0][2 * b], raw[1][2 * b], raw[0][2 * b + 1], raw[1][2 * b + 1]};
      mma<typename S::ScoreOp>(sums[b], keys, row.q + 2 * step);
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) out[i / 4][i % 4] = __uint_as_float(sums[i / 4][i % 4]);
}

// Scores of one group to logits times log2(e). at: address of the scale of this lane's key; its bias is `biases` bytes on.
template <class C>
__device__ __forceinline__ void scale_group(const AttentionRow<C>& row, uint32_t at, uint32_t biases, float (&score)[2][4],
                                            int lane) {
  constexpr float kLog2E = 1.4426950408889634f;
  uint32_t scale[1] = {}, bias[1] = {};
  if constexpr (C::kKeyScale) load_shared(at, scale);
  if constexpr (C::kBias) load_shared(at + biases, bias);
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int slot = 8 * i + lane / 4;
    const float by = C::kKeyScale ? __uint_as_float(__shfl_sync(~0u, scale[0], slot)) : 1.0f;
    const float plus = C::kBias ? __uint_as_float(__shfl_sync(~0u, bias[0], slot)) * kLog2E : 0.0f;
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      float& x = score[i / 2][2 * (i % 2) + j];
      x = fmaf(x - kAccumulatorBias, row.logit_scale[j] * by, plus);
    }
  }
}

// Set the scores of keys that are not visible to a query to -inf.
template <class C>
__device__ __forceinline__ void mask_scores(const StepKeys<C>& step, float (&score)[C::kGroups][2][4], int lane) {
  uint32_t all = step.words[0];
  CUTE_UNROLL
  for (int i = 1; i < C::kGroups; ++i) all &= step.words[i];
  if (!__any_sync(~0u, all < 0xFF000000)) return;
  CUTE_UNROLL
  for (int i = 0; i < 4 * C::kGroups; ++i) {
    const uint32_t visible_bits = __shfl_sync(~0u, step.words[i / 4], i % 4 * 8 + lane / 4) >> (24 + lane % 4 * 2);
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      float& x = score[i / 4][i / 2 % 2][2 * (i % 2) + j];
      x = visible_bits >> j & 1 ? x : minus_infinity();
    }
  }
}

// Update the running maximum of each query; rescale: the scale of the previous sums.
template <class C>
__device__ __forceinline__ void update_max(AttentionRow<C>& row, const float (&score)[C::kGroups][2][4], float (&rescale)[2]) {
  using S = AttentionShape<C>;
  CUTE_UNROLL
  for (int j = 0; j < 2; ++j) {
    float row_max = row.row_max[j];
    CUTE_UNROLL
    for (int i = 0; i < 4 * C::kGroups; ++i) row_max = max_nan(row_max, score[i / 4][i / 2 % 2][2 * (i % 2) + j]);
    CUTE_UNROLL
    for (int lane_mask = 4; lane_mask < 32; lane_mask *= 2) {
      row_max = max_nan(row_max, __shfl_xor_sync(~0u, row_max, lane_mask));
    }
    const float by = row.row_max[j] - row_max;
    rescale[j] = power_of_two(S::kKeyed ? by : by * row.logit_scale[j]);
    row.row_max[j] = row_max;
  }
}

// Rounded weights as operand B of the second MMA, one register per 16 keys.
template <class C>
__device__ __forceinline__ void compute_weights(AttentionRow<C>& row, const float (&score)[C::kGroups][2][4], float log2_max,
                                      const float (&rescale)[2], uint32_t (&weights)[C::kGroups][2]) {
  using S = AttentionShape<C>;
  float exact_sum[2] = {};
  const float base[2] = {row.row_max[0] - log2_max, row.row_max[1] - log2_max};
  CUTE_UNROLL
  for (int b = 0; b < 2 * C::kGroups; ++b) {
    float weight[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float x = score[b / 2][b % 2][i];
      weight[i] = power_of_two(S::kKeyed ? x - base[i % 2] : fmaf(x - row.row_max[i % 2], row.logit_scale[i % 2], log2_max));
      if constexpr (C::kLse) exact_sum[i % 2] += weight[i];
    }
    // From 1024 on, the last bit of a float16 has the value 1: the addition rounds to an integer.
    const __half2 unit = __float2half2_rn(1024.0f);
    const __half2 first = __hadd2(__floats2half2_rn(weight[0], weight[1]), unit);    // key g
    const __half2 second = __hadd2(__floats2half2_rn(weight[2], weight[3]), unit);   // key g + 8
    weights[b / 2][b % 2] = movmatrix_transpose(prmt(
        reinterpret_cast<const uint32_t&>(first), reinterpret_cast<const uint32_t&>(second), S::kFirsts));
  }
  if constexpr (C::kLse) {
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) row.exact_sum[j] = fmaf(row.exact_sum[j], rescale[j], exact_sum[j]);
  }
}

// Accumulate weights times rows of V.
template <class C>
__device__ __forceinline__ void accumulate_values(AttentionRow<C>& row, const StepAddresses<C>& at,
                                           const uint32_t (&weights)[C::kGroups][2], const float (&rescale)[2]) {
  using S = AttentionShape<C>;
  const uint32_t ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
  uint32_t total[4] = {kAccumulatorBiasBits, kAccumulatorBiasBits, kAccumulatorBiasBits, kAccumulatorBiasBits};
  CUTE_UNROLL
  for (int i = 0; i < C::kGroups; ++i) mma<typename S::ValueOp>(total, ones, weights[i]);
  CUTE_UNROLL
  for (int j = 0; j < 2; ++j) row.total[j] = fmaf(row.total[j], rescale[j], __uint_as_float(total[j]) - kAccumulatorBias);
  CUTE_UNROLL
  for (int c = 0; c < S::kChunks; ++c) {
    uint32_t sums[4] = {kAccumulatorBiasBits, kAccumulatorBiasBits, kAccumulatorBiasBits, kAccumulatorBiasBits};
    CUTE_UNROLL
    for (int i = 0; i < C::kGroups; ++i) {
      uint32_t raw[4];  // (eight keys)
      load_transposed((at.rows[i] ^ (c * 16)) + at.values, raw);
      const uint32_t columns[4] = {prmt(raw[0], raw[1], S::kFirsts), prmt(raw[2], raw[3], S::kFirsts),
                                   prmt(raw[0], raw[1], S::kSeconds), prmt(raw[2], raw[3], S::kSeconds)};
      mma<typename S::ValueOp>(sums, columns, weights[i]);
    }
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      row.acc[c][i] = fmaf(row.acc[c][i], rescale[i % 2], __uint_as_float(sums[i]) - kAccumulatorBias);
    }
  }
}

template <class C>
__device__ __forceinline__ void process_step(AttentionRow<C>& row, const StepKeys<C>& step, const StepAddresses<C>& at,
                                             float log2_max, int lane) {
  float score[C::kGroups][2][4], rescale[2];
  uint32_t weights[C::kGroups][2];
  CUTE_UNROLL
  for (int i = 0; i < C::kGroups; ++i) {
    score_group(row, at.rows[i], score[i]);
    if constexpr (AttentionShape<C>::kKeyed) scale_group(row, at.scales[i], at.biases, score[i], lane);
  }
  mask_scores(step, score, lane);
  update_max(row, score, rescale);
  compute_weights(row, score, log2_max, rescale, weights);
  accumulate_values(row, at, weights, rescale);
}

template <class Out>
__device__ __forceinline__ void store_pair(Out* to, float first, float second) {
  if constexpr (sizeof(Out) == 4) {
    *reinterpret_cast<float2*>(to) = make_float2(first, second);
  } else {
    alignas(4) const Out pair[2] = {convert<Out>(first, 1.0f, 1.0f, 0.0f), convert<Out>(second, 1.0f, 1.0f, 0.0f)};
    *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<const uint32_t*>(pair);
  }
}

// Log-sum-exp of one query.
template <class C>
__device__ float log_sum(const AttentionRow<C>& row, int j, float log2_max) {
  constexpr float kLn2 = 0.6931471805599453f;
  float exact_sum = row.exact_sum[j];
  CUTE_UNROLL
  for (int lane_mask = 4; lane_mask < 32; lane_mask *= 2) exact_sum += __shfl_xor_sync(~0u, exact_sum, lane_mask);
  const float row_max = AttentionShape<C>::kKeyed ? row.row_max[j] : (row.row_max[j] - kAccumulatorBias) * row.logit_scale[j];
  return exact_sum > 0.0f ? kLn2 * (row_max - log2_max) + logf(exact_sum) : minus_infinity();
}

// Epilogue: write the output and the log-sum-exp of one vector row.
template <class C>
__device__ void write_row(const AttentionOperands& at, const AttentionRow<C>& row, int64_t batch, int64_t vector_row,
                          int lane) {
  using S = AttentionShape<C>;
  using Out = typename C::Out;
  const float* scales = at.v_scale + batch * at.v_batch;
  CUTE_UNROLL
  for (int j = 0; j < 2; ++j) {
    const int64_t query = vector_row * S::kQueries + lane % 4 * 2 + j;
    if constexpr (C::kLse) {
      const float lse = log_sum(row, j, at.log2_max);
      if (lane < 4 && query < at.queries) at.lse[batch * at.queries + query] = lse;
    }
    if (query >= at.queries) continue;
    const bool any = row.total[j] > 0.0f;
    const float inverse = any ? __fdividef(1.0f, row.total[j]) : 0.0f, otherwise = any ? 0.0f : at.empty;
    Out* to = static_cast<Out*>(at.out) + (batch * at.queries + query) * C::kHead + lane / 4 * 2;
    CUTE_UNROLL
    for (int c = 0; c < S::kChunks; ++c) {
      const float* scale = scales + (c * 16 + lane / 4 * 2) * at.v_stride;
      const float first = row.acc[c][j] * inverse * load_after_flag(scale);
      const float second = row.acc[c][2 + j] * inverse * load_after_flag(scale + at.v_stride);
      store_pair(to + c * 16, first + otherwise, second + otherwise);
    }
  }
}

}  // namespace magicube
