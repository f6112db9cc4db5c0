"""Integers of 4, 8, 12 and 16 bits: ranges, storage, digits and the overflow bound.

A `bits`-bit integer is stored in the smallest torch dtype that holds it; 4-bit integers are packed two per byte, low
nibble first. For 8-bit multipliers an integer is split into digits of 8 bits: the lower ones are unsigned, the top one
has the sign of the integer, ``x = sum_i d_i 2^(8 i)``. A product of digit planes is exact in 32 bits.
Source: Li, Osawa, Hoefler, SC'22, section IV-D (emulation of mixed precision).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "BITS",
    "DIGIT_BITS",
    "STORAGE_DTYPES",
    "check_bits",
    "check_range",
    "combine_digits",
    "digit_count",
    "digit_signs",
    "fetch",
    "fits",
    "int_range",
    "is_integer",
    "pack4",
    "product_bound",
    "split_digits",
    "storage_dtype",
    "store",
    "unpack4",
    "value_dtype",
    "widen",
]

BITS = (4, 8, 12, 16)
DIGIT_BITS = 8

STORAGE_DTYPES = {
    (4, True): torch.uint8,  # packed, two per byte
    (4, False): torch.uint8,
    (8, True): torch.int8,
    (8, False): torch.uint8,
    (12, True): torch.int16,
    (12, False): torch.int16,
    (16, True): torch.int16,
    (16, False): torch.uint16,
}


def check_bits(bits: int, name: str = "bits") -> None:
    """Raise `ValueError` unless `bits` is one of 4, 8, 12, 16; `name` is the argument in the message.

    Examples
    --------
    >>> check_bits(3)
    Traceback (most recent call last):
    ValueError: bits must be one of (4, 8, 12, 16), got 3
    """
    if bits not in BITS:
        raise ValueError(f"{name} must be one of {BITS}, got {bits!r}")


_RANGES = {
    (bits, signed): (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    for bits in BITS
    for signed in (True, False)
}


def int_range(bits: int, signed: bool) -> tuple[int, int]:
    """Return the smallest and largest integer of a width.

    Examples
    --------
    >>> int_range(4, True), int_range(8, False)
    ((-8, 7), (0, 255))
    """
    check_bits(bits)
    return _RANGES[bits, signed]


def storage_dtype(bits: int, signed: bool) -> torch.dtype:
    """Return the torch dtype in which integers are stored: uint8 with two per byte for 4 bits.

    Examples
    --------
    >>> storage_dtype(12, True)
    torch.int16
    """
    check_bits(bits)
    return STORAGE_DTYPES[bits, signed]


def value_dtype(bits: int, signed: bool) -> torch.dtype:
    """Return the torch dtype of unpacked integers: that of :func:`storage_dtype`, one 4-bit integer per byte.

    Examples
    --------
    >>> value_dtype(4, True), value_dtype(16, False)
    (torch.int8, torch.uint16)
    """
    return (torch.int8 if signed else torch.uint8) if bits == 4 else storage_dtype(bits, signed)


def widen(ints: Tensor) -> Tensor:
    """Return integers as int64, uint16 included.

    Examples
    --------
    >>> widen(torch.tensor([65535], dtype=torch.uint16))
    tensor([65535])
    """
    if ints.dtype == torch.uint16:
        return ints.view(torch.int16).to(torch.int64) & 0xFFFF
    return ints.to(torch.int64)


def _narrow(ints: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.uint16:
        return ints.to(torch.int16).view(torch.uint16)  # two's complement wraps to the same 16 bits
    return ints.to(dtype)


def is_integer(dtype: torch.dtype) -> bool:
    """Return whether a torch dtype is an integer dtype; bool, float and complex dtypes are not.

    Examples
    --------
    >>> is_integer(torch.uint16), is_integer(torch.bool)
    (True, False)
    """
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def check_range(ints: Tensor, bits: int, signed: bool, name: str = "ints") -> None:
    """Raise unless all integers fit a width.

    Raises
    ------
    TypeError
        If `ints` has no integer dtype.
    ValueError
        If a value is out of range.

    Examples
    --------
    >>> check_range(torch.tensor([9]), 4, True)
    Traceback (most recent call last):
    ValueError: ints must lie in [-8, 7] for signed 4-bit integers, got values in [9, 9]
    """
    if not is_integer(ints.dtype):
        raise TypeError(f"{name} must have an integer dtype, got {ints.dtype}")
    if ints.numel() == 0:
        return
    low, high = int_range(bits, signed)
    wide = ints if ints.dtype in (torch.int8, torch.int16, torch.int32, torch.int64) else widen(ints)
    smallest, largest = (int(x) for x in torch.aminmax(wide))
    if smallest < low or largest > high:
        kind = "signed" if signed else "unsigned"
        raise ValueError(
            f"{name} must lie in [{low}, {high}] for {kind} {bits}-bit integers, got values in [{smallest}, {largest}]"
        )


def pack4(ints: Tensor, dim: int = -1) -> Tensor:
    """Pack 4-bit integers two per byte along a dimension, low nibble first.

    Parameters
    ----------
    ints : Tensor, shape (..., n, ...)
        Integers in range.
    dim : int, default -1
        Dimension of size n.

    Returns
    -------
    Tensor, shape (..., ceil(n / 2), ...)
        uint8; an odd n gets a zero nibble.

    Examples
    --------
    >>> pack4(torch.tensor([1, -1, 2])).tolist()
    [241, 2]
    """
    x = ints.movedim(dim, -1).to(torch.uint8) & 0xF
    if x.shape[-1] % 2:
        x = torch.nn.functional.pad(x, (0, 1))
    return (x[..., 0::2] | (x[..., 1::2] << 4)).movedim(-1, dim)


def unpack4(packed: Tensor, length: int, signed: bool, dim: int = -1) -> Tensor:
    """Invert :func:`pack4`.

    Parameters
    ----------
    packed : Tensor, shape (..., ceil(length / 2), ...)
        uint8.
    length : int
        Integers along `dim`.
    signed : bool
        Two's complement if true.
    dim : int, default -1
        Packed dimension.

    Returns
    -------
    Tensor, shape (..., length, ...)
        int8, or uint8 if not `signed`.

    Examples
    --------
    >>> unpack4(torch.tensor([241, 2], dtype=torch.uint8), 3, signed=True).tolist()
    [1, -1, 2]
    """
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed must be uint8, got {packed.dtype}")
    x = packed.movedim(dim, -1)
    if x.shape[-1] != (length + 1) // 2:
        raise ValueError(f"packed must have {(length + 1) // 2} bytes for length {length}, got {x.shape[-1]}")
    pair = torch.stack((x & 0xF, x >> 4), dim=-1).flatten(-2)[..., :length]
    if signed:
        pair = (pair ^ 8).to(torch.int8) - 8  # sign extension of a nibble
    return pair.movedim(-1, dim)


def store(ints: Tensor, bits: int, signed: bool, dim: int = -1) -> Tensor:
    """Return in-range integers in their storage dtype, packed along `dim` for 4 bits.

    Examples
    --------
    >>> store(torch.tensor([1, -1, 2]), 4, True).tolist()
    [241, 2]
    """
    return pack4(ints, dim) if bits == 4 else _narrow(ints, storage_dtype(bits, signed))


def fetch(data: Tensor, length: int, bits: int, signed: bool, dim: int = -1) -> Tensor:
    """Invert :func:`store`: one integer per element, in :func:`value_dtype`.

    Examples
    --------
    >>> fetch(torch.tensor([241, 2], dtype=torch.uint8), 3, 4, True).tolist()
    [1, -1, 2]
    """
    return unpack4(data, length, signed, dim) if bits == 4 else data


def digit_count(bits: int) -> int:
    """Return the number of 8-bit digits of an integer: 1 up to 8 bits, else 2.

    Examples
    --------
    >>> [digit_count(bits) for bits in BITS]
    [1, 1, 2, 2]
    """
    check_bits(bits)
    return (bits + DIGIT_BITS - 1) // DIGIT_BITS


def digit_signs(bits: int, signed: bool) -> tuple[bool, ...]:
    """Return for each digit, lowest first, whether it is signed: only the top digit can be.

    Examples
    --------
    >>> digit_signs(12, True)
    (False, True)
    """
    return (False,) * (digit_count(bits) - 1) + (signed,)


def split_digits(ints: Tensor, bits: int, signed: bool) -> Tensor:
    """Split integers into digit planes, lowest first.

    Parameters
    ----------
    ints : Tensor
        Integers in :func:`value_dtype`.
    bits, signed : int, bool
        Width and signedness.

    Returns
    -------
    Tensor, shape (digits, ...)
        uint8 bit patterns; read plane i as int8 if :func:`digit_signs` says so.

    References
    ----------
    .. [1] Li, Osawa, Hoefler, SC'22, section IV-D.

    Examples
    --------
    >>> split_digits(torch.tensor([-2], dtype=torch.int16), 16, True).tolist()
    [[254], [255]]
    """
    if digit_count(bits) == 1:
        return ints.view(torch.uint8).unsqueeze(0)
    wide = widen(ints)
    return torch.stack([((wide >> (DIGIT_BITS * i)) & 0xFF).to(torch.uint8) for i in range(digit_count(bits))])


def combine_digits(planes: Tensor, bits: int, signed: bool) -> Tensor:
    """Invert :func:`split_digits`, as int64.

    Examples
    --------
    >>> combine_digits(torch.tensor([[254], [255]], dtype=torch.uint8), 16, True).tolist()
    [-2]
    """
    total = torch.zeros(planes.shape[1:], dtype=torch.int64, device=planes.device)
    for i, is_signed in enumerate(digit_signs(bits, signed)):
        digit = planes[i].view(torch.int8) if is_signed else planes[i]
        total += digit.to(torch.int64) << (DIGIT_BITS * i)
    return total


def product_bound(k: int, bits_a: int, signed_a: bool, bits_b: int, signed_b: bool) -> int:
    """Return the largest ``|sum of k products|`` of integers of two types.

    Examples
    --------
    >>> product_bound(2, 8, True, 8, True)
    32768
    """
    (low_a, high_a), (low_b, high_b) = int_range(bits_a, signed_a), int_range(bits_b, signed_b)
    return k * max(abs(low_a), high_a) * max(abs(low_b), high_b)


def fits(bound: int, dtype: torch.dtype) -> bool:
    """Return whether an integer dtype represents every integer of absolute value up to `bound`.

    Examples
    --------
    >>> fits(product_bound(2**16, 8, True, 8, True), torch.int32)
    True
    """
    return bound <= torch.iinfo(dtype).max
