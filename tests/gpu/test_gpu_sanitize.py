"""Some fifty small problems over all kernels, which ``make gpu-sanitize`` runs under compute-sanitizer."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

import magicube_cutlass as mc
from cute_kernels.attention.blocks.config import block_config
from cute_kernels.attention.quantize_qkv import choose as choose_operands
from cute_kernels.attention.quantize_qkv import encode_operands
from cute_kernels.convert.digits import digits
from cute_kernels.convert.quantize_transposed import amax_rows, quantize_transposed, turned_config
from cute_kernels.double_sums.row_sums import sum_rows
from cute_kernels.dtypes import element_bits
from cute_kernels.estimate import probes
from cute_kernels.few_rows.api import few_rows_product
from cute_kernels.few_rows.decode import decode_weight
from cute_kernels.few_rows.product_int8 import few_rows_int8_product
from cute_kernels.gemm.api import gemm
from cute_kernels.gemm.config import GemmConfig, Products
from cute_kernels.gemm.heuristics import candidates as gemm_candidates
from cute_kernels.machine import ProblemTypes
from cute_kernels.scaled_gemm.config import OperandFormat, ScaledGemmConfig, candidates
from cute_kernels.scaled_gemm.dequantize import dequantized_format
from cute_kernels.scaled_gemm.small_m.config import candidates as small_m_candidates
from cute_kernels.sddmm.panel import SddmmPanelConfig
from cute_kernels.spmm.heuristics import SpmmKernel
from magicube_cutlass.nn.dense.encode import encoded
from magicube_cutlass.quantization.float_tensor import quantize_floats
from residual.matmul import matmul
from tests.gpu.kernels import test_gpu_probe_squares as probe_squares
from tests.gpu.kernels.test_gpu_floats import LINES, exact, operand, run
from tests.gpu.problems import (
    HERE,
    PANELS,
    check_sddmm,
    check_spmm,
    dense,
    gather,
    kind,
    needs_warp_groups,
    panel,
    resident,
    sddmm,
    sddmm_panel,
    sparse,
)
from tests.gpu.sparse.test_gpu_fused_attention import CONFIGS, Case, Config, summing
from tests.gpu.sparse.test_gpu_tile_attention import Case as TileCase
from tests.helpers import SCALES
from tests.kernels.few_rows import model as few_rows_model

pytestmark = pytest.mark.gpu

# initcheck takes all 16 bytes of a cp.async for read, those too that the instruction is told to leave out and fill with
# zeros; so for it rows are whole pieces, and memcheck judges the tails.
WHOLE = os.environ.get("SANITIZER_TOOL") == "initcheck"
FEW = (
    (OperandFormat("e4m3"), OperandFormat("e2m1")),
    (OperandFormat("e4m3", 32, "ue8m0"), OperandFormat("e2m1", 16, "e4m3")),
)


def before(a: OperandFormat, b: OperandFormat) -> list[ScaledGemmConfig]:
    """Kernels in tiles of 256 and of 128 columns, of operands that are decoded before; pairs and adjacent columns."""
    bfloat16 = a.block > 0 or b.block > 0
    found = candidates(dequantized_format(a, bfloat16), dequantized_format(b, bfloat16), "sm_90a")[:2]
    return [*found, *(each.side_by_side for each in found)]


SPMM: list[SpmmKernel] = [
    gather(kind()),
    gather(kind(8, (8, True), (8, False), "float16"), tile_n_bytes=128, split_k_warps=4),
    gather(kind(4, (16, True), (16, True)), split_k_warps=2, stages=3),
    gather(kind(1, (12, True), (4, True)), split_k_warps=8, warps=8),
    gather(kind(32, (4, False), (4, True), "int32")),
    gather(kind(2, (8, False), (4, False), "bfloat16"), int64_accum=True),
    gather(kind(8, (8, True), (8, True), "float32"), atom="s8_m16n8k16"),
    gather(kind(8, (8, True), (8, True), "float16"), tile_n_bytes=16, split_k_warps=8, warps=8, stages=2),
]
if PANELS:
    SPMM += [
        panel(kind()),
        panel(kind(8, (8, True), (8, False), "float16"), tile_n_bytes=128, rows_per_warp=2),
        panel(kind(4, (16, True), (16, True)), tile=64, stages=5),
        panel(kind(1, (12, True), (4, True)), rows_per_warp=3, ordered=False),
        panel(kind(16, (4, False), (4, True), "int32"), warps=2),
        panel(kind(8, (8, True), (8, True), "float32"), atom="s8_m16n8k16", tile_n_bytes=128),
        panel(kind(8, (8, True), (8, True), "float16"), tile_n_bytes=16, a_stages=8, cluster=2),
        panel(kind(4, (16, True), (8, True), "float32"), tile_n_bytes=32, a_stages=3, rows_per_warp=2),
        resident(kind(8, (4, True), (8, True), "float16"), inner=336),
        resident(kind(4, (16, True), (16, True)), inner=336, tile_n_bytes=32, cluster=2, warps=5, together=4),
    ]
SDDMM = [
    (kind(), 32),
    (kind(4, (16, True), (16, False)), 16),
    (kind(8, (4, True), (4, True)), 64),
    (kind(32, (8, False), (8, True)), 32),
    (kind(1, (16, True), (4, True)), 64),
]


@pytest.mark.parametrize("config", SPMM, ids=lambda config: config.name)
def test_spmm(config: SpmmKernel) -> None:
    left, right = config.a, config.b
    a = sparse(45, 333, config.vector_length, left, sparsity=0.7, empty=True)
    check_spmm(a, dense((2, 333, 96 if WHOLE else 77), right), config)
    check_spmm(a, dense((333, 64), right, "column"), config, offset=1)
    few = sparse(45, 336, config.vector_length, left, sparsity=0.5)
    columns = 128 // element_bits(right)  # rows of 16 bytes, eight of which are one of the tensor copy's
    check_spmm(few, dense((336, columns), right), config)


@pytest.mark.parametrize(("of", "stride"), SDDMM, ids=lambda value: str(getattr(value, "left", value)))
@pytest.mark.configs([sddmm(of, stride, inner) for of, stride in SDDMM for inner in (256,)])
def test_sddmm(of: ProblemTypes, stride: int) -> None:
    torch.manual_seed(0)
    pattern = mc.random_pattern(45, 77, 0.7, of.vector_length)
    k = 224 if WHOLE else 201
    check_sddmm(dense((2, 45, k), of.lhs), dense((2, 77, k), of.rhs), pattern, stride)


SDDMM_PANELS = (
    [sddmm_panel(kind(), boxes=2), sddmm_panel(kind(4, (16, True), (8, False)), 16, boxes=2)] if PANELS else []
)


@pytest.mark.parametrize("config", SDDMM_PANELS, ids=lambda config: config.name)
@pytest.mark.configs(SDDMM_PANELS)
def test_sddmm_panel(config: SddmmPanelConfig) -> None:
    torch.manual_seed(0)
    pattern = mc.random_pattern(245, 177, 0.7, config.vector_length)
    k = 224 if WHOLE else 201
    x, y = dense((2, 245, k), config.x), dense((2, 177, k), config.y)
    check_sddmm(x, y, pattern, config.stride, config=config)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_quantize(bits: int, axis: int | None) -> None:
    torch.manual_seed(bits)
    for x in (torch.randn(45, 333), torch.randn(2, 3, 2050, dtype=torch.float64), torch.randn(33, 64).half()):
        got, expected = mc.quantize(x.cuda(), bits, scale=SCALES[axis]), mc.quantize(x, bits, scale=SCALES[axis])
        assert torch.equal(got.ints().cpu(), expected.ints())


@pytest.mark.parametrize(("k", "bits", "stride"), [(333, 8, 32), (2100, 4, 16), (64, 16, 64)])
def test_compress(k: int, bits: int, stride: int) -> None:
    torch.manual_seed(k)
    weight = torch.randn(45, k) * (torch.rand(45, k) < 0.1)
    got = mc.SRBCRS.from_dense(weight.cuda(), bits=bits, stride=stride)
    got.check_format(full=True)
    assert torch.equal(got.to_dense().cpu(), mc.SRBCRS.from_dense(weight, bits=bits, stride=stride).to_dense())
    mask = torch.rand(45, k) < 0.2
    there = mc.SRBCRS.from_mask(weight.cuda(), mask.cuda(), vector_length=8, bits=bits, stride=stride, scale="row")
    here = mc.SRBCRS.from_mask(weight, mask, vector_length=8, bits=bits, stride=stride, scale="row")
    assert torch.equal(there.to_dense().cpu(), here.to_dense())


ATTENTION = [config for config in CONFIGS if config.head == 64]


@pytest.mark.parametrize("config", ATTENTION, ids=lambda config: config.name)
@pytest.mark.configs([summing(config) for config in ATTENTION])
def test_fused_attention(config: Config) -> None:
    Case(config, 2, 93, 116, masks=2, scales="one", holes=True).check()
    Case(config, 2, 93, 116, scales="one", causal=True).check(lse=False)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.configs([choose_operands("float16", 32, bits, HERE.arch) for bits in (4, 8)])
def test_operands_of_attention(bits: int) -> None:
    torch.manual_seed(bits)
    q, k, v = (torch.randn(2, rows, 32, dtype=torch.float16, device="cuda") for rows in (45, 777, 777))
    k[0, 5] *= 30
    found = encode_operands(q, k, v, bits=bits)
    assert torch.equal(found.k[0], mc.quantize(k[0], bits, scale="row").ints())
    assert torch.equal(found.v[1].view(1, -1), mc.quantize(v[1].view(1, -1), bits, scale="row").ints())


@needs_warp_groups
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.configs([replace(block_config(64), key_scale=True, source=x, out="float32", lse=True)
                      for x in ("float16", "float32")])  # fmt: skip
def test_attention_of_tiles(dtype: torch.dtype) -> None:
    TileCase(64, dtype, 93, 116, batch=2).check()


@pytest.mark.parametrize("softmax_bits", [8, 16])
def test_attention_by_three_kernels(softmax_bits: int) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, rows, 48) for rows in (45, 77, 77))
    mask = mc.random_pattern(45, 77, 0.6, 8, seed=1)
    options = {"backend": "unfused", "softmax_bits": softmax_bits}
    here = mc.sparse_attention(q, k, v, mask, **options)
    there = mc.sparse_attention(q.cuda(), k.cuda(), v.cuda(), mask.to("cuda"), **options).cpu()
    assert float((there - here).norm() / here.norm()) < 0.01


@needs_warp_groups
@pytest.mark.parametrize("size", [(5, 777, 200), (20, 2064, 333)], ids=str)  # M, K, N
@pytest.mark.parametrize("pair", FEW, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
@pytest.mark.configs([c for pair in FEW for rows in (8, 32) for c in small_m_candidates(rows, *pair)])
def test_float_product_of_few_rows(pair: tuple[OperandFormat, OperandFormat], size: tuple[int, int, int]) -> None:
    m, k, n = size
    a, b = operand(pair[0], m, k, 1), operand(pair[1], n, k, 2)
    for config in small_m_candidates(8 if m <= 8 else 32, *pair):
        assert torch.equal(run(a, b, config, torch.empty(m, n, device="cuda")).double(), exact(a, b))


@needs_warp_groups
@pytest.mark.parametrize("pair", FEW, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
@pytest.mark.configs([c for pair in FEW for c in before(*pair)])
def test_float_product_of_operands_that_are_decoded_before(pair: tuple[OperandFormat, OperandFormat]) -> None:
    for n in (300, 288):  # adjacent columns are of multiples of 32
        a, b = operand(pair[0], 150, 777, 1), operand(pair[1], n, 777, 2)
        for config in before(*pair):
            got = run(a, b, config, torch.empty(150, n, device="cuda"))
            assert torch.equal(got.double(), exact(a, b)), config.name


@needs_warp_groups
@pytest.mark.configs(
    [
        found
        for tiles in (False, True)
        for c in candidates(LINES, FEW[0][0]._replace(tiles=tiles), "sm_90a")
        for found in (c, c.side_by_side)
    ]
)
def test_float_product_of_scales_of_128_values() -> None:
    for tiles, n in ((False, 500), (True, 500), (False, 512), (True, 512)):
        a, b = operand(LINES, 150, 777, 1), operand(FEW[0][0]._replace(tiles=tiles), n, 777, 2)
        for config in candidates(a.format, b.format, "sm_90a"):
            got = run(a, b, config.side_by_side, torch.empty(150, n, device="cuda"))
            assert torch.equal(got.double(), exact(a, b)), config.name


@pytest.mark.parametrize("shape", [(45, 68), (700, 256)])
def test_probes_and_comparison(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    x, (m, n) = torch.randn(shape, device="cuda"), shape
    w, product = (torch.randn(probes.PROBES, probes.padded(count), device="cuda") for count in (n, m))
    (_, of_rows), (y, of_columns) = (probes.probe_with_absmax(x, w, lines) for lines in ("rows", "columns"))
    assert torch.equal(of_rows, x.abs().amax(1)) and torch.equal(of_columns, x.abs().amax(0))
    assert probes.compare(x, w, y).product == pytest.approx(float(y.double().square().sum()), rel=1e-5)
    assert not np.isnan(probes.compare(x, w, product).gram).any()


@needs_warp_groups
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_probes_and_comparison_in_float64(dtype: torch.dtype) -> None:
    for shape, turned in (((44, 68), False), ((700, 256), True)):
        probe_squares.check_pass(shape, dtype, turned)
        probe_squares.check_comparison(shape, dtype, (0, -9 if dtype == torch.float32 else 0))


@needs_warp_groups
@pytest.mark.parametrize("tol", [2e-2, 1e-3])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_errors_of_two_rungs_before_their_products(layout: str, tol: float) -> None:
    torch.manual_seed(3)
    m, k, n = (128, 160, 192) if WHOLE else (131, 141, 163)
    a, b = torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")
    if layout == "columns":
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    C, report = matmul(a, b, tol=tol, return_report=True)
    exact = a.double() @ b.double()
    assert report.plan == ("int8 direct" if tol > 1e-2 else "int8 full")
    assert float((C - exact).norm() / exact.norm()) <= report.upper <= tol


@needs_warp_groups
@pytest.mark.parametrize("name", ["int4_g128", "mxfp4", "nvfp4"])
def test_few_rows_and_their_decoded_weight(name: str) -> None:
    n, k = (64, 256) if WHOLE else (77, 264)
    made = few_rows_model.sample(name, n, k, "bfloat16", 0, "cuda")
    x = torch.randn(5, k, device="cuda", dtype=torch.bfloat16)
    got = few_rows_product(x, made.weight)
    assert torch.equal(got, few_rows_product(x, made.weight))
    exact = x.double() @ made.truth.t()
    assert float((got.double() - exact).norm() / exact.norm()) < 0.02
    decoded = decode_weight(made.weight).contiguous()
    assert torch.equal(decoded.view(torch.int16), few_rows_model.dense(made.weight).view(torch.int16))


@needs_warp_groups
def test_few_rows_of_int8() -> None:
    n, k = (64, 256) if WHOLE else (77, 264)
    weight = few_rows_model.sample("int4_g128", n, k, "int8", 0, "cuda").weight
    x = torch.randint(-128, 128, (5, -(-k // 16) * 16), device="cuda", dtype=torch.int8)[:, :k]
    got = few_rows_int8_product(x, weight, out_dtype=torch.float32)
    exact = few_rows_model.int8_product(x, weight, None, None)
    assert bool(((got.double() - exact).abs() <= few_rows_model.int8_limit(x, weight, None, None, torch.float32)).all())


@needs_warp_groups
@pytest.mark.parametrize("act", ["e4m3", "e4m3_g128", "mxfp8", "nvfp4"])
def test_encoded_rows(act: str) -> None:
    x = torch.randn(5, 200 if WHOLE else 203, dtype=torch.bfloat16)
    want = quantize_floats(x, act, axis=1, nonfinite="propagate", tensor_scale_per_row=True)
    got = encoded(x.cuda(), act, None)
    assert torch.equal(got.data.cpu(), want.data) and torch.equal(got.scale.cpu(), want.scale)


@needs_warp_groups
@pytest.mark.parametrize(
    "config",
    [each for n in (1, 2) for each in gemm_candidates(Products(n, n, n), "sm_90a")],
    ids=lambda config: config.name,
)
@pytest.mark.parametrize("n", [203, 224])
def test_dense_product_of_digits(n: int, config: GemmConfig) -> None:
    count, k = config.products.levels, 320 if WHOLE else 301
    x, y = torch.randn(270, k).cuda(), torch.randn(k, n).cuda()
    a, b = digits(x, count=count, axis=1), digits(y, count=count, axis=0, transpose=True)
    found = gemm(a.planes, b.planes, scale_a=a.scale, scale_b=b.scale, out_dtype=torch.float32, config=config)
    host = [tuple(plane.cpu() for plane in each.planes) for each in (a, b)]
    want = gemm(*host, scale_a=a.scale.cpu(), scale_b=b.scale.cpu(), out_dtype=torch.float32)
    assert torch.allclose(found.cpu(), want, rtol=1e-6, atol=1e-4)


@needs_warp_groups
@pytest.mark.parametrize("n", [203, 224])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_dense_product_that_ends_in_integers(arch: str, n: int) -> None:
    config = gemm_candidates(Products(1, 1, 1), arch)[-1]
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-99, 99, shape, generator=generator).to(torch.int8) for shape in ((270, 304), (304, n)))
    rows, scale = torch.rand(270) / 1e4, torch.tensor(0.01)
    found = gemm(
        a.cuda(), b.cuda(), scale_a=rows.cuda(), activation="gelu", out_scale=scale.cuda(), out_dtype=torch.int8,
        config=config,
    )  # fmt: skip
    want = gemm(a, b, scale_a=rows, activation="gelu", out_scale=scale, out_dtype=torch.int8)
    assert int((found.cpu().int() - want.int()).abs().max()) <= 1


@needs_warp_groups
@pytest.mark.parametrize("n", [203, 224])
@pytest.mark.parametrize("config", gemm_candidates(Products(1, 1, 1), "sm_90a"), ids=lambda config: config.name)
def test_dense_product_and_a_source(config: GemmConfig, n: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-99, 99, shape, generator=generator).to(torch.int8) for shape in ((270, 304), (304, n)))
    for dtype in (torch.bfloat16, torch.float32):
        c = torch.randn(270, n, generator=generator).to(dtype)
        found = gemm(
            a.cuda(), b.cuda(), c=c.cuda(), beta=1.0, alpha=1e-5, out_dtype=torch.bfloat16, config=config
        )  # fmt: skip
        want = gemm(a, b, c=c, beta=1.0, alpha=1e-5, out_dtype=torch.bfloat16)
        assert torch.allclose(found.cpu().float(), want.float(), rtol=2.0**-7, atol=1e-5)


@needs_warp_groups
@pytest.mark.parametrize("n", [128, 448])
@pytest.mark.parametrize("config", [each for each in gemm_candidates(Products(1, 1, 1), "sm_90a") if each.tile_n % 64 == 0],
                         ids=lambda config: config.name)  # fmt: skip
def test_gated_linear_unit(config: GemmConfig, n: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-99, 99, shape, generator=generator).to(torch.int8) for shape in ((270, 304), (304, n)))
    rows, scale = torch.rand(270) / 1e4, torch.tensor(0.01)
    for out_scale, dtype in ((scale, torch.int8), (None, torch.bfloat16)):
        given = None if out_scale is None else out_scale.cuda()
        found = gemm(
            a.cuda(), b.cuda(), scale_a=rows.cuda(), activation="silu", glu=True, out_scale=given, out_dtype=dtype,
            config=config,
        )  # fmt: skip
        want = gemm(a, b, scale_a=rows, activation="silu", glu=True, out_scale=out_scale, out_dtype=dtype)
        assert torch.allclose(found.cpu().float(), want.float(), rtol=2.0**-7, atol=1.0 if given is not None else 1e-5)


@pytest.mark.parametrize("shape", [(3, 200), (70, 130)])
def test_sums_in_double(shape: tuple[int, int]) -> None:
    x, v, norms = (
        torch.randn(shape).cuda(),
        torch.randn(shape[1], 16).double().cuda(),
        torch.ones(shape[1]).double().cuda(),
    )
    for each in (x, x.mT.contiguous().mT):
        found = sum_rows(each, v, norms)
        assert torch.allclose(found.products, x.double() @ v) and torch.allclose(found.bounds, x.double().abs().sum(1))


@needs_warp_groups
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("shape", [(5, 72), (70, 1544)])
def test_quantization_into_the_transpose(shape: tuple[int, int], given: bool) -> None:
    x = torch.randn(shape, dtype=torch.float16)
    scale = x.float().abs().amax(1, keepdim=True) / 100 if given else None
    for config in (None, turned_config("float16", *shape, given)):
        data, found = quantize_transposed(x.cuda(), None if scale is None else scale.cuda(), config=config)
        expected = (x.double() / found.cpu().double()).round().clamp(-128, 127).int()
        assert int((data.cpu().int() - expected.mT).abs().max()) <= 1
    assert torch.equal(amax_rows(x.cuda()).view(torch.float32).cpu(), x.float().abs().amax(1, keepdim=True))
