"""The product of a layer on a GPU without a graph, by the record of an earlier call of its kind."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from magicube_cutlass.autograd.integer import quantized, spmm_of
from magicube_cutlass.checks import has_dispatch_mode
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.formats.tracking import NO_RECORDS, RECORDS, is_current, keep_record
from magicube_cutlass.ops.spmm import floats_record, quantized_rows_record
from magicube_cutlass.quantization.quant_tensor import QuantTensor

_TENSORS = {Tensor, nn.Parameter}


def key_of(x: Tensor, act_scale: Tensor | None) -> tuple[object, ...] | None:
    """Return what a record of a layer's call depends on besides the layer; None for an input that has no record."""
    if type(x) not in _TENSORS or has_dispatch_mode() or not x.is_contiguous():
        return None
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
        if key is not None and x.is_cuda and columns.numel():
            dense = quantized(columns, act_bits, 0 if act_scale is None else None, act_scale)
            record = floats_record(matrix, dense, columns, bias, by_rows=True)
            if record is not None:
                keep_record(matrix._execution, key, record)
                y = record(x, bias, act_scale)
                assert y is not None  # the bias is the record's
                return y
        product = spmm_of(matrix, columns, None, bias, act_bits, 0, act_scale, grad_bits, False)  # (M, N)
    return product.mT.contiguous().view(*x.shape[:-1], matrix.shape[0])


def multiply_rows(
    matrix: SRBCRS, x: QuantTensor, dtype: torch.dtype, bias: Tensor | None, out: Tensor | None
) -> Tensor | None:
    """Return ``x A^T + bias``, contiguous (N, M), for int8 rows `x` (N, K) with scales on a GPU, by a record.

    None for operands that have none. `out`: contiguous rows to write it to.
    """
    data, scale = x.data, x.scale
    if has_dispatch_mode() or x.bits != 8 or not data.numel() or not data.is_contiguous():
        return None
    if scale is None or scale.dtype != torch.float32 or not scale.is_contiguous() or dtype == torch.float64:
        return None
    key = "quantized rows", data.shape, dtype, data.get_device(), scale.ndim
    record = matrix._execution.get(RECORDS, NO_RECORDS).get(key)
    y: Tensor | None = None
    if record is not None and is_current(matrix, matrix._seen):
        y = record(data, scale, bias, out)
    if y is None:
        record = quantized_rows_record(matrix, x.mT, dtype, bias)
        if record is None:
            return None
        keep_record(matrix._execution, key, record)
        y = record(data, scale, bias, out)
    return y
