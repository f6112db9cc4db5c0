"""The library's Algorithm 1 is the paper's: against numpy on its five distributions, and on its printed example."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from residual.paper.gemm import PaperReport, gemm
from residual.paper.quantize import Quantizer, quantize_operand
from residual.paper.thresholds import kept_entries
from tests.compensated.paper_algorithm import Options, algorithm_1

Array = NDArray[np.floating]
N = 40

# Section 3.1 B, as printed.
A = [[0.2735, -0.1588, 0.1218], [0.0953, 1.5801, -0.4861], [-0.2394, 0.1602, 0.4294]]
B = [[3.9284, -0.0195, -0.3836], [-0.3288, 2.2353, -0.1895], [-0.1376, 0.0545, -0.3641]]
A_KEPT = [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
B_KEPT = [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
EXAMPLE = {"levels": "2^(N-2)", "rule": "example"}


def draw(distribution: str, seed: int) -> Array:
    """Two matrices of a distribution of Figure 6."""
    g = np.random.default_rng(seed)
    draws = {
        "uniform": lambda: g.random((2, N, N)),
        "normal": lambda: g.normal(10, 3, (2, N, N)),
        "exponential": lambda: g.exponential(1 / 4, (2, N, N)),
        "poisson": lambda: g.poisson(10, (2, N, N)).astype(np.float64),
        "chi-square": lambda: g.chisquare(1, (2, N, N)),
    }
    return draws[distribution]()


def reported(x: Array, y: Array, **options: Any) -> tuple[Array, PaperReport]:
    found = gemm(torch.from_numpy(x), torch.from_numpy(y), return_report=True, **options)
    assert isinstance(found, tuple)
    return found[0].numpy(), found[1]


@pytest.mark.parametrize("scaling", ["tensor", "vector"])
@pytest.mark.parametrize("rounding", ["trunc", "nearest"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("distribution", ["uniform", "normal", "exponential", "poisson", "chi-square"])
def test_algorithm_1_is_the_papers(distribution: str, bits: int, rounding: str, scaling: str) -> None:
    x, y = draw(distribution, 1)
    level = 1.01 * float(np.quantile(x, 0.6))  # no integer of the Poisson distribution equals a multiple of it
    thresholds = {"eq14": level / (x @ y).mean(), "example": level / (x @ y).mean(), "mean": level / (2 * x.mean())}
    for rule, threshold in thresholds.items():
        for eta in (0.0, 1.0):
            kind: dict[str, Any] = {"bits": bits, "threshold": threshold, "rule": rule, "scaling": scaling}
            kind |= {"rounding": rounding, "eta": eta, "vector_length": 1}
            expected = algorithm_1(x, y, Options(**kind))
            found, report = reported(x, y, **kind)
            assert (report.density_a, report.density_b) == expected.densities
            assert 0.05 < report.density < 0.95 and report.path_a == ("spmm" if eta else "gemm")
            np.testing.assert_allclose(found, expected.product, rtol=1e-13)
            x32, y32 = x.astype(np.float32), y.astype(np.float32)
            np.testing.assert_allclose(
                reported(x32, y32, **kind)[0], algorithm_1(x32, y32, Options(**kind)).product, rtol=1e-6
            )


@pytest.mark.parametrize("threshold", [0.25, 0.28, 0.31, 0.34])
def test_the_masks_of_the_printed_example(threshold: float) -> None:
    x, y = torch.tensor(A), torch.tensor(B)
    product = gemm(x, y, threshold=torch.inf, levels="2^(N-2)")
    assert isinstance(product, torch.Tensor)
    found = kept_entries(x, product, threshold, "example", False, 1)
    assert found.int().tolist() == A_KEPT
    assert kept_entries(y.T, product.T, threshold, "example", False, 1).T.int().tolist() == B_KEPT
    _, report = reported(np.array(A), np.array(B), threshold=threshold, **EXAMPLE)  # type: ignore[arg-type]
    assert (report.density_a, report.density_b) == (4 / 9, 2 / 9)


def test_the_integers_and_residuals_of_the_printed_example() -> None:
    how = Quantizer(8, None, "trunc", 64)
    left, right = (quantize_operand(torch.tensor(x), how, "x") for x in (A, B))
    assert left.leading.integers.tolist() == [[11, -6, 4], [3, 64, -19], [-9, 6, 17]]
    # printed 63 at (0, 0): a product with the rounded lambda ended below 64
    assert right.leading.integers.tolist() == [[64, 0, -6], [-5, 36, -3], [-2, 0, -5]]
    ra = left.values - left.leading.integers * left.leading.scale
    printed = [[0.0020, -0.0107, 0.0231], [0.0212, 0.0, -0.0170], [-0.0172, 0.0120, 0.0097]]
    assert torch.allclose(ra.double(), torch.tensor(printed, dtype=torch.float64), atol=1e-4)
    assert int(left.residual.integers.abs().max()) == int(right.residual.integers.abs().max()) == 64


def test_the_errors_of_the_printed_example() -> None:
    truth, errors = np.array(A) @ np.array(B), {}
    for name, threshold in (("direct", np.inf), ("sparse", 0.3)):
        found, _ = reported(np.array(A), np.array(B), threshold=threshold, eta=1.0, **EXAMPLE)  # type: ignore[arg-type]
        errors[name] = float(np.linalg.norm(found - truth) / np.linalg.norm(truth))
    assert errors["direct"] == pytest.approx(0.035, abs=0.004)  # Table 2; 0.0322 with 64 in place of 63
    assert errors["sparse"] == pytest.approx(0.011, abs=0.001)


def test_the_old_name_of_the_examples_rule_still_works() -> None:
    x, y = torch.tensor(A), torch.tensor(B)
    with pytest.warns(DeprecationWarning, match="rule='eq14_signed' is now rule='example'"):
        found = gemm(x, y, threshold=0.3, rule="eq14_signed")
    expected = gemm(x, y, threshold=0.3, rule="example")
    assert isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor) and torch.equal(found, expected)
