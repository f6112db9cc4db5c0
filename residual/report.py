"""What a product reports, and the error it raises."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from residual.error.estimate import ErrorEstimate


@dataclass(frozen=True)
class Attempt:
    """A rung that was measured.

    Attributes
    ----------
    plan : str
        The rung, such as ``int8 direct`` or ``fp32``.
    estimated, upper : float
        Estimate and bound of its relative Frobenius error. Where rows of A excluded it, `estimated` is of these and
        `upper` infinite.
    noise : float
        Part of `upper` that the rounding of the probes takes.

    Examples
    --------
    >>> import residual
    >>> _, report = residual.matmul(torch.ones(2, 3), torch.ones(3, 2), tol=1e-3, return_report=True)
    >>> report.attempts[-1].plan, report.attempts[-1].upper < 1e-3
    ('fp32', True)
    """

    plan: str
    estimated: float
    upper: float
    noise: float = 0.0


@dataclass(frozen=True)
class Report:
    """How a product was computed.

    Attributes
    ----------
    plan : str
        The rung of the result, such as ``int8 direct`` or ``fp32``.
    estimated_error : float
        Estimate of its relative Frobenius error.
    upper : float
        Bound of that error.
    confidence : float
        Probability that the error is within ``tol``, over the draws of the probes and all attempts.
    products : float
        Dense integer products of the whole size that the rung takes; 0 for a float product.
    attempts : tuple of Attempt
        Every rung that was measured; the last one is the result's.

    Examples
    --------
    >>> import residual
    >>> _, report = residual.matmul(torch.ones(2, 3), torch.ones(3, 2), tol=1e-3, return_report=True)
    >>> report.plan, report.products, report.confidence
    ('fp32', 0.0, 0.99)
    """

    plan: str
    estimated_error: float
    upper: float
    confidence: float
    products: float
    attempts: tuple[Attempt, ...]

    @property
    def predicted_error(self) -> float:
        """Deprecated: errors are measured, no longer predicted; `estimated_error`."""
        warnings.warn("predicted_error is now estimated_error", DeprecationWarning, stacklevel=2)
        return self.estimated_error


Missed = tuple[tuple[Attempt, ErrorEstimate], ...]  # rungs that are not within the tolerance
EMPTY = Report("empty", 0.0, 0.0, 1.0, 0, ())


class ToleranceError(ArithmeticError):
    """No rung met the tolerance; `report` lists those that were measured.

    Examples
    --------
    >>> import residual
    >>> try:
    ...     residual.matmul(torch.tensor([[1.0, 2.0**-60, -1.0]]), torch.ones(3, 1), tol=1e-3)
    ... except residual.ToleranceError as error:
    ...     print(error.report.plan)
    fp32
    """

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


def rounding_of(dtype: torch.dtype) -> float:
    """Return the relative error of rounding a matrix to `dtype`, about; 0 for float32 and float64."""
    return 0.0 if dtype in (torch.float32, torch.float64) else 0.2 * torch.finfo(dtype).eps


def attempt_of(rung: object, estimate: ErrorEstimate) -> Attempt:
    """Return the attempt at a rung."""
    return Attempt(str(rung), estimate.relative, estimate.upper, estimate.noise)


def tolerance_error(
    tol: float, found: Sequence[tuple[Attempt, ErrorEstimate]], report: Report, out_dtype: torch.dtype, fallback: bool
) -> ToleranceError:
    """Return the error of a product that no rung computes within `tol`."""
    attempt, estimate = min(found, key=lambda each: each[0].upper)
    size = f"error <= {attempt.upper:.1e}" if attempt.upper < 1 else "error unknown"
    text = f"no rung met tol={tol:g}; best: {attempt.plan}, {size}"
    if len(found) > 1:
        text += f" (measured: {', '.join(f'{each.plan} {each.estimated:.1e}' for each, _ in found)})"
    if estimate.is_uncertain(tol) and estimate.cancellation < 1:
        text += f"; AB is below {max(estimate.cancellation, 1e-99):.0e} of |A||B|"
    if 2 * rounding_of(out_dtype) > tol:
        text += f"; {out_dtype} rounds by {rounding_of(out_dtype):.1e}, use out_dtype=torch.float32"
    elif not fallback:
        text += "; use on_failure='fallback'"
    return ToleranceError(text, report)
