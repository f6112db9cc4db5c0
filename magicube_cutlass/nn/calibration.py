"""Static scales of activations: one pass over sample inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from magicube_cutlass.nn.config import SparseQuantConfig
from magicube_cutlass.quantization.quantize import quantize


class Calibrated(nn.Module):
    """A layer whose activations take one scale each after :func:`calibrate`."""

    config: SparseQuantConfig
    act_scale: Tensor | None


def _run(model: nn.Module, batch: Any) -> None:
    """The model on the inputs of ``batch``: a tensor, the first of a tuple or list, or keyword arguments."""
    if isinstance(batch, dict):
        model(**batch)
    elif isinstance(batch, (tuple, list)):
        model(batch[0])
    else:
        model(batch)


def _watch(
    layer: nn.Module,
    inputs: tuple[Tensor, ...],
    named: dict[str, Tensor],
    *,
    seen: dict[Calibrated, list[Tensor]],
    clip: float | str,
) -> None:
    assert isinstance(layer, Calibrated)
    x = inputs[0] if inputs else named["x"]
    if x.numel():
        scale = quantize(x.reshape(1, -1), layer.config.act_bits, clip=clip).scale  # type: ignore[arg-type]
        assert scale is not None
        seen.setdefault(layer, []).append(scale.float())


def _restore(modes: dict[nn.Module, bool]) -> None:
    for module, training in modes.items():
        module.training = training


@torch.no_grad()
def calibrate(
    model: nn.Module, batches: Iterable[Any], *, clip: float | str = "max", progress: bool = True
) -> dict[str, float | None]:
    """Run ``model`` over ``batches`` and give its layers one scale each for their activations.

    Arguments:
        model: with :class:`SparseQuantLinear` layers; runs in evaluation mode, without gradients and with the scale a
            token of uncalibrated layers; every module's mode is restored.
        batches: inputs: tensors, tuples or lists whose first entry is the input, or dicts of keyword arguments.
        clip: "max" covers the largest magnitude of all batches; a percentile in (0, 100] or "mse" are taken of each
            batch and averaged; as in :func:`magicube_cutlass.quantize`.
        progress: show a bar on the terminal.
    Returns the scale of each layer by name, None for layers that no batch reached, which keep a scale a token.
    Raises ``ValueError`` for a model without such layers, no batches, or inputs with inf or nan.
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, Calibrated)}
    if not layers:
        raise ValueError("model must have SparseQuantLinear layers, got none: see convert")
    seen: dict[Calibrated, list[Tensor]] = {}
    count = 0
    with ExitStack() as stack:
        for layer in layers.values():
            layer.act_scale = None
            handle = layer.register_forward_pre_hook(partial(_watch, seen=seen, clip=clip), with_kwargs=True)
            stack.callback(handle.remove)
        stack.callback(_restore, {each: each.training for each in model.modules()})
        model.eval()
        for batch in _shown(batches, progress):
            _run(model, batch)
            count += 1
    if not count:
        raise ValueError("batches must hold at least one batch, got none")
    for layer, scales in seen.items():
        stacked = torch.stack(scales)  # (batches,)
        layer.act_scale = stacked.amax() if clip == "max" else stacked.mean()
    return {name: None if each.act_scale is None else float(each.act_scale) for name, each in layers.items()}


def _shown(batches: Iterable[Any], progress: bool) -> Iterable[Any]:
    if not progress:
        return batches
    from rich.console import Console
    from rich.progress import track

    total = len(batches) if isinstance(batches, Sized) else None
    return track(batches, "calibration", total=total, console=Console(stderr=True), transient=True)
