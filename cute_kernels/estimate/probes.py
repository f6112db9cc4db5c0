"""Products of a matrix with 16 probe vectors on a GPU, and the sums that estimate the error of ``C = A B``.

A pass over the matrix can also emit the absmax of its rows or columns.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.estimate.config import PROBES, SUMS, TILE, ProbeConfig
from cute_kernels.jit import workspace
from cute_kernels.jit.device import device_of, num_sms
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.jit.launch_cache import LaunchCache

__all__ = [
    "Comparison",
    "blocks_of",
    "compare",
    "comparison_of",
    "groups_of",
    "launch_comparison",
    "launch_sum",
    "matrix_arguments",
    "padded",
    "probe",
    "probe_with_absmax",
    "probeable",
    "readable",
]

_MAX_LENGTH = 2**30  # elements per row or column; indices are int32
_RUN = 4  # elements per load of a lane
_MIN_SPLIT = 512  # columns per CTA if CTAs share a tile; their sums take another kernel
_SMS_PER_TILE = 4  # SMs per tile from which CTAs share one
_GAIN = 1.15  # speedup of reading W half as often, measured
_replays = LaunchCache(256)


class Comparison(NamedTuple):
    """Sums over the 16 probes W, in float64 on the CPU.

    Attributes
    ----------
    gram : numpy.ndarray, shape (16, 16)
        ``Y^T Y`` of ``Y = P - C W``, with ``P = A B W``.
    product : float
        ``||P||_F^2``.
    claimed : float
        ``||C W||_F^2``.
    result : float
        ``||C||_F^2``.
    out_of_range : int
        Number of scales that are NaN or out of bounds.

    Examples
    --------
    >>> found = Comparison(np.zeros((16, 16)), product=4.0, claimed=4.0, result=0.25, out_of_range=0)
    >>> float(np.trace(found.gram)) / found.product
    0.0
    """

    gram: np.ndarray
    product: float
    claimed: float
    result: float
    out_of_range: int


def padded(count: int) -> int:
    """Return the length of a vector in memory: `count` rounded up to a multiple of 32.

    Examples
    --------
    >>> padded(33)
    64
    """
    return -(-count // TILE) * TILE


def readable(x: Tensor) -> bool:
    """Return whether the kernels read `x`, shape (M, N), without a copy.

    On a GPU, float32, float16 or bfloat16, with contiguous rows; M and N are at most 2^30.

    Examples
    --------
    >>> readable(torch.zeros(4, 8))  # not on a GPU
    False
    """
    rows = x.stride(1) == 1 or x.shape[1] == 1
    return x.is_cuda and x.dtype in REAL_DTYPES and rows and x.numel() > 0 and max(x.shape) <= _MAX_LENGTH


def probeable(x: Tensor) -> bool:
    """Return whether :func:`probe` reads `x` without a copy: it or its transpose is :func:`readable`.

    Examples
    --------
    >>> probeable(torch.zeros(4, 8).t())  # not on a GPU
    False
    """
    return readable(x) or (x.is_cuda and readable(x.mT))


def matrix_arguments(x: Tensor) -> tuple[int, ...]:
    """Return address, memory stride, rows, columns, and whether rows allow vector loads.

    Examples
    --------
    >>> matrix_arguments(torch.zeros(4, 8))[1:]
    (8, 4, 8, 1)
    """
    rows, columns = x.shape
    pitch, run = x.stride(0) if rows > 1 else columns, _RUN * x.element_size()
    vector = x.data_ptr() % run == 0 and pitch * x.element_size() % run == 0
    return x.data_ptr(), pitch, rows, columns, int(vector)


def probe(x: Tensor, w: Tensor) -> Tensor:
    """Return ``(X W)^T``; does not wait for the GPU.

    Parameters
    ----------
    x : Tensor, shape (M, N)
        Matrix that is :func:`probeable`.
    w : Tensor, shape (16, padded(N))
        float32 probes, one per row; elements beyond N must be finite and do not count.

    Returns
    -------
    Tensor, shape (16, padded(M))
        float32; zero beyond M.

    Examples
    --------
    >>> x, w = torch.zeros(4, 8, device="cuda"), torch.zeros(16, 32, device="cuda")  # doctest: +SKIP
    >>> probe(x, w).shape  # doctest: +SKIP
    torch.Size([16, 32])
    """
    return _probe(x, w, "")[0]


def probe_with_absmax(x: Tensor, w: Tensor, axis: str) -> tuple[Tensor, Tensor]:
    """Return ``(X W)^T`` and the absmax of each row or column of `x`; does not wait for the GPU.

    Parameters
    ----------
    x : Tensor, shape (M, N)
        Matrix that is :func:`probeable`.
    w : Tensor, shape (16, padded(N))
        float32 probes.
    axis : str
        ``"rows"`` or ``"columns"``.

    Returns
    -------
    product : Tensor, shape (16, padded(M))
        float32.
    absmax : Tensor, shape (M,) or (N,)
        float32; NaN if a slice has a NaN, else infinite if it has an infinity.

    Examples
    --------
    >>> x, w = torch.ones(4, 8, device="cuda"), torch.zeros(16, 32, device="cuda")  # doctest: +SKIP
    >>> probe_with_absmax(x, w, "rows")[1].tolist()  # doctest: +SKIP
    [1.0, 1.0, 1.0, 1.0]
    """
    return _probe(x, w, axis)


def groups_of(rows: int, dtype: torch.dtype, at_once: int) -> int:
    """Return the groups of 32 rows per CTA: two, which read W half as often, if CTAs fill the GPU about as well.

    Examples
    --------
    >>> groups_of(4096, torch.float32, 132), groups_of(8192, torch.float32, 132), groups_of(8192, torch.float16, 132)
    (1, 2, 1)
    """
    if dtype != torch.float32:
        return 1

    def busy(tile: int) -> float:
        tiles = -(-rows // tile)
        return tiles / (-(-tiles // at_once) * at_once)

    return 2 if _GAIN * busy(2 * TILE) >= busy(TILE) else 1


def _probe(x: Tensor, w: Tensor, axis: str) -> tuple[Tensor, Tensor]:
    """Launch a probe kernel; return ``(X W)^T`` and the absmax of the slices."""
    transposed, width = not readable(x), padded(x.shape[0])
    rows, columns = x.shape
    with device_of(x):
        groups, tiles, splits = _grid(x.shape, x.dtype, x.device.index)
        parts = workspace.empty((splits, PROBES, width), torch.float32, x.device)  # (splits, 16, padded(M))
        no_atomics = not axis or (axis == "rows" and splits == 1)  # else CTAs share the absmax of a slice
        size = {"rows": rows, "columns": columns}.get(axis, 0)
        absmax = (workspace.empty if no_atomics else workspace.zeros)((size,), torch.float32, x.device)  # (M,) or (N,)

        def launch() -> None:
            name = "probe_transposed" if transposed else "probe"
            at, pitch, *_, vector = matrix_arguments(x.mT if transposed else x)
            pointers = w.data_ptr(), w.shape[1], parts.data_ptr(), width, absmax.data_ptr()
            get_kernel(ProbeConfig(name, REAL_DTYPES[x.dtype], axis, groups)).launch(
                (tiles, splits, 1), (at, pitch, rows, columns, vector, *pointers), pdl=True
            )

        _replays.run((axis, *_launch_key(x, w, parts, absmax)), launch)
    return parts[0] if splits == 1 else parts.sum(0), absmax


@lru_cache(maxsize=256)
def _grid(shape: torch.Size, dtype: torch.dtype, device: int) -> tuple[int, int, int]:
    """Return the grid of a pass: groups of 32 rows per CTA, tiles, CTAs that share the columns of a tile."""
    rows, columns = shape
    at_once = num_sms(device)
    groups = groups_of(rows, dtype, at_once)
    tiles = -(-padded(rows) // (groups * TILE))
    idle = at_once // tiles
    return groups, tiles, max(1, min(idle, columns // _MIN_SPLIT)) if idle >= _SMS_PER_TILE else 1


def _launch_key(x: Tensor, *others: Tensor) -> tuple[Hashable, ...]:
    """Return the key of a launch: layout and address of `x`, addresses of the contiguous others."""
    where = (x.data_ptr(), *(each.data_ptr() for each in others))
    return x.shape, x.stride(), x.dtype, x.device.index, where


class _ResultBuffer(threading.local):
    """Pinned host memory to which a kernel writes the sums of one thread's comparison, float64 (260,)."""

    def __init__(self) -> None:
        self.sums = torch.empty(SUMS, dtype=torch.float64, pin_memory=True, device="cpu")


@lru_cache
def _result_buffers() -> _ResultBuffer:
    """Return the buffer of the calling thread."""
    return _ResultBuffer()


def compare(
    c: Tensor, w: Tensor, product: Tensor, scales: tuple[Tensor, ...] = (), bounds: tuple[float, float] = (0.0, 0.0)
) -> Comparison:
    """Compare ``C W`` with ``P = A B W``; waits for the GPU.

    Parameters
    ----------
    c : Tensor, shape (M, N)
        Computed product, :func:`readable`.
    w : Tensor, shape (16, padded(N))
        float32 probes.
    product : Tensor, shape (16, padded(M))
        ``P^T``, float32.
    scales : tuple of Tensor, optional
        Up to two contiguous float32 vectors.
    bounds : tuple of float, optional
        Nonzero scales outside of these bounds are counted.

    Returns
    -------
    Comparison
        The sums.

    Examples
    --------
    >>> w = torch.randn(16, 32, device="cuda")  # doctest: +SKIP
    >>> compare(a @ b, w, probe(a, probe(b, w))).claimed > 0  # doctest: +SKIP
    True
    """
    _start_comparison(c, w, product, scales, bounds)
    torch.cuda.current_stream(c.device).synchronize()
    return _read_result()


def _start_comparison(
    c: Tensor, w: Tensor, product: Tensor, scales: tuple[Tensor, ...], bounds: tuple[float, float]
) -> None:
    """Start :func:`compare` on the current stream."""
    with device_of(c):
        parts, result = workspace.empty((blocks_of(c)[0], SUMS), torch.float64, c.device), _result_buffers().sums

        def launch() -> None:
            launch_comparison(c, w, product, scales, bounds, parts, result)

        sizes = tuple(s.numel() for s in scales)
        _replays.run(("compare", *_launch_key(c, w, product, parts, *scales, result), sizes, bounds), launch)


def blocks_of(c: Tensor) -> tuple[int, int]:
    """Return the number of CTAs that compare, and the groups of 32 rows of each.

    Examples
    --------
    >>> blocks_of(torch.zeros(4096, 4096, device="cuda"))  # doctest: +SKIP
    (128, 1)
    """
    at_once = num_sms(c.device.index)
    groups = groups_of(c.shape[0], c.dtype, at_once)
    return min(-(-padded(c.shape[0]) // (groups * TILE)), at_once), groups


def launch_comparison(
    c: Tensor, w: Tensor, product: Tensor, scales: tuple[Tensor, ...], bounds: tuple[float, float],
    parts: Tensor, result: Tensor,
) -> None:  # fmt: skip
    """Launch the kernels of :func:`compare`; float64 `parts`, a row of 260 an SM, `result`, 260, may be pinned.

    Examples
    --------
    >>> launch_comparison(c, w, probe(a, probe(b, w)), (), (0.0, 0.0), parts, result)  # doctest: +SKIP
    """
    blocks, groups = blocks_of(c)
    pointers = [part for s in scales for part in (s.data_ptr(), s.numel())] + [0, 0] * (2 - len(scales))
    get_kernel(ProbeConfig("compare_rows", REAL_DTYPES[c.dtype], groups=groups)).launch(
        (blocks, 1, 1),
        (
            *matrix_arguments(c), w.data_ptr(), w.shape[1], product.data_ptr(), product.shape[1], *pointers,
            *(np.float32(bound) for bound in bounds), parts.data_ptr(),
        ),
        pdl=True,
    )  # fmt: skip
    launch_sum(parts, blocks, result)


def launch_sum(parts: Tensor, blocks: int, result: Tensor, squares: tuple[Tensor, ...] = ()) -> None:
    """Launch the kernel that adds the rows of `parts` in their order, and two tables of `squares` behind them.

    Examples
    --------
    >>> launch_sum(parts, 132, result)  # doctest: +SKIP
    """
    tables = [part for each in squares for part in (each.data_ptr(), each.shape[0])] or [0] * 4
    get_kernel(ProbeConfig("sum_comparison", "float32")).launch(
        (-(-SUMS // 32) + bool(squares), 1, 1), (parts.data_ptr(), blocks, result.data_ptr(), *tables), pdl=True
    )


def comparison_of(sums: np.ndarray) -> Comparison:
    """Return the comparison of the numbers (260,) that :func:`launch_comparison` leaves, which are not copied.

    Examples
    --------
    >>> comparison_of(np.zeros(260)).result
    0.0
    """
    product_squares, claimed, result, out_of_range = sums[-4:].tolist()
    return Comparison(sums[:-4].reshape(PROBES, PROBES), product_squares, claimed, result, int(out_of_range))


def _read_result() -> Comparison:
    """Return the comparison in the result buffer."""
    return comparison_of(_result_buffers().sums.numpy().copy())
