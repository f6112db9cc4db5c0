"""SDDMM panel kernel: config, index and launch. A CTA keeps a tile of Y in shared memory for many vector rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from cute_kernels.dtypes import element_bits
from cute_kernels.jit.codegen import OUT_BYTES
from cute_kernels.jit.kernel import Kernel
from cute_kernels.jit.tma import tensor_map
from cute_kernels.layout.bank_conflicts import Access, swizzled
from cute_kernels.operands import DenseArg, OutputArg, ScaleArg
from cute_kernels.sddmm.config import SampleConfig

__all__ = ["BOX_ROWS", "SddmmPanelConfig"]

BOX_ROWS = 128  # rows of Y per mbarrier
_MAX_COORDINATE = 2**31 - 1  # of a tensor map


@dataclass(frozen=True)
class SddmmPanelConfig(SampleConfig):
    """Config of the panel kernel ``sddmm/panel.cuh``.

    Attributes
    ----------
    tile : int
        Rows of Y in shared memory.
    boxes : int
        TMA boxes per row of Y; together they hold all of K.
    box_bytes : int
        Bytes of a row per box: 128, the width of the TMA swizzle, or 64 for a single box.
    slots : int
        Consecutive vectors that a warp computes at once.
    warps : int
        Warps per CTA.

    Examples
    --------
    >>> from cute_kernels.dtypes import Integer
    >>> config = SddmmPanelConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "float16")
    >>> config.name, config.depth, config.smem_bytes
    ('sddmm_panel-s8_m16n8k32-v8-s8xs8-float16-k32t512b2p32w16', 256, 174112)
    """

    STEM: ClassVar[str] = "sddmm_panel"
    SIZES: ClassVar[str] = (
        r"k(?P<stride>\d+)t(?P<tile>\d+)b(?P<boxes>\d+)(?P<box_bytes>n)?p(?P<slots>\d+)w(?P<warps>\d+)"
    )

    tile: int = 512
    boxes: int = 2
    box_bytes: int = 128
    slots: int = 32
    warps: int = 16

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def depth(self) -> int:
        """Largest K."""
        return self.boxes * self.box_bytes * 8 // element_bits(self.y)

    @property
    def _pitch(self) -> int:
        """Memory stride of the rows of X in shared memory, in bytes."""
        row = self.depth * element_bits(self.x) // 8
        return row if row // (4 * self._load) % 2 else row + 4 * self._load

    @property
    def _load(self) -> int:
        """Bytes of X per load of a lane."""
        return min(16, 16 * element_bits(self.x) // element_bits(self.y))

    @property
    def smem_bytes(self) -> int:
        scales = 8 * -(-self.tile // BOX_ROWS) + 4 * self.tile  # mbarriers and column scales
        return self.boxes * self.tile * self.box_bytes + self.warps * self.vector_length * self._pitch + scales

    @property
    def registers(self) -> int:
        """Registers per lane for rows of X and accumulators."""
        x, y = self.digits
        tiles = max(1, self.vector_length // 8)
        return tiles * (x * self.depth // 16 + x * y * self.slots // 4)

    @classmethod
    def _size(cls, field: str, text: str) -> int:
        return 64 if field == "box_bytes" else int(text)

    def _tags(self) -> list[str]:
        narrow = "n" if self.box_bytes == 64 else ""
        return [f"k{self.stride}t{self.tile}b{self.boxes}{narrow}p{self.slots}w{self.warps}"]

    def _constants(self) -> dict[str, object]:
        return super()._constants() | {
            "kTile": self.tile,
            "kBoxes": self.boxes,
            "kBoxBytes": self.box_bytes,
            "kSlots": self.slots,
            "kWarps": self.warps,
        }

    def index_key(self) -> tuple[object, ...]:
        return ("ranges", self.stride, self.tile, self.slots)

    def index(self, row_offsets: Tensor, columns: Tensor, row_start: Tensor, n: int) -> Tensor:
        """Return the slots of the output per tile of Y, int32 (tiles + 1, R, 2).

        Per tile and vector row: the first unit of ``slots / 8`` slots and the one after the last. The last entry has
        the first slot of each row's padding and the one after the last.
        """
        tiles, rows, unit = -(-n // self.tile), row_start.numel(), self.slots // 8
        lengths = row_offsets.diff()
        row_of = torch.repeat_interleave(lengths, output_size=columns.numel())
        counts = torch.bincount(row_of * tiles + columns // self.tile, minlength=rows * tiles).view(rows, tiles)
        ends = row_start[:, None] + counts.cumsum(1)  # (R, tiles)
        ranges = torch.stack(((ends - counts) // unit, -(-ends // unit)), 2) * (counts > 0)[:, :, None]
        row_end = row_start + lengths
        padding = torch.stack((row_end, -(-row_end // self.stride) * self.stride), 1)
        return torch.cat((ranges, padding[:, None]), 1).transpose(0, 1).to(torch.int32).contiguous()

    def smem_accesses(self) -> list[Access]:
        """Return every shared-memory access of a warp, for the columns 0, 1, ...; no others have more bank conflicts.

        In boxes of 64 bytes, two rows of Y with numbers of the same parity conflict.
        """
        lane, chunks = np.arange(32), self.vector_length * self.depth * element_bits(self.x) // 128
        g, t, blocks, width = lane // 4, lane % 4, self.slots // 8, self.box_bytes
        y = [
            box * self.tile * width + swizzled(row, 4 * (half ^ (g & 1) ^ (row >> 2 & 1)) + t, width)
            if width == 128
            else row * width + 16 * t
            for box in range(self.boxes)
            for row in (g * blocks + block for block in range(blocks))
            for half in range(width // 64)
        ]
        piece = np.arange(-(-chunks // 32) * 32).reshape(-1, 32)
        per_row = chunks // self.vector_length
        fetch = np.where(piece < chunks, piece // per_row * self._pitch + piece % per_row * 16, -1)
        lane_bytes = 16 * element_bits(self.x) // element_bits(self.y)
        x = [
            (8 * tile + g % self.vector_length) * self._pitch + (4 * half + t) * lane_bytes + part
            for tile in range(max(1, self.vector_length // 8))
            for half in range(width // 64 * self.boxes)
            for part in range(0, lane_bytes, self._load)
        ]
        return [
            Access("read: rows of Y", "load128", np.stack(y)),
            Access("fetch: cp.async of rows of X", "store128", fetch),
            Access("read: rows of X", f"load{8 * self._load}", np.stack(x)),
        ]

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
        # A batch needs one launch per matrix if its stride is not a whole number of rows or exceeds a tensor map.
        if out.inner == 0:  # X is all zeros in shared memory, so Y can be any valid address
            x, y = DenseArg(out.pointer, 16, 0, 0), DenseArg(out.pointer, 16, 0, 16)
        ranges, columns = pattern
        slots, tiles, rows = columns.shape[0], ranges.shape[0] - 1, ranges.shape[1]
        step, unaligned = divmod(y.batch, y.pitch) if out.batch > 1 else (0, 0)
        if unaligned or step * (out.batch - 1) + tiles * self.tile > _MAX_COORDINATE:
            size = slots * self.vector_length * OUT_BYTES[self.out]
            for i in range(out.batch):
                one = OutputArg(out.pointer + i * size, 1, *out[2:])
                scales = row_scale.of_matrix(i), col_scale.of_matrix(i)
                self.launch(kernel, pattern, x.of_matrix(i), y.of_matrix(i), one, *scales, pdl)
            return
        shape = (y.row, step * (out.batch - 1) + out.columns if out.inner else 1)
        box, swizzle = (self.box_bytes, min(self.tile, BOX_ROWS)), 128 if self.box_bytes == 128 else 0
        row_blocks = min(rows, max(1, kernel.num_sms // (tiles * out.batch)))
        block_rows = -(-rows // row_blocks)
        row_blocks = -(-rows // block_rows)
        kernel.launch(
            (tiles * row_blocks * out.batch, 1, 1),
            (
                tensor_map(y.pointer, 1, shape, y.pitch, box, swizzle), ranges.data_ptr(), columns.data_ptr(), *x,
                out.pointer, *row_scale, *col_scale, out.rows, rows, out.columns, slots, tiles, row_blocks,
                block_rows, step,
            ),
            None,
            pdl,
        )  # fmt: skip
