"""Symmetric quantization of dense tensors: ``x ~ scale * q`` with integers ``q`` of 4, 8, 12 or 16 bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from cute_kernels.cpu import engine
from cute_kernels.dtypes import Integer
from cute_kernels.integers import check_bits, check_range, fetch, int_range, storage_dtype, store, widen
from magicube_cutlass.quantization.float_tensor import Block, FloatTensor, quantize_floats

_MSE_STEPS = 60  # clip thresholds tried, from max|x| / 60 to max|x|
_CHUNK_MODE = {None: 0, 1: 1, 0: 2}
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """Integers and the scale that makes real numbers of them: ``x ~ scale * q``.

    ``data`` holds the integers in storage form: int8/uint8 for 8 bits, int16 for 12, int16/uint16 for 16, and for 4
    bits uint8 with two a byte along the contiguous one of the last two dimensions.  ``shape`` is that of the integers.
    ``scale`` is None (plain integers), of shape ``()``, or has size 1 along ``axis`` of the last two dimensions:
    (..., M, 1) for ``axis=1``, (..., 1, N) for ``axis=0``.
    """

    data: Tensor
    scale: Tensor | None
    bits: int
    signed: bool
    axis: int | None
    shape: torch.Size

    def __post_init__(self) -> None:
        check_bits(self.bits)
        dtype = storage_dtype(self.bits, self.signed)
        if self.data.dtype != dtype:
            raise TypeError(f"data must have dtype {dtype} for {self.bits}-bit integers, got {self.data.dtype}")
        expected = list(self.shape)
        if self.bits == 4 and expected:
            expected[self.packed_dim] = (expected[self.packed_dim] + 1) // 2
        if list(self.data.shape) != expected:
            raise ValueError(f"data must have shape {tuple(expected)} for integers of shape {tuple(self.shape)}, "
                             f"got {tuple(self.data.shape)}")  # fmt: skip
        if self.scale is not None:
            _check_scale(self.scale, self.shape, self.axis)

    @property
    def packed_dim(self) -> int:
        """The dimension along which 4-bit integers are packed: -2 for column-major data, else -1."""
        if len(self.shape) < 2:
            return -1
        row_major = (self.shape[-2], (self.shape[-1] + 1) // 2)
        return -1 if tuple(self.data.shape[-2:]) == row_major else -2

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def number(self) -> Integer:
        """Width and sign of the integers."""
        return Integer(self.bits, self.signed)

    def ints(self) -> Tensor:
        """The integers, one an entry: int8/uint8 up to 8 bits, else int16/uint16."""
        length = self.shape[self.packed_dim] if self.bits == 4 else 0
        return fetch(self.data, length, self.bits, self.signed, self.packed_dim)

    def dequantize(self) -> Tensor:
        """``scale * integers`` in the scale's dtype; float32 for plain integers."""
        ints = widen(self.ints())
        return ints.to(torch.float32) if self.scale is None else ints.to(self.scale.dtype) * self.scale

    def to(self, device: torch.device | str) -> QuantTensor:
        """This tensor on ``device``."""
        scale = None if self.scale is None else self.scale.to(device)
        return QuantTensor(self.data.to(device), scale, self.bits, self.signed, self.axis, self.shape)

    @property
    def mT(self) -> QuantTensor:
        """The transpose of the last two dimensions, a view."""
        scale = self.scale if self.scale is None or self.scale.ndim < 2 else self.scale.mT
        axis = None if self.axis is None else 1 - self.axis
        shape = torch.Size((*self.shape[:-2], self.shape[-1], self.shape[-2]))
        return QuantTensor(self.data.mT, scale, self.bits, self.signed, axis, shape)

    @classmethod
    def from_ints(
        cls, ints: Tensor, *, bits: int, signed: bool = True, scale: Tensor | float | None = None
    ) -> QuantTensor:
        """Integers of any integer dtype as a :class:`QuantTensor`; a column-major input stays column-major.

        Raises ``TypeError`` for other dtypes, ``ValueError`` for values out of range or a scale of another shape.
        """
        check_bits(bits)
        check_range(ints, bits, signed, "ints")
        if ints.ndim < 1:
            raise ValueError(f"ints must have at least 1 dimension, got {ints.ndim}")
        if isinstance(scale, (int, float)):
            scale = torch.tensor(float(scale), device=ints.device)
        axis = None if scale is None else _scale_axis(scale, ints.shape)
        swap = _column_major(ints)
        rows = (ints.mT if swap else ints).contiguous()
        data = store(rows, bits, signed)
        return cls(data.mT if swap else data, scale, bits, signed, axis, ints.shape)

    def __repr__(self) -> str:
        kind = "signed" if self.signed else "unsigned"
        scale = "no scale" if self.scale is None else f"scale {tuple(self.scale.shape)} {self.scale.dtype}"
        return f"QuantTensor({tuple(self.shape)}, {kind} {self.bits}-bit, {scale}, device={self.device})"


def _column_major(x: Tensor) -> bool:
    return x.ndim >= 2 and x.mT.is_contiguous() and not x.is_contiguous()


def _scale_axis(scale: Tensor, shape: torch.Size) -> int | None:
    if scale.numel() == 1 and scale.ndim == 0:
        return None
    if scale.ndim >= 2 and len(shape) >= 2:
        if scale.shape[-1] == 1 and scale.shape[-2] == shape[-2]:
            return 1
        if scale.shape[-2] == 1 and scale.shape[-1] == shape[-1]:
            return 0
    raise ValueError(f"scale must have shape (), (..., {shape[-2] if len(shape) > 1 else 1}, 1) or "
                     f"(..., 1, {shape[-1]}), got {tuple(scale.shape)}")  # fmt: skip


def _check_scale(scale: Tensor, shape: torch.Size, axis: int | None) -> None:
    if not scale.is_floating_point():
        raise TypeError(f"scale must have a floating dtype, got {scale.dtype}")
    if axis is None:
        if scale.ndim != 0:
            raise ValueError(f"scale must have shape () when axis is None, got {tuple(scale.shape)}")
        return
    expected = list(shape)
    expected[-2 if axis == 0 else -1] = 1
    if list(scale.shape) not in (expected, expected[-2:]):
        raise ValueError(f"scale must have shape {tuple(expected)} for axis={axis}, got {tuple(scale.shape)}")


def _check_arguments(x: Tensor, bits: int, axis: int | None, clip: object, rounding: str, nonfinite: str) -> None:
    check_bits(bits)
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"x must have a floating dtype, got {x.dtype}; QuantTensor.from_ints takes integers")
    if axis not in (None, 0, 1):
        raise ValueError(f"axis must be None, 0 or 1, got {axis!r}")
    if x.ndim < (1 if axis is None else 2):
        raise ValueError(f"x must have at least {1 if axis is None else 2} dimensions for axis={axis}, got {x.ndim}")
    number = isinstance(clip, (int, float)) and not isinstance(clip, bool)
    if not (number and 0 < float(clip) <= 100) and clip not in ("max", "mse"):  # type: ignore[arg-type]
        raise ValueError(f"clip must be 'max', 'mse' or a percentile in (0, 100], got {clip!r}")
    if rounding not in ("nearest", "trunc"):
        raise ValueError(f"rounding must be 'nearest' or 'trunc', got {rounding!r}")
    if nonfinite not in ("raise", "propagate"):
        raise ValueError(f"nonfinite must be 'raise' or 'propagate', got {nonfinite!r}")


@overload
def quantize(
    x: Tensor,
    bits: int,
    axis: int | None = None,
    signed: bool = True,
    clip: Literal["max", "mse"] | float = "max",
    rounding: Literal["nearest", "trunc"] = "nearest",
    nonfinite: Literal["raise", "propagate"] = "raise",
) -> QuantTensor: ...
@overload
def quantize(
    x: Tensor,
    bits: None = None,
    axis: int | None = None,
    *,
    nonfinite: Literal["raise", "propagate"] = "raise",
    dtype: str,
    block: Block = None,
    scale_dtype: str | None = None,
) -> FloatTensor: ...
def quantize(
    x: Tensor,
    bits: int | None = None,
    axis: int | None = None,
    signed: bool = True,
    clip: Literal["max", "mse"] | float = "max",
    rounding: Literal["nearest", "trunc"] = "nearest",
    nonfinite: Literal["raise", "propagate"] = "raise",
    *,
    dtype: str | None = None,
    block: Block = None,
    scale_dtype: str | None = None,
) -> QuantTensor | FloatTensor:
    """``q = clamp(round(x / scale))`` with ``scale = T / q_max``, so that ``x ~ scale * q``; integers or small floats.

    ``x``: floating tensor (..., M, N), any layout.  ``axis`` is the one of the last two dimensions that the threshold
    ``T`` is taken over, as in ``torch.amax``: 0 gives a scale a column (1, N), 1 a scale a row (M, 1), None one scale.
    Slices of zeros get scale 1.  The quotient is formed in double, so rows of magnitude 1e-36 keep their relative
    accuracy.  Exactly one of ``bits`` and ``dtype`` is given.

    ``bits``: integers of 4, 8, 12 or 16 bits, a :class:`QuantTensor`.  ``clip``: ``T`` is the largest magnitude, a
    percentile of the magnitudes, or the threshold of least squared error.  ``rounding``: to nearest even, or toward
    zero.  The scale is float32, or float64 for float64 input.

    ``dtype``: small floats, a
    :class:`~magicube_cutlass.quantization.float_tensor.FloatTensor`: ``"e5m2"``, ``"e4m3"``, ``"e3m2"``,
    ``"e2m3"`` or ``"e2m1"``, ``T`` the largest magnitude, rounded to the nearest value, ties to even.  ``block``: 16 or
    32 gives a scale to so many neighbours along ``axis`` (None: the last dimension), (128, 128) to each tile, with
    ``axis`` 0 laid out for the right side of a product.  ``scale_dtype``: of blocks, ``"ue8m0"`` (the default of 32),
    ``2^(floor(log2 T) - exponent of q_max)``, where the largest values may saturate; or ``"e4m3"`` (of 16), with a
    float32 scale of the tensor on top.  ``"mxfp8"``, ``"mxfp8_e5m2"``, ``"mxfp6"``, ``"mxfp6_e3m2"``, ``"mxfp4"`` and
    ``"nvfp4"`` name all three.  ``signed``, ``clip`` and ``rounding`` must keep their defaults.

    Raises ``TypeError`` for other dtypes; ``ValueError`` for bad arguments, negative entries when unsigned, and inf or
    NaN unless ``nonfinite="propagate"``, which gives such a slice scale NaN and so NaN in all that comes of it.
    On a GPU these two errors cost a wait for the device; with ``nonfinite="propagate"`` and ``signed=True`` there is
    nothing to wait for, and with ``clip="max"`` a CUDA graph can hold the call.
    Source: Li, Osawa, Hoefler, SC'22, section V-C; Gu, arXiv 2403.06924, eq. 4; OCP MX v1.0, section 6.3.
    """
    if dtype is not None:
        fixed = {
            "bits": (bits, None),
            "signed": (signed, True),
            "clip": (clip, "max"),
            "rounding": (rounding, "nearest"),
        }
        for name, (value, wanted) in fixed.items():
            if value != wanted:
                raise ValueError(f"{name} must be {wanted!r} for dtype {dtype!r}, got {value!r}")
        return quantize_floats(x, dtype, axis, block, scale_dtype, nonfinite)
    if block is not None or scale_dtype is not None:
        raise ValueError(f"dtype must be given with block and scale_dtype, got block {block!r}, scale_dtype "
                         f"{scale_dtype!r}")  # fmt: skip
    if bits is None:
        raise ValueError("bits or dtype must be given, got neither")
    _check_arguments(x, bits, axis, clip, rounding, nonfinite)
    real = x.detach()
    on_gpu = real.is_cuda and real.numel() > 0
    if real.dtype != torch.float64 and not (on_gpu and real.dtype in _HALF):
        real = real.to(torch.float32)
    if _column_major(real):
        flipped = quantize(real.mT, bits, None if axis is None else 1 - axis, signed, clip, rounding, nonfinite)
        return flipped.mT
    truncate = rounding == "trunc"
    if on_gpu:
        watched = nonfinite == "raise" or not signed
        found = torch.zeros(1, dtype=torch.int32, device=real.device) if watched else None
        pointer = 0 if found is None else found.data_ptr()
        data, scale = encode_on_gpu(real, bits, axis, signed, truncate, clip, pointer)
        flags = 0 if found is None else int(found)  # waits
    else:
        real = real.contiguous()
        given = None if clip == "max" else _clipped_scale(real, bits, axis, signed, clip)
        data, scale, flags = _encode(real, bits, axis, signed, truncate, given)
    refuse(real, flags, signed, nonfinite)
    return QuantTensor(data, scale, bits, signed, axis, x.shape)


def refuse(x: Tensor, flags: int, signed: bool, nonfinite: str = "raise") -> None:
    """Raise the ``ValueError`` that the flags of ``x`` call for."""
    if flags & engine.NONFINITE and nonfinite == "raise":
        raise ValueError(f"x must be finite, got {int((~torch.isfinite(x)).sum())} inf or nan of {x.numel()} "
                         "entries; pass nonfinite='propagate' to let them through")  # fmt: skip
    if flags & engine.NEGATIVE and not signed:
        raise ValueError(f"x must not be negative for unsigned integers, got {float(x.min())}")


def encode_on_gpu(
    x: Tensor,
    bits: int,
    axis: int | None,
    signed: bool,
    truncate: bool,
    clip: str | float = "max",
    flags: int = 0,
) -> tuple[Tensor, Tensor]:
    """Storage form of the integers, packed along the last dimension, and the scale; see
    :func:`cute_kernels.convert.quantize.quantize` for ``x``, which is not empty, and for ``flags``."""
    from cute_kernels.convert import quantize as kernels

    given = None
    if clip != "max":
        given = _clipped_scale(x.float() if x.dtype in _HALF else x, bits, axis, signed, clip)
    return kernels.quantize(x, bits=bits, signed=signed, axis=axis, truncate=truncate, scale=given, flags=flags)


def _encode(
    x: Tensor, bits: int, axis: int | None, signed: bool, truncate: bool, scale: Tensor | None
) -> tuple[Tensor, Tensor, int]:
    """Storage form of the integers, the scale, and the flags of :func:`cute_kernels.cpu.engine.quantize`."""
    if x.device.type != "cpu" or not engine.available():
        return _encode_torch(x, bits, axis, signed, truncate, scale)
    rows, columns = x.shape[-2] if x.ndim >= 2 else 1, x.shape[-1]
    matrices = (
        x.reshape(math.prod(x.shape[:-2]), rows, columns) if axis is not None else x.reshape(1, -1, max(columns, 1))
    )
    width = (x.shape[-1] + 1) // 2 if bits == 4 else x.shape[-1]
    data = torch.empty((*x.shape[:-1], width), dtype=storage_dtype(bits, signed))
    given = scale is not None
    scale = _empty_scale(x, axis) if scale is None else scale.contiguous()
    flags = 0
    for i in range(matrices.shape[0]):
        out = data.view(*matrices.shape[:2], width)[i]
        part = scale.reshape(matrices.shape[0], -1)[i] if axis is not None else scale
        flags |= engine.quantize(
            matrices[i], out, part, bits=bits, signed=signed, truncate=truncate, given=given, mode=_CHUNK_MODE[axis]
        )
    return data, scale, flags


def _empty_scale(x: Tensor, axis: int | None) -> Tensor:
    shape: list[int] = list(x.shape) if axis is not None else []
    if axis is not None:
        shape[-2 if axis == 0 else -1] = 1
    return torch.ones(shape, dtype=x.dtype, device=x.device)


def _encode_torch(
    x: Tensor, bits: int, axis: int | None, signed: bool, truncate: bool, scale: Tensor | None
) -> tuple[Tensor, Tensor, int]:
    low, high = int_range(bits, signed)
    flags = 0
    if x.numel():
        flags |= engine.NONFINITE if not bool(torch.isfinite(x).all()) else 0
        flags |= engine.NEGATIVE if bool((x < 0).any()) else 0
    if scale is None:
        scale = _scale_of(_largest(x, axis), high)
    quotient = x.double() * (1.0 / scale.double())
    rounded = torch.trunc(quotient) if truncate else torch.round(quotient)
    ints = torch.nan_to_num(rounded.clamp(low, high), nan=0.0).masked_fill(torch.isnan(scale), 0).to(torch.int32)
    return store(ints, bits, signed), scale, flags


def _largest(x: Tensor, axis: int | None) -> Tensor:
    if x.numel() == 0:
        return torch.zeros_like(_empty_scale(x, axis))
    return x.abs().amax() if axis is None else x.abs().amax(dim=-2 if axis == 0 else -1, keepdim=True)


def _scale_of(threshold: Tensor, high: int) -> Tensor:
    """``threshold / high`` in the threshold's dtype; 1 for zero, NaN for inf and NaN, never rounded down to zero."""
    tiny = torch.finfo(threshold.dtype).smallest_normal * torch.finfo(threshold.dtype).eps
    divisor = torch.full_like(threshold, high, dtype=torch.float64)  # CUDA multiplies by the inverse of a number
    scale = (threshold.double() / divisor).to(threshold.dtype).clamp(min=tiny)
    scale = torch.where(threshold == 0, torch.ones_like(scale), scale)
    return torch.where(torch.isfinite(threshold), scale, torch.full_like(scale, torch.nan))


def _clipped_scale(x: Tensor, bits: int, axis: int | None, signed: bool, clip: str | float) -> Tensor:
    """The scale for a percentile of the magnitudes or for the least squared error."""
    high = int_range(bits, signed)[1]
    largest = _largest(x, axis)
    if x.numel() == 0:
        return _scale_of(largest, high)
    if clip != "mse":
        threshold = _percentile(x.abs(), float(clip), axis)
        # A percentile of zero would lose every entry: then only the largest magnitude is a scale. Inf and NaN stay.
        return _scale_of(torch.where((threshold > 0) & torch.isfinite(largest), threshold, largest), high)
    best = _scale_of(largest, high)
    least = _squared_error(x, best, bits, axis, signed)
    for step in range(1, _MSE_STEPS):
        scale = _scale_of(largest * (step / _MSE_STEPS), high)
        error = _squared_error(x, scale, bits, axis, signed)
        best, least = torch.where(error < least, scale, best), torch.minimum(least, error)
    return best


def _percentile(magnitudes: Tensor, percent: float, axis: int | None) -> Tensor:
    """The smallest entry with at least ``percent`` of the slice at or below it; torch.quantile is limited in size."""
    slices = magnitudes.reshape(-1) if axis is None else magnitudes
    dim = -1 if axis != 0 else -2
    rank = min(slices.shape[dim], max(1, -int(-slices.shape[dim] * percent // 100)))
    return torch.kthvalue(slices, rank, dim=dim, keepdim=axis is not None).values


def _squared_error(x: Tensor, scale: Tensor, bits: int, axis: int | None, signed: bool) -> Tensor:
    low, high = int_range(bits, signed)
    error = (x - scale * torch.round(x / scale).clamp(low, high)).double().square()
    return error.sum() if axis is None else error.sum(dim=-2 if axis == 0 else -1, keepdim=True)
