"""Sparse attention masks as patterns of V x 1 vectors: the keys that V consecutive queries share.

A mask is rounded up to whole vectors: a query also attends the keys that only other queries of its vector need. Each
function says which keys that adds. Query i and key j are aligned at the top left: ``i = j`` is the diagonal for any
number of keys.

`causal` drops the vectors whose key is after each query of the vector. A vector on the diagonal stays whole, and with
it up to V - 1 later keys of its first queries; ``sparse_attention(..., causal=True)`` masks these exactly. Patterns are
made on `device` in memory linear in their vectors; :func:`random` and :func:`bigbird` draw on the CPU, so that they are
equal on all devices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magicube_cutlass.checks import check_shape, check_tensor, check_vector_length, first_true, vector_rows
from magicube_cutlass.formats.block_mask import from_block_mask
from magicube_cutlass.formats.generate import _num_stored, random_pattern
from magicube_cutlass.formats.pattern import Pattern

__all__ = [
    "bigbird",
    "drop_later",
    "from_block_mask",
    "from_mask",
    "global_tokens",
    "local",
    "random",
    "strided",
    "union",
]


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
    return Pattern(shape, vector_length, offsets, (begin[rows] + step * position).to(torch.int32))._trust()


def drop_later(mask: Pattern) -> Pattern:
    """Return the mask without the vectors whose key is after each query of the vector.

    Examples
    --------
    >>> from magicube_cutlass import masks
    >>> masks.drop_later(masks.local(64, 8)).equals(masks.local(64, 8, causal=True))
    True
    """
    _, last = _rows(mask.shape[0], mask.vector_length, mask.device)
    selected = mask.col_indices <= last[mask.row_indices]
    if bool(selected.all()):
        return mask
    counts = torch.bincount(mask.row_indices[selected], minlength=mask.vector_rows)
    offsets = torch.zeros_like(mask.row_offsets)
    torch.cumsum(counts, 0, out=offsets[1:])
    return Pattern(mask.shape, mask.vector_length, offsets, mask.col_indices[selected])._trust()


def union(*masks: Pattern) -> Pattern:
    """Return the vectors of any of the masks.

    Raises
    ------
    ValueError
        If the masks differ in shape, vector length or device.

    Examples
    --------
    >>> from magicube_cutlass import masks
    >>> masks.union(masks.local(64, 0), masks.global_tokens(64, 1)).vectors
    127
    """
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
    """Sliding window: ``|i - j| <= window``; causal: ``0 <= i - j <= window``.

    Rounding adds up to V - 1 keys on each side.

    Parameters
    ----------
    queries : int
        Rows of the mask.
    window : int
        Distance in keys.
    keys : int, optional
        Columns of the mask. Default: `queries`.
    vector_length : int, default 8
        V.
    causal : bool, default False
        Drop the vectors whose key is after each query of the vector.
    device : torch.device or str, default "cpu"
        Device of the pattern.

    Returns
    -------
    Pattern, shape (queries, keys)

    Raises
    ------
    ValueError
        For a negative window.

    Examples
    --------
    >>> from magicube_cutlass import masks
    >>> masks.local(64, 8).row_lengths.tolist()
    [16, 24, 24, 24, 24, 24, 24, 16]
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
    """Strided mask: ``(i0 - j) mod stride = 0`` with i0 the first query of the vector, so a vector shares its keys.

    At V = 1 this is the strided pattern of Child et al., arXiv 1904.10509, section 4.2.

    Parameters
    ----------
    queries : int
        Rows of the mask.
    stride : int
        Distance between keys.
    keys, vector_length, causal, device
        As for :func:`local`.

    Returns
    -------
    Pattern, shape (queries, keys)

    Raises
    ------
    ValueError
        For a stride below 1.

    Examples
    --------
    >>> from magicube_cutlass import masks
    >>> masks.strided(64, 16).row_lengths.tolist()
    [4, 4, 4, 4, 4, 4, 4, 4]
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
    """Global tokens: they attend every key, and every query attends them.

    Rounding adds all keys for queries that share a vector with a global token.

    Parameters
    ----------
    queries : int
        Rows of the mask.
    tokens : int or Tensor
        The first `tokens`, or int64 positions.
    keys, vector_length, causal, device
        As for :func:`local`.

    Returns
    -------
    Pattern, shape (queries, keys)

    Raises
    ------
    ValueError
        For positions that are no query and no key.

    Examples
    --------
    >>> from magicube_cutlass import masks
    >>> masks.global_tokens(64, 2).row_lengths.tolist()
    [64, 2, 2, 2, 2, 2, 2, 2]
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
    whole_rows, whole_columns = full[:, None] * columns + every_key, every_row[:, None] * columns + shared
    found = torch.cat([whole_rows.flatten(), whole_columns.flatten()])
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
    """Random mask: ``round((1 - sparsity) * n)`` of n vectors; causal: of those whose key is not after them.

    Whole vectors are drawn, so rounding adds nothing.

    Parameters
    ----------
    queries : int
        Rows of the mask.
    sparsity : float
        Share of vectors that are not stored, in [0, 1].
    keys, vector_length, causal, device
        As for :func:`local`.
    seed : int, default 0
        Seed of the random keys.

    Returns
    -------
    Pattern, shape (queries, keys)

    Raises
    ------
    ValueError
        For a sparsity outside [0, 1].

    Examples
    --------
    >>> from magicube_cutlass import masks
    >>> masks.random(64, 0.9).vectors
    51
    """
    shape = _shape(queries, keys)
    _, last = _rows(queries, vector_length, "cpu")
    if not causal:
        return random_pattern(*shape, sparsity, vector_length, seed=seed).to(device)
    lengths = (last + 1).clamp(max=shape[1])
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    drawn = torch.randperm(total, generator=torch.Generator().manual_seed(seed), device="cpu")[
        : _num_stored(sparsity, total)
    ]
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
    """BigBird mask: :func:`local`, :func:`global_tokens` and random keys per vector row.

    Causal: random keys after the vector are dropped, so early vectors have fewer.
    Source: Zaheer et al., arXiv 2007.14062, section 2, with vectors in place of blocks.

    Parameters
    ----------
    queries : int
        Rows of the mask.
    window, tokens : int
        As for :func:`local` and :func:`global_tokens`.
    random_keys : int
        Random keys per vector row.
    keys, vector_length, causal, device
        As for :func:`local`.
    seed : int, default 0
        Seed of the random keys.

    Returns
    -------
    Pattern, shape (queries, keys)

    Examples
    --------
    >>> from magicube_cutlass import masks
    >>> masks.bigbird(64, window=8, tokens=0, random_keys=0).equals(masks.local(64, 8))
    True
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
    """Convert a dense mask.

    Rounding adds for each query the keys of the other queries of its vector.

    Parameters
    ----------
    mask : Tensor, shape (queries, keys) or (heads, queries, keys)
        bool, true if the query attends the key.
    vector_length : int, default 8
        V.

    Returns
    -------
    Pattern or list of Pattern

    Examples
    --------
    >>> import torch
    >>> from magicube_cutlass import masks
    >>> masks.from_mask(torch.eye(16, dtype=torch.bool)).row_lengths.tolist()
    [8, 8]
    """
    check_tensor("mask", mask, dtype=torch.bool)
    if mask.ndim not in (2, 3):
        raise ValueError(f"mask must have 2 or 3 dimensions, got {mask.ndim} (shape {tuple(mask.shape)})")
    if mask.ndim == 3:
        return [Pattern.from_dense(head, vector_length) for head in mask]
    return Pattern.from_dense(mask, vector_length)
