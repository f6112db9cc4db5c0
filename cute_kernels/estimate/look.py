"""Errors of two products of digits, bounded by 16 probes before any product: a pass over B and one over A on a GPU.

With ``A = A_0 + A_1 + ..`` the parts of the digits and ``d_i A = A - A_0 - .. - A_{i-1}``, likewise of B, the product
of the levels ``i + j < r`` leaves out ``E_r = sum_{i<r} A_i (d_{r-i} B) + (d_r A) B``. For digits of `planes` planes,
both passes serve ``r = planes - 1`` and ``r = planes``; the pass over A picks on the GPU which product is to run.

The kernels compile for sm_80, sm_90a and sm_100a, and have run on sm_90 GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.convert.digits import digit_rule
from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.device import current_arch, device_of, num_sms
from cute_kernels.jit.kernel import get_kernel

PROBES = 16
FACTORS = 1025  # of shares 0/1024 to 1024/1024
RECORD = 2 * 136 + 4  # float64 sums of a CTA
_ROWS, _WARPS, _STEP, _CHAIN, _RUN_STEPS = 32, 8, 16, 8, 8  # as in look.cuh
_SCRATCH = _WARPS * PROBES * (_ROWS + 2) * 4  # bytes
_UNIT = 2.0**-24  # unit roundoff of float32
_SLACK = 1.01  # covers the rounding of the bounds themselves
LARGEST_SCALE = 2.0**24
SMALLEST_SCALE = 2.0**-38


@dataclass(frozen=True)
class LookConfig(KernelConfig):
    """Config of a pass; both operands are float32.

    Attributes
    ----------
    kernel : str
        ``"look_right"``, over B with per-column scales, or ``"look_left"``, over A with per-row scales.
    planes : int
        Digits per element, 2 or 3.
    transposed : bool
        Whether the matrix is column-major.
    stages : int
        Pipeline stages per warp.

    Examples
    --------
    >>> LookConfig("look_left", 2, False).name
    'look_left-p2s3'
    """

    kernel: str
    planes: int
    transposed: bool
    stages: int = 3

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * _WARPS

    @property
    def smem_bytes(self) -> int:
        inputs = self.planes + 1 if self.kernel == "look_left" else 1
        stage = _ROWS * _STEP * 4 + inputs * (_STEP * PROBES * 4 + _STEP * 4)
        return self.stages * stage * _WARPS + _SCRATCH

    @property
    def name(self) -> str:
        """Short name, unique among the configs."""
        return f"{self.kernel}-p{self.planes}s{self.stages}{'t' if self.transposed else ''}"

    kernel_header = "estimate/look.cuh"

    @property
    def kernel_entry(self) -> str:
        return self.kernel

    def _constants(self) -> dict[str, object]:
        return {
            "kLeft": self.kernel == "look_left",
            "kPlanes": self.planes,
            "kTransposed": self.transposed,
            "kStages": self.stages,
            "kSmemBytes": self.smem_bytes,
        }


class LookVectors(NamedTuple):
    """What the pass over B leaves, for ``d_i B`` with i from 0 to `planes`; zero beyond K."""

    vectors: Tensor  # (planes + 1, padded_length(K), 16) float32: (d_i B) W
    bounds: Tensor  # (planes + 1, padded_length(K)) float32: |d_i B| wbar


class LookProbes(NamedTuple):
    """Gaussian probes and their norms; zero beyond N."""

    vectors: Tensor  # (padded_length(N), 16) float32: W
    norms: Tensor  # (padded_length(N),) float32: wbar, rounded up


class LookState(NamedTuple):
    """Memory that the pass over A, gated products and the verdict share; a captured graph may run again on it."""

    parts: Tensor  # (CTAs, RECORD) float64
    record: Tensor  # (8,) float64
    gate: Tensor  # (4 + 2 * warps,) float32: int32 levels - 1 of the picked product, padded to 16 bytes; its sums
    ticket: Tensor  # (1,) int32: 0 between passes


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
    scales: tuple[float, float] = (SMALLEST_SCALE, LARGEST_SCALE)


def padded_length(count: int) -> int:
    """Return the length of vectors in memory: `count` rounded up to a multiple of 32."""
    return -(-count // _ROWS) * _ROWS


def rounding_steps(planes: int) -> tuple[int, int]:
    """Return the float32 roundings that a term of E_r W may see in both passes, for both r.

    Examples
    --------
    >>> rounding_steps(2), rounding_steps(3)
    ((59, 67), (67, 75))
    """
    chains = _RUN_STEPS * _STEP // _CHAIN - 1
    right = _CHAIN + chains + 2  # beside the sums: the last digit's residual, and the stored vector
    left = [terms * _CHAIN + chains + 2 for terms in (planes, planes + 1)]  # a digit's part has two roundings
    return right + left[0] + 1, right + left[1] + 1  # and all float64 sums


def rounding(planes: int) -> tuple[float, float]:
    """Return the bounds of the rounding of E_r W, relative to ``sum |A_i| |d_{r-i} B| wbar + |d_r A| |B| wbar``."""
    low, high = (_SLACK * n * _UNIT / (1 - n * _UNIT) for n in rounding_steps(planes))
    return low, high


def underflow(m: int, k: int, n: int) -> float:
    """Return a bound of what the sums of E_r W lose below the range of float32, for scales up to LARGEST_SCALE."""
    return math.sqrt(m) * k * (n + 1) * 2.0**-104


def config_for(kernel: str, planes: int, transposed: bool, arch: str) -> LookConfig:
    """Return the config of a pass on `arch`: sm_80, or later with at least 168 KiB of shared memory per CTA.

    Examples
    --------
    >>> config_for("look_left", 3, False, "sm_90a").stages, config_for("look_left", 3, False, "sm_80").stages
    (3, 2)
    """
    return LookConfig(kernel, planes, transposed, 2 if arch == "sm_80" and planes == 3 else 3)  # 163 KiB per CTA


def state_for(device: torch.device, gate_size: int) -> LookState:
    """Return memory for passes over A; `gate_size`: elements of the gate, from ``cute_kernels.gemm.cuda``."""
    return LookState(
        torch.empty((num_sms(device.index), RECORD), dtype=torch.float64, device=device),
        torch.empty(8, dtype=torch.float64, device=device),
        torch.zeros(gate_size, dtype=torch.float32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )


def look_right(b: Tensor, probes: LookProbes, scale: Tensor, planes: int, bits: int = 8) -> LookVectors:
    """Return the pass over B; one launch that does not wait for the GPU.

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

    Returns
    -------
    LookVectors
    """
    transposed, matrix = _matrix_arguments(b)
    width = padded_length(b.shape[0])
    found = LookVectors(
        workspace.empty((planes + 1, width, PROBES), torch.float32, b.device),
        workspace.empty((planes + 1, width), torch.float32, b.device),
    )
    with device_of(b):
        kernel = get_kernel(_config("look_right", planes, transposed))
        kernel.launch(
            (width // _ROWS, 1, 1),
            (
                *matrix, probes.vectors.data_ptr(), probes.norms.data_ptr(), padded_length(b.shape[1]),
                scale.data_ptr(), *_rule_arguments(planes, bits), found.vectors.data_ptr(),
                found.bounds.data_ptr(), width,
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
    """
    planes = right.vectors.shape[0] - 1
    transposed, matrix = _matrix_arguments(a)
    m, k = a.shape
    n = other_scale.numel()
    numbers = (*rounding(planes), underflow(m, k, n), *limits.product_rounding, limits.tol / (1 + limits.tol))
    with device_of(a):
        kernel = get_kernel(_config("look_left", planes, transposed))
        kernel.launch(
            (min(-(-m // _ROWS), num_sms(a.device.index)), 1, 1),
            (
                *matrix, right.vectors.data_ptr(), right.bounds.data_ptr(), right.vectors.shape[1], scale.data_ptr(),
                *_rule_arguments(planes, bits), other_scale.data_ptr(), n, *map(np.float32, limits.scales),
                *map(np.float64, numbers), limits.factors.data_ptr(), state.parts.data_ptr(), state.record.data_ptr(),
                state.gate.data_ptr(), state.ticket.data_ptr(),
            ),
            pdl=True,
        )  # fmt: skip


def _config(kernel: str, planes: int, transposed: bool) -> LookConfig:
    return config_for(kernel, planes, transposed, current_arch())


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


def default_configs(arch: str = "sm_90a") -> list[LookConfig]:
    """Return the configs of all kernels on `arch`."""
    kernels = ("look_right", "look_left")
    return [config_for(kernel, p, t, arch) for kernel in kernels for p in (2, 3) for t in (False, True)]
