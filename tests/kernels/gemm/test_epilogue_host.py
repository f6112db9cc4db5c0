"""The epilogue's magnitudes of levels: its source on the CPU."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from tests.kernels.estimate.cta_host import HostKernels, has_compiler

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")
SOURCE = """
#include "{header}"
#include "gemm/epilogue.cuh"
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


@pytest.mark.parametrize("levels", [2, 3])
@pytest.mark.parametrize("vector", [False, True])
def test_the_visitor_gets_results_and_magnitudes(levels: int, vector: bool, tmp_path: Path) -> None:
    HostKernels(tmp_path, ("gemm/epilogue.cuh", "device/quad.cuh"))
    header = Path(__file__).parents[1] / "estimate" / "cta_host.hpp"
    source, library = tmp_path / "epilogue.cpp", tmp_path / "epilogue.so"
    source.write_text(SOURCE.format(header=header, levels=levels))
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fno-gnu-unique", f"-I{tmp_path}"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    m, n = (16, 32) if vector else (13, 27)
    sums = torch.zeros(levels, 16, 32, dtype=torch.int32)
    sums[:, :m, :n] = torch.randint(-1000, 1000, (levels, m, n), generator=torch.Generator().manual_seed(levels)).int()
    sums[0, 0, 0], sums[1, 0, 0] = 1, -256  # they cancel
    rows, columns = 2.0 ** (torch.arange(16) % 5 - 2), 2.0 ** -(torch.arange(32) % 3).float()
    out, squares = torch.full((16, 32), torch.nan), torch.zeros(2, 32)
    run = ctypes.CDLL(str(library)).run
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
