"""A linear layer with dense quantized weights: int8, int4 in groups, fp8 with scales per row or tile, mxfp4, nvfp4."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn

from cute_kernels.explanation import Explanation
from cute_kernels.gemm.epilogue import activate
from cute_kernels.watch import watched
from magicube_cutlass.checks import is_transformed, transform_error
from magicube_cutlass.nn.calibration import calibrate as run_calibration
from magicube_cutlass.nn.config import ACTIVATIONS, QuantConfig
from magicube_cutlass.nn.dense import linear_op
from magicube_cutlass.nn.dense.product import DenseProduct, QuantWeight, inverse_of, smoothed
from magicube_cutlass.nn.dense.state import QuantState, weight_shapes
from magicube_cutlass.nn.weight_version import weight_version
from magicube_cutlass.quantization.float_tensor import RECIPES, quantize_floats
from magicube_cutlass.quantization.group_tensor import GroupTensor, quantize_groups
from magicube_cutlass.quantization.quantize import quantize


class QuantOptions(TypedDict, total=False):
    """Fields of :class:`magicube_cutlass.nn.QuantConfig`."""

    weight: Literal["int8", "int4", "e4m3", "e4m3_b128", "mxfp4", "nvfp4"]
    group_size: int | None
    symmetric: bool
    act: str
    clip: str
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] | None


def quantize_weight(weight: Tensor, config: QuantConfig) -> QuantWeight:
    """Return a weight (out, in) in the format of a config.

    Examples
    --------
    >>> quantize_weight(torch.ones(2, 32), QuantConfig("int4", group_size=32)).nbytes
    40
    """
    if config.is_integer:
        return quantize_groups(weight, config.bits, config.group_size, symmetric=config.symmetric, clip=config.clip)
    return quantize_floats(weight.detach(), config.weight, axis=1)


class QuantLinear(QuantState):
    """Linear layer with a dense quantized weight: ``y = f(q(x / s) q(W s)^T + b)``.

    `weight` (out, in) is the float master, in training and in evaluation; the quantized weight is made when the master
    has changed. Gradients are straight-through. :meth:`freeze` drops the master. `s` (in,) is the optional `smooth`
    scale, see :func:`magicube_cutlass.nn.smooth`. `f` is the `activation` of the config, if it has one.

    On a CPU, int8 and int4 weights with int8 activations are one call of the engine, which quantizes the input, unpacks
    4-bit weights in registers, adds the bias and applies `f` in cache, in float32: within 4e-7, or two units in the
    last place. On a GPU, int8 is two launches: the rows are quantized, then the int8 GEMM, which applies `f` before it
    rounds its results. Elsewhere, and in training, torch applies `f`. e4m3, mxfp4, and e4m3_b128 with e4m3 rows are
    two launches too. On sm_90a, int4 and every weight-only layer (``act="none"``) multiply float16 and bfloat16 rows by
    weights that are decoded in registers; their group scales are rounded to the dtype of the rows, those of e4m3_b128
    are not. For 768 rows and more a weight-only layer decodes the weight first, and torch multiplies. e4m3_b128 with
    e4m3_g128 rows is ``torch._scaled_mm`` there, of torch 2.9 for CUDA 12.9 and newer, for inputs in multiples of 512
    and outputs in multiples of 16. Everything else runs in torch on the dequantized weight: small, not fast.
    :meth:`explain` says which.
    The state dict holds tensors only, and loading one restores the options.

    Parameters
    ----------
    in_features, out_features, bias, device, dtype
        As for ``nn.Linear``.
    config : QuantConfig, optional
        Options; or its fields as keywords.

    Raises
    ------
    TypeError, ValueError
        As :class:`QuantConfig` and :func:`magicube_cutlass.quantize`.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> layer = mc.nn.QuantLinear.from_linear(torch.nn.Linear(64, 32), weight="int4", group_size=32)
    >>> layer(torch.randn(3, 64)).shape, layer.freeze().compressed_bytes
    (torch.Size([3, 32]), 1408)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        config: QuantConfig | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[QuantOptions],
    ) -> None:
        super().__init__()
        plain = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._begin(plain.weight, plain.bias, _config_of(config, options), (out_features, in_features))

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        config: QuantConfig | None = None,
        *,
        calibrate: Iterable[Tensor] | None = None,
        **options: Unpack[QuantOptions],
    ) -> QuantLinear:
        """Make a layer that shares the parameters of an ``nn.Linear``.

        Parameters
        ----------
        linear : nn.Linear
            Layer to convert.
        config : QuantConfig, optional
            Options; or its fields as keywords.
        calibrate : iterable, optional
            Inputs (..., in) for a static activation scale. Default: dynamic per-token scales.

        Raises
        ------
        TypeError
            If `linear` is no ``nn.Linear``.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be a torch.nn.Linear, got {type(linear).__name__}")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        shape = (linear.out_features, linear.in_features)
        layer._begin(linear.weight, linear.bias, _config_of(config, options), shape)
        if calibrate is not None:
            run_calibration(layer, calibrate, progress=False)
        return layer.train(linear.training)

    @classmethod
    def from_quantized(
        cls, weight: QuantWeight, bias: Tensor | None = None, config: QuantConfig | None = None
    ) -> QuantLinear:
        """Make a frozen layer of a quantized weight (out, in), without requantizing.

        Parameters
        ----------
        weight : GroupTensor or ScaledFloatTensor, shape (out, in)
            With scales per row, group, block or 128 x 128 tile.
        bias : Tensor, shape (out,), optional
            Float.
        config : QuantConfig, optional
            Its `act` and `activation` are taken; the rest follows from the weight.

        Examples
        --------
        >>> import torch, magicube_cutlass as mc
        >>> weight = mc.nn.quantize_weight(torch.eye(16), mc.nn.QuantConfig("int8"))
        >>> mc.nn.QuantLinear.from_quantized(weight)(torch.ones(1, 16)).round()[0, :3]
        tensor([1., 1., 1.])
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        parameter = None if bias is None else nn.Parameter(bias, requires_grad=False)
        layer._begin(None, parameter, _config_for(weight, config), (weight.shape[0], weight.shape[1]))
        layer._set_weight(weight)
        return layer.eval()

    def _set_weight(self, weight: QuantWeight) -> None:
        """Take over a quantized weight as buffers."""
        if isinstance(weight, GroupTensor):
            self.qweight, self.scale, self.minimum = weight.data, weight.scale, weight.minimum
        else:
            self.qweight, self.scale, self.tensor_scale = weight.data, weight.scale, weight.tensor_scale
        self._forget()

    @property
    def act(self) -> str:
        """Format of the activations."""
        return self.config.act

    def activation_scale(self, x: Tensor, clip: float | str) -> Tensor | None:
        """Return the static scale of inputs; None for formats that have none."""
        x = x if self.smooth is None else smoothed(x, inverse_of(self.smooth))
        if self.act == "e4m3":
            return x.abs().amax().float() / 448
        found = quantize(x.reshape(1, -1), 8, clip=clip).scale if self.act == "int8" else None  # type: ignore[arg-type]
        return None if found is None else found.float()

    def product(self) -> DenseProduct:
        """Return the product with the quantized weight, made again if the master has changed."""
        try:
            weight = self._parameters["weight"]
        except KeyError:  # a parametrization
            weight = self.weight
        made, made_of, smooth = self._product, self._made_of, self._buffers["smooth"]
        version = 0 if weight is None else weight_version(weight)
        if made is not None and (weight is None or made_of == (id(weight), version, id(smooth))):
            return made
        if weight is None:
            found = self.stored_weight()
        else:
            if is_transformed(weight):
                raise transform_error("weight")
            found = quantize_weight(
                weight.detach() if smooth is None else weight.detach().float() * smooth, self.config
            )
            self._made_of, self._made_by = (id(weight), version, id(smooth)), (weight, smooth)
        self._product = DenseProduct(found, self.config.act, smooth)
        return self._product

    def stored_weight(self) -> QuantWeight:
        """Return the weight of a frozen layer."""
        assert self.qweight is not None and self.scale is not None
        return linear_op.weight_of(
            self.qweight, self.scale, self.minimum, self.tensor_scale, self.config.weight, self.config.group_size or 0,
            self.in_features,
        )  # fmt: skip

    @watched("magicube_cutlass.nn.QuantLinear.forward", traces=False)
    def forward(self, x: Tensor) -> Tensor:
        if self._joint is not None:
            return self._joint(self, x)
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"x must have {self.in_features} features, got shape {tuple(x.shape)}")
        if not x.is_floating_point():
            return self._of_integers(x)
        try:  # as self.weight, without two calls of Python
            weight, bias = self._parameters["weight"], self._parameters["bias"]
        except KeyError:  # a parametrization
            weight, bias = self.weight, self.bias
        learns = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, weight, bias))
        if torch.compiler.is_compiling():
            return self._compiled(x, learns)
        if learns:
            return activate(linear_op.QuantProduct.apply(x, weight, bias, self), self.config.activation)
        if is_transformed(x):
            raise transform_error("x")
        return linear_op.forward_rows(self, x, bias, self.config.activation, self._out_scale())

    def _of_integers(self, x: Tensor) -> Tensor:
        """The output for rows that the layer before has quantized: see :func:`fuse_quantization`."""
        if x.dtype != torch.int8 or not self.takes_integers:
            hint = "; int8 needs a frozen int8 layer with a static scale" if x.dtype == torch.int8 else ""
            raise TypeError(f"x must be a float tensor, got {x.dtype}{hint}")
        return self._multiply_rows(x, self.act_scale, torch.float32 if self.like is None else self.like.dtype)

    def _of_divided(self, x: Tensor, of_kernel: bool = True) -> Tensor:
        """The output for float rows (..., in) over the smooth scale, by the int8 GEMM."""
        rows, scale = x, self.act_scale
        if torch.compiler.is_compiling():
            rows, scale = linear_op.quantized_rows(x.reshape(-1, self.in_features), scale, of_kernel)
        return self._multiply_rows(rows.view(x.shape), scale, x.dtype)

    def _multiply_rows(self, x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The output (..., out) for such rows or int8 ones: of `dtype`, or of integers that the next layer takes."""
        rows, out_scale, activation = x.reshape(-1, self.in_features), self._out_scale(), self.config.activation
        dtype, tensors = dtype if out_scale is None else torch.int8, (self.qweight, self.scale, self.bias, out_scale)
        if torch.compiler.is_compiling():
            y = linear_op.quant_linear_rows(rows, scale, *tensors, activation or "", False, dtype)
        else:
            y = self.product().by_gemm(rows, scale, self.bias, dtype, activation, out_scale)
        return y.view(*x.shape[:-1], self.out_features)

    def _compiled(self, x: Tensor, learns: bool) -> Tensor:
        """As :meth:`forward`, in a graph."""
        rows, config = x.reshape(-1, self.in_features), self.config
        if learns:
            y = linear_op.quant_linear_train(rows, self.weight, self.bias, self._number)
            return activate(y, config.activation).view(*x.shape[:-1], self.out_features)
        if self.weight is not None:
            raise RuntimeError("a QuantLinear is compiled for inference without its master weight: call freeze()")
        rows = rows if self.smooth is None else smoothed(rows, inverse_of(self.smooth))
        if x.is_cuda and x.dtype != torch.float64 and config.kind == ("int8", "int8", None):
            return self._of_divided(rows.view(x.shape), self.reads_kernel)
        y = linear_op.quant_linear(
            rows, self.qweight, self.scale, self.minimum, self.tensor_scale, self.bias, self.act_scale,
            config.weight, config.group_size or 0, self.in_features, config.act,
        )  # fmt: skip
        return activate(y.view(*x.shape[:-1], self.out_features), config.activation)

    def explain(self, rows: int | None = None) -> Explanation:
        """Report what multiplies by this weight, and the bytes that it reads.

        Parameters
        ----------
        rows : int, optional
            Rows of the input, for the predicted time of the few-rows product (up to 64; weights from memory, an H200):
            the fact ``predicted_us``, None elsewhere.

        Examples
        --------
        >>> import torch, magicube_cutlass as mc
        >>> layer = mc.nn.QuantLinear(64, 32, weight="mxfp4")
        >>> layer.explain().backend, layer.explain().facts["weight_bytes"]
        ('torch', 1088)
        """
        if self._joint is not None:
            return self._joint.explain(rows)
        product = self.product()
        size = product.weight.nbytes
        group = f" in groups of {self.config.group_size}" if self.config.group_size else ""
        text = (
            f"{self.config.weight}{group} weight {self.out_features} x {self.in_features}, {size:,} bytes; activations "
            f"{self.act}, {'dynamic' if self.act_scale is None else 'static'}; {product.describe()}"
        )
        if (activation := self.config.activation) is not None:
            text += f"; {activation} {'in its epilogue' if product.backend in ('engine', 'gemm') else 'by torch'}"
        writes_integers = product.writes_integers and self._out_scale() is not None
        text += "; it writes int8 by the scale of the next layer" if writes_integers else ""
        predicted = None if rows is None else product.predicted_seconds(rows)
        if predicted is not None:
            text += f"; the product of {rows} rows takes about {1e6 * predicted:.1f} us on an H200, weights from memory"
        facts = {
            "shape": product.shape, "weight_bytes": size, "act": self.act, "group_size": self.config.group_size,
            "activation": activation, "writes_integers": writes_integers,
            "predicted_us": None if predicted is None else 1e6 * predicted,
        }  # fmt: skip
        return Explanation("quant_linear", product.backend, self.config.weight, text, facts)

    def dequantize(self) -> Tensor:
        """Return the weight that the layer multiplies by, float32, (out, in)."""
        product = self.product()
        weight = product.weight.dequantize()
        return weight if product.factors is None else weight * product.factors

    def freeze(self) -> QuantLinear:
        """Drop the master weight and keep the quantized one, for inference; return the layer.

        The bias then needs no gradient.
        """
        if self.weight is not None and self.weight.is_meta:
            self.empty_weight("meta")
        elif self.weight is not None:
            product = self.product()
            self._set_weight(product.weight)
            self.weight, self._product = None, product
            if self.bias is not None:
                self.bias.requires_grad_(False)
        return self

    @property
    def frozen(self) -> bool:
        """Whether the master weight was dropped."""
        return self.weight is None

    @property
    def compressed_bytes(self) -> int:
        """Bytes of the tensors of the frozen layer."""
        tensors = (self.bias, self.act_scale, self.smooth)
        shapes = weight_shapes(self.out_features, self.in_features, self.config).values()
        packed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
        return sum(each.nbytes for each in tensors if each is not None) + packed

    def train(self, mode: bool = True) -> QuantLinear:
        """Set the mode; evaluation makes the quantized weight at once."""
        super().train(mode)
        if not mode and self._joint is not None:
            self._joint.refresh()
        elif not mode and not self._is_meta():
            self.product()
        return self

    def _is_meta(self) -> bool:
        kept = self.qweight if self.weight is None else self.weight
        return kept is None or kept.is_meta

    def extra_repr(self) -> str:
        """Return the options for ``repr``."""
        config, acts = self.config, "dynamic" if self.act_scale is None else "static"
        activation = "" if config.activation is None else f", activation={config.activation}"
        group = "" if config.group_size is None else f", group_size={config.group_size}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"weight={config.weight}{group}{'' if config.symmetric else ', symmetric=False'}, act={config.act} {acts}, "
            f"frozen={self.frozen}{activation}"
        )


def _config_of(config: QuantConfig | None, options: QuantOptions) -> QuantConfig:
    """The config with the given fields; another weight format brings its own activations."""
    fields: dict[str, Any] = {} if config is None else asdict(config)
    if options.get("weight", fields.get("weight")) != fields.get("weight"):
        fields["act"] = ""
    return QuantConfig(**{**fields, **options})


def _config_for(weight: QuantWeight, config: QuantConfig | None) -> QuantConfig:
    """The config that a quantized weight has, with `act` and `activation` of another."""
    act, activation = ("", None) if config is None else (config.act, config.activation)
    if isinstance(weight, GroupTensor):
        return QuantConfig(f"int{weight.bits}", weight.group, weight.minimum is None, act, activation=activation)
    kind = (weight.dtype, weight.block, weight.scale_dtype)
    per_row = weight.dtype if weight.block is None and weight.axis == 1 else ""
    name = next((key for key, recipe in RECIPES.items() if recipe == kind), per_row)
    if weight.transposed or name not in ACTIVATIONS:
        raise ValueError(f"weight must have scales per row, block of a row or tile as {tuple(ACTIVATIONS)} have, "
                         f"got {weight}")  # fmt: skip
    return QuantConfig(name, act=act, activation=activation)
