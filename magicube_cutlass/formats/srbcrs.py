"""SR-BCRS: the format that the sparse products read.

Each vector row is padded to a multiple of `stride` vectors, and the values of each `stride` vectors are stored row by
row, so that an MMA operand of K = `stride` is one contiguous block of V x stride.
Source: Li, Osawa, Hoefler, SC'22, section IV-A.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from cute_kernels.dtypes import INTEGER_OUT
from cute_kernels.integers import fetch, storage_dtype, store
from magicube_cutlass.checks import check_pointers, check_stride, check_tensor, first_true, new_version_id, vector_rows
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.construct import Parts, indexable_view, transpose_parts
from magicube_cutlass.formats.pattern import Padded, Pattern
from magicube_cutlass.formats.srbcrs_construct import SRBCRSConstructors
from magicube_cutlass.formats.tracking import Stamp, is_valid, real_tensors, restamp
from magicube_cutlass.quantization.float_operands import packed, unpacked

__all__ = ["SRBCRS"]

_RESULTS = (*INTEGER_OUT, torch.float32, torch.float64)  # dtypes that are no operands


class SRBCRS(SRBCRSConstructors):
    """A sparse matrix of V x 1 vectors, padded, in stride-wise row-major order.

    Parameters
    ----------
    row_start, row_end : Tensor, shape (R,)
        int64, R = ceil(M / V). Vector row r holds the padded positions ``row_start[r]:row_end[r]``; its padding reaches
        to the next `row_start`, a multiple of `stride`.
    col_indices : Tensor, shape (padded vectors,)
        int32, increasing in each vector row, -1 in the padding.
    values : Tensor, shape (..., padded vectors / stride, V, stride)
        4-bit integers two per byte along the stride, low nibble first. Zero in the padding and in rows beyond M.
    shape : tuple of int
        (M, K).
    vector_length : int
        V.
    bits : int or None
        4, 8, 12 or 16. None for floats and results: float16, bfloat16, float8_e5m2, float8_e4m3fn and
        float4_e2m1fn_x2 (two per byte) are operands of products.
    signed : bool, default True
        Two's complement if true.
    stride : int, default 32
        16, 32 or 64.
    scale : Tensor, optional
        float of shape () or (M, 1); an element is ``scale * value``.

    Raises
    ------
    TypeError, ValueError
        As :meth:`check_format`.

    References
    ----------
    .. [1] Li, Osawa, Hoefler, SC'22, section IV-A.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> A = mc.SRBCRS.from_dense(torch.eye(8, 16, dtype=torch.int8), vector_length=8, stride=16)
    >>> A.row_start.tolist(), A.row_end.tolist(), A.values.shape
    ([0], [8], torch.Size([1, 8, 16]))
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
    def _make(
        cls,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        dense: Tensor,
        vector_length: int,
        bits: int,
        signed: bool,
        stride: int,
        scale: Tensor | None,
    ) -> Self:
        shape = (dense.shape[0], dense.shape[1])
        return cls(
            *tensors, shape=shape, vector_length=vector_length, stride=stride, bits=bits, signed=signed, scale=scale
        )._trust()

    @classmethod
    def from_bcrs(cls, bcrs: BCRS, stride: int = 32) -> SRBCRS:
        """Convert a BCRS matrix."""
        check_stride(stride)
        return cls._from_parts(Parts(bcrs.pattern, bcrs.values, bcrs.scale), bcrs.bits, bcrs.signed, stride)

    @classmethod
    def _from_parts(cls, parts: Parts, bits: int | None, signed: bool, stride: int, packs: bool = False) -> Self:
        """The matrix of `parts`; `packs`: the vectors are e4m3 that become packed e2m1."""
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
        return matrix._trust() if pattern.is_current else matrix

    def with_values(self, values: Tensor) -> SRBCRS:
        """Return the same structure with `values` of equal shape, dtype and device; not checked."""
        other = object.__new__(SRBCRS)
        other.__dict__.update(self.__dict__)  # what was derived of the structure is shared
        other.values = values
        other._execution, other._made = {}, None
        if self._seen is not None:
            other._seen = restamp(self._seen, "values", values)
        if self.bits is not None or self.values.dtype not in _RESULTS:  # what is a result only is no operand
            other._version_id = new_version_id()
        return other

    def _constant(self, edition: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(self, *arguments)``, a constant of this version for a compiler."""
        with real_tensors():
            return function(self, *arguments)

    # What torch.compiler.assume_constant_result sets; calling that imports the compiler, a second of waiting.
    _constant.__dict__["_dynamo_marked_constant"] = True

    def ints(self) -> Tensor:
        """Return the values, one per element: (..., blocks, V, stride) of :attr:`dtype`."""
        if self.bits is None:
            return unpacked(self.values) if self.packed else self.values
        return fetch(self.values, self.stride, self.bits, self.signed)

    def _padded_vectors(self) -> Tensor:
        """Values (..., padded vectors, V), uint16 as int16."""
        moved = indexable_view(self.ints()).transpose(-1, -2)
        return moved.reshape(*self.batch_shape, self.col_indices.shape[0], self.vector_length)

    def vectors(self) -> Tensor:
        """Return the values in pattern order, (..., vectors, V) of :attr:`dtype`."""
        return self._padded_vectors()[..., self.pattern.padded(self.stride).slots, :].view(self.dtype)

    def to_bcrs(self) -> BCRS:
        """Return the same matrix, unpadded; e2m1 becomes e4m3."""
        return BCRS._from_parts(Parts(self.pattern, self.vectors(), self.scale), self.bits, self.signed)

    def transpose(self) -> SRBCRS:
        """Return the transpose (K, M) in vectors of the same length; it stores every element of this matrix.

        Raises
        ------
        ValueError
            For a per-row scale.
        """
        parts = transpose_parts(self.pattern, self.vectors(), self.scale)
        return self._from_parts(parts, self.bits, self.signed, self.stride, self.packed)

    def _rows(self, pattern: Pattern, vectors: Tensor, scale: Tensor | None) -> Self:
        return self._from_parts(Parts(pattern, vectors, scale), self.bits, self.signed, self.stride, self.packed)

    def _derive_pattern(self) -> Pattern:
        lengths = self.row_end - self.row_start
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        rows = torch.arange(len(lengths), device=self.device).repeat_interleave(lengths)
        slots = torch.arange(len(rows), device=self.device) + (self.row_start - offsets[:-1])[rows]
        pattern = Pattern(self.shape, self.vector_length, offsets, self.col_indices[slots])
        if self._seen is not None:
            pattern._trust()
        pattern._cache["padded", self.stride] = Padded(self.row_start, self.row_end, self.col_indices, slots)
        return pattern

    def _is_valid(self, stamp: Stamp) -> bool:
        return is_valid(self, stamp, self.stride, self.bits, self.signed)

    def _scan(self) -> None:
        check_pointers(self.row_start, self.row_end, self.stride, self.col_indices.shape[0])
        self._derive_pattern().check_format(full=True)
        slots = self._derive_pattern().padded(self.stride).slots
        self._check_padding(slots)

    def _check_padding(self, slots: Tensor) -> Tensor:
        """The padding, bool (padded vectors,); raise unless its column indices are -1."""
        padding = torch.ones(self.col_indices.shape[0], dtype=torch.bool, device=self.device)
        padding[slots] = False
        bad = first_true(padding & (self.col_indices != -1))
        if bad is not None:
            raise ValueError(f"col_indices must be -1 in the padding, got {int(self.col_indices[bad])} at {bad}")
        return padding

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
        padding = self._check_padding(self._derive_pattern().padded(self.stride).slots)
        if bool((self._padded_vectors()[..., padding, :] != 0).any()):
            raise ValueError("values must be zero in the padding, got a nonzero one")
