// Quantization kernels: q = clamp(round(x / scale)) in storage form, scale = amax / q_max of a slice.
//
// A slice is a row, a column, or a whole matrix. The quotient is x * (1 / scale) in double, as in the CPU engine, so that a
// row of magnitude 1e-36 keeps its relative accuracy; float32 arithmetic is used if it provably gives the same integer.
// Architectures: sm_80 and later.
// Work: threads of a CTA are (groups, lanes); the lanes of a group share a row, each with kVec consecutive entries at a time.
// Pipeline: kSteps loads of 16 bytes in flight per thread. absmax_slices, then encode_slices; one launch for given scales.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/copy.cuh"
#include "device/packed_int.cuh"

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
  static constexpr int kTileColumns = 32 * kVec;  // most columns of a CTA in the kernels for columns
};

// Load kVec entries, of which `valid` exist; the others are zeros. Entries are converted at their use, so that a thread has
// several loads in flight.
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

// Amax over the entries of a thread, as bits; for unsigned integers also whether an entry is negative. As integers, the bits
// of magnitudes have the order of the magnitudes, with infinity and NaN above.
template <class Q>
struct AbsmaxState {
  using Real = typename Q::Real;
  using Bits = typename Q::Bits;
  Bits absmax = 0;
  bool negative = false;

  __device__ void update(typename Q::Source entry, Bits& largest) {
    const Real x = static_cast<Real>(entry);
    const Bits bits = RealBits<Real>::of(x) & RealBits<Real>::kMagnitude;
    largest = bits > largest ? bits : largest;
    if constexpr (!Q::kSigned) negative |= x < Real(0);
  }
  __device__ void update(const typename Q::Source (&x)[Q::kVec]) {
    if constexpr (sizeof(x[0]) == 2 && Q::kSigned) {  // 16-bit floats, two at a time
      uint32_t pair = 0;
      CUTE_UNROLL
      for (int i = 0; i < Q::kVec; i += 2) pair = __vmaxu2(pair, *reinterpret_cast<const uint32_t*>(x + i) & 0x7fff7fff);
      const typename Q::Source* both = reinterpret_cast<const typename Q::Source*>(&pair);
      update(both[0], absmax);
      update(both[1], absmax);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < Q::kVec; ++i) update(x[i], absmax);
    }
  }
  __device__ void update(const AbsmaxState& other) {
    absmax = other.absmax > absmax ? other.absmax : absmax;
    negative |= other.negative;
  }
  __device__ void write_flags(int* flags) const {
    report((negative ? kNegative : 0) | (absmax >= RealBits<Real>::kInfinity ? kNonFinite : 0), flags);
  }
};

// Scale of a slice from its amax: 1 for zeros, NaN for non-finite entries, never rounded down to zero.
template <class Real, int kHigh>
__device__ Real scale_of(typename RealBits<Real>::type absmax) {
  using Bits = typename RealBits<Real>::type;
  constexpr Bits kInfinity = RealBits<Real>::kInfinity;
  if (absmax >= kInfinity) return RealBits<Real>::real(kInfinity | kInfinity >> 1);
  if (absmax == 0) return Real(1);
  const double largest = RealBits<Real>::real(absmax);
  // The quotient of a float32 by so small an integer is at least 2^-42 away from a rounding boundary: a product suffices.
  constexpr double kInverse = 1.0 / kHigh;
  const Real scale = static_cast<Real>(cuda::std::is_same_v<Real, float> ? largest * kInverse : largest / kHigh);
  return scale > Real(0) ? scale : RealBits<Real>::real(Bits(1));
}

// 1 / scale; 0 for NaN, so that the integers of such a slice are zeros.
__device__ inline double inverse_of(double scale) { return scale == scale ? 1.0 / scale : 0.0; }
// The same without a division call: for float32, which has few bits, the last Newton step rounds to nearest.
__device__ __forceinline__ double inverse_of(float scale) {
  const double wide = scale;
  double inverse;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(inverse) : "d"(wide));
  CUTE_UNROLL
  for (int i = 0; i < 3; ++i) inverse = __fma_rn(inverse, __fma_rn(-wide, inverse, 1.0), inverse);
  return scale == scale ? inverse : 0.0;
}

template <class Config>
struct Range {
  static constexpr int kLow = Config::kSigned ? -(1 << (Config::kBits - 1)) : 0;
  static constexpr int kHigh = (1 << (Config::kSigned ? Config::kBits - 1 : Config::kBits)) - 1;
};

template <class Config>
__device__ __forceinline__ int32_t encode_exact(double x, double inverse) {
  constexpr double kLow = Range<Config>::kLow, kHigh = Range<Config>::kHigh;
  double q = __dmul_rn(x, inverse);
  q = Config::kTruncate ? trunc(q) : rint(q);
  if (q != q) return 0;
  q = q > kLow ? q : kLow;
  return static_cast<int32_t>(q < kHigh ? q : kHigh);
}

// 1 / scale as a sum of two float32; NaN if one of them would lose bits.
struct FloatInverse {
  float high, low;

  __device__ FloatInverse() = default;
  __device__ explicit FloatInverse(float scale)
      : high(scale < 0x1p90f && scale > 0x1p-120f ? __fdividef(1.0f, scale) : __int_as_float(0x7fffffff)),
        low(__fmul_rn(high, __fmaf_rn(-high, scale, 1.0f))) {}
  __device__ explicit FloatInverse(double) : high(0.0f), low(0.0f) {}  // unused for double entries
};

// Round x / scale in float32. The error of the quotient is below 2^-15 for up to 8 bits (one float) and below 2^-24 up to 2^21
// (a sum of two); larger quotients are out of range anyway. False if the quotient is too close to a rounding boundary, or for
// non-finite entries.
template <class Config>
__device__ __forceinline__ bool encode_fast(float x, const FloatInverse& inverse, int32_t& code) {
  constexpr bool kSmall = Config::kBits <= 8;
  constexpr float kRound = 0x1.8p23f, kNear = kSmall ? 0x1p-14f : 0x1p-22f;
  float q = x * (kSmall ? inverse.high + inverse.low : inverse.high);
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(q) : "f"(-0x1p21f));  // below -2^21 the difference of bits would wrap
  const float residual = kSmall ? 0.0f : __fmaf_rn(x, inverse.low, __fmaf_rn(x, inverse.high, -q));
  const float shifted = __fadd_rn(q, kRound);  // the integer, rounded to nearest even, in the low bits
  const float off = __fadd_rn(q, -__fadd_rn(shifted, -kRound)), distance = kSmall ? off : __fadd_rn(off, residual);
  code = __float_as_int(shifted) - __float_as_int(kRound);
  if constexpr (Config::kTruncate) {
    if (code > 0 && distance < 0.0f) --code;
    if (code < 0 && distance > 0.0f) ++code;
    return fabsf(distance) > kNear || fabsf(q) < 0.5f;
  }
  return fabsf(distance) < 0.5f - kNear;
}

// As encode_fast for up to 8 bits, with the quotient as a sum of two float32: its error is below 2^-35 up to 2^8, beyond which it
// is false. The 16-bit floats of a row are near midpoints often, so that this spares much double arithmetic.
__device__ __forceinline__ bool encode_near(float x, const FloatInverse& inverse, int32_t& code) {
  constexpr float kRound = 0x1.8p23f;
  const float q = __fmul_rn(x, inverse.high), residual = __fmaf_rn(x, inverse.low, __fmaf_rn(x, inverse.high, -q));
  const float shifted = __fadd_rn(q, kRound), off = __fadd_rn(q, -__fadd_rn(shifted, -kRound));
  const float beyond = __fadd_rn(__fadd_rn(fabsf(off), -0.5f), off < 0.0f ? -residual : residual);  // the midpoint
  code = __float_as_int(shifted) - __float_as_int(kRound);
  if (beyond > 0.0f) code += off < 0.0f ? -1 : 1;
  return fabsf(q) < 0x1p8f && fabsf(beyond) > 0x1p-34f;
}

// Whether a range check is possible; entries in range need half the instructions.
template <class Config>
inline constexpr bool has_range_check =
    Config::kBits <= 8 && !Config::kTruncate && !cuda::std::is_same_v<typename Config::Source, double>;

// As encode_fast, for entries in range: the low bits of `codes` are the integers.
template <class Config, class Fast>
__device__ __forceinline__ bool encode_in_range(const typename Config::Source (&x)[Quantizer<Config>::kVec], const Fast& fast,
                                              int32_t (&codes)[Quantizer<Config>::kVec]) {
  constexpr float kRound = 0x1.8p23f;
  float farthest = 0.0f;
  CUTE_UNROLL
  for (int i = 0; i < Quantizer<Config>::kVec; ++i) {
    const float value = static_cast<float>(x[i]), inverse = fast(i).high + fast(i).low;
    const float shifted = __fmaf_rn(value, inverse, kRound);
    farthest = fmaxf(farthest, fabsf(__fmaf_rn(value, inverse, -__fadd_rn(shifted, -kRound))));
    codes[i] = __float_as_int(shifted);
  }
  return farthest < 0.5f - 0x1p-14f;
}

// Whether certain_inverse exists.
template <class Config>
inline constexpr bool has_certain_inverse =
    Config::kBits == 8 && !Config::kTruncate && sizeof(typename Config::Source) == 2;

// 1 / scale as a sum of two float32 for 16-bit floats and a scale derived from their amax, such that encode_certain rounds as the
// double rule does; NaN if there is none. A quotient is at least 2^-20 of itself away from the midpoint of two integers, or would
// be the midpoint if scale * kHigh were exactly the amax. In the second case the sign of amax - scale * kHigh gives the side of the
// quotient, and the inverse is biased by 2^-22 to that side; without a difference the midpoint is met, and rounded to even.
template <class Config>
__device__ __forceinline__ FloatInverse certain_inverse(float scale, uint32_t absmax) {
  const float largest = __uint_as_float(absmax), excess = __fmaf_rn(scale, -float(Range<Config>::kHigh), largest);
  const float bias = excess == 0.0f ? 0.0f : excess > 0.0f ? 0x1p-22f : -0x1p-22f;
  FloatInverse inverse(scale);
  inverse.low = __fmaf_rn(inverse.high, bias, inverse.low);
  if (!(largest * inverse.high < Range<Config>::kHigh + 0.25f)) inverse.high = __int_as_float(0x7fffffff);
  return inverse;
}

// The amax, as bits, that a given scale follows from; NaN if none does.
template <class Config>
__device__ __forceinline__ uint32_t amax_of(float scale) {
  constexpr int kHigh = Range<Config>::kHigh;
  const uint32_t absmax = __float_as_uint(static_cast<float>(static_cast<typename Config::Source>(scale * kHigh)));
  return scale_of<float, kHigh>(absmax) == scale ? absmax : 0x7fffffff;
}

// The integer of an entry in the low bits, for the inverse above.
__device__ __forceinline__ int32_t encode_certain(float x, const FloatInverse& inverse) {
  return __float_as_int(__fadd_rn(__fmaf_rn(x, inverse.high, __fmul_rn(x, inverse.low)), 0x1.8p23f));
}

// Whether all entries of `state` are in range; false if float32 cannot decide.
template <class Config>
__device__ __forceinline__ bool is_in_range(const AbsmaxState<Quantizer<Config>>& state, const FloatInverse& inverse) {
  using Real = typename Quantizer<Config>::Real;
  const float absmax = static_cast<float>(RealBits<Real>::real(state.absmax));
  return !state.negative && absmax * inverse.high < Range<Config>::kHigh + 0.25f;
}

// How entries that share a scale are rounded: any, those in range, and those that encode_certain decides.
enum class Entries { kAny, kInRange, kCertain };

template <class Config>
struct Rule {
  using Q = Quantizer<Config>;
  FloatInverse inverse;
  Entries entries;

  __device__ Rule() = default;
  // `absmax` is that of all entries, `state` has seen the thread's. A given scale may follow from another amax, or from none.
  __device__ Rule(typename Q::Real scale, typename Q::Bits absmax, bool given, const AbsmaxState<Q>& state)
      : inverse(scale), entries(is_in_range<Config>(state, inverse) ? Entries::kInRange : Entries::kAny) {
    if constexpr (has_certain_inverse<Config>) {
      const FloatInverse certain = certain_inverse<Config>(scale, given ? amax_of<Config>(scale) : absmax);
      if (entries == Entries::kInRange && certain.high == certain.high) inverse = certain, entries = Entries::kCertain;
      else entries = Entries::kAny;  // seldom: no code of its own
    }
  }
  // Without a thread's entries.
  __device__ Rule(typename Q::Real scale, typename Q::Bits absmax, bool given)
      : Rule(scale, absmax, given, AbsmaxState<Q>{absmax, given || !Q::kSigned}) {}
};

struct Output {
  uint8_t* at;
  int64_t pitch;  // bytes
  bool vector;
};

// Store a run of integers of one row from `column` on, of which `valid` exist.
template <class Config, class Run>
__device__ __forceinline__ void store_run(const Output& out, int64_t row, int64_t column, int64_t valid, const Run& run) {
  if (valid <= 0) return;
  uint8_t* to = out.at + row * out.pitch + column * Config::kStored / 8;
  if (out.vector && valid >= Quantizer<Config>::kVec) run.store(to);
  else run.store_part(to, valid);
}

// Encode entries in double, two at a time: small code for the few vectors that float32 cannot decide.
template <class Config, class Exact>
__device__ __forceinline__ void encode_exact_run(const Output& out, int64_t row, int64_t column, int64_t valid,
                                              const typename Config::Source* from, const Exact& exact) {
  using Real = typename Quantizer<Config>::Real;
  constexpr int kVec = Quantizer<Config>::kVec;
  const int count = valid < kVec ? int(valid) : kVec;
  uint8_t* to = out.at + row * out.pitch + column * Config::kStored / 8;
#pragma unroll 1
  for (int i = 0; i < count; i += 2) {
    int32_t pair[2] = {encode_exact<Config>(static_cast<double>(static_cast<Real>(from[i])), exact(i)), 0};
    if (i + 1 < count) pair[1] = encode_exact<Config>(static_cast<double>(static_cast<Real>(from[i + 1])), exact(i + 1));
    PackedRun<Config::kStored, 2>(pair).store_part(to + i * Config::kStored / 8, count - i);
  }
}

// Encode and store kVec entries x of one row, loaded from `from`. fast(i) and exact(i): inverse of the scale of entry i.
// Integers are clamped if `entries` may be any.
template <class Config, class Fast, class Exact>
__device__ __forceinline__ void encode_run(const Output& out, int64_t row, int64_t column, int64_t valid,
                                           const typename Config::Source (&x)[Quantizer<Config>::kVec],
                                           const typename Config::Source* from, Entries entries,
                                           const Fast& fast, const Exact& exact) {
  constexpr int kVec = Quantizer<Config>::kVec;
  using Run = PackedRun<Config::kStored, kVec>;
  int32_t codes[kVec];
  if constexpr (has_certain_inverse<Config>) {
    if (entries == Entries::kCertain) {
      CUTE_UNROLL
      for (int i = 0; i < kVec; ++i) codes[i] = encode_certain(static_cast<float>(x[i]), fast(i));
      store_run<Config>(out, row, column, valid, Run::lowest(codes));
      return;
    }
  } else if constexpr (has_range_check<Config>) {
    if (entries == Entries::kInRange) {
      if (encode_in_range<Config>(x, fast, codes)) store_run<Config>(out, row, column, valid, Run::lowest(codes));
      else encode_exact_run<Config>(out, row, column, valid, from, exact);
      return;
    }
  }
  bool decided = true;
  CUTE_UNROLL
  for (int i = 0; i < kVec; ++i) {
    if constexpr (cuda::std::is_same_v<typename Config::Source, double>) codes[i] = encode_exact<Config>(x[i], exact(i));
    else decided &= encode_fast<Config>(static_cast<float>(x[i]), fast(i), codes[i]);
    if constexpr (Config::kBits != Config::kStored) codes[i] = max(Range<Config>::kLow, min(Range<Config>::kHigh, codes[i]));
  }
  if (decided) store_run<Config>(out, row, column, valid, Run::template nearest<Config::kSigned>(codes));
  else encode_exact_run<Config>(out, row, column, valid, from, exact);
}

// Tiles of (groups, kSteps * lanes * kVec) entries of a slice (rows, columns).
template <class Q>
struct Tiles {
  int64_t rows, columns;
  uint32_t across, count;  // tiles per row of tiles; all tiles
  int lanes, lane, group;

  __device__ Tiles(int64_t rows_, int64_t columns_, int64_t lanes_)
      : rows(rows_), columns(columns_), lanes(int(lanes_)), lane(int(threadIdx.x) & (int(lanes_) - 1)),
        group(int(threadIdx.x) / int(lanes_)) {
    const int width = lanes * Q::kVec * Q::kSteps;
    // Powers of two: shifts, since a 64-bit division is a call.
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

// Partial amaxes of slices (slices, rows, columns); a slice is split over `splits` CTAs.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
absmax_slices(const typename Config::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t splits, int64_t lanes,
              typename Quantizer<Config>::Bits* partials, int* flags, int64_t vector_loads) {
  pdl_wait();
  using Q = Quantizer<Config>;
  __shared__ typename Q::Bits scratch[Q::kWarps];
  const uint32_t slice_blocks = uint32_t(splits), split = blockIdx.x % slice_blocks;
  const int64_t slice = blockIdx.x / slice_blocks;
  const Tiles<Q> tiles(rows, columns, lanes);
  AbsmaxState<Q> state;
  for (uint32_t tile = split; tile < tiles.count; tile += slice_blocks) {
    alignas(16) typename Q::Source part[Q::kSteps][Q::kVec];
    tiles.load_tile(x + slice * rows * pitch, pitch, tile, vector_loads != 0, part);
    CUTE_UNROLL
    for (int s = 0; s < Q::kSteps; ++s) state.update(part[s]);
  }
  state.write_flags(flags);
  const auto absmax = group_reduce_max(state.absmax, Q::kThreads, scratch);
  if (threadIdx.x == 0) partials[blockIdx.x] = absmax;  // (slices, splits)
}

// Integers of slices (slices, rows, columns). Scales are given (parts == 0), or follow from `parts` partial amaxes per slice.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
encode_slices(const typename Config::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t splits, int64_t lanes,
              const typename Quantizer<Config>::Bits* partials, int64_t parts, typename Quantizer<Config>::Real* scales,
              uint8_t* out, int64_t out_pitch, int* flags, int64_t vector_loads, int64_t vector_stores) {
  pdl_wait();
  using Q = Quantizer<Config>;
  using Real = typename Q::Real;
  __shared__ typename Q::Bits scratch[Q::kWarps];
  const uint32_t slice_blocks = uint32_t(splits), split = blockIdx.x % slice_blocks;
  const int64_t slice = blockIdx.x / slice_blocks;
  Real scale;
  if (parts) {
    typename Q::Bits absmax = 0;
    for (int64_t i = threadIdx.x; i < parts; i += Q::kThreads) {
      const auto other = partials[slice * parts + i];
      absmax = other > absmax ? other : absmax;
    }
    scale = scale_of<Real, Range<Config>::kHigh>(group_reduce_max(absmax, Q::kThreads, scratch));
    if (split == 0 && threadIdx.x == 0) scales[slice] = scale;
  } else {
    scale = scales[slice];
  }
  const double inverse = inverse_of(scale);
  const FloatInverse fast_inverse(scale);
  const Output output{out + slice * rows * out_pitch, out_pitch, vector_stores != 0};
  const Tiles<Q> tiles(rows, columns, lanes);
  AbsmaxState<Q> state;
  // Backwards: the amax kernel left the last tiles in L2.
  for (uint32_t i = split; i < tiles.count; i += slice_blocks) {
    const uint32_t tile = tiles.count - 1 - i;
    alignas(16) typename Q::Source part[Q::kSteps][Q::kVec];
    tiles.load_tile(x + slice * rows * pitch, pitch, tile, vector_loads != 0, part);
    CUTE_UNROLL
    for (int s = 0; s < Q::kSteps; ++s) {
      if (!parts) state.update(part[s]);
      encode_run<Config>(output, tiles.row(tile), tiles.column(tile, s), tiles.valid(tile, s), part[s],
                         x + slice * rows * pitch + tiles.row(tile) * pitch + tiles.column(tile, s), Entries::kAny,
                         [&](int) { return fast_inverse; }, [&](int) { return inverse; });
    }
  }
  state.write_flags(flags);
}

}  // namespace magicube
