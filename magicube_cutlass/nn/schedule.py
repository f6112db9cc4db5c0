"""Gradual pruning during training."""

from __future__ import annotations

from typing import Any

from torch import nn

from magicube_cutlass.nn.linear import SparseQuantLinear

__all__ = ["PruningSchedule"]


class PruningSchedule:
    """Increase the sparsity of a model's layers from `initial` to `final` during training.

    At step t in [begin, end] the sparsity is ``final + (initial - final) (1 - (t - begin) / (end - begin))^3``: most
    vectors are dropped early, when many are redundant. Each layer is pruned anew by the magnitude of its master weight
    every `every` steps and at `end`.

    Parameters
    ----------
    model : nn.Module
        With :class:`SparseQuantLinear` layers that are not frozen, or such a layer.
    initial, final : float
        Sparsities in [0, 1], ``initial <= final``.
    end : int
        Last step of the optimizer.
    begin : int, default 0
        First step.
    every : int, default 100
        Steps between prunings.

    Raises
    ------
    ValueError
        For other values, and for a model without such layers.

    References
    ----------
    .. [1] Zhu, Gupta, arXiv 1710.01878, equation 1.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    >>> report = mc.convert(model)
    >>> schedule = mc.nn.PruningSchedule(model, initial=0.0, final=0.8, end=10, every=5)
    >>> [schedule.step() for _ in range(10)].count(True), schedule.sparsity
    (2, 0.8)
    """

    def __init__(
        self, model: nn.Module, *, initial: float, final: float, end: int, begin: int = 0, every: int = 100
    ) -> None:
        self.layers = [each for each in model.modules() if isinstance(each, SparseQuantLinear) and not each.frozen]
        if not self.layers:
            raise ValueError("model must have SparseQuantLinear layers that are not frozen, got none")
        if not 0 <= initial <= final <= 1:
            raise ValueError(f"initial and final must satisfy 0 <= initial <= final <= 1, got {initial} and {final}")
        if not 0 <= begin < end:
            raise ValueError(f"begin and end must satisfy 0 <= begin < end, got {begin} and {end}")
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.initial, self.final, self.begin, self.end, self.every = initial, final, begin, end, every
        self.steps = 0
        self._prune(self.sparsity)

    @property
    def sparsity(self) -> float:
        """Sparsity at the present step."""
        share = (min(max(self.steps, self.begin), self.end) - self.begin) / (self.end - self.begin)
        return self.final + (self.initial - self.final) * (1 - share) ** 3

    def step(self) -> bool:
        """Count one step of the optimizer; return whether the layers were pruned."""
        self.steps += 1
        due = self.begin <= self.steps <= self.end
        due = due and ((self.steps - self.begin) % self.every == 0 or self.steps == self.end)
        if due:
            self._prune(self.sparsity)
        return due

    def _prune(self, sparsity: float) -> None:
        for layer in self.layers:
            layer.prune_(sparsity)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps; patterns are in the state of the model."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; load the state of the model too."""
        self.steps = int(state["steps"])
