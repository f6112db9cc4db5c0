"""Packing of byte matrices into K-major rows that start at multiples of 16 bytes: host side of ``convert/pack.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.operands import line_pitch

_GRID_Y = 65535  # limit of gridDim.y


@dataclass(frozen=True)
class PackConfig(KernelConfig):
    """Config of a packing kernel, ``pack_transposed`` or ``pack_strided``.

    Examples
    --------
    >>> PackConfig("pack_strided").name
    'gemm-pack_strided'
    """

    kernel: str
    threads: int = 128

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        return f"gemm-{self.kernel}"

    kernel_header = "convert/pack.cuh"

    @property
    def kernel_entry(self) -> str:
        return self.kernel


def pack_rows(plane: Tensor) -> Tensor:
    """Copy a plane into K-major rows that start at multiples of 16 bytes, long ones of 128.

    Parameters
    ----------
    plane : Tensor, shape (rows, k)
        int8 on a GPU, of any memory strides.

    Returns
    -------
    Tensor, shape (rows, line_pitch(k))
        Contiguous; of the padding, what completes 16 bytes is zero, and the rest is not written.
    """
    rows, k = plane.shape
    out = workspace.empty((rows, line_pitch(k)), torch.int8, plane.device)
    transposed = plane.stride(0) == 1
    kernel = get_kernel(PackConfig("pack_transposed" if transposed else "pack_strided"))
    across, deep = (-(-rows // 128), 64) if transposed else (min(rows, 2**16), 128 * 16)
    # k may exceed the depth of a grid.
    for first in range(0, k, deep * _GRID_Y):
        part = plane[:, first : first + deep * _GRID_Y]
        kernel.launch(
            (across, -(-part.shape[1] // deep), 1),
            (
                part.data_ptr(),
                plane.stride(1),
                plane.stride(0),
                rows,
                part.shape[1],
                out.data_ptr() + first,
                out.shape[1],
            ),
        )
    return out
