"""``torch.ops.residual.matmul``: the product as a torch operator with a fake and a straight-through gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magicube_cutlass.dispatch.register import register_op
from residual.execute.checked import compute
from residual.operand.operand import in_slot
from residual.options import check_request


def _matmul(
    a: Tensor,
    b: Tensor,
    slot: int,
    tol: float | None,
    mode: str,
    bits: int | None,
    out_dtype: torch.dtype,
    on_failure: str,
    seed: int | None,
) -> Tensor:
    """``a b`` as :func:`residual.matmul`; ``slot``: number of the :class:`Prepared` of ``b``, or -1."""
    request = check_request(a, b, tol, mode, bits, out_dtype, on_failure, seed)
    right = None if slot < 0 else in_slot(slot).serving(b)
    return compute(a, b, request, right)[0]


def _fake(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of the exact product, in the operands' dtypes."""
    a, b = ctx.saved_tensors
    of_a = grad.to(b.dtype) @ b.mT if ctx.needs_input_grad[0] else None  # (M, K)
    of_b = a.mT @ grad.to(a.dtype) if ctx.needs_input_grad[1] else None  # (K, N)
    left = None if of_a is None else of_a.to(a.dtype)
    right = None if of_b is None else of_b.to(b.dtype)
    return left, right, None, None, None, None, None, None, None


product = register_op("residual::matmul", _matmul, _fake)
torch.library.register_autograd("residual::matmul", _backward, setup_context=_save)
