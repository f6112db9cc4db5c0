"""Two digits hold a matrix to the promised accuracy, whatever its scale, shape and rounding rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from residual import decompose
from residual.matmul import matmul
from residual.paper.gemm import gemm
from tests.compensated.random_products import KINDS, true_error


def matrix(shape: tuple[int, ...], seed: int, exponent: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0**exponent).to(dtype)


@settings(max_examples=200)
@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    bits=st.integers(2, 16),
    axis=st.sampled_from([None, 0, -1]),
    rounding=st.sampled_from(["nearest", "trunc"]),
    exponent=st.integers(-36, 36),
    seed=st.integers(0, 2**20),
)
def test_error_and_digits_stay_in_their_bounds(
    *, shape: tuple[int, ...], bits: int, axis: int | None, rounding: str, exponent: int, seed: int
) -> None:
    x = matrix(shape, seed, exponent)
    d = decompose(x, bits=bits, axis=axis, rounding=rounding)
    limit = 2 ** (bits - 1) - 1
    assert d.high.shape == d.low.shape == x.shape
    assert d.high.dtype == d.low.dtype == (torch.int8 if bits <= 8 else torch.int16)
    if x.numel():
        assert int(d.high.abs().max()) == limit
        assert -limit - 1 <= int(d.low.min()) and int(d.low.max()) <= min(limit + 1, torch.iinfo(d.low.dtype).max)
    step = d.scale / 2**d.shift
    slack = 1 + 1e-9 * 2**bits
    assert bool(((x - d.reconstruct()).abs() <= step * slack).all())
    unit = 0.5 if rounding == "nearest" else 1.0
    assert bool(((x - d.reconstruct(digits=1)).abs() <= d.scale * unit * (1 + 1e-9)).all())


@pytest.mark.parametrize("axis", [0, 1])
def test_each_slice_has_the_scale_of_its_own_maximum(axis: int) -> None:
    x = matrix((5, 9), 1)
    d = decompose(x, axis=axis)
    assert d.scale.shape == ((5, 1) if axis == 0 else (1, 9))
    assert torch.equal(d.scale, x.abs().amax(1 - axis, keepdim=True) / 127)


def test_the_worked_values_of_one_row() -> None:
    d = decompose(torch.tensor([127.0, 0.5, 1.5, 2.25, -3.75]))
    assert d.scale.item() == 1 and d.bits == d.shift == 8
    assert d.high.tolist() == [127, 0, 2, 2, -4]  # ties go to even
    assert d.low.tolist() == [0, 127, -128, 64, 64]  # +1/2 does not fit and is cut to 127/256
    t = decompose(torch.tensor([127.0, 0.5, 1.5, 2.25, -3.75]), rounding="trunc")
    assert t.high.tolist() == [127, 0, 1, 2, -3] and t.shift == 7
    assert t.low.tolist() == [0, 64, 64, 32, -96]


def test_a_second_digit_gains_two_hundred_fold() -> None:
    x = matrix((64, 64), 2, dtype=torch.float32)
    d = decompose(x, axis=0)
    one, two = ((x - d.reconstruct(k)).norm() for k in (1, 2))
    assert 200 < float(one / two) < 300


def test_zero_rows_get_scale_one_and_leave_the_others_alone() -> None:
    x = matrix((3, 4), 3)
    x[1] = 0
    d = decompose(x, axis=0)
    assert d.scale[1].item() == 1
    assert not d.high[1].any() and not d.low[1].any()
    assert torch.equal(d.high[[0, 2]], decompose(x[[0, 2]], axis=0).high)


def test_rows_near_the_smallest_float_keep_their_relative_accuracy() -> None:
    big = matrix((1, 50), 4, dtype=torch.float32)
    x = torch.cat([big, big * 1e-36])
    error = ((x.double() - decompose(x, axis=0).reconstruct()).norm(dim=1) / x.double().norm(dim=1)).tolist()
    assert max(error) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_view_of_any_float_type_decomposes_like_its_copy(dtype: torch.dtype) -> None:
    x = matrix((6, 8), 5, dtype=dtype).t()[::2]
    a, b = decompose(x, axis=0), decompose(x.contiguous(), axis=0)
    assert torch.equal(a.high, b.high) and torch.equal(a.low, b.low)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
@pytest.mark.parametrize("axis", [None, 0])
def test_empty_tensors_decompose(shape: tuple[int, ...], axis: int | None) -> None:
    assert decompose(torch.empty(shape), axis=axis).reconstruct().shape == shape


@pytest.mark.parametrize(
    ("kind", "message", "kwargs", "x"),
    [
        (ValueError, "x must be finite, but 1 of its 2 values", {}, torch.tensor([1.0, float("nan")])),
        (ValueError, "x must be finite, but 2 of its 2 values", {}, torch.tensor([float("inf"), float("-inf")])),
        (TypeError, r"x must be a floating-point tensor, got torch\.int32", {}, torch.ones(2, dtype=torch.int32)),
        (TypeError, r"x must be a torch\.Tensor, got list", {}, [1.0]),
        (ValueError, "bits must be an integer from 2 to 16, got 1", {"bits": 1}, torch.ones(2)),
        (ValueError, "bits must be an integer from 2 to 16, got 17", {"bits": 17}, torch.ones(2)),
        (ValueError, r"axis must be None or in \[-1, 1\) for a 1-D x, got 1", {"axis": 1}, torch.ones(2)),
        (ValueError, "rounding must be one of .*, got 'up'", {"rounding": "up"}, torch.ones(2)),
    ],
)
def test_bad_arguments_are_named(kind: type[Exception], message: str, kwargs: dict[str, int], x: torch.Tensor) -> None:
    with pytest.raises(kind, match=message):
        decompose(x, **kwargs)


def test_only_one_or_two_digits_exist() -> None:
    with pytest.raises(ValueError, match="digits must be 1 or 2, got 3"):
        decompose(torch.ones(2)).reconstruct(3)


def replicated(x: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """Both digits as numbers, nearest and never cut, with a scale per row."""
    unit = x.double().abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    high = (x.double() / unit).round()
    return [high * unit, ((x.double() / unit - high) * 2**bits).round() * unit / 2**bits]


@pytest.mark.parametrize("kind", ["uniform", "standard normal", "exponential", "Poisson"])
def test_digits_of_four_bits_are_as_exact_as_a_replication_that_cuts_none(kind: str) -> None:
    torch.manual_seed(0)
    A, B = KINDS[kind](300, 512, 280)
    (a1, a0), (b1, b0) = replicated(A, 4), (x.mT for x in replicated(B.mT, 4))
    truth = A.double() @ B.double()
    best = float((a1 @ b1 + a1 @ b0 + a0 @ b1 - truth).norm() / truth.norm())
    C = matmul(A, B, mode="full", bits=4)
    assert isinstance(C, torch.Tensor)
    assert true_error(A, B, C) <= 1.1 * best
    # Algorithm 1 quantizes its residuals to 7 levels, not 8: what it computes is in test_paper_algorithm
    published = gemm(A, B, bits=4, threshold=0, scaling="vector", rounding="nearest")
    assert isinstance(published, torch.Tensor)
    assert true_error(A, B, published) <= 2.5 * best
