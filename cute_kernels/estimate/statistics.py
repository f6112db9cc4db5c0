"""What predictions of ``A B`` ask of its operands, on a GPU: three launches, one copy of some numbers to the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel

NUM_SLICES = 16  # that are drawn of each operand
CHUNK = 64  # columns of k of a block
FORMS, FACTS = 16, 2  # numbers of a line; of a side
TABLE, RAW, MEANS, SHARES, LEVELS = 7, 5, 10, 4, 3
_SUMS = TABLE**2 + RAW**2 + 2
_NUMBERS = _SUMS + SHARES + 2 * MEANS**2 + 2 * LEVELS + 2 * FACTS
_LONGEST, _MAX_SLICES = 2**15, 2**17  # single blocks go over a line, and over the largest magnitudes of all lines
_OTHER_SEED = 0x5851F42D4C957F2D  # what the draws of B are apart from those of A


@dataclass(frozen=True)
class StatisticsConfig(KernelConfig):
    """What a kernel is compiled for: ``kernel`` is its name, ``x`` the operand's dtype.

    Magnitudes within ``2**-far`` and ``2**far`` are near one; a column of k with more than ``hot`` times the median
    energy is an outlier, at most one in ``most_hot``.
    """

    kernel: str
    x: str = "float32"
    range_log2: int = 30
    outlier_ratio: int = 16
    outlier_divisor: int = 16

    @property
    def threads(self) -> int:
        return 1024 if self.kernel == "measure_lines" else 256

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        return f"{self.kernel}-{self.x}-f{self.range_log2}h{self.outlier_ratio}m{self.outlier_divisor}"

    @property
    def kernel_header(self) -> str:
        return "estimate/statistics_pair.cuh" if self.kernel == "meet_lines" else "estimate/statistics.cuh"

    @property
    def kernel_entry(self) -> str:
        return self.kernel

    def _constants(self) -> dict[str, object]:
        return {
            "kThreads": self.threads,
            "kLines": NUM_SLICES,
            "kChunk": CHUNK,
            "kForms": FORMS,
            "kFacts": FACTS,
            "kFar": self.range_log2,
            "kHot": self.outlier_ratio,
            "kMostHot": self.outlier_divisor,
        }

    def _types(self) -> dict[str, str]:
        return {"Source": OUT_TYPES[self.x]}


@lru_cache
def _config(kernel: str, x: str, rule: StatisticsRule) -> StatisticsConfig:
    return StatisticsConfig(kernel, x, rule.range_log2, rule.outlier_ratio, rule.outlier_divisor)


class StatisticsRule(NamedTuple):
    """What is asked: digits of ``bits`` bits, leading digits from which an entry is above each sparse level, shares of
    the columns of k, and the config's ``far``, ``hot`` and ``most_hot``."""

    bits: int
    levels: tuple[int, int, int]
    shares: tuple[float, float, float, float]
    range_log2: int
    outlier_ratio: int
    outlier_divisor: int


class SlicedOperand(NamedTuple):
    """An operand: lines x (L, K) of any strides, float32, float16 or bfloat16, and their largest magnitudes, float32
    (L,), contiguous.  NaN and infinity there are what they are in a line."""

    x: Tensor
    tops: Tensor


class OperandSample(NamedTuple):
    """What was found of one operand, for pairs with others: ``workspace`` float64, behind all else a byte a column."""

    workspace: Tensor
    inner: int

    @property
    def outliers(self) -> Tensor:
        """bool (K,): which columns of k are outliers."""
        return self.workspace.view(torch.bool)[8 * _hot_start(self.inner) :][: self.inner]

    def addresses(self) -> tuple[int, int]:
        """Addresses of the workspace and of its bytes."""
        start = self.workspace.data_ptr()
        return start, start + 8 * _hot_start(self.inner)


class PairStatistics(NamedTuple):
    """Numbers of a pair of operands; lines are brought to a largest magnitude of one, tables are row by row.

    Attributes:
        squares: (7, 7): sums over k of products of mean squares of A's and B's quantities without their lines' means:
            x, R1, R2, XC, RC, XO, RO (:mod:`residual.predict`).
        raw: (5, 5): the same with means, of x, R1 and the entries of x below each sparse level.
        hot: number of columns of k that are outliers in A or B.
        product: sum of squares of ``product``.
        taken: for each share of the columns of k, the part of the cross products' squares in as many columns.
        left, right: (10, 10) each: mean products of a line's means of the seven quantities and of x below each level.
        density: shares of entries at or above each level, of A and of B.
        size: of A and of B: root of the lines' summed squared magnitudes.
        far: lines of A and of B that are not near one, or not finite; where there are any, the others mean nothing.
    """

    sum_of_squares: list[float]
    raw: list[float]
    num_outliers: int
    product: float
    cross_energy_by_share: list[float]
    lhs_means: list[float]
    rhs_means: list[float]
    density: tuple[list[float], list[float]]
    norms: tuple[float, float]
    out_of_range: int


class StatisticsFuture:
    """Numbers on their way to the host.

    Attributes:
        sides: of A and of B.
    """

    def __init__(self, sides: tuple[OperandSample, OperandSample], pair: Tensor, out: Tensor) -> None:
        self.samples, self._pair = sides, pair
        self._host = torch.empty(_NUMBERS, dtype=torch.float64, pin_memory=True)
        self._host.copy_(out, non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record()

    @property
    def cross_weight(self) -> Tensor:
        """float32 (K,): how much the cross products of a column of k weigh, by every other line."""
        return self._pair.view(torch.float32)[: self.samples[0].inner]

    def result(self) -> PairStatistics:
        """Waits for the numbers, and for nothing that was launched after :func:`start_statistics`."""
        self._there.synchronize()
        return parse_statistics(self._host.tolist())


def parse_statistics(numbers: list[float]) -> PairStatistics:
    """The tables in the order in which ``meet_lines`` writes them."""
    table, raw = TABLE**2, TABLE**2 + RAW**2
    left = _SUMS + SHARES
    right = left + MEANS**2
    ends = right + MEANS**2
    density, facts = numbers[ends : ends + 2 * LEVELS], numbers[ends + 2 * LEVELS :]
    return PairStatistics(
        numbers[:table], numbers[table:raw], int(numbers[raw]), numbers[raw + 1], numbers[_SUMS:left],
        numbers[left:right], numbers[right:ends], (density[:LEVELS], density[LEVELS:]), (facts[0], facts[2]),
        int(facts[1] + facts[3]),
    )  # fmt: skip


def supports(lines: int, inner: int) -> bool:
    """Whether the kernels take an operand of so many lines and entries a line."""
    return 0 < lines <= _MAX_SLICES and 0 < inner <= _LONGEST


def row_pitch(inner: int) -> int:
    """Entries from one line to the next in a workspace."""
    return -(-inner // CHUNK) * CHUNK


def _hot_start(inner: int) -> int:
    return FACTS + (NUM_SLICES * FORMS + (NUM_SLICES + 1) * row_pitch(inner)) // 2


def workspace_size(inner: int) -> int:
    """Doubles of a side's workspace."""
    return _hot_start(inner) + row_pitch(inner) // 8


def _source(side: SlicedOperand, seed: int, sampled: OperandSample) -> tuple[int, ...]:
    x = side.x
    return (
        x.data_ptr(), x.stride(0), x.stride(1), side.tops.data_ptr(), x.shape[0], seed, sampled.workspace.data_ptr(),
    )  # fmt: skip


def _sample(
    fresh: list[tuple[SlicedOperand, OperandSample, int]],
    inner: int,
    rule: StatisticsRule,
    kind: tuple[np.float32, ...],
    arrived: int,
) -> None:
    """Draw and measure the lines of one or two sides; two launches, one more for different dtypes."""
    chunks = row_pitch(inner) // CHUNK
    alike = len({side.x.dtype for side, _, _ in fresh}) == 1
    for group in [fresh] if alike else [[each] for each in fresh]:
        kernel = get_kernel(_config("sample_lines", REAL_DTYPES[group[0][0].x.dtype], rule))
        sources = [_source(side, seed, sampled) for side, sampled, seed in group]
        kernel.launch((chunks, len(group), 1), (*sources[0], *sources[-1], inner, arrived))
    kernel = get_kernel(_config("measure_lines", "float32", rule))
    (_, first, _), (_, second, _) = fresh[0], fresh[-1]
    kernel.launch((NUM_SLICES, len(fresh), 1), (*first.addresses(), *second.addresses(), inner, *kind))


@lru_cache
def _kind(bits: int, levels: tuple[int, int, int]) -> tuple[np.float32, ...]:
    return tuple(np.float32(each) for each in (2 ** (bits - 1) - 1, 2**bits, *levels))


@lru_cache
def _counts(shares: tuple[float, ...], inner: int) -> tuple[int, ...]:
    return tuple(max(1, round(share * inner)) for share in shares)


def start_statistics(
    left: SlicedOperand, right: SlicedOperand | OperandSample, product: Tensor, rule: StatisticsRule, seed: int
) -> StatisticsFuture:
    """Draw sixteen lines of A and of B by their squared largest magnitudes; start what :class:`PairStatistics` tells of them.

    left: rows of A (M, K), right: columns of B (N, K), or what an earlier look at them with the same ``rule`` found.
    product: contiguous float32.  Both operands :func:`supports`.  Line i is the one behind the (i + u)-th sixteenth of the
    sum of squared magnitudes, u in [0, 1) by ``seed``, so that a line counts as much as it weighs, zeros not at all.
    Does not wait for the GPU.
    """
    inner, device = left.x.shape[1], left.x.device
    pitch, size = row_pitch(inner), workspace_size(inner)
    blocks = pitch // CHUNK

    def empty() -> OperandSample:
        return OperandSample(torch.empty(size, dtype=torch.float64, device=device), inner)

    a, b = empty(), right if isinstance(right, OperandSample) else empty()
    # weights of columns (2, pitch) in float32, blocks' sums, a counter, and the numbers
    pair = torch.empty(pitch + blocks * _SUMS + 1 + _NUMBERS, dtype=torch.float64, device=device)
    crossed = pair.data_ptr()
    partials = crossed + 8 * pitch
    arrived = partials + 8 * blocks * _SUMS
    seed = (seed + 2**63) % 2**64 - 2**63
    fresh = [(left, a, seed)]
    if isinstance(right, SlicedOperand):
        fresh.append((right, b, seed ^ _OTHER_SEED))
    with device_of(product):
        kind = _kind(rule.bits, rule.levels)
        _sample(fresh, inner, rule, kind, arrived)
        kernel = get_kernel(_config("meet_lines", "float32", rule))
        kernel.launch(
            (blocks, 1, 1),
            (
                *a.addresses(), *b.addresses(), inner, *kind, product.data_ptr(), product.numel(), crossed, partials, arrived,
                *_counts(rule.shares, inner), arrived + 8,
            ),
        )  # fmt: skip
        return StatisticsFuture((a, b), pair, pair[-_NUMBERS:])


def default_configs() -> list[StatisticsConfig]:
    """The kernels of all input types."""
    sampling = [StatisticsConfig("sample_lines", x) for x in REAL_DTYPES.values()]
    return [*sampling, StatisticsConfig("measure_lines"), StatisticsConfig("meet_lines")]
