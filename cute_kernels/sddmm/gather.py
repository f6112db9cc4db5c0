"""SDDMM gather kernel: config, index and launch. A warp gathers the rows of Y of up to 32 consecutive vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cute_kernels.dtypes import ElementType, element_bits
from cute_kernels.jit.kernel import Kernel
from cute_kernels.layout.bank_conflicts import Access, swizzled
from cute_kernels.operands import DenseArg, OutputArg, ScaleArg
from cute_kernels.sddmm.config import SampleConfig

__all__ = ["SddmmConfig", "spread_row"]


def spread_row(g: Any, row_bytes: int, chunks: int) -> Any:
    """Return the row that lanes ``4 g`` to ``4 g + 3`` read, so that reads have no bank conflicts.

    The same function as ``spread_row`` in ``sddmm/gather.cuh``.

    Parameters
    ----------
    g : int or array
        Lane divided by 4: 0 to 7.
    row_bytes : int
        Bytes of a row in shared memory: 32, 64 or 128.
    chunks : int
        16-byte chunks per 32 elements along K.

    Examples
    --------
    >>> [spread_row(g, row_bytes=64, chunks=2) for g in range(8)]
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    if chunks == 1 or (row_bytes, chunks) in ((32, 2), (64, 4)):
        return g
    if row_bytes == 64:
        return (g & 1) | (g & 2) << 1 | (g & 4) >> 1
    first = 1 if chunks == 2 else 2
    return (g << first | g >> (3 - first)) & 7


@dataclass(frozen=True)
class SddmmConfig(SampleConfig):
    """Config of the gather kernel ``sddmm/gather.cuh``.

    Attributes
    ----------
    tile_k_bytes : int
        Bytes of a row of the wider operand per stage.
    stages : int
        Stages of a warp's pipeline. 1: no prefetch, for measurements.
    warps : int
        Warps per CTA.
    int64_accum : bool
        Move accumulators to int64 before int32 can overflow.

    Examples
    --------
    >>> from cute_kernels.dtypes import Integer
    >>> config = SddmmConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "float16")
    >>> config.name, config.depth, config.smem_bytes
    ('sddmm-s8_m16n8k32-v8-s8xs8-float16-k32b128s3w4', 128, 61440)
    """

    STEM: ClassVar[str] = "sddmm"
    SIZES: ClassVar[str] = r"k(?P<stride>\d+)b(?P<tile_k_bytes>\d+)s(?P<stages>\d+)w(?P<warps>\d+)"
    FLAGS: ClassVar[dict[str, tuple[str, bool]]] = {"wide": ("int64_accum", True)}

    tile_k_bytes: int = 128
    stages: int = 3
    warps: int = 4
    int64_accum: bool = False

    @property
    def slots(self) -> int:
        """Consecutive vectors per warp."""
        return min(self.stride, 32)

    @property
    def depth(self) -> int:
        """K per stage, in elements."""
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
        """Return the CTAs of a launch; `blocks`: blocks of `stride` slots in the output of one matrix."""
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
        """Return the vector row of each block of `stride` slots of the output, int32 (blocks,)."""
        blocks = (row_offsets.diff() + self.stride - 1) // self.stride  # (R,)
        rows = torch.arange(blocks.numel(), dtype=torch.int32, device=blocks.device)
        return torch.repeat_interleave(rows, blocks)

    def _tile(self, name: str, number: ElementType, rows: int, used: int) -> list[Access]:
        """Return the accesses to one operand: `used` of `rows` rows are copied, all are read."""
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
        """Return every shared-memory access of a warp."""
        y = self._tile("Y", self.y, self.slots, self.slots)
        return y + self._tile("X", self.x, max(8, self.vector_length), self.vector_length)

    def launch(
        self,
        kernel: Kernel,
        pattern: Sequence[Tensor],
        x: DenseArg,
        y: DenseArg,
        out: OutputArg,
        row_scale: ScaleArg,
        col_scale: ScaleArg,
        pdl: bool = False,
    ) -> None:
        block_rows, columns = pattern
        blocks = block_rows.shape[0]
        kernel.launch(
            self.grid(blocks, out.batch),
            (
                block_rows.data_ptr(), columns.data_ptr(), *x, *y, out.pointer, *row_scale, *col_scale,
                out.rows, out.inner, blocks,
            ),
            None,
            pdl,
        )  # fmt: skip
