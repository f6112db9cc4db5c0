"""Errors of Algorithm 1: the worked example, Table 2, Figures 6 and 8, and Table 5's accuracies."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from printed.values import EXAMPLE, LAMBDAS, TABLE_5, THRESHOLDS_5
from residual.paper.gemm import PaperReport, gemm
from residual.paper.quantize import Quantizer, quantize_operand
from residual.paper.thresholds import kept_entries

THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)
EXAMPLE_THRESHOLDS = (0.25, 0.28, 0.31, 0.34)
# 64 / max and truncation are the example's conventions; Table 5 fits them too.
CONVENTIONS: dict[str, Any] = {"levels": "2^(N-2)", "rounding": "trunc"}
REDUCED: dict[str, Any] = {"eta": 1.0, "rule": "mean", "scaling": "vector"}
SEEDS = (0, 1, 2)


def run(A: Tensor, B: Tensor, **options: Any) -> tuple[Tensor, PaperReport]:
    """Return the product and its report."""
    found = gemm(A, B, return_report=True, **options)
    assert isinstance(found, tuple)
    return found


def relative(result: Tensor, truth: Tensor) -> float:
    """Return the relative Frobenius error."""
    return float((result.double() - truth).norm() / truth.norm())


def distributions(n: int, seed: int = 0) -> dict[str, Callable[[], Tensor]]:
    """Return makers of n x n float32 matrices, the five of Figure 6."""
    g = torch.Generator().manual_seed(seed)
    ten = torch.full((n, n), 10.0)
    return {
        "uniform(0, 1)": lambda: torch.rand(n, n, generator=g),
        "normal(10, 3)": lambda: 10 + 3 * torch.randn(n, n, generator=g),
        "exponential(4)": lambda: torch.empty(n, n).exponential_(4, generator=g),
        "Poisson(10)": lambda: torch.poisson(ten, generator=g),
        "chi-square(1)": lambda: torch.randn(n, n, generator=g).square(),
    }


def _example_by(A: Tensor, B: Tensor, scale: tuple[float, float] | None) -> dict[str, Any]:
    """Return the example's matrices; with `scale`, integers are those of these lambdas."""
    how = Quantizer(8, None, "trunc", 64)
    sides = [quantize_operand(x, how, "x") for x in (A, B)]
    if scale is None:
        integers = [side.leading.integers.double() for side in sides]
        units = [side.leading.scale for side in sides]
    else:
        integers = [(x * factor * (1 + 1e-12)).trunc() for x, factor in zip((A, B), scale, strict=True)]
        units = [torch.tensor(1 / factor, dtype=torch.float64) for factor in scale]
    (a, b), (ua, ub) = integers, units
    product, (ra, rb) = a @ b * ua * ub, (A - a * ua, B - b * ub)
    keep_a = kept_entries(A, product, 0.3, "example", False, 1)
    keep_b = kept_entries(B.T, product.T, 0.3, "example", False, 1).T
    qa, qb = (quantize_operand(r, how, "x").leading for r in (ra, rb))
    cross = (a * keep_a) @ qb.integers.double() * ua * qb.scale + qa.integers.double() @ (b * keep_b) * qa.scale * ub
    found = {"C": A @ B, "A_int8": a, "B_int8": b, "C_quant": product, "RA": ra, "RB": rb}
    found |= {"A'_int8": a * keep_a, "B'_int8": b * keep_b, "C'_quant": product + cross}
    return {name: value.tolist() for name, value in found.items()}


def _two_errors(result: Tensor, truth: Tensor) -> tuple[float, float]:
    """Return the largest relative error of an entry, and the relative Frobenius error."""
    return float(((result - truth) / truth).abs().max()), relative(result, truth)


def worked_example() -> dict[str, Any]:
    """Return the 3 x 3 example entry by entry, its masks by threshold and rule, and Table 2."""
    A, B = (torch.tensor(EXAMPLE[name], dtype=torch.float64) for name in "AB")
    ours, rounded = _example_by(A, B, None), _example_by(A, B, LAMBDAS)
    printed = torch.tensor(EXAMPLE["A'_int8"]) != 0, torch.tensor(EXAMPLE["B'_int8"]) != 0
    product = torch.tensor(ours["C_quant"], dtype=torch.float64)
    wrong = {}
    for rule in ("eq14", "example", "mean"):
        for threshold in EXAMPLE_THRESHOLDS:
            masks = (
                kept_entries(A, product, threshold, rule, False, 1),
                kept_entries(B.T, product.T, threshold, rule, False, 1).T,
            )
            wrong[f"{rule} {threshold}"] = sum(int((x != y).sum()) for x, y in zip(masks, printed, strict=True))
    truth = A @ B
    C, direct, corrected = (torch.tensor(EXAMPLE[name], dtype=torch.float64) for name in ("C", "C_quant", "C'_quant"))
    errors = {}
    for label, found in (("ours", ours), ("printed lambda", rounded)):
        for kind, name in (("direct", "C_quant"), ("residual", "C'_quant")):
            errors[f"{label}, {kind}"] = _two_errors(torch.tensor(found[name], dtype=torch.float64), truth)
    errors |= {
        "printed matrices, direct": _two_errors(direct, C),
        "printed matrices, residual": _two_errors(corrected, C),
    }
    return {"ours": ours, "printed lambda": rounded, "wrong entries of 18": wrong, "errors": errors}


def errors_by_threshold(n: int, device: str) -> list[dict[str, Any]]:
    """Return Figures 6 and 8: errors of origin, full and the reduced products, and densities, rule ``mean``.

    Origin and full have one lambda per matrix, as the paper's baselines; the others one per row and column.
    """
    found = []
    for name in distributions(1):
        for bits in (8, 4):
            maker = distributions(n)[name]
            A, B = maker().to(device), maker().to(device)
            truth = A.double() @ B.double()
            options: dict[str, Any] = {"bits": bits, "vector_length": 1, **CONVENTIONS}
            origin, full = (relative(run(A, B, threshold=t, eta=0.0, **options)[0], truth) for t in (math.inf, 0.0))
            points = []
            for threshold in THRESHOLDS:
                result, report = run(A, B, threshold=threshold, **REDUCED, **options)
                points.append({"threshold": threshold, "error": relative(result, truth), "density": report.density})
            found.append({"distribution": name, "bits": bits, "origin": origin, "full": full, "points": points})
    return found


def accuracies(n: int, device: str) -> list[dict[str, Any]]:
    """Return Table 5's acc up, ``1 - error / error of full``: medians of some seeds, and the least and the largest."""
    found = []
    for bits, by_name in TABLE_5.items():
        for name, cells in by_name.items():
            draws, densities = [], []
            for seed in SEEDS:
                maker = distributions(n, seed)[name]
                A, B = maker().to(device), maker().to(device)
                truth = A.double() @ B.double()
                options: dict[str, Any] = {"bits": bits, "vector_length": 1, **CONVENTIONS}
                full = relative(run(A, B, threshold=0.0, eta=0.0, **options)[0], truth)
                reduced = [run(A, B, threshold=t, **REDUCED, **options) for t in THRESHOLDS_5]
                draws.append([1 - relative(result, truth) / full for result, _ in reduced])
                densities = [report.density for _, report in reduced]
            by_threshold = [sorted(values) for values in zip(*draws, strict=True)]
            found.append(
                {
                    "bits": bits,
                    "distribution": name,
                    "printed": [None if cell is None else cell[0] for cell in cells],
                    "ours": [median(values) for values in by_threshold],
                    "seeds": by_threshold,
                    "density": densities,
                }
            )
    return found
