"""Sums and gathers in memory that ranks map, without GPUs: tensors that stand for the memory of three ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from magicube_cutlass.distributed import cut_tokens
from magicube_cutlass.distributed.cut_tokens import CutTokens
from magicube_cutlass.distributed.peers import Peers

RANKS = 3


class Handle:
    """Counts barriers by channel."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def barrier(self, channel: int, timeout_ms: int) -> None:
        assert timeout_ms > 0
        self.seen.append(channel)


class Mesh:
    """A mesh of three ranks, of which this process is one."""

    device_type = "cuda"

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def size(self) -> int:
        return RANKS

    def get_local_rank(self) -> int:
        return self.rank


def peers_on(rank: int, memory: list[Tensor], handle: Handle, monkeypatch: pytest.MonkeyPatch) -> Peers:
    peers = Peers.__new__(Peers)
    peers.rank, peers.ranks = rank, RANKS
    monkeypatch.setattr(peers, "memory", lambda use, size: (memory, handle) if size <= memory[0].numel() else None)
    return peers


class Stream:
    """A stream whose work is done at once; counts waits."""

    def __init__(self) -> None:
        self.waits = 0

    def wait_stream(self, other: Stream) -> None:
        assert other is not self
        self.waits += 1


def matrices_of(size: torch.Size) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for _ in range(RANKS)]


@pytest.mark.parametrize("rank", range(RANKS))
def test_tensors_of_all_ranks_are_combined(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    size = torch.Size((6, 5))
    matrices = matrices_of(size)
    memory, handle = [torch.zeros(1000, dtype=torch.int8) for _ in range(RANKS)], Handle()
    for each, matrix in zip(memory, matrices, strict=True):
        each[:120].view(torch.float32).view(size).copy_(matrix)
    memory[rank].zero_()  # written by the call
    peers = peers_on(rank, memory, handle, monkeypatch)
    for combine, expected in ((torch.add, sum(matrices)), (torch.maximum, torch.stack(matrices).amax(0))):
        for write in (lambda out: out.copy_(matrices[rank]), lambda _: matrices[rank]):
            found = peers.reduce("a use", size, torch.float32, write, combine)
            assert found is not None and torch.allclose(found, expected, rtol=1e-6, atol=1e-6)  # type: ignore[arg-type]
    assert handle.seen == [0, 1] * 4
    assert torch.equal(memory[rank][:120].view(torch.float32).view(size), matrices[rank])


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rank", range(RANKS))
def test_rows_of_all_ranks_are_summed(rank: int, blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    size = torch.Size((6, 5))
    matrices = matrices_of(size)
    memory, here, beside = [torch.zeros(1000, dtype=torch.int8) for _ in range(RANKS)], Stream(), Stream()
    every = [each[:120].view(torch.float32).view(RANKS, 2, 5) for each in memory]

    class Ranks(Handle):
        """The other ranks, which have written one block more at each barrier, or all."""

        def barrier(self, channel: int, timeout_ms: int) -> None:
            super().barrier(channel, timeout_ms)
            step = len(self.seen)
            for other in {*range(RANKS)} - {rank}:
                if channel == 1:  # and may write again
                    every[other].fill_(torch.nan)
                for block in [(other + step) % RANKS] if blocks else range(RANKS):
                    if channel == 0:
                        every[other][block] = matrices[other].view(RANKS, 2, 5)[block]
            if channel == 1:
                self.seen.clear()
                done.append(channel)

    done: list[int] = []
    handle = Ranks()
    peers = peers_on(rank, memory, handle, monkeypatch)
    peers._beside = beside  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: here)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr("magicube_cutlass.distributed.peers.COPIED_BLOCK", 40 if blocks else 41)
    for is_elsewhere in (False, True):
        written: list[slice] = []

        def write(out: Tensor, rows: slice, elsewhere: bool = is_elsewhere, seen: list[slice] = written) -> Tensor:
            seen.append(rows)
            return matrices[rank][rows] if elsewhere else out.copy_(matrices[rank][rows])

        found = peers.sum_rows(size, torch.float32, write)
        mine = slice(2 * rank, 2 * rank + 2)
        turn = [(rank + i) % RANKS for i in range(RANKS)]
        assert found is not None and torch.equal(
            found, matrices[turn[0]][mine] + matrices[turn[1]][mine] + matrices[turn[2]][mine]
        )
        mine_is_last = [slice(2 * r, 2 * r + 2) for r in (*turn[1:], rank)]
        assert written == (mine_is_last if blocks else [slice(0, 6)])
        own = memory[rank][:120].view(torch.float32).view(size)
        assert all(torch.equal(own[rows], matrices[rank][rows]) for rows in written[: 2 if blocks else 1])
    assert done == [1, 1]
    assert (here.waits, beside.waits) == ((2, 4) if blocks else (0, 0))


def test_what_does_not_fit_is_left_to_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, memory = Handle(), [torch.zeros(64, dtype=torch.int8) for _ in range(RANKS)]
    peers = peers_on(0, memory, handle, monkeypatch)
    for size in ((0, 3), (6, 5)):  # empty; too large
        assert peers.reduce("", torch.Size(size), torch.float32, torch.zeros_like, torch.add) is None
        assert peers.sum_rows(torch.Size(size), torch.float32, lambda out, _: out) is None
    assert peers.sum_rows(torch.Size((4, 1)), torch.float32, lambda out, _: out) is None  # uneven
    assert not handle.seen


@pytest.mark.parametrize("scaled", [False, True])
def test_cut_tokens_lie_where_the_other_ranks_read_them(scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, inner, rank, handle = 16, 40, 1, Handle()
    memory = [torch.zeros(1 << 12, dtype=torch.int8) for _ in range(RANKS)]
    peers, seen = peers_on(rank, memory, handle, monkeypatch), list[list[list[Tensor]]]()
    monkeypatch.setattr(peers, "gather", lambda parts, _: seen.append(parts) or (lambda: None))
    monkeypatch.setattr(cut_tokens, "peers_of", lambda _: peers)
    mesh: Any = Mesh(rank)
    cut = CutTokens(torch.Size((inner, tokens)), tokens, torch.device("cpu"), scaled, mesh)
    data, scale, start = cut.memory()
    assert cut.by_copies and data.shape == (RANKS, inner, tokens) and (scale is None) == (not scaled)
    data[rank] = 7
    if scale is not None:
        assert scale.shape == (RANKS, tokens, 1) and scale.dtype == torch.float32
        scale[rank] = 0.5
    start()
    own = seen[0][rank]
    assert len(seen[0]) == RANKS and len(own) == 1 + scaled and own[-1].data_ptr() == data.data_ptr()
    for other, parts in enumerate(seen[0]):  # the same places in the memory of each rank
        for mine, theirs in zip(own, parts, strict=True):
            assert mine.data_ptr() - memory[rank].data_ptr() == theirs.data_ptr() - memory[other].data_ptr()
            assert mine.shape == theirs.shape
    assert int(memory[rank].view(torch.uint8).ne(0).sum()) == inner * tokens + (tokens if scaled else 0)


def test_without_such_memory_tokens_go_to_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_tokens, "peers_of", lambda _: None)
    mesh: Any = Mesh(0)
    cut = CutTokens(torch.Size((4, 16)), 16, torch.device("cpu"), True, mesh)
    first, second = cut.memory(), cut.memory()
    assert not cut.by_copies and first[0].data_ptr() != second[0].data_ptr()
    assert first[0].shape == (RANKS, 4, 16) and first[1] is not None and first[1].shape == (RANKS, 16, 1)
