"""Products of a sparse weight with rows of floats on a CPU: the output's memory order, and its bits in both orders."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.cpu import engine
from cute_kernels.cpu.dense import pack_right
from cute_kernels.cpu.linear import LinearCall, PackedLeft, pack_left
from magicube_cutlass.dispatch.cpu import pack_operand

pytestmark = pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")

SHORT_FLOATS = (torch.float16, torch.bfloat16)
SHAPES = [(1536, 384), (100, 70), (37, 64), (8, 9000), (24, 40000)]  # (M, K), at last rows of several chunks


def sparse(m: int, k: int, vector_length: int, bits: int, sparsity: float) -> PackedLeft:
    pattern, high = mc.random_pattern(m, k, sparsity, vector_length, seed=1), 2 ** (bits - 1)
    values = torch.randint(-high, high, (pattern.vectors, vector_length), dtype=torch.int8)
    start, end, columns, planes, sums = pack_operand(mc.SRBCRS.from_pattern(pattern, values, bits=bits))
    return pack_left(engine.SparseOperand(start, end, columns, planes, sums, m, k, bits, True))


def one_by_one() -> PackedLeft:
    """The sparse matrix that is 1."""
    start, end, columns, planes, sums = pack_operand(
        mc.SRBCRS.from_dense(torch.ones(1, 1, dtype=torch.int8), vector_length=1)
    )
    return pack_left(engine.SparseOperand(start, end, columns, planes, sums, 1, 1, 8, True))


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether numbers have the same bits, and NaN meets NaN."""
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(
        x[~x.isnan()].view(torch.int16), y[~y.isnan()].view(torch.int16)
    )


@pytest.mark.parametrize("isa", engine.isas())
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vector_length", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_have_the_bits_of_columns(
    shape: tuple[int, int], vector_length: int, threads: int, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGICUBE_CPU", isa)
    m, k = shape
    scale, bias = torch.rand(m) + 0.5, torch.randn(m)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for bits, sparsity in ((8, 0.9), (4, 0.4), (8, 1.0)):
            weight = sparse(m, k, vector_length, bits, sparsity)
            for rows in (17, 64, 130):
                x = torch.randn(rows, k)
                columns = LinearCall(weight, rows, k, 8, torch.float32, True)(x, None, scale, bias)
                got = LinearCall(weight, rows, k, 8, torch.float32)(x, None, scale, bias)
                assert got.is_contiguous() and columns.t().is_contiguous()
                assert torch.equal(got, columns)
    finally:
        torch.set_num_threads(before)


def test_few_rows_stay_column_major() -> None:
    weight = sparse(64, 70, 8, 8, 0.5)
    for rows, dtype in ((16, torch.float32), (2, torch.bfloat16)):
        got = LinearCall(weight, rows, 70, 8, dtype)(torch.randn(rows, 70), None, None, None)
        assert got.stride() == (1, rows)


@pytest.mark.parametrize("isa", engine.isas())
@pytest.mark.parametrize("dtype", SHORT_FLOATS, ids=str)
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_16_bit_floats_are_float32_rounded_at_the_end(
    shape: tuple[int, int], dense: bool, dtype: torch.dtype, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGICUBE_CPU", isa)
    m, k = shape
    ints = torch.randint(-128, 128, (k, m), dtype=torch.int8)
    weight = pack_right(ints) if dense else sparse(m, k, 8, 8, 0.7)
    scale, bias = torch.exp(6 * torch.randn(m) - 4), torch.randn(m)
    scale[0], scale[1], scale[2] = torch.nan, 1e30, 1e-12
    for rows in (1, 2, 9, 16, 17, 64, 65, 130):
        x = (torch.randn(rows, k) * torch.exp(2 * torch.randn(rows, 1))).to(dtype)
        x[0, :1] = torch.inf
        for x_scale in (None, torch.tensor(0.02)):
            for column_major in (False, True):
                wide = LinearCall(weight, rows, k, 8, torch.float32, column_major)(x.float(), x_scale, scale, bias)
                got = LinearCall(weight, rows, k, 8, dtype, column_major, dtype)(x, x_scale, scale, bias)
                assert got.dtype == dtype and same_bits(got, wide.to(dtype)), (rows, column_major)
    if dense:
        factors = torch.rand(k) + 0.5
        wide = LinearCall(weight, 130, k, 8, torch.float32)(x.float(), None, scale, bias, factors, "gelu")
        got = LinearCall(weight, 130, k, 8, dtype, x_dtype=dtype)(x, None, scale, bias, factors, "gelu")
        assert same_bits(got, wide.to(dtype))


@pytest.mark.parametrize("isa", engine.isas())
@pytest.mark.parametrize("dtype", SHORT_FLOATS, ids=str)
def test_every_16_bit_float_is_read_and_written(dtype: torch.dtype, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a weight of 1 and a scale that gives a row its one entry back: 127 s of x / 127 s."""
    monkeypatch.setenv("MAGICUBE_CPU", isa)
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    x = codes.view(dtype)[:, None].contiguous()  # (65536, 1)
    for ones in (pack_right(torch.ones(1, 1, dtype=torch.int8)), one_by_one()):
        got = LinearCall(ones, 1 << 16, 1, 8, dtype, x_dtype=dtype)(x, None, None, None)
        wide = LinearCall(ones, 1 << 16, 1, 8, torch.float32)(x.float(), None, None, None)
        assert same_bits(got, wide.to(dtype))
        finite = x.isfinite() & (x.abs() >= torch.finfo(dtype).smallest_normal)
        assert torch.equal(got[finite], x[finite])


def test_a_layer_gives_contiguous_rows() -> None:
    """What reads a layer's output, and the next layer, need no copy."""
    layer = mc.nn.SparseQuantLinear.from_linear(torch.nn.Linear(384, 1536), sparsity=0.9, vector_length=8, bits=8)
    with torch.inference_mode():
        assert layer.eval().freeze()(torch.randn(2, 100, 384)).is_contiguous()
