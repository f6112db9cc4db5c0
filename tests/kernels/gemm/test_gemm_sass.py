"""Machine code of the dense product's kernels, compiled without a GPU: the instructions that were meant, nothing spilled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest

from cute_kernels.convert.digits import DigitsConfig, columns_config
from cute_kernels.convert.pack import PackConfig
from cute_kernels.gemm import NATIVE_INT4
from cute_kernels.gemm.config import GemmConfig, Products
from cute_kernels.gemm.heuristics import candidates
from cute_kernels.jit import Binary
from tests.helpers import DIVERGED, lean_sass

pytest.importorskip("cuda.core")

Config = GemmConfig | PackConfig | DigitsConfig
SINGLE, THREE, SIX = Products(1, 1, 1), Products(2, 2, 2), Products(3, 3, 3)


def cases() -> Iterator[tuple[Config, str]]:
    """Every tile of one product, and of more the ones with the most registers."""
    for config in candidates(SINGLE, "sm_90a"):
        yield replace(config, out="float16"), "sm_90a"
    for products in (THREE, SIX):
        first, *_ = candidates(products, "sm_90a")
        yield replace(first, out="float16"), "sm_90a"
    yield replace(candidates(SIX, "sm_90a")[0], out="float16", source="float32"), "sm_90a"
    yield replace(candidates(SINGLE, "sm_90a")[0], out="int64", source="int64"), "sm_90a"
    for arch, products in (("sm_80", SINGLE), ("sm_80", THREE), ("sm_80", SIX), ("sm_120a", SIX)):
        yield replace(candidates(products, arch)[0], out="float16"), arch
    for arch in ("sm_80", "sm_86", "sm_89"):
        yield NATIVE_INT4, arch
    yield replace(NATIVE_INT4, out="float16", source="float32"), "sm_80"
    for kernel in ("pack_transposed", "pack_strided"):
        yield PackConfig(kernel), "sm_80"
    yield DigitsConfig("digits_rows", "float32", 2), "sm_90a"
    yield columns_config("float32", 3, "sm_90a", 4096), "sm_90a"
    yield columns_config("float32", 3, "sm_80", 4096), "sm_80"
    yield columns_config("float32", 2, "sm_90a", 8192), "sm_90a"


CASES = list(cases())


# A scale takes two divisions, once per row or column.
_DIVISION = r"\$__internal_\d+_\$__cuda_sm20_(?:div_ru|rcp_rn)_f32\w*"


@pytest.mark.parametrize(("config", "arch"), CASES, ids=[f"{arch}-{config.name}" for config, arch in CASES])
def test_the_kernel_is_made_of_the_instructions_that_were_meant(
    config: Config, arch: str, binaries: dict[tuple[Config, str], Future[Binary]]
) -> None:
    binary = binaries[config, arch].result()
    calls = DIVERGED if isinstance(config, GemmConfig) and int(arch[3:].rstrip("a")) < 90 else ""
    sass = lean_sass(binary, f"{_DIVISION}|{DIVERGED}" if isinstance(config, DigitsConfig) else calls)
    assert binary.usage is not None
    if isinstance(config, GemmConfig):
        check_product(config, sass)
        assert binary.usage.registers * config.threads <= 65536
    elif isinstance(config, PackConfig):
        assert "STG.E.128" in sass
    else:
        assert ("UCGABAR_WAIT" in sass) == config.clustered
        assert "LDG.E.128" in sass and ("STG.E.64" in sass) == (config.kernel == "digits_columns")


def check_product(config: GemmConfig, sass: str) -> None:
    products = config.products.number * config.tile_k // 32
    if config.kernel == "wgmma":
        found = re.findall(r"IGMMA\.\S+", sass)
        blocks = config.tile_m // 64 // (1 if config.ping_pong else config.groups)
        widths = (128, 96) if config.tile_n == 224 else (config.tile_n,)
        assert set(found) == {f"IGMMA.64x{width}x32.S8.S8" for width in widths}
        assert len(found) % (products * blocks * len(widths)) == 0, (
            "each product of a part of k once, whatever the loop is unrolled to"
        )
        assert "UTMALDG.2D" in sass and ("UTMALDG.2D.MULTICAST" in sass) == (config.cluster > 1)
        assert ("USETMAXREG" in sass) == (config.groups == 2)
        loop = sass[sass.index("IGMMA") : sass.rindex("IGMMA")]
        assert "MEMBAR" not in loop, "a stage is given back without a fence of all memory"
    else:
        warps_n = config.tile_n // 32
        per_warp = config.tile_m // (8 // warps_n) // 16 * 4
        assert set(re.findall(r"IMMA\.\S+", sass)) == {"IMMA.16864.S4.S4" if config.bits == 4 else "IMMA.16832.S8.S8"}
        assert len(re.findall(r"IMMA\.", sass)) % (products * per_warp) == 0
        assert re.search(r"LDGSTS\.E\.BYPASS\S*\.128", sass) and "LDSM.16.M88.4" in sass
    assert "STG.E.128" in sass


def test_the_cases_have_both_instructions_every_level_count_and_all_kinds_of_tiles() -> None:
    products = [(config, arch) for config, arch in CASES if isinstance(config, GemmConfig)]
    kinds = {(config.kernel, config.products.levels) for config, _ in products}
    assert kinds >= {("wgmma", 1), ("wgmma", 2), ("wgmma", 3), ("mma", 1), ("mma", 2), ("mma", 3)}
    assert {config.ping_pong for config, _ in products} == {True, False}
    assert {config.groups for config, _ in products} >= {1, 2}
