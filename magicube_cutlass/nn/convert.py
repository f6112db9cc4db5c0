"""Conversion of the layers of a model, selected by name, or by a budget of quality."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from magicube_cutlass.checks import NOT_GIVEN
from magicube_cutlass.nn.auto_plan import Budget, PlanChoice, find_plan
from magicube_cutlass.nn.calibration import calibrate as run_calibration
from magicube_cutlass.nn.config import SparseQuantConfig
from magicube_cutlass.nn.dense.embedding import QuantEmbedding
from magicube_cutlass.nn.dense.linear import QuantLinear
from magicube_cutlass.nn.dense.smooth import smooth as run_smoothing
from magicube_cutlass.nn.linear import SparseQuantLinear
from magicube_cutlass.nn.report import ConversionReport, ConversionRow
from magicube_cutlass.nn.weight_modules import (
    KINDS,
    LayerConfig,
    has_weight,
    inner_layer,
    kind_of_module,
    make_layer,
    reason,
    set_module,
    take_mask,
    weight_shape,
)

__all__ = ["LayerConfigs", "convert"]

LayerConfigs = LayerConfig | Mapping[str, LayerConfig | None] | None
_Chosen = tuple[str | None, LayerConfig | None]


def _bytes(module: nn.Module) -> int:
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()))


def _own_bytes(module: nn.Module) -> int:
    """Bytes of the module's own tensors, without those of its children."""
    own = (*module._parameters.values(), *module._buffers.values())
    return sum(each.nbytes for each in own if each is not None)


def _config_of(name: str, plan: LayerConfigs) -> _Chosen:
    """First pattern that matches `name`, and its config."""
    if not isinstance(plan, Mapping):
        return "*", plan or SparseQuantConfig()
    for pattern, choice in plan.items():
        if name == pattern or fnmatchcase(name, pattern):
            return pattern, choice
    return None, None


def _check_patterns(plan: LayerConfigs, chosen: Mapping[str, _Chosen], others: Iterable[str]) -> None:
    """Raise `ValueError` for a pattern of a plan that decides nothing."""
    fitting = {pattern for pattern, _ in chosen.values()}
    for pattern in plan if isinstance(plan, Mapping) else ():
        if pattern not in fitting and not any(fnmatchcase(name, pattern) for name in others):
            names = ", ".join(chosen) or "none"
            raise ValueError(f"plan must name layers, got {pattern!r}, the first to fit none of: {names}")


def convert(
    model: nn.Module,
    plan: LayerConfigs | Literal["auto"] = None,
    *,
    budget: Budget | None = None,
    data: Iterable[Any] | None = None,
    smooth: float | Literal["auto"] | None = None,
    kinds: Sequence[str] = ("linear",),
    calibrate: Iterable[Any] | None = None,
    clip: float | str = "max",
    freeze: bool = False,
    progress: bool = True,
    config: LayerConfigs = NOT_GIVEN,
) -> ConversionReport:
    """Replace layers of a model, in place, by :class:`QuantLinear` and :class:`SparseQuantLinear` layers.

    Linear layers are ``nn.Linear`` and the ``Conv1D`` of transformers. Convolutions without groups become products over
    patches, embeddings lookups of integers. Masks of ``torch.nn.utils.prune`` are taken over: a sparse layer stores the
    vectors that hold an unmasked entry. Weights on the meta device can become dense layers, to be loaded later.

    Parameters
    ----------
    model : nn.Module
        A layer with several names stays one layer. Subclasses of ``nn.Linear`` are left: other modules may read their
        weights.
    plan : SparseQuantConfig, QuantConfig, mapping, "auto" or None
        For all layers; or per name or pattern of qualified names as in ``fnmatch``, of which the first match counts:
        ``{"head": None, "encoder.*.fc?": QuantConfig("int4", group_size=32)}``. None, or no match, leaves a layer.
        ``"auto"`` searches the fastest plan within `budget`. Default: ``SparseQuantConfig()``.
    budget : Budget, optional
        Loss, data and metric of ``"auto"``.
    data : iterable, optional
        Inputs for `smooth`, as for :func:`magicube_cutlass.nn.calibrate`.
    smooth : float or "auto", optional
        The `alpha` of :func:`magicube_cutlass.nn.smooth`, for the dense layers.
    kinds : sequence of str, default ("linear",)
        What may be replaced: ``"linear"``, ``"conv"``, ``"embedding"``. An embedding drops its float weight at once.
    calibrate : iterable, optional
        Inputs for static activation scales, see :func:`magicube_cutlass.nn.calibrate`.
    clip : float or {"max", "mse"}, default "max"
        As for :func:`magicube_cutlass.nn.calibrate`.
    freeze : bool, default False
        Drop the master weights.
    progress : bool, default True
        Show progress bars.
    config : deprecated
        Former name of `plan`.

    Returns
    -------
    ConversionReport
        Each module with a weight, with its bytes before and after, or the reason why it was left.

    Raises
    ------
    TypeError
        If `model` is a linear layer itself, which cannot be replaced in place.
    ValueError
        For a pattern that matches no layer, and ``"auto"`` without a budget.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    >>> mc.convert(model, {"0": mc.nn.QuantConfig("int4", group_size=32)}).converted
    ('0',)
    """
    if config is not NOT_GIVEN:
        warnings.warn("config is deprecated; use plan", DeprecationWarning, stacklevel=2)
        plan = config
    _check_arguments(model, plan, budget, data, smooth, kinds)
    total = _bytes(model)
    found = [(name, each) for name, each in model.named_modules(remove_duplicate=False) if has_weight(each)]
    able = {name: each for name, each in found if kind_of_module(each) in kinds or _is_linear_like(each, kinds)}
    choice: PlanChoice | None = None
    if plan == "auto":
        assert budget is not None
        replaceable = _first_names({name: each for name, each in able.items() if kind_of_module(each)})
        choice = find_plan(model, replaceable, budget, progress=progress)
        plan = {**choice.plan}
    assert not isinstance(plan, str)
    chosen = {name: _config_of(name, plan) for name in able}
    _check_patterns(plan, chosen, [name for name, _ in found if name not in able])
    made, rows = _replace_layers(model, found, able, chosen)
    if smooth is not None:
        assert data is not None
        run_smoothing(model, data, alpha=smooth, progress=progress)
    if calibrate is not None:
        run_calibration(model, calibrate, clip=clip, progress=progress)
    for new in made.values() if freeze else ():
        _freeze(new)
    return ConversionReport(tuple(rows), total, tuple(_leave_fast_paths(model)), choice)


def _check_arguments(
    model: nn.Module, plan: object, budget: object, data: object, smooth: object, kinds: Sequence[str]
) -> None:
    """Raise for arguments of :func:`convert` that do not fit each other."""
    if isinstance(model, nn.Linear):
        raise TypeError("model must have linear layers inside, got one itself: SparseQuantLinear.from_linear(model)")
    if isinstance(plan, str) and plan != "auto":
        raise ValueError(f"plan must be a config, a mapping or 'auto', got {plan!r}")
    if (plan == "auto") is not (budget is not None):
        raise ValueError("plan='auto' and budget must be given together")
    if smooth is not None and data is None:
        raise ValueError("smooth must be given with data")
    if unknown := [each for each in kinds if each not in KINDS]:
        raise ValueError(f"kinds must be of {KINDS}, got {unknown[0]!r}")


def _is_linear_like(module: nn.Module, kinds: Sequence[str]) -> bool:
    """Whether a module is a subclass of a linear layer, which patterns may name though it is left."""
    return isinstance(module, nn.Linear) and "linear" in kinds


def _first_names(layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Each layer by its first name."""
    named: dict[nn.Module, str] = {}
    for name, layer in layers.items():
        named.setdefault(layer, name)
    return {name: layer for layer, name in named.items()}


def _replace_layers(
    model: nn.Module,
    found: Sequence[tuple[str, nn.Module]],
    able: Mapping[str, nn.Module],
    chosen: Mapping[str, _Chosen],
) -> tuple[dict[nn.Module, nn.Module], list[ConversionRow]]:
    """Replace the chosen layers; return the new ones and the rows of the report."""
    first: dict[nn.Module, _Chosen] = {}
    for name, layer in able.items():  # all names of a layer get what the first one with a pattern gets
        if chosen[name][0] is not None:
            first.setdefault(layer, chosen[name])
    made: dict[nn.Module, nn.Module] = {}
    tables: dict[int, QuantEmbedding] = {}
    rows = []
    for name, layer in found:
        pattern, choice = first.get(layer, (None, None))
        if layer in made:
            set_module(model, name, made[layer])
            rows.append(_left(name, layer, "the same layer again"))
            continue
        if name not in able:
            kind = kind_of_module(layer)
            note = f"left: kinds has no {kind!r}" if kind else reason(layer, SparseQuantConfig())
        elif choice is None:
            note = "no pattern fits" if pattern is None else f"left, as {pattern!r} says"
        else:
            note = reason(layer, choice)
        if note or choice is None:
            rows.append(_left(name, layer, note))
            continue
        mask = take_mask(layer)
        shape, before = weight_shape(layer), _own_bytes(layer)
        made[layer] = new = make_layer(layer, choice, mask)
        set_module(model, name, new)
        inner = inner_layer(new)
        assert isinstance(inner, (QuantLinear, SparseQuantLinear, QuantEmbedding))
        if isinstance(inner, QuantEmbedding):
            tables[id(layer._parameters["weight"])] = inner
        rows.append(ConversionRow(name, shape, inner.config, before, inner.compressed_bytes, "", kind_of_module(layer)))
    _share_tables(made, tables)
    return made, rows


def _share_tables(made: Mapping[nn.Module, nn.Module], tables: Mapping[int, QuantEmbedding]) -> None:
    """Remember which linear layers have the weight of an embedding, so that they share the integers once frozen."""
    for old, new in made.items():
        table = tables.get(id(old._parameters.get("weight")))
        if isinstance(new, QuantLinear) and table is not None:
            new.__dict__["_table"] = table  # no child of the layer


def _freeze(layer: nn.Module) -> None:
    inner = inner_layer(layer)
    if not isinstance(inner, (QuantLinear, SparseQuantLinear)):
        return
    inner.freeze()
    table = inner.__dict__.pop("_table", None)
    if table is None or not isinstance(inner, QuantLinear) or inner.smooth is not None:
        return
    if (inner.config.weight, inner.config.group_size, inner.config.symmetric, inner.config.clip) == table.kind:
        table.qweight, table.scale, table.minimum = inner.qweight, inner.scale, inner.minimum


def _leave_fast_paths(model: nn.Module) -> Iterator[str]:
    """Turn off the fast path of encoder layers with a converted layer; yield their names.

    In evaluation without gradients ``nn.TransformerEncoderLayer`` hands ``linear1.weight`` to a kernel of its own: it
    would run the dense master, and fails for a frozen layer.
    """
    for name, each in model.named_modules():
        if isinstance(each, nn.TransformerEncoderLayer) and any(
            isinstance(layer, (QuantLinear, SparseQuantLinear)) for layer in (each.linear1, each.linear2)
        ):
            if each.activation_relu_or_gelu:
                each.__dict__["_activation_before"] = each.activation_relu_or_gelu
            each.activation_relu_or_gelu = 0  # what torch looks at before it takes the fast path
            yield name or type(each).__name__


def _left(name: str, layer: nn.Module, note: str) -> ConversionRow:
    size, kind = _own_bytes(layer), kind_of_module(layer) or type(layer).__name__
    return ConversionRow(name, weight_shape(layer), None, size, size, note, kind)
