"""Base of the SpMM kernel configs, and the fragment order of the packed sparse operand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from cute_kernels import atoms
from cute_kernels.dtypes import ElementType, Integer, element_bits, num_digits
from cute_kernels.float_format import FORMATS
from cute_kernels.floats import decode, encode
from cute_kernels.integers import split_digits, widen
from cute_kernels.jit.codegen import OUT_BYTES, OUT_TYPES
from cute_kernels.jit.kernel import Kernel
from cute_kernels.layout.fragments import pack_index, stride
from cute_kernels.operands import DenseArg, OutputArg, ScaleArg, Vectors
from cute_kernels.sparse_config import SparseConfig

__all__ = ["SpmmConfig", "group_offsets", "pack_fragments"]


@dataclass(frozen=True)
class SpmmConfig(SparseConfig):
    """Config of an SpMM kernel: base of ``GatherConfig`` and ``PanelConfig``.

    ``C = row_scale * col_scale * (A @ B) + bias[:, None]``, with A sparse (V x 1 vectors) and B dense and row-major.
    The sizes M, N and K are run-time arguments.

    Attributes
    ----------
    atom : str
        Name of the MMA atom. Operand A of the MMA is B transposed, operand B holds the sparse vectors.
    vector_length : int
        V, rows of a vector.
    a, b : ElementType
        Element types of the sparse and of the dense operand.
    out : str
        Dtype of the output.
    fuse_digits : bool
        Put two digit planes of A into one MMA if V <= 4 and the digits have the same sign.
    swizzle : bool
        Swizzle rows of B in shared memory. False is for measurements: every read then has bank conflicts.
    shuffle : bool
        Store 4-bit vectors of a group in the order in which nibbles unpack (SC'22, section IV-B3). False is for
        measurements: they keep the order of their columns, and the kernel orders the nibbles. No GPU has run False.
    transposed : bool
        Write the transpose of C, (batch, N, M), contiguous: what a layer's next operator reads.
    tile_n_bytes : int
        Bytes of a row of B per N tile: 16, 32, 64 or 128. Each subclass sets the default.

    Examples
    --------
    >>> from cute_kernels.spmm.gather import GatherConfig
    >>> config = GatherConfig("s8_m16n8k32", 8, Integer(16, True), Integer(8, True), "int32")
    >>> config.mma_k, config.digits, config.products
    (32, (2, 1), 2)
    """

    FLAGS: ClassVar[dict[str, tuple[str, bool]]] = {
        "unstacked": ("fuse_digits", False), "unswizzled": ("swizzle", False), "unshuffled": ("shuffle", False),
        "transposed": ("transposed", True),
    }  # fmt: skip

    atom: str
    vector_length: int
    a: ElementType
    b: ElementType
    out: str
    fuse_digits: bool = True
    swizzle: bool = True
    shuffle: bool = True
    transposed: bool = False

    @property
    def mma_k(self) -> int:
        """Vectors per MMA: the K of the atom. So many vectors of one vector row are a group."""
        return stride(self.entry)

    @property
    def has_fused_digits(self) -> bool:
        """Whether two digit planes of A share an MMA.

        Fused digits have the same sign: both unsigned, or both signed for 12 bits, whose low digit fits a signed byte.
        """
        one_sign = not self.a.signed or self.a.bits == 12
        return self.fuse_digits and one_sign and num_digits(self.a) == 2 and self.vector_length <= 4

    @property
    def packed(self) -> bool:
        """Whether 4-bit values of A stay packed two per byte; a lane must then load whole words."""
        depth = self.mma_k * self.entry.mma_bits // 128
        return self.a.bits == 4 and depth % (self.entry.mma_bits // 4) == 0

    @property
    def stored(self) -> ElementType:
        """Element type of the packed operand: e4m3 for 4-bit floats that are not packed, else that of A."""
        widened = self.a.bits == 4 and not isinstance(self.a, Integer) and not self.packed
        return FORMATS["e4m3"] if widened else self.a

    @property
    def digits(self) -> tuple[int, int]:
        """Digit planes of A and of B."""
        return num_digits(self.a), num_digits(self.b)

    @property
    def products(self) -> int:
        """MMAs per tile of 8 rows, for all digit products."""
        return (1 if self.has_fused_digits else self.digits[0]) * self.digits[1]

    @property
    def row_accumulators(self) -> int:
        """Accumulator registers per lane for one vector row."""
        # The two cross terms of signed digits share an accumulator.
        one_sign = self.products == 4 and self.a.signed and self.b.signed
        tiles = max(1, self.vector_length // 8)
        return tiles * (3 if one_sign else self.products) * self.tile_n // 4

    @property
    def record_bytes(self) -> int:
        """Bytes per record of the panel and the resident kernel: a group's values, and the offsets of its rows of B."""
        whole = 4 if self.packed or self.entry.mma_bits == 4 else 8 * self.digits[0]
        bits = self.stored.bits if self.entry.floating else whole
        return self.mma_k * (self.vector_length * bits // 8 + 2)

    @property
    def shifted(self) -> bool:
        """Whether accumulators hold 16 or 256 times the product: signed nibbles become the high halves of bytes."""
        through_bytes = self.entry.mma_bits == 8 and not self.entry.floating
        return through_bytes and ((self.packed and self.a.signed) or (self.b.bits == 4 and self.b.signed))

    @cached_property
    def tile_n(self) -> int:
        """Columns of B per N tile."""
        return self.tile_n_bytes * 8 // element_bits(self.b)

    tile_n_bytes: ClassVar[int]
    any_rows: ClassVar[bool] = False  # whether rows of B may have any pitch and alignment

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
            "kShuffle": self.shuffle,
            "kTransposedOut": self.transposed,
            "kAccumulate": False,
        }

    @property
    def kernel_header(self) -> str:
        return self.STEM.replace("_", "/") + ".cuh"

    def _types(self) -> dict[str, str]:
        return {
            "FormatA": atoms.format_type(self.stored),
            "FormatB": atoms.format_type(self.b),
            "OperandA": atoms.operand_type(atoms.operand_of(self.entry, self.a)),
            "OperandB": atoms.operand_type(atoms.operand_of(self.entry, self.b)),
            "Out": OUT_TYPES[self.out],
        }

    @property
    def operand_types(self) -> tuple[ElementType, ElementType]:
        return self.a, self.b

    def _tags(self) -> list[str]:
        flags = ("unstacked", not self.fuse_digits), ("unswizzled", not self.swizzle), ("unshuffled", not self.shuffle)
        return [name for name, on in (*flags, ("transposed", self.transposed)) if on]

    def pack(self, vectors: Vectors, inner: int) -> Sequence[Tensor]:
        """Pack the sparse operand for this kernel, on its device.

        Parameters
        ----------
        vectors : Vectors
            Sparse operand.
        inner : int
            K, columns of A.
        """
        raise NotImplementedError

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
        """Launch `kernel` on the current stream of torch.

        Parameters
        ----------
        kernel : Kernel
            Compiled kernel of this config.
        matrix : sequence of Tensor
            Packed operand A, as :meth:`pack` returns it.
        b : DenseArg
            Dense operand, row-major.
        out : OutputArg
            Output and sizes.
        row_scale, col_scale : ScaleArg
            Scales of A and of B.
        bias : int
            Address of the float32 bias, one per row of the output, or 0.
        pdl : bool, default False
            Start while the previous kernel on the stream ends.
        """
        raise NotImplementedError

    def vector_stores(self, out: OutputArg, col_scale: ScaleArg) -> int:
        """Return 1 if a lane's neighboring results and their scales allow vector stores and loads, else 0."""
        run = 16 // element_bits(self.b)
        width = min(16, run * OUT_BYTES[self.out])
        return int(out.columns % run == 0 and out.pointer % width == 0 and col_scale.pointer % (4 * run) == 0)

    def packing_key(self) -> tuple[object, ...]:
        """Return the fields that the packed operand depends on: configs with equal keys share it."""
        return (self.atom, self.has_fused_digits, self.packed, self.shuffle)


def _digit_planes(config: SpmmConfig, vectors: Vectors) -> Tensor:
    """Return digits as bytes, or the bits of floats as int16 or uint8: (digits, vectors, V)."""
    number = vectors.element_type
    if not isinstance(number, Integer):
        widened = config.stored.name != number.name
        bits = encode(decode(vectors.values, number.name), config.stored.name) if widened else vectors.values
        return bits[None]
    if not (config.has_fused_digits and number.signed):
        return split_digits(vectors.values, *number)
    # Fused digits have one sign, so the low digit is signed too.
    ints = widen(vectors.values)  # (vectors, V) int64
    low = ((ints + 128) & 0xFF) - 128  # (vectors, V) int64
    return torch.stack([low & 0xFF, ((ints - low) >> 8) & 0xFF]).to(torch.uint8)


def pack_fragments(config: SpmmConfig, vectors: Vectors, positions: Tensor, groups: int) -> Tensor:
    """Pack values in fragment order, so that a lane loads its operand of one MMA at once.

    Parameters
    ----------
    config : SpmmConfig
        Defines atom, digit planes and packing.
    vectors : Vectors
        Sparse operand.
    positions : Tensor, shape (vectors,)
        int64 slot of each vector among ``groups * mma_k`` slots; the other slots become 0.
    groups : int
        Number of groups.

    Returns
    -------
    Tensor, shape (groups, bytes per group)
        uint8, on the device of `vectors`.

    Examples
    --------
    >>> from cute_kernels.spmm.gather import GatherConfig
    >>> config = GatherConfig("s8_m16n8k32", 8, Integer(8, True), Integer(8, True), "int32")
    >>> offsets, columns = torch.tensor([0, 2]), torch.tensor([1, 5], dtype=torch.int32)
    >>> vectors = Vectors(offsets, columns, torch.ones(2, 8, dtype=torch.int8), config.a)
    >>> pack_fragments(config, vectors, torch.tensor([0, 1]), groups=1)[0, :4].tolist()  # slots 0, 1, 8 and 9 of row 0
    [1, 1, 0, 0]
    """
    planes = _digit_planes(config, vectors)  # (digits, vectors, V)
    count, _, v = planes.shape
    slots = torch.zeros(count, groups * config.mma_k, v, dtype=planes.dtype, device=planes.device)
    slots[:, positions] = planes
    rows = min(v, 8)
    tiles = slots.view(count, groups, config.mma_k, v // rows, rows).permute(
        1, 0, 3, 4, 2
    )  # (groups, digits, tiles, rows, slots)
    if config.has_fused_digits:
        tiles = tiles.reshape(groups, 1, 1, count * rows, config.mma_k)
    used = tiles.shape[3]
    per_lane = config.mma_k // 4
    nibbles = config.packed or config.entry.mma_bits == 4
    order = pack_index(config.entry, packed=nibbles, shuffled=config.shuffle)[: 4 * used * per_lane]
    index = torch.from_numpy(order).to(planes.device)
    operands = tiles.shape[1] * tiles.shape[2]
    values = tiles.reshape(groups, operands, used * config.mma_k)[..., index]  # (groups, operands, values)
    if nibbles:
        values = (values[..., 0::2] & 0xF) | ((values[..., 1::2] & 0xF) << 4)
    return values.flatten(1).contiguous().view(torch.uint8)


def group_offsets(row_offsets: Tensor, mma_k: int) -> tuple[Tensor, Tensor]:
    """Return where groups of `mma_k` vectors start if each vector row is padded to whole groups.

    Parameters
    ----------
    row_offsets : Tensor, shape (R + 1,)
        int64 offsets of the vector rows.
    mma_k : int
        Vectors per group.

    Returns
    -------
    offsets : Tensor, shape (R + 1,)
        int64, first group of each vector row.
    slots : Tensor, shape (vectors,)
        int64, slot of each vector.

    Examples
    --------
    >>> offsets, slots = group_offsets(torch.tensor([0, 3, 4]), 2)
    >>> offsets.tolist(), slots.tolist()
    ([0, 2, 3], [0, 1, 2, 4])
    """
    lengths = row_offsets.diff()
    offsets = torch.zeros_like(row_offsets)
    torch.cumsum((lengths + mma_k - 1) // mma_k, 0, out=offsets[1:])
    shift = offsets[:-1] * mma_k - row_offsets[:-1]  # (R,)
    total = int(row_offsets[-1]) if row_offsets.numel() else 0
    rows = torch.repeat_interleave(lengths, output_size=total)
    return offsets, torch.arange(total, device=row_offsets.device) + shift[rows]
