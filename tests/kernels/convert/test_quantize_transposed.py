"""Quantization into the transposed matrix by the GPU's kernel: integers and scales as the CPU has them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")

from cute_kernels.convert.quantize_transposed import (
    TransposedConfig,
    TurnedConfig,
    _choose,
    default_configs,
    quantize_transposed,
    turned_config,
)
from cute_kernels.dtypes import REAL_DTYPES
from cute_kernels.jit import Binary, Unit
from magicube_cutlass.autograd.integer import quantized
from magicube_cutlass.ops import torch_ops as library
from tests.helpers import disassemble

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# One row and column; odd; more columns than a CTA stores or loads at once; more rows than shares of columns.
SHAPES = [(1, 1), (1, 4096), (3, 5), (16, 100), (17, 1001), (70, 333), (16, 14336), (40, 5000), (300, 72)]


# One CTA; two sets of rows, of which the second is not whole; clusters of 2 to 16; the most columns.
TURNED = [(1, 8), (33, 72), (64, 512), (100, 704), (65, 1544), (130, 4096), (130, 5000), (40, 16384)]


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.long), "sm_90a"])
@pytest.mark.parametrize("config", [default_configs("sm_80")[i] for i in (2, 4, 11)], ids=lambda config: config.name)
def test_machine_code_keeps_everything_in_registers(
    config: TransposedConfig, arch: str, compile_one: Callable[[Unit], Binary]
) -> None:
    binary = compile_one(config.translation_unit(arch))
    sass = disassemble(binary.code)
    assert binary.usage is not None and binary.usage.stack_bytes == binary.usage.spill_bytes == 0, binary.usage
    assert not re.search(r"\b(?:LDL|STL)\b", sass)
    assert ("LDG.E.128" in sass) == (not config.given) and "STG.E.U8" not in sass


@pytest.mark.parametrize("config", default_configs("sm_90a")[12::3], ids=lambda config: config.name)
def test_machine_code_for_many_rows_holds_them_in_registers(
    config: TurnedConfig, compile_one: Callable[[Unit], Binary]
) -> None:
    binary = compile_one(config.translation_unit("sm_90a"))
    sass = disassemble(binary.code)
    assert binary.usage is not None and binary.usage.stack_bytes == binary.usage.spill_bytes == 0, binary.usage
    assert binary.usage.registers * config.threads * config.resident <= 65536
    loads = config.rows // 8 * config.steps
    assert len(re.findall(r"LDG\.E\.128", sass)) == loads and not re.search(r"\b(?:LDL|STL)\b", sass)
    assert "STG.E.128" in sass and "STG.E.U8" not in sass
    assert ("ST.E.ASYNC" in sass or "STAS" in sass) == (config.cluster > 1)


@pytest.mark.parametrize("shape, dtype, given, arch, want", [
    ((15, 4096), torch.float16, 0, "sm_90a", "encode_transposed-float16-r4c1"),
    ((16, 4096), torch.float16, 0, "sm_90a", "encode_turned-float16-r32s1c16x5"),
    ((1, 1024), torch.float16, 0, "sm_90a", "encode_turned-float16-r32s1c4x5"),
    ((64, 4096), torch.float16, 0, "sm_80", "encode_transposed-float16-r4c1"),
    ((65, 4096), torch.float16, 0, "sm_90a", "encode_turned-float16-r32s1c16x5"),
    ((4096, 4096), torch.float16, 0, "sm_90a", "encode_turned-float16-r32s2c8x4"),
    ((65, 4096), torch.float16, 0, "sm_80", "encode_transposed-float16-r8c2"),
    ((65, 4095), torch.float16, 0, "sm_90a", "encode_transposed-float16-r8c2"),
    ((2**18, 16), torch.float16, 0, "sm_90a", "encode_turned-float16-r32s1c1x5"),
    ((1, 2**22), torch.float16, 0, "sm_80", "encode_transposed-float16-r4c1"),
    ((64, 4096), torch.float16, 64, "sm_90a", "encode_turned-float16-given-r32s1c1x5"),
    ((64, 4096), torch.float16, 64, "sm_80", None),
    ((256, 4096), torch.float16, 1, "sm_90a", "encode_transposed-float16-given-r16c2"),
    ((257, 4096), torch.float16, 1, "sm_90a", "encode_turned-float16-given-r32s1c1x5"),
    ((2048, 2056), torch.float16, 0, "sm_90a", "encode_turned-float16-r32s1c9x5"),
    ((2048, 2049), torch.float16, 0, "sm_90a", None),
    ((2048, 2056), torch.float16, 0, "sm_80", None),
    ((4096, 11008), torch.bfloat16, 0, "sm_100a", "encode_turned-bfloat16-r32s4c11x2"),
    ((4096, 4096), torch.float32, 0, "sm_90a", "encode_turned-float32-r32s2c16x4"),
    ((4096, 11008), torch.float32, 0, "sm_90a", None),
    ((4096, 11008), torch.float32, 1, "sm_90a", "encode_turned-float32-given-r32s1c1x6"),
    ((2**22, 1), torch.float16, 0, "sm_90a", None),
])  # fmt: skip
def test_the_kernel_for_a_shape(
    shape: tuple[int, int], dtype: torch.dtype, given: int, arch: str, want: str | None
) -> None:
    scale = torch.empty(given, 1, device="meta") if given > 1 else torch.empty((), device="meta") if given else None
    chosen = _choose(torch.empty(shape, dtype=dtype, device="meta"), scale, arch)
    assert (None if chosen is None else chosen.name) == (want and f"quantize-{want}")


def rows_of(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(4 * torch.randn(shape[0], 1, generator=generator))
    ties = torch.randint(-127, 128, shape, generator=generator) + 0.5
    return torch.where(torch.rand(shape[0], 1, generator=generator) < 0.3, ties, x).to(dtype)


def check(
    x: Tensor, on_gpu: Tensor, scale: Tensor | None = None, config: TransposedConfig | TurnedConfig | None = None
) -> None:
    data, found = quantize_transposed(on_gpu, None if scale is None else scale.cuda(), config=config)
    if scale is not None and scale.ndim:
        ints, by = library.quantize_by(x, scale, 8), scale
    else:
        want = quantized(x, 8, 1 if scale is None else None, scale)
        assert want.scale is not None
        ints, by = want.ints().to(torch.int8), want.scale
    assert torch.equal(data.cpu(), ints.mT)
    assert torch.equal(found.cpu().nan_to_num(-1), by.nan_to_num(-1))
    rows = x.shape[0]
    assert data.stride() == (-(-rows // 16) * 16, 1)
    between = data.as_strided((x.shape[1], data.stride(0)), data.stride())[:, rows:]
    assert not between.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_and_scales_are_the_cpu_s(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = rows_of(shape, dtype, 1)
    check(x, x.cuda())
    check(x, x.cuda(), torch.tensor(0.037))
    wide = torch.full((shape[0], shape[1] + 3), math.nan, dtype=dtype).cuda()
    wide[:, 1:-2] = x.cuda()
    check(x, wide[:, 1:-2])  # no aligned loads


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite_or_zero_or_tiny(dtype: torch.dtype) -> None:
    x = rows_of((20, 700), dtype, 2)
    x[3, 699], x[5, 0], x[7], x[9, 300] = math.nan, -math.inf, 0, math.inf
    x[11] = torch.finfo(dtype).smallest_normal * torch.linspace(-1, 1, 700)
    x[13] = torch.finfo(dtype).max * torch.linspace(-1, 1, 700)
    check(x, x.cuda())
    check(x, x.cuda(), torch.tensor(1e-3))


def turned_configs(x: str, columns: int) -> list[TurnedConfig]:
    """Those that hold such rows; 64 rows in place of 32 too."""
    cases = ((512, False), (1 << 14, False), (512, True))
    found = dict.fromkeys(turned_config(x, rows, columns, given) for rows, given in cases)
    chosen = [each for each in found if each]
    return chosen + [replace(each, rows=64, resident=2) for each in chosen if each.steps < 4]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", TURNED)
def test_many_rows_have_the_integers_of_the_cpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, wide = rows_of(shape, dtype, 3), torch.full((shape[0], shape[1] + 16), math.nan, dtype=dtype).cuda()
    wide[:, 8:-8] = x.cuda()
    by_row = x.float().abs().amax(1, keepdim=True).nan_to_num(1, 1) / 100 + 1e-30
    for config in turned_configs(REAL_DTYPES[dtype], shape[1]):
        for on_gpu in (x.cuda(), wide[:, 8:-8]):
            for scale in (torch.tensor(0.037), by_row) if config.given else (None,):
                check(x, on_gpu, scale, config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_that_are_not_finite_or_zero_or_tiny(dtype: torch.dtype) -> None:
    x = rows_of((80, 3000), dtype, 2)
    x[3, 2999], x[5, 0], x[7], x[9, 300] = math.nan, -math.inf, 0, math.inf
    x[11] = torch.finfo(dtype).smallest_normal * torch.linspace(-1, 1, 3000)
    x[13] = torch.finfo(dtype).max * torch.linspace(-1, 1, 3000)
    for config in turned_configs(REAL_DTYPES[dtype], 3000):
        check(x, x.cuda(), torch.tensor(1e-3) if config.given else None, config)


@pytest.mark.gpu
def test_many_rows_by_default_and_into_memory_of_the_caller() -> None:
    x = rows_of((1100, 4096), torch.float16, 4)
    check(x, x.cuda())
    out = torch.full((4096, 1104), 7, dtype=torch.int8, device="cuda")
    scale = torch.zeros(1100, 1, device="cuda")
    data, found = quantize_transposed(x.cuda(), out=out, out_scale=scale)
    want = quantized(x, 8, 1)
    assert data.data_ptr() == out.data_ptr() and found.data_ptr() == scale.data_ptr() and want.scale is not None
    assert torch.equal(out[:, :1100].cpu(), want.ints().to(torch.int8).mT) and not out[:, 1100:].any()
    assert torch.equal(scale.cpu().nan_to_num(-1), want.scale.nan_to_num(-1))
