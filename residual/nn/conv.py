"""``residual.conv2d``: a convolution as one matrix product over patches."""

from __future__ import annotations

import torch
from torch import Tensor

from residual.matmul import OnFailure
from residual.nn.linear import linear
from residual.operand.operand import Prepared

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
    tol: float | None = None,
    mode: str = "auto",
    bits: int | None = None,
    prepared: Prepared | None = None,
    seed: int | None = None,
    on_failure: OnFailure = "raise",
) -> Tensor:
    """As ``torch.nn.functional.conv2d`` without groups: ``unfold(x)`` times the filters, by :func:`matmul`.

    Args:
        x: (B, C, H, W), a float dtype.
        weight: (O, C, kh, kw), of the dtype and on the device of ``x``.
        bias: (O,), or None.
        stride, padding, dilation: a number, or one for each direction.
        prepared: :func:`prepare` of ``weight.flatten(1).t()``.
        tol, mode, bits, seed, on_failure: as in :func:`residual.matmul`; ``tol`` bounds the relative Frobenius error of
            the whole output without bias.

    Returns:
        (B, O, H', W') of the dtype of ``x``, a view whose channels are contiguous in memory, with a straight-through
        gradient.

    Raises:
        TypeError, ValueError, ToleranceError: as :func:`residual.matmul`; ``ValueError`` for shapes that do not match.
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
    y = linear(
        patches.mT, weight.flatten(1), bias, tol=tol, mode=mode, bits=bits, prepared=prepared, seed=seed,
        on_failure=on_failure,
    )  # fmt: skip
    return y.mT.reshape(x.shape[0], weight.shape[0], size[0], size[1])
