"""Memory that the GPUs of one host read from each other: gathers by copies, and sums read where they lie.

Copies leave the SMs to the product that runs beside them, where a collective's kernel takes some of them.
Over several hosts, and where GPUs do not map each other's memory, NCCL's collectives do the same.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from magicube_cutlass.distributed.cost_model import COPIED_BLOCK

Combine = Callable[..., Tensor]
_SWITCH = "MAGICUBE_PEERS"
_PATIENCE_MS = 600_000  # that a GPU waits for the others before its kernel fails: as long as NCCL does by default
# By group, not by its name: another one may follow it.
_found: WeakKeyDictionary[Any, Peers | None] = WeakKeyDictionary()


def peers_of(mesh: DeviceMesh) -> Peers | None:
    """Return the GPUs of a mesh if they are of one host and map each other's memory; the ranks call alike.

    The first call of a group exchanges the ranks' hosts. ``MAGICUBE_PEERS=0`` on all ranks: None.
    """
    if mesh.device_type != "cuda":
        return None
    group = mesh.get_group()
    if group not in _found:
        _found[group] = Peers(mesh) if _is_one_host(mesh, group) else None
    return _found[group]


def _is_one_host(mesh: DeviceMesh, group: Any) -> bool:
    if mesh.size() == 1 or os.environ.get(_SWITCH) == "0":
        return False
    if dist.get_backend(group) != "nccl":
        return False
    own = torch.cuda.current_device()
    seen: list[tuple[str, int, bool]] = [("", 0, False)] * mesh.size()
    dist.all_gather_object(seen, (socket.gethostname(), own, True), group=group)
    hosts, devices = {host for host, *_ in seen}, {device for _, device, _ in seen}
    reads = all(each == own or torch.cuda.can_device_access_peer(own, each) for each in devices)
    dist.all_gather_object(seen, ("", own, len(hosts) == 1 and len(devices) == mesh.size() and reads), group=group)
    return all(fits for *_, fits in seen)


class Peers:
    """GPUs of one host.

    Memory is never given back: a CUDA graph may hold its addresses. A use has one memory, so its calls take turns on
    one stream, as collectives of a group do.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self._group = mesh.get_group().group_name
        self._memory: dict[str, list[tuple[list[Tensor], Any]]] = {}  # by use, in the order of their sizes
        self._beside = torch.cuda.Stream()

    def memory(self, use: str, size: int) -> tuple[list[Tensor], Any] | None:
        """Return at least `size` bytes of each rank for a use, in the order of ranks, and their barriers.

        The ranks call alike. None while a CUDA graph is captured, if no earlier call had that size.
        """
        made = self._memory.setdefault(use, [])
        for each in made:
            if each[0][0].numel() >= size:
                return each
        if torch.cuda.is_current_stream_capturing():
            return None
        import torch.distributed._symmetric_memory as symmetric

        whole = 1 << (size - 1).bit_length()
        handle: Any = symmetric.rendezvous(
            symmetric.empty(whole, dtype=torch.int8, device=torch.device("cuda", torch.cuda.current_device())),
            self._group,
        )
        made.append(([handle.get_buffer(rank, (whole,), torch.int8) for rank in range(self.ranks)], handle))
        return made[-1]

    def gather(self, parts: list[list[Tensor]], handle: Any) -> Callable[[], None]:
        """Copy the other ranks' parts into this rank's memory; the call waits for them.

        Parameters
        ----------
        parts : list of list of Tensor, shape (ranks, ...)
            Some tensors in the memory of each rank, of which rank r wrote ``[r]``.
        handle
            Barriers of that memory.
        """
        own, here = parts[self.rank], torch.cuda.current_stream()
        handle.barrier(0, _PATIENCE_MS)  # all have written
        self._beside.wait_stream(here)
        with torch.cuda.stream(self._beside):
            for step in range(1, self.ranks):
                other = (self.rank + step) % self.ranks
                for to, source in zip(own, parts[other], strict=True):
                    to[other].copy_(source[other])
            handle.barrier(1, _PATIENCE_MS)  # all have read, and may write again

        def finish() -> None:
            here.wait_stream(self._beside)

        return finish

    def scaled_sums(
        self,
        size: torch.Size,
        columns: bool,
        write: Callable[[Tensor], Tensor],
        scales: tuple[Tensor | None, Tensor | None],
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor | None:
        """Return this rank's rows, (N / ranks, M), of exact sums of int32 matrices of all ranks, scaled in one launch.

        None where there is no memory, or the rows cannot be divided evenly.

        Parameters
        ----------
        size : torch.Size
            Of each rank's matrix, (N, M).
        columns : bool
            It lies in memory as (M, N).
        write : callable
            Writes this rank's to memory that it is given.
        scales : tuple
            Of this rank's rows, as for :func:`cute_kernels.ranks.scaled_sums.scaled_sums`.
        bias : Tensor, shape (M,), optional
            float32.
        dtype : torch.dtype
            Of the result.
        """
        from cute_kernels.ranks.scaled_sums import MOST_RANKS, scaled_sums

        fits = size.numel() and size[0] % self.ranks == 0 and self.ranks <= MOST_RANKS
        found = self.memory("sums", 4 * size.numel()) if fits else None
        if found is None:
            return None
        memory, handle = found
        every = [each[: 4 * size.numel()].view(torch.int32) for each in memory]
        every = [each.view(size[1], size[0]).mT if columns else each.view(size) for each in every]
        write(every[self.rank])
        handle.barrier(0, _PATIENCE_MS)
        part = size[0] // self.ranks
        own = slice(self.rank * part, (self.rank + 1) * part)
        turn = every[self.rank :] + every[: self.rank]
        total = scaled_sums([each[own] for each in turn], *scales, bias, dtype)
        handle.barrier(1, _PATIENCE_MS)
        return total

    def reduce(
        self, use: str, size: torch.Size, dtype: torch.dtype, write: Callable[[Tensor], Tensor], combine: Combine
    ) -> Tensor | None:
        """Return tensors of all ranks combined, read where they lie, this rank's first and then in the order of ranks.

        None where there is no memory.

        Parameters
        ----------
        use : str
            Name of the memory.
        size, dtype : torch.Size, torch.dtype
            Of each rank's tensor, (N, M).
        write : callable
            Writes this rank's to memory that it is given, or returns it elsewhere.
        combine : callable
            Such as ``torch.add``.
        """
        nbytes = size.numel() * dtype.itemsize
        found = self.memory(use, nbytes) if nbytes else None
        if found is None:
            return None
        memory, handle = found
        every = [each[:nbytes].view(dtype).view(size) for each in memory]
        _fill(every[self.rank], write)
        handle.barrier(0, _PATIENCE_MS)
        total = self._combined(every, combine)
        handle.barrier(1, _PATIENCE_MS)
        return total

    def sum_rows(self, size: torch.Size, dtype: torch.dtype, write: Callable[[Tensor, slice], Tensor]) -> Tensor | None:
        """Return this rank's rows, (N / ranks, M), of the sum of matrices of all ranks, added as :meth:`reduce` does.

        Large matrices are written by the rows of one rank after the other, this rank's last, so that copies of what is
        written run beside the products that follow. None where there is no memory, or the rows cannot be divided
        evenly.

        Parameters
        ----------
        size, dtype : torch.Size, torch.dtype
            Of each rank's matrix, (N, M).
        write : callable
            Writes some rows of this rank's to memory that it is given, or returns them elsewhere.
        """
        nbytes = size.numel() * dtype.itemsize
        found = None if not nbytes or size[0] % self.ranks else self.memory("sums", nbytes)
        if found is None:
            return None
        memory, handle = found
        every = [each[:nbytes].view(dtype).view(self.ranks, -1, size[1]) for each in memory]  # (ranks, rows, M) each
        own, part = every[self.rank], size[0] // self.ranks

        def fill(to: Tensor, first: int, last: int) -> None:
            """Have the rows of some ranks written."""
            _fill(to, lambda out: write(out, slice(first * part, last * part)))

        if nbytes < COPIED_BLOCK * self.ranks:
            fill(own.view(size), 0, self.ranks)
            handle.barrier(0, _PATIENCE_MS)
            total = self._combined([each[self.rank] for each in every], torch.add)
            handle.barrier(1, _PATIENCE_MS)
            return total
        here, parts = torch.cuda.current_stream(), list(own.new_empty(own.shape))  # this rank's rows of every rank
        for step in range(1, self.ranks):
            other, source = (self.rank + step) % self.ranks, (self.rank - step) % self.ranks
            fill(own[other], other, other + 1)
            handle.barrier(0, _PATIENCE_MS)
            self._beside.wait_stream(here)
            with torch.cuda.stream(self._beside):
                parts[source].copy_(every[source][self.rank])
        fill(parts[self.rank], self.rank, self.rank + 1)
        here.wait_stream(self._beside)
        handle.barrier(1, _PATIENCE_MS)
        return self._combined(parts, torch.add)

    def _combined(self, parts: list[Tensor], combine: Combine) -> Tensor:
        """Combine a tensor of each rank, from this rank's on."""
        turn = parts[self.rank :] + parts[: self.rank]
        total = combine(turn[0], turn[1])
        for each in turn[2:]:
            combine(total, each, out=total)
        return total


def _fill(own: Tensor, write: Callable[[Tensor], Tensor]) -> None:
    """Have a tensor written, by a callable that may return it elsewhere."""
    written = write(own)
    if written.data_ptr() != own.data_ptr():
        own.copy_(written)
