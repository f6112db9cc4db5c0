"""Products keep the tolerance that was asked for, whatever the data, and say what they did."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from residual.error.factor import FAILURE, confidence, sharp_factor
from residual.error.probes import PROBES
from residual.execute.run import judged
from residual.matmul import matmul, plan, prepare
from residual.operand.operand import operand
from residual.operand.prepared import PreparedOperand, prepare_for
from residual.planning.ladder import MODES
from residual.report import Report, ToleranceError
from tests.compensated.random_products import outcomes, true_error


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reported(A: Tensor, B: Tensor | PreparedOperand, **options: Any) -> tuple[Tensor, Report]:
    result = matmul(A, B, return_report=True, **options)
    assert isinstance(result, tuple)
    return result


@pytest.mark.parametrize("count", [80, pytest.param(2000, marks=pytest.mark.long)])
def test_no_random_product_misses_its_tolerance(count: int) -> None:
    found = list(outcomes(count, first=10_000))
    misses = [each for each in found if each.missed]
    assert len(misses) <= FAILURE * len(found), misses  # none has ever been seen
    assert not [each for each in found if each.needless]
    returned = [each for each in found if each.error is not None]
    assert len(returned) > 0.8 * len(found)
    assert len({each.plan for each in returned}) >= 8 and max(each.attempts for each in found) >= 2


def test_a_rank_one_error_just_too_large_passes_in_less_than_the_stated_share() -> None:
    A, B = normal(12, 9, seed=1).double(), normal(9, 10, seed=2).double()
    truth, tol = A @ B, 1e-2
    wrong = torch.outer(normal(12, seed=3), normal(10, seed=4)).double()
    C = truth + wrong * (1.001 * tol * truth.norm() / wrong.norm())
    left = operand(A)
    trials, passed = 3000, 0
    for seed in range(trials):
        passed += judged(C, left, prepare_for(B, seed, ()), confidence(0)).accepts(tol)
    share = 1 - confidence(0)
    assert passed <= trials * share + 4 * math.sqrt(trials * share)
    assert passed > trials * share / 6  # half of it is for this case, and the bound no larger than it must be
    assert sum(1 - confidence(i) for i in range(40)) <= FAILURE * (1 + 1e-12)


SPECTRA = {
    "one": [1.0],
    "three": [1.0] * 3,
    "eight": [1.0] * 8,
    "forty": [1.0] * 40,
    "one and forty": [5.0] + [1.0] * 40,
    "geometric": [0.7**i for i in range(40)],
}


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_sharper_bound_holds_for_errors_of_every_rank(spectrum: str) -> None:
    values = torch.tensor(SPECTRA[spectrum]).double()
    norm, low, trials = float(values.norm()), 0, 3000
    generator = torch.Generator().manual_seed(7)
    for _ in range(trials):
        probed = values[:, None] * torch.randn(len(values), PROBES, generator=generator, dtype=torch.float64)
        gram = probed.mT @ probed
        share = float(torch.linalg.eigvalsh(gram)[-1] / gram.trace())
        low += sharp_factor(share, PROBES, 0.9) * math.sqrt(float(gram.trace()) / PROBES) < norm
    assert low <= 0.1 * trials  # at 90%, where misses are frequent enough to count
    assert low > 0 or spectrum != "one"


def test_the_bound_is_sharper_for_errors_without_pattern() -> None:
    sure = confidence(0)
    assert sharp_factor(1.0, PROBES, sure) == pytest.approx(1.78, abs=0.01)
    assert sharp_factor(1 / PROBES, PROBES, sure) == pytest.approx(1.28, abs=0.01)
    A, B = normal(500, 600), normal(600, 500, seed=1)
    C, report = reported(A, B, mode="direct", seed=0)
    truth = true_error(A, B, C)
    assert 1.15 * truth < report.attempts[0].upper < 1.45 * truth


# Relative errors at n = 1024 of a replication of the published method; here n = 512.
PUBLISHED = {
    "uniform": (lambda: torch.rand(512, 512), {"direct": 2.3e-4, "centered": 5.9e-5, "full": 1.1e-6}),
    "normal(10, 3)": (
        lambda: 10 + 3**0.5 * torch.randn(512, 512),
        {"direct": 1.6e-4, "centered": 1.0e-5, "full": 7.4e-7},
    ),
    "exponential": (lambda: -torch.rand(512, 512).log(), {"direct": 1.1e-3, "centered": 6.7e-4, "full": 1.0e-5}),
    "normal": (lambda: torch.randn(512, 512), {"direct": 1.1e-2, "full": 7.6e-5, "three_digit": 3.8e-7}),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_each_mode_has_its_known_error(kind: str) -> None:
    torch.manual_seed(0)
    draw, errors = PUBLISHED[kind]
    A, B = draw(), draw()
    for mode, error in errors.items():
        C, report = reported(A, B, mode=mode, seed=1)
        truth = true_error(A, B, C)
        assert error / 2 < truth < error * 2, mode
        assert truth == pytest.approx(report.estimated_error, rel=0.6)
        assert report.attempts[0].upper > truth and report.products == {"full": 3, "three_digit": 6}.get(mode, 1)


def test_more_work_buys_accuracy() -> None:
    heavy = torch.distributions.StudentT(torch.tensor(2.0))
    torch.manual_seed(0)
    A, B = heavy.sample((300, 400)), heavy.sample((400, 200))
    errors = {mode: true_error(A, B, matmul(A, B, mode=mode)) for mode in MODES}
    assert errors["sparse"] < errors["direct"] / 2 and errors["columns"] < 0.9 * errors["direct"]
    assert errors["full"] < errors["sparse"] / 4 and errors["full4"] < errors["full"]
    assert errors["three_digit"] < errors["full4"] / 10
    A[:, 7] *= 60
    spread = {mode: true_error(A, B, matmul(A, B, mode=mode)) for mode in ("direct", "outlier")}
    assert spread["outlier"] < spread["direct"]


def test_four_bits_are_coarser_by_their_step() -> None:
    A, B = normal(200, 300), normal(300, 200, seed=1)
    eight, four = (true_error(A, B, matmul(A, B, mode="direct", bits=b)) for b in (8, 4))
    assert four / eight == pytest.approx(127 / 7, rel=0.1)


def test_the_report_tells_what_ran() -> None:
    A, B = normal(700, 700), normal(700, 700, seed=1)
    _, report = reported(A, B, tol=3e-2, mode="direct")
    assert report.plan == "int8 direct" and report.products == 1 and report.confidence == 0.99
    assert [each.plan for each in report.attempts] == ["int8 direct"]
    assert report.attempts[0].estimated == report.estimated_error <= report.attempts[0].upper <= 3e-2
    again, second = reported(A, B, tol=3e-2, mode="direct", seed=5)
    third, same = reported(A, B, tol=3e-2, mode="direct", seed=5)
    assert torch.equal(again, third) and second == same


def test_a_tolerance_out_of_reach_raises_or_falls_back_as_asked() -> None:
    A, B = normal(300, 400), normal(400, 200, seed=1)
    with pytest.raises(
        ToleranceError, match=r"no rung met tol=1e-05; best: int8 direct, error <= [^;]*; use on_failure='fallback'"
    ) as e:
        matmul(A, B, tol=1e-5, mode="direct")
    assert e.value.report.plan == "int8 direct" and e.value.report.estimated_error > 1e-3
    C, report = reported(A, B, tol=1e-5, mode="direct", on_failure="fallback")
    assert report.plan == "fp32" and [each.plan for each in report.attempts] == ["int8 direct", "fp32"]
    assert true_error(A, B, C) < 1e-6


def test_what_the_check_cannot_vouch_for_is_not_returned() -> None:
    A, B = normal(200, 300), normal(300, 200, seed=1)
    error = true_error(A, B, matmul(A, B, mode="direct"))
    for tol in (0.5 * error, 0.95 * error, 1.15 * error):  # the last one holds, but 16 probes cannot tell at 99%
        with pytest.raises(ToleranceError):
            matmul(A, B, mode="direct", tol=tol)
    assert true_error(A, B, matmul(A, B, mode="direct", tol=1.6 * error)) == pytest.approx(error)


def test_cancellation_is_seen_where_float32_has_no_digits_left() -> None:
    u, v = normal(200, 300), normal(300, 100, seed=1)
    A, B = torch.cat([u, u], 1), torch.cat([v, 1e-5 * normal(300, 100, seed=2) - v], 0)
    assert true_error(A, B, A @ B) > 1e-3  # what torch gives
    with pytest.raises(ToleranceError, match=r"best: fp32, error <= .*e-0[12]"):
        matmul(A, B, tol=1e-3)
    C, report = reported(A, B, tol=1e-6, on_failure="fallback")
    assert report.plan == "fp64" and true_error(A, B, C) < 1e-6


def test_what_float32_cannot_hold_is_raised_even_with_a_fallback() -> None:
    A, B = normal(20, 30) * 1e-30, normal(30, 20, seed=1) * 1e-30
    with pytest.raises(ToleranceError, match="fp64"):
        matmul(A, B, tol=0.5, on_failure="fallback")
    C, _ = reported(A, B, tol=1e-2, on_failure="fallback", out_dtype=torch.float64)
    assert true_error(A, B, C) < 1e-2


def test_the_first_rung_that_meets_the_tolerance_runs() -> None:
    A, B, rungs = normal(600, 600), normal(600, 600, seed=1), ("direct", "full", "three_digit", "fp32")
    with pytest.raises(ToleranceError, match="no rung met") as failure:
        matmul(A, B, tol=1e-7, rungs=rungs)
    *_, digits, last = (each.upper for each in failure.value.report.attempts)  # float32 sums are worse on some CPUs
    plans = [reported(A, B, tol=tol, rungs=rungs)[1].plan for tol in (3e-2, 5e-4, 1e-6, (last + digits) / 2)]
    assert plans == ["int8 direct", "int8 full", "int8 three_digit", "fp32"]
    assert [each.plan for each in reported(A, B, tol=1e-6, rungs=rungs)[1].attempts] == plans[:3]


def test_float32_products_report_what_the_program_made_of_them() -> None:
    A, B = normal(300, 300), normal(300, 300, seed=1)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        C = matmul(A, B, tol=1e-6, on_failure="fallback")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert true_error(A, B, C) < 1e-6


def test_a_prepared_operand_gives_the_same_product() -> None:
    A, B = normal(300, 400), normal(400, 200, seed=1)
    for mode in MODES:
        held = prepare(B, mode=mode)
        assert held.shape == (400, 200) and held.nbytes > 400 * 200 and f"int8 {mode}" in repr(held)
        assert torch.equal(matmul(A, held, mode=mode), matmul(A, B, mode=mode))
        assert reported(A, held, mode=mode, tol=5e-2)[1] == reported(A, B, mode=mode, tol=5e-2)[1]
    assert len({reported(A, right, tol=1e-3, rungs=("direct", "fp32"))[1] for right in (prepare(B), B)}) == 1


def test_the_old_keyword_of_a_prepared_operand_warns() -> None:
    A, B = normal(30, 40), normal(40, 20, seed=1)
    with pytest.warns(DeprecationWarning, match="pass the PreparedOperand as B"):
        assert torch.equal(matmul(A, B, tol=1e-3, prepared=prepare(B)), matmul(A, B, tol=1e-3))
    with pytest.warns(DeprecationWarning, match="mode='centred' is now 'centered'"):
        assert torch.equal(matmul(A, B, mode="centred"), matmul(A, B, mode="centered"))
    with pytest.warns(DeprecationWarning, match="on_failure='fp32' is now 'fallback'"):
        matmul(A, B, tol=1e-3, on_failure="fp32")


def test_a_plan_is_the_call_with_its_options() -> None:
    A, B = normal(30, 40), normal(40, 20, seed=1)
    want = matmul(A, B, tol=1e-3)
    product = plan(B, tol=1e-3)
    assert torch.equal(product(A), want) and torch.equal(plan(tol=1e-3)(A, B), want)
    assert torch.equal(plan(prepare(B), tol=1e-3).start(A).result(), want)
    pending = plan(B, tol=1e-5, mode="direct").start(A)
    assert pending.report.plan == "int8 direct"
    with pytest.raises(ToleranceError, match="no rung met"):
        pending.result()
    with pytest.raises(TypeError, match="B must be given once, to the plan or to its call, got one"):
        product(A, B)
    with pytest.raises(TypeError, match="got none"):
        plan(tol=1e-3)(A)


def test_a_stale_or_foreign_preparation_is_refused() -> None:
    A, B = normal(4, 6), normal(6, 5, seed=1)
    held = prepare(B)
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(ValueError, match=r"prepared must be made of B, got one of a tensor \(6, 5\) elsewhere"),
    ):
        matmul(A, B.clone(), mode="direct", prepared=held)
    B[0, 0] += 1
    with pytest.raises(ValueError, match="B must be as it was prepared, but was written to since"):
        matmul(A, held, mode="direct")


def test_gradients_are_those_of_the_exact_product() -> None:
    A, B = normal(6, 7).requires_grad_(), normal(7, 5, seed=1).double().requires_grad_()
    C = matmul(A, B, mode="direct")
    assert isinstance(C, Tensor) and C.dtype == torch.float64
    g = normal(6, 5, seed=2).double()
    got = torch.autograd.grad(C, (A, B), g)
    assert torch.allclose(got[0], (g @ B.mT).float()) and torch.allclose(got[1], A.double().mT @ g)
    assert got[0].dtype == torch.float32 and not reported(A, B, mode="direct")[0].requires_grad


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.int8), (torch.int16, torch.float32), (torch.float32, torch.half)]
)
def test_gradients_are_computed_in_floats_that_hold_both_operands(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    A, B = (20 * normal(6, 7)).to(dtypes[0]), (20 * normal(7, 5, seed=1)).to(dtypes[1])
    leaf = (A if A.is_floating_point() else B).requires_grad_()
    g = 1e5 * normal(6, 5, seed=2)  # beyond the range of float16 and of short integers
    C = matmul(A, B, mode="direct", out_dtype=torch.float32)
    assert isinstance(C, Tensor)
    (got,) = torch.autograd.grad(C, leaf, g)
    want = g @ B.float().mT if leaf is A else A.float().mT @ g
    assert got.dtype == torch.float32 and torch.allclose(got, want)


ONES = torch.ones(3, 3)


@pytest.mark.parametrize(
    ("kind", "message", "operands", "options"),
    [
        (ValueError, r"B must have 3 rows to match A of shape \(3, 3\), got 2", (ONES, torch.ones(2, 3)), {"tol": 0.1}),
        (ValueError, "A must be 2-D, got 1 dimensions", (torch.ones(3), ONES), {"tol": 0.1}),
        (TypeError, r"B must be a torch\.Tensor, got int", (ONES, 3), {"tol": 0.1}),
        (
            TypeError,
            r"A must be of an integer dtype or .*got torch\.complex64",
            (ONES.to(torch.complex64), ONES),
            {"tol": 0.1},
        ),
        (ValueError, r"tol must be a relative error in \(0, 1\), got 1\.5", (ONES, ONES), {"tol": 1.5}),
        (ValueError, "tol must be given for mode='auto', got None", (ONES, ONES), {}),
        (ValueError, "mode must be 'auto' or one of direct, .*got 'best'", (ONES, ONES), {"mode": "best"}),
        (ValueError, "bits must be None, 4 or 8, got 16", (ONES, ONES), {"tol": 0.1, "bits": 16}),
        (
            ValueError,
            "on_failure must be 'raise' or 'fallback', got 'ignore'",
            (ONES, ONES),
            {"tol": 0.1, "on_failure": "ignore"},
        ),
        (
            TypeError,
            r"out_dtype must be one of .*got torch\.int32",
            (ONES, ONES),
            {"tol": 0.1, "out_dtype": torch.int32},
        ),
        (TypeError, "seed must be an integer or None, got float", (ONES, ONES), {"tol": 0.1, "seed": 0.5}),
        (ValueError, "seed must be a 64-bit integer", (ONES, ONES), {"tol": 0.1, "seed": 2**64}),
        (
            ValueError,
            r"rungs must be a sequence of direct, .*got \('best',\)",
            (ONES, ONES),
            {"tol": 0.1, "rungs": ("best",)},
        ),
        (ValueError, "tol must be given for rungs, got None", (ONES, ONES), {"mode": "full", "rungs": ("full",)}),
        (ValueError, "flow must be one of auto, measured, got 'fast'", (ONES, ONES), {"tol": 0.1, "flow": "fast"}),
        (
            TypeError,
            r"prepared must come from residual\.prepare, got Tensor",
            (ONES, ONES),
            {"tol": 0.1, "prepared": ONES},
        ),
    ],
)
def test_bad_arguments_are_named(
    kind: type[Exception], message: str, operands: tuple[object, object], options: dict[str, object]
) -> None:
    with pytest.raises(kind, match=message):
        matmul(*operands, **options)  # type: ignore[call-overload]


def test_bad_preparations_are_named() -> None:
    with pytest.raises(ValueError, match=r"mode must be 'auto' or one of direct, .*got 'fp32'"):
        prepare(ONES, mode="fp32")
    with pytest.raises(ValueError, match="bits must be None, 4 or 8, got 3"):
        prepare(ONES, bits=3)
    with pytest.raises(ValueError, match=r"bits must be None, 4 or 8, got 8\.0"):
        prepare(ONES, bits=8.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"W must be 2-D, got 1 dimensions"):
        prepare(torch.ones(3))


def test_arguments_that_were_right_before_are_looked_at_where_they_differ() -> None:
    a, b = normal(20, 30), normal(30, 10, seed=1)
    for _ in range(2):
        assert torch.equal(matmul(a, b, mode="direct"), matmul(a, b, mode="direct", bits=8))
        for wrong in ({"tol": 2.0}, {"bits": [8]}, {"bits": 3}, {"mode": "fast"}, {"on_failure": "fp64"}):
            with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
                matmul(a, b, **{"tol": 0.1, "mode": "direct", **wrong})  # type: ignore[call-overload]
        with pytest.raises(ValueError, match=r"B must have 30 rows to match A of shape \(20, 30\), got 10"):
            matmul(a, b.mT, mode="direct")
        with pytest.raises(TypeError, match="must be a dense"):
            matmul(a, b.to_sparse(), mode="direct")
        with pytest.raises(TypeError, match="seed must be"):
            matmul(a, b, mode="direct", seed=True)


def test_wrong_arguments_are_not_taken_for_right_ones_that_equal_them() -> None:
    a, b = normal(21, 31), normal(31, 11, seed=1)
    with pytest.raises(ValueError, match=r"bits must be None, 4 or 8, got 8\.0"):
        matmul(a, b, mode="full", bits=8.0)  # type: ignore[call-overload]
    assert torch.equal(matmul(a, b, mode="full", bits=8), matmul(a, b, mode="full"))
    with pytest.raises(ValueError, match=r"bits must be None, 4 or 8, got 8\.0"):
        matmul(a, b, mode="full", bits=8.0)  # type: ignore[call-overload]


def test_sizes_may_be_a_compiler_s_symbols() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    double = torch.compile(lambda a, b: 2 * matmul(a, b, mode="full"), fullgraph=True, dynamic=True, backend=counter)
    for m in (5, 9, 17):
        a, b = normal(m, 30), normal(30, m + 3, seed=1)
        assert torch.equal(double(a, b), 2 * matmul(a, b, mode="full"))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        ((4, 8), (5, 3), ValueError, "B must have 8 rows"),
        ((8,), (8, 3), ValueError, "A must be 2-D"),
        ((1, 4, 8), (8, 3), ValueError, "A must be 2-D"),
        ((4, 0), (8, 3), ValueError, "B must have 0 rows"),
    ],
)
def test_the_operator_names_a_wrong_argument(
    a: tuple[int, ...], b: tuple[int, ...], error: type[Exception], message: str
) -> None:
    options = (1e-3, "auto", None, torch.float32, 0, "", "raise", "auto")
    with pytest.raises(error, match=message):
        torch.ops.residual.matmul(torch.zeros(a), torch.zeros(b), *options)
    with pytest.raises(TypeError, match="A must be"):  # not a product of its real part
        torch.ops.residual.matmul(torch.zeros(4, 8, dtype=torch.complex64), torch.zeros(8, 3), *options)
