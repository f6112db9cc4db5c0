"""Sparse attention on a CPU in one call of the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.cpu import extension
from cute_kernels.cpu.attention import (
    KEY_STEP,
    MAX_DIMS,
    MAX_TERMS,
    OPERAND_BITS,
    SOFTMAX_BITS,
    AttentionCall,
    AttentionPattern,
)
from magicube_cutlass.attention.unfused import heads_of
from magicube_cutlass.dispatch.plan import engine_index
from magicube_cutlass.formats.pattern import Pattern

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class CpuAttention:
    """Attention at given masks for one kind of tensors and one set of options, checked before."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, masks: Sequence[Pattern], softmax_bits: int,
        qkv_bits: int, scale: float, causal: bool, nan_for_empty: bool, with_lse: bool,
    ) -> None:  # fmt: skip
        self.masks, self._batch, self._with_lse = tuple(masks), q.shape[:-2], with_lse
        operands = [_readable(x) for x in (q, k, v)]
        self._is_plain = all(x is given for x, given in zip(operands, (q, k, v), strict=True))
        biases = 0 if bias is None else flat_bias(bias, self._batch).shape[0]
        pattern = _pattern_of(self.masks)
        self._lead = q.shape[:-2] if q.ndim > MAX_DIMS else None
        self._call = AttentionCall(
            operands[0], operands[1], operands[2], pattern, q.dtype, biases, qkv_bits, softmax_bits, scale, causal,
            math.nan if nan_for_empty else 0.0,
        )  # fmt: skip

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the result, (..., Lq, dv), and the log-sum-exp, (..., Lq), if the record is of calls with it."""
        if not self._is_plain:
            q, k, v = _readable(q), _readable(k), _readable(v)
        added = None if bias is None else flat_bias(bias, self._batch).contiguous()
        out, lse = self._call(q, k, v, added, self._with_lse)
        if self._lead is not None:
            out = out.view(*self._lead, *out.shape[-2:])
            lse = None if lse is None else lse.view(*self._lead, -1)
        return out if lse is None else (out, lse)


def _readable(x: Tensor) -> Tensor:
    """`x` as the engine reads it: float32, contiguous rows, few dimensions; a copy only if it is not."""
    x = x if x.dtype is torch.float32 else x.float()
    x = x if x.ndim <= MAX_DIMS else x.flatten(0, -MAX_DIMS)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _pattern_of(masks: tuple[Pattern, ...]) -> AttentionPattern:
    """What the engine reads of the masks; cached on the pattern that they form."""
    heads = heads_of(masks)
    pattern = heads.pattern
    found: AttentionPattern | None = pattern._cache.get("attention")
    if found is None:
        longest = int(pattern.row_lengths.max()) if pattern.vectors else 0
        index = engine_index(pattern, KEY_STEP)
        found = pattern._cache["attention"] = AttentionPattern(index, heads.blocks, pattern.vector_length, longest)
    return found


def flat_bias(bias: Tensor, batch: torch.Size) -> Tensor:
    """Return the bias as float32 (1, Lk), or (N, Lk) if it varies along the leading dimensions.

    Raises
    ------
    ValueError
        If it does not broadcast to `batch`.

    Examples
    --------
    >>> flat_bias(torch.zeros(3, 1, 5), torch.Size((3, 2))).shape
    torch.Size([6, 5])
    """
    if bias.shape[:-1].numel() == 1:
        return bias.to(torch.float32).reshape(1, -1)
    try:
        expanded = bias.expand(*batch, bias.shape[-1])
    except RuntimeError:
        raise ValueError(f"bias must broadcast to the leading dimensions {tuple(batch)} of q, got shape "
                         f"{tuple(bias.shape)}") from None  # fmt: skip
    return expanded.to(torch.float32).reshape(-1, bias.shape[-1])


def obstacle(q: Tensor, masks: Sequence[Pattern], softmax_bits: int, qkv_bits: int) -> str:
    """Return what the engine does not support in a call; empty if it supports it."""
    if extension.ENGINE is None:
        return "tensors on a CPU without the compiled engine"
    if q.dtype not in _DTYPES:
        return f"{q.dtype} on a CPU"
    if softmax_bits not in SOFTMAX_BITS or qkv_bits not in OPERAND_BITS:
        return f"softmax_bits={softmax_bits}, qkv_bits={qkv_bits} on a CPU, only 4 and 8"
    terms = max(q.shape[-1], *(mask.shape[1] for mask in masks))
    return f"sums of {terms} products on a CPU, at most {MAX_TERMS}" if terms > MAX_TERMS else ""
