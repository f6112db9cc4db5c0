"""Options of layers with quantized weights, sparse or dense."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from cute_kernels.cpu.linear import FUNCTIONS
from cute_kernels.integers import check_bits
from magicube_cutlass.checks import check_vector_length
from magicube_cutlass.quantization.group_tensor import GROUP_SIZES

__all__ = ["ACTIVATIONS", "QuantConfig", "SparseQuantConfig"]

# weight format -> formats of the activations, the default first; "none" keeps them floats
ACTIVATIONS = {
    "int8": ("int8", "none"),
    "int4": ("int8", "none"),
    "e4m3": ("e4m3", "none"),
    "e4m3_b128": ("e4m3_g128", "e4m3", "none"),
    "mxfp4": ("mxfp8", "e4m3", "mxfp4", "none"),
    "nvfp4": ("nvfp4", "e4m3", "mxfp8", "none"),
}


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
        return torch.tensor(list(json.dumps(asdict(self)).encode()), dtype=torch.uint8, device="cpu")

    @classmethod
    def from_tensor(cls, stored: Tensor) -> SparseQuantConfig:
        """Return the options of :meth:`to_tensor`; `ValueError` for anything else."""
        try:
            return cls(**json.loads(bytes(stored.cpu().tolist())))
        except (TypeError, ValueError) as error:
            raise ValueError(f"stored must hold the options of a SparseQuantLinear, got {error}") from error


@dataclass(frozen=True)
class QuantConfig:
    """Options of :class:`QuantLinear`.

    Parameters
    ----------
    weight : {"int8", "int4", "e4m3", "e4m3_b128", "mxfp4", "nvfp4"}, default "int8"
        Format of the weights. Integers have a scale per row (output), or per group; e4m3 has one per row, e4m3_b128
        one per 128 outputs x 128 inputs.
    group_size : int, optional
        Inputs that share a scale of an integer weight: 16, 32, 64, 128 or 256. Default: all.
    symmetric : bool, default True
        Whether the integer 0 stands for 0.0. Otherwise groups have a minimum too.
    act : str, optional
        Format of the activations, per token or after a calibration with one scale: ``"int8"`` for integers, ``"e4m3"``,
        ``"mxfp8"``, ``"mxfp4"`` or ``"nvfp4"`` for floats, ``"e4m3_g128"`` (a scale per token and 128 inputs) for
        e4m3_b128; ``"none"``: weight-only. Default: ``"int8"`` for integers, ``"e4m3"`` for e4m3, ``"e4m3_g128"`` for
        e4m3_b128, ``"mxfp8"`` for mxfp4, ``"nvfp4"`` for nvfp4.
    clip : {"max", "mse"}, default "max"
        Ranges of an integer weight's groups: all values, or the range of least squared error.
    activation : {"relu", "gelu", "gelu_tanh", "silu"}, optional
        What the layer applies to its output: ``y = f(x W^T + b)``. ``"gelu"`` is the exact one, ``"gelu_tanh"`` that of
        ``nn.GELU("tanh")``. Default: nothing. See :func:`magicube_cutlass.nn.fuse_activations` for a whole model.

    Raises
    ------
    ValueError
        For other values, and group options of a float weight.

    Examples
    --------
    >>> import magicube_cutlass as mc
    >>> mc.nn.QuantConfig("int4", group_size=32)
    QuantConfig(weight='int4', group_size=32, symmetric=True, act='int8', clip='max', activation=None)
    """

    weight: str = "int8"
    group_size: int | None = None
    symmetric: bool = True
    act: str = ""
    clip: str = "max"
    activation: str | None = None

    def __post_init__(self) -> None:
        if self.weight not in ACTIVATIONS:
            raise ValueError(f"weight must be one of {tuple(ACTIVATIONS)}, got {self.weight!r}")
        if self.act in ("", None):
            object.__setattr__(self, "act", ACTIVATIONS[self.weight][0])
        if self.act not in ACTIVATIONS[self.weight]:
            raise ValueError(
                f"act must be one of {ACTIVATIONS[self.weight]} for weight={self.weight!r}, got {self.act!r}"
            )
        if self.activation not in FUNCTIONS:
            raise ValueError(f"activation must be one of {FUNCTIONS}, got {self.activation!r}")
        if self.clip not in ("max", "mse"):
            raise ValueError(f"clip must be 'max' or 'mse', got {self.clip!r}")
        if self.is_integer:
            if self.group_size is not None and self.group_size not in GROUP_SIZES:
                raise ValueError(f"group_size must be None or one of {GROUP_SIZES}, got {self.group_size!r}")
        elif self.group_size is not None or not self.symmetric or self.clip != "max":
            raise ValueError(f"group_size, symmetric and clip must keep their defaults for weight={self.weight!r}, got "
                             f"{self.group_size!r}, {self.symmetric!r} and {self.clip!r}")  # fmt: skip

    @property
    def is_integer(self) -> bool:
        """Whether the weights are integers."""
        return self.weight in ("int8", "int4")

    @property
    def kind(self) -> tuple[str, str, int | None]:
        """Formats of weights and activations, and the group of the weights' scales."""
        return self.weight, self.act, self.group_size

    @property
    def bits(self) -> int:
        """Bits of a weight, without its scales."""
        return 8 if self.weight in ("int8", "e4m3", "e4m3_b128") else 4

    def to_tensor(self) -> Tensor:
        """Return the options as bytes of JSON, uint8."""
        return torch.tensor(list(json.dumps(asdict(self)).encode()), dtype=torch.uint8, device="cpu")

    @classmethod
    def from_tensor(cls, stored: Tensor) -> QuantConfig:
        """Return the options of :meth:`to_tensor`; `ValueError` for anything else."""
        try:
            return cls(**json.loads(bytes(stored.cpu().tolist())))
        except (TypeError, ValueError) as error:
            raise ValueError(f"stored must hold the options of a QuantLinear, got {error}") from error
