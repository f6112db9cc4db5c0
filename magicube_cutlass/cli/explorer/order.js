// Gather order of the panel kernel: the slot of each column of a vector row, and the wavefronts of ldmatrix.
// Twin of cute_kernels/layout/column_order.py and column_order_search.cuh: a group of `group` slots takes its columns from
// `window` consecutive tiles of B. ldmatrix reads PHASE slots at once; columns with one residue mod PHASE share banks.
"use strict";

const PHASE = 8, TRIALS = 32, AHEADS = 8, NOISES = 64;

// Slots in the order of the columns; a group that would exceed the window is padded.
function sequentialSlots(columns, tile, tiles, group, window) {
  const counts = new Int32Array(tiles), starts = new Int32Array(tiles), slots = new Int32Array(columns.length);
  for (const c of columns) counts[Math.floor(c / tile)]++;
  let at = 0, oldest = tiles;
  for (let step = 0; step < tiles; ++step) {
    if (at % group !== 0 && oldest <= step - window && counts[step] > 0) at = Math.ceil(at / group) * group;
    starts[step] = at;
    const end = at + counts[step];
    if (counts[step] > 0 && Math.floor(end / group) * group >= at) oldest = step;
    at = end;
  }
  const next = starts.slice();
  columns.forEach((c, i) => { slots[i] = next[Math.floor(c / tile)]++; });
  return slots;
}

// One variant of the search; visit(step, take) is called for each step that takes a column. Returns the cost, or a number
// that is at least `limit` as soon as that is sure.
function orderRow(until, totals, tiles, group, window, trial, limit, visit) {
  const ahead = trial % AHEADS, loud = Math.floor(trial / AHEADS) * 12;
  const placed = new Int32Array(PHASE), allowed = new Int32Array(PHASE), excess = new Int32Array(PHASE), take = new Int32Array(PHASE);
  let left = totals[tiles - 1], state = trial, cost = 0, oldest = 0, step = 0;
  const all = left;
  const doneWith = tile => {
    for (let i = 0; i < PHASE; ++i) if (until[tile * PHASE + i] > placed[i]) return false;
    return true;
  };
  while (left > 0 && cost < limit) {
    while (doneWith(oldest)) ++oldest;
    const end = Math.min(oldest + window, tiles), far = Math.min(end + ahead, tiles);
    ++cost;
    for (const last = step + group / PHASE; step < last; ++step) {
      let sum = 0;
      for (let i = 0; i < PHASE; ++i) sum += allowed[i] = until[(end - 1) * PHASE + i] - placed[i];
      if (sum === 0) continue;
      excess.fill(-(1 << 20));
      for (let tile = oldest; tile < far; ++tile) {  // largest excess over the mean, times PHASE
        const mean = totals[tile] - (all - left);
        for (let i = 0, at = tile * PHASE; i < PHASE; ++i, ++at) {
          const here = PHASE * (until[at] - placed[i]) - mean;
          if (here > excess[i]) excess[i] = here;
        }
      }
      for (let i = 0; i < PHASE; ++i) {  // noise as a tie-break
        state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
        excess[i] = (excess[i] * NOISES + ((state >>> 16) % NOISES) * loud) * PHASE + i;
      }
      cost += 2 * takeStep(allowed, sum, excess, take);
      if (visit) visit(step, take);
      for (let i = 0; i < PHASE; ++i) {
        placed[i] += take[i];
        left -= take[i];
      }
    }
  }
  return cost;
}

// Columns of each residue that a step takes: at most `level` each, largest excess first. Returns the wavefronts.
function takeStep(allowed, sum, excess, take) {
  const wanted = Math.min(PHASE, sum);
  let level = 0, wavefronts = 0;
  for (let found = 0; found < wanted;) {
    ++level;
    found = 0;
    for (let i = 0; i < PHASE; ++i) found += Math.min(allowed[i], level);
  }
  for (let i = 0; i < PHASE; ++i) {
    let before = 0;
    for (let j = 0; j < PHASE; ++j) if (excess[j] > excess[i]) before += Math.min(allowed[j], level);
    take[i] = Math.max(0, Math.min(wanted - before, Math.min(allowed[i], level)));
    wavefronts = Math.max(wavefronts, take[i]);
  }
  return wavefronts;
}

// Slots in the order with the least cost of all variants.
function orderedSlots(columns, tile, tiles, group, window) {
  const until = new Int32Array(tiles * PHASE), slots = new Int32Array(columns.length);
  if (!columns.length) return slots;
  const classes = Array.from({ length: PHASE }, () => []);  // places of the columns, by residue
  columns.forEach((c, i) => {
    until[Math.floor(c / tile) * PHASE + c % PHASE]++;
    classes[c % PHASE].push(i);
  });
  for (let i = PHASE; i < until.length; ++i) until[i] += until[i - PHASE];
  const totals = Int32Array.from({ length: tiles }, (_, tile) => until.subarray(tile * PHASE, (tile + 1) * PHASE).reduce((a, b) => a + b));
  let best = Infinity, chosen = 0;
  for (let trial = 0; trial < TRIALS; ++trial) {
    const cost = orderRow(until, totals, tiles, group, window, trial, best, null);
    if (cost < best) [best, chosen] = [cost, trial];
  }
  const taken = new Int32Array(PHASE);
  orderRow(until, totals, tiles, group, window, chosen, Infinity, (step, take) => {
    let slot = step * PHASE;
    for (let i = 0; i < PHASE; ++i) for (let j = 0; j < take[i]; ++j) slots[classes[i][taken[i]++]] = slot++;
  });
  return slots;
}

// The column that each slot of a vector row reads, whole groups; padding repeats the first column of its group.
function slotColumns(columns, slots, group) {
  let used = 0;
  for (const s of slots) used = Math.max(used, s + 1);
  const found = new Int32Array(Math.ceil(used / group) * group).fill(-1);
  columns.forEach((c, i) => { found[slots[i]] = c; });
  const isPadding = found.map(c => (c < 0 ? 1 : 0));
  for (let i = 0; i < found.length; ++i) if (found[i] < 0) found[i] = found[i - i % group];
  return { columns: found, isPadding };
}

// Wavefronts and reads of PHASE slots: a read takes as many wavefronts as distinct columns of its commonest residue.
function countWavefronts(columns) {
  let total = 0;
  const reads = columns.length / PHASE;
  for (let read = 0; read < reads; ++read) {
    const counts = new Int32Array(PHASE), seen = new Set(columns.subarray(read * PHASE, (read + 1) * PHASE));
    for (const c of seen) counts[c % PHASE]++;
    total += Math.max(...counts);
  }
  return { wavefronts: total, reads };
}

// `count` vector rows, evenly spread over all.
function sampleRows(rows, count) {
  const found = [], most = Math.min(rows, count);
  for (let i = 0; i < most; ++i) found.push(Math.floor((i * rows) / most));
  return found;
}

// Wavefronts per read of sampled vector rows, in column order and in the order that the kernel uses.
function bankFigures(pattern, config, count) {
  const tiles = Math.ceil(pattern.k / config.tile), rows = sampleRows(pattern.rows, count);
  const found = { rows: rows.length, natural: 0, natural_reads: 0, ordered: 0, ordered_reads: 0 };
  for (const row of rows) {
    const columns = pattern.columns.subarray(pattern.offsets[row], pattern.offsets[row + 1]);
    for (const [name, order] of [["natural", sequentialSlots], ["ordered", orderedSlots]]) {
      const slots = order(columns, config.tile, tiles, config.mma_k, config.tile_window);
      const counted = countWavefronts(slotColumns(columns, slots, config.mma_k).columns);
      found[name] += counted.wavefronts;
      found[`${name}_reads`] += counted.reads;
    }
  }
  return found;
}
