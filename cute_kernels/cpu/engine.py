"""CPU engine: integer SpMM and SDDMM on SR-BCRS, and conversions, in C++17 with one build per instruction set.

The instruction set is selected at run time: ``avx512`` (AVX512-VNNI), ``avx2`` or ``portable``. The environment
variable ``MAGICUBE_CPU`` forces one; ``MAGICUBE_ENGINE`` names another build of the extension, such as a sanitizer
build.
"""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from cute_kernels.cpu.arguments import (
    OUT_TYPES,
    DenseOperand,
    SparseOperand,
    check_sddmm_arguments,
    check_spmm_arguments,
    is_structure_valid,
)
from cute_kernels.cpu.conversions import NEGATIVE, NONFINITE, compress_cpu, decompose_cpu, order_columns, quantize_cpu
from cute_kernels.cpu.extension import available, isa, isas, load_extension, run_options
from cute_kernels.integers import digit_count

__all__ = [
    "NEGATIVE",
    "NONFINITE",
    "OUT_TYPES",
    "DenseOperand",
    "SparseOperand",
    "SpmmCall",
    "available",
    "batch_stride",
    "compress_cpu",
    "decompose_cpu",
    "is_structure_valid",
    "isa",
    "isas",
    "order_columns",
    "quantize_cpu",
    "row_sums",
    "run_dim",
    "sddmm",
    "spmm",
]


def row_sums(planes: Tensor, row_start: Tensor, signed: bool) -> Tensor:
    """Sum the digits of each row.

    Parameters
    ----------
    planes : Tensor, shape (digits, blocks, V, stride)
        uint8 digit planes.
    row_start : Tensor, shape (R,)
        First vector of each vector row, multiples of the stride.
    signed : bool
        Whether the integers are signed.

    Returns
    -------
    Tensor, shape (digits, R, V)
        int64.

    Examples
    --------
    >>> planes = torch.ones(1, 2, 8, 16, dtype=torch.uint8)
    >>> row_sums(planes, torch.tensor([0, 16]), True).shape
    torch.Size([1, 2, 8])
    """
    digits, blocks, v, stride = planes.shape
    sums = planes.sum(-1, dtype=torch.int64)  # (digits, blocks, V)
    if signed:  # the top digit alone has a sign
        sums[-1] = planes[-1].view(torch.int8).sum(-1, dtype=torch.int64)
    first = row_start // stride  # (R,)
    owner = torch.searchsorted(first, torch.arange(blocks, device=planes.device), right=True) - 1  # (blocks,)
    out = torch.zeros(digits, row_start.numel(), v, dtype=torch.int64, device=planes.device)
    return out.index_add_(1, owner, sums)


def run_dim(dense: DenseOperand) -> int:
    """Return the dimension (-1 or -2) along which the operand is contiguous.

    Raises
    ------
    ValueError
        If there is none.

    Examples
    --------
    >>> run_dim(DenseOperand(torch.zeros(4, 8, dtype=torch.int8).t(), 8, True, -2, -1))
    -2
    """
    stride = dense.data.stride()
    if dense.bits == 4:
        if stride[dense.packed_dim] != 1 and dense.data.shape[dense.packed_dim] > 1:
            raise ValueError(f"a 4-bit operand must be contiguous along its packed dimension, got strides {stride}")
        return dense.packed_dim
    for dim in (-1, -2):
        if stride[dim] == 1 or dense.data.shape[dim] <= 1:
            return dim
    raise ValueError(f"a dense operand must be row- or column-major, got strides {stride}: call .contiguous()")


def batch_stride(data: Tensor) -> int:
    """Return the memory stride between matrices of a batch, in elements; 0 without a batch.

    Raises
    ------
    ValueError
        If the batch dimensions do not collapse to one.

    Examples
    --------
    >>> batch_stride(torch.zeros(2, 3, 4, 5))
    20
    """
    sizes, strides = data.shape[:-2], data.stride()[:-2]
    steps = [(n, s) for n, s in zip(sizes, strides, strict=True) if n != 1]
    for (_, outer), (n, inner) in pairwise(steps):
        if outer != n * inner:
            raise ValueError(f"the batch dimensions of an operand must collapse to one, got strides {data.stride()}")
    return steps[-1][1] if steps else 0


def _form(dense: DenseOperand) -> tuple[int, int, bool, int, bool]:
    """Arguments of the engine's operand besides the address: strides in bytes, order, bits, signedness."""
    run, size = run_dim(dense), dense.data.element_size()
    across = -3 - run  # the other one of -1 and -2
    steps = batch_stride(dense.data) * size, dense.data.stride(across) * size
    return (*steps, run == dense.inner_dim, dense.bits, dense.signed)


def _operand(engine: ModuleType, dense: DenseOperand) -> object:
    """Operand of the extension."""
    return engine.Operand(dense.data.data_ptr(), *_form(dense))


def _scales(engine: ModuleType, left: Tensor | None, right: Tensor | None, bias: Tensor | None) -> object:
    """Scales of the extension; null pointers for None."""
    pointers = [0 if t is None else t.data_ptr() for t in (left, right, bias)]
    steps = [t.shape[-1] if t is not None and t.ndim > 1 else 0 for t in (left, right)]
    return engine.Scales(*pointers, *steps)


class SpmmCall:
    """:func:`spmm` prepared for one sparse operand; a call only passes pointers.

    Parameters
    ----------
    a : SparseOperand
        Sparse operand.
    b, out : DenseOperand, Tensor
        Examples of B and of the output. The tensors of a call must have the same shapes, strides and dtypes.

    Notes
    -----
    Nothing is checked here: :func:`spmm` does that.
    """

    def __init__(self, a: SparseOperand, b: DenseOperand, out: Tensor) -> None:
        _, blocks, v, stride = a.planes.shape
        self._owner = a  # keeps the tensors alive
        self._sparse = load_extension().Sparse(
            row_start=a.row_start.data_ptr(),
            row_end=a.row_end.data_ptr(),
            columns=a.col_indices.data_ptr(),
            planes=a.planes.data_ptr(),
            row_sums=a.row_sums.data_ptr(),
            plane_bytes=blocks * v * stride,
            vector_rows=a.row_start.numel(),
            rows=a.rows,
            columns_total=a.columns,
            vector_length=v,
            stride=stride,
            bits=a.bits,
            is_signed=a.signed,
        )
        n, batch = out.shape[-1], out.shape[:-2].numel()
        self._b, self._out = _form(b), (OUT_TYPES[out.dtype], n, batch)
        self._work = blocks * v * stride * n * batch * a.planes.shape[0] * -(-b.bits // 8)  # products of digits

    def __call__(self, b: Tensor, out: Tensor, left: Tensor | None, right: Tensor | None, bias: Tensor | None) -> None:
        """Run :func:`spmm` on tensors with the layout given at construction."""
        engine, path, threads = run_options(self._work)
        operand, scales = engine.Operand(b.data_ptr(), *self._b), _scales(engine, left, right, bias)
        engine.spmm(path, self._sparse, operand, scales, out.data_ptr(), *self._out, threads)


def spmm(
    a: SparseOperand, b: DenseOperand, out: Tensor, left: Tensor | None, right: Tensor | None, bias: Tensor | None
) -> None:
    """Multiply a sparse by a dense integer matrix: ``out = (A B) * left[:, None] * right + bias[:, None]``.

    Integer sums are exact. Implements the SpMM of [1]_ on a CPU.

    Parameters
    ----------
    a : SparseOperand, shape (M, K)
        Sparse operand.
    b : DenseOperand, shape (..., K, N)
        Dense operand.
    out : Tensor, shape (..., M, N)
        Contiguous, of a dtype in `OUT_TYPES`; written in place.
    left, bias : Tensor or None, shape (M,)
        float32 row scales and bias, contiguous.
    right : Tensor or None, shape (N,) or (batch, N)
        float32 column scales, contiguous.

    References
    ----------
    .. [1] Li, Osawa, Hoefler, SC'22, sections IV-A to IV-D.

    Examples
    --------
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
    check_spmm_arguments(a, b, out, left, right, bias)
    SpmmCall(a, b, out)(b.data, out, left, right, bias)


def sddmm(
    x: DenseOperand,
    y: DenseOperand,
    row_start: Tensor,
    row_end: Tensor,
    col_indices: Tensor,
    out: Tensor,
    shape: tuple[int, int, int],
    left: Tensor | None,
    right: Tensor | None,
) -> None:
    """Sample a dense integer product at the vectors of a pattern: ``out = (X Y^T) * left[:, None] * right``.

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
    left, right : Tensor or None, shape (M,) or (batch, M); (N,) or (batch, N)
        float32 row and column scales, contiguous.

    References
    ----------
    .. [1] Li, Osawa, Hoefler, SC'22, section IV-E.
    """
    check_sddmm_arguments(x, y, (row_start, row_end, col_indices), out, shape, left, right)
    batch, blocks, v, stride = out.shape
    m, n, k = shape
    engine, path, threads = run_options(blocks * v * stride * k * batch * digit_count(x.bits) * digit_count(y.bits))
    engine.sddmm(
        path=path,
        x=_operand(engine, x),
        y=_operand(engine, y),
        row_start=row_start.data_ptr(),
        row_end=row_end.data_ptr(),
        columns=col_indices.data_ptr(),
        scales=_scales(engine, left, right, None),
        out=out.data_ptr(),
        out_batch=blocks * v * stride,
        out_type=OUT_TYPES[out.dtype],
        vector_rows=row_start.numel(),
        rows=m,
        n=n,
        inner=k,
        batch=batch,
        vector_length=v,
        stride=stride,
        threads=threads,
    )
