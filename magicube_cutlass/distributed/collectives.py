"""Collectives of uneven parts, byte for byte: what the sharded products send.

Calls of ``torch.distributed`` on plain tensors; in a compiled graph, functional collectives. Dimension 0 is the one
that is cut; parts may be empty.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# torch 2.13 renames both and warns of the old names
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_gather_in_graph: Any = getattr(fc, "all_gather_single", None) or fc.all_gather_tensor
_scatter_in_graph: Any = getattr(fc, "reduce_scatter_single", None) or fc.reduce_scatter_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

ALIGNMENT = 8  # bytes; a message holds parts of dtypes up to 64 bits


def init_mesh(device_type: str | None = None, timeout: timedelta | None = None) -> DeviceMesh:
    """Return a mesh of one dimension over all processes that ``torchrun`` started, or of this process alone.

    Starts the process group if there is none: NCCL for CUDA devices, gloo for CPUs.

    Parameters
    ----------
    device_type : {"cuda", "cpu"}, optional
        Default: ``"cuda"`` where each process of this machine has a device.
    timeout : timedelta, optional
        Of collectives, after which a process that waits for another one ends. Default: torch's.

    Raises
    ------
    ValueError
        For another device.

    Examples
    --------
    >>> init_mesh("cpu").size()
    1
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device_type is None:
        there = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        device_type = "cuda" if torch.cuda.is_available() and there else "cpu"
    if device_type not in ("cuda", "cpu"):
        raise ValueError(f"device_type must be 'cuda' or 'cpu', got {device_type!r}")
    if device_type == "cuda":
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        backend = "nccl" if device_type == "cuda" else "gloo"
        device = torch.device("cuda", local) if device_type == "cuda" else None
        options: dict[str, Any] = {"device_id": device, "timeout": timeout}
        if "RANK" not in os.environ:
            options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, **options)
    return init_device_mesh(device_type, (dist.get_world_size(),))


def check_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return `mesh`; raise unless it has one dimension and a process group.

    Raises
    ------
    RuntimeError
        Without a process group.
    ValueError
        For a mesh of several dimensions.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "mesh must have a process group, got none; run under torchrun and call "
            "torch.distributed.init_process_group()"
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        hint = f"; use mesh[{names[-1]!r}]" if names else "; name its dimensions and use one of them"
        raise ValueError(f"mesh must have 1 dimension, got {mesh.ndim}{hint}")
    return mesh


def chunk_bounds(size: int, parts: int) -> tuple[int, ...]:
    """Return the cuts of ``Shard``: parts of ``ceil(size / parts)``, the last ones shorter or empty.

    Examples
    --------
    >>> chunk_bounds(10, 4), chunk_bounds(2, 3)
    ((0, 3, 6, 9, 10), (0, 1, 2, 2))
    """
    step = -(-size // parts)
    return tuple(min(i * step, size) for i in range(parts + 1))


def sizes_of(bounds: Sequence[int]) -> list[int]:
    """Return the lengths of the parts between cuts."""
    return [stop - start for start, stop in pairwise(bounds)]


def _padded(x: Tensor, length: int) -> Tensor:
    return x if x.shape[0] == length else torch.cat([x, x.new_zeros(length - x.shape[0], *x.shape[1:])])


def _in_words(x: Tensor) -> Tensor:
    """`x`, or a copy of it that can be viewed as int64."""
    is_aligned = x.is_contiguous() and x.storage_offset() * x.element_size() % 8 == 0
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def start_gather(parts: Sequence[Tensor], sizes: Sequence[int], mesh: DeviceMesh) -> Callable[[], list[Tensor]]:
    """Start an all-gather of several tensors of one length in one message of int8.

    Parameters
    ----------
    parts : sequence of Tensor, shape (sizes[rank], ...)
        Of this rank, any dtypes.
    sizes : sequence of int
        Length of each rank's part.
    mesh : DeviceMesh
        One dimension.

    Returns
    -------
    Callable
        Waits; returns for each of `parts` those of all ranks as one tensor (sum(sizes), ...).
    """
    ranks, longest = len(sizes), max(sizes)
    rows = [_padded(part, longest) for part in parts]
    if ranks == 1 or longest == 0:
        return lambda: rows
    order = sorted(range(len(rows)), key=lambda i: -rows[i].element_size())  # each begins where its dtype may
    # Copies of bytes are slow on a GPU, those of words are not. Sizes alone decide: all ranks must choose alike.
    has_words = len(rows) > 1 and all(row.numel() * row.element_size() % 8 == 0 for row in rows)
    unit = torch.int64 if has_words and not torch.compiler.is_compiling() else torch.int8
    if unit == torch.int64:
        rows = [_in_words(row) for row in rows]
    raw = [rows[i].reshape(-1).view(torch.int8).view(unit) for i in order]
    spare = 0 if unit == torch.int64 else -sum(each.numel() for each in raw) % ALIGNMENT
    flat = torch.cat([*raw, raw[0].new_empty(spare)]) if spare or len(raw) > 1 else raw[0]
    flat = flat.view(torch.int8)  # (bytes,)
    work = None
    if torch.compiler.is_compiling():
        every = _gather_in_graph(flat, 0, mesh)
    else:
        every = flat.new_empty(ranks * flat.numel())
        work = _all_gather(every, flat, group=mesh.get_group(), async_op=True)

    def finish() -> list[Tensor]:
        if work is not None:
            work.wait()
        found, begin, table = list(rows), 0, every.view(unit).view(ranks, -1)
        for i, bytes_of in zip(order, raw, strict=True):
            row, end = rows[i], begin + bytes_of.numel()
            of_ranks = table[:, begin:end]  # (ranks, units)
            if min(sizes) == longest:
                found[i] = of_ranks.contiguous().view(-1).view(row.dtype).view(-1, *row.shape[1:])
            else:
                parts_of = of_ranks.view(row.dtype).view(ranks, *row.shape)
                found[i] = torch.cat([part[:size] for part, size in zip(parts_of, sizes, strict=True)])
            begin = end
        return found

    return finish


def start_gather_in_place(parts: Sequence[Tensor], mesh: DeviceMesh) -> Callable[[], object]:
    """Start an all-gather over NCCL of contiguous tensors (ranks, ...) whose part ``[rank]`` is written: no copies.

    One message for all of them; the call waits.
    """
    if mesh.size() == 1:
        return lambda: None
    own: list[Tensor] = [each[mesh.get_local_rank()] for each in parts]
    wait: Callable[[], object] = mesh.get_group().allgather_into_tensor_coalesced(list(parts), own).wait
    return wait


def gather(x: Tensor, sizes: Sequence[int], mesh: DeviceMesh) -> Tensor:
    """Return the parts (sizes[rank], ...) of all ranks as one tensor (sum(sizes), ...)."""
    return start_gather([x], sizes, mesh)()[0]


def all_reduce(x: Tensor, op: str, mesh: DeviceMesh) -> Tensor:
    """Return the ``"sum"`` or ``"max"`` over ranks; may write it to `x`."""
    if mesh.size() == 1:
        return x
    if x.ndim == 2 and not x.is_contiguous() and x.mT.is_contiguous():
        return all_reduce(x.mT, op, mesh).mT
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return fc.all_reduce(x, op, mesh)
    dist.all_reduce(x, _OPS[op], group=mesh.get_group())
    return x


def reduce_scatter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's ``Shard(0)`` of the sum over ranks of `x` (L, ...)."""
    ranks = mesh.size()
    if ranks == 1:
        return x
    bounds = chunk_bounds(x.shape[0], ranks)
    if bounds[1] == 0:
        return x
    sent = _padded(x, bounds[1] * ranks).contiguous()
    if torch.compiler.is_compiling():
        found = _scatter_in_graph(sent, "sum", 0, mesh)
    else:
        found = sent.new_empty(bounds[1], *x.shape[1:])
        _reduce_scatter(found, sent, group=mesh.get_group())
    rank = mesh.get_local_rank()
    return found[: bounds[rank + 1] - bounds[rank]]


def _all_to_all(x: Tensor, received: list[int], sent: list[int], mesh: DeviceMesh) -> Tensor:
    """Send rows of `x` (sum(sent), ...) to each rank; return the rows from all."""
    width = x[:1].numel() * x.element_size() if x.shape[0] else x.new_empty(1, *x.shape[1:]).numel() * x.element_size()
    raw = x.reshape(-1).view(torch.int8)
    incoming, outgoing = ([n * width for n in sizes] for sizes in (received, sent))
    if torch.compiler.is_compiling():
        found = fc.all_to_all_single(raw, incoming, outgoing, mesh)
    else:
        found = raw.new_empty(sum(incoming))
        dist.all_to_all_single(found, raw, incoming, outgoing, group=mesh.get_group())
    return found.view(x.dtype).view(sum(received), *x.shape[1:])


def exchange(x: Tensor, have: Sequence[int], want: Sequence[int], mesh: DeviceMesh) -> Tensor:
    """Cut a matrix anew: rows ``have[rank]:have[rank + 1]`` in, rows ``want[rank]:want[rank + 1]`` out.

    Only rows that change their rank travel; nothing does if the cuts are equal.
    """
    if tuple(have) == tuple(want):
        return x
    rank, ranks = mesh.get_local_rank(), range(mesh.size())
    received, sent = [_overlap(have, r, want, rank) for r in ranks], [_overlap(have, rank, want, r) for r in ranks]
    return _all_to_all(x, received, sent, mesh)


def exchange_all(x: Tensor, bounds: Sequence[int], mesh: DeviceMesh) -> list[Tensor]:
    """Send rows ``bounds[r]:bounds[r + 1]`` to rank r; return what each rank sent to this one."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    own = bounds[rank + 1] - bounds[rank]
    moved = x if ranks == 1 else _all_to_all(x, [own] * ranks, sizes_of(bounds), mesh)
    return list(moved.view(ranks, own, *x.shape[1:]))


def _overlap(have: Sequence[int], owner: int, want: Sequence[int], other: int) -> int:
    """Rows of one rank's part of the first cuts in another rank's part of the second."""
    return max(0, min(have[owner + 1], want[other + 1]) - max(have[owner], want[other]))


def check_agreement(mesh: DeviceMesh, /, *own: float, **values: float) -> list[list[float]]:
    """Raise `ValueError` on all ranks if a number differs between them; the message has both ranks and both values.

    One all-gather of 8 bytes per number. Numbers are compared as float64, so hashes have at most 53 bits.

    Parameters
    ----------
    mesh : DeviceMesh
        One dimension.
    *own : float
        Numbers that may differ.
    **values : float
        Numbers that must be equal; NaN equals nothing.

    Returns
    -------
    list of list of float
        `own` of each rank.

    Examples
    --------
    >>> check_agreement(init_mesh("cpu"), 7, rows=3, tol=1e-3)
    [[7.0]]
    """
    if mesh.size() == 1:
        return [list(map(float, own))]
    numbers = [float(each) for each in (*values.values(), *own)]
    mine = torch.tensor(numbers, dtype=torch.float64, device=mesh.device_type)
    every = gather(mine[None], [1] * mesh.size(), mesh).tolist()
    for i, name in enumerate(values):
        for rank, found in enumerate(every):
            if found[i] != every[0][i]:
                raise ValueError(
                    f"{name} must be equal on all ranks, got {every[0][i]:.17g} on rank 0 and {found[i]:.17g} "
                    f"on rank {rank}"
                )
    return [found[len(values) :] for found in every]


def digest(*tensors: Tensor | None) -> int:
    """Return a hash of 52 bits of the bytes of tensors."""
    total = 0
    for x in tensors:
        if x is None or not x.numel():
            continue
        raw = x.detach().contiguous().view(torch.uint8).flatten().long()  # (bytes,)
        places = torch.arange(1, raw.numel() + 1, device=raw.device)
        total = (total * 1000003 + int(((raw + 1) * (places * 2654435761 % 2147483647)).sum())) % (1 << 52)
    return total
