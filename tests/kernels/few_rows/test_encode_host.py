"""The kernels that encode rows to e4m3 and nvfp4: their source on the CPU, in every bit what torch computes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.few_rows import encode_e4m3
from cute_kernels.few_rows.encode_e4m3 import ENCODED, EncodeConfig, encode_config
from magicube_cutlass.nn.dense.encode import encoded
from magicube_cutlass.quantization.float_tensor import quantize_floats
from tests.kernels.few_rows.host import (
    E4M3,
    KERNELS,
    Edit,
    compile_library,
    has_compiler,
    launcher,
    source_of,
    with_host_conversion,
)

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")
ENTRIES = {
    "e4m3": "encode_e4m3_rows",
    "e4m3_g128": "encode_e4m3_groups",
    "mxfp8": "encode_mxfp8_rows",
    "nvfp4": "encode_nvfp4_rows",
}
SHAPES = [(1, 1), (3, 77), (2, 2600), (5, 512), (4, 130)]  # (M, K): a CTA has 2048 or 4096 values at a time
LONG = (129, 2050), (1, 8200)  # more than a CTA has at a time


def configs_of(entry: str, dtypes: Iterable[torch.dtype] = ENCODED) -> set[EncodeConfig]:
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return {encode_config(entry, name, *shape) for name in names for shape in (*SHAPES, *LONG)}


# Arguments of an entry: rows, elements from row to row, columns, then scales and codes.
_ARGUMENTS = {
    "encode_e4m3_rows": "(float*)a[3], a[4], (uint8_t*)a[5], a[6], a[7]",
    "encode_e4m3_groups": "(float*)a[3], a[4], a[5], (uint8_t*)a[6], a[7], a[8]",
    "encode_mxfp8_rows": "(uint8_t*)a[3], a[4], (uint8_t*)a[5], a[6], a[7]",
    "encode_nvfp4_rows": "(uint8_t*)a[3], a[4], (float*)a[5], (uint8_t*)a[6], a[7], a[8]",
}
_RUN = """
extern "C" const char* run_{name}(const host::Launch* launch, const int64_t* a) {{
  using namespace magicube;
  return host::run(*launch, {{}}, [=] {{ few::{entry}<{name}>((const {name}::Source*)a[0], a[1], a[2], {arguments}); }});
}}
"""
# What g++ does not have. Conversions of double round toward zero from the nearest float32, if that is farther from zero.
_DEVICE = """
#include <cmath>
#include <cstring>
#include "few_rows/formats.cuh"
inline void pdl_wait() {}
inline float __double2float_rn(double x) { return float(x); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __double2float_rz(double x) {
  const float near = float(x);
  return std::fabs(double(near)) > std::fabs(x) ? std::nextafterf(near, 0.0f) : near;
}
inline int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __reduce_max_sync(unsigned lanes, unsigned x) {
  for (int step = 1; step < 32; step *= 2) x = std::max(x, __shfl_xor_sync(lanes, x, step));
  return x;
}
namespace host {
struct HalfSource { uint16_t bits; HalfSource() = default; HalfSource(float) : bits(0) {} };
struct float16 : HalfSource {
  using HalfSource::HalfSource;
  operator float() const { __half x; x.bits = bits; return std::isnan(value(x)) ? NAN : float(value(x)); }
};
struct bfloat16 : HalfSource {
  using HalfSource::HalfSource;
  operator float() const { return __uint_as_float(uint32_t{bits} << 16); }
};
}
"""


def kernel_source(edit: Edit | None = None) -> str:
    """The header's text, as g++ takes it."""
    text = (KERNELS / "few_rows/encode_e4m3.cuh").read_text()
    text = edit("few_rows/encode_e4m3.cuh", text) if edit else text
    text = with_host_conversion(text)
    for old, new in (("__shared__ uint32_t", "static uint32_t"), ("#pragma once", "")):
        assert old in text, old
        text = text.replace(old, new)
    return text


class HostEncode:
    """The kernels of some configs as a library of this machine."""

    def __init__(self, folder: Path, configs: Iterable[EncodeConfig], edit: Edit | None = None) -> None:
        self._names = {config: f"Config{i}" for i, config in enumerate(configs)}
        source = E4M3 + _DEVICE + kernel_source(edit)
        for config, name in self._names.items():
            text = source_of(config, name).replace('#include "few_rows/encode_e4m3.cuh"', "")
            types = {"float16": "host::float16", "bfloat16": "host::bfloat16", "float32": "float"}
            text, count = re.subn(r"using Source = [^;]*;", f"using Source = {types[config.x]};", text)
            assert count == 1, text
            run = _RUN.format(name=name, entry=config.entry, arguments=_ARGUMENTS[config.entry])
            source += text + run
        self._library = compile_library(folder, source)

    def encoded(self, x: Tensor, act: str, monkeypatch: pytest.MonkeyPatch, scale: Tensor | None = None) -> Any:
        """As ``encoded``, launched here; raises what the emulation found."""
        monkeypatch.setattr(encode_e4m3, "get_kernel", launcher(self._library, self._names))
        monkeypatch.setattr(encode_e4m3, "device_of", nullcontext)
        return encoded(x, act, scale)


def rows(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Rows of several magnitudes: zeros, the smallest number, an infinity or NaN, quotients that are next to ties."""
    made = torch.Generator().manual_seed(m + k)
    x = (torch.randn(m, k, generator=made) * torch.randn(m, 1, generator=made).mul(4).exp()).to(dtype)
    if m > 2:
        x[1, : k // 2 + 1] = 0
        x[2, k // 2 :: k // 2] = torch.nan if m == 3 else torch.inf  # the last value of an odd number as well
    if m > 4:  # ties of e2m1: blocks of 16 have the scale 1
        x[4] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])[torch.randint(7, (k,), generator=made)]
        x[4, ::16], x[4, 0] = 6, 6 * 448
    if m > 3:
        unit = 0.0126456 if m > 4 else 0.0248456  # of the latter, the first approximation is beyond some ties
        odd = 2 * torch.randint(8, 16, (k,), generator=made) + 1  # halfway between two codes
        x[3] = (odd * unit * 2.0 ** torch.randint(-4, 4, (k,), generator=made)).to(dtype)
        x[3, ::64] = 448 * unit
    if m > 4 and dtype == torch.float32:
        x[0] = x[3] * 2.0**-119
    elif dtype != torch.float16:
        x[0] = x[0] * 1e-36 if m != 4 else 2.0**-149 if dtype == torch.float32 else 2.0**-133
    return x


def check(kernels: HostEncode, act: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    want = quantize_floats(x, act, axis=1, nonfinite="propagate", tensor_scale_per_row=True)
    got = kernels.encoded(x, act, monkeypatch)
    assert got.scale.shape == want.scale.shape and (got.block, got.scale_dtype) == (want.block, want.scale_dtype)
    assert torch.equal(got.scale.isnan(), want.scale.isnan()), "scales that are no numbers"
    assert torch.equal(got.scale.nan_to_num(), want.scale.nan_to_num()), "scales"
    if want.tensor_scale is not None:
        assert got.tensor_scale is not None and torch.equal(got.tensor_scale, want.tensor_scale), "scales of rows"
    assert torch.equal(got.data, want.data), "codes"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostEncode:
    return HostEncode(tmp_path_factory.mktemp("encode"), set().union(*map(configs_of, ENTRIES.values())))


@pytest.mark.parametrize("dtype", ENCODED, ids=str)
@pytest.mark.parametrize("act", ENTRIES)
def test_the_source_encodes_as_torch_does(
    act: str, dtype: torch.dtype, kernels: HostEncode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for m, k in SHAPES:
        x = rows(m, k, dtype)
        check(kernels, act, x, monkeypatch)
        check(kernels, act, torch.cat([x, x], 1)[:, 1 : k + 1], monkeypatch)  # rows that are not aligned


@pytest.mark.parametrize("act", ["e4m3", "nvfp4"])
def test_rows_that_a_cta_reads_in_several_steps(act: str, kernels: HostEncode, monkeypatch: pytest.MonkeyPatch) -> None:
    for m, k in LONG:
        x = rows(m, k, torch.bfloat16)
        x[-1, -1] = 2 * x[-1].abs().max().nan_to_num(posinf=1)  # the largest is the last
        check(kernels, act, x, monkeypatch)


def test_scales_of_128_lie_as_torch_reads_them(kernels: HostEncode, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels.encoded(rows(5, 512, torch.bfloat16), "e4m3_g128", monkeypatch)
    assert found.scale.shape == (5, 4) and found.scale.stride() == (1, 5)


BREACHES = [  # none writes out of bounds
    ("e4m3_g128", "step < 16", "step < 8"),
    ("e4m3_g128", "column / 128 * block_step", "column / 256 * block_step"),
    ("e4m3_g128", "__uint_as_float(1));", "0.0f);"),
    ("e4m3_g128", "if (bits == 0) return 1.0f;", ""),
    ("e4m3", "? bits - 1 : bits + 1", "? bits : bits"),
    ("e4m3", "? bits - 1 : bits + 1", "? bits + 1 : bits - 1"),
    ("e4m3", "0x1p64f : 1.0f", "1.0f : 1.0f"),
    ("e4m3", "scaled), inverse, first)", "scaled), 0.0f, first)"),
    ("nvfp4", "__float_as_uint(found) | 1", "__float_as_uint(found)"),
    ("mxfp8", "exponent - 8", "exponent - 7"),
    ("nvfp4", "x >= 1.75f", "x > 1.75f"),
    ("nvfp4", "if (bits < 0x7F800000) top", "if (bits <= 0x7F800000) top"),
    ("nvfp4", "& 0xFF, 1)", "& 0xFF, 0)"),
    ("nvfp4", "if (i < valid) word", "word"),
    ("nvfp4", "value * row_scale", "value"),
    ("nvfp4", "return max(bits, __shfl_xor_sync(~0u, bits, 1));", "return bits;"),
]


@pytest.mark.parametrize("breach", BREACHES, ids=lambda each: f"{each[0]}-{each[1]}")
def test_a_wrong_step_is_seen(breach: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    act, old, new = breach

    def edit(name: str, text: str) -> str:
        assert old in text, old
        return text.replace(old, new)

    kernels = HostEncode(tmp_path, configs_of(ENTRIES[act], [torch.float32]), edit)
    with pytest.raises(AssertionError, match=r"codes|scales"):
        for m, k in SHAPES:
            check(kernels, act, rows(m, k, torch.float32), monkeypatch)
