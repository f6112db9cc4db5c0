// Digit planes of a real matrix in one pass: a scale a row or a column, then x = scale (q0 + q1 / radix + q2 / radix^2).
//
// scale = max|x| / high, rounded up, so that |x| <= high * scale; or the next power of two. Rows and columns of tiny
// numbers are multiplied by 2^100 first, so that nothing below is denormal but the scale itself. Every operation rounds
// once, in the order of the CPU's version, which therefore gives the same integers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/warpgroup.cuh"
#include "device/packed_int.cuh"

namespace magicube {

constexpr uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000, kNoNumber = 0x7fc00000;

// How a scale and its digits are made.
struct DigitRule {
  float high, radix;  // largest leading digit; 2^bits
  float ahead[2];     // added before the first and the second rounding, so that what is left is in the later digits' reach
  bool power;         // the scale is a power of two
};

// Factors of one row or column.
struct DigitScale {
  float lift, inverse, unit;  // 1 or 2^100; 1 / (scale lift); scale lift. All 0 where an entry is not finite.
};

__device__ __forceinline__ float exponent_bias_factor(float x) { return x < 0x1p-100f ? 0x1p100f : 1.0f; }
// 1 / x for powers of two.
__device__ __forceinline__ float inverse_power(float x) { return __uint_as_float((254u << 23) - __float_as_uint(x)); }

// From the bits of the largest magnitude; 1 for zeros, NaN where an entry is not finite.
__device__ __forceinline__ float digit_scale(uint32_t top, const DigitRule& rule) {
  if (top >= kInfinity) return __uint_as_float(kNoNumber);
  if (top == 0) return 1.0f;
  const float most = __uint_as_float(top), lift = exponent_bias_factor(most);
  float unit = __fdiv_ru(most * lift, rule.high);
  if (rule.power) unit = __uint_as_float((__float_as_uint(unit) + 0x007fffff) & kInfinity);
  return __fmul_ru(unit, inverse_power(lift));
}

__device__ __forceinline__ DigitScale factors_of(float scale) {
  if (!(scale == scale)) return {0.0f, 0.0f, 0.0f};
  const float lift = exponent_bias_factor(scale * 128.0f);
  return {lift, __frcp_rn(scale * lift), scale * lift};
}

// Calls take(plane, digit, rest) for the digits of x, one plane after the other: the digit is in a word's lowest byte, and the
// rest is what the digits so far leave of x times its line's lift.
template <int kPlanes, class Take>
__device__ __forceinline__ void take_digits(float x, const DigitScale& by, const DigitRule& rule, const Take& take) {
  constexpr float kRound = 0x1.8p23f;  // a sum with it has the other's integer, to nearest even, in its lower bits
  const float low = -0.5f * rule.radix, high = 0.5f * rule.radix - 1.0f, part = inverse_power(rule.radix);
  float rest = x * by.lift, inverse = by.inverse, unit = by.unit;
  CUTE_UNROLL
  for (int plane = 0; plane < kPlanes; ++plane) {
    float q = __fmul_rn(rest, inverse);
    if (kPlanes == 3 && plane < 2) q = __fadd_rn(q, rule.ahead[plane]);
    // With two digits what is left reaches from -1/2 to 1/2, so that nothing lies below.
    if (kPlanes == 3) q = plane > 0 ? fmaxf(q, low) : q;
    if (plane > 0) q = fminf(q, high);
    const float rounded = __fadd_rn(q, kRound);
    rest = __fmaf_rn(-__fadd_rn(rounded, -kRound), unit, rest);
    take(plane, __float_as_uint(rounded), rest);
    inverse *= rule.radix;
    unit *= part;
  }
}

// Digits of kCount entries, one plane after the other, as bytes.
template <int kPlanes, int kCount>
__device__ __forceinline__ void split(const float (&x)[kCount], const DigitScale& by, const DigitRule& rule,
                                      uint32_t (&to)[kPlanes][kCount / 4]) {
  const uint32_t finite = by.lift == 0.0f ? 0 : ~0u;
  uint32_t bytes[kPlanes][kCount];
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    take_digits<kPlanes>(x[i], by, rule, [&](int plane, uint32_t digit, float) { bytes[plane][i] = digit; });
  }
  CUTE_UNROLL
  for (int plane = 0; plane < kPlanes; ++plane) {
    CUTE_UNROLL
    for (int w = 0; w < kCount / 4; ++w) {
      const uint32_t* from = bytes[plane] + 4 * w;
      const uint32_t low_half = __byte_perm(from[0], from[1], 0x0040), high_half = __byte_perm(from[2], from[3], 0x0040);
      to[plane][w] = __byte_perm(low_half, high_half, 0x5410) & finite;
    }
  }
}

template <class Source, int kCount>
__device__ __forceinline__ void load_run(const Source* from, int64_t valid, bool vector, Source (&to)[kCount]) {
  using Word = cuda::std::conditional_t<kCount * sizeof(Source) == 16, uint4, uint2>;
  static_assert(sizeof(Word) == kCount * sizeof(Source), "a load is of 8 or 16 bytes");
  if (vector && valid >= kCount) {
    *reinterpret_cast<Word*>(to) = __ldg(reinterpret_cast<const Word*>(from));
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) to[i] = i < valid ? from[i] : Source(0.0f);
  }
}

__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & kMagnitude; }

// Rows (rows, columns), each by `lanes` threads that keep its first kSteps runs; scale and planes (kPlanes, rows, pitch).
template <class C>
__global__ void __launch_bounds__(C::kThreads)
digits_rows(const typename C::Source* x, int64_t x_pitch, int64_t rows, int64_t columns, int64_t lanes, float* scales,
            int64_t given, int8_t* out, int64_t pitch, int64_t vector, float high, float radix, float ahead0, float ahead1,
            int64_t power) {
  using Source = typename C::Source;
  constexpr int kRun = 16 / int(sizeof(Source));
  __shared__ uint32_t scratch[C::kThreads / 32];
  __shared__ DigitScale shared[C::kThreads];
  const DigitRule rule{high, radix, {ahead0, ahead1}, power != 0};
  const int width = int(lanes) * kRun, first = int(threadIdx.x & (lanes - 1)) * kRun;
  const int64_t row = int64_t{blockIdx.x} * (C::kThreads / int(lanes)) + threadIdx.x / int(lanes);
  const int64_t length = row < rows ? columns : 0;
  const Source* from = x + row * x_pitch;
  alignas(16) Source held[C::kSteps][kRun];
  uint32_t top = 0;
  const auto see = [&](const Source(&run)[kRun]) {
    CUTE_UNROLL
    for (int i = 0; i < kRun; ++i) top = max(top, magnitude(static_cast<float>(run[i])));
  };
  CUTE_UNROLL
  for (int s = 0; s < C::kSteps; ++s) {
    const int64_t at = int64_t{s} * width + first;
    load_run(from + at, length - at, vector != 0, held[s]);
  }
  CUTE_UNROLL
  for (int s = 0; s < C::kSteps; ++s) see(held[s]);
  for (int64_t at = int64_t{C::kSteps} * width + first; at < length; at += width) {
    alignas(16) Source run[kRun];
    load_run(from + at, length - at, vector != 0, run);
    see(run);
  }
  top = group_reduce_max(top, int(lanes), scratch);
  if (first == 0 && length) {
    const float scale = given ? scales[0] : digit_scale(top, rule);
    if (!given) scales[row] = scale;
    shared[threadIdx.x / int(lanes)] = factors_of(scale);
  }
  __syncthreads();
  const DigitScale by = shared[threadIdx.x / int(lanes)];
  const auto put = [&](const Source(&run)[kRun], int64_t at) {
    float values[kRun];
    uint32_t codes[C::kPlanes][kRun / 4];
    CUTE_UNROLL
    for (int i = 0; i < kRun; ++i) values[i] = static_cast<float>(run[i]);
    split(values, by, rule, codes);
    CUTE_UNROLL
    for (int plane = 0; plane < C::kPlanes; ++plane) {
      // The last run of a row ends with the padding to 16 bytes.
      auto* to = reinterpret_cast<uint32_t*>(out + (plane * rows + row) * pitch + at);
      if (at >= length) continue;
      if constexpr (kRun == 4) *to = codes[plane][0];
      else *reinterpret_cast<uint2*>(to) = make_uint2(codes[plane][0], codes[plane][1]);
    }
  };
  CUTE_UNROLL
  for (int s = 0; s < C::kSteps; ++s) put(held[s], int64_t{s} * width + first);
  for (int64_t at = int64_t{C::kSteps} * width + first; at < length; at += width) {
    alignas(16) Source run[kRun];
    load_run(from + at, length - at, vector != 0, run);
    put(run, at);
  }
}

// A block's part of a strip of kColumns columns: a thread has four columns of kRows neighbouring rows.
template <class C>
struct DigitStrip {
  using Source = typename C::Source;
  static constexpr int kColumns = C::kColumns, kRows = C::kRows, kRun = 4;
  static constexpr int kGroups = C::kThreads / (kColumns / kRun), kDepth = kGroups * kRows;  // of k, at a time
  using Held = Source[kRows][kRun];

  const Source* x;
  int64_t pitch, rows, columns, column;
  int group;
  bool vector;

  __device__ void load(int64_t first, Held& to) const {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first + group * kRows + i;
      load_run(x + row * pitch + column, row < rows ? columns - column : 0, vector, to[i]);
    }
  }
  __device__ static void see(const Held& held, uint32_t (&top)[kRun]) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int c = 0; c < kRun; ++c) top[c] = max(top[c], magnitude(static_cast<float>(held[i][c])));
    }
  }
  // Digits of the columns of `held`, whose rows begin with `first`, to planes (kPlanes, columns, out_pitch).
  __device__ void put(const Held& held, int64_t first, const DigitScale* by, const DigitRule& rule, int8_t* out,
                      int64_t out_pitch) const {
    const int64_t at = first + group * kRows;
    CUTE_UNROLL
    for (int c = 0; c < kRun; ++c) {
      float values[kRows];
      alignas(16) uint32_t codes[C::kPlanes][kRows / 4];
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) values[i] = static_cast<float>(held[i][c]);
      split(values, by[c], rule, codes);
      CUTE_UNROLL
      for (int plane = 0; plane < C::kPlanes; ++plane) {
        if (column + c < columns && at < rows) {
          using Word = cuda::std::conditional_t<kRows == 16, uint4, uint2>;
          auto* to = reinterpret_cast<Word*>(out + (plane * columns + column + c) * out_pitch + at);
          *to = *reinterpret_cast<const Word*>(codes[plane]);
        }
      }
    }
  }
};

// Columns (rows, columns), each strip by the blocks of a cluster, which share its rows; planes (kPlanes, columns, pitch).
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident)
digits_columns(const typename C::Source* x, int64_t x_pitch, int64_t rows, int64_t columns, float* scales, int64_t given,
               int8_t* out, int64_t pitch, int64_t vector, float high, float radix, float ahead0, float ahead1,
               int64_t power) {
  using Strip = DigitStrip<C>;
  constexpr int kWarps = C::kThreads / 32, kColumns = Strip::kColumns, kRun = Strip::kRun;
  __shared__ uint32_t tops[kWarps + 1][kColumns];  // of the warps, and of the block
  __shared__ DigitScale shared[kColumns];
  const DigitRule rule{high, radix, {ahead0, ahead1}, power != 0};
  const int rank = C::kCluster == 1 ? 0 : int(cluster::rank()), own = threadIdx.x % (kColumns / kRun) * kRun;
  const int64_t corner = int64_t{blockIdx.x / C::kCluster} * kColumns;
  const Strip strip{x, x_pitch, rows, columns, corner + own, int(threadIdx.x) / (kColumns / kRun), vector != 0};
  constexpr int64_t kStep = int64_t{C::kCluster} * Strip::kDepth;
  const int64_t start = int64_t{rank} * Strip::kDepth;
  alignas(16) typename Strip::Held held;
  uint32_t top[kRun] = {};
  int64_t last = start;  // what is held
  for (int64_t first = start; first < rows || first == start; first += kStep) {
    strip.load(first, held);
    Strip::see(held, top);
    last = first;
  }
  CUTE_UNROLL
  for (int c = 0; c < kRun; ++c) {
    CUTE_UNROLL
    for (int step = kColumns / kRun; step < 32; step *= 2) top[c] = max(top[c], __shfl_xor_sync(~0u, top[c], step));
    if (threadIdx.x % 32 < kColumns / kRun) tops[threadIdx.x / 32][own + c] = top[c];
  }
  __syncthreads();
  if (threadIdx.x < kColumns) {
    uint32_t most = 0;
    CUTE_UNROLL
    for (int warp = 0; warp < kWarps; ++warp) most = max(most, tops[warp][threadIdx.x]);
    tops[kWarps][threadIdx.x] = most;
  }
  if constexpr (C::kCluster > 1) cluster::sync();
  if (threadIdx.x < kColumns) {
    uint32_t most = tops[kWarps][threadIdx.x];
    if constexpr (C::kCluster > 1) {
      CUTE_UNROLL
      for (int other = 0; other < C::kCluster; ++other) {
        most = max(most, cluster::load_of(shared_address(&tops[kWarps][threadIdx.x]), other));
      }
    }
    const int64_t column = corner + threadIdx.x;
    const float scale = given ? scales[0] : digit_scale(most, rule);
    if (!given && rank == 0 && column < columns) scales[column] = scale;
    shared[threadIdx.x] = factors_of(scale);
  }
  __syncthreads();
  if constexpr (C::kCluster > 1) cluster::arrive();
  // Backwards: the last part is still in registers, the ones before it perhaps in the second-level cache.
  for (int64_t first = last; first >= start; first -= kStep) {
    if (first != last) strip.load(first, held);
    strip.put(held, first, shared + own, rule, out, pitch);
  }
  if constexpr (C::kCluster > 1) cluster::wait();  // others may still read this block's maxima
}

}  // namespace magicube
