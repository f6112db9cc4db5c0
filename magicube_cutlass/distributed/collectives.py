"""Collectives of uneven parts, byte for byte: what the sharded products send.

All are functional collectives of torch, so that a compiled graph may hold them and ``CommDebugMode`` counts them.
Dimension 0 is the one that is cut; parts may be empty.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# torch 2.13 renames both and warns of the old names
_gather: Any = getattr(fc, "all_gather_single", None) or fc.all_gather_tensor
_scatter: Any = getattr(fc, "reduce_scatter_single", None) or fc.reduce_scatter_tensor

ALIGNMENT = 8  # bytes; a message holds parts of dtypes up to 64 bits


def init_mesh(device_type: str | None = None) -> DeviceMesh:
    """Return a mesh of one dimension over all processes that ``torchrun`` started, or of this process alone.

    Starts the process group if there is none: NCCL for CUDA devices, gloo for CPUs.

    Parameters
    ----------
    device_type : {"cuda", "cpu"}, optional
        Default: ``"cuda"`` where each process of this machine has a device.

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
        if "RANK" in os.environ:
            dist.init_process_group(backend, device_id=device)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
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


def _complete(x: Tensor) -> Tensor:
    """Wait for a collective whose result is viewed as other dtypes or returned."""
    return x.wait() if isinstance(x, fc.AsyncCollectiveTensor) else x


def _padded(x: Tensor, length: int) -> Tensor:
    return x if x.shape[0] == length else torch.cat([x, x.new_zeros(length - x.shape[0], *x.shape[1:])])


def gather_bytes(parts: Sequence[Tensor], sizes: Sequence[int], mesh: DeviceMesh) -> list[list[Tensor]]:
    """All-gather several tensors of one length in one message of int8.

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
    list of list of Tensor
        For each of `parts`, the parts of all ranks.
    """
    longest = max(sizes)
    rows = [_padded(part, longest).contiguous() for part in parts]
    if len(sizes) == 1 or longest == 0:
        return [[row] for row in rows] if len(sizes) == 1 else [[row] * len(sizes) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: -rows[i].element_size())  # each begins where its dtype may
    flat = torch.cat([rows[i].flatten().view(torch.int8) for i in order])  # (bytes,)
    every = _gather(_padded(flat, -(-flat.numel() // ALIGNMENT) * ALIGNMENT), 0, mesh).view(len(sizes), -1)
    found: list[list[Tensor]] = [[] for _ in rows]
    begin = 0
    for i in order:
        row, length = rows[i], rows[i].numel() * rows[i].element_size()
        columns = every[:, begin : begin + length]
        begin += length
        found[i] = [each.view(row.dtype).view(row.shape)[:size] for each, size in zip(columns, sizes, strict=True)]
    return found


def gather(x: Tensor, sizes: Sequence[int], mesh: DeviceMesh) -> Tensor:
    """Return the parts (sizes[rank], ...) of all ranks as one tensor (sum(sizes), ...)."""
    return torch.cat(gather_bytes([x], sizes, mesh)[0])


def all_reduce(x: Tensor, op: str, mesh: DeviceMesh) -> Tensor:
    """Return the ``"sum"`` or ``"max"`` over ranks."""
    return x if mesh.size() == 1 else _complete(fc.all_reduce(x.contiguous(), op, mesh))


def reduce_scatter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's ``Shard(0)`` of the sum over ranks of `x` (L, ...)."""
    ranks = mesh.size()
    if ranks == 1:
        return x
    bounds = chunk_bounds(x.shape[0], ranks)
    if bounds[1] == 0:
        return x
    found = _complete(_scatter(_padded(x, bounds[1] * ranks).contiguous(), "sum", 0, mesh))
    rank = mesh.get_local_rank()
    return found[: bounds[rank + 1] - bounds[rank]]


def exchange(x: Tensor, have: Sequence[int], want: Sequence[int], mesh: DeviceMesh) -> Tensor:
    """Cut a matrix anew: rows ``have[rank]:have[rank + 1]`` in, rows ``want[rank]:want[rank + 1]`` out.

    Only rows that change their rank travel; nothing does if the cuts are equal.
    """
    if tuple(have) == tuple(want):
        return x
    rank, ranks = mesh.get_local_rank(), mesh.size()
    sent = [_overlap(have, rank, want, other) for other in range(ranks)]
    received = [_overlap(have, other, want, rank) for other in range(ranks)]
    width = x[:0].new_empty(1, *x.shape[1:]).numel() * x.element_size()
    raw = x.contiguous().view(-1).view(torch.int8)
    moved = _complete(fc.all_to_all_single(raw, [n * width for n in received], [n * width for n in sent], mesh))
    return moved.view(x.dtype).view(want[rank + 1] - want[rank], *x.shape[1:])


def exchange_all(x: Tensor, bounds: Sequence[int], mesh: DeviceMesh) -> list[Tensor]:
    """Send rows ``bounds[r]:bounds[r + 1]`` to rank r; return what each rank sent to this one."""
    rank, width = mesh.get_local_rank(), x[:0].new_empty(1, *x.shape[1:]).numel() * x.element_size()
    own = bounds[rank + 1] - bounds[rank]
    raw = x.contiguous().view(-1).view(torch.int8)
    sent = [size * width for size in sizes_of(bounds)]
    moved = raw if mesh.size() == 1 else _complete(fc.all_to_all_single(raw, [own * width] * mesh.size(), sent, mesh))
    return list(moved.view(x.dtype).view(mesh.size(), own, *x.shape[1:]))


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
