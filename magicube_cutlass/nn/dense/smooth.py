"""Smooth scales: outlier channels of activations move into the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cute_kernels.gemm.epilogue import activate
from magicube_cutlass.nn.auto_plan import first_outputs, output_error
from magicube_cutlass.nn.calibration import forward_batch, restore_modes, shown
from magicube_cutlass.nn.dense.fuse import Readers
from magicube_cutlass.nn.dense.linear import QuantLinear
from magicube_cutlass.nn.dense.product import inverse_of

ALPHAS = (None, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # that "auto" tries


def _see(layer: nn.Module, inputs: tuple[Tensor, ...], *, seen: dict[nn.Module, Tensor]) -> None:
    x = inputs[0].detach()
    if x.numel():
        top = x.reshape(-1, x.shape[-1]).abs().amax(0).float()
        seen[layer] = torch.maximum(seen[layer], top) if layer in seen else top


def _by_master(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The output of a layer that does not quantize."""
    assert isinstance(layer, QuantLinear)
    y = nn.functional.linear(inputs[0], layer.weight, layer.bias)  # type: ignore[arg-type]
    return activate(y, layer.config.activation)


@contextmanager
def _hooked(model: nn.Module, layers: Iterable[QuantLinear], before: Any = None, after: Any = None) -> Iterator[None]:
    """Evaluation mode, with hooks of the layers."""
    with ExitStack() as stack:
        for layer in layers:
            if before:
                stack.callback(layer.register_forward_pre_hook(before).remove)
            if after:
                stack.callback(layer.register_forward_hook(after).remove)
        stack.callback(restore_modes, {each: each.training for each in model.modules()})
        model.eval()
        yield


def _set_scales(seen: Mapping[nn.Module, Tensor], alpha: float | None) -> None:
    """Set the scales of the layers that were reached: ``max|x|^alpha / max|W|^(1 - alpha)``, 1 where either is 0."""
    for group in _readers(seen):
        if alpha is None:
            for layer in group:
                layer.smooth = None
            continue
        top = seen[group[0]]  # (in,)
        of_weight = torch.zeros_like(top)  # (in,)
        for layer in group:
            assert layer.weight is not None
            of_weight = torch.maximum(of_weight, layer.weight.detach().float().abs().amax(0))
        scale = top**alpha / of_weight.clamp(min=1e-30) ** (1 - alpha)
        for layer in group:
            layer.smooth = torch.where((top == 0) | (of_weight == 0), 1.0, scale.clamp(1e-5, 1e5))


def _readers(seen: Mapping[nn.Module, Tensor]) -> list[list[QuantLinear]]:
    """Neighbours in the order of calls that saw the same rows, by the maxima of these, as queries, keys and values."""
    found: list[list[QuantLinear]] = []
    for layer, top in seen.items():
        assert isinstance(layer, QuantLinear)
        if found and torch.equal(seen[found[-1][0]], top):
            found[-1].append(layer)
        else:
            found.append([layer])
    return found


def _best_alpha(
    model: nn.Module,
    layers: Sequence[QuantLinear],
    seen: Mapping[nn.Module, Tensor],
    data: Sequence[Any],
    progress: bool,
) -> float | None:
    """The alpha of least squared error of the model's output."""
    with _hooked(model, layers, after=_by_master):
        error = output_error(data, first_outputs(model, data))
    found: dict[float | None, float] = {}
    with _hooked(model, layers):
        for alpha in shown(ALPHAS, progress, "smooth scales"):
            _set_scales(seen, alpha)
            found[alpha] = error(model)
    return min(found, key=found.__getitem__)


@torch.no_grad()
def smooth(
    model: nn.Module, batches: Iterable[Any], *, alpha: float | Literal["auto"] = 0.5, progress: bool = True
) -> dict[str, Tensor]:
    """Set the smooth scale of each :class:`QuantLinear` from sample inputs: ``s = max|x|^alpha / max|W|^(1 - alpha)``.

    The maxima are per input feature, s is per feature and 1 where either is zero. The layer divides its input by s and
    multiplies its weight by s before both are quantized. Layers that are called with the same rows in turn, such as
    queries, keys and values, have one s by the largest of their weights: :func:`fuse_projections` can join them.
    Implements [1]_, without folding s into the layer before: the engine of a CPU multiplies by 1 / s while it
    quantizes. Below static scales a larger `alpha` serves better: SmolLM2's perplexity is least with 0.7.

    Parameters
    ----------
    model : nn.Module
        With layers that are not frozen. It runs in evaluation mode; the mode of each module is restored.
    batches : iterable
        As for :func:`magicube_cutlass.nn.calibrate`. Run that afterwards: static scales are dropped.
    alpha : float or "auto", default 0.5
        0 to 1: how much of the range moves into the weights. ``"auto"``: of none
        and 0.3 to 0.8 in steps of 0.1, what gives the least squared error of the model's output on the batches.
    progress : bool, default True
        Show a progress bar.

    Returns
    -------
    dict
        Scale (in,) per layer name, of the layers that have one now.

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
    if alpha != "auto" and not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie in [0, 1] or be 'auto', got {alpha!r}")
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QuantLinear)}
    if not layers:
        raise ValueError("model must have QuantLinear layers, got none: see convert")
    if any(each.frozen for each in layers.values()):
        raise RuntimeError("smooth needs master weights, which freeze() gave up")
    data: Iterable[Any] = list(batches) if alpha == "auto" else batches
    seen: dict[nn.Module, Tensor] = {}
    count = 0
    for layer in layers.values():
        layer.smooth = layer.act_scale = None
    with _hooked(model, layers.values(), before=partial(_see, seen=seen)):
        for batch in shown(data, progress):
            forward_batch(model, batch)
            count += 1
    if not count:
        raise ValueError("batches must hold at least one batch, got none")
    if alpha == "auto":
        assert isinstance(data, list)
        chosen = _best_alpha(model, [*layers.values()], seen, data, progress)
    else:
        chosen = alpha
    _set_scales(seen, chosen)
    return {name: each.smooth for name, each in layers.items() if each.smooth is not None}


@torch.no_grad()
def fold_smooth(model: nn.Module, batch: Any) -> dict[str, tuple[str, ...]]:
    """Divide the weights of norms by the smooth scales of the layers that read them, in place.

    ``norm(x) / s = f(x) (w / s) [+ b / s]``: layers that alone read the output of an RMS or layer norm then take it as
    it comes, and lose their smooth scale. The model runs on a batch, which shows who reads what; norms that share a
    weight are left as they are. Weights are rounded to their dtype, bfloat16 within 0.2%. Afterwards the state dict is
    that of the folded model: the state of the model before would undo it. Call this before :func:`fuse`.

    Parameters
    ----------
    model : nn.Module
        As :func:`magicube_cutlass.convert` with `smooth` and ``freeze=True`` left it. It runs in evaluation mode; the
        mode of each module is restored.
    batch : Tensor, tuple, list or mapping
        An input, as for :func:`magicube_cutlass.nn.calibrate`. It must reach all that the model does.

    Returns
    -------
    dict
        Names of the layers per name of a norm.

    Raises
    ------
    ValueError
        For a model without :class:`QuantLinear` layers.

    References
    ----------
    .. [1] Xiao et al., SmoothQuant, ICML 2023, section 4.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> model, x = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)), torch.randn(4, 64)
    >>> report = mc.convert(model, mc.nn.QuantConfig("int8"), data=[x], smooth=0.5, freeze=True)
    >>> mc.nn.fold_smooth(model, x)
    {'0': ('1',)}
    """
    names = {each: name for name, each in model.named_modules()}
    layers = [each for each in names if isinstance(each, QuantLinear)]
    if not layers:
        raise ValueError("model must have QuantLinear layers, got none: see convert")
    holders = Counter(each for module in names for each in module._parameters.values() if each is not None)
    norms = [each for each in names if type(each).__name__.endswith(("RMSNorm", "LayerNorm"))]
    run = Readers()
    run.watch(model, batch, layers, norms)
    folded = {}
    for norm in norms:
        found = [each for each in layers if each in run.readers.get(norm, ())]
        if not found or None in run.readers[norm] or any(run.makers[each] != {norm} for each in found):
            continue
        scales = [each.smooth for each in found if each.frozen and each.smooth is not None]
        same = len(scales) == len(found) and all(torch.equal(each, scales[0]) for each in scales)
        own = all(holders[each] == 1 for each in norm._parameters.values() if each is not None)
        if same and own and _divide(norm, scales[0]):
            for each in found:
                each.smooth = None
                each._forget()
            folded[names[norm]] = tuple(names[each] for each in found)
    return folded


def _divide(norm: nn.Module, smooth: Tensor) -> bool:
    """Divide what a norm gives by a scale per feature, if its weight and bias do so."""
    factors = inverse_of(smooth)  # (in,)
    weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
    mine = [each for each in (weight, bias) if each is not None]
    if weight is None or any(each.shape != factors.shape for each in mine):
        return False
    x = torch.linspace(-2, 3, 4 * factors.numel(), device=weight.device).view(4, -1).to(weight.dtype)
    before, want = [each.detach().clone() for each in mine], norm(x).float() * factors
    for each in mine:
        each.copy_(each.float() * factors)
    most = max(torch.finfo(weight.dtype).eps, 1e-5)  # two roundings of 16 bits; sums of float32
    if bool((norm(x).float() - want).norm() <= most * want.norm()):
        return True
    for each, old in zip(mine, before, strict=True):  # such as one that multiplies by 1 + w
        each.copy_(old)
    return False
