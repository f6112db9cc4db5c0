"""Quantization into the transposed matrix by the GPU's kernel: integers and scales as the CPU has them."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("pycute", reason="needs the wheel nvidia-cutlass")

from cute_kernels.convert.quantize_transposed import (
    TransposedConfig,
    default_configs,
    quantize_transposed,
    serves,
)
from cute_kernels.jit import compile_unit
from magicube_cutlass.autograd.integer import quantized
from tests.helpers import disassemble

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# One row and column; odd; more columns than a CTA stores or loads at once; more rows than shares of columns.
SHAPES = [(1, 1), (1, 4096), (3, 5), (16, 100), (17, 1001), (70, 333), (16, 14336), (40, 5000), (300, 72)]


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.long), "sm_90a"])
@pytest.mark.parametrize("config", [default_configs()[i] for i in (2, 4, 11)], ids=lambda config: config.name)
def test_machine_code_keeps_everything_in_registers(config: TransposedConfig, arch: str) -> None:
    binary = compile_unit(config.translation_unit(arch))
    sass = disassemble(binary.code)
    assert binary.usage is not None and binary.usage.stack_bytes == binary.usage.spill_bytes == 0, binary.usage
    assert not re.search(r"\b(?:LDL|STL)\b", sass)
    assert ("LDG.E.128" in sass) == (not config.given) and "STG.E.U8" not in sass


def test_shapes_beyond_a_grid_are_left_to_others() -> None:
    assert serves(2**18, 16) and serves(1, 2**22) and not serves(2**19, 1) and not serves(2**11, 2**11 + 1)


def rows_of(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(4 * torch.randn(shape[0], 1, generator=generator))
    ties = torch.randint(-127, 128, shape, generator=generator) + 0.5
    return torch.where(torch.rand(shape[0], 1, generator=generator) < 0.3, ties, x).to(dtype)


def check(x: Tensor, on_gpu: Tensor, scale: Tensor | None = None) -> None:
    data, found = quantize_transposed(on_gpu, None if scale is None else scale.cuda())
    want = quantized(x, 8, 1 if scale is None else None, scale)
    assert want.scale is not None
    assert torch.equal(data.cpu(), want.ints().to(torch.int8).mT)
    assert torch.equal(found.cpu().nan_to_num(-1), want.scale.nan_to_num(-1))
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
