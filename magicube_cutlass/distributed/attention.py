"""Sparse attention with heads or queries cut over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import pad

from cute_kernels.dtypes import REAL_DTYPES
from magicube_cutlass.attention import sparse_attention as local_attention
from magicube_cutlass.attention.api import AttentionOptions, check_masks, renamed_backend
from magicube_cutlass.attention.cpu_fused import flat_bias
from magicube_cutlass.attention.gpu_fused import kernel_rows, padded_head_dim
from magicube_cutlass.attention.softmax import check_key_bias, check_scale
from magicube_cutlass.attention.torch_op import fused_obstacle
from magicube_cutlass.distributed.collectives import check_mesh, chunk_bounds, gather, sizes_of, start_gather
from magicube_cutlass.distributed.slices import as_dtensor, quantize_slices, slice_scale
from magicube_cutlass.formats.pattern import Pattern

if TYPE_CHECKING:
    from cute_kernels.attention.blocks.tiles import Tiles

__all__ = ["sparse_attention"]

Masks = tuple[Pattern, ...]
_MAX_AMAX_RATIO = 2.5  # kMaxAbsmaxRatio of cute_kernels/attention/quantize_qkv.cuh


def sparse_attention(
    q: DTensor, k: DTensor, v: DTensor, mask: Pattern | Sequence[Pattern], **options: Unpack[AttentionOptions]
) -> DTensor:
    """Attend over a sparse mask, heads or queries cut over ranks: ``softmax(scale q k^T at mask) v``.

    Heads: nothing travels. Queries: keys and values are quantized by their owner, and all ranks gather their 8-bit
    integers with the scales that one process gives them: one per key, or one per matrix of keys where the fused kernel
    of a GPU does so; one per matrix of values. Ranks first exchange the amaxes that decide this. With masks of whole
    blocks of 64, on a GPU, tiles of 64 keys and values have scales, unless a cut lies inside of a tile. The result
    equals that of one process bit for bit, but for such a cut.

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
    whole = (mask,) if isinstance(mask, Pattern) else tuple(mask)
    masks = tuple(_rows(one, bounds, *bounds[rank : rank + 2]) for one in whole)
    own, bits = q.to_local(), options.get("softmax_bits", 8)
    backend = options.get("backend")
    if backend is None and "impl" in options:
        backend = renamed_backend(options["impl"])
    fused = own.is_cuda and backend != "unfused" and not fused_obstacle(own, v, masks, bits, 8)
    length, keys_of = k.shape[-2], (k.to_local(), v.to_local())
    config = _config(own, length, v.shape[-1], masks, whole, bounds) if fused else None
    keys: Keys | Tiles
    if config is not None and _of_blocks(config):
        rows = [_rows_of(x, config.head) for x in keys_of]
        keys = gathered_tiles(rows[0], rows[1], length, mesh)
    else:
        keys = gathered_keys(*keys_of, length, mesh, may_share=fused)
    if not own.numel():
        out = own.new_zeros(*own.shape[:-1], v.shape[-1])
    elif config is not None:
        out = _fused(own, keys, v.shape[-1], masks, config, options)
    else:
        attend: Any = local_attention
        assert isinstance(keys, Keys)
        floats = keys.floats()
        out = attend(own.float(), *floats, masks[0] if isinstance(mask, Pattern) else masks, **options).to(q.dtype)
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


class Keys(NamedTuple):
    """Integers of all keys and values, with the scales that one process gives them."""

    k: Tensor  # (..., L, d) int8
    k_scale: Tensor  # (..., L, 1)
    alike: Tensor  # (...) whether the keys of a matrix share a scale
    v: Tensor  # (..., L, dv) int8
    v_scale: Tensor  # (..., 1, 1)

    def floats(self) -> tuple[Tensor, Tensor]:
        """Return floats that quantize to these integers and scales, row by row.

        With s the float32 nearest to t / 127, the one nearest to 127 s is t, so that the scale of ``s * q`` is s again:
        the mantissas hold ``127 s = 2**7 t + r`` with ``|r| < 64``.
        """
        return self.k * self.k_scale, self.v * self.v_scale


def gathered_keys(k: Tensor, v: Tensor, length: int, mesh: DeviceMesh, *, may_share: bool) -> Keys:
    """Gather keys and values (..., L, d) as integers: one all-gather of 12 bytes per matrix, one of the integers.

    `may_share`: a matrix of keys gets one scale where the fused kernel of a GPU gives it one.
    """
    k, v = k.float(), v.float()
    lead, sizes = k.shape[:-2], sizes_of(chunk_bounds(length, mesh.size()))
    row_top = torch.linalg.vector_norm(k, math.inf, -1)  # (..., L_r); NaN stays
    own = k.new_zeros(3, *lead)
    if k.shape[-2]:
        own = torch.stack([row_top.amax(-1), torch.linalg.vector_norm(v, math.inf, (-2, -1)), row_top.sum(-1)])
    every = gather(own[None], [1] * mesh.size(), mesh)  # (ranks, 3, ...)
    k_top, v_top = every[:, :2].amax(0)
    alike = (k_top * length <= _MAX_AMAX_RATIO * every[:, 2].sum(0)) & may_share  # False for NaN
    top = torch.where(alike[..., None], k_top[..., None], row_top)  # (..., L_r)
    parts = [
        quantize_slices(x.movedim(-2, 0).reshape(-1, x.shape[-1]), 8, t.movedim(-1, 0).reshape(-1, 1))
        for x, t in ((k, top), (v, v_top[..., None].expand_as(row_top)))
    ]
    assert parts[0].scale is not None
    sent = [parts[0].data, parts[0].scale, parts[1].data]  # (L_r * matrices, ...)
    found = start_gather(sent, [size * lead.numel() for size in sizes], mesh)()
    ints, scale, values = (each.view(length, *lead, each.shape[-1]).movedim(0, -2).contiguous() for each in found)
    return Keys(ints, scale, alike, values, slice_scale(v_top.reshape(-1, 1), 8).view(*lead, 1, 1))


def gathered_tiles(k: Tensor, v: Tensor, length: int, mesh: DeviceMesh) -> Tiles:
    """Gather keys and values (matrices, L, d) as integers with scales of tiles, in one all-gather.

    Cuts between tiles give every tile the scale that it has in one process.
    """
    from cute_kernels.attention.blocks.config import BLOCK
    from cute_kernels.attention.blocks.tiles import Tiles, encode_tiles

    own, batch = encode_tiles(k, v, bits=8), k.shape[0]
    count = own.tile_scales.shape[2]

    def in_tiles(x: Tensor) -> Tensor:  # (tiles, matrices, 64, ...)
        return pad(x, (0, 0, 0, count * BLOCK - x.shape[1])).view(batch, count, BLOCK, x.shape[2]).movedim(1, 0)

    def in_rows(x: Tensor) -> Tensor:  # (matrices, length, ...)
        return x.movedim(0, 1).reshape(batch, -1, x.shape[3])[:, :length].contiguous()

    sent = [in_tiles(own.k), in_tiles(own.v), in_tiles(own.k_scale[:, :, None]), own.tile_scales.movedim(2, 0)]
    sizes = [-(-size // BLOCK) for size in sizes_of(chunk_bounds(length, mesh.size()))]
    ints, values, scale, tile_scales = start_gather([x.contiguous() for x in sent], sizes, mesh)()
    return Tiles(in_rows(ints), in_rows(scale)[:, :, 0], in_rows(values), tile_scales.movedim(0, 2).contiguous())


def _of_blocks(config: Any) -> bool:
    """Whether a kernel config is of whole blocks."""
    from cute_kernels.attention.blocks.config import BlockAttention

    return isinstance(config, BlockAttention)


def _rows_of(x: Tensor, width: int) -> Tensor:
    """Rows (..., L, d) as the kernels read them, (matrices, L, width); float64 as float32."""
    rows = x.reshape(x.shape[:-2].numel(), *x.shape[-2:])
    return kernel_rows(rows.float() if rows.dtype == torch.float64 else rows, width)


def _config(q: Tensor, keys: int, depth: int, masks: Masks, whole: Masks, cuts: Sequence[int]) -> Any:
    """Kernel config that all queries have, for those of this rank; another one where a cut lies inside of a block."""
    from cute_kernels.attention.blocks.config import BLOCK
    from cute_kernels.attention.config import GatherAttention
    from cute_kernels.attention.selection import select_attention

    batch, width = q.shape[:-2].numel(), padded_head_dim(max(q.shape[-1], depth))
    assert width is not None
    if q.numel():
        check_masks(masks if len(masks) > 1 else masks[0], q, keys)
    name = ("kernel of rows", batch, width, *[mask._version_id for mask in (*masks[1:], *whole)])
    config = masks[0]._cache.get(name)
    if config is None:
        arrays = [(mask.row_offsets, mask.col_indices) for mask in whole]
        config = select_attention(arrays, *whole[0].shape, batch=batch, head_dim=width)
        if _of_blocks(config) and any(cut % BLOCK for cut in cuts[:-1]):
            config = GatherAttention(width)
        masks[0]._cache[name] = config
    return config


def _fused(q: Tensor, keys: Keys | Tiles, depth: int, masks: Masks, config: Any, options: dict[str, Any]) -> Tensor:
    """Attention to all keys by the fused kernel of a GPU; `depth`: entries per row of V."""
    from cute_kernels.attention import fused as attention
    from cute_kernels.attention.blocks.tiles import tile_attention

    batch, (queries, d), length = q.shape[:-2], q.shape[-2:], masks[0].shape[1]
    name = ("attention of rows", batch.numel(), config.name, *[mask._version_id for mask in masks[1:]])
    index = masks[0]._cache.get(name)
    if index is None:
        arrays = [(mask.row_offsets, mask.col_indices) for mask in masks]
        index = masks[0]._cache[name] = attention.make_index(
            arrays, queries, length, batch=batch.numel(), head_dim=config.head, config=config
        )
    bias = options.get("bias")
    if bias is not None:
        check_key_bias(bias, length, q.device)
        bias = flat_bias(bias, batch).contiguous()
        bias = bias[0] if bias.shape[0] == 1 else bias
    scale, dtype = options.get("scale"), q.dtype if q.dtype in REAL_DTYPES else torch.float32
    out = torch.empty((batch.numel(), queries, config.head), dtype=dtype, device=q.device)
    softmax: dict[str, Any] = {
        "scale": 1.0 / math.sqrt(d) if scale is None else check_scale(scale), "bias": bias, "out": out,
        "softmax_bits": options.get("softmax_bits", 8), "nan_for_empty": options.get("nan_for_empty", False),
    }  # fmt: skip
    if isinstance(keys, Keys):
        given = quantize_slices(q.reshape(-1, d), 8)
        assert given.scale is not None
        query, key, value = (_rows_of(x, config.head) for x in (given.data.view(q.shape), keys.k, keys.v))
        attention.fused_attention(
            query, key, value, index, q_scale=given.scale.view(batch.numel(), queries),
            k_scale=keys.k_scale.view(batch.numel(), -1), v_scale=keys.v_scale.reshape(-1),
            keys_alike=keys.alike.reshape(-1).to(torch.int32), **softmax,
        )  # fmt: skip
    else:
        tile_attention(_rows_of(q, config.head), keys, index, bits=8, **softmax)
    return out[..., :depth].to(q.dtype).reshape(*batch, queries, depth)
