// Entries of a float32 matrix above a level, to the packed operand of the gather kernel: five kernels, one wait between the last two.
//
// Formula: `magnitude_sums`: partial sums of |x| along rows and columns. `levels`: threshold * sum / count. `mark`: V neighbors
// across the slices of x are kept together if one of them is above its slice's level. `layout`: where the groups of each vector row
// start. `fill`: round(x / scale) of what is kept, scale = its amax / high.
// Slices are rows of x, or columns if C::kAcross. A position is a place along a slice; a vector row is V slices.
// Architectures: sm_80 and later.
// Work: mark: a warp per vector row and 128 positions, or, across, per 32 positions and 128 slices. layout: one CTA.
// fill: a CTA per vector row.
// Pipeline: x is read once; what is kept is read again, from a cache, and is little.
// Sums have one order, and integers have none, so results do not depend on the order of CTAs.
// Source: Gu, arXiv 2403.06924, Algorithm 1, line 7, and equation 14; fragment order of mma.m16n8k32: PTX ISA.
#pragma once

#include "compensate/split.cuh"
#include "device/packed_int.cuh"

namespace magicube {

constexpr int kWord = 32;             // positions per word of marks, and vectors per group
constexpr int kSelectWarps = kTileThreads / 32;

// Partial sums of the magnitudes of x (rows, columns): along rows to row_parts (column tiles, rows), along columns to column_parts
// (row tiles, columns); either may be null.
template <class C>
__global__ void __launch_bounds__(kTileThreads)
magnitude_sums(const float* x, int64_t pitch, int64_t rows, int64_t columns, int64_t vector, double* row_parts, double* column_parts) {
  const SplitTile tile(columns);
  float held[kThreadRows][kRun];  // (kThreadRows, kRun)
  tile.load(x, pitch, rows, columns, vector != 0, held);
  __shared__ double of_warps[kSelectWarps][kTileColumns];  // (warps, kTileColumns)
  double of_columns[kRun] = {};
  CUTE_UNROLL
  for (int i = 0; i < kThreadRows; ++i) {
    double of_row = 0.0;
    CUTE_UNROLL
    for (int c = 0; c < kRun; ++c) {
      const double magnitude = static_cast<double>(fabsf(held[i][c]));
      of_row += magnitude;
      of_columns[c] += magnitude;
    }
    if (row_parts) {
      CUTE_UNROLL
      for (int step = 16; step > 0; step /= 2) of_row += __shfl_xor_sync(~0u, of_row, step);
      const int64_t row = tile.row0 + tile.row(i);
      if (tile.lane == 0 && row < rows) row_parts[tile.column0 / kTileColumns * rows + row] = of_row;
    }
  }
  if (!column_parts) return;
  CUTE_UNROLL
  for (int c = 0; c < kRun; ++c) of_warps[tile.warp][tile.column() + c] = of_columns[c];
  __syncthreads();
  for (int c = threadIdx.x; c < kTileColumns; c += kTileThreads) {
    double sum = 0.0;
    CUTE_UNROLL
    for (int warp = 0; warp < kSelectWarps; ++warp) sum += of_warps[warp][c];
    if (tile.column0 + c < columns) column_parts[tile.row0 / kTileRows * columns + tile.column0 + c] = sum;
  }
}

// threshold * average of the partial sums (parts, slices): a level per slice, or one of all.
template <bool kOne>
__device__ __forceinline__ void write_levels(const double* sums, int64_t parts, int64_t slices, double count, double threshold,
                                             int64_t block, float* to) {
  if constexpr (kOne) {
    __shared__ double of_threads[kTileThreads];  // (kTileThreads,)
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < parts * slices; i += kTileThreads) sum += sums[i];
    of_threads[threadIdx.x] = sum;
    __syncthreads();
    for (int step = kTileThreads / 2; step > 0; step /= 2) {
      if (int(threadIdx.x) < step) of_threads[threadIdx.x] += of_threads[threadIdx.x + step];
      __syncthreads();
    }
    if (threadIdx.x == 0) *to = static_cast<float>(threshold * (of_threads[0] / count));
  } else {
    const int64_t slice = block * kTileThreads + threadIdx.x;
    if (slice >= slices) return;
    double sum = 0.0;
    for (int64_t i = 0; i < parts; ++i) sum += sums[i * slices + slice];
    to[slice] = static_cast<float>(threshold * (sum / count));
  }
}

// Levels of A and of B; the first blocks_a CTAs are A's.
template <class C>
__global__ void __launch_bounds__(kTileThreads)
levels(const double* sums_a, int64_t parts_a, int64_t slices_a, double count_a, float* levels_a, const double* sums_b, int64_t parts_b,
       int64_t slices_b, double count_b, float* levels_b, double threshold, int64_t blocks_a) {
  const int64_t block = blockIdx.x;
  if (block < blocks_a) write_levels<C::kOne>(sums_a, parts_a, slices_a, count_a, threshold, block, levels_a);
  else write_levels<C::kOne>(sums_b, parts_b, slices_b, count_b, threshold, block - blocks_a, levels_b);
}

// Bits of the entries of a run that are above their levels.
template <bool kSigned>
__device__ __forceinline__ uint32_t above(const float (&x)[kRun], const float (&level)[kRun]) {
  uint32_t bits = 0;
  CUTE_UNROLL
  for (int c = 0; c < kRun; ++c) bits |= (kSigned ? x[c] : fabsf(x[c])) > level[c] ? 1u << c : 0u;
  return bits;
}

// Largest magnitude of the marked entries of a run, as bits.
__device__ __forceinline__ uint32_t largest(const float (&x)[kRun], uint32_t marked) {
  uint32_t most = 0;
  CUTE_UNROLL
  for (int c = 0; c < kRun; ++c) most = max(most, marked >> c & 1 ? magnitude_bits(x[c]) : 0u);
  return most;
}

// Slices are rows: marks (vector rows, words), counts (vector rows,) and kept maxima of 128 positions of one vector row.
template <class C>
__device__ __forceinline__ void mark_along(const float* x, int64_t pitch, int64_t rows, int64_t columns, bool vector, const float* levels,
                                           int64_t level_step, uint32_t* marks, int64_t words, int32_t* counts, uint32_t* kept) {
  const int lane = int(threadIdx.x) % 32;
  const int64_t item = int64_t{blockIdx.x} * kSelectWarps + threadIdx.x / 32, chunks = (columns + kTileColumns - 1) / kTileColumns;
  const int64_t vector_row = item / chunks, chunk = item % chunks, first = vector_row * C::kVector;
  const int64_t column = chunk * kTileColumns + lane * kRun;
  if (first >= rows) return;
  const int present = int(rows - first < C::kVector ? rows - first : C::kVector);
  const float* const from = x + first * pitch + column;
  uint32_t any = 0;
  CUTE_UNROLL
  for (int v = 0; v < C::kVector; ++v) {
    if (v >= present) break;
    float run[kRun];
    load_four(from + v * pitch, columns - column, vector, run);
    const float level = levels[(first + v) * level_step];
    any |= above<C::kSigned>(run, {level, level, level, level});
  }
  uint32_t word = any << lane * kRun % kWord;
  CUTE_UNROLL
  for (int step = 1; step < kWord / kRun; step *= 2) word |= __shfl_xor_sync(~0u, word, step);
  if (lane * kRun % kWord == 0 && column < columns) marks[vector_row * words + column / kWord] = word;
  const int count = int(__reduce_add_sync(~0u, unsigned(__popc(any))));
  if (count == 0) return;
  if (lane == 0) atomicAdd(counts + vector_row, count);
  uint32_t all = 0;
  for (int v = 0; v < present; ++v) {
    float run[kRun];
    load_four(from + v * pitch, columns - column, vector, run);
    const uint32_t most = largest(run, any);
    if constexpr (C::kOneScale) {
      all = max(all, most);
    } else {
      const uint32_t of_row = __reduce_max_sync(~0u, most);
      if (lane == 0) raise(kept + first + v, of_row);
    }
  }
  if constexpr (C::kOneScale) {
    all = __reduce_max_sync(~0u, all);
    if (lane == 0) raise(kept, all);
  }
}

// Slices are columns: the same of 32 positions, a word, and 128 slices.
template <class C>
__device__ __forceinline__ void mark_across(const float* x, int64_t pitch, int64_t rows, int64_t columns, bool vector, const float* levels,
                                            int64_t level_step, uint32_t* marks, int64_t words, int32_t* counts, uint32_t* kept) {
  constexpr int kLanes = C::kVector > kRun ? C::kVector / kRun : 1, kOwn = C::kVector < kRun ? kRun / C::kVector : 1;  // of a vector; of a lane
  const int lane = int(threadIdx.x) % 32;
  const int64_t item = int64_t{blockIdx.x} * kSelectWarps + threadIdx.x / 32, chunks = (columns + kTileColumns - 1) / kTileColumns;
  const int64_t piece = item / chunks, column = item % chunks * kTileColumns + lane * kRun, first = piece * kWord;
  if (first >= rows) return;
  const int present = int(rows - first < kWord ? rows - first : kWord);
  const float* const from = x + first * pitch + column;
  float level[kRun];
  CUTE_UNROLL
  for (int c = 0; c < kRun; ++c) level[c] = column + c < columns ? levels[(column + c) * level_step] : 0.0f;
  uint32_t word[kOwn] = {};  // (kOwn,), a bit per position
#pragma unroll 8
  for (int i = 0; i < present; ++i) {
    float run[kRun];
    load_four(from + i * pitch, columns - column, vector, run);
    const uint32_t bits = above<C::kSigned>(run, level);
    CUTE_UNROLL
    for (int own = 0; own < kOwn; ++own) {
      constexpr uint32_t kBits = (1u << kRun / kOwn) - 1;
      word[own] |= (bits >> own * (kRun / kOwn) & kBits) != 0 ? 1u << i : 0u;
    }
  }
  CUTE_UNROLL
  for (int step = 1; step < kLanes; step *= 2) word[0] |= __shfl_xor_sync(~0u, word[0], step);
  CUTE_UNROLL
  for (int own = 0; own < kOwn; ++own) {
    const int64_t vector_row = (column + own * (kRun / kOwn)) / C::kVector;
    if (lane % kLanes != 0 || vector_row * C::kVector >= columns) continue;
    marks[vector_row * words + piece] = word[own];
    if (word[own]) atomicAdd(counts + vector_row, __popc(word[own]));
  }
  uint32_t any = 0, of_columns[kRun] = {};
  CUTE_UNROLL
  for (int own = 0; own < kOwn; ++own) any |= word[own];
  for (; any; any &= any - 1) {
    const int i = __ffs(any) - 1;
    float run[kRun];
    load_four(from + i * pitch, columns - column, vector, run);
    CUTE_UNROLL
    for (int c = 0; c < kRun; ++c) {
      if (word[c / (kRun / kOwn)] >> i & 1) of_columns[c] = max(of_columns[c], magnitude_bits(run[c]));
    }
  }
  if constexpr (C::kOneScale) {
    const uint32_t all = __reduce_max_sync(~0u, max(max(of_columns[0], of_columns[1]), max(of_columns[2], of_columns[3])));
    if (lane == 0) raise(kept, all);
  } else {
    CUTE_UNROLL
    for (int c = 0; c < kRun; ++c) {
      if (of_columns[c] && column + c < columns) raise(kept + column + c, of_columns[c]);
    }
  }
}

// x: (rows, columns); levels: (slices,) or, level_step 0, one; marks: (vector rows, words) bits; counts: (vector rows,), zero before;
// kept: bits of the largest kept magnitudes, (slices,) or one, zero before.
template <class C>
__global__ void __launch_bounds__(kTileThreads)
mark_entries(const float* x, int64_t pitch, int64_t rows, int64_t columns, int64_t vector, const float* levels, int64_t level_step,
             uint32_t* marks, int64_t words, int32_t* counts, uint32_t* kept) {
  if constexpr (C::kAcross) mark_across<C>(x, pitch, rows, columns, vector != 0, levels, level_step, marks, words, counts, kept);
  else mark_along<C>(x, pitch, rows, columns, vector != 0, levels, level_step, marks, words, counts, kept);
}

// Largest and least bits above zero of some amaxes; every thread gets them.
__device__ __forceinline__ void range_of(const uint32_t* bits, int64_t count, uint32_t& most, uint32_t& least, uint32_t (*scratch)[2]) {
  most = 0, least = kInfiniteBits;
  for (int64_t i = threadIdx.x; i < count; i += kTileThreads) {
    most = max(most, bits[i]);
    least = min(least, bits[i] ? bits[i] : kInfiniteBits);
  }
  most = __reduce_max_sync(~0u, most), least = ~__reduce_max_sync(~0u, ~least);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32][0] = most, scratch[threadIdx.x / 32][1] = least;
  __syncthreads();
  for (int warp = 0; warp < kSelectWarps; ++warp) most = max(most, scratch[warp][0]), least = min(least, scratch[warp][1]);
}

// Group offsets (vector rows + 1,), rows of many groups (vector rows,), scales of what is kept; report: groups, vectors, vectors of the
// last vector row, long rows, and the range of the operand's amaxes as bits.
__device__ __forceinline__ void lay_out(const int32_t* counts, int64_t vector_rows, const uint32_t* kept, int64_t scale_count, double high,
                                        int64_t* offsets, int32_t* long_rows, double* scales, float* scales32, const uint32_t* maxima,
                                        int64_t maxima_count, double* report) {
  __shared__ int64_t scratch[kSelectWarps];
  __shared__ uint32_t ranges[kSelectWarps][2];
  __shared__ int long_count;
  if (threadIdx.x == 0) long_count = 0;
  int64_t start = 0, vectors = 0;
  for (int64_t base = 0; base < vector_rows; base += kTileThreads) {
    const int64_t row = base + threadIdx.x, count = row < vector_rows ? counts[row] : 0, groups = (count + kWord - 1) / kWord;
    int64_t all, counted;
    const int64_t at = start + group_exclusive_sum<kSelectWarps>(groups, all, scratch);
    group_exclusive_sum<kSelectWarps>(count, counted, scratch);
    if (row < vector_rows) offsets[row] = at;
    start += all, vectors += counted;
  }
  // The gather kernel's rule: four times the mean, and at least four.
  const int64_t mean = (start + (vector_rows > 0 ? vector_rows : 1) - 1) / (vector_rows > 0 ? vector_rows : 1);
  const int64_t most = 4 * (mean > 1 ? mean : 1);
  __syncthreads();
  for (int64_t row = threadIdx.x; row < vector_rows; row += kTileThreads) {
    if ((counts[row] + kWord - 1) / kWord > most) long_rows[atomicAdd(&long_count, 1)] = int32_t(row);
  }
  for (int64_t i = threadIdx.x; i < scale_count; i += kTileThreads) {
    const double scale = unit_of(kept[i], high).scale;
    scales[i] = scale, scales32[i] = static_cast<float>(scale);
  }
  uint32_t largest, least;
  range_of(maxima, maxima_count, largest, least, ranges);
  __syncthreads();
  if (threadIdx.x == 0) {
    offsets[vector_rows] = start;
    report[0] = double(start), report[1] = double(vectors), report[2] = vector_rows ? counts[vector_rows - 1] : 0.0;
    report[3] = long_count, report[4] = largest, report[5] = least;
  }
  __syncthreads();  // the next operand uses the same shared memory
}

// report (16): six words of A, six of B; the last one is written after all others, which a host that waits for it may read.
template <class C>
__global__ void __launch_bounds__(kTileThreads)
layout_groups(const int32_t* counts_a, int64_t vector_rows_a, const uint32_t* kept_a, int64_t scale_count_a, int64_t* offsets_a,
              int32_t* long_rows_a, double* scales_a, float* scales32_a, const uint32_t* maxima_a, int64_t maxima_count_a,
              const int32_t* counts_b, int64_t vector_rows_b, const uint32_t* kept_b, int64_t scale_count_b, int64_t* offsets_b,
              int32_t* long_rows_b, double* scales_b, float* scales32_b, const uint32_t* maxima_b, int64_t maxima_count_b, double high,
              double* report) {
  lay_out(counts_a, vector_rows_a, kept_a, scale_count_a, high, offsets_a, long_rows_a, scales_a, scales32_a, maxima_a, maxima_count_a,
          report);
  lay_out(counts_b, vector_rows_b, kept_b, scale_count_b, high, offsets_b, long_rows_b, scales_b, scales32_b, maxima_b, maxima_count_b,
          report + 6);
  if (threadIdx.x > 0) return;
  __threadfence_system();
  static_cast<volatile double*>(report)[15] = 1.0;
}

// Byte of row v and slot s of a group in fragment order: lane 4 v + s / 2 % 4 has slots 2 t, 2 t + 1, 2 t + 8, 2 t + 9 in word s / 16.
template <int kVector>
__device__ __forceinline__ int64_t fragment_byte(int64_t slot, int v) {
  constexpr int kRows = kVector < 8 ? kVector : 8;
  const int s = int(slot % kWord), byte = s % 2 + s / 8 % 2 * 2;
  return slot / kWord * (kVector * kWord) + v / kRows * (kRows * kWord) + (v % kRows * 4 + s / 2 % 4) * 8 + s / 16 * 4 + byte;
}

// Columns (groups * 32,), -1 in the padding, and values (groups, V * 32) int8 of the marked vectors of x; a CTA per vector row.
template <class C>
__global__ void __launch_bounds__(kTileThreads)
fill_groups(const uint32_t* marks, int64_t words, const int64_t* offsets, const float* x, int64_t pitch, int64_t slices,
            const double* scales, int64_t scale_step, int32_t* columns, int8_t* values) {
  __shared__ uint16_t listed[kTileThreads * kWord];  // positions from the first of this round
  __shared__ int32_t scratch[kSelectWarps];
  const int64_t vector_row = blockIdx.x, first = vector_row * C::kVector;
  const int64_t begin = offsets[vector_row] * kWord, end = offsets[vector_row + 1] * kWord;
  if (begin == end) return;
  int64_t next = begin;
  for (int64_t base = 0; base < words; base += kTileThreads) {
    const int64_t own = base + threadIdx.x;
    uint32_t word = own < words ? marks[vector_row * words + own] : 0;
    int32_t found;
    int32_t at = group_exclusive_sum<kSelectWarps>(int32_t(__popc(word)), found, scratch);
    for (; word; word &= word - 1) listed[at++] = uint16_t(threadIdx.x * kWord + __ffs(word) - 1);
    __syncthreads();
    for (int32_t item = threadIdx.x; item < found * C::kVector; item += kTileThreads) {
      const int32_t i = item / C::kVector, v = item % C::kVector;
      const int64_t position = base * kWord + listed[i], slice = first + v;
      int digit = 0;
      if (slice < slices) {
        const float entry = C::kAcross ? x[position * pitch + slice] : x[slice * pitch + position];
        digit = exact_digit<C::kTruncate>(entry, scales[slice * scale_step]);
      }
      if (v == 0) columns[next + i] = int32_t(position);
      values[fragment_byte<C::kVector>(next + i, v)] = int8_t(digit);
    }
    next += found;
  }
  for (int64_t item = threadIdx.x; item < (end - next) * C::kVector; item += kTileThreads) {
    const int64_t at = next + item / C::kVector;
    if (item % C::kVector == 0) columns[at] = -1;
    values[fragment_byte<C::kVector>(at, int(item % C::kVector))] = 0;
  }
}

}  // namespace magicube
