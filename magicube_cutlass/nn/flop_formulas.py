"""Formulas of ``torch.utils.flop_counter`` for the torch operators: 2 per stored element and column, as for dense ones.

A counter is a dispatch mode, in which calls take the operators instead of their cached short ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from magicube_cutlass.attention.torch_op import sparse_attention, sparse_attention_backward
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.nn.dense import linear_op as dense_op
from magicube_cutlass.nn.linear_op import layer_of, sparse_linear, sparse_linear_backward, sparse_linear_rows
from magicube_cutlass.ops import torch_ops

_CPU_TENSORS = 5  # of a packed matrix of integers on a CPU


def stored_elements(matrix: list[Tensor], bits: int, device: str) -> int:
    """Return the stored elements of a packed sparse operand; on a GPU with the padding of its kernel.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> from magicube_cutlass.dispatch.cpu import pack_operand
    >>> A = mc.SRBCRS.from_dense(torch.eye(8, 16, dtype=torch.int8), vector_length=8)
    >>> stored_elements(pack_operand(A), 8, "cpu")
    64
    """
    if device == "cpu" and len(matrix) == _CPU_TENSORS:
        start, end, _, planes, _ = matrix
        return int((end - start).sum()) * planes.shape[-2]
    if device == "cpu":
        return matrix[1].numel()  # columns of a CSR matrix
    return max(each.nbytes for each in matrix) * 8 // max(4, 1 << (bits - 1).bit_length())


def _columns(out: Tensor) -> int:
    return out.numel() // max(out.shape[-2], 1)


def _spmm(matrix: list[Tensor], b: Tensor, *args: Any, out_val: Tensor) -> int:
    return 2 * stored_elements(matrix, args[6][0], b.device.type) * _columns(out_val)


def _spmm_out(matrix: list[Tensor], b: Tensor, *args: Any, out_val: object = None) -> int:
    out = args[-1]
    return 2 * stored_elements(matrix, args[4][0], b.device.type) * _columns(out)


def _sddmm(pattern: list[Tensor], x: Tensor, *args: Any, out_val: Tensor) -> int:
    shape, vector_length = args[3], args[4]
    vectors = int((pattern[-1] >= 0).sum())
    return 2 * vectors * vector_length * shape[2] * x.shape[:-2].numel()


def _none(*_: Any, out_val: object = None) -> int:
    return 0


def _attended(q: Tensor, masks: str) -> int:
    """Elements of the masks of all matrices."""
    each = [Pattern._alive(name).nnz for name in masks.split()]
    return sum(each[i % len(each)] for i in range(q.shape[0]))


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, masks: str, *_: Any, out_val: object) -> int:
    return 2 * _attended(q, masks) * (q.shape[-1] + v.shape[-1])


def _attention_backward(
    grad: object, grad_lse: object, q: Tensor, k: Tensor, v: Tensor, bias: object, masks: str, *_: Any, out_val: object
) -> int:
    return 2 * _attended(q, masks) * (3 * q.shape[-1] + 2 * v.shape[-1])  # the logits are made again


def _linear(x: Tensor, weight: object, bias: object, number: int, *, out_val: object) -> int:
    return 2 * layer_of(number).matrix().nnz * x.shape[0]


def _linear_rows(x: Tensor, bias: object, number: int, *, out_val: object) -> int:
    return _linear(x, None, bias, number, out_val=out_val)


def _linear_backward(
    grad: object, x: Tensor, weight: object, bias: object, number: int, needed: list[bool], *, out_val: object
) -> int:
    return _linear(x, weight, bias, number, out_val=out_val) * (needed[0] + needed[1])


def _quant_linear(x: Tensor, data: Tensor, *_: Any, out_val: object) -> int:
    return 2 * x.numel() * data.shape[0]


def _quant_linear_by_output(x: Tensor, *_: Any, out_val: Tensor) -> int:
    return 2 * x.numel() * out_val.shape[1]


def _quant_linear_backward(
    grad: Tensor, x: Tensor, weight: object, bias: object, number: int, needed: list[bool], *, out_val: object
) -> int:
    return 2 * x.numel() * grad.shape[1] * (needed[0] + needed[1])


_FORMULAS: tuple[tuple[object, Callable[..., int]], ...] = (
    (torch_ops.spmm, _spmm),
    (torch_ops.spmm_out, _spmm_out),
    (torch_ops.sddmm, _sddmm),
    (torch_ops.quantize, _none),
    (torch_ops.quantize_by, _none),
    (sparse_attention, _attention),
    (sparse_attention_backward, _attention_backward),
    (sparse_linear, _linear),
    (sparse_linear_rows, _linear_rows),
    (sparse_linear_backward, _linear_backward),
    (dense_op.quant_linear, _quant_linear),
    (dense_op.quant_linear_rows, _quant_linear_by_output),
    (dense_op.quant_linear_train, _quant_linear_by_output),
    (dense_op.quant_linear_backward, _quant_linear_backward),
)


def register_formulas() -> None:
    """Register the formulas; the package does when it loads."""
    for operator, formula in _FORMULAS:
        register_flop_formula(operator, get_raw=True)(formula)
