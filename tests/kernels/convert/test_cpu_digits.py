"""Digit planes of the CPU engine: on every path and any number of threads the integers of the same rule in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.convert import digits as gemm_digits
from cute_kernels.cpu import engine, extension
from residual.operand.decompose import decompose

pytestmark = pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")

SHAPES = [(1, 1), (7, 3), (90, 501), (33, 1003), (700, 257)]
AXES = (None, 0, 1)


def kinds(rows: int, columns: int) -> Iterator[Tensor]:
    """Normal; magnitudes from 1e-44 to 1e37 by rows; halves and quarters, whose roundings tie; zeros; small integers."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator)
    yield x
    yield x * 10.0 ** torch.linspace(-44, 37, rows)[:, None]
    yield torch.randint(-508, 509, (rows, columns), generator=generator) / 4.0
    yield torch.zeros(rows, columns)
    yield torch.randint(-127, 128, (rows, columns), generator=generator).float()


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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_planes_and_scales_are_those_of_torch(
    shape: tuple[int, int], bits: int, path: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for x in kinds(*shape):
        for axis in AXES:
            for count in (1, 2, 3):
                options = {"axis": axis, "exponent_scale": count == 2 and bits == 4}
                found = gemm_digits.digits(x, bits, count, **options)
                wanted = in_torch(monkeypatch, gemm_digits.digits, x, bits, count, **options)
                assert torch.equal(found.scale, wanted.scale)
                assert all(torch.equal(mine, theirs) for mine, theirs in zip(found.planes, wanted.planes, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rounding", ["trunc", "nearest"])
@pytest.mark.parametrize("bits", [8, 5, 2])
def test_the_published_digits_are_those_of_divisions_in_double(
    shape: tuple[int, int], rounding: str, bits: int, path: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for x in kinds(*shape):
        for axis in AXES:
            for levels in {2 ** (bits - 1) - 1, max(1, 2 ** (bits - 2))}:
                found = decompose(x, bits, axis, rounding, levels)
                wanted = in_torch(monkeypatch, decompose, x, bits, axis, rounding, levels)
                assert torch.equal(found.scale, wanted.scale) and found.shift == wanted.shift
                assert torch.equal(found.high, wanted.high) and torch.equal(found.low, wanted.low)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x[::2, ::3], lambda x: x[1:, 2:]], ids=["t", "step", "cut"]
)
def test_16_bit_floats_and_views_are_read_without_a_copy(
    view: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = view(torch.randn(65, 130, generator=torch.Generator().manual_seed(0)).to(dtype))
    for axis in AXES:
        found, wanted = gemm_digits.digits(x, axis=axis), in_torch(monkeypatch, gemm_digits.digits, x, axis=axis)
        assert torch.equal(found.scale, wanted.scale)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found.planes, wanted.planes, strict=True))
        parts, exact = decompose(x, axis=axis), in_torch(monkeypatch, decompose, x, axis=axis)
        assert torch.equal(parts.high, exact.high) and torch.equal(parts.low, exact.low)


@pytest.mark.parametrize("axis", AXES)
def test_inf_and_nan_are_zeros_under_a_nan_and_are_refused_by_the_published_rule(
    axis: int | None, path: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(1))
    x[3, 7], x[21, 7], x[30, 40] = torch.inf, torch.nan, -torch.inf
    found, wanted = gemm_digits.digits(x, axis=axis), in_torch(monkeypatch, gemm_digits.digits, x, axis=axis)
    assert torch.equal(found.scale.isnan(), wanted.scale.isnan()) and bool(found.scale.isnan().any())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found.planes, wanted.planes, strict=True))
    with pytest.raises(ValueError, match="x must be finite, but 3 of its 2000 values are inf or nan"):
        decompose(x, axis=axis)


@pytest.mark.parametrize("axis", AXES)
def test_plain_quantization_does_not_depend_on_the_number_of_threads(
    axis: int | None, path: str, use_threads: Callable[[int], None]
) -> None:
    x = torch.randn(301, 203, generator=torch.Generator().manual_seed(2))
    results = []
    for count in (1, 2, 5):
        use_threads(count)
        out = torch.empty(301, 203, dtype=torch.int8)
        scale = torch.empty({None: 1, 1: 301, 0: 203}[axis])
        mode = {None: 0, 1: 1, 0: 2}[axis]
        flags = engine.quantize_cpu(x, out, scale, bits=8, signed=True, truncate=False, given=False, mode=mode)
        assert flags == engine.NEGATIVE
        top = x.abs().amax() if axis is None else x.abs().amax(axis, keepdim=True)
        wanted = (top.double() / 127).float()
        assert torch.equal(scale, wanted.reshape(-1))
        assert torch.equal(out, (x.double() * (1 / wanted.double())).round().to(torch.int8))
        results.append(out)
    assert all(torch.equal(results[0], each) for each in results)
