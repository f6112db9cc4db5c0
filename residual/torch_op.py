"""The product as seen by autograd and compilers: a straight-through gradient and ``torch.ops.residual.matmul``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from magicube_cutlass.checks import has_dispatch_mode
from magicube_cutlass.dispatch.register import register_op
from residual.execute.quick import PLAIN, single_product
from residual.execute.start import compute, compute_known
from residual.operand.ieee import float_product
from residual.operand.operand import real_dtype
from residual.operand.prepared import PreparedOperand
from residual.options import Options, check_options, check_pair


def _matmul(
    a: Tensor,
    b: Tensor,
    tol: float | None,
    mode: str,
    bits: int | None,
    out_dtype: torch.dtype,
    seed: int | None,
    rungs: str,
    on_failure: str,
    flow: str,
) -> Tensor:
    """Return ``a b`` as :func:`residual.matmul`; `rungs`: joined by commas, empty for None."""
    check_pair(a, b)
    chosen = rungs.split(",") if rungs else None
    return _eager(a, b, None, check_options(tol, mode, bits, out_dtype, seed, chosen, on_failure, flow))


def _eager(a: Tensor, b: Tensor, prepared: PreparedOperand | None, options: Options) -> Tensor:
    """Return the product of checked operands, where autograd does not record."""
    found = single_product(a, b, prepared, options)
    return compute(a, b if prepared is None else prepared, options) if found is None else found


def _fake(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _flops(a: Tensor, b: Tensor, *_: Any, out_val: object = None, **options: object) -> int:
    """Return those of the product itself, whatever computes it."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the exact product, in the operands' dtypes."""
    a, b = ctx.saved_tensors
    work = torch.promote_types(real_dtype(a), real_dtype(b))
    grad = grad.to(work)
    of_a = float_product(grad, b.to(work).mT).to(a.dtype) if ctx.needs_input_grad[0] else None  # (M, K)
    of_b = float_product(a.to(work).mT, grad).to(b.dtype) if ctx.needs_input_grad[1] else None  # (K, N)
    return of_a, of_b


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_gradients(ctx, grad), *[None] * 8)


_operator = register_op("residual::matmul", _matmul, _fake)
register_flop_formula(_operator, get_raw=True)(_flops)
torch.library.register_autograd("residual::matmul", _backward, setup_context=_save)


class _Product(torch.autograd.Function):
    """The eager product with a gradient: cheaper than the operator's, and takes a prepared operand."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, prepared: PreparedOperand | None, options: Options) -> Tensor:
        ctx.save_for_backward(a, b)
        return _eager(a, b, prepared, options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*_gradients(ctx, grad), None, None)


def product(a: Tensor, b: Tensor, prepared: PreparedOperand | None, options: Options) -> Tensor:
    """Return the product with a straight-through gradient for `a` and `b`, of which `prepared` was made.

    Compilers see the operator, which prepares `b` at each call.
    """
    compiling = torch.compiler.is_compiling() or has_dispatch_mode() > 0
    is_plain = type(a) in PLAIN and type(b) in PLAIN
    if is_plain and not compiling:
        found = (compute_known if a.is_cuda else single_product)(a, b, prepared, options)
        if found is not None:
            return found
    check_pair(a, b)
    if compiling or not is_plain:
        return _operator(
            a, b, options.tol, options.mode, options.bits, options.result_dtype(a, b), options.seed,
            ",".join(options.rungs or ()), options.on_failure, options.flow,
        )  # fmt: skip
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Product.apply(a, b, prepared, options)
    return compute(a, b if prepared is None else prepared, options)
