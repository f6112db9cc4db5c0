"""Activation modules that a layer can take over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

MODULES: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, "tanh"),
    "silu": nn.SiLU,
}
_OF_TRANSFORMERS = {"GELUActivation": "gelu", "NewGELUActivation": "gelu_tanh", "GELUTanh": "gelu_tanh",
                    "SiLUActivation": "silu"}  # fmt: skip


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
