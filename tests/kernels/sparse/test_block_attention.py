"""Sparse attention at whole blocks without a GPU: blocks of masks, selection, and the order of keys in registers."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cute_kernels.attention import selection
from cute_kernels.attention.blocks.config import BLOCK, BlockAttention, block_config, find_blocks
from cute_kernels.attention.config import GatherAttention, query_vectors
from cute_kernels.attention.fused import make_index
from magicube_cutlass import Pattern

Arrays = tuple[Tensor, Tensor]


def wide(blocks: Tensor, queries: int, keys: int) -> Tensor:
    """Blocks, bool (rows, tiles), as a mask (queries, keys)."""
    return blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:queries, :keys]


def arrays(mask: Tensor) -> Arrays:
    pattern = Pattern.from_dense(mask, 8)
    return pattern.row_offsets, pattern.col_indices


def drawn(queries: int, keys: int, seed: int, density: float = 0.5) -> Tensor:
    shape = -(-queries // BLOCK), -(-keys // BLOCK)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density


@settings(max_examples=40, deadline=None)
@given(
    queries=st.integers(1, 300), keys=st.integers(1, 300), masks=st.integers(1, 3), causal=st.booleans(),
    seed=st.integers(0, 99), density=st.sampled_from([0.0, 0.4, 1.0]),
)  # fmt: skip
def test_blocks_are_those_of_the_masks(
    queries: int, keys: int, masks: int, causal: bool, seed: int, density: float
) -> None:
    made = [drawn(queries, keys, seed + i, density) for i in range(masks)]
    vectors = query_vectors([arrays(wide(each, queries, keys)) for each in made], False)
    found = find_blocks(vectors, queries, keys, causal)
    assert found is not None
    rows = made[0].shape[0]
    for i, each in enumerate(made):
        for row in range(rows):
            begin, end = found.starts[i * rows + row : i * rows + row + 2].tolist()
            wanted = [tile for tile in each[row].nonzero()[:, 0].tolist() if not causal or tile <= row]
            assert found.tiles[begin:end].tolist() == wanted


@pytest.mark.parametrize(("queries", "keys"), [(128, 128), (200, 140)])
def test_a_missing_or_a_stray_vector_is_seen(queries: int, keys: int) -> None:
    whole = wide(torch.ones(-(-queries // BLOCK), -(-keys // BLOCK), dtype=torch.bool), queries, keys)
    for row, column in ((0, 0), (8, keys - 1), (queries - 1, 5)):
        mask = whole.clone()
        first = row // 8 * 8
        mask[first : first + 8, column] = False
        assert find_blocks(query_vectors([arrays(mask)], False), queries, keys, False) is None
        mask = ~mask
        assert find_blocks(query_vectors([arrays(mask)], False), queries, keys, False) is None


def test_one_key_of_every_vector_row_is_no_block() -> None:
    """As many vectors as a block, of two: their number alone does not tell."""
    mask = torch.zeros(64, 128, dtype=torch.bool)
    mask[:32, :64] = mask[32:, 64:] = True
    assert find_blocks(query_vectors([arrays(mask)], False), 64, 128, False) is None


def selected(mask: Tensor, batch: int, head: int, arch: str = "sm_90a") -> object:
    machine = mock.patch.multiple(selection, current_arch=lambda: arch, device_of=lambda x: nullcontext())
    of_device = mock.patch("torch.cuda.get_device_properties", return_value=mock.Mock(multi_processor_count=132))
    with machine, of_device:
        config = selection.select_attention([arrays(mask)], *mask.shape, batch=batch, head_dim=head)
        index = make_index([arrays(mask)], *mask.shape, batch=batch, head_dim=head)
    assert index.config == config
    return config


def test_the_kernel_is_selected_for_enough_whole_blocks() -> None:
    mask = wide(drawn(512, 512, 1), 512, 512)
    assert selected(mask, 17, 64) == block_config(64) and selected(mask, 17, 128) == block_config(128)
    assert isinstance(selected(mask, 16, 64), GatherAttention)  # 128 blocks of queries for 132 SMs
    assert isinstance(selected(mask, 17, 32), GatherAttention)
    assert not isinstance(selected(mask, 17, 64, "sm_100a"), BlockAttention)
    mask[:8, :64] = ~mask[:8, :64]
    assert not isinstance(selected(mask, 17, 64), BlockAttention)


def test_masks_of_other_blocks_are_refused_by_name() -> None:
    mask = torch.eye(128, dtype=torch.bool)
    with pytest.raises(ValueError, match="patterns must be of whole blocks of 64 x 64"):
        make_index([arrays(mask)], 128, 128, batch=1, head_dim=64, config=block_config(64))


def test_weights_meet_the_keys_of_v_in_registers() -> None:
    """Lane by lane, as the kernel moves bytes: accumulators of S as operand A, and V^T by ldmatrix.trans, give P V."""
    rng = np.random.default_rng(0)
    p, v = rng.integers(0, 256, (16, 32)), rng.integers(-128, 128, (32, 16))  # (queries, keys), (keys, entries)
    # accumulators: eights of keys j, rows g and g + 8, keys 8 j + 2 t and the next; four keys make a word of A
    a = np.zeros((16, 32), int)
    for g in range(8):
        for t in range(4):
            for half in range(2):
                row = g + 8 * half
                for word in range(2):  # m64k32: k = 16 word + 4 t + i
                    keys = [8 * (2 * word + i // 2) + 2 * t + i % 2 for i in range(4)]
                    a[row, 16 * word + 4 * t : 16 * word + 4 * t + 4] = p[row, keys]
    b = np.zeros((16, 32), int)  # V^T: (entries, places)
    for g in range(8):
        for t in range(4):
            # register m of ldmatrix.x4.trans: keys 8 m + 2 t, 8 m + 2 t + 1; entries 2 g, 2 g + 1 of each
            raw = [[v[8 * m + 2 * t + i // 2, 2 * g + i % 2] for i in range(4)] for m in range(4)]
            for j in range(4):
                low, high = raw[j // 2 * 2], raw[j // 2 * 2 + 1]
                word = [(low + high)[i] for i in ((1, 3, 5, 7) if j % 2 else (0, 2, 4, 6))]
                b[2 * g + j % 2, 16 * (j // 2) + 4 * t : 16 * (j // 2) + 4 * t + 4] = word
    assert np.array_equal(a @ b.T, p @ v)
