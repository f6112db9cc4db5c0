"""Dense int8 product on the CPU engine: a right operand of 8 or 4 bits packed once, exact int32 sums, a fused epilogue.

``C = A B``, or ``C = q(X) B`` with float32 rows that the call quantizes. AVX2 multiplies pairs of 16-bit digits
(``vpmaddwd``), AVX512-VNNI four bytes a lane (``vpdpbusd``); neither saturates. 4-bit integers stay packed in memory:
nibbles v + 8 are unsigned bytes, of which AVX2 multiplies twice as many at a time (``vpmaddubsw``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.cpu import extension
from cute_kernels.cpu.arguments import (
    OUT_TYPES,
    address_of,
    check_address,
    check_float_rows,
    check_rows,
    check_vectors,
)
from cute_kernels.integers import check_range

MAX_K = (2**31 - 1) // 2**14  # products of two bytes that int32 sums without overflow
PANEL, QUAD = 64, 4  # columns of a panel, k of a lane


@dataclass(frozen=True)
class PackedRight:
    """Right operand of :func:`multiply`, made by :func:`pack_right`; its tensors must not be changed."""

    shape: tuple[int, int]  # (K, N)
    packed: Tensor  # (panels, K / 4, 64, 4) int8, or (panels, K / 8, 64, 4) uint8
    column_sums: Tensor  # (64 panels,) int32
    handle: object  # of the engine: addresses of these tensors


def pack_right(b: Tensor, bits: int = 8) -> PackedRight:
    """Pack the right operand of :func:`multiply`: panels of 64 columns, four k side by side.

    Parameters
    ----------
    b : Tensor, shape (K, N)
        int8, on the CPU, of any memory strides; K at most 131071.
    bits : int, default 8
        8, or 4 for integers in [-8, 7]: two in a byte, which the product unpacks in registers.

    Returns
    -------
    PackedRight
        Independent of the instruction set and of later changes of `b`.

    Raises
    ------
    TypeError
        If `b` is not int8.
    ValueError
        If `b` is not a matrix on the CPU, K is too large for int32 sums, or a value has more than `bits` bits.

    Examples
    --------
    >>> pack_right(torch.ones(5, 3, dtype=torch.int8)).column_sums[:4].tolist()
    [5, 5, 5, 0]
    >>> pack_right(torch.ones(5, 3, dtype=torch.int8), bits=4).packed.nbytes
    256
    """
    check_address("b", b, torch.int8)
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits}")
    if bits == 4:
        check_range(b, 4, True, "b")
    if b.ndim != 2 or b.shape[0] > MAX_K:
        raise ValueError(f"b must have 2 dimensions and at most {MAX_K} rows, got shape {tuple(b.shape)}")
    if b.numel() and 1 not in b.stride():
        b = b.contiguous()
    (k, n), (row, column) = b.shape, b.stride()
    if row != 1 and column != 1:  # no elements
        row, column = n, 1
    engine, panels = extension.ENGINE or extension.load_extension(), -(-n // PANEL)
    packed = torch.empty(panels, -(-k // QUAD), PANEL, QUAD, dtype=torch.int8)
    column_sums = torch.empty(panels * PANEL, dtype=torch.int32)
    pointers = packed.data_ptr(), column_sums.data_ptr()
    engine.pack_digits(b.data_ptr(), k, n, row, column, *pointers, torch.get_num_threads())
    if bits == 4:
        packed = _nibbles(packed, k)
    handle = engine.PackedRight(packed.data_ptr(), column_sums.data_ptr(), k, n, bits == 4)
    return PackedRight((k, n), packed, column_sums, handle)


def _nibbles(packed: Tensor, k: int) -> Tensor:
    """Panels of 4-bit integers, (panels, K / 4, 64, 4), as nibbles v + 8, two quads of k in a byte; zero beyond K."""
    panels, quads = packed.shape[:2]
    shifted = torch.zeros(panels, quads + quads % 2, PANEL, QUAD, dtype=torch.uint8)
    shifted[:, :quads] = packed + 8
    if k % QUAD:
        shifted[:, quads - 1, :, k % QUAD :] = 0
    return shifted[:, 0::2] | shifted[:, 1::2] << 4


def _output(rows: int, n: int, dtype: torch.dtype, out: Tensor | None) -> tuple[Tensor, int, int]:
    """The output and its two memory strides, one of which is 1."""
    if dtype not in OUT_TYPES:
        raise TypeError(f"out_dtype must be one of {[str(each) for each in OUT_TYPES]}, got {dtype}")
    if out is None:
        return torch.empty(rows, n, dtype=dtype), n, 1
    check_address("out", out, dtype)
    if tuple(out.shape) != (rows, n):
        raise ValueError(f"out must have shape {(rows, n)}, got {tuple(out.shape)}")
    row, column = out.stride()
    if (column == 1 or n == 1) and (row >= n or rows <= 1):
        return out, row, 1
    if (row == 1 or rows == 1) and column >= rows:
        return out, 1, column
    raise ValueError(f"out must have contiguous rows or columns, got strides {out.stride()}; use out.contiguous()")


def multiply(
    a: Tensor,
    right: PackedRight,
    *,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    bias: Tensor | None = None,
    columns_first: bool = False,
    out_dtype: torch.dtype = torch.int32,
    out: Tensor | None = None,
    adds: bool = False,
) -> Tensor:
    """Multiply by a packed matrix: ``(A B) * row_scale[:, None] * col_scale + bias``, with exact integer sums.

    Parameters
    ----------
    a : Tensor, shape (M, K)
        int8 with contiguous rows, on the CPU.
    right : PackedRight
        Packed operand of shape (K, N).
    row_scale : Tensor, shape (M,), optional
        float32, contiguous; a float output is multiplied by it.
    col_scale : Tensor, shape (N,), optional
        float32, contiguous; a float output is multiplied by it after `row_scale`.
    bias : Tensor, shape (N,), optional
        float32, contiguous; added to a float output.
    columns_first : bool, default False
        Multiply by `col_scale` before `row_scale`.
    out_dtype : torch.dtype, default torch.int32
        int32, int64, float32, float16 or bfloat16.
    out : Tensor, shape (M, N), optional
        Output with contiguous rows or columns, written in place.
    adds : bool, default False
        Add the product to a given float32 output.

    Returns
    -------
    Tensor, shape (M, N)
        The product; bits do not depend on the instruction set or the number of threads.

    Raises
    ------
    TypeError
        If a dtype is not supported.
    ValueError
        If a shape, device or memory order does not match.

    Examples
    --------
    >>> right = pack_right(torch.tensor([[1, -1], [2, 127]], dtype=torch.int8))
    >>> a = torch.tensor([[3, -128]], dtype=torch.int8)
    >>> multiply(a, right).tolist(), multiply(a, right, bias=torch.ones(2), out_dtype=torch.float32).tolist()
    ([[-253, -16259]], [[-252.0, -16258.0]])
    """
    (k, n), m = right.shape, a.shape[0]
    check_rows("a", a, torch.int8, k)
    check_vectors(m, row_scale=row_scale)
    check_vectors(n, col_scale=col_scale, bias=bias)
    if adds and (out is None or out_dtype != torch.float32):
        raise ValueError(f"out must be given in torch.float32 to be added to, got {out_dtype}")
    out, row_step, column_step = _output(m, n, out_dtype, out)
    engine = extension.ENGINE or extension.load_extension()
    scales = engine.Scales(address_of(row_scale), address_of(col_scale), address_of(bias), 0, 0)
    engine.dense(
        right.handle, a.data_ptr(), a.stride(0), scales, columns_first, m, out.data_ptr(), row_step, column_step,
        OUT_TYPES[out_dtype], torch.get_num_threads(), adds,
    )  # fmt: skip
    return out


def linear(
    x: Tensor,
    right: PackedRight,
    *,
    bits: int = 8,
    x_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Quantize the rows of a matrix and multiply by a packed matrix: ``(q(X) B) * col_scale * x_scale + bias``.

    The integers are those of :func:`cute_kernels.cpu.conversions.quantize_cpu`, to nearest, in one call with the
    product.

    Parameters
    ----------
    x : Tensor, shape (M, K)
        float32 with contiguous rows, on the CPU.
    right : PackedRight
        Packed operand of shape (K, N).
    bits : int, default 8
        Width of q(X), at most 8.
    x_scale : Tensor, shape (), optional
        Given float32 scale; integers saturate. Default: ``max|x| / q_max`` of each row, NaN for a non-finite row.
    col_scale, bias : Tensor, shape (N,), optional
        float32, contiguous.
    out_dtype : torch.dtype, default torch.float32
        float32, float16 or bfloat16.
    out : Tensor, shape (M, N), optional
        Output with contiguous rows or columns, written in place.

    Returns
    -------
    Tensor, shape (M, N)

    Raises
    ------
    TypeError
        If a dtype is not supported.
    ValueError
        If a shape, device or memory order does not match.

    Examples
    --------
    >>> right = pack_right(torch.tensor([[1], [2]], dtype=torch.int8))
    >>> linear(torch.tensor([[127.0, -3.4]]), right).tolist()
    [[121.0]]
    """
    (k, n), m = right.shape, x.shape[0]
    check_float_rows(x, k, bits, x_scale, out_dtype)
    check_vectors(n, col_scale=col_scale, bias=bias)
    out, row_step, column_step = _output(m, n, out_dtype, out)
    high, engine = float(2 ** (bits - 1) - 1), extension.ENGINE or extension.load_extension()
    scales = engine.Scales(0, address_of(col_scale), address_of(bias), 0, 0)
    engine.linear(
        right.handle, x.data_ptr(), x.stride(0), address_of(x_scale), -high - 1, high, scales, m, out.data_ptr(),
        row_step, column_step, OUT_TYPES[out_dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out
