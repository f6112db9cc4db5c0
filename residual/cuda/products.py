"""The ways to compute a product from digits, and their execution on two operands."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residual.cuda.operand import GpuOperand
from residual.cuda.plans import COUNTS, GpuPlan
from residual.operand.cross_terms import cross_digits, sparse_product
from residual.operand.ieee import float_product
from residual.operand.operand import Digits

if TYPE_CHECKING:
    from cute_kernels.jit import LaunchCache


def product_16bit(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``a b`` (M, N) of operands of one 16-bit float dtype; an output of that dtype is torch's product as it is."""
    return torch.mm(a, b) if out_dtype == a.dtype else torch.mm(a, b, out_dtype=torch.float32).to(out_dtype)


def _fp16(left: GpuOperand, right: GpuOperand, out_dtype: torch.dtype) -> Tensor:
    """Entries rounded to float16, unless both operands are of one 16-bit float dtype; on a GPU."""
    a, b = left.half, right.half
    if a.dtype != b.dtype:
        a, b = a.half(), b.half()
    return product_16bit(a, b.mT, out_dtype)


def _fp32(plan: GpuPlan, left: GpuOperand, right: GpuOperand, order: Tensor | None) -> Tensor:
    return float_product(left.values, right.values.mT)  # (M, N)


def _fp64(plan: GpuPlan, left: GpuOperand, right: GpuOperand, order: Tensor | None) -> Tensor:
    return left.finite() @ right.finite().mT  # (M, N)


def _digit_product(
    a: Digits,
    b: Digits,
    shift: int,
    terms: int = 1,
    alpha: float = 1.0,
    c: Tensor | None = None,
) -> Tensor:
    """``alpha a b + c`` (M, N) in float32 of rows ``a`` and columns ``b``, by so many products of their planes."""
    from cute_kernels.gemm.api import gemm  # takes longer to import than this package

    def product(out: Tensor | None) -> Tensor:
        columns = tuple(plane.mT for plane in b.planes)  # (K, N) each
        return gemm(
            a.planes, columns, terms=terms, shift=shift, scale_a=a.scale, scale_b=b.scale, alpha=alpha,
            beta=0.0 if c is None else 1.0, c=c, out=out, out_dtype=torch.float32,
        )  # fmt: skip

    planes = (*a.planes, *b.planes)
    if c is not None or not planes[0].is_cuda or not all(_reads_in_place(plane) for plane in planes):
        return product(None)
    target = torch.empty(a.scale.shape[0], b.scale.shape[0], device=a.scale.device)  # (M, N)
    places = tuple((plane.data_ptr(), plane.stride(0)) for plane in planes)
    kind = planes[0].shape, len(a.planes), target.shape, target.device, shift, terms, alpha
    where = places, *(x.data_ptr() for x in (a.scale, b.scale, target))
    _replays().run((kind, where), lambda: product(target))
    return target


@lru_cache
def _replays() -> LaunchCache:
    from cute_kernels.jit import LaunchCache  # needs the CUDA wheels

    return LaunchCache(256)


def _reads_in_place(plane: Tensor) -> bool:
    from cute_kernels.operands import is_ready

    return is_ready(plane)


def _dense(plan: GpuPlan, left: GpuOperand, right: GpuOperand, order: Tensor | None) -> Tensor:
    planes, terms = COUNTS[plan.mode]
    return _digit_product(left.digits(plan.bits, planes), right.digits(plan.bits, planes), plan.bits, terms)


def _centered(plan: GpuPlan, left: GpuOperand, right: GpuOperand, order: Tensor | None) -> Tensor:
    """``A B = (A - a 1^T)(B - 1 b) + K a b`` for the means a of A's rows and b of B's columns."""
    a, b = left.digits(plan.bits, 1, "centered"), right.digits(plan.bits, 1, "centered")
    assert a.mean is not None and b.mean is not None
    return _digit_product(a, b, plan.bits).addr_(a.mean, b.mean, alpha=left.given.shape[1])  # (M, N)


def _outlier(plan: GpuPlan, left: GpuOperand, right: GpuOperand, order: Tensor | None) -> Tensor:
    """Columns of k in which A or B has outliers as a float32 product, the others as integers."""
    hot = left.hot() | right.hot()  # (K,)
    product = _digit_product(
        left.digits(plan.bits, 1, "outlier", hot), right.digits(plan.bits, 1, "outlier"), plan.bits
    )
    columns = hot.nonzero().flatten()
    return product.add_(float_product(left.values[:, columns], right.values[:, columns].mT))  # (M, N)


def _columns(plan: GpuPlan, left: GpuOperand, right: GpuOperand, order: Tensor | None) -> Tensor:
    """``A1 B1 + (A1 B0 + A0 B1) / 2**bits``, the cross products over the chosen columns of k only."""
    assert order is not None
    a, b = left.digits(plan.bits, 2), right.digits(plan.bits, 2)
    product = _digit_product(a, b, plan.bits)
    chosen = order[: max(1, round(plan.share * order.shape[0]))]
    cross = cross_digits(a, b, chosen)
    return _digit_product(*cross, plan.bits, alpha=2.0**-plan.bits, c=product)


def _sparse(plan: GpuPlan, left: GpuOperand, right: GpuOperand, order: Tensor | None) -> Tensor:
    """``A1 B1 + (A1' B0 + A0 B1') / 2**bits`` with A1' and B1' the entries that reach the threshold."""
    a, b = left.digits(plan.bits, 2), right.digits(plan.bits, 2)
    product = _digit_product(a, b, plan.bits)
    cross = sparse_product(a.planes[0], b.planes[1], plan.threshold)  # (M, N)
    other = sparse_product(b.planes[0], a.planes[1], plan.threshold)  # (N, M)
    total = (cross + other.mT).float() * (a.scale * 2.0**-plan.bits)[:, None] * b.scale  # (M, N)
    return product.add_(total)


_RUNS: dict[str, Callable[[GpuPlan, GpuOperand, GpuOperand, Tensor | None], Tensor]] = {
    "fp32": _fp32, "fp64": _fp64, "centered": _centered, "outlier": _outlier, "columns": _columns, "sparse": _sparse,
    **dict.fromkeys(COUNTS, _dense),
}  # fmt: skip


def run_plan(
    plan: GpuPlan, left: GpuOperand, right: GpuOperand, order: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``A B`` (M, N) by a plan, lines with inf or NaN counting as zeros.

    ``left``: rows of A (M, K); ``right``: columns of B (N, K); ``order``: columns of k, those that the cross products
    of ``columns`` need most first.
    """
    is_scaled = left.exponent is not None or right.exponent is not None
    if plan.mode == "fp16":
        product = _fp16(left, right, torch.float32 if is_scaled else out_dtype)  # (M, N)
    else:
        product = _RUNS[plan.mode](plan, left, right, order)  # (M, N)
    if plan.mode != "fp64" and is_scaled:
        zero = torch.zeros((), dtype=torch.int32, device=product.device)
        rows = zero if left.exponent is None else left.exponent[:, None]  # (M, 1)
        columns = zero if right.exponent is None else right.exponent  # (N,)
        product = product.double() * torch.exp2((rows + columns).double())  # (M, N)
    return product.to(out_dtype)
