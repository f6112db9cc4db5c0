"""Checkpoints of e4m3 weights with 128 x 128 scales, ``quant_method`` ``"fp8"``: those of DeepSeek-V3 and Qwen3-FP8.

A layer has ``weight``, float8_e4m3fn (N, K), and ``weight_scale_inv``, (ceil(N / 128), ceil(K / 128)): the scale that
the codes are multiplied by, despite its name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from magicube_cutlass.hooks.checkpoint import load_layers, quantization_config
from magicube_cutlass.nn.config import QuantConfig
from magicube_cutlass.nn.report import ConversionReport
from magicube_cutlass.quantization.float_tensor import TILE, ScaledFloatTensor

__all__ = ["load_fp8"]


def _weight(tensors: Mapping[str, Tensor], name: str) -> ScaledFloatTensor:
    """The weight of a layer."""
    codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"]
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{name}.weight must be torch.float8_e4m3fn, got {codes.dtype}")
    try:
        return ScaledFloatTensor.from_codes(codes, scale.float(), "e4m3_b128")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}.weight_scale_inv does not fit: {error}") from error


def load_fp8(model: nn.Module, folder: str | os.PathLike[str], *, act: str | None = None) -> ConversionReport:
    """Load a block-scaled fp8 checkpoint into a model of float layers, in place, without requantizing.

    Layers with a ``weight_scale_inv`` become :class:`magicube_cutlass.nn.QuantLinear` layers of ``"e4m3_b128"``; the
    others keep their float weights.

    Parameters
    ----------
    model : nn.Module
        Of the architecture of the checkpoint, also on the meta device. Linear layers of their own: experts that a model
        stacks into one tensor are not split.
    folder : str or path-like
        With ``config.json`` and safetensors files.
    act : str, optional
        ``"e4m3_g128"``, ``"e4m3"`` or ``"none"``. Default: ``"e4m3_g128"``, which is what the checkpoint's
        ``activation_scheme`` ``"dynamic"`` says.

    Returns
    -------
    ConversionReport
        Each module with a weight, quantized or left.

    Raises
    ------
    ValueError
        If the checkpoint has another format, or does not fit the model.
    """
    config = quantization_config(folder)
    found = config.get("quant_method"), config.get("weight_block_size"), config.get("activation_scheme", "dynamic")
    if found != ("fp8", [TILE, TILE], "dynamic"):
        raise ValueError(
            "quantization_config of config.json must have quant_method 'fp8', weight_block_size [128, 128] and "
            f"activation_scheme 'dynamic', got {found[0]!r}, {found[1]} and {found[2]!r}"
        )
    names = ("weight_scale_inv", "weight")
    return load_layers(model, folder, _weight, names, QuantConfig("e4m3_b128", act=act or ""))
