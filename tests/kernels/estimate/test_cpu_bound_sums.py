"""Sums that bound the error of a float32 product, of the CPU engine: on every instruction set and memory order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels.cpu import engine
from cute_kernels.cpu.estimate import FEW_PROBES, BoundSums, bound_sums

pytestmark = pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")

SIZES = [
    (1, 1, 1),
    (1, 2, 3),
    (3, 1, 2),
    (2, 3, 1),
    (23, 24, 25),
    (47, 49, 51),
    (97, 130, 71),
    (60, 600, 517),
    (40, 515, 1100),
]
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "columns": lambda x: x.t().contiguous().t(),
    "row stride": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "column stride": lambda x: torch.cat([x, x], 0).t().contiguous().t()[: x.shape[0]],
    "expanded": lambda x: x[:1].expand(x.shape),
}


@pytest.fixture(params=engine.isas())
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MAGICUBE_CPU", request.param)
    return str(request.param)


def operands(m: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + 7 * k + 31 * n)
    A, B = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    return A, B, A @ B, torch.randn(FEW_PROBES, n, generator=generator, dtype=torch.float64)


def summed(A: Tensor, B: Tensor, C: Tensor, W: Tensor | None) -> BoundSums:
    found = bound_sums(A, B, W, C)
    assert found is not None and found[0] is C
    return found[1]


def check(A: Tensor, B: Tensor, C: Tensor, W: Tensor) -> None:
    """Compare every sum with extended precision."""
    a, b, c, w = (x.numpy().astype(np.longdouble) for x in (A, B, C, W.t()))
    norms = [float(np.linalg.norm(x)) ** 2 for x in (a, b, c)]
    sums = summed(A, B, C, W)
    assert sums[:3] == pytest.approx(norms, rel=1e-13, abs=0)
    assert summed(A, B, C, None)[:3] == pytest.approx(norms, rel=1e-13, abs=0)
    assert summed(A, B, C, None).error == 0
    size = np.linalg.norm(w)
    eta = (len(b) + len(w) + 8) * 2.0**-53 * (math.sqrt(norms[0] * norms[1]) + math.sqrt(norms[2])) * float(size)
    error = float(np.linalg.norm(a @ (b @ w) - c @ w))
    assert abs(math.sqrt(sums.error) - error) <= eta + 1e-13 * error


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_within_the_proven_rounding(size: tuple[int, int, int], path: str) -> None:
    A, B, C, W = operands(*size)
    for view in VIEWS.values():
        for other in (view, VIEWS["rows"]):
            check(view(A), other(B), C, W)
            check(other(A), view(B), C, W)


def test_results_do_not_depend_on_the_number_of_threads(path: str, use_threads: Callable[[int], None]) -> None:
    A, B, C, W = operands(301, 203, 197)
    found = []
    for count in (1, 2, 5):
        use_threads(count)
        found.append([summed(A, B, C, probes) for probes in (W, None)])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("small", "large"), [(1e-45, 3e38), (1e-45, 1e-40), (1e38, 3e38), (1.2e-38, 1.0)], ids=str)
def test_float32_extremes_neither_overflow_nor_underflow(small: float, large: float, path: str) -> None:
    A, B, _, W = operands(30, 40, 50)
    A, B = (torch.where(x.abs() < 1, torch.copysign(torch.tensor(small), x), x * (large / 8)) for x in (A, B))
    C = torch.full((30, 50), large)
    check(A, B, C, W)
    assert all(math.isfinite(each) and each > 0 for each in summed(A, B, C, W))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nonfinite_entries_give_nan(which: int, value: float, path: str) -> None:
    *matrices, W = operands(40, 50, 60)
    matrices[which][7, 11] = value
    A, B, C = matrices
    for probes in (W, None):
        assert all(math.isnan(each) for each in summed(A, B, C, probes))


def test_empty_operands_give_zeros(path: str) -> None:
    for m, k, n in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        W = torch.ones(FEW_PROBES, n, dtype=torch.float64)
        sums = summed(torch.zeros(m, k), torch.zeros(k, n), torch.ones(m, n), W)
        assert sums == (0, 0, m * n, 3 * m * n**2)


@pytest.mark.parametrize(
    "change",
    [lambda x: x.double(), lambda x: x[0], lambda x: x.repeat(2, 2)[::2, ::2], lambda x: x.to("meta"), torch._neg_view],
    ids=["dtype", "dimensions", "strides", "device", "negated"],
)
def test_operands_that_it_cannot_read_give_none(change: Callable[[Tensor], Tensor]) -> None:
    A, B, C, W = operands(6, 5, 4)
    assert bound_sums(change(A), B, W, C) is None
    assert bound_sums(A, change(B), W, C) is None


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("B", lambda x: x[1:], ValueError, r"B must have 5 rows to match A of shape \(6, 5\), got 4"),
        ("C", lambda x: x[1:], ValueError, r"C must have shape \(6, 4\), got \(5, 4\)"),
        ("C", lambda x: x.double(), TypeError, "C must be torch.float32, got torch.float64"),
        ("C", lambda x: x.t().contiguous().t(), ValueError, r"C must be contiguous, got strides \(1, 6\)"),
        ("W", lambda x: x[:2], ValueError, r"W must have shape \(3, 4\), got \(2, 4\)"),
        ("W", lambda x: x.float(), TypeError, "W must be torch.float64, got torch.float32"),
    ],
)
def test_malformed_arguments_are_named(name: str, change: Any, error: type[Exception], message: str) -> None:
    given = dict(zip("ABCW", operands(6, 5, 4), strict=True))
    given[name] = change(given[name])
    with pytest.raises(error, match=f"^{message}"):
        bound_sums(**given)
