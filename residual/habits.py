"""Plans that calls of a kind came to before: statistics are left out where they said the same each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from residual.costs import Sizes
from residual.plans import Plan

FIRST, MOST = 2, 64  # calls that must come to one plan before it runs by itself; most, after it has failed
REUSES = 15  # calls that run it until one takes statistics again
SOON = 4  # the same for the first time: those next statistics then choose for calls that come often
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
    """What calls of a kind came to: ``plan``, ``agreed`` times in a row of ``needed``; ``left``: runs at most.

    ``ran``: it has run by itself.  ``cautious``: a plan of this kind missed the tolerance.
    """

    plan: Plan
    agreed: int = 0
    needed: int = FIRST
    left: int = 0
    ran: bool = False
    cautious: bool = False

    def chosen(self, plan: Plan) -> None:
        """Statistics led to ``plan``, which met the tolerance at once."""
        self.agreed = self.agreed + 1 if plan == self.plan else 1
        self.plan = plan
        reuses = REUSES if self.ran else SOON
        self.left = reuses if self.agreed >= self.needed else 0

    def missed(self) -> None:
        """The plan, or the one that statistics chose, missed the tolerance."""
        self.agreed, self.left, self.needed, self.cautious = 0, 0, min(2 * self.needed, MOST), True

    def take(self) -> Plan | None:
        """The plan to run without statistics, or None where they are to be taken."""
        if self.left <= 0:
            return None
        self.left -= 1
        self.ran = True
        return self.plan


_habits: dict[Kind, Habit] = {}
_counts: dict[Kind, int] = {}


def habit_of(kind: Kind) -> Habit | None:
    """What is known of a kind."""
    return _habits.get(kind)


def known() -> tuple[str, ...]:
    """The plans that calls came to, one for each kind."""
    return tuple(str(habit.plan) for habit in _habits.values())


def learn(kind: Kind, plan: Plan, missed: bool = False) -> None:
    """Note that statistics led calls of this kind to ``plan``, which met the tolerance.

    ``missed``: not at once, another plan had missed it.
    """
    if kind not in _habits and len(_habits) >= _KINDS:
        _habits.clear()
    habit = _habits.setdefault(kind, Habit(plan))
    if missed:
        habit.missed()
    else:
        habit.chosen(plan)


def comes_often(kind: Kind) -> bool:
    """Whether calls of this kind come often: it is number :data:`OFTEN`, or they have had a habit; counts the call."""
    if kind not in _counts and len(_counts) >= _KINDS:
        _counts.clear()
    _counts[kind] = _counts.get(kind, 0) + 1
    habit = _habits.get(kind)
    return _counts[kind] >= OFTEN or (habit is not None and habit.ran)


def forget() -> None:
    """Forget all of them."""
    _habits.clear()
    _counts.clear()
