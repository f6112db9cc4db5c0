// Products by AMX, dense and sparse: tdpbusd multiplies sixteen rows of 64 unsigned bytes by 64 x 16 signed ones, 16384 products in 16
// cycles.
//
// Operands of dense products are those of vpdpbusd: rows of digits with the offset 128, and panels whose rows hold four k of each
// column, which is how a tile holds them. Loads and stores of tiles take any pitch, so nothing is copied.
#pragma once

#include <immintrin.h>

#include "engine.hpp"
#include "integers.hpp"
#include "spmm.hpp"

#define MAGICUBE_TILES __attribute__((target("amx-tile,amx-int8")))

namespace {

using magicube::kPanel;
using magicube::kQuad;

// What _tile_loadconfig reads.
struct TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

template <class Vnni>
struct AmxProduct {
  using Micro = typename Vnni::Micro;
  using Digit = typename Vnni::Digit;
  static constexpr Digit kOffset = Vnni::kOffset;
  static constexpr int kRowOffset = 0;
  static constexpr bool kSplits = false;
  static constexpr int kRows = Vnni::kRows, kStep = kQuad;  // whose results are read at once
  static constexpr int64_t kBlockRows = 64;

  // sums (rows, kPanel) = start (kPanel) + a b.
  static void multiply(const Digit* a, int64_t pitch, int rows, const int8_t* b, int64_t quads, int columns, const int32_t* start,
                       int32_t* sums) {
    const int64_t steps = quads / kTileQuads, whole = steps * kTileQuads;
    if (rows < kFewRows || steps == 0) return Vnni::multiply(a, pitch, rows, b, quads, columns, start, sums);
    if (quads > whole) {
      Vnni::multiply(a + whole * kQuad, pitch, rows, b + whole * kPanel * kQuad, quads - whole, columns, start, sums);
    } else {
      for (int r = 0; r < rows; ++r) std::memcpy(sums + r * kPanel, start, kPanel * sizeof(int32_t));
    }
    // Pairs of tiles of rows, whole ones by one configuration, which takes as long as 14 products.
    const int paired = rows / 32 * 32, rest = rows - paired;
    if (paired > 0) add_tiles<true>(a, pitch, paired, 16, b, steps, columns, sums);
    if (rest > 0) {
      const auto add = rest > 16 ? add_tiles<true> : add_tiles<false>;
      add(a + paired * pitch, pitch, rest, rest > 16 ? rest - 16 : rest, b, steps, columns, sums + paired * kPanel);
    }
  }

 private:
  static constexpr int kFewRows = 5;  // below, a tile is mostly empty and the product bound by bytes
  static constexpr int64_t kTileQuads = 16;
  static constexpr int64_t kAhead = 8192;  // bytes of b fetched meanwhile where one tile of rows waits for them

  // sums (rows, columns) += a b: tiles 0 to 3 hold sums, 4 and 5 rows of a, 6 and 7 columns of b. The last tile of rows has `last` ones, all
  // others have 16.
  template <bool Two>
  MAGICUBE_TILES __attribute__((noinline)) static void add_tiles(const Digit* a, int64_t pitch, int rows, int last, const int8_t* b,
                                                                 int64_t steps, int columns, int32_t* sums) {
    constexpr int64_t kSumBytes = kPanel * sizeof(int32_t), kPanelBytes = kPanel * kQuad;
    alignas(64) TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.row_bytes[tile] = 64;
      const bool is_last = Two ? tile == 2 || tile == 3 || tile == 5 : tile < 6;
      shapes.rows[tile] = static_cast<uint8_t>(is_last ? last : 16);
    }
    _tile_loadconfig(&shapes);
    for (int j = 0; j < columns; j += 32) {  // absent columns are those of the panel's padding
      for (int r = 0; r < rows; r += 32) {   // the columns' part of b stays in L1
        int32_t *const low = sums + r * kPanel + j, *const high = low + 16 * kPanel;
        _tile_loadd(0, low, kSumBytes);
        _tile_loadd(1, low + 16, kSumBytes);
        if constexpr (Two) {
          _tile_loadd(2, high, kSumBytes);
          _tile_loadd(3, high + 16, kSumBytes);
        }
        const Digit* left = a + r * pitch;
        const int8_t* right = b + j * kQuad;
        for (int64_t step = 0; step < steps; ++step, left += 64, right += kTileQuads * kPanelBytes) {
          for (int64_t row = 0; !Two && row < kTileQuads; ++row) {
            __builtin_prefetch(right + kAhead + row * kPanelBytes);
            __builtin_prefetch(right + kAhead + row * kPanelBytes + 64);
          }
          _tile_loadd(6, right, kPanelBytes);
          _tile_loadd(4, left, pitch);
          _tile_loadd(7, right + 64, kPanelBytes);
          _tile_dpbusd(0, 4, 6);
          _tile_dpbusd(1, 4, 7);
          if constexpr (Two) {
            _tile_loadd(5, left + 16 * pitch, pitch);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
          }
        }
        _tile_stored(0, low, kSumBytes);
        _tile_stored(1, low + 16, kSumBytes);
        if constexpr (Two) {
          _tile_stored(2, high, kSumBytes);
          _tile_stored(3, high + 16, kSumBytes);
        }
      }
    }
    _tile_release();
  }
};

// Sparse products: quads of gathered rows are interleaved as for vpdpbusd, but stored once, to tiles, for 8 x 64 sums in four tiles
// instead of 32 registers in two passes. A block of A, `stride` bytes of each of eight rows, is a tile as it lies. The next block's
// quads are written while this one's tiles are read: a tile that was just stored is waited for.
template <class Vnni>
struct AmxRows : Vnni {
  static constexpr int kVectors = kPanel / 16;  // tiles of sums, of 16 columns each

  static void whole(const WholeRows& at, int64_t first, int64_t last, float* out) {
    if (!pays(at, first, last)) return Vnni::whole(at, first, last, out);
    if (at.scales) at.a.is_signed ? rows<true, true>(at, first, last, out) : rows<false, true>(at, first, last, out);
    else at.a.is_signed ? rows<true, false>(at, first, last, out) : rows<false, false>(at, first, last, out);
  }

 private:
  static constexpr int kMostQuads = 16;     // of a tile
  static constexpr int64_t kLongRow = 96;   // vectors of a mean vector row, below which storing tiles costs more than they gain
  static constexpr int64_t kLongCall = 512;  // vectors of a call, for which tiles are configured
  using Quads = uint8_t[kVectors][kMostQuads * 64];

  // Whether tiles are faster: whole panels, and vector rows that are long enough.
  static bool pays(const WholeRows& at, int64_t first, int64_t last) {
    const auto& a = at.a;
    if (a.vector_length < kTileRows || a.stride > 4 * kMostQuads || at.width <= kPanel / 2) return false;
    const int64_t vectors = a.row_end[last - 1] - a.row_start[first];
    return vectors >= kLongCall && vectors >= kLongRow * (last - first);
  }

  // Quads of the block of A from column `begin` on, of a vector row that ends at `end`. Others keep their bytes, whose values are zero.
  template <bool Signed>
  __attribute__((always_inline)) static void gather(const WholeRows& at, int64_t begin, int64_t end, Quads& to) {
    const int64_t quads = (lesser(at.a.stride, end - begin) + kQuad - 1) / kQuad;
    const int32_t* columns = at.a.columns + begin;
    for (int64_t i = 0; i < quads; ++i, columns += kQuad) {
      const __m512i k[4] = {Vnni::row(at.panel, columns[0]), Vnni::row(at.panel, columns[1]), Vnni::row(at.panel, columns[2]),
                            Vnni::row(at.panel, columns[3])};  // (4, 64)
      __m512i b[kVectors];
      Vnni::template interleave<Signed, 0, kVectors>(k, b);
#pragma GCC unroll 4
      for (int q = 0; q < kVectors; ++q) _mm512_store_si512(to[q] + 64 * i, b[q]);
    }
  }

  // Tiles 0 to 3 += tile 4 times the quads. Numbers of tiles are text.
  template <bool Signed>
  MAGICUBE_TILES __attribute__((always_inline)) static void multiply(const Quads& quads) {
    _tile_loadd(5, quads[0], 64);
    _tile_loadd(6, quads[1], 64);
    _tile_loadd(7, quads[2], 64);
    if constexpr (Signed) {
      _tile_dpbsud(0, 4, 5);
      _tile_loadd(5, quads[3], 64);
      _tile_dpbsud(1, 4, 6);
      _tile_dpbsud(2, 4, 7);
      _tile_dpbsud(3, 4, 5);
    } else {
      _tile_dpbusd(0, 4, 5);
      _tile_loadd(5, quads[3], 64);
      _tile_dpbusd(1, 4, 6);
      _tile_dpbusd(2, 4, 7);
      _tile_dpbusd(3, 4, 5);
    }
  }

  // Results of eight rows from `row` on: the sums start at the negated offsets.
  template <bool Scales>
  __attribute__((always_inline)) static void put_rows(const WholeRows& at, int64_t row, float* out) {
    const float *const scales = at.row_scales ? at.row_scales + row : kOnes, *const biases = at.bias ? at.bias + row : kZeros;
    const bool streams = at.streams && at.width == kPanel;
    for (int q = 0; q < kVectors; ++q) {
      const __mmask16 mask = Vnni::columns_of(at.width, q);
      const __m512 columns = Scales ? _mm512_maskz_loadu_ps(mask, at.column_scales + q * 16) : _mm512_setzero_ps();
      float* to = out + q * 16;
      for (int i = 0; i < kTileRows; ++i, to += at.pitch) {
        const __m512i sum = _mm512_add_epi32(_mm512_load_si512(at.sums + i * kPanel + q * 16),
                                             _mm512_set1_epi32(-at.shift * static_cast<int32_t>(at.a.row_sums[row + i])));
        Vnni::template put<Scales>(sum, scales[i], columns, biases[i], streams, mask, to);
      }
    }
  }

  // Vector rows [first, last): tiles 0 to 3 hold sums, 4 a block of A, 5 to 7 quads.
  template <bool Signed, bool Scales>
  MAGICUBE_TILES __attribute__((noinline)) static void rows(const WholeRows& at, int64_t first, int64_t last, float* out) {
    const auto& a = at.a;
    const int64_t stride = a.stride, block = stride * a.vector_length;
    alignas(64) TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.row_bytes[tile] = tile == 4 ? static_cast<uint16_t>(stride) : 64;
      shapes.rows[tile] = static_cast<uint8_t>(tile < 5 ? kTileRows : stride / kQuad);
    }
    _tile_loadconfig(&shapes);
    alignas(64) Quads quads[2];
    int turn = 0;
    bool ready = false;  // the quads of a vector row's first block
    for (int64_t r = first; r < last; ++r) {
      for (int v = 0; v < a.vector_length; v += kTileRows, out += kTileRows * at.pitch) {
        const int64_t next_row = v + kTileRows < a.vector_length ? r : r + 1;
        const uint8_t* values = a.planes + a.row_start[r] * a.vector_length + v * stride;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        if (!ready && a.row_start[r] < a.row_end[r]) gather<Signed>(at, a.row_start[r], a.row_end[r], quads[turn]);
        ready = false;
        for (int64_t begin = a.row_start[r]; begin < a.row_end[r]; begin += stride, values += block) {
          const Quads& now = quads[turn];
          turn ^= 1;
          if (begin + stride < a.row_end[r]) {
            gather<Signed>(at, begin + stride, a.row_end[r], quads[turn]);
          } else if (next_row < last && a.row_start[next_row] < a.row_end[next_row]) {
            gather<Signed>(at, a.row_start[next_row], a.row_end[next_row], quads[turn]);
            ready = true;
          }
          if (v == 0) {
            for (int64_t i = 0; i < stride; i += 16) __builtin_prefetch(a.columns + begin + Vnni::kAhead / 8 + i);
            for (int64_t byte = 0; byte < block; byte += 64) __builtin_prefetch(values + Vnni::kAhead + byte);
          }
          _tile_loadd(4, values, stride);
          multiply<Signed>(now);
        }
        constexpr int64_t kSumBytes = kPanel * sizeof(int32_t);
        _tile_stored(0, at.sums, kSumBytes);
        _tile_stored(1, at.sums + 16, kSumBytes);
        _tile_stored(2, at.sums + 32, kSumBytes);
        _tile_stored(3, at.sums + 48, kSumBytes);
        put_rows<Scales>(at, r * a.vector_length + v, out);
      }
    }
    _tile_release();
  }
};

}  // namespace
