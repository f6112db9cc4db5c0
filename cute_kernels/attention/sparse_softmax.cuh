// Sparse softmax with fused quantization: of each row's stored values s = scale x + bias, integers
// u = round(u_max exp(s - max s)) and the scale 1 / sum(u), times a factor of the matrix where there is one. The integers go
// to where the values lie, or in the order of an SpMM's operand.
//
// A warp has kRows rows of a vector row, kLanes lanes each, with kVec neighbouring values at a time of kBlocks strides.
// It goes over them twice, for the maximum and for the integers; the second time they come from a cache. Integers come into
// an SpMM's order by way of shared memory, or by two shuffles where those will do.
#pragma once

#include <cuda/std/limits>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/copy.cuh"
#include "device/math.cuh"
#include "device/packed_int.cuh"

namespace magicube {

constexpr float kNone = -cuda::std::numeric_limits<float>::infinity();  // s where there is no key

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

// What the values of a row have in common.
template <class C>
struct SoftmaxRow {
  const typename C::Source* x;  // at this lane's values of its first stride
  const int32_t* columns;       // likewise
  const float* bias;            // by column, or null
  float scale;
  int length, slot, last;       // values of the row, 0 for none; this lane's first one; last column, where causal

  using Source = typename C::Source;
  static constexpr bool kPlain = !C::kCausal && !C::kBias;  // a key inside the row takes part

  __device__ void load(int b, Source (&raw)[8]) const {
    constexpr int kLoads = 8 * int(sizeof(Source)) / 16;
    const int64_t at = int64_t{b} * C::kVector * C::kStride;
    CUTE_UNROLL
    for (int i = 0; i < kLoads; ++i) reinterpret_cast<uint4*>(raw)[i] = reinterpret_cast<const uint4*>(x + at)[i];
  }
  // Rounded by itself, so that a value's integer is the same wherever it stands.
  __device__ float scaled(Source value) const { return __fmul_rn(static_cast<float>(value), scale); }

  // The largest values of a stride that is inside the row for all lanes, two by two.
  template <class Pair>
  __device__ Pair largest_pair(int b) const {
    alignas(16) Source raw[8];
    load(b, raw);
    const Pair* pairs = reinterpret_cast<const Pair*>(raw);
    return __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  }

  // s of the values of stride b; -inf where there is none. `whole`: the stride is inside the row for all lanes.
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
      bool kept = i < inside;
      if constexpr (C::kCausal) kept = kept && column[i] <= last;
      s[i] = kNone;
      if (kept) {
        s[i] = scaled(raw[i]);
        if constexpr (C::kBias) s[i] += __ldg(bias + column[i]);
      }
    }
  }
};

// Over the lanes of a row: those that differ in all bits of the lane but the row's.
template <class C, class Value, class Merge>
__device__ __forceinline__ Value merge_row(Value value, const Merge& merge) {
  using S = SoftmaxShape<C>;
  CUTE_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    if (step < S::kLanes || step >= S::kLanes * S::kRows) value = merge(value, __shfl_xor_sync(~0u, value, step));
  }
  return value;
}

// The integers of kBlocks strides in the order of an SpMM's sparse operand: by way of shared memory, as bytes
// (blocks, planes, rows, 32).
template <class C>
struct FragmentWriter {
  using S = SoftmaxShape<C>;
  static constexpr int kStaged = S::kPlanes * S::kRows * 32;  // of a stride
  static constexpr int kPerWord = C::kBits == 4 ? 8 : 4;
  static constexpr int kWords = kStaged / kPerWord;           // of a stride's row tile
  static constexpr int kOperands = C::kFuseDigits ? 1 : S::kPlanes;
  static constexpr int kOperandWords = kWords / kOperands;
  static constexpr int kLaneWords = S::kBlocks * kWords / 32;
  static_assert(S::kBlocks * kWords % 32 == 0, "each lane writes as many words");

  uint8_t* staged;
  uint32_t* out;  // at the vector row's first group
  int tile, lane;
  uint32_t places[kLaneWords][kPerWord / 2];  // two 16-bit ones a word

  __device__ FragmentWriter(uint8_t* staged_, uint32_t* out_, const uint32_t* table, int tile_, int lane_)
      : staged(staged_), out(out_), tile(tile_), lane(lane_) {
    CUTE_UNROLL
    for (int n = 0; n < kLaneWords; ++n) {
      const int word = (lane + 32 * n) % kWords;
      CUTE_UNROLL
      for (int i = 0; i < kPerWord / 2; ++i) places[n][i] = __ldg(table + word * (kPerWord / 2) + i);
    }
  }

  // codes: of this lane's row and slots of stride `block` of the ones from b on, of which `count` exist.
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
        const uint32_t place = places[n][i / 2] >> (i % 2 * 16) & 0xffff;
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

// The same where a lane's two words of a plane are one pair each of the neighbouring slots of its row's four lanes, so that the
// four exchange pairs: (8 rows, 4 lanes, 4 pairs) becomes (8 rows, 4 pairs, 4 lanes).
template <class C>
struct ExchangingWriter {
  using S = SoftmaxShape<C>;
  static_assert(!C::kExchanged || (S::kRows == 8 && S::kLanes == 4 && C::kBits > 4), "a row is of four lanes");
  static constexpr int kPlaneWords = 64;

  uint32_t* out;  // at this lane's words of the vector row's first group
  bool upper, odd;

  __device__ ExchangingWriter(uint32_t* out_, int tile, int lane)
      : out(out_ + tile * kPlaneWords + 2 * lane), upper(lane & 2), odd(lane & 1) {}

  // codes: of this lane's row and slots of stride b.
  __device__ void write(const int32_t (&codes)[8], int b) const {
    CUTE_UNROLL
    for (int p = 0; p < S::kPlanes; ++p) {
      int32_t digits[8];
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) digits[i] = codes[i] >> (8 * p);
      const auto run = PackedRun<8, 8>::lowest(digits);
      // Lanes 0 and 1 keep pairs 0 and 1, lanes 2 and 3 the others; then even lanes keep the first of theirs.
      const uint32_t other = __shfl_xor_sync(~0u, upper ? run.word[0] : run.word[1], 2);
      const uint32_t early = upper ? other : run.word[0], late = upper ? run.word[1] : other;  // of lanes l % 2, 2 + l % 2
      const uint32_t mine = __byte_perm(early, late, odd ? 0x7632 : 0x5410);
      const uint32_t given = __byte_perm(early, late, odd ? 0x5410 : 0x7632);
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
        const float* bias, int64_t bias_batch, const uint32_t* places, uint8_t* out, const float* factors, int64_t factor_batch,
        float* scales, float* lse, int64_t tiles, int64_t rows, int64_t vector_rows, int64_t blocks, int64_t period_rows,
        int64_t period_columns, float scale, float empty) {
  using S = SoftmaxShape<C>;
  constexpr int kStagedBytes = C::kWarps * S::kBlocks * S::kPlanes * S::kRows * 32;
  __shared__ alignas(16) uint8_t staged[C::kFragments && !C::kExchanged ? kStagedBytes : 16];
  pdl_wait();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t work = blockIdx.x * C::kWarps + warp;
  if (work >= tiles) return;  // whole warps; no barrier of the block follows
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

  // Strides that all of a warp's rows have whole, of keys that all take part.
  const bool plain = SoftmaxRow<C>::kPlain && i - row + S::kRows <= rows;
  const int whole = plain ? length / C::kStride : 0;
  float top = kNone;
  int from = block;
  if constexpr (SoftmaxRow<C>::kPlain && sizeof(typename C::Source) == 2) {
    if (scale > 0.0f && from < whole) {  // rounding keeps the order, so the largest may come before the product with the scale
      using Pair = typename PairOf<typename C::Source>::Type;
      Pair most = of.template largest_pair<Pair>(from);
#pragma unroll 4
      for (from += S::kBlocks; from < whole; from += S::kBlocks) most = __hmax2(most, of.template largest_pair<Pair>(from));
      top = fmaxf(of.scaled(most.x), of.scaled(most.y));
    }
  }
#pragma unroll 2
  for (; from < count; from += S::kBlocks) {
    float s[8];
    of.logits(from, s, false);
    CUTE_UNROLL
    for (int k = 0; k < 8; ++k) top = fmaxf(top, s[k]);
  }
  top = merge_row<C>(top, [](float a, float b) { return fmaxf(a, b); });
  const float shift = top == kNone ? 0.0f : top;  // a row without keys, or of NaN

  float sum = 0.0f;
  unsigned long long total = 0;
  const auto encode = [&](int b, int32_t (&codes)[8], bool inside) {
    constexpr float kRound = 0x1p23f, kLog2e = 1.44269504f;  // an integer added to kRound is found in the lower bits
    float s[8];
    of.logits(b, s, inside);
    uint32_t part = 0;
    CUTE_UNROLL
    for (int k = 0; k < 8; ++k) {
      const float e = power_of_two((s[k] - shift) * kLog2e);
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
  if constexpr (C::kExchanged) {
    constexpr int kGroupWords = S::kPlanes * S::kTiles * ExchangingWriter<C>::kPlaneWords;
    const ExchangingWriter<C> writer(reinterpret_cast<uint32_t*>(out) + first * kGroupWords, tile, lane);
    int b = 0;  // kBlocks is 1: all lanes are at the same stride
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
                                   reinterpret_cast<uint32_t*>(out) + first * kGroupWords, places, tile, lane);
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
    const float factor = factors ? factors[batch * factor_batch + diagonal] : 1.0f;
    scales[place] = (total || sum != sum ? inverse : empty) * factor;
    if (lse) lse[place] = sum > 0.0f || sum != sum ? shift + __logf(sum) : kNone;
  }
}

}  // namespace magicube
