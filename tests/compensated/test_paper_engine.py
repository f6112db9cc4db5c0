"""The published algorithm on the CPU engine: on every path and any number of threads the bits of operators of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.cpu import compensate, engine, extension
from residual.paper.gemm import PaperReport, gemm
from residual.paper.quantize import Quantizer, quantize_operand
from residual.paper.thresholds import kept_entries

pytestmark = pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")

SHAPES = [(1, 1, 1), (37, 50, 43), (5, 700, 33), (70, 64, 1030)]


@pytest.fixture(params=engine.isas())
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MAGICUBE_CPU", request.param)
    return str(request.param)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, use_threads: Callable[[int], None]) -> int:
    use_threads(request.param)
    return int(request.param)


def in_torch(monkeypatch: pytest.MonkeyPatch, call: Any, *args: Any, **options: Any) -> Any:
    """The call as it is where the engine is not compiled."""
    with monkeypatch.context() as patch:
        patch.setattr(extension, "ENGINE", None)
        return call(*args, **options)


def operands(shape: tuple[int, int, int], seed: int) -> tuple[Tensor, Tensor]:
    m, k, n = shape
    g = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=g), torch.randn(k, n, generator=g)


def reported(*operands: Tensor, **options: Any) -> tuple[Tensor, PaperReport]:
    found = gemm(*operands, return_report=True, **options)
    assert isinstance(found, tuple)
    return found


def layouts(A: Tensor, B: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Contiguous, column-major, and with gaps."""
    yield A, B
    yield A.t().contiguous().t(), B.t().contiguous().t()
    yield A.repeat_interleave(2, 1)[:, ::2], B.repeat_interleave(2, 0)[::2]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rounding", ["trunc", "nearest"])
def test_a_call_has_the_bits_of_torch(
    shape: tuple[int, int, int], rounding: str, path: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    kinds = product(["tensor", "vector"], [("mean", 0.9), ("eq14", 0.01), ("example", 0.02), ("eq14", 0.0)], [1, 8])
    for i, (scaling, (rule, threshold), vector_length) in enumerate(kinds):
        options = {"scaling": scaling, "rule": rule, "threshold": threshold, "vector_length": vector_length}
        options |= {"rounding": rounding, "bits": 8 if i % 3 else 5, "eta": 1.0}
        for A, B in layouts(*operands(shape, i)):
            A[0, 0] = 0  # a density of 1 is never below eta
            B[0, 0] = 0
            expected, theirs = in_torch(monkeypatch, reported, A, B, **options)
            result, ours = reported(A, B, **options)
            assert torch.equal(result, expected)
            assert (ours.density_a, ours.density_b, ours.path_a, ours.path_b) == (
                theirs.density_a, theirs.density_b, theirs.path_a, theirs.path_b,
            )  # fmt: skip
            found.add(ours.path_a)
    assert found == {"none"} if shape == (1, 1, 1) else "spmm" in found


@pytest.mark.parametrize("rounding", ["trunc", "nearest"])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_integers_residuals_and_scales_are_those_of_torch(
    axis: int | None, rounding: str, path: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(1)
    for rows, columns in ((1, 1), (7, 3), (90, 601), (33, 1003), (700, 64)):
        x = torch.randn(rows, columns, generator=g)
        ties = torch.randint(-508, 509, (rows, columns), generator=g) / 4.0
        magnitudes = x * 10.0 ** torch.linspace(-44, 37, rows)[:, None]
        for each in (x, ties, magnitudes, magnitudes.t(), torch.zeros(rows, columns), x.half(), ties.round()):
            for levels in (127, 64, 7):
                how = Quantizer(8, axis, rounding, levels)
                expected = in_torch(monkeypatch, quantize_operand, each, how, "x")
                found = quantize_operand(each, how, "x", True)
                for side, other in ((found.leading, expected.leading), (found.residual, expected.residual)):
                    assert torch.equal(side.integers, other.integers)
                    assert torch.equal(side.scale, other.scale)
                sums = each.double().abs().sum(None if axis is None else 1 - axis).flatten()
                assert found.sums is not None and torch.allclose(found.sums, sums, rtol=1e-13)


def test_sums_have_the_same_bits_on_every_path_and_with_any_threads(
    monkeypatch: pytest.MonkeyPatch, use_threads: Callable[[int], None]
) -> None:
    x = operands((600, 1100, 1), 3)[0]
    found = []
    for isa in engine.isas():
        for count in (1, 3):
            monkeypatch.setenv("MAGICUBE_CPU", isa)
            use_threads(count)
            sums = compensate.magnitude_sums(x)
            split = [compensate.split_residual(x, axis, high=127.0, truncate=True, sums=True) for axis in (None, 0, 1)]
            found.append([*sums, *(each.sums for each in split)])
    assert torch.allclose(found[0][0], x.double().abs().sum(1)) and torch.allclose(found[0][1], x.double().abs().sum(0))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize("vector_length", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_selection_holds_what_the_rule_keeps(transposed: bool, vector_length: int, path: str, threads: int) -> None:
    for rows, columns in ((1, 1), (3, 70), (50, 33), (7, 1100), (600, 5)):
        x = operands((rows, columns, 1), vector_length)[0]
        of = x.t() if transposed else x
        for per_row in (False, True):
            kept = kept_entries(of, None, 0.8, "mean", per_row, vector_length)
            average = of.abs().double().mean(1 if per_row else None).view(-1)
            found = compensate.EntrySelection(
                x, (1.6 * average).float(), transposed=transposed, vector_length=vector_length
            )
            assert found.count == int(kept.sum())
            assert torch.equal(found.largest, (of.abs() * kept).amax(1))
            sparse = found.compress(torch.full((1,), 0.05, dtype=torch.float64), truncate=False)
            dense = torch.zeros(-(-of.shape[0] // vector_length), vector_length, of.shape[1], dtype=torch.int64)
            values = sparse.planes[0].view(torch.int8).transpose(0, 1).reshape(vector_length, -1).long()  # (V, padded)
            lengths = sparse.row_end - sparse.row_start
            padded = torch.arange(len(dense)).repeat_interleave((lengths + 15) // 16 * 16)
            stored = torch.arange(len(padded)) < sparse.row_end[padded]
            assert torch.equal(sparse.col_indices >= 0, stored) and not values[:, ~stored].any()
            dense[padded[stored], :, sparse.col_indices[stored].long()] = values[:, stored].t()
            assert torch.equal(sparse.row_sums[0], dense.sum(2))
            flat = dense.flatten(0, 1)
            assert torch.equal(flat[: of.shape[0]], ((of.double() / 0.05).round() * kept).long())
            assert not flat[of.shape[0] :].any()


@pytest.mark.parametrize("turned", [False, True])
def test_a_correction_is_exact_where_sums_are_long(turned: bool, path: str, threads: int) -> None:
    k = 70_000  # 127 * 127 * k needs 31 bits, and is folded into no wider sum
    x = torch.ones(3, k)
    sparse = compensate.EntrySelection(x, torch.zeros(1)).compress(torch.full((1,), 1 / 127).double(), truncate=True)
    b = torch.full((k, 5), 127, dtype=torch.int8)
    out = torch.ones(5, 3).t() if turned else torch.ones(3, 5)
    scales = torch.tensor([0.5, 1.0, 2.0]), torch.full((1,), 2.0**-20)
    compensate.correct(out, sparse, b, *scales)
    assert torch.equal(out, 1 + torch.tensor(127.0 * 127 * k) * scales[0][:, None] * scales[1].expand(3, 5))
