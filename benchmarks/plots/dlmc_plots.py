"""Draws the results of ``dlmc.py``: speedup over dense float16 by sparsity, and the break-even sparsity."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FormatStrFormatter

COLOURS = ("#0b7a75", "#c8553d", "#4477aa", "#8c6bb1")
FP16, INT8 = "times dense fp16", "times dense int8"
BASE = "L8-R8"


def by_sparsity(results: dict[str, Any], rows: Iterable[dict[str, Any]], key: str = FP16) -> dict[float, list[float]]:
    """Ratios of the rows that have one, by the sparsity that the folder of their matrix names."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if key in row:
            found.setdefault(results["matrices"][row["matrix"]]["target"], []).append(row[key])
    return dict(sorted(found.items()))


def draw_speed_ups(results: dict[str, Any], kind: str, size: str, path: Path, machine: str) -> None:
    """A panel a vector length, a line a value of ``size``: geometric mean over matrices, and range."""
    rows = [row for row in results[kind] if row.get("pair") == BASE and "us" in row]
    lengths, values = sorted({row["v"] for row in rows}), sorted({row[size] for row in rows})
    figure, panels = plt.subplots(1, max(len(lengths), 1), figsize=(13, 4.6), sharey=True, squeeze=False)
    for axes, v in zip(panels[0], lengths, strict=False):
        for value, colour in zip(values, COLOURS, strict=False):
            chosen = [row for row in rows if (row["v"], row[size]) == (v, value)]
            found = by_sparsity(results, chosen)
            places = list(found)
            axes.plot(
                places, [geometric_mean(x) for x in found.values()], "o-", color=colour, label=f"{size} = {value}"
            )
            axes.fill_between(places, [min(x) for x in found.values()], [max(x) for x in found.values()],
                              color=colour, alpha=0.12, linewidth=0)  # fmt: skip
        # how the dense int8 product stands to the dense float16 one, over the same rows
        both = [row | {"int8": row[FP16] / row[INT8]} for row in rows if row["v"] == v and FP16 in row and INT8 in row]
        found = by_sparsity(results, both, "int8")
        means = [geometric_mean(x) for x in found.values()]
        axes.plot(list(found), means, "--", color="#58626b", label="dense int8 (torch)")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.set_xlabel("sparsity that the folder names")
        axes.set_title(f"V = {v}", fontsize=10)
    panels[0][0].set_ylabel("times as fast as torch dense fp16")
    panels[0][-1].legend(fontsize=8, loc="upper left")
    count = len({row["matrix"] for row in rows})
    title = (
        f"{kind.upper().replace('SPMM', 'SpMM')} {BASE}, fp16 output, {count} DLMC matrices: geometric mean and range"
    )
    figure.suptitle(title, fontsize=11)
    _finish(figure, machine, path)


def draw_break_even(results: dict[str, Any], path: Path, machine: str) -> None:
    """The sparsity from which on ours is the faster one: a group a shape, a bar a vector length."""
    cases = results["break_even"]
    shapes = list(dict.fromkeys(tuple(case["shape"]) for case in cases))
    lengths = sorted({case["v"] for case in cases})
    low, high = (end(p["sparsity"] for case in cases for p in case["points"]) for end in (min, max))
    figure, axes = plt.subplots(figsize=(13, 4.8))
    width = 0.8 / max(len(lengths), 1)
    for i, (v, colour) in enumerate(zip(lengths, COLOURS, strict=False)):
        for case in (case for case in cases if case["v"] == v):
            at = shapes.index(tuple(case["shape"])) + (i - len(lengths) / 2 + 0.5) * width
            first = case["shape"] == list(shapes[0])
            for what, mark, face in (("the best", "o", colour), ("dense fp16", "v", "none")):
                value = case["break_even"][what]
                if value is None:
                    continue
                place = {"always": low, "never": high + 0.02}.get(value, value)
                label = f"V = {v}, {'better of dense fp16 and int8' if face != 'none' else what}" if first else None
                axes.plot(at, place, mark, color=colour, markerfacecolor=face, markersize=8, label=label)
                if value in ("always", "never"):
                    axes.annotate(value, (at, place), (0, 7), textcoords="offset points", fontsize=7, ha="center")
    axes.set_xticks(range(len(shapes)), ["x".join(map(str, shape)) for shape in shapes], fontsize=9)
    axes.set_ylim(low - 0.12, high + 0.07)
    axes.set_ylabel("sparsity from which on ours is faster")
    axes.grid(axis="y", alpha=0.3)
    axes.set_title(f"Break-even with the dense product, {BASE}, uniform pattern (M x K x N)", fontsize=11)
    axes.legend(fontsize=8, ncols=3, loc="lower center")
    _finish(figure, machine, path)


def _finish(figure: Any, machine: str, path: Path) -> None:
    figure.text(0.01, 0.005, machine, fontsize=8)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=100)
    plt.close(figure)
