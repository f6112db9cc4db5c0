"""What a product of digits will leave out, by sixteen vectors, before it is computed: two passes on a GPU.

Of one digit an entry.  A product of more adds sums that may cancel, and what float32 then loses no pass over the
operands sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cute_kernels.estimate import probes
from cute_kernels.jit import workspace
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.device import device_of, num_sms
from cute_kernels.jit.kernel import get_kernel

# Of an estimate by these kernels, whose factors are cut to tf32: four of them in a chain, each by 2^-10 at most.
TF32_MARGIN = 1 + 2.0**-7


@dataclass(frozen=True)
class RemainderConfig(KernelConfig):
    """What a kernel is compiled for: ``probe_rest``, over B with a scale a column, or ``judge_rest``, over A with a
    scale a row, both of float32.

    ``transposed``: the matrix lies column by column.  A block has ``groups`` times 32 rows.
    """

    kernel: str
    transposed: bool
    groups: int = 1
    stages: int = 3

    @property
    def threads(self) -> int:
        return 512

    @property
    def smem_bytes(self) -> int:
        return max(self.stages * 64 * self.threads, 2 * probes.PARTS)  # a thread has 16 entries at a time

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        return f"{self.kernel}-g{self.groups}{'t' if self.transposed else ''}"

    kernel_header = "estimate/remainder_probes.cuh"

    @property
    def kernel_entry(self) -> str:
        return self.kernel

    def _constants(self) -> dict[str, object]:
        return {
            "kLeft": self.kernel == "judge_rest",
            "kTransposed": self.transposed,
            "kGroups": self.groups,
            "kStages": self.stages,
            "kPartsBytes": 2 * probes.PARTS,
        }

    def _types(self) -> dict[str, str]:
        return {"Source": "float"}


def probe_remainder(b: Tensor, w: Tensor, scale: Tensor, bits: int) -> Tensor:
    """``(B W)^T`` and ``(dB W)^T``, (2, 16, padded(K)) float32: dB is what the digits of B leave.

    ``b`` (K, N) float32, :func:`probeable` in one launch; ``w`` (16, padded(N)); ``scale`` (N,) of
    the digits, of ``bits`` each.
    """
    width = probes.padded(b.shape[0])
    transposed, x, groups, tiles = _pass(b)
    found = workspace.empty((2, probes.PROBES, width), torch.float32, b.device)
    with device_of(b):
        get_kernel(RemainderConfig("probe_rest", transposed, groups)).launch(
            (tiles, 1, 1),
            (
                *_matrix(x, b.shape), w.data_ptr(), w.shape[1], scale.data_ptr(), np.float32(2.0**bits),
                found.data_ptr(), width,
            ),
            pdl=True,
        )  # fmt: skip
    return found


def start_remainder_estimate(
    a: Tensor, vectors: Tensor, scale: Tensor, other: Tensor, bits: int, bounds: tuple[float, float]
) -> None:
    """Start the pass over A: :func:`cute_kernels.estimate.probes.wait_result` then tells, as ``gram``, of what the product of
    digits leaves out of A B, ``product`` of ``A B W``, and ``far``; ``claimed`` and ``result`` are 0.

    ``a`` (M, K) float32 as in :func:`probe_remainder`, which has made ``vectors``; ``scale`` (M,) of its rows, ``other``
    (N,) of B's columns: entries of both that are not within ``bounds`` are counted.  Does not wait.
    """
    transposed, x, groups, tiles = _pass(a)
    blocks = min(tiles, num_sms(a.device.index))
    parts = workspace.empty((blocks, probes.SUMS), torch.float64, a.device)
    with device_of(a):
        get_kernel(RemainderConfig("judge_rest", transposed, groups)).launch(
            (blocks, 1, 1),
            (
                *_matrix(x, a.shape), vectors.data_ptr(), vectors.shape[2], scale.data_ptr(), other.data_ptr(),
                other.numel(), np.float32(2.0**bits), *(np.float32(bound) for bound in bounds), parts.data_ptr(),
            ),
            pdl=True,
        )  # fmt: skip
        probes.start_sum(parts)


def _pass(x: Tensor) -> tuple[bool, Tensor, int, int]:
    """Whether a matrix lies column by column, it or its transpose as it lies, groups of 32 rows a block, tiles."""
    transposed = not probes.readable(x)
    groups, tiles, splits = probes.grid(x.shape, x.dtype, x.device.index)
    if splits > 1:
        raise ValueError(f"x must be of a size whose pass is one launch, got {tuple(x.shape)}")
    return transposed, x.mT if transposed else x, groups, tiles


def _matrix(x: Tensor, shape: torch.Size) -> tuple[int, ...]:
    """Address, pitch, rows and columns of the matrix itself, and whether runs can be loaded at once."""
    at, pitch, *_, vector = probes.matrix(x)
    return at, pitch, *shape, vector


def default_configs() -> list[RemainderConfig]:
    """All of the kernels."""
    kernels = ("probe_rest", "judge_rest")
    return [
        RemainderConfig(kernel, turned, groups) for kernel in kernels for turned in (False, True) for groups in (1, 2)
    ]
