"""What each rank checks of attention with the sequence cut, without a GPU: the kernel of all queries, and its tiles."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh

import magicube_cutlass as mc
import magicube_cutlass.distributed as md
from magicube_cutlass.distributed.attention import gathered_keys
from magicube_cutlass.distributed.slices import slice_scale
from tests.distributed.checks import generator


def check_queries_run_the_kernel_of_all(mesh: DeviceMesh) -> None:
    """A part of the queries alone would select another kernel of a GPU, which adds in another order."""
    from cute_kernels.attention import fused, selection
    from cute_kernels.attention.blocks.config import BlockAttention
    from cute_kernels.attention.config import GatherAttention

    heads, length = 5, 4096 if mesh.size() != 3 else 4080  # cuts between vectors
    blocks = torch.eye(64, dtype=torch.bool).repeat_interleave(64, 0).repeat_interleave(64, 1)[:length, :length]
    for mask in (mc.masks.local(length, 512), mc.Pattern.from_dense(blocks, 8)):
        index, whole, alone = _kernels_of_a_part(mesh, mask, heads, length, fused, selection)
        if isinstance(whole, BlockAttention) and mesh.size() == 3:  # no cut between whole blocks
            assert isinstance(index.config, GatherAttention)
        else:
            assert index.config == whole
        assert isinstance(whole, BlockAttention) or mesh.size() == 1 or alone != whole


def _kernels_of_a_part(mesh: DeviceMesh, mask: mc.Pattern, heads: int, length: int, fused: Any, selection: Any) -> Any:
    """The index that a rank's queries run by, and the kernels that all of them and these alone would select."""
    from cute_kernels.attention.blocks import tiles as quantize_tiles

    rank, found = mesh.get_local_rank(), []
    bounds = md.attention.chunk_bounds(length, mesh.size())
    part = md.attention._rows(mask, bounds, *bounds[rank : rank + 2])
    all_k, all_v = torch.randn(2, heads, length, 64, generator=generator(21))
    k, v = (x[:, bounds[rank] : bounds[rank + 1]] for x in (all_k, all_v))
    machine = mock.patch.multiple(selection, current_arch=lambda: "sm_90a", device_of=lambda x: nullcontext())
    kernel = mock.patch.object(fused, "fused_attention", lambda *given, **_: found.append(given))
    blocks = mock.patch.multiple(
        quantize_tiles, tile_attention=lambda *given, **_: found.append(given), encode_tiles=encode_tiles
    )
    of_device = mock.patch("torch.cuda.get_device_properties", return_value=mock.Mock(multi_processor_count=132))
    with machine, kernel, blocks, of_device:
        config = md.attention._config(k, length, 64, (part,), (mask,), bounds)
        tiles = md.attention._of_blocks(config)
        keys = (
            md.attention.gathered_tiles(k, v, length, mesh)
            if tiles
            else gathered_keys(k, v, length, mesh, may_share=True)
        )
        md.attention._fused(torch.randn_like(k), keys, 64, (part,), config, {})
        whole, alone = (
            selection.select_attention(
                [(each.row_offsets, each.col_indices)], each.shape[0], length, batch=heads, head_dim=64
            )
            for each in (mask, part)
        )
    if tiles:  # the whole's integers and scales
        q, given, index = found[0]
        for got, wanted in zip(given, encode_tiles(all_k, all_v, bits=8), strict=True):
            assert torch.equal(got, wanted)
    else:
        q, ints, values, index = found[0]
        assert torch.equal(ints, keys.k) and torch.equal(values, keys.v)
    assert q.shape == k.shape
    return index, whole, alone


def encode_tiles(k: torch.Tensor, v: torch.Tensor, *, bits: int) -> Any:
    """What the kernel of this name writes, by torch operators."""
    from cute_kernels.attention.blocks.tiles import Tiles

    (batch, keys, d), tiles = k.shape, -(-k.shape[1] // 64)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 64 * tiles - keys)).view(batch, tiles, 64, d) for x in (k, v)]
    top = [x.abs().amax(3) for x in padded]  # (batch, tiles, 64)
    rows = torch.full((tiles,), 64.0)
    rows[-1:] = keys - 64 * (tiles - 1)
    alike = top[0].amax(2) * rows <= 2.5 * top[0].sum(2)
    scales = torch.stack([slice_scale(t.amax(2).reshape(-1, 1), bits).view(batch, tiles) for t in top])
    of_rows = slice_scale(top[0].reshape(-1, 1), bits).view(batch, tiles, 64)
    k_scale = torch.where(alike[..., None], scales[0][..., None], of_rows)
    ints = [
        torch.round(x / s[..., None]).to(torch.int8).view(batch, -1, d)[:, :keys]
        for x, s in zip(padded, (k_scale, scales[1][..., None].expand_as(k_scale)), strict=True)
    ]
    scales[0] = torch.where(alike, scales[0], 0.0)
    return Tiles(ints[0], k_scale.view(batch, -1)[:, :keys].contiguous(), ints[1], scales)
