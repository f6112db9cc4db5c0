"""Machine code of the passes before a product and of gated products, compiled without a GPU."""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import replace

import pytest

from cute_kernels.estimate.look import LookConfig
from cute_kernels.estimate.verdict import VerdictConfig
from cute_kernels.gemm.config import GemmConfig, select_products
from cute_kernels.gemm.heuristics import candidates
from cute_kernels.jit import Binary
from tests.helpers import disassemble

pytest.importorskip("cuda.core")

LOOKS = [
    *(
        (LookConfig(f"look_{side}", planes, transposed), "sm_90a")
        for side, planes, transposed in (("left", 2, False), ("left", 3, True), ("right", 2, True), ("right", 3, False))
    ),
    *((LookConfig(f"look_{side}", 3), "sm_80") for side in ("left", "right")),
    *((LookConfig(f"look_{side}", 2, False, 8), "sm_90a") for side in ("left", "right")),
]
PACKS = [(LookConfig("look_probes"), "sm_90a"), (LookConfig("look_vectors", 3), "sm_90a")]
GATED = [
    (replace(candidates(select_products(planes, planes, None), "sm_90a")[i], out="float32", gated=True), "sm_90a")
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
    # A loop over whole steps and one over guarded ones, both halves of the probes: digits, and bytes of the rest.
    products = 3 + 3 * 2 * planes + 5 if left else 3 * planes + 8
    assert len(re.findall(r"IMMA\.16832\.[SU]8\.S8", sass)) == 4 * products
    assert len(re.findall(r"IMMA\.16832\.U8\.S8", sass)) == 4 * (2 if left else 5)
    assert not re.search(r"\b(?:H|F|D)MMA\b", sass) and "DADD" in sass
    assert "LDG.E.128.CONSTANT" in sass and ("LDG.E.64.CONSTANT" in sass or not config.transposed)
    assert bool(re.search(r"\bATOMG\.\S*ADD", sass)) == left, "the tickets alone"


@pytest.mark.parametrize(("config", "arch"), PACKS, ids=[f"{arch}-{config.name}" for config, arch in PACKS])
def test_vectors_are_packed_in_words_of_16_bytes(config: LookConfig, arch: str, binaries: Cases) -> None:
    sass = code(binaries[config, arch].result(), config.threads)
    assert "STG.E.128" in sass and re.search(r"F2I\.F64", sass), "rounded from float64"


@pytest.mark.parametrize(("config", "arch"), GATED, ids=[f"{arch}-{config.name}" for config, arch in GATED])
def test_gated_products_leave_before_anything_else(config: GemmConfig, arch: str, binaries: Cases) -> None:
    sass = code(binaries[config, arch].result(), config.threads)
    assert set(re.findall(r"IGMMA\.\S+", sass)) == {f"IGMMA.64x{config.tile_n}x32.S8.S8"}
    assert "UTMALDG.2D" in sass and "STG.E.128" in sass and "STG.E.64" in sass
    start = re.split(r"\bEXIT\b", sass)[0]
    assert re.search(r"\bACQBULK\b.*\bLDG\.E\b", start, re.S), "the gate, once it is written"
    assert not re.search(r"\b(?:SYNCS|UTMALDG|BAR|UCGABAR)\S*", start)


@pytest.mark.parametrize(("config", "arch"), [(VerdictConfig(), "sm_90a"), (VerdictConfig(), "sm_80")])
def test_the_verdict_is_one_small_kernel(config: VerdictConfig, arch: str, binaries: Cases) -> None:
    sass = code(binaries[config, arch].result(), config.threads)
    assert "LDG.E.64" in sass and re.search(r"MEMBAR\.\S*SYS", sass), "the last word is visible after the others"
