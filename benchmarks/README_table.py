"""Renders the CPU table of README.md from the results file.  Run: ``python benchmarks/README_table.py``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu_spmm.json"
START, END = "<!-- cpu-table: benchmarks/README_table.py writes this -->", "<!-- end cpu-table -->"
COLUMNS = ("magicube", "dense", "scipy CSR float32", "torch CSR float32")


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
        lines.append(f"Two threads, n = {pair['n']}, density {pair['density']:g}: {pair['speed_up']:.2f}x.")
    return "\n".join(lines)


def update_readme(results: dict[str, Any], readme: Path = ROOT / "README.md") -> None:
    """Put the table between the markers of ``readme``."""
    before, found, rest = readme.read_text().partition(START)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise ValueError(f"{readme} must have the markers {START!r} and {END!r}")
    readme.write_text(f"{before}{START}\n{render(results)}\n{END}{after}")


if __name__ == "__main__":
    update_readme(json.loads(RESULTS.read_text()))
