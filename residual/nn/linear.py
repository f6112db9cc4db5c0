"""``residual.linear``: the product of :func:`residual.matmul` in the form that layers use."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from residual.operand.prepared import PreparedOperand
from residual.options import MatmulOptions, check_options
from residual.torch_op import product


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    prepared: PreparedOperand | None = None,
    **options: Unpack[MatmulOptions],
) -> Tensor:
    """Return ``y = x W^T + bias``, as ``torch.nn.functional.linear``, the product as :func:`residual.matmul` has it.

    Parameters
    ----------
    x : Tensor, shape (..., K)
        A float dtype.
    weight : Tensor, shape (N, K)
        Of the dtype and on the device of `x`.
    bias : Tensor, shape (N,), optional
        Added to the product.
    prepared : PreparedOperand, optional
        :func:`residual.prepare` of ``weight.t()``.
    **options
        As in :func:`residual.matmul`; `tol` bounds the error of ``x W^T`` with all leading dimensions of `x` as the
        rows of one matrix. Default of `out_dtype`: that of `x`.

    Returns
    -------
    Tensor, shape (..., N)
        Of the dtype of `x`, with a straight-through gradient for `x`, `weight` and `bias`.

    Raises
    ------
    TypeError, ValueError, ToleranceError
        As :func:`residual.matmul`.

    Examples
    --------
    >>> import torch
    >>> linear(torch.ones(2, 3), torch.ones(4, 3), tol=1e-3).shape
    torch.Size([2, 4])
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(
            f"x must be a floating-point tensor, got {x.dtype if isinstance(x, Tensor) else type(x).__name__}"
        )
    if x.dim() == 0 or weight.dim() != 2:
        raise ValueError(f"x must have dimensions and weight 2 of them, got {x.dim()} and {weight.dim()}")
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"weight must have as many columns as x, got {weight.shape[1]} and {x.shape[-1]}")
    if weight.dtype != x.dtype:
        raise TypeError(f"weight must be of the dtype of x, got {weight.dtype} and {x.dtype}")
    options.setdefault("out_dtype", x.dtype)
    chosen = check_options(**options)
    rows = x.reshape(-1, x.shape[-1])  # (M, K)
    columns = weight.t()  # (K, N)
    if prepared is not None and not torch.compiler.is_compiling():
        prepared.check_current(columns)
    y = product(rows, columns, prepared, chosen)  # (M, N)
    y = y if bias is None else y + bias
    return y.view(*x.shape[:-1], weight.shape[0])
