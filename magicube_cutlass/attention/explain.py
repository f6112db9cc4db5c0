"""``explain_attention``: which backend and kernel :func:`magicube_cutlass.sparse_attention` uses, and why."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.cpu import engine
from cute_kernels.explanation import Explanation
from magicube_cutlass.attention.api import QKV_BITS, Backend, check_backend, check_masks, check_tensors
from magicube_cutlass.attention.gpu_fused import padded_head_dim
from magicube_cutlass.attention.softmax import check_softmax_bits
from magicube_cutlass.attention.torch_op import fused_obstacle
from magicube_cutlass.formats.pattern import Pattern

__all__ = ["explain_attention"]


def explain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Pattern | Sequence[Pattern],
    *,
    softmax_bits: int = 8,
    qkv_bits: int = 8,
    backend: Backend | None = None,
) -> Explanation:
    """Report which kernels :func:`magicube_cutlass.sparse_attention` uses for a forward pass; nothing is computed.

    Parameters
    ----------
    q, k, v, mask, softmax_bits, qkv_bits, backend
        As for :func:`magicube_cutlass.sparse_attention`.

    Returns
    -------
    Explanation
        `kernel` is ``"fused"`` or ``"unfused"``.

    Raises
    ------
    TypeError, ValueError
        As :func:`magicube_cutlass.sparse_attention`.

    Examples
    --------
    >>> import magicube_cutlass as mc
    >>> q = torch.randn(2, 64, 32)
    >>> mc.explain_attention(q, q, q, mc.masks.local(64, 8), backend="unfused").kernel
    'unfused'
    """
    check_tensors(q, k, v)
    check_softmax_bits(softmax_bits, "softmax_bits")
    if qkv_bits not in QKV_BITS:
        raise ValueError(f"qkv_bits must be one of {QKV_BITS}, got {qkv_bits!r}")
    check_backend(backend)
    masks = check_masks(mask, q, k.shape[-2])
    obstacle = "" if backend == "unfused" else fused_obstacle(q, v, masks, softmax_bits, qkv_bits, has_memory=True)
    is_fused = backend != "unfused" and not obstacle
    queries, keys = masks[0].shape
    density = sum(each.density for each in masks) / len(masks)
    size = (f"{q.shape[:-2].numel()} matrices of {queries} queries x {keys} keys, head_dim {q.shape[-1]}, density "
            f"{density:.3g}, softmax {softmax_bits} bits, q, k and v {qkv_bits} bits")  # fmt: skip
    name = "fused" if is_fused else "unfused"
    where = "cuda" if q.is_cuda else "engine" if engine.available() else "torch"
    threads = f"{torch.get_num_threads()} threads"
    device = {"cuda": "CUDA", "engine": f"CPU engine, {engine.isa()} path, {threads}", "torch": f"torch, {threads}"}[
        where
    ]
    form = "one fused kernel" if is_fused else "three products: SDDMM, softmax, SpMM"
    lines = [f"{device}, {form}: {size}"]
    if is_fused and q.is_cuda:
        lines.append(_kernel_line(q, v, masks))
    if obstacle:
        lines.append(f"the fused kernel does not support {obstacle}")
    facts = {"queries": queries, "keys": keys, "head_dim": int(q.shape[-1]), "density": density, "obstacle": obstacle}
    return Explanation("sparse_attention", where, name, "\n".join(lines), facts)


def _kernel_line(q: Tensor, v: Tensor, masks: tuple[Pattern, ...]) -> str:
    """The kernel that a GPU takes, without causality; waits for the masks."""
    from cute_kernels.attention.blocks.config import BLOCK, BlockAttention
    from cute_kernels.attention.selection import select_attention

    head_dim = padded_head_dim(max(q.shape[-1], v.shape[-1]))
    assert head_dim is not None
    arrays = [(mask.row_offsets, mask.col_indices) for mask in masks]
    batch = q.shape[:-2].numel()
    config = select_attention(arrays, *masks[0].shape, batch=batch, head_dim=head_dim)
    kind = f"whole {BLOCK} x {BLOCK} blocks" if isinstance(config, BlockAttention) else "8 x 1 vectors"
    return f"kernel {config.name}, of {kind}"
