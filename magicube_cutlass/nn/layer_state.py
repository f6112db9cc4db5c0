"""How quantized layers take over a stored state, keep their scales when a module is cast, and make a frozen matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from magicube_cutlass.autograd.integer import STRIDE
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS


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


def matrix_of(pattern: Pattern, values: Tensor, scale: Tensor | None, bits: int) -> SRBCRS:
    """Return the matrix of a frozen sparse layer: `values` are padded to :data:`STRIDE` vectors of each vector row."""
    padded = pattern.padded(STRIDE)
    matrix = SRBCRS(
        padded.row_start, padded.row_end, padded.col_indices, values, shape=pattern.shape,
        vector_length=pattern.vector_length, bits=bits, stride=STRIDE, scale=scale,
    )  # fmt: skip
    matrix._cache["pattern"] = pattern
    return matrix
