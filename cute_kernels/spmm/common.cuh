// SpMM: what the gather and the panel kernel share.
//
// Formula: C = row_scale * col_scale * (A B) + bias, with A sparse (V x 1 vectors) and B dense, row-major. C::kAccumulate: added to
// the float32 C.
// Architectures: sm_80 and later (mma.sync, ldmatrix.trans).
// Work: a group is K vectors of one vector row, K of the MMA. A warp multiplies groups by N tiles of kTileNBytes bytes of
// the gathered rows of B.
// Operands: C^T = B^T A^T. Rows of B^T are operand A, from ldmatrix.trans; vectors are operand B, in fragment order.
// Digits: wide integers are digit planes; digit products of equal weight share an accumulator.
// Source: Li, Osawa, Hoefler, SC'22, sections IV-A to IV-D.
#pragma once

#include "device/copy.cuh"
#include "device/dequantize_fragment.cuh"
#include "device/epilogue.cuh"

namespace magicube {

// Operands of the epilogue. A stride of 0: one scale for all; null: no scale.
struct SpmmOperands {
  const float* row_scale;       // (rows,) float32 or null
  const float* col_scale;      // (batch, n) float32 or null
  const float* bias;       // (rows,) float32 or null
  void* out;               // (batch, rows, n), or (batch, n, rows) if C::kTransposedOut; contiguous
  int64_t rows, n, row_scale_stride, col_scale_stride, col_scale_batch;
  bool vector_stores;      // out, col_scale and n are aligned to the columns of a unit
};

template <class C>
struct SpmmShape {
  using Shape = AtomShape<typename AtomFor<typename C::OperandB, typename C::OperandA>::type>;
  static constexpr int kElement = C::kBitsB > 8 ? 16 : C::kBitsB;
  using Units = cuda::std::conditional_t<C::kFloat, FloatUnits<Shape, typename C::FormatB, typename C::OperandB>,
                                         DenseUnits<Shape, kElement, C::kSignedB, C::kShuffle>>;

  static constexpr int kDigitsA = C::kBitsA > 8 && !C::kFloat ? 2 : 1;
  static constexpr int kPlanes = C::kFuseDigits ? 1 : kDigitsA;             // MMA operands of the digits of A
  static constexpr int kTileRows = C::kVector < 8 ? C::kVector : 8;      // rows of a vector per MMA
  static constexpr int kRowTiles = C::kVector / kTileRows;
  static constexpr int kUsedRows = C::kFuseDigits ? 2 * kTileRows : kTileRows;  // columns of the MMA that hold values
  static_assert(!C::kFuseDigits || (kDigitsA == 2 && C::kVector <= 4), "fused digits need two digits and at most four rows");
  // A word of packed 4-bit values becomes two registers of an 8-bit MMA; a word of floats becomes 16 / bits registers.
  static constexpr bool kPackedA = !C::kFloat && C::kBitsA == 4 && Shape::kBits == 8 && Shape::kDepth % 2 == 0;
  static constexpr int kWords = C::kFloat ? Shape::kDepth * C::kBitsA / Shape::kBits : Shape::kDepth / (kPackedA ? 2 : 1);
  static_assert(kWords > 0, "the values of a lane must fill a word");
  static constexpr int shift(int sub) { return Units::shift(sub) + (kPackedA && C::kSignedA ? 4 : 0); }
  // Cross terms share an accumulator if both operands are signed: 2 * 255 * 128 is below 2^16, as 255 * 255 is, and 32,768
  // products below 2^16 fit int32.
  static constexpr bool kShareCrossTerms = kPlanes == 2 && Units::kDigits == 2 && C::kSignedA && C::kSignedB;
  static constexpr int kAccumulators = kShareCrossTerms ? 3 : kPlanes * Units::kDigits;
  static constexpr int accumulator_of(int plane, int digit) { return kShareCrossTerms ? plane + digit : plane * Units::kDigits + digit; }
  static constexpr int weight_of(int i) { return kShareCrossTerms ? i : i / Units::kDigits + i % Units::kDigits; }

  static constexpr int kChunks = C::kTileNBytes / 16;
  static constexpr int kUnits = kChunks * Units::kSubs;                  // units of eight columns per N tile
  static constexpr int kTileN = kUnits * 8;
  static constexpr int kStep = Shape::kRowBlocks > Units::kSubs ? Shape::kRowBlocks / Units::kSubs : 1;  // chunks per MMA
  static_assert(kChunks % kStep == 0 && Units::kSubs * kStep % Shape::kRowBlocks == 0, "units must fill the rows of the MMA");

  // Operand types of the MMA: float format, or signedness of a digit.
  template <int kPlane>
  using SparseOperand = cuda::std::conditional_t<
      C::kFloat, typename C::OperandA, Integer<C::kSignedA && (C::kFuseDigits || kPlane == kDigitsA - 1)>>;
  template <int kDigit>
  using DenseOperand = cuda::std::conditional_t<C::kFloat, typename C::OperandB,
                                                Integer<C::kSignedB && kDigit == Units::kDigits - 1>>;
  static constexpr float exponent_bias_factor() {
    return kExponentBiasFactor<typename C::FormatA, typename C::OperandA> * kExponentBiasFactor<typename C::FormatB, typename C::OperandB>;
  }
  static constexpr int64_t kGroupWords = int64_t{kPlanes} * kRowTiles * 4 * kUsedRows * kWords;
};

// Values of one group in fragment order.
template <class C>
struct SparseFragment {
  using S = SpmmShape<C>;
  uint32_t words[S::kPlanes][S::kRowTiles][S::kWords];  // (planes, row tiles, words)

  __device__ void load(const uint32_t* group, int lane) {
    CUTE_UNROLL
    for (int p = 0; p < S::kPlanes; ++p) {
      CUTE_UNROLL
      for (int tile = 0; tile < S::kRowTiles; ++tile) {
        if (S::kUsedRows == 8 || lane < 4 * S::kUsedRows) {
          load_words<S::kWords>(words[p][tile], group + ((p * S::kRowTiles + tile) * 4 * S::kUsedRows + lane) * S::kWords);
        } else {
          CUTE_UNROLL
          for (int w = 0; w < S::kWords; ++w) words[p][tile][w] = 0;
        }
      }
    }
  }

  // As load, from shared memory.
  __device__ void read(uint32_t at, int lane) {
    CUTE_UNROLL
    for (int p = 0; p < S::kPlanes; ++p) {
      CUTE_UNROLL
      for (int tile = 0; tile < S::kRowTiles; ++tile) {
        if (S::kUsedRows == 8 || lane < 4 * S::kUsedRows) {
          load_shared(at + ((p * S::kRowTiles + tile) * 4 * S::kUsedRows + lane) * S::kWords * 4, words[p][tile]);
        } else {
          CUTE_UNROLL
          for (int w = 0; w < S::kWords; ++w) words[p][tile][w] = 0;
        }
      }
    }
  }

  __device__ void expand(int p, int tile, uint32_t (&out)[S::Shape::kDepth]) const {
    if constexpr (C::kFloat) {
      expand_words<typename C::FormatA, typename C::OperandA>(words[p][tile], out);
    } else {
      CUTE_UNROLL
      for (int w = 0; w < S::kWords; ++w) {
        if constexpr (S::kPackedA && !C::kShuffle) {
          out[2 * w] = spread_nibbles<C::kSignedA>(words[p][tile][w], false);
          out[2 * w + 1] = spread_nibbles<C::kSignedA>(words[p][tile][w], true);
        } else if constexpr (S::kPackedA) {
          out[2 * w] = low_nibbles<C::kSignedA>(words[p][tile][w]);
          out[2 * w + 1] = high_nibbles<C::kSignedA>(words[p][tile][w]);
        } else {
          out[w] = words[p][tile][w];
        }
      }
    }
  }
};

// Accumulators of one vector row and N tile. The result is the sum of the digit products, each shifted by its weight.
template <class C>
struct Accumulators {
  using S = SpmmShape<C>;
  using Units = typename S::Units;
  uint32_t value[S::kRowTiles][S::kAccumulators][S::kUnits][2];  // (row tiles, digit weights, units, 2 columns)
  // Products of A with the constant offset of unsigned-as-signed units, equal for all columns of B.
  static constexpr int kOffsets = Units::kOffset ? S::kRowTiles * S::kPlanes : 0;
  uint32_t offset[kOffsets > 0 ? kOffsets : 1][2 * S::Shape::kRowBlocks];

  __device__ void clear() {
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(value) / 4); ++i) (&value[0][0][0][0])[i] = 0;
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(offset) / 4); ++i) (&offset[0][0])[i] = 0;
  }

  // raw: (kStep, matrices), units of the chunks [chunk, chunk + kStep).
  __device__ void add(const SparseFragment<C>& values, int chunk, const uint32_t (&raw)[S::kStep][Units::kMatrices]) {
    using Shape = typename S::Shape;
    uint32_t dense[Units::kDigits][S::kStep][Units::kSubs][Shape::kDepth];  // (digits, chunks, units, depth)
    CUTE_UNROLL
    for (int c = 0; c < S::kStep; ++c) {
      uint32_t units[Units::kDigits][Units::kSubs][Shape::kDepth];
      Units::transpose(raw[c], units);
      CUTE_UNROLL
      for (int i = 0; i < Units::kDigits * Units::kSubs * Shape::kDepth; ++i) {
        constexpr int kPart = Units::kSubs * Shape::kDepth;
        (&dense[i / kPart][c][0][0])[i % kPart] = (&units[0][0][0])[i];
      }
    }
    CUTE_UNROLL
    for (int tile = 0; tile < S::kRowTiles; ++tile) {
      for_planes<0>(values, tile, chunk, dense);
    }
  }

  // The operand types of the MMA depend on the digits, so templates unroll planes and digits.
  template <int kPlane, class Dense>
  __device__ void for_planes(const SparseFragment<C>& values, int tile, int chunk, const Dense& dense) {
    if constexpr (kPlane < S::kPlanes) {
      uint32_t sparse[S::Shape::kDepth];
      values.expand(kPlane, tile, sparse);
      if (Units::kOffset && chunk == 0) add_offset<kPlane>(sparse, tile);
      for_digits<kPlane, 0>(sparse, tile, chunk, dense);
      for_planes<kPlane + 1>(values, tile, chunk, dense);
    }
  }
  template <int kPlane, int kDigit, class Dense>
  __device__ void for_digits(const uint32_t* sparse, int tile, int chunk, const Dense& dense) {
    using Shape = typename S::Shape;
    if constexpr (kDigit < Units::kDigits) {
      using Op = typename AtomFor<typename S::template DenseOperand<kDigit>,
                                  typename S::template SparseOperand<kPlane>>::type;
      CUTE_UNROLL
      for (int u = 0; u < S::kStep * Units::kSubs; u += Shape::kRowBlocks) {
        mma<Op>(value[tile][S::accumulator_of(kPlane, kDigit)][chunk * Units::kSubs + u],
                     &dense[kDigit][0][0][0] + u * Shape::kDepth, sparse);
      }
      for_digits<kPlane, kDigit + 1>(sparse, tile, chunk, dense);
    }
  }

  // Accumulate the product of A with the constant offset.
  template <int kPlane>
  __device__ void add_offset(const uint32_t* sparse, int tile) {
    using Shape = typename S::Shape;
    using Op = typename AtomFor<typename S::template DenseOperand<Units::kDigits - 1>,
                                typename S::template SparseOperand<kPlane>>::type;
    uint32_t dense[Shape::kRowBlocks * Shape::kDepth];
    CUTE_UNROLL
    for (int i = 0; i < Shape::kRowBlocks * Shape::kDepth; ++i) dense[i] = Units::kOffset;
    if constexpr (kOffsets > 0) mma<Op>(offset[tile * S::kPlanes + kPlane], dense, sparse);
  }

  // Combine the digit products of one row tile: (units, 2 columns of the MMA). Fused digits are in different lanes.
  template <class Total>
  __device__ void totals(int tile, Total (&out)[S::kUnits][2]) const {
    CUTE_UNROLL
    for (int u = 0; u < S::kUnits; ++u) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        if constexpr (C::kFloat) {
          out[u][j] = __uint_as_float(value[tile][0][u][j]) * S::exponent_bias_factor();
        } else {
          const bool moved = kOffsets > 0 && Units::offset(u % Units::kSubs);
          out[u][j] = 0;
          CUTE_UNROLL
          for (int i = 0; i < S::kAccumulators; ++i) {
            uint32_t whole = value[tile][i][u][j];
            if (moved) whole += offset[tile * S::kPlanes + i][j];
            out[u][j] += weighted<Total>(static_cast<int32_t>(whole) >> S::shift(u % Units::kSubs), 8 * S::weight_of(i));
          }
        }
      }
      if constexpr (C::kFuseDigits) {
        if constexpr (C::kVector == 1) {
          out[u][0] += weighted(out[u][1], 8);
        } else {
          CUTE_UNROLL
          for (int j = 0; j < 2; ++j) out[u][j] += weighted(__shfl_down_sync(~0u, out[u][j], C::kVector / 2), 8);
        }
      }
    }
  }
};

// Groups per int32 accumulator without overflow: a product is at most 255 * 255, or 128 * 256 * 256 over all shifts.
template <class Shape>
constexpr int64_t kSafeGroups = 32768 / Shape::kK;

// What the results of a lane are added to: (units, 2 rows) of one row tile. Loaded before the groups are multiplied, so that its
// latency is hidden.
template <class C, bool kAdds = C::kAccumulate>
struct Before {
  __device__ void load(const SpmmOperands&, int64_t, int64_t, int, int64_t, int) {}
};

template <class C>
struct Before<C, true> {
  using S = SpmmShape<C>;
  static constexpr int kSubs = S::Units::kSubs;
  float value[S::kUnits][2];

  __device__ void load(const SpmmOperands& at, int64_t batch, int64_t vector_row, int tile, int64_t n0, int lane) {
    const int64_t first = n0 + lane / 4 * kSubs, row = vector_row * C::kVector + tile * 8 + lane % 4 * 2;
    const float* const out = static_cast<const float*>(at.out) + batch * at.rows * at.n;
    const bool fits = S::kTileRows == 8 || lane % 4 * 2 < S::kTileRows;
    const bool both = row + 1 < at.rows && (S::kTileRows == 8 || lane % 4 * 2 + 1 < S::kTileRows);
    CUTE_UNROLL
    for (int u = 0; u < S::kUnits; ++u) {
      const int64_t column = first + u / kSubs * 8 * kSubs + u % kSubs;
      const bool exists = fits && row < at.rows && column < at.n;
      if constexpr (C::kTransposedOut) {
        if (exists && both && at.rows % 2 == 0) {
          *reinterpret_cast<float2*>(value[u]) = *reinterpret_cast<const float2*>(out + column * at.rows + row);
          continue;
        }
      }
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        const bool present = exists && (j == 0 || both);
        value[u][j] = present ? out[C::kTransposedOut ? column * at.rows + row + j : (row + j) * at.n + column] : 0.0f;
      }
    }
  }
};

// How a lane stores its columns of a chunk: by vector stores, with a per-tensor or a per-column scale, if all columns or
// none exist; else column by column with predication.
enum class RowStore { kPerTensor, kPerColumn, kPredicated };

// Load the column scales of chunk c for this lane. col_scale: null, or the scale of the first column of chunk 0.
template <class C, RowStore kForm>
__device__ __forceinline__ void load_col_scales(float (&scales)[SpmmShape<C>::Units::kSubs], const float* col_scale,
                                             int64_t col_scale_stride, int c, int64_t inside) {
  constexpr int kSubs = SpmmShape<C>::Units::kSubs;
  if constexpr (kForm == RowStore::kPredicated) {
    CUTE_UNROLL
    for (int s = 0; s < kSubs; ++s) {
      const int column = c * 8 * kSubs + s;
      scales[s] = col_scale && column < inside ? col_scale[column * col_scale_stride] : 1.0f;
    }
  } else if constexpr (kForm == RowStore::kPerColumn) {
    uint32_t words[kSubs];
    if constexpr (C::kStagedScales) load_shared(shared_address(col_scale + c * 8 * kSubs), words);
    else load_words<kSubs>(words, reinterpret_cast<const uint32_t*>(col_scale + c * 8 * kSubs));
    CUTE_UNROLL
    for (int s = 0; s < kSubs; ++s) scales[s] = __uint_as_float(words[s]);
  }
}

// Write the two rows of a row tile that a lane holds. kWhole: all columns of the N tile exist.
template <class C, RowStore kForm, bool kWhole, class Total>
__device__ __forceinline__ void write_rows(typename C::Out* const (&to)[2], const bool (&exists)[2], int64_t inside,
                                           const Total (&total)[SpmmShape<C>::kUnits][2], const float (&row_scale)[2],
                                           const float* col_scale, int64_t col_scale_stride, const float (&bias)[2],
                                           const Before<C>& before) {
  using S = SpmmShape<C>;
  constexpr int kSubs = S::Units::kSubs;
  float scales[kSubs];
  if constexpr (kForm == RowStore::kPerTensor) {
    const float one = col_scale ? __ldg(col_scale) : 1.0f;
    CUTE_UNROLL
    for (int s = 0; s < kSubs; ++s) scales[s] = one;
  }
  CUTE_UNROLL
  for (int c = 0; c < S::kChunks; ++c) {
    if (C::kPartial && !kWhole && c * 8 * kSubs >= inside) break;
    load_col_scales<C, kForm>(scales, col_scale, col_scale_stride, c, inside);
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      if (!exists[j]) continue;
      Total run[kSubs];
      CUTE_UNROLL
      for (int s = 0; s < kSubs; ++s) run[s] = total[c * kSubs + s][j];
      constexpr bool kTogether = kForm != RowStore::kPredicated;
      const int remaining = int(inside - c * 8 * kSubs);
      if constexpr (C::kAccumulate) {
        float old[kSubs];
        CUTE_UNROLL
        for (int s = 0; s < kSubs; ++s) old[s] = before.value[c * kSubs + s][j];
        add_run<kTogether>(run, old, to[j] + c * 8 * kSubs, remaining, row_scale[j], scales);
      } else {
        write_run<kTogether>(run, to[j] + c * 8 * kSubs, remaining, row_scale[j], scales, bias[j]);
      }
    }
  }
}

// Write one row tile to the transpose of C, (batch, n, rows), where the two rows of a lane are neighbors. `to`: the first of them in
// the first column.
template <class C, class Total>
__device__ __forceinline__ void write_transposed(typename C::Out* to, const bool (&exists)[2], int64_t rows, int64_t inside,
                                                 const Total (&total)[SpmmShape<C>::kUnits][2], const float (&row_scale)[2],
                                                 const float* col_scale, int64_t col_scale_stride, const float (&bias)[2],
                                                 const Before<C>& before) {
  using S = SpmmShape<C>;
  using Out = typename C::Out;
  using Pair = typename Store<2 * sizeof(Out)>::type;
  constexpr int kSubs = S::Units::kSubs;
  if (!exists[0]) return;
  const bool paired = exists[1] && rows % 2 == 0;  // a pair starts at an even place
  CUTE_UNROLL
  for (int u = 0; u < S::kUnits; ++u) {
    const int column = u / kSubs * 8 * kSubs + u % kSubs;
    if (column >= inside) continue;
    const float scale = col_scale ? col_scale[column * col_scale_stride] : 1.0f;
    alignas(2 * sizeof(Out)) Out two[2];
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      if constexpr (C::kAccumulate) two[j] = scaled(total[u][j], row_scale[j], scale, before.value[u][j]);
      else two[j] = convert<Out>(total[u][j], row_scale[j], scale, bias[j]);
    }
    Out* const at = to + column * rows;
    if (paired) {
      *reinterpret_cast<Pair*>(at) = *reinterpret_cast<const Pair*>(two);
    } else {
      at[0] = two[0];
      if (exists[1]) at[1] = two[1];
    }
  }
}

// Write one row tile of a vector row; n0: first column of the N tile.
template <class C, class Total>
__device__ void write_tile(const SpmmOperands& at, int64_t batch, int64_t vector_row, int tile, int64_t n0, int lane,
                           const Total (&total)[SpmmShape<C>::kUnits][2], const Before<C>& before = {}) {
  using S = SpmmShape<C>;
  using Out = typename C::Out;
  const int64_t first = n0 + lane / 4 * S::Units::kSubs;  // first column of this lane in chunk 0
  const int64_t top = vector_row * C::kVector + tile * 8;
  const float* col_scale = at.col_scale ? at.col_scale + batch * at.col_scale_batch + first * at.col_scale_stride : nullptr;
  const bool whole =
      (C::kPartial || at.vector_stores) && n0 + S::kTileN <= at.n && top + S::kTileRows <= at.rows;
  const int64_t inside = at.n - first < S::kTileN ? at.n - first : S::kTileN;
  Out* to[2];
  bool exists[2], fits[2];  // exists in C; is a row of the vector
  float row_scale[2], bias[2];
  CUTE_UNROLL
  for (int j = 0; j < 2; ++j) {
    const int v = lane % 4 * 2 + j;
    fits[j] = S::kTileRows == 8 || v < S::kTileRows;
    exists[j] = fits[j] && top + v < at.rows;
    row_scale[j] = at.row_scale && exists[j] ? at.row_scale[(top + v) * at.row_scale_stride] : 1.0f;
    bias[j] = at.bias && exists[j] ? at.bias[top + v] : 0.0f;
    to[j] = static_cast<Out*>(at.out) + (batch * at.rows + top + v) * at.n + first;
  }
  if constexpr (C::kTransposedOut) {
    Out* const corner = static_cast<Out*>(at.out) + (batch * at.n + first) * at.rows + top + lane % 4 * 2;
    write_transposed<C>(corner, exists, at.rows, inside, total, row_scale, col_scale, at.col_scale_stride, bias, before);
  } else if (C::kPartial ? !at.vector_stores : !whole) {
    write_rows<C, RowStore::kPredicated, false>(to, exists, inside, total, row_scale, col_scale, at.col_scale_stride, bias, before);
  } else if ((!C::kPartial || whole) && at.col_scale_stride == 0) {
    write_rows<C, RowStore::kPerTensor, true>(to, fits, inside, total, row_scale, col_scale, 0, bias, before);
  } else if (!C::kPartial || whole) {
    write_rows<C, RowStore::kPerColumn, true>(to, fits, inside, total, row_scale, col_scale, 1, bias, before);
  } else if constexpr (C::kPartial) {  // only for small N: the code costs registers
    if (at.col_scale_stride == 0) {
      write_rows<C, RowStore::kPerTensor, false>(to, exists, inside, total, row_scale, col_scale, 0, bias, before);
    } else {
      write_rows<C, RowStore::kPerColumn, false>(to, exists, inside, total, row_scale, col_scale, 1, bias, before);
    }
  }
}

// Combine and write the accumulators of one vector row.
template <class Total, class C>
__device__ void write_accumulators(const SpmmOperands& at, const Accumulators<C>& acc, int64_t batch, int64_t vector_row, int64_t n0,
                           int lane) {
  using S = SpmmShape<C>;
  CUTE_UNROLL
  for (int tile = 0; tile < S::kRowTiles; ++tile) {
    Total total[S::kUnits][2];
    acc.totals(tile, total);
    write_tile<C>(at, batch, vector_row, tile, n0, lane, total);
  }
}

}  // namespace magicube
