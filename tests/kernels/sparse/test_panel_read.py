"""What a warp of the SpMM panel kernel does with the records of a matrix, simulated on the host lane by lane."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")

from cute_kernels.dtypes import Integer
from cute_kernels.layout.bank_conflicts import Access, report, swizzled
from cute_kernels.operands import Vectors
from cute_kernels.spmm.panel import PanelConfig, balance_rows
from tests.helpers import random_mask
from tests.kernels.layout.test_fragments import blocks_of, operand_a, operand_b, values_of

Array = np.ndarray[Any, Any]
LANES = np.arange(32)
AHEAD = 8  # records that may be read behind the last one


def config_of(tile_n_bytes: int, a_bits: int, v: int, rows: int, stages: int = 5, window: int = 3) -> PanelConfig:
    return PanelConfig(
        "s8_m16n8k32", v, Integer(a_bits, True), Integer(8, True), "int32",
        tile_n_bytes=tile_n_bytes, tile=64, stages=stages, tile_window=window, rows_per_warp=rows,
    )  # fmt: skip


def ring_of(config: PanelConfig, dense: Array, rows: range) -> Array:
    """Shared memory when these rows of ``dense``, (K, tile_n_bytes), are there, and no others."""
    memory = np.zeros(config.ring * config.tile_n_bytes, dtype=np.uint8)
    lines, units = np.array(rows)[:, None], np.arange(config.tile_n_bytes // 16)
    starts = swizzled(lines % config.ring, units, config.tile_n_bytes, config.swizzle)
    memory[starts[..., None] + np.arange(16)] = dense[rows.start : rows.stop].view(np.uint8).reshape(*starts.shape, 16)
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


def product_of(config: PanelConfig, records: Array, memory: Array) -> tuple[Array, list[Array]]:
    """Sums of the records of one vector row, (V, columns); and the addresses of all reads."""
    entry, units, depth = config.entry, config.tile_n_bytes // 16, 1 if config.packed else 2
    sums, seen = np.zeros((8, units * 16), dtype=np.int64), []
    for record in records:
        held = held_of(config, words_of(record[:-64], 32, depth))
        first = record[-64:].view(np.uint16)[LANES].astype(np.int64) * 16  # the lanes' addresses at unit 0
        for unit in range(units):
            at = first ^ unit * 16
            seen.append(at)
            rows = memory[at[:, None] + np.arange(16)]  # (32 rows of four matrices, 16 bytes)
            fed = operand_a(entry, blocks_of(rows, 8, True, 8)[0], True)[0]  # (16, 32)
            columns = unit * 16 + np.arange(16).reshape(8, 2).T.reshape(-1)  # 2 g, then 2 g + 1
            sums[:, columns] += (fed @ operand_b(entry, held).T).T  # of (16 rows of the mma, 8)
    return sums[: config.vector_length], seen


def rarely(*values: int) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(("tile_n_bytes", "rows"), [rarely(16, 1), (16, 3), (32, 2), (64, 1), rarely(64, 3), (128, 2)])
@pytest.mark.parametrize(
    ("a_bits", "v", "stages", "window"),
    [(8, 8, 5, 3), (4, 8, 5, 3), rarely(8, 4, 5, 3), (8, 8, 1, 1), rarely(4, 8, 1, 1)],
)
def test_a_warp_multiplies_its_vector_rows(
    tile_n_bytes: int, rows: int, a_bits: int, v: int, stages: int, window: int
) -> None:
    config = config_of(tile_n_bytes, a_bits, v, rows, stages, window)
    rng = np.random.default_rng(tile_n_bytes + a_bits)
    inner, top = 7 * 64 + 13, 1 << a_bits - 1  # tiles beyond the ring, whose places return
    mask = random_mask(4, inner, 0.3, 3)  # units of 3 and of 1
    mask[1] = False
    columns, offsets = mask.nonzero()[:, 1].to(torch.int32), torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    values = rng.integers(-top, top, (len(columns), v))
    vectors = Vectors(offsets, columns, torch.from_numpy(values).to(torch.int8), config.a)
    copy = config.pack(vectors, inner)
    order, units = copy.order.tolist(), -(-4 // (config.warps * rows)) * config.warps
    assert sorted(order)[:4] == [0, 1, 2, 3] and len(order) == (units + 1) * rows
    assert all(row == 4 for row in order[-rows:])
    dense = rng.integers(-128, 128, (inner, tile_n_bytes)).astype(np.int8)
    total = np.zeros((4, v, tile_n_bytes), dtype=np.int64)
    for unit in range(units):
        at = int(copy.group_offsets[unit])
        for tile in range(copy.tile_counts.shape[1]):
            there = range(max(0, tile - config.tile_window + 1) * config.tile, min(inner, (tile + 1) * config.tile))
            memory = ring_of(config, dense, there)
            for row, count in enumerate(copy.tile_counts[unit, tile].tolist()):
                if count:
                    sums, _ = product_of(config, copy.records[at : at + count].numpy(), memory)
                    total[order[unit * rows + row]] += sums
                at += count
        assert at == int(copy.group_offsets[unit + 1])
    assert not copy.tile_counts[units:].any() and len(copy.records) == int(copy.group_offsets[-1]) + AHEAD
    scale = 16 if config.packed else 1
    kept = np.zeros((4, v, inner), dtype=np.int64)
    kept[mask.nonzero()[:, 0].numpy(), :, columns.numpy()] = values
    np.testing.assert_array_equal(total, scale * (kept @ dense.astype(np.int64)))


def test_the_order_spares_conflicts() -> None:
    columns = (torch.rand(1, 2048, generator=torch.Generator().manual_seed(0)) < 0.1).nonzero()[:, 1].to(torch.int32)
    values = torch.ones(len(columns), 8, dtype=torch.int8)
    vectors, means = Vectors(torch.tensor([0, len(columns)]), columns, values, Integer(8, True)), []
    for ordered in (False, True):
        config = PanelConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "int32", ordered=ordered)
        copy = config.pack(vectors, 2048)
        memory = np.zeros(config.ring * config.tile_n_bytes, dtype=np.uint8)
        _, seen = product_of(config, copy.records[:-AHEAD].numpy(), memory)
        (line,) = report([Access("reads", "ldmatrix.x4", np.stack(seen))])
        means.append(line.wavefronts / line.ideal)
    assert means[1] < 0.75 * means[0]


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_dealt_rows_are_equal_shares(rows: int) -> None:
    mask = torch.rand(64, 2048, generator=torch.Generator().manual_seed(1)) < torch.linspace(0.02, 0.2, 64)[:, None]
    columns, offsets = mask.nonzero()[:, 1].to(torch.int32), torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    vectors = Vectors(offsets, columns, torch.ones(len(columns), 8, dtype=torch.int8), Integer(8, True))
    config = replace(config_of(128, 8, 8, rows), warps=8)
    order = config.pack(vectors, 2048).order[:-rows]
    share = rows if rows > 1 else config.warps  # of a warp, or of a block
    placed = torch.nn.functional.pad(mask.sum(1), (0, 1))[order.long()]
    shares = placed.view(-1, share).sum(1)
    assert placed.sum() == mask.sum() and sorted(order[order < 64].tolist()) == list(range(64))
    assert shares.max() - shares.min() <= 0.35 * mask.sum(1).max()


@pytest.mark.parametrize("rows", [1, 7, 30, 31, 64])
@pytest.mark.parametrize(
    "shape", [{"warps": 4}, {"warps": 3, "rows_per_warp": 2}, {"rows_per_warp": 4}, {"cluster": 2}]
)
def test_pairs_of_vector_rows_stay_side_by_side(rows: int, shape: dict[str, Any]) -> None:
    kind = (Integer(8, True), Integer(8, True), "float16")
    config = PanelConfig("s8_m16n8k32", 8, *kind, **{"warps": 2, **shape}, transposed=True)
    lengths = torch.randint(0, 40, (rows,), generator=torch.Generator().manual_seed(rows))
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    columns = torch.cat([torch.arange(count, dtype=torch.int32) for count in lengths.tolist()])
    vectors = Vectors(offsets, columns, torch.ones(len(columns), 8, dtype=torch.int8), config.a)
    moved, order = balance_rows(vectors, *config._shares(rows), team=2)
    assert config.pairs and not replace(config, transposed=False).pairs
    pairs = order.view(-1, 2)
    exists = pairs[:, 0] // 2 * 2 < rows
    assert torch.equal(pairs[exists, 1], pairs[exists, 0] + 1) and bool((pairs[exists, 0] % 2 == 0).all())
    behind = config.pack(vectors, 64).order[len(order) :]  # of the unit after the last one
    assert bool((pairs[~exists] // 2 * 2 >= rows).all()) and bool((behind // 2 * 2 >= rows).all())
    found = pairs[pairs < rows]
    assert torch.equal(found.sort().values, torch.arange(rows, dtype=torch.int32))
    assert torch.equal(moved.row_offsets.diff()[: pairs.numel()][pairs.view(-1) < rows], lengths[found.long()])
