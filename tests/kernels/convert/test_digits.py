"""Digit planes on the CPU: how far the digits reach, scales at the edges of float32, layouts, what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.convert.digits import Digits, digits
from cute_kernels.gemm.api import gemm

AXES = (None, 0, 1)


def wide_range(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, rows of magnitudes from 1e-44 to 1e37 where the dtype has them, and a row of zeros."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    x *= 10.0 ** torch.linspace(-44, 37, rows, dtype=torch.float64)[:, None] if dtype == torch.float32 else 1.0
    x[rows // 2] = 0
    return x.to(dtype)


def steps_off(x: Tensor, found: Digits, bits: int, axis: int | None) -> Tensor:
    """Distance of the digits' value from ``x``, in steps of the last digit, in float64."""
    scale = found.scale.double() if axis is None else found.scale.double().unsqueeze(axis)
    value = sum(
        (plane.double() * 2.0 ** (-bits * i) for i, plane in enumerate(found.planes)), torch.zeros(x.shape).double()
    )
    return (value - x.double() / scale).abs() * 2.0 ** (bits * (len(found.planes) - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("power", [False, True])
def test_the_digits_are_within_half_a_step_or_a_step_where_one_is_cut(
    dtype: torch.dtype, count: int, bits: int, power: bool
) -> None:
    x = wide_range(90, 501, dtype)
    high = 2 ** (bits - 1) - 1
    for axis in AXES:
        found = digits(x, bits, count, axis=axis, exponent_scale=power)
        assert found.scale.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert found.scale.shape == (() if axis is None else (x.shape[1 - axis],))
        off = steps_off(x, found, bits, axis)
        # The last digit, nearest; with two digits of 8 bits, +128 of the second is cut off a step short.
        assert float(off.max()) <= (1.0 if count == 2 and bits == 8 else 0.5) + 2**-7
        assert int(found.planes[0].abs().max()) <= high
        for plane in found.planes[1:]:
            assert -high - 1 <= int(plane.min()) and int(plane.max()) <= min(high + 1, 127)
        if power:
            assert bool((torch.frexp(found.scale.double()).mantissa == 0.5).all())


def test_scales_are_the_smallest_that_keep_the_leading_digit_in_range() -> None:
    x = wide_range(400, 33)
    top = x.double().abs().amax(1)
    for power in (False, True):
        scale = digits(x, axis=1, exponent_scale=power).scale
        assert bool((scale.double() * 127 >= top).all())
        smaller = scale / 2 if power else torch.nextafter(scale, torch.zeros(()))
        fits = (smaller.double() * 127 >= top) & (smaller > 0)
        assert bool((~fits | (top == 0)).all())
        assert float(scale[200]) == 2.0**-38  # zeros


def test_the_leading_digits_of_one_and_two_are_plain_rounding() -> None:
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(1))
    for count in (1, 2):
        found = digits(x, count=count, axis=1)
        assert torch.equal(found.planes[0].float(), (x * (1 / found.scale)[:, None]).round())


@pytest.mark.parametrize("axis", AXES)
def test_what_is_not_finite_marks_its_own_slice_alone(axis: int | None) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))
    clean = digits(x, axis=axis)
    x[1, 2], x[3, 4] = torch.inf, torch.nan
    found = digits(x, axis=axis)
    bad = torch.zeros(5, 6, dtype=torch.bool)
    if axis is None:
        bad[:] = True
    elif axis == 1:
        bad[[1, 3]] = True
    else:
        bad[:, [2, 4]] = True
    slices = bad.any() if axis is None else bad.any(axis)
    assert torch.equal(found.scale.isnan(), slices)
    for plane, other in zip(found.planes, clean.planes, strict=True):
        assert bool((plane[bad] == 0).all()) and torch.equal(plane[~bad], other[~bad])


@pytest.mark.parametrize("axis", AXES)
def test_layouts_change_no_digit(axis: int | None) -> None:
    x = wide_range(30, 41)
    expected = digits(x, 8, 3, axis=axis)
    for source in (x, x.t().contiguous().t(), torch.cat((x, x), 1)[:, :41]):
        for transpose in (False, True):
            found = digits(source, 8, 3, axis=axis, transpose=transpose)
            assert torch.equal(found.scale, expected.scale)
            assert all(torch.equal(*planes) for planes in zip(found.planes, expected.planes, strict=True))
            assert not transpose or all(plane.t().is_contiguous() for plane in found.planes)


def test_products_of_digits_are_as_good_as_their_number() -> None:
    n = 512
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(n, n, generator=generator), torch.randn(n, n, generator=generator)
    truth = x.double() @ y.double()
    errors = []
    for count, dtype in ((1, torch.float32), (2, torch.float32), (3, torch.float64)):
        a, b = digits(x, count=count, axis=1), digits(y, count=count, axis=0, transpose=True)
        got = gemm(a.planes, b.planes, scale_a=a.scale, scale_b=b.scale, out_dtype=dtype)
        errors.append(float((got.double() - truth).norm() / truth.norm()))
    assert errors[0] < 1.3e-2 and errors[1] < 1e-4 and errors[2] < 5e-7


def test_empty_matrices_have_empty_digits_and_unit_scales() -> None:
    for shape in ((0, 5), (5, 0), (0, 0)):
        for axis in AXES:
            found = digits(torch.zeros(shape), axis=axis)
            assert all(plane.shape == shape and plane.dtype == torch.int8 for plane in found.planes)
            assert bool((found.scale == 1).all())


X = torch.randn(3, 4)


@pytest.mark.parametrize(
    ("x", "options", "error", "match"),
    [
        (X.int(), {}, TypeError, "x on cpu must be one of torch.float32, torch.float16, torch.bfloat16, torch.float64, got torch.int32"),
        (X[0], {}, ValueError, "x must have 2 dimensions, got 1"),
        (X, {"bits": 9}, ValueError, "bits must be an integer from 2 to 8, got 9"),
        (X, {"count": 4}, ValueError, "count must be 1, 2 or 3, got 4"),
        (X, {"axis": -1}, ValueError, "axis must be None, 0 or 1, got -1"),
        (X.to("meta"), {}, NotImplementedError, "x must be on a CPU or a CUDA device, got meta"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(x: Tensor, options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=re.escape(match)):
        digits(x, **options)
