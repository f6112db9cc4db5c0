"""The products in int64 torch operations: ground truth of tests, and the fallback without a compiled engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cute_kernels.integers import widen

if TYPE_CHECKING:
    from magicube_cutlass.formats.base import CompressedMatrix
    from magicube_cutlass.formats.pattern import Pattern
    from magicube_cutlass.quantization.quant_tensor import QuantTensor

__all__ = ["at_vectors", "scale_out", "sddmm", "spmm"]


def spmm(a: CompressedMatrix, b: QuantTensor) -> Tensor:
    """Return the integer product ``A B``, int64 (..., M, N), exact modulo 2^64.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> A = mc.SRBCRS.from_dense(torch.eye(2, 2, dtype=torch.int8), vector_length=2)
    >>> mc.reference.spmm(A, mc.QuantTensor.from_ints(torch.tensor([[1], [2]]), bits=8)).tolist()
    [[1], [2]]
    """
    return torch.matmul(widen(a.to_dense(dequantize=False)), widen(b.ints()))


def sddmm(x: QuantTensor, y: QuantTensor, pattern: Pattern) -> Tensor:
    """Return ``sum_k X[i, k] Y[j, k]`` at the vectors of a pattern: int64 (..., vectors, V), 0 beyond M.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> X = mc.QuantTensor.from_ints(torch.tensor([[1, 2], [3, 4]]), bits=8)
    >>> mask = mc.masks.local(2, window=0, vector_length=2)
    >>> mc.reference.sddmm(X, X, mask).tolist()
    [[5, 11], [11, 25]]
    """
    full = torch.matmul(widen(x.ints()), widen(y.ints()).mT)  # (*batch, M, N)
    return at_vectors(full, pattern)


def at_vectors(full: Tensor, pattern: Pattern) -> Tensor:
    """Return the entries of a matrix (..., M, N) at the vectors of a pattern: (..., vectors, V), 0 beyond M.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> mask = mc.Pattern.from_dense(torch.tensor([[0, 1], [0, 0]]).bool(), vector_length=2)
    >>> mc.reference.at_vectors(torch.tensor([[1, 2], [3, 4]]), mask).tolist()
    [[2, 4]]
    """
    v, rows = pattern.vector_length, pattern.vector_rows
    full = torch.nn.functional.pad(full, (0, 0, 0, rows * v - full.shape[-2]))
    grouped = full.unflatten(-2, (rows, v)).movedim(-2, -1)  # (*batch, R, N, V)
    return grouped[..., pattern.row_indices, pattern.col_indices, :]


def scale_out(total: Tensor, dtype: torch.dtype, row_scale: Tensor | None, col_scale: Tensor | None) -> Tensor:
    """Return integer totals (..., M, N) as `dtype`; floats are multiplied by row and column scales, which broadcast.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> mc.reference.scale_out(torch.tensor([[4, 6]]), torch.float32, None, torch.tensor([0.5, 2.0])).tolist()
    [[2.0, 12.0]]
    """
    if not dtype.is_floating_point:
        return total.to(dtype)
    scaled = total.to(torch.float32)
    scaled = scaled if row_scale is None else scaled * row_scale
    return (scaled if col_scale is None else scaled * col_scale).to(dtype)
