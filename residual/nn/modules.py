"""Layers whose products have a chosen error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from residual.matmul import prepare_by
from residual.nn.linear import linear
from residual.operand.prepared import PreparedOperand
from residual.options import MatmulOptions, OnFailure, check_options

_OPTIONS = ("tol", "mode", "bits", "on_failure")


class ResidualLinear(nn.Module):
    """``y = x W^T + b`` with the product of :func:`residual.matmul`; the weight is prepared once.

    `weight` (N, K) and `bias` (N,) or None are parameters of any float dtype, in the state dict under these names,
    together with `tol`, `mode`, `bits` and `on_failure` as extra state. A weight that was trained, loaded or moved is
    prepared again at the next call; writes through ``weight.data`` are not seen. A prepared weight is immutable and
    published by one assignment, so that threads may share a layer. Gradients are straight-through. A compiled layer
    prepares its weight at each call, where its rungs need that: a graph passes tensors to an operator, and a
    `PreparedOperand` is none. Under a tolerance that float32 meets at once on a CPU, nothing is prepared.

    Raises ``ValueError`` or ``TypeError`` at the first call for options that :func:`residual.matmul` refuses.

    Examples
    --------
    >>> layer = ResidualLinear(64, 32, tol=1e-3)
    >>> layer(torch.ones(2, 64)).shape
    torch.Size([2, 32])
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
        self._prepared: PreparedOperand | None = None

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
        return new.train(layer.training)

    def _options(self) -> MatmulOptions:
        return {"tol": self.tol, "mode": self.mode, "bits": self.bits, "on_failure": self.on_failure}

    def _current(self) -> PreparedOperand | None:
        """Return the weight prepared as it is now; None for a compiler."""
        if torch.compiler.is_compiling():
            return None
        held, columns = self._prepared, self.weight.t()
        if held is None or not held.is_current(columns):
            held = prepare_by(columns, check_options(**self._options()))
            self._prepared = held
        return held

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W^T + b`` for `x` of shape (..., K)."""
        return linear(x, self.weight, self.bias, prepared=self._current(), **self._options())

    def get_extra_state(self) -> dict[str, Any]:
        """Return the options for the state dict."""
        return {name: getattr(self, name) for name in _OPTIONS}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`get_extra_state` returned."""
        for name in _OPTIONS:
            setattr(self, name, state[name])
        self._prepared = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": None}

    def extra_repr(self) -> str:
        """Return the options for ``repr``."""
        n, k = self.weight.shape
        wish = f"tol={self.tol:g}" if self.tol is not None else f"mode={self.mode}"
        return f"in_features={k}, out_features={n}, bias={self.bias is not None}, {wish}"
