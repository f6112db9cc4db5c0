// Weight formats of the few-rows product: packed codes to pairs of 16-bit floats, and scales to factors of such pairs.
//
// A unit is 64 rows of weights x 128 k. A lane (g, t) has the values that its mma.m16k16 fragments need, for rows g and g + 8:
// pair 2 s + q of a row holds k = 16 s + 8 q + 2 t and the next one. `few_rows/formats.py` packs them; Half is the type of X.
#pragma once

#include <cuda/std/type_traits>

#include "device/float_formats.cuh"

namespace magicube::few {

constexpr int kUnitK = 128, kUnitRows = 64, kPairs = 16;  // k and rows of a unit; pairs of a lane's row in it

template <class Half>
constexpr bool kIsBfloat16 = cuda::std::is_same_v<Half, BFLOAT16>;

// The power of two 2^exponent, twice.
template <class Half>
constexpr uint32_t power_pair(int exponent) { return uint32_t(Half::kBias + exponent) << Half::kMantissa; }
template <class Half>
constexpr uint32_t kPower(int exponent) { return power_pair<Half>(exponent) * kEachHalf; }

template <class Half>
__device__ __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  using Pair = typename Half::Pair;
  const Pair sum = __hfma2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b), reinterpret_cast<const Pair&>(c));
  return reinterpret_cast<const uint32_t&>(sum);
}
template <class Half>
__device__ __forceinline__ uint32_t subtract_pair(uint32_t a, uint32_t b) {
  using Pair = typename Half::Pair;
  const Pair sum = __hsub2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
  return reinterpret_cast<const uint32_t&>(sum);
}

// The lower or the upper value of a pair, twice: instructions read either so, at no cost.
template <class Half, int which>
__device__ __forceinline__ uint32_t broadcast(uint32_t pair) {
  using Pair = typename Half::Pair;
  Pair& from = reinterpret_cast<Pair&>(pair);
  if constexpr (kIsBfloat16<Half>) from = which ? __high2bfloat162(from) : __low2bfloat162(from);
  else from = which ? __high2half2(from) : __low2half2(from);
  return pair;
}

// (x & kMask) ^ kFlip in one LOP3.
template <uint32_t kMask, uint32_t kFlip>
__device__ __forceinline__ uint32_t mask_flip(uint32_t x) {
  uint32_t found;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(found) : "r"(x), "n"(kMask), "n"(kFlip));
  return found;
}

// Each format: bits per value, the exponent by which `pair` is too small, and pair `p` of kPairs from a lane's words of a row.

// Codes u = q + 8 in nibbles p % 4 of both values of a word. An integer in the lower eight bits of a bfloat16 is as many of its
// smallest steps, 2^-133: one FMA makes (u - 8) 2^-6 of u and of 16 u, exactly (2^127 is the largest power of two; the row's scale
// takes the 2^6). 1024 + u and 1024 + 16 u are float16.
struct INT4 {
  static constexpr int kBits = 4;
  template <class Half>
  static constexpr int kLift = 0;

  template <class Half, int p>
  __device__ static uint32_t pair(const uint32_t* words) {
    const uint32_t word = p % 4 < 2 ? words[p / 4] : words[p / 4] >> 8;
    if constexpr (kIsBfloat16<Half>) {
      constexpr uint32_t kMinus8 = 0x8000'8000 | kPower<Half>(3 - 6);
      if constexpr (p % 2 == 0) return fma_pair<Half>(word & 0x000F000F, kPower<Half>(127), kMinus8);
      else return fma_pair<Half>(word & 0x00F000F0, kPower<Half>(127 - 4), kMinus8);
    } else if constexpr (p % 2 == 0) {
      return subtract_pair<Half>(mask_flip<0x000F000F, 0x64006400>(word), 0x64086408);  // 1024, 1032
    } else {
      return fma_pair<Half>(mask_flip<0x00F000F0, 0x64006400>(word), 0x2C002C00, 0xD480D480);  // / 16 - 72
    }
  }
};

// Pair p % 4 of a word: bits 15 and 8..6 of both halves are sign and magnitude of pair 0; of pairs 1 and 2 after a rotation by 3
// and 6 bits; pair 3 is bits {0, 1, 3, 4} after the latter, which a product by 0x888 moves there one to one.
struct E2M1Placed {
  static constexpr int kBits = 4;
  template <class Half>
  static constexpr int kLift = Half::kBias - 1;
  static constexpr uint32_t kMask = 0x81C081C0;

  template <class Half, int p>
  __device__ static uint32_t pair(const uint32_t* words) {
    const uint32_t word = words[p / 4];
    uint32_t found;
    if constexpr (p % 4 == 0) found = word & kMask;
    else if constexpr (p % 4 == 1) found = word << 3 & kMask;
    else if constexpr (p % 4 == 2) found = __funnelshift_l(word, word, 6) & kMask;
    else found = (__funnelshift_l(word, word, 6) & 0x001B001B) * 0x888 & kMask;
    if constexpr (kIsBfloat16<Half>) return found;
    else return (found & 0x80008000) | (found << 3 & 0x0E000E00);
  }
};

// Six bits: sign and the upper three bits of the magnitude as above, its lower two bits in words 4 and 5, eight pairs each.
template <int kExponent>
struct SixBits {
  static constexpr int kBits = 6;
  template <class Half>
  static constexpr int kLift = Half::kBias - (kExponent == 2 ? 1 : 3);

  template <class Half, int p>
  __device__ static uint32_t pair(const uint32_t* words) {
    constexpr int kUp = 4 - p % 8 * 2;  // of the lower bits, to bits 5 and 4
    const uint32_t low = kUp >= 0 ? words[4 + p / 8] << (kUp > 0 ? kUp : 0) : words[4 + p / 8] >> (kUp < 0 ? -kUp : 0);
    const uint32_t found = E2M1Placed::pair<BFLOAT16, p>(words) | (low & 0x00300030);
    constexpr int kShift = (kIsBfloat16<Half> ? 0 : 3) + kExponent - 2;
    if constexpr (kShift == 0) return found;
    else return (found & 0x80008000) | (found << kShift & (0x01F0u << kShift) * kEachHalf);
  }
};
using E2M3Placed = SixBits<2>;
using E3M2Placed = SixBits<3>;

// Pair p: bytes 1 and 3 of word p / 2 if p is even, else bytes 0 and 2. NaN is the scale of the row, not a code.
struct E4M3Bytes {
  static constexpr int kBits = 8;
  template <class Half>
  static constexpr int kLift = Half::kBias - 7;

  template <class Half, int p>
  __device__ static uint32_t pair(const uint32_t* words) {
    constexpr int kShift = 10 - Half::kMantissa + 1;  // 4 for bfloat16, 1 for float16
    constexpr uint32_t kMagnitude = (0x7F00u >> kShift) * kEachHalf;
    const uint32_t word = words[p / 2];
    if constexpr (p % 2 == 0) return (word & 0x80008000) | (word >> kShift & kMagnitude);
    else return (word << 8 & 0x80008000) | (word << (8 - kShift) & kMagnitude);
  }
};

// Two's complement, pairs as above; the upper bit flipped is q + 128, a byte as in INT4.
struct INT8 {
  static constexpr int kBits = 8;
  template <class Half>
  static constexpr int kLift = 0;

  template <class Half, int p>
  __device__ static uint32_t pair(const uint32_t* words) {
    const uint32_t word = p % 2 == 0 ? words[p / 2] >> 8 : words[p / 2];
    if constexpr (kIsBfloat16<Half>) {
      return fma_pair<Half>(mask_flip<0x00FF00FF, 0x00800080>(word), kPower<Half>(127), 0x8000'8000 | kPower<Half>(7 - 6));
    } else {
      return subtract_pair<Half>(mask_flip<0x00FF00FF, 0x64806480>(word), 0x64806480);  // 1024 + (q + 128), 1152
    }
  }
};

// Scales of a row's groups. kBytes: of one group; kSum: the partial sum of a unit is multiplied, not its values; kJoint: a register
// has those of both rows of a lane, so that an instruction expands two scales. factor<Half, kLift, i, row>(words): scale of group i
// times 2^kLift / 2^kShrink, twice; `formats.py` takes kShrink into account.

using Scales = uint32_t[2][8];  // of a lane: (rows g and g + 8, words)

struct NoScale {
  static constexpr int kBytes = 0;
  static constexpr bool kSum = false, kMinimum = false, kJoint = false;
  template <class Half, int kLift, int i, int row>
  __device__ static uint32_t factor(const Scales&) { return kPower<Half>(kLift); }
};

// A biased exponent of Half: the packing has multiplied by 2^kLift, and divided by the largest scale of the row.
struct PowerScale {
  static constexpr int kBytes = 1;
  static constexpr bool kSum = false, kMinimum = false, kJoint = true;
  template <class Half, int kLift, int i, int row>
  __device__ static uint32_t factor(const Scales& words) {
    return broadcast<Half, row>(__byte_perm(words[0][i / 2], 0, i % 2 ? 0x4342 : 0x4140) * (1u << Half::kMantissa));
  }
};

// An e4m3 scale with an exponent of five bits instead of sign and subnormal numbers: 2^(E - 9) (1 + M / 8). The values are 2^9
// too small, so that no factor is infinite. Adding to the exponent takes one IMAD.
struct E5M3Scale {
  static constexpr int kBytes = 1;
  static constexpr bool kSum = false, kMinimum = false, kJoint = true;
  template <class Half, int kLift, int i, int row>
  __device__ static uint32_t factor(const Scales& words) {
    constexpr uint32_t kFirst = power_pair<Half>(kLift - 9 - 9) * kEachHalf;
    const uint32_t both = __byte_perm(words[0][i / 2], 0, i % 2 ? 0x4342 : 0x4140) * (1u << (Half::kMantissa - 3)) + kFirst;
    return broadcast<Half, row>(both);
  }
};

struct HalfScale {
  static constexpr int kBytes = 2;
  static constexpr bool kSum = false, kMinimum = false, kJoint = false;
  template <class Half, int kLift, int i, int row>
  __device__ static uint32_t factor(const Scales& words) { return broadcast<Half, i % 2>(words[row][i / 2]); }
};

// Scale and minimum: w = s q + m, one rounding.
struct HalfScaleMinimum {
  static constexpr int kBytes = 4;
  static constexpr bool kSum = false, kMinimum = true, kJoint = false;
  template <class Half, int kLift, int i, int row>
  __device__ static uint32_t factor(const Scales& words) { return broadcast<Half, 0>(words[row][i]); }
  template <class Half, int i, int row>
  __device__ static uint32_t minimum(const Scales& words) { return broadcast<Half, 1>(words[row][i]); }
};

// A float32 per unit, which multiplies its partial sum.
struct SumScale {
  static constexpr int kBytes = 4;
  static constexpr bool kSum = true, kMinimum = false, kJoint = false;
  template <class Half, int kLift, int i, int row>
  __device__ static uint32_t factor(const Scales&) { return kPower<Half>(kLift); }
};

// The same scales, rounded to Half, for the values.
struct FloatScale {
  static constexpr int kBytes = 4;
  static constexpr bool kSum = false, kMinimum = false, kJoint = false;
  template <class Half, int kLift, int i, int row>
  __device__ static uint32_t factor(const Scales& words) {
    const float scale = __uint_as_float(words[row][i]);
    const typename Half::Pair pair = pair_of<typename Half::Pair>(scale);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  template <class Pair>
  __device__ static Pair pair_of(float scale) {
    if constexpr (cuda::std::is_same_v<Pair, __half2>) return __float2half2_rn(scale);
    else return __float2bfloat162_rn(scale);
  }
};

// Sizes of a packed unit: codes, then the scales of its rows.
template <class C>
struct Unit {
  static constexpr int kWords = C::Weights::kBits;  // of codes of a lane's row
  static constexpr int kCodeBytes = kUnitRows * kUnitK * kWords / 8;
  static constexpr int kRowScaleBytes = kUnitK / C::kGroup * C::Scale::kBytes;
  static constexpr int kScaleWords = (kRowScaleBytes + 3) / 4;  // of a row
  static constexpr int kBytes = kCodeBytes + kUnitRows * kRowScaleBytes;
  static constexpr bool kJoint = C::Scale::kJoint;
};

// Load a lane's codes and scales of a unit: rows g and g + 8 of its warp's 16.
template <class C>
__device__ __forceinline__ void load_unit(const uint8_t* unit, uint32_t (&words)[2][Unit<C>::kWords], Scales& scales) {
  using U = Unit<C>;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    CUTE_UNROLL
    for (int chunk = 0; chunk < U::kWords / 4; ++chunk) {
      const uint4 x = *reinterpret_cast<const uint4*>(unit + chunk * 4096 + (warp * 2 + half) * 512 + lane * 16);
      words[half][4 * chunk] = x.x, words[half][4 * chunk + 1] = x.y;
      words[half][4 * chunk + 2] = x.z, words[half][4 * chunk + 3] = x.w;
    }
    if constexpr (U::kWords % 4 == 2) {
      const uint2 x = *reinterpret_cast<const uint2*>(unit + U::kWords / 4 * 4096 + (warp * 2 + half) * 256 + lane * 8);
      words[half][U::kWords - 2] = x.x, words[half][U::kWords - 1] = x.y;
    }
    const uint8_t* const of_row = unit + U::kCodeBytes + (warp * 16 + half * 8 + lane / 4) * U::kRowScaleBytes;
    if constexpr (U::kJoint) {
      if (half > 0) continue;
      const uint8_t* const both = unit + U::kCodeBytes + (warp * 8 + lane / 4) * 2 * U::kRowScaleBytes;
      if constexpr (U::kRowScaleBytes == 4) {
        const uint2 x = *reinterpret_cast<const uint2*>(both);
        scales[0][0] = x.x, scales[0][1] = x.y;
      } else {
        static_assert(U::kRowScaleBytes == 8, "four or eight groups of a row");
        const uint4 x = *reinterpret_cast<const uint4*>(both);
        scales[0][0] = x.x, scales[0][1] = x.y, scales[0][2] = x.z, scales[0][3] = x.w;
      }
    } else if constexpr (U::kRowScaleBytes >= 4) {
      CUTE_UNROLL
      for (int i = 0; i < U::kScaleWords; ++i) scales[half][i] = reinterpret_cast<const uint32_t*>(of_row)[i];
    } else if constexpr (U::kRowScaleBytes == 2) {
      scales[half][0] = *reinterpret_cast<const uint16_t*>(of_row);
    }
  }
}

// Pair p of a row, times its scale.
template <class C, int p, int row>
__device__ __forceinline__ uint32_t scaled_pair(const uint32_t* words, const Scales& scales) {
  using Half = typename C::Half;
  using Weights = typename C::Weights;
  using Scale = typename C::Scale;
  constexpr int kLift = Weights::template kLift<Half>, i = p / 2 * 16 / C::kGroup;
  const uint32_t pair = Weights::template pair<Half, p>(words);
  if constexpr (Scale::kMinimum) {
    return fma_pair<Half>(pair, Scale::template factor<Half, kLift, i, row>(scales), Scale::template minimum<Half, i, row>(scales));
  } else if constexpr (kLift == 0 && (Scale::kSum || Scale::kBytes == 0)) {
    return pair;
  } else {
    return multiply_halves<Half>(pair, Scale::template factor<Half, kLift, i, row>(scales));
  }
}

}  // namespace magicube::few
