"""Checks of the arguments of :func:`residual.gemm`."""

from __future__ import annotations

import math
import warnings

from torch import Tensor

from residual.paper.thresholds import RULES

SCALINGS = ("tensor", "vector")
LEVELS = ("2^(N-1)-1", "2^(N-2)")
ROUNDINGS = ("nearest", "trunc")
_MIN_BITS, _MAX_BITS = 2, 8
_RENAMED = {"eq14_signed": "example"}


def current_rule(rule: str) -> str:
    """Return the name of a rule that was renamed, with a warning."""
    if rule not in _RENAMED:
        return rule
    warnings.warn(f"rule={rule!r} is now rule={_RENAMED[rule]!r}", DeprecationWarning, stacklevel=3)
    return _RENAMED[rule]


def check_paper_options(
    bits: int,
    threshold: float,
    rule: str,
    scaling: str,
    rounding: str,
    levels: str,
    eta: float | None,
    alpha: float,
    beta: float,
) -> None:
    """Raise unless every option is in its range."""
    if isinstance(bits, bool) or not isinstance(bits, int) or not _MIN_BITS <= bits <= _MAX_BITS:
        raise ValueError(f"bits must be an integer from {_MIN_BITS} to {_MAX_BITS}, got {bits!r}")
    named = ("rule", rule, RULES), ("scaling", scaling, SCALINGS), ("levels", levels, LEVELS)
    for name, value, allowed in (*named, ("rounding", rounding, ROUNDINGS)):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
    if levels == LEVELS[1] and bits < 3:
        raise ValueError(f"levels {levels!r} needs at least 3 bits, got {bits}")
    if not threshold >= 0:
        raise ValueError(f"threshold must be at least 0, got {threshold}")
    if eta is not None and not 0 <= eta <= 1:
        raise ValueError(f"eta must be None or in [0, 1], got {eta}")
    for name, factor in (("alpha", alpha), ("beta", beta)):
        if not math.isfinite(factor):
            raise ValueError(f"{name} must be finite, got {factor}")


def check_tolerance(tol: float | None, threshold: float) -> None:
    """Raise unless a tolerance is above 0 and stands alone."""
    if tol is None:
        return
    if not 0 < tol < math.inf:
        raise ValueError(f"tol must be None or above 0, got {tol}")
    if threshold != 0:
        raise ValueError(f"threshold must be 0 where tol is given, got {threshold}; tol finds it")


def check_operands(A: Tensor, B: Tensor, C: Tensor | None, beta: float) -> None:
    """Raise unless types, shapes and devices of the operands fit."""
    operands = {"A": A, "B": B} | ({} if C is None else {"C": C})
    for name, operand in operands.items():
        if not isinstance(operand, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(operand).__name__}")
        if not operand.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {operand.dtype}")
        if operand.dim() != 2:
            raise ValueError(f"{name} must be 2-D, got {operand.dim()} dimensions")
        if operand.device != A.device:
            raise ValueError(f"{name} must be on the device of A, got {operand.device} and {A.device}")
    if A.shape[1] != B.shape[0]:
        raise ValueError(f"B must have as many rows as A has columns, got {B.shape[0]} and {A.shape[1]}")
    if C is None and beta != 0:
        raise ValueError(f"C must be given for beta {beta}, got None")
    if C is not None and C.shape != (A.shape[0], B.shape[1]):
        raise ValueError(f"C must have shape {(A.shape[0], B.shape[1])}, got {tuple(C.shape)}")
