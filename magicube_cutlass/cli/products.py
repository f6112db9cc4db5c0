"""What running a product for show needs: random operands, the exact check, and the dense product to compare with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.integers import fits, int_range, product_bound, widen
from magicube_cutlass import reference
from magicube_cutlass.pattern import Pattern
from magicube_cutlass.quantize import QuantTensor
from magicube_cutlass.srbcrs import SRBCRS

CHECK_WORK = 200_000_000  # products that the int64 reference may cost before only some rows are checked


def random_operand(rows: int, cols: int, bits: int, seed: int) -> QuantTensor:
    """Uniform integers of the whole signed range, without a scale."""
    low, high = int_range(bits, True)
    ints = torch.randint(low, high + 1, (rows, cols), generator=torch.Generator().manual_seed(seed))
    return QuantTensor.from_ints(ints, bits=bits)


def random_matrix(pattern: Pattern, bits: int, seed: int) -> SRBCRS:
    """Uniform integers of the whole signed range on ``pattern``."""
    low, high = int_range(bits, True)
    shape = (pattern.vectors, pattern.vector_length)
    vectors = torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))
    return SRBCRS.from_pattern(pattern, vectors, bits=bits)


def exact_dtype(inner: int, lhs_bits: int, rhs_bits: int) -> torch.dtype:
    """int32 where no sum of ``inner`` products can overflow it, else int64."""
    bound = product_bound(inner, lhs_bits, True, rhs_bits, True)
    return torch.int32 if fits(bound, torch.int32) else torch.int64


def _some_vector_rows(pattern: Pattern, cost: int, work: int) -> Tensor:
    """Vector rows spread evenly over the matrix, as many as ``work`` allows at ``cost`` each; at least one."""
    count = min(pattern.vector_rows, max(1, work // max(1, cost)))
    return torch.linspace(0, pattern.vector_rows - 1, count).round().long().unique() if count else torch.arange(0)


def check_spmm(lhs: SRBCRS, rhs: QuantTensor, product: Tensor, work: int = CHECK_WORK) -> int:
    """Compare ``product`` with the int64 reference for equality; return the number of rows compared.

    Compares all rows where the reference costs at most ``work`` products, else vector rows spread over the matrix.
    Raises ``ArithmeticError`` with the first wrong element.
    """
    pattern, v = lhs.pattern, lhs.vector_length
    chosen = _some_vector_rows(pattern, v * pattern.shape[1] * rhs.shape[-1], work)  # the reference is dense
    lengths = pattern.row_lengths[chosen]
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    kept = torch.isin(pattern.row_indices, chosen)
    part = Pattern((len(chosen) * v, pattern.shape[1]), v, offsets, pattern.col_indices[kept])
    vectors = widen(lhs.vectors())[kept]
    expected = reference.spmm(SRBCRS.from_pattern(part, vectors, bits=lhs.bits, signed=lhs.signed), rhs)
    rows = (chosen[:, None] * v + torch.arange(v)).flatten()
    inside = rows < pattern.shape[0]
    rows, expected = rows[inside], expected[inside]
    wrong = (product[rows].to(torch.int64) != expected).nonzero()
    if len(wrong):
        at, column = (int(x) for x in wrong[0])
        raise ArithmeticError(
            f"element ({int(rows[at])}, {column}) is {int(product[rows[at], column])}, "
            f"the reference says {int(expected[at, column])}"
        )
    return len(rows)


def dense_rivals(lhs: SRBCRS, rhs: QuantTensor) -> dict[str, Callable[[], object]]:
    """The dense product on the decompressed matrix; empty where torch has none that is as exact.

    Operands of at most 8 bits go through ``torch._int_mm``.  Its CPU kernel takes any shape, so nothing is padded; it
    is given both layouts of the right operand, since which one is faster depends on the shape.
    """
    if lhs.bits not in (4, 8) or rhs.bits not in (4, 8):
        return {}
    dense, right = lhs.to_dense(dequantize=False).contiguous(), rhs.ints().contiguous()
    right_columns = right.t().contiguous().t()
    return {
        "dense": lambda: torch._int_mm(dense, right),
        "dense, column-major": lambda: torch._int_mm(dense, right_columns),
    }
