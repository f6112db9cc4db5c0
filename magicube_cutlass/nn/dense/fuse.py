"""What becomes part of the quantized layers before it: activations, gates, and the quantization for the next layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from cute_kernels.gemm.epilogue import activate
from magicube_cutlass.nn.auto_plan import first_outputs, output_error
from magicube_cutlass.nn.calibration import forward_batch, restore_modes
from magicube_cutlass.nn.dense.activation import activation_of
from magicube_cutlass.nn.dense.linear import QuantLinear
from magicube_cutlass.nn.dense.projections import GatedMLP, JointProjection, fuse_projections
from magicube_cutlass.nn.weight_modules import inner_layer, replace_module


@dataclass(frozen=True)
class _Group:
    """An activation module, and all layers whose outputs it is called with."""

    module: nn.Module
    name: str  # as in QuantConfig
    layers: frozenset[nn.Module]


def fuse_activations(model: nn.Module, batch: Any) -> dict[str, str]:
    """Move activation modules into the :class:`QuantLinear` layers that they follow, in place.

    The model runs on a batch, which shows what ``nn.ReLU``, ``nn.GELU`` and ``nn.SiLU`` modules, and those of
    transformers, are called with. A module that is only called with the outputs of dense quantized layers, each right
    after its layer, becomes ``nn.Identity``, and the layers get its name as their `activation`. The model runs again,
    and what changes its output is left as it was: an output that is also read elsewhere. :func:`to_dense` puts the
    modules back. State dicts do not change.

    Parameters
    ----------
    model : nn.Module
        As :func:`magicube_cutlass.convert` left it. It runs in evaluation mode; the mode of each module is restored.
    batch : Tensor, tuple, list or mapping
        An input, as for :func:`magicube_cutlass.nn.calibrate`. It must reach all that the model does.

    Returns
    -------
    dict
        Activation per name of a layer that got one.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    >>> report = mc.convert(model, mc.nn.QuantConfig("int8"))
    >>> mc.nn.fuse_activations(model, torch.randn(4, 64)), model[1]
    ({'0': 'gelu'}, Identity())
    """
    layers = {
        each: name
        for name, each in model.named_modules()
        if isinstance(inner := inner_layer(each), QuantLinear) and inner.config.activation is None
    }
    with ExitStack() as stack, torch.no_grad():
        stack.callback(restore_modes, {each: each.training for each in model.modules()})
        model.eval()
        groups, want = _groups(model, layers.keys(), batch)
        error = output_error([batch], want)

        def holds(some: Sequence[_Group]) -> bool:
            with _moved(model, some):
                return error(model) < 1e-10  # the same operations: 0, but for sums of atomics on a GPU

        kept = groups if holds(groups) else [each for each in groups if holds([each])]
    for group in kept:
        identity = nn.Identity()
        replace_module(model, group.module, identity)
        for layer in group.layers:
            inner = inner_layer(layer)
            assert isinstance(inner, QuantLinear)
            inner.config = replace(inner.config, activation=group.name)
            inner.__dict__["_fused"] = identity, group.module  # for to_dense; no children of the layer
    return {layers[layer]: group.name for group in kept for layer in group.layers}


def _groups(model: nn.Module, layers: Any, batch: Any) -> tuple[list[_Group], list[Tensor]]:
    """What may be fused, as one run shows it, and the output of that run."""
    last: list[Any] = [None, None]  # the module that was called last, and its output
    sources: dict[nn.Module, list[nn.Module | None]] = {}

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        last[:] = module, output

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        is_next = bool(inputs) and isinstance(inputs[0], Tensor) and inputs[0] is last[1] and last[0] in layers
        sources.setdefault(module, []).append(last[0] if is_next else None)

    with ExitStack() as stack:
        for each in model.modules():
            if each in layers or not any(True for _ in each.children()):
                stack.callback(each.register_forward_hook(after).remove)
            if activation_of(each) is not None:
                stack.callback(each.register_forward_pre_hook(before).remove)
        want = first_outputs(model, [batch])
    found = []
    for module, given in sources.items():
        name, befores = activation_of(module), frozenset(each for each in given if each is not None)
        if name is not None and None not in given:
            found.append(_Group(module, name, befores))
    return found, want


@contextmanager
def _moved(model: nn.Module, groups: Sequence[_Group]) -> Iterator[None]:
    """Have the layers' hooks apply the activations instead of the modules."""
    with ExitStack() as stack:
        for group in groups:
            identity = nn.Identity()
            replace_module(model, group.module, identity)
            stack.callback(replace_module, model, identity, group.module)
            for layer in group.layers:
                stack.callback(layer.register_forward_hook(partial(_apply, name=group.name)).remove)
        yield


def _apply(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor, *, name: str) -> Tensor:
    return activate(output, name)


class Readers(TorchFunctionMode):
    """Who reads the outputs of modules in a run: quantized layers, by their rows, or anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[nn.Module, ref[Tensor]]] = {}  # by the identity of an output
        self.makers: dict[QuantLinear, set[nn.Module | None]] = {}  # who made the rows of a layer
        self.readers: dict[nn.Module, set[QuantLinear | None]] = {}  # who reads the output of a module; None: no layer
        self.dtypes: dict[QuantLinear, torch.dtype] = {}  # of outputs
        self.inside = 0  # layers

    def watch(self, model: nn.Module, batch: Any, layers: Iterable[Any], others: Iterable[nn.Module] = ()) -> None:
        """Run a model in evaluation mode; `others` are modules whose readers are of interest, beside the layers."""
        with ExitStack() as stack:
            stack.callback(restore_modes, {each: each.training for each in model.modules()})
            model.eval()
            for layer in layers:
                stack.callback(layer.register_forward_pre_hook(self.before).remove)
                stack.callback(layer.register_forward_hook(self.after).remove)
            for each in others:
                stack.callback(each.register_forward_hook(self.add).remove)
            with self, torch.no_grad():
                self.read(forward_batch(model, batch))

    def maker_of(self, x: object) -> nn.Module | None:
        """Return the module whose output a tensor is."""
        maker, output = self.made.get(id(x), (None, None))
        return maker if output is not None and output() is x else None  # else another tensor has the identity now

    def before(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Take note of whose output a layer reads."""
        assert isinstance(layer, QuantLinear)
        maker = self.maker_of(inputs[0]) if inputs else None
        self.makers.setdefault(layer, set()).add(maker)
        if maker is not None:
            self.readers.setdefault(maker, set()).add(layer)
        self.inside += 1

    def after(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Take note of an output."""
        assert isinstance(layer, QuantLinear)
        self.add(layer, inputs, output)
        self.dtypes[layer] = output.dtype
        self.inside -= 1

    def add(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Take note of an output of any module."""
        self.made[id(output)] = module, ref(output)

    def read(self, values: object) -> None:
        """Take note of outputs among values that something else than a layer reads."""
        for each in tree_leaves(values):
            maker = self.maker_of(each)
            if maker is not None:
                self.readers.setdefault(maker, set()).add(None)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        of_shape = getattr(function, "__name__", "") in ("__get__", "size", "dim") and not isinstance(found, Tensor)
        if not self.inside and not of_shape:
            self.read((args, kwargs))
        return found

    def pairs(self) -> list[tuple[QuantLinear, QuantLinear]]:
        """Return makers of integers and their only readers."""
        found = []
        for reader, makers in self.makers.items():
            maker = next(iter(makers)) if len(makers) == 1 else None
            reads = reader.takes_integers and reader.smooth is None  # a scale per feature is no part of the epilogue
            if not reads or not isinstance(maker, QuantLinear) or maker is reader or self.readers[maker] != {reader}:
                continue
            if maker.config.kind == ("int8", "int8", None) and maker.frozen and maker._joint is None:
                found.append((maker, reader))
        return found


def _device(layer: QuantLinear) -> torch.device:
    assert layer.qweight is not None
    return layer.qweight.device


def fuse_quantization(model: nn.Module, batch: Any) -> dict[str, str]:
    """Let frozen int8 layers write the integers that the next layer reads, in place.

    The two layers of an MLP: the first one's output is quantized by the static scale of the second where it is made, in
    the epilogue of the GEMM, after bias and activation. On a GPU this saves the 16-bit copy of the largest tensor of a
    block, and two launches. ``q = clamp(round(f(q(x) W1^T + b1) / s2), -128, 127)``; next to a tie, the integer may be
    the next one. The model runs on a batch, which shows what is called with the output of a layer: if it is one other
    layer and nothing else, they are a pair. Call :func:`fuse_activations` before: an activation between the layers is
    in the way.

    Nothing changes on a CPU, whose engine quantizes rows in cache, in training, or while the second layer has no static
    scale, or other tensors that take no integers. The scale is read at each call.

    Parameters
    ----------
    model : nn.Module
        As :func:`magicube_cutlass.convert` with ``freeze=True`` and `calibrate` left it. It runs in evaluation mode;
        the mode of each module is restored.
    batch : Tensor, tuple, list or mapping
        An input, as for :func:`magicube_cutlass.nn.calibrate`. It must reach all that the model does.

    Returns
    -------
    dict
        Per name of a layer that writes integers, the name of the one that reads them.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 8))
    >>> x = torch.randn(4, 64)
    >>> report = mc.convert(model, mc.nn.QuantConfig("int8"), freeze=True, calibrate=[x])
    >>> mc.nn.fuse_activations(model, x), mc.nn.fuse_quantization(model, x)
    ({'0': 'gelu'}, {'0': '2'})
    """
    names = {each: name for name, each in model.named_modules() if isinstance(each, QuantLinear)}
    for layer in names:
        layer.__dict__.pop("_next", None)
    run = Readers()
    run.watch(model, batch, names)
    for maker, reader in run.pairs():
        maker.__dict__["_next"] = reader  # no child of the layer
        reader.like = torch.empty(0, dtype=run.dtypes[reader], device=_device(reader))
    return {names[maker]: names[reader] for maker, reader in run.pairs()}


def _gated_layers(module: nn.Module) -> tuple[str, str, list[str]] | None:
    """Names of the children that are gate and up of one joint product, and of those that may read what they give."""
    own = {name: each for name, each in module._modules.items() if isinstance(each, QuantLinear)}
    joints = {each._joint for each in own.values() if isinstance(each._joint, JointProjection)}
    pairs = [joint.layers for joint in joints if len(joint.layers) == 2 and {*joint.layers} <= {*own.values()}]
    if len(pairs) != 1:
        return None
    (gate, up), names = pairs[0], {each: name for name, each in own.items()}
    readers = [name for name, each in own.items() if each not in pairs[0] and each.in_features == up.out_features]
    return (names[gate], names[up], readers) if gate.out_features == up.out_features else None


def fuse_glu(model: nn.Module, batch: Any) -> dict[str, str]:
    """Let the joint product of gate and up of gated MLPs write what they come to, in place.

    ``h = f(x W1^T + b1) * (x W2^T + b2)`` (N, d) is made in the epilogue of one GEMM, from float32 sums and rounded
    once, where two outputs (N, d) were written and read again: SwiGLU is ``f = silu``. If the layer that reads `h` has
    a static scale, its integers are written, and the second layer's scales are divided by a smooth scale that the rows
    of `h` are to be divided by. The model runs on a batch, which shows which modules compute ``down(f(
    gate(x)) * up(x))`` for one tensor, of three of their children. Call :func:`fuse_projections` and
    :func:`fuse_activations` before. State dicts do not change. :func:`to_dense` puts the modules back.

    Int8 layers without groups on sm_90a, for layers of multiples of 32 features. Nothing changes elsewhere, or for
    other formats, or in training. Source: Shazeer, arXiv 2002.05202.

    Parameters
    ----------
    model : nn.Module
        As :func:`magicube_cutlass.convert` with ``freeze=True`` left it. It runs in evaluation mode; the mode of each
        module is restored.
    batch : Tensor, tuple, list or mapping
        An input, as for :func:`magicube_cutlass.nn.calibrate`. It must reach all that the model does.

    Returns
    -------
    dict
        Name of the layer that reads `h`, per name of a module that was replaced.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> class Gated(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gate, self.up = torch.nn.Linear(64, 96), torch.nn.Linear(64, 96)
    ...         self.down, self.act = torch.nn.Linear(96, 64), torch.nn.SiLU()
    ...     def forward(self, x):
    ...         return self.down(self.act(self.gate(x)) * self.up(x))
    >>> model, x = torch.nn.Sequential(Gated()), torch.randn(4, 64)
    >>> report = mc.convert(model, mc.nn.QuantConfig("int8"), freeze=True)
    >>> mc.nn.fuse_projections(model, x), mc.nn.fuse_activations(model, x)
    ((('0.gate', '0.up'),), {'0.gate': 'silu'})
    >>> mc.nn.fuse_glu(model, x)
    {'0': '0.down'}
    """
    for gated in [each for each in model.modules() if isinstance(each, GatedMLP)]:
        replace_module(model, gated, gated._plain)
        getattr(gated, gated._down)._gated_by = None
    found = {each: layers for each in model.modules() if each is not model and (layers := _gated_layers(each))}
    readers = {module: set(names[2]) for module, names in found.items()}  # that all calls agree with
    outputs: dict[nn.Module, Any] = {}

    def after(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        gate, up, down = found[module]
        outputs[module] = output
        if len(inputs) != 1 or options or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
            readers[module].clear()
            return
        h = getattr(module, gate)(inputs[0]) * getattr(module, up)(inputs[0])
        readers[module] &= {name for name in down if torch.equal(getattr(module, name)(h), output)}

    with ExitStack() as stack, torch.no_grad():
        stack.callback(restore_modes, {each: each.training for each in model.modules()})
        model.eval()
        for each in found:
            stack.callback(each.register_forward_hook(after, with_kwargs=True).remove)
        forward_batch(model, batch)
    names = {each: name for name, each in model.named_modules()}
    fused = {}
    for module, output in outputs.items():
        if len(readers[module]) != 1:
            continue
        (down,), gate = readers[module], found[module][0]
        reader, joint = getattr(module, down), getattr(module, gate)._joint
        joint.gate_for(reader)
        reader.like = torch.empty(0, dtype=output.dtype, device=_device(reader))
        replace_module(model, module, GatedMLP(module, gate, down))
        fused[names[module]] = f"{names[module]}.{down}"
    return fused


class Fused(NamedTuple):
    """What :func:`fuse` found, as the function of each step returns it."""

    projections: tuple[tuple[str, ...], ...]
    activations: dict[str, str]
    glu: dict[str, str]
    quantization: dict[str, str]


def fuse(model: nn.Module, batch: Any) -> Fused:
    """Fuse dense quantized layers with what is around them, in place: all steps, in the order that they need.

    :func:`fuse_projections`, :func:`fuse_activations`, :func:`fuse_glu` and :func:`fuse_quantization`, which say what
    each does, and where; the model runs on the batch for each. All but activations need frozen layers. Files of the
    model stay those of the model without it, so call it again after loading one.

    Parameters
    ----------
    model : nn.Module
        As :func:`magicube_cutlass.convert` left it.
    batch : Tensor, tuple, list or mapping
        An input, as for :func:`magicube_cutlass.nn.calibrate`. It must reach all that the model does.

    Returns
    -------
    Fused
        What each step found, by name.

    Raises
    ------
    ValueError
        For a model without :class:`QuantLinear` layers.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 8))
    >>> report = mc.convert(model, mc.nn.QuantConfig("int8"), freeze=True)
    >>> mc.nn.fuse(model, torch.randn(4, 64)).activations
    {'0': 'gelu'}
    """
    layers = [each for each in model.modules() if isinstance(each, QuantLinear)]
    if not layers:
        raise ValueError("model must have QuantLinear layers, got none: see convert")
    # first: layers with an activation are left alone there
    projections = fuse_projections(model, batch) if any(each.frozen for each in layers) else ()
    activations = fuse_activations(model, batch)
    return Fused(projections, activations, fuse_glu(model, batch), fuse_quantization(model, batch))
