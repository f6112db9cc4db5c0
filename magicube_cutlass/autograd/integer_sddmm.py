"""Gradients of the integer SDDMM; see :mod:`magicube_cutlass.autograd`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.integers import check_bits
from cute_kernels.watch import watched
from magicube_cutlass.autograd import floating as float_autograd
from magicube_cutlass.autograd.floating import check_float16_like
from magicube_cutlass.autograd.integer import (
    _GRAD_BITS,
    GRAD_BITS,
    _check_float,
    _of_columns,
    _of_rows,
    _product,
    _sampled,
    compress,
    dense_of,
    quantized,
    times,
)
from magicube_cutlass.autograd.once import once
from magicube_cutlass.formats.construct import transpose_parts
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.quantization.quant_tensor import QuantTensor


class _Sddmm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, left: QuantTensor, right: QuantTensor, pattern: Pattern, grad_bits: int | None
    ) -> Tensor:
        ctx.save_for_backward(left.data, left.scale, right.data, right.scale)
        ctx.kind = (left.bits, left.shape, right.bits, right.shape)
        ctx.pattern, ctx.grad_bits, ctx.dtypes = pattern, grad_bits, (x.dtype, y.dtype)
        return _sampled(left, right, pattern, torch.promote_types(x.dtype, y.dtype))

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g, pattern = grads[0], ctx.pattern  # (*batch, vectors, V)
        left_data, left_scale, right_data, right_scale = ctx.saved_tensors
        left = QuantTensor(left_data, left_scale, ctx.kind[0], True, 1, ctx.kind[1])  # (*batch, M, K)
        right = QuantTensor(right_data, right_scale, ctx.kind[2], True, 1, ctx.kind[3])  # (*batch, N, K)
        of_x, of_y = None, None
        if ctx.needs_input_grad[0]:
            folded = times(g, _of_columns(right_scale, pattern))  # (*batch, vectors, V)
            of_x = _each(folded, pattern, right, ctx.dtypes[0], ctx.grad_bits)  # (*batch, M, K)
        if ctx.needs_input_grad[1]:
            folded = times(g, _of_rows(left_scale, pattern))  # (*batch, vectors, V)
            transposed = transpose_parts(pattern, folded, None)
            of_y = _each(transposed.vectors, transposed.pattern, left, ctx.dtypes[1], ctx.grad_bits)  # (*batch, N, K)
        return of_x, of_y, None, None, None, None


def _each(values: Tensor, pattern: Pattern, dense: QuantTensor, dtype: torch.dtype, bits: int | None) -> Tensor:
    """``A d`` for each of a batch of `values` (..., vectors, V) and integers d (..., N, K)."""
    if bits is None:
        return (dense_of(values, pattern) @ dense.ints().to(values.dtype)).to(dtype)
    batch = dense.shape[:-2]
    many, data = values.reshape(-1, *values.shape[-2:]), dense.data.reshape(-1, *dense.data.shape[-2:])
    shape = torch.Size(dense.shape[-2:])
    found = [
        _product(compress(each, pattern, bits=bits), QuantTensor(part, None, dense.bits, True, None, shape), dtype)
        for each, part in zip(many, data, strict=True)
    ]
    size = (*batch, pattern.shape[0], shape[1])
    return torch.stack(found).view(size) if found else values.new_zeros(size, dtype=dtype)


@watched("magicube_cutlass.autograd.sddmm")
def sddmm(
    x: Tensor,
    y: Tensor,
    pattern: Pattern,
    *,
    bits: int | None = 8,
    y_bits: int | None = None,
    grad_bits: int | None = GRAD_BITS,
) -> Tensor:
    """Sample a product at a pattern, differentiably: ``S[i, j] = sum_k q(x)[i, k] q(y)[j, k]``.

    Parameters
    ----------
    x, y : Tensor, shape (..., M, K) and (..., N, K)
        Floats, quantized with per-row scales. Gradients: ``G q(y)`` and ``G^T q(x)``.
    pattern : Pattern, shape (M, N)
        Where to sample.
    bits : int or None, default 8
        Width of q(x). None: x and y as they are, both float16 or both bfloat16; `grad_bits` is then ignored.
    y_bits : int, optional
        Width of q(y). Default: `bits`.
    grad_bits : int or None, default 16
        Width of G in the backward pass, with per-row scales; None for dense float products. A batch is a loop there.

    Returns
    -------
    Tensor, shape (..., vectors, V)
        Values in pattern order, of the promoted dtype, zero beyond M; ``SRBCRS.from_pattern(pattern, S, bits=None)``
        makes a matrix of them.

    Raises
    ------
    TypeError, ValueError
        As :func:`magicube_cutlass.sddmm`.

    Examples
    --------
    >>> import magicube_cutlass as mc
    >>> pattern = mc.random_pattern(16, 32, sparsity=0.5, vector_length=8)
    >>> sddmm(torch.ones(16, 4), torch.ones(32, 4), pattern).shape == (pattern.vectors, 8)
    True
    """
    _check_float("x", x)
    _check_float("y", y)
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern, got {type(pattern).__name__}")
    if bits is None:
        check_float16_like(x=x, y=y)
        of_floats: Tensor = float_autograd.Sddmm.apply(x, y, pattern)
        return of_floats
    if grad_bits not in _GRAD_BITS:
        check_bits(grad_bits, "grad_bits")
    left, right = quantized(x, bits, 1), quantized(y, bits if y_bits is None else y_bits, 1)
    if not (torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)):
        return _sampled(left, right, pattern, torch.promote_types(x.dtype, y.dtype))
    result: Tensor = _Sddmm.apply(x, y, left, right, pattern, grad_bits)
    return result
