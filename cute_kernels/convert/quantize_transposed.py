"""Quantization of rows into the transposed matrix on a GPU: host side of ``convert/quantize_transposed.cuh``."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig
from cute_kernels.jit.device import device_of, num_sms
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.operands import ALIGNMENT, aligned

_MOST_ENTRIES = 1 << 22  # up to which this takes less than quantization by rows and a copy
_MOST_ROWS = 1 << 18  # a grid has 65535 CTAs in y, of eight rows at least
_FEW = 64  # rows: stores of a word bind from here on


@dataclass(frozen=True)
class TransposedConfig(KernelConfig):
    """Config of the kernel.

    Parameters
    ----------
    x : str
        Dtype of the input.
    given : bool
        The scale is an input.
    rows : int
        Rows of a CTA, 4, 8 or 16.
    run : int
        Columns of a thread, 1 or 2.

    Examples
    --------
    >>> TransposedConfig("float16").name
    'quantize-encode_transposed-float16-r4c1'
    """

    x: str
    given: bool = False
    rows: int = 4
    run: int = 1

    kernel_header = "convert/quantize_transposed.cuh"
    kernel_entry = "encode_transposed"
    shared_carveout = 100  # the product starts behind it, on the same SMs

    @property
    def threads(self) -> int:
        return 256

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        return f"quantize-{self.kernel_entry}-{self.x}{'-given' * self.given}-r{self.rows}c{self.run}"

    def _constants(self) -> dict[str, object]:
        return {
            "kBits": 8,
            "kStored": 8,
            "kSigned": True,
            "kTruncate": False,
            "kSteps": 8,
            "kRows": self.rows,
            "kRun": self.run,
            "kThreads": self.threads,
            "kGiven": self.given,
        }

    def _types(self) -> dict[str, str]:
        return {"Source": OUT_TYPES[self.x]}


def _config(x: str, rows: int, given: bool) -> TransposedConfig:
    """The quickest on an H200: amaxes of more rows are found again less often, but later."""
    if rows <= _FEW:
        return TransposedConfig(x, given)
    return TransposedConfig(x, given, 16 if given else 8, 2)


def serves(rows: int, columns: int) -> bool:
    """Return whether a matrix of this shape is for :func:`quantize_transposed`.

    Examples
    --------
    >>> serves(512, 4096), serves(4096, 4096)
    (True, False)
    """
    return rows * columns <= _MOST_ENTRIES and rows <= _MOST_ROWS


def quantize_transposed(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize few rows to int8 and store the transpose, on a GPU, without waiting for it.

    ``q[k, m] = clamp(round(x[m, k] / scale[m]))`` with the scales and integers of
    :func:`~cute_kernels.convert.quantize.quantize` by rows.

    Parameters
    ----------
    x : Tensor, shape (M, K)
        float32, float16 or bfloat16, contiguous along K, not empty, of a shape that :func:`serves` takes.
    scale : Tensor, shape (), optional
        float32, one scale for all rows.

    Returns
    -------
    data : Tensor, shape (K, M)
        int8; rows are `M` rounded up to 16 apart, with zeros in between.
    scale : Tensor, shape (M, 1) or ()
        float32.

    Examples
    --------
    >>> data, scale = quantize_transposed(torch.ones(4, 8, device="cuda"))  # doctest: +SKIP
    >>> data.shape, data.stride(), data[0, 0].item()  # doctest: +SKIP
    (torch.Size([8, 4]), (16, 1), 127)
    """
    rows, columns = x.shape
    config = _config(REAL_DTYPES[x.dtype], rows, scale is not None)
    pitch, vector = x.stride(0) if rows > 1 else columns, ALIGNMENT // x.element_size()
    out = workspace.empty((columns, aligned(rows)), torch.int8, x.device)
    if scale is None:
        scale = workspace.empty((rows, 1), torch.float32, x.device)
    groups, at_once = out.shape[1] // config.rows, config.threads * config.run
    runs = -(-columns // at_once)
    share = -(-runs // max(1, min(runs, 2 * num_sms(x.device.index) // groups))) * at_once
    loads = x.data_ptr() % ALIGNMENT == 0 and pitch % vector == 0
    with device_of(x):
        get_kernel(config).launch(
            (-(-columns // share), groups, 1),
            (
                x.data_ptr(), pitch, rows, columns, share, scale.data_ptr(), out.data_ptr(), out.shape[1], int(loads),
            ),
        )  # fmt: skip
    return out[:, :rows], scale


def default_configs() -> list[TransposedConfig]:
    """Return the configs that products of floats use.

    Examples
    --------
    >>> len(default_configs())
    12
    """
    cases = product(REAL_DTYPES.values(), (_FEW, _FEW + 1), (False, True))
    return [_config(*case) for case in cases]
