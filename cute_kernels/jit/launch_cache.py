"""Launch replay: launches that one call made are run again without the function that made them."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from cute_kernels.jit.kernel import LaunchRecord, recording
from cute_kernels.jit.launch_graph import LaunchGraph


class LaunchCache:
    """Launches by key, for functions that depend on nothing but the key.

    A key holds the addresses of everything that the kernels read and write, the device, and all else they depend on.

    Parameters
    ----------
    most : int
        Keys to remember; when full, all are forgotten.
    graph_after : int, default 0
        Replays of a key after which its launches become a CUDA graph; 0: they stay single launches.

    Examples
    --------
    >>> launches = LaunchCache(most=256)
    >>> launches.run(("scale", x.data_ptr()), lambda: kernel.launch((1, 1, 1), (x.data_ptr(),)))  # doctest: +SKIP
    >>> launches.get(("scale", 0)) is None
    True
    """

    def __init__(self, most: int, graph_after: int = 0) -> None:
        """``most``: keys that are remembered; an allocator gives the same addresses again."""
        self._most, self._graph_after = most, graph_after
        self._known: dict[Hashable, tuple[LaunchRecord, ...]] = {}
        self._replayed: dict[Hashable, int] = {}  # times, of keys without a graph
        self._graphs: dict[Hashable, LaunchGraph] = {}

    def get(self, key: Hashable) -> tuple[LaunchRecord, ...] | None:
        """Return the launches of `key`, or None; run each by :meth:`Kernel.enqueue`."""
        return self._known.get(key)

    def record(self, key: Hashable, launch: Callable[[], object]) -> None:
        """Run `launch`, which only launches kernels on torch's current stream, and remember its launches."""
        outer: list[LaunchRecord] | None = getattr(recording, "launches", None)
        launches: list[LaunchRecord] = []
        recording.launches = launches
        try:
            launch()
        finally:
            recording.launches = outer
        if outer is not None:
            outer.extend(launches)
        if len(self._known) >= self._most:
            for kept in (self._known, self._replayed, self._graphs):
                kept.clear()
        self._known[key] = tuple(launches)

    def run(self, key: Hashable, launch: Callable[[], object]) -> None:
        """Replay the launches of `key`, or :meth:`record` them."""
        graph = self._graphs.get(key) if self._graph_after else None
        if graph is not None and _is_plain():
            graph.launch()
            return
        known = self._known.get(key)
        if known is None:
            self.record(key, launch)
            return
        graph = self._count(key, known) if self._graph_after and graph is None and _is_plain() else None
        if graph is not None:
            graph.launch()
            return
        for each in known:
            each.kernel.enqueue(each)

    def _count(self, key: Hashable, launches: tuple[LaunchRecord, ...]) -> LaunchGraph | None:
        """Count a replay; return the launches as a graph if they have had enough of them."""
        count = self._replayed[key] = self._replayed.get(key, 0) + 1
        if count <= self._graph_after:
            return None
        graph = self._graphs[key] = LaunchGraph(launches)
        return graph


def _is_plain() -> bool:
    """Whether launches may be those of a graph: nothing records them, neither here nor as a graph of torch's."""
    return getattr(recording, "launches", None) is None and not torch.cuda.is_current_stream_capturing()
