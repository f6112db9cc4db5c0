"""SpMM and SDDMM of parts: activations are quantized by their owner and travel as integers.

With A cut by rows, ``C_r = A_r q(B)``: integers of B are gathered, no sum crosses ranks. With A cut by columns,
``C = sum_r A_r q(B)_r``: sums of int32 are exact in any order, and are scaled once they are complete. Both equal the
product of one process bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.functional import pad

from magicube_cutlass.autograd.integer import quantized
from magicube_cutlass.distributed.collectives import (
    all_reduce,
    check_mesh,
    chunk_bounds,
    exchange,
    exchange_all,
    gather_bytes,
    reduce_scatter,
    sizes_of,
    start_gather,
)
from magicube_cutlass.distributed.sharded import ShardedMatrix
from magicube_cutlass.ops import torch_ops as library
from magicube_cutlass.ops.sddmm import sddmm as local_sddmm
from magicube_cutlass.ops.spmm import spmm as local_spmm
from magicube_cutlass.quantization.quant_tensor import QuantTensor

__all__ = ["sddmm", "spmm"]

_INT_BITS = {torch.int8: 8, torch.int16: 16}


class Slices(NamedTuple):
    """Integers of slices (L, K) with a scale per slice: what a kernel reads of activations."""

    data: Tensor  # (L, K) int8 or int16
    scale: Tensor | None  # (L, 1), or () for all
    bits: int

    def operand(self) -> QuantTensor:
        """As the rows of an operand."""
        axis = None if self.scale is None or not self.scale.ndim else 1
        return QuantTensor(self.data, self.scale, self.bits, True, axis, self.data.shape)

    def take(self, start: int, stop: int) -> Slices:
        """Some of the slices."""
        scale = None if self.scale is None else self.scale[start:stop]
        return Slices(self.data[start:stop].contiguous(), scale, self.bits)

    def inner(self, start: int, stop: int) -> Slices:
        """A part of K."""
        return self._replace(data=self.data[:, start:stop].contiguous())


def quantize_slices(x: Tensor, bits: int, top: Tensor | None = None) -> Slices:
    """Quantize slices (L, K); `top` (L, 1): their amax, where other ranks hold other parts of K.

    Integers are taken as they are. Slices that lie in memory as columns stay columns.
    """
    if x.dtype in _INT_BITS:
        return Slices(x.contiguous(), None, _INT_BITS[x.dtype])
    if not x.is_floating_point():
        raise TypeError(f"B must be of a float dtype, int8 or int16, got {x.dtype}")
    if top is None:
        found = quantized(x, bits, 1)
        return Slices(found.data, found.scale, bits)
    scale = slice_scale(top, bits)
    if x.mT.is_contiguous() and not x.is_contiguous():
        return Slices(library.quantize_by(x.mT, scale.mT, bits).mT, scale, bits)
    return Slices(library.quantize_by(x, scale, bits), scale, bits)


def slice_scale(top: Tensor, bits: int) -> Tensor:
    """Return the scales of slices by their amax (L, 1): those of slices of one element."""
    scale: Tensor = library.quantize(top, bits, 1)[1]
    return scale


def largest(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the amax (L, 1) of slices whose parts (L, K_r) lie on the ranks: one all-reduce of L floats."""
    wide = torch.promote_types(x.dtype, torch.float32)
    own = torch.linalg.vector_norm(x, torch.inf, 1, keepdim=True, dtype=wide) if x.shape[1] else x.new_zeros(
        x.shape[0], 1, dtype=wide)  # fmt: skip
    # a maximum may lose NaN, so it travels as inf, which gives the scale NaN as well
    return all_reduce(own.nan_to_num_(nan=torch.inf, posinf=torch.inf), "max", mesh)


def start_slices(x: Slices, sizes: Sequence[int], mesh: DeviceMesh) -> Callable[[], Slices]:
    """Start one all-gather of integers, which carries the scales too; the call returns the slices of all ranks."""
    finish = start_gather([x.data] if x.scale is None else [x.data, x.scale], sizes, mesh)

    def joined() -> Slices:
        data, *scales = map(torch.cat, finish())
        return Slices(data, scales[0] if scales else None, x.bits)

    return joined


def scatter_tokens(sums: Tensor, inner: int, mesh: DeviceMesh) -> Tensor:
    """Return the sum over ranks of the tokens of this rank's ``Shard(0)``, `inner` tokens each: (tokens_r, out).

    Sums that lie in memory as (out, tokens) stay so: blocks of columns are sent, and nothing is transposed.
    """
    tokens, out = sums.shape
    if mesh.size() == 1 or sums.is_contiguous() or not sums.mT.is_contiguous():
        return reduce_scatter(sums.reshape(-1, inner, out), mesh).reshape(-1, out) if inner else sums
    bounds, rank = chunk_bounds(tokens // max(inner, 1), mesh.size()), mesh.get_local_rank()
    step = bounds[1] * inner
    whole = sums.mT if tokens == step * mesh.size() else pad(sums.mT, (0, step * mesh.size() - tokens))
    blocks = whole.view(out, mesh.size(), step).movedim(1, 0)  # (ranks, out, step)
    return reduce_scatter(blocks, mesh)[0, :, : (bounds[rank + 1] - bounds[rank]) * inner].mT


def sum_of_int8(x: Tensor, mesh: DeviceMesh, scatters: bool) -> Tensor:
    """Return sums (S, ..., out) of floats that travel as int8 with a scale per token, added in the order of ranks."""
    sent = quantize_slices(x.reshape(-1, x.shape[-1]), 8)
    assert sent.scale is not None
    if scatters:
        inner = x.shape[1:-1].numel()
        bounds = [cut * inner for cut in chunk_bounds(x.shape[0], mesh.size())]
        data, scale = (exchange_all(each, bounds, mesh) for each in (sent.data, sent.scale))
    else:
        data, scale = gather_bytes([sent.data, sent.scale], [sent.data.shape[0]] * mesh.size(), mesh)
    total = data[0] * scale[0].float()
    for ints, of_ints in zip(data[1:], scale[1:], strict=True):
        total = total.add_(ints * of_ints.float())
    return total.view(-1, *x.shape[1:])


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
        top = None if rows.dtype in _INT_BITS else largest(rows, mesh)
        return _Given(quantize_slices(rows, bits, top), "inner", x.shape[dim], mesh)
    place = "whole" if isinstance(placement, Replicate) else "slices"
    return _Given(quantize_slices(rows, bits), place, x.shape[dim], mesh)


def scaled(
    sums: Tensor, rows: Tensor | None, columns: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return ``sums * rows * columns + bias`` as the epilogue of the kernels computes it.

    Parameters
    ----------
    sums : Tensor, shape (..., M, N)
        Complete sums of int32 or int64.
    rows, columns : Tensor, shapes () or (M, 1), () or (1, N), optional
        Scales of A and of B.
    bias : Tensor, shape (M,), optional
        Of a float dtype.
    dtype : torch.dtype
        Of the result.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if rows is None or not rows.ndim:
        out = sums.to(wide) if rows is None else sums.to(wide).mul_(rows.to(wide))
    else:
        out = sums * rows.to(wide)
    if bias is None:
        return (out if columns is None else out.mul_(columns.to(wide))).to(dtype)
    if sums.is_cuda and wide == torch.float32:  # a GPU rounds the product and the sum at once
        out = out.double() if columns is None else out * columns.double().view(-1, columns.numel())
    elif columns is not None:
        out = out.mul_(columns.to(wide))
    return out.add_(bias.to(out.dtype)[:, None]).to(wide).to(dtype)


def sum_dtype(inner: int, lhs_bits: int, rhs_bits: int) -> torch.dtype:
    """Return int32 if sums over `inner` products of such integers fit it, else int64."""
    return torch.int32 if inner << (lhs_bits + rhs_bits - 2) < 2**31 else torch.int64


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
            whole = torch.cat(gather_bytes([part], sizes_of(A.bounds), mesh)[0])
            return as_dtensor(whole, mesh, wanted, (m, n))
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


def as_dtensor(local: Tensor, mesh: DeviceMesh, placement: Placement, shape: Sequence[int]) -> DTensor:
    """Return the DTensor of row-major `shape` whose part on this rank is `local`."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    found: DTensor = DTensor.from_local(
        local.contiguous(), mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
    )
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
