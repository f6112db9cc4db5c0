"""Projections that read the same rows, as those to queries, keys and values do, as one product; gated MLPs by it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels.explanation import Explanation
from cute_kernels.gemm.cuda import on_glu_arch
from cute_kernels.gemm.epilogue import RUN, activate
from magicube_cutlass.nn.calibration import forward_batch, restore_modes
from magicube_cutlass.nn.dense import linear_op
from magicube_cutlass.nn.dense.linear import QuantLinear
from magicube_cutlass.nn.dense.product import QuantWeight, inverse_of, smoothed
from magicube_cutlass.quantization.float_tensor import TILE
from magicube_cutlass.quantization.group_tensor import GroupTensor


class JointProjection:
    """Frozen layers that are called with the same rows in turn: the first call multiplies for all of them.

    The layers keep their tensors, as rows of the joint ones. When one gets other tensors, by a move or a state dict,
    they are joined again at the next call, or part if they no longer fit each other. A call with other rows than the
    first layer's gives the same numbers by a product of its own.

    Parameters
    ----------
    layers : sequence of QuantLinear
        In the order of their calls, of which :func:`can_join` is true.
    """

    def __init__(self, layers: Sequence[QuantLinear]) -> None:
        self.layers = tuple(layers)
        self.held: tuple[Tensor, tuple[int | None, bool], Tensor] | None = None  # rows, their state, output
        self.is_current = self.gates_results = False
        self.reader: QuantLinear | None = None  # of gated results, see fuse_glu
        self.renew()

    def renew(self) -> None:
        """Join the layers by the tensors they have now; part them if these do not fit each other."""
        self.held = None
        if not can_join(self.layers):
            for each in self.layers:
                each._joint = None
            return
        first, weights = self.layers[0], [each.stored_weight() for each in self.layers]
        weight = _stacked(weights)
        biases = [each.bias for each in self.layers if each.bias is not None]
        bias = torch.cat([each.detach() for each in biases]) if biases else None
        self.layer = QuantLinear.from_quantized(weight, bias, first.config)
        self.layer.config = replace(first.config, activation=None)
        self.layer.act_scale = first.act_scale
        if first.smooth is not None:
            self.layer.smooth = first.smooth
            self.layer._forget()
        self.act_scales = tuple(each.act_scale for each in self.layers)
        ends = list(accumulate(each.out_features for each in self.layers))
        self.rows = tuple(zip([0, *ends], ends, strict=False))
        for i, (each, (begin, end)) in enumerate(zip(self.layers, self.rows, strict=True)):
            each._set_weight(_rows_of(weight, begin, end))
            if self.layer.bias is not None:
                each.bias = nn.Parameter(self.layer.bias.detach()[begin:end], requires_grad=False)
            each._joint, each._place = self, i
        self.gates_results = _gates_results(self.layer)
        self._divide()
        self.is_current = True

    def gate_for(self, reader: QuantLinear) -> None:
        """Gate results for the layer that reads them."""
        self.reader, reader._gated_by = reader, self
        self._divide()

    def _divide(self) -> None:
        """Divide the second layer's scales and bias by an int8 reader's smooth scale, for results ``h / smooth``."""
        self.divided, self.divided_by = self.layer, None if self.reader is None else self.reader.smooth
        kinds = {each.config.kind for each in (self.layer, self.reader) if each is not None}
        if self.divided_by is not None and kinds == {("int8", "int8", None)}:
            inverse = inverse_of(self.divided_by)  # (out,)
            factors = torch.cat([torch.ones_like(inverse), inverse])  # (2 out,)
            weight, bias = self.layer.stored_weight(), self.layer.bias
            weight = replace(weight, scale=weight.scale * factors[:, None])
            divided = None if bias is None else (bias.detach() * factors).to(bias.dtype)
            self.divided = QuantLinear.from_quantized(weight, divided, self.layer.config)

    def refresh(self) -> None:
        """Join the layers again if one of them has other tensors."""
        scales = tuple(each.act_scale for each in self.layers)
        same = self._is_divided() and all(a is b for a, b in zip(scales, self.act_scales, strict=True))
        if not self.is_current or not same:
            self.renew()

    def __call__(self, layer: QuantLinear, x: Tensor) -> Tensor:
        """Return the output of `layer` (..., out), a view of the joint one."""
        place, compiles = layer._place, torch.compiler.is_compiling()
        if not self.is_current or layer._buffers["act_scale"] is not self.act_scales[place]:
            if compiles:
                raise RuntimeError(
                    "fused projections have other tensors than were joined: call eval(), or run them, to compile them"
                )
            self.renew()
            return layer(x)
        version = None if compiles or x.is_inference() else x._version
        state, held = (version, torch.is_grad_enabled()), self.held
        if place and held is not None and held[0] is x and held[1] == state:
            y = held[2]
        else:
            y = self.layer(x)
            if place == 0:
                self.held = x, state, y
        if place == len(self.rows) - 1:
            self.held = None
        begin, end = self.rows[place]
        return activate(y[..., begin:end], layer.config.activation)

    @property
    def divides(self) -> bool:
        """Whether gated results are divided by the reader's smooth scale."""
        return self.divided is not self.layer

    def _is_divided(self) -> bool:
        return self.reader is None or self.reader._buffers["smooth"] is self.divided_by

    def takes_glu(self, x: Tensor) -> bool:
        """Whether :meth:`glu` takes rows: of an int8 layer, without gradients, by a kernel that gates its results."""
        reader = self.reader if self.divides else None
        seen = self.layers if reader is None or reader.takes_integers else (*self.layers, reader)
        if any(each._forward_pre_hooks or each._forward_hooks for each in seen):
            return False  # what hooks see, as those of a calibration, is made
        learns = torch.is_grad_enabled() and (x.requires_grad or any(_learns(each) for each in self.layers))
        scales = (each._buffers["act_scale"] is scale for each, scale in zip(self.layers, self.act_scales, strict=True))
        plain = x.is_floating_point() and x.dtype != torch.float64 and not learns
        return self.is_current and self.gates_results and plain and self._is_divided() and all(scales)

    def glu(self, x: Tensor, out_scale: Tensor | None) -> Tensor:
        """Return ``h = f(y1) * y2`` (..., out) of two layers, or the reader's integers by its static scale ().

        f is the first layer's activation. An int8 reader's smooth scale has divided `h`: see :attr:`divides`.
        """
        layer, activation, writer = self.layer, self.layers[0].config.activation, self.divided
        rows = x.reshape(-1, layer.in_features)
        rows = rows if layer.smooth is None else smoothed(rows, inverse_of(layer.smooth))
        dtype = x.dtype if out_scale is None else torch.int8
        if torch.compiler.is_compiling():
            integers, scales = linear_op.quantized_rows(rows, layer.act_scale)
            y = linear_op.quant_linear_rows(
                integers, scales, writer.qweight, writer.scale, writer.bias, out_scale, activation or "", True, dtype
            )
        else:
            y = writer.product().by_gemm(rows, layer.act_scale, writer.bias, dtype, activation, out_scale, glu=True)
        return y.view(*x.shape[:-1], layer.out_features // 2)

    def explain(self, rows: int | None) -> Explanation:
        """Report the joint product."""
        found, count = self.layer.explain(rows), len(self.layers)
        is_gated = self.reader is not None and self.gates_results
        gates = "; its epilogue multiplies the results of the second by the activation of the first" if is_gated else ""
        return replace(found, text=f"one product for {count} layers that read the same rows: {found.text}{gates}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "held": None}


class GatedMLP(nn.Module):
    """``down(f(gate(x)) * up(x))`` in the place of the module that computes it, with its children: see ``fuse_glu``."""

    _plain: nn.Module

    def __init__(self, plain: nn.Module, gate: str, down: str) -> None:
        super().__init__()
        self.__dict__["_plain"] = plain  # no child: its children are this module's
        self._modules, self.training = plain._modules, plain.training
        self._gate, self._down = gate, down

    def forward(self, x: Tensor) -> Tensor:
        gate, down = getattr(self, self._gate), getattr(self, self._down)
        joint = gate._joint if isinstance(gate, QuantLinear) and not self.training else None  # dropout is the module's
        if not isinstance(joint, JointProjection) or not isinstance(down, QuantLinear) or not joint.takes_glu(x):
            found: Tensor = self._plain(x)
            return found
        if down.takes_integers or not joint.divides:
            found = down(joint.glu(x, down.act_scale if down.takes_integers else None))
            return found
        return down._of_divided(joint.glu(x, None))

    def train(self, mode: bool = True) -> GatedMLP:
        """Set the mode, of the module that this one replaces too."""
        super().train(mode)
        self._plain.training = mode
        return self


def _learns(layer: QuantLinear) -> bool:
    return layer.bias is not None and layer.bias.requires_grad


def _gates_results(layer: QuantLinear) -> bool:
    """Whether a kernel multiplies by the weight of two layers and gates the results."""
    assert layer.qweight is not None
    fits = layer.config.kind == ("int8", "int8", None) and layer.out_features % (2 * RUN) == 0
    return fits and layer.qweight.is_cuda and on_glu_arch(layer.qweight)


def can_join(layers: Sequence[QuantLinear]) -> bool:
    """Return whether the weights of layers can be one weight: frozen, of one format and size of input, on one device.

    Scales of the whole input must be equal, and scales of tiles must not cover rows of two layers.
    """
    if not all(each.frozen and each.qweight is not None and not each.qweight.is_meta for each in layers):
        return False
    kinds = {
        (
            replace(each.config, activation=None), each.in_features, _device(each),
            None if each.bias is None else each.bias.dtype,
        )
        for each in layers
    }  # fmt: skip
    first = layers[0]
    whole = all(
        _equal(getattr(each, name), getattr(first, name))
        for each in layers[1:]
        for name in ("act_scale", "smooth", "tensor_scale")
    )
    by_tile = first.config.weight.endswith("_b128")
    return len(kinds) == 1 and whole and not (by_tile and any(each.out_features % TILE for each in layers[:-1]))


def _device(layer: QuantLinear) -> torch.device:
    assert layer.qweight is not None
    return layer.qweight.device


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.device == b.device and torch.equal(a, b)


def _stacked(weights: Sequence[QuantWeight]) -> QuantWeight:
    """The weights below each other."""
    first = weights[0]
    data, scale = (torch.cat([getattr(each, name) for each in weights]) for name in ("data", "scale"))
    minima = [each.minimum for each in weights if isinstance(each, GroupTensor) and each.minimum is not None]
    if not minima:
        return replace(first, data=data, scale=scale)
    assert isinstance(first, GroupTensor)
    return replace(first, data=data, scale=scale, minimum=torch.cat(minima))


def _rows_of(weight: QuantWeight, begin: int, end: int) -> QuantWeight:
    """Rows `begin` to `end` of a weight, without a copy."""
    if isinstance(weight, GroupTensor):
        minimum = None if weight.minimum is None else weight.minimum[begin:end]
        return replace(weight, data=weight.data[begin:end], scale=weight.scale[begin:end], minimum=minimum)
    by = TILE if isinstance(weight.block, tuple) else 1
    return replace(weight, data=weight.data[begin:end], scale=weight.scale[begin // by : -(-end // by)])


@dataclass
class _Calls:
    """Layers in the order of a run's calls, in groups of neighbours with the same rows."""

    groups: list[list[QuantLinear]]
    rows: Tensor | None = None
    copy: Tensor | None = None

    def add(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Take note of a call."""
        assert isinstance(layer, QuantLinear)
        x = inputs[0] if inputs else None
        if not isinstance(x, Tensor):
            self.groups.append([layer])
            self.rows = self.copy = None
        elif x is self.rows and self.copy is not None and layer not in self.groups[-1] and torch.equal(x, self.copy):
            self.groups[-1].append(layer)
        else:
            self.groups.append([layer])
            self.rows, self.copy = x, x.clone()


def fuse_projections(model: nn.Module, batch: Any) -> tuple[tuple[str, ...], ...]:
    """Let frozen :class:`QuantLinear` layers that read the same rows run as one product, in place.

    Queries, keys and values of an attention, or gate and up of a gated MLP: ``[y1 y2 y3] = q(x) [W1; W2; W3]^T``. The
    model runs on a batch, which shows what its layers are called with: neighbours in the order of calls that get the
    same tensor, unchanged between them, of one format. The layers keep names, options and state dicts, whose tensors
    are then copies. Outputs are the numbers of before, or differ in the order of sums on a GPU; they are views of one
    tensor. A layer that has an activation is left alone, if it is not joined already. Fuse again after layers were
    replaced.

    A tensor that is written to between the calls of a group is multiplied anew. In inference mode, where torch does not
    count what is written to a tensor, and in graphs this is not seen: later runs must leave it alone as the batch's
    did.

    Parameters
    ----------
    model : nn.Module
        As :func:`magicube_cutlass.convert` with ``freeze=True`` left it. It runs in evaluation mode; the mode of each
        module is restored.
    batch : Tensor, tuple, list or mapping
        An input, as for :func:`magicube_cutlass.nn.calibrate`. It must reach all that the model does.

    Returns
    -------
    tuple of tuple of str
        Names of the layers of each joint product.

    Raises
    ------
    ValueError
        For a model without frozen layers of this kind.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> class Gated(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gate, self.up = torch.nn.Linear(64, 96), torch.nn.Linear(64, 96)
    ...     def forward(self, x):
    ...         return self.gate(x).sigmoid() * self.up(x)
    >>> model = Gated()
    >>> report = mc.convert(model, mc.nn.QuantConfig("int8"), freeze=True)
    >>> mc.nn.fuse_projections(model, torch.randn(4, 64))
    (('gate', 'up'),)
    """
    names = {each: name for name, each in model.named_modules() if isinstance(each, QuantLinear) and each.frozen}
    if not names:
        raise ValueError("model must have frozen QuantLinear layers, got none: see convert and freeze()")
    joined = {each._joint.layers for each in names if isinstance(each._joint, JointProjection)}
    for layer in names:
        layer._joint = None
    calls = _Calls([[]])
    with ExitStack() as stack, torch.no_grad():
        stack.callback(restore_modes, {each: each.training for each in model.modules()})
        model.eval()
        for layer in names:
            stack.callback(layer.register_forward_pre_hook(calls.add).remove)
        forward_batch(model, batch)
    groups_of: dict[QuantLinear, set[tuple[QuantLinear, ...]]] = {}
    for found in calls.groups:
        for layer in found:
            groups_of.setdefault(layer, set()).add(tuple(found))
    fused = []
    for group in dict.fromkeys(tuple(found) for found in calls.groups):
        always = all(groups_of[layer] == {group} for layer in group)
        plain = group in joined or all(each.config.activation is None for each in group)
        if len(group) > 1 and always and plain and can_join(group):
            JointProjection(group)
            fused.append(tuple(names[layer] for layer in group))
    return tuple(fused)
