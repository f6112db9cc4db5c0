"""SpMM, panel kernel: tiles of a strip of B pass through shared memory while many vector rows use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from cute_kernels.banks import bank_order
from cute_kernels.jit.kernel import get_kernel, tensor_map
from cute_kernels.operands import Factor, Place, Target, Vectors
from cute_kernels.spmm import OUT_BYTES, SpmmConfig, pack_fragments

BOX_ROWS = 256  # the copy engine's limit
_MAX_COORDINATE = 2**31 - 1


@dataclass(frozen=True)
class PanelConfig(SpmmConfig):
    """``row_bytes`` of B's rows are a strip, ``tile`` of them a stage, ``stages`` the ring.

    Each of ``warps`` warps keeps the sums of ``rows`` vector rows.  ``ordered``: columns lie in the order that spares
    bank conflicts.  ``multiprocessors``: blocks of the persistent grid.
    """

    STEM: ClassVar[str] = "spmm_panel"

    row_bytes: int = 128  # type: ignore[misc]
    tile: int = 512
    stages: int = 3
    warps: int = 15  # and one that feeds them: 16 leave 128 registers a thread
    rows: int = 1
    ordered: bool = True
    multiprocessors: int = 132

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1)

    @property
    def ring(self) -> int:
        """Rows of B that the ring holds."""
        return self.tile * self.stages

    @property
    def smem_bytes(self) -> int:
        return self.ring * self.row_bytes + 16 * self.stages

    def _tags(self) -> list[str]:
        shape = f"b{self.row_bytes}t{self.tile}s{self.stages}w{self.warps}r{self.rows}"
        return [*super()._tags(), shape, *([] if self.ordered else ["unordered"])]

    def _constants(self) -> dict[str, object]:
        return super()._constants() | {
            "kTile": self.tile,
            "kStages": self.stages,
            "kWarps": self.warps,
            "kRows": self.rows,
        }

    def sparse_key(self) -> tuple[object, ...]:
        return (*super().sparse_key(), self.row_bytes, self.tile, self.stages, self.ordered)

    @property
    def sums(self) -> int:
        """Registers of a lane that hold sums."""
        tiles = max(1, self.vector_length // 8)
        planes = 1 if self.stacked else self.digits[0]
        return self.rows * tiles * planes * self.digits[1] * self.columns // 4

    def items(self, vector_rows: int, n: int, batch: int) -> int:
        """Strips of row blocks, each of which passes all of a strip of B through shared memory."""
        return -(-vector_rows // (self.warps * self.rows)) * -(-n // self.columns) * batch

    def launch(self, matrix: Sequence[Tensor], b: Place, out: Target, left: Factor, right: Factor, bias: int) -> None:
        """One launch on torch's current stream, or one a matrix of a batch that no single step separates.

        ``matrix`` is a :class:`PanelCopy` of this config.
        """
        step, rest = divmod(b.batch, b.pitch) if out.batch > 1 else (0, 0)
        if rest or step * (out.batch - 1) + out.inner > _MAX_COORDINATE:
            size = out.rows * out.columns * OUT_BYTES[self.out]
            for i in range(out.batch):
                one = Target(out.pointer + i * size, 1, out.rows, out.inner, out.columns)
                scales = Factor(right.pointer + 4 * i * right.batch, right.step, 0)
                self.launch(matrix, Place(b.pointer + i * b.batch, b.pitch, 0, b.row), one, left, scales, bias)
            return
        offsets, ends, places, values = matrix
        rows = offsets.shape[0] - 1
        shape = (b.row, step * (out.batch - 1) + out.inner)
        box = (self.row_bytes, min(self.tile, BOX_ROWS))
        grid = min(self.multiprocessors, self.items(rows, out.columns, out.batch))
        get_kernel(self).launch(
            (grid, 1, 1),
            (
                tensor_map(b.pointer, 1, shape, b.pitch, box, self.row_bytes), offsets.data_ptr(), ends.data_ptr(),
                places.data_ptr(), values.data_ptr(), out.pointer, left.pointer, left.step, right.pointer, right.step,
                right.batch, bias, out.rows, rows, out.columns, out.inner, out.batch, step, self.vector_stores(out),
            ),
        )  # fmt: skip

    def copy(self, vectors: Vectors, inner: int) -> PanelCopy:
        """The execution copy of ``vectors``, a matrix of ``inner`` columns."""
        return panel_copy(self, vectors, inner)


class PanelCopy(NamedTuple):
    """The sparse operand for the panel kernel."""

    group_offsets: Tensor  # int64 (R + 1,)
    tile_ends: Tensor  # int32 (R, tiles): groups of the row that need no tile beyond t
    places: Tensor  # int16 (groups * group,): where the rows of B lie in the ring, in 16 bytes, swizzled
    values: Tensor  # uint8 (groups, bytes a group), fragment order


def _starts(counts: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Place of each tile's first vector in its row, int64 (R, tiles), and of the row's end, (R,).

    ``counts``: int64 (R, tiles).  Vectors follow each other, but a group that would take vectors of a third tile is cut
    off before: it is padded.
    """
    rows, tiles = counts.shape
    starts = torch.zeros_like(counts)
    at = counts.new_zeros(rows)
    oldest = counts.new_full((rows,), tiles)  # tile of the open group's first vector
    for tile in range(tiles):
        stale = (at % group != 0) & (oldest < tile - 1) & (counts[:, tile] > 0)
        at = torch.where(stale, (at + group - 1) // group * group, at)
        starts[:, tile] = at
        end = at + counts[:, tile]
        opened = (end // group * group >= at) & (counts[:, tile] > 0)  # the open group began in this tile
        oldest = torch.where(opened, tile, oldest)
        at = end
    return starts, at


def panel_copy(config: PanelConfig, vectors: Vectors, inner: int) -> PanelCopy:
    """The execution copy of ``vectors``; torch operators on their own device."""
    group, device = config.group, vectors.columns.device
    tiles = -(-inner // config.tile)
    rows = vectors.row_offsets.numel() - 1
    total = vectors.columns.numel()
    row_of = torch.repeat_interleave(vectors.row_offsets.diff(), output_size=total)
    if config.ordered:
        order = bank_order(vectors.columns, row_of * tiles + vectors.columns // config.tile)
        vectors = vectors._replace(columns=vectors.columns[order], values=vectors.values[order])
    segment = row_of * tiles + vectors.columns // config.tile  # (vectors,)
    counts = torch.bincount(segment, minlength=rows * tiles)
    starts, ends = _starts(counts.view(rows, tiles), group)
    offsets = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    torch.cumsum((ends + group - 1) // group, 0, out=offsets[1:])
    groups = int(offsets[-1])
    before = torch.cumsum(counts, 0) - counts  # (R * tiles,) vectors of earlier segments
    within = torch.arange(total, device=device) - before[segment]
    positions = offsets[row_of] * group + starts.view(-1)[segment] + within  # (vectors,)

    last = torch.zeros(groups, dtype=torch.int64, device=device)
    last.scatter_reduce_(0, positions // group, segment % max(tiles, 1), "amax")
    owner = torch.repeat_interleave(offsets.diff(), output_size=groups)
    finished = torch.bincount(owner * tiles + last, minlength=rows * tiles).view(rows, tiles).cumsum(1)

    slot = (vectors.columns % config.ring).to(torch.int64)
    chunks = config.row_bytes // 16
    place = slot * chunks + slot // (128 // config.row_bytes) % chunks
    # Padding names the row of its group's first vector: it is there, and reading it twice costs nothing.
    places = torch.zeros(groups, group, dtype=torch.int64, device=device)
    firsts = positions % group == 0
    places[positions[firsts] // group] = place[firsts][:, None]
    places.view(-1)[positions] = place
    return PanelCopy(
        offsets,
        finished.to(torch.int32),
        places.view(-1).to(torch.int16),
        pack_fragments(config, vectors, positions, groups),
    )
