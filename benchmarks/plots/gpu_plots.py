"""Draw pictures of ``docs/performance`` from the results of ``spmm.py``, ``cpu_spmm.py`` and ``dlmc.py``.

Needs matplotlib and no GPU.  Run: ``python benchmarks/plots/gpu_plots.py [--spmm FILE] [--cpu FILE] [--dlmc FILE]
[--docs FOLDER]``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dlmc_plots import draw_break_even, draw_speed_ups
from matplotlib.figure import Figure
from roofline import draw_roofline

from magicube_cutlass.bench.figures import DENSE, FIFTH, FOURTH, OTHER, OURS, label_ends, note, panels, save_figure

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
GPU_DENSE = {"dense fp16": OTHER, "dense int8": FIFTH, "dense fp8": DENSE, "2:4 int8": FOURTH}


def machine_line(results: dict[str, Any]) -> str:
    """Return what measured it: machine, torch, date and commit."""
    machine = results["machine"]
    chip = f"{machine['cpu']}, {machine['engine path']}, 1 thread" if machine["gpu"] == "none" else machine["gpu"]
    return f"{chip}; torch {machine['torch']}, {machine['date']}, commit {machine.get('commit', 'not recorded')}"


def draw_spmm(results: dict[str, Any]) -> Figure:
    """Time by density, a panel per shape that was measured at three sparsities; dense products are level lines."""
    shapes: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for case in results["spmm"]:
        shapes.setdefault(tuple(case["shape"]), []).append(case)
    shown = {shape: cases for shape, cases in shapes.items() if len(cases) >= 3}
    figure, areas = panels(1, len(shown), (5.6 * len(shown), 4.4))
    figure.suptitle("8-bit SpMM, V = 8: below which density is it faster than dense?")
    note(figure, machine_line(results))
    ends = []
    for axes, (shape, cases) in zip(areas, shown.items(), strict=True):
        cases.sort(key=lambda case: -case["sparsity"])
        density = [1 - case["sparsity"] for case in cases]
        lines = {"magicube": [next(r["behind_us"] for r in case["ours"] if r["name"] == "L8-R8 V=8") for case in cases]}
        for name in GPU_DENSE:
            lines[name] = [next(r["behind_us"] for r in case["rivals"] if r["name"] == name) for case in cases]
        for name, times in lines.items():
            ours = name == "magicube"
            axes.plot(density, times, "o-" if ours else "--", color=OURS if ours else GPU_DENSE[name])
        axes.set(xlabel="density (share of stored elements)", ylabel="time (us)", ylim=(0, None))
        axes.set_title(f"{' x '.join(map(str, shape))}")
        colors = {**GPU_DENSE, "magicube": OURS}
        ends.append({name: (density[-1], times[-1], colors[name]) for name, times in lines.items()})
    for axes, labels in zip(areas, ends, strict=True):
        label_ends(axes, labels)
    return figure


def draw_cpu_spmm(results: dict[str, Any]) -> Figure:
    """Time by density on a CPU, a panel per size, with the break-even with the fastest dense product marked."""
    figure, areas = panels(1, len(results["sizes"]), (5.6 * len(results["sizes"]), 4.4))
    figure.suptitle("8-bit SpMM, V = 8, n x n times n x n")
    note(figure, machine_line(results))
    labels = []
    colors = {"magicube": OURS, "fastest dense": DENSE, "scipy CSR": FOURTH, "torch CSR": FIFTH}
    keys = dict(zip(colors, ("magicube", "dense", "scipy CSR float32", "torch CSR float32"), strict=True))
    for axes, size in zip(areas, results["sizes"], strict=True):
        density = [row["density"] for row in size["rows"]]
        ends = {}
        for name, color in colors.items():
            times = [row["ms"][keys[name]] for row in size["rows"]]
            axes.plot(density, times, "--" if name == "fastest dense" else "o-", color=color)
            ends[name] = (density[-1], times[-1], color)
        axes.set(xlabel="density (share of stored elements)", ylabel="time (ms)", yscale="log")
        even = size["break_even"]["magicube"]
        even_text = f"break-even at density {even:.2f}" if even else f"faster up to density {density[-1]:g}"
        axes.set_title(f"n = {size['n']}: {even_text}")
        if even:
            axes.axvline(even, color=OTHER, linewidth=1)
        labels.append(ends)
    for axes, ends in zip(areas, labels, strict=True):
        label_ends(axes, ends)
    return figure


def drawings(spmm: Path, cpu: Path, dlmc: Path) -> dict[str, tuple[Path, Any]]:
    """Return name -> results file and function that draws it."""
    return {
        "spmm.png": (spmm, draw_spmm),
        "roofline.png": (spmm, lambda x: draw_roofline(x, machine_line(x))),
        "cpu_spmm.png": (cpu, draw_cpu_spmm),
        "dlmc_spmm.png": (dlmc, lambda x: draw_speed_ups(x, "spmm", "n", machine_line(x))),
        "dlmc_sddmm.png": (dlmc, lambda x: draw_speed_ups(x, "sddmm", "inner", machine_line(x))),
        "break_even.png": (dlmc, lambda x: draw_break_even(x, machine_line(x))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spmm", type=Path, default=RESULTS / "spmm_h200.json")
    parser.add_argument("--cpu", type=Path, default=RESULTS / "cpu_spmm_avx2.json")
    parser.add_argument("--dlmc", type=Path, default=RESULTS / "dlmc_h200.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "images")
    args = parser.parse_args()
    for name, (source, draw) in drawings(args.spmm, args.cpu, args.dlmc).items():
        print(
            save_figure(draw(json.loads(source.read_text())), args.docs / name) if source.is_file() else f"no {source}"
        )


if __name__ == "__main__":
    main()
