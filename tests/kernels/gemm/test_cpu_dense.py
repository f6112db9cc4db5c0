"""The dense product of the CPU engine: exact integers on every instruction set, its epilogue, rows quantized in the call."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.cpu import extension
from cute_kernels.cpu.conversions import quantize_cpu
from cute_kernels.cpu.dense import MAX_K, linear, multiply, pack_right
from cute_kernels.gemm.api import explain_gemm, gemm
from cute_kernels.gemm.cpu import backends

SHAPES = [
    (1, 1, 1), (1, 5, 3), (2, 4, 8), (3, 63, 9), (4, 64, 63), (5, 65, 64), (6, 97, 65), (7, 130, 17), (12, 257, 16), (13, 384, 33),
    (47, 385, 70), (48, 100, 129), (49, 1025, 40), (97, 30, 200), (0, 4, 3), (3, 0, 5), (4, 5, 0),
]  # fmt: skip
pytestmark = pytest.mark.skipif(not extension.available(), reason="no engine")


@pytest.fixture(params=[(isa, threads) for isa in extension.isas() for threads in (1, 2)], ids=str)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An instruction set with one and with two threads, however little work there is."""
    isa, threads = request.param
    monkeypatch.setenv("MAGICUBE_CPU", isa)
    before, work = torch.get_num_threads(), extension.load_extension().set_serial_work(0 if threads > 1 else 2**62)
    torch.set_num_threads(threads)
    yield isa
    torch.set_num_threads(before)
    extension.load_extension().set_serial_work(work)


def ints(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)


def reals(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator).exp2_().mul_(3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_are_exact_for_every_memory_order(path: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = ints(m, k, 1), ints(k, n, 2)
    expected = a.long() @ b.long()
    wide = torch.full((m + 1, 2 * k + 3), 77, dtype=torch.int8)
    wide[:m, 3 : k + 3] = a
    for left in (a, wide[:m, 3 : k + 3]):
        for right in (b, b.t().contiguous().t(), ints(2 * k, n + 1, 4)[::2, 1:].copy_(b)):
            packed = pack_right(right)
            assert packed.column_sums[:n].tolist() == b.sum(0).tolist()
            assert torch.equal(multiply(left, packed), expected.int())
            assert torch.equal(multiply(left, packed, out_dtype=torch.int64), expected)
    frame = torch.full((n + 1, m + 2), 5, dtype=torch.int32)
    assert torch.equal(multiply(a, packed, out=frame[:n, 1 : m + 1].t()), expected.int())
    frame[:n, 1 : m + 1] = 5
    assert bool((frame == 5).all())


@pytest.mark.parametrize("k", [2**15 + 1, MAX_K])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_long_sums_of_extreme_values_do_not_wrap(path: str, k: int, rows: int) -> None:
    a, b = torch.empty(rows, k, dtype=torch.int8), torch.empty(k, 4, dtype=torch.int8)
    for x in (-128, 127):
        a.fill_(x)
        for j, y in enumerate((-128, 127, -127, 1)):
            b[:, j] = y
        assert multiply(a, pack_right(b)).tolist() == [[k * x * y for y in (-128, 127, -127, 1)]] * rows
    a[:, ::2], b[1::2] = -128, -128  # signs alternate beside each other
    assert torch.equal(multiply(a, pack_right(b)).long(), a.long() @ b.long())


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 11, 53])
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 97])
def test_pairs_of_digits_around_128_together_are_exact(path: str, rows: int, cut: int) -> None:
    values = torch.tensor([-128, -127, -65, -64, -63, -1, 0, 1, 63, 64, 65, 127], dtype=torch.int8)
    pairs = torch.cartesian_prod(values, values).flatten()[cut:]  # 16 bits of AVX2 hold pairs of at most 128, times 255
    a = torch.stack([pairs.roll(2 * r) for r in range(rows)])
    b = values[torch.randint(12, (len(pairs), 70), generator=torch.Generator().manual_seed(cut))]
    b[:, 0], b[:, 1] = -128, 127
    right, before = pack_right(b), a.clone()
    assert torch.equal(multiply(a, right).long(), a.long() @ b.long())
    assert torch.equal(
        multiply(a.sign(), right).long(), a.sign().long() @ b.long()
    )  # nothing is left of the call before
    assert torch.equal(a, before)


def test_k_of_two_to_the_17_is_multiplied_exactly_in_ranges() -> None:
    a, b = torch.full((2, 2**17), -128, dtype=torch.int8), torch.full((2**17, 3), -128, dtype=torch.int8)
    assert torch.equal(gemm(a, b, out_dtype=torch.int64), torch.full((2, 3), 2**31))
    a[1], b[:, 1] = 127, 127
    assert torch.equal(gemm(a, b, out_dtype=torch.int64), a.long() @ b.long())
    with pytest.raises(ValueError, match=f"at most {MAX_K} rows"):
        pack_right(b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns_first", [False, True])
def test_the_epilogue_has_the_bits_of_float32(path: str, dtype: torch.dtype, columns_first: bool) -> None:
    m, k, n = 53, 70, 75
    a, b = ints(m, k, 1), ints(k, n, 2)
    total, right = (a.long() @ b.long()).float(), pack_right(b)
    generator = torch.Generator().manual_seed(3)
    rows, columns, bias = (torch.rand(size, generator=generator) - 0.3 for size in (m, n, n))
    for row_scale, col_scale, added in (
        (rows, columns, bias),
        (rows, None, None),
        (None, columns, None),
        (None, None, bias),
    ):
        factors = [row_scale if row_scale is None else row_scale[:, None], col_scale]
        expected = total
        for factor in reversed(factors) if columns_first else factors:
            expected = expected if factor is None else expected * factor
        expected = (expected if added is None else expected + added).to(dtype)
        options: dict[str, Any] = {
            "row_scale": row_scale,
            "col_scale": col_scale,
            "bias": added,
            "columns_first": columns_first,
        }
        assert torch.equal(multiply(a, right, out_dtype=dtype, **options), expected)
        out = torch.empty(n, m, dtype=dtype).t()
        assert multiply(a, right, out=out, out_dtype=dtype, **options) is out and torch.equal(out, expected)


@pytest.mark.parametrize(
    ("m", "k", "n"), [(53, 70, 75), (300, 20, 1024), (1, 9, 64)]
)  # the second is streamed otherwise
def test_a_product_is_added_to_an_output(path: str, m: int, k: int, n: int) -> None:
    a, b = ints(m, k, 1), ints(k, n, 2)
    generator = torch.Generator().manual_seed(3)
    rows, columns, start = (torch.rand(size, generator=generator) - 0.3 for size in ((m,), (n,), (m, n)))
    expected = start + (a.long() @ b.long()).float() * rows[:, None] * columns
    options: dict[str, Any] = {"row_scale": rows, "col_scale": columns, "out_dtype": torch.float32, "adds": True}
    for out in (start.clone(), start.t().clone().t()):
        assert multiply(a, pack_right(b), out=out, **options) is out and torch.equal(out, expected)


@pytest.mark.parametrize("column_major", [False, True])
def test_a_source_is_added_with_the_same_bits(column_major: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = ints(40, 50, 1), ints(50, 30, 2), torch.rand(40, 30)
    b = b.t().contiguous().t() if column_major else b
    before = c.clone()
    for dtype, beta in ((torch.float32, 1.0), (torch.float32, 0.5), (torch.float16, 1.0)):
        found = []
        for backend in ("engine", "float32"):
            monkeypatch.setenv("MAGICUBE_GEMM", backend)
            scales = {
                "scale_a": torch.rand(40, generator=torch.Generator().manual_seed(1)),
                "scale_b": 0.3 * torch.ones(()),
            }
            found.append(gemm(a, b, c=c, beta=beta, out_dtype=dtype, **scales))
        assert torch.equal(*found) and torch.equal(c, before)


@pytest.mark.parametrize("n", [1024, 1040, 1030])
@pytest.mark.parametrize("columns_first", [False, True])
def test_results_stored_past_the_caches_are_the_same(path: str, n: int, columns_first: bool) -> None:
    a, b, row_scale = ints(300, 20, 1), ints(20, n, 2), torch.linspace(-1, 3, 300)
    col_scale, bias = torch.linspace(0.1, 1.7, n), torch.linspace(-9, 9, n)
    factors = [row_scale[:, None], col_scale]
    first, second = factors[::-1] if columns_first else factors
    expected = (a.long() @ b.long()).float() * first * second + bias
    options: dict[str, Any] = {
        "row_scale": row_scale, "col_scale": col_scale, "bias": bias, "columns_first": columns_first,
        "out_dtype": torch.float32,
    }  # fmt: skip
    wide = torch.full((300, n + 16), 5.0)
    out = wide[:, :n]
    assert torch.equal(multiply(a, pack_right(b), **options), expected)
    assert torch.equal(multiply(a, pack_right(b), out=out, **options), expected)
    assert bool((wide[:, n:] == 5).all())


def quantized(x: Tensor, bits: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The integers of float32 rows by the rule in float64, and a scale per row."""
    high = 2 ** (bits - 1) - 1
    absmax = x.abs().amax(1).double() if x.shape[1] else torch.zeros(x.shape[0]).double()
    found = torch.where(absmax == 0, 1.0, absmax / high).float().clamp(min=2.0**-149)
    found = torch.where(absmax.isfinite(), found, torch.nan) if scale is None else scale.expand(x.shape[0])
    inverse = torch.where(found.isnan(), 0.0, 1 / found.double())[:, None]
    q = torch.nan_to_num((x.double() * inverse).round(), nan=0.0).clamp(-high - 1, high)
    return torch.where(inverse == 0, 0.0, q).to(torch.int8), found


def hard_rows(k: int) -> Tensor:
    """Rows whose quotients are near the middle of two integers, tiny, huge, zero or non-finite."""
    rows = reals(12, k, 5)
    middles = torch.arange(k).remainder(254) - 126.5
    rows[0], rows[0, 0] = middles, 127.0
    rows[1] = middles * (1 + 2.0**-23)
    rows[1, 0] = 127.0
    rows[2] = torch.nextafter(middles, torch.zeros(k)) * 3
    rows[3], rows[4], rows[5] = rows[3] * 1e-41, rows[4] * 1e37, 0.0
    rows[6, 1], rows[7, -1], rows[8, 0] = float("nan"), float("inf"), float("-inf")
    rows[9] *= 2.0**-126
    rows[10] = torch.sign(rows[10]) * 1e-45
    return rows


@pytest.mark.parametrize("k", [2, 63, 64, 200, 513])
def test_factors_of_columns_have_the_bits_of_multiplying_first(path: str, k: int) -> None:
    right, factors = pack_right(ints(k, 70, 2)), torch.linspace(0.3, 40, k)
    for x in (hard_rows(k), reals(50, k, 6), reals(9, k + 5, 7)[:, 3 : k + 3]):
        for given in (None, torch.tensor(0.37)):
            expected = linear((x * factors).contiguous(), right, x_scale=given)
            got = linear(x, right, x_scale=given, factors=factors)
            assert torch.equal(got.nan_to_num(), expected.nan_to_num()) and torch.equal(got.isnan(), expected.isnan())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("k", [2, 63, 64, 200, 513])
def test_linear_has_the_bits_of_quantizing_first(path: str, bits: int, k: int) -> None:
    b, bias = ints(k, 70, 2), torch.linspace(-3, 3, 70)
    scale, right = torch.linspace(0.5, 2, 70), pack_right(b)
    for x in (hard_rows(k), reals(50, k, 6), reals(9, k + 5, 7)[:, 3 : k + 3]):
        for given in (None, torch.tensor(0.037), torch.tensor(1e-42), torch.tensor(float("nan")), torch.tensor(3e38)):
            q, scales = quantized(x, bits, given)
            expected = (q.long() @ b.long()).float() * scale * scales[:, None] + bias
            got = linear(x, right, bits=bits, x_scale=given, col_scale=scale, bias=bias)
            assert torch.equal(got.nan_to_num(), expected.nan_to_num()) and torch.equal(got.isnan(), expected.isnan())


@pytest.mark.parametrize("mode", [0, 1])
def test_eight_bit_integers_follow_the_rule_in_float64(path: str, mode: int) -> None:
    x = hard_rows(777) if mode else reals(13, 777, 3)
    for given in (False, True):
        out, scale = torch.empty(*x.shape, dtype=torch.int8), torch.full((x.shape[0] if mode else 1,), 0.011)
        quantize_cpu(x, out, scale, bits=8, signed=True, truncate=False, given=given, mode=mode)
        if mode or given:
            q, scales = quantized(x, 8, None if mode and not given else torch.tensor(0.011))
        else:
            q, scales = quantized(x.reshape(1, -1), 8, None)
        assert torch.equal(out, q.view_as(out)) and torch.equal(scale.isnan(), scales[: scale.numel()].isnan())


def test_every_float_between_two_integers_is_rounded_as_in_float64() -> None:
    scale = torch.tensor([0.7])
    for start in (-128, -3, 0, 126):
        x = torch.linspace(start, start + 1, 200_001)[None] * 0.7
        out = torch.empty(*x.shape, dtype=torch.int8)
        quantize_cpu(x, out, scale, bits=8, signed=True, truncate=False, given=True, mode=0)
        assert torch.equal(out, quantized(x, 8, scale[0])[0])


def test_the_product_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = ints(9, 77, 1), ints(77, 66, 2)
    for isa in extension.isas():
        monkeypatch.setenv("MAGICUBE_CPU", isa)
        assert {"engine", "float32"} <= set(backends())
        for name in backends():
            monkeypatch.setenv("MAGICUBE_GEMM", name)
            assert explain_gemm(a, b).kernel == name and torch.equal(gemm(a, b), (a.long() @ b.long()).int())
        monkeypatch.delenv("MAGICUBE_GEMM")
        assert explain_gemm(a, b).kernel == ("engine" if isa == "avx2" else backends()[0])
    monkeypatch.setenv("MAGICUBE_GEMM", "magic")
    with pytest.raises(ValueError, match=r"MAGICUBE_GEMM must be one of \[.*'engine'.*\] on this machine, got 'magic'"):
        gemm(a, b)


A, B = ints(4, 6, 1), ints(6, 5, 2)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: pack_right(A.int()), TypeError, "b must be torch.int8, got torch.int32"),
        (lambda: pack_right(A[0]), ValueError, "b must have 2 dimensions"),
        (lambda: multiply(A[:, :5], pack_right(B)), ValueError, "a must have shape (any, 6), got (4, 5)"),
        (lambda: multiply(A.t().contiguous().t(), pack_right(B)), ValueError, "a must have contiguous rows"),
        (lambda: multiply(A, pack_right(B), out_dtype=torch.int16), TypeError, "out_dtype must be one of"),
        (lambda: multiply(A, pack_right(B), out=torch.empty(4, 4, dtype=torch.int32)), ValueError, "out must have shape (4, 5)"),
        (lambda: multiply(A, pack_right(B), out=torch.empty(8, 10, dtype=torch.int32)[::2, ::2]), ValueError, "contiguous rows or"),
        (lambda: multiply(A, pack_right(B), bias=torch.ones(4)), ValueError, "bias must have shape (5,), got (4,)"),
        (lambda: multiply(A, pack_right(B), adds=True), ValueError, "out must be given in torch.float32 to be added to"),
        (lambda: linear(A, pack_right(B)), TypeError, "x must be torch.float32, got torch.int8"),
        (lambda: linear(A.float(), pack_right(B), bits=16), ValueError, "bits must be 4 or 8 and out_dtype a float of the engine, got 16"),
        (lambda: linear(A.float(), pack_right(B), x_scale=torch.ones(4)), ValueError, "x_scale must have shape ()"),
        (lambda: linear(A.float(), pack_right(B), factors=torch.ones(3)), ValueError, "factors must have shape"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=re.escape(match)):
        call()


def test_scales_far_from_one_keep_the_rule(path: str) -> None:
    x = reals(40, 96, 8) * torch.logspace(-44, 37, 40, dtype=torch.float64)[:, None].float()
    right = pack_right(torch.eye(96, dtype=torch.int8))
    q, scales = quantized(x, 8, None)
    assert torch.equal(linear(x, right), q.float() * scales[:, None]) and math.isfinite(float(scales.max()))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="no large pages here")
def test_a_large_packed_weight_asks_for_large_pages() -> None:
    packed = pack_right(torch.ones(4096, 1024, dtype=torch.int8)).packed
    middle, flags, inside = packed.data_ptr() + packed.numel() // 2, "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= middle < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags"):
            flags = line
    assert "hg" in flags.split()
