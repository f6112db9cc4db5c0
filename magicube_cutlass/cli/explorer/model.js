// Stored bytes, kernel selection and predicted times. Twin of cute_kernels/spmm/heuristics.py, gemm/heuristics.py and
// magicube_cutlass/dispatch/{cpu_costs,dense_fallback}.py; the constants come from them (benchmarks/explorer_data.py).
// Times are nanoseconds where Python's are, figures of the page microseconds.
"use strict";

const SAMPLED_ROWS = 8;

function ceilDiv(a, b) {
  return Math.ceil(a / b);
}

// ---- storage

function storage(pattern, stride) {
  const { m, k, v, rows, offsets, vectors, nnz } = pattern;
  let padded = 0, longest = 0, empty = 0;
  for (let r = 0; r < rows; ++r) {
    const length = offsets[r + 1] - offsets[r];
    padded += ceilDiv(length, stride) * stride;
    longest = Math.max(longest, length);
    empty += length === 0 ? 1 : 0;
  }
  const pointers = 16 * rows, bytes = {};  // row_start and row_end, int64
  for (const bits of [4, 8, 16]) bytes[`SR-BCRS int${bits}`] = pointers + padded * 4 + Math.floor((padded * v * bits) / 8);
  bytes["CSR int8"] = 4 * (m + 1) + nnz * 5;
  bytes["dense int8"] = m * k;
  bytes["dense fp16"] = 2 * m * k;
  return { padded, padding: padded - vectors, longest, empty, bytes };
}

// ---- GPU

function sizeBucket(n) {
  let power = 16;
  while (power < n) power *= 2;
  return n > 16 && n <= (power * 3) / 4 ? (power * 3) / 4 : power;
}

function configsOf(data, kind, places) {
  const { fields, configs } = data.constants;
  return places[kind].map(i => Object.fromEntries([["kind", kind], ...fields[kind].map((name, j) => [name, configs[kind][i][j]])]));
}

// Configs that selection compares; the N tile is the smallest that holds all columns of a small B.
function candidates(data, machine, operands, problem, rhsBits) {
  const found = data.constants.spmm[machine.arch][operands], row = Math.floor((problem.n * rhsBits) / 8);
  const size = Object.keys(found.tiles).filter(name => name !== "wide").map(Number).sort((a, b) => a - b).find(s => s >= row);
  const places = found.tiles[size ?? "wide"], usesPanel = problem.vectors >= data.constants.panel_vectors * Math.max(problem.rows, 1);
  return [...configsOf(data, "gather", places), ...(usesPanel ? configsOf(data, "panel", places) : []), ...residents(data, machine, problem, places)];
}

// Configs whose rows of B fit the shared memory of one CTA, or of two.
function residents(data, machine, problem, places) {
  const { resident, fields, shared_bytes } = data.constants, found = [];
  if (!places.resident) return found;
  const base = Object.fromEntries([["kind", "resident"], ...fields.resident.map((name, i) => [name, places.resident[i]])]);
  for (const cluster of resident.clusters) {
    const rows = ceilDiv(problem.rows, Math.floor(machine.sms / cluster)), tile = ceilDiv(problem.inner, 8 * cluster) * 8;
    const block_rows = Math.max(1, Math.min(rows, resident.rows));
    for (const [stages, records] of resident.stages) {
      const sums = ((cluster > 1 ? 2 : 1) * block_rows + base.warps) * base.sum_words * 128;
      const bytes = tile * base.tile_n_bytes + base.warps * stages * (records * base.record_bytes + 8) + sums + 8 + 4 * base.tile_n + 4 * (block_rows + 1);
      if (bytes > shared_bytes) continue;
      const tag = `b${base.tile_n_bytes}t${tile}m${block_rows}w${base.warps}${cluster > 1 ? `c${cluster}` : ""}s${stages}g${records}u${base.together}`;
      found.push({ ...base, tag, tile, block_rows, cluster });
      break;
    }
  }
  return found;
}

// Vectors of the longest vector row beyond those of a uniform pattern.
function longestOf(mean, problem) {
  return Math.max(mean, problem.longest - 3 * mean ** 0.5);
}

function panelCost(config, machine, problem, model) {
  const clusters = Math.floor(machine.sms / config.cluster);
  const items = ceilDiv(problem.rows, config.warps * config.rows_per_warp * config.cluster) * ceilDiv(problem.n, config.tile_n);
  const waves = ceilDiv(items, clusters), mean = problem.vectors / problem.rows, tiles = ceilDiv(problem.inner, config.tile);
  const groups = Math.max(mean / config.mma_k + 0.5, Math.min(tiles / config.tile_window, mean));
  const rows = Math.min(config.warps * config.rows_per_warp, problem.rows);
  const products = ((config.products * Math.max(1, Math.floor(config.vector_length / 8))) * config.tile_n) / config.tile_n_bytes;
  const share = model.share[`${config.warps} ${config.rows_per_warp}`];
  const window = (mean * config.tile * config.tile_window) / problem.inner;  // vectors of a row per window
  const wavefronts = 1.0 + Math.min(model.conflict / window, 1.4);
  let chunks = (config.tile_n_bytes / 16) * Math.max(wavefronts, 0.5 * (wavefronts + products));
  chunks *= (config.tile_n_bytes <= 64 ? model.narrow : 1.0) * (config.a_stages ? model.ahead : 1.0);
  const work = rows * groups * chunks * model.chunk * share;
  const row = config.tile_n_bytes === 32 ? model.half : model.row;
  let fill = problem.inner * ((((model.byte * config.tile_n_bytes) / config.cluster) * items) / (waves * clusters) + row);
  fill += (tiles * model.flight) / (config.stages - config.tile_window);
  const epilogue = model.block + model.result * rows * config.tile_n_bytes;
  const tail = (model.tail * (longestOf(mean, problem) - mean)) / config.mma_k;
  return model.launch + waves * ((work ** 2 + fill ** 2) ** 0.5 + epilogue) + tail;
}

function gatherCost(config, machine, problem, model, sharedBytes) {
  const tiles = ceilDiv(problem.n, config.tile_n), registers = config.tile_n_bytes === 128 ? 80 : 64;
  const blocks = Math.min(Math.floor(sharedBytes / (config.smem_bytes + 1024)), Math.floor(65536 / (registers * config.threads)));
  const resident = Math.min(blocks * config.warps, 64) * machine.sms;
  const full = (problem.rows * tiles * config.split_k_warps) / resident, mean = problem.vectors / Math.max(problem.rows, 1);
  const groups = mean / (config.mma_k * config.split_k_warps) + 0.5;
  let longest = longestOf(mean, problem) / config.mma_k;
  const long = 4 * Math.max(1, ceilDiv(Math.floor(problem.vectors / config.mma_k), Math.max(1, problem.rows)));
  const isLong = config.shares_long_rows && longest > long;
  longest = longest / (isLong ? config.warps : config.split_k_warps) + 0.5;
  const ctas = ceilDiv(problem.rows * config.split_k_warps, config.warps) * tiles;
  const warps = Math.min(resident / machine.sms, ceilDiv(ctas, machine.sms) * config.warps);  // of the SM that has most
  const crowd = (((model.crowd * Math.max(config.tile_n_bytes, 64)) / 64) * warps) / 32;
  const products = ((config.digit_products * Math.max(config.vector_length / 8, 1.0)) * config.tile_n) / config.tile_n_bytes;
  const step = model.group + crowd * Math.max(1.0, 0.5 + 0.5 * products);
  const team = (((model.team * (config.split_k_warps - 1)) / 4) * config.tile_n) / 64;
  const work = Math.max(1.0, full) * (model.warp + groups * step + team) + (longest - groups) * step;
  return model.launch + work + model.result * problem.rows * 8 * problem.n;
}

function residentCost(config, machine, problem, model) {
  const ctas = ceilDiv(problem.rows, config.block_rows) * config.cluster, slots = config.mma_k * config.cluster;
  const waves = ceilDiv(ctas * ceilDiv(problem.n, config.tile_n), machine.sms), mean = problem.vectors / Math.max(problem.rows, 1);
  const records = Math.min(config.block_rows, problem.rows) * (mean / slots + 0.5) + (longestOf(mean, problem) - mean) / slots;
  const fill = model.fill * config.tile * config.tile_n_bytes;
  return model.launch + waves * (model.byte * records * config.record_bytes + fill) + (config.cluster > 1 ? model.team : 0);
}

function spmmCost(data, config, machine, problem) {
  const { models, shared_bytes } = data.constants;
  if (config.kind === "resident") return residentCost(config, machine, problem, models.resident);
  return config.kind === "panel" ? panelCost(config, machine, problem, models.panel) : gatherCost(config, machine, problem, models.gather, shared_bytes);
}

// The config with the least predicted time for a bucket of N, and its time for N itself.
function chooseSpmm(data, machine, operands, problem, rhsBits) {
  const rounded = { ...problem, n: sizeBucket(problem.n) };
  let best = Infinity, config = null;
  for (const each of candidates(data, machine, operands, rounded, rhsBits)) {
    const cost = spmmCost(data, each, machine, rounded);
    if (cost < best) [best, config] = [cost, each];
  }
  return { config, ns: spmmCost(data, config, machine, problem) };
}

// Microseconds of this library's dense int8 product.
function denseInt8(data, machine, m, k, n) {
  const { tiles, least_us, bytes_per_us } = data.constants.gemm;
  let best = Infinity;
  for (const [tileM, tileN, tileK, cluster, ctas, launch, wave, products] of tiles[machine.arch]) {
    const count = ceilDiv(m, tileM * cluster) * ceilDiv(n, tileN), sms = Math.max(1, Math.floor(machine.sms / cluster));
    const work = (tileM * tileN * ceilDiv(k, tileK) * tileK) / 1e6;
    best = Math.min(best, launch + wave * ceilDiv(count, sms * ctas) + products * work * ceilDiv(count, sms));
  }
  return Math.max(best, least_us + ((m + n) * k) / bytes_per_us);
}

// Microseconds of a dense product of torch on the H200, from the fit to its measured times.
function denseFit(fit, m, k, n) {
  const terms = [1.0, (m * k * n) / 1e6, (m * k) / 1e3, ((k + m) * n) / 1e3];
  return fit.costs.reduce((sum, cost, i) => sum + cost * terms[i], 0);
}

// ---- CPU

function timeOf(costs, terms, threads) {
  let work = 0;
  for (let i = 1; i < terms.length; ++i) work += costs[i] * terms[i];
  return costs[0] * terms[0] + work / threads;
}

function cpuForecast(data, cpu, pattern, digits, n) {
  const { m, k, v, vectors } = pattern, c = data.constants.cpu, { classes } = c, { costs, threads } = cpu;
  const columns = cpu.panel_columns, rest = n % columns, part = columns === 64 && rest <= 32 ? c.half : 1;
  const width = (Math.floor(n / columns) + (rest > 0 ? part : 0)) * columns, results = m * n, group = (Math.max(v, 4) / 8) * digits;
  let sparse = timeOf(costs.sparse, [1, (((width / 64) * vectors) / 4) * group, results + width * k, 0], threads);
  let dense = timeOf(costs.dense, [1, m * k * n, (m + n) * k, m * n, 1, m * n], threads) + c.call;
  const place = classes.findIndex(most => n <= most);
  if (digits === 1 && place >= 0 && cpu.packs_layers) { // B is read down its columns
    const size = classes[place], layer = costs.layers[place], share = n / size, stored = vectors * Math.max(v, 4);
    dense = timeOf(layer.slice(4), [1, m * k * share, m * share, k * share], threads) + c.call + (n > 1 ? c.row * m : 0);
    if (n <= c.few) sparse = timeOf(layer.slice(0, 4), [1, stored, m, k], threads) * (v < 8 ? c.short : 1);
  }
  return { sparse, dense };
}

// ---- all figures of a mask

// settings: { v, pair: [lhs, rhs], n, stride, machine, threads }
function figures(data, mask, settings) {
  const { v, n, stride, machine } = settings, [lhs, rhs] = settings.pair, c = data.constants;
  const pattern = patternOf(mask, v), stored = storage(pattern, stride), { m, k, vectors, nnz } = pattern;
  const found = {
    pattern, m, k, n, vector_rows: pattern.rows, vectors, nnz, elements: pattern.elements, density: nnz / (m * k),
    element_density: pattern.elements / (m * k), ...stored, bank: null, kernel: null, merged: null,
  };
  const valueBytes = (v * Math.max(4, lhs > 8 ? 16 : lhs)) / 8;
  found.operations = 2 * nnz * n;
  found.moved = vectors * (valueBytes + 4) + (k * n * (rhs > 8 ? 16 : rhs)) / 8 + m * n * (machine.kind === "gpu" ? 2 : 4);
  if (machine.kind === "cpu") {
    const digits = Math.ceil(lhs / 8) * Math.ceil(rhs / 8), cpu = { ...machine, threads: settings.threads };
    const ns = cpuForecast(data, cpu, pattern, digits, n);
    return { ...found, sparse_us: ns.sparse / 1e3, dense_us: ns.dense / 1e3, fits: [] };
  }
  const merged = mergedPattern(mask, pattern, c.mma_columns), operands = `${merged.v}-${lhs}x${rhs}`;
  const longest = merged === pattern ? stored.longest : storage(merged, stride).longest;
  const problem = { rows: merged.rows, inner: k, vectors: merged.vectors, longest, n };
  const { config, ns } = chooseSpmm(data, machine, operands, problem, rhs);
  found.kernel = `spmm_${config.kind}-${c.spmm[machine.arch][operands].prefix}-${config.tag}`;
  found.config = config;
  found.atom = c.spmm[machine.arch][operands].atom;
  found.merged = merged;
  if (config.kind === "panel") found.bank = kept(mask, `${merged.v} ${v} ${config.tag} ${config.mma_k}`, () => bankFigures(merged, config, SAMPLED_ROWS));
  const fits = machine.measured ? data.dense_fits.map(fit => ({ name: fit.name, us: denseFit(fit, m, k, n) })) : [];
  return { ...found, sparse_us: ns / 1e3, dense_us: denseInt8(data, machine, m, k, n), fits };
}
