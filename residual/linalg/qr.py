"""Householder QR whose applications of the orthogonal factor go through a product of the caller's choice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from residual.paper.gemm import gemm

Product = Callable[[Tensor, Tensor], Tensor]
Panel = tuple[int, Tensor, Tensor]  # first row, V and T
METHODS = ("wy", "explicit")
MODES = ("reduced", "complete")
FULL = {"scaling": "vector", "rounding": "nearest", "threshold": 0.0}  # three int8 products


def qr(
    A: Tensor,
    *,
    method: str = "wy",
    block: int = 32,
    mode: str = "reduced",
    product: Product | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Factor a matrix by Householder reflections: ``A ~ Q R``, Q nearly orthogonal and R upper triangular.

    * ``method="explicit"``, as published [1]_: for each column ``H = I - 2 v v^T`` is formed, then ``R <- H R`` and
      ``Q <- Q H``, each by the product: ``2 min(M, N)`` products of size M, and as many roundings.
    * ``method="wy"``: `block` reflections at a time are kept as ``I - V T V^T`` (compact WY [2]_). The panel is
      factored in A's dtype; ``C <- C - V (T^T (V^T C))`` costs two thin products, so what is rounded is the update,
      not C, and only ``2 min(M, N) / block`` times.

    Parameters
    ----------
    A : Tensor, shape (M, N)
        float32 or float64, finite.
    method : {"wy", "explicit"}, default "wy"
        Algorithm.
    block : int, default 32
        Columns of a panel; ``explicit`` does not use it.
    mode : {"reduced", "complete"}, default "reduced"
        Q (M, min(M, N)) and R (min(M, N), N), or Q (M, M) and R (M, N).
    product : callable, optional
        ``product(X, Y)`` returns ``X Y`` in the dtype and on the device of X; ``torch.matmul`` gives plain QR. X and
        Y may be views of other matrices.
        Default: :func:`residual.gemm` with `options`, at first its full compensation of 8 bits, nearest and
        vector-wise.

    Returns
    -------
    Q, R : Tensor
        In A's dtype. With a product of relative error e, ``||A - QR|| / ||A||`` and ``||Q^T Q - I||`` grow like e times
        the root of the number of roundings.

    Raises
    ------
    TypeError
        If `A` is neither float32 nor float64, or both `product` and `options` are given.
    ValueError
        If `A` is not 2-D or not finite, or an option is out of range.

    References
    ----------
    .. [1] Gu, arXiv 2403.06924, section 4.2 and Table 6.
    .. [2] Schreiber and Van Loan, SIAM J. Sci. Stat. Comput. 10 (1989), 53.

    Examples
    --------
    >>> A = torch.randn(20, 10)
    >>> Q, R = qr(A, block=4)
    >>> Q.shape, R.shape, bool((Q @ R - A).norm() < 1e-3 * A.norm())
    (torch.Size([20, 10]), torch.Size([10, 10]), True)
    """
    check_qr(A, method, block, mode)
    if not bool(torch.isfinite(A).all()):
        raise ValueError("A must be finite, but holds inf or nan")
    multiply = chosen_product(product, options)
    work = A.detach()
    q, r = _explicit(work, multiply) if method == "explicit" else _blocked(work, block, mode, multiply)
    rank = min(A.shape)
    return (q[:, :rank], r[:rank].triu()) if mode == "reduced" else (q, r.triu())


def chosen_product(product: Product | None, options: dict[str, Any]) -> Product:
    """The caller's product, or the quantized one with ``options``."""
    if product is None:
        return partial(gemm, **{**FULL, **options})  # type: ignore[return-value]
    if options:
        raise TypeError(f"product and options of the quantized product exclude each other, got {sorted(options)}")
    return product


def _explicit(A: Tensor, multiply: Product) -> tuple[Tensor, Tensor]:
    m, n = A.shape
    r = A.clone()  # (M, N)
    q = torch.eye(m, dtype=A.dtype, device=A.device)  # (M, M)
    for j in range(min(m - 1, n)):
        v = r[j:, j].clone()  # (M - j,)
        norm = v.norm()
        if norm == 0:
            continue
        v[0] += torch.where(v[0] < 0, -norm, norm)  # the sign that does not cancel
        v /= v.norm()
        h = torch.eye(m, dtype=A.dtype, device=A.device)  # (M, M)
        h[j:, j:] -= 2 * torch.outer(v, v)
        r, q = multiply(h, r), multiply(q, h)  # (M, N), (M, M)
        r[j + 1 :, j] = 0
    return q, r


def _blocked(A: Tensor, block: int, mode: str, multiply: Product) -> tuple[Tensor, Tensor]:
    m, rank = A.shape[0], min(A.shape)
    r, factors = factored(A, block, multiply)
    start = torch.eye(m, m if mode == "complete" else rank, dtype=A.dtype, device=A.device)
    return reflected(factors, start, multiply), r


def factored(A: Tensor, block: int, multiply: Product) -> tuple[Tensor, list[Panel]]:
    """R (M, N), whose entries below the diagonal are zeros, and the panels of reflections that lead to it."""
    n, rank = A.shape[1], min(A.shape)
    r = A.clone()  # (M, N)
    factors = []
    for start in range(0, rank, block):
        stop = min(start + block, rank)
        packed, tau = torch.geqrf(r[start:, start:stop])  # (M - start, b), (b,)
        v, t = _compact(packed, tau)
        r[start:, start:stop] = packed.triu()
        if stop < n:
            r[start:, stop:] -= _apply(v, t.T, r[start:, stop:], multiply)  # (M - start, N - stop)
        factors.append((start, v, t))
    return r, factors


def reflected(factors: list[Panel], q: Tensor, multiply: Product) -> Tensor:
    """Apply all reflections to `q` in place, which is zero below its diagonal, and return it."""
    for start, v, t in reversed(factors):  # rows from start on are still zero in the columns before it
        q[start:, start:] -= _apply(v, t, q[start:, start:], multiply)
    return q


def _apply(v: Tensor, t: Tensor, c: Tensor, multiply: Product) -> Tensor:
    """``V T V^T C``."""
    inner = multiply(v.T, c)  # (b, n)
    return multiply(v, t @ inner)


def _compact(packed: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """V, unit lower trapezoidal ``(m, b)``, and T, upper triangular ``(b, b)``, of a panel's reflections.

    T is the inverse of ``diag(1 / tau) + triu(V^T V, 1)``, without a division by a tau of zero.
    """
    v = packed.tril(-1)
    v.diagonal().fill_(1)
    scaled = tau[:, None] * (v.T @ v).triu_(1)  # (b, b), its diagonal counts as 1
    return v, torch.linalg.solve_triangular(scaled, torch.diag(tau), upper=True, unitriangular=True)


def check_qr(A: Tensor, method: str, block: int, mode: str) -> None:
    """Raise for another kind of matrix or an option out of range."""
    if not isinstance(A, Tensor):
        raise TypeError(f"A must be a torch.Tensor, got {type(A).__name__}")
    if A.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"A must be float32 or float64, got {A.dtype}")
    if A.dim() != 2:
        raise ValueError(f"A must be 2-D, got {A.dim()} dimensions")
    for name, value, allowed in (("method", method, METHODS), ("mode", mode, MODES)):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block must be an integer of at least 1, got {block!r}")
