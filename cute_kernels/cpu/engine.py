"""CPU engine: integer SpMM and SDDMM on SR-BCRS, and conversions, in C++17 with one build per instruction set.

The instruction set is selected at run time: ``amx`` (AVX512-VNNI, dense products by tiles), ``avx512`` (AVX512-VNNI),
``avx_vnni``, ``avx2`` or ``portable``. The environment variable ``MAGICUBE_CPU`` forces one; ``MAGICUBE_ENGINE`` names
another build of the extension, such as a sanitizer build.
"""

from __future__ import annotations

from torch import Tensor

from cute_kernels.cpu.arguments import (
    OUT_TYPES,
    DenseOperand,
    SparseOperand,
    check_sddmm_arguments,
    check_spmm_arguments,
)
from cute_kernels.cpu.calls import SddmmCall, SpmmCall, batch_stride, row_sums, run_dim
from cute_kernels.cpu.conversions import NEGATIVE, NONFINITE, compress_cpu, decompose_cpu, order_columns, quantize_cpu
from cute_kernels.cpu.extension import MISSING, available, isa, isas

__all__ = [
    "MISSING",
    "NEGATIVE",
    "NONFINITE",
    "OUT_TYPES",
    "DenseOperand",
    "SddmmCall",
    "SparseOperand",
    "SpmmCall",
    "available",
    "batch_stride",
    "compress_cpu",
    "decompose_cpu",
    "isa",
    "isas",
    "order_columns",
    "quantize_cpu",
    "row_sums",
    "run_dim",
    "sddmm",
    "spmm",
]


def spmm(
    a: SparseOperand,
    b: DenseOperand,
    out: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Multiply a sparse by a dense integer matrix: ``out = (A B) * row_scale[:, None] * col_scale + bias[:, None]``.

    Integer sums are exact. Implements the SpMM of [1]_ on a CPU.

    Parameters
    ----------
    a : SparseOperand, shape (M, K)
        Sparse operand.
    b : DenseOperand, shape (..., K, N)
        Dense operand.
    out : Tensor, shape (..., M, N)
        Contiguous, of a dtype in `OUT_TYPES`; written in place.
    row_scale : Tensor or None, shape () or (M,)
        float32, contiguous.
    col_scale : Tensor or None, shape (), (N,) or (..., N)
        float32, contiguous.
    bias : Tensor or None, shape (M,)
        float32, contiguous.

    References
    ----------
    .. [1] Li, Osawa, Hoefler, SC'22, sections IV-A to IV-D.

    Examples
    --------
    >>> import torch
    >>> ints = torch.eye(8, 16, dtype=torch.int8)
    >>> start, end, columns, values = compress_cpu(ints, ints != 0, 8, 16)
    >>> planes = values.view(torch.uint8)[None]
    >>> a = SparseOperand(start, end, columns, planes, row_sums(planes, start, True), 8, 16, 8, True)
    >>> b = DenseOperand(torch.arange(32, dtype=torch.int8).view(16, 2), 8, True, -2, -1)
    >>> out = torch.empty(8, 2, dtype=torch.int32)
    >>> spmm(a, b, out, None, None, None)
    >>> out[:2].tolist()
    [[0, 1], [2, 3]]
    """
    check_spmm_arguments(a, b, out, row_scale, col_scale, bias)
    SpmmCall(a, b, out.shape, out.dtype, row_scale, col_scale)(b.data, col_scale, bias, out)


def sddmm(
    x: DenseOperand,
    y: DenseOperand,
    row_start: Tensor,
    row_end: Tensor,
    col_indices: Tensor,
    out: Tensor,
    shape: tuple[int, int, int],
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> None:
    """Sample a dense integer product at the vectors of a pattern: ``out = (X Y^T) * row_scale[:, None] * col_scale``.

    Integer sums are exact. Implements the SDDMM of [1]_ on a CPU.

    Parameters
    ----------
    x, y : DenseOperand, shape (..., M, K) and (..., N, K)
        Dense operands.
    row_start, row_end, col_indices : Tensor
        SR-BCRS structure of the pattern: int64 (R,), int64 (R,), int32 (padded vectors,).
    out : Tensor, shape (batch, blocks, V, stride)
        Contiguous zeros of a dtype in `OUT_TYPES`; written in place.
    shape : tuple of int
        (M, N, K).
    row_scale, col_scale : Tensor or None, shape (), (M,) or (batch, M); (), (N,) or (batch, N)
        float32, contiguous.

    References
    ----------
    .. [1] Li, Osawa, Hoefler, SC'22, section IV-C.
    """
    check_sddmm_arguments(x, y, (row_start, row_end, col_indices), out, shape, row_scale, col_scale)
    index = row_start, row_end, col_indices
    call = SddmmCall(x, y, index, out.shape, out.dtype, shape, row_scale, col_scale)
    call(x.data, y.data, row_scale, col_scale, out)
