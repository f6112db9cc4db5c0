"""SpMM gather kernel: config, launch and packed sparse operand. Each warp gathers the rows of B that it multiplies."""

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
from cute_kernels.spmm.config import OUT_BYTES, SpmmConfig, group_offsets, pack_fragments

__all__ = ["GatherConfig", "PackedGather", "find_long_rows", "long_groups"]


MOST_GRID_YZ = 65_535  # CTAs of a grid in y and in z


@dataclass(frozen=True)
class GatherConfig(SpmmConfig):
    """Config of the gather kernel ``spmm/gather.cuh``.

    Attributes
    ----------
    tile_n_bytes : int
        Bytes of a row of B per N tile.
    stages : int
        Stages of a warp's pipeline; a stage is one group of gathered rows. 1: no prefetch, for measurements.
    warps : int
        Warps per CTA.
    split_k_warps : int
        Warps that share one vector row; each multiplies every ``split_k_warps``-th group (split-K).
    int64_accum : bool
        Move accumulators to int64 before int32 can overflow.
    a_just_written : bool
        The previous kernel on the stream writes A: with PDL, A is read after that kernel has ended. Otherwise the
        first groups of A are read before.
    accumulate : bool
        Add the product to the float32 output, without a bias; outputs of vector rows without vectors are not touched.
        By name only; it has not run on a GPU.

    Examples
    --------
    >>> from cute_kernels.dtypes import Integer
    >>> config = GatherConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "int32")
    >>> config.name, config.smem_bytes, config.grid(vector_rows=512, n=512, batch=1)
    ('spmm_gather-s8_m16n8k32-v8-s8xs8-int32-b64s4w4r1', 32768, (128, 8, 1))
    """

    STEM: ClassVar[str] = "spmm_gather"
    SIZES: ClassVar[str] = r"b(?P<tile_n_bytes>\d+)s(?P<stages>\d+)w(?P<warps>\d+)r(?P<split_k_warps>\d+)"
    FLAGS: ClassVar[dict[str, tuple[str, bool]]] = SpmmConfig.FLAGS | {
        "wide": ("int64_accum", True), "fresh": ("a_just_written", True),
        "added": ("accumulate", True),
    }  # fmt: skip

    tile_n_bytes: int = 64  # type: ignore[misc]
    stages: int = 4
    warps: int = 4
    split_k_warps: int = 1
    int64_accum: bool = False
    a_just_written: bool = False
    accumulate: bool = False

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
            "kAccumulate": self.accumulate,
            "kSharesLongRows": self.shares_long_rows,
            "kStagedScales": False,
            "kPartial": self.tile_n_bytes <= 64,  # N may be below the N tile
        }

    def _tags(self) -> list[str]:
        shape = f"b{self.tile_n_bytes}s{self.stages}w{self.warps}r{self.split_k_warps}"
        flags = {"wide": self.int64_accum, "fresh": self.a_just_written, "added": self.accumulate}
        return [*super()._tags(), shape, *(tag for tag, on in flags.items() if on)]

    @property
    def total_bytes(self) -> int:
        """Bytes of one result before the epilogue: 8 if it can exceed 32 bits."""
        return 8 if self.int64_accum or super()._constants()["kLongTotal"] else 4

    @property
    def fits(self) -> bool:
        """Whether the results of the split-K warps fit the shared memory of their pipelines."""
        return self.split_k_warps == 1 or self.shares_long_rows

    @property
    def shares_long_rows(self) -> bool:
        """Whether the warps of a CTA can share a long row: their results fit the shared memory of their pipelines."""
        return self.tile_n * 8 * self.total_bytes <= self.stages * self.mma_k * self.tile_n_bytes

    def grid(self, vector_rows: int, n: int, batch: int, long_rows: int = 0) -> tuple[int, int, int]:
        """Return the CTAs of a launch: long rows and row blocks, N tiles, batch times the folds of the N tiles."""
        teams, tiles = self.warps // self.split_k_warps, -(-n // self.tile_n)
        folds = -(-tiles // MOST_GRID_YZ)
        return (long_rows - (-vector_rows // teams), -(-tiles // max(folds, 1)), batch * folds)

    def traffic(self, vector_rows: int, inner: int, matrix: Sequence[Tensor], n: int, batch: int) -> int:
        """Return the bytes of A and B that the kernel reads; `matrix` is the packed operand.

        Each N tile reads all of A, and a row of B of `tile_n_bytes` per vector.
        """
        tiles = -(-n // self.tile_n) * batch
        return tiles * (sum(tensor.nbytes for tensor in matrix) + matrix[1].numel() * self.tile_n_bytes)

    def smem_accesses(self) -> list[Access]:
        """Return every shared-memory access of a warp."""
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
            total = (np.arange(self.tile_n // 4)[:, None] * 32 + lanes) * size
            found += [Access(f"reduce: {verb} totals", f"{verb}{8 * size}", total) for verb in ("store", "load")]
        return found

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
        folds = self.grid(0, out.columns, 1)[2]
        most_matrices = MOST_GRID_YZ // max(folds, 1)
        if out.batch > most_matrices:  # one launch for so many
            size = out.rows * out.columns * OUT_BYTES[self.out]
            for i in range(0, out.batch, most_matrices):
                some = OutputArg(out.pointer + i * size, min(most_matrices, out.batch - i), *out[2:])
                right = b._replace(pointer=b.pointer + i * b.batch)
                scale = col_scale._replace(pointer=col_scale.pointer + 4 * i * col_scale.batch)
                self.launch(kernel, matrix, right, some, row_scale, scale, bias, pdl)
            return
        offsets, columns, values, long_rows = matrix
        rows, row = offsets.shape[0] - 1, -(-out.columns * element_bits(self.b) // 8)
        groups, count = len(columns) // self.mma_k, len(long_rows) if self.shares_long_rows else 0
        most = long_groups(groups, rows) if count else groups
        kernel.launch(
            self.grid(rows, out.columns, out.batch, count),
            (
                offsets.data_ptr(), columns.data_ptr(), values.data_ptr(), long_rows.data_ptr(), count,
                most, folds, b.pointer, b.pitch, b.batch, row,
                out.pointer, row_scale.pointer, row_scale.step, col_scale.pointer,
                col_scale.step, col_scale.batch, bias, out.rows, rows, out.columns, self.vector_stores(out, col_scale),
            ),
            None,
            pdl,
        )  # fmt: skip

    def pack(self, vectors: Vectors, inner: int) -> PackedGather:
        offsets, positions = group_offsets(vectors.row_offsets, self.mma_k)
        groups = int(offsets[-1])
        columns = torch.full((groups * self.mma_k,), -1, dtype=torch.int32, device=offsets.device)
        columns[positions] = vectors.columns
        fragments = pack_fragments(self, vectors, positions, groups)
        return PackedGather(offsets, columns, fragments, find_long_rows(offsets, groups))


def long_groups(groups: int, vector_rows: int) -> int:
    """Return the groups above which a whole CTA multiplies a vector row: four times the mean, and at least four.

    Examples
    --------
    >>> long_groups(groups=2048, vector_rows=2048), long_groups(groups=6000, vector_rows=2048)
    (4, 12)
    """
    return 4 * max(1, -(-groups // max(1, vector_rows)))


def find_long_rows(offsets: Tensor, groups: int) -> Tensor:
    """Return the vector rows of more than :func:`long_groups` of `groups` groups, int32, from their first groups.

    Examples
    --------
    >>> find_long_rows(torch.tensor([0, 1, 6, 6, 6, 7, 8]), groups=8)
    tensor([], dtype=torch.int32)
    >>> find_long_rows(torch.tensor([0, 1, 6, 6, 6, 6]), groups=5)
    tensor([1], dtype=torch.int32)
    """
    sizes = offsets.diff()
    return (sizes > long_groups(groups, len(sizes))).nonzero()[:, 0].to(torch.int32)


class PackedGather(NamedTuple):
    """Sparse operand in the layout of the gather kernel.

    Examples
    --------
    >>> from cute_kernels.dtypes import Integer
    >>> config = GatherConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "int32")
    >>> offsets, columns = torch.tensor([0, 2]), torch.tensor([1, 5], dtype=torch.int32)
    >>> vectors = Vectors(offsets, columns, torch.ones(2, 8, dtype=torch.int8), config.a)
    >>> packed = config.pack(vectors, inner=512)
    >>> packed.columns[:3].tolist(), packed.values.shape
    ([1, 5, -1], torch.Size([1, 256]))
    """

    group_offsets: Tensor  # (R + 1,) int64, first group of each vector row
    columns: Tensor  # (groups * mma_k,) int32, -1 in the padding, where the values are 0
    values: Tensor  # (groups, bytes per group) uint8, fragment order
    long_rows: Tensor  # (long rows,) int32, vector rows of more than long_groups groups
