"""Order of a vector row's columns for the panel kernel: which slot of which group each one takes.

The kernel holds a window of a few neighbouring tiles of B at a time, so a group may take columns of these only, and the
oldest tile's have to be taken first.  Inside the window the order is free, and eight columns that ``ldmatrix`` reads at
once cost as many passes over the banks as the most frequent residue mod 8 among them.
"""

from __future__ import annotations

import torch
from torch import Tensor

PHASE = 8  # rows that ldmatrix reads at once; their numbers mod 8 decide about banks


def sequential_slots(
    columns: Tensor, row_offsets: Tensor, tile: int, tiles: int, group: int, window: int = 2
) -> Tensor:
    """Slots in the order of the columns, int64 (vectors,), from each row's start.

    ``columns``: int (vectors,), rising in each row; ``row_offsets``: int64 (R + 1,).  A group that would take columns
    from more than ``window`` neighbouring tiles is cut off before and padded.
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


def spread_slots(columns: Tensor, row_offsets: Tensor, tile: int, tiles: int, group: int, window: int = 2) -> Tensor:
    """As :func:`sequential_slots`, in an order that spares bank conflicts.

    Greedy, eight slots at a time: every residue that still has a column in the window gives one, the oldest; what is
    then left to fill comes from the residues that have most.  On uniform patterns with some 50 columns a tile a read
    takes 1.2 passes instead of 2.2.
    """
    device, rows, total = columns.device, row_offsets.numel() - 1, columns.numel()
    if not total:
        return torch.zeros(0, dtype=torch.int64, device=device)
    row_of = torch.repeat_interleave(row_offsets.diff(), output_size=total)
    kind = row_of * PHASE + columns % PHASE  # (vectors,) row and residue
    kinds, order = torch.sort(kind, stable=True)
    tile_of = columns[order].to(torch.int64) // tile
    counts = torch.bincount(kinds, minlength=rows * PHASE)
    first = torch.cumsum(counts, 0) - counts  # (R * 8,)
    within = torch.bincount(kinds * tiles + tile_of, minlength=rows * PHASE * tiles).view(-1, tiles)
    until = torch.cumsum(within, 1)  # (R * 8, tiles) columns up to a tile
    taken = _fill(counts.view(rows, PHASE), first, tile_of, until, group, window)  # (steps, R, 8)
    steps = taken.shape[0]
    ends = (
        taken.cumsum(0).permute(1, 2, 0).reshape(rows * PHASE, steps).contiguous()
    )  # columns of each kind up to a step
    # one search for all kinds: each has a range of its own
    apart = int(counts.max()) + 1
    number = torch.arange(total, device=device) - first[kinds]  # of its kind
    ranges = (ends + torch.arange(rows * PHASE, device=device)[:, None] * apart).view(-1)
    found = torch.searchsorted(ranges, number + kinds * apart, right=True)
    step = found - kinds * steps
    begun = torch.where(step > 0, ends.view(-1)[(found - 1).clamp(min=0)], 0)  # of its kind in earlier steps
    before = (taken.cumsum(2) - taken).view(steps, -1)[step, kinds]  # slots of the step that other residues take
    slots = torch.empty_like(step)
    slots[order] = step * PHASE + before + number - begun
    return slots


def _fill(counts: Tensor, first: Tensor, tile_of: Tensor, until: Tensor, group: int, width: int) -> Tensor:
    """How many columns of each residue each step of eight slots takes, int64 (steps, R, 8).

    ``counts``: (R, 8) columns of each kind; ``first``: (R * 8,) where they begin in ``tile_of``, the columns' tiles;
    ``until``: (R * 8, tiles) columns of a kind up to and with each tile; ``width``: tiles of a window.
    """
    tiles = until.shape[1]
    placed, steps = torch.zeros_like(counts), []
    levels = torch.arange(1, PHASE + 1, device=counts.device)
    while bool((placed < counts).any()):
        upcoming = tile_of[(first + placed.view(-1)).clamp(max=tile_of.numel() - 1)].view_as(placed)
        oldest = torch.where(placed < counts, upcoming, tiles - 1).amin(1, keepdim=True)  # (R, 1)
        last = (oldest + width - 1).clamp(max=tiles - 1).repeat_interleave(PHASE, 0)  # (R * 8, 1) that may be used
        allowed = until.gather(1, last).view_as(placed) - placed
        for _ in range(group // PHASE):
            filled = torch.minimum(allowed[:, :, None], levels).sum(1)  # (R, 8) slots if each gives at most so many
            level = (filled <= PHASE).sum(1, keepdim=True)
            take = torch.minimum(allowed, level)
            rest = PHASE - take.sum(1, keepdim=True)
            spare = allowed - take
            rank = spare.argsort(dim=1, descending=True, stable=True).argsort(dim=1, stable=True)
            take = take + ((rank < rest) & (spare > 0))
            steps.append(take)
            placed, allowed = placed + take, allowed - take
    return torch.stack(steps)
