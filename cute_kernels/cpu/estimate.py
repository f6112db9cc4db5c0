"""Sums for the error bound of a product by sixteen probes, on the CPU engine: float64, in two levels.

For probes W (N, 16), ``Y = A (B W) - C W`` has the error of C ~ A B, and the rounding of `Y` itself is at most
``g(s(K) + s(N)) |A| (|B| wbar) + g(s(N)) |C| wbar`` per row, ``wbar_n = ||W_n:||_2``, ``g(n) = n u / (1 - n u)``,
``u = 2^-53``: a sum over n terms is rounded at most ``s(n) = 2 sqrt(n) + 1`` times [1]_.

References
----------
.. [1] Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., sections 3.1 and 4.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.cpu import extension
from cute_kernels.cpu.arguments import check_address, check_array

PROBES = 16
FEW_PROBES = 3  # of `bound_sums`


class JudgeSums(NamedTuple):
    """Sums over the rows of ``Y = A (B W) - C W``; all NaN if an entry is non-finite or a sum overflows."""

    gram: Tensor  # (16, 16) float64, Y^T Y
    product: float  # ||A (B W)||_F^2
    claimed: float  # ||C W||_F^2
    norm: float  # ||C||_F^2
    a_bound: float  # || |A| bound ||_2^2
    c_bound: float  # || |C| wbar ||_2^2


def _real_matrix(name: str, x: Tensor) -> object:
    """The engine's view of a row- or column-major float32 or float64 matrix."""
    dtype = x.dtype
    if dtype is not torch.float32 and dtype is not torch.float64:
        raise TypeError(f"{name} must be torch.float32 or torch.float64, got {dtype}")
    if x.ndim != 2:
        raise ValueError(f"{name} must have 2 dimensions, got {x.ndim}")
    check_address(name, x, dtype)
    (rows, columns), (row, column) = x.shape, x.stride()
    by_columns = column != 1 and columns > 1
    if by_columns and row != 1 and rows > 1:
        raise ValueError(f"{name} must be row- or column-major, got strides {(row, column)}; use {name}.contiguous()")
    engine = extension.ENGINE or extension.load_extension()
    stride = column if by_columns else row
    return engine.RealMatrix(x.data_ptr(), rows, columns, stride, dtype is torch.float64, by_columns)


def _check_probes(W: Tensor, wbar: Tensor, n: int) -> None:
    """Raise unless probes and their row norms fit a matrix of `n` columns."""
    check_array("W", W, torch.float32, n, PROBES)
    check_array("wbar", wbar, torch.float64, n)


def probe_right(B: Tensor, W: Tensor, wbar: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply a matrix by probes, and its magnitudes by their row norms.

    Parameters
    ----------
    B : Tensor, shape (K, N)
        float32 or float64, row- or column-major.
    W : Tensor, shape (N, 16)
        float32 probes, contiguous.
    wbar : Tensor, shape (N,)
        float64 row norms of `W`.

    Returns
    -------
    BW : Tensor, shape (K, 16)
        float64.
    bound : Tensor, shape (K,)
        ``|B| wbar``, float64. A row of `B` with non-finite entries has a non-finite bound.

    Raises
    ------
    TypeError
        If a dtype is not supported.
    ValueError
        If shapes, devices or memory orders do not match.

    Examples
    --------
    >>> W = torch.ones(2, 16)
    >>> BW, bound = probe_right(torch.tensor([[1.0, -3.0]]), W, W.double().norm(dim=1))
    >>> BW[0, :3].tolist(), bound.tolist()
    ([-2.0, -2.0, -2.0], [16.0])
    """
    b = _real_matrix("B", B)
    k, n = B.shape
    _check_probes(W, wbar, n)
    products, bound = (
        torch.empty(k, PROBES, dtype=torch.float64, device="cpu"),
        torch.empty(k, dtype=torch.float64, device="cpu"),
    )
    extension.load_extension().probe_right(
        b, W.data_ptr(), wbar.data_ptr(), products.data_ptr(), bound.data_ptr(), torch.get_num_threads()
    )
    return products, bound


def judge(A: Tensor, BW: Tensor, bound: Tensor, C: Tensor, W: Tensor, wbar: Tensor) -> JudgeSums:
    """Compare a claimed product ``C ~ A B`` with probes of the operands, in one pass over A and one over C.

    Results depend on the instruction set and on the memory orders, not on the number of threads. Magnitudes of the
    products must be in ``[2^-500, 2^500]``, as those of float32 operands are: scale float64 operands by powers of two.

    Parameters
    ----------
    A : Tensor, shape (M, K)
        float32 or float64, row- or column-major.
    BW : Tensor, shape (K, 16)
        float64, of :func:`probe_right`.
    bound : Tensor, shape (K,)
        float64, of :func:`probe_right`.
    C : Tensor, shape (M, N)
        float32 or float64, row- or column-major.
    W : Tensor, shape (N, 16)
        float32 probes, contiguous.
    wbar : Tensor, shape (N,)
        float64 row norms of `W`.

    Returns
    -------
    JudgeSums
        All NaN if an entry is non-finite or a sum overflows.

    Raises
    ------
    TypeError
        If a dtype is not supported.
    ValueError
        If shapes, devices or memory orders do not match.

    Examples
    --------
    >>> A, B, W = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0], [3.0]]), torch.ones(1, 16)
    >>> wbar = W.double().norm(dim=1)
    >>> sums = judge(A, *probe_right(B, W, wbar), torch.tensor([[4.0]]), W, wbar)
    >>> float(sums.gram[0, 0]), sums.product, sums.claimed, sums.norm, sums.a_bound, sums.c_bound
    (1.0, 400.0, 256.0, 16.0, 400.0, 256.0)
    """
    a, c = _real_matrix("A", A), _real_matrix("C", C)
    (m, k), n = A.shape, C.shape[1]
    if C.shape[0] != m:
        raise ValueError(f"C must have {m} rows to match A of shape {(m, k)}, got {C.shape[0]}")
    check_array("BW", BW, torch.float64, k, PROBES)
    check_array("bound", bound, torch.float64, k)
    _check_probes(W, wbar, n)
    gram = torch.empty(PROBES, PROBES, dtype=torch.float64, device="cpu")
    sums = extension.load_extension().judge(
        a, BW.data_ptr(), bound.data_ptr(), c, W.data_ptr(), wbar.data_ptr(), gram.data_ptr(), torch.get_num_threads()
    )
    return JudgeSums(gram, *sums)


class BoundSums(NamedTuple):
    """Squared norms that bound the error of a product C ~ A B; all NaN if an entry is non-finite."""

    a: float  # ||A||_F^2
    b: float  # ||B||_F^2
    c: float  # ||C||_F^2
    error: float  # ||A (B W) - C W||_F^2; 0 without probes


def _runs(x: Tensor) -> tuple[int, int, bool] | None:
    """The address and memory stride of a float32 CPU matrix's contiguous rows or columns; whether those are columns."""
    if x.dtype is not torch.float32 or x.ndim != 2 or not x.is_cpu or x.is_neg() or x._is_zerotensor():
        return None
    (rows, columns), (row, column) = x.shape, x.stride()
    if column == 1 or columns == 1:
        return x.data_ptr(), row, False
    return (x.data_ptr(), column, True) if row == 1 or rows == 1 else None


def bound_sums(
    A: Tensor, B: Tensor, W: Tensor | None = None, C: Tensor | None = None
) -> tuple[Tensor, BoundSums] | None:
    """Multiply float32 matrices, and sum what bounds the error: squared norms and that of ``A (B W) - C W``.

    float64 sums, each of at most K + N + M rounded terms one after the other: the rounding of ``A (B W) - C W`` is at
    most ``g(K + N) |A||B||W| + g(N) |C||W|``. Results do not depend on the number of threads.

    Parameters
    ----------
    A : Tensor, shape (M, K)
        Left operand.
    B : Tensor, shape (K, N)
        Right operand.
    W : Tensor, shape (3, N), optional
        float64 probes, one after the other, contiguous. Default: norms alone.
    C : Tensor, shape (M, N), optional
        The product under test: float32, contiguous, on the CPU. Default: ``A @ B``.

    Returns
    -------
    tuple or None
        C and the sums, all NaN if an entry is non-finite. None if `A` or `B` is not a row- or column-major float32
        matrix on the CPU, the engine is missing, or autocast computes ``A @ B`` in another dtype.

    Raises
    ------
    TypeError, ValueError
        If the shapes of `A` and `B` do not match, or `C` or `W` is not as described.

    Examples
    --------
    >>> A, B = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0], [3.0]])
    >>> C, sums = bound_sums(A, B, torch.ones(3, 1, dtype=torch.float64), torch.tensor([[4.0]]))
    >>> tuple(sums)
    (5.0, 10.0, 16.0, 3.0)
    """
    engine, left, right = extension.ENGINE, _runs(A), _runs(B)
    if engine is None or left is None or right is None:
        return None
    (m, k), (inner, n) = A.shape, B.shape
    if inner != k:
        raise ValueError(f"B must have {k} rows to match A of shape {(m, k)}, got {inner}")
    if W is not None:
        check_array("W", W, torch.float64, FEW_PROBES, n)
    if C is None:
        C = torch.mm(A, B)
        if C.dtype is not torch.float32:
            return None
    else:
        check_array("C", C, torch.float32, m, n)
    probes = 0 if W is None else W.data_ptr()
    sums = engine.bound_sums(*left, *right, C.data_ptr(), m, k, n, probes, torch.get_num_threads())
    return C, BoundSums(*sums)
