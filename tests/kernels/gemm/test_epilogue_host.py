"""The epilogue's magnitudes of levels, activations and int8 results: its source on the CPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch

from cute_kernels.cpu.linear import FUNCTIONS
from cute_kernels.gemm.cuda import row_order
from cute_kernels.gemm.epilogue import activate, integers_of
from tests.kernels.estimate.cta_host import HostKernels, has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")
PACK = """
namespace magicube {  // in place of device/packed_int.cuh
template <int, bool> uint32_t pack_nearest(int low, int high, uint32_t rest) {
  return (min(max(low, -128), 127) & 255) | (min(max(high, -128), 127) & 255) << 8 | rest << 16;
}
}
"""
SOURCE = """
#include "{header}"
{pack}#include "gemm/epilogue.cuh"
namespace magicube {{
struct Config {{
  static constexpr int kLevels = {levels};
  static constexpr bool kFloatAccum = false;
  using Out = float;
  using Source = NoSource;
}};
}}
using namespace magicube;
extern "C" const char* run(const int* sums, float* out, int64_t pitch, int m, int n, const float* rows, const float* columns,
                           bool vector, float* squares) {{
  return host::run(1, 32, 1, false, [=] {{
    uint32_t accum[{levels}][16];  // rows g and g + 8 of eight columns, then of the next
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int level = 0; level < {levels}; ++level) {{
      for (int r = 0; r < 16; ++r) accum[level][r] = sums[(level * 16 + g + r / 2 % 2 * 8) * 32 + r / 4 * 8 + 2 * t + r % 2];
    }}
    float seen = 0.0f, levels = 0.0f;
    const GemmOutput<Config> to{{out, nullptr, rows, columns, nullptr, pitch, 0, m, n, 1.0f, 0.0f, 0x1p-8f, 0x1p-16f, vector}};
    write_fragment(to, accum, 0, 0, lane, [&](float x, float magnitude) {{
      seen = fma(x, x, seen), levels = fma(magnitude, magnitude, levels);
    }});
    squares[lane] = seen, squares[32 + lane] = levels;
  }});
}}
"""

FINISH = """
#include "{header}"
{pack}#include "gemm/epilogue.cuh"
namespace magicube {{
struct Config {{
  static constexpr int kLevels = 1, kActivation = {activation};
  static constexpr bool kFloatAccum = true;
  using Out = {out};
  using Source = NoSource;
}};
}}
using namespace magicube;
extern "C" const char* run(const float* sums, {out}* out, int64_t pitch, int m, int n, bool vector, float per_scale) {{
  return host::run(1, 32, 1, false, [=] {{
    uint32_t accum[1][16];
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int r = 0; r < 16; ++r) accum[0][r] = __float_as_uint(sums[(g + r / 2 % 2 * 8) * 32 + r / 4 * 8 + 2 * t + r % 2]);
    const GemmOutput<Config> to{{out, nullptr, nullptr, nullptr, nullptr, pitch, 0, m, n, 1.0f, 0.0f, 0.0f, 0.0f, vector, per_scale}};
    write_fragment(to, accum, 0, 0, lane);
  }});
}}
extern "C" void all_of(const float* x, float* y, int64_t count) {{
  for (int64_t i = 0; i < count; ++i) y[i] = activate<{activation}, {coarse}>(x[i]);
}}
"""

ADJACENT = """
#include "{header}"
{pack}#include "gemm/epilogue.cuh"
namespace magicube {{
struct Config {{
  static constexpr int kLevels = {levels}, kAdjacent = {adjacent};
  static constexpr bool kFloatAccum = false;
  using Out = {out};
  using Source = {source};
}};
}}
using namespace magicube;
extern "C" const char* run(const int* sums, {out}* out, const {source}* c, int64_t pitch, int m, int n, const float* rows,
                           const float* columns, const float* bias, float* squares) {{
  return host::run(1, 32, 1, false, [=] {{
    constexpr int kColumns = {columns};
    uint32_t accum[2][{levels}][kColumns / 2];  // two blocks of 16 rows
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int block = 0; block < 2; ++block) for (int level = 0; level < {levels}; ++level) for (int r = 0; r < kColumns / 2; ++r) {{
      const int row = 16 * block + g + r / 2 % 2 * 8;
      accum[block][level][r] = sums[(level * 32 + row) * kColumns + r / 4 * 8 + 2 * t + r % 2];
    }}
    float seen = 0.0f, magnitudes = 0.0f;
    const GemmOutput<Config> to{{out, c, rows, columns, bias, pitch, pitch, m, n, 0.5f, 2.0f, 0x1p-8f, 0x1p-16f, true, 1.0f}};
    SourceRuns<Config, 2, kColumns> sources(to, 0, 16, 0, lane);
    write_adjacent(to, accum, 0, 16, 0, lane, RowFactors<Config, 2>(to, 0, 16, lane), ColumnFactors<Config, kColumns>(to, 0, lane),
                   sources, [&](auto x{magnitude}) {{ seen += x * x{add}; }});
    squares[lane] = seen, squares[32 + lane] = magnitudes;
  }});
}}
"""

GLU = """
#include "{header}"
{pack}#include "gemm/epilogue.cuh"
namespace magicube {{
struct Config {{
  static constexpr int kLevels = 1, kAdjacent = {adjacent}, kActivation = {activation};
  static constexpr bool kFloatAccum = false;
  using Out = {out};
  using Source = NoSource;
}};
}}
using namespace magicube;
extern "C" const char* run(const int* sums, {out}* out, int64_t pitch, int m, int n, const float* rows, const float* columns,
                           const float* bias, float per_scale) {{
  return host::run(1, 32, 1, false, [=] {{
    uint32_t accum[2][1][64];  // two blocks of 16 rows, 64 gates and 64 columns that they gate
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    for (int block = 0; block < 2; ++block) for (int r = 0; r < 64; ++r) {{
      const int row = 16 * block + g + r / 2 % 2 * 8;
      accum[block][0][r] = sums[row * 128 + r / 4 * 8 + 2 * t + r % 2];
    }}
    const GemmOutput<Config> to{{out, nullptr, rows, columns, bias, pitch, 0, m, n, 0.5f, 0.0f, 0.0f, 0.0f, true, per_scale}};
    write_glu(to, accum, 0, 16, 0, lane, RowFactors<Config, 2>(to, 0, 16, lane), ColumnFactors<Config, 64>(to, 0, lane),
              ColumnFactors<Config, 64>(to, 0, lane, n));
  }});
}}
"""


def _compiled(source: str, tmp_path: Path) -> ctypes.CDLL:
    HostKernels(tmp_path, ("gemm/epilogue.cuh", "gemm/activation.cuh", "device/quad.cuh"))
    epilogue = tmp_path / "gemm" / "epilogue.cuh"
    stores = re.sub(r'asm volatile\("\{.*?"memory"\);', "if (present) *to = x;", epilogue.read_text(), flags=re.S)
    epilogue.write_text(stores)
    path, library = tmp_path / "epilogue.cpp", tmp_path / "epilogue.so"
    path.write_text(source)
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fno-gnu-unique", f"-I{tmp_path}"]
    subprocess.run(["g++", *flags, str(path), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def _finish(activation: str | None, out: str, coarse: bool = False) -> str:
    header = Path(__file__).parents[1] / "estimate" / "cta_host.hpp"
    return FINISH.format(
        header=header, pack=PACK, activation=FUNCTIONS.index(activation), out=out, coarse=str(coarse).lower()
    )


@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
@pytest.mark.parametrize("vector", [False, True])
def test_int8_results_are_the_nearest_integers(activation: str | None, vector: bool, tmp_path: Path) -> None:
    run = _compiled(_finish(activation, "int8_t"), tmp_path).run
    run.restype = ctypes.c_char_p
    m, n = (16, 32) if vector else (13, 27)
    sums = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)) * 2
    sums[0, :4] = torch.tensor([torch.nan, torch.inf, -1e9, 40.0])
    scale = torch.tensor(0.03)
    out = torch.full((16, 32), 99, dtype=torch.int8)
    pointers = ctypes.c_void_p(sums.data_ptr()), ctypes.c_void_p(out.data_ptr())
    assert not run(*pointers, ctypes.c_int64(32), m, n, vector, ctypes.c_float(float(scale.reciprocal())))
    want = integers_of(activate(sums.double(), activation).float(), scale)  # GELU of inf in float32 is NaN on some CPUs
    assert int((out[:m, :n].int() - want[:m, :n].int()).abs().max()) <= 1  # next to ties
    assert float((out[:m, :n] == want[:m, :n]).float().mean()) > 0.98 and torch.equal(out[0, :4], want[0, :4])
    assert bool((out[m:] == 99).all() and (out[:, n:] == 99).all())


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations_are_those_of_torch(activation: str, tmp_path: Path) -> None:
    run = _compiled(_finish(activation, "float"), tmp_path).all_of
    x = torch.cat([torch.linspace(-20, 20, 400_001), torch.tensor([-torch.inf, torch.inf, 1e30, -1e30, 0.0])])
    y = torch.empty_like(x)
    run(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(len(x)))
    want = activate(x.double(), activation)
    want[x == -torch.inf] = 0.0
    bound = 4e-7 * want.abs().clamp_min(1.0)
    assert bool(((y.double() - want).abs() <= bound)[want.isfinite()].all())
    assert bool((y[want.isinf()] == torch.inf).all())
    nan = torch.tensor([torch.nan])
    run(ctypes.c_void_p(nan.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(1))
    assert bool(y[0].isnan())


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_coarse_activations_are_near_those_of_torch(activation: str, tmp_path: Path) -> None:
    run = _compiled(_finish(activation, "float", coarse=True), tmp_path).all_of
    x = torch.cat([torch.linspace(-20, 20, 400_001), torch.tensor([torch.inf, 1e18, -1e18, 0.0])])
    y = torch.empty_like(x)
    run(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(len(x)))
    want = activate(x.double(), activation)
    bound = 4e-5 + 1e-6 * want.abs()  # with the exact tanh
    assert bool(((y.double() - want).abs() <= bound)[want.isfinite()].all()) and float(y[want.isinf()]) == torch.inf


@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("vector", [False, True])
def test_the_visitor_gets_results_and_magnitudes(levels: int, vector: bool, tmp_path: Path) -> None:
    header = Path(__file__).parents[1] / "estimate" / "cta_host.hpp"
    m, n = (16, 32) if vector else (13, 27)
    sums = torch.zeros(levels, 16, 32, dtype=torch.int32)
    sums[:, :m, :n] = torch.randint(-1000, 1000, (levels, m, n), generator=torch.Generator().manual_seed(levels)).int()
    sums[0, 0, 0], sums[1, 0, 0] = 1, -256  # they cancel
    rows, columns = 2.0 ** (torch.arange(16) % 5 - 2), 2.0 ** -(torch.arange(32) % 3).float()
    out, squares = torch.full((16, 32), torch.nan), torch.zeros(2, 32)
    run = _compiled(SOURCE.format(header=header, pack=PACK, levels=levels), tmp_path).run
    run.restype = ctypes.c_char_p
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (sums, out, rows, columns, squares)]
    assert not run(*pointers[:2], ctypes.c_int64(32), m, n, *pointers[2:4], vector, pointers[4])
    weights = torch.tensor([1.0, 2.0**-8, 2.0**-16], dtype=torch.float64)[:levels, None, None]
    scale = rows.double()[:m, None] * columns.double()[:n]
    exact = (sums.double() * weights).sum(0)[:m, :n] * scale
    assert torch.equal(out[:m, :n], exact.float()) and bool(out[m:].isnan().all() and out[:, n:].isnan().all())
    magnitudes = (sums.double().abs() * weights).sum(0)[:m, :n] * scale
    assert float(squares[0].double().sum()) == pytest.approx(float(exact.square().sum()), rel=1e-6)
    assert float(squares[1].double().sum()) == pytest.approx(float(magnitudes.square().sum()), rel=1e-6)


@pytest.mark.parametrize(
    ("out", "levels", "source", "width"),
    [
        ("float", 1, "float", 96), ("float", 1, "float", 64), ("float", 1, "int16_t", 96), ("int8_t", 1, "float", 64),
        ("float", 2, "float", 64), ("float", 2, "NoSource", 96), ("int8_t", 1, "NoSource", 96),
    ],
)  # fmt: skip
def test_columns_side_by_side_lie_where_rows_of_b_were_put(
    out: str, levels: int, source: str, width: int, tmp_path: Path
) -> None:
    m, n, adjacent, with_c = 27, 64, 4 if out == "float" else 8, source != "NoSource"
    generator = torch.Generator().manual_seed(levels)
    sums = torch.randint(-90, 90, (levels, 32, width), generator=generator, dtype=torch.int32)
    shape, steps, _ = row_order(width, width, adjacent)
    placed = torch.arange(1)
    for size, step in zip(shape, steps, strict=True):  # the fastest index first
        placed = (placed[None] + torch.arange(size)[:, None] * step).flatten()
    assert torch.equal(placed.sort().values, torch.arange(width))
    rows, columns = 2.0 ** (torch.arange(32) % 3 - 1), 2.0 ** (torch.arange(width) % 3).float()
    bias = torch.arange(float(width)) - 8
    got = torch.full((32, width), 99.0).to(torch.float32 if out == "float" else torch.int8)
    c = torch.randint(-9, 9, (32, width), generator=generator).to(torch.int16 if source == "int16_t" else torch.float32)
    text = ADJACENT.format(
        header=Path(__file__).parents[1] / "estimate" / "cta_host.hpp", pack=PACK, levels=levels, adjacent=adjacent, out=out,
        source=source, columns=width, magnitude=", float y" if levels > 1 else "",
        add=", magnitudes += y" if levels > 1 else "",
    )  # fmt: skip
    run = _compiled(text, tmp_path).run
    run.restype = ctypes.c_char_p
    squares, given = torch.zeros(2, 32), sums[:, :, placed].contiguous()
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (given, got, c, rows, columns, bias, squares)]
    assert not run(*pointers[:3], ctypes.c_int64(width), m, n, *pointers[3:])
    weights = torch.tensor([1.0, 2.0**-8])[:levels, None, None]
    rows[m:], columns[n:], bias[n:] = 1.0, 1.0, 0.0  # what does not exist is visited, with these
    c[m:], c[:, n:] = 0, 0
    scale = 0.5 * rows[:, None] * columns
    every = (sums * weights).sum(0) * scale + bias + (2 * c if with_c else 0)
    want = every[:m, :n]
    assert torch.equal(got[:m, :n], want if out == "float" else want.round().clamp(-128, 127).to(torch.int8))
    assert bool((got[m:] == 99).all() and (got[:, n:] == 99).all())
    if levels > 1:
        magnitudes = (sums.abs() * weights).sum(0) * scale
        assert float(squares[0].double().sum()) == pytest.approx(float(every.double().square().sum()), rel=1e-6)
        assert float(squares[1].double().sum()) == pytest.approx(float(magnitudes.double().sum()), rel=1e-6)


@pytest.mark.parametrize(("out", "activation"), [("float", "silu"), ("float", None), ("int8_t", "relu")])
def test_gates_and_what_they_gate_meet_in_a_lane(out: str, activation: str | None, tmp_path: Path) -> None:
    m, n, adjacent = 27, 32, 4 if out == "float" else 8
    generator = torch.Generator().manual_seed(3)
    sums = torch.randint(-90, 90, (32, 2, 64), generator=generator, dtype=torch.int32)  # columns beyond n too
    shape, steps, _ = row_order(64, 64, adjacent)
    placed = torch.arange(1)
    for size, step in zip(shape, steps, strict=True):
        placed = (placed[None] + torch.arange(size)[:, None] * step).flatten()
    rows, columns = 2.0 ** (torch.arange(32) % 3 - 1), 2.0 ** -(torch.arange(2 * n) % 3).float()
    bias, scale = torch.linspace(-3, 3, 2 * n), torch.tensor(32.0)
    got = torch.full((32, 64), 99.0).to(torch.float32 if out == "float" else torch.int8)
    source = GLU.format(
        header=Path(__file__).parents[1] / "estimate" / "cta_host.hpp", pack=PACK, adjacent=adjacent, out=out,
        activation=FUNCTIONS.index(activation),
    )  # fmt: skip
    run = _compiled(source, tmp_path).run
    run.restype = ctypes.c_char_p
    given = sums[:, :, placed].contiguous()
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (given, got, rows, columns, bias)]
    assert not run(*pointers[:2], ctypes.c_int64(64), m, n, *pointers[2:], ctypes.c_float(float(scale.reciprocal())))
    y = sums[:, :, :n].double() * (0.5 * rows.double())[:, None, None] * columns.double().view(2, n)
    y += bias.double().view(2, n)
    want = (activate(y[:, 0], activation) * y[:, 1])[:m]
    if out == "float":
        assert torch.allclose(got[:m, :n].double(), want, rtol=2e-6, atol=1e-5)
    else:
        assert int((got[:m, :n].int() - integers_of(want, scale).int()).abs().max()) <= 1
        assert int(got[:m, :n].int().abs().max()) > 20
    assert bool((got[m:] == 99).all() and (got[:, n:] == 99).all())
