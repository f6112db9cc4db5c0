"""Products of 16-bit floats on a CPU: those of their float32 copies, and the rounding of the output, which is measured."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from residual.error.float32 import relative_difference
from residual.execute import copies
from residual.explain import explain
from residual.matmul import matmul, plan, prepare
from residual.operand.prepared import PreparedOperand
from residual.report import ToleranceError
from tests.compensated.random_products import true_error
from tests.compensated.test_matmul import normal

SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
PAIRS = [(HALF, HALF), (BRAIN, BRAIN), (HALF, BRAIN), (SINGLE, BRAIN), (HALF, SINGLE)]


def operands(left: torch.dtype, right: torch.dtype) -> tuple[Tensor, Tensor]:
    return normal(150, 200).to(left), normal(200, 130, seed=1).to(right)


def product(A: Tensor, B: Tensor | PreparedOperand, **options: Any) -> Tensor:
    result = matmul(A, B, **options)
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("dtypes", PAIRS)
@pytest.mark.parametrize("tol", [5e-2, 1e-3, 1e-5])
def test_a_float32_output_is_that_of_float32_copies(dtypes: tuple[torch.dtype, torch.dtype], tol: float) -> None:
    A, B = operands(*dtypes)
    wanted, report = matmul(A.float(), B.float(), tol=tol, return_report=True)
    got, own = matmul(A, B, tol=tol, out_dtype=SINGLE, return_report=True)
    assert torch.equal(got, wanted) and own == report
    prepared = product(A.float(), prepare(B.float(), tol=tol), tol=tol)
    assert torch.equal(product(A, prepare(B, tol=tol), tol=tol, out_dtype=SINGLE), prepared)
    assert torch.equal(plan(B, tol=tol, out_dtype=SINGLE)(A), prepared)
    turned = A.mT.contiguous().mT
    assert true_error(turned, B, product(turned, B, tol=tol, out_dtype=SINGLE)) <= tol


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("tol", [5e-2, 6e-3])
def test_a_16_bit_output_is_that_product_rounded_once(dtype: torch.dtype, tol: float) -> None:
    A, B = operands(dtype, dtype)
    C, report = matmul(A, B, tol=tol, return_report=True)
    assert C.dtype == dtype and true_error(A, B, C.double()) <= report.upper <= tol
    plans = {name: product(A.float(), B.float(), tol=0.5, rungs=(name,)) for name in ("direct", "fp32")}
    assert torch.equal(C, plans[report.plan.split()[-1]].to(dtype))
    assert report.attempts[-1].upper == report.upper
    assert report.estimated_error == pytest.approx(true_error(A, B, C.double()), rel=0.25)
    held, wanted = prepare(B, tol=tol), product(A.float(), prepare(B.float(), tol=tol), tol=tol)
    assert torch.equal(product(A, held, tol=tol), wanted.to(dtype))


def test_a_rounding_beyond_the_tolerance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = operands(BRAIN, BRAIN)
    with pytest.raises(ToleranceError, match="bfloat16 rounds by"):
        product(A, B, tol=1.5e-3)
    rounded: list[float] = []

    def much(x: Tensor, y: Tensor) -> float:
        rounded.append(relative_difference(x, y))
        return 0.1

    monkeypatch.setattr(copies, "relative_difference", much)
    C, report = matmul(A, B, tol=5e-2, return_report=True)  # the other way reads the output
    assert rounded and report.upper <= 5e-2 and true_error(A, B, C.double()) <= report.upper


def test_products_in_float16_by_name_are_a_gpu_s() -> None:
    for dtypes in ((HALF, HALF), (SINGLE, SINGLE), (HALF, BRAIN)):
        A, B = operands(*dtypes)
        given = f"{A.dtype} and {B.dtype} on cpu"
        for call in (product, explain):
            with pytest.raises(ValueError, match=f"rungs may name fp16 .* on cuda, got {given}"):
                call(A, B, tol=1e-2, rungs=("fp16", "fp32"))


def test_values_beyond_the_output_and_rows_that_are_not_finite() -> None:
    A, B = operands(HALF, HALF)
    A, B = A * 60, B * 600  # products leave float16
    C = product(A, B, tol=1e-3, out_dtype=SINGLE)
    assert true_error(A, B, C) <= 1e-3 and float(C.abs().max()) > 65504
    A[3, 5], B[7, 9] = math.inf, math.nan
    C = product(A, B, tol=1e-3, out_dtype=SINGLE)
    exact = A.double() @ B.double()
    assert torch.equal(C.isfinite(), exact.isfinite()) and not C[3].isfinite().any() and not C[:, 9].isfinite().any()
    assert not product(A[4:6] * 0, B[:, :9], tol=1e-2).any()


@pytest.mark.parametrize("size", [1.0, 2.0**-30, 2.0**-60, 2.0**-75, 2.0**40, 2.0**55, 2.0**64])
@pytest.mark.parametrize("shape", [(40, 60), (1, 9000), (300, 1)])
def test_a_difference_is_bounded_by_sums_in_float32(shape: tuple[int, int], size: float) -> None:
    for dtype in (HALF, BRAIN):
        x = normal(*shape) * torch.logspace(-3, 3, shape[0])[:, None]
        y = x.to(dtype).float() * size
        x = x * size
        exact = float((x.double() - y.double()).norm() / x.double().norm())
        found = relative_difference(x, y)
        assert not found < exact and (found < 1.02 * exact or not 2.0**-40 < size < 2.0**50)
    for other in (
        torch.zeros(shape),
        torch.full(shape, math.inf),
        torch.full(shape, math.nan),
        torch.ones(1, 1).expand(2, 2**23),
    ):
        assert not relative_difference(other, other) < 1.0
