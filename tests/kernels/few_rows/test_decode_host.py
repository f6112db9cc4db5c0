"""The kernel's decoding of packed weights: its source on the CPU, in every bit that of the model."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cute_kernels.few_rows.formats import FORMATS, PackedWeight
from cute_kernels.few_rows.product import FewRowsConfig
from tests.kernels.few_rows.host import ACTS, HostFewRows, compile_library, has_compiler
from tests.kernels.few_rows.model import decode, sample

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")
N, K = 77, 300  # blocks and units that end early
CONFIGS = [FewRowsConfig(name, 16, act, act) for name in FORMATS for act in ACTS]
# 64 rows: scales of 128 k multiply sums of e4m3, and values of integers
WIDE = [FewRowsConfig("e4m3_g128", 64, act, act) for act in ACTS]
ROUNDED = [FewRowsConfig(name, 64, act, act) for name in ("int4_g128", "int8_g128") for act in ACTS]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> HostFewRows:
    return HostFewRows(tmp_path_factory.mktemp("few_rows"), (), [*CONFIGS, *WIDE, *ROUNDED])


def plain(weight: PackedWeight) -> PackedWeight:
    """The weight without the scales of its rows, which the epilogue has."""
    return replace(weight, row_scale=torch.ones_like(weight.row_scale))


def operands(decoders: HostFewRows, config: FewRowsConfig, weight: PackedWeight) -> tuple[Tensor, Tensor]:
    """What the kernel multiplies, (N, K), and the first scale word of each unit's rows, (N, units)."""
    blocks, units, _ = weight.data.shape
    found = [[decoders.operand(config, weight.data[b, u]) for u in range(units)] for b in range(blocks)]
    values = torch.cat([torch.cat([each for each, _ in row], 1) for row in found])
    scales = torch.cat([torch.stack([words[:, 0] for _, words in row], 1) for row in found])
    return values[: weight.shape[0], : weight.shape[1]], scales[: weight.shape[0]]


def check_operands(decoders: HostFewRows, config: FewRowsConfig) -> None:
    """Compare a random weight's operands to the model's values."""
    weight = plain(sample(config.weight, N, K, config.act, 1).weight)
    values, scales = operands(decoders, config, weight)
    got = values.double()
    if config.format.scale == "sum":  # the partial sum's scale
        got = got * scales.contiguous().view(torch.float32).double().repeat_interleave(128, 1)[:, :K]
    assert torch.equal(got, decode(weight))


def check_rounded(decoders: HostFewRows, config: FewRowsConfig) -> None:
    """Compare operands to integers times their scales, each rounded to 16 bits."""
    weight = plain(sample(config.weight, N, K, config.act, 1).weight)
    values, words = operands(decoders, config, weight)
    scales = words.contiguous().view(torch.float32)
    codes = decode(weight) / scales.double().repeat_interleave(128, 1)[:, :K]
    whole = codes * 64 if config.act == "bfloat16" else codes  # which integers become 2^6 too small
    assert torch.equal(whole, whole.round())
    rounded = scales.to(ACTS[config.act]).float().repeat_interleave(128, 1)[:, :K]
    assert torch.equal(values, (codes.float() * rounded).to(ACTS[config.act]))


@pytest.mark.parametrize("config", CONFIGS + WIDE, ids=lambda config: f"{config.weight}-{config.act}-{config.rows}")
def test_the_kernel_decodes_what_the_model_does(config: FewRowsConfig, decoders: HostFewRows) -> None:
    check_operands(decoders, config)


@pytest.mark.parametrize("config", ROUNDED, ids=lambda config: f"{config.weight}-{config.act}")
def test_with_64_rows_values_have_rounded_scales(config: FewRowsConfig, decoders: HostFewRows) -> None:
    check_rounded(decoders, config)


_WIDEN = """
#include "few_rows/widen.cuh"
extern "C" void widen_{act}(const uint32_t* words, uint32_t* wide, int count) {{
  for (int i = 0; i < count; ++i) wide[i] = magicube::few::integer_pair<magicube::{half}>(words[i]);
}}
"""


def test_widened_bytes_are_the_integers(tmp_path: Path) -> None:
    library = compile_library(tmp_path, "".join(_WIDEN.format(act=act, half=act.upper()) for act in ACTS))
    ints = torch.arange(-128, 128)
    words = ((ints & 255) | (ints.flip(0) & 255) << 16 | 0x5A00A500).int()  # the other bytes are not read
    for act, dtype in ACTS.items():
        wide = torch.zeros(256, 2, dtype=dtype)
        getattr(library, f"widen_{act}")(ctypes.c_void_p(words.data_ptr()), ctypes.c_void_p(wide.data_ptr()), 256)
        assert torch.equal(wide.long(), torch.stack([ints, ints.flip(0)], 1))
