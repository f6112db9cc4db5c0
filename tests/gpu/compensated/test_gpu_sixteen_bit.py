"""Checked products of 16-bit floats on a GPU: torch's product where the check accepts it, another way where not."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from residual.cuda import flow, sixteen_bit
from residual.matmul import matmul, plan, prepare
from residual.operand.prepared import PreparedOperand
from residual.planning.ladder import Rung
from residual.report import ToleranceError
from tests.compensated.hostile import FAMILIES, draw, exact_error
from tests.compensated.random_products import true_error
from tests.compensated.test_matmul import normal

pytestmark = pytest.mark.gpu

SHAPES = [(1, 4096, 1), (33, 71, 5), (300, 520, 250), (512, 512, 512), (16, 16384, 64), (4300, 64, 1000)]
DTYPES = [torch.float16, torch.bfloat16]


def product(A: Tensor, B: Tensor | PreparedOperand, **options: Any) -> Tensor:
    result = matmul(A, B, **options)
    assert isinstance(result, Tensor)
    return result


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the plans that the long way tried."""
    tried, attempt = list[str](), flow._Call._attempt

    def noted(self: flow._Call, check: Any, plan: Any, *arguments: Any) -> Any:
        tried.append(str(plan))
        return attempt(self, check, plan, *arguments)

    monkeypatch.setattr(flow._Call, "_attempt", noted)
    return tried


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_is_that_of_the_long_way(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, k, n = shape
    for turned in (False, True):
        A, B = normal(m, k).to(dtype).cuda(), normal(k, n, seed=1).to(dtype).cuda()
        A, B = (A.mT.contiguous().mT, B.mT.contiguous().mT) if turned else (A, B)
        for out_dtype, tol in ((torch.float32, 1e-3), (None, 2e-2)):
            options = plan(tol=tol, out_dtype=out_dtype).options
            wanted = flow.run_flow(A, B, None, options, True).product
            measured, report = matmul(A, B, tol=tol, out_dtype=out_dtype, return_report=True)
            assert report.plan == "fp16" and torch.equal(measured, wanted)
            assert true_error(A, B, measured) <= report.upper <= tol
            for _ in range(4):  # launches, then a graph
                assert torch.equal(product(A, B, tol=tol, out_dtype=out_dtype), wanted)
            assert torch.equal(product(A, prepare(B), tol=tol, out_dtype=out_dtype), wanted)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_calls_in_a_row_take_the_short_way_and_read_what_is_there_now(is_prepared: bool, long_ways: list[str]) -> None:
    A, B = torch.empty(512, 256, device="cuda", dtype=torch.float16), normal(256, 384).half().cuda()
    call = plan(prepare(B) if is_prepared else None, tol=1e-3, out_dtype=torch.float32)
    for seed in range(6):
        A.copy_(normal(512, 256, seed=seed))
        assert true_error(A, B, call(A) if is_prepared else call(A, B)) < 1e-5
    assert not long_ways


def test_what_the_check_does_not_accept_goes_the_long_way(long_ways: list[str]) -> None:
    A, B = normal(300, 256).cuda().bfloat16(), normal(256, 200, seed=1).cuda().bfloat16()
    with pytest.raises(ToleranceError):  # the output's own rounding misses it
        product(A, B, tol=3e-4)
    assert long_ways[0] == "fp16" and len(long_ways) > 1
    long_ways.clear()
    A[3, 5], B[9, 2] = math.inf, math.nan
    C = product(A, B, tol=1e-3, out_dtype=torch.float32)
    assert long_ways and not C[3].isfinite().any() and not C[:, 2].isfinite().any()
    long_ways.clear()
    assert not product(A[:2] * 0, B[:, 3:], tol=1e-3).any() and long_ways  # zero: no error to compare with


@pytest.fixture
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of float32 take this way however small they are."""
    monkeypatch.setattr(sixteen_bit, "_LEAST_MULTIPLICATIONS", dict.fromkeys((False, True), 0))
    monkeypatch.setattr(sixteen_bit, "_threads", sixteen_bit._Threads())


@pytest.fixture
def wrong_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of each of torch's products is wrong by a hundredth of the product's norm."""
    exact = torch.mm

    def wrong(a: Tensor, b: Tensor, **keywords: Any) -> Tensor:
        found = exact(a, b, **keywords)
        found[7, 11] += 0.01 * found.norm()
        return found

    monkeypatch.setattr(torch, "mm", wrong)


@pytest.mark.usefixtures("small_products", "wrong_products")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_a_wrong_product_is_not_accepted(dtype: torch.dtype) -> None:
    A, B = normal(304, 256).to(dtype).cuda(), normal(256, 200, seed=1).to(dtype).cuda()
    options = plan(tol=1e-3, out_dtype=torch.float32).options
    for _ in range(5):
        started = sixteen_bit.start(A, B, None, options)
        assert started is not None and started.accepted() is None
        assert 0.5e-2 < started.outcome().tried[0][1].relative < 2e-2


def test_what_float32_probes_may_hide_goes_the_long_way(long_ways: list[str]) -> None:
    A, B = torch.ones(2, 8, 512, device="cuda", dtype=torch.float16).unbind()
    B = B.mT.contiguous()  # (512, 8)
    assert true_error(A, B, product(A, B, tol=1e-2, out_dtype=torch.float32)) == 0.0 and not long_ways
    A[:, 256:], B[0] = -1, 1 + 2.0**-8
    C = product(A, B, tol=1e-2, out_dtype=torch.float32, on_failure="fallback")
    assert true_error(A, B, C) <= 1e-2 and long_ways  # 1 / 256, what is left of sums of 256


def on_gpu(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` with a number of rows and columns that float16 copies can have."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 8, 0, -x.shape[0] % 8)).to(dtype).cuda()


@pytest.mark.parametrize("shape", [(256, 128, 512), (1024, 1024, 1024), (72, 2048, 136), (4296, 64, 1000)])
@pytest.mark.parametrize("turned", [(False, False), (True, True), (False, True)])
@pytest.mark.usefixtures("small_products")
def test_float32_operands_are_multiplied_in_float16(shape: tuple[int, int, int], turned: tuple[bool, bool]) -> None:
    m, k, n = shape
    A, B = normal(m, k).cuda(), normal(k, n, seed=1).cuda()
    A, B = (x.mT.contiguous().mT if by_columns else x for x, by_columns in zip((A, B), turned, strict=True))
    wanted = torch.mm(A.half(), B.half(), out_dtype=torch.float32)
    for tol in (6e-4, 1e-3):
        C, report = matmul(A, B, tol=tol, return_report=True)
        assert report.plan == "fp16" and true_error(A, B, C) <= report.upper <= tol
        assert torch.equal(C, wanted)
        for _ in range(5):  # launches, then graphs
            assert torch.equal(product(A, B, tol=tol), wanted)
        held = prepare(B, tol=tol)
        for _ in range(5):
            assert torch.equal(product(A, held, tol=tol), wanted)
        assert matmul(A, held, tol=tol, return_report=True)[1] == report


@pytest.mark.parametrize("powers", [(-30, 20), (40, 40), (-50, -50), (-14, 0)])
@pytest.mark.usefixtures("small_products")
def test_entries_far_from_one_are_scaled(powers: tuple[int, int]) -> None:
    A, B = normal(256, 512).cuda() * 2.0 ** powers[0], normal(512, 384, seed=1).cuda() * 2.0 ** powers[1]
    plain = product(normal(256, 512).cuda(), normal(512, 384, seed=1).cuda(), tol=1e-3)
    for right in (B, prepare(B, tol=1e-3)):
        C, report = matmul(A, right, tol=1e-3, return_report=True)
        assert report.plan == "fp16" and torch.equal(C, plain * 2.0 ** sum(powers))
        assert torch.equal(product(A, right, tol=1e-3), C)


@pytest.mark.usefixtures("small_products")
def test_float32_operands_that_float16_does_not_hold_go_on_with_digits() -> None:
    A, B = normal(512, 512).cuda(), normal(512, 512, seed=1).cuda()
    A *= torch.logspace(-9, 0, 512, device="cuda")  # columns of A differ by a factor that rows of B undo
    B *= torch.logspace(9, 0, 512, device="cuda")[:, None]
    C, report = matmul(A, B, tol=1e-3, return_report=True, on_failure="fallback")
    assert report.attempts[0].plan == "fp16" and report.attempts[0].upper > 1e-3 >= report.upper
    assert len(report.attempts) > 1 and true_error(A, B, C) <= 1e-3
    assert torch.equal(product(A, B, tol=1e-3, on_failure="fallback"), C)
    assert torch.equal(product(A, prepare(B, tol=1e-3), tol=1e-3, on_failure="fallback"), C)
    A, B = normal(512, 512).cuda(), normal(512, 512, seed=1).cuda()
    A[5, 7] = 1e6  # beyond float16
    C, report = matmul(A, B, tol=1e-3, return_report=True)
    assert [each.plan for each in report.attempts] == ["fp16", "int8 full"] and true_error(A, B, C) <= 1e-3
    assert torch.equal(product(A, B, tol=1e-3), C)
    A[5, 7], B[3, 2] = math.inf, math.nan
    C = product(A, B, tol=1e-3)
    assert torch.equal(C.isfinite(), (A @ B).isfinite())
    assert torch.equal(C.nan_to_num(), product(A, B, tol=1e-3).nan_to_num())


@pytest.mark.usefixtures("small_products")
def test_several_products_wait_for_their_verdicts() -> None:
    call = plan(tol=1e-3)
    pairs = [(normal(256, 512, seed=i).cuda(), normal(512, 384, seed=-i).cuda()) for i in range(1, 6)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        pending = [call.start(A, B) for A, B in pairs]
        call.start(*pairs[0])  # nobody asks
        again = [call.start(A, B) for A, B in pairs]
    torch.cuda.current_stream().wait_stream(stream)
    for (A, B), first, second in zip(pairs, pending, again, strict=True):
        assert torch.equal(first.result(), call(A, B)) and torch.equal(first.result(), second.result())
        assert first.report == second.report


@pytest.mark.usefixtures("small_products")
def test_a_graph_that_is_captured_multiplies_what_is_there() -> None:
    A, B = normal(512, 512).cuda(), normal(512, 512, seed=1).cuda()
    call = plan(tol=1e-3)
    wanted = call.start(A, B).result()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pending, second = call.start(A, B), call.start(B, A)
    A.copy_(A.roll(3, 0))
    graph.replay()
    assert pending.report.plan == second.report.plan == "fp16" and pending.report.upper < 1e-3
    assert torch.equal(pending.product, wanted.roll(3, 0)) and true_error(B, A, second.result()) < 1e-3


@pytest.mark.usefixtures("small_products")
def test_autocast_and_gradients_leave_float32_products_as_they_are() -> None:
    A, B = normal(256, 512).cuda(), normal(512, 384, seed=1).cuda()
    C = product(A, B, tol=1e-3)
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(product(A, B, tol=1e-3), C)
    A.requires_grad_()
    found = product(A, B, tol=1e-3)
    found.sum().backward()
    assert torch.equal(found, C) and A.grad is not None


@pytest.mark.usefixtures("small_products")
def test_hostile_float32_products_are_right_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sixteen_bit, "rungs_for_shapes", lambda *arguments: (Rung("full", 8),))
    plans, missed = list[str](), list[tuple[int, float]]()
    for number in range(60 * len(FAMILIES)):
        _, A, B, options = draw(number)
        if not A.dtype == B.dtype == torch.float32 or not (A.isfinite().all() and B.isfinite().all()):
            continue
        a, b, tol = on_gpu(A, torch.float32), on_gpu(B, torch.float32), min(max(options["tol"], 6e-4), 2.9e-3)
        with contextlib.suppress(ToleranceError):
            C, report = matmul(a, b, tol=tol, seed=number, return_report=True)
            plans.append(report.plan)
            if (error := exact_error(a.cpu(), b.cpu(), C.cpu())) > tol:
                missed.append((number, error))
    assert not missed and plans.count("fp16") > 100


@pytest.mark.parametrize("family", ["float16", "bfloat16"])
def test_hostile_products_are_right_or_refused(family: str) -> None:
    returned, missed, place = 0, list[tuple[int, float]](), list(FAMILIES).index(family)
    for number in range(place, place + 400 * len(FAMILIES), len(FAMILIES)):
        _, A, B, options = draw(number)
        tol = max(options["tol"], 1e-4)
        with contextlib.suppress(ToleranceError):
            C = product(A.cuda(), B.cuda(), tol=tol, seed=number, out_dtype=torch.float32)
            returned += 1
            if (error := exact_error(A, B, C.cpu())) > tol:
                missed.append((number, error))
    assert not missed and returned > 100


def test_sizes_and_tolerances_of_float32_products_in_float16() -> None:
    options = plan(tol=1e-3).options
    large, prepared = (torch.empty(n, n, device="cuda") for n in (2048, 4096))
    held = prepare(prepared, tol=1e-3)
    assert sixteen_bit.serves(large, large, None, options) and sixteen_bit.serves(prepared, prepared, held, options)
    assert not sixteen_bit.serves(prepared[:512], prepared, held, options)
    assert not sixteen_bit.serves(large[:1024, :1024], large[:1024], None, options)
    for other in ({"tol": 5e-4}, {"tol": 3e-3}, {"mode": "full"}, {"out_dtype": torch.float16}, {"flow": "measured"}):
        assert not sixteen_bit.serves(large, large, None, options._replace(**other)), other
    assert not sixteen_bit.serves(large, large.half(), None, options)
    assert not sixteen_bit.serves(large[:, :-4], large[:-4], None, options)
    at_odd_places = torch.empty(2049, 2048, device="cuda").flatten()[1:][: 2048 * 2048].view(2048, 2048)
    assert not sixteen_bit.serves(at_odd_places, large, None, options)


def test_seeds_and_gradients() -> None:
    A, B = normal(64, 96).half().cuda().requires_grad_(), normal(96, 48, seed=1).half().cuda()
    C = product(A, B, tol=1e-2)
    C.sum().backward()
    assert A.grad is not None and torch.equal(C, product(A.detach(), B, tol=1e-2, seed=None))
