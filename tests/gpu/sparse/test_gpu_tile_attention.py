"""Sparse attention at whole blocks from floats on a GPU: integers of tiles against the CPU, results against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.attention import fused
from cute_kernels.attention.blocks.config import BLOCK, BLOCK_ARCH, BlockAttention, block_config
from cute_kernels.attention.blocks.tiles import Tiles, TilesConfig, encode_tiles, tile_attention
from cute_kernels.dtypes import REAL_DTYPES
from tests.gpu.problems import HERE, check_guards, guarded
from tests.gpu.sparse.test_gpu_fused_attention import BOUND, LSE_BOUND, error, mask_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(HERE.arch != BLOCK_ARCH, reason="no warp groups multiply on this GPU"),
]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEADS = (64, 128)
EVERYTHING = {"bias": True, "lse": True}


def configs(bits: int = 8, **flags: Any) -> list[BlockAttention]:
    return [
        replace(block_config(head), key_scale=True, source=REAL_DTYPES[dtype], bits=bits, out="float32", **flags)
        for head, dtype in product(HEADS, DTYPES)
    ]


ENCODED = [TilesConfig(REAL_DTYPES[dtype], head, bits) for dtype, head, bits in product(DTYPES, HEADS, (4, 8))]
compiled = pytest.mark.configs([*ENCODED, *configs(lse=True), *configs(**EVERYTHING), *configs(4, lse=True)])


def rounded(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Integers and scales of rows, by the CPU."""
    found = mc.quantize(x.cpu(), bits, scale="row", nonfinite="propagate")
    assert found.scale is not None
    return found.ints().view(x.shape), found.scale[:, 0]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.configs(ENCODED)
def test_every_integer_is_the_one_of_the_cpu(dtype: torch.dtype, head: int, bits: int) -> None:
    for keys in (1, 5, 64, 129, 700):
        k, v = torch.randn(2, 3, keys, head, generator=torch.Generator().manual_seed(keys))
        k[1, -1] *= 50  # one row that is larger
        k[0, : min(keys, 70)], v[2, : min(keys, 3)] = 0, 0
        k[2, 0, 1], v[1, keys // 2, 3] = torch.nan, torch.inf
        k[2, -1] *= 1e-4
        k, v = k.to(dtype), v.to(dtype)
        found = encode_tiles(k.cuda(), v.cuda(), bits=bits)
        for i, first in product(range(3), range(0, keys, BLOCK)):
            tile, rows = first // BLOCK, slice(first, first + BLOCK)
            own = k[i, rows]
            largest = own.float().abs().amax(1)
            alike = bits == 8 and bool(largest.amax() * len(own) <= 2.5 * largest.sum())
            alike |= bool((own == 0).all())
            ints, scale = rounded(own.reshape(1, -1) if alike else own, bits)
            assert torch.equal(found.k[i, rows].cpu(), ints.view(own.shape)), (keys, i, first)
            given = found.k_scale[i, rows].cpu().nan_to_num(-1.0)
            assert torch.equal(given, scale.expand(len(own)).nan_to_num(-1.0))
            told = float(found.tile_scales[0, i, tile])
            assert told == (float(scale[0]) if alike else 0.0)
            ints, scale = rounded(v[i, rows].reshape(1, -1), bits)
            assert torch.equal(found.v[i, rows].cpu(), ints.view(own.shape))
            assert torch.equal(found.tile_scales[1, i, tile].cpu().nan_to_num(-1.0), scale[0].nan_to_num(-1.0))


class Case:
    """Random floats and a mask of whole blocks."""

    def __init__(
        self, head: int, dtype: torch.dtype, queries: int, keys: int, sparsity: float = 0.6, *, batch: int = 4,
        masks: int = 2, bits: int = 8, causal: bool = False, bias: bool = False, scale: float = 0.0, seed: int = 0,
    ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        self.bits, self.causal, self.scale = bits, causal, scale or 1 / math.sqrt(head)
        self.q, self.k, self.v = (
            torch.randn(batch, rows, head, device="cuda").to(dtype) for rows in (queries, keys, keys)
        )
        self.k[1, keys // 2] *= 20  # its tile has a scale for each key
        self.v[0] *= torch.logspace(-3, 3, keys, device="cuda").to(dtype)[:, None]
        self.bias = torch.randn(batch, keys, device="cuda") if bias else None
        if self.bias is not None:
            self.bias.view(-1)[::7] = -torch.inf
        self.masks = [mask_of(block_config(head), queries, keys, sparsity, seed + i) for i in range(masks)]
        for mask in self.masks:
            mask[(torch.arange(queries) // BLOCK) % 3 == 1] = False
        patterns = [mc.Pattern.from_dense(mask, 8).to("cuda") for mask in self.masks]
        self.index = fused.make_index(
            [(each.row_offsets, each.col_indices) for each in patterns], queries, keys, batch=batch, head_dim=head,
            causal=causal, config=block_config(head),
        )  # fmt: skip

    def expected(self, tiles: Tiles) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp in float64, of the integers."""
        rows = [rounded(x, self.bits) for x in self.q]
        q = torch.stack([ints.double() * scale.double()[:, None] for ints, scale in rows]).cuda()
        k = tiles.k.double() * tiles.k_scale.double()[..., None]
        scales = tiles.tile_scales[1].double().repeat_interleave(BLOCK, 1)[:, : k.shape[1]]
        seen = torch.stack(self.masks).cuda()
        seen = seen & torch.ones_like(seen).tril() if self.causal else seen
        logits = self.scale * (q @ k.mT)
        if self.bias is not None:
            logits += self.bias[:, None]
        logits = logits.masked_fill(~seen.repeat(len(q) // len(seen), 1, 1), -torch.inf)
        lse = logits.logsumexp(2)
        return (logits - lse[..., None]).exp().nan_to_num(0.0) @ (tiles.v.double() * scales[..., None]), lse

    def check(self, softmax_bits: int = 8) -> None:
        tiles = encode_tiles(self.k, self.v, bits=self.bits)
        result, memory = guarded(tuple(self.q.shape), torch.float32)
        sums, around = guarded(tuple(self.q.shape[:2]), torch.float32)
        tile_attention(
            self.q, tiles, self.index, scale=self.scale, bits=self.bits, bias=self.bias, softmax_bits=softmax_bits,
            out=result, lse=sums,
        )  # fmt: skip
        check_guards(result, memory)
        check_guards(sums, around)
        expected, lse = self.expected(tiles)
        for i in range(len(result)):
            assert error(result[i], expected[i]) <= BOUND[softmax_bits], i
        assert bool((result[lse == -torch.inf] == 0).all())
        assert torch.equal(sums.isfinite(), lse.isfinite())
        finite = lse.isfinite()
        assert float(((sums.double() - lse)[finite].abs() / lse[finite].abs().clamp(min=4)).max()) <= LSE_BOUND


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head", HEADS)
@compiled
def test_blocks_of_two_masks_with_empty_rows(head: int, dtype: torch.dtype) -> None:
    Case(head, dtype, 333, 556).check()
    Case(head, dtype, 256, 1111, 0.7, bias=True).check()
    Case(head, dtype, 500, 500, 0.4, causal=True, masks=1).check()
    Case(head, dtype, 130, 400, bits=4).check(4)
    Case(head, dtype, 72, 500, 0.3, scale=5.0).check()


@pytest.mark.parametrize("head", HEADS)
@compiled
def test_numbers_that_are_none_show_where_they_are_met(head: int) -> None:
    case = Case(head, torch.float32, 256, 320, masks=1, batch=2)
    seen = case.masks[0].cuda()
    case.q[0, 5, 7], case.k[1, 70, 3], case.v[1, 130, 0] = torch.nan, torch.nan, torch.inf
    out = torch.empty_like(case.q)
    tile_attention(case.q, encode_tiles(case.k, case.v, bits=8), case.index, scale=1.0, bits=8, out=out)
    met = torch.zeros(2, 256, dtype=torch.bool, device="cuda")
    met[0, 5], met[1] = bool(seen[5].any()), seen[:, 70] | seen[:, 130]
    assert torch.equal(out.isnan().all(2), met) and torch.equal(out.isnan().any(2), met)


@compiled
def test_a_graph_replays_the_public_call_with_new_data_to_the_bit() -> None:
    q, k, v = (torch.randn(8, 2048, 64, device="cuda", dtype=torch.float16) for _ in "qkv")
    pattern = mc.Pattern.from_dense(mask_of(block_config(64), 2048, 2048, 0.8, 3), 8).to("cuda")
    out = mc.sparse_attention(q, k, v, pattern)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mc.sparse_attention(q, k, v, pattern)
    for x in (q, k, v):
        x.normal_()
    expected = mc.sparse_attention(q, k, v, pattern)
    for _ in range(10):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


def test_wrong_operands_raise_and_empty_ones_give_empty_results() -> None:
    k = torch.zeros(2, 8, 64, device="cuda", dtype=torch.float16)
    with pytest.raises(ValueError, match=r"k must have shape .* one of \(64, 128\), got \(2, 8, 32\)"):
        encode_tiles(k[..., :32], k[..., :32], bits=8)
    with pytest.raises(ValueError, match=r"v must have shape \(2, 8, 64\), got \(2, 7, 64\)"):
        encode_tiles(k, k[:, :7].contiguous(), bits=8)
    with pytest.raises(TypeError, match=r"v must be torch\.float16 .* got torch\.float32"):
        encode_tiles(k, k.float(), bits=8)
    with pytest.raises(ValueError, match="k must be contiguous and start at a multiple of 16 bytes"):
        encode_tiles(k.mT.contiguous().mT, k, bits=8)
    assert encode_tiles(k[:, :0], k[:, :0], bits=8).tile_scales.shape == (2, 2, 0)
