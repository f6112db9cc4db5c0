"""The timing function of the command line, the examples and the benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

__all__ = ["Timing", "measure"]


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median, best, and the number of runs."""

    median: float
    best: float
    runs: int


def measure(
    baselines: Mapping[str, Callable[[], object]],
    *,
    budget: float = 0.5,
    min_runs: int = 5,
    max_runs: int = 200,
    synchronize: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Time several calls in turn, round after round, so that clock changes affect all of them.

    Each call runs once to warm up (first-touch allocations, packed operands). A round runs each call once, and the
    order rotates by one per round.

    Parameters
    ----------
    calls : mapping of str to callable
        Calls by name.
    budget : float, default 0.5
        Seconds per call.
    min_runs, max_runs : int, default 5 and 200
        Limits on the rounds.
    synchronize : callable, optional
        Called behind each call, inside of its time: ``torch.cuda.synchronize`` for a GPU.

    Returns
    -------
    dict of str to Timing

    Examples
    --------
    >>> measure({"nothing": lambda: None}, budget=0.0)["nothing"].runs
    5
    """
    for call in baselines.values():
        call()
    if synchronize is not None:
        synchronize()
    names = list(baselines)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    for turn in range(max_runs):
        if turn >= min_runs and time.perf_counter() - start > budget * len(names):
            break
        shift = turn % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            begin = time.perf_counter()
            baselines[name]()
            if synchronize is not None:
                synchronize()
            seconds[name].append(time.perf_counter() - begin)
    return {name: Timing(median(times), min(times), len(times)) for name, times in seconds.items()}
