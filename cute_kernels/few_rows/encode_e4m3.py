"""Rows to e4m3 or nvfp4 on a GPU in one launch: with a scale per row, per 128 values or per tensor, or as mxfp8."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel

ENCODED = (torch.float32, torch.float16, torch.bfloat16)
ENCODE_ARCHES = ("sm_89", "sm_90a")
_RUN = 8  # values of a thread at a time
_FEW = 128  # rows; on an H200 256 rows of 4096 take as long with 256 threads each as with 512, of 14336 9% longer


@dataclass(frozen=True)
class EncodeConfig(KernelConfig):
    """Config of a kernel that encodes rows.

    Attributes
    ----------
    entry : str
        ``"encode_e4m3_rows"``, ``"encode_e4m3_groups"``, ``"encode_mxfp8_rows"`` or ``"encode_nvfp4_rows"``.
    x : str
        Dtype of the rows.
    threads : int
        Threads per CTA.
    """

    entry: str
    x: str
    threads: int = 256

    @property
    def name(self) -> str:
        """Short name, unique among the configs."""
        return f"few-rows-{self.entry}-{self.x}-t{self.threads}"

    kernel_header = "few_rows/encode_e4m3.cuh"

    @property
    def kernel_entry(self) -> str:
        return f"few::{self.entry}"

    def _constants(self) -> dict[str, object]:
        return {"kThreads": self.threads}

    def _types(self) -> dict[str, str]:
        return {"Source": OUT_TYPES[self.x]}


def _rows_of(x: Tensor) -> tuple[Tensor, int, int]:
    """Rows with contiguous entries, the elements from one to the next, and whether all loads and stores are aligned."""
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    m, k = x.shape
    pitch = x.stride(0) if m > 1 else k
    return x, pitch, int(x.data_ptr() % 16 == 0 and (m == 1 or (pitch % _RUN == 0 and k % _RUN == 0)))


def encode_config(entry: str, x: str, m: int, k: int) -> EncodeConfig:
    """Return the config for rows (m, k): few long ones, which leave SMs idle, have as many threads as they are long."""
    config = EncodeConfig(entry, x)
    if m > _FEW or entry in ("encode_e4m3_groups", "encode_mxfp8_rows"):
        return config
    return replace(config, threads=256 if k <= 2048 else 512 if k <= 4096 else 1024)


def _launch(entry: str, x: Tensor, scales: tuple[int, ...], codes: Tensor, by_parts: bool) -> None:
    """Launch a kernel with its own arguments `scales`: a CTA for each row, or for each part of one."""
    x, pitch, vector = _rows_of(x)
    m, k = x.shape
    config = encode_config(entry, str(x.dtype).removeprefix("torch."), m, k)
    parts = -(-k // (_RUN * config.threads)) if by_parts else 1
    with device_of(x):
        get_kernel(config).launch(
            (m, parts, 1), (x.data_ptr(), pitch, k, *scales, codes.data_ptr(), codes.shape[1], vector)
        )


def encode_e4m3(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encode rows: ``code = e4m3(x / scale)``, to nearest even, saturating.

    Parameters
    ----------
    x : Tensor, shape (M, K)
        float32, float16 or bfloat16 on a GPU, not empty.
    scale : Tensor, shape (), optional
        float32. Default: ``amax / 448`` of each row, 1 for zeros, NaN for rows with inf or NaN.

    Returns
    -------
    codes : Tensor, shape (M, K)
        uint8.
    scale : Tensor, shape (M, 1) or ()
        float32.
    """
    (m, k), given = x.shape, int(scale is not None)
    codes = workspace.empty((m, k), torch.uint8, x.device)
    if scale is None:
        scale = workspace.empty((m, 1), torch.float32, x.device)
    _launch("encode_e4m3_rows", x, (scale.data_ptr(), given), codes, False)
    return codes, scale


def encode_e4m3_groups(x: Tensor, for_torch: bool = True) -> tuple[Tensor, Tensor]:
    """Encode rows with a scale per 128 values: ``code = e4m3(x / scale)``, to nearest even, saturating.

    Ran on an H100 (sm_90a): bit for bit what torch computes.

    Parameters
    ----------
    x : Tensor, shape (M, K)
        float32, float16 or bfloat16 on a GPU, not empty.
    for_torch : bool, default True
        The scales have the memory strides (1, M), as ``torch._scaled_mm`` reads them; else they are contiguous.

    Returns
    -------
    codes : Tensor, shape (M, K)
        uint8.
    scales : Tensor, shape (M, ceil(K / 128))
        float32, ``amax / 448``: 1 for zeros, NaN for blocks with inf or NaN.
    """
    (m, k), blocks = x.shape, -(-x.shape[1] // 128)
    codes = workspace.empty((m, k), torch.uint8, x.device)
    scales = workspace.empty((blocks, m) if for_torch else (m, blocks), torch.float32, x.device)
    steps = (1, m) if for_torch else (blocks, 1)
    _launch("encode_e4m3_groups", x, (scales.data_ptr(), *steps), codes, True)
    return codes, scales.t() if for_torch else scales


def encode_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode rows with block scales of 32: ``code = e4m3(x / 2^e)``, ``e = floor(log2 amax) - 8``.

    Parameters
    ----------
    x : Tensor, shape (M, K)
        float32, float16 or bfloat16 on a GPU, not empty.

    Returns
    -------
    codes : Tensor, shape (M, K)
        uint8 of e4m3.
    scales : Tensor, shape (M, ceil(K / 32))
        uint8 of ue8m0: 1 for zeros, NaN for blocks with inf or NaN.
    """
    (m, k), blocks = x.shape, -(-x.shape[1] // 32)
    codes = workspace.empty((m, k), torch.uint8, x.device)
    scales = workspace.empty((m, blocks), torch.uint8, x.device)
    _launch("encode_mxfp8_rows", x, (scales.data_ptr(), blocks), codes, True)
    return codes, scales


def encode_nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encode rows with e4m3 scales of blocks of 16 and a scale per row: ``code = e2m1(x / (scale * row_scale))``.

    Parameters
    ----------
    x : Tensor, shape (M, K)
        float32, float16 or bfloat16 on a GPU, not empty.

    Returns
    -------
    codes : Tensor, shape (M, ceil(K / 2))
        uint8, two codes of e2m1 each, the first in the low half.
    scales : Tensor, shape (M, ceil(K / 16))
        uint8 of e4m3, ``amax / (6 * row_scale)``: 1 for zeros, NaN for blocks with inf or NaN.
    row_scale : Tensor, shape (M, 1)
        float32, ``amax / 448 / 6`` of the finite blocks of a row, 1 for zeros.
    """
    (m, k), blocks = x.shape, -(-x.shape[1] // 16)
    codes = workspace.empty((m, -(-k // 2)), torch.uint8, x.device)
    scales = workspace.empty((m, blocks), torch.uint8, x.device)
    row_scale = workspace.empty((m, 1), torch.float32, x.device)
    _launch("encode_nvfp4_rows", x, (scales.data_ptr(), blocks, row_scale.data_ptr()), codes, False)
    return codes, scales, row_scale
