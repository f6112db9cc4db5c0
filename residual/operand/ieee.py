"""Float products with the precision of their dtype, whatever the program allows."""

from __future__ import annotations

import torch
from torch import Tensor

_precision = torch._C._get_fp32_precision_getter  # what torch.backends reads: those attributes take 3 us


def is_ieee(x: Tensor) -> bool:
    """Return whether float32 products on the device of `x` keep float32 inside, as the program has set it."""
    return _precision("cuda" if x.is_cuda else "mkldnn", "matmul") in ("none", "ieee")


def float_product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a b`` in their dtype; float32 runs in float64 if the program allows tf32 or bfloat16 inside.

    The setting is that of a process, so it is read and never written.
    """
    return a @ b if a.dtype != torch.float32 or is_ieee(a) else (a.double() @ b.double()).float()
