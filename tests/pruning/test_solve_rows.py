"""Pruning of one weight: the refit against ``lstsq``, OBS against a literal one, masks of whole vectors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from magicube_cutlass.pruning import InputStatistics, batched, obs, refit, solve, vector_scores
from magicube_cutlass.pruning.solve import keep_largest


def _data(k: int, tokens: int = 400) -> tuple[Tensor, Tensor]:
    """Correlated inputs with a mean, of the dense and of the pruned model, float64 (tokens, K)."""
    mixed = torch.randn(tokens, k, dtype=torch.float64) @ torch.randn(k, k, dtype=torch.float64) / k**0.5
    dense = mixed + torch.randn(k, dtype=torch.float64)
    return dense, dense + 0.3 * torch.randn(tokens, k, dtype=torch.float64)


def _statistics(dense: Tensor, pruned: Tensor) -> InputStatistics:
    found = InputStatistics(dense.shape[1])
    for at in (slice(0, 37), slice(37, None)):  # batches of other sizes
        found.add(pruned[at], dense[at])
    return found


def _mask(m: int, k: int, v: int) -> Tensor:
    """Random vectors; the first vector row keeps none, the second all."""
    mask = torch.rand(-(-m // v), k) < 0.4
    mask[0], mask[1] = False, True
    return mask


@pytest.mark.parametrize("v", [1, 4, 8])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_refit_is_the_least_squares_solution(v: int, has_bias: bool) -> None:
    m, k = 3 * v + (v > 1), 24  # the last vector row is cut
    dense, pruned = _data(k)
    weight, bias = torch.randn(m, k, dtype=torch.float64), torch.randn(m, dtype=torch.float64)
    mask = _mask(m, k, v)
    found, shift = refit(weight, bias if has_bias else None, mask, _statistics(dense, pruned), v, damp=0.0)
    goal = dense @ weight.T + (bias if has_bias else 0)  # (tokens, M)
    ones = torch.ones(len(pruned), 1, dtype=torch.float64)
    for row in range(m):
        columns = mask[row // v].nonzero()[:, 0]
        inputs = torch.cat([pruned[:, columns], ones], 1) if has_bias else pruned[:, columns]
        want = torch.linalg.lstsq(inputs, goal[:, row : row + 1]).solution[:, 0]
        torch.testing.assert_close(found[row, columns], want[: len(columns)], rtol=1e-8, atol=1e-8)
        if has_bias:
            assert shift is not None
            torch.testing.assert_close(shift[row], want[-1], rtol=1e-8, atol=1e-8)
    assert bool((found[~mask.repeat_interleave(v, 0)[:m]] == 0).all())
    assert (shift is None) != has_bias


@pytest.mark.parametrize("v", [1, 8])
@pytest.mark.parametrize("systems", [1, 3, 1000])
def test_all_vector_rows_at_once_give_what_a_loop_gives(v: int, systems: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU runs; `systems` of the largest size are solved together."""
    m, k = 9 * v + (v > 1), 40  # the last vector row is cut
    dense, pruned = _data(k)
    dense[:, 3] = pruned[:, 3] = 0
    statistics, weight = _statistics(dense, pruned), torch.randn(m, k, dtype=torch.float64)
    mask = _mask(m, k, v)
    monkeypatch.setattr(batched, "_BYTES", 8 * k**2 * systems)
    found = []
    for is_batched in (False, True):
        monkeypatch.setattr(solve, "_is_batched", lambda _, way=is_batched: way)
        for damp in (0.01, 0.0):  # without damping the feature that is always 0 makes a matrix singular
            found.append([refit(weight, torch.ones(m), mask, statistics, v, damp=damp)[0]])
        found[-1] += obs(weight, statistics.gram, 0.5, v, block=16)
    for got, want in zip(found[2:], found[:2], strict=True):
        for own, other in zip(got, want, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-7, atol=1e-9)


def test_damping_pulls_towards_the_dense_weight() -> None:
    dense, pruned = _data(16)
    weight, mask = torch.randn(8, 16, dtype=torch.float64), torch.ones(1, 16, dtype=torch.bool)
    found, _ = refit(weight, torch.zeros(8), mask, _statistics(dense, pruned), 8, damp=1e9)
    torch.testing.assert_close(found, weight, rtol=1e-6, atol=1e-6)


def test_a_feature_that_is_always_zero_is_no_trouble() -> None:
    dense, pruned = _data(16)
    dense[:, 3] = pruned[:, 3] = 0
    found = _statistics(dense, pruned)
    weight = torch.randn(8, 16, dtype=torch.float64)
    new, bias = refit(weight, torch.zeros(8), torch.ones(1, 16, dtype=torch.bool), found, 8, damp=0.0)
    updated, mask = obs(weight, found.gram, 0.5, 8, damp=0.0)
    assert bool(new.isfinite().all()) and bool(updated.isfinite().all()) and bias is not None
    assert int(mask.sum()) == 8 and not mask[0, 3]


def _literal_obs(weight: Tensor, gram: Tensor, sparsity: float, v: int, block: int) -> tuple[Tensor, Tensor]:
    """Algorithm 1 by elimination: the inverse of the Hessian of the columns that are left, one column at a time."""
    weight, (m, k) = weight.clone(), weight.shape
    mask = torch.zeros(m // v, k, dtype=torch.bool)
    for begin in range(0, k, block):
        end = min(begin + block, k)
        # [H^-1]_kk after the columns before k are eliminated
        diagonal = torch.stack([torch.linalg.inv(gram[i:, i:])[0, 0] for i in range(begin, end)])
        scores = torch.zeros(m // v, end - begin, dtype=torch.float64)
        for row in range(m):
            for i in range(begin, end):
                scores[row // v, i - begin] += weight[row, i] ** 2 / diagonal[i - begin]
        mask[:, begin:end] = keep_largest(scores, sparsity)
        for i in range(begin, end):
            inverse = torch.linalg.inv(gram[i:, i:])
            for row in range(m):
                if not mask[row // v, i]:
                    weight[row, i:] -= weight[row, i] / inverse[0, 0] * inverse[0]
                    weight[row, i] = 0
    return weight, mask


@pytest.mark.parametrize("v", [1, 4])
def test_obs_is_the_literal_algorithm(v: int) -> None:
    dense, _ = _data(20)
    gram, weight = dense.T @ dense / len(dense), torch.randn(8, 20, dtype=torch.float64)
    found, mask = obs(weight, gram, 0.5, v, damp=0.0, block=8)  # the last block is cut
    want, kept = _literal_obs(weight, gram, 0.5, v, 8)
    assert torch.equal(mask, kept)
    torch.testing.assert_close(found, want, rtol=1e-7, atol=1e-9)


def test_obs_loses_less_than_dropping() -> None:
    dense, _ = _data(64)
    gram, weight = dense.T @ dense / len(dense), torch.randn(32, 64, dtype=torch.float64)
    found, mask = obs(weight, gram, 0.5, 8)
    dropped = weight * mask.repeat_interleave(8, 0)
    losses = [float((((new - weight) @ gram) * (new - weight)).sum()) for new in (found, dropped)]
    assert losses[0] < 0.7 * losses[1]


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.9, 1.0])
def test_scores_keep_whole_vectors_and_their_number(sparsity: float) -> None:
    dense, _ = _data(40)
    gram, weight = dense.T @ dense / len(dense), torch.randn(20, 40)
    for method in ("magnitude", "wanda", "obs"):
        mask = keep_largest(vector_scores(weight, method, 8, gram), sparsity)
        assert mask.shape == (3, 40) and int(mask.sum()) == round((1 - sparsity) * 120)
    new, mask = obs(weight, gram, sparsity, 8)
    assert torch.equal(new != 0, mask.repeat_interleave(8, 0)[:20]) and new.dtype == weight.dtype


def test_magnitude_is_the_mask_of_prune() -> None:
    weight = torch.randn(20, 40)
    mask = keep_largest(vector_scores(weight, "magnitude", 8), 0.6).repeat_interleave(8, 0)[:20]
    assert torch.equal(mask, mc.prune(weight, 0.6, 8))


def test_wanda_counts_the_input_and_obs_what_others_know() -> None:
    weight = torch.ones(1, 3)
    gram = torch.diag(torch.tensor([1.0, 4.0, 1.0], dtype=torch.float64))
    assert vector_scores(weight, "wanda", 1, gram).tolist() == [[1.0, 4.0, 1.0]]
    gram[0, 2] = gram[2, 0] = 0.9
    scores = vector_scores(weight, "obs", 1, gram, damp=0.0)[0]
    torch.testing.assert_close(scores, torch.tensor([1 - 0.81, 4.0, 1 - 0.81], dtype=torch.float64))


def test_rows_that_count_more_keep_more() -> None:
    dense, _ = _data(32)
    gram, weight = dense.T @ dense / len(dense), torch.randn(16, 32, dtype=torch.float64)
    rows = torch.cat([torch.full((8,), 100.0), torch.ones(8)])
    for method in ("magnitude", "wanda", "obs"):
        plain, weighted = (vector_scores(weight, method, 8, gram, row_weights=each) for each in (None, rows))
        torch.testing.assert_close(weighted, plain * torch.tensor([[100.0], [1.0]], dtype=torch.float64))
    _, mask = obs(weight, gram, 0.5, 8, row_weights=rows)
    assert int(mask[0].sum()) > int(mask[1].sum()) and int(mask.sum()) == 32


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="method must be one of"):
        vector_scores(torch.ones(1, 1), "random", 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gram matrix"):
        vector_scores(torch.ones(1, 1), "wanda", 1)
    with pytest.raises(ValueError, match="at least one token"):
        _ = InputStatistics(2).gram
    with pytest.raises(ValueError, match=r"x_dense must have shape \(2, 2\)"):
        InputStatistics(2).add(torch.ones(2, 2), torch.ones(3, 2))
