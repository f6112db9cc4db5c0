"""Statistics of operands on a GPU: against torch on the lines that were drawn, and calls that choose by them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cute_kernels.estimate import probes, statistics
from cute_kernels.estimate.config import default_configs as probe_configs
from cute_kernels.estimate.statistics import (
    FACTS,
    FORMS,
    NUM_SLICES,
    OperandSample,
    PairStatistics,
    SlicedOperand,
    StatisticsFuture,
)
from residual.cuda import flow, passes
from residual.cuda.operand import FAR, hot_columns
from residual.cuda.plans import COLUMN_SHARES, SPARSE_LEVELS
from residual.cuda.predict import R1, Lines, X, _rule, _statistics
from residual.matmul import matmul
from tests.compensated.random_products import KINDS, true_error
from tests.compensated.test_cuda_plans import _CHEAP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.configs([*probe_configs(), *statistics.default_configs()]),  # compiled side by side
]

SHAPES = [(1, 1), (33, 71), (256, 4096), (1000, 1003), (70, 9001)]
HALF_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def poison() -> None:
    """What is allocated next holds NaN where nothing is written."""
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 22):
        torch.full((size,), math.nan, device="cuda")


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gap", [0, 1, 8])
@pytest.mark.parametrize("lines", ["rows", "columns"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_pass_with_probes_finds_the_largest_magnitudes(
    turned: bool, lines: str, gap: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    m, n = shape
    x = normal(m, n + gap, seed=m).to(dtype).cuda()[:, :n]
    if turned:  # the same numbers, column by column
        x = normal(n, m + gap, seed=m).to(dtype).cuda()[:, :m].mT
    assert probes.probeable(x)
    w = normal(probes.PROBES, probes.padded(n), seed=1).cuda()
    x[m // 2] = 0
    poison()
    y, tops = probes.probe_with_absmax(x, w, lines)
    assert torch.equal(tops, x.float().abs().amax(1 if lines == "rows" else 0))
    assert torch.equal(y, probes.probe(x, w))
    x[m - 1, n - 1], x[0, n // 3] = math.inf, -math.inf
    exact = x.float().abs().amax(1 if lines == "rows" else 0)
    assert torch.equal(probes.probe_with_absmax(x, w, lines)[1], exact)
    x[m - 1, n - 1] = math.nan
    tops = probes.probe_with_absmax(x, w, lines)[1]
    assert tops.isnan().sum() == 1 and bool(tops[m - 1 if lines == "rows" else n - 1].isnan())


def look(A: Tensor, B: Tensor, bits: int = 8, seed: int = 0) -> tuple[StatisticsFuture, PairStatistics, Tensor]:
    """Of rows of A and columns of B, and vectors whose squares are summed beside."""
    product = normal(16, 96, seed=9).cuda()
    left, right = (SlicedOperand(x, x.float().abs().amax(1).contiguous()) for x in (A, B.mT))
    poison()
    found = statistics.start_statistics(left, right, product, _rule(bits), seed)
    return found, found.result(), product


def drawn(side: OperandSample, inner: int) -> tuple[Tensor, Tensor]:
    """Lines (16, K) and energies (K,) in a workspace."""
    entries, pitch = side.workspace[FACTS:].view(torch.float32)[NUM_SLICES * FORMS :], statistics.row_pitch(inner)
    return entries[pitch:][: NUM_SLICES * pitch].view(NUM_SLICES, pitch)[:, :inner], entries[:inner]


def by_torch(side: OperandSample, x: Tensor, bits: int) -> Lines:
    """Statistics of the lines that were drawn; checks that they are lines of x, and which columns are outliers."""
    lines, energy = drawn(side, x.shape[1])
    top = x.float().abs().amax(1)  # (L,)
    unit = x.float() / top.clamp(min=2.0**-126)[:, None]
    assert all(bool((unit == line).all(1).any()) for line in lines)
    step = max(1, x.shape[0] // NUM_SLICES)
    sample = x.float()[::step][:NUM_SLICES] / top[::step][:NUM_SLICES, None].clamp(min=2.0**-FAR)
    assert torch.allclose(energy, sample.square().sum(0), rtol=1e-5)
    assert torch.equal(side.outliers, hot_columns(energy.contiguous()))
    weight = torch.full((NUM_SLICES, 1), NUM_SLICES**-0.5)
    return _statistics(lines.cpu(), weight, side.outliers.cpu(), bits, True, torch.zeros(()))


def close(found: list[float], exact: Tensor, tolerance: float) -> bool:
    exact = exact.double().cpu()
    off = (torch.tensor(found, dtype=torch.float64).view(exact.shape) - exact).abs()
    return bool((off <= tolerance * exact.abs() + 1e-6 * exact.abs().max()).all())


def student(m: int, n: int) -> Tensor:
    return torch.distributions.StudentT(torch.tensor(2.0)).sample((m, n))


def outliers(m: int, n: int) -> Tensor:
    x = normal(m, n)
    x[:, [3, n // 2]] *= 60
    return x


DATA: dict[str, Callable[[int, int], Tensor]] = {
    "normal": normal,
    "outliers": outliers,
    "leaning": lambda m, n: 0.3 + 1e-4 * normal(m, n),
    "integers": lambda m, n: torch.poisson(torch.full((m, n), 4.0)),
    "zeros": torch.zeros,
    "Student t2": student,
}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("shape", [(100, 320, 90), (5, 64, 1), (3000, 1003, 37), (33, 5000, 400), (4, 1, 4)])
def test_tables_are_those_of_torch_on_the_lines_that_were_drawn(
    shape: tuple[int, int, int], kind: str, bits: int
) -> None:
    m, k, n = shape
    torch.manual_seed(m)
    A, B = DATA[kind](m, k).cuda() if k > 8 else normal(m, k).cuda(), normal(k, n, seed=3).cuda()
    found, tables, product = look(A, B, bits, seed=-7)
    a, b = by_torch(found.samples[0], A, bits), by_torch(found.samples[1], B.mT, bits)
    assert close(tables.sum_of_squares, a.squares.double() @ b.squares.double().mT, 1e-3)
    assert close(tables.raw, a.raw.double() @ b.raw.double().mT, 1e-3)
    assert close(tables.lhs_means, a.means, 2e-3) and close(tables.rhs_means, b.means, 2e-3)
    for share, lines in zip(tables.density, (a, b), strict=True):  # numbers of entries: every line weighs alike
        counted, expected = ([round(x * NUM_SLICES * k) for x in each] for each in (share, lines.density.tolist()))
        assert counted == expected
    assert (
        tables.num_outliers == int((found.samples[0].outliers | found.samples[1].outliers).sum())
        and tables.out_of_range == 0
    )
    assert tables.product == pytest.approx(float(product.double().square().sum()), rel=1e-9)
    for size, x in zip(tables.norms, (A, B.mT), strict=True):
        assert size == pytest.approx(float(x.double().abs().amax(1).norm()), rel=1e-5)
    crossed = a.halves[:, R1] * b.halves[:, X] + a.halves[:, X] * b.halves[:, R1]  # (2, K)
    assert close(found.cross_weight.tolist(), crossed[0] * NUM_SLICES**2, 1e-3)
    if kind in ("normal", "Student t2") and k > 64:  # else many are alike
        order = found.cross_weight.argsort(descending=True).cpu()
        taken = crossed[1, order].double().cumsum(0)
        counts = [max(1, round(share * k)) - 1 for share in COLUMN_SHARES]
        assert close(tables.cross_energy_by_share, taken[counts] / taken[-1], 5e-3)
    assert len(SPARSE_LEVELS) == statistics.LEVELS and len(COLUMN_SHARES) == statistics.SHARES


@pytest.mark.parametrize("dtypes", [(a, b) for a in HALF_DTYPES for b in HALF_DTYPES], ids=str)
def test_any_dtypes_and_strides_are_read(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    A = normal(200, 900).to(dtypes[0]).cuda()[:, ::3]
    B = normal(70, 300, seed=1).to(dtypes[1]).cuda().mT
    found, tables, _ = look(A, B)
    a, b = by_torch(found.samples[0], A, 8), by_torch(found.samples[1], B.mT, 8)
    assert close(tables.sum_of_squares, a.squares.double() @ b.squares.double().mT, 1e-3)


def test_lines_are_drawn_as_they_weigh_and_by_the_seed_alone() -> None:
    weights = torch.rand(500, generator=torch.Generator().manual_seed(0)) + 0.1
    weights[7], weights[100:200] = 30, 0
    A = normal(500, 4)
    A = (A / A.abs().amax(1, keepdim=True) * weights[:, None]).cuda()
    B, unit, counts = normal(4, 3).cuda(), A / A.abs().amax(1, keepdim=True), torch.zeros(500)
    for seed in range(200):
        found, tables, _ = look(A, B, seed=seed * 7919 - 50)
        lines, _ = drawn(found.samples[0], 4)
        for line in lines:
            counts[int((unit - line).abs().sum(1).nan_to_num(9).argmin())] += 1
    share = (weights.square() / weights.square().sum()).double()
    assert counts[7] / counts.sum() == pytest.approx(float(share[7]), abs=0.01)
    assert counts[100:200].sum() == 0
    expected = counts.sum() * share
    chi = float(((counts - expected).square() / expected.clamp(min=1e-9))[expected > 0].sum())
    assert chi < 400 + 5 * (2 * 400) ** 0.5  # 400 lines have a share; strata can only lower it
    again = look(A, B, seed=199 * 7919 - 50)[1]
    assert again == tables  # bit by bit


def test_lines_far_from_one_or_not_finite_are_counted() -> None:
    A, B = normal(50, 60).cuda(), normal(60, 70, seed=1).cuda()
    assert look(A, B)[1].out_of_range == 0
    A[3] *= 2.0**-40
    A[7, 3], A[9, 1], A[11] = math.nan, -math.inf, 0
    B[:, 5] *= 2.0**40
    assert look(A, B)[1].out_of_range == 4
    A[:] = math.nan
    assert look(A, B)[1].out_of_range == 51


def test_a_look_does_not_wait() -> None:
    A, B = normal(300, 400).cuda(), normal(400, 200, seed=1).cuda()
    left, right = SlicedOperand(A, A.abs().amax(1)), SlicedOperand(B.mT, B.abs().amax(0))
    product = torch.zeros(16, 320, device="cuda")
    statistics.start_statistics(left, right, product, _rule(8), 0).result()  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = statistics.start_statistics(left, right, product, _rule(8), 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.result().product == 0


def test_auto_takes_the_kernels_and_chooses_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "rungs_to_pick", lambda *arguments: ())  # they serve float32 on sm_90
    monkeypatch.setattr(flow, "H200", _CHEAP)
    looks, start = [], flow.start_look
    monkeypatch.setattr(flow, "start_look", lambda *a: looks.append(1) or start(*a))
    same, products = 0, 0
    for kind in KINDS:
        for tol in (2e-2, 1e-3, 1e-4):
            torch.manual_seed(1)
            random.seed(1)
            A, B = (x.cuda() for x in KINDS[kind](300, 400, 250))
            plans = []
            for slow in (False, True):
                with monkeypatch.context() as patch:
                    if slow:
                        patch.setattr(flow, "_must_wait", lambda *arguments: True)
                    looks.clear()
                    C, report = matmul(A, B, tol=tol, seed=1, on_failure="fallback", return_report=True)
                assert true_error(A, B, C) <= tol, (kind, tol, report)
                assert len(looks) == (0 if slow else 1), kind
                plans.append(report.plan)
            same, products = same + (plans[0] == plans[1]), products + 1
    assert same >= 0.85 * products  # other lines are drawn


@pytest.mark.alone
def test_statistics_take_little_beside_the_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Events around the three kernels at n = 4096, and around passes with and without largest magnitudes."""
    n = 4096
    A, B, w = (torch.randn(n, n, device="cuda") for _ in range(3))
    left, right = SlicedOperand(A, A.abs().amax(1)), SlicedOperand(B.mT, B.abs().amax(0))

    def microseconds(run: Callable[[], object], repeats: int = 20) -> float:
        for _ in range(3):
            run()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(10_000_000)  # while the host enqueues
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / repeats * 1e3

    looking = microseconds(lambda: statistics.start_statistics(left, right, w[:16], _rule(8), 0))
    copy = microseconds(lambda: B.copy_(A))
    plain = microseconds(lambda: probes.probe(A, w[:16]))
    rows, columns = (microseconds(lambda by=by: probes.probe_with_absmax(A, w[:16], by)) for by in ("rows", "columns"))
    with capsys.disabled():
        print(
            f"\nn = {n}: look {looking:.0f} us, copy {copy:.0f}; a pass {plain:.0f}, rows {rows:.0f}, columns {columns:.0f}"
        )
    assert looking < 100 and rows < 1.5 * plain and columns < 1.7 * plain
