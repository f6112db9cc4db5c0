// Digit planes of a real matrix with per-row or per-column scales, in one kernel.
//
// Formula: x = scale (q0 + q1 / radix + q2 / radix^2), scale = amax / high rounded up, so that |x| <= high * scale; or the next
// power of two. Rows and columns of tiny numbers are multiplied by 2^100 first, so that only the scale is subnormal. Every
// operation rounds once, in the order of the CPU engine, so that both give the same integers.
// Architectures: sm_80 and later; clusters from sm_90a on.
// Work: digits_rows: `lanes` threads per row. digits_columns: a CTA, or a cluster of them, per tile of kColumns columns.
// Pipeline: amax over registers, then digits; entries beyond the registers are loaded twice.
// Source: Gu, arXiv 2403.06924, equations 4 to 7.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/warpgroup.cuh"
#include "device/packed_int.cuh"

namespace magicube {

constexpr float kZeroScale = 0x1p-38f;  // of zeros: never the largest scale of a matrix
constexpr uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000, kNoNumber = 0x7fc00000;

// Rule of scales and digits.
struct DigitRule {
  float high, radix;  // largest leading digit; 2^bits
  float ahead[2];     // added before the first and second rounding, so that the residual is in range of the later digits
  bool power;         // the scale is a power of two
};

// Scale of one row or column, prepared for encoding.
struct DigitScale {
  // 1 or 2^100; 1 / (scale * bias_factor); scale * bias_factor. All 0 for non-finite rows and columns.
  float bias_factor, inverse, unit;
};

__device__ __forceinline__ float exponent_bias_factor(float x) { return x < 0x1p-100f ? 0x1p100f : 1.0f; }
// 1 / x for a power of two.
__device__ __forceinline__ float inverse_power(float x) { return __uint_as_float((254u << 23) - __float_as_uint(x)); }

// Scale from the amax, as bits; kZeroScale for zeros, NaN for non-finite entries.
__device__ __forceinline__ float digit_scale(uint32_t absmax, const DigitRule& rule) {
  if (absmax >= kInfinity) return __uint_as_float(kNoNumber);
  if (absmax == 0) return kZeroScale;
  const float largest = __uint_as_float(absmax), bias_factor = exponent_bias_factor(largest);
  float unit = __fdiv_ru(largest * bias_factor, rule.high);
  if (rule.power) unit = __uint_as_float((__float_as_uint(unit) + 0x007fffff) & kInfinity);
  return __fmul_ru(unit, inverse_power(bias_factor));
}

__device__ __forceinline__ DigitScale prepare_scale(float scale) {
  if (!(scale == scale)) return {0.0f, 0.0f, 0.0f};
  const float bias_factor = exponent_bias_factor(scale * 128.0f);
  return {bias_factor, __frcp_rn(scale * bias_factor), scale * bias_factor};
}

// Call take(plane, digit, residual) for the digits of x in order. The digit is in the lowest byte of a word; the residual is x
// times its exponent bias factor, minus the digits so far.
template <int kPlanes, class Take>
__device__ __forceinline__ void take_digits(float x, const DigitScale& by, const DigitRule& rule, const Take& take) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves the integer, rounded to nearest even, in the low bits
  const float low = -0.5f * rule.radix, high = fminf(0.5f * rule.radix, 127.0f), part = inverse_power(rule.radix);
  float residual = x * by.bias_factor, inverse = by.inverse, unit = by.unit;
  CUTE_UNROLL
  for (int plane = 0; plane < kPlanes; ++plane) {
    float q = __fmul_rn(residual, inverse);
    if (kPlanes == 3 && plane < 2) q = __fadd_rn(q, rule.ahead[plane]);
    // With two digits the residual is in [-1/2, 1/2]: no lower clamp is needed.
    if (kPlanes == 3) q = plane > 0 ? fmaxf(q, low) : q;
    if (plane > 0) q = fminf(q, high);
    const float rounded = __fadd_rn(q, kRound);
    residual = __fmaf_rn(-__fadd_rn(rounded, -kRound), unit, residual);
    take(plane, __float_as_uint(rounded), residual);
    inverse *= rule.radix;
    unit *= part;
  }
}

// Digits of kCount entries as bytes, plane by plane.
template <int kPlanes, int kCount>
__device__ __forceinline__ void split(const float (&x)[kCount], const DigitScale& by, const DigitRule& rule,
                                      uint32_t (&to)[kPlanes][kCount / 4]) {
  const uint32_t finite = by.bias_factor == 0.0f ? 0 : ~0u;
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

// x: (rows, columns); scales: (rows,); out: (kPlanes, rows, pitch). `lanes` threads per row keep its first kSteps runs.
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
  uint32_t absmax = 0;
  const auto update = [&](const Source(&run)[kRun]) {
    CUTE_UNROLL
    for (int i = 0; i < kRun; ++i) absmax = max(absmax, magnitude(static_cast<float>(run[i])));
  };
  CUTE_UNROLL
  for (int s = 0; s < C::kSteps; ++s) {
    const int64_t at = int64_t{s} * width + first;
    load_run(from + at, length - at, vector != 0, held[s]);
  }
  CUTE_UNROLL
  for (int s = 0; s < C::kSteps; ++s) update(held[s]);
  for (int64_t at = int64_t{C::kSteps} * width + first; at < length; at += width) {
    alignas(16) Source run[kRun];
    load_run(from + at, length - at, vector != 0, run);
    update(run);
  }
  absmax = group_reduce_max(absmax, int(lanes), scratch);
  if (first == 0 && length) {
    const float scale = given ? scales[0] : digit_scale(absmax, rule);
    if (!given) scales[row] = scale;
    shared[threadIdx.x / int(lanes)] = prepare_scale(scale);
  }
  __syncthreads();
  const DigitScale by = shared[threadIdx.x / int(lanes)];
  const auto store = [&](const Source(&run)[kRun], int64_t at) {
    float values[kRun];
    uint32_t codes[C::kPlanes][kRun / 4];
    CUTE_UNROLL
    for (int i = 0; i < kRun; ++i) values[i] = static_cast<float>(run[i]);
    split(values, by, rule, codes);
    CUTE_UNROLL
    for (int plane = 0; plane < C::kPlanes; ++plane) {
      // The last run of a row may extend into the padding to 16 bytes.
      auto* to = reinterpret_cast<uint32_t*>(out + (plane * rows + row) * pitch + at);
      if (at >= length) continue;
      if constexpr (kRun == 4) *to = codes[plane][0];
      else *reinterpret_cast<uint2*>(to) = make_uint2(codes[plane][0], codes[plane][1]);
    }
  };
  CUTE_UNROLL
  for (int s = 0; s < C::kSteps; ++s) store(held[s], int64_t{s} * width + first);
  for (int64_t at = int64_t{C::kSteps} * width + first; at < length; at += width) {
    alignas(16) Source run[kRun];
    load_run(from + at, length - at, vector != 0, run);
    store(run, at);
  }
}

// Part of a CTA in a tile of kColumns columns: a thread has four columns of kRows consecutive rows.
template <class C>
struct DigitTile {
  using Source = typename C::Source;
  static constexpr int kColumns = C::kColumns, kRows = C::kRows, kRun = 4;
  static constexpr int kGroups = C::kThreads / (kColumns / kRun), kDepth = kGroups * kRows;  // rows at a time
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
  __device__ static void update(const Held& held, uint32_t (&absmax)[kRun]) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int c = 0; c < kRun; ++c) absmax[c] = max(absmax[c], magnitude(static_cast<float>(held[i][c])));
    }
  }
  // Digits of `held`, whose rows start at `first`, to planes (kPlanes, columns, out_pitch).
  __device__ void store(const Held& held, int64_t first, const DigitScale* by, const DigitRule& rule, int8_t* out,
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

// x: (rows, columns); scales: (columns,); out: (kPlanes, columns, pitch). The CTAs of a cluster split the rows of a tile.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident)
digits_columns(const typename C::Source* x, int64_t x_pitch, int64_t rows, int64_t columns, float* scales, int64_t given,
               int8_t* out, int64_t pitch, int64_t vector, float high, float radix, float ahead0, float ahead1,
               int64_t power) {
  using Tile = DigitTile<C>;
  constexpr int kWarps = C::kThreads / 32, kColumns = Tile::kColumns, kRun = Tile::kRun;
  __shared__ uint32_t block_absmax[kWarps + 1][kColumns];  // per warp, and of the CTA
  __shared__ DigitScale shared[kColumns];
  const DigitRule rule{high, radix, {ahead0, ahead1}, power != 0};
  int parts = 1, rank = 0;
  if constexpr (C::kClustered) parts = int(cluster::size()), rank = int(cluster::rank());
  const int own = threadIdx.x % (kColumns / kRun) * kRun;
  const int64_t corner = int64_t{blockIdx.x / parts} * kColumns;
  const Tile tile{x, x_pitch, rows, columns, corner + own, int(threadIdx.x) / (kColumns / kRun), vector != 0};
  const int64_t step = int64_t{parts} * Tile::kDepth, start = int64_t{rank} * Tile::kDepth;
  alignas(16) typename Tile::Held held;
  uint32_t absmax[kRun] = {};
  int64_t last = start;  // first row in registers
  for (int64_t first = start; first < rows || first == start; first += step) {
    tile.load(first, held);
    Tile::update(held, absmax);
    last = first;
  }
  CUTE_UNROLL
  for (int c = 0; c < kRun; ++c) {
    CUTE_UNROLL
    for (int lane = kColumns / kRun; lane < 32; lane *= 2) absmax[c] = max(absmax[c], __shfl_xor_sync(~0u, absmax[c], lane));
    if (threadIdx.x % 32 < kColumns / kRun) block_absmax[threadIdx.x / 32][own + c] = absmax[c];
  }
  __syncthreads();
  if (threadIdx.x < kColumns) {
    uint32_t column_absmax = 0;
    CUTE_UNROLL
    for (int warp = 0; warp < kWarps; ++warp) column_absmax = max(column_absmax, block_absmax[warp][threadIdx.x]);
    block_absmax[kWarps][threadIdx.x] = column_absmax;
  }
  if constexpr (C::kClustered) cluster::sync();
  if (threadIdx.x < kColumns) {
    uint32_t column_absmax = block_absmax[kWarps][threadIdx.x];
    if constexpr (C::kClustered) {
      for (int other = 0; other < parts; ++other) {
        column_absmax = max(column_absmax, cluster::load_of(shared_address(&block_absmax[kWarps][threadIdx.x]), other));
      }
    }
    const int64_t column = corner + threadIdx.x;
    const float scale = given ? scales[0] : digit_scale(column_absmax, rule);
    if (!given && rank == 0 && column < columns) scales[column] = scale;
    shared[threadIdx.x] = prepare_scale(scale);
  }
  __syncthreads();
  if constexpr (C::kClustered) cluster::arrive();
  // Backwards: the last rows are still in registers, the ones before may be in L2.
  for (int64_t first = last; first >= start; first -= step) {
    if (first != last) tile.load(first, held);
    tile.store(held, first, shared + own, rule, out, pitch);
  }
  if constexpr (C::kClustered) cluster::wait();  // other CTAs may still read this one's amaxes
}

}  // namespace magicube
