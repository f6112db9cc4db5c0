"""Quantization on a GPU: scales from amaxes, and integers in storage form, in one or two launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.integers import storage_dtype
from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig
from cute_kernels.jit.device import device_of, num_sms
from cute_kernels.jit.kernel import get_kernel

__all__ = ["SOURCES", "QuantizeConfig", "default_configs", "quantize", "quantize_rows_of_two"]

SOURCES = REAL_DTYPES | {torch.float64: "float64"}
_TYPES = OUT_TYPES | {"float64": "double"}
_LONG_ROW = 1 << 15  # entries per row from which several CTAs share a row, if rows are few
_SHORT_ROW = 256  # bytes per row up to which a thread takes fewer entries, so that neighbors store whole sectors
_ALIGNMENT = 16


@dataclass(frozen=True)
class QuantizeConfig(KernelConfig):
    """Config of a quantization kernel.

    Parameters
    ----------
    kernel : str
        Kernel entry, such as ``"encode_rows"``.
    x : str
        Dtype of the input.
    bits, signed : int, bool
        Width and signedness of the integers; unused by the amax kernels.
    truncate : bool
        Round toward zero instead of to nearest even.
    steps : int
        Loads of 16 bytes in flight per thread.

    Examples
    --------
    >>> QuantizeConfig("encode_rows", "float16", 4).name
    'quantize-encode_rows-float16-s4-s4'
    """

    kernel: str
    x: str
    bits: int = 8
    signed: bool = True
    truncate: bool = False
    steps: int = 4

    @property
    def stored(self) -> int:
        """Bits per stored integer."""
        return 16 if self.bits == 12 else self.bits

    @property
    def threads(self) -> int:
        return 256

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def vector(self) -> int:
        """Entries per load of a thread."""
        return _ALIGNMENT // {"float64": 8, "float32": 4}.get(self.x, 2)

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        kind = f"{'s' if self.signed else 'u'}{self.bits}{'t' if self.truncate else ''}"
        return f"quantize-{self.kernel}-{self.x}-{kind}-s{self.steps}"

    def lanes(self, columns: int) -> int:
        """Return the threads per row of `columns` entries: a power of two, with `steps` loads each if possible."""
        loads = -(-columns // (self.vector * self.steps))
        return min(1 << (loads - 1).bit_length(), self.threads)

    def tiles(self, rows: int, columns: int) -> int:
        """Return the tiles of a slice (rows, columns)."""
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


class _QuantizeCall(NamedTuple):
    """One call: input as slices of (rows, columns), and outputs."""

    x: Tensor  # (slices * rows, columns), rows contiguous
    data: Tensor  # the integers, contiguous
    scale: Tensor  # contiguous
    bits: int  # per stored integer
    kind: tuple[int, bool, bool]  # width, signedness and truncation of the integers
    given: bool  # the scale is an input
    flags: int  # address, or 0
    pitch: int  # elements from one row of x to the next
    out_pitch: int  # bytes from one row of the data to the next

    @property
    def blocks(self) -> int:
        """CTAs of 256 threads that fill the GPU."""
        return 8 * num_sms(self.x.device.index)

    def config(self, kernel: str) -> QuantizeConfig:
        """Return the config of a kernel for this call."""
        source = SOURCES[self.x.dtype]
        if kernel == "encode_rows" and self.x.shape[1] * self.x.element_size() <= _SHORT_ROW:
            return QuantizeConfig("encode_short_rows", source, *self.kind, steps=2)
        if kernel.startswith("encode"):
            return QuantizeConfig(kernel, source, *self.kind)
        return QuantizeConfig(kernel, source, signed=self.kind[1])

    def vectors(self, config: QuantizeConfig) -> tuple[int, int]:
        """Return whether vector loads and vector stores are aligned, as 0 or 1."""
        single, size = self.x.shape[0] == 1, self.x.element_size()
        loads = self.x.data_ptr() % _ALIGNMENT == 0 and (single or self.pitch * size % _ALIGNMENT == 0)
        return int(loads), int(single or self.out_pitch % (config.vector * self.bits // 8) == 0)

    def partials(self, *shape: int) -> Tensor:
        """Return a workspace for partial amaxes, as bits."""
        dtype = torch.int64 if self.x.dtype == torch.float64 else torch.int32
        return workspace.empty(shape, dtype, self.x.device)

    def flat(self) -> _QuantizeCall:
        """Return the same entries as one row, if input and output rows are contiguous."""
        gaps = self.pitch != self.x.shape[1] or self.bits * self.x.shape[1] % 8
        if gaps:
            return self
        size = self.x.numel()
        return self._replace(x=self.x.reshape(1, -1), pitch=size, out_pitch=(size * self.bits + 7) // 8)


def _encode_slices(call: _QuantizeCall, slices: int) -> None:
    """Quantize with one scale per slice of rows; two launches, or one for given scales."""
    partials, parts = None, 0
    if slices == 1:
        call = call.flat()
    rows, columns = call.x.shape[0] // slices, call.x.shape[1]
    each = max(1, call.blocks // slices)
    if not call.given:
        config = call.config("absmax_slices")
        parts = min(each, config.tiles(rows, columns))
        partials = call.partials(slices, parts)
        get_kernel(config).launch(
            (slices * parts, 1, 1),
            (
                call.x.data_ptr(), call.pitch, rows, columns, parts, config.lanes(columns), partials.data_ptr(),
                call.flags, call.vectors(config)[0],
            ),
        )  # fmt: skip
    config = call.config("encode_slices")
    if call.given:  # as many loads per thread as leave two CTAs to each SM
        by_steps = (replace(config, steps=steps) for steps in (4, 2, 1))
        config = next(one for one in by_steps if one.steps == 1 or one.tiles(rows, columns) >= each // 4)
    splits = min(each, config.tiles(rows, columns))
    get_kernel(config).launch(
        (slices * splits, 1, 1),
        (
            call.x.data_ptr(), call.pitch, rows, columns, splits, config.lanes(columns),
            0 if partials is None else partials.data_ptr(), parts, call.scale.data_ptr(), call.data.data_ptr(),
            call.out_pitch, call.flags, *call.vectors(config),
        ),
        pdl=partials is not None,
    )  # fmt: skip


def _encode_rows(call: _QuantizeCall, other: _QuantizeCall | None = None, factor: float = 1.0) -> None:
    """Quantize with per-row scales, those of `call` times `factor`, in one launch.

    `other`: a call of the same shape, pitches and alignment for the same launch.
    """
    rows, columns = call.x.shape
    if columns >= _LONG_ROW and 4 * rows <= call.blocks:
        for each in (call, other):
            if each is not None:
                _encode_slices(each, rows)
        if factor != 1.0:
            call.scale.mul_(factor)
        return
    config = call.config("encode_rows")
    lanes = config.lanes(columns)
    blocks = -(-rows * lanes // config.threads)
    if config.kernel == "encode_short_rows":  # whole waves of CTAs that loop over rows
        blocks = min(blocks, call.blocks // 2 if other is None else call.blocks // 4)
    addresses = (0, 0, 0) if other is None else (other.x.data_ptr(), other.scale.data_ptr(), other.data.data_ptr())
    get_kernel(config).launch(
        (blocks, 1 if other is None else 2, 1),
        (
            call.x.data_ptr(), call.pitch, rows, columns, lanes, call.scale.data_ptr(), int(call.given),
            call.data.data_ptr(), call.out_pitch, call.flags, *call.vectors(config), *addresses, np.float32(factor),
        ),
    )  # fmt: skip


def _encode_columns(call: _QuantizeCall, slices: int) -> None:
    """Quantize with per-column scales of each of `slices` matrices; two launches, or one for given scales."""
    rows, columns = call.x.shape[0] // slices, call.x.shape[1]
    config = call.config("encode_columns")
    lanes = min(32, 1 << (-(-columns // config.vector) - 1).bit_length())
    tiles = -(-columns // (lanes * config.vector))
    at_once = config.threads // lanes * config.steps  # rows per pass of a CTA

    def split(blocks: int) -> tuple[int, tuple[int, int, int], tuple[int, ...]]:
        """Splits of the rows, grid, and first arguments for about `blocks` CTAs."""
        splits = max(1, min(blocks // (slices * tiles), -(-rows // at_once)))
        passes = -(-rows // (at_once * splits))
        shape = (call.x.data_ptr(), call.pitch, rows, columns, tiles, splits, passes, lanes)
        return splits, (slices * tiles * splits, 1, 1), shape

    partials, parts = None, 0
    if not call.given:
        maxima = call.config("absmax_columns")
        parts, grid, shape = split(call.blocks)
        partials = call.partials(slices, parts, columns)
        outputs = (partials.data_ptr(), call.flags, call.vectors(maxima)[0])
        get_kernel(maxima).launch(grid, (*shape, *outputs))
    _, grid, shape = split(call.blocks // 2)  # whole waves: each CTA first reads all partial amaxes of its columns
    get_kernel(config).launch(
        grid,
        (
            *shape, 0 if partials is None else partials.data_ptr(), parts, call.scale.data_ptr(), call.data.data_ptr(),
            call.out_pitch, call.flags, *call.vectors(config),
        ),
        pdl=partials is not None,
    )  # fmt: skip


def _make_call(
    x: Tensor,
    bits: int,
    signed: bool,
    axis: int | None,
    truncate: bool = False,
    scale: Tensor | None = None,
    flags: int = 0,
    out: tuple[Tensor, Tensor | None] | None = None,
) -> _QuantizeCall:
    """The call for the arguments of `quantize`, with allocated outputs or `out`."""
    columns = x.shape[-1]
    rows = x.reshape(-1, columns)
    if columns > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    width, dtype = (columns + 1) // 2 if bits == 4 else columns, storage_dtype(bits, signed)
    given = scale is not None
    if scale is None and out is not None:
        scale = out[1]
    if scale is None:
        shape = list(x.shape) if axis is not None else []
        if shape:
            shape[-2 if axis == 0 else -1] = 1
        real = torch.float64 if x.dtype == torch.float64 else torch.float32
        scale = workspace.empty(tuple(shape), real, x.device)
    data = workspace.empty((*x.shape[:-1], width), dtype, x.device) if out is None else out[0]
    pitch = rows.stride(0) if rows.shape[0] > 1 else columns
    stored = 4 if bits == 4 else 8 * data.element_size()
    kind, out_pitch = (bits, signed, truncate), (columns * stored + 7) // 8
    return _QuantizeCall(rows, data, scale.contiguous(), stored, kind, given, flags, pitch, out_pitch)


def quantize(
    x: Tensor,
    *,
    bits: int,
    signed: bool,
    axis: int | None,
    truncate: bool = False,
    scale: Tensor | None = None,
    flags: int = 0,
    out: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize a tensor on a GPU without waiting for it.

    ``q = clamp(round(x / scale))``, ``scale = max|x| / q_max`` over a slice: 1 for zeros, NaN for non-finite slices.
    The workspace is at most 8 bytes per CTA; per-column scales need a word per column for each of about 64 splits.

    Parameters
    ----------
    x : Tensor, shape (..., M, N)
        CUDA tensor of a dtype in :data:`SOURCES`, not empty. Copied unless the last dimension is contiguous and the
        others collapse to one.
    bits, signed : int, bool
        Width and signedness of the integers.
    axis : int or None
        None for one scale, 1 for per-row, 0 for per-column scales of every matrix of the batch.
    truncate : bool, default False
        Round toward zero instead of to nearest even.
    scale : Tensor, optional
        Given scales, of the returned shape; float64 for float64 input, else float32.
    flags : int, default 0
        Address of an int32 on the device that gets the bits ``NEGATIVE`` (unsigned integers only) and ``NONFINITE`` of
        ``cute_kernels.cpu.engine``; 0 for none.
    out : (Tensor, Tensor or None), optional
        Contiguous memory for what is returned; the second is None if `scale` is given.

    Returns
    -------
    data : Tensor, shape (..., M, width)
        Integers in storage form, packed along the last dimension.
    scale : Tensor, shape (), (..., M, 1) or (..., 1, N)
        Scales.

    Examples
    --------
    >>> data, scale = quantize(torch.ones(4, 8, device="cuda"), bits=8, signed=True, axis=1)  # doctest: +SKIP
    >>> data[0, 0].item(), scale.shape  # doctest: +SKIP
    (127, torch.Size([4, 1]))
    """
    call = _make_call(x, bits, signed, axis, truncate, scale, flags, out)
    with device_of(x):
        if axis is None:
            _encode_slices(call, 1)
        elif axis == 1:
            _encode_rows(call)
        else:
            _encode_columns(call, call.x.shape[0] // x.shape[-2])
    return call.data, call.scale


def quantize_rows_of_two(
    x: Tensor, y: Tensor, *, bits: int, factor: float = 1.0
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Quantize two tensors to signed integers with per-row scales, in one launch if shapes and strides match.

    Parameters
    ----------
    x, y : Tensor
        As for :func:`quantize`.
    bits : int
        Width of the integers.
    factor : float, default 1.0
        Multiplies the returned scales of `x`.

    Returns
    -------
    tuple
        ``(data, scale)`` of `x`, and of `y`.

    Examples
    --------
    >>> x = torch.ones(4, 8, device="cuda")  # doctest: +SKIP
    >>> (query, query_scale), (key, key_scale) = quantize_rows_of_two(x, x, bits=8, factor=0.125)  # doctest: +SKIP
    """
    calls = [_make_call(each, bits, True, 1) for each in (x, y)]
    layouts = [(call.x.shape, call.x.dtype, call.pitch, call.vectors(call.config("encode_rows"))) for call in calls]
    together = layouts[0] == layouts[1] and x.device == y.device
    with device_of(x):
        _encode_rows(calls[0], calls[1] if together else None, factor)
    if not together:
        with device_of(y):
            _encode_rows(calls[1])
    return (calls[0].data, calls[0].scale), (calls[1].data, calls[1].scale)


def default_configs() -> list[QuantizeConfig]:
    """Return the configs for signed 4-, 8- and 16-bit integers of float32, float16 and bfloat16.

    Examples
    --------
    >>> len(default_configs())
    48
    """
    kernels = [("encode_slices", 4), ("encode_rows", 4), ("encode_columns", 4), ("encode_short_rows", 2)]
    encode = [(*kind, bits) for kind in kernels for bits in (4, 8, 16)] + [("encode_slices", s, 8) for s in (1, 2)]
    return [
        config
        for x in ("float32", "float16", "bfloat16")
        for config in (
            *(QuantizeConfig(kernel, x) for kernel in ("absmax_slices", "absmax_columns")),
            *(QuantizeConfig(kernel, x, bits, steps=steps) for kernel, steps, bits in encode),
        )
    ]
