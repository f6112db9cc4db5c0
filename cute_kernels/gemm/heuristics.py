"""Which dense int8 kernel runs a product: a pure choice from its numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from cute_kernels.gemm.config import GemmConfig, Products


class Cost(NamedTuple):
    """Microseconds on an H200: of a launch, of each turn of a multiprocessor, of 2^20 products of bytes in one."""

    launch: float
    turn: float
    products: float


_SHARED = (
    233472  # bytes of shared memory of an sm_90a multiprocessor, of which each block takes 1 KiB more than it asks
)


# Tiles of warp groups, and what they were measured to cost (docs/gemm.md); by levels.
_TILES = {
    1: [
        (GemmConfig("wgmma", Products(1, 1, 1), "int32", ping_pong=True, cluster=2), Cost(4.8, 1.6, 0.134)),
        (GemmConfig("wgmma", Products(1, 1, 1), "int32"), Cost(2.4, 2.6, 0.135)),
        (GemmConfig("wgmma", Products(1, 1, 1), "int32", tile_m=64, groups=1, resident=2), Cost(2.0, 2.4, 0.166)),
        (
            GemmConfig("wgmma", Products(1, 1, 1), "int32", tile_m=64, tile_n=64, groups=1, resident=2),
            Cost(2.0, 1.3, 0.245),
        ),
    ],
    2: [
        (GemmConfig("wgmma", Products(2, 2, 2), "int32", cluster=2), Cost(4.7, 0.5, 0.16)),
        (
            GemmConfig("wgmma", Products(2, 2, 2), "int32", tile_m=64, tile_n=64, groups=1, resident=2),
            Cost(2.9, 0.7, 0.209),
        ),
    ],
    3: [
        (GemmConfig("wgmma", Products(3, 3, 3), "int32", tile_k=64, cluster=2), Cost(3.5, 1.1, 0.148)),
        (
            GemmConfig("wgmma", Products(3, 3, 3), "int32", tile_m=64, tile_n=64, tile_k=64, groups=1, resident=2),
            Cost(0.3, 3.5, 0.17),
        ),
    ],
}


def _wgmma(products: Products) -> list[tuple[GemmConfig, Cost]]:
    """The tiles for ``products``, with as many stages as there is room for."""
    found = []
    for tile, cost in _TILES[products.levels]:
        config = replace(tile, products=products)
        room = _SHARED // config.resident - 1024 - 16 * 8
        found.append((replace(config, stages=min(6, room // config.stage_bytes)), cost))
    return found


def candidates(products: Products, arch: str) -> list[GemmConfig]:
    """The configs that :func:`choose` chooses from, with int32 output."""
    if arch == "sm_90a":
        return [config for config, _ in _wgmma(products)]
    # 4 stages of 64 bytes of k, or what 100 KB hold; narrow tiles where three levels take the registers.
    tile_n = 128 if products.levels < 3 else 64
    config = GemmConfig("mma", products, "int32", tile_n=tile_n, tile_k=64)
    return [replace(config, stages=max(2, min(4, 98304 // config.stage_bytes)))]


@lru_cache(maxsize=4096)
def choose(
    m: int,
    n: int,
    k: int,
    terms: Products,
    arch: str,
    *,
    out: str = "int32",
    source: str = "none",
    multiprocessors: int = 132,
) -> GemmConfig:
    """The config for a product of (m, k) and (k, n): the least cost by a model of whole turns."""
    if arch != "sm_90a":
        return replace(candidates(terms, arch)[0], out=out, source=source)

    def cost(choice: tuple[GemmConfig, Cost]) -> float:
        config, unit = choice
        each = -(-config.tiles(m, n) // (multiprocessors // config.cluster))  # tiles of a multiprocessor
        work = config.tile_m * config.tile_n * terms.number * -(-k // config.tile_k) * config.tile_k / 1e6
        return unit.launch + unit.turn * -(-each // config.resident) + unit.products * each * work

    return replace(min(_wgmma(terms), key=cost)[0], out=out, source=source)
