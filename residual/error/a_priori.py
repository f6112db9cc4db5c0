"""The bound of a float32 product that its operands' norms prove, without probes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from residual.error.estimate import relative_bound

UNIT = 2.0**-24  # unit roundoff of float32
_LONGEST = 2**17  # terms of a sum of squares, whose rounding is below 1% then: a norm's below half of that
_NEAR = 2.0**30  # norm of a slice that is not far from one, and one over it
_SLACK = 1.001  # covers what squares lose below the range of float32
_LEAST = 2.0**-126  # what an entry of a product loses by underflow


def a_priori_bound(A: Tensor, B: Tensor, C: Tensor) -> float:
    """Return a proven bound of ``||AB - C||_F / ||AB||_F`` for a float32 product in any order of summation.

    ``|AB - C| <= g(K) |A| |B|`` with ``g(n) = n u / (1 - n u)``, ``u = 2^-24`` [1]_, so that
    ``||AB - C||_F <= g(K) ||A||_F ||B||_F``. The norms are float32 sums, of which the rounding is counted.

    Parameters
    ----------
    A, B, C : Tensor, shapes (M, K), (K, N) and (M, N)
        float32.

    Returns
    -------
    float
        Infinite if it proves nothing: a slice is zero, non-finite or far from one, or the product is below its
        rounding.

    References
    ----------
    .. [1] Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM 2002, equation 3.13.

    Examples
    --------
    >>> A, B = torch.rand(64, 64), torch.rand(64, 64)
    >>> 1e-7 < a_priori_bound(A, B, A @ B) < 1e-5
    True
    >>> A = torch.tensor([[1.0, 2.0**-30, -1.0]])
    >>> a_priori_bound(A, torch.ones(3, 1), A @ torch.ones(3, 1))
    inf
    """
    (m, k), n = A.shape, C.shape[1]
    if max(m, k, n) > _LONGEST:
        return math.inf
    norms = torch.linalg.vector_norm
    rows, columns = norms(A, dim=1), (B * B).sum(0).sqrt()  # (M,), (N,)
    slices = torch.cat((rows, columns))
    least, most = slices.aminmax()
    lhs, rhs, out, low, high = (
        torch.stack((norms(rows), norms(columns), norms(norms(C, dim=1)), least, most)).double().tolist()
    )
    if not (low >= 1 / _NEAR and high <= _NEAR and math.isfinite(out)):
        return math.inf
    lhs *= 1 + (m + k + 4) * UNIT
    rhs *= 1 + (n + k + 4) * UNIT
    out *= 1 - (m + n + 4) * UNIT
    steps = (k + 1) * UNIT
    bound = _SLACK * steps / (1 - steps) * lhs * rhs + math.sqrt(m * n) * k * _LEAST
    return relative_bound(bound, out / _SLACK)
