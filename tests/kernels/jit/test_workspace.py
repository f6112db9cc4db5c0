"""Tensors of a run of kernels in one allocation, and runs that are launched again without their functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.core")

from cute_kernels.jit import workspace
from cute_kernels.jit.workspace import Arena, Kept, empty, zeros
from tests.kernels.jit.test_launch_cache import Counted, no_gpu

__all__ = ["no_gpu"]  # a fixture
CPU = torch.device("cpu")


def test_tensors_are_consecutive() -> None:
    assert empty((3,), torch.int8, CPU).shape == (3,) and not zeros((2, 3), torch.float64, CPU).any()
    with Arena() as counted:
        first, second = empty((3, 5), torch.int8, CPU), zeros((7,), torch.float32, CPU)
        nothing = empty((0,), torch.float32, CPU)
        last = empty((2, 600), torch.float64, CPU)
    assert counted.size == 512 + 512 + 0 + 9728 and not second.any() and nothing.numel() == 0
    assert [counted.place_of(x).offset for x in (first, second, last)] == [0, 512, 1024]
    assert counted.place_of(last[None]).shape == (1, 2, 600)
    for x in (last[:1], last.t(), torch.empty(3)):
        with pytest.raises(ValueError, match="x must have been made in this arena, got a tensor"):
            counted.place_of(x)
    memory = torch.zeros(counted.size, dtype=torch.uint8)
    with Arena(memory):
        again = [empty((3, 5), torch.int8, CPU), zeros((7,), torch.float32, CPU), empty((0,), torch.float32, CPU)]
        again.append(empty((2, 600), torch.float64, CPU))
    for x, y in zip((first, second, nothing, last), again, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert y.numel() == 0 or y.data_ptr() == memory.data_ptr() + counted.place_of(x).offset
    room = torch.zeros(512 + counted.size, dtype=torch.uint8)
    with Arena(room[512:]):
        assert zeros((7,), torch.float32, CPU).data_ptr() == room.data_ptr() + 512
    assert empty((3,), torch.int8, CPU).data_ptr() not in range(memory.data_ptr(), memory.data_ptr() + counted.size)


def test_an_arena_inside_another_and_one_that_fails_are_left_again() -> None:
    with Arena() as outer:
        empty((1,), torch.int8, CPU)
        with pytest.raises(RuntimeError), Arena() as inner:
            empty((513,), torch.int8, CPU)
            raise RuntimeError
        empty((1,), torch.int8, CPU)
    assert (outer.size, inner.size) == (1024, 1024)
    assert getattr(workspace._open, "arena", None) is None


def test_a_run_comes_again_by_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    of, kept, calls = Counted(), Kept(8), []
    memories = [torch.ones(2048, dtype=torch.uint8) for _ in range(2)]
    made, torch_empty = [], torch.empty

    def allocate(*size: Any, **options: Any) -> Tensor:
        if options.get("dtype") == torch.uint8:
            made.append(size)
            return memories[place]
        return torch_empty(*size, **options)

    def function() -> tuple[Tensor, ...]:
        calls.append(place)
        spare, found = empty((4,), torch.float32, CPU), empty((1, 3), torch.float64, CPU)
        of.launch((1, 1, 1), (spare.data_ptr(),))
        of.launch((2, 1, 1), (found.data_ptr(),))
        return (found[0],)

    monkeypatch.setattr(torch, "empty", allocate)
    for number, place in enumerate((0, 0, 0, 1, 0, 1)):
        (result,) = kept.run("kind", (5,), CPU, function)
        assert result.shape == (3,) and result.dtype == torch.float64
        assert number == 0 or result.data_ptr() == memories[place].data_ptr() + 512
        assert of.seen[-2:] == [(1, result.data_ptr() - 512), (2, result.data_ptr())] or number == 0
    assert calls == [0, 0, 1] and made == [(1024,)] * 5, "once to count, once a memory"
    kept.run("kind", (6,), CPU, function)
    assert len(calls) == 4, "other addresses"
    kept.run("other kind", (5,), CPU, function)
    assert len(calls) == 5 and len(of.seen) == 2 * 8


def test_memory_is_zero_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, torch_empty = Kept(8), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch_empty(*size, **options).fill_(7))

    def function() -> tuple[Tensor, ...]:
        return empty((5,), torch.int8, CPU), zeros((300,), torch.float32, CPU), empty((5,), torch.int8, CPU)

    for _ in range(3):
        before, x, after = kept.run("zero", (), CPU, function)
        assert not x.any() and before.eq(7).all() and after.eq(7).all()
        x.fill_(1)


def test_memory_is_where_the_caller_wants_it() -> None:
    memory, asked = torch.zeros(2048, dtype=torch.uint8), list[int]()
    kept = Kept(8, allocate=lambda size: asked.append(size) or memory)

    def function() -> tuple[Tensor, ...]:
        return (empty((5,), torch.int8, CPU), empty((3,), torch.float32, CPU))

    kept.run("kind", (), CPU, function)
    for _ in range(3):
        x, y = kept.run("kind", (), CPU, function)
        assert x.data_ptr() == memory.data_ptr() and y.data_ptr() == memory.data_ptr() + 512 and y.shape == (3,)
    assert asked == [1024] * 3


def test_the_number_of_cached_kinds_is_bounded() -> None:
    kept, calls = Kept(2), []

    def function(kind: int) -> tuple[Tensor, ...]:
        calls.append(kind)
        return ()

    for kind in (1, 2, 3):
        kept.run(kind, (), CPU, lambda kind=kind: function(kind))
    assert calls == [1, 2, 3] and list(kept._known) == [3]


def test_tensors_of_a_run_that_came_again_are_made_when_they_are_wanted() -> None:
    kept = Kept(2)

    def function() -> tuple[Tensor, ...]:
        return empty((2, 3), torch.float32, CPU), empty((4,), torch.float64, CPU), zeros((5,), torch.int8, CPU)

    first, found = kept.run("kind", (), CPU, function), kept.run("kind", (), CPU, function)
    assert len(found) == 3 and [x.shape for x in found] == [x.shape for x in first]
    assert [x.dtype for x in found[1:]] == [torch.float64, torch.int8] and not found[2].any()
    assert found[1:][0].data_ptr() == found[1].data_ptr() == found[0].data_ptr() + 512
    found[0].fill_(3.0)
    assert bool((found[:1][0] == 3.0).all())
    with pytest.raises(IndexError):
        found[3]
