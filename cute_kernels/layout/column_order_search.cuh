// Order of the columns of a vector row that avoids bank conflicts, for kernels with a window of tiles of B: eight slots per
// step, `group` slots per group. No CUDA header or name, so that the CPU engine compiles the same code.
//
// ldmatrix reads eight rows of B at once; its number of passes is the multiplicity of the most frequent residue mod 8. A step
// without conflict takes one column of each residue. If the window has no column of a residue, others give two: preferably
// those with the largest excess later in the row. The best lookahead differs per row because the oldest tile must be finished
// first, so kTrials variants are tried.
#pragma once

namespace magicube {

inline constexpr int kPhase = 8;    // rows that ldmatrix reads at once; row mod 8 determines the bank
inline constexpr int kTrials = 32;  // one per lane

// Column counts of a vector row by residue and tile.
struct RowColumns {
  const int* until;  // (tiles, kPhase): cumulative over tiles
  int tiles;
  int group, window;

  // Columns not placed yet, up to and including a tile; negative if later ones are placed.
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

// Largest excess of a residue over the mean at the end of any tile, times eight.
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

// Columns of each residue that a step takes: at most `level` each, largest excess first. Returns the number of passes.
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
    int before = 0;  // taken by residues with a larger excess
    for (int j = 0; j < kPhase; ++j) before += excess[j] > excess[i] ? lesser_of(allowed[j], level) : 0;
    const int most = lesser_of(allowed[i], level), left = wanted - before;
    take[i] = left < 0 ? 0 : lesser_of(left, most);
    passes = passes > take[i] ? passes : take[i];
  }
  return passes;
}

// Order a row by one of kTrials variants; visit(step, take) is called for each step that takes a column. Returns the cost:
// two per pass, one per group.
template <class Visit>
int order_row(const RowColumns& row, int trial, const Visit& visit) {
  constexpr int kAheads = 8, kNoises = 64;
  const int ahead = trial % kAheads, loud = trial / kAheads * 12;  // tiles beyond the window; amplitude of the noise, 1/512 of a column
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
      for (int i = 0; i < kPhase; ++i) {  // noise as a tie-break
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
