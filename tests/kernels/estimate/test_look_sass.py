"""Machine code of the passes before a product and of gated products, compiled without a GPU."""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import replace

import pytest

from cute_kernels.estimate.look import LookConfig, config_for
from cute_kernels.estimate.verdict import VerdictConfig
from cute_kernels.gemm.config import GemmConfig, select_products
from cute_kernels.gemm.heuristics import candidates
from cute_kernels.jit import Binary
from tests.helpers import disassemble

pytest.importorskip("cuda.core")

LOOKS = [
    *(
        (config_for(f"look_{side}", planes, transposed, "sm_90a"), "sm_90a")
        for side, planes, transposed in (("left", 2, False), ("left", 3, True), ("right", 2, True), ("right", 3, False))
    ),
    *((config_for(f"look_{side}", 3, False, "sm_80"), "sm_80") for side in ("left", "right")),
]
GATED = [
    (replace(candidates(select_products(planes, planes, None), "sm_90a")[i], out="float32", sum_of_squares=True, gated=True), "sm_90a")
    for planes, i in ((1, 0), (2, 0), (2, 1), (3, 0))
]  # fmt: skip
Cases = dict[tuple[object, str], Future[Binary]]


def code(binary: Binary, threads: int) -> str:
    """Return the machine code of a kernel that spills nothing and calls nothing but what a division or a square root takes."""
    sass = disassemble(binary.code)
    assert not re.search(r"\b(?:LDL|STL)\b", sass), "local memory"
    assert binary.usage is not None and binary.usage.stack_bytes == binary.usage.spill_bytes == 0, binary.usage
    assert binary.usage.registers * threads <= 65536
    return sass


@pytest.mark.parametrize(("config", "arch"), LOOKS, ids=[f"{arch}-{config.name}" for config, arch in LOOKS])
def test_passes_keep_their_sums_in_registers(config: LookConfig, arch: str, binaries: Cases) -> None:
    sass = code(binaries[config, arch].result(), config.threads)
    left, planes = config.kernel == "look_left", config.planes
    # Four columns of two rows and eight probes are unrolled: the terms of all outputs, and of the bounds.
    terms, beside = (planes + planes + 2, planes + planes + 1) if left else (planes + 1, planes + 1)
    products = 4 * 2 * (8 * terms + beside)
    residuals = 4 * 2 * planes
    assert products + residuals <= len(re.findall(r"\bFFMA\b", sass)) <= products + residuals + 40
    assert re.search(r"LDGSTS\.E\.BYPASS\S*\.128", sass) and "LDS.128" in sass and "DADD" in sass
    assert not re.search(r"\b(?:H|I)MMA\b", sass), "only IEEE float32 sums have the bound"
    assert bool(re.search(r"\bATOMG\.\S*ADD", sass)) == left, "the ticket alone"
    assert config.smem_bytes <= (232448 if arch == "sm_90a" else 166912)


@pytest.mark.parametrize(("config", "arch"), GATED, ids=[f"{arch}-{config.name}" for config, arch in GATED])
def test_gated_products_leave_before_anything_else(config: GemmConfig, arch: str, binaries: Cases) -> None:
    sass = code(binaries[config, arch].result(), config.threads)
    assert set(re.findall(r"IGMMA\.\S+", sass)) == {f"IGMMA.64x{config.tile_n}x32.S8.S8"}
    assert "UTMALDG.2D" in sass and "STG.E.128" in sass and "STG.E.64" in sass
    start = sass[: sass.index("EXIT")]
    assert re.search(r"\bLDG\.E\b", start) and not re.search(r"\b(?:SYNCS|UTMALDG|BAR|UCGABAR)\S*", start)


@pytest.mark.parametrize(("config", "arch"), [(VerdictConfig(), "sm_90a"), (VerdictConfig(), "sm_80")])
def test_the_verdict_is_one_small_kernel(config: VerdictConfig, arch: str, binaries: Cases) -> None:
    sass = code(binaries[config, arch].result(), config.threads)
    assert "LDG.E.64" in sass and re.search(r"MEMBAR\.\S*SYS", sass), "the last word is visible after the others"
