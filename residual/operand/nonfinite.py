"""Lines with inf or NaN: computed in float arithmetic and put into a product that took them for zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from residual.operand.ieee import ieee
from residual.operand.operand import Operand


def _real(x: Tensor) -> Tensor:
    """The given numbers in float32, or float64 where they have that precision."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def fill(product: Tensor, left: Operand, right: Operand) -> Tensor:
    """``product`` (M, N) with the rows of A and the columns of B that hold inf or NaN as IEEE arithmetic gives them.

    Such a row is ``A[i, :] B`` in float32 (float64 for float64 input) with all that B holds, such a column likewise.
    """
    if left.broken is None and right.broken is None:
        return product
    with ieee():
        if left.broken is not None:
            rows = _real(left.given[left.broken])  # (I, K)
            columns = _real(right.given).to(rows.dtype)  # (N, K)
            product[left.broken] = (rows @ columns.mT).to(product.dtype)  # (I, N)
        if right.broken is not None:
            columns = _real(right.given[right.broken])  # (J, K)
            rows = _real(left.given).to(columns.dtype)  # (M, K)
            product[:, right.broken] = (rows @ columns.mT).to(product.dtype)  # (M, J)
    return product
