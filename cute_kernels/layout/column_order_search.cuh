// The order of a vector row's columns for kernels that hold a window of tiles of B: eight slots a step, `group` slots a
// group. No header and no name of CUDA is needed, so that the CPU engine compiles the same lines.
//
// Eight rows of B that ldmatrix reads at once cost as many passes over the banks as the most frequent residue mod 8 among
// them. A step without conflict takes one column of each residue. Where a residue has none in the window, some give two,
// and then it is best to take from those that will be in the way later. What comes later counts in part only, since the
// oldest tile has to be done with: how far to look ahead differs from row to row, so each is tried in kTrials ways.
#pragma once

namespace magicube {

inline constexpr int kPhase = 8;    // rows that ldmatrix reads at once; their numbers mod 8 decide about banks
inline constexpr int kTrials = 32;  // as many as a warp has lanes

// The columns of a vector row by residue and tile.
struct RowColumns {
  const int* until;  // (tiles, kPhase): of each residue, up to and with a tile
  int tiles;
  int group, window;

  // Of the columns that are not placed, those up to and with a tile; negative where later ones are placed.
  void waiting(int tile, const int (&placed)[kPhase], int (&found)[kPhase]) const {
    for (int i = 0; i < kPhase; ++i) found[i] = until[tile * kPhase + i] - placed[i];
  }
  bool done_with(int tile, const int (&placed)[kPhase]) const {
    bool done = true;
    for (int i = 0; i < kPhase; ++i) done = done && until[tile * kPhase + i] <= placed[i];
    return done;
  }
};

inline int total_of(const int (&counts)[kPhase]) {
  int total = 0;
  for (int i = 0; i < kPhase; ++i) total += counts[i];
  return total;
}

inline int lesser_of(int a, int b) { return a < b ? a : b; }

// How far the residues are ahead of their mean by the time when some tile is done with, all times eight, at most.
inline void find_excess(const RowColumns& row, int oldest, int end, const int (&placed)[kPhase], int (&excess)[kPhase]) {
  for (int i = 0; i < kPhase; ++i) excess[i] = -(1 << 20);
  for (int tile = oldest; tile < end; ++tile) {
    int found[kPhase];
    row.waiting(tile, placed, found);
    const int mean = total_of(found);
    for (int i = 0; i < kPhase; ++i) {
      const int here = kPhase * found[i] - mean;
      excess[i] = excess[i] > here ? excess[i] : here;
    }
  }
}

// How many columns of each residue a step takes of those allowed: at most `level` each, those with the greatest excess
// first. Returns its passes.
inline int take_step(const int (&allowed)[kPhase], const int (&excess)[kPhase], int (&take)[kPhase]) {
  const int wanted = lesser_of(kPhase, total_of(allowed));
  int level = 0;
  for (int found = 0; found < wanted;) {
    ++level;
    found = 0;
    for (int i = 0; i < kPhase; ++i) found += lesser_of(allowed[i], level);
  }
  int passes = 0;
  for (int i = 0; i < kPhase; ++i) {
    int before = 0;  // taken by those that come first
    for (int j = 0; j < kPhase; ++j) before += excess[j] > excess[i] ? lesser_of(allowed[j], level) : 0;
    const int most = lesser_of(allowed[i], level), left = wanted - before;
    take[i] = left < 0 ? 0 : lesser_of(left, most);
    passes = passes > take[i] ? passes : take[i];
  }
  return passes;
}

// Goes through a row in one of kTrials ways; visit(step, take) is called for each step that takes a column. Returns the
// cost: two for a pass, one for a group.
template <class Visit>
int order_row(const RowColumns& row, int trial, const Visit& visit) {
  constexpr int kAheads = 8, kNoises = 64;
  const int ahead = trial % kAheads, loud = trial / kAheads * 12;  // tiles beyond the window; 64ths of an eighth column
  int placed[kPhase] = {}, waiting[kPhase];
  unsigned state = unsigned(trial);
  int cost = 0, oldest = 0, step = 0;
  row.waiting(row.tiles - 1, placed, waiting);
  for (int left = total_of(waiting); left > 0;) {
    while (row.done_with(oldest, placed)) ++oldest;
    const int end = lesser_of(oldest + row.window, row.tiles);
    ++cost;
    for (int last = step + row.group / kPhase; step < last; ++step) {
      int allowed[kPhase], excess[kPhase], take[kPhase];
      row.waiting(end - 1, placed, allowed);
      if (total_of(allowed) == 0) continue;
      find_excess(row, oldest, lesser_of(end + ahead, row.tiles), placed, excess);
      for (int i = 0; i < kPhase; ++i) {  // some noise, and no two the same
        state = state * 1664525u + 1013904223u;
        excess[i] = (excess[i] * kNoises + int((state >> 16) % kNoises) * loud) * kPhase + i;
      }
      cost += 2 * take_step(allowed, excess, take);
      visit(step, take);
      for (int i = 0; i < kPhase; ++i) placed[i] += take[i];
      left -= total_of(take);
    }
  }
  return cost;
}

}  // namespace magicube
