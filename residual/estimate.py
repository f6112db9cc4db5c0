"""The measured relative error of a product, at the price of a few matrix-vector products."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

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
    """Factor from the root-mean-square probe to an upper bound of the Frobenius norm.

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
    from scipy.stats import chi2  # scipy.stats takes longer to import than the whole package

    return math.sqrt(probes / float(chi2.ppf(1 - confidence, probes)))


def estimate_error(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    probes: int = 16,
    generator: torch.Generator | None = None,
) -> ErrorEstimate:
    """Estimate the relative Frobenius error of ``C`` against ``A @ B`` without computing ``A @ B``.

    With ``W`` an ``N x p`` standard normal matrix, ``P = A (B W)`` and ``Q = C W``, all in float64:

    * ``e = ||P - Q||_F / sqrt(p)`` estimates ``||AB - C||_F`` and ``u = bound_factor(p) e`` bounds it at 99%;
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

    Source: Gu, arXiv 2403.06924 (the error measured); bound by the chi-square quantile of a rank-1 error.
    """
    factor = bound_factor(probes)
    a, b, c = (_operand(name, t) for name, t in (("A", A), ("B", B), ("C", C)))
    _check_shapes(a, b, c)
    device = generator.device if generator is not None else torch.device("cpu")
    w = torch.randn(c.shape[1], probes, dtype=torch.float64, device=device, generator=generator).to(a.device)
    product = a @ (b @ w)  # (M, p)
    claimed = c @ w  # (M, p)
    error = float((product - claimed).norm()) / math.sqrt(probes)
    if error == 0:
        return ErrorEstimate(0.0, 0.0, CONFIDENCE)
    norm = float(c.norm())
    drift = (float(product.norm()) ** 2 - float(claimed.norm()) ** 2) / probes
    squared = norm**2 + drift
    if squared <= 0 or not product.any():  # the probes outweigh the exact norm: C is far off, take the plain ratio
        squared = float(product.norm()) ** 2 / probes
    relative = error / math.sqrt(squared) if squared > 0 else math.inf
    bound = factor * error
    return ErrorEstimate(relative, bound / (norm - bound) if norm > bound else math.inf, CONFIDENCE)


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
