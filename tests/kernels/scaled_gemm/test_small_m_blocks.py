"""Few rows with block scales that multiply the sums of their block: configs, machine code, and breaches of the source."""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cute_kernels.jit import Binary
from cute_kernels.scaled_gemm import cuda
from cute_kernels.scaled_gemm.api import FloatOperand, check
from cute_kernels.scaled_gemm.config import OperandFormat
from cute_kernels.scaled_gemm.cuda import _scale_arguments, check_reads
from cute_kernels.scaled_gemm.small_m.config import ROWS, SmallMConfig, candidates, choose_small_m, takes_block_sums
from tests.helpers import disassemble
from tests.kernels.few_rows.host import has_compiler
from tests.kernels.few_rows.test_broken_host import replaced
from tests.kernels.scaled_gemm.test_small_m_host import HostSmallM
from tests.kernels.scaled_gemm.test_small_m_host import check as check_host

E4M3, E2M1 = OperandFormat("e4m3"), OperandFormat("e2m1")
MX8, MX4, NV = OperandFormat("e4m3", 32, "ue8m0"), OperandFormat("e2m1", 32, "ue8m0"), OperandFormat("e2m1", 16, "e4m3")
PAIRS = (
    (E4M3, MX4),
    (MX8, MX4),
    (MX8, MX8),
    (MX4, OperandFormat("e5m2", 32, "ue8m0")),
    (MX8, E2M1),
    (NV, NV),
    (E4M3, NV),
)
TAKEN = [(rows, a, b) for a, b in PAIRS for rows in ROWS if takes_block_sums(rows, 512, a, b)]


def test_configs_fit_the_chip() -> None:
    for rows, a, b in TAKEN:
        configs = candidates(rows, a, b, block_sums=True)
        assert len({config.name for config in configs}) == len(configs) == 5
        for config in configs:
            assert config.stages > config.depth and config.stages % config.depth == 0
            assert config.resident * (config.smem_bytes + 1024) <= 228 * 1024
            assert not config.uses_bfloat16 and config.exponent_bias_factor == 64.0 ** sum(x.bits < 8 for x in (a, b))
            if b.block:
                assert config.scale_box == max(16, config.tile_k // b.block) <= 256, "a box has the scales of a stage"


def test_what_the_scales_of_blocks_must_be() -> None:
    for m, k, a, b, taken in (
        (1, 512, E4M3, MX4, True), (64, 512, E4M3, MX8, True), (32, 1536, MX8, MX4, True), (8, 512, MX8, E2M1, True),
        (33, 512, MX8, MX4, False), (16, 768, E4M3, MX4, False), (16, 512, E4M3, NV, True), (17, 512, E4M3, NV, False),
        (8, 1024, NV, NV, True), (9, 512, NV, NV, False), (8, 512, MX8, OperandFormat("e2m1", 16, "ue8m0"), True),
        (8, 512, NV, MX4, False), (8, 512, E4M3, E2M1, False), (8, 512, E4M3, OperandFormat("e4m3", 16, "e4m3"), False),
    ):  # fmt: skip
        assert takes_block_sums(m, k, a, b) == taken, (m, k, a, b)
        config = choose_small_m(m, 4096, k, a, b)
        assert config.block_sums == taken and config in candidates(config.rows, a, b, block_sums=taken)


def test_the_choice_is_what_was_fastest_and_keeps_the_chip_busy() -> None:
    for m, a, b in ((1, E4M3, MX4), (16, MX8, MX4), (32, MX8, MX8), (64, E4M3, MX4)):
        found = [choose_small_m(m, n, k, a, b) for n, k in ((28672, 8192), (14336, 4096), (4096, 14336), (4096, 4096))]
        assert [(each.tile_n, each.split) for each in found] == [(256, 1), (128, 1), (64, 2), (64, 2)]
        assert choose_small_m(m, 512, 512, a, b).split == 1, "too few k to share"
        for n in range(64, 9000, 96):
            each = choose_small_m(m, n, 4096, a, b)
            assert -(-n // each.tile_n) * each.split <= {1: 10**9, 2: 132, 4: 120}[each.split] * each.resident


def test_a_config_for_other_lengths_is_refused() -> None:
    def rows(kind: OperandFormat, k: int) -> FloatOperand:
        blocks = torch.zeros(4, k // 32, dtype=torch.uint8)
        data = torch.zeros(4, k * kind.bits // 8, dtype=torch.uint8)
        return FloatOperand(data, kind.dtype, k, blocks=blocks, block=32, scale_dtype="ue8m0")

    config = candidates(8, MX8, MX4, block_sums=True)[0]
    for k, fits in ((1024, True), (1056, False)):
        problem = check(rows(MX8, k), rows(MX4, k), 1.0, 0.0, None, None, None, torch.float32, fast_accum=False)
        if fits:
            check_reads(problem, config)
        else:
            with pytest.raises(ValueError, match="no block_sums for e4m3x32ue8m0 by e2m1x32ue8m0 and K = 1056"):
                check_reads(problem, config)


def test_scales_lie_where_the_copy_engine_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "current_arch", lambda: "sm_90a")
    monkeypatch.setattr(cuda, "num_sms", lambda device: 132)
    blocks = torch.arange(4 * 16, dtype=torch.uint8).view(4, 16)
    moved = torch.empty(4 * 16 + 16, dtype=torch.uint8)[3 : 4 * 16 + 3].view(4, 16).copy_(blocks)
    apart = torch.empty(4, 40, dtype=torch.uint8)[:, 7:23].copy_(blocks)
    for given, copied in ((blocks, False), (moved, True), (apart, True)):
        data = torch.zeros(4, 256, dtype=torch.uint8)
        operand = FloatOperand(data, "e2m1", 512, blocks=given, block=32, scale_dtype="ue8m0")
        (address, *_), owner = _scale_arguments(operand)
        assert owner is not None and torch.equal(owner, blocks) and address == owner.data_ptr()
        assert address % 16 == 0 and (address != given.data_ptr()) == copied
        x = FloatOperand(torch.zeros(4, 512, dtype=torch.uint8), "e4m3", 512)
        _, copies = cuda.plan_scaled_gemm(check(x, operand, 1.0, 0.0, None, None, None, torch.float32, False))
        assert copies == (("b's scales",) if copied else ())


CASES = [replace(each, out="float16") for rows, a, b in TAKEN for each in candidates(rows, a, b, block_sums=True)[:-1]]


@pytest.mark.parametrize("arch", ["sm_90a"])
@pytest.mark.parametrize(
    "config",
    [pytest.param(each, marks=[pytest.mark.long] * (i % 5 > 0)) for i, each in enumerate(CASES)],
    ids=lambda config: config.name,
)
def test_the_kernel_is_made_of_the_instructions_that_were_meant(
    config: SmallMConfig, arch: str, binaries: dict[tuple[SmallMConfig, str], Future[Binary]]
) -> None:
    binary = binaries[config, arch].result()
    sass = disassemble(binary.code)
    # Four warp groups an SM leave 96 registers a thread: up to ten numbers of a thread are read once a stage.
    assert binary.usage is not None, "no usage"
    assert binary.usage.spill_bytes <= (40 if config.groups * config.resident == 4 else 0), binary.usage
    assert len(re.findall(r"\b(?:LDL|STL)\b", sass)) <= 12 and "CALL" not in sass, "local memory"
    assert config.resident * binary.usage.registers * config.threads <= 65536
    steps, blocks = config.tile_k // 32, 2 if config.b.block == 16 else 1
    products = steps * blocks
    assert len(re.findall(r"QGMMA[^;]*, RZ, !UPT", sass)) == sass.count("QGMMA") == products, "each block from zero"
    loop = sass[sass.index("QGMMA") : sass.rindex("QGMMA")]
    assert loop.count("WARPGROUP.DEPBAR") == products - config.ways, "the assembler made them wait"
    loads = len(re.findall(r"LDS\.U16" if blocks == 2 else r"LDS\.U8", sass))
    assert loads == (2 * steps // 4 if config.b.block else 0), "the scales of one step of four, of both rows"
    assert "MEMBAR" not in loop and "UTMALDG.2D" in sass and ("UBLKCP" in sass) == bool(config.a.block)


ORDER, BLOCKS = "scaled_gemm/small_m/order.cuh", "scaled_gemm/small_m/blocks.cuh"
FOUR, EIGHT = candidates(8, E4M3, MX4, block_sums=True)[2], candidates(16, MX8, MX8, block_sums=True)[3]
TWICE, SIXTEEN = candidates(32, MX4, E2M1, block_sums=True)[1], candidates(8, NV, NV, block_sums=True)[2]
SHAPES = {FOUR: (5, 77, 4608), EIGHT: (13, 66, 4608), TWICE: (20, 140, 1536), SIXTEEN: (5, 77, 4608)}
BREACHES = [
    (FOUR, BLOCKS, "/ 16 * 16, row, full)", "/ 16 * 16 + 16, row, full)"),
    (EIGHT, BLOCKS, "part * G::kOfScales % 16;", "0;"),
    (FOUR, BLOCKS, "(4 * quad + lane) * kBlocks", "(4 * quad) * kBlocks"),
    (FOUR, BLOCKS, "(row + 8 * half) * G::kScaleBox +", "row * G::kScaleBox +"),
    (FOUR, BLOCKS, "i % 4, 4);", "i % 2, 4);"),
    (SIXTEEN, BLOCKS, "scales[half][block], i", "scales[half][0], i"),
    (SIXTEEN, BLOCKS, "threadIdx.x / 2 % 2 == block", "threadIdx.x % 2 == block"),
    (SIXTEEN, BLOCKS, "C::kBlockX == 16 ? j : i", "i"),
    (SIXTEEN, ORDER, "kCount = 64 / C::kBlock", "kCount = 2"),
    (EIGHT, BLOCKS, "words[half][2 * step + 1];", "words[half][2 * step];"),
    (FOUR, BLOCKS, "words[half][step] >> 4", "words[half][step] >> 3"),
    (FOUR, BLOCKS, "swizzled<128>(row + 8 * half, chunk + i)", "swizzled<128>(row, chunk + i)"),
    (FOUR, BLOCKS, "scale[r / 2 % 2], accum", "scale[r % 2], accum"),
    (EIGHT, BLOCKS, "r % 2 ? x[r / 4].y", "r / 2 % 2 ? x[r / 4].y"),
    (EIGHT, BLOCKS, "(from + 8 * r);", "(from);"),
    (EIGHT, BLOCKS, "? j : i) * C::kRows", "? j : i) * 8"),
    (EIGHT, BLOCKS, "int64_t{part} * (G::kFactorBytes / 4)", "0"),
    (TWICE, BLOCKS, "warpgroup_wait<C::kWays - 1>();", "warpgroup_wait<C::kWays>();"),
    (EIGHT, BLOCKS, "warpgroup_wait<0>();", ""),
    (FOUR, BLOCKS, "j = kAll - C::kWays + 1; j <", "j = kAll - C::kWays + 2; j <"),
    (FOUR, BLOCKS, "    barrier_wait(gemm.full(at.stage), at.parity);", ""),
    (FOUR, BLOCKS, "barrier_wait(gemm.empty(at.stage), at.parity ^ 1);", ""),
    (EIGHT, ORDER, "pick(a + 2, i % 2), pick(b", "pick(a, i % 2), pick(b"),
    (EIGHT, ORDER, "factors[block * factors_pitch + row]", "factors[block * factors_pitch]"),
    (EIGHT, ORDER, "kCount * unit + i;", "kCount * unit;"),
]


@pytest.mark.long
@pytest.mark.skipif(not has_compiler(), reason="no g++")
@pytest.mark.parametrize("index", range(len(BREACHES)))
def test_a_wrong_step_is_seen(index: int, tmp_path: Path) -> None:
    config, header, old, new = BREACHES[index]
    config = TWICE if "pick(" in old else config  # words of eight values are taken apart
    kernels = HostSmallM(tmp_path, [config], replaced(header, (old, new)))
    with pytest.raises((AssertionError, RuntimeError)):
        for late in (0, 1, 2, 3):
            check_host(kernels, config, SHAPES[config], late)
