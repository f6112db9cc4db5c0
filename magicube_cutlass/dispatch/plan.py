"""Checked products, their kernels, and the packed operands that kernels read.

An operand is packed once and cached on the matrix or the pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.dtypes import ElementType, Integer, from_constant
from cute_kernels.machine import MMA_COLUMNS, Problem, ProblemTypes
from cute_kernels.operands import Vectors
from magicube_cutlass.dispatch import cpu_float as float_products
from magicube_cutlass.dispatch.machine import get_machine
from magicube_cutlass.formats.construct import indexable_view, transpose_parts
from magicube_cutlass.quantization.float_operands import raw_bits

if TYPE_CHECKING:
    from cute_kernels.spmm.heuristics import SpmmKernel
    from magicube_cutlass.formats.pattern import Pattern
    from magicube_cutlass.formats.srbcrs import SRBCRS
    from magicube_cutlass.quantization.float_operands import DenseFloats
    from magicube_cutlass.quantization.quant_tensor import QuantTensor


class SpmmProblem(NamedTuple):
    """A checked product ``C = A B``; scales are float32 and contiguous, None for integer output."""

    matrix: SRBCRS  # (M, K)
    dense: QuantTensor | DenseFloats  # (*batch, K, N)
    lhs: ElementType
    rhs: ElementType
    packed_dim: int  # of B's storage, if 4 bits
    out_dtype: torch.dtype
    row_scale: Tensor | None  # () or (M,)
    col_scale: Tensor | None  # (), (N,) or (*batch, N)
    bias: Tensor | None  # (M,) float32

    @property
    def batch(self) -> torch.Size:
        """Leading dimensions of B and C."""
        return self.dense.shape[:-2]

    @property
    def n(self) -> int:
        """Columns of B and C."""
        return int(self.dense.shape[-1])


def transposed(matrix: SRBCRS) -> SRBCRS:
    """Return the transpose of the values of a matrix, without their scale; cached."""
    found: SRBCRS | None = matrix._execution.get("transposed")
    if found is None:
        parts = transpose_parts(matrix.pattern, matrix.vectors(), None)
        found = matrix._from_parts(parts, matrix.bits, matrix.signed, matrix.stride, matrix.packed)
        matrix._execution["transposed"] = found
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def size_bucket(n: int) -> int:
    """Return the smallest of 16, 24, 32, 48, 64, 96, ... not below `n`; comparisons keep `n` symbolic for a compiler.

    Examples
    --------
    >>> [size_bucket(n) for n in (1, 17, 25, 100)]
    [16, 24, 32, 128]
    """
    power = 16
    while power < n:
        power *= 2
    return power * 3 // 4 if 16 < n <= power * 3 // 4 else power


def spmm_problem(
    matrix: SRBCRS, rhs: ElementType, out: torch.dtype, n: int, batch: int, vector_length: int | None = None
) -> tuple[ProblemTypes, Problem]:
    """Return the types and sizes on which kernel selection depends.

    Parameters
    ----------
    matrix : SRBCRS
        Sparse operand.
    rhs : Integer or FloatFormat
        Element type of B.
    out : torch.dtype
        Output dtype.
    n, batch : int
        Columns and matrices of B.
    vector_length : int, optional
        V of the kernel. Default: that of the matrix, on a GPU at least the columns of the MMA.
    """
    if vector_length is None:
        vector_length = matrix.vector_length if matrix.device.type == "cpu" else max(matrix.vector_length, MMA_COLUMNS)
    assert matrix.element_type is not None  # the caller has refused results
    kind = ProblemTypes(vector_length, matrix.element_type, rhs, _name(out))
    return kind, problem(matrix.pattern, vector_length, n, batch)


def problem(pattern: Pattern, vector_length: int, n: int, batch: int) -> Problem:
    """Return the sizes of a product with a matrix of this pattern, its vectors merged to this length."""
    key = ("problem", vector_length)
    if key not in pattern._cache:
        longer = pattern if vector_length == pattern.vector_length else pattern.merge_map(vector_length).pattern
        lengths = longer.row_lengths
        longest = int(lengths.max()) if lengths.numel() else 0
        pattern._cache[key] = longer.vector_rows, longer.shape[1], longer.vectors, longest
    rows, inner, vectors, most = pattern._cache[key]
    return Problem(rows, inner, vectors, most, n, batch)


def _vectors(matrix: SRBCRS, vector_length: int) -> Vectors:
    """The sparse operand in vectors of this length, merged if those of the matrix are shorter."""
    pattern, values, number = matrix.pattern, matrix.vectors(), matrix.element_type
    assert number is not None  # the caller has refused results
    if not isinstance(number, Integer):
        values = raw_bits(values, number)
    if vector_length != matrix.vector_length:
        pattern, positions, parts = pattern.merge_map(vector_length)
        times = vector_length // matrix.vector_length
        longer = values.new_zeros(pattern.vectors, times, matrix.vector_length)
        indexable_view(longer)[positions, parts] = indexable_view(values)
        values = longer.flatten(1)
    return Vectors(pattern.row_offsets, pattern.col_indices, values, number)


def plan_spmm(
    matrix: SRBCRS,
    rhs: ElementType,
    out: torch.dtype,
    width: int,
    batch: int,
    atom: str | None,
    config: SpmmKernel | None,
    transposes: bool = False,
) -> tuple[str, list[Tensor]]:
    """Return the name of the kernel and the packed operand for it.

    Parameters
    ----------
    matrix : SRBCRS
        Sparse operand.
    rhs : Integer or FloatFormat
        Element type of B.
    out : torch.dtype
        Output dtype.
    width : int
        :func:`size_bucket` of B's columns.
    batch : int
        1 for a single matrix, 2 for several.
    atom, config
        As for :func:`magicube_cutlass.spmm`.
    transposes : bool, default False
        Whether a kernel may be chosen that writes the transpose of C.
    """
    from cute_kernels.spmm.heuristics import check_spmm, choose_spmm

    key = (rhs, out, width, batch, atom, config, transposes)
    plan = matrix._execution.get(key)
    if plan is None:
        length = None
        if config is not None and config.vector_length % matrix.vector_length:
            raise ValueError(f"config must be for vectors of a multiple of {matrix.vector_length} rows, "
                             f"got one for {config.vector_length}")  # fmt: skip
        if config is not None:
            if config.transposed:
                raise ValueError(f"config must not be transposed, got {config.name}: the output is (M, N)")
            length = config.vector_length
        kind, sizes = spmm_problem(matrix, rhs, out, width, batch, length)
        if config is None:
            machine = get_machine(matrix.device.index)
            config = choose_spmm(kind, machine, sizes, atom, matrix.single_use, transposes)
        check_spmm(config, kind, sizes.longest)
        stored = (config.vector_length, *config.packing_key())
        copy = matrix._execution.get(stored)
        if copy is None:
            vectors = _vectors(matrix, config.vector_length)
            copy = matrix._execution[stored] = list(config.pack(vectors, matrix.shape[1]))
        plan = matrix._execution[key] = (config.name, copy)
    return plan


def plan_constant(
    matrix: SRBCRS, planner: Callable[..., tuple[str, list[Tensor]]], rhs: ElementType | str, *arguments: Any
) -> tuple[str, list[Tensor]]:
    """Return the plan for B's element type by its :func:`constant_of`, as a compiler passes it."""
    return planner(matrix, from_constant(rhs), *arguments)


def engine_index(pattern: Pattern, stride: int) -> list[Tensor]:
    """Return `row_start`, `row_end` and `col_indices` of a padded pattern for the CPU engine; cached."""
    copies: list[Tensor] | None = pattern._cache.get(("engine", stride))
    if copies is None:  # kernels trust the structure that was scanned, whatever is written to the pattern
        padded = pattern.padded(stride)
        copies = [each.clone() for each in (padded.row_start, padded.row_end, padded.col_indices)]
        pattern._cache["engine", stride] = copies
    return copies


def plan_sddmm(
    pattern: Pattern,
    stride: int,
    types: tuple[ElementType | str, ElementType | str],
    out: torch.dtype,
    inner: int,
    atom: str | None,
) -> tuple[str, list[Tensor]]:
    """Return the name of the kernel and what it reads of the pattern.

    `types`: those of X and Y, or their :func:`constant_of`; `inner`: :func:`size_bucket` of K.
    """
    kinds = from_constant(types[0]), from_constant(types[1])
    if pattern.device.type == "cpu":
        whole = all(isinstance(each, Integer) for each in kinds)
        name = "cpu" if whole else float_products.PREFIX + ":".join(each.name for each in kinds)
        return name, engine_index(pattern, stride)
    from cute_kernels.machine import ProblemTypes
    from cute_kernels.sddmm.heuristics import choose_sddmm

    kind = ProblemTypes(pattern.vector_length, *kinds, _name(out))
    padded = pattern.padded(stride)
    config = choose_sddmm(
        kind,
        get_machine(pattern.device.index),
        stride=stride,
        inner=inner,
        atom=atom,
        vector_rows=pattern.vector_rows,
        vectors=pattern.vectors,
        columns=pattern.shape[1],
    )
    key = config.index_key()
    if key not in pattern._cache:
        index = config.index(pattern.row_offsets, pattern.col_indices, padded.row_start, pattern.shape[1])
        pattern._cache[key] = index
    return config.name, [pattern._cache[key], padded.col_indices]
