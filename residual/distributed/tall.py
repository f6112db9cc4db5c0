"""QR of tall matrices whose rows are cut over ranks (TSQR [1]_), and least squares and linear systems on top.

Each rank factors its rows, ``A_r = H_r [R_r; 0]``; the factors R_r of all ranks, stacked, are factored again on every
rank, ``[R_1; ..; R_n] = [P_1; ..; P_n] R``; then ``A_r = Q_r R`` with ``Q_r = H_r [P_r; 0]``: the reflections H_r are
applied to P_r where a QR of one process applies them to the identity, at the same cost, for each P_r is triangular.

References
----------
.. [1] Demmel, Grigori, Hoemmen, Langou, SIAM J. Sci. Comput. 34 (2012), A206.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from magicube_cutlass.distributed.collectives import (
    all_reduce,
    check_agreement,
    check_mesh,
    chunk_bounds,
    gather,
    sizes_of,
)
from magicube_cutlass.distributed.slices import as_dtensor
from residual.linalg.qr import Product, check_qr, chosen_product, factored, reflected

_REFINEMENTS = 30


def _rows(name: str, x: object, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)) -> DTensor:
    if not isinstance(x, DTensor):
        raise TypeError(f"{name} must be a DTensor, got {type(x).__name__}; use residual.{name.lower()} for tensors")
    check_mesh(x.device_mesh)
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must be float32 or float64, got {x.dtype}")
    if x.ndim not in (1, 2) or x.placements[0] != Shard(0):
        raise ValueError(f"{name} must be cut by rows, Shard(0), got {x.placements[0]} of shape {tuple(x.shape)}")
    return x


def _check_finite(mesh: DeviceMesh, *tensors: Tensor) -> None:
    bad = torch.tensor([float(not bool(torch.isfinite(x).all())) for x in tensors], device=tensors[0].device)
    if bool(all_reduce(bad, "max", mesh).any()):
        raise ValueError("A and b must be finite, but a rank holds inf or nan")


def qr(A: DTensor, *, block: int = 32, product: Product | None = None, **options: Any) -> tuple[DTensor, DTensor]:
    """Factor a tall matrix whose rows are cut over ranks: ``A ~ Q R``; one all-gather of the ranks' N x N factors.

    Parameters
    ----------
    A : DTensor, shape (M, N)
        float32 or float64, finite, ``M >= N``, ``Shard(0)`` on a mesh of one dimension; parts may have any height.
    block : int, default 32
        Columns of a panel.
    product : callable, optional
        As in :func:`residual.qr`, which also describes `options`; multiplies inside of each rank.

    Returns
    -------
    Q : DTensor, shape (M, N)
        ``Shard(0)``.
    R : DTensor, shape (N, N)
        Upper triangular, ``Replicate()``.

    Raises
    ------
    RuntimeError
        Without a process group.
    TypeError, ValueError
        As :func:`residual.qr`; for another placement or a wide matrix.

    Examples
    --------
    >>> from torch.distributed.tensor import distribute_tensor
    >>> from magicube_cutlass.distributed import init_mesh
    >>> A = torch.randn(40, 8)
    >>> Q, R = qr(distribute_tensor(A, init_mesh("cpu"), [Shard(0)]), product=torch.matmul)
    >>> bool((Q.full_tensor() @ R.full_tensor() - A).norm() < 1e-5 * A.norm())
    True
    """
    mesh = _rows("A", A).device_mesh
    m, n = A.shape if A.ndim == 2 else (A.shape[0], 0)
    if A.ndim != 2 or m < n:
        raise ValueError(f"A must be a tall matrix, got shape {tuple(A.shape)}")
    check_agreement(mesh, rows_of_A=m, columns_of_A=n, block=block)
    local, multiply = A.to_local().detach(), chosen_product(product, options)
    check_qr(local, "wy", block, "reduced")
    _check_finite(mesh, local)
    heights = [min(size, n) for size in sizes_of(chunk_bounds(m, mesh.size()))]
    rank = mesh.get_local_rank()
    r, factors = factored(local, block, multiply)
    r = r[: heights[rank]].triu()  # (min(M_r, N), N)
    p = torch.eye(*r.shape, dtype=r.dtype, device=r.device)
    if mesh.size() > 1:
        p, r = torch.linalg.qr(gather(r, heights, mesh))
        p = p[sum(heights[:rank]) :][: heights[rank]]
    q = local.new_zeros(local.shape[0], n)  # (M_r, N)
    # p has no other entries: the reflection of column j takes j + 1 rows of each of the stacked triangles.
    q[: heights[rank]] = p.triu()
    q = reflected(factors, q, multiply)
    return as_dtensor(q, mesh, Shard(0), (m, n)), as_dtensor(r.triu(), mesh, Replicate(), (n, n))


def lstsq(
    A: DTensor, b: DTensor, tol: float = 1e-12, *, block: int = 32, product: Product | None = None, **options: Any
) -> Tensor:
    """Minimize ``||A x - b||`` for a tall matrix of full rank whose rows are cut over ranks.

    By :func:`qr`, ``x = R^-1 Q^T b``, refined in float64 with the residual ``r = b - A x`` and ``d = R^-1 R^-T A^T r``
    (corrected semi-normal equations [1]_) until a step is below `tol` of x.

    Parameters
    ----------
    A : DTensor, shape (M, N)
        As in :func:`qr`.
    b : DTensor, shape (M,) or (M, R)
        On the mesh of `A`, ``Shard(0)``.
    tol : float, default 1e-12
        Relative size of the last step, in (0, 1).
    block, product, **options
        As in :func:`qr`.

    Returns
    -------
    Tensor, shape (N,) or (N, R)
        float64, the same on all ranks.

    Raises
    ------
    ArithmeticError
        On all ranks: if A is singular, or the refinement does not converge.
    TypeError, ValueError
        As :func:`qr`.

    References
    ----------
    .. [1] Björck, Linear Algebra Appl. 88/89 (1987), 31.

    Examples
    --------
    >>> from torch.distributed.tensor import distribute_tensor
    >>> from magicube_cutlass.distributed import init_mesh
    >>> mesh, A = init_mesh("cpu"), torch.randn(40, 8)
    >>> b = A @ torch.ones(8)
    >>> x = lstsq(*(distribute_tensor(each, mesh, [Shard(0)]) for each in (A, b)))
    >>> bool((x - 1).abs().max() < 1e-5)
    True
    """
    if not 0 < tol < 1:
        raise ValueError(f"tol must be in (0, 1), got {tol}")
    mesh, a, right = _system(A, b, tol)
    _, R = qr(A, block=block, product=product, **options)
    r = R.to_local().double()
    _check_pivots(r)
    x = torch.zeros(a.shape[1], right.shape[1], dtype=torch.float64, device=a.device)
    step, before = math.inf, math.inf
    for _ in range(_REFINEMENTS):
        gradient = all_reduce(a.mT @ (right - a @ x), "sum", mesh)  # (N, R)
        inner = torch.linalg.solve_triangular(r.mT, gradient, upper=False)
        d = torch.linalg.solve_triangular(r, inner, upper=True)
        x = x + d
        step, before = float(d.norm()), step
        if step <= tol * float(x.norm()):
            return x.reshape(A.shape[1], *b.shape[1:])
        if not step < before:
            break
    raise ArithmeticError(f"tol {tol:g} was not met: the last step is {step / float(x.norm()):.1e} of x; "
                          "take a more accurate product")  # fmt: skip


def solve(
    A: DTensor, b: DTensor, tol: float = 1e-14, *, block: int = 32, product: Product | None = None, **options: Any
) -> Tensor:
    """Solve a linear system whose rows are cut over ranks: ``||b - A x|| <= tol (||A||_F ||x|| + ||b||)``.

    ``A ~ Q R`` by :func:`qr`, then refinement in float64 with the residual of all ranks, ``d = R^-1 Q^T r``.

    Parameters
    ----------
    A : DTensor, shape (N, N)
        As in :func:`qr`. Each rank then factors stacked factors of size N x N: memory falls with the ranks, the time
        of that step does not.
    b : DTensor, shape (N,) or (N, R)
        On the mesh of `A`, ``Shard(0)``.
    tol : float, default 1e-14
        Normwise backward error of all right-hand sides together, in (0, 1).
    block, product, **options
        As in :func:`qr`.

    Returns
    -------
    Tensor, shape (N,) or (N, R)
        float64, the same on all ranks.

    Raises
    ------
    ArithmeticError
        On all ranks: if A is singular, or the refinement does not converge.
    TypeError, ValueError
        As :func:`qr`.

    Examples
    --------
    >>> from torch.distributed.tensor import distribute_tensor
    >>> from magicube_cutlass.distributed import init_mesh
    >>> mesh, A = init_mesh("cpu"), torch.randn(20, 20) + 5 * torch.eye(20)
    >>> x = solve(*(distribute_tensor(each, mesh, [Shard(0)]) for each in (A, A @ torch.ones(20))))
    >>> bool((x - 1).abs().max() < 1e-5)
    True
    """
    if not 0 < tol < 1:
        raise ValueError(f"tol must be in (0, 1), got {tol}")
    if not isinstance(A, DTensor) or A.ndim != 2 or A.shape[0] != A.shape[1]:
        raise ValueError(f"A must be a square DTensor, got {tuple(getattr(A, 'shape', ()))}")
    mesh, a, right = _system(A, b, tol)
    Q, R = qr(A, block=block, product=product, **options)
    q, r = Q.to_local().double(), R.to_local().double()
    _check_pivots(r)
    size_a, size_b = all_reduce(torch.stack([a.square().sum(), right.square().sum()]), "sum", mesh).sqrt().tolist()
    x = torch.zeros(a.shape[1], right.shape[1], dtype=torch.float64, device=a.device)
    error = before = math.inf
    for _ in range(_REFINEMENTS):
        rest = right - a @ x  # (N_r, R)
        numbers = torch.cat([(q.mT @ rest).flatten(), rest.square().sum()[None]])
        total = all_reduce(numbers, "sum", mesh)
        scale = size_a * float(x.norm()) + size_b
        error, before = (float(total[-1].sqrt()) / scale if scale else 0.0), error
        if error <= tol:
            return x.reshape(A.shape[1], *b.shape[1:])
        if not error < 0.9 * before:
            break
        x = x + torch.linalg.solve_triangular(r, total[:-1].view_as(x), upper=True)
    raise ArithmeticError(f"tol {tol:g} was not met: the backward error is {error:.1e}; take a more accurate product")


def _system(A: DTensor, b: DTensor, tol: float) -> tuple[DeviceMesh, Tensor, Tensor]:
    """The local parts of a system in float64; raise on all ranks alike unless they fit each other."""
    mesh = _rows("A", A).device_mesh
    if _rows("b", b).device_mesh != mesh:
        raise ValueError(f"b must be on the mesh of A, {mesh}, got {b.device_mesh}")
    if b.shape[0] != A.shape[0]:
        raise ValueError(f"b must have {A.shape[0]} rows like A, got {b.shape[0]}")
    check_agreement(mesh, tol=tol, columns_of_b=b.shape[1] if b.ndim == 2 else 1)
    a, right = A.to_local().detach().double(), b.to_local().detach().double()
    _check_finite(mesh, a, right)
    return mesh, a, right if right.ndim == 2 else right[:, None]


def _check_pivots(r: Tensor) -> None:
    pivots = r.diagonal()
    if pivots.numel() and not bool((pivots.abs() > 0).all() & torch.isfinite(pivots).all()):
        raise ArithmeticError(f"A is singular: {int((pivots == 0).sum())} of {pivots.numel()} pivots are zero")
