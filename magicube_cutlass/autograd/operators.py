"""``A @ x`` for sparse matrices: floats are quantized, integers are taken as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.dtypes import FLOAT_DTYPES, HALF_DTYPES
from cute_kernels.integers import fits, product_bound
from cute_kernels.watch import watched
from magicube_cutlass.autograd.integer import spmm as differentiable_spmm
from magicube_cutlass.formats.array_methods import OPERATORS, TransposedMatrix
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.ops.problem import as_srbcrs
from magicube_cutlass.ops.spmm import spmm
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor
from magicube_cutlass.quantization.quant_tensor import QuantTensor
from magicube_cutlass.quantization.quantize import quantize

__all__ = ["multiply"]

_INTEGER_BITS = {torch.int8: (8, True), torch.uint8: (8, False), torch.int16: (16, True), torch.uint16: (16, False)}
_OUT = (torch.float32, torch.float16, torch.bfloat16)


@watched("magicube_cutlass.autograd.multiply")
def multiply(A: SRBCRS | BCRS | TransposedMatrix[Any], x: Any) -> Tensor:
    """Multiply a sparse matrix, or its transpose, by a dense one: ``A @ x``.

    Parameters
    ----------
    A : SRBCRS, BCRS or TransposedMatrix, shape (M, K)
        Sparse operand.
    x : Tensor, QuantTensor or ScaledFloatTensor, shape (..., K, N) or (K,)
        Float tensors are quantized with per-column scales, to 8 bits, or to 16 if A has 12 or 16; for A of floats they
        are cast to its dtype, or to e4m3 with per-column scales if it has fewer than 16 bits. Integer tensors of 8 and
        16 bits are taken as they are.

    Returns
    -------
    Tensor, shape (..., M, N) or (M,)
        Floats have the dtype of `x`; integers are int32, int64 where int32 could overflow. A gradient of a float `x`
        is that of :func:`magicube_cutlass.autograd.spmm`; a transpose has none.

    Raises
    ------
    TypeError, ValueError
        As :func:`magicube_cutlass.spmm`.

    Examples
    --------
    >>> import magicube_cutlass as mc
    >>> A = mc.SRBCRS.from_dense(torch.eye(8, 16), vector_length=8, bits=8)
    >>> bool(((A @ torch.ones(16)) - 1).abs().max() < 1e-6)
    True
    """
    if isinstance(x, Tensor) and x.ndim == 1:
        return multiply(A, x[:, None])[:, 0]
    matrix = as_srbcrs(A.T if isinstance(A, TransposedMatrix) else A)
    if isinstance(x, (QuantTensor, ScaledFloatTensor)):
        return spmm(A, x, out_dtype=_integer_dtype(A, x) if isinstance(x, QuantTensor) else None)
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a Tensor, QuantTensor or ScaledFloatTensor, got {type(x).__name__}")
    if not x.is_floating_point():
        if x.dtype not in _INTEGER_BITS:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _INTEGER_BITS)
            raise TypeError(f"x must be float, or one of {names}, got {x.dtype}; use QuantTensor.from_ints(x, bits=8)")
        bits, signed = _INTEGER_BITS[x.dtype]
        return multiply(A, QuantTensor.from_ints(x, bits=bits, signed=signed))
    out = x.dtype if x.dtype in _OUT else torch.float32
    if matrix.bits is None:
        return _of_floats(A, matrix, x, out).to(x.dtype)
    bits = 8 if matrix.bits <= 8 else 16
    if A is not matrix or not matrix.signed:
        return spmm(A, quantize(x, bits, "column"), out_dtype=out).to(x.dtype)
    return differentiable_spmm(matrix, x, act_bits=bits)


def _of_floats(A: Any, matrix: SRBCRS, x: Tensor, out: torch.dtype) -> Tensor:
    """The product of a matrix of floats."""
    if matrix.values.dtype in [FLOAT_DTYPES[name] for name in HALF_DTYPES]:
        return spmm(A, x.to(matrix.values.dtype), out_dtype=out)
    return spmm(A, quantize(x, dtype="e4m3", scale="column"), out_dtype=out)


def _integer_dtype(A: Any, x: QuantTensor) -> torch.dtype | None:
    """int64 for sums that int32 may not hold; None, the default, else."""
    matrix = A.T if isinstance(A, TransposedMatrix) else A
    if matrix.bits is None or matrix.scale is not None or x.scale is not None:
        return None
    bound = product_bound(int(A.shape[1]), matrix.bits, matrix.signed, x.bits, x.signed)
    return None if fits(bound, torch.int32) else torch.int64


OPERATORS["matmul"] = multiply
