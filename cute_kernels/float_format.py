"""Binary float formats of at most 16 bits, by name: e5m2, e4m3, e3m2, e2m3 and e2m1 for values, ue8m0 for scales.

Source: OCP Microscaling Formats (MX) v1.0, section 5.3; OCP 8-bit Floating Point v1.0; e4m3 has the values of
``torch.float8_e4m3fn``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FloatFormat:
    """A binary float format.

    Attributes
    ----------
    name : str
        Name, such as ``"e4m3"``.
    exponent, mantissa : int
        Bits.
    bias : int
        Exponent bias.
    special : {"ieee", "nan", "finite"}
        Meaning of the largest exponent: infinities and NaN, one NaN of all ones beside numbers, or numbers only.
    signed : bool
        Whether there is a sign bit.

    Examples
    --------
    >>> FORMATS["e4m3"].bits, FORMATS["e4m3"].largest
    (8, 448.0)
    """

    name: str
    exponent: int
    mantissa: int
    bias: int
    special: str
    signed: bool = True

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return int(self.signed) + self.exponent + self.mantissa

    @property
    def values(self) -> list[float]:
        """Value of each code."""
        return [self._value(code) for code in range(1 << self.bits)]

    @property
    def largest_code(self) -> int:
        """Code of the largest finite value."""
        top = (1 << (self.exponent + self.mantissa)) - 1
        return top - {"ieee": 1 << self.mantissa, "nan": 1, "finite": 0}[self.special]

    @property
    def largest(self) -> float:
        """Largest finite value."""
        return self._value(self.largest_code)

    @property
    def largest_exponent(self) -> int:
        """Exponent of the largest value."""
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


def float_format(name: str, argument: str = "dtype", *, scale: bool = False) -> FloatFormat:
    """Return the format with this name.

    Parameters
    ----------
    name : str
        Name of a format.
    argument : str, default "dtype"
        Argument that the error message names.
    scale : bool, default False
        Also accept ue8m0.

    Raises
    ------
    ValueError
        If there is none; the message lists the names.

    Examples
    --------
    >>> float_format("e2m1").values[:8]
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    known = FORMATS | ({SCALE.name: SCALE} if scale else {})
    if name not in known:
        raise ValueError(f"{argument} must be one of {', '.join(known)}, got {name!r}")
    return known[name]
