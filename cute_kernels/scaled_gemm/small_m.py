"""The dense float product of few rows and many weights, on sm_90a: its kernels' configs, the choice, the launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig, source_type
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.jit.tma import tensor_map
from cute_kernels.scaled_gemm.config import OperandFormat, exponent_bias_factor

if TYPE_CHECKING:
    from cute_kernels.gemm.epilogue import Result
    from cute_kernels.operands import Rows

ROWS = (8, 16, 32, 64)  # of X that a kernel is compiled for
K_SLICE_BYTES = 64  # bytes of a row of weights
Factors = tuple[int, int, int]  # of blocks: address, pitch, blocks of a row
_SHARED = 233472  # bytes of a multiprocessor's shared memory, of which each block takes 1 KiB more than it asks


@dataclass(frozen=True)
class ReorderConfig(KernelConfig):
    """The kernel that writes X, codes of ``kind``, in the order in which weights of ``bits`` a code are multiplied: as
    bytes, or ``uses_bfloat16``, as bfloat16 times the factors of its blocks."""

    kind: OperandFormat
    bits: int
    uses_bfloat16: bool = False
    threads: int = 128

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        return f"gemm-floats-order-{self.kind.name}-{self.bits}{'h' if self.uses_bfloat16 else ''}"

    kernel_header = "scaled_gemm/small_m.cuh"
    kernel_entry = "order_few_rows"

    def _constants(self) -> dict[str, object]:
        return {
            "kBits": self.bits,
            "kHalves": self.uses_bfloat16,
            "kBlock": self.kind.block,
        }

    def _types(self) -> dict[str, str]:
        return {"Format": self.kind.dtype.upper(), "Scale": self.kind.scale.upper() or "void"}


@dataclass(frozen=True)
class SmallMConfig(KernelConfig):
    """``a``, ``b``: the operands, X and the weights; ``out``, ``source``: as in ``ScaledGemmConfig``.

    ``rows``: of X at most; ``groups`` warp groups have 64 rows of weights each, ``depth`` of them the same rows, whose
    stages of ``k_slices`` times 64 bytes they take by turns; ``split`` blocks share the k of a tile; ``resident``: blocks
    on a multiprocessor at a time.
    """

    kernel: ClassVar[str] = "few"
    promote: ClassVar[bool] = True  # sums of a slab of bytes are added in float32, of uses_bfloat16 all are float32

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

    @property
    def threads(self) -> int:
        return 128 * self.groups + (128 if self.groups > 2 else 32)

    @property
    def tile_n(self) -> int:
        return 64 * self.groups // self.depth

    @property
    def tile_k(self) -> int:
        return self.k_slices * K_SLICE_BYTES * 8 // self.b.bits

    @property
    def uses_bfloat16(self) -> bool:
        """Whether bfloat16 is multiplied, because blocks have factors, and not bytes."""
        return self.a.block > 0 or self.b.block > 0

    @property
    def stage_bytes(self) -> int:
        """Of k_slices of weights, as much k of X, and two barriers."""
        return (
            self.k_slices * K_SLICE_BYTES * self.tile_n
            + self.rows * self.tile_k * (2 if self.uses_bfloat16 else 1)
            + 16
        )

    @property
    def stages(self) -> int:
        """As many as there is room for."""
        return min(8, (_SHARED // self.resident - 1024) // self.stage_bytes)

    @property
    def smem_bytes(self) -> int:
        return self.stages * self.stage_bytes

    def tiles(self, n: int) -> int:
        """Tiles of the output."""
        return -(-n // self.tile_n)

    @property
    def exponent_bias_factor(self) -> float:
        """The factor that decoding leaves out."""
        return 1.0 if self.uses_bfloat16 else exponent_bias_factor(self.a, self.b)

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        shape = f"r{self.rows}s{self.stages}g{self.groups}d{self.depth}k{self.split}x{self.resident}w{self.k_slices}"
        return f"gemm-floats-few-{self.a.name}-{self.b.name}-{self.out}-{self.source}-{shape}"

    kernel_header = "scaled_gemm/small_m.cuh"
    kernel_entry = "gemm_floats_few"

    def _constants(self) -> dict[str, object]:
        return {
            "kFloatSums": True,
            "kLevels": 1,
            "kRows": self.rows,
            "kGroups": self.groups,
            "kDepth": self.depth,
            "kSlabs": self.k_slices,
            "kStages": self.stages,
            "kSplit": self.split,
            "kResident": self.resident,
            "kHalves": self.uses_bfloat16,
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


def supports(m: int, a: OperandFormat, b: OperandFormat, arch: str) -> bool:
    """Whether these kernels multiply so many rows of these operands: without factors of tiles.

    Weights of 8 bits without factors need no decoding, and more than 32 rows are read too often.
    """
    most = 0 if b.bits == 6 else 32 if b.bits == 8 and not (a.block or b.block) else ROWS[-1]
    return arch == "sm_90a" and not (a.tiles or b.tiles) and m <= most


def candidates(rows: int, a: OperandFormat, b: OperandFormat) -> list[SmallMConfig]:
    """The configs that :func:`choose_small_m` chooses from for ``rows`` of 8, 16, 32 or 64, largest tile first."""
    base = SmallMConfig(a, b, rows, resident=2 if rows <= 16 else 1)
    if base.uses_bfloat16:  # decoding is most of it
        wide = [replace(base, groups=4, resident=1, k_slices=4 if rows <= 32 else 2)]
    else:
        base = replace(base, k_slices=2 if rows <= 8 else 4)
        wide = [] if rows <= 16 else [replace(base, groups=4, k_slices=4 if rows <= 32 else 2)]  # X is read less often
    # Fewer rows of weights a tile, but as many warp groups.
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
    multiprocessors: int = 132,
) -> SmallMConfig:
    """The config for so many rows: the largest tile that keeps two of three multiprocessors busy, with k enough a
    block that adding up the sums does not take longer."""
    rows = next(each for each in ROWS if m <= each)
    least = 4096 if rows > 32 else 1024
    fitting = [each for each in candidates(rows, a, b) if each.split == 1 or k >= least * each.split]
    busy = (each for each in fitting if 3 * each.tiles(n) * each.split >= 2 * multiprocessors)
    return replace(next(busy, fitting[-1]), out=out, source=source)


def launch_small_m(
    config: SmallMConfig,
    a: tuple[Rows, Factors],
    b: tuple[Rows, Factors],
    shape: tuple[int, int, int],
    written: Result,
    alpha: float,
    beta: float,
) -> None:
    """The product (M, N, K) of ready codes, with the factors of their blocks, to where ``written`` says."""
    (m, n, k), (x, factors_x), (weights, factors) = shape, a, b
    units, size = -(-k // 128) * 2, 2 if config.uses_bfloat16 else 1  # of 64 numbers
    pitch = units * 64 * size
    ordered = workspace.empty((m, pitch), torch.uint8, x.owner.device)
    # It waits for the end of all before it, and only then lets the product begin, which reads weights at once.
    get_kernel(ReorderConfig(config.a, config.b.bits, config.uses_bfloat16)).launch(
        (-(-m * units // 128), 1, 1),
        (x.pointer, x.pitch, x.owner.shape[1], m, *factors_x, ordered.data_ptr(), pitch),
        pdl=True,
    )
    maps = (
        tensor_map(ordered.data_ptr(), 1, (pitch, m), pitch, (128, config.rows), 128),
        tensor_map(
            weights.pointer,
            1,
            (weights.owner.shape[1], n),
            weights.pitch,
            (config.k_slices * K_SLICE_BYTES, config.tile_n),
        ),
    )
    get_kernel(config).launch(
        (config.tiles(n) * config.split, 1, 1),
        (*maps, k, *factors, *written.arguments, np.float32(alpha * config.exponent_bias_factor), np.float32(beta)),
        (config.split, 1, 1) if config.split > 1 else None,
        pdl=True,
    )
