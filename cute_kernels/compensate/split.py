"""Integers of a float32 matrix and of its residual on a GPU: host side of ``compensate/split.cuh``.

They are those of :func:`cute_kernels.cpu.compensate.split_residual`, bit for bit. By name only, as all of this folder.

References
----------
.. [1] Gu, arXiv 2403.06924, Algorithm 1, lines 1 and 4 to 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.operands import ALIGNMENT, aligned

__all__ = [
    "Amaxes", "Plane", "SplitConfig", "by_rows", "find_amaxes", "float_arguments", "leading_plane",
    "residual_plane", "tiles_of",
]  # fmt: skip

_STEPS = ("amax", "leading", "residual")
_TILE = (64, 128)  # rows and columns


@dataclass(frozen=True)
class SplitConfig(KernelConfig):
    """Config of one step of the split.

    Parameters
    ----------
    step : {"amax", "leading", "residual"}
        What the kernel writes.
    scales : int
        0 for one scale, 1 for one per row, 2 for one per column.
    truncate : bool
        Digits round toward zero, else to nearest even.
    transposed : bool
        The integers are written as the transpose of the matrix.

    Examples
    --------
    >>> SplitConfig("leading", 0, truncate=True, transposed=True).name
    'split-leading-s0-trunc-turned'
    """

    step: str
    scales: int
    truncate: bool = False
    transposed: bool = False

    kernel_header = "compensate/split.cuh"
    kernel_entry = "split_residual"

    @property
    def threads(self) -> int:
        return 256

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        tags = [tag for tag, on in (("trunc", self.truncate), ("turned", self.transposed)) if on]
        return "-".join(["split", self.step, f"s{self.scales}", *tags])

    def _constants(self) -> dict[str, object]:
        return {
            "kStep": _STEPS.index(self.step),
            "kScales": self.scales,
            "kTruncate": self.truncate,
            "kTransposed": self.transposed,
        }


class Amaxes(NamedTuple):
    """A float32 matrix by rows of its memory, and the amaxes of the slices that share a scale.

    Examples
    --------
    >>> found = find_amaxes(torch.eye(8, 64, device="cuda"), None, 127.0)  # doctest: +SKIP
    >>> found.bits[0].view(torch.float32)  # doctest: +SKIP
    tensor([1.], device='cuda:0')
    """

    x: Tensor  # (rows, columns) float32, contiguous rows; the transpose of the matrix if `turned`
    turned: bool
    scales: int  # of `x`, as SplitConfig.scales
    bits: Tensor  # (2, slices) int32: bits of the amaxes of x, and of its residual once the leading plane is there
    high: float  # integer of an amax

    @property
    def slices(self) -> int:
        """Scales."""
        return self.bits.shape[1]


class Plane(NamedTuple):
    """Integers of a matrix and their scales.

    Examples
    --------
    >>> found = find_amaxes(torch.eye(8, 64, device="cuda"), None, 127.0)  # doctest: +SKIP
    >>> leading_plane(found, truncate=True, transposed=False).integers.shape  # doctest: +SKIP
    torch.Size([8, 64])
    """

    memory: Tensor  # (L, pitch) int8: rows of the matrix or, if `transposed`, columns, padded to 16 bytes
    scales: Tensor  # (slices,) float64
    scales32: Tensor  # (slices,) float32
    length: int  # of a row of the memory, without the padding
    transposed: bool

    @property
    def integers(self) -> Tensor:
        """The integers, int8, the shape of the matrix."""
        trimmed = self.memory if self.memory.shape[1] == self.length else self.memory[:, : self.length]
        return trimmed.t() if self.transposed else trimmed


def by_rows(x: Tensor) -> tuple[Tensor, bool]:
    """Return a matrix or its transpose with contiguous rows, and whether it is the transpose.

    Examples
    --------
    >>> by_rows(torch.zeros(4, 8).t())[1]
    True
    """
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x, False
    return (x.t(), True) if x.stride(0) == 1 or x.shape[0] == 1 else (x.contiguous(), False)


def float_arguments(x: Tensor) -> tuple[int, int, int, int, int]:
    """Return the kernel arguments of a float32 matrix with contiguous rows, the last whether vector loads are aligned.

    Examples
    --------
    >>> float_arguments(torch.zeros(4, 8))[1:4]
    (8, 4, 8)
    """
    pitch = x.stride(0) if x.shape[0] > 1 else x.shape[1]
    vector = x.data_ptr() % ALIGNMENT == 0 and pitch * x.element_size() % ALIGNMENT == 0
    return x.data_ptr(), pitch, *x.shape, int(vector)


def tiles_of(x: Tensor) -> tuple[int, int]:
    """Return the tiles of a matrix, down and across.

    Examples
    --------
    >>> tiles_of(torch.zeros(65, 128))
    (2, 1)
    """
    return -(-x.shape[0] // _TILE[0]), -(-x.shape[1] // _TILE[1])


def _launch(config: SplitConfig, found: Amaxes, scales: int, scales32: int, out: int, out_pitch: int) -> None:
    down, across = tiles_of(found.x)
    maxima = found.bits.data_ptr()
    with device_of(found.x):
        get_kernel(config).launch(
            (down * across, 1, 1),
            (
                *float_arguments(found.x), np.float64(found.high), maxima, maxima + 4 * found.slices, scales, scales32,
                out, out_pitch,
            ),
        )  # fmt: skip


def find_amaxes(x: Tensor, axis: int | None, high: float) -> Amaxes:
    """Find the amaxes of a matrix.

    Parameters
    ----------
    x : Tensor, shape (M, K)
        float32 on a GPU, not empty; copied unless its rows or columns are contiguous.
    axis : int or None
        0 for one scale per row, 1 for one per column, None for one scale.
    high : float
        Integer of an amax: ``scale = amax / high``, 1 for zeros.

    Examples
    --------
    >>> find_amaxes(torch.eye(8, 64, device="cuda"), 0, 127.0).slices  # doctest: +SKIP
    8
    """
    rows, turned = by_rows(x)
    slices = 1 if axis is None else x.shape[axis]
    scales = 0 if axis is None else 1 + (axis ^ int(turned))
    found = Amaxes(rows, turned, scales, workspace.zeros((2, slices), torch.int32, x.device), high)
    _launch(SplitConfig("amax", scales), found, 0, 0, 0, 0)
    return found


def leading_plane(found: Amaxes, *, truncate: bool, transposed: bool) -> Plane:
    """Return the leading integers, and find the amaxes of what they leave over.

    Parameters
    ----------
    found : Amaxes
        Matrix and amaxes; those of the residual are written.
    truncate : bool
        Digits round toward zero, else to nearest even.
    transposed : bool
        The integers have contiguous columns.

    Examples
    --------
    >>> found = find_amaxes(torch.eye(8, 64, device="cuda"), None, 127.0)  # doctest: +SKIP
    >>> leading_plane(found, truncate=True, transposed=False).integers[0, 0]  # doctest: +SKIP
    tensor(127, device='cuda:0', dtype=torch.int8)
    """
    return _plane("leading", found, truncate, transposed)


def residual_plane(found: Amaxes, *, truncate: bool, transposed: bool) -> Plane:
    """Return the integers of the residual, after the leading ones were made; parameters are those of `leading_plane`.

    Examples
    --------
    >>> found = find_amaxes(torch.eye(8, 64, device="cuda"), None, 127.0)  # doctest: +SKIP
    >>> _ = leading_plane(found, truncate=True, transposed=False)  # doctest: +SKIP
    >>> residual_plane(found, truncate=True, transposed=False).integers.any()  # doctest: +SKIP
    tensor(False, device='cuda:0')
    """
    return _plane("residual", found, truncate, transposed)


def _plane(step: str, found: Amaxes, truncate: bool, transposed: bool) -> Plane:
    rows, columns = found.x.shape
    turn = transposed != found.turned  # of the rows of memory
    shape = (columns, rows) if turn else (rows, columns)
    device = found.x.device
    memory = workspace.empty((shape[0], aligned(shape[1])), torch.int8, device)
    scales = workspace.empty((found.slices,), torch.float64, device)
    scales32 = workspace.empty((found.slices,), torch.float32, device)
    config = SplitConfig(step, found.scales, truncate, turn)
    _launch(config, found, scales.data_ptr(), scales32.data_ptr(), memory.data_ptr(), memory.shape[1])
    return Plane(memory, scales, scales32, shape[1], transposed)
