"""The systems of ``obs`` and ``refit`` of all vector rows at once; smaller ones are filled up with the identity."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["solve_errors", "solve_groups"]

_BYTES = 2**28  # of the systems that are solved together


def _parts(count: int, size: int) -> Iterator[slice]:
    """Slices of `count` systems of `size` unknowns."""
    step = max(1, _BYTES // (8 * max(size, 1) ** 2))
    return (slice(begin, begin + step) for begin in range(0, count, step))


def _filled(matrix: Tensor, used: Tensor) -> Tensor:
    """The matrix (..., n, n), with the rows and columns that are not `used` (G, n) as in the identity: (G, n, n)."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.where(used[:, :, None] & used[:, None, :], matrix, eye)


def solve_errors(values: Tensor, upper: Tensor, dropped: Tensor) -> Tensor:
    """E (G, V, B) that is 0 at kept columns, so that ``values - E upper`` is 0 at the dropped ones.

    `values` (G, V, B) are the weights of a block of columns, `upper` (B, B) is triangular, `dropped` bool (G, B).
    """
    wanted = values * dropped[:, None]
    found = torch.empty_like(values)
    for part in _parts(len(values), upper.shape[-1]):
        systems = _filled(upper, dropped[part])
        found[part] = torch.linalg.solve_triangular(systems, wanted[part], upper=True, left=False)
    return found


def solve_groups(gram: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """X (G, V, K) with ``X[g][:, S] gram[S, S] = targets[g][:, S]``, S the columns of `mask` (G, K), 0 elsewhere.

    The second result, bool (G,): the matrix was not positive definite, and X is not to be used.
    """
    found, failed = torch.zeros_like(targets), torch.zeros(len(mask), dtype=torch.bool, device=mask.device)
    counts, order = mask.sum(1).sort()
    sizes = counts.tolist()
    for part in _parts(len(mask), sizes[-1]):
        groups, n = order[part], sizes[part][-1]
        kept = mask[groups].to(torch.int8)
        columns = kept.sort(dim=1, descending=True, stable=True).indices[:, :n]  # the kept ones come first
        used = torch.arange(n, device=mask.device) < counts[part, None]  # (g, n)
        wide = columns[:, None].expand(-1, targets.shape[1], -1)  # (g, V, n)
        lower, info = torch.linalg.cholesky_ex(_filled(gram[columns[:, :, None], columns[:, None]], used))
        right = targets[groups].gather(2, wide) * used[:, None]
        right = torch.linalg.solve_triangular(lower.mT, right, upper=True, left=False)
        right = torch.linalg.solve_triangular(lower, right, upper=False, left=False)
        found[groups] = found[groups].scatter(2, wide, torch.where(used[:, None], right, 0.0))
        failed[groups] = info != 0
    return found, failed
