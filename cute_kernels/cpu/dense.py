"""Dense int8 product on the CPU engine: a right operand of 8 or 4 bits packed once, exact int32 sums, a fused epilogue.

``C = A B``, or ``C = q(X) B`` with float32 rows that the call quantizes. AVX512-VNNI multiplies four bytes a lane
(``vpdpbusd``), AVX2 pairs of bytes (``vpmaddubsw``) whose sum has 16 bits: pairs of A that could saturate it are split
in two first, which takes time where there are many, up to twice that of normal numbers. 4-bit integers stay packed in
memory: nibbles v + 8 are unsigned bytes.
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
    check_array,
    check_float_rows,
    check_rows,
    check_vectors,
)
from cute_kernels.cpu.calls import template
from cute_kernels.integers import check_range

MAX_K = (2**31 - 1) // 2**14  # products of two bytes that int32 sums without overflow
PANEL, QUAD = 64, 4  # columns of a panel, k of a lane


@dataclass(frozen=True)
class PackedRight:
    """Right operand of :func:`multiply`, made by :func:`pack_right`; its tensors must not be changed."""

    shape: tuple[int, int]  # (K, N)
    packed: Tensor  # (panels, K / 4, 64, 4) int8, or (panels, K / 8, 64, 4) uint8
    column_sums: Tensor  # (64 panels,) int32, (panels, groups, 64) with group scales
    handle: object  # of the engine: addresses of these tensors
    group_scales: Tensor | None = None  # (panels, groups, 64) float32
    group_minima: Tensor | None = None


def pack_right(
    b: Tensor,
    bits: int = 8,
    *,
    group: int | None = None,
    group_scales: Tensor | None = None,
    group_minima: Tensor | None = None,
) -> PackedRight:
    """Pack the right operand of :func:`multiply`: panels of 64 columns, four k side by side.

    With group scales, B is ``group_scales * b + group_minima``, one of each per column and `group` rows. The int32 sums
    of a group are scaled and added in float32, in the order of the groups, and the output must be a float.

    Parameters
    ----------
    b : Tensor, shape (K, N)
        int8, on the CPU, of any memory strides; K at most 131071.
    bits : int, default 8
        8, or 4 for integers in [-8, 7]: two in a byte, which the product unpacks in registers.
    group : int, optional
        Rows that share a scale, a multiple of 8.
    group_scales, group_minima : Tensor, shape (ceil(K / group), N), optional
        float32; a `group` needs scales.

    Returns
    -------
    PackedRight
        Independent of the instruction set and of later changes of `b`.

    Raises
    ------
    TypeError
        If `b` is not int8.
    ValueError
        If `b` is not a matrix on the CPU, K is too large for int32 sums, a value has more than `bits` bits, or the
        scales do not fit.

    Examples
    --------
    >>> pack_right(torch.ones(5, 3, dtype=torch.int8)).column_sums[:4].tolist()
    [5, 5, 5, 0]
    >>> pack_right(torch.ones(5, 3, dtype=torch.int8), bits=4).packed.nbytes
    256
    >>> b = torch.ones(16, 1, dtype=torch.int8)
    >>> right = pack_right(b, group=8, group_scales=torch.tensor([[1.0], [0.5]]))
    >>> multiply(b.t().contiguous(), right, out_dtype=torch.float32)
    tensor([[12.]])
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
    packed = torch.empty(panels, -(-k // QUAD), PANEL, QUAD, dtype=torch.int8, device="cpu")
    column_sums = torch.empty(panels * PANEL, dtype=torch.int32, device="cpu")
    pointers = packed.data_ptr(), column_sums.data_ptr()
    engine.pack_digits(b.data_ptr(), k, n, row, column, *pointers, torch.get_num_threads())
    if bits == 4:
        packed = _nibbles(packed, k)
    if group is None and group_scales is None and group_minima is None:
        handle = engine.PackedRight(packed.data_ptr(), column_sums.data_ptr(), k, n, bits == 4)
        return PackedRight((k, n), packed, column_sums, handle)
    scales = _group_panels("group_scales", group_scales, k, n, group)
    minima = None if group_minima is None else _group_panels("group_minima", group_minima, k, n, group)
    assert group is not None
    column_sums = _group_panels("sums", _group_sums(b, group), k, n, group)
    handle = engine.PackedRight(
        packed.data_ptr(), column_sums.data_ptr(), k, n, bits == 4, group, scales.data_ptr(), address_of(minima)
    )
    return PackedRight((k, n), packed, column_sums, handle, scales, minima)


def _group_sums(b: Tensor, group: int) -> Tensor:
    """Sums of the integers (K, N) of each group, (groups, N) int32."""
    whole = b.shape[0] // group * group
    sums = b[:whole].unflatten(0, (-1, group)).sum(1, dtype=torch.int32) if whole else b.new_zeros(0, b.shape[1]).int()
    return sums if whole == b.shape[0] else torch.cat([sums, b[whole:].sum(0, keepdim=True, dtype=torch.int32)])


def _group_panels(name: str, x: Tensor | None, k: int, n: int, group: int | None) -> Tensor:
    """Numbers of the groups (groups, N) as panels (panels, groups, 64), zero in the padding."""
    if group is None or x is None:
        raise ValueError(f"group and group_scales must be given together, got {group} and {'no ' * (x is None)}scales")
    if group <= 0 or group % (2 * QUAD):
        raise ValueError(f"group must be a multiple of {2 * QUAD}, got {group}")
    if name != "sums":
        check_array(name, x, torch.float32, -(-k // group), n)
    panels = -(-n // PANEL)
    padded = torch.nn.functional.pad(x, (0, panels * PANEL - n))  # (groups, 64 panels)
    return padded.unflatten(1, (panels, PANEL)).transpose(0, 1).contiguous()


def _nibbles(packed: Tensor, k: int) -> Tensor:
    """Panels of 4-bit integers, (panels, K / 4, 64, 4), as nibbles v + 8, two quads of k in a byte; zero beyond K."""
    panels, quads = packed.shape[:2]
    shifted = torch.zeros(panels, quads + quads % 2, PANEL, QUAD, dtype=torch.uint8, device="cpu")
    shifted[:, :quads] = packed + 8
    if k % QUAD:
        shifted[:, quads - 1, :, k % QUAD :] = 0
    return shifted[:, 0::2] | shifted[:, 1::2] << 4


def _output(rows: int, n: int, dtype: torch.dtype, out: Tensor | None) -> tuple[Tensor, int, int]:
    """The output and its two memory strides, one of which is 1."""
    if dtype not in OUT_TYPES:
        raise TypeError(f"out_dtype must be one of {[str(each) for each in OUT_TYPES]}, got {dtype}")
    if out is None:
        return torch.empty(rows, n, dtype=dtype, device="cpu"), n, 1
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


class TurnedCall:
    """``(A B)^T`` (N, M), row-major, for a packed B and rows of one number and memory stride; a call checks nothing.

    Parameters
    ----------
    right : PackedRight
        (K, N).
    rows : int
        M.
    row_elements : int
        From one row of A to the next.
    dtype : torch.dtype
        Of the output, as for :func:`multiply`.
    """

    def __init__(self, right: PackedRight, rows: int, row_elements: int, dtype: torch.dtype) -> None:
        engine = extension.load_extension()
        self._right, self._rows, self._row_elements, self._out_type = right, rows, row_elements, OUT_TYPES[dtype]
        self._like = template((right.shape[1], rows), dtype)
        self._scales, self._run = engine.Scales, engine.dense

    def __call__(
        self,
        a: Tensor,
        row_scale: Tensor | None,
        col_scale: Tensor | None,
        bias: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the product, in `out` if that is given.

        Parameters
        ----------
        a : Tensor
            int8 at the address of A, contiguous rows.
        row_scale : Tensor or None, shape () or with M entries
            float32, contiguous; of a float output, which it multiplies after `col_scale`.
        col_scale, bias : Tensor or None, shape () or with N entries
            Likewise.
        out : Tensor, shape (N, M), optional
            Contiguous, of the dtype.
        """
        if out is None:
            out = torch.empty_like(self._like, memory_format=torch.contiguous_format)
        of_rows, one_row = (0, False) if row_scale is None else (row_scale.data_ptr(), row_scale.ndim == 0)
        of_columns, one_column = (0, False) if col_scale is None else (col_scale.data_ptr(), col_scale.ndim == 0)
        of_bias = 0 if bias is None else bias.data_ptr()
        scales = self._scales(of_rows, of_columns, of_bias, 0, 0, one_row, one_column)
        self._run(
            self._right.handle, a.data_ptr(), self._row_elements, scales, True, self._rows, out.data_ptr(), 1,
            self._rows, self._out_type, torch.get_num_threads(),
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
    factors: Tensor | None = None,
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
    factors : Tensor, shape (K,), optional
        float32, contiguous; the columns of X are multiplied by them before they are quantized.
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
    check_vectors(k, factors=factors)
    out, row_step, column_step = _output(m, n, out_dtype, out)
    high, engine = float(2 ** (bits - 1) - 1), extension.ENGINE or extension.load_extension()
    scales = engine.Scales(0, address_of(col_scale), address_of(bias), 0, 0)
    engine.linear(
        right.handle, x.data_ptr(), x.stride(0), address_of(x_scale), -high - 1, high, scales, m, out.data_ptr(),
        row_step, column_step, OUT_TYPES[out_dtype], torch.get_num_threads(), address_of(factors),
    )  # fmt: skip
    return out
