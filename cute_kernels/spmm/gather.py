"""SpMM, gather kernel: warps fetch the rows of B that their vector row names, each into a ring of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.dtypes import element_bits
from cute_kernels.jit.kernel import Kernel
from cute_kernels.layout.bank_conflicts import Access, swizzled
from cute_kernels.operands import DenseArg, OutputArg, ScaleArg, Vectors
from cute_kernels.spmm.config import SpmmConfig, group_offsets, pack_fragments


@dataclass(frozen=True)
class GatherConfig(SpmmConfig):
    """``tile_n_bytes`` of B's rows are a strip; ``stages`` groups are in flight; of a block's ``warps`` each
    ``split_k_warps`` share a vector row.  ``wide``: totals that outgrow int32 move to int64 on the way.  ``fresh``: the
    kernel before an early launch may have written A, of which nothing is read ahead then."""

    STEM: ClassVar[str] = "spmm_gather"

    tile_n_bytes: int = 64  # type: ignore[misc]
    stages: int = 4
    warps: int = 4
    split_k_warps: int = 1
    int64_accum: bool = False
    a_just_written: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        return self.warps * self.stages * self.mma_k * self.tile_n_bytes

    def _constants(self) -> dict[str, object]:
        return super()._constants() | {
            "kStages": self.stages,
            "kWarps": self.warps,
            "kSplitKWarps": self.split_k_warps,
            "kInt64Accum": self.int64_accum,
            "kAJustWritten": self.a_just_written,
            "kStagedFactors": False,
            "kPartial": self.tile_n_bytes <= 64,  # strips that B's columns do not fill
        }

    def _tags(self) -> list[str]:
        shape = f"b{self.tile_n_bytes}s{self.stages}w{self.warps}r{self.split_k_warps}"
        flags = [tag for tag, on in (("wide", self.int64_accum), ("fresh", self.a_just_written)) if on]
        return [*super()._tags(), shape, *flags]

    @property
    def total_bytes(self) -> int:
        """Bytes of one total: 8 if it may exceed 32 bits."""
        return 8 if self.int64_accum or self._constants()["kLongTotal"] else 4

    @property
    def fits(self) -> bool:
        """Whether the totals of warps that share a vector row find room where their rings were."""
        return (
            self.split_k_warps == 1
            or self.columns * 8 * self.total_bytes <= self.stages * self.mma_k * self.tile_n_bytes
        )

    def grid(self, vector_rows: int, n: int, batch: int) -> tuple[int, int, int]:
        teams = self.warps // self.split_k_warps
        return (-(-vector_rows // teams) * -(-n // self.columns) * batch, 1, 1)

    def traffic(self, vector_rows: int, inner: int, matrix: Sequence[Tensor], n: int, batch: int) -> int:
        """Bytes of both operands that the kernel reads: each strip takes all of A and a piece of B for each column."""
        strips = -(-n // self.columns) * batch
        return strips * (sum(tensor.nbytes for tensor in matrix) + matrix[1].numel() * self.tile_n_bytes)

    def smem_accesses(self) -> list[Access]:
        """Every access of a warp to shared memory."""
        chunks, lanes = self.tile_n_bytes // 16, np.arange(32)
        pieces = np.arange(self.mma_k * chunks).reshape(-1, 32)
        rows = np.arange(self.mma_k).reshape(-1, min(self.mma_k, 32))
        reads = np.stack(
            [swizzled(row, chunk, self.tile_n_bytes, self.swizzle) for chunk in range(chunks) for row in rows]
        )
        found = [
            Access(
                "fetch: cp.async of gathered rows",
                "store128",
                swizzled(pieces // chunks, pieces % chunks, self.tile_n_bytes, self.swizzle),
            ),
            Access("read: ldmatrix.trans", f"ldmatrix.x{rows.shape[1] // 8}", reads),
        ]
        if self.split_k_warps > 1:
            size = self.total_bytes
            total = (np.arange(self.columns // 4)[:, None] * 32 + lanes) * size
            found += [Access(f"reduce: {verb} totals", f"{verb}{8 * size}", total) for verb in ("store", "load")]
        return found

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
        """One launch of this config's ``kernel`` on torch's current stream; ``matrix`` is a :class:`PackedGather`."""
        offsets, columns, values = matrix
        rows, row = offsets.shape[0] - 1, -(-out.columns * element_bits(self.b) // 8)
        kernel.launch(
            self.grid(rows, out.columns, out.batch),
            (
                offsets.data_ptr(), columns.data_ptr(), values.data_ptr(), b.pointer, b.pitch, b.batch, row,
                out.pointer, left.pointer, left.step, right.pointer, right.step, right.batch, bias, out.rows, rows,
                out.columns, self.vector_stores(out, right),
            ),
            None,
            pdl,
        )  # fmt: skip

    def copy(self, vectors: Vectors, inner: int) -> PackedGather:
        """The execution copy of ``vectors``, a matrix of ``inner`` columns."""
        return pack_gather(self, vectors)


class PackedGather(NamedTuple):
    """The sparse operand for the gather kernel."""

    group_offsets: Tensor  # int64 (R + 1,)
    columns: Tensor  # int32 (groups * group,), -1 in the padding, where the values are 0
    values: Tensor  # uint8 (groups, bytes a group), fragment order


def pack_gather(config: GatherConfig, vectors: Vectors) -> PackedGather:
    """The execution copy of ``vectors``; torch operators on their own device."""
    offsets, positions = group_offsets(vectors.row_offsets, config.mma_k)
    groups = int(offsets[-1])
    columns = torch.full((groups * config.mma_k,), -1, dtype=torch.int32, device=offsets.device)
    columns[positions] = vectors.columns
    return PackedGather(offsets, columns, pack_fragments(config, vectors, positions, groups))
