"""The error of a product of digits as two passes over its operands tell it, against float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels.convert.digits import digits
from cute_kernels.estimate import probes
from cute_kernels.estimate.config import default_configs as probe_configs
from cute_kernels.estimate.remainder_probes import (
    TF32_MARGIN,
    default_configs,
    probe_remainder,
    start_remainder_estimate,
)
from cute_kernels.gemm.api import gemm
from cute_kernels.gemm.cuda import sum_of_squares_size
from residual.cuda import early_check
from residual.cuda.operand import gpu_operand
from residual.cuda.plans import COUNTS, GpuPlan
from residual.error.factor import confidence
from tests.gpu.kernels.test_gpu_probes import vectors
from tests.gpu.problems import needs_warp_groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.configs([*default_configs(), *probe_configs()]),
]
BOUNDS = (2.0**-30, 2.0**30)
SHAPES = [(40, 71, 33), (1000, 1003, 130), (2051, 1100, 2063), (8500, 96, 300), (1100, 5000, 200)]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"rows": lambda x: x, "columns": lambda x: x.mT.contiguous().mT}


def lengths(x: Tensor) -> Tensor:
    return x.double().norm(dim=1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_left_out_is_that_of_float64(shape: tuple[int, int, int], layout: str, bits: int) -> None:
    (m, k, n), generator = shape, torch.Generator().manual_seed(sum(shape))
    a, b = (torch.randn(s, generator=generator).cuda() for s in ((m, k), (k, n)))
    a[:, 0] *= 30  # so that scales, and with them what is left, differ
    b[k // 2] *= 10
    a, b = LAYOUTS[layout](a), LAYOUTS[layout](b)
    w = vectors(n)
    left, right = (digits(x, bits, 1, axis=axis, transpose=axis == 0) for x, axis in ((a, 1), (b, 0)))

    made = probe_remainder(b, w, right.scale, bits)
    exact = b.double(), b.double() - right.scale.double() * right.planes[0].double()  # (K, N) each
    for found, of in zip(made, exact, strict=True):
        wanted = w[:, :n].double() @ of.mT  # (16, K)
        size = (w[:, :n].double().square() @ of.mT.square()).sqrt()
        assert found.shape == (16, probes.padded(k)) and not found[:, k:].any()
        assert bool(((found[:, :k] - wanted).abs() <= 2.0**-8 * (size + wanted.abs()) + 1e-12).all())

    product = left.planes[0].double() @ right.planes[0].double()
    product *= left.scale.double()[:, None] * right.scale.double()
    missed = (a.double() @ b.double() - product) @ w[:, :n].mT.double()  # (M, 16)
    gram, norm = (
        (missed.mT @ missed).cpu().numpy(),
        float((a.double() @ (b.double() @ w[:, :n].mT.double())).square().sum()),
    )

    probes.arm_result()
    start_remainder_estimate(a, made, left.scale, right.scale, bits, BOUNDS)
    found = probes.wait_result(a.device)
    assert np.linalg.norm(found.gram - gram) < 2 * (TF32_MARGIN - 1) * np.linalg.norm(gram)
    assert found.product == pytest.approx(norm, rel=1e-2)
    assert found.out_of_range == 0 and found.claimed == found.result == 0


@pytest.mark.parametrize("side", ["left", "right"])
def test_scales_out_of_bounds_are_counted(side: str) -> None:
    a, b, w = torch.randn(100, 64).cuda(), torch.randn(64, 50).cuda(), vectors(50)
    if side == "left":
        a[3], a[7, 2] = a[3] * 2.0**-60, torch.nan
    else:
        b[:, 3], b[2, 7] = b[:, 3] * 2.0**60, torch.inf
    left, right = digits(a, 8, 1, axis=1), digits(b, 8, 1, axis=0, transpose=True)
    probes.arm_result()
    start_remainder_estimate(a, probe_remainder(b, w, right.scale, 8), left.scale, right.scale, 8, BOUNDS)
    assert probes.wait_result(a.device).out_of_range == 2


@needs_warp_groups
@pytest.mark.parametrize("mode", ["direct", "full", "full4"])
@pytest.mark.parametrize("shape", [(64, 96, 128), (2048, 256, 2048), (1111, 130, 777), (300, 4096, 5000)])
def test_a_product_leaves_the_squares_of_its_entries(shape: tuple[int, int, int], mode: str) -> None:
    (m, k, n), (planes, terms) = shape, COUNTS[mode]
    left = digits(torch.randn(m, k).cuda(), 8, planes, axis=1)
    right = digits(torch.randn(k, n).cuda(), 8, planes, axis=0, transpose=True)
    squares = torch.zeros(sum_of_squares_size(torch.device("cuda", 0)), pin_memory=True)

    def product(squares: Tensor | None) -> Tensor:
        return gemm(
            left.planes, right.planes, terms=terms, scale_a=left.scale, scale_b=right.scale, out_dtype=torch.float32,
            sum_of_squares=squares,
        )  # fmt: skip

    found = product(squares)
    torch.cuda.synchronize()
    assert float(squares.double().sum()) == pytest.approx(float(found.double().square().sum()), rel=1e-5)
    assert torch.equal(found, product(None))


@needs_warp_groups
def test_a_product_that_is_off_is_not_believed() -> None:
    """Its norm must agree with what the vectors say of the true one."""
    a, b, w = torch.randn(2048, 1280).cuda(), torch.randn(1280, 2048).cuda(), vectors(2048)
    for factor, believed in ((1.0, True), (7.0, False), (0.1, False)):
        C = early_check.start(gpu_operand(a), gpu_operand(b.mT), GpuPlan("direct", 8), w)
        torch.cuda.synchronize()
        early_check._squares(0).sums.mul_(factor**2)
        found, far = early_check.finish(C, confidence(0))
        assert (found is not None) == believed and not far
        if found is not None:
            exact = a.double() @ b.double()
            truth = float((C.double() - exact).norm() / exact.norm())
            assert found.relative == pytest.approx(truth, rel=0.1) and truth < found.upper < 1.5 * truth
