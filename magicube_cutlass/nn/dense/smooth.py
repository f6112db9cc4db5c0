"""Smooth scales: outlier channels of activations move into the weights."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from magicube_cutlass.nn.calibration import forward_batch, restore_modes, shown
from magicube_cutlass.nn.dense.linear import QuantLinear


def _see(layer: nn.Module, inputs: tuple[Tensor, ...], *, seen: dict[nn.Module, Tensor]) -> None:
    x = inputs[0].detach()
    if x.numel():
        top = x.reshape(-1, x.shape[-1]).abs().amax(0).float()
        seen[layer] = torch.maximum(seen[layer], top) if layer in seen else top


@torch.no_grad()
def smooth(model: nn.Module, batches: Iterable[Any], *, alpha: float = 0.5, progress: bool = True) -> dict[str, Tensor]:
    """Set the smooth scale of each :class:`QuantLinear` from sample inputs: ``s = max|x|^alpha / max|W|^(1 - alpha)``.

    The maxima are per input feature, s is per feature and 1 where either is zero. The layer divides its input by s and
    multiplies its weight by s before both are quantized. Implements [1]_, without folding s into the layer before.

    Parameters
    ----------
    model : nn.Module
        With layers that are not frozen. It runs in evaluation mode; the mode of each module is restored.
    batches : iterable
        As for :func:`magicube_cutlass.nn.calibrate`. Run that afterwards: static scales are dropped.
    alpha : float, default 0.5
        0 to 1: how much of the range moves into the weights.
    progress : bool, default True
        Show a progress bar.

    Returns
    -------
    dict
        Scale (in,) per layer name, of the layers that a batch reached.

    Raises
    ------
    RuntimeError
        If a layer is frozen.
    ValueError
        For a model without such layers, no batches, or another `alpha`.

    References
    ----------
    .. [1] Xiao et al., SmoothQuant, ICML 2023, equation 4.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> layer = mc.nn.QuantLinear.from_linear(torch.nn.Linear(16, 8))
    >>> mc.nn.smooth(layer, [torch.ones(2, 16)], progress=False)[""].shape
    torch.Size([16])
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha!r}")
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QuantLinear)}
    if not layers:
        raise ValueError("model must have QuantLinear layers, got none: see convert")
    if any(each.frozen for each in layers.values()):
        raise RuntimeError("smooth needs master weights, which freeze() gave up")
    seen: dict[nn.Module, Tensor] = {}
    count = 0
    with ExitStack() as stack:
        for layer in layers.values():
            layer.smooth = layer.act_scale = None
            stack.callback(layer.register_forward_pre_hook(partial(_see, seen=seen)).remove)
        stack.callback(restore_modes, {each: each.training for each in model.modules()})
        model.eval()
        for batch in shown(batches, progress):
            forward_batch(model, batch)
            count += 1
    if not count:
        raise ValueError("batches must hold at least one batch, got none")
    for layer in layers.values():
        if layer in seen and layer.weight is not None:
            of_weight = layer.weight.detach().float().abs().amax(0)  # (in,)
            scale = seen[layer] ** alpha / of_weight.clamp(min=1e-30) ** (1 - alpha)
            is_zero = (seen[layer] == 0) | (of_weight == 0)
            layer.smooth = torch.where(is_zero, 1.0, scale.clamp(1e-5, 1e5))
    return {name: each.smooth for name, each in layers.items() if each.smooth is not None}
