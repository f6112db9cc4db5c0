"""Slices with inf or NaN: computed in float arithmetic and put into a product that took them for zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from residual.operand.ieee import float_product
from residual.operand.operand import Operand


def _real(x: Tensor) -> Tensor:
    """Return the given numbers in float32, or float64 if they have that precision."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def fill(product: Tensor, left: Operand, right: Operand) -> Tensor:
    """Return `product` (M, N) with the rows of A and the columns of B that hold inf or NaN as IEEE arithmetic has them.

    Such a row is ``A[i, :] B`` in float32 (float64 for float64 input) with all that B holds, such a column likewise.
    """
    if left.nonfinite is not None:
        rows = _real(left.given[left.nonfinite])  # (I, K)
        columns = _real(right.given).to(rows.dtype)  # (N, K)
        product[left.nonfinite] = float_product(rows, columns.mT).to(product.dtype)  # (I, N)
    if right.nonfinite is not None:
        columns = _real(right.given[right.nonfinite])  # (J, K)
        rows = _real(left.given).to(columns.dtype)  # (M, K)
        product[:, right.nonfinite] = float_product(rows, columns.mT).to(product.dtype)  # (M, J)
    return product
