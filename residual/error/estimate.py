"""The measured relative error of a product, at the price of a few matrix-vector products."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

CONFIDENCE = 0.99


@dataclass(frozen=True)
class ErrorEstimate:
    """``relative`` estimates ``||AB - C||_F / ||AB||_F``; it is at most ``upper`` with probability ``confidence``."""

    relative: float
    upper: float
    confidence: float


@lru_cache(maxsize=64)
def bound_factor(probes: int, confidence: float = CONFIDENCE) -> float:
    """ScaleArg from the root-mean-square probe to an upper bound of the Frobenius norm.

    ``P(||E||_F <= factor * sqrt(mean_i ||E w_i||^2)) >= confidence`` with ``factor = sqrt(p / chi2.ppf(1 - c, p))``
    for ``p`` Gaussian probes. ``mean_i ||E w_i||^2 / ||E||_F^2`` is a convex mixture of chi-square(p)/p variables,
    weighted by the squared singular values of ``E``; in the lower tail a rank-1 ``E``, one chi-square alone, is the
    worst case. 16 probes at 99% give 1.66; one probe gives 79.8.

    Args:
        probes: number of Gaussian probes, at least 1.
        confidence: probability of the bound, in (0.5, 1).

    Raises:
        ValueError: ``probes`` or ``confidence`` is out of range.
    """
    if probes < 1:
        raise ValueError(f"probes must be at least 1, got {probes}")
    if not 0.5 < confidence < 1:
        raise ValueError(f"confidence must be in (0.5, 1), got {confidence}")
    return math.sqrt(probes / _quantile(1 - confidence, probes))


@lru_cache(maxsize=64)
def _quantile(probability: float, freedom: int) -> float:
    """Of the chi-square distribution."""
    from scipy.special import gammaincinv  # scipy takes longer to import than the whole package

    return 2 * float(gammaincinv(freedom / 2, probability))


@lru_cache(maxsize=1024)
def sharp_factor(share: float, probes: int, confidence: float) -> float:
    """As :func:`bound_factor`, of probes that tell how the error is spread over its singular values.

    ``share``: largest eigenvalue of the Gram matrix of ``Y = E W`` over its trace T, 1 for an error of rank one and
    near ``1 / p`` for one of full rank. With failure probability ``f = 1 - confidence`` it is the smaller one of

    * ``bound_factor(p, 1 - f / 2)``, which any error keeps;
    * ``y**-0.5`` for the y in (0, 1) with ``(1 - y + ln y) / (2 y b) = ln(f / 4)``, ``b = share / chi2.ppf(f / 4, p)``.

    The second: with s the largest singular value of E and u its left vector, ``|u^T Y| = s |g|`` for a Gaussian g in p
    dimensions, so ``s**2 <= b T`` but for f / 4. Given that, ``ln(1 + 2 t a)`` is concave in a, so among errors of
    one norm S the moment generating function of -T is largest with ``S**2 / s**2`` equal singular values, and
    Chernoff's bound gives ``T >= y p S**2`` but for f / 4.
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


def estimate_error(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    probes: int = 16,
    generator: torch.Generator | None = None,
) -> ErrorEstimate:
    """Estimate the relative Frobenius error of ``C`` against ``A @ B`` without computing ``A @ B``.

    With ``W`` an ``N x p`` standard normal matrix, ``P = A (B W)`` and ``Q = C W``, all in float64:

    * ``e = ||P - Q||_F / sqrt(p)`` estimates ``||AB - C||_F`` and ``u = f e`` bounds it at 99%, with ``f``
      of ``sharp_factor``: 1.78 for an error of rank one, about 1.3 for one of full rank (p = 16);
    * ``relative = e / sqrt(||C||_F^2 + (||P||_F^2 - ||Q||_F^2) / p)``: the norm of ``C`` is exact, and only its small
      difference from that of ``AB`` is left to the probes;
    * ``upper = u / (||C||_F - u)``, a bound at the same 99% because ``||AB||_F >= ||C||_F - ||AB - C||_F``; it is
      ``inf`` where ``u >= ||C||_F``, that is, where ``C`` has little to do with ``A @ B``.

    Errors below about ``1e-15 * sqrt(K)`` drown in the rounding of float64.

    Args:
        A: ``(M, K)``, any real dtype.
        B: ``(K, N)``, on the device of ``A``.
        C: ``(M, N)``, on the device of ``A``; the product under test.
        probes: number of Gaussian probes ``p``; the cost is ``2 p (MK + KN + MN)`` operations.
        generator: source of the probes, on its own device; ``None`` takes torch's default generator of the CPU.

    Returns:
        An :class:`ErrorEstimate`; all zeros where ``A @ B`` and ``C`` agree exactly, also when both are empty.

    Raises:
        TypeError: an operand is no real tensor.
        ValueError: a shape or device does not fit, an operand holds inf or nan, or ``probes < 1``.

    Source: Gu, arXiv 2403.06924 (the error measured); bound by ``residual.error.estimate.sharp_factor``.
    """
    if probes < 1:
        raise ValueError(f"probes must be at least 1, got {probes}")
    a, b, c = (_operand(name, t) for name, t in (("A", A), ("B", B), ("C", C)))
    _check_shapes(a, b, c)
    device = generator.device if generator is not None else torch.device("cpu")
    w = torch.randn(c.shape[1], probes, dtype=torch.float64, device=device, generator=generator).to(a.device)
    return estimate_from_probes(a @ (b @ w), c @ w, c, CONFIDENCE)


def estimate_from_probes(
    product: torch.Tensor, claimed: torch.Tensor, C: torch.Tensor, confidence: float
) -> ErrorEstimate:
    """The estimate from the probes' products ``A (B W)`` and ``C W``, (M, p) each; waits for a GPU once.

    What is not finite has infinite error.
    """
    difference = product.double() - claimed.double()  # (M, p)
    peak, scaled = _to_one(difference)
    gram = scaled.mT @ scaled  # (p, p)
    sizes = torch.stack([peak, frobenius(product), frobenius(claimed), frobenius(C)])
    numbers = torch.cat([gram.flatten(), sizes]).cpu()
    largest, *norms = numbers[-4:].tolist()
    return from_sums(numbers[:-4].view(gram.shape).numpy(), largest, norms[0], norms[1], norms[2], confidence)


def from_sums(
    gram: np.ndarray,
    unit: float,
    norm_product: float,
    norm_claimed: float,
    norm: float,
    confidence: float,
    tol: float = 0.0,
) -> ErrorEstimate:
    """The estimate from ``Y^T Y / unit**2`` (p, p) of ``Y = A (B W) - C W``, float64 on the CPU, and the norms of
    ``A (B W)``, ``C W`` and C.  Where a coarse ``upper`` is within ``tol`` no sharper one is computed."""
    probes, trace = gram.shape[0], float(gram.trace())
    if unit == 0 or trace == 0:
        return ErrorEstimate(0.0, 0.0, confidence)
    if not math.isfinite(unit) or not math.isfinite(trace) or not math.isfinite(norm):
        return ErrorEstimate(math.inf, math.inf, confidence)
    error = unit * math.sqrt(trace / probes)
    size = norm_product / math.sqrt(probes)
    if norm > 0:
        squared = 1 + ((norm_product / norm) ** 2 - (norm_claimed / norm) ** 2) / probes
        if squared > 0 and norm_product > 0:  # else the probes outweigh the exact norm: C is far off
            size = norm * math.sqrt(squared)
    relative = error / size if size > 0 else math.inf
    upper = relative_bound(sharp_factor(1.0, probes, confidence) * error, norm)
    if upper > tol:
        upper = relative_bound(bound_of(gram, unit, confidence)[1], norm)
    return ErrorEstimate(relative, upper, confidence)


def bound_of(gram: np.ndarray, unit: float, confidence: float) -> tuple[float, float]:
    """Estimate and bound of ``||E||_F`` from ``Y^T Y / unit**2`` (p, p) of ``Y = E W``; infinite where that is."""
    probes, trace = gram.shape[0], float(gram.trace())
    if not math.isfinite(trace):
        return math.inf, math.inf
    error = unit * math.sqrt(trace / probes)
    return error, sharp_factor(_share_at_most(gram / trace), probes, confidence) * error if error else 0.0


def relative_bound(bound: float, norm: float) -> float:
    """Bound of an error relative to AB, from its own and the norm of C."""
    return bound / (norm - bound) if norm > bound else math.inf


def _share_at_most(gram: np.ndarray) -> float:
    """Bound of the largest eigenvalue of a Gram matrix of trace 1, above it by a tenth at most for 16 rows.

    ``lambda**32 <= trace(G**32)``, rounded up to a multiple of 1/1024 so that few bounds are ever computed.
    """
    power = gram
    for _ in range(4):
        power = power @ power
    share = float((power * power).sum()) ** (1 / 32) * (1 + 1e-12)
    return min(math.ceil(share * 1024) / 1024, 1.0)


def _to_one(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest magnitude of ``x`` as float64 (), and ``x`` over it, whose squares neither overflow nor vanish."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=x.device), x
    peak = x.abs().amax()
    return peak.double(), x / torch.where(peak > 0, peak, torch.ones_like(peak))


def frobenius(x: torch.Tensor) -> torch.Tensor:
    """Frobenius norm as float64 (), of a float64 matrix whatever its scale; rows are summed in float32 at least."""
    if x.dtype == torch.float64:
        peak, scaled = _to_one(x)
        return peak * torch.linalg.vector_norm(scaled)
    rows = torch.linalg.vector_norm(x.float(), dim=1) if x.numel() else x.new_zeros(1)  # (M,)
    return torch.linalg.vector_norm(rows, dtype=torch.float64)


def _operand(name: str, t: torch.Tensor) -> torch.Tensor:
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    if t.is_complex():
        raise TypeError(f"{name} must be real, got {t.dtype}")
    if t.dim() != 2:
        raise ValueError(f"{name} must be 2-D, got {t.dim()} dimensions")
    exact = t.detach().double()
    if not bool(torch.isfinite(exact).all()):
        raise ValueError(f"{name} must be finite, but holds inf or nan")
    return exact


def _check_shapes(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"B must have as many rows as A has columns, got {b.shape[0]} and {a.shape[1]}")
    if c.shape != (a.shape[0], b.shape[1]):
        raise ValueError(f"C must have shape {(a.shape[0], b.shape[1])}, got {tuple(c.shape)}")
    for name, t in (("B", b), ("C", c)):
        if t.device != a.device:
            raise ValueError(f"{name} must be on the device of A, got {t.device} and {a.device}")
