"""Calls that are kept: a product whose arguments were checked before, on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.cpu import engine as cpu_engine
from magicube_cutlass.quantization.quant_tensor import QuantTensor


def keepable(scale: Tensor | None, left: Tensor | None, right: Tensor | None, bias: Tensor | None) -> bool:
    """Whether a call can read the scales and the bias where they lie, so that it sees them change.

    ``scale``: the matrix's own, of which ``left`` was made; ``right``: B's own, or None for integer output.
    """
    if right is not None and (right.dtype != torch.float32 or not right.is_contiguous() or right.ndim > 2):
        return False  # a scale a column of a batch is expanded
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
        return False
    return left is None or scale is None or left.data_ptr() == scale.data_ptr()


class EngineCall:
    """SpMM by the CPU engine for one matrix and one set of shapes, strides and dtypes of the other arguments."""

    def __init__(
        self, engine: cpu_engine.SpmmCall, scale: Tensor | None, left: Tensor | None, scaled: bool, out: Tensor
    ) -> None:
        self.engine, self.scale, self.left, self.scaled = engine, scale, left, scaled
        self.shape, self.dtype = out.shape, out.dtype

    def __call__(self, b: Tensor, right: Tensor | None, bias: Tensor | None, out: Tensor | None) -> Tensor | None:
        """The product, or None where the engine has gone."""
        if not cpu_engine.available():
            return None
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype)
        flat = right.view(-1) if self.scaled and right is not None else None
        self.engine(b, out, self.left, flat, bias)
        return out


def engine_call(
    copy: list[Tensor],
    scale: Tensor | None,
    left: Tensor | None,
    dense: QuantTensor,
    right: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    kind: tuple[int, int, bool],
) -> EngineCall | None:
    """The call for these operands, or None where something is expanded or copied every time.

    ``kind``: A's columns, bits and sign.  The engine wants one factor for each row and column.
    """
    single = any(factor is not None and factor.ndim == 0 for factor in (left, right))
    if not cpu_engine.available() or out.numel() == 0 or single or not keepable(scale, left, right, bias):
        return None
    row_start, row_end, col_indices, planes, row_sums = copy
    blocks = cpu_engine.Blocks(row_start, row_end, col_indices, planes, row_sums, out.shape[-2], *kind)
    operand = cpu_engine.Dense(dense.data, dense.bits, dense.signed, -2, dense.packed_dim)
    return EngineCall(cpu_engine.SpmmCall(blocks, operand, out), scale, left, right is not None, out)
