"""Draw the results of ``dlmc.py``: speed-up over dense float16 by sparsity, and the break-even sparsity."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import geometric_mean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, NullFormatter

from magicube_cutlass.bench.figures import COLORS, MARKERS, OTHER, label_ends, note, panels

FP16, INT8 = "times dense fp16", "times dense int8"
BASE = "L8-R8"
SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)


def by_sparsity(results: dict[str, Any], rows: Iterable[dict[str, Any]], key: str = FP16) -> dict[float, list[float]]:
    """Ratios of the rows that have one, by the sparsity that the folder of their matrix names, rounded."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if key in row:
            target = results["matrices"][row["matrix"]]["target"]
            found.setdefault(min(SPARSITIES, key=lambda x: abs(x - target)), []).append(row[key])
    return dict(sorted(found.items()))


def draw_speed_ups(results: dict[str, Any], kind: str, size: str, machine: str) -> Figure:
    """A panel per V, a line per value of `size`: geometric mean over matrices."""
    rows = [row for row in results[kind] if row.get("pair") == BASE and "us" in row]
    lengths, values = sorted({row["v"] for row in rows}), sorted({row[size] for row in rows})
    figure, areas = panels(1, len(lengths), (4.6 * len(lengths), 4.4))
    count, name = len({row["matrix"] for row in rows}), kind.upper().replace("SPMM", "SpMM")
    figure.suptitle(f"8-bit {name} on {count} matrices of pruned networks (geometric mean)")
    note(figure, machine)
    labels = []
    for axes, v in zip(areas, lengths, strict=True):
        ends = {}
        for value, color, marker in zip(values, COLORS, MARKERS, strict=False):
            found = by_sparsity(results, [row for row in rows if (row["v"], row[size]) == (v, value)])
            places, means = list(found), [geometric_mean(ratios) for ratios in found.values()]
            axes.plot(places, means, f"{marker}-", color=color)
            ends[f"{'N' if size == 'n' else 'inner'} = {value}"] = (places[-1], means[-1], color)
        both = [row | {"int8": row[FP16] / row[INT8]} for row in rows if row["v"] == v and FP16 in row and INT8 in row]
        found = by_sparsity(results, both, "int8")
        if found:
            means = [geometric_mean(ratios) for ratios in found.values()]
            axes.plot(list(found), means, "--", color=OTHER)
            ends["dense int8"] = (list(found)[-1], means[-1], OTHER)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel="sparsity (share of zeros)", title=f"V = {v}", ylabel="speed-up over dense fp16 (ratio)")
        labels.append(ends)
    for axes, ends in zip(areas, labels, strict=True):
        label_ends(axes, ends)
    return figure


def draw_break_even(results: dict[str, Any], machine: str) -> Figure:
    """The sparsity from which on ours is faster than the fastest dense product, a row per shape."""
    cases = results["break_even"]
    shapes = list(dict.fromkeys(tuple(case["shape"]) for case in cases))
    lengths = sorted({case["v"] for case in cases})
    low, high = (end(p["sparsity"] for case in cases for p in case["points"]) for end in (min, max))
    figure, (axes,) = panels(size=(8.0, 4.4))
    for i, v in enumerate(lengths):
        found = []
        for case in (case for case in cases if case["v"] == v):
            value = case["break_even"]["the best"]
            if value is not None:
                place = {"always": low, "never": high}.get(value, value)
                found.append((place, shapes.index(tuple(case["shape"])) + 0.22 * (i - (len(lengths) - 1) / 2)))
        axes.plot(*zip(*found, strict=True), MARKERS[i], color=COLORS[i], label=f"V = {v}", markersize=8)
    axes.set_yticks(range(len(shapes)), [" x ".join(map(str, shape)) for shape in shapes])
    axes.set(
        xlabel="break-even sparsity (share of zeros); faster to the right", ylabel="M x K x N", xlim=(low - 0.02, 1)
    )
    axes.set_title("8-bit SpMM against the fastest dense product")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    note(figure, machine)
    return figure
