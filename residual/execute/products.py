"""The products of the rungs and of the modes that are asked for by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from residual.error.estimate import by_power
from residual.operand.cross_terms import cross_digits, sparse_product
from residual.operand.ieee import float_product
from residual.operand.operand import Digits, Operand
from residual.planning.ladder import PLANES, TERMS, Rung

_COLUMNS = 1 / 8  # share of k in the cross terms of `columns`
_THRESHOLD = 3 / 16  # of the largest digit, from which an entry takes part in the cross terms of `sparse`


def _fp16(rung: Rung, left: Operand, right: Operand, a: None, b: None) -> Tensor:
    """Operands of one 16-bit float dtype as they are, sums in float32; on a GPU."""
    lhs, rhs = (side.real.to(side.given.dtype) for side in (left, right))
    return torch.mm(lhs, rhs.mT, out_dtype=torch.float32)  # (M, N)


def _fp32(rung: Rung, left: Operand, right: Operand, a: None, b: None) -> Tensor:
    return float_product(left.real, right.real.mT)  # (M, N)


def digit_product(
    a: Digits, b: Digits, bits: int, terms: int = 1, alpha: float = 1.0, c: Tensor | None = None
) -> Tensor:
    """Return ``alpha a b + c`` (M, N) of rows `a` and columns `b` by `terms` products of their planes.

    Several terms on a CPU add in float64, so that levels which cancel leave no error; else float32.
    """
    from cute_kernels.gemm.api import gemm  # takes longer to import than this package

    columns = tuple(plane.mT for plane in b.planes)  # (K, N) each
    wide = terms > 1 and a.scale.device.type == "cpu"
    scales = (a.scale.double(), b.scale.double()) if wide else (a.scale, b.scale)
    return gemm(
        a.planes, columns, terms=terms, shift=bits, scale_a=scales[0], scale_b=scales[1], alpha=alpha,
        beta=0.0 if c is None else 1.0, c=c, out_dtype=torch.float64 if wide else torch.float32,
    )  # fmt: skip


def _dense(rung: Rung, left: Operand, right: Operand, a: Digits, b: Digits) -> Tensor:
    return digit_product(a, b, rung.bits, TERMS[rung.mode])


def _centered(rung: Rung, left: Operand, right: Operand, a: Digits, b: Digits) -> Tensor:
    """``A B = (A - a 1^T)(B - 1 b) + K a b`` for the means a of A's rows and b of B's columns."""
    assert a.mean is not None and b.mean is not None
    return digit_product(a, b, rung.bits).addr_(a.mean, b.mean, alpha=left.given.shape[1])  # (M, N)


def _outlier(rung: Rung, left: Operand, right: Operand, a: Digits, b: Digits) -> Tensor:
    """Columns of k in which A or B has outliers as a float32 product, the others as integers."""
    hot = left.hot() | right.hot()  # (K,)
    product = digit_product(left.digits(rung, hot), b, rung.bits)
    columns = hot.nonzero().flatten()
    return product.add_(float_product(left.real[:, columns], right.real[:, columns].mT))  # (M, N)


def _first_residual(side: Operand, digits: Digits) -> Tensor:
    """Energy of what one digit leaves, per column of k, (K,)."""
    return (side.real - digits.scale[:, None] * digits.planes[0]).square_().sum(0)


def _columns(rung: Rung, left: Operand, right: Operand, a: Digits, b: Digits) -> Tensor:
    """``A1 B1 + (A1 B0 + A0 B1) / 2**bits``, the cross terms over the columns of k that need them most."""
    energy = _first_residual(left, a) * right.real.square().sum(0) + _first_residual(right, b) * left.real.square().sum(
        0
    )
    chosen = energy.argsort(descending=True, stable=True)[: max(1, round(_COLUMNS * energy.shape[0]))]
    product = digit_product(Digits(a.planes[:1], a.scale), Digits(b.planes[:1], b.scale), rung.bits)
    cross = cross_digits(a, b, chosen)
    return digit_product(*cross, rung.bits, alpha=2.0**-rung.bits, c=product)


def _sparse(rung: Rung, left: Operand, right: Operand, a: Digits, b: Digits) -> Tensor:
    """``A1 B1 + (A1' B0 + A0 B1') / 2**bits`` with A1' and B1' the entries that reach the threshold."""
    threshold = max(1, round(_THRESHOLD * (2 ** (rung.bits - 1) - 1)))
    product = digit_product(Digits(a.planes[:1], a.scale), Digits(b.planes[:1], b.scale), rung.bits)
    cross = sparse_product(a.planes[0], b.planes[1], threshold)  # (M, N)
    other = sparse_product(b.planes[0], a.planes[1], threshold)  # (N, M)
    total = (cross + other.mT).float() * (a.scale * 2.0**-rung.bits)[:, None] * b.scale  # (M, N)
    return product.add_(total)


_FLOATS: dict[str, Callable[..., Tensor]] = {"fp16": _fp16, "fp32": _fp32}
_DIGITS: dict[str, Callable[..., Tensor]] = {
    "centered": _centered, "outlier": _outlier, "columns": _columns, "sparse": _sparse, **dict.fromkeys(PLANES, _dense)
}  # fmt: skip


def execute(
    rung: Rung, left: Operand, right: Operand, out_dtype: torch.dtype, a: Digits | None, b: Digits | None
) -> Tensor:
    """Return ``A B`` (M, N) by a rung, slices with inf or NaN counting as zeros.

    Parameters
    ----------
    rung : Rung
        What to run.
    left, right : Operand
        Rows of A (M, K), columns of B (N, K).
    out_dtype : torch.dtype
        Of the result.
    a, b : Digits, optional
        Their digits for the rung; None for float products, and for digits that are to be made.
    """
    if rung.mode == "fp64":
        product = left.exact.double() @ right.exact.double().mT  # (M, N)
        return by_power(product, left.power + right.power).to(out_dtype)
    if rung.bits:
        a, b = a or left.digits(rung), b or right.digits(rung)
    product = (_DIGITS if rung.bits else _FLOATS)[rung.mode](rung, left, right, a, b)  # (M, N)
    if left.exponent is not None or right.exponent is not None:
        rows = 0 if left.exponent is None else left.exponent[:, None]  # (M, 1)
        columns = 0 if right.exponent is None else right.exponent  # (N,)
        product = by_power(product, rows + columns)  # (M, N)
    return product.to(out_dtype)


def rounding(rung: Rung, out_dtype: torch.dtype) -> float:
    """Return the bound of what :func:`execute` rounds beyond its digits, relative to C."""
    last = torch.finfo(out_dtype).eps / 2
    if rung.mode == "direct":
        return 2.0**-21 + (last if out_dtype != torch.float64 else 0.0)
    return last


def rounds_levels(rung: Rung, device: torch.device) -> bool:
    """Return whether the levels of a product of several digits add in float32, whose error C alone shows."""
    return rung.mode != "direct" and device.type != "cpu"
