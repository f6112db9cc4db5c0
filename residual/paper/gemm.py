"""The published residual-compensated product, step by step, so that its tables can be compared.

Source: Gu, "A method for accelerating low precision operations by sparse matrix multiplication", arXiv 2403.06924.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.gemm import api as dense
from magicube_cutlass.checks import check_vector_length
from residual.error.estimate import ErrorEstimate, estimate_error
from residual.paper import cpu
from residual.paper.checks import LEVELS, check_operands, check_paper_options, check_tolerance, current_rule
from residual.paper.cpu import Reduction
from residual.paper.quantize import SAFE_SCALE, Quantized, QuantizedOperand, Quantizer, quantize, quantize_operand
from residual.paper.search import candidate_thresholds, first_within
from residual.paper.thresholds import ETA, kept_entries, synchronize

STEPS = ("quantize", "product", "select", "compress", "correct", "combine")
_INT32_K = 2**31 // (128 * 128) - 1  # K whose products of two 8-bit integers int32 sums

if TYPE_CHECKING:
    from residual.paper.device_operand import DeviceOperand


@dataclass(frozen=True)
class PaperReport:
    """What one call of :func:`gemm` did.

    Attributes
    ----------
    density_a, density_b : float
        Kept share of A and B, in [0, 1].
    path_a, path_b : str
        How the corrections ``A' RB`` and ``RA B'`` were computed: ``"spmm"``; ``"gemm"``, with A and B in place of A'
        and B'; or ``"none"``: nothing was kept.
    eta : float
        Density from which on the dense products were computed.
    threshold : float
        The given one, or the one found for `tol`.
    error : float or None
        With `tol`: 99% bound of the relative Frobenius error of the product.
    times : dict of str to float
        Seconds of the steps in `STEPS` (Figure 7).

    Examples
    --------
    >>> _, report = gemm(torch.eye(4), torch.eye(4), threshold=float("inf"), return_report=True)
    >>> report.density, report.path_a
    (0.0, 'none')
    """

    density_a: float
    density_b: float
    path_a: str
    path_b: str
    eta: float
    times: dict[str, float] = field(default_factory=dict)
    threshold: float = 0.0
    error: float | None = None

    @property
    def density(self) -> float:
        """The mean of the two densities: the share of a full compensation's multiplications that were asked for."""
        return (self.density_a + self.density_b) / 2


class _Clock:
    """Seconds between laps, waiting for the device at each; does nothing when it is off."""

    def __init__(self, device: torch.device, on: bool) -> None:
        self.times = dict.fromkeys(STEPS, 0.0) if on else {}
        self._device = device
        self._last = self._now() if on else 0.0

    def _now(self) -> float:
        synchronize(self._device)
        return time.perf_counter()

    def lap(self, step: str) -> None:
        if self.times:
            now = self._now()
            self.times[step] += now - self._last
            self._last = now


def gemm(
    A: Tensor,
    B: Tensor,
    C: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bits: int = 8,
    threshold: float = 0.0,
    tol: float | None = None,
    rule: str = "eq14",
    scaling: str = "tensor",
    rounding: str = "trunc",
    levels: str = "2^(N-1)-1",
    eta: float | None = None,
    vector_length: int | None = None,
    return_report: bool = False,
) -> Tensor | tuple[Tensor, PaperReport]:
    """Multiply by quantized products, corrected for the entries that a threshold selects: ``D = alpha A B + beta C``.

    Algorithm 1 of [1]_, with ``N = bits``. ``Quant(X)`` is ``round(lambda X)``, ``lambda = levels / max|X|``; each
    matrix below has its own lambda, and products are divided by those of their operands (equation 7):

    1. product: ``D = Quant(A) Quant(B)`` (lines 1 to 3);
    2. residuals: ``RA = A - Quant(A) / lambda_A``, likewise ``RB``; both are quantized (lines 4 to 6);
    3. select: ``A'`` and ``B'`` keep the entries that the rule keeps at this threshold, by the row and column averages
       of ``|D|`` (line 7, equation 14);
    4. correct: ``D += Quant(A') Quant(RB) + Quant(RA) Quant(B')`` by sparse products if both densities are below `eta`,
       else ``D += Quant(A) Quant(RB) + Quant(RA) Quant(B)`` by dense ones (lines 8 to 17);
    5. combine: ``alpha D + beta C`` (line 18).

    The integer products are exact.

    Parameters
    ----------
    A : Tensor, shape (M, K)
        Float tensor; no gradient flows.
    B : Tensor, shape (K, N)
        Float tensor, on the device of `A`.
    C : Tensor, shape (M, N), optional
        Float tensor, on the device of `A`; read if `beta` is not 0.
    alpha, beta : float
        Finite.
    bits : int, default 8
        Bits N per digit, 2 to 8.
    threshold : float, default 0.0
        At least 0; the larger, the fewer corrections. 0: the full compensation with dense residuals (three products);
        inf: the plain quantized product.
    tol : float, optional
        Relative Frobenius error that is allowed for ``A B``: the threshold is found, among those that keep nothing, 0.1
        to 20%, or all entries. Each try is measured as :func:`residual.estimate_error` does, with fixed probes; the
        bound holds at 99%. The result is that of the reported threshold.
    rule : {"eq14", "example", "mean"}, default "eq14"
        Entries that are kept, for an entry ``a`` of A (of B: by the column average). ``eq14``: ``|a| > threshold
        avg|d|``; ``example``: ``a > threshold avg|d|``, as in the printed example; ``mean``: ``|a| > 2 threshold
        mean|a|``, which is not in [1]_ and fits the densities printed there.
    scaling : {"tensor", "vector"}, default "tensor"
        One lambda per matrix, or one per row of A and column of B.
    rounding : {"trunc", "nearest"}, default "trunc"
        Rounding of the digits.
    levels : {"2^(N-1)-1", "2^(N-2)"}
        Integer that the largest entry becomes; the second needs 3 bits.
    eta : float, optional
        Density in [0, 1]. Default: what [1]_ prints, 0.3 on a CPU (section 4.1 D) and 0.001 on a GPU (section 4.1 C).
        :func:`residual.crossover_density` measures this machine's.
    vector_length : int, optional
        V of the sparse operands, 1, 2, 4, 8, 16 or 32; whole vectors are kept, down a column of A and along a row of B.
        Default: 1 on a CPU and 8 on a GPU.
    return_report : bool, default False
        Also return a :class:`PaperReport`; waits for a GPU at each step.

    Returns
    -------
    Tensor, shape (M, N)
        In the promoted dtype of A and B; or that and the report.

    Raises
    ------
    TypeError
        If an operand is not a float tensor.
    ValueError
        If shapes or devices do not match, an operand holds inf or NaN, an option is out of range, or full compensation
        misses `tol`.

    References
    ----------
    .. [1] Gu, arXiv 2403.06924, Algorithm 1 and equation 14.

    Examples
    --------
    >>> A, B = torch.randn(64, 64), torch.randn(64, 64)
    >>> errors = [float((gemm(A, B, threshold=t) - A @ B).norm() / (A @ B).norm()) for t in (0.0, float("inf"))]
    >>> errors[0] < 1e-3 < errors[1]
    True
    """
    rule = current_rule(rule)
    check_paper_options(bits, threshold, rule, scaling, rounding, levels, eta, alpha, beta)
    check_tolerance(tol, threshold)
    check_operands(A, B, C, beta)
    vector_length = (8 if A.is_cuda else 1) if vector_length is None else vector_length
    check_vector_length(vector_length)
    clock = _Clock(A.device, return_report)
    top = 2 ** (bits - 1) - 1 if levels == LEVELS[0] else 2 ** (bits - 2)
    hows = [Quantizer(bits, None if scaling == "tensor" else axis, rounding, top) for axis in (0, 1)]
    reduction = Reduction(threshold, rule, ETA.get(A.device.type, 0.0) if eta is None else eta, vector_length)
    found = None
    if _runs_by_kernels(A, B):
        found = _by_kernels(A, B, hows, reduction, tol, clock)
    result, report = found or _by_operators(A, B, hows, reduction, tol, clock)
    if alpha != 1:
        result.mul_(alpha)
    if beta != 0:
        assert C is not None
        result = result + beta * C.detach()
    result = result.to(torch.promote_types(A.dtype, B.dtype))
    clock.lap("combine")
    return (result, report) if return_report else result


def _runs_by_kernels(A: Tensor, B: Tensor) -> bool:
    """Return whether GPU kernels take these operands: no float64, not empty, sums that int32 holds."""
    if not A.is_cuda or torch.float64 in (A.dtype, B.dtype):
        return False
    return A.numel() > 0 and B.numel() > 0 and A.shape[1] <= _INT32_K


def _by_kernels(
    A: Tensor, B: Tensor, hows: list[Quantizer], reduction: Reduction, tol: float | None, clock: _Clock
) -> tuple[Tensor, PaperReport] | None:
    """Return the product and its report by GPU kernels; None if the scales need sums in float64."""
    from residual.paper import cuda  # kernels of its own

    try:
        if tol is None:
            product, (densities, paths) = cuda.corrected_product(A, B, hows, reduction, clock.lap, bool(clock.times))
            return product, PaperReport(*densities, *paths, reduction.eta, clock.times, reduction.threshold)
        product, left, right = cuda.leading_product(A, B, hows, clock.lap)
        return _within(tol, product, (A, B), left, right, hows, reduction, clock)
    except cuda.OutOfRange:
        return None


def _by_operators(
    A: Tensor, B: Tensor, hows: list[Quantizer], reduction: Reduction, tol: float | None, clock: _Clock
) -> tuple[Tensor, PaperReport]:
    """Return the product and its report by the CPU engine, or by torch's operators."""
    sums = (reduction.rule == "mean" and 0 < reduction.threshold < math.inf) or tol is not None
    left, right = quantize_operand(A, hows[0], "A", sums), quantize_operand(B, hows[1], "B", sums)
    clock.lap("quantize")
    dtype = torch.float64 if _is_wide(left, right) else torch.float32
    product = _add_dense(None, left.leading, right.leading, dtype)  # (M, N)
    clock.lap("product")
    if tol is None:
        return _corrected(product, left, right, hows, reduction, clock)
    return _within(tol, product, (A, B), left, right, hows, reduction, clock)


def _within(
    tol: float,
    product: Tensor,
    operands: tuple[Tensor, Tensor],
    left: QuantizedOperand | DeviceOperand,
    right: QuantizedOperand | DeviceOperand,
    hows: list[Quantizer],
    reduction: Reduction,
    clock: _Clock,
) -> tuple[Tensor, PaperReport]:
    """Return the product of the largest threshold whose measured error is within `tol`."""
    dtype = torch.promote_types(operands[0].dtype, operands[1].dtype)
    per_row = hows[0].axis is not None
    thresholds = candidate_thresholds(left, right, product, reduction.rule, per_row)

    def run(threshold: float) -> tuple[tuple[Tensor, PaperReport], ErrorEstimate]:
        found, report = _corrected(product.clone(), left, right, hows, reduction._replace(threshold=threshold), clock)
        estimate = estimate_error(*operands, found.to(dtype)) if found.numel() else ErrorEstimate(0.0, 0.0, 1.0)
        clock.lap("select")
        return (found, report), estimate

    (result, report), estimate = first_within(tol, thresholds, run)
    return result, replace(report, error=estimate.upper)


def _corrected(
    total: Tensor,
    left: QuantizedOperand | DeviceOperand,
    right: QuantizedOperand | DeviceOperand,
    hows: list[Quantizer],
    reduction: Reduction,
    clock: _Clock,
) -> tuple[Tensor, PaperReport]:
    """Add the corrections to the product in place (lines 7 to 17); return it, and how they were made."""
    if not isinstance(left, QuantizedOperand):
        from residual.paper import cuda

        assert not isinstance(right, QuantizedOperand)
        densities, found = cuda.correct_copy(total, left, right, reduction, hows[0].axis is not None, clock.lap)
        return total, PaperReport(*densities, *found, reduction.eta, clock.times, reduction.threshold)
    assert isinstance(right, QuantizedOperand)
    dtype = total.dtype
    in_engine = cpu.runs_in_engine(left, right, total)
    if reduction.threshold == math.inf:
        return total, PaperReport(0.0, 0.0, "none", "none", reduction.eta, clock.times, reduction.threshold)
    per_row = hows[0].axis is not None
    if in_engine:
        selections = cpu.select(left, right, total, reduction, per_row)
        densities = selections.densities
    else:
        options = reduction.threshold, reduction.rule, per_row, reduction.vector_length
        mask_a = kept_entries(left.values, total, *options)  # (M, K)
        mask_b = kept_entries(right.values.T, total.T, *options).T  # (K, N)
        densities = _densities(mask_a, mask_b)
    clock.lap("select")
    if max(densities) == 0:
        return total, PaperReport(*densities, "none", "none", reduction.eta, clock.times, reduction.threshold)
    if max(densities) >= reduction.eta:
        total = _add_dense(total, left.leading, right.residual, dtype)
        total = _add_dense(total, left.residual, right.leading, dtype)
        clock.lap("correct")
        return total, PaperReport(*densities, "gemm", "gemm", reduction.eta, clock.times, reduction.threshold)
    if in_engine:
        cpu.correct(total, left, right, hows, selections, clock.lap)
    else:
        vector_length = reduction.vector_length
        if densities[0]:
            reduced = quantize(left.values * mask_a, hows[0], "A")  # (M, K)
            clock.lap("compress")
            total += _sparse(reduced, right.residual, vector_length, dtype, clock)
        if densities[1]:
            reduced = quantize(right.values * mask_b, hows[1], "B")  # (K, N)
            clock.lap("compress")
            turned = _sparse(reduced.T, left.residual.T, vector_length, dtype, clock)  # (N, M)
            total += turned.T.contiguous()  # adding a transposed matrix takes twice a copy's time
    clock.lap("combine")
    paths = ["spmm" if density else "none" for density in densities]
    return total, PaperReport(*densities, paths[0], paths[1], reduction.eta, clock.times, reduction.threshold)


def _add_dense(total: Tensor | None, lhs: Quantized, rhs: Quantized, dtype: torch.dtype) -> Tensor:
    """Return `total` plus the dequantized product of integers."""
    if dtype == torch.float64 and lhs.integers.is_cuda:  # the kernel writes no float64
        found = _dequantize(dense.gemm(lhs.integers, rhs.integers, out_dtype=_sums(lhs)), lhs, rhs, dtype)
        return found if total is None else total.add_(found)
    scales = [side.scale.flatten().to(dtype) if side.scale.dim() else side.scale.to(dtype) for side in (lhs, rhs)]
    return dense.gemm(
        lhs.integers, rhs.integers, scale_a=scales[0], scale_b=scales[1], c=total,
        beta=0.0 if total is None else 1.0, out_dtype=dtype,
    )  # fmt: skip


def _sparse(lhs: Quantized, rhs: Quantized, vector_length: int, dtype: torch.dtype, clock: _Clock) -> Tensor:
    """Return the dequantized product of integers, the left ones as a sparse matrix."""
    thin = mc.SRBCRS.from_dense(lhs.integers, vector_length=vector_length, bits=8)
    thin.single_use = True
    operand = mc.QuantTensor.from_ints(rhs.integers, bits=8)
    clock.lap("compress")
    product = mc.spmm(thin, operand, out_dtype=_sums(lhs))
    clock.lap("correct")
    return _dequantize(product, lhs, rhs, dtype)


def _dequantize(product: Tensor, lhs: Quantized, rhs: Quantized, dtype: torch.dtype) -> Tensor:
    return product.to(dtype).mul_(lhs.scale.to(dtype)).mul_(rhs.scale.to(dtype))  # (M, N)


def _sums(lhs: Quantized) -> torch.dtype:
    """Return the integers that hold a product of these."""
    return torch.int32 if lhs.integers.shape[1] <= _INT32_K else torch.int64


def _densities(mask_a: Tensor, mask_b: Tensor) -> tuple[float, float]:
    kept = torch.stack([mask_a.count_nonzero(), mask_b.count_nonzero()]).tolist()
    return kept[0] / max(mask_a.numel(), 1), kept[1] / max(mask_b.numel(), 1)


def _is_wide(left: QuantizedOperand, right: QuantizedOperand) -> bool:
    """Return whether the sums need float64: an operand has it, or float32 cannot hold the scaled sums all the way."""
    if torch.float64 in (left.values.dtype, right.values.dtype):
        return True
    scales = (left.leading.scale, right.leading.scale)
    return any(s.numel() and not 1 / SAFE_SCALE < float(s.min()) <= float(s.max()) < SAFE_SCALE for s in scales)
