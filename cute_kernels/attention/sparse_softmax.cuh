// Sparse softmax with fused quantization, between SDDMM and SpMM of sparse attention.
//
// Formula: per row, s = scale x + bias over the stored values, u = round(u_max exp(s - max s)), row scale 1 / sum(u), times the
// scale of the matrix if there is one. u is written in SR-BCRS order or in the fragment order of an SpMM's sparse operand.
// Architectures: sm_80 and later.
// Work: a warp has kRows rows of a vector row: kLanes lanes per row, kVec consecutive values per lane, kBlocks strides at once.
// Pipeline: two passes over the values, maximum then integers; the second pass reads L1 or L2. Fragment order goes through
// shared memory, or through two shuffles if these suffice.
// Source: Li, Osawa, Hoefler, SC'22, section V-C and figure 16.
#pragma once

#include <cuda/std/limits>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/copy.cuh"
#include "device/math.cuh"
#include "device/packed_int.cuh"

namespace magicube {

constexpr float kMinusInfinity = -cuda::std::numeric_limits<float>::infinity();  // s of an excluded key

template <class C>
struct SoftmaxShape {
  static constexpr int kVec = 8;
  static constexpr int kLanes = C::kStride / kVec;
  static constexpr int kRows = C::kVector < 32 / kLanes ? C::kVector : 32 / kLanes;
  static constexpr int kTiles = C::kVector / kRows;
  static constexpr int kBlocks = 32 / (kLanes * kRows);
  static constexpr int kPlanes = C::kBits > 8 ? 2 : 1;
  static constexpr int kHigh = (1 << C::kBits) - 1;
};

template <class Source>
struct PairOf;
template <>
struct PairOf<__half> {
  using Type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};

// One row of S.
template <class C>
struct SoftmaxRow {
  const typename C::Source* x;  // this lane's values in its first stride
  const int32_t* columns;       // their columns
  const float* bias;            // by column, or null
  float scale;
  int length, slot, last;       // values of the row; this lane's first one; last visible column if kCausal

  using Source = typename C::Source;
  static constexpr bool kPlain = !C::kCausal && !C::kBias;  // every key of the row is included

  __device__ void load(int b, Source (&raw)[8]) const {
    constexpr int kLoads = 8 * int(sizeof(Source)) / 16;
    const int64_t at = int64_t{b} * C::kVector * C::kStride;
    CUTE_UNROLL
    for (int i = 0; i < kLoads; ++i) reinterpret_cast<uint4*>(raw)[i] = reinterpret_cast<const uint4*>(x + at)[i];
  }
  // Rounded on its own (no FMA), so that the integer of a value does not depend on its position.
  __device__ float scaled(Source value) const { return __fmul_rn(static_cast<float>(value), scale); }

  // Pairwise maximum of a stride that is inside the row for all lanes.
  template <class Pair>
  __device__ Pair largest_pair(int b) const {
    alignas(16) Source raw[8];
    load(b, raw);
    const Pair* pairs = reinterpret_cast<const Pair*>(raw);
    return __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  }

  // s of the values of stride b, -inf for excluded keys. whole: the stride is inside the row for all lanes.
  __device__ void logits(int b, float (&s)[8], bool whole) const {
    alignas(16) Source raw[8];
    load(b, raw);
    if (whole) {
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) s[i] = scaled(raw[i]);
      return;
    }
    const int inside = length - b * C::kStride - slot;
    [[maybe_unused]] int32_t column[8];
    if constexpr (C::kCausal || C::kBias) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int4 four = __ldg(reinterpret_cast<const int4*>(columns + int64_t{b} * C::kStride) + i);
        column[4 * i] = four.x, column[4 * i + 1] = four.y, column[4 * i + 2] = four.z, column[4 * i + 3] = four.w;
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      bool included = i < inside;
      if constexpr (C::kCausal) included = included && column[i] <= last;
      s[i] = kMinusInfinity;
      if (included) {
        s[i] = scaled(raw[i]);
        if constexpr (C::kBias) s[i] += __ldg(bias + column[i]);
      }
    }
  }
};

// Reduce over the lanes of a row: those that differ in the bits of the lane index that are not the row's.
template <class C, class Value, class Merge>
__device__ __forceinline__ Value merge_row(Value value, const Merge& merge) {
  using S = SoftmaxShape<C>;
  CUTE_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    if (step < S::kLanes || step >= S::kLanes * S::kRows) value = merge(value, __shfl_xor_sync(~0u, value, step));
  }
  return value;
}

// Write the integers of kBlocks strides in the fragment order of an SpMM, through shared memory: (blocks, planes, rows, 32)
// bytes.
template <class C>
struct FragmentWriter {
  using S = SoftmaxShape<C>;
  static constexpr int kStaged = S::kPlanes * S::kRows * 32;  // bytes per stride
  static constexpr int kPerWord = C::kBits == 4 ? 8 : 4;
  static constexpr int kWords = kStaged / kPerWord;           // words per stride and row tile
  static constexpr int kOperands = C::kFuseDigits ? 1 : S::kPlanes;
  static constexpr int kOperandWords = kWords / kOperands;
  static constexpr int kLaneWords = S::kBlocks * kWords / 32;
  static_assert(S::kBlocks * kWords % 32 == 0, "all lanes must write the same number of words");

  uint8_t* staged;
  uint32_t* out;  // first group of the vector row
  int tile, lane;
  uint32_t sources[kLaneWords][kPerWord / 2];  // two 16-bit indices per word

  __device__ FragmentWriter(uint8_t* staged_, uint32_t* out_, const uint32_t* table, int tile_, int lane_)
      : staged(staged_), out(out_), tile(tile_), lane(lane_) {
    CUTE_UNROLL
    for (int n = 0; n < kLaneWords; ++n) {
      const int word = (lane + 32 * n) % kWords;
      CUTE_UNROLL
      for (int i = 0; i < kPerWord / 2; ++i) sources[n][i] = __ldg(table + word * (kPerWord / 2) + i);
    }
  }

  // codes: this lane's row and slots in stride b + block; the row has `count` strides.
  __device__ void write(const int32_t (&codes)[8], int block, int row, int slot, int b, int count) const {
    CUTE_UNROLL
    for (int p = 0; p < S::kPlanes; ++p) {
      int32_t digits[8];
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) digits[i] = codes[i] >> (8 * p);
      PackedRun<8, 8>(digits).store(staged + ((block * S::kPlanes + p) * S::kRows + row) * 32 + slot);
    }
    __syncwarp();
    CUTE_UNROLL
    for (int n = 0; n < kLaneWords; ++n) {
      const int group = (lane + 32 * n) / kWords, word = (lane + 32 * n) % kWords;
      uint32_t packed = 0;
      CUTE_UNROLL
      for (int i = 0; i < kPerWord; ++i) {
        const uint32_t place = sources[n][i / 2] >> (i % 2 * 16) & 0xffff;
        packed |= uint32_t(staged[group * kStaged + place]) << (i * 32 / kPerWord);
      }
      const int operand = word / kOperandWords;
      if (b + group < count) {
        out[int64_t{b + group} * S::kTiles * kWords + (operand * S::kTiles + tile) * kOperandWords + word % kOperandWords] =
            packed;
      }
    }
    __syncwarp();
  }
};

// The same by two shuffles, if fragment order is a transpose of pairs among the four lanes of a row: (8 rows, 4 lanes, 4 pairs)
// becomes (8 rows, 4 pairs, 4 lanes).
template <class C>
struct ShuffleWriter {
  using S = SoftmaxShape<C>;
  static_assert(!C::kUsesShuffles || (S::kRows == 8 && S::kLanes == 4 && C::kBits > 4), "a row must have four lanes");
  static constexpr int kPlaneWords = 64;

  uint32_t* out;  // this lane's words in the first group of the vector row
  bool upper, odd;

  __device__ ShuffleWriter(uint32_t* out_, int tile, int lane)
      : out(out_ + tile * kPlaneWords + 2 * lane), upper(lane & 2), odd(lane & 1) {}

  // codes: this lane's row and slots in stride b.
  __device__ void write(const int32_t (&codes)[8], int b) const {
    CUTE_UNROLL
    for (int p = 0; p < S::kPlanes; ++p) {
      int32_t digits[8];
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) digits[i] = codes[i] >> (8 * p);
      const auto run = PackedRun<8, 8>::lowest(digits);
      // Lanes 0 and 1 keep pairs 0 and 1, lanes 2 and 3 the others; then even lanes keep the first of their pairs.
      const uint32_t other = __shfl_xor_sync(~0u, upper ? run.word[0] : run.word[1], 2);
      const uint32_t low_pairs = upper ? other : run.word[0];   // of lane l % 2
      const uint32_t high_pairs = upper ? run.word[1] : other;  // of lane 2 + l % 2
      const uint32_t mine = __byte_perm(low_pairs, high_pairs, odd ? 0x7632 : 0x5410);
      const uint32_t given = __byte_perm(low_pairs, high_pairs, odd ? 0x5410 : 0x7632);
      const uint32_t theirs = __shfl_xor_sync(~0u, given, 1);
      const uint32_t low = odd ? theirs : mine, high = odd ? mine : theirs;  // of lanes 0 and 2, of lanes 1 and 3
      const uint2 words{__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632)};
      *reinterpret_cast<uint2*>(out + (int64_t{b} * S::kPlanes + p) * (S::kTiles * kPlaneWords)) = words;
    }
  }
};

template <class C>
__global__ void __launch_bounds__(32 * C::kWarps, 8)
softmax(const typename C::Source* x, const int64_t* row_start, const int64_t* row_end, const int32_t* columns,
        const float* bias, int64_t bias_batch, const uint32_t* sources, uint8_t* out, const float* matrix_scales,
        int64_t matrix_scale_batch, float* scales, float* lse, int64_t tiles, int64_t rows, int64_t vector_rows, int64_t blocks,
        int64_t period_rows, int64_t period_columns, float scale, float empty) {
  using S = SoftmaxShape<C>;
  constexpr int kStagedBytes = C::kWarps * S::kBlocks * S::kPlanes * S::kRows * 32;
  __shared__ alignas(16) uint8_t staged[C::kFragments && !C::kUsesShuffles ? kStagedBytes : 16];
  pdl_wait();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t work = blockIdx.x * C::kWarps + warp;
  if (work >= tiles) return;  // whole warps exit; no CTA barrier follows
  const int tile = work % S::kTiles;
  const uint32_t vector_row = work / S::kTiles % uint32_t(vector_rows);
  const uint32_t batch = work / S::kTiles / uint32_t(vector_rows);
  const int block = lane / (S::kLanes * S::kRows), row = lane / S::kLanes % S::kRows, slot = lane % S::kLanes * 8;
  const int64_t i = int64_t{vector_row} * C::kVector + tile * S::kRows + row;
  const int64_t start = row_start[vector_row];
  const int length = int(row_end[vector_row] - start), count = (length + C::kStride - 1) / C::kStride;
  const int64_t first = batch * blocks + start / C::kStride;
  const int64_t at = (first * C::kVector + tile * S::kRows + row) * C::kStride + slot;
  const uint32_t diagonal = vector_row / uint32_t(period_rows);
  const SoftmaxRow<C> of{x + at, columns + start + slot, C::kBias ? bias + batch * bias_batch : nullptr, scale,
                         i < rows ? length : 0, slot,
                         int(diagonal * period_columns + i - int64_t{diagonal} * period_rows * C::kVector)};

  // Strides that are full, with every key included, in all rows of the warp.
  const bool plain = SoftmaxRow<C>::kPlain && i - row + S::kRows <= rows;
  const int whole = plain ? length / C::kStride : 0;
  float row_max = kMinusInfinity;  // first pass: the maximum
  int from = block;
  if constexpr (SoftmaxRow<C>::kPlain && sizeof(typename C::Source) == 2) {
    if (scale > 0.0f && from < whole) {  // rounding is monotonic: take the maximum before scaling
      using Pair = typename PairOf<typename C::Source>::Type;
      Pair pair_max = of.template largest_pair<Pair>(from);
#pragma unroll 4
      for (from += S::kBlocks; from < whole; from += S::kBlocks) {
        pair_max = __hmax2(pair_max, of.template largest_pair<Pair>(from));
      }
      row_max = fmaxf(of.scaled(pair_max.x), of.scaled(pair_max.y));
    }
  }
#pragma unroll 2
  for (; from < count; from += S::kBlocks) {
    float s[8];
    of.logits(from, s, false);
    CUTE_UNROLL
    for (int k = 0; k < 8; ++k) row_max = fmaxf(row_max, s[k]);
  }
  row_max = merge_row<C>(row_max, [](float a, float b) { return fmaxf(a, b); });
  const float max_or_zero = row_max == kMinusInfinity ? 0.0f : row_max;  // avoids inf - inf in a row without keys or with NaN

  float sum = 0.0f;  // second pass: the integers
  unsigned long long total = 0;
  const auto encode = [&](int b, int32_t (&codes)[8], bool inside) {
    constexpr float kRound = 0x1p23f, kLog2e = 1.44269504f;  // adding kRound leaves the integer in the low bits
    float s[8];
    of.logits(b, s, inside);
    uint32_t part = 0;
    CUTE_UNROLL
    for (int k = 0; k < 8; ++k) {
      const float e = power_of_two((s[k] - max_or_zero) * kLog2e);
      sum += e;
      codes[k] = __float_as_int(__fmaf_rn(e, float(S::kHigh), kRound));
      if constexpr (C::kBits != 8) codes[k] &= S::kHigh, part += codes[k];
    }
    if constexpr (C::kBits == 8) {
      const auto run = PackedRun<8, 8>::lowest(codes);
      part = __dp4a(run.word[0], 0x01010101u, __dp4a(run.word[1], 0x01010101u, 0u));
    }
    total += part;
  };
  if constexpr (C::kUsesShuffles) {
    constexpr int kGroupWords = S::kPlanes * S::kTiles * ShuffleWriter<C>::kPlaneWords;
    const ShuffleWriter<C> writer(reinterpret_cast<uint32_t*>(out) + first * kGroupWords, tile, lane);
    int b = 0;  // kBlocks is 1: all lanes work on the same stride
#pragma unroll 2
    for (; b < whole; ++b) {
      int32_t codes[8];
      encode(b, codes, true);
      writer.write(codes, b);
    }
    for (; b < count; ++b) {
      int32_t codes[8];
      encode(b, codes, false);
      writer.write(codes, b);
    }
  } else if constexpr (C::kFragments) {
    constexpr int kGroupWords = S::kTiles * FragmentWriter<C>::kWords;
    const FragmentWriter<C> writer(staged + warp * (S::kBlocks * FragmentWriter<C>::kStaged),
                                   reinterpret_cast<uint32_t*>(out) + first * kGroupWords, sources, tile, lane);
    for (int b = 0; b < count; b += S::kBlocks) {
      int32_t codes[8] = {};
      if (b + block < count) encode(b + block, codes, b + block < whole);
      writer.write(codes, block, row, slot, b, count);
    }
  } else {
    uint8_t* const to = out + at * C::kBits / 8;
    for (int b = block; b < count; b += S::kBlocks) {
      int32_t codes[8];
      encode(b, codes, b < whole);
      PackedRun<C::kBits, 8>(codes).store(to + int64_t{b} * (C::kVector * C::kStride * C::kBits / 8));
    }
  }
  sum = merge_row<C>(sum, [](float a, float b) { return a + b; });
  total = merge_row<C>(total, [](unsigned long long a, unsigned long long b) { return a + b; });
  if (lane % S::kLanes == 0 && block == 0) {
    const int64_t place = int64_t{batch} * vector_rows * C::kVector + i;
    const float inverse = sum == sum ? __fdividef(1.0f, float(total)) : sum;
    const float matrix_scale = matrix_scales ? matrix_scales[batch * matrix_scale_batch + diagonal] : 1.0f;
    scales[place] = (total || sum != sum ? inverse : empty) * matrix_scale;
    if (lse) lse[place] = sum > 0.0f || sum != sum ? max_or_zero + __logf(sum) : kMinusInfinity;
  }
}

}  // namespace magicube
