"""Roofline of SpMM on an H200: useful operations per second of each product, against the bytes that it must move."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from magicube_cutlass.bench.figures import DENSE, OTHER, OURS, label_points, note, panels

# Of an H200: bytes per second from memory and from the L2 cache, and operations per second.
MEMORY, L2 = 4.3e12, 6.5e12
MMA = 1243e12  # measured, mma.sync
GATHERED = 475e12  # 8 rows per byte gathered from shared memory, 128 bytes per cycle and SM
COLORS, MARKS = {"panel": OURS, "gather": DENSE}, {"panel": "o", "gather": "s"}


def points(results: dict[str, Any]) -> list[tuple[str, float, float, str]]:
    """Return kernel, operations per byte, operations per second and label of the products with V = 8."""
    found = []
    for case in results["spmm"]:
        row = next(row for row in case["ours"] if row["name"] == "L8-R8 V=8")
        speed, (m, k, n) = row["tops"] * 1e12, case["shape"]
        kernel = "panel" if "panel" in row["kernel"] else "gather"
        found.append((kernel, speed * row["us"] * 1e-6 / (row["moved_MB"] * 1e6), speed,
                      f"{m} x {k} x {n}, {case['sparsity']:.0%}"))  # fmt: skip
    return found


def draw_roofline(results: dict[str, Any], source: str) -> Figure:
    """Both axes logarithmic; labels give shape and sparsity."""
    figure, (axes,) = panels(size=(9.0, 5.6))
    x = np.geomspace(30, 12000, 200)
    for name, slope, dash in (("HBM, 4.3 TB/s", MEMORY, "-"), ("L2, 6.5 TB/s", L2, ":")):
        axes.plot(x, np.minimum(slope * x, MMA) / 1e12, color=OTHER, linewidth=1.2, linestyle=dash, label=name)
    axes.axhline(GATHERED / 1e12, color=OTHER, linewidth=1.2, linestyle="--", label="shared-memory gather, 475 TOP/s")
    axes.axhline(MMA / 1e12, color=OTHER, linewidth=1.2, linestyle="-.", label="mma.sync, 1243 TOP/s")
    found = points(results)
    for kernel in dict.fromkeys(kernel for kernel, *_ in found):
        chosen = [(a, b / 1e12) for name, a, b, _ in found if name == kernel]
        axes.plot(*zip(*chosen, strict=True), MARKS[kernel], color=COLORS[kernel], label=f"{kernel} kernel")
    axes.set(xscale="log", yscale="log", xlim=(30, 12000), ylim=(10, 3000))
    axes.set(xlabel="useful operations per byte that must be moved (op/B)", ylabel="useful operations (TOP/s)")
    axes.set_title("8-bit SpMM, V = 8, H200: shapes M x K x N and sparsity")
    axes.legend(loc="lower right", frameon=True)
    note(figure, source)
    label_points(axes, [(a, b / 1e12, label, COLORS[kernel]) for kernel, a, b, label in found])
    return figure
