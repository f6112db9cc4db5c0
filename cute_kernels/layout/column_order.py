"""Order of the columns of a vector row for the panel kernel: the slot and group of each column.

The kernel holds a window of a few consecutive tiles of B, so a group takes its columns from these tiles, those of the
oldest tile first. Inside the window the order is free. Eight columns that ``ldmatrix`` reads at once take as many
wavefronts as the most frequent residue mod 8 among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.cpu import engine
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.jit.device import device_of
from cute_kernels.jit.kernel import get_kernel

PHASE = 8  # rows that ldmatrix reads at once; their numbers mod 8 decide about banks


@dataclass(frozen=True)
class ColumnOrderConfig(KernelConfig):
    """Config of the kernel of :func:`ordered_slots`: threads per CTA."""

    threads: int = 128

    @property
    def smem_bytes(self) -> int:
        return 0

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        return f"spread_slots-{self.threads}"

    kernel_header = "layout/column_order.cuh"
    kernel_entry = "spread_slots"

    def _constants(self) -> dict[str, object]:
        return {
            "kThreads": self.threads,
        }


def sequential_slots(
    columns: Tensor, row_offsets: Tensor, tile: int, tiles: int, group: int, window: int = 2
) -> Tensor:
    """Assign slots in the order of the columns.

    Parameters
    ----------
    columns : Tensor, shape (vectors,)
        Integers, increasing in each vector row.
    row_offsets : Tensor, shape (R + 1,)
        int64.
    tile, tiles : int
        Rows of B per tile; tiles of B.
    group : int
        Slots per group.
    window : int, default 2
        Consecutive tiles of a group; a group that would exceed them is padded.

    Returns
    -------
    Tensor, shape (vectors,)
        int64 slots, counted from the start of each vector row.

    Examples
    --------
    >>> sequential_slots(torch.tensor([0, 5, 60]), torch.tensor([0, 3]), 16, 4, 8).tolist()
    [0, 1, 8]
    """
    rows, total = row_offsets.numel() - 1, columns.numel()
    row_of = torch.repeat_interleave(row_offsets.diff(), output_size=total)
    segment = row_of * tiles + columns // tile
    counts = torch.bincount(segment, minlength=rows * tiles).view(rows, tiles)
    starts, at = torch.zeros_like(counts), counts.new_zeros(rows)
    oldest = counts.new_full((rows,), tiles)  # tile of the open group's first column
    for step in range(tiles):
        stale = (at % group != 0) & (oldest <= step - window) & (counts[:, step] > 0)
        at = torch.where(stale, (at + group - 1) // group * group, at)
        starts[:, step] = at
        end = at + counts[:, step]
        opened = (end // group * group >= at) & (counts[:, step] > 0)  # the open group began in this tile
        oldest = torch.where(opened, step, oldest)
        at = end
    before = torch.cumsum(counts.view(-1), 0) - counts.view(-1)  # (R * tiles,) columns of earlier segments
    return starts.view(-1)[segment] + torch.arange(total, device=columns.device) - before[segment]


def ordered_slots(columns: Tensor, row_offsets: Tensor, tile: int, tiles: int, group: int, window: int = 2) -> Tensor:
    """Assign slots as :func:`sequential_slots`, in an order with few bank conflicts.

    Runs ``layout/column_order_search.cuh`` on the device of the columns. On uniform patterns with about 50 columns per
    tile a read takes 1.2 wavefronts instead of 2.2.

    Parameters
    ----------
    columns, row_offsets, tile, tiles, group, window
        As for :func:`sequential_slots`.

    Returns
    -------
    Tensor, shape (vectors,)
        int64.

    Raises
    ------
    RuntimeError
        For tensors on a CPU without the compiled engine.

    Examples
    --------
    >>> ordered_slots(torch.tensor([0, 5, 60]), torch.tensor([0, 3]), 16, 4, 8).tolist()
    [0, 1, 8]
    """
    device, rows, total = columns.device, row_offsets.numel() - 1, columns.numel()
    slots = torch.empty(total, dtype=torch.int64, device=device)
    if not total:
        return slots
    row_of = torch.repeat_interleave(row_offsets.diff(), output_size=total)
    residue = columns % PHASE
    order = torch.argsort(row_of * PHASE + residue, stable=True)  # (vectors,) by row and residue
    place = (row_of * tiles + columns // tile) * PHASE + residue
    counts = torch.bincount(place, minlength=rows * tiles * PHASE).view(rows, tiles, PHASE)
    until = counts.cumsum(1)  # (R, tiles, 8) columns of a residue up to a tile
    each = until[:, -1].reshape(-1)
    first = torch.cumsum(each, 0) - each  # (R * 8,)
    until = until.to(torch.int32)
    if device.type == "cpu":
        engine.order_columns(until, first, order, group, window, slots)
        return slots
    config = ColumnOrderConfig()
    with device_of(slots):
        get_kernel(config).launch(
            (-(-rows * 32 // config.threads), 1, 1),
            (until.data_ptr(), first.data_ptr(), order.data_ptr(), rows, tiles, group, window, slots.data_ptr()),
        )
    return slots


def default_configs() -> list[ColumnOrderConfig]:
    """Return the one kernel."""
    return [ColumnOrderConfig()]
