"""Products of a matrix with 16 probe vectors in float64 on an sm_90 GPU, and the comparison of a product with them.

A pass also sums squares, and may write a float32 matrix in float16, times a power of two that a sample of it gives.
Host side of ``estimate/probe_squares.cuh``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.estimate.config import SQUARES, TILE, ProbeConfig
from cute_kernels.estimate.probes import (
    blocks_of,
    groups_of,
    launch_sum,
    matrix_arguments,
    padded,
    readable,
)
from cute_kernels.jit.device import num_sms
from cute_kernels.jit.kernel import get_kernel


def probe_tiles(rows: int, dtype: torch.dtype, device: int) -> int:
    """Return the number of CTAs of :func:`launch_probe_squares`, for so many rows.

    Examples
    --------
    >>> probe_tiles(4096, torch.float16, 0)  # doctest: +SKIP
    128
    """
    return -(-padded(rows) // (TILE * groups_of(rows, dtype, num_sms(device))))


def launch_probe_squares(
    x: Tensor,
    w: Tensor,
    y: Tensor,
    squares: Tensor,
    scaled: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """Launch the kernel that writes ``(X W)^T`` and the sums of squares of X and of ``X W``.

    Sums are chains of float64 multiply-adds, X W is rounded to float32.

    Parameters
    ----------
    x : Tensor, shape (M, N)
        float16 or bfloat16 matrix that is ``probeable``; float32 with `scaled`, slices in memory of 4 n elements and
        aligned to 16 bytes.
    w : Tensor, shape (16, padded(N))
        float32 probes.
    y : Tensor, shape (16, padded(M))
        float32; written.
    squares : Tensor, shape (probe_tiles(M), 2)
        float64; written, the sums of a CTA each.
    scaled : Tensor, shape (M, N), optional
        float16; written, for a float32 X: its entries times a power of two, in the order of X in memory.
    scale : Tensor, shape (1,), optional
        float32; written with `scaled`: that power.
    pdl : bool, default False
        Whether the kernel may start before that in front of it, one of ours, ends.

    Examples
    --------
    >>> launch_probe_squares(a, w, y, squares)  # doctest: +SKIP
    """
    transposed = not readable(x)
    at, pitch, *_, vector = matrix_arguments(x.mT if transposed else x)
    groups = groups_of(x.shape[0], x.dtype, num_sms(x.device.index))
    config = ProbeConfig(SQUARES[transposed], REAL_DTYPES[x.dtype], groups=groups, emit_float16=scaled is not None)
    pointers = w.data_ptr(), w.shape[1], y.data_ptr(), y.shape[1], squares.data_ptr()
    more = (0 if each is None else each.data_ptr() for each in (scaled, scale))
    get_kernel(config).launch((squares.shape[0], 1, 1), (at, pitch, *x.shape, vector, *pointers, *more), pdl=pdl)


def launch_double_comparison(
    c: Tensor,
    w: Tensor,
    product: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    parts: Tensor,
    squares: tuple[Tensor, Tensor],
    result: Tensor,
) -> None:
    """Launch the kernels of :func:`cute_kernels.estimate.probes.launch_comparison` with sums in float64.

    Parameters
    ----------
    c, w, product
        As there.
    scale_a, scale_b : Tensor, shape (1,)
        float32 powers of two; `c` is divided by both first, in place.
    parts : Tensor
        As there.
    squares : tuple of Tensor
        Of A and of B, which :func:`launch_probe_squares` left.
    result : Tensor, shape (264,)
        float64, may be pinned: the sums of the comparison, then those of A, ``A (B W)``, B and ``B W``.

    Examples
    --------
    >>> launch_double_comparison(c, w, y, one, one, parts, (of_a, of_b), result)  # doctest: +SKIP
    """
    blocks, groups = blocks_of(c)
    get_kernel(ProbeConfig("compare_double", REAL_DTYPES[c.dtype], groups=groups)).launch(
        (blocks, 1, 1),
        (
            *matrix_arguments(c), w.data_ptr(), w.shape[1], product.data_ptr(), product.shape[1],
            scale_a.data_ptr(), scale_b.data_ptr(), parts.data_ptr(),
        ),
    )  # fmt: skip
    launch_sum(parts, blocks, result, squares)
