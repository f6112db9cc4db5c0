"""Products of a float32 matrix with 16 vectors in float64 on a GPU: host side of ``double_sums/row_sums.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.double_sums import RowSums
from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.operands import ALIGNMENT

VECTORS = 16
_ROWS = 64  # of a CTA
_WARPS, _SHARE = 8, 16  # of a CTA; columns of a warp at a time
_CHUNK = _WARPS * _SHARE
_MAX_LENGTH = 2**30


@dataclass(frozen=True)
class RowSumsConfig(KernelConfig):
    """Config of the kernel.

    Parameters
    ----------
    transposed : bool
        The columns of the matrix are the lines in memory.

    Examples
    --------
    >>> RowSumsConfig(False).name
    'row_sums-rows'
    """

    transposed: bool

    kernel_header = "double_sums/row_sums.cuh"
    kernel_entry = "row_sums"

    @property
    def threads(self) -> int:
        return 32 * _WARPS

    @property
    def smem_bytes(self) -> int:
        return 8 * (2 * _CHUNK * (VECTORS + 1) + _ROWS * (VECTORS + 2))

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        return f"{self.kernel_entry}-{'columns' if self.transposed else 'rows'}"

    def _constants(self) -> dict[str, object]:
        return {"kTransposed": self.transposed}

    def _types(self) -> dict[str, str]:
        return {}


def can_sum_rows(x: Tensor) -> bool:
    """Return whether a matrix is for :func:`sum_rows`: float32 on a GPU, rows or columns contiguous, not empty.

    Examples
    --------
    >>> can_sum_rows(torch.ones(2, 2))
    False
    """
    lines = x.is_cuda and x.ndim == 2 and x.numel() > 0 and 1 in x.stride()
    return lines and x.dtype == torch.float32 and not x.is_neg() and max(x.shape) <= _MAX_LENGTH


def roundings(columns: int) -> int:
    """Return how many roundings a term of a sum may see, that of its product included.

    Examples
    --------
    >>> roundings(16384), roundings(1)
    (152, 25)
    """
    return _SHARE + -(-columns // _CHUNK) + _WARPS


def sum_rows(x: Tensor, v: Tensor, n: Tensor) -> RowSums:
    """Return ``X V``, ``|X| n`` and the squares of the rows; one launch, which is not waited for.

    Parameters
    ----------
    x : Tensor, shape (M, K)
        As :func:`can_sum_rows` takes it.
    v : Tensor, shape (K, 16)
        float64.
    n : Tensor, shape (K,)
        float64.

    Returns
    -------
    RowSums

    Examples
    --------
    >>> found = sum_rows(x, torch.ones(4, 16).double().cuda(), torch.ones(4).double().cuda())  # doctest: +SKIP
    >>> found.bounds  # of x = -1, (2, 4) # doctest: +SKIP
    tensor([4., 4.], device='cuda:0', dtype=torch.float64)
    """
    rows, columns = x.shape
    transposed = x.stride(1) != 1 and columns > 1
    lines, length = (columns, rows) if transposed else (rows, columns)
    pitch = x.stride(1 if transposed else 0) if lines > 1 else length
    loads = x.data_ptr() % ALIGNMENT == 0 and pitch * x.element_size() % ALIGNMENT == 0
    v, n = v.contiguous(), n.contiguous()
    products = workspace.empty((rows, VECTORS), torch.float64, x.device)
    bounds, squares = (workspace.empty((rows,), torch.float64, x.device) for _ in range(2))
    with device_of(x):
        get_kernel(RowSumsConfig(transposed)).launch(
            (-(-rows // _ROWS), 1, 1),
            (
                x.data_ptr(), pitch, rows, columns, v.data_ptr(), n.data_ptr(), products.data_ptr(), bounds.data_ptr(),
                squares.data_ptr(), int(loads),
            ),
        )  # fmt: skip
    return RowSums(products, bounds, squares)


def default_configs() -> list[RowSumsConfig]:
    """Return the configs of both memory orders."""
    return [RowSumsConfig(False), RowSumsConfig(True)]
