"""Float32 products on a GPU, on the CPU: passes and verdict by their source, gated products by torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.convert import digits as convert
from cute_kernels.estimate import look, verdict
from cute_kernels.gemm import cuda as gemm_cuda
from residual.cuda import passes
from residual.cuda.verdict_words import Words, WordsPool
from residual.error.estimate import ErrorEstimate
from residual.error.factor import confidence
from residual.error.probes import draw
from residual.execute import run
from residual.execute import start as starts
from residual.matmul import Pending
from residual.operand.prepared import prepare_for
from residual.options import Options
from residual.planning.ladder import Machine, Rung
from residual.report import EMPTY, Attempt, ToleranceError
from tests.kernels.estimate.cta_host import HostKernels, has_compiler

HEADERS = (
    "estimate/look.cuh", "estimate/look_choice.cuh", "estimate/look_pack.cuh", "estimate/verdict.cuh", "convert/digits.cuh",
)  # fmt: skip
pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")
WARPS = 3
calls: list[str] = []


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("passes"), HEADERS)


def gated_gemm(
    a: tuple[Tensor, ...], b: tuple[Tensor, ...], scales: tuple[Tensor, Tensor], out: Tensor, gate: Tensor
) -> int:
    """What the kernel does: nothing, or the product of the lowest levels in float32 with its sums."""
    calls.append(f"gemm {len(a)}")
    planes = len(a)
    if int(gate[:1].view(torch.int32)) != planes - 1:
        return WARPS
    total, size = torch.zeros_like(out), torch.zeros_like(out, dtype=torch.float64)
    for level in range(planes):
        products = [a[i].double() @ b[level - i].double() for i in range(level + 1)]
        total += torch.stack(products).sum(0).float() * 2.0 ** (-8 * level)
        size += torch.stack(products).sum(0).abs() * 2.0 ** (-8 * level)
    out.copy_(total * scales[0][:, None] * scales[1])
    gate[4 : 4 + 2 * WARPS] = 0.0
    gate[4], gate[5] = out.double().square().sum(), (size * scales[0][:, None] * scales[1]).square().sum()
    return WARPS


@pytest.fixture
def host(kernels: HostKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Passes and verdict run on the CPU."""
    for module in (look, verdict):
        monkeypatch.setattr(
            module, "get_kernel", lambda config: calls.append(config.kernel_entry) or kernels.get(config)
        )
        monkeypatch.setattr(module, "device_of", lambda _: nullcontext())
    monkeypatch.setattr(look, "num_sms", lambda _: 3)
    monkeypatch.setattr(gemm_cuda, "gated_gemm", gated_gemm)
    state = look.state_for(torch.device("cpu"), 64)
    monkeypatch.setattr(passes, "_memory", lambda *_: SimpleNamespace(state=state, take=None))
    monkeypatch.setattr(passes, "_threads", SimpleNamespace(records={}, words=NewWords()))
    monkeypatch.setattr(passes, "Kept", Once)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("residual.options.machine_of", lambda _: Machine(True, True))
    real_digits = convert.digits
    monkeypatch.setattr(
        convert, "digits", lambda *args, **options: calls.append("digits") or real_digits(*args, **options)
    )
    calls.clear()
    yield


class NewWords:
    """Words in memory of their own."""

    def take(self) -> Words:
        return Words(torch.zeros(verdict.WORDS, dtype=torch.float64), True)


class Once:
    """Runs what a thread would record."""

    def __init__(self, most: int, graph_after: int, allocate: object = None) -> None:
        pass

    def run(self, kind: object, addresses: tuple[int, ...], device: object, function: Callable[[], Any]) -> Any:
        return function()


def start(A: Tensor, B: Tensor, options: Options, *known: Any) -> passes.Started:
    return passes.start_picked(A, B, options, options.rungs_for(A, B), *known)


def random(m: int, n: int, seed: int) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed))


def relative(C: Tensor, A: Tensor, B: Tensor) -> float:
    exact = A.double() @ B.double()
    return float((C.double() - exact).norm() / exact.norm())


M, K, N = 130, 140, 160  # more than the multiplications from which digits pay


@pytest.mark.parametrize(
    ("tol", "plan"),
    [
        pytest.param(3e-2, "int8 direct", marks=pytest.mark.long),
        (3e-3, "int8 full"),
        pytest.param(2e-4, "int8 full", marks=pytest.mark.long),
        (3e-5, "int8 three_digit"),
    ],
)
def test_the_first_rung_within_the_tolerance_is_computed_and_its_bound_holds(tol: float, plan: str, host: None) -> None:
    A, B = random(M, K, 1), random(K, N, 2)
    made = start(A, B, Options(tol=tol)).outcome()
    assert made.product is not None
    report = made.report
    assert report.plan == plan and report.attempts[-1].plan == plan
    error = relative(made.product, A, B)
    assert error <= report.upper <= tol and report.estimated_error == pytest.approx(error, rel=0.3)
    assert len(report.attempts) == (2 if plan in ("int8 full", "int8 three_digit") and tol in (3e-3, 3e-5) else 1)


@pytest.mark.parametrize(("mode", "tol"), [("direct", 3e-2), ("full", 3e-2)])
def test_a_mode_that_was_asked_for_is_the_only_one_that_runs(mode: str, tol: float, host: None) -> None:
    A, B = random(M, K, 1), random(K, N, 2)
    made = start(A, B, Options(tol=tol, mode=mode)).outcome()
    assert made.product is not None and made.tried == ()
    assert [attempt.plan for attempt in made.report.attempts] == [made.report.plan] == [f"int8 {mode}"]
    error = relative(made.product, A, B)
    assert error <= made.report.upper <= tol and made.report.estimated_error == pytest.approx(error, rel=0.3)
    assert (error < 1e-3) == (mode == "full")
    missed = start(A, B, Options(tol=2e-5, mode=mode)).outcome()
    assert missed.product is None and [attempt.plan for attempt, _ in missed.tried] == [f"int8 {mode}"]
    assert missed.report.upper == missed.tried[0][0].upper > 2e-5
    found = starts.Begun(start(A, B, options := Options(tol=2e-5, mode=mode)), A, B, options, True).outcome()
    assert isinstance(found.failure, ToleranceError) and found.report.plan == f"int8 {mode}"


def test_a_call_is_nine_launches_and_five_with_a_prepared_operand(host: None) -> None:
    A, B, options = random(M, K, 1), random(K, N, 2), Options(tol=1e-2)
    first = start(A, B, options)
    assert calls == [
        "digits",
        "look_probes",
        "look_right",
        "look_vectors",
        "digits",
        "look_left",
        "gemm 1",
        "gemm 2",
        "verdict",
    ]
    right = {2: passes.right_pass(B, 2, passes.padded_probes(draw(N, B.device, 0)))}
    calls.clear()
    second = start(A, B, options, right)
    assert calls == ["digits", "look_left", "gemm 1", "gemm 2", "verdict"]
    assert torch.equal(first.product, second.product) and torch.equal(first.words.tensor, second.words.tensor)


def test_errors_beyond_both_rungs_and_slices_out_of_range_are_left_to_the_core(host: None) -> None:
    A, B, options = random(M, K, 1), random(K, N, 2), Options(tol=3e-3)
    heavy, without = A.clone(), B.clone()
    heavy[:, 0], without[0] = 1e6, 0.0  # a column that sets all scales meets zeros
    missed = start(heavy, without, options).outcome()
    assert missed.product is None and [attempt.plan for attempt, _ in missed.tried] == ["int8 direct", "int8 full"]
    assert all(attempt.upper > 3e-3 and estimate.upper == attempt.upper for attempt, estimate in missed.tried)
    for value in (math.inf, math.nan, 1e25):
        for x in (A.clone(), B.clone()):
            x[5, 6] = value
            operands = (x, B) if x.shape == A.shape else (A, x)
            unserved = start(*operands, options).outcome()
            assert unserved.product is None and unserved.tried == ()


def test_a_call_whose_rungs_miss_goes_on_with_the_next_one(host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    A, B, options = random(M, K, 1), random(K, N, 2), Options(tol=3e-3)
    A[:, 0], B[0] = 1e6, 0.0
    monkeypatch.setattr(run, "look", None)  # of digits, which would be tried again
    begun = starts.Begun(start(A, B, options), A, B, options, True)
    product, report, failure = begun.outcome()
    assert failure is None and relative(product, A, B) <= report.upper <= 3e-3
    assert [attempt.plan for attempt in report.attempts] == ["int8 direct", "int8 full", "fp32"]
    assert report.plan == "fp32" and report.attempts[1].upper > 3e-3
    monkeypatch.undo()


def test_attempts_before_digits_are_reported_and_take_their_share(host: None) -> None:
    A, B, options = random(M, K, 1), random(K, N, 2), Options(tol=3e-3)
    missed = (Attempt("fp16", 4e-3, 5e-3), ErrorEstimate(4e-3, 5e-3, confidence(0)))
    plain, behind = start(A, B, options).outcome(), start(A, B, options, None, (missed,)).outcome()
    assert plain.product is not None and behind.product is not None and torch.equal(plain.product, behind.product)
    assert behind.report.attempts[0] is missed[0]
    for one, other in zip(plain.report.attempts, behind.report.attempts[1:], strict=True):
        assert one.plan == other.plan and one.estimated == other.estimated
        assert 1.1 * one.upper < other.upper  # its bound fails a tenth as often
    A[:, 0], B[0] = 1e6, 0.0
    goes_on = partial(starts._go_on, before=1)
    begun = starts.Begun(start(A, B, options, None, (missed,)), A, B, options, True, goes_on)
    product, report, failure = begun.outcome()
    assert failure is None and relative(product, A, B) <= report.upper <= 3e-3
    assert [attempt.plan for attempt in report.attempts] == ["fp16", "int8 direct", "int8 full", "fp32"]


def test_the_last_rung_of_the_callers_makes_the_product_of_a_failure(host: None) -> None:
    A, B = random(M, K, 1), random(K, N, 2)
    options = Options(tol=3e-3, rungs=("direct", "full"))
    A[:, 0], B[0] = 1e6, 0.0
    product, report, failure = starts.Begun(start(A, B, options), A, B, options, True).outcome()
    assert isinstance(failure, ToleranceError) and product.shape == (M, N)
    assert [attempt.plan for attempt in report.attempts] == ["int8 direct", "int8 full"]


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_16_bit_floats_are_multiplied_by_copies(out: torch.dtype, host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = random(M, K, 1).bfloat16(), random(K, N, 2).bfloat16()
    monkeypatch.setattr(passes, "rungs_for_shapes", lambda options, *_: (Rung(options.mode, 8),))
    assert starts._start_copies(A, B, B, Options(tol=3e-2), True) is None  # multiplied as they are
    copied = starts._start_copies(A, B, B, Options(tol=3e-2, mode="full", out_dtype=out), True)
    assert copied is not None
    product, report, failure = copied.outcome()
    plain = start(A.float(), B.float(), Options(tol=3e-2, mode="full")).product
    assert failure is None and torch.equal(product, plain.to(out)) and torch.equal(copied.checked(), product)
    error = relative(product, A.float(), B.float())
    assert 0.9 * error < report.estimated_error < 1.1 * error and error <= report.upper <= 3e-2


def test_a_pending_product_waits_for_its_verdict_once_and_when_asked(host: None) -> None:
    A, B, options, reads = random(M, K, 1), random(K, N, 2), Options(tol=3e-2), list[int]()
    started = start(A, B, options)
    found = started.outcome()
    started.outcome = lambda: reads.append(1) or found  # type: ignore[method-assign]
    pending = Pending(starts.Begun(started, A, B, options, True))
    assert not reads
    assert pending.result() is found.product and pending.report == found.report and pending.failure is None
    assert reads == [1]


@pytest.mark.parametrize("p", [24, 26, 30])
def test_what_cancels_or_is_absorbed_is_not_accepted(p: int, host: None) -> None:
    """Families that fool a check which rounds as the product does."""
    A, B, tol = torch.full((M, K), 2.0**-p), torch.ones(K, N), 1e-2
    A[:, 0], A[:, -1] = 1.0, -1.0
    made = start(A, B, Options(tol=tol)).outcome()
    assert made.product is None or relative(made.product, A, B) <= tol
    A[:, -1] = 2.0**-p
    made = start(A, B, Options(tol=3e-5)).outcome()
    assert made.product is None or relative(made.product, A, B) <= 3e-5


def test_float32_and_two_digit_rungs_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        device = torch.device("cuda")

        def __init__(self, x: Tensor) -> None:
            self.x = x

        def __getattr__(self, name: str) -> object:
            return getattr(self.x, name)

    monkeypatch.setattr("residual.options.machine_of", lambda _: Machine(True, True))
    monkeypatch.setattr(gemm_cuda, "can_gate", lambda *_: True)
    A, B = OnGpu(random(M, K, 1)), OnGpu(random(K, N, 2))
    assert passes.rungs_to_pick(A, B, Options(tol=1e-2))  # type: ignore[arg-type]
    for options in (
        Options(tol=1e-2, mode="full"), Options(tol=1e-2, mode="direct", on_failure="fallback"),
        Options(tol=1e-2, rungs=("direct", "fp32")),
    ):  # fmt: skip
        assert passes.rungs_to_pick(A, B, options), options  # type: ignore[arg-type]
    for options in (
        Options(mode="full"), Options(tol=1e-6), Options(tol=1e-2, bits=4), Options(tol=1e-2, mode="three_digit"),
        Options(tol=1e-2, out_dtype=torch.float64), Options(tol=1e-2, rungs=("fp32", "direct")),
        Options(tol=1e-2, rungs=("direct", "three_digit")),
    ):  # fmt: skip
        assert not passes.rungs_to_pick(A, B, options), options  # type: ignore[arg-type]
    assert not passes.rungs_to_pick(OnGpu(random(M, K, 1).half()), B, Options(tol=1e-2))  # type: ignore[arg-type]
    assert not passes.rungs_to_pick(A, OnGpu(torch.empty(K, 70000)), Options(tol=1e-2))  # type: ignore[arg-type]
    assert passes.planes_of((Rung("full", 8), Rung("three_digit", 8), Rung("fp32"))) == 3
    passes.rungs_for_shapes.cache_clear()


def test_a_prepared_operand_counts_its_passes(host: None) -> None:
    B = random(K, N, 2)
    made = passes.right_pass(B, 2, passes.padded_probes(draw(N, B.device, 0)))
    plain = prepare_for(B, 0, ())
    assert replace(plain, passes={2: made}).nbytes == plain.nbytes + sum(each.nbytes for each in made.tensors)


def test_memory_of_a_stream_is_kept_for_products_that_take_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_cuda, "gate_size", lambda _: 64)
    monkeypatch.setattr(look, "num_sms", lambda _: 3)
    memory = passes._Memory(torch.device("cpu"))
    first = memory.take(1000)
    assert first.shape == (1000,) and memory.take(1000) is first and memory.take(10) is first
    second = memory.take(2000)
    assert second.shape == (2000,) and memory.take(1000) is second
    monkeypatch.setattr(passes, "_KEPT_BYTES", 3000)
    assert memory.take(3001).shape == (3001,) and memory.take(1000) is second


def test_words_are_taken_again_when_they_were_read_or_are_written_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    make = torch.zeros

    def zeros(count: int, dtype: torch.dtype, pin_memory: bool, device: str) -> Tensor:
        return make(count, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "zeros", zeros)
    pool, device = WordsPool(), torch.device("cpu")
    first, owner = pool.take(), Once(1, 0)
    first.arm(owner)
    second = pool.take()
    assert second is not first and pool.take() is second  # nobody waits for its numbers
    first.tensor[:] = torch.arange(16.0)
    first.tensor[-1] = 1.0
    assert pool.take() is second  # written, but its owner may still read it
    assert first.read(device)[:3] == [0.0, 1.0, 2.0]
    assert pool.take() is first
    owner = Once(1, 0)
    first.arm(owner)
    assert float(first.tensor[-1]) == 0.0
    del owner
    assert pool.take() is second  # nobody will read them, but the GPU will write them
    first.tensor[-1] = 1.0
    assert pool.take() is first


def test_the_second_call_of_a_kind_takes_the_record_of_the_first(host: None) -> None:
    A, B, options = random(M, K, 1), random(K, N, 2), Options(tol=3e-2)
    assert passes.start_known(A, B, options) is None
    start(A, B, options)
    found = passes.start_known(A, B, options)
    assert found is not None and found.accepted() is found.product
    assert torch.equal(found.product, start(A, B, options).product)
    assert len(passes._threads.records) == 1
    for other in (Options(tol=2e-2), Options(tol=3e-2, seed=1), Options(tol=3e-2, seed=None)):
        assert passes.start_known(A, B, other) is None
    assert passes.start_known(A.double(), B, options) is None
    assert passes.start_known(A, B.t().contiguous().t(), options) is None
    start(A, B, Options(tol=3e-2, seed=None))
    assert passes.start_known(A, B, Options(tol=3e-2, seed=None)) is None  # its probes are drawn anew
    A[:, 0], B[0] = 1e6, 0.0
    missed = passes.start_known(A, B, options)
    assert missed is not None and missed.accepted() is None and missed.outcome().product is None


def test_the_second_call_of_a_prepared_operand_takes_the_record_of_the_first(host: None) -> None:
    A, B, options = random(M, K, 1), random(K, N, 2), Options(tol=3e-2)
    right = {2: passes.right_pass(B, 2, passes.padded_probes(draw(N, B.device, 0)))}
    start(A, B, options)  # a call that brings B has another record
    assert passes.start_known(A, B, options, right) is None
    first = start(A, B, options, right)
    calls.clear()
    found = passes.start_known(A, B, options, right)
    assert calls == ["digits", "look_left", "gemm 1", "gemm 2", "verdict"]
    assert found is not None and found.accepted() is found.product and torch.equal(found.product, first.product)
    other = 2 * B
    of_other = {2: passes.right_pass(other, 2, passes.padded_probes(draw(N, B.device, 0)))}
    found = passes.start_known(A, other, options, of_other)
    assert found is not None and torch.equal(found.product, 2 * first.product)
    for without in ({}, {3: right[2]}):  # prepared for other tolerances
        assert passes.start_known(A, B, options, without) is None


@pytest.mark.parametrize("missed", [False, True])
def test_a_known_product_of_a_prepared_operand(missed: bool, host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    A, B, options = random(M, K, 1), random(K, N, 2), Options(tol=3e-2)
    if missed:
        A[:, 0], B[0] = 1e6, 0.0  # a column that sets all scales meets zeros
    right = {2: passes.right_pass(B, 2, passes.padded_probes(draw(N, B.device, 0)))}
    held = replace(prepare_for(B, 0, ()), passes=MappingProxyType(right))
    assert starts.compute_known(A, B, held, options) is None
    expected = start(A, B, options, right)
    seen: list[object] = []
    monkeypatch.setattr(starts, "compute_from", lambda *args, **_: seen.append(args[1]) or run.Outcome(A, EMPTY, None))
    found = starts.compute_known(A, B, held, options)
    assert found is A if missed else found is not None and torch.equal(found, expected.product)
    assert seen == ([held] if missed else [])
