"""What the kernels of the dense float product are compiled for, and which of them fits a shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from cute_kernels.floats import FORMATS
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig, source_type

TILE = 128  # rows and k of a tile that has one factor
_WIDTHS = {128: 1.0, 192: 0.96, 256: 0.97}  # time of a column of a tile of so many
_SHARED = 232448  # bytes of shared memory that a block of sm_90a may have


class OperandFormat(NamedTuple):
    """One operand as a kernel sees it: its format, codes that share a factor (``block``, 0 for none), the format of
    that factor, and whether tiles of 128 x 128 have factors.  ``"bfloat16"``: decoded before, its factors included."""

    dtype: str
    block: int = 0
    scale: str = ""
    tiles: bool = False

    @property
    def bits(self) -> int:
        return 16 if self.dtype == "bfloat16" else FORMATS[self.dtype].bits

    @property
    def name(self) -> str:
        block = f"x{self.block}{self.scale}" if self.block else ""
        return f"{self.dtype}{block}{'t' if self.tiles else ''}"


def exponent_bias_factor(*kinds: OperandFormat) -> float:
    """The factor that decoding to bytes leaves out: shorter codes get the exponent's bias of e4m3."""
    return 2.0 ** sum(FORMATS["e4m3"].bias - FORMATS[kind.dtype].bias for kind in kinds if kind.bits < 8)


@dataclass(frozen=True)
class ScaledGemmConfig(KernelConfig):
    """``kernel``: ``"wgmma"``, warp groups of sm_90a, or ``"mma"``, warps of any chip from 8.0 on; ``a``, ``b``: the
    operands.  ``out`` names the output's dtype, ``source`` that of c, or is ``"none"``.

    A block has a tile of ``tile_m`` x ``tile_n`` results at a time.  ``stages`` ready parts of k and ``packed_stages``
    packed ones are in shared memory (wgmma; mma has one ready part and ``stages`` packed ones).  ``groups`` warp groups
    multiply and ``decoders`` decode.  ``promote``: sums of 128 k (of 64 in bfloat16) are added in float32.  ``split``
    blocks share the k of one tile.  ``band``: rows of tiles that are worked through column by column.
    """

    kernel: str
    a: OperandFormat
    b: OperandFormat
    out: str
    source: str = "none"
    tile_m: int = 128
    tile_n: int = 128
    stages: int = 4
    packed_stages: int = 1
    groups: int = 2
    decoders: int = 0
    promote: bool = True
    split: int = 1
    resident: int = 1
    band: int = 8

    @property
    def uses_bfloat16(self) -> bool:
        """Whether bfloat16 is multiplied, and not bytes."""
        return self.kernel == "mma" or any(kind.block > 0 or kind.bits > 8 for kind in (self.a, self.b))

    @property
    def tile_k(self) -> int:
        return 64 if self.uses_bfloat16 else 128

    def decoded(self, kind: OperandFormat) -> bool:
        """Whether this operand's codes are not multiplied as they are."""
        return kind.bits < (16 if self.uses_bfloat16 else 8)

    @property
    def threads(self) -> int:
        return 128 * (self.groups + self.decoders + 1) if self.kernel == "wgmma" else 256

    @property
    def packed_bytes(self) -> int:
        """Of a packed part of both operands."""
        sizes = ((self.a, self.tile_m), (self.b, self.tile_n))
        return sum(rows * self.tile_k * kind.bits // 8 for kind, rows in sizes if self.decoded(kind))

    @property
    def ready_bytes(self) -> int:
        """Of a ready part of both operands."""
        return (self.tile_m + self.tile_n) * 128

    @property
    def smem_bytes(self) -> int:
        if self.kernel == "mma":
            return self.ready_bytes + self.stages * self.packed_bytes
        return self.stages * (self.ready_bytes + 16) + self.packed_stages * (self.packed_bytes + 16)

    def tiles(self, m: int, n: int) -> int:
        """Tiles of an (m, n) output."""
        return -(-m // self.tile_m) * -(-n // self.tile_n)

    def exponent_bias_factor(self, a: OperandFormat, b: OperandFormat) -> float:
        """The factor that decoding operands of these kinds, here or before, leaves out."""
        return 1.0 if self.uses_bfloat16 else exponent_bias_factor(a, b)

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        shape = f"{self.tile_m}x{self.tile_n}s{self.stages}p{self.packed_stages}"
        how = f"g{self.groups}d{self.decoders}{'a' if self.promote else ''}k{self.split}r{self.resident}b{self.band}"
        return f"gemm-floats-{self.kernel}-{self.a.name}-{self.b.name}-{self.out}-{self.source}-{shape}-{how}"

    @property
    def kernel_header(self) -> str:
        return f"scaled_gemm/{self.kernel}.cuh"

    @property
    def kernel_entry(self) -> str:
        return f"gemm_floats_{self.kernel}"

    def _constants(self) -> dict[str, object]:
        return {
            "kFloatSums": True,
            "kPlanesA": 1,
            "kPlanesB": 1,
            "kLevels": 1,
            "kBlockA": self.a.block,
            "kBlockB": self.b.block,
            "kHalves": self.uses_bfloat16,
            "kTileM": self.tile_m,
            "kTileN": self.tile_n,
            "kTileK": self.tile_k,
            "kStages": self.stages,
            "kPackedStages": self.packed_stages,
            "kGroups": self.groups,
            "kDecoders": self.decoders,
            "kPromote": self.promote,
            "kTiled": self.a.tiles or self.b.tiles,
            "kSplit": self.split,
            "kResident": self.resident,
            "kBand": self.band,
        }

    def _types(self) -> dict[str, str]:
        return {
            "Out": OUT_TYPES[self.out],
            "Source": source_type(self.source),
            "FormatA": self.a.dtype.upper(),
            "FormatB": self.b.dtype.upper(),
            "ScaleA": self.a.scale.upper() or "void",
            "ScaleB": self.b.scale.upper() or "void",
        }


def _roomy(config: ScaledGemmConfig) -> ScaledGemmConfig:
    """With as many stages as there is room for."""
    stages = 6 if not config.decoders else 4
    room = _SHARED - 64
    while True:
        left = room - stages * (config.ready_bytes + 16)
        packed = min(8, left // (config.packed_bytes + 16)) if config.decoders else 1
        found = replace(config, stages=stages, packed_stages=packed)
        if packed >= 2 or (not config.decoders and found.smem_bytes <= _SHARED):
            return found
        stages -= 1


def candidates(a: OperandFormat, b: OperandFormat, arch: str, *, fast: bool = False) -> list[ScaledGemmConfig]:
    """The configs that :func:`choose` chooses from, with float32 output, largest tile first.

    Kinds that :func:`cute_kernels.scaled_gemm.dequantize.ready` makes are operands that are decoded before.
    """
    tiled = a.tiles or b.tiles
    if arch != "sm_90a":
        return [ScaledGemmConfig("mma", a, b, "float32", promote=tiled)]
    base = ScaledGemmConfig("wgmma", a, b, "float32")
    decoded = any(base.decoded(kind) for kind in (a, b))
    # bfloat16 products are summed in float32 anyway
    base = replace(base, promote=tiled or not (fast or base.uses_bfloat16), decoders=2 if decoded else 0)
    small = replace(base, tile_m=64, groups=1, decoders=3 if decoded else 0)
    # Sums of 128 k beside others fit the registers up to 192 columns; all of k has sums alone.
    wide = [] if decoded or tiled else [replace(base, tile_n=tile) for tile in ((256, 192) if base.promote else (256,))]
    return [_roomy(each) for each in (*wide, base, *(replace(small, split=split) for split in (1, 2, 4)))]


@lru_cache(maxsize=4096)
def choose(
    m: int,
    n: int,
    k: int,
    a: OperandFormat,
    b: OperandFormat,
    arch: str,
    *,
    fast: bool = False,
    out: str = "float32",
    source: str = "none",
    multiprocessors: int = 132,
) -> ScaledGemmConfig:
    """The config for a product of (m, k) and (k, n).

    As many columns a tile as take the least time in turns of the multiprocessors; 64 rows a tile where 128 would leave
    multiprocessors idle, and then as many blocks a tile as there is room for at a time, each with 2048 k at least.
    """
    found = candidates(a, b, arch, fast=fast)
    large, small = ([each for each in found if (each.tile_m == 64) == few] for few in (False, True))

    def turns(each: ScaledGemmConfig) -> float:
        return -(-each.tiles(m, n) // multiprocessors) * each.tile_n * _WIDTHS[each.tile_n]

    chosen = min(large, key=turns)
    if small and (m <= 64 or large[-1].tiles(m, n) < multiprocessors // 2):
        fitting = [
            each for each in small if each.split == 1
            or (each.tiles(m, n) * each.split <= multiprocessors and k >= 2048 * each.split)
        ]  # fmt: skip
        chosen = fitting[-1]
    return replace(chosen, out=out, source=source)
