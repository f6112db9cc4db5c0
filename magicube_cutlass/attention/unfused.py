"""Unfused sparse attention: the three products of figure 16, and the gradients in the same form.

Quantize Q, K and V; SDDMM with fused dequantization; sparse softmax with fused quantization; SpMM with fused
dequantization. Every step is one launch for all matrices of the batch.

References
----------
.. [1] Li, Osawa, Hoefler, SC'22, section V-C and figure 16.
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
    pad_to_vector_rows,
    repeat_on_diagonal,
)
from magicube_cutlass.attention.softmax import (
    Logits,
    block_rows,
    by_column,
    packed_probabilities,
    product_config,
    quantized_softmax,
    row_max,
    softmax_for_product,
)
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.ops.sddmm import early_sddmm, sddmm
from magicube_cutlass.ops.spmm import spmm
from magicube_cutlass.quantization.quant_tensor import QuantTensor
from magicube_cutlass.quantization.quantize import quantize

STRIDE = 32
_GRAD_BITS = 16


class Heads(NamedTuple):
    """Pattern of the products, and the sizes of the matrices on it."""

    pattern: Pattern  # (blocks * queries, blocks * keys): one mask, or the masks of the heads on the diagonal
    blocks: int  # masks on the diagonal
    queries: int  # rows per mask, a multiple of the vector length
    keys: int


class Options(NamedTuple):
    """Options of a call that do not depend on the tensors."""

    softmax_bits: int
    qkv_bits: int
    scale: float
    causal: bool
    nan_for_empty: bool
    out_dtype: torch.dtype


_GPU_SOURCES = (torch.float16, torch.bfloat16, torch.float32)


class Operands(NamedTuple):
    """Quantized Q, K and V of n matrices of the pattern.

    Q and K have per-row scales. V has one scale per mask, since a scale must be constant along the sum over keys.
    """

    q: QuantTensor  # (n, blocks * queries, d)
    k: QuantTensor  # (n, blocks * keys, d)
    v: Tensor  # (n * blocks * keys, width), storage form
    v_scale: Tensor  # (n * blocks,) float32


def heads_of(masks: Sequence[Pattern]) -> Heads:
    """Return the layout of a batch whose matrix ``i`` uses mask ``i % len(masks)``; cached on the first mask.

    Examples
    --------
    >>> import magicube_cutlass as mc
    >>> heads_of([mc.random_pattern(13, 20, 0.5, 8), mc.random_pattern(13, 20, 0.5, 8)])[1:]
    (2, 16, 20)
    """
    first = masks[0]
    if len(masks) == 1:
        pattern = pad_to_vector_rows(first)
        return Heads(pattern, 1, *pattern.shape)
    key = ("heads", *[mask._version_id for mask in masks[1:]])
    if key not in first._cache:
        rows = first.vector_rows * first.vector_length
        heads = Heads(concat_on_diagonal(masks), len(masks), rows, first.shape[1])
        first._cache[key] = heads
    cached: Heads = first._cache[key]
    return cached


def quantize_rows(x: Tensor, bits: int) -> QuantTensor:
    """Quantize with per-row scales; the scale of a non-finite row is NaN, and so are the results it enters."""
    return quantize(x, bits, "row", nonfinite="propagate")


def quantize_q_and_k(q: Tensor, k: Tensor, bits: int, q_factor: float = 1.0) -> tuple[QuantTensor, QuantTensor]:
    """Run :func:`quantize_rows` on two tensors, on a GPU in one launch, with the scales of `q` times `q_factor`."""
    plain = all(x.is_cuda and x.dtype in _GPU_SOURCES and x.numel() and x.stride(-1) == 1 for x in (q, k))
    if not plain:
        return _rescaled(quantize_rows(q, bits), q_factor), quantize_rows(k, bits)
    from cute_kernels.convert.quantize import quantize_rows_of_two

    pairs = quantize_rows_of_two(q.detach(), k.detach(), bits=bits, factor=q_factor)
    left, right = (
        QuantTensor(data, scale, bits, True, 1, x.shape) for x, (data, scale) in zip((q, k), pairs, strict=True)
    )
    return left, right


def _width(d: int, bits: int) -> int:
    """Integers per row of V: even for 4 bits, so that no byte holds integers of two rows."""
    return d + d % 2 if bits == 4 else d


def quantize_matrices(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize with per-matrix scales.

    Parameters
    ----------
    x : Tensor, shape (n, L, d)
        Floats.
    bits : int
        Width of the integers.

    Returns
    -------
    data : Tensor, shape (n * L, width)
        Storage form; d is padded to an even number for 4 bits.
    scale : Tensor, shape (n,)
        float32.

    Examples
    --------
    >>> data, scale = quantize_matrices(torch.ones(2, 4, 3), 4)
    >>> data.shape, scale.shape
    (torch.Size([8, 2]), torch.Size([2]))
    """
    width = _width(x.shape[-1], bits)
    if width != x.shape[-1]:
        x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    n, rows, d = x.shape
    q = quantize(x.reshape(n, rows * d), bits, "row", nonfinite="propagate")
    assert q.scale is not None
    return q.data.view(n * rows, d // 2 if bits == 4 else d), q.scale.view(n)


def _padded_rows(x: Tensor, heads: Heads, rows: int) -> Tensor:
    """View (N, L, d) as (n, blocks * rows, d), padded with rows of zeros."""
    if x.shape[1] != rows:
        x = torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[1]))
    return x.reshape(x.shape[0] // heads.blocks, heads.blocks * rows, x.shape[2])


def _operands(q: Tensor, k: Tensor, v: Tensor, heads: Heads, bits: int, q_factor: float = 1.0) -> Operands:
    """Quantize Q, K and V; the scales of Q are multiplied by `q_factor`."""
    ints, scales = quantize_matrices(v, bits)
    left, right = quantize_q_and_k(
        _padded_rows(q, heads, heads.queries), _padded_rows(k, heads, heads.keys), bits, q_factor
    )
    return Operands(left, right, ints, scales)


def _logits(heads: Heads, options: Options, bias: Tensor | None) -> Logits:
    """Logits of a call; `bias` is (N, keys) float32, or (1, keys) for all."""
    if bias is not None:
        if bias.shape[0] == 1 and heads.blocks > 1:
            bias = bias.expand(heads.blocks, -1)
        bias = bias.reshape(-1, heads.blocks * heads.keys)
        bias = bias[0].contiguous() if bias.shape[0] == 1 else bias.contiguous()
    return Logits(heads.pattern, STRIDE, (heads.queries, heads.keys), 1.0, bias, options.causal)


def _rescaled(q: QuantTensor, factor: float) -> QuantTensor:
    """`q` with its scale multiplied by `factor`."""
    assert q.scale is not None
    return QuantTensor(q.data, q.scale * factor, q.bits, q.signed, q.axis, q.shape)


def _scores(q: QuantTensor, k: QuantTensor, heads: Heads, dtype: torch.dtype) -> Tensor:
    """``Q K^T`` at the pattern, (n, blocks, V, STRIDE); the scale of Q includes that of the logits, to fit float16."""
    return early_sddmm(q, k, heads.pattern, out_dtype=dtype).values


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, heads: Heads, options: Options, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute sparse attention by SDDMM, softmax and SpMM.

    Parameters
    ----------
    q, k, v : Tensor, shape (N, L, d)
        Floats, no dimension of zero; N is a multiple of ``heads.blocks``, matrix ``i`` uses mask ``i % blocks``.
    bias : Tensor, shape (N, keys) or (1, keys), optional
        float32.
    heads : Heads
        Layout of the batch.
    options : Options
        Other arguments of the call.
    lse : bool
        Return the log-sum-exp.

    Returns
    -------
    out : Tensor, shape (N, queries, d)
        Dtype ``options.out_dtype``.
    lse : Tensor, shape (N, queries), or None
        float32.
    """
    operands = _operands(q, k, v, heads, options.qkv_bits, options.scale)
    s = _scores(operands.q, operands.k, heads, torch.float16)
    at = _logits(heads, options, bias)
    diagonal = repeat_on_diagonal(heads.pattern, STRIDE, s.shape[0])
    d = _width(v.shape[2], options.qkv_bits)
    run = softmax_and_spmm_gpu if s.is_cuda and s.numel() else softmax_and_spmm
    out, p = run(s, at, diagonal, operands, heads, options, d, lse)
    out = out.view(-1, heads.queries, d)[..., : v.shape[2]]
    return out, None if p.lse is None else p.lse.view(-1, heads.queries)


def softmax_and_spmm(
    s: Tensor,
    at: Logits,
    diagonal: BlockDiagonal,
    operands: Operands,
    heads: Heads,
    options: Options,
    d: int,
    lse: bool,
) -> tuple[Tensor, Probabilities]:
    """Compute the softmax of `s`, and its product with V, (rows, d)."""
    p = quantized_softmax(s, at, options.softmax_bits, nan_for_empty=options.nan_for_empty, lse=lse)
    row_scale = p.scale.view(len(operands.v_scale), heads.queries) * operands.v_scale[:, None]
    matrix = block_diagonal_matrix(diagonal, STRIDE, p.values, row_scale.view(-1, 1), options.softmax_bits, False)
    shape = torch.Size((operands.v.shape[0], d))
    dense = QuantTensor(operands.v, None, options.qkv_bits, True, None, shape)
    return spmm(matrix, dense, out_dtype=options.out_dtype), p


def softmax_and_spmm_gpu(
    s: Tensor,
    at: Logits,
    diagonal: BlockDiagonal,
    operands: Operands,
    heads: Heads,
    options: Options,
    d: int,
    lse: bool,
) -> tuple[Tensor, Probabilities]:
    """Run :func:`softmax_and_spmm` on a GPU; the softmax kernel writes the fragment order of the SpMM."""
    from magicube_cutlass.dispatch import cuda as gpu

    config = product_config(diagonal, options.softmax_bits, (options.qkv_bits, True), d, options.out_dtype)
    p = softmax_for_product(s, at, config, operands.v_scale, nan_for_empty=options.nan_for_empty, lse=lse)
    out = torch.empty(diagonal.pattern.shape[0], d, dtype=options.out_dtype, device=s.device)
    dense = DenseOperand(operands.v, options.qkv_bits, True, -2, -1)
    packed = packed_probabilities(diagonal, STRIDE, p.values)
    gpu.spmm(config.name, packed, dense, operands.v.shape[0], out, p.scale.view(-1), None, None, pdl=True)
    return out, p


class Gradients(NamedTuple):
    """Gradients of the inputs of :func:`forward`, float32."""

    q: Tensor  # (N, Lq, d)
    k: Tensor  # (N, Lk, d)
    v: Tensor  # (N, Lk, dv)
    bias: Tensor  # (N, Lk)


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
    """Compute the gradients of :func:`forward` at the quantized values (straight-through).

    With P and S recomputed, ``dV = P^T dO``, ``dP = dO V^T`` at the mask, ``dS = P (dP - rowsum(dP P))``,
    ``dQ = scale dS K`` and ``dK = scale dS^T Q``: SDDMM and SpMM, with dO, P and dS quantized to 16 bits.

    Parameters
    ----------
    q, k, v, bias, heads, options
        As for :func:`forward`.
    grad : Tensor, shape (N, queries, d)
        Gradient of the output.
    grad_lse : Tensor, shape (N, queries), optional
        Gradient of the log-sum-exp.

    Returns
    -------
    Gradients
    """
    operands = _operands(q, k, v, heads, options.qkv_bits)
    at = _logits(heads, options, bias)
    s = _scores(_rescaled(operands.q, options.scale), operands.k, heads, torch.float16)
    pattern, copies = heads.pattern, s.shape[0]
    quantized = quantized_softmax(s, at, options.softmax_bits, nan_for_empty=False, lse=False)
    p = _dequantized(quantized, s.shape, at, options)  # (copies, blocks, V, STRIDE) float32
    rows = block_rows(pattern, STRIDE)
    d = _width(v.shape[2], options.qkv_bits)
    grad = torch.nn.functional.pad(grad.float(), (0, d - v.shape[2]))
    g = quantize_rows(_padded_rows(grad, heads, heads.queries), _GRAD_BITS)
    v_rows = operands.v_scale.repeat_interleave(heads.keys).view(copies, -1, 1)
    dense = QuantTensor(operands.v.view(copies, -1, operands.v.shape[1]), v_rows, options.qkv_bits, True, 1,
                        torch.Size((copies, heads.blocks * heads.keys, d)))  # fmt: skip
    dp = sddmm(g, dense, pattern, out_dtype=torch.float32).values
    inner = _row_sums((dp * p).sum(-1), rows, pattern)
    if grad_lse is not None:
        inner = inner - _padded_rows(grad_lse.float().unsqueeze(-1), heads, heads.queries).view_as(inner)
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


def _dequantized(p: Probabilities, shape: torch.Size, at: Logits, options: Options) -> Tensor:
    """Probabilities as float32 (n, blocks, V, STRIDE)."""
    ints = fetch(p.values, STRIDE, options.softmax_bits, False)
    if ints.dtype == torch.uint16:  # torch has few uint16 operators on a GPU
        ints = ints.view(torch.int16).to(torch.int32) & 0xFFFF
    scale = p.scale.view(shape[0], -1, shape[2])[:, block_rows(at.pattern, STRIDE), :, None]
    return ints.view(shape).to(torch.float32) * scale


def _row_sums(per_block: Tensor, rows: Tensor, pattern: Pattern) -> Tensor:
    """Sum (n, blocks, V) over each vector row: (n, R, V)."""
    sums = per_block.new_zeros(per_block.shape[0], pattern.vector_rows, pattern.vector_length)
    return sums.index_add_(1, rows, per_block)


def _transposed(values: Tensor, pattern: Pattern) -> tuple[Tensor, Pattern]:
    """SR-BCRS values of the transpose, and its pattern, whose structure is cached."""
    padded = pattern.padded(STRIDE)
    matrix = SRBCRS(padded.row_start, padded.row_end, padded.col_indices, values, shape=pattern.shape,
                    vector_length=pattern.vector_length, bits=None, stride=STRIDE)  # fmt: skip
    matrix._cache["pattern"] = pattern
    transposed = matrix._trust().transpose()
    return transposed.values, transposed.pattern


def _product(values: Tensor, pattern: Pattern, dense: QuantTensor) -> Tensor:
    """Product of float values (n, blocks, V, STRIDE) on `pattern` and `dense` (n, K, d) with row scales.

    The scales are folded into the values, which are then quantized per row to 16 bits. Returns float32 (n, M, d).
    """
    assert dense.scale is not None
    copies, rows = values.shape[0], block_rows(pattern, STRIDE)
    columns = pattern.padded(STRIDE).col_indices.view(-1, STRIDE)
    # A row of zeros has scale 1. Folded in, it could exceed the other values, which would then be rounded to zero.
    row_scale = dense.scale.to(torch.float32) * dense.data.ne(0).any(-1, keepdim=True)
    folded = values * by_column(row_scale.view(copies, -1), columns)
    absmax = row_max(folded.abs(), rows, folded.new_zeros(copies, pattern.vector_rows, pattern.vector_length))
    largest = (1 << (_GRAD_BITS - 1)) - 1
    scale = torch.where(absmax == 0, 1.0, absmax / largest)
    ints = torch.round(torch.nan_to_num(folded / scale[:, rows, :, None], nan=0.0)).to(torch.int16)
    diagonal = repeat_on_diagonal(pattern, STRIDE, copies)
    scales = scale.view(-1, 1)[: diagonal.pattern.shape[0]]
    matrix = block_diagonal_matrix(diagonal, STRIDE, ints.flatten(0, 1), scales, _GRAD_BITS, True)
    shape = torch.Size((copies * dense.shape[1], dense.shape[2]))
    concatenated = QuantTensor(dense.data.reshape(shape[0], -1), None, dense.bits, dense.signed, None, shape)
    out = spmm(matrix, concatenated, out_dtype=torch.float32)
    return out.view(copies, -1, dense.shape[2])[:, : pattern.shape[0]]
