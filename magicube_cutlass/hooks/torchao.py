"""Configs for torchao: ``quantize_(model, MagicubeConfig(...))``. Importing this module registers them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from magicube_cutlass.nn.config import QuantConfig
from magicube_cutlass.nn.weight_modules import LayerConfig, kind_of_module, make_layer, reason

__all__ = ["MagicubeConfig"]


@dataclass
class MagicubeConfig(AOBaseConfig):
    """What torchao puts in the place of a linear layer.

    Parameters
    ----------
    config : QuantConfig or SparseQuantConfig, optional
        Options of the layer. Default: int8.
    freeze : bool, default True
        Drop the float weight.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> from torchao.quantization import quantize_
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    >>> quantize_(model, MagicubeConfig(mc.nn.QuantConfig("int4", group_size=32)))
    >>> model[0].frozen
    True
    """

    config: LayerConfig = field(default_factory=QuantConfig)
    freeze: bool = True


@register_quantize_module_handler(MagicubeConfig)
def _replace(module: nn.Module, config: MagicubeConfig) -> nn.Module:
    """The quantized layer for a module; the module itself if it is no linear layer."""
    if kind_of_module(module) != "linear" or reason(module, config.config):
        return module
    made = make_layer(module, config.config)
    return made.freeze() if config.freeze else made  # type: ignore[operator]
