// Pictures: the mask with its vectors, the lengths of the vector rows, and the roofline.
"use strict";

const PICTURE_WIDTH = 720, PICTURE_HEIGHT = 480, LENGTHS_HEIGHT = 140, PAINT_CELLS = 128;

function colorsOf(element) {
  const style = getComputedStyle(element), read = name => style.getPropertyValue(name).trim();
  return { element: read("--element"), fill: read("--fill"), padding: read("--padding"), line: read("--line"), ink: read("--ink"), paper: read("--paper"), focus: read("--focus") };
}

// Pixels of a cell if cells are drawn one by one, 0 if a pixel covers several.
function cellSize(mask) {
  const size = Math.floor(Math.min(PICTURE_WIDTH / mask.cols, PICTURE_HEIGHT / mask.rows));
  return size >= 4 ? Math.min(size, 24) : 0;
}

function drawMask(canvas, mask, pattern, cursor) {
  const size = cellSize(mask), colors = colorsOf(canvas);
  if (size) drawCells(canvas, mask, pattern, cursor, size, colors);
  else drawShares(canvas, mask, pattern, colors);
}

function drawCells(canvas, mask, pattern, cursor, size, colors) {
  const { rows, cols } = mask, { height } = pattern;
  canvas.width = cols * size + 1;
  canvas.height = rows * size + 1;
  const c = canvas.getContext("2d");
  c.fillStyle = colors.paper;
  c.fillRect(0, 0, canvas.width, canvas.height);
  c.strokeStyle = colors.line;
  c.beginPath();
  for (let r = 0; r <= rows; r += height) {
    c.moveTo(0, r * size + 0.5);
    c.lineTo(cols * size, r * size + 0.5);
  }
  c.stroke();
  for (let r = 0; r < pattern.rows; ++r) {
    const top = r * height, end = Math.min(rows, top + height);
    for (let i = pattern.offsets[r]; i < pattern.offsets[r + 1]; ++i) {
      const col = pattern.columns[i];
      for (let row = top; row < end; ++row) {
        c.fillStyle = getCell(mask, row, col) ? colors.element : colors.fill;
        c.fillRect(col * size + 1, row * size + 1, size - 1, size - 1);
      }
      c.strokeStyle = colors.ink;  // around the vector
      c.strokeRect(col * size + 0.5, top * size + 0.5, size, (end - top) * size);
    }
  }
  if (!cursor) return;
  c.strokeStyle = colors.focus;
  c.lineWidth = 3;
  c.strokeRect(cursor.col * size + 1.5, cursor.row * size + 1.5, size - 2, size - 2);
}

// A pixel covers several cells: its strength is the share of stored vectors.
function drawShares(canvas, mask, pattern, colors) {
  const scale = Math.min(PICTURE_WIDTH / mask.cols, PICTURE_HEIGHT / mask.rows, 3);
  const width = Math.max(1, Math.round(mask.cols * scale)), height = Math.max(1, Math.round(mask.rows * scale));
  canvas.width = width;
  canvas.height = height;
  const counts = new Int32Array(width * height), places = new Int32Array(mask.cols);
  for (let col = 0; col < mask.cols; ++col) places[col] = Math.floor((col * width) / mask.cols);
  const c = canvas.getContext("2d"), image = c.createImageData(width, height);
  const tops = r => Math.floor((Math.min(r, pattern.rows) * height) / pattern.rows);
  for (let r = 0; r < pattern.rows; ++r) {
    const base = Math.min(height - 1, tops(r)) * width;
    for (let i = pattern.offsets[r]; i < pattern.offsets[r + 1]; ++i) counts[base + places[pattern.columns[i]]]++;
  }
  for (let r = 0; r < pattern.rows; ++r)  // a vector row taller than a pixel fills all of its pixels
    for (let y = tops(r) + 1; y < tops(r + 1); ++y) counts.copyWithin(y * width, tops(r) * width, (tops(r) + 1) * width);
  const full = Math.max(1, (pattern.rows / height) * (mask.cols / width)), [red, green, blue] = rgb(colors.element);
  const pixels = new Uint32Array(image.data.buffer), opaque = (blue << 16) | (green << 8) | red;  // little-endian RGBA
  for (let i = 0; i < counts.length; ++i)
    if (counts[i]) pixels[i] = opaque | (Math.round(60 + 195 * Math.min(1, counts[i] / full)) << 24);
  c.putImageData(image, 0, 0);
}

function rgb(hex) {
  return [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
}

// Bars of the lengths of vector rows, with padding above them; the longest rows of a pixel column count.
function drawLengths(canvas, pattern, stride) {
  const colors = colorsOf(canvas), width = Math.min(PICTURE_WIDTH, Math.max(120, pattern.rows * 12));
  canvas.width = width;
  canvas.height = LENGTHS_HEIGHT;
  const c = canvas.getContext("2d"), stored = new Int32Array(width), padded = new Int32Array(width);
  for (let x = 0; x < width; ++x) {
    const first = Math.floor((x * pattern.rows) / width), last = Math.max(first + 1, Math.floor(((x + 1) * pattern.rows) / width));
    for (let r = first; r < last; ++r) {
      const length = pattern.offsets[r + 1] - pattern.offsets[r];
      stored[x] = Math.max(stored[x], length);
      padded[x] = Math.max(padded[x], Math.ceil(length / stride) * stride);
    }
  }
  const most = Math.max(1, ...padded), gap = width / pattern.rows >= 6 ? 1 : 0;
  for (let x = 0; x < width; ++x) {
    if (gap && Math.floor(((x + 1) * pattern.rows) / width) !== Math.floor((x * pattern.rows) / width)) continue;
    const tall = Math.round((padded[x] / most) * (LENGTHS_HEIGHT - 4)), full = Math.round((stored[x] / most) * (LENGTHS_HEIGHT - 4));
    c.fillStyle = colors.padding;
    c.fillRect(x, LENGTHS_HEIGHT - tall, 1, tall);
    c.fillStyle = colors.element;
    c.fillRect(x, LENGTHS_HEIGHT - full, 1, full);
  }
  return most;
}

// Roofs: [name, operations per second, bytes per second or 0 for a flat one]; points: [name, op/B, op/s, color].
function rooflineSvg(roofs, points) {
  const width = 460, height = 320, left = 58, right = 12, top = 12, bottom = 50, peak = Math.max(...roofs.map(roof => roof[1]));
  const xs = points.map(p => p[1]), ys = points.map(p => p[2]);
  const low = Math.min(20, ...xs.map(x => x / 3)), high = Math.max(5000, ...xs.map(x => 3 * x));
  const floor = Math.min(peak / 200, ...ys.map(y => y / 5)), ceiling = Math.max(peak * 4, ...ys.map(y => 3 * y));
  const px = x => left + (Math.log(x / low) / Math.log(high / low)) * (width - left - right);
  const py = y => height - bottom - (Math.log(y / floor) / Math.log(ceiling / floor)) * (height - top - bottom);
  const parts = [], dashes = ["", "2 4", "8 4", "10 3 2 3"], unit = peak >= 1e13 ? [1e12, "TOP/s"] : [1e9, "GOP/s"];
  const show = value => (value >= 1 ? String(Math.round(value)) : String(Number(value.toPrecision(1))));
  for (let e = Math.ceil(Math.log10(low)); 10 ** e <= high; ++e)
    parts.push(`<line x1="${px(10 ** e)}" x2="${px(10 ** e)}" y1="${top}" y2="${height - bottom}" stroke="var(--line)"/><text x="${px(10 ** e)}" y="${height - bottom + 19}" text-anchor="middle">${show(10 ** e)}</text>`);
  for (let e = Math.ceil(Math.log10(floor)); 10 ** e <= ceiling; ++e)
    parts.push(`<line y1="${py(10 ** e)}" y2="${py(10 ** e)}" x1="${left}" x2="${width - right}" stroke="var(--line)"/><text x="${left - 6}" y="${py(10 ** e) + 5}" text-anchor="end">${show(10 ** e / unit[0])}</text>`);
  roofs.forEach(([name, most, slope], i) => {
    const bend = slope ? Math.min(Math.max(most / slope, low), high) : low, start = slope ? Math.max(low, floor / slope) : low, first = slope ? slope * start : most;
    parts.push(`<polyline fill="none" stroke="var(--soft)" stroke-width="1.6" stroke-dasharray="${dashes[i % 4]}" points="${px(start)},${py(first)} ${px(bend)},${py(most)} ${px(high)},${py(most)}"/>`);
    if (!slope && most === peak && roofs.length > 1) parts.push(`<text x="${left + 4}" y="${py(most) - 7}">${name}</text>`);  // no line comes there
    else if (!slope) parts.push(`<text x="${width - right - 4}" y="${py(most) + 18}" text-anchor="end">${name}</text>`);
    else {  // the first line has its name below, the second above
      const at = start * (bend / start) ** 0.45, angle = (-Math.atan2(py(first) - py(most), px(bend) - px(start)) * 180) / Math.PI;
      parts.push(`<text transform="translate(${px(at)},${py(at * slope)}) rotate(${angle})" dy="${i % 2 ? -7 : 17}" text-anchor="middle">${name}</text>`);
    }
  });
  const places = points.map(p => [px(p[1]), py(p[2])]), isNear = points.length > 1 && Math.abs(places[0][1] - places[1][1]) < 40 && Math.abs(places[0][0] - places[1][0]) < 150;
  points.forEach(([name, , , color], i) => {
    const [x, y] = places[i], mark = i ? `<rect x="${x - 6}" y="${y - 6}" width="12" height="12" fill="${color}"/>` : `<circle cx="${x}" cy="${y}" r="7" fill="${color}"/>`;
    const below = isNear ? y > places[1 - i][1] : y > top + 80, middle = Math.min(Math.max(x, left + 70), width - right - 70);
    parts.push(`${mark}<text class="point" x="${middle}" y="${below ? y + 24 : y - 13}" text-anchor="middle">${name}</text>`);
  });
  parts.push(`<text x="${(left + width) / 2}" y="${height - 8}" text-anchor="middle">useful operations per byte moved</text>`);
  parts.push(`<text transform="translate(14,${(height - bottom) / 2}) rotate(-90)" text-anchor="middle">useful ${unit[1]}</text>`);
  const words = points.map(p => `${p[0]}: ${p[1].toPrecision(3)} operations per byte, ${(p[2] / unit[0]).toPrecision(3)} ${unit[1]}`).join("; ");
  return `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="Roofline. ${words}">${parts.join("")}</svg>`;
}
