"""Fused sparse attention at whole blocks of a mask: config, block lists and launch (sm_90a)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels import atoms
from cute_kernels.attention.config import ATOM, QUERIES, QueryVectors
from cute_kernels.jit.codegen import OUT_BYTES, OUT_TYPES, KernelConfig
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.jit.tma import tensor_map

BLOCK = 64  # queries and keys of a block
BLOCK_HEADS = (64, 128)  # head dimensions: a row of K is as wide as a swizzle
BLOCK_ARCH = "sm_90a"


class Blocks(NamedTuple):
    """Whole blocks of one or several masks, concatenated."""

    starts: Tensor  # (masks * block rows + 1,) int32, first tile of each block row in `tiles`
    tiles: Tensor  # (n,) int32, tiles of 64 keys, increasing in each block row


@dataclass(frozen=True)
class BlockAttention(KernelConfig):
    """Config of the fused kernel for masks of whole 64 x 64 blocks.

    Parameters
    ----------
    head : int
        Head dimension, one of `BLOCK_HEADS`.
    out : str
        Dtype of the output.
    key_scale, bias, lse : bool
        As for :class:`~cute_kernels.attention.config.AttentionConfig`.
    source : str, optional
        Dtype of Q where Q is quantized in this kernel, and K and V have scales of tiles
        (:func:`~cute_kernels.attention.blocks.tiles.encode_tiles`). Default: integers with scales.
    bits : int
        Width of Q's integers with `source`.
    stages : int
        Pipeline stages of a tile of K, V and Q each.
    resident : int
        CTAs per SM.

    Examples
    --------
    >>> BlockAttention(64).name, BlockAttention(64).smem_bytes
    ('attention_blocks-d64-float16-s2x4', 24608)
    """

    head: int
    out: str = "float16"
    key_scale: bool = False
    bias: bool = False
    lse: bool = False
    source: str = ""
    bits: int = 8
    stages: int = 2
    resident: int = 4

    kernel_header = "attention/blocks/kernel.cuh"
    kernel_entry = "attention_blocks"
    threads = 128

    @property
    def keyed(self) -> bool:
        """Whether keys have scales or biases."""
        return self.key_scale or self.bias

    @property
    def smem_bytes(self) -> int:
        tiles = self.stages * (3 * BLOCK * self.head + 16)  # and two mbarriers
        return tiles + BLOCK * self.head * OUT_BYTES[self.source] if self.source else tiles

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        kinds = [text for text, used in (("ks", self.key_scale), ("b", self.bias), ("lse", self.lse)) if used]
        if self.source:
            kinds.append(f"of-{self.source}-s{self.bits}")
        return "-".join(["attention_blocks", f"d{self.head}", self.out, *kinds, f"s{self.stages}x{self.resident}"])

    def _constants(self) -> dict[str, object]:
        return {
            "kHead": self.head,
            "kKeyScale": self.key_scale,
            "kBias": self.bias,
            "kLse": self.lse,
            "kTiled": bool(self.source),
            "kBits": self.bits,
            "kSigned": True,
            "kTruncate": False,
            "kWarps": self.threads // 32,
            "kStages": self.stages,
            "kResident": min(self.resident, 3) if self.lse and self.keyed else self.resident,  # registers
            "kCluster": 1,
        }

    def _preamble(self) -> str:
        return atoms.declaration(atoms.atom(ATOM))  # which `attention/common.cuh` names

    def _types(self) -> dict[str, str]:
        return {"Out": OUT_TYPES[self.out], "Source": OUT_TYPES[self.source or self.out]}


def block_config(head: int) -> BlockAttention:
    """Return the config of a head dimension: 128 leaves registers for two CTAs per SM."""
    return BlockAttention(head) if head == 64 else BlockAttention(head, resident=2)


def find_blocks(vectors: QueryVectors, queries: int, keys: int, causal: bool) -> Blocks | None:
    """Return the blocks of masks of whole blocks, None where a block is not whole.

    Parameters
    ----------
    vectors : QueryVectors
        Vectors of the masks, without causality.
    queries, keys : int
        Shape of a mask; blocks at its end are whole if they have all that there is.
    causal : bool
        Leave out blocks above the diagonal.

    Returns
    -------
    Blocks or None

    Examples
    --------
    >>> from cute_kernels.attention.config import query_vectors
    >>> mask = torch.arange(9) * 64, torch.arange(64, 128, dtype=torch.int32).repeat(8)  # 64 queries, keys 64 to 127
    >>> find_blocks(query_vectors([mask], False), 64, 128, False).tiles.tolist()
    [1]
    """
    offsets, columns = vectors.row_offsets, vectors.columns
    rows, high = max(vectors.rows, 1), BLOCK // QUERIES
    block_rows, tiles = -(-rows // high), -(-keys // BLOCK)
    masks = (offsets.numel() - 1) // rows
    row = torch.repeat_interleave(offsets.diff(), output_size=columns.numel())  # (vectors,)
    block_row = row // rows * block_rows + row % rows // high
    counts = torch.bincount(block_row * tiles + columns.long() // BLOCK, minlength=masks * block_rows * tiles)
    counts = counts.view(masks, block_rows, tiles)
    first = BLOCK * torch.arange(max(block_rows, tiles), device=columns.device)  # query or key of a block
    tall = ((QUERIES * rows - first[:block_rows]) // QUERIES).clamp(max=high)
    wide = (keys - first[:tiles]).clamp(max=BLOCK)
    used = counts > 0  # (masks, block_rows, tiles)
    if not bool((used.logical_not() | (counts == tall[:, None] * wide)).all()):
        return None
    if causal:
        used = used & (first[:tiles] < first[:block_rows, None] + BLOCK)
    starts = torch.zeros(masks * block_rows + 1, dtype=torch.int32, device=columns.device)
    starts[1:] = used.view(-1, tiles).sum(1).cumsum(0)
    return Blocks(starts, used.view(-1, tiles).nonzero()[:, 1].to(torch.int32))


def launch_blocks(
    config: BlockAttention,
    blocks: Blocks,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: tuple[object, ...],
    masks: int,
    causal: bool,
) -> None:
    """Launch the kernel.

    Parameters
    ----------
    config : BlockAttention
        Kernel config.
    blocks : Blocks
        Blocks of the masks.
    q : Tensor, shape (batch, queries, d)
        int8, or floats for a config with a `source`, contiguous.
    k, v : Tensor, shape (batch, keys, d)
        int8, contiguous.
    arguments : tuple
        The kernel's arguments from `out` to `empty`.
    masks : int
        Masks in `blocks`.
    causal : bool
        Query ``i`` attends to the keys ``j <= i`` only.
    """
    (batch, queries, head), keys = q.shape, k.shape[1]
    block_rows = -(-queries // BLOCK)
    kernel = get_kernel(config)
    read = (k if config.source else q, k, v)  # floats are not read by TMA
    maps = [tensor_map(x.data_ptr(), 1, (head, batch * x.shape[1]), head, (head, BLOCK), head) for x in read]
    kernel.launch(
        (min(kernel.num_sms * config.resident, block_rows * batch), 1, 1),
        (
            *maps, blocks.starts.data_ptr(), blocks.tiles.data_ptr(), *arguments, queries, keys, block_rows, batch,
            masks, int(causal),
        ),
        pdl=True,
    )  # fmt: skip
