"""Kernel configs of SDDMM: fields that both kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from cute_kernels import atoms
from cute_kernels.atoms import Atom
from cute_kernels.dtypes import ElementType, digits
from cute_kernels.jit.codegen import OUT_TYPES, KernelConfig


@dataclass(frozen=True)
class SampleConfig(KernelConfig):
    """Config of an SDDMM kernel: base of the gather and the panel config.

    M, N and K are run-time values.

    Parameters
    ----------
    atom : str
        Entry of the atom table.
    vector_length : int
        V of the output.
    x, y : Integer or FloatFormat
        Element types of the operands.
    out : str
        Output dtype.
    stride : int
        Stride of the SR-BCRS output.
    """

    STEM: ClassVar[str]

    atom: str
    vector_length: int
    x: ElementType
    y: ElementType
    out: str
    stride: int = 32

    @cached_property
    def entry(self) -> Atom:
        """MMA atom."""
        return atoms.atom(self.atom)

    @property
    def digits(self) -> tuple[int, int]:
        return digits(self.x), digits(self.y)

    @property
    def shifted(self) -> bool:
        """Whether accumulators hold a multiple of the product: nibbles became the upper halves of bytes."""
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
        """Return the fields on which :meth:`index` depends."""
        raise NotImplementedError

    def index(self, row_offsets: Tensor, columns: Tensor, row_start: Tensor, n: int) -> Tensor:
        """Return what the kernel reads of a pattern besides its columns.

        Parameters
        ----------
        row_offsets : Tensor, shape (R + 1,)
            int64, of the pattern.
        columns : Tensor, shape (vectors,)
            int32, increasing in each vector row.
        row_start : Tensor, shape (R,)
            int64 place of the first vector of each row in the output.
        n : int
            Columns of the pattern.
        """
        raise NotImplementedError

    @property
    def kernel_header(self) -> str:
        return "sddmm/panel.cuh" if self.STEM == "sddmm_panel" else "sddmm/gather.cuh"

    @property
    def kernel_entry(self) -> str:
        return self.STEM

    def _preamble(self) -> str:
        return atoms.declaration(self.entry)

    def _types(self) -> dict[str, str]:
        return {
            "FormatX": atoms.format_type(self.x),
            "FormatY": atoms.format_type(self.y),
            "OperandX": atoms.operand_type(atoms.operand_of(self.entry, self.x)),
            "OperandY": atoms.operand_type(atoms.operand_of(self.entry, self.y)),
            "Out": OUT_TYPES[self.out],
        }
