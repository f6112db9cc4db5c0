"""Kernel selection for the dense integer product: a cost model of its shape."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from cute_kernels.gemm.config import GemmConfig, Products


class Cost(NamedTuple):
    """Predicted microseconds: per launch, per wave of CTAs, and per 10^6 int8 products on an SM."""

    launch: float
    wave: float
    products: float


_SMEM_BYTES = 233472  # shared memory of an sm_90a SM; each CTA takes 1 KiB more than it requests
LEAST_US, BYTES_PER_US = 2.0, 3.5e6  # of a launch, and of operands that L2 does not hold
_ANY = Cost(2.0, 2.6, 0.135)  # other architectures, not measured


def _shared(products: Products, tile_m: int, tile_n: int, tile_k: int, stages: int = 6) -> GemmConfig:
    """Return a config whose consumer warp groups share a tile."""
    return GemmConfig(
        "wgmma", products, "int32", tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, stages=stages, groups=tile_m // 64
    )


# WGMMA configs with their largest numbers of stages, and their costs with outputs of 2 and of 4 bytes: fits to 115 and
# 58 shapes measured behind another kernel on an H200, and to 41 of several levels on an H100 (docs/lab/gemm.md).
_ONE, _TWO, _THREE = Products(1, 1, 1), Products(2, 2, 2), Products(3, 3, 3)
_PING_PONG = GemmConfig("wgmma", _ONE, "int32", stages=6, ping_pong=True)
_TILES = {
    1: [
        (_shared(_ONE, 64, 32, 256, 8), Cost(1.537, 0.695, 0.401), Cost(1.787, 0.494, 0.408)),
        (_shared(_ONE, 64, 64, 256), Cost(1.385, 0.843, 0.246), Cost(1.526, 0.962, 0.252)),
        (_shared(_ONE, 64, 64, 128), Cost(1.419, 0.869, 0.257), Cost(1.051, 1.467, 0.277)),  # two CTAs an SM
        (_shared(_ONE, 128, 64, 128, 8), Cost(1.316, 1.117, 0.195), Cost(1.313, 1.898, 0.191)),
        (_shared(_ONE, 128, 128, 128), Cost(1.328, 1.823, 0.154), Cost(1.104, 3.185, 0.151)),
        (_shared(_ONE, 128, 192, 128, 5), Cost(1.242, 2.43, 0.15), Cost(0.479, 4.906, 0.15)),
        (_shared(_ONE, 128, 224, 128, 5), Cost(1.34, 2.393, 0.156), Cost(1.01, 4.797, 0.159)),
        (replace(_PING_PONG, tile_m=64, tile_n=192, stages=7), Cost(2.018, 0.99, 0.158), Cost(0.817, 2.699, 0.17)),
        (_PING_PONG, Cost(2.139, 1.211, 0.149), Cost(1.685, 3.091, 0.149)),
        (replace(_PING_PONG, cluster=2), Cost(2.599, 1.264, 0.153), Cost(2.789, 2.953, 0.149)),
    ],
    2: [
        (config, cost, cost)
        for config, cost in (
            (_shared(_TWO, 64, 32, 256), Cost(1.105, 0.419, 0.39)),
            (_shared(_TWO, 64, 64, 128), Cost(1.076, 0.883, 0.227)),
            (_shared(_TWO, 128, 64, 128), Cost(0.0, 2.031, 0.174)),
            (_shared(_TWO, 128, 128, 128), Cost(0.888, 2.562, 0.151)),
        )
    ],
    3: [
        (config, cost, cost)
        for config, cost in (
            (_shared(_THREE, 64, 32, 128), Cost(1.486, 0.222, 0.296)),
            (_shared(_THREE, 64, 64, 128), Cost(1.256, 0.279, 0.197)),
            (_shared(_THREE, 128, 64, 64), Cost(0.0, 2.136, 0.157)),
            (_shared(_THREE, 128, 128, 64), Cost(0.0, 2.971, 0.147)),
        )
    ],
}


def ctas_per_sm(config: GemmConfig) -> int:
    """Return the CTAs that the cost model counts on an SM, as many as its shared memory holds; 1 where not measured."""
    return max(1, _SMEM_BYTES // (config.smem_bytes + 1024)) if config.kernel == "wgmma" else 1


def _wgmma(products: Products, out: str = "int32") -> list[tuple[GemmConfig, Cost]]:
    """Return the WGMMA configs for `products`, with as many stages as fit shared memory, and their costs."""
    found = []
    for tile, narrow, wide in _TILES[products.levels]:
        config = replace(tile, products=products)
        most = (_SMEM_BYTES - 1024 - 16 * 8) // config.stage_bytes
        cost = narrow if out.endswith("float16") or out == "int8" else wide
        found.append((replace(config, stages=min(tile.stages, most)), cost))
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
    glu: bool = False,
) -> GemmConfig:
    """Return the config with the least predicted time for a product of (m, k) and (k, n).

    The cost model counts whole waves of CTAs, and of tiles an SM.

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
    glu : bool, default False
        Of tiles of a multiple of 64 columns of B, gates and what they gate.

    Returns
    -------
    GemmConfig
        One of :func:`candidates`, with `out`, `source` and `glu` set.
    """
    config, _ = _cheapest(m, n, k, terms, arch, out, num_sms, 64 if glu else 1)
    return replace(config, out=out, source=source, glu=glu)


def predict(m: int, n: int, k: int, terms: Products, arch: str, *, out: str = "int32", num_sms: int = 132) -> float:
    """Return the predicted microseconds of the config that :func:`choose` returns.

    Examples
    --------
    >>> round(predict(4096, 4096, 4096, Products(1, 1, 1), "sm_90a", out="float16"))
    92
    """
    _, cost = _cheapest(m, n, k, terms, arch, out, num_sms)
    return max(cost, LEAST_US + (m + n) * k / BYTES_PER_US)


def costed_candidates(terms: Products, arch: str, out: str) -> list[tuple[GemmConfig, Cost]]:
    """Return the configs that :func:`predict` compares, and their costs."""
    return _wgmma(terms, out) if arch == "sm_90a" else [(config, _ANY) for config in candidates(terms, arch)]


def _cheapest(
    m: int, n: int, k: int, terms: Products, arch: str, out: str, num_sms: int, columns: int = 1
) -> tuple[GemmConfig, float]:
    """Return the config with the least predicted time whose tiles are multiples of `columns`, and that time."""

    def cost(config: GemmConfig, unit: Cost) -> float:
        tiles, sms = config.tiles(m, n), max(1, num_sms // config.cluster)
        work = config.tile_m * config.tile_n * terms.number * -(-k // config.tile_k) * config.tile_k / 1e6
        return (
            unit.launch + unit.wave * -(-tiles // (sms * ctas_per_sm(config))) + unit.products * work * -(-tiles // sms)
        )

    fitting = [each for each in costed_candidates(terms, arch, out) if each[0].tile_n % columns == 0]
    costs = [(config, cost(config, unit)) for config, unit in fitting]
    return min(costs, key=lambda each: each[1])
