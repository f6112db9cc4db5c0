"""Sparse attention with heads or queries cut over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from magicube_cutlass.attention import sparse_attention as local_attention
from magicube_cutlass.attention.api import AttentionOptions
from magicube_cutlass.distributed.collectives import all_reduce, check_mesh, chunk_bounds, sizes_of
from magicube_cutlass.distributed.products import as_dtensor, quantize_slices, slice_scale, start_slices
from magicube_cutlass.formats.pattern import Pattern

__all__ = ["sparse_attention"]


def sparse_attention(
    q: DTensor, k: DTensor, v: DTensor, mask: Pattern | Sequence[Pattern], **options: Unpack[AttentionOptions]
) -> DTensor:
    """Attend over a sparse mask, heads or queries cut over ranks: ``softmax(scale q k^T at mask) v``.

    Heads: nothing travels. Queries: keys and values are quantized by their owner, and all ranks gather their 8-bit
    integers: a scale per key, and one per matrix of values, of which ranks first exchange the amax. On a CPU the result
    equals that of one process bit for bit. On two H200s it differed by 1.8e-2, in the norm, with queries cut; why is
    not known yet. Perhaps the ranks ran another kernel than one process: the fused one is selected by the number of
    queries.

    Parameters
    ----------
    q, k, v : DTensor, shape (..., L, d)
        Floats on a mesh of one dimension, placed alike: ``Shard(dim)`` of heads or of an earlier dimension, or
        ``Shard(-2)``, the sequence.
    mask : Pattern or sequence of Pattern, shape (Lq, Lk)
        The whole mask on every rank, or one per head of all heads.
    **options
        As in :func:`magicube_cutlass.sparse_attention`. With the sequence cut, `qkv_bits` is 8 and `causal` False:
        a mask of :mod:`magicube_cutlass.masks` may be causal itself. `bias` is whole on every rank.

    Returns
    -------
    DTensor, shape (..., Lq, dv)
        Placed as `q`.

    Raises
    ------
    RuntimeError
        Without a process group.
    TypeError, ValueError
        As :func:`magicube_cutlass.sparse_attention`; for other placements; if cuts lie inside of vectors of the mask.
    NotImplementedError
        For other `qkv_bits` or `causal` with the sequence cut.

    Examples
    --------
    >>> import magicube_cutlass as mc
    >>> from torch.distributed.tensor import distribute_tensor
    >>> from magicube_cutlass.distributed import init_mesh, sparse_attention
    >>> mesh, mask = init_mesh("cpu"), mc.masks.local(64, 16)
    >>> q, k, v = (distribute_tensor(x, mesh, [Shard(1)]) for x in torch.randn(3, 2, 64, 32))
    >>> sparse_attention(q, k, v, mask).placements
    (Shard(dim=1),)
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            raise TypeError(f"{name} must be a DTensor, got {type(x).__name__}")
        if x.device_mesh != q.device_mesh or x.placements != q.placements:
            raise ValueError(f"{name} must be placed as q, {q.placements}, got {x.placements}")
    mesh, placement = check_mesh(q.device_mesh), q.placements[0]
    if not isinstance(placement, (Shard, Replicate)):
        raise ValueError(f"q must be Shard(dim) or Replicate(), got {placement}")
    if isinstance(placement, Shard) and placement.dim == q.ndim - 1:
        raise ValueError("q must not be cut along the head dimension; use Shard of heads or of the sequence")
    if isinstance(placement, Shard) and placement.dim == q.ndim - 2:
        return _of_queries(q, k, v, mask, mesh, dict(options))
    masks: Any = mask
    if isinstance(placement, Shard) and placement.dim == q.ndim - 3 and not isinstance(mask, Pattern):
        bounds, rank = chunk_bounds(q.shape[-3], mesh.size()), mesh.get_local_rank()
        masks = list(mask)[bounds[rank] : bounds[rank + 1]]

    own = [x.to_local() for x in (q, k, v)]
    run: Any = local_attention
    empty = not own[0].numel()
    out = own[0].new_zeros(*own[0].shape[:-1], v.shape[-1]) if empty else run(*own, masks, **options)
    return as_dtensor(out, mesh, q.placements[0], (*q.shape[:-1], v.shape[-1]))


def _of_queries(q: DTensor, k: DTensor, v: DTensor, mask: Any, mesh: DeviceMesh, options: dict[str, Any]) -> DTensor:
    """Attention of this rank's queries to all keys."""
    if options.get("qkv_bits", 8) != 8:
        raise NotImplementedError(f"qkv_bits must be 8 with the sequence cut, got {options['qkv_bits']}")
    if options.get("causal"):
        raise NotImplementedError("causal must be False with the sequence cut; use a mask without later keys")
    if any(x.requires_grad for x in (q, k, v)) and torch.is_grad_enabled():
        raise NotImplementedError("q, k and v must need no gradient with the sequence cut; use torch.no_grad()")
    bounds, rank = chunk_bounds(q.shape[-2], mesh.size()), mesh.get_local_rank()
    start, stop = bounds[rank], bounds[rank + 1]
    masks = [_rows(one, bounds, start, stop) for one in ([mask] if isinstance(mask, Pattern) else mask)]
    keys = [gathered_keys(x.to_local(), x.shape[-2], mesh, per_key) for x, per_key in ((k, True), (v, False))]
    own = q.to_local()
    if own.numel():
        attend: Any = local_attention
        given = masks[0] if isinstance(mask, Pattern) else masks
        out = attend(own.float(), *keys, given, **options).to(q.dtype)
    else:
        out = own.new_zeros(*own.shape[:-1], v.shape[-1])
    return as_dtensor(out, mesh, q.placements[0], (*q.shape[:-1], v.shape[-1]))


def _rows(mask: Pattern, bounds: Sequence[int], start: int, stop: int) -> Pattern:
    v = mask.vector_length
    wrong = [cut for cut in bounds if cut % v and cut != mask.shape[0]]
    if wrong:
        raise ValueError(f"mask must have vectors of a length that divides the cuts of the queries, got {v} and a cut "
                         f"at {wrong[0]}")  # fmt: skip
    key = ("rows", start, stop)
    if key not in mask._cache:
        first, last = start // v, -(-stop // v)
        offsets = mask.row_offsets[first : last + 1]
        begin, end = int(offsets[0]), int(offsets[-1])
        part = Pattern((stop - start, mask.shape[1]), v, offsets - begin, mask.col_indices[begin:end].clone())
        mask._cache[key] = part._trust()
    found: Pattern = mask._cache[key]
    return found


def gathered_keys(x: Tensor, length: int, mesh: DeviceMesh, per_key: bool) -> Tensor:
    """Return all keys or values (..., L, d) as floats that quantize to the integers and scales that travelled.

    With s the float32 nearest to t / 127, the one nearest to 127 s is t, so that the scale of ``s * q`` is s again: the
    mantissas hold ``127 s = 2**7 t + r`` with ``|r| < 64``.
    """
    x = x.float()
    lead, d = x.shape[:-2], x.shape[-1]
    flat = x.movedim(-2, 0).reshape(-1, d)  # (L_r * heads, d)
    sizes = [size * lead.numel() for size in sizes_of(chunk_bounds(length, mesh.size()))]
    if per_key:
        found = start_slices(quantize_slices(flat, 8), sizes, mesh)()
        assert found.scale is not None
        real = found.data * found.scale
    else:
        top = x.abs().amax((-2, -1)) if x.shape[-2] else x.new_zeros(lead)  # (...)
        top = all_reduce(top.nan_to_num_(nan=math.inf, posinf=math.inf), "max", mesh).reshape(-1, 1)
        sent = quantize_slices(flat, 8, top.repeat(x.shape[-2], 1))
        data = start_slices(sent._replace(scale=None), sizes, mesh)().data
        real = data * slice_scale(top, 8).repeat(length, 1)
    return real.view(length, *lead, d).movedim(0, -2).contiguous()
