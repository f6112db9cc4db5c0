"""Few rows with block scales that multiply the sums of their block, on a GPU: every kernel against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import magicube_cutlass as mc
from cute_kernels.scaled_gemm.api import FloatOperand, explain_scaled_gemm, scaled_gemm
from cute_kernels.scaled_gemm.config import OperandFormat
from cute_kernels.scaled_gemm.small_m.config import (
    ROWS,
    ReorderConfig,
    SmallMConfig,
    candidates,
    choose_small_m,
    takes_block_sums,
)
from magicube_cutlass.nn import QuantConfig, QuantLinear
from tests.gpu.kernels.test_gpu_floats import exact, lost, operand, run
from tests.gpu.problems import needs_warp_groups
from tests.kernels.scaled_gemm.test_small_m_blocks import E2M1, E4M3, MX4, MX8, NV

pytestmark = [pytest.mark.gpu, needs_warp_groups]
PAIRS = [
    (E4M3, MX4),
    (MX8, MX4),
    (MX8, MX8),
    (MX4, OperandFormat("e5m2", 32, "ue8m0")),
    (OperandFormat("e2m3", 32, "ue8m0"), E2M1),
    (OperandFormat("e5m2"), MX8),
    (NV, NV),
    (E4M3, NV),
    (MX8, OperandFormat("e2m1", 16, "ue8m0")),
]
MOST = {pair: max(rows for rows in ROWS if takes_block_sums(rows, 512, *pair)) for pair in PAIRS}


def every(a: OperandFormat, b: OperandFormat) -> list[SmallMConfig]:
    return [config for rows in ROWS if rows <= MOST[a, b] for config in candidates(rows, a, b, block_sums=True)]


def names(pair: tuple[OperandFormat, OperandFormat]) -> str:
    return f"{pair[0].name}-{pair[1].name}"


@pytest.mark.parametrize("pair", PAIRS, ids=names)
@pytest.mark.configs(
    [*(ReorderConfig(a, b.bits, False, True) for a, b in PAIRS), *(c for p in PAIRS for c in every(*p))]
)
def test_every_kernel_multiplies_small_integers_exactly(pair: tuple[OperandFormat, OperandFormat]) -> None:
    for k, n in ((512, 1), (1024, 130), (1536, 264), (2560, 1200), (8704, 257)):
        b = operand(pair[1], n, k, 9)
        for m in (1, 7, 8, 9, 16, 20, 32, 33, 64):
            if m > MOST[pair]:
                continue
            a = operand(pair[0], m, k, 1)
            truth = exact(a, b)
            for config in every(*pair):
                if m <= config.rows:
                    got = run(a, b, config, torch.full((m, n), torch.nan, device="cuda"))
                    assert torch.equal(got.double(), truth), f"{config.name} {m}x{k}x{n}"


@pytest.mark.parametrize("pair", PAIRS, ids=names)
def test_all_codes_multiply_within_the_stated_bound(pair: tuple[OperandFormat, OperandFormat]) -> None:
    m, k, n = min(MOST[pair], 30), 1536, 80
    a, b = operand(pair[0], m, k, 3, None), operand(pair[1], n, k, 4, None)
    bound = (2 if pair[1].block == 16 else 1) * lost(a.values(torch.float64), b.values(torch.float64), 32)
    for config in candidates(min(MOST[pair], 32), *pair, block_sums=True):
        got = run(a, b, config, torch.empty(m, n, device="cuda"))
        assert bool(((got.double() - exact(a, b)).abs() <= bound).all()), config.name


def test_every_scale_is_the_power_that_it_stands_for() -> None:
    # One value that is not zero in each row of weights: products of powers of two, which float32 has.
    m, k, n = 16, 8192, 256
    a, b = operand(E4M3, m, k, 1), operand(MX8, n, k, 2)
    one = torch.zeros(m, k, dtype=torch.uint8, device="cuda")
    codes = torch.arange(n, device="cuda", dtype=torch.uint8)[:, None].expand(n, k // 32).contiguous()
    weights = torch.zeros(n, k, dtype=torch.uint8, device="cuda")
    block = torch.arange(n, device="cuda") % (k // 32)
    one[:] = 0x38  # 1.0
    weights[torch.arange(n, device="cuda"), 32 * block + 7] = 0x38
    b = replace(b, packed_data=weights, blocks=codes)
    for config in candidates(16, E4M3, MX8, block_sums=True):
        got = run(replace(a, packed_data=one), b, config, torch.empty(m, n, device="cuda"))
        wanted = torch.ldexp(torch.ones(n, dtype=torch.float64), torch.arange(n) - 127).float().cuda()
        assert torch.equal(got[:, :255], wanted[None, :255].expand(m, 255)), config.name
        assert bool(got[:, 255].isnan().all())
    powers = (torch.arange(m, device="cuda") * 17).to(torch.uint8)[:, None].expand(m, k // 32).contiguous()
    x = replace(operand(MX8, m, k, 1), packed_data=one, blocks=powers)
    plain = replace(b, blocks=torch.full_like(codes, 127))
    for config in candidates(16, MX8, MX8, block_sums=True):
        got = run(x, plain, config, torch.empty(m, n, device="cuda"))
        wanted = torch.ldexp(torch.ones(m, dtype=torch.float64), torch.arange(m) * 17 - 127).float().cuda()
        assert torch.equal(got[:15], wanted[:15, None].expand(15, n)) and bool(got[15].isnan().all()), config.name


def test_scales_that_are_no_numbers_reach_their_rows_and_columns_alone() -> None:
    a, b = operand(MX8, 20, 1024, 1), operand(MX4, 100, 1024, 2)
    assert a.blocks is not None and b.blocks is not None
    clean = exact(a, b)
    for left in (True, False):
        for block in (3, 31):
            blocks = (a if left else b).blocks.clone()
            blocks[5, block] = 0xFF  # NaN of ue8m0
            x, y = (replace(a, blocks=blocks), b) if left else (a, replace(b, blocks=blocks))
            for config in candidates(32, MX8, MX4, block_sums=True):
                got = run(x, y, config, torch.empty(20, 100, device="cuda"))
                got, wanted = (got, clean) if left else (got.t(), clean.t())
                rest = torch.arange(len(got)) != 5
                assert bool(got[5].isnan().all()) and torch.equal(got[rest].double(), wanted[rest]), config.name


@pytest.mark.parametrize("pair", [*PAIRS[:3], (NV, NV)], ids=names)
def test_runs_of_one_product_agree_in_every_bit_and_follow_their_operands(
    pair: tuple[OperandFormat, OperandFormat],
) -> None:
    n, k = 9000, 8192
    a, b = operand(pair[0], 16, k, 1, None), operand(pair[1], n, k, 2, None)
    small = operand(pair[1], n, k, 2)
    others = [(other, exact(other, small)) for other in (operand(pair[0], 16, k, seed) for seed in range(3, 6))]
    for config in candidates(16, *pair, block_sums=True):
        out = torch.empty(16, n, device="cuda")
        reference = run(a, b, config, out).clone()
        different = torch.zeros((), dtype=torch.bool, device="cuda")
        for _ in range(300):
            different |= (run(a, b, config, out) != reference).any()
        assert not bool(different), config.name
        for other, wanted in others:  # X is put in order by a kernel that this one starts beside
            assert torch.equal(run(other, small, config, out).double(), wanted), config.name


def test_few_rows_take_these_kernels_wherever_their_scales_lie() -> None:
    a, b = operand(MX8, 16, 512, 1), operand(MX4, 256, 512, 2)
    plan = explain_scaled_gemm(a, b)
    assert isinstance(plan.config, SmallMConfig) and plan.config.block_sums
    assert plan.config == choose_small_m(16, 256, 512, a.format, b.format)
    assert b.blocks is not None
    moved = torch.zeros(256 * 16 + 16, dtype=torch.uint8, device="cuda")[3 : 256 * 16 + 3].view(256, 16)
    apart = torch.zeros(256, 40, dtype=torch.uint8, device="cuda")[:, 7:23]
    for blocks in (moved, apart):
        there: FloatOperand = replace(b, blocks=blocks.copy_(b.blocks))
        assert torch.equal(scaled_gemm(a, there).double(), exact(a, b))


@pytest.mark.parametrize("act", ["e4m3", "mxfp8"])
def test_layers_of_mxfp4_weights_replay_them(act: str) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(1024, 520, device="cuda", dtype=torch.bfloat16)
    layer = QuantLinear.from_linear(plain, QuantConfig("mxfp4", act=act)).eval().freeze()
    weight = mc.quantize(plain.weight.detach(), dtype="mxfp4", scale="row")
    with torch.inference_mode():
        for m in (1, 16, 32, 64):
            x = torch.randn(m, 1024, device="cuda").bfloat16()
            first = layer(x)
            again = [layer(x.clone()) for _ in range(3)]  # other addresses
            assert all(torch.equal(first, each) for each in again)
            rows = mc.quantize(x, dtype=act, scale="row")
            wanted = rows.dequantize().double() @ weight.dequantize().double().t() + plain.bias.double()
            assert float((first.double() - wanted).norm() / wanted.norm()) < 4e-3
