"""Products on a CPU: packed operands of the engine, and cached calls with checked arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.cpu import engine as cpu_engine
from cute_kernels.cpu import extension as cpu_extension
from cute_kernels.dtypes import ElementType, Integer, float_of
from cute_kernels.integers import fetch, split_digits
from magicube_cutlass.dispatch import cpu_float
from magicube_cutlass.dispatch.plan import SpmmProblem
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.quantization.float_operands import DenseFloats, decoded
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


def is_cacheable(scale: Tensor | None, row_scale: Tensor | None, col_scale: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether a call can read scales and bias in place, so that it sees them change.

    `scale` is that of the matrix, of which `row_scale` was made; `col_scale` is that of B, or None for integer output.
    """
    if col_scale is not None and (
        col_scale.dtype != torch.float32 or not col_scale.is_contiguous() or col_scale.ndim > 2
    ):
        return False  # a scale per column of a batch is expanded
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
        return False
    return row_scale is None or scale is None or row_scale.data_ptr() == scale.data_ptr()


def engine_call(problem: SpmmProblem, packed: list[Tensor], bias: Tensor | None) -> cpu_engine.SpmmCall | None:
    """Return the call for these operands, or None if the engine cannot read every argument in place."""
    dense, matrix = problem.dense, problem.matrix
    col_scale = None if problem.col_scale is None else dense.scale
    if not isinstance(dense, QuantTensor) or not is_cacheable(matrix.scale, problem.row_scale, col_scale, bias):
        return None
    shape = torch.Size((*dense.shape[:-2], matrix.shape[0], dense.shape[-1]))
    if cpu_extension.ENGINE is None or shape.numel() == 0:
        return None
    start, end, columns, planes, sums = packed
    lhs, (m, k) = problem.lhs, matrix.shape
    sparse = cpu_engine.SparseOperand(start, end, columns, planes, sums, m, k, lhs.bits, lhs.signed)
    operand = cpu_engine.DenseOperand(dense.data, dense.bits, dense.signed, -2, problem.packed_dim)
    return cpu_engine.SpmmCall(sparse, operand, shape, problem.out_dtype, problem.row_scale, col_scale)


class SddmmRecord:
    """SDDMM for one pattern and one kind of operands and scales, checked before."""

    def __init__(self, call: cpu_engine.SddmmCall, result: SRBCRS) -> None:
        self._call, self._result = (
            call,
            result.with_values(result.values.new_empty(0)),
        )  # the caller's values are not held

    def __call__(self, x: Tensor, y: Tensor, row_scale: Tensor | None, col_scale: Tensor | None) -> SRBCRS:
        """Return the product on the pattern."""
        return self._result.with_values(self._call(x, y, row_scale, col_scale))


def sddmm_record(
    kernel: str,
    pattern: list[Tensor],
    x: QuantTensor | DenseFloats,
    y: QuantTensor | DenseFloats,
    inner_y: int,
    sizes: tuple[int, int, int],
    result: SRBCRS,
) -> SddmmRecord | None:
    """Return the record for these operands, or None if the engine cannot read every argument in place."""
    if kernel != "cpu" or cpu_extension.ENGINE is None or result.values.numel() == 0:
        return None
    row_scale, col_scale = (each.scale if result.values.is_floating_point() else None for each in (x, y))
    for scale in (row_scale, col_scale):
        if not is_cacheable(None, None, scale, None):
            return None
    operands = (
        cpu_engine.DenseOperand(x.data, x.bits, x.signed, -1, x.packed_dim),
        cpu_engine.DenseOperand(y.data, y.bits, y.signed, inner_y, y.packed_dim),
    )
    start, end, columns = pattern
    out = result.values
    call = cpu_engine.SddmmCall(*operands, (start, end, columns), out.shape, out.dtype, sizes, row_scale, col_scale)
    return SddmmRecord(call, result)
