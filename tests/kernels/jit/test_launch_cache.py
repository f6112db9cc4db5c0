"""Launch replay: the launches of a function run again for the same key, and for no other."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from cute_kernels.jit import Kernel, LaunchCache, kernel, launch_cache


class Driver:
    """Takes launches; ``seen``: grids and first arguments.  ``refuses``: how many it refuses for want of a context."""

    def __init__(self) -> None:
        self.CUresult = SimpleNamespace(CUDA_ERROR_INVALID_CONTEXT=201)
        self.seen: list[tuple[int, int]] = []
        self.refuses = 0

    def cuLaunchKernel(self, function: object, *numbers: int) -> tuple[int]:
        if self.refuses:
            self.refuses -= 1
            return (201,)
        pointers = ctypes.cast(numbers[8], ctypes.POINTER(ctypes.c_void_p))
        address = pointers[0]
        assert address is not None
        self.seen.append((numbers[0], ctypes.c_int64.from_address(address).value))
        return (0,)


class Counted(Kernel):
    """A kernel without a GPU."""

    def __init__(self) -> None:
        self.name, self.arch, self._layout = "counted", "sm_80", None
        self.device, self.threads, self.smem_bytes, self._waits = 0, 32, 0, False
        self._driver = self.driver = Driver()
        self._function, self._threads = None, threading.local()

    @property
    def seen(self) -> list[tuple[int, int]]:
        return self.driver.seen

    def _parameter_sizes(self) -> list[int] | None:
        return None


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(kernel, "_bind_context", lambda device: None)


def test_a_key_that_came_before_is_launched_without_its_function() -> None:
    of, replays, calls = Counted(), LaunchCache(8), []

    def launch(value: int) -> None:
        calls.append(value)
        of.launch((1, 1, 1), (value,))
        of.launch((0, 1, 1), (value,))  # nothing to do
        of.launch((2, 1, 1), (value + 1,))

    for value in (5, 7, 5, 5, 7):
        replays.run(("launch", value), lambda value=value: launch(value))
    of.launch((9, 1, 1), (9,))  # by itself, in a frame of its own
    replays.run(("launch", 5), lambda: launch(0))
    assert calls == [5, 7]
    assert of.seen == [(1, v) if i == 0 else (2, v + 1) for v in (5, 7, 5, 5, 7) for i in range(2)] + [
        (9, 9), (1, 5), (2, 6),
    ]  # fmt: skip


def test_a_failed_call_is_not_cached_nor_joined_by_later_launches() -> None:
    of, replays = Counted(), LaunchCache(8)

    def fails() -> None:
        of.launch((1, 1, 1), (1,))
        raise RuntimeError("no memory")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            replays.run("key", fails)
    of.launch((3, 1, 1), (3,))
    replays.run("key", lambda: of.launch((2, 1, 1), (2,)))
    replays.run("key", fails)
    assert of.seen == [(1, 1), (1, 1), (3, 3), (2, 2), (2, 2)]


def test_one_inside_another_is_a_part_of_it_also_where_it_is_replayed() -> None:
    of, outer, inner = Counted(), LaunchCache(8), LaunchCache(8)

    def both(value: int) -> None:
        inner.run("inner", lambda: of.launch((1, 1, 1), (0,)))
        of.launch((2, 1, 1), (value,))

    for value in (4, 6, 4, 6):
        outer.run(value, lambda value=value: both(value))
    assert of.seen == [(1, 0), (2, 4), (1, 0), (2, 6)] * 2


def test_the_number_of_cached_keys_is_bounded() -> None:
    of, replays, calls = Counted(), LaunchCache(2), []
    for key in (1, 2, 1, 3, 1):
        replays.run(key, lambda key=key: calls.append(key))
    assert calls == [1, 2, 3, 1] and len(replays._known) == 2
    assert not of.seen


def test_a_thread_without_the_context_launches_and_records_once() -> None:
    of, replays = Counted(), LaunchCache(8)
    of.driver.refuses = 1
    replays.run("key", lambda: of.launch((1, 1, 1), (4,)))
    replays.run("key", lambda: None)
    assert of.seen == [(1, 4), (1, 4)]
    known = replays.get("key")
    assert known is not None and len(known) == 1 and replays.get("other") is None


def test_launches_become_a_graph_after_their_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    of, replays, made, capturing = Counted(), LaunchCache(8, graph_after=2), [], [False]

    class Graph:
        def __init__(self, launches: Sequence[kernel.LaunchRecord]) -> None:
            made.append([record.grid[0] for record in launches])

        def launch(self) -> None:
            made.append("ran")

    monkeypatch.setattr(launch_cache, "LaunchGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])

    def launch() -> None:
        of.launch((1, 1, 1), (5,))
        of.launch((2, 1, 1), (6,))

    for _ in range(3):
        replays.run("key", launch)
    assert len(of.seen) == 6 and not made
    replays.run("key", launch)
    replays.run("key", launch)
    assert len(of.seen) == 6 and made == [[1, 2], "ran", "ran"]
    capturing[0] = True  # a captured graph takes single launches
    replays.run("key", launch)
    assert len(of.seen) == 8 and len(made) == 3
    capturing[0] = False
    outer = LaunchCache(8)
    outer.run("all", lambda: replays.run("key", launch))  # recorded as single launches
    outer.run("all", launch)
    assert len(of.seen) == 12 and len(made) == 3


def test_graphs_are_forgotten_with_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    of, replays = Counted(), LaunchCache(2, graph_after=1)
    monkeypatch.setattr(launch_cache, "LaunchGraph", lambda launches: SimpleNamespace(launch=lambda: None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for key in (1, 1, 1, 2, 3, 1):
        replays.run(key, lambda key=key: of.launch((1, 1, 1), (key,)))
    assert [value for _, value in of.seen] == [1, 1, 2, 3, 1]
    assert not replays._graphs and set(replays._known) == {3, 1}
