"""The check of a product by probes in float32, and the guard that hands it to float64.

The float32 judgement counts only where ``tol ||C|| > 2^-21 ||A|| ||B W|| / 4``; else the sums of
:mod:`residual.error.probes` judge. The guard is no proof: no operands made to fool a check have passed it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cute_kernels.convert.digits import ZERO_SCALE
from residual.cuda.operand import FAR, GpuOperand
from residual.error.estimate import ErrorEstimate, from_sums
from residual.error.factor import confidence, sharp_factor
from residual.error.probes import PROBES, UNIT, Probes, ProbeSums, draw, gamma, judge, noise, probe_right
from residual.operand.prepared import PreparedOperand, TransposedProbes

if TYPE_CHECKING:
    from cute_kernels.estimate.probes import Comparison

_NOISE = 2.0**-21  # of float32 probes against the product of the operands' norms; errors below it are judged in double
_SINGLE = 2.0**-24  # unit roundoff of float32
_LEAST_SINGLE = 2.0**-149
_SLACK = 1.01  # covers the rounding of a bound itself
_ROUNDINGS = 64  # of a term besides those of its sum's other terms, more than there are
_ROOM = 32  # a vector's length in memory is a multiple of it
# Scales of lines of zeros, and of lines whose magnitudes are near one, lie between these, a power of two to spare.
FAR_SCALES = (ZERO_SCALE, 2.0 ** (FAR - 7))


@lru_cache(maxsize=256)
def usual_factor(m: int, n: int) -> float:
    """The first bound over the estimate, for an error without pattern of this shape.

    The Gram matrix of p Gaussian columns of r entries has its largest eigenvalue near ``r (1 + sqrt(p / r))**2``.
    """
    spread = (1 + math.sqrt(PROBES / min(m, n))) ** 2 / PROBES
    return sharp_factor(min(spread, 1.0), PROBES, confidence(0))


class Check:
    """``A (B W)`` for the probes W (N, 16) of a seed, in float32, and in float64 where the guard asks for it.

    Probes and their products are kept as they lie in memory, one vector after the other, with room after each that a
    GPU's kernels want.

    Attributes:
        far: whether a scale of ``estimate_from_probes`` was out of its bounds.
    """

    def __init__(self, left: GpuOperand, right: GpuOperand, prepared: PreparedOperand | None, seed: int | None) -> None:
        self.left, self.right, self.prepared, self.far, self._tops = left, right, prepared, False, False
        if prepared is None:
            made = drawn_transposed(right.given.shape[0], right.given.device, seed)
        else:
            made = prepared.transposed or transpose_probes(prepared.probes, prepared.vectors)
        self.probes, self.vectors, self._single = made.probes, made.vectors, made.products  # vectors: (16, N and room)
        self._product: Tensor | None = None

    def begin(self, tops: bool = False) -> Tensor:
        """Start what needs no product: ``(A (B W))^T`` (16, M and room).

        ``tops``: the passes over A and B find their lines' largest magnitudes too, where a GPU's kernels do them.
        """
        self._tops = tops
        return self._outer()

    def _inner(self) -> Tensor:
        """``(B W)^T`` (16, K and room)."""
        if self._single is None:
            tops = (self.right, "columns") if self._tops else None
            self._single = _probed(self.right.real.mT, self.vectors, tops)
        return self._single

    def _outer(self) -> Tensor:
        """``(A (B W))^T`` (16, M and room)."""
        if self._product is None:
            self._product = _probed(self.left.real, self._inner(), (self.left, "rows") if self._tops else None)
        return self._product

    def norm(self) -> float:
        """Estimate of ``||A B||_F``; waits for a GPU."""
        m = self.left.given.shape[0]
        return float(torch.linalg.vector_norm(self._outer()[:, :m], dtype=torch.float64)) / math.sqrt(PROBES)

    def estimate_from_probes(
        self,
        C: Tensor,
        attempt: int,
        tol: float,
        scales: tuple[Tensor, ...] = (),
        bounds: tuple[float, float] = FAR_SCALES,
        enough: float = 0.0,
    ) -> ErrorEstimate:
        """The error of ``C`` (M, N); in float64 where the guard does not let float32 judge.

        ``scales``: of lines that nobody has looked at; where one is out of ``bounds`` but no zero, ``far`` is set after
        the call, and the error means nothing.  ``enough``: no sharper bound is computed where one is within it.
        """
        sure = confidence(attempt)
        if self.left.exponent is None and self.right.exponent is None:
            self._outer()
            norms = self._start_norms()
            found, norm = self._judge_single(C, sure, scales, bounds, enough)
            if self.far or (math.isfinite(norm) and tol * norm > hidden(*norms.tolist())):
                return found
        return self._judge_double(C, sure)

    def _start_norms(self) -> Tensor:
        """``||A||_F`` and ``||B W||_F``, float32 (2,), on their way."""
        inner = self._inner()[:, : self.left.given.shape[1]]  # (16, K)
        norms = (torch.linalg.vector_norm(x, dtype=torch.float32) for x in (self.left.real, inner))
        return torch.stack(tuple(norms))

    def _judge_double(self, C: Tensor, sure: float) -> ErrorEstimate:
        a, b = _finite(self.left), _finite(self.right).mT
        right = probe_right(b, *self.probes) if self.prepared is None else (self.prepared.vectors, self.prepared.bound)
        sums = judge(a, *right, C, *self.probes)
        return from_sums(sums, noise(sums, a, b), sure)

    def _judge_single(
        self, C: Tensor, sure: float, scales: tuple[Tensor, ...], bounds: tuple[float, float], enough: float
    ) -> tuple[ErrorEstimate, float]:
        """The estimate in float32 and the norm of C."""
        outer = self._outer()
        if C.is_cuda:
            from cute_kernels.estimate import probes  # its kernels need the CUDA wheels

            if probes.readable(C):
                sums = probes.compare(C, self.vectors, outer, scales, bounds)
                self.far = sums.out_of_range > 0
                found = estimate_of(sums, C.numel(), sure, enough)
                if found is not None:
                    return found, math.sqrt(sums.result)
        return ErrorEstimate(math.inf, math.inf, sure), math.nan  # no kernel reads C: float64 judges


def hidden(of_a: float, of_inner: float) -> float:
    """The error that float32 probes may hide, about, by ``||A||_F`` and ``||B W||_F``."""
    return _NOISE * of_a * of_inner / math.sqrt(PROBES)


def rounding_of_double(
    shape: tuple[int, int, int], w: float, aa: float, bb: float, yy: float, zz: float, cc: float, differences: float
) -> float:
    """Bound of the rounding of ``Y = z - C W`` in the Frobenius norm, for probes in float64 and vectors in float32.

    With ``y = fl(B W)`` and ``z = fl(A y)`` in float32, ``v = 2^-24``, and all sums in float64, Y shows ``E = A B - C``
    up to

        ||Y - E W|| <= v (||A|| ||y|| + ||z||) + g (||A|| (||y|| + ||B|| ||W||) + ||C|| ||W||) + u ||Y||

    with ``u = 2^-53``, ``g = n u / (1 - n u)`` for sums of n terms [1]_, by Tensor Cores that round each addition to
    nearest [2]_.

    Parameters
    ----------
    shape : tuple of int
        M, K and N.
    w : float
        Frobenius norm of W.
    aa, bb, yy, zz, cc, differences : float
        Squares of those of A, B, ``B W``, ``A (B W)``, C and ``A (B W) - C W``.

    References
    ----------
    .. [1] Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM 2002, section 3.1.
    .. [2] Fasi, Higham, Mikaitis, Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ Comput. Sci. 7, e330, 2021.

    Examples
    --------
    >>> n = 4096
    >>> found = rounding_of_double((n, n, n), 4 * n**0.5, n**2, n**2, 16 * n**2, 16 * n**3, n**3, 0.0)
    >>> found / (4 * n**1.5) < 5e-6  # of the norm that an error as large as C has
    True
    """
    m, k, n = shape
    a, b, y, z, c, rest = (math.sqrt(each) if each >= 0 else math.nan for each in (aa, bb, yy, zz, cc, differences))
    sums = gamma(k + n + _ROUNDINGS) * (a * (y + b * w) + c * w) + UNIT * rest
    below = 4 * _LEAST_SINGLE * (a * math.sqrt(k) + math.sqrt(m))  # what float32 loses below its range
    return _SLACK * (_SINGLE * (a * y + z) + sums) + below


def _finite(side: GpuOperand) -> Tensor:
    """The given numbers in float32 (L, K), lines with inf or NaN zero."""
    given = side.given.float()
    return given if side.broken is None else given.index_fill(0, side.broken, 0.0)


@lru_cache(maxsize=16)
def drawn_transposed(n: int, device: torch.device, seed: int | None) -> TransposedProbes:
    """Probes of a seed, ``B W`` to be made."""
    with torch.inference_mode(False):
        return transpose_probes(draw(n, device, seed))


def transpose_probes(probes: Probes, vectors: Tensor | None = None) -> TransposedProbes:
    """Probes, with ``B W`` (K, 16) of a constant B; waits for the GPU."""
    norm = float(torch.linalg.vector_norm(probes.norms))
    return TransposedProbes(
        probes, _with_room(probes.vectors), norm, None if vectors is None else _with_room(vectors.float())
    )


def _with_room(x: Tensor) -> Tensor:
    """``x^T`` (16, L and room) of ``x`` (L, 16)."""
    return torch.nn.functional.pad(x.mT, (0, -x.shape[0] % _ROOM)).contiguous()


def estimate_of(sums: Comparison, entries: int, sure: float, enough: float = 0.0) -> ErrorEstimate | None:
    """The estimate by the sums that a kernel made, at the confidence ``sure``; ``entries``: of the product.

    ``enough``: no sharper bound is computed where one is within it.

    None where those sums, of float32 squares, may have left their range; not where a scale is ``far``: then it means
    nothing anyway.
    """
    spread = sums.result / entries
    if not (sums.out_of_range or not sums.gram.trace() or 2.0**-90 < spread < 2.0**90):
        return None
    gram = np.asarray(sums.gram, dtype=np.float64)
    return from_sums(ProbeSums(gram, sums.product, sums.claimed, sums.result, 0.0, 0.0), 0.0, sure, enough=enough)


def _probed(x: Tensor, w: Tensor, tops: tuple[GpuOperand, str] | None = None) -> Tensor:
    """``Y^T`` (16, M and room) of ``Y = X W``: x (M, N), ``W^T`` (16, N and room) in float32 or float64.

    ``tops``: the operand that x is of, and whether its lines are rows or columns of x; gets their largest magnitudes if
    they come for nothing.
    """
    if x.is_cuda and w.dtype == torch.float32:
        from cute_kernels.estimate import probes  # its kernels need the CUDA wheels

        if probes.probeable(x):
            if tops is None or tops[0].knows_tops:
                return probes.probe(x, w)
            y, tops[0].top = probes.probe_with_absmax(x, w, tops[1])
            return y
    y = (w[:, : x.shape[1]].double() @ x.mT.double()).float()  # (16, M)
    return torch.nn.functional.pad(y, (0, -y.shape[1] % _ROOM))
