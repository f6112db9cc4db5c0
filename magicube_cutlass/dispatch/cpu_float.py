"""Float products on a CPU: operands decoded to float32, and the sparse products of torch."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cute_kernels.dtypes import FLOATS
from magicube_cutlass.quantization.float_operands import dense_values

if TYPE_CHECKING:
    from magicube_cutlass.formats.pattern import Pattern

PREFIX = "cpu:"  # of the names of kernels: behind it the formats of the dense operands


def csr_copy(pattern: Pattern, vectors: Tensor) -> list[Tensor]:
    """Return row offsets, columns and float32 values of every stored element, from `vectors` (vectors, V)."""
    v, m = pattern.vector_length, pattern.shape[0]
    rows = (pattern.row_indices * v + torch.arange(v, device="cpu")[:, None]).flatten()  # (V * vectors,)
    order = torch.argsort(rows, stable=True)
    order = order[rows[order] < m]
    offsets = torch.zeros(m + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(torch.bincount(rows[order], minlength=m), 0, out=offsets[1:])
    columns = pattern.col_indices.to(torch.int64).repeat(v)[order]
    return [offsets, columns, vectors.mT.flatten()[order]]


def _csr(offsets: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(offsets, columns, values, shape, check_invariants=False, device="cpu")


def spmm(
    matrix: list[Tensor], b: Tensor, name: str, packed_dim: int, inner: int, out: Tensor,
    row_scale: Tensor | None, col_scale: Tensor | None, bias: Tensor | None,
) -> None:  # fmt: skip
    """Compute ``out = (A B) * row_scale * col_scale + bias``; `matrix` as of :func:`csr_copy`, `name`: B's format."""
    rows, n = out.shape[-2:]
    if out.numel() == 0:
        return
    offsets, columns, values = matrix
    dense = dense_values(b, FLOATS[name], inner if packed_dim == -2 else n, packed_dim)  # (*batch, K, N)
    batch = out.numel() // (rows * n)
    wide = dense.reshape(batch, inner, n).permute(1, 0, 2).reshape(inner, batch * n)  # (K, batch * N)
    if columns.numel():
        found = _csr(offsets, columns, values, (rows, inner)) @ wide  # (M, batch * N)
        total = found.view(rows, batch, n).permute(1, 0, 2)  # (batch, M, N)
    else:
        total = torch.zeros(batch, rows, n, device="cpu")
    total = total.reshape(out.shape)
    if row_scale is not None:
        total = total * (row_scale.unsqueeze(-1) if row_scale.ndim else row_scale)
    if col_scale is not None:
        total = total * (col_scale.unsqueeze(-2) if col_scale.ndim else col_scale)
    out.copy_(total if bias is None else total + bias[:, None])


def rows(data: Tensor, name: str, packed_dim: int, inner_dim: int, shape: tuple[int, int]) -> Tensor:
    """Return an operand of SDDMM as float32 with K-contiguous rows: (..., rows, K); `shape` is (rows, K)."""
    length = shape[1] if packed_dim == inner_dim else shape[0]
    found = dense_values(data, FLOATS[name], length, packed_dim)
    return found if inner_dim == -1 else found.mT


def sddmm(
    columns: Tensor,
    owner: Tensor,
    x: Tensor,
    y: Tensor,
    out: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> None:
    """Compute ``out = (X Y^T) * row_scale * col_scale`` at a pattern, with float32 sums.

    Parameters
    ----------
    columns : Tensor, shape (blocks, stride)
        int32, -1 in the padding.
    owner : Tensor, shape (blocks,)
        Vector row of each block.
    x, y : Tensor, shape (..., M, K) and (..., N, K)
        float32.
    out : Tensor, shape (..., blocks, V, stride)
        Zeros; written in place.
    row_scale, col_scale : Tensor or None, shape () or (..., M); () or (..., N)
        Row and column scales.
    """
    if out.numel() == 0 or x.shape[-1] == 0:
        return
    v, m, n = out.shape[-2], x.shape[-2], y.shape[-2]
    places = out.shape[-3:]
    row_of = (owner[:, None] * v + torch.arange(v, device="cpu"))[:, :, None].expand(places)  # (blocks, V, stride)
    column_of = columns[:, None].expand(places).to(torch.int64)
    inside = (column_of >= 0) & (row_of < m)
    at, to = row_of[inside], column_of[inside]
    order = torch.argsort(at * n + to)
    offsets = torch.zeros(m + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(torch.bincount(at, minlength=m), 0, out=offsets[1:])
    pattern = _csr(offsets, to[order], torch.zeros(order.numel(), device="cpu"), (m, n))
    xs, ys, outs = x.reshape(-1, *x.shape[-2:]), y.reshape(-1, *y.shape[-2:]), out.view(-1, *places)
    for i in range(outs.shape[0]):
        total = torch.empty(order.numel(), device="cpu")
        total[order] = torch.sparse.sampled_addmm(pattern, xs[i], ys[i].mT, beta=0.0).values()
        for factor, index in ((row_scale, at), (col_scale, to)):
            if factor is not None:
                total *= factor if factor.ndim == 0 else _of_matrix(factor, i)[index]
        outs[i][inside] = total.to(out.dtype)


def _of_matrix(factor: Tensor, i: int) -> Tensor:
    """Scales (length,) of matrix i of a batch."""
    return factor if factor.ndim == 1 else factor.reshape(-1, factor.shape[-1])[i]
