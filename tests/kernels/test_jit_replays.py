"""Launches that are kept: what a function launched is launched again for the same key, and nothing else."""

from __future__ import annotations

import struct

import pytest

from cute_kernels.jit import Kernel, Replays
from cute_kernels.jit.kernel import Prepared


class Counted(Kernel):
    """A kernel without a driver; ``seen``: grids and first arguments of its launches."""

    def __init__(self) -> None:
        self.name, self._layout = "counted", None
        self.seen: list[tuple[int, int]] = []

    def _parameter_sizes(self) -> list[int] | None:
        return None

    def enqueue(self, prepared: Prepared) -> None:
        frame = prepared.frame
        self.seen.append((prepared.grid[0], struct.unpack_from("<q", frame.values, frame.start)[0]))


def test_a_key_that_came_before_is_launched_without_its_function() -> None:
    kernel, replays, calls = Counted(), Replays(8), []

    def launch(value: int) -> None:
        calls.append(value)
        kernel.launch((1, 1, 1), (value,))
        kernel.launch((0, 1, 1), (value,))  # nothing to do
        kernel.launch((2, 1, 1), (value + 1,))

    for value in (5, 7, 5, 5, 7):
        replays.run(("launch", value), lambda value=value: launch(value))
    kernel.launch((9, 1, 1), (9,))  # by itself, in a frame of its own
    replays.run(("launch", 5), lambda: launch(0))
    assert calls == [5, 7]
    assert kernel.seen == [(1, v) if i == 0 else (2, v + 1) for v in (5, 7, 5, 5, 7) for i in range(2)] + [
        (9, 9), (1, 5), (2, 6),
    ]  # fmt: skip


def test_what_failed_is_not_kept_and_later_launches_are_no_part_of_it() -> None:
    kernel, replays = Counted(), Replays(8)

    def fails() -> None:
        kernel.launch((1, 1, 1), (1,))
        raise RuntimeError("no memory")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            replays.run("key", fails)
    kernel.launch((3, 1, 1), (3,))
    replays.run("key", lambda: kernel.launch((2, 1, 1), (2,)))
    replays.run("key", fails)
    assert kernel.seen == [(1, 1), (1, 1), (3, 3), (2, 2), (2, 2)]


def test_one_inside_another_is_a_part_of_it_also_where_it_is_replayed() -> None:
    kernel, outer, inner = Counted(), Replays(8), Replays(8)

    def both(value: int) -> None:
        inner.run("inner", lambda: kernel.launch((1, 1, 1), (0,)))
        kernel.launch((2, 1, 1), (value,))

    for value in (4, 6, 4, 6):
        outer.run(value, lambda value=value: both(value))
    assert kernel.seen == [(1, 0), (2, 4), (1, 0), (2, 6)] * 2


def test_only_so_many_keys_are_kept() -> None:
    kernel, replays, calls = Counted(), Replays(2), []
    for key in (1, 2, 1, 3, 1):
        replays.run(key, lambda key=key: calls.append(key))
    assert calls == [1, 2, 3, 1] and len(replays._known) == 2
    assert not kernel.seen
