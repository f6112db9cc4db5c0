"""What a warp of the SpMM panel kernel does with the records of a matrix, simulated on the host lane by lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")

from cute_kernels.banks import Access, report, swizzled
from cute_kernels.numbers import Integer
from cute_kernels.operands import Vectors
from cute_kernels.spmm_panel import PanelConfig, panel_copy
from tests.helpers import random_mask
from tests.kernels.test_fragments import blocks_of, operand_a, operand_b, values_of

Array = np.ndarray[Any, Any]
LANES = np.arange(32)
UPPER = LANES % 4 >= 2  # lanes t = 2, 3


def config_of(row_bytes: int, halved: bool, a_bits: int, v: int, rows: int) -> PanelConfig:
    return PanelConfig(
        "s8_m16n8k32", v, Integer(a_bits, True), Integer(8, True), "int32",
        row_bytes=row_bytes, tile=64, stages=5, window=3, rows=rows, halved=halved,
    )  # fmt: skip


def ring_of(config: PanelConfig, dense: Array, rows: range) -> Array:
    """Shared memory when these rows of ``dense``, (K, row_bytes), are there, and no others."""
    memory = np.zeros(config.ring * config.row_bytes, dtype=np.uint8)
    for k in rows:
        for unit in range(config.row_bytes // 16):
            at = int(swizzled(k % config.ring, unit, config.row_bytes, config.swizzle))
            memory[at : at + 16] = dense[k].view(np.uint8)[16 * unit : 16 * unit + 16]
    return memory


def words_of(values: Array, count: int, lane_words: int) -> Array:
    """The bytes of one operand in the record -> (count, words), as lanes load them; zero beyond the vector's rows."""
    words = values.view(np.uint32).reshape(-1, lane_words)
    return np.pad(words, ((0, count - len(words)), (0, 0)))


def held_of(config: PanelConfig, words: Array) -> Array:
    """(lanes, words) of operand B -> (lanes * values,), as the instruction takes them."""
    if not config.packed:
        return values_of(words.T, 8, True).transpose(1, 0, 2).reshape(-1)
    high = np.uint32(0xF0F0F0F0)
    registers = np.stack([part for word in words.T for part in (word << 4 & high, word & high)])
    return values_of(registers, 8, True).transpose(1, 0, 2).reshape(-1)


def addresses_of(config: PanelConfig, places: Array) -> list[tuple[Array, int]]:
    """For each read of a group: the lanes' addresses at unit 0 of their half, and how many units it is done for."""
    units = config.row_bytes // 16
    if not config.halved:
        return [(places[LANES].astype(np.int64) * 16, units)]
    pairs = places.view(np.uint32)[LANES // 8 * 4 + LANES % 4]
    half = LANES // 4 % 2 * (units // 2) * 16
    return [((pairs >> 16 * read & 0xFFFF).astype(np.int64) * 16 ^ half, units // 2) for read in range(2)]


def product_of(config: PanelConfig, records: Array, memory: Array) -> tuple[Array, list[Array]]:
    """Sums of the records of one vector row, (V, columns); and the addresses of all reads."""
    entry, units, depth = config.entry, config.row_bytes // 16, 1 if config.packed else 2
    sums, seen = np.zeros((8, units * 16), dtype=np.int64), []
    for record in records:
        values, places = record[:-64], record[-64:].view(np.uint16)
        for read, (first, count) in enumerate(addresses_of(config, places)):
            if config.halved:
                mine = words_of(values, 16, 2 * depth)[LANES // 4 * 2 + LANES % 2, read * depth : (read + 1) * depth]
                parts = [(0, np.where(UPPER[:, None], 0, mine)), (units // 2, np.where(UPPER[:, None], mine, 0))]
            else:
                parts = [(0, words_of(values, 32, depth))]
            for unit in range(count):
                at = first ^ unit * 16
                seen.append(at)
                rows = memory[at[:, None] + np.arange(16)]  # (32 rows of four matrices, 16 bytes)
                fed = operand_a(entry, blocks_of(rows, 8, True, 8)[0], True)[0]  # (16, 32)
                for offset, words in parts:
                    product = fed @ operand_b(entry, held_of(config, words)).T  # (16 rows of the mma, 8)
                    columns = (unit + offset) * 16 + np.arange(16).reshape(8, 2).T.reshape(-1)  # 2 g, then 2 g + 1
                    sums[:, columns] += product.T
    return sums[: config.vector_length], seen


@pytest.mark.parametrize(("row_bytes", "rows"), [(64, 1), (64, 3), (128, 2)])
@pytest.mark.parametrize(("a_bits", "v"), [(8, 8), (4, 8), (8, 4)])
@pytest.mark.parametrize("halved", [False, True])
def test_a_warp_multiplies_its_vector_rows(row_bytes: int, rows: int, a_bits: int, v: int, halved: bool) -> None:
    config = config_of(row_bytes, halved, a_bits, v, rows)
    rng = np.random.default_rng(row_bytes + a_bits)
    inner, top = 7 * 64 + 13, 1 << a_bits - 1  # tiles beyond the ring, whose places return
    mask = random_mask(4, inner, 0.3, 3)  # units of 3 and of 1
    mask[1] = False
    columns, offsets = mask.nonzero()[:, 1].to(torch.int32), torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    values = rng.integers(-top, top, (len(columns), v))
    vectors = Vectors(offsets, columns, torch.from_numpy(values).to(torch.int8), config.a)
    copy = panel_copy(config, vectors, inner)
    dense = rng.integers(-128, 128, (inner, row_bytes)).astype(np.int8)
    total = np.zeros((4, v, row_bytes), dtype=np.int64)
    for unit in range(-(-4 // rows)):
        at = int(copy.group_offsets[unit])
        for tile in range(copy.tile_counts.shape[1]):
            window = range(max(0, tile - config.window + 1) * config.tile, min(inner, (tile + 1) * config.tile))
            memory = ring_of(config, dense, window)
            for row, count in enumerate(copy.tile_counts[unit, tile].tolist()):
                if count:
                    sums, _ = product_of(config, copy.records[at : at + count].numpy(), memory)
                    total[unit * rows + row] += sums
                at += count
        assert at == int(copy.group_offsets[unit + 1])
    assert not copy.tile_counts[-(-4 // rows) :].any() and len(copy.records) == int(copy.group_offsets[-1]) + 2
    scale = 16 if config.packed else 1
    kept = np.zeros((4, v, inner), dtype=np.int64)
    kept[mask.nonzero()[:, 0].numpy(), :, columns.numpy()] = values
    np.testing.assert_array_equal(total, scale * (kept @ dense.astype(np.int64)))


def test_reads_of_halves_have_fewer_conflicts() -> None:
    columns = (torch.rand(1, 2048, generator=torch.Generator().manual_seed(0)) < 0.1).nonzero()[:, 1].to(torch.int32)
    values = torch.ones(len(columns), 8, dtype=torch.int8)
    vectors, means = Vectors(torch.tensor([0, len(columns)]), columns, values, Integer(8, True)), []
    for halved in (False, True):
        config = PanelConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "int32", halved=halved)
        copy = panel_copy(config, vectors, 2048)
        memory = np.zeros(config.ring * config.row_bytes, dtype=np.uint8)
        _, seen = product_of(config, copy.records[:-2].numpy(), memory)
        (line,) = report([Access("reads", "ldmatrix.x4", np.stack(seen))])
        means.append(line.wavefronts / line.ideal)
    assert means[1] < 0.85 * means[0]
