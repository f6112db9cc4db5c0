"""Pruning of a whole model, one block after another, so that the outputs stay those of the dense model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from magicube_cutlass.checks import check_vector_length
from magicube_cutlass.nn.calibration import forward_batch
from magicube_cutlass.nn.config import SparseQuantConfig
from magicube_cutlass.pruning.allocation import ALLOCATIONS, Allocation, _join, allocate, row_sensitivity
from magicube_cutlass.pruning.embedding import Embed, mean_embedding
from magicube_cutlass.pruning.progress import track
from magicube_cutlass.pruning.solve import METHODS, Method, _expanded, keep_largest, obs, refit, vector_scores
from magicube_cutlass.pruning.statistics import InputStatistics
from magicube_cutlass.pruning.walk import (
    Batch,
    BlockCalls,
    copy_block,
    evaluation,
    find_blocks,
    find_stages,
    input_of,
    linears,
    record_calls,
)

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["PruneReport", "PruneRow", "PruningWarning", "prune_model"]


class PruningWarning(UserWarning):
    """A pruned model lost more than its budget.

    Examples
    --------
    >>> import warnings
    >>> from magicube_cutlass.pruning import PruningWarning
    >>> warnings.simplefilter("error", PruningWarning)  # for a script that must not go on
    """


@dataclass(frozen=True)
class PruneRow:
    """Result for one linear layer: pruned if `note` is empty, else left for this reason.

    Attributes
    ----------
    name : str
    shape : tuple of int
        (out, in).
    sparsity : float
        Share of the V x 1 vectors that are 0.
    note : str

    Examples
    --------
    >>> from magicube_cutlass.pruning import PruneRow
    >>> PruneRow("encoder.fc1", (64, 32), 0.5).note
    ''
    """

    name: str
    shape: tuple[int, int]
    sparsity: float
    note: str = ""


@dataclass(frozen=True)
class PruneReport:
    """Result of ``prune_model``; ``print`` shows a table.

    Attributes
    ----------
    rows : tuple of PruneRow
        One per linear layer.
    vector_length : int
    loss : float or None
        What the model lost by the metric, or None if it was not measured.
    masks : dict
        Kept vectors, bool (ceil(M / V), K), by the name of a pruned layer.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    >>> report = mc.prune_model(model, 0.5, [torch.randn(32, 16)], allocation="uniform", progress=False)
    >>> report.sparsity, list(report.configs(bits=8))
    (0.5, ['0', '2'])
    """

    rows: tuple[PruneRow, ...]
    vector_length: int
    loss: float | None
    masks: dict[str, Tensor] = field(repr=False)

    @property
    def sparsity(self) -> float:
        """Share of the vectors of the pruned layers that are 0."""
        total = sum(each.numel() for each in self.masks.values())
        return 1 - sum(int(each.sum()) for each in self.masks.values()) / total if total else 0.0

    def configs(self, **options: Any) -> dict[str, SparseQuantConfig | None]:
        """Return options for :func:`magicube_cutlass.convert` by layer: the vectors that are kept here, no others."""
        return {
            row.name: None if row.note else SparseQuantConfig(row.sparsity, self.vector_length, **options)
            for row in self.rows
        }

    def __rich__(self) -> Table:
        from rich.table import Table

        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        table = Table(title="pruned layers", caption=f"sparsity {self.sparsity:.3f}{loss}")
        for name in ("layer", "out x in", "sparsity", "note"):
            table.add_column(name, justify="left" if name in ("layer", "note") else "right", overflow="fold")
        for row in self.rows:
            shown = "" if row.note else f"{row.sparsity:.3f}"
            table.add_row(row.name, f"{row.shape[0]} x {row.shape[1]}", shown, row.note)
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120)
        with console.capture() as text:
            console.print(self)
        return text.get()


def prune_model(
    model: nn.Module,
    sparsity: float,
    data: Iterable[Batch],
    *,
    vector_length: int = 8,
    method: Method = "obs",
    refit: bool = True,  # the function of this name is used by the steps below
    allocation: Allocation | Mapping[str, float] | None = None,
    row_weights: Mapping[str, Tensor] | None = None,
    embed: Embed | None = None,
    damp: float = 0.01,
    seed: int = 0,
    max_loss: float | None = None,
    metric: Callable[[nn.Module], float] | None = None,
    progress: bool = True,
) -> PruneReport:
    """Prune the ``nn.Linear`` layers of a model in place, in V x 1 vectors, and refit what is kept.

    Goes through the blocks of the model, see ``find_blocks``, and through the layers of a block in the order of
    their calls. Each layer sees the inputs of the already pruned model; with `refit` its kept weights and its bias are
    those that best give the dense layer's output from them, see ``refit``. Memory: one block of the dense model,
    the moments of one layer, and the hidden states of the data between two blocks. Equal arguments give equal weights.

    Parameters
    ----------
    model : nn.Module
        Layers outside of the blocks, and subclasses of ``nn.Linear``, are left.
    sparsity : float
        Share of the vectors to drop, in [0, 1].
    data : iterable
        Batches: tensors, tuples or lists whose first entry is the input, or dicts of keyword arguments. Tokens that an
        ``attention_mask`` hides do not count.
    vector_length : int, default 8
        V.
    method : {"magnitude", "wanda", "obs"}, default "obs"
        Scores of the vectors, see ``vector_scores``; ``"obs"`` also updates what is kept, see ``obs``.
    refit : bool, default True
        Solve for the kept weights and the bias by least squares.
    allocation : str or mapping, optional
        Sparsity of each layer: a method of ``allocate``, or a value by pattern of layer names as in ``fnmatch``;
        layers that none fits are left. Default: ``"output_energy"``.
    row_weights : mapping, optional
        Weights of the rows of a layer by its name, when vectors are selected; default: with ``"gauss_newton"`` those of
        ``row_sensitivity``, else none.
    embed : callable, optional
        From the output and the batch to a vector per sample, for the allocation and the default metric. Default:
        ``mean_embedding``.
    damp : float, default 0.01
        As for ``obs`` and ``refit``.
    seed : int, default 0
        Seed of the allocation's random projections.
    max_loss : float, optional
        Budget: a larger loss gives a ``PruningWarning``.
    metric : callable, optional
        From the model to a number, larger is better; the loss is what it falls by. Default: the mean cosine of
        ``embed(output)`` with the dense model's on `data`, so the loss is 1 minus that.
    progress : bool, default True
        Show a progress bar.

    Returns
    -------
    PruneReport

    Raises
    ------
    ValueError
        For no data, an unknown method or allocation, or a sparsity outside [0, 1].

    See Also
    --------
    distill : Train the pruned model.
    prune : Mask of a single weight, without data.

    References
    ----------
    .. [1] Frantar, Alistarh, arXiv 2301.00774 (SparseGPT).

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    >>> report = mc.prune_model(model, 0.5, [torch.randn(64, 32)], allocation="uniform", progress=False)
    >>> round(float((model[0].weight == 0).float().mean()), 2)
    0.5
    >>> mc.convert(model, report.configs(bits=8)).converted
    ('0', '2')
    """
    check_vector_length(vector_length)
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    batches = list(data)
    if not batches:
        raise ValueError("data must hold at least one batch, got none")
    before = metric(model) if metric is not None else 0.0
    if allocation is None:
        allocation = "output_energy"
    if isinstance(allocation, str):
        if allocation not in ALLOCATIONS:
            raise ValueError(f"allocation must be one of {ALLOCATIONS} or a mapping, got {allocation!r}")
        if row_weights is None and allocation == "gauss_newton":
            with evaluation(model):
                row_weights = row_sensitivity(model, batches, embed=embed, seed=seed)
        allocation = allocate(
            model, sparsity, batches, method=allocation, vector_length=vector_length, row_weights=row_weights,
            embed=embed, damp=damp, seed=seed, progress=progress,
        )  # fmt: skip
    run = _Run(
        model,
        batches,
        vector_length,
        method,
        refit,
        damp,
        allocation,
        row_weights or {},
        embed or mean_embedding,
        progress,
    )
    with torch.no_grad(), evaluation(model):
        run.prune()
        similarity = run.similarity() if metric is None and max_loss is not None else None
    loss = before - metric(model) if metric is not None else None if similarity is None else 1 - similarity
    if max_loss is not None and loss is not None and not loss <= max_loss:
        warnings.warn(
            f"the pruned model lost {loss:.4g}, more than max_loss={max_loss:.4g}", PruningWarning, stacklevel=2
        )
    return PruneReport(tuple(run.rows()), vector_length, loss, run.masks)


@dataclass
class _Run:
    """State of one ``prune_model``."""

    model: nn.Module
    batches: list[Batch]
    vector_length: int
    method: Method
    refit: bool
    damp: float
    allocation: Mapping[str, float]
    row_weights: Mapping[str, Tensor]
    embed: Embed
    progress: bool
    masks: dict[str, Tensor] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    dense: list[Tensor] = field(default_factory=list)  # embeddings

    def target(self, name: str) -> float | None:
        """Sparsity of a layer; None leaves it."""
        return next((value for key, value in self.allocation.items() if key == name or fnmatchcase(name, key)), None)

    def prune(self) -> None:
        blocks = find_blocks(self.model)
        calls = []
        for batch in self.batches:
            self.dense.append(self.embed(forward_batch(self.model, batch), batch).cpu())
            calls.append(record_calls(self.model, list(blocks.values()), batch))
        pruned = [each.hidden for each in calls]
        dense = list(pruned)
        for index, (name, block) in enumerate(track(list(blocks.items()), "pruning", self.progress)):
            before = copy_block(block)
            self._prune_block(name, index, block, before, calls, pruned, dense)
            last = index == len(blocks) - 1
            for place, each in enumerate(calls if not last else ()):
                pruned[place] = each.run(index, block, pruned[place])
                dense[place] = each.run(index, before, dense[place])

    def _prune_block(
        self, name: str, index: int, block: nn.Module, before: nn.Module, calls: list[BlockCalls], pruned: list[Any],
        dense: list[Any],
    ) -> None:  # fmt: skip
        layers, originals = linears(block), linears(before)
        for stage in find_stages(calls[0], index, block, pruned[0]):
            self.reached.update(_join(name, each) for each in stage)
            targets = {each: target for each in stage if (target := self.target(_join(name, each))) is not None}
            if not targets:
                continue
            statistics = None
            if self.refit or self.method != "magnitude":
                first, original = layers[stage[0]], originals[stage[0]]
                statistics = InputStatistics(first.in_features, first.weight.device)
                for each, x, x_dense in zip(calls, pruned, dense, strict=True):
                    statistics.add(
                        input_of(each, index, block, first, x), input_of(each, index, before, original, x_dense)
                    )
            for layer, target in targets.items():
                self.masks[_join(name, layer)] = self._prune_layer(
                    layers[layer], target, statistics, self.row_weights.get(_join(name, layer))
                )

    def _prune_layer(
        self, layer: nn.Linear, sparsity: float, statistics: InputStatistics | None, rows: Tensor | None
    ) -> Tensor:
        weight, v = layer.weight.detach(), self.vector_length
        gram = None if statistics is None else statistics.gram
        if self.method == "obs":
            assert gram is not None
            new, mask = obs(weight, gram, sparsity, v, row_weights=rows, damp=self.damp)
        else:
            mask = keep_largest(vector_scores(weight, self.method, v, gram, row_weights=rows), sparsity)
            new = weight * _expanded(mask, len(weight), v)
        if self.refit:
            assert statistics is not None
            new, bias = refit(weight, layer.bias, mask, statistics, v, damp=self.damp)
            if layer.bias is not None and bias is not None:
                layer.bias.copy_(bias)
        layer.weight.copy_(new)
        return mask

    def similarity(self) -> float:
        """Mean cosine with the dense model's embeddings."""
        found = [
            (self.embed(forward_batch(self.model, batch), batch).cpu() * dense).sum(-1)
            for batch, dense in zip(self.batches, self.dense, strict=True)
        ]
        return float(torch.cat(found).mean())

    def rows(self) -> list[PruneRow]:
        """A row per linear layer of the model."""
        found = []
        for name, layer in self.model.named_modules():
            if isinstance(layer, nn.Linear):
                note, sparsity = "", 0.0
                if name in self.masks:
                    sparsity = 1 - float(self.masks[name].double().mean())
                elif type(layer) is not nn.Linear:
                    note = f"left: a {type(layer).__name__}"
                elif name in self.reached:
                    note = "left: no pattern of the allocation fits"
                else:
                    note = "left: outside of the blocks, or the data does not reach it"
                found.append(PruneRow(name, (layer.out_features, layer.in_features), sparsity, note))
        return found
