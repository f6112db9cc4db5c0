"""The order of columns in groups: a permutation inside the window, with few conflicts, whatever the pattern."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cute_kernels.layout.column_order import PHASE, ordered_slots, sequential_slots
from tests.helpers import random_mask
from tests.kernels.layout.column_order import expected_slots


def structure(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Columns int32 and row offsets of a bool (R, K) mask."""
    offsets = torch.zeros(mask.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(mask.sum(1), 0, out=offsets[1:])
    return mask.nonzero()[:, 1].to(torch.int32), offsets


def passes(columns: Tensor, rows: Tensor, slots: Tensor) -> float:
    """Mean passes of a read: the most frequent residue among the eight rows of a phase that has any."""
    width = int(slots.max()) // PHASE + 1
    counts = torch.bincount(((rows * width + slots // PHASE) * PHASE) + columns % PHASE).long()
    counts = torch.nn.functional.pad(counts, (0, -counts.numel() % PHASE)).view(-1, PHASE).amax(1)
    return float(counts[counts > 0].double().mean())


@settings(max_examples=80)
@given(
    rows=st.integers(1, 9), size=st.integers(1, 300), density=st.sampled_from([0.02, 0.3, 0.9, 1.0]),
    tile=st.sampled_from([16, 64, 512]), group=st.sampled_from([16, 32, 64]), window=st.integers(1, 4),
    seed=st.integers(0, 100),
)  # fmt: skip
def test_a_group_takes_columns_of_its_window_and_each_slot_once(
    rows: int, size: int, density: float, tile: int, group: int, window: int, seed: int
) -> None:
    columns, offsets = structure(random_mask(rows, size, density, seed))
    row_of = torch.repeat_interleave(offsets.diff())
    for arrange in (sequential_slots, ordered_slots):
        slots = arrange(columns, offsets, tile, -(-size // tile), group, window)
        assert slots.shape == columns.shape
        assert len({(int(r), int(s)) for r, s in zip(row_of, slots, strict=True)}) == len(slots)
        for row in range(rows):
            mine, tiles = slots[row_of == row] // group, columns[row_of == row] // tile
            used = mine.unique()
            assert used.tolist() == list(range(len(used)))  # no empty group
            spans = [tiles[mine == g] for g in used]
            assert all(int(t.max() - t.min()) < window for t in spans)
            last = [int(t.max()) for t in spans]
            oldest = [int(t.min()) for t in spans]
            # a later group may not need a tile that an earlier one has seen the end of
            assert all(oldest[i] > max(last[: i + 1]) - window for i in range(len(last)))
            assert all(bool((slots[(row_of == row)] == g * group).any()) for g in used)  # the first slot is taken


ORDERS = [(16, 32, 3), (64, 16, 1), (64, 32, 2), (64, 64, 4), (256, 32, 4)]  # tile, group, window


@pytest.mark.parametrize(("tile", "group", "window"), ORDERS)
@pytest.mark.parametrize("density", [0.03, 0.3])
def test_the_engine_takes_the_cheapest_of_its_orders(density: float, tile: int, group: int, window: int) -> None:
    columns, offsets = structure(random_mask(7, 600, density, seed=tile + window))
    where = (columns, offsets, tile, -(-600 // tile), group, window)
    assert ordered_slots(*where).tolist() == expected_slots(*where)


@pytest.mark.parametrize(("density", "size", "most"), [(0.1, 4096, 1.31), (0.3, 4096, 1.12), (0.1, 2304, 1.36)])
def test_few_conflicts_on_a_uniform_pattern(density: float, size: int, most: float) -> None:
    mask = torch.rand(64, size, generator=torch.Generator().manual_seed(0)) < density
    columns, offsets = structure(mask)
    row_of = torch.repeat_interleave(offsets.diff())
    tiles = -(-size // 512)
    before = passes(columns, row_of, sequential_slots(columns, offsets, 512, tiles, 32))
    after = passes(columns, row_of, ordered_slots(columns, offsets, 512, tiles, 32))
    assert before > 2.1
    assert after <= most


def test_a_full_row_has_no_conflict_and_no_padding() -> None:
    columns, offsets = structure(torch.ones(3, 640, dtype=torch.bool))
    slots = ordered_slots(columns, offsets, 64, 10, 32)
    assert passes(columns, torch.repeat_interleave(offsets.diff()), slots) == 1
    assert int(slots.max()) == 639


def test_nothing_to_order() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    for offsets in (torch.zeros(1, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)):
        for arrange in (sequential_slots, ordered_slots):
            assert arrange(none, offsets, 512, 1, 32).numel() == 0
