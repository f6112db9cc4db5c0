"""The published residual-compensated product, step by step, so that its tables can be compared.

Source: Gu, "A method for accelerating low precision operations by sparse matrix multiplication", arXiv 2403.06924.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.gemm import api as dense
from magicube_cutlass.checks import check_vector_length
from residual.operand.decompose import Decomposition, decompose
from residual.paper.thresholds import RULES, crossover_density, kept_entries, synchronize

SCALINGS = ("tensor", "vector")
LEVELS = ("2^(N-1)-1", "2^(N-2)")
STEPS = ("quantize", "product", "select", "compress", "correct", "combine")
_MIN_BITS, _MAX_BITS = 2, 8
_INT32_K = 2**31 // (2 * 128 * 128) - 1  # the two corrections together still fit 32 bits
_SAFE = 2.0**60  # scales between its inverse and this keep float32 arithmetic in range


@dataclass(frozen=True)
class PaperReport:
    """What one call of :func:`gemm` did.

    Attributes
    ----------
    density_a, density_b : float
        Kept share of ``A1`` and ``B1``, in [0, 1].
    path_a : str
        How ``A1' B0`` was computed: ``"spmm"``, ``"gemm"``, ``"none"`` (nothing kept), or ``"fused"``: one dense call
        for all three products.
    path_b : str
        The same of ``A0 B1'``.
    eta : float
        Density above which the dense product was computed.
    times : dict of str to float
        Seconds of the steps in `STEPS` (Figure 7); a fused call counts as ``product``.

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

    Algorithm 1 of [1]_, with ``N = bits`` and ``lambda = levels / max|X|``:

    1. quantize: ``A1 = round(lambda_A A)``, ``B1 = round(lambda_B B)``;
    2. residuals: ``A0 / 2^s ~ lambda_A A - A1``, likewise ``B0``, integers of N bits;
    3. product: ``P = A1 B1``, exact;
    4. select: ``A1'`` and ``B1'`` keep the entries that the threshold rule does not drop (equation 14);
    5. correct: ``P' = A1' B0 + A0 B1'``, each as a sparse product up to the density `eta` and as a dense one above;
    6. combine: ``D = alpha / (lambda_A lambda_B) (P + P' / 2^s) + beta C``.

    Which path computes a correction changes the time, never the integers.

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
    rule : {"eq14", "eq14_signed", "mean"}, default "eq14"
        Threshold rule.
    scaling : {"tensor", "vector"}, default "tensor"
        One lambda per matrix, or one per row of A and column of B.
    rounding : {"trunc", "nearest"}, default "trunc"
        Rounding of the digits.
    levels : {"2^(N-1)-1", "2^(N-2)"}
        Integer that the largest entry becomes; the second needs 3 bits.
    eta : float, optional
        Density in [0, 1]. Default: :func:`residual.crossover_density`, measured once.
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
    _check_options(bits, threshold, rule, scaling, levels, eta, alpha, beta)
    _check_operands(A, B, C, beta)
    clock = _Clock(A.device, return_report)
    top = 2 ** (bits - 1) - 1 if levels == LEVELS[0] else 2 ** (bits - 2)
    axes = (None, None) if scaling == "tensor" else (0, 1)
    left = decompose(A, bits, axes[0], rounding, top, name="A")
    right = decompose(B, bits, axes[1], rounding, top, name="B")
    clock.lap("quantize")
    wide = torch.float64 in (A.dtype, B.dtype) or not _in_range(left.scale, right.scale, alpha)
    total, report = _integer_sum(left, right, threshold, rule, eta, vector_length, clock, wide)
    row, column = (x if x.dim() else x.reshape(1, 1) for x in (left.scale * alpha, right.scale))
    result = total.mul_(row.to(total.dtype)).mul_(column.to(total.dtype))  # (M, N)
    if beta != 0:
        assert C is not None
        result = result + beta * C.detach()
    result = result.to(torch.promote_types(A.dtype, B.dtype))
    clock.lap("combine")
    return (result, report) if return_report else result


def _integer_sum(
    left: Decomposition,
    right: Decomposition,
    threshold: float,
    rule: str,
    eta: float | None,
    vector_length: int | None,
    clock: _Clock,
    wide: bool,
) -> tuple[Tensor, PaperReport]:
    """``P + P' / 2^s`` as float32 or float64, and how it was made."""
    a, b, device = left.high, right.high, left.high.device
    dtype = torch.float64 if wide else torch.float32
    vector_length = (8 if device.type == "cuda" else 1) if vector_length is None else vector_length
    check_vector_length(vector_length)
    eta = crossover_density(device, vector_length) if eta is None else eta
    fusable = threshold == 0 and (dtype == torch.float32 or device.type == "cpu")
    if fusable and min(share := _densities(a != 0, b != 0)) > eta:
        clock.lap("select")
        total = dense.gemm((a, left.low), (b, right.low), terms=3, shift=left.shift, out_dtype=dtype)
        clock.lap("product")
        return total, PaperReport(*share, "fused", "fused", eta, clock.times)
    integers = torch.int32 if a.shape[1] <= _INT32_K else torch.int64
    product = dense.gemm(a, b, out_dtype=integers)  # (M, N)
    clock.lap("product")
    per_row = left.scale.dim() > 0
    mask_a = kept_entries(a, product, threshold, rule, per_row, vector_length)  # (M, K)
    mask_b = kept_entries(b.T, product.T, threshold, rule, per_row, vector_length)  # (N, K)
    densities = _densities(mask_a, mask_b)
    clock.lap("select")
    total = product.to(dtype)
    clock.lap("combine")
    paths = ["none" if density == 0 else "spmm" if density <= eta else "gemm" for density in densities]
    sides = ((a, right.low, mask_a, None), (left.low, b, None, mask_b))
    for path, (x, y, keep_x, keep_y) in zip(paths, sides, strict=True):
        if path == "none":
            continue
        if path == "gemm":
            cross = _dense_cross(x, y, keep_x, keep_y, integers, clock)  # (M, N)
        elif keep_x is not None:
            cross = _sparse_cross(x, keep_x, y, vector_length, integers, clock)  # (M, N)
        else:
            assert keep_y is not None
            turned = _sparse_cross(y.T, keep_y, x.T, vector_length, integers, clock)  # (N, M)
            cross = turned.T.contiguous()  # (M, N); adding a transposed matrix takes twice a copy's time
        clock.lap("correct")
        total.add_(cross, alpha=2.0**-left.shift)
        clock.lap("combine")
    return total, PaperReport(*densities, paths[0], paths[1], eta, clock.times)


def _dense_cross(
    x: Tensor, y: Tensor, keep_x: Tensor | None, keep_y: Tensor | None, integers: torch.dtype, clock: _Clock
) -> Tensor:
    """``x y`` with what the masks drop counted as zero; ``keep_y`` is transposed."""
    x = x if keep_x is None else x * keep_x  # (M, K)
    y = y if keep_y is None else y * keep_y.T  # (K, N)
    clock.lap("compress")
    return dense.gemm(x, y, out_dtype=integers)


def _sparse_cross(
    x: Tensor, keep: Tensor, y: Tensor, vector_length: int, integers: torch.dtype, clock: _Clock
) -> Tensor:
    """``(x where keep) y``, x as a sparse matrix."""
    thin = mc.SRBCRS.from_mask(x, keep, vector_length=vector_length, bits=8)
    thin.single_use = True
    operand = mc.QuantTensor.from_ints(y, bits=8)
    clock.lap("compress")
    return mc.spmm(thin, operand, out_dtype=integers)


def _densities(mask_a: Tensor, mask_b: Tensor) -> tuple[float, float]:
    kept = torch.stack([mask_a.count_nonzero(), mask_b.count_nonzero()]).tolist()
    return kept[0] / max(mask_a.numel(), 1), kept[1] / max(mask_b.numel(), 1)


def _in_range(scale_a: Tensor, scale_b: Tensor, alpha: float) -> bool:
    """Whether float32 can hold the scaled sums all the way; float64 can always."""
    for scale in (scale_a, scale_b):
        if scale.numel() and not 1 / _SAFE < float(scale.min()) <= float(scale.max()) < _SAFE:
            return False
    return alpha == 0 or 2.0**-8 < abs(alpha) < 2.0**8


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
