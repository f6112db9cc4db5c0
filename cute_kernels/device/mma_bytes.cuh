// MMA of bytes: m16n8k32 with signed or unsigned bytes of A.
// Architectures: sm_80 and later.
#pragma once

#include <cute/arch/mma_sm80.hpp>
#include <cuda/std/type_traits>

namespace magicube {

// sum (16, 8) += a (16, 32) b (32, 8); b is signed. Lane (g, t) has a: rows g and g + 8 of columns 4t..4t+3, then of 16+4t..16+4t+3;
// b: rows 4t..4t+3 and 16+4t..16+4t+3 of column g; sum: columns 2t and 2t + 1 of row g, then of row g + 8.
template <bool kSigned>
__device__ __forceinline__ void mma_bytes(uint32_t (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  using Atom = cuda::std::conditional_t<kSigned, cute::SM80_16x8x32_S32S8S8S32_TN, cute::SM80_16x8x32_S32U8S8S32_TN>;
  Atom::fma(sum[0], sum[1], sum[2], sum[3], a[0], a[1], a[2], a[3], b0, b1, sum[0], sum[1], sum[2], sum[3]);
}

}  // namespace magicube
