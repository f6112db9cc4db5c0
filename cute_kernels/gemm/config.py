"""Digit products of a dense integer product, and the configs of its kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from cute_kernels.cpu.linear import FUNCTIONS
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig, source_type

MAX_PRODUCTS = (2**31 - 1) // (128 * 128)  # K up to which int32 holds sums of products of two int8
MAX_PLANES = 3


class Products(NamedTuple):
    """The digit products ``a_i b_j`` with ``i < planes_a``, ``j < planes_b`` and ``i + j < levels``.

    ``i + j`` is the level of a product: products of one level have the same weight and share an accumulator.

    Attributes
    ----------
    planes_a : int
        Digit planes of A.
    planes_b : int
        Digit planes of B.
    levels : int
        Number of levels.

    Examples
    --------
    >>> Products(2, 2, 2).pairs(1)
    [(0, 1), (1, 0)]
    >>> Products(2, 2, 2).number
    3
    """

    planes_a: int
    planes_b: int
    levels: int

    @property
    def number(self) -> int:
        """Number of products."""
        return sum(len(self.pairs(level)) for level in range(self.levels))

    def pairs(self, level: int) -> list[tuple[int, int]]:
        """Return the planes (i, j) of the products of one level."""
        return [(i, level - i) for i in range(self.planes_a) if 0 <= level - i < self.planes_b]

    @property
    def max_k(self) -> int:
        """Largest K for which no int32 accumulator can overflow."""
        return MAX_PRODUCTS // max(len(self.pairs(level)) for level in range(self.levels))

    @property
    def used(self) -> Products:
        """The same products, without planes that none of them reads."""
        return Products(min(self.planes_a, self.levels), min(self.planes_b, self.levels), self.levels)


@lru_cache(maxsize=256)
def select_products(planes_a: int, planes_b: int, terms: int | None) -> Products:
    """Return the digit products of the lowest levels.

    Parameters
    ----------
    planes_a : int
        Digit planes of A.
    planes_b : int
        Digit planes of B.
    terms : int, optional
        Number of products. Default: as many levels as the operand with more planes has planes.

    Returns
    -------
    Products
        Without planes that no product reads.

    Raises
    ------
    ValueError
        If no number of levels has `terms` products; the message lists the valid numbers.
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
    """Config of a kernel of the dense integer product; M, N and K are run-time values.

    Attributes
    ----------
    kernel : str
        ``"wgmma"`` (warp groups, sm_90a) or ``"mma"`` (warps, sm_80 and later).
    products : Products
        Digit products that are summed.
    out : str
        Dtype of the output.
    source : str
        Dtype of c, int64 with an int64 output; ``"none"`` without c.
    activation : str or None
        What the epilogue applies to float results, or to those that it rounds to int8.
    tile_m, tile_n, tile_k : int
        CTA tile.
    stages : int
        Stages of the pipeline in shared memory.
    groups : int
        Consumer warp groups (WGMMA).
    ping_pong : bool
        Each consumer warp group has its own tile; else they share one.
    cluster : int
        CTAs of a cluster; they share the tiles of B by TMA multicast.
    band : int
        Rows of tiles, in units of the cluster's height, that are traversed column by column.
    gated : bool
        The kernel returns at once unless the first word of a gate is the number of levels minus 1; each warp also emits
        the sums of squares of its results and of its levels' magnitudes (WGMMA, float32 without c).
    bits : int
        Width of the operands: 8, or 4 for one product of packed integers by s4 instructions (``"mma"``, native from
        sm_80 to sm_89). `tile_k` counts bytes. The latter has not run on a GPU and is never selected.
    adjacent : int
        Columns side by side that a lane has, 4 or 8: TMA brings rows of B in the order for that, and the epilogue
        transposes nothing (WGMMA, N a multiple of 32, rows of the output aligned to 16 bytes). 0: pairs.
    glu : bool
        Gated linear unit: results of the first N / 2 columns of B, by the activation, times those of the others (WGMMA,
        one digit product, adjacent columns, no c). A tile has `tile_n` columns of B, half as many of the output.
    """

    kernel: str
    products: Products
    out: str
    source: str = "none"
    activation: str | None = None
    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 128
    stages: int = 4
    groups: int = 2
    ping_pong: bool = False
    cluster: int = 1
    band: int = 8
    gated: bool = False
    bits: int = 8
    adjacent: int = 0
    glu: bool = False

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 128 * (self.groups + 1) if self.kernel == "wgmma" else 256

    @property
    def stage_bytes(self) -> int:
        """Bytes of a pipeline stage: tiles of all planes of both operands."""
        rows = self.products.planes_a * self.tile_m + self.products.planes_b * self.tile_n
        return rows * self.tile_k

    @property
    def smem_bytes(self) -> int:
        return self.stages * (self.stage_bytes + (16 if self.kernel == "wgmma" else 0))

    def tiles(self, m: int, n: int) -> int:
        """Return the tiles of a product with n columns of B; the tiles of a cluster count as one."""
        return -(-m // (self.tile_m * self.cluster)) * -(-n // self.tile_n)

    def box_rows(self, m: int, n: int) -> tuple[int, int]:
        """Return the rows of the TMA boxes of A and B: those of a tile, or of all there are if these are fewer."""
        if self.gated:  # rows that do not exist are zeros
            return self.tile_m, self.tile_n // self.cluster
        if self.glu and self.cluster == 1:  # gates, and what they gate
            return min(self.tile_m, m), min(self.tile_n, n) // 2
        return min(self.tile_m, m), min(self.tile_n, n) if self.cluster == 1 else self.tile_n // self.cluster

    @property
    def side_by_side(self) -> GemmConfig:
        """The config that is launched where N is a multiple of 32 and rows of the output are aligned to 16 bytes.

        TMA boxes of B hold whole runs of columns: those of 112 rows, half a tile of 224, stay as they are.
        """
        columns = {"int64": 0, "float32": 4, "int32": 4}.get(self.out, 8)
        box = self.tile_n // self.cluster
        return replace(self, adjacent=columns if self.kernel == "wgmma" and box % (4 * columns or 1) == 0 else 0)

    @property
    def name(self) -> str:
        """Short name, unique among the configs."""
        p = self.products
        shape = f"{self.tile_m}x{self.tile_n}x{self.tile_k}s{self.stages}"
        how = f"g{self.groups}{'pp' if self.ping_pong else ''}c{self.cluster}b{self.band}"
        how += "-gated" if self.gated else ""
        how += "-s4" if self.bits == 4 else ""
        how += f"-adjacent{self.adjacent}" if self.adjacent else ""
        how += "-glu" if self.glu else ""
        how += f"-{self.activation}" if self.activation else ""
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
            "kFloatAccum": False,
            "kBits": self.bits,
            "kActivation": FUNCTIONS.index(self.activation),
            "kTileM": self.tile_m,
            "kTileN": self.tile_n,
            "kTileK": self.tile_k,
            "kStages": self.stages,
            "kGroups": self.groups,
            "kPingPong": self.ping_pong,
            "kCluster": self.cluster,
            "kBand": self.band,
            "kGated": self.gated,
            "kAdjacent": self.adjacent,
            "kGlu": self.glu,
        }

    def _types(self) -> dict[str, str]:
        return {"Out": OUT_TYPES[self.out], "Source": source_type(self.source)}
