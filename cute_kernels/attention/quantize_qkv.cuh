// Operands of attention as integers, a byte each, by one kernel: Q with a scale a row, V with one a matrix, K with one a matrix
// where its rows are alike and with one a row elsewhere. Attention may begin while it runs, and waits for each matrix by itself.
#pragma once

#include "device/cluster.cuh"
#include "convert/quantize.cuh"

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
  cluster::sync();
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

// Where those do not decide: 1 / scale in double, as encode_exact has it, of entries inside the range; else 0.
template <class Config>
__device__ __forceinline__ double inverse_of_inside(float scale, uint32_t top) {
  const bool inside = scale < 0x1p90f && scale > 0x1p-120f && top < RealBits<float>::kInfinity;
  return inside ? inverse_of(scale) : 0.0;
}

// Largest magnitudes of vectors of entries in one word: of halves two side by side, of floats one, as bits.
template <class Q>
struct Top {
  using Source = typename Q::Source;
  static constexpr bool kHalves = sizeof(Source) == 2;
  uint32_t word = 0;

  __device__ void see(uint32_t other) { word = kHalves ? __vmaxu2(word, other) : max(word, other); }
  __device__ void see(const uint32_t (&entries)[4]) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) see(entries[i] & (kHalves ? 0x7fff7fffu : 0x7fffffffu));
  }
  // The bits of a float.
  __device__ uint32_t bits() const {
    if constexpr (!kHalves) return word;
    const uint16_t largest = uint16_t(max(word >> 16, word & 0xffff));
    return __float_as_uint(static_cast<float>(reinterpret_cast<const Source&>(largest)));
  }
};

// One matrix of rows of kHead entries, by the blocks of a cluster, a run of whole rows each. A thread has kParts vectors of
// kVec entries of a row a round; those of the first kSteps rounds stay in shared memory, where only it looks at them.
template <class Config>
struct MatrixOfRows {
  using Q = Quantizer<Config>;
  using Source = typename Q::Source;
  static constexpr int kParts = 2, kLanes = Config::kHead / Q::kVec / kParts;  // threads that share a row
  static_assert(kLanes <= 32 && Q::kThreads % kLanes == 0, "a row is in one warp");
  static constexpr bool kLeans = sizeof(Source) == 2;
  static constexpr int kApart = kLanes * Q::kVec;                      // from a thread's vector to its other one
  static constexpr int kRound = Q::kThreads / kLanes * Config::kHead;  // from one round to the next
  struct Part { uint32_t words[kParts][4]; };

  const Source* from;  // the thread's first entry
  uint8_t* to;
  float* row_scales;   // (rows,), or null where the matrix has but one
  uint32_t own;        // the thread's first vector in shared memory
  int begin, end;      // the block's part of rows * kLanes

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
  __device__ int rounds() const { return (end - begin + Q::kThreads - 1) / Q::kThreads; }  // below 1 without rows
  __device__ bool has(int round) const { return begin + int(threadIdx.x) + round * Q::kThreads < end; }
  __device__ static int64_t entry(int round, int part) { return int64_t{round} * kRound + part * kApart; }
  // Where a vector is kept.
  __device__ uint32_t kept(int round, int part) const { return own + (round * kParts + part) * Q::kThreads * 16; }
  __device__ void fetch() const {
    CUTE_UNROLL
    for (int round = 0; round < Q::kSteps; ++round) {
      CUTE_UNROLL
      for (int i = 0; i < kParts; ++i) {
        if (has(round)) cp_async(kept(round, i), from + entry(round, i), 16);
      }
      cp_async_commit();
    }
  }
  __device__ Part load_kept(int round) const {
    Part part{};
    CUTE_UNROLL
    for (int i = 0; i < kParts; ++i) {
      if (has(round)) load_shared(kept(round, i), part.words[i]);
    }
    return part;
  }
  __device__ Part load_far(int round) const {
    Part part;
    CUTE_UNROLL
    for (int i = 0; i < kParts; ++i) load<Q>(from + entry(round, i), has(round) ? Q::kVec : 0, true, entries(part, i));
    return part;
  }
  __device__ static Source (&entries(Part& part, int i))[Q::kVec] { return reinterpret_cast<Source(&)[Q::kVec]>(part.words[i]); }
  // All rounds, those in shared memory as they come: act(round, part).
  template <class Act>
  __device__ void walk(const Act& act) const {
    for_each(make_int_sequence<Q::kSteps>{}, [&](auto round) {
      cp_async_wait<Q::kSteps - 1 - round.value>();
      act(round.value, load_kept(round.value));
    });
#pragma unroll 2
    for (int round = Q::kSteps; round < rounds(); ++round) act(round, load_far(round));
  }
  // The same by little code.
  template <class Act>
  __device__ void walk_slowly(const Act& act) const {
    cp_async_wait<0>();
#pragma unroll 1
    for (int round = 0; round < rounds(); ++round) act(round, round < Q::kSteps ? load_kept(round) : load_far(round));
  }
  // Largest magnitude of the row, of which each of kLanes threads has a part.
  __device__ static uint32_t row_top(const Part& part) {
    Top<Q> top;
    CUTE_UNROLL
    for (int i = 0; i < kParts; ++i) top.see(part.words[i]);
    CUTE_UNROLL
    for (int apart = 1; apart < kLanes; apart *= 2) top.see(__shfl_xor_sync(~0u, top.word, apart));
    return top.bits();
  }
  // `sums`: whether the sum of rows' maxima is wanted.
  __device__ RowMaxima maxima(bool sums) const {
    RowMaxima found;
    if (sums) {
      walk([&](int, const Part& part) {
        const uint32_t top = row_top(part);
        found.top = max(found.top, top);
        if (threadIdx.x % kLanes == 0) found.sum += __uint_as_float(top);
      });
      return found;
    }
    Top<Q> top;
    walk([&](int, const Part& part) {
      CUTE_UNROLL
      for (int i = 0; i < kParts; ++i) top.see(part.words[i]);
    });
    found.top = top.bits();
    return found;
  }
  __device__ void put(int round, const int32_t (&codes)[kParts][Q::kVec]) const {
    CUTE_UNROLL
    for (int i = 0; i < kParts; ++i) PackedRun<8, Q::kVec>::lowest(codes[i]).store(to + entry(round, i));
  }
  // Of entries of few bits.
  __device__ void put_leaning(int round, Part part, float inverse) const {
    int32_t codes[kParts][Q::kVec];
    CUTE_UNROLL
    for (int i = 0; i < kParts * Q::kVec; ++i) {
      const float x = static_cast<float>(entries(part, i / Q::kVec)[i % Q::kVec]);
      codes[i / Q::kVec][i % Q::kVec] = __float_as_int(__fmaf_rn(x, inverse, 0x1.8p23f));
    }
    put(round, codes);
  }
  // The same of any entries inside the range, which are loaded once more.
  __device__ void put_inside(int round, double inverse) const {
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
  // Integers of a part by the scale that belongs to `top`.
  __device__ void encode(int round, Part part, uint32_t top, float scale) const {
    if (!has(round)) return;
    if constexpr (kLeans) {
      const float inverse = leaning_inverse<Config>(scale, top);
      if (inverse != 0.0f) return put_leaning(round, part, inverse);
      const double exact = inverse_of_inside<Config>(scale, top);
      if (exact != 0.0) return put_inside(round, exact);
    } else {
      const FloatInverse near(scale);
      Extremes<Q> extremes;
      extremes.top = top;
      int32_t codes[kParts][Q::kVec];
      bool sure = is_inside<Config>(extremes, near);
      CUTE_UNROLL
      for (int i = 0; i < kParts; ++i) sure &= encode_inside<Config>(entries(part, i), [&](int) { return near; }, codes[i]);
      if (sure) return put(round, codes);
    }
    const double inverse = inverse_of(scale);
#pragma unroll 1
    for (int i = 0; i < kParts; ++i) {
      encode_slowly<Config>({to, 0, true}, 0, entry(round, i), Q::kVec, from + entry(round, i), [&](int) { return inverse; });
    }
  }
  __device__ void encode_rows() const {
    walk_slowly([&](int round, const Part& part) {
      const uint32_t top = row_top(part);
      const float scale = scale_of<float, Range<Config>::kHigh>(top);
      const int at = begin + int(threadIdx.x) + round * Q::kThreads;
      if (at < end && at % kLanes == 0) row_scales[at / kLanes] = scale;
      encode(round, part, top, scale);
    });
  }
  // By one scale.
  __device__ void encode_matrix(uint32_t top, float scale) const {
    if (row_scales) {
      for (int row = begin / kLanes + int(threadIdx.x); row < end / kLanes; row += Q::kThreads) row_scales[row] = scale;
    }
    const float inverse = kLeans ? leaning_inverse<Config>(scale, top) : 0.0f;
    if (inverse != 0.0f) {
      walk([&](int round, const Part& part) {
        if (has(round)) put_leaning(round, part, inverse);
      });
    } else {
      walk_slowly([&](int round, const Part& part) { encode(round, part, top, scale); });
    }
  }
};

// q: (matrices, queries, kHead); k, v: (matrices, keys, kHead); q_scales: (matrices, queries); k_scales: (matrices, keys);
// v_scales: (matrices,); all_alike: (matrices,), whether the scales of a matrix of K are one; ready: (matrices, 3 *
// kCluster), a word for each block, 1 when what it writes is there. The next kernel may start when they are 0.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
attention_operands(const typename Config::Source* q, const typename Config::Source* k, const typename Config::Source* v,
                   uint8_t* q_out, uint8_t* k_out, uint8_t* v_out, float* q_scales, float* k_scales, float* v_scales,
                   int* all_alike, uint32_t* ready, int64_t queries, int64_t keys) {
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
    const RowMaxima maxima = meet_in_cluster<Q::kWarps, Config::kCluster>(own.maxima(which == 1), shared);
    const float scale = scale_of<float, Range<Config>::kHigh>(maxima.top);
    // false with NaN
    const bool alike = which == 2 || __uint_as_float(maxima.top) * float(keys) <= kAlike<Config> * maxima.sum;
    if (rank == 0 && threadIdx.x == 0) {
      if (which == 1) all_alike[matrix] = alike;
      else v_scales[matrix] = scale;
    }
    if (alike) own.encode_matrix(maxima.top, scale);
    else own.encode_rows();
  }
  __syncthreads();
  if (threadIdx.x == 0) flag_store_release(ready + blockIdx.x, 1);
  if (Config::kCluster > 1 && which != 0) cluster::wait();
}

}  // namespace magicube
