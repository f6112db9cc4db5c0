"""Probe sums of the CPU engine: within the proven rounding of extended precision, on every instruction set and memory order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels.cpu import engine
from cute_kernels.cpu.estimate import PROBES, JudgeSums, judge, probe_right

pytestmark = pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")

SIZES = [(1, 1, 1), (1, 2, 3), (3, 1, 2), (2, 3, 1), (23, 24, 25), (24, 65, 48), (49, 130, 71), (200, 300, 257)]
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "columns": lambda x: x.t().contiguous().t(),
    "row stride": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "column stride": lambda x: torch.cat([x, x], 0).t().contiguous().t()[: x.shape[0]],
    "expanded": lambda x: x[:1].expand(x.shape),
}
EXACT = np.finfo(np.longdouble).nmant >= 63  # the reference is more precise than float64


@pytest.fixture(params=engine.isas())
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MAGICUBE_CPU", request.param)
    return str(request.param)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, use_threads: Callable[[int], None]) -> int:
    use_threads(request.param)
    return int(request.param)


def operands(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + 7 * k + 31 * n)
    A, B = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((m, k), (k, n)))
    return A.to(dtype), B.to(dtype), (A @ B).to(dtype)


def probes(n: int) -> tuple[Tensor, Tensor]:
    W = torch.randn(n, PROBES, generator=torch.Generator().manual_seed(n))
    return W, torch.linalg.vector_norm(W.double(), dim=1)


def long(x: Tensor) -> Any:
    return x.numpy().astype(np.longdouble)


def growth(*terms: int) -> float:
    """``g(s(n) + ..)`` of the proof, with one rounding more for the bounds themselves."""
    steps = sum(2 * math.sqrt(n) + 2 for n in terms)
    return steps * 2.0**-53 * 1.01


def check(A: Tensor, B: Tensor, C: Tensor) -> JudgeSums:
    """Compare every sum of a product with extended precision."""
    W, wbar = probes(B.shape[1])
    k, n = B.shape
    BW, bound = probe_right(B, W, wbar)
    a, b, c, w, z = long(A), long(B), long(C), long(W), long(BW)
    magnitudes = abs(b) @ long(wbar)
    assert (abs(z - b @ w) <= growth(n) * (abs(b) @ abs(w))).all()
    assert (abs(long(bound) - magnitudes) <= growth(n) * magnitudes).all()
    sums = judge(A, BW, bound, C, W, wbar)
    y = a @ z - c @ w
    left, right = abs(a) @ magnitudes, abs(c) @ long(wbar)
    eta = growth(k, n) * np.linalg.norm(left) + growth(n) * np.linalg.norm(right)
    norm = np.linalg.norm(y)
    assert abs(math.sqrt(np.trace(sums.gram.numpy())) - norm) <= 1.01 * eta + 1e-12 * norm
    assert np.linalg.norm(sums.gram.numpy() - y.T @ y) <= 2.1 * eta * (norm + eta) + 1e-12 * norm**2
    wanted = [a @ z, c @ w, c, left, right]
    for mine, theirs in zip(sums[1:], (float(np.linalg.norm(each)) ** 2 for each in wanted), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12, abs=0)
    return sums


@pytest.mark.skipif(not EXACT, reason="long double is float64 here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_sums_are_within_the_proven_rounding(
    size: tuple[int, int, int], dtype: torch.dtype, path: str, threads: int
) -> None:
    for view in VIEWS.values():
        A, B, C = operands(*size, dtype)
        check(view(A), view(B), view(C))


@pytest.mark.skipif(not EXACT, reason="long double is float64 here")
@pytest.mark.parametrize("view", VIEWS)
def test_small_terms_after_a_large_one_are_not_all_absorbed(view: str, path: str) -> None:
    n = 4096  # one chain of sums would lose 4095 units, 32 times the bound
    A = torch.full((5, n), 2.0**-53, dtype=torch.float64)
    A[:, 0] = 1.0
    ones = torch.ones(n, PROBES, dtype=torch.float64)
    W, wbar = torch.ones(1, PROBES), torch.ones(1, dtype=torch.float64)
    C = torch.zeros(5, 1, dtype=torch.float64)
    sums = judge(VIEWS[view](A), ones, ones[:, 0].contiguous(), C, W, wbar)
    exact = 1 + (n - 1) * 2.0**-53
    assert abs(math.sqrt(sums.product / (5 * PROBES)) - exact) <= growth(n)
    BW, _ = probe_right(VIEWS[view](A), torch.ones(n, PROBES), torch.ones(n, dtype=torch.float64))
    assert bool(((BW - exact).abs() <= growth(n)).all())


def test_results_do_not_depend_on_the_number_of_threads(path: str, use_threads: Callable[[int], None]) -> None:
    A, B, C = operands(301, 203, 97)
    W, wbar = probes(97)
    found = []
    for count in (1, 2, 5):
        use_threads(count)
        BW, bound = probe_right(B, W, wbar)
        sums = judge(A, BW, bound, C, W, wbar)
        found.append((BW, bound, sums.gram, torch.tensor(sums[1:], dtype=torch.float64)))
    for each in found[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(each, found[0], strict=True))


@pytest.mark.skipif(not EXACT, reason="long double is float64 here")
@pytest.mark.parametrize(("small", "large"), [(1e-45, 3e38), (1e-45, 1e-40), (1e38, 3e38), (1.2e-38, 1.0)], ids=str)
def test_float32_extremes_neither_overflow_nor_underflow(small: float, large: float, path: str) -> None:
    A, B, _ = operands(30, 40, 50)
    A, B = (torch.where(x.abs() < 1, torch.copysign(torch.tensor(small), x), x * (large / 8)) for x in (A, B))
    C = torch.full((30, 50), large)
    assert all(math.isfinite(each) and each > 0 for each in check(A, B, C)[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["A", "B", "C"])
def test_nonfinite_entries_give_nan(which: str, value: float, dtype: torch.dtype, path: str) -> None:
    matrices = dict(zip("ABC", operands(40, 50, 60, dtype), strict=True))
    matrices[which][7, 11] = value
    W, wbar = probes(60)
    BW, bound = probe_right(matrices["B"], W, wbar)
    assert bool(bound.isfinite().all()) == (which != "B")
    sums = judge(matrices["A"], BW, bound, matrices["C"], W, wbar)
    assert bool(sums.gram.isnan().all()) and all(math.isnan(each) for each in sums[1:])


def test_sums_that_overflow_float64_give_nan_and_scaled_ones_do_not(path: str) -> None:
    A, B, C = operands(8, 9, 10, torch.float64)
    W, wbar = probes(10)
    for A_scale, B_scale, overflows in (
        (2.0**1000, 1.0, True),
        (1.0, 2.0**-600, False),
        (2.0**1000, 2.0**-1000, False),
    ):
        BW, bound = probe_right(B * B_scale, W, wbar)
        sums = judge(A * A_scale, BW, bound, C * (A_scale * B_scale), W, wbar)
        assert all(math.isnan(each) for each in sums[1:]) == overflows


def test_empty_operands_give_zeros(path: str) -> None:
    W, wbar = probes(4)
    for m, k in ((0, 3), (3, 0)):
        A, B, C = torch.zeros(m, k), torch.zeros(k, 4), torch.ones(m, 4)
        sums = judge(A, *probe_right(B, W, wbar), C, W, wbar)
        assert sums.product == 0 and sums.norm == 4 * m
    none = torch.zeros(0, PROBES), torch.zeros(0, dtype=torch.float64)
    BW, bound = probe_right(torch.zeros(3, 0), *none)
    assert not BW.any() and not bound.any()


def arguments() -> dict[str, Any]:
    A, B, C = operands(6, 5, 4)
    W, wbar = probes(4)
    BW, bound = probe_right(B, W, wbar)
    return {"A": A, "BW": BW, "bound": bound, "C": C, "W": W, "wbar": wbar}


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("A", lambda x: x.half(), TypeError, "A must be torch.float32 or torch.float64, got torch.float16"),
        ("A", lambda x: x[0], ValueError, "A must have 2 dimensions, got 1"),
        ("A", lambda x: x.repeat(2, 2)[::2, ::2], ValueError, r"A must be row- or column-major, got strides \(20, 2\)"),
        ("A", lambda x: x.to("meta"), ValueError, "A must be on the CPU, got meta"),
        ("C", lambda x: x[1:], ValueError, r"C must have 6 rows to match A of shape \(6, 5\), got 5"),
        ("C", lambda x: x.int(), TypeError, "C must be torch.float32 or torch.float64, got torch.int32"),
        ("C", lambda x: x[:, 1:], ValueError, r"W must have shape \(3, 16\), got \(4, 16\)"),
        ("BW", lambda x: x[1:], ValueError, r"BW must have shape \(5, 16\), got \(4, 16\)"),
        ("BW", lambda x: x.float(), TypeError, "BW must be torch.float64, got torch.float32"),
        ("BW", lambda x: x.t().contiguous().t(), ValueError, r"BW must be contiguous, got strides \(1, 5\)"),
        ("bound", lambda x: x[:, None], ValueError, r"bound must have shape \(5,\), got \(5, 1\)"),
        ("W", lambda x: x.double(), TypeError, "W must be torch.float32, got torch.float64"),
        ("W", lambda x: x[:, :8], ValueError, r"W must have shape \(4, 16\), got \(4, 8\)"),
        ("wbar", lambda x: x.float(), TypeError, "wbar must be torch.float64, got torch.float32"),
        ("wbar", lambda x: x.repeat(2)[::2], ValueError, "wbar must be contiguous, got strides"),
    ],
)
def test_malformed_arguments_are_named(name: str, change: Any, error: type[Exception], message: str) -> None:
    given = arguments()
    given[name] = change(given[name])
    with pytest.raises(error, match=f"^{message}"):
        judge(**given)
    if name in ("W", "wbar"):
        with pytest.raises(error, match=f"^{message}"):
            probe_right(given["C"], given["W"], given["wbar"])
    if name == "A":
        with pytest.raises(error, match=f"^{message.replace('A', 'B', 1)}"):
            probe_right(given["A"], given["W"], given["wbar"])
