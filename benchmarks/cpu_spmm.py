"""SpMM on the CPU against the dense product and the sparse libraries, all in one run.

The dense product is the fastest of float32, bfloat16, torch's dynamic int8 linear layer and ``torch._int_mm`` on this
machine. Writes ``benchmarks/results/cpu_spmm.json`` (AVX512-VNNI) or ``cpu_spmm_<engine path>.json``, and renders the
tables of ``docs/performance/cpu.md`` from them.
Run: ``python benchmarks/cpu_spmm.py [--quick] [--out FILE]``
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from harness.timing import measure
from README_table import CPU, DOCS, render_cpu, update

import magicube_cutlass as mc
from cute_kernels.cpu.engine import isa
from cute_kernels.integers import product_bound
from magicube_cutlass.bench.problems import dense_baselines, exact_spmm, random_matrix, random_operand
from magicube_cutlass.cli.environment import provenance

_SUFFIX = "" if isa() == "avx512" else f"_{isa()}"
RESULTS = Path(__file__).resolve().parent / "results" / f"cpu_spmm{_SUFFIX}.json"
EXACT = ("magicube", "torch._int_mm", "torch._int_mm, column-major")
DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
VECTOR_LENGTH = 8
ROUNDS = 8  # of one and two threads in turn


def baselines(
    lhs: mc.SRBCRS, rhs: mc.QuantTensor, dense: dict[str, Callable[[], object]]
) -> dict[str, Callable[[], Any]]:
    """Every way to compute the product, on the same data."""
    scipy_csr = lhs.to_scipy(dequantize=False).astype("float32")
    torch_csr = lhs.to_dense(dequantize=False).float().to_sparse_csr()
    right = rhs.ints().float()
    right_numpy = right.numpy()
    return {
        "magicube": lambda: mc.spmm(lhs, rhs),
        **dense,
        "scipy CSR float32": lambda: scipy_csr @ right_numpy,
        "torch CSR float32": lambda: torch_csr @ right,
    }


def check(calls: dict[str, Callable[[], Any]], lhs: mc.SRBCRS, rhs: mc.QuantTensor) -> dict[str, float]:
    """Largest error of each baseline, relative to the largest possible sum; integers must be exact."""
    expected = exact_spmm(lhs, rhs)
    bound = product_bound(lhs.shape[1], 8, True, 8, True)
    errors = {}
    for name, call in calls.items():
        error = float((torch.as_tensor(call()).double() - expected.double()).abs().max())
        if error and name in EXACT:
            raise ArithmeticError(f"{name} is off by {error:.0f} for {lhs}")
        errors[name] = error / bound
    return errors


def break_even(densities: list[float], times: list[float], dense: list[float]) -> float | None:
    """Density at which the ratio of times crosses 1, by interpolation of its logarithm; None if it does not."""
    points = [(d, math.log(t / other)) for d, t, other in zip(densities, times, dense, strict=True)]
    for (d0, r0), (d1, r1) in pairwise(points):
        if r0 <= 0 < r1:
            return d0 + (d1 - d0) * -r0 / (r1 - r0)
    return None


def run_size(n: int, densities: tuple[float, ...], budget: float) -> dict[str, Any]:
    """All densities of one ``n x n x n`` product, one thread."""
    rows: list[dict[str, Any]] = []
    for density in densities:
        lhs = random_matrix(mc.random_pattern(n, n, 1 - density, VECTOR_LENGTH, "uniform"), 8, 1)
        rhs = random_operand(n, n, 8, 2)
        dense = dense_baselines(lhs, rhs)
        calls = baselines(lhs, rhs, dense)
        errors = check(calls, lhs, rhs)
        timed = measure(calls, budget=budget, min_runs=5)
        times = {name: timing.median * 1e3 for name, timing in timed.items()}
        times["dense"], fastest = min((times[name], name) for name in dense)
        rows.append({"density": density, "ms": times, "dense": fastest, "error": errors})
        print(f"n={n} density={density:.2f} " + " ".join(f"{k}={v:.2f}ms" for k, v in times.items()), flush=True)
    fastest_dense = [row["ms"]["dense"] for row in rows]
    crossings = {
        name: break_even(list(densities), [row["ms"][name] for row in rows], fastest_dense)
        for name in ("magicube", "scipy CSR float32", "torch CSR float32")
    }
    return {"n": n, "rows": rows, "break_even": crossings}


def steady(call: Callable[[], object], threads: int, seconds: float) -> list[float]:
    """Seconds of calls one after the other on so many threads, after three that wake them."""
    torch.set_num_threads(threads)
    for _ in range(3):
        call()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def two_threads(n: int, density: float, budget: float) -> dict[str, float]:
    """What two threads gain, by the medians and by the lower quartiles, and what the dense product gains here.

    Runs of calls on one and on two threads take turns: threads that a call has to wake first, or that spin after
    another library's call, would be measured otherwise.
    """
    lhs = random_matrix(mc.random_pattern(n, n, 1 - density, VECTOR_LENGTH, "uniform"), 8, 1)
    rhs = random_operand(n, n, 8, 2)
    dense, right = lhs.to_dense(dequantize=False).float(), rhs.ints().float()
    out = torch.empty(n, n, dtype=torch.int32)  # new memory for each result would time the kernel's page faults
    product = torch.empty(n, n)
    calls = {"ours": lambda: mc.spmm(lhs, rhs, out=out), "dense": lambda: torch.mm(dense, right, out=product)}
    times: dict[str, dict[int, list[float]]] = {name: {1: [], 2: []} for name in calls}
    for name, call in calls.items():
        for _ in range(ROUNDS):
            for threads, found in times[name].items():
                found.extend(steady(call, threads, budget / ROUNDS))
    torch.set_num_threads(1)
    # a virtual machine does not always have its second core: the fastest quarter of the calls tells of the code
    quarters = {name: [statistics.quantiles(times[name][threads], n=4) for threads in (1, 2)] for name in calls}
    (one, two), (dense_one, dense_two) = quarters["ours"], quarters["dense"]
    return {
        "n": n,
        "density": density,
        "one_ms": one[1] * 1e3,
        "two_ms": two[1] * 1e3,
        "speed_up": one[1] / two[1],
        "lower_quartile_speed_up": one[0] / two[0],
        "dense_speed_up": dense_one[1] / dense_two[1],
        "dense_lower_quartile_speed_up": dense_one[0] / dense_two[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small size and few densities, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--budget", type=float, default=0.5, help="seconds a baseline and density")
    args = parser.parse_args()
    sizes, densities, budget = ((256,), (0.05, 0.2), 0.02) if args.quick else ((1024, 2048), DENSITIES, args.budget)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results = {
        "machine": provenance() | {"threads": "1"},
        "setting": {"vector_length": VECTOR_LENGTH, "bits": [8, 8], "pattern": "uniform", "out": "int32"},
        "sizes": [run_size(n, densities, budget) for n in sizes],
    }
    if threads > 1:
        results["two_threads"] = [two_threads(n, density, budget) for n in sizes for density in (0.1, 0.3)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {args.out}")
    if args.out == RESULTS:
        update(CPU, render_cpu(), DOCS / "performance" / "cpu.md")


if __name__ == "__main__":
    main()
