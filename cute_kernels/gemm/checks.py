"""Checks of arguments that the dense products share."""

from __future__ import annotations

import torch
from torch import Tensor

INTEGERS = (torch.int32, torch.int64)
HALVES = (torch.float16, torch.bfloat16)


def floating(x: Tensor, name: str, sizes: tuple[tuple[int, ...], ...], device: torch.device, wide: bool) -> Tensor:
    """``x``, a tensor of factors or terms of one of these shapes; ``wide`` allows float64."""
    kinds = (torch.float32, *HALVES, *((torch.float64,) if wide else ()))
    if x.dtype not in kinds:
        raise TypeError(f"{name} must be one of {', '.join(map(str, kinds))}, got {x.dtype}")
    if tuple(x.shape) not in sizes:
        raise ValueError(f"{name} must have the shape {' or '.join(map(str, sizes))}, got {tuple(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device} as a is, got {x.device}")
    return x


def check_output(
    out: Tensor | None, dtype: torch.dtype, shape: tuple[int, int], device: torch.device, *, integers: bool
) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless results of ``dtype`` can be written to ``out``."""
    floats = (*HALVES, torch.float32, *((torch.float64,) if device.type == "cpu" else ()))
    known = (*INTEGERS, *floats) if integers else floats
    if dtype not in known:
        raise TypeError(f"out_dtype on {device} must be one of {', '.join(map(str, known))}, got {dtype}")
    if out is None:
        return
    if out.dtype != dtype:
        raise TypeError(f"out must have out_dtype {dtype}, got {out.dtype}")
    if tuple(out.shape) != shape:
        raise ValueError(f"out must have the shape {shape}, got {tuple(out.shape)}")
    if out.device != device:
        raise ValueError(f"out must be on {device} as a is, got {out.device}")
    if out.shape[1] > 1 and out.stride(1) != 1:
        raise ValueError(f"out must have rows of neighbouring elements, got strides {out.stride()}")
    if out.shape[0] > 1 and out.stride(0) < out.shape[1]:
        raise ValueError(
            f"out must have rows that do not overlap, got strides {out.stride()} for {out.shape[1]} columns"
        )


def of_nothing(c: Tensor | None, beta: float, bias: Tensor | None, out: Tensor) -> Tensor:
    """``beta c + bias``, the product of an (M, 0) and a (0, N) matrix, written to ``out``."""
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    if c is not None:
        total.add_(c, alpha=beta)
    if bias is not None:
        total += bias
    return out.copy_(total)
