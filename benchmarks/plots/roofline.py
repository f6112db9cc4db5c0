"""Rooflines of the GPU kernels: the useful operations a second of every timed product, against what it has to move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

# Of an H200: bytes a second from memory and from the L2 cache, and operations a second.
MEMORY, L2 = 4.3e12, 6.5e12
MMA, WGMMA = 1243e12, 1979e12  # measured mma.sync; wgmma by the data sheet
GATHERED = 475e12  # 8 rows for each byte gathered from shared memory, 128 bytes a cycle and multiprocessor
COLOURS = {"panel": "#0b7a75", "gather": "#c8553d", "sddmm": "#e09f3e", "gemm": "#4477aa"}


def _spmm(results: dict[str, Any]) -> list[tuple[str, float, float, str]]:
    """Kernel, operations a byte, operations a second, label."""
    found = []
    for case in results["spmm"]:
        for row in case["ours"]:
            if "us" in row and row["name"].startswith("L8-R8"):
                kernel = "panel" if "panel" in row["kernel"] else "gather"
                speed = row["tops"] * 1e12
                m, k, n = case["shape"]
                label = f"{m}x{k}x{n} {case['sparsity']:g} {row['name'].split()[-1]}"
                found.append((kernel, speed * row["us"] * 1e-6 / (row["moved_MB"] * 1e6), speed, label))
    return found


def _sddmm(results: dict[str, Any]) -> list[tuple[str, float, float, str]]:
    found = []
    for case in results["sddmm"]:
        (m, n), inner = case["shape"], case["inner"]
        stored = m * n * (1 - case["sparsity"])
        for row in case["ours"]:
            if row.get("name") == "L8-R8" and "us" in row:
                moved = (m + n) * inner + 2 * stored + stored / 8 * 4  # both operands, results, columns
                found.append(("sddmm", 2 * stored * inner / moved, row["tops"] * 1e12, f"{m}x{n} inner {inner}"))
    return found


def _roofs(axes: Any, slopes: dict[str, float], flats: dict[str, float]) -> None:
    x = np.geomspace(10, 20000, 200)
    for name, slope in slopes.items():
        axes.plot(x, np.minimum(slope * x, max(flats.values())) / 1e12, color="#58626b", linewidth=0.9)
        axes.text(14, slope * 14 / 1e12 * 1.12, name, fontsize=7, rotation=33, color="#58626b")
    for name, flat in flats.items():
        axes.axhline(flat / 1e12, color="#58626b", linewidth=0.9, linestyle="--")
        axes.text(19000, flat / 1e12 * 1.06, name, fontsize=7, ha="right", color="#58626b")


def draw_rooflines(results: dict[str, Any], path: Path, source: str) -> None:
    """SpMM on the left, SDDMM on the right; both axes logarithmic."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5))
    slopes = {"memory 4.3 TB/s": MEMORY, "L2 6.5 TB/s": L2}
    _roofs(left, slopes, {"mma.sync 1243": MMA, "rows gathered from shared memory, V = 8: 475": GATHERED})
    _roofs(right, slopes, {"mma.sync 1243": MMA})
    for axes, points in ((left, _spmm(results)), (right, _sddmm(results))):
        seen = set()
        for kernel, intensity, speed, label in points:
            axes.scatter(intensity, speed / 1e12, s=28, color=COLOURS[kernel], label=None if kernel in seen else kernel)
            axes.annotate(label, (intensity, speed / 1e12), (4, -8), textcoords="offset points", fontsize=6)
            seen.add(kernel)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(10, 20000)
        axes.set_ylim(10, 3000)
        axes.set_xlabel("useful operations for each byte that must be moved once")
        axes.set_ylabel("useful tera-operations a second")
        axes.legend(fontsize=8, loc="upper left")
    left.set_title("SpMM, L8-R8", fontsize=10)
    right.set_title("SDDMM, L8-R8, V = 8", fontsize=10)
    figure.text(0.01, 0.005, source, fontsize=8)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
