"""The few-rows product and its helpers without a GPU: configs, selection and machine code."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from cute_kernels.few_rows.decode import DecodeConfig
from cute_kernels.few_rows.formats import FORMATS, PAD_K, UNIT_K
from cute_kernels.few_rows.product import ROWS, FewRowsConfig, candidates, choose_few_rows
from cute_kernels.few_rows.widen import WidenConfig
from cute_kernels.jit import Binary, Unit
from tests.helpers import disassemble

pytest.importorskip("cuda.core")


def test_configs_fit_the_chip() -> None:
    for name in FORMATS:
        for rows in ROWS:
            configs = candidates(name, rows)
            assert len({config.name for config in configs}) == len(configs)
            for config in configs:
                assert config.stages > config.depth and config.resident * (config.smem_bytes + 1024) <= 228 * 1024
                assert config.stages * config.stage_bytes >= 4 * config.depth * rows * (config.tile_n + 4), "sums"
                assert PAD_K % (UNIT_K * config.units) == 0 and config.rows % config.split == 0
                assert config.stages % config.depth == 0, "a stage has the same readers in each round"


def test_the_choice_keeps_the_chip_busy() -> None:
    for m in (1, 8, 9, 33, 64, 300):
        for n, k in ((1, 1), (4096, 14336), (14336, 4096), (28672, 8192)):
            config = choose_few_rows("mxfp4", m, n, k)
            assert config.rows >= min(m, 64) and config in candidates("mxfp4", config.rows)
            assert config.split == 1 or k >= 1024 * config.split
            ctas = -(-n // config.tile_n) * config.split * -(-m // 64)
            assert ctas >= 80 or n == 1


CASES = {
    FewRowsConfig("int4_g128", 16, resident=2): 1.4,
    FewRowsConfig("int4_g128", 8, groups=4): 1.4,
    FewRowsConfig("mxfp4", 64): 2.6,
    FewRowsConfig("nvfp4", 8, "float16", "float32", depth=2, split=2): 5.0,
    FewRowsConfig("int8_g32_min", 32): 3.6,
    FewRowsConfig("mxfp6_e3m2", 16): 5.0,
    FewRowsConfig("e4m3_g128", 8, "float16", "float32", depth=2, split=2): 3.2,
    **dict.fromkeys(candidates("e4m3_g128", 64)[:3], 3.2),
}


@pytest.mark.parametrize("arch", ["sm_90a"])
@pytest.mark.parametrize("config", CASES, ids=lambda config: config.name)
def test_the_kernel_is_made_of_the_instructions_that_were_meant(
    config: FewRowsConfig, arch: str, binaries: dict[tuple[FewRowsConfig, str], Future[Binary]]
) -> None:
    binary = binaries[config, arch].result()
    sass = disassemble(binary.code)
    assert not re.search(r"\b(?:LDL|STL|CALL)\b", sass), "local memory"
    assert binary.usage is not None and binary.usage.stack_bytes == binary.usage.spill_bytes == 0, binary.usage
    assert config.resident * binary.usage.registers * config.threads <= 65536
    kind = "F32.BF16" if config.act == "bfloat16" else "F32"
    if config.rows == 8:
        found = re.findall(rf"HMMA\.16816\.{kind} ", sass)
        loop = sass[sass.index("LDSM.16.M88.4") : sass.rindex("HMMA.16816")]
        assert "HGMMA" not in sass and len(re.findall(r"LDSM\.16\.M88\.4", sass)) == 4 * config.units
    else:
        found = re.findall(rf"HGMMA\.64x{config.rows}x16\.{kind} R\d+, R\d+, gdesc", sass)
        loop = sass[sass.index("HGMMA") : sass.rindex("HGMMA")]
        assert loop.count("WARPGROUP.DEPBAR") == 2 * (config.units - 1), "the assembler made them wait"
    assert len(found) == 8 * config.units, "weights from registers, each step of a stage once"
    assert "LDS.128" in sass and "UTMALDG.2D" in sass and "UBLKCP" in sass
    decoding = len(re.findall(r"\b(?:LOP3|SHF|PRMT)\b", loop)) / (32 * config.units)
    assert decoding < CASES[config], "instructions of the half-rate unit per pair of values"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_widening_kernel_stays_in_registers(arch: str, compile_one: Callable[[Unit], Binary]) -> None:
    binary = compile_one(WidenConfig("bfloat16").translation_unit(arch))
    assert binary.usage is not None and binary.usage.spill_bytes == 0
    assert not re.search(r"\b(?:LDL|STL|CALL)\b", disassemble(binary.code))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "config",
    [
        DecodeConfig("int4_g128"),
        DecodeConfig("int8_g16_min", "float16"),
        DecodeConfig("mxfp6"),
        DecodeConfig("e4m3"),
        DecodeConfig("e4m3_g128", "float16"),
    ],
    ids=lambda config: config.name,
)
def test_the_decoding_kernel_stores_16_bytes_at_a_time(
    config: DecodeConfig, arch: str, compile_one: Callable[[Unit], Binary]
) -> None:
    binary = compile_one(config.translation_unit(arch))
    assert binary.usage is not None and binary.usage.spill_bytes == 0 and binary.usage.registers <= 64
    sass = disassemble(binary.code)
    assert not re.search(r"\b(?:LDL|STL|CALL)\b", sass)
    stores = re.findall(r"\bSTG\.E[.\w]*", sass)
    assert len(stores) == 8 and all(each.startswith("STG.E.128") for each in stores), stores
    assert len(re.findall(r"\bSHFL\.BFLY\b", sass)) == 32, "one per pair of values"
