"""A sparse matrix cut over the ranks of a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from magicube_cutlass.distributed.collectives import (
    check_agreement,
    check_mesh,
    chunk_bounds,
    digest,
    gather,
    sizes_of,
    start_gather,
)
from magicube_cutlass.formats.bcrs import BCRS
from magicube_cutlass.formats.construct import indexable_view
from magicube_cutlass.formats.pattern import Pattern
from magicube_cutlass.formats.srbcrs import SRBCRS

__all__ = ["ShardedMatrix", "shard", "unshard"]

By = Literal["rows", "nnz", "columns"]
Matrix = SRBCRS | BCRS


@dataclass(frozen=True, eq=False, repr=False)
class ShardedMatrix:
    """The part of a sparse matrix (M, K) that one rank holds.

    Attributes
    ----------
    local : SRBCRS or BCRS
        Rows or columns ``bounds[rank]:bounds[rank + 1]``.
    shape : tuple of int
        (M, K) of the whole matrix.
    mesh : DeviceMesh
        One dimension.
    dim : int
        0 if rows are cut, 1 if columns are.
    bounds : tuple of int
        Cuts, one more than ranks; equal on all ranks.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> from magicube_cutlass.distributed import init_mesh, shard, unshard
    >>> A = mc.SRBCRS.from_dense(torch.eye(16, dtype=torch.int8), vector_length=8)
    >>> part = shard(A, init_mesh("cpu"), by="nnz")
    >>> part.bounds, part.local.equals(A)
    ((0, 16), True)
    """

    local: Matrix
    shape: tuple[int, int]
    mesh: DeviceMesh
    dim: int
    bounds: tuple[int, ...]

    @property
    def span(self) -> tuple[int, int]:
        """First row or column of this rank, and the one behind its last."""
        rank = self.mesh.get_local_rank()
        return self.bounds[rank], self.bounds[rank + 1]

    def __repr__(self) -> str:
        what = ("rows", "columns")[self.dim]
        return f"ShardedMatrix(shape={self.shape}, {what} {self.span} of {self.mesh.size()} ranks, local={self.local})"


def row_cuts(pattern: Pattern, parts: int) -> tuple[int, ...]:
    """Return cuts between vector rows that give each part the same number of stored vectors, about."""
    offsets, v = pattern.row_offsets, pattern.vector_length
    aims = torch.arange(1, parts, device=offsets.device) * pattern.vectors // max(parts, 1)
    above = torch.searchsorted(offsets, aims)
    below = (above - 1).clamp(min=0)
    nearest = torch.where(aims - offsets[below] < offsets[above] - aims, below, above)
    return (0, *(min(cut * v, pattern.shape[0]) for cut in nearest.tolist()), pattern.shape[0])


def columns_of(A: Matrix, start: int, stop: int) -> Matrix:
    """Return columns `start` to `stop` of a matrix."""
    pattern = A.pattern
    inside = (pattern.col_indices >= start) & (pattern.col_indices < stop)  # (vectors,)
    counts = torch.zeros(pattern.vector_rows, dtype=torch.int64, device=A.device)
    counts.index_add_(0, pattern.row_indices[inside], torch.ones_like(pattern.row_indices[inside]))
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    kept = Pattern((A.shape[0], stop - start), A.vector_length, offsets, pattern.col_indices[inside] - start)
    vectors = A.vectors()
    return A._rows(kept._trust(), indexable_view(vectors)[inside].view(vectors.dtype), A.scale)


def shard(A: Matrix, mesh: DeviceMesh, by: By = "rows", *, check: bool = True) -> ShardedMatrix:
    """Cut a sparse matrix that every rank holds; each rank keeps its contiguous part.

    Parameters
    ----------
    A : SRBCRS or BCRS, shape (M, K)
        The same on all ranks.
    mesh : DeviceMesh
        One dimension.
    by : {"rows", "nnz", "columns"}, default "rows"
        ``"rows"`` and ``"columns"``: the cuts of ``Shard`` of a DTensor; a row cut inside a vector fills in zeros.
        ``"nnz"``: between vector rows, so that each part stores the same number of vectors, about.
    check : bool, default True
        Compare shape, pattern and values between ranks, by one all-gather of 48 bytes.

    Returns
    -------
    ShardedMatrix

    Raises
    ------
    RuntimeError
        Without a process group.
    TypeError
        If `A` is no sparse matrix.
    ValueError
        For another `by`, a mesh of several dimensions, a batch of matrices, or matrices that differ between ranks.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> from magicube_cutlass.distributed import init_mesh, shard, unshard
    >>> A = mc.SRBCRS.from_dense(torch.eye(16, dtype=torch.int8), vector_length=8)
    >>> unshard(shard(A, init_mesh("cpu"), by="columns")).equals(A)
    True
    """
    check_mesh(mesh)
    if not isinstance(A, (SRBCRS, BCRS)):
        raise TypeError(f"A must be an SRBCRS or BCRS, got {type(A).__name__}")
    if by not in ("rows", "nnz", "columns"):
        raise ValueError(f"by must be 'rows', 'nnz' or 'columns', got {by!r}")
    if A.batch_shape:
        raise ValueError(f"A must be a single matrix, got a batch of shape {A.batch_shape}")
    pattern, ranks = A.pattern, mesh.size()
    if check:
        check_agreement(
            mesh, rows_of_A=A.shape[0], columns_of_A=A.shape[1], vector_length=A.vector_length,
            vectors_of_A=pattern.vectors, pattern_of_A=digest(pattern.row_offsets, pattern.col_indices),
            values_of_A=digest(indexable_view(A.vectors()), A.scale),
        )  # fmt: skip
    rank = mesh.get_local_rank()
    if by == "columns":
        bounds = chunk_bounds(A.shape[1], ranks)
        return ShardedMatrix(columns_of(A, bounds[rank], bounds[rank + 1]), A.shape, mesh, 1, bounds)
    bounds = chunk_bounds(A.shape[0], ranks) if by == "rows" else row_cuts(pattern, ranks)
    return ShardedMatrix(A[bounds[rank] : bounds[rank + 1]], A.shape, mesh, 0, bounds)


def unshard(A: ShardedMatrix) -> Matrix:
    """Return the whole matrix on every rank: two all-gathers, of the parts' sizes and of their stored vectors.

    Parameters
    ----------
    A : ShardedMatrix
        Of :func:`shard`, or a result of :func:`magicube_cutlass.distributed.sddmm`.

    Returns
    -------
    SRBCRS or BCRS
        Equal to the matrix that was cut; a row cut inside a vector leaves the zeros that it filled in.

    Raises
    ------
    ValueError
        For parts of a batch.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> from magicube_cutlass.distributed import init_mesh, shard, unshard
    >>> A = mc.BCRS.from_dense(torch.eye(16, dtype=torch.int8), vector_length=8)
    >>> unshard(shard(A, init_mesh("cpu"))).equals(A)
    True
    """
    local, mesh = A.local, check_mesh(A.mesh)
    if local.batch_shape:
        raise ValueError(f"A must have parts of a single matrix, got a batch of shape {local.batch_shape}")
    count = torch.tensor([local.pattern.vectors], device=local.device)
    sizes = gather(count, [1] * mesh.size(), mesh).tolist()
    rows, cols, vectors = _coordinates(A)
    movable = indexable_view(vectors)
    rows, cols, movable = start_gather([rows, cols, movable], sizes, mesh)()
    keys = rows * A.shape[1] + cols  # of elements' first rows, which need no multiple of V
    return _assembled(A, keys, movable.view(vectors.dtype), _whole_scale(A))


def _coordinates(A: ShardedMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """Row of each stored vector's first element in the whole matrix, its column, and its values."""
    pattern, start = A.local.pattern, A.span[0]
    down, right = (start, 0) if A.dim == 0 else (0, start)
    rows = pattern.row_indices * pattern.vector_length + down
    return rows, pattern.col_indices.long() + right, A.local.vectors()


def _whole_scale(A: ShardedMatrix) -> Tensor | None:
    scale = A.local.scale
    if scale is None or scale.ndim == 0 or A.dim == 1:
        return scale
    return gather(scale, sizes_of(A.bounds), A.mesh)


def _assembled(A: ShardedMatrix, keys: Tensor, vectors: Tensor, scale: Tensor | None) -> Matrix:
    """The matrix of vectors (n, V) whose first elements are at ``row * K + column``."""
    local: Any = A.local
    (m, k), v = A.shape, local.vector_length
    movable = indexable_view(vectors)
    lanes = torch.arange(v, device=keys.device)
    rows = keys[:, None] // max(k, 1) + lanes  # (n, V)
    inside = rows < m
    if A.dim == 0:  # rows behind a part belong to the next one
        ends = torch.tensor(A.bounds[1:], device=keys.device)
        inside &= rows < ends[torch.searchsorted(ends, rows[:, :1].contiguous(), right=True)]
    places = rows // v * k + (keys % max(k, 1))[:, None]
    found, at = torch.unique(places[inside], return_inverse=True)
    pattern = Pattern._from_keys(found, A.shape, v)
    values = movable.new_zeros(pattern.vectors, v)
    values[at, (rows % v)[inside]] = movable[inside]
    made: Matrix = local._rows(pattern, values.view(vectors.dtype), scale)
    return made
