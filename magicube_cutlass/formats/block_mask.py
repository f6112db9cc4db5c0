"""Conversion of FlexAttention's block masks to patterns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magicube_cutlass.checks import check_vector_length
from magicube_cutlass.formats.pattern import Pattern

__all__ = ["from_block_mask"]

_CHUNK = 1 << 24  # elements of a block mask that are evaluated at once


def from_block_mask(mask: Any, *, vector_length: int = 8) -> Pattern | list[Pattern]:
    """Convert the ``BlockMask`` of FlexAttention; several heads give a list.

    Partial blocks are evaluated by its ``mask_mod`` with tensors that broadcast. Rounding adds keys inside partial
    blocks, as in :func:`from_mask`.

    Parameters
    ----------
    mask : BlockMask
        Of batch size 1.
    vector_length : int, default 8
        V.

    Returns
    -------
    Pattern or list of Pattern

    Raises
    ------
    ValueError
        If the mask depends on the batch, or its blocks of queries are no whole vectors.

    Examples
    --------
    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> import magicube_cutlass as mc
    >>> causal = create_block_mask(lambda b, h, i, j: i >= j, 1, None, 256, 256, device="cpu")
    >>> mc.masks.from_block_mask(causal, vector_length=8).equals(mc.masks.local(256, window=255, causal=True))
    True
    """
    check_vector_length(vector_length)
    if not all(hasattr(mask, name) for name in ("kv_num_blocks", "kv_indices", "mask_mod", "BLOCK_SIZE")):
        raise TypeError(f"mask must be a BlockMask of torch.nn.attention.flex_attention, got {type(mask).__name__}")
    batch, heads = mask.kv_num_blocks.shape[:2]
    if batch != 1:
        raise ValueError(f"mask must be of batch 1, for patterns are shared by the batch, got {batch}")
    if mask.BLOCK_SIZE[0] % vector_length:
        raise ValueError(f"mask must have blocks of whole vectors of {vector_length} queries, got {mask.BLOCK_SIZE[0]}")
    patterns = [_block_mask_head(mask, head, vector_length) for head in range(heads)]
    return patterns if heads > 1 else patterns[0]


def _listed(counts: Tensor | None, indices: Tensor | None, head: int) -> Tensor:
    """(query block, key block) of each listed block, int64 (n, 2)."""
    if counts is None or indices is None:
        return torch.empty(0, 2, dtype=torch.int64, device="cpu")
    counts, indices = counts[0, head].long(), indices[0, head].long()
    rows, slots = (torch.arange(indices.shape[-1], device=counts.device) < counts[:, None]).nonzero().unbind(1)
    return torch.stack((rows, indices[rows, slots]), 1)


def _block_mask_head(mask: Any, head: int, vector_length: int) -> Pattern:
    (tall, wide), (queries, keys) = mask.BLOCK_SIZE, mask.seq_lengths
    device = mask.kv_num_blocks.device
    zero, number = torch.zeros((), dtype=torch.int64, device=device), torch.tensor(head, device=device)
    down, across = torch.arange(tall, device=device)[:, None], torch.arange(wide, device=device)
    found = []
    for counts, indices, partial in (
        (mask.kv_num_blocks, mask.kv_indices, True),
        (mask.full_kv_num_blocks, mask.full_kv_indices, False),
    ):
        for blocks in _listed(counts, indices, head).to(device).split(max(1, _CHUNK // (tall * wide))):
            i, j = blocks[:, 0, None, None] * tall + down, blocks[:, 1, None, None] * wide + across
            inside = (i < queries) & (j < keys)  # (blocks, tall, wide)
            if partial:
                inside = inside & mask.mask_mod(zero, number, i.clamp(max=queries - 1), j.clamp(max=keys - 1))
            vectors = inside.view(len(blocks), tall // vector_length, vector_length, wide).any(2)
            block, row, column = vectors.nonzero().unbind(1)
            found.append((blocks[block, 0] * (tall // vector_length) + row) * keys + blocks[block, 1] * wide + column)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    return Pattern._from_keys(torch.unique(torch.cat([empty, *found])), (queries, keys), vector_length)
