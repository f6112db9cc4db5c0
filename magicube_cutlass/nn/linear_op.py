"""A sparse layer as torch operators: found by its scales for inference when frozen, else by the layer's number.

A compiler must not keep the integers of a weight that training goes on to change. The operator gets the weight, so that
the graph depends on it, and the number of the layer, whose integers it takes at each run. Frozen layers of one size
share a graph, which gets the scales as a tensor: a number would be a constant of it, and the stored vectors of two
layers differ in size, which a compiler takes for a constant too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from magicube_cutlass.autograd import integer
from magicube_cutlass.autograd.gpu_rows import sparse_rows
from magicube_cutlass.autograd.once import once
from magicube_cutlass.dispatch.cpu_linear import TrainingRecord, linear
from magicube_cutlass.dispatch.register import register_op
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.nn.config import SparseQuantConfig
from magicube_cutlass.nn.training_op import NumberedLayers, fake_gradients, join_gradient
from magicube_cutlass.quantization.quant_tensor import QuantTensor

Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]


def straight_through(
    grad: Tensor,
    matrix: SRBCRS,
    scale: Tensor | None,
    dense: Callable[[], QuantTensor],
    dtypes: Dtypes,
    needed: Sequence[bool],
    grad_bits: int | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x (in, tokens), weight and bias, None where `needed` says no.

    `grad` (out, tokens); `scale` of the matrix; `dense` makes the integers (in, tokens) of x.
    """
    of_x = of_weight = of_bias = None
    x_dtype, weight_dtype, bias_dtype = dtypes
    if needed[0]:
        of_x = integer.through_transpose(matrix, integer.times(grad, scale), x_dtype, grad_bits)
    if needed[1] and weight_dtype is not None:
        of_values = integer.gradient_of_values(grad, dense(), matrix.pattern, grad_bits)
        of_weight = integer.dense_of(of_values.to(weight_dtype), matrix.pattern)
    if needed[2] and bias_dtype is not None:
        of_bias = integer.gradient_of_bias(grad, bias_dtype)
    return of_x, of_weight, of_bias


def _dtypes(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Dtypes:
    return x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype


class Product(torch.autograd.Function):
    """The output (..., out) of a layer in eager training on a CPU; saves the integers of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        act_scale: Tensor | None,
        matrix: SRBCRS,
        record: TrainingRecord,
        grad_bits: int | None,
    ) -> Tensor:
        y, ints, scale = record(x, act_scale, matrix.scale, bias)
        ctx.save_for_backward(ints, scale, matrix.scale)
        ctx.kept = matrix, grad_bits, x.shape, act_scale is not None, _dtypes(x, weight, bias)
        return y

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        matrix, grad_bits, shape, is_static, dtypes = ctx.kept
        ints, x_scale, scale = ctx.saved_tensors

        def dense() -> QuantTensor:
            return QuantTensor(ints, x_scale, 8, True, None if is_static else 1, ints.shape).mT

        g = grads[0].reshape(-1, matrix.shape[0]).mT  # (out, tokens)
        of_x, *others = straight_through(g, matrix, scale, dense, dtypes, ctx.needs_input_grad, grad_bits)
        return None if of_x is None else of_x.mT.reshape(shape), *others, None, None, None, None


class GpuProduct(torch.autograd.Function):
    """The output (..., out) of a layer in eager training on a GPU: forward by the record of a call without gradients.

    Saves x, which the backward pass quantizes again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        act_scale: Tensor | None,
        matrix: SRBCRS,
        config: SparseQuantConfig,
    ) -> Tensor:
        ctx.save_for_backward(x, act_scale, matrix.scale)
        ctx.kept = matrix, config, _dtypes(x, weight, bias)
        return sparse_rows(matrix, x, bias, act_scale, config.act_bits, config.grad_bits)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        matrix, config, dtypes = ctx.kept
        x, act_scale, scale = ctx.saved_tensors

        def dense() -> QuantTensor:
            axis = 0 if act_scale is None else None
            return integer.quantized(x.reshape(-1, matrix.shape[1]).mT, config.act_bits, axis, act_scale)

        g = grads[0].reshape(-1, matrix.shape[0]).mT  # (out, tokens)
        of_x, *others = straight_through(g, matrix, scale, dense, dtypes, ctx.needs_input_grad, config.grad_bits)
        return None if of_x is None else of_x.mT.reshape(x.shape), *others, None, None, None


# Function.apply first unwraps the tensors of functorch, which have no record: 6 of 44 us of a warm call.
run_product: Callable[..., Tensor] = super(torch.autograd.Function, Product).apply
run_gpu_product: Callable[..., Tensor] = super(torch.autograd.Function, GpuProduct).apply


class Layer(Protocol):
    """What the operator calls of a SparseQuantLinear."""

    out_features: int
    config: SparseQuantConfig
    act_scale: Tensor | None
    scale: Tensor | None  # of a frozen layer

    def matrix(self) -> SRBCRS:
        """Return the integers of the weight."""
        ...

    def _multiply(self, x: Tensor, matrix: SRBCRS, has_declined: bool = False) -> Tensor: ...

    def _quantize(self, x: Tensor) -> QuantTensor: ...


_layers: NumberedLayers[Layer] = NumberedLayers("SparseQuantLinear")
register, layer_of = _layers.register, _layers.find


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, number: int) -> Tensor:
    """Output (out, tokens) of the layer for `x` (tokens, in)."""
    layer = layer_of(number)
    with torch.no_grad():
        return layer._multiply(x, layer.matrix()).contiguous()


def _fake_forward(x: Tensor, number: int) -> Tensor:
    return x.new_empty((layer_of(number).out_features, x.shape[0]))


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, number: int, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, (0,) where `needed` says no; `grad` (out, tokens)."""
    layer = layer_of(number)
    matrix, none = layer.matrix(), grad.new_empty(0)
    dtypes, bits = _dtypes(x, weight, bias), layer.config.grad_bits
    found = straight_through(grad, matrix, matrix.scale, lambda: layer._quantize(x), dtypes, needed, bits)
    of_x, of_weight, of_bias = (none if each is None else each for each in found)
    return of_x.mT.contiguous() if needed[0] else none, of_weight, of_bias


def _inference(matrix: SRBCRS, x: Tensor, bias: Tensor | None, act_scale: Tensor | None, act_bits: int) -> Tensor:
    """Output (tokens, out), contiguous, for `x` (tokens, in)."""
    if x.is_cuda:
        return sparse_rows(matrix, x, bias, act_scale, act_bits, None)
    y = linear(matrix, x, bias, act_bits, act_scale)
    if y is None:
        with torch.no_grad():
            y = integer.spmm_of(matrix, x.mT, None, bias, act_bits, 0, act_scale, None, not x.is_contiguous()).mT
    return y.contiguous()


def _rows(x: Tensor, bias: Tensor | None, number: int) -> Tensor:
    """Output (tokens, out) of the layer for `x` (tokens, in), for inference."""
    layer = layer_of(number)
    return _inference(layer.matrix(), x, bias, layer.act_scale, layer.config.act_bits)


def _fake_rows(x: Tensor, number: int) -> Tensor:
    return x.new_empty((x.shape[0], layer_of(number).out_features))


_frozen_layers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # scale of the integers -> layers


def register_frozen(layer: Layer) -> None:
    """Let the operator find the layer, if it is frozen, by the scales of its integers, a buffer of its own."""
    if layer.scale is not None:
        _frozen_layers.setdefault(layer.scale, WeakSet()).add(layer)  # several: shallow copies


def _frozen_rows(x: Tensor, scale: Tensor, bias: Tensor | None, act_scale: Tensor | None, act_bits: int) -> Tensor:
    """Output (tokens, out) of the frozen layer of `scale` (out, 1) for `x` (tokens, in)."""
    layer: Layer | None = next((each for each in _frozen_layers.get(scale, ()) if each.scale is scale), None)
    if layer is None:
        raise RuntimeError("no frozen SparseQuantLinear has the scales of a compiled graph: it is gone or needs eval()")
    return _inference(layer.matrix(), x, bias, act_scale, act_bits)


def _fake_frozen_rows(x: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], scale.shape[0]))


sparse_frozen_rows = register_op("magicube::sparse_frozen_rows", _frozen_rows, _fake_frozen_rows)
sparse_linear_rows = register_op("magicube::sparse_linear_rows", _rows, _fake_rows)
sparse_linear = register_op("magicube::sparse_linear", _forward, _fake_forward)
sparse_linear_backward = register_op("magicube::sparse_linear_backward", _gradients, fake_gradients)

join_gradient(
    "magicube::sparse_linear", "magicube::sparse_linear_backward", sparse_linear_backward, "SparseQuantLinear"
)
