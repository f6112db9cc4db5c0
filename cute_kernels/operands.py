"""Arguments of kernel launches: addresses, strides and sizes of operands and outputs."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cute_kernels.dtypes import ElementType


class DenseArg(NamedTuple):
    """A dense operand with contiguous rows that start at multiples of 16 bytes; all fields in bytes."""

    pointer: int
    pitch: int  # from one row to the next
    batch: int  # from one matrix of the batch to the next
    row: int  # of a row

    def of_matrix(self, i: int) -> DenseArg:
        """Return matrix `i` of the batch."""
        return DenseArg(self.pointer + i * self.batch, self.pitch, 0, self.row)


class ScaleArg(NamedTuple):
    """float32 scales of rows or columns; step 0 means one scale for all, a null pointer none."""

    pointer: int
    step: int
    batch: int

    def of_matrix(self, i: int) -> ScaleArg:
        """Return the scales of matrix `i` of the batch."""
        return ScaleArg(self.pointer + 4 * i * self.batch, self.step, 0)


class OutputArg(NamedTuple):
    """The contiguous output (batch, rows, columns), and K as `inner`."""

    pointer: int
    batch: int
    rows: int
    inner: int
    columns: int


class Vectors(NamedTuple):
    """The sparse operand as vectors in the order of the pattern; kernels pack their operand from it."""

    row_offsets: Tensor  # int64 (R + 1,)
    columns: Tensor  # int32 (vectors,)
    values: Tensor  # (vectors, V), one per entry: integers, or the bits of floats as int16 or uint8
    element_type: ElementType


class Probabilities(NamedTuple):
    """A quantized softmax: integers ``u`` and row scales, ``p = scale * u``."""

    values: Tensor  # (batch * blocks, V, width), storage form; for an SpMM uint8 (batch * blocks, bytes per group)
    scale: Tensor  # float32 (batch, R * V)
    lse: Tensor | None  # float32 (batch, R * V)


ALIGNMENT = 16


class Rows(NamedTuple):
    """A matrix with K-contiguous rows that start at multiples of 16 bytes; `owner` keeps the memory alive."""

    pointer: int
    pitch: int
    owner: Tensor


def aligned(size: int) -> int:
    """Round a size in bytes up to a multiple of `ALIGNMENT`.

    Examples
    --------
    >>> aligned(17)
    32
    """
    return -(-size // ALIGNMENT) * ALIGNMENT


def line_pitch(size: int) -> int:
    """Return the bytes from one row of `size` bytes to the next where tensor copies read it.

    From 256 bytes on, rows start at lines of 128 bytes: a box of 128 bytes that lies across two lines is read twice
    from the second-level cache.

    Examples
    --------
    >>> line_pitch(17), line_pitch(1000)
    (32, 1024)
    """
    return aligned(size) if size <= 256 else -(-size // 128) * 128


def is_ready(plane: Tensor) -> bool:
    """Return whether kernels can read `plane` (rows, K) without a copy."""
    rows, k = plane.shape
    pitched = rows == 1 or (plane.stride(0) % ALIGNMENT == 0 and plane.stride(0) >= k)
    return plane.data_ptr() % ALIGNMENT == 0 and pitched and (k == 1 or plane.stride(1) == 1)
