"""The kernel of the dense float product for sm_100a and sm_103a: what it is compiled for, and what it can read.

It has been compiled and looked into, and never run: docs/blackwell.md says what has been checked and what has not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from cute_kernels.floats import float_format
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig, source_type
from cute_kernels.scaled_gemm.config import OperandFormat
from cute_kernels.scaled_gemm.tcgen05 import COLUMNS, MMA_KINDS, ROW_BYTES, MmaKind

TILE_M = 128
_SHARED = 232448  # bytes of shared memory that a block may have
_TURNS = 2  # tiles with sums in tensor memory


@dataclass(frozen=True)
class Tcgen05Config(KernelConfig):
    """``out`` names the output's dtype, ``source`` that of c, or is ``"none"``; ``kind``: of :data:`MMA_KINDS`.  The
    formats are not part of it: one binary multiplies all pairs of them.

    A block has a tile of 128 x ``tile_n`` results at a time, and ``stages`` parts of k in shared memory.  ``band``:
    rows of tiles that are worked through column by column.
    """

    out: str
    source: str = "none"
    kind: str = "f8f6f4"
    tile_n: int = 128
    band: int = 8

    @property
    def kernel(self) -> str:
        return "tcgen05"

    @property
    def mma(self) -> MmaKind:
        return MMA_KINDS[self.kind]

    @property
    def threads(self) -> int:
        """Four warps that write, one that feeds, one that multiplies, and four that feed factors."""
        return 320 if self.mma.block else 192

    @property
    def columns(self) -> int:
        """Of tensor memory: the sums of two tiles, and four for 128 words of factors of each operand."""
        return _TURNS * self.tile_n + 2 * 4 * self.mma.words

    @property
    def part_bytes(self) -> int:
        """Of shared memory, for a part of k of both operands: rows of 128 bytes, and 128 words of factors."""
        return (TILE_M + self.tile_n) * ROW_BYTES + 2 * self.mma.words * 512

    @property
    def stages(self) -> int:
        return (_SHARED - 16 * _TURNS - 16) // (self.part_bytes + 16)

    @property
    def smem_bytes(self) -> int:
        """Parts, two barriers for each and for each tile in tensor memory, and the address of the latter."""
        return self.stages * (self.part_bytes + 16) + 16 * _TURNS + 16

    def counted_bytes(self, a: str, b: str) -> int:
        """What the copy engine counts for a part of k of operands of these formats: the bytes of their packed codes.

        The gaps that it leaves between unpacked codes do not count, and codes beyond the matrix do.
        Source: CUTLASS 4.2, ``TmaTransactionBytes`` of ``sm100_mma_warpspecialized.hpp``, in bits of the packed type.
        """
        return sum(rows * self.mma.tile_k * float_format(x).bits // 8 for x, rows in ((a, TILE_M), (b, self.tile_n)))

    def tiles(self, m: int, n: int) -> int:
        """Tiles of an (m, n) output."""
        return -(-m // TILE_M) * -(-n // self.tile_n)

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        shape = f"{TILE_M}x{self.tile_n}s{self.stages}b{self.band}"
        return f"gemm-floats-tcgen05-{self.kind}-{self.out}-{self.source}-{shape}"

    kernel_header = "scaled_gemm/sm100.cuh"
    kernel_entry = "gemm_floats_sm100"

    def _constants(self) -> dict[str, object]:
        return {
            "kFloatSums": True,
            "kLevels": 1,
            "kBlock": self.mma.block,
            "kPacked": self.mma.packed,
            "kTileN": self.tile_n,
            "kStages": self.stages,
            "kBand": self.band,
        }

    def _types(self) -> dict[str, str]:
        return {"Out": OUT_TYPES[self.out], "Source": source_type(self.source)}


def candidates(kind: str, out: str = "float32", source: str = "none") -> list[Tcgen05Config]:
    """The configs that :func:`choose` chooses from, largest tile first."""
    widths = (128,) if MMA_KINDS[kind].block else (256, 128, 64)
    found = [Tcgen05Config(out, source, kind, width) for width in widths]
    return [config for config in found if config.columns <= COLUMNS]


@lru_cache(maxsize=4096)
def choose(m: int, n: int, kind: str, out: str, source: str, multiprocessors: int) -> Tcgen05Config:
    """The largest tile that leaves no multiprocessor idle, else the smallest.  A guess: nothing has been measured."""
    known = candidates(kind, out, source)
    return next((config for config in known if config.tiles(m, n) >= multiprocessors), known[-1])


def mma_kind(a: OperandFormat, b: OperandFormat) -> MmaKind:
    """The kind of instruction that multiplies these operands.

    Raises ``ValueError`` for factors of tiles, for factors of blocks that only one has or that differ, and for those of
    16 that are not e4m3 for e2m1, or of 32 that are not ue8m0.
    """
    for name, operand in (("a", a), ("b", b)):
        if operand.tiles:
            raise ValueError(f"{name} must have no factors of tiles for tcgen05.mma, got {operand.name}")
    if (a.block, a.scale) != (b.block, b.scale):
        raise ValueError(f"b must have the same blocks as a for tcgen05.mma, got {a.name} and {b.name}")
    packed = a.dtype == b.dtype == "e2m1"
    for kind in reversed(MMA_KINDS.values()):  # packed ones first
        if (kind.block, kind.scale) == (a.block, a.scale) and packed >= kind.packed:
            return kind
    raise ValueError(f"a and b must have blocks of 32 ue8m0, or of 16 e4m3 and be e2m1, for tcgen05.mma, "
                     f"got {a.name} and {b.name}")  # fmt: skip


class PackedMatrix(NamedTuple):
    """Packed codes as they lie: ``rows`` of ``k`` from ``address`` on, ``pitch`` bytes from one to the next."""

    dtype: str
    k: int
    rows: int
    address: int
    pitch: int


def check_alignment(name: str, codes: PackedMatrix, kind: MmaKind, swizzle: int = ROW_BYTES) -> None:
    """Raise ``ValueError`` unless the copy engine can bring these codes into shared memory as ``kind`` wants them.

    PackedMatrix of 4 and 6 bits that it unpacks must start at a multiple of 32 bytes, their rows must be multiples of 128
    codes long and apart, and the swizzle must be 128 bytes or none.  What it copies as it lies must start at a multiple
    of 16 bytes, with rows multiples of 16 bytes apart, and any swizzle will do.  With factors of blocks, rows must be
    multiples of 128 codes in any case, so that a row has whole words of factors.
    Arguments: what to call them in the error; the codes; the instruction; bytes of the swizzle, 0 for none.
    Source: CUDA driver API 13.0, ``cuTensorMapEncodeTiled``; CUTLASS 4.2, "Blackwell functionality", tables 2 and 3.
    """
    bits = float_format(codes.dtype, name).bits
    unpacked = bits < 8 and not kind.packed
    start, apart = (32, 128 * bits // 8) if unpacked else (16, 16)
    swizzles = (0, 128) if unpacked else (0, 32, 64, 128)
    what = f"{codes.dtype} and {kind.name}"
    if codes.address % start:
        raise ValueError(f"{name} must start at a multiple of {start} bytes for {what}, got {codes.address:#x}")
    if (unpacked or kind.block) and codes.k % 128:
        raise ValueError(f"{name} must have rows of a multiple of 128 codes for {what}, got {codes.k}")
    if codes.rows > 1 and (codes.pitch % apart or codes.pitch * 8 < codes.k * bits):
        size = -(-codes.k * bits // 8)
        raise ValueError(f"{name} must have rows of {size} bytes a multiple of {apart} bytes apart for {what}, "
                         f"got {codes.pitch}")  # fmt: skip
    if swizzle not in swizzles:
        known = ", ".join(map(str, swizzles))
        raise ValueError(f"{name} must have a swizzle of one of {known} bytes for {what}, got {swizzle}")


class MapParameters(NamedTuple):
    """The arguments of :func:`cute_kernels.jit.tma`."""

    pointer: int
    element_bytes: int
    shape: tuple[int, int]
    pitch_bytes: int
    box: tuple[int, int]
    swizzle: int
    unpack: int


def map_parameters(name: str, codes: PackedMatrix, kind: MmaKind, tile: int) -> MapParameters:
    """How boxes of a part of k by ``tile`` rows are copied.  Raises what :func:`check_alignment` raises."""
    check_alignment(name, codes, kind)
    bits = float_format(codes.dtype).bits
    size = -(-codes.k * bits // 8)
    unpack = bits if bits < 8 and not kind.packed else 0
    # The pitch of a single row is never used, but the driver looks at it.
    pitch = codes.pitch if codes.rows > 1 else -(-size // 32) * 32
    shape = (codes.k if unpack else size, codes.rows)
    return MapParameters(codes.address, 1, shape, pitch, (ROW_BYTES, tile), ROW_BYTES, unpack)
