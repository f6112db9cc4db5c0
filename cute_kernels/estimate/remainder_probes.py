"""Error of a product of digits, estimated by 16 probes before the product is computed: two passes on a GPU.

For one digit per element. With more digits, terms can cancel, and a pass over the operands does not see what float32
then loses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cute_kernels.estimate import probes
from cute_kernels.estimate.config import PARTS, PROBES, SUMS
from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.device import device_of, num_sms
from cute_kernels.jit.kernel import get_kernel

__all__ = ["TF32_MARGIN", "RemainderConfig", "default_configs", "probe_remainder", "start_remainder_estimate"]

# Relative error of these kernels: four factors in a chain are truncated to tf32, each by at most 2^-10.
TF32_MARGIN = 1 + 2.0**-7


@dataclass(frozen=True)
class RemainderConfig(KernelConfig):
    """Config of a remainder kernel.

    Attributes
    ----------
    kernel : str
        ``"probe_rest"``, over B with per-column scales, or ``"judge_rest"``, over A with per-row scales; both float32.
    transposed : bool
        Whether the matrix is column-major.
    groups : int
        Groups of 32 rows per CTA.
    stages : int
        Pipeline stages per warp.

    Examples
    --------
    >>> RemainderConfig("probe_rest", transposed=False).name
    'probe_rest-g1'
    """

    kernel: str
    transposed: bool
    groups: int = 1
    stages: int = 3

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 512

    @property
    def smem_bytes(self) -> int:
        return max(self.stages * 64 * self.threads, 2 * PARTS)  # 16 elements per thread and stage

    @property
    def name(self) -> str:
        """Short name, unique among the configs."""
        return f"{self.kernel}-g{self.groups}{'t' if self.transposed else ''}"

    kernel_header = "estimate/remainder_probes.cuh"

    @property
    def kernel_entry(self) -> str:
        return self.kernel

    def _constants(self) -> dict[str, object]:
        return {
            "kLhs": self.kernel == "judge_rest",
            "kTransposed": self.transposed,
            "kGroups": self.groups,
            "kStages": self.stages,
            "kPartsBytes": 2 * PARTS,
        }

    def _types(self) -> dict[str, str]:
        return {"Source": "float"}


def probe_remainder(b: Tensor, w: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Return ``(B W)^T`` and ``(dB W)^T``, with ``dB`` the remainder of B after quantization to one digit.

    Parameters
    ----------
    b : Tensor, shape (K, N)
        float32, probeable in one launch.
    w : Tensor, shape (16, padded(N))
        float32 probes.
    scale : Tensor, shape (N,)
        Per-column scales of the digits.
    bits : int
        Bits per digit.

    Returns
    -------
    Tensor, shape (2, 16, padded(K))
        float32.

    Raises
    ------
    ValueError
        If the pass over `b` takes more than one launch.

    Examples
    --------
    >>> planes, scale = digits(b, bits=8, count=1, axis=0)  # doctest: +SKIP
    >>> vectors = probe_remainder(b, w, scale, bits=8)  # doctest: +SKIP
    """
    width = probes.padded(b.shape[0])
    transposed, x, groups, tiles = _pass(b)
    found = workspace.empty((2, PROBES, width), torch.float32, b.device)
    with device_of(b):
        get_kernel(RemainderConfig("probe_rest", transposed, groups)).launch(
            (tiles, 1, 1),
            (
                *_matrix_arguments(x, b.shape), w.data_ptr(), w.shape[1], scale.data_ptr(), np.float32(2.0**bits),
                found.data_ptr(), width,
            ),
            pdl=True,
        )  # fmt: skip
    return found


def start_remainder_estimate(
    a: Tensor, vectors: Tensor, scale: Tensor, other: Tensor, bits: int, bounds: tuple[float, float]
) -> None:
    """Start the pass over A; :func:`cute_kernels.estimate.probes.wait_result` returns its sums.

    There, `gram` is of ``(A B - D) W`` with the exact product D of the digits, `product` is ``||A B W||_F^2``;
    `claimed` and `result` are 0.

    Parameters
    ----------
    a : Tensor, shape (M, K)
        float32, probeable in one launch.
    vectors : Tensor, shape (2, 16, padded(K))
        Result of :func:`probe_remainder`.
    scale : Tensor, shape (M,)
        Per-row scales of the digits of A.
    other : Tensor, shape (N,)
        Per-column scales of the digits of B.
    bits : int
        Bits per digit.
    bounds : tuple of float
        Scales outside of these bounds are counted as `out_of_range`.

    Raises
    ------
    ValueError
        If the pass over `a` takes more than one launch.

    Examples
    --------
    >>> start_remainder_estimate(a, vectors, a_scale, b_scale, bits=8, bounds=(1e-30, 1e30))  # doctest: +SKIP
    >>> sums = probes.wait_result(a.device)  # doctest: +SKIP
    """
    transposed, x, groups, tiles = _pass(a)
    blocks = min(tiles, num_sms(a.device.index))
    parts = workspace.empty((blocks, SUMS), torch.float64, a.device)
    with device_of(a):
        get_kernel(RemainderConfig("judge_rest", transposed, groups)).launch(
            (blocks, 1, 1),
            (
                *_matrix_arguments(x, a.shape), vectors.data_ptr(), vectors.shape[2], scale.data_ptr(),
                other.data_ptr(), other.numel(), np.float32(2.0**bits), *(np.float32(bound) for bound in bounds),
                parts.data_ptr(),
            ),
            pdl=True,
        )  # fmt: skip
        probes.start_sum(parts)


def _pass(x: Tensor) -> tuple[bool, Tensor, int, int]:
    """Return whether a matrix is column-major, its row-major view, groups of 32 rows per CTA, and tiles."""
    transposed = not probes.readable(x)
    groups, tiles, splits = probes.grid(x.shape, x.dtype, x.device.index)
    if splits > 1:
        raise ValueError(f"x must have a shape whose pass is one launch, got {tuple(x.shape)}")
    return transposed, x.mT if transposed else x, groups, tiles


def _matrix_arguments(x: Tensor, shape: torch.Size) -> tuple[int, ...]:
    """Return address and memory stride of `x`, rows and columns of the matrix, and whether rows allow vector loads."""
    at, pitch, *_, vector = probes.matrix_arguments(x)
    return at, pitch, *shape, vector


def default_configs() -> list[RemainderConfig]:
    """Return the configs of all kernels.

    Examples
    --------
    >>> len(default_configs())
    8
    """
    kernels = ("probe_rest", "judge_rest")
    return [
        RemainderConfig(kernel, transposed, groups)
        for kernel in kernels
        for transposed in (False, True)
        for groups in (1, 2)
    ]
