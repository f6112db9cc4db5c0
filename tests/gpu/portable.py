"""The kernels of 8.0 as PTX: ``MAGICUBE_ARCH=compute_80 python -m tests.gpu.portable`` checks them on any newer GPU.

Every atom of a warp multiplies, the 4-bit ones natively or emulated, as the chip has them.
"""

from __future__ import annotations

import os
from typing import Any

import torch

import magicube_cutlass as mc
from cute_kernels.atoms import atoms
from cute_kernels.jit import current_arch, warmup
from cute_kernels.machine import Machine, Problem
from cute_kernels.sddmm.heuristics import choose_sddmm
from cute_kernels.spmm.heuristics import choose_spmm
from tests.gpu.problems import check_sddmm, dense, kind, sparse, spmm

Widths = tuple[int, bool]


def cases() -> list[tuple[str | None, Widths, Widths]]:
    """(atom, widths of both operands); None lets the library choose."""
    found: list[tuple[str | None, Widths, Widths]] = [(None, (8, True), (8, True)), (None, (4, False), (4, True))]
    for entry in atoms("compute_80"):
        if entry.floating:
            continue
        if entry.threads == 32 and entry.mma_bits == 4:
            found += [(entry.name, (4, True), (4, True)), (entry.name, (4, False), (4, True))]
        elif entry.threads == 32:
            pair = ((4, True), (4, True)) if entry.bits == 4 else ((16, True), (8, False))
            found.append((entry.name, *pair))
    return found


def main() -> None:
    assert current_arch() == "compute_80", "set MAGICUBE_ARCH=compute_80"
    here = Machine("compute_80", torch.cuda.get_device_properties(0).multi_processor_count)
    configs: list[Any] = []
    for atom, left, right in cases():
        of = kind(8, left, right)
        configs.append(choose_spmm(of, here, Problem(8, 200, 800, 100, 64), atom))
        configs.append(choose_sddmm(of, here, stride=64, inner=256, atom=atom))
    for _ in warmup(configs, "compute_80", os.cpu_count() or 1):
        pass
    for atom, left, right in cases():
        torch.manual_seed(0)
        a, b = sparse(61, 170, 8, left, sparsity=0.5), dense((170, 55), right)
        assert torch.equal(spmm(a, b, atom=atom), mc.reference.spmm(a, b)), (atom, left, right)
        pattern = mc.random_pattern(61, 55, 0.5, 8)
        check_sddmm(dense((61, 250), left), dense((55, 250), right), pattern, 64, atom=atom)
        print(f"{atom or 'chosen'} {left} x {right}: equal")


if __name__ == "__main__":
    main()
