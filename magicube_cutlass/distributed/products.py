"""SpMM and SDDMM of parts: activations are quantized by their owner and travel as integers.

With A cut by rows, ``C_r = A_r q(B)``: integers of B are gathered, no sum crosses ranks. With A cut by columns,
``C = sum_r A_r q(B)_r``: sums of int32 are exact in any order, and are scaled once they are complete. Both equal the
product of one process bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from magicube_cutlass.distributed.collectives import (
    all_reduce,
    check_mesh,
    chunk_bounds,
    exchange,
    gather,
    reduce_scatter,
    sizes_of,
)
from magicube_cutlass.distributed.sharded import ShardedMatrix
from magicube_cutlass.distributed.slices import (
    INT_BITS,
    Slices,
    as_dtensor,
    largest,
    quantize_slices,
    scaled,
    start_slices,
    sum_dtype,
)
from magicube_cutlass.ops.sddmm import sddmm as local_sddmm
from magicube_cutlass.ops.spmm import spmm as local_spmm

__all__ = ["sddmm", "spmm"]


class _Given(NamedTuple):
    """Slices of a DTensor as they lie: ``"whole"``, ``"slices"`` cut by chunk bounds, or ``"inner"`` along K."""

    slices: Slices
    place: str
    length: int
    mesh: DeviceMesh

    def whole(self) -> Slices:
        """All slices, all of K."""
        if self.place == "whole":
            return self.slices
        sizes = sizes_of(chunk_bounds(self.length, self.mesh.size()))
        if self.place == "slices":
            return start_slices(self.slices, sizes, self.mesh)()
        raise NotImplementedError("B must not be cut along K for a matrix that is cut by rows; use B.redistribute()")

    def part(self, bounds: Sequence[int], rank: int) -> Slices:
        """Slices ``bounds[rank]:bounds[rank + 1]``."""
        if self.place != "slices":
            return self.slices.take(bounds[rank], bounds[rank + 1])
        have, (data, scale, bits) = chunk_bounds(self.length, self.mesh.size()), self.slices
        data = exchange(data, have, bounds, self.mesh)
        return Slices(data, None if scale is None else exchange(scale, have, bounds, self.mesh), bits)


def _given(name: str, x: object, mesh: DeviceMesh, inner: int, dim: int, bits: int) -> _Given:
    """Quantize a DTensor on its owner; `dim` is that of the slices, `inner` the length of the other one."""
    if not isinstance(x, DTensor):
        raise TypeError(f"{name} must be a DTensor, got {type(x).__name__}; use torch.distributed.tensor")
    if x.device_mesh != mesh:
        raise ValueError(f"{name} must be on the mesh of the matrix, {mesh}, got {x.device_mesh}")
    if x.ndim != 2 or x.shape[1 - dim] != inner:
        wanted = f"(n, {inner})" if dim == 0 else f"({inner}, n)"
        raise ValueError(f"{name} must have shape {wanted} to match the matrix, got {tuple(x.shape)}")
    placement = x.placements[0]
    if placement.is_partial():
        x = x.redistribute(placements=[Replicate()])
        placement = x.placements[0]
    local = x.to_local().detach()
    rows = local if dim == 0 else local.mT
    if isinstance(placement, Shard) and placement.dim % 2 != dim:
        top = None if rows.dtype in INT_BITS else largest(rows, mesh)
        return _Given(quantize_slices(rows, bits, top), "inner", x.shape[dim], mesh)
    place = "whole" if isinstance(placement, Replicate) else "slices"
    return _Given(quantize_slices(rows, bits), place, x.shape[dim], mesh)


def spmm(
    A: ShardedMatrix,
    B: DTensor,
    *,
    bits: int = 8,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Multiply a sparse matrix that is cut over ranks by a dense one: ``C = A q(B) + bias[:, None]``.

    The result equals that of one process bit for bit, wherever A and B are cut.

    Parameters
    ----------
    A : ShardedMatrix, shape (M, K)
        Integers, cut by rows or columns.
    B : DTensor, shape (K, N)
        On the mesh of `A`. Floats are quantized with a scale per column by the rank that holds them, and travel as
        integers; int8 and int16 are taken as they are. ``Replicate()``, ``Shard(1)``, and, for columns of A,
        ``Shard(0)``; ``Partial()`` is summed first.
    bits : int, default 8
        Width of floats of B, 8 or 16.
    out_dtype : torch.dtype, optional
        int32 or int64 without scales, else a float dtype. Default: int32 for integers without scales, else float32.
    bias : Tensor, shape (M,), optional
        The same on all ranks; needs a float `out_dtype`.
    placements : sequence of Placement, optional
        Of the result: ``Replicate()``, ``Shard(0)``, and, for columns of A, ``Shard(1)`` or, for integers,
        ``Partial()``. Default: ``Shard(0)`` for rows of A, ``Replicate()`` for columns.

    Returns
    -------
    DTensor, shape (M, N)

    Raises
    ------
    RuntimeError
        Without a process group.
    TypeError, ValueError
        As :func:`magicube_cutlass.spmm`, and for another mesh or placement.
    NotImplementedError
        For a B cut along K with an A cut by rows.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> from torch.distributed.tensor import Replicate, distribute_tensor
    >>> from magicube_cutlass.distributed import init_mesh, shard, spmm
    >>> mesh = init_mesh("cpu")
    >>> A = mc.SRBCRS.from_dense(torch.eye(8, 16, dtype=torch.int8), vector_length=8)
    >>> B = distribute_tensor(torch.arange(32, dtype=torch.int8).view(16, 2), mesh, [Replicate()])
    >>> spmm(shard(A, mesh, by="columns"), B).full_tensor()[:2]
    tensor([[0, 1],
            [2, 3]], dtype=torch.int32)
    """
    mesh = check_mesh(A.mesh)
    (m, k), rank = A.shape, mesh.get_local_rank()
    given = _given("B", B, mesh, k, 1, _checked_bits(bits))
    n = B.shape[1]
    dtype = out_dtype or (torch.int32 if A.local.scale is None and given.slices.scale is None else torch.float32)
    wanted = placements[0] if placements else Shard(0) if A.dim == 0 else Replicate()
    if A.dim == 0:
        rhs = given.whole()
        own = bias if bias is None else bias[A.span[0] : A.span[1]]
        part = _multiply(A.local, rhs, dtype, own)  # (M_r, N)
        if wanted == Replicate():
            return as_dtensor(gather(part, sizes_of(A.bounds), mesh), mesh, wanted, (m, n))
        if wanted == Shard(0):
            return as_dtensor(exchange(part, A.bounds, chunk_bounds(m, mesh.size()), mesh), mesh, wanted, (m, n))
        raise ValueError(f"placements must be Replicate() or Shard(0) for rows of A, got {wanted}")
    rhs = given.slices if given.place == "inner" else given.whole().inner(*A.span)
    bits_of_a = A.local.bits or 0
    integer = dtype in (torch.int32, torch.int64)
    sums = _multiply(
        _unscaled(A.local), rhs._replace(scale=None), dtype if integer else sum_dtype(k, bits_of_a, rhs.bits), None
    )
    if integer and wanted == Partial():
        return as_dtensor(sums, mesh, wanted, (m, n))
    columns = None if rhs.scale is None else rhs.scale.mT  # (1, N)
    rows = A.local.scale
    bounds = chunk_bounds(m if wanted == Shard(0) else n, mesh.size())
    start, stop = bounds[rank], bounds[rank + 1]
    if wanted == Replicate():
        sums = all_reduce(sums, "sum", mesh)
    elif wanted == Shard(0):
        sums = reduce_scatter(sums, mesh)
        rows = rows if rows is None or not rows.ndim else rows[start:stop]
        bias = bias if bias is None else bias[start:stop]
    elif wanted == Shard(1):
        sums = reduce_scatter(sums.mT.contiguous(), mesh).mT
        columns = columns if columns is None else columns[:, start:stop]
    else:
        raise ValueError(f"placements must be Replicate(), Shard(0) or Shard(1) for columns of A, got {wanted}")
    if integer and bias is not None:
        raise TypeError(f"bias must be None for integer output, got out_dtype {dtype}; use out_dtype=torch.float32")
    bias = bias if bias is None else bias[:, None]
    return as_dtensor(sums if integer else scaled(sums, rows, columns, bias, dtype), mesh, wanted, (m, n))


def _checked_bits(bits: int) -> int:
    if bits not in (8, 16):
        raise ValueError(f"bits must be 8 or 16 for activations that travel, got {bits!r}")
    return bits


def _unscaled(A: Any) -> Any:
    """The integers of a matrix without its scale, for sums that other ranks complete."""
    if A.scale is None:
        return A
    found = A._execution.get("unscaled")
    if found is None:
        found = A._execution["unscaled"] = A._rows(A.pattern, A.vectors(), None)
    return found


def _multiply(A: Any, rhs: Slices, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """``A B`` of a part that may be empty, (M_r, N)."""
    if 0 in A.shape or 0 in rhs.data.shape:
        empty = torch.zeros(A.shape[0], rhs.data.shape[0], dtype=dtype, device=rhs.data.device)
        return empty if bias is None else empty + bias.to(dtype)[:, None]
    found: Tensor = local_spmm(A, rhs.operand().mT, out_dtype=dtype, bias=bias)
    return found


def sddmm(
    X: DTensor, Y: DTensor, mask: ShardedMatrix, *, bits: int = 8, out_dtype: torch.dtype | None = None
) -> ShardedMatrix:
    """Multiply two dense matrices at the nonzeros of a pattern that is cut over ranks: ``S = q(X) q(Y)^T`` at `mask`.

    The rank that holds rows of the mask needs those rows of X and all of Y; for columns the reverse.

    Parameters
    ----------
    X : DTensor, shape (M, K)
        ``Replicate()`` or ``Shard(0)``. Floats are quantized with a scale per row by the rank that holds them;
        int8 and int16 are taken as they are.
    Y : DTensor, shape (N, K)
        Likewise.
    mask : ShardedMatrix, shape (M, N)
        Its pattern.
    bits : int, default 8
        Width of floats, 8 or 16.
    out_dtype : torch.dtype, optional
        As in :func:`magicube_cutlass.sddmm`.

    Returns
    -------
    ShardedMatrix, shape (M, N)
        Results, cut as the mask is.

    Raises
    ------
    RuntimeError
        Without a process group.
    TypeError, ValueError
        As :func:`magicube_cutlass.sddmm`, and for another mesh.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> from magicube_cutlass.distributed import init_mesh, sddmm, shard, unshard
    >>> mesh = init_mesh("cpu")
    >>> mask = shard(mc.SRBCRS.from_dense(torch.eye(8, 16, dtype=torch.int8), vector_length=8), mesh)
    >>> X, Y = (distribute_tensor(torch.ones(n, 4, dtype=torch.int8), mesh, [Shard(0)]) for n in (8, 16))
    >>> unshard(sddmm(X, Y, mask)).to_dense()[0, :2].tolist()
    [4, 4]
    """
    mesh = check_mesh(mask.mesh)
    if isinstance(X, DTensor) and isinstance(Y, DTensor) and X.ndim == Y.ndim == 2 and X.shape[1] != Y.shape[1]:
        raise ValueError(f"Y must have {X.shape[1]} columns like X, got {Y.shape[1]}")
    inner = X.shape[1] if isinstance(X, DTensor) and X.ndim == 2 else 0
    left, right = (_given(name, x, mesh, inner, 0, _checked_bits(bits)) for name, x in (("X", X), ("Y", Y)))
    for name, side, size in (("X", left, mask.shape[0]), ("Y", right, mask.shape[1])):
        if side.length != size:
            raise ValueError(f"{name} must have {size} rows to match mask of shape {mask.shape}, got {side.length}")
    rank = mesh.get_local_rank()
    x, y = (side.part(mask.bounds, rank) if mask.dim == i else side.whole() for i, side in enumerate((left, right)))
    found = local_sddmm(x.operand(), y.operand(), mask.local.pattern, out_dtype=out_dtype)
    return ShardedMatrix(found, mask.shape, mesh, mask.dim, mask.bounds)
