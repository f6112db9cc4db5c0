"""What running a product for show needs: random operands, the exact check, and the dense product to compare with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.integers import fits, int_range, product_bound
from magicube_cutlass import reference
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.quantization.quant_tensor import QuantTensor

FLOAT64_EXACT = 2**53  # float64 holds every integer up to here


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


def exact_spmm(lhs: SRBCRS, rhs: QuantTensor) -> Tensor:
    """``A B`` of the integers of two single matrices, (M, N) int64.

    Goes through float64, which holds every partial sum exactly while no sum can reach 2**53; the time and the memory
    of that follow the stored elements.  Longer sums go through the int64 reference.  Raises ``ValueError`` for a
    matrix of results, which has no bits.
    """
    if lhs.bits is None:
        raise ValueError("lhs must be quantized integers, got a matrix of results")
    if product_bound(lhs.shape[1], lhs.bits, lhs.signed, rhs.bits, rhs.signed) >= FLOAT64_EXACT:
        return reference.spmm(lhs, rhs)
    left, right = lhs.to_scipy(dequantize=False).astype("float64"), rhs.ints().double().numpy()
    return torch.from_numpy(left @ right).to(torch.int64)


def check_spmm(lhs: SRBCRS, rhs: QuantTensor, product: Tensor) -> None:
    """Raise ``ArithmeticError`` with the first wrong element unless ``product`` is the exact one in every row."""
    expected = exact_spmm(lhs, rhs)
    wrong = (product.to(torch.int64) != expected).nonzero()
    if len(wrong):
        row, column = (int(x) for x in wrong[0])
        raise ArithmeticError(
            f"element ({row}, {column}) is {int(product[row, column])}, "
            f"the exact product has {int(expected[row, column])}"
        )


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
