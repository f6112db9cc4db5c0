"""``residual.conv2d``: a convolution as one matrix product over patches."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from residual.nn.linear import linear
from residual.operand.prepared import PreparedOperand
from residual.options import MatmulOptions

Pair = int | tuple[int, int]


def _pair(x: Pair) -> tuple[int, int]:
    return (x, x) if isinstance(x, int) else (x[0], x[1])


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    prepared: PreparedOperand | None = None,
    **options: Unpack[MatmulOptions],
) -> Tensor:
    """Return a convolution without groups: ``unfold(x)`` times the filters, by :func:`residual.matmul`.

    Parameters
    ----------
    x : Tensor, shape (B, C, H, W)
        A float dtype.
    weight : Tensor, shape (O, C, kh, kw)
        Of the dtype and on the device of `x`.
    bias : Tensor, shape (O,), optional
        Added to the product.
    stride, padding, dilation : int or tuple of int
        One number, or one per direction.
    prepared : PreparedOperand, optional
        :func:`residual.prepare` of ``weight.flatten(1).t()``.
    **options
        As in :func:`residual.matmul`; `tol` bounds the relative Frobenius error of the whole output without bias.

    Returns
    -------
    Tensor, shape (B, O, H', W')
        Of the dtype of `x`, a view whose channels are contiguous, with a straight-through gradient.

    Raises
    ------
    TypeError, ValueError, ToleranceError
        As :func:`residual.matmul`; ``ValueError`` for shapes that do not match.

    Examples
    --------
    >>> conv2d(torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3), tol=1e-3).shape
    torch.Size([1, 3, 3, 3])
    """
    if x.dim() != 4 or weight.dim() != 4:
        raise ValueError(f"x and weight must have 4 dimensions, got {x.dim()} and {weight.dim()}")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"weight must have as many channels as x, got {weight.shape[1]} and {x.shape[1]}")
    kernel = (weight.shape[2], weight.shape[3])
    steps, pads, gaps = _pair(stride), _pair(padding), _pair(dilation)
    size = [(x.shape[2 + i] + 2 * pads[i] - gaps[i] * (kernel[i] - 1) - 1) // steps[i] + 1 for i in (0, 1)]  # (H', W')
    if min(size) < 1:
        raise ValueError(f"x must be as large as the filter, got {tuple(x.shape[2:])} and {kernel} with padding {pads}")
    patches = torch.nn.functional.unfold(x, kernel, gaps, pads, steps)  # (B, C kh kw, H' W')
    y = linear(patches.mT, weight.flatten(1), bias, prepared=prepared, **options)  # (B, H' W', O)
    return y.mT.reshape(x.shape[0], weight.shape[0], size[0], size[1])
