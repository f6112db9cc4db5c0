"""SDDMM, panel kernel: a block keeps a tile of Y's rows in shared memory and samples many vector rows from it."""

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

BOX_ROWS = 128  # that one barrier counts
_MAX_COORDINATE = 2**31 - 1


@dataclass(frozen=True)
class SddmmPanelConfig(SampleConfig):
    """``tile`` rows of Y lie in shared memory, in ``boxes`` of ``box_bytes``, which must hold all of k.

    ``box_bytes``: 128, as wide as the copy engine's swizzle, or 64 for a single box.  Each of ``warps`` warps samples
    ``slots`` neighbouring vectors at a time.
    """

    STEM: ClassVar[str] = "sddmm_panel"

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
        """The longest sum."""
        return self.boxes * self.box_bytes * 8 // element_bits(self.y)

    @property
    def _pitch(self) -> int:
        """Bytes from one row of X to the next in shared memory."""
        row = self.depth * element_bits(self.x) // 8
        return row if row // (4 * self._load) % 2 else row + 4 * self._load

    @property
    def _load(self) -> int:
        """Bytes of X that a lane loads at once."""
        return min(16, 16 * element_bits(self.x) // element_bits(self.y))

    @property
    def smem_bytes(self) -> int:
        rest = 8 * -(-self.tile // BOX_ROWS) + 4 * self.tile  # barriers, factors of the columns
        return self.boxes * self.tile * self.box_bytes + self.warps * self.vector_length * self._pitch + rest

    @property
    def registers(self) -> int:
        """Registers of a lane that hold rows of X and sums."""
        x, y = self.digits
        tiles = max(1, self.vector_length // 8)
        return tiles * (x * self.depth // 16 + x * y * self.slots // 4)

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
        """Which places of the output have to do with each tile, int32 (tiles + 1, R, 2).

        For each vector row the first unit of ``slots / 8`` places and the one after the last; after the tiles the
        places of the row's padding.
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
        """Every access of a warp to shared memory, for columns 0, 1, ...; no others conflict more.

        In boxes of 64 bytes two rows of Y of one parity meet: half of all pairs do.
        """
        lane, chunks = np.arange(32), self.vector_length * self.depth * element_bits(self.x) // 128
        g, t, blocks, wide = lane // 4, lane % 4, self.slots // 8, self.box_bytes
        y = [
            box * self.tile * wide + swizzled(row, 4 * (half ^ (g & 1) ^ (row >> 2 & 1)) + t, wide)
            if wide == 128
            else row * wide + 16 * t
            for box in range(self.boxes)
            for row in (g * blocks + block for block in range(blocks))
            for half in range(wide // 64)
        ]
        piece = np.arange(-(-chunks // 32) * 32).reshape(-1, 32)
        width = chunks // self.vector_length
        fetch = np.where(piece < chunks, piece // width * self._pitch + piece % width * 16, -1)
        lane_bytes = 16 * element_bits(self.x) // element_bits(self.y)
        x = [
            (8 * tile + g % self.vector_length) * self._pitch + (4 * half + t) * lane_bytes + part
            for tile in range(max(1, self.vector_length // 8))
            for half in range(wide // 64 * self.boxes)
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
        left: ScaleArg,
        right: ScaleArg,
        pdl: bool = False,
    ) -> None:
        """One launch on torch's current stream, or one a matrix of a batch that no single step separates.

        ``pattern``: what :meth:`index` made, and the columns, -1 in the padding.
        """
        if out.inner == 0:  # X is filled with zeros, so any row will do for Y
            x, y = DenseArg(out.pointer, 16, 0, 0), DenseArg(out.pointer, 16, 0, 16)
        ranges, columns = pattern
        slots, tiles, rows = columns.shape[0], ranges.shape[0] - 1, ranges.shape[1]
        step, rest = divmod(y.batch, y.pitch) if out.batch > 1 else (0, 0)
        if rest or step * (out.batch - 1) + tiles * self.tile > _MAX_COORDINATE:
            size = slots * self.vector_length * OUT_BYTES[self.out]
            for i in range(out.batch):
                at_x, at_y = (DenseArg(place.pointer + i * place.batch, place.pitch, 0, place.row) for place in (x, y))
                rows_of, columns_of = (
                    ScaleArg(factor.pointer + 4 * i * factor.batch, factor.step, 0) for factor in (left, right)
                )
                one = OutputArg(out.pointer + i * size, 1, *out[2:])
                self.launch(kernel, pattern, at_x, at_y, one, rows_of, columns_of, pdl)
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
                out.pointer, *left, *right, out.rows, rows, out.columns, slots, tiles, row_blocks, block_rows, step,
            ),
            None,
            pdl,
        )  # fmt: skip
