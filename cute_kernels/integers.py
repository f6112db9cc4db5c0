"""Integers of 4, 8, 12 and 16 bits: ranges, storage, digits and the overflow bound.

A ``b``-bit integer is stored in the smallest torch dtype that holds it; 4-bit integers are packed two a byte, low
nibble first.  For the 8-bit multipliers an integer is split into digits of 8 bits, the lower ones unsigned and the top
one signed when the integer is: ``x = sum_i d_i * 2**(8 i)``.  A product of digit planes is exact in 32 bits.
Source: Li, Osawa, Hoefler, SC'22, section IV-D (emulation of mixed precision).
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = (4, 8, 12, 16)
DIGIT_BITS = 8

STORAGE_DTYPES = {
    (4, True): torch.uint8,  # packed, two a byte
    (4, False): torch.uint8,
    (8, True): torch.int8,
    (8, False): torch.uint8,
    (12, True): torch.int16,
    (12, False): torch.int16,
    (16, True): torch.int16,
    (16, False): torch.uint16,
}


def check_bits(bits: int, name: str = "bits") -> None:
    """Raise ``ValueError`` unless ``bits`` is one of 4, 8, 12, 16."""
    if bits not in BITS:
        raise ValueError(f"{name} must be one of {BITS}, got {bits!r}")


_RANGES = {
    (bits, signed): (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    for bits in BITS
    for signed in (True, False)
}


def int_range(bits: int, signed: bool) -> tuple[int, int]:
    """Smallest and largest ``bits``-bit integer, two's complement when ``signed``."""
    check_bits(bits)
    return _RANGES[bits, signed]


def storage_dtype(bits: int, signed: bool) -> torch.dtype:
    """The dtype in which ``bits``-bit integers are kept; ``uint8`` with two a byte for 4 bits."""
    check_bits(bits)
    return STORAGE_DTYPES[bits, signed]


def value_dtype(bits: int, signed: bool) -> torch.dtype:
    """The dtype of unpacked integers: as :func:`storage_dtype`, but one 4-bit integer a byte."""
    return (torch.int8 if signed else torch.uint8) if bits == 4 else storage_dtype(bits, signed)


def widen(ints: Tensor) -> Tensor:
    """``ints`` as int64; torch has little arithmetic on uint16, so that one goes through a view."""
    if ints.dtype == torch.uint16:
        return ints.view(torch.int16).to(torch.int64) & 0xFFFF
    return ints.to(torch.int64)


def _narrow(ints: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.uint16:
        return ints.to(torch.int16).view(torch.uint16)  # two's complement wraps to the same 16 bits
    return ints.to(dtype)


def is_integer(dtype: torch.dtype) -> bool:
    """True for torch's integer dtypes, False for bool, floats and complex numbers."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def check_range(ints: Tensor, bits: int, signed: bool, name: str = "ints") -> None:
    """Raise unless ``ints`` has an integer dtype (``TypeError``) and every value fits (``ValueError``)."""
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
    """Pack 4-bit integers two a byte along ``dim``, low nibble first; an odd length gets a zero nibble.

    Requires values already in range.  Returns uint8 with ``ceil(length / 2)`` entries along ``dim``.
    """
    x = ints.movedim(dim, -1).to(torch.uint8) & 0xF
    if x.shape[-1] % 2:
        x = torch.nn.functional.pad(x, (0, 1))
    return (x[..., 0::2] | (x[..., 1::2] << 4)).movedim(-1, dim)


def unpack4(packed: Tensor, length: int, signed: bool, dim: int = -1) -> Tensor:
    """Inverse of :func:`pack4`: int8 (or uint8) with ``length`` entries along ``dim``."""
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
    """In-range ``ints`` in their storage dtype, packed along ``dim`` when ``bits`` is 4."""
    return pack4(ints, dim) if bits == 4 else _narrow(ints, storage_dtype(bits, signed))


def fetch(data: Tensor, length: int, bits: int, signed: bool, dim: int = -1) -> Tensor:
    """Inverse of :func:`store`: one integer an entry, in :func:`value_dtype`."""
    return unpack4(data, length, signed, dim) if bits == 4 else data


def digit_count(bits: int) -> int:
    """Number of 8-bit digits of a ``bits``-bit integer: 1 up to 8 bits, else 2."""
    check_bits(bits)
    return (bits + DIGIT_BITS - 1) // DIGIT_BITS


def digit_signs(bits: int, signed: bool) -> tuple[bool, ...]:
    """For each digit, lowest first, whether it is signed: only the top one can be."""
    return (False,) * (digit_count(bits) - 1) + (signed,)


def split_digits(ints: Tensor, bits: int, signed: bool) -> Tensor:
    """Digit planes of ``ints``, lowest first, as bytes: shape ``(digits, *ints.shape)``, uint8.

    Plane ``i`` holds the bit pattern of digit ``i``; read it as int8 where :func:`digit_signs` says so.
    """
    if digit_count(bits) == 1:
        return ints.view(torch.uint8).unsqueeze(0)
    wide = widen(ints)
    return torch.stack([((wide >> (DIGIT_BITS * i)) & 0xFF).to(torch.uint8) for i in range(digit_count(bits))])


def combine_digits(planes: Tensor, bits: int, signed: bool) -> Tensor:
    """Inverse of :func:`split_digits`, as int64."""
    total = torch.zeros(planes.shape[1:], dtype=torch.int64, device=planes.device)
    for i, is_signed in enumerate(digit_signs(bits, signed)):
        digit = planes[i].view(torch.int8) if is_signed else planes[i]
        total += digit.to(torch.int64) << (DIGIT_BITS * i)
    return total


def product_bound(k: int, bits_a: int, signed_a: bool, bits_b: int, signed_b: bool) -> int:
    """Largest ``|sum of k products|`` that integers of these kinds can reach."""
    (low_a, high_a), (low_b, high_b) = int_range(bits_a, signed_a), int_range(bits_b, signed_b)
    return k * max(abs(low_a), high_a) * max(abs(low_b), high_b)


def fits(bound: int, dtype: torch.dtype) -> bool:
    """Whether every integer of absolute value up to ``bound`` is representable in the integer ``dtype``."""
    return bound <= torch.iinfo(dtype).max
