"""``residual.matmul`` on a GPU: every mode against the CPU, tolerances, edges, layers, and calls that wait for nothing."""

from __future__ import annotations

import math
import random
import statistics
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from residual.error.predict import Forecast
from residual.execute import checked as call
from residual.execute.checked import Report, ToleranceError
from residual.execute.measure_costs import measure_costs
from residual.matmul import matmul
from residual.nn.conv import conv2d
from residual.nn.modules import ResidualLinear
from residual.operand.operand import Operand, prepare
from residual.planning import history as habits
from residual.planning.plan import MODES
from tests.compensated.random_products import _CHEAP, KINDS, true_error
from tests.compensated.test_matmul import normal

pytestmark = pytest.mark.gpu


def product(A: Tensor, B: Tensor, **options: Any) -> Tensor:
    result = matmul(A, B, **{"seed": 0, **options})
    assert isinstance(result, Tensor)
    return result


def reported(A: Tensor, B: Tensor, **options: Any) -> tuple[Tensor, Report]:
    result = matmul(A, B, seed=0, return_report=True, **options)
    assert isinstance(result, tuple)
    return result


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(300, 520, 250), (33, 71, 5), (1, 4096, 1)])
def test_every_mode_is_as_exact_as_on_the_cpu(mode: str, bits: int, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    A, B = normal(m, k), normal(k, n, seed=1)
    here, there = product(A.cuda(), B.cuda(), mode=mode, bits=bits), product(A, B, mode=mode, bits=bits)
    assert here.is_cuda
    ours, theirs = true_error(A, B, here.cpu()), true_error(A, B, there)
    assert ours <= 1.3 * theirs + 3e-7 or (mode in ("columns", "outlier") and ours <= 2 * theirs)  # other lines drawn


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prices", ["own", "cheap"])
def test_no_product_misses_its_tolerance(kind: str, prices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if prices == "cheap":
        monkeypatch.setattr(call, "costs_of", lambda device: _CHEAP)
    for seed in range(12):
        torch.manual_seed(seed)
        random.seed(seed)
        A, B = KINDS[kind](*(random.randint(1, 1500) for _ in range(3)))
        tol = 10.0 ** random.uniform(-6, -1)
        C, report = reported(A.cuda(), B.cuda(), tol=tol, on_failure="fp32")
        assert true_error(A.cuda(), B.cuda(), C) <= tol, (seed, report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_direct_on_a_prepared_operand_waits_for_nothing_and_fits_a_graph(dtype: torch.dtype) -> None:
    A, B = normal(256, 512).to("cuda", dtype), normal(512, 384, seed=1).to("cuda", dtype)
    held = prepare(B, mode="full")
    for mode in ("direct", "full"):
        want = product(A, B, mode=mode, prepared=held)
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = product(A, B, mode=mode, prepared=held)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(got, want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = product(A, B, mode=mode, prepared=held)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, want)


@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_inf_and_nan_are_ieee_with_a_tolerance_and_nan_without(mode: str) -> None:
    A, B = normal(90, 200).cuda(), normal(200, 70, seed=1).cuda()
    A[3, 5], A[7], B[9, 2] = math.inf, math.nan, -math.inf
    rows = [i for i in range(90) if i not in (3, 7)]
    columns = [j for j in range(70) if j != 2]
    exact, ieee = A.double() @ B.double(), A @ B
    C = product(A, B, mode=mode, tol=5e-2)
    for part in (C[[3, 7]], C[:, 2]):
        assert not part.isfinite().any()
    assert torch.equal(C.isnan(), ieee.isnan())
    inner = exact[rows][:, columns]
    assert float((C[rows][:, columns] - inner).norm() / inner.norm()) <= 5e-2
    if mode in ("direct", "full", "full4", "three_digit"):
        bare = product(A, B, mode=mode)
        assert bare[[3, 7]].isnan().all() and bare[:, 2].isnan().all()
        assert float((bare[rows][:, columns] - inner).norm() / inner.norm()) <= 5e-2


@pytest.mark.parametrize("mode", ["direct", "full", "three_digit"])
def test_rows_near_the_smallest_float_keep_their_relative_accuracy(mode: str) -> None:
    A, B = normal(40, 300), normal(300, 50, seed=1)
    A[::3] *= 1e-36
    for options in ({}, {"tol": 5e-2}):
        C = product(A.cuda(), B.cuda(), mode=mode, **options).cpu().double()
        truth = A.double() @ B.double()
        assert float(((C - truth).norm(dim=1) / truth.norm(dim=1)).max()) < (2e-2 if mode == "direct" else 1e-3)


def test_long_sums_empty_and_thin_shapes() -> None:
    ones = torch.ones(2, 140_001, device="cuda")
    for mode in ("direct", "full", "three_digit"):
        assert torch.allclose(
            product(ones, ones.mT, mode=mode), torch.full((2, 2), 140_001.0, device="cuda"), rtol=1e-6
        )
    for m, k, n in ((0, 3, 2), (3, 0, 2), (3, 2, 0)):
        got = product(torch.ones(m, k, device="cuda"), torch.ones(k, n, device="cuda"), tol=0.1)
        assert torch.equal(got, torch.zeros(m, n, device="cuda"))
    for m, k, n in ((1, 20_000, 1), (20_000, 1, 3), (1, 1, 20_000)):
        A, B = normal(m, k).cuda(), normal(k, n, seed=1).cuda()
        assert true_error(A, B, product(A, B, tol=1e-3)) <= 1e-3


def test_cancellation_is_raised_or_computed_in_double() -> None:
    u, v = normal(200, 300).cuda(), normal(300, 100, seed=1).cuda()
    A, B = torch.cat([u, u], 1), torch.cat([v, 1e-5 * normal(300, 100, seed=2).cuda() - v], 0)
    with pytest.raises(ToleranceError):
        product(A, B, tol=1e-3)
    C, report = reported(A, B, tol=1e-6, on_failure="fp32")
    assert report.plan == "fp64" and true_error(A, B, C) < 1e-6


def test_a_layer_learns_moves_and_compiles() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(128, 96)
    mine = ResidualLinear.from_linear(plain, tol=2e-2)
    x = normal(64, 128)
    want = mine(x).detach()
    mine.cuda()
    assert float((mine(x.cuda()).cpu() - want).norm() / want.norm()) < 4e-2
    compiled = torch.compile(mine, fullgraph=True)
    inputs = x.cuda().requires_grad_()
    y = compiled(inputs)
    (grad,) = torch.autograd.grad(y.sum(), inputs)
    assert torch.allclose(grad, mine.weight.sum(0).expand(64, 128), atol=1e-4)
    image, filters = normal(2, 3, 16, 16).cuda(), normal(8, 3, 3, 3, seed=1).cuda()
    got, exact = (
        conv2d(image, filters, padding=1, tol=1e-3),
        nn.functional.conv2d(image.double(), filters.double(), padding=1),
    )
    assert float((got - exact).norm() / exact.norm()) <= 1e-3


def test_halves_run_where_they_will_do() -> None:
    A, B = normal(3000, 2048).cuda(), normal(2048, 2500, seed=1).cuda()
    A[7], B[:, 9] = 0, 0
    C, report = reported(A, B, tol=1e-3)
    assert report.plan == "fp16" and report.products == 0 and true_error(A, B, C) <= 1e-3
    assert report.predicted_error == pytest.approx(report.estimated_error, rel=0.2)
    assert reported(A, B, tol=1e-5)[1].plan == "int8 three_digit"
    held = prepare(B)
    C, report = reported(A, B, tol=1e-3, prepared=held)
    assert report.plan == "fp16" and held.nbytes >= 2 * B.numel() and true_error(A, B, C) <= 1e-3
    for row, column in ((2.0**-12, 1.0), (1.0, 2.0**20)):
        X, Y = A.clone(), B.clone()
        X[5] *= row
        Y[:, 5] *= column
        C, report = reported(X, Y, tol=1e-3)
        assert report.plan != "fp16" and true_error(X, Y, C) <= 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_that_are_given_are_multiplied_as_they_are(dtype: torch.dtype) -> None:
    A, B = normal(2100, 2048).to(dtype).cuda(), normal(2048, 2200, seed=1).to(dtype).cuda()
    C, report = reported(A, B, tol=1e-3, out_dtype=torch.float32)
    assert report.plan == "fp16" and C.dtype == torch.float32 and true_error(A, B, C) < 1e-5
    mixed = A.to(torch.bfloat16), B.to(torch.float16)
    C, report = reported(*mixed, tol=1e-3, out_dtype=torch.float32)
    assert true_error(*mixed, C) <= 1e-3


def test_a_habit_of_halves_sees_lines_out_of_their_range() -> None:
    habits.forget()
    A, B = normal(2048, 2048).cuda(), normal(2048, 2048, seed=1).cuda()
    for _ in range(habits.FIRST + 2):
        assert true_error(A, B, matmul(A, B, tol=1e-3)) <= 1e-3
    (habit,) = habits._habits.values()
    assert str(habit.plan) == "fp16" and habit.left == habits.SOON - 2
    X, Y = A.clone(), B.clone()
    X[3], X[9], Y[:, 4] = X[3] * 2.0**-22, 0, Y[:, 4] * 2.0**-23
    C = matmul(X, Y, tol=1e-3)
    assert true_error(X[3:4], Y, C[3:4]) < 1e-3 and true_error(X, Y[:, 4:5], C[:, 4:5]) < 1e-3
    assert habit.left == 0  # broken
    for _ in range(2 * habits.FIRST + 1):
        matmul(A, B, tol=1e-3)
    assert 0 < habit.left < habits.REUSES
    X[5, 5], X[6, 6] = math.nan, math.inf
    C, wanted = matmul(X, B, tol=1e-3), X @ B
    assert C[5].isnan().all() and torch.equal(C[6], wanted[6]) and true_error(X[:5], B, C[:5]) <= 1e-3


def test_costs_are_measured() -> None:
    prices = measure_costs("cuda", save=False)  # of 4096; smaller products take a launch's time, whatever their type
    assert prices.int8 < prices.fp32 < 1e-9 and all(value > 0 for value in vars(prices).values())


def test_one_way_with_a_tolerance_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = normal(512, 256).cuda(), normal(256, 384, seed=1).cuda()
    held, looks = prepare(B, mode="full"), list[object]()
    see, look = call.operand, call.forecast

    def looking(x: Tensor, *, waits: bool = True) -> Operand:
        looks.append(waits)
        return see(x, waits=waits)

    def never(*arguments: Any) -> Forecast:
        looks.append("statistics")
        return look(*arguments)

    monkeypatch.setattr(call, "operand", looking)
    monkeypatch.setattr(call, "forecast", never)
    for options in ({"prepared": held}, {}):
        looks.clear()
        C = product(A, B, mode="full", tol=1e-3, **options)
        assert true_error(A, B, C) <= 1e-3 and set(looks) == {False}
    looks.clear()
    A[5] *= 2.0**-60  # far from one: looked for after all
    C = product(A, B, mode="full", tol=1e-3, prepared=held)
    assert looks == [False, True]
    assert true_error(A[5:6], B, C[5:6]) <= 1e-3


@pytest.mark.alone
@pytest.mark.parametrize("n", [4096, 8192])
def test_the_check_costs_little(n: int, capsys: pytest.CaptureFixture[str]) -> None:
    """What a caller waits for with and without ``tol``, from float32 inputs; also prints ``auto``."""
    A, B = torch.randn(n, n, device="cuda"), torch.randn(n, n, device="cuda")
    held = prepare(B, mode="full")
    options: dict[str, dict[str, Any]] = {
        "full": {"mode": "full"},
        "full, checked": {"mode": "full", "tol": 1e-3},
        "auto at 1e-3": {"tol": 1e-3},
        "direct, prepared": {"mode": "direct", "prepared": held},
        "direct, prepared, checked": {"mode": "direct", "tol": 2e-2, "prepared": held},
        "auto at 2e-2, prepared": {"tol": 2e-2, "prepared": held},
    }
    times: dict[str, list[float]] = {name: [] for name in options}
    draw = random.Random(n)
    for turn in range(23):
        # in any order: a GPU at its power limit is slower after a long call
        for name, chosen in draw.sample(list(options.items()), len(options)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            matmul(A, B, **chosen)
            torch.cuda.synchronize()
            if turn > 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(found) for name, found in times.items()}
    shares = {kind: medians[f"{kind}, checked"] / medians[kind] - 1 for kind in ("full", "direct, prepared")}
    with capsys.disabled():
        print(f"\nn = {n}: " + ", ".join(f"{name} {found:.3f} ms" for name, found in medians.items()))
        print(f"the check takes {shares['full']:.0%} of full, {shares['direct, prepared']:.0%} of direct")
    assert shares["full"] < (0.15 if n == 8192 else 0.5)
