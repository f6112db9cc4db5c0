"""Checkpoints of compressed-tensors: ``int-quantized`` and ``pack-quantized``, and ``float-quantized``, which is read.

The formats are read from the file's tensors and ``config.json``; the package itself is not needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from magicube_cutlass.hooks.checkpoint import load_layers, quantization_config
from magicube_cutlass.nn.config import ACTIVATIONS, QuantConfig
from magicube_cutlass.nn.dense.linear import QuantLinear
from magicube_cutlass.nn.dense.product import QuantWeight
from magicube_cutlass.nn.report import ConversionReport
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor
from magicube_cutlass.quantization.group_tensor import GroupTensor

__all__ = ["load_compressed", "pack_int32", "save_compressed", "unpack_int32"]

_SUFFIXES = ("weight_scale", "weight", "weight_packed", "weight_zero_point", "weight_shape", "weight_g_idx")
# strategy of e4m3 weights -> format; of their activations -> format
_FLOATS = {"block": "e4m3_b128", "channel": "e4m3", "tensor": "e4m3"}
_FLOAT_ACTS = {"group": "e4m3_g128", "token": "e4m3"}


def pack_int32(ints: Tensor, bits: int) -> Tensor:
    """Pack signed integers (R, K) into int32 along K: ``q + 2^(bits - 1)``, the first in the lowest bits.

    Examples
    --------
    >>> pack_int32(torch.tensor([[-8, -7]], dtype=torch.int8), 4).tolist()
    [[16]]
    """
    several = 32 // bits
    raised = torch.nn.functional.pad(ints.to(torch.int64) + (1 << (bits - 1)), (0, -ints.shape[1] % several))
    parts = raised.unflatten(1, (-1, several)) << torch.arange(0, 32, bits, device=ints.device)
    return parts.sum(-1).to(torch.int32)  # above 2^31 it wraps to the same bits


def unpack_int32(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Return the signed integers (R, `columns`) of :func:`pack_int32`, int8.

    Examples
    --------
    >>> unpack_int32(torch.tensor([[16]], dtype=torch.int32), 4, 2).tolist()
    [[-8, -7]]
    """
    shifts = torch.arange(0, 32, bits, device=packed.device)
    parts = packed.to(torch.int64)[..., None] >> shifts & ((1 << bits) - 1)
    return (parts.flatten(1)[:, :columns] - (1 << (bits - 1))).to(torch.int8)


def _float_weight(tensors: Mapping[str, Tensor], name: str, kind: str) -> ScaledFloatTensor:
    """The e4m3 weight of a layer; one scale of the tensor is repeated for its rows."""
    codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"].float()
    if kind == "e4m3":
        scale = scale.reshape(-1, 1).expand(codes.shape[0], 1)
    try:
        return ScaledFloatTensor.from_codes(codes, scale, kind)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}.weight_scale does not fit: {error}") from error


def _weight(tensors: Mapping[str, Tensor], name: str, settings: Mapping[str, Any]) -> QuantWeight:
    """The weight of a layer."""
    if settings.get("type") == "float":
        return _float_weight(tensors, name, _FLOATS[settings["strategy"]])
    bits, group = int(settings["num_bits"]), settings.get("group_size") or 0
    if bits not in (4, 8) or settings.get("type", "int") != "int" or f"{name}.weight_g_idx" in tensors:
        raise ValueError(f"{name} must have 4- or 8-bit integers in the order of their columns, got {dict(settings)}")
    scale = tensors[f"{name}.weight_scale"].float().reshape(tensors[f"{name}.weight_scale"].shape[0], -1)
    if f"{name}.weight_packed" in tensors:
        rows, columns = tensors[f"{name}.weight_shape"].tolist()
        ints = unpack_int32(tensors[f"{name}.weight_packed"], bits, columns)
    else:
        ints = tensors[f"{name}.weight"]
        rows, columns = ints.shape
    scale = scale.expand(rows, -1).contiguous()  # one scale of the tensor
    minimum, zero = None, tensors.get(f"{name}.weight_zero_point")
    if zero is not None:
        if zero.dtype == torch.int32:  # packed along the rows
            zero = unpack_int32(zero.t().contiguous(), bits, rows).t()
        minimum = -scale * zero.float().reshape(zero.shape[0], -1)
    wanted = None if scale.shape[1] == 1 else int(group)
    return GroupTensor.from_ints(ints, scale, minimum, bits=bits, group=wanted)


def _settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], QuantConfig]:
    """Options of the weights, and a config with the format of the activations."""
    found = [group for group in config.get("config_groups", {}).values() if group.get("weights")]
    if config.get("quant_method") != "compressed-tensors" or len(found) != 1:
        raise ValueError("config.json must have a quantization_config of compressed-tensors with one group, got "
                         f"{config.get('quant_method')!r} with {len(found)}")  # fmt: skip
    weights, acts = dict(found[0]["weights"]), found[0].get("input_activations")
    if weights.get("type") == "float":
        return weights, _float_config(weights, acts)
    if acts and not (acts.get("num_bits") == 8 and acts.get("type", "int") == "int" and acts.get("dynamic")):
        raise ValueError(f"input_activations must be dynamic 8-bit integers or none, got {acts}")
    return weights, QuantConfig(act="int8" if acts else "none")


def _float_config(weights: Mapping[str, Any], acts: Mapping[str, Any] | None) -> QuantConfig:
    """The config of e4m3 weights."""
    kind, blocks = _FLOATS.get(weights.get("strategy", "")), weights.get("block_structure")
    if weights.get("num_bits") != 8 or kind is None or (kind == "e4m3_b128" and list(blocks or ()) != [128, 128]):
        raise ValueError("weights must be 8-bit floats with a scale per tensor, channel or block of [128, 128], got "
                         f"{dict(weights)}")  # fmt: skip
    if not acts:
        return QuantConfig(kind, act="none")
    act, group = _FLOAT_ACTS.get(acts.get("strategy", ""), ""), acts.get("group_size")
    is_fp8 = acts.get("num_bits") == 8 and acts.get("type") == "float" and acts.get("dynamic")
    if not is_fp8 or act not in ACTIVATIONS[kind] or (act == "e4m3_g128" and group != 128):
        raise ValueError(
            f"input_activations must be dynamic 8-bit floats per token or, of blocks, group of 128, got {dict(acts)}"
        )
    return QuantConfig(kind, act=act)


def load_compressed(model: nn.Module, folder: str | os.PathLike[str], *, act: str | None = None) -> ConversionReport:
    """Load a checkpoint into a model of float layers, in place; quantized weights become :class:`QuantLinear` layers.

    Parameters
    ----------
    model : nn.Module
        Of the architecture of the checkpoint, also on the meta device.
    folder : str or path-like
        With ``config.json`` and safetensors files.
    act : str, optional
        Format of the activations, as for :class:`magicube_cutlass.nn.QuantConfig`. Default: as the checkpoint says;
        weight-only has no kernel on a CPU, int8 has.

    Returns
    -------
    ConversionReport
        Each module with a weight, quantized or left.

    Raises
    ------
    ValueError
        If the checkpoint has another format, or does not fit the model.
    """
    weights, config = _settings(quantization_config(folder))
    config = config if act is None else replace(config, act=act)
    return load_layers(model, folder, lambda tensors, name: _weight(tensors, name, weights), _SUFFIXES, config)


def save_compressed(model: nn.Module, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Write a model with frozen, symmetric integer layers of one format as a compressed-tensors checkpoint.

    Parameters
    ----------
    model : nn.Module
        Linear layers that are not quantized are listed under ``ignore``.
    folder : str or path-like
        Gets ``model.safetensors``, and a ``quantization_config`` in ``config.json``, which is made if there is none.

    Returns
    -------
    dict
        The ``quantization_config``.

    Raises
    ------
    ValueError
        For layers of several formats, of floats or with minima, or with an activation, smooth or static scales.
    """
    path = Path(folder)
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QuantLinear)}
    kinds = {layer.stored_config for layer in layers.values()}
    if len(kinds) != 1 or not all(layer.frozen for layer in layers.values()):
        raise ValueError(f"model must have frozen QuantLinear layers of one config, got {len(kinds)} configs")
    (kind,) = kinds
    scales = [each for layer in layers.values() for each in (layer.smooth, layer.act_scale) if each is not None]
    if not kind.is_integer or not kind.symmetric or kind.activation or scales:
        raise ValueError(f"layers must be symmetric integers without activation, smooth or static scales, got {kind}")
    state = {key: each for key, each in model.state_dict().items() if not key.endswith("_extra_state")}
    for name, layer in layers.items():
        ints, scale = state.pop(f"{name}.qweight"), state.pop(f"{name}.scale")
        state[f"{name}.weight_scale"] = scale
        if kind.bits == 8 and kind.group_size is None:
            state[f"{name}.weight"] = ints
            continue
        weight = GroupTensor(ints, scale, None, kind.bits, kind.group_size, layer.in_features)
        state[f"{name}.weight_packed"] = pack_int32(weight.ints(), kind.bits)
        state[f"{name}.weight_shape"] = torch.tensor(weight.shape, device="cpu")
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: each.contiguous().clone() for key, each in state.items()}, path / "model.safetensors", {"format": "pt"}
    )
    config = _config_of(model, kind)
    file = path / "config.json"
    whole = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**whole, "quantization_config": config}, indent=2) + "\n")
    return config


def _config_of(model: nn.Module, kind: QuantConfig) -> dict[str, Any]:
    """The ``quantization_config`` of a checkpoint."""
    is_packed = kind.bits == 4 or kind.group_size is not None
    common = {"type": "int", "symmetric": True, "num_bits": 8}
    weights = {**common, "num_bits": kind.bits, "strategy": "group" if kind.group_size else "channel", "dynamic": False}
    if kind.group_size:
        weights["group_size"] = kind.group_size
    acts = None if kind.act == "none" else {**common, "strategy": "token", "dynamic": True}
    layout = "pack-quantized" if is_packed else "int-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": acts, "format": layout}
    left = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": left,
    }  # fmt: skip
