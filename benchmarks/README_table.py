"""Render the tables of ``docs/performance`` and ``docs/lab``.  Run: ``python benchmarks/README_table.py``"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from harness.dlmc_tables import DENSE_PRODUCTS, render_dlmc
from harness.tables import machine_line, run_line

from magicube_cutlass.bench.layers import OURS, LayerTimes

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
CPU, LAYERS, GPU = "cpu-table", "cpu-layers", "gpu-table"
LAYER_TOKENS, DENSITIES = (1, 16, 400), (0.02, 0.1, 0.3, 0.6)
COLUMNS = ("magicube", "dense", "scipy CSR float32", "torch CSR float32")
DLMC, LLM, COSTS, COMPENSATED = "dlmc", "llm", "one-time-costs", "compensated"
FLOATS, ATTENTION, CHOOSE, GEMM, GEMM_H100 = "floats", "attention", "choose", "gemm", "gemm on an H100"
FLOAT_FORMATS = ("e5m2", "e4m3", "e3m2", "e2m3", "e2m1")
GPU_BASELINES = ("dense fp16", "dense int8", "dense fp8", "magicube dense int8", "2:4 int8", "BSR fp16 32",
                 "Blocked-ELL int8 16")  # fmt: skip


def _break_even_line(size: dict[str, Any]) -> str:
    lowest, highest = (size["rows"][i]["density"] for i in (0, -1))
    first, parts = size["rows"][0]["ms"], []
    for name, value in size["break_even"].items():
        beyond = f"below {lowest:g}" if first[name] > first["dense"] else f"above {highest:g}"
        parts.append(f"{name} {beyond if value is None else f'{value:.2f}'}")
    return f"Density at which it takes as long as the dense product, n = {size['n']}: " + ", ".join(parts) + "."


def render_cpu() -> str:
    """The tables of the CPUs in Markdown: with AMX, with AVX512-VNNI, and with neither."""
    files = [RESULTS / f"cpu_spmm{suffix}.json" for suffix in ("_amx", "", "_avx2")]
    return "\n\n".join(render(json.loads(file.read_text()), DENSITIES) for file in files if file.is_file())


def render(results: dict[str, Any], densities: tuple[float, ...] = ()) -> str:
    """The table in Markdown: all densities, or these."""
    machine = results["machine"]
    lines = [
        f"{machine['cpu']}, engine path {machine['engine path']}, torch {machine['torch']}, {run_line(results)}; "
        "one thread, V = 8, L8-R8, uniform pattern, n x n times n x n, milliseconds (median).",
        "",
        "| n | density | magicube | fastest dense | its kind | scipy CSR fp32 | torch CSR fp32 |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in results["sizes"]:
        for row in (row for row in size["rows"] if not densities or row["density"] in densities):
            cells = [f"{row['ms'][name]:.2f}" for name in COLUMNS]
            cells.insert(2, row.get("dense", "torch._int_mm"))
            lines.append(f"| {size['n']} | {row['density']:g} | " + " | ".join(cells) + " |")
    lines += ["", *(_break_even_line(size) for size in results["sizes"])]
    for pair in results.get("two_threads", []):
        lines.append(
            f"Two threads, n = {pair['n']}, density {pair['density']:g}: {pair['speed_up']:.2f}x by the medians, "
            f"{pair['lower_quartile_speed_up']:.2f}x by the lower quartiles (dense {pair['dense_speed_up']:.2f}x, "
            f"{pair['dense_lower_quartile_speed_up']:.2f}x)."
        )
    return "\n".join(lines)


def render_layers() -> str:
    """The tables of whole layers in Markdown, one per instruction set that was measured."""
    files = [RESULTS / f"cpu_layers_{isa}.json" for isa in ("amx", "avx512", "avx2", "avx2_held")]
    return "\n\n".join(render_layer_times(json.loads(file.read_text())) for file in files if file.is_file())


def render_layer_times(results: dict[str, Any]) -> str:
    """The table of whole layers on one CPU in Markdown, microseconds."""
    machine, rows = results["machine"], results["results"]
    found = [LayerTimes(row["out"], row["in"], row["tokens"], row["us"], row["median_us"]) for row in rows]
    found = [times for times in found if times.tokens in LAYER_TOKENS]
    ours = [name for name in found[0].us if name.startswith(OURS)]
    head = f"{machine['cpu']}, engine path {machine['engine path']}, torch {machine['torch']}, {run_line(results)}; "
    held = results["setting"].get("torch is held by", {})
    head += f"torch held by {', '.join(f'{name}={value}' for name, value in held.items())}; " if held else ""
    head += f"{results['setting']['threads']} thread, microseconds ({results['setting']['time'].partition(': ')[2]})."
    cells = [
        [f"{times.out} x {times.inner}", str(times.tokens), f"{times.baseline} {times.us[times.baseline]:.1f}",
         *(f"{times.us[name]:.1f}" for name in ours), " / ".join(f"{times.speed_up(name):.2f}" for name in ours)]
        for times in found
    ]  # fmt: skip
    return "\n".join([head, "", *_grid(["out x in", "tokens", "best baseline", *ours, "speed-up"], cells)])


def _microseconds(row: dict[str, Any] | None, bold: bool = False) -> str:
    """Behind another kernel and, in brackets, in a loop; the latter alone where nothing else was measured."""
    us = f"{row['us']:.1f}" if row and "us" in row else "-"
    if not (row and "behind_us" in row):
        return us
    behind = f"{row['behind_us']:.1f}"
    return f"{f'**{behind}**' if bold else behind} ({us})"


def render_gpu(results: dict[str, Any]) -> str:
    """The table of GPU products in Markdown: medians of launches in a CUDA graph, microseconds."""
    lines = [
        f"{machine_line(results)}; SpMM, L8-R8, "
        "V = 8, uniform pattern, float16 output with fused scales, microseconds behind another kernel and, in "
        "brackets, in a loop (medians, CUDA graph, operands in L2 where they fit). The fastest product of the same "
        "matrix is bold; 2:4 and blocks are other matrices.",
        "",
        "| M x K x N, sparsity | magicube | " + " | ".join(GPU_BASELINES) + " |",
        "|---" * (len(GPU_BASELINES) + 2) + "|",
    ]
    for case in results["spmm"]:
        m, k, n = case["shape"]
        baselines = {row["name"]: row for row in case["rivals"]}
        ours = next(row for row in case["ours"] if row["name"] == "L8-R8 V=8")
        found = [ours, *(baselines.get(name) for name in GPU_BASELINES)]
        same = [row["behind_us"] for row in found[:5] if row and "behind_us" in row]
        cells = [_microseconds(row, row is not None and row.get("behind_us") == min(same, default=0)) for row in found]
        lines.append(f"| {m} x {k} x {n}, {case['sparsity']:g} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "SDDMM, float16 output, microseconds:",
        "",
        "| M x N, inner, sparsity | L8-R8 | L16-R16 | L4-R4 | dense fp16 |",
        "|---|---|---|---|---|",
    ]
    for case in results["sddmm"]:
        m, n = case["shape"]
        rows = {row["name"]: row for row in [*case["ours"], *case["rivals"]]}
        cells = [_microseconds(rows.get(name)) for name in ("L8-R8", "L16-R16", "L4-R4", "dense fp16")]
        lines.append(f"| {m} x {n}, {case['inner']}, {case['sparsity']:g} | " + " | ".join(cells) + " |")
    hosts = {
        "`mc.spmm`": [row for case in results["spmm"] for row in case["ours"] if row["name"] == "L8-R8 V=8"],
        "`mc.sddmm`": [row for case in results["sddmm"] for row in case["ours"] if row["name"] == "L8-R8"],
        "torch's dense fp16 product": [
            row for case in results["spmm"] for row in case["rivals"] if row["name"] == "dense fp16"
        ],
    }
    text = ", ".join(f"{name} {median(row['enqueue_us'] for row in rows):.0f}" for name, rows in hosts.items())
    return "\n".join(
        [*lines, "", f"Microseconds of the host for a warm call, which are no part of the above (median): {text}."]
    )


def render_llm(results: dict[str, Any]) -> str:
    """A row a shape: every pair and sparsity of ours, the dense products; the fastest in bold."""
    columns = list(dict.fromkeys((row["pair"], row["sparsity"]) for case in results["cases"] for row in case["ours"]))
    lines = [
        f"{machine_line(results)}; SpMM with V = 8, uniform pattern, float16 output, microseconds, "
        f"{results['setting']['us']}; the fastest of a row in bold; dense products have B column-major.",
        "",
        "| M x K x N | " + " | ".join(f"{pair}, {sparsity:g}" for pair, sparsity in columns) + " | "
        + " | ".join(DENSE_PRODUCTS) + " |",
        "|---" * (len(columns) + len(DENSE_PRODUCTS) + 1) + "|",
    ]  # fmt: skip
    losses: list[float] = []
    for case in results["cases"]:
        rows = {(row["pair"], row["sparsity"]): row for row in case["ours"]}
        times = [rows.get(column, {}).get("us") for column in columns] + [
            case["dense"].get(name) for name in DENSE_PRODUCTS
        ]
        best = min((us for us in times if us is not None), default=None)
        cells = ("-" if us is None else f"**{us:.1f}**" if us == best else f"{us:.1f}" for us in times)
        lines.append(f"| {' x '.join(map(str, case['shape']))} | " + " | ".join(cells) + " |")
        for row in (row for row in case["ours"] if "dense_us" in row):
            takes = row["dense_us"] if row["predicted"]["dense"] < row["predicted"]["sparse"] else row["us"]
            losses.append(takes / min(row["us"], row["dense_us"]))
    if losses:
        right = sum(loss == 1 for loss in losses)
        text = f"`allow_dense=True` takes the faster product in {right} of {len(losses)} cases of L8-R8, and in the "
        text += f"worst one takes {max(losses):.2f} times as long; the copy of a row-major B is counted."
        lines += ["", text]
    return "\n".join(lines)


def _time_cell(cell: dict[str, Any] | None, name: str = "us") -> str:
    return f"{cell[name]:.4g}" if cell and name in cell else "-"


def render_costs(results: dict[str, Any]) -> str:
    """Times and bytes that are paid once for a matrix, a column each."""
    cases = results["cases"]
    head = [f"{' x '.join(map(str, case['shape'][:2]))}, {case['sparsity']:g}" for case in cases]
    rows: list[tuple[str, list[str]]] = [
        ("compile the kernel, s", [_time_cell(case["compile"], "compile_s") for case in cases]),
        ("the same from the disk, s", [_time_cell(case["compile"], "from_disk_s") for case in cases]),
    ]
    for source in ("from dense int8", "from dense float16, quantized"):
        rows.append((f"compress {source}, us", [_time_cell(case["compress"].get(source)) for case in cases]))
    copies = [case["copies"] if isinstance(case["copies"], list) else [] for case in cases]
    for kernel in ("spmm_panel", "spmm_gather"):
        found = [next((copy for copy in each if copy["kernel"].startswith(kernel)), None) for each in copies]
        rows.append((f"copy for {kernel}, us", [_time_cell(copy) for copy in found]))
        rows.append((f"copy for {kernel}, MB", [f"{copy['bytes'] / 1e6:.2f}" if copy else "-" for copy in found]))
    rows.append(("copy for `allow_dense`, us", [_time_cell(case["dense_copy"]) for case in cases]))
    for name in ("SR-BCRS", "CSR int8", "dense int8", "dense fp16"):
        rows.append((f"{name}, MB", [f"{case['memory'][name] / 1e6:.2f}" for case in cases]))
    products = [f"{case['product_us']:.1f}" if isinstance(case["product_us"], float) else "-" for case in cases]
    rows.append((f"one product, N = {', '.join(str(case['shape'][2]) for case in cases)}, us", products))
    lines = [f"{machine_line(results)}; L8-R8, V = 8; {results['setting']['us']}.", "",
             "| | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]  # fmt: skip
    return "\n".join([*lines, *(f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows)])


def _grid(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table with figures to the right of its first column."""
    return [
        f"| {' | '.join(head)} |",
        "|---" + "|---:" * (len(head) - 1) + "|",
        *(f"| {' | '.join(r)} |" for r in rows),
    ]


def render_floats(results: dict[str, Any]) -> str:
    """A row a product, a column a shape; then a grid of all pairs."""
    cases, pairs = results["products"], results["pairs"]
    known = [{row["name"]: row for row in case["products"]} for case in cases]
    names = list(dict.fromkeys(name for case in known for name in case))
    rows = [
        [name, *(_microseconds(case.get(name)) for case in known), f"{known[0][name]['error']:.1e}"]
        for name in names
        if name in known[0]
    ]
    us = {row["name"]: row for row in pairs["products"]}
    grid = [[a, *(_microseconds(us.get(f"{a} x {b}")) for b in FLOAT_FORMATS)] for a in FLOAT_FORMATS]
    shapes = [" x ".join(map(str, case["shape"])) for case in cases]
    return "\n".join([
        f"{machine_line(results)}; microseconds, {results['setting']['us']}; the error is that at {shapes[0]}.", "",
        *_grid(["M x K x N", *shapes, "error"], rows), "",
        f"All pairs at {' x '.join(map(str, pairs['shape']))}, left formats down:", "",
        *_grid(["", *FLOAT_FORMATS], grid),
    ])  # fmt: skip


def render_products(results: dict[str, Any]) -> str:
    """A row a product, a column a shape."""
    known = [{row["name"]: row for row in case["products"]} for case in results["products"]]
    rows = [[name, *(_microseconds(each.get(name)) for each in known), f"{row['error']:.1e}"]
            for name, row in known[0].items()]  # fmt: skip
    shapes = [" x ".join(map(str, case["shape"])) for case in results["products"]]
    return "\n".join([
        f"{machine_line(results)}; microseconds, {results['setting']['us']}; the error is that at {shapes[0]}.", "",
        *_grid(["M x K x N", *shapes, "error"], rows),
    ])  # fmt: skip


def render_gemm(results: dict[str, Any]) -> str:
    """The products, then what making the digits takes."""
    sizes = results["digits"]
    made = [{kernel["name"]: kernel for kernel in size["kernels"]} for size in sizes]
    digits = [[name, *(cell for size in made for cell in (_microseconds(size[name]), f"{size[name]['TB/s']:.2f}"))]
              for name in made[0]]  # fmt: skip
    return "\n".join([
        render_products(results), "", "Digits of a square matrix:", "",
        *_grid(["", *(head for size in sizes for head in (f"n = {size['size']}, us", "TB/s"))], digits),
    ])  # fmt: skip


def render_attention(results: dict[str, Any]) -> str:
    """A row a form or baseline, a column a length and sparsity."""
    known = [{row["name"]: row for row in case["rows"]} for case in results["cases"]]
    head = [f"L = {case['length']}, {case['sparsity']:g}" for case in results["cases"]]
    rows = [[name, *(_microseconds(case.get(name)) for case in known)] for name in known[0]]
    first = f"{machine_line(results)}; {results['setting']['shape']}; microseconds, {results['setting']['us']}."
    return "\n".join([first, "", *_grid(["", *head], rows)])


def render_choose(results: dict[str, Any]) -> str:
    """How near the picks of the cost model as it is come to the best config, for each pair of widths."""
    import choose

    judged = [choose.judge(results, widths) for widths in choose.WIDTHS]
    judged.append(choose.judge(results, choose.BASE, matrices=True))
    lines = "".join(f"* {line}\n" for line in judged)
    return f"{machine_line(results)}; products that the constants were not fitted to:\n\n{lines}"


def render_compensated(results: dict[str, Any]) -> str:
    """A row a size and tolerance; whole calls, and in brackets the launches alone."""
    rows = []
    for case in results["sizes"]:
        loop, gpu = case["loop_us"], case["gpu_us"]
        floats = [f"{loop[name]:.0f}" for name in ("torch float32", "torch tf32")]
        for tol in ("0.02", "0.001"):
            whole = [f"{loop[name]:.0f} ({gpu[name]:.0f})" for name in (tol, f"{tol}, prepared")]
            rows.append([str(case["n"]), tol, *whole, *floats])
    head = "n", "tol", "checked", "checked, B prepared", "torch float32", "torch tf32, unchecked"
    table = [f"{machine_line(results)}.", "", *_grid([*head], rows)]
    kinds = [name.removesuffix(", prepared") for name in results["sizes"][0]["sixteen_bit_us"] if "prepared" in name]
    rows = []
    for case in results["sizes"]:
        for name in kinds:
            dtype, tol = name.split(", ")
            us = [case["sixteen_bit_us"][each] for each in (name, f"{name}, prepared", f"torch {dtype}")]
            rows.append([str(case["n"]), dtype, tol, *(f"{each:.0f}" for each in us)])
    head = "n", "operands and output", "tol", "checked", "checked, B prepared", "torch, unchecked"
    return "\n".join([*table, "", *_grid([*head], rows)])


SECTIONS = (  # of the guides: name, results file, table, guide
    (DLMC, "dlmc_h200", render_dlmc, "lab/performance"),
    (LLM, "llm_h200", render_llm, "lab/performance"),
    (COSTS, "costs_h200", render_costs, "lab/performance"),
    (CHOOSE, "choose_h200", render_choose, "lab/performance"),
    (GEMM, "gemm_h200", render_gemm, "lab/gemm"),
    (GEMM_H100, "gemm_h100", render_products, "lab/gemm"),
    (FLOATS, "floats_h200", render_floats, "lab/floats"),
    (ATTENTION, "attention_h200", render_attention, "lab/attention"),
    (COMPENSATED, "compensated_h200", render_compensated, "lab/performance"),
)


def update(name: str, text: str, page: Path, script: str = "README_table.py") -> None:
    """Put ``text`` between the markers called ``name`` of ``page``, which name the script."""
    start, end = f"<!-- {name}: benchmarks/{script} writes this -->", f"<!-- end {name} -->"
    before, found, rest = page.read_text().partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} must have the markers {start!r} and {end!r}")
    page.write_text(f"{before}{start}\n{text}\n{end}{after}")


if __name__ == "__main__":
    update(CPU, render_cpu(), DOCS / "performance" / "cpu.md")
    update(LAYERS, render_layers(), DOCS / "performance" / "cpu.md")
    update(GPU, render_gpu(json.loads((RESULTS / "spmm_h200.json").read_text())), DOCS / "performance" / "gpu.md")
    for section, stem, table, guide in SECTIONS:
        if (source := RESULTS / f"{stem}.json").is_file():
            update(section, table(json.loads(source.read_text())), DOCS / f"{guide}.md")
        else:
            print(f"no {source}: the section {section} stays as it is")
