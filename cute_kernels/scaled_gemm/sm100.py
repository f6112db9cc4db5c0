"""Dense product of low-precision floats on sm_100a and sm_103a: config, selection, and rules for its operands.

The kernel compiles and has never run; docs/lab/blackwell.md lists what has been checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from cute_kernels.float_format import float_format
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig, source_type
from cute_kernels.scaled_gemm.config import OperandFormat
from cute_kernels.scaled_gemm.tcgen05 import COLUMNS, MMA_KINDS, ROW_BYTES, MmaKind

TILE_M = 128
_SMEM_BYTES = 232448  # shared memory that a CTA can have
_ACCUMULATORS = 2  # tiles in tensor memory


@dataclass(frozen=True)
class Tcgen05Config(KernelConfig):
    """Config of the ``tcgen05.mma`` kernel; one binary multiplies all pairs of formats.

    Attributes
    ----------
    out : str
        Dtype of the output.
    source : str
        Dtype of c, or ``"none"``.
    kind : str
        Name in :data:`MMA_KINDS`.
    tile_n : int
        Columns of a CTA tile; it has 128 rows.
    band : int
        Rows of tiles that are traversed column by column.
    bits_a : int
        0, or the bits of a value of A: ``tcgen05.cp`` unpacks A into tensor memory, from where it is multiplied. For
        ``"f8f6f4"`` and tiles of at most 128 columns; never selected.
    pair_rows : int
        0, or 128 or 256 rows of a tile that two CTAs share with two-SM instructions (``cta_group::2``). For
        ``"f8f6f4"``; has never run, and is never selected.
    """

    out: str
    source: str = "none"
    kind: str = "f8f6f4"
    tile_n: int = 128
    band: int = 8
    bits_a: int = 0
    pair_rows: int = 0

    @property
    def kernel(self) -> str:
        """Name of the instruction."""
        return "tcgen05"

    @property
    def mma(self) -> MmaKind:
        """Instruction of `kind`."""
        return MMA_KINDS[self.kind]

    @property
    def ctas(self) -> int:
        """CTAs that share a tile: the size of a cluster."""
        return 2 if self.pair_rows else 1

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return self.pair_rows or TILE_M

    @property
    def box_rows(self) -> tuple[int, int]:
        """Rows of A and of B in a stage of one CTA."""
        return self.tile_m // self.ctas, self.tile_n // self.ctas

    @property
    def tile_columns(self) -> int:
        """Columns of tensor memory per tile: with 64 rows per CTA, 128 lanes hold them twice, left and right half."""
        return self.tile_n // 2 if self.box_rows[0] == 64 else self.tile_n

    @property
    def threads(self) -> int:
        """Threads per CTA: four epilogue warps, TMA and MMA warps, and with block scales four producers of these."""
        return 320 if self.mma.block else 192

    @property
    def columns(self) -> int:
        """Columns of tensor memory: accumulators of two tiles, four per 128 words of block scales, two K tiles of A."""
        return _ACCUMULATORS * self.tile_columns + 2 * 4 * self.mma.words + (2 * ROW_BYTES // 4 if self.bits_a else 0)

    @property
    def part_bytes(self) -> int:
        """Bytes per stage: rows of 128 bytes of both operands, and 128 words of block scales of each."""
        return sum(self.box_rows) * ROW_BYTES + 2 * self.mma.words * 512

    @property
    def stages(self) -> int:
        """Pipeline stages: as many as fit shared memory."""
        return (_SMEM_BYTES - 16 * _ACCUMULATORS - 16) // (self.part_bytes + 16)

    @property
    def smem_bytes(self) -> int:
        """Bytes per CTA: stages, two barriers per stage and per accumulator, and the address of tensor memory."""
        return self.stages * (self.part_bytes + 16) + 16 * _ACCUMULATORS + 16

    def counted_bytes(self, a: str, b: str) -> int:
        """Return the bytes that the barrier of a stage expects from TMA, to both CTAs of a pair: the packed data's.

        Gaps between unpacked values do not count, values beyond the matrix do [1]_.

        Parameters
        ----------
        a, b : str
            Formats of the operands.

        Returns
        -------
        int
            Bytes of both tiles.

        References
        ----------
        .. [1] CUTLASS 4.2, ``TmaTransactionBytes`` of ``sm100_mma_warpspecialized.hpp``.
        """
        return sum(
            rows * self.mma.tile_k * float_format(x).bits // 8 for x, rows in ((a, self.tile_m), (b, self.tile_n))
        )

    def tiles(self, m: int, n: int) -> int:
        """Return the tiles of an (m, n) output."""
        return -(-m // self.tile_m) * -(-n // self.tile_n)

    @property
    def name(self) -> str:
        """Short name, unique among the configs."""
        shape = f"{self.tile_m}x{self.tile_n}s{self.stages}b{self.band}"
        special = (f"-a{self.bits_a}" if self.bits_a else "") + ("-pair" if self.pair_rows else "")
        return f"gemm-floats-tcgen05-{self.kind}-{self.out}-{self.source}-{shape}{special}"

    kernel_header = "scaled_gemm/sm100.cuh"
    kernel_entry = "gemm_floats_sm100"

    def _constants(self) -> dict[str, object]:
        return {
            "kFloatAccum": True,
            "kLevels": 1,
            "kBlock": self.mma.block,
            "kPacked": self.mma.packed,
            "kTileN": self.tile_n,
            "kStages": self.stages,
            "kBand": self.band,
            "kBitsA": self.bits_a,
            "kPairRows": self.pair_rows,
        }

    def _types(self) -> dict[str, str]:
        return {"Out": OUT_TYPES[self.out], "Source": source_type(self.source)}


def candidates(kind: str, out: str = "float32", source: str = "none") -> list[Tcgen05Config]:
    """Return the configs that :func:`choose` selects from, largest tile first."""
    widths = (128,) if MMA_KINDS[kind].block else (256, 128, 64)
    found = [Tcgen05Config(out, source, kind, width) for width in widths]
    return [config for config in found if config.columns <= COLUMNS]


@lru_cache(maxsize=4096)
def choose(m: int, n: int, kind: str, out: str, source: str, num_sms: int) -> Tcgen05Config:
    """Return the config with the largest tile that leaves no SM idle, else the smallest; not measured."""
    known = candidates(kind, out, source)
    return next((config for config in known if config.tiles(m, n) >= num_sms), known[-1])


def mma_kind(a: OperandFormat, b: OperandFormat) -> MmaKind:
    """Return the ``tcgen05.mma`` kind that multiplies these operands.

    Raises
    ------
    ValueError
        For tile scales, for block scales of a single operand or of different formats, and for other block scales
        than 32 ue8m0, or 16 e4m3 of e2m1.

    Examples
    --------
    >>> mma_kind(OperandFormat("e2m1", 16, "e4m3"), OperandFormat("e2m1", 16, "e4m3")).name
    'nvf4'
    """
    for name, operand in (("a", a), ("b", b)):
        if operand.tiles:
            raise ValueError(f"{name} must have no tile scales for tcgen05.mma, got {operand.name}")
    if (a.block, a.scale) != (b.block, b.scale):
        raise ValueError(f"b must have the same blocks as a for tcgen05.mma, got {a.name} and {b.name}")
    packed = a.dtype == b.dtype == "e2m1"
    for kind in reversed(MMA_KINDS.values()):  # packed ones first
        if (kind.block, kind.scale) == (a.block, a.scale) and packed >= kind.packed:
            return kind
    raise ValueError(f"a and b must have blocks of 32 ue8m0, or of 16 e4m3 and be e2m1, for tcgen05.mma, "
                     f"got {a.name} and {b.name}")  # fmt: skip


def check_copied(config: Tcgen05Config, a: str) -> None:
    """Check that a config that copies A to tensor memory fits there, and unpacks format `a`.

    Raises
    ------
    ValueError
        If the kind has block scales, the tile is too wide, or `a` has other bits.

    Examples
    --------
    >>> check_copied(Tcgen05Config("float32", bits_a=6), "e2m3")
    >>> check_copied(Tcgen05Config("float32", bits_a=6), "e2m1")
    Traceback (most recent call last):
    ValueError: a must have 6 bits for bits_a=6, got e2m1
    """
    if not config.bits_a:
        return
    if config.mma.block or config.columns > COLUMNS:
        raise ValueError(f"config must be f8f6f4 of at most 128 columns for bits_a={config.bits_a}, got {config.name}")
    if float_format(a, "a").bits != config.bits_a:
        raise ValueError(f"a must have {config.bits_a} bits for bits_a={config.bits_a}, got {a}")


def check_two_ctas(config: Tcgen05Config) -> None:
    """Check that two CTAs can share the tiles of a config.

    Raises
    ------
    ValueError
        If there are block scales or copies of A, or for other tiles than 128 x 128, 128 x 256 and 256 x 64 to 256.

    Examples
    --------
    >>> check_two_ctas(Tcgen05Config("float32", tile_n=256, pair_rows=256))
    >>> check_two_ctas(Tcgen05Config("float32", tile_n=64, pair_rows=128))
    Traceback (most recent call last):
    ValueError: tile_n must be 128 or 256 for pair_rows=128, got 64
    """
    if not config.pair_rows:
        return
    if config.kind != "f8f6f4" or config.bits_a:
        raise ValueError(f"config must be f8f6f4 without bits_a for pair_rows={config.pair_rows}, got {config.name}")
    widths = {128: (128, 256), 256: (64, 128, 256)}  # a warp of the epilogue reads 64 columns at a time
    if config.pair_rows not in widths:
        raise ValueError(f"pair_rows must be 0, 128 or 256, got {config.pair_rows}")
    known = widths[config.pair_rows]
    if config.tile_n not in known:
        text = " or ".join([", ".join(map(str, known[:-1])), str(known[-1])])
        raise ValueError(f"tile_n must be {text} for pair_rows={config.pair_rows}, got {config.tile_n}")


class PackedMatrix(NamedTuple):
    """A packed operand in memory.

    Attributes
    ----------
    dtype : str
        Format of the values.
    k : int
        Values per row.
    rows : int
        Number of rows.
    address : int
        Device address.
    pitch : int
        Bytes from one row to the next.
    """

    dtype: str
    k: int
    rows: int
    address: int
    pitch: int


def check_alignment(name: str, operand: PackedMatrix, kind: MmaKind, swizzle: int = ROW_BYTES) -> None:
    """Check that TMA can load an operand into shared memory in the layout that `kind` reads.

    - TMA unpacks 4- and 6-bit values: they start at a multiple of 32 bytes, rows are multiples of 128 values long and
      apart, and the swizzle is 128 bytes or none.
    - It copies other data as it is: from a multiple of 16 bytes, rows multiples of 16 bytes apart, any swizzle.
    - With block scales, rows are multiples of 128 values, so that a row has whole words of scales.

    Sources: [1]_ and [2]_ (tables 2 and 3).

    Parameters
    ----------
    name : str
        Name of the operand in errors.
    operand : PackedMatrix
        Operand in memory.
    kind : MmaKind
        Instruction.
    swizzle : int, default 128
        Bytes of the swizzle, 0 for none.

    Raises
    ------
    ValueError
        If a rule is broken; the message names it.

    References
    ----------
    .. [1] CUDA driver API 13.0, ``cuTensorMapEncodeTiled``.
    .. [2] CUTLASS 4.2, "Blackwell functionality".
    """
    bits = float_format(operand.dtype, name).bits
    unpacked = bits < 8 and not kind.packed
    start, apart = (32, 128 * bits // 8) if unpacked else (16, 16)
    swizzles = (0, 128) if unpacked else (0, 32, 64, 128)
    what = f"{operand.dtype} and {kind.name}"
    if operand.address % start:
        raise ValueError(f"{name} must start at a multiple of {start} bytes for {what}, got {operand.address:#x}")
    if (unpacked or kind.block) and operand.k % 128:
        raise ValueError(f"{name} must have rows of a multiple of 128 values for {what}, got {operand.k}")
    if operand.rows > 1 and (operand.pitch % apart or operand.pitch * 8 < operand.k * bits):
        size = -(-operand.k * bits // 8)
        raise ValueError(f"{name} must have rows of {size} bytes a multiple of {apart} bytes apart for {what}, "
                         f"got {operand.pitch}")  # fmt: skip
    if swizzle not in swizzles:
        known = ", ".join(map(str, swizzles))
        raise ValueError(f"{name} must have a swizzle of one of {known} bytes for {what}, got {swizzle}")


class MapParameters(NamedTuple):
    """Arguments of :func:`cute_kernels.jit.tma.tensor_map`."""

    pointer: int
    element_bytes: int
    shape: tuple[int, int]
    pitch_bytes: int
    box: tuple[int, int]
    swizzle: int
    unpack: int


def map_parameters(name: str, operand: PackedMatrix, kind: MmaKind, tile: int) -> MapParameters:
    """Return the tensor map of K tiles of `tile` rows.

    Raises
    ------
    ValueError
        As :func:`check_alignment`.
    """
    check_alignment(name, operand, kind)
    bits = float_format(operand.dtype).bits
    size = -(-operand.k * bits // 8)
    unpack = bits if bits < 8 and not kind.packed else 0
    # The driver checks the memory stride of a single row, which is never used.
    pitch = operand.pitch if operand.rows > 1 else -(-size // 32) * 32
    shape = (operand.k if unpack else size, operand.rows)
    return MapParameters(operand.address, 1, shape, pitch, (ROW_BYTES, tile), ROW_BYTES, unpack)
