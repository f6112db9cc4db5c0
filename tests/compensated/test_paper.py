"""The published algorithm with every option, against Algorithm 1 in numpy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from residual import decompose
from residual.paper import thresholds
from residual.paper.gemm import STEPS, PaperReport, gemm
from residual.paper.thresholds import crossover_density, kept_entries
from tests.compensated.paper_algorithm import Options, algorithm_1


def matrix(rows: int, columns: int, seed: int, positive: bool = False, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand if positive else torch.randn
    return draw(rows, columns, generator=generator, dtype=torch.float64).to(dtype)


def error(result: Tensor, A: Tensor, B: Tensor) -> float:
    truth = A.double() @ B.double()
    return float((result.double() - truth).norm() / truth.norm())


def reported(*operands: Tensor, **options: Any) -> tuple[Tensor, PaperReport]:
    found = gemm(*operands, return_report=True, **options)
    assert isinstance(found, tuple)
    return found


@settings(max_examples=150)
@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12)),
    bits=st.integers(3, 8),
    threshold=st.sampled_from([0.0, 1e-3, 0.02, 0.1, 0.3, 1.0]),
    rule=st.sampled_from(["eq14", "example", "mean"]),
    scaling=st.sampled_from(["tensor", "vector"]),
    rounding=st.sampled_from(["trunc", "nearest"]),
    levels=st.sampled_from(["2^(N-1)-1", "2^(N-2)"]),
    eta=st.sampled_from([0.0, 0.5, 1.0]),
    positive=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_every_option_follows_the_formulas(
    *, shape: tuple[int, int, int], threshold: float, rule: str, eta: float, positive: bool, seed: int, **options: Any
) -> None:
    m, k, n = shape
    A, B = matrix(m, k, seed, positive), matrix(k, n, seed + 1, positive)
    result = gemm(A, B, threshold=threshold, rule=rule, eta=eta, **options)
    chosen = Options(threshold=threshold, rule=rule, eta=eta, **options)
    expected = torch.from_numpy(algorithm_1(A.numpy(), B.numpy(), chosen).product)
    assert isinstance(result, Tensor)
    assert torch.allclose(result, expected, rtol=1e-13, atol=1e-13 * float(expected.abs().max()))


@pytest.mark.parametrize("vector_length", [1, 2, 8])
@pytest.mark.parametrize("rule", ["eq14", "mean"])
def test_the_sparse_path_multiplies_the_reduced_matrices(rule: str, vector_length: int) -> None:
    A, B = matrix(37, 50, 1), matrix(50, 43, 2)
    options = {"rule": rule, "threshold": 0.2 if rule == "eq14" else 0.9, "vector_length": vector_length, "eta": 1.0}
    result, report = reported(A, B, **options)
    expected = algorithm_1(A.numpy(), B.numpy(), Options(**options))
    assert (report.path_a, report.path_b) == ("spmm", "spmm") and 0 < report.density_a < 1
    assert (report.density_a, report.density_b) == expected.densities
    assert torch.allclose(result, torch.from_numpy(expected.product), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scaling", ["tensor", "vector"])
def test_the_dense_path_multiplies_the_whole_matrices(scaling: str) -> None:
    A, B = matrix(37, 50, 1, dtype=torch.float32), matrix(50, 43, 2, dtype=torch.float32)
    result, report = reported(A, B, rule="mean", threshold=0.9, eta=0.0, scaling=scaling)
    full = gemm(A, B, threshold=0, eta=0.0, scaling=scaling)
    assert (report.path_a, report.path_b) == ("gemm", "gemm") and 0 < report.density < 1
    assert isinstance(full, Tensor) and torch.equal(result, full)


def test_the_switch_is_at_eta_for_both_operands() -> None:
    A, B = matrix(20, 30, 3), matrix(30, 20, 4)
    _, report = reported(A, B, rule="mean", threshold=0.5, eta=1.0)
    low, high = sorted((report.density_a, report.density_b))
    assert low < high < 1 and report.path_a == "spmm"
    for eta, path in ((low, "gemm"), (high, "gemm"), (high + 1e-9, "spmm")):
        _, found = reported(A, B, rule="mean", threshold=0.5, eta=eta)
        assert (found.path_a, found.path_b, found.eta) == (path, path, eta)


def test_a_reduced_matrix_has_its_own_lambda() -> None:
    # eq14 drops the largest entry, as its row of C is large; the entries that stay count in steps of 1 / 127
    A = torch.tensor([[100.0, 100.0], [1.0, 0.0]], dtype=torch.float64)
    B = torch.tensor([[1.0, 0.3], [1.0, 0.7]], dtype=torch.float64)
    result, report = reported(A, B, threshold=0.99, eta=1.0)
    expected = algorithm_1(A.numpy(), B.numpy(), Options(threshold=0.99))
    assert report.path_a == "spmm" and report.density_a == 0.25
    assert torch.allclose(result, torch.from_numpy(expected.product), rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threshold_zero_is_the_full_compensation_on_either_path(dtype: torch.dtype) -> None:
    A, B = matrix(30, 6000, 5, True, dtype), matrix(6000, 25, 6, True, dtype)  # sums of more than 24 bits
    A[0, 0] = B[0, 0] = 0  # a density of 1 is never below eta
    (dense, one), (sparse, other) = (reported(A, B, eta=eta) for eta in (0.0, 1.0))
    assert (one.path_a, other.path_a) == ("gemm", "spmm")
    assert torch.allclose(dense, sparse, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_threshold_infinity_is_the_plain_quantized_product() -> None:
    A, B = matrix(9, 20, 7, dtype=torch.float32), matrix(20, 11, 8, dtype=torch.float32)
    result, report = reported(A, B, threshold=math.inf, rule="example")
    plain = decompose(A, rounding="trunc").reconstruct(1) @ decompose(B, rounding="trunc").reconstruct(1)
    assert (report.path_a, report.path_b, report.density) == ("none", "none", 0)
    assert torch.allclose(result.double(), plain, rtol=1e-6, atol=1e-6)


def test_more_is_kept_and_less_is_wrong_as_the_threshold_falls() -> None:
    A, B = matrix(120, 130, 9, positive=True), matrix(130, 110, 10, positive=True)
    runs = [reported(A, B, rule="mean", threshold=t) for t in (math.inf, 1.0, 0.7, 0.4, 0.1, 0.0)]
    densities, errors = [r.density for _, r in runs], [error(x, A, B) for x, _ in runs]
    assert densities == sorted(densities) and errors == sorted(errors, reverse=True)
    assert errors[0] / errors[-1] > 50
    assert [round(d, 1) for d in densities[1:5]] == [0.0, 0.3, 0.6, 0.9]  # uniform data: 1 - threshold


def test_equation_14_keeps_nothing_of_large_positive_matrices() -> None:
    A, B = matrix(256, 1024, 11, positive=True), matrix(1024, 256, 12, positive=True)
    for threshold in (1.0, 0.1, 0.01):  # averages of |c| are near 256, entries below 1
        assert reported(A, B, threshold=threshold, rule="eq14")[1].density == 0
    assert 0.7 < reported(A, B, threshold=1e-3, rule="eq14")[1].density < 0.8


def test_the_examples_rule_keeps_no_negative_entry() -> None:
    values = torch.tensor([[3.0, 0.0, -5.0], [3.0, 0.0, -5.0]])
    product = torch.tensor([[-10.0, 5.0], [-1.0, 2.0]])
    assert kept_entries(values, product, 1.0, "example", False, 1).tolist() == [[False] * 3, [True, False, False]]
    assert kept_entries(values, product, 1.0, "eq14", False, 1).tolist() == [[False] * 3, [True, False, True]]
    assert kept_entries(values, product, 0.0, "example", False, 1).tolist() == [[True, False, True]] * 2


def test_vectors_are_kept_whole_and_never_less_than_entries() -> None:
    values = matrix(11, 40, 1)
    single = kept_entries(values, None, 0.8, "mean", False, 1)
    grouped = kept_entries(values, None, 0.8, "mean", False, 4)
    padded = torch.nn.functional.pad(single, (0, 0, 0, 1)).view(3, 4, 40)
    assert torch.equal(grouped, padded.any(1, keepdim=True).expand(3, 4, 40).reshape(12, 40)[:11])


def test_alpha_beta_and_c() -> None:
    A, B, C = matrix(8, 9, 13), matrix(9, 7, 14), matrix(8, 7, 15)
    plain = gemm(A, B)
    assert isinstance(plain, Tensor)
    assert torch.allclose(gemm(A, B, C, alpha=-2.5, beta=0.5), -2.5 * plain + 0.5 * C, rtol=1e-12, atol=1e-12)
    assert torch.equal(gemm(A, B, C * math.nan), plain)  # beta = 0 does not read C
    assert torch.equal(gemm(A, B, C, alpha=0, beta=1), C)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_results_have_the_dtype_of_the_operands(dtype: torch.dtype) -> None:
    A, B = matrix(16, 32, 16, dtype=dtype), matrix(32, 8, 17, dtype=dtype)
    result = gemm(A, B, scaling="vector", rounding="nearest")
    assert result.dtype == dtype and error(result, A, B) < 2 * torch.finfo(dtype).eps + 1e-4
    assert gemm(A, B.double()).dtype == torch.float64


def test_views_count_like_their_copies() -> None:
    A, B = matrix(40, 30, 18).t()[::2], matrix(50, 40, 19)[5:45, ::3]
    options = {"rule": "mean", "threshold": 0.3, "eta": 1.0}
    assert torch.equal(gemm(A, B, **options), gemm(A.contiguous(), B.contiguous(), **options))


def test_a_scale_a_vector_keeps_tiny_rows_accurate() -> None:
    big, B = matrix(4, 30, 20, dtype=torch.float32), matrix(30, 6, 21, dtype=torch.float32) * 1e15
    tiny = big * 2.0**-140  # its scale has few bits as a float32
    result = gemm(torch.cat([big, tiny]), B, scaling="vector", rounding="nearest")
    assert isinstance(result, Tensor)
    assert error(result[:4], big, B) < 1e-3 and error(result[4:], tiny, B) < 1e-3
    assert error(gemm(tiny, B, rounding="nearest"), tiny, B) < 1e-3  # type: ignore[arg-type]
    lost = gemm(torch.cat([big, tiny]), B)
    assert isinstance(lost, Tensor) and not lost[4:].any()


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)])
@pytest.mark.parametrize("threshold", [0.0, 0.1])
def test_empty_products_are_zero(shape: tuple[int, int, int], threshold: float) -> None:
    m, k, n = shape
    C = torch.full((m, n), 2.0)
    result = gemm(torch.ones(m, k), torch.ones(k, n), C, beta=3.0, threshold=threshold, rule="mean")
    assert torch.equal(result, 3 * C)


def test_one_by_one_and_zeros() -> None:
    assert gemm(torch.tensor([[3.0]]), torch.tensor([[-2.0]])).item() == pytest.approx(-6, rel=1e-6)
    assert not gemm(torch.zeros(3, 4), torch.ones(4, 5)).any()


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_sums_past_32_bits_are_exact(eta: float) -> None:
    k = 150_000
    A = torch.ones(2, k, dtype=torch.float64)
    B = torch.ones(k, 3, dtype=torch.float64) * 127 / 128
    B[0] = 1
    result = gemm(A, B, eta=eta, rule="mean", threshold=0.1)  # 127 * 127 * 150000 > 2^31
    assert error(result, A, B) < 1e-4


def test_the_report_times_every_step() -> None:
    A, B = matrix(64, 64, 22), matrix(64, 64, 23)
    _, report = reported(A, B, rule="mean", threshold=0.5, eta=1.0)
    assert tuple(report.times) == STEPS and all(t > 0 for t in report.times.values())
    _, plain = reported(A, B, threshold=math.inf)
    assert plain.times["correct"] == plain.times["compress"] == 0 < plain.times["product"]


def test_levels_set_the_largest_integer() -> None:
    x = matrix(5, 6, 24)
    for levels in (1, 64, 127):
        assert int(decompose(x, levels=levels).high.abs().max()) == levels
    with pytest.raises(ValueError, match="levels must be None or from 1 to 127 for 8 bits, got 128"):
        decompose(x, levels=128)


def test_the_crossover_is_measured_once() -> None:
    first = crossover_density("cpu", 8)
    assert 0 <= first <= 1 and crossover_density("cpu", 8) == first
    with pytest.raises(NotImplementedError, match="device must be a CPU or a CUDA device, got meta"):
        crossover_density("meta")


def test_the_default_eta_is_printed_and_never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> float:
        raise AssertionError("a result must not depend on a time")

    monkeypatch.setattr(thresholds, "_crossover", measured)
    A, B = matrix(40, 40, 25, positive=True), matrix(40, 40, 26, positive=True)
    for threshold, path in ((0.75, "spmm"), (0.65, "gemm")):  # densities are near 1 - threshold
        result, report = reported(A, B, rule="mean", threshold=threshold)
        assert (report.eta, report.path_a) == (0.3, path)
        given = gemm(A, B, rule="mean", threshold=threshold, eta=0.3)
        assert isinstance(given, Tensor) and torch.equal(result, given)


def test_the_crossover_of_a_cpu_takes_little_time(use_threads: Callable[[int], None]) -> None:
    use_threads(1)
    thresholds._crossover.cache_clear()
    start = time.process_time()
    crossover_density("cpu")
    assert time.process_time() - start < 0.45  # seconds; matrices of 1024 took 0.7 to 0.9


ONES = torch.ones(3, 3)


@pytest.mark.parametrize(
    ("kind", "message", "operands", "options"),
    [
        (TypeError, r"A must be a torch\.Tensor, got list", ([1.0], ONES), {}),
        (TypeError, r"B must be a floating-point tensor, got torch\.int64", (ONES, ONES.long()), {}),
        (ValueError, "B must be 2-D, got 1 dimensions", (ONES, ONES[0]), {}),
        (ValueError, "B must have as many rows as A has columns, got 2 and 3", (ONES, ONES[:2]), {}),
        (ValueError, "A must be finite, but 9 of its 9 values", (ONES * math.inf, ONES), {}),
        (ValueError, "B must be finite, but 9 of its 9 values", (ONES, ONES * math.nan), {}),
        (ValueError, "B must be on the device of A, got meta and cpu", (ONES, ONES.to("meta")), {}),
        (ValueError, r"C must have shape \(3, 3\), got \(2, 3\)", (ONES, ONES, ONES[:2]), {"beta": 1.0}),
        (ValueError, r"C must be given for beta 1\.0, got None", (ONES, ONES), {"beta": 1.0}),
        (ValueError, "bits must be an integer from 2 to 8, got 9", (ONES, ONES), {"bits": 9}),
        (
            ValueError,
            r"rule must be one of \('eq14', 'example', 'mean'\), got 'max'",
            (ONES, ONES),
            {"rule": "max"},
        ),
        (ValueError, "scaling must be one of .*, got 'row'", (ONES, ONES), {"scaling": "row"}),
        (ValueError, "rounding must be one of .*, got 'up'", (ONES, ONES), {"rounding": "up"}),
        (ValueError, "levels must be one of .*, got '127'", (ONES, ONES), {"levels": "127"}),
        (
            ValueError,
            r"levels '2\^\(N-2\)' needs at least 3 bits, got 2",
            (ONES, ONES),
            {"levels": "2^(N-2)", "bits": 2},
        ),
        (ValueError, r"threshold must be at least 0, got -0\.1", (ONES, ONES), {"threshold": -0.1}),
        (ValueError, "threshold must be at least 0, got nan", (ONES, ONES), {"threshold": math.nan}),
        (ValueError, r"eta must be None or in \[0, 1\], got 1\.5", (ONES, ONES), {"eta": 1.5}),
        (ValueError, "alpha must be finite, got inf", (ONES, ONES), {"alpha": math.inf}),
        (ValueError, "vector_length must be one of", (ONES, ONES), {"vector_length": 3}),
    ],
)
def test_bad_arguments_are_named(
    kind: type[Exception], message: str, operands: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(kind, match=message):
        gemm(*operands, **options)
