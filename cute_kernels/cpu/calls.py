"""Operands and prepared calls of the CPU engine: what a product needs besides addresses, checked and packed once.

A call passes addresses and checks nothing. One scale for all rows or columns is repeated by the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cute_kernels.cpu import extension
from cute_kernels.cpu.arguments import OUT_TYPES, DenseOperand, SparseOperand
from cute_kernels.integers import fetch

_PANEL = 64  # columns of B in a panel, of which the engine stages all K rows
_MASK_SHARE = 3  # stored columns per word of a mask from which it is read faster than their indices
MASK_COLUMNS = 3  # of B, up to which masks are read
_LARGE_PANEL = 1 << 24  # bytes; larger panels hold only the rows of B that A reads


def template(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of one element expanded to `shape`: torch allocates one like it in half the time of a new one."""
    return torch.empty(1, dtype=dtype, device="cpu").expand(shape)


def column_major_template(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return a column-major tensor without memory: ``torch.empty_like`` takes its strides for a new one."""
    like = torch.empty_strided(shape, (1, shape[0]), dtype=dtype, device="cpu")
    like.untyped_storage().resize_(0)
    return like


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


def sparse_handle(loaded: Any, a: SparseOperand) -> object:
    """Return the sparse operand of the `loaded` extension, which reads the tensors of `a` while they live."""
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
        masks=0 if a.masks is None else a.masks.data_ptr(),
    )


def column_masks(a: SparseOperand) -> Tensor | None:
    """Return a bit per column and vector row, set where it is stored; None unless columns ascend.

    Parameters
    ----------
    a : SparseOperand
        R vector rows, K columns.

    Returns
    -------
    Tensor or None, shape (R, K / 64 rounded up)
        int64, the lowest bit first.

    Examples
    --------
    >>> index = torch.tensor([0]), torch.tensor([2]), torch.tensor([1, 3], dtype=torch.int32)
    >>> column_masks(SparseOperand(*index, torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 8), 8, 5, 8, True)).tolist()
    [[10]]
    """
    lengths, words = a.row_end - a.row_start, -(-a.columns // 64)  # (R,)
    stored, first = int(lengths.sum()), lengths.cumsum(0) - lengths
    place = torch.arange(stored, device="cpu") + torch.repeat_interleave(a.row_start - first, lengths)  # (stored,)
    rows = torch.repeat_interleave(torch.arange(lengths.numel(), device="cpu"), lengths)
    keys = rows * (words * 64) + a.col_indices[place]
    if bool((keys.diff() <= 0).any()):
        return None
    bits = torch.zeros(lengths.numel(), words * 64, dtype=torch.uint8, device="cpu")
    bits.view(-1)[keys] = 1
    packed = np.packbits(bits.numpy(), axis=1, bitorder="little")  # (R, 8 words)
    return torch.from_numpy(packed.view(np.int64))


def with_masks(a: SparseOperand) -> SparseOperand:
    """Return the operand with :func:`column_masks`, which a product with up to three columns reads in place of indices.

    The operand itself where nothing is won: on an engine path without them, or if few columns are stored.
    """
    words, stored = -(-a.columns // 64), int((a.row_end - a.row_start).sum())
    if not extension.load_extension().reads_masks() or stored < _MASK_SHARE * words * a.row_start.numel():
        return a
    return replace(a, masks=column_masks(a))


def _is_one(scale: Tensor | None) -> bool:
    """Whether a scale is one for all, which the engine repeats."""
    return scale is not None and scale.ndim == 0


class SpmmCall:
    """:func:`cute_kernels.cpu.engine.spmm` prepared for one sparse operand and row scale.

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
    col_scale : Tensor or None, shape (), (N,), (1, N), (..., N) or (..., 1, N)
        Example of the scale of B, float32 and contiguous; None: B is not scaled.
    """

    def __init__(
        self, a: SparseOperand, b: DenseOperand, out_shape: torch.Size, out_dtype: torch.dtype,
        row_scale: Tensor | None, col_scale: Tensor | None,
    ) -> None:  # fmt: skip
        self._compact: Callable[[Tensor], Tensor] | None = None
        if a.columns * _PANEL * (1 + (b.bits > 8)) > _LARGE_PANEL and a.col_indices.numel() <= a.columns // 4:
            a, self._compact, b = _without_unused_rows(a, b)
        engine = extension.ENGINE or extension.load_extension()
        if out_shape[-1] <= MASK_COLUMNS and a.planes.shape[0] == 1:
            a = with_masks(a)
        self._owner, self._row_scale = a, row_scale  # keep the memory that the engine reads
        self._like, self._scaled = template(out_shape, out_dtype), col_scale is not None
        self._rows, n = 0 if row_scale is None else row_scale.data_ptr(), out_shape[-1]
        several = col_scale is not None and col_scale.ndim > 0 and col_scale.numel() != n
        one_row, one_column = (
            row_scale is not None and row_scale.ndim == 0,
            col_scale is not None and col_scale.ndim == 0,
        )
        self._steps = 0, n if several else 0, one_row, one_column
        self._scales, self._operand, self._spmm = engine.Scales, engine.Operand, engine.spmm
        self._sparse = sparse_handle(engine, a)
        self._b, self._out = _form(b), (OUT_TYPES[out_dtype], n, out_shape[:-2].numel())

    def __call__(self, b: Tensor, col_scale: Tensor | None, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """Run the product on tensors with the layout given at construction; None: a new output."""
        if out is None:
            out = torch.empty_like(self._like, memory_format=torch.contiguous_format)
        if self._compact is not None:
            b = self._compact(b)
        columns = 0 if col_scale is None or not self._scaled else col_scale.data_ptr()
        scales = self._scales(self._rows, columns, 0 if bias is None else bias.data_ptr(), *self._steps)
        operand = self._operand(b.data_ptr(), *self._b)
        self._spmm(self._sparse, operand, scales, out.data_ptr(), *self._out, torch.get_num_threads())
        return out


class SddmmCall:
    """:func:`cute_kernels.cpu.engine.sddmm` prepared for one pattern.

    Parameters
    ----------
    x, y : DenseOperand, shape (..., M, K) and (..., N, K)
        Examples. The tensors of a call must have the same shapes, strides and dtypes.
    index : tuple of Tensor
        `row_start`, `row_end` and `col_indices` of the pattern.
    out_shape, out_dtype : torch.Size, torch.dtype
        (..., blocks, V, stride); one of `OUT_TYPES`.
    shape : tuple of int
        (M, N, K).
    row_scale, col_scale : Tensor or None, shape (), (M,) or (batch, M); (), (N,) or (batch, N)
        Examples, float32 and contiguous, where dimensions of size 1 may be added.
    """

    def __init__(
        self, x: DenseOperand, y: DenseOperand, index: tuple[Tensor, Tensor, Tensor], out_shape: torch.Size,
        out_dtype: torch.dtype, shape: tuple[int, int, int], row_scale: Tensor | None, col_scale: Tensor | None,
    ) -> None:  # fmt: skip
        (m, n, k), (blocks, v, stride) = shape, out_shape[-3:]
        engine = extension.ENGINE or extension.load_extension()
        self._index, self._like = index, template(out_shape, out_dtype)  # keeps the memory that the engine reads
        given = (row_scale, m), (col_scale, n)
        steps = [0 if scale is None or scale.numel() <= size else size for scale, size in given]
        scales = engine.Scales(0, 0, 0, *steps, *(_is_one(scale) for scale, _ in given))
        self._scaled = row_scale is not None, col_scale is not None
        self._prepared = engine.Sddmm(
            engine.Operand(0, *_form(x)), engine.Operand(0, *_form(y)), *(each.data_ptr() for each in index), scales,
            blocks * v * stride, OUT_TYPES[out_dtype], index[0].numel(), m, n, k, out_shape[:-3].numel(), v, stride,
        )  # fmt: skip
        self._sddmm = engine.sddmm

    def __call__(
        self, x: Tensor, y: Tensor, row_scale: Tensor | None, col_scale: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """Write the values at the pattern to `out`, zeros; None: a new output."""
        if out is None:
            out = torch.zeros_like(self._like, memory_format=torch.contiguous_format)
        rows = row_scale.data_ptr() if row_scale is not None and self._scaled[0] else 0
        columns = col_scale.data_ptr() if col_scale is not None and self._scaled[1] else 0
        pointers = x.data_ptr(), y.data_ptr(), rows, columns, out.data_ptr()
        self._sddmm(self._prepared, *pointers, torch.get_num_threads())
        return out
