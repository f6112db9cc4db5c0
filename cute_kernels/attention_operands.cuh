// Operands of attention as integers, a byte each, by one kernel: Q with a scale a row, V with one a matrix, K with one a matrix
// where its rows are alike and with one a row elsewhere.
#pragma once

#include "cluster.cuh"
#include "quantize.cuh"

namespace magicube {

// Rows are alike if the largest magnitude of the matrix is at most this many times the mean of theirs. Of 262,144 normal
// numbers in rows of 64 it is 1.9. Integers of 4 bits are too coarse to share a scale.
template <class Config>
inline constexpr float kAlike = Config::kBits >= 8 ? 2.5f : 0.0f;

// What is known of entries: their largest magnitude, as bits, and the sum of the largest ones of their rows.
struct RowMaxima {
  uint32_t top = 0;
  float sum = 0.0f;

  // Of all threads of a warp.
  __device__ void meet_in_warp() {
    top = __reduce_max_sync(~0u, top);
    CUTE_UNROLL
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  }
};

// Of all threads of a cluster, in an order that is always the same; kWarps is at most 32. `shared` must stay as it is until
// the blocks of the cluster have met again: they have arrived for that.
template <int kWarps, int kCluster>
__device__ RowMaxima meet_in_cluster(RowMaxima maxima, RowMaxima (&shared)[kWarps + 2]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  maxima.meet_in_warp();
  if (lane == 0) shared[warp] = maxima;
  __syncthreads();
  if (warp == 0) {
    maxima = lane < kWarps ? shared[lane] : RowMaxima{};
    maxima.meet_in_warp();
    if (lane == 0) shared[kWarps] = maxima;
  }
  if constexpr (kCluster == 1) {
    __syncthreads();
    return shared[kWarps];
  }
  cluster::meet();
  if (warp == 0) {
    const uint32_t at = shared_address(shared + kWarps);
    maxima = RowMaxima{};
    if (lane < kCluster) maxima = {cluster::load_of(at, lane), __uint_as_float(cluster::load_of(at + 4, lane))};
    maxima.meet_in_warp();
    if (lane == 0) shared[kWarps + 1] = maxima;
  }
  __syncthreads();
  cluster::arrive();
  return shared[kWarps + 1];
}

// 1 / scale for entries of few bits and a scale that was derived from their largest magnitude, so that one product and one sum
// round them. A quotient then is either at least 2^-19 of itself away from the middle of two integers, or would be there if
// scale * kHigh were `top`; as it is not, the sign of what it lacks tells on which side the quotient is. The inverse is off
// by 2^-22, to that side. 0 where floats do not decide.
template <class Config>
__device__ __forceinline__ float leaning_inverse(float scale, uint32_t top) {
  const float largest = __uint_as_float(top), lack = __fmaf_rn(scale, -float(Range<Config>::kHigh), largest);
  const FloatInverse near(scale);
  const bool decided = lack != 0.0f && largest * near.high < Range<Config>::kHigh + 0.25f;  // NaN is not
  return decided ? (near.high + near.low) * (lack > 0.0f ? 1.0f + 0x1p-22f : 1.0f - 0x1p-22f) : 0.0f;
}

// One matrix of rows of kHead entries, by the blocks of a cluster, a run of whole rows each. A thread has kParts vectors of
// kVec entries of a row.
template <class Config>
struct MatrixOfRows {
  using Q = Quantizer<Config>;
  using Source = typename Q::Source;
  static constexpr int kParts = 2, kLanes = Config::kHead / Q::kVec / kParts;  // threads that share a row
  static_assert(kLanes <= 32 && Q::kThreads % kLanes == 0, "a row is in one warp");
  static constexpr bool kLeans = sizeof(Source) == 2;
  struct alignas(16) Part { Source x[kParts][Q::kVec]; };

  const Source* from;
  uint8_t* to;
  float* row_scales;  // (rows,), or null where the matrix has but one
  int begin, end;     // the block's part of rows * kLanes

  __device__ MatrixOfRows(const Source* from_, uint8_t* to_, float* row_scales_, int rows, int rank)
      : from(from_), to(to_), row_scales(row_scales_) {
    const int each = (rows + Config::kCluster - 1) / Config::kCluster * kLanes;
    begin = rank * each;
    end = min(begin + each, rows * kLanes);
  }
  __device__ int rounds() const { return (end - begin + Q::kThreads - 1) / Q::kThreads; }  // below 1 without rows
  __device__ int place(int round) const { return begin + round * Q::kThreads + int(threadIdx.x); }
  // The entry at which a thread's vector begins.
  __device__ static int64_t entry(int at, int part) {
    return int64_t{at / kLanes} * Config::kHead + (part * kLanes + at % kLanes) * Q::kVec;
  }
  __device__ void fetch(int round, Part& part) const {
    const int at = place(round);
    CUTE_UNROLL
    for (int i = 0; i < kParts; ++i) load<Q>(from + entry(at, i), at < end ? Q::kVec : 0, true, part.x[i]);
  }
  // Largest magnitude of the row, of which each of kLanes threads has a part.
  __device__ static uint32_t row_top(const Part& part) {
    Extremes<Q> extremes;
    CUTE_UNROLL
    for (int i = 0; i < kParts; ++i) extremes.see(part.x[i]);
    CUTE_UNROLL
    for (int apart = 1; apart < kLanes; apart *= 2) {
      extremes.top = max(extremes.top, __shfl_xor_sync(~0u, extremes.top, apart));
    }
    return extremes.top;
  }
  __device__ void see(const Part& part, RowMaxima& maxima) const {
    const uint32_t top = row_top(part);
    maxima.top = max(maxima.top, top);
    if (threadIdx.x % kLanes == 0) maxima.sum += __uint_as_float(top);
  }
  // Integers of a part; `top` and `scale`: of the matrix, and `alike` whether its rows share them.
  __device__ void encode(int round, const Part& part, uint32_t top, float scale, bool alike) const {
    const int at = place(round);
    if (!alike) {
      top = row_top(part);
      scale = scale_of<float, Range<Config>::kHigh>(top);
    }
    if (at >= end) return;
    if (row_scales && at % kLanes == 0) row_scales[at / kLanes] = scale;
    bool sure = true;
    int32_t codes[kParts][Q::kVec];
    if constexpr (kLeans) {
      const float inverse = leaning_inverse<Config>(scale, top);
      sure = inverse != 0.0f;
      CUTE_UNROLL
      for (int i = 0; i < kParts * Q::kVec; ++i) {
        const float x = static_cast<float>(part.x[i / Q::kVec][i % Q::kVec]);
        codes[i / Q::kVec][i % Q::kVec] = __float_as_int(__fmaf_rn(x, inverse, 0x1.8p23f));
      }
    } else {
      const FloatInverse near(scale);
      Extremes<Q> extremes;
      extremes.top = top;
      sure = is_inside<Config>(extremes, near);
      CUTE_UNROLL
      for (int i = 0; i < kParts; ++i) sure &= encode_inside<Config>(part.x[i], [&](int) { return near; }, codes[i]);
    }
    const Output out{to, 0, true};
    CUTE_UNROLL
    for (int i = 0; i < kParts; ++i) {
      if (sure) put<Config>(out, 0, entry(at, i), Q::kVec, PackedRun<8, Q::kVec>::lowest(codes[i]));
    }
    if (sure) return;
    const double inverse = inverse_of(scale);
#pragma unroll 1
    for (int i = 0; i < kParts; ++i) {
      encode_slowly<Config>(out, 0, entry(at, i), Q::kVec, from + entry(at, i), [&](int) { return inverse; });
    }
  }
  // The rounds behind the first kSteps, as many at a time, whose parts are on their way together; act(round, part).
  template <class Act>
  __device__ void walk(const Act& act) const {
    for (int round = Q::kSteps; round < rounds(); round += Q::kSteps) {
      Part parts[Q::kSteps];
      CUTE_UNROLL
      for (int s = 0; s < Q::kSteps; ++s) fetch(round + s, parts[s]);
      CUTE_UNROLL
      for (int s = 0; s < Q::kSteps; ++s) act(round + s, parts[s]);
    }
  }
};

// q: (matrices, queries, kHead); k, v: (matrices, keys, kHead); q_scales: (matrices, queries); k_scales: (matrices, keys);
// v_scales: (matrices,); all_alike: (matrices,), whether the scales of a matrix of K are one.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
attention_operands(const typename Config::Source* q, const typename Config::Source* k, const typename Config::Source* v,
                   uint8_t* q_out, uint8_t* k_out, uint8_t* v_out, float* q_scales, float* k_scales, float* v_scales,
                   int* all_alike, int64_t queries, int64_t keys) {
  using M = MatrixOfRows<Config>;
  using Q = Quantizer<Config>;
  using Part = typename M::Part;
  __shared__ RowMaxima shared[Q::kWarps + 2];
  wait_for_predecessor();
  const uint32_t number = blockIdx.x / Config::kCluster;
  const int64_t matrix = number / 3;
  const int rank = int(blockIdx.x % Config::kCluster), which = int(number % 3);
  const int64_t rows = which == 0 ? queries : keys, place = matrix * rows * Config::kHead;
  const M own((which == 0 ? q : which == 1 ? k : v) + place, (which == 0 ? q_out : which == 1 ? k_out : v_out) + place,
              which == 0 ? q_scales + matrix * queries : which == 1 ? k_scales + matrix * keys : nullptr, int(rows), rank);
  Part held[Q::kSteps];  // the first rounds; others of K and V are loaded twice
  CUTE_UNROLL
  for (int s = 0; s < Q::kSteps; ++s) own.fetch(s, held[s]);
  RowMaxima maxima;
  float scale = 1.0f;
  bool alike = false;
  if (which != 0) {
    CUTE_UNROLL
    for (int s = 0; s < Q::kSteps; ++s) own.see(held[s], maxima);
    own.walk([&](int, const Part& part) { own.see(part, maxima); });
    maxima = meet_in_cluster<Q::kWarps, Config::kCluster>(maxima, shared);
    scale = scale_of<float, Range<Config>::kHigh>(maxima.top);
    // false with NaN
    alike = which == 2 || __uint_as_float(maxima.top) * float(keys) <= kAlike<Config> * maxima.sum;
    if (rank == 0 && threadIdx.x == 0) {
      if (which == 1) all_alike[matrix] = alike;
      else v_scales[matrix] = scale;
    }
  }
  CUTE_UNROLL
  for (int s = 0; s < Q::kSteps; ++s) own.encode(s, held[s], maxima.top, scale, alike);
  own.walk([&](int round, const Part& part) { own.encode(round, part, maxima.top, scale, alike); });
  if (Config::kCluster > 1 && which != 0) cluster::wait();
}

}  // namespace magicube
