"""Float products with the precision of their dtype, whatever the program allows."""

from __future__ import annotations

import torch
from torch import Tensor

_CUDA, _CPU = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def float_product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a b`` in their dtype; float32 runs in float64 if the program allows tf32 or bfloat16 inside.

    The setting is that of a process, so it is read and never written.
    """
    if a.dtype != torch.float32:
        return a @ b
    if (_CUDA if a.is_cuda else _CPU).fp32_precision in ("none", "ieee"):
        return a @ b
    return (a.double() @ b.double()).float()
