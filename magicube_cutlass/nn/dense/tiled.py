"""Weights with 128 x 128 scales on a GPU: what multiplies by them."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.jit.device import current_arch
from magicube_cutlass.nn.dense.blockwise import blockwise_gemm, refusal
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor

# What may run on a GPU with scales of 128: of "few_rows" (float rows), "scaled_gemm" (rows with a scale each),
# "blockwise" (torch._scaled_mm; rows with a scale per 128 values) and "encode" (the kernel that quantizes such rows).
# They have not run on a GPU with these scales, and run where they are named here; otherwise torch quantizes the rows
# and multiplies by the dequantized weight.
TILED_BACKENDS: frozenset[str] = frozenset()


def is_tiled(weight: object) -> bool:
    """Return whether a weight has a scale per tile of 128 x 128.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> is_tiled(mc.quantize(torch.ones(2, 64), dtype="e4m3_b128"))
    True
    """
    return isinstance(weight, ScaledFloatTensor) and isinstance(weight.block, tuple)


def tiled_backend(weight: ScaledFloatTensor, act: str) -> tuple[str, str]:
    """Return the backend of a tile-scaled weight on a GPU, and the reason if it is torch.

    Parameters
    ----------
    weight : ScaledFloatTensor, shape (M, K)
        Weight.
    act : str
        As for :class:`magicube_cutlass.nn.QuantConfig`.
    """
    wanted = {"none": "few_rows", "e4m3": "scaled_gemm"}.get(act, "blockwise")
    reason = ""
    if wanted == "few_rows" and current_arch() != "sm_90a":
        reason = "no kernel for this format here"
    elif wanted == "blockwise":
        reason = refusal(int(weight.shape[0]), int(weight.shape[1]))
    if not reason and wanted not in TILED_BACKENDS:
        reason = f"{wanted} has not run with 128 x 128 scales, see TILED_BACKENDS"
    return ("torch", reason) if reason else (wanted, "")


def blockwise_product(
    rows: ScaledFloatTensor, weight: ScaledFloatTensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return ``rows W^T + bias`` (N, M) by torch's blockwise-scaled product.

    Parameters
    ----------
    rows : ScaledFloatTensor, shape (N, K)
        e4m3_g128.
    weight : ScaledFloatTensor, shape (M, K)
        e4m3_b128.
    bias : Tensor, shape (M,), optional
        Float.
    dtype : torch.dtype
        Of the result.
    """
    return blockwise_gemm(rows.data, rows.scale, weight.data, weight.scale, bias, dtype)
