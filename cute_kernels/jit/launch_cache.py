"""Launch replay: launches that one call made are run again without the function that made them."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from cute_kernels.jit.kernel import LaunchRecord, recording


class LaunchCache:
    """Launches by key, for functions that depend on nothing but the key.

    A key holds the addresses of everything that the kernels read and write, the device, and all else they depend on.

    Parameters
    ----------
    most : int
        Keys to remember; when full, all are forgotten.

    Examples
    --------
    >>> launches = LaunchCache(most=256)
    >>> launches.run(("scale", x.data_ptr()), lambda: kernel.launch((1, 1, 1), (x.data_ptr(),)))  # doctest: +SKIP
    >>> launches.get(("scale", 0)) is None
    True
    """

    def __init__(self, most: int) -> None:
        """``most``: keys that are remembered; an allocator gives the same addresses again."""
        self._most = most
        self._known: dict[Hashable, tuple[LaunchRecord, ...]] = {}

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
            self._known.clear()
        self._known[key] = tuple(launches)

    def run(self, key: Hashable, launch: Callable[[], object]) -> None:
        """Replay the launches of `key`, or :meth:`record` them."""
        known = self._known.get(key)
        if known is None:
            self.record(key, launch)
        else:
            for each in known:
                each.kernel.enqueue(each)
