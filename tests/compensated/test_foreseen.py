"""What is made of the sums that two passes over the operands leave, and that those sums are the right ones."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.core")

from cute_kernels import probes
from cute_kernels.probes import Comparison
from cute_kernels.probes_rest import CUT, Rule
from residual import foreseen
from residual.check import confidence
from residual.estimate import bound_of, relative_bound
from residual.plans import COUNTS, Plan, of_digits
from residual.prepare import operand

M, N = 300, 200


@pytest.mark.parametrize("mode", ["direct", "full", "full4"])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_a_product_leaves_out_follows_from_its_digits(mode: str, bits: int) -> None:
    g = torch.Generator().manual_seed(0)
    A, B = torch.randn(40, 60, generator=g), torch.randn(60, 50, generator=g)
    left, right = operand(A), operand(B.mT)
    rule = foreseen.rule_of(Plan(mode, bits))
    assert rule == Rule(COUNTS[mode][0], bits, mode == "full")
    product = of_digits(Plan(mode, bits), left, right).double()

    def left_by(x: torch.Tensor, count: int, side: object) -> torch.Tensor:
        made = side.digits(bits, rule.planes)  # type: ignore[attr-defined]
        kept = sum(p.double() * 2.0 ** (-bits * i) for i, p in enumerate(made.planes[:count]))
        return x.double() - made.scale.double()[:, None] * kept

    a, da = left_by(A, 1, left), left_by(A, rule.planes, left)
    b, db = left_by(B.mT, 1, right).mT, left_by(B.mT, rule.planes, right).mT
    x, y = A.double(), B.double()
    out = x @ db + da @ (y - b) + a @ (b - db) if rule.cross else x @ db + da @ (y - db)
    missed = x @ y - product
    assert float((missed - out).norm()) < foreseen.ROUNDING * float(product.norm()) and float(missed.norm()) > 0


def test_other_plans_are_not_foreseen() -> None:
    for plan in (Plan("three_digit", 8), Plan("centred", 8), Plan("fp16")):
        assert foreseen.rule_of(plan) is None
    assert not foreseen.can_foresee(Plan("direct", 8), 4096, torch.device("cpu"))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the GPU has left: sums of the passes, and squares of the product."""
    y = np.random.default_rng(0).standard_normal((M, 16))
    found = SimpleNamespace(gram=y.T @ y, product=16e6, far=0, squares=torch.full((10,), 1e5))
    monkeypatch.setattr(probes, "awaited", lambda device: Comparison(found.gram, found.product, 0.0, 0.0, found.far))
    monkeypatch.setattr(foreseen, "_squares", lambda device: SimpleNamespace(sums=found.squares))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    return found


def test_the_bound_is_that_of_the_check_and_a_rounding(told: SimpleNamespace) -> None:
    found, far = foreseen.finish(torch.zeros(M, N), confidence(0))
    error, bound = bound_of(told.gram, CUT, confidence(0))
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
