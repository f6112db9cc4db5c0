"""No product beyond its tolerance is returned, whatever the operands: families made to fool a check."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from residual.error.factor import FAILURE
from residual.matmul import matmul
from residual.report import ToleranceError
from tests.compensated.hostile import FAMILIES, Call, calls, draw, exact_error
from tests.compensated.test_matmul import normal


def _check(found: list[Call]) -> None:
    misses = [each for each in found if each.missed]
    assert len(misses) <= FAILURE * len(found), misses
    returned = Counter(each.family for each in found if each.error is not None)
    assert set(returned) >= set(FAMILIES) - {"int64 above 2^53"}  # every family has products within reach


def test_hostile_products_are_right_or_refused() -> None:
    assert len(FAMILIES) >= 28
    found = list(calls(20 * len(FAMILIES)))
    _check(found)
    assert not [each for each in found if each.missed]  # of these seeds


@pytest.mark.long
def test_twenty_thousand_hostile_products_are_right_or_refused() -> None:
    _check(list(calls(20_000, first=10**6)))


def _outcome(number: int) -> torch.Tensor | str:
    _, A, B, options = draw(number)
    try:
        return matmul(A, B, **options)
    except ToleranceError as failure:
        return str(failure)


def _same_after_harmless_calls(numbers: range) -> None:
    for number in numbers:
        before = _outcome(number)
        _, A, B, options = draw(number)
        harmless = {**options, "tol": 0.5, "rungs": None, "on_failure": "fallback"}
        for seed in range(2):
            m, k, n = *A.shape, B.shape[1]
            matmul(normal(m, k, seed=seed).abs().to(A.dtype), normal(k, n, seed=seed).abs().to(B.dtype), **harmless)
        after = _outcome(number)
        assert type(before) is type(after)
        assert before == after if isinstance(before, str) else torch.equal(before, after)


def test_hostile_products_are_the_same_after_harmless_ones() -> None:
    _same_after_harmless_calls(range(2 * len(FAMILIES)))


@pytest.mark.long
def test_five_thousand_hostile_products_are_the_same_after_harmless_ones() -> None:
    _same_after_harmless_calls(range(10**7, 10**7 + 5000))


@pytest.mark.parametrize("power", [20, 24, 26, 30, 40, 45])
def test_an_absorbed_term_is_seen(power: int) -> None:
    """Product and float32 probes lose the middle term alike: a difference of zero."""
    A, B, truth = torch.tensor([[1.0, 2.0**-power, -1.0]]), torch.ones(3, 1), 2.0**-power
    for seed in range(200):
        try:
            assert matmul(A, B, tol=1e-3, seed=seed).item() == truth
        except ToleranceError as failure:
            assert "AB is below" in str(failure) or "use on_failure" in str(failure)
    if power <= 30:
        assert matmul(A, B, tol=1e-3, on_failure="fallback").item() == truth
    if power >= 40:
        with pytest.raises(ToleranceError, match=r"AB is below \de-\d\d of \|A\|\|B\|"):
            matmul(A, B, tol=1e-3, on_failure="fallback")


def test_a_product_of_zero_by_cancellation_is_refused_and_by_zeros_returned() -> None:
    with pytest.raises(ToleranceError, match=r"error unknown .*; AB is below"):
        matmul(torch.tensor([[1.0, -1.0]]), torch.full((2, 1), 3.0), tol=1e-3, on_failure="fallback")
    A, B = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0], [3.0]])
    assert matmul(A, B, tol=1e-3).item() == 0.0  # |A||B| is zero too
    wide = torch.cat([normal(20, 9), torch.zeros(20, 8)], 1), torch.cat([torch.zeros(9, 30), normal(8, 30)], 0)
    for mode in ("direct", "full", "three_digit"):
        C, report = matmul(*wide, mode=mode, tol=1e-5, return_report=True)
        assert not C.any() and report.upper == 0


def test_exact_errors_are_exact() -> None:
    A, B = torch.tensor([[1.0, 2.0**-60, -1.0]]), torch.ones(3, 1)
    assert exact_error(A, B, torch.tensor([[2.0**-60]])) == 0
    assert exact_error(A, B, torch.zeros(1, 1)) == 1
    assert exact_error(A, B, torch.tensor([[2.0**-59]])) == 1
    assert exact_error(A * 0, B, torch.ones(1, 1)) == math.inf
    x, y = normal(5, 6).double(), normal(6, 4, seed=1).double()
    assert exact_error(x, y, x @ y) < 1e-15
