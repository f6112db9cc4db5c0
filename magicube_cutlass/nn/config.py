"""Options of a layer with quantized sparse weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from cute_kernels.integers import check_bits
from magicube_cutlass.checks import check_vector_length

__all__ = ["SparseQuantConfig"]


@dataclass(frozen=True)
class SparseQuantConfig:
    """Options of :class:`SparseQuantLinear`.

    Parameters
    ----------
    sparsity : float, default 0.9
        Share of the V x 1 vectors of the weight that are dropped, in [0, 1].
    vector_length : int, default 8
        V, consecutive outputs that share their inputs: 1, 2, 4, 8, 16 or 32.
    bits : int, default 8
        Width of the weights, which have per-row (output) scales.
    act_bits : int, default 8
        Width of the activations, with per-token scales (dynamic), or one scale after a calibration (static).
    grad_bits : int or None, default 16
        Width of the gradients in the backward pass; None for dense float products.

    Raises
    ------
    ValueError
        For other values.

    Examples
    --------
    >>> import magicube_cutlass as mc
    >>> mc.nn.SparseQuantConfig(sparsity=0.8, bits=4).act_bits
    8
    """

    sparsity: float = 0.9
    vector_length: int = 8
    bits: int = 8
    act_bits: int = 8
    grad_bits: int | None = 16

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity <= 1:
            raise ValueError(f"sparsity must lie in [0, 1], got {self.sparsity!r}")
        check_vector_length(self.vector_length)
        check_bits(self.bits)
        check_bits(self.act_bits, "act_bits")
        if self.grad_bits is not None:
            check_bits(self.grad_bits, "grad_bits")

    def to_tensor(self) -> Tensor:
        """Return the options as bytes of JSON, uint8, so that a state dict holds tensors only."""
        return torch.tensor(list(json.dumps(asdict(self)).encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, stored: Tensor) -> SparseQuantConfig:
        """Return the options of :meth:`to_tensor`; `ValueError` for anything else."""
        try:
            return cls(**json.loads(bytes(stored.cpu().tolist())))
        except (TypeError, ValueError) as error:
            raise ValueError(f"stored must hold the options of a SparseQuantLinear, got {error}") from error
