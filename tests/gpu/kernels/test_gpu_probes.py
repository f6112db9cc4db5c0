"""Products with random vectors on a GPU against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels.estimate import probes
from cute_kernels.estimate.config import default_configs

pytestmark = [pytest.mark.gpu, pytest.mark.configs(default_configs())]

SHAPES = [(1, 1), (33, 71), (256, 4096), (1000, 1003), (5000, 130)]


def vectors(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(probes.PROBES, probes.padded(count), generator=generator).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gap", [0, 1, 8])
def test_products_are_those_of_float64(shape: tuple[int, int], gap: int, dtype: torch.dtype) -> None:
    m, n = shape
    whole = torch.randn(m, n + gap, generator=torch.Generator().manual_seed(m)).to(dtype).cuda()
    x, w = whole[:, :n], vectors(n)
    assert probes.readable(x)
    y = probes.probe(x, w)
    exact = w[:, :n].double() @ x.double().mT  # (16, M)
    assert y.shape == (probes.PROBES, probes.padded(m)) and not y[:, m:].any()
    size = w[:, :n].double().abs() @ x.double().abs().mT  # (16, M)
    assert bool(((y[:, :m] - exact).abs() <= (n / 32 + 16) * 2.0**-24 * size).all())
    turned = x.mT.contiguous().mT  # column by column
    assert probes.probeable(turned)
    again = probes.probe(turned, w)
    assert again.shape == y.shape and not again[:, m:].any()
    assert bool(((again[:, :m] - exact).abs() <= (n / 32 + 16) * 2.0**-24 * size).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_comparison_gives_the_sums_of_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    m, n = shape
    c, w = torch.randn(m, n, generator=torch.Generator().manual_seed(n)).to(dtype).cuda(), vectors(n)
    product = vectors(m, seed=1)
    product[:, m:] = 0
    found = probes.compare(c, w, product)
    claimed = w[:, :n].double() @ c.double().mT  # (16, M)
    difference = product[:, :m].double() - claimed
    gram = (difference @ difference.mT).cpu().numpy()
    assert np.linalg.norm(found.gram - gram) < 1e-5 * np.linalg.norm(gram)
    exact = [float(t.double().square().sum()) for t in (product, claimed, c)]
    for mine, theirs in zip((found.product, found.claimed, found.result), exact, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert found.out_of_range == 0


def test_scales_out_of_bounds_are_counted() -> None:
    c, w, product = torch.ones(64, 64).cuda(), vectors(64), vectors(64)
    left, right = torch.ones(3000).cuda(), torch.ones(7).cuda()
    left[2999], left[0], right[3], right[6] = math.nan, math.inf, 1e-20, 1e20
    left[5] = 0  # of a line of zeros
    assert probes.compare(c, w, product, (left, right), (2.0**-30, 2.0**30)).out_of_range == 4
    assert probes.compare(c, w, product, (right,), (2.0**-30, 2.0**30)).out_of_range == 2


def test_what_is_not_finite_is_not_lost() -> None:
    c, w, product = torch.ones(40, 64).cuda(), vectors(64), vectors(40)
    c[39, 63] = math.nan
    found = probes.compare(c, w, product)
    assert math.isnan(found.result) and bool(np.isnan(found.gram).all())
