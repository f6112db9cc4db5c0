// Epilogue of the dense products: accumulator fragments of a warp to rows of the output.
//
//   out = f((total * row_scale) * col_scale + beta * c + bias),  total = sum of level l * 2^(-shift l)
//
// Of a gated linear unit, without c, out = f(gate) * up, which are such sums of two products.
// f is the identity or an activation. Results of int8 are the nearest integers to out / out_scale, saturated.
// All architectures from sm_80. A store is 16 bytes per lane: where TMA has brought rows of B in the order for it, a lane has them;
// else a quad of lanes transposes its 8x8 blocks. Each lane loads the scales and the bias of a few columns before the sums are there, and
// the others get them by shuffles: loads between the stores took a third of the time of a product of 384 inputs.
// Source: PTX ISA, mma accumulator layout.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
#include <cute/config.hpp>

#include "device/packed_int.cuh"
#include "device/quad.cuh"
#include "gemm/activation.cuh"

namespace magicube {

struct NoSource {};  // the type of an absent c

// The activation of a config that has one.
template <class C, class = void>
constexpr int kActivationOf = kIdentity;
template <class C>
constexpr int kActivationOf<C, cuda::std::void_t<decltype(C::kActivation)>> = C::kActivation;

template <class C>
struct GemmOutput {
  using Out = typename C::Out;
  using Source = typename C::Source;
  static constexpr bool kQuantized = cuda::std::is_same_v<Out, int8_t>;
  static constexpr bool kIntegral = cuda::std::is_integral_v<Out> && !kQuantized;
  static constexpr bool kFloatAccum = C::kFloatAccum;  // else exact int32
  static constexpr bool kHasSource = !cuda::std::is_same_v<Source, NoSource>;

  Out* out;
  const Source* c;
  const float* row_scales;  // (m,) or null
  const float* col_scales;  // (n,) or null
  const float* bias;  // (n,) or null
  int64_t pitch, c_pitch;
  int m, n;
  float alpha, beta, weight1, weight2;  // alpha includes per-tensor scales
  bool vector;  // n % 8 == 0 and rows are 16-byte aligned
  float per_out_scale;  // 1 / out_scale of int8 results

  __device__ float row_scale(int row) const { return row_scales && row < m ? alpha * __ldg(row_scales + row) : alpha; }

  // Add the levels' accumulators, register by register, in place of the first: integers, or the bits of floats. kMagnitudes:
  // leave the sum of their magnitudes, which bounds what the additions round, in place of the second.
  template <bool kMagnitudes, int kRegisters>
  __device__ void fold(uint32_t (&accum)[C::kLevels][kRegisters]) const {
    if constexpr (kIntegral || kFloatAccum) return;
    const float weight[] = {weight1, weight2};
    CUTE_UNROLL
    for (int r = 0; r < kRegisters; ++r) {
      float total = static_cast<float>(static_cast<int32_t>(accum[0][r]));
      CUTE_UNROLL
      for (int level = 1; level < C::kLevels; ++level) {
        total = __fmaf_rn(static_cast<float>(static_cast<int32_t>(accum[level][r])), weight[level - 1], total);
      }
      if constexpr (kMagnitudes) {
        float magnitude = fabsf(static_cast<float>(static_cast<int32_t>(accum[0][r])));
        CUTE_UNROLL
        for (int level = 1; level < C::kLevels; ++level) {
          magnitude = __fmaf_rn(fabsf(static_cast<float>(static_cast<int32_t>(accum[level][r]))), weight[level - 1], magnitude);
        }
        accum[1][r] = __float_as_uint(magnitude);
        asm volatile("" : "+r"(accum[1][r]));
      }
      accum[0][r] = __float_as_uint(total);
      // Convert here, not where the value is read: this frees the registers of the other levels.
      if constexpr (C::kLevels > 1) asm volatile("" : "+r"(accum[0][r]));
    }
  }

  using Result = cuda::std::conditional_t<kQuantized, int32_t, Out>;  // nearest integers are saturated when they are packed

  __device__ Result finish(uint32_t total, Source source, float row_scale, float col_scale, float bias) const {
    if constexpr (kIntegral) {
      Out result = static_cast<int32_t>(total);
      if constexpr (kHasSource) result += source;
      return result;
    } else {
      float result = __fmaf_rn(__uint_as_float(total) * row_scale, col_scale, bias);
      if constexpr (kHasSource) result = __fmaf_rn(beta, static_cast<float>(source), result);
      return rounded(activate<kActivationOf<C>, kQuantized>(result));
    }
  }

  __device__ Result rounded(float result) const {
    if constexpr (kQuantized) return __float2int_rn(result * per_out_scale);
    else if constexpr (cuda::std::is_same_v<Out, __half>) return __float2half_rn(result);
    else if constexpr (cuda::std::is_same_v<Out, __nv_bfloat16>) return __float2bfloat16_rn(result);
    else return result;
  }
};

// Columns of a lane in four 8x8 blocks side by side, two of one row of each, from its first one on.
constexpr int kQuadColumns[8] = {0, 1, 8, 9, 16, 17, 24, 25};
// The same where it has runs of four or eight adjacent ones.
template <int kRun>
constexpr int kRunColumns[8] = {0, 1, 2, 3, 4, 5, 6, 7};
template <>
constexpr int kRunColumns<4>[8] = {0, 1, 2, 3, 16, 17, 18, 19};

// Scales and bias of a warp's kColumns columns: lane l has column l of every 32, of floats columns 2 l and 2 l + 1 of every 64. What is
// not there is 1 and 0. Integer products shuffle it too: a compiler branches around each shuffle that depends on a condition. Those of
// floats have no registers for it.
template <class C, int kColumns>
struct ColumnFactors {
  static constexpr int kOwn = C::kFloatAccum ? 2 : 1, kParts = (kColumns + 32 * kOwn - 1) / (32 * kOwn);
  float scale[kParts][kOwn], bias[kParts][kOwn];
  bool scaled, biased;  // the same for all lanes

  // `skipped`: scales and bias before the first column's.
  __device__ ColumnFactors(const GemmOutput<C>& to, int column, int lane, int skipped = 0)
      : scaled(!C::kFloatAccum || to.col_scales), biased(!C::kFloatAccum || to.bias) {
    CUTE_UNROLL
    for (int part = 0; part < kParts; ++part) {
      CUTE_UNROLL
      for (int i = 0; i < kOwn; ++i) {
        const int at = column + 32 * kOwn * part + kOwn * lane + i;
        scale[part][i] = to.col_scales && at < to.n ? __ldg(to.col_scales + skipped + at) : 1.0f;
        bias[part][i] = to.bias && at < to.n ? __ldg(to.bias + skipped + at) : 0.0f;
      }
    }
  }

  // Of eight columns of the 32 of `part`, `offsets` behind column `own`, which is even.
  __device__ __forceinline__ void take(int part, int own, const int (&offsets)[8], float (&scales)[8], float (&biases)[8]) const {
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int from = part % kOwn * 32 / kOwn + own / kOwn + offsets[i] / kOwn, each = offsets[i] % kOwn;
      scales[i] = scaled ? __shfl_sync(~0u, scale[part / kOwn][each], from) : 1.0f;
      biases[i] = biased ? __shfl_sync(~0u, bias[part / kOwn][each], from) : 0.0f;
    }
  }
};

struct NoFactors {
  template <class... Arguments>
  __device__ NoFactors(const Arguments&...) {}
};

// Scales of rows g and g + 8 of kBlocks blocks, `step` rows apart; (row, lane) as in write_fragment. They are loaded before the sums are
// there, and multiplied by alpha after that: a product would wait for its load.
template <class C, int kBlocks>
struct RowFactors {
  float held[kBlocks][2];

  __device__ RowFactors(const GemmOutput<C>& to, int row, int step, int lane) {
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int at = row + step * block + lane / 4 + 8 * half;
        held[block][half] = to.row_scales && at < to.m ? __ldg(to.row_scales + at) : 1.0f;
      }
    }
  }

  __device__ float scale(const GemmOutput<C>& to, int block, int half) const { return to.alpha * held[block][half]; }
};

// Load what c has beside the eight results of a lane, a run at a time where it is aligned as the output is; zeros where not `present`.
template <class C>
__device__ __forceinline__ void load_eight(bool present, const typename C::Source* from, typename C::Source (&to)[8]) {
  constexpr int kBytes = C::kAdjacent * int(sizeof(typename C::Source));  // of a run
  using Word = cuda::std::conditional_t<kBytes % 16 == 0, uint4, uint2>;
  CUTE_UNROLL
  for (int i = 0; i < 8; i += C::kAdjacent) {
    CUTE_UNROLL
    for (int word = 0; word < kBytes / int(sizeof(Word)); ++word) {
      const Word x = present ? reinterpret_cast<const Word*>(from + kRunColumns<C::kAdjacent>[i])[word] : Word{};
      reinterpret_cast<Word*>(to + i)[word] = x;
    }
  }
}

// c beside a warp's results of kBlocks blocks of 16 rows, `step` rows apart; (row, column) as in write_fragment. It is loaded before the
// sums are there if a thread has the registers beside theirs, else 32 columns at a time.
template <class C, int kBlocks, int kColumns, bool kPresent = GemmOutput<C>::kHasSource>
struct SourceRuns {
  using Source = typename C::Source;
  static constexpr int kSums = kBlocks * kColumns / 2, kWords = kSums * int(sizeof(Source)) / 4;
  static constexpr bool kEarly = kWords <= 64 && kWords + C::kLevels * kSums <= 160;
  alignas(16) Source held[kEarly ? kColumns / 32 : 1][2 * kBlocks][8];

  __device__ __forceinline__ SourceRuns(const GemmOutput<C>& to, int row, int step, int column, int lane) {
    CUTE_UNROLL
    for (int part = 0; kEarly && part < kColumns / 32; ++part) load(to, row, step, column + 32 * part, lane, held[part]);
  }

  // Beside eight results of each row from `column` on, `part` times 32 behind the first one.
  __device__ __forceinline__ auto& of(const GemmOutput<C>& to, int row, int step, int column, int lane, int part) {
    if constexpr (!kEarly) load(to, row, step, column, lane, held[0]);
    return held[kEarly ? part : 0];
  }

  static __device__ __forceinline__ void load(const GemmOutput<C>& to, int row, int step, int column, int lane,
                                              Source (&found)[2 * kBlocks][8]) {
    const int own = column + lane % 4 * C::kAdjacent;
    CUTE_UNROLL
    for (int pair = 0; pair < 2 * kBlocks; ++pair) {
      const int at = row + step * (pair / 2) + lane / 4 + pair % 2 * 8;
      load_eight<C>(at < to.m && own < to.n, to.c + int64_t{at} * to.c_pitch + own, found[pair]);
    }
  }
};
template <class C, int kBlocks, int kColumns>
struct SourceRuns<C, kBlocks, kColumns, false> {
  NoSource held[2 * kBlocks][8];
  __device__ SourceRuns(const GemmOutput<C>&, int, int, int, int) {}
  __device__ auto& of(const GemmOutput<C>&, int, int, int, int, int) { return held; }
};

// Load the elements of `from` at those columns; `otherwise` beyond the last one.
template <class Value>
__device__ __forceinline__ void load_quad(const Value* from, bool present, int remaining, Value otherwise, Value (&to)[8]) {
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) to[i] = present && kQuadColumns[i] < remaining ? from[kQuadColumns[i]] : otherwise;
}

// Store one block per lane, 16 bytes at a time, or the 8 of int8; (row, column) is the quad's corner.
template <class C>
__device__ __forceinline__ void write_quad(const GemmOutput<C>& to, const typename C::Out (&pair)[8], int row, int column,
                                           int t) {
  constexpr bool kBytes = sizeof(typename C::Out) == 1;  // a pair is half a word
  constexpr int kWords = kBytes ? 1 : 2 * int(sizeof(typename C::Out)) / 4;  // words of a pair of elements
  uint32_t word[kWords][4];
  CUTE_UNROLL
  for (int w = 0; w < kWords; ++w) {
    CUTE_UNROLL
    for (int block = 0; block < 4; ++block) {
      if constexpr (kBytes) word[w][block] = reinterpret_cast<const uint16_t*>(pair)[block];
      else word[w][block] = reinterpret_cast<const uint32_t*>(pair + 2 * block)[w];
    }
    transpose_quad(word[w], t);
  }
  if (row >= to.m || column + 8 * t >= to.n) return;
  auto* to_row = to.out + int64_t{row} * to.pitch + column + 8 * t;
  if constexpr (kBytes) {
    *reinterpret_cast<uint2*>(to_row) = make_uint2(word[0][0] | word[0][1] << 16, word[0][2] | word[0][3] << 16);
    return;
  }
  auto* at = reinterpret_cast<uint4*>(to_row);
  CUTE_UNROLL
  for (int w = 0; w < kWords; ++w) {
    uint32_t run[4];  // words 4w to 4w + 3 of the block's row, pair by pair
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) run[i] = word[(4 * w + i) % kWords][(4 * w + i) / kWords];
    at[w] = make_uint4(run[0], run[1], run[2], run[3]);
  }
}

struct NoVisitor {
  template <class Value>
  __device__ __forceinline__ void operator()(Value) const {}
};

// Whether a visitor takes, beside a result, the sum of the magnitudes of its levels.
template <class C, class Visitor>
constexpr bool kTakesMagnitudes = C::kLevels > 1 && cuda::std::is_invocable_v<const Visitor&, typename C::Out, float>;

// kVector: by write_quad. See write_fragment.
template <bool kVector, class C, int kRegisters, class Visitor>
__device__ __forceinline__ void store_accumulators(const GemmOutput<C>& to, const uint32_t (&accum)[C::kLevels][kRegisters],
                                                   int row, int column, int lane, const float (&row_scale)[2],
                                                   const ColumnFactors<C, 2 * kRegisters>& factors, const Visitor& visitor) {
  using Out = typename C::Out;
  using Source = typename C::Source;
  const int g = lane / 4, t = lane % 4;
  CUTE_UNROLL
  for (int first = 0; first < kRegisters / 4; first += 4) {
    const int own = column + 8 * first + 2 * t, present = to.n - own;
    float col_scale[8], bias[8];
    if constexpr (!GemmOutput<C>::kIntegral) factors.take(first / 4, 2 * t, kQuadColumns, col_scale, bias);
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int at = row + g + 8 * half;
      Source source[8];
      if constexpr (GemmOutput<C>::kHasSource)
        load_quad(to.c + int64_t{at} * to.c_pitch + own, at < to.m, present, Source(0), source);
      typename GemmOutput<C>::Result result[8];
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int r = 4 * (first + i / 2) + 2 * half + i % 2;
        result[i] = to.finish(accum[0][r], source[i], row_scale[half], col_scale[i], bias[i]);
        if constexpr (kTakesMagnitudes<C, Visitor>) {
          visitor(result[i], __uint_as_float(accum[1][r]) * fabsf(row_scale[half] * col_scale[i]));
        } else {
          visitor(result[i]);
        }
      }
      alignas(16) Out pair[8];
      CUTE_UNROLL
      for (int i = 0; i < 8; i += 2) {
        if constexpr (GemmOutput<C>::kQuantized) {
          const uint32_t both = pack_nearest<8, true>(result[i], result[i + 1], 0);
          pair[i] = Out(both), pair[i + 1] = Out(both >> 8);
        } else {
          pair[i] = result[i], pair[i + 1] = result[i + 1];
        }
      }
      if constexpr (kVector) {
        write_quad(to, pair, at, column + 8 * first, t);
      } else if (at < to.m) {
        CUTE_UNROLL
        for (int i = 0; i < 8; ++i) {
          if (kQuadColumns[i] < present) to.out[int64_t{at} * to.pitch + own + kQuadColumns[i]] = pair[i];
        }
      }
    }
  }
}

// Write a warp's accumulator fragment of 16 rows and 2 * kRegisters columns: rows g and g + 8 of the first eight columns, then
// of the next; (row, column) is its corner. `visitor` is called with each result, also with those beyond the output.
template <class C, int kRegisters, class Visitor = NoVisitor>
__device__ __forceinline__ void write_fragment(const GemmOutput<C>& to, uint32_t (&accum)[C::kLevels][kRegisters], int row,
                                               int column, int lane, const float (&row_scale)[2],
                                               const ColumnFactors<C, 2 * kRegisters>& factors, const Visitor& visitor = {}) {
  static_assert(kRegisters % 16 == 0, "four blocks of eight columns are written together");
  to.template fold<kTakesMagnitudes<C, Visitor>>(accum);
  if (to.vector) store_accumulators<true>(to, accum, row, column, lane, row_scale, factors, visitor);
  else store_accumulators<false>(to, accum, row, column, lane, row_scale, factors, visitor);
}

// The same, with scales and bias loaded here.
template <class C, int kRegisters, class Visitor = NoVisitor>
__device__ __forceinline__ void write_fragment(const GemmOutput<C>& to, uint32_t (&accum)[C::kLevels][kRegisters], int row,
                                               int column, int lane, const Visitor& visitor = {}) {
  float row_scale[2];
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) row_scale[half] = to.row_scale(row + lane / 4 + 8 * half);
  write_fragment(to, accum, row, column, lane, row_scale, ColumnFactors<C, 2 * kRegisters>(to, column, lane), visitor);
}

// Store where `present`, without a branch: a compiler would move what computes `x` behind it.
__device__ __forceinline__ void store_if(bool present, uint4* to, const uint4& x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w), "r"(int(present)) : "memory");
}
__device__ __forceinline__ void store_if(bool present, uint2* to, const uint2& x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.v2.b32 [%0], {%1, %2};\n}" ::"l"(to), "r"(x.x), "r"(x.y),
               "r"(int(present)) : "memory");
}

// Store the eight results of a lane where `present`, 16 bytes at a time, or the 8 of int8, which are saturated.
template <class C>
__device__ __forceinline__ void store_eight(bool present, typename C::Out* to, const typename GemmOutput<C>::Result (&x)[8]) {
  if constexpr (GemmOutput<C>::kQuantized) {
    store_if(present, reinterpret_cast<uint2*>(to),
             make_uint2(pack_nearest<8, true>(x[0], x[1], pack_nearest<8, true>(x[2], x[3], 0)),
                        pack_nearest<8, true>(x[4], x[5], pack_nearest<8, true>(x[6], x[7], 0))));
  } else {
    alignas(16) typename C::Out run[8];
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) run[i] = x[i];
    CUTE_UNROLL
    for (int i = 0; i < 8; i += C::kAdjacent) {
      store_if(present, reinterpret_cast<uint4*>(to + kRunColumns<C::kAdjacent>[i]), *reinterpret_cast<const uint4*>(run + i));
    }
  }
}

// Write a warp's accumulators of kBlocks blocks of 16 rows, `step` rows apart, where rows of B lay in the order that gives a lane of a
// quad 16 bytes of adjacent results: there is nothing to transpose. n % 32 == 0, rows of the output and of c are 16-byte aligned. See
// write_fragment.
template <class C, int kBlocks, int kRegisters, class Visitor>
__device__ __forceinline__ void write_adjacent(const GemmOutput<C>& to, uint32_t (&accum)[kBlocks][C::kLevels][kRegisters], int row,
                                               int step, int column, int lane, const RowFactors<C, kBlocks>& rows,
                                               const ColumnFactors<C, 2 * kRegisters>& factors,
                                               SourceRuns<C, kBlocks, 2 * kRegisters>& sources, const Visitor& visitor) {
  CUTE_UNROLL
  for (int block = 0; block < kBlocks; ++block) to.template fold<kTakesMagnitudes<C, Visitor>>(accum[block]);
  CUTE_UNROLL
  for (int first = 0; first < kRegisters / 4; first += 4) {
    const int inside = lane % 4 * C::kAdjacent, own = column + 8 * first + inside;
    float col_scale[8], bias[8];
    if constexpr (!GemmOutput<C>::kIntegral) factors.take(first / 4, inside, kRunColumns<C::kAdjacent>, col_scale, bias);
    const auto& source = sources.of(to, row, step, column + 8 * first, lane, first / 4);
    CUTE_UNROLL
    for (int pair = 0; pair < 2 * kBlocks; ++pair) {
      const int block = pair / 2, half = pair % 2, at = row + step * block + lane / 4 + 8 * half;
      const float row_scale = rows.scale(to, block, half);
      const bool present = at < to.m && own < to.n;
      typename GemmOutput<C>::Result result[8];
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int r = 4 * (first + i / 2) + 2 * half + i % 2;
        result[i] = to.finish(accum[block][0][r], source[pair][i], row_scale, col_scale[i], bias[i]);
        if constexpr (kTakesMagnitudes<C, Visitor>) {
          visitor(result[i], __uint_as_float(accum[block][1][r]) * fabsf(row_scale * col_scale[i]));
        } else {
          visitor(result[i]);
        }
      }
      store_eight<C>(present, to.out + int64_t{at} * to.pitch + own, result);
    }
  }
}

// The same for a gated linear unit: accumulators of the gates, then of as many columns that they gate. (row, column) is of the output.
template <class C, int kBlocks, int kRegisters>
__device__ __forceinline__ void write_glu(const GemmOutput<C>& to, uint32_t (&accum)[kBlocks][C::kLevels][kRegisters], int row, int step,
                                          int column, int lane, const RowFactors<C, kBlocks>& rows,
                                          const ColumnFactors<C, kRegisters>& gates, const ColumnFactors<C, kRegisters>& ups) {
  CUTE_UNROLL
  for (int block = 0; block < kBlocks; ++block) to.template fold<false>(accum[block]);
  CUTE_UNROLL
  for (int first = 0; first < kRegisters / 8; first += 4) {
    const int inside = lane % 4 * C::kAdjacent, own = column + 8 * first + inside;
    float gate_scale[8], gate_bias[8], up_scale[8], up_bias[8];
    gates.take(first / 4, inside, kRunColumns<C::kAdjacent>, gate_scale, gate_bias);
    ups.take(first / 4, inside, kRunColumns<C::kAdjacent>, up_scale, up_bias);
    CUTE_UNROLL
    for (int pair = 0; pair < 2 * kBlocks; ++pair) {
      const int block = pair / 2, half = pair % 2, at = row + step * block + lane / 4 + 8 * half;
      const float row_scale = rows.scale(to, block, half);
      typename GemmOutput<C>::Result result[8];
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int r = 4 * (first + i / 2) + 2 * half + i % 2;
        const float gate = __fmaf_rn(__uint_as_float(accum[block][0][r]) * row_scale, gate_scale[i], gate_bias[i]);
        const float up = __fmaf_rn(__uint_as_float(accum[block][0][r + kRegisters / 2]) * row_scale, up_scale[i], up_bias[i]);
        result[i] = to.rounded(activate<kActivationOf<C>, GemmOutput<C>::kQuantized>(gate) * up);
      }
      store_eight<C>(at < to.m && own < to.n, to.out + int64_t{at} * to.pitch + own, result);
    }
  }
}

}  // namespace magicube
