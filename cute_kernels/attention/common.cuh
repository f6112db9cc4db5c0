// Sparse attention: O = softmax(scale Q K^T + bias) V at the vectors of a mask, over int8 Q, K and V; what the kernels share.
//
// A warp has one vector row, eight queries, and takes its keys 32 at a time. Scores: gathered rows of K are the mma's
// operand A, the queries operand B. A lane (g, t) = (lane / 4, lane % 4) so has keys g and g + 8 of sixteen for queries 2t
// and 2t + 1. The maximum runs: sums so far shrink when a larger score comes. Weights are rounded to 8 bits; a 16-bit unit
// of keys g and g + 8 passes `movmatrix`, and what comes out is operand B of the second mma, whose operand A is V^T: columns
// of V by two as ldmatrix.trans gives them, with keys in the same order.
#pragma once

#include <cuda_fp16.h>

#include "device/copy.cuh"
#include "device/epilogue.cuh"
#include "device/math.cuh"

namespace magicube {

// Sums of integer mmas start here: as long as they stay below 2^22 their bits are those of the float kUnit + sum.
constexpr float kUnit = 12582912.0f;  // 1.5 * 2^23
constexpr uint32_t kUnitBits = 0x4B400000;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000); }
// NaN where one of them is.
__device__ __forceinline__ float larger(float x, float y) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}
// 8x8 matrices of 16-bit units as rows: lane (g, t) gets units (g, 2t) and (g, 2t + 1) of each matrix.
__device__ __forceinline__ void load_rows(uint32_t from, uint32_t* to) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}
// An 8x8 matrix of 16-bit units, of which each lane has (g, 2t) and (g, 2t + 1), transposed.
__device__ __forceinline__ uint32_t transpose_units(uint32_t units) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(units));
  return result;
}

template <class C>
struct AttentionShape {
  using ScoreOp = typename AtomFor<Integer<true>, Integer<true>>::type;
  using ValueOp = typename AtomFor<Integer<true>, Integer<false>>::type;  // weights have no sign
  static_assert(AtomShape<ScoreOp>::kM == 16 && AtomShape<ScoreOp>::kK == 32, "written for m16n8k32");
  static constexpr int kQueries = 8;
  static constexpr int kGroup = 32;                        // keys
  static constexpr int kStep = C::kGroups * kGroup;        // keys between two looks at the maximum
  static_assert(kStep * 255 * 128 < 1 << 22 && C::kHead * 128 * 128 < 1 << 22, "sums must be exact as floats");
  static constexpr int kChunks = C::kHead / 16;            // pieces of 16 bytes of a row of K or V
  static constexpr int kSteps = C::kHead / 32;             // mmas along a row
  static constexpr bool kKeyed = C::kKeyScale || C::kBias; // scores differ by key in more than the product
  // Selectors: bytes 0, 2 of both registers in turn; bytes 1, 3.
  static constexpr uint32_t kFirsts = 0x6240, kSeconds = 0x7351;
};

// What the kernels read besides K and V, and write. Scales and the bias have a step between neighbours (0: one for all) and
// one between matrices.
struct AttentionOperands {
  const uint8_t* q;      // (batch, queries, head)
  void* out;             // (batch, queries, head)
  float* lse;            // (batch, queries)
  const float* q_scale;
  const float* k_scale;
  const float* v_scale;
  const float* bias;
  int64_t q_step, q_batch, k_batch, v_step, v_batch, bias_batch;
  int64_t queries;
  float scale;           // of the logits, times log2(e)
  float top;             // log2 of the largest weight
  float empty;           // results of queries without keys
};

// A kernel that makes the operands may still run: a matrix is there when its `parts` words are 1. By a warp; returns `batch`,
// on which the addresses of what was waited for then depend.
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
// At the end of a block, so that the next kernel does not start before that one ends.
__device__ __forceinline__ void end_after_operands(const uint32_t* ready) {
  if (ready) griddepcontrol_wait();
}

// As C, for matrices whose keys have one scale, that of the first.
template <class C>
struct Alike : C {
  static constexpr bool kKeyScale = false;
};
// alike: (batch,), or null; not 0 where the keys of a matrix have one scale although C has one for each.
template <class C>
__device__ __forceinline__ bool are_alike(const int* alike, int64_t batch) {
  return C::kKeyScale && alike && load_after_flag(alike + batch);
}

// One vector row as a warp holds it.
template <class C>
struct AttentionRow {
  using S = AttentionShape<C>;
  uint32_t q[2 * S::kSteps];      // query g: bytes 4t.. of every 16
  float factor[2];                // of scores, queries 2t and 2t + 1; results are logits times log2(e)
  float most[2];                  // largest score: logit times log2(e) if keyed, else kUnit + the integer
  float total[2];                 // of the rounded weights
  float exact[2];                 // of the weights, those of this lane's keys
  float sum[S::kChunks][4];       // columns 2g, 2g + 1 of each 16 of V, for both queries

  __device__ void open(const AttentionOperands& at, int64_t batch, int64_t vector_row, bool exists, int lane) {
    const int64_t first = vector_row * S::kQueries, query = first + lane / 4;
    const bool present = exists && query < at.queries;
    const uint32_t* from = reinterpret_cast<const uint32_t*>(at.q + (batch * at.queries + query) * C::kHead) + lane % 4;
    CUTE_UNROLL
    for (int i = 0; i < 2 * S::kSteps; ++i) q[i] = present ? load_after_flag(from + 4 * i) : 0;
    const float of_keys = C::kKeyScale ? at.scale : at.scale * load_after_flag(at.k_scale + batch * at.k_batch);
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      const int64_t own = first + lane % 4 * 2 + j;
      const bool there = exists && own < at.queries;
      // above zero, so that -infinity stays what it is
      factor[j] = larger(of_keys * (there ? load_after_flag(at.q_scale + batch * at.q_batch + own * at.q_step) : 1.0f), 1.17549435e-38f);
      most[j] = S::kKeyed ? -1e30f : kUnit - (1 << 22);
      total[j] = exact[j] = 0.0f;
    }
    CUTE_UNROLL
    for (int c = 0; c < S::kChunks; ++c) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) sum[c][i] = 0.0f;
    }
  }
};

// The keys of one step: a word each, which has a bit for each query that sees the key from bit 24 on.
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

// Where in shared memory a lane finds its key of each group: the row of K, and V's `values` bytes behind it; the scale, and
// the bias `biases` bytes behind it.
template <class C>
struct StepPlaces {
  uint32_t rows[C::kGroups];
  uint32_t scales[AttentionShape<C>::kKeyed ? C::kGroups : 1];
  uint32_t values, biases;
};

// kUnit + products of sixteen keys and eight queries, two times: (16 keys, 4).
template <class C>
__device__ __forceinline__ void score_group(const AttentionRow<C>& row, uint32_t at, float (&out)[2][4]) {
  using S = AttentionShape<C>;
  uint32_t sums[2][4];
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] = kUnitBits;
  CUTE_UNROLL
  for (int step = 0; step < S::kSteps; ++step) {
    uint32_t raw[2][4];  // (16 bytes, eight keys)
    load_rows(at ^ (2 * step * 16), raw[0]);
    load_rows(at ^ ((2 * step + 1) * 16), raw[1]);
    CUTE_UNROLL
    for (int b = 0; b < 2; ++b) {
      const uint32_t keys[4] = {raw[0][2 * b], raw[1][2 * b], raw[0][2 * b + 1], raw[1][2 * b + 1]};
      mma<typename S::ScoreOp>(sums[b], keys, row.q + 2 * step);
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) out[i / 4][i % 4] = __uint_as_float(sums[i / 4][i % 4]);
}

// Scores of one group to logits times log2(e); at: where the scale of this lane's key lies, and the bias `biases` behind it.
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
      x = fmaf(x - kUnit, row.factor[j] * by, plus);
    }
  }
}

// Scores of keys that a query does not see become -infinity.
template <class C>
__device__ __forceinline__ void mask_scores(const StepKeys<C>& step, float (&score)[C::kGroups][2][4], int lane) {
  uint32_t all = step.words[0];
  CUTE_UNROLL
  for (int i = 1; i < C::kGroups; ++i) all &= step.words[i];
  if (!__any_sync(~0u, all < 0xFF000000)) return;
  CUTE_UNROLL
  for (int i = 0; i < 4 * C::kGroups; ++i) {
    const uint32_t seen = __shfl_sync(~0u, step.words[i / 4], i % 4 * 8 + lane / 4) >> (24 + lane % 4 * 2);
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      float& x = score[i / 4][i / 2 % 2][2 * (i % 2) + j];
      x = seen >> j & 1 ? x : minus_infinity();
    }
  }
}

// The largest score of each query so far; returns by what the sums so far shrink.
template <class C>
__device__ __forceinline__ void raise(AttentionRow<C>& row, const float (&score)[C::kGroups][2][4], float (&shrink)[2]) {
  using S = AttentionShape<C>;
  CUTE_UNROLL
  for (int j = 0; j < 2; ++j) {
    float most = row.most[j];
    CUTE_UNROLL
    for (int i = 0; i < 4 * C::kGroups; ++i) most = larger(most, score[i / 4][i / 2 % 2][2 * (i % 2) + j]);
    CUTE_UNROLL
    for (int apart = 4; apart < 32; apart *= 2) most = larger(most, __shfl_xor_sync(~0u, most, apart));
    const float by = row.most[j] - most;
    shrink[j] = power_of_two(S::kKeyed ? by : by * row.factor[j]);
    row.most[j] = most;
  }
}

// Weights, rounded: operand B of the second mma, a register for each sixteen keys.
template <class C>
__device__ __forceinline__ void weigh(AttentionRow<C>& row, const float (&score)[C::kGroups][2][4], float top,
                                      const float (&shrink)[2], uint32_t (&weights)[C::kGroups][2]) {
  using S = AttentionShape<C>;
  float exact[2] = {};
  const float base[2] = {row.most[0] - top, row.most[1] - top};
  CUTE_UNROLL
  for (int b = 0; b < 2 * C::kGroups; ++b) {
    float weight[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float x = score[b / 2][b % 2][i];
      weight[i] = power_of_two(S::kKeyed ? x - base[i % 2] : fmaf(x - row.most[i % 2], row.factor[i % 2], top));
      if constexpr (C::kLse) exact[i % 2] += weight[i];
    }
    // From 1024 on, the last bit of a half is 1.
    const __half2 unit = __float2half2_rn(1024.0f);
    const __half2 first = __hadd2(__floats2half2_rn(weight[0], weight[1]), unit);    // key g
    const __half2 second = __hadd2(__floats2half2_rn(weight[2], weight[3]), unit);   // key g + 8
    weights[b / 2][b % 2] = transpose_units(prmt(
        reinterpret_cast<const uint32_t&>(first), reinterpret_cast<const uint32_t&>(second), S::kFirsts));
  }
  if constexpr (C::kLse) {
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) row.exact[j] = fmaf(row.exact[j], shrink[j], exact[j]);
  }
}

// Adds weights times rows of V to the sums.
template <class C>
__device__ __forceinline__ void add_values(AttentionRow<C>& row, const StepPlaces<C>& at,
                                           const uint32_t (&weights)[C::kGroups][2], const float (&shrink)[2]) {
  using S = AttentionShape<C>;
  const uint32_t ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
  uint32_t total[4] = {kUnitBits, kUnitBits, kUnitBits, kUnitBits};
  CUTE_UNROLL
  for (int i = 0; i < C::kGroups; ++i) mma<typename S::ValueOp>(total, ones, weights[i]);
  CUTE_UNROLL
  for (int j = 0; j < 2; ++j) row.total[j] = fmaf(row.total[j], shrink[j], __uint_as_float(total[j]) - kUnit);
  CUTE_UNROLL
  for (int c = 0; c < S::kChunks; ++c) {
    uint32_t sums[4] = {kUnitBits, kUnitBits, kUnitBits, kUnitBits};
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
      row.sum[c][i] = fmaf(row.sum[c][i], shrink[i % 2], __uint_as_float(sums[i]) - kUnit);
    }
  }
}

template <class C>
__device__ __forceinline__ void attend_step(AttentionRow<C>& row, const StepKeys<C>& step, const StepPlaces<C>& at, float top,
                                            int lane) {
  float score[C::kGroups][2][4], shrink[2];
  uint32_t weights[C::kGroups][2];
  CUTE_UNROLL
  for (int i = 0; i < C::kGroups; ++i) {
    score_group(row, at.rows[i], score[i]);
    if constexpr (AttentionShape<C>::kKeyed) scale_group(row, at.scales[i], at.biases, score[i], lane);
  }
  mask_scores(step, score, lane);
  raise(row, score, shrink);
  weigh(row, score, top, shrink, weights);
  add_values(row, at, weights, shrink);
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

// The log of the sum of exponentials of one query.
template <class C>
__device__ float log_sum(const AttentionRow<C>& row, int j, float top) {
  constexpr float kLn2 = 0.6931471805599453f;
  float exact = row.exact[j];
  CUTE_UNROLL
  for (int apart = 4; apart < 32; apart *= 2) exact += __shfl_xor_sync(~0u, exact, apart);
  const float most = AttentionShape<C>::kKeyed ? row.most[j] : (row.most[j] - kUnit) * row.factor[j];
  return exact > 0.0f ? kLn2 * (most - top) + logf(exact) : minus_infinity();
}

// Results of one vector row.
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
      const float lse = log_sum(row, j, at.top);
      if (lane < 4 && query < at.queries) at.lse[batch * at.queries + query] = lse;
    }
    if (query >= at.queries) continue;
    const bool any = row.total[j] > 0.0f;
    const float inverse = any ? __fdividef(1.0f, row.total[j]) : 0.0f, otherwise = any ? 0.0f : at.empty;
    Out* to = static_cast<Out*>(at.out) + (batch * at.queries + query) * C::kHead + lane / 4 * 2;
    CUTE_UNROLL
    for (int c = 0; c < S::kChunks; ++c) {
      const float* scale = scales + (c * 16 + lane / 4 * 2) * at.v_step;
      const float first = row.sum[c][j] * inverse * load_after_flag(scale), second = row.sum[c][2 + j] * inverse * load_after_flag(scale + at.v_step);
      store_pair(to + c * 16, first + otherwise, second + otherwise);
    }
  }
}

}  // namespace magicube
