"""The module that a parallel style makes of a linear layer, and its gradients.

The forward pass is that of inference; the backward pass is straight-through, as in one process. Gradients of weights
stay on their rank. Colwise: gradients of the input are summed over ranks. Rowwise: gradients of the output are gathered
if its tokens are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from magicube_cutlass.autograd.integer import gradient_of_bias
from magicube_cutlass.autograd.once import once
from magicube_cutlass.distributed.collectives import all_reduce, chunk_bounds, gather, reduce_scatter, sizes_of
from magicube_cutlass.distributed.local_products import LayerPart
from magicube_cutlass.distributed.slices import (
    Slices,
    largest,
    quantize_by_scale,
    quantize_slices,
    start_slices,
)
from magicube_cutlass.nn.weight_version import weight_version

__all__ = ["ShardedLinear"]


class ShardedLinear(nn.Module):
    """A rank's part of a linear layer, made by a parallel style.

    A layer in training mode keeps its part of the master weight and learns; any other one is for inference, and its
    master is dropped.

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
        self.weight = nn.Parameter(weight.clone())
        self._made_of = weight_version(self.weight)
        bias, self.bias = self.bias, None
        del self._buffers["bias"]
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.clone()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output as the style places it; integers are made again if the master has changed."""
        weight = self.weight
        if weight is not None and self._made_of != (version := weight_version(weight)):
            self.part, self._made_of = self.part.remade(weight, self.style.rowwise, self.mesh), version
            for name, tensor in self.part.tensors().items():
                self._buffers[name] = tensor
        found: Tensor = self.style.forward(self, x)
        return found

    def learns(self, x: Tensor) -> bool:
        """Whether a call needs a graph."""
        return torch.is_grad_enabled() and (x.requires_grad or self.weight is not None)

    def learn(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The local output, differentiable."""
        if self.training and self.weight is None:
            raise NotImplementedError(
                "x must need no gradient in this layer; use torch.no_grad(), or, to learn, a layer that is in training "
                "mode when parallelize_module cuts it"
            )
        bias = self.bias if self.weight is not None else None
        found: Tensor = Learn.apply(x, self.weight, bias, self, shape)
        return found

    def quantize(self, rows: Tensor, top: Tensor | None = None) -> Slices:
        """Integers of tokens (tokens, K)."""
        if self.act_scale is None:
            return quantize_slices(rows, self.act_bits, top)
        return quantize_by_scale(rows, self.act_scale.reshape(()), self.act_bits)

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


class Learn(torch.autograd.Function):
    """The product of a layer's part with local tokens, straight-through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: Any, shape: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.shape, ctx.part = layer, shape, layer.part
        ctx.dtypes = [None if each is None else each.dtype for each in (weight, bias)]
        y: Tensor = layer.style.compute(layer, x, shape)
        return y

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), layer, part = ctx.saved_tensors, ctx.layer, ctx.part
        run = _rowwise if layer.style.rowwise else _colwise
        grad, tokens, of_x = run(layer, part, grads[0], x, ctx.shape, ctx.needs_input_grad[0])
        (weight, bias), of_weight, of_bias = ctx.dtypes, None, None
        if weight is not None and ctx.needs_input_grad[1]:
            of_weight = part.gradient_of_weight(grad, tokens, layer.grad_bits).to(weight)
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = gradient_of_bias(grad.mT, bias)
        return of_x, of_weight, of_bias, None, None


Found = tuple[Tensor, Slices, Tensor | None]


def _colwise(layer: Any, part: LayerPart, grad: Tensor, x: Tensor, shape: Any, needs_x: bool) -> Found:
    """Gradient (tokens, out_r) of this rank's outputs, all tokens, and the gradient of `x`."""
    mesh, style, bounds = layer.mesh, layer.style, part.bounds
    rank, placement = mesh.get_local_rank(), style.input_layouts
    if not isinstance(style.output_layouts, Shard):
        grad = grad[..., bounds[rank] : bounds[rank + 1]]
    cut = isinstance(placement, Shard)
    dim = placement.dim % x.ndim if cut else 0
    first, whole = x.movedim(dim, 0), grad.movedim(dim, 0)  # (S_r, ..., K), (S, ..., out_r)
    tokens = layer.quantize(first.reshape(-1, x.shape[-1]))
    if cut:
        inner = first.shape[1:-1].numel()
        sizes = [size * inner for size in sizes_of(chunk_bounds(shape[dim], mesh.size()))]
        tokens = start_slices(tokens, sizes, mesh)()
    g = whole.reshape(-1, whole.shape[-1])
    if not needs_x:
        return g, tokens, None
    of_x = part.gradient_of_input(g, x.dtype, layer.grad_bits)  # (tokens, K)
    of_x = of_x.reshape(*whole.shape[:-1], -1).contiguous()
    of_x = reduce_scatter(of_x, mesh) if cut else all_reduce(of_x, "sum", mesh)
    return g, tokens, of_x.movedim(0, dim)


def _rowwise(layer: Any, part: LayerPart, grad: Tensor, x: Tensor, shape: Any, needs_x: bool) -> Found:
    """Gradient (tokens, out), this rank's inputs of all tokens, and the gradient of `x`."""
    mesh, style, bounds = layer.mesh, layer.style, part.bounds
    rank, placement = mesh.get_local_rank(), style.output_layouts
    whole = not isinstance(style.input_layouts, Shard)
    local = x[..., bounds[rank] : bounds[rank + 1]] if whole else x
    if isinstance(placement, Shard):
        dim = placement.dim % x.ndim
        sizes = sizes_of(chunk_bounds(x.shape[dim], mesh.size()))
        grad = gather(grad.movedim(dim, 0), sizes, mesh).movedim(0, dim)
    rows = local.reshape(-1, local.shape[-1])
    tokens = layer.quantize(rows, None if layer.act_scale is not None else largest(rows, mesh))
    g = grad.reshape(-1, grad.shape[-1])
    if not needs_x:
        return g, tokens, None
    of_x = part.gradient_of_input(g, x.dtype, layer.grad_bits).reshape(local.shape)
    if whole:
        of_x = gather(of_x.movedim(-1, 0), sizes_of(bounds), mesh).movedim(0, -1)
    return g, tokens, of_x


def become(module: nn.Module, new: nn.Module) -> nn.Module:
    """Make `module` the layer `new`, hooks kept: a plan of ``parallelize_module`` changes modules in place."""
    hooks = {name: value for name, value in module.__dict__.items() if name.endswith("hooks") and value}
    training = module.training
    module.__class__ = type(new)
    module.__dict__.clear()
    module.__dict__.update(new.__dict__ | hooks)
    module.training = training
    return module
