"""The kernel that folds block scales into e4m3 values: its source on the CPU, in every bit what float64 gives."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import floats
from cute_kernels.scaled_gemm import dequantize
from cute_kernels.scaled_gemm.config import OperandFormat
from cute_kernels.scaled_gemm.cuda import choose_config
from cute_kernels.scaled_gemm.dequantize import FoldConfig, fold, fold_config, folded_format
from cute_kernels.scaled_gemm.operand import FloatOperand
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
HEADER = "scaled_gemm/dequantize.cuh"
FORMATS = [OperandFormat(dtype, 32, "ue8m0") for dtype in ("e4m3", "e3m2", "e2m3", "e2m1")]
SHAPES = [(1, 1), (3, 77), (6, 256), (2, 18_500), (9, 2100)]  # (R, K): a CTA holds 16384 values of a row
_RUN = """
extern "C" const char* run_{name}(const host::Launch* launch, const int64_t* a) {{
  using namespace magicube;
  return host::run(*launch, {{}}, [=] {{
    fold_floats<{name}>((const uint8_t*)a[0], a[1], a[2], a[3], a[4], a[5], (const uint8_t*)a[6], a[7], (const float*)a[8], a[9],
                        (float*)a[10], (uint8_t*)a[11], a[12]);
  }});
}}
"""
# What g++ does not have.
_DEVICE = """
#include "scaled_gemm/common.cuh"
inline uint32_t __vimax3_u16x2(uint32_t a, uint32_t b, uint32_t c) {
  const auto most = [](uint32_t x, uint32_t y, uint32_t z) { return std::max({x, y, z}); };
  return most(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF) | most(a >> 16, b >> 16, c >> 16) << 16;
}
inline int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }
inline int __reduce_max_sync(unsigned lanes, int x) {
  for (int step = 1; step < 32; step *= 2) x = std::max(x, int(__shfl_xor_sync(lanes, x, step)));
  return x;
}
"""


def configs_of(lines: bool) -> set[FoldConfig]:
    return {fold_config(fmt, lines, k) for fmt in FORMATS for _, k in SHAPES}


class HostFold:
    """The kernels of some configs as a library of this machine."""

    def __init__(self, folder: Path, configs: Iterable[FoldConfig], edit: Edit | None = None) -> None:
        text = (KERNELS / HEADER).read_text()
        text = edit(HEADER, text) if edit else text
        text = with_host_conversion(text)
        assert "__shared__ int" in text
        source = E4M3 + _DEVICE + text.replace("__shared__ int", "static int").replace("#pragma once", "")
        self._names = {config: f"Config{i}" for i, config in enumerate(configs)}
        for config, name in self._names.items():
            source += source_of(config, name).replace(f'#include "{HEADER}"', "") + _RUN.format(name=name)
        self._library = compile_library(folder, source)

    def fold(self, operand: FloatOperand, lines: bool, monkeypatch: pytest.MonkeyPatch) -> FloatOperand:
        """As :func:`fold`, launched here; raises what the emulation found."""
        monkeypatch.setattr(dequantize, "get_kernel", launcher(self._library, self._names))
        return fold(operand, lines)


def operand_of(fmt: OperandFormat, rows: int, k: int, spread: int) -> FloatOperand:
    """All codes, and scales within `spread` binades of each other; a block of zeros with a large scale, and NaN."""
    made = torch.Generator().manual_seed(rows + k + spread)
    codes = torch.randint(1 << fmt.bits, (rows, k), generator=made).to(torch.uint8)
    if fmt.dtype == "e4m3":
        codes[:2][codes[:2] % 128 == 127] -= 1  # NaN in other rows
    blocks = torch.randint(-spread, 1, (rows, -(-k // 32)), generator=made) + 127
    blocks += torch.randint(-60, 60, (rows, 1), generator=made)
    if k > 64:
        codes[0, 32:64], blocks[0, 1] = 0, 250
        if rows > 2:
            blocks[2, 2], blocks[1] = 255, 3  # NaN, and values below float32's smallest
        if rows > 5:
            codes[3], blocks[4], blocks[1, 0] = 0, 254, 200
            codes[2] %= (1 + torch.arange(k) // 32 % 8).to(torch.uint8)  # largest values of all kinds
            codes[5] |= 1 << fmt.bits - 2  # no small ones
    scale = torch.rand(rows, generator=made)
    return FloatOperand(
        floats.pack(codes, fmt.dtype), fmt.dtype, k, scale, blocks.to(torch.uint8), fmt.block, fmt.scale
    )


def folded(operand: FloatOperand, lines: bool) -> tuple[Tensor, Tensor]:
    """Codes (R, K) and scales (R, parts) by float64: the largest of a part is within 2^7..448."""
    rows, k = operand.rows, operand.k
    whole = operand.values(torch.float64)
    width = 128 if lines else k
    padded = torch.nn.functional.pad(whole, (0, -k % width)).view(rows, -1, width)
    if operand.dtype == "e4m3":  # codes of NaN count as the number that they would be
        number = floats.unpack(operand.packed_data, k, "e4m3") % 128 == 127
        assert operand.blocks is not None
        of_number = 480 * floats.decode(operand.blocks, "ue8m0", out_dtype=torch.float64)
        counted = torch.where(number, of_number.repeat_interleave(32, 1)[:, :k], whole)
    else:
        counted = whole
    counted = torch.nn.functional.pad(counted, (0, -k % width)).view(rows, -1, width)
    top = counted.abs().nan_to_num(0).amax(2)  # (R, parts)
    part, exponent = torch.frexp(top)  # part: 0.5..1, of which 15/16 times 2^9 is NaN
    base = torch.where(top == 0, 0, exponent - 9 + (part > 0.9).int()).clamp(-126, 127)
    y = torch.ldexp(padded, -base.unsqueeze(2)).flatten(1)[:, :k]
    codes = floats.encode(y.clamp(-448, 448).float(), "e4m3")
    return torch.where(y.isnan(), 127, codes).to(torch.uint8), torch.ldexp(
        torch.ones_like(base, dtype=torch.float32), base
    )


def check(kernels: HostFold, fmt: OperandFormat, lines: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, k in SHAPES:
        for spread in (0, 12, 40):
            operand = operand_of(fmt, rows, k, spread)
            codes, scales = folded(operand, lines)
            found = kernels.fold(operand, lines, monkeypatch)
            assert found.format == folded_format(fmt, lines) and found.k == k
            got = floats.unpack(found.packed_data, k, "e4m3")
            assert torch.equal(torch.where(got % 128 == 127, 127, got), codes), "codes"
            assert operand.scale is not None and found.scale is not None
            if lines:
                assert found.blocks is not None and torch.equal(found.blocks, scales), "scales"
                assert found.scale is operand.scale
            else:
                assert torch.equal(found.scale, operand.scale * scales[:, 0]), "scales"
                if fmt.dtype == "e2m1" and spread <= 12 and rows < 3 and k <= 64:
                    assert torch.equal(
                        found.values(torch.float64) * found.scale[:, None],
                        operand.values(torch.float64) * operand.scale[:, None],
                    )


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostFold:
    return HostFold(tmp_path_factory.mktemp("fold"), configs_of(True) | configs_of(False))


@pytest.mark.parametrize("lines", [True, False], ids=["lines", "rows"])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.dtype)
def test_the_source_folds_as_float64_does(
    fmt: OperandFormat, lines: bool, kernels: HostFold, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(kernels, fmt, lines, monkeypatch)


BREACHES = [
    (True, "lanes < 8; lanes", "lanes < 4; lanes"),
    (True, "run % 8 == 0", "run % 8 == 1"),
    (False, "largest - 8", "largest - 7"),
    (False, "largest + 1 >> 3", "largest >> 3"),
    (True, "& ~(magnitude + kEachByte)", ""),
    (True, "0x78 + 8 * shift", "0x7F + 8 * shift"),
    (True, "shift > 0 || shift < -14", "shift < -14"),
    (False, "shift > 9 || shift < -5", "shift > 9 || shift < -6"),
    (True, "any & 0x44444444 ? 1", "any & 0x44444444 ? 2"),
    (False, "kHeld * C::kThreads + threadIdx.x; run < runs", "kHeld * C::kThreads + threadIdx.x; false"),
    (False, "22 - __clz", "23 - __clz"),
    (False, "scale == 255 ? 0x7FC0", "scale == 256 ? 0x7FC0"),
    (False, "scale == 255 ||", ""),
    (False, "|| own == kNoExponent", ""),
    (True, "- 127 - base, 127)", "- 127 - base, 300)"),
    (False, "shift < -126 ? 0 :", ""),
    (False, "given + row * given_step", "given"),
]


@pytest.mark.parametrize("breach", BREACHES, ids=lambda each: each[1])
def test_a_wrong_step_is_seen(breach: tuple[bool, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, old, new = breach

    def edit(name: str, text: str) -> str:
        assert old in text, old
        return text.replace(old, new)

    kernels = HostFold(tmp_path, configs_of(lines), edit)
    with pytest.raises(AssertionError, match=r"codes|scales"):
        for fmt in FORMATS:
            check(kernels, fmt, lines, monkeypatch)


MX8, MX4, NV = FORMATS[0], FORMATS[3], OperandFormat("e2m1", 16, "e4m3")
E4M3_ROWS, TILED = OperandFormat("e4m3"), OperandFormat("e4m3", tiles=True)


@pytest.mark.parametrize(
    ("a", "b", "read"),
    [
        (MX8, MX4, (OperandFormat("e4m3", 128, "float32"), E4M3_ROWS)),
        (E4M3_ROWS, MX8, (E4M3_ROWS, E4M3_ROWS)),
        (MX4, TILED, (OperandFormat("e4m3", 128, "float32"), TILED)),
        (MX8, FORMATS[1], (OperandFormat("e4m3", 128, "float32"), E4M3_ROWS)),
        (MX8, NV, None),
        (OperandFormat("e5m2", 32, "ue8m0"), MX4, None),
        (E4M3_ROWS, E4M3_ROWS, None),
    ],
)
def test_what_folds_is_multiplied_as_bytes_where_that_is_asked_for(
    a: OperandFormat, b: OperandFormat, read: tuple[OperandFormat, OperandFormat] | None
) -> None:
    def chosen(m: int, arch: str = "sm_90a", fold: bool = True) -> Any:
        return choose_config(m, 512, 1024, a, b, arch, fold=fold)

    assert chosen(512, "sm_80") == chosen(512, "sm_80", fold=False) and chosen(64) == chosen(64, fold=False)
    found = chosen(512)
    if read is None:
        assert found == chosen(512, fold=False)
    else:
        assert (found.a, found.b) == read and not found.uses_bfloat16
        assert chosen(512, fold=False) != found and (found.a, found.b) != (a, b)
