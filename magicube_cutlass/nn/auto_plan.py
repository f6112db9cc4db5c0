"""A format for each layer by a budget: sensitivity of the output, predicted time, the fastest plan within the loss."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from magicube_cutlass.dispatch import cpu_costs
from magicube_cutlass.nn.calibration import forward_batch, restore_modes, shown
from magicube_cutlass.nn.config import QuantConfig, SparseQuantConfig
from magicube_cutlass.nn.weight_modules import LayerConfig, kind_of_module, make_layer, reason, set_module, weight_shape

__all__ = ["Budget", "PlanChoice", "find_plan"]

log = logging.getLogger("magicube")
CHOICES: tuple[LayerConfig, ...] = (QuantConfig("int8"), QuantConfig("int4", group_size=32))
_SECONDS = 0.02  # to time a layer without a cost model
_ROUNDS = 6  # searches with a smaller budget, if losses do not add up


@dataclass(frozen=True)
class Budget:
    """How much a model may lose by ``convert(model, "auto", budget=...)``.

    Parameters
    ----------
    max_loss : float
        Most by which the metric may rise above that of the float model.
    data : sequence
        Batches as for :func:`magicube_cutlass.nn.calibrate`. Times are predicted for the number of tokens that each
        layer has in the first one.
    metric : callable, optional
        ``metric(model) -> float``, smaller is better. Default: squared error of the output over all of `data`, relative
        to the float model's; 0 for that.
    choices : sequence of SparseQuantConfig or QuantConfig
        What a layer may become. Default: int8, and int4 with scales of 32.

    Raises
    ------
    ValueError
        For a negative loss, no data or no choices.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
    >>> budget = mc.nn.Budget(max_loss=0.01, data=[torch.randn(64, 512)])
    >>> mc.convert(model, "auto", budget=budget, progress=False).predicted is not None
    True
    """

    max_loss: float
    data: Sequence[Any]
    metric: Callable[[nn.Module], float] | None = None
    choices: Sequence[LayerConfig] = CHOICES

    def __post_init__(self) -> None:
        if not self.max_loss >= 0:
            raise ValueError(f"max_loss must be at least 0, got {self.max_loss!r}")
        for name in ("data", "choices"):
            if not len(getattr(self, name)):
                raise ValueError(f"{name} must hold at least one entry, got none")


@dataclass(frozen=True)
class PlanChoice:
    """What the search found.

    Attributes
    ----------
    plan : dict
        Config per layer name; None: left in float.
    loss : float
        Rise of the metric with the whole plan.
    microseconds, float_microseconds : float
        Predicted time of the layers of the plan, and in float.
    sensitivity : dict
        (layer name, config) -> rise of the metric with this layer alone.

    Examples
    --------
    >>> PlanChoice({"head": None}, 0.0, 10.0, 10.0).plan
    {'head': None}
    """

    plan: Mapping[str, LayerConfig | None]
    loss: float
    microseconds: float
    float_microseconds: float
    sensitivity: Mapping[tuple[str, LayerConfig], float] = field(default_factory=dict, repr=False)


def _first_tensor(output: Any) -> Tensor:
    """The output, or its first tensor."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    return _first_tensor(next(iter(values)))


def first_outputs(model: nn.Module, data: Sequence[Any]) -> list[Tensor]:
    """Return the first tensor of the output for each batch, float32."""
    return [_first_tensor(forward_batch(model, batch)).float() for batch in data]


def output_error(data: Sequence[Any], want: list[Tensor]) -> Callable[[nn.Module], float]:
    """Return the squared error of a model's outputs, relative to `want`: the default metric."""
    total = sum(float(each.double().square().sum()) for each in want) or 1.0

    def measure(model: nn.Module) -> float:
        found = zip(first_outputs(model, data), want, strict=True)
        return sum(float((a - b).double().square().sum()) for a, b in found) / total

    return measure


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    modes = {each: each.training for each in model.modules()}
    paths = {
        each: each.activation_relu_or_gelu for each in model.modules() if isinstance(each, nn.TransformerEncoderLayer)
    }
    model.eval()
    for layer in paths:
        layer.activation_relu_or_gelu = 0  # its fast path reads float weights
    try:
        with torch.no_grad():
            yield
    finally:
        restore_modes(modes)
        for layer, before in paths.items():
            layer.activation_relu_or_gelu = before


def _tokens(model: nn.Module, layers: Mapping[str, nn.Module], batch: Any) -> dict[str, int]:
    """Rows that each layer multiplies in a batch; 0 if it is not reached."""
    found = dict.fromkeys(layers, 0)

    def see(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
            features = 1 if kind_of_module(layer) == "conv" else -1
            rows = output.numel() // output.shape[features]
            found[name] = max(found[name], rows)

        return hook

    handles = [layer.register_forward_hook(see(name)) for name, layer in layers.items()]
    try:
        forward_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


@lru_cache(maxsize=4096)
def predict_layer(m: int, k: int, rows: int, config: LayerConfig | None, threads: int) -> float:
    """Return the predicted microseconds of a linear layer (m, k) on this CPU; None: float32.

    int8 layers, dense and sparse, have a cost model (:mod:`magicube_cutlass.dispatch.cpu_costs`). Others are timed on
    random numbers.

    Examples
    --------
    >>> predict_layer(64, 64, 1, QuantConfig("int8"), 1) > 0
    True
    """
    if isinstance(config, SparseQuantConfig) or (config == QuantConfig("int8")):
        sparsity = config.sparsity if isinstance(config, SparseQuantConfig) else 0.0
        both = cpu_costs.get_costs().layer(m, k, (1 - sparsity) * m * k, rows, threads)
        return (both[1] if isinstance(config, QuantConfig) else min(both)) / 1e3
    layer: nn.Module = nn.Linear(k, m)
    layer = layer if config is None else make_layer(layer, config)
    layer.eval()
    x, best, start = torch.randn(rows, k, device="cpu"), float("inf"), time.perf_counter()
    with torch.no_grad():
        layer(x)
        while time.perf_counter() - start < _SECONDS or best == float("inf"):
            begin = time.perf_counter()
            layer(x)
            best = min(best, time.perf_counter() - begin)
    return best * 1e6


def _predict(layer: nn.Module, rows: int, config: LayerConfig | None) -> float:
    shape = weight_shape(layer)
    k = shape[1] if len(shape) == 2 else int(torch.tensor(shape[1:], device="cpu").prod())
    if kind_of_module(layer) == "embedding" or rows == 0:
        return 0.0
    return predict_layer(shape[0], k, rows, config, torch.get_num_threads())


def _scan(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    budget: Budget,
    metric: Callable[[nn.Module], float],
    base: float,
    progress: bool,
) -> dict[tuple[str, LayerConfig], float]:
    """Rise of the metric with each layer alone in each format."""
    found: dict[tuple[str, LayerConfig], float] = {}
    trials = [(name, each) for name in layers for each in budget.choices if not reason(layers[name], each)]
    for name, config in shown(trials, progress, "sensitivity"):
        set_module(model, name, make_layer(layers[name], config))
        try:
            found[name, config] = metric(model) - base
        finally:
            set_module(model, name, layers[name])
    return found


def _fastest(
    layers: Sequence[str],
    times: Mapping[tuple[str, LayerConfig | None], float],
    losses: Mapping[tuple[str, LayerConfig], float],
    most: float,
) -> dict[str, LayerConfig | None]:
    """Plan of least time whose losses add up to at most `most`: the steps that save the most per loss, first."""
    plan: dict[str, LayerConfig | None] = dict.fromkeys(layers)
    spent = 0.0
    while True:
        best: tuple[float, str, LayerConfig, float] | None = None
        for (name, config), loss in losses.items():
            saved = times[name, plan[name]] - times[name, config]
            now = plan[name]
            added = max(loss, 0.0) - (0.0 if now is None else max(losses[name, now], 0.0))
            if saved <= 0 or spent + added > most:
                continue
            gain = saved / max(added, 1e-12)
            if best is None or gain > best[0]:
                best = (gain, name, config, added)
        if best is None:
            return plan
        plan[best[1]], spent = best[2], spent + best[3]


def find_plan(
    model: nn.Module, layers: Mapping[str, nn.Module], budget: Budget, *, progress: bool = True
) -> PlanChoice:
    """Return the plan that is predicted to be the fastest within a budget, its loss measured on the whole model.

    The loss of a plan is taken as the sum of those of its layers alone. If the whole plan loses more than that and than
    the budget, the search is repeated with a smaller sum.

    Parameters
    ----------
    model : nn.Module
        On a CPU; left as it was.
    layers : mapping
        Name -> module that may be replaced.
    budget : Budget
        Loss, data, metric and choices.
    progress : bool, default True
        Show a progress bar.

    Returns
    -------
    PlanChoice

    Raises
    ------
    NotImplementedError
        For a model on another device: only a CPU's layers can be priced.
    """
    devices = {each.device.type for each in model.parameters()}
    if devices - {"cpu"}:
        raise NotImplementedError(f"plan='auto' needs a model on a CPU, got {', '.join(sorted(devices))}")
    with _evaluated(model):
        metric = budget.metric or output_error(budget.data, first_outputs(model, budget.data))
        base = metric(model)
        rows = _tokens(model, layers, budget.data[0])
        losses = _scan(model, layers, budget, metric, base, progress)
        times: dict[tuple[str, LayerConfig | None], float] = {
            (name, config): _predict(layers[name], rows[name], config) for name, config in losses
        }
        times |= {(name, None): _predict(each, rows[name], None) for name, each in layers.items()}
        plan, loss, most = dict[str, LayerConfig | None](), 0.0, budget.max_loss
        for _ in range(_ROUNDS):
            plan = _fastest([*layers], times, losses, most)
            loss = _loss_of(model, layers, plan, metric, base)
            log.info("plan of %d layers: loss %.3g of %.3g", sum(map(bool, plan.values())), loss, budget.max_loss)
            if loss <= budget.max_loss:
                break
            most *= min(0.7, 0.9 * budget.max_loss / loss)
        else:
            plan, loss = dict.fromkeys(layers), 0.0
    total = sum(times[name, choice] for name, choice in plan.items())
    return PlanChoice(plan, loss, total, sum(times[name, None] for name in layers), losses)


def _loss_of(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    plan: Mapping[str, LayerConfig | None],
    metric: Callable[[nn.Module], float],
    base: float,
) -> float:
    """Rise of the metric with a whole plan."""
    try:
        for name, config in plan.items():
            if config is not None:
                set_module(model, name, make_layer(layers[name], config))
        return metric(model) - base
    finally:
        for name, layer in layers.items():
            set_module(model, name, layer)
