"""Launches that are kept: what a function launched for a key is launched again without the function."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from cute_kernels.jit.kernel import LaunchRecord, recording


class LaunchCache:
    """Launches of functions that depend on nothing but their keys: what one launched is launched again without it.

    A key holds the addresses of all that the kernels read and write, and whatever else they depend on, the device too.
    """

    def __init__(self, most: int) -> None:
        """``most``: keys that are remembered; an allocator gives the same addresses again."""
        self._most = most
        self._known: dict[Hashable, tuple[LaunchRecord, ...]] = {}

    def get(self, key: Hashable) -> tuple[LaunchRecord, ...] | None:
        """What was launched for this key, or None; each is for :meth:`Kernel.enqueue`."""
        return self._known.get(key)

    def record(self, key: Hashable, launch: Callable[[], object]) -> None:
        """Run ``launch``, which launches kernels and does nothing else, on torch's current stream; keep what it did."""
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
            self._known.clear()
        self._known[key] = tuple(launches)

    def run(self, key: Hashable, launch: Callable[[], object]) -> None:
        """:meth:`record`, or the same again."""
        known = self._known.get(key)
        if known is None:
            self.record(key, launch)
        else:
            for each in known:
                each.kernel.enqueue(each)
