"""The published algorithm on a GPU: the integers of the CPU, whichever path computes them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from residual.paper import gemm as paper
from residual.paper.gemm import PaperReport, gemm
from residual.paper.thresholds import crossover_density

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=[False, True], ids=["operators", "kernels"])
def by_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of computing the same."""
    if not request.param:
        monkeypatch.setattr(paper, "_runs_by_kernels", lambda *_: False)


def operands(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + k + n)
    return tuple(torch.rand(*shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))  # type: ignore[return-value]


def reported(A: Tensor, B: Tensor, **options: Any) -> tuple[Tensor, PaperReport]:
    found = gemm(A, B, return_report=True, **options)
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize("shape", [(1, 1, 1), (37, 50, 43), (128, 256, 64), (300, 1000, 257)])
@pytest.mark.parametrize("vector_length", [1, 2, 8])
@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("threshold", [math.inf, 0.5, 0.0])
def test_a_gpu_gives_what_a_cpu_gives(
    shape: tuple[int, int, int], vector_length: int, eta: float, threshold: float
) -> None:
    A, B = operands(*shape)
    options: dict[str, Any] = {"threshold": threshold, "rule": "mean", "vector_length": vector_length, "eta": eta}
    expected, here = reported(A, B, **options)
    found, there = reported(A.cuda(), B.cuda(), **options)
    assert found.is_cuda and found.dtype == torch.float32
    assert (there.density_a, there.density_b, there.path_a, there.path_b) == (
        here.density_a, here.density_b, here.path_a, here.path_b,
    )  # fmt: skip
    assert torch.allclose(found.cpu(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("rule", "threshold"), [("eq14", 0.2), ("example", 0.2)])
@pytest.mark.parametrize("scaling", ["tensor", "vector"])
def test_the_rules_keep_on_a_gpu_what_they_keep_on_a_cpu(rule: str, threshold: float, scaling: str) -> None:
    A, B = (2 * x - 1 for x in operands(130, 200, 70))
    options: dict[str, Any] = {"rule": rule, "threshold": threshold, "scaling": scaling, "vector_length": 1, "eta": 1.0}
    expected, here = reported(A, B, **options)
    found, there = reported(A.cuda(), B.cuda(), **options)
    assert there.path_a == "spmm" and 0 < there.density_a == here.density_a < 1
    assert torch.allclose(found.cpu(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scaling", ["tensor", "vector"])
def test_every_float_type(dtype: torch.dtype, scaling: str) -> None:
    A, B = operands(33, 65, 17, dtype)
    expected = gemm(A, B, scaling=scaling, rounding="nearest", eta=1.0)
    found = gemm(A.cuda(), B.cuda(), scaling=scaling, rounding="nearest", eta=1.0)
    assert isinstance(found, Tensor) and isinstance(expected, Tensor)
    assert torch.allclose(found.cpu(), expected, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_the_steps_and_the_crossover_are_measured() -> None:
    A, B = (x.cuda() for x in operands(512, 512, 512))
    for eta, path in ((None, "gemm"), (1.0, "spmm")):  # the printed crossover of a GPU is 0.001
        _, report = reported(A, B, rule="mean", threshold=0.5, eta=eta)
        assert (report.path_a, report.eta) == (path, eta or 0.001)
        assert all((seconds > 0) == (path == "spmm" or step != "compress") for step, seconds in report.times.items())
    assert 0 <= crossover_density("cuda", 8) <= 1


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 2, 0)])
def test_empty_products_are_zero(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    result = gemm(torch.ones(m, k).cuda(), torch.ones(k, n).cuda(), threshold=0.1, rule="mean", eta=0.5)
    assert isinstance(result, torch.Tensor)
    assert torch.equal(result, torch.zeros(m, n).cuda())


def test_a_tolerance_is_met() -> None:
    A, B = (torch.randn(520, 520, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    expected = gemm(A, B, tol=5e-3, eta=1.0, return_report=True)
    found = gemm(A.cuda(), B.cuda(), tol=5e-3, eta=1.0, vector_length=1, return_report=True)
    assert isinstance(found, tuple) and isinstance(expected, tuple)
    truth = A.double() @ B.double()
    assert float((found[0].cpu().double() - truth).norm() / truth.norm()) <= 5e-3
    assert found[1].threshold == pytest.approx(expected[1].threshold, rel=1e-4)


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_inf_and_nan_are_refused(side: str, value: float) -> None:
    A, B = (x.cuda() for x in operands(64, 64, 64))
    (A if side == "A" else B)[3, 5] = value
    for threshold in (0.0, 0.5, math.inf):
        with pytest.raises(ValueError, match=f"{side} must be finite, but 1 of its 4096"):
            gemm(A, B, threshold=threshold)


def test_scales_beyond_float32() -> None:
    A, B = operands(64, 64, 64)
    for threshold in (0.5, math.inf):
        expected = gemm(A * 2.0**90, B * 2.0**-90, threshold=threshold)
        found = gemm(A.cuda() * 2.0**90, B.cuda() * 2.0**-90, threshold=threshold)
        assert isinstance(found, Tensor) and isinstance(expected, Tensor)
        assert torch.allclose(found.cpu(), expected, rtol=1e-5)


def test_operands_with_contiguous_columns() -> None:
    A, B = (2 * x - 1 for x in operands(130, 200, 72))
    for scaling in ("tensor", "vector"):
        options: dict[str, Any] = {"threshold": 0.2, "scaling": scaling, "eta": 1.0}
        expected = gemm(A.cuda(), B.cuda(), **options)
        found = gemm(A.t().contiguous().cuda().t(), B.t().contiguous().cuda().t(), **options)
        assert isinstance(found, Tensor) and isinstance(expected, Tensor) and torch.equal(found, expected)


def test_calls_in_a_row_give_the_same() -> None:
    """The third call of a kind is a graph's launch; other operands and thresholds between them change nothing."""
    A, B = (2 * x - 1 for x in operands(256, 320, 272))
    here, there = A.cuda(), B.cuda()
    for threshold in (0.2, math.inf, 0.0, 0.05):
        expected = gemm(here, there, threshold=threshold, eta=0.6, return_report=True)
        assert isinstance(expected, tuple)
        for turn in range(6):
            found = gemm(here, there, threshold=threshold, eta=0.6)
            assert isinstance(found, Tensor) and torch.equal(found, expected[0]), (threshold, turn)
            other = gemm(here * 1.5, there, threshold=threshold, eta=0.6)
            assert isinstance(other, Tensor) and not torch.equal(other, found)
        here[0, 0] += 0.5  # in place: the same address, other numbers
        changed = gemm(here, there, threshold=threshold, eta=0.6)
        assert isinstance(changed, Tensor) and not torch.equal(changed, expected[0])
        here[0, 0] -= 0.5
