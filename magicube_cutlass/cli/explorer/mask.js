// Masks: reading .npy and .smtx, packing into bits, and compression into V x 1 vectors.
// A mask has rows x cols cells of 0 and 1. A cell is an element of the matrix, or a vector if it came from .smtx.
"use strict";

const MAX_CELLS = 2 ** 26, MAX_COLUMNS = 32768;

function checkSize(rows, cols) {
  if (!(rows >= 1 && cols >= 1)) throw new Error(`mask must have rows and columns, got ${rows} x ${cols}`);
  if (rows * cols > MAX_CELLS) throw new Error(`mask must have at most ${MAX_CELLS} cells, got ${rows} x ${cols}`);
  if (cols > MAX_COLUMNS) throw new Error(`mask must have at most ${MAX_COLUMNS} columns, got ${cols}`);
}

// Each row begins with a new word; bit c % 32 of word c / 32 is column c.
function makeMask(rows, cols, unit = "element") {
  checkSize(rows, cols);
  const width = Math.ceil(cols / 32);
  return { rows, cols, unit, width, bits: new Uint32Array(rows * width), patterns: new Map() };
}

function getCell(mask, row, col) {
  return (mask.bits[row * mask.width + (col >>> 5)] >>> (col & 31)) & 1;
}

function setCell(mask, row, col, value) {
  const at = row * mask.width + (col >>> 5), bit = 1 << (col & 31);
  mask.bits[at] = value ? mask.bits[at] | bit : mask.bits[at] & ~bit;
  mask.patterns.clear();  // what was derived
}

// Fills a mask from isSet(i) for the cells in row-major order, or column-major.
function fillMask(mask, isSet, columnMajor = false) {
  const { rows, cols, width, bits } = mask;
  for (let r = 0; r < rows; ++r) {
    let i = columnMajor ? r : r * cols;
    const step = columnMajor ? rows : 1;
    for (let w = 0, c = 0; w < width; ++w) {
      const end = Math.min(cols, c + 32);
      let word = 0;
      for (let bit = 0; c < end; ++c, ++bit, i += step) word |= isSet(i) << bit;
      bits[r * width + w] = word;
    }
  }
  return mask;
}

// Fills a mask from nonzero bytes, four per word, row-major; cols is a multiple of 4.
function fillFromBytes(mask, words) {
  const { rows, cols, width, bits } = mask;
  for (let r = 0, i = 0; r < rows; ++r) {
    for (let c = 0, at = r * width; c < cols; c += 4, ++i) {
      const word = words[i], set = (((word & 0x7f7f7f7f) + 0x7f7f7f7f) | word) & 0x80808080;  // bit 7 of nonzero bytes
      bits[at + (c >>> 5)] |= (Math.imul(set >>> 7, 0x10204080) >>> 28) << (c & 31);
    }
  }
  return mask;
}

// ---- files

// NumPy file of version 1, 2 or 3: nonzero elements count. Minus zero is zero.
function parseNpy(buffer) {
  const bytes = new Uint8Array(buffer), view = new DataView(buffer);
  if (bytes.length < 10 || String.fromCharCode(...bytes.subarray(1, 6)) !== "NUMPY") throw new Error("file must be .npy, got other bytes");
  const wide = bytes[6] > 1, start = wide ? 12 : 10;
  const end = start + (wide ? view.getUint32(8, true) : view.getUint16(8, true));
  const head = new TextDecoder("latin1").decode(bytes.subarray(start, end));
  const type = /'descr':\s*'([<>|=]?)([biuf])(\d+)'/.exec(head), fortran = /'fortran_order':\s*True/.test(head);
  const shape = /'shape':\s*\(([^)]*)\)/.exec(head);
  if (!type || !shape) throw new Error("array must hold booleans, integers or floats");
  const sizes = shape[1].split(",").filter(s => s.trim()).map(Number);
  if (sizes.length !== 2) throw new Error(`array must be a matrix, got ${sizes.length} dimensions`);
  const [rows, cols] = sizes, mask = makeMask(rows, cols), size = Number(type[3]), isFloat = type[2] === "f";
  if ((type[1] === ">" && size > 1) || ![1, 2, 4, 8].includes(size)) throw new Error(`elements must be little-endian and at most 8 bytes, got ${type[1]}${type[2]}${type[3]}`);
  if (bytes.length - end < rows * cols * size) throw new Error(`file must hold ${rows * cols} elements, it is truncated`);
  const body = buffer.slice(end, end + rows * cols * size), all = isFloat ? 0x7fffffff : -1;
  if (size === 8) {
    const words = new Uint32Array(body);
    return fillMask(mask, i => ((words[2 * i] | (words[2 * i + 1] & all)) !== 0 ? 1 : 0), fortran);
  }
  if (size === 1 && cols % 4 === 0 && !fortran) return fillFromBytes(mask, new Uint32Array(body));
  const words = size === 1 ? new Uint8Array(body) : size === 2 ? new Uint16Array(body) : new Uint32Array(body);
  const most = size === 2 && isFloat ? 0x7fff : all;
  return fillMask(mask, i => ((words[i] & most) !== 0 ? 1 : 0), fortran);
}

// Text of three lines: "rows, cols, nnz"; rows + 1 offsets; nnz columns. Each row is a vector row.
function parseSmtx(buffer) {
  const bytes = new Uint8Array(buffer);
  let at = 0;
  const next = what => {
    while (at < bytes.length && (bytes[at] < 48 || bytes[at] > 57)) {
      if (bytes[at] > 57 || (bytes[at] > 44 && bytes[at] < 48)) throw new Error(`${what} must be digits, got ${JSON.stringify(String.fromCharCode(bytes[at]))}`);
      ++at;
    }
    if (at >= bytes.length) throw new Error(`file ends before ${what}`);
    let value = 0;
    for (; at < bytes.length && bytes[at] >= 48 && bytes[at] <= 57; ++at) value = 10 * value + bytes[at] - 48;
    return value;
  };
  const rows = next("rows"), cols = next("columns"), nnz = next("nnz"), mask = makeMask(rows, cols, "vector");
  const offsets = new Float64Array(rows + 1);
  for (let r = 0; r <= rows; ++r) offsets[r] = next("row offsets");
  if (offsets[0] !== 0 || offsets[rows] !== nnz) throw new Error(`row offsets must go from 0 to nnz = ${nnz}, got ${offsets[0]} to ${offsets[rows]}`);
  for (let r = 0; r < rows; ++r) {
    if (offsets[r + 1] < offsets[r]) throw new Error(`row offsets must not decrease, got ${offsets[r]} then ${offsets[r + 1]}`);
    for (let i = offsets[r]; i < offsets[r + 1]; ++i) {
      const c = next("column indices");
      if (c >= cols) throw new Error(`column index ${c} of row ${r} must lie in [0, ${cols})`);
      if (getCell(mask, r, c)) throw new Error(`column index ${c} appears twice in row ${r}`);
      mask.bits[r * mask.width + (c >>> 5)] |= 1 << (c & 31);
    }
  }
  return mask;
}

async function readFile(file) {
  let buffer = await file.arrayBuffer(), name = file.name.toLowerCase();
  if (name.endsWith(".gz")) {
    buffer = await new Response(new Blob([buffer]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
    name = name.slice(0, -3);
  }
  if (name.endsWith(".npy")) return parseNpy(buffer);
  if (name.endsWith(".smtx")) return parseSmtx(buffer);
  throw new Error(`file must end in .npy, .smtx or .smtx.gz, got ${file.name}; for others run: magicube explore ${file.name}`);
}

// ---- bits, for links and for masks that Python wrote into the page

// A bit per cell, rows without gaps, the low bit of a byte first; in base64 for addresses.
function packBits(mask) {
  const bytes = new Uint8Array(Math.ceil((mask.rows * mask.cols) / 8));
  for (let r = 0, i = 0; r < mask.rows; ++r) for (let c = 0; c < mask.cols; ++c, ++i) bytes[i >> 3] |= getCell(mask, r, c) << (i & 7);
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

function unpackBits(rows, cols, unit, base64) {
  const mask = makeMask(rows, cols, unit), text = atob(base64.replaceAll("-", "+").replaceAll("_", "/"));
  if (8 * text.length < rows * cols) throw new Error(`mask must have ${rows * cols} bits, got ${8 * text.length}`);
  const bytes = Uint8Array.from(text, letter => letter.charCodeAt(0));
  return fillMask(mask, i => (bytes[i >> 3] >> (i & 7)) & 1);
}

// Vectors of V rows stored with probability `density` each: a linear congruential generator, so that a link repeats it.
function randomMask(rows, cols, density, v, seed) {
  const mask = makeMask(rows, cols), { width, bits } = mask, limit = density * 4294967296;
  let state = (seed * 2654435761 + 12345) >>> 0;
  for (let r = 0; r < rows; r += v) {
    for (let c = 0; c < cols; ++c) {
      state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
      const mixed = Math.imul(state ^ (state >>> 15), 2246822519) >>> 0;  // low bits of the state alone repeat early
      if ((mixed ^ (mixed >>> 13)) >>> 0 < limit) bits[r * width + (c >>> 5)] |= 1 << (c & 31);
    }
    for (let i = r + 1; i < Math.min(r + v, rows); ++i) bits.copyWithin(i * width, r * width, (r + 1) * width);
  }
  return mask;
}

// ---- vectors

// Vector rows of `height` mask rows: the columns with a nonzero cell.
function columnsOf(mask, height) {
  const { rows, width, bits } = mask, count = Math.ceil(rows / height), offsets = new Int32Array(count + 1), any = new Uint32Array(width);
  let columns = new Int32Array(1 << 16), used = 0;
  for (let r = 0; r < count; ++r) {
    any.fill(0);
    const end = Math.min(rows, (r + 1) * height) * width;
    for (let at = r * height * width, w = 0; at < end; ++at) {
      any[w] |= bits[at];
      if (++w === width) w = 0;
    }
    if (used + 32 * width > columns.length) {
      const larger = new Int32Array(Math.max(2 * columns.length, used + 32 * width));
      larger.set(columns.subarray(0, used));
      columns = larger;
    }
    for (let w = 0; w < width; ++w)
      for (let word = any[w]; word; word &= word - 1) columns[used++] = 32 * w + 31 - Math.clz32(word & -word);
    offsets[r + 1] = used;
  }
  return { offsets, columns: columns.subarray(0, used) };
}

function countElements(mask) {
  let count = 0;
  for (let word of mask.bits) {
    word -= (word >>> 1) & 0x55555555;
    word = (word & 0x33333333) + ((word >>> 2) & 0x33333333);
    count += Math.imul((word + (word >>> 4)) & 0x0f0f0f0f, 0x01010101) >>> 24;
  }
  return count;
}

// What `make` returns for a mask, kept until the mask is painted.
function kept(mask, key, make) {
  if (!mask.patterns.has(key)) mask.patterns.set(key, make());
  return mask.patterns.get(key);
}

// The pattern of V x 1 vectors that covers the mask. A row of an .smtx file is a vector row whatever V is.
function patternOf(mask, v) {
  return kept(mask, v, () => {
    const isVector = mask.unit === "vector", height = isVector ? 1 : v, m = isVector ? mask.rows * v : mask.rows;
    const found = { m, k: mask.cols, v, rows: Math.ceil(m / v), height, ...columnsOf(mask, height) };
    found.vectors = found.columns.length;
    // a last vector row may be cut: its vectors have fewer elements in the matrix
    const cut = found.rows * v - m, last = found.vectors - found.offsets[Math.max(0, found.rows - 1)];
    found.nnz = found.vectors * v - cut * last;
    found.elements = isVector ? found.nnz : countElements(mask);
    return found;
  });
}

// The pattern in vectors of at least `least` rows, as the GPU kernels multiply it.
function mergedPattern(mask, pattern, least) {
  if (pattern.v >= least) return pattern;
  const times = least / pattern.v, height = mask.unit === "vector" ? times : least;
  return kept(mask, `${pattern.v} merged`, () => {
    const made = columnsOf(mask, height);
    return { m: pattern.m, k: pattern.k, v: least, rows: Math.ceil(pattern.rows / times), ...made, vectors: made.columns.length };
  });
}
