// Quantization of attention's Q, K and V to one byte per entry, in one kernel.
//
// Formula: q = round(x / scale), scale = amax / (2^(kBits - 1) - 1). Q has per-row scales, V one scale per matrix; K one scale
// per matrix if its row amaxes are similar, else per-row scales.
// Architectures: sm_80 and later; clusters from sm_90a on.
// Work: a cluster of kCluster CTAs per matrix; each CTA has a run of whole rows, each thread two 16-byte vectors of a row.
// Pipeline: cp.async brings kSteps rounds to shared memory for both passes (amax, integers); later rounds are loaded twice. The
// attention kernel may start meanwhile (PDL) and waits for the flags of each matrix.
// Source: Li, Osawa, Hoefler, SC'22, section V-C.
#pragma once

#include "device/cluster.cuh"
#include "convert/quantize.cuh"

namespace magicube {

// The rows of K share a scale if the amax of the matrix is at most this many times the mean row amax. The ratio is 1.9 for
// 262,144 normal numbers in rows of 64. 4-bit integers are too coarse to share a scale.
template <class Config>
inline constexpr float kMaxAbsmaxRatio = Config::kBits >= 8 ? 2.5f : 0.0f;

// Amax of a set of entries, as bits, and the sum of their row amaxes.
struct RowMaxima {
  uint32_t absmax = 0;
  float sum = 0.0f;

  // Over the threads of a warp.
  __device__ void reduce_in_warp() {
    absmax = __reduce_max_sync(~0u, absmax);
    CUTE_UNROLL
    for (int lane_mask = 16; lane_mask > 0; lane_mask /= 2) sum += __shfl_xor_sync(~0u, sum, lane_mask);
  }
};

// Over the threads of a cluster, in a fixed order; kWarps is at most 32. The CTAs have then arrived at a cluster barrier;
// `shared` must not change until they have waited for it.
template <int kWarps, int kCluster>
__device__ RowMaxima reduce_in_cluster(RowMaxima maxima, RowMaxima (&shared)[kWarps + 2]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  maxima.reduce_in_warp();
  if (lane == 0) shared[warp] = maxima;
  __syncthreads();
  if (warp == 0) {
    maxima = lane < kWarps ? shared[lane] : RowMaxima{};
    maxima.reduce_in_warp();
    if (lane == 0) shared[kWarps] = maxima;
  }
  if constexpr (kCluster == 1) {
    __syncthreads();
    return shared[kWarps];
  }
  cluster::sync();
  if (warp == 0) {
    const uint32_t at = shared_address(shared + kWarps);
    maxima = RowMaxima{};
    if (lane < kCluster) maxima = {cluster::load_of(at, lane), __uint_as_float(cluster::load_of(at + 4, lane))};
    maxima.reduce_in_warp();
    if (lane == 0) shared[kWarps + 1] = maxima;
  }
  __syncthreads();
  cluster::arrive();
  return shared[kWarps + 1];
}

// 1 / scale for 16-bit floats and a scale derived from their amax, biased so that one product and one sum round correctly. A
// quotient is at least 2^-19 of itself away from the midpoint of two integers, or would be the midpoint if scale * kHigh were
// exactly the amax. In the second case the sign of amax - scale * kHigh gives the side of the quotient, and the inverse is
// biased by 2^-22 to that side. 0 if float32 cannot decide.
template <class Config>
__device__ __forceinline__ float biased_inverse(float scale, uint32_t absmax) {
  const float largest = __uint_as_float(absmax), excess = __fmaf_rn(scale, -float(Range<Config>::kHigh), largest);
  const FloatInverse fast_inverse(scale);
  const bool decided = excess != 0.0f && largest * fast_inverse.high < Range<Config>::kHigh + 0.25f;  // NaN is not
  return decided ? (fast_inverse.high + fast_inverse.low) * (excess > 0.0f ? 1.0f + 0x1p-22f : 1.0f - 0x1p-22f) : 0.0f;
}

// 1 / scale in double, as in encode_exact, for scales whose entries are in range; else 0.
template <class Config>
__device__ __forceinline__ double inverse_in_range(float scale, uint32_t absmax) {
  const bool in_range = scale < 0x1p90f && scale > 0x1p-120f && absmax < RealBits<float>::kInfinity;
  return in_range ? inverse_of(scale) : 0.0;
}

// Amax of 16-byte vectors in one word, as bits: two 16-bit floats side by side, or one float32.
template <class Q>
struct PackedAbsmax {
  using Source = typename Q::Source;
  static constexpr bool kIs16Bit = sizeof(Source) == 2;
  static constexpr uint32_t kMagnitude = kIs16Bit ? 0x7fff7fffu : 0x7fffffffu;
  uint32_t word = 0;

  __device__ void update(uint32_t other) { word = kIs16Bit ? __vmaxu2(word, other) : max(word, other); }
  __device__ void update(const uint32_t (&entries)[4]) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) update(entries[i] & kMagnitude);
  }
  // As float32 bits.
  __device__ uint32_t bits() const {
    if constexpr (!kIs16Bit) return word;
    const uint16_t largest = uint16_t(max(word >> 16, word & 0xffff));
    return __float_as_uint(static_cast<float>(reinterpret_cast<const Source&>(largest)));
  }
};

// One matrix of rows of kHead entries; each CTA of the cluster has a run of whole rows. A thread has kParts vectors of kVec
// entries of a row per round. Those of the first kSteps rounds stay in shared memory, private to the thread.
template <class Config>
struct MatrixOfRows {
  using Q = Quantizer<Config>;
  using Source = typename Q::Source;
  static constexpr int kParts = 2, kLanes = Config::kHead / Q::kVec / kParts;  // threads per row
  static_assert(kLanes <= 32 && Q::kThreads % kLanes == 0, "a row must be in one warp");
  static constexpr bool kHasBiasedInverse = sizeof(Source) == 2;
  static constexpr int kPartOffset = kLanes * Q::kVec;                      // entries between the two vectors of a thread
  static constexpr int kRound = Q::kThreads / kLanes * Config::kHead;  // entries per round
  struct Part { uint32_t words[kParts][4]; };

  const Source* from;  // the thread's first entry
  uint8_t* to;
  float* row_scales;   // (rows,) float32, or null if the matrix has one scale
  uint32_t own;        // the thread's first vector in shared memory
  int begin, end;      // part of the CTA, in units of rows * kLanes

  __device__ MatrixOfRows(const Source* matrix, uint8_t* out, float* row_scales_, uint32_t shared, int rows, int rank)
      : row_scales(row_scales_), own(shared + threadIdx.x * 16) {
    const int each = (rows + Config::kCluster - 1) / Config::kCluster * kLanes;
    begin = rank * each;
    end = min(begin + each, rows * kLanes);
    const int at = begin + int(threadIdx.x);
    const int64_t first = int64_t{at / kLanes} * Config::kHead + at % kLanes * Q::kVec;
    from = matrix + first;
    to = out + first;
  }
  __device__ int rounds() const { return (end - begin + Q::kThreads - 1) / Q::kThreads; }  // 0 without rows
  __device__ bool has(int round) const { return begin + int(threadIdx.x) + round * Q::kThreads < end; }
  __device__ static int64_t entry(int round, int part) { return int64_t{round} * kRound + part * kPartOffset; }
  // Shared-memory address of a vector.
  __device__ uint32_t smem_address(int round, int part) const { return own + (round * kParts + part) * Q::kThreads * 16; }
  __device__ void fetch() const {
    CUTE_UNROLL
    for (int round = 0; round < Q::kSteps; ++round) {
      CUTE_UNROLL
      for (int i = 0; i < kParts; ++i) {
        if (has(round)) cp_async(smem_address(round, i), from + entry(round, i), 16);
      }
      cp_async_commit();
    }
  }
  __device__ Part load_from_shared(int round) const {
    Part part{};
    CUTE_UNROLL
    for (int i = 0; i < kParts; ++i) {
      if (has(round)) load_shared(smem_address(round, i), part.words[i]);
    }
    return part;
  }
  __device__ Part load_from_global(int round) const {
    Part part;
    CUTE_UNROLL
    for (int i = 0; i < kParts; ++i) load<Q>(from + entry(round, i), has(round) ? Q::kVec : 0, true, entries(part, i));
    return part;
  }
  __device__ static Source (&entries(Part& part, int i))[Q::kVec] {
    return reinterpret_cast<Source(&)[Q::kVec]>(part.words[i]);
  }
  // Call act(round, part) for all rounds, those in shared memory as they arrive.
  template <class Act>
  __device__ void for_each_round(const Act& act) const {
    for_each(make_int_sequence<Q::kSteps>{}, [&](auto round) {
      cp_async_wait<Q::kSteps - 1 - round.value>();
      act(round.value, load_from_shared(round.value));
    });
#pragma unroll 2
    for (int round = Q::kSteps; round < rounds(); ++round) act(round, load_from_global(round));
  }
  // The same with small code.
  template <class Act>
  __device__ void for_each_round_compact(const Act& act) const {
    cp_async_wait<0>();
#pragma unroll 1
    for (int round = 0; round < rounds(); ++round) {
      act(round, round < Q::kSteps ? load_from_shared(round) : load_from_global(round));
    }
  }
  // Row amax; each of kLanes threads has a part of the row.
  __device__ static uint32_t row_absmax(const Part& part) {
    PackedAbsmax<Q> absmax;
    CUTE_UNROLL
    for (int i = 0; i < kParts; ++i) absmax.update(part.words[i]);
    CUTE_UNROLL
    for (int lane_mask = 1; lane_mask < kLanes; lane_mask *= 2) absmax.update(__shfl_xor_sync(~0u, absmax.word, lane_mask));
    return absmax.bits();
  }
  // sums: compute the sum of the row amaxes.
  __device__ RowMaxima maxima(bool sums) const {
    RowMaxima found;
    if (sums) {
      for_each_round([&](int, const Part& part) {
        const uint32_t absmax = row_absmax(part);
        found.absmax = max(found.absmax, absmax);
        if (threadIdx.x % kLanes == 0) found.sum += __uint_as_float(absmax);
      });
      return found;
    }
    PackedAbsmax<Q> absmax;
    for_each_round([&](int, const Part& part) {
      CUTE_UNROLL
      for (int i = 0; i < kParts; ++i) absmax.update(part.words[i]);
    });
    found.absmax = absmax.bits();
    return found;
  }
  __device__ void store_codes(int round, const int32_t (&codes)[kParts][Q::kVec]) const {
    CUTE_UNROLL
    for (int i = 0; i < kParts; ++i) PackedRun<8, Q::kVec>::lowest(codes[i]).store(to + entry(round, i));
  }
  // Encode 16-bit floats by a biased inverse.
  __device__ void store_biased(int round, Part part, float inverse) const {
    int32_t codes[kParts][Q::kVec];
    CUTE_UNROLL
    for (int i = 0; i < kParts * Q::kVec; ++i) {
      const float x = static_cast<float>(entries(part, i / Q::kVec)[i % Q::kVec]);
      codes[i / Q::kVec][i % Q::kVec] = __float_as_int(__fmaf_rn(x, inverse, 0x1.8p23f));
    }
    store_codes(round, codes);
  }
  // Encode any entries that are in range; loads them again.
  __device__ void store_in_range(int round, double inverse) const {
#pragma unroll 1
    for (int i = 0; i < kParts; ++i) {
      Source x[Q::kVec];
      load<Q>(from + entry(round, i), Q::kVec, true, x);
      int32_t codes[Q::kVec];
      CUTE_UNROLL
      for (int j = 0; j < Q::kVec; ++j) {
        codes[j] = __double2loint(__dadd_rn(__dmul_rn(static_cast<float>(x[j]), inverse), 0x1.8p52));
      }
      PackedRun<8, Q::kVec>::lowest(codes).store(to + entry(round, i));
    }
  }
  // Encode a part by the scale of `absmax`.
  __device__ void encode(int round, Part part, uint32_t absmax, float scale) const {
    if (!has(round)) return;
    if constexpr (kHasBiasedInverse) {
      const float inverse = biased_inverse<Config>(scale, absmax);
      if (inverse != 0.0f) return store_biased(round, part, inverse);
      const double exact = inverse_in_range<Config>(scale, absmax);
      if (exact != 0.0) return store_in_range(round, exact);
    } else {
      const FloatInverse fast_inverse(scale);
      AbsmaxState<Q> state;
      state.absmax = absmax;
      int32_t codes[kParts][Q::kVec];
      bool decided = is_in_range<Config>(state, fast_inverse);
      CUTE_UNROLL
      for (int i = 0; i < kParts; ++i) {
        decided &= encode_in_range<Config>(entries(part, i), [&](int) { return fast_inverse; }, codes[i]);
      }
      if (decided) return store_codes(round, codes);
    }
    const double inverse = inverse_of(scale);
#pragma unroll 1
    for (int i = 0; i < kParts; ++i) {
      encode_exact_run<Config>({to, 0, true}, 0, entry(round, i), Q::kVec, from + entry(round, i),
                               [&](int) { return inverse; });
    }
  }
  __device__ void encode_rows() const {
    for_each_round_compact([&](int round, const Part& part) {
      const uint32_t absmax = row_absmax(part);
      const float scale = scale_of<float, Range<Config>::kHigh>(absmax);
      const int at = begin + int(threadIdx.x) + round * Q::kThreads;
      if (at < end && at % kLanes == 0) row_scales[at / kLanes] = scale;
      encode(round, part, absmax, scale);
    });
  }
  // One scale for the matrix.
  __device__ void encode_matrix(uint32_t absmax, float scale) const {
    if (row_scales) {
      for (int row = begin / kLanes + int(threadIdx.x); row < end / kLanes; row += Q::kThreads) row_scales[row] = scale;
    }
    const float inverse = kHasBiasedInverse ? biased_inverse<Config>(scale, absmax) : 0.0f;
    if (inverse != 0.0f) {
      for_each_round([&](int round, const Part& part) {
        if (has(round)) store_biased(round, part, inverse);
      });
    } else {
      for_each_round_compact([&](int round, const Part& part) { encode(round, part, absmax, scale); });
    }
  }
};

// q: (matrices, queries, kHead); k, v: (matrices, keys, kHead); q_scales: (matrices, queries); k_scales: (matrices, keys);
// v_scales: (matrices,); shared_scales: (matrices,), whether a matrix of K has one scale; ready: (matrices, 3 * kCluster), one
// word per CTA, 1 once its output is written. The next kernel may start once they are 0.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
attention_operands(const typename Config::Source* q, const typename Config::Source* k, const typename Config::Source* v,
                   uint8_t* q_out, uint8_t* k_out, uint8_t* v_out, float* q_scales, float* k_scales, float* v_scales,
                   int* shared_scales, uint32_t* ready, int64_t queries, int64_t keys) {
  using M = MatrixOfRows<Config>;
  using Q = Quantizer<Config>;
  extern __shared__ __align__(16) uint8_t vectors[];
  __shared__ RowMaxima shared[Q::kWarps + 2];
  const uint32_t number = blockIdx.x / Config::kCluster;
  const int64_t matrix = number / 3;
  const int rank = int(blockIdx.x % Config::kCluster), which = int(number % 3);
  const int64_t rows = which == 0 ? queries : keys, place = matrix * rows * Config::kHead;
  const M own((which == 0 ? q : which == 1 ? k : v) + place, (which == 0 ? q_out : which == 1 ? k_out : v_out) + place,
              which == 0 ? q_scales + matrix * queries : which == 1 ? k_scales + matrix * keys : nullptr,
              shared_address(vectors), int(rows), rank);
  griddepcontrol_wait();
  own.fetch();
  if (threadIdx.x == 0) {
    ready[blockIdx.x] = 0;
    __threadfence();
  }
  __syncthreads();
  pdl_launch_dependents();
  if (which == 0) {
    own.encode_rows();
  } else {
    const RowMaxima maxima = reduce_in_cluster<Q::kWarps, Config::kCluster>(own.maxima(which == 1), shared);
    const float scale = scale_of<float, Range<Config>::kHigh>(maxima.absmax);
    // False for NaN.
    const bool shared_scale =
        which == 2 || __uint_as_float(maxima.absmax) * float(keys) <= kMaxAbsmaxRatio<Config> * maxima.sum;
    if (rank == 0 && threadIdx.x == 0) {
      if (which == 1) shared_scales[matrix] = shared_scale;
      else v_scales[matrix] = scale;
    }
    if (shared_scale) own.encode_matrix(maxima.absmax, scale);
    else own.encode_rows();
  }
  __syncthreads();
  if (threadIdx.x == 0) flag_store_release(ready + blockIdx.x, 1);
  if (Config::kCluster > 1 && which != 0) cluster::wait();
}

}  // namespace magicube
