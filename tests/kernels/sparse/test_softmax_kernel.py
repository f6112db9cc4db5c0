"""The sparse softmax on a GPU: its machine code, and where every lane reads and writes, worked out on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")

from cute_kernels.attention.sparse_softmax import SoftmaxConfig, default_configs
from cute_kernels.dtypes import Integer
from cute_kernels.integers import int_range
from cute_kernels.jit import Binary, Unit
from cute_kernels.operands import Vectors
from magicube_cutlass import random_pattern
from magicube_cutlass.formats.construct import narrow
from tests.helpers import disassemble

ATOMS = {4: ("int4_as_int8_m16n8k32", "s8_m16n8k32"), 8: ("s8_m16n8k32",), 16: ("s8_m16n8k32",)}
FRAGMENTS = [
    SoftmaxConfig("float16", v, 32, bits, atom=atom)
    for v, bits in product((1, 2, 4, 8, 16, 32), (4, 8, 16))
    for atom in ATOMS[bits]
]


@pytest.mark.parametrize(
    ("config", "arch"),
    [
        (SoftmaxConfig("float16", 8, 32, 8, causal=True, bias=True, atom="s8_m16n8k32"), "sm_90a"),
        pytest.param(SoftmaxConfig("float16", atom="s8_m16n8k32"), "sm_90a", marks=pytest.mark.long),
        (SoftmaxConfig("bfloat16", 16, 32, 16, causal=True, atom="s8_m16n8k32"), "sm_90a"),
        pytest.param(
            SoftmaxConfig("float16", 4, 32, 4, bias=True, atom="int4_as_int8_m16n8k32"),
            "sm_90a",
            marks=pytest.mark.long,
        ),
        (SoftmaxConfig("float32", 32, 32, 16, atom="s8_m16n8k32"), "sm_80"),
        pytest.param(SoftmaxConfig("bfloat16", 1, 16, 4), "sm_90a", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_machine_code_keeps_everything_in_registers(
    config: SoftmaxConfig, arch: str, compile_one: Callable[[Unit], Binary]
) -> None:
    binary = compile_one(config.translation_unit(arch))
    sass = disassemble(binary.code)
    assert binary.usage is not None and binary.usage.stack_bytes == binary.usage.spill_bytes == 0, binary.usage
    assert not re.search(r"\b(?:LDL|STL)\b", sass)
    assert "LDG.E.128" in sass and "MUFU.EX2" in sass
    # The divisions of indices take a few; a rounding of each value would be one apiece.
    assert len(re.findall(r"\bF2I", sass)) < 8, "rounding by an addition is several times as fast"


def lanes_of(config: SoftmaxConfig) -> list[tuple[int, int, int]]:
    """Stride, row and first slot of each lane, as in ``attention/sparse_softmax.cuh``."""
    return [
        (lane // (config.lanes * config.rows), lane // config.lanes % config.rows, lane % config.lanes * 8)
        for lane in range(32)
    ]


@pytest.mark.parametrize("v", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("stride", [16, 32, 64])
def test_a_warp_has_every_value_once_and_a_row_is_in_the_lanes_that_merge(v: int, stride: int) -> None:
    config = SoftmaxConfig("float16", v, stride)
    tiles = v // config.rows
    assert tiles * config.rows == v
    found = [
        ((block * v + tile * config.rows + row) * stride + slot + i)
        for tile in range(tiles)
        for block, row, slot in lanes_of(config)
        for i in range(8)
    ]
    assert sorted(found) == list(range(config.blocks * v * stride))
    rows = [row for _, row, _ in lanes_of(config)]
    for lane in range(32):
        merged = {lane}
        for step in (1, 2, 4, 8, 16):
            if step < config.lanes or step >= config.lanes * config.rows:
                merged |= {one ^ step for one in merged}
        assert merged == {other for other in range(32) if rows[other] == rows[lane]}


def emulate(config: SoftmaxConfig, codes: Tensor) -> Tensor:
    """``FragmentWriter`` lane by lane: the copy, uint8 (blocks, bytes), of one vector row's codes (blocks, V, 32)."""
    planes, rows, v = config.planes, config.rows, config.vector_length
    tiles, count = v // rows, codes.shape[0]
    table = config.fragment_order().tolist()
    staged_bytes, per_word = planes * rows * 32, 8 if config.bits == 4 else 4
    words = staged_bytes // per_word
    operand_words = words // (1 if config.sparse.has_fused_digits else planes)
    out = torch.zeros(count * tiles * words, dtype=torch.int64)
    for tile, b in product(range(tiles), range(0, count, config.blocks)):
        staged = torch.zeros(config.blocks * staged_bytes, dtype=torch.int64)
        for block, row, slot in lanes_of(config):
            if b + block < count:
                mine = codes[b + block, tile * rows + row, slot : slot + 8]
                for plane in range(planes):
                    at = ((block * planes + plane) * rows + row) * 32 + slot
                    staged[at : at + 8] = mine >> (8 * plane) & 0xFF
        for lane, n in product(range(32), range(config.blocks * words // 32)):
            group, word = (lane + 32 * n) // words, (lane + 32 * n) % words
            if b + group < count:
                places = table[word * per_word : (word + 1) * per_word]
                packed = sum(
                    int(staged[group * staged_bytes + place]) << (i * 32 // per_word) for i, place in enumerate(places)
                )
                operand = word // operand_words
                out[(b + group) * tiles * words + (operand * tiles + tile) * operand_words + word % operand_words] = (
                    packed
                )
    return torch.stack([out >> (8 * i) & 0xFF for i in range(4)], 1).to(torch.uint8).view(count, -1)


@pytest.mark.parametrize("config", FRAGMENTS, ids=lambda config: config.name)
def test_integers_are_written_in_the_order_that_the_product_reads(config: SoftmaxConfig) -> None:
    v, high = config.vector_length, int_range(config.bits, False)[1]
    pattern = random_pattern(v, 150, 0.1, v)
    generator = torch.Generator().manual_seed(v)
    values = torch.randint(0, high + 1, (pattern.vectors, v), generator=generator)
    vectors = Vectors(
        pattern.row_offsets, pattern.col_indices, narrow(values, config.bits, False), Integer(config.bits, False)
    )
    copy = config.sparse.pack(vectors, 150)
    padded = pattern.padded(32)
    codes = torch.zeros(padded.col_indices.shape[0], v, dtype=torch.int64)
    codes[padded.slots] = values
    codes = codes.view(-1, 32, v).transpose(1, 2)  # (blocks, V, 32)
    assert torch.equal(emulate(config, codes), copy.values)
    assert torch.equal(copy.group_offsets * 32, torch.cat((padded.row_start, torch.tensor([len(codes) * 32]))))
    assert torch.equal(copy.columns, padded.col_indices)


@pytest.mark.parametrize("config", FRAGMENTS, ids=lambda config: config.name)
def test_two_exchanges_of_pairs_write_what_the_table_says(config: SoftmaxConfig) -> None:
    """``ShuffleWriter`` lane by lane, where it takes the place of the table."""
    assert config.uses_shuffles == (config.vector_length >= 8 and config.bits > 4)
    if not config.uses_shuffles:
        return
    for plane in range(config.planes):
        held = [[plane * 256 + lane * 8 + 2 * pair for pair in range(4)] for lane in range(32)]  # places of pairs
        early, late = [], []
        for lane in range(32):
            first, there = (0, lane ^ 2) if lane & 2 == 0 else (2, lane ^ 2)
            low, high = (lane, there) if lane & 2 == 0 else (there, lane)
            early.append(held[low][first : first + 2])
            late.append(held[high][first : first + 2])
        words = []
        for lane in range(32):
            pair = lane & 1
            mine, theirs = (early[lane][pair], late[lane][pair]), (early[lane ^ 1][pair], late[lane ^ 1][pair])
            low_half, high_half = (theirs, mine) if pair else (mine, theirs)
            words += [low_half[0], high_half[0], low_half[1], high_half[1]]
        table = config.fragment_order()[plane * 256 : plane * 256 + 256].reshape(-1, 2)
        assert table[:, 0].tolist() == words and (table[:, 1] == table[:, 0] + 1).all()


def test_config_names_are_unique_and_other_groups_are_refused() -> None:
    configs = default_configs() + FRAGMENTS
    assert len({config.name for config in configs}) == len(set(configs))
    for atom, stride in (("s8_m16n8k16", 32), ("s8_m16n8k32", 64), ("s4_m16n8k64", 64)):
        with pytest.raises(ValueError, match="atom must multiply bytes in groups of the stride, 32"):
            SoftmaxConfig("float16", stride=stride, bits=4, atom=atom)
