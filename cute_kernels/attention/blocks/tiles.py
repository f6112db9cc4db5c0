"""Fused sparse attention at whole blocks from floats: K and V get scales of tiles of keys, Q is not stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.attention.blocks.config import BLOCK, BLOCK_HEADS, BlockAttention, Blocks, launch_blocks
from cute_kernels.attention.fused import AttentionIndex, align_to_16_bytes
from cute_kernels.attention.operands import bias_of, check_operands, check_tensor, softmax_numbers
from cute_kernels.attention.quantize_qkv import OperandsConfig
from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import OUT_BYTES, KernelConfig
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel


@dataclass(frozen=True)
class TilesConfig(KernelConfig):
    """Config of the kernel ``attention_tiles``.

    Parameters
    ----------
    x : str
        Dtype of K and V.
    head : int
        Head dimension.
    bits : int
        Width of the integers, 8 or 4; stored as one byte each.
    threads : int
        Threads per CTA, which has a tile of 64 keys.

    Examples
    --------
    >>> TilesConfig("float16", 64).name, TilesConfig("float16", 64).steps
    ('attention_tiles-float16-d64-s8-w4', 2)
    """

    x: str
    head: int
    bits: int = 8
    threads: int = 128

    kernel_header = "attention/blocks/tiles.cuh"
    kernel_entry = "attention_tiles"
    shared_carveout = 100  # the kernel that attends starts behind it, on the same SMs

    @property
    def steps(self) -> int:
        """Pairs of 16-byte vectors of a thread."""
        return BLOCK * self.head * OUT_BYTES[self.x] // (32 * self.threads)

    @property
    def rows(self) -> OperandsConfig:
        """Config of the same passes over whole matrices."""
        return OperandsConfig(self.x, self.head, self.bits, cluster=1, steps=self.steps, threads=self.threads)

    @property
    def smem_bytes(self) -> int:
        return self.rows.smem_bytes

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        return f"attention_tiles-{self.x}-d{self.head}-s{self.bits}-w{self.threads // 32}"

    def _constants(self) -> dict[str, object]:
        return self.rows._constants() | {"kKeys": BLOCK}

    def _types(self) -> dict[str, str]:
        return self.rows._types()


class Tiles(NamedTuple):
    """Quantized K and V for :func:`tile_attention`."""

    k: Tensor  # (batch, keys, d) int8
    k_scale: Tensor  # (batch, keys) float32
    v: Tensor  # (batch, keys, d) int8
    tile_scales: Tensor  # (2, batch, tiles) float32: of K, 0 where keys have scales of their own, and of V


def encode_tiles(k: Tensor, v: Tensor, *, bits: int) -> Tiles:
    """Quantize K and V with a scale for each tile of 64 keys in one launch, without waiting for the GPU.

    ``round(x / scale)``, one byte each, ``scale = max|x| / (2^(bits - 1) - 1)`` over a tile. 8-bit K has one scale per
    tile if the amax of the tile is at most 2.5 times the mean row amax; else, and with 4 bits, its keys have scales of
    their own. Scales are those of :func:`cute_kernels.convert.quantize.quantize`: 1 for zeros, NaN for non-finite
    entries.

    Parameters
    ----------
    k, v : Tensor, shape (batch, keys, d)
        float16, bfloat16 or float32 on a GPU, contiguous, aligned to 16 bytes; d is 64 or 128.
    bits : int
        8 or 4.

    Returns
    -------
    Tiles

    Raises
    ------
    TypeError, ValueError
        If a dtype, shape, device or memory layout is not supported.

    Examples
    --------
    >>> tiles = encode_tiles(k, v, bits=8)  # doctest: +SKIP
    """
    if k.ndim != 3 or k.shape[2] not in BLOCK_HEADS:
        raise ValueError(f"k must have shape (batch, keys, d) with d one of {BLOCK_HEADS}, got {tuple(k.shape)}")
    check_tensor("k", k, tuple(k.shape), tuple(REAL_DTYPES), k.device)
    check_tensor("v", v, tuple(k.shape), (k.dtype,), k.device)
    (batch, keys, head), device = k.shape, k.device
    tiles = -(-keys // BLOCK)
    ints = workspace.empty((2, *k.shape), torch.int8, device)
    k_scale = workspace.empty((batch, keys), torch.float32, device)
    tile_scales = workspace.empty((2, batch, tiles), torch.float32, device)
    if k.numel():
        with device_of(k):
            get_kernel(TilesConfig(REAL_DTYPES[k.dtype], head, bits)).launch(
                (2 * batch * tiles, 1, 1),
                (
                    k.data_ptr(), v.data_ptr(), ints[0].data_ptr(), ints[1].data_ptr(), k_scale.data_ptr(),
                    tile_scales.data_ptr(), keys, batch,
                ),
            )  # fmt: skip
    return Tiles(ints[0], k_scale, ints[1], tile_scales)


def tile_attention(
    q: Tensor,
    tiles: Tiles,
    index: AttentionIndex,
    *,
    scale: float,
    bits: int,
    bias: Tensor | None = None,
    softmax_bits: int = 8,
    out: Tensor,
    lse: Tensor | None = None,
    nan_for_empty: bool = False,
) -> None:
    """Run sparse attention at whole blocks: as :func:`~cute_kernels.attention.fused.fused_attention`, with Q as floats.

    Each query is quantized to `bits` with a scale of its own in the kernel, so that its integers are never stored.

    Parameters
    ----------
    q : Tensor, shape (batch, queries, d)
        float16, bfloat16 or float32, contiguous.
    tiles : Tiles
        K and V, from :func:`encode_tiles`.
    index : AttentionIndex
        Masks, from :func:`~cute_kernels.attention.fused.make_index`, with a :class:`BlockAttention`.
    bits : int
        Width of Q's integers, 8 or 4.
    scale, bias, softmax_bits, out, lse, nan_for_empty
        As for ``fused_attention``.

    Raises
    ------
    TypeError
        If a dtype is not supported.
    ValueError
        If a shape, device, memory layout or option is wrong.

    Examples
    --------
    >>> tile_attention(q, encode_tiles(k, v, bits=8), index, scale=0.125, bits=8, out=out)  # doctest: +SKIP
    """
    if not isinstance(index.config, BlockAttention) or not isinstance(index.steps, Blocks):
        raise ValueError(f"index must be of whole blocks, got {index.config.name}")
    check_operands((q, tiles.k, tiles.v), index.shape, index.steps[0].device, out, lse, *REAL_DTYPES)
    numbers = softmax_numbers(scale, softmax_bits, nan_for_empty)
    batch, keys = index.batch, index.keys
    check_tensor("tiles.k_scale", tiles.k_scale, (batch, keys), (torch.float32,), q.device)
    check_tensor("tiles.tile_scales", tiles.tile_scales, (2, batch, -(-keys // BLOCK)), (torch.float32,), q.device)
    bias = None if bias is None else align_to_16_bytes(bias)
    bias_at = bias_of(bias, batch, keys, q)
    config = replace(
        index.config, out=REAL_DTYPES[out.dtype], key_scale=True, bias=bias is not None, lse=lse is not None,
        source=REAL_DTYPES[q.dtype], bits=bits,
    )  # fmt: skip
    if not out.numel():
        return
    arguments = (
        out.data_ptr(), 0 if lse is None else lse.data_ptr(), 0, 0, 0, tiles.k_scale.data_ptr(), keys, 0, 0, 0, 0,
        bias_at.pointer, bias_at.batch, q.data_ptr(), tiles.tile_scales.data_ptr(), *numbers,
    )  # fmt: skip
    with device_of(q):
        launch_blocks(config, index.steps, q, tiles.k, tiles.v, arguments, index.masks, index.causal)


def default_configs() -> list[TilesConfig]:
    """Return the configs for 8-bit integers of 16-bit floats.

    Examples
    --------
    >>> len(default_configs())
    4
    """
    return [TilesConfig(x, head) for x, head in product(("float16", "bfloat16"), BLOCK_HEADS)]
