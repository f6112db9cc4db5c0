// What the SpMM kernels share: shapes that follow from a config, sums in registers, and the epilogue.
//
// C = A B with A sparse (vectors of V rows) and B dense, row-major. A group is as many gathered rows of B as the mma is
// deep. One warp multiplies groups of one vector row by a strip of kTileNBytes bytes of each of those rows.
#pragma once

#include "device/copy.cuh"
#include "device/dequantize_fragment.cuh"
#include "device/epilogue.cuh"

namespace magicube {

// What the epilogue reads and writes.
struct SpmmOperands {
  const float* left;       // scale of a row of A, `left_step` apart (0: one for all), or null
  const float* right;      // scale of a column of B, likewise
  const float* bias;       // one a row, or null
  void* out;               // (batch, rows, n), contiguous
  int64_t rows, n, left_step, right_step, right_batch;
  bool vector_stores;      // out, right and n are aligned to a unit's columns
};

template <class C>
struct SpmmShape {
  using Shape = AtomShape<typename AtomFor<typename C::OperandB, typename C::OperandA>::type>;
  static constexpr int kElement = C::kBitsB > 8 ? 16 : C::kBitsB;
  using Units = cuda::std::conditional_t<C::kFloat, FloatUnits<Shape, typename C::FormatB, typename C::OperandB>,
                                         DenseUnits<Shape, kElement, C::kSignedB>>;

  static constexpr int kDigitsA = C::kBitsA > 8 && !C::kFloat ? 2 : 1;
  static constexpr int kPlanes = C::kFuseDigits ? 1 : kDigitsA;             // mma operands of A's digits
  static constexpr int kTileRows = C::kVector < 8 ? C::kVector : 8;      // rows of a vector in one mma
  static constexpr int kRowTiles = C::kVector / kTileRows;
  static constexpr int kUsedRows = C::kFuseDigits ? 2 * kTileRows : kTileRows;  // columns of the mma that hold values
  static_assert(!C::kFuseDigits || (kDigitsA == 2 && C::kVector <= 4), "two digits of at most four rows stack");
  // Packed 4-bit values become two registers of an 8-bit mma each; floats as many as they are narrower.
  static constexpr bool kPackedA = !C::kFloat && C::kBitsA == 4 && Shape::kBits == 8 && Shape::kDepth % 2 == 0;
  static constexpr int kWords = C::kFloat ? Shape::kDepth * C::kBitsA / Shape::kBits : Shape::kDepth / (kPackedA ? 2 : 1);
  static_assert(kWords > 0, "a lane's values must fill a word");
  static constexpr int shift(int sub) { return Units::shift(sub) + (kPackedA && C::kSignedA ? 4 : 0); }
  // Products of digits that weigh the same share a sum where both operands have a sign: two of 255 * 128 stay below 2^16, as
  // one of 255 * 255 does, and 32,768 of those fit int32.
  static constexpr bool kShared = kPlanes == 2 && Units::kDigits == 2 && C::kSignedA && C::kSignedB;
  static constexpr int kSums = kShared ? 3 : kPlanes * Units::kDigits;
  static constexpr int sum_of(int plane, int digit) { return kShared ? plane + digit : plane * Units::kDigits + digit; }
  static constexpr int weight_of(int sum) { return kShared ? sum : sum / Units::kDigits + sum % Units::kDigits; }

  static constexpr int kChunks = C::kTileNBytes / 16;
  static constexpr int kUnits = kChunks * Units::kSubs;                  // units of eight columns in a strip
  static constexpr int kColumns = kUnits * 8;
  static constexpr int kStep = Shape::kRowBlocks > Units::kSubs ? Shape::kRowBlocks / Units::kSubs : 1;  // chunks at a time
  static_assert(kChunks % kStep == 0 && Units::kSubs * kStep % Shape::kRowBlocks == 0, "units must fill the mma's rows");

  // The mma's operands: a float's format, or the sign of a digit.
  template <int kPlane>
  using SparseOperand = cuda::std::conditional_t<
      C::kFloat, typename C::OperandA, Integer<C::kSignedA && (C::kFuseDigits || kPlane == kDigitsA - 1)>>;
  template <int kDigit>
  using DenseOperand = cuda::std::conditional_t<C::kFloat, typename C::OperandB,
                                                Integer<C::kSignedB && kDigit == Units::kDigits - 1>>;
  static constexpr float lift() {
    return kExponentBiasFactor<typename C::FormatA, typename C::OperandA> * kExponentBiasFactor<typename C::FormatB, typename C::OperandB>;
  }
  static constexpr int64_t kGroupWords = int64_t{kPlanes} * kRowTiles * 4 * kUsedRows * kWords;
};

// The values of one group, as the mma wants them: (planes, row tiles, depth).
template <class C>
struct SparseFragment {
  using S = SpmmShape<C>;
  uint32_t words[S::kPlanes][S::kRowTiles][S::kWords];

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

  // The same from shared memory.
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
        if constexpr (S::kPackedA) {
          out[2 * w] = low_nibbles<C::kSignedA>(words[p][tile][w]);
          out[2 * w + 1] = high_nibbles<C::kSignedA>(words[p][tile][w]);
        } else {
          out[w] = words[p][tile][w];
        }
      }
    }
  }
};

// Sums of one vector row over a strip; the exact total is the sum of all digits' products, by their weights.
template <class C>
struct Sums {
  using S = SpmmShape<C>;
  using Units = typename S::Units;
  uint32_t sum[S::kRowTiles][S::kSums][S::kUnits][2];
  // What the mma makes of the units' offset, the same for every column: (2 columns, row blocks).
  static constexpr int kOffsets = Units::kOffset ? S::kRowTiles * S::kPlanes : 0;
  uint32_t offset[kOffsets > 0 ? kOffsets : 1][2 * S::Shape::kRowBlocks];

  __device__ void clear() {
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(sum) / 4); ++i) (&sum[0][0][0][0])[i] = 0;
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(offset) / 4); ++i) (&offset[0][0])[i] = 0;
  }

  // raw: (step chunks, matrices), the units of chunks [chunk, chunk + kStep).
  __device__ void add(const SparseFragment<C>& values, int chunk, const uint32_t (&raw)[S::kStep][Units::kMatrices]) {
    using Shape = typename S::Shape;
    uint32_t dense[Units::kDigits][S::kStep][Units::kSubs][Shape::kDepth];  // units (step, sub) of each digit
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

  // The mma's operand types depend on the digits, so the planes are unrolled by the compiler's own hand.
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
        mma<Op>(sum[tile][S::sum_of(kPlane, kDigit)][chunk * Units::kSubs + u],
                     &dense[kDigit][0][0][0] + u * Shape::kDepth, sparse);
      }
      for_digits<kPlane, kDigit + 1>(sparse, tile, chunk, dense);
    }
  }

  // What is to be taken from every column whose integers came with an offset: its product with the sparse operand.
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

  // The digits' totals of one row tile: (units, 2 columns of the mma). Stacked digits meet across lanes.
  template <class Total>
  __device__ void totals(int tile, Total (&out)[S::kUnits][2]) const {
    CUTE_UNROLL
    for (int u = 0; u < S::kUnits; ++u) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        if constexpr (C::kFloat) {
          out[u][j] = __uint_as_float(sum[tile][0][u][j]) * S::lift();
        } else {
          const bool moved = kOffsets > 0 && Units::offset(u % Units::kSubs);
          out[u][j] = 0;
          CUTE_UNROLL
          for (int i = 0; i < S::kSums; ++i) {
            uint32_t whole = sum[tile][i][u][j];
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

// Groups that int32 sums of digit products hold without overflow: each product is at most 255 * 255 (or 128 * 256 * 256).
template <class Shape>
constexpr int64_t kSafeGroups = 32768 / Shape::kK;

// How rows of the output are written: a lane's columns of a chunk all exist or none does, so that they are stored at once,
// with one factor for all of them or one each; or what exists of them, column by column.
enum class RowForm { kOneFactor, kFactors, kRagged };

// This lane's factors of chunk c, `right` being null or where those of chunk 0 begin.
template <class C, RowForm kForm>
__device__ __forceinline__ void load_factors(float (&factors)[SpmmShape<C>::Units::kSubs], const float* right,
                                             int64_t right_step, int c, int64_t inside) {
  constexpr int kSubs = SpmmShape<C>::Units::kSubs;
  if constexpr (kForm == RowForm::kRagged) {
    CUTE_UNROLL
    for (int s = 0; s < kSubs; ++s) {
      const int column = c * 8 * kSubs + s;
      factors[s] = right && column < inside ? right[column * right_step] : 1.0f;
    }
  } else if constexpr (kForm == RowForm::kFactors) {
    uint32_t words[kSubs];
    if constexpr (C::kStagedScales) load_shared(shared_address(right + c * 8 * kSubs), words);
    else load_words<kSubs>(words, reinterpret_cast<const uint32_t*>(right + c * 8 * kSubs));
    CUTE_UNROLL
    for (int s = 0; s < kSubs; ++s) factors[s] = __uint_as_float(words[s]);
  }
}

// The two rows of a row tile that a lane has. kWhole: all of the strip's columns exist.
template <class C, RowForm kForm, bool kWhole, class Total>
__device__ __forceinline__ void write_rows(typename C::Out* const (&to)[2], const bool (&exists)[2], int64_t inside,
                                           const Total (&total)[SpmmShape<C>::kUnits][2], const float (&left)[2],
                                           const float* right, int64_t right_step, const float (&bias)[2]) {
  using S = SpmmShape<C>;
  constexpr int kSubs = S::Units::kSubs;
  float factors[kSubs];
  if constexpr (kForm == RowForm::kOneFactor) {
    const float one = right ? __ldg(right) : 1.0f;
    CUTE_UNROLL
    for (int s = 0; s < kSubs; ++s) factors[s] = one;
  }
  CUTE_UNROLL
  for (int c = 0; c < S::kChunks; ++c) {
    if (C::kPartial && !kWhole && c * 8 * kSubs >= inside) break;
    load_factors<C, kForm>(factors, right, right_step, c, inside);
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      if (!exists[j]) continue;
      Total run[kSubs];
      CUTE_UNROLL
      for (int s = 0; s < kSubs; ++s) run[s] = total[c * kSubs + s][j];
      write_run<kForm != RowForm::kRagged>(run, to[j] + c * 8 * kSubs, int(inside - c * 8 * kSubs), left[j], factors,
                                           bias[j]);
    }
  }
}

// Writes one row tile of a vector row; n0 is the strip's first column.
template <class C, class Total>
__device__ void write_tile(const SpmmOperands& at, int64_t batch, int64_t vector_row, int tile, int64_t n0, int lane,
                           const Total (&total)[SpmmShape<C>::kUnits][2]) {
  using S = SpmmShape<C>;
  using Out = typename C::Out;
  const int64_t first = n0 + lane / 4 * S::Units::kSubs;  // this lane's column of chunk 0
  const int64_t top = vector_row * C::kVector + tile * 8;
  const float* right = at.right ? at.right + batch * at.right_batch + first * at.right_step : nullptr;
  const bool whole =
      (C::kPartial || at.vector_stores) && n0 + S::kColumns <= at.n && top + S::kTileRows <= at.rows;
  const int64_t inside = at.n - first < S::kColumns ? at.n - first : S::kColumns;
  Out* to[2];
  bool exists[2], fits[2];  // in this matrix; in any
  float left[2], bias[2];
  CUTE_UNROLL
  for (int j = 0; j < 2; ++j) {
    const int v = lane % 4 * 2 + j;
    fits[j] = S::kTileRows == 8 || v < S::kTileRows;
    exists[j] = fits[j] && top + v < at.rows;
    left[j] = at.left && exists[j] ? at.left[(top + v) * at.left_step] : 1.0f;
    bias[j] = at.bias && exists[j] ? at.bias[top + v] : 0.0f;
    to[j] = static_cast<Out*>(at.out) + (batch * at.rows + top + v) * at.n + first;
  }
  if (C::kPartial ? !at.vector_stores : !whole) {
    write_rows<C, RowForm::kRagged, false>(to, exists, inside, total, left, right, at.right_step, bias);
  } else if ((!C::kPartial || whole) && at.right_step == 0) {
    write_rows<C, RowForm::kOneFactor, true>(to, fits, inside, total, left, right, 0, bias);
  } else if (!C::kPartial || whole) {
    write_rows<C, RowForm::kFactors, true>(to, fits, inside, total, left, right, 1, bias);
  } else if constexpr (C::kPartial) {  // elsewhere strips of few columns do not count, and their code would be in the way
    if (at.right_step == 0) {
      write_rows<C, RowForm::kOneFactor, false>(to, exists, inside, total, left, right, 0, bias);
    } else {
      write_rows<C, RowForm::kFactors, false>(to, exists, inside, total, left, right, 1, bias);
    }
  }
}

// Totals and output of one vector row.
template <class Total, class C>
__device__ void write_sums(const SpmmOperands& at, const Sums<C>& sums, int64_t batch, int64_t vector_row, int64_t n0,
                           int lane) {
  using S = SpmmShape<C>;
  CUTE_UNROLL
  for (int tile = 0; tile < S::kRowTiles; ++tile) {
    Total total[S::kUnits][2];
    sums.totals(tile, total);
    write_tile<C>(at, batch, vector_row, tile, n0, lane, total);
  }
}

}  // namespace magicube
