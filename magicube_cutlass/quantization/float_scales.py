"""Scales of low-precision floats from the amax of the values that share one."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels import floats
from cute_kernels.float_format import FloatFormat

Block = int | tuple[int, int] | None


def largest_of(x: Tensor, axis: int | None, block: Block) -> Tensor:
    """Amax of the elements that share a scale; 0 for none."""
    magnitudes = x.abs()
    if block is None:
        if axis is None:
            return magnitudes.amax() if x.numel() else x.new_zeros(())
        return magnitudes.amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros((*x.shape[:-1], 1))
    width = block if isinstance(block, int) else block[1]
    if isinstance(block, tuple):
        padded = torch.nn.functional.pad(magnitudes, (0, 0, 0, -x.shape[-2] % block[0]))
        rows = padded.shape[-2] // block[0]
        magnitudes = padded.unflatten(-2, (rows, block[0])).amax(-2) if rows else padded
    padded = torch.nn.functional.pad(magnitudes, (0, -x.shape[-1] % width))
    columns = padded.shape[-1] // width
    return padded.unflatten(-1, (columns, width)).amax(-1) if columns else padded


def float_scales(largest: Tensor, target: FloatFormat) -> Tensor:
    """``largest / target.largest`` in float32: 1 for zero, NaN for non-finite values, never rounded to zero."""
    scale = (largest.double() / target.largest).to(torch.float32)
    scale = scale.clamp(min=torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps)
    scale = torch.where(largest == 0, 1.0, scale)
    return torch.where(scale.isfinite(), scale, torch.nan)


def power_scales(largest: Tensor, target: FloatFormat) -> Tensor:
    """Codes of ``2^(floor(log2 largest) - exponent of the largest value)``; of 1 for zero."""
    exponent = torch.frexp(largest.double()).exponent - 1 - target.largest_exponent
    codes = torch.where(largest == 0, 127, exponent.clamp(-127, 127) + 127)
    return torch.where(largest.isfinite(), codes, 255).to(torch.uint8)


def nested_scales(largest: Tensor, target: FloatFormat, per_row: bool = False) -> tuple[Tensor, Tensor]:
    """e4m3 codes of ``largest / (tensor scale * target.largest)``, and the tensor scale, () or of each row."""
    finite = torch.where(largest.isfinite(), largest, 0)
    if per_row:
        top = finite.amax(-1, keepdim=True) if finite.shape[-1] else finite.new_zeros((*finite.shape[:-1], 1))
    else:
        top = finite.amax() if finite.numel() else finite.new_zeros(())
    inner = floats.FORMATS["e4m3"]
    tensor_scale = float_scales(top / inner.largest, target)
    codes = floats.encode(largest.double() / (tensor_scale.double() * target.largest), "e4m3", saturate=True)
    codes = torch.where((codes == 0) & (largest > 0), 1, codes)
    codes = torch.where(largest == 0, int(floats.encode(torch.ones((), device="cpu"), "e4m3")), codes)
    return torch.where(largest.isfinite(), codes, 0x7F).to(torch.uint8), tensor_scale
