"""What a layer of quantized sparse weights is made with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from cute_kernels.integers import check_bits
from magicube_cutlass.checks import check_vector_length


@dataclass(frozen=True)
class SparseQuantConfig:
    """Options of :class:`SparseQuantLinear`.

    Arguments:
        sparsity: share of the ``V x 1`` vectors of the weight that are left out, in [0, 1].
        vector_length: V, consecutive outputs that share their inputs; one of 1, 2, 4, 8, 16, 32.
        bits: width of the weight's integers, with a scale an output.
        act_bits: width of the activations' integers, with a scale a token, or one given scale after a calibration.
        grad_bits: width of the gradients' integers in the backward pass; None for dense float products there.
    Raises ``ValueError`` for values that these do not name.
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
        """The options as bytes of JSON, uint8, so that a state dict holds tensors only."""
        return torch.tensor(list(json.dumps(asdict(self)).encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, stored: Tensor) -> SparseQuantConfig:
        """What :meth:`to_tensor` made; raises ``ValueError`` for anything else."""
        try:
            return cls(**json.loads(bytes(stored.cpu().tolist())))
        except (TypeError, ValueError) as error:
            raise ValueError(f"stored must hold the options of a SparseQuantLinear, got {error}") from error
