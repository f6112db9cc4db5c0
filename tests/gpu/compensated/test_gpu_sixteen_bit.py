"""Checked products of 16-bit operands on a GPU: torch's product where the check accepts it, the long way where not."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from residual.cuda import flow, sixteen_bit
from residual.matmul import matmul, plan, prepare
from residual.operand.prepared import PreparedOperand
from residual.report import ToleranceError
from tests.compensated.hostile import FAMILIES, draw, exact_error
from tests.compensated.random_products import true_error
from tests.compensated.test_matmul import normal

pytestmark = pytest.mark.gpu

SHAPES = [(1, 4096, 1), (33, 71, 5), (300, 520, 250), (512, 512, 512), (16, 16384, 64), (4300, 64, 1000)]
DTYPES = [torch.float16, torch.bfloat16]


def product(A: Tensor, B: Tensor | PreparedOperand, **options: Any) -> Tensor:
    result = matmul(A, B, **options)
    assert isinstance(result, Tensor)
    return result


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the plans that the long way tried."""
    tried, attempt = list[str](), flow._Call._attempt

    def noted(self: flow._Call, check: Any, plan: Any, *arguments: Any) -> Any:
        tried.append(str(plan))
        return attempt(self, check, plan, *arguments)

    monkeypatch.setattr(flow._Call, "_attempt", noted)
    return tried


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_is_that_of_the_long_way(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, k, n = shape
    for turned in (False, True):
        A, B = normal(m, k).to(dtype).cuda(), normal(k, n, seed=1).to(dtype).cuda()
        A, B = (A.mT.contiguous().mT, B.mT.contiguous().mT) if turned else (A, B)
        for out_dtype, tol in ((torch.float32, 1e-3), (None, 2e-2)):
            wanted, report = matmul(A, B, tol=tol, out_dtype=out_dtype, return_report=True)  # measured: the long way
            assert report.plan == "fp16"
            for _ in range(4):  # launches, then a graph
                assert torch.equal(product(A, B, tol=tol, out_dtype=out_dtype), wanted)
            assert torch.equal(product(A, prepare(B), tol=tol, out_dtype=out_dtype), wanted)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_calls_in_a_row_take_the_short_way_and_read_what_is_there_now(is_prepared: bool, long_ways: list[str]) -> None:
    A, B = torch.empty(512, 256, device="cuda", dtype=torch.float16), normal(256, 384).half().cuda()
    call = plan(prepare(B) if is_prepared else None, tol=1e-3, out_dtype=torch.float32)
    for seed in range(6):
        A.copy_(normal(512, 256, seed=seed))
        assert true_error(A, B, call(A) if is_prepared else call(A, B)) < 1e-5
    assert not long_ways


def test_what_the_check_does_not_accept_goes_the_long_way(long_ways: list[str]) -> None:
    A, B = normal(300, 256).cuda().bfloat16(), normal(256, 200, seed=1).cuda().bfloat16()
    with pytest.raises(ToleranceError):  # the output's own rounding misses it
        product(A, B, tol=3e-4)
    assert long_ways[0] == "fp16" and len(long_ways) > 1
    long_ways.clear()
    A[3, 5], B[9, 2] = math.inf, math.nan
    C = product(A, B, tol=1e-3, out_dtype=torch.float32)
    assert long_ways and not C[3].isfinite().any() and not C[:, 2].isfinite().any()
    long_ways.clear()
    assert not product(A[:2] * 0, B[:, 3:], tol=1e-3).any() and long_ways  # zero: no error to compare with


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_product_is_not_accepted(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = normal(300, 256).to(dtype).cuda(), normal(256, 200, seed=1).to(dtype).cuda()
    options = plan(tol=1e-3, out_dtype=torch.float32).options
    assert sixteen_bit.checked_product(A, B, None, options) is not None
    exact = torch.mm

    def wrong(a: Tensor, b: Tensor, **keywords: Any) -> Tensor:
        found = exact(a, b, **keywords)
        found[7, 11] += 0.01 * found.norm()
        return found

    monkeypatch.setattr(torch, "mm", wrong)
    for _ in range(5):
        assert sixteen_bit.checked_product(A, B, None, options) is None


def test_what_float32_probes_may_hide_goes_the_long_way(long_ways: list[str]) -> None:
    A, B = torch.ones(2, 8, 512, device="cuda", dtype=torch.float16).unbind()
    B = B.mT.contiguous()  # (512, 8)
    assert true_error(A, B, product(A, B, tol=1e-2, out_dtype=torch.float32)) == 0.0 and not long_ways
    A[:, 256:], B[0] = -1, 1 + 2.0**-8
    C = product(A, B, tol=1e-2, out_dtype=torch.float32, on_failure="fallback")
    assert true_error(A, B, C) <= 1e-2 and long_ways  # 1 / 256, what is left of sums of 256


@pytest.mark.parametrize("family", ["float16", "bfloat16"])
def test_hostile_products_are_right_or_refused(family: str) -> None:
    returned, missed, place = 0, list[tuple[int, float]](), list(FAMILIES).index(family)
    for number in range(place, place + 400 * len(FAMILIES), len(FAMILIES)):
        _, A, B, options = draw(number)
        tol = max(options["tol"], 1e-4)
        with contextlib.suppress(ToleranceError):
            C = product(A.cuda(), B.cuda(), tol=tol, seed=number, out_dtype=torch.float32)
            returned += 1
            if (error := exact_error(A, B, C.cpu())) > tol:
                missed.append((number, error))
    assert not missed and returned > 100


def test_seeds_and_gradients() -> None:
    A, B = normal(64, 96).half().cuda().requires_grad_(), normal(96, 48, seed=1).half().cuda()
    C = product(A, B, tol=1e-2)
    C.sum().backward()
    assert A.grad is not None and torch.equal(C, product(A.detach(), B, tol=1e-2, seed=None))
