"""The product of a layer on a GPU without a graph, by the record of an earlier call of its kind."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from magicube_cutlass.autograd.integer import quantized, spmm_of
from magicube_cutlass.checks import has_dispatch_mode
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.formats.tracking import NO_RECORDS, RECORDS, is_current, keep_record
from magicube_cutlass.ops.spmm import floats_record, quantized_columns_record
from magicube_cutlass.quantization.quant_tensor import QuantTensor

_TENSORS = {Tensor, nn.Parameter}


def key_of(x: Tensor, act_scale: Tensor | None) -> tuple[object, ...] | None:
    """Return what a record of a layer's call depends on besides the layer; None for an input that has no record."""
    if type(x) not in _TENSORS or not x.is_cuda or has_dispatch_mode() or not x.is_contiguous():
        return None  # a record replays launches, of which a CPU has none
    if x.is_neg() or x._is_zerotensor():
        return None
    given = None if act_scale is None else (act_scale.shape, act_scale.dtype, act_scale.get_device())
    return "rows", x.shape, x.dtype, x.get_device(), given


def sparse_rows(
    matrix: SRBCRS, x: Tensor, bias: Tensor | None, act_scale: Tensor | None, act_bits: int, grad_bits: int | None
) -> Tensor:
    """Return ``q(x) A^T + bias``, contiguous (..., M), for `x` (..., K) on a GPU; nothing needs a gradient."""
    key = key_of(x, act_scale)
    if key is not None:
        key = (*key, act_bits)
        record = matrix._execution.get(RECORDS, NO_RECORDS).get(key)
        y: Tensor | None = None
        if record is not None and is_current(matrix, matrix._seen):
            y = record(x, bias, act_scale)
        if y is not None:
            return y
    with torch.no_grad():
        columns = x.reshape(-1, matrix.shape[1]).mT  # (K, N)
        if key is not None and columns.numel():
            dense = quantized(columns, act_bits, 0 if act_scale is None else None, act_scale)
            record = floats_record(matrix, dense, columns, bias, by_rows=True)
            if record is not None:
                keep_record(matrix._execution, key, record)
                y = record(x, bias, act_scale)
                assert y is not None  # the bias is the record's
                return y
        product = spmm_of(matrix, columns, None, bias, act_bits, 0, act_scale, grad_bits, False)  # (M, N)
    return product.mT.contiguous().view(*x.shape[:-1], matrix.shape[0])


def multiply_columns(
    matrix: SRBCRS, x: Tensor, scale: Tensor, dtype: torch.dtype, bias: Tensor | None, out: Tensor | None = None
) -> Tensor | None:
    """Return ``x^T A^T + bias``, contiguous (N, M), for int8 columns `x` on a GPU, by a record.

    None for operands that have none.

    Parameters
    ----------
    matrix : SRBCRS, shape (M, K)
        Sparse matrix.
    x : Tensor, shape (K, N) or (P, K, N)
        int8, with rows at multiples of 16 bytes; the columns of P ranks are joined: (P N, M).
    scale : Tensor, shape () or (N, 1) or (P N, 1)
        float32, contiguous.
    dtype : torch.dtype
        Of the result; not float64.
    bias : Tensor, shape (M,), optional
        As the caller holds it.
    out : Tensor, shape (N, M) or (P N, M), optional
        Contiguous rows to write it to.
    """
    if has_dispatch_mode() or not x.numel() or scale.dtype != torch.float32 or not scale.is_contiguous():
        return None
    if dtype == torch.float64:
        return None
    key = "quantized columns", x.shape, x.stride(), dtype, x.get_device(), scale.ndim
    record = matrix._execution.get(RECORDS, NO_RECORDS).get(key)
    y: Tensor | None = None
    if record is not None and is_current(matrix, matrix._seen):
        y = record(x, scale, bias, out)
    if y is None:
        by = scale.view(*x.shape[:-2], 1, x.shape[-1]) if scale.ndim else scale
        dense = QuantTensor(x, by, 8, True, 0 if scale.ndim else None, x.shape)
        record = quantized_columns_record(matrix, dense, dtype, bias)
        if record is None:
            return None
        keep_record(matrix._execution, key, record)
        y = record(x, scale, bias, out)
    return y
