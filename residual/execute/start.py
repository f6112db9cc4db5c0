"""Products that may wait: started on a GPU, whose verdict is read when it is asked for, or computed at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from residual.execute.copies import options_of_copies, round_product
from residual.execute.run import Outcome, compute_from, rounded
from residual.operand.prepared import PreparedOperand
from residual.options import Options
from residual.report import EMPTY, Missed

if TYPE_CHECKING:
    from residual.cuda import passes, sixteen_bit


class Awaited(Protocol):
    """A product that is there, or whose verdict a GPU has still to give."""

    def outcome(self) -> Outcome:
        """Wait for the product and its report."""

    def checked(self) -> Tensor:
        """Wait for the product; raise if no rung met the tolerance."""


def _go_on(
    A: Tensor, B: Tensor | PreparedOperand, options: Options, measured: bool, tried: Missed, before: int = 0
) -> Outcome:
    """Return the product by the rungs behind those that were `tried`, after `before` attempts outside of the ladder."""
    return compute_from(A, B, options, measured, tried=tried[before:], before=tried[:before])


class Begun(NamedTuple):
    """A product whose verdict a GPU has still to give."""

    started: passes.Started | sixteen_bit.StartedSixteenBit
    A: Tensor
    B: Tensor | PreparedOperand
    options: Options
    measured: bool
    goes_on: Callable[[Tensor, Tensor | PreparedOperand, Options, bool, Missed], Awaited] = _go_on

    def outcome(self) -> Outcome:
        """Wait for the verdict; where the tolerance was missed, go on with the next rung."""
        made = self.started.outcome()
        if made.product is not None:
            return Outcome(made.product, made.report, None)
        with torch.autocast(self.A.device.type, enabled=False):
            return self.goes_on(self.A, self.B, self.options, self.measured, made.tried).outcome()

    def checked(self) -> Tensor:
        """Wait for the verdict; return the product, or raise if no rung met the tolerance."""
        accepted = self.started.accepted()
        return self.outcome().checked() if accepted is None else accepted


def compute(A: Tensor, B: Tensor | PreparedOperand, options: Options) -> Tensor:
    """Return the product of checked operands, where autograd does not record; raise if no rung meets the tolerance."""
    return begin(A, B, options).checked()


@cache
def _starts() -> tuple[Callable[..., sixteen_bit.StartedSixteenBit | None], Callable[..., passes.Started | None]]:
    from residual.cuda import passes, sixteen_bit  # kernels of their own

    return sixteen_bit.start, passes.start_known


def compute_known(A: Tensor, B: Tensor, prepared: PreparedOperand | None, options: Options) -> Tensor | None:
    """Return the product of CUDA operands by the record of a call like it; None for others and with a gradient.

    Raises
    ------
    ToleranceError
        If no rung met the tolerance.
    """
    if torch.is_grad_enabled() and (A.requires_grad or B.requires_grad):
        return None
    if torch.is_autocast_enabled("cuda"):  # torch's product would be in its dtype
        return None
    start_first, start_known = _starts()
    right = B if prepared is None else prepared
    first = start_first(A, B, prepared, options)
    if first is not None:
        return Begun(first, A, right, options, False, _begin_digits).checked()
    started = start_known(A, B, options, None if prepared is None else prepared.passes)
    return None if started is None else Begun(started, A, right, options, False).checked()


def begin(A: Tensor, B: Tensor | PreparedOperand, options: Options, measured: bool = False) -> Awaited:
    """Start the product, `measured`: with a report in any case; only an sm_90 GPU leaves a verdict to wait for."""
    weight = B.weight if isinstance(B, PreparedOperand) else B
    if torch.is_autocast_enabled(A.device.type):  # it would compute float32 products in 16 bits
        with torch.autocast(A.device.type, enabled=False):
            return begin(A, B, options, measured)
    if not (A.numel() and weight.numel()):
        zeros = A.new_zeros(A.shape[0], weight.shape[1], dtype=options.result_dtype(A, weight))
        return Outcome(zeros, EMPTY, None)
    if A.is_cuda:
        with torch.no_grad():
            prepared = B if isinstance(B, PreparedOperand) else None
            first = _starts()[0](A.detach(), weight.detach(), prepared, options)
            if first is not None:
                return Begun(first, A, B, options, measured, _begin_digits)
    return _begin_digits(A, B, options, measured)


def _begin_digits(
    A: Tensor, B: Tensor | PreparedOperand, options: Options, measured: bool, before: Missed = ()
) -> Awaited:
    """Start the product by the rungs of :mod:`residual.planning.ladder` or, on a GPU, by a plan; `before`: missed."""
    if A.is_cuda:
        from residual.cuda import passes  # kernels of their own

        prepared, weight = (B, B.weight) if isinstance(B, PreparedOperand) else (None, B)
        with torch.no_grad():
            if picked := passes.rungs_to_pick(A, weight, options):
                known = None if prepared is None else prepared.passes
                started = passes.start_picked(A.detach(), weight.detach(), options, picked, known, before)
                goes_on = partial(_go_on, before=len(before))
                return Begun(started, A, B, options, measured, goes_on)
            copied = _start_copies(A, B, weight, options, measured)
            if copied is not None:
                return copied
    return _begin_other(A, B, options, measured)


def _begin_other(A: Tensor, B: Tensor | PreparedOperand, options: Options, measured: bool) -> Outcome:
    """Return the product by a plan of :mod:`residual.cuda.flow`, or by torch and the CPU engine."""
    if A.is_cuda:
        from residual.cuda import flow

        prepared, weight = (B, B.weight) if isinstance(B, PreparedOperand) else (None, B)
        if flow.takes(A, weight, options):
            with torch.no_grad():
                return Outcome(*flow.run_flow(A.detach(), weight.detach(), prepared, options, measured))
    return compute_from(A, B, options, measured)


def _start_copies(
    A: Tensor, B: Tensor | PreparedOperand, weight: Tensor, options: Options, measured: bool
) -> Awaited | None:
    """Start the product of 16-bit floats on an sm_90 GPU by the passes over their float32 copies.

    None for others, and for operands of one dtype that Tensor Cores multiply as they are.
    """
    from residual.cuda import passes

    out_dtype = options.result_dtype(A, weight)
    is_plain = options.mode == "auto" and options.rungs is None and options.flow == "auto"
    single = options_of_copies({A.dtype, weight.dtype}, out_dtype, options)
    if single is None or (is_plain and A.dtype == weight.dtype):
        return None
    picked = passes.rungs_for_shapes(single, A.shape, A.stride(), weight.shape, weight.stride(), A.device)
    if not picked:
        return None
    known = B.passes if isinstance(B, PreparedOperand) else {}
    a, is_known = A.detach().float(), passes.planes_of(picked) in known
    b = weight.detach() if is_known else weight.detach().float()
    begun = Begun(passes.start_picked(a, b, single, picked, known), a, B if is_known else b, single, measured)
    return begun if out_dtype == torch.float32 else _Copied(begun, A, B, options, measured, out_dtype)


class _Copied(NamedTuple):
    """A product of float32 copies whose output has 16 bits; what its rounding misses is made by another plan."""

    begun: Begun
    A: Tensor
    B: Tensor | PreparedOperand
    options: Options
    measured: bool
    out_dtype: torch.dtype

    def outcome(self) -> Outcome:
        """Wait for the verdict of the copies; round their product."""
        found = rounded(self.begun.outcome(), self.options, self.out_dtype)
        if found is not None:
            return found
        with torch.autocast(self.A.device.type, enabled=False):
            return _begin_other(self.A, self.B, self.options, self.measured)

    def checked(self) -> Tensor:
        """Wait for the product; raise if no rung met the tolerance."""
        accepted, tol = self.begun.started.accepted(), self.begun.options.tol
        if accepted is not None and tol is not None:
            made = round_product(accepted, tol, self.options.tol or 0.0, self.out_dtype)
            if made is not None:
                return made[0]
        return self.outcome().checked()
