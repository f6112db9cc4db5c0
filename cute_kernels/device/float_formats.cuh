// Decoding of fp4, fp6 and fp8 codes to Tensor Core operands: e4m3 or e5m2 bytes, bfloat16 or float16.
//
// Widening shifts exponent and mantissa bits into the wider format's fields without rebiasing: subnormals
// stay exact, and every value is 2^(difference of the biases) too small.
#pragma once

#include <cuda/std/cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cute/config.hpp>

namespace magicube {

// kSpecial: smallest magnitude code that is inf or NaN.
template <int kExponent_, int kMantissa_, int kBias_, int kSpecial_>
struct FloatFormat {
  static constexpr int kExponent = kExponent_, kMantissa = kMantissa_, kBias = kBias_, kSpecial = kSpecial_;
  static constexpr int kBits = 1 + kExponent + kMantissa;
  static constexpr int kWords = 16 * kBits / 32;  // words of sixteen packed codes
};

struct E5M2 : FloatFormat<5, 2, 15, 0x7C> {};
struct E4M3 : FloatFormat<4, 3, 7, 0x7F> {};
struct E3M2 : FloatFormat<3, 2, 3, 0x100> {};
struct E2M3 : FloatFormat<2, 3, 1, 0x100> {};
struct E2M1 : FloatFormat<2, 1, 1, 0x100> {};
struct UE8M0 {};
struct FLOAT16 : FloatFormat<5, 10, 15, 0x7C00> { using Pair = __half2; };
struct BFLOAT16 : FloatFormat<8, 7, 127, 0x7F80> { using Pair = __nv_bfloat162; };

constexpr uint32_t kEachByte = 0x01010101, kEachHalf = 0x00010001;

// Unpack sixteen codes, one per byte.
template <class Format>
__device__ __forceinline__ void spread_codes(const uint32_t (&packed)[Format::kWords], uint32_t (&codes)[4]) {
  if constexpr (Format::kBits == 8) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) codes[i] = packed[i];
  } else if constexpr (Format::kBits == 4) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t even = packed[i] & 0x0F0F0F0F, odd = packed[i] >> 4 & 0x0F0F0F0F;
      codes[2 * i] = __byte_perm(even, odd, 0x5140);
      codes[2 * i + 1] = __byte_perm(even, odd, 0x7362);
    }
  } else {
    static_assert(Format::kBits == 6, "four codes in three bytes");
    const uint32_t run[4] = {packed[0], __funnelshift_r(packed[0], packed[1], 24), __funnelshift_r(packed[1], packed[2], 16),
                             packed[2] >> 8};
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      codes[i] = (run[i] & 0x3F) | (run[i] << 2 & 0x3F00) | (run[i] << 4 & 0x3F0000) | (run[i] << 6 & 0x3F000000);
    }
  }
}

// Four codes of up to 6 bits as e4m3, 2^(7 - bias) too small; 8-bit codes unchanged.
template <class Format>
__device__ __forceinline__ uint32_t to_bytes(uint32_t codes) {
  if constexpr (Format::kBits == 8) {
    return codes;
  } else {
    constexpr int kMagnitude = Format::kBits - 1;
    const uint32_t sign = codes << (7 - kMagnitude) & 0x80 * kEachByte;
    const uint32_t magnitude = (codes & ((1 << kMagnitude) - 1) * kEachByte) << (3 - Format::kMantissa);
    return sign | magnitude;
  }
}

template <class Half = BFLOAT16>
__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  using Pair = typename Half::Pair;
  const Pair product = __hmul2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const uint32_t&>(product);
}

// Two codes, in the low bits of the two halves of a word, as bfloat16x2 or float16x2; higher bits are ignored.
template <class Format, class Half = BFLOAT16>
__device__ __forceinline__ uint32_t to_halves(uint32_t codes) {
  constexpr int kMagnitude = Format::kBits - 1;
  const uint32_t own = codes & ((1 << kMagnitude) - 1) * kEachHalf;
  const uint32_t sign = codes << (15 - kMagnitude) & 0x8000 * kEachHalf;
  uint32_t moved = sign | own << (Half::kMantissa - Format::kMantissa);
  if constexpr (Half::kBias == Format::kBias) {
    return moved;
  } else {
    if constexpr (Format::kBits == 8) {
      const uint32_t special = own + (0x80 - Format::kSpecial) * kEachHalf & 0x80 * kEachHalf;
      moved |= (special << 8) - (special << (Half::kMantissa - 7));  // all-ones exponent
    }
    constexpr uint32_t kExponentBiasFactor = (Half::kBias - Format::kBias + Half::kBias) << Half::kMantissa;
    return multiply_halves<Half>(moved, kExponentBiasFactor * kEachHalf);
  }
}

// As above for codes at bit kAt of each half, without shifting them down first.
template <class Format, int kAt, class Half = BFLOAT16>
__device__ __forceinline__ uint32_t to_halves_from(uint32_t word) {
  static_assert(Format::kBits < 8 && Half::kBias != Format::kBias, "a product lifts the exponent");
  constexpr int kMagnitude = Format::kBits - 1, kUp = Half::kMantissa - Format::kMantissa - kAt;
  constexpr uint32_t kOwn = ((1u << kMagnitude) - 1 << (Half::kMantissa - Format::kMantissa)) * kEachHalf;
  constexpr uint32_t kExponentBiasFactor = (Half::kBias - Format::kBias + Half::kBias) << Half::kMantissa;
  const uint32_t own = (kUp >= 0 ? word << (kUp > 0 ? kUp : 0) : word >> (kUp < 0 ? -kUp : 0)) & kOwn;
  return multiply_halves<Half>(word << (15 - kMagnitude - kAt) & 0x8000 * kEachHalf | own, kExponentBiasFactor * kEachHalf);
}

// A scale code as bfloat16x2, the same value twice.
template <class Format>
__device__ __forceinline__ uint32_t scale_halves(uint32_t code) {
  if constexpr (cuda::std::is_same_v<Format, UE8M0>) {
    return (code == 0 ? 0x40u : code == 255 ? 0x7FC0u : code << 7) * kEachHalf;
  } else {
    return to_halves<Format>(code * kEachHalf);
  }
}

// Sixteen packed codes as sixteen e4m3 or e5m2 bytes.
template <class Format>
__device__ __forceinline__ void decode_bytes(const uint32_t (&packed)[Format::kWords], uint32_t (&out)[4]) {
  uint32_t codes[4];
  spread_codes<Format>(packed, codes);
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) out[i] = to_bytes<Format>(codes[i]);
}

// Sixteen packed codes as bfloat16; with kScaled, times `scale` (bfloat16x2).
template <class Format, bool kScaled>
__device__ __forceinline__ void decode_halves(const uint32_t (&packed)[Format::kWords], uint32_t scale, uint32_t (&out)[8]) {
  uint32_t codes[4];
  spread_codes<Format>(packed, codes);
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    out[i] = to_halves<Format>(__byte_perm(codes[i / 2], 0, i % 2 ? 0x4342 : 0x4140));
    if constexpr (kScaled) out[i] = multiply_halves(out[i], scale);
  }
}

}  // namespace magicube
