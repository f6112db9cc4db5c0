"""Products of 16-bit floats by passes over their float32 copies: two dtypes, modes by name, rungs of the caller's."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from residual.cuda import flow, passes
from residual.execute import copies
from residual.matmul import matmul, plan, prepare
from residual.operand.prepared import PreparedOperand
from residual.report import ToleranceError
from tests.compensated.hostile import FAMILIES, draw, exact_error
from tests.compensated.random_products import true_error
from tests.compensated.test_matmul import normal

pytestmark = pytest.mark.gpu

SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
CALLS: list[tuple[torch.dtype, torch.dtype, dict[str, Any]]] = [
    *((left, right, {}) for left, right in ((HALF, BRAIN), (SINGLE, BRAIN), (HALF, SINGLE))),
    *((BRAIN, BRAIN, {"mode": mode}) for mode in ("direct", "full")),
    (HALF, HALF, {"mode": "full"}),
    (SINGLE, BRAIN, {"mode": "direct"}),
    (BRAIN, BRAIN, {"rungs": ("direct", "full", "fp32")}),
    (HALF, HALF, {"flow": "measured"}),
]


def operands(left: torch.dtype, right: torch.dtype) -> tuple[Tensor, Tensor]:
    return normal(600, 512).to(left).cuda(), normal(512, 700, seed=1).to(right).cuda()


def product(A: Tensor, B: Tensor | PreparedOperand, **options: Any) -> Tensor:
    result = matmul(A, B, **options)
    assert isinstance(result, Tensor)
    return result


@pytest.fixture
def no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow with statistics must not run."""
    monkeypatch.setattr(flow, "run_flow", None)


@pytest.mark.usefixtures("no_other_way")
@pytest.mark.parametrize(("left", "right", "options"), CALLS)
def test_a_float32_output_is_that_of_float32_copies(
    left: torch.dtype, right: torch.dtype, options: dict[str, Any]
) -> None:
    A, B = operands(left, right)
    options = {"tol": 2e-2, "out_dtype": SINGLE, **options}
    wanted, report = matmul(A.float(), B.float(), return_report=True, **options)
    got, own = matmul(A, B, return_report=True, **options)
    assert torch.equal(got, wanted) and own == report and true_error(A, B, got) <= report.upper <= 2e-2
    for _ in range(4):  # launches, then a graph
        assert torch.equal(product(A, B, **options), wanted)
    turned = A.mT.contiguous().mT, B.mT.contiguous().mT
    assert torch.equal(product(*turned, **options), wanted)
    pending = plan(**options).start(A, B)
    assert torch.equal(pending.result(), wanted) and pending.report == report


@pytest.mark.usefixtures("no_other_way")
@pytest.mark.parametrize(("left", "right", "options"), [call for call in CALLS if SINGLE not in call[:2]])
def test_a_16_bit_output_is_that_product_rounded_once(
    left: torch.dtype, right: torch.dtype, options: dict[str, Any]
) -> None:
    A, B = operands(left, right)
    options = {"tol": 3e-2, "out_dtype": BRAIN, **options}
    C, report = matmul(A, B, return_report=True, **options)
    wanted = product(A.float(), B.float(), **{**options, "tol": 2.5e-2, "out_dtype": SINGLE})
    assert torch.equal(C, wanted.to(BRAIN)) and true_error(A, B, C) <= report.upper <= 3e-2
    assert report.estimated_error == pytest.approx(true_error(A, B, C), rel=0.25)
    assert torch.equal(product(A, B, **options), C)


@pytest.mark.usefixtures("no_other_way")
@pytest.mark.parametrize("mode", ["direct", "full"])
def test_the_pass_over_a_prepared_weight_is_made_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = operands(BRAIN, BRAIN)
    options: dict[str, Any] = {"tol": 3e-2, "mode": mode}
    wanted, held = product(A, B, **options), prepare(B, tol=3e-2, mode=mode)
    monkeypatch.setattr(passes, "right_pass", None)
    for _ in range(3):
        assert torch.equal(product(A, held, **options), wanted)
    single = product(A.float(), held, out_dtype=SINGLE, **options)
    assert torch.equal(single.bfloat16(), wanted)


def test_a_prepared_weight_of_another_plan_serves_too() -> None:
    A, B = operands(HALF, BRAIN)
    for held in (prepare(B, tol=1e-3), prepare(B.float(), tol=1e-3)):
        C = product(A, held, tol=1e-3, out_dtype=SINGLE)
        assert true_error(A, B, C) <= 1e-3


def test_what_the_rounding_misses_goes_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = operands(BRAIN, BRAIN)
    with pytest.raises(ToleranceError, match="bfloat16"):
        product(A, B, tol=1.5e-3, mode="full")
    rounded: list[float] = []
    monkeypatch.setattr(copies, "relative_difference", lambda x, y: rounded.append(0.0) or 0.1)
    C, report = matmul(A, B, tol=3e-2, mode="full", return_report=True)
    assert rounded and true_error(A, B, C) <= report.upper <= 3e-2


def test_lines_that_are_not_finite_and_gradients() -> None:
    A, B = operands(HALF, BRAIN)
    A[3, 5], B[7, 9] = math.inf, math.nan
    C = product(A, B, tol=1e-2)
    assert C.dtype == SINGLE and torch.equal(C.isfinite(), (A.float() @ B.float()).isfinite())
    A, B = operands(BRAIN, BRAIN)
    A.requires_grad_()
    C = product(A, B, tol=3e-2, mode="direct")
    C.sum().backward()
    assert A.grad is not None and A.grad.dtype == BRAIN and C.dtype == BRAIN
    with torch.autocast("cuda", BRAIN):
        assert torch.equal(product(A.detach(), B, tol=3e-2, mode="direct"), C)


@pytest.mark.parametrize("family", ["float16", "bfloat16", "tail", "cancelling", "needles"])
def test_hostile_products_are_right_or_refused(family: str) -> None:
    returned, missed, place = 0, list[tuple[int, float]](), list(FAMILIES).index(family)
    for number in range(place, place + 100 * len(FAMILIES), len(FAMILIES)):
        _, A, B, options = draw(number)
        A, B = A.to(HALF if number % 2 else BRAIN), B.to(BRAIN)
        if not (A.isfinite().all() and B.isfinite().all()):
            continue
        tol = min(max(options["tol"], 1e-4), 0.2)
        with contextlib.suppress(ToleranceError):
            C = product(A.cuda(), B.cuda(), tol=tol, seed=number, out_dtype=SINGLE, on_failure="fallback")
            returned += 1
            if (error := exact_error(A, B, C.cpu())) > tol:
                missed.append((number, error))
    assert not missed and returned > 20
