"""The few-rows product: float rows times a packed weight."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.few_rows.formats import ACTS, PackedWeight
from cute_kernels.few_rows.product import FewRowsConfig, aligned_rows, choose_few_rows, launch_few_rows
from cute_kernels.jit.device import device_of, num_sms

__all__ = ["few_rows_product"]


def few_rows_product(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    row_scale: Tensor | None = None,
    out: Tensor | None = None,
    config: FewRowsConfig | None = None,
) -> Tensor:
    """Multiply rows by a packed weight: ``D = row_scale X W^T + bias``.

    Up to 64 rows read the weight once; more do so per 64.

    Parameters
    ----------
    x : Tensor, shape (M, K)
        float16 or bfloat16 on a GPU of sm_90a.
    weight : PackedWeight, shape (N, K)
        Packed for the dtype of `x`.
    bias : Tensor, shape (N,), optional
        float32.
    row_scale : Tensor, shape (M,) or (), optional
        float32: multiplies the rows of the product.
    out : Tensor, shape (M, N), optional
        float32, float16 or bfloat16 with contiguous rows. Default: a new one of the dtype of `x`.
    config : FewRowsConfig, optional
        Kernel config; overrides kernel selection.

    Returns
    -------
    Tensor, shape (M, N)

    Raises
    ------
    TypeError
        If the dtype of `x` is not the one that the weight is packed for.
    ValueError
        If shapes do not match.
    """
    (n, k), act = weight.shape, ACTS.get(x.dtype)
    if act != weight.act:
        raise TypeError(f"x must be {weight.act} to match the weight, got {x.dtype}")
    if x.ndim != 2 or x.shape[1] != k:
        raise ValueError(f"x must have shape (M, {k}) to match the weight, got {tuple(x.shape)}")
    m = x.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if m == 0 or n == 0:
        return out
    x = aligned_rows(x)
    with device_of(x):
        if config is None:
            name = str(out.dtype).removeprefix("torch.")
            config = choose_few_rows(weight.format.name, m, n, k, act, name, num_sms(x.device.index))
        launch_few_rows(config, x, weight, out, bias, row_scale)
    return out
