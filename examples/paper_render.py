"""Tables and plots of ``paper_tables.py``'s results, and what of the printed values is at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report import machine_line, markdown

# All that was at hand: the abstract's speed and the density that the paper states; its tables were not.
PRINTED = {"speed-up": 1.46, "eta on a CPU": 0.3}


def _matrix(values: list[list[float]]) -> str:
    return "; ".join(" ".join(f"{value:g}" for value in row) for row in values)


def _example(found: dict[str, Any]) -> str:
    rows = [[name, _matrix(found[name])] for name in ("A", "B", "A_int8", "B_int8", "C_quant")]
    for rule, values in found["rules"].items():
        rows += [[f"{rule}: averages of rows", " ".join(f"{x:.2f}" for x in values["averages of rows"])]]
        rows += [[f"{rule}: averages of columns", " ".join(f"{x:.2f}" for x in values["averages of columns"])]]
        rows += [[f"{rule}: {name}", _matrix(values[name])] for name in ("A kept", "B kept")]
        rows += [[f"{rule}: relative error", f"{values['error']:.2e} (direct {found['direct error']:.2e})"]]
    return markdown(("", f"threshold {found['threshold']:g}"), rows)


def _by_threshold(rows: list[dict[str, Any]], rule: str) -> str:
    shown = [row for row in rows if row["rule"] == rule]
    names = ["direct" if point["threshold"] == "inf" else f"{point['threshold']:g}" for point in shown[0]["points"]]
    headers = ["distribution", "bits", *names]
    body = [
        [row["distribution"], str(row["bits"]), *(f"{p['error']:.1e} ({p['density']:.2f})" for p in row["points"])]
        for row in shown
    ]
    return markdown(headers, body)


def _by_scaling(rows: list[dict[str, Any]]) -> str:
    headers = ["distribution", "bits", "scaling", "rounding", "direct", "sparse", "density", "full"]
    body = []
    for row in rows:
        errors = {kind: f"{error:.2e}" for kind, error in row["errors"].items()}
        kind = [row["distribution"], str(row["bits"]), row["scaling"], row["rounding"]]
        body.append([*kind, errors["direct"], errors["sparse"], f"{row['density']:.2f}", errors["full"]])
    return markdown(headers, body)


def _rates(rows: list[dict[str, Any]]) -> str:
    headers = ["n", "product", "ms", "times direct's rate", "times full's rate", "times float32's rate"]
    body = []
    for row in rows:
        times = row["ms"]
        for name, ms in times.items():
            shares = [times[baseline] / ms for baseline in ("direct", "full", "float32")]
            body.append([str(row["n"]), name, f"{ms:.2f}", *(f"{share:.2f}" for share in shares)])
    return markdown(headers, body)


def _steps(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0]["ms"])
    body = [
        [str(row["n"]), row["kind"], f"{row['density']:.3f}", *(f"{row['ms'][step]:.2f}" for step in names)]
        for row in rows
    ]
    return markdown(["n", "kind", "density", *names], body)


def best_gain(results: dict[str, Any]) -> float:
    """The largest rate of a sparse correction over the full one's, over all sizes and densities."""
    return max(
        row["ms"]["full"] / ms
        for row in results["rates"]
        for name, ms in row["ms"].items()
        if name.startswith("sparse")
    )


def render(results: dict[str, Any]) -> str:
    """All tables as Markdown."""
    n, etas = results["n"], results["eta"]
    eta_line = f"measured here: {etas['1']:.2f} (V = 1), {etas['8']:.2f} (V = 8)"
    return "\n\n".join(
        [
            f"Measured on {machine_line(results)}.",
            "### A worked 3 x 3 example\n\n" + _example(results["worked example"]),
            f"### Figures 6 and 8: relative error (mean density of A' and B') by threshold, n = {n}, rule `mean`\n\n"
            + _by_threshold(results["errors by threshold"], "mean"),
            f"### The same with equation 14 read literally, n = {n}\n\n"
            + _by_threshold(results["errors by threshold"], "eq14"),
            f"### Errors by scaling and rounding (Table 5's subject), n = {n}, sparse: rule `mean`, threshold 0.1\n\n"
            + _by_scaling(results["errors by scaling"]),
            "### Tables 3 and 4: rate by density, int8 operands ready, fastest runs\n\n"
            f"Printed, in the abstract: {PRINTED['speed-up']} times the speed on a CPU. Best here: "
            f"{best_gain(results):.2f} times the rate of full compensation. The density eta where a sparse correction "
            f"takes the dense one's time: printed about {PRINTED['eta on a CPU']} on a CPU, {eta_line}.\n\n"
            + _rates(results["rates"]),
            "### Figure 7: milliseconds of the steps of the fastest call, exponential data\n\n"
            + _steps(results["steps"]),
        ]
    )


def draw(results: dict[str, Any], path: Path) -> str:
    """Error and density by threshold, and rates by density; returns one line that says what became of it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: pip install 'magicube-cutlass[plots]'"
    figure = Figure(figsize=(13, 8), layout="constrained")
    areas = figure.subplot_mosaic("AB;CD")
    for row in (row for row in results["errors by threshold"] if row["rule"] == "mean"):
        points = [point for point in row["points"] if point["threshold"] != "inf"]
        area = areas["A" if row["bits"] == 8 else "B"]
        thresholds = [point["threshold"] for point in points]
        area.plot(thresholds, [point["error"] for point in points], marker="o", label=row["distribution"])
        if row["bits"] == 8:
            areas["C"].plot(thresholds, [point["density"] for point in points], marker="o", label=row["distribution"])
    for name, bits in (("A", 8), ("B", 4)):
        areas[name].set(yscale="log", ylabel="relative error", title=f"int{bits}, n = {results['n']}, rule mean")
    areas["C"].set(ylabel="mean density of A' and B'", title="int8")
    for name in "ABC":
        areas[name].set_xlabel("threshold")
        areas[name].legend(fontsize=8)
    for i, row in enumerate(results["rates"]):
        for v, style in ((1, "--"), (8, "-")):
            found = [(float(k.split()[-1]), ms) for k, ms in row["ms"].items() if k.startswith(f"sparse V={v} ")]
            values = [row["ms"]["full"] / ms for _, ms in found]
            areas["D"].plot(
                [d for d, _ in found], values, style, color=f"C{i}", marker="o", label=f"n = {row['n']}, V = {v}"
            )
        areas["D"].axhline(row["ms"]["full"] / row["ms"]["direct"], color=f"C{i}", linewidth=0.8, linestyle=":")
    areas["D"].axhline(1, color="0.4", linewidth=0.8)
    areas["D"].set(xlabel="density", ylabel="times the rate of full compensation", title="rates (dotted: direct)")
    areas["D"].legend(fontsize=8)
    figure.suptitle(machine_line(results), fontsize=9)
    figure.savefig(path, dpi=100)
    return f"plot: {path}"
