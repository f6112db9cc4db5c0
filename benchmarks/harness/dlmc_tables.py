"""Tables of products of pruned networks' matrices on a GPU."""

from __future__ import annotations

from statistics import geometric_mean, median
from typing import Any

from harness.tables import machine_line

DENSE_PRODUCTS = ("dense fp16", "dense int8", "dense fp8", "magicube dense int8")


def _ratio_cell(ratios: list[float]) -> str:
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"


def _floats(results: dict[str, Any]) -> list[str]:
    """Products of floats, ours and others', against the dense one, by sparsity; nothing where none was measured."""
    times: dict[int, dict[str, float]] = {}
    for row in results["others"]:
        if "us" in row:
            times.setdefault(row["matrix"], {})[row["name"]] = row["us"]
    base = "dense fp16"
    kinds = list(dict.fromkeys(name for row in times.values() for name in row if name != base))
    targets = sorted({results["matrices"][matrix]["target"] for matrix in times})
    if not targets:
        return []
    n = ", ".join(str(x) for x in sorted({row["n"] for row in results["others"]}))
    lines = [
        f"SpMM of floats, V = 8, N = {n}, {len(times)} of the matrices, times as fast as dense fp16: geometric mean "
        "and range; other libraries have the same elements, as CSR or in dense blocks:",
        "",
        "| sparsity of the folder | " + " | ".join(kinds) + " |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    for target in targets:
        of_target = [row for matrix, row in times.items() if results["matrices"][matrix]["target"] == target]
        cells = (
            _ratio_cell([row[base] / row[kind] for row in of_target if kind in row and base in row]) for kind in kinds
        )
        lines.append(f"| {target:g} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _fastest(results: dict[str, Any]) -> list[str]:
    """Speed-ups of L8-R8, V = 8, N = 256 over the fastest dense product of each shape, behind another kernel."""
    ratios: dict[float, tuple[list[float], list[float]]] = {}
    for row in results["spmm"]:
        if (row.get("pair"), row["v"], row["n"]) != ("L8-R8", 8, 256):
            continue
        behind, loop = (
            [row[f"{kind}times {name}"] for name in DENSE_PRODUCTS if f"{kind}times {name}" in row]
            for kind in ("behind: ", "")
        )
        if behind:
            found = ratios.setdefault(results["matrices"][row["matrix"]]["target"], ([], []))
            found[0].append(min(behind))
            found[1].append(min(loop))
    if not ratios:
        return []
    lines = [
        f"SpMM, L8-R8, V = 8, N = 256, against the fastest of {', '.join(DENSE_PRODUCTS)} for each matrix, behind "
        "another kernel and in a loop: geometric mean and range, and the share of matrices that take longer behind:",
        "",
        "| sparsity of the folder | matrices | behind | in a loop | slower |",
        "|---" * 5 + "|",
    ]
    for target, (after, loops) in sorted(ratios.items()):
        slower = sum(ratio < 1 for ratio in after) / len(after)
        cells = (str(len(after)), _ratio_cell(after), _ratio_cell(loops), f"{slower:.0%}")
        lines.append(f"| {target:g} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def render_dlmc(results: dict[str, Any]) -> str:
    """Speed-ups by sparsity in Markdown, the figures, how many of the matrices lose, and skewed rows."""
    lines = [f"{machine_line(results)}; {len(results['matrices'])} matrices, {results['setting']['us']}.", ""]
    for kind, size in (("spmm", "n"), ("sddmm", "inner")):
        rows = [row for row in results[kind] if row.get("pair") == "L8-R8" and "times dense fp16" in row]
        lengths = sorted({row["v"] for row in rows})
        targets = sorted({results["matrices"][row["matrix"]]["target"] for row in rows})
        lines += [
            f"{'SpMM' if kind == 'spmm' else 'SDDMM'}, L8-R8, times as fast as dense fp16: geometric mean and range "
            f"over matrices and {size} = {', '.join(str(x) for x in sorted({row[size] for row in rows}))}:",
            "",
            f"![speed-up by sparsity](../images/dlmc_{kind}.png)",
            "",
            "| sparsity of the folder | " + " | ".join(f"V = {v}" for v in lengths) + " |",
            "|---" * (len(lengths) + 1) + "|",
        ]
        for target in targets:
            of_target = [row for row in rows if results["matrices"][row["matrix"]]["target"] == target]
            cells = (_ratio_cell([row["times dense fp16"] for row in of_target if row["v"] == v]) for v in lengths)
            lines.append(f"| {target:g} | " + " | ".join(cells) + " |")
        slower = sum(row["times dense fp16"] < 1 for row in rows)
        lines += ["", f"{slower} of these {len(rows)} products take longer than the dense one."]
        failures = [row for row in results[kind] if "failure" in row]
        lines += [f"{len(failures)} more failed.", ""] if failures else [""]
    lines += _fastest(results)
    lines += _floats(results)
    lines += ["![sparsity from which on ours is faster](../images/break_even.png)", ""]
    ratios = [row for row in results["skew"] if "ratio" in row]
    skewed = [row for row in ratios if row["name"].startswith("5:1")]
    real = [row["ratio"] for row in ratios if not row["name"].startswith("5:1")]
    lines += [
        "Longest vector row five times the shortest: time over that of a uniform pattern with as many vectors:",
        ", ".join(f"{row['name'].removeprefix('5:1, ')}: {row['ratio']:.2f}" for row in skewed) + ".",
    ]
    if real:
        lost = sum(x > 1.15 for x in real)
        lines.append(
            f"The same for {len(real)} of the matrices, N = 512, V = 8: median {median(real):.2f}, {min(real):.2f} to "
            f"{max(real):.2f}; {lost} lose more than 15%."
        )
    return "\n".join(lines)
