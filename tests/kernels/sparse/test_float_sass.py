"""Machine code of the products of floats, compiled without a GPU: the instructions that were meant, nothing spilled."""

from __future__ import annotations

import re
from concurrent.futures import Future

import pytest

from cute_kernels.dtypes import FLOATS
from cute_kernels.jit import Binary
from cute_kernels.machine import Machine, Problem, ProblemTypes
from cute_kernels.sddmm.gather import SddmmConfig
from cute_kernels.sddmm.heuristics import SddmmKernel, choose_sddmm
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.heuristics import SpmmKernel, choose_spmm
from cute_kernels.spmm.panel import PanelConfig
from tests.kernels.sparse.test_spmm_sass import clean_sass

pytest.importorskip("cuda.core")

Config = SpmmKernel | SddmmKernel


def product(
    arch: str, a: str, b: str, out: str, v: int = 8, rows: int = 32, atom: str | None = None
) -> tuple[SpmmKernel, str]:
    kind = ProblemTypes(v, FLOATS[a], FLOATS[b], out)
    return choose_spmm(kind, Machine(arch, 132), Problem(rows, 4096, 410 * rows, 512, 512), atom), arch


def sampled(arch: str, x: str, y: str, out: str, v: int = 8, stride: int = 32) -> tuple[SddmmKernel, str]:
    sizes = {"vector_rows": 512, "vectors": 200_000, "columns": 4096, "inner": 256}
    return choose_sddmm(ProblemTypes(v, FLOATS[x], FLOATS[y], out), Machine(arch, 132), stride=stride, **sizes), arch


HALF, BRAIN = "HMMA.16816.F32", "HMMA.16816.F32.BF16"
UNPACK, TIMES = r"F2FP\.F16\.E4M3\.UNPACK_B", r"(?:HMUL2|HFMA2)\S*"
# what is compiled for which chip, its mma, and what decodes: the conversion, or moved bits times a power of two
CASES = [
    (product("sm_90a", "float16", "float16", "float16"), HALF, ""),
    (product("sm_90a", "e4m3", "e4m3", "float16", rows=512), HALF, UNPACK),
    (sampled("sm_90a", "float16", "e2m1", "float32"), HALF, TIMES),
    (product("sm_80", "e2m1", "e4m3", "float32"), HALF, TIMES),
    (sampled("sm_90a", "float16", "float16", "float32", 32), HALF, ""),
    (sampled("sm_80", "e5m2", "bfloat16", "bfloat16", 16, 16), BRAIN, TIMES),
    (product("sm_89", "e2m1", "e5m2", "bfloat16", atom="fp8_m16n8k32"), "QMMA.16832.F32.E5M2.E4M3", ""),
    (product("sm_100a", "bfloat16", "e4m3", "float32", 16), BRAIN, TIMES),
]


@pytest.mark.parametrize(
    ("config", "arch", "mma", "decoding"),
    [(*case, mma, decoding) for case, mma, decoding in CASES],
    ids=[f"{arch}-{config.name}" for (config, arch), _, _ in CASES],
)
def test_the_kernel_is_made_of_the_instructions_that_were_meant(
    config: Config, arch: str, mma: str, decoding: str, binaries: dict[tuple[Config, str], Future[Binary]]
) -> None:
    binary = binaries[config, arch].result()
    sass = clean_sass(binary)
    assert set(re.findall(r"\b[A-Z]MMA\.\S+", sass)) == {mma}
    for each in (UNPACK, TIMES):
        assert bool(re.search(each, sass)) == (each == decoding)
    assert ("UTMALDG.2D" in sass) == isinstance(config, PanelConfig)
    assert bool(re.search(r"LDGSTS\.E\.BYPASS\S*\.128\.ZFILL", sass)) == (not isinstance(config, PanelConfig))
    assert bool(re.search(r"LDSM\.16\.MT88\.4", sass)) == (not isinstance(config, SddmmConfig))
    assert binary.usage is not None and binary.usage.registers * config.threads <= 65536


def test_the_cases_have_every_kernel_of_floats() -> None:
    assert {type(config) for (config, _), _, _ in CASES} == {GatherConfig, PanelConfig, SddmmConfig}
    names = {number for (config, _), _, _ in CASES for number in config.name.split("-")[3].split("x")}
    assert names == set(FLOATS)
