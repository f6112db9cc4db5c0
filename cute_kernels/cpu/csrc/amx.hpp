// Dense products by AMX: tdpbusd multiplies sixteen rows of 64 unsigned bytes by 64 x 16 signed ones, 16384 products in 16 cycles.
//
// Operands are those of vpdpbusd: rows of digits with the offset 128, and panels whose rows hold four k of each column, which is
// how a tile holds them. Loads and stores of tiles take any pitch, so nothing is copied.
#pragma once

#include <immintrin.h>

#include "engine.hpp"
#include "integers.hpp"

namespace {

using magicube::kPanel;
using magicube::kQuad;

template <class Vnni>
struct AmxProduct {
  using Micro = typename Vnni::Micro;
  using Digit = typename Vnni::Digit;
  static constexpr Digit kOffset = Vnni::kOffset;
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

  struct Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };

  // sums (rows, columns) += a b: tiles 0 to 3 hold sums, 4 and 5 rows of a, 6 and 7 columns of b. The last tile of rows has `last` ones, all
  // others have 16.
  template <bool Two>
  __attribute__((target("amx-tile,amx-int8"), noinline)) static void add_tiles(const Digit* a, int64_t pitch, int rows, int last,
                                                                              const int8_t* b, int64_t steps, int columns, int32_t* sums) {
    constexpr int64_t kSumBytes = kPanel * sizeof(int32_t), kPanelBytes = kPanel * kQuad;
    alignas(64) Shapes shapes;
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

}  // namespace
