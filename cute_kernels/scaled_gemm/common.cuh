// K tiles of an operand of low-precision floats in shared memory, and their decoding.
//
// A packed tile has contiguous rows. A decoded one has swizzled rows of 128 bytes: e4m3 or e5m2, or bfloat16 times the block
// scales.
#pragma once

#include "device/copy.cuh"
#include "device/float_formats.cuh"

namespace magicube {

// kBlock: values per block scale of format Scale along K; 0: none.
template <class Format_, class Scale_, int kBlock_, bool kBfloat16_, int kRows_>
struct FloatPlane {
  using Format = Format_;
  using Scale = Scale_;
  static constexpr int kBlock = kBlock_, kRows = kRows_;
  static constexpr bool kBfloat16 = kBfloat16_;
  static constexpr bool kDecoded = Format::kBits < (kBfloat16 ? 16 : 8);
  static constexpr int kTileK = kBfloat16 ? 64 : 128;  // rows of 128 bytes
  static constexpr int kPackedRow = kTileK * Format::kBits / 8;
  static constexpr int kPackedBytes = kDecoded ? kRows * kPackedRow : 0;
  static constexpr int kBytes = kRows * 128;
  static constexpr int kRuns = kTileK / 16;  // runs of 16 values per row
  static_assert(kBlock == 0 || kBlock == 16 || kBlock == 32, "a run has one factor");
  static_assert(kBlock == 0 || kBfloat16, "block scales are multiplied into 16-bit floats");
  static_assert(kPackedBytes % 128 == 0, "the tensor copy writes to multiples of 128 bytes");
};

struct BlockScales {
  const uint8_t* codes;  // (rows, blocks)
  int64_t pitch;
  int rows, blocks;
};

// Run number `i` of a thread of kThreads.
template <class Plane, int kThreads>
struct FloatRun {
  static constexpr int kCount = Plane::kRows * Plane::kRuns / kThreads;  // runs per thread
  static_assert(kCount * kThreads == Plane::kRows * Plane::kRuns, "each thread has as many runs");
  int row, run;
  __device__ FloatRun(int i, int thread) {
    const int unit = i * kThreads + thread;
    row = unit / Plane::kRuns, run = unit % Plane::kRuns;
  }
};

// Load the block scales of a thread's runs; (first, k) is the tile's corner.
template <class Plane, int kThreads, int kCount>
__device__ __forceinline__ void load_block_scales(const BlockScales& from, int first, int k, int thread,
                                                  uint32_t (&to)[kCount]) {
  if constexpr (Plane::kBlock > 0) {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const FloatRun<Plane, kThreads> at(i, thread);
      const int row = first + at.row, block = (k + 16 * at.run) / Plane::kBlock;
      to[i] = row < from.rows && block < from.blocks ? __ldg(from.codes + row * from.pitch + block) : 0;
    }
  }
}

template <class Format>
__device__ __forceinline__ void load_run(const uint8_t* from, uint32_t (&to)[Format::kWords]) {
  if constexpr (Format::kWords == 4) {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  } else if constexpr (Format::kWords == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    to[0] = x.x, to[1] = x.y;
  } else {
    CUTE_UNROLL
    for (int i = 0; i < Format::kWords; ++i) to[i] = reinterpret_cast<const uint32_t*>(from)[i];
  }
}

// Load the bytes of a run that exist, `left`; zeros beyond.
template <class Format>
__device__ __forceinline__ void load_ragged_run(const uint8_t* from, int64_t left, uint32_t (&to)[Format::kWords]) {
  if (left >= 4 * Format::kWords) {
    load_run<Format>(from, to);
  } else {
    CUTE_UNROLL
    for (int w = 0; w < Format::kWords; ++w) to[w] = 0;
    CUTE_UNROLL
    for (int i = 0; i < 4 * Format::kWords; ++i) to[i / 4] |= i < left ? uint32_t(from[i]) << (i % 4 * 8) : 0u;
  }
}

// Decode a packed tile by kThreads threads. All loads come before all stores: the compiler must assume that they alias.
template <class Plane, int kThreads, int kCount>
__device__ __forceinline__ void decode_plane(const uint8_t* packed, uint8_t* ready, int thread,
                                             const uint32_t (&scales)[kCount]) {
  using Format = typename Plane::Format;
  uint32_t codes[kCount][Format::kWords];
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const FloatRun<Plane, kThreads> at(i, thread);
    load_run<Format>(packed + at.row * Plane::kPackedRow + at.run * 4 * Format::kWords, codes[i]);
  }
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const FloatRun<Plane, kThreads> at(i, thread);
    if constexpr (Plane::kBfloat16) {
      uint32_t out[8], factor = 0;
      if constexpr (Plane::kBlock > 0) factor = scale_halves<typename Plane::Scale>(scales[i]);
      decode_halves<Format, (Plane::kBlock > 0)>(codes[i], factor, out);
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<uint4*>(ready + swizzled<128>(at.row, 2 * at.run + half)) =
            make_uint4(out[4 * half], out[4 * half + 1], out[4 * half + 2], out[4 * half + 3]);
      }
    } else {
      uint32_t out[4];
      decode_bytes<Format>(codes[i], out);
      *reinterpret_cast<uint4*>(ready + swizzled<128>(at.row, at.run)) = make_uint4(out[0], out[1], out[2], out[3]);
    }
  }
}

// Scales of 128 x 128 tiles; null if there are none.
struct TileScales {
  const float* scales;  // (row tiles, K tiles)
  int64_t pitch;
  int tiles;  // K tiles
  // Those of the K tiles of a row.
  __device__ const float* of(int row) const { return scales + row / 128 * pitch; }
  __device__ float at(int row, int k) const {
    if (scales == nullptr) return 1.0f;
    return k / 128 < tiles ? __ldg(scales + row / 128 * pitch + k / 128) : 0.0f;
  }
};

// Scales of 128 values of a row, float32.
struct LineScales {
  const float* scales;  // (rows, K tiles)
  int64_t pitch;
  int rows;
  // Those of the K tiles of a row; beyond the matrix, where sums are zeros, those of any.
  __device__ const float* of(int row) const { return scales + (row < rows ? row : rows - 1) * pitch; }
};

// Scale arguments of one operand: bits of block scales, or floats of tile scales.
struct FloatScales {
  const void* start;
  int64_t pitch, blocks;

  template <class Plane>
  __device__ BlockScales of_blocks(int64_t rows) const {
    return {Plane::kBlock ? static_cast<const uint8_t*>(start) : nullptr, pitch, int(rows), int(blocks)};
  }
  __device__ LineScales of_lines(int64_t rows) const { return {static_cast<const float*>(start), pitch, int(rows)}; }
  template <class Plane>
  __device__ TileScales of_tiles() const {
    return {Plane::kBlock ? nullptr : static_cast<const float*>(start), pitch, int(blocks)};
  }
};

}  // namespace magicube
