"""Plans that calls of a kind came to before: statistics are left out where they said the same each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from residual.costs import Sizes
from residual.plans import Plan

FIRST, MOST = 2, 64  # calls that must come to one plan before it runs by itself; most, after it has failed
REUSES = 15  # calls that run it until one takes statistics again
OFTEN = 4  # calls of a kind after which statistics are priced as what they cost while a habit spares them
_KINDS = 256  # shapes may vary without end


class Kind(NamedTuple):
    """Calls that are likely to need the same plan.

    ``dtypes``: of A, B and the output.  ``owner``: ``id`` of the prepared operand, or 0; where one comes again for
    another operand, its first plan may cost an attempt.
    """

    sizes: Sizes
    tol: float
    mode: str
    bits: int
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    device: torch.device
    owner: int


@dataclass
class Habit:
    """What calls of a kind came to: ``plan``, ``agreed`` times in a row of ``needed``; ``left``: runs at most."""

    plan: Plan
    agreed: int = 0
    needed: int = FIRST
    left: int = 0

    def chosen(self, plan: Plan) -> None:
        """Statistics led to ``plan``, which met the tolerance at once."""
        self.agreed = self.agreed + 1 if plan == self.plan else 1
        self.plan = plan
        self.left = REUSES if self.agreed >= self.needed else 0

    def missed(self) -> None:
        """The plan, or the one that statistics chose, missed the tolerance."""
        self.agreed, self.left, self.needed = 0, 0, min(2 * self.needed, MOST)

    def take(self) -> Plan | None:
        """The plan to run without statistics, or None where they are to be taken."""
        if self.left <= 0:
            return None
        self.left -= 1
        return self.plan


_habits: dict[Kind, Habit] = {}
_counts: dict[Kind, int] = {}


def habit_of(kind: Kind) -> Habit | None:
    """What is known of a kind."""
    return _habits.get(kind)


def learn(kind: Kind, plan: Plan) -> None:
    """Note that statistics led calls of this kind to ``plan``, which met the tolerance at once."""
    if kind not in _habits and len(_habits) >= _KINDS:
        _habits.clear()
    _habits.setdefault(kind, Habit(plan)).chosen(plan)


def comes_often(kind: Kind) -> bool:
    """Whether this is call number :data:`OFTEN` of a kind, or a later one; counts the call."""
    if kind not in _counts and len(_counts) >= _KINDS:
        _counts.clear()
    _counts[kind] = _counts.get(kind, 0) + 1
    return _counts[kind] >= OFTEN


def forget() -> None:
    """Forget all of them."""
    _habits.clear()
    _counts.clear()
