"""Products of 16-bit floats by their float32 copies, which are exact: what copies have to meet, and the rounding."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from residual.error.float32 import relative_difference
from residual.operand.operand import FLOATS
from residual.options import Options
from residual.report import Report, rounding_of

_ROUNDINGS = 1.5  # of an output to 16 bits on average, that a tolerance leaves room for


def options_of_copies(dtypes: set[torch.dtype], out_dtype: torch.dtype, options: Options) -> Options | None:
    """Return the options of the product of float32 copies, to float32.

    None for an output and operands, whose `dtypes` these are, that are float32 already or no floats of 16 or 32 bits,
    and where the rounding of the output takes the whole tolerance.

    Examples
    --------
    >>> found = options_of_copies({torch.bfloat16}, torch.bfloat16, Options(tol=1e-2))
    >>> found.out_dtype, round(found.tol, 4)
    (torch.float32, 0.0077)
    >>> options_of_copies({torch.bfloat16}, torch.bfloat16, Options(tol=1e-3)) is None
    True
    """
    every = {*dtypes, out_dtype}
    tol = (options.tol or 0.0) - _ROUNDINGS * rounding_of(out_dtype)
    if every == {torch.float32} or not every <= set(FLOATS) or tol <= 0:
        return None
    return options._replace(tol=tol, out_dtype=torch.float32)


def round_product(product: Tensor, upper: float, tol: float, out_dtype: torch.dtype) -> tuple[Tensor, float] | None:
    """Return a float32 product C, whose error is at most `upper`, in `out_dtype`, and its rounding; None beyond `tol`.

    ``||AB - C'|| <= ||AB - C|| + ||C - C'||``, whose last term is measured.
    """
    made = product.to(out_dtype)
    rounding = relative_difference(product, made)
    return (made, rounding) if with_rounding(upper, rounding) <= tol else None


def with_rounding(upper: float, rounding: float) -> float:
    """Return the bound of a product whose error is at most `upper` and whose entries were rounded.

    Examples
    --------
    >>> with_rounding(0.5, 0.25)
    0.875
    """
    return upper + (1 + upper) * rounding


def report_of(report: Report, rounding: float) -> Report:
    """Return the report of a product that was rounded."""
    upper, error = with_rounding(report.upper, rounding), math.hypot(report.estimated_error, rounding)
    last = replace(report.attempts[-1], estimated=error, upper=upper)
    return replace(report, estimated_error=error, upper=upper, attempts=(*report.attempts[:-1], last))
