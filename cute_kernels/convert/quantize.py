"""Quantization on a GPU: scales from largest magnitudes, and integers in storage form, in one or two launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.integers import storage_dtype
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel

SOURCES = REAL_DTYPES | {torch.float64: "float64"}
_TYPES = OUT_TYPES | {"float64": "double"}
_LONG_ROW = 1 << 15  # entries from which several blocks share a row, where rows are few
_SHORT_ROW = 256  # bytes up to which a thread takes fewer of a row, so that neighbours store whole sectors
_ALIGNMENT = 16


@dataclass(frozen=True)
class QuantizeConfig(KernelConfig):
    """What a quantization kernel is compiled for: ``kernel`` is its name in the source, ``x`` the name of the input's
    dtype, ``bits``, ``signed`` and ``truncate`` the integers and their rounding.  A thread has ``steps`` loads of 16
    bytes in flight."""

    kernel: str
    x: str
    bits: int = 8  # the kernels for maxima write none
    signed: bool = True
    truncate: bool = False
    steps: int = 4

    @property
    def stored(self) -> int:
        """Bits of a stored integer."""
        return 16 if self.bits == 12 else self.bits

    @property
    def threads(self) -> int:
        return 256

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def vector(self) -> int:
        """Entries that a thread loads at once."""
        return _ALIGNMENT // {"float64": 8, "float32": 4}.get(self.x, 2)

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        kind = f"{'s' if self.signed else 'u'}{self.bits}{'t' if self.truncate else ''}"
        return f"quantize-{self.kernel}-{self.x}-{kind}-s{self.steps}"

    def lanes(self, columns: int) -> int:
        """Threads that share a row of ``columns`` entries: a power of two, enough for it in ``steps`` loads each."""
        loads = -(-columns // (self.vector * self.steps))
        return min(1 << (loads - 1).bit_length(), self.threads)

    def tiles(self, rows: int, columns: int) -> int:
        """Pieces of work that the kernels for slices make of (rows, columns)."""
        lanes = self.lanes(columns)
        return -(-rows // (self.threads // lanes)) * -(-columns // (lanes * self.vector * self.steps))

    @property
    def kernel_header(self) -> str:
        slices = self.kernel.rsplit("_", 1)[1]
        return "convert/quantize.cuh" if slices == "slices" else f"convert/quantize_{slices}.cuh"

    @property
    def kernel_entry(self) -> str:
        return self.kernel

    def _constants(self) -> dict[str, object]:
        return {
            "kBits": self.bits,
            "kStored": self.stored,
            "kSigned": self.signed,
            "kTruncate": self.truncate,
            "kSteps": self.steps,
            "kThreads": self.threads,
        }

    def _types(self) -> dict[str, str]:
        return {"Source": _TYPES[self.x]}


@lru_cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class _Job(NamedTuple):
    """One call: entries as slices of (rows, columns), and where the results go."""

    x: Tensor  # (slices * rows, columns), rows contiguous
    data: Tensor  # the integers, contiguous
    scale: Tensor  # contiguous
    bits: int  # of a stored integer
    kind: tuple[int, bool, bool]  # width, sign and truncation of the integers
    given: bool  # the scale is an input
    flags: int  # address, or 0
    pitch: int  # elements from one row of x to the next
    out_pitch: int  # bytes from one row of the data to the next

    @property
    def blocks(self) -> int:
        """Blocks of 256 threads that fill the GPU."""
        return 8 * _multiprocessors(self.x.device.index)

    def config(self, kernel: str) -> QuantizeConfig:
        source = SOURCES[self.x.dtype]
        if kernel == "encode_rows" and self.x.shape[1] * self.x.element_size() <= _SHORT_ROW:
            return QuantizeConfig("encode_short_rows", source, *self.kind, steps=2)
        if kernel.startswith("encode"):
            return QuantizeConfig(kernel, source, *self.kind)
        return QuantizeConfig(kernel, source, signed=self.kind[1])

    def vectors(self, config: QuantizeConfig) -> tuple[int, int]:
        """Whether loads and stores of whole vectors are aligned."""
        single, size = self.x.shape[0] == 1, self.x.element_size()
        loads = self.x.data_ptr() % _ALIGNMENT == 0 and (single or self.pitch * size % _ALIGNMENT == 0)
        return int(loads), int(single or self.out_pitch % (config.vector * self.bits // 8) == 0)

    def partials(self, *shape: int) -> Tensor:
        """Workspace for the bits of partial maxima."""
        dtype = torch.int64 if self.x.dtype == torch.float64 else torch.int32
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def flat(self) -> _Job:
        """The same entries as one row, where the rows of input and output lie without gaps."""
        gaps = self.pitch != self.x.shape[1] or self.bits * self.x.shape[1] % 8
        if gaps:
            return self
        size = self.x.numel()
        return self._replace(x=self.x.reshape(1, -1), pitch=size, out_pitch=(size * self.bits + 7) // 8)


def _encode_slices(job: _Job, slices: int) -> None:
    """A scale for each of ``slices`` runs of rows; two launches, or one for given scales."""
    partials, parts = None, 0
    if slices == 1:
        job = job.flat()
    rows, columns = job.x.shape[0] // slices, job.x.shape[1]
    each = max(1, job.blocks // slices)
    if not job.given:
        config = job.config("absmax_slices")
        parts = min(each, config.tiles(rows, columns))
        partials = job.partials(slices, parts)
        get_kernel(config).launch(
            (slices * parts, 1, 1),
            (
                job.x.data_ptr(), job.pitch, rows, columns, parts, config.lanes(columns), partials.data_ptr(),
                job.flags, job.vectors(config)[0],
            ),
            pdl=True,
        )  # fmt: skip
    config = job.config("encode_slices")
    splits = min(each, config.tiles(rows, columns))
    get_kernel(config).launch(
        (slices * splits, 1, 1),
        (
            job.x.data_ptr(), job.pitch, rows, columns, splits, config.lanes(columns),
            0 if partials is None else partials.data_ptr(), parts, job.scale.data_ptr(), job.data.data_ptr(),
            job.out_pitch, job.flags, *job.vectors(config),
        ),
        pdl=True,
    )  # fmt: skip


def _encode_rows(job: _Job, other: _Job | None = None, factor: float = 1.0) -> None:
    """A scale a row, those of ``job`` times ``factor``; one launch.

    ``other``: a matrix of the same shape, pitches and alignment, for the same launch.
    """
    rows, columns = job.x.shape
    if columns >= _LONG_ROW and 4 * rows <= job.blocks:
        for each in (job, other):
            if each is not None:
                _encode_slices(each, rows)
        if factor != 1.0:
            job.scale.mul_(factor)
        return
    config = job.config("encode_rows")
    lanes = config.lanes(columns)
    blocks = -(-rows * lanes // config.threads)
    if config.kernel == "encode_short_rows":  # whole waves of blocks that go through many rows
        blocks = min(blocks, job.blocks // 2 if other is None else job.blocks // 4)
    places = (0, 0, 0) if other is None else (other.x.data_ptr(), other.scale.data_ptr(), other.data.data_ptr())
    get_kernel(config).launch(
        (blocks, 1 if other is None else 2, 1),
        (
            job.x.data_ptr(), job.pitch, rows, columns, lanes, job.scale.data_ptr(), int(job.given),
            job.data.data_ptr(), job.out_pitch, job.flags, *job.vectors(config), *places, np.float32(factor),
        ),
        pdl=True,
    )  # fmt: skip


def _encode_columns(job: _Job, slices: int) -> None:
    """A scale a column of each of ``slices`` matrices; two launches, or one for given scales."""
    rows, columns = job.x.shape[0] // slices, job.x.shape[1]
    config = job.config("encode_columns")
    lanes = min(32, 1 << (-(-columns // config.vector) - 1).bit_length())
    tiles = -(-columns // (lanes * config.vector))
    at_once = config.threads // lanes * config.steps  # rows of a block

    def share(blocks: int) -> tuple[int, tuple[int, int, int], tuple[int, ...]]:
        splits = max(1, min(blocks // (slices * tiles), -(-rows // at_once)))
        passes = -(-rows // (at_once * splits))
        shape = (job.x.data_ptr(), job.pitch, rows, columns, tiles, splits, passes, lanes)
        return splits, (slices * tiles * splits, 1, 1), shape

    partials, parts = None, 0
    if not job.given:
        maxima = job.config("absmax_columns")
        parts, grid, shape = share(job.blocks)
        partials = job.partials(slices, parts, columns)
        places = (partials.data_ptr(), job.flags, job.vectors(maxima)[0])
        get_kernel(maxima).launch(grid, (*shape, *places), pdl=True)
    _, grid, shape = share(job.blocks // 2)  # whole waves: each block begins with all partial maxima of its columns
    get_kernel(config).launch(
        grid,
        (
            *shape, 0 if partials is None else partials.data_ptr(), parts, job.scale.data_ptr(), job.data.data_ptr(),
            job.out_pitch, job.flags, *job.vectors(config),
        ),
        pdl=True,
    )  # fmt: skip


def _job(
    x: Tensor,
    bits: int,
    signed: bool,
    axis: int | None,
    truncate: bool = False,
    scale: Tensor | None = None,
    flags: int = 0,
) -> _Job:
    """The call for the arguments of :func:`quantize`, with room for its results."""
    columns = x.shape[-1]
    rows = x.reshape(-1, columns)
    if columns > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    width, dtype = (columns + 1) // 2 if bits == 4 else columns, storage_dtype(bits, signed)
    given = scale is not None
    if scale is None:
        shape = list(x.shape) if axis is not None else []
        if shape:
            shape[-2 if axis == 0 else -1] = 1
        real = torch.float64 if x.dtype == torch.float64 else torch.float32
        scale = torch.empty(shape, dtype=real, device=x.device)
    data = torch.empty((*x.shape[:-1], width), dtype=dtype, device=x.device)
    pitch = rows.stride(0) if rows.shape[0] > 1 else columns
    stored = 4 if bits == 4 else 8 * data.element_size()
    kind, out_pitch = (bits, signed, truncate), (columns * stored + 7) // 8
    return _Job(rows, data, scale.contiguous(), stored, kind, given, flags, pitch, out_pitch)


def quantize(
    x: Tensor,
    *,
    bits: int,
    signed: bool,
    axis: int | None,
    truncate: bool = False,
    scale: Tensor | None = None,
    flags: int = 0,
) -> tuple[Tensor, Tensor]:
    """Integers of ``x`` in storage form, packed along the last dimension, and their scale; waits for nothing.

    Arguments:
        x: CUDA tensor (..., M, N) of a dtype in :data:`SOURCES`, not empty; copied unless the last dimension is
            contiguous and the others lie one step apart.
        bits, signed, truncate: width and kind of the integers, and rounding toward zero instead of to nearest even.
        axis: None for one scale, 1 for one a row, 0 for one a column, of every matrix of the batch.
        scale: given scales of the shape that is returned, in float64 for float64 input, else in float32.
        flags: address of an int32 on the device that gets the bits ``NEGATIVE`` and ``NONFINITE`` of
            :mod:`cute_kernels.cpu.engine` where an entry is so, the former only for unsigned integers; 0 for none.
    Returns the integers (..., M, width) and the scale, (), (..., M, 1) or (..., 1, N).
    The workspace is at most 8 bytes a block, and for columns a word for each of some 64 parts of every column.
    Raises what :func:`cute_kernels.jit.get_kernel` raises.
    """
    job = _job(x, bits, signed, axis, truncate, scale, flags)
    with device_of(x):
        if axis is None:
            _encode_slices(job, 1)
        elif axis == 1:
            _encode_rows(job)
        else:
            _encode_columns(job, job.x.shape[0] // x.shape[-2])
    return job.data, job.scale


def quantize_rows_of_two(
    x: Tensor, y: Tensor, *, bits: int, factor: float = 1.0
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """As :func:`quantize` with a scale a row, signed, of two tensors; one launch where they lie alike.

    The scales of ``x`` come times ``factor``.
    """
    jobs = [_job(each, bits, True, 1) for each in (x, y)]
    alike = [(job.x.shape, job.x.dtype, job.pitch, job.vectors(job.config("encode_rows"))) for job in jobs]
    together = alike[0] == alike[1] and x.device == y.device
    with device_of(x):
        _encode_rows(jobs[0], jobs[1] if together else None, factor)
    if not together:
        with device_of(y):
            _encode_rows(jobs[1])
    return (jobs[0].data, jobs[0].scale), (jobs[1].data, jobs[1].scale)


def default_configs() -> list[QuantizeConfig]:
    """The kernels for signed integers of 4, 8 and 16 bits, to nearest, of float32, float16 and bfloat16."""
    kernels = ("encode_slices", "encode_rows", "encode_columns")
    return [
        config
        for x in ("float32", "float16", "bfloat16")
        for config in (
            *(QuantizeConfig(kernel, x) for kernel in ("absmax_slices", "absmax_columns")),
            *(QuantizeConfig(kernel, x, bits) for kernel in kernels for bits in (4, 8, 16)),
            *(QuantizeConfig("encode_short_rows", x, bits, steps=2) for bits in (4, 8, 16)),
        )
    ]
