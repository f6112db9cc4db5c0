"""Rows as low-precision floats on a GPU by one launch, where a kernel makes the format."""

from __future__ import annotations

from torch import Tensor

from cute_kernels.few_rows.encode_e4m3 import (
    ENCODE_ARCHES,
    ENCODED,
    encode_e4m3,
    encode_e4m3_groups,
    encode_mxfp8,
    encode_nvfp4,
)
from cute_kernels.jit.device import current_arch
from cute_kernels.scaled_gemm.config import OperandFormat
from cute_kernels.scaled_gemm.dequantize import folds
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor
from magicube_cutlass.quantization.group_tensor import GroupTensor


def encodes(x: Tensor, act: str) -> bool:
    """Return whether layers encode these rows by :func:`encoded`."""
    if act not in ("e4m3", "e4m3_g128", "mxfp8", "nvfp4") or x.dtype not in ENCODED or x.numel() == 0:
        return False
    return x.device.type == "cuda" and current_arch() in ENCODE_ARCHES


def folds_scales(weight: GroupTensor | ScaledFloatTensor, act: str) -> bool:
    """Return whether a layer's product of more rows than 64 has block scales folded into e4m3 values."""
    rows = {"e4m3": OperandFormat("e4m3"), "mxfp8": OperandFormat("e4m3", 32, "ue8m0")}.get(act)
    if rows is None or not isinstance(weight, ScaledFloatTensor) or current_arch() != "sm_90a":
        return False
    return folds(rows, weight.operand().format)


def encoded(x: Tensor, act: str, act_scale: Tensor | None, for_torch: bool = True) -> ScaledFloatTensor:
    """Return the quantized rows of `x`, bit for bit those of ``quantize_floats``.

    Parameters
    ----------
    x : Tensor, shape (N, K)
        Rows on a GPU.
    act : str
        ``"e4m3"``, ``"e4m3_g128"``, ``"mxfp8"`` or ``"nvfp4"``.
    act_scale : Tensor or None, shape ()
        Given scale of e4m3; None: one per row.
    for_torch : bool, default True
        Scales of 128 values lie in memory as ``torch._scaled_mm`` reads them, not as the library's kernels do.
    """
    if act == "mxfp8":
        codes, scale = encode_mxfp8(x)
        return ScaledFloatTensor(codes, x.shape[1], "e4m3", scale, "ue8m0", 32)
    if act == "nvfp4":
        codes, scale, row_scale = encode_nvfp4(x)
        return ScaledFloatTensor(codes, x.shape[1], "e2m1", scale, "e4m3", 16, row_scale)
    if act == "e4m3_g128":
        codes, scale = encode_e4m3_groups(x, for_torch)
        return ScaledFloatTensor(codes, x.shape[1], "e4m3", scale, block=128)
    codes, scale = encode_e4m3(x, None if act_scale is None else act_scale.float().reshape(()))
    return ScaledFloatTensor(codes, x.shape[1], "e4m3", scale)
