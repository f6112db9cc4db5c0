"""The threshold that a tolerance gives: measured errors are within it, or the error names what full compensation reaches."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from residual.error.estimate import ErrorEstimate
from residual.paper.gemm import PaperReport, gemm
from residual.paper.search import first_within

TOLERANCES = (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 2e-4, 1e-7)


def draw(distribution: str, shape: tuple[int, int], g: torch.Generator) -> Tensor:
    """A matrix of a distribution of Figure 6, or centered."""
    ten = torch.full(shape, 10.0)
    draws = {
        "uniform": lambda: torch.rand(shape, generator=g),
        "normal": lambda: 10 + 3 * torch.randn(shape, generator=g),
        "exponential": lambda: torch.empty(shape).exponential_(4, generator=g),
        "poisson": lambda: torch.poisson(ten, generator=g),
        "chi-square": lambda: torch.randn(shape, generator=g).square(),
        "centered": lambda: torch.randn(shape, generator=g),
    }
    return draws[distribution]()


def reported(*operands: Tensor, **options: Any) -> tuple[Tensor, PaperReport]:
    found = gemm(*operands, return_report=True, **options)
    assert isinstance(found, tuple)
    return found


def error(result: Tensor, A: Tensor, B: Tensor) -> float:
    truth = A.double() @ B.double()
    return float((result.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("rule", ["mean", "eq14"])
@pytest.mark.parametrize("scaling", ["tensor", "vector"])
@pytest.mark.parametrize("distribution", ["uniform", "normal", "exponential", "poisson", "chi-square", "centered"])
def test_the_measured_error_is_within_the_tolerance(distribution: str, scaling: str, rule: str) -> None:
    g = torch.Generator().manual_seed(7)
    for m, k, n in ((150, 200, 170), (40, 300, 64)):
        A, B = draw(distribution, (m, k), g), draw(distribution, (k, n), g)
        for bits in (8, 4):
            options: dict[str, Any] = {"bits": bits, "scaling": scaling, "rule": rule}
            full = error(reported(A, B, **options)[0], A, B)
            thresholds, misses = [], 0
            for tol in TOLERANCES:
                try:
                    result, report = reported(A, B, tol=tol, **options)
                except ValueError as failure:
                    numbers = re.match(
                        r"tol must be at least .* about (\S+) \(99% bound: (\S+)\), got (\S+);", str(failure)
                    )
                    assert numbers
                    about, bound, given = map(float, numbers.groups())
                    assert full / 2 < about < 2 * full <= 2 * bound and given == tol < bound  # of 16 probes
                    misses += 1
                    continue
                assert misses == 0 and report.error is not None
                assert error(result, A, B) <= report.error <= tol
                thresholds.append(report.threshold)
                again, _ = reported(A, B, threshold=report.threshold, **options)
                assert torch.equal(result, again)
            assert misses and thresholds == sorted(thresholds, reverse=True)


def test_a_threshold_between_nothing_and_all_is_found() -> None:
    g = torch.Generator().manual_seed(1)
    A, B = (draw("chi-square", (300, 300), g) for _ in "AB")
    found = [reported(A, B, tol=tol, scaling="vector", rule="mean")[1] for tol in (0.2, 0.1, 0.06, 0.03)]
    assert [report.path_a for report in found] == ["none", "spmm", "spmm", "gemm"]
    assert found[0].threshold == math.inf > found[1].threshold > found[2].threshold > found[3].threshold == 0
    assert 0 < found[1].density < found[2].density < 0.3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_error_includes_the_rounding_of_the_result(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(2)
    A, B = (draw("centered", (64, 64), g).to(dtype) for _ in "AB")
    result, report = reported(A, B, tol=0.01, rounding="nearest", alpha=2.0)
    assert result.dtype == dtype and error(result / 2, A, B) <= 0.01 and report.error is not None
    if dtype == torch.float16:
        with pytest.raises(ValueError, match="tol must be at least"):
            gemm(A, B, tol=1.5e-4, rounding="nearest")


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 2, 0), (1, 1, 1)])
def test_empty_and_zero_products_are_exact(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    for fill in (0.0, 1.0):
        result, report = reported(torch.full((m, k), fill), torch.full((k, n), fill), tol=1e-3)
        assert torch.equal(result, torch.full((m, n), fill * k)) and report.error == pytest.approx(0, abs=1e-6)


def test_bisection_returns_the_largest_threshold_within() -> None:
    thresholds = (math.inf, 8.0, 4.0, 2.0, 1.0, 0.5, 0.0)
    for tol in (20.0, 8.0, 3.0, 1.0, 0.6, 0.0):
        tried = []

        def run(threshold: float, tried: list[float] = tried) -> tuple[float, ErrorEstimate]:
            tried.append(threshold)
            return threshold, ErrorEstimate(threshold, threshold, 0.99)

        assert first_within(tol, thresholds, run)[0] == max(t for t in thresholds if t <= tol)
        assert len(tried) <= 3 + (0.0 in tried) and len(set(tried)) == len(tried)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("tol must be None or above 0, got 0", {"tol": 0}),
        ("tol must be None or above 0, got nan", {"tol": math.nan}),
        (r"threshold must be 0 where tol is given, got 0\.5", {"tol": 0.1, "threshold": 0.5}),
    ],
)
def test_bad_arguments_are_named(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        gemm(torch.ones(3, 3), torch.ones(3, 3), **options)
