"""Descriptors of ``tcgen05.mma`` on sm_100a and sm_103a, and the size of tensor memory.

Source: PTX ISA 9.0, section 9.7.16 (tcgen05): instruction descriptor, shared memory descriptor, alternate formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cute_kernels.float_format import float_format

ARCHES = ("sm_100a", "sm_103a")
COLUMNS = 512  # of tensor memory, 32 bits per lane
ROW_BYTES = 128  # bytes of a row of a K tile in shared memory, and of its swizzle
_FORMATS = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
_FLOAT32_SUMS = 1
_SWIZZLE_128B = 2


@dataclass(frozen=True)
class MmaKind:
    """One ``.kind`` of ``tcgen05.mma``.

    Attributes
    ----------
    name : str
        Name of the kind.
    block : int
        Values per block scale along K; 0 without block scales.
    scale : str
        Format of the block scales, or empty.
    packed : bool
        Operands are e2m1, two per byte; else any of five formats, one per byte of shared memory.
    """

    name: str
    block: int = 0
    scale: str = ""
    packed: bool = False

    @property
    def tile_k(self) -> int:
        """Values in a row of 128 bytes."""
        return 2 * ROW_BYTES if self.packed else ROW_BYTES

    @property
    def words(self) -> int:
        """Words of four block scales per such row."""
        return self.tile_k // (4 * self.block) if self.block else 0

    def instruction(self, a: str, b: str, m: int, n: int, ctas: int = 1) -> int:
        """Return the 32-bit instruction descriptor of an (m, 32 bytes) by (n, 32 bytes) product, both K-major.

        Parameters
        ----------
        a, b : str
            Formats of the operands.
        m : int
            128; 128 or 256 for two CTAs.
        n : int
            A multiple of 16 up to 256; of 32 for two CTAs.
        ctas : int, default 1
            CTAs that share the product: ``cta_group``.

        Returns
        -------
        int
            Descriptor with float32 accumulators.

        Raises
        ------
        ValueError
            If the kind does not multiply these formats, or a size is not supported.
        """
        for name, dtype in (("a", a), ("b", b)):
            float_format(dtype, name)
            if self.packed and dtype != "e2m1":
                raise ValueError(f"{name} must be e2m1 for {self.name}, got {dtype!r}")
        if m != 128 and (m, ctas) != (256, 2):
            raise ValueError(f"m must be {'128' if ctas == 1 else '128 or 256'}, got {m}")
        if n % (16 * ctas) or not 0 < n <= 256:
            raise ValueError(f"n must be a multiple of {16 * ctas} up to 256, got {n}")
        type_a, type_b = (1, 1) if self.packed else (_FORMATS[a], _FORMATS[b])
        common = (self.scale == "ue8m0") << 23 if self.block else _FLOAT32_SUMS << 4
        return common | type_a << 7 | type_b << 10 | n >> 3 << 17 | m >> 4 << 24


MMA_KINDS = {
    each.name: each
    for each in (
        MmaKind("f8f6f4"),
        MmaKind("mxf8f6f4", 32, "ue8m0"),
        MmaKind("mxf4", 32, "ue8m0", packed=True),
        MmaKind("nvf4", 16, "e4m3", packed=True),  # .kind::mxf4nvf4 with .block16
    )
}


class AccumulatorPlace(NamedTuple):
    """Where tensor memory holds an element.

    Attributes
    ----------
    cta : int
        CTA of a pair.
    lane : int
        One of 128.
    column : int
        Column from the accumulator's first.
    """

    cta: int
    lane: int
    column: int


def accumulator_place(row: int, column: int, m: int, n: int, ctas: int = 1) -> AccumulatorPlace:
    """Return where ``tcgen05.mma`` puts an element of an (m, n) product, a word each.

    A row has a lane. Of two CTAs each has half of the rows: all of 128 lanes for m = 256; for m = 128, lanes 0 to 63
    hold the left half of its columns and lanes 64 to 127 the right half. The same places as CuTe's ``tmem_frg_1sm`` and
    ``tmem_frg_2sm``, and layouts D, A and B of the PTX ISA.

    Parameters
    ----------
    row, column : int
        Element of the product.
    m, n, ctas : int
        As for :meth:`MmaKind.instruction`.

    Returns
    -------
    AccumulatorPlace

    Examples
    --------
    >>> accumulator_place(200, 70, m=256, n=128, ctas=2)
    AccumulatorPlace(cta=1, lane=72, column=70)
    >>> accumulator_place(100, 70, m=128, n=128, ctas=2)
    AccumulatorPlace(cta=1, lane=100, column=6)
    """
    rows = m // ctas
    width = n // 2 if rows == 64 else n
    return AccumulatorPlace(row // rows, row % rows + column // width * rows, column % width)


def matrix_descriptor(address: int) -> int:
    """Return the 64-bit shared memory descriptor of K-major rows of 128 bytes with the 128-byte swizzle.

    Parameters
    ----------
    address : int
        Shared memory address.

    Returns
    -------
    int
        Descriptor.

    Raises
    ------
    ValueError
        If `address` is not a multiple of 16 below 2^18.
    """
    if address % 16 or not 0 <= address < 1 << 18:
        raise ValueError(f"address must be a multiple of 16 below {1 << 18}, got {address}")
    leading, stride, version = 1, 8 * ROW_BYTES >> 4, 1
    return address >> 4 | leading << 16 | stride << 32 | version << 46 | _SWIZZLE_128B << 61
