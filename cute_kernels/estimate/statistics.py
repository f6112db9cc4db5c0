"""Statistics of the operands of ``A B`` for a-priori error bounds, on a GPU: three launches, one copy to the host."""

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

NUM_SLICES = 16  # slices that are sampled per operand
CHUNK = 64  # columns of K per CTA
FORMS, FACTS = 16, 2  # numbers per slice; numbers per operand
TABLE, RAW, MEANS, SHARES, LEVELS = 7, 5, 10, 4, 3
_SUMS = TABLE**2 + RAW**2 + 2
_NUMBERS = _SUMS + SHARES + 2 * MEANS**2 + 2 * LEVELS + 2 * FACTS
_MAX_K, _MAX_SLICES = 2**15, 2**17  # one CTA reads a slice, and the absmax of all slices
_RHS_SEED = 0x5851F42D4C957F2D  # decorrelates the samples of A and B


@dataclass(frozen=True)
class StatisticsConfig(KernelConfig):
    """Config of a statistics kernel.

    Attributes
    ----------
    kernel : str
        ``"sample_lines"``, ``"measure_lines"`` or ``"meet_lines"``.
    x : str
        Dtype of the operand.
    range_log2 : int
        Slices with absmax within ``2**-range_log2 .. 2**range_log2`` are in range.
    outlier_ratio : int
        A column of K with more than this times the median energy is an outlier.
    outlier_divisor : int
        At most one column in this many is an outlier.
    """

    kernel: str
    x: str = "float32"
    range_log2: int = 30
    outlier_ratio: int = 16
    outlier_divisor: int = 16

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 1024 if self.kernel == "measure_lines" else 256

    @property
    def name(self) -> str:
        """Short name, unique among the configs."""
        return f"{self.kernel}-{self.x}-f{self.range_log2}h{self.outlier_ratio}m{self.outlier_divisor}"

    @property
    def kernel_header(self) -> str:
        """Header of the kernel."""
        return "estimate/statistics_pair.cuh" if self.kernel == "meet_lines" else "estimate/statistics.cuh"

    @property
    def kernel_entry(self) -> str:
        """Name of the kernel."""
        return self.kernel

    def _constants(self) -> dict[str, object]:
        return {
            "kThreads": self.threads,
            "kSlices": NUM_SLICES,
            "kChunk": CHUNK,
            "kForms": FORMS,
            "kFacts": FACTS,
            "kRangeLog2": self.range_log2,
            "kOutlierRatio": self.outlier_ratio,
            "kOutlierDivisor": self.outlier_divisor,
        }

    def _types(self) -> dict[str, str]:
        return {"Source": OUT_TYPES[self.x]}


@lru_cache
def _config(kernel: str, x: str, rule: StatisticsRule) -> StatisticsConfig:
    """Return the config of one kernel for `rule`."""
    return StatisticsConfig(kernel, x, rule.range_log2, rule.outlier_ratio, rule.outlier_divisor)


class StatisticsRule(NamedTuple):
    """What the statistics are for.

    Attributes
    ----------
    bits : int
        Bits per digit.
    levels : tuple of int
        Leading digits from which an element is above each of three sparse levels.
    shares : tuple of float
        Four shares of the columns of K.
    range_log2, outlier_ratio, outlier_divisor : int
        As for :class:`StatisticsConfig`.
    """

    bits: int
    levels: tuple[int, int, int]
    shares: tuple[float, float, float, float]
    range_log2: int
    outlier_ratio: int
    outlier_divisor: int


class SlicedOperand(NamedTuple):
    """An operand by slices: rows of A, or columns of B.

    Attributes
    ----------
    x : Tensor, shape (L, K)
        float32, float16 or bfloat16 of any memory strides.
    absmax : Tensor, shape (L,)
        float32, contiguous; NaN and infinity as they are in a slice.
    """

    x: Tensor
    absmax: Tensor


class OperandSample(NamedTuple):
    """Statistics of one operand on the GPU, which pairs with other operands can reuse.

    Attributes
    ----------
    workspace : Tensor, shape (workspace_size(K),)
        float64 memory of the kernels; its end has a byte per column of K.
    inner : int
        K.
    """

    workspace: Tensor
    inner: int

    @property
    def outliers(self) -> Tensor:
        """Outlier columns of K, bool (K,)."""
        return self.workspace.view(torch.bool)[8 * _outlier_start(self.inner) :][: self.inner]

    def addresses(self) -> tuple[int, int]:
        """Return the addresses of the workspace and of its bytes."""
        start = self.workspace.data_ptr()
        return start, start + 8 * _outlier_start(self.inner)


class PairStatistics(NamedTuple):
    """Statistics of a pair of operands, slices scaled to an absmax of one; tables are row-major lists.

    Attributes
    ----------
    sum_of_squares : list of float, length 49
        (7, 7) sums over K of products of mean squares of the quantities of A and of B, without their means per slice:
        x, R1, R2, XC, RC, XO, RO (:mod:`residual.cuda.predict`).
    raw : list of float, length 25
        (5, 5) the same with means: x, R1 and x below each sparse level.
    num_outliers : int
        Columns of K that are outliers in A or B.
    product : float
        Sum of squares of the probe product.
    cross_energy_by_share : list of float, length 4
        Part of the squares of the cross terms that is in each share of the columns of K.
    lhs_means, rhs_means : list of float, length 100
        (10, 10) mean products of the means per slice of the seven quantities and of x below each sparse level.
    density : tuple of list of float
        Shares of elements at or above each sparse level, of A and of B.
    norms : tuple of float
        Root of the summed squared absmax of the slices, of A and of B.
    out_of_range : int
        Slices of A and of B that are out of range or non-finite; if there are any, the other numbers are invalid.
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
    """Statistics of a pair of operands that a GPU computes.

    Parameters
    ----------
    samples : tuple of OperandSample
        Statistics of A and of B, on the GPU.
    pair : Tensor
        float64 memory of the pair.
    numbers : Tensor, shape (_NUMBERS,)
        The part of `pair` that the host reads.

    Attributes
    ----------
    samples : tuple of OperandSample
        Statistics of A and of B, on the GPU.
    """

    def __init__(self, samples: tuple[OperandSample, OperandSample], pair: Tensor, numbers: Tensor) -> None:
        self.samples, self._pair = samples, pair
        self._host = torch.empty(_NUMBERS, dtype=torch.float64, pin_memory=True, device="cpu")
        self._host.copy_(numbers, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    @property
    def cross_weight(self) -> Tensor:
        """Energy of the cross terms per column of K, from every other slice: float32 (K,)."""
        return self._pair.view(torch.float32)[: self.samples[0].inner]

    def result(self) -> PairStatistics:
        """Wait for the statistics and return them; work launched after :func:`start_statistics` is not waited for."""
        self._copied.synchronize()
        return parse_statistics(self._host.tolist())


def parse_statistics(numbers: list[float]) -> PairStatistics:
    """Return the statistics from the numbers in the order in which ``meet_lines`` writes them."""
    table, raw = TABLE**2, TABLE**2 + RAW**2
    lhs = _SUMS + SHARES
    rhs = lhs + MEANS**2
    ends = rhs + MEANS**2
    density, facts = numbers[ends : ends + 2 * LEVELS], numbers[ends + 2 * LEVELS :]
    return PairStatistics(
        numbers[:table], numbers[table:raw], int(numbers[raw]), numbers[raw + 1], numbers[_SUMS:lhs],
        numbers[lhs:rhs], numbers[rhs:ends], (density[:LEVELS], density[LEVELS:]), (facts[0], facts[2]),
        int(facts[1] + facts[3]),
    )  # fmt: skip


def supports_statistics(slices: int, inner: int) -> bool:
    """Return whether the kernels take an operand of `slices` slices of length `inner`."""
    return 0 < slices <= _MAX_SLICES and 0 < inner <= _MAX_K


def row_pitch(inner: int) -> int:
    """Return the elements from one slice to the next in a workspace."""
    return -(-inner // CHUNK) * CHUNK


def _outlier_start(inner: int) -> int:
    """Return where the outlier bytes start in a workspace, in doubles."""
    return FACTS + (NUM_SLICES * FORMS + (NUM_SLICES + 1) * row_pitch(inner)) // 2


def workspace_size(inner: int) -> int:
    """Return the doubles in the workspace of an operand."""
    return _outlier_start(inner) + row_pitch(inner) // 8


def _source_arguments(operand: SlicedOperand, seed: int, sample: OperandSample) -> tuple[int, ...]:
    """Return the arguments of ``sample_lines`` for one operand."""
    x, absmax = operand
    return (
        x.data_ptr(), x.stride(0), x.stride(1), absmax.data_ptr(), x.shape[0], seed, sample.workspace.data_ptr(),
    )  # fmt: skip


def _sample(
    operands: list[tuple[SlicedOperand, OperandSample, int]],
    inner: int,
    rule: StatisticsRule,
    digits: tuple[np.float32, ...],
    arrived: int,
) -> None:
    """Sample and measure slices of one or two operands: two launches, three for two dtypes."""
    chunks = row_pitch(inner) // CHUNK
    alike = len({operand.x.dtype for operand, _, _ in operands}) == 1
    for group in [operands] if alike else [[each] for each in operands]:
        kernel = get_kernel(_config("sample_lines", REAL_DTYPES[group[0][0].x.dtype], rule))
        sources = [_source_arguments(operand, seed, sample) for operand, sample, seed in group]
        kernel.launch((chunks, len(group), 1), (*sources[0], *sources[-1], inner, arrived))
    kernel = get_kernel(_config("measure_lines", "float32", rule))
    (_, first, _), (_, second, _) = operands[0], operands[-1]
    kernel.launch((NUM_SLICES, len(operands), 1), (*first.addresses(), *second.addresses(), inner, *digits))


@lru_cache
def _digit_arguments(bits: int, levels: tuple[int, int, int]) -> tuple[np.float32, ...]:
    """Return the largest digit, the radix and the sparse levels as kernel arguments."""
    return tuple(np.float32(each) for each in (2 ** (bits - 1) - 1, 2**bits, *levels))


@lru_cache
def _counts(shares: tuple[float, ...], inner: int) -> tuple[int, ...]:
    """Return the number of columns of K in each share."""
    return tuple(max(1, round(share * inner)) for share in shares)


def start_statistics(
    lhs: SlicedOperand, rhs: SlicedOperand | OperandSample, product: Tensor, rule: StatisticsRule, seed: int
) -> StatisticsFuture:
    """Start the statistics of a pair of operands from 16 slices of each; does not wait for the GPU.

    Slice i is the one at the (i + u)-th sixteenth of the cumulative squared absmax, with u in [0, 1) from `seed`: the
    probability of a slice is proportional to its squared absmax.

    Parameters
    ----------
    lhs : SlicedOperand, shape (M, K)
        Rows of A, which :func:`supports_statistics`.
    rhs : SlicedOperand or OperandSample, shape (N, K)
        Columns of B, or their sample by an earlier call with the same `rule`.
    product : Tensor
        Probe product, contiguous float32; its squares are summed.
    rule : StatisticsRule
        Digits, levels and thresholds.
    seed : int
        Seed of the samples.

    Returns
    -------
    StatisticsFuture
        The statistics, once they are computed.
    """
    inner, device = lhs.x.shape[1], lhs.x.device
    pitch, size = row_pitch(inner), workspace_size(inner)
    ctas = pitch // CHUNK

    def empty() -> OperandSample:
        return OperandSample(torch.empty(size, dtype=torch.float64, device=device), inner)

    a, b = empty(), rhs if isinstance(rhs, OperandSample) else empty()
    # float32 (2, pitch) cross weights, partial sums of the CTAs, a counter, and the numbers for the host
    pair = torch.empty(pitch + ctas * _SUMS + 1 + _NUMBERS, dtype=torch.float64, device=device)
    cross_weight = pair.data_ptr()
    partials = cross_weight + 8 * pitch
    arrived = partials + 8 * ctas * _SUMS
    seed = (seed + 2**63) % 2**64 - 2**63
    operands = [(lhs, a, seed)]
    if isinstance(rhs, SlicedOperand):
        operands.append((rhs, b, seed ^ _RHS_SEED))
    with device_of(product):
        digits = _digit_arguments(rule.bits, rule.levels)
        _sample(operands, inner, rule, digits, arrived)
        kernel = get_kernel(_config("meet_lines", "float32", rule))
        kernel.launch(
            (ctas, 1, 1),
            (
                *a.addresses(), *b.addresses(), inner, *digits, product.data_ptr(), product.numel(), cross_weight,
                partials, arrived, *_counts(rule.shares, inner), arrived + 8,
            ),
        )  # fmt: skip
        return StatisticsFuture((a, b), pair, pair[-_NUMBERS:])


def default_configs() -> list[StatisticsConfig]:
    """Return the configs of all kernels and input dtypes."""
    sampling = [StatisticsConfig("sample_lines", x) for x in REAL_DTYPES.values()]
    return [*sampling, StatisticsConfig("measure_lines"), StatisticsConfig("meet_lines")]
