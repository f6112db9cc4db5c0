"""Steps of the residual-compensated product of [1]_ on the CPU engine: split, select, correct in place.

The matrices are float32. Integers are those of ``residual.decompose``; sums have one order, whatever the number of
threads and the instruction set.

References
----------
.. [1] Gu, arXiv 2403.06924, Algorithm 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.cpu import extension
from cute_kernels.cpu.arguments import (
    VECTOR_LENGTHS,
    DenseOperand,
    SparseOperand,
    address_of,
    check_address,
    check_array,
)
from cute_kernels.cpu.calls import batch_stride, run_dim, sparse_handle

MAX_K = 131071  # products of two bytes that int32 sums
_STRIDE = 16  # vectors; a selection is sparse, and its padding is multiplied


class Split(NamedTuple):
    """Result of :func:`split_residual`.

    Attributes
    ----------
    leading, residual : Tensor, shape (rows, columns)
        int8, in the memory order of the matrix.
    scales : Tensor, shape (2, slices)
        float64: of the leading integers, of the residual ones. One slice without an axis.
    sums : Tensor or None, shape (slices,)
        float64 sums of magnitudes.
    flags : int
        :data:`cute_kernels.cpu.engine.NONFINITE` or 0.
    """

    leading: Tensor
    residual: Tensor
    scales: Tensor
    sums: Tensor | None
    flags: int


def _by_rows(x: Tensor) -> tuple[Tensor, bool]:
    """Return a float32 matrix or its transpose with contiguous rows, and whether it is the transpose."""
    check_address("x", x, torch.float32)
    if x.dim() != 2:
        raise ValueError(f"x must have 2 dimensions, got {x.dim()}")
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x, False
    return (x.t(), True) if x.stride(0) == 1 or x.shape[0] == 1 else (x.contiguous(), False)


def _matrix(x: Tensor) -> tuple[int, int, int, int]:
    """Arguments of a matrix with contiguous rows."""
    return x.data_ptr(), *x.shape, x.stride(0)


def split_residual(x: Tensor, axis: int | None, *, high: float, truncate: bool, sums: bool = False) -> Split:
    """Quantize a matrix, and the difference to its quantized values, which is rounded to float32.

    Parameters
    ----------
    x : Tensor, shape (rows, columns)
        float32.
    axis : int or None
        0 for one scale per row, 1 for one per column, None for one scale.
    high : float
        Integer of the amax of a slice: ``scale = max|x| / high``, 1 for zeros.
    truncate : bool
        Digits round toward zero, else to nearest even.
    sums : bool, default False
        Sum the magnitudes of each slice too.

    Returns
    -------
    Split

    Examples
    --------
    >>> found = split_residual(torch.tensor([[127.0, 3.5]]), 0, high=127.0, truncate=True)
    >>> found.leading.tolist(), found.residual.tolist(), found.scales[0].tolist()
    ([[127, 3]], [[0, 127]], [1.0])
    """
    if axis not in (None, 0, 1):
        raise ValueError(f"axis must be None, 0 or 1, got {axis}")
    rows, turned = _by_rows(x)
    slices = 1 if axis is None else x.shape[axis]
    if turned and axis is not None:
        axis = 1 - axis
    planes = torch.empty(2, *rows.shape, dtype=torch.int8, device="cpu")
    scales = torch.empty(2, slices, dtype=torch.float64, device="cpu")
    totals = torch.empty(slices, dtype=torch.float64, device="cpu") if sums else None
    outputs = planes[0].data_ptr(), planes[1].data_ptr(), scales.data_ptr(), address_of(totals)
    mode = {None: 0, 0: 1, 1: 2}[axis]
    flags = extension.load_extension().split_residual(
        *_matrix(rows), *outputs, high, truncate, mode, torch.get_num_threads()
    )
    leading, residual = (plane.t() if turned else plane for plane in planes)
    return Split(leading, residual, scales, totals, int(flags))


def magnitude_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of magnitudes of the rows and of the columns of a float32 matrix, in float64.

    Examples
    --------
    >>> [each.tolist() for each in magnitude_sums(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))]
    [[3.0, 7.0], [4.0, 6.0]]
    """
    rows, turned = _by_rows(x)
    found = [torch.empty(n, dtype=torch.float64, device="cpu") for n in rows.shape]
    addresses = (each.data_ptr() for each in found)
    extension.load_extension().magnitude_sums(*_matrix(rows), *addresses, torch.get_num_threads())
    return (found[1], found[0]) if turned else (found[0], found[1])


class EntrySelection:
    """Entries of a float32 matrix, or of its transpose, above a level: counted at once, compressed on demand.

    Parameters
    ----------
    x : Tensor, shape (rows, columns)
        float32.
    levels : Tensor, shape (1,) or (slices,)
        float32; a slice is a row of `x`, or a column if `transposed`.
    transposed : bool, default False
        Select from the transpose.
    vector_length : int, default 1
        V; V neighbors in a column of the selection are kept together if one is above its level.
    is_signed : bool, default False
        Compare entries, not magnitudes.

    Attributes
    ----------
    lengths : Tensor, shape (ceil(slices / V),)
        int64: vectors per vector row.
    largest : Tensor, shape (slices,)
        float32: largest magnitude that is kept, 0 where nothing is.

    Examples
    --------
    >>> found = EntrySelection(torch.tensor([[1.0, 9.0, -8.0, 2.0]]), torch.tensor([3.0]))
    >>> found.count, found.largest.tolist()
    (2, [9.0])
    >>> found.compress(torch.tensor([3.0], dtype=torch.float64), truncate=True).planes[0, 0, 0, :3].tolist()
    [3, 254, 0]
    """

    def __init__(
        self, x: Tensor, levels: Tensor, *, transposed: bool = False, vector_length: int = 1, is_signed: bool = False
    ) -> None:
        if vector_length not in VECTOR_LENGTHS:
            raise ValueError(f"vector_length must be one of {VECTOR_LENGTHS}, got {vector_length}")
        rows, turned = _by_rows(x)
        self.shape = (x.shape[1], x.shape[0]) if transposed else (x.shape[0], x.shape[1])
        slices = self.shape[0]
        check_array("levels", levels, torch.float32, 1 if levels.numel() == 1 else slices)
        self.lengths = torch.empty(-(-slices // vector_length), dtype=torch.int64, device="cpu")
        self.largest = torch.empty(slices, dtype=torch.float32, device="cpu")
        self._vector_length, self._owners = vector_length, (rows, levels)
        one, across = levels.numel() == 1, turned != transposed
        self._arguments = *_matrix(rows), levels.data_ptr(), one, is_signed, across, vector_length
        extension.load_extension().count_entries(
            *self._arguments, self.lengths.data_ptr(), self.largest.data_ptr(), torch.get_num_threads()
        )

    @property
    def count(self) -> int:
        """Entries that are kept, those of a last vector row beyond the matrix not counted."""
        if not self.lengths.numel():
            return 0
        v, last = self._vector_length, int(self.lengths[-1])
        return int(self.lengths.sum()) * v - last * (-self.shape[0] % v)

    def compress(self, scale: Tensor, *, truncate: bool) -> SparseOperand:
        """Return the kept entries as integers, ``round(x / scale)``; `scale` float64, (1,) or (slices,)."""
        check_array("scale", scale, torch.float64, 1 if scale.numel() == 1 else self.shape[0])
        count, v = self.lengths.numel(), self._vector_length
        starts = torch.zeros(count + 1, dtype=torch.int64, device="cpu")
        torch.cumsum((self.lengths + _STRIDE - 1) // _STRIDE * _STRIDE, 0, out=starts[1:])
        total = int(starts[-1])
        columns = torch.empty(total, dtype=torch.int32, device="cpu")
        planes = torch.empty(1, total // _STRIDE, v, _STRIDE, dtype=torch.uint8, device="cpu")
        sums = torch.empty(1, count, v, dtype=torch.int64, device="cpu")
        outputs = (each.data_ptr() for each in (starts, columns, planes, sums))
        extension.load_extension().fill_entries(
            *self._arguments, scale.data_ptr(), scale.numel() == 1, truncate, _STRIDE, *outputs, torch.get_num_threads()
        )
        start = starts[:-1]
        return SparseOperand(start, start + self.lengths, columns, planes, sums, *self.shape, 8, True)


def correct(out: Tensor, a: SparseOperand, b: Tensor, row_scale: Tensor, col_scale: Tensor) -> None:
    """Add a scaled sparse product in place: ``out += (A B) * row_scale[:, None] * col_scale``.

    Parameters
    ----------
    out : Tensor, shape (M, N)
        float32, with contiguous rows or columns.
    a : SparseOperand, shape (M, K)
        8-bit integers; K at most 131071.
    b : Tensor, shape (K, N)
        int8, with contiguous rows or columns.
    row_scale : Tensor, shape (1,) or (M,)
        float32.
    col_scale : Tensor, shape (1,) or (N,)
        float32.

    Examples
    --------
    >>> out, one = torch.ones(1, 2), torch.ones(1)
    >>> kept = EntrySelection(torch.tensor([[0.0, 2.0]]), torch.zeros(1)).compress(one.double(), truncate=True)
    >>> correct(out, kept, torch.tensor([[1, 1], [3, 4]], dtype=torch.int8), one, one)
    >>> out.tolist()
    [[7.0, 9.0]]
    """
    m, n = a.rows, out.shape[1]
    check_address("out", out, torch.float32)
    check_address("b", b, torch.int8)
    if out.shape != (m, n) or b.shape != (a.columns, n) or a.bits != 8:
        raise ValueError(f"out and b must have {m} and {a.columns} rows for 8-bit A, got {tuple(out.shape)} and "
                         f"{tuple(b.shape)}")  # fmt: skip
    check_array("row_scale", row_scale, torch.float32, 1 if row_scale.numel() == 1 else m)
    check_array("col_scale", col_scale, torch.float32, 1 if col_scale.numel() == 1 else n)
    row, column = out.stride()
    if column != 1 and row != 1:
        raise ValueError(f"out must have contiguous rows or columns, got strides {out.stride()}")
    engine, dense = extension.load_extension(), DenseOperand(b, 8, True, -2, -1)
    run = run_dim(dense)
    operand = engine.Operand(b.data_ptr(), batch_stride(b), b.stride(-3 - run), run == -2, 8, True)
    scales = engine.Scales(
        row_scale.data_ptr(), col_scale.data_ptr(), 0, 0, 0, row_scale.numel() == 1, col_scale.numel() == 1
    )
    steps = (row, 1) if column == 1 else (1, column)
    engine.correct(sparse_handle(engine, a), operand, scales, out.data_ptr(), *steps, n, torch.get_num_threads())
