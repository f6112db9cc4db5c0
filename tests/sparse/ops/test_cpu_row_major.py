"""Products of a sparse weight with rows of floats on a CPU: the output's memory order, and its bits in both orders."""

from __future__ import annotations

import pytest
import torch

import magicube_cutlass as mc
from cute_kernels.cpu import engine
from cute_kernels.cpu.linear import LinearCall, PackedLeft, pack_left
from magicube_cutlass.dispatch.cpu import pack_operand

pytestmark = pytest.mark.skipif(not engine.available(), reason="the engine is not compiled")

SHAPES = [(1536, 384), (100, 70), (37, 64), (8, 9000)]  # (M, K); the last one takes several chunks of a row


def sparse(m: int, k: int, vector_length: int, bits: int, sparsity: float) -> PackedLeft:
    pattern, high = mc.random_pattern(m, k, sparsity, vector_length, seed=1), 2 ** (bits - 1)
    values = torch.randint(-high, high, (pattern.vectors, vector_length), dtype=torch.int8)
    start, end, columns, planes, sums = pack_operand(mc.SRBCRS.from_pattern(pattern, values, bits=bits))
    return pack_left(engine.SparseOperand(start, end, columns, planes, sums, m, k, bits, True))


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


def test_few_rows_and_16_bit_floats_stay_column_major() -> None:
    weight = sparse(64, 70, 8, 8, 0.5)
    for rows, dtype in ((16, torch.float32), (2, torch.float32), (40, torch.bfloat16), (40, torch.float16)):
        got = LinearCall(weight, rows, 70, 8, dtype)(torch.randn(rows, 70), None, None, None)
        assert got.stride() == (1, rows)


def test_a_layer_gives_contiguous_rows() -> None:
    """What reads a layer's output, and the next layer, need no copy."""
    layer = mc.nn.SparseQuantLinear.from_linear(torch.nn.Linear(384, 1536), sparsity=0.9, vector_length=8, bits=8)
    with torch.inference_mode():
        assert layer.eval().freeze()(torch.randn(2, 100, 384)).is_contiguous()
