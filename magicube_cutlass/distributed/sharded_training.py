"""Training of sparse layers that a parallel style has cut: a rank holds its part of the float master.

The forward pass is that of inference; the backward pass is straight-through, by integer products, as in one process.
Gradients of weights stay on their rank. Colwise: gradients of the input are summed over ranks. Rowwise: gradients of
the output are gathered if its tokens are cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from magicube_cutlass.autograd.integer import (
    STRIDE,
    _check_values,
    dense_of,
    gradient_of_bias,
    gradient_of_values,
    quantize_vectors,
    through_transpose,
    times,
    vectors_at,
)
from magicube_cutlass.autograd.once import once
from magicube_cutlass.distributed.collectives import all_reduce, chunk_bounds, gather, reduce_scatter, sizes_of
from magicube_cutlass.distributed.slices import Slices, largest, start_slices
from magicube_cutlass.formats.construct import Parts
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS


def quantized_part(weight: Tensor, pattern: Pattern, bits: int, rowwise: bool, mesh: Any) -> SRBCRS:
    """Return the integers of this rank's part of a master weight; for columns, rows have the amax of all ranks."""
    values = _check_values(vectors_at(weight.detach(), pattern), pattern)
    ints, scale = quantize_vectors(
        values, pattern, bits, (lambda top: all_reduce(top, "max", mesh)) if rowwise else None
    )
    return SRBCRS._from_parts(Parts(pattern, ints, scale), bits, True, STRIDE)


class Learn(torch.autograd.Function):
    """The product of a layer's part with local tokens, straight-through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: Any, shape: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.shape, ctx.matrix = layer, shape, layer.part.matrix
        ctx.dtypes = [None if each is None else each.dtype for each in (weight, bias)]
        y: Tensor = layer.style.compute(layer, x, shape)
        return y

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), layer = ctx.saved_tensors, ctx.layer
        run = _rowwise if layer.style.rowwise else _colwise
        g, tokens, of_x = run(layer, grads[0], x, ctx.shape, ctx.matrix, ctx.needs_input_grad[0])
        weight, bias = ctx.dtypes
        of_weight = of_bias = None
        if weight is not None and ctx.needs_input_grad[1]:
            columns = tokens.operand().mT  # (K, tokens)
            values = gradient_of_values(g, columns, ctx.matrix.pattern, layer.grad_bits)
            of_weight = dense_of(values, ctx.matrix.pattern).to(weight)
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = gradient_of_bias(g, bias)
        return of_x, of_weight, of_bias, None, None


Found = tuple[Tensor, Slices, Tensor | None]


def _colwise(layer: Any, grad: Tensor, x: Tensor, shape: Any, matrix: SRBCRS, needs_x: bool) -> Found:
    """Gradient (out_r, tokens) of this rank's outputs, all tokens, and the gradient of `x`."""
    mesh, style, bounds = layer.mesh, layer.style, layer.part.bounds
    rank, placement = mesh.get_local_rank(), style.input_layouts
    if not isinstance(style.output_layouts, Shard):
        grad = grad[..., bounds[rank] : bounds[rank + 1]]
    cut = isinstance(placement, Shard)
    dim = placement.dim % x.ndim if cut else 0
    first, whole = x.movedim(dim, 0), grad.movedim(dim, 0)  # (S_r, ..., K), (S, ..., out_r)
    tokens = layer.quantize(first.reshape(-1, x.shape[-1]))
    if cut:
        scale = tokens.scale if layer.act_scale is not None else None
        inner = first.shape[1:-1].numel()
        sizes = [size * inner for size in sizes_of(chunk_bounds(shape[dim], mesh.size()))]
        tokens = start_slices(tokens if scale is None else tokens._replace(scale=None), sizes, mesh)()
        tokens = tokens if scale is None else tokens._replace(scale=scale)
    g = whole.reshape(-1, whole.shape[-1]).mT
    if not needs_x:
        return g, tokens, None
    of_x = through_transpose(matrix, times(g, matrix.scale), x.dtype, layer.grad_bits).mT  # (tokens, K)
    of_x = of_x.reshape(*whole.shape[:-1], -1).contiguous()
    of_x = reduce_scatter(of_x, mesh) if cut else all_reduce(of_x, "sum", mesh)
    return g, tokens, of_x.movedim(0, dim)


def _rowwise(layer: Any, grad: Tensor, x: Tensor, shape: Any, matrix: SRBCRS, needs_x: bool) -> Found:
    """Gradient (out, tokens), this rank's inputs of all tokens, and the gradient of `x`."""
    mesh, style, bounds = layer.mesh, layer.style, layer.part.bounds
    rank, placement = mesh.get_local_rank(), style.output_layouts
    whole = not isinstance(style.input_layouts, Shard)
    local = x[..., bounds[rank] : bounds[rank + 1]] if whole else x
    if isinstance(placement, Shard):
        dim = placement.dim % x.ndim
        sizes = sizes_of(chunk_bounds(x.shape[dim], mesh.size()))
        grad = gather(grad.movedim(dim, 0), sizes, mesh).movedim(0, dim)
    rows = local.reshape(-1, local.shape[-1])
    tokens = layer.quantize(rows, None if layer.act_scale is not None else largest(rows, mesh))
    g = grad.reshape(-1, grad.shape[-1]).mT
    if not needs_x:
        return g, tokens, None
    of_x = through_transpose(matrix, times(g, matrix.scale), x.dtype, layer.grad_bits).mT.reshape(local.shape)
    if whole:
        of_x = gather(of_x.movedim(-1, 0), sizes_of(bounds), mesh).movedim(0, -1)
    return g, tokens, of_x
