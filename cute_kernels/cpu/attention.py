"""Prepared calls of sparse attention in one pass of the engine, from floats to floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.cpu import extension
from cute_kernels.cpu.arguments import OUT_TYPES
from cute_kernels.cpu.calls import template

KEY_STEP = 32  # stride of the pattern
OPERAND_BITS = SOFTMAX_BITS = (4, 8)
MAX_TERMS = 32768  # products that the engine sums in 32 bits: of the depth, and of the keys of a query
MAX_DIMS = 4


@dataclass(frozen=True)
class AttentionPattern:
    """Patterns of an attention, with consecutive rows and keys; matrix i of a batch uses pattern ``i % patterns``."""

    index: Sequence[Tensor]  # row_start and row_end (patterns * R,) int64, columns (padded vectors,) int32
    patterns: int
    vector_length: int
    longest: int  # most vectors of a vector row


class AttentionCall:
    """``softmax(scale Q K^T + bias) V`` at the keys of a pattern, with quantized operands and weights.

    Integers and scales are those of separate steps: rows of Q and K and matrices of V are quantized, an SDDMM writes
    float16, the softmax is quantized. A call checks nothing.

    Parameters
    ----------
    q, k, v : Tensor, shape (..., Lq, d), (..., Lk, d) and (..., Lk, dv)
        Examples, float32 with contiguous rows, of at most :data:`MAX_DIMS` dimensions. The tensors of a call must have
        the same shapes and strides.
    pattern : AttentionPattern
        Padded to :data:`KEY_STEP`.
    out_dtype : torch.dtype
        float32, float16 or bfloat16.
    biases : int
        Rows of the bias of a call: 0, 1 or one per matrix.
    operand_bits, softmax_bits : int
        Widths: 4 or 8.
    scale : float
        Of the logits.
    causal : bool
        Exclude keys behind the query.
    empty : float
        Result of a query without keys: 0 or NaN.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, out_dtype: torch.dtype, biases: int,
        operand_bits: int, softmax_bits: int, scale: float, causal: bool, empty: float,
    ) -> None:  # fmt: skip
        engine = extension.load_extension()
        (queries, depth), (keys, width), batch = q.shape[-2:], v.shape[-2:], q.shape[:-2]
        self._pattern = pattern  # keeps the memory that the engine reads
        self._out = template((*batch, queries, width), out_dtype)
        self._lse = template((*batch, queries), torch.float32)
        start, end, columns = pattern.index
        self._prepared = engine.Attention(
            *map(_steps, (q, k, v)), start.data_ptr(), end.data_ptr(), columns.data_ptr(), keys if biases > 1 else 0,
            OUT_TYPES[out_dtype], batch.numel(), batch[-1] if batch else 1, pattern.patterns, queries, keys, depth,
            width, columns.numel(), pattern.longest, pattern.vector_length, operand_bits, softmax_bits, scale,
            math.nan if math.isnan(empty) else 1.0, causal,
        )  # fmt: skip
        self._attention = engine.attention

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the result, (..., Lq, dv), and the log-sum-exp, (..., Lq); `bias`: (biases, Lk), contiguous."""
        out = torch.empty_like(self._out, memory_format=torch.contiguous_format)
        lse = torch.empty_like(self._lse, memory_format=torch.contiguous_format) if with_lse else None
        self._attention(
            self._prepared, q.data_ptr(), k.data_ptr(), v.data_ptr(), 0 if bias is None else bias.data_ptr(),
            out.data_ptr(), 0 if lse is None else lse.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out, lse


def _steps(x: Tensor) -> tuple[int, int, int]:
    """Memory strides of the batch dimensions and of the rows of (L, d), (heads, L, d) or (groups, heads, L, d)."""
    group, head = (0, 0, *x.stride()[:-2])[-2:]
    return group, head, x.stride(-2)
