"""Operands: digits, scales, slices far from one, and what is prepared of them."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from torch import Tensor, nn

from cute_kernels.convert.digits import digits
from cute_kernels.cpu import engine
from residual.execute import run
from residual.matmul import matmul, plan, prepare
from residual.nn.modules import ResidualLinear
from residual.operand.operand import operand, operands_for
from residual.operand.prepared import prepare_for
from residual.planning.ladder import Rung
from residual.report import ToleranceError
from tests.compensated.random_products import true_error
from tests.compensated.test_matmul import normal


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_digits_hold_what_they_promise(bits: int, count: int, transposed: bool) -> None:
    x = normal(400, 500)
    x = x.mT if transposed else x
    planes, scale = digits(x, bits, count, axis=1)
    limit = 2 ** (bits - 1) - 1
    value = sum(plane.double() / 2.0 ** (bits * i) for i, plane in enumerate(planes)) * scale.double()[:, None]
    error = ((x.double() - value) / scale.double()[:, None]).abs() * 2.0 ** (bits * (count - 1))
    # In last digits: a second one of 8 bits may be cut by half, and float32 rounds x / scale in its 17th bit behind the
    # point.
    worst = (1.0 if (count, bits) == (2, 8) else 0.5) + 2.0**-16 * 2.0 ** (bits * (count - 1)) * 1.2
    assert float(error.max()) <= worst
    assert planes[0].abs().max() <= limit and all(
        p.min() >= -limit - 1 and p.max() <= min(limit + 1, 127) for p in planes[1:]
    )
    assert all(plane.stride() == x.stride() for plane in planes)


def test_exact_numbers_and_powers_make_the_given_ones() -> None:
    x = normal(20, 30).double() * 10.0 ** torch.linspace(-200, 200, 20).double()[:, None]
    for given in (x, x.float(), x.clamp(-1e4, 1e4).half(), torch.arange(600).view(20, 30), x * 0):
        side = operand(given)
        finite = torch.isfinite(given.double()).all(1)
        scaled = torch.ldexp(side.exact.double(), torch.tensor(side.power))
        assert torch.allclose(
            scaled[finite], given.double()[finite], rtol=0, atol=float(scaled.abs().max()) * 2.0**-1000
        )
        assert side.real.dtype == torch.float32 and float(side.real.abs().max()) < 2.0**31
    assert operand(torch.tensor([[2**53 + 1]])).inexact and not operand(torch.tensor([[2**40]])).inexact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float64])
def test_the_scales_of_digits_tell_what_a_look_at_the_entries_tells(dtype: torch.dtype) -> None:
    usual = (normal(20, 30) * 9).to(dtype)
    usual[3] = 0
    odd = [(float("inf"), 7), (float("nan"), 0), (2.0**31, 19), (2.0**-31, 5)] if dtype.is_floating_point else []
    for rung in (Rung("full", 8), Rung("direct", 4), Rung("three_digit", 8), Rung("fp32")):
        for value, row in [(0.0, 2), *odd]:
            x = usual.clone()
            x[row] = value
            looks = [operand(given) for given in (x, usual)]
            are_usual = all(look.exponent is None and look.nonfinite is None for look in looks)
            for expected, (side, made) in zip(looks, operands_for(rung, x, usual), strict=True):
                assert torch.equal(side.real, expected.real) and torch.equal(side.exact, expected.exact)
                assert side.power == expected.power and side.inexact == expected.inexact
                for got, want in ((side.exponent, expected.exponent), (side.nonfinite, expected.nonfinite)):
                    assert (got is None) == (want is None) and (got is None or torch.equal(got, want))
                read_once = are_usual and rung.bits > 0 and dtype not in (torch.int8, torch.float64)
                assert (made is not None) == read_once
                if made is not None:
                    planes, scale, _ = expected.digits(rung)
                    assert torch.equal(made.scale, scale) and all(map(torch.equal, made.planes, planes))


def test_outlier_columns_are_found_whatever_the_scale_of_the_slices() -> None:
    A = normal(100, 320)
    A[:, [3, 200]] *= 40
    for x in (A, torch.ldexp(A, torch.randint(-60, 60, (100, 1), generator=torch.Generator().manual_seed(0)))):
        assert operand(x).hot().nonzero().flatten().tolist() == [3, 200]
    assert not operand(torch.ones(4, 10)).hot().any()


def test_a_prepared_operand_is_immutable() -> None:
    held = prepare(normal(40, 30), mode="full")
    with pytest.raises(dataclasses.FrozenInstanceError):
        held.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        held.forms[Rung("direct", 8)] = held.forms[Rung("full", 8)]  # type: ignore[index]


def test_a_result_is_a_function_of_the_seed_and_none_draws() -> None:
    A, B = normal(60, 70), normal(70, 50, seed=1)
    first = matmul(A, B, tol=1e-3, seed=5, return_report=True)[1]
    assert matmul(A, B, tol=1e-3, seed=5, return_report=True)[1] == first
    assert matmul(A, B, tol=1e-3, return_report=True)[1] == matmul(A, B, tol=1e-3, seed=0, return_report=True)[1]
    assert matmul(A, B, tol=1e-3, seed=6, return_report=True)[1] != first
    drawn = {matmul(A, B, tol=1e-3, seed=None, return_report=True)[1].estimated_error for _ in range(4)}
    assert len(drawn) == 4
    assert prepare_for(B, None, ()).seed is None
    assert matmul(A, prepare(B, seed=5), tol=1e-3, return_report=True)[1] == first


def test_defaults_of_the_program_change_nothing() -> None:
    A, B = normal(60, 70), normal(70, 50, seed=1)
    want = matmul(A, B, tol=1e-3, seed=11, return_report=True)
    torch.set_default_dtype(torch.float64)
    try:
        got = matmul(A, B, tol=1e-3, seed=11, return_report=True)
        direct = matmul(A, B, mode="direct")
    finally:
        torch.set_default_dtype(torch.float32)
    assert got[1] == want[1] and torch.equal(got[0], want[0]) and direct.dtype == torch.float32
    with torch.inference_mode():
        assert matmul(A, B, tol=1e-3, seed=12).is_inference()
    A.requires_grad_()
    matmul(A, B, tol=1e-3, seed=12).sum().backward()
    assert A.grad is not None


def _in_threads(run: object, count: int = 8) -> list[object]:
    """What each of `count` threads returns or raises, all started at one barrier."""
    barrier, found = threading.Barrier(count), list[object]()

    def call() -> None:
        barrier.wait()
        try:
            found.append(run())  # type: ignore[operator]
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _race(layers: int, first: int) -> None:
    """New layers, first called by 8 threads at once, and again with another weight."""
    x = normal(8, 32)
    for number in range(first, first + layers):
        torch.manual_seed(number)
        options = ({"tol": 1e-3}, {"tol": 5e-2, "mode": "direct"})[number % 2]
        layer = ResidualLinear.from_linear(nn.Linear(32, 24), **options)  # type: ignore[arg-type]
        for _ in range(2):
            want = matmul(x, layer.weight.detach().t(), **options) + layer.bias.detach()  # type: ignore[arg-type]
            for got in _in_threads(lambda layer=layer: layer(x).detach()):
                assert isinstance(got, Tensor) and torch.equal(got, want), got
            with torch.no_grad():
                layer.weight.mul_(-0.5).add_(0.01)


def test_threads_share_new_layers() -> None:
    _race(40, 0)


@pytest.mark.long
def test_threads_share_a_thousand_new_layers() -> None:
    _race(1000, 10_000)


def test_threads_share_a_plan() -> None:
    A, B = normal(60, 70), normal(70, 50, seed=1)
    product, want = plan(B, tol=1e-3), matmul(A, B, tol=1e-3)
    for got in _in_threads(lambda: [product(A) for _ in range(20)]):
        assert isinstance(got, list) and all(torch.equal(each, want) for each in got)
    assert true_error(A, B, want) <= 1e-3


@pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")
def test_a_quick_call_that_misses_goes_on_with_the_next_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = normal(60, 70), normal(70, 50, seed=1)
    want = matmul(A, prepare(B, mode="direct"), tol=1e-3, rungs=("direct", "fp32"))
    product = plan(B, tol=1e-3, rungs=("direct", "fp32"))
    assert product._quick is not None and product._quick(A) is not None
    monkeypatch.setattr(run, "direct", None)  # would run the first rung again
    assert torch.equal(product(A), want) and torch.equal(want, A @ B)


@pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")
def test_quick_calls_of_a_plan_give_what_any_call_gives() -> None:
    A, B = normal(60, 70), normal(70, 50, seed=1)
    for tol in (0.5, 3e-2, 2e-2, 1.6e-2, 1.45e-2, 1e-2):  # coarse bounds, sharp ones, refusals
        product = plan(B, tol=tol, mode="direct")
        assert product._quick is not None
        for x in (A, A.mT.contiguous().mT, A[:, :70], A * 1e-36, A * 0, A.clone().requires_grad_()):
            try:
                want = matmul(x, B, tol=tol, mode="direct")
            except ToleranceError:
                with pytest.raises(ToleranceError):
                    product(x)
            else:
                got = product(x)
                assert torch.equal(got, want) and got.requires_grad == want.requires_grad
    broken = A.clone()
    broken[3, 3] = torch.nan
    assert product._quick(broken) is None and product._quick(A.double()) is None and product._quick(A[0]) is None
    assert plan(B, tol=1e-6)._quick is None  # float32, whatever the engine's path
    B[0, 0] += 1
    with pytest.raises(ValueError, match="was written to since"):
        product(A)
