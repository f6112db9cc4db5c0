"""Renders the tables of README.md from the results files.  Run: ``python benchmarks/README_table.py``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CPU, GPU = "cpu-table", "gpu-table"
COLUMNS = ("magicube", "dense", "scipy CSR float32", "torch CSR float32")
GPU_RIVALS = ("dense fp16", "dense int8", "dense fp8", "2:4 int8", "BSR fp16 32", "Blocked-ELL int8 16")


def _break_even_line(size: dict[str, Any]) -> str:
    lowest = size["rows"][0]["density"]
    highest = size["rows"][-1]["density"]
    parts = []
    for name, value in size["break_even"].items():
        row = size["rows"][0]["ms"]
        slower = row[name] > row["dense"]
        text = f"{value:.2f}" if value is not None else f"below {lowest:g}" if slower else f"above {highest:g}"
        parts.append(f"{name} {text}")
    return f"Density at which it takes as long as the dense product, n = {size['n']}: " + ", ".join(parts) + "."


def render(results: dict[str, Any]) -> str:
    """The table in Markdown."""
    machine = results["machine"]
    lines = [
        f"{machine['cpu']}, engine path {machine['engine path']}, torch {machine['torch']}, {machine['date']}; "
        "one thread, V = 8, L8-R8, uniform pattern, n x n times n x n, milliseconds (median).",
        "",
        "| n | density | magicube | dense `torch._int_mm` | scipy CSR fp32 | torch CSR fp32 |",
        "|---|---|---|---|---|---|",
    ]
    for size in results["sizes"]:
        for row in size["rows"]:
            cells = (f"{row['ms'][name]:.2f}" for name in COLUMNS)
            lines.append(f"| {size['n']} | {row['density']:g} | " + " | ".join(cells) + " |")
    lines += ["", *(_break_even_line(size) for size in results["sizes"])]
    for pair in results.get("two_threads", []):
        lines.append(
            f"Two threads, n = {pair['n']}, density {pair['density']:g}: {pair['speed_up']:.2f}x by the medians, "
            f"{pair['lower_quartile_speed_up']:.2f}x by the lower quartiles (dense {pair['dense_speed_up']:.2f}x, "
            f"{pair['dense_lower_quartile_speed_up']:.2f}x)."
        )
    return "\n".join(lines)


def _microseconds(row: dict[str, Any] | None) -> str:
    return f"{row['us']:.1f}" if row and "us" in row else "-"


def render_gpu(results: dict[str, Any]) -> str:
    """The table of GPU products in Markdown: medians of launches in a CUDA graph, microseconds."""
    machine = results["machine"]
    lines = [
        f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}, {machine['date']}; SpMM, L8-R8, "
        "V = 8, uniform pattern, float16 output with fused scales, microseconds (median, CUDA graph, operands in L2 "
        "where they fit).",
        "",
        "| M x K x N, sparsity | magicube | " + " | ".join(GPU_RIVALS) + " |",
        "|---" * (len(GPU_RIVALS) + 2) + "|",
    ]
    for case in results["spmm"]:
        m, k, n = case["shape"]
        rivals = {row["name"]: row for row in case["rivals"]}
        ours = next(row for row in case["ours"] if row["name"] == "L8-R8 V=8")
        cells = [_microseconds(ours), *(_microseconds(rivals.get(name)) for name in GPU_RIVALS)]
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
    return "\n".join(lines)


def update_readme(name: str, text: str, readme: Path = ROOT / "README.md") -> None:
    """Put ``text`` between the markers called ``name`` of ``readme``."""
    start, end = f"<!-- {name}: benchmarks/README_table.py writes this -->", f"<!-- end {name} -->"
    before, found, rest = readme.read_text().partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{readme} must have the markers {start!r} and {end!r}")
    readme.write_text(f"{before}{start}\n{text}\n{end}{after}")


if __name__ == "__main__":
    update_readme(CPU, render(json.loads((RESULTS / "cpu_spmm.json").read_text())))
    update_readme(GPU, render_gpu(json.loads((RESULTS / "spmm_h200.json").read_text())))
