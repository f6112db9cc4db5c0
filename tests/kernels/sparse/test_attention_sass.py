"""Machine code of sparse attention, compiled without a GPU: the instructions that were meant, nothing spilled or called."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import pytest

from cute_kernels.attention.blocks.config import BlockAttention, block_config
from cute_kernels.attention.config import AttentionConfig, GatherAttention, PanelAttention
from cute_kernels.attention.quantize_qkv import OperandsConfig
from cute_kernels.jit import Binary, Unit
from tests.helpers import disassemble

pytest.importorskip("cuda.core")

EVERYTHING = {"key_scale": True, "bias": True, "lse": True}
CASES: list[tuple[AttentionConfig, str]] = [
    (PanelAttention(64), "sm_90a"),
    (PanelAttention(64, key_scale=True), "sm_90a"),
    (PanelAttention(64, key_scale=True, bias=True, out="float32"), "sm_90a"),
    (PanelAttention(64, rows_per_warp=2, lse=True), "sm_90a"),
    (PanelAttention(64, rows_per_warp=2, **EVERYTHING), "sm_90a"),
    (PanelAttention(64), "sm_100a"),
    (GatherAttention(64), "sm_90a"),
    (GatherAttention(128, out="bfloat16", **EVERYTHING), "sm_90a"),
    (GatherAttention(64, **EVERYTHING), "sm_80"),
    (GatherAttention(32), "sm_80"),
    (GatherAttention(64, key_scale=True), "sm_90a"),
]
FLOATS = [{"key_scale": True, "source": "float16"}, {**EVERYTHING, "source": "float32"}]
BLOCKS = [
    replace(block_config(head), **flags)
    for head in (64, 128)
    for flags in ({}, {"key_scale": True}, EVERYTHING, *FLOATS)
]
OPERANDS = [
    (OperandsConfig(x, 64, bits, cluster=cluster), arch)
    for x, bits, cluster, arch in (
        ("float16", 8, 8, "sm_90a"),
        ("bfloat16", 4, 8, "sm_100a"),
        ("float16", 8, 1, "sm_80"),
    )
]

# Compilers for 8.x place a slow path for a diverged warp beside an operation of a whole warp, and call it; it never runs
# here.
_DIVERGED = re.compile(r"\$__internal_\d+_\$__cuda_(?:sm70_(?:warp|shfl|vote)|redux)sync\w*|\.L_x_\d+")


def lean(binary: Binary) -> str:
    """SASS of ``binary``, after checking that it calls nothing and keeps nothing in local memory."""
    assert binary.usage is not None and binary.usage.stack_bytes == binary.usage.spill_bytes == 0, binary.usage
    sass = disassemble(binary.code)
    assert not re.search(r"\b(?:LDL|STL)\b", sass)
    called = re.findall(r"\bCALL\S*\s+`?\(?([^)\s;]+)", sass)
    strange = {name for name in called if not _DIVERGED.fullmatch(name) or binary.arch != "sm_80"}
    assert not strange, strange
    return sass


@pytest.mark.parametrize(("config", "arch"), CASES, ids=[f"{arch}-{config.name}" for config, arch in CASES])
def test_the_kernel_is_made_of_the_instructions_that_were_meant(
    config: AttentionConfig, arch: str, binaries: dict[tuple[AttentionConfig, str], Future[Binary]]
) -> None:
    binary = binaries[config, arch].result()
    assert binary.usage is not None
    sass = lean(binary)
    assert set(re.findall(r"IMMA\.\w+\.\w+\.\w+", sass)) == {"IMMA.16832.S8.S8", "IMMA.16832.S8.U8"}
    panel = isinstance(config, PanelAttention)
    for wanted in ("LDSM.16.M88.4", "LDSM.16.MT88.4", "MOVM.16.MT88", "MUFU.EX2", "F2FP"):
        assert wanted in sass, wanted
    assert ("UTMALDG.2D" in sass) == panel and ("SYNCS" in sass) == panel
    assert ("UBLKCP" in sass) == (panel and config.keyed)
    assert bool(re.search(r"LDGSTS\.E\.BYPASS\S*\.128", sass)) != panel
    assert bool(re.search(r"LDGSTS\.E(?!\.BYPASS)", sass)) == (config.keyed and not panel)
    # Sums become floats by their first bits; divisions of numbers of blocks convert, and logarithms.
    assert len(re.findall(r"\bI2FP?\.(?!U32\.RP)", sass)) <= 8
    warps = -(-config.threads // 128)  # of a quarter of the multiprocessor
    assert binary.usage.registers * 32 * warps <= 16384


@pytest.mark.parametrize(("config", "arch"), OPERANDS, ids=[f"{arch}-{config.name}" for config, arch in OPERANDS])
def test_operands_wait_in_shared_memory_and_the_next_kernel_is_let_go(
    config: OperandsConfig, arch: str, compile_one: Callable[[Unit], Binary]
) -> None:
    sass = lean(compile_one(config.translation_unit(arch)))
    assert re.search(r"LDGSTS\.E\.BYPASS\S*\.128", sass) and "LDS.128" in sass and "STG.E.64" in sass
    assert ("PREEXIT" in sass) == ("ACQBULK" in sass) == (arch != "sm_80")
    assert "MEMBAR.ALL.GPU" in sass and "STG.E.STRONG.GPU" in sass
    assert ("UCGABAR_ARV" in sass) == ("UCGABAR_WAIT" in sass) == (config.cluster > 1)


@pytest.mark.parametrize("config", BLOCKS, ids=lambda config: config.name)
def test_whole_blocks_are_multiplied_by_warp_groups_from_registers(
    config: BlockAttention, compile_one: Callable[[Unit], Binary]
) -> None:
    binary = compile_one(config.translation_unit("sm_90a"))
    sass = lean(binary)
    assert binary.usage is not None and binary.usage.registers * config.threads * config.resident <= 65536 * 4 // 3
    products = set(re.findall(r"IGMMA\.\S+ R\d+, R\d+, gdesc", sass))
    assert {each.split()[0] for each in products} == {"IGMMA.64x64x32.S8.S8", f"IGMMA.64x{config.head}x32.U8.S8"}
    for wanted in ("UTMALDG.2D", "LDSM.16.MT88.4", "MUFU.EX2", "F2FP", "IDP.4A.U8.U8", "SYNCS", "ACQBULK"):
        assert wanted in sass, wanted
    assert "STG.E.128" in sass or config.out == "float32"
    # operands of products under way stay where they are: a wait for each product, and no other
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) == 2
