"""The bound of float32 products that norms prove: never below the truth, and no probes where it suffices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import residual
from residual.error.a_priori import a_priori_bound
from residual.execute import run


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


@pytest.mark.parametrize("multiply", [torch.matmul, chain])
def test_the_bound_is_never_below_the_error(multiply: object) -> None:
    generator, proven = torch.Generator().manual_seed(3), 0
    for trial in range(120):
        m, k, n = (int(size) for size in torch.randint(1, 60, (3,), generator=generator))
        A, B = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
        if trial % 3 == 1:
            A, B = A.abs(), B.abs()
        if trial % 3 == 2:  # absorption and stagnation
            A[:, 1:] *= 2.0**-25
        C = multiply(A, B)  # type: ignore[operator]
        bound = a_priori_bound(A, B, C)
        proven += bound < 1e-3
        assert relative_error(A, B, C) <= bound
    assert proven > 60


def test_products_that_cancel_prove_nothing() -> None:
    for power in (30, 40, 60):
        A = torch.tensor([[1.0, 2.0**-power, -1.0]])
        assert a_priori_bound(A, torch.ones(3, 1), A @ torch.ones(3, 1)) == float("inf")
    for bad in (torch.inf, torch.nan, 1e30, 1e-30):
        A = torch.ones(2, 3)
        A[1] = bad
        assert a_priori_bound(A, torch.ones(3, 2), A @ torch.ones(3, 2)) == float("inf")


def test_a_proven_product_is_that_of_a_report_and_takes_no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = torch.rand(40, 50), torch.rand(50, 30)
    expected, report = residual.matmul(A, B, tol=1e-4, rungs=("fp32",), return_report=True)
    monkeypatch.setattr(run, "judge", None)
    found = residual.matmul(A, B, tol=1e-4, rungs=("fp32",))
    assert torch.equal(found, expected) and torch.equal(found, A @ B) and report.plan == "fp32"
    with pytest.raises(TypeError):  # a tolerance that norms do not prove is measured
        residual.matmul(A, B, tol=1e-6, rungs=("fp32",))
