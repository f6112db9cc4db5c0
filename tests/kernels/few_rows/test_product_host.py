"""The few-rows kernel whole: its source on the CPU, with copies and products at once and as late as its waits allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cute_kernels.few_rows.product import ROWS, FewRowsConfig, candidates
from tests.kernels.few_rows.host import ACTS, HostFewRows, has_compiler
from tests.kernels.few_rows.model import decode, sample

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")
# Copies late: 1, products late: 2.
MODES = [0, 3, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)]

# config, out, (M, N, K)s: rings that go round, ranks without K tiles, blocks beyond N, more rows than a CTA has
Case = tuple[FewRowsConfig, str, list[tuple[int, int, int]]]
CASES: list[Case] = [
    (candidates("int4_g128", 8)[4], "float32", [(1, 70, 9300), (3, 1, 1)]),
    (candidates("nvfp4", 8, "float16")[0], "float16", [(7, 77, 1300)]),
    (candidates("nvfp4", 16, "float16")[3], "float16", [(20, 77, 5000)]),
    (candidates("mxfp4", 64)[0], "bfloat16", [(70, 136, 1300)]),
    (candidates("int8_g32_min", 32)[1], "float32", [(32, 130, 2050), (9, 72, 260)]),
    (candidates("mxfp6_e3m2", 16)[2], "float32", [(16, 77, 4104)]),
    (candidates("e4m3_g128", 16)[3], "float32", [(16, 77, 4104), (3, 1, 1)]),
    (candidates("e4m3_g128", 64, "float16")[0], "float32", [(65, 77, 2050), (64, 264, 520)]),
]
MANY: list[Case] = [
    (config, "float32", [(rows + 1, 77, 2050), (rows, 264, 520)])
    for name, act in (
        ("int8", "bfloat16"),
        ("e4m3", "float16"),
        ("int4_g128", "bfloat16"),
        ("int4_g16", "float16"),
        ("e4m3_g128", "bfloat16"),
    )
    for rows in ROWS
    for config in candidates(name, rows, act)
]


def check(
    kernels: HostFewRows, config: FewRowsConfig, out: str, shape: tuple[int, int, int], late: int, seed: int = 0
) -> None:
    """The product against the decoded weight's in float64, in a frame that must not change."""
    (m, n, k), act = shape, ACTS[config.act]
    made = torch.Generator().manual_seed(m + n + k + late)
    weight = sample(config.weight, n, k, config.act, late).weight
    x = torch.randn(m, -(-k // 8) * 8, generator=made).to(act)[:, :k]
    bias = torch.randn(n, generator=made) if late % 2 else None
    row_scale = [None, torch.rand(m, generator=made), torch.rand((), generator=made)][(m + late) % 3]
    frame = torch.full((m + 2, n + 8 + -n % 8), 7.0, dtype=getattr(torch, out))
    got = frame[1:-1, 8 : n + 8] if late % 2 else frame[1:-1, 3 : n + 3]  # rows at multiples of 16 bytes, and not
    kernels.launch(replace(config, out=out), x, weight, got, bias, row_scale, seed=seed, late=late)
    values = decode(weight)
    # scales rounded to 16 bits, and products of values; else an instruction's sum is rounded once
    slack = 2.0 * torch.finfo(act).eps if config.rounds_scales else 2.0**-24 * (k / 16 + 16)
    factor = torch.ones(m, 1).double() if row_scale is None else row_scale.double().expand(m)[:, None]
    exact, magnitude = x.double() @ values.t() * factor, x.double().abs() @ values.abs().t() * factor
    exact = exact if bias is None else exact + bias
    limit = (
        slack * magnitude + 2.0**-23 * exact.abs() + torch.finfo(got.dtype).eps / 2 * (exact.abs() + slack * magnitude)
    )
    limit += 2.0**-25 if out == "float16" else 0  # subnormal
    assert bool(((got.double() - exact).abs() <= limit).all()), ("not close", config.name, shape, late)
    got.fill_(7.0)
    assert bool((frame == 7.0).all()), "written outside"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostFewRows:
    return HostFewRows(tmp_path_factory.mktemp("few_rows"), [replace(config, out=out) for config, out, _ in CASES])


@pytest.mark.parametrize("late", MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].name)
def test_the_source_computes_the_product(case: Case, late: int, kernels: HostFewRows) -> None:
    config, out, shapes = case
    for shape in shapes:
        check(kernels, config, out, shape, late)


@pytest.mark.long
@pytest.mark.parametrize(("name", "rows"), dict.fromkeys((case[0].weight, case[0].rows) for case in MANY))
def test_the_source_of_every_config_computes_the_product(name: str, rows: int, tmp_path: Path) -> None:
    cases = [case for case in MANY if (case[0].weight, case[0].rows) == (name, rows)]
    kernels = HostFewRows(tmp_path, [replace(config, out=out) for config, out, _ in cases])
    for config, out, shapes in cases:
        for late in (0, 3):
            for shape in shapes:
                check(kernels, config, out, shape, late)
