"""Plans that calls come to by habit: statistics are left out, the check never is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from residual.error.probes import usual_factor
from residual.execute import checked as call
from residual.matmul import matmul
from residual.planning import history as habits
from residual.planning import search as planner
from residual.planning.cost_model import Sizes, analysis, cost
from residual.planning.history import AVOIDED, FIRST, MOST, OFTEN, REUSES, SOON, Habit
from residual.planning.plan import Plan
from residual.planning.search import SINGLE, Search, Wish, without_statistics
from tests.compensated.random_products import _CHEAP, true_error


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that statistics were taken; digits are cheap."""
    found: list[int] = []
    look = call.forecast

    def counted(*arguments: Any) -> Any:
        found.append(1)
        return look(*arguments)

    monkeypatch.setattr(call, "forecast", counted)
    monkeypatch.setattr(call, "costs_of", lambda device: _CHEAP)
    habits.forget()
    return found


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_calls_that_come_to_one_plan_run_it_by_themselves(looks: list[int]) -> None:
    A, B = normal(60, 128), normal(128, 50, seed=1)
    taken = [True] * FIRST + [False] * SOON + [True] + [False] * REUSES + [True] + [False]
    for statistics in taken:
        before = len(looks)
        assert true_error(A, B, matmul(A, B, tol=1e-3)) <= 1e-3
        assert len(looks) - before == statistics


def test_a_plan_that_misses_costs_an_attempt_and_no_error(looks: list[int]) -> None:
    A, B = normal(60, 128), normal(128, 50, seed=1)
    B -= B.mean(0)
    for _ in range(FIRST):
        matmul(A, B, tol=3e-2)
    assert matmul(A, B, tol=3e-2, return_report=True)[1].plan == "int8 direct"
    A += 100  # cancels in the product, and leaves one digit little of the rest
    before = len(looks)
    C = matmul(A, B, tol=3e-2)
    assert true_error(A, B, C) <= 3e-2 and len(looks) == before + 1
    matmul(A, B, tol=3e-2)
    assert len(looks) == before + 2  # the habit is broken


@pytest.mark.parametrize("options", [{"seed": 3}, {"return_report": True}])
def test_reports_and_seeds_know_no_habit(looks: list[int], options: dict[str, Any]) -> None:
    A, B = normal(60, 128), normal(128, 50, seed=1)
    for _ in range(FIRST + 2):
        matmul(A, B, tol=1e-3)
    before = len(looks)
    matmul(A, B, tol=1e-3, **options)
    assert len(looks) == before + 1


def test_other_kinds_of_calls_have_habits_of_their_own(looks: list[int]) -> None:
    A, B = normal(60, 128), normal(128, 50, seed=1)
    for _ in range(FIRST + 1):
        matmul(A, B, tol=1e-3)
    before = len(looks)
    matmul(A, B, tol=2e-3)
    matmul(A[:59], B, tol=1e-3)
    matmul(A, B, tol=1e-3, out_dtype=torch.float64)
    matmul(A.half(), B.half(), tol=1e-3, out_dtype=torch.float32)  # the same output of other operands
    assert len(looks) == before + 4


def test_a_plan_that_missed_is_left_out_for_longer_each_time() -> None:
    direct, full = Plan("direct", 8), Plan("full", 8)
    habit = Habit(direct)
    for runs in (SOON, REUSES, REUSES):
        for _ in range(FIRST):
            assert habit.take() is None
            habit.chosen(direct)
        assert habit.take() == direct and habit.left == runs - 1
        habit.left = 0
        habit.chosen(full)
        assert habit.plan == full and habit.agreed == 1
        habit = Habit(direct, ran=habit.ran)
    for times in (AVOIDED, 2 * AVOIDED, 4 * AVOIDED, *[MOST] * 3):
        habit.chosen(full, [direct])
        assert habit.take() is None, "once is not enough"
        for left in range(times, 0, -1):
            assert habit.avoided == {direct}, left
            habit.chosen(full)
        assert not habit.avoided and habit.take() == full
        if times >= 4 * AVOIDED:
            habit.missed[direct] = 0, MOST
    assert MOST > 4 * AVOIDED


def test_calls_that_come_often_find_a_plan_that_statistics_alone_would_not_pay_for(
    looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 by itself is cheaper than one digit product with statistics, and dearer than with a 15th of them."""
    A, B = normal(60, 128), normal(128, 50, seed=1)
    wish, sizes = Wish(3e-2), Sizes(60, 128, 50)
    single, direct = (cost(plan, sizes, _CHEAP) for plan in (SINGLE, Plan("direct", 8)))
    assert direct < single
    prices = replace(_CHEAP, analysis=3 * (single - direct), analysis_k=0.0)
    assert without_statistics(wish, sizes, prices) == SINGLE
    assert without_statistics(wish, sizes, prices.sharing(REUSES)) is None
    monkeypatch.setattr(call, "costs_of", lambda device: prices)
    for number in range(1, OFTEN + FIRST + 4):
        matmul(A, B, tol=3e-2, seed=5)  # is not counted
        assert true_error(A, B, matmul(A, B, tol=3e-2)) <= 3e-2
        assert len(looks) == min(max(number + 1 - OFTEN, 0), FIRST)


def test_calls_that_come_often_dare_a_plan_near_the_tolerance_until_it_misses(
    looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B = normal(60, 128), normal(128, 50, seed=1)
    B -= B.mean(0)
    predicted = matmul(A, B, mode="direct", return_report=True)[1].predicted_error
    monkeypatch.setattr(planner, "_MARGIN", 4.0)
    tol = 2 * usual_factor(60, 50) * predicted
    assert matmul(A, B, tol=tol, return_report=True)[1].plan == "int8 full", "by itself a call is careful"
    for _ in range(FIRST + SOON - 1):  # the report has agreed
        matmul(A, B, tol=tol)
    (habit,) = habits._habits.values()
    assert str(habit.plan) == "int8 full"
    for _ in range(FIRST + 2):
        assert true_error(A, B, matmul(A, B, tol=tol)) <= tol
    assert str(habit.plan) == "int8 direct" and habit.left == REUSES - 2
    matmul(A + 100, B, tol=tol)  # cancels in the product, and leaves one digit little of the rest
    assert habit.avoided == {Plan("direct", 8)}
    for _ in range(AVOIDED):
        matmul(A, B, tol=tol)
        assert str(habit.plan) in ("int8 centred", "int8 full")
    assert 0 < habit.left < REUSES


def test_plans_that_take_statistics_in_each_call_pay_for_them() -> None:
    sizes = Sizes(60, 128, 50, hot=1)
    search = Search(Wish(1e-3), 1.3, lambda plan: sizes, _CHEAP.sharing(REUSES, kept=True))
    waiting, direct = Plan("outlier", 8), Plan("direct", 8)
    alone = {plan: cost(plan, sizes, _CHEAP) for plan in (waiting, direct)}
    assert search._cost(waiting) < alone[waiting] and search._cost(direct) < alone[direct]
    search.single = _CHEAP
    assert search._cost(waiting) == alone[waiting] + analysis(sizes, _CHEAP) and search._cost(direct) < alone[direct]


def test_kept_launches_cost_a_part() -> None:
    plan, sizes = Plan("direct", 8), Sizes(60, 128, 50)
    shared, kept = _CHEAP.sharing(REUSES), _CHEAP.sharing(REUSES, kept=True)
    assert cost(plan, sizes, shared) == cost(plan, sizes, _CHEAP) > cost(plan, sizes, kept)
    assert shared.analysis == kept.analysis == _CHEAP.analysis / REUSES
    assert shared.halves == _CHEAP.halves < kept.halves, "torch's launches beside kept ones"


def test_a_plan_that_missed_is_tried_again_before_a_product_is_refused() -> None:
    sizes, three, full = Sizes(60, 128, 50), Plan("three_digit", 8), Plan("full", 8)
    predicted: dict[Plan, float | None] = {full: 1e-4, three: 1e-8, SINGLE: 4e-7}
    search = Search(Wish(1e-3), 1.3, lambda plan: sizes, _CHEAP, dict(predicted), avoided={full})
    assert search.next() in (three, SINGLE), "there is another one"
    search = Search(Wish(1e-7), 1.3, lambda plan: sizes, _CHEAP, dict(predicted), avoided={three})
    assert search.next() == three
    search.failed(three, 2e-7)
    assert search.next() == SINGLE
    search.failed(SINGLE, 4e-7)
    assert search.next() is None
