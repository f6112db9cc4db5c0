"""The passes that pick a product on a GPU, gated products, and their verdict, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.convert.digits import Digits, digits
from cute_kernels.estimate import look, verdict
from cute_kernels.gemm import cuda as gemm_cuda
from cute_kernels.gemm.config import select_products
from cute_kernels.gemm.heuristics import candidates
from cute_kernels.jit.device import current_arch

GATED = [
    replace(config, out="float32", gated=True)
    for planes in (1, 2, 3)
    for config in candidates(select_products(planes, planes, None), "sm_90a")
]
pytestmark = [pytest.mark.gpu, pytest.mark.configs([*look.default_configs(), verdict.VerdictConfig(), *GATED])]
SHAPES = [(1, 1, 1), (33, 130, 20), (70, 17, 300), (5000, 1100, 260), (1024, 2048, 512)]


def real(m: int, n: int, seed: int, layout: str = "row") -> Tensor:
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(seed)).cuda()
    return x.mT.contiguous().mT if layout == "column" else x


def draw(n: int) -> look.LookProbes:
    w = torch.zeros(look.padded_length(n), look.PROBES)
    w[:n] = torch.randn(n, look.PROBES, generator=torch.Generator().manual_seed(3))
    return look.LookProbes(w.cuda(), torch.linalg.vector_norm(w, dim=1).mul(1 + 2.0**-20).cuda())


def limits_for(tol: float) -> look.LookLimits:
    factors = torch.full((2, look.FACTORS), 1.66, dtype=torch.float64).cuda()
    return look.LookLimits(tol, factors, (verdict.product_rounding(1), verdict.product_rounding(2)))


def state() -> look.LookState:
    return look.state_for(
        torch.device("cuda", torch.cuda.current_device()), gemm_cuda.gate_size(torch.device("cuda", 0))
    )


def digit_product(left: Digits, right: Digits, planes: int) -> Tensor:
    """The product of `planes` digits per element in float64."""
    a, b = ([p.double() for p in each.planes[:planes]] for each in (left, right))
    total = torch.zeros(a[0].shape[0], b[0].shape[1], dtype=torch.float64, device="cuda")
    for i in range(planes):
        for j in range(planes - i):
            total += a[i] @ b[j] * 2.0 ** (-8 * (i + j))
    return total * left.scale.double()[:, None] * right.scale.double()


@pytest.mark.parametrize("share", [4, 8])
@pytest.mark.parametrize("planes", [2, 3])
@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("shape", SHAPES)
def test_errors_are_those_of_float64(shape: tuple[int, int, int], layout: str, planes: int, share: int) -> None:
    m, k, n = shape
    a, b, probes, memory = real(m, k, 1, layout), real(k, n, 2, layout), draw(n), state()
    left, right = digits(a, 8, planes, axis=1), digits(b, 8, planes, axis=0, transpose=True)
    found = look.look_right(b, probes, right.scale, planes, share=share)
    exact = a.double() @ b.double()
    for _ in range(2):  # the tickets are back
        look.look_left(a, found, left.scale, right.scale, limits_for(1e-2), memory, share=share)
        record = memory.record.tolist()
        w = probes.vectors[:n].double()
        assert record[6] == pytest.approx(float((exact @ w).norm()) / 4, rel=1e-4)
        assert not memory.tickets.any() and record[7] == 0
        for r in range(2):
            error = float(((exact - digit_product(left, right, planes - 1 + r)) @ w).norm()) / 4
            assert abs(record[3 * r] - error) <= record[3 * r + 2] / 1.66 + 1e-9 * record[6]


@pytest.mark.parametrize("planes", [2, 3])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_the_picked_product_runs_and_its_verdict_holds(planes: int, captured: bool) -> None:
    if current_arch() != "sm_90a":
        pytest.skip("gated products take WGMMA")
    m, k, n = 700, 1024, 520
    a, b, probes, memory = real(m, k, 1), real(k, n, 2), draw(n), state()
    out, words = torch.empty(m, n, device="cuda"), torch.empty(verdict.WORDS, dtype=torch.float64, device="cuda")
    exact = a.double() @ b.double()

    def product(limits: look.LookLimits) -> None:
        left = digits(a, 8, planes, axis=1)
        right = digits(b, 8, planes, axis=0, transpose=True)
        found = look.look_right(b, probes, right.scale, planes)
        look.look_left(a, found, left.scale, right.scale, limits, memory)
        scales = left.scale, right.scale
        warps = [
            gemm_cuda.gated_gemm(left.planes[:i], right.planes[:i], scales, out, memory.gate)
            for i in (planes - 1, planes)
        ]
        verdict.start_verdict(memory, (warps[0], warps[1]), planes, (m, n), words)

    low, high = (3e-2, 3e-4) if planes == 2 else (3e-4, 3e-6)
    for tol, wanted in ((low, planes - 1), (high, planes), (1e-9, 0)):
        limits = limits_for(tol)
        product(limits)  # compiled
        out.fill_(math.nan)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                product(limits)
            for _ in range(2):
                graph.replay()
        else:
            product(limits)
        found = verdict.read_verdict(words.tolist())
        assert found.planes == wanted
        if wanted == 0:
            assert bool(out.isnan().all()) and found.upper == math.inf
            continue
        error = float((exact - out.double()).norm() / exact.norm())
        assert error <= found.upper <= tol * 1.05
        assert found.error == pytest.approx(error, rel=0.25)
        assert found.norm == pytest.approx(float(out.double().norm()), rel=5e-3)
