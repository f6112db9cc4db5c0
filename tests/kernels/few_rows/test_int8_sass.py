"""The few-rows product of int8 rows without a GPU: configs, selection and machine code."""

from __future__ import annotations

import re
from concurrent.futures import Future

import pytest

from cute_kernels.few_rows.formats import PAD_K, UNIT_K
from cute_kernels.few_rows.product_int8 import (
    INT8_ROWS,
    FewRowsInt8Config,
    choose_few_rows_int8,
    int8_candidates,
    int8_formats,
)
from cute_kernels.jit import Binary
from tests.helpers import disassemble

pytest.importorskip("cuda.core")


def test_configs_fit_the_chip() -> None:
    for name in int8_formats():
        for rows in INT8_ROWS:
            configs = int8_candidates(name, rows)
            assert len({config.name for config in configs}) == len(configs)
            for config in configs:
                assert config.stages > config.depth and config.resident * (config.smem_bytes + 1024) <= 228 * 1024
                assert config.stages * config.stage_bytes >= 4 * config.depth * rows * (config.tile_n + 4), "sums"
                assert PAD_K % (UNIT_K * config.units) == 0 and config.rows % config.split == 0
                assert config.stages % config.depth == 0, "a stage has the same readers in each round"


def test_the_choice_keeps_the_chip_busy() -> None:
    for m in (1, 16, 17, 33, 64, 128, 300):
        for n, k in ((1, 1), (4096, 14336), (14336, 4096), (28672, 8192)):
            config = choose_few_rows_int8("int4_g128", m, n, k)
            assert config.rows >= min(m, 128) and config in int8_candidates("int4_g128", config.rows)
            assert config.split == 1 or k >= 1024 * config.split
            ctas = -(-n // config.tile_n) * config.split * -(-m // config.rows)
            assert ctas >= 80 or n == 1


# instructions of the loop per unit of 64 x 128 weights, of which each thread has 64
CASES = {
    FewRowsInt8Config("int4_g128", 16, groups=4): 85,
    FewRowsInt8Config("int4_g128", 32, groups=4, depth=2): 105,
    FewRowsInt8Config("int4_g128", 64): 130,
    FewRowsInt8Config("int4_g128", 128): 200,
    FewRowsInt8Config("int4_g128", 128, depth=2, split=2, units=1): 210,
    FewRowsInt8Config("int8_g32", 32, groups=4, depth=2): 215,
    FewRowsInt8Config("int8_g64", 128, units=1): 335,
    FewRowsInt8Config("int4", 128): 65,
}


def loop_of(sass: str) -> list[str]:
    """Opcodes of the innermost loop around the products."""
    lines = [line.strip() for line in sass.splitlines()]
    products = [i for i, line in enumerate(lines) if "IGMMA" in line]
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"(\.L_x_\d+):", line))}
    for i in range(products[-1], len(lines)):
        match = re.search(r"BRA\S*\s+.*\((\.L_x_\d+)\)", lines[i])
        if match and labels.get(match[1], len(lines)) < products[0]:
            inside = lines[labels[match[1]] : i + 1]
            return [found[1] for each in inside if (found := re.match(r"/\*\w+\*/\s+(?:@!?U?P\d+ )?([\w.]+)", each))]
    raise AssertionError("no loop around the products")


@pytest.mark.parametrize("arch", ["sm_90a"])
@pytest.mark.parametrize("config", CASES, ids=lambda config: config.name)
def test_the_kernel_is_made_of_the_instructions_that_were_meant(
    config: FewRowsInt8Config, arch: str, binaries: dict[tuple[FewRowsInt8Config, str], Future[Binary]]
) -> None:
    binary = binaries[config, arch].result()
    sass = disassemble(binary.code)
    assert not re.search(r"\b(?:LDL|STL|CALL)\b", sass), "local memory"
    assert binary.usage is not None and binary.usage.stack_bytes == binary.usage.spill_bytes == 0, binary.usage
    products = re.findall(rf"IGMMA\.64x{config.rows}x32\.S8\.S8 R\d+, R\d+, gdesc", sass)
    assert len(products) == 4 * config.units, "weights from registers, each step of a stage once"
    loop = loop_of(sass)
    form = config.format
    sums = config.units * (UNIT_K // form.group) if form.group else 1
    assert sum(each == "WARPGROUP.DEPBAR.LE" for each in loop) == sums, "the assembler made them wait"
    assert not any(each.startswith(("I2F.", "R2UR")) for each in loop) and "I2F" not in loop
    conversions = sums * config.rows // 2 if form.group else 0
    assert sum(each.startswith("I2FP") for each in loop) == conversions
    assert "LDS.128" in loop and "UTMALDG.2D" in sass and "UBLKCP" in sass
    assert len(loop) / config.units <= CASES[config]


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_90a"])
@pytest.mark.parametrize(
    "config",
    [each for name in int8_formats() for rows in INT8_ROWS for each in int8_candidates(name, rows)],
    ids=lambda config: config.name,
)
def test_no_config_spills(
    config: FewRowsInt8Config, arch: str, binaries: dict[tuple[FewRowsInt8Config, str], Future[Binary]]
) -> None:
    usage = binaries[config, arch].result().usage
    assert usage is not None and usage.stack_bytes == usage.spill_bytes == 0, usage
