"""The one timing function for GPU baselines; times are in microseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import median, quantiles

import torch

Call = Callable[[], object]
SWEEP_BYTES = 256 * 2**20  # read before a cold launch: several times any L2 cache
FILLER_SIZE = 2**15  # floats of the elementwise kernel between launches: about 1.2 us
L2_ROUNDS = 2.25  # rotated operands together are so many times the L2 cache
HIDE_CYCLES = 400_000  # of a spinning kernel, while the host enqueues what is measured behind it


@dataclass(frozen=True)
class GraphReplays:
    """Microseconds a launch of one baseline.

    ``rounds``: one figure a round, each the mean over a CUDA graph of ``launches`` launches on the same buffers, so
    what fits the L2 cache is found there.  ``mode``: "graph", or why there is no graph; then ``rounds`` are of launches
    straight on the stream.
    """

    rounds: tuple[float, ...]
    launches: int
    mode: str

    @property
    def median(self) -> float:
        return median(self.rounds)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = quantiles(self.rounds, n=4)
        return low, high


@dataclass(frozen=True)
class GpuTiming(GraphReplays):
    """Microseconds behind another kernel and of single launches too.

    ``behind``: median of :func:`behind`. ``cold``: median behind a sweep that empties the cache, launch latency
    included.  ``launch``: median between events around a launch on an idle GPU, the host's work included.
    ``enqueue``: median of the host's time for the call.
    """

    behind: float
    cold: float
    launch: float
    enqueue: float


def ratio(above: GraphReplays, below: GraphReplays) -> float:
    """Median of the quotients of the two baselines' times, round by round; above 1 where ``above`` is slower."""
    return median(x / y for x, y in zip(above.rounds, below.rounds, strict=True))


def _elapsed(call: Call) -> float:
    """Microseconds between events around ``call``."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def _several(call: Call, count: int) -> Call:
    def run() -> None:
        for _ in range(count):
            call()

    return run


def _captured(call: Call, launches: int) -> tuple[Call, str]:
    """What runs ``launches`` launches, and the mode."""
    run = _several(call, launches)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        torch.cuda.synchronize()
        call()
        torch.cuda.synchronize()
        return run, f"stream, no graph: {str(error).splitlines()[0][:160]}"
    return graph.replay, "graph"


def _single(call: Call, sweep: torch.Tensor, samples: int) -> tuple[float, float, float]:
    """``(cold, launch, enqueue)``."""
    cold, launch, enqueue = [], [], []
    for _ in range(samples):
        sweep.sum()
        torch.cuda._sleep(HIDE_CYCLES)
        cold.append(_elapsed(call))
        torch.cuda.synchronize()
        launch.append(_elapsed(call))
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        enqueue.append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
    return median(cold), median(launch), median(enqueue)


def replays(
    baselines: Mapping[str, Call], *, rounds: int = 7, replay: float = 100.0, warm: float = 0.005
) -> dict[str, GraphReplays]:
    """Time every baseline in turn, round after round, the order rotated by one each round.

    ``replay``: microseconds that one graph is to take; it holds 1 to 100 launches.  Each is called once before, which
    compiles, tunes and fills caches, and ``warm`` seconds of replays bring the clocks up.
    """
    graphs: dict[str, Call] = {}
    launches: dict[str, int] = {}
    modes: dict[str, str] = {}
    for name, call in baselines.items():
        _several(call, 3)()
        torch.cuda.synchronize()
        # the host may be slower than the GPU: a short graph gives the number of launches of the long one
        probe = 8 if _elapsed(call) < 2000 else 1
        run, _ = _captured(call, probe)
        one = min(_elapsed(run) for _ in range(3)) / probe
        launches[name] = max(1, min(100, round(replay / max(one, 1.0))))
        graphs[name], modes[name] = _captured(call, launches[name])
    start = time.perf_counter()
    while baselines and time.perf_counter() - start < warm:
        for run in graphs.values():
            run()
        torch.cuda.synchronize()
    seen: dict[str, list[float]] = {name: [] for name in baselines}
    names = list(baselines)
    for turn in range(rounds if names else 0):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            seen[name].append(_elapsed(graphs[name]) / launches[name])
    return {name: GraphReplays(tuple(seen[name]), launches[name], modes[name]) for name in baselines}


def _pair(call: Call, filler: Call, launches: int) -> tuple[Call, Call, str]:
    """Graphs of launches with the filler behind each, and of the filler alone; and the mode."""

    def both() -> None:
        call()
        filler()

    run, mode = _captured(both, launches)
    return run, _captured(filler, launches)[0], mode


def behind(
    baselines: Mapping[str, Call | Sequence[Call]], *, rounds: int = 9, replay: float = 400.0
) -> dict[str, GraphReplays]:
    """Time launches behind another kernel: in a graph an elementwise kernel follows each, whose own time is taken off.

    A sequence of calls on copies of the operands is rotated, so that the L2 cache holds none of them: see
    :data:`L2_ROUNDS`. The other parameters as for :func:`replays`.
    """
    x = torch.zeros(FILLER_SIZE, device="cuda")

    def filler() -> None:
        x.add_(1.0)

    pairs: dict[str, tuple[Call, Call, str]] = {}
    launches: dict[str, int] = {}
    for name, given in baselines.items():
        calls = [given] if callable(given) else list(given)
        turn = cycle(calls)

        def call(turn: Iterator[Call] = turn) -> None:
            next(turn)()

        _several(call, max(3, len(calls)))()
        torch.cuda.synchronize()
        short, _ = _captured(call, 2 * len(calls))  # the host may be slower than the GPU
        one = min(_elapsed(short) for _ in range(3)) / (2 * len(calls))
        count = max(4, min(100, round(replay / max(one, 1.0))))
        launches[name] = -(-count // len(calls)) * len(calls)  # whole turns
        pairs[name] = _pair(call, filler, launches[name])
    seen: dict[str, list[float]] = {name: [] for name in baselines}
    names = list(baselines)
    for run, alone, _ in pairs.values():  # brings the clocks up
        _several(run, 3)()
        _several(alone, 3)()
    torch.cuda.synchronize()
    for turns in range(rounds):
        shift = turns % len(names)
        for name in names[shift:] + names[:shift]:
            run, alone, _ = pairs[name]
            seen[name].append((_elapsed(run) - _elapsed(alone)) / launches[name])
    return {name: GraphReplays(tuple(seen[name]), launches[name], pairs[name][2]) for name in baselines}


def measure(
    baselines: Mapping[str, Call], *, rounds: int = 25, replay: float = 400.0, samples: int = 15
) -> dict[str, GpuTiming]:
    """As :func:`replays` with longer graphs and more rounds, :func:`behind`, and ``samples`` single launches."""
    found = replays(baselines, rounds=rounds, replay=replay, warm=0.05)
    after = behind(baselines, replay=replay)
    sweep = torch.randn(SWEEP_BYTES // 4, device="cuda")
    return {
        name: GpuTiming(
            one.rounds, one.launches, one.mode, after[name].median, *_single(baselines[name], sweep, samples)
        )
        for name, one in found.items()
    }
