"""Constructors of SR-BCRS: from dense, masked, sparse and file input."""

from __future__ import annotations

from abc import abstractmethod
from os import PathLike
from typing import Any, Self

from torch import Tensor

from cute_kernels.cpu import engine
from cute_kernels.integers import store
from magicube_cutlass.checks import NOT_GIVEN, Granularity, axis_of, check_stride, check_tensor, check_vector_length
from magicube_cutlass.formats.base import CompressedMatrix
from magicube_cutlass.formats.construct import (
    Clip,
    Parts,
    Rounding,
    check_masked,
    compress_on_gpu,
    dense_integers,
    dense_parts,
    float_parts,
    mask_parts,
    masked_integers,
    pattern_parts,
    scipy_parts,
    smtx_parts,
    takes_floats,
    torch_sparse_parts,
)
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.quantization.float_tensor import ScaledFloatTensor


def _engine_takes(dense: Tensor) -> bool:
    """Whether the CPU engine compresses this matrix."""
    return dense.device.type == "cpu" and dense.numel() > 0 and engine.available()


class SRBCRSConstructors(CompressedMatrix):
    """Base of :class:`SRBCRS` with its ``from_*`` constructors."""

    @classmethod
    @abstractmethod
    def _from_parts(cls, parts: Parts, bits: int | None, signed: bool, stride: int, packs: bool = False) -> Self:
        """The matrix of `parts`; `packs`: the vectors are e4m3 that become packed e2m1."""

    @classmethod
    @abstractmethod
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
        """The matrix of row_start, row_end, col_indices and values, in the shape of `dense`."""

    @classmethod
    def from_dense(
        cls,
        dense: Tensor | ScaledFloatTensor,
        *,
        vector_length: int = 8,
        bits: int | None = None,
        signed: bool = True,
        stride: int = 32,
        scale: Granularity | None = None,
        clip: Clip = "max",
        rounding: Rounding = "nearest",
        dtype: str | None = None,
        axis: int | None = NOT_GIVEN,
    ) -> Self:
        """Convert a dense matrix: keep the vectors with a nonzero element.

        Floats are quantized; the vectors are selected before, so an element that rounds to zero stays stored. Integers
        are taken as they are, without a scale.

        Parameters
        ----------
        dense : Tensor or ScaledFloatTensor, shape (M, K)
            Floats, integers, float8 tensors (taken as they are), or a ScaledFloatTensor with a per-tensor or per-row
            scale.
        vector_length : int, default 8
            V.
        bits : int, optional
            4, 8, 12 or 16; default 8.
        signed : bool, default True
            Two's complement if true.
        stride : int, default 32
            16, 32 or 64.
        scale : {"tensor", "row"}, default "tensor"
            What shares a scale.
        clip, rounding
            As for :func:`magicube_cutlass.quantize`.
        dtype : str, optional
            Floats instead of integers: ``"float16"`` or ``"bfloat16"`` without a scale, or ``"e5m2"``, ``"e4m3"`` or
            ``"e2m1"`` with scales.
        axis : int, optional
            Deprecated: 1 for ``scale="row"``.

        Returns
        -------
        SRBCRS

        Raises
        ------
        TypeError
            For bool or complex values.
        ValueError
            For integers out of range, ``scale="column"``, inf or NaN.

        Examples
        --------
        >>> import torch, magicube_cutlass as mc
        >>> mc.SRBCRS.from_dense(torch.eye(8), vector_length=8).to_dense()[0, 0].item()
        1.0
        """
        axis = axis_of(scale, axis)
        check_stride(stride)
        if takes_floats(dense, bits, dtype, signed, clip, rounding):
            return cls._of_floats(dense, None, vector_length, stride, dtype, axis)
        assert not isinstance(dense, ScaledFloatTensor)
        bits = 8 if bits is None else bits
        check_tensor("dense", dense, ndim=2)
        if dense.is_cuda and dense.numel():
            return cls._on_gpu(dense, None, vector_length, bits, signed, stride, axis, clip, rounding)
        if _engine_takes(dense):
            ints, factors, mask = dense_integers(dense, bits, signed, axis, clip, rounding)
            return cls._by_engine(ints, mask, vector_length, bits, signed, stride, factors)
        parts = dense_parts(dense, vector_length, bits, signed, axis, clip, rounding)
        return cls._from_parts(parts, bits, signed, stride)

    @classmethod
    def from_mask(
        cls,
        values: Tensor | ScaledFloatTensor,
        mask: Tensor,
        *,
        vector_length: int,
        bits: int | None = None,
        signed: bool = True,
        stride: int = 32,
        scale: Granularity | None = None,
        dtype: str | None = None,
        axis: int | None = NOT_GIVEN,
    ) -> Self:
        """Convert exactly the vectors with a true element in a mask, zeros included.

        Parameters
        ----------
        values : Tensor or ScaledFloatTensor, shape (M, K)
            As `dense` of :meth:`from_dense`. Elements outside the mask count as zero, also inside a stored vector; they
            are neither range-checked nor quantized.
        mask : Tensor, shape (M, K)
            bool.
        vector_length, bits, signed, stride, scale, dtype, axis
            As for :meth:`from_dense`.

        Examples
        --------
        >>> import torch, magicube_cutlass as mc
        >>> weight = torch.randn(64, 64)
        >>> mask = mc.prune(weight, sparsity=0.9, vector_length=8)
        >>> mc.SRBCRS.from_mask(weight, mask, vector_length=8, bits=8).pattern.vectors
        51
        """
        axis = axis_of(scale, axis)
        check_stride(stride)
        if takes_floats(values, bits, dtype, signed):
            return cls._of_floats(values, mask, vector_length, stride, dtype, axis)
        assert not isinstance(values, ScaledFloatTensor)
        bits = 8 if bits is None else bits
        check_masked(values, mask)
        if values.is_cuda and values.numel():
            return cls._on_gpu(values, mask, vector_length, bits, signed, stride, axis)
        if _engine_takes(values):
            ints, factors = masked_integers(values, mask, bits, signed, axis)
            return cls._by_engine(ints, mask, vector_length, bits, signed, stride, factors)
        return cls._from_parts(mask_parts(values, mask, vector_length, bits, signed, axis), bits, signed, stride)

    @classmethod
    def _of_floats(
        cls,
        values: Tensor | ScaledFloatTensor,
        mask: Tensor | None,
        vector_length: int,
        stride: int,
        dtype: str | None,
        axis: int | None,
    ) -> Self:
        """The vectors with a true element in `mask`, or with a nonzero element."""
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
    ) -> Self:
        """As :meth:`from_dense` and :meth:`from_mask`, by kernels; the pattern is derived on demand."""
        found, scale = compress_on_gpu(dense, mask, vector_length, bits, signed, stride, axis, clip, rounding)
        return cls._make(found, dense, vector_length, bits, signed, stride, scale)

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
    ) -> Self:
        """The vectors of `ints` with a true element in `mask`; the pattern is derived on demand."""
        check_vector_length(vector_length)
        start, end, columns, values = engine.compress_cpu(ints, mask, vector_length, stride)
        tensors = (start, end, columns, store(values, bits, signed))
        return cls._make(tensors, ints, vector_length, bits, signed, stride, scale)

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
    ) -> Self:
        """Make a matrix of values on a pattern.

        Parameters
        ----------
        pattern : Pattern, shape (M, K)
            Structure.
        vectors : Tensor, shape (..., vectors, V)
            Values in pattern order: integers of any dtype with `bits`, which are range-checked; floats or results with
            ``bits=None``. Rows beyond M are dropped.
        bits, signed, stride, scale
            As for :class:`SRBCRS`.

        Examples
        --------
        >>> import torch, magicube_cutlass as mc
        >>> pattern = mc.random_pattern(64, 64, sparsity=0.9, vector_length=8)
        >>> ones = torch.ones(pattern.vectors, 8, dtype=torch.int8)
        >>> int(mc.SRBCRS.from_pattern(pattern, ones, bits=8).to_dense().sum()) == pattern.nnz
        True
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
        scale: Granularity | None = None,
        axis: int | None = NOT_GIVEN,
    ) -> Self:
        """Convert a ``scipy.sparse`` matrix or array.

        Explicit zeros are stored, duplicates are summed, floats are quantized; arguments as for :meth:`from_dense`.

        Examples
        --------
        >>> import scipy.sparse, magicube_cutlass as mc
        >>> mc.SRBCRS.from_scipy(scipy.sparse.eye(8, dtype="int8"), vector_length=1).nnz
        8
        """
        check_stride(stride)
        parts = scipy_parts(matrix, vector_length, bits, signed, axis_of(scale, axis))
        return cls._from_parts(parts, bits, signed, stride)

    @classmethod
    def from_torch_sparse(
        cls,
        tensor: Tensor,
        *,
        vector_length: int = 8,
        bits: int = 8,
        signed: bool = True,
        stride: int = 32,
        scale: Granularity | None = None,
        axis: int | None = NOT_GIVEN,
    ) -> Self:
        """Convert a torch tensor of layout COO, CSR, CSC or BSR.

        Explicit zeros are stored, duplicates are summed; arguments as for :meth:`from_dense`.

        Examples
        --------
        >>> import torch, magicube_cutlass as mc
        >>> mc.SRBCRS.from_torch_sparse(torch.eye(8, dtype=torch.int8).to_sparse(), vector_length=1).nnz
        8
        """
        check_stride(stride)
        parts = torch_sparse_parts(tensor, vector_length, bits, signed, axis_of(scale, axis))
        return cls._from_parts(parts, bits, signed, stride)

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
    ) -> Self:
        """Read the pattern of an ``.smtx`` file, one vector row per row, with random integers of the full range."""
        check_stride(stride)
        return cls._from_parts(smtx_parts(path, vector_length, bits, signed, seed), bits, signed, stride)
