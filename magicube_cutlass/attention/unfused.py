"""Sparse attention in three products, as Figure 16 of the paper has it, and its gradients in the same form.

Quantize Q, K and V; SDDMM with fused dequantization; sparse softmax with fused quantization; SpMM with fused
dequantization.  Every step is one launch for all matrices of the batch.
Source: Li, Osawa, Hoefler, SC'22, section V-C and figure 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.cpu.engine import DenseOperand
from cute_kernels.integers import fetch
from cute_kernels.operands import Probabilities
from magicube_cutlass.attention.block_diagonal import (
    BlockDiagonal,
    block_diagonal_matrix,
    concat_on_diagonal,
    repeat_on_diagonal,
    whole_rows,
)
from magicube_cutlass.attention.sparse_softmax import (
    Logits,
    block_rows,
    by_column,
    product_config,
    product_copy,
    quantized_softmax,
    row_max,
    softmax_for_product,
)
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.ops.sddmm import sddmm
from magicube_cutlass.ops.spmm import spmm
from magicube_cutlass.quantization.quant_tensor import QuantTensor
from magicube_cutlass.quantization.quantize import quantize

STRIDE = 32
_GRAD_BITS = 16


class Heads(NamedTuple):
    """The pattern that the products run on, and how the batch's matrices lie on it."""

    pattern: Pattern  # (blocks * queries, blocks * keys): one mask, or those of the heads on the diagonal
    blocks: int  # masks on the diagonal
    queries: int  # rows of each, whole vector rows
    keys: int


class Options(NamedTuple):
    """What does not depend on the tensors."""

    softmax_bits: int
    qkv_bits: int
    scale: float
    causal: bool
    nan_for_empty: bool
    out_dtype: torch.dtype


_GPU_SOURCES = (torch.float16, torch.bfloat16, torch.float32)


class Operands(NamedTuple):
    """Integers of Q (n, blocks * queries, d), K and V (n, blocks * keys, d); n matrices of the pattern.

    Q and K have a scale for each row, V (n * blocks,) ones: a scale that varies along a sum cannot leave it.
    """

    q: QuantTensor
    k: QuantTensor
    v: Tensor  # storage form, (n * blocks * keys, width)
    v_scale: Tensor


def heads_of(masks: Sequence[Pattern]) -> Heads:
    """Where the matrices of a batch lie, of which each follows one of ``masks`` in turn; cached on the first one."""
    first = masks[0]
    if len(masks) == 1:
        pattern = whole_rows(first)
        return Heads(pattern, 1, *pattern.shape)
    key = ("heads", *map(id, masks[1:]))
    if key not in first._cache:
        rows = first.vector_rows * first.vector_length
        heads = Heads(concat_on_diagonal(masks), len(masks), rows, first.shape[1])
        first._cache[key] = (masks[1:], heads)  # holds the masks, so that no other one takes their ids
    found: Heads = first._cache[key][1]
    return found


def quantize_rows(x: Tensor, bits: int) -> QuantTensor:
    """One scale a row; inf or nan in a row makes its scale NaN, and so the row of whatever it meets."""
    return quantize(x, bits, axis=1, nonfinite="propagate")


def quantize_both(q: Tensor, k: Tensor, bits: int, factor: float = 1.0) -> tuple[QuantTensor, QuantTensor]:
    """:func:`quantize_rows` of two tensors, the first one's scales times ``factor``; on a GPU in one launch."""
    plain = all(x.is_cuda and x.dtype in _GPU_SOURCES and x.numel() and x.stride(-1) == 1 for x in (q, k))
    if not plain:
        return _scaled(quantize_rows(q, bits), factor), quantize_rows(k, bits)
    from cute_kernels.convert.quantize import quantize_rows_of_two

    found = quantize_rows_of_two(q.detach(), k.detach(), bits=bits, factor=factor)
    left, right = (
        QuantTensor(data, scale, bits, True, 1, x.shape) for x, (data, scale) in zip((q, k), found, strict=True)
    )
    return left, right


def _width(d: int, bits: int) -> int:
    """Integers a row of V: no byte may hold 4-bit ones of two rows."""
    return d + d % 2 if bits == 4 else d


def quantize_matrices(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """One scale for each matrix of (n, L, d): integers (n * L, width) in storage form and scales (n,)."""
    width = _width(x.shape[-1], bits)
    if width != x.shape[-1]:
        x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    n, rows, d = x.shape
    found = quantize(x.reshape(n, rows * d), bits, axis=1, nonfinite="propagate")
    assert found.scale is not None
    return found.data.view(n * rows, d // 2 if bits == 4 else d), found.scale.view(n)


def _filled(x: Tensor, heads: Heads, rows: int) -> Tensor:
    """(N, L, d) as (n, blocks * rows, d), filled up with rows of zeros."""
    if x.shape[1] != rows:
        x = torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[1]))
    return x.reshape(x.shape[0] // heads.blocks, heads.blocks * rows, x.shape[2])


def _operands(q: Tensor, k: Tensor, v: Tensor, heads: Heads, bits: int, factor: float = 1.0) -> Operands:
    """Q comes times ``factor``."""
    ints, scales = quantize_matrices(v, bits)
    left, right = quantize_both(_filled(q, heads, heads.queries), _filled(k, heads, heads.keys), bits, factor)
    return Operands(left, right, ints, scales)


def _logits_at(heads: Heads, options: Options, bias: Tensor | None) -> Logits:
    """``bias``: (N, keys) float32, or (1, keys) for all."""
    if bias is not None:
        if bias.shape[0] == 1 and heads.blocks > 1:
            bias = bias.expand(heads.blocks, -1)
        bias = bias.reshape(-1, heads.blocks * heads.keys)
        bias = bias[0].contiguous() if bias.shape[0] == 1 else bias.contiguous()
    return Logits(heads.pattern, STRIDE, (heads.queries, heads.keys), 1.0, bias, options.causal)


def _scaled(q: QuantTensor, factor: float) -> QuantTensor:
    assert q.scale is not None
    return QuantTensor(q.data, q.scale * factor, q.bits, q.signed, q.axis, q.shape)


def _scores(q: QuantTensor, k: QuantTensor, heads: Heads, dtype: torch.dtype) -> Tensor:
    """``Q K^T`` at the pattern, (n, blocks, V, STRIDE); Q's scale holds that of the scores, so that float16 does."""
    return sddmm(q, k, heads.pattern, out_dtype=dtype).values


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, heads: Heads, options: Options, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention of (N, L, d) tensors, matrix i on mask ``i % blocks``: (N, queries, d) and log-sum-exp (N, queries).

    Requires N to be a multiple of ``blocks``, and no dimension of zero.
    """
    operands = _operands(q, k, v, heads, options.qkv_bits, options.scale)
    s = _scores(operands.q, operands.k, heads, torch.float16)
    at = _logits_at(heads, options, bias)
    found = repeat_on_diagonal(heads.pattern, STRIDE, s.shape[0])
    d = _width(v.shape[2], options.qkv_bits)
    weigh = softmax_and_spmm_gpu if s.is_cuda and s.numel() else softmax_and_spmm
    out, p = weigh(s, at, found, operands, heads, options, d, lse)
    out = out.view(-1, heads.queries, d)[..., : v.shape[2]]
    return out, None if p.lse is None else p.lse.view(-1, heads.queries)


def softmax_and_spmm(
    s: Tensor, at: Logits, found: BlockDiagonal, operands: Operands, heads: Heads, options: Options, d: int, lse: bool
) -> tuple[Tensor, Probabilities]:
    """The softmax of ``s``, and its product with V, (rows, d)."""
    p = quantized_softmax(s, at, options.softmax_bits, nan_for_empty=options.nan_for_empty, lse=lse)
    factors = p.scale.view(len(operands.v_scale), heads.queries) * operands.v_scale[:, None]
    matrix = block_diagonal_matrix(found, STRIDE, p.values, factors.view(-1, 1), options.softmax_bits, False)
    shape = torch.Size((operands.v.shape[0], d))
    dense = QuantTensor(operands.v, None, options.qkv_bits, True, None, shape)
    return spmm(matrix, dense, out_dtype=options.out_dtype), p


def softmax_and_spmm_gpu(
    s: Tensor, at: Logits, found: BlockDiagonal, operands: Operands, heads: Heads, options: Options, d: int, lse: bool
) -> tuple[Tensor, Probabilities]:
    """As :func:`softmax_and_spmm`, the softmax written in the order that the product reads."""
    from cute_kernels.spmm.heuristics import register_config
    from magicube_cutlass.dispatch import cuda as gpu

    config = product_config(found, options.softmax_bits, (options.qkv_bits, True), d, options.out_dtype)
    p = softmax_for_product(s, at, config, operands.v_scale, nan_for_empty=options.nan_for_empty, lse=lse)
    out = torch.empty(found.pattern.shape[0], d, dtype=options.out_dtype, device=s.device)
    dense = DenseOperand(operands.v, options.qkv_bits, True, -2, -1)
    copy, name = product_copy(found, STRIDE, p.values), register_config(config).name
    gpu.spmm(name, copy, dense, operands.v.shape[0], out, p.scale.view(-1), None, None, pdl=True)
    return out, p


class Gradients(NamedTuple):
    """float32, of the inputs of :func:`forward`."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor  # (N, keys)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    heads: Heads,
    options: Options,
    grad: Tensor,
    grad_lse: Tensor | None,
) -> Gradients:
    """The gradients at the quantized values, each rounding taken for the identity (straight-through).

    With P and S computed anew, ``dV = P^T dO``, ``dP = dO V^T`` at the mask, ``dS = P (dP - rowsum(dP P))``,
    ``dQ = scale dS K`` and ``dK = scale dS^T Q``: SDDMM and SpMM with what is new quantized to 16 bits.
    ``grad``: (N, queries, d); ``grad_lse``: (N, queries) or None.
    """
    operands = _operands(q, k, v, heads, options.qkv_bits)
    at = _logits_at(heads, options, bias)
    s = _scores(_scaled(operands.q, options.scale), operands.k, heads, torch.float16)
    pattern, copies = heads.pattern, s.shape[0]
    p = _real(quantized_softmax(s, at, options.softmax_bits, nan_for_empty=False, lse=False), s.shape, at, options)
    rows = block_rows(pattern, STRIDE)
    d = _width(v.shape[2], options.qkv_bits)
    grad = torch.nn.functional.pad(grad.float(), (0, d - v.shape[2]))
    g = quantize_rows(_filled(grad, heads, heads.queries), _GRAD_BITS)
    v_rows = operands.v_scale.repeat_interleave(heads.keys).view(copies, -1, 1)
    dense = QuantTensor(operands.v.view(copies, -1, operands.v.shape[1]), v_rows, options.qkv_bits, True, 1,
                        torch.Size((copies, heads.blocks * heads.keys, d)))  # fmt: skip
    dp = sddmm(g, dense, pattern, out_dtype=torch.float32).values
    inner = _row_sums((dp * p).sum(-1), rows, pattern)
    if grad_lse is not None:
        inner = inner - _filled(grad_lse.float().unsqueeze(-1), heads, heads.queries).view_as(inner)
    ds = p * (dp - inner[:, rows, :, None])
    columns = pattern.padded(STRIDE).col_indices.clamp(min=0).long()
    bias_grad = ds.new_zeros(copies, pattern.shape[1]).index_add_(1, columns, ds.sum(2).flatten(1))
    ds = ds * options.scale
    n = q.shape[0]
    return Gradients(
        _product(ds, pattern, operands.k).view(n, heads.queries, -1)[:, : q.shape[1]],
        _product(*_transposed(ds, pattern), operands.q).reshape(n, heads.keys, -1),
        _product(*_transposed(p, pattern), g).reshape(n, heads.keys, -1)[..., : v.shape[2]],
        bias_grad.view(n, heads.keys),
    )


def _real(p: Probabilities, shape: torch.Size, at: Logits, options: Options) -> Tensor:
    """The probabilities as float32 (n, blocks, V, STRIDE)."""
    ints = fetch(p.values, STRIDE, options.softmax_bits, False)
    if ints.dtype == torch.uint16:  # of which torch knows little on a GPU
        ints = ints.view(torch.int16).to(torch.int32) & 0xFFFF
    scale = p.scale.view(shape[0], -1, shape[2])[:, block_rows(at.pattern, STRIDE), :, None]
    return ints.view(shape).to(torch.float32) * scale


def _row_sums(per_block: Tensor, rows: Tensor, pattern: Pattern) -> Tensor:
    """(n, blocks, V) summed over each vector row: (n, R, V)."""
    sums = per_block.new_zeros(per_block.shape[0], pattern.vector_rows, pattern.vector_length)
    return sums.index_add_(1, rows, per_block)


def _transposed(values: Tensor, pattern: Pattern) -> tuple[Tensor, Pattern]:
    """SR-BCRS values of the transpose and their pattern, whose structure is derived once."""
    padded = pattern.padded(STRIDE)
    matrix = SRBCRS(padded.row_start, padded.row_end, padded.col_indices, values, shape=pattern.shape,
                    vector_length=pattern.vector_length, bits=None, stride=STRIDE)  # fmt: skip
    matrix._cache["pattern"] = pattern
    turned = matrix.transpose()
    return turned.values, turned.pattern


def _product(values: Tensor, pattern: Pattern, dense: QuantTensor) -> Tensor:
    """Float values (n, blocks, V, STRIDE) on ``pattern`` times ``dense``, (n, K, d) with a scale for each row.

    The scales go into the values, which are then quantized to 16 bits, a row at a time.  Returns float32 (n, M, d).
    """
    assert dense.scale is not None
    copies, rows = values.shape[0], block_rows(pattern, STRIDE)
    columns = pattern.padded(STRIDE).col_indices.view(-1, STRIDE)
    # A row of zeros has the scale 1, next to which what is folded with other rows' scales would be rounded away.
    factors = dense.scale.to(torch.float32) * dense.data.ne(0).any(-1, keepdim=True)
    folded = values * by_column(factors.view(copies, -1), columns)
    top = row_max(folded.abs(), rows, folded.new_zeros(copies, pattern.vector_rows, pattern.vector_length))
    high = (1 << (_GRAD_BITS - 1)) - 1
    scale = torch.where(top == 0, 1.0, top / high)
    ints = torch.round(torch.nan_to_num(folded / scale[:, rows, :, None], nan=0.0)).to(torch.int16)
    found = repeat_on_diagonal(pattern, STRIDE, copies)
    scales = scale.view(-1, 1)[: found.pattern.shape[0]]
    matrix = block_diagonal_matrix(found, STRIDE, ints.flatten(0, 1), scales, _GRAD_BITS, True)
    shape = torch.Size((copies * dense.shape[1], dense.shape[2]))
    stacked = QuantTensor(dense.data.reshape(shape[0], -1), None, dense.bits, dense.signed, None, shape)
    out = spmm(matrix, stacked, out_dtype=torch.float32)
    return out.view(copies, -1, dense.shape[2])[:, : pattern.shape[0]]
