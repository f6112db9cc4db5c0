"""Sparsity per layer by one threshold of saliency over all layers, and the predicted time of an allocation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from magicube_cutlass.checks import check_vector_length
from magicube_cutlass.dispatch.cpu_costs import get_costs
from magicube_cutlass.nn.calibration import forward_batch
from magicube_cutlass.pruning.embedding import Embed, mean_embedding
from magicube_cutlass.pruning.progress import track
from magicube_cutlass.pruning.solve import Method, vector_scores
from magicube_cutlass.pruning.statistics import InputStatistics
from magicube_cutlass.pruning.walk import Batch, BlockCalls, evaluation, find_blocks, linears, record_calls

__all__ = ["Allocation", "allocate", "predicted_us", "row_sensitivity"]

Allocation = Literal["uniform", "output_energy", "gauss_newton"]
ALLOCATIONS = ("uniform", "output_energy", "gauss_newton")
MOST = 0.97  # sparsity of a layer


def allocate(
    model: nn.Module,
    sparsity: float,
    data: Iterable[Batch],
    *,
    method: Allocation = "output_energy",
    vector_length: int = 8,
    score: Method = "obs",
    limits: tuple[float, float] = (0.3, 1.25),
    time_weight: float = 0.0,
    tokens: int = 400,
    row_weights: Mapping[str, Tensor] | None = None,
    embed: Embed | None = None,
    damp: float = 0.01,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, float]:
    """Distribute a sparsity over the layers of a model by one threshold on the saliency of their vectors.

    Saliency of a vector: its score, see ``vector_scores``, over ``E |W x|^2`` (``"output_energy"``: what dropping
    it costs as a share of its layer's output), or with rows weighted by ``row_sensitivity`` (``"gauss_newton"``:
    layers are compared by what they do to the result). Where both tie in quality, time decides: with
    ``time_weight = a`` the saliency is divided by ``t^a``, t the predicted time of a stored vector of its layer.

    Parameters
    ----------
    model : nn.Module
    sparsity : float
        Share of the vectors of all layers to drop, in [0, 1].
    data : iterable
        Batches: tensors, tuples or lists whose first entry is the input, or dicts of keyword arguments.
    method : {"uniform", "output_energy", "gauss_newton"}, default "output_energy"
    vector_length : int, default 8
        V.
    score : {"magnitude", "wanda", "obs"}, default "obs"
    limits : pair of float, default (0.3, 1.25)
        Least and largest sparsity of a layer, as multiples of `sparsity`; 0.97 at most.
    time_weight : float, default 0
        Weight of the predicted time, about 0 to 1.
    tokens : int, default 400
        Tokens per call for which times are predicted.
    row_weights : mapping, optional
        What ``row_sensitivity`` returned; computed if ``"gauss_newton"`` needs it.
    embed : callable, optional
        From the output and the batch to a vector per sample; default ``mean_embedding``.
    damp : float, default 0.01
        As for ``vector_scores``.
    seed : int, default 0
        Seed of the random projections.
    progress : bool, default True
        Show a progress bar.

    Returns
    -------
    dict
        Sparsity by the name of each linear layer in the blocks of the model, see ``find_blocks``.

    Examples
    --------
    >>> import torch
    >>> from magicube_cutlass.pruning import allocate
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
    >>> torch.nn.init.constant_(model[2].weight, 1e-3)[0, 0].item() > 0  # all of it counts alike
    True
    >>> found = allocate(model, 0.5, [torch.ones(4, 16)], progress=False)
    >>> sorted(found), round(sum(found.values()) / 2, 3)
    (['0', '2'], 0.5)
    """
    check_vector_length(vector_length)
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity must lie in [0, 1], got {sparsity!r}")
    if method not in ALLOCATIONS:
        raise ValueError(f"method must be one of {ALLOCATIONS}, got {method!r}")
    blocks = find_blocks(model)
    if method == "uniform":
        return {_join(name, each): sparsity for name, block in blocks.items() for each in linears(block)}
    batches = list(data)
    with evaluation(model):
        if method == "gauss_newton" and row_weights is None:
            row_weights = row_sensitivity(model, batches, embed=embed, seed=seed)
        saliency = {}
        for name, layer, gram in _grams(model, blocks, batches, progress):
            weight = layer.weight.detach()
            rows = row_weights.get(name) if row_weights is not None else None
            found = vector_scores(weight, score, vector_length, gram, row_weights=rows, damp=damp)
            if method == "output_energy":
                found = found / ((weight.double() @ gram) * weight).sum().clamp_min(1e-30)
            if time_weight:
                found = found / _vector_us(layer, vector_length, tokens) ** time_weight
            saliency[name] = found.flatten()
    return _threshold(saliency, sparsity, limits)


def _join(block: str, layer: str) -> str:
    return ".".join(filter(None, (block, layer)))


def _grams(
    model: nn.Module, blocks: dict[str, nn.Module], batches: Sequence[Batch], progress: bool
) -> Iterator[tuple[str, nn.Linear, Tensor]]:
    """Name, layer and second moments of the input of each layer; those of one block are held at a time."""
    with torch.no_grad():
        calls: list[BlockCalls] = [record_calls(model, list(blocks.values()), batch) for batch in batches]
        hidden = [each.hidden for each in calls]
        for index, (prefix, block) in enumerate(track(list(blocks.items()), "saliency", progress)):
            found = {
                name: InputStatistics(each.in_features, each.weight.device) for name, each in linears(block).items()
            }
            for place, each in enumerate(calls):
                with _added(block, found, each):
                    hidden[place] = each.run(index, block, hidden[place])
            for name, layer in linears(block).items():
                if found[name].tokens:
                    yield _join(prefix, name), layer, found[name].gram


@contextmanager
def _added(block: nn.Module, found: dict[str, InputStatistics], calls: BlockCalls) -> Iterator[None]:
    """Add the inputs of the linear layers of a block to their statistics."""

    def hook(name: str) -> Any:
        return lambda _, args: found[name].add(calls.selected(args[0]))

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in linears(block).items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def row_sensitivity(
    model: nn.Module, data: Iterable[Batch], *, embed: Embed | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Return the mean squared gradient of random projections of the embedding at each output of each linear layer.

    ``g_i = E (d <r, e> / d y_i)^2`` with e = ``embed(output)`` and r random normal: the diagonal of the Gauss-Newton
    matrix of the embedding with regard to the layer's outputs [1]_. It says how much an error of output i counts.

    Parameters
    ----------
    model : nn.Module
    data : iterable
        As for ``prune_model``.
    embed : callable, optional
        Default: ``mean_embedding``.
    seed : int, default 0
        Seed of r.

    Returns
    -------
    dict
        Float64 (M,) by layer name.

    References
    ----------
    .. [1] Martens, Grosse, arXiv 1503.05671, section 2.

    Examples
    --------
    >>> import torch
    >>> from magicube_cutlass.pruning import row_sensitivity
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    >>> {name: len(each) for name, each in row_sensitivity(model, [torch.randn(5, 4)]).items()}
    {'0': 8, '1': 3}
    """
    embed = embed or mean_embedding
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def note(name: str, gradient: Tensor) -> None:
        rows = gradient.detach().reshape(-1, gradient.shape[-1]).double()
        sums[name] = sums[name] + rows.square().sum(0) if name in sums else rows.square().sum(0)
        counts[name] = counts.get(name, 0) + len(rows)

    def watch(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: note(name, gradient))

        return hook

    wanted = {each: each.requires_grad for each in model.parameters()}
    first = next(each for each in wanted if each.is_floating_point())  # gradients run back to it, and to no other
    handles = [layer.register_forward_hook(watch(name)) for name, layer in linears(model).items()]
    try:
        for each in wanted:
            each.requires_grad_(each is first)
        with torch.enable_grad():
            for batch in data:
                vectors = embed(forward_batch(model, batch), batch)
                direction = torch.randn(vectors.shape, generator=generator, device="cpu").to(vectors)
                torch.autograd.grad((vectors * direction).sum(), first)
    finally:
        for handle in handles:
            handle.remove()
        for each, before in wanted.items():
            each.requires_grad_(before)
    return {name: sums[name] / counts[name] for name in linears(model) if name in sums}


def _threshold(saliency: Mapping[str, Tensor], sparsity: float, limits: tuple[float, float]) -> dict[str, float]:
    """Sparsity per layer under one threshold, moved by one amount until the limits leave `sparsity` in all."""
    if not saliency:
        raise ValueError("model must have linear layers that the data reaches, got none")
    values = torch.cat(list(saliency.values()))
    dropped = round(sparsity * len(values))
    if dropped == 0:
        return dict.fromkeys(saliency, 0.0)
    border = values.kthvalue(dropped).values
    raw = {name: float((each <= border).double().mean()) for name, each in saliency.items()}
    low, high = limits[0] * sparsity, max(min(limits[1] * sparsity, MOST), sparsity)
    sizes = {name: each.numel() / len(values) for name, each in saliency.items()}
    begin, end = -1.0, 1.0
    for _ in range(60):  # bisection
        shift = (begin + end) / 2
        found = {name: min(max(each + shift, low), high) for name, each in raw.items()}
        total = sum(sizes[name] * each for name, each in found.items())
        begin, end = (shift, end) if total < sparsity else (begin, shift)
    return found


def _vector_us(layer: nn.Linear, vector_length: int, tokens: int) -> float:
    """Predicted microseconds per stored vector of a layer on one thread."""
    m, k = layer.weight.shape
    costs = get_costs()
    full, empty = (costs.layer(m, k, stored, tokens, 1)[0] for stored in (float(m * k), 0.0))
    return max(full - empty, 1e-3) / 1000 / (m * k / vector_length)


def predicted_us(model: nn.Module, allocation: Mapping[str, float], tokens: int = 400, threads: int = 1) -> float:
    """Return the microseconds that the layers of an allocation are predicted to take on this CPU.

    The sum over layers of the smaller one of the sparse and the dense int8 time of the library's cost model.

    Parameters
    ----------
    model : nn.Module
    allocation : mapping
        Sparsity by the name of a linear layer.
    tokens : int, default 400
        Tokens per call.
    threads : int, default 1

    Returns
    -------
    float

    Examples
    --------
    >>> import torch
    >>> from magicube_cutlass.pruning import predicted_us
    >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512))
    >>> predicted_us(model, {"0": 0.97}) <= predicted_us(model, {"0": 0.0})
    True
    """
    costs, total = get_costs(), 0.0
    for name, sparsity in allocation.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        m, k = layer.weight.shape
        total += min(costs.layer(m, k, (1 - sparsity) * m * k, tokens, threads)) / 1000
    return total
