"""Gradients without a derivative: a second one is an error, also where torch would take it as zero."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


class _Refuse(torch.autograd.Function):
    """The first `count` tensors, as functions of all of them that have no derivative."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.view_as(each) for each in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("cannot differentiate twice: the gradients of a sparse quantized product have no derivative")


def once(backward: Backward) -> Backward:
    """Return `backward` whose results refuse a derivative by whatever they depend on.

    ``torch.autograd.function.once_differentiable`` cuts them off from the gradients and the saved tensors, so that
    ``torch.autograd.functional.hessian`` finds zeros.
    """

    @wraps(backward)
    def first(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        anchor = torch.empty(0, requires_grad=True, device="cpu")  # so that the results need a gradient in any case
        given = [each for each in found if each is not None]
        sources = [each for each in (*grads, *ctx.saved_tensors) if each is not None and each.requires_grad]
        refusing = iter(_Refuse.apply(len(given), *given, *sources, anchor))
        return tuple(None if each is None else next(refusing) for each in found)

    return first
