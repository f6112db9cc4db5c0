"""Quantization: scales, rounding, clips, layouts, and the engine against torch's double."""

import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.cpu import engine
from cute_kernels.cpu.linear import LinearCall
from cute_kernels.integers import BITS, fetch, int_range, widen
from magicube_cutlass import SRBCRS, QuantTensor, quantize
from magicube_cutlass.checks import Granularity
from magicube_cutlass.dispatch.cpu_linear import CpuLinear
from magicube_cutlass.quantization.quantize import _encode_torch
from tests.helpers import SCALES

AXES = (None, 0, 1)


def inputs(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return x * torch.pow(10.0, torch.randint(-12, 12, (rows, 1), generator=generator).float())


@pytest.mark.parametrize("path", engine.isas())
@settings(max_examples=60)
@given(
    st.integers(0, 9), st.integers(0, 40), st.sampled_from(BITS), st.booleans(), st.sampled_from(AXES),
    st.sampled_from(["nearest", "trunc"]), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_the_engine_agrees_with_torch_to_the_last_integer(
    path: str,
    rows: int,
    columns: int,
    bits: int,
    signed: bool,
    axis: int | None,
    rounding: str,
    double: bool,
    seed: int,
) -> None:
    x = inputs(rows, columns, seed)
    x = (x if signed else x.abs()).to(torch.float64 if double else torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAGICUBE_CPU", path)
        q = quantize(x, bits, scale=SCALES[axis], signed=signed, rounding=rounding)  # type: ignore[arg-type]
    data, scale, _ = _encode_torch(x, bits, axis, signed, rounding == "trunc", None)
    assert torch.equal(q.scale, scale)
    assert torch.equal(widen(q.data), widen(data))


def near_middles(columns: int) -> torch.Tensor:
    """Rows of quotients within a few roundings of the middle of two integers."""
    scale = torch.tensor([1.0, 0.1, 3e-20, 2.0**-120, 7e30])[:, None]
    steps = torch.arange(columns) % 254 - 127
    x = ((steps + 0.5) * scale.double()).float()
    for _ in range(2):
        x = torch.where(torch.arange(columns) % 5 < 3, torch.nextafter(x, torch.zeros(())), x)
    x[:, -1] = (127 * scale.double()).flatten()
    return x


@pytest.mark.parametrize("path", engine.isas())
@pytest.mark.parametrize("columns", [64, 200, 777])
@pytest.mark.parametrize("signed", [True, False])
def test_quotients_near_a_middle_round_as_in_double(
    path: str, columns: int, signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGICUBE_CPU", path)
    x = near_middles(columns) if signed else near_middles(columns).abs()
    q = quantize(x, 8, scale="row", signed=signed)
    data, scale, _ = _encode_torch(x, 8, 1, signed, False, None)
    assert torch.equal(q.scale, scale) and torch.equal(widen(q.data), widen(data))


@pytest.mark.parametrize("path", engine.isas())
@pytest.mark.parametrize("columns", [64, 200, 1160])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("takes_dense", [False, True])
def test_products_quantize_rows_as_in_double(
    path: str, columns: int, bits: int, takes_dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGICUBE_CPU", path)
    x, matrix = near_middles(columns), SRBCRS.from_dense(torch.eye(columns, dtype=torch.int8), vector_length=8)
    weight = CpuLinear(matrix).weight(matrix, takes_dense, len(x))
    product = LinearCall(weight, len(x), columns, bits, torch.float32)
    data, scale, _ = _encode_torch(x, bits, 1, True, False, None)
    assert torch.equal(product(x, None, None, None), fetch(data, columns, bits, True) * scale)
    given = scale[1, 0] / 3  # clips
    data, _, _ = _encode_torch(x, bits, None, True, False, given)
    assert torch.equal(product(x, given, None, None), fetch(data, columns, bits, True) * given)
    x[1:, 5::17] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30])[:, None] * given  # a kind a row
    data, _, _ = _encode_torch(x, bits, None, True, False, given)
    assert torch.equal(product(x, given, None, None), fetch(data, columns, bits, True) * given)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("signed", [True, False])
def test_the_error_is_at_most_half_a_step_and_the_largest_entry_is_exact(
    bits: int, axis: int | None, signed: bool
) -> None:
    x = torch.randn(17, 23, dtype=torch.float64)
    x = x if signed else x.abs()
    q = quantize(x, bits, scale=SCALES[axis], signed=signed)
    assert q.scale is not None
    assert bool(((q.dequantize() - x).abs() <= q.scale * (0.5 + 1e-9)).all())
    assert int(widen(q.ints()).abs().max()) == int_range(bits, signed)[1]


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_a_column_major_input_gives_the_same_integers(bits: int, column_major: bool) -> None:
    x = torch.randn(9, 14)
    view = x.mT.contiguous().mT if column_major else x
    for axis in AXES:
        q, plain = quantize(view, bits, scale=SCALES[axis]), quantize(x, bits, scale=SCALES[axis])
        assert torch.equal(widen(q.ints()), widen(plain.ints()))
        assert torch.equal(q.dequantize(), plain.dequantize())


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from(BITS), st.booleans())
def test_transposing_twice_changes_nothing(rows: int, columns: int, bits: int, swap: bool) -> None:
    low, high = int_range(bits, True)
    ints = torch.randint(low, high + 1, (rows, columns))
    q = QuantTensor.from_ints(ints.mT.contiguous().mT if swap else ints, bits=bits)
    assert torch.equal(widen(q.ints()), ints)
    assert torch.equal(widen(q.mT.ints()), ints.mT)
    assert torch.equal(widen(q.mT.mT.ints()), ints)


def test_batches_are_scaled_matrix_by_matrix() -> None:
    x = torch.randn(2, 3, 5, 7)
    q = quantize(x, 8, scale="column")
    assert q.scale is not None
    assert q.scale.shape == (2, 3, 1, 7)
    assert torch.equal(q.dequantize()[1, 2], quantize(x[1, 2], 8, scale="column").dequantize())


def test_zero_rows_get_scale_one() -> None:
    x = torch.zeros(3, 4)
    x[1] = 2.0
    q = quantize(x, 8, scale="row")
    assert q.scale is not None
    assert q.scale.flatten().tolist() == [1.0, float(torch.tensor(2.0 / 127)), 1.0]


@pytest.mark.parametrize("factor", [1e-36, 1e-30, 1e30])
def test_tiny_and_huge_rows_keep_their_relative_accuracy(factor: float) -> None:
    x = torch.randn(4, 64)
    x[2] *= factor
    q = quantize(x, 8, scale="row")
    error = (q.dequantize().double() - x.double()).norm(dim=1) / x.double().norm(dim=1)
    assert float(error[2]) < 0.02


def test_subnormal_rows_never_divide_by_zero() -> None:
    q = quantize(torch.tensor([[1e-44, -1e-44]]), 8, scale="row")
    assert torch.equal(q.dequantize(), torch.tensor([[1e-44, -1e-44]]))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nonfinite_entries_raise_or_poison_their_own_slice_only(bad: float) -> None:
    x = torch.randn(3, 5)
    x[1, 2] = bad
    with pytest.raises(ValueError, match="x must be finite, got 1 inf or nan of 15"):
        quantize(x, 8, scale="row")
    out = quantize(x, 8, scale="row", nonfinite="propagate").dequantize()
    assert bool(torch.isnan(out[1]).all())
    assert bool(torch.isfinite(out[[0, 2]]).all())


def test_mse_clip_is_never_worse_than_max_and_better_with_outliers() -> None:
    x = torch.randn(10_000)
    x[0] = 20.0
    error = {clip: float((quantize(x, 4, clip=clip).dequantize() - x).square().sum()) for clip in ("max", "mse")}  # type: ignore[arg-type]
    assert error["mse"] < 0.9 * error["max"]


@pytest.mark.parametrize("scale", ["row", "column", "tensor"])
@pytest.mark.parametrize("shape", [(37, 50), (2, 30, 11), (0, 4), (5, 0)], ids=str)
def test_the_least_error_is_that_of_the_whole_matrix(
    shape: tuple[int, ...], scale: Granularity, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(3).exp()
    found = []
    for piece in (1 << 30, 120, 1):
        monkeypatch.setattr(importlib.import_module("magicube_cutlass.quantization.quantize"), "_PIECE", piece)
        found.append(quantize(x, 4, scale=scale, clip="mse").scale)
    for each in found[1:]:
        assert each is not None and torch.equal(each, found[0])


def test_a_percentile_clip_saturates_the_entries_above_it() -> None:
    x = torch.arange(1.0, 101.0)
    q = quantize(x, 8, clip=50.0)
    assert q.scale is not None
    assert float(q.scale) == pytest.approx(50.0 / 127)
    assert bool((q.ints()[50:] == 127).all())


def test_truncation_goes_toward_zero() -> None:
    x = torch.tensor([127.0, 1.9, -1.9])
    assert quantize(x, 8, rounding="trunc").ints().tolist() == [127, 1, -1]
    assert quantize(x, 8).ints().tolist() == [127, 2, -2]


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
@pytest.mark.parametrize("clip", ["max", "mse", 99.0])
def test_empty_tensors_work(shape: tuple[int, ...], clip: str) -> None:
    axes = AXES if len(shape) > 1 else (None,)
    for axis in axes:
        assert quantize(torch.empty(shape), 4, scale=SCALES[axis], clip=clip).dequantize().shape == shape  # type: ignore[arg-type]


CASES = {
    "integer input": (lambda: quantize(torch.ones(2, dtype=torch.int8), 8), TypeError, "x must have a floating dtype"),
    "no tensor": (lambda: quantize([1.0], 8), TypeError, "x must be a tensor, got list"),
    "width": (lambda: quantize(torch.ones(2), 5), ValueError, r"bits must be one of \(4, 8, 12, 16\), got 5"),
    "axis": (lambda: quantize(torch.ones(2, 2), 8, axis=2), ValueError, "without axis, got scale=None, axis=2"),
    "axis of a vector": (lambda: quantize(torch.ones(2), 8, scale="column"), ValueError, "at least 2 dimensions for scale='column', got 1"),
    "clip": (lambda: quantize(torch.ones(2), 8, clip="min"), ValueError, "clip must be 'max', 'mse' or a percentile"),
    "percentile": (lambda: quantize(torch.ones(2), 8, clip=101), ValueError, r"percentile in \(0, 100\], got 101"),
    "rounding": (lambda: quantize(torch.ones(2), 8, rounding="up"), ValueError, "rounding must be 'nearest' or 'trunc'"),
    "nonfinite": (lambda: quantize(torch.ones(2), 8, nonfinite="skip"), ValueError, "nonfinite must be 'raise' or"),
    "negative unsigned": (lambda: quantize(-torch.ones(2), 8, signed=False), ValueError, "must not be negative .* got -1.0"),
    "from float": (lambda: QuantTensor.from_ints(torch.ones(2), bits=8), TypeError, "ints must have an integer dtype"),
    "scalar ints": (lambda: QuantTensor.from_ints(torch.tensor(3), bits=8), ValueError, "at least 1 dimension, got 0"),
    "scale shape": (
        lambda: QuantTensor.from_ints(torch.ones(2, 3, dtype=torch.int8), bits=8, scale=torch.ones(5)),
        ValueError, r"scale must have shape \(\), .* got \(5,\)",
    ),
    "scale dtype": (
        lambda: QuantTensor.from_ints(torch.ones(2, 3, dtype=torch.int8), bits=8, scale=torch.tensor(2)),
        TypeError, "scale must have a floating dtype",
    ),
    "data dtype": (
        lambda: QuantTensor(torch.ones(2, 3), None, 8, True, None, torch.Size((2, 3))),
        TypeError, "data must have dtype torch.int8 for 8-bit integers, got torch.float32",
    ),
    "data shape": (
        lambda: QuantTensor(torch.ones(2, 3, dtype=torch.int8), None, 8, True, None, torch.Size((3, 3))),
        ValueError, r"data must have shape \(3, 3\).*got \(2, 3\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_named(name: str) -> None:
    call, error, message = CASES[name]
    with pytest.raises(error, match=message):
        call()


def test_the_repr_says_what_it_is() -> None:
    assert repr(quantize(torch.ones(2, 3), 8)) == (
        "QuantTensor((2, 3), signed 8-bit, scale () torch.float32, device=cpu)"
    )


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_scale_without_a_finite_inverse_keeps_zeros(bits: int) -> None:
    x = torch.tensor([[0.0, 5e-324, -5e-324, 0.0]], dtype=torch.float64)
    q = quantize(x, bits, scale="row")
    assert q.ints().tolist()[0][0] == q.ints().tolist()[0][3] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", ["max", "mse", 90.0])
def test_a_slice_with_inf_or_nan_has_scale_nan_whatever_the_clip(bad: float, clip: str | float) -> None:
    x = torch.randn(3, 40)
    x[1, 7] = bad
    q = quantize(x, 8, scale="row", clip=clip, nonfinite="propagate")  # type: ignore[arg-type]
    assert q.scale is not None
    assert torch.isnan(q.scale).flatten().tolist() == [False, True, False]
    assert q.ints()[1].eq(0).all()
