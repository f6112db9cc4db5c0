// MMA fragments from stored elements, for sparse products of floats.
//
// `Format`: the stored element; `Operand`: what the MMA takes, float16x2 or bfloat16x2, or bytes of e4m3 or e5m2.
// Conversion is exact; 4-bit codes become bytes 2^(bias of operand - bias of format) too small, which
// kExponentBiasFactor corrects in the accumulators.
#pragma once

#include "device/float_formats.cuh"
#include "device/mma.cuh"

namespace magicube {

// 2^exponent, for |exponent| < 31.
constexpr float power_of_two(int exponent) {
  return exponent == 0 ? 1.0f : exponent > 0 ? 2.0f * power_of_two(exponent - 1) : 0.5f * power_of_two(exponent + 1);
}

template <class Format, class Operand>
constexpr float kExponentBiasFactor = Operand::kBits == 8 && Format::kBits < 8 ? power_of_two(Operand::kBias - Format::kBias) : 1.0f;

// Bytes kFirst and kSecond of a word (8-bit codes) as a pair of 16-bit floats.
template <class Format, class Half, int kFirst, int kSecond>
__device__ __forceinline__ uint32_t byte_halves(uint32_t word) {
  if constexpr (Half::kBias == Format::kBias) {  // e5m2 is the upper byte of float16
    return prmt(word, 0, 0x0404 | kFirst << 4 | kSecond << 12);
  } else {
#if __CUDA_ARCH__ >= 890
    if constexpr (cuda::std::is_same_v<Format, E4M3> && cuda::std::is_same_v<Half, FLOAT16>) {
      uint32_t pair;
      const uint32_t codes = kFirst == 0 && kSecond == 1 ? word : prmt(word, 0, kFirst | kSecond << 4);
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(codes)));
      return pair;
    }
#endif
    return to_halves<Format, Half>(prmt(word, 0, 0x4040 | kFirst | kSecond << 8));
  }
}

// Fragment of one gathered group; DenseUnits of mma.cuh for floats.
template <class Shape, class Format, class Operand>
struct FloatUnits {
  static constexpr int kElement = Format::kBits;
  static constexpr int kDigits = 1;
  static constexpr uint32_t kOffset = 0;
  CUTE_HOST_DEVICE static constexpr bool offset(int) { return false; }
  CUTE_HOST_DEVICE static constexpr int shift(int) { return 0; }
  static constexpr int kSubs = 16 / kElement;         // columns per 16-bit unit
  static constexpr int kMatrices = Shape::kK / 8;     // 8x8 matrices of units along k
  static_assert(Shape::kBits == Operand::kBits, "the mma takes operands of this width");

  // raw: (matrices) -> out: (1, subs, depth). A register of raw holds slots 2t and 2t + 1, two k of 16-bit floats.
  __device__ static void transpose(const uint32_t (&raw)[kMatrices], uint32_t (&out)[1][kSubs][Shape::kDepth]) {
    CUTE_UNROLL
    for (int d = 0; d < Shape::kDepth; ++d) {
      if constexpr (Operand::kBits == 16) {
        if constexpr (kElement == 16) {
          out[0][0][d] = raw[d];
        } else if constexpr (kElement == 8) {
          out[0][0][d] = byte_halves<Format, Operand, 0, 2>(raw[d]);
          out[0][1][d] = byte_halves<Format, Operand, 1, 3>(raw[d]);
        } else {
          CUTE_UNROLL
          for (int s = 0; s < kSubs; ++s) out[0][s][d] = to_halves<Format, Operand>(raw[d] >> 4 * s);
        }
      } else {
        const uint32_t even = prmt(raw[2 * d], raw[2 * d + 1], kEven);  // (4 k)
        const uint32_t odd = prmt(raw[2 * d], raw[2 * d + 1], kOdd);    // (4 k)
        if constexpr (kElement == 8) {
          out[0][0][d] = even;
          out[0][1][d] = odd;
        } else {
          out[0][0][d] = to_bytes<Format>(even & kLow);
          out[0][1][d] = to_bytes<Format>(even >> 4 & kLow);
          out[0][2][d] = to_bytes<Format>(odd & kLow);
          out[0][3][d] = to_bytes<Format>(odd >> 4 & kLow);
        }
      }
    }
  }
};

// MMA registers from a lane's kWords words of the sparse operand, or from eight k of a row. 4-bit codes come in
// unpacking order: nibbles i and i + 4 of a word as register i, or the even and the odd nibbles as bytes.
template <class Format, class Operand, int kWords, int kRegisters>
__device__ __forceinline__ void expand_words(const uint32_t (&words)[kWords], uint32_t (&out)[kRegisters]) {
  static_assert(kWords * Operand::kBits == kRegisters * Format::kBits, "as many values as the registers hold");
  CUTE_UNROLL
  for (int w = 0; w < kWords; ++w) {
    if constexpr (Format::kBits == Operand::kBits) {
      out[w] = words[w];
    } else if constexpr (Operand::kBits == 8) {
      out[2 * w] = to_bytes<Format>(words[w] & kLow);
      out[2 * w + 1] = to_bytes<Format>(words[w] >> 4 & kLow);
    } else if constexpr (Format::kBits == 8) {
      out[2 * w] = byte_halves<Format, Operand, 0, 1>(words[w]);
      out[2 * w + 1] = byte_halves<Format, Operand, 2, 3>(words[w]);
    } else {
      CUTE_UNROLL
      for (int s = 0; s < 4; ++s) out[4 * w + s] = to_halves<Format, Operand>(words[w] >> 4 * s);
    }
  }
}

// Eight k of a row, permuted to the order in which 4-bit codes of the other operand unpack.
template <class Format, class Operand, int kWords>
__device__ __forceinline__ void split_order(uint32_t (&words)[kWords]) {
  if constexpr (Format::kBits == 16) {
    const uint32_t k04 = prmt(words[0], words[2], 0x5410), k15 = prmt(words[0], words[2], 0x7632);
    const uint32_t k26 = prmt(words[1], words[3], 0x5410), k37 = prmt(words[1], words[3], 0x7632);
    words[0] = k04, words[1] = k15, words[2] = k26, words[3] = k37;
  } else if constexpr (Format::kBits == 8) {
    constexpr bool kBytes = Operand::kBits == 8;
    const uint32_t first = prmt(words[0], words[1], kBytes ? kEven : 0x5140);
    words[1] = prmt(words[0], words[1], kBytes ? kOdd : 0x7362);
    words[0] = first;
  }
}

}  // namespace magicube
