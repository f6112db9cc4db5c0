"""Kernel configs of SpMM: fields that both kernels share, and the packing of sparse values into fragments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from cute_kernels import atoms
from cute_kernels.atoms import Atom
from cute_kernels.dtypes import ElementType, Integer, digits, element_bits
from cute_kernels.floats import FORMATS, decode, encode
from cute_kernels.integers import split_digits, widen
from cute_kernels.jit.codegen import OUT_BYTES, OUT_TYPES, KernelConfig
from cute_kernels.layout.fragments import pack_index, stride
from cute_kernels.operands import OutputArg, ScaleArg, Vectors


@dataclass(frozen=True)
class SpmmConfig(KernelConfig):
    """Config of an SpMM kernel: base of :class:`~cute_kernels.spmm.gather.GatherConfig` and of the panel config.

    M, N and K are run-time values.

    Parameters
    ----------
    atom : str
        Entry of the atom table.
    vector_length : int
        V.
    a, b : Integer or FloatFormat
        Element types of the sparse and the dense operand.
    out : str
        Output dtype.
    fuse_digits : bool
        Two digits of a short vector share one instruction if their signs allow it.
    swizzle : bool
        Rows in shared memory are swizzled over the banks.
    """

    STEM: ClassVar[str]

    atom: str
    vector_length: int
    a: ElementType
    b: ElementType
    out: str
    fuse_digits: bool = True
    swizzle: bool = True

    @cached_property
    def entry(self) -> Atom:
        """MMA atom."""
        return atoms.atom(self.atom)

    @property
    def group(self) -> int:
        """Vectors per group: K of one instruction."""
        return stride(self.entry)

    @property
    def fused_digits(self) -> bool:
        """Whether digits share an instruction: they need one sign, which two signed digits of 16 bits lack."""
        one_sign = not self.a.signed or self.a.bits == 12
        return self.fuse_digits and one_sign and digits(self.a) == 2 and self.vector_length <= 4

    @property
    def packed(self) -> bool:
        """Whether 4-bit values stay packed in memory: the values of a lane are whole words."""
        depth = self.group * self.entry.mma_bits // 128
        return self.a.bits == 4 and depth % (self.entry.mma_bits // 4) == 0

    @property
    def stored(self) -> ElementType:
        """Element type in the packed operand: 4-bit floats that are not packed become e4m3, which holds them."""
        widened = self.a.bits == 4 and not isinstance(self.a, Integer) and not self.packed
        return FORMATS["e4m3"] if widened else self.a

    @property
    def digits(self) -> tuple[int, int]:
        return digits(self.a), digits(self.b)

    @property
    def products(self) -> int:
        """Digit products per element of a tile of at most eight rows."""
        return (1 if self.fused_digits else self.digits[0]) * self.digits[1]

    @property
    def shifted(self) -> bool:
        """Whether accumulators hold a multiple of the product: nibbles became the upper halves of bytes."""
        through_bytes = self.entry.mma_bits == 8 and not self.entry.floating
        return through_bytes and ((self.packed and self.a.signed) or (self.b.bits == 4 and self.b.signed))

    @cached_property
    def columns(self) -> int:
        """Columns of a tile of B."""
        return self.tile_n_bytes * 8 // element_bits(self.b)

    tile_n_bytes: ClassVar[int]

    def _constants(self) -> dict[str, object]:
        return {
            "kVector": self.vector_length,
            "kBitsA": self.stored.bits,
            "kBitsB": self.b.bits,
            "kSignedA": self.a.signed,
            "kSignedB": self.b.signed,
            "kFloat": self.entry.floating,
            "kFuseDigits": self.fused_digits,
            "kLongTotal": self.out != "int32" and self.digits != (1, 1),
            "kTileNBytes": self.tile_n_bytes,
            "kSwizzle": self.swizzle,
        }

    @property
    def kernel_header(self) -> str:
        return self.STEM.replace("_", "/") + ".cuh"

    @property
    def kernel_entry(self) -> str:
        return self.STEM

    def _preamble(self) -> str:
        return atoms.declaration(self.entry)

    def _types(self) -> dict[str, str]:
        return {
            "FormatA": atoms.format_type(self.stored),
            "FormatB": atoms.format_type(self.b),
            "OperandA": atoms.operand_type(atoms.operand_of(self.entry, self.a)),
            "OperandB": atoms.operand_type(atoms.operand_of(self.entry, self.b)),
            "Out": OUT_TYPES[self.out],
        }

    @property
    def name(self) -> str:
        """Short and unique among the configs."""
        pair = f"{self.a.name}x{self.b.name}"
        return "-".join([self.STEM, self.atom, f"v{self.vector_length}", pair, self.out, *self._tags()])

    def _tags(self) -> list[str]:
        return [name for name, on in (("unstacked", self.fuse_digits), ("unswizzled", self.swizzle)) if not on]

    def vector_stores(self, out: OutputArg, right: ScaleArg) -> int:
        """Whether consecutive results are stored, and their scales loaded, in one access: 1 or 0."""
        run = 16 // element_bits(self.b)
        width = min(16, run * OUT_BYTES[self.out])
        return int(out.columns % run == 0 and out.pointer % width == 0 and right.pointer % (4 * run) == 0)

    def packing_key(self) -> tuple[object, ...]:
        """Return the fields on which the packed operand depends."""
        return (self.atom, self.fused_digits, self.packed)


def planes(config: SpmmConfig, vectors: Vectors) -> Tensor:
    """Return the digit planes of the values as bytes, or floats as bit patterns.

    Fused digits share a sign, so the lower digit is signed too.

    Parameters
    ----------
    config : SpmmConfig
        Kernel config.
    vectors : Vectors
        Sparse operand.

    Returns
    -------
    Tensor, shape (digits, vectors, V)
        uint8, or int16 for 16-bit floats.
    """
    number = vectors.element_type
    if not isinstance(number, Integer):
        widened = config.stored.name != number.name
        codes = encode(decode(vectors.values, number.name), config.stored.name) if widened else vectors.values
        return codes[None]
    if not (config.fused_digits and number.signed):
        return split_digits(vectors.values, *number)
    wide = widen(vectors.values)
    low = ((wide + 128) & 0xFF) - 128
    return torch.stack([low & 0xFF, ((wide - low) >> 8) & 0xFF]).to(torch.uint8)


def pack_fragments(config: SpmmConfig, vectors: Vectors, positions: Tensor, groups: int) -> Tensor:
    """Pack values in fragment order: a lane reads its operand of one instruction by one load.

    Parameters
    ----------
    config : SpmmConfig
        Kernel config.
    vectors : Vectors
        Sparse operand.
    positions : Tensor, shape (vectors,)
        int64 slot of each vector among ``groups * group`` slots.
    groups : int
        Groups.

    Returns
    -------
    Tensor, shape (groups, bytes per group)
        uint8.
    """
    found = planes(config, vectors)  # (digits, vectors, V)
    count, _, v = found.shape
    slots = torch.zeros(count, groups * config.group, v, dtype=found.dtype, device=found.device)
    slots[:, positions] = found
    rows = min(v, 8)
    tiles = slots.view(count, groups, config.group, v // rows, rows).permute(
        1, 0, 3, 4, 2
    )  # (groups, digits, tiles, rows, slots)
    if config.fused_digits:
        tiles = tiles.reshape(groups, 1, 1, count * rows, config.group)
    used = tiles.shape[3]
    per_lane = config.group // 4
    narrow = config.packed or config.entry.mma_bits == 4
    order = pack_index(config.entry, packed=narrow)[: 4 * used * per_lane]
    index = torch.from_numpy(order).to(found.device)
    operands = tiles.shape[1] * tiles.shape[2]
    packed = tiles.reshape(groups, operands, used * config.group)[..., index]  # (groups, operands, values)
    if narrow:
        packed = (packed[..., 0::2] & 0xF) | ((packed[..., 1::2] & 0xF) << 4)
    return packed.flatten(1).contiguous().view(torch.uint8)


def group_offsets(row_offsets: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Split vector rows into groups.

    Parameters
    ----------
    row_offsets : Tensor, shape (R + 1,)
        int64 first vector of each vector row.
    group : int
        Slots per group.

    Returns
    -------
    offsets : Tensor, shape (R + 1,)
        int64 first group of each vector row.
    slots : Tensor, shape (vectors,)
        int64 slot of each vector.

    Examples
    --------
    >>> offsets, slots = group_offsets(torch.tensor([0, 2, 3]), 16)
    >>> offsets.tolist(), slots.tolist()
    ([0, 1, 2], [0, 1, 16])
    """
    lengths = row_offsets.diff()
    offsets = torch.zeros_like(row_offsets)
    torch.cumsum((lengths + group - 1) // group, 0, out=offsets[1:])
    shift = offsets[:-1] * group - row_offsets[:-1]  # (R,)
    total = int(row_offsets[-1]) if row_offsets.numel() else 0
    rows = torch.repeat_interleave(lengths, output_size=total)
    return offsets, torch.arange(total, device=row_offsets.device) + shift[rows]
