"""The flow of float32 products on a GPU: its predictions, costs and search, where no GPU is needed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels.estimate.probes import Comparison
from residual.cuda import flow
from residual.cuda.check import FAR_SCALES, Check, estimate_of, rounding_of_double
from residual.cuda.cost_model import H200 as PRICES
from residual.cuda.cost_model import Costs, Sizes, cost
from residual.cuda.operand import FAR, gpu_operand, hot_columns
from residual.cuda.plans import COUNTS, GpuPlan, plans_of
from residual.cuda.predict import R1, Forecast, X, forecast
from residual.cuda.products import run_plan
from residual.cuda.search import (
    DOUBLE,
    HALF,
    SINGLE,
    Search,
    Wish,
    possible,
    without_statistics,
    worth_predicting,
)
from residual.operand.prepared import prepare_for
from residual.options import Options
from residual.planning.ladder import MODES, Rung
from tests.compensated.random_products import KINDS, true_error
from tests.compensated.test_matmul import normal

_CHEAP = Costs(1e-9, 2.5e-10, 1e-9, 1e-12, 1e-13, 1e-11, 1e-11, 4e-11, 1e-13, *[1e-12] * 6)  # digits for nothing


def every_plan(bits: int) -> list[GpuPlan]:
    """The plans of all modes, those that only run by name included."""
    return [plan for mode in MODES for plan in plans_of(mode, (bits,))]


def look(A: Tensor, B: Tensor, bits: int = 8, seed: int = 0) -> Forecast:
    return forecast(gpu_operand(A), gpu_operand(B.mT), bits, True, torch.Generator().manual_seed(seed))


def predicted_and_true(A: Tensor, B: Tensor, plan: GpuPlan, seed: int = 0) -> tuple[float, float]:
    found = look(A, B, plan.bits or 8, seed)
    C = run_plan(plan, gpu_operand(A), gpu_operand(B.mT), found.order, torch.float32)
    return found.error(plan) / float((A.double() @ B.double()).norm()), true_error(A, B, C)


# For heavy tails and outliers a few lines decide, and they may not be among those looked at.
SPREAD = {"Student t2": 3.0, "outlier columns": 2.0, "chi-square": 1.8}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"cancelling"}))  # what cancels there are residuals too
def test_predictions_are_near_the_truth(kind: str, bits: int) -> None:
    torch.manual_seed(1)
    random.seed(3)
    A, B = KINDS[kind](200, 300, 250)
    for plan in every_plan(bits):
        coarse = (
            2.2 if bits == 4 and plan.mode == "three_digit" else 1.6
        )  # its last digit is taken to be like the second
        spread = max(SPREAD.get(kind, 1.6), coarse)
        predicted, true = predicted_and_true(A, B, plan)
        assert true / spread < predicted < true * spread, f"{plan}: {predicted} and {true}"


@pytest.mark.parametrize("kind", ["standard normal", "outlier columns", "Student t2", "low rank"])
def test_halves_are_predicted(kind: str) -> None:
    torch.manual_seed(2)
    random.seed(4)
    A, B = KINDS[kind](200, 300, 250)
    A, B = (x / x.abs().max() * 2**10 for x in (A, B))
    true = true_error(A, B, A.half().double() @ B.half().double())
    predicted = look(A, B).error(HALF) / float((A.double() @ B.double()).norm())
    spread = SPREAD.get(kind, 1.4)
    assert true / spread < predicted < true * spread


def test_halves_that_take_part_are_those_in_range() -> None:
    x = normal(20, 30)
    x[3] = 0
    assert gpu_operand(x).fits_half()
    for row in (x[5] * 2.0**-12, x[5] * 2.0**16):
        far = x.clone()
        far[5] = row
        assert not gpu_operand(far).fits_half()


def test_halves_are_a_plan_of_gpus_only_and_need_statistics_unless_the_operands_are_halves() -> None:
    sizes, prices = Sizes(4096, 4096, 4096), PRICES
    assert without_statistics(Wish(1e-3, half=True), sizes, prices) is None
    given = sizes._replace(sixteen_bit=True)
    for size in (16, 4096, 16384):  # nothing is converted, and digits are rarely enough
        assert without_statistics(Wish(1e-3, half=True), Sizes(size, size, size, sixteen_bit=True), prices) == HALF
    assert without_statistics(Wish(1e-5, half=True), given, prices) is None  # sums are cut
    error = {HALF: 4e-4, GpuPlan("full", 8): 1e-4, GpuPlan("direct", 8): 1e-2, SINGLE: 1e-6}

    def first(tol: float, half: bool, **changed: float) -> GpuPlan | None:
        wish = Wish(tol, half=half)
        predicted = {plan: changed.get(plan.mode, value) for plan, value in error.items()}
        return Search(wish, 1.3, lambda plan: sizes, prices, predicted=dict(predicted)).next()

    assert first(1e-3, True) == HALF and first(1e-3, False) == GpuPlan("full", 8)
    assert first(1e-3, True, fp16=math.inf) == GpuPlan("full", 8)  # out of range
    assert first(3e-2, True) == GpuPlan("direct", 8) and first(3e-4, True) == GpuPlan("full", 8)
    search = Search(Wish(1e-3, half=True), 1.3, lambda plan: sizes, prices, predicted=dict(error))
    search.failed(HALF, math.inf)
    assert search.next() == GpuPlan("full", 8) and search.worse == 1


def test_residuals_that_lean_one_way_are_predicted_by_their_coherent_term() -> None:
    torch.manual_seed(0)
    A = torch.full((200, 400), 0.3) + 1e-4 * torch.randn(200, 400)  # 38.1 steps: every residual is a tenth of a step
    A[:, 0] = 1
    B = torch.rand(400, 100)
    predicted, true = predicted_and_true(A, B, GpuPlan("direct", 8))
    assert true / 1.1 < predicted < true * 1.1
    found = look(A, B)
    scattered, coherent = found._crossed(X, R1)
    assert coherent > 50 * scattered
    both = (A.double() @ B.double()).norm() * predicted
    assert math.sqrt(coherent) * found.size == pytest.approx(float(both), rel=0.05)


def test_zero_lines_do_not_poison_the_statistics() -> None:
    A, B = normal(300, 200), normal(200, 300, seed=1)
    full, _ = predicted_and_true(A, B, GpuPlan("direct", 8))
    A[20:] = 0
    B[:, 10:] = 0
    few, true = predicted_and_true(A, B, GpuPlan("direct", 8))
    assert few == pytest.approx(full, rel=0.2) and few == pytest.approx(true, rel=0.3)
    nothing = look(A * 0, B)
    assert nothing.error(GpuPlan("direct", 8)) == 0 and nothing.error(SINGLE) == 0


def test_scales_of_zeros_and_of_the_least_lines_that_are_left_alone_are_not_far() -> None:
    x = torch.zeros(2, 40)
    x[1, 3] = 2.0**-FAR
    assert gpu_operand(x).exponent is None
    least, most = FAR_SCALES
    scale = gpu_operand(x).digits(8, 2).scale
    assert (scale >= least).all() and (scale <= most).all()


def test_outlier_columns_are_found_whatever_the_scale_of_the_lines() -> None:
    A = normal(100, 320)
    A[:, [3, 200]] *= 40
    scaled = torch.ldexp(A, torch.randint(-60, 60, (100, 1), generator=torch.Generator().manual_seed(0)))
    for x in (A, scaled):
        assert gpu_operand(x).hot().nonzero().flatten().tolist() == [3, 200]
    assert int(hot_columns(torch.rand(320)).sum()) == 0 and not hot_columns(torch.ones(10)).any()
    many = torch.ones(320)
    many[:100] = 1e6
    assert int(hot_columns(many).sum()) <= 20


def test_costs_are_a_function_of_sizes_and_grow_with_the_work() -> None:
    sizes = Sizes(8000, 8800, 9600, hot=5, density=0.1)
    price = {plan: cost(plan, sizes, PRICES) for plan in (*every_plan(8), SINGLE, DOUBLE)}
    assert price == {plan: cost(plan, sizes, PRICES) for plan in price}
    ordered = [price[GpuPlan(mode, 8)] for mode in ("direct", "full", "full4", "three_digit")]
    assert ordered == sorted(ordered) and price[GpuPlan("columns", 8, 1 / 16)] < price[GpuPlan("columns", 8, 1 / 2)]
    for plan, seconds in price.items():
        assert cost(plan, Sizes(16000, 17600, 19200, hot=10, density=0.1), PRICES) > 3.6 * seconds
        held = cost(plan, Sizes(8000, 8800, 9600, True, 5, 0.1), PRICES)
        assert held < seconds if plan.bits else held == seconds


def test_small_products_go_without_statistics() -> None:
    assert without_statistics(Wish(1e-2), Sizes(16, 16, 16), PRICES) == SINGLE
    assert without_statistics(Wish(1e-2), Sizes(8192, 8192, 8192), PRICES) is None
    assert without_statistics(Wish(1e-2, mode="direct"), Sizes(16, 16, 16), PRICES) is None
    assert without_statistics(Wish(1e-9, double=True), Sizes(16, 16, 16), PRICES) == DOUBLE
    assert {plan.mode for plan in possible(Wish(1e-6))} == {"full", "full4", "three_digit"}
    assert {plan.mode for plan in possible(Wish(1e-2))} == set(COUNTS)
    assert {plan.bits for plan in possible(Wish(1e-2, bits=4))} == {4}
    dear = {plan.mode for plan in worth_predicting(Wish(1e-2), Sizes(768, 768, 768), PRICES)}
    assert "direct" in dear and "three_digit" not in dear


def search(wish: Wish, predicted: dict[GpuPlan, float], prices: Costs = _CHEAP) -> Search:
    return Search(wish, 1.68, lambda plan: Sizes(1000, 1000, 1000), prices, dict(predicted))


def test_plans_are_predicted_from_the_cheapest_up_and_the_cheapest_is_found() -> None:
    plans = (*every_plan(8), SINGLE)
    for case in range(200):
        draw = random.Random(case)
        prices = draw.choice((PRICES, _CHEAP))
        errors = {plan: 10 ** draw.uniform(-6, -1) for plan in plans}
        full = Sizes(1000, 1000, 1000, hot=draw.choice((0, 40)), density=draw.choice((0.0, 0.3)))
        asked: list[GpuPlan] = []

        def predict(plan: GpuPlan, asked: list[GpuPlan] = asked, errors: dict[GpuPlan, float] = errors) -> float:
            asked.append(plan)
            return errors[plan]

        looking = Search(Wish(1e-3), 1.3, lambda plan, full=full: full, prices)  # type: ignore[misc]
        looking.predicted, looking.predict = dict.fromkeys(plans), predict
        price = {plan: cost(plan, full, prices) for plan in plans}
        meeting = [plan for plan in plans if errors[plan] * 1.3 * 1.15 <= 1e-3]
        found = looking.next()
        assert found == (min(meeting, key=lambda plan: (price[plan], errors[plan])) if meeting else SINGLE)
        assert len(asked) == len(set(asked))
        bound = price[found] if meeting else math.inf
        least = {plan: cost(plan, Sizes(1000, 1000, 1000), prices) for plan in plans}
        assert {plan for plan in plans if least[plan] < bound} <= set(asked)  # none that may be cheaper is passed over
        assert all(least[plan] <= bound for plan in asked if plan != found) or not meeting


def test_an_escalation_learns_from_the_failure_and_ends() -> None:
    direct, full, three = (GpuPlan(mode, 8) for mode in ("direct", "full", "three_digit"))
    predicted = {direct: 1e-2, full: 7e-5, three: 4e-7, SINGLE: 4e-7, DOUBLE: 1e-15}
    looking = search(Wish(3e-2, last_resort=True), predicted)
    assert looking.next() == direct
    looking.failed(direct, 0.5)  # fifty times worse than predicted, so is full
    assert looking.expected(full) == pytest.approx(3.5e-3) and looking.next() == full
    looking.failed(full, 0.05)
    assert looking.next() == three
    looking.failed(three, 0.05)
    assert looking.next() == SINGLE
    looking.failed(SINGLE, 0.05)
    assert looking.next() == DOUBLE
    looking.failed(DOUBLE, 0.05)
    assert looking.next() is None
    alone = search(Wish(1e-5, mode="direct"), {direct: 1e-2})
    assert alone.next() == direct
    alone.failed(direct, 1e-2)
    assert alone.next() is None


def test_nothing_weaker_is_tried_after_a_failure() -> None:
    direct, centred, full = (GpuPlan(mode, 8) for mode in ("direct", "centered", "full"))
    looking = search(Wish(5e-2), {direct: 1e-2, centred: 9e-3, full: 7e-5, SINGLE: 4e-7})
    looking.failed(direct, 6e-2)
    assert looking.next() == full


def test_outlier_columns_come_from_the_statistics_of_a_gpu() -> None:
    """What the kernels left in an operand's workspace is read, without a GPU too."""
    statistics = pytest.importorskip("cute_kernels.estimate.statistics")
    size = 300
    sample = statistics.OperandSample(torch.zeros(statistics.workspace_size(size), dtype=torch.float64), size)
    held = gpu_operand(torch.randn(4, size))
    held.kept["hot"] = sample
    sample.outliers[7] = True
    assert held.hot().nonzero().flatten().tolist() == [7] and isinstance(held.kept["hot"], Tensor)


def check_of(A: Tensor, B: Tensor) -> Check:
    return Check(gpu_operand(A), gpu_operand(B.mT), None, 0)


def test_what_float32_probes_may_hide_is_judged_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' sums say that nothing is wrong; the guard does not let them judge where absorption could hide it."""

    def nothing_wrong(self: Check, C: Tensor, *arguments: object) -> tuple[object, float]:
        return flow.ErrorEstimate(0.0, 0.0, 0.99), float(C.norm())

    monkeypatch.setattr(Check, "_judge_single", nothing_wrong)
    A, B = torch.tensor([[1.0, 2.0**-30, -1.0]]), torch.ones(3, 1)
    for C in (torch.zeros(1, 1), torch.full((1, 1), 2.0**-24)):
        assert not check_of(A, B).estimate_from_probes(C, 0, 1e-3).accepts(1e-3)
    stagnating = torch.full((8, 4096), 2.0**-25)
    stagnating[:, 0] = 1
    ones, absorbed = torch.ones(4096, 8), torch.ones(8, 8)
    assert not check_of(stagnating, ones).estimate_from_probes(absorbed, 0, 2e-5).accepts(2e-5)
    assert check_of(stagnating, ones).estimate_from_probes(stagnating @ ones, 0, 1e-2).accepts(1e-2)
    x, y = normal(100, 120), normal(120, 90, seed=1)
    assert check_of(x, y).estimate_from_probes(x @ y, 0, 1e-2).upper == 0.0  # far above what they hide


def test_a_prepared_operand_brings_its_probes_and_its_seed() -> None:
    A, B = normal(30, 40), normal(40, 20, seed=1)
    held = prepare_for(B, 7, ())
    check = Check(gpu_operand(A), gpu_operand(B.mT), held, 3)
    assert torch.equal(check.vectors[:, :20].mT, held.probes.vectors)
    assert float((check._inner()[:, :40].mT - held.vectors).abs().max()) < 1e-5
    assert flow._Call(Options(tol=0.1, seed=3), gpu_operand(A), gpu_operand(B.mT), held).seed == 7


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Whether the product of 16-bit floats is the first plan of an H200 for rows of A and columns of B."""
    sixteen_bit = pytest.importorskip("residual.cuda.sixteen_bit")
    monkeypatch.setattr(sixteen_bit, "num_sms", lambda index: 132)
    monkeypatch.setattr(sixteen_bit, "_arch", lambda device: "sm_90a")
    monkeypatch.setattr(sixteen_bit, "rungs_for_shapes", lambda *arguments: (Rung("full", 8),))

    def found(
        m: int,
        k: int,
        n: int,
        dtype: torch.dtype = torch.float16,
        other: Any = None,
        prepared: bool = False,
        **more: Any,
    ) -> bool:
        a, b = torch.Size((m, k)), torch.Size((k, n))
        options = Options(**{"tol": 1e-3, **more})
        return bool(sixteen_bit._serves(dtype, other or dtype, a, (k, 1), b, (1, k), 0, 0, options, prepared))

    return found


def test_which_products_of_16_bit_floats_are_multiplied_as_they_are(
    served: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served(512, 512, 512) and served(1, 4096, 1) and served(16384, 16384, 16384)
    assert served(512, 512, 512, out_dtype=torch.bfloat16) and served(512, 512, 512, on_failure="fallback")
    for other in (torch.float32, torch.bfloat16):
        assert not served(512, 512, 512, other=other)
    for options in ({"tol": None}, {"tol": 5e-5}, {"mode": "direct"}, {"rungs": ("fp32",)}, {"flow": "measured"},
                    {"out_dtype": torch.float64}, {"seed": None}):  # fmt: skip
        assert not served(512, 512, 512, **options)
    assert served(512, 512, 512, seed=None, prepared=True)
    assert not served(16, 16384, 512)  # one CTA would read 16384 columns
    assert not served(64, 512, 16384) and served(64, 512, 16384, prepared=True)
    monkeypatch.setattr("residual.cuda.sixteen_bit._arch", lambda device: "sm_80")
    assert not served(512, 512, 512)


def test_which_float32_products_are_multiplied_in_float16(
    served: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    single = torch.float32
    assert served(2048, 2048, 2048, single) and served(256, 4096, 4096, single)
    assert served(4096, 4096, 4096, single, prepared=True) and not served(2048, 2048, 2048, single, prepared=True)
    assert not served(1024, 1024, 1024, single)  # the host takes longer
    assert not served(2048, 2044, 2048, single)  # not whole loads
    for options in ({"tol": 5e-4}, {"tol": 3e-3}, {"mode": "full"}, {"out_dtype": torch.float16}, {"seed": None}):
        assert not served(2048, 2048, 2048, single, **options)
    monkeypatch.setattr("residual.cuda.sixteen_bit.rungs_for_shapes", lambda *arguments: ())
    assert not served(2048, 2048, 2048, single)  # nothing to go on with


def rounded_probes(A: Tensor, B: Tensor, C: Tensor, W: Tensor) -> tuple[np.ndarray, float]:
    """Return what probes with vectors in float32 and sums in float64 show, and the bound of its rounding."""
    y = (B.double() @ W.double()).float()  # (K, 16)
    z = (A.double() @ y.double()).float()  # (M, 16)
    Y = z.double() - C.double() @ W.double()
    squares = (float(x.double().square().sum()) for x in (A, B, y, z, C, Y))
    return Y.numpy(), rounding_of_double((*A.shape, B.shape[1]), float(W.double().norm()), *squares)


@pytest.mark.parametrize("kind", ["normal", "cancelling", "absorbed", "tiny"])
def test_what_float64_probes_round_is_bounded(kind: str) -> None:
    largest = 0.0
    for seed in range(40):
        A, B, W = normal(20, 60, seed=seed), normal(60, 30, seed=seed + 1), normal(30, 16, seed=seed + 2)
        if kind == "cancelling":
            A, B = torch.cat([A, A], 1), torch.cat([B, 1e-4 * normal(60, 30, seed=7) - B], 0)
        elif kind == "absorbed":
            A[:, 0], A[:, -1], B[-1] = 2.0**30, -(2.0**30), B[0]
        elif kind == "tiny":
            A, B = A * 2.0**-70, B * 2.0**-76
        C = A.bfloat16().float() @ B.bfloat16().float()
        Y, bound = rounded_probes(A, B, C, W)
        a, b, c, w = (x.double().numpy().astype(np.longdouble) for x in (A, B, C, W))
        exact = (a @ b - c) @ w
        difference = float(np.sqrt(np.square(Y.astype(np.longdouble) - exact).sum()))
        assert difference <= bound
        largest = max(largest, difference / bound)
    assert largest > (0.0 if kind == "absorbed" else 0.005)  # of bounds by norms, which random signs do not reach


def test_an_implausible_norm_is_not_believed() -> None:
    y = normal(300, 16).double().numpy()
    found = estimate_of(Comparison(y.T @ y, 16e6, 16e6, 1e6, 0), 60_000, 0.99)
    assert found is not None and found.upper < 0.1
    assert estimate_of(Comparison(y.T @ y, 16e6, 16e6, 1e-30, 0), 60_000, 0.99) is None
