"""Prepared products of one weight with float rows that the call quantizes: ``f(q(X) W^T * scale * x_scale + bias)``.

The weight is sparse or packed as the right operand of the dense kernel; both give the same bits. A call checks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.cpu import extension
from cute_kernels.cpu.arguments import OUT_TYPES, SparseOperand, check_sparse
from cute_kernels.cpu.calls import MASK_COLUMNS, column_major_template, sparse_handle, template, with_masks
from cute_kernels.cpu.dense import PackedRight

_FEW_ROWS = 16  # up to so many rows, the engine's kernels of few columns are faster; they write columns only
FUNCTIONS = (
    None,
    "relu",
    "gelu",
    "gelu_tanh",
    "silu",
)  # of a dense product, in the order of engine and kernels


@dataclass(frozen=True)
class PackedLeft:
    """Sparse weight (M, K) of at most 8 bits, made by :func:`pack_left`; its tensors must not be changed."""

    shape: tuple[int, int]  # (M, K)
    operand: SparseOperand
    handle: object  # of the engine: addresses of the operand's tensors


def pack_left(a: SparseOperand, rows: int | None = None) -> PackedLeft:
    """Return a sparse weight for :class:`LinearCall`, with what calls of this number of rows read the fastest.

    Raises
    ------
    TypeError, ValueError
        If its tensors do not fit each other, or it has more than 8 bits.
    """
    check_sparse(a)
    if a.bits > 8:
        raise ValueError(f"bits of a must be 4 or 8, got {a.bits}")
    if rows is not None and rows <= MASK_COLUMNS:
        a = with_masks(a)
    return PackedLeft((a.rows, a.columns), a, sparse_handle(extension.load_extension(), a))


class LinearCall:
    """Product of one weight with rows of one number and memory stride, quantized per row or by a given scale.

    Parameters
    ----------
    weight : PackedLeft or PackedRight
        (M, K) sparse, or (K, M) dense.
    rows : int
        N.
    row_elements : int
        From one row of X to the next.
    bits : int
        Width of q(X), 4 or 8; to nearest.
    dtype : torch.dtype
        float32, float16 or bfloat16, of the output.
    column_major : bool, default False
        Memory order of the output. That of a sparse weight is column-major too for up to 16 rows.
    x_dtype : torch.dtype, default torch.float32
        float32, float16 or bfloat16, of X.
    """

    def __init__(
        self, weight: PackedLeft | PackedRight, rows: int, row_elements: int, bits: int, dtype: torch.dtype,
        column_major: bool = False, x_dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        engine, high = extension.load_extension(), float(2 ** (bits - 1) - 1)
        self._handle, self._owner, self._is_dense = weight.handle, weight, isinstance(weight, PackedRight)
        turns = not (self._is_dense or column_major or rows <= _FEW_ROWS)
        self._transposed, m = column_major or not (self._is_dense or turns), _features(weight)
        self._like = template((m, rows) if self._transposed else (rows, m), dtype)
        self._before = row_elements, -high - 1, high, rows
        self._after: tuple[int, ...] = (OUT_TYPES[dtype],)
        if self._is_dense:
            self._after = (*((1, rows) if column_major else (m, 1)), OUT_TYPES[dtype])
        self._last = (0, 0, OUT_TYPES[x_dtype]) if self._is_dense else (turns, OUT_TYPES[x_dtype])
        self._scales, self._run = engine.Scales, engine.linear if self._is_dense else engine.sparse_linear

    def __call__(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        scale: Tensor | None,
        bias: Tensor | None,
        factors: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """Return the product.

        Parameters
        ----------
        x : Tensor, shape (N, K)
            Contiguous rows.
        x_scale : Tensor or None, shape ()
            A given float32 scale; None: one per row.
        scale : Tensor or None, shape (), (M,) or (M, 1)
            float32, contiguous.
        bias : Tensor or None, shape (M,)
            float32, contiguous.
        factors : Tensor, shape (K,), optional
            float32, contiguous; the columns of X are multiplied by them before. For a dense weight only.
        activation : str, optional
            f, one of ``FUNCTIONS``, applied in float32 before the output is rounded. For a dense weight only.

        Returns
        -------
        Tensor, shape (N, M)
        """
        out = torch.empty_like(self._like, memory_format=torch.contiguous_format)
        of_weight, is_one = (0, False) if scale is None else (scale.data_ptr(), scale.ndim == 0)
        of_bias = 0 if bias is None else bias.data_ptr()
        if self._is_dense:
            scales = self._scales(0, of_weight, of_bias, 0, 0, False, is_one)
        else:
            scales = self._scales(of_weight, 0, of_bias, 0, 0, is_one, False)
        row_elements, low, high, rows = self._before
        last = self._last
        if factors is not None or activation is not None:
            last = 0 if factors is None else factors.data_ptr(), FUNCTIONS.index(activation), last[-1]
        self._run(
            self._handle, x.data_ptr(), row_elements, 0 if x_scale is None else x_scale.data_ptr(), low, high, scales,
            rows, out.data_ptr(), *self._after, torch.get_num_threads(), *last,
        )  # fmt: skip
        return out.t() if self._transposed else out


def _features(weight: PackedLeft | PackedRight) -> int:
    """M of a weight."""
    return weight.shape[1] if isinstance(weight, PackedRight) else weight.shape[0]


class IntegerLinearCall:
    """As :class:`LinearCall`, for 8 bits, with the integers and scales of X as results: a backward pass reads them.

    Parameters
    ----------
    weight, rows, row_elements, dtype
        As for :class:`LinearCall`.
    is_given : bool
        Whether calls have a scale of X.
    """

    def __init__(
        self, weight: PackedLeft | PackedRight, rows: int, row_elements: int, dtype: torch.dtype, is_given: bool
    ) -> None:
        engine, m = extension.load_extension(), _features(weight)
        k = weight.shape[0] if isinstance(weight, PackedRight) else weight.shape[1]
        self._owner = weight  # keeps the memory that the engine reads
        self._prepared = engine.IntegerLinear(weight.handle, rows, row_elements, is_given, OUT_TYPES[dtype])
        self._ints, self._row_scales = template((rows, k), torch.int8), template((rows, 1), torch.float32)
        self._like, self._run = column_major_template((rows, m), dtype), engine.integer_linear

    def __call__(
        self, x: Tensor, x_scale: Tensor | None, scale: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the product (N, M), column-major, the integers (N, K) and their scale, (N, 1) or as given."""
        ints = torch.empty_like(self._ints, memory_format=torch.contiguous_format)
        if x_scale is None:
            x_scale = torch.empty_like(self._row_scales, memory_format=torch.contiguous_format)
        out = torch.empty_like(self._like)
        of_weight, is_one = (0, False) if scale is None else (scale.data_ptr(), scale.ndim == 0)
        self._run(
            self._prepared, x.data_ptr(), ints.data_ptr(), x_scale.data_ptr(), of_weight, is_one,
            0 if bias is None else bias.data_ptr(), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out, ints, x_scale
