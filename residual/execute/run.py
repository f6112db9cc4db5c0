"""One product: climb the rungs until the measured error of one is within the tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cute_kernels.cpu.direct import DirectProduct, DirectRight, direct
from cute_kernels.cpu.estimate import bound_sums
from residual.error.estimate import ErrorEstimate, by_power, from_sums
from residual.error.factor import CONFIDENCE, confidence
from residual.error.float32 import is_provable, norm_bound, relative_difference
from residual.error.look import look
from residual.error.probes import PROBES, ProbeSums, is_zero, judge, noise
from residual.execute.products import execute, rounding, rounds_levels
from residual.operand.ieee import float_product, is_ieee
from residual.operand.nonfinite import fill
from residual.operand.operand import FLOATS, Operand, operand
from residual.operand.prepared import Form, PreparedOperand, prepare_for
from residual.options import Options
from residual.planning.ladder import Rung
from residual.report import EMPTY, Missed, Report, attempt_of, rounding_of, tolerance_error

if TYPE_CHECKING:
    from residual.cuda import passes, sixteen_bit


_ROUNDINGS = 1.5  # of an output to 16 bits on average, that a tolerance leaves room for
_SAMPLE = 16  # rows whose error by one digit is measured before that of all
_LEAST_SAMPLED = 2**27  # multiplications, 1 ms of one core: a sample takes 30 us
_FAR = 2.0  # times the tolerance: rows differ, and a sample is no bound


class Outcome(NamedTuple):
    """A product, its report, and the error to raise if no rung met the tolerance."""

    product: Tensor
    report: Report
    failure: Exception | None

    def outcome(self) -> Outcome:
        """Return itself: there is nothing to wait for."""
        return self

    def checked(self) -> Tensor:
        """Return the product; raise the failure."""
        if self.failure is not None:
            raise self.failure
        return self.product


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
    goes_on: Callable[[Tensor, Tensor | PreparedOperand, Options, bool, Missed], Outcome | Begun] = _go_on

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


def begin(A: Tensor, B: Tensor | PreparedOperand, options: Options, measured: bool = False) -> Outcome | Begun:
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
) -> Outcome | Begun:
    """Start the product by the rungs of :mod:`residual.planning.ladder` or, on a GPU, by a plan; `before`: missed."""
    if A.is_cuda:
        from residual.cuda import flow, passes  # kernels of their own

        prepared, weight = (B, B.weight) if isinstance(B, PreparedOperand) else (None, B)
        with torch.no_grad():
            if picked := passes.rungs_to_pick(A, weight, options):
                known = None if prepared is None else prepared.passes
                started = passes.start_picked(A.detach(), weight.detach(), options, picked, known, before)
                goes_on = partial(_go_on, before=len(before))
                return Begun(started, A, B, options, measured, goes_on)
            if flow.takes(A, weight, options):
                return Outcome(*flow.run_flow(A.detach(), weight.detach(), prepared, options, measured))
    return compute_from(A, B, options, measured)


def compute_from(
    A: Tensor,
    B: Tensor | PreparedOperand,
    options: Options,
    measured: bool = False,
    single: Tensor | None = None,
    tried: Missed = (),
    before: Missed = (),
) -> Outcome:
    """Return the product by torch and the CPU engine; `single`: the float32 one; `tried`: the first rungs, missed.

    `before`: attempts outside of the ladder.
    """
    weight = B.weight if isinstance(B, PreparedOperand) else B
    with torch.no_grad():
        rungs, out_dtype = options.rungs_for(A, weight), options.result_dtype(A, weight)
        found = _by_float32(A, B, options, out_dtype, measured)
        if found is not None:
            return found
        if options.tol is None and not measured:
            return Outcome(_unchecked(A, B, rungs[0], out_dtype), EMPTY, None)
        tried = tried[: len(rungs) - 1]  # the last rung makes the product of a failure
        right = B if isinstance(B, PreparedOperand) else prepare_for(weight, options.seed, rungs[len(tried) :][:1])
        enough = 0.0 if measured else options.tol or 0.0
        return _climb(_Call(A, right, options, out_dtype, enough), rungs, single, tried, before)


def _by_float32(
    A: Tensor, B: Tensor | PreparedOperand, options: Options, out_dtype: torch.dtype, measured: bool
) -> Outcome | None:
    """Return the product of 16-bit floats on a CPU by their float32 copies, which are exact.

    The rounding of a 16-bit output C' of the float32 product C is measured: ``||AB - C'|| <= ||AB - C|| + ||C - C'||``.
    None for operands that are float32 already, or of other dtypes, and where the rounding misses the tolerance.
    """
    is_prepared = isinstance(B, PreparedOperand)
    dtypes = {A.dtype, B.weight.dtype if isinstance(B, PreparedOperand) else B.dtype, out_dtype}
    is_single = A.dtype == out_dtype == torch.float32 and (is_prepared or len(dtypes) == 1)
    tol = (options.tol or 0.0) - _ROUNDINGS * rounding_of(out_dtype)
    if not A.is_cpu or is_single or not dtypes <= set(FLOATS) or tol <= 0:
        return None
    right = B if isinstance(B, PreparedOperand) else B.float()
    found = compute_from(A.float(), right, options._replace(tol=tol, out_dtype=torch.float32), measured)
    if out_dtype == torch.float32:
        return found
    product = found.product.to(out_dtype)
    rounded, report = relative_difference(found.product, product), found.report
    upper, error = report.upper + (1 + report.upper) * rounded, math.hypot(report.estimated_error, rounded)
    if found.failure is not None or not upper <= (options.tol or 0.0):
        return None
    last = replace(report.attempts[-1], estimated=error, upper=upper)
    attempts = (*report.attempts[:-1], last)
    return Outcome(product, replace(report, estimated_error=error, upper=upper, attempts=attempts), None)


class _Call(NamedTuple):
    """A product and what it has to be."""

    A: Tensor
    right: PreparedOperand
    options: Options
    out_dtype: torch.dtype
    enough: float  # no sharper bound is needed

    @property
    def is_single(self) -> bool:
        """Return whether A and the product are float32."""
        return self.A.dtype == self.out_dtype == torch.float32


def _unchecked(A: Tensor, B: Tensor | PreparedOperand, rung: Rung, out_dtype: torch.dtype) -> Tensor:
    """Return the product by one rung."""
    prepared = B if isinstance(B, PreparedOperand) else None
    found = None if prepared is None else _direct(_Call(A, prepared, Options(), out_dtype, 1.0), rung, CONFIDENCE)
    if found is not None and found.product is not None:
        return found.product
    left = operand(A)
    columns = prepared.columns if prepared is not None else operand(B.mT)  # type: ignore[union-attr]
    digits = None if prepared is None else prepared.forms.get(rung, Form()).digits
    return fill(execute(rung, left, columns, out_dtype, None, digits), left, columns)


class _Found(NamedTuple):
    product: Tensor | None  # None: the look excludes the rung
    estimate: ErrorEstimate


def _climb(call: _Call, rungs: tuple[Rung, ...], single: Tensor | None, tried: Missed, before: Missed) -> Outcome:
    """Return the product of the first rung whose bound is within the tolerance, after those that were `tried`.

    `single`: the float32 product, if it is computed already; `before`: attempts outside of the ladder.
    """
    A, right, options = call.A, call.right, call.options
    tol, found = options.tol, [*before, *tried]
    probed = options.starts_single(A, right.weight)  # three probes may have taken the share of the second rung
    product: Tensor | None = None
    left: Operand | None = None
    for i, rung in enumerate(rungs[len(tried) :], len(tried)):
        sure = CONFIDENCE if tol is None else confidence(len(before) + i + (probed and i > 0))
        made = _direct(call, rung, sure, i + 1 == len(rungs))
        if made is None and left is None and rung.mode == "fp32" and tol is not None:
            made = _single(call, single, sure, tol)
        if made is None:
            left = operand(A) if left is None else left
            least = math.inf if tol is None or i == len(rungs) - 1 else tol
            made = _measure(call, rung, left, sure, least)
        estimate = made.estimate
        found.append((attempt_of(rung, estimate), estimate))
        attempts = tuple(attempt for attempt, _ in found)
        report = Report(str(rung), estimate.relative, estimate.upper, CONFIDENCE, rung.products, attempts)
        if made.product is not None:
            product = made.product if left is None else fill(made.product, left, right.columns)
            if tol is None or estimate.accepts(tol):
                return Outcome(product, report, None)
    assert tol is not None and product is not None  # the last rung always runs
    failure = tolerance_error(tol, found, report, call.out_dtype, options.on_failure == "fallback")
    return Outcome(product, report, failure)


def _direct(call: _Call, rung: Rung, sure: float, is_last: bool = True) -> _Found | None:
    """Return the product by one digit and its error, by the CPU engine; None if it does not take the operands.

    No product, unless it `is_last`, if that of some rows is far from the tolerance.
    """
    A, form = call.A, call.right.forms.get(rung)
    if form is None or form.direct is None or not call.is_single:
        return None
    rows = A if A.stride(1) == 1 and not A.is_neg() else A.clone(memory_format=torch.contiguous_format)
    far = None if is_last else far_error(rows, form.direct, call.options.tol or 0.0)
    if far is not None:
        return _Found(None, ErrorEstimate(far, math.inf, sure))
    made = direct(rows, form.direct)
    estimate = direct_estimate(made, sure, call.enough)
    return None if estimate is None else _Found(made.out, estimate)


def far_error(A: Tensor, right: DirectRight, tol: float) -> float | None:
    """Return the estimated error of some rows of a large A by one digit if it is far above `tol`; None otherwise.

    A product that misses costs a third of the float32 one, and the sample some percent of that. It decides what is
    tried, never what is accepted.
    """
    rows = A.shape[0]
    if not tol or rows < 4 * _SAMPLE or rows * right.shape[0] * right.shape[1] < _LEAST_SAMPLED:
        return None
    made = direct(A[:: rows // _SAMPLE][:_SAMPLE], right)
    error = math.sqrt(made.energy / (PROBES * made.norm)) if made.norm > 0 and math.isfinite(made.norm) else 0.0
    return error if error > _FAR * tol else None


def direct_estimate(made: DirectProduct, sure: float, enough: float) -> ErrorEstimate | None:
    """Return the error of the engine's product by one digit; None for inf, NaN, sums out of range, or zero."""
    if not (math.isfinite(made.norm) and made.norm):
        return None
    product = PROBES * made.norm
    sums = ProbeSums(made.gram.numpy(), product, product, made.norm, 0.0, 0.0)
    return from_sums(sums, made.eta, sure, made.rounding, enough)


def _single(call: _Call, product: Tensor | None, sure: float, tol: float) -> _Found | None:
    """Return the float32 product of A as it is; None if its bound misses, perhaps by slices far from one."""
    A, right, columns = call.A, call.right, call.right.columns
    if columns.exponent is not None or columns.nonfinite is not None or not call.is_single:
        return None
    if columns.given.dtype not in FLOATS:
        return None
    B = right.weight.float()  # exact
    if product is None and call.enough and is_provable(A.shape[1], tol) and is_ieee(A):
        made = bound_sums(A, B)
        if made is not None:
            product, norms = made
            bound = norm_bound(norms, A.shape[0], A.shape[1], product.shape[1])
            if bound <= tol:
                return _Found(product, ErrorEstimate(bound, bound, 1.0))
    if product is None:
        product = float_product(A, B)  # (M, N)
    sums = judge(A, right.vectors, right.bound, product, *right.probes)
    estimate = from_sums(sums, noise(sums, A, B), sure, enough=call.enough)
    return _Found(product, estimate) if estimate.accepts(tol) else None


def _measure(call: _Call, rung: Rung, left: Operand, sure: float, least: float) -> _Found:
    """Return a rung's product and its error; no product if the look before it predicts a bound above `least`."""
    right, columns, out_dtype = call.right, call.right.columns, call.out_dtype
    if not rung.can_look or rounds_levels(rung, left.given.device):
        product = execute(rung, left, columns, out_dtype, None, right.forms.get(rung, Form()).digits)
        return _Found(product, judged(product, left, right, sure))
    a, (b, of_right) = left.digits(rung), right.digits(rung)
    n = right.shape[1]
    sums, eta = look(left.exact, left.planes(rung, a), of_right, right.vectors, n)
    if not sums.inputs and is_zero(left.finite(), columns.finite().mT):
        zeros = left.given.new_zeros(left.given.shape[0], n, dtype=out_dtype)
        return _Found(zeros, ErrorEstimate(0.0, 0.0, sure))
    before = from_sums(sums, eta, sure, _own_rounding(rung, sums, left, right, out_dtype))
    if before.upper > least:
        return _Found(None, before)
    product = execute(rung, left, columns, out_dtype, a, b)
    norm = float(torch.linalg.vector_norm(_in_units(product, left, columns), dtype=torch.float64))
    sums = sums._replace(result=norm**2)
    return _Found(product, from_sums(sums, eta, sure, _own_rounding(rung, sums, left, right, out_dtype)))


def _own_rounding(rung: Rung, sums: ProbeSums, left: Operand, right: PreparedOperand, out_dtype: torch.dtype) -> float:
    """Return a bound of the part of an error that the look does not see: the product's own rounding."""
    info, entries = torch.finfo(out_dtype), left.given.shape[0] * right.shape[1]
    # of sums of levels in float64; ||X wbar||_2 >= min(wbar) ||X||_F for X = |A||B| >= 0
    levels = 2.0**-50 * math.sqrt(sums.inputs) / float(right.probes.norms.min())
    exponent = math.frexp(info.smallest_normal * info.eps)[1] - left.power - right.columns.power
    underflow = math.ldexp(1.0, min(exponent, 1000)) * math.sqrt(entries)
    return rounding(rung, out_dtype) * math.sqrt(sums.result) + levels + underflow


def _in_units(product: Tensor, left: Operand, right: Operand) -> Tensor:
    """Return C in the units of the operands' exact numbers."""
    return by_power(product, -left.power - right.power)


def judged(product: Tensor, left: Operand, right: PreparedOperand, sure: float) -> ErrorEstimate:
    """Return the error of a product by reading it, in float64; slices that are not finite count as zeros."""
    C = _in_units(product, left, right.columns)
    sums = judge(left.exact, right.vectors, right.bound, C, *right.probes)
    inexact = left.inexact + right.columns.inexact
    return from_sums(sums, noise(sums, left.finite(), right.columns.finite().mT, inexact), sure)
