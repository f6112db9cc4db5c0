"""Checks of the tensors that the attention kernel reads, and their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes


class Scales(NamedTuple):
    """Address of float32 scales and their memory strides, in elements: per row and per matrix; 0 for a shared scale."""

    pointer: int
    stride: int
    batch: int


def scales_of(name: str, x: Tensor, batch: int, length: int, like: Tensor) -> Scales:
    """Return checked scales of the rows of `batch` matrices of `length` rows, or of a whole matrix, or of all."""
    strides = {(): (0, 0), (batch,): (0, 1), (batch, length): (1, length)}
    if x.dtype != torch.float32 or x.device != like.device:
        raise TypeError(f"{name} must be float32 on {like.device}, got {x.dtype} on {x.device}")
    if tuple(x.shape) not in strides or not x.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous of shape (), ({batch},) or ({batch}, {length}), got {tuple(x.shape)}"
        )
    return Scales(x.data_ptr(), *strides[tuple(x.shape)])


def bias_of(bias: Tensor | None, batch: int, keys: int, like: Tensor) -> Scales:
    """Return a checked bias of the keys, the same for all matrices or one for each; address 0 for None."""
    if bias is None:
        return Scales(0, 0, 0)
    if bias.dtype != torch.float32 or bias.device != like.device:
        raise TypeError(f"bias must be float32 on {like.device}, got {bias.dtype} on {bias.device}")
    if tuple(bias.shape) not in ((keys,), (batch, keys)) or not bias.is_contiguous():
        raise ValueError(f"bias must be contiguous of shape ({keys},) or ({batch}, {keys}), got {tuple(bias.shape)}")
    return Scales(bias.data_ptr(), 1, keys if bias.ndim == 2 else 0)


def check_tensor(
    name: str, x: Tensor, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """Raise `TypeError` or `ValueError` unless a kernel can read `x` as it is."""
    if x.dtype not in dtypes or x.device != device:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} must be {wanted} on {device}, got {x.dtype} on {x.device}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
    if not x.is_contiguous() or (x.ndim == 3 and x.data_ptr() % ALIGNMENT):
        raise ValueError(f"{name} must be contiguous and start at a multiple of {ALIGNMENT} bytes")
