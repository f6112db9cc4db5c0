"""CPU engine: integer SpMM and SDDMM on SR-BCRS, and conversions, in C++17 with one build per instruction set.

The instruction set is selected at run time: ``avx512`` (AVX512-VNNI), ``avx2`` or ``portable``. The environment
variable ``MAGICUBE_CPU`` forces one; ``MAGICUBE_ENGINE`` names another build of the extension, such as a sanitizer
build.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cute_kernels.cpu import extension
from cute_kernels.cpu.arguments import (
    OUT_TYPES,
    DenseOperand,
    SparseOperand,
    address_of,
    check_sddmm_arguments,
    check_sparse,
    check_spmm_arguments,
)
from cute_kernels.cpu.conversions import NEGATIVE, NONFINITE, compress_cpu, decompose_cpu, order_columns, quantize_cpu
from cute_kernels.cpu.extension import available, isa, isas, load_extension
from cute_kernels.integers import fetch

__all__ = [
    "NEGATIVE",
    "NONFINITE",
    "OUT_TYPES",
    "DenseOperand",
    "SparseLinear",
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

_PANEL = 64  # columns of B in a panel, of which the engine stages all K rows
_LARGE_PANEL = 1 << 24  # bytes; larger panels hold only the rows of B that A reads


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


def _operand(dense: DenseOperand) -> object:
    """Operand of the extension."""
    return load_extension().Operand(dense.data.data_ptr(), *_form(dense))


def _without_unused_rows(
    a: SparseOperand, b: DenseOperand
) -> tuple[SparseOperand, Callable[[Tensor], Tensor], DenseOperand]:
    """Return A with its used columns numbered from 0, the function that selects these rows of B, and their form."""
    is_padding = a.col_indices < 0
    used = a.col_indices[~is_padding].unique()  # sorted
    columns = torch.searchsorted(used, a.col_indices, out_int32=True).masked_fill_(is_padding, -1)
    unpacks, inner = b.bits == 4 and b.packed_dim == -2, a.columns

    def compact(data: Tensor) -> Tensor:
        """(*batch, K, N) to (*batch, used, N)"""
        return (fetch(data, inner, 4, b.signed, -2) if unpacks else data).index_select(-2, used)

    form = DenseOperand(compact(b.data), 8 if unpacks else b.bits, b.signed, -2, b.packed_dim)
    return replace(a, col_indices=columns, columns=used.numel()), compact, form


def _sparse(loaded: Any, a: SparseOperand) -> object:
    """Sparse operand of the `loaded` extension, which reads the tensors of `a` while they live."""
    _, blocks, v, stride = a.planes.shape
    return loaded.Sparse(
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


class SparseLinear:
    """Product of one sparse operand with float32 rows that the call quantizes: ``(A q(X)^T) * scales + bias[:, None]``.

    Parameters
    ----------
    a : SparseOperand, shape (M, K)
        Integers of at most 8 bits.
    """

    def __init__(self, a: SparseOperand) -> None:
        check_sparse(a)
        if a.bits > 8:
            raise ValueError(f"bits of a must be 4 or 8, got {a.bits}")
        self._engine, self._owner = load_extension(), a
        self._sparse = _sparse(self._engine, a)

    def __call__(
        self, x: Tensor, bits: int, x_scale: Tensor | None, row_scale: Tensor | None, bias: Tensor | None, out: Tensor
    ) -> None:
        """Write the product; nothing is checked here.

        Parameters
        ----------
        x : Tensor, shape (N, K)
            float32 with contiguous rows.
        bits : int
            Width of q(X), 4 or 8; to nearest.
        x_scale : Tensor or None, shape ()
            A given float32 scale; None: one per row.
        row_scale, bias : Tensor or None, shape (M,)
            float32, contiguous.
        out : Tensor, shape (M, N)
            float32, float16 or bfloat16, contiguous.
        """
        high = float(2 ** (bits - 1) - 1)
        scales = self._engine.Scales(address_of(row_scale), 0, address_of(bias), 0, 0)
        self._engine.sparse_linear(
            self._sparse, x.data_ptr(), x.stride(0), address_of(x_scale), -high - 1, high, scales, x.shape[0],
            out.data_ptr(), OUT_TYPES[out.dtype], torch.get_num_threads(),
        )  # fmt: skip


class SpmmCall:
    """:func:`spmm` prepared for one sparse operand and row scale; a call only passes pointers.

    Parameters
    ----------
    a : SparseOperand
        Sparse operand.
    b : DenseOperand
        Example of B. The tensors of a call must have the same shapes, strides and dtypes.
    out_shape, out_dtype : torch.Size, torch.dtype
        (..., M, N); one of `OUT_TYPES`.
    row_scale : Tensor or None, shape () or (M,)
        float32, contiguous; read at each call.
    scaled : bool
        Whether to multiply by the scale of B.

    Notes
    -----
    Nothing is checked here: :func:`spmm` does that.
    """

    def __init__(
        self, a: SparseOperand, b: DenseOperand, out_shape: torch.Size, out_dtype: torch.dtype,
        row_scale: Tensor | None, scaled: bool,
    ) -> None:  # fmt: skip
        self._compact: Callable[[Tensor], Tensor] | None = None
        if a.columns * _PANEL * (1 + (b.bits > 8)) > _LARGE_PANEL and a.col_indices.numel() <= a.columns // 4:
            a, self._compact, b = _without_unused_rows(a, b)
        self._engine = extension.ENGINE or extension.load_extension()
        self._owner, self._row_scale, self._scaled = a, row_scale, scaled
        self._shape, self._dtype = out_shape, out_dtype
        self._sparse = _sparse(self._engine, a)
        self._b, self._out = _form(b), (OUT_TYPES[out_dtype], out_shape[-1], out_shape[:-2].numel())

    def __call__(self, b: Tensor, col_scale: Tensor | None, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """Run :func:`spmm` on tensors with the layout given at construction; None: a new output."""
        if out is None:
            out = torch.empty(self._shape, dtype=self._dtype)
        rows, columns, n = self._row_scale, col_scale if self._scaled else None, self._shape[-1]
        # the engine reads one scale per row and per column
        if rows is not None and rows.ndim == 0:
            rows = rows.expand(self._shape[-2]).contiguous()
        if columns is not None and columns.ndim == 0:
            columns = columns.expand(n).contiguous()
        scales = self._engine.Scales(
            0 if rows is None else rows.data_ptr(),
            0 if columns is None else columns.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0,
            0 if columns is None or columns.numel() == n else n,
        )
        if self._compact is not None:
            b = self._compact(b)
        operand = self._engine.Operand(b.data_ptr(), *self._b)
        self._engine.spmm(self._sparse, operand, scales, out.data_ptr(), *self._out, torch.get_num_threads())
        return out


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
    SpmmCall(a, b, out.shape, out.dtype, row_scale, col_scale is not None)(b.data, col_scale, bias, out)


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
    .. [1] Li, Osawa, Hoefler, SC'22, section IV-E.
    """
    check_sddmm_arguments(x, y, (row_start, row_end, col_indices), out, shape, row_scale, col_scale)
    batch, blocks, v, stride = out.shape
    m, n, k = shape
    engine = load_extension()
    sizes = ((row_scale, m), (col_scale, n))
    scales = [None if scale is None else scale.expand(size).contiguous() if scale.ndim == 0 else scale
              for scale, size in sizes]  # fmt: skip
    steps = [0 if scale is None or scale.numel() <= size else size for scale, size in sizes]
    pointers = [0 if scale is None else scale.data_ptr() for scale in scales]
    engine.sddmm(
        x=_operand(x),
        y=_operand(y),
        row_start=row_start.data_ptr(),
        row_end=row_end.data_ptr(),
        columns=col_indices.data_ptr(),
        scales=engine.Scales(*pointers, 0, *steps),
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
        threads=torch.get_num_threads(),
    )
