"""The small-M product of floats without a GPU: configs, kernel selection and machine code."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cute_kernels.few_rows.product import choose_few_rows
from cute_kernels.few_rows.product_int8 import choose_few_rows_int8
from cute_kernels.jit import Binary, Unit
from cute_kernels.scaled_gemm.config import OperandFormat, choose
from cute_kernels.scaled_gemm.cuda import choose_config
from cute_kernels.scaled_gemm.small_m.config import (
    ROWS,
    ReorderConfig,
    SmallMConfig,
    candidates,
    choose_small_m,
    supports_small_m,
)
from tests.gpu.conftest import _configs
from tests.helpers import disassemble

pytest.importorskip("cuda.core")

E4M3, E2M1 = OperandFormat("e4m3"), OperandFormat("e2m1")
MX8, MX4, NV = OperandFormat("e4m3", 32, "ue8m0"), OperandFormat("e2m1", 32, "ue8m0"), OperandFormat("e2m1", 16, "e4m3")


def test_configs_fit_the_chip() -> None:
    for a, b in ((E4M3, E4M3), (E4M3, E2M1), (MX8, MX4), (MX8, MX8), (NV, NV), (MX4, E4M3)):
        for rows in ROWS:
            configs = candidates(rows, a, b)
            assert len({config.name for config in configs}) == len(configs)
            for config in configs:
                assert config.stages > config.depth and config.smem_bytes <= 227 * 1024
                assert config.stages * config.stage_bytes >= 4 * config.depth * rows * (config.tile_n + 4), (
                    "room for sums"
                )
                assert config.resident * (config.smem_bytes + 1024) <= 228 * 1024
                assert config.tile_n <= 256 and config.rows % config.split == 0
                assert config.exponent_bias_factor == (64.0 if b == E2M1 else 1.0)
                assert config.uses_bfloat16 == bool(a.block or b.block)


def test_supported_operands() -> None:
    for m, a, b in (
        (64, E4M3, E2M1), (32, E2M1, E4M3), (1, OperandFormat("e3m2"), E2M1), (64, MX8, MX4), (64, NV, MX8), (8, E4M3, NV),
    ):  # fmt: skip
        assert supports_small_m(m, a, b, "sm_90a") and not supports_small_m(m, a, b, "sm_80")
        assert isinstance(choose_config(m, 512, 512, a, b, "sm_90a"), SmallMConfig)
    mx6, tiled = OperandFormat("e2m3", 32, "ue8m0"), OperandFormat("e4m3", tiles=True)
    for m, a, b in (
        (65, E4M3, E2M1), (1, E4M3, OperandFormat("e5m2")), (33, E2M1, E4M3), (8, E4M3, OperandFormat("e2m3")), (65, MX8, MX4), (8, MX8, mx6), (8, tiled, NV),
    ):  # fmt: skip
        assert not supports_small_m(m, a, b, "sm_90a")
        assert choose_config(m, 512, 512, a, b, "sm_90a").kernel == "wgmma"


@pytest.mark.parametrize("skipped", [True, False])
def test_kernels_of_a_skipped_test_are_not_compiled_before_the_others(skipped: bool) -> None:
    # They are no kernels of some GPUs, whose whole suite would end there.
    marks = [SimpleNamespace(name="skipif", args=(skipped,)), SimpleNamespace(name="configs", args=([1, 2],))]
    item = SimpleNamespace(iter_markers=lambda name: (mark for mark in marks if mark.name == name))
    assert list(_configs(cast(Any, item))) == ([] if skipped else [1, 2])


def test_the_same_warp_groups_read_a_stage_in_each_round() -> None:
    for rows in ROWS:
        for a, b in ((E4M3, E2M1), (E4M3, E4M3), (MX8, MX4), (NV, NV)):
            for config in candidates(rows, a, b):
                assert config.stages % config.depth == 0 and config.stages > config.depth


def test_the_choice_keeps_the_chip_busy() -> None:
    for m in (1, 8, 9, 33, 64):
        for n, k in ((1, 1), (4096, 4096), (14336, 4096), (28672, 8192), (100, 100_000)):
            config = choose_small_m(m, n, k, E4M3, E2M1)
            assert config.rows >= m and config in candidates(config.rows, E4M3, E2M1)
            assert config.split == 1 or k >= 1024 * config.split
    assert (
        choose_small_m(16, 28672, 8192, E4M3, E2M1).groups == 2
        and choose_small_m(64, 28672, 8192, E4M3, E2M1).groups == 4
    )
    assert choose_small_m(64, 14336, 4096, E4M3, E2M1).groups == 2
    assert choose_small_m(16, 28672, 8192, MX8, MX4).groups == 4 and choose_small_m(16, 14336, 4096, NV, NV).groups == 2
    small = choose_small_m(1, 4096, 4096, E4M3, E2M1)
    assert (small.tile_n, small.depth, small.split) == (64, 2, 2)
    assert [choose_small_m(64, 4096, k, E4M3, E2M1).split for k in (4096, 14336)] == [1, 2]
    assert [choose_small_m(1, n, 8192, E4M3, E2M1).split for n in (1024, 4096, 6144, 8192)] == [4, 2, 1, 1]
    assert choose_small_m(1, 512, 512, E4M3, E2M1).split == 1, "too few k to share"
    assert choose_small_m(8, 8, 8, E4M3, E2M1, out="float16", source="float32").source == "float32"


def test_few_rows_have_the_tiles_that_were_fastest() -> None:
    # As an H200 had them, cold weights: within 2% of the best of eleven, 5120 x 5120 within 6%.
    tiled, lines = OperandFormat("e4m3", tiles=True), OperandFormat("e4m3", 128, "float32")
    for a, b in ((E4M3, E4M3), (tiled, tiled), (lines, tiled)):
        for m, n, k, found in (
            (64, 4096, 14336, (64, 2, 1)),
            (16, 4096, 4096, (64, 2, 1)),
            (1, 2048, 7168, (64, 2, 1)),
            (64, 14336, 4096, (64, 1, 2)),
            (16, 7168, 2048, (64, 1, 2)),
            (128, 4096, 4096, (64, 1, 2)),
            (33, 5120, 5120, (64, 1, 2)),
            (64, 8192, 28672, (128, 2, 1)),
            (128, 4096, 14336, (128, 2, 1)),
            (16, 28672, 8192, (128, 1, 2)),
        ):
            config = choose(m, n, k, a, b, "sm_90a")
            assert (config.tile_n, config.split, config.resident) == found, (m, n, k, a)


def test_no_cluster_waits_for_others_to_end() -> None:
    # Of clusters of four CTAs an H200 holds 30, not 33: the last ones would take a second turn.
    for m in (1, 16, 33, 64):
        for n in range(64, 9000, 96):
            for k in (2048, 4096, 14336):
                tiled = choose(m, n, k, OperandFormat("e4m3"), OperandFormat("e2m3"), "sm_90a")
                assert tiled.split == 1 or tiled.tiles(m, n) * tiled.split <= 132
                small = choose_small_m(m, n, k, OperandFormat("e4m3"), OperandFormat("e2m1"))
                few = choose_few_rows("int4_g128", m, n, k)
                integers = choose_few_rows_int8("int4_g128", m, n, k)
                for each in (small, few, integers):
                    most = {1: 10**9, 2: 132, 4: 120}[each.split] * each.resident
                    assert -(-n // each.tile_n) * each.split <= most, each


CASES = [
    *(replace(each, out="float16") for rows in ROWS for each in candidates(rows, E4M3, E2M1)[:-2]),
    replace(candidates(32, OperandFormat("e5m2"), E4M3)[-1], out="float16"),
    replace(candidates(64, E2M1, E2M1)[1], out="float32"),
    replace(candidates(16, MX8, MX4)[0], out="float16"),
    *(replace(each, out="float16") for each in candidates(64, NV, NV)[:2]),
    replace(candidates(8, MX8, MX8)[1], out="float16"),
    replace(candidates(16, OperandFormat("e3m2", 32, "ue8m0"), E2M1)[-1], out="float16"),
]


@pytest.mark.parametrize("arch", ["sm_90a"])
@pytest.mark.parametrize("config", CASES, ids=lambda config: config.name)
def test_the_kernel_is_made_of_the_instructions_that_were_meant(
    config: SmallMConfig, arch: str, binaries: dict[tuple[SmallMConfig, str], Future[Binary]]
) -> None:
    binary = binaries[config, arch].result()
    sass = disassemble(binary.code)
    assert not re.search(r"\b(?:LDL|STL|CALL)\b", sass), "local memory"
    assert binary.usage is not None and binary.usage.stack_bytes == binary.usage.spill_bytes == 0, binary.usage
    assert config.resident * binary.usage.registers * config.threads <= 65536
    name, step = ("HGMMA", 16) if config.uses_bfloat16 else ("QGMMA", 32)
    products = re.findall(name + r"\.\S+ R\d+, R\d+, gdesc", sass)
    assert len(products) == config.tile_k // step, "weights from registers, each step of a part once"
    if not config.uses_bfloat16:
        assert len(re.findall(r"QGMMA[^;]*, RZ, !UPT", sass)) == config.k_slices, "a K slice starts from zero"
    loop = sass[sass.index(name) : sass.rindex(name)]
    overlap = config.groups <= 2 and (config.resident == 1 or not config.uses_bfloat16)
    waits = config.k_slices - (config.k_slices // 2 if overlap and config.uses_bfloat16 else 1) - int(overlap)
    assert loop.count("WARPGROUP.DEPBAR") == waits, "the assembler made them wait"
    assert "MEMBAR" not in loop and "LDS.128" in sass and "UTMALDG.2D" in sass
    assert ("UCGABAR_ARV" in sass) == (config.split > 1) and ("USETMAXREG" in sass) == (config.groups > 2)


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", [E4M3, OperandFormat("e2m3"), E2M1, MX8, NV], ids=lambda kind: kind.name)
def test_the_reorder_kernel_stays_in_registers(
    kind: OperandFormat, bits: int, compile_one: Callable[[Unit], Binary]
) -> None:
    binary = compile_one(ReorderConfig(kind, bits, kind.block > 0).translation_unit("sm_90a"))
    assert binary.usage is not None and binary.usage.spill_bytes == 0
    assert not re.search(r"\b(?:LDL|STL)\b", disassemble(binary.code))
