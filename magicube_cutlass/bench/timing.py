"""The one timing function of the command line, the examples and the benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Timing:
    """Seconds a call of one rival."""

    median: float
    best: float
    runs: int


def measure(
    rivals: Mapping[str, Callable[[], object]], *, budget: float = 0.5, min_runs: int = 5, max_runs: int = 200
) -> dict[str, Timing]:
    """Time every rival in turn, round after round, so that a change of clock speed hits all of them.

    Each is called once to warm up (first-touch allocations, execution copies).  A round calls every rival once, and
    the order rotates by one from round to round.  Rounds go on for ``budget`` seconds a rival, at least ``min_runs``
    and at most ``max_runs`` of them.
    """
    for call in rivals.values():
        call()
    names = list(rivals)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    for turn in range(max_runs):
        if turn >= min_runs and time.perf_counter() - start > budget * len(names):
            break
        shift = turn % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            begin = time.perf_counter()
            rivals[name]()
            seconds[name].append(time.perf_counter() - begin)
    return {name: Timing(median(times), min(times), len(times)) for name, times in seconds.items()}
