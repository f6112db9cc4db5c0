// Quantization with per-row scales into the transposed matrix: q[k, r] = round(x[r, k] / scale[r]); one launch.
//
// Scales and integers are those of quantize_rows.cuh. The output (columns, out_pitch) has its rows at multiples of 16 bytes, as an
// SpMM reads its dense operand; entries of rows that do not exist are zeros.
// Architectures: encode_transposed sm_80 and later, encode_turned sm_90 and later (clusters).
// Work: for few rows, a CTA of encode_transposed takes the amaxes of kRows rows, and stores a share of their columns, kRows bytes a
// column. Other CTAs find the same amaxes again, in the second-level cache: that takes less than to wait for each other. For many
// rows, a cluster of encode_turned has kRows rows, each of its CTAs a part of their columns in registers, so that every entry is
// read once; the CTAs exchange amaxes.
// Pipeline: kSteps loads of 16 bytes in flight per thread; encode_transposed loads a thread's own entries before the amaxes.
#pragma once

#include "convert/quantize.cuh"
#include "device/cluster.cuh"

namespace magicube {

// encode_exact as small code: for the few entries that one product in float32 cannot decide.
template <class C>
__device__ __noinline__ int32_t encode_undecided(float x, float scale) {
  int32_t code;
  if (!encode_near(x, FloatInverse(scale), code)) return encode_exact<C>(x, inverse_of(scale));
  return max(Range<C>::kLow, min(Range<C>::kHigh, code));
}

// Scales (rows), unless one is given for all. `share`: columns of a CTA, whole runs; `vector_loads`: rows are aligned to 16 bytes.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
encode_transposed(const typename C::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t share, float* scales,
                  uint8_t* out, int64_t out_pitch, int64_t vector_loads) {
  pdl_wait();
  using Q = Quantizer<C>;
  using Source = typename Q::Source;
  constexpr int kRows = C::kRows, kRun = C::kRun;                          // of a CTA; columns of a thread
  constexpr int kTeams = kRows < Q::kWarps ? Q::kWarps / kRows : 1;         // warps per row
  constexpr int kOwn = kRows * kTeams / Q::kWarps, kStep = 32 * kTeams * Q::kVec;  // rows per warp; columns of a load of a row
  __shared__ uint32_t maxima[kRows][kTeams];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first = int64_t{blockIdx.y} * kRows, begin = int64_t{blockIdx.x} * share, end = min(columns, begin + share);
  const bool vector = vector_loads != 0;
  alignas(8) Source own[kRows][kRun];
  const auto load_own = [&](int64_t column) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Source* from = x + (first + r) * pitch + column;
      const int64_t valid = first + r < rows ? end - column : 0;
      if (kRun == 2 && vector && valid >= kRun) {
        using Pair = cuda::std::conditional_t<sizeof(Source) == 2, uint32_t, uint2>;
        *reinterpret_cast<Pair*>(own[r]) = __ldg(reinterpret_cast<const Pair*>(from));
      } else {
        CUTE_UNROLL
        for (int c = 0; c < kRun; ++c) own[r][c] = c < valid ? from[c] : Source(0.0f);
      }
    }
  };
  load_own(begin + kRun * threadIdx.x);
  constexpr bool kCertain = !C::kGiven && has_certain_inverse<C>;
  float scale[kRows];
  FloatInverse inverse[kRows];
  if constexpr (C::kGiven) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) scale[r] = __ldg(scales);
  } else {
    CUTE_UNROLL
    for (int o = 0; o < kOwn; ++o) {
      const int r = warp % kRows + o * Q::kWarps;
      const int64_t row = first + r, length = row < rows ? columns : 0;
      AbsmaxState<Q> state;
      for (int64_t at = (warp / kRows * 32 + lane) * Q::kVec; at < length; at += Q::kSteps * kStep) {
        alignas(16) Source part[Q::kSteps][Q::kVec];
        CUTE_UNROLL
        for (int s = 0; s < Q::kSteps; ++s) load<Q>(x + row * pitch + at + s * kStep, length - at - s * kStep, vector, part[s]);
        CUTE_UNROLL
        for (int s = 0; s < Q::kSteps; ++s) state.update(part[s]);
      }
      const uint32_t absmax = __reduce_max_sync(~0u, state.absmax);
      if (lane == 0) maxima[r][warp / kRows] = absmax;
    }
    __syncthreads();
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      uint32_t largest = 0;
      CUTE_UNROLL
      for (int t = 0; t < kTeams; ++t) largest = max(largest, maxima[r][t]);
      scale[r] = scale_of<float, Range<C>::kHigh>(largest);
      if constexpr (kCertain) inverse[r] = certain_inverse<C>(scale[r], largest);
    }
    if (begin == 0 && threadIdx.x < kRows && first + threadIdx.x < rows) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        if (int(threadIdx.x) == r) scales[first + r] = scale[r];
      }
    }
  }
  if constexpr (!kCertain) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) inverse[r] = FloatInverse(scale[r]);
  }
  for (int64_t column = begin + kRun * threadIdx.x; column < end; column += kRun * C::kThreads) {
    if (column != begin + kRun * int64_t{threadIdx.x}) load_own(column);
    CUTE_UNROLL
    for (int c = 0; c < kRun; ++c) {
      int32_t codes[kRows];
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const float entry = static_cast<float>(own[r][c]);
        bool decided = inverse[r].high == inverse[r].high;
        if constexpr (kCertain) codes[r] = encode_certain(entry, inverse[r]);
        else decided = encode_fast<C>(entry, inverse[r], codes[r]);
        if (!decided) codes[r] = encode_undecided<C>(entry, scale[r]);
      }
      using Run = PackedRun<8, kRows>;
      const Run run = kCertain ? Run::lowest(codes) : Run::template nearest<true>(codes);
      if (column + c < end) run.store(out + (column + c) * out_pitch + first);
    }
  }
}

// The integers of a CTA on their way to the output: shared rows of kRows bytes, one for each of its columns. Unit w of a row, kOwn
// bytes of one warp, is at w ^ group % 8, and rows change places inside groups of kVec, so that neither the writes of a unit nor
// the reads of 16 bytes have bank conflicts.
template <class C>
struct TurnedTile {
  using Q = Quantizer<C>;
  static constexpr uint32_t kUnits = 8, kRows = C::kRows, kOwn = kRows / kUnits, kRowsALine = 128 / kRows;
  static_assert(kOwn == 4 || kOwn == 8, "a unit is one or two words");
  static_assert(Q::kVec % kRowsALine == 0, "rows change places inside a group");
  uint8_t* tile;  // (columns, kRows)

  // Where a lane's unit of its columns kSpan s + kVec lane + c, c = p mod kRowsALine, is, less (kSpan s + c - p) kRows.
  __device__ uint8_t* place(uint32_t lane, uint32_t unit, uint32_t p) const {
    return tile + (Q::kVec * lane + (p ^ lane / kUnits % kRowsALine)) * kRows + (unit ^ lane % kUnits) * kOwn;
  }
  // 16 bytes of a column.
  __device__ uint4 load(uint32_t column, uint32_t chunk) const {
    constexpr uint32_t kPerChunk = 16 / kOwn;
    const uint32_t group = column / Q::kVec, turn = group % kUnits, row = column ^ group / kUnits % kRowsALine;
    uint4 x = *reinterpret_cast<const uint4*>(tile + row * kRows + (chunk ^ turn / kPerChunk) * 16);
    const bool halves = turn & (kPerChunk / 2), words = kOwn == 4 && (turn & 1);
    if (halves) x = make_uint4(x.z, x.w, x.x, x.y);
    return words ? make_uint4(x.y, x.x, x.w, x.z) : x;
  }
};

// As encode_transposed, for many rows. `inputs`: given scales (step 0: one for all). Without, the kCluster CTAs of a cluster have all
// columns of kRows rows among them, and exchange amaxes. x, pitch and columns are multiples of 16 bytes.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kResident)
encode_turned(const typename C::Source* x, int64_t pitch, int64_t rows, int64_t columns, const float* inputs, int64_t step,
              float* scales, uint8_t* out, int64_t out_pitch) {
  using Q = Quantizer<C>;
  using Source = typename Q::Source;
  using Tile = TurnedTile<C>;
  constexpr int kOwn = Tile::kOwn, kSteps = Q::kSteps, kCluster = C::kCluster;  // kOwn: rows of a warp
  constexpr int kSpan = 32 * Q::kVec, kWidth = kSteps * kSpan;  // columns of a load of a warp, and of the CTA
  constexpr bool kExchanges = !C::kGiven && kCluster > 1;
  static_assert(Q::kWarps == Tile::kUnits, "each warp has its rows");
  __shared__ __align__(16) uint8_t shared[kWidth * C::kRows];
  __shared__ uint32_t maxima[kCluster][C::kRows];
  __shared__ float row_scales[C::kRows];  // for entries that float32 cannot decide
  __shared__ __align__(8) uint64_t arrived;
  const uint32_t unit = warp_of_block(), lane = threadIdx.x % 32, barrier = shared_address(&arrived);
  const int64_t first = int64_t{blockIdx.y} * C::kRows, begin = int64_t{blockIdx.x} * kWidth;  // x: the CTA of a cluster
  if constexpr (kExchanges) {
    if (threadIdx.x == 0) {
      barrier_init(barrier, 1);
      barrier_fence();
      mbarrier_arrive_expect_tx(barrier, kCluster * C::kRows * 4);
    }
    cluster::arrive();
  }
  pdl_wait();
  alignas(16) Source held[kOwn][kSteps][Q::kVec];
  {
    const int64_t row = first + unit * kOwn, column = begin + lane * Q::kVec;
    const Source* from = x + row * pitch + column;
    CUTE_UNROLL
    for (int o = 0; o < kOwn; ++o, from += pitch) {
      CUTE_UNROLL
      for (int s = 0; s < kSteps; ++s) {
        const bool exists = row + o < rows && column + s * kSpan < columns;
        *reinterpret_cast<uint4*>(held[o][s]) = exists ? __ldg(reinterpret_cast<const uint4*>(from + s * kSpan)) : uint4{};
      }
    }
  }
  const uint32_t own = unit * kOwn + lane % kOwn;  // lane o has the scale of the warp's row o
  const bool exists = first + own < rows;
  float scale = 1.0f;
  uint32_t largest = 0;
  if constexpr (C::kGiven) {
    if (exists) scale = __ldg(inputs + (first + own) * step);
  } else {
    CUTE_UNROLL
    for (int o = 0; o < kOwn; ++o) {
      AbsmaxState<Q> state;
      CUTE_UNROLL
      for (int s = 0; s < kSteps; ++s) state.update(held[o][s]);
      const uint32_t absmax = __reduce_max_sync(~0u, state.absmax);
      largest = lane % kOwn == o ? absmax : largest;
    }
    if constexpr (kExchanges) {
      cluster::wait();  // all CTAs of the cluster have made their barriers
      const uint32_t to = shared_address(&maxima[blockIdx.x][own]);
      CUTE_UNROLL
      for (uint32_t other = lane / kOwn; other < kCluster; other += 32 / kOwn) cluster::send_to(to, barrier, other, largest);
      barrier_wait(barrier, 0);
      CUTE_UNROLL
      for (int p = 0; p < kCluster; ++p) largest = max(largest, maxima[p][own]);
    }
    scale = scale_of<float, Range<C>::kHigh>(largest);
    if (blockIdx.x == 0 && lane < kOwn && exists) scales[first + own] = scale;
  }
  if (lane < kOwn) row_scales[own] = scale;
  __syncwarp();
  const Tile tile{shared};
  uint8_t* places[Tile::kRowsALine];
  CUTE_UNROLL
  for (uint32_t p = 0; p < Tile::kRowsALine; ++p) places[p] = tile.place(lane, unit, p);
  constexpr bool kCertain = has_certain_inverse<C>;
  const FloatInverse parts(scale);
  FloatInverse own_inverse;
  own_inverse.high = parts.high + parts.low, own_inverse.low = 0.0f;
  // Of a row with an entry that is not finite, or so small or large that its inverse is none, the product is NaN.
  bool in_range = __all_sync(~0u, scale * own_inverse.high < 1.5f);
  if constexpr (kCertain) {
    const FloatInverse certain = certain_inverse<C>(scale, C::kGiven ? amax_of<C>(scale) : largest);
    in_range = __all_sync(~0u, certain.high == certain.high);
    if (in_range) own_inverse = certain;
  }
  FloatInverse inverse[kOwn];
  CUTE_UNROLL
  for (int o = 0; o < kOwn; ++o) {
    inverse[o].high = __shfl_sync(~0u, own_inverse.high, o);
    inverse[o].low = kCertain ? __shfl_sync(~0u, own_inverse.low, o) : 0.0f;
    if constexpr (C::kGiven && kCertain) {  // other entries than those of the scale
      AbsmaxState<Q> state;
      CUTE_UNROLL
      for (int s = 0; s < kSteps; ++s) state.update(held[o][s]);
      in_range &= __uint_as_float(state.absmax) * inverse[o].high < Range<C>::kHigh + 0.25f;
    }
  }
  CUTE_UNROLL
  for (int s = 0; s < kSteps; ++s) {
    CUTE_UNROLL
    for (int c = 0; c < Q::kVec; ++c) {
      using Run = PackedRun<8, kOwn>;
      int32_t codes[kOwn];
      bool decided = in_range, saturates = false;
      if constexpr (kCertain) {
        CUTE_UNROLL
        for (int o = 0; o < kOwn; ++o) codes[o] = encode_certain(static_cast<float>(held[o][s][c]), inverse[o]);
      } else if constexpr (!C::kGiven) {  // as encode_in_range
        constexpr float kRound = 0x1.8p23f;
        float farthest = 0.0f;
        CUTE_UNROLL
        for (int o = 0; o < kOwn; ++o) {
          const float value = static_cast<float>(held[o][s][c]), shifted = __fmaf_rn(value, inverse[o].high, kRound);
          farthest = fmaxf(farthest, fabsf(__fmaf_rn(value, inverse[o].high, -__fadd_rn(shifted, -kRound))));
          codes[o] = __float_as_int(shifted);  // the integer in the low bits
        }
        decided = in_range && farthest < 0.5f - 0x1p-14f;
      }
      if (C::kGiven && !(kCertain && in_range)) {
        decided = saturates = true;
        CUTE_UNROLL
        for (int o = 0; o < kOwn; ++o) {  // an inverse biased for other rows is near enough
          const bool one = encode_fast<C>(static_cast<float>(held[o][s][c]), inverse[o], codes[o]);
          decided &= one;
        }
      }
      if (!decided) {
        CUTE_UNROLL
        for (int o = 0; o < kOwn; ++o) {
          codes[o] = encode_undecided<C>(static_cast<float>(held[o][s][c]), row_scales[unit * kOwn + o]);
        }
      }
      const Run run = saturates ? Run::template nearest<true>(codes) : Run::lowest(codes);
      constexpr uint32_t kLine = Tile::kRowsALine;
      run.store(places[c % kLine] + (s * kSpan + c / kLine * kLine) * C::kRows);
    }
  }
  __syncthreads();
  constexpr uint32_t kChunks = C::kRows / 16;
  CUTE_UNROLL
  for (uint32_t i = threadIdx.x; i < kWidth * kChunks; i += C::kThreads) {
    const uint32_t column = i / kChunks, chunk = i % kChunks;
    if (begin + column >= columns || first + 16 * chunk >= out_pitch) continue;
    *reinterpret_cast<uint4*>(out + (begin + column) * out_pitch + first + 16 * chunk) = tile.load(column, chunk);
  }
}

}  // namespace magicube
