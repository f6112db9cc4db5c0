"""Checks of what the attention kernels are given, the addresses of tensors, and the numbers of the softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.dtypes import REAL_DTYPES

ALIGNMENT = 16  # bytes
SOFTMAX_BITS = (4, 8)


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


def check_operands(
    qkv: tuple[Tensor, Tensor, Tensor],
    shape: tuple[int, int, int, int],
    device: torch.device,
    out: Tensor,
    lse: Tensor | None,
    *of_queries: torch.dtype,
) -> None:
    """Raise `TypeError` or `ValueError` unless a kernel can take the operands, Q of one of these dtypes.

    `shape`: matrices, queries, keys and entries per row.
    """
    batch, queries, keys, head = shape
    sizes = (queries, keys, keys)
    for name, x, rows, dtypes in zip("qkv", qkv, sizes, (of_queries, (torch.int8,), (torch.int8,)), strict=True):
        check_tensor(name, x, (batch, rows, head), dtypes, device)
    check_tensor("out", out, (batch, queries, head), tuple(REAL_DTYPES), device)
    if lse is not None:
        check_tensor("lse", lse, (batch, queries), (torch.float32,), device)


def softmax_numbers(scale: float, softmax_bits: int, nan_for_empty: bool) -> tuple[np.float32, ...]:
    """Return the kernels' numbers: the scale of the logits times log2(e), log2 of the largest weight, the empty result.

    Examples
    --------
    >>> softmax_numbers(math.log(2), 4, False)[0]
    np.float32(1.0)
    """
    if softmax_bits not in SOFTMAX_BITS:
        raise ValueError(f"softmax_bits must be one of {SOFTMAX_BITS}, got {softmax_bits}")
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")
    empty = math.nan if nan_for_empty else 0.0
    return np.float32(scale / math.log(2)), np.float32(math.log2(2**softmax_bits - 1)), np.float32(empty)
