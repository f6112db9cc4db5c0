"""Element types of operands, integers and floats, and the output dtypes of their products."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.float_format import FORMATS, FloatFormat
from cute_kernels.integers import BITS, digit_count


class Integer(NamedTuple):
    """Integers of 4, 8, 12 or 16 bits.

    Attributes
    ----------
    bits : int
        Width.
    signed : bool
        Two's complement if true.

    Examples
    --------
    >>> Integer(8, True).name, Integer(4, False).name
    ('s8', 'u4')
    """

    bits: int
    signed: bool

    @property
    def name(self) -> str:
        """Short name: ``"s8"``, ``"u4"``."""
        return f"{'s' if self.signed else 'u'}{self.bits}"


ElementType = Integer | FloatFormat

HALF_DTYPES = {
    each.name: each for each in (FloatFormat("float16", 5, 10, 15, "ieee"), FloatFormat("bfloat16", 8, 7, 127, "ieee"))
}
# What the sparse products multiply; six-bit formats would need words of their own.
FLOATS = HALF_DTYPES | {name: FORMATS[name] for name in ("e5m2", "e4m3", "e2m1")}

# Floats that kernels read, quantize and write, as torch calls them.
REAL_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

_DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fn: "e4m3",
    torch.float4_e2m1fn_x2: "e2m1",
}
FLOAT_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}  # of packed values, as torch calls them


def element_type(name: str) -> ElementType:
    """Return the element type of this name.

    Raises
    ------
    ValueError
        If there is none.

    Examples
    --------
    >>> element_type("s8"), element_type("e4m3").name
    (Integer(bits=8, signed=True), 'e4m3')
    """
    integers = {Integer(bits, signed).name: Integer(bits, signed) for bits in BITS for signed in (True, False)}
    found: ElementType | None = integers.get(name) or FLOATS.get(name)
    if found is None:
        raise ValueError(f"name of an element type must be one of {[*integers, *FLOATS]}, got {name!r}")
    return found


def num_digits(number: ElementType) -> int:
    """Return the number of digits that Tensor Cores multiply separately: 2 for integers above 8 bits, else 1."""
    return digit_count(number.bits) if isinstance(number, Integer) else 1


def element_bits(number: ElementType) -> int:
    """Return the bits of an element in memory: 4, 8 or 16."""
    return 16 if number.bits > 8 else number.bits


def float_of(dtype: torch.dtype) -> FloatFormat | None:
    """Return the float format of a torch dtype that the sparse products read, or None."""
    return FLOATS[_DTYPES[dtype]] if dtype in _DTYPES else None


def constant_of(number: ElementType) -> ElementType | str:
    """Return the element type, a float format by its name: torch up to 2.11 takes no dataclass for a constant.

    Examples
    --------
    >>> constant_of(Integer(8, True)), constant_of(FLOATS["e4m3"])
    (Integer(bits=8, signed=True), 'e4m3')
    """
    return number if isinstance(number, Integer) else number.name


def from_constant(number: ElementType | str) -> ElementType:
    """Return the element type that :func:`constant_of` gave.

    Examples
    --------
    >>> [from_constant(constant_of(each)) == each for each in (Integer(4, False), FLOATS["float16"])]
    [True, True]
    """
    return FLOATS[number] if isinstance(number, str) else number


def holds(wide: FloatFormat, narrow: FloatFormat) -> bool:
    """Return whether each value of `narrow` is a value of `wide`, up to a power of two."""
    return wide.exponent >= narrow.exponent and wide.mantissa >= narrow.mantissa


# (bits of A, bits of B): the pairs of Li, Osawa, Hoefler, SC'22, Table IV. Every other pair works as well.
SPMM_PAIRS = ((16, 16), (16, 8), (16, 4), (12, 4), (8, 4), (8, 8), (4, 4))


SDDMM_PAIRS = ((16, 16), (8, 8), (4, 4))


def check_pair(lhs: ElementType, rhs: ElementType) -> None:
    """Raise `TypeError` unless elements of these types multiply.

    Integers multiply integers and floats multiply floats, float16 with bfloat16 excepted.
    """
    if isinstance(lhs, Integer) and isinstance(rhs, Integer):
        return  # names would break a compiler's graph
    if isinstance(lhs, Integer) or isinstance(rhs, Integer):
        raise TypeError(f"operands must be both integers or both floats, got {lhs.name} and {rhs.name}")
    if {lhs.name, rhs.name} == {"float16", "bfloat16"}:
        raise TypeError("operands must not be float16 and bfloat16, which no instruction takes together: convert one")


INTEGER_OUT = (torch.int32, torch.int64)
FLOAT_OUT = (torch.float32, torch.float16, torch.bfloat16)


def _max_magnitude(integer: Integer) -> int:
    """Largest absolute value of such integers."""
    return 2 ** (integer.bits - 1) if integer.signed else 2**integer.bits - 1  # torch up to 2.11 traces no shift


def result_dtype(
    out_dtype: torch.dtype | None, scaled: bool, inner: int, lhs: ElementType, rhs: ElementType
) -> torch.dtype:
    """Return the output dtype of a product that sums `inner` products of elements `lhs` and `rhs`.

    The bound on integer sums is ``inner * max|lhs| * max|rhs|`` over all values of these types, so it never depends on
    the data. Float output of integers is made from int64 totals.

    Parameters
    ----------
    out_dtype : torch.dtype or None
        The caller's choice. None: int32 for unscaled integers, else float32.
    scaled : bool
        Whether an operand has a scale.
    inner : int
        Products per sum (K).
    lhs, rhs : Integer or FloatFormat
        Element types of the operands.

    Raises
    ------
    TypeError
        If the types do not multiply or `out_dtype` is not an output type for them.
    ValueError
        If a sum may overflow `out_dtype`.
    """
    check_pair(lhs, rhs)
    whole = isinstance(lhs, Integer) and isinstance(rhs, Integer)
    dtype = out_dtype or (torch.int32 if whole and not scaled else torch.float32)
    if dtype not in INTEGER_OUT + FLOAT_OUT:
        raise TypeError(f"out_dtype must be one of {INTEGER_OUT + FLOAT_OUT}, got {dtype}")
    if not isinstance(lhs, Integer) or not isinstance(rhs, Integer):
        if dtype in INTEGER_OUT:
            raise TypeError(f"out_dtype must be one of {FLOAT_OUT} for a product of floats, got {dtype}")
        return dtype
    bound = inner * _max_magnitude(lhs) * _max_magnitude(rhs)
    total = dtype if dtype in INTEGER_OUT else torch.int64
    if bound > torch.iinfo(total).max:
        wider = "torch.int64, torch.float32" if total == torch.int32 else "torch.float32"
        raise ValueError(
            f"out_dtype {total} holds magnitudes up to {torch.iinfo(total).max}, but a sum of {inner} products of "
            f"{lhs.bits}-bit by {rhs.bits}-bit integers can reach {bound}; choose {wider} or a scaled 16-bit float"
        )
    return dtype
