"""One call of ``residual.matmul``: plan, run, check, go on to a better plan, report."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from residual.error.estimate import ErrorEstimate
from residual.error.predict import Forecast, forecast, forecast_of, quick, start_look
from residual.error.probes import FAILURE, PROBES, Check, confidence, usual_factor
from residual.execute.products import execute
from residual.operand.nonfinite import fill
from residual.operand.operand import FORMS, HALF_RANGE, Operand, operand, real_dtype
from residual.options import Request
from residual.planning.cost_model import Sizes, cost, costs_of
from residual.planning.history import REUSES, Kind, comes_often, habit_of, learn
from residual.planning.plan import COLUMN_SHARES, SPARSE_LEVELS, WAITING, Plan
from residual.planning.search import (
    EXACT_HALF,
    HALF,
    NOMINAL,
    Search,
    Wish,
    short,
    without_statistics,
    worth_predicting,
)

_DEFAULT_SHARES = {"columns": COLUMN_SHARES[1], "sparse": SPARSE_LEVELS[1]}
_ONE_PLAN = ("direct", "centred", "outlier", "full", "full4", "three_digit")
_BY_HABIT = ("direct", "centred", "full", "full4", "three_digit", "fp16", "fp32")  # run without statistics


@dataclass(frozen=True)
class Attempt:
    """One plan that was run: its predicted relative error, the measured one, and the bound that had to meet ``tol``."""

    plan: str
    predicted: float
    estimated: float
    upper: float


@dataclass(frozen=True)
class Report:
    """How a product was computed.

    Attributes:
        plan: the plan of the result, such as ``int8 direct``, ``int8 columns 0.25``, ``fp32``.
        predicted_error: relative Frobenius error that was expected of it; NaN in a ``ToleranceError`` where no report
            was asked for and the mode left no choice.
        estimated_error: relative Frobenius error that the probes measured.
        confidence: probability that the error is within ``tol``, all attempts counted; without ``tol`` that of
            ``attempts[0].upper``.
        products: dense integer products of the whole size that the plan takes; 0 for a float product.
        cost: seconds that all attempts take by the device's cost table.
        attempts: every plan that was run, the last one is the result's.
    """

    plan: str
    predicted_error: float
    estimated_error: float
    confidence: float
    products: float
    cost: float
    attempts: tuple[Attempt, ...]


class ToleranceError(ArithmeticError):
    """No plan met the tolerance; ``report`` tells what was tried."""

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


def compute(
    A: Tensor,
    B: Tensor,
    request: Request,
    right: Operand | None,
    measured: bool = False,
    failed: int | None = None,
) -> tuple[Tensor, Report]:
    """The product and its report; ``right``: the columns of B where they are prepared.

    ``failed``: attempts of the call at the short way, which is not gone again.
    """
    if torch.is_autocast_enabled(A.device.type):  # it would have float32 products made of halves
        with torch.autocast(A.device.type, enabled=False):
            return compute(A, B, request, right, measured, failed)
    if A.shape[0] == 0 or B.shape[1] == 0 or A.shape[1] == 0:
        return A.new_zeros(A.shape[0], B.shape[1], dtype=request.out_dtype), _empty_report()

    if failed is None:
        failed = 0
        if A.is_cuda and not measured:
            product, failed = _at_short(A, B, request, right)
            if product is not None:
                return product, _empty_report()

    def attempt(waits: bool) -> tuple[Tensor, Report] | None:
        left, columns = operand(A, waits=waits), right or operand(B.mT, waits=waits)
        call = _Call(request, left, columns, right is not None)
        return call.checked(measured, failed) if request.tol is not None else call.plain(measured)

    found = None if _must_wait(A, B, request, measured) else attempt(False)
    found = attempt(True) if found is None else found
    assert found is not None  # every line was looked at
    return found


def short_kind(A: Tensor, B: Tensor, request: Request) -> Kind | None:
    """The kind of a checked call that :func:`again` may take, or None."""
    if request.tol is None or not A.is_cuda or 0 in (*A.shape, *B.shape):
        return None
    from residual.execute import fast_path as kept  # needs the CUDA wheels

    return request.kind(A, B) if kept.takes(A, B, request) else None


def again(A: Tensor, B: Tensor, request: Request, kind: Kind) -> Tensor:
    """The product of a call of which :func:`short_kind` has told the kind; B is not prepared, and autocast is off."""
    from residual.execute import fast_path as kept

    product, failed = kept.attempt_known(A, B, None, request, kind, own_generator(A.device))
    return compute(A, B, request, None, failed=failed)[0] if product is None else product


def _at_short(A: Tensor, B: Tensor, request: Request, right: Operand | None) -> tuple[Tensor | None, int]:
    """The product of a call whose plan is known, or None, and how many attempts at it failed."""
    from residual.execute import fast_path as kept  # needs the CUDA wheels

    if request.tol is None:
        return kept.plain(A, B, right, request), 0
    kind = request.kind(A, B, 0 if right is None else id(right))
    return kept.attempt(A, B, right, request, kind, own_generator(A.device))


def _must_wait(A: Tensor, B: Tensor, request: Request, measured: bool) -> bool:
    """Whether lines with inf or NaN or far from one must be looked for before anything else.

    A checked product may go without: the check sees such lines by their scales, and statistics by their magnitudes.
    """
    if A.device.type == "cpu" or (measured and request.mode != "auto"):
        return True
    if request.tol is None or request.mode == "outlier":
        return request.mode in WAITING
    return torch.float64 in (real_dtype(A), real_dtype(B), request.out_dtype)


@lru_cache
def own_generator(device: torch.device) -> torch.Generator:
    """Goes on from call to call; seeded anew in every process."""
    return torch.Generator(device).manual_seed(int.from_bytes(os.urandom(7), "little"))


def _empty_report() -> Report:
    return Report("empty", 0.0, 0.0, 1.0, 0, 0.0, ())


class _Call:
    """One product of two operands."""

    def __init__(self, request: Request, left: Operand, right: Operand, prepared: bool) -> None:
        self.request, self.left, self.right, self.prepared = request, left, right, prepared
        self.device = left.given.device
        self.forecast: Forecast | None = None

    @cached_property
    def seed(self) -> int:
        """Of all random numbers of the call."""
        return int.from_bytes(os.urandom(7), "little") if self.request.seed is None else self.request.seed

    @cached_property
    def generator(self) -> torch.Generator:
        """The call's own: a program's random numbers stay what they are."""
        if self.request.seed is None:
            return own_generator(self.device)
        return torch.Generator(self.device).manual_seed(self.seed)

    def _look(self, sparse: bool) -> Forecast:
        self.forecast = forecast(self.left, self.right, self.request.bits or 8, sparse, self.generator)
        return self.forecast

    def _sizes(self, plan: Plan | None = None) -> Sizes:
        (m, k), n = self.left.given.shape, self.right.given.shape[0]
        found = self.forecast
        if found is None or plan is None:
            return Sizes(m, k, n, self.prepared)
        density = found.densities(plan) if plan.mode == "sparse" else 0.0
        return Sizes(m, k, n, self.prepared, found.hot, density)

    def _run(self, plan: Plan) -> Tensor:
        order = self.forecast.order if self.forecast is not None and plan.mode == "columns" else None
        return execute(plan, self.left, self.right, order, self.request.out_dtype)

    def plain(self, measured: bool) -> tuple[Tensor, Report]:
        """The product by the one mode asked for; with a report that says something only where it is ``measured``."""
        mode = self.request.mode
        plan = Plan(mode, self.request.bits or 8, _DEFAULT_SHARES.get(mode, 0.0))
        if mode == "columns" or measured:
            self._look(sparse=mode == "sparse")
        product = self._run(plan)
        if not measured:
            return fill(product, self.left, self.right), _empty_report()
        assert self.forecast is not None
        check = Check(self.left, self.right, self.generator, fresh=self.request.seed is not None)
        norm = check.norm()
        predicted = self.forecast.error(plan) / norm if norm else 0.0
        found = check.estimate_from_probes(product, 0, 0.0)
        attempt = Attempt(str(plan), predicted, found.relative, found.upper)
        seconds = cost(plan, self._sizes(plan), costs_of(self.device))
        report = Report(str(plan), predicted, found.relative, confidence(0), plan.products, seconds, (attempt,))
        return fill(product, self.left, self.right), report

    def _wish(self) -> Wish:
        request, dtypes = self.request, (real_dtype(self.left.given), real_dtype(self.right.given))
        assert request.tol is not None
        double = torch.float64 in (*dtypes, request.out_dtype)
        exact = self.left.given.dtype == self.right.given.dtype == torch.int8
        half, last = self.device.type == "cuda" and not double, request.on_failure == "fp32"
        return Wish(request.tol, request.mode, request.bits, double, last, exact, half, self._are_halves())

    def _are_halves(self) -> bool:
        """Whether both operands are of one half dtype, so that Tensor Cores multiply them as they are."""
        return self.left.real.dtype == self.right.real.dtype != torch.float32

    def _search(self, check: Check, measured: bool, failed: int) -> Search | None:
        """What may be tried, with predictions unless there is nothing to choose and nobody to tell them to.

        None where statistics met lines with inf or NaN or far from one, which nobody had looked for.
        """
        request, prices, wish, sizes = self.request, costs_of(self.device), self._wish(), self._sizes()
        search = Search(wish, usual_factor(sizes.m, sizes.n), self._sizes, prices)
        if request.mode == "auto" and request.seed is None and not measured:
            kind = self._kind()
            habit = habit_of(kind)
            if habit is not None:
                search.avoided = {*habit.avoided, *((habit.plan,) if failed else ())}
            if comes_often(kind):
                # A plan that misses costs one call of many, and is left out from then on.
                search.daring, search.single = not failed, prices
                search.prices = prices = prices.sharing(REUSES, kept=self.device.type == "cuda")
        plans = worth_predicting(wish, sizes, prices)
        plain = without_statistics(wish, sizes, prices)
        if plain is not None:
            search.predicted = {**NOMINAL, **({HALF: EXACT_HALF / 2} if plain == HALF else {})}
        elif request.mode in _ONE_PLAN and not measured:
            search.predicted = {**dict.fromkeys(plans, math.nan), **NOMINAL}
        else:
            norm = self._look_closely(check, plans) if self.left.seen else self._look_quickly(check, sizes)
            if norm is None:
                return None
            rounding = _rounding(request.out_dtype)

            def predict(plan: Plan) -> float:
                assert self.forecast is not None
                if plan == HALF and not (self._are_halves() or (self.left.fits_half() and self.right.fits_half())):
                    return math.inf
                error = self.forecast.error(plan)
                relative = error / norm if norm else float(error > 0)
                return math.hypot(relative, rounding)

            search.predicted, search.predict = dict.fromkeys((*plans, *short(wish), *NOMINAL)), predict
        return search

    def _look_closely(self, check: Check, plans: tuple[Plan, ...]) -> float:
        """Statistics by torch; the estimated norm of AB."""
        check.begin()
        self._look(sparse=any(plan.mode == "sparse" for plan in plans))
        return check.norm()

    def _look_quickly(self, check: Check, sizes: Sizes) -> float | None:
        """Statistics by kernels, on passes that the check makes anyway; as :meth:`_look_closely`.

        While they are on their way, the digits are made that the last call of the kind needed.  None also where the
        kernels do not take such operands.
        """
        if not quick(self.left, self.right):
            return None
        bits = self.request.bits or 8
        product = check.begin(tops=True)  # (16, M and room)
        found = start_look(self.left, self.right, product, bits, self.seed)
        habit = habit_of(self._kind())
        # Which columns are outliers is not known ahead.
        form = None if habit is None or habit.plan.mode == "outlier" else FORMS.get(habit.plan.mode)
        if form is not None:
            for side in (self.left, self.right):
                side.digits(bits, form[1], form[0])
        tables = found.result()
        if tables.out_of_range:
            return None
        self.left.seen = self.right.seen = True
        self.forecast = forecast_of(found, tables, bits)
        return math.sqrt(tables.product / PROBES)

    def _kind(self) -> Kind:
        return self.request.kind(self.left.given, self.right.given.mT, id(self.right) if self.prepared else 0)

    def _at_once(self, measured: bool, failed: int) -> Plan | None:
        """The plan to run without a look at the operands: the only one of its mode, or what calls of this kind come to.

        Not for a report, which predicts; and with a seed, calls must not depend on those before.
        """
        request = self.request
        if measured:
            return None
        if request.mode in _ONE_PLAN:
            return Plan(request.mode, request.bits or 8)
        habit = None if failed or request.seed is not None else habit_of(self._kind())
        if habit is None or habit.plan.mode not in _BY_HABIT:
            return None
        # With lines that were brought to one the check runs in float64, which does not look at their range.
        brought = self.left.seen or self.right.exponent is not None
        return None if habit.plan == HALF and brought and not self._are_halves() else habit.take()

    def _learn(self, plan: Plan, search: Search | None, failed: int) -> None:
        """Note what a call came to whose plan met the tolerance; ``search``: None where it ran at once."""
        if search is not None and (search.tried or failed or self.forecast is not None):
            kind = self._kind()
            habit = habit_of(kind) if failed else None  # the attempt before was its plan's
            learn(kind, plan, {*search.tried, *(() if habit is None else (habit.plan,))} - {plan})

    def _judge(self, check: Check, plan: Plan, product: Tensor, attempt: int, predicted: bool) -> ErrorEstimate | None:
        """The error of a plan's product; None where a line that nobody looked at makes it meaningless.

        ``predicted``: the plan was chosen by statistics.
        """
        tol, sides = self.request.tol, (self.left, self.right)
        assert tol is not None
        if plan == HALF and not (predicted or self._are_halves()):
            check.begin(tops=True)
            found = check.estimate_from_probes(product, attempt, tol, (self.left.top, self.right.top), HALF_RANGE)
            return ErrorEstimate(math.inf, math.inf, found.confidence) if check.far else found
        unseen = tuple(made.scale for side in sides if not side.seen for made in side.made.values())
        found = check.estimate_from_probes(product, attempt, tol, unseen)
        # a float product has no scales
        return None if check.far or not (self.left.seen or math.isfinite(found.relative)) else found

    def checked(self, measured: bool, failed: int = 0) -> tuple[Tensor, Report] | None:
        """The product by the cheapest plan that meets the tolerance; ``failed``: attempts of the call so far.

        None where a line that was not looked at turns out to hold inf or NaN or to be far from one.
        """
        tol = self.request.tol
        assert tol is not None
        check = Check(self.left, self.right, self.generator, fresh=self.request.seed is not None)
        attempts: list[Attempt] = []
        seconds, search, plan = 0.0, None, self._at_once(measured, failed)
        if plan is None:
            search = self._search(check, measured, failed)
            if search is None:
                return None
            plan = search.next()
        while plan is not None:
            product = self._run(plan)
            found = self._judge(check, plan, product, failed + len(attempts), search is not None)
            if found is None:
                return None
            if found.upper <= tol:
                self._learn(plan, search, failed)
                if not measured:  # nobody asks how
                    return fill(product, self.left, self.right), _empty_report()
            expected = math.nan if search is None else search.expected(plan)
            attempts.append(Attempt(str(plan), expected, found.relative, found.upper))
            seconds += cost(plan, self._sizes(plan), costs_of(self.device))
            report = Report(str(plan), expected, found.relative, 1 - FAILURE, plan.products, seconds, tuple(attempts))
            if found.upper <= tol:
                return fill(product, self.left, self.right), report
            if search is None:
                search = self._search(check, measured, failed)
                if search is None:
                    return None
                search.expected(plan)  # so that it is known by how much it was wrong
            search.failed(plan, found.relative)
            plan = search.next()
        raise ToleranceError(_complaint(tol, self.request, attempts), report)


def _rounding(dtype: torch.dtype) -> float:
    """Relative error of rounding a matrix to ``dtype``, about: half a last place, spread evenly."""
    return 0.0 if dtype in (torch.float32, torch.float64) else 0.4 * torch.finfo(dtype).eps / 2


def _complaint(tol: float, request: Request, attempts: list[Attempt]) -> str:
    tried = ", ".join(f"{each.plan} {each.estimated:.1e} (at most {each.upper:.1e})" for each in attempts)
    text = f"tol must be met, but {tol:g} was not: {tried}"
    if _rounding(request.out_dtype) * 2 > tol:
        text += f"; {request.out_dtype} rounds by {_rounding(request.out_dtype):.1e}, ask for out_dtype=torch.float32"
    elif request.on_failure == "raise":
        text += "; on_failure='fp32' goes on with float64 products"
    return text
