"""Gradients of the float products: the same products backward as forward, on unquantized values.

Part of :mod:`magicube_cutlass.autograd` for matrices and operands of floats.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.dtypes import FLOAT_DTYPES, HALF_DTYPES
from magicube_cutlass.autograd.once import once
from magicube_cutlass.dispatch.plan import transposed
from magicube_cutlass.formats.construct import transpose_parts
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.ops import sddmm as sddmm_op
from magicube_cutlass.ops import spmm as spmm_op


def check_float16_like(**tensors: Tensor) -> None:
    """Raise `TypeError` unless the operands are float16 or bfloat16."""
    known = [FLOAT_DTYPES[name] for name in HALF_DTYPES]
    for name, x in tensors.items():
        if x.dtype not in known:
            raise TypeError(f"{name} must be float16 or bfloat16 for a product of floats, got {x.dtype}")


class Spmm(torch.autograd.Function):
    """``C = A x + bias[:, None]``; `values` (vectors, V) get the gradient of A."""

    @staticmethod
    def forward(ctx: Any, values: Tensor | None, x: Tensor, bias: Tensor | None, matrix: SRBCRS) -> Tensor:
        ctx.save_for_backward(x, matrix.scale)
        ctx.matrix, ctx.dtypes = matrix, [None if each is None else each.dtype for each in (values, bias)]
        return spmm_op.spmm(matrix, x, out_dtype=x.dtype, bias=None if bias is None else bias.detach())

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of values, x and bias."""
        g = grads[0].contiguous()  # (*batch, M, N)
        x, scale = ctx.saved_tensors
        of_values, of_x, of_bias = None, None, None
        if ctx.needs_input_grad[0]:
            found = sddmm_op.sddmm(g, x, ctx.matrix.pattern, out_dtype=torch.float32).vectors()  # (*batch, vectors, V)
            of_values = found.reshape(-1, *found.shape[-2:]).sum(0).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            folded = g if scale is None else (g * scale).to(g.dtype)
            of_x = spmm_op.spmm(transposed(ctx.matrix), folded, out_dtype=x.dtype)  # (*batch, K, N)
        if ctx.needs_input_grad[2]:
            of_bias = g.float().sum(-1).reshape(-1, g.shape[-2]).sum(0).to(ctx.dtypes[1])
        return of_values, of_x, of_bias, None


class Sddmm(torch.autograd.Function):
    """``S = x y^T`` at a pattern, as values (..., vectors, V)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, pattern: Pattern) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.pattern = pattern
        return sddmm_op.sddmm(x, y, pattern, out_dtype=x.dtype).vectors()

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and y."""
        g, pattern = grads[0], ctx.pattern  # (*batch, vectors, V)
        x, y = ctx.saved_tensors
        of_x, of_y = None, None
        if ctx.needs_input_grad[0]:
            of_x = _each(g, pattern, y)  # (*batch, M, K)
        if ctx.needs_input_grad[1]:
            transposed = transpose_parts(pattern, g, None)
            of_y = _each(transposed.vectors, transposed.pattern, x)  # (*batch, N, K)
        return of_x, of_y, None


def _each(values: Tensor, pattern: Pattern, dense: Tensor) -> Tensor:
    """``A d`` for each of a batch of `values` (..., vectors, V) and matrices d (..., N, K)."""
    batch = dense.shape[:-2]
    many, data = values.reshape(-1, *values.shape[-2:]), dense.reshape(-1, *dense.shape[-2:])
    found = [
        spmm_op.spmm(SRBCRS.from_pattern(pattern, each, bits=None), part, out_dtype=dense.dtype)
        for each, part in zip(many, data, strict=True)
    ]
    size = (*batch, pattern.shape[0], dense.shape[-1])
    return torch.stack(found).view(size) if found else dense.new_zeros(size)
