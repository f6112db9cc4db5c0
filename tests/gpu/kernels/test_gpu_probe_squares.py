"""Products with random vectors by sums in float64 on an sm_90 GPU, and float16 copies that the same pass writes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels.estimate import probes
from cute_kernels.estimate.config import SUMS, double_configs
from cute_kernels.estimate.probe_squares import (
    launch_double_comparison,
    launch_probe_squares,
    probe_tiles,
)
from cute_kernels.jit.device import num_sms
from tests.gpu.kernels.test_gpu_probes import SHAPES, vectors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.configs(double_configs()),
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="sm_90"),
]

UNIT = 2.0**-53
WHOLE = [(1, 8), (40, 72), (256, 4096), (1000, 1008), (5000, 136), (4300, 520)]  # slices of whole loads


def matrix(m: int, n: int, dtype: torch.dtype, turned: bool, gap: int = 0) -> Tensor:
    """Return normal numbers, a view of a larger matrix."""
    generator = torch.Generator().manual_seed(m)
    if turned:
        return torch.randn(n, m + gap, generator=generator).to(dtype).cuda()[:, :m].mT
    return torch.randn(m, n + gap, generator=generator).to(dtype).cuda()[:, :n]


def launched(x: Tensor, w: Tensor, *copies: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(X W)^T`` and the sums of squares."""
    m = x.shape[0]
    y = torch.full((probes.PROBES, probes.padded(m)), math.nan, device="cuda")
    squares = torch.full((probe_tiles(m, x.dtype, 0), 2), math.nan, dtype=torch.float64).pin_memory()
    launch_probe_squares(x, w, y, squares, *copies)
    torch.cuda.synchronize()
    return y, squares


def check_sums(x: Tensor, w: Tensor, y: Tensor, squares: Tensor) -> None:
    m, n = x.shape
    exact = w[:, :n].double() @ x.double().mT  # (16, M)
    size = w[:, :n].double().abs() @ x.double().abs().mT  # (16, M)
    limit = 2.0**-24 * exact.abs() + 2 * (n + 64) * UNIT * size + 2.0**-149
    assert bool(((y[:, :m] - exact).abs() <= limit).all()) and not y[:, m:].any()
    wanted = [float(t.double().square().sum()) for t in (x, y)]
    assert squares.sum(0).tolist() == pytest.approx(wanted, rel=1e-12)
    rows = -(-m // squares.shape[0] // probes.TILE) * probes.TILE  # of a CTA
    assert float(squares[0, 0]) == pytest.approx(float(x[:rows].double().square().sum()), rel=1e-12)


def check_pass(shape: tuple[int, int], dtype: torch.dtype, turned: bool, gap: int = 0) -> None:
    x, w = matrix(*shape, dtype, turned, gap), vectors(shape[1])
    copies = (torch.empty_like(x, dtype=torch.float16), torch.empty(1, device="cuda"))
    check_sums(x, w, *launched(x, w, *(copies if dtype == torch.float32 else ())))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("gap", [0, 1])
def test_sums_of_16_bit_floats_are_those_of_float64(
    shape: tuple[int, int], turned: bool, gap: int, dtype: torch.dtype
) -> None:
    check_pass(shape, dtype, turned, gap)


@pytest.mark.parametrize("shape", WHOLE)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("gap", [0, 8])
@pytest.mark.parametrize("power", [0, -4, 8, -5, 9, -60, 90])
def test_float32_is_also_written_in_float16(shape: tuple[int, int], turned: bool, gap: int, power: int) -> None:
    if turned and shape[0] % 4:
        return
    x, w = matrix(*shape, torch.float32, turned, gap), vectors(shape[1])
    x.div_(x.abs().amax()).mul_(1.5 * 2.0**power)  # the largest is 1.5 times that
    scaled = torch.empty_like(x, dtype=torch.float16) if not gap else torch.empty_strided(
        x.shape, (1, shape[0]) if turned else (shape[1], 1), dtype=torch.float16, device="cuda"
    )  # fmt: skip
    scale = torch.full((1,), math.nan, device="cuda")
    check_sums(x, w, *launched(x, w, scaled, scale))
    factor = float(scale)
    assert math.frexp(factor)[0] == 0.5 and torch.equal(scaled, (x * factor).half())
    top = float(scaled.float().abs().amax())
    assert 2.0**-6 < top < 2.0**12 and (factor == 1 or not -8 < power < 9)
    plain = launched(x, w, scaled, scale)
    assert torch.equal(plain[0], launched(x, w, scaled, scale)[0])


def test_no_scale_is_taken_of_what_is_not_normal() -> None:
    for value in (0.0, math.inf, math.nan, 1e-40):
        x, w = torch.full((64, 64), value, device="cuda"), vectors(64)
        scaled, scale = torch.empty_like(x, dtype=torch.float16), torch.zeros(1, device="cuda")
        launched(x, w, scaled, scale)
        assert float(scale) == 1.0 and torch.equal(scaled.isfinite(), x.isfinite())


def check_comparison(shape: tuple[int, int], dtype: torch.dtype, powers: tuple[int, int]) -> None:
    m, n = shape
    c, w, product = matrix(m, n, dtype, False), vectors(n), vectors(m, seed=1)
    product[:, m:] = 0
    left, right = (torch.full((1,), 2.0**p, device="cuda") for p in powers)
    given = (c * 2.0 ** sum(powers)).contiguous()
    parts = torch.full((num_sms(0), SUMS), math.nan, dtype=torch.float64, device="cuda")
    sums = torch.full((SUMS + 4,), math.nan, dtype=torch.float64).pin_memory()
    squares = (torch.randn(300, 2).double().cuda(), torch.randn(5, 2).double().cuda())
    launch_double_comparison(given, w, product, left, right, parts, squares, sums)
    torch.cuda.synchronize()
    assert torch.equal(given, c)
    assert sums[SUMS:].tolist() == pytest.approx([float(x) for each in squares for x in each.sum(0)], abs=1e-10)
    found = probes.comparison_of(sums[:SUMS].numpy())
    claimed = w[:, :n].double() @ c.double().mT  # (16, M)
    difference = product[:, :m].double() - claimed
    gram = (difference @ difference.mT).cpu().numpy()
    assert np.linalg.norm(found.gram - gram) < 1e-12 * np.linalg.norm(gram)
    exact = [float(t.double().square().sum()) for t in (product, claimed, c)]
    assert [found.product, found.claimed, found.result] == pytest.approx(exact, rel=1e-12)
    assert found.out_of_range == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (8500, 68)])
@pytest.mark.parametrize("powers", [(0, 0), (3, -20)])
def test_a_comparison_gives_the_sums_of_float64(
    shape: tuple[int, int], powers: tuple[int, int], dtype: torch.dtype
) -> None:
    if dtype == torch.float32 or not any(powers):  # other products have no scales
        check_comparison(shape, dtype, powers)
