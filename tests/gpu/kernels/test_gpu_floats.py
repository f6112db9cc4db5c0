"""Small floats on a GPU: codes as on the CPU, and the dense product of every pair of formats against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import floats
from cute_kernels.floats import FORMATS
from cute_kernels.jit import get_kernel
from cute_kernels.scaled_gemm.api import FloatOperand, check, explain_scaled_gemm, scaled_gemm
from cute_kernels.scaled_gemm.config import OperandFormat, ScaledGemmConfig, candidates
from cute_kernels.scaled_gemm.cuda import scaled_gemm_cuda
from cute_kernels.scaled_gemm.dequantize import DequantizeConfig, dequantized_format
from cute_kernels.scaled_gemm.small_m.config import SmallMConfig
from tests.gpu.problems import needs_warp_groups

pytestmark = pytest.mark.gpu

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ARCH = "sm_90a" if HOPPER else "sm_80"
PAIRS = [(OperandFormat(a), OperandFormat(b)) for a in FORMATS for b in FORMATS]
# One of each way to the Tensor Cores: neither decoded, either, both, with 4, 6 and 8 bits; factors of blocks and tiles.
WAYS = [
    (OperandFormat("e4m3"), OperandFormat("e5m2")),
    (OperandFormat("e2m1"), OperandFormat("e4m3")),
    (OperandFormat("e5m2"), OperandFormat("e2m1")),
    (OperandFormat("e3m2"), OperandFormat("e2m3")),
    (OperandFormat("e2m1"), OperandFormat("e2m1")),
]
SCALED = [
    (OperandFormat("e2m1", 16, "e4m3"), OperandFormat("e2m1", 16, "e4m3")),
    (OperandFormat("e4m3", 32, "ue8m0"), OperandFormat("e2m1", 32, "ue8m0")),
    (OperandFormat("e5m2"), OperandFormat("e3m2", 32, "ue8m0")),
    (OperandFormat("e4m3", tiles=True), OperandFormat("e4m3", tiles=True)),
    (OperandFormat("e2m1", tiles=True), OperandFormat("e5m2")),
    (OperandFormat("e2m3", tiles=True), OperandFormat("e2m1", 16, "e4m3")),
]
# (M, K, N); the last two have several tiles for each block of a persistent grid, and a K for four blocks a tile.
SHAPES = [
    (1, 1, 1),
    (64, 128, 128),
    (130, 77, 257),
    (300, 520, 144),
    (2600, 136, 1200),
    (37, 2100, 264),
    (140, 264, 416),
]
HALF_DTYPES = ("float16", "bfloat16")
UNIT = 2.0**-13  # of the largest addend, what the Tensor Cores keep of each addend of a sum of e4m3 or e5m2 products


def every(a: OperandFormat, b: OperandFormat, fast: bool = False) -> list[ScaledGemmConfig]:
    """Every kernel for a pair, the warps' one too, and those that take operands that were decoded before."""
    found = [config for arch in dict.fromkeys((ARCH, "sm_80")) for config in candidates(a, b, arch, fast=fast)]
    before = tuple(dequantized_format(kind, a.block > 0 or b.block > 0) for kind in (a, b))
    found += candidates(before[0], before[1], ARCH, fast=fast) if HOPPER and before != (a, b) else []
    return found + [each.side_by_side for each in found if each.side_by_side != each]


def hopper(a: OperandFormat, b: OperandFormat) -> list[ScaledGemmConfig]:
    """Every kernel of warp groups for a pair, and those that take operands that were decoded before."""
    before = dequantized_format(a, False), dequantized_format(b, False)
    return [config for pair in dict.fromkeys(((a, b), before)) for config in candidates(*pair, "sm_90a")]


def decoders(*pairs: tuple[OperandFormat, OperandFormat]) -> list[DequantizeConfig]:
    """The kernels that decode operands before a product."""
    wide = [(kind, any(0 < each.block < 128 for each in pair)) for pair in pairs for kind in pair]
    plain = [(kind._replace(block=0, scale="") if kind.block == 128 else kind, bfloat16) for kind, bfloat16 in wide]
    return [
        DequantizeConfig(kind, bfloat16)
        for kind, bfloat16 in dict.fromkeys(plain)
        if dequantized_format(kind, bfloat16) != kind
    ]


def first(a: OperandFormat, b: OperandFormat) -> list[ScaledGemmConfig]:
    return candidates(a, b, ARCH)[:1]


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def operand(kind: OperandFormat, rows: int, k: int, seed: int, largest: float | None = 2.0) -> FloatOperand:
    """Random codes: integers of at most ``largest``, or any finite numbers; scales 1/2, 1 or 2, of tiles 1/4 to 4."""
    values = floats.decode(torch.arange(1 << kind.bits).to(torch.uint8), kind.dtype)
    wanted = values.isfinite() if largest is None else (values.abs() <= largest) & (values == values.round())
    known = wanted.nonzero().flatten().to(torch.uint8).cuda()
    codes = known[torch.randint(len(known), (rows, k), generator=generator(seed), device="cuda")]
    scales: dict[str, Any] = {}
    if kind.block:
        shape = (rows, -(-k // kind.block))
        numbers = 2.0 ** torch.randint(-1, 2, shape, generator=generator(seed + 1), device="cuda").double()
        blocks = numbers.float() if kind.scale == "float32" else floats.encode(numbers, kind.scale)
        scales = {"blocks": blocks, "block": kind.block, "scale_dtype": kind.scale}
    if kind.tiles:
        shape = (-(-rows // 128), -(-k // 128))
        scales = {"tiles": 2.0 ** torch.randint(-2, 3, shape, generator=generator(seed + 1), device="cuda").float()}
    return FloatOperand(floats.pack(codes, kind.dtype), kind.dtype, k, **scales)


def run(
    a: FloatOperand, b: FloatOperand, config: ScaledGemmConfig | SmallMConfig, out: Tensor, **options: Any
) -> Tensor:
    """The product by one config, whatever would be chosen."""
    given = {"alpha": 1.0, "beta": 0.0, "c": None, "bias": None} | options
    call = check(a, b, **given, out=out, out_dtype=out.dtype, fast_accum=not config.promote)
    return scaled_gemm_cuda(call, out, config)


def exact(a: FloatOperand, b: FloatOperand) -> Tensor:
    return a.values(torch.float64) @ b.values(torch.float64).t()


def assert_exact(
    a: OperandFormat, b: OperandFormat, configs: list[ScaledGemmConfig], shapes: list[tuple[int, int, int]]
) -> None:
    for m, k, n in shapes:
        x, y = operand(a, m, k, 1), operand(b, n, k, 9)
        truth = exact(x, y)
        for config in configs:
            if not config.takes(n):
                continue
            got = torch.full((m, n), torch.nan, device="cuda")
            run(x, y, config, got)
            assert torch.equal(got.double(), truth), f"{config.name} {m}x{k}x{n}"


@pytest.mark.parametrize("name", [*FORMATS, "ue8m0"])
def test_codes_are_those_of_the_cpu(name: str) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for saturate in (False, True):
            theirs = floats.encode(x.to(dtype), name, saturate=saturate)
            assert torch.equal(floats.encode(x.to(dtype).cuda(), name, saturate=saturate).cpu(), theirs)
    codes = torch.arange(256).to(torch.uint8)
    torch.testing.assert_close(
        floats.decode(codes.cuda(), name).cpu(), floats.decode(codes, name), rtol=0, atol=0, equal_nan=True
    )
    low = codes & ((1 << floats.float_format(name, scale=True).bits) - 1)
    packed = floats.pack(low[:203].cuda(), name)
    assert torch.equal(packed.cpu(), floats.pack(low[:203], name))
    assert torch.equal(floats.unpack(packed, 203, name).cpu(), low[:203])


@pytest.mark.configs([config for pair in PAIRS for config in first(*pair)])
def test_all_25_pairs_multiply_small_integers_exactly() -> None:
    # Sums of 128 k stay below 2^9: the Tensor Cores hold them, and float32 the rest.
    for a, b in PAIRS:
        assert_exact(a, b, first(a, b), SHAPES[:5])


@pytest.mark.parametrize("pair", WAYS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
@pytest.mark.configs([*decoders(*WAYS), *(config for pair in WAYS for config in every(*pair))])
def test_every_kernel_multiplies_small_integers_exactly(pair: tuple[OperandFormat, OperandFormat]) -> None:
    assert_exact(*pair, every(*pair), SHAPES)


@pytest.mark.parametrize("pair", SCALED, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
@pytest.mark.configs([*decoders(*SCALED), *(config for pair in SCALED for config in every(*pair))])
def test_factors_of_blocks_and_tiles_reach_their_products(pair: tuple[OperandFormat, OperandFormat]) -> None:
    assert_exact(*pair, every(*pair), SHAPES)


LINES = OperandFormat("e4m3", 128, "float32")
SUMS = [
    (LINES, OperandFormat("e4m3")),
    (LINES, OperandFormat("e4m3", tiles=True)),
    (LINES._replace(dtype="e5m2"), OperandFormat("e2m1", tiles=True)),
    (LINES._replace(dtype="e2m1"), OperandFormat("e5m2")),
]


@needs_warp_groups
@pytest.mark.parametrize("pair", SUMS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
@pytest.mark.configs([*decoders(*SUMS), *(config for pair in SUMS for config in hopper(*pair))])
def test_scales_of_128_values_reach_the_sums_of_their_products(pair: tuple[OperandFormat, OperandFormat]) -> None:
    assert_exact(*pair, hopper(*pair), SHAPES)
    x, y = operand(pair[0], 300, 520, 1), operand(pair[1], 257, 520, 9)
    assert torch.equal(scaled_gemm(x, y).double(), exact(x, y)), "what is picked"


@needs_warp_groups
def test_folded_weights_multiply_as_their_blocks_do() -> None:
    x, w = operand(LINES, 300, 520, 1), operand(OperandFormat("e2m1", 32, "ue8m0"), 144, 520, 9)
    folded = w.folded()
    assert folded is not None
    assert torch.equal(scaled_gemm(x, folded).double(), exact(x, w))
    with pytest.raises(NotImplementedError, match="b must have no block scales where a has float32 scales of 128"):
        scaled_gemm(x, w)


def lost(a: Tensor, b: Tensor, part: int) -> Tensor:
    """What sums of e4m3 and e5m2 products may lose: 33 addends a step of 32 k, each to ``UNIT`` of the largest of them.

    ``part``: k that the Tensor Cores sum before float32 does.
    """
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64, device=a.device)
    running = torch.zeros_like(total)
    for k in range(0, a.shape[1], 32):
        if k % part == 0:
            running.zero_()
        products = a[:, None, k : k + 32] * b[None, :, k : k + 32]  # (M, N, 32)
        after = running + products.sum(-1)
        total += 33 * UNIT * torch.maximum(torch.maximum(running.abs(), after.abs()), products.abs().amax(-1))
        running = after
    return total + 2.0**-20 * (a.abs() @ b.abs().t())


@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("pair", WAYS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
@pytest.mark.configs([config for pair in WAYS for config in candidates(*pair, ARCH, fast=True)[:1]])
def test_all_codes_multiply_within_the_stated_bound(pair: tuple[OperandFormat, OperandFormat], fast: bool) -> None:
    m, k, n = 96, 1000, 96
    a, b = operand(pair[0], m, k, 3, None), operand(pair[1], n, k, 4, None)
    x, y = a.values(torch.float64), b.values(torch.float64)
    truth = x @ y.t()
    bound = lost(x, y, k if fast else 128)
    for config in candidates(*pair, ARCH, fast=True)[:1] if fast else every(*pair):
        got = run(a, b, config, torch.empty(m, n, device="cuda"))
        precise = config.uses_bfloat16
        within = 2.0**-18 * (x.abs() @ y.abs().t()) if precise else bound
        assert bool(((got.double() - truth).abs() <= within).all()), config.name


def writing(config: ScaledGemmConfig, out: str) -> ScaledGemmConfig:
    """The config with another output, and as many adjacent columns as it has then."""
    found = replace(config, out=out)
    return found.side_by_side if config.adjacent else found


@pytest.mark.configs([writing(c, o) for p in (SCALED[0], WAYS[1]) for c in every(*p)[::2] for o in HALF_DTYPES])
def test_each_output_type_is_written_whole_and_nothing_else() -> None:
    for pair in (SCALED[0], WAYS[1]):
        for m, k, n in ((130, 77, 257), (70, 2048, 264), (70, 264, 288)):
            a, b = operand(pair[0], m, k, 1, 1.0), operand(pair[1], n, k, 2, 1.0)
            truth = exact(a, b)
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                for left, width in ((1, n + 3), (8, n + 8 + -n % 8)):
                    frame = torch.full((m + 2, left + width), -7.0, device="cuda").to(dtype)
                    out = frame[1 : m + 1, left : left + n]
                    for config in every(*pair)[::2]:
                        run(a, b, config, out)
                        assert torch.equal(out, truth.float().to(dtype)), config.name
                        out.fill_(-7.0)
                        assert bool((frame == -7.0).all()), "written outside"


@pytest.mark.configs([replace(c, source=s) for c in every(*WAYS[1]) for s in ("none", "float16")])
@pytest.mark.parametrize("n", [200, 224])
def test_scales_c_and_bias_enter_once(n: int) -> None:
    pair, (m, k) = WAYS[1], (137, 2050)
    a, b = operand(pair[0], m, k, 1), operand(pair[1], n, k, 2)
    left, right, bias = (torch.randn(size, generator=generator(5), device="cuda") for size in (m, n, n))
    c = torch.randn(m, n, generator=generator(6), device="cuda").half()
    sums = exact(a, b)
    for rows, columns in ((left, right), (left[0], right[0]), (left, None), (None, right[3])):
        x, y = replace(a, scale=rows), replace(b, scale=columns)
        truth = 0.5 * sums
        if rows is not None:
            truth = truth * (rows.double()[:, None] if rows.dim() else rows.double())
        if columns is not None:
            truth = truth * columns.double()
        for beta, source in ((0.0, None), (-2.0, c)):
            whole = truth + bias.double() + (0.0 if source is None else beta * source.double())
            for config in every(*pair):
                got = run(x, y, config, torch.empty(m, n, device="cuda"), alpha=0.5, beta=beta, c=source, bias=bias)
                bound = 2.0**-20 * (truth.abs() + bias.double().abs() + 2 * c.double().abs())
                assert bool(((got.double() - whole).abs() <= bound).all()), config.name


@pytest.mark.configs([c for p in (WAYS[0], SCALED[1]) for c in every(*p)])
def test_infinities_and_nan_reach_their_rows_and_columns_alone() -> None:
    for pair in (WAYS[0], SCALED[1]):
        a, b = operand(pair[0], 90, 300, 1), operand(pair[1], 100, 300, 2)
        clean = exact(a, b)
        codes = a.packed_data.clone()
        codes[5, 130] = 0x7F  # NaN of e4m3 and of e5m2
        spoiled = replace(a, packed_data=codes)
        for config in every(*pair):
            got = run(spoiled, b, config, torch.empty(90, 100, device="cuda"))
            assert bool(got[5].isnan().all()), config.name
            rest = torch.arange(90) != 5
            assert torch.equal(got[rest].double(), clean[rest]), config.name


@pytest.mark.configs([c for p in (WAYS[0], WAYS[1]) for c in first(*p)])
def test_codes_of_any_layout_are_the_same_matrix() -> None:
    for pair in (WAYS[0], WAYS[1]):
        a, b = operand(pair[0], 200, 520, 1), operand(pair[1], 150, 520, 2)
        truth = exact(a, b)
        wide = torch.zeros(640, 640, dtype=torch.uint8, device="cuda")
        size = a.packed_data.shape[1]
        for view in (wide[3:203, 16 : 16 + size], wide[3:203, 5 : 5 + size], wide.t()[:200, :size]):
            moved = replace(a, packed_data=view.copy_(a.packed_data))
            assert torch.equal(scaled_gemm(moved, b).double(), truth)
        assert torch.equal(scaled_gemm(b, a).double(), truth.t())
    assert explain_scaled_gemm(a, b).copies == ("a", "b")  # rows of 260 and of 520 bytes


@pytest.mark.configs([c for p in (WAYS[1], SCALED[0]) for c in every(*p)])
def test_runs_of_one_product_agree_in_every_bit() -> None:
    for pair in (WAYS[1], SCALED[0]):
        for m, k, n in ((2048, 1024, 2176), (33, 8192, 1024)):
            a, b = operand(pair[0], m, k, 1, None), operand(pair[1], n, k, 2, None)
            for config in every(*pair):
                out = torch.empty(m, n, device="cuda")
                reference = run(a, b, config, out).clone()
                assert all(torch.equal(run(a, b, config, out), reference) for _ in range(10)), config.name


def test_graphs_and_the_plan() -> None:
    a, b = operand(OperandFormat("e2m1"), 300, 512, 1), operand(OperandFormat("e4m3"), 256, 512, 2)
    out = torch.zeros(300, 256, device="cuda")
    scaled_gemm(a, b, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaled_gemm(a, b, out=out)
    a.packed_data.copy_(operand(OperandFormat("e2m1"), 300, 512, 7).packed_data)
    out.zero_()
    graph.replay()
    assert torch.equal(out.double(), exact(a, b))
    plan = explain_scaled_gemm(a, b)
    assert plan.config is not None and plan.kernel == plan.config.name and plan.copies == ()
    assert get_kernel(plan.config).local_bytes == 0 and plan.decoded == ()


@needs_warp_groups
@pytest.mark.parametrize("pair", [(WAYS[1]), (WAYS[4]), (SCALED[0]), (SCALED[4]), (SCALED[5])], ids=str)
def test_operands_of_many_rows_are_decoded_before(pair: tuple[OperandFormat, OperandFormat]) -> None:
    for m, k, n in ((1024, 4100, 2056), (4096, 77, 4099), (20_000, 1000, 500)):  # whole runs of sixteen, and not
        a, b = operand(pair[0], m, k, 1), operand(pair[1], n, k, 9)
        plan = explain_scaled_gemm(a, b)
        assert k != 4100 or "a" in plan.decoded
        assert torch.equal(scaled_gemm(a, b).double(), exact(a, b)), plan
    graph, out = torch.cuda.CUDAGraph(), torch.zeros(m, n, device="cuda")
    with torch.cuda.graph(graph):
        scaled_gemm(a, b, out=out)
    a.packed_data.copy_(operand(pair[0], m, k, 7).packed_data)
    graph.replay()
    assert torch.equal(out.double(), exact(a, b)), "a replay reads the operands anew"


def test_empty_products() -> None:
    empty = FloatOperand(torch.zeros(5, 0, dtype=torch.uint8, device="cuda"), "e2m1", 0)
    bias = torch.randn(5, device="cuda")
    assert torch.equal(scaled_gemm(empty, empty, bias=bias), bias.expand(5, 5))
