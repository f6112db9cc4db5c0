"""How quantized layers take over a stored state and keep their scales when a module is cast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def take_tensors(
    layer: Any, state_dict: Mapping[str, Tensor], prefix: str, names: Iterable[str], device: torch.device | None
) -> None:
    """Give `layer` empty tensors like those of a stored state, None for absent ones; its master if one is stored."""
    for name in names:
        stored = state_dict.get(prefix + name)
        setattr(layer, name, None if stored is None else torch.empty_like(stored, device=device))
    weight = state_dict.get(prefix + "weight")
    if weight is None:
        layer.weight = None
    elif layer.weight is None:
        layer.weight = nn.Parameter(torch.empty_like(weight, device=device))


def restore_dtypes(layer: nn.Module, before: Mapping[str, Tensor | None]) -> None:
    """Put back tensors whose dtype a cast has changed: ``half()`` is for what is computed with, not for scales."""
    for name, tensor in before.items():
        if tensor is not None and getattr(layer, name).dtype != tensor.dtype:
            setattr(layer, name, tensor.to(getattr(layer, name).device))
