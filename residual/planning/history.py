"""Plans that calls of a kind came to before: statistics are left out where they said the same each time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from residual.planning.cost_model import Sizes
from residual.planning.plan import Plan

FIRST = 2  # calls that must come to one plan before it runs by itself
REUSES = 31  # calls that run it until one takes statistics again
SOON = 4  # the same for the first time: those next statistics then choose for calls that come often
OFTEN = 4  # calls of a kind after which statistics are priced as what they cost while a habit spares them
AVOIDED, MOST = 4, 64  # statistics that leave a plan out after its first miss, and at most, after many
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
    """What calls of a kind came to: ``plan``, ``agreed`` times in a row; ``left``: how often it may run by itself.

    ``ran``: it has.  ``missed``: for each plan that missed the tolerance, statistics that leave it out from now on, and
    from its last miss on.
    """

    plan: Plan
    agreed: int = 0
    left: int = 0
    ran: bool = False
    missed: dict[Plan, tuple[int, int]] = field(default_factory=dict)

    def chosen(self, plan: Plan, wrong: Collection[Plan] = ()) -> None:
        """Statistics led to ``plan``, which met the tolerance, once those in ``wrong`` had missed it."""
        self.missed = {each: (max(left - 1, 0), whole) for each, (left, whole) in self.missed.items()}
        for each in wrong:
            whole = min(2 * self.missed[each][1], MOST) if each in self.missed else AVOIDED
            self.missed[each] = whole, whole
        self.agreed = self.agreed + 1 if plan == self.plan and not wrong else 1
        self.plan = plan
        self.left = 0 if self.agreed < FIRST else REUSES if self.ran else SOON

    @property
    def avoided(self) -> frozenset[Plan]:
        """Plans that are left out for now."""
        return frozenset(plan for plan, (left, _) in self.missed.items() if left > 0)

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


def learn(kind: Kind, plan: Plan, wrong: Collection[Plan] = ()) -> None:
    """Note that statistics led calls of this kind to ``plan``, which met the tolerance; those in ``wrong`` had not."""
    if kind not in _habits and len(_habits) >= _KINDS:
        _habits.clear()
    _habits.setdefault(kind, Habit(plan)).chosen(plan, wrong)


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
