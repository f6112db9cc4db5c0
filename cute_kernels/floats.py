"""Small floating-point formats: e5m2, e4m3, e3m2, e2m3 and e2m1 for values, ue8m0 for scales.

A code is the format's bits in the low end of a byte: sign, exponent, mantissa.  ``x = (-1)^s 2^(e - bias) (1 + f)``,
and ``(-1)^s 2^(1 - bias) f`` for ``e = 0``.  Packed, codes lie one after the other along the last dimension, low bits
first: two e2m1 a byte, four e3m2 or e2m3 in three bytes.
Source: OCP Microscaling Formats (MX) v1.0, section 5.3; OCP 8-bit Floating Point v1.0; the values of e4m3 are those of
``torch.float8_e4m3fn``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

PADDED = 16  # elements, and bytes, of a group of the padded layout


@dataclass(frozen=True)
class FloatFormat:
    """``exponent`` and ``mantissa`` bits, and what the largest exponent holds: ``"ieee"`` infinities and NaN, ``"nan"``
    one NaN of all ones beside numbers, ``"finite"`` numbers only."""

    name: str
    exponent: int
    mantissa: int
    bias: int
    special: str
    signed: bool = True

    @property
    def bits(self) -> int:
        return int(self.signed) + self.exponent + self.mantissa

    @property
    def values(self) -> list[float]:
        """The value of every code."""
        return [self._value(code) for code in range(1 << self.bits)]

    @property
    def largest_code(self) -> int:
        """The code of the largest finite value."""
        top = (1 << (self.exponent + self.mantissa)) - 1
        return top - {"ieee": 1 << self.mantissa, "nan": 1, "finite": 0}[self.special]

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return self._value(self.largest_code)

    @property
    def largest_exponent(self) -> int:
        """Of the power of two in the largest value."""
        return (self.largest_code >> self.mantissa) - self.bias

    def _value(self, code: int) -> float:
        magnitude = code & ((1 << (self.exponent + self.mantissa)) - 1)
        sign = -1.0 if magnitude != code else 1.0
        exponent, fraction = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        if magnitude > self.largest_code:
            return sign * float("inf") if self.special == "ieee" and fraction == 0 else float("nan")
        if exponent == 0 and self.signed:
            return sign * float(fraction) * 2.0 ** (1 - self.bias - self.mantissa)
        return sign * (1 + fraction / 2**self.mantissa) * 2.0 ** (exponent - self.bias)


FORMATS = {
    each.name: each
    for each in (
        FloatFormat("e5m2", 5, 2, 15, "ieee"),
        FloatFormat("e4m3", 4, 3, 7, "nan"),
        FloatFormat("e3m2", 3, 2, 3, "finite"),
        FloatFormat("e2m3", 2, 3, 1, "finite"),
        FloatFormat("e2m1", 2, 1, 1, "finite"),
    )
}
SCALE = FloatFormat("ue8m0", 8, 0, 127, "nan", signed=False)
_TORCH = {"e5m2": "float8_e5m2", "e4m3": "float8_e4m3fn", "ue8m0": "float8_e8m0fnu", "e2m1": "float4_e2m1fn_x2"}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def float_format(name: str, argument: str = "dtype", *, scale: bool = False) -> FloatFormat:
    """The format of this name; ``scale`` allows ue8m0 too.  Raises ``ValueError`` that lists the names."""
    known = FORMATS | ({SCALE.name: SCALE} if scale else {})
    if name not in known:
        raise ValueError(f"{argument} must be one of {', '.join(known)}, got {name!r}")
    return known[name]


def _check_bytes(x: Tensor, argument: str) -> None:
    if x.dtype != torch.uint8:
        raise TypeError(f"{argument} must be uint8, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError(f"{argument} must have at least 1 dimension, got 0")


def encode(x: Tensor, dtype: str, *, saturate: bool = False) -> Tensor:
    """The code of the nearest value, ties to the even code: uint8 of the shape of ``x``.

    Arguments:
        x: float64, float32, float16 or bfloat16, on any device; rounded once.
        dtype: ``"e5m2"``, ``"e4m3"``, ``"e3m2"``, ``"e2m3"``, ``"e2m1"`` or ``"ue8m0"``.
        saturate: values beyond the largest one become that.  Otherwise those that round beyond it become infinite
            (e5m2) or NaN (e4m3, ue8m0), infinities too.
    e3m2, e2m3 and e2m1 have neither infinities nor NaN: they always saturate, and NaN becomes the largest value, as in
    ``cvt.satfinite`` of PTX.  ue8m0 has no zero, no sign and no even codes: ties go to the larger power of two, zero
    and what is smaller than 2^-127 becomes 2^-127, negative values NaN.
    Raises ``TypeError`` for other dtypes of ``x``, ``ValueError`` for an unknown ``dtype``.
    """
    target = float_format(dtype, scale=True)
    if x.dtype not in _FLOATS:
        raise TypeError(f"x must be one of {', '.join(map(str, _FLOATS))}, got {x.dtype}")
    real = x.detach()
    if not target.signed:
        return _encode_power(real, target, saturate)
    real = real if real.dtype == torch.float64 else real.to(torch.float32)
    found = _round(real.abs(), target)
    beyond = target.largest_code + (0 if saturate or target.special == "finite" else 1)
    found = torch.where(found > target.largest_code, beyond, found)
    found |= torch.signbit(real).to(torch.int32) << (target.bits - 1)
    not_a_number = target.largest_code if target.special == "finite" else (1 << (target.bits - 1)) - 1
    return torch.where(real.isnan(), not_a_number, found).to(torch.uint8)


def _round(x: Tensor, target: FloatFormat) -> Tensor:
    """Exponent and mantissa of the magnitudes ``x`` rounded to ``target``, as one int32 that may exceed its codes."""
    width, bias, ints = (52, 1023, torch.int64) if x.dtype == torch.float64 else (23, 127, torch.int32)
    smallest = 1 - target.bias  # exponent below which values are equally spaced
    largest = target.largest_exponent + 1  # beyond the format, whatever the mantissa
    exponent = ((x.view(ints) >> width) - bias).clamp(smallest, largest)
    inverse = ((target.mantissa - exponent + bias) << width).view(x.dtype)  # of the distance of neighbours
    steps = torch.round(x.clamp(max=2.0**largest) * inverse)  # to even; exact before that
    return (((exponent - smallest) << target.mantissa) + torch.nan_to_num(steps).to(ints)).to(torch.int32)


def _encode_power(x: Tensor, target: FloatFormat, saturate: bool) -> Tensor:
    """Codes of powers of two."""
    wide = x.to(torch.float64)
    exponent = ((wide.abs().view(torch.int64) >> 52) - 1023).clamp(-target.bias, target.bias)
    power = ((exponent + 1023) << 52).view(torch.float64)
    found = exponent + target.bias + (wide >= 1.5 * power)
    if saturate:
        found = found.clamp(max=target.largest_code)
    return torch.where(wide.isnan() | (wide < 0), target.largest_code + 1, found).to(torch.uint8)


@lru_cache
def _table(name: str, device: torch.device) -> Tensor:
    """float32 (256,): values by code, NaN where there is no such code."""
    values = float_format(name, scale=True).values
    return torch.tensor(values + [float("nan")] * (256 - len(values)), dtype=torch.float32).to(device)


def decode(codes: Tensor, dtype: str, *, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of ``codes``, uint8 of any shape; exact in float32, float64 and, but for ue8m0, bfloat16.

    Bytes that are no code of the format, such as 16 for e2m1, give NaN.
    Raises ``TypeError`` unless ``codes`` is uint8, ``ValueError`` for an unknown ``dtype``.
    """
    float_format(dtype, scale=True)
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes must be uint8, got {codes.dtype}")
    return _table(dtype, codes.device)[codes.to(torch.int32)].to(out_dtype)


def packed_bytes(count: int, dtype: str) -> int:
    """Bytes of ``count`` packed codes."""
    return -(-count * float_format(dtype, scale=True).bits // 8)


def pack(codes: Tensor, dtype: str) -> Tensor:
    """``codes`` (..., K) packed along the last dimension: (..., ceil(K bits / 8)), zeros in the bits that are left.

    Requires codes of the format: bits above it are cut off.  8-bit codes are returned as they are.
    """
    _check_bytes(codes, "codes")
    bits = float_format(dtype, scale=True).bits
    if bits == 8:
        return codes
    count = codes.shape[-1]
    group = 2 if bits == 4 else 4  # codes of a whole number of bytes
    full = torch.nn.functional.pad(codes, (0, -count % group)).unflatten(-1, (-1, group)).to(torch.int32)
    shifts = torch.arange(group, dtype=torch.int32, device=codes.device) * bits
    words = ((full & ((1 << bits) - 1)) << shifts).sum(-1, dtype=torch.int32)  # (..., groups)
    places = torch.arange(group * bits // 8, dtype=torch.int32, device=codes.device) * 8
    return (
        ((words[..., None] >> places) & 255).to(torch.uint8).flatten(-2)[..., : packed_bytes(count, dtype)].contiguous()
    )


def unpack(packed: Tensor, count: int, dtype: str) -> Tensor:
    """Inverse of :func:`pack`: codes (..., count).  Raises ``ValueError`` for another number of bytes."""
    _check_bytes(packed, "packed")
    bits = float_format(dtype, scale=True).bits
    if packed.shape[-1] != packed_bytes(count, dtype):
        raise ValueError(f"packed must have {packed_bytes(count, dtype)} bytes for {count} codes of {dtype}, "
                         f"got {packed.shape[-1]}")  # fmt: skip
    if bits == 8:
        return packed
    group = 2 if bits == 4 else 4
    size = group * bits // 8
    full = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % size)).unflatten(-1, (-1, size)).to(torch.int32)
    places = torch.arange(size, dtype=torch.int32, device=packed.device) * 8
    words = (full << places).sum(-1, dtype=torch.int32)  # (..., groups)
    shifts = torch.arange(group, dtype=torch.int32, device=packed.device) * bits
    codes = ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8)
    return codes.flatten(-2)[..., :count].contiguous()


def pad16(packed: Tensor, dtype: str) -> Tensor:
    """Packed codes (..., K bits / 8) as the copy engine lays them out for sm_100a: (..., K), 16 codes in 16 bytes.

    16 codes of 4 bits are 8 bytes and 8 of padding (``16U4_ALIGN16B``), 16 of 6 bits 12 bytes and 4 of padding
    (``16U6_ALIGN16B``); the padding is zero here.  8-bit codes stay as they are.
    Raises ``ValueError`` unless the bytes are those of a multiple of 16 codes.
    """
    _check_bytes(packed, "packed")
    size = PADDED * float_format(dtype).bits // 8
    if packed.shape[-1] % size:
        raise ValueError(f"packed must have a multiple of {size} bytes for {dtype}, got {packed.shape[-1]}")
    return torch.nn.functional.pad(packed.unflatten(-1, (-1, size)), (0, PADDED - size)).flatten(-2)


def unpad16(padded: Tensor, dtype: str) -> Tensor:
    """Inverse of :func:`pad16`; what the padding holds does not matter."""
    _check_bytes(padded, "padded")
    size = PADDED * float_format(dtype).bits // 8
    if padded.shape[-1] % PADDED:
        raise ValueError(f"padded must have a multiple of {PADDED} bytes, got {padded.shape[-1]}")
    return padded.unflatten(-1, (-1, PADDED))[..., :size].flatten(-2)


def torch_dtype(dtype: str) -> torch.dtype | None:
    """torch's dtype of packed codes of this format, None where this torch has none (e3m2, e2m3)."""
    float_format(dtype, scale=True)
    return getattr(torch, _TORCH[dtype], None) if dtype in _TORCH else None


def to_torch(packed: Tensor, dtype: str) -> Tensor:
    """Packed codes as a view in torch's dtype: (..., K), or (..., K / 2) pairs for e2m1.

    Raises ``NotImplementedError`` where torch has no such dtype.
    """
    _check_bytes(packed, "packed")
    found = torch_dtype(dtype)
    if found is None:
        raise NotImplementedError(f"dtype must be one that torch {torch.__version__} has, got {dtype!r}")
    return packed.view(found)


def from_torch(x: Tensor) -> tuple[Tensor, str]:
    """Packed codes, a view of ``x``, and their format.  Raises ``TypeError`` for dtypes of no format here."""
    for name in _TORCH:
        if x.dtype == torch_dtype(name):
            return x.view(torch.uint8), name
    raise TypeError(f"x must be one of {', '.join(f'torch.{each}' for each in _TORCH.values())}, got {x.dtype}")
