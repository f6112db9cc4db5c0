// SDDMM: what the gather and the panel kernel share.
//
// Formula: S = row_scale * col_scale * (X Y^T) at the vectors of a pattern. X (rows, K) and Y (columns, K), K-major.
// Architectures: sm_80 and later (mma.sync).
// Work: a warp computes a piece of kPiece consecutive vectors of one vector row. Rows of Y are operand A, rows of X operand B.
// K: the lanes of an MMA row hold runs of eight consecutive k, so that both operands are loaded without a transposition.
// Source: Li, Osawa, Hoefler, SC'22, section IV-C.
#pragma once

#include "device/dequantize_fragment.cuh"
#include "device/epilogue.cuh"

namespace magicube {

// 32 k of a row of kBits-bit elements are kChunks chunks of 16 bytes; lane t of four reads kWords words of them. Format and
// Operand: types of floats.
template <int kBits_, bool kSigned_, bool kFloat_, class Format_, class Operand_>
struct RunOf {
  using Format = Format_;
  using Operand = Operand_;
  static constexpr int kBits = kBits_;
  static constexpr bool kSigned = kSigned_, kFloat = kFloat_;
  static constexpr int kElement = kBits > 8 ? 16 : kBits;
  static constexpr int kDigits = kElement == 16 && !kFloat ? 2 : 1;
  static constexpr int kChunks = kElement / 4;
  static constexpr int kWords = kElement / 4;
};

// Split eight k of one row into digits: (digits, registers). kSplit: in the order of unpacked nibbles.
template <class Run, bool kSplit, int kMmaBits>
__device__ __forceinline__ void split_run(uint32_t (&words)[Run::kWords], uint32_t (&out)[Run::kDigits][kMmaBits / 4]) {
  if constexpr (Run::kFloat) {
    if constexpr (kSplit) split_order<typename Run::Format, typename Run::Operand>(words);
    expand_words<typename Run::Format, typename Run::Operand>(words, out[0]);
  } else if constexpr (kMmaBits == 4) {
    out[0][0] = words[0];
  } else if constexpr (Run::kElement == 4) {
    out[0][0] = low_nibbles<Run::kSigned>(words[0]);
    out[0][1] = high_nibbles<Run::kSigned>(words[0]);
  } else {
    CUTE_UNROLL
    for (int d = 0; d < Run::kDigits; ++d) {
      uint32_t first = words[0], second = words[1];
      if constexpr (Run::kElement == 16) {
        first = prmt(words[0], words[1], d ? kOdd : kEven);
        second = prmt(words[2], words[3], d ? kOdd : kEven);
      }
      out[d][0] = kSplit ? prmt(first, second, kEven) : first;
      out[d][1] = kSplit ? prmt(first, second, kOdd) : second;
    }
  }
}

// Split several runs of eight k of one row: (digits, registers along k).
template <class S, class Run, int kWords>
__device__ __forceinline__ void split_runs(const uint32_t (&words)[kWords],
                                           uint32_t (&out)[Run::kDigits][kWords / Run::kWords * S::kRegisters]) {
  CUTE_UNROLL
  for (int r = 0; r < kWords / Run::kWords; ++r) {
    uint32_t run[Run::kWords], part[Run::kDigits][S::kRegisters];
    CUTE_UNROLL
    for (int i = 0; i < Run::kWords; ++i) run[i] = words[r * Run::kWords + i];
    split_run<Run, S::kSplit, S::Shape::kBits>(run, part);
    CUTE_UNROLL
    for (int d = 0; d < Run::kDigits; ++d) {
      CUTE_UNROLL
      for (int i = 0; i < S::kRegisters; ++i) out[d][r * S::kRegisters + i] = part[d][i];
    }
  }
}

// Sizes derived from a config. kPiece: vectors per warp.
template <class C, int kPiece>
struct SampleShape {
  using Shape = AtomShape<typename AtomFor<typename C::OperandY, typename C::OperandX>::type>;
  using RunX = RunOf<C::kBitsX, C::kSignedX, C::kFloat, typename C::FormatX, typename C::OperandX>;
  using RunY = RunOf<C::kBitsY, C::kSignedY, C::kFloat, typename C::FormatY, typename C::OperandY>;
  using Total = TotalOf<C>;
  static constexpr int kSlots = kPiece;
  static constexpr int kBlocks = kSlots / 8;                                  // blocks of 8 rows of Y
  static constexpr int kRowTiles = C::kVector <= 8 ? 1 : C::kVector / 8;
  static constexpr int kRowsX = 8 * kRowTiles;
  static constexpr bool kSplit = Shape::kBits >= 8 && (C::kBitsX == 4) != (C::kBitsY == 4);
  static constexpr int kRegisters = Shape::kBits / 4;                         // registers per digit and 32 k
  static_assert(kBlocks % Shape::kRowBlocks == 0, "the MMA must fit the piece");
  static constexpr int kShift = Shape::kBits == 4 || C::kFloat ? 0
                                : (C::kBitsX == 4 && C::kSignedX ? 4 : 0) + (C::kBitsY == 4 && C::kSignedY ? 4 : 0);
  // Operand types of the MMA: float format, or signedness of a digit.
  template <int kDigit>
  using OperandX = cuda::std::conditional_t<C::kFloat, typename C::OperandX, Integer<C::kSignedX && kDigit == RunX::kDigits - 1>>;
  template <int kDigit>
  using OperandY = cuda::std::conditional_t<C::kFloat, typename C::OperandY, Integer<C::kSignedY && kDigit == RunY::kDigits - 1>>;
};

// Accumulators of one piece: (row tiles of X, digits of X, digits of Y, blocks of 8 rows of Y, 2 rows of X).
template <class S>
struct PieceAccumulators {
  uint32_t value[S::kRowTiles][S::RunX::kDigits][S::RunY::kDigits][S::kBlocks][2];

  __device__ void clear() {
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(value) / 4); ++i) (&value[0][0][0][0][0])[i] = 0;
  }

  // x: (digits, registers along k); y: (blocks, digits, registers along k).
  template <int kX, int kY, int kCount>
  __device__ void add(int tile, const uint32_t (&x)[S::RunX::kDigits][kCount],
                      const uint32_t (&y)[S::kBlocks][S::RunY::kDigits][kCount]) {
    using Shape = typename S::Shape;
    static_assert(kCount % Shape::kDepth == 0, "the registers must be whole MMAs");
    if constexpr (kX < S::RunX::kDigits) {
      if constexpr (kY < S::RunY::kDigits) {
        using Op = typename AtomFor<typename S::template OperandY<kY>, typename S::template OperandX<kX>>::type;
        CUTE_UNROLL
        for (int b = 0; b < S::kBlocks; b += Shape::kRowBlocks) {
          CUTE_UNROLL
          for (int r = 0; r < kCount; r += Shape::kDepth) {
            uint32_t dense[Shape::kRowBlocks * Shape::kDepth];
            CUTE_UNROLL
            for (int i = 0; i < Shape::kRowBlocks * Shape::kDepth; ++i) {
              dense[i] = y[b + i / Shape::kDepth][kY][r + i % Shape::kDepth];
            }
            mma<Op>(value[tile][kX][kY][b], dense, &x[kX][r]);
          }
        }
        add<kX, kY + 1>(tile, x, y);
      } else {
        add<kX + 1, 0>(tile, x, y);
      }
    }
  }

  template <class Total>
  __device__ Total total(int tile, int block, int j) const {
    if constexpr (S::RunX::kFloat) {
      constexpr float kX = kExponentBiasFactor<typename S::RunX::Format, typename S::RunX::Operand>;
      constexpr float kY = kExponentBiasFactor<typename S::RunY::Format, typename S::RunY::Operand>;
      return __uint_as_float(value[tile][0][0][block][j]) * (kX * kY);
    } else {
      Total out = 0;
      CUTE_UNROLL
      for (int dx = 0; dx < S::RunX::kDigits; ++dx) {
        CUTE_UNROLL
        for (int dy = 0; dy < S::RunY::kDigits; ++dy) {
          out += weighted<Total>(static_cast<int32_t>(value[tile][dx][dy][block][j]) >> S::kShift, 8 * (dx + dy));
        }
      }
      return out;
    }
  }
};

}  // namespace magicube
