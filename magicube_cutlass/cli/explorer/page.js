// The page: its state, which the link carries, the controls, and what they show.
"use strict";

const NEAREST = 5, SHOWN_SLOTS = 64, LINK_CELLS = 2 ** 16, CLOSE = 1.2;
const $ = id => document.getElementById(id);

function number(value, digits = 3) {
  if (value >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

function percent(share) {
  return `${number(100 * share)}%`;
}

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function cell(text, isNumber) {
  return element("td", text, isNumber ? { class: "number" } : {});
}

function barCell(share) {
  const td = element("td", undefined, { class: "bars", "aria-hidden": "true" }), bar = element("div", undefined, { class: "bar" });
  bar.style.width = `${100 * share}%`;
  td.append(bar);
  return td;
}

function startPage(data) {
  const state = { v: 8, pair: [8, 8], n: 512, stride: 32, machine: data.machines[0], threads: data.machines[0].threads ?? 1 };
  let mask = null, source = null, shown = null, cursor = { row: 0, col: 0 }, written = "";

  // ---- link

  function linkText() {
    const settings = { v: state.v, bits: state.pair.join("x"), n: state.n, stride: state.stride };
    settings.machine = state.machine.here ? "this-cpu" : state.machine.name.replaceAll(" ", "-");
    if (state.machine.kind === "cpu") settings.threads = state.threads;
    settings.mask = source.kind === "random" ? source.text
      : mask.rows * mask.cols <= LINK_CELLS ? `bits:${mask.unit}:${mask.rows}x${mask.cols}:${packBits(mask)}` : `file:${source.name}`;
    return Object.entries(settings).map(([name, value]) => `${name}=${encodeURIComponent(value).replaceAll("%3A", ":")}`).join("&");
  }

  function writeLink() {
    written = `#${linkText()}`;
    try {
      history.replaceState(null, "", written);
    } catch {
      location.hash = written;  // an opaque origin may not replace its state
    }
    $("link").value = location.href;
    $("link-help").textContent = source.kind !== "random" && mask.rows * mask.cols > LINK_CELLS ? `The link names ${source.name}; its mask is too large for a link.` : "";
  }

  // Settings of the link; of the mask, what is to be made.
  function readLink() {
    const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1))), c = data.constants;
    const pick = (name, known) => { if (known.includes(Number(given[name]))) state[name] = Number(given[name]); };
    pick("v", c.lengths);
    pick("stride", c.strides);
    const pair = (given.bits ?? "").split("x").map(Number), n = Math.floor(Number(given.n)), threads = Math.floor(Number(given.threads));
    if (c.pairs.some(each => each.join() === pair.join())) state.pair = pair;
    if (n >= 1 && n <= 1048576) state.n = n;
    const machine = data.machines.find(each => (each.here ? "this-cpu" : each.name.replaceAll(" ", "-")) === given.machine);
    if (machine) [state.machine, state.threads] = [machine, machine.threads ?? 1];
    if (threads >= 1 && threads <= 512) state.threads = threads;
    return given.mask ?? "";
  }

  function maskOfLink(text) {
    const [kind, ...rest] = text.split(":");
    if (kind === "random") {
      const [rows, cols] = rest[0].split("x").map(Number), [density, v, seed] = rest.slice(1).map(Number);
      if (![rows, cols, v, seed].every(Number.isInteger) || v < 1 || !(density >= 0 && density <= 1)) throw new Error(`mask of the link must be random:ROWSxCOLUMNS:DENSITY:V:SEED, got ${text.slice(0, 60)}`);
      [$("rows").value, $("cols").value, $("density").value] = [rows, cols, density];
      return [randomMask(rows, cols, density, v, seed), { kind, text, name: "random vectors" }];
    }
    if (kind === "bits") {
      const [rows, cols] = rest[1].split("x").map(Number);
      return [unpackBits(rows, cols, rest[0] === "vector" ? "vector" : "element", rest[2]), { kind: "painted", name: "mask of the link" }];
    }
    throw new Error(`the link has the settings, not the mask: drop ${rest.join(":") || "a file"} here`);
  }

  // ---- what is shown

  // Dense products of torch: measured at this very shape, else from the fit.
  function denseOf(f) {
    return f.fits.map(fit => {
      const found = data.dense_times[fit.name].find(([m, k, n]) => m === f.m && k === f.k && n === f.n), error = data.dense_fits.find(each => each.name === fit.name).median_error;
      return found ? { name: fit.name, us: found[3], known: "measured at this shape" } : { ...fit, known: `fit to measurements, median error ${percent(error)}` };
    });
  }

  // The fastest dense product; of more than 8 bits fp16 where there is one, since products of 8 bits are less accurate.
  function rivalOf(f) {
    const ours = { name: "dense int8 of this library", us: f.dense_us }, torch = denseOf(f), half = torch.find(dense => dense.name === "dense fp16");
    return Math.max(...state.pair) > 8 && half ? half : [ours, ...torch].sort((a, b) => a.us - b.us)[0];
  }

  function showVerdict(f) {
    const dense = rivalOf(f), ratio = dense.us / f.sparse_us, isBased = state.machine.here || state.machine.measured, text = $("verdict");
    const [yes, no] = isBased ? ["Yes", "No"] : ["Perhaps", "Probably not"];
    const word = ratio > CLOSE ? yes : ratio < 1 / CLOSE ? no : "Too close to call";
    const times = ratio >= 1 ? `${number(ratio, 3)}x faster` : `${number(1 / ratio, 3)}x slower`;
    text.replaceChildren(element("strong", `${word}: ${times}.`), ` On ${state.machine.name}, the sparse product is predicted to take ${number(f.sparse_us)} us, and ${dense.name} ${number(dense.us)} us.` + (isBased ? "" : " Nothing was measured on it."));
    text.dataset.ratio = ratio;
    text.dataset.us = f.sparse_us;
  }

  function showTimes(f) {
    const isBased = state.machine.kind === "cpu" || state.machine.measured;
    const how = isBased ? "predicted" : "predicted, constants of the H200";
    const rows = [["sparse, magicube", f.sparse_us, how, true], ["dense int8, magicube", f.dense_us, how]];
    for (const dense of denseOf(f)) rows.push([`${dense.name}, torch`, dense.us, dense.known]);
    const most = Math.max(...rows.map(row => row[1]));
    $("times").tBodies[0].replaceChildren(...rows.map(([name, us, known, isOurs]) => {
      const tr = element("tr", undefined, isOurs ? { class: "ours" } : {});
      tr.append(cell(name), cell(number(us), true), cell(known), barCell(us / most));
      return tr;
    }));
    const bits = state.pair.some(b => b > 8) ? " The dense products of 8 bits are less accurate; the answer compares with fp16 where it was measured." : "";
    const merged = f.merged && f.merged !== f.pattern ? ` Vectors are merged to ${f.merged.v} rows: ${number(f.merged.vectors)} of them.` : "";
    const machine = f.fits.length || state.machine.kind === "cpu" ? "" : ` ${state.machine.name}: no dense fp16 or fp8 product was measured, and the constants are those of the H200.`;
    const host = state.machine.measured && f.sparse_us < data.host_us ? ` Outside of a CUDA graph a call takes the host about ${number(data.host_us)} us (median of the measured calls), longer than the product.` : "";
    $("kernel").textContent = (f.kernel ? `Kernel: ${f.kernel}.` : `CPU engine, ${state.threads} thread${state.threads > 1 ? "s" : ""}. ${state.machine.here ? "The constants were measured on this machine." : "Default constants; run `magicube explore` for those of your CPU."}`) + merged + machine + bits + host;
  }

  function showPattern(f) {
    const fill = f.nnz - f.elements, mean = f.vectors / f.vector_rows;
    $("facts").textContent = `${source.name}: ${f.m} x ${f.k}, ${number(f.vector_rows)} vector rows of V = ${state.v}. ${number(f.vectors)} vectors, density ${number(f.density)}` +
      (fill ? `; the ${number(f.elements)} elements (density ${number(f.element_density)}) fill ${percent(f.elements / f.nnz)} of their places.` : ".") +
      ` Per vector row: mean ${number(mean)}, longest ${f.longest}, ${f.empty} empty. Padding to stride ${state.stride}: ${number(f.padding)} vectors, ${percent(f.padding / Math.max(1, f.padded))} of what is stored.`;
    drawMask($("picture"), mask, f.pattern, document.activeElement === $("picture") && canPaint() ? cursor : null);
    const most = drawLengths($("lengths"), f.pattern, state.stride);
    $("lengths").setAttribute("aria-label", `Bar chart: up to ${most} vectors with padding in ${f.vector_rows} vector rows, mean ${number(mean)}`);
    const what = mask.unit === "vector" ? "Each cell is a vector of the .smtx file." : "";
    $("paint-help").textContent = canPaint() ? `Paint: click or drag; or arrow keys, and Space to switch a cell. ${what}` : `${what} Masks up to ${PAINT_CELLS} x ${PAINT_CELLS} can be painted.`;
    $("picture").setAttribute("aria-label", `Mask of ${mask.rows} x ${mask.cols}, ${canPaint() ? "paint with arrow keys and Space" : "picture"}`);
    $("picture").dataset.paint = canPaint() ? "yes" : "no";
  }

  function showStorage(f) {
    const bits = Math.max(4, state.pair[0] > 8 ? 16 : state.pair[0]), most = Math.max(...Object.values(f.bytes));
    $("storage").tBodies[0].replaceChildren(...Object.entries(f.bytes).map(([name, bytes]) => {
      const tr = element("tr", undefined, name === `SR-BCRS int${bits}` ? { class: "ours" } : {});
      tr.append(cell(name), cell(bytes.toLocaleString("en-US"), true), cell(`${(bytes / f.bytes["dense int8"]).toFixed(2)}x`, true), barCell(bytes / most));
      return tr;
    }));
  }

  function showOrder(f) {
    const pattern = f.merged ?? f.pattern, row = Math.min(Math.max(0, Math.floor(Number($("row").value) || 0)), pattern.rows - 1), { config } = f;
    $("row").max = pattern.rows - 1;
    const columns = pattern.columns.subarray(pattern.offsets[row], pattern.offsets[row + 1]), group = config ? config.mma_k : state.stride;
    const isPanel = config?.kind === "panel", tiles = isPanel ? Math.ceil(pattern.k / config.tile) : 1;
    const slots = isPanel ? orderedSlots(columns, config.tile, tiles, group, config.tile_window) : Int32Array.from(columns, (_, i) => i);
    const placed = slotColumns(columns, slots, group), count = Math.min(SHOWN_SLOTS, placed.columns.length), width = 16;
    const colors = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#4f94c4", "#d98a5b", "#cc79a7", "#b0b0b0"], lines = [];
    for (let first = 0; first < count; first += width) {
      const tr = element("tr");
      tr.append(element("th", `${first}`, { scope: "row", title: "first slot" }));
      for (let slot = first; slot < Math.min(first + width, count); ++slot) {
        const c = placed.columns[slot], isPad = placed.isPadding[slot] === 1, td = element("td", isPad ? "pad" : String(c), isPad ? { class: "pad" } : {});
        if (isPanel && !isPad) Object.assign(td.style, { background: colors[c % PHASE], color: "#000" });
        td.title = isPad ? "padding" : `column ${c}, banks ${4 * (c % PHASE)} to ${4 * (c % PHASE) + 3} of its first 16 bytes`;
        tr.append(td);
      }
      lines.push(tr);
    }
    $("order").tBodies[0].replaceChildren(...lines);
    $("order-caption").textContent = count ? `Vector row ${row}: columns in the first ${count} of ${placed.columns.length} slots, 16 per line, groups of ${group}` : `Vector row ${row} is empty`;
    const b = f.bank;
    if (b) {
      const natural = b.natural / Math.max(1, b.natural_reads), ordered = b.ordered / Math.max(1, b.ordered_reads);
      $("bank").textContent = `The panel kernel reads 8 rows of B at once from shared memory. In the order that it uses a read takes ${number(ordered)} wavefronts, in column order ${number(natural)}; 1 is without conflicts (${b.rows} of ${pattern.rows} vector rows counted).`;
    } else {
      $("bank").textContent = config?.kind === "resident" ? "The resident kernel holds its rows of B in shared memory for good, and takes the columns of a vector row in any order: few bank conflicts remain." : config ? "The gather kernel copies each row of B to its slot: no bank conflicts, whatever the columns are." : "The CPU engine reads rows of B by column index, in column order; a CPU has no banks.";
    }
    const orders = config ? data.constants.gather_order[f.atom] : null;
    $("order-note").textContent = (isPanel ? "One color per column mod 8: columns of one color share banks. " : "") + (orders ? `Instruction ${f.atom}: its k reads the slots ${orders.slice(0, 12).join(", ")}, ...` : "");
  }

  function showRoofline(f) {
    const dense = [`dense int8: ${number(f.dense_us)} us`, 0, 0, "var(--dense)"], operations = 2 * f.m * f.k * f.n, output = state.machine.kind === "gpu" ? 2 : 4;
    dense[1] = operations / (f.m * f.k + f.k * f.n + f.m * f.n * output);
    dense[2] = (operations / f.dense_us) * 1e6;
    const points = [[`sparse: ${number(f.sparse_us)} us`, Math.max(f.operations, 1) / f.moved, (Math.max(f.operations, 1) / f.sparse_us) * 1e6, "var(--element)"], dense];
    const r = data.roofline, cpu = state.machine.costs, roofs = [];
    if (state.machine.name === r.machine) {
      roofs.push([`HBM ${r.memory / 1e12} TB/s`, r.mma, r.memory], [`L2 ${r.l2 / 1e12} TB/s`, r.mma, r.l2]);
      roofs.push([`gather ${number(r.gathered / 1e12)} TOP/s`, r.gathered, 0], [`mma ${number(r.mma / 1e12)} TOP/s`, r.mma, 0]);
    }
    const rate = cpu?.sparse[1] > 0 ? (4096 * state.threads * 1e9) / cpu.sparse[1] : 0;  // a group: 4 vectors of 8 rows, 64 columns
    if (rate) roofs.push(["", rate, 0]);
    $("roofline").innerHTML = roofs.length ? rooflineSvg(roofs, points) : "";
    const lines = cpu ? `The line, ${number(rate / 1e9)} GOP/s, is the cost model's rate of the sparse kernel alone.` : "The lines were measured on an NVIDIA H200: memory, L2 cache, gathered reads of shared memory at 8 bits, mma instructions.";
    $("roofline-note").textContent = roofs.length ? `Both axes logarithmic. Useful operations: 2 per stored element (dense: per element) and column of B. Points are predicted. ${lines}` : `No roofline was measured on ${state.machine.name}.`;
  }

  function showMeasured(f) {
    const isGpu = state.machine.kind === "gpu", pair = `L${state.pair[0]}-R${state.pair[1]}`;
    const far = (a, b) => Math.abs(Math.log2(Math.max(a, 1e-4) / Math.max(b, 1e-4)));
    const away = row => far(row.shape[0], f.m) + far(row.shape[1], f.k) + far(row.shape[2], f.n) + far(row.density, f.density) + 2 * far(row.v, state.v) + (row.pair === pair ? 0 : 2);
    const rows = data.measured.filter(row => (data.sources[row.file].kind === "gpu") === isGpu).map(row => [away(row), row]).sort((a, b) => a[0] - b[0]).slice(0, NEAREST).map(row => row[1]);
    const head = element("tr");
    for (const name of ["M x K x N", "density", "V", "bits", "magicube, us", "dense, us", "speed-up", "file"]) head.append(element("th", name, { scope: "col", ...(["magicube, us", "speed-up"].includes(name) ? { class: "number" } : {}) }));
    $("measured").tHead.replaceChildren(head);
    $("measured").tBodies[0].replaceChildren(...rows.map(row => {
      const tr = element("tr"), dense = Object.entries(row.dense).sort((a, b) => a[1] - b[1]), best = dense[0];
      tr.append(cell(row.shape.join(" x ")), cell(number(row.density)), cell(String(row.v)), cell(row.pair), cell(number(row.us), true),
        element("td", dense.map(([name, us]) => `${name.replace("dense ", "")} ${number(us)}`).join(", "), { class: "list" }), cell(best ? `${(best[1] / row.us).toFixed(2)}x` : "-", true), cell(row.file));
      return tr;
    }));
    $("measured-caption").textContent = `Measured, not predicted: the ${rows.length} products nearest to yours. Speed-up: against the fastest dense one.`;
    const files = [...new Set(rows.map(row => row.file)), ...(isGpu ? ["dlmc_h200"] : [])];
    $("sources").replaceChildren(...files.map(name => {
      const s = data.sources[name];
      return element("li", `${s.file}: ${s.machine}, torch ${s.torch}, ${s.date}, commit ${s.commit}${name === "dlmc_h200" && !rows.some(row => row.file === name) ? " (dense products of the fit)" : ""}`);
    }));
  }

  function update() {
    const start = performance.now();
    const f = figures(data, mask, state);
    shown = f;
    showVerdict(f);
    showTimes(f);
    showPattern(f);
    showStorage(f);
    showOrder(f);
    showRoofline(f);
    showMeasured(f);
    const ms = performance.now() - start;
    writeLink();
    $("threads-field").hidden = state.machine.kind !== "cpu";
    $("elapsed").textContent = `This page took ${number(ms, 2)} ms. magicube ${data.version}.`;
    document.body.dataset.ms = ms;
  }

  function show(made, from) {
    [mask, source, cursor] = [made, from, { row: 0, col: 0 }];
    $("error").hidden = true;
    update();
  }

  function attempt(work) {
    const failed = error => {
      $("error").textContent = error.message;
      $("error").hidden = false;
    };
    try {
      const found = work();
      if (found?.catch) found.catch(failed);
    } catch (error) {
      failed(error);
    }
  }

  // ---- controls

  function fillControls() {
    const options = (id, pairs) => $(id).replaceChildren(...pairs.map(([value, text]) => element("option", text, { value })));
    options("v", data.constants.lengths.map(v => [v, v]));
    options("pair", data.constants.pairs.map(([a, b]) => [`${a}x${b}`, `${a} and ${b}`]));
    options("stride", data.constants.strides.map(s => [s, s]));
    options("machine", data.machines.map((machine, i) => [i, machine.name + (machine.kind === "cpu" || machine.measured ? "" : " (not measured)")]));
    $("fit-note").textContent = "Dense products of torch on the H200: " + data.dense_fits.map(fit => `${fit.name}: ${fit.shapes} shapes, median error ${percent(fit.median_error)}, nine of ten below ${percent(fit.p90_error)}`).join("; ") + ".";
  }

  function showControls() {
    [$("v").value, $("pair").value, $("n").value, $("stride").value] = [state.v, state.pair.join("x"), state.n, state.stride];
    [$("machine").value, $("threads").value] = [data.machines.indexOf(state.machine), state.threads];
  }

  function readControls(event) {
    if (!["v", "pair", "n", "stride", "machine", "threads"].includes(event.target.id)) return;
    const whole = (id, least, most, old) => {
      const value = Math.floor(Number($(id).value));
      return value >= least && value <= most ? value : old;
    };
    [state.v, state.stride, state.pair] = [Number($("v").value), Number($("stride").value), $("pair").value.split("x").map(Number)];
    state.n = whole("n", 1, 1048576, state.n);
    const machine = data.machines[Number($("machine").value)];
    if (machine !== state.machine) $("threads").value = machine.threads ?? 1;
    state.machine = machine;
    state.threads = whole("threads", 1, 512, state.threads);
    attempt(update);
  }

  async function take(file) {
    const start = performance.now();
    show(await readFile(file), { kind: "file", name: file.name });
    document.body.dataset.fileMs = performance.now() - start;
  }

  function makeRandom() {
    const rows = Number($("rows").value), cols = Number($("cols").value), density = Number($("density").value), seed = Math.floor(Math.random() * 1e6);
    const text = `random:${rows}x${cols}:${density}:${state.v}:${seed}`;
    attempt(() => show(...maskOfLink(text)));
  }

  // ---- painting

  function canPaint() {
    return mask.rows <= PAINT_CELLS && mask.cols <= PAINT_CELLS && cellSize(mask) > 0;
  }

  function paint(row, col, value) {
    setCell(mask, row, col, value);
    source = { kind: "painted", name: "painted mask" };
    $("cell").textContent = `row ${row}, column ${col}: ${value ? "set" : "empty"}`;
    update();
  }

  function place(event) {
    const box = $("picture").getBoundingClientRect();
    const col = Math.floor(((event.clientX - box.left) / box.width) * mask.cols), row = Math.floor(((event.clientY - box.top) / box.height) * mask.rows);
    return row >= 0 && col >= 0 && row < mask.rows && col < mask.cols ? { row, col } : null;
  }

  function connectPainting() {
    const picture = $("picture");
    let brush = null;
    picture.addEventListener("pointerdown", event => {
      const at = place(event);
      if (!at || !canPaint()) return;
      picture.setPointerCapture(event.pointerId);
      brush = 1 - getCell(mask, at.row, at.col);
      cursor = at;
      paint(at.row, at.col, brush);
    });
    picture.addEventListener("pointermove", event => {
      const at = brush === null ? null : place(event);
      if (at && getCell(mask, at.row, at.col) !== brush) paint(at.row, at.col, brush);
    });
    for (const end of ["pointerup", "pointercancel"]) picture.addEventListener(end, () => { brush = null; });
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    picture.addEventListener("keydown", event => {
      if (!canPaint()) return;
      const move = moves[event.key], here = () => getCell(mask, cursor.row, cursor.col);
      if (move) {
        cursor = { row: Math.min(mask.rows - 1, Math.max(0, cursor.row + move[0])), col: Math.min(mask.cols - 1, Math.max(0, cursor.col + move[1])) };
        $("cell").textContent = `row ${cursor.row}, column ${cursor.col}: ${here() ? "set" : "empty"}`;
        drawMask(picture, mask, shown.pattern, cursor);
      } else if (event.key === " " || event.key === "Enter") paint(cursor.row, cursor.col, 1 - here());
      else return;
      event.preventDefault();
    });
    for (const name of ["focus", "blur"]) picture.addEventListener(name, () => drawMask(picture, mask, shown.pattern, name === "focus" && canPaint() ? cursor : null));
  }

  function connect() {
    $("form").addEventListener("change", readControls);
    $("form").addEventListener("submit", event => event.preventDefault());
    $("n").addEventListener("input", readControls);
    $("row").addEventListener("input", () => showOrder(shown));
    $("random").addEventListener("click", makeRandom);
    $("blank").addEventListener("click", () => attempt(() => show(makeMask(32, 64), { kind: "painted", name: "painted mask" })));
    $("file").addEventListener("change", () => { if ($("file").files.length) attempt(() => take($("file").files[0])); });
    $("file").addEventListener("click", () => { $("file").value = ""; });  // so that the same file can be chosen again
    $("copy").addEventListener("click", async () => {
      $("link").select();
      try {
        await navigator.clipboard.writeText($("link").value);
        $("link-help").textContent = "Copied.";
      } catch {
        $("link-help").textContent = "Selected: copy it with Ctrl+C.";
      }
    });
    for (const name of ["dragover", "dragleave", "drop"]) document.addEventListener(name, event => {
      event.preventDefault();
      $("drop").classList.toggle("over", name === "dragover");
      if (name === "drop" && event.dataTransfer.files.length) attempt(() => take(event.dataTransfer.files[0]));
    });
    addEventListener("hashchange", () => { if (location.hash !== written) attempt(open); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => attempt(update));
    connectPainting();
  }

  function open() {
    const text = readLink(), first = data.start;
    let failure = null;
    if (first?.v && !location.hash) state.v = first.v;
    showControls();
    if (text && !(first && text === `file:${first.name}`)) {
      try {
        show(...maskOfLink(text));
        return;
      } catch (error) {
        failure = error;
      }
    }
    if (first) show(unpackBits(first.rows, first.cols, first.unit, first.bits), { kind: "file", name: first.name });
    else if (!mask) show(...maskOfLink("random:2048x2048:0.1:8:1"));
    if (failure) throw failure;
  }

  fillControls();
  connect();
  attempt(open);
}
