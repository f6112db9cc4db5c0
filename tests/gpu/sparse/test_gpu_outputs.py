"""What SpMM writes on a GPU: every output type, scales and bias with one rounding, extremes, wide sums, huge outputs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import magicube_cutlass as mc
from cute_kernels.cpu.engine import DenseOperand
from cute_kernels.spmm.heuristics import SpmmKernel
from magicube_cutlass.dispatch import cuda
from magicube_cutlass.dispatch.plan import _vectors
from magicube_cutlass.ops.problem import check_spmm as check_problem
from tests.gpu.problems import PANELS, POISON, check_spmm, chosen, dense, gather, ints, kind, panel, sparse, spmm
from tests.helpers import SCALES

pytestmark = pytest.mark.gpu

OUTS = ("int32", "int64", "float16", "bfloat16", "float32")
FLOATS = ("float16", "bfloat16", "float32")


def both(out: str, right: tuple[int, bool] = (8, True), left: tuple[int, bool] = (8, True)) -> list[SpmmKernel]:
    of = kind(8, left, right, out)
    return [gather(of), *([panel(of)] if PANELS else [])]


def named(config: SpmmKernel) -> str:
    return config.name


@pytest.mark.parametrize(
    "config", [config for out in OUTS for bits in (4, 8, 16) for config in both(out, (bits, True))], ids=named
)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("n", [96, 97])
def test_each_output_type_is_written_whole_and_rounded_once(config: SpmmKernel, offset: int, n: int) -> None:
    torch.manual_seed(n)
    for batch in ((), (2,)):
        a, b = sparse(61, 300, 8, (8, True), empty=True), dense((*batch, 300, n), (config.b.bits, True))
        check_spmm(a, b, config, offset)


def formula(a: mc.SRBCRS, b: mc.QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """``float(total) * left * right + bias`` in plain torch, every operator rounding on its own."""
    total = mc.reference.spmm(a, b).float()
    total = total if a.scale is None else total * a.scale
    total = total if b.scale is None else total * b.scale
    return (total if bias is None else total + bias[:, None]).to(dtype)


def exact(a: mc.SRBCRS, b: mc.QuantTensor, bias: torch.Tensor | None) -> torch.Tensor:
    total = mc.reference.spmm(a, b).double()
    total = total if a.scale is None else total * a.scale.double()
    total = total if b.scale is None else total * b.scale.double()
    return total if bias is None else total + bias.double()[:, None]


@pytest.mark.parametrize("config", [config for out in FLOATS for config in both(out)], ids=named)
@pytest.mark.parametrize(("axis_a", "axis_b"), [(None, None), (None, 0), (1, None), (1, 0)])
def test_scales_round_as_plain_torch_does(config: SpmmKernel, axis_a: int | None, axis_b: int | None) -> None:
    torch.manual_seed(1)
    w = torch.randn(61, 300)
    a = mc.SRBCRS.from_mask(w, mc.prune(w, 0.6, 8), vector_length=8, bits=8, scale=SCALES[axis_a])
    for n, batch in ((96, ()), (45, (3,)), (64, (2, 1, 2))):
        b = mc.quantize(torch.randn(*batch, 300, n) * torch.logspace(-1, 1, n), 8, scale=SCALES[axis_b])
        dtype = getattr(torch, config.out)
        assert torch.equal(spmm(a, b, dtype, config), formula(a, b, None, dtype))


@pytest.mark.parametrize("config", [config for out in FLOATS for config in both(out)], ids=named)
def test_a_bias_costs_at_most_one_rounding(config: SpmmKernel) -> None:
    # The kernel fuses the last product with the sum: one rounding fewer than plain torch, so where the two cancel it is
    # nearer to the truth.  Bounds: one unit of the output type from the exact value of the rounded factors' product and
    # sum, and never more than plain torch's error in the norm.
    torch.manual_seed(2)
    w, dtype = torch.randn(61, 300), getattr(torch, config.out)
    a = mc.SRBCRS.from_mask(w, mc.prune(w, 0.6, 8), vector_length=8, bits=8, scale="row")
    b, bias = mc.quantize(torch.randn(300, 96), 8, scale="column"), torch.randn(61) * 10
    got, plain, truth = spmm(a, b, dtype, config, bias=bias), formula(a, b, bias, dtype), exact(a, b, bias)
    assert float((got.double() - truth).norm()) <= 1.01 * float((plain.double() - truth).norm())
    assert a.scale is not None and b.scale is not None
    fused = (mc.reference.spmm(a, b).float() * a.scale).double() * b.scale.double() + bias.double()[:, None]
    ulp = torch.finfo(dtype).eps * fused.abs()
    assert bool(((got.double() - fused).abs() <= ulp).all())


def test_half_outputs_round_to_even_through_their_whole_range() -> None:
    torch.manual_seed(3)
    a = mc.SRBCRS.from_mask(torch.eye(8).long(), torch.eye(8, dtype=torch.bool), vector_length=1, bits=8)
    scale = torch.rand(1, 4096) * 2.0 ** torch.randint(-26, 4, (1, 4096))
    b = mc.QuantTensor.from_ints(ints((8, 4096), 16, True), bits=16, scale=scale)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(spmm(a, b, dtype), b.dequantize().to(dtype))


EXTREMES = [(8, False, 255), (8, True, -128), (4, True, -8), (4, False, 15), (16, False, 65535), (16, True, -32768),
            (12, True, -2048)]  # fmt: skip


MEETINGS = list(product(EXTREMES, EXTREMES[:6:2] + EXTREMES[5:6]))


@pytest.mark.parametrize(("left", "right"), MEETINGS, ids=str)
@pytest.mark.configs([chosen(kind(8, left[:2], right[:2]), 1, 1024, 40) for left, right in MEETINGS])
def test_extreme_integers_do_not_wrap(left: tuple[int, bool, int], right: tuple[int, bool, int]) -> None:
    k = 1024
    mask = torch.ones(8, k, dtype=torch.bool)
    a = mc.SRBCRS.from_mask(torch.full((8, k), left[2]), mask, vector_length=8, bits=left[0], signed=left[1])
    b = mc.QuantTensor.from_ints(torch.full((k, 40), right[2]), bits=right[0], signed=right[1])
    assert torch.equal(spmm(a, b), torch.full((8, 40), k * left[2] * right[2]))


LONG = [32_767, 32_768, 32_769, 70_000]
FULL = [((8, False), 255), ((4, True), -8), ((16, False), 65535)]


@pytest.mark.parametrize("longest", LONG)
@pytest.mark.parametrize(("of", "value"), FULL)
@pytest.mark.configs([chosen(kind(8, of, of), 2, longest, 66) for of, _ in FULL for longest in LONG])
def test_rows_of_many_nonzeros_are_summed_in_int64(longest: int, of: tuple[int, bool], value: int) -> None:
    mask = torch.ones(9, longest, dtype=torch.bool)
    mask[1:8, 100:] = False
    a = mc.SRBCRS.from_mask(torch.full(mask.shape, value) * mask, mask, vector_length=1, bits=of[0], signed=of[1])
    b = mc.QuantTensor.from_ints(torch.full((longest, 66), value), bits=of[0], signed=of[1])
    assert torch.equal(spmm(a, b), (mask.sum(1) * value * value)[:, None].expand(9, 66))


def test_a_kernel_that_is_too_narrow_for_the_row_is_refused() -> None:
    mask = torch.ones(1, 32_769, dtype=torch.bool)
    a = mc.SRBCRS.from_mask(mask.long(), mask, vector_length=1, bits=8)
    with pytest.raises(ValueError, match="config must have int64_accum=True for a vector row of 32769 > 32768 vectors"):
        spmm(a, dense((32_769, 8), (8, True)), config=gather(kind(1)))
    with pytest.raises(ValueError, match="config must be for ProblemTypes"):
        spmm(sparse(8, 40, 8, (8, True)), dense((40, 8), (8, True)), config=gather(kind(8, (4, True), (8, True))))
    with pytest.raises(ValueError, match="config must be for vectors of a multiple of 8 rows, got one for 4"):
        spmm(sparse(8, 40, 8, (8, True)), dense((40, 8), (8, True)), config=gather(kind(4)))


@pytest.mark.parametrize("config", both("int32"), ids=named)
def test_out_is_written_in_place_and_nowhere_else(config: SpmmKernel) -> None:
    a, b = sparse(19, 300, 8, (8, True)), dense((300, 67), (8, True))
    rows = torch.full((21, 67), POISON, dtype=torch.int32, device="cuda")
    out = rows[1:20]
    assert mc.spmm(a.to("cuda"), b.to("cuda"), out=out, config=config) is out
    assert torch.equal(out.cpu(), mc.reference.spmm(a, b).int())
    assert bool((rows[[0, 20]] == POISON).all())


HUGE = both("float16")


@pytest.mark.parametrize("config", HUGE, ids=named)
def test_an_output_of_more_than_two_to_the_31_elements(config: SpmmKernel) -> None:
    m, k, n = 2**16 + 8, 512, 2**15 + 64
    assert m * n > 2**31
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of GPU memory")
    torch.manual_seed(4)
    a, b = sparse(m, k, 8, (8, True), sparsity=0.995), dense((k, n), (8, True))
    out = torch.full((m, n), float("nan"), dtype=torch.float16, device="cuda")
    mc.spmm(a.to("cuda"), b.to("cuda"), out=out, config=config)
    rows = torch.cat((torch.randint(0, m, (40,)), torch.tensor([0, m - 1, 2**31 // n, 2**31 // n + 1])))
    total = torch.matmul(a.to_dense()[rows].double(), b.ints().double())  # exact: 512 products of bytes
    assert torch.equal(out[rows.cuda()].cpu(), total.half())
    assert not bool(torch.isnan(out.view(-1)[::4099]).any())


def test_sums_of_nothing_are_zero_and_take_the_bias() -> None:
    none = torch.zeros(5, 0, dtype=torch.bool)
    a = mc.SRBCRS.from_mask(torch.zeros(5, 0), none, vector_length=2, bits=8, scale="row")
    b, bias = mc.quantize(torch.zeros(3, 0, 7), 8, scale="column"), torch.randn(5)
    for dtype in (torch.float16, torch.float32):
        assert torch.equal(spmm(a, b, dtype, bias=bias), bias.to(dtype)[:, None].expand(3, 5, 7))
        assert torch.equal(spmm(a, b, dtype), torch.zeros(3, 5, 7, dtype=dtype))


PAIRS: list[dict[str, Any]] = [
    {"warps": 4}, {"warps": 3, "rows_per_warp": 2}, {"warps": 2, "rows_per_warp": 4}, {"warps": 2, "cluster": 2},
    {"warps": 4, "a_stages": 4},
]  # fmt: skip
TRANSPOSED = [
    replace(config, transposed=True)
    for out in OUTS
    for bits in (4, 8, 16)
    for config in [
        *both(out, (bits, True)),
        *(panel(kind(8, right=(bits, True), out=out), **few) for few in PAIRS * PANELS if out in FLOATS[:2]),
    ]
]


@pytest.mark.parametrize("config", TRANSPOSED, ids=named)
@pytest.mark.parametrize(("m", "n"), [(64, 96), (72, 97), (61, 96), (200, 130), (61, 5)])
def test_the_transpose_has_the_same_bits(config: SpmmKernel, m: int, n: int) -> None:
    torch.manual_seed(n)
    w, dtype = torch.randn(m, 300), getattr(torch, config.out)
    a = mc.SRBCRS.from_mask(w, mc.prune(w, 0.6, 8), vector_length=8, bits=8, scale="row").to("cuda")
    bias = torch.randn(m, device="cuda") if dtype.is_floating_point else None
    for scale in ("tensor", "column"):
        b = mc.quantize(torch.randn(300, n, device="cuda"), config.b.bits, scale=scale)
        plain = mc.spmm(a, b, out_dtype=dtype, bias=bias, config=replace(config, transposed=False))
        problem = check_problem(a, b, dtype, bias, None)
        packed = list(config.pack(_vectors(a, 8), 300))
        out = torch.full((n + 1, m), 77, device="cuda").to(dtype)
        rows = DenseOperand(b.data, b.bits, True, -2, b.packed_dim)
        of_b = None if b.scale is None or bias is None else b.scale.reshape(() if scale == "tensor" else -1)
        of_a = None if bias is None else problem.row_scale
        cuda.spmm(config.name, packed, rows, 300, out[:n].mT, of_a, of_b, problem.bias)
        assert torch.equal(out[:n].mT, plain)
        assert bool((out[n] == 77).all())
    with pytest.raises(ValueError, match="config must not be transposed"):
        mc.spmm(a, b, out_dtype=dtype, config=config)
