"""SR-BCRS: the format that the sparse products read.

Each vector row of a pattern is padded to a multiple of ``stride`` vectors, and the values of each ``stride`` vectors
lie row by row, so that an mma operand of k extent ``stride`` is one contiguous block of ``V x stride``.
Source: Li, Osawa, Hoefler, SC'22, section IV-A.
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from cute_kernels.cpu import engine
from cute_kernels.integers import fetch, storage_dtype, store
from magicube_cutlass.checks import (
    check_pointers,
    check_stride,
    check_tensor,
    check_vector_length,
    first_true,
    new_version_id,
    vector_rows,
)
from magicube_cutlass.formats.base import CompressedMatrix
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.construct import (
    Clip,
    Parts,
    Rounding,
    check_masked,
    compress_on_gpu,
    dense_integers,
    dense_parts,
    float_parts,
    indexable_view,
    mask_parts,
    masked_integers,
    pattern_parts,
    scipy_parts,
    smtx_parts,
    takes_floats,
    torch_sparse_parts,
    transpose_parts,
)
from magicube_cutlass.formats.pattern import Padded, Pattern
from magicube_cutlass.quantization.float_operands import packed, unpacked
from magicube_cutlass.quantization.float_tensor import FloatTensor


def _engine_takes(dense: Tensor) -> bool:
    """Whether the CPU engine compresses this matrix."""
    return dense.device.type == "cpu" and dense.numel() > 0 and engine.available()


class SRBCRS(CompressedMatrix):
    """A sparse ``M x K`` matrix of ``V x 1`` vectors, padded and in stride-wise row-major order.

    Arguments:
        row_start, row_end: int64 ``(R,)``, R = ceil(M / V); vector row r holds the padded positions
            ``row_start[r]:row_end[r]``, and its padding reaches to the next ``row_start``, a multiple of ``stride``.
        col_indices: int32 ``(padded vectors,)``, increasing inside a vector row, -1 in the padding.
        values: ``(*batch, padded vectors / stride, V, stride)``; 4-bit integers two a byte along the stride, low nibble
            first.  Zero in the padding and in rows beyond M.
        shape, vector_length, stride, signed: M and K, V, 16, 32 or 64, and whether the integers are two's complement.
        bits: 4, 8, 12, 16, or None where the values are floats, or results of int32 and int64.  float16, bfloat16,
            float8_e5m2, float8_e4m3fn and float4_e2m1fn_x2, two a byte as 4-bit integers, are operands of products.
        scale: None, float () for the matrix or ``(M, 1)`` for its rows; an element is ``scale * value``.
    Raises ``TypeError``/``ValueError`` as :meth:`check_format` does without ``full``.
    """

    _VALUE_NDIM = 3
    _INDICES = ("row_start", "row_end", "col_indices")
    _INTEGERS = ("vector_length", "stride")
    _PACKS = True

    def __init__(
        self,
        row_start: Tensor,
        row_end: Tensor,
        col_indices: Tensor,
        values: Tensor,
        *,
        shape: tuple[int, int],
        vector_length: int,
        bits: int | None,
        signed: bool = True,
        stride: int = 32,
        scale: Tensor | None = None,
    ) -> None:
        self.row_start = row_start
        self.row_end = row_end
        self.col_indices = col_indices
        self.stride = stride
        super().__init__(shape, vector_length, values, scale, bits, signed)

    @classmethod
    def from_dense(
        cls,
        dense: Tensor | FloatTensor,
        *,
        vector_length: int = 8,
        bits: int | None = None,
        signed: bool = True,
        stride: int = 32,
        axis: int | None = None,
        clip: Clip = "max",
        rounding: Rounding = "nearest",
        dtype: str | None = None,
    ) -> SRBCRS:
        """Keep the vectors of ``dense``, ``(M, K)``, that have a nonzero element.

        Floats are quantized to ``bits``, 8 by default, with one scale (``axis=None``) or one per row (``axis=1``);
        ``clip`` and ``rounding`` as in :func:`quantize`.  Which vectors are kept is decided on the floats, so an
        element that rounds to zero stays stored.  Integers are taken as they are and have no scale.
        ``dtype``: floats instead of integers: ``"float16"`` or ``"bfloat16"``, without a scale, or ``"e5m2"``,
        ``"e4m3"`` or ``"e2m1"``, quantized with scales as above.  float8 tensors are taken as they are, without a
        scale, and a FloatTensor of one scale or one a row with its scales.
        Raises ``ValueError`` for integers out of range, ``axis=0``, inf or nan; ``TypeError`` for bool or complex.
        """
        check_stride(stride)
        if takes_floats(dense, bits, dtype, signed, clip, rounding):
            return cls._of_floats(dense, None, vector_length, stride, dtype, axis)
        assert not isinstance(dense, FloatTensor)
        bits = 8 if bits is None else bits
        check_tensor("dense", dense, ndim=2)
        if dense.is_cuda and dense.numel():
            return cls._on_gpu(dense, None, vector_length, bits, signed, stride, axis, clip, rounding)
        if _engine_takes(dense):
            ints, scale, mask = dense_integers(dense, bits, signed, axis, clip, rounding)
            return cls._by_engine(ints, mask, vector_length, bits, signed, stride, scale)
        parts = dense_parts(dense, vector_length, bits, signed, axis, clip, rounding)
        return cls._from_parts(parts, bits, signed, stride)

    @classmethod
    def from_mask(
        cls,
        values: Tensor | FloatTensor,
        mask: Tensor,
        *,
        vector_length: int,
        bits: int | None = None,
        signed: bool = True,
        stride: int = 32,
        axis: int | None = None,
        dtype: str | None = None,
    ) -> SRBCRS:
        """Keep exactly the vectors with a true element in ``mask``, bool ``(M, K)``, zeros included.

        ``values``, ``(M, K)``: as ``dense`` of :meth:`from_dense`; where the mask is false they count as zero, also
        inside a kept vector, and are neither range-checked nor seen by the quantizer.
        """
        check_stride(stride)
        if takes_floats(values, bits, dtype, signed):
            return cls._of_floats(values, mask, vector_length, stride, dtype, axis)
        assert not isinstance(values, FloatTensor)
        bits = 8 if bits is None else bits
        check_masked(values, mask)
        if values.is_cuda and values.numel():
            return cls._on_gpu(values, mask, vector_length, bits, signed, stride, axis)
        if _engine_takes(values):
            ints, scale = masked_integers(values, mask, bits, signed, axis)
            return cls._by_engine(ints, mask, vector_length, bits, signed, stride, scale)
        return cls._from_parts(mask_parts(values, mask, vector_length, bits, signed, axis), bits, signed, stride)

    @classmethod
    def _of_floats(
        cls,
        values: Tensor | FloatTensor,
        mask: Tensor | None,
        vector_length: int,
        stride: int,
        dtype: str | None,
        axis: int | None,
    ) -> SRBCRS:
        """The vectors with a true element in ``mask``, or else with one that is not zero."""
        parts, packs = float_parts(values, mask, vector_length, dtype, axis)
        return cls._from_parts(parts, None, True, stride, packs)

    @classmethod
    def _on_gpu(
        cls,
        dense: Tensor,
        mask: Tensor | None,
        vector_length: int,
        bits: int,
        signed: bool,
        stride: int,
        axis: int | None,
        clip: Clip = "max",
        rounding: Rounding = "nearest",
    ) -> SRBCRS:
        """As :meth:`from_dense` and :meth:`from_mask` say, by kernels; the pattern is derived when it is asked for."""
        found, scale = compress_on_gpu(dense, mask, vector_length, bits, signed, stride, axis, clip, rounding)
        shape = (dense.shape[0], dense.shape[1])
        return cls(
            *found, shape=shape, vector_length=vector_length, stride=stride, bits=bits, signed=signed, scale=scale
        )

    @classmethod
    def _by_engine(
        cls,
        ints: Tensor,
        mask: Tensor,
        vector_length: int,
        bits: int,
        signed: bool,
        stride: int,
        scale: Tensor | None,
    ) -> SRBCRS:
        """The vectors of ``ints`` with a true element in ``mask``; the pattern is derived when it is asked for."""
        from cute_kernels.cpu.engine import compress_cpu

        check_vector_length(vector_length)
        start, end, columns, values = compress_cpu(ints, mask, vector_length, stride)
        shape = (ints.shape[0], ints.shape[1])
        return cls(
            start, end, columns, store(values, bits, signed), shape=shape, vector_length=vector_length, stride=stride,
            bits=bits, signed=signed, scale=scale,
        )  # fmt: skip

    @classmethod
    def from_pattern(
        cls,
        pattern: Pattern,
        vectors: Tensor,
        *,
        bits: int | None,
        signed: bool = True,
        stride: int = 32,
        scale: Tensor | None = None,
    ) -> SRBCRS:
        """Values ``vectors``, ``(*batch, vectors, V)`` in the pattern's order, on ``pattern``.

        With ``bits`` integers of any dtype, checked for range; with ``bits=None`` floats or results of int32 or int64.
        What ``vectors`` holds in rows beyond M is dropped.
        """
        check_stride(stride)
        return cls._from_parts(pattern_parts(pattern, vectors, bits, signed, scale), bits, signed, stride)

    @classmethod
    def from_scipy(
        cls,
        matrix: Any,
        *,
        vector_length: int = 8,
        bits: int = 8,
        signed: bool = True,
        stride: int = 32,
        axis: int | None = None,
    ) -> SRBCRS:
        """From a ``scipy.sparse`` matrix or array; explicit zeros kept, repeated places summed, floats quantized."""
        check_stride(stride)
        return cls._from_parts(scipy_parts(matrix, vector_length, bits, signed, axis), bits, signed, stride)

    @classmethod
    def from_torch_sparse(
        cls,
        tensor: Tensor,
        *,
        vector_length: int = 8,
        bits: int = 8,
        signed: bool = True,
        stride: int = 32,
        axis: int | None = None,
    ) -> SRBCRS:
        """From a torch tensor of layout COO, CSR, CSC or BSR; explicit zeros are kept, repeated places summed."""
        check_stride(stride)
        return cls._from_parts(torch_sparse_parts(tensor, vector_length, bits, signed, axis), bits, signed, stride)

    @classmethod
    def from_smtx(
        cls,
        path: str | PathLike[str],
        *,
        vector_length: int = 8,
        bits: int = 8,
        signed: bool = True,
        stride: int = 32,
        seed: int = 0,
    ) -> SRBCRS:
        """The pattern of an ``.smtx`` file, each row of it one vector row, with random integers of the whole range."""
        check_stride(stride)
        return cls._from_parts(smtx_parts(path, vector_length, bits, signed, seed), bits, signed, stride)

    @classmethod
    def from_bcrs(cls, bcrs: BCRS, stride: int = 32) -> SRBCRS:
        """The same matrix as ``bcrs``."""
        check_stride(stride)
        return cls._from_parts(Parts(bcrs.pattern, bcrs.values, bcrs.scale), bcrs.bits, bcrs.signed, stride)

    @classmethod
    def _from_parts(cls, parts: Parts, bits: int | None, signed: bool, stride: int, packs: bool = False) -> SRBCRS:
        """``packs``: the vectors are e4m3 that become packed e2m1."""
        pattern, vectors = parts.pattern, parts.vectors
        padded = pattern.padded(stride)
        total, v, batch = padded.col_indices.shape[0], pattern.vector_length, vectors.shape[:-2]
        spread = torch.zeros(*batch, total, v, dtype=vectors.dtype, device=vectors.device)
        indexable_view(spread)[..., padded.slots, :] = indexable_view(vectors)
        values = spread.view(*batch, total // stride, stride, v).transpose(-1, -2)  # (*batch, blocks, V, stride)
        values = packed(values) if packs else values if bits is None else store(values, bits, signed)
        matrix = cls(
            padded.row_start,
            padded.row_end,
            padded.col_indices,
            values.contiguous(),
            shape=pattern.shape,
            vector_length=v,
            stride=stride,
            bits=bits,
            signed=signed,
            scale=parts.scale,
        )
        matrix._cache["pattern"] = pattern
        return matrix

    def with_values(self, values: Tensor) -> SRBCRS:
        """The same structure around ``values``, of this matrix's shape, dtype and device; not checked."""
        other = object.__new__(SRBCRS)
        other.__dict__.update(self.__dict__)  # what was derived of the structure is shared
        other.values = values
        other._execution = {}
        if self.element_type is not None:  # what is a result only is no operand
            other._version_id = new_version_id()
        return other

    def _constant(self, edition: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(self, *arguments)``, which a compiler takes as a constant of this edition."""
        return function(self, *arguments)

    # What torch.compiler.assume_constant_result sets; calling that imports the compiler, a second of waiting.
    _constant.__dict__["_dynamo_marked_constant"] = True

    def ints(self) -> Tensor:
        """The values one an entry, ``(*batch, blocks, V, stride)`` of :attr:`dtype`."""
        if self.bits is None:
            return unpacked(self.values) if self.packed else self.values
        return fetch(self.values, self.stride, self.bits, self.signed)

    def _padded_vectors(self) -> Tensor:
        """The values ``(*batch, padded vectors, V)``, uint16 seen as int16."""
        moved = indexable_view(self.ints()).transpose(-1, -2)
        return moved.reshape(*self.batch_shape, self.col_indices.shape[0], self.vector_length)

    def vectors(self) -> Tensor:
        return self._padded_vectors()[..., self.pattern.padded(self.stride).slots, :].view(self.dtype)

    def to_bcrs(self) -> BCRS:
        """The same matrix, unpadded; e2m1 becomes e4m3."""
        return BCRS._from_parts(Parts(self.pattern, self.vectors(), self.scale), self.bits, self.signed)

    def transpose(self) -> SRBCRS:
        """The transpose, ``K x M``, in vectors of the same length; stores every element that this stores.

        Raises ``ValueError`` for a scale per row.
        """
        parts = transpose_parts(self.pattern, self.vectors(), self.scale)
        return self._from_parts(parts, self.bits, self.signed, self.stride, self.packed)

    def _derive_pattern(self) -> Pattern:
        lengths = self.row_end - self.row_start
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        rows = torch.arange(len(lengths), device=self.device).repeat_interleave(lengths)
        slots = torch.arange(len(rows), device=self.device) + (self.row_start - offsets[:-1])[rows]
        pattern = Pattern(self.shape, self.vector_length, offsets, self.col_indices[slots])
        pattern._cache["padded", self.stride] = Padded(self.row_start, self.row_end, self.col_indices, slots)
        return pattern

    def _stored_dtype(self, bits: int) -> torch.dtype:
        return storage_dtype(bits, self.signed)

    def _check_structure(self) -> None:
        check_stride(self.stride)
        rows = vector_rows(self.shape[0], self.vector_length)
        for name in ("row_start", "row_end"):
            check_tensor(name, getattr(self, name), dtype=torch.int64, ndim=1, length=rows, device=self.device)
        check_tensor("col_indices", self.col_indices, dtype=torch.int32, ndim=1, device=self.device)
        if self.col_indices.shape[0] % self.stride:
            raise ValueError(
                f"col_indices must have a multiple of stride = {self.stride} entries, got {self.col_indices.shape[0]}"
            )

    def _value_shape(self) -> tuple[int, ...]:
        width = self.stride // 2 if self.bits == 4 or self.packed else self.stride
        return (self.col_indices.shape[0] // self.stride, self.vector_length, width)

    def _check_layout(self) -> None:
        check_pointers(self.row_start, self.row_end, self.stride, self.col_indices.shape[0])
        slots = self._derive_pattern().padded(self.stride).slots
        padding = torch.ones(self.col_indices.shape[0], dtype=torch.bool, device=self.device)
        padding[slots] = False
        bad = first_true(padding & (self.col_indices != -1))
        if bad is not None:
            raise ValueError(f"col_indices must be -1 in the padding, got {int(self.col_indices[bad])} at {bad}")
        if bool((self._padded_vectors()[..., padding, :] != 0).any()):
            raise ValueError("values must be zero in the padding, got a nonzero one")
