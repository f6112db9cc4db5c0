"""The module that a parallel style makes of a linear layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from magicube_cutlass.autograd.integer import quantized
from magicube_cutlass.distributed.local_products import LayerPart, SparsePart
from magicube_cutlass.distributed.sharded_training import Learn, quantized_part
from magicube_cutlass.distributed.slices import Slices, quantize_slices
from magicube_cutlass.nn.weight_version import weight_version

__all__ = ["ShardedLinear"]


class ShardedLinear(nn.Module):
    """A rank's part of a linear layer, made by a parallel style.

    A sparse layer in training mode keeps its part of the master weight and learns; any other one is for inference, and
    its master is dropped.

    Attributes
    ----------
    part : LayerPart
        Integers of the weight.
    weight : Parameter or None
        This rank's part of the master, if the layer learns.
    bias : Tensor or None
        Of this rank's outputs; of all for Rowwise.
    mesh : DeviceMesh
        One dimension.
    style : ParallelStyle
        What the forward pass exchanges.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> from magicube_cutlass.distributed import SparseColwise, SparseRowwise, init_mesh
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    >>> report, x = mc.convert(model.eval()), torch.randn(3, 64)
    >>> with torch.no_grad():
    ...     expected = model(x)
    ...     plan = {"0": SparseColwise(), "2": SparseRowwise()}
    ...     torch.equal(parallelize_module(model, init_mesh("cpu"), plan)(x), expected)
    True
    """

    part: LayerPart
    weight: nn.Parameter | None
    bias: Tensor | None
    act_scale: Tensor | None

    def __init__(
        self,
        part: LayerPart,
        bias: Tensor | None,
        act_scale: Tensor | None,
        act_bits: int,
        mesh: DeviceMesh,
        style: Any,
        grad_bits: int | None = None,
    ) -> None:
        super().__init__()
        self.part, self.mesh, self.style, self.act_bits, self.grad_bits = part, mesh, style, act_bits, grad_bits
        self.register_parameter("weight", None)
        self._made_of: int | None = None  # version of the master
        for name, tensor in part.tensors().items():
            self.register_buffer(name, tensor)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_buffer("act_scale", act_scale)

    @property
    def bias_value(self) -> Any:
        """The bias without a graph."""
        return self.bias if self.bias is None or not self.bias.requires_grad else self.bias.detach()

    def keep_master(self, weight: Tensor) -> None:
        """Learn `weight`, this rank's part of the master."""
        assert isinstance(self.part, SparsePart)
        v, bounds = self.part.matrix.vector_length, self.part.bounds
        wrong = [cut for cut in bounds if cut % v and cut != bounds[-1]] if not self.style.rowwise else []
        if wrong:
            raise ValueError(f"outputs must be cut at multiples of vector_length={v} to learn, got a cut at {wrong[0]}")
        self.weight = nn.Parameter(weight.clone())
        self._made_of = weight_version(self.weight)
        bias, self.bias = self.bias, None
        del self._buffers["bias"]
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.clone()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output as the style places it; integers are made again if the master has changed."""
        weight = self.weight
        if weight is not None and self._made_of != (version := weight_version(weight)):
            assert isinstance(self.part, SparsePart)
            pattern, bits = self.part.matrix.pattern, self.part.matrix.bits or 8
            made = quantized_part(weight, pattern, bits, self.style.rowwise, self.mesh)
            self.part, self._made_of = SparsePart(made, self.part.bounds), version
            for name, tensor in self.part.tensors().items():
                self._buffers[name] = tensor
        found: Tensor = self.style.forward(self, x)
        return found

    def learns(self, x: Tensor) -> bool:
        """Whether a call needs a graph."""
        return torch.is_grad_enabled() and (x.requires_grad or self.weight is not None)

    def learn(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The local output, differentiable."""
        if not isinstance(self.part, SparsePart) or (self.training and self.weight is None):
            raise NotImplementedError(
                "x must need no gradient in this layer; use torch.no_grad(), or, to learn, a SparseQuantLinear that is "
                "in training mode when parallelize_module cuts it"
            )
        bias = self.bias if self.weight is not None else None
        found: Tensor = Learn.apply(x, self.weight, bias, self, shape)
        return found

    def quantize(self, rows: Tensor, top: Tensor | None = None) -> Slices:
        """Integers of tokens (tokens, K)."""
        if self.act_scale is None:
            return quantize_slices(rows, self.act_bits, top)
        found = quantized(rows, self.act_bits, None, self.act_scale)
        return Slices(found.data, found.scale, self.act_bits)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedLinear:
        before = {name: each.dtype for name, each in self._buffers.items() if each is not None}
        super()._apply(fn, recurse)
        for name, dtype in before.items():  # half() is for what is computed with, not for scales and integers
            self._buffers[name] = self._buffers[name].to(dtype)  # type: ignore[union-attr]
        self.part = self.part.with_tensors({name: self._buffers[name] for name in self.part.tensors()})
        return self

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        return f"{self.part}, {type(self.style).__name__}, rank {self.mesh.get_local_rank()} of {self.mesh.size()}"


def become(module: nn.Module, new: nn.Module) -> nn.Module:
    """Make `module` the layer `new`, hooks kept: a plan of ``parallelize_module`` changes modules in place."""
    hooks = {name: value for name, value in module.__dict__.items() if name.endswith("hooks") and value}
    training = module.training
    module.__class__ = type(new)
    module.__dict__.clear()
    module.__dict__.update(new.__dict__ | hooks)
    module.training = training
    return module
