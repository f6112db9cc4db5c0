"""A checked product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.gemm.checks import INTEGERS
from cute_kernels.gemm.config import Products


@dataclass(frozen=True)
class Call:
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
    squares: Tensor | None = None  # float32, a place for each warp

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        return self.a[0].shape[0], self.b[0].shape[1], self.a[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.a[0].device

    @property
    def integral(self) -> bool:
        return self.out_dtype in INTEGERS
