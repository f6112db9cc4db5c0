"""The dense float product of few rows and many weights, on sm_90a: its kernels' configs, the choice, the launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from cute_kernels import workspace
from cute_kernels.gemm_floats_config import Kind, lift_of
from cute_kernels.jit.compiler import Unit
from cute_kernels.jit.kernel import get_kernel, tensor_map
from cute_kernels.source import OUT_TYPES, constants

if TYPE_CHECKING:
    from cute_kernels.gemm_cuda import Result, Rows

ROWS = (8, 16, 32, 64)  # of X that a kernel is compiled for
_MOST_ROWS = {4: 64, 8: 32}  # by bits of the weights
SLAB = 64  # bytes of a row of weights
_SHARED = 233472  # bytes of a multiprocessor's shared memory, of which each block takes 1 KiB more than it asks


@dataclass(frozen=True)
class OrderConfig:
    """The kernel that writes X as bytes in the order in which weights of ``bits`` a code are multiplied."""

    dtype: str
    bits: int
    threads: int = 128
    smem_bytes: int = 0

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        return f"gemm-floats-order-{self.dtype}-{self.bits}"

    def unit(self, arch: str) -> Unit:
        """The translation unit of this config for ``arch``."""
        source = (
            '#include "gemm_floats_few.cuh"\nnamespace magicube {\nstruct Config {\n'
            f"{constants({'kBits': self.bits})}  using Format = {self.dtype.upper()};\n}};\n}}  // namespace magicube\n"
        )
        return Unit(source, "magicube::order_few_rows<magicube::Config>", arch)


@dataclass(frozen=True)
class FewRowsConfig:
    """``a``, ``b``: the operands, X and the weights; ``out``, ``source``: as in ``FloatGemmConfig``.

    ``rows``: of X at most; ``groups`` warp groups have 64 rows of weights each, and ``slabs`` times 64 bytes of them a
    stage; ``split`` blocks share the k of a tile; ``resident``: blocks on a multiprocessor at a time.
    """

    kernel: ClassVar[str] = "few"
    promote: ClassVar[bool] = True  # sums of a slab are added in float32

    a: Kind
    b: Kind
    rows: int
    out: str = "float32"
    source: str = "none"
    groups: int = 2
    split: int = 1
    resident: int = 2
    slabs: int = 2

    @property
    def threads(self) -> int:
        return 128 * self.groups + (128 if self.groups > 2 else 32)

    @property
    def tile_n(self) -> int:
        return 64 * self.groups

    @property
    def tile_k(self) -> int:
        return self.slabs * SLAB * 8 // self.b.bits

    @property
    def stage_bytes(self) -> int:
        """Of slabs of weights, as much k of X, and two barriers."""
        return self.slabs * SLAB * self.tile_n + self.rows * self.tile_k + 16

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
    def lift(self) -> float:
        """The factor that decoding leaves out."""
        return lift_of(self.a, self.b)

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        shape = f"r{self.rows}s{self.stages}g{self.groups}k{self.split}x{self.resident}w{self.slabs}"
        return f"gemm-floats-few-{self.a.name}-{self.b.name}-{self.out}-{self.source}-{shape}"

    def unit(self, arch: str) -> Unit:
        """The translation unit of this config for ``arch``."""
        members = constants(
            {
                "kFloatSums": True,
                "kLevels": 1,
                "kRows": self.rows,
                "kGroups": self.groups,
                "kSlabs": self.slabs,
                "kStages": self.stages,
                "kSplit": self.split,
                "kResident": self.resident,
            }
        )
        types = {
            "Out": OUT_TYPES[self.out],
            "Source": "Nothing" if self.source == "none" else OUT_TYPES[self.source],
            "FormatA": self.a.dtype.upper(),
            "FormatB": self.b.dtype.upper(),
        }
        using = "".join(f"  using {name} = {value};\n" for name, value in types.items())
        text = (
            f'#include "gemm_floats_few.cuh"\nnamespace magicube {{\nstruct Config {{\n{members}{using}}};\n'
            "}  // namespace magicube\n"
        )
        return Unit(text, "magicube::gemm_floats_few<magicube::Config>", arch)


def serves(m: int, a: Kind, b: Kind, arch: str) -> bool:
    """Whether these kernels multiply so many rows of these operands: without factors of blocks or tiles.

    Weights of 8 bits need no decoding, and more than 32 rows are read too often.
    """
    plain = not any(kind.block or kind.tiles for kind in (a, b))
    return arch == "sm_90a" and plain and m <= _MOST_ROWS.get(b.bits, 0)


def candidates(rows: int, a: Kind, b: Kind) -> list[FewRowsConfig]:
    """The configs that :func:`choose_few` chooses from for ``rows`` of 8, 16, 32 or 64, largest tile first."""
    base = FewRowsConfig(a, b, rows, resident=2 if rows <= 16 else 1, slabs=2 if rows <= 8 else 4)
    wide = [] if rows <= 16 else [replace(base, groups=4)]  # X is read less often
    return [*wide, base, *(replace(base, groups=1, split=split) for split in (2, 4))]


@lru_cache(maxsize=4096)
def choose_few(
    m: int, n: int, k: int, a: Kind, b: Kind, *, out: str = "float32", source: str = "none", multiprocessors: int = 132
) -> FewRowsConfig:
    """The config for so many rows: the largest tile that keeps three of four multiprocessors busy, 1024 k a block."""
    rows = next(each for each in ROWS if m <= each)
    fitting = [each for each in candidates(rows, a, b) if each.split == 1 or k >= 1024 * each.split]
    busy = (each for each in fitting if 4 * each.tiles(n) * each.split >= 3 * multiprocessors)
    return replace(next(busy, fitting[-1]), out=out, source=source)


def launch_few(
    config: FewRowsConfig, a: Rows, b: Rows, shape: tuple[int, int, int], written: Result, alpha: float, beta: float
) -> None:
    """The product (M, N, K) of ready codes to where ``written`` says."""
    m, n, k = shape
    pitch = -(-k // 128) * 128
    ordered = workspace.empty((m, pitch), torch.uint8, a.owner.device)
    get_kernel(OrderConfig(config.a.dtype, config.b.bits)).launch(
        (-(-m * pitch // 16 // 128), 1, 1), (a.pointer, a.pitch, a.owner.shape[1], m, ordered.data_ptr(), pitch)
    )
    maps = (
        tensor_map(ordered.data_ptr(), 1, (pitch, m), pitch, (128, config.rows), 128),
        tensor_map(b.pointer, 1, (b.owner.shape[1], n), b.pitch, (config.slabs * SLAB, config.tile_n)),
    )
    get_kernel(config).launch(
        (config.tiles(n) * config.split, 1, 1),
        (*maps, k, *written.arguments, np.float32(alpha * config.lift), np.float32(beta)),
        (config.split, 1, 1) if config.split > 1 else None,
        early=True,
    )
