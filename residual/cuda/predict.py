"""What error each plan will have, from statistics of a few lines of both operands.

For a sampled line of magnitude one let x be its entries, r1 and r2 what one and two digits leave of them
(and ``r2 / 2**bits`` what three leave).  An
error of the product is a sum of products of such matrices, ``X Y = X' Y' + K mean(X) mean(Y)^T``, X' and Y' without
their lines' means.  Entries of a rounding residual X' scatter without pattern, so
``||X' Y'||^2 ~ sum_k ||X'[:, k]||^2 ||Y'[k, :]||^2``; the means add the coherent term exactly, as in
``||A 1 mean(rb) + mean(ra) 1^T B||^2`` for ``A RB + RA B``, which grows with K^2 instead of K.  Lines are drawn with
probability proportional to their squared magnitude, so lines of zeros take no part, and lines scaled by any power of
two count as much as they weigh in the product.  What is predicted is checked afterwards, so that a wrong guess costs
time and nothing else.

On a GPU the same numbers come from kernels (:mod:`cute_kernels.estimate.statistics`), where lines are of float32 or a
half dtype and near one; else, and on a CPU, from torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residual.cuda.operand import FAR, HOT, MOST_HOT, SAMPLE, GpuOperand
from residual.cuda.plans import COLUMN_SHARES, SPARSE_LEVELS, GpuPlan
from residual.operand.operand import real_dtype

if TYPE_CHECKING:
    from cute_kernels.estimate.statistics import PairStatistics, StatisticsFuture, StatisticsRule

X, R1, R2, XC, RC, XO, RO = range(7)  # entries and residuals; C: centered, O: without outlier columns
_LEVELS = 7
_SINGLE = 4e-7  # error of a float32 product against the size of its terms, at K = 1024 (measured 1.7e-7 to 3.5e-7)
_ROUNDED = 2.5e-4  # of a number rounded to float16, where it is normal: half a last place, spread evenly
_CUT, _CUT_MOST = 6e-9, 8192  # lost by a sum on Tensor Cores for each of its terms of one sign, of so many at most
_FLOOR = 6e-8  # of integer products that meet in float32
_DOUBLE = 1e-15


@dataclass(frozen=True)
class Lines:
    """Statistics of one operand's lines of magnitude one, all weighted means; tensors on its device."""

    squares: Tensor  # float32 (7, K): of entries and residuals without their lines' means
    raw: Tensor  # float32 (2 or 2 + levels, K): of x, of r1, and of the entries of x below each sparse level
    halves: Tensor  # float32 (2, 2, K): of x and of r1 for every other line, and for the rest
    means: Tensor  # float32 (7, 7) or (7 + levels, 7 + levels): products of the lines' means, of those entries too
    density: Tensor  # float32 (levels,): share of entries at or above each sparse level
    size: Tensor  # float64 (): root of the sum of the lines' squared magnitudes


def lines(side: GpuOperand, bits: int, sparse: bool, generator: torch.Generator) -> Lines:
    """Statistics of an operand for digits of ``bits`` bits; kept on it.  ``sparse``: those of that mode too."""
    found = side.kept.get(("lines", bits, sparse))
    if not isinstance(found, Lines):
        found = side.kept["lines", bits, sparse] = _look(side, bits, sparse, generator)
    return found


def _look(side: GpuOperand, bits: int, sparse: bool, generator: torch.Generator) -> Lines:
    top = side.top.double()
    if side.exponent is not None:
        top = top * torch.exp2(side.exponent.double())  # (L,)
    peak = top.max()
    share = (top / peak).square_().nan_to_num_(1.0)  # (L,), all zeros count alike
    if top.shape[0] <= 2 * SAMPLE:
        x, high, weight = side.values, side.top, (share / share.sum()).float()
    else:
        drawn = torch.multinomial(share, SAMPLE, replacement=True, generator=generator)
        x, high = side.values[drawn], side.top[drawn]
        weight = torch.full_like(high, 1 / SAMPLE)
    x = x / high.clamp(min=torch.finfo(high.dtype).tiny)[:, None]  # (S, K)
    return _statistics(x, weight.sqrt()[:, None], side.hot(), bits, sparse, peak * share.sum().sqrt())


def _residual(x: Tensor, limit: int) -> Tensor:
    """What one digit leaves of lines whatever their magnitude."""
    unit = (x.abs().amax(1, keepdim=True) / limit).clamp_(min=torch.finfo(x.dtype).tiny)  # (S, 1)
    return x - (x / unit).round_().mul_(unit)  # (S, K)


def _statistics(x: Tensor, weight: Tensor, hot: Tensor, bits: int, sparse: bool, size: Tensor) -> Lines:
    """``x``: (S, K) of magnitude one; ``weight``: roots of weights, (S, 1)."""
    limit, base = 2 ** (bits - 1) - 1, 2.0**bits
    levels = x.new_empty(_LEVELS, *x.shape)  # (7, S, K)
    levels[X] = x
    scaled = x * limit
    digit = scaled.round()  # (S, K)
    rest = scaled.sub_(digit)
    torch.div(rest, limit, out=levels[R1])
    rest = rest * base
    torch.div(rest.sub_(rest.round().clamp_(-limit - 1, min(limit + 1, 127))), limit * base, out=levels[R2])
    torch.sub(x, x.mean(1, keepdim=True), out=levels[XC])
    levels[RC] = _residual(levels[XC], limit)
    if x.is_cuda or bool(hot.any()):
        levels[XO] = x.masked_fill(hot, 0.0)
        levels[RO] = _residual(levels[XO], limit)
    else:
        levels[XO], levels[RO] = x, levels[R1]
    levels *= weight
    means = levels.mean(2)  # (7, S)
    plain = levels[:2].square()  # (2, S, K)
    raw, density = plain.sum(1), x.new_zeros(len(SPARSE_LEVELS))
    if sparse:
        below = torch.stack([digit.abs() < GpuPlan("sparse", bits, share).threshold for share in SPARSE_LEVELS])
        light = levels[X] * below  # (levels, S, K)
        raw = torch.cat([raw, light.square().sum(1)])  # (2 + levels, K)
        means = torch.cat([means, light.mean(2)])  # (7 + levels, S)
        density = 1 - (below * weight.square()).sum((1, 2)) / x.shape[1]
    halves = plain[:, ::2].sum(1), plain[:, 1::2].sum(1)  # (2, K) each
    squares = (levels - means[:_LEVELS, :, None]).square_().sum(1)  # (7, K)
    return Lines(squares, raw, torch.stack(halves), means @ means.mT, density, size)


@dataclass(frozen=True)
class Forecast:
    """Predictions for a pair of operands and digits of ``bits`` bits.

    ``crossed``: what the cross products of each column of k weigh; ``hot``: number of outlier columns; ``density``: of
    A and of B, above each sparse level.
    """

    bits: int
    inner: int
    crossed: Callable[[], Tensor]  # float32 (K,)
    hot: int
    density: tuple[list[float], list[float]]
    squares: list[list[float]]  # (7, 7): sums over k of products of mean squares
    raw: list[list[float]]
    left_means: list[list[float]]
    right_means: list[list[float]]
    remaining: list[float]  # of the cross terms' energy, outside the first columns of ``order``, by share
    size: float  # product of the two operands' sizes

    @cached_property
    def order(self) -> Tensor:
        """int64 (K,): columns of k, those whose residuals weigh most first."""
        return self.crossed().argsort(descending=True)

    def _scattered(self, x: int, y: int) -> float:
        return self.squares[x][y] + self.inner**2 * self.left_means[x][x] * self.right_means[y][y]

    def _coherent(self, x: int, r: int) -> float:
        a, b = self.left_means, self.right_means
        return self.inner**2 * max(a[r][r] * b[x][x] + a[x][x] * b[r][r] + 2 * a[r][x] * b[r][x], 0.0)

    def _crossed(self, x: int, r: int) -> tuple[float, float]:
        """``||A RB + RA B||^2``: its scattered and its coherent part."""
        return self.squares[r][x] + self.squares[x][r], self._coherent(x, r)

    @cached_property
    def _left_by_one(self) -> tuple[float, float]:
        """``||A R1 + R1 B||^2`` of A1 B1."""
        return self._crossed(X, R1)

    @cached_property
    def _left_by_two(self) -> float:
        """Of A1 B1 + A1 B0 + A0 B1."""
        return sum(self._crossed(X, R2)) + self._scattered(R1, R1)

    @cached_property
    def _plain(self) -> float:
        """Squared size of the product's terms."""
        return self._scattered(X, X)

    def _squared(self, plan: GpuPlan) -> float:
        mode = plan.mode
        if mode == "direct":
            return sum(self._left_by_one) + self._scattered(R1, R1)
        if mode == "centered":
            return self._crossed(XC, RC)[0] + self._scattered(RC, RC)  # means of XC are zero
        if mode == "outlier":
            return sum(self._crossed(XO, RO)) + self._scattered(RO, RO)
        if mode == "columns":
            left_out = 1 - plan.share
            coherent = self._left_by_one[1] * left_out**2
            return self.remaining[COLUMN_SHARES.index(plan.share)] + coherent + self._left_by_two
        if mode == "full" or (mode == "sparse" and plan.threshold == 1):  # digits below the threshold are zero
            return self._left_by_two
        if mode == "sparse":
            level = SPARSE_LEVELS.index(plan.share)
            scattered = self.raw[2 + level][R1] + self.raw[R1][2 + level]
            return scattered + self._coherent(_LEVELS + level, R1) + self._left_by_two
        if mode == "full4":
            return sum(self._crossed(X, R2)) + self._scattered(R2, R2)
        third = sum(self._crossed(X, R2)) / 4**self.bits
        return third + self._scattered(R1, R2) + self._scattered(R2, R1)

    def error(self, plan: GpuPlan) -> float:
        """Predicted ``||AB - C||_F``."""
        plain = self._plain
        if plan.mode == "fp64":
            squared = _DOUBLE**2 * plain
        elif plan.mode == "fp16":
            squared = 2 * _ROUNDED**2 * self.raw[X][X] + (_CUT * min(self.inner, _CUT_MOST)) ** 2 * plain
        elif plan.mode == "fp32":
            squared = _SINGLE**2 * plain * max(1.0, self.inner / 1024) ** 0.5
        else:
            squared = self._squared(plan) + _FLOOR**2 * plain
        return math.sqrt(squared) * self.size

    def densities(self, plan: GpuPlan) -> float:
        """Sum of the densities of A' and B'."""
        level = SPARSE_LEVELS.index(plan.share)
        return self.density[0][level] + self.density[1][level]


def forecast(left: GpuOperand, right: GpuOperand, bits: int, sparse: bool, generator: torch.Generator) -> Forecast:
    """Predictions for ``A B``; waits for a GPU once.  ``sparse``: for plans of that mode too."""
    a, b = lines(left, bits, sparse, generator), lines(right, bits, sparse, generator)
    inner = left.values.shape[1]
    # Half of the lines choose columns, the other half tells what is left: chosen ones look too good to the former.
    crossed = a.halves[:, R1] * b.halves[:, X] + a.halves[:, X] * b.halves[:, R1]  # (2, K)
    order = crossed[0].argsort(descending=True)
    taken = crossed[1, order].cumsum(0)  # (K,)
    counts = [max(1, round(share * inner)) - 1 for share in COLUMN_SHARES]
    total = a.raw[R1] @ b.raw[X] + a.raw[X] @ b.raw[R1]
    remaining = total * (1 - taken[counts] / taken[-1].clamp(min=torch.finfo(taken.dtype).tiny)).clamp_(min=0)
    hot = (left.hot() | right.hot()).sum()
    squares, raw = a.squares @ b.squares.mT, a.raw @ b.raw.mT  # (7, 7), (2 + levels, 2 + levels)
    parts = [squares, raw, a.means, b.means, a.density, b.density, remaining, hot[None], (a.size * b.size)[None]]
    numbers = torch.cat([part.flatten().double() for part in parts]).tolist()

    def take(tensor: Tensor) -> list[float]:
        found = numbers[: tensor.numel()]
        del numbers[: tensor.numel()]
        return found

    def square(tensor: Tensor) -> list[list[float]]:
        flat, width = take(tensor), tensor.shape[1]
        return [flat[i : i + width] for i in range(0, len(flat), width)]

    tables = [square(part) for part in parts[:4]]
    density = take(a.density), take(b.density)
    kept, hot_count, size = (take(part) for part in parts[6:])
    return Forecast(
        bits=bits, inner=inner, crossed=lambda: crossed[0], hot=int(hot_count[0]), density=density, squares=tables[0],
        raw=tables[1], left_means=tables[2], right_means=tables[3], remaining=kept, size=size[0],
    )  # fmt: skip


@lru_cache
def _rule(bits: int) -> StatisticsRule:
    from cute_kernels.estimate.statistics import StatisticsRule  # takes longer to import than this package

    first, second, third = (GpuPlan("sparse", bits, share).threshold for share in SPARSE_LEVELS)
    return StatisticsRule(bits, (first, second, third), COLUMN_SHARES, FAR, int(HOT), MOST_HOT)


def quick(left: GpuOperand, right: GpuOperand) -> bool:
    """Whether the statistics' kernels take these operands: on a GPU, no float64, lines near one as far as known."""
    if not left.given.is_cuda:
        return False
    from cute_kernels.estimate.statistics import supports_statistics

    sides = (left, right)
    known = all(side.exponent is None and side.broken is None for side in sides)
    single = all(real_dtype(side.given) != torch.float64 for side in sides)
    return known and single and all(supports_statistics(*side.given.shape) for side in sides)


def start_look(left: GpuOperand, right: GpuOperand, product: Tensor, bits: int, seed: int) -> StatisticsFuture:
    """Start the statistics of operands that are :func:`quick`; waits for nothing.

    ``product``: as in :class:`PairStatistics`.  What is found of the right operand, and which columns
    are outliers, is kept on the operands.
    """
    from cute_kernels.estimate import statistics

    key = ("sampled", bits)
    kept = right.kept.get(key)
    side = kept if isinstance(kept, statistics.OperandSample) else statistics.SlicedOperand(right.real, right.top)
    look = statistics.start_statistics(statistics.SlicedOperand(left.real, left.top), side, product, _rule(bits), seed)
    right.kept[key] = look.samples[1]
    for operand, sampled in zip((left, right), look.samples, strict=True):
        operand.kept["hot"] = sampled
    return look


def forecast_of(look: StatisticsFuture, tables: PairStatistics, bits: int) -> Forecast:
    """Predictions from the kernels' numbers."""

    def square(flat: list[float], width: int) -> list[list[float]]:
        return [flat[i : i + width] for i in range(0, len(flat), width)]

    raw = square(tables.raw, 5)
    total = raw[R1][X] + raw[X][R1]
    return Forecast(
        bits=bits, inner=look.samples[0].inner, crossed=lambda: look.cross_weight, hot=tables.num_outliers,
        density=tables.density, squares=square(tables.sum_of_squares, _LEVELS), raw=raw,
        left_means=square(tables.lhs_means, _LEVELS + len(SPARSE_LEVELS)),
        right_means=square(tables.rhs_means, _LEVELS + len(SPARSE_LEVELS)),
        remaining=[total * max(1.0 - part, 0.0) for part in tables.cross_energy_by_share],
        size=tables.norms[0] * tables.norms[1],
    )  # fmt: skip
