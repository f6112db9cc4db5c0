"""Activation modules that become part of the quantized layers before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from magicube_cutlass.nn.auto_plan import first_outputs, output_error
from magicube_cutlass.nn.calibration import restore_modes
from magicube_cutlass.nn.dense.activation import activate, activation_of
from magicube_cutlass.nn.dense.linear import QuantLinear
from magicube_cutlass.nn.weight_modules import inner_layer, replace_module


@dataclass(frozen=True)
class _Group:
    """An activation module, and all layers whose outputs it is called with."""

    module: nn.Module
    name: str  # as in QuantConfig
    layers: frozenset[nn.Module]


def fuse_activations(model: nn.Module, batch: Any) -> dict[str, str]:
    """Move activation modules into the :class:`QuantLinear` layers that they follow, in place.

    The model runs on a batch, which shows what ``nn.ReLU``, ``nn.GELU`` and ``nn.SiLU`` modules, and those of
    transformers, are called with. A module that is only called with the outputs of dense quantized layers, each right
    after its layer, becomes ``nn.Identity``, and the layers get its name as their `activation`. The model runs again,
    and what changes its output is left as it was: an output that is also read elsewhere. :func:`to_dense` puts the
    modules back. State dicts do not change.

    Parameters
    ----------
    model : nn.Module
        As :func:`magicube_cutlass.convert` left it. It runs in evaluation mode; the mode of each module is restored.
    batch : Tensor, tuple, list or mapping
        An input, as for :func:`magicube_cutlass.nn.calibrate`. It must reach all that the model does.

    Returns
    -------
    dict
        Activation per name of a layer that got one.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    >>> report = mc.convert(model, mc.nn.QuantConfig("int8"))
    >>> mc.nn.fuse_activations(model, torch.randn(4, 64)), model[1]
    ({'0': 'gelu'}, Identity())
    """
    layers = {
        each: name
        for name, each in model.named_modules()
        if isinstance(inner := inner_layer(each), QuantLinear) and inner.config.activation is None
    }
    with ExitStack() as stack, torch.no_grad():
        stack.callback(restore_modes, {each: each.training for each in model.modules()})
        model.eval()
        groups, want = _groups(model, layers.keys(), batch)
        error = output_error([batch], want)

        def holds(some: Sequence[_Group]) -> bool:
            with _moved(model, some):
                return error(model) < 1e-10  # the same operations: 0, but for sums of atomics on a GPU

        kept = groups if holds(groups) else [each for each in groups if holds([each])]
    for group in kept:
        identity = nn.Identity()
        replace_module(model, group.module, identity)
        for layer in group.layers:
            inner = inner_layer(layer)
            assert isinstance(inner, QuantLinear)
            inner.config = replace(inner.config, activation=group.name)
            inner.__dict__["_fused"] = identity, group.module  # for to_dense; no children of the layer
    return {layers[layer]: group.name for group in kept for layer in group.layers}


def _groups(model: nn.Module, layers: Any, batch: Any) -> tuple[list[_Group], list[Tensor]]:
    """What may be fused, as one run shows it, and the output of that run."""
    last: list[Any] = [None, None]  # the module that was called last, and its output
    sources: dict[nn.Module, list[nn.Module | None]] = {}

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        last[:] = module, output

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        is_next = bool(inputs) and isinstance(inputs[0], Tensor) and inputs[0] is last[1] and last[0] in layers
        sources.setdefault(module, []).append(last[0] if is_next else None)

    with ExitStack() as stack:
        for each in model.modules():
            if each in layers or not any(True for _ in each.children()):
                stack.callback(each.register_forward_hook(after).remove)
            if activation_of(each) is not None:
                stack.callback(each.register_forward_pre_hook(before).remove)
        want = first_outputs(model, [batch])
    found = []
    for module, given in sources.items():
        name, befores = activation_of(module), frozenset(each for each in given if each is not None)
        if name is not None and None not in given:
            found.append(_Group(module, name, befores))
    return found, want


@contextmanager
def _moved(model: nn.Module, groups: Sequence[_Group]) -> Iterator[None]:
    """Have the layers' hooks apply the activations instead of the modules."""
    with ExitStack() as stack:
        for group in groups:
            identity = nn.Identity()
            replace_module(model, group.module, identity)
            stack.callback(replace_module, model, identity, group.module)
            for layer in group.layers:
                stack.callback(layer.register_forward_hook(partial(_apply, name=group.name)).remove)
        yield


def _apply(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor, *, name: str) -> Tensor:
    return activate(output, name)
