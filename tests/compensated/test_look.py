"""The error that is measured before a product is the product's, and laws of the verdict."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from cute_kernels.cpu import engine, extension
from residual.error.factor import confidence
from residual.error.look import look
from residual.error.probes import (
    draw,
    judge,
    noise,
    probe_right,
    row_sums,
    steps,
    sums_of,
    two_level,
)
from residual.execute.products import execute
from residual.execute.run import judged
from residual.matmul import matmul, plan, prepare
from residual.operand.operand import operand
from residual.operand.prepared import DIRECT, prepare_for
from residual.options import machine_of
from residual.planning.ladder import PLANES, Demand, Machine, Rung, rungs_of
from residual.report import ToleranceError
from tests.compensated.hostile import FAMILIES, exact_error
from tests.compensated.random_products import KINDS, true_error
from tests.compensated.test_matmul import normal


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("mode", PLANES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_look_sees_the_error_of_the_product_to_come(kind: str, mode: str, bits: int) -> None:
    torch.manual_seed(1)
    random.seed(3)
    A, B = KINDS[kind](60, 90, 70)
    rung, left, right = Rung(mode, bits), operand(A), prepare_for(B, 0, (Rung(mode, bits),))
    digits, (of_right, form_look) = left.digits(rung), right.digits(rung)
    sums, eta = look(left.exact, left.planes(rung, digits), form_look, right.vectors, B.shape[1])
    product = execute(rung, left, right.columns, torch.float64, digits, of_right)
    seen = judge(left.exact, right.vectors, right.bound, product, *right.probes)
    rounding = 2.0**-22 * math.sqrt(seen.result)  # of a product by one digit, in float32
    slack = 4 * rounding * math.sqrt(B.shape[1]) + eta + noise(seen, A, B)
    assert abs(math.sqrt(seen.gram.trace()) - math.sqrt(sums.gram.trace())) <= slack
    assert sums.product == pytest.approx(seen.product, rel=1e-12)


@pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (30, 70, 20), (130, 1000, 65)])
def test_the_engine_s_sums_are_those_of_torch(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, k, n = shape
    A, B = normal(m, k).to(dtype), normal(k, n, seed=1).to(dtype)
    C, w = (A @ B) * (1 + 1e-3 * normal(m, n, seed=2)).to(dtype), draw(n, A.device, 3)
    for x, y, z in ((A, B, C), (A.mT.contiguous().mT, B.mT.contiguous().mT, C.mT.contiguous().mT)):
        mine, theirs = probe_right(y, *w), row_sums(y, w.vectors.double(), w.norms)[:2]
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(mine, theirs, strict=True))
        found, wanted = judge(x, *mine, z, *w), sums_of(row_sums(x, *theirs), row_sums(z, w.vectors.double(), w.norms))
        assert found.gram == pytest.approx(wanted.gram, rel=1e-7, abs=1e-12)
        assert found[1:-1] == pytest.approx(wanted[1:-1], rel=1e-12)
        assert found.single == (pytest.approx(float(w.vectors.double().square().sum())) if n == 1 else 0.0)


@pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_s_direct_product_is_that_of_torch(kind: str) -> None:
    torch.manual_seed(2)
    random.seed(2)
    A, B = KINDS[kind](70, 90, 60)
    found = matmul(A, prepare(B, mode="direct"), mode="direct", return_report=True)
    left, columns = operand(A), operand(B.mT)
    digits = left.digits(DIRECT), columns.digits(DIRECT)
    wanted = execute(DIRECT, left, columns, torch.float32, *digits)
    if left.exponent is None and columns.exponent is None:
        assert torch.equal(found[0], wanted)
    assert found[1].estimated_error == pytest.approx(true_error(A, B, wanted), rel=0.8, abs=1e-7)


def test_bytes_leave_nothing() -> None:
    A, B = torch.randint(-128, 128, (40, 50), dtype=torch.int8), torch.randint(-128, 128, (50, 30), dtype=torch.int8)
    C, report = matmul(A, B, mode="direct", tol=1e-6, return_report=True)
    assert torch.equal(C, (A.long() @ B.long()).float())
    assert report.estimated_error == 0 and report.upper < 1e-6


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 100, 1000])
def test_sums_in_two_levels_round_as_rarely_as_they_say(n: int) -> None:
    """Of a term: its product, the sum of its block, the sum of blocks and of what is left over."""
    block = math.isqrt(n - 1) + 1
    assert steps(n) >= 1 + (block - 1) + (n // block - 1) + 1 and steps(n) <= 2 * math.sqrt(n) + 3
    x, v = normal(5, n).double(), normal(n, 16, seed=1).double()
    assert torch.allclose(two_level(x, v), x @ v, rtol=1e-13, atol=1e-13)


def _rounding_is_within_its_bound(numbers: range) -> None:
    """The probes' own rounding, against sums in integers, for float32 operands of every family."""
    for number in numbers:
        random.seed(number)
        torch.manual_seed(number)
        A, B = list(FAMILIES.values())[number % len(FAMILIES)]()
        if not (A.dtype == B.dtype == torch.float32) or max(A.abs().max(), B.abs().max()) > 2.0**60:
            continue
        C = (A.double() @ B.double()).float()
        W = normal(B.shape[1], 16, seed=number)
        wbar = W.double().norm(dim=1)
        BW, bound = probe_right(B, W, wbar)
        sums = judge(A, BW, bound, C, W, wbar)
        y = two_level(A.double(), BW) - two_level(C.double(), W.double())
        off = _difference(A, B, C, W, y)
        assert off <= noise(sums, A, B), number


def _difference(A: Tensor, B: Tensor, C: Tensor, W: Tensor, y: Tensor) -> float:
    """``|| (A B - C) W - y ||_F`` in integers."""
    from tests.compensated.hostile import _integers_of

    (a, ea), (b, eb), (c, ec), (w, ew), (z, ez) = map(_integers_of, (A, B, C, W, y))
    least = min(ea + eb + ew, ec + ew, ez)
    exact = (a @ b @ w) * (1 << (ea + eb + ew - least)) - (c @ w) * (1 << (ec + ew - least))
    total = sum(int(x) ** 2 for x in (exact - z * (1 << (ez - least))).flat)
    return math.ldexp(math.sqrt(total >> 2 * max(0, (total.bit_length() - 900) // 2)),
                      least + max(0, (total.bit_length() - 900) // 2))  # fmt: skip


def test_the_rounding_of_the_probes_is_within_its_bound() -> None:
    _rounding_is_within_its_bound(range(10 * len(FAMILIES)))


def test_sums_that_are_infinite_are_no_bound() -> None:
    A, B = torch.full((2, 2), 1e30), torch.full((2, 2), 1e30)
    with pytest.raises(ToleranceError, match="error unknown"):
        matmul(A, B, tol=0.5, on_failure="fallback")


def _verdict(A: Tensor, B: Tensor, C: Tensor, seed: int = 0) -> float:
    return judged(C, operand(A), prepare_for(B, seed, ()), confidence(0)).upper


@pytest.mark.parametrize("kind", KINDS)
def test_a_verdict_is_the_same_for_scales_of_two_blocks_and_permutations(kind: str) -> None:
    torch.manual_seed(5)
    random.seed(5)
    A, B = KINDS[kind](40, 60, 50)
    if not (A @ B).any():
        return
    C = (A.double() @ B.double()).float()
    C = C + 1e-4 * C.norm() / 45 * torch.randn(C.shape)
    want = _verdict(A, B, C)
    assert _verdict(A * 2.0**9, B * 2.0**-4, C * 2.0**5) == pytest.approx(want, rel=1e-9)
    order = torch.randperm(A.shape[1])
    assert _verdict(A[:, order], B[order], C) == pytest.approx(want, rel=1e-6)
    rows = torch.randperm(A.shape[0])
    assert _verdict(A[rows], B, C[rows]) == pytest.approx(want, rel=1e-6)
    zeros = torch.zeros(A.shape[0], 7), torch.zeros(7, B.shape[1])
    assert _verdict(torch.cat([A, zeros[0]], 1), torch.cat([B, zeros[1]], 0), C) == pytest.approx(want, rel=1e-6)
    assert _verdict(A.mT.contiguous().mT, B.mT.contiguous().mT, C.mT.contiguous().mT) == pytest.approx(want, rel=1e-6)
    assert _verdict(B.mT, A.mT, C.mT) == pytest.approx(want, rel=0.6)  # other probes


def test_a_smaller_tolerance_takes_no_cheaper_rung() -> None:
    rungs = ("direct", "full", "three_digit", "fp32", "fp64")
    for seed, kind in enumerate(KINDS):
        torch.manual_seed(seed)
        random.seed(seed)
        A, B = KINDS[kind](50, 60, 40)
        if not (A @ B).any():
            continue
        chosen = []
        for tol in torch.logspace(-0.5, -6, 20).tolist():
            try:
                C, report = matmul(A, B, tol=tol, rungs=rungs, out_dtype=torch.float64, return_report=True)
                assert true_error(A, B, C) <= tol
                chosen.append(rungs.index(report.plan.split()[-1]))
            except ToleranceError:
                chosen.append(len(rungs))
        assert chosen == sorted(chosen), kind


def test_the_first_rung_within_the_tolerance_is_the_cheapest_one_that_is_or_dearer() -> None:
    """Over kinds of data and tolerances: nearly always the cheapest rung that meets the tolerance, never one that misses."""
    rungs, same, dearer = ("direct", "full", "three_digit", "fp32"), 0, 0
    for seed, kind in enumerate(("uniform", "standard normal", "exponential", "Student t2")):
        torch.manual_seed(seed)
        A, B = KINDS[kind](200, 220, 210)
        errors = [true_error(A, B, matmul(A, B, tol=0.99, rungs=(rung,))) for rung in rungs]
        for tol in torch.logspace(-1, -5.5, 12).tolist():
            C, report = matmul(A, B, tol=tol, rungs=rungs, return_report=True)
            best = next(i for i, error in enumerate(errors) if error <= tol)
            taken = rungs.index(report.plan.split()[-1])
            same, dearer = same + (taken == best), dearer + (taken > best)
            assert taken >= best and true_error(A, B, C) <= tol
    assert same >= 4 * dearer


def test_rungs_follow_the_table() -> None:
    vnni, plain, cuda = Machine(False, True), Machine(False, False), Machine(True, True)
    large = 2**30

    def names(machine: Machine, *demand: object, mode: str = "auto") -> list[str]:
        return [str(rung) for rung in rungs_of(mode, 8, machine, Demand(*demand))]  # type: ignore[arg-type]

    assert names(vnni, 1e-2, large) == ["int8 direct", "fp32"] and names(vnni, 1e-6, large) == ["fp32"]
    assert names(plain, 1e-2, large) == ["fp32"] and names(vnni, 1e-2, 2**20) == ["fp32"]
    assert names(cuda, 1e-2, large) == ["int8 direct", "int8 full", "fp32"]
    assert names(cuda, 1e-4, large) == ["int8 full", "int8 three_digit", "fp32"]
    assert names(cuda, 1e-6, large) == ["int8 three_digit", "fp32"]
    assert names(cuda, 1e-3, large, False, True) == ["fp16", "fp32"]
    assert names(plain, 1e-12, large, True) == ["fp64"] and names(plain, 1e-3, large, True) == ["fp32", "fp64"]
    assert names(plain, 1e-3, large, False, False, True) == ["fp32", "fp64"]
    assert names(vnni, 1e-3, large, mode="full") == ["int8 full"]
    assert names(vnni, 1e-3, large, False, False, True, mode="full") == ["int8 full", "fp32", "fp64"]


def test_digits_are_for_instruction_sets_that_multiply_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in extension.isas():
        monkeypatch.setenv("MAGICUBE_CPU", path)
        assert machine_of(torch.device("cpu")) == Machine(False, path not in ("avx2", "portable"))


def test_digits_of_a_new_operand_need_many_rows_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("residual.options.machine_of", lambda _: Machine(False, True))

    def first(m: int, n: int, is_prepared: bool, dtype: torch.dtype = torch.float32) -> str:
        A, B = torch.empty(m, 512, dtype=dtype), torch.empty(512, n, dtype=dtype)
        options = plan(tol=1e-2).options
        rung = str(options.rungs_for(A, B, is_prepared)[0])
        if dtype == torch.float32:
            assert options.starts_single(A, B, is_prepared) == (rung == "fp32")
        return rung

    assert first(640, 640, False) == first(16, 1024, True) == first(640, 640, False, torch.bfloat16) == "int8 direct"
    assert first(639, 2048, False) == first(2048, 639, False) == first(2048, 2048, False, torch.int8) == "fp32"
    assert first(2048, 2048, False, torch.float64) == first(2, 1024, True) == "fp32"


def test_a_report_counts_each_rung_that_was_measured() -> None:
    A, B = normal(80, 90), normal(90, 70, seed=1)
    C, report = matmul(A, B, tol=1e-3, rungs=("direct", "full"), return_report=True)
    assert [each.plan for each in report.attempts] == ["int8 direct", "int8 full"]
    direct, full = report.attempts
    assert direct.upper > 1e-3 >= full.upper == report.upper > report.estimated_error > 0 and full.noise < 1e-10
    assert exact_error(A, B, C) == pytest.approx(true_error(A, B, C), rel=1e-6)
