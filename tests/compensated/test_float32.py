"""Bounds of float32 products by norms and by three probes: not below the truth, and no check where they suffice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import residual
from cute_kernels.cpu import engine
from cute_kernels.cpu.estimate import bound_sums
from residual.error import float32
from residual.error.factor import FAILURE, confidence
from residual.execute import run

pytestmark = pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")


def chain(A: Tensor, B: Tensor) -> Tensor:
    """``A B`` by one float32 sum after the other, the worst order."""
    C = torch.zeros(A.shape[0], B.shape[1])
    for k in range(A.shape[1]):
        C += A[:, k : k + 1] * B[k]
    return C


def relative_error(A: Tensor, B: Tensor, C: Tensor) -> float:
    true = A.double() @ B.double()
    norm = float(true.norm())
    error = float((true - C.double()).norm())
    return error / norm if norm else float("inf") if error else 0.0


def norm_bound(A: Tensor, B: Tensor, C: Tensor) -> float:
    found = bound_sums(A, B, C=C)
    assert found is not None
    return float32.norm_bound(found[1], *A.shape, B.shape[1])


def probe_bound(A: Tensor, B: Tensor, C: Tensor, seed: int) -> float:
    probes = float32._few(B.shape[1], seed)
    found = bound_sums(A, B, probes.vectors, C)
    assert found is not None
    return float32.probe_bound(found[1], A.shape[1], probes)


def operands(trial: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Normal numbers, positive ones, and such that a chain absorbs."""
    m, k, n = (int(size) for size in torch.randint(1, 60, (3,), generator=generator))
    A, B = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    if trial % 3 == 1:
        A, B = A.abs(), B.abs()
    if trial % 3 == 2:  # absorption and stagnation
        A[:, 1:] *= 2.0**-25
    return A, B


@pytest.mark.parametrize("multiply", [torch.matmul, chain])
def test_bounds_are_not_below_the_error(multiply: object) -> None:
    generator, proven, probed = torch.Generator().manual_seed(3), 0, 0
    for trial in range(120):
        A, B = operands(trial, generator)
        C = multiply(A, B)  # type: ignore[operator]
        bounds, error = (norm_bound(A, B, C), probe_bound(A, B, C, trial)), relative_error(A, B, C)
        proven += bounds[0] < 1e-3
        probed += bounds[1] < 1e-5
        assert error <= min(bounds)
    assert proven > 60 and probed > 60


def test_three_probes_bound_errors_of_rank_one_and_of_full_rank() -> None:
    """The probability of a bound below the truth is the second share: 0.09%."""
    generator, calls, below = torch.Generator().manual_seed(4), 4000, 0
    A, B = torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)
    for seed in range(calls):
        error = torch.zeros(8, 8)
        error[0] = torch.randn(8, generator=generator)
        C = A @ B + (1e-3 * error if seed % 2 else 1e-3 * torch.randn(8, 8, generator=generator))
        below += probe_bound(A, B, C, seed) < relative_error(A, B, C)
    assert abs(1 - confidence(1) - 0.09 * FAILURE) < 1e-12
    assert below <= 12  # of 3.6 at most on average; 13 and more have a probability below 0.02%


def test_products_that_cancel_prove_nothing() -> None:
    for power in (30, 40, 60):
        A = torch.tensor([[1.0, 2.0**-power, -1.0]])
        B = torch.ones(3, 1)
        assert norm_bound(A, B, A @ B) == float("inf")
        assert probe_bound(A, B, A @ B, 0) > 1e-3
    A, B = torch.tensor([[1.0, 2.0**-60, -1.0]]), torch.ones(3, 1)
    assert probe_bound(A, B, A @ B, 0) == float("inf")
    for bad in (torch.inf, torch.nan):
        A = torch.ones(2, 3)
        A[1] = bad
        B = torch.ones(3, 2)
        assert norm_bound(A, B, A @ B) == probe_bound(A, B, A @ B, 0) == float("inf")


@pytest.mark.parametrize(("tol", "norms"), [(1e-4, True), (1e-5, False)])
def test_a_proven_product_is_that_of_a_report_and_takes_no_check(
    tol: float, norms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B = torch.randn(40, 50), torch.randn(50, 30)
    expected, report = residual.matmul(A, B, tol=tol, rungs=("fp32",), return_report=True)
    monkeypatch.setattr(run, "judge", None)
    assert (norm_bound(A, B, A @ B) <= tol) == norms
    found = residual.matmul(A, B, tol=tol, rungs=("fp32",))
    assert torch.equal(found, expected) and torch.equal(found, A @ B) and report.plan == "fp32"
    with pytest.raises(TypeError):  # a tolerance that neither shows is measured
        residual.matmul(A, B, tol=4e-7, rungs=("fp32",))


def test_operands_that_the_engine_cannot_read_are_checked_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = torch.randn(40, 100)[:, ::2], torch.randn(50, 30)
    assert bound_sums(A, B) is None
    assert torch.equal(residual.matmul(A, B, tol=1e-4), A @ B)
    A = A.contiguous()
    monkeypatch.setattr("cute_kernels.cpu.extension.ENGINE", None)
    assert bound_sums(A, B) is None
    assert torch.equal(residual.matmul(A, B, tol=1e-4), A @ B)


def test_a_float32_product_after_a_missed_rung_is_proven_by_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = torch.randn(40, 50), torch.randn(50, 30)
    held = residual.prepare(B, mode="direct")
    monkeypatch.setattr(run, "judge", None)
    assert torch.equal(residual.matmul(A, held, tol=1e-4, rungs=("direct", "fp32")), A @ B)
