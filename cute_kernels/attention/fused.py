"""Sparse attention on a GPU in one kernel: scores, running softmax, weights rounded to 8 bits, output.

``O = softmax(scale Q K^T + bias) V``, where a query sees the keys of its vector row in the mask alone.  Q, K and V are
int8 with scales; weights are integers from 0 to 255 (15) relative to the largest score so far, and the output is
divided by their sum.  No (queries, keys) array exists.
Source: Li, Osawa, Hoefler, SC'22, section V-C, with the three kernels made one; running softmax: Milakov, Gimelshein,
"Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.attention.config import (
    HEADS,
    NO_TILE,
    QUERIES,
    AttentionConfig,
    GatherAttention,
    PanelAttention,
    Steps,
    Vectors,
    vectors_of,
)
from cute_kernels.attention.heuristics import PANEL_ARCHES, PANEL_HEAD, TMA_FLOATS, Problem, choose
from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.jit.device import CAPABILITIES, current_arch, device_of
from cute_kernels.jit.kernel import Kernel, get_kernel
from cute_kernels.jit.tma import tensor_map

SOFTMAX_BITS = (4, 8)
_BOX_ROWS = 256  # the copy engine's limit
_ALIGNMENT = 16
_LSE_ROWS = 2  # vector rows of a warp that the exact sums leave registers for


@dataclass(frozen=True)
class AttentionIndex:
    """Masks made ready for a kernel: what :func:`make_index` returns."""

    config: AttentionConfig
    queries: int
    keys: int
    batch: int
    masks: int
    steps: Steps
    ranges: Tensor | None = None  # int32 (masks, row blocks, 2), of the panel kernel
    summing: AttentionIndex | None = None  # where sums of exponentials are wanted

    @property
    def vector_rows(self) -> int:
        return -(-self.queries // QUERIES)


def supports(device: torch.device, *, head_dim: int, vector_length: int, softmax_bits: int) -> bool:
    """Whether :func:`attend` runs there with rows of ``head_dim`` entries, masks of ``vector_length`` x 1 vectors and
    weights of ``softmax_bits``."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    known = torch.cuda.get_device_capability(device) in CAPABILITIES
    return known and head_dim in HEADS and vector_length == QUERIES and softmax_bits in SOFTMAX_BITS


def _check_patterns(patterns: Sequence[tuple[Tensor, Tensor]], queries: int, batch: int) -> None:
    if not patterns or batch % len(patterns):
        raise ValueError(f"patterns must divide the batch of {batch}, got {len(patterns)}")
    rows = -(-queries // QUERIES)
    for offsets, columns in patterns:
        if offsets.dtype != torch.int64 or columns.dtype != torch.int32:
            raise TypeError(
                f"patterns must be of int64 offsets and int32 columns, got {offsets.dtype} and {columns.dtype}"
            )
        if offsets.shape != (rows + 1,):
            raise ValueError(f"patterns must have {rows + 1} offsets for {queries} queries, got {tuple(offsets.shape)}")


def make_index(
    patterns: Sequence[tuple[Tensor, Tensor]],
    queries: int,
    keys: int,
    *,
    batch: int,
    head_dim: int,
    causal: bool = False,
    config: AttentionConfig | None = None,
) -> AttentionIndex:
    """What :func:`attend` has to know of masks; waits for the GPU, so it is made once for each mask.

    Arguments:
        patterns: ``(row_offsets, col_indices)`` of each mask, int64 (R + 1,) and int32 (vectors,) on one GPU, of 8 x 1
            vectors, R = ceil(queries / 8), columns strictly increasing in a row; matrix b of the batch has number
            ``b % len(patterns)``.
        queries, keys: rows of Q, and of K and V.
        batch: matrices, heads counted.
        head_dim: entries of a row, 32, 64 or 128.
        causal: queries i see keys j <= i only.
        config: instead of the one that :func:`choose` takes.
    Raises ``TypeError``/``ValueError`` for patterns that do not fit.
    """
    if head_dim not in HEADS:
        raise ValueError(f"head_dim must be one of {HEADS}, got {head_dim}")
    _check_patterns(patterns, queries, batch)
    vectors = vectors_of(patterns, causal)
    sizes = (queries, keys, batch, len(patterns))
    if config is None:
        device = vectors.columns.device
        with device_of(vectors.columns):
            arch, processors = current_arch(), torch.cuda.get_device_properties(device).multi_processor_count
        config = choose(head_dim, arch, processors, _problem(vectors, sizes))
    steps = config.steps(vectors, keys)
    if not isinstance(config, PanelAttention):
        return AttentionIndex(config, *sizes, steps)
    if keys > NO_TILE * config.tile:
        raise ValueError(f"keys must be at most {NO_TILE * config.tile} for {config.name}, got {keys}")
    fewer = replace(config, rows=min(config.rows, _LSE_ROWS))
    summing = AttentionIndex(fewer, *sizes, steps, fewer.ranges(vectors))
    return AttentionIndex(config, *sizes, steps, config.ranges(vectors), summing)


def _problem(vectors: Vectors, sizes: tuple[int, int, int, int]) -> Problem:
    _, keys, batch, masks = sizes
    panel = PanelAttention(PANEL_HEAD)
    ranges = panel.ranges(vectors)  # (masks, row blocks, 2)
    reach = panel.tile * float(ranges.diff(dim=2).double().mean()) if ranges.numel() else 0.0
    return Problem(batch, vectors.rows, keys, vectors.columns.numel() // masks, min(reach, keys))


class _Scale(NamedTuple):
    """Address of float32 factors, and the steps between neighbours and between matrices; 0: the same."""

    pointer: int
    step: int
    batch: int


def _scale_of(name: str, x: Tensor, batch: int, length: int, like: Tensor) -> _Scale:
    steps = {(): (0, 0), (batch,): (0, 1), (batch, length): (1, length)}
    if x.dtype != torch.float32 or x.device != like.device:
        raise TypeError(f"{name} must be float32 on {like.device}, got {x.dtype} on {x.device}")
    if tuple(x.shape) not in steps or not x.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous of shape (), ({batch},) or ({batch}, {length}), got {tuple(x.shape)}"
        )
    return _Scale(x.data_ptr(), *steps[tuple(x.shape)])


def _bias_of(bias: Tensor | None, batch: int, keys: int, like: Tensor) -> _Scale:
    if bias is None:
        return _Scale(0, 0, 0)
    if bias.dtype != torch.float32 or bias.device != like.device:
        raise TypeError(f"bias must be float32 on {like.device}, got {bias.dtype} on {bias.device}")
    if tuple(bias.shape) not in ((keys,), (batch, keys)) or not bias.is_contiguous():
        raise ValueError(f"bias must be contiguous of shape ({keys},) or ({batch}, {keys}), got {tuple(bias.shape)}")
    return _Scale(bias.data_ptr(), 1, keys if bias.ndim == 2 else 0)


def _check(name: str, x: Tensor, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
    if x.dtype not in dtypes or x.device != device:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} must be {wanted} on {device}, got {x.dtype} on {x.device}")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
    if not x.is_contiguous() or (x.ndim == 3 and x.data_ptr() % _ALIGNMENT):
        raise ValueError(f"{name} must be contiguous and start at a multiple of {_ALIGNMENT} bytes")


def _check_operands(q: Tensor, k: Tensor, v: Tensor, index: AttentionIndex, out: Tensor, lse: Tensor | None) -> None:
    batch, head, device = index.batch, index.config.head, index.steps.words.device
    for name, x, rows in (("q", q, index.queries), ("k", k, index.keys), ("v", v, index.keys)):
        _check(name, x, (batch, rows, head), (torch.int8,), device)
    _check("out", out, (batch, index.queries, head), tuple(REAL_DTYPES), device)
    if lse is not None:
        _check("lse", lse, (batch, index.queries), (torch.float32,), device)


def movable(x: Tensor) -> Tensor:
    """``x``, or a copy where it does not start at a multiple of 16 bytes."""
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


def attend(
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
    """``out = softmax(scale (q_scale Q) (k_scale K)^T + bias) (v_scale V)`` at the masks of ``index``; one launch.

    Arguments:
        q: int8 (batch, queries, d); k, v: int8 (batch, keys, d); contiguous.
        scale: factor of the logits, above 0.
        q_scale, k_scale, v_scale: float32, above 0: one, one a matrix (batch,), or one a query (batch, queries), a key
            (batch, keys), a column of V (batch, d).
        keys_alike: int32 (batch,), not 0 where all keys of a matrix have the scale of its first one, which is quicker;
            with a ``k_scale`` a key only.
        bias: float32 (keys,) or (batch, keys), added to the logits; -inf hides a key.
        ready: int32 (batch, parts) that the kernel before this one on the stream, that of ``attention_operands``, fills
            with ones as it makes ``q``, ``k``, ``v`` and their scales, with nothing launched between: this one then
            begins beside it, and waits for each matrix by itself.
        softmax_bits: 8 or 4, width of the rounded weights.
        out: float16, bfloat16 or float32 (batch, queries, d), contiguous.
        lse: float32 (batch, queries), gets the log of the sum of the exponentials of the logits; -inf without keys.
        nan_for_empty: results of queries that see no key are NaN and not zero.
    Nothing waits for the GPU; nothing is allocated, unless ``k_scale`` or ``bias`` starts at no multiple of 16 bytes.
    Raises ``TypeError``/``ValueError`` naming the argument, and what :func:`cute_kernels.jit.get_kernel` raises.
    """
    _check_operands(q, k, v, index, out, lse)
    if softmax_bits not in SOFTMAX_BITS:
        raise ValueError(f"softmax_bits must be one of {SOFTMAX_BITS}, got {softmax_bits}")
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")
    batch, head = index.batch, index.config.head
    given = k_scale, bias
    k_scale, bias = movable(k_scale), None if bias is None else movable(bias)
    q_at = _scale_of("q_scale", q_scale, batch, index.queries, q)
    k_at = _scale_of("k_scale", k_scale, batch, index.keys, q)
    v_at = _scale_of("v_scale", v_scale, batch, head, q)
    bias_at = _bias_of(bias, batch, index.keys, q)
    if keys_alike is not None:
        _check("keys_alike", keys_alike, (batch,), (torch.int32,), q.device)
        if not k_at.step:
            raise ValueError(f"keys_alike must come with a k_scale a key, got {tuple(k_scale.shape)}")
    if ready is not None:
        _check("ready", ready, (batch, ready.shape[-1] if ready.ndim else 1), (torch.int32,), q.device)
        if k_scale is not given[0] or bias is not given[1]:  # a copy was launched between
            ready = None
    if index.summing is not None and lse is not None:
        index = index.summing
    config = replace(
        index.config, out=REAL_DTYPES[out.dtype], key_scale=k_at.step == 1, bias=bias is not None, lse=lse is not None
    )
    if config.keyed and index.ranges is not None and index.keys % TMA_FLOATS:
        raise ValueError(f"keys must be a multiple of {TMA_FLOATS} for {config.name}, got {index.keys}")
    if not out.numel():
        return
    sums, alike, words = (0 if x is None else x.data_ptr() for x in (lse, keys_alike, ready))
    shared = (
        q.data_ptr(), out.data_ptr(), sums, *q_at, k_at.pointer, k_at.batch, alike, *v_at,
        bias_at.pointer, bias_at.batch, words, 0 if ready is None else ready.shape[1],
        np.float32(scale / math.log(2)), np.float32(math.log2(2**softmax_bits - 1)),
        np.float32(math.nan if nan_for_empty else 0.0), index.queries, index.keys, index.vector_rows,
    )  # fmt: skip
    with device_of(q):
        _launch(get_kernel(config), config, index, k, v, shared)


def _launch(
    kernel: Kernel, config: AttentionConfig, index: AttentionIndex, k: Tensor, v: Tensor, shared: tuple[object, ...]
) -> None:
    steps = tuple(tensor.data_ptr() for tensor in index.steps)
    if index.ranges is None or not isinstance(config, PanelAttention):
        blocks = -(-index.vector_rows // config.warps)
        arguments = (k.data_ptr(), v.data_ptr(), *steps, *shared, blocks, index.masks)
        kernel.launch((blocks * index.batch, 1, 1), arguments, pdl=True)
        return
    blocks = index.ranges.shape[1]
    box = (config.head, min(config.tile // config.cluster, _BOX_ROWS))
    maps = [
        tensor_map(x.data_ptr(), 1, (config.head, index.batch * index.keys), config.head, box, config.head)
        for x in (k, v)
    ]
    clusters = min(kernel.multiprocessors // config.cluster, blocks * index.batch)
    kernel.launch(
        (clusters * config.cluster, 1, 1),
        (
            *maps, index.ranges.data_ptr(), *steps[:2], *shared, blocks, index.batch, index.masks,
        ),
        (config.cluster, 1, 1) if config.cluster > 1 else None,
        pdl=True,
    )  # fmt: skip


def default_configs(arch: str = "sm_90a") -> Iterator[AttentionConfig]:
    """The kernels for float16 output and keys as ``cute_kernels.attention.quantize_qkv`` leaves them."""
    yield from (GatherAttention(head, key_scale=True) for head in HEADS)
    if arch in PANEL_ARCHES:
        yield PanelAttention(PANEL_HEAD, key_scale=True)
