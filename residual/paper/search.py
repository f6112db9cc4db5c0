"""The threshold of Algorithm 1 by the error that a caller allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from residual.error.estimate import ErrorEstimate
from residual.paper.quantize import QuantizedOperand
from residual.paper.thresholds import average

if TYPE_CHECKING:
    from residual.paper.device_operand import DeviceOperand

DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2)  # below the printed crossover of a CPU; then full compensation
_SAMPLE = 1 << 16  # entries whose quantiles stand for those of a matrix
Outcome = TypeVar("Outcome")


def candidate_thresholds(
    left: QuantizedOperand | DeviceOperand,
    right: QuantizedOperand | DeviceOperand,
    product: Tensor,
    rule: str,
    per_row: bool,
) -> list[float]:
    """Return thresholds that keep ever more: nothing, about each of `DENSITIES` of the operand that keeps more, all.

    They are quantiles of what an entry is compared with, over evenly spaced entries.

    Parameters
    ----------
    left, right : QuantizedOperand or DeviceOperand, shapes (M, K) and (K, N)
        Quantized operands.
    product : Tensor, shape (M, N)
        Dequantized product of the leading integers.
    rule : str
        One of :data:`residual.paper.thresholds.RULES`.
    per_row : bool
        Whether ``mean`` averages over rows and columns.

    Returns
    -------
    list of float
        From inf down to 0.
    """
    sides = (left.values, product), (right.values.T, product.T)
    ratios = [_ratios(values, sums, rule, per_row) for values, sums in sides]
    shares = torch.tensor([1 - density for density in DENSITIES], dtype=torch.float64, device="cpu")
    found = torch.stack([torch.quantile(r, shares.to(r.device)) for r in ratios if r.numel()] or [shares[:0]])
    kept = found.amax(0).tolist() if found.numel() else []
    return [math.inf, *sorted({t for t in kept if 0 < t < math.inf}, reverse=True), 0.0]


def _ratios(values: Tensor, product: Tensor, rule: str, per_row: bool) -> Tensor:
    """Thresholds up to which entries of a sample are kept, in float64."""
    level = 2 * average(values, per_row) if rule == "mean" else average(product, True)  # (M, 1) or ()
    number = values.numel()
    at = torch.arange(0, number, max(1, number // _SAMPLE) | 1, device=values.device)
    rows, columns = at // max(values.shape[1], 1), at % max(values.shape[1], 1)
    entries = values[rows, columns].double()
    key = entries if rule == "example" else entries.abs()
    return torch.nan_to_num(key / (level[rows, 0] if level.dim() else level), nan=0.0).clamp_(min=0.0)


def first_within(
    tol: float, thresholds: Sequence[float], run: Callable[[float], tuple[Outcome, ErrorEstimate]]
) -> tuple[Outcome, ErrorEstimate]:
    """Return what the largest threshold gives whose error is bounded by `tol`, found by bisection.

    An error that does not fall from one threshold to the next may hide a larger one; what is returned is measured.

    Raises
    ------
    ValueError
        If the smallest threshold misses `tol` too.

    Examples
    --------
    >>> def run(threshold):
    ...     return threshold, ErrorEstimate(threshold / 8, threshold / 4, 0.99)
    >>> first_within(0.3, (math.inf, 4.0, 2.0, 1.0, 0.5, 0.0), run)[0]
    1.0
    """
    low, high = 0, len(thresholds) - 1
    best: tuple[Outcome, ErrorEstimate] | None = None
    while low < high:
        middle = (low + high) // 2
        found = run(thresholds[middle])
        if found[1].accepts(tol):
            best, high = found, middle
        else:
            low = middle + 1
    best = best if best is not None else run(thresholds[high])
    if not best[1].accepts(tol):
        estimate = best[1]
        raise ValueError(
            f"tol must be at least the error of full compensation here, about {estimate.relative:.2g} (99% bound: "
            f"{estimate.upper:.2g}), got {tol:g}; use more bits or residual.matmul"
        )
    return best
