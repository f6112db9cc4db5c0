"""Pruning little by little while a network trains."""

from __future__ import annotations

from typing import Any

from torch import nn

from magicube_cutlass.nn.linear import SparseQuantLinear


class PruningSchedule:
    """Raises the sparsity of a model's layers from ``initial`` to ``final`` as it trains.

    At step t of ``begin`` to ``end`` the sparsity is ``final + (initial - final) (1 - (t - begin) / (end - begin))^3``:
    most vectors go pdl, when many are of no use.  Every ``every`` steps and at ``end`` each layer is pruned anew by
    the magnitude of its master weight.

    Arguments:
        model: with :class:`SparseQuantLinear` layers that are not frozen, or such a layer.
        initial, final: sparsities in [0, 1], the first not above the second.
        begin, end, every: steps of the optimizer, ``0 <= begin < end``, ``every >= 1``.
    Raises ``ValueError`` for other values and for a model without such layers.
    Source: Zhu, Gupta, arXiv 1710.01878, equation 1.
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
        """What the schedule asks for at the present step."""
        share = (min(max(self.steps, self.begin), self.end) - self.begin) / (self.end - self.begin)
        return self.final + (self.initial - self.final) * (1 - share) ** 3

    def step(self) -> bool:
        """Call after each step of the optimizer; returns whether the layers were pruned."""
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
        """The number of steps so far; patterns are in the model's own state."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; load the model's state as well."""
        self.steps = int(state["steps"])
