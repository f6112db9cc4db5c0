"""Sparse attention's kernels without a GPU: their inputs from masks, kernel selection, lanes, bank conflicts, errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pycute")

from cute_kernels.atoms import atom
from cute_kernels.attention import fused as attention
from cute_kernels.attention.config import (
    ATOM,
    GROUP,
    NO_TILE,
    QUERIES,
    TILE_BIT,
    VISIBLE_BIT,
    AttentionConfig,
    GatherAttention,
    PanelAttention,
)
from cute_kernels.attention.fused import AttentionIndex, make_index
from cute_kernels.attention.heuristics import AttentionProblem, choose
from cute_kernels.layout.bank_conflicts import ldmatrix_wavefronts, report
from magicube_cutlass import Pattern, random_pattern
from tests.helpers import random_mask

SMALL: list[AttentionConfig] = [
    GatherAttention(64),
    GatherAttention(128, groups=2),
    PanelAttention(64, warps=2, rows_per_warp=2, tile=32, stages=5, tile_window=4),
    PanelAttention(32, warps=3, rows_per_warp=1, tile=64, stages=3, tile_window=2, groups=1),
    PanelAttention(128, warps=1, rows_per_warp=3, tile=16, stages=4, tile_window=3, cluster=2),
]


def index_of(config: AttentionConfig, masks: list[torch.Tensor], queries: int, causal: bool = False) -> AttentionIndex:
    patterns = [Pattern.from_vector_mask(mask, queries, QUERIES) for mask in masks]
    arrays = [(pattern.row_offsets, pattern.col_indices) for pattern in patterns]
    options: dict[str, Any] = {"batch": 2 * len(masks), "head_dim": config.head, "causal": causal, "config": config}
    return make_index(arrays, queries, masks[0].shape[1], **options)


def walked(config: PanelAttention, index: AttentionIndex, row: int, keys: int) -> list[tuple[int, int]]:
    """Keys that the panel kernel reads for a vector row, and the queries that see them, by walking the tiles as it does.

    The ring is modelled: every place holds the key whose row was fetched there last.
    """
    assert index.tile_ranges is not None
    rows_of_mask = index.vector_rows
    block = row % rows_of_mask // config.block_rows
    first, end = index.tile_ranges[row // rows_of_mask, block].tolist()
    words, step, found = index.steps.words.long() & 0xFFFFFFFF, int(index.steps.start[row]), []
    ring: dict[int, int] = {}
    for tile in range(first, end):
        arrived = range(tile * config.tile, min((tile + 1) * config.tile, keys))
        ring |= {int(config.smem_rows(torch.tensor([key]))[0]): key for key in arrived}
        gone = tile - config.tile_window
        if gone >= first:  # others may have been fetched there
            stale = range(gone * config.tile, (gone + 1) * config.tile)
            ring = {place: key for place, key in ring.items() if key not in stale}
        while int(words[step, 0]) >> TILE_BIT & 0xFF == tile:
            for word in words[step].tolist():
                place = word & 0xFFFF
                key = ring[place]  # a key error: the row was not there
                assert place * 16 // (config.tile * config.head) % 2 == 0  # every other tile is V's
                if word >> VISIBLE_BIT:
                    found.append((key, word >> VISIBLE_BIT))
            step += 1
    assert int(words[step, 0]) >> TILE_BIT & 0xFF == NO_TILE
    return sorted(found)


@settings(max_examples=150)
@given(
    config=st.sampled_from(SMALL), rows=st.integers(1, 9), keys=st.integers(1, 300), causal=st.booleans(),
    density=st.sampled_from([0.0, 0.02, 0.3, 1.0]), masks=st.integers(1, 2), seed=st.integers(0, 99),
)  # fmt: skip
def test_each_vector_is_read_once_for_the_queries_that_see_it(
    config: AttentionConfig, rows: int, keys: int, causal: bool, density: float, masks: int, seed: int
) -> None:
    drawn = [random_mask(rows, keys, density, seed + i) for i in range(masks)]
    index = index_of(config, drawn, rows * QUERIES - 3, causal)
    for number in range(masks * rows):
        row = number % rows
        expected = []
        for key in drawn[number // rows][row].nonzero()[:, 0].tolist():
            seen = sum(1 << i for i in range(QUERIES) if not causal or key <= row * QUERIES + i)
            expected += [(key, seen)] if seen else []
        if isinstance(config, PanelAttention):
            assert walked(config, index, number, keys) == expected
        else:
            begin, end = index.steps.start[number : number + 2].tolist()
            words = index.steps.words[begin:end].reshape(-1).long() & 0xFFFFFFFF
            keys_of = index.steps.keys[begin:end].reshape(-1)
            found = [
                (int(k), int(w) >> VISIBLE_BIT) for k, w in zip(keys_of, words, strict=True) if int(w) >> VISIBLE_BIT
            ]
            assert found == expected
            assert end - begin == -(-len(expected) // config.step)


def test_a_step_waits_for_those_before_it() -> None:
    """The first steps take keys of tile 2 so that banks differ; what is left are keys of tile 1."""
    config = PanelAttention(64, warps=1, rows_per_warp=1, groups=1, tile=64, tile_window=3, stages=5)
    mask = torch.zeros(1, 192, dtype=torch.bool)
    mask[0, :128:8] = True
    mask[0, 128:] = torch.arange(64) % 8 != 0
    index = index_of(config, [mask], QUERIES)
    last = index.steps.words[:, 0] >> TILE_BIT & 0xFF
    assert last.tolist() == [2, 2, 2, NO_TILE, NO_TILE]
    assert walked(config, index, 0, 192) == [(key, 255) for key in mask[0].nonzero()[:, 0].tolist()]


def test_steps_of_uniform_masks_are_nearly_full_with_few_bank_conflicts() -> None:
    pattern = random_pattern(512, 4096, 0.9, QUERIES, seed=1)
    config = PanelAttention(64)
    mask = pattern.to_dense()[::QUERIES]
    steps = index_of(config, [mask], 512).steps
    count = steps.words.shape[0] - (pattern.vector_rows + 1)
    assert count * config.step <= 1.1 * pattern.vectors
    words = steps.words.numpy().astype(np.int64)
    used = words[(words >> TILE_BIT & 0xFF) != NO_TILE].reshape(-1, GROUP)
    places = (used & 0xFFFF) * 16
    passes = np.mean([ldmatrix_wavefronts(rows, 4) for rows in places])
    assert passes <= 4 * 1.4  # 2.2 times as many in the order of the columns


@pytest.mark.parametrize("head", attention.HEADS)
def test_the_gather_kernel_has_no_bank_conflicts(head: int) -> None:
    assert all(conflicts.conflicts == 0 for conflicts in report(GatherAttention(head, groups=2).smem_accesses()))


def test_lanes_pass_weights_and_columns_of_v_with_keys_in_the_same_order() -> None:
    """The kernel's moves between registers, lane by lane, give V^T P."""
    entry, rng = atom(ATOM), np.random.default_rng(0)
    p, v = rng.integers(0, 256, (GROUP, QUERIES)), rng.integers(-128, 128, (GROUP, 16))  # 16 bytes of V's rows
    lanes = [(lane // 4, lane % 4) for lane in range(32)]
    pick = {0x6240: (0, 4, 2, 6), 0x7351: (1, 5, 3, 7)}

    def picked(a: list[int], b: list[int], selector: int) -> list[int]:
        return [(a + b)[i] for i in pick[selector]]

    operand_a, operand_b = np.zeros((16, GROUP), int), np.zeros((QUERIES, GROUP), int)
    for lane, (g, t) in enumerate(lanes):
        weights = []
        for block in (0, 1):  # a row of units of keys g and g + 8, one per query, transposed: lane g is now a query
            units = [[p[16 * block + row, g], p[16 * block + 8 + row, g]] for row in (2 * t, 2 * t + 1)]
            weights.append([*units[0], *units[1]])
        raw = [[v[8 * i + 2 * t + k, 2 * g + c] for k in (0, 1) for c in (0, 1)] for i in range(4)]  # ldmatrix.trans
        columns = [[picked(raw[2 * d], raw[2 * d + 1], s) for d in (0, 1)] for s in (0x6240, 0x7351)]
        for register in range(4):  # (rows g and g + 8) x (depth)
            for i in range(4):
                place = entry.a_layout(lane, 4 * register + i)
                operand_a[place % 16, place // 16] = columns[register % 2][register // 2][i]
        for register in (0, 1):
            for i in range(4):
                place = entry.b_layout(lane, 4 * register + i)
                operand_b[place % 8, place // 8] = weights[register][i]
    product = operand_a @ operand_b.T  # (16, queries): rows g are columns 2g of V, rows g + 8 columns 2g + 1
    assert np.array_equal(product.reshape(2, 8, QUERIES).transpose(1, 0, 2).reshape(16, QUERIES), v.T @ p)


def test_the_weights_of_two_keys_leave_their_lane_in_the_order_that_is_transposed() -> None:
    """Sums c0..c3 are keys g, g, g + 8, g + 8 for queries 2t, 2t + 1, 2t, 2t + 1."""
    entry = atom(ATOM)
    for lane in range(32):
        places = [entry.c_layout(lane, i) for i in range(4)]
        assert [(x % 16, x // 16) for x in places] == [
            (lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2) for i in range(4)
        ]


def problem(length: int, density: float, batch: int = 32) -> AttentionProblem:
    return AttentionProblem(batch, length // QUERIES, length, int(length * density) * length // QUERIES, length)


def test_choice_follows_the_measured_times() -> None:
    for length, density, panel in ((4096, 0.1, True), (8192, 0.1, True), (4096, 0.05, False), (8192, 0.05, False)):
        assert isinstance(choose(64, "sm_90a", 132, problem(length, density)), PanelAttention) == panel
    assert isinstance(choose(64, "sm_80", 108, problem(4096, 0.1)), GatherAttention)
    assert isinstance(choose(128, "sm_90a", 132, problem(4096, 0.1)), GatherAttention)
    assert isinstance(choose(64, "sm_90a", 132, problem(4096, 0.1, 1)), GatherAttention)  # few blocks
    assert isinstance(choose(64, "sm_90a", 132, problem(4096, 0.1)._replace(keys=4095)), GatherAttention)
    assert isinstance(choose(64, "sm_90a", 132, problem(256 * 256, 0.1)), GatherAttention)  # tiles have eight bits
    assert isinstance(choose(64, "sm_90a", 132, problem(4096, 0.0)), GatherAttention)


OFFSETS, COLUMNS = torch.tensor([0, 1, 2]), torch.tensor([0, 1], dtype=torch.int32)
ONE = GatherAttention(64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make_index([], 16, 8, batch=2, head_dim=64, config=ONE), ValueError, "batch of 2, got 0"),
        (lambda: make_index([(OFFSETS, COLUMNS)] * 2, 16, 8, batch=3, head_dim=64, config=ONE), ValueError, "batch of 3, got 2"),
        (lambda: make_index([(OFFSETS, COLUMNS)], 17, 8, batch=1, head_dim=64, config=ONE), ValueError, "4 offsets for 17 queries, got (3,)"),
        (lambda: make_index([(OFFSETS, COLUMNS.long())], 16, 8, batch=1, head_dim=64, config=ONE), TypeError, "int32 columns, got torch.int64 and torch.int64"),
        (lambda: make_index([(OFFSETS, COLUMNS)], 16, 8, batch=1, head_dim=48, config=ONE), ValueError, "(32, 64, 128), got 48"),
        (lambda: make_index([(OFFSETS, COLUMNS)], 16, 70_000, batch=1, head_dim=64, config=PanelAttention(64)), ValueError, "at most 65280"),
    ],
)  # fmt: skip
def test_wrong_masks_raise(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def operands(**changes: Any) -> dict[str, Any]:
    index = make_index([(OFFSETS, COLUMNS)], 16, 8, batch=2, head_dim=64, config=ONE)
    ones = torch.ones(())
    found = {
        "q": torch.zeros(2, 16, 64, dtype=torch.int8), "k": torch.zeros(2, 8, 64, dtype=torch.int8),
        "v": torch.zeros(2, 8, 64, dtype=torch.int8), "index": index, "scale": 0.1, "q_scale": ones, "k_scale": ones,
        "v_scale": ones, "out": torch.zeros(2, 16, 64, dtype=torch.float16),
    }  # fmt: skip
    return found | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.zeros(2, 16, 64)}, TypeError, "q must be torch.int8"),
        ({"k": torch.zeros(2, 9, 64, dtype=torch.int8)}, ValueError, "k must have shape (2, 8, 64), got (2, 9, 64)"),
        ({"v": torch.zeros(2, 64, 8, dtype=torch.int8).mT}, ValueError, "v must be contiguous"),
        ({"out": torch.zeros(2, 16, 64, dtype=torch.float64)}, TypeError, "out must be torch.float32 or torch.float16 or torch.bfloat16"),
        ({"lse": torch.zeros(2, 8)}, ValueError, "lse must have shape (2, 16), got (2, 8)"),
        ({"softmax_bits": 16}, ValueError, "softmax_bits must be one of (4, 8), got 16"),
        ({"scale": 0.0}, ValueError, "scale must be above 0, got 0.0"),
        ({"q_scale": torch.ones(2, 8)}, ValueError, "q_scale must be contiguous of shape (), (2,) or (2, 16), got (2, 8)"),
        ({"k_scale": torch.ones((), dtype=torch.float64)}, TypeError, "k_scale must be float32"),
        ({"keys_alike": torch.zeros(3, dtype=torch.int32)}, ValueError, "keys_alike must have shape (2,), got (3,)"),
        ({"keys_alike": torch.zeros(2, dtype=torch.int32)}, ValueError, "k_scale must be per key if keys_alike is given, got one per matrix"),
        ({"ready": torch.ones(2, 24)}, TypeError, "ready must be torch.int32"),
        ({"ready": torch.ones(3, 24, dtype=torch.int32)}, ValueError, "ready must have shape (2, 24), got (3, 24)"),
        ({"bias": torch.ones(16)}, ValueError, "bias must be contiguous of shape (8,) or (2, 8), got (16,)"),
    ],
)  # fmt: skip
def test_wrong_operands_raise(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        attention.fused_attention(**operands(**changes))


def test_names_are_unique_and_no_cpu_is_supported() -> None:
    configs = [*attention.default_configs(), *attention.default_configs("sm_80")]
    assert len({config.name for config in configs}) == len(set(configs)) == 6
    assert not attention.supports_attention(torch.device("cpu"), head_dim=64, vector_length=8, softmax_bits=8)
