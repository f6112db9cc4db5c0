"""The product of a matrix with floats on a CPU in one call of the engine, which quantizes them: sparse or dense.

Both kernels give the same bits, those of quantizing first. The dense one packs a copy of the matrix once.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.nn import Parameter

from cute_kernels.cpu import dense, engine, extension
from cute_kernels.cpu.calls import MASK_COLUMNS
from cute_kernels.cpu.linear import IntegerLinearCall, LinearCall, PackedLeft, PackedRight, pack_left
from cute_kernels.gemm.cpu import packs_weights
from magicube_cutlass.checks import has_dispatch_mode, is_transformed
from magicube_cutlass.dispatch import cpu_costs
from magicube_cutlass.dispatch.cpu import pack_operand
from magicube_cutlass.dispatch.dense_fallback import as_read, fits, packed_right
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.formats.tracking import MAX_RECORDS, NO_RECORDS, RECORDS, is_current, keep_record

_TENSORS = (Tensor, Parameter)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BITS = (4, 8)


class CpuLinear:
    """What products of one matrix (M, K) with float rows read of it, and their choice; kept on the matrix."""

    def __init__(self, matrix: SRBCRS) -> None:
        assert matrix.bits is not None
        start, end, columns, planes, sums = pack_operand(matrix)
        self.shape = m, k = matrix.shape
        operand = engine.SparseOperand(start, end, columns, planes, sums, m, k, matrix.bits, matrix.signed)
        self._sparse = pack_left(operand)
        self._few: PackedLeft | None = None  # for few tokens
        self.vectors, self.vector_length = matrix.pattern.vectors, matrix.vector_length
        self._choices: dict[int, bool] = {}

    def is_dense(self, tokens: int) -> bool:
        """Whether the dense kernel is predicted to be faster; chosen once for a number of tokens."""
        found = self._choices.get(tokens)
        if found is None:
            if len(self._choices) >= MAX_RECORDS:
                self._choices.clear()
            found = self._choices[tokens] = packs_weights() and self._predict(tokens)
        return found

    def _predict(self, tokens: int) -> bool:
        (m, k), stored = self.shape, self.vectors * max(self.vector_length, 4)  # shorter vectors take the time of 4
        if k > dense.MAX_K:
            return False
        sparse, by_dense = cpu_costs.get_costs().layer(m, k, stored, tokens, torch.get_num_threads())
        return by_dense < sparse

    def weight(self, matrix: SRBCRS, takes_dense: bool, tokens: int) -> PackedLeft | PackedRight:
        """Return what the kernel for these tokens reads of the matrix, each packed once; the dense one (K, M)."""
        if takes_dense:
            return packed_right(matrix)
        if tokens > MASK_COLUMNS:
            return self._sparse
        if self._few is None:
            self._few = pack_left(self._sparse.operand, tokens)
        return self._few


class _Record:
    """A product of one matrix with rows of one kind: what a call of the engine needs besides the operands."""

    def __init__(
        self, matrix: SRBCRS, owner: CpuLinear, x: Tensor, bias: Tensor | None, x_scale: Tensor | None,
        reads: tuple[torch.dtype, ...] = _DTYPES,
    ) -> None:  # fmt: skip
        self.m, k = owner.shape
        self.lead, self.rows = x.shape[:-1], x.shape[:-1].numel()
        self.weight = owner.weight(matrix, owner.is_dense(self.rows), self.rows)
        self.has_rows = _has_rows(x)
        self.x_dtype = x.dtype if x.dtype in reads else torch.float32
        self.copies_x = self.x_dtype is not x.dtype or not self.has_rows
        self.row_elements = k if self.copies_x or x.ndim > 2 else x.stride(0)
        given = x_scale is None or x_scale.dtype is torch.float32
        self.is_plain = not self.copies_x and given and fits(matrix.scale, self.m) and fits(bias, self.m)

    def operands(
        self, x: Tensor, x_scale: Tensor | None, scale: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return copies of the operands where the engine cannot read them in place."""
        if self.copies_x:
            x = x.to(self.x_dtype).contiguous()
        return x, None if x_scale is None else x_scale.float(), as_read(scale, self.m), as_read(bias, self.m)


class LinearRecord(_Record):
    """``q(x) A^T + bias`` for one matrix and one kind of x."""

    def __init__(
        self, matrix: SRBCRS, owner: CpuLinear, x: Tensor, bias: Tensor | None, bits: int, x_scale: Tensor | None
    ) -> None:
        super().__init__(matrix, owner, x, bias, x_scale)
        column_major = not self.has_rows or torch.is_grad_enabled()
        self._call = LinearCall(self.weight, self.rows, self.row_elements, bits, x.dtype, column_major, self.x_dtype)

    def __call__(self, x: Tensor, x_scale: Tensor | None, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the product, (..., M); `scale`: of the matrix."""
        if self.is_plain:
            y = self._call(x, x_scale, scale, bias)
        else:
            y = self._call(*self.operands(x, x_scale, scale, bias))
        return y if len(self.lead) == 1 else y.view(*self.lead, self.m)


class TrainingRecord(_Record):
    """As :class:`LinearRecord`, with the 8-bit integers (N, K) of x and their scale as results."""

    def __init__(
        self, matrix: SRBCRS, owner: CpuLinear, x: Tensor, bias: Tensor | None, x_scale: Tensor | None
    ) -> None:
        super().__init__(matrix, owner, x, bias, x_scale, reads=(torch.float32,))
        self._call = IntegerLinearCall(self.weight, self.rows, self.row_elements, x.dtype, x_scale is not None)

    def __call__(
        self, x: Tensor, x_scale: Tensor | None, scale: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the product, (..., M), the integers and the scale."""
        given = (x, x_scale, scale, bias) if self.is_plain else self.operands(x, x_scale, scale, bias)
        y, ints, x_scale = self._call(*given)
        return y if len(self.lead) == 1 else y.view(*self.lead, self.m), ints, x_scale


def _has_rows(x: Tensor) -> bool:
    """Whether the rows of `x` (..., K) are contiguous and have one memory stride."""
    return x.is_contiguous() or (x.ndim == 2 and (x.shape[1] == 1 or x.stride(1) == 1))


def kind_of(
    x: Tensor, bias: Tensor | None, bits: int, x_scale: Tensor | None, in_training: bool = False
) -> Hashable | None:
    """Return what a record depends on besides the matrix; None for operands that the engine does not read.

    Parameters
    ----------
    x : Tensor, shape (..., K)
        Floats.
    bias : Tensor or None, shape (M,)
        Float.
    bits : int
        Width of q(x).
    x_scale : Tensor or None, shape ()
        A given scale of x; None: one per row.
    in_training : bool, default False
        Whether the integers are results.
    """
    # a subclass may trace the operators
    if type(x) not in _TENSORS or x.dtype not in _DTYPES or not x.is_cpu or is_transformed(x):
        return None
    if x.is_neg() or x._is_zerotensor() or has_dispatch_mode():
        return None
    given = of_bias = None
    if x_scale is not None:
        is_one = x_scale.numel() == 1 and x_scale.is_floating_point() and x_scale.is_cpu
        if not is_one or x_scale.is_neg() or x_scale._is_zerotensor():
            return None  # the quantizer says what is wrong with it
        given = x_scale.dtype, x_scale.requires_grad
    if bias is not None:
        if not bias.is_cpu or bias.is_neg() or is_transformed(bias):
            return None
        of_bias = bias.shape, bias.dtype, bias.is_contiguous()
    # the memory order of the output is that of training where gradients are on
    return x.shape, x.stride(), x.dtype, bits, given, of_bias, torch.is_grad_enabled(), in_training


def _prepare(
    matrix: SRBCRS, x: Tensor, bias: Tensor | None, bits: int, x_scale: Tensor | None, in_training: bool
) -> LinearRecord | TrainingRecord | None:
    """A record; None for a matrix or sizes that the engine does not take."""
    if extension.ENGINE is None or matrix.device.type != "cpu" or matrix.batch_shape or 0 in matrix.shape:
        return None
    if matrix.bits not in _BITS or not matrix.signed or bits not in _BITS or (in_training and bits != 8):
        return None
    (m, k), scale = matrix.shape, matrix.scale
    if x.ndim < 2 or x.shape[-1] != k or x.numel() == 0 or (bias is not None and bias.shape != (m,)):
        return None
    if (scale is not None and scale.requires_grad) or (in_training and x_scale is not None and x_scale.requires_grad):
        return None
    if not is_current(matrix, matrix._seen):
        matrix.refresh()
    owner: CpuLinear | None = matrix._execution.get("linear")
    if owner is None:
        owner = matrix._execution["linear"] = CpuLinear(matrix)
    if not _has_rows(x) and (x.ndim > 2 or in_training or not owner.is_dense(x.shape[0])):
        return None  # the sparse product reads a row-major operand as it is
    if in_training:
        return TrainingRecord(matrix, owner, x, bias, x_scale)
    return LinearRecord(matrix, owner, x, bias, bits, x_scale)


def record_of(
    matrix: SRBCRS, x: Tensor, bias: Tensor | None, bits: int, x_scale: Tensor | None, in_training: bool = False
) -> LinearRecord | TrainingRecord | None:
    """Return the record for these operands, made at the first call of their kind; None if the engine takes them not.

    Parameters
    ----------
    matrix : SRBCRS, shape (M, K)
        Sparse operand.
    x, bias, bits, x_scale, in_training
        As for :func:`kind_of`.
    """
    kind, scale = kind_of(x, bias, bits, x_scale, in_training), matrix.scale
    if kind is None:
        return None
    if is_current(matrix, matrix._seen) and (scale is None or not scale.requires_grad):
        found: LinearRecord | TrainingRecord | None = matrix._execution.get(RECORDS, NO_RECORDS).get(kind)
        if found is not None:
            return found
    found = _prepare(matrix, x, bias, bits, x_scale, in_training)
    if found is not None:
        keep_record(matrix._execution, kind, found)
    return found


def linear(matrix: SRBCRS, x: Tensor, bias: Tensor | None, bits: int, x_scale: Tensor | None) -> Tensor | None:
    """Return ``q(x) A^T + bias``, (..., M), or None if the engine does not take the operands in one call.

    Parameters
    ----------
    matrix, x, bias, bits, x_scale
        As for :func:`record_of`; no gradient is wanted. The tokens of the result are contiguous, of a dense kernel its
        memory order is that of x.
    """
    record = record_of(matrix, x, bias, bits, x_scale)
    if record is None:
        return None
    assert isinstance(record, LinearRecord)
    return record(x, x_scale, matrix.scale, bias)
