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
  static constexpr int kVec = 16 / int(sizeof(Source));
  static constexpr int kSteps = Config::kSteps;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kTileColumns = 32 * kVec;  // of the kernels for columns, at most
};

// kVec entries at an address of which `valid` exist; the others are zeros.
template <class Q>
__device__ __forceinline__ void load(const typename Q::Source* from, int64_t valid, bool vector,
                                     typename Q::Real (&to)[Q::kVec]) {
  using Source = typename Q::Source;
  if (vector && valid >= Q::kVec) {
    alignas(16) Source part[Q::kVec];
    *reinterpret_cast<uint4*>(part) = __ldg(reinterpret_cast<const uint4*>(from));
    CUTE_UNROLL
    for (int i = 0; i < Q::kVec; ++i) to[i] = static_cast<typename Q::Real>(part[i]);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < Q::kVec; ++i) to[i] = i < valid ? static_cast<typename Q::Real>(from[i]) : typename Q::Real(0);
  }
}

// Largest magnitude and signs of what a thread has seen. As integers, the bits of magnitudes have the order of the
// magnitudes, with infinity and NaN on top.
template <class Q>
struct Extremes {
  using Real = typename Q::Real;
  using Bits = typename Q::Bits;
  Bits top = 0;
  bool negative = false;

  __device__ void see(Real x, Bits& largest) {
    const Bits bits = RealBits<Real>::of(x) & RealBits<Real>::kMagnitude;
    largest = bits > largest ? bits : largest;
    negative |= x < Real(0);
  }
  __device__ void see(const Real (&x)[Q::kVec]) {
    CUTE_UNROLL
    for (int i = 0; i < Q::kVec; ++i) see(x[i], top);
  }
  __device__ void report_to(int* flags) const {
    report((negative ? kNegative : 0) | (top >= RealBits<Real>::kInfinity ? kNonFinite : 0), flags);
  }
};

// Zero slices get 1, those with infinity or NaN get NaN; never rounded down to zero.
template <class Real>
__device__ Real scale_of(typename RealBits<Real>::type top, int64_t high) {
  using Bits = typename RealBits<Real>::type;
  if (top >= RealBits<Real>::kInfinity) return RealBits<Real>::real(RealBits<Real>::kInfinity | (RealBits<Real>::kInfinity >> 1));
  if (top == 0) return Real(1);
  const Real scale = static_cast<Real>(static_cast<double>(RealBits<Real>::real(top)) / static_cast<double>(high));
  return scale > Real(0) ? scale : RealBits<Real>::real(Bits(1));
}

// 1 / scale; 0 for NaN, so that the integers of such a slice are zeros.
template <class Real>
__device__ double inverse_of(Real scale) {
  return scale == scale ? 1.0 / static_cast<double>(scale) : 0.0;
}

struct Range {
  int64_t low, high, truncate;
};

__device__ __forceinline__ int32_t encode_exact(double x, double inverse, const Range& range) {
  const double low = static_cast<double>(range.low), high = static_cast<double>(range.high);
  double q = __dmul_rn(x, inverse);
  q = range.truncate ? trunc(q) : rint(q);
  if (q != q) return 0;
  q = q > low ? q : low;
  return static_cast<int32_t>(q < high ? q : high);
}

__device__ __forceinline__ int32_t encode(double x, double inverse, const Range& range) {
  return encode_exact(x, inverse, range);
}

// In float the quotient is off by less than 2^-22 of itself. Where that cannot change the integer, as for nearly all
// entries, float decides; infinities, NaN and quotients from 2^20 on are never sure.
__device__ __forceinline__ int32_t encode(float x, double inverse, const Range& range) {
  constexpr float kMargin = 0x1p-21f, kRound = 0x1.8p23f;
  const float q = x * static_cast<float>(inverse);
  const float shifted = q + kRound;  // the integer, to nearest even, in the lower bits
  const float away = fabsf(q - (shifted - kRound)), margin = fabsf(q) * kMargin;
  int32_t code;
  bool sure;
  if (range.truncate) {
    code = static_cast<int32_t>(q);
    sure = away > margin || fabsf(q) < 0.5f;
  } else {
    code = __float_as_int(shifted) - __float_as_int(kRound);
    sure = away < 0.5f - margin;
  }
  if (!(sure && fabsf(q) < 0x1p20f)) return encode_exact(static_cast<double>(x), inverse, range);
  return max(int(range.low), min(int(range.high), code));
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
  using Run = PackedRun<Config::kBits, Quantizer<Config>::kVec>;
  const Run run(codes);
  uint8_t* to = out.at + row * out.pitch + column * Config::kBits / 8;
  if (out.vector && valid >= Quantizer<Config>::kVec) run.store(to);
  else run.store_part(to, valid);
}

template <class Config>
__device__ __forceinline__ void encode_run(const Output& out, int64_t row, int64_t column, int64_t valid,
                                           const typename Quantizer<Config>::Real (&x)[Quantizer<Config>::kVec],
                                           double inverse, const Range& range) {
  int32_t codes[Quantizer<Config>::kVec];
  CUTE_UNROLL
  for (int i = 0; i < Quantizer<Config>::kVec; ++i) codes[i] = encode(x[i], inverse, range);
  put<Config>(out, row, column, valid, codes);
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
                            typename Q::Real (&to)[Q::kSteps][Q::kVec]) const {
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
    typename Q::Real part[Q::kSteps][Q::kVec];
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
              uint8_t* out, int64_t out_pitch, int64_t low, int64_t high, int64_t truncate, int* flags,
              int64_t vector_loads, int64_t vector_stores) {
  using Q = Quantizer<Config>;
  using Real = typename Q::Real;
  __shared__ typename Q::Bits scratch[Q::kWarps];
  const uint32_t slice_blocks = uint32_t(splits), split = blockIdx.x % slice_blocks;
  const int64_t slice = blockIdx.x / slice_blocks;
  const Range range{low, high, truncate};
  Real scale;
  if (parts) {
    typename Q::Bits top = 0;
    for (int64_t i = threadIdx.x; i < parts; i += Q::kThreads) {
      const auto other = partials[slice * parts + i];
      top = other > top ? other : top;
    }
    scale = scale_of<Real>(team_max(top, Q::kThreads, scratch), high);
    if (split == 0 && threadIdx.x == 0) scales[slice] = scale;
  } else {
    scale = scales[slice];
  }
  const double inverse = inverse_of(scale);
  const Output output{out + slice * rows * out_pitch, out_pitch, vector_stores != 0};
  const Tiles<Q> tiles(rows, columns, lanes);
  Extremes<Q> extremes;
  // Backwards: the pass for the maxima left the last tiles in the second-level cache.
  for (uint32_t i = split; i < tiles.count; i += slice_blocks) {
    const uint32_t tile = tiles.count - 1 - i;
    Real part[Q::kSteps][Q::kVec];
    tiles.load_tile(x + slice * rows * pitch, pitch, tile, vector_loads != 0, part);
    CUTE_UNROLL
    for (int s = 0; s < Q::kSteps; ++s) {
      if (!parts) extremes.see(part[s]);
      encode_run<Config>(output, tiles.row(tile), tiles.column(tile, s), tiles.valid(tile, s), part[s], inverse, range);
    }
  }
  extremes.report_to(flags);
}

// Scales and integers of rows (rows, columns), each by `lanes` threads that keep its first kSteps * kVec entries a lane.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
encode_rows(const typename Config::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t lanes,
            typename Quantizer<Config>::Real* scales, int64_t given, uint8_t* out, int64_t out_pitch, int64_t low,
            int64_t high, int64_t truncate, int* flags, int64_t vector_loads, int64_t vector_stores) {
  using Q = Quantizer<Config>;
  using Real = typename Q::Real;
  __shared__ typename Q::Bits scratch[Q::kWarps];
  const int width = int(lanes) * Q::kVec, groups = Q::kThreads / int(lanes);
  const int first = int(threadIdx.x & (lanes - 1)) * Q::kVec;
  const int64_t row = int64_t{blockIdx.x} * groups + threadIdx.x / int(lanes);
  const int64_t length = row < rows ? columns : 0;
  const auto* from = x + row * pitch;
  const bool vector = vector_loads != 0;
  Real held[Q::kSteps][Q::kVec];
  Extremes<Q> extremes;
  CUTE_UNROLL
  for (int s = 0; s < Q::kSteps; ++s) {
    const int64_t column = int64_t{s} * width + first;
    load<Q>(from + column, length - column, vector, held[s]);
  }
  CUTE_UNROLL
  for (int s = 0; s < Q::kSteps; ++s) extremes.see(held[s]);
  for (int64_t column = int64_t{Q::kSteps} * width + first; column < length; column += width) {
    Real part[Q::kVec];
    load<Q>(from + column, length - column, vector, part);
    extremes.see(part);
  }
  extremes.report_to(flags);
  const auto top = team_max(extremes.top, int(lanes), scratch);
  Real scale = Real(1);
  if (given) {
    if (length) scale = scales[row];
  } else {
    scale = scale_of<Real>(top, high);
    if (length && first == 0) scales[row] = scale;
  }
  const double inverse = inverse_of(scale);
  const Range range{low, high, truncate};
  const Output output{out, out_pitch, vector_stores != 0};
  CUTE_UNROLL
  for (int s = 0; s < Q::kSteps; ++s) {
    const int64_t column = int64_t{s} * width + first;
    encode_run<Config>(output, row, column, length - column, held[s], inverse, range);
  }
  for (int64_t column = int64_t{Q::kSteps} * width + first; column < length; column += width) {
    Real part[Q::kVec];
    load<Q>(from + column, length - column, vector, part);
    encode_run<Config>(output, row, column, length - column, part, inverse, range);
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

  // Rows of this thread, kSteps at a time: body(row, its entries), row < rows.
  template <class Body>
  __device__ void each_row(const typename Q::Source* slice_at, int64_t pitch, int64_t rows, int64_t splits, bool vector,
                           Body&& body) const {
    const int64_t step = splits * groups;
    for (int64_t row = split * groups + group; row < rows; row += step * Q::kSteps) {
      typename Q::Real part[Q::kSteps][Q::kVec];
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
               int64_t lanes, typename Quantizer<Config>::Bits* partials, int* flags, int64_t vector_loads) {
  using Q = Quantizer<Config>;
  static_assert(Q::kTileColumns <= Q::kThreads, "a thread for each column of a tile");
  __shared__ typename Q::Bits shared[Q::kThreads * Q::kVec];
  const ColumnTile<Q> own(columns, tiles, splits, lanes);
  Extremes<Q> extremes;
  typename Q::Bits top[Q::kVec] = {};
  own.each_row(x + own.slice * rows * pitch, pitch, rows, splits, vector_loads != 0,
               [&](int64_t, const typename Q::Real (&part)[Q::kVec]) {
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
               int64_t lanes, const typename Quantizer<Config>::Bits* partials, int64_t parts,
               typename Quantizer<Config>::Real* scales, uint8_t* out, int64_t out_pitch, int64_t low, int64_t high,
               int64_t truncate, int* flags, int64_t vector_loads, int64_t vector_stores) {
  using Q = Quantizer<Config>;
  using Real = typename Q::Real;
  __shared__ typename Q::Bits shared[Q::kThreads * Q::kVec];
  __shared__ double inverses[Q::kTileColumns];
  const ColumnTile<Q> own(columns, tiles, splits, lanes);
  typename Q::Bits top[Q::kVec] = {};
  for (int64_t p = own.group; p < parts; p += own.groups) {
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
    const Real scale = parts ? scale_of<Real>(most, high) : *at;
    if (parts && own.split == 0) *at = scale;
    inverses[threadIdx.x] = inverse_of(scale);
  }
  __syncthreads();
  double inverse[Q::kVec];
  CUTE_UNROLL
  for (int i = 0; i < Q::kVec; ++i) inverse[i] = i < own.valid ? inverses[own.lane * Q::kVec + i] : 0.0;
  const Range range{low, high, truncate};
  const Output output{out + own.slice * rows * out_pitch, out_pitch, vector_stores != 0};
  Extremes<Q> extremes;
  own.each_row(x + own.slice * rows * pitch, pitch, rows, splits, vector_loads != 0,
               [&](int64_t row, const Real (&part)[Q::kVec]) {
                 if (!parts) extremes.see(part);
                 int32_t codes[Q::kVec];
                 CUTE_UNROLL
                 for (int i = 0; i < Q::kVec; ++i) codes[i] = encode(part[i], inverse[i], range);
                 put<Config>(output, row, own.column, own.valid, codes);
               });
  extremes.report_to(flags);
}

}  // namespace magicube
