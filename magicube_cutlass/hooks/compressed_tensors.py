"""Checkpoints in the formats ``int-quantized`` and ``pack-quantized`` of compressed-tensors, read and written.

The formats are read from the file's tensors and ``config.json``; the package itself is not needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from magicube_cutlass.nn.config import QuantConfig
from magicube_cutlass.nn.dense.linear import QuantLinear
from magicube_cutlass.nn.report import ConversionReport, ConversionRow
from magicube_cutlass.nn.weight_modules import has_weight, kind_of_module, set_module, weight_shape
from magicube_cutlass.quantization.group_tensor import GroupTensor

__all__ = ["load_compressed", "pack_int32", "save_compressed", "unpack_int32"]

_SUFFIXES = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "bias")


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


def _weight(tensors: Mapping[str, Tensor], name: str, settings: Mapping[str, Any]) -> GroupTensor:
    """The weight of a layer."""
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


def _settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Options of the weights, and the format of the activations."""
    found = [group for group in config.get("config_groups", {}).values() if group.get("weights")]
    if config.get("quant_method") != "compressed-tensors" or len(found) != 1:
        raise ValueError("config.json must have a quantization_config of compressed-tensors with one group, got "
                         f"{config.get('quant_method')!r} with {len(found)}")  # fmt: skip
    acts = found[0].get("input_activations")
    if acts and not (acts.get("num_bits") == 8 and acts.get("type", "int") == "int" and acts.get("dynamic")):
        raise ValueError(f"input_activations must be dynamic 8-bit integers or none, got {acts}")
    return dict(found[0]["weights"]), "int8" if acts else "none"


def load_compressed(model: nn.Module, folder: str | os.PathLike[str], *, act: str | None = None) -> ConversionReport:
    """Load a checkpoint into a model of float layers, in place; quantized weights become :class:`QuantLinear` layers.

    Parameters
    ----------
    model : nn.Module
        Of the architecture of the checkpoint, also on the meta device.
    folder : str or path-like
        With ``config.json`` and safetensors files.
    act : str, optional
        ``"int8"`` or ``"none"``. Default: as the checkpoint says; weight-only has no kernel on a CPU, int8 has.

    Returns
    -------
    ConversionReport
        Each module with a weight, quantized or left.

    Raises
    ------
    ValueError
        If the checkpoint has another format, or does not fit the model.
    """
    path = Path(folder)
    weights, stored_act = _settings(json.loads((path / "config.json").read_text())["quantization_config"])
    tensors = {key: each for file in sorted(path.glob("*.safetensors")) for key, each in load_file(file).items()}
    total = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    rows = []
    for name, layer in [each for each in model.named_modules() if has_weight(each[1])]:
        kind, before = (
            kind_of_module(layer),
            sum(each.nbytes for each in layer._parameters.values() if each is not None),
        )
        shape = weight_shape(layer)
        if f"{name}.weight_scale" not in tensors:
            rows.append(ConversionRow(name, shape, None, before, before, "left: not quantized in the file", kind))
            continue
        weight = _weight(tensors, name, weights)
        if kind != "linear" or weight.shape != shape:
            raise ValueError(
                f"{name} must be a linear layer of {weight.shape}, got a {type(layer).__name__} of {shape}"
            )
        new = QuantLinear.from_quantized(weight, tensors.get(f"{name}.bias"), QuantConfig(act=act or stored_act))
        set_module(model, name, new)
        for suffix in _SUFFIXES:
            tensors.pop(f"{name}.{suffix}", None)
        rows.append(ConversionRow(name, shape, new.config, before, new.compressed_bytes, "", kind))
    result = model.load_state_dict(tensors, strict=False, assign=True)
    if result.unexpected_keys:
        raise ValueError(f"model must have the tensors of the file, got {result.unexpected_keys[0]!r} besides")
    return ConversionReport(tuple(rows), total)


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
        state[f"{name}.weight_shape"] = torch.tensor(weight.shape)
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
