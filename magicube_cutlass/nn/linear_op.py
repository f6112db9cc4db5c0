"""A sparse layer as a torch operator with a gradient: what a compiled training step calls.

A compiler must not keep the integers of a weight that training goes on to change. The operator gets the weight, so that
the graph depends on it, and the number of the layer, whose integers it takes at each run.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from magicube_cutlass.autograd import integer
from magicube_cutlass.autograd.once import once
from magicube_cutlass.dispatch.cpu_linear import TrainingRecord
from magicube_cutlass.dispatch.register import register_op
from magicube_cutlass.formats.srbcrs import SRBCRS
from magicube_cutlass.nn.config import SparseQuantConfig
from magicube_cutlass.quantization.quant_tensor import QuantTensor


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
        of_weight, of_bias = None if weight is None else weight.dtype, None if bias is None else bias.dtype
        ctx.kept = matrix, grad_bits, x.shape, act_scale is not None, x.dtype, of_weight, of_bias
        return y

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        matrix, grad_bits, shape, is_static, x_dtype, weight_dtype, bias_dtype = ctx.kept
        g = grads[0].reshape(-1, matrix.shape[0]).mT  # (out, tokens)
        ints, x_scale, scale = ctx.saved_tensors
        of_x, of_weight, of_bias, pattern = None, None, None, matrix.pattern
        if ctx.needs_input_grad[0]:
            of_x = integer.through_transpose(matrix, integer.times(g, scale), x_dtype, grad_bits)
            of_x = of_x.mT.reshape(shape)
        if ctx.needs_input_grad[1]:
            dense = QuantTensor(ints, x_scale, 8, True, None if is_static else 1, ints.shape).mT  # (in, tokens)
            of_values = integer.gradient_of_values(g, dense, pattern, grad_bits)
            of_weight = integer.dense_of(of_values.to(weight_dtype), pattern)
        if ctx.needs_input_grad[2]:
            of_bias = integer.gradient_of_bias(g, bias_dtype)
        return of_x, of_weight, of_bias, None, None, None, None


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
        rows = x.reshape(-1, matrix.shape[1])  # (tokens, in)
        y = integer.spmm_of(matrix, rows.mT, None, bias, config.act_bits, 0, act_scale, config.grad_bits, False)
        ctx.save_for_backward(x, act_scale, matrix.scale)
        ctx.kept = matrix, config, None if weight is None else weight.dtype, None if bias is None else bias.dtype
        return y.mT.view(*x.shape[:-1], matrix.shape[0])

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        matrix, config, weight_dtype, bias_dtype = ctx.kept
        g = grads[0].reshape(-1, matrix.shape[0]).mT  # (out, tokens)
        x, act_scale, scale = ctx.saved_tensors
        of_x, of_weight, of_bias, pattern = None, None, None, matrix.pattern
        if ctx.needs_input_grad[0]:
            of_x = integer.through_transpose(matrix, integer.times(g, scale), x.dtype, config.grad_bits)
            of_x = of_x.mT.reshape(x.shape)
        if ctx.needs_input_grad[1]:
            rows = x.reshape(-1, matrix.shape[1])
            dense = integer.quantized(rows.mT, config.act_bits, 0 if act_scale is None else None, act_scale)
            of_values = integer.gradient_of_values(g, dense, pattern, config.grad_bits)
            of_weight = integer.dense_of(of_values.to(weight_dtype), pattern)
        if ctx.needs_input_grad[2]:
            of_bias = integer.gradient_of_bias(g, bias_dtype)
        return of_x, of_weight, of_bias, None, None, None


# Function.apply first unwraps the tensors of functorch, which have no record: 6 of 44 us of a warm call.
run_product: Callable[..., Tensor] = super(torch.autograd.Function, Product).apply
run_gpu_product: Callable[..., Tensor] = super(torch.autograd.Function, GpuProduct).apply


class Layer(Protocol):
    """What the operator calls of a SparseQuantLinear."""

    out_features: int
    config: SparseQuantConfig

    def matrix(self) -> SRBCRS:
        """Return the integers of the weight."""
        ...

    def _multiply(self, x: Tensor, matrix: SRBCRS) -> Tensor: ...

    def _quantize(self, x: Tensor) -> QuantTensor: ...


_layers: WeakValueDictionary[int, Layer] = WeakValueDictionary()
_numbers = count(1)


def register(layer: Layer) -> int:
    """Return a number under which the operator finds this layer while it lives."""
    number = next(_numbers)
    _layers[number] = layer
    return number


def layer_of(number: int) -> Layer:
    """Return the living layer of this number; `RuntimeError` if there is none."""
    found = _layers.get(number)
    if found is None:
        raise RuntimeError(f"a compiled graph needs the SparseQuantLinear it was traced with, number {number}: "
                           "it is gone or belongs to another process")  # fmt: skip
    return found


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
    matrix, config = layer.matrix(), layer.config
    none = grad.new_empty(0)
    of_x, of_weight, of_bias = none, none, none
    if needed[0]:
        scaled = integer.times(grad, matrix.scale)
        of_x = integer.through_transpose(matrix, scaled, x.dtype, config.grad_bits).mT.contiguous()
    if needed[1] and weight is not None:
        dense = layer._quantize(x)
        of_values = integer.gradient_of_values(grad, dense, matrix.pattern, config.grad_bits)
        of_weight = integer.dense_of(of_values, matrix.pattern).to(weight.dtype)
    if needed[2] and bias is not None:
        of_bias = integer.gradient_of_bias(grad, bias.dtype)
    return of_x, of_weight, of_bias


def _fake_gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and dtypes of `_gradients`."""
    found = [
        grad.new_empty(0) if each is None or not wanted else each.new_empty(each.shape)
        for each, wanted in zip((x, weight, bias), needed, strict=True)
    ]
    return found[0], found[1], found[2]


sparse_linear = register_op("magicube::sparse_linear", _forward, _fake_forward)
sparse_linear_backward = register_op("magicube::sparse_linear_backward", _gradients, _fake_gradients)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.number = inputs[3]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments of the operator."""
    needed = list(ctx.needs_input_grad[:3])
    found = sparse_linear_backward(grad, *ctx.saved_tensors, ctx.number, needed)
    return (*(each if wanted else None for each, wanted in zip(found, needed, strict=True)), None)


def _no_second_derivative(*_: Any) -> None:
    raise RuntimeError("SparseQuantLinear has no second derivative: its gradients cannot be differentiated")


torch.library.register_autograd("magicube::sparse_linear", _backward, setup_context=_save)
torch.library.register_autograd("magicube::sparse_linear_backward", _no_second_derivative)
