// Statistics of the operands of A B for a-priori error bounds: 16 slices of each, their remainders after quantization, sums
// over k.
//
// sm_80 and later. A slice is a row of A or a column of B, K elements long. `sample_lines` samples slices with probability
// proportional to their squared absmax and scales them to an absmax of one; `measure_lines` finds outlier columns of K and the
// numbers per slice; `meet_lines`, in estimate/statistics_pair.cuh, sums over k for both operands. Work: 64 columns of K or one
// slice per CTA; no pipeline. All sums are deterministic. Source: docs/lab/residual.md.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/block_reduce.cuh"

namespace magicube {

// Workspace of an operand: two doubles of facts, then forms of slices, energies of columns, slices.
template <class C>
struct SampledSide {
  double* facts;  // root of the summed squared absmax; number of slices out of range or non-finite
  float* forms;   // (kSlices, kForms)
  float* energy;  // (pitch,)
  float* slices;  // (kSlices, pitch), of absmax one
  int64_t pitch;  // K rounded up to a multiple of kChunk

  __device__ SampledSide(double* base, int64_t inner)
      : facts(base), forms(reinterpret_cast<float*>(base + C::kFacts)), energy(forms + C::kSlices * C::kForms),
        pitch((inner + C::kChunk - 1) / C::kChunk * C::kChunk) {
    slices = energy + pitch;
  }
};

// Quantities of an element, in the order of all tables: x, remainders after one and two digits, x without the mean of its
// slice and without outlier columns, each with its remainder after one digit.
enum Level { kX, kR1, kR2, kXC, kRC, kXO, kRO, kLevels };

// Forms of a slice: means of the quantities, and of elements below each of three sparse levels; shares of elements at or
// above those; the absmax of XC and of XO.
enum Form { kLight = kLevels, kAbove = kLight + 3, kAbsmaxC = kAbove + 3, kAbsmaxO };

// Uniform number in [0, 1) from a seed and an index.
__device__ __forceinline__ double random_uniform(uint64_t seed, uint64_t index) {
  uint64_t bits = seed + (index + 1) * 0x9e3779b97f4a7c15u;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((bits ^ (bits >> 31)) >> 40) * 0x1p-24;
}

// A slice is in range if its absmax is between this and its inverse.
template <class C>
inline constexpr float least = 1.0f / float(1 << C::kRangeLog2);

// Sampling of slices by a CTA from the absmax of all slices of its operand.
template <class C>
struct SliceSampler {
  static constexpr int kWarps = C::kThreads / 32;
  uint32_t maxima[1][kWarps];
  double sums[2][kWarps + 1];
  double offsets[kWarps + 1];
  float peak, per_peak;
  int slice[C::kSlices];

  __device__ static bool is_in_range(float top) { return top == 0.0f || (top >= least<C> && top <= 1.0f / least<C>); }
  // Weight of a slice, relative to the largest; out-of-range slices have none, zero slices count alike if all are zero.
  __device__ float share(float top) const {
    if (!is_in_range(top)) return 0.0f;
    const float part = peak > 0.0f ? top * per_peak : 1.0f;
    return part * part;
  }

  // Slice i is at the (i + u)-th sixteenth of the cumulative weights, u random.
  __device__ void draw(const float* absmax, int count, uint64_t seed, double* facts) {
    const int each = (count + C::kThreads - 1) / C::kThreads;
    const int begin = min(int(threadIdx.x) * each, count), end = min(begin + each, count);
    float most[1] = {0.0f};
    double numbers[2] = {0.0, 0.0};  // number of slices out of range; sum of weights
    for (int i = begin; i < end; ++i) {
      const float top = absmax[i];
      if (is_in_range(top)) most[0] = fmaxf(most[0], top);
      else numbers[0] += 1.0;
    }
    block_maxima<C::kThreads>(most, maxima);
    if (threadIdx.x == 0) peak = most[0], per_peak = 1.0f / most[0];
    if (threadIdx.x < C::kSlices) slice[threadIdx.x] = 0;
    __syncthreads();
    for (int i = begin; i < end; ++i) numbers[1] += share(absmax[i]);
    // A thread's offset is the end of its neighbor's range, so that no target falls between them.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double behind = numbers[1];
    CUTE_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      const double other = __shfl_up_sync(~0u, behind, step);
      if (lane >= step) behind += other;
    }
    double before = __shfl_up_sync(~0u, behind, 1);
    if (lane == 31) offsets[warp + 1] = behind;
    __syncthreads();
    if (threadIdx.x == 0) {
      offsets[0] = 0.0;
      for (int i = 1; i <= kWarps; ++i) offsets[i] += offsets[i - 1];
    }
    __syncthreads();
    before = lane == 0 ? offsets[warp] : offsets[warp] + before;
    behind = lane == 31 ? offsets[warp + 1] : offsets[warp] + behind;
    const double total = offsets[kWarps];
    for (int target = 0; target < C::kSlices; ++target) {
      const double at = (target + random_uniform(seed, target)) / C::kSlices * total;
      if (at >= before && at < behind) {
        double sum = before;
        int found = begin;
        for (int i = begin; i < end; ++i) {
          const float part = share(absmax[i]);
          if (part > 0.0f) found = i;
          sum += part;
          if (sum > at) break;
        }
        slice[target] = found;
      }
    }
    block_sums<C::kThreads>(numbers, sums);  // its barriers publish the slices too
    if (facts && threadIdx.x == 0) {
      facts[0] = peak * sqrt(numbers[1]);
      facts[1] = numbers[0];
    }
  }
};

// One operand: element k of slice i is x[i * slice_step + k * inner_step]; absmax (count,).
template <class Source>
struct SliceSource {
  const Source* x;
  int64_t slice_step, inner_step;
  const float* absmax;
  int64_t count;
  uint64_t seed;
  double* workspace;
};

// Write sampled slices of absmax one, and energies of columns from slices a sixteenth of all apart; a CTA has kChunk columns
// of K of one of up to two operands, blockIdx.y.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
sample_lines(const typename C::Source* x0, int64_t slice_step0, int64_t inner_step0, const float* absmax0, int64_t count0,
             int64_t seed0, double* workspace0, const typename C::Source* x1, int64_t slice_step1, int64_t inner_step1,
             const float* absmax1, int64_t count1, int64_t seed1, double* workspace1, int64_t inner, uint32_t* arrived) {
  using Source = typename C::Source;
  constexpr int kParts = C::kThreads / C::kChunk, kEach = C::kSlices / kParts;
  static_assert(kParts * C::kChunk == C::kThreads && kEach * kParts == C::kSlices, "a thread has some slices of one k");
  __shared__ SliceSampler<C> draw;
  __shared__ float energies[kParts][C::kChunk];
  const SliceSource<Source> own =
      blockIdx.y == 0
          ? SliceSource<Source>{x0, slice_step0, inner_step0, absmax0, count0, uint64_t(seed0), workspace0}
          : SliceSource<Source>{x1, slice_step1, inner_step1, absmax1, count1, uint64_t(seed1), workspace1};
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *arrived = 0;  // for a later kernel
  const SampledSide<C> side(own.workspace, inner);
  draw.draw(own.absmax, int(own.count), own.seed, blockIdx.x == 0 ? side.facts : nullptr);
  const int part = threadIdx.x / C::kChunk;
  const int64_t k = int64_t{blockIdx.x} * C::kChunk + threadIdx.x % C::kChunk;
  const int64_t apart = own.count / C::kSlices > 0 ? own.count / C::kSlices : 1;
  float entries[2][kEach];
  CUTE_UNROLL
  for (int e = 0; e < kEach; ++e) {
    const int64_t slice[2] = {draw.slice[part + e * kParts], (part + e * kParts) * apart};
    CUTE_UNROLL
    for (int set = 0; set < 2; ++set) {
      const bool in_bounds = k < inner && slice[set] < own.count;
      entries[set][e] = in_bounds ? static_cast<float>(own.x[slice[set] * own.slice_step + k * own.inner_step]) : 0.0f;
    }
  }
  float energy = 0.0f;
  CUTE_UNROLL
  for (int e = 0; e < kEach; ++e) {
    const int row = part + e * kParts;
    const int64_t other = row * apart;
    const float top = own.absmax[draw.slice[row]], other_top = other < own.count ? own.absmax[other] : 1.0f;
    side.slices[row * side.pitch + k] = __fdiv_rn(entries[0][e], fmaxf(top, 0x1p-126f));
    const float value = __fdiv_rn(entries[1][e], fmaxf(other_top, least<C>));
    energy = fmaf(value, value, energy);
  }
  energies[part][threadIdx.x % C::kChunk] = energy;
  __syncthreads();
  if (part == 0) {
    float sum = 0.0f;
    CUTE_UNROLL
    for (int p = 0; p < kParts; ++p) sum += energies[p][threadIdx.x];
    side.energy[k] = sum;  // (pitch,)
  }
}

// Largest digit, radix, and the leading digits from which an element is above each sparse level.
struct DigitFormat {
  float limit, per_limit, radix, per_radix, levels[3];

  __device__ DigitFormat(float limit_, float radix_, float level0, float level1, float level2)
      : limit(limit_), per_limit(1.0f / limit_), radix(radix_), per_radix(1.0f / radix_), levels{level0, level1, level2} {}
};

// Remainders after one and two digits of an element of a slice of absmax one; `digit` is the leading one.
__device__ __forceinline__ void residuals(float x, const DigitFormat& kind, float& digit, float& first, float& second) {
  const float scaled = __fmul_rn(x, kind.limit);
  digit = rintf(scaled);
  const float remainder = __fadd_rn(scaled, -digit), fine = __fmul_rn(remainder, kind.radix);
  const float low = fminf(fmaxf(rintf(fine), -kind.limit - 1.0f), fminf(kind.limit + 1.0f, 127.0f));
  first = remainder * kind.per_limit;
  second = (fine - low) * kind.per_limit * kind.per_radix;
}

// One digit of elements up to `top`.
struct DigitStep {
  float step, per;

  __device__ DigitStep(float top, float limit) : step(fmaxf(top, 0x1p-100f) / limit), per(limit / fmaxf(top, 0x1p-100f)) {}
  __device__ float remainder_of(float x) const { return __fmaf_rn(-rintf(x * per), step, x); }
};

// Mark outlier columns of K, (K,) bytes, and compute the forms of each slice; a CTA has one slice of an operand, blockIdx.y.
// An outlier has more than kOutlierRatio times the median energy; at most K / kOutlierDivisor columns are outliers.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
measure_lines(double* workspace0, uint8_t* outliers0, double* workspace1, uint8_t* outliers1, int64_t inner, float limit,
              float radix, float level0, float level1, float level2) {
  constexpr int kThreads = C::kThreads, kSums = 10;
  __shared__ int counts[2][2][kThreads / 32];
  __shared__ uint32_t maxima[1][kThreads / 32];
  __shared__ double sums[kSums][kThreads / 32 + 1];
  const SampledSide<C> side(blockIdx.y == 0 ? workspace0 : workspace1, inner);
  uint8_t* const outliers = blockIdx.y == 0 ? outliers0 : outliers1;
  const DigitFormat kind(limit, radix, level0, level1, level2);
  const int k_count = int(inner), most = k_count / C::kOutlierDivisor;
  float bound = __uint_as_float(0x7f800000);
  if (most > 0) {
    const int ranks[2] = {(k_count - 1) / 2, k_count - 1 - most};
    uint32_t found[2];
    select_ranks<kThreads, 0>(side.energy, k_count, ranks, found, counts);
    bound = fmaxf(float(C::kOutlierRatio) * __uint_as_float(found[0]), __uint_as_float(found[1]));
  }
  const float* slice = side.slices + blockIdx.x * side.pitch;
  double means[2] = {0.0, 0.0};  // of all elements; of those outside of outlier columns
  float absmax[1] = {0.0f};  // outside of outlier columns
  for (int k = threadIdx.x; k < k_count; k += kThreads) {
    const float x = slice[k];
    const bool outlier = side.energy[k] > bound;
    if (blockIdx.x == 0) outliers[k] = outlier;
    means[0] += x;
    means[1] += outlier ? 0.0f : x;
    absmax[0] = fmaxf(absmax[0], outlier ? 0.0f : fabsf(x));
  }
  block_sums<kThreads>(means, sums);
  block_maxima<kThreads>(absmax, maxima);
  const double per_count = 1.0 / k_count;
  const float mean = static_cast<float>(means[0] * per_count);
  float apart[1] = {0.0f};
  for (int k = threadIdx.x; k < k_count; k += kThreads) apart[0] = fmaxf(apart[0], fabsf(slice[k] - mean));
  block_maxima<kThreads>(apart, maxima);
  const DigitStep centered(apart[0], limit), masked(absmax[0], limit);
  double values[kSums] = {};  // R1, R2, RC, RO; below each level; at or above each level
  for (int k = threadIdx.x; k < k_count; k += kThreads) {
    const float x = slice[k];
    float digit, first, second;
    residuals(x, kind, digit, first, second);
    values[0] += first;
    values[1] += second;
    values[2] += centered.remainder_of(x - mean);
    values[3] += side.energy[k] > bound ? 0.0f : masked.remainder_of(x);
    CUTE_UNROLL
    for (int level = 0; level < 3; ++level) {
      const bool light = fabsf(digit) < kind.levels[level];
      values[4 + level] += light ? x : 0.0f;
      values[7 + level] += light ? 0.0 : 1.0;
    }
  }
  block_sums<kThreads>(values, sums);
  if (threadIdx.x == 0) {
    float* const to = side.forms + blockIdx.x * C::kForms;
    const double all[] = {means[0], values[0], values[1], 0.0, values[2], means[1], values[3]};  // the mean of XC is 0
    CUTE_UNROLL
    for (int i = 0; i < kLevels; ++i) to[i] = static_cast<float>(all[i] * per_count);
    CUTE_UNROLL
    for (int i = 0; i < 6; ++i) to[kLight + i] = static_cast<float>(values[4 + i] * per_count);
    to[kAbsmaxC] = apart[0];
    to[kAbsmaxO] = absmax[0];
  }
}

}  // namespace magicube
