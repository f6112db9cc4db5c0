"""Ratios printed in Li, Osawa, Hoefler, SC'22, beside ours, and the tables of ``docs/lab/paper-magicube.md``."""

from __future__ import annotations

from statistics import geometric_mean
from typing import Any

from printed.page import Rows, table

# Section V-B in words, for Figures 14 (N = 256) and 15 (K = 256), V = 8, all 1,536 matrices: geometric mean, largest.
PRINTED = {
    ("spmm", "L8-R8", "cuSPARSE Blocked-ELL int8"): (1.44, 2.37),
    ("spmm", "L8-R8", "cuBLAS int8"): (2.88, 15.26),
    ("spmm", "L16-R8", "vectorSparse fp16"): (2.50, 5.27),
    ("sddmm", "L16-R16", "vectorSparse fp16"): (1.58, 2.15),
}
# What stands for a printed baseline in our results: GPU, CPU.
OURS = {
    "cuSPARSE Blocked-ELL int8": ("", ""),
    "cuBLAS int8": ("times dense int8", "times torch dynamic int8"),
    "vectorSparse fp16": ("", ""),
}
LIBRARIES = {"cuSPARSE Blocked-ELL int8": "Blocked-ELL int8 8"}  # names of our rows of other libraries
CPU_BASELINES = ("float32", "torch dynamic int8", "MKL CSR float32")
Results = dict[str, Any]


def best(row: dict[str, Any]) -> float:
    """How many times as fast as the fastest of the others a row is."""
    return min(value for key, value in row.items() if key.startswith("times "))


def picked(results: Results, kind: str, pair: str, v: int, size: int) -> list[dict[str, Any]]:
    """Rows of one pair, length and N or K, with the sparsity that their folder names."""
    return [
        {**row, "target": results["matrices"][row["matrix"]]["target"]}
        for row in results[kind]
        if (row.get("pair"), row["v"], row.get("n", row.get("inner"))) == (pair, v, size) and "us" in row
    ]


def machines(gpu: Results, cpu: Results) -> str:
    """What measured the two results files."""
    lines = []
    for results, place in ((gpu, "gpu"), (cpu, "cpu")):
        machine = results["machine"]
        run = f"{machine['date']}, commit {machine['commit']}"
        threads = f", {results['setting']['isa']}, one thread" if place == "cpu" else ""
        lines.append(
            f"- {place.upper()}: {machine[place]}{threads}, torch {machine['torch']}, {run}; "
            f"{len(results['matrices'])} matrices, {results['setting']['us']}."
        )
    return "\n".join(lines)


def _cell(values: list[float]) -> str:
    return f"{geometric_mean(values):.2f} ({max(values):.2f})" if values else "not run"


def _of_another(gpu: Results, rows: list[dict[str, Any]], name: str, us: str) -> list[float]:
    """Times of another library's product of the same matrices and N over ours."""
    found = {row["matrix"]: row[us] for row in gpu["others"] if (row["name"], row["n"]) == (name, 256) and us in row}
    return [found[row["matrix"]] / row[us] for row in rows if row["matrix"] in found]


def ratios(gpu: Results, cpu: Results) -> str:
    """Printed ratios beside those of the same product here: geometric mean (largest)."""
    body: Rows = []
    for (kind, pair, baseline), (mean, largest) in PRINTED.items():
        line = [f"{'SpMM' if kind == 'spmm' else 'SDDMM'} {pair} / {baseline}", f"{mean:.2f} ({largest:.2f})"]
        rows = picked(gpu, kind, pair, 8, 256)
        if baseline in LIBRARIES:
            line += [_cell(_of_another(gpu, rows, LIBRARIES[baseline], us)) for us in ("us", "behind_us")]
        else:
            key = OURS[baseline][0]
            line += [_cell([row[name] for row in rows if name in row]) for name in (key, f"behind: {key}")]
        of_cpu = picked(cpu, kind, pair, 8, 256)
        line.append(_cell([row[OURS[baseline][1]] for row in of_cpu if OURS[baseline][1] in row]))
        body.append(line)
    of_gpu = gpu["machine"]["gpu"].removeprefix("NVIDIA ").split()[0]
    counts = [f"{len(results['matrices'])} matrices" for results in (gpu, cpu)]
    return table(
        [
            "V = 8, N or K = 256",
            "A100, 1,536 matrices, printed",
            f"{of_gpu}, {counts[0]}, in a loop",
            "behind another kernel",
            f"CPU, {counts[1]}",
        ],
        body,
    )


def by_sparsity(cpu: Results, kind: str) -> str:
    """L8-R8, V = 8, against each baseline: geometric means, and the share that is faster than all of them."""
    rows = picked(cpu, kind, "L8-R8", 8, 256)
    names = [name for name in CPU_BASELINES if all(f"times {name}" in row for row in rows)]
    body: Rows = []
    for label, chosen in [*_groups(rows), ("all", rows)]:
        cells = [f"{geometric_mean([row[f'times {name}'] for row in chosen]):.2f}" for name in names]
        body.append([label, str(len(chosen)), *cells, *_against_best(chosen)])
    return table(["sparsity", "matrices", *names, "the fastest", "faster than all"], body)


def by_length(cpu: Results, kind: str) -> str:
    """L8-R8 against the fastest baseline, by length of vectors."""
    chosen = {v: picked(cpu, kind, "L8-R8", v, 256) for v in (8, 4, 2)}
    groups = {v: [*_groups(rows), ("all", rows)] for v, rows in chosen.items()}
    body = [
        [groups[8][i][0], *(" / ".join(_against_best(groups[v][i][1])) for v in groups)] for i in range(len(groups[8]))
    ]
    return table(["sparsity", *(f"V = {v}" for v in groups)], body)


def by_pair(cpu: Results) -> str:
    """SpMM of Table IV's pairs, V = 8: microseconds of float32's dense product over ours."""
    pairs = list(dict.fromkeys(row["pair"] for row in cpu["spmm"]))
    found = {pair: _groups(picked(cpu, "spmm", pair, 8, 256)) for pair in pairs}
    body = []
    for pair, groups in found.items():
        body.append([pair, *(f"{geometric_mean([row['times float32'] for row in rows]):.2f}" for _, rows in groups)])
    return table(["SpMM", *(label for label, _ in found["L8-R8"])], body)


def ablations(results: Results, figure: int) -> str:
    """Figures 11 and 13 at V = 8: microseconds of the variants, each with the switches before it, by sparsity."""
    times, labels = _variants(results, f"Figure {figure}, ")
    body: Rows = []
    for (pair, label), of in times.items():
        body.append([pair, label, *(f"{of[target]:.1f}" for target in labels)])
    return table([f"Figure {figure}, us", "", *labels], body)


def mixed(results: Results) -> str:
    """Figure 12 at V = 8: microseconds of each pair's chosen kernel, by sparsity."""
    times, labels = _variants(results, "Figure 12, ")
    return table(["SpMM, us", *labels], [[pair, *(f"{of[x]:.1f}" for x in labels)] for (_, pair), of in times.items()])


def _variants(results: Results, prefix: str) -> tuple[dict[tuple[str, str], dict[str, float]], list[str]]:
    """Microseconds by (pair of the study, label) and sparsity at V = 8; the sparsities in their order."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for study in results["studies"]:
        if study["name"].startswith(prefix) and study["name"].endswith("V=8"):
            target, pair = study["workload"].split("/")[-2], study["name"].removeprefix(prefix).split(" ")[0]
            for row in study["rows"]:
                found.setdefault((pair, row["label"]), {})[target] = row["us"]
    return found, sorted({target for of in found.values() for target in of}, key=float)


def _groups(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    targets = sorted({row["target"] for row in rows})
    return [(f"{target:g}", [row for row in rows if row["target"] == target]) for target in targets]


def _against_best(rows: list[dict[str, Any]]) -> list[str]:
    values = [best(row) for row in rows]
    return [f"{geometric_mean(values):.2f}", f"{100 * sum(x > 1 for x in values) / len(values):.0f}%"]
