"""Sparse attention on a GPU by the fused kernels: operands, masks, launches, and their record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.jit.workspace import Kept
from magicube_cutlass.formats.pattern import Pattern

if TYPE_CHECKING:
    from cute_kernels.attention.fused import AttentionIndex

_HEAD_DIMS = (32, 64, 128)
_ALIGNMENT = 16
_REPLAYS = 32  # sets of addresses per record


def padded_head_dim(d: int) -> int | None:
    """Head dimension to which the operands of the fused kernels are padded, None if `d` is too large."""
    return next((head_dim for head_dim in _HEAD_DIMS if head_dim >= d), None)


def kernel_rows(x: Tensor, head_dim: int) -> Tensor:
    """Return rows (N, L, d) as the fused kernels read them: (N, L, head_dim), contiguous, aligned."""
    from cute_kernels.attention.fused import align_to_16_bytes

    padded = x if x.shape[2] == head_dim else torch.nn.functional.pad(x, (0, head_dim - x.shape[2]))
    return align_to_16_bytes(padded.contiguous())


def kernel_obstacle(q: Tensor, v: Tensor, masks: Sequence[Pattern], softmax_bits: int, qkv_bits: int) -> str:
    """Return what the fused kernels do not support in a call; empty if they support it."""
    from cute_kernels.attention.fused import supports_attention

    if qkv_bits > 8:
        return f"qkv_bits={qkv_bits}, only 4 and 8"
    widest = max(q.shape[-1], v.shape[-1])
    head_dim, length = padded_head_dim(widest), masks[0].vector_length
    if head_dim is None or not supports_attention(
        q.device, head_dim=head_dim, vector_length=length, softmax_bits=softmax_bits
    ):
        return (f"head_dim={widest}, vector_length={length}, softmax_bits={softmax_bits}: it needs head_dim <= "
                f"{_HEAD_DIMS[-1]}, vector_length=8 and softmax_bits 4 or 8")  # fmt: skip
    return ""


def index_of(q: Tensor, k: Tensor, masks: Sequence[Pattern], causal: bool) -> AttentionIndex:
    """Return what the kernels read of the masks for rows (N, L, head_dim); cached on the first one."""
    from cute_kernels.attention.fused import make_index

    batch, queries, head_dim = q.shape
    key = ("attention", batch, head_dim, causal, *[mask._version_id for mask in masks[1:]])
    found: AttentionIndex | None = masks[0]._cache.get(key)
    if found is None:
        arrays = [(mask.row_offsets, mask.col_indices) for mask in masks]
        found = make_index(arrays, queries, k.shape[1], batch=batch, head_dim=head_dim, causal=causal)
        masks[0]._cache[key] = found
    return found


def launch(q: Tensor, k: Tensor, v: Tensor, index: AttentionIndex, qkv_bits: int, **softmax: Any) -> None:
    """Quantize rows (N, L, head_dim) and run the fused kernel; `softmax`: as for ``fused_attention``, with `out`."""
    from cute_kernels.attention.blocks.config import BlockAttention
    from cute_kernels.attention.blocks.tiles import encode_tiles, tile_attention
    from cute_kernels.attention.fused import fused_attention
    from cute_kernels.attention.quantize_qkv import encode_operands

    if isinstance(index.config, BlockAttention):
        tile_attention(q, encode_tiles(k, v, bits=qkv_bits), index, bits=qkv_bits, **softmax)
        return
    ints = encode_operands(q, k, v, bits=qkv_bits)  # no launch between it and its reader
    fused_attention(
        ints.q, ints.k, ints.v, index, q_scale=ints.q_scale, k_scale=ints.k_scale, keys_alike=ints.keys_alike,
        v_scale=ints.v_scale, ready=ints.ready, **softmax,
    )  # fmt: skip


def is_recordable(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, masks: Sequence[Pattern], softmax_bits: int, qkv_bits: int
) -> bool:
    """Return whether all that a call runs are kernels of the library, with no copy by torch."""
    if q.dtype not in REAL_DTYPES or q.shape[-1] not in _HEAD_DIMS or v.shape[-1] != q.shape[-1]:
        return False
    if not all(x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0 for x in (q, k, v)):
        return False
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous() or not _is_whole(bias, q)):
        return False
    return not kernel_obstacle(q, v, masks, softmax_bits, qkv_bits)


def _is_whole(bias: Tensor, q: Tensor) -> bool:
    """Whether a bias has one row, or one for each matrix."""
    return bias.shape[:-1].numel() == 1 or bias.shape[:-1] == q.shape[:-2]


class GpuAttention:
    """Attention at given masks for one kind of tensors and one set of options, checked before, by replayed launches."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, masks: Sequence[Pattern], softmax_bits: int,
        qkv_bits: int, scale: float, causal: bool, nan_for_empty: bool, with_lse: bool,
    ) -> None:  # fmt: skip
        self.masks, self._device, self._qkv_bits = tuple(masks), q.device, qkv_bits
        # torch makes one like it in half the time of one by numbers
        self._like = q.new_empty(1).expand(q.shape)  # (..., Lq, d)
        self._lse_like = q.new_empty(1, dtype=torch.float32).expand(q.shape[:-1]) if with_lse else None
        self._index = index_of(q.view(-1, *q.shape[-2:]), k.view(-1, *k.shape[-2:]), masks, causal)
        self._softmax = {"scale": scale, "softmax_bits": softmax_bits, "nan_for_empty": nan_for_empty}
        self._replays = Kept(_REPLAYS)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor | tuple[Tensor, Tensor] | None:
        """Return the result, (..., Lq, dv), and the log-sum-exp, (..., Lq), if the record is of calls with it.

        None where an address asks for a copy.
        """
        at = q.data_ptr(), k.data_ptr(), v.data_ptr(), 0 if bias is None else bias.data_ptr()
        if any(address % _ALIGNMENT for address in at):
            return None
        out, lse = torch.empty_like(self._like, memory_format=torch.contiguous_format), None
        if self._lse_like is not None:
            lse = torch.empty_like(self._lse_like, memory_format=torch.contiguous_format)
        addresses = *at, out.data_ptr(), 0 if lse is None else lse.data_ptr()
        self._replays.run(None, addresses, self._device, lambda: self._launch(q, k, v, bias, out, lse))
        return out if lse is None else (out, lse)

    def _launch(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor | None
    ) -> tuple[Tensor, ...]:
        q, k, v, out = (x.view(-1, *x.shape[-2:]) for x in (q, k, v, out))  # (N, L, d)
        lse = None if lse is None else lse.view(-1, lse.shape[-1])  # (N, Lq)
        if bias is not None:
            bias = bias.view(-1) if bias.shape[:-1].numel() == 1 else bias.view(-1, bias.shape[-1])  # (Lk,) or (N, Lk)
        launch(q, k, v, self._index, self._qkv_bits, bias=bias, out=out, lse=lse, **self._softmax)
        return ()
