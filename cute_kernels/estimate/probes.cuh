// Y = X W for 16 probe vectors W, in one pass over a matrix that can also emit the absmax of its rows or columns.
//
// sm_80 and later, float64 sums (estimate/probe_squares.cuh) sm_90 and later; memory-bound. W is stored probe by probe, (16, pitch),
// and so is Y: it can be the next W. Both are padded with zeros to a multiple of 32 rows. Work: a warp takes 16 columns of 32 rows
// of X at a time, as Y^T = W^T X^T on Tensor Cores. Where sums are not float64, a float32 is the sum of two tf32 numbers; of the
// four products of such pairs the smallest is dropped. Tensor Cores truncate float32 sums, so each accumulator is short, and long
// sums are float32 additions. Pipeline: kStages stages per lane, filled by cp.async.
//
// Lane (g, t) = (lane / 4, lane % 4) loads four runs of four neighbors. The order of the columns of X in an mma is free if W
// has the same, so index 4 t + i of the sum is column i of a lane's run, and loads are as wide as possible. For a row-major
// X^T, runs are of four rows of X, and the four runs are the four indices. Source: Ootomo, Yokota, IJHPCA 36(4), 2022 (tf32
// splitting).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cute/arch/mma_sm80.hpp>
#include <cute/arch/mma_sm90.hpp>

#include "device/warpgroup.cuh"

namespace magicube {

constexpr int kProbes = 16, kRun = 4;
constexpr int kWarps = 16, kProbeThreads = 32 * kWarps;
constexpr int kWarpRows = 32, kTiles = kWarpRows / 8;  // rows of X per warp, as columns of the mma
constexpr int kDepth = 4 * kRun;  // columns of X per step of a warp
constexpr int kPartPitch = kWarpRows + 8;  // no bank conflicts between the stores of a lane's sums

// Slices whose absmax is emitted.
enum class Absmax { kNone, kRows, kColumns };

// Two tf32 numbers whose sum is a float32 to 23 bits. Rounding to nearest makes remainders of either sign: no bias adds up.
struct SplitFloat {
  uint32_t high, low;

  __device__ __forceinline__ explicit SplitFloat(float x) {
    high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));  // Tensor Cores ignore its last 13 bits
  }
};

// Four runs of neighbors as they are in memory, zero beyond the matrix.
template <class Source, bool kTransposed>
struct ProbeRuns {
  static_assert(sizeof(Source) == 4 || sizeof(Source) == 2, "a load is of 16 or 8 bytes");
  static constexpr int kBytes = kRun * int(sizeof(Source)), kStageBytes = kTiles * 32 * kBytes;  // bytes of a run; of a warp's runs
  using Word = cuda::std::conditional_t<sizeof(Source) == 4, uint4, uint2>;
  alignas(16) Source entries[kTiles][kRun];

  // Start the copy of a lane's runs to its own part of a stage, `at` the first one. `from`: first element of the first run;
  // `slices` of the four runs and `valid` elements of each exist. `whole`: all four elements exist and are aligned.
  __device__ __forceinline__ static void fetch(uint8_t* at, const Source* from, int64_t pitch, int slices, int valid,
                                               bool whole) {
    CUTE_UNROLL
    for (int i = 0; i < kTiles; ++i, at += 32 * kBytes) {
      const Source* run = from + (i < slices ? i * pitch : 0);
      if (whole) {
        copy_async_run<kBytes>(shared_address(at), run, i < slices ? kBytes : 0);
      } else {
        CUTE_UNROLL
        for (int c = 0; c < kRun; ++c) {
          reinterpret_cast<Source*>(at)[c] = i < slices && c < valid ? run[c] : Source(0.0f);
        }
      }
    }
  }
  __device__ __forceinline__ void read(const uint8_t* at) {
    CUTE_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      *reinterpret_cast<Word*>(entries[i]) = *reinterpret_cast<const Word*>(at + i * 32 * kBytes);
    }
  }
  // Element of row `tile` of the lane's four at index `place` of the sum.
  __device__ __forceinline__ float at(int tile, int place) const {
    return static_cast<float>(kTransposed ? entries[place][tile] : entries[tile][place]);
  }
};

// Row of the tile that column `column` of mma `tile` stands for.
template <bool kTransposed>
__device__ __forceinline__ int probe_row(int tile, int column) {
  return kTransposed ? column * kTiles + tile : tile * 8 + column;
}

// sums += W^T X^T of 16 columns of X: (kTiles, 4) accumulators.
template <class Source, bool kTransposed>
__device__ __forceinline__ void probe_products(const ProbeRuns<Source, kTransposed>& x, const float4 (&w)[2],
                                               float (&sums)[kTiles][4]) {
  using Atom = cute::SM80_16x8x8_F32TF32TF32F32_TN;
  const float weights[2][kRun] = {{w[0].x, w[0].y, w[0].z, w[0].w}, {w[1].x, w[1].y, w[1].z, w[1].w}};
  float part[kTiles][4] = {};
  uint32_t high[kTiles][kRun];
  uint32_t w_high[2][kRun];
  CUTE_UNROLL
  for (int i = 0; i < kRun; i += 2) {
    const SplitFloat a(weights[0][i]), b(weights[1][i]), c(weights[0][i + 1]), d(weights[1][i + 1]);
    CUTE_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      float(&sum)[4] = part[tile];
      const SplitFloat p(x.at(tile, i)), q(x.at(tile, i + 1));
      high[tile][i] = p.high, high[tile][i + 1] = q.high;
      Atom::fma(sum[0], sum[1], sum[2], sum[3], a.low, b.low, c.low, d.low, p.high, q.high, sum[0], sum[1], sum[2], sum[3]);
      if constexpr (sizeof(Source) == 4) {  // 16-bit floats are tf32 numbers
        Atom::fma(sum[0], sum[1], sum[2], sum[3], a.high, b.high, c.high, d.high, p.low, q.low, sum[0], sum[1], sum[2],
                  sum[3]);
      }
    }
    w_high[0][i] = a.high, w_high[1][i] = b.high, w_high[0][i + 1] = c.high, w_high[1][i + 1] = d.high;
  }
  CUTE_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {  // large products last: truncation is relative to the sum so far
    float(&sum)[4] = part[tile];
    CUTE_UNROLL
    for (int i = 0; i < kRun; i += 2) {
      Atom::fma(sum[0], sum[1], sum[2], sum[3], w_high[0][i], w_high[1][i], w_high[0][i + 1], w_high[1][i + 1],
                high[tile][i], high[tile][i + 1], sum[0], sum[1], sum[2], sum[3]);
    }
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) sums[tile][i] += sum[i];
  }
}

// The same in float64, and `squares` += those of the lane's elements. Of lane (g, t), A of the mma has probes g and g + 8 in turns
// and B row g, at the columns of a run. Tensor Cores round each of these multiply-adds to nearest.
template <class Source, bool kTransposed>
__device__ __forceinline__ void probe_products(const ProbeRuns<Source, kTransposed>& x, const float4 (&w)[2],
                                               double (&sums)[kTiles][4], double& squares) {
  const double a[2 * kRun] = {w[0].x, w[1].x, w[0].y, w[1].y, w[0].z, w[1].z, w[0].w, w[1].w};
  CUTE_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    const double b[kRun] = {x.at(tile, 0), x.at(tile, 1), x.at(tile, 2), x.at(tile, 3)};
    CUTE_UNROLL
    for (int i = 0; i < kRun; ++i) squares = __fma_rn(b[i], b[i], squares);
    double(&sum)[4] = sums[tile];
    cute::SM90::MMA_16x8x16_F64F64F64F64_TN::fma(sum[0], sum[1], sum[2], sum[3], a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7],
                                                 b[0], b[1], b[2], b[3], sum[0], sum[1], sum[2], sum[3]);
  }
}

__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ __forceinline__ double warp_sum(double value) {
  CUTE_UNROLL
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
  return value;
}

// Bits order like magnitudes, with infinity and NaN above all. Reduce the 16 columns of a warp over g; lanes with an even g then
// have one column each.
template <class Source, bool kTransposed>
__device__ __forceinline__ void reduce_column_absmax(const ProbeRuns<Source, kTransposed>& x, uint32_t* absmax, int valid) {
  const int lane = threadIdx.x % 32;
  uint32_t top[kRun] = {};
  CUTE_UNROLL
  for (int i = 0; i < kTiles * kRun; ++i) top[i % kRun] = max(top[i % kRun], magnitude_bits(x.at(i / kRun, i % kRun)));
  const bool second = lane & 16, odd = lane & 8;
  const uint32_t even_sent = __shfl_xor_sync(~0u, second ? top[0] : top[2], 16);
  const uint32_t odd_sent = __shfl_xor_sync(~0u, second ? top[1] : top[3], 16);
  const uint32_t low = max(second ? top[2] : top[0], even_sent), high = max(second ? top[3] : top[1], odd_sent);
  uint32_t own = max(odd ? high : low, __shfl_xor_sync(~0u, odd ? low : high, 8));
  own = max(own, __shfl_xor_sync(~0u, own, 4));
  const int column = lane % 4 * kRun + (second ? 2 : 0) + (odd ? 1 : 0);
  if ((lane & 4) == 0 && column < valid) atomicMax(absmax + column, own);
}

// Tile of a CTA: the rows of kGroups groups of warps, which read the same W at about the same time.
template <int kGroups>
struct ProbeTile {
  static constexpr int kRows = kGroups * kWarpRows, kSplits = kWarps / kGroups;  // warps that share a group's columns
  static constexpr int kStep = kSplits * kDepth, kSums = kProbes * kRows;  // columns per step; sums of the tile
};

// Sums of a tile per warp and bits of its rows' absmax, in place of the pipeline.
template <class Sum>
struct ProbeParts {
  Sum sums[kWarps][kProbes * kPartPitch];
  uint32_t absmax[kWarps][kWarpRows];

  // Store this warp's accumulators.
  template <bool kTransposed>
  __device__ __forceinline__ void put(const Sum (&of)[kTiles][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    CUTE_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      CUTE_UNROLL
      for (int c = 0; c < 4; ++c) {
        sums[threadIdx.x / 32][(g + c / 2 * 8) * kPartPitch + probe_row<kTransposed>(i, 2 * t + c % 2)] = of[i][c];
      }
    }
  }
  // Sum of row `row` of the tile.
  template <int kGroups>
  __device__ __forceinline__ Sum sum(int probe, int row) const {
    using Tile = ProbeTile<kGroups>;
    Sum found = 0;
    CUTE_UNROLL
    for (int i = 0; i < Tile::kSplits; ++i) {
      found += sums[row / kWarpRows * Tile::kSplits + i][probe * kPartPitch + row % kWarpRows];
    }
    return found;
  }
  template <int kGroups>
  __device__ __forceinline__ uint32_t top(int row) const {
    using Tile = ProbeTile<kGroups>;
    uint32_t found = 0;
    CUTE_UNROLL
    for (int i = 0; i < Tile::kSplits; ++i) found = max(found, absmax[row / kWarpRows * Tile::kSplits + i][row % kWarpRows]);
    return found;
  }
};

// A lane's elements of the 16 probes at the warp's columns.
struct ProbeVectors {
  const float *low, *high;  // eight probes apart
  int columns;  // of X

  __device__ __forceinline__ ProbeVectors(const float* w, int64_t pitch, int columns)
      : low(w + threadIdx.x % 32 / 4 * pitch + threadIdx.x % 4 * kRun), high(low + 8 * pitch), columns(columns) {}
  __device__ __forceinline__ void load(int at, float4 (&to)[2]) const {
    const int from = at < columns ? at : 0;  // values beyond X do not count
    to[0] = __ldg(reinterpret_cast<const float4*>(low + from));
    to[1] = __ldg(reinterpret_cast<const float4*>(high + from));
  }
};

// Matrix X (rows, columns), or X^T if the kernel is transposed. `pitch`: elements from one row in memory to the next;
// `vector`: vector loads are aligned.
template <class Source>
struct ProbeMatrix {
  const Source* x;
  int64_t pitch, rows, columns;
  bool vector;
};

// Call body(runs, vectors, at, own, present) for every gridDim.y-th step of kStep columns of a tile: `at` is the warp's first
// column, `own` the lane's first row, of which `present` runs exist.
template <class C, bool kTransposed, class Body>
__device__ __forceinline__ void walk_tile(const ProbeMatrix<typename C::Source>& x, const float* w, int64_t w_pitch,
                                          int64_t tile, uint8_t* shared, const Body& body) {
  using Source = typename C::Source;
  using Runs = ProbeRuns<Source, kTransposed>;
  using Tile = ProbeTile<C::kGroups>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t corner = tile * Tile::kRows + warp / Tile::kSplits * kWarpRows;
  const int64_t own = corner + (kTransposed ? g * kRun : g);  // the lane's first row
  const int columns = int(x.columns), stride = int(gridDim.y) * Tile::kStep;
  const int start = int(blockIdx.y) * Tile::kStep + warp % Tile::kSplits * kDepth;
  const int64_t apart = kTransposed ? x.pitch : 8 * x.pitch;  // from one of the lane's runs to the next
  const int present = own >= x.rows ? 0 : kTransposed ? int(min(x.rows - own, int64_t{kRun})) : int((x.rows - own + 7) / 8);
  static_assert(kTiles == kRun, "there are as many runs as they have entries");
  const bool all = x.vector && present >= kRun;
  const Source* from = x.x;
  if (present) from += kTransposed ? own : own * x.pitch;

  // Each lane has a pipeline of its own and waits for no other lane. Neighboring runs (of one g or t) and lanes that read
  // together (of two g) have no bank conflicts.
  const int slot = kTransposed ? t * 8 + (g + 2 * t) % 8 : lane;
  uint8_t* ring = shared + warp * C::kStages * Runs::kStageBytes + slot * Runs::kBytes;
  const auto fetch = [&](int at, int stage) {
    uint8_t* to = ring + stage * Runs::kStageBytes;
    const int place = at + t * kRun;
    if (all && at + kDepth <= columns) {
      const Source* first = from + (kTransposed ? place * x.pitch : int64_t{place});
      CUTE_UNROLL
      for (int i = 0; i < kTiles; ++i) {
        copy_async_run<Runs::kBytes>(shared_address(to + i * 32 * Runs::kBytes), first + i * apart, Runs::kBytes);
      }
    } else if (at < columns) {
      const int remaining = max(0, min(columns - place, kRun));
      const Source* first = from + (remaining ? kTransposed ? place * x.pitch : int64_t{place} : 0);
      const int slices = kTransposed ? remaining : present, valid = kTransposed ? present : remaining;
      Runs::fetch(to, first, apart, slices, valid, x.vector && valid >= kRun);
    }
    cp_async_commit();
  };
  const ProbeVectors vectors(w, w_pitch, columns);
  float4 next[2];
  CUTE_UNROLL
  for (int stage = 0; stage < C::kStages - 1; ++stage) fetch(start + stage * stride, stage);
  vectors.load(start, next);
  int stage = 0, ahead = C::kStages - 1;
  for (int at = start; at < columns; at += stride) {  // uniform over a warp
    Runs here;
    cp_async_wait<C::kStages - 2>();
    here.read(ring + stage * Runs::kStageBytes);
    const float4 held[2] = {next[0], next[1]};
    vectors.load(at + stride, next);
    fetch(at + (C::kStages - 1) * stride, ahead);
    stage = stage + 1 == C::kStages ? 0 : stage + 1, ahead = ahead + 1 == C::kStages ? 0 : ahead + 1;
    body(here, held, at, own, present);
  }
  __syncthreads();  // all warps have read their pipelines
}

// Type of a kernel's sums.
template <class C>
using ProbeSum = cuda::std::conditional_t<C::kDouble, double, float>;

// Compute the sums of a tile of X into shared memory; return this lane's part of the sum of squares, in float64 where the sums are.
// `absmax`: of all columns, if asked for. `see(runs, at, own, present)` is called for each step, before its products.
template <class C, bool kTransposed, bool kSumOfSquares, Absmax kAbsmax, class See>
__device__ __forceinline__ double probe_tile(const ProbeMatrix<typename C::Source>& x, const float* w, int64_t w_pitch,
                                             int64_t tile, uint8_t* shared, uint32_t* absmax, const See& see) {
  using Runs = ProbeRuns<typename C::Source, kTransposed>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  ProbeSum<C> sums[kTiles][4] = {};
  double sum_of_squares = 0.0;
  uint32_t row_absmax[kTiles] = {};
  walk_tile<C, kTransposed>(x, w, w_pitch, tile, shared, [&](Runs& here, const float4(&vectors)[2], int at, int64_t own,
                                                           int present) {
    see(here, at, own, present);
    if constexpr (C::kDouble) {
      probe_products(here, vectors, sums, sum_of_squares);
    } else {
      probe_products(here, vectors, sums);
      if constexpr (kSumOfSquares) {
        float sum = 0.0f;
        CUTE_UNROLL
        for (int i = 0; i < kTiles * kRun; ++i) {
          const float value = here.at(i / kRun, i % kRun);
          sum = fmaf(value, value, sum);
        }
        sum_of_squares += sum;
      }
    }
    if constexpr (kAbsmax == Absmax::kColumns) reduce_column_absmax(here, absmax + at, min(int(x.columns) - at, kDepth));
    if constexpr (kAbsmax == Absmax::kRows) {
      CUTE_UNROLL
      for (int i = 0; i < kTiles * kRun; ++i) {
        row_absmax[i / kRun] = max(row_absmax[i / kRun], magnitude_bits(here.at(i / kRun, i % kRun)));
      }
    }
  });
  using Parts = ProbeParts<ProbeSum<C>>;
  static_assert(sizeof(Parts) == C::kPartsBytes, "smem_bytes of the host must hold the parts");
  Parts& parts = *reinterpret_cast<Parts*>(shared);
  parts.template put<kTransposed>(sums);
  if constexpr (kAbsmax == Absmax::kRows) {
    CUTE_UNROLL
    for (int i = 0; i < kTiles; ++i) {
      uint32_t top = max(row_absmax[i], __shfl_xor_sync(~0u, row_absmax[i], 1));
      top = max(top, __shfl_xor_sync(~0u, top, 2));
      if (t == 0) parts.absmax[warp][probe_row<kTransposed>(i, g)] = top;
    }
  }
  return sum_of_squares;
}

// For probe_tile: nothing is done with the runs.
struct SeeNothing {
  template <class Runs>
  __device__ __forceinline__ void operator()(const Runs&, int, int64_t, int) const {}
};

// Partial sums (gridDim.y, 16, y_pitch) of Y = X W; blockIdx.x is the tile. x is X (rows, columns), or row-major X^T with
// Config::kTransposed. `absmax`: bits of the absmax of rows or columns, zero before if CTAs share it.
template <class C>
__global__ void __launch_bounds__(kProbeThreads)
probe(const typename C::Source* x, int64_t pitch, int64_t rows, int64_t columns, int64_t vector, const float* w,
      int64_t w_pitch, float* y, int64_t y_pitch, uint32_t* absmax) {
  pdl_wait();
  constexpr Absmax kAbsmax = static_cast<Absmax>(C::kAbsmax);
  using Tile = ProbeTile<C::kGroups>;
  extern __shared__ __align__(16) uint8_t shared[];
  const ProbeMatrix<typename C::Source> matrix{x, pitch, rows, columns, vector != 0};
  probe_tile<C, C::kTransposed, false, kAbsmax>(matrix, w, w_pitch, blockIdx.x, shared, absmax, SeeNothing{});
  __syncthreads();
  const auto& parts = *reinterpret_cast<const ProbeParts<float>*>(shared);
  const int64_t corner = int64_t{blockIdx.x} * Tile::kRows;
  if constexpr (kAbsmax == Absmax::kRows) {
    if (threadIdx.x < Tile::kRows && corner + threadIdx.x < rows) {
      const uint32_t top = parts.template top<C::kGroups>(threadIdx.x);
      if (gridDim.y == 1) absmax[corner + threadIdx.x] = top;
      else atomicMax(absmax + corner + threadIdx.x, top);
    }
  }
  CUTE_UNROLL
  for (int i = threadIdx.x; i < Tile::kSums; i += kProbeThreads) {
    const int probe = i / Tile::kRows, row = i % Tile::kRows;
    if (corner + row < y_pitch) {
      y[(int64_t{blockIdx.y} * kProbes + probe) * y_pitch + corner + row] = parts.template sum<C::kGroups>(probe, row);
    }
  }
}

}  // namespace magicube
