"""QR through any product: exact products give QR, quantized ones an error that follows their own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from residual.linalg.qr import qr


def matrix(m: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def losses(A: Tensor, Q: Tensor, R: Tensor) -> tuple[float, float]:
    """Relative error of Q R, and of orthogonality."""
    gram = Q.double().T @ Q.double() - torch.eye(Q.shape[1], dtype=torch.float64)
    product = Q.double() @ R.double()
    return float((A.double() - product).norm() / A.double().norm()), float(gram.norm()) / math.sqrt(Q.shape[1])


@settings(max_examples=80)
@given(
    m=st.integers(1, 20),
    n=st.integers(1, 20),
    block=st.integers(1, 24),
    method=st.sampled_from(["wy", "explicit"]),
    mode=st.sampled_from(["reduced", "complete"]),
    rank=st.integers(0, 20),
    seed=st.integers(0, 2**20),
)
def test_an_exact_product_gives_qr(*, m: int, n: int, block: int, method: str, mode: str, rank: int, seed: int) -> None:
    A = matrix(m, min(rank, m, n), seed) @ matrix(min(rank, m, n), n, seed + 1)  # also rank-deficient, also zero
    Q, R = qr(A, method=method, block=block, mode=mode, product=torch.matmul)
    inner = min(m, n) if mode == "reduced" else m
    assert Q.shape == (m, inner) and R.shape == (inner, n) and Q.dtype == R.dtype == torch.float64
    assert not R.tril(-1).any()
    assert float((Q @ R - A).norm()) <= 1e-13 * max(float(A.norm()), 1e-30)
    assert float((Q.T @ Q - torch.eye(inner, dtype=torch.float64)).norm()) < 1e-13


@pytest.mark.parametrize("method", ["wy", "explicit"])
def test_every_application_goes_through_the_product(method: str) -> None:
    shapes = []

    def counted(x: Tensor, y: Tensor) -> Tensor:
        shapes.append((*x.shape, y.shape[1]))
        return x @ y

    qr(matrix(12, 8), method=method, block=4, product=counted)
    if method == "explicit":
        assert shapes == [(12, 12, 8), (12, 12, 12)] * 8
    else:  # the update of the second panel, then Q from its last panel to its first
        assert shapes == [(4, 12, 4), (12, 4, 4), (4, 8, 4), (8, 4, 4), (4, 12, 8), (12, 4, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_error_follows_that_of_the_product(dtype: torch.dtype) -> None:
    A = matrix(96, 96, 3, dtype)
    direct, full = (losses(A, *qr(A, threshold=threshold)) for threshold in (math.inf, 0.0))
    for rough, fine in zip(direct, full, strict=True):
        assert 3e-3 < rough < 0.1 and fine < 2e-3 < 50 * fine < rough


def test_blocks_lose_far_less_than_explicit_reflectors() -> None:
    A = matrix(96, 96, 4)
    explicit, blocked = (losses(A, *qr(A, method=method)) for method in ("explicit", "wy"))
    assert all(5 * good < bad for good, bad in zip(blocked, explicit, strict=True))


def test_options_reach_the_quantized_product() -> None:
    A = matrix(64, 64, 5)
    paper: dict[str, Any] = {"scaling": "tensor", "rounding": "trunc", "rule": "mean"}
    errors = [
        losses(A, *qr(A, bits=bits, threshold=t, **paper))[0]
        for bits, t in ((8, 0.0), (8, 0.5), (8, math.inf), (4, math.inf))
    ]
    assert errors == sorted(errors) and errors[0] * 10 < errors[2]


def test_rank_one_and_scaled_matrices() -> None:
    A = torch.outer(matrix(30, 1, 6)[:, 0], matrix(20, 1, 7)[:, 0])
    for factor in (1e-30, 1.0, 1e30):
        error, skew = losses(A * factor, *qr(A * factor, block=5))
        assert error < 1e-3 and skew < 1e-3


@pytest.mark.parametrize("method", ["wy", "explicit"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_columns_that_are_reduced_already_do_not_cancel(method: str, sign: float) -> None:
    A = sign * torch.eye(6, dtype=torch.float64) + 1e-9 * matrix(6, 6, 8)
    assert max(losses(A, *qr(A, method=method, product=torch.matmul))) < 1e-14


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (0, 3)])
@pytest.mark.parametrize("method", ["wy", "explicit"])
def test_empty_matrices(shape: tuple[int, int], method: str) -> None:
    Q, R = qr(torch.empty(shape), method=method)
    assert Q.shape == (shape[0], 0) and R.shape == (0, shape[1])


@pytest.mark.parametrize(
    ("kind", "message", "A", "options"),
    [
        (TypeError, r"A must be a torch\.Tensor, got int", 3, {}),
        (TypeError, r"A must be float32 or float64, got torch\.float16", torch.ones(2, 2).half(), {}),
        (ValueError, "A must be 2-D, got 1 dimensions", torch.ones(2), {}),
        (ValueError, "A must be finite", torch.ones(2, 2) * math.nan, {}),
        (ValueError, "method must be one of .*, got 'givens'", torch.ones(2, 2), {"method": "givens"}),
        (ValueError, "mode must be one of .*, got 'r'", torch.ones(2, 2), {"mode": "r"}),
        (ValueError, "block must be an integer of at least 1, got 0", torch.ones(2, 2), {"block": 0}),
        (ValueError, "bits must be an integer from 2 to 8, got 9", torch.ones(2, 2), {"bits": 9}),
        (TypeError, r"exclude each other, got \['bits'\]", torch.ones(2, 2), {"bits": 8, "product": torch.matmul}),
    ],
)
def test_bad_arguments_are_named(kind: type[Exception], message: str, A: Any, options: dict[str, Any]) -> None:
    with pytest.raises(kind, match=message):
        qr(A, **options)
