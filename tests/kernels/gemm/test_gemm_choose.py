"""Which kernel a dense product takes: within the chips' limits, and near the best that was measured."""

from __future__ import annotations

import math

import pytest

from cute_kernels.gemm.config import MAX_PRODUCTS, GemmConfig, Products, select_products
from cute_kernels.gemm.cuda import row_order
from cute_kernels.gemm.heuristics import candidates, choose, predict
from cute_kernels.jit import ARCHES

COUNTS = [(1, 1, None), (2, 1, None), (1, 2, None), (2, 2, 1), (2, 2, 3), (2, 2, 4), (3, 3, 6), (3, 2, 5), (3, 1, 3)]
PRODUCTS = [select_products(a, b, terms) for a, b, terms in COUNTS]
SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_103a": 227, "sm_120a": 99, "compute_80": 99}  # fmt: skip


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("products", PRODUCTS, ids=str)
def test_configs_fit_the_chip(products: Products, arch: str) -> None:
    configs = candidates(products, arch)
    assert len({config.name for config in configs}) == len(configs)
    for config in configs:
        assert config.smem_bytes <= SHARED[arch] * 1024
        assert config.stages >= 2 and config.products == products
        assert (config.kernel == "wgmma") == (arch == "sm_90a")
        sums = config.tile_m * config.tile_n * products.levels
        groups = config.threads // 128 - 1 if config.kernel == "wgmma" else 2
        assert sums // (128 * (1 if config.ping_pong else groups)) <= 192, "registers of a thread"


@pytest.mark.parametrize("products", PRODUCTS, ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_choice_is_one_of_the_candidates_for_every_shape(products: Products, arch: str) -> None:
    known = {config.name for config in candidates(products, arch)}
    for m, n, k in ((1, 1, 1), (1, 100_000, 64), (100_000, 1, 64), (4096, 4096, 4096), (129, 257, 100_000)):
        for num_sms in (132, 78, 2):
            assert choose(m, n, k, products, arch, num_sms=num_sms).name in known
        assert choose(m, n, k, products, arch, out="float16", source="float32").out == "float16"


@pytest.mark.parametrize(
    ("m", "n", "k", "out", "tile"),
    [  # the fastest of those measured (docs/lab/gemm.md), "pp" for ping-pong, "c2" for clusters of two CTAs
        (8192, 8192, 8192, "float16", "128x128pp"), (4096, 4096, 4096, "float16", "128x128pp"), (1, 4096, 4096, "float16", "64x32"),
        (16, 4096, 14336, "float16", "64x32"), (64, 1024, 1024, "float16", "64x32"), (128, 4096, 4096, "float16", "64x64"),
        (256, 4096, 14336, "float16", "128x64"), (1024, 4096, 4096, "float16", "128x128pp"), (256, 14336, 4096, "float16", "128x224"),
        (4096, 11008, 4096, "float32", "128x128ppc2"), (16, 4096, 4096, "int32", "64x32"), (1024, 1024, 1024, "float32", "128x64"),
    ],
)  # fmt: skip
def test_the_measured_winners_are_chosen(m: int, n: int, k: int, out: str, tile: str) -> None:
    config = choose(m, n, k, Products(1, 1, 1), "sm_90a", out=out)
    how = "pp" * config.ping_pong + f"c{config.cluster}" * (config.cluster > 1)
    assert f"{config.tile_m}x{config.tile_n}{how}" == tile


@pytest.mark.parametrize(
    ("m", "n", "k", "us"), [(16, 4096, 4096, 5.7), (256, 4096, 14336, 31.0), (4096, 4096, 4096, 90.5), (64, 1024, 1024, 3.2)]
)  # fmt: skip
def test_predicted_times_are_near_the_measured_ones(m: int, n: int, k: int, us: float) -> None:
    assert predict(m, n, k, Products(1, 1, 1), "sm_90a", out="float16") == pytest.approx(us, rel=0.25)
    assert predict(m, n, k, Products(1, 1, 1), "sm_80") > 0


def test_products_count_their_pairs_and_bound_their_sums() -> None:
    for (planes_a, planes_b, terms), products in zip(COUNTS, PRODUCTS, strict=True):
        pairs = [pair for level in range(products.levels) for pair in products.pairs(level)]
        assert len(set(pairs)) == len(pairs) == products.number and (terms is None or terms == len(pairs))
        assert all(i < planes_a and j < planes_b for i, j in pairs)
        # Planes that no product reads are left out.
        assert {i for i, _ in pairs} == set(range(products.planes_a)) and {j for _, j in pairs} == set(
            range(products.planes_b)
        )
        most = max(len(products.pairs(level)) for level in range(products.levels))
        assert products.max_k * most * 128 * 128 < 2**31 <= (products.max_k + 1) * most * 128 * 128 + 128 * 128 * most
    assert Products(1, 1, 1).max_k == MAX_PRODUCTS and MAX_PRODUCTS * 2**14 < 2**31 <= (MAX_PRODUCTS + 1) * 2**14


@pytest.mark.parametrize(
    ("columns", "cluster", "out", "adjacent"),
    [
        (224, 1, "float16", 8),
        (224, 2, "float16", 0),
        (224, 2, "float32", 4),
        (192, 2, "float16", 8),
        (64, 2, "int8", 8),
    ],
)
def test_boxes_of_adjacent_columns_hold_whole_runs(columns: int, cluster: int, out: str, adjacent: int) -> None:
    config = GemmConfig("wgmma", Products(1, 1, 1), out, tile_n=columns, cluster=cluster).side_by_side
    assert config.adjacent == adjacent
    rows = config.box_rows(4096, 4096)[1]
    _, _, box = row_order(4096, rows, adjacent)
    assert math.prod(box) == rows
