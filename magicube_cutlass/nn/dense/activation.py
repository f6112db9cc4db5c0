"""Activations after a product: what torch computes, and the modules that a layer can take over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "silu": nn.functional.silu,
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, "tanh"),
    "silu": nn.SiLU,
}
_OF_TRANSFORMERS = {"GELUActivation": "gelu", "NewGELUActivation": "gelu_tanh", "GELUTanh": "gelu_tanh",
                    "SiLUActivation": "silu"}  # fmt: skip


def activate(x: Tensor, activation: str | None) -> Tensor:
    """Return f(x) by torch; `activation` as in :class:`magicube_cutlass.nn.QuantConfig`.

    Examples
    --------
    >>> activate(torch.tensor([-1.0, 2.0]), "relu")
    tensor([0., 2.])
    """
    return x if activation is None else _FUNCTIONS[activation](x)


def activation_of(module: nn.Module) -> str | None:
    """Return the name of an activation module's function; None for any other module.

    Examples
    --------
    >>> activation_of(nn.GELU("tanh")), activation_of(nn.ReLU6())
    ('gelu_tanh', None)
    """
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    if type(module) in (nn.ReLU, nn.SiLU):
        return type(module).__name__.lower()
    found = _OF_TRANSFORMERS.get(type(module).__name__)
    return found if type(module).__module__ == "transformers.activations" else None
