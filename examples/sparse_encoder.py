"""The encoder of the paper's sparse Transformer, whose attention is dense, masked, in blocks or quantized.

Whatever the attention is, the parameters have the same names and shapes, so that weights go from one form to another.
Source: Li, Osawa, Hoefler, SC'22, section V-C; Vaswani et al., arXiv 1706.03762.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import magicube_cutlass as mc
from magicube_cutlass import masks
from magicube_cutlass.nn.attention import SparseQuantAttention

VECTOR = 8  # queries that share their keys
_WIDEN = 4  # width of the feed-forward layers over the model's


@dataclass(frozen=True)
class Shape:
    """Sizes of an encoder: ``heads`` of ``depth`` entries each, sequences of up to ``length`` words."""

    vocabulary: int
    classes: int
    length: int
    layers: int = 4
    heads: int = 4
    depth: int = 64

    @property
    def width(self) -> int:
        """Entries of a word's vector."""
        return self.heads * self.depth


Attention = Callable[[Shape], nn.Module]


class PlainAttention(nn.Module):
    """Multi-head attention by torch, with the parameters of :class:`SparseQuantAttention`; ``mask``: bool (L, L)."""

    def __init__(self, shape: Shape, mask: Tensor | None = None) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(shape.width, shape.width) for _ in range(4))
        self.register_buffer("mask", mask, persistent=False)

    def product(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        """``softmax(q k^T / sqrt(d)) v`` of (n, heads, L, d) tensors; ``padding``: bool (n, L), true without a word."""
        mask = self.mask
        assert mask is None or isinstance(mask, Tensor)
        if padding is not None:
            words = ~padding[:, None, None]  # (n, 1, 1, L)
            mask = words if mask is None else words & mask
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def forward(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (n, heads, L, d)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(self.product(q, k, v, key_padding_mask).transpose(1, 2).flatten(2))  # (n, L, width)


class BlockAttention(PlainAttention):
    """FlexAttention over the blocks of a ``BlockMask``; no padding."""

    def __init__(self, shape: Shape, blocks: Any) -> None:
        super().__init__(shape)
        self.blocks = blocks

    def product(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        if padding is not None:
            raise NotImplementedError("key_padding_mask must be None for attention in blocks, got a tensor")
        return flex_attention(q, k, v, block_mask=self.blocks)


class Block(nn.Module):
    """``h = x + attention(norm(x))``, then ``h + feed_forward(norm(h))``."""

    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        width = shape.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = attention(shape)
        self.up, self.down = nn.Linear(width, _WIDEN * width), nn.Linear(_WIDEN * width, width)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        h = x + self.attention(self.norm1(x), key_padding_mask=padding)
        return h + self.down(F.gelu(self.up(self.norm2(h))))  # (n, L, width)


class Encoder(nn.Module):
    """Words (n, L) to logits (n, classes), read at the first word."""

    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Parameter(torch.randn(shape.length, shape.width) * 0.02)
        self.blocks = nn.ModuleList(Block(shape, attention) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.classes)

    def hidden(self, words: Tensor, padding: Tensor | None = None) -> Tensor:
        """Vectors of the words after the last block, normalized: (n, L, width)."""
        x = self.words(words) + self.places[: words.shape[1]]
        for block in self.blocks:
            x = block(x, padding)
        return self.norm(x)

    def forward(self, words: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(words, padding)[:, 0])


def attention_mask(length: int, sparsity: float, seed: int = 0) -> mc.Pattern:
    """Window, first word and random keys in 8 x 1 vectors, together about ``1 - sparsity`` of all.

    Half of a vector row's keys are the window's where that is a vector's own words or more, else there is none.  The
    queries that share a vector with the first word attend everything.
    Raises ``ValueError`` where no random key is left.
    """
    rows = math.ceil(length / VECTOR)
    keys = ((1 - sparsity) * rows - 1) * length / max(rows - 1, 1)  # of all rows but the first, which has all
    window = int(keys // 2 - VECTOR) // 2  # words on each side
    base = 1 + (VECTOR + 2 * window if window >= 0 else 0)
    drawn = round((keys - base) * length / (length - base))  # some meet those of the base
    if drawn < 1:
        raise ValueError(
            f"sparsity must leave a row {base + 1} of {length} keys, got {sparsity}, about {keys:.1f} keys"
        )
    parts = [masks.global_tokens(length, 1), masks.random(length, 1 - drawn / length, seed=seed)]
    if window >= 0:
        parts.append(masks.local(length, window))
    return masks.union(*parts)


def dense(shape: Shape) -> nn.Module:
    """Attention over all words."""
    return PlainAttention(shape)


def masked(mask: mc.Pattern) -> Attention:
    """Attention by torch over the words of ``mask``; one bool matrix for all layers."""
    kept = mask.to_dense().bool()
    return lambda shape: PlainAttention(shape, kept)


def quantized(mask: mc.Pattern, softmax_bits: int, qkv_bits: int) -> Attention:
    """Attention over the words of ``mask`` by products of integers."""
    return lambda shape: SparseQuantAttention(
        shape.width, shape.heads, mask, softmax_bits=softmax_bits, qkv_bits=qkv_bits
    )
