"""The check of a product by probes: products with a few random vectors, which also tell the size of the true one."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residual.error.estimate import ErrorEstimate, estimate_from_probes, frobenius, from_sums, sharp_factor
from residual.operand.ieee import ieee
from residual.operand.operand import FAR, Operand

if TYPE_CHECKING:
    from cute_kernels.estimate.probes import Comparison

PROBES = 16  # and no other number in cute_kernels.estimate.probes
FAILURE = 0.01  # probability that a call returns a product that misses its tolerance, over all its attempts
_FIRST_SHARE = 0.9  # of that probability for the first attempt; each later one has a tenth of the one before
_NOISE = 2.0**-21  # of float32 probes against the product of the operands' norms; errors below it are judged in double
_ROOM = 32  # a vector's length in memory is a multiple of it
# Scales of lines whose magnitudes are near one lie between these, a power of two to spare.
FAR_SCALES = (2.0 ** -(FAR + 7), 2.0 ** (FAR - 7))


def confidence(attempt: int) -> float:
    """Confidence of the bound that an attempt, counted from 0, has to meet.

    The probabilities of accepting a wrong product, one an attempt, add up to :data:`FAILURE` at most.
    """
    return 1 - FAILURE * _FIRST_SHARE * (1 - _FIRST_SHARE) ** attempt


@lru_cache(maxsize=256)
def usual_factor(m: int, n: int) -> float:
    """The first bound over the estimate, for an error without pattern of this shape.

    The Gram matrix of p Gaussian columns of r entries has its largest eigenvalue near ``r (1 + sqrt(p / r))**2``.
    """
    spread = (1 + math.sqrt(PROBES / min(m, n))) ** 2 / PROBES
    return sharp_factor(min(spread, 1.0), PROBES, confidence(0))


class Check:
    """``A (B W)`` for Gaussian probes W (N, 16), in float32 where that is good enough, else in float64.

    Probes and their products are kept as they lie in memory, one vector after the other, with room after each that a
    GPU's kernels want.

    Attributes:
        far: whether a scale of ``estimate_from_probes`` was out of its bounds.
    """

    def __init__(self, left: Operand, right: Operand, generator: torch.Generator, fresh: bool) -> None:
        """``fresh``: draw probes for this call even where B keeps some."""
        self.left, self.right, self.far, self._tops = left, right, False, False
        kept = right.kept.get("probes")
        if fresh or not isinstance(kept, dict):
            kept = right.kept["probes"] = {}
        self._of_right: dict[str, Tensor] = kept
        self._generator = generator
        self._product: dict[bool, Tensor] = {}
        self._double = not (left.exact_in_single and right.exact_in_single)

    def _vectors(self) -> Tensor:
        """``W^T`` (16, N and room), drawn when it is first wanted: by then a GPU has the product to compute."""
        w = self._of_right.get("w")
        if w is None:
            n = self.right.given.shape[0]
            room = -(-n // _ROOM) * _ROOM
            w = torch.randn(PROBES, room, device=self.right.given.device, generator=self._generator)
            self._of_right["w"] = w
        return w

    def begin(self, tops: bool = False) -> Tensor:
        """Start what needs no product: ``(A (B W))^T`` (16, M and room).

        ``tops``: the passes over A and B find their lines' largest magnitudes too, where a GPU's kernels do them.
        """
        self._tops = tops
        return self._outer(self._double)

    def _inner(self, double: bool) -> Tensor:
        """``(B W)^T`` (16, K and room)."""
        name = "double" if double else "single"
        if name not in self._of_right:
            w = self._vectors()
            x = self.right.finite() if double else self.right.real
            tops = (self.right, "columns") if self._tops and not double else None
            self._of_right[name] = _probed(x.mT, w.double() if double else w, tops)
        return self._of_right[name]

    def _outer(self, double: bool) -> Tensor:
        """``(A (B W))^T`` (16, M and room)."""
        if double not in self._product:
            x = self.left.finite() if double else self.left.real
            tops = (self.left, "rows") if self._tops and not double else None
            self._product[double] = _probed(x, self._inner(double), tops)
        return self._product[double]

    def norm(self) -> float:
        """Estimate of ``||A B||_F``; waits for a GPU."""
        m = self.left.given.shape[0]
        return float(frobenius(self._outer(self._double)[:, :m].mT)) / math.sqrt(PROBES)

    def estimate_from_probes(
        self,
        C: Tensor,
        attempt: int,
        tol: float,
        scales: tuple[Tensor, ...] = (),
        bounds: tuple[float, float] = FAR_SCALES,
    ) -> ErrorEstimate:
        """The error of ``C`` (M, N); what fails in float32 by no more than its own noise is judged again in float64.

        ``scales``: of lines that nobody has looked at; where one is out of ``bounds`` but no zero, ``far`` is set after
        the call, and the error means nothing.
        """
        sure = confidence(attempt)
        if not self._double:
            found = self._judge_single(C, sure, tol, scales, bounds)
            if found.upper <= tol or self.far:
                return found
            inner = self._inner(False)[:, : self.left.given.shape[1]]
            noise = _NOISE * float(self.left.values.norm()) * float(inner.norm()) / math.sqrt(PROBES)
            if math.isfinite(found.relative) and found.relative * self.norm() > noise:
                return found
        m, n = C.shape
        c = C.double()
        claimed = c @ self._vectors()[:, :n].mT.double()  # (M, 16)
        return estimate_from_probes(self._outer(True)[:, :m].mT, claimed, c, sure)

    def _judge_single(
        self, C: Tensor, sure: float, tol: float, scales: tuple[Tensor, ...], bounds: tuple[float, float]
    ) -> ErrorEstimate:
        m, n = C.shape
        w, outer = self._vectors(), self._outer(False)
        if C.is_cuda:
            from cute_kernels.estimate import probes  # its kernels need the CUDA wheels

            if probes.readable(C):
                sums = probes.compare(C, w, outer, scales, bounds)
                self.far = sums.out_of_range > 0
                found = estimate_of(sums, C.numel(), sure, tol)
                if found is not None:
                    return found
        c = C if C.dtype == torch.float32 else C.float()
        with ieee():
            probed = c @ w[:, :n].mT  # (M, 16)
        return estimate_from_probes(outer[:, :m].mT, probed, c, sure)


def estimate_of(sums: Comparison, entries: int, sure: float, tol: float) -> ErrorEstimate | None:
    """The estimate by the sums that a kernel made, at the confidence ``sure``; ``entries``: of the product.

    None where those sums, of float32 squares, may have left their range; not where a scale is ``far``: then it means
    nothing anyway.
    """
    spread = sums.result / entries
    if not (sums.out_of_range or not sums.gram.trace() or 2.0**-90 < spread < 2.0**90):
        return None
    product, claimed, result = (math.sqrt(x) for x in (sums.product, sums.claimed, sums.result))
    return from_sums(sums.gram, 1.0, product, claimed, result, sure, tol)


def _probed(x: Tensor, w: Tensor, tops: tuple[Operand, str] | None = None) -> Tensor:
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
    with ieee():
        y = w[:, : x.shape[1]] @ x.mT.to(w.dtype)  # (16, M)
    return torch.nn.functional.pad(y, (0, -y.shape[1] % _ROOM)) if x.is_cuda else y
