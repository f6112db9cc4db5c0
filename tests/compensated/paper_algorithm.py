"""Algorithm 1 of arXiv 2403.06924 in plain numpy, line by line; nothing of the library is used."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]


class Options(NamedTuple):
    """Options of ``residual.gemm`` by their names there."""

    bits: int = 8
    threshold: float = 0.0
    rule: str = "eq14"
    scaling: str = "tensor"
    rounding: str = "trunc"
    levels: str = "2^(N-1)-1"
    eta: float = 1.0
    vector_length: int = 1


class Outcome(NamedTuple):
    """The product and the densities of A' and B'."""

    product: Array
    densities: tuple[float, float]


def quantize(x: Array, axis: int, options: Options) -> tuple[Array, Array]:
    """Equations 1 and 2: integers and ``1 / lambda``; one lambda, or one per slice that `axis` runs along."""
    levels = 2 ** (options.bits - 1) - 1 if options.levels == "2^(N-1)-1" else 2 ** (options.bits - 2)
    top = np.abs(x).max(axis=axis if options.scaling == "vector" else None, keepdims=True).astype(np.float64)
    top = np.where(top == 0, float(levels), top)
    scale = top / levels
    quotient = x.astype(np.float64) / scale
    # In doubles, a quotient that is an integer may end some units in the last place below it, the maximum's own too.
    integers = np.trunc(quotient * (1 + 2.0**-49)) if options.rounding == "trunc" else np.rint(quotient)
    return integers, scale


def reduce(x: Array, product: Array, options: Options) -> NDArray[np.bool_]:
    """Line 7: which entries of A stay in A'; for B, with the transposes."""
    if options.threshold in (0, np.inf):
        kept = (x != 0) & (options.threshold == 0)
    elif options.rule == "mean":
        mean = np.abs(x.astype(np.float64)).mean(axis=1 if options.scaling == "vector" else None, keepdims=True)
        kept = np.abs(x) > 2 * options.threshold * mean
    else:
        level = options.threshold * np.abs(product).mean(axis=1, keepdims=True)
        kept = (x if options.rule == "example" else np.abs(x)) > level
    rows = np.arange(len(x)) // options.vector_length
    return np.stack([kept[rows == row].any(axis=0) for row in rows])


def algorithm_1(A: Array, B: Array, options: Options) -> Outcome:
    """``A B`` by Algorithm 1, in float64 but for the residuals, which have the dtype of their operands."""
    (a, sa), (b, sb) = quantize(A, 1, options), quantize(B, 0, options)
    D = (a @ b) * sa * sb
    RA, RB = ((X.astype(np.float64) - x * s).astype(X.dtype) for X, x, s in ((A, a, sa), (B, b, sb)))
    (ra, sra), (rb, srb) = quantize(RA, 1, options), quantize(RB, 0, options)
    keep_a, keep_b = reduce(A, D, options), reduce(B.T, D.T, options).T
    densities = float(keep_a.mean()), float(keep_b.mean())
    if max(densities) == 0:
        return Outcome(D, densities)
    if max(densities) < options.eta:
        (a, sa), (b, sb) = quantize(A * keep_a, 1, options), quantize(B * keep_b, 0, options)
    return Outcome(D + (a @ rb) * sa * srb + (ra @ b) * sra * sb, densities)
