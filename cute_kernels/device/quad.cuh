// Exchange of words between the four lanes that share a row of an MMA fragment.
#pragma once

#include <cuda/std/cstdint>
#include <cute/config.hpp>

namespace magicube {

// Lane t of a quad has word t of rows x[0..3] of a matrix, and gets row t.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int t) {
  CUTE_UNROLL
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = t & bit;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t theirs = __shfl_xor_sync(~0u, upper ? x[i] : x[i | bit], bit);
      if (upper) x[i] = theirs;
      else x[i | bit] = theirs;
    }
  }
}

}  // namespace magicube
