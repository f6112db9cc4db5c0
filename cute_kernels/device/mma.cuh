// MMA operands: k-contiguous fragments from n-contiguous bytes in shared memory.
//
// The product is computed transposed: MMA operand A holds 8 or 16 columns of the dense matrix, operand B up to
// 8 rows of the sparse one. Lane coordinates: (g, t) = (lane / 4, lane % 4).
#pragma once

#include <cute/atom/mma_traits.hpp>
#include <cute/tensor_impl.hpp>

namespace magicube {

using namespace cute;

// PRMT: bytes of a and b selected by the four nibbles of the selector.
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  return __byte_perm(a, b, selector);
}

constexpr uint32_t kEven = 0x6420, kOdd = 0x7531;  // selectors: bytes 0, 2 of both registers; bytes 1, 3 of both
constexpr uint32_t kLow = 0x0F0F0F0F, kHigh = 0xF0F0F0F0;

// Low and high nibbles of four bytes as 8-bit integers: 16 times the value if signed, the value if unsigned.
template <bool kSigned>
__device__ __forceinline__ uint32_t low_nibbles(uint32_t x) {
  return kSigned ? (x << 4) & kHigh : x & kLow;
}
// Low nibbles as 8-bit integers, offset by +8 if signed.
template <bool kSigned>
__device__ __forceinline__ uint32_t raised_nibbles(uint32_t x) {
  if constexpr (!kSigned) return x & kLow;
  asm("lop3.b32 %0, %0, 0x08080808, 0x0F0F0F0F, 0x28;" : "+r"(x));  // (x ^ 8) & 15 in one LOP3; the compiler emits two
  return x;
}
template <bool kSigned>
__device__ __forceinline__ uint32_t high_nibbles(uint32_t x) {
  return kSigned ? x & kHigh : (x >> 4) & kLow;
}

// Four nibbles of two bytes, or the low nibbles of eight bytes, side by side: orders values that are not stored in the order
// in which they unpack.
template <bool kSigned>
__device__ __forceinline__ uint32_t spread_nibbles(uint32_t x, bool upper) {
  const uint32_t twice = prmt(x, 0, upper ? 0x3322 : 0x1100);  // (b, b, c, c)
  return kSigned ? (twice << 4 & 0x00F000F0) | (twice & 0xF000F000) : (twice & 0x000F000F) | (twice >> 4 & 0x0F000F00);
}
__device__ __forceinline__ uint32_t join_nibbles(uint32_t a, uint32_t b) {
  return prmt(a | a >> 4, b | b >> 4, kEven);
}

// Register counts and extents of an atom's operands, derived from its CuTe layouts.
template <class Op>
struct AtomShape {
  using Traits = MMA_Traits<Op>;
  static constexpr int kM = get<0>(typename Traits::Shape_MNK{});
  static constexpr int kN = get<1>(typename Traits::Shape_MNK{});
  static constexpr int kK = get<2>(typename Traits::Shape_MNK{});
  static constexpr int kBits = sizeof_bits_v<typename Traits::ValTypeA>;
  static constexpr int kValues = 32 / kBits;          // values per register
  static constexpr int kRowBlocks = kM / 8;           // row blocks of operand A: g, g + 8
  static constexpr int kSpan = 4 * kValues;           // k extent of one register over four lanes
  static constexpr int kDepth = kK / kSpan;           // registers along k
  static_assert(kM % 8 == 0 && kN == 8 && kK % kSpan == 0, "an atom of lane groups (g, t) is needed");

  // Row block and k step of register r of operand A; k step of operand B.
  CUTE_HOST_DEVICE static constexpr int block_of(int r) { return typename Traits::ALayout{}(0, r * kValues) % kM / 8; }
  CUTE_HOST_DEVICE static constexpr int depth_of(int r) { return typename Traits::ALayout{}(0, r * kValues) / kM / kSpan; }
  CUTE_HOST_DEVICE static constexpr int sparse_depth_of(int r) {
    return typename Traits::BLayout{}(0, r * kValues) / kN / kSpan;
  }
  CUTE_HOST_DEVICE static constexpr bool quad_layout() {
    bool seen[kRowBlocks][kDepth] = {};
    for (int r = 0; r < kRowBlocks * kDepth; ++r) {
      const int at = typename Traits::ALayout{}(0, r * kValues);
      if (at % kM % 8 != 0 || at / kM % kSpan != 0 || seen[block_of(r)][depth_of(r)]) return false;
      seen[block_of(r)][depth_of(r)] = true;
    }
    for (int lane = 0; lane < 32; ++lane) {
      if (typename Traits::ALayout{}(lane, 0) != lane / 4 + lane % 4 * kValues * kM) return false;
      for (int block = 0; block < kRowBlocks; ++block) {
        for (int j = 0; j < 2; ++j) {
          if (typename Traits::CLayout{}(lane, 2 * block + j) != lane / 4 + 8 * block + (lane % 4 * 2 + j) * kM) return false;
        }
      }
    }
    return true;
  }
  static_assert(quad_layout(), "the atom's thread-value layouts must be those of lane groups (g, t)");
};

// Fragment of one gathered group. kElement: stored width of a dense integer, 4, 8 or 16 bits;
// a 16-bit unit, the granularity of ldmatrix.trans, holds 4, 2 or 1 of them.
template <class Shape, int kElement, bool kSigned, bool kShuffle = true>
struct DenseUnits {
  static constexpr int kDigits = kElement == 16 ? 2 : 1;
  static constexpr int kSubs = kElement == 16 ? 1 : 16 / kElement;  // columns per unit
  static constexpr int kMatrices = Shape::kK / 8;                   // 8x8 matrices of units along k
  // Signed 4-bit integers in an 8-bit MMA: upper nibbles arrive as 16 times the value, lower ones offset by
  // +8, one instruction each. kOffset cancels the offset: -8 in each of four bytes.
  static constexpr bool kNibbles = kElement == 4 && Shape::kBits == 8 && kSigned;
  static constexpr uint32_t kOffset = kNibbles ? 0xF8F8F8F8 : 0;
  CUTE_HOST_DEVICE static constexpr bool offset(int sub) { return kNibbles && sub % 2 == 0; }
  CUTE_HOST_DEVICE static constexpr int shift(int sub) { return kNibbles && sub % 2 == 1 ? 4 : 0; }

  // raw: (matrices) -> out: (digits, subs, depth). Slots 2t, 2t + 1 of two consecutive matrices share a register.
  __device__ static void transpose(const uint32_t (&raw)[kMatrices], uint32_t (&out)[kDigits][kSubs][Shape::kDepth]) {
    if constexpr (Shape::kBits == 8) {
      CUTE_UNROLL
      for (int d = 0; d < Shape::kDepth; ++d) {
        const uint32_t even = prmt(raw[2 * d], raw[2 * d + 1], kEven);  // (4 k)
        const uint32_t odd = prmt(raw[2 * d], raw[2 * d + 1], kOdd);    // (4 k)
        if constexpr (kElement == 16) {
          out[0][0][d] = even;
          out[1][0][d] = odd;
        } else if constexpr (kElement == 8) {
          out[0][0][d] = even;
          out[0][1][d] = odd;
        } else {
          out[0][0][d] = raised_nibbles<kSigned>(even);
          out[0][1][d] = high_nibbles<kSigned>(even);
          out[0][2][d] = raised_nibbles<kSigned>(odd);
          out[0][3][d] = high_nibbles<kSigned>(odd);
        }
      }
    } else {
      static_assert(kElement == 4, "a 4-bit mma takes 4-bit integers");
      CUTE_UNROLL
      for (int d = 0; d < Shape::kDepth; ++d) {
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          const uint32_t a = prmt(raw[4 * d], raw[4 * d + 1], half ? kOdd : kEven);
          const uint32_t b = prmt(raw[4 * d + 2], raw[4 * d + 3], half ? kOdd : kEven);
          if constexpr (kShuffle) {
            out[0][2 * half][d] = (a & kLow) | ((b & kLow) << 4);            // (8 k)
            out[0][2 * half + 1][d] = ((a >> 4) & kLow) | (b & kHigh);       // (8 k)
          } else {
            out[0][2 * half][d] = join_nibbles(a & kLow, b & kLow);            // (8 k)
            out[0][2 * half + 1][d] = join_nibbles(a >> 4 & kLow, b >> 4 & kLow);  // (8 k)
          }
        }
      }
    }
  }
};

// sum += dense * sparse for kRowBlocks blocks of 8 columns.
template <class Op>
__device__ __forceinline__ void mma(uint32_t* sum, const uint32_t* dense, const uint32_t* sparse) {
  using Shape = AtomShape<Op>;
  Tensor tCrC = make_tensor<uint32_t>(Int<2 * Shape::kRowBlocks>{});              // (2 columns, row blocks)
  Tensor tCrA = make_tensor<uint32_t>(Int<Shape::kRowBlocks * Shape::kDepth>{});  // (row blocks, depth) in atom order
  Tensor tCrB = make_tensor<uint32_t>(Int<Shape::kDepth>{});                      // (depth)
  CUTE_UNROLL
  for (int i = 0; i < 2 * Shape::kRowBlocks; ++i) tCrC(i) = sum[i];
  CUTE_UNROLL
  for (int r = 0; r < Shape::kRowBlocks * Shape::kDepth; ++r) {
    tCrA(r) = dense[Shape::block_of(r) * Shape::kDepth + Shape::depth_of(r)];
  }
  CUTE_UNROLL
  for (int r = 0; r < Shape::kDepth; ++r) tCrB(r) = sparse[Shape::sparse_depth_of(r)];
  mma_unpack(MMA_Traits<Op>{}, tCrC, tCrA, tCrB, tCrC);
  CUTE_UNROLL
  for (int i = 0; i < 2 * Shape::kRowBlocks; ++i) sum[i] = tCrC(i);
}

}  // namespace magicube
