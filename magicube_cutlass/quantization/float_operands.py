"""Floats as values of sparse matrices and as dense operands of their products.

A value is float16, bfloat16, e5m2, e4m3 or e2m1, in torch's own dtypes.  torch does nothing with single e2m1 values,
so one per entry they are e4m3, which holds them exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels import floats
from cute_kernels.dtypes import FLOAT_DTYPES, FLOATS, HALF_DTYPES, float_of
from cute_kernels.float_format import FloatFormat
from cute_kernels.integers import unpack4
from magicube_cutlass.checks import check_tensor
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor, quantize_floats
from magicube_cutlass.quantization.quant_tensor import QuantTensor

PACKED = FLOAT_DTYPES["e2m1"]  # two values a byte
_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES.values())


def decoded(data: Tensor, number: FloatFormat) -> Tensor:
    """float32 of values one per entry: 16-bit floats, float8, or codes as uint8."""
    if data.dtype == torch.uint8 or number.bits == 8:
        return floats.decode(data.view(torch.uint8), number.name)
    return data.to(torch.float32)


def unpacked(values: Tensor) -> Tensor:
    """e2m1 two per byte along the last dimension -> e4m3 one per entry."""
    codes = unpack4(values.view(torch.uint8), 2 * values.shape[-1], False)
    return _as_e4m3(codes)


def packed(values: Tensor) -> Tensor:
    """Inverse of :func:`unpacked`: e4m3 values that e2m1 has."""
    return floats.pack(floats.encode(decoded(values, FLOATS["e4m3"]), "e2m1"), "e2m1").view(PACKED)


def _as_e4m3(codes: Tensor) -> Tensor:
    """Codes of e2m1 as e4m3 values."""
    return floats.encode(floats.decode(codes, "e2m1"), "e4m3").view(torch.float8_e4m3fn)


def raw_bits(vectors: Tensor, number: FloatFormat) -> Tensor:
    """Values one per entry as the kernels take them: 16-bit floats as int16, codes as uint8."""
    if number.bits == 16:
        return vectors.view(torch.int16)
    if number.bits == 8:
        return vectors.view(torch.uint8)
    return floats.encode(decoded(vectors, FLOATS["e4m3"]), number.name)


class Values(NamedTuple):
    """A dense matrix (M, K) before its conversion to a sparse one."""

    values: Tensor  # (M, K), one per entry
    scale: Tensor | None  # float32 () or (M, 1)
    packed: bool  # e2m1 as e4m3
    nonzero: Tensor  # bool (M, K), decided before any rounding


def float_values(x: Tensor | ScaledFloatTensor, dtype: str | None, axis: int | None, mask: Tensor | None) -> Values:
    """Return the values of a dense matrix in a format of the sparse products, zero outside of `mask`.

    Parameters
    ----------
    x : Tensor or ScaledFloatTensor, shape (M, K)
        A ScaledFloatTensor keeps its scales, a float8 tensor has none; float16 to float64 tensors are converted.
    dtype : str or None
        Format for float16 to float64 tensors: float16 and bfloat16 are rounded without a scale, others quantized.
    axis : int or None
        None for a per-tensor scale, 1 for per-row scales.
    mask : Tensor, shape (M, K), or None
        bool; false elements are zero before their scale is computed.

    Raises
    ------
    TypeError, ValueError
        If `dtype` or `axis` does not fit `x`.
    """
    if isinstance(x, ScaledFloatTensor):
        return _of_codes(x, dtype, mask)
    known = float_of(x.dtype)
    if known is not None and known.bits == 8:
        if dtype not in (None, known.name):
            raise ValueError(f"dtype must be {known.name!r} for values of {x.dtype}, got {dtype!r}")
        selected = x if mask is None else _masked(x, mask)
        return Values(selected, None, False, decoded(x, known) != 0)
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be one of {', '.join(FLOATS)}, got {dtype!r}")
    if not x.is_floating_point() or x.dtype == PACKED:
        raise TypeError("values must be a ScaledFloatTensor or of float16, bfloat16, float32 or float64 for dtype "
                        f"{dtype!r}, got {x.dtype}")  # fmt: skip
    x = x.detach() if mask is None else x.detach().masked_fill(~mask, 0)
    if dtype in HALF_DTYPES:
        if axis is not None:
            raise ValueError(f"axis must be None for dtype {dtype!r}, which has no scale, got {axis!r}")
        return Values(x.to(FLOAT_DTYPES[dtype]), None, False, x != 0)
    assert dtype is not None
    if axis not in (None, 1):
        raise ValueError(f"axis must be None (one scale) or 1 (one scale per row), got {axis!r}")
    return _of_codes(quantize_floats(x, dtype, axis), dtype, None)._replace(nonzero=x != 0)


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    return values.view(torch.uint8).masked_fill(~mask, 0).view(values.dtype)


def _of_codes(x: ScaledFloatTensor, dtype: str | None, mask: Tensor | None) -> Values:
    number, scale = _format_of("values", x), x.scale
    if dtype not in (None, number.name):
        raise ValueError(f"dtype must be {number.name!r} for a ScaledFloatTensor of it, got {dtype!r}")
    if len(x.shape) != 2:
        raise ValueError(f"values must have 2 dimensions, got {len(x.shape)} (shape {tuple(x.shape)})")
    if x.axis == 0:
        raise ValueError("values must have one scale or one a row, got one a column, which varies along the sum of a "
                         "product: quantize(x, dtype=..., scale='row')")  # fmt: skip
    codes = x.codes().contiguous()
    codes = codes if mask is None else codes.masked_fill(~mask, 0)
    values = _as_e4m3(codes) if number.bits == 4 else codes.view(FLOAT_DTYPES[number.name])
    return Values(values, scale, number.bits == 4, floats.decode(codes, number.name) != 0)


def _format_of(name: str, x: ScaledFloatTensor) -> FloatFormat:
    if x.block is not None:
        raise ValueError(f"{name} must have one scale or one per row or column, got scales of blocks {x.block!r}")
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} must be of {', '.join(FLOATS)}, got {x.dtype}")
    return FLOATS[x.dtype]


@dataclass(frozen=True, eq=False)
class DenseFloats:
    """A dense operand of floats with the attributes of a :class:`QuantTensor`.

    `data` holds 16-bit floats, or uint8 codes, two per byte along `packed_dim` for e2m1.
    """

    data: Tensor
    element_type: FloatFormat
    scale: Tensor | None
    axis: int | None
    shape: torch.Size
    packed_dim: int = -1

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.data.device

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return self.element_type.bits

    @property
    def signed(self) -> bool:
        """True: floats have a sign."""
        return True


def dense_operand(name: str, x: object) -> QuantTensor | DenseFloats:
    """Return `x` as a dense operand; `TypeError` that lists the supported types."""
    if isinstance(x, QuantTensor):
        return x
    if isinstance(x, ScaledFloatTensor):
        number, swap = _format_of(name, x), x.transposed
        scale = x.scale.mT if swap and x.scale.ndim else x.scale
        return DenseFloats(x.data.mT if swap else x.data, number, scale, x.axis, x.shape, -2 if swap else -1)
    found = float_of(x.dtype) if isinstance(x, Tensor) else None
    if found is None or not isinstance(x, Tensor):
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a QuantTensor (see quantize, QuantTensor.from_ints), a ScaledFloatTensor or a "
                        f"tensor of {_NAMES}, got {kind}")  # fmt: skip
    check_tensor(name, x)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, which this product does not give: {name}.detach(), or "
                         "magicube_cutlass.autograd.spmm and sddmm")  # fmt: skip
    data = x.detach()
    if found.bits == 16:
        return DenseFloats(data, found, None, None, x.shape)
    size = torch.Size((*x.shape[:-1], 2 * x.shape[-1])) if found.bits == 4 else x.shape
    return DenseFloats(data.view(torch.uint8), found, None, None, size)


def dense_values(data: Tensor, number: FloatFormat, length: int, packed_dim: int) -> Tensor:
    """Return a dense operand as float32; `length`: values along the packed dimension."""
    return decoded(unpack4(data, length, False, packed_dim) if number.bits == 4 else data, number)
