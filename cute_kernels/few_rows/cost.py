"""Predicted time of the product of few rows on an H200, weights from memory; needs no GPU."""

from __future__ import annotations

import math

from cute_kernels.few_rows.formats import FORMATS, PAD_K, UNIT_K, UNIT_ROWS

__all__ = ["MOST_ROWS", "few_rows_seconds"]

MOST_ROWS = 64  # of a tile; more take several, which no figure is fitted to
# Fitted to benchmarks/results/few_rows_h200.json (behind another kernel, weights cold): 120 times within 10%.
_LAUNCH, _BANDWIDTH = 4.60e-6, 4.7e12
_WORK = {8: 0.051e-12, 16: 0.0898e-12, 32: 0.1184e-12, 64: 0.1804e-12}  # seconds per weight by rows of a tile
_SCALES = 3.36  # share that scales of groups add to a weight's work, times k that share one
_SIX_BITS = 0.267  # share that codes across byte boundaries add
_INTEGERS = 0.062  # share less for integers


def few_rows_seconds(weight: str, m: int, n: int, k: int) -> float:
    """Return the predicted seconds of a product of `m` rows (m, k) by weights (n, k).

    ``launch + sqrt(memory^2 + work^2)``: reading weights and scales beside decoding and multiplying them.

    Parameters
    ----------
    weight : str
        Name of a weight format, of :data:`cute_kernels.few_rows.formats.FORMATS`.
    m : int
        Rows, 1 to 64.
    n, k : int
        Outputs and inputs.

    Raises
    ------
    ValueError
        For another format or number of rows.

    Examples
    --------
    >>> round(1e6 * few_rows_seconds("int4_g128", 16, 14336, 4096), 1)  # measured: 12.6
    13.0
    """
    if weight not in FORMATS:
        raise ValueError(f"weight must be one of {', '.join(FORMATS)}, got {weight!r}")
    if not 1 <= m <= MOST_ROWS:
        raise ValueError(f"m must be from 1 to {MOST_ROWS}, got {m}")
    form, rows = FORMATS[weight], next(rows for rows in _WORK if m <= rows)
    units = -(-n // UNIT_ROWS) * -(-k // PAD_K) * (PAD_K // UNIT_K)
    more = (_SCALES / form.group if form.group else 0.0) + (_SIX_BITS if form.bits == 6 else 0.0)
    more -= _INTEGERS if form.codes.startswith("int") else 0.0
    work = units * UNIT_ROWS * UNIT_K * _WORK[rows] * (1 + more)
    return _LAUNCH + math.hypot(units * form.unit_bytes / _BANDWIDTH, work)
