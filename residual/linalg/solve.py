"""Linear systems to float64 accuracy from a factorization whose products are quantized."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residual.linalg.qr import Product, chosen_product, qr

FACTORIZATIONS = ("qr", "lu")
Solver = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SolveReport:
    """What :func:`solve` did.

    Attributes
    ----------
    refinements : int
        Residuals that were computed and corrected; 0 for a right-hand side of zeros.
    iterations : int
        GMRES steps in all, each one product with A and one solve with the factors.
    backward_error : float
        Largest ``||b - A x|| / (||A||_F ||x|| + ||b||)`` over the right-hand sides.
    history : tuple of float
        That error of the slowest right-hand side before each refinement and at the end.

    Examples
    --------
    >>> _, report = solve(torch.eye(3), torch.zeros(3))
    >>> report.refinements, report.history
    (0, (0.0,))
    """

    refinements: int
    iterations: int
    backward_error: float
    history: tuple[float, ...]


def solve(
    A: Tensor,
    b: Tensor,
    tol: float = 1e-15,
    *,
    factorization: str = "qr",
    block: int = 32,
    product: Product | None = None,
    max_refinements: int = 20,
    restart: int = 50,
    **options: Any,
) -> tuple[Tensor, SolveReport]:
    """Solve a linear system by GMRES-based iterative refinement: ``||b - A x|| <= tol (||A||_F ||x|| + ||b||)``.

    A is factored once, every product of the factorization by `product`: ``A ~ Q R`` (:func:`residual.qr`) or
    ``P A ~ L U``. Then, in float64: ``r = b - A x``; GMRES, with the factors as preconditioner, solves ``A d = r`` to
    five digits; ``x <- x + d``; until the backward error is at most `tol` [2]_. Use suggested in [1]_.

    Parameters
    ----------
    A : Tensor, shape (N, N)
        float32 or float64, finite, not singular.
    b : Tensor, shape (N,) or (N, R)
        Of A's dtype and device.
    tol : float, default 1e-15
        Normwise backward error to reach, in (0, 1).
    factorization : {"qr", "lu"}, default "qr"
        ``"lu"`` is half the work and less stable.
    block : int, default 32
        Columns of a panel.
    product : callable, optional
        As in :func:`residual.qr`, which also describes `options`.
    max_refinements : int, default 20
        Refinements after which it fails, at least 1.
    restart : int, default 50
        GMRES steps between restarts; a refinement fails at four times as many.

    Returns
    -------
    x : Tensor
        float64, the shape of `b`.
    report : SolveReport

    Raises
    ------
    ArithmeticError
        If the factors are singular, or `tol` was not met; the message has the error that was.
    TypeError
        If an operand has another dtype.
    ValueError
        If shapes or devices do not match, an operand is not finite, or an option is out of range.

    References
    ----------
    .. [1] Gu, arXiv 2403.06924, section 5.3 (GMRES after a low-precision factorization).
    .. [2] Carson and Higham, SIAM J. Sci. Comput. 40 (2018), A817.

    Examples
    --------
    >>> A, b = torch.randn(20, 20) + 5 * torch.eye(20), torch.randn(20)
    >>> x, report = solve(A, b)
    >>> report.backward_error <= 1e-15, bool(torch.allclose(A.double() @ x, b.double()))
    (True, True)
    """
    _check(A, b, tol, factorization, max_refinements, restart)
    multiply = chosen_product(product, options)
    exact, right = A.detach().double(), b.detach().double()
    if right.numel() == 0:
        return right.clone(), SolveReport(0, 0, 0.0, (0.0,))
    norms = exact.abs().amax(1, keepdim=True)  # (N, 1)
    if not bool((norms > 0).all()):
        raise ArithmeticError("A is singular: it has a row of zeros")
    # Rows of very different sizes would drown each other in one quantized operand; powers of two change no digit.
    balance = torch.exp2(-torch.floor(torch.log2(norms)))  # (N, 1)
    factored = (exact * balance).to(A.dtype)
    inner = _by_qr(factored, block, multiply) if factorization == "qr" else _by_lu(factored, block, multiply)

    def precondition(r: Tensor) -> Tensor:
        return inner(r * balance[:, 0])

    columns = right.reshape(right.shape[0], -1)  # (N, R)
    done = [_refine(exact, c, tol, precondition, max_refinements, restart) for c in columns.unbind(1)]
    x = torch.stack([x for x, _ in done], 1).reshape(right.shape)
    reports = [report for _, report in done]
    slowest = max(reports, key=lambda report: report.refinements)
    worst, steps = max(report.backward_error for report in reports), sum(report.iterations for report in reports)
    return x, SolveReport(slowest.refinements, steps, worst, slowest.history)


def _refine(
    A: Tensor, b: Tensor, tol: float, precondition: Solver, max_refinements: int, restart: int
) -> tuple[Tensor, SolveReport]:
    """One right-hand side."""
    norm, size = float(A.norm()), float(b.norm())
    x, r = torch.zeros_like(b), b
    history, steps = [1.0 if size else 0.0], 0
    while history[-1] > tol:
        if len(history) > max_refinements:
            raise ArithmeticError(
                f"tol {tol:g} was not met after {max_refinements} refinements and {steps} GMRES steps: "
                f"the backward error is {history[-1]:.1e}; take a more accurate product"
            )
        d, taken = _gmres(A, r, precondition, restart)
        x, steps = x + d, steps + taken
        r = b - A @ x  # (N,)
        history.append(float(r.norm()) / (norm * float(x.norm()) + size))
        if not math.isfinite(history[-1]):
            raise ArithmeticError(f"the refinement diverged after {steps} GMRES steps: A may be singular")
    return x, SolveReport(len(history) - 1, steps, history[-1], tuple(history))


def _gmres(A: Tensor, r: Tensor, precondition: Solver, restart: int) -> tuple[Tensor, int]:
    """``d`` with ``||r - A d|| <= 1e-5 ||r||``, or what four restarts bring, and the number of steps."""
    from scipy.sparse.linalg import LinearOperator, gmres

    size = float(r.norm())  # scipy's own tolerances have absolute parts: it sees a vector of norm 1
    n = r.numel()

    def operator(apply: Solver) -> Any:
        def matvec(v: Any) -> Any:
            return apply(torch.as_tensor(v, device="cpu").reshape(-1).to(r.device)).cpu().numpy()

        return LinearOperator((n, n), matvec=matvec, dtype="float64")

    norms: list[float] = []
    d, _ = gmres(
        operator(lambda v: A @ v),
        (r / size).cpu().numpy(),
        M=operator(precondition),
        restart=min(restart, n),
        maxiter=4,
        atol=0.0,
        callback=norms.append,
        callback_type="pr_norm",
    )
    return torch.as_tensor(d, device="cpu").to(r.device) * size, len(norms)


def _by_qr(A: Tensor, block: int, multiply: Product) -> Solver:
    q, r = (factor.double() for factor in qr(A, block=block, product=multiply))
    _check_pivots(r)

    def apply(v: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(r, (q.T @ v)[:, None], upper=True)[:, 0]

    return apply


def _by_lu(A: Tensor, block: int, multiply: Product) -> Solver:
    """Right-looking ``P A ~ L U`` with partial pivoting inside each panel of ``block`` columns."""
    lu, n = A.clone(), A.shape[0]
    order = torch.arange(n, device=A.device)
    for start in range(0, n, block):
        stop = min(start + block, n)
        p, lower, upper = torch.linalg.lu(lu[start:, start:stop])  # (m, m), (m, b), (b, b)
        rows = start + p.argmax(0)  # (m,): row i of P^T A
        lu[start:], order[start:] = lu[rows], order[rows]
        lu[start:, start:stop] = lower.tril(-1)
        lu[start:stop, start:stop] += upper
        if stop < n:
            top = torch.linalg.solve_triangular(
                lower[: stop - start], lu[start:stop, stop:], upper=False, unitriangular=True
            )  # (b, n - stop)
            lu[start:stop, stop:] = top
            lu[stop:, stop:] -= multiply(lower[stop - start :].contiguous(), top)  # (n - stop, n - stop)
    factors = lu.double()
    _check_pivots(factors)

    def apply(v: Tensor) -> Tensor:
        y = torch.linalg.solve_triangular(factors, v[order][:, None], upper=False, unitriangular=True)
        return torch.linalg.solve_triangular(factors, y, upper=True)[:, 0]

    return apply


def _check_pivots(factor: Tensor) -> None:
    pivots = factor.diagonal()
    if pivots.numel() and not bool((pivots != 0).all() & torch.isfinite(pivots).all()):
        raise ArithmeticError(f"A is singular: {int((pivots == 0).sum())} of {pivots.numel()} pivots are zero")


def _check(A: Tensor, b: Tensor, tol: float, factorization: str, max_refinements: int, restart: int) -> None:
    for name, operand in (("A", A), ("b", b)):
        if not isinstance(operand, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(operand).__name__}")
        if operand.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} must be float32 or float64, got {operand.dtype}")
        if not bool(torch.isfinite(operand).all()):
            raise ValueError(f"{name} must be finite, but holds inf or nan")
    if A.dim() != 2 or A.shape[0] != A.shape[1]:
        raise ValueError(f"A must be a square matrix, got shape {tuple(A.shape)}")
    if b.dim() not in (1, 2) or b.shape[0] != A.shape[0]:
        raise ValueError(f"b must have shape ({A.shape[0]},) or ({A.shape[0]}, R), got {tuple(b.shape)}")
    if b.device != A.device:
        raise ValueError(f"b must be on the device of A, got {b.device} and {A.device}")
    if not 0 < tol < 1:
        raise ValueError(f"tol must be in (0, 1), got {tol}")
    if factorization not in FACTORIZATIONS:
        raise ValueError(f"factorization must be one of {FACTORIZATIONS}, got {factorization!r}")
    for name, value in (("max_refinements", max_refinements), ("restart", restart)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
