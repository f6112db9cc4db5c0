"""Selection of the fused attention kernel for masks on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.attention.blocks.config import (
    BLOCK,
    BLOCK_ARCH,
    BLOCK_HEADS,
    BlockAttention,
    Blocks,
    block_config,
    find_blocks,
)
from cute_kernels.attention.config import QUERIES, AttentionConfig, PanelAttention, QueryVectors, query_vectors
from cute_kernels.attention.heuristics import MAX_COORDINATE, PANEL_HEAD, AttentionProblem, choose
from cute_kernels.jit.device import current_arch, device_of

__all__ = ["check_patterns", "select_attention", "select_blocks", "select_for"]


def check_patterns(patterns: Sequence[tuple[Tensor, Tensor]], queries: int, batch: int) -> None:
    """Raise unless `patterns` are masks of so many queries that divide the batch.

    Examples
    --------
    >>> check_patterns([(torch.tensor([0, 1]), torch.tensor([0], dtype=torch.int32))], 8, 2)
    """
    if not patterns or batch % len(patterns):
        raise ValueError(f"patterns must divide the batch of {batch}, got {len(patterns)}")
    rows = -(-queries // QUERIES)
    for offsets, columns in patterns:
        if offsets.dtype != torch.int64 or columns.dtype != torch.int32:
            found = f"{offsets.dtype} and {columns.dtype}"
            raise TypeError(f"patterns must be of int64 offsets and int32 columns, got {found}")
        if offsets.shape != (rows + 1,):
            raise ValueError(f"patterns must have {rows + 1} offsets for {queries} queries, got {tuple(offsets.shape)}")


def select_for(vectors: QueryVectors, sizes: tuple[int, int, int, int], head_dim: int) -> AttentionConfig:
    """Return the config for vectors of masks; `sizes`: queries, keys, batch and masks.

    Examples
    --------
    >>> select_for(vectors, (1024, 1024, 8, 1), 64).name  # doctest: +SKIP
    'attention_gather-d64-float16-g1s2w4'
    """
    device = vectors.columns.device
    with device_of(vectors.columns):
        arch, processors = current_arch(), torch.cuda.get_device_properties(device).multi_processor_count
    return choose(head_dim, arch, processors, _problem(vectors, sizes))


def select_blocks(
    patterns: Sequence[tuple[Tensor, Tensor]], sizes: tuple[int, int, int, int], head_dim: int, causal: bool
) -> Blocks | None:
    """Return the blocks of masks that the kernel of whole blocks takes, None if another one does; waits for the GPU.

    It takes them where there is a block of 64 queries for each SM; below, the gather kernel has more to do at once: 3.4
    against 4.0 us at 2 x 512 queries on an H100, 13.3 against 7.1 at 16 x 1,024.

    Parameters
    ----------
    patterns : sequence of (Tensor, Tensor)
        As for :func:`~cute_kernels.attention.fused.make_index`.
    sizes : tuple of int
        Queries, keys, batch and masks.
    head_dim : int
        Entries per row.
    causal : bool
        Query ``i`` attends to the keys ``j <= i`` only.

    Examples
    --------
    >>> select_blocks([mask], (4096, 4096, 32, 1), 64, False)  # doctest: +SKIP
    """
    queries, keys, batch, _ = sizes
    if head_dim not in BLOCK_HEADS or batch * max(queries, keys) > MAX_COORDINATE:
        return None
    device = patterns[0][1].device
    with device_of(patterns[0][1]):
        few = batch * -(-queries // BLOCK) < torch.cuda.get_device_properties(device).multi_processor_count
        if current_arch() != BLOCK_ARCH or few:
            return None
    return find_blocks(query_vectors(patterns, False), queries, keys, causal)


def select_attention(
    patterns: Sequence[tuple[Tensor, Tensor]],
    queries: int,
    keys: int,
    *,
    batch: int,
    head_dim: int,
    causal: bool = False,
) -> AttentionConfig | BlockAttention:
    """Return the kernel config that :func:`make_index` selects for masks on a GPU; waits for it.

    The kernels add in different orders. A call with some of the queries gives the bits of the whole one by its config.

    Examples
    --------
    >>> select_attention([mask], 1024, 1024, batch=8, head_dim=64).name  # doctest: +SKIP
    'attention_gather-d64-float16-g1s2w4'
    """
    check_patterns(patterns, queries, batch)
    sizes = (queries, keys, batch, len(patterns))
    if select_blocks(patterns, sizes, head_dim, causal) is not None:
        return block_config(head_dim)
    return select_for(query_vectors(patterns, causal), sizes, head_dim)


def _problem(vectors: QueryVectors, sizes: tuple[int, int, int, int]) -> AttentionProblem:
    """Sizes of a call for kernel selection; `sizes` are queries, keys, batch and masks."""
    _, keys, batch, masks = sizes
    panel = PanelAttention(PANEL_HEAD)
    ranges = panel.tile_ranges(vectors)  # (masks, row blocks, 2)
    reach = panel.tile * float(ranges.diff(dim=2).double().mean()) if ranges.numel() else 0.0
    return AttentionProblem(batch, vectors.rows, keys, vectors.columns.numel() // masks, min(reach, keys))
