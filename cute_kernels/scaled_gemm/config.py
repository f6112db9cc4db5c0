"""Configs of the kernels for dense products of low-precision floats, and their selection."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from cute_kernels.float_format import FORMATS
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig, source_type

TILE = 128  # rows and K of a tile with one scale
_WIDTHS = {
    128: 1.0,
    192: 0.96,
    256: 0.97,
}  # tile_n -> measured time per column, relative to tile_n = 128 (docs/lab/floats.md)
_WIDTHS_WITH_FACTORS = {128: 1.0, 256: 0.89}  # as above, where scales multiply the sums of a K tile
_SPLIT_K = 2048  # least K of a CTA that shares a tile; twice that, 128 columns wide, where nothing is decoded
_SMEM_BYTES = 233472  # shared memory of an SM of sm_90a; each CTA takes 1 KiB more than it requests


class OperandFormat(NamedTuple):
    """Format of one operand, as kernels are compiled for it.

    Attributes
    ----------
    dtype : str
        Float format such as ``"e4m3"``; ``"bfloat16"`` for an operand that was dequantized before the product.
    block : int
        Values per block scale along K; 0 without block scales.
    scale : str
        Format of the block scales, ``"float32"`` of 128 values; or empty.
    tiles : bool
        Whether 128 x 128 tiles have scales.

    Examples
    --------
    >>> OperandFormat("e2m1", 16, "e4m3").name
    'e2m1x16e4m3'
    """

    dtype: str
    block: int = 0
    scale: str = ""
    tiles: bool = False

    @property
    def bits(self) -> int:
        """Bits per value."""
        return 16 if self.dtype == "bfloat16" else FORMATS[self.dtype].bits

    @property
    def name(self) -> str:
        """Short name, unique among the formats."""
        block = f"x{self.block}{self.scale}" if self.block else ""
        return f"{self.dtype}{block}{'t' if self.tiles else ''}"


def exponent_bias_factor(*formats: OperandFormat) -> float:
    """Return the factor by which decoding to e4m3 makes a product too small.

    Decoding moves the bits of a sub-byte float to those of e4m3, whose exponent bias is larger.

    Examples
    --------
    >>> exponent_bias_factor(OperandFormat("e2m1"), OperandFormat("e4m3"))
    64.0
    """
    return 2.0 ** sum(FORMATS["e4m3"].bias - FORMATS[fmt.dtype].bias for fmt in formats if fmt.bits < 8)


@dataclass(frozen=True)
class ScaledGemmConfig(KernelConfig):
    """Config of a tiled kernel; M, N and K are run-time values.

    Attributes
    ----------
    kernel : str
        ``"wgmma"`` (warp groups, sm_90a) or ``"mma"`` (warps, sm_80 and later).
    a, b : OperandFormat
        Formats of the operands.
    out : str
        Dtype of the output.
    source : str
        Dtype of c, or ``"none"``.
    tile_m, tile_n : int
        CTA tile.
    stages : int
        Pipeline stages: of decoded tiles (WGMMA) or of packed tiles (MMA, which has one decoded tile).
    packed_stages : int
        Pipeline stages of packed tiles (WGMMA).
    groups : int
        Consumer warp groups (WGMMA).
    decoders : int
        Warp groups that decode packed tiles (WGMMA).
    promote : bool
        Tensor Cores accumulate one K tile; float32 additions do the rest.
    split : int
        CTAs of a cluster that share the K range of a tile (split-K).
    resident : int
        CTAs per SM.
    band : int
        Rows of tiles that are traversed column by column.
    adjacent : int
        Columns side by side that a lane has, 4 or 8: as in :class:`cute_kernels.gemm.config.GemmConfig`, where no
        operand is decoded and no CTAs share K. 0: pairs.
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
    adjacent: int = 0

    @property
    def uses_bfloat16(self) -> bool:
        """Whether Tensor Cores multiply bfloat16, not bytes."""
        scaled = any(0 < fmt.block < TILE for fmt in (self.a, self.b))
        return self.kernel == "mma" or scaled or any(fmt.bits > 8 for fmt in (self.a, self.b))

    @property
    def tile_k(self) -> int:
        """K per tile: rows of 128 bytes once decoded."""
        return 64 if self.uses_bfloat16 else 128

    def is_decoded(self, fmt: OperandFormat) -> bool:
        """Return whether the kernel decodes an operand of this format."""
        return fmt.bits < (16 if self.uses_bfloat16 else 8)

    @property
    def side_by_side(self) -> ScaledGemmConfig:
        """The config with adjacent columns, if its kernel has them; they need what those of ``GemmConfig`` do."""
        ordered = self.kernel == "wgmma" and self.split == 1 and not self.decoders
        return replace(self, adjacent=(4 if self.out == "float32" else 8) if ordered else 0)

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 128 * (self.groups + self.decoders + 1) if self.kernel == "wgmma" else 256

    @property
    def has_factors(self) -> bool:
        """Whether scales multiply the sums of a K tile."""
        return self.a.tiles or self.b.tiles or self.a.block == TILE

    def takes(self, n: int) -> bool:
        """Return whether `n` columns have tile scales of `b` for all of this kernel's tiles, `TILE` columns each."""
        return not self.b.tiles or -(-n // self.tile_n) * self.tile_n - n < TILE

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed tiles of both operands."""
        sizes = ((self.a, self.tile_m), (self.b, self.tile_n))
        return sum(rows * self.tile_k * fmt.bits // 8 for fmt, rows in sizes if self.is_decoded(fmt))

    @property
    def ready_bytes(self) -> int:
        """Bytes of the decoded tiles of both operands."""
        return (self.tile_m + self.tile_n) * 128

    @property
    def smem_bytes(self) -> int:
        if self.kernel == "mma":
            return self.ready_bytes + self.stages * self.packed_bytes
        return self.stages * (self.ready_bytes + 16) + self.packed_stages * (self.packed_bytes + 16)

    def tiles(self, m: int, n: int) -> int:
        """Return the tiles of an (m, n) output."""
        return -(-m // self.tile_m) * -(-n // self.tile_n)

    def exponent_bias_factor(self, a: OperandFormat, b: OperandFormat) -> float:
        """Return the factor by which decoding these formats, in this kernel or before, reduces the product."""
        return 1.0 if self.uses_bfloat16 else exponent_bias_factor(a, b)

    @property
    def name(self) -> str:
        """Short name, unique among the configs."""
        shape = f"{self.tile_m}x{self.tile_n}s{self.stages}p{self.packed_stages}"
        sums = "a" * self.promote
        how = f"g{self.groups}d{self.decoders}{sums}k{self.split}r{self.resident}b{self.band}"
        how += f"-adjacent{self.adjacent}" if self.adjacent else ""
        return f"gemm-floats-{self.kernel}-{self.a.name}-{self.b.name}-{self.out}-{self.source}-{shape}-{how}"

    @property
    def kernel_header(self) -> str:
        return f"scaled_gemm/{self.kernel}.cuh"

    @property
    def kernel_entry(self) -> str:
        return f"gemm_floats_{self.kernel}"

    def _constants(self) -> dict[str, object]:
        return {
            "kFloatAccum": True,
            "kPlanesA": 1,
            "kPlanesB": 1,
            "kLevels": 1,
            "kBlockA": self.a.block % TILE,
            "kLines": self.a.block == TILE,
            "kBlockB": self.b.block,
            "kBfloat16": self.uses_bfloat16,
            "kTileM": self.tile_m,
            "kTileN": self.tile_n,
            "kTileK": self.tile_k,
            "kStages": self.stages,
            "kPackedStages": self.packed_stages,
            "kGroups": self.groups,
            "kDecoders": self.decoders,
            "kPromote": self.promote,
            "kTiledA": self.a.tiles,
            "kTiledB": self.b.tiles,
            "kSplit": self.split,
            "kResident": self.resident,
            "kBand": self.band,
            "kAdjacent": self.adjacent,
        }

    def _types(self) -> dict[str, str]:
        return {
            "Out": OUT_TYPES[self.out],
            "Source": source_type(self.source),
            "FormatA": self.a.dtype.upper(),
            "FormatB": self.b.dtype.upper(),
            "ScaleA": "void" if self.a.block == TILE else self.a.scale.upper() or "void",
            "ScaleB": self.b.scale.upper() or "void",
        }


def lines_refusal(a: OperandFormat, b: OperandFormat, arch: str) -> str:
    """Return why no kernel multiplies operands with float32 scales of 128 values; empty if one does, or none has them.

    Examples
    --------
    >>> lines_refusal(OperandFormat("e4m3", 128, "float32"), OperandFormat("e4m3", tiles=True), "sm_90a")
    ''
    """
    lines = f"float32 scales of {TILE} values"
    if b.block == TILE:
        return f"b must have no {lines} on a GPU, got {b.name}; a can have them"
    if a.block == TILE and b.block:
        return f"b must have no block scales where a has {lines}, got {b.name}; see FloatOperand.folded"
    if a.block == TILE and arch != "sm_90a":
        return f"a must have no {lines} but on sm_90a, got {a.name} on {arch}"
    return ""


def _with_stages(config: ScaledGemmConfig) -> ScaledGemmConfig:
    """Return the config with as many stages as fit shared memory."""
    stages = 4 if config.decoders else 8 if config.tile_m == 64 else 6
    smem_bytes = _SMEM_BYTES // config.resident - 1024
    while True:
        remaining = smem_bytes - 64 - stages * (config.ready_bytes + 16)
        packed = min(8, remaining // (config.packed_bytes + 16)) if config.decoders else 1
        found = replace(config, stages=stages, packed_stages=packed)
        if packed >= 2 or (not config.decoders and found.smem_bytes <= smem_bytes):
            return found
        stages -= 1


def candidates(a: OperandFormat, b: OperandFormat, arch: str, *, fast: bool = False) -> list[ScaledGemmConfig]:
    """Return the configs that :func:`choose` selects from, with float32 output, largest tile first.

    Parameters
    ----------
    a, b : OperandFormat
        Formats of the operands, after those that :mod:`cute_kernels.scaled_gemm.dequantize` dequantizes first.
    arch : str
        Architecture, such as ``"sm_90a"``.
    fast : bool, default False
        Whether Tensor Cores may accumulate all of K.

    Returns
    -------
    list of ScaledGemmConfig
        Configs for all shapes.
    """
    if arch != "sm_90a":
        return [ScaledGemmConfig("mma", a, b, "float32", promote=a.tiles or b.tiles)]
    base = ScaledGemmConfig("wgmma", a, b, "float32")
    tiled = base.has_factors
    decoded = any(base.is_decoded(fmt) for fmt in (a, b))
    # Tensor Cores accumulate products of bfloat16 in float32 in any case.
    base = replace(base, promote=tiled or not (fast or base.uses_bfloat16), decoders=2 if decoded else 0)
    small = replace(base, tile_m=64, groups=1, decoders=3 if decoded else 0)
    # Two CTAs per SM where registers allow it: then tiles of a turn and a half take less than two turns.
    narrow = [
        *([small] if decoded else [replace(small, tile_n=tile, resident=2) for tile in (128, 64)]),
        *(replace(small, tile_n=tile, split=2) for tile in (128, 64)),
    ]
    # Registers hold two accumulators, of a K tile and of the tile, up to 192 columns; without promotion one of 256.
    widths = () if decoded else (256, 192) if base.promote and not tiled else (256,)
    wide = [replace(base, tile_n=tile) for tile in widths]
    return [_with_stages(each) for each in (*wide, base, *narrow)]


def _least_k(config: ScaledGemmConfig) -> int:
    """Return the K that each CTA of a config should have: to add up what several have takes the longer, the wider."""
    if config.split == 1:
        return 0
    return _SPLIT_K if config.decoders else _SPLIT_K * config.tile_n // 64


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
    num_sms: int = 132,
) -> ScaledGemmConfig:
    """Return the config for a product of (m, k) and (k, n).

    `tile_n` takes the least predicted time in waves of CTAs. If 128-row tiles leave SMs idle, tiles have 64 rows, and
    are as narrow, or shared by as many CTAs (split-K), as all CTAs can be that run at the same time.

    Parameters
    ----------
    m, n, k : int
        Sizes of the product.
    a, b : OperandFormat
        Formats of the operands.
    arch : str
        Architecture, such as ``"sm_90a"``.
    fast : bool, default False
        Whether Tensor Cores may accumulate all of K.
    out : str, default "float32"
        Dtype of the output.
    source : str, default "none"
        Dtype of c, or ``"none"``.
    num_sms : int, default 132
        SMs of the GPU.

    Returns
    -------
    ScaledGemmConfig
        One of :func:`candidates`, with `out` and `source` set.
    """
    found = [each for each in candidates(a, b, arch, fast=fast) if each.takes(n)]
    large, small = ([each for each in found if (each.tile_m == 64) == is_small] for is_small in (False, True))

    def predicted_time(each: ScaledGemmConfig) -> float:
        widths = _WIDTHS_WITH_FACTORS if each.has_factors else _WIDTHS
        return -(-each.tiles(m, n) // num_sms) * each.tile_n * widths[each.tile_n]

    chosen = min(large, key=predicted_time)
    if small and (m <= 64 or large[-1].tiles(m, n) < num_sms // 2):
        fitting = [
            each for each in small
            if each.tiles(m, n) * each.split <= num_sms * each.resident and k >= _least_k(each) * each.split
        ]  # fmt: skip
        chosen = [small[0], *fitting][-1]
    return replace(chosen, out=out, source=source)
