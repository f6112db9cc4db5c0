"""Products on a CPU: packed operands of the engine, and cached calls with checked arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.cpu import engine as cpu_engine
from cute_kernels.dtypes import ElementType, Integer, float_of
from cute_kernels.integers import fetch, split_digits
from magicube_cutlass.dispatch import cpu_float
from magicube_cutlass.dispatch.plan import SpmmProblem
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.quantization.float_operands import decoded
from magicube_cutlass.quantization.quant_tensor import QuantTensor


def plan_spmm(matrix: SRBCRS, rhs: ElementType) -> tuple[str, list[Tensor]]:
    """Return the kernel for B's element type, and the packed sparse operand."""
    return "cpu" if isinstance(rhs, Integer) else cpu_float.PREFIX + rhs.name, pack_operand(matrix)


def pack_operand(matrix: SRBCRS) -> list[Tensor]:
    """Return structure, digit planes and row sums for the engine; of floats a CSR matrix. Cached on `matrix`."""
    found: list[Tensor] | None = matrix._execution.get("cpu")
    if found is None and matrix.bits is None:
        vectors = matrix.vectors()
        number = float_of(vectors.dtype)  # e2m1 comes as e4m3
        assert number is not None
        found = matrix._execution["cpu"] = cpu_float.csr_copy(matrix.pattern, decoded(vectors, number))
    elif found is None:
        assert matrix.bits is not None
        if matrix._seen is None:
            matrix.refresh()  # a compiler plans without the checks of ops
        bits, signed = matrix.bits, matrix.signed
        planes = split_digits(fetch(matrix.values, matrix.stride, bits, signed), bits, signed)
        sums = cpu_engine.row_sums(planes, matrix.row_start, signed)
        # copies: kernels trust the structure that was scanned, whatever is written to the matrix
        index = [each.clone() for each in (matrix.row_start, matrix.row_end, matrix.col_indices)]
        found = [*index, planes, sums]
        matrix._execution["cpu"] = found
    return found


def keepable(scale: Tensor | None, left: Tensor | None, right: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether a call can read scales and bias in place, so that it sees them change.

    `scale` is that of the matrix, of which `left` was made; `right` is that of B, or None for integer output.
    """
    if right is not None and (right.dtype != torch.float32 or not right.is_contiguous() or right.ndim > 2):
        return False  # a scale per column of a batch is expanded
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
        return False
    return left is None or scale is None or left.data_ptr() == scale.data_ptr()


@dataclass(frozen=True)
class EngineCall:
    """SpMM by the CPU engine for one matrix and fixed shapes, strides and dtypes of the other arguments."""

    engine: cpu_engine.SpmmCall
    scale: Tensor | None  # A's own
    row_scale: Tensor | None  # float32, the same memory
    scaled: bool  # by B's scale
    shape: torch.Size  # of C
    dtype: torch.dtype

    def __call__(self, b: Tensor, scale: Tensor | None, bias: Tensor | None, out: Tensor | None) -> Tensor | None:
        """The product, or None where the engine has gone."""
        if not cpu_engine.available():
            return None
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype)
        rows, columns = self.row_scale, scale if self.scaled else None
        # the engine reads one scale per row and per column; a per-tensor scale may have been written since
        if rows is not None and rows.ndim == 0:
            rows = rows.expand(self.shape[-2]).contiguous()
        if columns is not None:
            columns = columns.view(-1) if columns.ndim else columns.expand(self.shape[-1]).contiguous()
        self.engine(b, out, rows, columns, bias)
        return out


def cached_spmm(
    problem: SpmmProblem, packed: list[Tensor], scale: Tensor | None, bias: Tensor | None, out: Tensor
) -> EngineCall | None:
    """Return the call for these operands, or None if an argument is copied at each call."""
    dense = problem.dense
    col_scale = None if problem.col_scale is None else dense.scale
    if not isinstance(dense, QuantTensor) or not keepable(scale, problem.row_scale, col_scale, bias):
        return None
    if not cpu_engine.available() or out.numel() == 0:
        return None
    row_start, row_end, col_indices, planes, sums = packed
    sparse = cpu_engine.SparseOperand(
        row_start, row_end, col_indices, planes, sums, out.shape[-2], problem.matrix.shape[1], problem.lhs.bits,
        problem.lhs.signed,
    )  # fmt: skip
    operand = cpu_engine.DenseOperand(dense.data, dense.bits, dense.signed, -2, problem.packed_dim)
    call = cpu_engine.SpmmCall(sparse, operand, out)
    return EngineCall(call, scale, problem.row_scale, col_scale is not None, out.shape, out.dtype)
