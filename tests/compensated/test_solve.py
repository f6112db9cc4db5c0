"""Systems are solved to float64 accuracy, whatever the factorization's product, or an error says that they are not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from residual.linalg.solve import solve


def system(n: int, condition: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix of this condition number, its singular values in geometric progression, and a right-hand side."""
    g = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))[0] for _ in range(2))
    s = torch.logspace(0, -math.log10(condition), n, dtype=torch.float64)
    return (u * s) @ v, torch.randn(n, generator=g, dtype=torch.float64)


def backward(A: Tensor, x: Tensor, b: Tensor) -> float:
    r = b.double() - A.double() @ x
    return float(r.norm() / (A.double().norm() * x.norm() + b.double().norm()))


@pytest.mark.parametrize("factorization", ["qr", "lu"])
@pytest.mark.parametrize("options", [{}, {"threshold": math.inf}, {"bits": 6}], ids=["full", "direct", "6 bits"])
@pytest.mark.parametrize("condition", [1e1, 1e4, 1e8])
def test_the_backward_error_is_what_was_asked_for(
    factorization: str, options: dict[str, Any], condition: float
) -> None:
    A, b = system(80, condition)
    x, report = solve(A, b, 1e-14, factorization=factorization, restart=80, **options)
    assert x.dtype == torch.float64 and x.shape == b.shape
    assert backward(A, x, b) == pytest.approx(report.backward_error, rel=1e-3, abs=1e-18)
    assert report.backward_error <= 1e-14
    assert len(report.history) == report.refinements + 1 and report.history[-1] == report.backward_error
    exact = torch.linalg.solve(A, b)
    assert float((x - exact).norm() / exact.norm()) < 1e-13 * condition


def test_a_better_product_needs_fewer_steps() -> None:
    A, b = system(96, 1e3, 1)
    steps = [solve(A, b, threshold=t)[1].iterations for t in (0.0, math.inf)] + [
        solve(A, b, product=torch.matmul)[1].iterations
    ]
    assert steps[2] < steps[0] < steps[1]


@pytest.mark.parametrize("factorization", ["qr", "lu"])
def test_exact_factors_need_one_step_a_refinement(factorization: str) -> None:
    A, b = system(70, 1e3, 5)
    _, report = solve(A, b, factorization=factorization, block=16, product=torch.matmul)
    assert report.refinements <= 2 and report.iterations == report.refinements


def test_several_right_hand_sides_and_float32() -> None:
    A, b = system(40, 100, 2)
    B = torch.stack([b, 2 * b.flip(0), torch.zeros_like(b)], 1)
    x, report = solve(A, B)
    for i in range(2):
        assert backward(A, x[:, i], B[:, i]) <= report.backward_error <= 1e-15
    assert not x[:, 2].any()
    single, _ = solve(A.float(), b.float())
    assert single.dtype == torch.float64 and backward(A.float(), single, b.float()) <= 1e-15


def test_rows_of_very_different_sizes() -> None:
    A, b = system(50, 10, 3)
    scale = torch.logspace(-30, 30, 50, dtype=torch.float64)
    _, report = solve(A * scale[:, None], b * scale, 1e-15)
    assert report.backward_error <= 1e-15 and report.iterations <= 12


def test_a_zero_right_hand_side_needs_nothing() -> None:
    x, report = solve(torch.eye(3), torch.zeros(3))
    assert not x.any() and (report.refinements, report.iterations, report.backward_error) == (0, 0, 0.0)


@pytest.mark.parametrize("shape", [(0,), (0, 2), (4, 0)])
def test_empty_systems(shape: tuple[int, ...]) -> None:
    x, report = solve(torch.eye(shape[0]), torch.ones(shape))
    assert x.shape == shape and report.iterations == 0


@pytest.mark.parametrize("factorization", ["qr", "lu"])
def test_what_cannot_be_solved_raises(factorization: str) -> None:
    singular = torch.ones(4, 4)
    with pytest.raises(ArithmeticError, match=r"singular|was not met|diverged"):
        solve(singular, torch.arange(4.0), factorization=factorization, product=torch.matmul)
    with pytest.raises(ArithmeticError, match="A is singular: it has a row of zeros"):
        solve(torch.diag(torch.tensor([1.0, 0.0])), torch.ones(2), factorization=factorization)
    A, b = system(60, 1e12, 4)
    with pytest.raises(ArithmeticError, match=r"tol 1e-15 was not met after 2 refinements and .* GMRES steps"):
        solve(A, b, factorization=factorization, bits=4, threshold=math.inf, max_refinements=2, restart=5)


EYE = torch.eye(3)


@pytest.mark.parametrize(
    ("kind", "message", "operands", "options"),
    [
        (TypeError, r"A must be a torch\.Tensor, got int", (3, EYE), {}),
        (TypeError, r"b must be float32 or float64, got torch\.int64", (EYE, torch.ones(3).long()), {}),
        (ValueError, "A must be finite", (EYE * math.inf, EYE), {}),
        (ValueError, r"A must be a square matrix, got shape \(2, 3\)", (EYE[:2], EYE), {}),
        (ValueError, r"b must have shape \(3,\) or \(3, R\), got \(2,\)", (EYE, torch.ones(2)), {}),
        (ValueError, r"tol must be in \(0, 1\), got 0", (EYE, EYE), {"tol": 0}),
        (ValueError, "factorization must be one of .*, got 'svd'", (EYE, EYE), {"factorization": "svd"}),
        (ValueError, "restart must be at least 1, got 0", (EYE, EYE), {"restart": 0}),
        (ValueError, "max_refinements must be at least 1, got 0", (EYE, EYE), {"max_refinements": 0}),
    ],
)
def test_bad_arguments_are_named(
    kind: type[Exception], message: str, operands: tuple[Any, Any], options: dict[str, Any]
) -> None:
    with pytest.raises(kind, match=message):
        solve(*operands, **options)
