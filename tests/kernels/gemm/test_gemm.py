"""The dense integer product on the CPU: exact sums, digits, scales, and what is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.cpu import engine
from cute_kernels.gemm import cpu as gemm_cpu
from cute_kernels.gemm.api import explain_gemm, gemm
from cute_kernels.gemm.config import MAX_PRODUCTS, Products, select_products
from cute_kernels.gemm.epilogue import gated, integers_of

SHAPES = [
    (1, 1, 1),
    (7, 1, 5),
    (1, 5, 4),
    (4, 5, 1),
    (1, 7, 3),
    (17, 33, 65),
    (64, 100, 31),
    (5, 1000, 3),
    (130, 4, 257),
]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def ints(rows: int, columns: int, seed: int, low: int = -128, high: int = 127) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(low, high + 1, (rows, columns), generator=generator, dtype=torch.int8)
    if x.numel() > 1:
        x.view(-1)[0], x.view(-1)[-1] = low, high
    return x


def planes(count: int, rows: int, columns: int, seed: int) -> tuple[Tensor, ...]:
    return tuple(ints(rows, columns, seed + i) for i in range(count))


def exact(a: tuple[Tensor, ...], b: tuple[Tensor, ...], products: Products, shift: int) -> Tensor:
    """The weighted sum of the products in float64, which holds each of them exactly."""
    total = torch.zeros(a[0].shape[0], b[0].shape[1], dtype=torch.float64)
    for i, left in enumerate(a):
        for j, right in enumerate(b):
            if i + j < products.levels:
                total += (left.double() @ right.double()) * 2.0 ** (-shift * (i + j))
    return total


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_sums_are_exact_for_every_layout(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    a, b = ints(m, k, 1), ints(k, n, 2)
    expected = (a.long() @ b.long()).to(dtype)
    for left in (
        a,
        a.t().contiguous().t(),
        torch.cat((a, a), 1)[:, :k],
        ints(m + 2, 2 * k + 1, 3)[1:-1, 1::2].copy_(a),
    ):
        for right in (b, b.t().contiguous().t(), ints(2 * k, n + 1, 4)[::2, 1:].copy_(b)):
            got = gemm(left, right, out_dtype=dtype)
            assert got.dtype == dtype and torch.equal(got, expected)


@pytest.mark.parametrize(
    ("counts", "terms", "pairs"),
    [
        ((1, 1), None, 1), ((2, 2), None, 3), ((3, 3), None, 6), ((2, 2), 1, 1), ((2, 2), 4, 4), ((3, 3), 3, 3), ((3, 3), 1, 1),
        ((2, 1), None, 2), ((1, 2), 2, 2), ((1, 2), 1, 1), ((3, 1), 3, 3), ((3, 2), 5, 5), ((2, 3), 3, 3),
    ],
)  # fmt: skip
def test_each_number_of_terms_means_its_products(counts: tuple[int, int], terms: int | None, pairs: int) -> None:
    a, b = planes(counts[0], 19, 77, 1), planes(counts[1], 77, 23, 9)
    products = select_products(*counts, terms)
    assert products.number == pairs
    for shift in (8, 4, 0):
        got = gemm(a, b, terms=terms, shift=shift, out_dtype=torch.float64)
        assert torch.equal(got, exact(a, b, products, shift))
        single = gemm(a, b, terms=terms, shift=shift, out_dtype=torch.float32)
        assert float((single - got).abs().max()) <= 2**-22 * float(exact(a, b, products, shift).abs().max())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scales_bias_and_c_enter_once(dtype: torch.dtype) -> None:
    m, k, n = 37, 90, 53
    generator = torch.Generator().manual_seed(5)
    a, b = planes(2, m, k, 1), planes(2, k, n, 3)
    scale_a, scale_b = torch.rand(m, generator=generator) + 0.5, torch.rand(n, generator=generator) + 0.5
    bias, c = torch.randn(n, generator=generator) * 1e4, torch.randn(m, n, generator=generator) * 1e4
    total = exact(a, b, Products(2, 2, 2), 8) * 0.001
    size = float((total * scale_a[:, None] * scale_b).abs().max()) + 4e4
    for left in (scale_a, torch.tensor(1.5), 1.5, None):
        for right in (scale_b, torch.tensor(0.5), 0.5, None):
            rows = left[:, None] if isinstance(left, Tensor) and left.dim() else (1.0 if left is None else left)
            columns = 1.0 if right is None else right
            truth = total * rows * columns + 0.25 * c.double() + bias.double()
            got = gemm(a, b, scale_a=left, scale_b=right, alpha=0.001, beta=0.25, c=c, bias=bias, out_dtype=dtype)
            bound = torch.finfo(dtype).eps * truth.abs() + (2**-20 if dtype != torch.float64 else 2**-48) * size
            assert got.dtype == dtype and bool(((got.double() - truth).abs() <= bound).all())


def test_out_is_written_in_place_may_be_c_and_may_be_a_slice() -> None:
    a, b = ints(9, 40, 1), ints(40, 13, 2)
    frame = torch.full((11, 20), 7.0)
    out = frame[1:10, 3:16]
    assert gemm(a, b, beta=1.0, c=out, out=out, out_dtype=torch.float32) is out
    assert torch.equal(out, (a.double() @ b.double() + 7).float())
    frame[1:10, 3:16] = 7.0
    assert bool((frame == 7.0).all())
    unread = torch.full((9, 13), float("nan"))
    assert not bool(gemm(a, b, c=unread, out_dtype=torch.float32).isnan().any())


@pytest.mark.parametrize("k", [MAX_PRODUCTS - 1, MAX_PRODUCTS, MAX_PRODUCTS + 1, 2 * MAX_PRODUCTS + 77])
@pytest.mark.parametrize("value", [-128, 127])
def test_long_sums_of_extreme_values_do_not_wrap(k: int, value: int) -> None:
    a, b = torch.full((2, k), value, dtype=torch.int8), torch.full((k, 3), -128, dtype=torch.int8)
    expected = torch.full((2, 3), -128 * value * k)
    assert torch.equal(gemm(a, b, out_dtype=torch.int64), expected)
    assert torch.equal(gemm(a, b, out_dtype=torch.float64), expected.double())
    both = gemm((a, a), (b, b), out_dtype=torch.float64)
    assert torch.equal(both, expected.double() * (1 + 2 / 256))
    if k > MAX_PRODUCTS:
        with pytest.raises(ValueError, match=f"K must be at most {MAX_PRODUCTS} .* got K = {k}"):
            gemm(a, b)
        assert explain_gemm(a, b, out_dtype=torch.int64).chunks == math.ceil(k / MAX_PRODUCTS)
    else:
        assert torch.equal(gemm(a, b), expected.int())


@pytest.mark.parametrize("why", ["isa", "saturates"])
def test_processors_without_vnni_multiply_by_other_means(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "isa":
        monkeypatch.setenv("MAGICUBE_CPU", "portable")
    else:
        monkeypatch.setattr(gemm_cpu, "isa", lambda: "avx512")
        monkeypatch.setattr(gemm_cpu, "int_mm_is_exact", lambda: False)
    monkeypatch.setattr(torch, "_int_mm", None)
    expected = "engine" if why == "saturates" and engine.available() else "float32"
    assert explain_gemm(torch.ones(2, 3, dtype=torch.int8), torch.ones(3, 2, dtype=torch.int8)).kernel == expected
    for k in (1024, 1025, 140_000):
        a, b = torch.full((3, k), -128, dtype=torch.int8), torch.full((k, 2), -128, dtype=torch.int8)
        a[1], a[2, ::2], b[:, 1] = 127, 1, 127  # sums of odd products: no power of two to spare
        assert torch.equal(gemm(a, b, out_dtype=torch.int64), a.long() @ b.long())
    a, b = planes(2, 19, 150, 1), planes(2, 150, 23, 9)
    assert torch.equal(gemm(a[0], b[0]), (a[0].long() @ b[0].long()).int())
    assert torch.equal(gemm(a, b, terms=4, out_dtype=torch.float64), exact(a, b, Products(2, 2, 3), 8))


@pytest.mark.parametrize("saturated", [-(2**15), 2**15 - 1])
def test_saturation_of_two_products_is_found(saturated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """An operand shifted to unsigned bytes, and sums of two neighbors clamped to 16 bits, as without VNNI."""
        pair = torch.nn.functional.pad(a.long() + 128, (0, a.shape[1] % 2))[:, :, None]
        right = torch.nn.functional.pad(b.long(), (0, 0, 0, b.shape[0] % 2))
        sums = (pair * right).unflatten(1, (-1, 2)).sum(2)
        sums = sums.clamp(min=saturated) if saturated < 0 else sums.clamp(max=saturated)
        return (sums.sum(1) - 128 * b.long().sum(0)).int()

    monkeypatch.setattr(torch, "_int_mm", saturating)
    gemm_cpu.int_mm_is_exact.cache_clear()
    try:
        assert not gemm_cpu.int_mm_is_exact()
    finally:
        gemm_cpu.int_mm_is_exact.cache_clear()


@pytest.mark.parametrize(("m", "k", "n"), [(0, 5, 3), (4, 5, 0), (0, 0, 0), (4, 0, 3)])
def test_empty_operands_give_empty_or_zero_results(m: int, k: int, n: int) -> None:
    a, b = torch.zeros(m, k, dtype=torch.int8), torch.zeros(k, n, dtype=torch.int8)
    assert torch.equal(gemm(a, b), torch.zeros(m, n, dtype=torch.int32))
    bias = torch.arange(n, dtype=torch.float32)
    assert torch.equal(gemm(a, b, bias=bias, out_dtype=torch.float32), bias.expand(m, n))


X, Y = ints(4, 6, 1), ints(6, 5, 2)
F = {"out_dtype": torch.float32}


@pytest.mark.parametrize(
    ("a", "b", "options", "error", "match"),
    [
        (X.int(), Y, {}, TypeError, "a must be int8, got torch.int32"),
        (X, Y[0], {}, ValueError, "b must have 2 dimensions, got 1"),
        (X, ints(7, 5, 2), {}, ValueError, "b must have 6 rows to match a of shape (4, 6), got 7"),
        ((X, X[:2]), Y, F, ValueError, r"a[1] must have the shape (4, 6) of a[0], got (2, 6)"),
        ((X, 3), Y, F, TypeError, "a[1] must be a tensor, got int"),
        ((), Y, F, ValueError, "a must have 1 to 3 digit planes, got 0"),
        ((X, X), (Y, Y), {"terms": 2, **F}, ValueError, "terms must be one of 1, 3, 4 for 2 planes of a and 2 of b, got 2"),
        (X, Y, {"shift": 17}, ValueError, "shift must be an integer from 0 to 16, got 17"),
        ((X, X), (Y, Y), {}, ValueError, "terms must be 1 for out_dtype torch.int32, got 3"),
        (X, Y, {"scale_a": torch.ones(4)}, ValueError, "scale_a must be None for out_dtype torch.int32"),
        (X, Y, {"alpha": 2.0}, ValueError, "alpha times scales must be 1 for out_dtype torch.int32, got 2.0"),
        (X, Y, {"bias": torch.ones(5)}, ValueError, "bias must be None for out_dtype torch.int32"),
        (X, Y, {"scale_a": torch.ones(5), **F}, ValueError, "scale_a must have the shape (4,) or (), got (5,)"),
        (X, Y, {"scale_b": torch.ones(5).double(), **F}, TypeError, "scale_b must be one of torch.float32, "),
        (X, Y, {"bias": torch.ones(4), **F}, ValueError, "bias must have the shape (5,), got (4,)"),
        (X, Y, {"beta": 1.0, **F}, ValueError, "c must be given for beta 1.0"),
        (X, Y, {"beta": 1.0, "c": torch.ones(5, 4), **F}, ValueError, "c must have the shape (4, 5), got (5, 4)"),
        (X, Y, {"out_dtype": torch.int16}, TypeError, "out_dtype on cpu must be one of torch.int8, torch.int32, "),
        (X, Y, {"out": torch.ones(4, 5)}, TypeError, "out must have out_dtype torch.int32, got torch.float32"),
        (X, Y, {"out": torch.ones(4, 4, dtype=torch.int32)}, ValueError, "out must have the shape (4, 5), got (4, 4)"),
        (X, Y, {"out": torch.ones(5, 4, dtype=torch.int32).t()}, ValueError, "out must have contiguous rows"),
        (X, Y, {"out": torch.ones(5, dtype=torch.int32).expand(4, 5)}, ValueError, "out must have rows that do not overlap"),
        (X.to("meta"), Y, {}, ValueError, "b must be on meta as a is, got cpu"),
        (X.to("meta"), Y.to("meta"), {}, NotImplementedError, "a must be on a CPU or a CUDA device, got meta"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(a: Any, b: Any, options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=re.escape(match)):
        gemm(a, b, **options)


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
def test_a_gated_linear_unit_multiplies_the_columns_by_their_gates(activation: Any, dtype: torch.dtype) -> None:
    a, b, bias = ints(9, 40, 1), ints(40, 34, 2), torch.linspace(-1, 1, 34)
    options: dict[str, Any] = {"scale_a": 3e-4, "bias": bias}
    plain = gemm(a, b, **options, out_dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    scale = torch.tensor(0.03) if dtype == torch.int8 else None
    got = gemm(a, b, **options, activation=activation, glu=True, out_scale=scale, out_dtype=dtype)
    want = gated(plain, activation)
    assert got.shape == (9, 17) and torch.equal(got, want.to(dtype) if scale is None else integers_of(want, scale))
    out = torch.empty(9, 17, dtype=dtype)
    gemm(a, b, **options, activation=activation, glu=True, out_scale=scale, out=out, out_dtype=dtype)
    assert torch.equal(out, got)


def test_what_no_gated_linear_unit_takes_is_named() -> None:
    a, c = torch.ones(4, 4, dtype=torch.int8), torch.ones(4, 4)
    message = "glu needs a float or int8 out_dtype, no c, and an even N, got "
    with pytest.raises(ValueError, match=f"{message}torch.int32, no c, N = 4"):
        gemm(a, a, glu=True)
    with pytest.raises(ValueError, match=f"{message}torch.float32, c, N = 4"):
        gemm(a, a, glu=True, c=c, beta=1.0, out_dtype=torch.float32)
    with pytest.raises(ValueError, match=f"{message}torch.float32, no c, N = 3"):
        gemm(a, a[:, :3], glu=True, out_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"out must have the shape \(4, 2\), got \(4, 4\)"):
        gemm(a, a, glu=True, out=c, out_dtype=torch.float32)
