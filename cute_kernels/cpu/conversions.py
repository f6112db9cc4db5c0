"""Conversions on the CPU engine: quantization, digit planes, dense to SR-BCRS, column order."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.cpu import extension
from cute_kernels.cpu.arguments import STRIDES, VECTOR_LENGTHS, check_address, check_array, check_quantize_arguments

NEGATIVE, NONFINITE = 1, 2  # flags of `quantize_cpu`: an entry is below zero; an entry is inf or NaN


def quantize_cpu(
    x: Tensor, out: Tensor, scale: Tensor, *, bits: int, signed: bool, truncate: bool, given: bool, mode: int
) -> int:
    """Quantize `x` into `out` and its scales into `scale`.

    ``out = clamp(round(x / scale))``, ``scale = max|x| / q_max`` over a slice; NaN for a slice with non-finite entries.

    Parameters
    ----------
    x : Tensor, shape (rows, columns)
        float32 or float64, row-major.
    out : Tensor, shape (rows, columns)
        Integers in storage form, contiguous rows; two per byte for 4 bits.
    scale : Tensor
        Dtype of `x`: 1, `rows` or `columns` elements.
    bits, signed : int, bool
        Width and signedness of the integers.
    truncate : bool
        Round toward zero instead of to nearest even.
    given : bool
        Read the scales instead of computing them.
    mode : int
        0 per-tensor, 1 per-row, 2 per-column scales.

    Returns
    -------
    int
        Bits :data:`NEGATIVE` and :data:`NONFINITE`.

    Examples
    --------
    >>> x, out, scale = torch.tensor([[1.0, -0.5]]), torch.empty(1, 2, dtype=torch.int8), torch.empty(1)
    >>> quantize_cpu(x, out, scale, bits=8, signed=True, truncate=False, given=False, mode=0)
    1
    >>> out.tolist(), round(1 / float(scale), 3)
    ([[127, -64]], 127.0)
    """
    rows, columns = x.shape
    check_quantize_arguments(x, out, scale, bits, signed, mode)
    engine = extension.ENGINE or extension.load_extension()
    return int(
        engine.quantize(
            x=x.data_ptr(),
            out=out.data_ptr(),
            scale=scale.data_ptr(),
            rows=rows,
            columns=columns,
            row_elements=x.stride(0),
            out_row_bytes=out.stride(0) * out.element_size(),
            bits=bits,
            is_double=x.dtype == torch.float64,
            is_signed=signed,
            truncate=truncate,
            given_scale=given,
            scale_mode=mode,
            threads=torch.get_num_threads(),
        )
    )


def decompose_cpu(
    x: Tensor,
    count: int,
    axis: int | None,
    *,
    high: float,
    radix: float,
    ahead: tuple[float, float] = (0.0, 0.0),
    power: bool = False,
    exact: bool = False,
    truncate: bool = False,
    limit: float = 0.0,
) -> tuple[tuple[Tensor, ...], Tensor, int]:
    """Compute digit planes and scales of a float32 matrix, in at most two passes.

    ``x = scale (q0 + q1 / radix + q2 / radix^2)``, cut after `count` digits, ``scale = max|x| / high`` over a slice.
    The operations are those of :func:`cute_kernels.convert.digits.digits`, or with `exact` those of
    :func:`residual.decompose`, so that the integers are equal.

    Parameters
    ----------
    x : Tensor, shape (rows, columns)
        float32.
    count : int
        Digits: 1 to 3, 2 with `exact`.
    axis : int or None
        1 for per-row, 0 for per-column, None for per-tensor scales.
    high : float
        Integer of the amax.
    radix : float
        Steps of a digit per step of the digit before it.
    ahead : tuple of float, optional
        Added before the roundings to the first two of three digits.
    power : bool, optional
        Scales are powers of two.
    exact : bool, optional
        Quotients and scales in float64, two digits.
    truncate : bool, optional
        With `exact`: digits round toward zero.
    limit : float, optional
        With `exact`: largest second digit.

    Returns
    -------
    planes : tuple of Tensor, shape (rows, columns)
        int8; the memory order of `x` if one of its dimensions is contiguous.
    scale : Tensor, shape (rows,), (columns,) or ()
        float32, float64 with `exact`.
    flags : int
        :data:`NONFINITE` or 0.

    Examples
    --------
    >>> planes, scale, flags = decompose_cpu(torch.tensor([[127.0, -3.25]]), 2, 1, high=127.0, radix=256.0)
    >>> [plane.tolist() for plane in planes], scale.tolist(), flags
    ([[[127, -3]], [[0, -64]]], [1.0], 0)
    """
    check_address("x", x, torch.float32)
    if axis not in (None, 0, 1):
        raise ValueError(f"axis must be None, 0 or 1, got {axis}")
    if x.stride(1) != 1 and x.shape[1] > 1:
        if x.stride(0) == 1 or x.shape[0] == 1:
            other_axis = None if axis is None else 1 - axis
            planes, scale, flags = decompose_cpu(
                x.t(), count, other_axis, high=high, radix=radix, ahead=ahead, power=power, exact=exact,
                truncate=truncate, limit=limit,
            )  # fmt: skip
            return tuple(plane.t() for plane in planes), scale, flags
        x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty(count, rows, columns, dtype=torch.int8, device="cpu")
    size = () if axis is None else (x.shape[1 - axis],)
    scale = torch.empty(size, dtype=torch.float64 if exact else torch.float32, device="cpu")
    flags = extension.load_extension().digits(
        x=x.data_ptr(),
        planes=out.data_ptr(),
        scale=scale.data_ptr(),
        rows=rows,
        columns=columns,
        row_elements=x.stride(0),
        out_row_bytes=columns,
        plane_bytes=rows * columns,
        count=count,
        exact=exact,
        high=high,
        radix=radix,
        ahead0=ahead[0],
        ahead1=ahead[1],
        power=power,
        truncate=truncate,
        limit=limit,
        scale_mode={None: 0, 1: 1, 0: 2}[axis],
        threads=torch.get_num_threads(),
    )
    return tuple(out.unbind(0)), scale, int(flags)


def order_columns(until: Tensor, first: Tensor, order: Tensor, group: int, window: int, slots: Tensor) -> None:
    """Fill `slots` with the order of columns that avoids bank conflicts; shapes as in ``layout/column_order.cuh``."""
    rows, tiles = until.shape[:2]
    check_array("until", until, torch.int32, rows, tiles, 8)
    check_array("first", first, torch.int64, rows * 8)
    check_array("order", order, torch.int64, None)
    check_array("slots", slots, torch.int64, order.numel())
    extension.load_extension().spread_slots(
        until.data_ptr(), first.data_ptr(), order.data_ptr(), rows, tiles, group, window, slots.data_ptr(),
        order.numel(), torch.get_num_threads(),
    )  # fmt: skip


def _rows_of(x: Tensor) -> Tensor:
    """`x` (M, K) with contiguous rows."""
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def compress_cpu(ints: Tensor, mask: Tensor, vector_length: int, stride: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Convert a dense matrix to SR-BCRS: the vectors with an element in `mask`.

    Parameters
    ----------
    ints : Tensor, shape (M, K)
        Integers of 1 or 2 bytes, not empty. Elements outside the mask are stored as zero.
    mask : Tensor, shape (M, K)
        bool.
    vector_length, stride : int
        V; padding unit of a row, in vectors.

    Returns
    -------
    row_start, row_end : Tensor, shape (R,)
        int64.
    col_indices : Tensor, shape (padded vectors,)
        int32, -1 in the padding.
    values : Tensor, shape (padded vectors / stride, V, stride)
        Dtype of `ints`.

    Examples
    --------
    >>> ints = torch.tensor([[0, 5, 0], [7, 6, 0]], dtype=torch.int8)
    >>> start, end, columns, values = compress_cpu(ints, ints != 0, 2, 16)
    >>> start.tolist(), end.tolist(), columns[:3].tolist(), values[0, :, :3].tolist()
    ([0], [2], [0, 1, -1], [[0, 5, 0], [7, 6, 0]])
    """
    if vector_length not in VECTOR_LENGTHS or stride not in STRIDES:
        raise ValueError(f"vector_length must be one of {VECTOR_LENGTHS} and stride one of {STRIDES}, "
                         f"got {vector_length} and {stride}")  # fmt: skip
    m, k = ints.shape
    check_address("ints", ints, ints.dtype)
    check_address("mask", mask, torch.bool)
    if ints.element_size() > 2 or tuple(mask.shape) != (m, k):
        raise ValueError(f"ints and mask must have elements of 1 or 2 bytes and one shape, got {ints.dtype} and "
                         f"{(m, k)}, {tuple(mask.shape)}")  # fmt: skip
    ints, mask = _rows_of(ints), _rows_of(mask)
    count = -(-m // vector_length)
    lengths = torch.empty(count, dtype=torch.int64, device="cpu")

    def run(lengths: Tensor | None, starts: Tensor | None, columns: Tensor | None, values: Tensor | None) -> None:
        addresses = [0 if t is None else t.data_ptr() for t in (lengths, starts, columns, values)]
        extension.load_extension().compress(
            mask.data_ptr(), ints.data_ptr(), m, k, mask.stride(0), ints.stride(0) * ints.element_size(),
            ints.element_size(), vector_length, stride, *addresses, torch.get_num_threads(),
        )  # fmt: skip

    run(lengths, None, None, None)
    starts = torch.zeros(count + 1, dtype=torch.int64, device="cpu")
    torch.cumsum((lengths + stride - 1) // stride * stride, 0, out=starts[1:])
    total = int(starts[-1])
    columns = torch.empty(total, dtype=torch.int32, device="cpu")
    values = torch.empty(total // stride, vector_length, stride, dtype=ints.dtype, device="cpu")
    run(None, starts, columns, values)
    start = starts[:-1]
    return start, start + lengths, columns, values
