"""Transposition of matrices of 16- and 32-bit elements on a GPU: host side of ``convert/transpose.cuh``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel

_ALIGNMENT = 16  # bytes of an access
_RUNS = 8  # per row of a tile


@dataclass(frozen=True)
class TransposeConfig(KernelConfig):
    """Config of the kernel for elements of `size` bytes, 2 or 4.

    Examples
    --------
    >>> TransposeConfig(2).name, TransposeConfig(2).tile
    ('transpose-16', 64)
    """

    size: int
    threads: int = 256

    kernel_header = "convert/transpose.cuh"
    kernel_entry = "transpose"

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        return f"transpose-{8 * self.size}"

    @property
    def tile(self) -> int:
        """Rows and columns of a tile."""
        return _RUNS * _ALIGNMENT // self.size

    def _constants(self) -> dict[str, object]:
        return {"kThreads": self.threads}

    def _types(self) -> dict[str, str]:
        return {"Element": f"uint{8 * self.size}_t"}


def transpose(x: Tensor, out: Tensor) -> None:
    """Write the transpose of `x`; one launch, which may start while the one before ends.

    Parameters
    ----------
    x : Tensor, shape (M, N)
        Contiguous, on a GPU, of 2 or 4 bytes per element; not empty.
    out : Tensor, shape (N, M)
        Contiguous, of the dtype of `x`.
    """
    rows, columns = x.shape
    config = TransposeConfig(x.element_size())
    run = _ALIGNMENT // x.element_size()
    loads, stores = (int(each.data_ptr() % _ALIGNMENT == 0 and each.shape[1] % run == 0) for each in (x, out))
    with device_of(x):
        get_kernel(config).launch(
            (-(-columns // config.tile), -(-rows // config.tile), 1),
            (x.data_ptr(), rows, columns, out.data_ptr(), loads, stores),
            pdl=True,
        )


def default_configs() -> Iterator[TransposeConfig]:
    """Yield the configs for 2 and 4 bytes."""
    yield from (TransposeConfig(2), TransposeConfig(4))
