"""Draw error against time from the results of ``accuracy.py``.

Needs matplotlib and no GPU.  Run: ``python benchmarks/plots/accuracy_plot.py RESULTS PICTURE [--size N]``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from magicube_cutlass.bench.figures import DENSE, FOURTH, OURS, label_points, log_ticks, note, panels, save_figure

KINDS = 2  # panels: the first kinds of data


def frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other one beats in both time and error, by time."""
    best, front = float("inf"), []
    for ms, error in sorted(points):
        if error < best:
            best = error
            front.append((ms, error))
    return front


def draw(results: dict[str, Any], size: int) -> Figure:
    """A panel per kind of data; labels for torch's products, the modes of least error, and the frontier."""
    cases = [case for case in results["cases"] if case["n"] == size]
    if not cases:
        raise SystemExit(f"size must be one of {sorted({case['n'] for case in results['cases']})}, got {size}")
    cases = [case for case in cases if "outlier" in case["kind"] or case["kind"] == "normal"][:KINDS]
    figure, areas = panels(1, len(cases), (6.4 * len(cases), 5.2))
    machine = results["machine"]
    where = machine["cpu"] if machine["gpu"] == "none" else machine["gpu"]
    figure.suptitle(f"Dense products of float32, n = {size}: error against time")
    note(
        figure, f"{where}; torch {machine['torch']}, {machine['date']}, commit {machine.get('commit', 'not recorded')}"
    )
    labels = []
    for axes, case in zip(areas, cases, strict=True):
        rows = [row for row in case["rows"] if "prepared" not in row["name"] and "checked" not in row["name"]]
        points = [(row["ms"], max(row["error"], 1e-9), row["name"]) for row in rows]
        front = frontier([point[:2] for point in points])
        axes.step(*zip(*front, strict=True), where="post", color="black", linewidth=1)
        names = []
        for marker, color, label, chosen in (
            ("s", DENSE, "torch", [p for p in points if p[2].startswith(("torch", "cuBLAS"))]),
            (
                "o",
                FOURTH,
                "residual, mode=, no check",
                [p for p in points if not p[2].startswith(("torch", "cuBLAS", "tol"))],
            ),
            ("^", OURS, "residual, tol=, checked", [p for p in points if p[2].startswith("tol")]),
        ):
            axes.plot([p[0] for p in chosen], [p[1] for p in chosen], marker, color=color, label=label)
            names += [(*p, color) for p in chosen if p[:2] in front or color == DENSE]
        axes.margins(0.18, 0.1)
        axes.set(xscale="log", yscale="log", xlabel="time of a call (ms)", ylabel="relative Frobenius error (ratio)")
        axes.set_title(case["kind"])
        log_ticks(axes.xaxis)
        labels.append(names)
    areas[0].legend(loc="best")
    for axes, names in zip(areas, labels, strict=True):
        label_points(axes, names)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--size", type=int, help="n; default the largest")
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    print(save_figure(draw(results, args.size or max(case["n"] for case in results["cases"])), args.picture))


if __name__ == "__main__":
    main()
