"""The engine's direct product: the bits of the same digits in torch, and an error that lies within its bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels.convert.digits import digits
from cute_kernels.cpu import engine, extension
from cute_kernels.cpu.direct import DirectProduct, DirectRight, direct, prepare_direct
from cute_kernels.cpu.estimate import PROBES

pytestmark = pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")

SIZES = [
    (1, 1, 1), (1, 2, 3), (2, 3, 1), (3, 1, 2), (4, 5, 8), (5, 64, 16), (6, 65, 17), (23, 63, 33), (25, 129, 64), (49, 66, 65),
    (131, 200, 150),
]  # fmt: skip
EXACT = np.finfo(np.longdouble).nmant >= 63  # the reference is more precise than float64
needs_extended = pytest.mark.skipif(not EXACT, reason="long double is float64 here")


@pytest.fixture(params=engine.isas())
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MAGICUBE_CPU", request.param)
    return str(request.param)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, use_threads: Callable[[int], None]) -> int:
    use_threads(request.param)
    return int(request.param)


def probes(n: int) -> tuple[Tensor, Tensor]:
    W = torch.randn(n, PROBES, generator=torch.Generator().manual_seed(n))
    return W, torch.linalg.vector_norm(W.double(), dim=1)


def prepared(B: Tensor) -> DirectRight:
    return prepare_direct(B, *probes(B.shape[1]))


def families(m: int, k: int, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Normal; ends of the range; magnitudes by slices; full-range digits; cancellation along k; absorption; zeros."""
    generator = torch.Generator().manual_seed(m + 7 * k + 31 * n)
    A, B = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    yield A, B
    yield A * 1e-44, B
    yield A * 1e-20, B * 1e-20
    yield A * 1e-39, B * 1e30
    yield A * 1e18, B * 1e18
    yield A * 10.0 ** torch.linspace(-44, 17, m)[:, None], B * 10.0 ** torch.linspace(-40, 17, n)
    yield A * 10.0 ** torch.linspace(-30, 15, k), B * 10.0 ** torch.linspace(15, -30, k)[:, None]
    yield torch.full((m, k), 127.0), torch.full((k, n), -127.0)
    yield torch.randint(-127, 128, (m, k), generator=generator).float(), torch.ones(k, n)
    large = A * 1e-9
    large[:, 0], large[:, -1] = 1.0, -1.0
    equal = B.clone()
    equal[-1] = equal[0]
    yield large, equal
    absorbed = torch.full((m, k), 2.0**-25)
    absorbed[:, 0] = 1.0
    yield absorbed, torch.ones(k, n)
    yield torch.zeros(m, k), B


def in_torch(
    A: Tensor, right: DirectRight, B: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor, Tensor]:
    """C, the integer product and s_a, by torch operators."""
    with monkeypatch.context() as patch:
        patch.setattr(extension, "ENGINE", None)
        (a,), row_scale = digits(A, 8, 1)
        (b,), col_scale = digits(B, 8, 1, axis=0)
    assert torch.equal(col_scale, right.scale)
    sums = a.long() @ b.long()  # (M, N)
    return sums.float() * row_scale[:, None] * col_scale, sums, row_scale


def long(x: Tensor) -> Any:
    return x.numpy().astype(np.longdouble)


def check_error(A: Tensor, B: Tensor, found: DirectProduct, sums: Tensor, row_scale: Tensor, col_scale: Tensor) -> None:
    """Compare the error's sums with extended precision."""
    W, wbar = probes(B.shape[1])
    a, b, s, t = long(A), long(B), long(row_scale)[:, None], long(col_scale)
    exact = s * long(sums) * t
    error = a @ b - exact
    y = error @ long(W)
    norm = np.linalg.norm(y)
    slack = 1e-15 * np.linalg.norm(abs(a) @ abs(b) @ long(wbar))  # of this reference, far below eta
    assert abs(math.sqrt(found.energy) - norm) <= found.eta + slack
    assert found.energy == pytest.approx(float(torch.trace(found.gram)), rel=1e-14)
    assert np.linalg.norm(found.gram.numpy() - y.T @ y) <= 2.1 * (found.eta + slack) * (norm + found.eta)
    assert np.linalg.norm(long(found.out) - exact) <= found.rounding
    assert found.norm == pytest.approx(float(np.linalg.norm(long(found.out))) ** 2, rel=1e-12, abs=0)
    # the bound is no looser than its formula
    a1, b1 = np.rint(a / s), np.rint(b / t)
    rest_a, rest_b = a - a1 * s, b - b1 * t
    bound = np.linalg.norm(abs(a) @ (abs(rest_b) @ long(wbar)) + abs(rest_a) @ (abs(b - rest_b) @ long(wbar)))
    floor = 2.0**-59 * np.linalg.norm(abs(a).sum(1)) * (abs(b) @ long(wbar)).max()
    assert found.eta <= 1.02 * 68 * 2.0**-24 * (1.01 * bound + floor)


@needs_extended
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("size", SIZES)
def test_bits_are_those_of_torch_and_the_error_is_within_its_bound(
    size: tuple[int, int, int], path: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for A, B in families(*size):
        right = prepared(B)
        found = direct(A, right)
        wanted, sums, row_scale = in_torch(A, right, B, monkeypatch)
        assert torch.equal(found.out, wanted)
        check_error(A, B, found, sums, row_scale, right.scale)


def test_the_longest_sum_is_exact(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    k = 2**17
    A, B = torch.full((1, k), -127.0), torch.full((k, 1), 127.0)
    assert float(direct(A, prepared(B)).out) == -(127.0**2) * k
    with pytest.raises(ValueError, match=r"B must have 2 dimensions and at most 131072 rows, got shape \(131073, 1\)"):
        prepared(torch.ones(k + 1, 1))


def test_memory_orders_and_later_changes_do_not_matter(path: str) -> None:
    A, B = next(families(30, 70, 40))
    wanted = direct(A, prepared(B))
    for view in (B.t().contiguous().t(), torch.cat([B, B], 1)[:, :40]):
        right = prepared(view)
        view.zero_()
        for left in (A, torch.cat([A, A], 1)[:, :70], torch.cat([A, A])[:30]):
            found = direct(left, right)
            assert torch.equal(found.out, wanted.out) and found[1:] == wanted[1:]
    assert torch.equal(direct(A[:1].expand(30, 70), right).out, wanted.out[:1].expand(30, 40))


def test_results_do_not_depend_on_threads_and_operands_not_on_the_path(
    use_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B = next(families(301, 203, 97))
    rights, outputs = [], []
    for isa in engine.isas():
        monkeypatch.setenv("MAGICUBE_CPU", isa)
        rights.append(prepared(B))
        found = []
        for count in (1, 2, 5):
            use_threads(count)
            found.append(direct(A, rights[0]))
        assert all(each[1:] == found[0][1:] for each in found)
        outputs += [each.out for each in found]
    assert all(torch.equal(each, outputs[0]) for each in outputs)
    assert all(torch.equal(each.packed, rights[0].packed) for each in rights)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["A", "B"])
def test_nonfinite_entries_give_nan(which: str, value: float, path: str) -> None:
    A, B = next(families(40, 50, 60))
    finite = direct(A, prepared(B)).out
    (A if which == "A" else B)[7, 11] = value
    found = direct(A, prepared(B))
    assert bool(found.gram.isnan().all()) and all(math.isnan(each) for each in found[1:5])
    rows = torch.arange(40) != 7
    if which == "A":
        assert bool(found.out[7].isnan().all()) and torch.equal(found.out[rows], finite[rows])
    else:
        assert bool(found.out[:, 11].isnan().all())


def test_an_overflowing_product_gives_nan_sums(path: str) -> None:
    A, B = next(families(8, 9, 10))
    found = direct(A * 1e20, prepared(B * 1e20))
    assert bool(found.out.isinf().any()) and math.isnan(found.norm) and math.isnan(found.eta)


@pytest.mark.parametrize("size", [(0, 3, 4), (3, 4, 0), (3, 0, 4), (0, 0, 0)])
def test_empty_operands_give_zeros(size: tuple[int, int, int], path: str) -> None:
    m, k, n = size
    found = direct(torch.ones(m, k), prepared(torch.ones(k, n)))
    assert found.out.shape == (m, n) and not found.out.any() and found.energy == found.norm == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x.double(), TypeError, "A must be torch.float32, got torch.float64"),
        (lambda x: x[0], ValueError, r"A must have shape \(any, 5\), got \(5,\)"),
        (lambda x: x[:, 1:], ValueError, r"A must have shape \(any, 5\), got \(6, 4\)"),
        (lambda x: x.t().contiguous().t(), ValueError, r"A must have contiguous rows, got strides \(1, 6\)"),
        (lambda x: x.to("meta"), ValueError, "A must be on the CPU and hold its values, got meta"),
        (torch._neg_view, ValueError, "A must be on the CPU and hold its values, got cpu"),
    ],
)
def test_malformed_left_operands_are_named(change: Any, error: type[Exception], message: str) -> None:
    A, B = next(families(6, 5, 4))
    with pytest.raises(error, match=f"^{message}"):
        direct(change(A), prepared(B))


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("B", lambda x: x.double(), TypeError, "B must be torch.float32, got torch.float64"),
        ("B", lambda x: x[0], ValueError, "B must have 2 dimensions"),
        ("B", lambda x: x.to("meta"), ValueError, "B must be on the CPU, got meta"),
        ("W", lambda x: x.half(), TypeError, "W must be torch.float32, got torch.float16"),
        ("W", lambda x: x[1:], ValueError, r"W must have shape \(4, 16\), got \(3, 16\)"),
        ("wbar", lambda x: x.float(), TypeError, "wbar must be torch.float64, got torch.float32"),
        ("wbar", lambda x: x[1:], ValueError, r"wbar must have shape \(4,\), got \(3,\)"),
    ],
)
def test_malformed_right_operands_are_named(name: str, change: Any, error: type[Exception], message: str) -> None:
    W, wbar = probes(4)
    given = {"B": torch.ones(5, 4), "W": W, "wbar": wbar}
    given[name] = change(given[name])
    with pytest.raises(error, match=f"^{message}"):
        prepare_direct(**given)
