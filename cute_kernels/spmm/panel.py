"""SpMM, panel kernel: tiles of a strip of B pass through shared memory while many vector rows use them."""

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
from cute_kernels.layout.column_order import sequential_slots, spread_slots
from cute_kernels.operands import DenseArg, OutputArg, ScaleArg, Vectors
from cute_kernels.spmm.config import SpmmConfig, pack_fragments

BOX_ROWS = 256  # the copy engine's limit
_AHEAD = 8  # records that a kernel may read beyond the last one
_MAX_COORDINATE = 2**31 - 1


@dataclass(frozen=True)
class PanelConfig(SpmmConfig):
    """``tile_n_bytes`` of B's rows are a strip, ``tile`` of them a stage, ``stages`` the ring.

    A group takes rows of ``window`` neighbouring tiles at most; the other stages are for tiles on their way.  Each of
    ``warps`` warps keeps the sums of ``rows`` vector rows.  These are dealt out by their length, in equal shares: to
    blocks, or to warps where a warp has several.  ``ordered``: columns lie in the order that spares bank conflicts.
    ``records`` groups of a warp's are in shared memory or on their way there; 0: two are in registers.
    """

    STEM: ClassVar[str] = "spmm_panel"

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
    def threads(self) -> int:
        return 32 * (self.warps + 1)

    @property
    def ring(self) -> int:
        """Rows of B that the ring holds."""
        return self.tile * self.stages

    @property
    def smem_bytes(self) -> int:
        own = 4 * self.columns + self.a_stages * self.record_bytes  # of a warp
        return self.ring * self.tile_n_bytes + 16 * self.stages + own * self.warps

    @property
    def record_bytes(self) -> int:
        """Of a group: its values, and where its rows lie."""
        whole = 4 if self.packed or self.entry.mma_bits == 4 else 8 * self.digits[0]
        bits = self.stored.bits if self.entry.floating else whole
        return self.mma_k * (self.vector_length * bits // 8 + 2)

    def _tags(self) -> list[str]:
        shape = f"b{self.tile_n_bytes}t{self.tile}s{self.stages}x{self.tile_window}w{self.warps}r{self.rows_per_warp}"
        shape += (f"c{self.cluster}" if self.cluster > 1 else "") + (f"a{self.a_stages}" if self.a_stages else "")
        return [*super()._tags(), shape, *([] if self.ordered else ["unordered"])]

    def _constants(self) -> dict[str, object]:
        return super()._constants() | {
            "kTile": self.tile,
            "kStages": self.stages,
            "kTileWindow": self.tile_window,
            "kWarps": self.warps,
            "kRowsPerWarp": self.rows_per_warp,
            "kCluster": self.cluster,
            "kAStages": self.a_stages,
            "kRecordBytes": self.record_bytes,
            "kPartial": self.a_stages > 0,  # strips that B's columns do not fill
            "kStagedFactors": True,
        }

    def packing_key(self) -> tuple[object, ...]:
        shape = (self.tile_n_bytes, self.tile, self.stages, self.tile_window, self.warps, self.rows_per_warp)
        return (*super().packing_key(), *shape, self.ordered, self.swizzle)

    @property
    def sums(self) -> int:
        """Registers of a lane that hold sums."""
        one_sign = self.products == 4 and self.a.signed and self.b.signed  # two of the products share their sums
        tiles = max(1, self.vector_length // 8)
        return self.rows_per_warp * tiles * (3 if one_sign else self.products) * self.columns // 4

    def items(self, vector_rows: int, n: int, batch: int) -> int:
        """Strips of row blocks, for each of which a cluster passes all of a strip of B through shared memory."""
        return self._row_blocks(vector_rows) * -(-n // self.columns) * batch

    def _row_blocks(self, vector_rows: int) -> int:
        return -(-vector_rows // (self.warps * self.rows_per_warp * self.cluster))

    def traffic(self, vector_rows: int, inner: int, matrix: Sequence[Tensor], n: int, batch: int) -> int:
        """Bytes of both operands that the kernel reads: each strip takes all of A, each item a strip of B."""
        strips = -(-n // self.columns) * batch
        read = sum(tensor.nbytes for tensor in matrix)
        return strips * read + self.items(vector_rows, n, batch) * inner * self.tile_n_bytes

    def smem_accesses(self) -> list[Access]:
        """Every access of a warp to shared memory, for columns 0, 1, ...; others conflict as their order says."""
        units = self.tile_n_bytes // 16
        rows = np.arange(self.mma_k).reshape(-1, min(self.mma_k, 32))
        reads = np.stack(
            [swizzled(row, chunk, self.tile_n_bytes, self.swizzle) for chunk in range(units) for row in rows]
        )
        lanes, run = np.arange(32), 16 // element_bits(self.b)
        factors = 4 * run * (lanes // 4 + 8 * np.arange(self.columns // (8 * run))[:, None])
        return [
            Access("read: ldmatrix.trans of gathered rows", f"ldmatrix.x{reads.shape[1] // 8}", reads),
            Access("stage: cp.async of a factor a column", "store32", 4 * lanes),
            Access("read: factors", f"load{32 * run}", factors),
        ]

    def launch(
        self,
        kernel: Kernel,
        matrix: Sequence[Tensor],
        b: DenseArg,
        out: OutputArg,
        left: ScaleArg,
        right: ScaleArg,
        bias: int,
        pdl: bool = False,
    ) -> None:
        """One launch on torch's current stream, or one a matrix of a batch that no single step separates.

        ``matrix`` is a :class:`PackedPanel` of this config.
        """
        step, rest = divmod(b.batch, b.pitch) if out.batch > 1 else (0, 0)
        if rest or step * (out.batch - 1) + out.inner > _MAX_COORDINATE:
            size = out.rows * out.columns * OUT_BYTES[self.out]
            for i in range(out.batch):
                one = OutputArg(out.pointer + i * size, 1, out.rows, out.inner, out.columns)
                scales = ScaleArg(right.pointer + 4 * i * right.batch, right.step, 0)
                place = DenseArg(b.pointer + i * b.batch, b.pitch, 0, b.row)
                self.launch(kernel, matrix, place, one, left, scales, bias, pdl)
            return
        rows = -(-out.rows // self.vector_length)
        shape = (b.row, step * (out.batch - 1) + out.inner)
        box = (self.tile_n_bytes, min(self.tile // self.cluster, BOX_ROWS))
        # The copy engine takes as long for short rows as for long ones: eight of 16 bytes without gaps are one of 128.
        short = b.row == b.pitch == self.tile_n_bytes == 16 and self.a_stages > 0
        fold = 3 if short and not (shape[1] % 8 or step % 8) else 0
        pitch, swizzle = b.pitch << fold, self.tile_n_bytes if self.swizzle and self.tile_n_bytes > 16 else 0
        clusters = min(kernel.num_sms // self.cluster, self.items(rows, out.columns, out.batch))
        strip_step, row_step = divmod(clusters, self._row_blocks(rows))
        kernel.launch(
            (clusters * self.cluster, 1, 1),
            (
                tensor_map(
                    b.pointer, 1, (shape[0] << fold, shape[1] >> fold), pitch, (box[0] << fold, box[1] >> fold), swizzle
                ),
                *(tensor.data_ptr() for tensor in matrix), out.pointer, left.pointer, left.step, right.pointer,
                right.step, right.batch, bias, out.rows, rows, out.columns, out.inner, out.batch, step,
                row_step, strip_step, self.vector_stores(out, right), fold,
            ),
            (self.cluster, 1, 1) if self.cluster > 1 else None,
            pdl,
        )  # fmt: skip

    def copy(self, vectors: Vectors, inner: int) -> PackedPanel:
        """The execution copy of ``vectors``, a matrix of ``inner`` columns."""
        return pack_panel(self, vectors, inner)


class PackedPanel(NamedTuple):
    """The sparse operand for the panel kernel."""

    group_offsets: Tensor  # int64 (U + 1,), of units of `rows` vector rows, each one warp's; whole blocks of them
    # int16 (U + 2, tiles, rows to an even number): groups of each row that need tile t, and none beyond; zero for units
    # that do not exist.
    tile_counts: Tensor
    # uint8 (groups + _AHEAD, bytes), in a unit tile after tile, in a tile row after row: values in fragment order, then
    # for each slot, in 16 bits, where its row of B lies in the ring, in units of 16 bytes, swizzled. Those behind the
    # last group are read ahead of need and never used.
    records: Tensor
    order: Tensor  # int32 ((U + 1) * rows,): the vector row that a unit has at each place, or one beyond the last


def pack_panel(config: PanelConfig, vectors: Vectors, inner: int) -> PackedPanel:
    """The execution copy of ``vectors``; torch operators on their own device."""
    vectors, order = balance_rows(vectors, config)
    group, device = config.mma_k, vectors.columns.device
    tiles = -(-inner // config.tile)
    rows, total = vectors.row_offsets.numel() - 1, vectors.columns.numel()
    where = (vectors.columns, vectors.row_offsets, config.tile, tiles, group, config.tile_window)
    slots = spread_slots(*where) if config.ordered else sequential_slots(*where)
    row_of = torch.repeat_interleave(vectors.row_offsets.diff(), output_size=total)
    used = torch.zeros(rows, dtype=torch.int64, device=device).scatter_reduce_(0, row_of, slots + 1, "amax")
    offsets = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    torch.cumsum((used + group - 1) // group, 0, out=offsets[1:])
    groups = int(offsets[-1])
    positions = offsets[row_of] * group + slots  # (vectors,)

    last = torch.zeros(groups, dtype=torch.int64, device=device)
    last.scatter_reduce_(0, positions // group, vectors.columns.to(torch.int64) // config.tile, "amax")
    owner = torch.repeat_interleave(offsets.diff(), output_size=groups)
    last = torch.cummax(last + owner * tiles, 0).values - owner * tiles  # a group waits for those of its row before it
    units = rows // config.rows_per_warp
    use = (owner // config.rows_per_warp * tiles + last) * config.rows_per_warp + owner % config.rows_per_warp
    counts = torch.zeros(
        units + 2, tiles, config.rows_per_warp + config.rows_per_warp % 2, dtype=torch.int16, device=device
    )
    counts[:units, :, : config.rows_per_warp] = torch.bincount(
        use, minlength=units * tiles * config.rows_per_warp
    ).view(units, tiles, config.rows_per_warp)
    starts = offsets[:: config.rows_per_warp].contiguous()

    slot = (vectors.columns % config.ring).to(torch.int64)
    chunks = config.tile_n_bytes // 16
    place = slot * chunks + (slot // (128 // config.tile_n_bytes) % chunks if config.swizzle else 0)
    # Padding names the row of its group's first vector: it is there, and reading it twice costs nothing.
    places = torch.zeros(groups, group, dtype=torch.int64, device=device)
    firsts = positions % group == 0
    places[positions[firsts] // group] = place[firsts][:, None]
    places.view(-1)[positions] = place
    values = pack_fragments(config, vectors, positions, groups)
    records = torch.cat((values, places.to(torch.int16).view(torch.uint8)), dim=1)
    if config.rows_per_warp > 1:
        records = records[torch.argsort(use, stable=True)]
    return PackedPanel(starts, counts, torch.nn.functional.pad(records, (0, 0, 0, _AHEAD)), order)


def balance_rows(vectors: Vectors, config: PanelConfig) -> tuple[Vectors, Tensor]:
    """Vectors with their rows dealt out in equal shares, and the row at each place, one beyond the last for none.

    The longest rows go to one share each, the next ones to those that have least, and so on.
    """
    lengths, device = vectors.row_offsets.diff(), vectors.columns.device
    rows = lengths.numel()
    blocks = -(-rows // (config.warps * config.rows_per_warp))
    units, share = (blocks * config.warps, config.rows_per_warp) if config.rows_per_warp > 1 else (blocks, config.warps)
    lengths = torch.nn.functional.pad(lengths, (0, units * share - rows))
    starts = torch.cumsum(lengths, 0) - lengths
    longest = lengths.argsort(descending=True, stable=True).view(share, units)
    order, sums = lengths.new_empty(units, share), lengths.new_zeros(units)
    for place, tier in enumerate(longest):
        least = sums.argsort(stable=True)
        order[least, place] = tier
        sums[least] += lengths[tier]
    order = order.view(-1)
    offsets = torch.nn.functional.pad(torch.cumsum(lengths[order], 0), (1, 0))
    total = vectors.columns.numel()
    moved = torch.repeat_interleave(starts[order] - offsets[:-1], lengths[order], output_size=total)
    index = moved + torch.arange(total, device=device)
    given = torch.nn.functional.pad(order.clamp(max=rows), (0, config.rows_per_warp), value=rows).to(torch.int32)
    values = vectors.values
    if values.dtype == torch.uint16:
        values = values.view(torch.int16)  # torch has few operators on uint16
    values = values[index].view(vectors.values.dtype)
    return vectors._replace(row_offsets=offsets, columns=vectors.columns[index], values=values), given
