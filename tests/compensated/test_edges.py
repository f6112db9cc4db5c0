"""Inputs at the edges: inf and NaN, extreme scales, long sums, empty and thin shapes, every dtype, every layout."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from residual.matmul import matmul, prepare
from residual.operand.prepared import PreparedOperand
from residual.planning.ladder import MODES
from residual.report import ToleranceError
from tests.compensated.random_products import true_error
from tests.compensated.test_matmul import normal, reported

INF, NAN = math.inf, math.nan


def product(A: Tensor, B: Tensor | PreparedOperand, **options: object) -> Tensor:
    result = matmul(A, B, **options)  # type: ignore[arg-type]
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kept", [False, True])
def test_inf_and_nan_stay_in_their_rows_and_columns(mode: str, kept: bool) -> None:
    A, B = normal(40, 64), normal(64, 33, seed=1)
    clean_a, clean_b = A.clone(), B.clone()
    A[3, 5], A[7, 0], A[7, 1], A[20] = INF, INF, -INF, NAN
    B[9, 2], B[0, 30] = -INF, NAN
    clean_a[[3, 7, 20]], clean_b[:, [2, 30]] = 0, 0
    right = prepare(B, mode=mode) if kept else B
    C, plain, ieee = product(A, right, mode=mode), product(clean_a, clean_b, mode=mode), A @ B
    rows = [i for i in range(40) if i not in (3, 7, 20)]
    columns = [j for j in range(33) if j not in (2, 30)]
    assert torch.equal(C[rows][:, columns], plain[rows][:, columns])
    for part in (C[[3, 7, 20]], C[:, [2, 30]]):
        assert not torch.isfinite(part).all()
    for got, want in ((C[[3, 7, 20]], ieee[[3, 7, 20]]), (C[:, [2, 30]], ieee[:, [2, 30]])):
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
        assert torch.equal(got[got.isinf()].sign(), want[want.isinf()].sign())
        assert torch.allclose(got[got.isfinite()], want[want.isfinite()], rtol=1e-5, atol=1e-5)


def test_a_tolerance_holds_for_the_finite_lines_beside_inf() -> None:
    A, B = normal(300, 400), normal(400, 350, seed=1)
    A[5, 5], B[2, 2] = INF, NAN
    C, report = reported(A, B, tol=3e-2, mode="direct")
    rows, columns = torch.arange(300) != 5, torch.arange(350) != 2
    assert 1e-3 < true_error(A[rows], B[:, columns], C[rows][:, columns]) < 3e-2
    assert report.attempts[0].upper <= 3e-2 and not C[5].isfinite().any() and C[:, 2].isnan().all()


def test_everything_broken_is_what_ieee_arithmetic_gives() -> None:
    A, B = torch.full((3, 4), INF), normal(4, 2)
    C = product(A, B, tol=1e-3)
    assert torch.equal(C.isnan(), (A @ B).isnan()) and not C.isfinite().any()


@pytest.mark.parametrize("mode", MODES)
def test_rows_near_the_smallest_float_keep_their_relative_accuracy(mode: str) -> None:
    A, B = normal(30, 200), normal(200, 40, seed=1)
    powers = torch.tensor([2.0**-118, 2.0**-100, 1.0, 2.0**-120, 2.0**60])
    C = product(A * powers.repeat(6)[:, None], B, mode=mode)
    plain = product(A, B, mode=mode)
    assert torch.equal(C, plain * powers.repeat(6)[:, None]) or mode in ("outlier", "columns")
    errors = (C.double() - A.double() * powers.repeat(6)[:, None].double() @ B.double()).norm(dim=1)
    sizes = (A.double() * powers.repeat(6)[:, None].double() @ B.double()).norm(dim=1)
    assert float((errors / sizes).max()) < 2e-2


def test_subnormal_and_huge_rows_meet_a_tolerance() -> None:
    A = torch.cat([normal(20, 300) * 1e-36, normal(1, 300, seed=1) * 1e-41])
    assert true_error(A, normal(300, 200, seed=2), product(A, normal(300, 200, seed=2), tol=1e-3)) < 1e-3
    A, B = normal(50, 300) * 1e30, normal(300, 200, seed=2) * 1e-30
    assert true_error(A, B, product(A, B, tol=1e-3)) < 1e-3
    C, _ = reported(A.double() * 1e200, B.double() * 1e-220, tol=3e-2, mode="direct")
    assert true_error(A.double() * 1e200, B.double() * 1e-220, C) < 3e-2


@pytest.mark.parametrize("mode", MODES)
def test_zero_rows_and_columns_give_zeros(mode: str) -> None:
    A, B = normal(50, 60), normal(60, 40, seed=1)
    A[[0, 7]], B[:, [3, 39]], A[:, 5], B[6] = 0, 0, 0, 0
    C = product(A, B, mode=mode)
    assert not C[[0, 7]].any() and not C[:, [3, 39]].any() and true_error(A, B, C) < 2e-2
    assert not product(torch.zeros(5, 60), B, mode=mode).any()
    assert true_error(A, B, product(A, B, tol=1e-5, mode=mode, on_failure="fallback")) <= 1e-5


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_doubles_whose_squares_leave_the_range_are_checked_all_the_same(scale: float) -> None:
    A, B = normal(40, 50).double(), normal(50, 30, seed=1).double()
    for options in ({"tol": 1e-3}, {"tol": 3e-2, "mode": "direct"}, {"tol": 1e-3, "mode": "full"}):
        C, report = reported(A * scale, B, **options)
        assert 0 < true_error(A, B, C / scale) <= options["tol"]  # type: ignore[operator]
        assert report.estimated_error == pytest.approx(true_error(A, B, C / scale), rel=0.6)
    with pytest.raises(ToleranceError):
        product(A * scale, B, tol=1e-3, mode="direct")


def test_zeros_times_anything_have_no_error() -> None:
    C, report = reported(torch.zeros(400, 500), normal(500, 300), tol=1e-6)
    assert not C.any() and report.estimated_error == 0 and len(report.attempts) == 1


@pytest.mark.parametrize("mode", MODES)
def test_sums_longer_than_int32_holds_are_whole(mode: str) -> None:
    k = 140_001
    C = product(torch.ones(2, k), torch.ones(k, 3), mode=mode)  # every digit is 127: 127**2 k > 2**31
    assert torch.allclose(C, torch.full((2, 3), float(k)), rtol=1e-6)
    A, B = normal(3, k), normal(k, 2, seed=1)
    assert true_error(A, B, product(A, B, mode=mode)) < 5e-2
    assert true_error(A, B, product(A, B, mode=mode, tol=1e-4, on_failure="fallback")) <= 1e-4


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)])
def test_empty_products_are_zeros_without_an_error(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    C, report = reported(torch.ones(m, k), torch.ones(k, n), tol=1e-3)
    assert torch.equal(C, torch.zeros(m, n)) and (report.plan, report.estimated_error) == ("empty", 0)
    assert torch.equal(product(torch.ones(m, k), torch.ones(k, n), mode="full"), torch.zeros(m, n))
    held = torch.ones(k, n)
    assert product(torch.ones(m, k), prepare(held), mode="direct").shape == (m, n)


def test_one_number_times_another() -> None:
    A, B = torch.tensor([[3.7]]), torch.tensor([[-2.1]])
    for mode in MODES:
        assert product(A, B, mode=mode).item() == pytest.approx(-7.77, rel=1e-6)
    assert product(A, B, tol=1e-5).item() == pytest.approx(-7.77, rel=1e-6)
    assert product(A * 0, B, tol=1e-5).item() == 0


@pytest.mark.parametrize("shape", [(1, 20_000, 1), (20_000, 1, 3), (1, 1, 20_000), (5, 2, 30_000), (300, 40_000, 1)])
def test_thin_shapes_meet_their_tolerance(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    A, B = normal(m, k), normal(k, n, seed=1)
    for mode in ("auto", "direct", "three_digit"):
        C = product(A, B, tol=3e-3, mode=mode, on_failure="fallback")
        assert C.shape == (m, n) and true_error(A, B, C) <= 3e-3


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_integers_give_floats_within_tolerance(dtype: torch.dtype) -> None:
    info = (
        (0, 2) if dtype == torch.bool else (max(torch.iinfo(dtype).min, -(10**6)), min(torch.iinfo(dtype).max, 10**6))
    )
    g = torch.Generator().manual_seed(0)
    A = torch.randint(*info, (60, 70), generator=g).to(dtype)
    B = torch.randint(*info, (70, 50), generator=g).to(dtype)
    C, report = reported(A, B, tol=1e-4)
    assert C.dtype == (torch.float64 if dtype in (torch.int32, torch.int64) else torch.float32)
    assert true_error(A, B, C) < 1e-4 and report.plan
    assert true_error(A, B, product(A, B, mode="full4")) < 1e-4


def test_bytes_are_their_own_digits() -> None:
    g = torch.Generator().manual_seed(0)
    A, B = (torch.randint(-128, 128, (90, 90), generator=g).to(torch.int8) for _ in range(2))
    A[0, 0] = -128
    exact = (A.long() @ B.long()).float()
    assert torch.equal(product(A, B, mode="direct"), exact) and torch.equal(product(A, B, mode="sparse"), exact)
    C, report = reported(A, B, mode="direct", tol=1e-6)
    assert torch.equal(C, exact) and report.estimated_error < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_keep_their_dtype_and_say_where_it_is_too_coarse(dtype: torch.dtype) -> None:
    A, B = normal(100, 120).to(dtype), normal(120, 90, seed=1).to(dtype)
    C = product(A, B, tol=1e-2)
    assert C.dtype == dtype and true_error(A, B, C) <= 1e-2
    with pytest.raises(ToleranceError, match=r"rounds by .*, use out_dtype=torch\.float32"):
        product(A, B, tol=1e-5, on_failure="fallback")
    assert true_error(A, B, product(A, B, tol=1e-5, out_dtype=torch.float32)) <= 1e-5


def test_a_result_beyond_float16_is_infinite_or_refused() -> None:
    A = torch.full((20, 30), 200.0, dtype=torch.float16)
    assert product(A, A.mT, mode="direct").isinf().all()  # as torch's own
    with pytest.raises(ToleranceError, match="inf"):
        product(A, A.mT, tol=0.1, on_failure="fallback")
    assert torch.allclose(product(A, A.mT, tol=0.1, out_dtype=torch.float32), torch.full((20, 20), 1.2e6), rtol=0.1)


def test_doubles_reach_tolerances_that_float32_does_not() -> None:
    A, B = normal(80, 90).double() + 1e-9, normal(90, 70, seed=1).double()
    C, report = reported(A, B, tol=1e-12)
    assert report.plan == "fp64" and C.dtype == torch.float64 and true_error(A, B, C) < 1e-12
    C, report = reported(A, B.float(), tol=1e-4, mode="full4")
    assert report.plan == "int8 full4" and C.dtype == torch.float64


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.cat([x, x], 1)[:, ::2].contiguous()[:, : x.shape[1]],
        lambda x: x.repeat_interleave(2, 1)[:, ::2],
        lambda x: x.flip(0)[torch.arange(x.shape[0] - 1, -1, -1)],
        lambda x: x[:, :1].expand(x.shape),
        lambda x: x[:1].expand(x.shape),
    ],
)
def test_any_strides_give_the_product_of_a_copy(view: object) -> None:
    A, B = view(normal(70, 90)), view(normal(90, 60, seed=1))  # type: ignore[operator]
    for mode in MODES:
        got, want = product(A, B, mode=mode), product(A.contiguous(), B.contiguous(), mode=mode)
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max())), mode
    assert true_error(A, B, product(A, B, tol=1e-4)) <= 1e-4


def test_inputs_are_left_as_they_are() -> None:
    A, B = normal(300, 300), normal(300, 300, seed=1)
    A[3, 3], A[5] = NAN, A[5] * 1e-36
    before = A.clone(), B.clone()
    for mode in MODES:
        product(A, B, mode=mode)
    product(A, B, tol=1e-3)
    assert torch.equal(A.nan_to_num(7), before[0].nan_to_num(7)) and torch.equal(B, before[1])


@pytest.mark.parametrize("options", [{"tol": 1e-5}, {"tol": 1e-3, "mode": "full"}, {"mode": "outlier"}], ids=str)
def test_autocast_reaches_no_product_inside(options: dict[str, object]) -> None:
    A, B = normal(60, 200), normal(200, 40, seed=1)
    weight = B.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        C, learned = product(A, B, **options), product(A, weight, **options)
    assert torch.equal(C, product(A, B, **options)) and torch.equal(learned, C)
    learned.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_a_program_s_random_numbers_stay_what_they_are() -> None:
    state = torch.get_rng_state()
    product(normal(300, 300), normal(300, 300, seed=1), tol=1e-2)
    assert torch.equal(state, torch.get_rng_state())
