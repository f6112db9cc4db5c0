"""torch's rules at the products: writes are counted, gradients are given or refused, cached calls are few."""

from __future__ import annotations

import pytest
import torch

import magicube_cutlass as mc
from magicube_cutlass.formats.tracking import MAX_RECORDS

A = mc.SRBCRS.from_dense(torch.randn(16, 32), vector_length=8, scale="row")


def operand(n: int = 4) -> mc.QuantTensor:
    return mc.quantize(torch.randn(32, n), bits=8, scale="column")


def test_a_write_to_out_is_counted() -> None:
    out, b = torch.zeros(16, 4), operand()
    for count in range(1, 4):  # the first call and cached ones
        mc.spmm(A, b, out=out)
        assert out._version == count
    weight = torch.ones(16, 4, requires_grad=True)
    loss = (weight * out).sum()
    mc.spmm(A, b, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("times", [1, 3])
def test_gradients_that_are_wanted_are_refused(times: int) -> None:
    b, bias, out = operand(), torch.zeros(16, requires_grad=True), torch.zeros(16, 4, requires_grad=True)
    assert b.scale is not None and A.scale is not None
    with torch.no_grad():
        for _ in range(times):
            mc.spmm(A, b, bias=bias, out=out)
    with pytest.raises(ValueError, match=r"bias requires a gradient, .* use bias.detach\(\)"):
        mc.spmm(A, b, bias=bias)
    with pytest.raises(ValueError, match="out must not require a gradient"):
        mc.spmm(A, b, out=out)
    scaled = mc.QuantTensor(b.data, b.scale.clone().requires_grad_(), 8, True, 0, b.shape)
    with pytest.raises(ValueError, match=r"scale of B requires a gradient.*use B\.scale\.detach\(\)"):
        mc.spmm(A, scaled)
    learned = mc.SRBCRS.from_dense(torch.randn(16, 32), vector_length=8, scale="row")
    assert learned.scale is not None
    mc.spmm(learned, b), mc.spmm(learned, b)
    learned.scale.requires_grad_()
    with pytest.raises(ValueError, match=r"scale of A requires a gradient.*use A\.scale\.detach\(\)"):
        mc.spmm(learned, b)


def test_out_shares_no_memory_with_operands() -> None:
    b, bias = operand(), torch.zeros(16)
    memory = torch.zeros(16 * 4 + 8)
    assert b.scale is not None
    for name, given, options in (
        ("bias", b, {"bias": memory[56:72]}),
        ("scale of B", mc.QuantTensor(b.data, memory[60:64].view(1, 4), 8, True, 0, b.shape), {"bias": bias}),
    ):
        out = memory[:64].view(16, 4)
        with pytest.raises(ValueError, match=f"out must share no memory with the operands, got the memory of {name}"):
            mc.spmm(A, given, out=out, **options)
    ints = torch.zeros(32 * 64, dtype=torch.int8)
    wide = mc.QuantTensor(ints[: 32 * 4].view(32, 4), b.scale, 8, True, 0, torch.Size((32, 4)))
    with pytest.raises(ValueError, match="got the memory of B"):
        mc.spmm(A, wide, out=ints[64 : 64 + 256].view(torch.float32).view(16, 4))


def test_cached_calls_are_bounded() -> None:
    a = mc.SRBCRS.from_dense(torch.randn(16, 32), vector_length=8)
    for n in range(1, MAX_RECORDS + 40):
        mc.spmm(a, operand(n))
    assert len(a._execution["records"]) == MAX_RECORDS
    assert set(a._execution) == {"records", "cpu"}  # and the packed operand
    b = operand(3)
    assert torch.allclose(mc.spmm(a, b), a.to_dense() @ b.dequantize(), atol=1e-5)
