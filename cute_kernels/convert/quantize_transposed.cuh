// Quantization with per-row scales into the transposed matrix: q[k, r] = round(x[r, k] / scale[r]); one launch, for few rows.
//
// Scales and integers are those of quantize_rows.cuh. The output (columns, out_pitch) has its rows at multiples of 16 bytes, as an
// SpMM reads its dense operand; entries of rows that do not exist are zeros.
// Architectures: sm_80 and later.
// Work: a CTA takes the amaxes of kRows rows, and stores a share of their columns, kRows bytes a column. Other CTAs find the same
// amaxes again, in the second-level cache: that takes less than to wait for each other.
// Pipeline: kSteps loads of 16 bytes in flight per thread; the thread's own entries are loaded before the amaxes.
#pragma once

#include "convert/quantize.cuh"

namespace magicube {

// encode_exact as small code: for the few entries that float32 cannot decide.
template <class C>
__device__ __noinline__ int32_t encode_undecided(float x, float scale) {
  return encode_exact<C>(x, inverse_of(scale));
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
  float scale[kRows];
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
    }
    if (begin == 0 && threadIdx.x < kRows && first + threadIdx.x < rows) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        if (int(threadIdx.x) == r) scales[first + r] = scale[r];
      }
    }
  }
  FloatInverse inverse[kRows];
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) inverse[r] = FloatInverse(scale[r]);
  for (int64_t column = begin + kRun * threadIdx.x; column < end; column += kRun * C::kThreads) {
    if (column != begin + kRun * int64_t{threadIdx.x}) load_own(column);
    CUTE_UNROLL
    for (int c = 0; c < kRun; ++c) {
      int32_t codes[kRows];
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const float entry = static_cast<float>(own[r][c]);
        if (!encode_fast<C>(entry, inverse[r], codes[r])) codes[r] = encode_undecided<C>(entry, scale[r]);
      }
      if (column + c < end) PackedRun<8, kRows>::template nearest<true>(codes).store(out + (column + c) * out_pitch + first);
    }
  }
}

}  // namespace magicube
