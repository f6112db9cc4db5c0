"""Several sparse matrices as one: blocks on a diagonal, so that one launch multiplies them all.

``diag(P_1, ..., P_n) [V_1; ...; V_n] = [P_1 V_1; ...; P_n V_n]``.  The dense operands are stacked by a view, and so are
SR-BCRS values on one pattern, since vector rows follow one another; only column indices are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from magicube_cutlass.checks import check_shape
from magicube_cutlass.formats.pattern import Padded, Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS


class Stack(NamedTuple):
    """``copies`` of a padded pattern on a diagonal, and what kernels want to know of it."""

    pattern: Pattern  # (copies * R * V, copies * K)
    row_start: Tensor  # int64 (copies * R,)
    row_end: Tensor
    col_indices: Tensor  # int32 (copies * padded vectors,), -1 in the padding


def whole_rows(pattern: Pattern) -> Pattern:
    """``pattern`` with as many rows as its vector rows have, the new ones of the same vectors; cached."""
    v = pattern.vector_length
    if pattern.shape[0] % v == 0:
        return pattern
    if "whole" not in pattern._cache:
        shape = (pattern.vector_rows * v, pattern.shape[1])
        pattern._cache["whole"] = Pattern(shape, v, pattern.row_offsets, pattern.col_indices)
    whole: Pattern = pattern._cache["whole"]
    return whole


def block_diagonal(patterns: Sequence[Pattern]) -> Pattern:
    """The pattern with ``patterns`` on its diagonal, each filled up to whole vector rows.

    Requires at least one pattern, and one vector length and device.  Raises ``ValueError`` beyond 2**31 - 1 columns.
    """
    offsets, columns, rows, wide, vectors = [], [], 0, 0, 0
    for pattern in patterns:
        offsets.append(pattern.row_offsets[:-1] + vectors)
        columns.append(pattern.col_indices + wide)
        rows, wide = rows + pattern.vector_rows, wide + pattern.shape[1]
        vectors += pattern.vectors
    first = patterns[0]
    offsets.append(first.row_offsets.new_tensor([vectors]))
    return Pattern((rows * first.vector_length, wide), first.vector_length, torch.cat(offsets), torch.cat(columns))


def stack(pattern: Pattern, stride: int, copies: int) -> Stack:
    """``copies`` of ``pattern`` on a diagonal, padded to ``stride``; cached on it.

    The copies are not padded anew: their rows and slots repeat the pattern's own.  A single one is the pattern itself.
    """
    key = ("stack", stride, copies)
    if key not in pattern._cache:
        padded = pattern.padded(stride)
        if copies == 1:
            found = Stack(pattern, padded.row_start, padded.row_end, padded.col_indices)
        else:
            found = _copied(pattern, padded, copies)
        pattern._cache[key] = found
    result: Stack = pattern._cache[key]
    return result


def _copied(pattern: Pattern, padded: Padded, copies: int) -> Stack:
    shape = check_shape((copies * pattern.vector_rows * pattern.vector_length, copies * pattern.shape[1]))
    number = torch.arange(copies, device=pattern.device)[:, None]  # (copies, 1)
    right = (number * pattern.shape[1]).to(torch.int32)
    down, vectors = number * padded.col_indices.shape[0], pattern.vectors
    offsets = torch.cat(
        ((pattern.row_offsets[:-1] + number * vectors).flatten(), number.new_tensor([copies * vectors]))
    )
    wide = Pattern(shape, pattern.vector_length, offsets, (pattern.col_indices + right).flatten())
    columns = torch.where(padded.col_indices < 0, -1, padded.col_indices + right).flatten()
    return Stack(wide, (padded.row_start + down).flatten(), (padded.row_end + down).flatten(), columns)


def stacked_matrix(found: Stack, stride: int, values: Tensor, scale: Tensor, bits: int, signed: bool) -> SRBCRS:
    """Quantized values ``(copies * blocks, V, width)`` on ``found``; ``scale``: ``(rows, 1)``."""
    pattern = found.pattern
    matrix = SRBCRS(
        found.row_start, found.row_end, found.col_indices, values, shape=pattern.shape,
        vector_length=pattern.vector_length, bits=bits, signed=signed, stride=stride, scale=scale,
    )  # fmt: skip
    matrix._cache["pattern"] = pattern
    return matrix
