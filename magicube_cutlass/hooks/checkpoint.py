"""Layers of a folder of safetensors files whose weights are quantized already."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from magicube_cutlass.nn.config import QuantConfig
from magicube_cutlass.nn.dense.linear import QuantLinear
from magicube_cutlass.nn.dense.product import QuantWeight
from magicube_cutlass.nn.report import ConversionReport, ConversionRow
from magicube_cutlass.nn.weight_modules import has_weight, kind_of_module, set_module, weight_shape


def quantization_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a folder's ``config.json``; empty without one."""
    found = json.loads((Path(folder) / "config.json").read_text()).get("quantization_config")
    return dict(found or {})


def load_layers(
    model: nn.Module,
    folder: str | os.PathLike[str],
    weight_of: Callable[[Mapping[str, Tensor], str], QuantWeight],
    suffixes: Sequence[str],
    config: QuantConfig,
) -> ConversionReport:
    """Load a folder's tensors into a model, in place; quantized weights become :class:`QuantLinear` layers.

    Parameters
    ----------
    model : nn.Module
        Of the architecture of the checkpoint, also on the meta device.
    folder : str or path-like
        With safetensors files.
    weight_of : callable
        Weight of the layer of a name, of the file's tensors.
    suffixes : sequence of str
        Tensors of a quantized layer; the first is the scale, which only these have.
    config : QuantConfig
        Its `act` is taken.

    Returns
    -------
    ConversionReport
        Each module with a weight, quantized or left.

    Raises
    ------
    ValueError
        If the files do not fit the model.
    """
    tensors = {
        key: each for file in sorted(Path(folder).glob("*.safetensors")) for key, each in load_file(file).items()
    }
    total = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    rows = []
    for name, layer in [each for each in model.named_modules() if has_weight(each[1])]:
        kind, before = (
            kind_of_module(layer),
            sum(each.nbytes for each in layer._parameters.values() if each is not None),
        )
        shape = weight_shape(layer)
        if f"{name}.{suffixes[0]}" not in tensors:
            rows.append(ConversionRow(name, shape, None, before, before, "left: not quantized in the file", kind))
            continue
        weight = weight_of(tensors, name)
        if kind != "linear" or tuple(weight.shape) != shape:
            raise ValueError(
                f"{name} must be a linear layer of {tuple(weight.shape)}, got a {type(layer).__name__} of {shape}"
            )
        new = QuantLinear.from_quantized(weight, tensors.get(f"{name}.bias"), config)
        set_module(model, name, new)
        for suffix in (*suffixes, "bias"):
            tensors.pop(f"{name}.{suffix}", None)
        rows.append(ConversionRow(name, shape, new.config, before, new.compressed_bytes, "", kind))
    result = model.load_state_dict(tensors, strict=False, assign=True)
    if result.unexpected_keys:
        raise ValueError(f"model must have the tensors of the file, got {result.unexpected_keys[0]!r} besides")
    return ConversionReport(tuple(rows), total)
