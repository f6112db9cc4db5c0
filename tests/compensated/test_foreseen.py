"""What is made of the sums that two passes over the operands leave, and that those sums are the right ones."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.core")

from cute_kernels.estimate import probes
from cute_kernels.estimate.probes import Comparison
from cute_kernels.estimate.remainder_probes import TF32_MARGIN
from residual.error.estimate import bound_of, relative_bound
from residual.error.probes import confidence
from residual.execute import fast_check as foreseen
from residual.execute.products import of_digits
from residual.operand.operand import operand
from residual.planning.plan import Plan

M, N = 300, 200


@pytest.mark.parametrize("bits", [4, 8])
def test_what_a_product_leaves_out_follows_from_its_digits(bits: int) -> None:
    g = torch.Generator().manual_seed(0)
    A, B = torch.randn(40, 60, generator=g), torch.randn(60, 50, generator=g)
    left, right = operand(A), operand(B.mT)
    product = of_digits(Plan("direct", bits), left, right).double()
    a, b = left.digits(bits, 1), right.digits(bits, 1)
    x, y = A.double(), B.double()
    da = x - a.scale.double()[:, None] * a.planes[0].double()
    db = y - (b.scale.double()[:, None] * b.planes[0].double()).mT
    missed = x @ y - product
    out = x @ db + da @ (y - db)
    assert float((missed - out).norm()) < foreseen.ROUNDING * float(product.norm()) and float(missed.norm()) > 0


def test_sums_that_cancel_are_why_more_digits_are_not_foreseen() -> None:
    """Every entry is its digits, so that they leave nothing; the sums of two levels are 256 times apart and cancel."""
    K = 8192
    first, second = torch.zeros(16, K), torch.full((16, K), 127.0)
    first[:, 0], second[:, 0], first[:, 1:4191] = 127.0, 0.0, -1.0
    second[:, 9] = 1.0 - torch.arange(1, 17)
    A, B = first + second / 256, torch.full((K, 16), 127.0)
    a, b = operand(A).digits(8, 2), operand(B.mT).digits(8, 2)
    assert torch.equal(a.planes[0].float(), first) and torch.equal(a.planes[1].float(), second)
    assert not b.planes[1].any() and bool((a.scale == 1).all()) and bool((b.scale == 1).all())
    levels = [(plane.double() @ b.planes[0].double().mT).float() for plane in a.planes]  # as the kernel converts them
    truth = A.double() @ B.double()
    missed = float((torch.add(levels[0], levels[1], alpha=2.0**-8).double() - truth).norm() / truth.norm())
    assert missed > 1e-3 > foreseen.ROUNDING


def test_other_plans_are_not_foreseen() -> None:
    cuda = torch.device("cuda", 0)
    for plan in (Plan("full", 8), Plan("full4", 8), Plan("three_digit", 8), Plan("centred", 8), Plan("fp16")):
        assert not foreseen.can_foresee(plan, 4096, cuda), "without asking the device"
    assert not foreseen.can_foresee(Plan("direct", 8), 4096, torch.device("cpu"))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the GPU has left: sums of the passes, and squares of the product."""
    y = np.random.default_rng(0).standard_normal((M, 16))
    found = SimpleNamespace(gram=y.T @ y, product=16e6, far=0, squares=torch.full((10,), 1e5))
    monkeypatch.setattr(
        probes, "wait_result", lambda device: Comparison(found.gram, found.product, 0.0, 0.0, found.far)
    )
    monkeypatch.setattr(foreseen, "_squares", lambda device: SimpleNamespace(sums=found.squares))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    return found


def test_the_bound_is_that_of_the_check_and_a_rounding(told: SimpleNamespace) -> None:
    found, far = foreseen.finish(torch.zeros(M, N), confidence(0))
    error, bound = bound_of(told.gram, TF32_MARGIN, confidence(0))
    assert found is not None and not far
    assert found.relative == pytest.approx(error / 1e3)
    assert found.upper == pytest.approx(relative_bound(bound, 1e3) + foreseen.ROUNDING)
    assert found.upper > found.relative * 1.1


@pytest.mark.parametrize("factor", [1e-2, 1 / 45, 7.0, np.nan, np.inf, 0.0])
def test_a_norm_that_no_draw_explains_is_not_believed(told: SimpleNamespace, factor: float) -> None:
    told.product *= factor
    assert foreseen.finish(torch.zeros(M, N), confidence(0)) == (None, False)


@pytest.mark.parametrize("squares", [0.0, 1e-38, np.nan, np.inf])
def test_squares_that_left_their_range_say_nothing(told: SimpleNamespace, squares: float) -> None:
    told.squares[:] = squares
    assert foreseen.finish(torch.zeros(M, N), confidence(0)) == (None, False)


def test_lines_that_are_far_are_told(told: SimpleNamespace) -> None:
    told.far = 2
    assert foreseen.finish(torch.zeros(M, N), confidence(0)) == (None, True)
