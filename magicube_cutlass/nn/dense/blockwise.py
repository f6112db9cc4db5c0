"""Products of e4m3 rows with 1 x 128 scales by a weight with 128 x 128 scales: ``torch._scaled_mm``, a cuBLASLt kernel.

Source of the layouts: torch's ``aten/src/ATen/native/cuda/ScaledBlas.cpp``, of the conditions: cuBLAS, cublasLtMatmul,
1D and 2D block scaling (CUDA 12.9, compute capability 9.0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.jit.device import current_arch

__all__ = ["blockwise_gemm", "refusal"]

_TORCH, _CUDA = (2, 9), (12, 9)  # the first with these scales
_ROWS = 16  # of a are padded to a multiple: cuBLASLt reads scales at multiples of 16 bytes


def _version(text: str | None) -> tuple[int, ...]:
    """Major and minor number of a version, (0, 0) for none."""
    return tuple(int(each) for each in text.split("+")[0].split(".")[:2]) if text else (0, 0)


def refusal(n: int, k: int) -> str:
    """Return why torch does not multiply by a weight (n, k) on the current GPU; empty if it does.

    Notes
    -----
    Scales of the weight have rows of ``K / 128``, which cuBLASLt reads at multiples of 4: versions of torch differ in
    whether they take a padding, and with K a multiple of 512 there is none.

    Examples
    --------
    >>> from unittest.mock import patch
    >>> with patch.dict("os.environ", MAGICUBE_ARCH="sm_80"):
    ...     refusal(4096, 4096)
    'blockwise scales need sm_90a, got sm_80'
    """
    arch = current_arch()
    if arch != "sm_90a":
        return f"blockwise scales need sm_90a, got {arch}"
    if _version(torch.__version__) < _TORCH or _version(torch.version.cuda) < _CUDA:
        return f"blockwise scales need torch 2.9 for CUDA 12.9, got {torch.__version__} for {torch.version.cuda}"
    if n % 16 or k % 512 or not n or not k:
        return f"blockwise scales need outputs in multiples of 16, inputs in multiples of 512, got {n} and {k}"
    return ""


def blockwise_gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """Multiply rows by a weight: ``D = sum_j a_scale[:, j] b_scale[n // 128, j] A_j B_j^T``, j of 128 k each.

    The caller asks :func:`refusal` first. Ran on an H100 (sm_90a) with torch 2.11 for CUDA 13.0.

    Parameters
    ----------
    a : Tensor, shape (M, K)
        uint8 codes of e4m3, contiguous.
    a_scale : Tensor, shape (M, K / 128)
        float32. Memory strides (1, M) need no copy; nor does M, a multiple of 16.
    b : Tensor, shape (N, K)
        uint8 codes of e4m3, contiguous.
    b_scale : Tensor, shape (ceil(N / 128), K / 128)
        float32, contiguous.

    Returns
    -------
    Tensor, shape (M, N)
        bfloat16. cuBLASLt accumulates 128 k on Tensor Cores, and these sums in float32.
    """
    m = a.shape[0]
    if m == 0:
        return torch.empty((0, b.shape[0]), dtype=torch.bfloat16, device=a.device)
    rows = -(-m // _ROWS) * _ROWS
    if rows != m:  # rows of zeros, whose products are cut off
        a = torch.nn.functional.pad(a, (0, 0, 0, rows - m))
        a_scale = torch.nn.functional.pad(a_scale, (0, 0, 0, rows - m))
    return torch._scaled_mm(
        a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn).t(), scale_a=a_scale.t().contiguous().t(),
        scale_b=b_scale.t(), out_dtype=torch.bfloat16,
    )[:m]  # fmt: skip
