"""Small-M product of low-precision floats on sm_90a: configs and selection."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig, source_type
from cute_kernels.scaled_gemm.config import TILE, OperandFormat, exponent_bias_factor

ROWS = (8, 16, 32, 64)  # rows of X that a kernel is compiled for
K_SLICE_BYTES = 64  # bytes of a K slice of a row of weights
SCALES_K = 512  # K of 16 block scales: what TMA reads of a row, and what its rows are multiples of
_SMEM_BYTES = 233472  # shared memory of an SM; each CTA takes 1 KiB more than it requests


@dataclass(frozen=True)
class ReorderConfig(KernelConfig):
    """Config of the kernel that decodes X and writes it in fragment order.

    Attributes
    ----------
    format : OperandFormat
        Format of X.
    bits : int
        Bits per weight, which determine the order along K.
    uses_bfloat16 : bool
        Write bfloat16 times the block scales of X; else bytes.
    block_sums : bool
        Write blocks of 32 values in order, and their scales as float32.
    threads : int
        Threads per CTA.
    """

    format: OperandFormat
    bits: int
    uses_bfloat16: bool = False
    block_sums: bool = False
    threads: int = 128

    @property
    def name(self) -> str:
        """Short name, unique among the configs."""
        return f"gemm-floats-order-{self.format.name}-{self.bits}{'h' * self.uses_bfloat16}{'s' * self.block_sums}"

    kernel_header = "scaled_gemm/small_m/order.cuh"
    kernel_entry = "order_few_rows"

    def _constants(self) -> dict[str, object]:
        return {
            "kBits": self.bits,
            "kBfloat16": self.uses_bfloat16,
            "kBlockSums": self.block_sums,
            "kBlock": self.format.block,
        }

    def _types(self) -> dict[str, str]:
        return {"Format": self.format.dtype.upper(), "Scale": self.format.scale.upper() or "void"}


class StagedConfig(KernelConfig):
    """Config of a kernel whose warp groups take turns on stages of shared memory."""

    groups: int  # consumer warp groups, of 64 rows of weights each
    resident: int  # CTAs per SM
    depth: int  # warp groups that take turns
    split: int  # CTAs of a cluster

    @property
    def threads(self) -> int:
        """Threads per CTA: consumers, and those that fetch."""
        return 128 * self.groups + (128 if self.groups > 2 else 32)

    @property
    def tile_n(self) -> int:
        """Rows of weights per tile."""
        return 64 * self.groups // self.depth

    def ctas_at_once(self, num_sms: int) -> int:
        """Return how many CTAs of whole clusters run at the same time.

        Clusters of four have 120 of the 132 SMs of an H200, since a GPC has no multiple of four of them.
        """
        sms = num_sms if self.split < 4 else num_sms * 10 // 11
        return sms // self.split * self.split * self.resident

    @property
    def stage_bytes(self) -> int:
        """Bytes per stage, with two barriers."""
        raise NotImplementedError

    @property
    def stages(self) -> int:
        """Pipeline stages: as many as fit shared memory, a multiple of `depth`.

        The same warp groups then read a stage in each round. Others could wait for it before the previous round's
        copies have landed. The parity is also that of the round before, which is over: the wait would return at once.
        """
        fitting = min(8, (_SMEM_BYTES // self.resident - 1024) // self.stage_bytes)
        return fitting - fitting % self.depth

    @property
    def smem_bytes(self) -> int:
        return self.stages * self.stage_bytes


@dataclass(frozen=True)
class SmallMConfig(StagedConfig):
    """Config of the small-M kernel: ``D = X W^T`` with few rows of X and packed weights W.

    Attributes
    ----------
    a : OperandFormat
        Format of X, shape (M, K).
    b : OperandFormat
        Format of the weights, shape (N, K).
    rows : int
        Rows of X that the kernel is compiled for, at least M.
    out : str
        Dtype of the output.
    source : str
        Dtype of c, or ``"none"``.
    groups : int
        Consumer warp groups; each multiplies 64 rows of weights.
    depth : int
        Warp groups that share 64 rows of weights; they take turns in the pipeline's stages.
    split : int
        CTAs of a cluster that share the K range of a tile (split-K).
    resident : int
        CTAs per SM.
    k_slices : int
        K slices of 64 bytes of weights per stage.
    block_sums : bool
        Block scales multiply the sums of their block; see :func:`takes_block_sums`.
    """

    kernel: ClassVar[str] = "few"
    promote: ClassVar[bool] = True  # partial accumulators of a K slice are added in float32

    a: OperandFormat
    b: OperandFormat
    rows: int
    out: str = "float32"
    source: str = "none"
    groups: int = 2
    depth: int = 1
    split: int = 1
    resident: int = 2
    k_slices: int = 2
    block_sums: bool = False

    @property
    def tile_k(self) -> int:
        """K per stage."""
        return self.k_slices * K_SLICE_BYTES * 8 // self.b.bits

    @property
    def ways(self) -> int:
        """Instructions under way at a time with `block_sums`, each with accumulators of its own."""
        if self.rows <= 16:
            return 4 if self.groups * self.resident <= 2 else 2
        return 2 if self.groups * self.resident <= 2 else 1

    @property
    def scale_box(self) -> int:
        """Block scales of a row of weights that TMA brings per stage: as many as belong to it, or 16."""
        return max(16, self.tile_k // self.b.block) if self.block_sums and self.b.block else 0

    @property
    def uses_bfloat16(self) -> bool:
        """Whether Tensor Cores multiply bfloat16, which holds values times block scales, not bytes."""
        return (self.a.block > 0 or self.b.block > 0) and not self.block_sums

    @property
    def stage_bytes(self) -> int:
        """Bytes per stage: K slices of weights, the same K range of X, block scales, and two barriers."""
        factors = 4 * self.rows * self.tile_k // self.a.block if self.block_sums and self.a.block else 0
        scales = self.scale_box * self.tile_n
        return (
            self.k_slices * K_SLICE_BYTES * self.tile_n
            + self.rows * self.tile_k * (2 if self.uses_bfloat16 else 1)
            + factors
            + scales
            + 16
        )

    def tiles(self, n: int) -> int:
        """Return the tiles of an (M, n) output."""
        return -(-n // self.tile_n)

    @property
    def exponent_bias_factor(self) -> float:
        """Factor by which decoding reduces the product."""
        return 1.0 if self.uses_bfloat16 else exponent_bias_factor(self.a, self.b)

    @property
    def name(self) -> str:
        """Short name, unique among the configs."""
        shape = f"r{self.rows}s{self.stages}g{self.groups}d{self.depth}k{self.split}x{self.resident}w{self.k_slices}"
        shape += f"y{self.ways}" * self.block_sums
        return f"gemm-floats-few-{self.a.name}-{self.b.name}-{self.out}-{self.source}-{shape}"

    @property
    def kernel_header(self) -> str:
        return f"scaled_gemm/small_m/{'blocks' if self.block_sums else 'kernel'}.cuh"

    @property
    def kernel_entry(self) -> str:
        return f"gemm_floats_few{'_blocks' * self.block_sums}"

    def _constants(self) -> dict[str, object]:
        return {
            "kFloatAccum": True,
            "kLevels": 1,
            "kRows": self.rows,
            "kGroups": self.groups,
            "kDepth": self.depth,
            "kKSlices": self.k_slices,
            "kStages": self.stages,
            "kSplit": self.split,
            "kResident": self.resident,
            "kBfloat16": self.uses_bfloat16,
            "kBlockSums": self.block_sums,
            "kBlockX": self.a.block if self.block_sums else 0,
            "kWays": self.ways if self.block_sums else 1,
            "kBlock": self.b.block,
        }

    def _types(self) -> dict[str, str]:
        return {
            "Out": OUT_TYPES[self.out],
            "Source": source_type(self.source),
            "FormatA": self.a.dtype.upper(),
            "FormatB": self.b.dtype.upper(),
            "Scale": self.b.scale.upper() or "void",
        }


def supports_small_m(m: int, a: OperandFormat, b: OperandFormat, arch: str) -> bool:
    """Return whether the small-M kernels multiply `m` rows of these operands.

    They do not read tile scales, nor those of 128 values. Where nothing is decoded, the tiled kernels are as fast.
    Above 32 rows, X would be read too often beside unscaled 8-bit weights.

    Parameters
    ----------
    m : int
        Rows of X.
    a : OperandFormat
        Format of X.
    b : OperandFormat
        Format of the weights.
    arch : str
        Architecture, such as ``"sm_90a"``.

    Returns
    -------
    bool
        Whether :func:`choose_small_m` has a config.
    """
    most = 0 if b.bits == 6 else ROWS[-1]
    if b.bits == 8 and not (a.block or b.block):
        most = 32 if a.bits < 8 else 0
    return arch == "sm_90a" and not (a.tiles or b.tiles or a.block == TILE) and m <= most


def takes_block_sums(m: int, k: int, a: OperandFormat, b: OperandFormat) -> bool:
    """Return whether block scales multiply the sums of their block, not the values.

    TMA brings scales of the weights, 16 at a time. Those of 16 values, of 4-bit weights, take two instructions of 32
    k each for 32 k. With more rows of X, whose own scales multiply sums too, it takes longer than to decode the weights
    to bfloat16 times their scale.

    Examples
    --------
    >>> mxfp8, mxfp4 = OperandFormat("e4m3", 32, "ue8m0"), OperandFormat("e2m1", 32, "ue8m0")
    >>> takes_block_sums(16, 4096, mxfp8, mxfp4), takes_block_sums(64, 4096, mxfp8, mxfp4)
    (True, False)
    """
    if k % SCALES_K or not (a.block or b.block):
        return False
    if b.block == 16:
        return b.bits == 4 and m <= (8 if a.block else 16)
    return a.block in (0, 32) and b.block in (0, 32) and m <= (32 if a.block else 64)


def candidates(rows: int, a: OperandFormat, b: OperandFormat, *, block_sums: bool = False) -> list[SmallMConfig]:
    """Return the configs of :func:`choose_small_m` for `rows` of 8, 16, 32 or 64, largest tile first."""
    if block_sums:
        k_slices = 4 if rows <= 32 else 2
        base = SmallMConfig(a, b, rows, groups=4, resident=1, k_slices=k_slices, block_sums=True)
        deep = replace(base, groups=2, depth=2, resident=2 if rows == 8 else 1)
        return [base, replace(base, depth=2), *(replace(deep, split=split) for split in (1, 2, 4))]
    base = SmallMConfig(a, b, rows, resident=2 if rows <= 16 else 1)
    if base.uses_bfloat16:  # bottleneck: decoding
        wide = [replace(base, groups=4, resident=1, k_slices=4 if rows <= 32 else 2)]
    else:
        base = replace(base, k_slices=2 if rows <= 8 else 4)
        wide = (
            [] if rows <= 16 else [replace(base, groups=4, k_slices=4 if rows <= 32 else 2)]
        )  # larger tiles read X less often
    # Smaller tiles with the same number of warp groups.
    deep = replace(base, depth=2, resident=1, k_slices=2 if rows > 32 else base.k_slices)
    return [*wide, base, *(replace(deep, split=split) for split in (1, 2, 4))]


@lru_cache(maxsize=4096)
def choose_small_m(
    m: int,
    n: int,
    k: int,
    a: OperandFormat,
    b: OperandFormat,
    *,
    out: str = "float32",
    source: str = "none",
    num_sms: int = 132,
) -> SmallMConfig:
    """Return the config of a small-M product.

    The largest tile that keeps two of three SMs busy; split-K leaves each CTA enough K to pay for the reduction, and
    all CTAs run at the same time.

    Parameters
    ----------
    m, n, k, a, b, out, source, num_sms
        As for :func:`cute_kernels.scaled_gemm.config.choose`; `a` is X, `b` are the weights.

    Returns
    -------
    SmallMConfig
        One of :func:`candidates`, with `out` and `source` set.
    """
    rows = next(each for each in ROWS if m <= each)
    block_sums = takes_block_sums(m, k, a, b)
    least = 4096 if rows > 32 and not block_sums else 1024
    fitting = [
        each for each in candidates(rows, a, b, block_sums=block_sums)
        if each.split == 1
        or (k >= least * each.split and each.tiles(n) * each.split <= each.ctas_at_once(num_sms))
    ]  # fmt: skip
    busy = (each for each in fitting if 3 * each.tiles(n) * each.split >= 2 * num_sms)
    return replace(next(busy, fitting[-1]), out=out, source=source)
