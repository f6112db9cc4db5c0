"""SDDMM: a warp gathers the rows of Y that up to 32 neighbouring vectors name, and multiplies them by rows of X."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cute_kernels.dtypes import Number, element_bits
from cute_kernels.jit.kernel import Kernel
from cute_kernels.layout.bank_conflicts import Access, swizzled
from cute_kernels.operands import DenseArg, OutputArg, ScaleArg
from cute_kernels.sddmm.config import SampleConfig


def spread_row(g: Any, row_bytes: int, chunks: int) -> Any:
    """Row that lane group ``g`` reads, the twin of ``spread_row`` in ``sddmm/gather.cuh``."""
    if chunks == 1 or (row_bytes, chunks) in ((32, 2), (64, 4)):
        return g
    if row_bytes == 64:
        return (g & 1) | (g & 2) << 1 | (g & 4) >> 1
    first = 1 if chunks == 2 else 2
    return (g << first | g >> (3 - first)) & 7


@dataclass(frozen=True)
class SddmmConfig(SampleConfig):
    """The gather kernel.

    ``row_bytes`` of the wider operand's rows are a stage, ``stages`` of them are in flight.  ``wide``: totals that
    outgrow int32 move to int64 on the way.
    """

    STEM: ClassVar[str] = "sddmm"

    tile_k_bytes: int = 128
    stages: int = 3
    warps: int = 4
    int64_accum: bool = False

    @property
    def slots(self) -> int:
        """Vectors of a warp's piece."""
        return min(self.stride, 32)

    @property
    def depth(self) -> int:
        """k of one stage."""
        return self.tile_k_bytes * 8 // max(element_bits(self.x), element_bits(self.y))

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        rows_x = max(8, self.vector_length)
        bits = self.slots * element_bits(self.y) + rows_x * element_bits(self.x)
        return self.warps * self.stages * self.depth * bits // 8

    def grid(self, blocks: int, batch: int) -> tuple[int, int, int]:
        return (-(-blocks * (self.stride // self.slots) // self.warps) * batch, 1, 1)

    def _tags(self) -> list[str]:
        tags = [f"k{self.stride}b{self.tile_k_bytes}s{self.stages}w{self.warps}"]
        return [*tags, "wide"] if self.int64_accum else tags

    def _constants(self) -> dict[str, object]:
        return super()._constants() | {
            "kTileKBytes": self.tile_k_bytes,
            "kStages": self.stages,
            "kWarps": self.warps,
            "kInt64Accum": self.int64_accum,
        }

    def index_key(self) -> tuple[object, ...]:
        return ("block_rows", self.stride)

    def index(self, row_offsets: Tensor, columns: Tensor, row_start: Tensor, n: int) -> Tensor:
        """The vector row of each block of ``stride`` vectors, int32 (blocks,)."""
        blocks = (row_offsets.diff() + self.stride - 1) // self.stride  # (R,)
        rows = torch.arange(blocks.numel(), dtype=torch.int32, device=blocks.device)
        return torch.repeat_interleave(rows, blocks)

    def _tile(self, name: str, number: Number, rows: int, used: int) -> list[Access]:
        """Accesses to the rows of one operand: ``used`` of ``rows`` are fetched, all are read."""
        row_bytes, words = self.depth * element_bits(number) // 8, element_bits(number) // 4
        chunks = row_bytes // 16
        pieces = np.arange(-(-used * chunks // 32) * 32).reshape(-1, 32)
        fetch = np.where(pieces < used * chunks, swizzled(pieces // chunks, pieces % chunks, row_bytes), -1)
        lane = np.arange(32)
        byte = lane % 4 * 4 * words
        reads = [
            swizzled(8 * block + spread_row(lane // 4, row_bytes, words), run * words + byte // 16, row_bytes)
            + byte % 16
            for run in range(self.depth // 32)
            for block in range(rows // 8)
        ]
        return [
            Access(f"fetch: cp.async of rows of {name}", "store128", fetch),
            Access(f"read: rows of {name}", f"load{32 * words}", np.stack(reads)),
        ]

    def smem_accesses(self) -> list[Access]:
        """Every access of a warp to shared memory."""
        y = self._tile("Y", self.y, self.slots, self.slots)
        return y + self._tile("X", self.x, max(8, self.vector_length), self.vector_length)

    def launch(
        self,
        kernel: Kernel,
        pattern: Sequence[Tensor],
        x: DenseArg,
        y: DenseArg,
        out: OutputArg,
        left: ScaleArg,
        right: ScaleArg,
        pdl: bool = False,
    ) -> None:
        """One launch on torch's current stream; ``pattern``: what :meth:`index` made, and the columns, -1 in the
        padding."""
        block_rows, columns = pattern
        blocks = block_rows.shape[0]
        kernel.launch(
            self.grid(blocks, out.batch),
            (
                block_rows.data_ptr(), columns.data_ptr(), *x, *y, out.pointer, *left, *right, out.rows, out.inner,
                blocks,
            ),
            None,
            pdl,
        )  # fmt: skip
