// Vectors of the passes in look.cuh as fixed-point numbers, in the order of the Tensor Core's fragments.
//
// Formula: v = unit * r, r = round(v / unit) = sum_d digit_d 256^(kDigits - 1 - d), all digits signed bytes. One unit per list of
// vectors, so that integer sums over their entries are exact; the rounding is at most half a unit per entry.
// Architectures: sm_80 and later. Work: a CTA packs a step of 32 entries, after it has read the norms of all entries.
#pragma once

#include "device/copy.cuh"

namespace magicube {

constexpr int kProbes = 16, kStep = 32;  // vectors; entries of a step, as many as an MMA adds up
constexpr int kPackThreads = 256, kPackWarps = kPackThreads / 32;
constexpr int kProbeDigits = 3, kVectorDigits = 3;
constexpr double kLargest = 127.0 * 65536.0;  // what three digits reach

// Exponent of two of the last digit of kPlanes digits of 8 bits.
__host__ __device__ constexpr int tail_of(int planes) { return 8 * (planes - 1); }
// Least exponents of the integers that stand for what the digits leave, in the pass over B and over A; see look.cuh.
__host__ __device__ constexpr int right_fine(int planes) { return tail_of(planes) + 21; }
__host__ __device__ constexpr int left_fine(int planes) { return tail_of(planes) + 14; }

// Largest of value(list, i), i < count, of each list, and the sum of the first one, in all threads.
template <int kLists, class Value>
__device__ __forceinline__ void largest_and_sum(int64_t count, const Value& value, float (&largest)[kLists], double& sum) {
  constexpr int kBatch = 8;  // loads of a list on their way
  __shared__ float most[kLists][kPackWarps];
  __shared__ double sums[kPackWarps];
  sum = 0.0;
  CUTE_UNROLL
  for (int list = 0; list < kLists; ++list) largest[list] = 0.0f;
  for (int64_t first = threadIdx.x; first < count; first += kBatch * kPackThreads) {
    float x[kLists][kBatch];
    const int64_t left = count - first;
    CUTE_UNROLL
    for (int b = 0; b < kBatch; ++b) {
      CUTE_UNROLL
      for (int list = 0; list < kLists; ++list) x[list][b] = b * kPackThreads < left ? value(list, first + b * kPackThreads) : 0.0f;
    }
    CUTE_UNROLL
    for (int b = 0; b < kBatch; ++b) {
      sum += x[0][b];
      CUTE_UNROLL
      for (int list = 0; list < kLists; ++list) largest[list] = fmaxf(largest[list], x[list][b]);
    }
  }
  CUTE_UNROLL
  for (int lane = 16; lane > 0; lane /= 2) {
    sum += __shfl_xor_sync(~0u, sum, lane);
    CUTE_UNROLL
    for (int list = 0; list < kLists; ++list) largest[list] = fmaxf(largest[list], __shfl_xor_sync(~0u, largest[list], lane));
  }
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = sum;
    CUTE_UNROLL
    for (int list = 0; list < kLists; ++list) most[list][threadIdx.x / 32] = largest[list];
  }
  __syncthreads();
  sum = 0.0;
  CUTE_UNROLL
  for (int warp = 0; warp < kPackWarps; ++warp) {
    sum += sums[warp];
    CUTE_UNROLL
    for (int list = 0; list < kLists; ++list) largest[list] = fmaxf(largest[list], most[list][warp]);
  }
}

// A lane's numbers of a step: entries 4t..4t+3 and 16+4t..16+4t+3 of vectors g and g + 8.
using LaneValues = float[4][4];  // (vectors and entries, entry)

__device__ __forceinline__ int entry_of(int lane, int w, int i) { return 16 * (w % 2) + 4 * (lane % 4) + i; }

// to = load(entry, vector).
template <class Load>
__device__ __forceinline__ void load_lane(int lane, const Load& load, LaneValues& to) {
  CUTE_UNROLL
  for (int w = 0; w < 4; ++w) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) to[w][i] = load(entry_of(lane, w, i), 8 * (w / 2) + lane / 4);
  }
}

// A lane's words of a step, digit by digit; an entry's numbers are multiplied by inverse(entry).
template <int kDigits, class Inverse>
__device__ __forceinline__ void pack_lane(int lane, const LaneValues& values, const Inverse& inverse, uint4 (&to)[kDigits]) {
  uint32_t words[kDigits][4] = {};  // (digit, vectors and entries)
  CUTE_UNROLL
  for (int w = 0; w < 4; ++w) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      int rest = __double2int_rn(values[w][i] * inverse(entry_of(lane, w, i)));
      CUTE_UNROLL
      for (int d = kDigits - 1; d >= 0; --d) {
        const int digit = int8_t(rest);
        words[d][w] |= uint32_t(uint8_t(digit)) << (8 * i);
        rest = (rest - digit) >> 8;
      }
    }
  }
  CUTE_UNROLL
  for (int d = 0; d < kDigits; ++d) to[d] = make_uint4(words[d][0], words[d][1], words[d][2], words[d][3]);
}

// Probes times the scales of B's columns: w (pitch, 16) and norms (pitch) of `count` columns to out (pitch / 32, 3, 32 lanes);
// units (pitch): 1 / scale and scale; numbers (2): the unit, and the sum of scale times norm.
template <class C>
__global__ void __launch_bounds__(kPackThreads)
look_probes(const float* w, const float* norms, const float* scales, int64_t count, uint4* out, float2* units, double* numbers) {
  pdl_wait();
  const int64_t first = int64_t{blockIdx.x} * kStep;
  const auto exists = [&](int entry) { return first + entry < count; };
  LaneValues values = {};
  if (threadIdx.x < 32) {  // on their way while the norms are
    load_lane(threadIdx.x, [&](int entry, int vector) {
      return exists(entry) ? __ldg(w + (first + entry) * kProbes + vector) : 0.0f;
    }, values);
  }
  float most[1];
  double sum;
  largest_and_sum(count, [&](int, int64_t i) { return __ldg(scales + i) * __ldg(norms + i); }, most, sum);
  const float largest = most[0];
  const double unit = largest > 0.0f ? double(largest) * (1.0 + 0x1p-20) / kLargest : 1.0;  // the products are rounded
  if (blockIdx.x == 0 && threadIdx.x == 0) numbers[0] = unit, numbers[1] = sum * (1.0 + 0x1p-20);
  if (threadIdx.x >= 32) return;
  const int64_t own = first + threadIdx.x;
  const float scale = own < count ? __ldg(scales + own) : 1.0f;
  units[own] = make_float2(__frcp_rn(scale), scale);
  const double inverse = 1.0 / unit;
  uint4 packed[kProbeDigits];
  pack_lane(threadIdx.x, values, [&](int entry) {
    return exists(entry) ? __ldg(scales + first + entry) * inverse : 0.0;
  }, packed);
  CUTE_UNROLL
  for (int d = 0; d < kProbeDigits; ++d) out[(int64_t{blockIdx.x} * kProbeDigits + d) * 32 + threadIdx.x] = packed[d];
}

// What the noise of the pass over A follows from, per unit of the scale of a row; see look.cuh.
template <int kPlanes>
struct LookNoise {
  double beta[kPlanes + 1];  // bound of the norm of the error of an entry of V_j as it is packed
  double vectors, rows;      // sum of the norms of V_0; entries

  // Bound of |d_j X| / scale.
  __device__ static double reach(int j) { return j == 0 ? 127.5 : (j < kPlanes ? 0.51 : 1.0) * exp2_of(-8 * (j - 1)); }
  __device__ static double exp2_of(int exponent) { return __longlong_as_double((1023ll + exponent) << 52); }

  // What a row of X adds to beta[r] sum |x|, for r digits; `unit`: of V_0.
  __device__ double of_row(int r, double unit) const {
    double sum = reach(1) * beta[r] + reach(r) * beta[0];
    for (int i = 1; i < r; ++i) sum += 128.0 * exp2_of(-8 * i) * beta[r - i];
    const double fine = exp2_of(-left_fine(kPlanes));
    return rows * (sum + 255.0 * 128.0 * 4.0 * fine * unit) + 0.51 * fine * vectors;  // the product of the last digits is left out
  }
};

// The vectors V_j = (d_j B) W, j <= kPlanes, of look_right: v (kPlanes + 1, pitch, 16), norms (kPlanes + 1, pitch) to
// out (pitch / 32, kPlanes + 1, 3, 32 lanes). The unit of V_j is that of V_0 / 256^j. numbers (5): 65536 units of V_0; beta of both
// errors, and what a row adds.
template <class C>
__global__ void __launch_bounds__(kPackThreads)
look_vectors(const float* v, const float* norms, int64_t pitch, const double* probe_numbers, int64_t rows, int64_t columns,
             uint4* out, double* numbers) {
  pdl_wait();
  constexpr int kPlanes = C::kPlanes, kInputs = kPlanes + 1;
  using Noise = LookNoise<kPlanes>;
  Noise noise;
  noise.rows = double(rows);
  float most[kInputs];
  largest_and_sum(pitch, [&](int j, int64_t i) { return __ldg(norms + j * pitch + i); }, most, noise.vectors);
  double largest = 0.0;
  CUTE_UNROLL
  for (int j = 0; j < kInputs; ++j) largest = fmax(largest, double(most[j]) * Noise::exp2_of(8 * j));
  const double unit = largest > 0.0 ? largest / kLargest : 1.0;
  const int64_t first = int64_t{blockIdx.x} * kStep;
  for (int task = threadIdx.x; task < 32 * kInputs; task += kPackThreads) {
    const int lane = task % 32, j = task / 32;
    const double inverse = Noise::exp2_of(8 * j) / unit;
    uint4 packed[kVectorDigits];
    LaneValues values;
    load_lane(lane, [&](int entry, int vector) { return __ldg(v + (j * pitch + first + entry) * kProbes + vector); }, values);
    pack_lane(lane, values, [&](int) { return inverse; }, packed);
    CUTE_UNROLL
    for (int d = 0; d < kVectorDigits; ++d) out[((blockIdx.x * kInputs + j) * int64_t{kVectorDigits} + d) * 32 + lane] = packed[d];
  }
  if (blockIdx.x > 0 || threadIdx.x > 0) return;
  const double probe_unit = probe_numbers[0], fine = Noise::exp2_of(-right_fine(kPlanes)), count = double(columns);
  for (int j = 0; j < kInputs; ++j) {
    // Of V_j: the integers of the rest, 3/4 of a unit at most; the digits of the probes, half a unit; the product of the last ones;
    // float32. Then half a unit of V_j. A norm of 16 equal numbers is four of them.
    const double computed = 0.75 * fine * probe_numbers[1] + Noise::reach(j) * 2.0 * count * probe_unit +
                            255.0 * 128.0 * 4.0 * fine * count * probe_unit + 0x1p-23 * most[j];
    noise.beta[j] = computed + 2.01 * unit * Noise::exp2_of(-8 * j);
  }
  numbers[0] = 65536.0 * unit;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    numbers[1 + r] = noise.beta[kPlanes - 1 + r];
    numbers[3 + r] = noise.of_row(kPlanes - 1 + r, unit);
  }
}

}  // namespace magicube
