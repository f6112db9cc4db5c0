"""One box of the tensor copy: what it writes to shared memory, and how many bytes a barrier counts for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cute_kernels.jit.compiler import Unit
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel
from cute_kernels.jit.tma import tensor_map
from cute_kernels.scaled_gemm.sm100 import MapParameters

FILL = 0xA5  # of shared memory before the copy


@dataclass(frozen=True)
class BoxProbeConfig:
    """``size``: bytes of shared memory that are looked at; ``tries``: looks at the barrier before it is given up."""

    size: int
    tries: int = 1 << 20

    @property
    def threads(self) -> int:
        return 128

    @property
    def smem_bytes(self) -> int:
        return self.size + 16

    shared_carveout, wide_cluster = -1, False

    def translation_unit(self, arch: str) -> Unit:
        """The translation unit of this config for ``arch``."""
        members = f"static constexpr int kFill = {FILL}, kTries = {self.tries};"
        kernel = Path(__file__).with_suffix(".cuh").read_text().replace("#pragma once\n", "")
        source = f"{kernel}namespace magicube {{\nstruct Config {{\n{members}}};\n}}\n"
        return Unit(source, "magicube::probe_box<magicube::Config>", arch)


def probe_box(parameters: MapParameters, codes: Tensor, x: int, y: int, counted: int) -> tuple[Tensor, bool]:
    """Copies the box at element ``x`` of row ``y`` of what ``parameters`` describes, on the device of ``codes``.

    Returns the shared memory of a byte's room an element, uint8 (rows, 128), :data:`FILL` where nothing was written,
    and whether a barrier that expects ``counted`` bytes lets its waiters go.  Waits for the GPU.
    """
    width, rows = parameters.box
    out = torch.empty((rows, width), dtype=torch.uint8, device=codes.device)
    over = torch.zeros(1, dtype=torch.int32, device=codes.device)
    with device_of(codes):
        kernel = get_kernel(BoxProbeConfig(out.numel()))
        arguments = (x, y, counted, out.numel(), out.data_ptr(), over.data_ptr())
        kernel.launch((1, 1, 1), (tensor_map(*parameters), *arguments))
    return out, bool(over.item())
