"""Modules with weights: which of them a quantized layer can replace, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from magicube_cutlass.nn.config import QuantConfig, SparseQuantConfig
from magicube_cutlass.nn.dense.activation import MODULES
from magicube_cutlass.nn.dense.conv import PatchLinear, dense_conv, flat_linear
from magicube_cutlass.nn.dense.embedding import QuantEmbedding
from magicube_cutlass.nn.dense.linear import QuantLinear
from magicube_cutlass.nn.dense.projections import GatedMLP
from magicube_cutlass.nn.linear import SparseQuantLinear

LayerConfig = SparseQuantConfig | QuantConfig
KINDS = ("linear", "conv", "embedding")
_QUANTIZED = (QuantLinear, SparseQuantLinear, QuantEmbedding, PatchLinear)


def is_transposed_linear(module: nn.Module) -> bool:
    """Return whether a module is the ``Conv1D`` of transformers, a linear layer with a weight (in, out)."""
    return (
        type(module).__name__ == "Conv1D"
        and hasattr(module, "nf")
        and type(module).__module__.startswith("transformers.")
    )


def kind_of_module(module: nn.Module) -> str:
    """Return ``"linear"``, ``"conv"`` or ``"embedding"``, or ``""`` for a module that no layer replaces.

    Examples
    --------
    >>> kind_of_module(nn.Linear(2, 3)), kind_of_module(nn.Conv2d(4, 4, 3, groups=2)), kind_of_module(nn.ReLU())
    ('linear', '', '')
    """
    if type(module) is nn.Linear or is_transposed_linear(module):
        return "linear"
    if type(module) in (nn.Conv1d, nn.Conv2d):
        assert isinstance(module, (nn.Conv1d, nn.Conv2d))
        return "conv" if module.groups == 1 and module.padding_mode == "zeros" else ""
    if type(module) is nn.Embedding:
        assert isinstance(module, nn.Embedding)
        return "embedding" if module.max_norm is None else ""
    return ""


def has_weight(module: nn.Module) -> bool:
    """Return whether a module has a weight of its own, quantized ones left out."""
    if isinstance(module, _QUANTIZED):
        return False
    own = {name for name, each in module._parameters.items() if each is not None}
    return any(name.removesuffix("_orig").endswith("weight") for name in own) or hasattr(module, "parametrizations")


def weight_shape(module: nn.Module) -> tuple[int, ...]:
    """Return the shape of a module's weight; (out, in) for a transposed one."""
    names = [name for name in module._parameters if name.removesuffix("_orig").endswith("weight")]
    found = module._parameters[names[0]] if names else getattr(module, "weight", None)
    shape = () if found is None else tuple(found.shape)
    return shape[::-1] if is_transposed_linear(module) else shape


def reason(module: nn.Module, config: LayerConfig) -> str:
    """Return why `config` cannot be applied to a module; empty if it can."""
    kind, name = kind_of_module(module), type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return "left: nn.MultiheadAttention reads in_proj_weight itself"
    if not kind:
        return f"left: {'an' if name[0] in 'AEIOU' else 'a'} {name}" + (
            " with groups or another padding" if type(module) in (nn.Conv1d, nn.Conv2d) else ""
        )
    if kind == "embedding" and not (isinstance(config, QuantConfig) and config.is_integer):
        return "left: an embedding takes int8 or int4"
    weight = module._parameters.get("weight")
    if weight is None and not hasattr(module, "weight_mask"):
        return "left: its weight is no parameter"
    if weight is not None and weight.is_meta and isinstance(config, SparseQuantConfig):
        return "left: on the meta device, where no vectors can be selected"
    return ""


def take_mask(module: nn.Module) -> Tensor | None:
    """Return the mask of ``torch.nn.utils.prune`` and make the pruning permanent; None without one."""
    mask: Tensor | None = module._buffers.get("weight_mask")
    if mask is not None:
        torch_prune.remove(module, "weight")
    return mask


def _as_linear(module: nn.Module) -> nn.Linear:
    """A linear layer that shares the parameters of a linear or convolutional module."""
    if isinstance(module, nn.Linear):
        return module
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return flat_linear(module)
    source: Any = module
    inputs, outputs = source.weight.shape
    linear = nn.Linear(inputs, outputs, source.bias is not None, device="meta")
    linear.weight = nn.Parameter(source.weight.detach().t(), requires_grad=source.weight.requires_grad)
    if source.bias is not None:
        linear.bias = source.bias
    return linear.train(module.training)


def make_layer(module: nn.Module, config: LayerConfig, mask: Tensor | None = None) -> nn.Module:
    """Return the quantized layer for a module that :func:`reason` has nothing against; it shares the parameters.

    Parameters
    ----------
    module : nn.Module
        Linear layer, convolution or embedding.
    config : SparseQuantConfig or QuantConfig
        Options.
    mask : Tensor, optional
        Entries of the weight that are kept, in its shape; a sparse layer stores the vectors that hold one.
    """
    if isinstance(module, nn.Embedding):
        assert isinstance(config, QuantConfig)
        return QuantEmbedding.from_embedding(module, config)
    linear = _as_linear(module)
    made: nn.Module
    if isinstance(config, QuantConfig):
        made = QuantLinear.from_linear(linear, config)
    else:
        flat = None if mask is None else (mask.t() if is_transposed_linear(module) else mask.flatten(1)).bool()
        made = SparseQuantLinear.from_linear(linear, **asdict(config), mask=flat)
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        made = PatchLinear(module, made)
    return made.train(module.training)


def inner_layer(module: nn.Module) -> nn.Module:
    """Return the quantized layer of a module that :func:`make_layer` made."""
    return module.linear if isinstance(module, PatchLinear) else module


def set_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put a module in the place of another."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, under all its names."""
    names = [name for name, each in model.named_modules(remove_duplicate=False) if each is old and name]
    for name in names:
        set_module(model, name, new)


def _dense_linear(layer: QuantLinear | SparseQuantLinear) -> nn.Linear:
    """An ``nn.Linear`` with the master weight of a layer, or the dequantized one of a frozen layer."""
    weight = layer.weight
    if weight is None:
        dense = layer.dequantize() if isinstance(layer, QuantLinear) else layer.matrix().to_dense()
        weight = nn.Parameter(dense.to(torch.float32 if layer.bias is None else layer.bias.dtype))
    linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    linear.weight = weight
    if layer.bias is not None:
        linear.bias = layer.bias
    return linear.train(layer.training)


def to_dense(model: nn.Module) -> tuple[str, ...]:
    """Replace the quantized layers of a model, in place, by float ones; return their names.

    A layer with a master weight gives it back; of a frozen layer the dequantized weight is taken. The zeros of a sparse
    master are not written: frozen sparse layers are pruned, others as they were. Modules that :func:`fuse_activations`
    moved into layers are back in their places; any other activation follows its linear layer in an ``nn.Sequential``.

    Parameters
    ----------
    model : nn.Module
        As :func:`magicube_cutlass.convert` left it.

    Returns
    -------
    tuple of str
        Names of the replaced layers.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    >>> report = mc.convert(model, mc.nn.QuantConfig("int8"))
    >>> mc.nn.to_dense(model), type(model[0]).__name__
    (('0', '1'), 'Linear')
    """
    made: dict[nn.Module, nn.Module] = {}
    names = []
    for gated in [each for each in model.modules() if isinstance(each, GatedMLP)]:
        replace_module(model, gated, gated._plain)
    found = [(name, each) for name, each in model.named_modules(remove_duplicate=False) if isinstance(each, _QUANTIZED)]
    inner = {f"{name}.linear" for name, each in found if isinstance(each, PatchLinear)}
    restored = _restore_activations(model, [each for _, each in found])
    for name, layer in found:
        if name in inner or not name:
            continue
        if layer not in made:
            made[layer] = _dense_module(layer, with_activation=layer not in restored)
        set_module(model, name, made[layer])
        names.append(name)
    for each in model.modules():
        if isinstance(each, nn.TransformerEncoderLayer) and "_activation_before" in each.__dict__:
            each.activation_relu_or_gelu = each.__dict__.pop("_activation_before")
    return tuple(names)


def _restore_activations(model: nn.Module, layers: Sequence[nn.Module]) -> set[nn.Module]:
    """Put back the activation modules that layers took over; return the layers whose module is in the model again."""
    fused = {each: inner_layer(each).__dict__.get("_fused", (None, None)) for each in layers}
    present = set(model.modules())
    for identity, module in fused.values():
        if identity is not None:
            replace_module(model, identity, module)
    return {layer for layer, (identity, _) in fused.items() if identity in present}


def _dense_module(layer: nn.Module, with_activation: bool) -> nn.Module:
    if isinstance(layer, QuantEmbedding):
        table = nn.Embedding(layer.num_embeddings, layer.embedding_dim, device="meta")
        table.weight = nn.Parameter(layer.quantized().dequantize().to(layer.dtype))
        return table
    linear = inner_layer(layer)
    assert isinstance(linear, (QuantLinear, SparseQuantLinear))
    plain = _dense_linear(linear)
    dense = dense_conv(layer, plain) if isinstance(layer, PatchLinear) else plain
    activation = linear.config.activation if with_activation and isinstance(linear, QuantLinear) else None
    return dense if activation is None else nn.Sequential(dense, MODULES[activation]())
