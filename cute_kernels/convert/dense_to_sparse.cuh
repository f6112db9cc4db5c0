// Dense matrix to SR-BCRS: mark the stored vectors, lay out the vector rows, fill in columns and values; three kernels.
//
// Formula: a vector (V x 1) is stored if it has a nonzero entry, or an entry in the mask.
// Architectures: sm_80 and later.
// Work: a thread group of kWarps warps (one warp or the CTA) per vector row of V matrix rows; layout_rows is one CTA.
// Pipeline: kAhead rows of 16-byte loads in flight per thread; the host reads the total size before `fill`.
// Source: Li, Osawa, Hoefler, SC'22, section IV-A (SR-BCRS).
#pragma once

#include "device/packed_int.cuh"

namespace magicube {

constexpr int kOutOfRange = 4;  // flag; 1 and 2 are flags of quantization
constexpr int kPiece = 16;      // columns per word of marks

template <class C>
struct ThreadGroup {
  static constexpr int kGroupThreads = 32 * C::kWarps;
  static constexpr int kGroups = C::kThreads / kGroupThreads;
  static_assert(C::kWarps == 1 || kGroups == 1, "a thread group is one warp or the CTA");
  int lane = int(threadIdx.x) % kGroupThreads, index = int(threadIdx.x) / kGroupThreads;
  int64_t row = int64_t{blockIdx.x} * kGroups + index;  // vector row
};

template <class Value>
__device__ __forceinline__ bool is_outside(Value x, int64_t low, int64_t high) {
  if constexpr (cuda::std::is_signed_v<Value>) return int64_t(x) < low || int64_t(x) > high;
  else return uint64_t(x) > uint64_t(high);
}

// Load kBytes bytes from an address that is a multiple of kBytes.
template <int kBytes>
__device__ __forceinline__ void load_bytes(const void* from, void* to) {
  if constexpr (kBytes == 16) *static_cast<uint4*>(to) = __ldg(static_cast<const uint4*>(from));
  else if constexpr (kBytes == 8) *static_cast<uint2*>(to) = __ldg(static_cast<const uint2*>(from));
  else if constexpr (kBytes == 4) *static_cast<uint32_t*>(to) = __ldg(static_cast<const uint32_t*>(from));
  else *static_cast<uint16_t*>(to) = __ldg(static_cast<const uint16_t*>(from));
}

// Load kVec entries, of which `valid` exist; the others are zeros.
template <int kVec, class Value>
__device__ __forceinline__ void load_entries(const Value* from, int64_t valid, bool vector, Value (&to)[kVec]) {
  if (vector && valid >= kVec) {
    load_bytes<kVec * int(sizeof(Value))>(from, to);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < kVec; ++i) to[i] = i < valid ? from[i] : Value(0);
  }
}

// Mark the vectors with a nonzero entry, or with an entry in the mask. marks: (R, pieces) bits; counts: (R,).
template <class C>
__global__ void __launch_bounds__(C::kThreads)
mark(const typename C::Value* x, int64_t pitch, const uint8_t* mask, int64_t mask_pitch, int64_t rows, int64_t columns,
     int64_t vector_length, uint16_t* marks, int64_t pieces, int32_t* counts, int64_t low, int64_t high, int* flags,
     int64_t vector_x, int64_t vector_mask) {
  using Value = typename C::Value;
  using T = ThreadGroup<C>;
  constexpr int kVec = 16 / int(sizeof(Value)), kAhead = C::kMasked ? 2 : 4;  // entries per load, rows in flight
  constexpr Value kNonZero = C::kFloat ? Value(Value(~Value(0)) >> 1) : Value(~Value(0));  // ignores the sign of a float
  __shared__ int32_t scratch[C::kWarps];
  const T group;
  const int64_t first = group.row * vector_length;
  int32_t count = 0;
  bool outside = false;
  for (int64_t base = 0; base < columns; base += T::kGroupThreads * kVec) {
    const int64_t column = base + group.lane * kVec;
    alignas(16) Value column_bits[kVec] = {};
    uint32_t word = 0;
    for (int v = 0; v < int(vector_length); v += kAhead) {  // uniform trip count: shuffles follow
      alignas(16) Value part[kAhead][kVec];
      alignas(16) uint8_t mask_bytes[kAhead][kVec];
      CUTE_UNROLL
      for (int ahead = 0; ahead < kAhead; ++ahead) {
        const int64_t row = first + v + ahead, valid = v + ahead < vector_length && row < rows ? columns - column : 0;
        load_entries(x + row * pitch + column, valid, vector_x != 0, part[ahead]);
        if constexpr (C::kMasked) load_entries(mask + row * mask_pitch + column, valid, vector_mask != 0, mask_bytes[ahead]);
      }
      CUTE_UNROLL
      for (int ahead = 0; ahead < kAhead; ++ahead) {
        CUTE_UNROLL
        for (int i = 0; i < 4 && !C::kMasked; ++i) {
          reinterpret_cast<uint32_t*>(column_bits)[i] |= reinterpret_cast<const uint32_t*>(part[ahead])[i];
        }
        CUTE_UNROLL
        for (int i = 0; i < kVec && (C::kMasked || C::kChecked); ++i) {
          const bool used = !C::kMasked || mask_bytes[ahead][i];
          if (C::kMasked && used) word |= 1u << i;
          outside |= C::kChecked && used && is_outside(part[ahead][i], low, high);
        }
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kVec && !C::kMasked; ++i) word |= (column_bits[i] & kNonZero) != 0 ? 1u << i : 0u;
    word <<= group.lane * kVec % kPiece;
    CUTE_UNROLL
    for (int step = 1; step < kPiece / kVec; step *= 2) word |= __shfl_xor_sync(~0u, word, step);
    if (group.lane * kVec % kPiece == 0 && column < columns && first < rows) {
      marks[group.row * pieces + column / kPiece] = uint16_t(word);
      count += __popc(word);
    }
  }
  report(outside ? kOutOfRange : 0, flags);
  int32_t total;
  group_exclusive_sum<C::kWarps>(count, total, scratch);
  if (group.lane == 0 && first < rows) counts[group.row] = total;
}

// Pad the vector rows to multiples of the stride and concatenate them; one CTA.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
layout_rows(const int32_t* counts, int64_t vector_rows, int64_t stride, int64_t* row_start, int64_t* row_end, int64_t* total) {
  __shared__ int64_t scratch[C::kWarps];
  int64_t start = 0;
  for (int64_t base = 0; base < vector_rows; base += C::kThreads * C::kRows) {
    int32_t count[C::kRows];
    int64_t padded = 0, all;
    CUTE_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      const int64_t row = base + int64_t{threadIdx.x} * C::kRows + i;
      count[i] = row < vector_rows ? counts[row] : 0;
      padded += (count[i] + stride - 1) & -stride;
    }
    int64_t at = start + group_exclusive_sum<C::kWarps>(padded, all, scratch);
    CUTE_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      const int64_t row = base + int64_t{threadIdx.x} * C::kRows + i;
      if (row < vector_rows) row_start[row] = at, row_end[row] = at + count[i];
      at += (count[i] + stride - 1) & -stride;
    }
    start += all;
  }
  if (threadIdx.x == 0) *total = start;
}

// Dense integers: one per entry, or two nibbles per byte; zero where the mask is false.
template <class C>
struct Entries {
  const typename C::Value* x;
  const uint8_t* mask;
  int64_t pitch, mask_pitch, rows;

  __device__ int32_t at(int64_t row, int32_t column) const {
    if (column < 0 || row >= rows) return 0;
    if constexpr (C::kMasked) {
      if (!mask[row * mask_pitch + column]) return 0;
    }
    if constexpr (C::kNibbles) return x[row * pitch + column / 2] >> (column % 2 * 4);
    else return static_cast<int32_t>(x[row * pitch + column]);
  }
};

// Columns and values (blocks, V, stride) of the marked vectors. A thread group lists the columns of kGroupThreads words, writes
// full blocks, and carries the remainder, fewer than a stride, to the next words.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
fill(const uint16_t* marks, int64_t pieces, const int64_t* row_start, const typename C::Value* x, int64_t pitch,
     const uint8_t* mask, int64_t mask_pitch, int64_t rows, int64_t vector_rows, int64_t log_vector, int64_t log_stride,
     int32_t* columns, uint8_t* values) {
  using T = ThreadGroup<C>;
  constexpr int kRun = C::kBits == 4 ? 8 : 4, kMaxStride = 64;  // values of a row per store of a lane
  constexpr int kListed = T::kGroupThreads * kPiece + kMaxStride;
  constexpr int kLogRun = C::kBits == 4 ? 3 : 2;
  __shared__ __align__(16) int32_t lists[T::kGroups][kListed];
  __shared__ int32_t scratch[C::kWarps];
  const T group;
  if (group.row >= vector_rows) return;
  const Entries<C> entries{x, mask, pitch, mask_pitch, rows};
  const int stride = 1 << log_stride, vector_length = 1 << log_vector, log_runs = int(log_stride) - kLogRun;
  const int64_t first = group.row << log_vector;
  int32_t* list = lists[group.index];
  int64_t slot = row_start[group.row];
  int32_t listed = 0;
  for (int64_t base = 0; base < pieces; base += T::kGroupThreads) {
    const int64_t piece = base + group.lane;
    uint32_t word = piece < pieces ? marks[group.row * pieces + piece] : 0;
    int32_t found;
    int32_t at = listed + group_exclusive_sum<C::kWarps>(int32_t(__popc(word)), found, scratch);
    for (; word; word &= word - 1) list[at++] = int32_t(piece * kPiece) + __ffs(word) - 1;
    listed += found;
    const bool last = base + T::kGroupThreads >= pieces;
    const int32_t whole = last ? (listed + stride - 1) & -stride : listed & -stride;
    for (int32_t i = listed + group.lane; i < whole; i += T::kGroupThreads) list[i] = -1;
    team_sync<C::kWarps>();
    for (int32_t i = group.lane; i < whole; i += T::kGroupThreads) columns[slot + i] = list[i];
    const int32_t items = (whole << log_vector) >> kLogRun;
    uint8_t* to = values + (slot << log_vector) * C::kBits / 8;
    for (int32_t item = group.lane; item < items; item += T::kGroupThreads) {  // (block, V, run)
      const int32_t run = item & ((1 << log_runs) - 1), v = (item >> log_runs) & (vector_length - 1);
      const int32_t* from = list + ((item >> (log_runs + log_vector)) << log_stride) + run * kRun;
      int32_t column[kRun], value[kRun];
      CUTE_UNROLL
      for (int i = 0; i < kRun; i += 4) {
        const int4 four = *reinterpret_cast<const int4*>(from + i);
        column[i] = four.x, column[i + 1] = four.y, column[i + 2] = four.z, column[i + 3] = four.w;
      }
      CUTE_UNROLL
      for (int i = 0; i < kRun; ++i) value[i] = entries.at(first + v, column[i]);
      const PackedRun<C::kBits, kRun> packed(value);
      packed.store(to + int64_t{item} * packed.kBytes);
    }
    team_sync<C::kWarps>();
    // Fewer than a stride remain, and none if nothing was written: source and target do not overlap.
    const int32_t remaining = last || whole == 0 ? 0 : listed - whole;
    for (int32_t i = group.lane; i < remaining; i += T::kGroupThreads) list[i] = list[whole + i];
    listed = whole ? remaining : listed;
    slot += whole;
    team_sync<C::kWarps>();
  }
}

}  // namespace magicube
