"""What kernels are told of their operands."""

from typing import NamedTuple

from torch import Tensor

from cute_kernels.dtypes import Number


class DenseArg(NamedTuple):
    """A dense operand whose rows are contiguous and start at multiples of 16 bytes; all in bytes."""

    pointer: int
    pitch: int  # from one row to the next
    batch: int  # from one matrix of the batch to the next
    row: int  # of a row


class ScaleArg(NamedTuple):
    """float32 factors of rows or columns; a step of 0 is one factor for all, a null pointer is none."""

    pointer: int
    step: int
    batch: int


class OutputArg(NamedTuple):
    """The output (batch, rows, columns), contiguous, and the size of the sum behind each element."""

    pointer: int
    batch: int
    rows: int
    inner: int
    columns: int


class Vectors(NamedTuple):
    """The sparse operand as execution copies are made of it: vectors in the order of the pattern."""

    row_offsets: Tensor  # int64 (R + 1,)
    columns: Tensor  # int32 (vectors,)
    values: Tensor  # (vectors, V), one an entry: integers, or the bits of floats as int16 or uint8
    number: Number


class Probabilities(NamedTuple):
    """A quantized softmax: integers ``u`` and the scales of rows, ``p ~ scale * u``."""

    values: Tensor  # (batch * blocks, V, width), storage form; for an SpMM uint8 (batch * blocks, bytes a group)
    scale: Tensor  # float32 (batch, R * V)
    lse: Tensor | None  # float32 (batch, R * V)


ALIGNMENT = 16


class Rows(NamedTuple):
    """A plane whose rows are contiguous in k and start at multiples of 16 bytes; ``owner`` keeps it alive."""

    pointer: int
    pitch: int
    owner: Tensor


def aligned(size: int) -> int:
    """``size`` rounded up to where a row may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def is_ready(plane: Tensor) -> bool:
    """Whether the kernels read ``plane`` (rows, k) as it lies."""
    rows, k = plane.shape
    pitched = rows == 1 or (plane.stride(0) % ALIGNMENT == 0 and plane.stride(0) >= k)
    return plane.data_ptr() % ALIGNMENT == 0 and pitched and (k == 1 or plane.stride(1) == 1)
