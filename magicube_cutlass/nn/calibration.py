"""Calibration: static activation scales from one pass over sample inputs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sized
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from magicube_cutlass.nn.config import SparseQuantConfig
from magicube_cutlass.quantization.quantize import quantize

__all__ = ["Calibrated", "calibrate"]

# Of the largest value of all rows beside the median row's: one scale for all then leaves that row fewer than 8 of 127
# steps. SmolLM2's perplexity goes from 21.6 to 37.7 with such scales (docs/lab/models.md).
FAR = 16.0


class Calibrated(nn.Module):
    """A layer with a static activation scale after :func:`calibrate`."""

    config: SparseQuantConfig
    act_scale: Tensor | None

    def activation_scale(self, x: Tensor, clip: float | str) -> Tensor | None:
        """Return the static scale () that covers inputs; None if the layer has none."""
        scale = quantize(x.reshape(1, -1), self.config.act_bits, clip=clip).scale  # type: ignore[arg-type]
        return None if scale is None else scale.float()


def forward_batch(model: nn.Module, batch: Any) -> Any:
    """Run the model on a batch: a tensor, the first entry of a tuple or list, or keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def _watch(
    layer: nn.Module,
    inputs: tuple[Tensor, ...],
    named: dict[str, Tensor],
    *,
    seen: dict[Calibrated, list[Tensor]],
    rows: dict[Calibrated, list[Tensor]],
    clip: float | str,
) -> None:
    assert isinstance(layer, Calibrated)
    x = inputs[0] if inputs else named["x"]
    if x.numel():
        scale = layer.activation_scale(x, clip)
        if scale is not None:
            seen.setdefault(layer, []).append(scale)
            smooth = getattr(layer, "smooth", None)
            top = (x if smooth is None else x / smooth).abs().reshape(-1, x.shape[-1]).amax(1).float()  # (rows,)
            rows.setdefault(layer, []).append(top[top > 0])


def _tell_outliers(rows: Mapping[str, list[Tensor]]) -> None:
    """Warn of layers whose rows one scale does not fit, from the largest magnitude of each row that is not zero."""
    far = {}
    for name, parts in rows.items():
        top = torch.cat(parts)
        ratio = float(top.amax() / top.median()) if top.numel() else 1.0
        if ratio > FAR:
            far[name] = ratio
    if far:
        worst = max(far, key=far.__getitem__)
        warnings.warn(
            f"one static scale does not fit the rows of {len(far)} of {len(rows)} layers: the largest value of "
            f"{worst!r} is {far[worst]:.0f} times that of its median row (more than {FAR:.0f}). Set act_scale = None "
            "there for a scale per row, or smooth them, and measure the model",
            UserWarning,
            stacklevel=4,
        )


def restore_modes(modes: dict[nn.Module, bool]) -> None:
    """Set the training mode of each module."""
    for module, training in modes.items():
        module.training = training


@torch.no_grad()
def calibrate(
    model: nn.Module, batches: Iterable[Any], *, clip: float | str = "max", progress: bool = True
) -> dict[str, float | None]:
    """Run a model over sample inputs and set the static activation scale of each layer.

    Parameters
    ----------
    model : nn.Module
        With :class:`SparseQuantLinear` or :class:`QuantLinear` layers. It runs in evaluation mode, without gradients
        and with dynamic scales in uncalibrated layers; the mode of each module is restored.
    batches : iterable
        Tensors, tuples or lists whose first entry is the input, or dicts of keyword arguments.
    clip : float or {"max", "mse"}, default "max"
        ``"max"`` covers the amax of all batches. A percentile in (0, 100] or ``"mse"`` is computed per batch and
        averaged; see :func:`magicube_cutlass.quantize`.
    progress : bool, default True
        Show a progress bar.

    Returns
    -------
    dict
        Scale per layer name; None for layers that no batch reached, and for formats without a static scale.

    Raises
    ------
    ValueError
        For a model without such layers, no batches, or non-finite inputs.

    Warns
    -----
    UserWarning
        If ``clip="max"`` covers single rows whose values are more than 16 times those of the others, as language models
        have them, so that integers of the others have few steps.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 8))
    >>> report = mc.convert(model)
    >>> mc.nn.calibrate(model, [torch.full((2, 16), 1.27)], progress=False)
    {'0': 0.009999999776482582}
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, Calibrated)}
    if not layers:
        raise ValueError("model must have SparseQuantLinear or QuantLinear layers, got none: see convert")
    seen: dict[Calibrated, list[Tensor]] = {}
    rows: dict[Calibrated, list[Tensor]] = {}
    count = 0
    with ExitStack() as stack:
        for layer in layers.values():
            layer.act_scale = None
            handle = layer.register_forward_pre_hook(partial(_watch, seen=seen, rows=rows, clip=clip), with_kwargs=True)
            stack.callback(handle.remove)
        stack.callback(restore_modes, {each: each.training for each in model.modules()})
        model.eval()
        for batch in shown(batches, progress):
            forward_batch(model, batch)
            count += 1
    if not count:
        raise ValueError("batches must hold at least one batch, got none")
    for layer, scales in seen.items():
        stacked = torch.stack(scales)  # (batches,)
        layer.act_scale = stacked.amax() if clip == "max" else stacked.mean()
    if clip == "max":
        integers = {name: each for name, each in layers.items() if each in rows and getattr(each, "act", "") != "e4m3"}
        _tell_outliers({name: rows[each] for name, each in integers.items()})
    return {name: None if each.act_scale is None else float(each.act_scale) for name, each in layers.items()}


def shown(batches: Iterable[Any], progress: bool, title: str = "calibration") -> Iterable[Any]:
    """Return the batches, with a progress bar on stderr on request."""
    if not progress:
        return batches
    from rich.console import Console
    from rich.progress import track

    total = len(batches) if isinstance(batches, Sized) else None
    return track(batches, title, total=total, console=Console(stderr=True), transient=True)
