// Quantization: q = clamp(round(x / scale)) in storage form, scale = max|x| / q_max of a slice.
//
// A slice is a row, a column, or all of a matrix. The quotient is x * (1 / scale) in double, as in the CPU engine, so
// that a row of magnitude 1e-36 keeps its relative accuracy. Threads of a block are (groups, lanes): the lanes share a
// row, each with kVec neighbouring entries of it at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "words.cuh"

namespace magicube {

constexpr int kNegative = 1, kNonFinite = 2;  // flags

template <class Real>
struct RealBits;
template <>
struct RealBits<float> {
  using type = uint32_t;
  static constexpr type kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
  __device__ static type of(float x) { return __float_as_uint(x); }
  __device__ static float real(type bits) { return __uint_as_float(bits); }
};
template <>
struct RealBits<double> {
  using type = unsigned long long;
  static constexpr type kMagnitude = 0x7fffffffffffffff, kInfinity = 0x7ff0000000000000;
  __device__ static type of(double x) { return static_cast<type>(__double_as_longlong(x)); }
  __device__ static double real(type bits) { return __longlong_as_double(static_cast<long long>(bits)); }
};

template <class Config>
struct Quantizer {
  using Source = typename Config::Source;
  using Real = cuda::std::conditional_t<cuda::std::is_same_v<Source, double>, double, float>;
  using Bits = typename RealBits<Real>::type;
  static constexpr bool kSigned = Config::kSigned;
  static constexpr int kVec = 16 / int(sizeof(Source));
  static constexpr int kSteps = Config::kSteps;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kTileColumns = 32 * kVec;  // of the kernels for columns, at most
};

// kVec entries at an address of which `valid` exist; the others are zeros. They are converted when they are used, so
// that a thread has several loads in flight.
template <class Q>
__device__ __forceinline__ void load(const typename Q::Source* from, int64_t valid, bool vector,
                                     typename Q::Source (&to)[Q::kVec]) {
  if (vector && valid >= Q::kVec) {
    *reinterpret_cast<uint4*>(to) = __ldg(reinterpret_cast<const uint4*>(from));
  } else {
    CUTE_UNROLL
    for (int i = 0; i < Q::kVec; ++i) to[i] = i < valid ? from[i] : typename Q::Source(0.0f);
  }
}

// Largest magnitude of what a thread has seen, and where integers are unsigned whether one was negative. As integers, the
// bits of magnitudes have the order of the magnitudes, with infinity and NaN on top.
template <class Q>
struct Extremes {
  using Real = typename Q::Real;
  using Bits = typename Q::Bits;
  Bits top = 0;
  bool negative = false;

  __device__ void see(typename Q::Source entry, Bits& largest) {
    const Real x = static_cast<Real>(entry);
    const Bits bits = RealBits<Real>::of(x) & RealBits<Real>::kMagnitude;
    largest = bits > largest ? bits : largest;
    if constexpr (!Q::kSigned) negative |= x < Real(0);
  }
  __device__ void see(const typename Q::Source (&x)[Q::kVec]) {
    CUTE_UNROLL
    for (int i = 0; i < Q::kVec; ++i) see(x[i], top);
  }
  __device__ void report_to(int* flags) const {
    report((negative ? kNegative : 0) | (top >= RealBits<Real>::kInfinity ? kNonFinite : 0), flags);
  }
};

// Zero slices get 1, those with infinity or NaN get NaN; never rounded down to zero.
template <class Real>
__device__ Real scale_of(typename RealBits<Real>::type top, int high) {
  using Bits = typename RealBits<Real>::type;
  constexpr Bits kInfinity = RealBits<Real>::kInfinity;
  if (top >= kInfinity) return RealBits<Real>::real(kInfinity | kInfinity >> 1);
  if (top == 0) return Real(1);
  const Real scale = static_cast<Real>(static_cast<double>(RealBits<Real>::real(top)) / static_cast<double>(high));
  return scale > Real(0) ? scale : RealBits<Real>::real(Bits(1));
}

// 1 / scale; 0 for NaN, so that the integers of such a slice are zeros.
template <class Real>
__device__ double inverse_of(Real scale) {
  return scale == scale ? 1.0 / static_cast<double>(scale) : 0.0;
}

template <class Config>
struct Range {
  static constexpr int kLow = Config::kSigned ? -(1 << (Config::kBits - 1)) : 0;
  static constexpr int kHigh = (1 << (Config::kSigned ? Config::kBits - 1 : Config::kBits)) - 1;
};

template <class Config>
inline constexpr int stored_bits = Config::kBits == 12 ? 16 : Config::kBits;

template <class Config>
__device__ __forceinline__ int32_t encode_exact(double x, double inverse) {
  constexpr double kLow = Range<Config>::kLow, kHigh = Range<Config>::kHigh;
  double q = __dmul_rn(x, inverse);
  q = Config::kTruncate ? trunc(q) : rint(q);
  if (q != q) return 0;
  q = q > kLow ? q : kLow;
  return static_cast<int32_t>(q < kHigh ? q : kHigh);
}

// 1 / scale as a sum of two floats; NaN where the lower one would lose bits.
struct FloatInverse {
  float high, low;

  __device__ FloatInverse() = default;
  __device__ explicit FloatInverse(double inverse)
      : high(inverse > 0x1p-90 ? static_cast<float>(inverse) : __int_as_float(0x7fffffff)),
        low(static_cast<float>(inverse - static_cast<double>(high))) {}
};

// The integer of x, where sums of two floats decide it: they are off by less than 2^-24 for quotients up to 2^21. False
// for the few entries nearer than 2^-22 to where the integer changes, for larger quotients, infinities and NaN.
template <class Config>
__device__ __forceinline__ bool encode_fast(float x, const FloatInverse& inverse, int32_t& code) {
  constexpr float kRound = 0x1.8p23f, kNear = 0x1p-22f;
  const float q = x * inverse.high;
  const float rest = __fmaf_rn(x, inverse.low, __fmaf_rn(x, inverse.high, -q));
  const float shifted = __fadd_rn(q, kRound);  // the integer, to nearest even, in the lower bits
  const float apart = __fadd_rn(__fadd_rn(q, -__fadd_rn(shifted, -kRound)), rest);
  int32_t whole = __float_as_int(shifted) - __float_as_int(kRound);
  bool sure = fabsf(apart) < 0.5f - kNear;
  if constexpr (Config::kTruncate) {
    sure = fabsf(apart) > kNear || fabsf(q) < 0.5f;
    if (whole > 0 && apart < 0.0f) --whole;
    if (whole < 0 && apart > 0.0f) ++whole;
  }
  code = max(Range<Config>::kLow, min(Range<Config>::kHigh, whole));
  return sure && fabsf(q) < 0x1p21f;
}

struct Output {
  uint8_t* at;
  int64_t pitch;  // bytes
  bool vector;
};

// kVec integers of one row from `column` on, of which `valid` exist.
template <class Config>
__device__ __forceinline__ void put(const Output& out, int64_t row, int64_t column, int64_t valid,
                                    const int32_t (&codes)[Quantizer<Config>::kVec]) {
  if (valid <= 0) return;
  using Run = PackedRun<stored_bits<Config>, Quantizer<Config>::kVec>;
  const Run run(codes);
  uint8_t* to = out.at + row * out.pitch + column * stored_bits<Config> / 8;
  if (out.vector && valid >= Quantizer<Config>::kVec) run.store(to);
  else run.store_part(to, valid);
}

// Entries at an address, two at a time: small code for the few vectors that floats do not decide.
template <class Config, class Exact>
__device__ __forceinline__ void encode_slowly(const Output& out, int64_t row, int64_t column, int64_t valid,
                                              const typename Config::Source* from, const Exact& exact) {
  using Real = typename Quantizer<Config>::Real;
  constexpr int kVec = Quantizer<Config>::kVec;
  const int count = valid < kVec ? int(valid) : kVec;
  uint8_t* to = out.at + row * out.pitch + column * stored_bits<Config> / 8;
#pragma unroll 1
  for (int i = 0; i < count; i += 2) {
    int32_t pair[2] = {encode_exact<Config>(static_cast<double>(static_cast<Real>(from[i])), exact(i)), 0};
    if (i + 1 < count) pair[1] = encode_exact<Config>(static_cast<double>(static_cast<Real>(from[i + 1])), exact(i + 1));
    PackedRun<stored_bits<Config>, 2>(pair).store_part(to + i * stored_bits<Config> / 8, count - i);
  }
}

// kVec entries of one row, x, which lie at `from`; `fast(i)` and `exact(i)` are the inverse of entry i's scale.
template <class Config, class Fast, class Exact>
__device__ __forceinline__ void encode_run(const Output& out, int64_t row, int64_t column, int64_t valid,
                                           const typename Config::Source (&x)[Quantizer<Config>::kVec],
                                           const typename Config::Source* from, const Fast& fast, const Exact& exact) {
  constexpr int kVec = Quantizer<Config>::kVec;
  int32_t codes[kVec];
  bool sure = true;
  CUTE_UNROLL
  for (int i = 0; i < kVec; ++i) {
    if constexpr (cuda::std::is_same_v<typename Config::Source, double>) codes[i] = encode_exact<Config>(x[i], exact(i));
    else sure &= encode_fast<Config>(static_cast<float>(x[i]), fast(i), codes[i]);
  }
  if (sure) put<Config>(out, row, column, valid, codes);
  else encode_slowly<Config>(out, row, column, valid, from, exact);
}

// Tiles of (groups, kSteps * lanes * kVec) entries over (rows, columns).
template <class Q>
struct Tiles {
  int64_t rows, columns;
  uint32_t across, count;  // tiles of a row of tiles, and of all
  int lanes, lane, group;

  __device__ Tiles(int64_t rows_, int64_t columns_, int64_t lanes_)
      : rows(rows_), columns(columns_), lanes(int(lanes_)), lane(int(threadIdx.x) & (int(lanes_) - 1)),
        group(int(threadIdx.x) / int(lanes_)) {
    const int width = lanes * Q::kVec * Q::kSteps;
    // Powers of two: shifts, since a division of 64 bits is a call.
    across = uint32_t((columns + width - 1) >> (31 - __clz(int(width))));
    const int groups = Q::kThreads / lanes;
    count = across * uint32_t((rows + groups - 1) >> (31 - __clz(groups)));
  }
  __device__ int64_t row(uint32_t tile) const { return int64_t{tile / across} * (Q::kThreads / lanes) + group; }
  __device__ int64_t column(uint32_t tile, int step) const {
    return (int64_t{tile % across} * Q::kSteps + step) * lanes * Q::kVec + lane * Q::kVec;
  }
  __device__ int64_t valid(uint32_t tile, int step) const { return row(tile) < rows ? columns - column(tile, step) : 0; }

  __device__ void load_tile(const typename Q::Source* slice, int64_t pitch, uint32_t tile, bool vector,
                            typename Q::Source (&to)[Q::kSteps][Q::kVec]) const {
    CUTE_UNROLL
    for (int s = 0; s < Q::kSteps; ++s) {
      load<Q>(slice + row(tile) * pitch + column(tile, s), valid(tile, s), vector, to[s]);
    }
  }
};

// Largest magnitudes of slices (slices, rows, columns), a part of each slice by each of its `splits` blocks.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
absmax_slices(const typename Config::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t splits, int64_t lanes,
              typename Quantizer<Config>::Bits* partials, int* flags, int64_t vector_loads) {
  using Q = Quantizer<Config>;
  __shared__ typename Q::Bits scratch[Q::kWarps];
  const uint32_t slice_blocks = uint32_t(splits), split = blockIdx.x % slice_blocks;
  const int64_t slice = blockIdx.x / slice_blocks;
  const Tiles<Q> tiles(rows, columns, lanes);
  Extremes<Q> extremes;
  for (uint32_t tile = split; tile < tiles.count; tile += slice_blocks) {
    alignas(16) typename Q::Source part[Q::kSteps][Q::kVec];
    tiles.load_tile(x + slice * rows * pitch, pitch, tile, vector_loads != 0, part);
    CUTE_UNROLL
    for (int s = 0; s < Q::kSteps; ++s) extremes.see(part[s]);
  }
  extremes.report_to(flags);
  const auto top = team_max(extremes.top, Q::kThreads, scratch);
  if (threadIdx.x == 0) partials[blockIdx.x] = top;  // (slices, splits)
}

// Integers of slices (slices, rows, columns) whose scales are given, or follow from `parts` partial maxima a slice.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
encode_slices(const typename Config::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t splits, int64_t lanes,
              const typename Quantizer<Config>::Bits* partials, int64_t parts, typename Quantizer<Config>::Real* scales,
              uint8_t* out, int64_t out_pitch, int* flags, int64_t vector_loads, int64_t vector_stores) {
  using Q = Quantizer<Config>;
  using Real = typename Q::Real;
  __shared__ typename Q::Bits scratch[Q::kWarps];
  const uint32_t slice_blocks = uint32_t(splits), split = blockIdx.x % slice_blocks;
  const int64_t slice = blockIdx.x / slice_blocks;
  Real scale;
  if (parts) {
    typename Q::Bits top = 0;
    for (int64_t i = threadIdx.x; i < parts; i += Q::kThreads) {
      const auto other = partials[slice * parts + i];
      top = other > top ? other : top;
    }
    scale = scale_of<Real>(team_max(top, Q::kThreads, scratch), Range<Config>::kHigh);
    if (split == 0 && threadIdx.x == 0) scales[slice] = scale;
  } else {
    scale = scales[slice];
  }
  const double inverse = inverse_of(scale);
  const FloatInverse near(inverse);
  const Output output{out + slice * rows * out_pitch, out_pitch, vector_stores != 0};
  const Tiles<Q> tiles(rows, columns, lanes);
  Extremes<Q> extremes;
  // Backwards: the pass for the maxima left the last tiles in the second-level cache.
  for (uint32_t i = split; i < tiles.count; i += slice_blocks) {
    const uint32_t tile = tiles.count - 1 - i;
    alignas(16) typename Q::Source part[Q::kSteps][Q::kVec];
    tiles.load_tile(x + slice * rows * pitch, pitch, tile, vector_loads != 0, part);
    CUTE_UNROLL
    for (int s = 0; s < Q::kSteps; ++s) {
      if (!parts) extremes.see(part[s]);
      encode_run<Config>(output, tiles.row(tile), tiles.column(tile, s), tiles.valid(tile, s), part[s],
                         x + slice * rows * pitch + tiles.row(tile) * pitch + tiles.column(tile, s),
                         [&](int) { return near; }, [&](int) { return inverse; });
    }
  }
  extremes.report_to(flags);
}

// Scales and integers of rows (rows, columns), each by `lanes` threads that keep its first kSteps * kVec entries a lane.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
encode_rows(const typename Config::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t lanes,
            typename Quantizer<Config>::Real* scales, int64_t given, uint8_t* out, int64_t out_pitch, int* flags,
            int64_t vector_loads, int64_t vector_stores) {
  using Q = Quantizer<Config>;
  using Real = typename Q::Real;
  __shared__ typename Q::Bits scratch[Q::kWarps];
  __shared__ double inverses[Q::kThreads];
  const int width = int(lanes) * Q::kVec, groups = Q::kThreads / int(lanes);
  const int first = int(threadIdx.x & (lanes - 1)) * Q::kVec;
  const int64_t row = int64_t{blockIdx.x} * groups + threadIdx.x / int(lanes);
  const int64_t length = row < rows ? columns : 0;
  const auto* from = x + row * pitch;
  const bool vector = vector_loads != 0;
  alignas(16) typename Q::Source held[Q::kSteps][Q::kVec];
  Extremes<Q> extremes;
  CUTE_UNROLL
  for (int s = 0; s < Q::kSteps; ++s) {
    const int64_t column = int64_t{s} * width + first;
    load<Q>(from + column, length - column, vector, held[s]);
  }
  CUTE_UNROLL
  for (int s = 0; s < Q::kSteps; ++s) extremes.see(held[s]);
  for (int64_t column = int64_t{Q::kSteps} * width + first; column < length; column += width) {
    alignas(16) typename Q::Source part[Q::kVec];
    load<Q>(from + column, length - column, vector, part);
    extremes.see(part);
  }
  extremes.report_to(flags);
  const auto top = team_max(extremes.top, int(lanes), scratch);
  if (first == 0 && length) {  // the divisions, once a row
    const Real scale = given ? scales[row] : scale_of<Real>(top, Range<Config>::kHigh);
    if (!given) scales[row] = scale;
    inverses[threadIdx.x / int(lanes)] = inverse_of(scale);
  }
  __syncthreads();
  const double inverse = inverses[threadIdx.x / int(lanes)];
  const FloatInverse near(inverse);
  const auto fast = [&](int) { return near; };
  const auto exact = [&](int) { return inverse; };
  const Output output{out, out_pitch, vector_stores != 0};
  CUTE_UNROLL
  for (int s = 0; s < Q::kSteps; ++s) {
    const int64_t column = int64_t{s} * width + first;
    encode_run<Config>(output, row, column, length - column, held[s], from + column, fast, exact);
  }
  for (int64_t column = int64_t{Q::kSteps} * width + first; column < length; column += width) {
    alignas(16) typename Q::Source part[Q::kVec];
    load<Q>(from + column, length - column, vector, part);
    encode_run<Config>(output, row, column, length - column, part, from + column, fast, exact);
  }
}

// What a block of the two kernels below has of (slices, rows, columns): lanes * kVec columns and every splits-th of the
// groups of rows.
template <class Q>
struct ColumnTile {
  int lanes, groups, lane, group;
  int64_t tile, split, slice, column, valid;

  __device__ ColumnTile(int64_t columns, int64_t tiles, int64_t splits, int64_t lanes_)
      : lanes(int(lanes_)), groups(Q::kThreads / int(lanes_)), lane(int(threadIdx.x) & (int(lanes_) - 1)),
        group(int(threadIdx.x) / int(lanes_)), tile(blockIdx.x % uint32_t(tiles)),
        split(blockIdx.x / uint32_t(tiles) % uint32_t(splits)), slice(blockIdx.x / uint32_t(tiles) / uint32_t(splits)),
        column((tile * lanes + lane) * Q::kVec), valid(columns - column) {}

  __device__ int columns() const { return lanes * Q::kVec; }

  // Rows of this thread, kSteps at a time: body(row, its entries), row < rows. Backwards in the second pass: the first
  // one left the last rows in the second-level cache.
  template <class Body>
  __device__ void each_row(const typename Q::Source* slice_at, int64_t pitch, int64_t rows, int64_t splits, int64_t passes,
                           bool vector, bool backwards, Body&& body) const {
    const int64_t step = splits * groups, first = split * groups + group;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t row = first + (backwards ? passes - 1 - pass : pass) * step * Q::kSteps;
      alignas(16) typename Q::Source part[Q::kSteps][Q::kVec];
      CUTE_UNROLL
      for (int s = 0; s < Q::kSteps; ++s) {
        const int64_t at = row + s * step;
        load<Q>(slice_at + at * pitch + column, at < rows ? valid : 0, vector, part[s]);
      }
      CUTE_UNROLL
      for (int s = 0; s < Q::kSteps; ++s) {
        if (row + s * step < rows) body(row + s * step, part[s]);
      }
    }
  }

  // The groups' maxima of each column; the thread of index c < columns() gets that of the tile's column c.
  __device__ typename Q::Bits meet(const typename Q::Bits (&top)[Q::kVec], typename Q::Bits* shared) const {
    CUTE_UNROLL
    for (int i = 0; i < Q::kVec; ++i) shared[threadIdx.x * Q::kVec + i] = top[i];  // (groups, columns)
    __syncthreads();
    typename Q::Bits most = 0;
    if (int(threadIdx.x) < columns()) {
      for (int g = 0; g < groups; ++g) {
        const auto other = shared[g * columns() + threadIdx.x];
        most = other > most ? other : most;
      }
    }
    return most;
  }
};

// Largest magnitudes of columns, one of `splits` parts of the rows by each block.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
absmax_columns(const typename Config::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t tiles, int64_t splits,
               int64_t passes, int64_t lanes, typename Quantizer<Config>::Bits* partials, int* flags, int64_t vector_loads) {
  using Q = Quantizer<Config>;
  static_assert(Q::kTileColumns <= Q::kThreads, "a thread for each column of a tile");
  __shared__ typename Q::Bits shared[Q::kThreads * Q::kVec];
  const ColumnTile<Q> own(columns, tiles, splits, lanes);
  Extremes<Q> extremes;
  typename Q::Bits top[Q::kVec] = {};
  own.each_row(x + own.slice * rows * pitch, pitch, rows, splits, passes, vector_loads != 0, false,
               [&](int64_t, const typename Q::Source (&part)[Q::kVec]) {
                 CUTE_UNROLL
                 for (int i = 0; i < Q::kVec; ++i) extremes.see(part[i], top[i]);
               });
  CUTE_UNROLL
  for (int i = 0; i < Q::kVec; ++i) extremes.top = top[i] > extremes.top ? top[i] : extremes.top;
  extremes.report_to(flags);
  const auto most = own.meet(top, shared);
  const int64_t column = own.tile * own.columns() + threadIdx.x;
  if (int(threadIdx.x) < own.columns() && column < columns) {
    partials[(own.slice * splits + own.split) * columns + column] = most;  // (slices, splits, columns)
  }
}

// Integers of columns whose scales are given, or follow from `parts` partial maxima a column.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
encode_columns(const typename Config::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t tiles, int64_t splits,
               int64_t passes, int64_t lanes, const typename Quantizer<Config>::Bits* partials, int64_t parts,
               typename Quantizer<Config>::Real* scales, uint8_t* out, int64_t out_pitch, int* flags,
               int64_t vector_loads, int64_t vector_stores) {
  using Q = Quantizer<Config>;
  using Real = typename Q::Real;
  __shared__ typename Q::Bits shared[Q::kThreads * Q::kVec];
  __shared__ double inverses[Q::kTileColumns];
  const ColumnTile<Q> own(columns, tiles, splits, lanes);
  typename Q::Bits top[Q::kVec] = {};
#pragma unroll 4
  for (int p = own.group; p < int(parts); p += own.groups) {
    CUTE_UNROLL
    for (int i = 0; i < Q::kVec; ++i) {
      const auto other = i < own.valid ? partials[(own.slice * parts + p) * columns + own.column + i] : 0;
      top[i] = other > top[i] ? other : top[i];
    }
  }
  const auto most = own.meet(top, shared);
  const int64_t column = own.tile * own.columns() + threadIdx.x;
  if (int(threadIdx.x) < own.columns() && column < columns) {
    Real* at = scales + own.slice * columns + column;  // (slices, columns)
    const Real scale = parts ? scale_of<Real>(most, Range<Config>::kHigh) : *at;
    if (parts && own.split == 0) *at = scale;
    inverses[threadIdx.x] = inverse_of(scale);
  }
  __syncthreads();
  const double* own_inverses = inverses + own.lane * Q::kVec;
  FloatInverse near[Q::kVec];
  CUTE_UNROLL
  for (int i = 0; i < Q::kVec; ++i) near[i] = FloatInverse(i < own.valid ? own_inverses[i] : 1.0);
  const Output output{out + own.slice * rows * out_pitch, out_pitch, vector_stores != 0};
  Extremes<Q> extremes;
  own.each_row(x + own.slice * rows * pitch, pitch, rows, splits, passes, vector_loads != 0, true,
               [&](int64_t row, const typename Q::Source (&part)[Q::kVec]) {
                 if (!parts) extremes.see(part);
                 encode_run<Config>(output, row, own.column, own.valid, part, x + (own.slice * rows + row) * pitch + own.column,
                                    [&](int i) { return near[i]; },
                                    [&](int i) { return i < own.valid ? own_inverses[i] : 0.0; });
               });
  extremes.report_to(flags);
}

}  // namespace magicube
