"""One product: climb the rungs until the measured error of one is within the tolerance."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.cpu.direct import DirectProduct, DirectRight, direct
from cute_kernels.cpu.estimate import bound_sums
from residual.error.estimate import ErrorEstimate, by_power, from_sums
from residual.error.factor import CONFIDENCE, confidence
from residual.error.float32 import is_provable, norm_bound
from residual.error.look import look
from residual.error.probes import PROBES, ProbeSums, is_zero, judge, noise
from residual.execute.copies import options_of_copies, report_of, round_product
from residual.execute.products import execute, rounding, rounds_levels
from residual.operand.ieee import float_product, is_ieee
from residual.operand.nonfinite import fill
from residual.operand.operand import FLOATS, Operand, operand
from residual.operand.prepared import Form, PreparedOperand, prepare_for
from residual.options import Options
from residual.planning.ladder import Rung
from residual.report import EMPTY, Missed, Report, attempt_of, tolerance_error

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
        is_prepared = isinstance(B, PreparedOperand)
        rungs, out_dtype = options.rungs_for(A, weight, is_prepared), options.result_dtype(A, weight)
        found = _by_float32(A, B, options, out_dtype, measured)
        if found is not None:
            return found
        if options.tol is None and not measured:
            return Outcome(_unchecked(A, B, rungs[0], out_dtype), EMPTY, None)
        tried = tried[: len(rungs) - 1]  # the last rung makes the product of a failure
        right = B if isinstance(B, PreparedOperand) else prepare_for(weight, options.seed, rungs[len(tried) :][:1])
        enough = 0.0 if measured else options.tol or 0.0
        return _climb(_Call(A, right, options, out_dtype, enough, is_prepared), rungs, single, tried, before)


def _by_float32(
    A: Tensor, B: Tensor | PreparedOperand, options: Options, out_dtype: torch.dtype, measured: bool
) -> Outcome | None:
    """Return the product of 16-bit floats on a CPU by their float32 copies; None for others, and where that misses."""
    dtypes = {A.dtype} if isinstance(B, PreparedOperand) else {A.dtype, B.dtype}  # a prepared one has its copy
    single = options_of_copies(dtypes, out_dtype, options) if A.is_cpu else None
    if single is None or (isinstance(B, PreparedOperand) and B.weight.dtype not in FLOATS):
        return None
    right = B if isinstance(B, PreparedOperand) else B.float()
    return rounded(compute_from(A.float(), right, single, measured), options, out_dtype)


def rounded(found: Outcome, options: Options, out_dtype: torch.dtype) -> Outcome | None:
    """Return the product of float32 copies in `out_dtype`; None where the copies' or its rounding misses."""
    if out_dtype == torch.float32:
        return found
    made = round_product(found.product, found.report.upper, options.tol or 0.0, out_dtype)
    if found.failure is not None or made is None:
        return None
    return Outcome(made[0], report_of(found.report, made[1]), None)


class _Call(NamedTuple):
    """A product and what it has to be."""

    A: Tensor
    right: PreparedOperand
    options: Options
    out_dtype: torch.dtype
    enough: float  # no sharper bound is needed
    is_prepared: bool = True  # by the caller

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
    # then three probes may have taken the share of the second rung
    probed = options.starts_single(A, right.weight, call.is_prepared)
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
