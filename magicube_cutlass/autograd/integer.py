"""Gradients of the sparse products: straight-through for quantizers, integer products forward and backward.

Functions here take floats, and `values`: the float vectors (vectors, V) of a sparse matrix in the order of its
:class:`Pattern`. With ``q(.)`` a quantizer, whose derivative counts as one::

    C = q(A) q(x)             d/dx = q(A)^T g               an SpMM with the transpose of A's pattern
                              d/dA = g q(x)^T at A's pattern               an SDDMM on that pattern
    S = q(x) q(y)^T at P      d/dx = G q(y),  d/dy = G^T q(x)              SpMM on P and on its transpose

The transposed pattern is computed once and cached; the backward pass stores integers, not floats.
Source: Bengio, Leonard, Courville, arXiv 1308.3432 (the straight-through estimator).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.integers import BITS, check_bits, int_range, value_dtype
from magicube_cutlass.autograd import floating as float_autograd
from magicube_cutlass.autograd.floating import check_float16_like
from magicube_cutlass.autograd.once import once
from magicube_cutlass.checks import is_transformed, transform_error
from magicube_cutlass.dispatch import cpu_linear
from magicube_cutlass.dispatch.plan import transposed
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.construct import Parts, beyond, gather_vectors
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.formats.tracking import NO_RECORDS, RECORDS, keep_record
from magicube_cutlass.ops import sddmm as sddmm_op
from magicube_cutlass.ops import spmm as spmm_op
from magicube_cutlass.ops import torch_ops as library
from magicube_cutlass.quantization.quant_tensor import QuantTensor
from magicube_cutlass.quantization.quantize import _scale_of
from magicube_cutlass.reference import at_vectors

STRIDE = 32
_GRAD_BITS = (None, *BITS)
GRAD_BITS = 16  # an error of 2**-16 of a column's largest gradient: float32 training does not see it


def quantized(x: Tensor, bits: int, axis: int | None, scale: Tensor | None = None) -> QuantTensor:
    """Quantize to signed integers with ``nonfinite="propagate"``, as one torch operator.

    It waits for no device and can be part of a compiled graph. A column-major `x` stays column-major.

    Parameters
    ----------
    x : Tensor, shape (..., M, N)
        Float tensor.
    bits, axis : int, int or None
        As for :func:`magicube_cutlass.quantize`.
    scale : Tensor, shape (), optional
        A given scale, with ``axis=None``; values beyond its range saturate and NaN becomes zero.

    Examples
    --------
    >>> quantized(torch.tensor([[1.0, -0.5]]), 8, None).ints().tolist()
    [[127, -64]]
    """
    swap = x.ndim >= 2 and x.mT.is_contiguous() and not x.is_contiguous()
    rows = x.detach()
    if swap:
        rows, axis = rows.mT, None if axis is None else 1 - axis
    if scale is None:
        data, scale = library.quantize(rows, bits, axis)
    else:
        data = library.quantize_by(rows, scale, bits)
    found = QuantTensor(data, scale, bits, True, axis, rows.shape)
    return found.mT if swap else found


def compress(values: Tensor, pattern: Pattern, *, bits: int = 8, axis: int | None = 1) -> SRBCRS:
    """Quantize float values on a pattern; waits for no device.

    Integers and scales are those of ``SRBCRS.from_mask`` with the same floats.

    Parameters
    ----------
    values : Tensor, shape (vectors, V)
        Floats in pattern order; rows beyond M are dropped. A row with inf or NaN has the scale NaN.
    pattern : Pattern, shape (M, K)
        Structure.
    bits : int, default 8
        Width of the integers.
    axis : int or None, default 1
        1 for per-row scales, None for a per-tensor scale.

    Returns
    -------
    SRBCRS, shape (M, K)

    Raises
    ------
    TypeError
        If `values` are no floats.
    ValueError
        For another shape, device or axis.

    Examples
    --------
    >>> import magicube_cutlass as mc
    >>> pattern = mc.random_pattern(16, 32, sparsity=0.5, vector_length=8)
    >>> compress(torch.ones(pattern.vectors, 8), pattern).scale.shape
    torch.Size([16, 1])
    """
    real = _check_values(values, pattern)
    if axis not in (None, 1):
        raise ValueError(f"axis must be None (one scale) or 1 (one per row), got {axis!r}")
    if axis is None:
        found = quantized(real.reshape(1, -1), bits, None)
        ints, scale = found.ints().view(real.shape), found.scale
    else:
        ints, scale = quantize_vectors(real, pattern, bits)
    return SRBCRS._from_parts(Parts(pattern, ints, scale), bits, True, STRIDE)


def _check_values(values: Tensor, pattern: Pattern) -> Tensor:
    """The values without a graph, as float32 or float64, zero beyond M."""
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern, got {type(pattern).__name__}")
    if not isinstance(values, Tensor) or not values.is_floating_point():
        raise TypeError(f"values must be a float tensor, got {getattr(values, 'dtype', type(values).__name__)}")
    if tuple(values.shape) != (pattern.vectors, pattern.vector_length):
        raise ValueError(f"values must have shape ({pattern.vectors}, {pattern.vector_length}) for {pattern}, "
                         f"got {tuple(values.shape)}")  # fmt: skip
    if values.device != pattern.device:
        raise ValueError(f"values must be on {pattern.device} like the pattern, got {values.device}")
    real = values.detach() if values.dtype == torch.float64 else values.detach().float()
    return real.masked_fill(beyond(pattern), 0) if pattern.shape[0] % pattern.vector_length else real


def quantize_vectors(real: Tensor, pattern: Pattern, bits: int, shared: Any = None) -> tuple[Tensor, Tensor]:
    """Integers (vectors, V) and scales (M, 1) of values (vectors, V); `shared`: from own amaxes to those over ranks."""
    (low, high), rows = int_range(bits, True), pattern.row_indices  # (vectors,)
    top = real.new_zeros(pattern.vector_rows, pattern.vector_length)  # (R, V)
    top = top.scatter_reduce(0, rows[:, None].expand_as(real), real.abs(), "amax")  # (R, V)
    scale = _scale_of(top if shared is None else shared(top), high)  # (R, V)
    quotient = real.double() * (1.0 / scale.double())[rows]  # (vectors, V)
    ints = torch.nan_to_num(quotient.round_(), nan=0.0).clamp_(low, high)  # (vectors, V)
    return ints.to(value_dtype(bits, True)), scale.view(-1, 1)[: pattern.shape[0]].contiguous()


class _At(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: Tensor, pattern: Pattern) -> Tensor:
        ctx.pattern = pattern
        return gather_vectors(dense, pattern)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return dense_of(grads[0], ctx.pattern), None


def vectors_at(dense: Tensor, pattern: Pattern) -> Tensor:
    """Return the values (vectors, V) of a dense matrix at a pattern, zero beyond M; differentiable.

    Raises
    ------
    ValueError
        For another shape or device.

    Examples
    --------
    >>> import magicube_cutlass as mc
    >>> pattern = mc.Pattern.from_dense(torch.eye(8, 16, dtype=torch.bool), vector_length=8)
    >>> vectors_at(torch.eye(8, 16), pattern).shape
    torch.Size([8, 8])
    """
    if tuple(dense.shape) != pattern.shape:
        raise ValueError(f"dense must have shape {pattern.shape} for {pattern}, got {tuple(dense.shape)}")
    if dense.device != pattern.device:
        raise ValueError(f"dense must be on {pattern.device} like the pattern, got {dense.device}")
    found: Tensor = _At.apply(dense, pattern)
    return found


def dense_of(values: Tensor, pattern: Pattern) -> Tensor:
    """(..., M, K) with `values` (..., vectors, V) at the pattern and zeros elsewhere."""
    return BCRS._from_parts(Parts(pattern, values.contiguous(), None), None, True).to_dense()


def _product(matrix: SRBCRS, dense: QuantTensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """``spmm``, also to float64: exact integers, scaled in float64."""
    if dtype != torch.float64:
        return spmm_op.early_spmm(matrix, dense, dtype, bias)
    total = spmm_op.early_spmm(matrix, dense, torch.int64).double()  # (*batch, M, N)
    for scale in (matrix.scale, dense.scale):
        total = total if scale is None else total * scale.double()
    return total if bias is None else total + bias.double()[:, None]


def _sampled(x: QuantTensor, y: QuantTensor, pattern: Pattern, dtype: torch.dtype) -> Tensor:
    """``sddmm`` as values (..., vectors, V), also to float64; scales of y are per-tensor or per-row."""
    if dtype != torch.float64:
        return sddmm_op.early_sddmm(x, y, pattern, out_dtype=dtype).vectors()
    total = sddmm_op.early_sddmm(x, y, pattern, out_dtype=torch.int64).vectors().double()  # (*batch, vectors, V)
    total = total if x.scale is None else total * _of_rows(x.scale, pattern).double()
    return total if y.scale is None else total * _of_columns(y.scale, pattern).double()


def _of_rows(scale: Tensor, pattern: Pattern) -> Tensor:
    """Row scales (..., M, 1) broadcast to values: (..., vectors, V)."""
    v, lanes = pattern.vector_length, torch.arange(pattern.vector_length, device=scale.device)  # (V,)
    rows = (pattern.row_indices[:, None] * v + lanes).clamp(max=max(pattern.shape[0] - 1, 0))  # (vectors, V)
    return scale[..., rows, 0]


def _of_columns(scale: Tensor, pattern: Pattern) -> Tensor:
    """Column scales (..., N, 1) broadcast to values: (..., vectors, 1)."""
    return scale[..., pattern.col_indices, :]


def times(x: Tensor, scale: Tensor | None) -> Tensor:
    """``x * scale`` in float32 or float64."""
    real = x if x.dtype == torch.float64 else x.float()
    return real if scale is None else real * scale.to(real.dtype)


class _Spmm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor | None,
        x: Tensor,
        bias: Tensor | None,
        matrix: SRBCRS,
        dense: QuantTensor,
        grad_bits: int | None,
    ) -> Tensor:
        ctx.save_for_backward(dense.data, dense.scale, matrix.scale)
        ctx.kind = (dense.bits, dense.shape)
        ctx.matrix, ctx.grad_bits, ctx.x_dtype = matrix, grad_bits, x.dtype
        ctx.dtypes = [None if each is None else each.dtype for each in (values, bias)]
        return _product(matrix, dense, x.dtype, None if bias is None else bias.detach())

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g = grads[0]  # (*batch, M, N)
        data, x_scale, scale = ctx.saved_tensors
        bits, shape = ctx.kind
        of_values, of_x, of_bias = None, None, None
        if ctx.needs_input_grad[0]:
            dense = QuantTensor(data, x_scale, bits, True, None if x_scale.ndim == 0 else 0, shape)
            of_values = gradient_of_values(g, dense, ctx.matrix.pattern, ctx.grad_bits).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            of_x = through_transpose(ctx.matrix, times(g, scale), ctx.x_dtype, ctx.grad_bits)
        if ctx.needs_input_grad[2]:
            of_bias = gradient_of_bias(g, ctx.dtypes[1])
        return of_values, of_x, of_bias, None, None, None


def gradient_of_values(g: Tensor, x: QuantTensor, pattern: Pattern, bits: int | None) -> Tensor:
    """Return ``g x^T`` at `pattern`, summed over the batch: (vectors, V); `g` (..., M, N), `x` (..., K, N)."""
    g, plain = times(g, x.scale), QuantTensor(x.data, None, x.bits, True, None, x.shape)
    if bits is None:
        found = at_vectors(g @ plain.ints().to(g.dtype).mT, pattern)
    else:
        found = _sampled(quantized(g, bits, 1), plain, pattern, g.dtype)
    return found.reshape(-1, *found.shape[-2:]).sum(0) if found.ndim > 2 else found


def gradient_of_bias(g: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of `g` (..., M, N) over columns and batch: (M,); one order of addition for every memory layout."""
    rows = times(g, None).mT.contiguous()  # (..., N, M), which the gradient of a layer is already
    return rows.reshape(-1, g.shape[-2]).sum(0).to(dtype)


def through_transpose(matrix: SRBCRS, g: Tensor, dtype: torch.dtype, bits: int | None) -> Tensor:
    """``A^T g`` of the integers of ``matrix``: (..., K, N)."""
    if bits is None:
        return (matrix.to_dense(dequantize=False).to(g.dtype).mT @ g).to(dtype)
    return _product(transposed(matrix), quantized(g, bits, 0), dtype)


def spmm(
    A: SRBCRS,
    x: Tensor,
    *,
    values: Tensor | None = None,
    bias: Tensor | None = None,
    act_bits: int = 8,
    act_axis: int | None = 0,
    act_scale: Tensor | None = None,
    grad_bits: int | None = GRAD_BITS,
) -> Tensor:
    """Multiply a quantized sparse matrix by floats, differentiably: ``C = A q(x) + bias[:, None]``.

    If A holds floats, q(x) is x, which must be float16 or bfloat16, and `act_bits`, `act_axis`, `act_scale` and
    `grad_bits` are ignored.

    Parameters
    ----------
    A : SRBCRS, shape (M, K)
        Signed, as of :func:`compress`.
    x : Tensor, shape (..., K, N)
        float16, bfloat16, float32 or float64, row- or column-major; its gradient is ``A^T g``.
    values : Tensor, shape (vectors, V), optional
        Floats of A; their gradient is ``g q(x)^T`` at A's pattern.
    bias : Tensor, shape (M,), optional
        Float; its gradient is `g` summed over columns and batch.
    act_bits : int, default 8
        Width of q(x).
    act_axis : int or None, default 0
        0 for per-column scales of x, None for a per-tensor scale.
    act_scale : Tensor, shape (), optional
        A given scale; gradients also pass saturated entries.
    grad_bits : int or None, default 16
        Width of `g` in the backward pass, with per-column scales for x and per-row scales for values; None for dense
        float products.

    Returns
    -------
    Tensor, shape (..., M, N)
        Dtype of `x`; sums of a float64 product are exact integers too.

    Raises
    ------
    TypeError, ValueError
        As :func:`magicube_cutlass.spmm`, and for other values.

    Examples
    --------
    >>> import magicube_cutlass as mc
    >>> pattern = mc.random_pattern(16, 32, sparsity=0.5, vector_length=8)
    >>> values = torch.ones(pattern.vectors, 8, requires_grad=True)
    >>> y = spmm(compress(values, pattern), torch.ones(32, 4), values=values)
    >>> y.sum().backward()
    >>> round(float(values.grad[0, 0]), 3)
    4.0
    """
    return spmm_of(A, x, values, bias, act_bits, act_axis, act_scale, grad_bits)


def spmm_of(
    A: SRBCRS, x: Tensor, values: Tensor | None, bias: Tensor | None, act_bits: int, act_axis: int | None,
    act_scale: Tensor | None, grad_bits: int | None, asks_engine: bool = True,
) -> Tensor:  # fmt: skip
    """Run :func:`spmm`; `asks_engine`: False if the CPU's one call has declined the operands."""
    if act_scale is not None and act_scale.requires_grad and torch.is_grad_enabled():
        raise ValueError("act_scale must not require a gradient, which this product does not give; use "
                         "act_scale.detach()")  # fmt: skip
    key = None
    if not torch.compiler.is_compiling():
        key = spmm_op.floats_key(A, x, values, bias, act_bits, act_axis, act_scale, grad_bits)
    record = None if key is None else A._execution.get(RECORDS, NO_RECORDS).get(key)
    known: Tensor | None = record(x, bias, act_scale) if record is not None and A.is_current else None
    if known is not None:
        return known
    _check_float("x", x)
    if isinstance(A, SRBCRS) and A.bits is None and A.element_type is not None:
        check_float16_like(x=x)
        if values is not None:
            _check_values(values, A.pattern)
        of_floats: Tensor = float_autograd.Spmm.apply(values, x, bias, A)
        return of_floats
    matrix = _signed(A)
    if values is not None:
        _check_values(values, matrix.pattern)
    if grad_bits not in _GRAD_BITS:
        check_bits(grad_bits, "grad_bits")
    axis = None if act_scale is not None else act_axis
    if axis not in (None, 0):
        raise ValueError(f"act_axis must be None (one scale) or 0 (one per column), got {act_axis!r}")
    wanted = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (values, x, bias))
    asks_engine = asks_engine and not torch.compiler.is_compiling() and (axis == 0 or act_scale is not None)
    if asks_engine and not wanted and x.ndim == 2:
        found = cpu_linear.linear(matrix, x.mT, bias, act_bits, act_scale)
        if found is not None:
            return found.mT
    dense = quantized(x, act_bits, axis, act_scale)
    if not wanted:
        product = _product(matrix, dense, x.dtype, bias)
        made = None if key is None else spmm_op.floats_record(matrix, dense, x, bias)
        if made is not None:
            keep_record(A._execution, key, made)
        return product
    return _Spmm.apply(values, x, bias, matrix, dense, grad_bits)


def _check_float(name: str, x: object) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a float tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.ndim < 2:
        raise ValueError(f"{name} must have at least 2 dimensions, got shape {tuple(x.shape)}")
    if not torch.compiler.is_compiling() and is_transformed(x):
        raise transform_error(name)


def _signed(A: object) -> SRBCRS:
    if not isinstance(A, SRBCRS):
        raise TypeError(f"A must be an SRBCRS, got {type(A).__name__}")
    if A.bits is None or not A.signed:
        raise TypeError(f"A must hold signed quantized integers, got {A}")
    return A
