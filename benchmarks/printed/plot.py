"""Plot of ``docs/lab/paper-residual.md``: errors and densities by threshold, rates by density."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicube_cutlass.bench.figures import COLORS, MARKERS, label_ends, note, panels, save_figure
from printed.values import DENSITIES_4, ETA, TABLE_4, THRESHOLD_AT_ETA

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure_of(results: dict[str, Any]) -> Figure:
    """Draw Figures 6 and 8 and Table 4."""
    figure, (eight, four, density, rates) = panels(2, 2, (12.5, 8.6))
    machine = results["machine"]
    figure.suptitle(f"Residual compensation, n = {results['n']}: what the threshold keeps and what that costs")
    note(figure, f"{machine['cpu']}, threads: {machine['threads']}; {machine['date']}, "
                 f"commit {machine.get('commit', 'not recorded')}")  # fmt: skip
    colors = dict(zip(THRESHOLD_AT_ETA, COLORS, strict=False))
    ends: dict[Any, dict[str, tuple[float, float, str]]] = {eight: {}, four: {}, density: {}, rates: {}}
    for row in results["figures 6 and 8"]:
        name, points, axes = row["distribution"], row["points"], eight if row["bits"] == 8 else four
        thresholds, color = [p["threshold"] for p in points], colors[row["distribution"]]
        axes.plot(thresholds, [p["error"] for p in points], ".-", color=color)
        ends[axes][name] = (thresholds[-1], points[-1]["error"], color)
        if row["bits"] == 8:
            density.plot(thresholds, [p["density"] for p in points], color=color)
            density.plot(THRESHOLD_AT_ETA[name], ETA, "o", color=color)
            ends[density][name] = (thresholds[-1], points[-1]["density"], color)
    for axes, bits in ((eight, 8), (four, 4)):
        axes.set(
            yscale="log", xlabel="threshold (ratio)", ylabel="relative error (ratio)", title=f"Figure 6, int{bits}"
        )
    density.set(
        xlabel="threshold (ratio)", ylabel="density (share)", title="Figure 8; points: printed crossings of 0.3"
    )
    for i, row in enumerate(row for row in results.get("table 4", []) if row["n"] in TABLE_4):
        printed, color = TABLE_4[row["n"]], COLORS[i]
        ours = [row["seconds"]["Full"] / row["seconds"][f"{d:g}"] for d in DENSITIES_4]
        rates.plot(DENSITIES_4, ours, f"{MARKERS[i]}-", color=color)
        shown = [rate / printed[-2] for rate in printed[: len(DENSITIES_4)]]
        rates.plot(DENSITIES_4, shown, f"{MARKERS[i]}--", color=color, markerfacecolor="none")
        ends[rates][f"n = {row['n']}"] = (DENSITIES_4[0], ours[0], color)
    rates.set(xscale="log", xlabel="density (share)", ylabel="rate over Full (ratio)", title="Table 4; dashed: printed")
    for axes, named in ends.items():
        if named:
            label_ends(axes, named)
    return figure


def draw(results: dict[str, Any], path: Path) -> str:
    """Draw the picture; return one line that says what became of it."""
    try:
        return save_figure(figure_of(results), path)
    except ImportError:
        return "no plot: pip install 'magicube-cutlass[plots]'"
