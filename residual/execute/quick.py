"""Calls whose first rung is a product on a CPU with a bound by one call of the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.cpu.direct import DirectProduct, DirectRight, direct
from residual.error.estimate import NORM, ErrorEstimate, relative_bound
from residual.error.factor import confidence, sharp_factor
from residual.error.float32 import bounded_product
from residual.error.probes import PROBES
from residual.execute.run import compute_from, direct_estimate, far_error
from residual.operand.ieee import is_ieee
from residual.operand.prepared import DIRECT, PreparedOperand, version_of
from residual.options import Options
from residual.planning.ladder import SMALL
from residual.report import attempt_of

PLAIN = (Tensor, torch.nn.Parameter)


def single_product(A: Tensor, B: Tensor, prepared: PreparedOperand | None, options: Options) -> Tensor | None:
    """Return the product of matrices whose first rung is float32, of which `prepared` was made of `B`; None for others.

    Raises
    ------
    ToleranceError
        If no rung met the tolerance.
    """
    tol = options.tol
    if tol is None or type(A) not in PLAIN or type(B) not in PLAIN or not A.ndim == B.ndim == 2:
        return None
    if not options.starts_single(A, B, prepared is not None) or A.layout != torch.strided or B.layout != torch.strided:
        return None
    if A.shape[1] != B.shape[0] or not is_ieee(A) or (torch.is_grad_enabled() and (A.requires_grad or B.requires_grad)):
        return None
    found = bounded_product(A, B, tol, options.seed)
    if found is None or found[1]:
        return found and found[0]
    with torch.autocast("cpu", enabled=False):
        return compute_from(A, B if prepared is None else prepared, options, single=found[0]).checked()


@dataclass(frozen=True)
class Quick:
    """What such a call needs; its product is that of any other call.

    Attributes
    ----------
    right : DirectRight
        B, prepared for the engine.
    prepared : PreparedOperand
        B, prepared for all rungs.
    options : Options
        Of the plan.
    tol, factor : float
        Tolerance, and bound of the error over ``||E W||_F``.
    rows : int
        Fewest rows of A.
    """

    right: DirectRight
    prepared: PreparedOperand
    options: Options
    tol: float
    factor: float
    rows: int

    def __call__(self, A: Tensor) -> Tensor | None:
        """Return the product, by the next rungs if this one misses; None for operands that take the long way.

        Raises
        ------
        ToleranceError
            If no rung met the tolerance.
        """
        if type(A) is not Tensor or torch.compiler.is_compiling() or (A.requires_grad and torch.is_grad_enabled()):
            return None
        shape = A.shape
        if len(shape) != 2 or shape[1] != self.right.shape[0] or shape[0] < self.rows or A.dtype != torch.float32:
            return None
        if not A.is_cpu or A.layout != torch.strided or A.stride(1) != 1 or A.is_neg() or A._is_zerotensor():
            return None
        if version_of(self.prepared.weight) != self.prepared.version:
            return None
        far = far_error(A, self.right, self.tol)
        if far is not None:
            return self._next(A, ErrorEstimate(far, math.inf, confidence(0)))
        made = direct(A, self.right)
        norm = math.sqrt(made.norm) if made.norm > 0 else 0.0
        if not norm or not math.isfinite(norm):
            return None
        bound = self.factor * (math.sqrt(made.energy) + made.eta) + made.rounding
        return made.out if relative_bound(bound, norm * NORM) <= self.tol else self._after(A, made)

    def _after(self, A: Tensor, made: DirectProduct) -> Tensor:
        """Return the product by the sharper bound or the next rungs."""
        estimate = direct_estimate(made, confidence(0), self.tol)
        assert estimate is not None  # its norm is finite and not zero
        return made.out if estimate.accepts(self.tol) else self._next(A, estimate)

    def _next(self, A: Tensor, estimate: ErrorEstimate) -> Tensor:
        """Return the product by the next rungs, where this one missed."""
        with torch.autocast("cpu", enabled=False):
            tried = ((attempt_of(DIRECT, estimate), estimate),)
            return compute_from(A, self.prepared, self.options, tried=tried).checked()


def quick_for(right: PreparedOperand | None, options: Options) -> Quick | None:
    """Return the quick calls of a plan; None if it has none."""
    form = None if right is None else right.forms.get(DIRECT)
    if right is None or form is None or form.direct is None or options.tol is None or 0 in right.shape:
        return None
    if options.out_dtype not in (None, torch.float32) or options.rungs_to_prepare(right.weight.device)[0] != DIRECT:
        return None
    small = options.rungs is None and options.mode == "auto"  # products of few rows run in float32
    factor = sharp_factor(1.0, PROBES, confidence(0)) / math.sqrt(PROBES)
    rows = -(-SMALL // (right.shape[0] * right.shape[1])) if small else 1
    return Quick(form.direct, right, options, options.tol, factor, rows)
