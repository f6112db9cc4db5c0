// Pack a digit plane (rows, k) into K-major rows `pitch` bytes apart, a multiple of 16.
//
// Formula: out[r, k] = x[r, k], zero in what completes the last 16 bytes of k.
// Architectures: sm_80 and later.
// Work: pack_transposed: a CTA moves a tile of 128 rows x 64 k; pack_strided: a thread gathers 16 k of a row.
// Pipeline: pack_transposed goes through swizzled shared memory with 16-byte accesses on both sides.
#pragma once

#include <cuda/std/cstdint>
#include <cute/config.hpp>

namespace magicube {

struct PackTile {
  static constexpr int kRows = 128, kDepth = 64, kThreads = 128;
};

// Transpose 4 x 4 bytes: words of four rows at four k become words of four k of four rows.
__device__ __forceinline__ void transpose_bytes(const uint32_t (&x)[4], uint32_t (&to)[4]) {
  const uint32_t low01 = __byte_perm(x[0], x[1], 0x5140), low23 = __byte_perm(x[2], x[3], 0x5140);
  const uint32_t high01 = __byte_perm(x[0], x[1], 0x7362), high23 = __byte_perm(x[2], x[3], 0x7362);
  to[0] = __byte_perm(low01, low23, 0x5410);
  to[1] = __byte_perm(low01, low23, 0x7632);
  to[2] = __byte_perm(high01, high23, 0x5410);
  to[3] = __byte_perm(high01, high23, 0x7632);
}

// From a plane that is contiguous along the rows: (r, k) at x[k * k_stride + r].
template <class C>
__global__ void __launch_bounds__(PackTile::kThreads)
pack_transposed(const uint8_t* x, int64_t k_stride, int64_t row_stride, int64_t rows, int64_t depth, uint8_t* out,
                int64_t pitch) {
  using T = PackTile;
  __shared__ __align__(16) uint32_t tile[T::kDepth][T::kRows / 4];  // (k, words of four rows), swizzled
  const auto swizzle = [](int k) { return (k / 16 % 4) * 8; };
  const int64_t first = int64_t{blockIdx.x} * T::kRows, at = int64_t{blockIdx.y} * T::kDepth;
  const bool vector = k_stride % 16 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0 && first + T::kRows <= rows;
  CUTE_UNROLL
  for (int i = 0; i < T::kDepth * T::kRows / 16 / T::kThreads; ++i) {
    const int unit = i * T::kThreads + threadIdx.x, k = unit / (T::kRows / 16), chunk = unit % (T::kRows / 16);
    alignas(16) uint8_t bytes[16] = {};
    const uint8_t* from = x + (at + k) * k_stride + first + 16 * chunk;
    if (at + k < depth && vector) {
      *reinterpret_cast<uint4*>(bytes) = __ldg(reinterpret_cast<const uint4*>(from));
    } else if (at + k < depth) {
      CUTE_UNROLL
      for (int b = 0; b < 16; ++b) bytes[b] = first + 16 * chunk + b < rows ? __ldg(from + b) : 0;
    }
    *reinterpret_cast<uint4*>(&tile[k][4 * chunk ^ swizzle(k)]) = *reinterpret_cast<const uint4*>(bytes);
  }
  __syncthreads();
  // A lane has four rows, 16 k of each; four lanes write 64 consecutive bytes of a row.
  const int word = threadIdx.x / 4, k0 = threadIdx.x % 4 * 16;
  uint32_t run[4][4];  // (rows, words of four k)
  CUTE_UNROLL
  for (int part = 0; part < 4; ++part) {
    uint32_t in[4], transposed[4];
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) in[i] = tile[k0 + 4 * part + i][word ^ swizzle(k0)];
    transpose_bytes(in, transposed);
    CUTE_UNROLL
    for (int r = 0; r < 4; ++r) run[r][part] = transposed[r];
  }
  CUTE_UNROLL
  for (int r = 0; r < 4; ++r) {
    const int64_t row = first + 4 * word + r;
    if (row < rows && at + k0 < depth) {
      *reinterpret_cast<uint4*>(out + row * pitch + at + k0) = make_uint4(run[r][0], run[r][1], run[r][2], run[r][3]);
    }
  }
}

// From a plane of any memory strides: (r, k) at x[r * row_stride + k * k_stride].
template <class C>
__global__ void __launch_bounds__(PackTile::kThreads)
pack_strided(const uint8_t* x, int64_t k_stride, int64_t row_stride, int64_t rows, int64_t depth, uint8_t* out, int64_t pitch) {
  const int64_t at = (int64_t{blockIdx.y} * PackTile::kThreads + threadIdx.x) * 16;
  for (int64_t row = blockIdx.x; row < rows && at < depth; row += gridDim.x) {
    alignas(16) uint8_t bytes[16];
    CUTE_UNROLL
    for (int i = 0; i < 16; ++i) bytes[i] = at + i < depth ? __ldg(x + row * row_stride + (at + i) * k_stride) : 0;
    *reinterpret_cast<uint4*>(out + row * pitch + at) = *reinterpret_cast<const uint4*>(bytes);
  }
}

}  // namespace magicube
