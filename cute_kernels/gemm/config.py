"""Which digit products a dense product is made of, what its kernels are compiled for, and which kernel fits a shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig, source_type

MAX_PRODUCTS = (2**31 - 1) // (128 * 128)  # products of two bytes, -128 among them, that int32 sums without overflow
MAX_PLANES = 3


class Products(NamedTuple):
    """The digit products a_i b_j with ``i < planes_a``, ``j < planes_b`` and ``i + j < levels``; i + j is the level."""

    planes_a: int
    planes_b: int
    levels: int

    @property
    def number(self) -> int:
        return sum(len(self.pairs(level)) for level in range(self.levels))

    def pairs(self, level: int) -> list[tuple[int, int]]:
        """Planes (i, j) of the products of one level."""
        return [(i, level - i) for i in range(self.planes_a) if 0 <= level - i < self.planes_b]

    @property
    def longest(self) -> int:
        """The largest K whose sums surely fit int32."""
        return MAX_PRODUCTS // max(len(self.pairs(level)) for level in range(self.levels))

    @property
    def used(self) -> Products:
        """The same products, planes that none of them reads left out."""
        return Products(min(self.planes_a, self.levels), min(self.planes_b, self.levels), self.levels)


def products_of(planes_a: int, planes_b: int, terms: int | None) -> Products:
    """The products that ``terms`` of them mean for these numbers of planes; None is as many levels as planes.

    Raises ``ValueError`` that names the legal numbers.
    """
    deepest = min(MAX_PLANES, planes_a + planes_b - 1)
    legal = {p.number: p for p in (Products(planes_a, planes_b, n) for n in range(1, deepest + 1))}
    if terms is None:
        return Products(planes_a, planes_b, max(planes_a, planes_b)).used
    if terms not in legal:
        raise ValueError(
            f"terms must be one of {', '.join(map(str, legal))} for {planes_a} planes of a and {planes_b} of b, "
            f"got {terms!r}"
        )
    return legal[terms].used


@dataclass(frozen=True)
class GemmConfig(KernelConfig):
    """What a kernel of the dense product is compiled for; M, N and K stay run-time values.

    ``kernel``: ``"wgmma"``, warp groups of sm_90a, or ``"mma"``, warps of any chip from 8.0 on.  ``out`` names the
    output's dtype, ``source`` that of c (int64 with int64 output), or is ``"none"``.  A block has a tile of
    ``tile_m`` x ``tile_n`` results at a time and ``stages`` parts of ``tile_k`` of k in shared memory.

    ``groups``: warp groups that multiply (wgmma); with ``ping_pong`` each on its own tile, else all on one.
    ``cluster``: blocks that share what they read of b.  ``resident``: blocks on a multiprocessor at a time.
    ``band``: rows of tiles, of a cluster's height, that are worked through column by column.
    ``sum_of_squares``: each warp also leaves the sum of its results' sum_of_squares (wgmma, float32 without c).
    """

    kernel: str
    products: Products
    out: str
    source: str = "none"
    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 128
    stages: int = 4
    groups: int = 2
    ping_pong: bool = False
    cluster: int = 1
    resident: int = 1
    band: int = 8
    sum_of_squares: bool = False

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1) if self.kernel == "wgmma" else 256

    @property
    def stage_bytes(self) -> int:
        rows = self.products.planes_a * self.tile_m + self.products.planes_b * self.tile_n
        return rows * self.tile_k

    @property
    def smem_bytes(self) -> int:
        return self.stages * (self.stage_bytes + (16 if self.kernel == "wgmma" else 0))

    def tiles(self, m: int, n: int) -> int:
        """Tiles of an (m, n) output, a cluster's counted as one."""
        return -(-m // (self.tile_m * self.cluster)) * -(-n // self.tile_n)

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        p = self.products
        shape = f"{self.tile_m}x{self.tile_n}x{self.tile_k}s{self.stages}"
        how = f"g{self.groups}{'pp' if self.ping_pong else ''}c{self.cluster}r{self.resident}b{self.band}"
        how += "-squares" if self.sum_of_squares else ""
        kind = f"{p.planes_a}x{p.planes_b}l{p.levels}"
        return f"gemm-{self.kernel}-{kind}-{self.out}-{self.source}-{shape}-{how}"

    @property
    def kernel_header(self) -> str:
        return f"gemm/{self.kernel}.cuh"

    @property
    def kernel_entry(self) -> str:
        return f"gemm_{self.kernel}"

    def _constants(self) -> dict[str, object]:
        return {
            "kPlanesA": self.products.planes_a,
            "kPlanesB": self.products.planes_b,
            "kLevels": self.products.levels,
            "kFloatSums": False,
            "kTileM": self.tile_m,
            "kTileN": self.tile_n,
            "kTileK": self.tile_k,
            "kStages": self.stages,
            "kGroups": self.groups,
            "kPingPong": self.ping_pong,
            "kCluster": self.cluster,
            "kResident": self.resident,
            "kBand": self.band,
            "kSquares": self.sum_of_squares,
        }

    def _types(self) -> dict[str, str]:
        return {"Out": OUT_TYPES[self.out], "Source": source_type(self.source)}
