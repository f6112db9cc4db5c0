"""Fused sparse attention on a GPU: scores, online softmax, weights rounded to 8 bits and output in one kernel.

``O = softmax(scale Q K^T + bias) V`` at the vectors of a mask. Q, K and V are int8 with scales. Weights are integers
from 0 to 255 (15 for 4 bits) relative to the running maximum, and the output is divided by their sum. No
(queries, keys) array exists.

References
----------
.. [1] Li, Osawa, Hoefler, SC'22, section V-C. The three kernels of the paper are fused into one.
.. [2] Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
    launch_blocks,
)
from cute_kernels.attention.config import (
    HEADS,
    NO_TILE,
    QUERIES,
    AttentionConfig,
    GatherAttention,
    PanelAttention,
    Steps,
    query_vectors,
)
from cute_kernels.attention.heuristics import PANEL_ARCHES, PANEL_HEAD, TMA_FLOATS
from cute_kernels.attention.operands import (
    ALIGNMENT,
    SOFTMAX_BITS,
    bias_of,
    check_operands,
    check_tensor,
    scales_of,
    softmax_numbers,
)
from cute_kernels.attention.selection import check_patterns, select_blocks, select_for
from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.jit.device import CAPABILITIES, device_of
from cute_kernels.jit.kernel import Kernel, get_kernel
from cute_kernels.jit.tma import tensor_map

__all__ = ["SOFTMAX_BITS", "AttentionIndex", "align_to_16_bytes", "default_configs", "fused_attention", "make_index",
           "supports_attention"]  # fmt: skip

_BOX_ROWS = 256  # limit of a TMA box
_LSE_ROWS = 2  # vector rows per warp whose accumulators and unrounded sums fit the registers


@dataclass(frozen=True)
class AttentionIndex:
    """Masks of a batch in the form that a kernel reads; made by :func:`make_index`.

    Examples
    --------
    >>> mask = torch.tensor([0, 2, 3]), torch.tensor([0, 9, 4], dtype=torch.int32)
    >>> make_index([mask], 16, 10, batch=1, head_dim=64, config=GatherAttention(64)).vector_rows
    2
    """

    config: AttentionConfig | BlockAttention
    queries: int
    keys: int
    batch: int
    masks: int
    steps: Steps | Blocks
    causal: bool = False  # left to the kernel, by BlockAttention only
    tile_ranges: Tensor | None = None  # (masks, row blocks, 2) int32, panel kernel only
    lse_index: AttentionIndex | None = None  # for calls that write the log-sum-exp

    @property
    def vector_rows(self) -> int:
        """Vector rows per mask."""
        return -(-self.queries // QUERIES)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Matrices, queries, keys, and entries per row of Q, K and V."""
        return self.batch, self.queries, self.keys, self.config.head


def supports_attention(device: torch.device, *, head_dim: int, vector_length: int, softmax_bits: int) -> bool:
    """Whether :func:`fused_attention` runs on `device` with these parameters.

    Parameters
    ----------
    device : torch.device
        Device of the operands.
    head_dim : int
        Entries per row of Q, K and V: 32, 64 or 128.
    vector_length : int
        Rows of a vector of the mask: 8.
    softmax_bits : int
        Width of the rounded weights: 4 or 8.

    Examples
    --------
    >>> supports_attention(torch.device("cpu"), head_dim=64, vector_length=8, softmax_bits=8)
    False
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    known = torch.cuda.get_device_capability(device) in CAPABILITIES
    return known and head_dim in HEADS and vector_length == QUERIES and softmax_bits in SOFTMAX_BITS


def make_index(
    patterns: Sequence[tuple[Tensor, Tensor]],
    queries: int,
    keys: int,
    *,
    batch: int,
    head_dim: int,
    causal: bool = False,
    config: AttentionConfig | BlockAttention | None = None,
) -> AttentionIndex:
    """Prepare masks for :func:`fused_attention`.

    Waits for the GPU, so make it once per mask.

    Parameters
    ----------
    patterns : sequence of (Tensor, Tensor)
        ``row_offsets``, int64 (R + 1,), and ``col_indices``, int32 (vectors,), of each mask: 8 x 1 vectors,
        ``R = ceil(queries / 8)``, columns strictly increasing per row. Matrix ``b`` of the batch uses mask
        ``b % len(patterns)``.
    queries, keys : int
        Rows of Q; rows of K and V.
    batch : int
        Matrices, heads included.
    head_dim : int
        Entries per row: 32, 64 or 128.
    causal : bool, default False
        Query ``i`` attends to the keys ``j <= i`` only.
    config : AttentionConfig or BlockAttention, optional
        Kernel config. Default: the one of ``cute_kernels.attention.heuristics.choose``.

    Returns
    -------
    AttentionIndex

    Raises
    ------
    TypeError
        If the dtypes of a pattern are wrong.
    ValueError
        If `patterns`, `head_dim` or `keys` do not fit.

    Examples
    --------
    >>> mask = torch.tensor([0, 2, 3]), torch.tensor([0, 9, 4], dtype=torch.int32)
    >>> index = make_index([mask], 16, 10, batch=1, head_dim=64, config=GatherAttention(64))
    >>> index.vector_rows, index.steps.words.shape
    (2, torch.Size([2, 32]))
    """
    if head_dim not in HEADS:
        raise ValueError(f"head_dim must be one of {HEADS}, got {head_dim}")
    check_patterns(patterns, queries, batch)
    sizes = (queries, keys, batch, len(patterns))
    if isinstance(config, BlockAttention):
        blocks = find_blocks(query_vectors(patterns, False), queries, keys, causal)
        if blocks is None:
            raise ValueError(f"patterns must be of whole blocks of {BLOCK} x {BLOCK} for {config.name}")
        return AttentionIndex(config, *sizes, blocks, causal)
    if config is None:
        blocks = select_blocks(patterns, sizes, head_dim, causal)
        if blocks is not None:
            return AttentionIndex(block_config(head_dim), *sizes, blocks, causal)
    vectors = query_vectors(patterns, causal)
    if config is None:
        config = select_for(vectors, sizes, head_dim)
    steps = config.steps(vectors, keys)
    if not isinstance(config, PanelAttention):
        return AttentionIndex(config, *sizes, steps)
    if keys > NO_TILE * config.tile:
        raise ValueError(f"keys must be at most {NO_TILE * config.tile} for {config.name}, got {keys}")
    fewer = replace(config, rows_per_warp=min(config.rows_per_warp, _LSE_ROWS))
    lse_index = AttentionIndex(fewer, *sizes, steps, tile_ranges=fewer.tile_ranges(vectors))
    return AttentionIndex(config, *sizes, steps, tile_ranges=config.tile_ranges(vectors), lse_index=lse_index)


def _check_flags(
    keys_alike: Tensor | None, ready: Tensor | None, key_scale: bool, batch: int, device: torch.device, copied: bool
) -> Tensor | None:
    """Check the flags of a previous kernel; return `ready`, or None if a copy was launched since that kernel."""
    if keys_alike is not None:
        check_tensor("keys_alike", keys_alike, (batch,), (torch.int32,), device)
        if not key_scale:
            raise ValueError("k_scale must be per key if keys_alike is given, got one per matrix or one for all")
    if ready is not None:
        check_tensor("ready", ready, (batch, ready.shape[-1] if ready.ndim else 1), (torch.int32,), device)
    return None if copied else ready


def align_to_16_bytes(x: Tensor) -> Tensor:
    """Return `x`, or a copy of it if it does not start at a multiple of 16 bytes.

    Examples
    --------
    >>> x = torch.zeros(8)
    >>> align_to_16_bytes(x) is x, align_to_16_bytes(x[1:]).data_ptr() % 16
    (True, 0)
    """
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: AttentionIndex,
    *,
    scale: float,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    keys_alike: Tensor | None = None,
    bias: Tensor | None = None,
    ready: Tensor | None = None,
    softmax_bits: int = 8,
    out: Tensor,
    lse: Tensor | None = None,
    nan_for_empty: bool = False,
) -> None:
    """Run sparse attention on quantized operands in one kernel launch.

    ``out = softmax(scale (q_scale Q) (k_scale K)^T + bias) (v_scale V)`` at the masks of `index`. Nothing waits for the
    GPU. Nothing is allocated, unless `k_scale` or `bias` does not start at a multiple of 16 bytes.

    Parameters
    ----------
    q : Tensor, shape (batch, queries, d)
        int8, contiguous.
    k, v : Tensor, shape (batch, keys, d)
        int8, contiguous.
    index : AttentionIndex
        Masks, from :func:`make_index`.
    scale : float
        Positive scale of the logits.
    q_scale, k_scale, v_scale : Tensor
        Positive float32 scales: per tensor (), per matrix (batch,), or per query (batch, queries), per key (batch,
        keys) and per column of V (batch, d).
    keys_alike : Tensor, shape (batch,), optional
        int32, nonzero if all keys of a matrix have the scale of its first key, which is faster. Needs a `k_scale` per
        key.
    bias : Tensor, shape (keys,) or (batch, keys), optional
        float32, added to the logits; -inf excludes a key.
    ready : Tensor, shape (batch, parts), optional
        int32 flags that the previous kernel on the stream, ``attention_operands``, sets to 1 when it has written the
        parts of a matrix. With them this kernel starts beside that one (PDL) and waits per matrix. Nothing may be
        launched between the two.
    softmax_bits : int, default 8
        Width of the rounded weights, 4 or 8.
    out : Tensor, shape (batch, queries, d)
        float16, bfloat16 or float32, contiguous; written in place.
    lse : Tensor, shape (batch, queries), optional
        float32; gets the log-sum-exp of the logits, -inf for a query without keys.
    nan_for_empty : bool, default False
        Queries without keys give NaN instead of zeros.

    Raises
    ------
    TypeError
        If a dtype is not supported.
    ValueError
        If a shape, device, memory layout or option is wrong.

    Examples
    --------
    >>> index = make_index([mask], 1024, 1024, batch=8, head_dim=64)  # doctest: +SKIP
    >>> scales = {"scale": 0.125, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}  # doctest: +SKIP
    >>> fused_attention(q, k, v, index, out=out, **scales)  # doctest: +SKIP
    """
    check_operands((q, k, v), index.shape, index.steps[0].device, out, lse, torch.int8)
    numbers = softmax_numbers(scale, softmax_bits, nan_for_empty)
    batch, head = index.batch, index.config.head
    originals = k_scale, bias
    k_scale, bias = align_to_16_bytes(k_scale), None if bias is None else align_to_16_bytes(bias)
    q_at = scales_of("q_scale", q_scale, batch, index.queries, q)
    k_at = scales_of("k_scale", k_scale, batch, index.keys, q)
    v_at = scales_of("v_scale", v_scale, batch, head, q)
    bias_at = bias_of(bias, batch, index.keys, q)
    copied = k_scale is not originals[0] or bias is not originals[1]
    ready = _check_flags(keys_alike, ready, k_at.stride == 1, batch, q.device, copied)
    if index.lse_index is not None and lse is not None:
        index = index.lse_index
    config = replace(
        index.config, out=REAL_DTYPES[out.dtype], key_scale=k_at.stride == 1, bias=bias is not None, lse=lse is not None
    )
    if config.keyed and index.tile_ranges is not None and index.keys % TMA_FLOATS:
        raise ValueError(f"keys must be a multiple of {TMA_FLOATS} for {config.name}, got {index.keys}")
    if not out.numel():
        return
    sums, alike, words = (0 if x is None else x.data_ptr() for x in (lse, keys_alike, ready))
    operands = (
        out.data_ptr(), sums, *q_at, k_at.pointer, k_at.batch, alike, *v_at, bias_at.pointer, bias_at.batch
    )  # fmt: skip
    flags = words, 0 if ready is None else ready.shape[1]
    with device_of(q):
        if isinstance(config, BlockAttention):
            assert isinstance(index.steps, Blocks)
            launch_blocks(config, index.steps, q, k, v, (*operands, 0, 0, *numbers), index.masks, index.causal)
            return
        shared = (q.data_ptr(), *operands, *flags, *numbers, index.queries, index.keys, index.vector_rows)
        _launch(get_kernel(config), config, index, k, v, shared)


def _launch(
    kernel: Kernel, config: AttentionConfig, index: AttentionIndex, k: Tensor, v: Tensor, shared: tuple[object, ...]
) -> None:
    """Launch `kernel` with the arguments that both kernels share."""
    steps = tuple(tensor.data_ptr() for tensor in index.steps)
    if index.tile_ranges is None or not isinstance(config, PanelAttention):
        blocks = -(-index.vector_rows // config.warps)
        arguments = (k.data_ptr(), v.data_ptr(), *steps, *shared, blocks, index.masks)
        kernel.launch((blocks * index.batch, 1, 1), arguments, pdl=True)
        return
    blocks = index.tile_ranges.shape[1]
    box = (config.head, min(config.tile // config.cluster, _BOX_ROWS))
    maps = [
        tensor_map(x.data_ptr(), 1, (config.head, index.batch * index.keys), config.head, box, config.head)
        for x in (k, v)
    ]
    clusters = min(kernel.num_sms // config.cluster, blocks * index.batch)
    kernel.launch(
        (clusters * config.cluster, 1, 1),
        (*maps, index.tile_ranges.data_ptr(), *steps[:2], *shared, blocks, index.batch, index.masks),
        (config.cluster, 1, 1) if config.cluster > 1 else None,
        pdl=True,
    )  # fmt: skip


def default_configs(arch: str = "sm_90a") -> Iterator[AttentionConfig | BlockAttention]:
    """Yield the configs for float16 output and scales per key, which ``quantize_qkv`` writes.

    Examples
    --------
    >>> [config.name for config in default_configs("sm_80")][0]
    'attention_gather-d32-float16-ks-g1s2w4'
    """
    yield from (GatherAttention(head, key_scale=True) for head in HEADS)
    if arch in PANEL_ARCHES:
        yield PanelAttention(PANEL_HEAD, key_scale=True)
    if arch == BLOCK_ARCH:
        yield from (replace(block_config(head), key_scale=True, source="float16") for head in BLOCK_HEADS)
