"""Draws the figures of ``docs`` from the results of ``spmm.py``, ``ablation.py`` and ``dlmc.py``.

Needs matplotlib and no GPU.  Run: ``python benchmarks/plots/gpu_plots.py [--spmm FILE] [--ablation FILE] [--dlmc FILE]
[--docs FOLDER]``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from dlmc_plots import draw_break_even, draw_speed_ups
from roofline import draw_rooflines

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
OURS, OTHER, BEST = "#0b7a75", "#b9c0c7", "#58626b"
SHOWN = ("dense fp16", "dense int8", "dense fp8", "2:4 int8", "BSR fp16 32", "Blocked-ELL int8 16")
PALETTE = (OURS, "#c8553d", "#e09f3e", "#8c6bb1", "#4477aa", "#8a8f94", "#333a40")


def machine_line(results: dict[str, Any]) -> str:
    """What measured it."""
    machine = results["machine"]
    run = f"{machine['date']}, commit {machine.get('commit', 'not recorded')}"
    return f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}, {run}"


def _shape_name(case: dict[str, Any]) -> str:
    m, k, n = case["shape"]
    return f"{m}x{k}x{n}\n{case['sparsity']:.0%} sparse"


def _times(case: dict[str, Any]) -> dict[str, float]:
    rows = [*case["ours"], *case["rivals"]]
    return {row["name"]: row["us"] for row in rows if "us" in row}


def draw_spmm(results: dict[str, Any], path: Path) -> None:
    """Above: speed over the dense float16 product, by shape; below: pairs and vector lengths, and SDDMM."""
    figure, areas = plt.subplot_mosaic("AA;BC", figsize=(13, 10), height_ratios=(3, 2), width_ratios=(5, 4))
    top = areas["A"]
    names = ("L8-R8 V=8", *SHOWN)
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        points = [
            (at + (i - len(names) / 2 + 0.5) * width, times["dense fp16"] / times[name])
            for at, case in enumerate(results["spmm"])
            if name in (times := _times(case)) and "dense fp16" in times
        ]
        label = f"ours, {name}" if i == 0 else name
        top.bar([x for x, _ in points], [y for _, y in points], width, label=label, color=PALETTE[i])
    top.axhline(1, color="black", linewidth=0.8)
    top.set_xticks(range(len(results["spmm"])), [_shape_name(case) for case in results["spmm"]], fontsize=7)
    top.set_ylabel("times as fast as torch dense fp16")
    top.legend(ncols=7, fontsize=7.5, loc="upper left")
    top.set_ylim(0, top.get_ylim()[1] * 1.08)
    top.set_title(
        "SpMM with 8x1 vectors, fp16 output, scales in the kernel; block formats run on blocks of the same density",
        fontsize=10,
    )
    pairs = [case for case in results["spmm"] if len(case["ours"]) > 1]
    _draw_times([(_shape_name(case), case["ours"]) for case in pairs], areas["B"])
    areas["B"].set_title("SpMM, pairs of widths and vector lengths", fontsize=9)
    sampled = [
        (f"{case['shape'][0]}x{case['shape'][1]}, inner {case['inner']}", [*case["ours"], *case["rivals"]])
        for case in results["sddmm"]
    ]
    _draw_times(sampled, areas["C"])
    areas["C"].set_title("SDDMM, 90% sparse, 8x1 vectors, and others' products", fontsize=9)
    figure.text(0.01, 0.005, machine_line(results), fontsize=8)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_times(groups: list[tuple[str, list[dict[str, Any]]]], axes: Any) -> None:
    """Bars of microseconds, on a logarithmic axis."""
    names = list(dict.fromkeys(row["name"] for _, rows in groups for row in rows if "us" in row))
    width = 0.85 / max(len(names), 1)
    colours = plt.get_cmap("viridis")
    for i, name in enumerate(names):
        points = [(at, row["us"]) for at, (_, rows) in enumerate(groups) for row in rows if row["name"] == name]
        places = [at + (i - len(names) / 2 + 0.5) * width for at, _ in points]
        bars = axes.bar(places, [us for _, us in points], width, label=name, color=colours(i / max(len(names), 1)))
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(groups)), [name for name, _ in groups], fontsize=8)
    axes.set_yscale("log")
    axes.set_ylim(axes.get_ylim()[0], axes.get_ylim()[1] * 3)
    axes.set_ylabel("microseconds a launch")
    axes.legend(ncols=3, fontsize=7, loc="upper left")


def draw_ablation(results: dict[str, Any], path: Path) -> None:
    """One row of panels a workload, one panel a study, one bar a variant: microseconds."""
    workloads: dict[str, list[dict[str, Any]]] = {}
    for study in _merged(results["studies"]):
        workloads.setdefault(study["workload"], []).append(study)
    columns = 4
    rows = sum(-(-len(found) // columns) for found in workloads.values())
    figure, grid = plt.subplots(rows, columns, figsize=(18, 2.6 * rows), squeeze=False)
    at = 0
    for workload, found in workloads.items():
        lines = -(-len(found) // columns)
        cells = [axes for line in grid[at : at + lines] for axes in line]
        for axes, study in zip(cells, found, strict=False):
            _draw_study(axes, study)
        for axes in cells[len(found) :]:
            axes.axis("off")
        cells[0].annotate(workload, (0, 1.2), xycoords="axes fraction", fontsize=11, fontweight="bold")
        at += lines
    figure.text(0.01, 0.003, f"microseconds a launch; {machine_line(results)}", fontsize=9)
    figure.tight_layout(rect=(0, 0.012, 1, 1), h_pad=1.6)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _merged(studies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Studies "name, kind" of two bars in a row become one panel, whose labels say the kind."""
    found: list[dict[str, Any]] = []
    for study in studies:
        name, comma, kind = study["name"].partition(", ")
        if not comma or len(study["rows"]) != 2 or "V=" not in kind:
            found.append(study)
            continue
        rows = [row | {"label": f"{kind}, {row['label']}"} for row in study["rows"]]
        if found and (found[-1]["name"], found[-1]["workload"]) == (name, study["workload"]):
            found[-1]["rows"] += rows
        else:
            found.append(study | {"name": name, "rows": rows})
    return found


def _draw_study(axes: Any, study: dict[str, Any]) -> None:
    rows = study["rows"]
    best = min((row["us"] for row in rows if "us" in row), default=0.0)
    for i, row in enumerate(rows):
        us = row.get("us", 0.0)
        axes.barh(i, us, height=0.75, color=OURS if row.get("ratio") == 1.0 else BEST if us == best else OTHER)
        text = f"{us:.1f}" if "us" in row else "not run"
        axes.text(us, i, f" {text}", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows], fontsize=7)
    axes.set_ylim(max(len(rows), 5) - 0.5, -0.5)
    axes.set_xlim(0, 1.18 * max((row.get("us", 0.0) for row in rows), default=1.0) or 1.0)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title(study["name"], fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spmm", type=Path, default=RESULTS / "spmm_h200.json")
    parser.add_argument("--ablation", type=Path, default=RESULTS / "ablation_h200.json")
    parser.add_argument("--dlmc", type=Path, default=RESULTS / "dlmc_h200.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "images")
    args = parser.parse_args()
    drawings = (
        (args.spmm, "spmm.png", draw_spmm),
        (args.spmm, "roofline.png", lambda x, path: draw_rooflines(x, path, machine_line(x))),
        (args.ablation, "ablation.png", draw_ablation),
        (args.dlmc, "dlmc_spmm.png", lambda x, path: draw_speed_ups(x, "spmm", "n", path, machine_line(x))),
        (args.dlmc, "dlmc_sddmm.png", lambda x, path: draw_speed_ups(x, "sddmm", "inner", path, machine_line(x))),
        (args.dlmc, "break_even.png", lambda x, path: draw_break_even(x, path, machine_line(x))),
    )
    for source, name, draw in drawings:
        if source.is_file():
            draw(json.loads(source.read_text()), args.docs / name)
            print(f"drew {args.docs / name}")
        else:
            print(f"no {source}: nothing drawn")


if __name__ == "__main__":
    main()
