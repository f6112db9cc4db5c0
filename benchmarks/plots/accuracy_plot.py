"""Draws error against time, one field for each kind of data, from the results of ``accuracy.py``.

Needs matplotlib and no GPU.  Run: ``python benchmarks/plots/accuracy_plot.py RESULTS PICTURE [--size N]``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

OURS, TOLERANCE, OTHER = "#0b7a75", "#c8553d", "#58626b"


def frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other one beats in both time and error, by time."""
    best, front = float("inf"), []
    for ms, error in sorted(points):
        if error < best:
            best = error
            front.append((ms, error))
    return front


def _draw_case(area: Axes, case: dict[str, Any]) -> None:
    for row in case["rows"]:
        name = row["name"]
        if "prepared" in name or "checked" in name:
            continue
        planned = name.startswith("tol ")
        color = TOLERANCE if planned else OTHER if name.startswith(("torch", "cuBLAS")) else OURS
        error = max(row["error"], 1e-9)
        area.plot(row["ms"], error, "^" if planned else "o", color=color, markersize=5)
        # slanted, and tolerances below the points: neighbours stay readable
        side: dict[str, Any] = (
            {"xytext": (2, -5), "va": "top", "rotation": -40} if planned else {"xytext": (2, 3), "rotation": 40}
        )
        area.annotate(
            name, (row["ms"], error), fontsize=6.5, textcoords="offset points", rotation_mode="anchor", **side
        )
    line = frontier([(row["ms"], max(row["error"], 1e-9)) for row in case["rows"] if "prepared" not in row["name"]])
    area.plot(*zip(*line, strict=True), color="black", linewidth=0.6, drawstyle="steps-post")
    area.margins(0.1, 0.2)
    area.set(xscale="log", yscale="log", title=f"{case['kind']}, n = {case['n']}", xlabel="ms a call")
    area.set_ylabel("relative Frobenius error")


def draw(results: dict[str, Any], path: Path, size: int) -> None:
    """One field a kind of data."""
    cases = [case for case in results["cases"] if case["n"] == size]
    if not cases:
        raise SystemExit(f"size must be one of {sorted({case['n'] for case in results['cases']})}, got {size}")
    figure, areas = plt.subplots(2, -(-len(cases) // 2), figsize=(15, 9), squeeze=False)
    for area, case in zip(areas.flat, cases, strict=False):
        _draw_case(area, case)
    machine = results["machine"]
    where = machine["cpu"] if machine["gpu"] == "none" else machine["gpu"]
    figure.suptitle(f"whole calls from float32: {where}, torch {machine['torch']}, {machine['date']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--size", type=int, help="n; default the largest")
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    draw(results, args.picture, args.size or max(case["n"] for case in results["cases"]))


if __name__ == "__main__":
    main()
