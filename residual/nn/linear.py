"""``residual.linear``: the product of :func:`residual.matmul` in the form that layers use."""

from __future__ import annotations

from torch import Tensor

from residual.matmul import OnFailure
from residual.operand.operand import Prepared
from residual.torch_op import product


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tol: float | None = None,
    mode: str = "auto",
    bits: int | None = None,
    prepared: Prepared | None = None,
    seed: int | None = None,
    on_failure: OnFailure = "raise",
) -> Tensor:
    """``y = x W^T + bias``, as ``torch.nn.functional.linear``, the product as :func:`residual.matmul` gives it.

    Args:
        x: (..., K), a float dtype.
        weight: (N, K), of the dtype and on the device of ``x``.
        bias: (N,), or None.
        prepared: :func:`prepare` of ``weight.t()``.
        tol, mode, bits, seed, on_failure: as in :func:`residual.matmul`; ``tol`` bounds the error of ``x W^T`` with all
            leading dimensions of ``x`` as the rows of one matrix.

    Returns:
        y (..., N) of the dtype of ``x``, with a straight-through gradient for ``x``, ``weight`` and ``bias``.

    Raises:
        TypeError, ValueError, ToleranceError: as :func:`residual.matmul`.
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
    rows = x.reshape(-1, x.shape[-1])  # (M, K)
    if prepared is not None:
        prepared.require(weight.t())
    slot = -1 if prepared is None else prepared.slot
    y = product(rows, weight.t(), slot, tol, mode, bits, x.dtype, on_failure, seed)  # (M, N)
    y = y if bias is None else y + bias
    return y.view(*x.shape[:-1], weight.shape[0])
