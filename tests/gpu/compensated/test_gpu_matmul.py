"""``residual.matmul`` on a GPU: every mode against the CPU, tolerances, edges, layers, and calls that wait for nothing."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from residual.cuda import flow
from residual.cuda.operand import GpuOperand
from residual.cuda.predict import Forecast
from residual.matmul import matmul, plan, prepare
from residual.nn.conv import conv2d
from residual.nn.modules import ResidualLinear
from residual.operand.prepared import PreparedOperand
from residual.planning.ladder import MODES
from residual.report import Report, ToleranceError
from tests.compensated.hostile import calls
from tests.compensated.random_products import KINDS, true_error
from tests.compensated.test_cuda_plans import _CHEAP
from tests.compensated.test_matmul import normal

pytestmark = pytest.mark.gpu


def product(A: Tensor, B: Tensor | PreparedOperand, **options: Any) -> Tensor:
    result = matmul(A, B, **options)
    assert isinstance(result, Tensor)
    return result


def reported(A: Tensor, B: Tensor | PreparedOperand, **options: Any) -> tuple[Tensor, Report]:
    result = matmul(A, B, return_report=True, **options)
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
        monkeypatch.setattr(flow, "H200", _CHEAP)
    for seed in range(12):
        torch.manual_seed(seed)
        random.seed(seed)
        A, B = KINDS[kind](*(random.randint(1, 1500) for _ in range(3)))
        tol = 10.0 ** random.uniform(-6, -1)
        C, report = reported(A.cuda(), B.cuda(), tol=tol, on_failure="fallback")
        assert true_error(A.cuda(), B.cuda(), C) <= tol, (seed, report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_direct_on_a_prepared_operand_waits_for_nothing_and_fits_a_graph(dtype: torch.dtype) -> None:
    A, B = normal(256, 512).to("cuda", dtype), normal(512, 384, seed=1).to("cuda", dtype)
    for mode in ("direct", "full"):
        held = prepare(B, mode=mode)
        want = product(A, held, mode=mode)
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = product(A, held, mode=mode)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(got, want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = product(A, held, mode=mode)
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
    C, report = reported(A, B, tol=1e-6, on_failure="fallback")
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


def test_float32_operands_take_the_passes_whatever_their_sizes() -> None:
    A, B = normal(3000, 2048).cuda(), normal(2048, 2500, seed=1).cuda()
    A[7], B[:, 9] = 0, 0
    for tol, wanted in ((1.9e-2, "int8 direct"), (1e-3, "int8 full"), (4e-5, "int8 three_digit")):
        for right in (B, plan(B, tol=tol).right):
            assert right is not None
            C, report = reported(A, right, tol=tol)
            assert report.plan == wanted and true_error(A, B, C) <= report.upper <= tol
    assert reported(A, B, tol=1e-5)[1].plan == "int8 three_digit"
    for row, column in ((2.0**-12, 1.0), (1.0, 2.0**20)):
        X, Y = A.clone(), B.clone()
        X[5] *= row
        Y[:, 5] *= column
        C, report = reported(X, Y, tol=1e-3)
        assert report.plan == "int8 full" and true_error(X, Y, C) <= 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_that_are_given_are_multiplied_as_they_are(dtype: torch.dtype) -> None:
    A, B = normal(2100, 2048).to(dtype).cuda(), normal(2048, 2200, seed=1).to(dtype).cuda()
    C, report = reported(A, B, tol=1e-3, out_dtype=torch.float32)
    assert report.plan == "fp16" and C.dtype == torch.float32 and true_error(A, B, C) < 1e-5
    mixed = A.to(torch.bfloat16), B.to(torch.float16)
    C, report = reported(*mixed, tol=1e-3, out_dtype=torch.float32)
    assert true_error(*mixed, C) <= 1e-3


@pytest.mark.parametrize("flow", ["auto", "measured"])
def test_an_absorbed_term_is_seen_on_a_gpu(flow: str) -> None:
    for power in (20, 26, 30, 40):
        A, B = torch.tensor([[1.0, 2.0**-power, -1.0]]).cuda(), torch.ones(3, 1).cuda()
        for seed in range(20):
            with contextlib.suppress(ToleranceError):
                assert product(A, B, tol=1e-3, seed=seed, flow=flow).item() == 2.0**-power
        if power <= 30:
            assert product(A, B, tol=1e-3, on_failure="fallback", flow=flow).item() == 2.0**-power


@pytest.mark.parametrize("flow", ["auto", "measured"])
def test_hostile_products_are_right_or_refused(flow: str) -> None:
    found = list(calls(310, device="cuda", flow=flow))
    assert not [each for each in found if each.missed]
    assert sum(each.error is not None for each in found) > 100


@pytest.mark.parametrize("first", ["direct", "full"])
def test_hostile_products_by_two_rungs_are_right_or_refused(first: str) -> None:
    rungs = (first, {"direct": "full", "full": "three_digit"}[first])
    found = list(calls(310, device="cuda", rungs=rungs))
    assert not [each for each in found if each.missed]
    assert sum(each.plan in [f"int8 {rung}" for rung in rungs] and each.error is not None for each in found) > 30


def test_the_measured_flow_meets_tolerances() -> None:
    for seed, kind in enumerate(KINDS):
        torch.manual_seed(seed)
        random.seed(seed)
        A, B = (x.cuda() for x in KINDS[kind](300, 400, 250))
        for tol in (3e-2, 1e-3, 1e-4, 1e-6):
            C, report = reported(A, B, tol=tol, on_failure="fallback", flow="measured")
            assert true_error(A, B, C) <= tol, (kind, report)


def test_a_result_does_not_depend_on_calls_before() -> None:
    A, B = normal(2048, 1280).cuda(), normal(1280, 2048, seed=1).cuda()
    first, report = reported(A, B, tol=2e-2)
    for _ in range(6):
        product(A * 3, B, tol=2e-2)
    again, second = reported(A, B, tol=2e-2)
    assert torch.equal(first, again) and second == report
    assert torch.equal(product(A, prepare(B), tol=2e-2), product(A, prepare(B), tol=2e-2))


def test_one_way_with_a_tolerance_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = normal(512, 256).cuda().bfloat16(), normal(256, 384, seed=1).cuda().bfloat16()
    wide: dict[str, Any] = {"mode": "full4", "tol": 1e-3, "out_dtype": torch.float32}
    held, looks = prepare(B, mode="full4"), list[object]()
    see, look = flow.gpu_operand, flow.forecast

    def looking(x: Tensor, *, waits: bool = True) -> GpuOperand:
        looks.append(waits)
        return see(x, waits=waits)

    def never(*arguments: Any) -> Forecast:
        looks.append("statistics")
        return look(*arguments)

    monkeypatch.setattr(flow, "gpu_operand", looking)
    monkeypatch.setattr(flow, "forecast", never)
    for right in (held, B):
        looks.clear()
        C = product(A, right, **wide)
        assert true_error(A, B, C) <= 1e-3 and set(looks) == {False}
    looks.clear()
    A[5] *= 2.0**-60  # far from one: looked for after all
    C = product(A, held, **wide)
    assert looks == [False, True]
    assert true_error(A[5:6], B, C[5:6]) <= 1e-3


@pytest.mark.alone
@pytest.mark.parametrize("n", [4096, 8192])
def test_the_check_costs_little(n: int, capsys: pytest.CaptureFixture[str]) -> None:
    """What a caller waits for with and without ``tol``, from float32 inputs; also prints ``auto``."""
    A, B = torch.randn(n, n, device="cuda"), torch.randn(n, n, device="cuda")
    held = prepare(B, mode="direct")
    options: dict[str, dict[str, Any]] = {
        "full": {"mode": "full"},
        "full, checked": {"mode": "full", "tol": 1e-3},
        "auto at 1e-3": {"tol": 1e-3},
        "direct, prepared": {"B": held, "mode": "direct"},
        "direct, prepared, checked": {"B": held, "mode": "direct", "tol": 2e-2},
        "auto at 2e-2, prepared": {"B": held, "tol": 2e-2},
    }
    times: dict[str, list[float]] = {name: [] for name in options}
    draw = random.Random(n)
    for turn in range(23):
        # in any order: a GPU at its power limit is slower after a long call
        for name, chosen in draw.sample(list(options.items()), len(options)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            matmul(A, **{"B": B, **chosen})
            torch.cuda.synchronize()
            if turn > 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(found) for name, found in times.items()}
    shares = {kind: medians[f"{kind}, checked"] / medians[kind] - 1 for kind in ("full", "direct, prepared")}
    with capsys.disabled():
        print(f"\nn = {n}: " + ", ".join(f"{name} {found:.3f} ms" for name, found in medians.items()))
        print(f"the check takes {shares['full']:.0%} of full, {shares['direct, prepared']:.0%} of direct")
    assert shares["full"] < (0.15 if n == 8192 else 0.5)
