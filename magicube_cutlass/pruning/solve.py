"""Pruning of one weight in V x 1 vectors: scores, the OBS update, and the least-squares refit under a mask."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from magicube_cutlass.checks import check_tensor, check_vector_length, vector_rows
from magicube_cutlass.pruning.batched import solve_errors, solve_groups
from magicube_cutlass.pruning.statistics import InputStatistics

__all__ = ["METHODS", "Method", "obs", "refit", "vector_scores"]

Method = Literal["magnitude", "wanda", "obs"]
METHODS = ("magnitude", "wanda", "obs")


def _is_batched(weight: Tensor) -> bool:
    """Whether the systems of all vector rows are solved together: a GPU would wait for the launches of a loop."""
    return weight.is_cuda


def _split(values: Tensor, vector_length: int) -> Tensor:
    """Rows by vector row, the last one filled up with zeros: (M, K) -> (ceil(M / V), V, K)."""
    m, k = values.shape
    rows = vector_rows(m, vector_length)
    return torch.nn.functional.pad(values, (0, 0, 0, rows * vector_length - m)).view(rows, vector_length, k)


def _grouped(values: Tensor, vector_length: int) -> Tensor:
    """Sum over the V rows of each vector row: (M, K) -> (ceil(M / V), K)."""
    return _split(values, vector_length).sum(1)


def _expanded(mask: Tensor, m: int, vector_length: int) -> Tensor:
    return mask.repeat_interleave(vector_length, 0)[:m]


def _weighted(squares: Tensor, row_weights: Tensor | None) -> Tensor:
    return squares if row_weights is None else squares * row_weights.to(squares)[:, None]


def keep_largest(scores: Tensor, sparsity: float) -> Tensor:
    """Mask of the ``round((1 - sparsity) * n)`` largest scores, the lower index first among equal ones."""
    mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    order = torch.sort(scores.flatten(), descending=True, stable=True).indices
    mask[order[: round((1 - sparsity) * scores.numel())]] = True
    return mask.view_as(scores)


def damped(gram: Tensor, damp: float) -> Tensor:
    """``gram + damp * mean(diag(gram)) * I``; features that are always 0 get the mean."""
    out = gram.clone()
    diagonal = out.diagonal()
    mean = diagonal.mean().clamp_min(torch.finfo(gram.dtype).tiny)
    diagonal += damp * mean + (diagonal == 0) * mean
    return out


def inverse(gram: Tensor, damp: float) -> Tensor:
    """Inverse of the damped matrix by its Cholesky factor."""
    return torch.cholesky_inverse(torch.linalg.cholesky(damped(gram, damp)))


def vector_scores(
    weight: Tensor,
    method: Method,
    vector_length: int,
    gram: Tensor | None = None,
    *,
    row_weights: Tensor | None = None,
    damp: float = 0.01,
) -> Tensor:
    """Return the score of each V x 1 vector of a weight; vectors with low scores are to be dropped.

    Sums over the V rows of a vector: magnitude ``w^2``; Wanda ``w^2 E[x_k^2]`` [1]_; OBS ``w^2 / [H^-1]_kk``, the
    increase of the output error if the vector is dropped and the rest is updated [2]_.

    Parameters
    ----------
    weight : Tensor, shape (M, K)
    method : {"magnitude", "wanda", "obs"}
    vector_length : int
        V.
    gram : Tensor, shape (K, K), optional
        ``H = E[x x^T]`` of the input; needed unless the method is magnitude.
    row_weights : Tensor, shape (M,), optional
        Weight of the error of each output, see ``row_sensitivity``. Default: 1.
    damp : float, default 0.01
        Share of the mean of H's diagonal that is added to it.

    Returns
    -------
    Tensor, shape (ceil(M / V), K)
        float64.

    Raises
    ------
    ValueError
        For an unknown method, or without `gram` where it is needed.

    References
    ----------
    .. [1] Sun, Liu, Bair, Kolter, arXiv 2306.11695, equation 1, squared and summed.
    .. [2] Hassibi, Stork, NIPS 1992; Frantar, Alistarh, arXiv 2301.00774, section 3.

    Examples
    --------
    >>> import torch
    >>> from magicube_cutlass.pruning import vector_scores
    >>> vector_scores(torch.tensor([[1.0, 2.0], [1.0, 0.0]]), "magnitude", 2).tolist()
    [[2.0, 4.0]]
    """
    check_vector_length(vector_length)
    check_tensor("weight", weight, ndim=2)
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    squares = _weighted(weight.double().square(), row_weights)
    if method != "magnitude":
        if gram is None:
            raise ValueError(f"method={method!r} must have the gram matrix of the input, got None")
        seen = gram.diagonal() != 0  # a feature that is always 0 counts nothing
        squares = squares * (gram.diagonal() if method == "wanda" else seen / inverse(gram, damp).diagonal())
    return _grouped(squares, vector_length)


def obs(
    weight: Tensor,
    gram: Tensor,
    sparsity: float,
    vector_length: int,
    *,
    row_weights: Tensor | None = None,
    damp: float = 0.01,
    block: int = 128,
) -> tuple[Tensor, Tensor]:
    """Drop V x 1 vectors one column after another, and let the columns to the right make up for each.

    With ``U^T U = H^-1``, U upper triangular: in each block of columns the vectors of lowest ``sum w_k^2 / U_kk^2`` are
    dropped; dropping ``w_k`` adds ``-w_k / U_kk * U[k, j]`` to ``w_j`` for each j > k. Implements SparseGPT [1]_ for
    vectors.

    Parameters
    ----------
    weight : Tensor, shape (M, K)
    gram : Tensor, shape (K, K)
        ``H = E[x x^T]`` of the input.
    sparsity : float
        Share of vectors to drop in each block of columns.
    vector_length : int
        V.
    row_weights : Tensor, shape (M,), optional
        Weight of the error of each output in the selection of the vectors. Default: 1.
    damp : float, default 0.01
        Share of the mean of H's diagonal that is added to it.
    block : int, default 128
        Columns whose vectors are selected together.

    Returns
    -------
    weight : Tensor, shape (M, K)
        Of the dtype of `weight`.
    mask : Tensor, shape (ceil(M / V), K)
        bool, the vectors that are left.

    References
    ----------
    .. [1] Frantar, Alistarh, arXiv 2301.00774, algorithm 1.

    Examples
    --------
    >>> import torch
    >>> from magicube_cutlass.pruning import obs
    >>> weight, mask = obs(torch.tensor([[1.0, 4.0]]), torch.tensor([[1.0, 0.5], [0.5, 1.0]]), 0.5, 1, damp=0.0)
    >>> weight.tolist(), mask.tolist()  # the input of the first is half seen in the second
    ([[0.0, 4.5]], [[False, True]])
    """
    check_vector_length(vector_length)
    check_tensor("weight", weight, ndim=2)
    m, k = weight.shape
    out = weight.to(torch.float64).clone()
    upper = torch.linalg.cholesky(inverse(gram.to(torch.float64), damp), upper=True)  # (K, K)
    kept = torch.zeros(vector_rows(m, vector_length), k, dtype=torch.bool, device=weight.device)
    for begin in range(0, k, block):
        end = min(begin + block, k)
        part, small = out[:, begin:end].clone(), upper[begin:end, begin:end]
        seen = gram.diagonal()[begin:end] != 0  # a feature that is always 0 is dropped first
        scores = _grouped(_weighted((part / small.diagonal()).square() * seen, row_weights), vector_length)
        kept[:, begin:end] = keep_largest(scores, sparsity)
        is_kept = _expanded(kept[:, begin:end], m, vector_length)
        if _is_batched(weight):
            errors = solve_errors(_split(part, vector_length), small, ~kept[:, begin:end]).flatten(0, 1)[:m]
            part -= errors @ small
        else:
            errors = torch.zeros_like(part)
            for i in range(end - begin):
                error = part[:, i] * ~is_kept[:, i] / small[i, i]
                part[:, i:] -= error[:, None] * small[i, i:]
                errors[:, i] = error
        out[:, begin:end] = part * is_kept
        out[:, end:] -= errors @ upper[begin:end, end:]
    return out.to(weight.dtype), kept


def refit(
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    statistics: InputStatistics,
    vector_length: int,
    *,
    damp: float = 0.01,
) -> tuple[Tensor, Tensor | None]:
    """Return the kept weights and the bias that best give the dense layer's output from the pruned model's input.

    Minimizes ``E |W x_dense + b - W' x - b'|^2 + d |W' - W|^2`` over ``b'`` and the entries of ``W'`` under the mask,
    with ``d = damp * mean(diag(C))`` and C the covariance of x: for each vector row, which has one set of columns S,
    ``W'[:, S] = (W cov(x_dense, x) + d W)[:, S] (C[S, S] + d I)^-1``, and ``b' = b + W E[x_dense] - W' E[x]``. A layer
    without a bias takes the moments about 0 in place of covariances.

    Parameters
    ----------
    weight : Tensor, shape (M, K)
        Dense.
    bias : Tensor, shape (M,), or None
    mask : Tensor, shape (ceil(M / V), K)
        bool, the vectors that are kept.
    statistics : InputStatistics
        Of K features.
    vector_length : int
        V.
    damp : float, default 0.01
        Pull towards `weight`; 0 for plain least squares.

    Returns
    -------
    weight : Tensor, shape (M, K)
        Zero outside of the mask.
    bias : Tensor, shape (M,), or None

    Examples
    --------
    >>> import torch
    >>> from magicube_cutlass.pruning import InputStatistics, refit
    >>> found = InputStatistics(2)
    >>> found.add(torch.tensor([[1.0, 1.0], [3.0, 3.0]]))  # both features are the same
    >>> refit(torch.tensor([[1.0, 2.0]]), torch.zeros(1), torch.tensor([[True, False]]), found, 1, damp=0.0)
    (tensor([[3., 0.]]), tensor([0.]))
    """
    dense = weight.to(torch.float64)
    gram, cross, mean, dense_mean = statistics.gram, statistics.cross, statistics.mean, statistics.dense_mean
    if bias is not None:
        gram, cross = gram - torch.outer(mean, mean), cross - torch.outer(dense_mean, mean)
    ridge = damp * gram.diagonal().mean()
    targets = dense @ cross + ridge * dense  # (M, K)
    gram = gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    out, left = torch.zeros_like(dense), [*range(mask.shape[0])]
    if _is_batched(weight):
        found, failed = solve_groups(gram, _split(targets, vector_length), mask)
        out, left = found.flatten(0, 1)[: len(dense)], failed.nonzero()[:, 0].tolist()
    for group in left:
        columns = mask[group].nonzero()[:, 0]
        rows = slice(group * vector_length, (group + 1) * vector_length)
        if len(columns):
            out[rows, columns] = _solved(gram[columns][:, columns], targets[rows][:, columns])
    if bias is None:
        return out.to(weight.dtype), None
    return out.to(weight.dtype), (bias.to(torch.float64) + dense @ dense_mean - out @ mean).to(bias.dtype)


def _solved(gram: Tensor, targets: Tensor) -> Tensor:
    """X of ``X gram = targets``; the smallest one if `gram` is singular."""
    factor, failed = torch.linalg.cholesky_ex(gram)
    if not int(failed):
        return torch.cholesky_solve(targets.T, factor).T
    return (torch.linalg.pinv(gram, hermitian=True, rtol=1e-10) @ targets.T).T
