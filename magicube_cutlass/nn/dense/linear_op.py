"""A dense quantized layer as torch operators: with its tensors for inference, with the layer's number for training.

A graph for inference holds the integers, so that it can be exported. A compiler must not keep those of a weight that
training goes on to change: the operator for training gets the weight, and takes the integers at each run.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from magicube_cutlass.autograd.integer import quantized
from magicube_cutlass.autograd.once import once
from magicube_cutlass.dispatch.register import register_op
from magicube_cutlass.nn.dense.product import DenseProduct, QuantWeight, quantize_act, smoothed
from magicube_cutlass.nn.training_op import NumberedLayers, fake_gradients, join_gradient
from magicube_cutlass.quantization.float_tensor import RECIPES, ScaledFloatTensor
from magicube_cutlass.quantization.group_tensor import GroupTensor


class TrainedLayer(Protocol):
    """What the operators call of a layer."""

    out_features: int
    smooth: Tensor | None
    act_scale: Tensor | None

    @property
    def act(self) -> str:
        """Format of the activations."""
        ...

    def product(self) -> DenseProduct:
        """Return the product with the weight of this moment."""
        ...


def weight_of(
    data: Tensor, scale: Tensor, minimum: Tensor | None, tensor_scale: Tensor | None, kind: str, group: int, k: int
) -> QuantWeight:
    """Return the weight of given tensors; `kind` as in QuantConfig, `group` 0 for none."""
    if kind in ("int8", "int4"):
        return GroupTensor(data, scale, minimum, int(kind[3:]), group or None, k)
    dtype, block, scale_dtype = RECIPES.get(kind, (kind, None, "float32"))
    return ScaledFloatTensor(data, k, dtype, scale, scale_dtype, block, tensor_scale)


_products: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # integers -> version, options, product


def _product_of(
    data: Tensor,
    scale: Tensor,
    minimum: Tensor | None,
    tensor_scale: Tensor | None,
    kind: str,
    group: int,
    k: int,
    act: str,
) -> DenseProduct:
    """The product of a weight's tensors, packed once for each."""
    version = (data.data_ptr(), scale.data_ptr(), 0 if data.is_inference() else data._version, kind, group, k, act)
    found = _products.get(data)
    if found is None or found[0] != version:
        # a copy, so that the product does not keep the key alive
        made = DenseProduct(weight_of(data.clone(), scale, minimum, tensor_scale, kind, group, k), act)
        found = _products[data] = (version, made)
    product: DenseProduct = found[1]
    return product


def _forward(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    minimum: Tensor | None,
    tensor_scale: Tensor | None,
    bias: Tensor | None,
    act_scale: Tensor | None,
    kind: str,
    group: int,
    k: int,
    act: str,
) -> Tensor:
    """Output (tokens, out) of rows (tokens, in)."""
    return _product_of(data, scale, minimum, tensor_scale, kind, group, k, act)(x, act_scale, bias)


def _fake_forward(x: Tensor, data: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], data.shape[0]))


quant_linear = register_op("magicube::quant_linear", _forward, _fake_forward)


# Inputs and rows from which a kernel of its own quantizes faster than one that a compiler fuses with what makes the
# rows. On an H200, GELU and quantization of 32,768 x 1536: 241 and 131 us.
_WIDE, _MANY = 1024, 2048
# The same where a kernel made them. Gated MLPs of SmolLM2, graphs of all layers: 1,024 rows 1.852 and 1.814 ms, 64 rows
# 1.446 and 1.486.
_MANY_OF_KERNEL = 512


def quantized_rows(x: Tensor, act_scale: Tensor | None, of_kernel: bool = False) -> tuple[Tensor, Tensor]:
    """Integers (N, K) of float rows (N, K), and their scales (N,), or the given one, in a graph.

    A compiler fuses these operators with what makes the rows, and takes them once for all layers that read the same
    rows. Rows are multiplied by the inverse of the scale in float32: next to a tie they may round to the integer beside
    the one that the library's kernel gives; scales are at least 2^-126. Many wide rows, whose largest values a compiler
    would find by computing them twice, take that kernel, and from fewer on those `of_kernel`, which a compiler did not
    make.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    many = _MANY_OF_KERNEL if of_kernel else _MANY
    if act_scale is None and x.shape[1] > _WIDE and statically_known_true(x.shape[0] >= many):
        found = quantized(x, 8, 1)
        assert found.scale is not None
        return found.data, found.scale.reshape(-1)
    rows = x.float()
    if act_scale is not None:
        return _integers(rows, act_scale.reciprocal()), act_scale
    largest = rows.abs().amax(1)
    scale = torch.where(largest == 0, 1.0, (largest / 127).clamp_min(torch.finfo(torch.float32).tiny))
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return _integers(rows, scale.reciprocal()[:, None]), scale


_MAGIC = 1.5 * 2**23  # a float32 near it has an integer in its last bits


def _integers(rows: Tensor, per_scale: Tensor) -> Tensor:
    """The nearest integers to float32 products, saturated to int8; 0 for NaN.

    Without conversions between floats and integers, of which a GPU makes a quarter as many as additions. The norm and
    the sum before the rows included, 1,024 x 576 on an H200: 3.35 us by divisions and conversions, 2.78 so.
    """
    steps = rows * per_scale
    near = torch.where(steps.isnan(), 0.0, steps.clamp(-128, 127)) + _MAGIC
    return near.view(torch.int32).to(torch.int8)


def _multiply_rows(
    x: Tensor,
    x_scale: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_scale: Tensor | None,
    activation: str,
    glu: bool,
    dtype: torch.dtype,
    source: Tensor | None = None,
) -> Tensor:
    """Output (tokens, out) of int8 rows (tokens, in) with scales (tokens,) or (), by an int8 weight on a GPU.

    `activation` is ``""`` for none; `out_scale` () is that of an int8 output; with `glu`, of out / 2 columns. `source`
    (tokens, out) is added before the activation.
    """
    product = _product_of(data, scale, None, None, "int8", 0, x.shape[1], "int8")
    return product.by_gemm(x, x_scale, bias, dtype, activation or None, out_scale, glu, source)


def _fake_rows(x: Tensor, data: Tensor, glu: bool, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], data.shape[0] // 2 if glu else data.shape[0]), dtype=dtype)


quant_linear_rows = register_op("magicube::quant_linear_rows", _multiply_rows, _fake_rows)

_layers: NumberedLayers[TrainedLayer] = NumberedLayers("QuantLinear")
register_layer = _layers.register


def forward_rows(
    layer: TrainedLayer,
    x: Tensor,
    bias: Tensor | None,
    activation: str | None = None,
    out_scale: Tensor | None = None,
) -> Tensor:
    """Output (..., out) of a layer for `x` (..., in), without a graph; the activation is that of the layer, or None."""
    return layer.product()(x, layer.act_scale, bias, activation, out_scale)


def gradients(
    layer: TrainedLayer, grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, needed: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Straight-through gradients of x, weight and bias by float32 products; `grad` (N, out), `x` (N, in)."""
    of_x = of_weight = of_bias = None
    g, smooth, factors = grad.float(), layer.smooth, layer.product().factors
    if needed[0]:
        of_x = g @ layer.product().dequantized()
        of_x = (of_x if factors is None else of_x * factors).to(x.dtype)
    if needed[1] and weight is not None:
        inputs = smoothed(x, factors)
        rounded = quantize_act(inputs, layer.act, layer.act_scale)
        rows = inputs.float() if rounded is None else rounded.dequantize().float()
        of_weight = g.t() @ rows
        of_weight = (of_weight if smooth is None else of_weight * smooth).to(weight.dtype)
    if needed[2] and bias is not None:
        of_bias = g.sum(0).to(bias.dtype)
    return of_x, of_weight, of_bias


class QuantProduct(torch.autograd.Function):
    """The output (..., out) of a layer in eager training; saves x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: TrainedLayer) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.layer, ctx.product = layer, layer.product()
        return forward_rows(layer, x, bias)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        x, weight, bias = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        rows = x.reshape(-1, x.shape[-1])
        of_x, of_weight, of_bias = gradients(ctx.layer, grad, rows, weight, bias, list(ctx.needs_input_grad[:3]))
        return None if of_x is None else of_x.view(x.shape), of_weight, of_bias, None


def _train(x: Tensor, weight: Tensor | None, bias: Tensor | None, number: int) -> Tensor:
    """Output (tokens, out) of the layer."""
    with torch.no_grad():
        return forward_rows(_layers.find(number), x, bias)


def _fake_train(x: Tensor, number: int) -> Tensor:
    return x.new_empty((x.shape[0], _layers.find(number).out_features))


def _train_gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, number: int, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, (0,) where `needed` says no."""
    none = grad.new_empty(0)
    found = gradients(_layers.find(number), grad, x, weight, bias, needed)
    return tuple(none if each is None else each for each in found)  # type: ignore[return-value]


quant_linear_train = register_op("magicube::quant_linear_train", _train, _fake_train)
quant_linear_backward = register_op("magicube::quant_linear_backward", _train_gradients, fake_gradients)

join_gradient("magicube::quant_linear_train", "magicube::quant_linear_backward", quant_linear_backward, "QuantLinear")
