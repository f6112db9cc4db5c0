"""Symmetric quantization of dense tensors: ``x = scale * q`` with integers of 4, 8, 12 or 16 bits."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from cute_kernels.cpu import engine, extension
from cute_kernels.integers import STORAGE_DTYPES, check_bits, int_range, store
from cute_kernels.watch import watched
from magicube_cutlass.checks import (
    NOT_GIVEN,
    Granularity,
    axis_of,
    is_transformed,
    materialized,
    transform_error,
)
from magicube_cutlass.quantization.float_tensor import Block, ScaledFloatTensor, quantize_floats
from magicube_cutlass.quantization.quant_tensor import QuantTensor, _column_major

__all__ = ["encode_on_gpu", "quantize", "quantize_along", "refuse"]

_PIECE = 2**16  # entries whose intermediate results stay in cache
_MSE_STEPS = 60  # clip thresholds tried, from max|x| / 60 to max|x|
_CHUNK_MODE = {None: 0, 1: 1, 0: 2}
_HALF = (torch.float16, torch.bfloat16)


def _check_arguments(x: Tensor, bits: int, axis: int | None, clip: object, rounding: str, nonfinite: str) -> None:
    check_bits(bits)
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    if not torch.compiler.is_compiling() and is_transformed(x):
        raise transform_error("x")
    if not x.is_floating_point():
        raise TypeError(f"x must have a floating dtype, got {x.dtype}; QuantTensor.from_ints takes integers")
    if axis not in (None, 0, 1):
        raise ValueError(f"axis must be None, 0 or 1, got {axis!r}")
    if x.ndim < (1 if axis is None else 2):
        scale = {None: "tensor", 0: "column", 1: "row"}[axis]
        least = 1 if axis is None else 2
        raise ValueError(f"x must have at least {least} dimensions for scale={scale!r}, got {x.ndim}")
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
    scale: Granularity | None = None,
    signed: bool = True,
    clip: Literal["max", "mse"] | float = "max",
    rounding: Literal["nearest", "trunc"] = "nearest",
    nonfinite: Literal["raise", "propagate"] = "raise",
    *,
    axis: int | None = ...,
) -> QuantTensor: ...
@overload
def quantize(
    x: Tensor,
    bits: None = None,
    scale: Granularity | None = None,
    *,
    nonfinite: Literal["raise", "propagate"] = "raise",
    dtype: str,
    block: Block = None,
    scale_dtype: str | None = None,
    axis: int | None = ...,
) -> ScaledFloatTensor: ...
@watched("magicube_cutlass.quantize")
def quantize(
    x: Tensor,
    bits: int | None = None,
    scale: Granularity | None = None,
    signed: bool = True,
    clip: Literal["max", "mse"] | float = "max",
    rounding: Literal["nearest", "trunc"] = "nearest",
    nonfinite: Literal["raise", "propagate"] = "raise",
    *,
    dtype: str | None = None,
    block: Block = None,
    scale_dtype: str | None = None,
    axis: int | None = NOT_GIVEN,
) -> QuantTensor | ScaledFloatTensor:
    """Quantize a float tensor to integers or low-precision floats: ``q = clamp(round(x / scale))``, ``x = scale * q``.

    The scale is ``T / q_max``; 1 for slices of zeros. The quotient is formed in float64, so rows of magnitude 1e-36
    keep their relative accuracy. Exactly one of `bits` and `dtype` is given.

    Parameters
    ----------
    x : Tensor, shape (..., M, N)
        Float tensor of any memory order.
    bits : int, optional
        4, 8, 12 or 16: integers, a :class:`QuantTensor`.
    scale : {"tensor", "row", "column"}, default "tensor"
        What shares a scale: the whole of `x` (), a row (M, 1) or a column (1, N).
    signed : bool, default True
        Two's complement if true.
    clip : float or {"max", "mse"}, default "max"
        T is the amax, a percentile of the magnitudes in (0, 100], or the threshold of least squared error.
    rounding : {"nearest", "trunc"}, default "nearest"
        To nearest even, or toward zero.
    nonfinite : {"raise", "propagate"}, default "raise"
        Whether inf and NaN are an error, or give their slice the scale NaN. In a compiled graph and in a CUDA graph,
        which cannot wait for values, they always give the scale NaN.
    dtype : str, optional
        ``"e5m2"``, ``"e4m3"``, ``"e3m2"``, ``"e2m3"`` or ``"e2m1"``: a :class:`ScaledFloatTensor`, rounded to nearest
        even. ``"mxfp8"``, ``"mxfp8_e5m2"``, ``"mxfp6"``, ``"mxfp6_e3m2"``, ``"mxfp4"``, ``"nvfp4"``, ``"e4m3_b128"``
        (128 x 128 tiles) and ``"e4m3_g128"`` (128 of a row) also name `block` and `scale_dtype`. `signed`, `clip` and
        `rounding` keep their defaults.
    block : int or tuple of int, optional
        16, 32 or 128: a scale per so many elements of a row (default) or, with ``scale="column"``, of a column, as the
        right operand of a product has them. (128, 128): a scale per tile. Scales of 128 are float32.
    scale_dtype : str, optional
        Format of block scales: ``"ue8m0"`` (default for 32), ``2^(floor(log2 T) - exponent of q_max)``, where the
        largest values can saturate; or ``"e4m3"`` (for 16) with a float32 scale of the tensor.
    axis : int, optional
        Deprecated: 0 for ``scale="column"``, 1 for ``scale="row"``.

    Returns
    -------
    QuantTensor or ScaledFloatTensor
        Scales are float32, float64 for float64 input.

    Raises
    ------
    TypeError
        If `x` is no float tensor.
    NotImplementedError
        For unsigned integers in a graph, and in a compiled one for another `clip` or `rounding` than the default.
    ValueError
        For bad arguments, negative entries of unsigned integers, and non-finite entries. On a GPU the last two need a
        wait for the device; ``nonfinite="propagate"`` with ``signed=True`` needs none, and a CUDA graph can hold it.

    References
    ----------
    .. [1] Li, Osawa, Hoefler, SC'22, section V-C.
    .. [2] Gu, arXiv 2403.06924, equations 1 and 2.
    .. [3] OCP Microscaling Formats (MX) v1.0, section 6.3.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> q = mc.quantize(torch.tensor([[1.0, -0.5], [0.25, 0.1]]), bits=8, scale="row")
    >>> q.ints().tolist()
    [[127, -64], [127, 51]]
    """
    along = axis_of(scale, axis)
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
        return quantize_floats(x, dtype, along, block, scale_dtype, nonfinite)
    if block is not None or scale_dtype is not None:
        raise ValueError(f"dtype must be given with block and scale_dtype, got block {block!r}, scale_dtype "
                         f"{scale_dtype!r}")  # fmt: skip
    if bits is None:
        raise ValueError("bits or dtype must be given, got neither")
    return quantize_along(x, bits, along, signed, clip, rounding, nonfinite)


def quantize_along(
    x: Tensor,
    bits: int,
    axis: int | None,
    signed: bool = True,
    clip: Literal["max", "mse"] | float = "max",
    rounding: Literal["nearest", "trunc"] = "nearest",
    nonfinite: Literal["raise", "propagate"] = "raise",
) -> QuantTensor:
    """As :func:`quantize` to integers; `axis` is that over which T is taken, None for a per-tensor scale."""
    _check_arguments(x, bits, axis, clip, rounding, nonfinite)
    if torch.compiler.is_compiling():
        return _quantize_compiled(
            x, bits, axis, {"signed": (signed, True), "clip": (clip, "max"), "rounding": (rounding, "nearest")}
        )
    real = materialized(x.detach())
    on_gpu = real.is_cuda and real.numel() > 0
    if real.dtype != torch.float64 and not (on_gpu and real.dtype in _HALF):
        real = real.to(torch.float32)
    if _column_major(real):
        flipped = quantize_along(real.mT, bits, None if axis is None else 1 - axis, signed, clip, rounding, nonfinite)
        return flipped.mT
    truncate = rounding == "trunc"
    if on_gpu:
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing and not signed:
            raise NotImplementedError("signed must be True in a CUDA graph, got False: no entry can be looked at there")
        watched = (nonfinite == "raise" or not signed) and not capturing
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


def _quantize_compiled(x: Tensor, bits: int, axis: int | None, fixed: dict[str, tuple[object, object]]) -> QuantTensor:
    """As :func:`quantize` in a compiled graph, by the torch operator."""
    for name, (value, wanted) in fixed.items():
        if value != wanted:
            raise NotImplementedError(f"{name} must be {wanted!r} in a compiled graph, got {value!r}")
    if _column_major(x):
        return _quantize_compiled(x.mT, bits, None if axis is None else 1 - axis, {}).mT
    data, scale = torch.ops.magicube.quantize(x.detach(), bits, axis)
    return QuantTensor(data, scale, bits, True, axis, x.shape)


def refuse(x: Tensor, flags: int, signed: bool, nonfinite: str = "raise") -> None:
    """Raise `ValueError` if the flags of `x` say so: non-finite entries, or negative ones for unsigned integers."""
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
    """Return storage form and scale of a CUDA tensor, as :func:`cute_kernels.convert.quantize.quantize`."""
    from cute_kernels.convert import quantize as kernels

    given = None
    if clip != "max":
        given = _clipped_scale(x.float() if x.dtype in _HALF else x, bits, axis, signed, clip)
    return kernels.quantize(x, bits=bits, signed=signed, axis=axis, truncate=truncate, scale=given, flags=flags)


def _encode(
    x: Tensor, bits: int, axis: int | None, signed: bool, truncate: bool, scale: Tensor | None
) -> tuple[Tensor, Tensor, int]:
    """Storage form of the integers, the scale, and the flags of :func:`cute_kernels.cpu.engine.quantize_cpu`."""
    if x.device.type != "cpu" or extension.ENGINE is None or x.numel() == 0:
        return _encode_torch(x, bits, axis, signed, truncate, scale)
    rows, columns = x.shape[-2] if x.ndim >= 2 else 1, x.shape[-1]
    matrices = (
        x.reshape(math.prod(x.shape[:-2]), rows, columns) if axis is not None else x.reshape(1, -1, max(columns, 1))
    )
    width = (x.shape[-1] + 1) // 2 if bits == 4 else x.shape[-1]
    data = torch.empty((*x.shape[:-1], width), dtype=STORAGE_DTYPES[bits, signed], device="cpu")
    given = scale is not None
    scale = _empty_scale(x, axis) if scale is None else scale.contiguous()
    flags = 0
    for i in range(matrices.shape[0]):
        out = data.view(*matrices.shape[:2], width)[i]
        part = scale.reshape(matrices.shape[0], -1)[i] if axis is not None else scale
        flags |= engine.quantize_cpu(
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
    """``threshold / high``: 1 for zero, NaN for non-finite values, never rounded to zero."""
    tiny = torch.finfo(threshold.dtype).smallest_normal * torch.finfo(threshold.dtype).eps
    divisor = torch.full_like(threshold, high, dtype=torch.float64)  # CUDA multiplies by the inverse of a number
    scale = (threshold.double() / divisor).to(threshold.dtype).clamp(min=tiny)
    scale = torch.where(threshold == 0, torch.ones_like(scale), scale)
    return torch.where(torch.isfinite(threshold), scale, torch.full_like(scale, torch.nan))


def _clipped_scale(x: Tensor, bits: int, axis: int | None, signed: bool, clip: str | float) -> Tensor:
    """Scale for a percentile of the magnitudes, or for the least squared error."""
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
    """Smallest entry with at least `percent` of the slice at or below it; torch.quantile has a size limit."""
    slices = magnitudes.reshape(-1) if axis is None else magnitudes
    dim = -1 if axis != 0 else -2
    rank = min(slices.shape[dim], max(1, -int(-slices.shape[dim] * percent // 100)))
    return torch.kthvalue(slices, rank, dim=dim, keepdim=axis is not None).values


def _squared_error(x: Tensor, scale: Tensor, bits: int, axis: int | None, signed: bool) -> Tensor:
    """Sum of squared errors of the entries that share a scale, float64; a CPU takes some rows at a time."""
    low, high = int_range(bits, signed)

    def of_rows(rows: Tensor, own: Tensor) -> Tensor:
        error = (rows - own * torch.round(rows / own).clamp(low, high)).double().square()
        return error.sum() if axis is None else error.sum(dim=-2 if axis == 0 else -1, keepdim=True)

    if x.ndim < 2 or x.device.type != "cpu" or x.numel() <= _PIECE:
        return of_rows(x, scale)
    step = max(1, _PIECE * x.shape[-2] // x.numel())
    parts = [
        of_rows(x[..., i : i + step, :], scale[..., i : i + step, :] if axis == 1 else scale)
        for i in range(0, x.shape[-2], step)
    ]
    return torch.cat(parts, -2) if axis == 1 else torch.stack(parts).sum(0)
