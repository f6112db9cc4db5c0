"""The whole of Algorithm 1 by GPU kernels on the CPU, sparse products by torch: the result is the CPU engine's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.compensate import select, split
from cute_kernels.compensate.select import Marks
from cute_kernels.cpu import engine
from cute_kernels.spmm.gather import PackedGather
from residual.cuda.verdict_words import Words
from residual.paper import cuda
from residual.paper import gemm as paper
from residual.paper.gemm import PaperReport, gemm
from tests.kernels.compensate.test_compensate_kernels import HEADERS, dense_of
from tests.kernels.estimate.cta_host import HostKernels, has_compiler

pytestmark = [
    pytest.mark.skipif(not has_compiler(), reason="no g++"),
    pytest.mark.skipif(not engine.available(), reason="no CPU engine"),
]


def multiply(total: Tensor, packed: PackedGather, marks: Marks, rhs: Tensor, scales: Tensor, turned: bool) -> None:
    """In place of the gather kernel."""
    sums = dense_of(packed, marks, rhs.shape[0]).long() @ rhs.long()
    product = sums.float() * marks.scales32[:, None] * scales  # (slices, columns)
    total += product.t() if turned else product


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("paper"), HEADERS)


@pytest.fixture(autouse=True)
def host(kernels: HostKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (split, select):
        monkeypatch.setattr(module, "get_kernel", kernels.get)
        monkeypatch.setattr(module, "device_of", lambda _: nullcontext())
    monkeypatch.setattr(cuda, "multiply", multiply)
    monkeypatch.setattr(cuda, "_threads", SimpleNamespace(kinds={}, words=NewWords()))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    yield


class NewWords:
    """Words in memory of their own."""

    def take(self) -> Words:
        return Words(torch.zeros(16, dtype=torch.float64), True)


def both(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> tuple[Any, Any]:
    """The same call by the engine and by the kernels."""
    found = []
    for by_kernels in (False, True):
        monkeypatch.setattr(paper, "_runs_by_kernels", lambda A, B, by_kernels=by_kernels: by_kernels)
        found.append(call())
    return found[0], found[1]


def operands(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + k + n)
    return torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        pytest.param({"threshold": 0.3}, "spmm", marks=pytest.mark.long),
        pytest.param({"threshold": 0.3, "scaling": "vector", "vector_length": 8}, "spmm", marks=pytest.mark.long),
        pytest.param({"threshold": 0.3, "rule": "example", "vector_length": 2}, "spmm", marks=pytest.mark.long),
        pytest.param({"threshold": 1.3, "rule": "mean", "rounding": "nearest"}, "spmm", marks=pytest.mark.long),
        pytest.param({"threshold": 1.3, "rule": "mean", "scaling": "vector"}, "spmm", marks=pytest.mark.long),
        pytest.param({"threshold": 0.3, "eta": 0.0}, "gemm", marks=pytest.mark.long),
        pytest.param({"threshold": 0.0, "scaling": "vector"}, "gemm", marks=pytest.mark.long),
        pytest.param({"threshold": math.inf}, "none", marks=pytest.mark.long),
        pytest.param({"threshold": 9.0}, "none", marks=pytest.mark.long),
        pytest.param({"threshold": 0.3, "bits": 4, "levels": "2^(N-2)", "alpha": -2.0}, "spmm", marks=pytest.mark.long),
    ],
)
def test_the_kernels_give_what_the_engine_gives(
    options: dict[str, Any], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B = operands(35, 70, 43)
    given: dict[str, Any] = {"eta": 1.0, "return_report": True} | options
    (expected, here), (found, there) = both(monkeypatch, lambda: gemm(A, B, **given))
    given["return_report"] = False
    for _ in range(2):  # the second call is made of what the first one was
        assert torch.equal(gemm(A, B, **given), found)  # type: ignore[arg-type]
    assert isinstance(here, PaperReport) and here.path_a == path
    assert (there.density_a, there.density_b) == (here.density_a, here.density_b)
    assert (there.path_a, there.path_b, there.eta, there.threshold) == (
        here.path_a,
        here.path_b,
        here.eta,
        here.threshold,
    )
    assert torch.allclose(found, expected, rtol=0, atol=2e-7 * float(expected.abs().max()))


@pytest.mark.long
def test_a_tolerance_finds_the_same_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = operands(35, 70, 43)
    (_, here), (_, there) = both(monkeypatch, lambda: gemm(A, B, tol=1e-2, eta=1.0, return_report=True))
    assert there.threshold == pytest.approx(here.threshold, rel=1e-6) and there.error == pytest.approx(
        here.error, rel=1e-2
    )


@pytest.mark.long
def test_scales_beyond_float32_are_left_to_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = operands(5, 8, 3)
    for options in ({"threshold": math.inf}, {"threshold": 0.3, "eta": 1.0}, {"tol": 0.5}):
        expected, found = both(monkeypatch, lambda options=options: gemm(A * 2.0**90, B * 2.0**-90, **options))
        assert torch.equal(found, expected)


def test_inf_and_nan_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = operands(5, 8, 3)
    monkeypatch.setattr(paper, "_runs_by_kernels", lambda A, B: True)
    for value in (math.inf, math.nan):
        wrong = B.clone()
        wrong[2, 1] = value
        for options in ({"threshold": math.inf}, {"threshold": 0.3}, {"tol": 0.5}):
            with pytest.raises(ValueError, match="B must be finite, but 1 of its 24"):
                gemm(A, wrong, **options)  # type: ignore[arg-type]
