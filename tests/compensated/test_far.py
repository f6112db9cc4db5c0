"""A rung of one digit whose error on some rows is far above the tolerance is left out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import residual
from residual.execute import quick, run

RUNGS = ("direct", "fp32")
SIZE = 512  # 2^27 multiplications


def normal(seed: int) -> Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


def exact(seed: int) -> Tensor:
    """Integers whose rows and columns all have 127 as the largest magnitude: one digit holds them."""
    x = torch.randint(-126, 127, (SIZE, SIZE), generator=torch.Generator().manual_seed(seed)).float()
    x.fill_diagonal_(127)
    return x


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product by one digit."""
    found: list[int] = []

    def counted(A: Tensor, right: Any) -> Any:
        found.append(A.shape[0])
        return direct(A, right)

    direct = run.direct
    for module in (run, quick):
        monkeypatch.setattr(module, "direct", counted)
    return found


def test_far_above_the_tolerance_only_some_rows_are_multiplied(rows: list[int]) -> None:
    A, B = normal(1), normal(2)
    found, report = residual.matmul(A, B, tol=1e-3, rungs=RUNGS, return_report=True)
    first, last = report.attempts
    assert rows == [16] and report.plan == last.plan == "fp32" and torch.equal(found, A @ B)
    assert first.plan == "int8 direct" and math.isinf(first.upper) and first.estimated == pytest.approx(0.0112, rel=0.1)
    rows.clear()
    assert torch.equal(residual.matmul(A, B, tol=1e-3, rungs=RUNGS), found) and rows == [16]


def test_near_the_tolerance_the_product_decides(rows: list[int]) -> None:
    A, B = normal(1), normal(2)
    for tol, plan in ((0.02, "int8 direct"), (0.01, "fp32")):  # the error is 0.011
        _, report = residual.matmul(A, B, tol=tol, rungs=RUNGS, return_report=True)
        assert report.plan == plan and rows == [16, SIZE]
        assert all(math.isfinite(each.upper) for each in report.attempts)
        rows.clear()


def test_what_one_digit_holds_is_multiplied_by_it(rows: list[int]) -> None:
    A, B = exact(1), exact(2)
    found, report = residual.matmul(A, B, tol=1e-3, rungs=RUNGS, return_report=True)
    assert rows == [16, SIZE] and report.plan == "int8 direct"
    assert torch.equal(found.double(), A.double() @ B.double())


def test_the_last_rung_runs_in_any_case(rows: list[int]) -> None:
    with pytest.raises(residual.ToleranceError, match=r"best: int8 direct, error <= 1\.5e-02"):
        residual.matmul(normal(1), normal(2), tol=1e-3, rungs=("direct",))
    assert rows == [SIZE]


def test_small_products_and_few_rows_have_no_sample(rows: list[int]) -> None:
    wide = torch.randn(2048, 1200, generator=torch.Generator().manual_seed(3))
    for few, B in ((normal(1)[:500], normal(2)), (wide[:60, :1100], wide[:1100].repeat(1, 2))):
        residual.matmul(few, B, tol=1e-3, rungs=RUNGS)
        assert rows == [len(few)]
        rows.clear()


def test_a_plan_leaves_it_out_too(rows: list[int]) -> None:
    A, B = normal(1), normal(2)
    plan = residual.plan(B=B, tol=1e-3, rungs=RUNGS)
    assert torch.equal(plan(A), A @ B) and rows == [16]
