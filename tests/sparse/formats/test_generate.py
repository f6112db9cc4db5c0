"""Pruning and random patterns: exact counts, determinism, and which vectors win."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicube_cutlass.checks import VECTOR_LENGTHS
from magicube_cutlass.formats.generate import prune, random_pattern
from magicube_cutlass.formats.pattern import Pattern

SIZES = st.integers(0, 40)
SPARSITIES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.98, 1.0])
METHODS: tuple[Literal["magnitude", "random"], ...] = ("magnitude", "random")
DISTRIBUTIONS: tuple[Literal["uniform", "skewed", "fixed"], ...] = ("uniform", "skewed", "fixed")


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=50)
@given(m=SIZES, k=SIZES, sparsity=SPARSITIES, vector_length=st.sampled_from(VECTOR_LENGTHS))
def test_pruning_keeps_the_rounded_number_of_vectors(
    method: Literal["magnitude", "random"], m: int, k: int, sparsity: float, vector_length: int
) -> None:
    mask = prune(torch.ones(m, k), sparsity, vector_length, method)
    pattern = Pattern.from_dense(mask, vector_length)
    assert pattern.vectors == round((1 - sparsity) * -(-m // vector_length) * k)
    assert torch.equal(pattern.to_dense(), mask)


def test_magnitude_keeps_the_vectors_of_largest_norm() -> None:
    weight = torch.tensor([[3.0, 0.0, 1.0], [0.0, 2.9, 1.0], [9.0, 0.0, -9.0]])
    assert prune(weight, 0.5, 2).tolist() == [[True, False, False], [True, False, False], [True, False, True]]


@pytest.mark.parametrize("factor", [1e-36, 1e36])
def test_magnitude_does_not_depend_on_the_scale_of_the_weight(factor: float) -> None:
    weight = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(prune(weight * factor, 0.7, 8), prune(weight.double() * factor, 0.7, 8))


def test_of_equal_vectors_the_first_are_stored() -> None:
    mask = prune(torch.ones(2, 5000), 0.5, 1)  # large enough for a sort that is not stable to show it
    assert bool(mask[0].all()) and not bool(mask[1].any())


def test_integers_can_be_pruned() -> None:
    assert prune(torch.tensor([[1, -128]], dtype=torch.int8), 0.5, 1).tolist() == [[False, True]]


def test_random_pruning_follows_its_seed() -> None:
    weight = torch.ones(64, 64)
    first = prune(weight, 0.5, 8, "random", seed=1)
    assert torch.equal(first, prune(weight * 2, 0.5, 8, "random", seed=1))
    assert not torch.equal(first, prune(weight, 0.5, 8, "random", seed=2))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@settings(max_examples=40)
@given(m=SIZES, k=SIZES, sparsity=SPARSITIES, vector_length=st.sampled_from(VECTOR_LENGTHS))
def test_random_pattern_is_well_formed_with_the_right_count(
    distribution: Literal["uniform", "skewed", "fixed"], m: int, k: int, sparsity: float, vector_length: int
) -> None:
    pattern = random_pattern(m, k, sparsity, vector_length, distribution)
    pattern.check_format(full=True)
    assert pattern.shape == (m, k)
    total = (1 - sparsity) * (pattern.vector_rows * k)  # in this order: another rounds ties apart
    if distribution == "uniform":
        assert pattern.vectors == round(total)
    elif distribution == "skewed":
        assert abs(pattern.vectors - total) <= 1
    else:
        assert set(pattern.row_lengths.tolist()) <= {round((1 - sparsity) * k)}


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_skewed_rows_differ_about_five_times_in_length(sparsity: float) -> None:
    lengths = random_pattern(800, 1000, sparsity, 8, "skewed").row_lengths
    assert 4.5 < int(lengths.max()) / int(lengths.min()) < 5.5
    assert not torch.equal(lengths, lengths.sort().values)


def test_skewed_rows_never_exceed_the_matrix_at_high_density() -> None:
    pattern = random_pattern(80, 10, 0.2, 8, "skewed")
    assert int(pattern.row_lengths.max()) == 10 and pattern.vectors == 80


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_random_pattern_follows_its_seed(distribution: Literal["uniform", "skewed", "fixed"]) -> None:
    first = random_pattern(64, 64, 0.5, 8, distribution, seed=1)
    assert first.equals(random_pattern(64, 64, 0.5, 8, distribution, seed=1))
    assert not first.equals(random_pattern(64, 64, 0.5, 8, distribution, seed=2))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_column_is_used_about_equally(distribution: Literal["uniform", "skewed", "fixed"]) -> None:
    pattern = random_pattern(8000, 20, 0.5, 8, distribution)
    counts = torch.bincount(pattern.col_indices, minlength=20)
    assert int(counts.min()) > 420 and int(counts.max()) < 580  # 500 expected, 5 standard deviations are 80
