"""Digit planes of a real matrix, ready for :func:`cute_kernels.gemm.api.gemm`: scale and planes in one pass on a GPU.

References
----------
.. [1] Gu, arXiv 2403.06924, equations 4 to 7 (residuals of quantization as a second digit).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.convert.pack import pack_rows
from cute_kernels.cpu import engine
from cute_kernels.cpu.decompose import ZERO_SCALE, decompose, digit_scales
from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig
from cute_kernels.jit.device import current_arch, device_of
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.jit.launch_cache import LaunchCache
from cute_kernels.operands import ALIGNMENT, line_pitch

__all__ = [
    "ZERO_SCALE", "Digits", "DigitsConfig", "columns_config", "default_configs", "digit_rule", "digits", "rows_config",
]  # fmt: skip

_MOST_CTAS = 8  # of a cluster
_CLUSTERED = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")
_launches = LaunchCache(256)


class Digits(NamedTuple):
    """Digit planes and their scale: ``x ~ scale * sum_i planes[i] / 2**(bits i)``.

    Examples
    --------
    >>> digits(torch.tensor([[127.0, -3.25]])).planes[1].tolist()
    [[0, -64]]
    """

    planes: tuple[Tensor, ...]  # (M, N) int8 each
    scale: Tensor  # (M,), (N,) or () for axis 1, 0 or None


@dataclass(frozen=True)
class DigitsConfig(KernelConfig):
    """Config of a digit kernel.

    Parameters
    ----------
    kernel : {"digits_rows", "digits_columns"}
        Kernel entry.
    x : str
        Dtype of the input.
    planes : int
        Digits.
    steps : int
        ``digits_rows``: loads of 16 bytes that a thread holds.
    clustered : bool
        ``digits_columns``: whether a cluster of CTAs has a tile of columns; otherwise a CTA has it.
    resident : int
        ``digits_columns``: CTAs per SM.
    columns, rows : int
        ``digits_columns``: columns per tile; rows per thread, which has four columns.
    threads : int
        Threads per CTA.

    Examples
    --------
    >>> DigitsConfig("digits_rows", "float32", 2).name
    'digits_rows-float32-p2s4c0r1-32x8t256'
    """

    kernel: str
    x: str
    planes: int
    steps: int = 4
    clustered: bool = False
    resident: int = 1
    columns: int = 32
    rows: int = 8
    threads: int = 256

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def run(self) -> int:
        """Entries per load of a thread."""
        if self.kernel == "digits_columns":
            return 4
        return ALIGNMENT // (4 if self.x == "float32" else 2)

    def cluster_for(self, rows: int) -> int:
        """Return the CTAs of a tile of `rows` rows, as many as hold them in registers, at most 8; ``digits_columns``.

        Examples
        --------
        >>> config = columns_config("float32", 2, "sm_90a", 1024)
        >>> config.cluster_for(100), config.cluster_for(1025), config.cluster_for(9000)
        (1, 4, 8)
        """
        held = self.threads // (self.columns // self.run) * self.rows
        return min(_MOST_CTAS, 1 << (-(-rows // held) - 1).bit_length()) if self.clustered else 1

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        strip = f"{self.columns}x{self.rows}t{self.threads}"
        return f"{self.kernel}-{self.x}-p{self.planes}s{self.steps}c{self.clustered:d}r{self.resident}-{strip}"

    kernel_header = "convert/digits.cuh"

    @property
    def kernel_entry(self) -> str:
        return self.kernel

    def _constants(self) -> dict[str, object]:
        return {
            "kPlanes": self.planes,
            "kSteps": self.steps,
            "kThreads": self.threads,
            "kClustered": self.clustered,
            "kResident": self.resident,
            "kColumns": self.columns,
            "kRows": self.rows,
        }

    def _types(self) -> dict[str, str]:
        return {"Source": OUT_TYPES[self.x]}


def rows_config(x: str, planes: int, columns: int) -> DigitsConfig:
    """Return the config for per-row scales of `columns` entries.

    Examples
    --------
    >>> rows_config("float32", 2, 4096).steps, rows_config("float32", 2, 8192).steps
    (4, 8)
    """
    config = DigitsConfig("digits_rows", x, planes)
    fits = columns <= config.run * config.steps * config.threads  # the registers of a CTA hold a row
    return config if fits else replace(config, steps=8)


def columns_config(x: str, planes: int, arch: str, rows: int) -> DigitsConfig:
    """Return the config for per-column scales of `rows` entries; uses clusters if `arch` has them.

    Examples
    --------
    >>> columns_config("float16", 2, "sm_90a", 1024).clustered, columns_config("float16", 2, "sm_80", 1024).clustered
    (True, False)
    """
    clustered = arch in _CLUSTERED
    if rows <= 4096:  # the registers of eight CTAs hold them
        return DigitsConfig("digits_columns", x, planes, clustered=clustered, resident=4, columns=16)
    return DigitsConfig("digits_columns", x, planes, clustered=clustered, resident=2, threads=512)


class _DigitRule(NamedTuple):
    """How a matrix is scaled and split into digits."""

    high: float  # largest leading digit
    radix: float  # 2**bits
    ahead: tuple[float, float]  # added before the first two roundings, for three digits
    power: bool  # scales are powers of two


@lru_cache
def digit_rule(bits: int, count: int, power: bool = False) -> _DigitRule:
    """Return the rule for `count` digits of `bits` each; `power`: scales are powers of two.

    Examples
    --------
    >>> digit_rule(8, 2).radix
    256.0
    """
    radix = 2.0**bits
    # Later digits cover -(1/2 + half a step) to 1/2 - half a step: with three, the leading digits are rounded so that
    # the residual is in that range. With two digits of 8 bits, a clamped digit costs at most one step.
    ahead = (0.5 * (1 / radix + 1 / radix**2), 0.5 / radix) if count == 3 else (0.0, 0.0)
    return _DigitRule(radix / 2 - 1, radix, ahead, power)


def _digits_cpu(x: Tensor, rule: _DigitRule, count: int, axis: int | None) -> Digits:
    """Digits on a CPU, by the engine or by torch operators."""
    work = x if x.dtype == torch.float64 else x.to(torch.float32)
    if work.dtype == torch.float32 and engine.available():
        planes, scale, _ = engine.decompose_cpu(work, count, axis, **rule._asdict())
        return Digits(planes, scale)
    return Digits(*decompose(work, count, axis, **rule._asdict()))


def _launch_rows(x: Tensor, rule: _DigitRule, count: int, scale: Tensor, given: bool) -> list[Tensor]:
    """Launch ``digits_rows``; return planes (rows, columns) with contiguous rows."""
    rows, columns = x.shape
    planes = workspace.empty((count, rows, line_pitch(columns)), torch.int8, x.device)

    def launch() -> None:
        config = rows_config(REAL_DTYPES[x.dtype], count, columns)
        loads = -(-columns // (config.run * config.steps))
        lanes = min(1 << (loads - 1).bit_length(), config.threads)
        pitch, vector = _pitch(x, config)
        get_kernel(config).launch(
            (-(-rows * lanes // config.threads), 1, 1),
            (
                x.data_ptr(), pitch, rows, columns, lanes, scale.data_ptr(), int(given), planes.data_ptr(),
                planes.shape[2], vector, *_rule_arguments(rule),
            ),
        )  # fmt: skip

    _launches.run(("rows", *_launch_key(x, scale, planes), rule, given), launch)
    return _unpadded(planes, columns)


def _launch_columns(x: Tensor, rule: _DigitRule, count: int, scale: Tensor, given: bool) -> list[Tensor]:
    """Launch ``digits_columns``; return planes (rows, columns) with contiguous columns."""
    rows, columns = x.shape
    planes = workspace.empty((count, columns, line_pitch(rows)), torch.int8, x.device)

    def launch() -> None:
        config = columns_config(REAL_DTYPES[x.dtype], count, current_arch(), rows)
        cluster = config.cluster_for(rows)
        pitch, vector = _pitch(x, config)
        get_kernel(config).launch(
            (-(-columns // config.columns) * cluster, 1, 1),
            (
                x.data_ptr(), pitch, rows, columns, scale.data_ptr(), int(given), planes.data_ptr(), planes.shape[2],
                vector, *_rule_arguments(rule),
            ),
            (cluster, 1, 1) if cluster > 1 else None,
        )  # fmt: skip

    _launches.run(("columns", *_launch_key(x, scale, planes), rule, given), launch)
    return [plane.t() for plane in _unpadded(planes, rows)]


def _launch_key(x: Tensor, scale: Tensor, planes: Tensor) -> tuple[Hashable, ...]:
    """Everything a launch depends on besides the rule."""
    addresses = x.data_ptr(), scale.data_ptr(), planes.data_ptr()
    return addresses, x.shape, x.stride(), x.dtype, x.device.index, planes.shape[0]


def _unpadded(planes: Tensor, length: int) -> list[Tensor]:
    """The planes (count, rows, pitch) without the padding beyond `length`."""
    trimmed = planes if planes.shape[2] == length else planes[:, :, :length]
    return list(trimmed.unbind())


def _pitch(x: Tensor, config: DigitsConfig) -> tuple[int, int]:
    """Entries from one row to the next, and 1 if vector loads are aligned, else 0."""
    pitch, size = x.stride(0) if x.shape[0] > 1 else x.shape[1], config.run * x.element_size()
    return pitch, int(x.data_ptr() % size == 0 and pitch * x.element_size() % size == 0)


def _rule_arguments(rule: _DigitRule) -> tuple[object, ...]:
    """Kernel arguments of a rule."""
    return (*(np.float32(each) for each in (rule.high, rule.radix, *rule.ahead)), int(rule.power))


def _digits_cuda(x: Tensor, rule: _DigitRule, count: int, axis: int | None, transpose: bool) -> Digits:
    """Digits on a GPU; `transpose`: the planes have contiguous columns."""
    if x.shape[1] > 1 and x.stride(1) != 1:
        if x.shape[0] > 1 and x.stride(0) != 1:
            x = x.contiguous()
        else:
            flipped = _digits_cuda(x.t(), rule, count, None if axis is None else 1 - axis, not transpose)
            return Digits(tuple(plane.t() for plane in flipped.planes), flipped.scale)
    by_columns = transpose if axis is None else axis == 0
    if axis is None:
        scale = digit_scales(torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32), rule.high, rule.power)
    else:
        scale = workspace.empty((x.shape[1 - axis],), torch.float32, x.device)
    launch = _launch_columns if by_columns else _launch_rows
    planes = launch(x, rule, count, scale, axis is None)
    if by_columns != transpose:  # the other memory order, by a copy
        rows = x.shape[0]
        planes = [pack_rows(p)[:, : x.shape[1]] if by_columns else pack_rows(p.t())[:, :rows].t() for p in planes]
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
    """Split a real matrix into digit planes and a scale.

    ``x = scale (q0 + q1 / 2^bits + q2 / 2^(2 bits))``, cut after `count` digits, to nearest even, as in [1]_:
    ``scale = max|x| / (2^(bits-1) - 1)``, rounded up, ``q0 = round(x / scale)``,
    ``q1 = round(2^bits (x / scale - q0))`` in ``[-2^(bits-1), 2^(bits-1)]``, 128 clamped to 127. With three digits,
    q0 and q1 round up from half a step of the next digit below one half on, so that the residual is in range of the
    later digits.

    Parameters
    ----------
    x : Tensor, shape (M, N)
        float32, float16 or bfloat16; on a CPU float64 too.
    bits : int, default 8
        Bits per digit, 2 to 8.
    count : int, default 2
        Digits, 1 to 3.
    axis : int or None, default 1
        1 for per-row, 0 for per-column, None for per-tensor scales.
    transpose : bool, default False
        Planes are column-major; their shape is that of `x` anyway.
    exponent_scale : bool, default False
        Scales are powers of two, the smallest sufficient ones, so that ``x / scale`` is exact.

    Returns
    -------
    Digits
        int8 planes (M, N), and the scale (M,), (N,) or () in float32, float64 for float64. Zeros get the scale 2**-38;
        non-finite slices get the scale NaN and zero digits. On a GPU, rows (or columns) start at multiples of 16 bytes:
        ``axis=1`` gives operand ``a`` of :func:`~cute_kernels.gemm.api.gemm`, ``axis=0, transpose=True`` operand ``b``,
        in one launch. Other combinations need a copy; ``axis=None`` reads `x` once more.

    Raises
    ------
    TypeError
        If the dtype is not supported.
    ValueError
        If an argument is out of range.
    NotImplementedError
        If the device has no kernel.

    References
    ----------
    .. [1] Gu, arXiv 2403.06924, equations 4 to 7.

    Examples
    --------
    >>> planes, scale = digits(torch.tensor([[127.0, -3.25]]))
    >>> [plane.tolist() for plane in planes], scale.tolist()
    ([[[127, -3]], [[0, -64]]], [1.0])
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
    rule = digit_rule(bits, count, exponent_scale)
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


def default_configs(arch: str = "sm_90a") -> list[DigitsConfig]:
    """Return the configs of all kernels on `arch`: input dtypes, planes, lines of up to 4,096 entries and longer ones.

    Examples
    --------
    >>> len(default_configs())
    36
    """
    kinds = [(x, planes) for x in REAL_DTYPES.values() for planes in (1, 2, 3)]
    rows = [rows_config(x, planes, length) for x, planes in kinds for length in (4096, 8193)]
    return [*rows, *(columns_config(x, planes, arch, length) for x, planes in kinds for length in (4096, 4097))]
