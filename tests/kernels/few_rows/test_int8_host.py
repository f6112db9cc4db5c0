"""The few-rows kernel of int8 rows: its source on the CPU against sums in int64, and the order of packed codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cute_kernels.few_rows.formats import FORMATS, PackedWeight, pack_weight
from cute_kernels.few_rows.product_int8 import (
    INT8_ROWS,
    MAX_K,
    FewRowsInt8Config,
    few_rows_int8_product,
    int8_candidates,
    int8_formats,
)
from tests.kernels.few_rows.host import HostFewRows, has_compiler
from tests.kernels.few_rows.model import int8_limit, int8_product, integers, sample

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no g++")
SHAPES = [(1, 1), (77, 130), (64, 256), (130, 520)]  # (N, K)


@pytest.mark.parametrize("name", int8_formats())
def test_the_kernel_reads_the_weight_that_was_packed(name: str) -> None:
    form = FORMATS[name]
    for seed, (n, k) in enumerate(SHAPES):
        made = torch.Generator().manual_seed(seed)
        top = 1 << (form.bits - 1)
        codes = torch.randint(-top, top, (n, k), generator=made, dtype=torch.int8)
        scales = None if form.scale == "none" else torch.rand(n, -(-k // form.group), generator=made) + 0.01
        row_scale = torch.rand(n, generator=made) + 0.5
        weight = pack_weight(codes, form, "int8", scales, row_scale=row_scale)
        assert weight.act == "int8" and weight.data.shape[-1] == form.unit_bytes
        found, packed = integers(weight)
        factor = 16 if form.bits == 4 else 1
        assert torch.equal(found, codes.long() * factor)
        got = packed * weight.row_scale.double()[:, None] * factor
        want = row_scale.double()[:, None] * (1.0 if scales is None else scales.double())
        rounding = 2.0**-11 if form.scale == "half" else 2.0**-24
        bound = rounding * want + 2.0**-22 * want.amax(1, keepdim=True) * (form.scale == "half") + 2.0**-23 * want
        assert bool(((got[:, : want.shape[1]] - want).abs() <= bound).all())


def test_formats_that_int8_rows_do_not_have_are_refused() -> None:
    assert int8_formats() == [f"int{bits}" for bits in (4, 8)] + [
        f"int{bits}_g{group}" for bits in (4, 8) for group in (32, 64)
    ] + ["int4_g128", "int8_g128"]
    for name in ("int4_g16", "int4_g32_min", "mxfp4"):
        with pytest.raises(ValueError, match=f"form must have symmetric integers .*{name}"):
            sample(name, 8, 64, "int8")


def test_arguments_that_do_not_match_are_refused() -> None:
    weight = sample("int4_g32", 8, 64, "int8").weight
    x = torch.zeros(2, 64, dtype=torch.int8)
    with pytest.raises(TypeError, match=r"x must be torch\.int8, got torch\.float16"):
        few_rows_int8_product(x.half(), weight)
    with pytest.raises(TypeError, match="weight must be packed for 'int8', got 'float16'"):
        few_rows_int8_product(x, sample("int4_g32", 8, 64, "float16").weight)
    with pytest.raises(ValueError, match=r"x must have shape \(M, 64\) to match the weight, got \(2, 63\)"):
        few_rows_int8_product(x[:, 1:], weight)
    long = replace(sample("int8", 1, 1, "int8").weight, shape=(1, MAX_K + 1))
    with pytest.raises(ValueError, match=f"weight must have K <= {MAX_K} without groups, got {MAX_K + 1}"):
        few_rows_int8_product(torch.zeros(1, MAX_K + 1, dtype=torch.int8), long)
    assert few_rows_int8_product(x[:0], weight).shape == (0, 8)


# config, out, (M, N, K)s: rings that go round, ranks without K tiles, blocks beyond N, more rows than a CTA has
Case = tuple[FewRowsInt8Config, str, list[tuple[int, int, int]]]
CASES: list[Case] = [
    (int8_candidates("int4_g128", 16)[3], "float32", [(1, 70, 9300), (3, 1, 1), (17, 77, 260)]),
    (int8_candidates("int4_g128", 64)[0], "bfloat16", [(70, 136, 1300)]),
    (int8_candidates("int4_g128", 128)[1], "float32", [(100, 130, 1300)]),
    (int8_candidates("int4_g32", 32)[0], "float16", [(32, 130, 2050), (9, 72, 260)]),
    (int8_candidates("int8_g64", 16)[1], "float32", [(16, 77, 4104)]),
    (int8_candidates("int8_g64", 128)[0], "float32", [(100, 72, 700)]),
    (int8_candidates("int4", 16)[2], "float32", [(20, 77, 5000)]),
    (int8_candidates("int8", 64)[0], "float16", [(20, 77, 1300)]),
    (int8_candidates("int8_g128", 32)[0], "float32", [(32, 72, 1900)]),
]
MANY: list[Case] = [
    (config, "float32", [(rows + 1, 77, 2050), (rows, 264, 520)])
    for name in ("int4_g128", "int4_g32", "int8", "int8_g64")
    for rows in INT8_ROWS
    for config in int8_candidates(name, rows)
]


def check(
    kernels: HostFewRows,
    config: FewRowsInt8Config,
    out: str,
    shape: tuple[int, int, int],
    late: int,
    seed: int = 0,
) -> None:
    """The product against that of exact sums in float64, in a frame that must not change."""
    m, n, k = shape
    made = torch.Generator().manual_seed(m + n + k + late)
    weight = sample(config.weight, n, k, "int8", late).weight
    x = torch.randint(-128, 128, (m, -(-k // 16) * 16), generator=made, dtype=torch.int8)[:, :k]
    bias = torch.randn(n, generator=made) if late % 2 else None
    row_scale = [None, torch.rand(m, generator=made), torch.rand((), generator=made)][(m + late) % 3]
    frame = torch.full((m + 2, n + 8 + -n % 8), 7.0, dtype=getattr(torch, out))
    got = frame[1:-1, 8 : n + 8] if late % 2 else frame[1:-1, 3 : n + 3]  # rows at multiples of 16 bytes, and not
    kernels.launch(replace(config, out=out), x, weight, got, bias, row_scale, seed=seed, late=late)
    exact, limit = int8_product(x, weight, row_scale, bias), int8_limit(x, weight, row_scale, bias, got.dtype)
    assert bool(((got.double() - exact).abs() <= limit).all()), ("not close", config.name, shape, late)
    got.fill_(7.0)
    assert bool((frame == 7.0).all()), "written outside"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostFewRows:
    return HostFewRows(tmp_path_factory.mktemp("int8"), [replace(config, out=out) for config, out, _ in CASES])


@needs_compiler
@pytest.mark.parametrize(
    "late", [0, 3, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].name)
def test_the_source_computes_the_product(case: Case, late: int, kernels: HostFewRows) -> None:
    config, out, shapes = case
    for shape in shapes:
        check(kernels, config, out, shape, late)


def plain(codes: Tensor, name: str) -> PackedWeight:
    """The weight of integers themselves: all scales are 1."""
    form, (n, k) = FORMATS[name], codes.shape
    scales = None if form.scale == "none" else torch.ones(n, -(-k // form.group))
    return pack_weight(codes, form, "int8", scales)


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].name)
def test_integers_are_exact(case: Case, kernels: HostFewRows) -> None:
    config = replace(case[0], out=case[1])
    m, n, k = min(config.rows, 20), 70, 700
    top = 1 << (config.format.bits - 1)
    codes = torch.randint(-top, top, (n, k), dtype=torch.int8)
    x = torch.randint(-128, 128, (m, 704), dtype=torch.int8)[:, :k]
    x[0], x[1] = -128, 127  # with the rows below: largest sums, 2^21 in magnitude for 128 k
    codes[0], codes[1] = -top, top - 1
    got = torch.empty(m, n, dtype=getattr(torch, case[1]))
    scale = torch.tensor(2.0**-12 if case[1] == "float16" else 1.0)
    kernels.launch(config, x, plain(codes, config.weight), got, None, scale)
    want = (x.long() @ codes.long().t()).double() * scale.double()
    assert int((x.long() @ codes.long().t()).abs().max()) * (16 if top == 8 else 1) < 1 << 24, "exact in float32"
    assert torch.equal(got, want.to(got.dtype))


@needs_compiler
def test_results_beyond_float16_are_infinite(kernels: HostFewRows) -> None:
    config, out, _ = next(case for case in CASES if case[1] == "float16" and case[0].weight == "int8")
    codes = torch.tensor([[127], [-128]], dtype=torch.int8).expand(2, 16)
    x = torch.ones(3, 16, dtype=torch.int8)
    got = torch.empty(3, 2, dtype=torch.float16)
    # 65520 is half way to 65536, which float16 does not have
    row_scale = torch.tensor([65519.99 / 2032, 65520 / 2032, 1e30])
    kernels.launch(replace(config, out=out), x, plain(codes, "int8"), got, None, row_scale)
    inf = torch.inf
    assert torch.equal(got, torch.tensor([[65504.0, -inf], [inf, -inf], [inf, -inf]], dtype=torch.float16))


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize(("name", "rows"), dict.fromkeys((case[0].weight, case[0].rows) for case in MANY))
def test_the_source_of_every_config_computes_the_product(name: str, rows: int, tmp_path: Path) -> None:
    cases = [case for case in MANY if (case[0].weight, case[0].rows) == (name, rows)]
    kernels = HostFewRows(tmp_path, [replace(config, out=out) for config, out, _ in cases])
    for config, out, shapes in cases:
        for late in (0, 3):
            for shape in shapes:
                check(kernels, config, out, shape, late)
