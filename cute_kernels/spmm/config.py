"""Host half of the SpMM kernels: what a config says, and the values of the execution copy that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from cute_kernels import atoms
from cute_kernels.atoms import Atom
from cute_kernels.dtypes import Integer, Number, digits, element_bits
from cute_kernels.floats import FORMATS, decode, encode
from cute_kernels.integers import split_digits, widen
from cute_kernels.jit.codegen import OUT_BYTES, OUT_TYPES, KernelConfig
from cute_kernels.layout.fragments import pack_index, stride
from cute_kernels.operands import OutputArg, ScaleArg, Vectors


@dataclass(frozen=True)
class SpmmConfig(KernelConfig):
    """What the SpMM kernels are compiled for; M, N and K stay run-time values.

    ``atom`` names an entry of the atom table; ``a`` is the sparse operand, ``b`` the dense one, ``out`` the name of a
    torch dtype.  ``stack``: two digits of a short vector share one instruction where their signs allow it.
    ``swizzle``: rows in shared memory are swizzled over the banks, without which the kernels are slow.
    """

    STEM: ClassVar[str]

    atom: str
    vector_length: int
    a: Number
    b: Number
    out: str
    fuse_digits: bool = True
    swizzle: bool = True

    @cached_property
    def entry(self) -> Atom:
        """The MMA atom."""
        return atoms.atom(self.atom)

    @property
    def mma_k(self) -> int:
        """Vectors that one instruction takes."""
        return stride(self.entry)

    @property
    def has_fused_digits(self) -> bool:
        """Digits share an instruction: they must have one sign, which two signed digits of 16 bits cannot have."""
        one_sign = not self.a.signed or self.a.bits == 12
        return self.fuse_digits and one_sign and digits(self.a) == 2 and self.vector_length <= 4

    @property
    def packed(self) -> bool:
        """4-bit values stay packed in the execution copy: a lane's are whole words."""
        depth = self.mma_k * self.entry.mma_bits // 128
        return self.a.bits == 4 and depth % (self.entry.mma_bits // 4) == 0

    @property
    def stored(self) -> Number:
        """What the values are in the execution copy: 4-bit floats that are not packed are e4m3, which holds them."""
        widened = self.a.bits == 4 and not isinstance(self.a, Integer) and not self.packed
        return FORMATS["e4m3"] if widened else self.a

    @property
    def digits(self) -> tuple[int, int]:
        return digits(self.a), digits(self.b)

    @property
    def products(self) -> int:
        """Products of digits for each element of a tile of at most eight rows."""
        return (1 if self.has_fused_digits else self.digits[0]) * self.digits[1]

    @property
    def shifted(self) -> bool:
        """The sums hold a multiple of the product, because nibbles became the upper halves of bytes."""
        through_bytes = self.entry.mma_bits == 8 and not self.entry.floating
        return through_bytes and ((self.packed and self.a.signed) or (self.b.bits == 4 and self.b.signed))

    @cached_property
    def columns(self) -> int:
        """Columns of B that one strip has."""
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
            "kFuseDigits": self.has_fused_digits,
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
        """Whether neighbouring results can be stored, and their factors read, at once: 1 or 0."""
        run = 16 // element_bits(self.b)
        width = min(16, run * OUT_BYTES[self.out])
        return int(out.columns % run == 0 and out.pointer % width == 0 and right.pointer % (4 * run) == 0)

    def packing_key(self) -> tuple[object, ...]:
        """What the execution copy depends on."""
        return (self.atom, self.has_fused_digits, self.packed)


def planes(config: SpmmConfig, vectors: Vectors) -> Tensor:
    """Digits of the values as bytes, or the bits of floats as int16 or uint8: (digits, vectors, V).

    Stacked digits share a sign: the lower one's too.
    """
    number = vectors.number
    if not isinstance(number, Integer):
        widened = config.stored.name != number.name
        codes = encode(decode(vectors.values, number.name), config.stored.name) if widened else vectors.values
        return codes[None]
    if not (config.has_fused_digits and number.signed):
        return split_digits(vectors.values, *number)
    wide = widen(vectors.values)
    low = ((wide + 128) & 0xFF) - 128
    return torch.stack([low & 0xFF, ((wide - low) >> 8) & 0xFF]).to(torch.uint8)


def pack_fragments(config: SpmmConfig, vectors: Vectors, positions: Tensor, groups: int) -> Tensor:
    """Values in fragment order, uint8 (groups, bytes a group).

    ``positions``: int64 (vectors,), the place of each vector among ``groups * group`` slots.  A lane then reads its
    operand of one instruction with one load.
    """
    found = planes(config, vectors)  # (digits, vectors, V)
    count, _, v = found.shape
    slots = torch.zeros(count, groups * config.mma_k, v, dtype=found.dtype, device=found.device)
    slots[:, positions] = found
    rows = min(v, 8)
    tiles = slots.view(count, groups, config.mma_k, v // rows, rows).permute(
        1, 0, 3, 4, 2
    )  # (groups, digits, tiles, rows, slots)
    if config.has_fused_digits:
        tiles = tiles.reshape(groups, 1, 1, count * rows, config.mma_k)
    used = tiles.shape[3]
    per_lane = config.mma_k // 4
    narrow = config.packed or config.entry.mma_bits == 4
    order = pack_index(config.entry, packed=narrow)[: 4 * used * per_lane]
    index = torch.from_numpy(order).to(found.device)
    operands = tiles.shape[1] * tiles.shape[2]
    packed = tiles.reshape(groups, operands, used * config.mma_k)[..., index]  # (groups, operands, values)
    if narrow:
        packed = (packed[..., 0::2] & 0xF) | ((packed[..., 1::2] & 0xF) << 4)
    return packed.flatten(1).contiguous().view(torch.uint8)


def group_offsets(row_offsets: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """First group of each vector row, int64 (R + 1,), and the slot of each vector, int64 (vectors,)."""
    lengths = row_offsets.diff()
    offsets = torch.zeros_like(row_offsets)
    torch.cumsum((lengths + group - 1) // group, 0, out=offsets[1:])
    shift = offsets[:-1] * group - row_offsets[:-1]  # (R,)
    total = int(row_offsets[-1]) if row_offsets.numel() else 0
    rows = torch.repeat_interleave(lengths, output_size=total)
    return offsets, torch.arange(total, device=row_offsets.device) + shift[rows]
