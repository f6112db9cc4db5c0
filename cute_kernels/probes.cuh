// Y = X W for sixteen vectors W, and what a check of C = A B by such vectors asks of C: one pass over a matrix, which may
// find the largest magnitudes of its rows or columns too.
//
// W lies vector by vector, (16, pitch), and so does Y, so that it can be the next W; both are zero-padded in rows to
// whole tiles. A warp has four rows of X and four neighbouring columns a lane, whose 4 x 16 sums stay in registers; two
// warps share the columns of the same rows. Sums of a lane are of a 64th of the columns, so rounding grows slowly.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gemm_copy.cuh"

namespace magicube {

constexpr int kProbes = 16, kWarpRows = 4, kRun = 4;
constexpr int kGroups = 8, kSplits = 2, kTileRows = kGroups * kWarpRows;  // warps of a block: (kSplits, kGroups)
constexpr int kSums = kProbes * kWarpRows;                                 // of a warp, [probe][row]
constexpr int kProbeThreads = kGroups * kSplits * 32;
constexpr int kStep = 32 * kRun * kSplits;  // columns that the warps of a block are at, at a time
constexpr int kStrip = 16 * kStep;          // columns whose largest magnitudes a block keeps

enum class Tops { kNone, kRows, kColumns };

// Largest magnitudes as bits, which have the order of magnitudes, with infinity and NaN on top.
template <Tops kTops>
struct TopsFound {};
template <>
struct TopsFound<Tops::kRows> {
  uint32_t part[kSplits][kTileRows];
};
template <>
struct TopsFound<Tops::kColumns> {
  uint32_t part[kStrip];  // of each run of 32 kRun columns, (kRun, 32): no two lanes use a bank

  __device__ void clear() {
    for (int i = threadIdx.x; i < kStrip; i += kProbeThreads) part[i] = 0;
    __syncthreads();
  }
  // A warp's lanes have `top` of kRun columns each, `at` the first of the warp's in the strip.
  __device__ __forceinline__ void see(int at, const uint32_t (&top)[kRun]) {
    CUTE_UNROLL
    for (int i = 0; i < kRun; ++i) atomicMax(part + at + i * 32 + threadIdx.x % 32, top[i]);
  }
  // To all blocks' maxima of `count` columns.
  __device__ void flush(uint32_t* tops, int count) {
    __syncthreads();
    for (int c = threadIdx.x; c < min(count, kStrip); c += kProbeThreads) {
      const int run = c % (32 * kRun);
      atomicMax(tops + c, part[c - run + run % kRun * 32 + run / kRun]);
    }
    __syncthreads();
    clear();
  }
};

// Four neighbouring entries of a warp's rows, zero where there are none.
template <class Source>
struct ProbeRun {
  static_assert(sizeof(Source) == 4 || sizeof(Source) == 2, "a load is of 16 or 8 bytes");
  using Word = cuda::std::conditional_t<sizeof(Source) == 4, uint4, uint2>;
  alignas(16) Source entries[kWarpRows][kRun];

  __device__ __forceinline__ void load(const Source* from, int64_t pitch, int rows, int valid, bool vector) {
    CUTE_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      const Source* at = from + r * pitch;
      if (vector && r < rows && valid >= kRun) {
        *reinterpret_cast<Word*>(entries[r]) = __ldg(reinterpret_cast<const Word*>(at));
      } else {
        CUTE_UNROLL
        for (int i = 0; i < kRun; ++i) entries[r][i] = r < rows && i < valid ? at[i] : Source(0.0f);
      }
    }
  }
};

// Adds 2 kCount sums of 32 lanes so that lanes with the bit `kLane` keep the second half of them, the others the first.
template <int kCount, int kLane>
__device__ __forceinline__ void add_halves(float* sums) {
  const bool second = (threadIdx.x & kLane) != 0;
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const float low = sums[i], high = sums[i + kCount];
    sums[i] = (second ? high : low) + __shfl_xor_sync(~0u, second ? low : high, kLane);
  }
}

// A tile of kTileRows rows: kProbes x kTileRows sums to shared memory; returns this lane's part of the sum of squares.
// `tops`: of all columns, where those are asked for; largest magnitudes of rows stay in `found`.
template <class Source, bool kSquares, Tops kTops>
__device__ __forceinline__ double probe_tile(const Source* x, int64_t pitch, int64_t rows, int columns, bool vector,
                                             const float* w, int w_pitch, int64_t tile, float (*part)[kGroups][kSums],
                                             TopsFound<kTops>& found, uint32_t* tops) {
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32 % kGroups, split = threadIdx.x / 32 / kGroups;
  const int64_t first = tile * kTileRows + group * kWarpRows;
  const int here = first < rows ? int(min(rows - first, int64_t{kWarpRows})) : 0;
  const Source* from = x + (here ? first * pitch : 0);
  int at = split * (32 * kRun) + lane * kRun;
  float sums[kSums] = {};
  double squares = 0.0;
  uint32_t row_tops[kWarpRows] = {};
  if constexpr (kTops == Tops::kColumns) found.clear();
  for (int base = 0; base < columns; base += kStep, at += kStep) {  // the same for all lanes
    ProbeRun<Source> run;
    run.load(from + at, pitch, here, columns - at, vector);
    const float* weights = w + (at < w_pitch ? at : 0);  // beyond, entries of x are zero
    if constexpr (kSquares) {
      float sum = 0.0f;
      CUTE_UNROLL
      for (int i = 0; i < kWarpRows * kRun; ++i) {
        const float value = static_cast<float>(run.entries[i / kRun][i % kRun]);
        sum = fmaf(value, value, sum);
      }
      squares += sum;
    }
    if constexpr (kTops != Tops::kNone) {
      uint32_t column_tops[kRun] = {};
      CUTE_UNROLL
      for (int i = 0; i < kWarpRows * kRun; ++i) {
        const uint32_t bits = __float_as_uint(static_cast<float>(run.entries[i / kRun][i % kRun])) & 0x7fffffff;
        uint32_t& top = kTops == Tops::kRows ? row_tops[i / kRun] : column_tops[i % kRun];
        top = max(top, bits);
      }
      if constexpr (kTops == Tops::kColumns) found.see(base % kStrip + split * (32 * kRun), column_tops);
    }
    CUTE_UNROLL
    for (int p = 0; p < kProbes; ++p) {
      const float4 by = __ldg(reinterpret_cast<const float4*>(weights));
      weights += w_pitch;
      CUTE_UNROLL
      for (int r = 0; r < kWarpRows; ++r) {
        float& sum = sums[p * kWarpRows + r];
        sum = fmaf(static_cast<float>(run.entries[r][0]), by.x, sum);
        sum = fmaf(static_cast<float>(run.entries[r][1]), by.y, sum);
        sum = fmaf(static_cast<float>(run.entries[r][2]), by.z, sum);
        sum = fmaf(static_cast<float>(run.entries[r][3]), by.w, sum);
      }
    }
    if constexpr (kTops == Tops::kColumns) {
      const int strip = base / kStrip * kStrip;
      if (base + kStep >= min(strip + kStrip, columns)) found.flush(tops + strip, columns - strip);
    }
  }
  if constexpr (kTops == Tops::kRows) {
    CUTE_UNROLL
    for (int r = 0; r < kWarpRows; ++r) {
      const uint32_t top = __reduce_max_sync(~0u, row_tops[r]);
      if (lane == 0) found.part[split][group * kWarpRows + r] = top;
    }
  }
  add_halves<32, 16>(sums);
  add_halves<16, 8>(sums);
  add_halves<8, 4>(sums);
  add_halves<4, 2>(sums);
  add_halves<2, 1>(sums);
  CUTE_UNROLL
  for (int i = 0; i < kSums / 32; ++i) part[split][group][lane * (kSums / 32) + i] = sums[i];
  return squares;
}

// Sum `index` of a tile, [probe][row of the tile].
__device__ __forceinline__ float tile_sum(const float (*part)[kGroups][kSums], int index) {
  const int probe = index / kTileRows, row = index % kTileRows;
  float sum = 0.0f;
  CUTE_UNROLL
  for (int s = 0; s < kSplits; ++s) sum += part[s][row / kWarpRows][probe * kWarpRows + row % kWarpRows];
  return sum;
}

// y (16, y_pitch) = X W; a block is a tile. `tops`: the bits of the rows' or columns' largest magnitudes, the latter zero
// before.
template <class C>
__global__ void __launch_bounds__(kProbeThreads)
probe_rows(const typename C::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t vector, const float* w,
           int64_t w_pitch, float* y, int64_t y_pitch, uint32_t* tops) {
  static_assert(kProbes * kTileRows == kProbeThreads, "a thread has one sum of a tile");
  constexpr Tops kTops = static_cast<Tops>(C::kTops);
  __shared__ float part[kSplits][kGroups][kSums];
  __shared__ TopsFound<kTops> found;
  probe_tile<typename C::Source, false, kTops>(x, pitch, rows, int(columns), vector != 0, w, int(w_pitch), blockIdx.x, part,
                                               found, tops);
  __syncthreads();
  if constexpr (kTops == Tops::kRows) {
    const int64_t own = int64_t{blockIdx.x} * kTileRows + threadIdx.x;
    if (threadIdx.x < kTileRows && own < rows) tops[own] = max(found.part[0][threadIdx.x], found.part[1][threadIdx.x]);
  }
  const int probe = threadIdx.x / kTileRows, row = threadIdx.x % kTileRows;
  y[probe * y_pitch + int64_t{blockIdx.x} * kTileRows + row] = tile_sum(part, threadIdx.x);
}

// Parts (splits, 16, y_pitch) of Y = X W for an X whose columns are contiguous: x is X^T (rows, columns) as it lies, and a
// block has 32 kRun of its columns and every gridDim.y-th of the runs of rows that its warps take. `tops`: the bits of the
// largest magnitudes of the rows or columns of X^T, zero before.
template <class C>
__global__ void __launch_bounds__(kProbeThreads)
probe_columns(const typename C::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t vector, const float* w,
              int64_t w_pitch, float* y, int64_t y_pitch, uint32_t* tops) {
  constexpr Tops kTops = static_cast<Tops>(C::kTops);
  constexpr int kWarps = kProbeThreads / 32, kColumns = 32 * kRun, kAtOnce = kProbeThreads / kColumns;
  __shared__ float part[kWarps][kAtOnce * kColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t corner = int64_t{blockIdx.x} * kColumns, own = corner + lane * kRun;
  const int valid = own < columns ? int(min(columns - own, int64_t{kRun})) : 0;
  float sums[kProbes * kRun] = {};
  __shared__ uint32_t column_tops[kTops == Tops::kColumns ? kColumns : 1];  // (kRun, 32); registers have no room
  if constexpr (kTops == Tops::kColumns) {
    if (threadIdx.x < kColumns) column_tops[threadIdx.x] = 0;
    __syncthreads();
  }
  for (int64_t row = (int64_t{blockIdx.y} * kWarps + warp) * kWarpRows; row < rows;
       row += int64_t{gridDim.y} * kWarps * kWarpRows) {
    ProbeRun<typename C::Source> run;
    const int here = int(min(rows - row, int64_t{kWarpRows}));
    run.load(x + row * pitch + (valid ? own : 0), pitch, here, valid, vector != 0);
    if constexpr (kTops != Tops::kNone) {
      uint32_t row_tops[kWarpRows] = {}, run_tops[kRun] = {};
      CUTE_UNROLL
      for (int i = 0; i < kWarpRows * kRun; ++i) {
        const uint32_t bits = __float_as_uint(static_cast<float>(run.entries[i / kRun][i % kRun])) & 0x7fffffff;
        uint32_t& top = kTops == Tops::kRows ? row_tops[i / kRun] : run_tops[i % kRun];
        top = max(top, bits);
      }
      if constexpr (kTops == Tops::kColumns) {
        CUTE_UNROLL
        for (int c = 0; c < kRun; ++c) atomicMax(column_tops + c * 32 + lane, run_tops[c]);
      } else {
        CUTE_UNROLL
        for (int r = 0; r < kWarpRows; ++r) {
          const uint32_t top = __reduce_max_sync(~0u, row_tops[r]);
          if (lane == 0 && r < here) atomicMax(tops + row + r, top);
        }
      }
    }
    CUTE_UNROLL
    for (int p = 0; p < kProbes; ++p) {
      const float4 by = __ldg(reinterpret_cast<const float4*>(w + p * w_pitch + row));
      CUTE_UNROLL
      for (int c = 0; c < kRun; ++c) {
        float& sum = sums[p * kRun + c];
        sum = fmaf(static_cast<float>(run.entries[0][c]), by.x, sum);
        sum = fmaf(static_cast<float>(run.entries[1][c]), by.y, sum);
        sum = fmaf(static_cast<float>(run.entries[2][c]), by.z, sum);
        sum = fmaf(static_cast<float>(run.entries[3][c]), by.w, sum);
      }
    }
  }
  const int64_t column = corner + threadIdx.x % kColumns;
  CUTE_UNROLL
  for (int first = 0; first < kProbes; first += kAtOnce) {
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce * kRun; ++i) {
      part[warp][i / kRun * kColumns + lane * kRun + i % kRun] = sums[first * kRun + i];
    }
    __syncthreads();
    float sum = 0.0f;
    CUTE_UNROLL
    for (int other = 0; other < kWarps; ++other) sum += part[other][threadIdx.x];
    const int64_t probe = int64_t{blockIdx.y} * kProbes + first + threadIdx.x / kColumns;
    if (column < y_pitch) y[probe * y_pitch + column] = sum;
    __syncthreads();
  }
  if constexpr (kTops == Tops::kColumns) {
    const int own_run = threadIdx.x % kRun * 32 + threadIdx.x / kRun;
    if (threadIdx.x < kColumns && column < columns) atomicMax(tops + column, column_tops[own_run]);
  }
}

// How many of `scales` are NaN or belong to lines far from one, as seen by this thread.
__device__ __forceinline__ double far_scales(const float* scales, int64_t count, float least, float most) {
  const int64_t step = int64_t{gridDim.x} * kProbeThreads;
  int far = 0;
  for (int64_t i = int64_t{blockIdx.x} * kProbeThreads + threadIdx.x; i < count; i += step) {
    const float scale = scales[i];
    far += scale >= least && scale <= most ? 0 : 1;
  }
  return far;
}

__device__ __forceinline__ double warp_sum(double value) {
  CUTE_UNROLL
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
  return value;
}

// A block's part of: the Gram matrix of P - C W (16 x 16), ||P||^2, ||C W||^2, ||C||^2, and the number of far scales.
// `product` is P (16, y_pitch); `out` (blocks, 260).
template <class C>
__global__ void __launch_bounds__(kProbeThreads)
compare_rows(const typename C::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t vector, const float* w,
             int64_t w_pitch, const float* product, int64_t y_pitch, const float* left, int64_t left_count,
             const float* right, int64_t right_count, float least, float most, double* out) {
  constexpr int kGram = kProbes * kProbes, kOthers = 4;
  static_assert(kGram <= kProbeThreads, "a thread has one entry of the Gram matrix, or none");
  __shared__ float part[kSplits][kGroups][kSums];
  __shared__ double difference[kProbes][kTileRows + 1];
  __shared__ double others[kOthers][kProbeThreads / 32];
  __shared__ double kept[kOthers][kProbeThreads];  // a thread's own sums, which registers have no room for
  const int i = threadIdx.x / kProbes % kProbes, j = threadIdx.x % kProbes;
  double* const mine = &kept[0][threadIdx.x];
  TopsFound<Tops::kNone> no_tops;
  for (int s = 0; s < kOthers; ++s) mine[s * kProbeThreads] = 0.0;
  for (int64_t tile = blockIdx.x; tile * kTileRows < rows; tile += gridDim.x) {
    mine[2 * kProbeThreads] += probe_tile<typename C::Source, true, Tops::kNone>(
        x, pitch, rows, int(columns), vector != 0, w, int(w_pitch), tile, part, no_tops, nullptr);
    __syncthreads();
    static_assert(kProbes * kTileRows == kProbeThreads, "a thread has one sum of a tile");
    const double claimed = tile_sum(part, threadIdx.x);
    const double wanted = product[threadIdx.x / kTileRows * y_pitch + tile * kTileRows + threadIdx.x % kTileRows];
    difference[threadIdx.x / kTileRows][threadIdx.x % kTileRows] = wanted - claimed;
    mine[0] += wanted * wanted;
    mine[kProbeThreads] += claimed * claimed;
    __syncthreads();  // also: part may be written again
    double gram = 0.0;
    for (int row = 0; row < kTileRows; ++row) gram += difference[i][row] * difference[j][row];
    mine[3 * kProbeThreads] += gram;
  }
  double sums[kOthers];
  for (int s = 0; s < kOthers - 1; ++s) sums[s] = mine[s * kProbeThreads];
  sums[3] = far_scales(left, left_count, least, most) + far_scales(right, right_count, least, most);
  for (int s = 0; s < kOthers; ++s) {
    const double sum = warp_sum(sums[s]);
    if (threadIdx.x % 32 == 0) others[s][threadIdx.x / 32] = sum;
  }
  __syncthreads();
  double* to = out + int64_t{blockIdx.x} * (kGram + kOthers);
  if (threadIdx.x < kGram) to[threadIdx.x] = mine[3 * kProbeThreads];
  if (threadIdx.x < kOthers) {
    double sum = 0.0;
    for (int warp = 0; warp < kProbeThreads / 32; ++warp) sum += others[threadIdx.x][warp];
    to[kGram + threadIdx.x] = sum;
  }
}

}  // namespace magicube
