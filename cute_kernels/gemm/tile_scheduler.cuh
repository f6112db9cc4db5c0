// Traverse output tiles in an order that keeps the operands of neighboring tiles in L2.
#pragma once

#include <cuda/std/cstdint>

namespace magicube {

// Tile (row, column) number `index` of a grid of rows x columns: bands of kBand rows, column by column within a band.
template <int kBand>
struct TileScheduler {
  int rows, columns;

  __device__ int count() const { return rows * columns; }
  __device__ void place(int index, int& row, int& column) const {
    const uint32_t band = uint32_t(index) / uint32_t(kBand * columns);
    const uint32_t inside = uint32_t(index) - band * uint32_t(kBand * columns);
    const uint32_t height = min(kBand, rows - int(band) * kBand);
    column = int(inside / height);
    row = int(band * kBand + inside % height);
  }
};

}  // namespace magicube
