"""Products of a matrix with sixteen vectors on a GPU, and the sums by which such products judge ``C = A B``.

The pass over the matrix may find the largest magnitudes of its rows or columns on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.jit.compiler import Unit
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.quantize import device_of
from cute_kernels.source import OUT_TYPES, constants

PROBES = 16
TILE = 32  # rows of a block; vectors are padded to a multiple of it
TOPS = ("", "rows", "columns")
KERNELS = [*((kernel, tops) for kernel in ("probe_rows", "probe_columns") for tops in TOPS), ("compare_rows", "")]
SOURCES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_SUMS = PROBES * PROBES + 4
_RUN = 4  # entries that a lane loads at once
_TILE_COLUMNS, _SPLIT_ROWS = 128, 256  # of a block of probe_columns: columns, and rows at least where blocks share them
_MOST_COLUMNS = 2**30  # the kernels count columns in 32 bits


@dataclass(frozen=True)
class ProbeConfig:
    """What a kernel is compiled for: ``kernel`` is its name, ``x`` the matrix's dtype.

    ``tops``: what the other kernels than ``compare_rows`` find the largest magnitudes of, one of :data:`TOPS`.
    """

    kernel: str
    x: str
    tops: str = ""

    @property
    def threads(self) -> int:
        return 512

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        return f"{self.kernel}-{self.x}{'-' if self.tops else ''}{self.tops}"

    def unit(self, arch: str) -> Unit:
        """The translation unit of this config for ``arch``."""
        source = (
            '#include "probes.cuh"\nnamespace magicube {\nstruct Config {\n'
            f"{constants({'kTops': TOPS.index(self.tops)})}"
            f"  using Source = {OUT_TYPES[self.x]};\n}};\n}}  // namespace magicube\n"
        )
        return Unit(source, f"magicube::{self.kernel}<magicube::Config>", arch, self.name)


class Comparison(NamedTuple):
    """Sums over the sixteen vectors W, in float64 on the CPU.

    ``gram`` (16, 16): of ``Y = P - C W``, ``Y^T Y``; ``product``, ``claimed``, ``result``: ``||P||^2``, ``||C W||^2``
    and ``||C||^2``; ``far``: how many scales are NaN or out of bounds.
    """

    gram: Tensor
    product: float
    claimed: float
    result: float
    far: int


def padded(count: int) -> int:
    """Length of a vector in memory."""
    return -(-count // TILE) * TILE


def readable(x: Tensor) -> bool:
    """Whether the kernels read ``x`` (M, N) as it lies: on a GPU, rows contiguous, of a dtype in :data:`SOURCES`."""
    rows = x.stride(1) == 1 or x.shape[1] == 1
    return x.is_cuda and x.dtype in SOURCES and rows and 0 < x.shape[1] < _MOST_COLUMNS and x.shape[0] > 0


def probeable(x: Tensor) -> bool:
    """Whether :func:`probe` reads ``x`` as it lies: it or its transpose is :func:`readable`."""
    return readable(x) or (x.is_cuda and readable(x.mT))


def _matrix(x: Tensor) -> tuple[int, ...]:
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
    return _probe(x, w, "", None)


def probe_with_tops(x: Tensor, w: Tensor, lines: str) -> tuple[Tensor, Tensor]:
    """As :func:`probe`, and the largest magnitudes of the ``lines``, ``rows`` or ``columns``, float32 (M,) or (N,).

    Where an entry is NaN so is that magnitude; with infinity and without NaN it is infinite.
    """
    make = torch.empty if lines == "rows" and readable(x) else torch.zeros  # elsewhere blocks meet there
    tops = make(x.shape[1 if lines == "columns" else 0], device=x.device)
    return _probe(x, w, lines, tops), tops


def _probe(x: Tensor, w: Tensor, lines: str, tops: Tensor | None) -> Tensor:
    place = 0 if tops is None else tops.data_ptr()
    width = padded(x.shape[0])
    with device_of(x):
        if readable(x):
            y = torch.empty(PROBES, width, device=x.device)  # (16, padded M)
            kernel = get_kernel(ProbeConfig("probe_rows", SOURCES[x.dtype], lines))
            kernel.launch((width // TILE, 1, 1), (*_matrix(x), w.data_ptr(), w.shape[1], y.data_ptr(), width, place))
            return y
        flipped = {"rows": "columns", "columns": "rows"}.get(lines, "")  # of X^T
        kernel = get_kernel(ProbeConfig("probe_columns", SOURCES[x.dtype], flipped))
        tiles = -(-width // _TILE_COLUMNS)
        splits = max(1, min(kernel.multiprocessors // tiles, x.shape[1] // _SPLIT_ROWS))
        parts = torch.empty(splits, PROBES, width, device=x.device)
        kernel.launch((tiles, splits, 1), (*_matrix(x.mT), w.data_ptr(), w.shape[1], parts.data_ptr(), width, place))
    return parts[0] if splits == 1 else parts.sum(0)


def compare(
    c: Tensor, w: Tensor, product: Tensor, scales: tuple[Tensor, ...] = (), bounds: tuple[float, float] = (0.0, 0.0)
) -> Comparison:
    """Compare ``C W`` with ``P``: c (M, N) :func:`readable`, w (16, padded(N)), product ``P^T`` (16, padded(M)).

    ``scales``: up to two contiguous float32 vectors, of whose entries those outside of ``bounds`` are counted.
    Waits for the GPU.
    """
    pointers = [part for s in scales for part in (s.data_ptr(), s.numel())] + [0, 0] * (2 - len(scales))
    with device_of(c):
        kernel = get_kernel(ProbeConfig("compare_rows", SOURCES[c.dtype]))
        blocks = min(product.shape[1] // TILE, kernel.multiprocessors)
        parts = torch.empty(blocks, _SUMS, dtype=torch.float64, device=c.device)
        kernel.launch(
            (blocks, 1, 1),
            (
                *_matrix(c), w.data_ptr(), w.shape[1], product.data_ptr(), product.shape[1], *pointers,
                *(np.float32(bound) for bound in bounds), parts.data_ptr(),
            ),
        )  # fmt: skip
    sums = parts.sum(0).cpu()
    squares, far = sums[-4:-1].tolist(), int(sums[-1])
    return Comparison(sums[:-4].view(PROBES, PROBES), squares[0], squares[1], squares[2], far)


def default_configs() -> list[ProbeConfig]:
    """The kernels of all input types."""
    return [ProbeConfig(kernel, x, tops) for kernel, tops in KERNELS for x in SOURCES.values()]
