"""Low-precision float formats: e5m2, e4m3, e3m2, e2m3 and e2m1 for values, ue8m0 for scales.

A code is the bits of a value in the low end of a byte: sign, exponent, mantissa. ``x = (-1)^s 2^(e - bias) (1 + f)``,
and ``(-1)^s 2^(1 - bias) f`` for ``e = 0``. Packed codes are contiguous along the last dimension, low bits first: two
e2m1 per byte, four e3m2 or e2m3 per three bytes.
Source: OCP Microscaling Formats (MX) v1.0, section 5.3; OCP 8-bit Floating Point v1.0; e4m3 has the values of
``torch.float8_e4m3fn``.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from cute_kernels.float_format import FORMATS, SCALE, FloatFormat, float_format

__all__ = [
    "FORMATS",
    "SCALE",
    "FloatFormat",
    "decode",
    "encode",
    "float_format",
    "from_torch",
    "pack",
    "packed_bytes",
    "pad16",
    "to_torch",
    "torch_dtype",
    "unpack",
    "unpad16",
]

PADDED = 16  # elements, and bytes, of a group of the padded layout


_TORCH = {"e5m2": "float8_e5m2", "e4m3": "float8_e4m3fn", "ue8m0": "float8_e8m0fnu", "e2m1": "float4_e2m1fn_x2"}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _check_bytes(x: Tensor, argument: str) -> None:
    if x.dtype != torch.uint8:
        raise TypeError(f"{argument} must be uint8, got {x.dtype}")
    if x.ndim == 0:
        raise ValueError(f"{argument} must have at least 1 dimension, got 0")


def encode(x: Tensor, dtype: str, *, saturate: bool = False) -> Tensor:
    """Round values to a format: ``code(x)`` of the nearest value, ties to the even code.

    Parameters
    ----------
    x : Tensor
        float64, float32, float16 or bfloat16, on any device; rounded once.
    dtype : str
        ``"e5m2"``, ``"e4m3"``, ``"e3m2"``, ``"e2m3"``, ``"e2m1"`` or ``"ue8m0"``.
    saturate : bool, default False
        Values above the largest become the largest. Otherwise values that round above it become infinite (e5m2) or
        NaN (e4m3, ue8m0), infinities included.

    Returns
    -------
    Tensor, shape of `x`
        uint8 codes.

    Raises
    ------
    TypeError
        If `x` has another dtype.
    ValueError
        If `dtype` is unknown.

    Notes
    -----
    e3m2, e2m3 and e2m1 have neither infinities nor NaN: they saturate, and NaN becomes the largest value, as with
    ``cvt.satfinite`` of PTX. ue8m0 has no zero, no sign and no even codes: ties go to the larger power of two, zero and
    values below 2^-127 become 2^-127, negative values NaN.

    Examples
    --------
    >>> encode(torch.tensor([1.0, -6.0, 2.4]), "e2m1").tolist()
    [2, 15, 4]
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
    """Exponent and mantissa of the magnitudes rounded to `target`, as one int32 that may exceed its codes."""
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
    """float32 (256,): values by code, NaN for bytes that are no code."""
    values = float_format(name, scale=True).values
    return torch.tensor(values + [float("nan")] * (256 - len(values)), dtype=torch.float32, device="cpu").to(device)


def decode(codes: Tensor, dtype: str, *, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of codes; exact in float32, float64 and, except for ue8m0, bfloat16.

    Parameters
    ----------
    codes : Tensor
        uint8; bytes that are no code of the format give NaN.
    dtype : str
        Format of the codes.
    out_dtype : torch.dtype, default torch.float32
        Dtype of the result.

    Returns
    -------
    Tensor, shape of `codes`

    Raises
    ------
    TypeError
        If `codes` is not uint8.
    ValueError
        If `dtype` is unknown.

    Examples
    --------
    >>> decode(torch.tensor([2, 15, 4], dtype=torch.uint8), "e2m1").tolist()
    [1.0, -6.0, 2.0]
    """
    float_format(dtype, scale=True)
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes must be uint8, got {codes.dtype}")
    return _table(dtype, codes.device)[codes.to(torch.int32)].to(out_dtype)


def packed_bytes(count: int, dtype: str) -> int:
    """Return the bytes of packed codes: ``ceil(count * bits / 8)``.

    Examples
    --------
    >>> packed_bytes(5, "e2m1"), packed_bytes(5, "e3m2")
    (3, 4)
    """
    return -(-count * float_format(dtype, scale=True).bits // 8)


def pack(codes: Tensor, dtype: str) -> Tensor:
    """Pack codes along the last dimension; leftover bits are zero.

    Parameters
    ----------
    codes : Tensor, shape (..., K)
        uint8 codes; bits above the format are dropped.
    dtype : str
        Format of the codes.

    Returns
    -------
    Tensor, shape (..., ceil(K bits / 8))
        uint8; 8-bit codes are returned as they are.

    Examples
    --------
    >>> pack(torch.tensor([2, 15, 4], dtype=torch.uint8), "e2m1").tolist()
    [242, 4]
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
    """Invert :func:`pack`.

    Parameters
    ----------
    packed : Tensor, shape (..., ceil(count bits / 8))
        uint8.
    count : int
        Codes along the last dimension.
    dtype : str
        Format of the codes.

    Returns
    -------
    Tensor, shape (..., count)

    Raises
    ------
    ValueError
        If `packed` has another number of bytes.

    Examples
    --------
    >>> unpack(torch.tensor([242, 4], dtype=torch.uint8), 3, "e2m1").tolist()
    [2, 15, 4]
    """
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
    """Pad packed codes to the layout of TMA for sm_100a: 16 codes per 16 bytes.

    16 codes of 4 bits are 8 bytes and 8 bytes of padding (``16U4_ALIGN16B``), 16 codes of 6 bits are 12 bytes and 4
    bytes of padding (``16U6_ALIGN16B``). 8-bit codes stay as they are.

    Parameters
    ----------
    packed : Tensor, shape (..., K bits / 8)
        Packed codes.
    dtype : str
        Format of the codes.

    Returns
    -------
    Tensor, shape (..., K)
        uint8; the padding is zero.

    Raises
    ------
    ValueError
        If K is no multiple of 16.

    Examples
    --------
    >>> pad16(torch.ones(8, dtype=torch.uint8), "e2m1").tolist()
    [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    """
    _check_bytes(packed, "packed")
    size = PADDED * float_format(dtype).bits // 8
    if packed.shape[-1] % size:
        raise ValueError(f"packed must have a multiple of {size} bytes for {dtype}, got {packed.shape[-1]}")
    return torch.nn.functional.pad(packed.unflatten(-1, (-1, size)), (0, PADDED - size)).flatten(-2)


def unpad16(padded: Tensor, dtype: str) -> Tensor:
    """Invert :func:`pad16`; the content of the padding is ignored.

    Examples
    --------
    >>> unpad16(pad16(torch.ones(8, dtype=torch.uint8), "e2m1"), "e2m1").tolist()
    [1, 1, 1, 1, 1, 1, 1, 1]
    """
    _check_bytes(padded, "padded")
    size = PADDED * float_format(dtype).bits // 8
    if padded.shape[-1] % PADDED:
        raise ValueError(f"padded must have a multiple of {PADDED} bytes, got {padded.shape[-1]}")
    return padded.unflatten(-1, (-1, PADDED))[..., :size].flatten(-2)


def torch_dtype(dtype: str) -> torch.dtype | None:
    """Return torch's dtype of packed codes, None if this torch has none (e3m2, e2m3).

    Examples
    --------
    >>> torch_dtype("e4m3"), torch_dtype("e3m2")
    (torch.float8_e4m3fn, None)
    """
    float_format(dtype, scale=True)
    return getattr(torch, _TORCH[dtype], None) if dtype in _TORCH else None


def to_torch(packed: Tensor, dtype: str) -> Tensor:
    """Return packed codes as a view in torch's dtype: (..., K), or (..., K / 2) pairs for e2m1.

    `NotImplementedError` if torch has no such dtype.

    Examples
    --------
    >>> to_torch(torch.tensor([56], dtype=torch.uint8), "e4m3")
    tensor([1.], dtype=torch.float8_e4m3fn)
    """
    _check_bytes(packed, "packed")
    found = torch_dtype(dtype)
    if found is None:
        raise NotImplementedError(f"dtype must be one that torch {torch.__version__} has, got {dtype!r}")
    return packed.view(found)


def from_torch(x: Tensor) -> tuple[Tensor, str]:
    """Return the packed codes of a torch tensor, a view, and their format; `TypeError` for another dtype.

    Examples
    --------
    >>> from_torch(torch.ones(1, dtype=torch.float8_e4m3fn))
    (tensor([56], dtype=torch.uint8), 'e4m3')
    """
    for name in _TORCH:
        if x.dtype == torch_dtype(name):
            return x.view(torch.uint8), name
    raise TypeError(f"x must be one of {', '.join(f'torch.{each}' for each in _TORCH.values())}, got {x.dtype}")
