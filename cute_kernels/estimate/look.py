"""Errors of two products of digits, bounded by 16 probes before any product: a pass over B and one over A on a GPU.

With ``A = A_0 + A_1 + ..`` the parts of the digits and ``d_i A = A - A_0 - .. - A_{i-1}``, likewise of B, the product
of the levels ``i + j < r`` leaves out ``E_r = sum_{i<r} A_i (d_{r-i} B) + (d_r A) B``. For digits of `planes` planes,
both passes serve ``r = planes - 1`` and ``r = planes``; the pass over A picks on the GPU which product is to run.

The sums are of integers, on Tensor Cores, and exact: digits of the operands, and probes and vectors in fixed point,
which two small launches pack before each pass. What fixed point rounds off is bounded.

The kernels compile for sm_80, sm_90a and sm_100a, and have run on sm_90 GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.convert.digits import ZERO_SCALE, digit_rule
from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.device import device_of, num_sms
from cute_kernels.jit.kernel import get_kernel

PROBES = 16
FACTORS = 1025  # of shares 0/1024 to 1024/1024
RECORD = 2 * 136 + 4  # float64 sums of a CTA
MOST_COLUMNS = 65536  # that the sums of a pass add up
LARGEST_SCALE = 2.0**24
_TILE, _WARPS, _STEP, _GROUP = 16, 8, 32, 16  # as in look.cuh; CTAs of a group
_DIGITS = 3  # of probes and of vectors
_PACK_THREADS = 256


@dataclass(frozen=True)
class LookConfig(KernelConfig):
    """Config of a pass, or of what packs its vectors; both operands are float32.

    Attributes
    ----------
    kernel : str
        ``"look_probes"`` and ``"look_right"``, over B with per-column scales; ``"look_vectors"`` and ``"look_left"``,
        over A with per-row scales.
    planes : int
        Digits per element, 2 or 3; 0 for ``"look_probes"``.
    transposed : bool
        Whether the matrix of a pass is column-major.
    share : int
        Warps of a pass that have 16 rows in common: 4, or 8 for twice as many CTAs; see :func:`share_for`.

    Examples
    --------
    >>> LookConfig("look_left", 2, False).name
    'look_left-p2'
    """

    kernel: str
    planes: int = 0
    transposed: bool = False
    share: int = 4

    @property
    def rows(self) -> int:
        """Rows of a CTA of a pass."""
        return _WARPS // self.share * _TILE

    @property
    def is_pass(self) -> bool:
        """Whether the kernel reads an operand."""
        return self.kernel in ("look_left", "look_right")

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * _WARPS if self.is_pass else _PACK_THREADS

    @property
    def name(self) -> str:
        """Short name, unique among the configs."""
        return f"{self.kernel}-p{self.planes}{'t' if self.transposed else ''}{'s8' if self.share == 8 else ''}"

    @property
    def kernel_header(self) -> str:
        return "estimate/look.cuh" if self.is_pass else "estimate/look_pack.cuh"

    @property
    def kernel_entry(self) -> str:
        return self.kernel

    def _constants(self) -> dict[str, object]:
        return {
            "kLeft": self.kernel == "look_left",
            "kPlanes": self.planes,
            "kTransposed": self.transposed,
            "kShare": self.share,
        }


class LookVectors(NamedTuple):
    """What the pass over B leaves: ``V_j = (d_j B) W`` with j from 0 to `planes`, in fixed point; zero beyond K."""

    packed: Tensor  # (padded_length(K) / 32, planes + 1, 3, 128) int32: digits by step, vectors, digit and lane
    numbers: Tensor  # (5,) float64: unit of V_0, and what the noise of both errors follows from


class LookProbes(NamedTuple):
    """Gaussian probes and their norms; zero beyond N."""

    vectors: Tensor  # (padded_length(N), 16) float32: W
    norms: Tensor  # (padded_length(N),) float32: wbar, rounded up


class LookState(NamedTuple):
    """Memory that the pass over A, gated products and the verdict share; a captured graph may run again on it."""

    parts: Tensor  # (CTAs, RECORD) float64
    record: Tensor  # (8,) float64
    gate: Tensor  # (4 + 2 * warps,) float32: int32 levels - 1 of the picked product, padded to 16 bytes; its sums
    tickets: Tensor  # (1 + groups of CTAs,) int32: 0 between passes


@dataclass(frozen=True)
class LookLimits:
    """What the choice of a product depends on besides the sums.

    Attributes
    ----------
    tol : float
        Relative tolerance in the Frobenius norm.
    factors : Tensor, shape (2, FACTORS)
        float64: from the root-mean-square probe of either error to its upper bound, by the share of the largest
        eigenvalue of the Gram matrix.
    product_rounding : tuple of float
        Bound of the rounding of either product, relative to C.
    scales : tuple of float
        Smallest and largest scale of a slice; with others none is picked.
    """

    tol: float
    factors: Tensor
    product_rounding: tuple[float, float]
    scales: tuple[float, float] = (ZERO_SCALE, LARGEST_SCALE)


def padded_length(count: int) -> int:
    """Return the length of vectors in memory: `count` rounded up to a multiple of 32."""
    return -(-count // _STEP) * _STEP


def share_for(rows: int, sms: int) -> int:
    """Return the warps that have 16 rows in common: 8 where each SM has at most one CTA of so many rows, otherwise 4.

    Examples
    --------
    >>> share_for(2048, 132), share_for(4096, 132)
    (8, 4)
    """
    return _WARPS if -(-rows // _TILE) <= sms else _WARPS // 2


def underflow(m: int, k: int, n: int) -> float:
    """Return a bound of what the sums of E_r W lose below the range of float32, for scales up to LARGEST_SCALE."""
    return math.sqrt(m) * k * (n + 1) * 2.0**-104


def state_for(device: torch.device, gate_size: int) -> LookState:
    """Return memory for passes over A; `gate_size`: elements of the gate, from ``cute_kernels.gemm.cuda``."""
    sms = num_sms(device.index)
    return LookState(
        torch.empty((sms, RECORD), dtype=torch.float64, device=device),
        torch.empty(8, dtype=torch.float64, device=device),
        torch.zeros(gate_size, dtype=torch.float32, device=device),
        torch.zeros(1 + -(-sms // _GROUP), dtype=torch.int32, device=device),
    )


def look_right(
    b: Tensor, probes: LookProbes, scale: Tensor, planes: int, bits: int = 8, share: int | None = None
) -> LookVectors:
    """Return the pass over B; three launches that do not wait for the GPU.

    Parameters
    ----------
    b : Tensor, shape (K, N)
        float32, row-major or column-major, on a GPU.
    probes : LookProbes
        Of N.
    scale : Tensor, shape (N,)
        Per-column scales of the digits.
    planes : int
        Digits per element, 2 or 3.
    bits : int, default 8
        Bits per digit.
    share : int, optional
        As of :class:`LookConfig`; by default that of :func:`share_for`.

    Returns
    -------
    LookVectors
    """
    transposed, matrix = _matrix_arguments(b)
    (k, n), device = b.shape, b.device
    height, width = padded_length(k), padded_length(n)
    packed = workspace.empty((width // _STEP, _DIGITS, 128), torch.int32, device)
    units = workspace.empty((width, 2), torch.float32, device)
    probe_numbers = workspace.empty((2,), torch.float64, device)
    vectors = workspace.empty((planes + 1, height, PROBES), torch.float32, device)
    norms = workspace.empty((planes + 1, height), torch.float32, device)
    found = LookVectors(
        workspace.empty((height // _STEP, planes + 1, _DIGITS, 128), torch.int32, device),
        workspace.empty((5,), torch.float64, device),
    )
    with device_of(b):
        get_kernel(LookConfig("look_probes")).launch(
            (width // _STEP, 1, 1),
            (
                probes.vectors.data_ptr(), probes.norms.data_ptr(), scale.data_ptr(), n, packed.data_ptr(),
                units.data_ptr(), probe_numbers.data_ptr(),
            ),
            pdl=True,
        )  # fmt: skip
        config = LookConfig("look_right", planes, transposed, share or share_for(height, num_sms(device.index)))
        get_kernel(config).launch(
            (height // config.rows, 1, 1),
            (
                *matrix, packed.data_ptr(), units.data_ptr(), probe_numbers.data_ptr(),
                *_rule_arguments(planes, bits), vectors.data_ptr(), norms.data_ptr(), height,
            ),
            pdl=True,
        )  # fmt: skip
        get_kernel(LookConfig("look_vectors", planes)).launch(
            (height // _STEP, 1, 1),
            (
                vectors.data_ptr(), norms.data_ptr(), height, probe_numbers.data_ptr(), k, n,
                found.packed.data_ptr(), found.numbers.data_ptr(),
            ),
            pdl=True,
        )  # fmt: skip
    return found


def look_left(
    a: Tensor,
    right: LookVectors,
    scale: Tensor,
    other_scale: Tensor,
    limits: LookLimits,
    state: LookState,
    bits: int = 8,
    share: int | None = None,
) -> None:
    """Bound both errors and pick the product to run; one launch that does not wait for the GPU.

    Writes `state.record`: error, bound and noise of both products, the norm of AB, and the number of scales out of
    range; and `state.gate`: the levels of the picked product minus 1, or -1 if neither is predicted to be within the
    tolerance.

    Parameters
    ----------
    a : Tensor, shape (M, K)
        float32, row-major or column-major, on a GPU.
    right : LookVectors
        Pass over B, for as many planes.
    scale : Tensor, shape (M,)
        Per-row scales of the digits of A.
    other_scale : Tensor, shape (N,)
        Per-column scales of the digits of B.
    limits : LookLimits
        Tolerance and factors.
    state : LookState
        Written.
    bits : int, default 8
        Bits per digit.
    share : int, optional
        As of :class:`LookConfig`; by default that of :func:`share_for`.
    """
    planes = right.packed.shape[1] - 1
    transposed, matrix = _matrix_arguments(a)
    m, k = a.shape
    n = other_scale.numel()
    numbers = (underflow(m, k, n), *limits.product_rounding, limits.tol / (1 + limits.tol))
    with device_of(a):
        sms = num_sms(a.device.index)
        config = LookConfig("look_left", planes, transposed, share or share_for(m, sms))
        get_kernel(config).launch(
            (min(-(-m // config.rows), sms), 1, 1),
            (
                *matrix, right.packed.data_ptr(), right.numbers.data_ptr(), scale.data_ptr(),
                *_rule_arguments(planes, bits), other_scale.data_ptr(), n, *map(np.float32, limits.scales),
                *map(np.float64, numbers), limits.factors.data_ptr(), state.parts.data_ptr(), state.record.data_ptr(),
                state.gate.data_ptr(), state.tickets.data_ptr(),
            ),
            pdl=True,
        )  # fmt: skip


def _matrix_arguments(x: Tensor) -> tuple[bool, tuple[int, ...]]:
    """Return whether `x` is column-major; its address, memory stride, rows, columns, and whether runs are aligned."""
    rows, columns = x.shape
    transposed = columns > 1 and x.stride(1) != 1
    if transposed and rows > 1 and x.stride(0) != 1:
        raise ValueError(f"x must have contiguous rows or columns, got strides {x.stride()}")
    if x.dtype != torch.float32:
        raise TypeError(f"x must be float32, got {x.dtype}")
    lines, length, stride = (columns, rows, x.stride(1)) if transposed else (rows, columns, x.stride(0))
    pitch = stride if lines > 1 else length
    vector = x.data_ptr() % 16 == 0 and (pitch % 4 == 0 or lines == 1)
    return transposed, (x.data_ptr(), pitch, rows, columns, int(vector))


def _rule_arguments(planes: int, bits: int) -> tuple[np.float32, ...]:
    """Return radix and what is added before the first two roundings."""
    rule = digit_rule(bits, planes)
    return np.float32(rule.radix), *map(np.float32, rule.ahead)


def default_configs() -> list[LookConfig]:
    """Return the configs of all kernels."""
    sides, shares = ("right", "left"), (_WARPS // 2, _WARPS)
    passes = (LookConfig(f"look_{s}", p, t, w) for s in sides for p in (2, 3) for t in (False, True) for w in shares)
    return [*passes, LookConfig("look_probes"), *(LookConfig("look_vectors", p) for p in (2, 3))]
