"""The few-rows product of int8 rows on a GPU: exact integers, and float64 products of exact sums of groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import magicube_cutlass as mc
from cute_kernels.few_rows.formats import FORMATS, PackedWeight, pack_weight
from cute_kernels.few_rows.product_int8 import (
    INT8_ROWS,
    FewRowsInt8Config,
    choose_few_rows_int8,
    few_rows_int8_product,
    int8_candidates,
    int8_formats,
)
from magicube_cutlass.nn.dense.product import quantize_act
from tests.gpu.problems import needs_warp_groups
from tests.kernels.few_rows.model import int8_limit, int8_product, sample

pytestmark = [pytest.mark.gpu, needs_warp_groups]

SHAPES = [(1, 1), (77, 130), (300, 264), (257, 2050), (600, 4200)]  # (N, K)
ROWS = (1, 16, 17, 64, 100, 128, 300)
OUTS = (torch.float32, torch.float16, torch.bfloat16)


def candidates_of(name: str) -> list[FewRowsInt8Config]:
    return [each for rows in INT8_ROWS for each in int8_candidates(name, rows)]


def random_rows(m: int, k: int) -> Tensor:
    return torch.randint(-128, 128, (m, -(-k // 16) * 16), device="cuda", dtype=torch.int8)[:, :k]


def chosen(name: str) -> list[FewRowsInt8Config]:
    return list(
        {
            choose_few_rows_int8(name, m, n, k, str(out).removeprefix("torch."))
            for m in ROWS
            for n, k in SHAPES
            for out in OUTS
        }
    )


@pytest.mark.parametrize("name", int8_formats())
@pytest.mark.configs([config for name in int8_formats() for config in chosen(name)])
def test_products_are_those_of_exact_sums(name: str) -> None:
    for seed, (n, k) in enumerate(SHAPES):
        weight = sample(name, n, k, "int8", seed, "cuda").weight
        for i, m in enumerate(ROWS):
            x, bias = random_rows(m, k), torch.randn(n, device="cuda") if i % 2 else None
            row_scale = [None, torch.rand(m, device="cuda"), torch.rand((), device="cuda")][i % 3]
            exact = int8_product(x, weight, row_scale, bias)
            for out in OUTS:
                got = few_rows_int8_product(x, weight, bias, row_scale=row_scale, out_dtype=out)
                limit = int8_limit(x, weight, row_scale, bias, out)
                assert bool(((got.double() - exact).abs() <= limit).all()), (n, k, m, out)


def plain(codes: Tensor, name: str) -> PackedWeight:
    """The weight of integers themselves: all scales are 1."""
    form, (n, k) = FORMATS[name], codes.shape
    scales = None if form.scale == "none" else torch.ones(n, -(-k // form.group), device="cuda")
    return pack_weight(codes, form, "int8", scales)


@pytest.mark.configs([choose_few_rows_int8("int8", 3, 2, 16, "float16")])
def test_results_beyond_float16_are_infinite() -> None:
    codes = torch.tensor([[127], [-128]], device="cuda", dtype=torch.int8).expand(2, 16)
    x = torch.ones(3, 16, device="cuda", dtype=torch.int8)
    row_scale = torch.tensor([65519.99 / 2032, 65520 / 2032, 1e30], device="cuda")  # 65520 is half way to 65536
    got = few_rows_int8_product(x, plain(codes, "int8"), row_scale=row_scale, out_dtype=torch.float16)
    inf = torch.inf
    assert got.tolist() == [[65504.0, -inf], [inf, -inf], [inf, -inf]]


@pytest.mark.parametrize("name", ["int4_g128", "int4_g32", "int8_g64", "int8"])
@pytest.mark.configs(
    [
        replace(each, out="float32")
        for name in ("int4_g128", "int4_g32", "int8_g64", "int8")
        for each in candidates_of(name)
    ]
)
def test_integers_are_exact_with_every_config(name: str) -> None:
    n, k = 1000, 1000
    top = 1 << (FORMATS[name].bits - 1)
    codes = torch.randint(-top, top, (n, k), device="cuda", dtype=torch.int8)
    codes[0], codes[1] = -top, top - 1
    weight = plain(codes, name)
    for config in candidates_of(name):
        x = random_rows(config.rows + 3, k)
        x[0], x[1] = -128, 127  # with the rows above: largest sums, 2^21 in magnitude for 128 k
        want = x.double() @ codes.double().t()
        assert float(want.abs().max()) <= 1 << 24, "exact in float32, 16 of them too"
        frame = torch.full((config.rows + 5, 1016), -7.0, device="cuda")
        for start in (3, 8):  # rows at multiples of 16 bytes, and not
            out = frame[1:-1, start : start + n]
            few_rows_int8_product(x, weight, out=out, config=replace(config, out="float32"))
            assert torch.equal(out.double(), want), config.name
            out.fill_(-7.0)
            assert bool((frame == -7.0).all()), "written outside"


@pytest.mark.parametrize("name", ["int4_g128", "int8_g128", "int4"])
@pytest.mark.configs([*candidates_of("int4_g128"), *candidates_of("int8_g128"), *candidates_of("int4")])
def test_launches_behind_each_other_agree_in_every_bit(name: str) -> None:
    weight = sample(name, 1024, 14336, "int8", 2, "cuda").weight
    for config in candidates_of(name):
        x = random_rows(config.rows, 14336)
        first = few_rows_int8_product(x, weight, config=config)
        outs = [torch.empty_like(first) for _ in range(8)]
        for _ in range(8):
            for out in outs:
                few_rows_int8_product(x, weight, out=out, config=config)
        torch.cuda.synchronize()
        assert all(torch.equal(out, first) for out in outs), config.name


# of the norm: the output's rounding; scales of groups of 64 are float16
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("group", [None, 64, 128, 256])
@pytest.mark.parametrize("dtype", OUTS)
def test_a_layer_multiplies_by_it(group: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 264, device="cuda", dtype=dtype)
    layer = mc.nn.QuantLinear.from_linear(linear, weight="int4", group_size=group).eval().freeze()
    assert layer.explain().backend == "few_rows_int8"
    assert ("float32 by torch" in layer.explain().text) == (group == 64)
    for m in (1, 20, 100, 300):
        x = torch.randn(2, m, 512, device="cuda", dtype=dtype)
        rows = quantize_act(x.flatten(0, 1), "int8", None)
        assert rows is not None
        want = rows.dequantize().double() @ layer.dequantize().double().t() + linear.bias.double()
        with torch.no_grad():
            for _ in range(2):  # a record, and its replay
                got = layer(x)
                assert got.shape == (2, m, 264) and got.dtype == dtype
                assert float((got.flatten(0, 1).double() - want).norm() / want.norm()) < BOUNDS[dtype]
