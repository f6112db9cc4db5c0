"""Which plan runs: the cheapest one that is predicted to meet the tolerance, and what follows where it did not."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from residual.cuda.cost_model import Costs, Sizes, analysis, cost
from residual.cuda.plans import WAITING, GpuPlan, plans_of

HALF, SINGLE, DOUBLE = GpuPlan("fp16"), GpuPlan("fp32"), GpuPlan("fp64")
_MARGIN = 1.15  # of a prediction, on top of the check's factor
# Errors of real data that 8-bit digits hardly ever undercut; below them, statistics are not worth their time.
_BEST = {"full": 5e-7, "full4": 3e-7, "three_digit": 1e-9}
_BEST_OF_ONE = 5e-6
_BEST_SINGLE = 1.2e-7  # of float32
_BEST_HALF = 2e-5  # of halves; sums on Tensor Cores are cut and not rounded
EXACT_HALF = 1e-4  # what products of numbers that are halves already stay below, as far as sums go
NOMINAL = {SINGLE: 4e-7, DOUBLE: 1e-15}  # predicted errors without statistics


class Wish(NamedTuple):
    """What the caller asked for.

    ``mode``: ``auto`` or a mode; ``bits``: 4, 8 or None; ``double``: float64 takes part in the input or the output, so
    that its product is a plan like others; ``last_resort``: whether float products may follow when all else failed;
    ``half``: products of 16-bit floats are a plan.
    """

    tol: float
    mode: str = "auto"
    bits: int | None = None
    double: bool = False
    last_resort: bool = False
    half: bool = False


@lru_cache(maxsize=256)
def possible(wish: Wish) -> tuple[GpuPlan, ...]:
    """Digit plans that may meet the tolerance on some real data, before anything is known of the data.

    Four-bit digits run as bytes on every device so far, no faster, so only who asks gets them.
    """
    plans = tuple(plans_of(wish.mode, (wish.bits or 8,)))
    if wish.mode != "auto":
        return plans
    return tuple(plan for plan in plans if _BEST.get(plan.mode, _BEST_OF_ONE) <= wish.tol)


def floats(wish: Wish) -> list[GpuPlan]:
    """Float plans, cheapest first."""
    if wish.mode != "auto":
        return [SINGLE, DOUBLE] if wish.last_resort else []
    return [SINGLE, DOUBLE] if wish.double or wish.last_resort else [SINGLE]


def short(wish: Wish) -> tuple[GpuPlan, ...]:
    """The product in halves, where it is a plan that may meet the tolerance."""
    return (HALF,) if wish.half and wish.mode == "auto" and wish.tol >= _BEST_HALF else ()


@lru_cache(maxsize=256)
def without_statistics(wish: Wish, sizes: Sizes, prices: Costs) -> GpuPlan | None:
    """The float plan where no other can be cheaper by enough to pay for the statistics; a function of sizes."""
    if wish.mode != "auto":
        return None
    plain = DOUBLE if wish.double and wish.tol < _BEST_SINGLE else SINGLE
    others = short(wish)
    if sizes.sixteen_bit and wish.tol >= EXACT_HALF and others:  # digits are 1.8 times as fast, and rarely enough
        return HALF
    cheapest = min((cost(plan, sizes, prices) for plan in (*possible(wish), *others)), default=None)
    if cheapest is not None and cheapest + analysis(sizes, prices) < cost(plain, sizes, prices):
        return None
    return plain


@lru_cache(maxsize=256)
def priced(plans: tuple[GpuPlan, ...], sizes: Sizes, prices: Costs) -> tuple[tuple[float, GpuPlan], ...]:
    """Plans with the least that they may cost, whatever the data, cheapest first."""
    return tuple(sorted(((cost(plan, sizes, prices), plan) for plan in plans), key=lambda found: found[0]))


def _predicts_nothing(plan: GpuPlan) -> float:
    raise KeyError(plan)


@dataclass
class Search:
    """Plans left to try, with their predicted relative errors.

    Where one is None, ``predict`` tells it when it is asked for, as it is for few plans.
    """

    wish: Wish
    factor: float  # of the first check's bound over its estimate, as a rule
    sizes: Callable[[GpuPlan], Sizes]
    prices: Costs
    predicted: dict[GpuPlan, float | None] = field(default_factory=dict)
    predict: Callable[[GpuPlan], float] = _predicts_nothing
    tried: list[GpuPlan] = field(default_factory=list)
    single: Costs | None = None  # prices of a call by itself, where ``prices`` are those of one of many
    avoided: Collection[GpuPlan] = ()  # plans that missed where others like this product were computed
    daring: bool = False  # whether a plan may be tried that is about as likely to miss as to meet the tolerance
    worse: float = 1.0  # how many times larger than predicted the errors of digits turned out

    def expected(self, plan: GpuPlan) -> float:
        """Predicted error, corrected by what was seen."""
        found = self.predicted.get(plan)
        if found is None:
            if plan in self.predicted:
                found = self.predicted[plan] = self.predict(plan)
            else:
                found = NOMINAL.get(plan, 1.0)
        return found * self.worse if plan.bits else found

    def _cost(self, plan: GpuPlan) -> float:
        """Seconds of a plan; modes that take statistics in each call share nothing with other calls."""
        sizes = self.sizes(plan)
        if self.single is not None and plan.mode in WAITING:
            return cost(plan, sizes, self.single) + analysis(sizes, self.single)
        return cost(plan, sizes, self.prices)

    def _meeting(self, candidates: list[GpuPlan]) -> GpuPlan | None:
        """The cheapest of the candidates that is to meet the tolerance."""
        best: tuple[float, float, GpuPlan] | None = None
        known = self.sizes(SINGLE)
        most = self.wish.tol / self.factor
        for least, plan in priced(tuple(candidates), known._replace(hot=0, density=0.0), self.prices):
            if best is not None and least > best[0]:
                break
            error = self.expected(plan)
            if error * (1.0 if self.daring and plan.mode not in WAITING else _MARGIN) <= most:
                found = (self._cost(plan), error, plan)
                best = found if best is None or found[:2] < best[:2] else best
        return None if best is None else best[2]

    def next(self) -> GpuPlan | None:
        """The cheapest plan that is to meet the tolerance; else the most exact of those that could still do so.

        Nothing is tried that is predicted no better than half the error of what failed, floats apart.
        """
        failed = [0.5 * self.expected(plan) for plan in self.tried if plan.bits]
        left_out = {*self.tried, *self.avoided}
        untried = [plan for plan in self.predicted if plan.bits and plan not in left_out]
        digit = [plan for plan in untried if not failed or self.expected(plan) < min(failed)]
        single = [] if DOUBLE in self.tried else [plan for plan in floats(self.wish) if plan not in self.tried]
        asked = self.wish.mode != "auto" and digit
        halves = [plan for plan in short(self.wish) if plan not in left_out]
        meeting = self._meeting(digit if asked else [*digit, *single, *halves])
        if meeting is not None:
            return meeting
        if self.avoided:  # rather once more than refused
            self.avoided = ()
            return self.next()
        if asked:
            return min(digit, key=self.expected)
        return single[0] if single else None

    def failed(self, plan: GpuPlan, measured: float) -> None:
        """Note that ``plan`` missed the tolerance."""
        self.tried.append(plan)
        self.daring = False
        predicted = self.predicted.get(plan)
        if plan.bits and predicted is not None and predicted > 0:  # not where it is NaN either
            self.worse = max(self.worse, measured / predicted)


@lru_cache(maxsize=256)
def worth_predicting(wish: Wish, sizes: Sizes, prices: Costs) -> tuple[GpuPlan, ...]:
    """Digit plans cheaper than the float product even at their best; all of a mode that was asked for."""
    plans = possible(wish)
    if wish.mode != "auto":
        return plans
    bound = cost(SINGLE, sizes, prices)
    return tuple(plan for plan in plans if cost(plan, sizes, prices) < bound)
