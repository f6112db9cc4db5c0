"""SDDMM: a warp gathers the rows of Y that up to 32 neighbouring vectors name, and multiplies them by rows of X."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cute_kernels import atoms
from cute_kernels.atoms import Atom
from cute_kernels.dtypes import Number, digits, element_bits
from cute_kernels.jit.codegen import OUT_TYPES, constants, types
from cute_kernels.jit.compiler import Unit
from cute_kernels.jit.kernel import Kernel
from cute_kernels.layout.bank_conflicts import Access, swizzled
from cute_kernels.operands import Factor, Place, Target


def spread_row(g: Any, row_bytes: int, chunks: int) -> Any:
    """Row that lane group ``g`` reads, the twin of ``spread_row`` in ``sddmm/gather.cuh``."""
    if chunks == 1 or (row_bytes, chunks) in ((32, 2), (64, 4)):
        return g
    if row_bytes == 64:
        return (g & 1) | (g & 2) << 1 | (g & 4) >> 1
    first = 1 if chunks == 2 else 2
    return (g << first | g >> (3 - first)) & 7


HEADER = {"sddmm": "sddmm/gather", "sddmm_panel": "sddmm/panel"}


@dataclass(frozen=True)
class SampleConfig:
    """What the SDDMM kernels are compiled for; M, N and K stay run-time values.

    ``x`` and ``y`` are the operands, ``out`` the name of a torch dtype, ``stride`` the one of the SR-BCRS output.
    """

    STEM: ClassVar[str]

    atom: str
    vector_length: int
    x: Number
    y: Number
    out: str
    stride: int = 32

    @cached_property
    def entry(self) -> Atom:
        return atoms.atom(self.atom)

    @property
    def digits(self) -> tuple[int, int]:
        return digits(self.x), digits(self.y)

    @property
    def shifted(self) -> bool:
        """The sums hold a multiple of the product, because nibbles became the upper halves of bytes."""
        signed4 = (self.x.bits == 4 and self.x.signed) or (self.y.bits == 4 and self.y.signed)
        return signed4 and self.entry.mma_bits == 8 and not self.entry.floating

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        pair = f"{self.x.name}x{self.y.name}"
        return "-".join([self.STEM, self.atom, f"v{self.vector_length}", pair, self.out, *self._tags()])

    def _tags(self) -> list[str]:
        return [f"k{self.stride}"]

    def _constants(self) -> dict[str, object]:
        return {
            "kVector": self.vector_length,
            "kBitsX": self.x.bits,
            "kBitsY": self.y.bits,
            "kSignedX": self.x.signed,
            "kSignedY": self.y.signed,
            "kFloat": self.entry.floating,
            "kStride": self.stride,
            "kLongTotal": self.out != "int32" and self.digits != (1, 1),
        }

    def index_key(self) -> tuple[object, ...]:
        """What :meth:`index` depends on, besides the pattern."""
        raise NotImplementedError

    def index(self, row_offsets: Tensor, columns: Tensor, row_start: Tensor, n: int) -> Tensor:
        """What the kernel has to know of a pattern besides the columns.

        ``row_offsets``: int64 (R + 1,) and ``columns``: int32 (vectors,), rising in each row, of the pattern;
        ``row_start``: int64 (R,), the place of each row's first vector in the output; ``n``: columns of the pattern.
        """
        raise NotImplementedError

    def unit(self, arch: str) -> Unit:
        """The translation unit of this config for ``arch``."""
        names = {
            "FormatX": atoms.format_type(self.x),
            "FormatY": atoms.format_type(self.y),
            "OperandX": atoms.operand_type(atoms.operand_of(self.entry, self.x)),
            "OperandY": atoms.operand_type(atoms.operand_of(self.entry, self.y)),
            "Out": OUT_TYPES[self.out],
        }
        source = (
            f'{atoms.declaration(self.entry)}#include "{HEADER[self.STEM]}.cuh"\n'
            f"namespace magicube {{\nstruct Config {{\n"
            f"{constants(self._constants())}{types(names)}}};\n}}  // namespace magicube\n"
        )
        return Unit(source, f"magicube::{self.STEM}<magicube::Config>", arch, self.name)


@dataclass(frozen=True)
class SddmmConfig(SampleConfig):
    """The gather kernel.

    ``row_bytes`` of the wider operand's rows are a stage, ``stages`` of them are in flight.  ``wide``: totals that
    outgrow int32 move to int64 on the way.
    """

    STEM: ClassVar[str] = "sddmm"

    row_bytes: int = 128
    stages: int = 3
    warps: int = 4
    wide: bool = False

    @property
    def slots(self) -> int:
        """Vectors of a warp's piece."""
        return min(self.stride, 32)

    @property
    def depth(self) -> int:
        """k of one stage."""
        return self.row_bytes * 8 // max(element_bits(self.x), element_bits(self.y))

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        rows_x = max(8, self.vector_length)
        bits = self.slots * element_bits(self.y) + rows_x * element_bits(self.x)
        return self.warps * self.stages * self.depth * bits // 8

    def grid(self, blocks: int, batch: int) -> tuple[int, int, int]:
        return (-(-blocks * (self.stride // self.slots) // self.warps) * batch, 1, 1)

    def _tags(self) -> list[str]:
        tags = [f"k{self.stride}b{self.row_bytes}s{self.stages}w{self.warps}"]
        return [*tags, "wide"] if self.wide else tags

    def _constants(self) -> dict[str, object]:
        return super()._constants() | {
            "kRowBytes": self.row_bytes,
            "kStages": self.stages,
            "kWarps": self.warps,
            "kWide": self.wide,
        }

    def index_key(self) -> tuple[object, ...]:
        return ("block_rows", self.stride)

    def index(self, row_offsets: Tensor, columns: Tensor, row_start: Tensor, n: int) -> Tensor:
        """The vector row of each block of ``stride`` vectors, int32 (blocks,)."""
        blocks = (row_offsets.diff() + self.stride - 1) // self.stride  # (R,)
        rows = torch.arange(blocks.numel(), dtype=torch.int32, device=blocks.device)
        return torch.repeat_interleave(rows, blocks)

    def _tile(self, name: str, number: Number, rows: int, used: int) -> list[Access]:
        """Accesses to the rows of one operand: ``used`` of ``rows`` are fetched, all are read."""
        row_bytes, words = self.depth * element_bits(number) // 8, element_bits(number) // 4
        chunks = row_bytes // 16
        pieces = np.arange(-(-used * chunks // 32) * 32).reshape(-1, 32)
        fetch = np.where(pieces < used * chunks, swizzled(pieces // chunks, pieces % chunks, row_bytes), -1)
        lane = np.arange(32)
        byte = lane % 4 * 4 * words
        reads = [
            swizzled(8 * block + spread_row(lane // 4, row_bytes, words), run * words + byte // 16, row_bytes)
            + byte % 16
            for run in range(self.depth // 32)
            for block in range(rows // 8)
        ]
        return [
            Access(f"fetch: cp.async of rows of {name}", "store128", fetch),
            Access(f"read: rows of {name}", f"load{32 * words}", np.stack(reads)),
        ]

    def accesses(self) -> list[Access]:
        """Every access of a warp to shared memory."""
        y = self._tile("Y", self.y, self.slots, self.slots)
        return y + self._tile("X", self.x, max(8, self.vector_length), self.vector_length)

    def launch(
        self,
        kernel: Kernel,
        pattern: Sequence[Tensor],
        x: Place,
        y: Place,
        out: Target,
        left: Factor,
        right: Factor,
        early: bool = False,
    ) -> None:
        """One launch on torch's current stream; ``pattern``: what :meth:`index` made, and the columns, -1 in the
        padding."""
        block_rows, columns = pattern
        blocks = block_rows.shape[0]
        kernel.launch(
            self.grid(blocks, out.batch),
            (
                block_rows.data_ptr(), columns.data_ptr(), *x, *y, out.pointer, *left, *right, out.rows, out.inner,
                blocks,
            ),
            None,
            early,
        )  # fmt: skip
