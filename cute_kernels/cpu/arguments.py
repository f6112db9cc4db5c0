"""Operands of the CPU engine, and O(1) checks of its arguments: sizes, dtypes, devices and memory order.

The engine reads addresses. These checks leave out the data of index tensors, which a matrix scans once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.integers import BITS, STORAGE_DTYPES

OUT_TYPES = {torch.int32: 0, torch.int64: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}
VECTOR_LENGTHS, STRIDES = (1, 2, 4, 8, 16, 32), (16, 32, 64)


@dataclass(frozen=True)
class SparseOperand:
    """Sparse operand of the engine: SR-BCRS structure and digit planes."""

    row_start: Tensor  # (R,) int64
    row_end: Tensor  # (R,) int64
    col_indices: Tensor  # (padded vectors,) int32
    planes: Tensor  # (digits, blocks, V, stride) uint8
    row_sums: Tensor  # (digits, R, V) int64, sum of the digits of each row
    rows: int  # M
    columns: int  # K
    bits: int
    signed: bool
    masks: Tensor | None = None  # (R, words of 64 columns) int64, a bit per stored column, of `with_masks`


@dataclass(frozen=True)
class DenseOperand:
    """Dense integer operand of the engine."""

    data: Tensor  # (*batch, outer, inner) or (*batch, inner, outer), storage form
    bits: int
    signed: bool
    inner_dim: int  # -1 or -2, the dimension that is summed over
    packed_dim: int  # -1 or -2, the dimension along which 4-bit integers are packed


def check_address(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise unless `tensor` has memory of its own kind on the CPU: no other dtype or device, no pending negation.

    Raises
    ------
    TypeError
        For another dtype.
    ValueError
        For another device, or a negated or zero tensor, whose memory differs from its values.

    Examples
    --------
    >>> check_address("x", torch.zeros(3), torch.float64)
    Traceback (most recent call last):
    TypeError: x must be torch.float64, got torch.float32
    """
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if not tensor.is_cpu:
        raise ValueError(f"{name} must be on the CPU, got {tensor.device}")
    if tensor.is_neg() or tensor._is_zerotensor():
        kind = "a negated view" if tensor.is_neg() else "a zero tensor without memory"
        raise ValueError(f"{name} must hold its values, got {kind}; use {name}.clone()")


def check_array(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    """Raise unless `tensor` is a contiguous CPU tensor of this dtype and shape; None: any size.

    Raises
    ------
    TypeError
        For another dtype.
    ValueError
        For another device, shape or memory order.

    Examples
    --------
    >>> check_array("out", torch.zeros(1, 3).expand(2, 3), torch.float32, 2, None)
    Traceback (most recent call last):
    ValueError: out must be contiguous, got strides (0, 1)
    """
    check_address(name, tensor, dtype)
    found = tensor.shape
    if found != shape and (
        len(found) != len(shape) or [n for n, m in zip(shape, found, strict=True) if n not in (None, m)]
    ):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} must have shape ({wanted}{',' if len(shape) == 1 else ''}), got {tuple(found)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def check_vectors(size: int, **vectors: Tensor | None) -> None:
    """Raise unless each of `vectors` is None or contiguous float32 of shape (`size`,)."""
    for name, each in vectors.items():
        if each is not None:
            check_array(name, each, torch.float32, size)


def address_of(x: Tensor | None) -> int:
    """Return the address of a tensor, 0 for None."""
    return 0 if x is None else x.data_ptr()


def check_rows(name: str, x: Tensor, dtype: torch.dtype, columns: int) -> None:
    """Raise unless `x` is a CPU matrix of this dtype with `columns` contiguous columns."""
    check_address(name, x, dtype)
    if x.ndim != 2 or x.shape[1] != columns:
        raise ValueError(f"{name} must have shape (any, {columns}), got {tuple(x.shape)}")
    if columns > 1 and x.stride(1) != 1:
        raise ValueError(f"{name} must have contiguous rows, got strides {x.stride()}; use {name}.contiguous()")


def check_float_rows(x: Tensor, columns: int, bits: int, x_scale: Tensor | None, out_dtype: torch.dtype) -> None:
    """Raise unless a call of the engine can quantize the rows of `x` to `bits` and write a product of `out_dtype`."""
    check_rows("x", x, torch.float32, columns)
    if bits not in (4, 8) or out_dtype not in OUT_TYPES or not out_dtype.is_floating_point:
        raise ValueError(f"bits must be 4 or 8 and out_dtype a float of the engine, got {bits} and {out_dtype}")
    if x_scale is not None:
        check_array("x_scale", x_scale, torch.float32)


def _digits(name: str, bits: int) -> int:
    """8-bit digits of a width; `ValueError` for a width that integers cannot have."""
    if bits not in BITS:
        raise ValueError(f"bits of {name} must be one of {BITS}, got {bits!r}")
    return 2 if bits > 8 else 1


def check_sparse(a: SparseOperand) -> None:
    """Raise unless sizes, dtypes and memory order of a sparse operand agree; read no data."""
    digits = _digits("a", a.bits)
    check_array("planes", a.planes, torch.uint8, digits, None, None, None)
    _, blocks, v, stride = a.planes.shape
    rows = a.row_start.numel()
    check_structure_shape(a.row_start, a.row_end, a.col_indices, blocks, v, stride, a.rows)
    check_array("row_sums", a.row_sums, torch.int64, digits, rows, v)
    if a.columns < 0:
        raise ValueError(f"columns must be at least 0, got {a.columns}")


def check_structure_shape(
    row_start: Tensor, row_end: Tensor, col_indices: Tensor, blocks: int, v: int, stride: int, m: int
) -> None:
    """Raise unless the index tensors of an SR-BCRS structure fit `blocks` blocks of (`v`, `stride`) and `m` rows."""
    if v not in VECTOR_LENGTHS:
        raise ValueError(f"vector_length must be one of {VECTOR_LENGTHS}, got {v}")
    if stride not in STRIDES:
        raise ValueError(f"stride must be one of {STRIDES}, got {stride}")
    check_array("row_start", row_start, torch.int64, -(-max(m, 0) // v))
    check_array("row_end", row_end, torch.int64, row_start.numel())
    check_array("col_indices", col_indices, torch.int32, blocks * stride)


def check_dense(name: str, dense: DenseOperand, outer: int, inner: int, batch: int) -> None:
    """Raise unless a dense operand holds `batch` matrices, or one for all, of `outer` slices of `inner` integers."""
    _digits(name, dense.bits)
    if not {dense.inner_dim, dense.packed_dim} <= {-1, -2}:
        raise ValueError(f"dimensions of {name} must be -1 or -2, got {dense.inner_dim} and {dense.packed_dim}")
    data = dense.data
    check_address(name, data, STORAGE_DTYPES[dense.bits, bool(dense.signed)])
    sizes = {dense.inner_dim: inner, -3 - dense.inner_dim: outer}
    if dense.bits == 4:
        sizes[dense.packed_dim] = (sizes[dense.packed_dim] + 1) // 2
    if data.ndim < 2 or (data.shape[-2], data.shape[-1]) != (sizes[-2], sizes[-1]):
        raise ValueError(f"{name} must have shape (..., {sizes[-2]}, {sizes[-1]}), got {tuple(data.shape)}")
    if data.shape[:-2].numel() != batch:
        raise ValueError(f"{name} must have a batch of {batch}, got {tuple(data.shape[:-2])}")


def check_scale(name: str, scale: Tensor | None, length: int, batch: tuple[int, ...] = ()) -> None:
    """Raise unless `scale` is None or contiguous float32 of shape (), (`length`,) or (*`batch`, `length`)."""
    if scale is not None:
        shape = () if scale.ndim == 0 else (length,) if scale.ndim == 1 else (*batch, length)
        check_array(name, scale, torch.float32, *shape)


def _check_out(out: Tensor, rows: int) -> None:
    """Raise unless `out` is a contiguous output of the engine with `rows` as its second-last size."""
    if out.dtype not in OUT_TYPES:
        raise TypeError(f"out must be one of {[str(dtype) for dtype in OUT_TYPES]}, got {out.dtype}")
    if out.ndim < 2:
        raise ValueError(f"out must have at least 2 dimensions, got shape {tuple(out.shape)}")
    check_array("out", out, out.dtype, *out.shape[:-2], rows, out.shape[-1])


def check_spmm_arguments(
    a: SparseOperand,
    b: DenseOperand,
    out: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Raise unless the arguments of :func:`cute_kernels.cpu.engine.spmm` fit each other; read no data."""
    _check_out(out, a.rows)
    n, batch = out.shape[-1], out.shape[:-2].numel()
    check_sparse(a)
    check_dense("b", b, n, a.columns, batch)
    check_scale("row_scale", row_scale, a.rows)
    check_scale("col_scale", col_scale, n, out.shape[:-2])
    if bias is not None:
        check_array("bias", bias, torch.float32, a.rows)


def check_sddmm_arguments(
    x: DenseOperand,
    y: DenseOperand,
    index: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    shape: tuple[int, int, int],
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> None:
    """Raise unless the arguments of :func:`cute_kernels.cpu.engine.sddmm` fit each other; read no data."""
    if out.ndim != 4:
        raise ValueError(f"out must have shape (batch, blocks, V, stride), got {tuple(out.shape)}")
    batch, blocks, v, stride = out.shape
    m, n, k = shape
    _check_out(out, v)
    check_structure_shape(*index, blocks, v, stride, m)
    check_dense("x", x, m, k, batch)
    check_dense("y", y, n, k, batch)
    check_scale("row_scale", row_scale, m, (batch,))
    check_scale("col_scale", col_scale, n, (batch,))


def _check_rows(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Raise unless `x` is a CPU tensor of this dtype and shape with contiguous rows; those of `out` are apart."""
    check_address(name, x, dtype)
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
    row, column = x.stride()
    if (shape[1] > 1 and column != 1) or (name == "out" and shape[0] > 1 and row < shape[1]):
        raise ValueError(f"{name} must have contiguous rows, got strides {x.stride()}")


def check_quantize_arguments(x: Tensor, out: Tensor, scale: Tensor, bits: int, signed: bool, mode: int) -> None:
    """Raise unless the arguments of :func:`cute_kernels.cpu.conversions.quantize_cpu` fit each other."""
    rows, columns = x.shape
    _digits("x", bits)
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"x must be torch.float32 or torch.float64, got {x.dtype}")
    if mode not in (0, 1, 2):
        raise ValueError(f"mode must be 0, 1 or 2, got {mode}")
    _check_rows("x", x, x.dtype, (rows, columns))
    _check_rows("out", out, STORAGE_DTYPES[bits, signed], (rows, (columns + 1) // 2 if bits == 4 else columns))
    check_address("scale", scale, x.dtype)
    if not scale.is_contiguous() or scale.numel() != (1, rows, columns)[mode]:
        raise ValueError(f"scale must have {(1, rows, columns)[mode]} contiguous elements, got {tuple(scale.shape)}")
