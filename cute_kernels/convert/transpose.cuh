// Transpose a matrix of 16- or 32-bit elements: out[c, r] = x[r, c].
//
// Architectures: sm_80 and later.
// Work: a CTA moves a tile of kTile x kTile elements, rows of 128 bytes on both sides, by accesses of 16 bytes.
// Pipeline: through shared memory. Elements of a column are 16-byte runs of a row there; run q of column c is at place
// q ^ (c / kVec % 8), so that neither the writes of single elements nor the reads of runs have bank conflicts.
#pragma once

#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
#include <cute/config.hpp>

#include "device/copy.cuh"

namespace magicube {

// x (rows, columns) and out (columns, rows), contiguous. vector_loads, vector_stores: whether runs of x and of out are aligned.
template <class C>
__global__ void __launch_bounds__(C::kThreads)
transpose(const typename C::Element* x, int64_t rows, int64_t columns, typename C::Element* out, int64_t vector_loads,
          int64_t vector_stores) {
  pdl_wait();
  using Element = typename C::Element;
  constexpr int kVec = 16 / int(sizeof(Element)), kTile = 8 * kVec, kUnits = kTile * 8 / C::kThreads;
  __shared__ __align__(16) Element tile[kTile][kTile];  // (column, row), swizzled
  const int64_t first_row = int64_t{blockIdx.y} * kTile, first_column = int64_t{blockIdx.x} * kTile;
  CUTE_UNROLL
  for (int i = 0; i < kUnits; ++i) {
    const int unit = i * C::kThreads + threadIdx.x, r = unit / 8, chunk = unit % 8;
    const int64_t row = first_row + r, column = first_column + chunk * kVec;
    alignas(16) Element run[kVec] = {};  // (kVec,)
    const Element* from = x + row * columns + column;
    if (row < rows && vector_loads && column < columns) {
      *reinterpret_cast<uint4*>(run) = __ldg(reinterpret_cast<const uint4*>(from));
    } else if (row < rows) {
      CUTE_UNROLL
      for (int e = 0; e < kVec; ++e) run[e] = column + e < columns ? __ldg(from + e) : Element(0);
    }
    CUTE_UNROLL
    for (int e = 0; e < kVec; ++e) tile[chunk * kVec + e][(r / kVec ^ chunk) * kVec + r % kVec] = run[e];
  }
  __syncthreads();
  CUTE_UNROLL
  for (int i = 0; i < kUnits; ++i) {
    const int unit = i * C::kThreads + threadIdx.x, c = unit / 8, q = unit % 8;
    const int64_t column = first_column + c, row = first_row + q * kVec;
    if (column >= columns || row >= rows) continue;
    const Element* run = &tile[c][(q ^ c / kVec % 8) * kVec];  // (kVec,)
    Element* to = out + column * rows + row;
    if (vector_stores) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(run);
    } else {
      CUTE_UNROLL
      for (int e = 0; e < kVec; ++e) {
        if (row + e < rows) to[e] = run[e];
      }
    }
  }
}

}  // namespace magicube
