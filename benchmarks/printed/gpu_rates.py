"""Times of Algorithm 1 on a GPU: Table 3, and the fully connected layers of Table 7's batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import residual
from cute_kernels.gemm import api as dense
from magicube_cutlass.bench.timing import measure
from printed.accuracy import relative, run
from printed.rates import BATCH, threshold_of_a_percent
from residual.paper.gemm import gemm

LENGTHS = (1, 8)  # entries, as printed, and the default on a GPU


def _rows_checked(found: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> float:
    """Relative error of 256 rows."""
    return relative(found[:256], A[:256].double() @ B.double())


def _timed(calls: dict[str, Callable[[], object]], budget: float) -> dict[str, float]:
    """Median seconds of each call, the GPU's work included; two calls before have recorded what a call replays."""
    for call in calls.values():
        call(), call()
    found = measure(calls, budget=budget, min_runs=3, synchronize=torch.cuda.synchronize)
    return {name: each.median for name, each in found.items()}


def whole_calls(n: int, densities: tuple[float, ...], budget: float) -> dict[str, Any]:
    """Return median seconds of whole calls on uniform matrices, their errors, densities and steps.

    ``mean`` at a threshold t keeps ``1 - t`` of a uniform matrix's entries, and of its vectors of 8 about 8 times that.
    Beside them: torch's float32, the library's checked and unchecked products, and the int8 product alone.
    """
    g = torch.Generator("cuda").manual_seed(n)
    A, B = (torch.rand(n, n, generator=g, device="cuda") for _ in "AB")
    options: dict[str, dict[str, Any]] = {
        f"{density:g}, V = {v}": {"threshold": 1 - density, "rule": "mean", "eta": 1.0, "scaling": "vector",
                                  "vector_length": v}
        for v in LENGTHS
        for density in densities
    }  # fmt: skip
    options |= {"Full": {"threshold": 0.0, "eta": 0.0}, "Origin": {"threshold": math.inf, "eta": 0.0}}
    reports: dict[str, Any] = {}
    calls: dict[str, Callable[[], object]] = {}
    for name, chosen in options.items():
        run(A, B, **chosen)  # compiles
        product, report = run(A, B, **chosen)
        reports[name] = {"density": report.density, "steps": report.times, "error": _rows_checked(product, A, B)}
        calls[name] = partial(gemm, A, B, **chosen)
    integers = torch.randint(-127, 128, (n, n), generator=g, device="cuda", dtype=torch.int8)
    calls["float32"] = lambda: A @ B
    calls["int8 product alone"] = lambda: dense.gemm(integers, integers.t(), out_dtype=torch.float32)
    for mode in ("direct", "full"):
        calls[f"residual.matmul, {mode}"] = partial(residual.matmul, A, B, mode=mode)
        reports[f"residual.matmul, {mode}"] = {"error": _rows_checked(residual.matmul(A, B, mode=mode), A, B)}
    return {"n": n, "seconds": _timed(calls, budget), "reports": reports}


def layer_calls(n: int, budget: float) -> dict[str, Any]:
    """Return median seconds of a fully connected layer's product, ``(10000, n)`` by ``(n, n)``."""
    g = torch.Generator("cuda").manual_seed(n)
    x = torch.randn(BATCH, n, generator=g, device="cuda").relu_()
    w = torch.randn(n, n, generator=g, device="cuda")
    sparse = threshold_of_a_percent(x, w)
    ways: dict[str, dict[str, Any]] = {
        "origin": {"threshold": math.inf}, "density 0.01": {"threshold": sparse, "eta": 1.0},
        "threshold 1": {"threshold": 1.0}, "threshold 0": {"threshold": 0.0},
    }  # fmt: skip
    calls: dict[str, Callable[[], object]] = {"float32": lambda: x @ w}
    densities: dict[str, tuple[float, float]] = {}
    for name, chosen in ways.items():
        report = run(x, w, rule="mean", **chosen)[1]
        densities[name] = report.density_a, report.density_b
        calls[name] = partial(gemm, x, w, rule="mean", **chosen)
    return {"n": n, "batch": BATCH, "seconds": _timed(calls, budget), "densities": densities}
