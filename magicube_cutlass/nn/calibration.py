"""Calibration: static activation scales from one pass over sample inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from magicube_cutlass.nn.config import SparseQuantConfig
from magicube_cutlass.quantization.quantize import quantize

__all__ = ["Calibrated", "calibrate"]


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


def _ratio(rows: list[Tensor]) -> float:
    """The largest value of all rows beside that of the median row, from the magnitudes (rows,) of each batch."""
    top = torch.cat(rows)
    return float(top.amax() / top.median()) if top.numel() else 1.0


def _is_coarse(layer: Calibrated) -> bool:
    """Whether the integers of activations have 8 bits or fewer."""
    return getattr(layer, "act", "") != "e4m3" and getattr(layer.config, "act_bits", 8) <= 8


def restore_modes(modes: dict[nn.Module, bool]) -> None:
    """Set the training mode of each module."""
    for module, training in modes.items():
        module.training = training


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    clip: float | str = "max",
    max_ratio: float = 4.0,
    progress: bool = True,
) -> dict[str, float | None]:
    """Run a model over sample inputs and set the static activation scale of each layer that one scale fits.

    ``s = max|x| / (2^(b - 1) - 1)`` of all rows x. Single rows far beyond the others, as language models have them,
    leave the others few steps: a layer whose rows differ by more than `max_ratio` keeps a scale per row.

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
    max_ratio : float, default 4
        Largest ``max|x|`` of all rows, beside that of the median row, of a layer that gets a static scale: the median
        row then has 31 or more of 127 steps. ``inf``: all get one. Of 8 bits and fewer with ``clip="max"``; integers of
        16 bits, e4m3 and clipped scales have no limit.
    progress : bool, default True
        Show a progress bar.

    Returns
    -------
    dict
        Scale per layer name; None for layers that no batch reached, whose rows differ by more than `max_ratio`, and for
        formats without a static scale.

    Raises
    ------
    ValueError
        For a model without such layers, no batches, non-finite inputs, or a `max_ratio` below 1.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 8))
    >>> report = mc.convert(model)
    >>> mc.nn.calibrate(model, [torch.full((2, 16), 1.27)], progress=False)
    {'0': 0.009999999776482582}
    """
    if not max_ratio >= 1:
        raise ValueError(f"max_ratio must be 1 or more, got {max_ratio}")
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
        if clip != "max":
            layer.act_scale = stacked.mean()
        elif not _is_coarse(layer) or _ratio(rows[layer]) <= max_ratio:
            layer.act_scale = stacked.amax()
    return {name: None if each.act_scale is None else float(each.act_scale) for name, each in layers.items()}


def shown(batches: Iterable[Any], progress: bool, title: str = "calibration") -> Iterable[Any]:
    """Return the batches, with a progress bar on stderr on request."""
    if not progress:
        return batches
    from rich.console import Console
    from rich.progress import track

    total = len(batches) if isinstance(batches, Sized) else None
    return track(batches, title, total=total, console=Console(stderr=True), transient=True)
