"""The ways to compute a product: names and sizes, no tensors."""

from __future__ import annotations

from typing import NamedTuple

COUNTS = {"direct": (1, 1), "full": (2, 3), "full4": (2, 4), "three_digit": (3, 6)}  # planes, terms: those of ``auto``
WAITING = ("outlier", "columns", "sparse")  # those whose work depends on the data, of all lines
COLUMN_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
SPARSE_LEVELS = (1 / 16, 3 / 16, 1 / 2)  # of the largest digit


class GpuPlan(NamedTuple):
    """One way to compute a product.

    ``mode``: one of :data:`residual.planning.ladder.MODES`, ``fp16``, ``fp32`` or ``fp64``; ``bits``: of a digit, 0 for
    a float product; ``share``: of the columns of k in the cross products of ``columns``, or the level, as a share of
    the largest digit, from which an entry takes part in those of ``sparse``; else 0.
    """

    mode: str
    bits: int = 0
    share: float = 0.0

    @property
    def products(self) -> float:
        """Dense integer products of the whole size; the sparse ones of ``sparse`` are not counted."""
        if self.mode == "columns":
            return 1 + 2 * self.share
        return {"fp16": 0, "fp32": 0, "fp64": 0, "full": 3, "full4": 4, "three_digit": 6}.get(self.mode, 1)

    @property
    def threshold(self) -> int:
        """Smallest leading digit that takes part in the cross products of ``sparse``."""
        return max(1, round(self.share * (2 ** (self.bits - 1) - 1)))

    def __str__(self) -> str:
        kind = f"int{self.bits} {self.mode}" if self.bits else self.mode
        if self.mode == "columns":
            return f"{kind} {self.share:g}"
        return f"{kind} {self.threshold}" if self.mode == "sparse" else kind


def plans_of(mode: str, widths: tuple[int, ...]) -> list[GpuPlan]:
    """Every plan of a mode with digits of these widths.

    ``auto`` has those of :data:`COUNTS`: in 60 measured cases it never chose another one.
    """
    shares = {"columns": COLUMN_SHARES, "sparse": SPARSE_LEVELS}
    modes = tuple(COUNTS) if mode == "auto" else (mode,)
    plans = [GpuPlan(m, bits, share) for bits in widths for m in modes for share in shares.get(m, (0.0,))]
    return list({str(plan): plan for plan in plans}.values())  # few levels of 4 bits make different thresholds
