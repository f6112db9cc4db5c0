"""The relative error of a product, bounded by probes for the cost of a few matrix-vector products."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from residual.error.factor import CONFIDENCE, bound_of, sharp_factor
from residual.error.probes import PROBES, ProbeSums, draw, judge, noise, probe_right, probes_from

_EXACT_INTEGERS = 2.0**53
NORM = 1 - 2.0**-30  # covers the rounding of the sum of squares of C


@dataclass(frozen=True)
class ErrorEstimate:
    """Relative Frobenius error of a product ``C ~ A B``.

    Attributes
    ----------
    relative : float
        Estimate of ``||AB - C||_F / ||AB||_F``.
    upper : float
        Bound of it, which holds with probability `confidence`. The rounding of the probes is included.
    confidence : float
        Probability of `upper` over the draws of the probes.
    noise : float
        Part of `upper` that the rounding of the probes takes; no product has a bound below it.
    cancellation : float
        Size of AB relative to ``|A||B|``, about.

    Examples
    --------
    >>> A, B = torch.ones(4, 4), torch.ones(4, 4)
    >>> found = estimate_error(A, B, 1.01 * (A @ B))
    >>> 0.008 < found.relative < 0.012, 0.01 < found.upper < 0.02, found.accepts(0.02)
    (True, True, True)
    """

    relative: float
    upper: float
    confidence: float
    noise: float = 0.0
    cancellation: float = 1.0

    def accepts(self, tol: float) -> bool:
        """Return whether the error is within `tol` at the stated confidence."""
        return self.upper <= tol

    def is_uncertain(self, tol: float) -> bool:
        """Return whether `tol` is missed because the probes' own rounding takes half of it or more."""
        return self.upper > tol and self.noise > tol / 2


def relative_bound(bound: float, norm: float) -> float:
    """Return the bound of an error relative to AB from its own and the norm of C: ``||AB|| >= ||C|| - ||E||``."""
    return bound / (norm - bound) if norm > bound else 0.0 if bound == 0 else math.inf


def from_sums(
    sums: ProbeSums, eta: float, confidence: float, rounding: float = 0.0, enough: float = 0.0
) -> ErrorEstimate:
    """Return the estimate by the sums of the probes.

    Parameters
    ----------
    sums : ProbeSums
        Of ``Y = E W``; `result` is ``||C||_F^2``.
    eta : float
        Bound of the rounding of `Y`.
    confidence : float
        Probability of the bound.
    rounding : float, default 0.0
        Part of the error that `Y` does not show, in the Frobenius norm.
    enough : float, default 0.0
        No sharper bound is computed if that for errors of rank one is within it.

    Returns
    -------
    ErrorEstimate
        Infinite if a sum is not finite.
    """
    probes, norm = sums.gram.shape[0], math.sqrt(sums.result) if sums.result >= 0 else math.nan
    trace = float(sums.gram.trace())
    if not (math.isfinite(trace) and math.isfinite(eta) and math.isfinite(norm)):
        return ErrorEstimate(math.inf, math.inf, confidence)
    weight = sums.single or probes  # of ||E||^2 in ||Y||^2: exact for one column, else what the probes have on average
    coarse = (1 / NORM if sums.single else sharp_factor(1.0, probes, confidence)) / math.sqrt(weight)
    error, bound = math.sqrt(trace / weight), coarse * (math.sqrt(trace) + eta)
    if not sums.single and relative_bound(bound + rounding, norm * NORM) > enough:
        _, bound = bound_of(sums.gram, eta, confidence)
    bound += rounding
    product = math.sqrt(sums.product / weight)
    size = product
    if norm > 0:  # the norm of C is exact: only its small difference from that of AB is left to the probes
        squared = norm**2 + (sums.product - sums.claimed) / weight
        if squared > 0 and product > 0:
            size = math.sqrt(squared)
    relative = 0.0 if not error else error / size if size else math.inf
    inputs = math.sqrt(sums.inputs / weight)
    return ErrorEstimate(
        relative if math.isfinite(relative) else math.inf,
        relative_bound(bound, norm * NORM),
        confidence,
        relative_bound(coarse * eta, norm * NORM),
        min((norm + bound) / inputs, 1.0) if inputs else 1.0,
    )


def power_of(x: Tensor) -> int:
    """Return the exponent of the power of two that brings the largest magnitude of float64 numbers to one."""
    largest = float(x.abs().amax()) if x.numel() else 0.0
    return math.frexp(largest)[1] if math.isfinite(largest) else 0


def by_power(x: Tensor, exponent: int | Tensor) -> Tensor:
    """Return ``x * 2**exponent`` in float64, in two steps so that neither factor leaves the range."""
    if isinstance(exponent, int) and not exponent:
        return x
    powers = torch.as_tensor(exponent, device=x.device)
    half = powers // 2
    ones = torch.ones_like(half, dtype=torch.float64)
    return x.double() * torch.ldexp(ones, half) * torch.ldexp(ones, powers - half)


def is_inexact(x: Tensor) -> bool:
    """Return whether conversion to float64 may round entries: 64-bit integers from 2^53 on."""
    if x.is_floating_point() or x.element_size() < 8 or not x.numel():
        return False
    return float(x.double().abs().amax()) >= _EXACT_INTEGERS


def estimate_error(
    A: Tensor,
    B: Tensor,
    C: Tensor,
    probes: int = PROBES,
    generator: torch.Generator | None = None,
    *,
    seed: int | None = 0,
) -> ErrorEstimate:
    """Bound the relative Frobenius error of ``C`` against ``A @ B`` without computing ``A @ B``.

    With W of p Gaussian probes and ``Y = A (B W) - C W``, all in float64: ``e = ||Y||_F / sqrt(p)`` estimates
    ``||AB - C||_F``, and ``b = f (||Y||_F + eta) / sqrt(p)`` bounds it at 99%, whatever the error. `f` is 1.78 for an
    error of rank one and about 1.3 for one of full rank [1]_ (p = 16). With one column, ``||Y||_F / ||W||_F`` is the
    norm itself. `eta` bounds the rounding of Y [2]_, so that terms which the probes absorb or cancel count as error.
    The bound is ``b / (||C||_F - b)``.

    Parameters
    ----------
    A : Tensor, shape (M, K)
        A real dtype.
    B : Tensor, shape (K, N)
        A real dtype, on the device of `A`.
    C : Tensor, shape (M, N)
        A real dtype, on the device of `A`: the product under test, such as one of tf32 or fp8.
    probes : int, default 16
        Number p of probes; ``2 p (MK + KN + MN)`` operations.
    generator : torch.Generator, optional
        Source of the probes instead of `seed`, on a device of its own.
    seed : int or None, default 0
        Of the probes; None draws one.

    Returns
    -------
    ErrorEstimate
        `upper` is infinite if C has little to do with AB, or if AB cancels beyond the range of float64 probes.

    Raises
    ------
    TypeError
        If an operand is not a real tensor.
    ValueError
        If a shape or device does not match, an operand is not finite, or `probes` is below 1.

    References
    ----------
    .. [1] ``residual.error.factor.sharp_factor``.
    .. [2] Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1.
    .. [3] Freivalds, IFIP Congress 1977, 839; Hutchinson, Commun. Stat. Simul. Comput. 18 (1989), 1059 (probes).

    Examples
    --------
    >>> A, B = torch.randn(64, 64), torch.randn(64, 64)
    >>> estimate_error(A, B, A @ B).upper < 1e-6 < estimate_error(A, B, (A @ B).bfloat16()).relative
    True
    >>> estimate_error(torch.tensor([[1.0, 2.0**-60, -1.0]]), torch.ones(3, 1), torch.zeros(1, 1)).upper
    inf
    """
    if probes < 1:
        raise ValueError(f"probes must be at least 1, got {probes}")
    _check_operands(A, B, C)
    inexact = sum(map(is_inexact, (A, B))) + 2 * is_inexact(C)
    a, b, c = (x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().double() for x in (A, B, C))
    left, right = (power_of(x) if x.dtype == torch.float64 else 0 for x in (a, b))
    w = draw(c.shape[1], a.device, seed, probes) if generator is None else _from(generator, c, probes)
    with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        product, bound = probe_right(by_power(b, -right), *w)
        sums = judge(by_power(a, -left), product, bound, by_power(c, -left - right), *w)
    return from_sums(sums, noise(sums, A, B, inexact), CONFIDENCE)


def _from(generator: torch.Generator, c: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return probes_from(c.shape[1], c.device, generator, count)


def _check_operands(A: Tensor, B: Tensor, C: Tensor) -> None:
    for name, x in (("A", A), ("B", B), ("C", C)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.is_complex():
            raise TypeError(f"{name} must be real, got {x.dtype}")
        if x.dim() != 2:
            raise ValueError(f"{name} must be 2-D, got {x.dim()} dimensions")
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            raise ValueError(f"{name} must be finite, but holds inf or nan")
        if x.device != A.device:
            raise ValueError(f"{name} must be on the device of A, got {x.device} and {A.device}")
    if A.shape[1] != B.shape[0]:
        raise ValueError(f"B must have {A.shape[1]} rows to match A of shape {tuple(A.shape)}, got {B.shape[0]}")
    if C.shape != (A.shape[0], B.shape[1]):
        raise ValueError(f"C must have shape {(A.shape[0], B.shape[1])}, got {tuple(C.shape)}")
