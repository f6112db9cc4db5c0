"""Products with Gaussian probes in float64, summed in two levels, and the bound of their own rounding.

``Y = A (B W) - C W`` shows ``E = A B - C``, apart from the rounding D of its own sums. With u = 2^-53,
``g(n) = n u / (1 - n u)`` and sums of n terms in blocks of about sqrt(n), whose roundings number ``s(n)`` at most,

    |D| <= g(s(K) + s(N)) |A| |B| |W| + g(s(N)) |C| |W|
    ||D||_F <= eta = g(s(K) + s(N)) || |A| (|B| wbar) ||_2 + g(s(N)) || |C| wbar ||_2 + u ||Y||_F

with ``wbar_n = ||W[n, :]||_2`` by Minkowski's inequality over the probes [1]_. The bound takes one vector beside the
probes.

References
----------
.. [1] Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM 2002, sections 3.1 and 4.2.
"""

from __future__ import annotations

import math
import os
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cute_kernels.cpu import engine
from cute_kernels.cpu import estimate as on_cpu
from cute_kernels.double_sums import RowSums

PROBES = 16
UNIT = 2.0**-53  # unit roundoff of float64
_SLACK = 1.01  # covers the rounding of the bounds themselves
_ENTRIES = 1 << 22  # float64 entries of a chunk of rows


class Probes(NamedTuple):
    """Gaussian probes and their norms."""

    vectors: Tensor  # (N, p) float32: W
    norms: Tensor  # (N,) float64: wbar


class ProbeSums(NamedTuple):
    """What the passes over A and C leave; squared norms."""

    gram: np.ndarray  # (p, p): Y^T Y
    product: float  # ||A (B W)||_F^2
    claimed: float  # ||C W||_F^2
    result: float  # ||C||_F^2
    inputs: float  # || |A| (|B| wbar) ||^2
    outputs: float  # || |C| wbar ||^2
    single: float = 0.0  # ||W||^2 where N = 1: then ||Y|| = ||E|| ||W||; 0 where N is larger


def draw(n: int, device: torch.device, seed: int | None, count: int = PROBES) -> Probes:
    """Return the probes of a seed; None draws one.

    Examples
    --------
    >>> probes = draw(5, torch.device("cpu"), 0)
    >>> probes.vectors.shape, probes is draw(5, torch.device("cpu"), 0)
    (torch.Size([5, 16]), True)
    """
    if seed is None:
        return _drawn.__wrapped__(n, device, int.from_bytes(os.urandom(7), "little"), count)
    return _drawn(n, device, seed, count)


@lru_cache(maxsize=16)
def _drawn(n: int, device: torch.device, seed: int, count: int) -> Probes:
    """Draw probes by a generator of their own: the program's random numbers stay as they are."""
    with torch.inference_mode(False):
        return probes_from(n, device, torch.Generator(device).manual_seed(seed), count)


def probes_from(n: int, device: torch.device, generator: torch.Generator, count: int) -> Probes:
    """Return probes of a generator, which may be on another device."""
    w = torch.randn(n, count, generator=generator, device=generator.device, dtype=torch.float32).to(device)
    return Probes(w, torch.linalg.vector_norm(w, dim=1, dtype=torch.float64))


def _block(n: int) -> int:
    return max(1, math.isqrt(max(n - 1, 0)) + 1)


def steps(n: int) -> int:
    """Return the number of roundings that a term of a sum of `n` may see, that of its product included.

    Examples
    --------
    >>> steps(1024), steps(1)
    (65, 3)
    """
    block = _block(n)
    return block + -(-n // block) + 1


def gamma(n: int) -> float:
    """Return ``g(n) = n u / (1 - n u)``."""
    return n * UNIT / (1 - n * UNIT)


def two_level(x: Tensor, v: Tensor) -> Tensor:
    """Return ``x @ v`` in float64, each sum in blocks of about sqrt(K).

    Parameters
    ----------
    x : Tensor, shape (M, K)
        float64.
    v : Tensor, shape (K, p)
        float64.

    Returns
    -------
    Tensor, shape (M, p)
    """
    (m, k), p = x.shape, v.shape[1]
    block = _block(k)
    blocks = k // block
    whole = blocks * block
    left = x[:, :whole].reshape(m, blocks, block).transpose(0, 1)  # (blocks, M, block)
    total = torch.bmm(left, v[:whole].reshape(blocks, block, p)).sum(0)  # (M, p)
    return total if whole == k else total + x[:, whole:] @ v[whole:]


def row_chunks(m: int, k: int) -> list[slice]:
    """Return ranges of rows whose float64 copies stay small."""
    rows = max(1, _ENTRIES // max(k, 1))
    return [slice(i, min(i + rows, m)) for i in range(0, m, rows)]


def _by_engine(x: Tensor, W: Tensor) -> bool:
    """Return whether the CPU engine multiplies a matrix by probes."""
    return x.device.type == "cpu" and W.shape[1] == PROBES and engine.available()


def _readable(x: Tensor) -> Tensor:
    """Return a row- or column-major matrix of float32 or float64 with the values of `x`."""
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    x = x.clone() if x.is_neg() or x._is_zerotensor() else x
    (m, n), (row, column) = x.shape, x.stride()
    by_rows, by_columns = column == 1 and row >= n, row == 1 and column >= m
    return x if by_rows or by_columns else x.contiguous()


def probe_right(B: Tensor, W: Tensor, wbar: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``B W`` and ``|B| wbar``.

    Parameters
    ----------
    B : Tensor, shape (K, N)
        float32 or float64, finite.
    W : Tensor, shape (N, p)
        float32 probes.
    wbar : Tensor, shape (N,)
        float64 norms of the rows of `W`.

    Returns
    -------
    tuple of Tensor, shapes (K, p) and (K,)
        float64.
    """
    if _by_engine(B, W):
        return on_cpu.probe_right(_readable(B), W, wbar)
    found = row_sums(B, W.double(), wbar)
    return found.products, found.bounds


@lru_cache(maxsize=1)
def _has_kernels() -> bool:
    """Whether the CUDA wheels are installed: an error can be estimated without them."""
    return find_spec("cuda") is not None and find_spec("cuda.core") is not None


def row_sums(x: Tensor, v: Tensor, n: Tensor) -> RowSums:
    """Return ``X V``, ``|X| n`` and the squares of the rows, by a GPU's kernel or by torch.

    A term sees at most :func:`steps` roundings.

    Parameters
    ----------
    x : Tensor, shape (M, K)
        A float dtype.
    v, n : Tensor, shapes (K, p) and (K,)
        float64.

    Returns
    -------
    RowSums
    """
    (rows, columns), p = x.shape, v.shape[1]
    if x.is_cuda and p == PROBES and _has_kernels():
        from cute_kernels.double_sums import row_sums as kernel

        if kernel.can_sum_rows(x) and kernel.roundings(columns) <= steps(columns):
            return kernel.sum_rows(x, v, n)
    found = RowSums(*(x.new_empty(rows, *tail, dtype=torch.float64) for tail in ((p,), (), ())))
    for chunk in row_chunks(rows, columns):
        part = x[chunk].double()  # (rows of the chunk, K)
        found.products[chunk], found.bounds[chunk] = two_level(part, v), part.abs() @ n
        found.squares[chunk] = part.square().sum(1)
    return found


def judge(A: Tensor, BW: Tensor, bound: Tensor, C: Tensor, W: Tensor, wbar: Tensor) -> ProbeSums:
    """Return the sums that judge a product.

    Parameters
    ----------
    A : Tensor, shape (M, K)
        float32 or float64, finite.
    BW, bound : Tensor, shapes (K, p) and (K,)
        Of :func:`probe_right`.
    C : Tensor, shape (M, N)
        A float dtype.
    W, wbar : Tensor, shapes (N, p) and (N,)
        Probes and their norms.

    Returns
    -------
    ProbeSums
    """
    if _by_engine(A, W):
        gram, *numbers = on_cpu.judge(_readable(A), BW, bound, _readable(C), W, wbar)
        sums = ProbeSums(gram.numpy(), *numbers)
    else:
        sums = sums_of(row_sums(A, BW, bound), row_sums(C, W.double(), wbar))
    return sums._replace(single=float(wbar) ** 2) if wbar.numel() == 1 else sums


def sums_of(left: RowSums, right: RowSums) -> ProbeSums:
    """Return the sums that judge a product: ``left`` of A with ``B W``, ``right`` of C with ``W``."""
    p = left.products.shape[1]
    y = left.products - right.products  # (M, p)
    squares = [each.square().sum() for each in (left.products, right.products, left.bounds, right.bounds)]
    numbers = torch.cat([(y.mT @ y).flatten(), torch.stack([*squares, right.squares.sum()])]).cpu().numpy()
    product, claimed, inputs, outputs, result = numbers[p * p :].tolist()
    return ProbeSums(numbers[: p * p].reshape(p, p), product, claimed, result, inputs, outputs)


def noise(sums: ProbeSums, A: Tensor, B: Tensor, inexact: int = 0) -> float:
    """Return ``eta``, the bound of the rounding of ``Y`` in the Frobenius norm.

    Parameters
    ----------
    sums : ProbeSums
        Of entries of magnitude one at most for float64 operands.
    A, B : Tensor, shapes (M, K) and (K, N)
        The operands as they are given.
    inexact : int, default 0
        Operands that were rounded to float64, C counted twice.
    """
    (m, k), n = A.shape, B.shape[1]
    rounding = gamma(steps(k) + steps(n) + inexact) * math.sqrt(sums.inputs)
    rounding += gamma(steps(n) + inexact) * math.sqrt(sums.outputs)
    rounding += 2 * UNIT * math.sqrt(float(sums.gram.trace()))
    if not rounding and is_zero(A, B):
        return 0.0
    return _SLACK * rounding + underflow(m)


def underflow(m: int) -> float:
    """Return a bound of what entries and squares of `m` rows lose below the range of float64."""
    return math.sqrt(m) * 2.0**-500


def is_zero(A: Tensor, B: Tensor) -> bool:
    """Return whether ``|A||B|`` is zero."""
    return not bool((A[:, (B != 0).any(1)] != 0).any())
