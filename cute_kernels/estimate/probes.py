"""Products of a matrix with sixteen vectors on a GPU, and the sums by which such products judge ``C = A B``.

The pass over the matrix may find the largest magnitudes of its rows or columns on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig
from cute_kernels.jit.device import device_of, num_sms
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.jit.launch_cache import LaunchCache

TOPS = ("", "rows", "columns")
PROBES = 16
TILE = 32  # rows of a group of warps; vectors are padded to a multiple of it
KERNELS = [*((kernel, tops) for kernel in ("probe", "probe_transposed") for tops in TOPS), ("compare_rows", "")]
SUMS = PROBES * PROBES + 4
PARTS = 16 * (16 * 40 + 32) * 4  # bytes of the warps' sums and maxima, which lie where the ring was
_LONGEST = 2**30  # entries of a line, whose places are int32
_RUN = 4  # entries that a lane loads at once
_SPLIT = 512  # columns of a block, at least, where blocks share a tile's, which takes another kernel for their sums
_FEW = 4  # they do where there are so many multiprocessors for each tile
_GAIN = 1.15  # of reading W half as often
_AWAITED = 0x7FF8_5EED_0000_0001  # no sum is this NaN
_replays = LaunchCache(256)


@dataclass(frozen=True)
class ProbeConfig(KernelConfig):
    """What a kernel is compiled for: ``kernel`` and ``tops`` are of :data:`KERNELS`, ``x`` is the matrix's dtype.

    The kernel ``sum_comparison``, which reads sums in float64, has ``x`` float32 and no ``tops``.

    ``probe_transposed`` reads X^T, row by row.  ``tops``: what the other kernels than ``compare_rows`` find the largest
    magnitudes of, one of :data:`TOPS`.  A block has ``groups`` times 32 rows; ``stages`` of what its warps read are in
    shared memory or on their way there.  ``halves``: ``probe`` also writes the matrix, float32, in float16.
    """

    kernel: str
    x: str
    tops: str = ""
    groups: int = 1
    stages: int = 3
    halves: bool = False

    @property
    def threads(self) -> int:
        return 512

    @property
    def smem_bytes(self) -> int:
        if self.kernel == "sum_comparison":
            return 0
        ring = self.stages * 16 * self.threads * (4 if self.x == "float32" else 2)  # a thread has 16 entries at a time
        return max(ring, PARTS)

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        marks = "".join(f"-{mark}" for mark in (self.tops, "halves" if self.halves else "") if mark)
        return f"{self.kernel}-{self.x}-g{self.groups}{marks}"

    @property
    def kernel_header(self) -> str:
        compares = self.kernel in ("compare_rows", "sum_comparison")
        return "estimate/probe_compare.cuh" if compares else "estimate/probes.cuh"

    @property
    def kernel_entry(self) -> str:
        return self.kernel.removesuffix("_transposed")

    def _constants(self) -> dict[str, object]:
        return {
            "kAbsmax": TOPS.index(self.tops),
            "kTransposed": self.kernel == "probe_transposed",
            "kGroups": self.groups,
            "kStages": self.stages,
            "kPartsBytes": PARTS,
            "kHalves": self.halves,
        }

    def _types(self) -> dict[str, str]:
        return {"Source": OUT_TYPES[self.x]}


class Comparison(NamedTuple):
    """Sums over the sixteen vectors W, in float64 on the CPU.

    ``gram`` (16, 16): of ``Y = P - C W``, ``Y^T Y``; ``product``, ``claimed``, ``result``: ``||P||^2``, ``||C W||^2``
    and ``||C||^2``; ``far``: how many scales are NaN or out of bounds.
    """

    gram: np.ndarray
    product: float
    claimed: float
    result: float
    out_of_range: int


def padded(count: int) -> int:
    """Length of a vector in memory."""
    return -(-count // TILE) * TILE


def readable(x: Tensor) -> bool:
    """Whether the kernels read ``x`` (M, N) as it lies: on a GPU, rows contiguous, float32, float16 or bfloat16;
    M and N are 2^30 at most."""
    rows = x.stride(1) == 1 or x.shape[1] == 1
    return x.is_cuda and x.dtype in REAL_DTYPES and rows and x.numel() > 0 and max(x.shape) <= _LONGEST


def probeable(x: Tensor) -> bool:
    """Whether :func:`probe` reads ``x`` as it lies: it or its transpose is :func:`readable`."""
    return readable(x) or (x.is_cuda and readable(x.mT))


def matrix(x: Tensor) -> tuple[int, ...]:
    """Address, elements from one row to the next, rows, columns, and whether runs of entries can be loaded at once."""
    rows, columns = x.shape
    pitch, run = x.stride(0) if rows > 1 else columns, _RUN * x.element_size()
    vector = x.data_ptr() % run == 0 and pitch * x.element_size() % run == 0
    return x.data_ptr(), pitch, rows, columns, int(vector)


def probe(x: Tensor, w: Tensor) -> Tensor:
    """``Y^T`` for ``Y = X W``: x (M, N) :func:`probeable`, w (16, padded(N)) float32, to (16, padded(M)) float32.

    ``w`` holds the vectors one after the other; beyond N its entries count for nothing but must be finite.  Beyond M
    the result is zero.  Does not wait for the GPU.
    """
    return _probe(x, w, "")[0]


def probe_with_absmax(x: Tensor, w: Tensor, lines: str) -> tuple[Tensor, Tensor]:
    """As :func:`probe`, and the largest magnitudes of the ``lines``, ``rows`` or ``columns``, float32 (M,) or (N,).

    Where an entry is NaN so is that magnitude; with infinity and without NaN it is infinite.
    """
    return _probe(x, w, lines)[:2]


def can_emit_float16(x: Tensor) -> bool:
    """Whether :func:`probe_with_float16` takes ``x``: float32, rows of a multiple of 4 entries, aligned to 16 bytes."""
    return readable(x) and x.dtype == torch.float32 and x.shape[1] % _RUN == 0 and matrix(x)[-1] == 1


def probe_with_float16(x: Tensor, w: Tensor, lines: str) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`probe_with_absmax`, and x in float16 (M, N), for an x that :func:`can_emit_float16` allows."""
    y, tops, halves = _probe(x, w, lines, halved=True)
    assert halves is not None
    return y, tops, halves


def _groups(rows: int, dtype: torch.dtype, at_once: int) -> int:
    """Groups of 32 rows a block: two, which read W half as often, where blocks fill the GPU about as well."""
    if dtype != torch.float32:
        return 1

    def busy(tile: int) -> float:
        tiles = -(-rows // tile)
        return tiles / (-(-tiles // at_once) * at_once)

    return 2 if _GAIN * busy(2 * TILE) >= busy(TILE) else 1


def _probe(x: Tensor, w: Tensor, lines: str, halved: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    transposed, width = not readable(x), padded(x.shape[0])
    rows, columns = x.shape
    with device_of(x):
        groups, tiles, splits = grid(x.shape, x.dtype, x.device.index)
        parts = workspace.empty((splits, PROBES, width), torch.float32, x.device)
        alone = not lines or (lines == "rows" and splits == 1)  # else blocks meet at each largest magnitude
        size = {"rows": rows, "columns": columns}.get(lines, 0)
        tops = (workspace.empty if alone else workspace.zeros)((size,), torch.float32, x.device)
        halves = workspace.empty((rows, columns), torch.float16, x.device) if halved else None

        def launch() -> None:
            name = "probe_transposed" if transposed else "probe"
            at, pitch, *_, vector = matrix(x.mT if transposed else x)
            pointers = w.data_ptr(), w.shape[1], parts.data_ptr(), width, tops.data_ptr()
            converted = 0 if halves is None else halves.data_ptr()
            get_kernel(ProbeConfig(name, REAL_DTYPES[x.dtype], lines, groups, halves=halved)).launch(
                (tiles, splits, 1), (at, pitch, rows, columns, vector, *pointers, converted), pdl=True
            )

        written = () if halves is None else (halves,)
        _replays.run((lines, halved, *_places(x, w, parts, tops, *written)), launch)
    return parts[0] if splits == 1 else parts.sum(0), tops, halves


@lru_cache(maxsize=256)
def grid(shape: torch.Size, dtype: torch.dtype, device: int) -> tuple[int, int, int]:
    """For a pass over such a matrix: groups of 32 rows a block, tiles, blocks that share the columns of one."""
    rows, columns = shape
    at_once = num_sms(device)
    groups = _groups(rows, dtype, at_once)
    tiles = -(-padded(rows) // (groups * TILE))
    idle = at_once // tiles
    return groups, tiles, max(1, min(idle, columns // _SPLIT)) if idle >= _FEW else 1


def takes_one_launch(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether :func:`probe` of such a matrix is one launch: no two blocks share the columns of a tile."""
    return grid(shape, dtype, device.index)[2] == 1


def _places(x: Tensor, *others: Tensor) -> tuple[Hashable, ...]:
    """All that a launch depends on: how x lies, and where the others are, which lie without gaps."""
    where = (x.data_ptr(), *(each.data_ptr() for each in others))
    return x.shape, x.stride(), x.dtype, x.device.index, where


class _ResultBuffer(threading.local):
    """Where a kernel leaves a thread's sums: memory of the host that a GPU writes to."""

    def __init__(self) -> None:
        self.sums = torch.empty(SUMS, dtype=torch.float64, pin_memory=True)
        self.words = self.sums.numpy().view(np.int64)


@lru_cache
def _result_buffers() -> _ResultBuffer:
    return _ResultBuffer()


def result_buffer() -> Tensor:
    """Where a comparison that this thread starts leaves its sums."""
    return _result_buffers().sums


def arm_result() -> None:
    """From now on :func:`wait_result` knows by its words whether an answer is there; all that this thread started, is."""
    _result_buffers().words.fill(_AWAITED)


def wait_result(device: torch.device) -> Comparison:
    """The answer since :func:`arm_result`, as soon as it is there, whatever torch's current stream does after it.

    A caller that has started one and cannot take it must wait for the stream, or the next one is taken for it.
    """
    words = _result_buffers().words
    while (words == _AWAITED).any():
        if torch.cuda.current_stream(device).query():  # raises where a kernel failed
            break
    return _comparison_there()


def compare(
    c: Tensor, w: Tensor, product: Tensor, scales: tuple[Tensor, ...] = (), bounds: tuple[float, float] = (0.0, 0.0)
) -> Comparison:
    """Compare ``C W`` with ``P``: c (M, N) :func:`readable`, w (16, padded(N)), product ``P^T`` (16, padded(M)).

    ``scales``: up to two contiguous float32 vectors, of whose entries other than zero those outside of
    ``bounds`` are counted.
    Waits for the GPU.
    """
    start_comparison(c, w, product, scales, bounds)
    torch.cuda.current_stream(c.device).synchronize()
    return _comparison_there()


def start_comparison(
    c: Tensor, w: Tensor, product: Tensor, scales: tuple[Tensor, ...], bounds: tuple[float, float]
) -> None:
    """Start :func:`compare` on torch's current stream; does not wait."""
    with device_of(c):
        at_once = num_sms(c.device.index)
        groups = _groups(c.shape[0], c.dtype, at_once)
        blocks = min(-(-product.shape[1] // (groups * TILE)), at_once)
        parts, there = workspace.empty((blocks, SUMS), torch.float64, c.device), result_buffer()

        def launch() -> None:
            pointers = [part for s in scales for part in (s.data_ptr(), s.numel())] + [0, 0] * (2 - len(scales))
            get_kernel(ProbeConfig("compare_rows", REAL_DTYPES[c.dtype], groups=groups)).launch(
                (blocks, 1, 1),
                (
                    *matrix(c), w.data_ptr(), w.shape[1], product.data_ptr(), product.shape[1], *pointers,
                    *(np.float32(bound) for bound in bounds), parts.data_ptr(),
                ),
                pdl=True,
            )  # fmt: skip
            start_sum(parts)

        sizes = tuple(s.numel() for s in scales)
        _replays.run(("compare", *_places(c, w, product, parts, *scales, there), sizes, bounds), launch)


def start_sum(parts: Tensor) -> None:
    """Start to add the blocks' parts, float64 (blocks, 260), to :func:`result_buffer`."""
    get_kernel(ProbeConfig("sum_comparison", "float32")).launch(
        (-(-SUMS // 32), 1, 1), (parts.data_ptr(), parts.shape[0], result_buffer().data_ptr()), pdl=True
    )


def _comparison_there() -> Comparison:
    """The answer, once it is known to be there."""
    sums = result_buffer().numpy()
    product_squares, claimed, result, far = sums[-4:].tolist()
    return Comparison(sums[:-4].reshape(PROBES, PROBES).copy(), product_squares, claimed, result, int(far))


def default_configs() -> list[ProbeConfig]:
    """The kernels of all input types."""
    single = [ProbeConfig(kernel, x, tops) for kernel, tops in KERNELS for x in REAL_DTYPES.values()]
    double = [ProbeConfig(kernel, "float32", tops, groups=2) for kernel, tops in KERNELS]
    halves = [ProbeConfig("probe", "float32", tops, n, halves=True) for tops in TOPS[1:] for n in (1, 2)]
    return [*single, *double, *halves, ProbeConfig("sum_comparison", "float32")]
