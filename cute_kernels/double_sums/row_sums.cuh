// X V, |X| n and the squares of the rows, in float64, of a float32 matrix X (rows, columns): V (columns, 16), n (columns,).
//
// Architectures: sm_80 and later. Bound by float64 arithmetic: 18 multiply-adds an entry, where torch passes over float64 copies.
// Work: a CTA has 64 rows, each lane two of them. Its eight warps share the columns: 16 of every 128 each.
// Pipeline: V and n of the next 128 columns arrive by cp.async, a lane's entries of them are on their way to registers.
// Sums: of up to 16 columns, then of those, then of the warps, all in order: a term sees 16 + ceil(columns / 128) + 8 roundings at
// most, and results do not depend on anything else.
#pragma once

#include <cuda/std/cstdint>
#include <cute/config.hpp>

#include "device/copy.cuh"

namespace magicube {

constexpr int kSumWarps = 8, kSumThreads = 32 * kSumWarps, kVectors = 16, kRowSums = kVectors + 2;
constexpr int kSumColumns = 16, kSumChunk = kSumColumns * kSumWarps, kSumRows = 64;  // columns of a warp; of a CTA at a time

struct RowSumsMemory {
  double vectors[2][kSumChunk][kVectors], norms[2][kSumChunk];  // two stages
  double sums[kSumRows][kRowSums];
};

// V and n of the columns from `column` on, zeros beyond the matrix.
__device__ __forceinline__ void fetch_vectors(double (&to_v)[kSumChunk][kVectors], double (&to_n)[kSumChunk], const double* v,
                                              const double* n, int64_t column, int64_t columns) {
  CUTE_UNROLL
  for (int i = 0; i < kSumChunk * kVectors / 2 / kSumThreads; ++i) {  // 16 bytes each
    const int piece = i * kSumThreads + int(threadIdx.x), own = piece / (kVectors / 2), at = piece % (kVectors / 2) * 2;
    const bool exists = column + own < columns;
    cp_async(shared_address(&to_v[own][at]), v + (exists ? (column + own) * kVectors + at : 0), exists ? 16 : 0);
  }
  if (int(threadIdx.x) < kSumChunk) {
    const bool exists = column + int(threadIdx.x) < columns;
    copy_async_run<8>(shared_address(&to_n[threadIdx.x]), n + (exists ? column + int(threadIdx.x) : 0), exists ? 8 : 0);
  }
  cp_async_commit();
}

// Entries of a lane's two rows: lines are rows, or columns if kTransposed, `pitch` apart. `whole`: they all exist and are aligned.
template <bool kTransposed>
__device__ __forceinline__ void load_entries(float (&to)[2][kSumColumns], const float* x, int64_t pitch, const int64_t (&row)[2],
                                             int64_t column, int64_t columns, bool whole) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    if constexpr (kTransposed) {
      CUTE_UNROLL
      for (int c = 0; c < kSumColumns; ++c) to[r][c] = column + c < columns ? __ldg(x + (column + c) * pitch + row[r]) : 0.0f;
    } else if (whole) {
      CUTE_UNROLL
      for (int c = 0; c < kSumColumns; c += 4) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(x + row[r] * pitch + column + c));
        to[r][c] = four.x, to[r][c + 1] = four.y, to[r][c + 2] = four.z, to[r][c + 3] = four.w;
      }
    } else {
      CUTE_UNROLL
      for (int c = 0; c < kSumColumns; ++c) to[r][c] = column + c < columns ? __ldg(x + row[r] * pitch + column + c) : 0.0f;
    }
  }
}

// products (rows, 16), bounds (rows,), squares (rows,). vector_loads: rows are aligned to 16 bytes.
template <class C>
__global__ void __launch_bounds__(kSumThreads)
row_sums(const float* x, int64_t pitch, int64_t rows, int64_t columns, const double* v, const double* n, double* products,
         double* bounds, double* squares, int64_t vector_loads) {
  pdl_wait();
  extern __shared__ __align__(16) uint8_t shared[];
  auto& [vectors, norms, sums] = *reinterpret_cast<RowSumsMemory*>(shared);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int64_t first = int64_t{blockIdx.x} * kSumRows, last = rows - 1, own = int64_t{warp} * kSumColumns;
  const int64_t row[2] = {first + lane < last ? first + lane : last, first + 32 + lane < last ? first + 32 + lane : last};
  const auto load = [&](float (&to)[2][kSumColumns], int64_t column) {
    load_entries<C::kTransposed>(to, x, pitch, row, column + own, columns,
                                 vector_loads != 0 && column + own + kSumColumns <= columns);
  };
  double total[2][kRowSums] = {};
  float next[2][kSumColumns];
  fetch_vectors(vectors[0], norms[0], v, n, 0, columns);
  load(next, 0);
  int stage = 0;
  for (int64_t column = 0; column < columns; column += kSumChunk, stage ^= 1) {
    float entries[2][kSumColumns];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < kSumColumns; ++c) entries[r][c] = next[r][c];
    }
    cp_async_wait<0>();
    __syncthreads();  // the stage has arrived, and all have read the other one
    if (column + kSumChunk < columns) {
      fetch_vectors(vectors[stage ^ 1], norms[stage ^ 1], v, n, column + kSumChunk, columns);
      load(next, column + kSumChunk);
    }
    double part[2][kRowSums] = {};
    CUTE_UNROLL
    for (int c = 0; c < kSumColumns; ++c) {
      const double norm = norms[stage][own + c];
      double entry[2];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        entry[r] = static_cast<double>(entries[r][c]);
        part[r][kVectors] = __fma_rn(fabs(entry[r]), norm, part[r][kVectors]);
        part[r][kVectors + 1] = __fma_rn(entry[r], entry[r], part[r][kVectors + 1]);
      }
      CUTE_UNROLL
      for (int p = 0; p < kVectors; ++p) {
        const double weight = vectors[stage][own + c][p];
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) part[r][p] = __fma_rn(entry[r], weight, part[r][p]);
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int s = 0; s < kRowSums; ++s) total[r][s] = __dadd_rn(total[r][s], part[r][s]);
    }
  }
  for (int turn = 0; turn < kSumWarps; ++turn) {
    if (warp == turn) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        double(&to)[kRowSums] = sums[lane + 32 * r];
        CUTE_UNROLL
        for (int s = 0; s < kRowSums; ++s) to[s] = turn == 0 ? total[r][s] : __dadd_rn(to[s], total[r][s]);
      }
    }
    __syncthreads();
  }
  for (int i = int(threadIdx.x); i < kSumRows * kRowSums; i += kSumThreads) {
    const int64_t to = first + i / kRowSums;
    const int s = i % kRowSums;
    if (to >= rows) continue;
    const double sum = sums[i / kRowSums][s];
    if (s < kVectors) products[to * kVectors + s] = sum;
    else (s == kVectors ? bounds : squares)[to] = sum;
  }
}

}  // namespace magicube
