"""Bounds of a float32 product on a CPU that cost less than the check of any product: by norms, or by three probes."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.cpu.estimate import FEW_PROBES, BoundSums, bound_sums
from residual.error.estimate import relative_bound
from residual.error.factor import bound_factor, confidence
from residual.error.probes import draw, gamma

UNIT = 2.0**-24  # unit roundoff of float32
LEAST = 1e-6  # tolerance below which three probes, at 12 times the error, accept hardly any product
_SLACK = 1.001  # covers the rounding of sums of up to 2^40 squares
_UNDERFLOW = 2.0**-126  # what an entry of a product loses below the range of float32
_EXTRA = 8  # roundings besides those of the sums


class FewProbes(NamedTuple):
    """Probes as :func:`cute_kernels.cpu.estimate.bound_sums` takes them."""

    vectors: Tensor  # (3, N) float64: W^T
    norm: float  # ||W||_F


def _few(n: int, seed: int | None) -> FewProbes:
    vectors = draw(n, torch.device("cpu"), seed, FEW_PROBES).vectors.double().t().contiguous()
    return FewProbes(vectors, float(torch.linalg.vector_norm(vectors)))


_few_of_seed = lru_cache(maxsize=16)(_few)


@lru_cache
def _factor() -> float:
    """Return the bound over ``||E W||_F`` for three probes: the second share of all failures, errors of rank one."""
    return bound_factor(FEW_PROBES, confidence(1)) / math.sqrt(FEW_PROBES)


def norm_bound(sums: BoundSums, m: int, k: int, n: int) -> float:
    """Return a bound of ``||AB - C||_F / ||AB||_F`` for a float32 product of (m, k) by (k, n) in any order of sums.

    ``|AB - C| <= g(K) |A| |B|`` with ``g(n) = n u / (1 - n u)``, ``u = 2^-24`` [1]_, so that
    ``||AB - C||_F <= g(K) ||A||_F ||B||_F``. Infinite if that proves nothing.

    References
    ----------
    .. [1] Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM 2002, equation 3.13.

    Examples
    --------
    >>> _, sums = bound_sums(torch.rand(64, 64), torch.rand(64, 64))
    >>> norm_bound(sums, 64, 64, 64) < 1e-5
    True
    >>> norm_bound(BoundSums(2.0, 3.0, 0.0, 0.0), 1, 3, 1)
    inf
    """
    steps = (k + 1) * UNIT
    if not (math.isfinite(sums.c) and steps < 0.5):
        return math.inf
    bound = _SLACK * steps / (1 - steps) * math.sqrt(sums.a * sums.b) + math.sqrt(m * n) * k * _UNDERFLOW
    return relative_bound(bound, math.sqrt(sums.c) / _SLACK)


def probe_bound(sums: BoundSums, k: int, probes: FewProbes) -> float:
    """Return a bound of the same for any C, which holds with the confidence of a second rung over the probes.

    The factor is that of errors of rank one, 11.5. With u = 2^-53 the rounding of ``Y = A (B W) - C W`` is at most
    ``g(K + N) ||A||_F ||B||_F ||W||_F + g(N) ||C||_F ||W||_F``.
    """
    if not math.isfinite(sums.error):
        return math.inf
    n = probes.vectors.shape[1]
    rounding = gamma(k + n + _EXTRA) * math.sqrt(sums.a * sums.b) + gamma(n + _EXTRA) * math.sqrt(sums.c)
    bound = _SLACK * _factor() * (math.sqrt(sums.error) + rounding * probes.norm)
    return relative_bound(bound, math.sqrt(sums.c) / _SLACK)


def is_provable(k: int, tol: float) -> bool:
    """Return whether norms prove `tol` of a sum over `k` products of both signs, about.

    Examples
    --------
    >>> is_provable(1024, 2e-3), is_provable(1024, 1e-3)
    (True, False)
    """
    return tol >= k**1.5 * UNIT


def bounded_product(A: Tensor, B: Tensor, tol: float, seed: int | None) -> tuple[Tensor, bool] | None:
    """Return a float32 product, and whether norms prove that it is within `tol` or three probes show it.

    Parameters
    ----------
    A, B : Tensor, shapes (M, K) and (K, N)
        Operands.
    tol : float
        Tolerance of ``||AB - C||_F / ||AB||_F``.
    seed : int or None
        Of the probes; None draws one.

    Returns
    -------
    tuple or None
        None if neither can show `tol`, or the operands are no float32 matrices on a CPU that the engine reads.

    Examples
    --------
    >>> A, B = torch.ones(4, 4), torch.ones(4, 4)
    >>> product, within = bounded_product(A, B, 1e-3, 0)
    >>> product[0, 0].item(), within, bounded_product(A, B, 1e-9, 0)
    (4.0, True, None)
    """
    (m, k), n = A.shape, B.shape[1]
    found = None
    if is_provable(k, tol):
        found = bound_sums(A, B)
        if found is None or norm_bound(found[1], m, k, n) <= tol:
            return found and (found[0], True)
    if tol < LEAST:
        return found and (found[0], False)
    probes = _few(n, None) if seed is None else _few_of_seed(n, seed)
    found = bound_sums(A, B, probes.vectors, found and found[0])
    return found and (found[0], probe_bound(found[1], k, probes) <= tol)


def relative_difference(x: Tensor, y: Tensor) -> float:
    """Return a bound of ``||x - y||_F / ||x||_F``, near it where entries are far above 1e-19.

    NaN for zeros, inf and NaN, and where a sum leaves the range of float32.

    Parameters
    ----------
    x, y : Tensor, shape (M, N)
        float32, and what it was rounded to. Rows are summed in float32, in any order.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> 0.3651 < relative_difference(x, x - 1) < 0.3652
    True
    """
    of_rows = torch.stack([torch.linalg.vector_norm(each, dim=1) for each in (x, x - y)])  # (2, M)
    size, rest = torch.linalg.vector_norm(of_rows, dim=1, dtype=torch.float64).tolist()
    slack, lost = x.shape[1] * 2.0**-23, math.sqrt(x.numel()) * 2.0**-62  # squares below the range of float32
    if not (0 < size < math.inf and slack < 1):
        return math.nan
    return (rest * (1 + slack) + lost) / (size * (1 - slack))
