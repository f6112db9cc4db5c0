"""Plot of ``docs/lab/paper-residual.md``: errors and densities by threshold, rates by density."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from printed.values import DENSITIES_4, ETA, TABLE_4, TABLE_5, THRESHOLD_AT_ETA, THRESHOLDS_5


def draw(results: dict[str, Any], path: Path) -> str:
    """Draw Figures 6 and 8 and Tables 4 and 5; return one line that says what became of it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: pip install 'magicube-cutlass[plots]'"
    figure = Figure(figsize=(13, 9), layout="constrained")
    areas = figure.subplot_mosaic("AB;CD;EF")
    colors = {name: f"C{i}" for i, name in enumerate(THRESHOLD_AT_ETA)}
    for row in results["figures 6 and 8"]:
        name, points, area = row["distribution"], row["points"], areas["A" if row["bits"] == 8 else "B"]
        thresholds = [p["threshold"] for p in points]
        area.plot(thresholds, [p["error"] for p in points], color=colors[name], marker=".", label=name)
        area.axhline(row["full"], color=colors[name], linestyle="--", linewidth=0.8)
        area.axhline(row["origin"], color=colors[name], linestyle=":", linewidth=0.8)
        if row["bits"] == 8:
            areas["C"].plot(thresholds, [p["density"] for p in points], color=colors[name], label=name)
            areas["C"].plot(THRESHOLD_AT_ETA[name], ETA, "o", color=colors[name])
    for key, bits in (("A", 8), ("B", 4)):
        title = f"Figure 6, int{bits}, n = {results['n']} (dashed: full, dotted: origin)"
        areas[key].set(yscale="log", xlabel="threshold", ylabel="relative error", title=title)
    areas["C"].set(xlabel="threshold", ylabel="density", title="Figure 8 (points: printed crossings of 0.3)")
    for row in results.get("table 4", []):
        if (printed := TABLE_4.get(row["n"])) is None:
            continue
        ours = [row["seconds"]["Full"] / row["seconds"][f"{d:g}"] for d in DENSITIES_4]
        (line,) = areas["D"].plot(DENSITIES_4, ours, marker="o", label=f"ours, n = {row['n']}")
        shown = [rate / printed[-2] for rate in printed[: len(DENSITIES_4)]]
        areas["D"].plot(DENSITIES_4, shown, "--", marker="x", color=line.get_color(), label=f"printed, n = {row['n']}")
    areas["D"].set(xscale="log", xlabel="density", ylabel="times the rate of Full", title="Table 4")
    for key, bits in (("E", 8), ("F", 4)):
        for row in (row for row in results["table 5"] if row["bits"] == bits):
            color, cells = colors[row["distribution"]], TABLE_5[bits][row["distribution"]]
            areas[key].plot(THRESHOLDS_5, row["ours"], "o-", color=color, label=row["distribution"])
            pairs = [(t, cell[0]) for t, cell in zip(THRESHOLDS_5, cells, strict=True) if cell is not None]
            areas[key].plot([t for t, _ in pairs], [a for _, a in pairs], "x--", color=color)
        areas[key].set(
            yscale="symlog", xlabel="threshold", ylabel="acc up", title=f"Table 5, int{bits} (crosses: printed)"
        )
    for area in areas.values():
        area.legend(fontsize=7)
    machine = results["machine"]
    figure.suptitle(f"{machine['cpu']}, threads: {machine['threads']}, {machine['date']}", fontsize=9)
    figure.savefig(path, dpi=90)
    return f"plot: {path}"
