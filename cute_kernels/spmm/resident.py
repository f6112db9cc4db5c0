"""SpMM resident kernel, for few columns: config, launch and packed sparse operand. B stays in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.jit.codegen import OUT_BYTES
from cute_kernels.jit.compiler import Unit
from cute_kernels.jit.kernel import Kernel
from cute_kernels.layout.bank_conflicts import Access, swizzled
from cute_kernels.layout.column_order import ordered_slots
from cute_kernels.operands import ALIGNMENT, DenseArg, OutputArg, ScaleArg, Vectors
from cute_kernels.spmm.config import SpmmConfig
from cute_kernels.spmm.gather import MOST_GRID_YZ
from cute_kernels.spmm.panel import balance_rows, pack_records, take

__all__ = ["PackedResident", "ResidentConfig"]

# Balanced shares of the vector rows are taken where the largest one in their own order is so many times as large.
_UNEVEN = 1.05


@dataclass(frozen=True)
class ResidentConfig(SpmmConfig):
    """Config of the resident kernel ``spmm/resident.cuh``.

    A cluster multiplies a block of vector rows. Each of its CTAs holds `tile` rows of B in shared memory for good, and
    multiplies the vectors of these columns. Its warps share the records equally, whatever the lengths of the vector
    rows; partial sums are added in a fixed order. B may have any pitch and alignment. With ``transposed`` by name only,
    where other kernels are as fast.

    Attributes
    ----------
    tile_n_bytes : int
        Bytes of a row of B per N tile.
    tile : int
        Rows of B per CTA, a multiple of 8; `cluster` times as many are at least K. Not compiled in.
    block_rows : int
        Vector rows per cluster. Not compiled in.
    warps : int
        Warps per CTA.
    cluster : int
        CTAs per cluster.
    stages : int
        Stages of a warp's pipeline of records.
    stage_records : int
        Records per stage, copied at once.
    together : int
        Records whose reads overlap.

    Examples
    --------
    >>> from cute_kernels.dtypes import Integer
    >>> config = ResidentConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "float16")
    >>> config.name, config.smem_bytes
    ('spmm_resident-s8_m16n8k32-v8-s8xs8-float16-b16t4096m16w16s6g4u4', 205708)
    """

    STEM: ClassVar[str] = "spmm_resident"
    SIZES: ClassVar[str] = (
        r"b(?P<tile_n_bytes>\d+)t(?P<tile>\d+)m(?P<block_rows>\d+)w(?P<warps>\d+)(?:c(?P<cluster>\d+))?"
        r"s(?P<stages>\d+)g(?P<stage_records>\d+)u(?P<together>\d+)"
    )

    any_rows: ClassVar[bool] = True

    tile_n_bytes: int = 16  # type: ignore[misc]
    tile: int = 4096
    block_rows: int = 16
    warps: int = 16
    cluster: int = 1
    stages: int = 6
    stage_records: int = 4
    together: int = 4

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def sum_words(self) -> int:
        """32-bit words of a lane for the sums of one vector row: accumulators, and offsets of signed nibbles of B."""
        tiles, planes = max(1, self.vector_length // 8), 1 if self.has_fused_digits else self.digits[0]
        biased = not self.entry.floating and self.entry.mma_bits == 8 and self.b.bits == 4 and self.b.signed
        return self.row_accumulators + (tiles * planes * self.entry.shape[0] // 4 if biased else 0)

    @property
    def smem_bytes(self) -> int:
        stages = self.warps * self.stages * (self.stage_records * self.record_bytes + 8)
        rows = self.block_rows * (2 if self.cluster > 1 else 1) + self.warps
        sums = rows * self.sum_words * 128
        return self.tile * self.tile_n_bytes + stages + sums + 8 + 4 * self.tile_n + 4 * (self.block_rows + 1)

    def _tags(self) -> list[str]:
        cluster = f"c{self.cluster}" if self.cluster > 1 else ""
        pipeline = f"s{self.stages}g{self.stage_records}u{self.together}"
        shape = f"b{self.tile_n_bytes}t{self.tile}m{self.block_rows}w{self.warps}{cluster}{pipeline}"
        return [*super()._tags(), shape]

    def _constants(self) -> dict[str, object]:
        return super()._constants() | {
            "kWarps": self.warps,
            "kCluster": self.cluster,
            "kStages": self.stages,
            "kStageRecords": self.stage_records,
            "kTogether": self.together,
            "kRecordBytes": self.record_bytes,
            "kSumWords": self.sum_words,
            "kPartial": True,  # N may be below the N tile
            "kStagedScales": True,
        }

    def translation_unit(self, arch: str) -> Unit:
        unit = super().translation_unit(arch)  # the same for all sizes
        return replace(unit, label=replace(self, tile=0, block_rows=0).name)

    def packing_key(self) -> tuple[object, ...]:
        shape = (self.tile_n_bytes, self.tile, self.block_rows, self.warps, self.cluster, self.swizzle)
        return (*super().packing_key(), "resident", *shape)

    def traffic(self, vector_rows: int, inner: int, matrix: Sequence[Tensor], n: int, batch: int) -> int:
        """Return the bytes of A and B that the kernel reads; `matrix` is the packed operand.

        Each N tile reads all of A; each cluster reads one N tile of B.
        """
        tiles, blocks = -(-n // self.tile_n) * batch, -(-vector_rows // self.block_rows)
        return tiles * (sum(tensor.nbytes for tensor in matrix) + blocks * inner * self.tile_n_bytes)

    def smem_accesses(self) -> list[Access]:
        """Return every shared-memory access of a warp, for the columns 0, 1, ... of A."""
        chunks, lanes = self.tile_n_bytes // 16, np.arange(32)
        pieces = np.arange(self.mma_k * chunks).reshape(-1, 32)
        rows = np.arange(self.mma_k).reshape(-1, min(self.mma_k, 32))
        reads = np.stack(
            [swizzled(row, chunk, self.tile_n_bytes, self.swizzle) for chunk in range(chunks) for row in rows]
        )
        stored = swizzled(pieces // chunks, pieces % chunks, self.tile_n_bytes, self.swizzle)
        return [
            Access("fill: cp.async of rows of B", "store128", stored),
            Access("read: ldmatrix.trans of gathered rows", f"ldmatrix.x{reads.shape[1] // 8}", reads),
            Access("sum: store partial sums", "store32", 4 * lanes),
            Access("sum: load partial sums", "load32", 4 * lanes),
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
        rows, tiles = -(-out.rows // self.vector_length), -(-out.columns // self.tile_n)
        if tiles > MOST_GRID_YZ:
            raise ValueError(f"config must have at most {MOST_GRID_YZ} N tiles, got {tiles} of {self.tile_n} columns")
        aligned = not (b.pointer % ALIGNMENT or b.pitch % ALIGNMENT or b.batch % ALIGNMENT)
        most_matrices, size = MOST_GRID_YZ // max(tiles, 1), out.rows * out.columns * OUT_BYTES[self.out]
        for first in range(0, out.batch, most_matrices):  # one launch for so many
            count = min(most_matrices, out.batch - first)
            kernel.launch(
                (-(-rows // self.block_rows) * self.cluster, tiles * count, 1),
                (
                    *(tensor.data_ptr() for tensor in matrix), b.pointer + first * b.batch, b.pitch, b.batch, b.row,
                    int(aligned), out.pointer + first * size, row_scale.pointer, row_scale.step,
                    col_scale.pointer + 4 * first * col_scale.batch, col_scale.step, col_scale.batch, bias, out.rows,
                    rows, out.columns, out.inner, self.tile, self.block_rows, matrix[1].shape[1],
                    self.vector_stores(out, col_scale), int(pdl),
                ),
                (self.cluster, 1, 1) if self.cluster > 1 else None,
                pdl,
            )  # fmt: skip

    def pack(self, vectors: Vectors, inner: int) -> PackedResident:
        if self.block_rows >= self.threads:
            raise ValueError(f"config must have fewer than {self.threads} block_rows, got {self.block_rows}")
        if inner > self.tile * self.cluster:
            raise ValueError(f"config must hold all {inner} rows of B, got {self.cluster} CTAs of {self.tile} rows")
        rows, mma_k = vectors.row_offsets.numel() - 1, self.mma_k
        blocks = -(-rows // self.block_rows)
        shared, order = balance_rows(vectors, blocks, self.block_rows)
        if _largest_share(vectors, self.block_rows) > _UNEVEN * _largest_share(shared, self.block_rows):
            vectors = shared
        else:
            order = order[:0]  # the kernel then need not wait for it
        total, places = vectors.columns.numel(), blocks * self.block_rows
        row_of = torch.repeat_interleave(vectors.row_offsets.diff(), output_size=total)  # (vectors,)
        # (block, CTA, vector row): the records of a CTA follow each other
        part = row_of // self.block_rows * self.cluster + vectors.columns // self.tile
        part = part * self.block_rows + row_of % self.block_rows
        part, index = part.sort(stable=True)
        counts = torch.bincount(part, minlength=places * self.cluster)
        offsets = torch.nn.functional.pad(torch.cumsum(counts, 0), (1, 0))
        vectors = take(vectors, index)._replace(row_offsets=offsets)
        vectors = vectors._replace(columns=vectors.columns % self.tile)
        slots = ordered_slots(vectors.columns, offsets, self.tile, 1, mma_k, 1)
        ctas = blocks * self.cluster
        ends = ((counts + mma_k - 1) // mma_k).view(ctas, self.block_rows).cumsum(1)  # in records
        starts = torch.nn.functional.pad(ends, (1, 0))  # (CTAs, block_rows + 1)
        totals = starts[:, -1]
        most = -(-int(totals.max()) // self.warps) if total else 0  # records of a warp
        # the warp of a record is the last one whose first record is not behind it
        record = starts[:, :-1].reshape(-1)[part] + slots // mma_k  # (vectors,) in its CTA
        cta = part // self.block_rows
        warp = ((record + 1) * self.warps - 1) // totals[cta]
        record = (cta * self.warps + warp) * most + record - totals[cta] * warp // self.warps
        groups = ctas * self.warps * most
        rows_of_b = vectors.columns.to(torch.int64)
        records = pack_records(self, vectors, record * mma_k + slots % mma_k, groups, rows_of_b)
        return PackedResident(starts.to(torch.int32), records.view(ctas * self.warps, most, self.record_bytes), order)


def _largest_share(vectors: Vectors, rows: int) -> int:
    """Vectors of so many consecutive vector rows, at most."""
    lengths = vectors.row_offsets.diff()
    lengths = torch.nn.functional.pad(lengths, (0, -len(lengths) % rows))
    return int(lengths.view(-1, rows).sum(1).max()) if len(lengths) else 0


class PackedResident(NamedTuple):
    """Sparse operand in the layout of the resident kernel.

    A record is one group: its values in fragment order, then 16 bits per slot: the swizzled offset of its row of B in
    the CTA's rows, in units of 16 bytes.

    Examples
    --------
    >>> from cute_kernels.dtypes import Integer
    >>> sizes = {"tile": 8, "block_rows": 2, "cluster": 2}
    >>> config = ResidentConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "int32", **sizes)
    >>> offsets, columns = torch.tensor([0, 2]), torch.tensor([1, 9], dtype=torch.int32)
    >>> vectors = Vectors(offsets, columns, torch.ones(2, 8, dtype=torch.int8), config.a)
    >>> packed = config.pack(vectors, inner=16)
    >>> packed.starts.tolist(), packed.records.shape, packed.order.tolist()
    ([[0, 1, 1], [0, 1, 1]], torch.Size([32, 1, 320]), [])
    """

    # (blocks * cluster, block_rows + 1) int32, first record of each vector row in a CTA, and the end of the last one.
    starts: Tensor
    # (blocks * cluster * warps, records per warp, record_bytes) uint8; those of a CTA follow each other vector row by
    # vector row, shared equally among its warps, zeros behind those of a warp.
    records: Tensor
    # (blocks * block_rows,) int32, vector row at each place, `vector_rows` or more if there is none; empty if each
    # vector row is at its own place.
    order: Tensor
