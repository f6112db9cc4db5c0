"""One product of float32 or 16-bit floats on a GPU: plan by statistics, run, check with a guard, repeat.

Nothing is kept from call to call that a result depends on.
"""

from __future__ import annotations

import math
import os
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from residual.cuda.check import FAR_SCALES, Check, usual_factor
from residual.cuda.cost_model import H200, Sizes
from residual.cuda.operand import HALF_RANGE, GpuOperand, gpu_operand, prepared_operand
from residual.cuda.plans import COLUMN_SHARES, SPARSE_LEVELS, WAITING, GpuPlan
from residual.cuda.predict import Forecast, forecast, forecast_of, quick, start_look
from residual.cuda.products import run_plan
from residual.cuda.search import EXACT_HALF, HALF, NOMINAL, Search, Wish, short, without_statistics, worth_predicting
from residual.error.estimate import ErrorEstimate
from residual.error.factor import CONFIDENCE
from residual.error.probes import PROBES
from residual.operand.ieee import float_product
from residual.operand.prepared import PreparedOperand
from residual.options import Options
from residual.report import EMPTY, Attempt, Report, rounding_of, tolerance_error

_DEFAULT_SHARES = {"columns": COLUMN_SHARES[1], "sparse": SPARSE_LEVELS[1]}
_DTYPES = {torch.float32, torch.float16, torch.bfloat16}
_ONE_PLAN = ("direct", "centered", "outlier", "full", "full4", "three_digit")


class Result(NamedTuple):
    """A product, its report, and the error to raise if no plan met the tolerance."""

    product: Tensor
    report: Report
    failure: Exception | None


def takes(A: Tensor, B: Tensor, options: Options) -> bool:
    """Return whether this flow serves a call: float32 or 16-bit floats on a GPU, and no rungs of the caller's."""
    return A.is_cuda and {A.dtype, B.dtype} <= _DTYPES and options.rungs is None and options.flow == "auto"


def run_flow(A: Tensor, B: Tensor, prepared: PreparedOperand | None, options: Options, measured: bool) -> Result:
    """Return the product of checked operands; `measured`: with a report also without a tolerance."""
    columns = None if prepared is None else prepared_operand(prepared)

    def attempt(waits: bool) -> Result | None:
        left, right = gpu_operand(A, waits=waits), columns or gpu_operand(B.mT, waits=waits)
        call = _Call(options, left, right, prepared, 0.0 if measured else options.tol or 0.0)
        return call.checked(measured) if options.tol is not None else call.plain(measured)

    found = None if _must_wait(options, measured) else attempt(False)
    found = attempt(True) if found is None else found
    assert found is not None  # every line was looked at
    return found


def _must_wait(options: Options, measured: bool) -> bool:
    """Return whether lines with inf or NaN or far from one must be looked for before anything else.

    A checked product may go without: the check sees such lines by their scales, and statistics by their magnitudes.
    """
    if measured and options.mode != "auto":
        return True
    if options.tol is None or options.mode == "outlier":
        return options.mode in WAITING
    return options.out_dtype == torch.float64


class _Call:
    """One product of two operands; no sharper bound of its error than `enough` is needed."""

    def __init__(
        self,
        options: Options,
        left: GpuOperand,
        right: GpuOperand,
        prepared: PreparedOperand | None,
        enough: float = 0.0,
    ) -> None:
        self.options, self.left, self.right, self.prepared, self.enough = options, left, right, prepared, enough
        self.device = left.given.device
        self.out_dtype = options.result_dtype(left.given, right.given)
        self.mode = options.mode
        self.bits = options.bits or 8
        self.forecast: Forecast | None = None

    @cached_property
    def seed(self) -> int:
        """Of all random numbers of the call."""
        seed = self.options.seed if self.prepared is None else self.prepared.seed
        return int.from_bytes(os.urandom(7), "little") if seed is None else seed

    def _check(self) -> Check:
        return Check(self.left, self.right, self.prepared, self.seed)

    def _look(self, sparse: bool) -> Forecast:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        self.forecast = forecast(self.left, self.right, self.bits, sparse, generator)
        return self.forecast

    def _sizes(self, plan: GpuPlan | None = None) -> Sizes:
        (m, k), n = self.left.given.shape, self.right.given.shape[0]
        found, prepared = self.forecast, self.prepared is not None
        if found is None or plan is None:
            return Sizes(m, k, n, prepared, sixteen_bit=self._are_halves())
        density = found.densities(plan) if plan.mode == "sparse" else 0.0
        return Sizes(m, k, n, prepared, found.hot, density, self._are_halves())

    def _run(self, plan: GpuPlan) -> Tensor:
        order = self.forecast.order if self.forecast is not None and plan.mode == "columns" else None
        return run_plan(plan, self.left, self.right, order, self.out_dtype)

    def plain(self, measured: bool) -> Result:
        """Return the product by the one mode asked for; with an error only if it is `measured`."""
        plan = GpuPlan(self.mode, self.bits, _DEFAULT_SHARES.get(self.mode, 0.0))
        if plan.mode == "columns":
            self._look(sparse=False)
        product = self._run(plan)
        if not measured:
            return Result(fill_nonfinite(product, self.left, self.right), EMPTY, None)
        found = self._check().estimate_from_probes(product, 0, 0.0)
        attempt = Attempt(str(plan), found.relative, found.upper, found.noise)
        report = Report(str(plan), found.relative, found.upper, CONFIDENCE, plan.products, (attempt,))
        return Result(fill_nonfinite(product, self.left, self.right), report, None)

    def _wish(self) -> Wish:
        options = self.options
        assert options.tol is not None
        double, last = self.out_dtype == torch.float64, options.on_failure == "fallback"
        return Wish(options.tol, self.mode, options.bits, double, last, half=not double)

    def _are_halves(self) -> bool:
        """Return whether both operands are of one 16-bit dtype, so that Tensor Cores multiply them as they are."""
        return self.left.real.dtype == self.right.real.dtype != torch.float32

    def _search(self, check: Check) -> Search | None:
        """Return what may be tried, with predictions unless there is nothing to choose.

        None where statistics met lines with inf or NaN or far from one, which nobody had looked for.
        """
        wish, sizes = self._wish(), self._sizes()
        search = Search(wish, usual_factor(sizes.m, sizes.n), self._sizes, H200)
        plans = worth_predicting(wish, sizes, H200)
        plain = without_statistics(wish, sizes, H200)
        if plain is not None:
            search.predicted = {**NOMINAL, **({HALF: EXACT_HALF / 2} if plain == HALF else {})}
        elif self.mode in _ONE_PLAN:
            search.predicted = {**dict.fromkeys(plans, math.nan), **NOMINAL}
        else:
            norm = self._look_closely(check, plans) if self.left.seen else self._look_quickly(check)
            if norm is None:
                return None
            rounding = rounding_of(self.out_dtype)

            def predict(plan: GpuPlan) -> float:
                assert self.forecast is not None
                if plan == HALF and not (self._are_halves() or (self.left.fits_half() and self.right.fits_half())):
                    return math.inf
                error = self.forecast.error(plan)
                return math.hypot(error / norm if norm else float(error > 0), rounding)

            search.predicted, search.predict = dict.fromkeys((*plans, *short(wish), *NOMINAL)), predict
        return search

    def _look_closely(self, check: Check, plans: tuple[GpuPlan, ...]) -> float:
        """Take statistics by torch; return the estimated norm of AB."""
        check.begin()
        self._look(sparse=any(plan.mode == "sparse" for plan in plans))
        return check.norm()

    def _look_quickly(self, check: Check) -> float | None:
        """Take statistics by kernels, on passes that the check makes anyway; as :meth:`_look_closely`.

        None also where the kernels do not take such operands.
        """
        if not quick(self.left, self.right):
            return None
        product = check.begin(tops=True)  # (16, M and room)
        found = start_look(self.left, self.right, product, self.bits, self.seed)
        tables = found.result()
        if tables.out_of_range:
            return None
        self.left.seen = self.right.seen = True
        self.forecast = forecast_of(found, tables, self.bits)
        return math.sqrt(tables.product / PROBES)

    def _attempt(
        self, check: Check, plan: GpuPlan, attempt: int, predicted: bool
    ) -> tuple[Tensor, ErrorEstimate] | None:
        """Return a plan's product and its error; None where a line that nobody looked at makes it meaningless.

        `predicted`: the plan was chosen by statistics.
        """
        product = self._run(plan)
        judged = self._judge(check, plan, product, attempt, predicted)
        return None if judged is None else (product, judged)

    def _judge(
        self, check: Check, plan: GpuPlan, product: Tensor, attempt: int, predicted: bool
    ) -> ErrorEstimate | None:
        tol, sides = self.options.tol, (self.left, self.right)
        assert tol is not None
        if plan == HALF and not (predicted or self._are_halves()):
            check.begin(tops=True)
            found = check.estimate_from_probes(product, attempt, tol, (self.left.top, self.right.top), HALF_RANGE)
            return ErrorEstimate(math.inf, math.inf, found.confidence) if check.far else found
        unseen = tuple(made.scale for side in sides if not side.seen for made in side.made.values())
        found = check.estimate_from_probes(product, attempt, tol, unseen, FAR_SCALES, self.enough)
        # a float product has no scales
        return None if check.far or not (self.left.seen or math.isfinite(found.relative)) else found

    def checked(self, measured: bool) -> Result | None:
        """Return the product by the cheapest plan that meets the tolerance.

        None where a line that was not looked at turns out to hold inf or NaN or to be far from one.
        """
        tol = self.options.tol
        assert tol is not None
        check, found = self._check(), list[tuple[Attempt, ErrorEstimate]]()
        search: Search | None = None
        plan: GpuPlan | None = GpuPlan(self.mode, self.bits) if self.mode in _ONE_PLAN else None
        if plan is None:
            search = self._search(check)
            if search is None:
                return None
            plan = search.next()
        while plan is not None:
            made = self._attempt(check, plan, len(found), search is not None)
            if made is None:
                return None
            product, estimate = made
            found.append((Attempt(str(plan), estimate.relative, estimate.upper, estimate.noise), estimate))
            attempts = tuple(attempt for attempt, _ in found)
            report = Report(str(plan), estimate.relative, estimate.upper, CONFIDENCE, plan.products, attempts)
            if estimate.accepts(tol):
                return Result(fill_nonfinite(product, self.left, self.right), report, None)
            if search is None:
                search = self._search(check)
                if search is None:
                    return None
            search.failed(plan, estimate.relative)
            plan = search.next()
        fallback = self.options.on_failure == "fallback"
        failure = tolerance_error(tol, found, report, self.out_dtype, fallback)
        return Result(fill_nonfinite(product, self.left, self.right), report, failure)


def fill_nonfinite(product: Tensor, left: GpuOperand, right: GpuOperand) -> Tensor:
    """Return `product` (M, N) with the rows and columns of inf or NaN as IEEE arithmetic has them."""
    a, b = left.given, right.given.mT
    if left.broken is not None:
        product[left.broken] = float_product(a[left.broken].float(), b.float()).to(product.dtype)  # (I, N)
    if right.broken is not None:
        product[:, right.broken] = float_product(a.float(), b[:, right.broken].float()).to(product.dtype)  # (M, J)
    return product
