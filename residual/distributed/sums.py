"""The check of a product whose parts lie on ranks: sums of probes, reduced to the same numbers everywhere.

Rows of C on ranks: ``E W`` is stacked, so Gram matrices add. Columns: with a part of the probes' rows per rank, the
errors are the blocks of ``diag(E_1, .., E_n)``, whose norm is that of E and whose Gram matrices add as well. Parts of
the sum over K: ``A_r (B_r W)`` is reduced to rows, and rows are judged.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from magicube_cutlass.distributed.collectives import all_reduce
from residual.error.estimate import ErrorEstimate, from_sums
from residual.error.probes import (
    UNIT,
    Probes,
    ProbeSums,
    gamma,
    is_zero,
    judge,
    probe_right,
    row_sums,
    steps,
    underflow,
)

_SLACK = 1.01  # covers the rounding of the bounds themselves


class ProductSize(NamedTuple):
    """Of the whole product, and of what a rank sums over."""

    m: int
    k: int
    n: int


def of_own_part(A: Tensor, B: Tensor, C: Tensor, probes: Probes) -> Tensor:
    """Return the sums of a part that this rank computed alone, float64 (p * p + 6,).

    Parameters
    ----------
    A, B, C : Tensor, shapes (M_r, K), (K, N_r), (M_r, N_r)
        Finite; C is the product under test.
    probes : Probes
        N_r probes.
    """
    size = probes.vectors.shape[1] ** 2
    if not C.numel():
        return torch.zeros(size + 6, dtype=torch.float64, device=A.device)
    vectors, bound = probe_right(B, *probes)
    sums = judge(A, vectors, bound, C, *probes)
    return packed(sums, sums.inputs > 0 or not is_zero(A, B), A.device)


def packed(sums: ProbeSums, is_some: bool, device: torch.device) -> Tensor:
    """Return sums as one tensor; `is_some`: whether ``|A||B|`` is not zero."""
    rest = [sums.product, sums.claimed, sums.result, sums.inputs, sums.outputs, float(is_some)]
    gram = torch.from_numpy(sums.gram.reshape(-1)).double()
    return torch.cat([gram, torch.tensor(rest, dtype=torch.float64, device="cpu")]).to(device)


def left_of_inner(A: Tensor, B: Tensor, probes: Probes) -> Tensor:
    """Return ``A_r (B_r W)``, ``|A_r| (|B_r| wbar)`` and whether a row of ``|A_r||B_r|`` is not zero, (M, p + 2)."""
    m, p = A.shape[0], probes.vectors.shape[1]
    found = torch.zeros(m, p + 2, dtype=torch.float64, device=A.device)
    if A.numel():
        vectors, bound = probe_right(B, *probes)
        found[:, :p], found[:, p], _ = row_sums(A, vectors, bound)
        found[:, p + 1] = 1.0
        unsure = (found[:, p] == 0).nonzero().flatten()  # zeros, or products below the range of float64
        if unsure.numel():
            used = (B != 0).any(1)  # (K_r,)
            found[unsure, p + 1] = (A[unsure][:, used] != 0).any(1).double()
    return found


def of_rows(left: Tensor, C: Tensor, probes: Probes) -> Tensor:
    """Return the sums of rows of C (M_r, N) by those of :func:`left_of_inner`, completed over ranks."""
    p = probes.vectors.shape[1]
    product, bound = left[:, :p], left[:, p]
    right = row_sums(C, probes.vectors.double(), probes.norms)
    y = product - right.products
    rest = [part.square().sum() for part in (product, right.products, bound, right.bounds)]
    rest.insert(2, right.squares.sum())
    return torch.cat([(y.mT @ y).flatten(), torch.stack([*rest, left[:, p + 1].sum()])])


def verdict(own: Tensor, mesh: DeviceMesh, sizes: ProductSize, extra: int, sure: float) -> ErrorEstimate:
    """Return the error of the whole product: one all-reduce of 2 KB, after which all ranks have the same numbers.

    Parameters
    ----------
    own : Tensor, shape (p * p + 6,)
        Sums of this rank.
    mesh : DeviceMesh
        One dimension.
    sizes : ProductSize
        Of the whole product.
    extra : int
        Roundings that reductions over ranks add to a sum.
    sure : float
        Confidence of the bound.
    """
    numbers = all_reduce(own, "sum", mesh).cpu()
    p = math.isqrt(numbers.numel() - 6)
    product, claimed, result, inputs, outputs, some = numbers[p * p :].tolist()
    sums = ProbeSums(numbers[: p * p].view(p, p).numpy(), product, claimed, result, inputs, outputs)
    rounding = gamma(steps(sizes.k) + steps(sizes.n) + extra) * math.sqrt(max(inputs, 0.0))
    rounding += gamma(steps(sizes.n) + extra) * math.sqrt(max(outputs, 0.0))
    rounding += 2 * UNIT * math.sqrt(max(float(sums.gram.trace()), 0.0))
    eta = 0.0 if not rounding and not some else _SLACK * rounding + underflow(sizes.m)
    return from_sums(sums, eta, sure)
