"""Masks by pruning, and random patterns for tests and benchmarks."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cute_kernels.integers import is_integer
from magicube_cutlass.checks import check_shape, check_tensor, check_vector_length, vector_rows
from magicube_cutlass.formats.pattern import Pattern

__all__ = ["SKEW", "prune", "random_pattern"]

SKEW = 5  # longest over shortest vector row of a skewed pattern


def prune(
    weight: Tensor,
    sparsity: float,
    vector_length: int,
    method: Literal["magnitude", "random"] = "magnitude",
    seed: int = 0,
) -> Tensor:
    """Return the mask that keeps the largest vectors of a weight.

    Keeps ``round((1 - sparsity) * vectors)`` of the V x 1 vectors.

    Parameters
    ----------
    weight : Tensor, shape (M, K)
        Float or integer.
    sparsity : float
        Share of vectors to drop, in [0, 1].
    vector_length : int
        V: 1, 2, 4, 8, 16 or 32.
    method : {"magnitude", "random"}, default "magnitude"
        Largest l2 norm, the lower index first among equal ones; or a random set that depends on `seed` alone.
    seed : int, default 0
        Seed of ``"random"``.

    Returns
    -------
    Tensor, shape (M, K)
        bool, on the device of `weight`.

    Raises
    ------
    TypeError
        If `weight` is neither float nor integer.
    ValueError
        For a sparsity outside [0, 1], an unknown method or a non-finite weight.

    Examples
    --------
    >>> import torch, magicube_cutlass as mc
    >>> mc.prune(torch.tensor([[1.0, 5.0], [2.0, 0.0]]), sparsity=0.5, vector_length=2).tolist()
    [[False, True], [False, True]]
    """
    check_vector_length(vector_length)
    check_tensor("weight", weight, ndim=2)
    if not (weight.is_floating_point() or is_integer(weight.dtype)):
        raise TypeError(f"weight must be float or integer, got {weight.dtype}")
    m, k = weight.shape
    rows = vector_rows(m, vector_length)
    stored = _num_stored(sparsity, rows * k)
    if method == "magnitude":
        # float64: squares of float32 values neither overflow nor vanish
        energy = torch.nn.functional.pad(weight.double().square(), (0, 0, 0, rows * vector_length - m))
        energy = energy.view(rows, vector_length, k).sum(1).flatten()
        if not bool(energy.isfinite().all()):
            raise ValueError("weight must be finite, got inf or nan (or values whose squares overflow float64)")
        order = torch.sort(energy, descending=True, stable=True).indices
    elif method == "random":
        order = torch.randperm(rows * k, generator=torch.Generator().manual_seed(seed), device="cpu").to(weight.device)
    else:
        raise ValueError(f"method must be 'magnitude' or 'random', got {method!r}")
    mask = torch.zeros(rows * k, dtype=torch.bool, device=weight.device)
    mask[order[:stored]] = True
    return mask.view(rows, k).repeat_interleave(vector_length, 0)[:m]


def random_pattern(
    M: int,
    K: int,
    sparsity: float,
    vector_length: int,
    distribution: Literal["uniform", "skewed", "fixed"] = "uniform",
    seed: int = 0,
) -> Pattern:
    """Return a random pattern on the CPU; equal arguments give equal patterns.

    Parameters
    ----------
    M, K : int
        Shape of the matrix.
    sparsity : float
        Share of vectors that are not stored, in [0, 1].
    vector_length : int
        V.
    distribution : {"uniform", "skewed", "fixed"}, default "uniform"
        ``round((1 - sparsity) * vectors)`` vectors at random places; the same total with the longest vector row about 5
        times the shortest if K allows it; or the same count in each vector row.
    seed : int, default 0
        Seed.

    Returns
    -------
    Pattern, shape (M, K)

    Raises
    ------
    ValueError
        For a sparsity outside [0, 1] or an unknown distribution.

    Examples
    --------
    >>> import magicube_cutlass as mc
    >>> mc.random_pattern(64, 64, sparsity=0.9, vector_length=8).vectors
    51
    """
    check_vector_length(vector_length)
    m, k = check_shape((M, K))
    rows = vector_rows(m, vector_length)
    generator = torch.Generator().manual_seed(seed)
    stored = _num_stored(sparsity, rows * k)
    if distribution == "uniform":
        mask = torch.zeros(rows * k, dtype=torch.bool, device="cpu")
        mask[torch.randperm(rows * k, generator=generator, device="cpu")[:stored]] = True
        return Pattern.from_vector_mask(mask.view(rows, k), m, vector_length)
    if distribution == "skewed":
        lengths = _skewed_lengths(rows, k, (1 - sparsity) * k)[torch.randperm(rows, generator=generator, device="cpu")]
    elif distribution == "fixed":
        lengths = torch.full((rows,), _num_stored(sparsity, k), device="cpu")
    else:
        raise ValueError(f"distribution must be 'uniform', 'skewed' or 'fixed', got {distribution!r}")
    order = torch.rand(rows, k, generator=generator, device="cpu").argsort(1)
    mask = torch.zeros(rows, k, dtype=torch.bool, device="cpu").scatter_(
        1, order, torch.arange(k, device="cpu") < lengths[:, None]
    )
    return Pattern.from_vector_mask(mask, m, vector_length)


def _num_stored(sparsity: float, total: int) -> int:
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity must lie in [0, 1], got {sparsity!r}")
    return round((1 - sparsity) * total)


def _skewed_lengths(rows: int, k: int, mean: float) -> Tensor:
    """Row lengths on a line from ``mean / 3`` to ``5 mean / 3``, less steep if that would exceed `k`."""
    longest = min(mean * 2 * SKEW / (SKEW + 1), k)
    line = (
        torch.linspace(2 * mean - longest, longest, rows, dtype=torch.float64, device="cpu")
        if rows > 1
        else torch.tensor([mean], device="cpu")
    )
    # rounding the running sum, not each length, keeps the total
    ends = torch.floor(line[:rows].double().cumsum(0) + 0.5)
    return ends.diff(prepend=ends.new_zeros(1)).clamp(0, k).to(torch.int64)
