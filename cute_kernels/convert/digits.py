"""Digit planes of a real matrix, ready for :func:`cute_kernels.gemm.api.gemm`: scale and planes in one pass on a GPU.

Source: Gu, arXiv 2403.06924, equations 4 to 7 (residuals of quantization as a second digit).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.convert.pack import pack
from cute_kernels.cpu import engine
from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig
from cute_kernels.jit.device import current_arch, device_of
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.jit.launch_cache import LaunchCache
from cute_kernels.operands import ALIGNMENT, aligned

_LIFT, _TINY = 2.0**100, 2.0**-100
_CLUSTERED = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")
_replays = LaunchCache(256)


class Digits(NamedTuple):
    """``x ~ scale * sum_i planes[i] / 2**(bits i)``; ``scale`` is (M,), (N,) or () by axis 1, 0 or None."""

    planes: tuple[Tensor, ...]  # int8, of the shape of x
    scale: Tensor


@dataclass(frozen=True)
class DigitsConfig(KernelConfig):
    """What a digit kernel is compiled for: ``kernel`` is its name, ``x`` the input's dtype.

    A thread of ``digits_rows`` keeps ``steps`` loads of 16 bytes.  ``cluster`` blocks of ``digits_columns`` share a
    strip of ``columns``, of which a thread has four in ``rows`` neighbouring rows.
    """

    kernel: str
    x: str
    planes: int
    steps: int = 4
    cluster: int = 1
    resident: int = 1
    columns: int = 32
    rows: int = 8
    threads: int = 256

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def run(self) -> int:
        """Entries that a thread loads at once."""
        if self.kernel == "digits_columns":
            return 4
        return ALIGNMENT // (4 if self.x == "float32" else 2)

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        strip = f"{self.columns}x{self.rows}t{self.threads}"
        return f"{self.kernel}-{self.x}-p{self.planes}s{self.steps}c{self.cluster}r{self.resident}-{strip}"

    kernel_header = "convert/digits.cuh"

    @property
    def kernel_entry(self) -> str:
        return self.kernel

    def _constants(self) -> dict[str, object]:
        return {
            "kPlanes": self.planes,
            "kSteps": self.steps,
            "kThreads": self.threads,
            "kCluster": self.cluster,
            "kResident": self.resident,
            "kColumns": self.columns,
            "kRows": self.rows,
        }

    def _types(self) -> dict[str, str]:
        return {"Source": OUT_TYPES[self.x]}


def columns_config(x: str, planes: int, arch: str, rows: int) -> DigitsConfig:
    """The kernel for scales of columns of ``rows`` entries; blocks of a cluster share a strip where there are any."""
    cluster = 8 if arch in _CLUSTERED else 1
    if rows <= 4096:  # what eight blocks keep in registers
        return DigitsConfig("digits_columns", x, planes, cluster=cluster, resident=4, columns=16)
    return DigitsConfig("digits_columns", x, planes, cluster=cluster, resident=2, threads=512)


class Rule(NamedTuple):
    """How digits are made: largest leading digit, radix, what is added before the first roundings, kind of scale."""

    high: float
    radix: float
    ahead: tuple[float, float]
    power: bool


@lru_cache
def _rule(bits: int, count: int, power: bool) -> Rule:
    radix = 2.0**bits
    # Later digits reach from -(1/2 + half a step) to 1/2 - half a step, so with three the leading ones are rounded to
    # leave that. With two a digit that is cut off costs no more than a step.
    ahead = (0.5 * (1 / radix + 1 / radix**2), 0.5 / radix) if count == 3 else (0.0, 0.0)
    return Rule(radix / 2 - 1, radix, ahead, power)


def _scales(top: Tensor, rule: Rule) -> Tensor:
    """Scales from largest magnitudes, in their dtype: rounded up, 1 for zeros, NaN where an entry is not finite."""
    double = top.double()
    scale = (double / rule.high).to(top.dtype)
    if rule.power:
        mantissa, exponent = torch.frexp(torch.where(double > 0, double / rule.high, 1.0))
        scale = torch.ldexp(torch.ones_like(double), exponent - (mantissa == 0.5).int()).to(top.dtype)
    elif top.dtype == torch.float32:
        scale = torch.where(
            scale.double() * rule.high < double, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale
        )
    scale = torch.maximum(scale, torch.nextafter(torch.zeros_like(scale), torch.ones_like(scale)))
    scale = torch.where(top > 0, scale, 1.0)
    return torch.where(top.isfinite(), scale, torch.nan)


def _split(x: Tensor, scale: Tensor, rule: Rule, count: int) -> list[Tensor]:
    """Planes of ``x`` in its shape; ``scale`` broadcasts against it."""
    lift = torch.where(scale * 128 < _TINY, _LIFT, 1.0).to(x.dtype)
    unit = torch.where(scale.isnan(), 1.0, scale * lift)
    rest = torch.where(scale.isnan(), 0.0, x * lift)
    inverse = 1 / unit
    planes = []
    for i in range(count):
        q = rest * inverse
        if i < count - 1:
            q += rule.ahead[i]
        q = q.round_() if i == 0 else q.round_().clamp_(-rule.radix / 2, rule.radix / 2 - 1)
        planes.append(q.to(torch.int8))
        if i < count - 1:
            # exact in float64, then rounded once: a fused multiplication and subtraction
            rest = (rest.double() - q.double() * unit.double()).to(x.dtype)
            inverse, unit = inverse * rule.radix, unit / rule.radix
    return planes


def _digits_cpu(x: Tensor, rule: Rule, count: int, axis: int | None) -> Digits:
    work = x if x.dtype == torch.float64 else x.to(torch.float32)
    if work.dtype == torch.float32 and engine.available():
        planes, scale, _ = engine.digits(
            work, count, axis, high=rule.high, radix=rule.radix, ahead=rule.ahead, power=rule.power
        )
        return Digits(planes, scale)
    magnitudes = work.abs()
    if axis is None:
        scale = _scales(magnitudes.amax(), rule)
        return Digits(tuple(_split(work, scale, rule, count)), scale)
    scale = _scales(magnitudes.amax(dim=axis), rule)
    return Digits(tuple(_split(work, scale.unsqueeze(axis), rule, count)), scale)


def _launch_rows(x: Tensor, rule: Rule, count: int, scale: Tensor, given: bool) -> list[Tensor]:
    """Planes (rows, columns) whose rows are contiguous."""
    rows, columns = x.shape
    planes = workspace.empty((count, rows, aligned(columns)), torch.int8, x.device)

    def launch() -> None:
        config = DigitsConfig("digits_rows", REAL_DTYPES[x.dtype], count)
        loads = -(-columns // (config.run * config.steps))
        lanes = min(1 << (loads - 1).bit_length(), config.threads)
        pitch, vector = _pitch(x, config)
        get_kernel(config).launch(
            (-(-rows * lanes // config.threads), 1, 1),
            (
                x.data_ptr(), pitch, rows, columns, lanes, scale.data_ptr(), int(given), planes.data_ptr(),
                planes.shape[2], vector, *_numbers(rule),
            ),
        )  # fmt: skip

    _replays.run(("rows", *_places(x, scale, planes), rule, given), launch)
    return _parts(planes, columns)


def _launch_columns(x: Tensor, rule: Rule, count: int, scale: Tensor, given: bool) -> list[Tensor]:
    """Planes (rows, columns) whose columns are contiguous."""
    rows, columns = x.shape
    planes = workspace.empty((count, columns, aligned(rows)), torch.int8, x.device)

    def launch() -> None:
        config = columns_config(REAL_DTYPES[x.dtype], count, current_arch(), rows)
        cluster = config.cluster
        pitch, vector = _pitch(x, config)
        get_kernel(config).launch(
            (-(-columns // config.columns) * cluster, 1, 1),
            (
                x.data_ptr(), pitch, rows, columns, scale.data_ptr(), int(given), planes.data_ptr(), planes.shape[2],
                vector, *_numbers(rule),
            ),
            (cluster, 1, 1) if cluster > 1 else None,
        )  # fmt: skip

    _replays.run(("columns", *_places(x, scale, planes), rule, given), launch)
    return [plane.t() for plane in _parts(planes, rows)]


def _places(x: Tensor, scale: Tensor, planes: Tensor) -> tuple[Hashable, ...]:
    """All that a launch depends on besides the rule."""
    where = x.data_ptr(), scale.data_ptr(), planes.data_ptr()
    return where, x.shape, x.stride(), x.dtype, x.device.index, planes.shape[0]


def _parts(planes: Tensor, length: int) -> list[Tensor]:
    """The planes (count, lines, pitch), without what is beyond their lines' length."""
    whole = planes if planes.shape[2] == length else planes[:, :, :length]
    return list(whole.unbind())


def _pitch(x: Tensor, config: DigitsConfig) -> tuple[int, int]:
    """Entries from one row to the next, and whether runs of entries can be loaded at once: 1 or 0."""
    pitch, size = x.stride(0) if x.shape[0] > 1 else x.shape[1], config.run * x.element_size()
    return pitch, int(x.data_ptr() % size == 0 and pitch * x.element_size() % size == 0)


def _numbers(rule: Rule) -> tuple[object, ...]:
    return (*(np.float32(each) for each in (rule.high, rule.radix, *rule.ahead)), int(rule.power))


def _digits_cuda(x: Tensor, rule: Rule, count: int, axis: int | None, transpose: bool) -> Digits:
    if x.shape[1] > 1 and x.stride(1) != 1:
        if x.shape[0] > 1 and x.stride(0) != 1:
            x = x.contiguous()
        else:
            flipped = _digits_cuda(x.t(), rule, count, None if axis is None else 1 - axis, not transpose)
            return Digits(tuple(plane.t() for plane in flipped.planes), flipped.scale)
    by_columns = transpose if axis is None else axis == 0
    if axis is None:
        scale = _scales(torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32), rule)
    else:
        scale = workspace.empty((x.shape[1 - axis],), torch.float32, x.device)
    launch = _launch_columns if by_columns else _launch_rows
    planes = launch(x, rule, count, scale, axis is None)
    if by_columns != transpose:  # the other layout, by a copy
        rows = x.shape[0]
        planes = [pack(p)[:, : x.shape[1]] if by_columns else pack(p.t())[:, :rows].t() for p in planes]
    return Digits(tuple(planes), scale)


def digits(
    x: Tensor,
    bits: int = 8,
    count: int = 2,
    *,
    axis: int | None = 1,
    transpose: bool = False,
    exponent_scale: bool = False,
) -> Digits:
    """``x = scale (q0 + q1 / 2^bits + q2 / 2^(2 bits))``, cut after ``count`` digits.

    ``scale = max|x| / (2^(bits-1) - 1)``, rounded up, ``q0 = round(x / scale)``,
    ``q1 = round(2^bits (x / scale - q0))`` cut to ``[-2^(bits-1), 2^(bits-1) - 1]``, to nearest even.  With ``count``
    3, q0 and q1 round up from half a step of the next digit below one half on, so that what is left is in the later
    digits' reach.

    Arguments:
        x: float32, float16 or bfloat16 (M, N), on the CPU float64 too.
        bits: of a digit, 2 to 8.
        count: digits, 1 to 3.
        axis: 1 for a scale a row, 0 for a scale a column, None for one scale.
        transpose: planes lie column by column in memory; their shape is that of ``x`` all the same.
        exponent_scale: the scale is a power of two, the smallest that will do, so that ``x / scale`` is exact.
    Returns planes of int8 (M, N) and the scale (M,), (N,) or (), float32, or float64 for float64.  On a GPU the rows of
    the planes, or their columns, start at multiples of 16 bytes: with ``axis=1`` they are ready as ``a`` of
    :func:`~cute_kernels.gemm.api.gemm`, with ``axis=0, transpose=True`` as ``b``, in one launch; the other combinations
    take a copy.  ``axis=None`` takes a pass more, for the scale.
    Zeros get the scale 1.  Where a row, column or matrix has infinities or NaN, its scale is NaN and its digits are 0.
    Raises ``TypeError`` and ``ValueError`` that name the argument.
    """
    kinds = (*REAL_DTYPES, torch.float64) if x.device.type == "cpu" else tuple(REAL_DTYPES)
    if x.dtype not in kinds:
        raise TypeError(f"x on {x.device} must be one of {', '.join(map(str, kinds))}, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"x must have 2 dimensions, got {x.dim()}")
    if not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ValueError(f"bits must be an integer from 2 to 8, got {bits!r}")
    if count not in (1, 2, 3):
        raise ValueError(f"count must be 1, 2 or 3, got {count!r}")
    if axis not in (None, 0, 1):
        raise ValueError(f"axis must be None, 0 or 1, got {axis!r}")
    rule = _rule(bits, count, exponent_scale)
    if x.numel() == 0:
        size = () if axis is None else (x.shape[1 - axis],)
        scale = torch.ones(size, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device)
        return Digits(tuple(torch.empty_like(x, dtype=torch.int8) for _ in range(count)), scale)
    if x.device.type == "cpu":
        found = _digits_cpu(x, rule, count, axis)
        if transpose:
            return Digits(tuple(plane.t().contiguous().t() for plane in found.planes), found.scale)
        return found
    if x.device.type != "cuda":
        raise NotImplementedError(f"x must be on a CPU or a CUDA device, got {x.device}")
    with device_of(x):
        return _digits_cuda(x, rule, count, axis, transpose)
