"""Host half of ``gemm/epilogue.cuh``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.operands import ALIGNMENT


def _factors(x: Tensor | None) -> tuple[Tensor | None, int]:
    """float32 factors, and the step from one to the next."""
    if x is None:
        return None, 0
    return x.to(torch.float32).contiguous(), int(x.dim() > 0)


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _row_major(c: Tensor) -> Tensor:
    """``c`` in rows without gaps between elements, float32 unless it is a half."""
    return c if c.shape[1] == 1 or c.stride(1) == 1 else c.contiguous()


class Result(NamedTuple):
    """Where a kernel writes, and by which factors and terms; ``owners`` keep them alive."""

    arguments: tuple[int, ...]
    owners: tuple[Tensor | None, ...]


def result_of(
    out: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, bias: Tensor | None, c: Tensor | None
) -> Result:
    """The arguments of ``GemmOutput`` that are no numbers."""
    m, n = out.shape
    rows, row_step = _factors(scale_a)
    columns, column_step = _factors(scale_b)
    bias, _ = _factors(bias)
    c = None if c is None else _row_major(c)
    pitch = out.stride(0) if m > 1 else n
    vector = n % 8 == 0 and out.data_ptr() % ALIGNMENT == 0 and (m == 1 or pitch * out.element_size() % ALIGNMENT == 0)
    arguments = (
        out.data_ptr(), pitch, m, n, _pointer(rows), row_step, _pointer(columns), column_step, _pointer(bias),
        _pointer(c), 0 if c is None else c.stride(0) if m > 1 else n, int(vector),
    )  # fmt: skip
    return Result(arguments, (rows, columns, bias, c))
