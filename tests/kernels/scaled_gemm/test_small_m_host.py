"""The small-M kernels of low-precision floats: their source on the CPU, copies and products at once and late."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.gemm.epilogue import epilogue_arguments
from cute_kernels.jit.codegen import KernelConfig
from cute_kernels.scaled_gemm.config import OperandFormat
from cute_kernels.scaled_gemm.cuda import _scale_arguments
from cute_kernels.scaled_gemm.dequantize import packed_rows
from cute_kernels.scaled_gemm.operand import FloatOperand
from cute_kernels.scaled_gemm.small_m import launch
from cute_kernels.scaled_gemm.small_m.config import ReorderConfig, SmallMConfig, candidates
from tests.kernels.few_rows.host import Edit, Launch, compile_library, has_compiler, make_map, source_of
from tests.kernels.scaled_gemm.test_tcgen05_host import small

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no g++")
_ORDER = """
extern "C" const char* run_{name}(const host::Launch* launch, const int64_t* a) {{
  using namespace magicube;
  return host::run(*launch, {{}}, [=] {{
    order_few_rows<{name}>((const uint8_t*)a[0], a[1], a[2], a[3], (const uint8_t*)a[4], a[5], a[6], (uint8_t*)a[7], a[8],
                         (float*)a[9], a[10]);
  }});
}}
"""
_PRODUCT = """
extern "C" const char* run_{name}(const host::Launch* launch, const magicube::TmaDescriptor* x,
                                  const magicube::TmaDescriptor* w, const int64_t* a, float alpha, float beta) {{
  using namespace magicube;
  using C = {name};
  using Floats = const float*;
  return host::run(*launch, {{}}, [=] {{
    gemm_floats_few<C>(*x, *w, a[0], (const uint8_t*)a[1], a[2], a[3], (C::Out*)a[4], a[5], a[6], a[7], Floats(a[8]), a[9],
                       Floats(a[10]), a[11], Floats(a[12]), (const C::Source*)a[13], a[14], a[15], alpha, beta);
  }});
}}
"""
_BLOCKS = """
extern "C" const char* run_{name}(const host::Launch* launch, const magicube::TmaDescriptor* x,
                                  const magicube::TmaDescriptor* w, const magicube::TmaDescriptor* scales, const int64_t* a,
                                  float alpha, float beta) {{
  using namespace magicube;
  using C = {name};
  using Floats = const float*;
  return host::run(*launch, {{{{(const uint8_t*)a[0], a[14]}}}}, [=] {{
    gemm_floats_few_blocks<C>(*x, *w, *scales, Floats(a[0]), a[1], (C::Out*)a[2], a[3], a[4], a[5], Floats(a[6]), a[7], Floats(a[8]),
                              a[9], Floats(a[10]), (const C::Source*)a[11], a[12], a[13], alpha, beta);
  }});
}}
"""
E4M3, E2M1 = OperandFormat("e4m3"), OperandFormat("e2m1")
MX8, MX4, NV = OperandFormat("e4m3", 32, "ue8m0"), OperandFormat("e2m1", 32, "ue8m0"), OperandFormat("e2m1", 16, "e4m3")
# rows, X, weights, config, (M, N, K) with scales that multiply the sums of blocks: all of a stage, or half of the 16 that TMA reads
BLOCKS: list[tuple[int, OperandFormat, OperandFormat, int, tuple[int, int, int]]] = [
    (8, E4M3, MX4, 2, (5, 77, 2560)),
    (16, MX8, MX8, -1, (13, 66, 4608)),
    (32, MX4, E2M1, 1, (20, 140, 1024)),
    (64, OperandFormat("e5m2"), OperandFormat("e5m2", 32, "ue8m0"), 3, (50, 70, 2560)),
    (16, NV, NV, 3, (13, 66, 4608)),
    (8, MX8, NV, 2, (5, 70, 2560)),
    (32, E4M3, NV, 1, (20, 140, 1536)),
]
# config, (M, N, K): rings that go round, ranks of other lengths, rows of weights beyond N
CASES: list[tuple[SmallMConfig, tuple[int, int, int]]] = [
    (candidates(8, E4M3, E2M1)[2], (3, 70, 7000)),
    (candidates(32, E4M3, E2M1)[2], (20, 77, 9000)),
    (candidates(64, MX8, MX4)[3], (40, 72, 5200)),
    *((candidates(rows, a, b, block_sums=True)[i], shape) for rows, a, b, i, shape in BLOCKS),
]
MANY = [
    *((config, (rows - 3, 264, 2500)) for rows in (8, 16, 32) for config in candidates(rows, E4M3, E4M3)),
    *((config, (rows, 77, 5000)) for rows in (16, 64) for config in candidates(rows, OperandFormat("e5m2"), E2M1)),
    *((config, (rows - 1, 130, 3000)) for rows in (8, 32, 64) for config in candidates(rows, NV, NV)),
    *((config, (rows - 1, 270, 3072)) for rows in (8, 64) for config in candidates(rows, E4M3, MX4, block_sums=True)),
    *((config, (rows, 270, 2560)) for rows in (16, 32) for config in candidates(rows, MX8, MX8, block_sums=True)),
    *((config, (rows, 270, 2560)) for rows in (8, 16) for config in candidates(rows, NV, NV, block_sums=True)),
]


class HostSmallM:
    """The kernels of some configs as a library of this machine, compiled together."""

    def __init__(self, folder: Path, configs: list[SmallMConfig], edit: Edit | None = None) -> None:
        self._names: dict[KernelConfig, str] = {}
        source = ""
        for config in configs:
            for each, text in (
                (ReorderConfig(config.a, config.b.bits, config.uses_bfloat16, config.block_sums), _ORDER),
                (config, _BLOCKS if config.block_sums else _PRODUCT),
            ):
                if each not in self._names:
                    self._names[each] = f"Config{len(self._names)}"
                    source += source_of(each, self._names[each]) + text.format(name=self._names[each])
        self._library = compile_library(folder, source, edit)

    def launch(
        self, config: SmallMConfig, x: FloatOperand, w: FloatOperand, out: torch.Tensor, late: int, seed: int = 0
    ) -> None:
        """Launch as ``launch_small_m`` does; raises what the emulation found."""
        library, names = self._library, self._names
        taken: list[torch.Tensor] = []

        def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            taken.append(torch.empty(shape, dtype=dtype))
            return taken[-1]

        class Kernel:
            def __init__(self, own: KernelConfig) -> None:
                self.own = own

            def launch(
                self, grid: tuple[int, ...], args: tuple[Any, ...], cluster: Any = None, pdl: bool = False
            ) -> None:
                split, resident = (config.split, config.resident) if self.own is config else (1, 1)
                assert (cluster or (1, 1, 1)) == (split, 1, 1)
                own = (self.own.threads, self.own.smem_bytes, resident, seed, late)
                maps = [ctypes.byref(each) for each in args if not isinstance(each, int | np.float32)]
                integers = [each for each in args if isinstance(each, int)]
                if self.own is config:  # bytes from the scales of X on
                    integers.append(taken[-1].nbytes)
                floats = [ctypes.c_float(each) for each in args if isinstance(each, np.float32)]
                run = getattr(library, f"run_{names[self.own]}")
                run.restype = ctypes.c_char_p
                given = ctypes.byref(Launch(*grid[:2], split, *own))
                wrong = run(given, *maps, (ctypes.c_int64 * len(integers))(*integers), *floats)
                if wrong:
                    raise RuntimeError(wrong.decode())

        shape = (x.packed_data.shape[0], w.packed_data.shape[0], x.k)
        (scales_x, _own), (scales_w, _own2) = _scale_arguments(x), _scale_arguments(w)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "get_kernel", Kernel)
            patch.setattr(launch, "tensor_map", make_map)
            patch.setattr(launch.workspace, "empty", empty)
            operands = (packed_rows(x.packed_data), scales_x), (packed_rows(w.packed_data), scales_w)
            launch.launch_small_m(config, *operands, shape, epilogue_arguments(out, None, None, None, None), 1.0, 0.0)


def check(kernels: HostSmallM, config: SmallMConfig, shape: tuple[int, int, int], late: int) -> None:
    """Integers, whose sums float32 has exactly."""
    m, n, k = shape
    x, w = small(config.a, m, k, 1), small(config.b, n, k, 2 + late)
    frame = torch.full((m, n + 4), torch.nan)
    kernels.launch(config, x, w, frame[:, :n], late)
    assert torch.equal(frame[:, :n].double(), x.values(torch.float64) @ w.values(torch.float64).t()), config.name
    assert bool(frame[:, n:].isnan().all()), "written outside"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostSmallM:
    return HostSmallM(tmp_path_factory.mktemp("small_m"), [config for config, _ in CASES])


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].name)
def test_the_source_computes_the_product(case: Any, late: int, kernels: HostSmallM) -> None:
    check(kernels, *case, late)


@pytest.mark.long
@pytest.mark.parametrize(("b", "rows"), dict.fromkeys((config.b, config.rows) for config, _ in MANY))
def test_the_source_of_every_config_computes_the_product(b: OperandFormat, rows: int, tmp_path: Path) -> None:
    cases = [case for case in MANY if (case[0].b, case[0].rows) == (b, rows)]
    kernels = HostSmallM(tmp_path, [config for config, _ in cases])
    for config, shape in cases:
        for late in range(4):
            check(kernels, config, shape, late)
