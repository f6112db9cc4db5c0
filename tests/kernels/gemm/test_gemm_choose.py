"""Which kernel a dense product takes: within the chips' limits, and near the best that was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cute_kernels.gemm import cuda as gemm_cuda
from cute_kernels.gemm.config import MAX_PRODUCTS, GemmConfig, Products, select_products
from cute_kernels.gemm.cuda import row_order
from cute_kernels.gemm.heuristics import candidates, choose, predict
from cute_kernels.gemm.problem import GemmProblem
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


def aligned(rows: int, columns: int, dtype: torch.dtype = torch.int8) -> Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    memory = torch.zeros(rows * columns * size + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return memory[start : start + rows * columns * size].view(dtype).view(rows, columns)


def test_launches_are_replayed_for_all_that_they_depend_on_and_nothing_less() -> None:
    a, b, out, scale = aligned(32, 64), aligned(48, 64).t(), aligned(32, 48, torch.float32), torch.ones(48)
    c = aligned(32, 48, torch.float32)
    problem = GemmProblem((a,), (b,), PRODUCTS[0], 8, None, scale, 1.0, 1.0, c, None, torch.float32)
    key = gemm_cuda._replay_key(problem, out, None)
    assert key is not None and hash(key) is not None
    assert gemm_cuda._replay_key(replace(problem, a=(a.clone().copy_(a),)), out, None) != key
    a.add_(1)  # what the kernels read is no part of it
    assert gemm_cuda._replay_key(problem, out, None) == key
    others = (
        replace(problem, alpha=2.0), replace(problem, beta=0.5), replace(problem, shift=4), replace(problem, c=None),
        replace(problem, activation="relu"), replace(problem, glu=True), replace(problem, col_scale=scale.clone()),
        replace(problem, row_scale=torch.ones(32)), replace(problem, bias=torch.ones(48)), replace(problem, a=(a[:16],)),
        replace(problem, out_scale=torch.ones(())), replace(problem, gate=torch.ones(4)), replace(problem, b=(aligned(48, 64).t(),)),
    )  # fmt: skip
    keys = [gemm_cuda._replay_key(each, out, None) for each in others]
    config = candidates(PRODUCTS[0], "sm_90a")[0]
    keys += [gemm_cuda._replay_key(problem, each, None) for each in (out.view(torch.int32), out[:16], c)]
    keys += [gemm_cuda._replay_key(problem, out, config), key]
    assert None not in keys and len(set(keys)) == len(keys)


def test_launches_that_need_memory_of_their_own_are_not_replayed() -> None:
    a, b, out, scale = aligned(32, 64), aligned(48, 64).t(), aligned(32, 48, torch.float32), torch.ones(48)
    problem = GemmProblem((a,), (b,), PRODUCTS[0], 8, None, scale, 1.0, 0.0, None, None, torch.float32)
    wide = PRODUCTS[0].max_k // 128 * 128 + 16
    for each in (
        replace(problem, col_scale=scale.half()), replace(problem, bias=torch.ones(96)[::2]),  # converted, copied
        replace(problem, a=(a[:, 1:17],), b=(b[:16],)), replace(problem, b=(b.contiguous(),)),
        replace(problem, c=aligned(48, 32, torch.float32).t()),
        replace(problem, a=(a.new_empty(1).expand(1, wide),), b=(b.new_empty(1).expand(wide, 1),)),  # several launches
    ):  # fmt: skip
        assert gemm_cuda._replay_key(each, out, None) is None


def test_new_launches_run_on_the_device_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Tensor] = []
    seen: list[int] = []

    @contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        entered.append(x)
        yield
        entered.clear()

    a, b, out = aligned(32, 64), aligned(48, 64).t(), aligned(32, 48, torch.int32)
    problem = GemmProblem((a,), (b,), PRODUCTS[0], 8, None, None, 1.0, 0.0, None, None, torch.int32)
    monkeypatch.setattr(gemm_cuda, "device_of", device_of)
    monkeypatch.setattr(gemm_cuda, "_run", lambda *_: seen.append(len(entered)))
    monkeypatch.setattr(gemm_cuda, "_replays", SimpleNamespace(run=lambda key, launch: launch()))
    assert gemm_cuda.gemm_cuda(problem, out) is out
    assert gemm_cuda.gemm_cuda(replace(problem, b=(b.contiguous(),)), out) is out  # copied, so not kept
    assert seen == [1, 1]
