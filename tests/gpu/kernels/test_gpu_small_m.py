"""The dense float product of few rows on a GPU: every kernel against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_kernels.floats import FORMATS
from cute_kernels.jit import get_kernel
from cute_kernels.scaled_gemm.api import explain_scaled_gemm, scaled_gemm
from cute_kernels.scaled_gemm.config import OperandFormat
from cute_kernels.scaled_gemm.small_m.config import ROWS, ReorderConfig, SmallMConfig, candidates, choose_small_m
from tests.gpu.kernels.test_gpu_floats import exact, generator, lost, operand, run
from tests.gpu.problems import needs_warp_groups

pytestmark = [pytest.mark.gpu, needs_warp_groups]

WEIGHTS = ("e5m2", "e4m3", "e2m1")
PAIRS = [(OperandFormat(a), OperandFormat(b)) for a in FORMATS for b in WEIGHTS]
WAYS = [
    (OperandFormat("e4m3"), OperandFormat("e2m1")),
    (OperandFormat("e2m1"), OperandFormat("e5m2")),
    (OperandFormat("e3m2"), OperandFormat("e2m1")),
    (OperandFormat("e5m2"), OperandFormat("e4m3")),
]
MX8, MX4, NV = OperandFormat("e4m3", 32, "ue8m0"), OperandFormat("e2m1", 32, "ue8m0"), OperandFormat("e2m1", 16, "e4m3")
SCALED = [
    (MX8, MX4),
    (NV, NV),
    (OperandFormat("e4m3"), MX4),
    (MX4, OperandFormat("e2m1")),
    (MX8, MX8),
    (OperandFormat("e3m2", 32, "ue8m0"), NV),
    (OperandFormat("e2m3"), OperandFormat("e5m2", 16, "e4m3")),
    (OperandFormat("e2m1", 16, "ue8m0"), OperandFormat("e2m1", 32, "e4m3")),
]
ORDERS = [ReorderConfig(OperandFormat(a), FORMATS[b].bits) for a in FORMATS for b in ("e4m3", "e2m1")]
ORDERS += dict.fromkeys(ReorderConfig(a, b.bits, True) for a, b in SCALED)
SHAPES = [(1, 1), (77, 130), (128, 128), (300, 264), (2100, 1200), (8200, 257)]  # (K, N)


def every(a: OperandFormat, b: OperandFormat) -> list[SmallMConfig]:
    return [config for rows in ROWS for config in candidates(rows, a, b)]


@pytest.mark.parametrize("pair", PAIRS + SCALED, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
@pytest.mark.configs([*ORDERS, *(c for pair in PAIRS + SCALED for c in every(*pair))])
def test_every_kernel_multiplies_small_integers_exactly(pair: tuple[OperandFormat, OperandFormat]) -> None:
    for k, n in SHAPES:
        b = operand(pair[1], n, k, 9)
        for m in (1, 7, 8, 9, 16, 20, 32, 33, 64):
            a = operand(pair[0], m, k, 1)
            truth = exact(a, b)
            for config in every(*pair):
                if m <= config.rows:
                    got = run(a, b, config, torch.full((m, n), torch.nan, device="cuda"))
                    assert torch.equal(got.double(), truth), f"{config.name} {m}x{k}x{n}"


@pytest.mark.parametrize("pair", PAIRS + SCALED, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
def test_all_codes_multiply_within_the_stated_bound(pair: tuple[OperandFormat, OperandFormat]) -> None:
    m, k, n = 60, 1000, 80
    a, b = operand(pair[0], m, k, 3, None), operand(pair[1], n, k, 4, None)
    x, y, truth = a.values(torch.float64), b.values(torch.float64), exact(a, b)
    bound = 2.0**-18 * (x.abs() @ y.abs().t()) if pair in SCALED else lost(x, y, 128)
    for config in candidates(64, *pair):
        got = run(a, b, config, torch.empty(m, n, device="cuda"))
        assert bool(((got.double() - truth).abs() <= bound).all()), config.name


@pytest.mark.configs(
    [replace(c, out=o, source=s) for c in every(*WAYS[0]) for o in ("float16", "float32") for s in ("none", "float16")]
)
def test_scales_c_and_bias_enter_once_and_nothing_else_is_written() -> None:
    for m, k, n in ((5, 2050, 200), (50, 700, 264)):
        a, b = operand(WAYS[0][0], m, k, 1), operand(WAYS[0][1], n, k, 2)
        left, right, bias = (torch.randn(size, generator=generator(5), device="cuda") for size in (m, n, n))
        c, sums = torch.randn(m, n, generator=generator(6), device="cuda").half(), exact(a, b)
        for rows, columns in ((left, right), (left[0], right[0]), (left, None), (None, right[3])):
            truth = 0.5 * sums
            if rows is not None:
                truth = truth * (rows.double()[:, None] if rows.dim() else rows.double())
            if columns is not None:
                truth = truth * columns.double()
            size = truth.abs() + bias.double().abs() + 2 * c.double().abs()
            for dtype in (torch.float16, torch.float32):
                for beta, source in ((0.0, None), (-2.0, c)):
                    whole = truth + bias.double() + (0.0 if source is None else beta * source.double())
                    for config in every(*WAYS[0]):
                        if m > config.rows:
                            continue
                        frame = torch.full((m + 2, n + 5), -7.0, device="cuda", dtype=dtype)
                        out = frame[1 : m + 1, 1 : n + 1]
                        x, y = replace(a, scale=rows), replace(b, scale=columns)
                        run(x, y, config, out, alpha=0.5, beta=beta, c=source, bias=bias)
                        bound = 2.0**-20 * size + torch.finfo(dtype).eps / 2 * whole.abs()
                        assert bool(((out.double() - whole).abs() <= bound).all()), config.name
                        out.fill_(-7.0)
                        assert bool((frame == -7.0).all()), "written outside"


def test_infinities_and_nan_reach_their_rows_and_columns_alone() -> None:
    a, b = operand(OperandFormat("e4m3"), 20, 300, 1), operand(OperandFormat("e5m2"), 100, 300, 2)
    clean = exact(a, b)
    for left in (True, False):
        codes = (a if left else b).packed_data.clone()
        codes[5, 130] = 0x7F  # NaN of e4m3 and of e5m2
        x, y = (replace(a, packed_data=codes), b) if left else (a, replace(b, packed_data=codes))
        for config in candidates(32, OperandFormat("e4m3"), OperandFormat("e5m2")):
            got = run(x, y, config, torch.empty(20, 100, device="cuda"))
            got, wanted = (got, clean) if left else (got.t(), clean.t())
            rest = torch.arange(len(got)) != 5
            assert bool(got[5].isnan().all()) and torch.equal(got[rest].double(), wanted[rest]), config.name


def test_factors_that_are_no_numbers_reach_their_rows_and_columns_alone() -> None:
    a, b = operand(MX8, 20, 300, 1), operand(MX4, 100, 300, 2)
    assert a.blocks is not None and b.blocks is not None
    clean = exact(a, b)
    for left in (True, False):
        for block in (3, 9):  # the last one is of fewer codes than the others
            blocks = (a if left else b).blocks.clone()
            blocks[5, block] = 0xFF  # NaN of ue8m0
            x, y = (replace(a, blocks=blocks), b) if left else (a, replace(b, blocks=blocks))
            for config in candidates(32, MX8, MX4):
                got = run(x, y, config, torch.empty(20, 100, device="cuda"))
                got, wanted = (got, clean) if left else (got.t(), clean.t())
                rest = torch.arange(len(got)) != 5
                assert bool(got[5].isnan().all()) and torch.equal(got[rest].double(), wanted[rest]), config.name


def test_runs_of_one_product_agree_in_every_bit_and_follow_their_operands() -> None:
    for pair in WAYS + SCALED[:2]:
        a, b = operand(pair[0], 33, 8192, 1, None), operand(pair[1], 1024, 8192, 2, None)
        for config in candidates(64, *pair):
            out = torch.empty(33, 1024, device="cuda")
            reference = run(a, b, config, out).clone()
            assert all(torch.equal(run(a, b, config, out), reference) for _ in range(10)), config.name
            for seed in range(3, 9):  # X is put in order by a kernel that this one starts beside
                other, small = operand(pair[0], 33, 8192, seed), operand(pair[1], 1024, 8192, 2)
                assert torch.equal(run(other, small, config, out).double(), exact(other, small)), config.name


def test_few_rows_take_these_kernels_and_graphs_hold_them() -> None:
    a, b = operand(OperandFormat("e4m3"), 16, 512, 1), operand(OperandFormat("e2m1"), 256, 512, 2)
    out = torch.zeros(16, 256, device="cuda")
    scaled_gemm(a, b, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaled_gemm(a, b, out=out)
    a.packed_data.copy_(operand(OperandFormat("e4m3"), 16, 512, 7).packed_data)
    out.zero_()
    graph.replay()
    assert torch.equal(out.double(), exact(a, b))
    plan = explain_scaled_gemm(a, b)
    assert isinstance(plan.config, SmallMConfig) and plan.kernel == plan.config.name
    assert get_kernel(plan.config).local_bytes == 0
    assert plan.config == choose_small_m(16, 256, 512, a.format, b.format)
    assert not isinstance(explain_scaled_gemm(operand(OperandFormat("e4m3"), 65, 512, 1), b).config, SmallMConfig)
    moved = torch.zeros(300, 300, dtype=torch.uint8, device="cuda")[3:259, 5:261].copy_(b.packed_data)
    assert torch.equal(scaled_gemm(a, replace(b, packed_data=moved)).double(), exact(a, b))
