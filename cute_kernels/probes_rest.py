"""What a product of digits will leave out, by sixteen vectors, before it is computed: two passes on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels import probes, workspace
from cute_kernels.gemm_cuda import multiprocessors_of
from cute_kernels.jit.compiler import Unit
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.quantize import device_of
from cute_kernels.source import constants

MOST_PLANES = 2  # what three digits leave is no more than what the product is rounded by
# Of an estimate by these kernels, whose factors are cut to tf32: four of them in a chain, each by 2^-10 at most.
CUT = 1 + 2.0**-7


@dataclass(frozen=True)
class RestConfig:
    """What a kernel is compiled for: ``probe_rest``, over B with a scale a column, or ``judge_rest``, over A with a
    scale a row, both of float32 with ``planes`` digits.

    ``cross``: the product of the second digits is left out.  ``transposed``: the matrix lies column by column.  A block
    has ``groups`` times 32 rows.
    """

    kernel: str
    planes: int
    cross: bool
    transposed: bool
    groups: int = 1
    stages: int = 3

    @property
    def threads(self) -> int:
        return 512

    @property
    def smem_bytes(self) -> int:
        return max(self.stages * 64 * self.threads, self._parts)  # a thread has 16 entries at a time

    @property
    def _parts(self) -> int:
        """Bytes of the warps' sums, which lie where the ring was."""
        return probes.PARTS * (3 if self.cross and self.kernel == "probe_rest" else 2)

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        marks = f"{'x' if self.cross else ''}{'t' if self.transposed else ''}"
        return f"{self.kernel}-p{self.planes}g{self.groups}{marks}"

    def unit(self, arch: str) -> Unit:
        """The translation unit of this config for ``arch``."""
        members: dict[str, object] = {
            "kLeft": self.kernel == "judge_rest",
            "kPlanes": self.planes,
            "kCross": self.cross,
            "kTransposed": self.transposed,
            "kGroups": self.groups,
            "kStages": self.stages,
            "kPartsBytes": self._parts,
        }
        source = (
            '#include "probes_rest.cuh"\nnamespace magicube {\nstruct Config {\n'
            f"{constants(members)}  using Source = float;\n}};\n}}  // namespace magicube\n"
        )
        return Unit(source, f"magicube::{self.kernel}<magicube::Config>", arch, self.name)


class Rule(NamedTuple):
    """Of which digits a product is made: ``planes`` of ``bits`` each; ``cross``: without that of the second ones."""

    planes: int
    bits: int
    cross: bool


def probe_rest(b: Tensor, w: Tensor, scale: Tensor, rule: Rule) -> Tensor:
    """``(B W)^T``, ``(dB W)^T`` and, for ``cross``, ``(b W)^T``, (2 or 3, 16, padded(K)) float32: dB is what the digits
    of B leave, b what the first ones leave.

    ``b`` (K, N) float32, :func:`~cute_kernels.probes.probeable` in one launch; ``w`` (16, padded(N)); ``scale`` (N,) of
    the digits.
    """
    width = probes.padded(b.shape[0])
    transposed, x, groups, tiles = _pass(b)
    found = workspace.empty((2 + rule.cross, probes.PROBES, width), torch.float32, b.device)
    with device_of(b):
        get_kernel(RestConfig("probe_rest", rule.planes, rule.cross, transposed, groups)).launch(
            (tiles, 1, 1),
            (
                *_matrix(x, b.shape), w.data_ptr(), w.shape[1], scale.data_ptr(), np.float32(2.0**rule.bits),
                found.data_ptr(), width,
            ),
            early=True,
        )  # fmt: skip
    return found


def start_judging(
    a: Tensor, vectors: Tensor, scale: Tensor, other: Tensor, rule: Rule, bounds: tuple[float, float]
) -> None:
    """Start the pass over A: :func:`~cute_kernels.probes.awaited` then tells, as ``gram``, of what the product of
    digits leaves out of A B, ``product`` of ``A B W``, and ``far``; ``claimed`` and ``result`` are 0.

    ``a`` (M, K) float32 as in :func:`probe_rest`, which has made ``vectors``; ``scale`` (M,) of its rows, ``other``
    (N,) of B's columns: entries of both that are not within ``bounds`` are counted.  Does not wait.
    """
    transposed, x, groups, tiles = _pass(a)
    blocks = min(tiles, multiprocessors_of(a.device.index))
    parts = workspace.empty((blocks, probes.SUMS), torch.float64, a.device)
    with device_of(a):
        get_kernel(RestConfig("judge_rest", rule.planes, rule.cross, transposed, groups)).launch(
            (blocks, 1, 1),
            (
                *_matrix(x, a.shape), vectors.data_ptr(), vectors.shape[2], scale.data_ptr(), other.data_ptr(),
                other.numel(), np.float32(2.0**rule.bits), *(np.float32(bound) for bound in bounds), parts.data_ptr(),
            ),
            early=True,
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


def default_configs() -> list[RestConfig]:
    """All of the kernels."""
    kernels = ("probe_rest", "judge_rest")
    rules = ((1, False), (2, False), (2, True))
    return [RestConfig(k, *rule, t, g) for k in kernels for rule in rules for t in (False, True) for g in (1, 2)]
