"""Checked products whose launches are kept: the numbers of any other call, whatever lies at the addresses by then."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from residual.execute.checked import ToleranceError
from residual.matmul import matmul
from residual.operand.operand import Operand, prepare
from residual.planning import history as habits
from residual.planning.plan import COUNTS, Plan
from tests.compensated.random_products import true_error
from tests.compensated.test_matmul import normal

pytestmark = pytest.mark.gpu


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The plans of calls that went the short way."""
    from residual.execute import fast_path as kept

    plans: list[str] = []

    def count(name: str) -> None:
        run = getattr(kept, name)

        def counted(A: Tensor, B: Tensor, right: Operand | None, plan: Plan, generator: torch.Generator) -> Any:
            plans.append(str(plan) + (", prepared" if right is not None else ""))
            return run(A, B, right, plan, generator)

        monkeypatch.setattr(kept, name, counted)

    def forget() -> None:
        habits.forget()
        kept._resting.clear()
        kept._calls.clear()

    count("_run")
    count("_run_foreseen")
    forget()
    yield plans
    forget()


def long_way(A: Tensor, B: Tensor, mode: str) -> Tensor:
    """A call with a seed depends on none before it."""
    C = matmul(A, B, mode=mode, tol=0.5, seed=0)
    assert isinstance(C, Tensor)
    return C


def matrices(m: int = 2048, k: int = 2080, n: int = 2064, seed: int = 0) -> tuple[Tensor, Tensor]:
    return normal(m, k, seed=seed).cuda(), normal(k, n, seed=seed + 1).cuda()


@pytest.mark.parametrize("mode", COUNTS)
@pytest.mark.parametrize("layout", ["rows", "columns", "odd"])
def test_the_numbers_are_those_of_any_other_call(mode: str, layout: str, ran: list[str]) -> None:
    A, B = matrices(2051, 2077, 2063) if layout == "odd" else matrices()
    if layout == "columns":
        A, B = A.mT.contiguous().mT, B.mT.contiguous().mT
    for number in range(5):
        wanted = long_way(A, B, mode)
        assert torch.equal(matmul(A, B, mode=mode, tol=0.5), wanted) and torch.equal(matmul(A, B, mode=mode), wanted)
        A.normal_()  # other entries at the same address
        if number == 2:
            B = B.clone()  # and another address
    assert ran == [f"int8 {mode}"] * 5


def test_memory_that_others_use_meanwhile_changes_nothing(ran: list[str]) -> None:
    A, B = matrices()
    wanted, keep = long_way(A, B, "full"), []
    for number in range(8):
        C = matmul(A, B, mode="full", tol=0.5)
        assert torch.equal(C, wanted)
        keep.append(torch.full((1 << (10 + number),), 7.0, device="cuda"))
        keep.append(C)
        if number == 5:
            keep.clear()
    assert len(ran) == 8


def test_a_miss_raises_and_calls_after_it_are_right(ran: list[str]) -> None:
    A, B = matrices()
    for _ in range(2):
        with pytest.raises(ToleranceError, match="tol must be met"):
            matmul(A, B, mode="direct", tol=2e-3)
    assert ran == ["int8 direct"], "a kind that missed rests"
    A[:, 5] *= 1000  # what direct cannot do
    for _ in range(3):
        C = matmul(A, B, mode="full", tol=1e-2)
        assert true_error(A, B, C) <= 1e-2


@pytest.mark.parametrize("what", ["nan", "inf", "tiny", "huge"])
def test_lines_out_of_range_are_seen_at_addresses_that_came_before(what: str, ran: list[str]) -> None:
    A, B = matrices()
    for _ in range(3):
        matmul(A, B, mode="full", tol=1e-3)
    assert len(ran) == 3
    factor = {"nan": math.nan, "inf": math.inf, "tiny": 2.0**-60, "huge": 2.0**60}[what]
    A[7] *= factor
    B[:, 9] *= 1 / factor if what in ("tiny", "huge") else 1.0
    C, wanted = matmul(A, B, mode="full", tol=1e-3), A.double() @ B.double()
    if what in ("nan", "inf"):
        assert torch.equal(C[7].isnan(), wanted[7].isnan()) and not C[7].isfinite().any()
        assert C[8].isfinite().all() and true_error(A[8:], B, C[8:]) <= 1e-3
    else:
        assert true_error(A[7:8], B[:, :9], C[7:8, :9]) <= 1e-3 and true_error(A[:7], B[:, 9:10], C[:7, 9:10]) <= 1e-3


def test_a_habit_of_halves_takes_the_short_way(ran: list[str]) -> None:
    A, B = matrices(2048, 2048, 2048)
    for _ in range(habits.FIRST + habits.SOON - 1):
        assert true_error(A, B, matmul(A, B, tol=1e-3)) <= 1e-3
        A.normal_()
    assert ran == ["fp16"] * (habits.SOON - 1)
    A[3] *= 2.0**-24  # no half has its digits
    C = matmul(A, B, tol=1e-3)
    assert len(ran) == habits.SOON and true_error(A[3:4], B, C[3:4]) <= 1e-3


@pytest.mark.parametrize("mode", ["direct", "full4"])
def test_a_prepared_operand_is_read_as_it_is_kept(mode: str, ran: list[str]) -> None:
    A, B = matrices()
    for number in range(2):
        held = prepare(B, mode=mode)
        for turn in range(4):
            wanted = long_way(A, B, mode)
            assert torch.equal(matmul(A, B, mode=mode, tol=0.5, prepared=held), wanted)
            assert torch.equal(matmul(A, B, mode=mode, prepared=held), wanted)
            A.normal_()
            assert len(ran) == 3 * number + turn, "the first call makes the probes"
        B = B.flip(0).contiguous()
    assert set(ran) == {f"int8 {mode}, prepared"}


def test_halves_of_a_prepared_operand(ran: list[str]) -> None:
    A, B = matrices(2048, 2048, 2048)
    B[:, 5] *= 2.0**-24  # no half has its digits
    held = prepare(B)
    for _ in range(habits.FIRST + 4):
        C = matmul(A, B, tol=1e-3, prepared=held)
        assert true_error(A, B, C) <= 1e-3 and true_error(A, B[:, 5:6], C[:, 5:6]) <= 1e-3
    held = prepare(B.normal_())
    for _ in range(habits.FIRST + 4):
        assert true_error(A, B, matmul(A, B, tol=1e-3, prepared=held)) <= 1e-3
        A.normal_()
    assert ran[-4:] == ["fp16, prepared"] * 4


def test_streams_and_threads_do_not_meet(ran: list[str]) -> None:
    failures: list[object] = []

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            A, B = matrices(seed=seed)
            torch.cuda.current_stream().synchronize()
            for _ in range(12):
                C = matmul(A, B, mode="full", tol=0.5)
                if not torch.equal(C, long_way(A, B, "full")):
                    failures.append(seed)
                A.normal_()

    threads = [threading.Thread(target=work, args=(10 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(ran) == 48
