#pragma once

#include "engine.hpp"

namespace magicube {

struct SpreadArgs {
  const int* until;      // (rows, tiles, 8): columns of each residue up to and with a tile
  const int64_t* first;  // (rows, 8): where the columns of a residue begin in `order`
  const int64_t* order;  // (vectors,)
  int64_t rows;
  int tiles, group, window;
  int64_t* slots;  // (vectors,)
};

void spread_slots(const SpreadArgs& args, Team& team);

}  // namespace magicube
