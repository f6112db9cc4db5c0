"""Switches that exist to be measured: no prefetch, 4-bit values in the order of their columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")

from cute_kernels import atoms
from cute_kernels.dtypes import Integer
from cute_kernels.jit import Binary, Unit
from cute_kernels.layout.fragments import gather_order, pack_index
from cute_kernels.sddmm.gather import SddmmConfig
from cute_kernels.sddmm.heuristics import sddmm_config
from cute_kernels.spmm.gather import GatherConfig
from cute_kernels.spmm.heuristics import SpmmKernel, spmm_config
from cute_kernels.spmm.panel import PanelConfig
from tests.kernels.layout.test_fragments import (
    Array,
    in_memory,
    ldmatrix_trans,
    operand_a,
    operand_b,
    prmt,
    random_ints,
    values_of,
)
from tests.kernels.sparse.test_spmm_sass import clean_sass, expected_mmas

EIGHT, FOUR = Integer(8, True), Integer(4, True)
GATHER = GatherConfig("s8_m16n8k32", 8, EIGHT, EIGHT, "float16", stages=1)
SAMPLED = SddmmConfig("s8_m16n8k32", 8, EIGHT, EIGHT, "float16", stages=1)
NIBBLES = GatherConfig("int4_as_int8_m16n8k32", 8, FOUR, FOUR, "float16", shuffle=False)
NATIVE = replace(NIBBLES, atom="s4_m16n8k64")
PANEL = PanelConfig("int4_as_int8_m16n8k32", 8, FOUR, FOUR, "float16", tile_n_bytes=64, tile=512, shuffle=False)
ONE_TILE = [
    PanelConfig("s8_m16n8k32", 8, EIGHT, EIGHT, "float16", tile_n_bytes=size, stages=1, tile_window=1, **more)
    for size, more in ((128, {}), (64, {"cluster": 2, "rows_per_warp": 2}), (16, {"a_stages": 3, "tile": 512}))
]
BOTH = [(config, arch) for config in (GATHER, SAMPLED, NIBBLES) for arch in ("sm_80", "sm_90a")]
CASES = [*BOTH, (NATIVE, "sm_80"), *((config, "sm_90a") for config in (PANEL, *ONE_TILE))]
LOW = np.uint32(0x0F0F0F0F)


def spread(x: Array, upper: bool, signed: bool) -> Array:
    """``spread_nibbles`` of ``mma.cuh``."""
    twice = prmt(x, x, 0x3322 if upper else 0x1100)
    if signed:
        return twice << 4 & np.uint32(0x00F000F0) | twice & np.uint32(0xF000F000)
    return twice & np.uint32(0x000F000F) | twice >> 4 & np.uint32(0x0F000F00)


def join(a: Array, b: Array) -> Array:
    """``join_nibbles`` of ``mma.cuh``."""
    return prmt(a | a >> 4, b | b >> 4, 0x6420)


@pytest.mark.parametrize("signed", [True, False])
def test_nibbles_in_order_become_the_registers(signed: bool) -> None:
    entry = atoms.atom("int4_as_int8_m16n8k32")
    group = random_ints((8, 32), 4, signed)
    natural = pack_index(entry, packed=True, shuffled=False)
    np.testing.assert_array_equal(natural, pack_index(entry))
    nibbles = (group.reshape(-1)[natural] & 15).astype(np.uint32).reshape(32, 8)
    words = np.bitwise_or.reduce(nibbles << 4 * np.arange(8, dtype=np.uint32), axis=-1)
    registers = np.stack([spread(words, upper, signed) for upper in (False, True)])
    values = values_of(registers, 8, signed).transpose(1, 0, 2).reshape(-1)
    expected = operand_b(entry, group.reshape(-1)[pack_index(entry)])
    np.testing.assert_array_equal(operand_b(entry, values), (16 if signed else 1) * expected)


@pytest.mark.parametrize("signed", [True, False])
def test_a_four_bit_instruction_gets_columns_in_order(signed: bool) -> None:
    """The whole of SpMM on one group, as in ``test_fragments``, with the nibbles put in order."""
    entry = atoms.atom("s4_m16n8k64")
    order = [gather_order(entry, shuffled=False)(k) for k in range(64)]
    lane = [order[8 * t : 8 * t + 8] for t in range(4)]
    assert all(slots == sorted(slots) for slots in lane)  # as the columns lie
    assert any(slots != sorted(slots) for slots in [[gather_order(entry)(k) for k in range(8)]])
    dense, group = random_ints((64, 32), 4, signed), random_ints((8, 64), 4, signed)
    memory = in_memory(dense, 4)
    raw = [ldmatrix_trans(memory[8 * j : 8 * j + 8]) for j in range(8)]
    blocks = np.zeros((4, 2, 32), dtype=np.uint32)  # (columns of a unit, registers along k, lanes)
    for d in range(2):
        for half, selector in enumerate((0x6420, 0x7531)):
            a, b = (prmt(raw[4 * d + i], raw[4 * d + i + 1], selector) for i in (0, 2))
            blocks[2 * half, d], blocks[2 * half + 1, d] = join(a & LOW, b & LOW), join(a >> 4 & LOW, b >> 4 & LOW)
    held = group.reshape(-1)[pack_index(entry, packed=True, shuffled=False)]
    sums = np.einsum("amk,nk->amn", operand_a(entry, blocks, signed), operand_b(entry, held))
    for tile in range(2):
        for row in range(16):
            column = row % 8 * 4 + 2 * tile + row // 8
            np.testing.assert_array_equal(sums[tile, row], group @ dense[:, column])


@pytest.mark.parametrize(("config", "arch"), CASES, ids=[f"{arch}-{config.name}" for config, arch in CASES])
def test_the_switch_compiles_to_the_instructions_that_were_meant(
    config: SpmmKernel | SddmmConfig,
    arch: str,
    binaries: dict[Hashable, Future[Binary]],
    compile_one: Callable[[Unit], Binary],
) -> None:
    sass = clean_sass(binaries[config, arch].result())
    assert set(re.findall(r"IMMA\.\w+\.\w+\.\w+", sass)) == expected_mmas(config)
    if not isinstance(config, SddmmConfig) and not config.shuffle:  # ordering the nibbles takes instructions
        usual = clean_sass(compile_one(replace(config, shuffle=True).translation_unit(arch)))
        assert sass.count("PRMT") > usual.count("PRMT")
    if isinstance(config, PanelConfig):
        # A stage has two barriers. With one stage a tile is waited for, multiplied and given back before the next one.
        assert sass.count("SYNCS.EXCH.64") == 2 * config.stages and "UTMALDG.2D" in sass
        if config.stages == config.cluster == 1:
            order = re.findall(r"SYNCS\.PHASECHK|IMMA|SYNCS\.ARRIVE\.TRANS64\.A1T0", sass)
            assert order[0] == "SYNCS.PHASECHK" and order.count("SYNCS.ARRIVE.TRANS64.A1T0") == 1
            assert "IMMA" not in order[order.index("SYNCS.ARRIVE.TRANS64.A1T0") :]
        return
    waits = [int(count, 16) for count in re.findall(r"DEPBAR\.LE SB0, (0x\w+)", sass)]
    assert waits[0] == (0 if config.stages == 1 else config.stages - 2)
    # one stage: copied, waited for, multiplied; with more, a group is waited for before the next one is copied
    first = [sass.index(found) for found in ("LDGSTS", "DEPBAR", "IMMA")]
    assert sass.count("LDGSTS") == sass[: first[1]].count("LDGSTS") or config.stages > 1
    assert first == sorted(first)


@pytest.mark.parametrize("config", [GATHER, NIBBLES, NATIVE, PANEL, SAMPLED, *ONE_TILE], ids=lambda config: config.name)
def test_the_switch_is_part_of_the_name(config: SpmmKernel | SddmmConfig) -> None:
    assert (sddmm_config if config is SAMPLED else spmm_config)(config.name) == config
    if isinstance(config, (GatherConfig, PanelConfig)) and not config.shuffle:
        assert "-unshuffled" in config.name
        assert config.packing_key() != replace(config, shuffle=True).packing_key()
