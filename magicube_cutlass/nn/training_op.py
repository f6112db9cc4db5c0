"""What the operators of compiled training steps share: layers found by number, and how a gradient is joined."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

LayerT = TypeVar("LayerT")


class NumberedLayers(Generic[LayerT]):
    """Living layers by number; `kind` names their class in errors.

    Examples
    --------
    >>> layers, layer = NumberedLayers("Linear"), torch.nn.Linear(2, 2)
    >>> layers.find(layers.register(layer)) is layer
    True
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._layers: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._numbers = count(1)

    def register(self, layer: LayerT) -> int:
        """Return a number under which an operator finds this layer while it lives."""
        number = next(self._numbers)
        self._layers[number] = layer
        return number

    def find(self, number: int) -> LayerT:
        """Return the living layer of this number; `RuntimeError` if there is none."""
        found: LayerT | None = self._layers.get(number)
        if found is None:
            raise RuntimeError(f"a compiled graph needs the {self.kind} it was traced with, number {number}: it is "
                               "gone or belongs to another process")  # fmt: skip
        return found


def fake_gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and dtypes of the gradients of x, weight and bias, (0,) where `needed` says no."""
    found = [
        grad.new_empty(0) if each is None or not wanted else each.new_empty(each.shape)
        for each, wanted in zip((x, weight, bias), needed, strict=True)
    ]
    return found[0], found[1], found[2]


def join_gradient(forward: str, backward: str, gradients: Callable[..., tuple[Tensor, ...]], kind: str) -> None:
    """Make the operator `backward`, called by `gradients`, the gradient of `forward` (x, weight, bias, number)."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.number = inputs[3]

    def of_all(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = list(ctx.needs_input_grad[:3])
        found = gradients(grad, *ctx.saved_tensors, ctx.number, needed)
        return (*(each if wanted else None for each, wanted in zip(found, needed, strict=True)), None)

    def no_second_derivative(*_: Any) -> None:
        raise RuntimeError(f"{kind} has no second derivative: its gradients cannot be differentiated")

    torch.library.register_autograd(forward, of_all, setup_context=save)
    torch.library.register_autograd(backward, no_second_derivative)
