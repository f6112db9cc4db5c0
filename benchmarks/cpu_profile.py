"""Where the time of the CPU SpMM goes: what a group costs, and what is left without any.

A group is four gathered rows of a 64-column panel times eight rows of A.  The time of a product is a straight line in
their number; its slope and its start are fitted to products of three densities, timed in one interleaved run on one
thread.  Writes ``benchmarks/results/cpu_profile.json``, from which docs/lab/performance.md takes its figures.
Run: ``python benchmarks/cpu_profile.py [--quick] [--out FILE]``
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch
from harness.timing import measure

import magicube_cutlass as mc
from magicube_cutlass.bench.problems import dense_baselines, random_matrix, random_operand
from magicube_cutlass.cli.environment import provenance

RESULTS = Path(__file__).resolve().parent / "results" / "cpu_profile.json"
DENSITIES = (0.1, 0.3, 0.5)
VECTOR_LENGTH, PANEL, QUAD = 8, 64, 4
SHAPES = ((1024, 256, 1024), (1024, 1024, 1024), (2048, 2048, 2048))  # a panel fits the first-level cache; or not


def groups(lhs: mc.SRBCRS, n: int) -> int:
    """Groups that the product with ``n`` columns multiplies."""
    quads = (lhs.row_end - lhs.row_start + QUAD - 1) // QUAD  # (R,)
    return int(quads.sum()) * -(-n // PANEL)


def into(out: torch.Tensor, lhs: mc.SRBCRS, rhs: mc.QuantTensor) -> torch.Tensor:
    """The product, written where the last one was: the allocator's part is left out."""
    return mc.spmm(lhs, rhs, out=out)


def profile(m: int, k: int, n: int, budget: float) -> dict[str, Any]:
    """Cost of a group and of everything else for one shape, next to the dense product."""
    rhs, out = random_operand(k, n, 8, 2), torch.empty(m, n, dtype=torch.int32)
    matrices = {d: random_matrix(mc.random_pattern(m, k, 1 - d, VECTOR_LENGTH, "uniform"), 8, 1) for d in DENSITIES}
    calls: dict[str, Callable[[], object]] = {str(d): partial(into, out, lhs, rhs) for d, lhs in matrices.items()}
    timed = measure(calls | dense_baselines(matrices[DENSITIES[0]], rhs), budget=budget)
    counts = {d: groups(lhs, n) for d, lhs in matrices.items()}
    fit = linear_regression(list(counts.values()), [timed[str(d)].median for d in DENSITIES])
    slope, fixed = fit.slope * 1e9, fit.intercept * 1e3
    dense = min(timing.median for name, timing in timed.items() if name not in calls) * 1e3
    print(f"{m} x {k} x {n}: {slope:.1f} ns a group, {fixed:.2f} ms fixed, dense {dense:.2f} ms", flush=True)
    points = [{"density": d, "groups": counts[d], "ms": timed[str(d)].median * 1e3} for d in DENSITIES]
    return {"m": m, "k": k, "n": n, "ns_per_group": slope, "fixed_ms": fixed, "dense_ms": dense, "points": points}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small shape, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds a product and density")
    args = parser.parse_args()
    shapes, budget = (((256, 256, 256),), 0.02) if args.quick else (SHAPES, args.budget)
    torch.set_num_threads(1)
    results = {
        "machine": provenance() | {"threads": "1"},
        "setting": {"vector_length": VECTOR_LENGTH, "bits": [8, 8], "pattern": "uniform", "out": "int32"},
        "shapes": [profile(*shape, budget) for shape in shapes],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
