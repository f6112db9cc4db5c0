"""Tables of ``docs/lab/paper-residual.md``: printed/ours."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from printed.accuracy import EXAMPLE_THRESHOLDS
from printed.values import (
    DENSITIES_3,
    DENSITIES_4,
    EXAMPLE,
    FLOAT_7,
    TABLE_2,
    TABLE_3,
    TABLE_4,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    THRESHOLDS_5,
    THRESHOLDS_7,
)

Rows = list[list[str]]
METHODS = ("origin", "full", "sparse")


def table(headers: list[str], rows: Rows) -> str:
    """Return a Markdown table, its first column to the left, the others to the right."""
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine(facts: dict[str, str], sections: dict[str, dict[str, str]]) -> str:
    """Return where it was measured, and date and commit of each section."""
    runs: dict[str, list[str]] = {}
    for name, ran in sections.items():
        runs.setdefault(f"{ran['date']}, commit {ran['commit']}", []).append(name)
    threads = "one thread" if facts["threads"] == "1" else f"{facts['threads']} threads"
    lines = [f"- {', '.join(names)}: {when}" for when, names in runs.items()]
    where = f"{facts['cpu']}, {facts['engine path']}, {threads}, torch {facts['torch']}; sections of the script:"
    return "\n".join([where, "", *lines])


def _entries(values: list[list[float]]) -> str:
    return "; ".join(" ".join(f"{v:.4f}".rstrip("0").rstrip(".") for v in row) for row in values)


def example(found: dict[str, Any]) -> str:
    """Return the entries of the example that differ from the printed ones, and Table 2."""
    rows = []
    for name, printed in EXAMPLE.items():
        if name in "AB":
            continue
        cells = [name]
        for label in ("ours", "printed lambda"):
            values = found[label][name]
            gaps = [
                f"({i}, {j}): {printed[i][j]:g}/{values[i][j]:.4g}"
                for i in range(3)
                for j in range(3)
                if abs(values[i][j] - printed[i][j]) > 1.5e-4
            ]
            cells.append(
                ", ".join(gaps) if len(gaps) <= 2 else f"{len(gaps)} entries, by {_largest(values, printed):.2g}"
            )
        rows.append([cells[0], *(cell or "none" for cell in cells[1:])])
    errors = found["errors"]
    two = []
    for kind, (worst, frobenius) in TABLE_2.items():
        mine = [errors[f"{label}, {kind}"] for label in ("printed matrices", "printed lambda", "ours")]
        two.append(
            [kind, f"{worst:g}", *(f"{e[0]:.3f}" for e in mine), f"{frobenius:g}", *(f"{e[1]:.3f}" for e in mine)]
        )
    wrong = found["wrong entries of 18"]
    masks = [
        [f"`{rule}`", *(str(wrong[f"{rule} {t}"]) for t in EXAMPLE_THRESHOLDS)] for rule in ("example", "eq14", "mean")
    ]
    return "\n\n".join(
        [
            table(["matrix", "differs from print, exact lambda", "differs, printed lambda"], rows),
            table(["wrong entries of 18 at M =", *(f"{t:g}" for t in EXAMPLE_THRESHOLDS)], masks),
            table(
                [
                    "Table 2",
                    "E_r",
                    "of print",
                    "printed lambda",
                    "ours",
                    "E_delta",
                    "of print",
                    "printed lambda",
                    "ours",
                ],
                two,
            ),
        ]
    )


def _largest(values: list[list[float]], printed: list[list[float]]) -> float:
    return max(abs(v - p) for row, other in zip(values, printed, strict=True) for v, p in zip(row, other, strict=True))


def speed_at(row: dict[str, float], densities: tuple[float, ...], density: float) -> float:
    """Return rate over Full's at a density, linear between the measured ones."""
    points = sorted((d, row[f"{d:g}"] / row["Full"]) for d in densities)
    if density <= points[0][0]:
        return points[0][1]
    for (d0, r0), (d1, r1) in pairwise(points):
        if density <= d1:
            return r0 + (r1 - r0) * (density - d0) / (d1 - d0)
    return points[-1][1]


def _rates(rows: list[dict[str, Any]], n: int, scale: float) -> dict[str, float] | None:
    row = next((row for row in rows if row["n"] == n), None)
    return None if row is None else {name: scale * 2 * n**3 / s for name, s in row["seconds"].items()}


def table_5(results: dict[str, Any]) -> str:
    """Return Table 5, printed/ours, with our rates of Table 4 at n = 4096 for the speed-ups."""
    ours = _rates(results.get("table 4", []), 4096, 1e-9)
    body = []
    for row in results["table 5"]:
        cells = TABLE_5[row["bits"]][row["distribution"]]
        line = [f"int{row['bits']} {row['distribution']}"]
        for cell, accuracy, density in zip(cells, row["ours"], row["density"], strict=True):
            line.append(f"{'-' if cell is None else f'{cell[0]:.2f}'}/{accuracy:.2f}")
            speed = "" if ours is None else f"{speed_at(ours, DENSITIES_4, density):.2f}"
            line.append(f"{'-' if cell is None else f'{cell[1]:.2f}'}/{speed}")
        body.append(line)
    headers = [f"{what} {t:g}" for t in THRESHOLDS_5 for what in ("acc", "speed")]
    return table(["Table 5", *headers], body)


def rates(results: dict[str, Any], name: str) -> str:
    """Return Table 3 or 4, printed/ours."""
    printed, densities, scale = (TABLE_3, DENSITIES_3, 1e-12) if name == "table 3" else (TABLE_4, DENSITIES_4, 1e-9)
    kinds = [f"{d:g}" for d in densities] + ["Full", "Origin"]
    body = []
    for n in sorted({*printed, *(row["n"] for row in results.get(name, []))}):
        ours, values = _rates(results.get(name, []), n, scale), printed.get(n)
        prefix = ["-" for _ in kinds] if values is None else [f"{p:g}" for p in values]
        if ours is None:
            body.append([str(n), *prefix, "not run here"])
            continue
        cells = [f"{p}/{ours[kind]:.3g}" for p, kind in zip(prefix, kinds, strict=True)]
        body.append([str(n), *cells, f"{ours['float32']:.3g}"])
    unit = "TOPS" if name == "table 3" else "GOPS"
    return table([f"n ({unit})", *kinds, "float32"], body)


def processors(found: dict[str, dict[str, Any]]) -> str:
    """Return milliseconds of whole calls by the engine's path: the named path's results of Table 4's sizes."""
    body = []
    for path, results in found.items():
        for row in results["table 4"]:
            times = row["seconds"]
            shown = [f"{1e3 * times[kind]:.1f}" for kind in ("0.01", "Full", "Origin", "float32")]
            gains = [f"{times[kind] / times['0.01']:.2f}" for kind in ("float32", "Full")]
            body.append([path, str(row["n"]), *shown, *gains])
    return table(["path", "n", "0.01, ms", "Full", "Origin", "float32", "0.01 over float32", "over Full"], body)


def on_a_gpu(results: dict[str, Any]) -> dict[str, str]:
    """Return Table 3 printed/ours, and times of it and of fully connected layers, by a GPU."""
    names = [f"{d:g}" for d in DENSITIES_3]
    rates, times = [], []
    for row in results.get("table 3", []):
        seconds, us, printed = row["seconds"], _microseconds(row), TABLE_3.get(row["n"])
        scale = 2e-12 * row["n"] ** 3
        prefix = ["-" for _ in (*names, "Full", "Origin")] if printed is None else [f"{p:g}" for p in printed]
        best = [max(scale / seconds[f"{name}, V = {v}"] for v in (1, 8)) for name in names]
        ours = [*best, scale / seconds["Full"], scale / seconds["Origin"]]
        cells = [f"{p}/{value:.3g}" for p, value in zip(prefix, ours, strict=True)]
        rates.append([str(row["n"]), *cells, f"{scale / seconds['float32']:.3g}"])
        shown = [f"{us[f'{name}, V = {v}']}" for v in (1, 8) for name in (names[0], names[-1])]
        others = ("Full", "Origin", "float32", "int8 product alone", "residual.matmul, direct", "residual.matmul, full")
        times.append([str(row["n"]), *shown, *(us[name] for name in others)])
    found = {}
    if rates:
        heads = [f"V = {v}, {name}" for v in (1, 8) for name in (names[0], names[-1])]
        last = ["Full", "Origin", "float32", "int8 product alone", "`residual.matmul`, direct", "full"]
        found["table-3-gpu"] = table(["n (TOPS)", *names, "Full", "Origin", "float32"], rates)
        found["table-3-gpu-times"] = table(["n, us", *heads, *last], times)
    if "layers" in results:
        ways = ("float32", "origin", "density 0.01", "threshold 1", "threshold 0")
        body = [[str(row["n"]), *(_microseconds(row)[way] for way in ways)] for row in results["layers"]]
        found["layers-gpu"] = table(["n, us", *ways], body)
    if found:
        machine = results["machine"]
        ran = results["sections"]["table3" if rates else "layers"]
        found["machine-gpu"] = f"{machine['gpu']}, torch {machine['torch']}, {ran['date']}, commit {ran['commit']}."
    return found


def _microseconds(row: dict[str, Any]) -> dict[str, str]:
    return {name: f"{1e6 * seconds:.0f}" for name, seconds in row["seconds"].items()}


def figure_7(rows: list[dict[str, Any]]) -> str:
    """Return the shares of time at density .1."""
    shown = [row for row in rows if row["call"] == "0.1"]
    parts = list(shown[0]["shares"])
    return table(["n", *parts], [[str(r["n"]), *(f"{100 * r['shares'][p]:.0f}%" for p in parts)] for r in shown])


def figure_1(rows: list[dict[str, Any]]) -> str:
    """Return GOPS by library and precision."""
    names = list(rows[0]["GOPS"])
    body = [[name, *(f"{row['GOPS'][name]:.3g}" if name in row["GOPS"] else "" for row in rows)] for name in names]
    return table(["GOPS at n =", *(str(row["n"]) for row in rows)], body)


def layers(rows: list[dict[str, Any]]) -> str:
    """Return the rates of fully connected layers over float32's, and from which n on each way is the faster one."""
    ways = [way for way in rows[0]["seconds"] if way != "float32"]
    ratios = {way: [row["seconds"]["float32"] / row["seconds"][way] for row in rows] for way in ways}
    body = []
    for i, row in enumerate(rows):
        cells = [f"{ratios[way][i]:.2f}" for way in ways]
        body.append([str(row["n"]), f"{1e3 * row['seconds']['float32']:.3g}", *cells])
    first = []
    for way in ways:
        slower = [i for i, ratio in enumerate(ratios[way]) if ratio <= 1]
        above = slower[-1] + 1 if slower else 0
        first.append(f"n = {rows[above]['n']}" if above < len(rows) else "not measured to be")
    body.append(["faster from", "", *first])
    return table(["n", "float32, ms", *(f"{way}, times its rate" for way in ways)], body)


def table_6(rows: list[dict[str, Any]], n: int = 256) -> str:
    """Return Table 6, printed/ours, from ``qr_table.json``."""
    found = {(r["distribution"], r["way"]): r["error"] for r in rows if r["n"] == n}
    body = []
    for name, widths in TABLE_6.items():
        line = [name]
        for bits, printed in zip((4, 8), widths, strict=True):
            for method, value in zip(METHODS, printed, strict=True):
                line.append(f"{value:.3f}/{found[name, f'int{bits} {method}, explicit']:.3f}")
        body.append(line)
    return table(["Table 6", *(f"int{bits} {method}" for bits in (4, 8) for method in METHODS)], body)


def table_7(rows: list[dict[str, Any]]) -> str:
    """Return Table 7, printed/ours, from ``lenet.json``."""
    found = {row["way"]: row for row in rows if row["layers"] == "fc1+fc2"}
    single = found["float32"]
    body = []
    for bits, cells in TABLE_7.items():
        for threshold, (accuracy, speed) in zip(THRESHOLDS_7, cells, strict=True):
            row = found[f"int{bits}, threshold {threshold:g}"]
            mine = f"{single['ms'] / row['ms']:.2f}"
            body.append([f"int{bits}, {threshold:g}", f"{accuracy:.4f}/{row['accuracy']:.4f}", f"{speed:g}/{mine}"])
    body.append(["float32", f"{FLOAT_7:.4f}/{single['accuracy']:.4f}", "1/1"])
    return table(["Table 7", "accuracy", "speed-up"], body)
