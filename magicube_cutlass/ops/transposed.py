"""SpMM with the transpose of a sparse matrix, which is not compressed anew on a CPU."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from cute_kernels.cpu import transposed as engine_transposed
from cute_kernels.cpu.extension import available
from cute_kernels.dtypes import INTEGER_OUT, Integer, check_pair, result_dtype
from cute_kernels.integers import fits, product_bound, split_digits, widen
from magicube_cutlass.formats.construct import indexable_view, transpose_error
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.ops.problem import (
    Operand,
    as_srbcrs,
    check_bias,
    check_dense,
    check_out,
    check_written,
    float32_scale,
    refuse_gradient,
    unusable,
)
from magicube_cutlass.quantization.float_operands import DenseFloats, dense_values
from magicube_cutlass.quantization.quant_tensor import QuantTensor

FLOAT64_EXACT = 2**53  # float64 holds every integer up to here


def transposed_product(
    A: object, B: Operand, out_dtype: torch.dtype | None, bias: Tensor | None, out: Tensor | None
) -> Tensor:
    """Return ``scale_A * scale_B * (A^T @ B) + bias[:, None]`` of CPU operands, (..., K, N).

    The vectors of A are sorted by column once, in as many bytes as A has, and nothing is filled in. Without the engine,
    and for more than 33,025 rows, torch's CSR product in float64 multiplies; it is exact while no sum reaches 2^53.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError("transpose must be False in a compiled graph; use spmm(A.transpose(), B)")
    if out is not None:
        check_written(out, A, B, bias)
    matrix = as_srbcrs(A)
    dense = check_dense("B", B, matrix.device)
    (m, k), n, batch = matrix.shape, int(dense.shape[-1]), dense.shape[:-2]
    if dense.shape[-2] != m:
        raise ValueError(f"B must have {m} rows to match the transpose of A of shape {matrix.shape}, got "
                         f"{dense.shape[-2]}")  # fmt: skip
    if dense.axis == 1:
        raise ValueError("B must have a per-tensor or per-column scale, got per-row; use "
                         "quantize(x, bits=8, scale='column')")  # fmt: skip
    lhs, rhs = matrix.element_type, dense.element_type
    if lhs is None or matrix.batch_shape:
        raise unusable(matrix)
    check_pair(lhs, rhs)
    if matrix.scale is not None and matrix.scale.ndim:
        raise transpose_error(matrix.scale)
    for name, tensor in (("bias", bias), ("scale of A", matrix.scale), ("scale of B", dense.scale)):
        refuse_gradient(name, tensor)
    if bias is not None:
        bias = check_bias(bias, k, matrix.device)
    if out is not None:
        check_out(out, (*batch, k, n), matrix.device)
        out_dtype = out_dtype or out.dtype
    dtype = result_dtype(out_dtype, matrix.scale is not None or dense.scale is not None, m, lhs, rhs)
    if out is not None and out.dtype != dtype:
        raise TypeError(f"out must have dtype {dtype}, got {out.dtype}")
    if dtype in INTEGER_OUT and bias is not None:
        raise TypeError(f"bias must be None for integer output, got out_dtype {dtype}; use out_dtype=torch.float32")
    total = _sums(matrix, dense)
    if dtype not in INTEGER_OUT:
        total = _scaled(total, matrix.scale, float32_scale(dense.scale, batch), bias)
    if out is None:
        return total.to(dtype)
    return out.copy_(total)


def _scaled(total: Tensor, scale: Tensor | None, columns: Tensor | None, bias: Tensor | None) -> Tensor:
    """Sums as float32, scaled as the epilogues of the kernels do."""
    found = total.float()
    if scale is not None:
        found = found * scale.float()
    if columns is not None:
        found = found * (columns.unsqueeze(-2) if columns.ndim else columns)
    return found if bias is None else found + bias[:, None]


def _sums(matrix: SRBCRS, dense: QuantTensor | DenseFloats) -> Tensor:
    """``A^T B`` of the elements, (..., K, N): integers of integers, float32 of floats."""
    m = matrix.shape[0]
    if isinstance(dense, DenseFloats):
        length = dense.shape[dense.packed_dim] if dense.element_type.bits < 8 else 0
        values = dense_values(dense.data, dense.element_type, length, dense.packed_dim)  # (..., M, N)
        return _by_csr(matrix, values.float())
    ints = dense.ints()
    if available() and engine_transposed.fits_int32(m):
        packed: engine_transposed.TransposedOperand | None = matrix._execution.get("transposed columns")
        if packed is None:
            assert matrix.bits is not None
            pattern, planes = matrix.pattern, split_digits(matrix.vectors(), matrix.bits, matrix.signed)
            packed = engine_transposed.pack_transposed(
                pattern.row_indices, pattern.col_indices, planes, matrix.shape, matrix.signed
            )
            matrix._execution["transposed columns"] = packed
        digits = list(split_digits(ints.contiguous(), dense.bits, dense.signed))
        return engine_transposed.spmm_transposed(packed, digits, dense.signed, int(ints.shape[-1]))
    assert isinstance(matrix.element_type, Integer)
    bound = product_bound(m, matrix.element_type.bits, matrix.signed, dense.bits, dense.signed)
    if bound >= FLOAT64_EXACT or not fits(bound, torch.int64):
        return torch.matmul(widen(matrix.to_dense(dequantize=False)).mT, widen(ints))
    return _by_csr(matrix, widen(ints).double()).round().long()


def _by_csr(matrix: SRBCRS, b: Tensor) -> Tensor:
    """``A^T B`` by torch's CSR product in the dtype of `b`; a row holds the vectors of a column of A."""
    pattern, v = matrix.pattern, matrix.vector_length
    order = torch.argsort(pattern.col_indices, stable=True)
    offsets = torch.zeros(matrix.shape[1] + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(torch.bincount(pattern.col_indices.long(), minlength=matrix.shape[1]) * v, 0, out=offsets[1:])
    columns = (pattern.row_indices[order][:, None] * v + torch.arange(v, device="cpu")).flatten()
    vectors = matrix.vectors()
    values = indexable_view(vectors)[order].view(vectors.dtype).to(b.dtype).flatten()
    batch, n, padded = b.shape[:-2], b.shape[-1], pattern.vector_rows * v
    rows = torch.nn.functional.pad(b, (0, 0, 0, padded - b.shape[-2]))  # (..., R V, N)
    wide = rows.reshape(-1, padded, n).permute(1, 0, 2).reshape(padded, -1)  # (R V, batch * N)
    if not values.numel() or not wide.numel():
        return b.new_zeros(*batch, matrix.shape[1], n)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        csr = torch.sparse_csr_tensor(
            offsets, columns, values, (matrix.shape[1], padded), check_invariants=False, device=values.device
        )
    found = csr @ wide  # (K, batch * N)
    return found.view(matrix.shape[1], -1, n).permute(1, 0, 2).reshape(*batch, matrix.shape[1], n)


def transposed_on_gpu(matrix: object) -> SRBCRS:
    """Return the transpose of a matrix on a GPU, compressed once and cached on it."""
    source = as_srbcrs(matrix)
    found: SRBCRS | None = source._execution.get("compressed transpose")
    if found is None:
        found = source._execution["compressed transpose"] = source.transpose()
        found.single_use = source.single_use
    return found
