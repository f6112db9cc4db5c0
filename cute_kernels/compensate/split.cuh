// Integers of a float32 matrix and of what their rounding left over, each with its own scales: three steps, a pass each.
//
// Formula: scale = amax / high in float64, 1 for zeros; q = round(x / scale); residual r = fl32(x - q scale), and the same of r.
// Every operation rounds once, as in the CPU engine's split.hpp, so that both give the same integers.
// Steps: `amax` of x; `leading` integers and the amax of r; `residual` integers, for which q and r are computed anew: reading x
// twice costs less than writing and reading r.
// Architectures: sm_80 and later.
// Work: a CTA per tile of 64 rows and 128 columns; a thread has four columns of eight rows.
// Pipeline: all loads of a thread are in flight at once; transposed integers pass through shared memory.
// Source: Gu, arXiv 2403.06924, Algorithm 1, lines 1 and 4 to 6.
#pragma once

#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
#include <cute/config.hpp>

namespace magicube {

constexpr int kTensor = 0, kPerRow = 1, kPerColumn = 2;             // which entries share a scale
constexpr int kAmaxStep = 0, kLeadingStep = 1, kResidualStep = 2;
constexpr int kTileRows = 64, kTileColumns = 128, kRun = 4;         // kRun: columns of a thread
constexpr int kTileThreads = 256, kThreadRows = kTileRows * kTileColumns / kTileThreads / kRun;
constexpr uint32_t kInfiniteBits = 0x7f800000;

__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffff; }

// The atomic is rare: most maxima are there already.
__device__ __forceinline__ void raise(uint32_t* to, uint32_t bits) {
  if (bits > *static_cast<volatile uint32_t*>(to)) atomicMax(to, bits);
}

// Scale of the entries that share an amax, given by its bits.
struct Unit {
  double scale;
  float inverse;  // 1 / scale, or 0 if that is no normal float
};

__device__ __forceinline__ Unit unit_of(uint32_t amax_bits, double high) {
  double scale = static_cast<double>(__uint_as_float(amax_bits)) / high;
  if (!(scale > 0.0)) scale = 1.0;
  const double inverse = 1.0 / scale;
  return {scale, inverse >= 0x1p-126 && inverse <= 0x1p127 ? static_cast<float>(inverse) : 0.0f};
}

// round(x / scale): toward zero or to nearest even, of the exact quotient rounded to float64. Called, because it is rare.
template <bool kTruncate>
__device__ __noinline__ int exact_digit(float x, double scale) {
  const double ratio = static_cast<double>(x) / scale;
  // The division may end a hair below an integer, that of the amax, say.
  if constexpr (kTruncate) return static_cast<int>(ratio * (1.0 + 0x1p-49));
  else return __double2int_rn(ratio);
}

// The same by a float32 quotient, whose error is below 127 2^-23. Where that could change the digit, x is compared with the edge times
// the scale: of two float32 quotients' integers, x high and edge amax, the first is equal or 2^-32 of it away.
template <bool kTruncate>
__device__ __forceinline__ int digit_of(float x, const Unit& unit) {
  if (unit.inverse == 0.0f) return exact_digit<kTruncate>(x, unit.scale);
  const float ratio = __fmul_rn(x, unit.inverse), nearest = rintf(ratio), distance = fabsf(ratio - nearest);
  const double magnitude = static_cast<double>(fabsf(x));
  if constexpr (kTruncate) {
    if (!(fabsf(ratio) > 0.5f && distance < 0x1p-15f)) return static_cast<int>(ratio);
    const double edge = __dmul_rn(static_cast<double>(fabsf(nearest)), unit.scale);
    const int whole = static_cast<int>(fabsf(nearest)) - (__dmul_rn(magnitude, 1.0 + 0x1p-40) < edge ? 1 : 0);
    return x < 0.0f ? -whole : whole;
  } else {
    if (!(distance > 0.5f - 0x1p-15f)) return static_cast<int>(nearest);
    const float below = floorf(fabsf(ratio) + 0x1p-14f - 0.5f);  // the edge lies half a unit above
    const double edge = __dmul_rn(static_cast<double>(below) + 0.5, unit.scale);
    if (fabs(magnitude - edge) <= edge * 0x1p-40) return exact_digit<kTruncate>(x, unit.scale);  // a tie
    const int whole = static_cast<int>(below) + (magnitude > edge ? 1 : 0);
    return x < 0.0f ? -whole : whole;
  }
}

__device__ __forceinline__ float residual_of(float x, int digit, double scale) {
  return static_cast<float>(__dsub_rn(static_cast<double>(x), __dmul_rn(static_cast<double>(digit), scale)));
}

// Load kRun entries of a row, zeros beyond its `remaining` ones. `vector`: rows start at multiples of 16 bytes.
__device__ __forceinline__ void load_four(const float* from, int64_t remaining, bool vector, float (&to)[kRun]) {
  if (vector && remaining >= kRun) {
    const float4 four = __ldg(reinterpret_cast<const float4*>(from));
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  } else {
    CUTE_UNROLL
    for (int c = 0; c < kRun; ++c) to[c] = c < remaining ? from[c] : 0.0f;
  }
}

// A tile of a matrix (rows, columns) and the place of this thread in it.
struct SplitTile {
  int64_t row0, column0;  // corner of the tile
  int warp, lane;

  __device__ SplitTile(int64_t columns)
      : row0(int64_t{blockIdx.x} / ((columns + kTileColumns - 1) / kTileColumns) * kTileRows),
        column0(int64_t{blockIdx.x} % ((columns + kTileColumns - 1) / kTileColumns) * kTileColumns),
        warp(int(threadIdx.x) / 32), lane(int(threadIdx.x) % 32) {}
  // Row i of this thread, from the tile's first: four neighbors, which become a word of a transposed tile.
  __device__ int row(int i) const { return i / 4 * 32 + warp * 4 + i % 4; }
  __device__ int column() const { return lane * kRun; }

  __device__ void load(const float* x, int64_t pitch, int64_t rows, int64_t columns, bool vector, float (&to)[kThreadRows][kRun]) const {
    const int64_t first = column0 + column();
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      const int64_t at = row0 + row(i);
      load_four(x + at * pitch + first, at < rows ? columns - first : 0, vector, to[i]);
    }
  }
};

// Maxima of the entries of a tile that share a scale: of this thread, then of all.
template <int kScales>
struct TileMaxima {
  static constexpr int kCount = kScales == kTensor ? 1 : kScales == kPerRow ? kThreadRows : kRun;
  uint32_t most[kCount] = {};

  __device__ void add(int i, int c, float x) {
    uint32_t& to = most[kScales == kTensor ? 0 : kScales == kPerRow ? i : c];
    to = max(to, magnitude_bits(x));
  }

  // Raise `maxima`, (), (rows,) or (columns,).
  __device__ void finish(const SplitTile& tile, int64_t rows, int64_t columns, uint32_t* maxima) const {
    if constexpr (kScales == kPerColumn) {
      __shared__ uint32_t of_columns[kTileColumns];  // (kTileColumns,)
      for (int c = threadIdx.x; c < kTileColumns; c += kTileThreads) of_columns[c] = 0;
      __syncthreads();
      CUTE_UNROLL
      for (int c = 0; c < kRun; ++c) atomicMax(&of_columns[tile.column() + c], most[c]);
      __syncthreads();
      for (int c = threadIdx.x; c < kTileColumns; c += kTileThreads) {
        if (tile.column0 + c < columns) raise(maxima + tile.column0 + c, of_columns[c]);
      }
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const uint32_t all = __reduce_max_sync(~0u, most[i]);
        const int64_t row = kScales == kTensor ? 0 : tile.row0 + tile.row(i);
        if (tile.lane == 0 && (kScales == kTensor || row < rows)) raise(maxima + row, all);
      }
    }
  }
};

// Units of the slices of a tile, in shared memory; those of the first tiles also go to `scales`, unless it is null.
template <int kScales>
__device__ __forceinline__ void make_units(const SplitTile& tile, int64_t rows, int64_t columns, const uint32_t* maxima, double high,
                                           Unit* units, double* scales, float* scales32) {
  constexpr int kCount = kScales == kTensor ? 1 : kScales == kPerRow ? kTileRows : kTileColumns;
  const int64_t first = kScales == kTensor ? 0 : kScales == kPerRow ? tile.row0 : tile.column0;
  const int64_t slices = kScales == kTensor ? 1 : kScales == kPerRow ? rows : columns;
  const bool writes = kScales == kTensor ? blockIdx.x == 0 : kScales == kPerRow ? tile.column0 == 0 : tile.row0 == 0;
  for (int i = threadIdx.x; i < kCount; i += kTileThreads) {
    const bool exists = first + i < slices;
    units[i] = unit_of(exists ? maxima[first + i] : 0, high);
    if (scales && writes && exists) {
      scales[first + i] = units[i].scale;
      scales32[first + i] = static_cast<float>(units[i].scale);
    }
  }
  __syncthreads();
}

// Integers of a tile to out (rows, out_pitch), or transposed to (columns, out_pitch); rows of `out` are padded to 16 bytes.
template <bool kTransposed>
__device__ __forceinline__ void write_digits(const SplitTile& tile, const int (&digits)[kThreadRows][kRun], int64_t rows, int64_t columns,
                                             int8_t* out, int64_t out_pitch) {
  const auto packed = [](int a, int b, int c, int d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
  };
  if constexpr (!kTransposed) {
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      const int64_t row = tile.row0 + tile.row(i), column = tile.column0 + tile.column();
      const auto& q = digits[i];
      if (row < rows && column < columns) *reinterpret_cast<uint32_t*>(out + row * out_pitch + column) = packed(q[0], q[1], q[2], q[3]);
    }
  } else {
    constexpr int kPitch = kTileRows / 4 + 1, kChunks = kTileRows / 16;  // words; one more than a row: fewer bank conflicts
    __shared__ uint32_t turned[kTileColumns * kPitch];                   // (kTileColumns, kTileRows) int8
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; i += 4) {
      CUTE_UNROLL
      for (int c = 0; c < kRun; ++c) {
        turned[(tile.column() + c) * kPitch + tile.row(i) / 4] = packed(digits[i][c], digits[i + 1][c], digits[i + 2][c], digits[i + 3][c]);
      }
    }
    __syncthreads();
    for (int piece = threadIdx.x; piece < kTileColumns * kChunks; piece += kTileThreads) {
      const int column = piece / kChunks, chunk = piece % kChunks;
      const uint32_t* const word = turned + column * kPitch + chunk * 4;
      if (tile.column0 + column < columns && tile.row0 + chunk * 16 < rows) {
        auto* const to = out + (tile.column0 + column) * out_pitch + tile.row0 + chunk * 16;
        *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
}

// x: (rows, columns); maxima and residual_maxima: bits of the amaxes of x and of r, zero before their step; scales, scales32: of the
// integers that the step writes; out: int8, (rows, out_pitch) or, if C::kTransposed, (columns, out_pitch).
template <class C>
__global__ void __launch_bounds__(kTileThreads, C::kStep == kAmaxStep ? 4 : C::kScales == kTensor ? 3 : 2)
split_residual(const float* x, int64_t pitch, int64_t rows, int64_t columns, int64_t vector, double high, uint32_t* maxima,
               uint32_t* residual_maxima, double* scales, float* scales32, int8_t* out, int64_t out_pitch) {
  const SplitTile tile(columns);
  float held[kThreadRows][kRun];  // (kThreadRows, kRun)
  tile.load(x, pitch, rows, columns, vector != 0, held);
  TileMaxima<C::kScales> found;
  if constexpr (C::kStep == kAmaxStep) {
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows * kRun; ++i) found.add(i / kRun, i % kRun, held[i / kRun][i % kRun]);
    found.finish(tile, rows, columns, maxima);
  } else {
    __shared__ Unit units[kTileColumns], residual_units[kTileColumns];
    const auto unit_at = [&](const Unit* of, int i, int c) -> const Unit& {
      return of[C::kScales == kTensor ? 0 : C::kScales == kPerRow ? tile.row(i) : tile.column() + c];
    };
    make_units<C::kScales>(tile, rows, columns, maxima, high, units, C::kStep == kLeadingStep ? scales : nullptr, scales32);
    if constexpr (C::kStep == kResidualStep) make_units<C::kScales>(tile, rows, columns, residual_maxima, high, residual_units, scales, scales32);
    int digits[kThreadRows][kRun];  // (kThreadRows, kRun)
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      CUTE_UNROLL
      for (int c = 0; c < kRun; ++c) {
        const Unit& unit = unit_at(units, i, c);
        const int digit = digit_of<C::kTruncate>(held[i][c], unit);
        const float residual = residual_of(held[i][c], digit, unit.scale);
        if constexpr (C::kStep == kLeadingStep) {
          digits[i][c] = digit;
          found.add(i, c, residual);
        } else {
          digits[i][c] = digit_of<C::kTruncate>(residual, unit_at(residual_units, i, c));
        }
      }
    }
    if constexpr (C::kStep == kLeadingStep) found.finish(tile, rows, columns, residual_maxima);
    write_digits<C::kTransposed>(tile, digits, rows, columns, out, out_pitch);
  }
}

}  // namespace magicube
