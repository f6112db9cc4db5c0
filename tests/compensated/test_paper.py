"""The published algorithm, against its formulas written out in 64-bit integers and doubles."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from residual import decompose
from residual.paper import thresholds
from residual.paper.gemm import STEPS, PaperReport, gemm
from residual.paper.thresholds import crossover_density, kept_entries


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


def dropped(a: int, products: list[int], threshold: float, rule: str, magnitudes: list[int]) -> bool:
    """One entry of the selection, as the rules are printed; the mean is divided last, as an entry may equal its level."""
    if rule == "mean":
        return abs(a) <= 2 * threshold * sum(magnitudes) / len(magnitudes)
    sums = [abs(c) for c in products] if rule == "eq14" else products
    return abs(a) <= threshold * sum(sums) / len(sums) or a == 0


def by_the_book(A: Tensor, B: Tensor, threshold: float, rule: str, **options: Any) -> Tensor:
    """Algorithm 1 with lists of integers."""
    vector = options["scaling"] == "vector"
    top = 2 ** (options["bits"] - 1) - 1 if options["levels"] == "2^(N-1)-1" else 2 ** (options["bits"] - 2)
    a, b = (
        decompose(x, options["bits"], axis if vector else None, options["rounding"], top)
        for axis, x in enumerate((A, B))
    )
    product = a.high.long() @ b.high.long()

    def kept(high: Tensor, sums: Tensor) -> Tensor:
        rows, sizes = high.tolist(), high.long().abs()
        averaged = sizes.tolist() if vector else [sizes.flatten().tolist()] * len(rows)
        flags = [
            [not dropped(x, c, threshold, rule, magnitudes) for x in row]
            for row, c, magnitudes in zip(rows, sums.tolist(), averaged, strict=True)
        ]
        return high.long() * torch.tensor(flags)

    cross = kept(a.high, product) @ b.low.long() + (kept(b.high.T, product.T) @ a.low.long().T).T
    return a.scale * b.scale * (product.double() + cross.double() / 2**a.shift)


@settings(max_examples=150)
@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12)),
    bits=st.integers(3, 8),
    threshold=st.sampled_from([0.0, 1e-3, 0.02, 0.1, 0.3, 1.0]),
    rule=st.sampled_from(["eq14", "eq14_signed", "mean"]),
    scaling=st.sampled_from(["tensor", "vector"]),
    rounding=st.sampled_from(["trunc", "nearest"]),
    levels=st.sampled_from(["2^(N-1)-1", "2^(N-2)"]),
    eta=st.sampled_from([0.0, 0.5, 1.0]),
    positive=st.booleans(),
    seed=st.integers(0, 2**20),
)
@example(  # an entry equals its level
    shape=(1, 12, 1), bits=7, threshold=0.3, rule="mean", scaling="tensor", rounding="nearest", levels="2^(N-2)",
    eta=0.0, positive=False, seed=18675,
)  # fmt: skip
def test_every_option_follows_the_formulas(
    *, shape: tuple[int, int, int], threshold: float, rule: str, eta: float, positive: bool, seed: int, **options: Any
) -> None:
    m, k, n = shape
    A, B = matrix(m, k, seed, positive), matrix(k, n, seed + 1, positive)
    result = gemm(A, B, threshold=threshold, rule=rule, eta=eta, **options)
    expected = by_the_book(A, B, threshold, rule, **options)
    assert isinstance(result, Tensor)
    assert torch.allclose(result, expected, rtol=1e-13, atol=1e-13 * float(expected.abs().max()))


def test_a_worked_example_by_hand() -> None:
    # 64 / max with truncation, as the printed 3 x 3 example has it; these matrices are our own
    A = torch.tensor([[2.0, 0.5, -1.0], [0.25, 1.0, 0.0], [-0.75, 0.125, 1.5]])
    B = torch.tensor([[1.0, 0.0, 0.5], [-0.3, 0.8, 0.0], [0.2, -0.6, 0.4]])
    a, b = (decompose(x, rounding="trunc", levels=64) for x in (A, B))
    assert a.high.tolist() == [[64, 16, -32], [8, 32, 0], [-24, 4, 48]] and not a.low.any()
    assert b.high.tolist() == [[64, 0, 32], [-19, 51, 0], [12, -38, 25]]
    assert b.low.tolist() == [[0, 0, 0], [-25, 25, 0], [102, -51, 76]]  # 128 times .2, .2, .8, .4, .6, cut
    product = a.high.long() @ b.high.long()
    assert product.tolist() == [[3408, 2032, 1248], [-96, 1632, 256], [-1036, -1620, 432]]
    averages = product.double().mean(1).tolist(), product.abs().double().mean(1).tolist()
    assert averages[0] == pytest.approx([2229.33, 597.33, -741.33], abs=0.01)
    assert averages[1] == pytest.approx([2229.33, 661.33, 1029.33], abs=0.01)
    keeps = {
        rule: kept_entries(a.high, product, 0.01, rule, False, 1).int().tolist() for rule in ("eq14", "eq14_signed")
    }
    assert keeps["eq14"] == [[1, 0, 1], [1, 1, 0], [1, 0, 1]]  # levels 22.3, 6.6 and 10.3
    assert keeps["eq14_signed"] == [[1, 0, 1], [1, 1, 0], [1, 1, 1]]  # levels 22.3, 6.0 and -7.4
    full = gemm(A, B, levels="2^(N-2)", threshold=0)
    cross = a.high.double() @ b.low.double() / 128
    assert torch.allclose(full.double(), (product + cross) * (2 / 64) * (1 / 64), rtol=1e-6)
    assert error(full, A, B) < 0.01 * error(gemm(A, B, levels="2^(N-2)", threshold=math.inf), A, B)


@pytest.mark.parametrize("vector_length", [1, 2, 8])
@pytest.mark.parametrize("rule", ["eq14", "mean"])
def test_the_path_does_not_change_the_result(rule: str, vector_length: int) -> None:
    A, B = matrix(37, 50, 1, dtype=torch.float32), matrix(50, 43, 2, dtype=torch.float32)
    threshold = 0.01 if rule == "eq14" else 0.9
    options = {"rule": rule, "threshold": threshold, "vector_length": vector_length}
    (sparse, thin), (dense, thick) = (reported(A, B, eta=eta, **options) for eta in (1.0, 0.0))
    assert (thin.path_a, thin.path_b, thick.path_a, thick.path_b) == ("spmm", "spmm", "gemm", "gemm")
    assert 0 < thin.density_a == thick.density_a < 1 and 0 < thin.density_b < 1
    assert torch.equal(sparse, dense)


def test_the_switch_is_at_eta() -> None:
    A, B = matrix(20, 30, 3), matrix(30, 20, 4)
    _, report = reported(A, B, rule="mean", threshold=0.5, eta=1.0)
    low, high = sorted((report.density_a, report.density_b))
    assert low < high
    _, between = reported(A, B, rule="mean", threshold=0.5, eta=low)
    paths = {report.density_a: between.path_a, report.density_b: between.path_b}
    assert paths == {low: "spmm", high: "gemm"} and between.eta == low


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threshold_zero_is_one_dense_call_and_the_same_as_three(dtype: torch.dtype) -> None:
    A, B = matrix(30, 6000, 5, True, dtype), matrix(6000, 25, 6, True, dtype)  # sums of more than 24 bits
    (fused, one), (apart, three) = (reported(A, B, eta=eta) for eta in (0.0, 1.0))
    assert (one.path_a, three.path_a) == ("fused", "spmm")
    assert torch.allclose(fused, apart, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_threshold_infinity_is_the_plain_quantized_product() -> None:
    A, B = matrix(9, 20, 7, dtype=torch.float32), matrix(20, 11, 8, dtype=torch.float32)
    result, report = reported(A, B, threshold=math.inf, rule="eq14_signed")
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


def test_equation_14_read_literally_keeps_nothing_of_large_positive_matrices() -> None:
    A, B = matrix(256, 1024, 11, positive=True), matrix(1024, 256, 12, positive=True)
    for threshold in (1.0, 0.1, 0.01, 0.001):
        assert reported(A, B, threshold=threshold, rule="eq14")[1].density == 0
    assert reported(A, B, threshold=1e-5, rule="eq14")[1].density > 0.1


def test_a_negative_signed_average_keeps_every_entry_but_zeros() -> None:
    high = torch.tensor([[3, 0, -5], [3, 0, -5]], dtype=torch.int8)
    product = torch.tensor([[-10, 5], [-10, 15]], dtype=torch.int32)
    assert kept_entries(high, product, 1.0, "eq14_signed", False, 1).tolist() == [
        [True, False, True],
        [True, False, True],
    ]
    assert kept_entries(high, product, 1.0, "eq14", False, 1).tolist() == [[False] * 3] * 2
    assert kept_entries(high, product, 1.2, "eq14_signed", False, 1).tolist()[1] == [False, False, True]  # 3 <= 3


def test_vectors_are_kept_whole_and_never_less_than_entries() -> None:
    high = torch.randint(-127, 128, (11, 40), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    single = kept_entries(high, None, 0.8, "mean", False, 1)
    grouped = kept_entries(high, None, 0.8, "mean", False, 4)
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
    A, B = matrix(8, 8, 25), matrix(8, 8, 26)
    assert reported(A, B, vector_length=8)[1].eta == first


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
            r"rule must be one of \('eq14', 'eq14_signed', 'mean'\), got 'max'",
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
