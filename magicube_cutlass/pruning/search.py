"""The fastest one of the allocations that tie in quality."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from magicube_cutlass.nn.calibration import forward_batch
from magicube_cutlass.pruning.allocation import Allocation, allocate, predicted_us
from magicube_cutlass.pruning.embedding import Embed, mean_embedding
from magicube_cutlass.pruning.model import prune_model
from magicube_cutlass.pruning.walk import Batch, evaluation

__all__ = ["AllocationTrial", "fastest_allocation"]


class AllocationTrial(NamedTuple):
    """An allocation, what it loses and how long its layers are predicted to take.

    Attributes
    ----------
    name : str
    allocation : dict
        Sparsity by layer name.
    loss : float
        1 minus the mean cosine with the dense model's embeddings on held-out batches.
    us : float
        Predicted microseconds per call.

    Examples
    --------
    >>> from magicube_cutlass.pruning import AllocationTrial
    >>> AllocationTrial("uniform", {"0": 0.5}, 0.1, 20.0).loss
    0.1
    """

    name: str
    allocation: dict[str, float]
    loss: float
    us: float


def fastest_allocation(
    model: nn.Module,
    sparsity: float,
    data: Iterable[Batch],
    *,
    tie: float = 0.05,
    candidates: Mapping[str, Mapping[str, float]] | None = None,
    vector_length: int = 8,
    tokens: int = 400,
    threads: int = 1,
    embed: Embed | None = None,
    seed: int = 0,
    progress: bool = True,
    **options: Any,
) -> tuple[AllocationTrial, list[AllocationTrial]]:
    """Prune a copy of the model by each candidate and return the fastest one of those that tie with the best.

    Allocations of one total that lose alike differ in time, since a stored vector costs more in some layers than in
    others. Every fourth batch is held out for the loss ``1 - mean cos(e, e_dense)``; losses up to ``1 + tie`` times the
    least one tie. Memory: one more model.

    Parameters
    ----------
    model : nn.Module
        Left as it is.
    sparsity : float
        Share of the vectors of all layers to drop, in [0, 1].
    data : iterable
        At least 2 batches, as for ``prune_model``.
    tie : float, default 0.05
        Losses that differ by this share count as equal.
    candidates : mapping, optional
        Allocations by name. Default: uniform, and ``"output_energy"`` and ``"gauss_newton"`` with time weights 0 and
        0.5, see ``allocate``.
    vector_length : int, default 8
        V.
    tokens, threads : int, default 400 and 1
        For ``predicted_us``.
    embed : callable, optional
        As for ``prune_model``.
    seed : int, default 0
    progress : bool, default True
        Show progress bars.
    **options
        Of ``prune_model``: `method`, `refit`, `damp`.

    Returns
    -------
    AllocationTrial
        The chosen one; its ``allocation`` is what ``prune_model`` takes.
    list of AllocationTrial
        All, fastest first.

    Examples
    --------
    >>> import torch
    >>> from magicube_cutlass.pruning import fastest_allocation
    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    >>> data = [torch.randn(32, 32) for _ in range(4)]
    >>> best, trials = fastest_allocation(model, 0.5, data, progress=False)
    >>> len(trials), best.us <= trials[-1].us
    (5, True)
    """
    batches, embed = list(data), embed or mean_embedding
    held = batches[::4]
    used = [batch for i, batch in enumerate(batches) if i % 4]
    if not used:
        raise ValueError(f"data must hold at least 2 batches, got {len(batches)}")
    shared: dict[str, Any] = {"vector_length": vector_length, "embed": embed, "seed": seed, "progress": progress}
    if candidates is None:
        found = {"uniform": allocate(model, sparsity, used, method="uniform", progress=False)}
        methods: tuple[Allocation, ...] = ("output_energy", "gauss_newton")
        for method in methods:
            for weight in (0.0, 0.5):
                found[f"{method}, time weight {weight:g}"] = allocate(
                    model, sparsity, used, method=method, time_weight=weight, tokens=tokens, **shared
                )
        candidates = found
    trials = []
    goals = _embeddings(model, held, embed)
    for name, allocation in candidates.items():
        pruned = copy.deepcopy(model)
        prune_model(pruned, sparsity, used, allocation=allocation, **shared, **options)
        loss = 1 - float((_embeddings(pruned, held, embed) * goals).sum(-1).mean())
        trials.append(AllocationTrial(name, dict(allocation), loss, predicted_us(model, allocation, tokens, threads)))
    trials.sort(key=lambda each: each.us)
    border = min(each.loss for each in trials) * (1 + tie)
    return next(each for each in trials if each.loss <= border), trials


@torch.no_grad()
def _embeddings(model: nn.Module, batches: list[Batch], embed: Embed) -> torch.Tensor:
    with evaluation(model):
        return torch.cat([embed(forward_batch(model, batch), batch).cpu() for batch in batches])
