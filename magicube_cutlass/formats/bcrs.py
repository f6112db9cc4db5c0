"""BCRS: the vectors of a sparse matrix in row order, unpadded; the plain counterpart of SR-BCRS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels.integers import value_dtype
from magicube_cutlass.checks import NOT_GIVEN, Granularity, axis_of, check_tensor, vector_rows
from magicube_cutlass.formats.base import CompressedMatrix
from magicube_cutlass.formats.construct import Clip, Parts, Rounding, dense_parts, mask_parts, pattern_parts
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.tracking import Stamp, is_valid

__all__ = ["BCRS"]


class BCRS(CompressedMatrix):
    """A sparse matrix of V x 1 vectors, unpadded.

    Parameters
    ----------
    row_offsets : Tensor, shape (R + 1,)
        int64, R = ceil(M / V).
    col_indices : Tensor, shape (vectors,)
        int32, increasing in each vector row.
    values : Tensor, shape (..., vectors, V)
        One value per element, 4-bit integers included; zero in rows beyond M.
    shape : tuple of int
        (M, K).
    vector_length : int
        V.
    bits : int or None
        4, 8, 12 or 16; None for results (int32, int64 or float).
    signed : bool, default True
        Two's complement if true.
    scale : Tensor, optional
        float of shape () or (M, 1).

    Raises
    ------
    TypeError, ValueError
        As :meth:`check_format`.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> A = mc.BCRS.from_dense(torch.eye(8, 16, dtype=torch.int8), vector_length=8)
    >>> A.col_indices.tolist(), A.values.shape
    ([0, 1, 2, 3, 4, 5, 6, 7], torch.Size([8, 8]))
    """

    _VALUE_NDIM = 2
    _INDICES = ("row_offsets", "col_indices")
    _INTEGERS = ("vector_length",)

    def __init__(
        self,
        row_offsets: Tensor,
        col_indices: Tensor,
        values: Tensor,
        *,
        shape: tuple[int, int],
        vector_length: int,
        bits: int | None,
        signed: bool = True,
        scale: Tensor | None = None,
    ) -> None:
        self.row_offsets = row_offsets
        self.col_indices = col_indices
        super().__init__(shape, vector_length, values, scale, bits, signed)

    @classmethod
    def from_dense(
        cls,
        dense: Tensor,
        *,
        vector_length: int = 8,
        bits: int = 8,
        signed: bool = True,
        scale: Granularity | None = None,
        clip: Clip = "max",
        rounding: Rounding = "nearest",
        axis: int | None = NOT_GIVEN,
    ) -> BCRS:
        """Convert a dense matrix; arguments as for :meth:`SRBCRS.from_dense`."""
        parts = dense_parts(dense, vector_length, bits, signed, axis_of(scale, axis), clip, rounding)
        return cls._from_parts(parts, bits, signed)

    @classmethod
    def from_mask(
        cls,
        values: Tensor,
        mask: Tensor,
        *,
        vector_length: int,
        bits: int,
        signed: bool = True,
        scale: Granularity | None = None,
        axis: int | None = NOT_GIVEN,
    ) -> BCRS:
        """Convert the vectors of a mask; arguments as for :meth:`SRBCRS.from_mask`."""
        parts = mask_parts(values, mask, vector_length, bits, signed, axis_of(scale, axis))
        return cls._from_parts(parts, bits, signed)

    @classmethod
    def from_pattern(
        cls,
        pattern: Pattern,
        vectors: Tensor,
        *,
        bits: int | None,
        signed: bool = True,
        scale: Tensor | None = None,
    ) -> BCRS:
        """Make a matrix of values on a pattern; arguments as for :meth:`SRBCRS.from_pattern`."""
        return cls._from_parts(pattern_parts(pattern, vectors, bits, signed, scale), bits, signed)

    @classmethod
    def _from_parts(cls, parts: Parts, bits: int | None, signed: bool) -> BCRS:
        pattern = parts.pattern
        matrix = cls(
            pattern.row_offsets,
            pattern.col_indices,
            parts.vectors.contiguous(),
            shape=pattern.shape,
            vector_length=pattern.vector_length,
            bits=bits,
            signed=signed,
            scale=parts.scale,
        )
        matrix._cache["pattern"] = pattern
        return matrix._trust() if pattern.is_current else matrix

    def vectors(self) -> Tensor:
        """Return the values, (..., vectors, V)."""
        return self.values

    def to_srbcrs(self, stride: int = 32) -> Any:
        """Return the matrix in SR-BCRS with `stride` 16, 32 or 64."""
        return self._formats["SRBCRS"].from_bcrs(self, stride)

    def _rows(self, pattern: Pattern, vectors: Tensor, scale: Tensor | None) -> BCRS:
        return self._from_parts(Parts(pattern, vectors, scale), self.bits, self.signed)

    def _derive_pattern(self) -> Pattern:
        pattern = Pattern(self.shape, self.vector_length, self.row_offsets, self.col_indices)
        return pattern if self._seen is None else pattern._trust()

    def _is_valid(self, stamp: Stamp) -> bool:
        return is_valid(self, stamp, 1, self.bits, self.signed)

    def _scan(self) -> None:
        self._derive_pattern().refresh()

    def _stored_dtype(self, bits: int) -> torch.dtype:
        return value_dtype(bits, self.signed)

    def _check_structure(self) -> None:
        rows = vector_rows(self.shape[0], self.vector_length)
        check_tensor("row_offsets", self.row_offsets, dtype=torch.int64, ndim=1, length=rows + 1, device=self.device)
        check_tensor("col_indices", self.col_indices, dtype=torch.int32, ndim=1, device=self.device)

    def _value_shape(self) -> tuple[int, ...]:
        return (self.col_indices.shape[0], self.vector_length)

    def _check_layout(self) -> None:
        """Nothing beyond the scan of the pattern."""
