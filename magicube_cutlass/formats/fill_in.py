"""How many zeros vectors of a length would store with given elements, and which length stores the fewest bytes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from magicube_cutlass.checks import VECTOR_LENGTHS
from magicube_cutlass.formats.pattern import Pattern

_MOST = 2.0  # stored elements by given ones, beyond which a conversion warns
_INDEX_BYTES = 4


def stored_vectors(rows: Tensor, cols: Tensor, columns: int, vector_length: int) -> int:
    """Return how many vectors of this length hold the elements at `rows` and `cols`.

    Examples
    --------
    >>> diagonal = torch.arange(8)
    >>> [stored_vectors(diagonal, diagonal, 8, v) for v in (1, 8)]
    [8, 8]
    """
    return int(torch.unique(rows // vector_length * columns + cols).numel())


def best_length(rows: Tensor, cols: Tensor, columns: int, bits: int) -> int:
    """Return the vector length of the fewest bytes for these elements: of values of so many bits and of indices."""
    sizes = {v: stored_vectors(rows, cols, columns, v) * (_INDEX_BYTES + v * bits / 8) for v in VECTOR_LENGTHS[:4]}
    return min(sizes, key=sizes.__getitem__)


def warn_of_fill_in(rows: Tensor, cols: Tensor, pattern: Pattern, bits: int) -> None:
    """Warn where the vectors of a pattern store more than twice the elements that a sparse input has."""
    m, k = pattern.shape
    given = stored_vectors(rows, cols, k, 1)
    if pattern.nnz <= _MOST * given or not given:
        return
    best = best_length(rows, cols, k, bits)
    if best == pattern.vector_length:
        return
    size = m * k
    suggested = stored_vectors(rows, cols, k, best) * best / size
    warnings.warn(
        f"vectors of {pattern.vector_length} fill in zeros: a density of {given / size:.3g} becomes "
        f"{pattern.nnz / size:.3g}; vector_length={best} stores {suggested:.3g} and the fewest bytes",
        UserWarning,
        stacklevel=5,
    )


def exact_pattern(rows: Tensor, cols: Tensor, shape: tuple[int, int]) -> Pattern:
    """Return the pattern of exactly these elements, in vectors as long as that allows, at most 8.

    Examples
    --------
    >>> rows, cols = torch.arange(8), torch.zeros(8, dtype=torch.int64)
    >>> exact_pattern(rows, cols, (8, 4)).vector_length, exact_pattern(rows[:7], cols[:7], (8, 4)).vector_length
    (8, 1)
    """
    given = stored_vectors(rows, cols, shape[1], 1)
    for length in (8, 4, 2):
        pattern = Pattern.from_indices(rows, cols, shape, length)
        if pattern.nnz == given:
            return pattern
    return Pattern.from_indices(rows, cols, shape, 1)


def mask_pattern(mask: Any) -> Pattern | None:
    """Return the pattern of a bool tensor or of a ``scipy.sparse`` matrix or array; None for anything else.

    Explicit zeros of a scipy matrix count as elements.

    Raises
    ------
    TypeError
        For a tensor of another dtype.
    ValueError
        For another number of dimensions than 2.
    """
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be bool, got a tensor of {mask.dtype}; use mask != 0")
        if mask.ndim != 2:
            raise ValueError(f"mask must have 2 dimensions, got {mask.ndim}")
        rows, cols = mask.nonzero(as_tuple=True)
        return exact_pattern(rows, cols, (mask.shape[0], mask.shape[1]))
    if not (hasattr(mask, "tocoo") and hasattr(mask, "nnz")):  # without an import of scipy
        return None
    coo = mask.tocoo()
    if coo.ndim != 2:
        raise ValueError(f"mask must have 2 dimensions, got {coo.ndim}")
    rows, cols = (torch.as_tensor(each.copy(), device="cpu").long() for each in (coo.row, coo.col))
    return exact_pattern(rows, cols, (coo.shape[0], coo.shape[1]))
