"""Layers whose products have a chosen error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from residual.matmul import OnFailure
from residual.nn.linear import linear
from residual.operand.operand import Prepared

_OPTIONS = ("tol", "mode", "bits", "on_failure")


class ResidualLinear(nn.Module):
    """``y = x W^T + b`` with the product of :func:`residual.matmul`; the weight's digits are made once.

    ``weight`` (N, K) and ``bias`` (N,) or None are parameters of any float dtype, in the state dict under these names,
    together with ``tol``, ``mode``, ``bits`` and ``on_failure`` as extra state.  The digits follow the weight: where it
    was trained, loaded or moved they are made again at the next call (writes through ``weight.data`` are not seen).
    Gradients are straight-through.

    Raises ``ValueError`` or ``TypeError`` at the first call for options that :func:`residual.matmul` refuses.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        tol: float | None = None,
        mode: str = "auto",
        bits: int | None = None,
        on_failure: OnFailure = "raise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        plain = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.weight, self.bias = plain.weight, plain.bias
        self.tol, self.mode, self.bits, self.on_failure = tol, mode, bits, on_failure
        self._renew()

    @classmethod
    def from_linear(
        cls,
        layer: nn.Linear,
        *,
        tol: float | None = None,
        mode: str = "auto",
        bits: int | None = None,
        on_failure: OnFailure = "raise",
    ) -> ResidualLinear:
        """A layer that shares the parameters of ``layer``; raises ``TypeError`` unless that is an ``nn.Linear``."""
        if not isinstance(layer, nn.Linear):
            raise TypeError(f"layer must be a torch.nn.Linear, got {type(layer).__name__}")
        new = cls(1, 1, False, tol=tol, mode=mode, bits=bits, on_failure=on_failure)
        new.weight, new.bias = layer.weight, layer.bias
        new._renew()
        return new.train(layer.training)

    def _renew(self) -> None:
        self._prepared = Prepared(self.weight.t(), follows=True)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and not self._prepared.made_of(self.weight.t()):
            self._renew()
        return linear(
            x, self.weight, self.bias, tol=self.tol, mode=self.mode, bits=self.bits, prepared=self._prepared,
            on_failure=self.on_failure,
        )  # fmt: skip

    def get_extra_state(self) -> dict[str, Any]:
        """Return the options for the state dict."""
        return {name: getattr(self, name) for name in _OPTIONS}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`get_extra_state` returned."""
        for name in _OPTIONS:
            setattr(self, name, state[name])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ResidualLinear:
        super()._apply(fn, recurse)
        self._renew()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_prepared"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._renew()  # a copy has its own

    def extra_repr(self) -> str:
        """Return the options for ``repr``."""
        n, k = self.weight.shape
        wish = f"tol={self.tol:g}" if self.tol is not None else f"mode={self.mode}"
        return f"in_features={k}, out_features={n}, bias={self.bias is not None}, {wish}"
