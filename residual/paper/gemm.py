"""The published residual-compensated product, step by step, so that its tables can be compared.

Source: Gu, "A method for accelerating low precision operations by sparse matrix multiplication", arXiv 2403.06924.
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.gemm import api as dense
from magicube_cutlass.checks import check_vector_length
from residual.paper.quantize import Quantized, QuantizedOperand, Quantizer, quantize, quantize_operand
from residual.paper.thresholds import ETA, RULES, kept_entries, synchronize

SCALINGS = ("tensor", "vector")
LEVELS = ("2^(N-1)-1", "2^(N-2)")
STEPS = ("quantize", "product", "select", "compress", "correct", "combine")
_MIN_BITS, _MAX_BITS = 2, 8
_RENAMED = {"eq14_signed": "example"}
_INT32_K = 2**31 // (128 * 128) - 1  # K whose products of two 8-bit integers int32 sums
_SAFE = 2.0**60  # scales between its inverse and this keep float32 arithmetic in range


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
        If shapes or devices do not match, an operand holds inf or NaN, or an option is out of range.

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
    rule = _current_rule(rule)
    _check_options(bits, threshold, rule, scaling, levels, eta, alpha, beta)
    _check_operands(A, B, C, beta)
    vector_length = (8 if A.is_cuda else 1) if vector_length is None else vector_length
    check_vector_length(vector_length)
    clock = _Clock(A.device, return_report)
    top = 2 ** (bits - 1) - 1 if levels == LEVELS[0] else 2 ** (bits - 2)
    hows = [Quantizer(bits, None if scaling == "tensor" else axis, rounding, top) for axis in (0, 1)]
    left, right = quantize_operand(A, hows[0], "A"), quantize_operand(B, hows[1], "B")
    clock.lap("quantize")
    eta = ETA.get(A.device.type, 0.0) if eta is None else eta
    reduction = _Reduction(threshold, rule, eta, vector_length)
    result, report = _compensated(left, right, hows, reduction, clock)
    if alpha != 1:
        result.mul_(alpha)
    if beta != 0:
        assert C is not None
        result = result + beta * C.detach()
    result = result.to(torch.promote_types(A.dtype, B.dtype))
    clock.lap("combine")
    return (result, report) if return_report else result


class _Reduction(NamedTuple):
    """What is kept, and how it is multiplied."""

    threshold: float
    rule: str
    eta: float
    vector_length: int


def _compensated(
    left: QuantizedOperand, right: QuantizedOperand, hows: list[Quantizer], reduction: _Reduction, clock: _Clock
) -> tuple[Tensor, PaperReport]:
    """Return the compensated product in float32 or float64 (lines 2, 3 and 7 to 17), and how it was made."""
    dtype = torch.float64 if _is_wide(left, right) else torch.float32
    total = _add_dense(None, left.leading, right.leading, dtype)  # (M, N)
    clock.lap("product")
    per_row, options = hows[0].axis is not None, (reduction.threshold, reduction.rule)
    mask_a = kept_entries(left.values, total, *options, per_row, reduction.vector_length)  # (M, K)
    mask_b = kept_entries(right.values.T, total.T, *options, per_row, reduction.vector_length).T  # (K, N)
    densities = _densities(mask_a, mask_b)
    clock.lap("select")
    if max(densities) == 0:
        return total, PaperReport(*densities, "none", "none", reduction.eta, clock.times)
    if max(densities) >= reduction.eta:
        total = _add_dense(total, left.leading, right.residual, dtype)
        total = _add_dense(total, left.residual, right.leading, dtype)
        clock.lap("correct")
        return total, PaperReport(*densities, "gemm", "gemm", reduction.eta, clock.times)
    if densities[0]:
        reduced = quantize(left.values * mask_a, hows[0], "A")  # (M, K)
        clock.lap("compress")
        total += _sparse(reduced, right.residual, reduction.vector_length, dtype, clock)
    if densities[1]:
        reduced = quantize(right.values * mask_b, hows[1], "B")  # (K, N)
        clock.lap("compress")
        turned = _sparse(reduced.T, left.residual.T, reduction.vector_length, dtype, clock)  # (N, M)
        total += turned.T.contiguous()  # adding a transposed matrix takes twice a copy's time
    clock.lap("combine")
    paths = ["spmm" if density else "none" for density in densities]
    return total, PaperReport(*densities, paths[0], paths[1], reduction.eta, clock.times)


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
    return any(s.numel() and not 1 / _SAFE < float(s.min()) <= float(s.max()) < _SAFE for s in scales)


def _current_rule(rule: str) -> str:
    """Return the name of a rule that was renamed, with a warning."""
    if rule not in _RENAMED:
        return rule
    warnings.warn(f"rule={rule!r} is now rule={_RENAMED[rule]!r}", DeprecationWarning, stacklevel=3)
    return _RENAMED[rule]


def _check_options(
    bits: int,
    threshold: float,
    rule: str,
    scaling: str,
    levels: str,
    eta: float | None,
    alpha: float,
    beta: float,
) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or not _MIN_BITS <= bits <= _MAX_BITS:
        raise ValueError(f"bits must be an integer from {_MIN_BITS} to {_MAX_BITS}, got {bits!r}")
    for name, value, allowed in (("rule", rule, RULES), ("scaling", scaling, SCALINGS), ("levels", levels, LEVELS)):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
    if levels == LEVELS[1] and bits < 3:
        raise ValueError(f"levels {levels!r} needs at least 3 bits, got {bits}")
    if not threshold >= 0:
        raise ValueError(f"threshold must be at least 0, got {threshold}")
    if eta is not None and not 0 <= eta <= 1:
        raise ValueError(f"eta must be None or in [0, 1], got {eta}")
    for name, factor in (("alpha", alpha), ("beta", beta)):
        if not math.isfinite(factor):
            raise ValueError(f"{name} must be finite, got {factor}")


def _check_operands(A: Tensor, B: Tensor, C: Tensor | None, beta: float) -> None:
    operands = {"A": A, "B": B} | ({} if C is None else {"C": C})
    for name, operand in operands.items():
        if not isinstance(operand, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(operand).__name__}")
        if not operand.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {operand.dtype}")
        if operand.dim() != 2:
            raise ValueError(f"{name} must be 2-D, got {operand.dim()} dimensions")
        if operand.device != A.device:
            raise ValueError(f"{name} must be on the device of A, got {operand.device} and {A.device}")
    if A.shape[1] != B.shape[0]:
        raise ValueError(f"B must have as many rows as A has columns, got {B.shape[0]} and {A.shape[1]}")
    if C is None and beta != 0:
        raise ValueError(f"C must be given for beta {beta}, got None")
    if C is not None and C.shape != (A.shape[0], B.shape[1]):
        raise ValueError(f"C must have shape {(A.shape[0], B.shape[1])}, got {tuple(C.shape)}")
