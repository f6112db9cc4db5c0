"""What the products refuse, and in which words."""

from collections.abc import Callable

import pytest
import torch

import magicube_cutlass as mc
from magicube_cutlass.ops.problem import operand_key

A = mc.SRBCRS.from_mask(
    torch.ones(8, 16, dtype=torch.int8), torch.ones(8, 16, dtype=torch.bool), vector_length=8, bits=8
)
WIDE = mc.SRBCRS.from_mask(
    torch.ones(8, 16, dtype=torch.int8), torch.ones(8, 16, dtype=torch.bool), vector_length=8, bits=16
)
B = mc.QuantTensor.from_ints(torch.ones(16, 4, dtype=torch.int8), bits=8)
B16 = mc.QuantTensor.from_ints(torch.ones(16, 4, dtype=torch.int16), bits=16)
X = mc.QuantTensor.from_ints(torch.ones(8, 5, dtype=torch.int8), bits=8)
Y = mc.QuantTensor.from_ints(torch.ones(16, 5, dtype=torch.int8), bits=8)
MASK = A.pattern

SPMM: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "A is dense": (lambda: mc.spmm(torch.ones(8, 16), B), TypeError, "A must be an SRBCRS or BCRS, got Tensor"),
    "A is a result": (lambda: mc.spmm(mc.sddmm(X, Y, MASK), B), TypeError, "A must hold quantized integers, got results of dtype"),
    "B is a plain tensor": (lambda: mc.spmm(A, torch.ones(16, 4)), TypeError, "B must be a QuantTensor .* of float16, .* got torch.float32"),
    "B wants a gradient": (
        lambda: mc.spmm(A, torch.ones(16, 4, dtype=torch.float16, requires_grad=True)),
        ValueError, r"B requires a gradient, .*: B\.detach\(\), or magicube_cutlass\.autograd\.spmm",
    ),
    "B is a vector": (
        lambda: mc.spmm(A, mc.QuantTensor.from_ints(torch.ones(16, dtype=torch.int8), bits=8)),
        ValueError, r"B must have at least 2 dimensions, got shape \(16,\)",
    ),
    "B has other rows": (
        lambda: mc.spmm(A, mc.QuantTensor.from_ints(torch.ones(15, 4, dtype=torch.int8), bits=8)),
        ValueError, r"B must have 16 rows to match A of shape \(8, 16\), got 15",
    ),
    "B has row scales": (lambda: mc.spmm(A, mc.quantize(torch.ones(16, 4), 8, scale="row")), ValueError, "a per-tensor or per-column scale, got per-row"),
    "B is elsewhere": (
        lambda: mc.spmm(A, mc.QuantTensor(B.data.to("meta"), None, 8, True, None, B.shape)),
        ValueError, "B must be on cpu, got meta",
    ),
    "float64 output": (lambda: mc.spmm(A, B, out_dtype=torch.float64), TypeError, r"out_dtype must be one of .* got torch\.float64"),
    "int8 output": (lambda: mc.spmm(A, B, out_dtype=torch.int8), TypeError, r"out_dtype must be one of .* got torch\.int8"),
    "int32 may overflow": (lambda: mc.spmm(WIDE, B16), ValueError, r"up to 2147483647, but a sum of 16 .* can reach 17179869184; choose"),
    "bias of integers": (lambda: mc.spmm(A, B, bias=torch.ones(8)), TypeError, r"bias must be None for integer output, got out_dtype torch\.int32"),
    "bias shape": (lambda: mc.spmm(A, B, bias=torch.ones(4), out_dtype=torch.float32), ValueError, r"bias must have shape \(8,\), got \(4,\)"),
    "out shape": (lambda: mc.spmm(A, B, out=torch.empty(8, 5, dtype=torch.int32)), ValueError, r"out must have shape \(8, 4\), got \(8, 5\)"),
    "out dtype": (
        lambda: mc.spmm(A, B, out=torch.empty(8, 4), out_dtype=torch.int32),
        TypeError, r"out must have dtype torch\.int32, got torch\.float32",
    ),
    "out not contiguous": (lambda: mc.spmm(A, B, out=torch.empty(4, 8, dtype=torch.int32).mT), ValueError, "out must be contiguous, got strides"),
}  # fmt: skip

SDDMM: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "mask is dense": (lambda: mc.sddmm(X, Y, torch.ones(8, 16)), TypeError, r"mask must be bool, got a tensor of torch\.float32"),
    "X is a plain tensor": (lambda: mc.sddmm(torch.ones(8, 5), Y, MASK), TypeError, "X must be a QuantTensor"),
    "Y wants a gradient": (
        lambda: mc.sddmm(torch.ones(8, 5).half(), torch.ones(16, 5).half().requires_grad_(), MASK),
        ValueError, "Y requires a gradient",
    ),
    "X has other rows": (lambda: mc.sddmm(Y, Y, MASK), ValueError, r"X must have 8 rows for a mask of shape \(8, 16\), got 16"),
    "Y has other rows": (lambda: mc.sddmm(X, X, MASK), ValueError, r"Y must have 16 rows for a mask of shape \(8, 16\), got 8"),
    "Y is not transposed": (lambda: mc.sddmm(X, Y, MASK, transposed_y=True), ValueError, "Y must have 16 columns .* got 5"),
    "inner sizes": (
        lambda: mc.sddmm(X, mc.QuantTensor.from_ints(torch.ones(16, 6, dtype=torch.int8), bits=8), MASK),
        ValueError, "X and Y must have the same inner size, got 5 and 6",
    ),
    "batches": (
        lambda: mc.sddmm(X, mc.QuantTensor.from_ints(torch.ones(2, 16, 5, dtype=torch.int8), bits=8), MASK),
        ValueError, r"the same leading dimensions, got \(\) and \(2,\)",
    ),
    "format": (lambda: mc.sddmm(X, Y, MASK, out_format="csr"), ValueError, "out_format must be 'srbcrs' or 'bcrs', got 'csr'"),
    "scale along the sum": (lambda: mc.sddmm(mc.quantize(torch.ones(8, 5), 8, scale="column"), Y, MASK), ValueError, "X must have one scale or one outside"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*SPMM, *SDDMM])
def test_bad_operands_are_named(name: str) -> None:
    call, error, message = (SPMM | SDDMM)[name]
    with pytest.raises(error, match=message):
        call()


def test_without_gradients_a_parameter_is_an_operand() -> None:
    halves = mc.SRBCRS.from_dense(torch.eye(16).half(), vector_length=8, dtype="float16")
    weight = torch.arange(64.0).view(16, 4).half().requires_grad_()
    with torch.no_grad():
        found, key = mc.spmm(halves, weight), operand_key(weight)
    assert torch.equal(found.half(), weight.detach())
    assert key != operand_key(weight)  # so that a cached call does not accept it
    with pytest.raises(ValueError, match="B requires a gradient"):
        mc.spmm(halves, weight)
