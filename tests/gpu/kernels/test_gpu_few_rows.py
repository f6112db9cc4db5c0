"""The few-rows product with packed weights on a GPU: every format against the decoded float64 product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_kernels.few_rows.api import few_rows_product
from cute_kernels.few_rows.decode import DecodeConfig, decode_weight, launch_decode
from cute_kernels.few_rows.formats import FORMATS
from cute_kernels.few_rows.product import ROWS, FewRowsConfig, candidates
from tests.gpu.problems import needs_warp_groups
from tests.kernels.few_rows.model import Sample, dense, sample

pytestmark = [pytest.mark.gpu, needs_warp_groups]

SHAPES = [(1, 1), (77, 130), (300, 264), (257, 2050), (600, 4200)]  # (N, K)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def bound(x: Tensor, made: Sample, exact: Tensor, out: torch.dtype, config: FewRowsConfig) -> Tensor:
    """Error of the weights as a kernel has them, of float32 sums, and of the output's rounding."""
    # Up to 32 rows, and of e4m3, a float32 scale, divided by a power of two, multiplies the partial sum of 128 k of
    # codes. Such a sum is one of 8 instructions, and 33 of them are added with a rounding each: 33 * 2^-24 < 2^-18.
    # Formats whose sums are of all 4200 k, 263 instructions, have 2^-17 as well.
    is_exact = made.weight.format.scale == "sum" and not config.rounds_scales
    slack = torch.zeros_like(made.slack) if is_exact else made.slack
    sums = x.double().abs() @ (slack + 2.0**-17 * (made.truth.abs() + slack)).t()
    return sums + torch.finfo(out).eps / 2 * (exact.abs() + sums)


def every(name: str, rows: tuple[int, ...] = ROWS) -> list[FewRowsConfig]:
    return [each for count in rows for each in candidates(name, count)]


def configs(name: str, act: str) -> list[FewRowsConfig]:
    return [
        replace(candidates(name, rows, act)[2], split=split) for rows, split in ((16, 1), (64, 2))[act == "float16" :]
    ]


@pytest.mark.parametrize("act", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.configs([config for name in FORMATS for act in DTYPES for config in configs(name, act)])
def test_products_are_within_the_stated_bound(name: str, act: str) -> None:
    for seed, (n, k) in enumerate(SHAPES):
        made = sample(name, n, k, act, seed, "cuda")
        for m in (1, 8, 9, 16, 20, 33, 64, 130):
            x = torch.randn(m, k, device="cuda").to(DTYPES[act])
            bias = torch.randn(n, device="cuda")
            exact = x.double() @ made.truth.t() + bias.double()
            for config in configs(name, act):
                got = few_rows_product(x, made.weight, bias, config=config)
                limit = bound(x, made, exact, x.dtype, config) + 2.0**-23 * bias.double().abs()
                assert bool(((got.double() - exact).abs() <= limit).all()), (n, k, m, config.name)


@pytest.mark.parametrize("name", ["int4_g128", "mxfp4", "e4m3_g128"])
@pytest.mark.configs([*every("int4_g128"), *every("mxfp4"), *every("e4m3_g128")])
def test_every_config_agrees_with_the_product(name: str) -> None:
    made = sample(name, 1000, 4104, "bfloat16", 1, "cuda")
    for config in every(name):
        x = torch.randn(config.rows, 4104, device="cuda").bfloat16()
        exact = x.double() @ made.truth.t()
        frame = torch.full((config.rows + 2, 1008), -7.0, device="cuda", dtype=torch.bfloat16)
        out = frame[1:-1, 3:1003]
        few_rows_product(x, made.weight, out=out, config=config)
        limit = bound(x, made, exact, out.dtype, config)
        assert bool(((out.double() - exact).abs() <= limit).all()), config.name
        again = few_rows_product(x, made.weight, config=config)
        assert torch.equal(again, out), "deterministic"
        out.fill_(-7.0)
        assert bool((frame == -7.0).all()), "written outside"


@pytest.mark.parametrize("name", ["int4_g128", "mxfp4", "int8", "e4m3", "e4m3_g128"])
@pytest.mark.configs([*every("int4_g128"), *every("mxfp4"), *every("int8"), *every("e4m3"), *every("e4m3_g128")])
def test_launches_behind_each_other_agree_in_every_bit(name: str) -> None:
    made = sample(name, 1024, 14336, "bfloat16", 2, "cuda")
    for config in every(name):
        x = torch.randn(config.rows, 14336, device="cuda").bfloat16()
        first = few_rows_product(x, made.weight, config=config)
        outs = [torch.empty_like(first) for _ in range(8)]
        for _ in range(8):
            for out in outs:
                few_rows_product(x, made.weight, out=out, config=config)
        torch.cuda.synchronize()
        assert all(torch.equal(out, first) for out in outs), config.name


@pytest.mark.parametrize("act", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.configs([DecodeConfig(name, act) for name in FORMATS for act in DTYPES])
def test_decoded_weights_are_the_model_s_in_every_bit(name: str, act: str) -> None:
    p = 8 if act == "bfloat16" else 11
    for seed, (n, k) in enumerate(SHAPES):
        made = sample(name, n, k, act, seed, "cuda")
        got = decode_weight(made.weight)
        assert got.dtype == DTYPES[act] and got.shape == (n, k)
        assert torch.equal(got.contiguous().view(torch.int16), dense(made.weight).view(torch.int16)), (n, k)
        limit = made.slack + (2.0**-p + 2.0**-22) * (made.truth.abs() + made.slack) + (2.0**-25 if p == 11 else 0)
        assert bool(((got.double() - made.truth).abs() <= limit).all()), (n, k)


@pytest.mark.parametrize("name", ["int4_g32_min", "mxfp6", "nvfp4", "int8_g128"])
def test_decoding_writes_the_rows_and_whole_runs_of_8_only(name: str) -> None:
    for seed, (n, k) in enumerate(SHAPES):
        made = sample(name, n, k, "float16", seed, "cuda")
        columns = -(-k // 8) * 8
        frame = torch.full((n + 66, columns + 264), 7.0, device="cuda", dtype=torch.float16)
        out = frame[1 : n + 1, 8 : columns + 8]
        launch_decode(DecodeConfig(name, "float16"), made.weight, out)
        assert torch.equal(out[:, :k], decode_weight(made.weight))
        out.fill_(7.0)
        assert bool((frame == 7.0).all()), "written outside"


def test_a_row_without_a_number_stays_alone_and_a_graph_decodes_anew() -> None:
    made = sample("int4_g128", 300, 520, "bfloat16", 4, "cuda")
    made.weight.row_scale[7] = torch.nan
    found = decode_weight(made.weight)
    assert bool(found[7].isnan().all()) and int(found.isnan().any(1).sum()) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = decode_weight(made.weight)
    made.weight.row_scale[7] = 1.0
    graph.replay()
    assert bool(again.isfinite().all()) and torch.equal(again, decode_weight(made.weight))
