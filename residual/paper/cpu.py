"""Lines 7 to 17 of Algorithm 1 on the CPU engine: selection, compression, and corrections added in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cute_kernels.cpu import compensate, engine

if TYPE_CHECKING:
    from residual.paper.quantize import QuantizedOperand, Quantizer


class Reduction(NamedTuple):
    """What is kept, and how it is multiplied."""

    threshold: float
    rule: str
    eta: float
    vector_length: int


class Selections(NamedTuple):
    """The entries of A, and of the transpose of B, that stay, counted."""

    a: compensate.EntrySelection
    b: compensate.EntrySelection

    @property
    def densities(self) -> tuple[float, float]:
        """Kept shares of A and B."""
        a, b = (each.count / max(each.shape[0] * each.shape[1], 1) for each in self)
        return a, b


def runs_in_engine(left: QuantizedOperand, right: QuantizedOperand, total: Tensor) -> bool:
    """Return whether the engine can select and correct: float32, nothing empty, sums that int32 holds."""
    sides = left.values, right.values
    if total.dtype != torch.float32 or total.device.type != "cpu" or not engine.available():
        return False
    return all(side.numel() for side in sides) and left.values.shape[1] <= compensate.MAX_K


def select(
    left: QuantizedOperand, right: QuantizedOperand, total: Tensor, reduction: Reduction, per_row: bool
) -> Selections:
    """Count what :func:`residual.paper.thresholds.kept_entries` keeps of A and B."""
    (m, k), n = left.values.shape, right.values.shape[1]
    threshold, rule = reduction.threshold, reduction.rule
    if threshold == 0:
        averages = torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu")
    elif rule == "mean":
        assert left.sums is not None and right.sums is not None
        averages = left.sums / (k if per_row else m * k), right.sums / (k if per_row else k * n)
        threshold *= 2
    else:
        rows, columns = compensate.magnitude_sums(total)
        averages = rows / n, columns / m
    a, b = ((threshold * average).float() for average in averages)
    is_signed, v = bool(rule == "example" and threshold != 0), reduction.vector_length
    return Selections(
        compensate.EntrySelection(left.values, a, vector_length=v, is_signed=is_signed),
        compensate.EntrySelection(right.values, b, transposed=True, vector_length=v, is_signed=is_signed),
    )


def compress(selection: compensate.EntrySelection, how: Quantizer) -> tuple[engine.SparseOperand, Tensor]:
    """Return the reduced matrix as sparse integers with its own lambda, and its scale in float32."""
    top = (selection.largest if how.axis is not None else selection.largest.max().view(1)).double()
    scale = top / how.levels
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return selection.compress(scale, truncate=how.rounding == "trunc"), scale.float()


def correct(
    total: Tensor,
    left: QuantizedOperand,
    right: QuantizedOperand,
    hows: Sequence[Quantizer],
    selections: Selections,
    lap: Callable[[str], None],
) -> None:
    """Add both sparse corrections to the product (M, N), in place; that of B as a product of transposes."""
    products = (total, right.residual, selections.a), (total.T, left.residual.T, selections.b)
    for (out, residual, selection), how in zip(products, hows, strict=True):
        if selection.count:
            sparse, scale = compress(selection, how)
            lap("compress")
            compensate.correct(out, sparse, residual.integers, scale, residual.scale.float().flatten().contiguous())
            lap("correct")
