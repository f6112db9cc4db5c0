"""Block-diagonal matrices: several sparse matrices as one, so that one launch multiplies them all.

``diag(P_1, ..., P_n) [V_1; ...; V_n] = [P_1 V_1; ...; P_n V_n]``. Dense operands are concatenated by a view. So are
SR-BCRS values on one pattern, since its vector rows are consecutive; only column indices are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from magicube_cutlass.checks import check_shape
from magicube_cutlass.formats.pattern import Padded, Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS


class BlockDiagonal(NamedTuple):
    """Copies of a padded pattern on a diagonal, as kernels read them."""

    pattern: Pattern  # (copies * R * V, copies * K)
    row_start: Tensor  # (copies * R,) int64
    row_end: Tensor  # (copies * R,) int64
    col_indices: Tensor  # (copies * padded vectors,) int32, -1 in the padding


def pad_to_vector_rows(pattern: Pattern) -> Pattern:
    """Return `pattern` with its rows padded to whole vector rows, of the same vectors; cached on it.

    Examples
    --------
    >>> import magicube_cutlass as mc
    >>> pad_to_vector_rows(mc.random_pattern(13, 20, 0.5, 8)).shape
    (16, 20)
    """
    v = pattern.vector_length
    if pattern.shape[0] % v == 0:
        return pattern
    if "padded rows" not in pattern._cache:
        shape = (pattern.vector_rows * v, pattern.shape[1])
        pattern._cache["padded rows"] = Pattern(shape, v, pattern.row_offsets, pattern.col_indices)._trust()
    padded: Pattern = pattern._cache["padded rows"]
    return padded


def concat_on_diagonal(patterns: Sequence[Pattern]) -> Pattern:
    """Return the pattern with `patterns` on its diagonal, each padded to whole vector rows.

    Parameters
    ----------
    patterns : sequence of Pattern
        At least one, of one vector length and device.

    Raises
    ------
    ValueError
        If the result has 2**31 columns or more.

    Examples
    --------
    >>> import magicube_cutlass as mc
    >>> concat_on_diagonal([mc.random_pattern(13, 20, 0.5, 8), mc.random_pattern(8, 5, 0.5, 8)]).shape
    (24, 25)
    """
    offsets, columns, rows, total_columns, vectors = [], [], 0, 0, 0
    for pattern in patterns:
        offsets.append(pattern.row_offsets[:-1] + vectors)
        columns.append(pattern.col_indices + total_columns)
        rows, total_columns = rows + pattern.vector_rows, total_columns + pattern.shape[1]
        vectors += pattern.vectors
    first = patterns[0]
    offsets.append(first.row_offsets.new_tensor([vectors]))
    shape = (rows * first.vector_length, total_columns)
    return Pattern(shape, first.vector_length, torch.cat(offsets), torch.cat(columns))._trust()


def repeat_on_diagonal(pattern: Pattern, stride: int, copies: int) -> BlockDiagonal:
    """Return `copies` of `pattern` on a diagonal, padded to `stride`; cached on it.

    The copies are not padded again: rows and slots repeat those of the pattern.

    Examples
    --------
    >>> import magicube_cutlass as mc
    >>> repeat_on_diagonal(mc.random_pattern(16, 20, 0.5, 8), 32, 3).pattern.shape
    (48, 60)
    """
    key = ("block diagonal", stride, copies)
    if key not in pattern._cache:
        padded = pattern.padded(stride)
        if copies == 1:
            diagonal = BlockDiagonal(pattern, padded.row_start, padded.row_end, padded.col_indices)
        else:
            diagonal = _repeat(pattern, padded, copies)
        pattern._cache[key] = diagonal
    cached: BlockDiagonal = pattern._cache[key]
    return cached


def _repeat(pattern: Pattern, padded: Padded, copies: int) -> BlockDiagonal:
    """Build the structure of `repeat_on_diagonal` for several copies."""
    shape = check_shape((copies * pattern.vector_rows * pattern.vector_length, copies * pattern.shape[1]))
    number = torch.arange(copies, device=pattern.device)[:, None]  # (copies, 1)
    column_shift = (number * pattern.shape[1]).to(torch.int32)  # (copies, 1)
    slot_shift, vectors = number * padded.col_indices.shape[0], pattern.vectors
    offsets = torch.cat(
        ((pattern.row_offsets[:-1] + number * vectors).flatten(), number.new_tensor([copies * vectors]))
    )  # (copies * R + 1,)
    columns = (pattern.col_indices + column_shift).flatten()
    repeated = Pattern(shape, pattern.vector_length, offsets, columns)._trust()
    columns = torch.where(padded.col_indices < 0, -1, padded.col_indices + column_shift).flatten()
    row_start, row_end = padded.row_start + slot_shift, padded.row_end + slot_shift  # (copies, R)
    return BlockDiagonal(repeated, row_start.flatten(), row_end.flatten(), columns)


def block_diagonal_matrix(
    diagonal: BlockDiagonal, stride: int, values: Tensor, scale: Tensor, bits: int, signed: bool
) -> SRBCRS:
    """Return quantized values on a block-diagonal pattern as a matrix.

    Parameters
    ----------
    diagonal : BlockDiagonal
        Structure.
    stride : int
        Padding unit of the values, in vectors.
    values : Tensor, shape (copies * blocks, V, width)
        Integers in storage form.
    scale : Tensor, shape (rows, 1)
        Row scales.
    bits, signed : int, bool
        Integers of `values`.
    """
    pattern = diagonal.pattern
    matrix = SRBCRS(
        diagonal.row_start, diagonal.row_end, diagonal.col_indices, values, shape=pattern.shape,
        vector_length=pattern.vector_length, bits=bits, signed=signed, stride=stride, scale=scale,
    )  # fmt: skip
    matrix._cache["pattern"] = pattern
    return matrix._trust()
