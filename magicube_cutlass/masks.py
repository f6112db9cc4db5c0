"""Sparse attention masks as patterns of ``V x 1`` vectors: which keys a group of V neighbouring queries shares.

A mask is rounded up to whole vectors: a query also attends the keys that only its neighbours in the vector ask for.
Every maker says which keys that adds.  Queries i and keys j are aligned at the top left, so that ``i = j`` is the
diagonal whether or not there are as many keys as queries.

``causal`` leaves out the vectors whose keys lie after every query of the vector.  A vector on the diagonal stays whole,
and with it up to V - 1 later keys of its first queries: ``sparse_attention(..., causal=True)`` masks those exactly.
Patterns are made on ``device`` by torch operators, in memory linear in their vectors, but for :func:`random` and
:func:`bigbird`, which draw on the CPU and are the same on every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magicube_cutlass.checks import check_shape, check_tensor, check_vector_length, first_true, vector_rows
from magicube_cutlass.formats.generate import _kept, random_pattern
from magicube_cutlass.formats.pattern import Pattern

_CHUNK = 1 << 24  # elements of a block mask that are evaluated at once


def _rows(queries: int, vector_length: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """First and last query of each vector row, int64 (R,)."""
    check_vector_length(vector_length)
    first = torch.arange(vector_rows(queries, vector_length), device=device) * vector_length
    return first, (first + vector_length).clamp(max=queries) - 1


def _shape(queries: int, keys: int | None) -> tuple[int, int]:
    return check_shape((queries, queries if keys is None else keys))


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _runs(begin: Tensor, count: Tensor, step: int, shape: tuple[int, int], vector_length: int) -> Pattern:
    """Vector row r holds the columns ``begin[r] + step * (0 .. count[r] - 1)``."""
    count = count.clamp(min=0)
    offsets = torch.zeros(len(count) + 1, dtype=torch.int64, device=count.device)
    torch.cumsum(count, 0, out=offsets[1:])
    rows = torch.repeat_interleave(count)
    position = torch.arange(len(rows), device=count.device) - offsets[rows]
    return Pattern(shape, vector_length, offsets, (begin[rows] + step * position).to(torch.int32))


def drop_later(mask: Pattern) -> Pattern:
    """``mask`` without the vectors whose key lies after every query of the vector."""
    _, last = _rows(mask.shape[0], mask.vector_length, mask.device)
    kept = mask.col_indices <= last[mask.row_indices]
    if bool(kept.all()):
        return mask
    counts = torch.bincount(mask.row_indices[kept], minlength=mask.vector_rows)
    offsets = torch.zeros_like(mask.row_offsets)
    torch.cumsum(counts, 0, out=offsets[1:])
    return Pattern(mask.shape, mask.vector_length, offsets, mask.col_indices[kept])


def union(*masks: Pattern) -> Pattern:
    """The vectors of any of ``masks``, which have one shape, vector length and device; ``ValueError`` otherwise."""
    if not masks:
        raise ValueError("union needs at least 1 mask, got 0")
    first = masks[0]
    for number, mask in enumerate(masks):
        kinds = [(one.shape, one.vector_length, one.device) for one in (first, mask)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"masks must agree in shape, vector length and device, got {kinds[0]} and, at {number}, "
                             f"{kinds[1]}")  # fmt: skip
    keys = [mask.row_indices * mask.shape[1] + mask.col_indices for mask in masks]
    return Pattern._from_keys(torch.unique(torch.cat(keys)), first.shape, first.vector_length)


def local(
    queries: int,
    window: int,
    *,
    keys: int | None = None,
    vector_length: int = 8,
    causal: bool = False,
    device: torch.device | str = "cpu",
) -> Pattern:
    """``|i - j| <= window``; causal: ``0 <= i - j <= window``.

    Rounding adds up to V - 1 keys on each side: those of the vector's first and last query.
    Raises ``ValueError`` for a negative window.
    """
    shape = _shape(queries, keys)
    _check_count("window", window, 0)
    first, last = _rows(queries, vector_length, device)
    begin = (first - window).clamp(min=0)
    end = (last + (0 if causal else window)).clamp(max=shape[1] - 1) + 1
    return _runs(begin, end - begin, 1, shape, vector_length)


def strided(
    queries: int,
    stride: int,
    *,
    keys: int | None = None,
    vector_length: int = 8,
    causal: bool = False,
    device: torch.device | str = "cpu",
) -> Pattern:
    """``(i0 - j) mod stride = 0`` with i0 the vector's first query, so that a vector's queries share their keys.

    At V = 1 this is the strided pattern of Child et al., arXiv 1904.10509, section 4.2; rounding that one up would make
    V keys of each, and a dense mask of any stride up to V.  Raises ``ValueError`` for a stride below 1.
    """
    shape = _shape(queries, keys)
    _check_count("stride", stride, 1)
    first, last = _rows(queries, vector_length, device)
    begin = first % stride
    end = (last + 1).clamp(max=shape[1]) if causal else torch.full_like(last, shape[1])
    return _runs(begin, (end - begin + stride - 1) // stride, stride, shape, vector_length)


def global_tokens(
    queries: int,
    tokens: int | Tensor,
    *,
    keys: int | None = None,
    vector_length: int = 8,
    causal: bool = False,
    device: torch.device | str = "cpu",
) -> Pattern:
    """Tokens that attend every key and that every query attends: the first ``tokens``, or those at int64 positions.

    Rounding adds all keys for the queries that share a vector with a global one.
    Raises ``ValueError`` for positions that are no query and no key.
    """
    shape = _shape(queries, keys)
    if isinstance(tokens, Tensor):
        check_tensor("tokens", tokens, dtype=torch.int64, ndim=1)
        places = tokens.to(device)
        bad = first_true((places < 0) | (places >= max(shape)))
        if bad is not None:
            raise ValueError(f"tokens[{bad}] must lie in [0, {max(shape)}), got {int(places[bad])}")
    else:
        _check_count("tokens", tokens, 0)
        places = torch.arange(min(tokens, max(shape)), device=device)
    check_vector_length(vector_length)
    rows, columns = vector_rows(queries, vector_length), shape[1]
    every_row, every_key = torch.arange(rows, device=device), torch.arange(columns, device=device)
    full, shared = torch.unique(places[places < queries] // vector_length), torch.unique(places[places < columns])
    found = torch.cat(
        [(full[:, None] * columns + every_key).flatten(), (every_row[:, None] * columns + shared).flatten()]
    )
    mask = Pattern._from_keys(torch.unique(found), shape, vector_length)
    return drop_later(mask) if causal else mask


def random(
    queries: int,
    sparsity: float,
    *,
    keys: int | None = None,
    vector_length: int = 8,
    causal: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Pattern:
    """``round((1 - sparsity) * n)`` of the n vectors, uniformly drawn; causal: of those whose key is not after them.

    Whole vectors are drawn, so rounding adds nothing.  Raises ``ValueError`` for a sparsity outside [0, 1].
    """
    shape = _shape(queries, keys)
    _, last = _rows(queries, vector_length, "cpu")
    if not causal:
        return random_pattern(*shape, sparsity, vector_length, seed=seed).to(device)
    lengths = (last + 1).clamp(max=shape[1])
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    drawn = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[: _kept(sparsity, total)]
    rows = torch.searchsorted(ends, drawn, right=True)
    found = torch.sort(rows * shape[1] + drawn - (ends - lengths)[rows]).values
    return Pattern._from_keys(found, shape, vector_length).to(device)


def bigbird(
    queries: int,
    *,
    window: int,
    tokens: int,
    random_keys: int,
    keys: int | None = None,
    vector_length: int = 8,
    causal: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Pattern:
    """:func:`local`, :func:`global_tokens` and ``random_keys`` uniformly drawn keys a vector row, all together.

    Causal: random keys after the vector are left out, so that early vectors have fewer.
    Source: Zaheer et al., arXiv 2007.14062, section 2, with vectors in place of its blocks.
    """
    shape = _shape(queries, keys)
    _check_count("random_keys", random_keys, 0)
    if random_keys > shape[1]:
        raise ValueError(f"random_keys must be at most the {shape[1]} keys, got {random_keys}")
    drawn = random_pattern(*shape, 1 - random_keys / max(shape[1], 1), vector_length, "fixed", seed).to(device)
    kind: dict[str, Any] = {"keys": shape[1], "vector_length": vector_length, "causal": causal, "device": device}
    mixed = union(local(queries, window, **kind), global_tokens(queries, tokens, **kind), drawn)
    return drop_later(mixed) if causal else mixed


def from_mask(mask: Tensor, *, vector_length: int = 8) -> Pattern | list[Pattern]:
    """A dense mask, bool (queries, keys), true where a query attends; bool (heads, queries, keys) gives a list.

    Rounding adds, for each query, the keys of the other queries of its vector.
    """
    check_tensor("mask", mask, dtype=torch.bool)
    if mask.ndim not in (2, 3):
        raise ValueError(f"mask must have 2 or 3 dimensions, got {mask.ndim} (shape {tuple(mask.shape)})")
    if mask.ndim == 3:
        return [Pattern.from_dense(head, vector_length) for head in mask]
    return Pattern.from_dense(mask, vector_length)


def from_block_mask(mask: Any, *, vector_length: int = 8) -> Pattern | list[Pattern]:
    """FlexAttention's ``BlockMask``; one of several heads gives a list.

    Its partial blocks are evaluated by its ``mask_mod``, whose arguments are tensors to broadcast.  Rounding adds keys
    inside partial blocks, as in :func:`from_mask`.
    Raises ``ValueError`` for a mask that depends on the batch, and for blocks of queries that are no whole vectors.
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
    """(query block, key block) of every listed block, int64 (n, 2)."""
    if counts is None or indices is None:
        return torch.empty(0, 2, dtype=torch.int64)
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
            kept = (i < queries) & (j < keys)  # (blocks, tall, wide)
            if partial:
                kept = kept & mask.mask_mod(zero, number, i.clamp(max=queries - 1), j.clamp(max=keys - 1))
            vectors = kept.view(len(blocks), tall // vector_length, vector_length, wide).any(2)
            block, row, column = vectors.nonzero().unbind(1)
            found.append((blocks[block, 0] * (tall // vector_length) + row) * keys + blocks[block, 1] * wide + column)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    return Pattern._from_keys(torch.unique(torch.cat([empty, *found])), (queries, keys), vector_length)
