"""Kernel selection for the dense integer product: a cost model of its shape."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from cute_kernels.gemm.config import GemmConfig, Products


class Cost(NamedTuple):
    """Predicted microseconds on an H200: per launch, per wave of tiles, and per 10^6 int8 products on an SM."""

    launch: float
    wave: float
    products: float


_SMEM_BYTES = 233472  # shared memory of an sm_90a SM; each CTA takes 1 KiB more than it requests


# WGMMA configs per number of levels, and their measured costs (docs/gemm.md).
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
    """Return the WGMMA configs for `products`, with as many stages as fit shared memory."""
    found = []
    for tile, cost in _TILES[products.levels]:
        config = replace(tile, products=products)
        smem_bytes = _SMEM_BYTES // config.resident - 1024 - 16 * 8
        found.append((replace(config, stages=min(6, smem_bytes // config.stage_bytes)), cost))
    return found


def candidates(products: Products, arch: str) -> list[GemmConfig]:
    """Return the configs that :func:`choose` selects from, with int32 output."""
    if arch == "sm_90a":
        return [config for config, _ in _wgmma(products)]
    # Up to 4 stages of 64 bytes of K in 96 KiB; three levels of accumulators leave registers for narrow tiles alone.
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
    num_sms: int = 132,
) -> GemmConfig:
    """Return the config with the least predicted time for a product of (m, k) and (k, n).

    The cost model counts whole waves of tiles.

    Parameters
    ----------
    m, n, k : int
        Sizes of the product.
    terms : Products
        Digit products that are summed.
    arch : str
        Architecture, such as ``"sm_90a"``.
    out : str, default "int32"
        Dtype of the output.
    source : str, default "none"
        Dtype of c, or ``"none"``.
    num_sms : int, default 132
        SMs of the GPU.

    Returns
    -------
    GemmConfig
        One of :func:`candidates`, with `out` and `source` set.
    """
    if arch != "sm_90a":
        return replace(candidates(terms, arch)[0], out=out, source=source)

    def cost(choice: tuple[GemmConfig, Cost]) -> float:
        config, unit = choice
        each = -(-config.tiles(m, n) // (num_sms // config.cluster))  # tiles per SM
        work = config.tile_m * config.tile_n * terms.number * -(-k // config.tile_k) * config.tile_k / 1e6
        return unit.launch + unit.wave * -(-each // config.resident) + unit.products * each * work

    return replace(min(_wgmma(terms), key=cost)[0], out=out, source=source)
