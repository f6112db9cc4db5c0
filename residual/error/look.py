"""The error of a product of digits, measured by probes before the product.

With the digits ``A = A_0 + A_1 + .. + dA`` and likewise B, where ``A_i = scale q_i / 2^(bits i)`` and dA is what they
leave, a product of some pairs (i, j) of digit planes misses

    E = A dB + dA (B - dB) + sum over the other pairs of A_i B_j

before C is rounded. Every factor is exact in float64 and none is a difference of large numbers, so one pass over B and
one over A give ``E W``, with the bound of its rounding as in :mod:`residual.error.probes`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from residual.error.probes import Probes, ProbeSums, gamma, row_chunks, steps, two_level, underflow

_EXTRA = 8  # roundings of the digits' parts and of the sums over groups
_SLACK = 1.01


class DigitPlanes(NamedTuple):
    """``X ~ scale * sum_i planes[i] / 2**(bits i)`` for the rows of X (L, K)."""

    planes: tuple[Tensor, ...]  # (L, K) int8 each
    scale: Tensor  # (L,) float64
    bits: int
    pairs: frozenset[tuple[int, int]]  # pairs of planes whose products the mode adds


class RightLook(NamedTuple):
    """What the pass over B leaves: a group per factor of A (A, dA, then A_i for left-out pairs)."""

    vectors: Tensor  # (groups, K, p) float64
    bounds: Tensor  # (groups, K) float64
    in_range: bool  # float32, whose products and squares do not underflow


def _parts(x: Tensor, digits: DigitPlanes, rows: slice) -> tuple[list[Tensor], Tensor]:
    """Return the parts ``X_i`` of rows and what they leave, float64."""
    scale, base = digits.scale[rows, None], 2.0**-digits.bits
    parts = [plane[rows].double() * (scale * base**i) for i, plane in enumerate(digits.planes)]  # (rows, K) each
    rest = x[rows].double()
    for part in parts:
        rest = rest - part
    return parts, rest


def _left_out(digits: DigitPlanes) -> list[tuple[int, list[int]]]:
    """Return each plane of A whose products with some planes of B are left out, and those planes."""
    count = len(digits.planes)
    found = [(i, [j for j in range(count) if (i, j) not in digits.pairs]) for i in range(count)]
    return [(i, planes) for i, planes in found if planes]


def look_right(lines: Tensor, digits: DigitPlanes, probes: Probes) -> RightLook:
    """Return the pass over B.

    Parameters
    ----------
    lines : Tensor, shape (N, K)
        Columns of B, float32 or float64, finite.
    digits : DigitPlanes
        Of `lines`.
    probes : Probes
        N probes.

    Returns
    -------
    RightLook
    """
    n, k = lines.shape
    left_out = _left_out(digits)
    shape = 2 + len(left_out), k
    vectors = torch.zeros(*shape, probes.vectors.shape[1], dtype=torch.float64, device=lines.device)
    bounds = torch.zeros(shape, dtype=torch.float64, device=lines.device)
    w = probes.vectors.double()
    whole = slice(0, n)
    for columns in row_chunks(k, 4 * n):
        chunk = digits._replace(planes=tuple(plane[:, columns] for plane in digits.planes))
        parts, rest = _parts(lines[:, columns], chunk, whole)
        kept = torch.stack(parts).sum(0)
        groups = [rest, kept, *(torch.stack([parts[j] for j in planes]).sum(0) for _, planes in left_out)]
        for g, group in enumerate(groups):
            vectors[g, columns] = two_level(group.mT.contiguous(), w)
            bounds[g, columns] = group.mT.abs() @ probes.norms
    return RightLook(vectors, bounds, lines.dtype == torch.float32)


def look(lines: Tensor, digits: DigitPlanes, right: RightLook, BW: Tensor, n: int) -> tuple[ProbeSums, float]:
    """Return the sums of ``Y = E W`` and the bound of its rounding.

    Parameters
    ----------
    lines : Tensor, shape (M, K)
        Rows of A, float32 or float64, finite.
    digits : DigitPlanes
        Of `lines`.
    right : RightLook
        The pass over B.
    BW : Tensor, shape (K, p)
        ``B W``, for the size of AB.
    n : int
        Columns of B.

    Returns
    -------
    tuple
        The sums, whose `result` is the estimate ``||A (B W)||_F^2 / p`` until the product is there, and ``eta``.
    """
    m, k = lines.shape
    p = right.vectors.shape[2]
    left_out = [i for i, _ in _left_out(digits)]
    gram = torch.zeros(p, p, dtype=torch.float64, device=lines.device)
    sums = torch.zeros(3, dtype=torch.float64, device=lines.device)
    for rows in row_chunks(m, 4 * k):
        parts, rest = _parts(lines, digits, rows)
        x = lines[rows].double()
        groups = [x, rest, *(parts[i] for i in left_out)]
        pairs = list(zip(groups, right.vectors, right.bounds, strict=True))
        y = torch.stack([two_level(group, vectors) for group, vectors, _ in pairs]).sum(0)  # (rows, p)
        bound = torch.stack([group.abs() @ each for group, _, each in pairs]).sum(0)  # (rows,)
        size = x.abs() @ right.bounds[:2].sum(0)  # |A| (|dB| + |B - dB|) wbar
        gram += y.mT @ y
        sums += torch.stack([part.square().sum() for part in (two_level(x, BW), bound, size)])
    numbers = torch.cat([gram.flatten(), sums]).cpu().numpy()
    product, bound_squared, inputs = numbers[p * p :].tolist()
    found = ProbeSums(numbers[: p * p].reshape(p, p), product, product, product / p, inputs, 0.0)
    rounding = gamma(steps(k) + steps(n) + _EXTRA) * math.sqrt(bound_squared)
    rounding += 2**-52 * math.sqrt(float(found.gram.trace()))
    exact = not rounding and right.in_range and lines.dtype == torch.float32
    return found, 0.0 if exact else _SLACK * rounding + underflow(m)
