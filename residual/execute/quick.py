"""Calls of a plan whose first rung is one call of the CPU engine, which the coarse bound accepts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.cpu.direct import DirectRight, direct
from residual.error.estimate import NORM, relative_bound
from residual.error.factor import confidence, sharp_factor
from residual.error.probes import PROBES
from residual.operand.prepared import DIRECT, PreparedOperand, version_of
from residual.options import Options, machine_of
from residual.planning.ladder import SMALL, Demand, rungs_of


@dataclass(frozen=True)
class Quick:
    """What such a call needs; its product is that of any other call.

    Attributes
    ----------
    right : DirectRight
        B, prepared for the engine.
    weight : Tensor
        B.
    version : int
        Writes to `weight` until it was prepared.
    tol, factor : float
        Tolerance, and bound of the error over ``||E W||_F``.
    rows : int
        Fewest rows of A.
    """

    right: DirectRight
    weight: Tensor
    version: int
    tol: float
    factor: float
    rows: int

    def __call__(self, A: Tensor) -> Tensor | None:
        """Return the product; None if the call has to take the long way."""
        if type(A) is not Tensor or torch.compiler.is_compiling() or (A.requires_grad and torch.is_grad_enabled()):
            return None
        shape = A.shape
        if len(shape) != 2 or shape[1] != self.right.shape[0] or shape[0] < self.rows or A.dtype != torch.float32:
            return None
        if not A.is_cpu or A.layout != torch.strided or A.stride(1) != 1 or A.is_neg() or A._is_zerotensor():
            return None
        if version_of(self.weight) != self.version:
            return None
        made = direct(A, self.right)
        norm = math.sqrt(made.norm) if made.norm > 0 else 0.0
        if not norm or not math.isfinite(norm):
            return None
        bound = self.factor * (math.sqrt(made.energy) + made.eta) + made.rounding
        return made.out if relative_bound(bound, norm * NORM) <= self.tol else None


def quick_for(right: PreparedOperand | None, options: Options) -> Quick | None:
    """Return the quick calls of a plan; None if it has none."""
    form = None if right is None else right.forms.get(DIRECT)
    if right is None or form is None or form.direct is None or options.tol is None:
        return None
    if options.out_dtype not in (None, torch.float32) or options.bits == 4 or 0 in right.shape:
        return None
    k, n = right.shape
    rows = 1
    if options.rungs is not None:
        first = options.rungs[0] == "direct"
    else:
        machine = machine_of(right.weight.device)
        first = rungs_of(options.mode, 8, machine, Demand(options.tol, SMALL))[0] == DIRECT
        rows = 1 if options.mode != "auto" else -(-SMALL // (k * n))
    if not first:
        return None
    factor = sharp_factor(1.0, PROBES, confidence(0)) / math.sqrt(PROBES)
    return Quick(form.direct, right.weight, right.version, options.tol, factor, rows)
