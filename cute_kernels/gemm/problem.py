"""A checked dense product, and the checks that the dense products share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.gemm.config import Products

INTEGER_DTYPES = (torch.int32, torch.int64)
HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class GemmProblem:
    """A checked product. ``alpha`` holds scales given as numbers; ``c`` is None where ``beta`` is 0."""

    a: tuple[Tensor, ...]  # int8 (M, K) each
    b: tuple[Tensor, ...]  # int8 (K, N) each
    products: Products
    shift: int
    scale_a: Tensor | None  # (M,) or ()
    scale_b: Tensor | None  # (N,) or ()
    alpha: float
    beta: float
    c: Tensor | None  # (M, N)
    bias: Tensor | None  # (N,)
    out: Tensor | None  # (M, N)
    out_dtype: torch.dtype
    sum_of_squares: Tensor | None = None  # float32, a place for each warp

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        return self.a[0].shape[0], self.b[0].shape[1], self.a[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.a[0].device

    @property
    def is_integer(self) -> bool:
        return self.out_dtype in INTEGER_DTYPES


def check_float_tensor(
    x: Tensor, name: str, sizes: tuple[tuple[int, ...], ...], device: torch.device, wide: bool
) -> Tensor:
    """``x``, a tensor of factors or terms of one of these shapes; ``wide`` allows float64."""
    kinds = (torch.float32, *HALF_DTYPES, *((torch.float64,) if wide else ()))
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
    floats = (*HALF_DTYPES, torch.float32, *((torch.float64,) if device.type == "cpu" else ()))
    known = (*INTEGER_DTYPES, *floats) if integers else floats
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


def empty_product(c: Tensor | None, beta: float, bias: Tensor | None, out: Tensor) -> Tensor:
    """``beta c + bias``, the product of an (M, 0) and a (0, N) matrix, written to ``out``."""
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    if c is not None:
        total.add_(c, alpha=beta)
    if bias is not None:
        total += bias
    return out.copy_(total)
