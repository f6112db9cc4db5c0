"""What a checkpoint says of its quantized layers, and empty layers to load it into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from magicube_cutlass.nn import linear_op
from magicube_cutlass.nn.config import QuantConfig, SparseQuantConfig
from magicube_cutlass.nn.dense import linear_op as linear_op_of_dense
from magicube_cutlass.nn.dense.linear import QuantLinear
from magicube_cutlass.nn.linear import SparseQuantLinear
from magicube_cutlass.nn.weight_modules import LayerConfig

_Record = dict[str, Any]


def config_to_dict(config: LayerConfig | None) -> _Record | None:
    """Return a config as JSON holds it.

    Examples
    --------
    >>> config_to_dict(QuantConfig("int4", 32))["group_size"]
    32
    """
    if config is None:
        return None
    return {"layer": "sparse" if isinstance(config, SparseQuantConfig) else "dense", **asdict(config)}


def config_from_dict(stored: object) -> LayerConfig | None:
    """Return the config of :func:`config_to_dict`; a config or None is returned as it is.

    Raises
    ------
    ValueError
        For anything else.
    """
    if stored is None or isinstance(stored, (QuantConfig, SparseQuantConfig)):
        return stored
    if not isinstance(stored, Mapping):
        raise ValueError(f"plan must hold configs or None, got {stored!r}")
    fields = dict(stored)
    kind = fields.pop("layer", "dense")
    try:
        return SparseQuantConfig(**fields) if kind == "sparse" else QuantConfig(**fields)
    except TypeError as error:
        raise ValueError(f"plan must hold the options of a layer, got {stored!r}") from error


def stored_config(layer: QuantLinear | SparseQuantLinear) -> LayerConfig:
    """Return the options that a file holds of a layer.

    Examples
    --------
    >>> stored_config(QuantLinear(8, 8, activation="relu")).activation
    'relu'
    """
    return layer.stored_config if isinstance(layer, QuantLinear) else layer.config


def record(layer: QuantLinear | SparseQuantLinear) -> _Record:
    """Return what :func:`empty_layer` needs of a frozen layer: config, sizes, shapes and dtypes of its buffers."""
    tensors = {
        name: [list(each.shape), str(each.dtype).removeprefix("torch.")]
        for name, each in layer._buffers.items()
        if each is not None
    }
    return {
        "config": config_to_dict(stored_config(layer)),
        "shape": [layer.out_features, layer.in_features],
        "bias": layer.bias is not None,
        "tensors": tensors,
    }


def empty_layer(stored: _Record, dtype: torch.dtype, device: torch.device | str) -> QuantLinear | SparseQuantLinear:
    """Return a frozen layer with empty buffers, to be loaded.

    Raises
    ------
    ValueError
        For a record of another form.
    """
    config = config_from_dict(stored["config"])
    m, k = stored["shape"]
    cls = SparseQuantLinear if isinstance(config, SparseQuantConfig) else QuantLinear
    layer: Any = cls.__new__(cls)
    nn.Module.__init__(layer)
    layer.out_features, layer.in_features, layer.config = m, k, config
    layer.register_parameter("weight", None)
    bias = nn.Parameter(torch.empty(m, dtype=dtype, device=device), requires_grad=False) if stored["bias"] else None
    layer.register_parameter("bias", bias)
    names: tuple[str, ...] = ("row_offsets", "col_indices", "act_scale", "values", "scale")
    if isinstance(config, QuantConfig):
        names = ("qweight", "scale", "minimum", "tensor_scale", "act_scale", "smooth")
        layer._number = linear_op_of_dense.register_layer(layer)
    else:
        layer._number = linear_op.register(layer)
    for name in names:
        found = stored["tensors"].get(name)
        made = None if found is None else torch.empty(found[0], dtype=getattr(torch, found[1]), device=device)
        layer.register_buffer(name, made)
    layer._forget()
    made_layer: QuantLinear | SparseQuantLinear = layer
    made_layer.training = False
    return made_layer
