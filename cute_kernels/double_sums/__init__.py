"""Sums in float64 over the entries of a float32 matrix."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RowSums(NamedTuple):
    """Sums over the columns of a matrix X (M, K), in float64."""

    products: Tensor  # (M, p): X V
    bounds: Tensor  # (M,): |X| n
    squares: Tensor  # (M,)
