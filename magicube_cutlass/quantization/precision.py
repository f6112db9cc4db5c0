"""Which operand widths multiply, and which output types can hold the result."""

from __future__ import annotations

import torch

from cute_kernels.integers import check_bits, fits, product_bound

INTEGER_OUT = (torch.int32, torch.int64)
FLOAT_OUT = (torch.float32, torch.float16, torch.bfloat16)


def check_out_dtype(dtype: torch.dtype) -> None:
    """Raise ``TypeError`` unless ``dtype`` is an output type of the products."""
    if dtype not in INTEGER_OUT + FLOAT_OUT:
        raise TypeError(f"out_dtype must be one of {INTEGER_OUT + FLOAT_OUT}, got {dtype}")


def check_fits(dtype: torch.dtype, inner: int, left: tuple[int, bool], right: tuple[int, bool]) -> None:
    """Raise ``ValueError`` when a sum of ``inner`` products of (bits, signed) integers may not fit ``dtype``.

    The bound is ``inner * max|left| * max|right|`` over all values of these widths, so it never depends on the data.
    """
    check_bits(left[0])
    check_bits(right[0])
    bound = product_bound(inner, *left, *right)
    if dtype in INTEGER_OUT and not fits(bound, dtype):
        wider = "torch.int64, torch.float32" if dtype == torch.int32 else "torch.float32"
        raise ValueError(
            f"out_dtype {dtype} holds magnitudes up to {torch.iinfo(dtype).max}, but a sum of {inner} products of "
            f"{left[0]}-bit by {right[0]}-bit integers can reach {bound}; choose {wider} or a scaled half type"
        )
