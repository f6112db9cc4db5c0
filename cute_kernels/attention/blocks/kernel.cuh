// Fused sparse attention on whole blocks: O = softmax(scale Q K^T + bias) V at the 64 x 64 blocks of a mask, over int8 Q, K and V.
//
// sm_90a (WGMMA, TMA). Work: a persistent CTA of one warp group takes blocks of 64 queries; several CTAs of an SM overlap their
// phases. Pipeline: one thread loads tiles of 64 keys, those that the mask names, by TMA, and Q beside the first of a block; a
// producer warp would cost the registers of a CTA. Scores: S = Q K^T, Q from registers; during it V is transposed in shared memory,
// as operand B of 8 bits must be. Softmax: online, in registers; weights are rounded to 8 bits. Output: O = P V. The accumulators of
// S are operand A of P as they are: V^T has the keys in the order in which a lane has them.
// kTiled: K and V have a scale per tile (`attention_tiles`), and Q is floats, quantized by row where it is used.
// Source: Dao, FlashAttention-2; Shah et al., FlashAttention-3 (order of keys for 8-bit operands).
#pragma once

#include "attention/blocks/ring.cuh"
#include "attention/quantize_qkv.cuh"
#include "device/quad.cuh"
#include "device/smem_descriptor.cuh"
#include "device/warpgroup.cuh"

namespace magicube {

template <class Op, int kRegisters, int... I>
__device__ __forceinline__ void integer_wgmma(const uint32_t (&a)[4], uint64_t b, uint32_t (&sums)[kRegisters], int_sequence<I...>) {
  Op::fma(a[0], a[1], a[2], a[3], b, sums[I]..., SM90::GMMA::ScaleOut::One);
}

// Start sums += A B over kSteps of 32 bytes of rows of kRowBytes.
template <class Op, int kRowBytes, int kSteps, int kRegisters>
__device__ __forceinline__ void start_products(uint32_t (&a)[kSteps][4], uint32_t rows, uint32_t (&sums)[kRegisters]) {
  CUTE_UNROLL
  for (int r = 0; r < kRegisters; ++r) {
    sums[r] = kAccumulatorBiasBits;
    warpgroup_fence_operand(sums[r]);
  }
  CUTE_UNROLL
  for (int r = 0; r < 4 * kSteps; ++r) warpgroup_fence_operand(a[r / 4][r % 4]);
  warpgroup_arrive();
  CUTE_UNROLL
  for (int s = 0; s < kSteps; ++s) {
    integer_wgmma<Op>(a[s], smem_descriptor<kRowBytes>(rows) + (32 * s >> 4), sums, make_int_sequence<kRegisters>{});
  }
  warpgroup_commit_batch();
}
// Wait for the products, and keep their operand alive until here.
template <int kSteps, int kRegisters>
__device__ __forceinline__ void finish_products(uint32_t (&a)[kSteps][4], uint32_t (&sums)[kRegisters]) {
  warpgroup_wait<0>();
  CUTE_UNROLL
  for (int r = 0; r < kRegisters; ++r) warpgroup_fence_operand(sums[r]);
  CUTE_UNROLL
  for (int r = 0; r < 4 * kSteps; ++r) warpgroup_fence_operand(a[r / 4][r % 4]);
}

// State of a lane (g, t): rows g and g + 8 of its warp's 16 queries, columns 2t and 2t + 1 of every eight keys or entries of V.
template <class C>
struct BlockRow {
  using S = BlockShape<C>;
  uint32_t q[C::kHead / 32][4];
  int query;            // of row g
  float query_scale[2];                      // of the scores, without the key's; gives logits times log2(e)
  float row_max[2], total[2], exact_sum[2];  // as of AttentionRow, logits times log2(e); sums are of this lane's keys
  float acc[S::kValues];  // (64, kHead)

  __device__ void open(const AttentionOperands& at, const QueryBuffer<C>& from, int64_t batch, int first) {
    const int lane = threadIdx.x % 32;
    query = first + threadIdx.x / 32 * 16 + lane / 4;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int own = query + 8 * half;
      const bool there = own < at.queries;
      float q_scale;
      if constexpr (C::kTiled) {
        q_scale = quantize_query(from, half);
      } else {
        q_scale = there ? load_after_flag(at.q_scale + batch * at.q_batch + own * at.q_stride) : 1.0f;
      }
      query_scale[half] = at.scale * q_scale;
      row_max[half] = -1e30f;
      total[half] = exact_sum[half] = 0.0f;
    }
    CUTE_UNROLL
    for (int r = 0; r < S::kValues; ++r) acc[r] = 0.0f;
  }
  // Keys from here on are not seen.
  __device__ int limit(int half, int keys, bool causal) const { return causal ? min(query + 8 * half + 1, keys) : keys; }
  // Quantize a query, of which this lane has 4 of every 16 entries; returns its scale.
  __device__ float quantize_query(const QueryBuffer<C>& from, int half) {
    using Source = typename C::Source;
    constexpr int kPieces = QueryBuffer<C>::kPieces, kWords = int(sizeof(Source));  // words of 4 entries
    alignas(16) uint32_t x[kPieces][kWords];
    PackedAbsmax<C> absmax;
    CUTE_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      load_shared(from.piece(half, i), x[i]);
      CUTE_UNROLL
      for (int w = 0; w < kWords; ++w) absmax.update(x[i][w] & PackedAbsmax<C>::kMagnitude);
    }
    absmax.update(__shfl_xor_sync(~0u, absmax.word, 1));
    absmax.update(__shfl_xor_sync(~0u, absmax.word, 2));
    const float scale = scale_of<float, Range<C>::kHigh>(absmax.bits());
    const float inverse = sizeof(Source) == 2 ? biased_inverse<C>(scale, absmax.bits()) : 0.0f;
    const auto encode = [&](const auto& rounded) {
      CUTE_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        const Source(&entries)[4] = reinterpret_cast<const Source(&)[4]>(x[i]);
        uint32_t codes[4];
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) codes[j] = rounded(static_cast<float>(entries[j]));
        q[i / 2][i % 2 * 2 + half] = prmt(prmt(codes[0], codes[1], 0x0040), prmt(codes[2], codes[3], 0x0040), 0x5410);
      }
    };
    if (inverse != 0.0f) {
      encode([&](float entry) { return __float_as_uint(__fmaf_rn(entry, inverse, 0x1.8p23f)); });
    } else {
      const double exact = inverse_of(scale);
      encode([&](float entry) { return uint32_t(encode_exact<C>(static_cast<double>(entry), exact)); });
    }
    return scale;
  }
  // from: the CTA's queries in shared memory
  __device__ void load_queries(uint32_t from) {
    const int lane = threadIdx.x % 32, own = threadIdx.x / 32 * 16 + lane / 4;
    CUTE_UNROLL
    for (int i = 0; i < C::kHead / 8; ++i) {  // 16 bytes of row g or g + 8
      uint32_t word[1];
      load_shared(from + swizzled<C::kHead>(own + i % 2 * 8, i / 2) + lane % 4 * 4, word);
      q[i / 4][i % 4] = word[0];
    }
  }
};

// Scores, kAccumulatorBias + integer, to logits times log2(e): times the scale of each key, or `shared`, plus its bias.
template <class C>
__device__ __forceinline__ void scale_scores(const BlockRow<C>& row, const AttentionOperands& at, int64_t batch, int first, int keys,
                                             bool alike, float shared, typename BlockShape<C>::Scores& score) {
  constexpr float kLog2E = 1.4426950408889634f;
  CUTE_UNROLL
  for (int c = 0; c < BlockShape<C>::kBlock / 4; ++c) {
    if (c % 4 == 0) __syncwarp();  // keeps the loads of later keys below: moved up, they would spill
    const int key = first + c / 2 * 8 + threadIdx.x % 4 * 2 + c % 2;
    const bool there = key < keys;
    const float by = C::kKeyScale && !alike && there ? at.k_scale[batch * at.k_batch + key] : shared;
    const float plus = C::kBias && there ? at.bias[batch * at.bias_batch + key] * kLog2E : 0.0f;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      float& x = score[c / 2 * 4 + half * 2 + c % 2];
      x = fmaf(x - kAccumulatorBias, row.query_scale[half] * by, plus);
    }
  }
}

// Scores, which `factor` makes logits times log2(e), to rounded weights, operand A of the second product; rescale: the scale of
// the sums so far.
template <class C>
__device__ __forceinline__ void block_softmax(BlockRow<C>& row, const typename BlockShape<C>::Scores& score, const float (&factor)[2],
                                              float log2_max, float (&rescale)[2], typename BlockShape<C>::Weights& weights) {
  using S = BlockShape<C>;
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    float largest = score[half * 2];
    CUTE_UNROLL
    for (int i = 1; i < S::kBlock / 4; ++i) largest = max_nan(largest, score[i / 2 * 4 + half * 2 + i % 2]);
    largest = max_nan(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max_nan(largest, __shfl_xor_sync(~0u, largest, 2));
    const float row_max = max_nan(row.row_max[half], largest * factor[half]);
    rescale[half] = power_of_two(row.row_max[half] - row_max);
    row.row_max[half] = row_max;
    const float base = log2_max - row_max;
    float exact_sum = 0.0f;
    uint32_t sum = 0;
    CUTE_UNROLL
    for (int i = 0; i < S::kBlock / 16; ++i) {  // four keys: 2t and 2t + 1 of two eights
      float weight[4];
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) {
        weight[j] = power_of_two(fmaf(score[8 * i + j / 2 * 4 + half * 2 + j % 2], factor[half], base));
        if constexpr (C::kLse) exact_sum += weight[j];
      }
      // From 1024 on, the last bit of a float16 has the value 1: the addition rounds to an integer.
      const __half2 unit = __float2half2_rn(1024.0f);
      const __half2 first = __hadd2(__floats2half2_rn(weight[0], weight[1]), unit);
      const __half2 second = __hadd2(__floats2half2_rn(weight[2], weight[3]), unit);
      const uint32_t bytes =
          __byte_perm(reinterpret_cast<const uint32_t&>(first), reinterpret_cast<const uint32_t&>(second), 0x6420);
      weights[i / 2][i % 2 * 2 + half] = bytes;
      sum = __dp4a(bytes, 0x01010101u, sum);
    }
    row.total[half] = fmaf(row.total[half], rescale[half], float(sum));
    if constexpr (C::kLse) row.exact_sum[half] = fmaf(row.exact_sum[half], rescale[half], exact_sum);
  }
}

__device__ __forceinline__ float sum_of_quad(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

template <class C>
__device__ __forceinline__ void write_block(const AttentionOperands& at, BlockRow<C>& row, int64_t batch) {
  using S = BlockShape<C>;
  using Out = typename C::Out;
  constexpr float kLn2 = 0.6931471805599453f;
  const int t = threadIdx.x % 4;
  const float* const scales = at.v_scale + batch * at.v_batch;
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int own = row.query + 8 * half;
    const float total = sum_of_quad(row.total[half]);
    if constexpr (C::kLse) {
      const float exact_sum = sum_of_quad(row.exact_sum[half]);
      const float lse = exact_sum > 0.0f ? kLn2 * (row.row_max[half] - at.log2_max) + logf(exact_sum) : minus_infinity();
      if (t == 0 && own < at.queries) at.lse[batch * at.queries + own] = lse;
    }
    const bool any = total > 0.0f;
    const float inverse = any ? __fdividef(1.0f, total) : 0.0f, otherwise = any ? 0.0f : at.empty;
    Out* const to = static_cast<Out*>(at.out) + (batch * at.queries + own) * C::kHead;
    CUTE_UNROLL
    for (int c = 0; c < C::kHead / 8; ++c) {
      const float* const scale = scales + (c * 8 + 2 * t) * at.v_stride;
      float& first = row.acc[4 * c + 2 * half];
      float& second = row.acc[4 * c + 2 * half + 1];
      first = first * inverse * (C::kTiled ? 1.0f : load_after_flag(scale)) + otherwise;
      second = second * inverse * (C::kTiled ? 1.0f : load_after_flag(scale + at.v_stride)) + otherwise;
      if (sizeof(Out) == 4 && own < at.queries) store_pair(to + c * 8 + 2 * t, first, second);
    }
    if constexpr (sizeof(Out) == 2) {  // 16 bytes a lane
      CUTE_UNROLL
      for (int c = 0; c < C::kHead / 8; c += 4) {
        uint32_t words[4];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          store_pair(reinterpret_cast<Out*>(words + i), row.acc[4 * (c + i) + 2 * half], row.acc[4 * (c + i) + 2 * half + 1]);
        }
        transpose_quad(words, t);
        if (own < at.queries) {
          *reinterpret_cast<uint4*>(to + (c + t) * 8) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
}

// Transpose a tile of V (64, kHead) to V^T (kHead, 64), 16 entries a warp at a time. Within 16 keys, place 4 t + i is key
// 8 (i / 2) + 2 t + i % 2: those of lane t's accumulators.
template <class C>
__device__ __forceinline__ void transpose_values(uint32_t from, uint32_t to) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  CUTE_UNROLL
  for (int i = 0; i < C::kHead / 64; ++i) {
    const int chunk = warp + 4 * i;
    const uint32_t own = swizzled<64>(16 * chunk + 2 * g, 0) + 4 * t;  // others differ in bits that no sum carries into
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t raw[4];  // (8 keys each)
      load_transposed(from + swizzled<C::kHead>(32 * half + lane, chunk), raw);
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) {  // 16 keys, and one of a pair of entries
        store_shared(to + ((own ^ (2 * half + j / 2) * 16) + j % 2 * 64),
                     __byte_perm(raw[j / 2 * 2], raw[j / 2 * 2 + 1], j % 2 ? 0x7531 : 0x6420));
      }
    }
  }
}

// Scales of a tile: of its keys where they are alike, and of its values.
struct TileScale {
  float keys, values;
  bool alike;
};
template <class C>
__device__ __forceinline__ TileScale tile_scale(const AttentionOperands& at, const float* tile_scales, const int* shared_scale,
                                                int64_t batch, int64_t matrices, int64_t tiles, int tile) {
  if constexpr (C::kTiled) {
    const float* const own = tile_scales + batch * tiles + tile;
    const float keys = *own;
    return {keys, own[matrices * tiles], keys > 0.0f};
  } else if constexpr (C::kKeyScale) {
    const bool alike = keys_share_scale<C>(shared_scale, batch);
    return {alike ? load_after_flag(at.k_scale + batch * at.k_batch) : 1.0f, 1.0f, alike};
  } else {
    return {load_after_flag(at.k_scale + batch * at.k_batch), 1.0f, true};
  }
}

template <class C>
__device__ __forceinline__ void attend_block(const BlockRing<C>& ring, PipelineState<C>& at_stage, BlockLoader<C>& loader,
                                             const QueryBuffer<C>& queries, const BlockList& list, uint32_t index,
                                             const AttentionOperands& at,
                                             const float* tile_scales, const int* shared_scale, int64_t matrices, int64_t tiles,
                                             int keys, bool causal) {
  using S = BlockShape<C>;
  const int lane = threadIdx.x % 32;
  const BlockItem item(list, index);
  BlockRow<C> row;
  if constexpr (C::kTiled) cp_async_wait<0>();
  row.open(at, queries, item.batch, int(item.row) * S::kBlock);
  if constexpr (C::kTiled) queries.fetch(at, list, index + gridDim.x);
  for (int i = item.begin; i < item.end; ++i, at_stage.advance()) {
    const int stage = at_stage.stage, tile = __ldg(list.tiles + i), first = tile * S::kBlock;
    const TileScale scale = tile_scale<C>(at, tile_scales, shared_scale, item.batch, matrices, tiles, tile);
    barrier_wait(ring.full(stage), at_stage.parity());
    if (!C::kTiled && i == item.begin) {
      row.load_queries(ring.third(stage));
      warp_group::named_barrier_sync(1, S::kThreads);  // V^T takes their place
    }
    typename S::Scores score;  // (64 queries, 64 keys): a lane has 2 rows, and 2 of every 8 keys
    {
      uint32_t sums[S::kScores];  // (64, 64)
      start_products<typename S::ScoreOp, C::kHead>(row.q, ring.keys(stage), sums);
      if (threadIdx.x == 0) loader.step();
      transpose_values<C>(ring.values(stage), ring.third(stage));
      finish_products(row.q, sums);
      CUTE_UNROLL
      for (int r = 0; r < S::kScores; ++r) score[r] = __uint_as_float(sums[r]);
    }
    float factor[2] = {1.0f, 1.0f};
    if (C::kBias || (C::kKeyScale && !scale.alike)) {
      scale_scores(row, at, item.batch, first, keys, scale.alike, scale.keys, score);
    } else {
      CUTE_UNROLL
      for (int r = 0; r < S::kScores; ++r) score[r] -= kAccumulatorBias;
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {  // positive: -inf times it stays -inf
        factor[half] = max_nan(row.query_scale[half] * scale.keys, 1.17549435e-38f);
      }
    }
    if (__any_sync(~0u, first + S::kBlock > row.limit(0, keys, causal))) {
      const int limits[2] = {row.limit(0, keys, causal), row.limit(1, keys, causal)};
      CUTE_UNROLL
      for (int r = 0; r < S::kScores; ++r) {
        const int key = first + r / 4 * 8 + lane % 4 * 2 + r % 2;
        score[r] = key < limits[r / 2 % 2] ? score[r] : minus_infinity();
      }
    }
    typename S::Weights weights;  // (64, 64), bytes
    float rescale[2];
    block_softmax(row, score, factor, at.log2_max, rescale, weights);
    warp_group::fence_proxy_async_shared();
    warp_group::named_barrier_sync(1, S::kThreads);  // V^T is complete
    uint32_t values[S::kValues];  // (64, kHead)
    start_products<typename S::ValueOp, 64>(weights, ring.third(stage), values);
    finish_products(weights, values);
    ring.release(stage, lane);
    CUTE_UNROLL
    for (int r = 0; r < S::kValues; ++r) {
      const float sum = __uint_as_float(values[r]) - kAccumulatorBias;
      row.acc[r] = fmaf(row.acc[r], rescale[r / 2 % 2], C::kTiled ? sum * scale.values : sum);
    }
  }
  write_block(at, row, item.batch);
}

// starts: (patterns * block_rows + 1,); tiles: key tiles of each block of queries, increasing. queries_map: (batch * queries, kHead);
// keys_map and values_map: (batch * keys, kHead). kTiled: q, (batch, queries, kHead) Source, in place of queries_map, q_scale and
// v_scale; tile_scales: (2, batch, tiles), of K, 0 where keys have scales of their own, k_scale (batch, keys), then of V.
template <class C>
__global__ void __launch_bounds__(BlockShape<C>::kThreads, C::kResident)
attention_blocks(const __grid_constant__ TmaDescriptor queries_map, const __grid_constant__ TmaDescriptor keys_map,
                 const __grid_constant__ TmaDescriptor values_map, const int32_t* starts, const int32_t* tiles, void* out,
                 float* lse, const float* q_scale, int64_t q_stride, int64_t q_batch, const float* k_scale, int64_t k_batch,
                 const int* shared_scale, const float* v_scale, int64_t v_stride, int64_t v_batch, const float* bias,
                 int64_t bias_batch, const uint8_t* q, const float* tile_scales, float scale, float log2_max, float empty,
                 int64_t queries, int64_t keys, int64_t block_rows, int64_t batch, int64_t patterns, int64_t causal) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const BlockRing<C> ring{{shared_address(shared)}};
  const BlockList list{starts, tiles, uint32_t(block_rows * batch), uint32_t(block_rows), uint32_t(patterns)};
  ring.open();
  pdl_wait();
  BlockLoader<C> loader{ring, list, queries_map, keys_map, values_map, int(queries), int(keys)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages - 1; ++i) loader.step();
  }
  __syncwarp();
  const AttentionOperands at{q, out, lse, q_scale, k_scale, v_scale, bias, q_stride, q_batch, k_batch, v_stride, v_batch,
                             bias_batch, queries, scale, log2_max, empty};
  const QueryBuffer<C> buffer(shared_address(shared) + C::kStages * (BlockShape<C>::kStageBytes + 16));
  if constexpr (C::kTiled) buffer.fetch(at, list, blockIdx.x);
  PipelineState<C> stage;
  for (uint32_t index = blockIdx.x; index < list.items; index += gridDim.x) {
    attend_block<C>(ring, stage, loader, buffer, list, index, at, tile_scales, shared_scale, batch,
                    (keys + BlockShape<C>::kBlock - 1) / BlockShape<C>::kBlock, int(keys), causal != 0);
  }
}

}  // namespace magicube
