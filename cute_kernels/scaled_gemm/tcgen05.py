"""Descriptors of ``tcgen05.mma`` on sm_100a and sm_103a, and the size of tensor memory.

Source: PTX ISA 9.0, section 9.7.16 (tcgen05): instruction descriptor, shared memory descriptor, alternate formats.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def instruction(self, a: str, b: str, m: int, n: int) -> int:
        """Return the 32-bit instruction descriptor of an (m, 32 bytes) by (n, 32 bytes) product, both K-major.

        Parameters
        ----------
        a, b : str
            Formats of the operands.
        m : int
            128.
        n : int
            A multiple of 16 up to 256.

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
        if m != 128:
            raise ValueError(f"m must be 128, got {m}")
        if n % 16 or not 0 < n <= 256:
            raise ValueError(f"n must be a multiple of 16 up to 256, got {n}")
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
