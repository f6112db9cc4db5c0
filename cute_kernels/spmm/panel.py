"""SpMM panel kernel: config, launch and packed sparse operand. Many vector rows share tiles of B in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.dtypes import element_bits
from cute_kernels.jit.codegen import OUT_BYTES
from cute_kernels.jit.kernel import Kernel
from cute_kernels.jit.tma import tensor_map
from cute_kernels.layout.bank_conflicts import Access, swizzled
from cute_kernels.layout.column_order import ordered_slots, sequential_slots
from cute_kernels.layout.ring import RingConfig
from cute_kernels.machine import SHARED_BYTES
from cute_kernels.operands import DenseArg, OutputArg, ScaleArg, Vectors
from cute_kernels.spmm.config import SpmmConfig, pack_fragments

__all__ = ["BOX_ROWS", "PackedPanel", "PanelConfig", "balance_rows", "pack_records", "take"]

BOX_ROWS = 256  # limit of a TMA box
_PREFETCHED_RECORDS = 8  # records beyond the last one that a kernel can prefetch
_MAX_COORDINATE = 2**31 - 1  # of a tensor map


@dataclass(frozen=True)
class PanelConfig(RingConfig, SpmmConfig):
    """Config of the panel kernel ``spmm/panel.cuh``.

    A group takes its rows of B from at most `tile_window` consecutive tiles; the other stages are for tiles in flight.
    Vector rows are sorted by length and shared out equally: among warps if a warp has several, else among CTAs.

    Attributes
    ----------
    tile_n_bytes : int
        Bytes of a row of B per N tile.
    tile : int
        Rows of B per stage.
    stages : int
        Stages of the TMA pipeline. 1: no prefetch, for measurements; has never run.
    tile_window : int
        Consecutive tiles that one group can use, below `stages`; 1 with a single stage.
    warps : int
        Consumer warps per CTA, besides one producer warp.
    rows_per_warp : int
        Vector rows per warp, whose accumulators stay in registers.
    cluster : int
        CTAs per cluster, which share tiles of B by multicast.
    ordered : bool
        Order the columns of a vector row so that gathered reads have few bank conflicts.
    a_stages : int
        Stages of a warp's pipeline of records of A in shared memory. 0: the next two records are in registers.

    Examples
    --------
    >>> from cute_kernels.dtypes import Integer
    >>> config = PanelConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "float16")
    >>> config.name, config.threads, config.ring, config.smem_bytes
    ('spmm_panel-s8_m16n8k32-v8-s8xs8-float16-b128t256s6x3w16r1', 544, 1536, 204896)
    """

    STEM: ClassVar[str] = "spmm_panel"
    SIZES: ClassVar[str] = (
        r"b(?P<tile_n_bytes>\d+)t(?P<tile>\d+)s(?P<stages>\d+)x(?P<tile_window>\d+)w(?P<warps>\d+)"
        r"r(?P<rows_per_warp>\d+)(?:c(?P<cluster>\d+))?(?:a(?P<a_stages>\d+))?"
    )
    FLAGS: ClassVar[dict[str, tuple[str, bool]]] = SpmmConfig.FLAGS | {"unordered": ("ordered", False)}

    tile_n_bytes: int = 128  # type: ignore[misc]
    tile: int = 256
    stages: int = 6
    tile_window: int = 3
    warps: int = 16
    rows_per_warp: int = 1
    cluster: int = 1
    ordered: bool = True
    a_stages: int = 0

    @property
    def smem_bytes(self) -> int:
        return self._unpaired_bytes + (self._exchange_bytes if self.pairs and self.rows_per_warp == 1 else 0)

    @property
    def _unpaired_bytes(self) -> int:
        per_warp = 4 * self.tile_n + self.a_stages * self.record_bytes  # scales of the columns, records of A
        return self.ring * self.tile_n_bytes + 16 * self.stages + per_warp * self.warps

    @property
    def _exchange_bytes(self) -> int:
        """Bytes of the results that a warp gives its neighbor, of all warps."""
        return 8 * self.tile_n * self.warps

    @property
    def pairs(self) -> bool:
        """Whether a warp, or two neighbors, have neighboring vector rows and write the transpose in whole sectors."""
        if not self.transposed or self.vector_length != 8 or OUT_BYTES[self.out] != 2:
            return False
        fits = self._unpaired_bytes + self._exchange_bytes <= SHARED_BYTES
        return self.rows_per_warp % 2 == 0 or (self.rows_per_warp == 1 and self.warps % 2 == 0 and fits)

    def _tags(self) -> list[str]:
        shape = f"b{self.tile_n_bytes}t{self.tile}s{self.stages}x{self.tile_window}w{self.warps}r{self.rows_per_warp}"
        shape += (f"c{self.cluster}" if self.cluster > 1 else "") + (f"a{self.a_stages}" if self.a_stages else "")
        return [*super()._tags(), shape, *([] if self.ordered else ["unordered"])]

    def _constants(self) -> dict[str, object]:
        return super()._constants() | {
            **self._ring_constants(),
            "kAStages": self.a_stages,
            "kRecordBytes": self.record_bytes,
            "kPartial": self.a_stages > 0,  # N may be below the N tile
            "kStagedScales": True,
            "kPairs": self.pairs,
        }

    def packing_key(self) -> tuple[object, ...]:
        shape = (self.tile_n_bytes, self.tile, self.stages, self.tile_window, self.warps, self.rows_per_warp)
        return (*super().packing_key(), *shape, self.ordered, self.swizzle, self.pairs)

    @property
    def accumulators(self) -> int:
        """Accumulator registers per lane."""
        return self.rows_per_warp * self.row_accumulators

    def items(self, vector_rows: int, n: int, batch: int) -> int:
        """Return the work items of a launch: row blocks of a cluster x N tiles x batch."""
        return self._row_blocks(vector_rows) * -(-n // self.tile_n) * batch

    def _row_blocks(self, vector_rows: int) -> int:
        return -(-vector_rows // self.block_rows)

    def _shares(self, vector_rows: int) -> tuple[int, int]:
        """Shares that are to be equal, and vector rows of one: warps, or CTAs if a warp has one vector row."""
        blocks = -(-vector_rows // (self.warps * self.rows_per_warp))
        return (blocks * self.warps, self.rows_per_warp) if self.rows_per_warp > 1 else (blocks, self.warps)

    def traffic(self, vector_rows: int, inner: int, matrix: Sequence[Tensor], n: int, batch: int) -> int:
        """Return the bytes of A and B that the kernel reads; `matrix` is the packed operand.

        Each N tile reads all of A; each work item reads one N tile of B.
        """
        tiles = -(-n // self.tile_n) * batch
        read = sum(tensor.nbytes for tensor in matrix)
        return tiles * read + self.items(vector_rows, n, batch) * inner * self.tile_n_bytes

    def smem_accesses(self) -> list[Access]:
        """Return every shared-memory access of a warp, for the columns 0, 1, ... of A."""
        units = self.tile_n_bytes // 16
        rows = np.arange(self.mma_k).reshape(-1, min(self.mma_k, 32))
        reads = np.stack(
            [swizzled(row, chunk, self.tile_n_bytes, self.swizzle) for chunk in range(units) for row in rows]
        )
        lanes, run = np.arange(32), 16 // element_bits(self.b)
        scales = 4 * run * (lanes // 4 + 8 * np.arange(self.tile_n // (8 * run))[:, None])
        return [
            Access("read: ldmatrix.trans of gathered rows", f"ldmatrix.x{reads.shape[1] // 8}", reads),
            Access("stage: cp.async of the column scales", "store32", 4 * lanes),
            Access("read: column scales", f"load{32 * run}", scales),
        ]

    def launch(
        self,
        kernel: Kernel,
        matrix: Sequence[Tensor],
        b: DenseArg,
        out: OutputArg,
        row_scale: ScaleArg,
        col_scale: ScaleArg,
        bias: int,
        pdl: bool = False,
    ) -> None:
        # A batch needs one launch per matrix if its stride is not a whole number of rows or exceeds a tensor map.
        step, unaligned = divmod(b.batch, b.pitch) if out.batch > 1 else (0, 0)
        if unaligned or step * (out.batch - 1) + out.inner > _MAX_COORDINATE:
            size = out.rows * out.columns * OUT_BYTES[self.out]
            for i in range(out.batch):
                one = OutputArg(out.pointer + i * size, 1, *out[2:])
                self.launch(kernel, matrix, b.of_matrix(i), one, row_scale, col_scale.of_matrix(i), bias, pdl)
            return
        rows = -(-out.rows // self.vector_length)
        shape = (b.row, step * (out.batch - 1) + out.inner)
        box = (self.tile_n_bytes, min(self.tile // self.cluster, BOX_ROWS))
        # TMA time depends on the number of rows: eight contiguous rows of 16 bytes are copied as one of 128 bytes.
        short = b.row == b.pitch == self.tile_n_bytes == 16 and self.a_stages > 0
        fold = 3 if short and not (shape[1] % 8 or step % 8) else 0
        pitch, swizzle = b.pitch << fold, self.tile_n_bytes if self.swizzle and self.tile_n_bytes > 16 else 0
        clusters = min(kernel.num_sms // self.cluster, self.items(rows, out.columns, out.batch))
        n_tile_step, row_step = divmod(clusters, self._row_blocks(rows))
        kernel.launch(
            (clusters * self.cluster, 1, 1),
            (
                tensor_map(
                    b.pointer, 1, (shape[0] << fold, shape[1] >> fold), pitch, (box[0] << fold, box[1] >> fold), swizzle
                ),
                *(tensor.data_ptr() for tensor in matrix), out.pointer, row_scale.pointer, row_scale.step,
                col_scale.pointer, col_scale.step, col_scale.batch, bias, out.rows, rows, out.columns, out.inner,
                out.batch, step, row_step, n_tile_step, self.vector_stores(out, col_scale), fold,
            ),
            (self.cluster, 1, 1) if self.cluster > 1 else None,
            pdl,
        )  # fmt: skip

    def pack(self, vectors: Vectors, inner: int) -> PackedPanel:
        before, team = vectors.row_offsets.numel() - 1, 2 if self.pairs else 1
        vectors, order = balance_rows(vectors, *self._shares(before), team)
        none = -(-before // team) * team
        order = torch.nn.functional.pad(order, (0, self.rows_per_warp), value=none)  # of the unit after the last one
        mma_k, device = self.mma_k, vectors.columns.device
        tiles = -(-inner // self.tile)
        rows, total = vectors.row_offsets.numel() - 1, vectors.columns.numel()
        where = (vectors.columns, vectors.row_offsets, self.tile, tiles, mma_k, self.tile_window)
        slots = ordered_slots(*where) if self.ordered else sequential_slots(*where)
        row_of = torch.repeat_interleave(vectors.row_offsets.diff(), output_size=total)
        used = torch.zeros(rows, dtype=torch.int64, device=device).scatter_reduce_(0, row_of, slots + 1, "amax")
        offsets = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        torch.cumsum((used + mma_k - 1) // mma_k, 0, out=offsets[1:])
        groups = int(offsets[-1])
        positions = offsets[row_of] * mma_k + slots  # (vectors,)

        last = torch.zeros(groups, dtype=torch.int64, device=device)
        last.scatter_reduce_(0, positions // mma_k, vectors.columns.to(torch.int64) // self.tile, "amax")
        owner = torch.repeat_interleave(offsets.diff(), output_size=groups)
        # A record runs after the previous ones of its vector row.
        last = torch.cummax(last + owner * tiles, 0).values - owner * tiles
        per_warp = self.rows_per_warp
        units = rows // per_warp
        use = (owner // per_warp * tiles + last) * per_warp + owner % per_warp  # (groups,) unit, tile, vector row
        counts = torch.zeros(units + 2, tiles, per_warp + per_warp % 2, dtype=torch.int16, device=device)
        counts[:units, :, :per_warp] = torch.bincount(use, minlength=units * tiles * per_warp).view(
            units, tiles, per_warp
        )
        starts = offsets[::per_warp].contiguous()

        records = pack_records(self, vectors, positions, groups, (vectors.columns % self.ring).to(torch.int64))
        if per_warp > 1:
            records = records[torch.argsort(use, stable=True)]
        return PackedPanel(starts, counts, torch.nn.functional.pad(records, (0, 0, 0, _PREFETCHED_RECORDS)), order)


class PackedPanel(NamedTuple):
    """Sparse operand in the layout of the panel kernel.

    A unit is the `rows_per_warp` vector rows of one warp; a CTA has whole units. A record is one group: its values in
    fragment order, then 16 bits per slot: the swizzled offset of its row of B in the pipeline, in units of 16 bytes.

    Examples
    --------
    >>> from cute_kernels.dtypes import Integer
    >>> config = PanelConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "int32", ordered=False)
    >>> offsets, columns = torch.tensor([0, 2]), torch.tensor([1, 5], dtype=torch.int32)
    >>> vectors = Vectors(offsets, columns, torch.ones(2, 8, dtype=torch.int8), config.a)
    >>> packed = config.pack(vectors, inner=512)
    >>> packed.records.shape, packed.tile_counts[0, :, 0].tolist(), packed.order[0].item()
    (torch.Size([9, 320]), [1, 0], 0)
    """

    group_offsets: Tensor  # (units + 1,) int64, first record of each unit
    # (units + 2, tiles, rows_per_warp rounded up to even) int16, records of each vector row whose last tile is t; 0 for
    # the units after the last one.
    tile_counts: Tensor
    # (records + 8, record_bytes) uint8, sorted by unit, then tile, then vector row. The last ones are prefetched only.
    records: Tensor
    # ((units + 1) * rows_per_warp,) int32, vector row at each place of a unit; vector_rows or more if there is none.
    order: Tensor


def pack_records(config: SpmmConfig, vectors: Vectors, positions: Tensor, groups: int, rows: Tensor) -> Tensor:
    """Return records: values in fragment order, then 16 bits per slot, the swizzled offset of its row of B.

    Parameters
    ----------
    config : SpmmConfig
        Kernel config.
    vectors : Vectors
        Sparse operand.
    positions : Tensor, shape (vectors,)
        int64 slot of each vector, counted from the first group.
    groups : int
        Groups of `config.mma_k` slots.
    rows : Tensor, shape (vectors,)
        int64 row of B of each vector in shared memory.

    Returns
    -------
    Tensor, shape (groups, bytes per record)
        uint8.

    Examples
    --------
    >>> from cute_kernels.dtypes import Integer
    >>> config = PanelConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "int32")
    >>> offsets, columns = torch.tensor([0, 2]), torch.tensor([1, 5], dtype=torch.int32)
    >>> vectors = Vectors(offsets, columns, torch.ones(2, 8, dtype=torch.int8), config.a)
    >>> pack_records(config, vectors, torch.tensor([0, 1]), 1, columns.long())[0, 256:].view(torch.int16)[:3].tolist()
    [9, 45, 9]
    """
    mma_k, chunks = config.mma_k, config.tile_n_bytes // 16
    place = rows * chunks + (rows // (128 // config.tile_n_bytes) % chunks if config.swizzle else 0)
    # Padding repeats the row of B of the first vector of its group: it has arrived, and has no extra conflict.
    places = torch.zeros(groups, mma_k, dtype=torch.int64, device=positions.device)
    firsts = positions % mma_k == 0
    places[positions[firsts] // mma_k] = place[firsts][:, None]
    places.view(-1)[positions] = place
    values = pack_fragments(config, vectors, positions, groups)
    return torch.cat((values, places.to(torch.int16).view(torch.uint8)), dim=1)


def balance_rows(vectors: Vectors, shares: int, size: int, team: int = 1) -> tuple[Vectors, Tensor]:
    """Balance the vector rows among `shares` shares of `size` vector rows.

    Greedy: vector rows are taken in order of falling length, one per share and round, the longest to the share with
    the fewest vectors.

    Parameters
    ----------
    vectors : Vectors
        Sparse operand.
    shares, size : int
        Together at least the vector rows.
    team : int, default 1
        Vector rows that stay side by side; divides `size`.

    Returns
    -------
    vectors : Vectors
        The vectors in the new order of the vector rows.
    order : Tensor, shape (shares * size,)
        int32, vector row at each place; `vector_rows` or more if there is none.

    Examples
    --------
    >>> from cute_kernels.dtypes import Integer
    >>> offsets = torch.tensor([0, 1, 2, 4, 6])  # the first two vector rows are short
    >>> vectors = Vectors(offsets, torch.arange(6).int(), torch.ones(6, 8, dtype=torch.int8), Integer(8, True))
    >>> balance_rows(vectors, shares=2, size=2)[1].tolist()
    [2, 0, 3, 1]
    """
    lengths, device = vectors.row_offsets.diff(), vectors.columns.device
    rows = lengths.numel()
    lengths = torch.nn.functional.pad(lengths, (0, shares * size - rows))
    starts = torch.cumsum(lengths, 0) - lengths
    sizes = lengths.view(-1, team).sum(1)  # (teams,)
    longest = sizes.argsort(descending=True, stable=True).view(size // team, shares)
    order, sums = lengths.new_empty(shares, size // team), lengths.new_zeros(shares)
    for place, tier in enumerate(longest):
        least = sums.argsort(stable=True)
        order[least, place] = tier
        sums[least] += sizes[tier]
    order = (order.view(-1, 1) * team + torch.arange(team, device=device)).view(-1)
    offsets = torch.nn.functional.pad(torch.cumsum(lengths[order], 0), (1, 0))
    total = vectors.columns.numel()
    moved = torch.repeat_interleave(starts[order] - offsets[:-1], lengths[order], output_size=total)
    taken = take(vectors, moved + torch.arange(total, device=device))._replace(row_offsets=offsets)
    none = -(-rows // team) * team  # of a team that does not exist
    return taken, order.clamp(max=none).to(torch.int32)


def take(vectors: Vectors, index: Tensor) -> Vectors:
    """Return the vectors at `index`, with the row offsets of all.

    Examples
    --------
    >>> from cute_kernels.dtypes import Integer
    >>> values = torch.ones(2, 8, dtype=torch.int8)
    >>> vectors = Vectors(torch.tensor([0, 2]), torch.tensor([1, 5], dtype=torch.int32), values, Integer(8, True))
    >>> take(vectors, torch.tensor([1, 0])).columns.tolist()
    [5, 1]
    """
    values = vectors.values
    if values.dtype == torch.uint16:
        values = values.view(torch.int16)  # torch has few operators for uint16
    return vectors._replace(columns=vectors.columns[index], values=values[index].view(vectors.values.dtype))
