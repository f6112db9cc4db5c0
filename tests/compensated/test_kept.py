"""Which calls take the short way on a GPU, and what happens where their check does not pass."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.core")

from cute_kernels.estimate.probes import Comparison
from residual.error.estimate import ErrorEstimate, estimate_from_probes
from residual.error.probes import confidence
from residual.execute import fast_path as kept
from residual.operand.operand import Operand, operand
from residual.options import Request, check_request
from residual.planning import history as habits
from residual.planning.history import FIRST, SOON
from residual.planning.plan import Plan

A = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
B = torch.randn(64, 80, generator=torch.Generator().manual_seed(1))


class Ran:
    """In the place of the kernels: the product off by ``error``, with ``far`` scales; ``plans``: what was asked for."""

    def __init__(self) -> None:
        self.error, self.far, self.plans = 0.0, 0, list[str]()
        self.judged: ErrorEstimate | None = None  # by torch

    def __call__(
        self, a: Tensor, b: Tensor, right: Operand | None, plan: Plan, generator: torch.Generator
    ) -> tuple[Tensor, Comparison]:
        self.plans.append(str(plan))
        product = a @ b
        product += (
            self.error * torch.randn(product.shape, generator=generator) * product.norm() / product.numel() ** 0.5
        )
        w = torch.randn(b.shape[1], 16, dtype=torch.float64, generator=generator)
        wanted, claimed = a.double() @ (b.double() @ w), product.double() @ w
        difference = wanted - claimed
        squares = [float(x.double().square().sum()) for x in (wanted, claimed, product)]
        self.judged = estimate_from_probes(wanted, claimed, product, confidence(0))
        return product, Comparison((difference.mT @ difference).numpy(), squares[0], squares[1], squares[2], self.far)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ran]:
    found = Ran()
    monkeypatch.setattr(kept, "_run", found)
    monkeypatch.setattr(kept, "_is_probed_at_once", lambda x: True)

    def forget() -> None:
        habits.forget()
        kept._resting.clear()
        kept._calls.clear()

    forget()
    yield found
    forget()


def attempt(request: Request, a: Tensor = A, b: Tensor = B) -> tuple[Tensor | None, int]:
    return kept.attempt(a, b, None, request, request.kind(a, b), torch.Generator().manual_seed(3))


def asked(tol: float = 1e-2, mode: str = "auto", bits: int | None = None, out: torch.dtype | None = None) -> Request:
    return check_request(A, B, tol, mode, bits, out, "raise", None)


@pytest.mark.parametrize("mode", ["direct", "full", "full4", "three_digit"])
def test_the_one_plan_of_a_mode_is_run(ran: Ran, mode: str) -> None:
    product, failed = attempt(asked(mode=mode, bits=4))
    assert product is not None and failed == 0 and ran.plans == [f"int4 {mode}"]
    assert torch.equal(product, A @ B)


def test_a_habit_is_taken_and_no_other_plan(ran: Ran) -> None:
    request = asked()
    assert attempt(request) == (None, 0)
    for plan in (Plan("fp16"), Plan("full", 8), Plan("centred", 8), Plan("fp32")):
        habits.forget()
        for _ in range(FIRST):
            habits.learn(request.kind(A, B), plan)
        ran.plans.clear()
        results = [attempt(request)[0] for _ in range(SOON + 2)]
        habit = habits.habit_of(request.kind(A, B))
        if plan.mode in ("fp16", "full"):
            assert ran.plans == [str(plan)] * SOON and habit is not None and habit.left == 0
            assert all(x is not None for x in results[:SOON]) and results[SOON:] == [None, None]
        else:
            assert not ran.plans and habit is not None and habit.left == SOON, "left to those who can run it"


def test_one_call_of_sixteen_reads_the_product(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[ErrorEstimate | None, bool]] = []
    count = 0

    def run_foreseen(
        a: Tensor, b: Tensor, right: Operand | None, plan: Plan, generator: torch.Generator
    ) -> tuple[Tensor, ErrorEstimate | None, bool]:
        nonlocal count
        count += 1
        return a @ b, *told[-1]

    monkeypatch.setattr(kept, "_can_foresee", lambda plan, A: True)
    monkeypatch.setattr(kept, "_run_foreseen", run_foreseen)
    told.append((ErrorEstimate(1e-3, 9e-3, 0.99), False))
    request = asked(mode="direct")
    for number in range(2 * kept.READS + 1):
        product, failed = attempt(request)
        assert product is not None and failed == 0
        assert len(ran.plans) == number // kept.READS + 1 and count == number + 1 - len(ran.plans)
    for found, far, failed in (
        (ErrorEstimate(1e-3, 2e-2, 0.99), False, 1),  # no bound within the tolerance
        (ErrorEstimate(1e-3, 9e-3, 0.99), True, 0),
        (None, False, 0),  # the product's norm is not believed
    ):
        kept._resting.clear()
        told.append((found, far))
        assert attempt(request) == (None, failed)
        assert attempt(request) == (None, 0) and len(ran.plans) == 3, "a kind that missed rests"


def test_other_modes_and_dtypes_go_the_long_way(ran: Ran) -> None:
    for mode in ("centred", "outlier", "columns", "sparse"):
        assert attempt(asked(mode=mode)) == (None, 0)
    assert attempt(asked(mode="direct", out=torch.float16)) == (None, 0)
    assert attempt(asked(mode="direct"), A.half(), B.half()) == (None, 0)
    assert attempt(asked(mode="direct"), A, B.to(torch.int8)) == (None, 0)
    assert not ran.plans


def test_after_a_miss_calls_of_the_kind_rest(ran: Ran) -> None:
    request, other = asked(mode="direct"), asked(7e-2, mode="direct")
    ran.error = 2e-2
    assert attempt(request) == (None, 1) and len(ran.plans) == 1
    assert attempt(other)[0] is not None, "another tolerance is another kind"
    ran.error = 0.0
    ran.plans.clear()
    assert [attempt(request) for _ in range(kept.REST)] == [(None, 0)] * kept.REST and not ran.plans
    assert attempt(request)[0] is not None


@pytest.mark.parametrize("what", ["far", "nan"])
def test_lines_that_mean_nothing_are_left_to_others(ran: Ran, what: str) -> None:
    ran.far, ran.error = (2, 0.0) if what == "far" else (0, float("nan"))
    assert attempt(asked(mode="full")) == (None, 0) and len(ran.plans) == 1
    assert attempt(asked(mode="full")) == (None, 0) and len(ran.plans) == 1


def test_halves_of_lines_out_of_range_are_a_miss(ran: Ran) -> None:
    request = asked()
    for _ in range(FIRST):
        habits.learn(request.kind(A, B), Plan("fp16"))
    ran.far = 1
    assert attempt(request) == (None, 1)


def test_what_is_accepted_is_what_the_bound_by_torch_says(ran: Ran) -> None:
    draw, seen = random.Random(0), set()
    for seed in range(100):
        ran.error = 10 ** draw.uniform(-3, -1)
        request = asked(ran.error * draw.uniform(1, 2), mode="direct")
        kept._resting.clear()
        product, failed = kept.attempt(A, B, None, request, request.kind(A, B), torch.Generator().manual_seed(seed))
        assert ran.judged is not None and request.tol is not None
        accepted = ran.judged.upper <= request.tol
        assert ((product is not None), failed) == (accepted, int(not accepted))
        seen.add(accepted)
    assert seen == {False, True}


def test_products_whose_squares_leave_float32_are_left_to_others(ran: Ran) -> None:
    for factor in (2.0**50, 2.0**-50):
        large, request = A * factor, asked(mode="direct")
        assert attempt(request, large) == (None, 0)
        kept._resting.clear()


def test_a_prepared_operand_needs_probes_and_lines_that_are_near_one(ran: Ran) -> None:
    request, right = asked(mode="direct"), operand(B.mT)
    kind = request.kind(A, B, id(right))
    assert kept.attempt(A, B, right, request, kind, torch.Generator())[0] is None and not ran.plans
    right.kept["probes"] = {"w": torch.ones(16, 96), "single": torch.ones(16, 64)}
    assert kept.attempt(A, B, right, request, kind, torch.Generator())[0] is not None
    far = operand(B.mT * torch.ones(80, 1).index_fill(0, torch.tensor(3), 2.0**-50))
    far.kept["probes"] = right.kept["probes"]
    assert far.exponent is not None and kept.attempt(A, B, far, request, kind, torch.Generator())[0] is None
    assert len(ran.plans) == 1


def test_vectors_drawn_ahead_are_taken_once_and_few_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_place", lambda n, device: (n, device, 0))
    monkeypatch.setattr(kept, "_spare", {})
    device, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    first = kept._vectors(100, device, generator)
    values, place = first.clone(), first.data_ptr()
    kept._draw_ahead(first, 100, generator)
    after = generator.get_state()
    second = kept._vectors(100, device, generator)
    assert torch.equal(generator.get_state(), after) and second.data_ptr() == place
    third = kept._vectors(100, device, generator)
    assert first.shape == third.shape == (16, 128) and third.data_ptr() != place
    assert not torch.equal(values, second) and not torch.equal(second, third)
    for n in range(1, 100):
        kept._draw_ahead(third, n, generator)
        assert n in [size for size, *_ in kept._spare] and len(kept._spare) <= kept._SPARES
