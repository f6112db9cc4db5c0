"""The probed error is close to the true one, and its upper bound holds as often as it says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from residual import bound_factor, decompose, estimate_error
from residual.distributed.sums import left_of_inner
from residual.error.estimate import relative_bound
from residual.error.factor import bound_of, share_bound
from residual.error.probes import draw


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def true_error(A: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> float:
    product = A.double() @ B.double()
    return float((product - C.double()).norm() / product.norm())


def test_the_factor_of_sixteen_probes_is_1_66() -> None:
    assert bound_factor(16) == pytest.approx(1.66, abs=0.005)


@pytest.mark.parametrize("probes", [1, 4, 16, 64])
@pytest.mark.parametrize("rank", [1, 3])
def test_the_bound_holds_in_99_of_100_draws(probes: int, rank: int) -> None:
    # An error u v^T with |u| = |v| = 1, ||E w||^2 is (v.w)^2: a chi-square over all probes; rank 3 is a mean of three.
    draws = 200_000
    weights = torch.full((rank,), 1 / rank, dtype=torch.float64)
    squares = torch.zeros(draws, dtype=torch.float64)
    g = generator(probes)
    for _ in range(probes):
        squares += torch.randn(draws, rank, generator=g, dtype=torch.float64).square() @ weights
    held = float((bound_factor(probes) * (squares / probes).sqrt() >= 1).double().mean())
    if rank == 1:
        assert held == pytest.approx(0.99, abs=0.001)  # 4.5 standard deviations of the draw
    else:
        assert held > 0.99


@pytest.mark.parametrize("positive", [False, True])
def test_upper_bounds_a_rank_one_error_of_a_real_product(positive: bool) -> None:
    g = generator(7)
    draw = torch.rand if positive else torch.randn
    A, B = draw(12, 10, generator=g).double(), draw(10, 14, generator=g).double()
    u, v = torch.randn(12, 1, generator=g).double(), torch.randn(1, 14, generator=g).double()
    C = A @ B + 1e-3 * u @ v
    truth = true_error(A, B, C)
    held = sum(estimate_error(A, B, C, generator=g).upper >= truth for _ in range(2000))
    assert held >= 1960  # 99% of 2000 is 1980, and four standard deviations are 18


@settings(max_examples=40)
@given(
    m=st.integers(1, 40),
    k=st.integers(1, 40),
    n=st.integers(1, 40),
    seed=st.integers(0, 2**20),
    bits=st.integers(3, 12),
)
def test_estimate_is_near_the_truth_for_quantized_products(m: int, k: int, n: int, seed: int, bits: int) -> None:
    g = generator(seed)
    A, B = torch.randn(m, k, generator=g), torch.randn(k, n, generator=g)
    C = decompose(A, bits=bits, axis=0).reconstruct(1) @ decompose(B, bits=bits, axis=1).reconstruct(1)
    estimate = estimate_error(A, B, C, probes=256, generator=g)
    truth = true_error(A, B, C)
    # 256 probes: a rank-1 error is within 35% but once in 10^13; a tiny product may have no error at all
    if truth > 0.3:
        return  # the norm of A @ B itself is in doubt; the bound below covers small errors
    assert estimate.relative == pytest.approx(truth, rel=0.6, abs=1e-13)
    assert estimate.relative <= estimate.upper


def test_exact_products_have_no_error() -> None:
    A = torch.randint(-8, 8, (5, 6), generator=generator(1))
    B = torch.randint(-8, 8, (6, 7), generator=generator(2))
    estimate = estimate_error(A, B, A @ B, generator=generator(3))
    assert estimate.relative < 1e-14 and estimate.upper < 1e-13 and estimate.confidence == 0.99


def test_a_product_of_nothing_but_zeros_is_off_by_one_and_has_no_bound() -> None:
    A, B = torch.randn(5, 6, generator=generator(4)), torch.randn(6, 7, generator=generator(5))
    estimate = estimate_error(A, B, torch.zeros(5, 7), generator=generator(6))
    assert estimate.relative == pytest.approx(1) and estimate.upper == math.inf


def test_something_out_of_nothing_is_infinitely_wrong() -> None:
    estimate = estimate_error(torch.zeros(3, 2), torch.zeros(2, 3), torch.ones(3, 3), generator=generator())
    assert estimate.relative == math.inf and estimate.upper == math.inf


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 2, 0)])
def test_empty_products_have_no_error(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    estimate = estimate_error(torch.ones(m, k), torch.ones(k, n), torch.zeros(m, n))
    assert (estimate.relative, estimate.upper) == (0, 0)


def test_the_same_generator_gives_the_same_estimate() -> None:
    A, B = torch.randn(8, 8, generator=generator(8)), torch.randn(8, 8, generator=generator(9))
    C = (A @ B).half()
    assert estimate_error(A, B, C, generator=generator(1)) == estimate_error(A, B, C, generator=generator(1))


ONES = torch.ones(3, 3)


@pytest.mark.parametrize(
    ("kind", "message", "operands", "probes"),
    [
        (ValueError, r"B must have 3 rows to match A of shape \(3, 3\), got 2", (ONES, torch.ones(2, 3), ONES), 16),
        (ValueError, r"C must have shape \(3, 3\), got \(3, 2\)", (ONES, ONES, torch.ones(3, 2)), 16),
        (ValueError, "A must be 2-D, got 1 dimensions", (torch.ones(3), ONES, ONES), 16),
        (ValueError, "B must be finite", (ONES, ONES * float("nan"), ONES), 16),
        (ValueError, "C must be finite", (ONES, ONES, ONES * float("inf")), 16),
        (TypeError, "C must be real", (ONES, ONES, ONES.to(torch.complex64)), 16),
        (TypeError, r"A must be a torch\.Tensor, got int", (3, ONES, ONES), 16),
        (ValueError, "probes must be at least 1, got 0", (ONES, ONES, ONES), 0),
    ],
)
def test_bad_operands_are_named(
    kind: type[Exception], message: str, operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor], probes: int
) -> None:
    with pytest.raises(kind, match=message):
        estimate_error(*operands, probes=probes)


def test_a_confidence_outside_one_half_to_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"confidence must be in \(0\.5, 1\), got 1"):
        bound_factor(16, 1.0)


@pytest.mark.parametrize("size", [1, 2, 16, 64])
@pytest.mark.parametrize("rank", [1, 3, 400])
def test_the_largest_eigenvalues_bound_is_above_it_and_near(size: int, rank: int) -> None:
    for seed in range(50):
        y = torch.randn(rank, size, dtype=torch.float64, generator=generator(seed))
        gram = (y.mT @ y) / y.square().sum()
        exact = float(torch.linalg.eigvalsh(gram)[-1])
        found = share_bound(gram.numpy())
        assert exact * (1 - 1e-12) <= found <= 1 and found <= exact * size ** (1 / 32) + 1e-11


def test_a_bound_counts_the_rounding_of_its_probes() -> None:
    y = torch.randn(400, 16, dtype=torch.float64, generator=generator(1))
    gram = (y.mT @ y).numpy()
    norm = float(y.norm())
    error, exact = bound_of(gram, 0.0, 0.99)
    assert error == pytest.approx(norm / 4) and 1.2 * error < exact < 1.4 * error
    for part in (1e-6, 1e-2, 0.5, 1.0, 30.0):
        _, bound = bound_of(gram, part * norm, 0.99)
        assert exact + part * error * 1.2 < bound <= bound_factor(16, 0.995) * (1 + part) * error * (1 + 1e-9)
    assert bound_of(0 * gram, 0.0, 0.99) == (0.0, 0.0)
    assert bound_of(0 * gram, 1.0, 0.99)[1] == pytest.approx(bound_factor(16, 0.995) / 4)
    assert bound_of(gram * math.nan, 1.0, 0.99) == bound_of(gram * math.inf, 1.0, 0.99) == (math.inf, math.inf)


@pytest.mark.parametrize("probes", [1, 7, 16])
def test_probes_show_the_whole_error_of_one_column(probes: int) -> None:
    for seed in range(20):
        A, B = (torch.randn(*shape, generator=generator(seed)).double() for shape in ((50, 300), (300, 1)))
        truth = A @ B
        C = truth + 10.0 ** -(seed % 9 + 1) * torch.randn(50, 1, generator=generator(seed + 99))
        found, true = estimate_error(A, B, C, probes, seed=seed), float((C - truth).norm() / truth.norm())
        assert found.relative == pytest.approx(true, rel=1e-4)
        assert true <= found.upper <= true * (1 + 3 * true) + 1e-12


def test_a_bound_is_relative_to_the_product() -> None:
    assert relative_bound(1.0, 101.0) == 0.01 and relative_bound(0.0, 0.0) == 0.0
    assert relative_bound(1.0, 1.0) == relative_bound(1.0, 0.0) == math.inf


def test_terms_that_the_probes_absorb_count_as_error() -> None:
    """The product and float64 probes lose the same terms, so that their difference is zero."""
    for middle in (2.0**-30, 2.0**-60, 1e-30):
        A, B = torch.tensor([[1.0, middle, -1.0]]).double(), torch.ones(3, 1).double()
        for seed in range(50):
            found = estimate_error(A, B, torch.zeros(1, 1), seed=seed)
            assert found.upper == math.inf and not found.accepts(0.999)
    found = estimate_error(torch.tensor([[1.0, 2.0**-60, -1.0]]), torch.ones(3, 1), torch.tensor([[2.0**-60]]))
    assert found.upper > 1 and found.is_uncertain(0.5) and found.cancellation < 1e-14


def test_large_integers_are_right_or_uncertain() -> None:
    big = 2**53 + 1
    A, B = torch.tensor([[big, -(2**53)]]), torch.ones(2, 1, dtype=torch.int64)
    for wrong in (0.0, 2.0):
        assert estimate_error(A, B, torch.tensor([[wrong]])).upper > 0.9
    assert estimate_error(A, B * 3, (A @ (B * 3)) * 0 + 3).upper > 0.9  # the right one is out of reach too
    one = torch.tensor([[big]])
    found = estimate_error(one, torch.ones(1, 1, dtype=torch.int64), one)
    assert 0 < found.upper < 1e-14
    assert estimate_error(one.to(torch.uint64), torch.ones(1, 1, dtype=torch.int64), one) == found


def test_rows_of_zeros_are_told_from_rows_of_small_numbers() -> None:
    A, B = (torch.randn(*shape, generator=generator()) for shape in ((6, 5), (5, 4)))
    A[1], A[2, :4], A[3], B[4] = 0, 0, 1e-45, 0  # row 2 meets zeros of B only
    found = left_of_inner(A, B, draw(4, torch.device("cpu"), 0))
    assert found[:, -1].tolist() == [1, 0, 0, 1, 1, 1]
    tiny = left_of_inner(A.double() * 1e-200, B.double() * 1e-200, draw(4, torch.device("cpu"), 0))
    assert not tiny[:, -2].any() and tiny[:, -1].tolist() == [1, 0, 0, 1, 1, 1]
