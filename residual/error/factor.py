"""How far the norm of an error may exceed what Gaussian probes show of it."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

CONFIDENCE = 0.99
FAILURE = 1 - CONFIDENCE  # probability that a call returns a product beyond its tolerance, over all its rungs
_FIRST_SHARE = 0.9  # of that probability for the first rung; each later one has a tenth of the one before


def confidence(rung: int) -> float:
    """Return the confidence of the bound of a rung, counted from 0.

    The failure probabilities of all rungs add up to :data:`FAILURE` at most, so that no rung may depend on the
    probes of another.

    Examples
    --------
    >>> round(confidence(0), 4), round(confidence(1), 5)
    (0.991, 0.9991)
    """
    return 1 - FAILURE * _FIRST_SHARE * (1 - _FIRST_SHARE) ** rung


@lru_cache(maxsize=64)
def bound_factor(probes: int, confidence: float = CONFIDENCE) -> float:
    """Return the factor from the root-mean-square probe to an upper bound of the Frobenius norm.

    ``P(||E||_F <= factor * sqrt(mean_i ||E w_i||^2)) >= confidence`` with ``factor = sqrt(p / chi2.ppf(1 - c, p))``
    for `p` Gaussian probes. ``mean_i ||E w_i||^2 / ||E||_F^2`` is a convex mixture of chi-square(p)/p variables,
    weighted by the squared singular values of E; in the lower tail an E of rank one, one chi-square alone, is the
    worst case.

    Parameters
    ----------
    probes : int
        Number of Gaussian probes, at least 1.
    confidence : float, default 0.99
        Probability of the bound, in (0.5, 1).

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If an argument is out of range.

    Examples
    --------
    >>> round(bound_factor(16), 2), round(bound_factor(1), 1)
    (1.66, 79.8)
    """
    if probes < 1:
        raise ValueError(f"probes must be at least 1, got {probes}")
    if not 0.5 < confidence < 1:
        raise ValueError(f"confidence must be in (0.5, 1), got {confidence}")
    return math.sqrt(probes / _quantile(1 - confidence, probes))


@lru_cache(maxsize=64)
def _quantile(probability: float, freedom: int) -> float:
    """Return a quantile of the chi-square distribution."""
    from scipy.special import gammaincinv  # scipy takes longer to import than the whole package

    return 2 * float(gammaincinv(freedom / 2, probability))


@lru_cache(maxsize=1024)
def sharp_factor(share: float, probes: int, confidence: float) -> float:
    """Return the factor of :func:`bound_factor` for an error whose probes show its spread over singular values.

    With failure probability ``f = 1 - confidence`` it is the smaller one of

    * ``bound_factor(p, 1 - f / 2)``, which holds for any error;
    * ``y**-0.5`` for the y in (0, 1) with ``(1 - y + ln y) / (2 y b) = ln(f / 4)``, ``b = share / chi2.ppf(f / 4, p)``.

    The second: with s the largest singular value of E and u its left vector, ``|u^T Y| = s |g|`` for a Gaussian g in p
    dimensions, so ``s**2 <= b T`` but for f / 4. Given that, ``ln(1 + 2 t a)`` is concave in a, so among errors of
    one norm S the moment generating function of -T is largest with ``S**2 / s**2`` equal singular values, and
    Chernoff's bound gives ``T >= y p S**2`` but for f / 4.

    Parameters
    ----------
    share : float
        Bound of the largest eigenvalue of ``Y^T Y`` over its trace T, ``Y = E W``: 1 for an error of rank one, near
        ``1 / p`` for one of full rank.
    probes : int
        Number p of probes.
    confidence : float
        Probability of the bound.

    Returns
    -------
    float
        1.78 for rank one, 1.28 for full rank (16 probes, 99.1%).
    """
    failure = 1 - confidence
    plain = bound_factor(probes, 1 - failure / 2)
    b, aim = share / _quantile(failure / 4, probes), math.log(failure / 4)
    low, high = plain**-2, 1.0  # of y: below, the first one is smaller
    if (1 - low + math.log(low)) / (2 * low * b) > aim:
        return plain
    for _ in range(40):
        y = (low + high) / 2
        low, high = (y, high) if (1 - y + math.log(y)) / (2 * y * b) < aim else (low, y)
    return low**-0.5


def share_bound(gram: np.ndarray) -> float:
    """Return a bound of the largest eigenvalue of a Gram matrix of trace 1, at most a tenth above it for 16 rows.

    ``lambda**32 <= trace(G**32)``.
    """
    power = gram
    for _ in range(4):
        power = power @ power
    return min(float((power * power).sum()) ** (1 / 32) * (1 + 1e-12), 1.0)


def bound_of(gram: np.ndarray, noise: float, confidence: float) -> tuple[float, float]:
    """Return the estimate and the bound of ``||E||_F`` from the probes' Gram matrix.

    Parameters
    ----------
    gram : ndarray, shape (p, p)
        ``Y^T Y`` for a computed ``Y = E W + D``.
    noise : float
        Bound of ``||D||_F``, the probes' own rounding.
    confidence : float
        Probability of the bound.

    Returns
    -------
    tuple of float
        ``||Y||_F / sqrt(p)`` and ``factor * (||Y||_F + noise) / sqrt(p)``; both infinite if `gram` is not finite.
    """
    probes, trace = gram.shape[0], float(gram.trace())
    if not (math.isfinite(trace) and math.isfinite(noise)):
        return math.inf, math.inf
    norm = math.sqrt(trace)
    relative = noise / norm if norm else math.inf
    share = 1.0
    if relative < 1:  # the largest singular value of E W is within `noise` of that of Y, and so is its norm
        share = min(((math.sqrt(share_bound(gram / trace)) + relative) / (1 - relative)) ** 2, 1.0)
    share = math.ceil(share * 1024) / 1024  # so that few factors are ever computed
    bound = sharp_factor(share, probes, confidence) * (norm + noise) / math.sqrt(probes)
    return norm / math.sqrt(probes), bound
