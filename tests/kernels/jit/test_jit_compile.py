"""Compiling without a GPU: small machine code for every chip, the compiler's own words for a mistake."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_kernels.jit import ARCHES, CompileError, DeviceError, Unit, compile_unit, compiler, toolchain
from tests.helpers import disassemble, lean_sass

LAYOUT = """
#include <cute/tensor.hpp>
namespace probe {
template <int Rows>
__global__ void __launch_bounds__(128) fill(int* out, long count) {
  auto layout = cute::make_layout(cute::make_shape(cute::Int<Rows>{}, cute::Int<4>{}));
  if (threadIdx.x < count) out[threadIdx.x] = layout(threadIdx.x, 2);
}
__global__ void unused(int* out) { out[threadIdx.x] = 1; }
}
"""
PLAIN = "namespace probe { template <typename T> __global__ void twice(T* x) { x[threadIdx.x] *= 2; } }"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_cute_compiles_to_a_small_cubin(arch: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="magicube")
    binary = compile_unit(Unit(LAYOUT, "probe::fill<8>", arch))
    assert (binary.arch, binary.title) == (arch, "probe::fill<8>")
    assert binary.code.startswith(b"\x7fELF") and 1000 < len(binary.code) < 100_000
    assert binary.symbol.encode() in binary.code and "fill" in binary.symbol
    assert b"unused" not in binary.code
    assert binary.usage is not None and 0 < binary.usage.registers < 32
    sass = lean_sass(binary)
    assert binary.symbol in sass and "STG.E" in sass
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"compiled probe::fill<8> for {arch} in ") and "\n" not in line


@pytest.mark.parametrize("arch", [arch for arch in ARCHES if arch.startswith("sm_")])
def test_every_arch_is_known_to_the_compiler(arch: str) -> None:
    binary = compile_unit(Unit(PLAIN, "probe::twice<float>", arch))
    assert f".target\t{arch}" in disassemble(binary.code)


def test_kept_headers_change_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    units = [Unit(f"#include <cuda/std/array>\n{PLAIN}", f"probe::twice<{name}>", "sm_80") for name in ("int", "float")]
    monkeypatch.setattr(compiler, "_precompiled", {})
    plain = [compile_unit(unit) for unit in units]
    compiler.keep_headers()
    assert [compile_unit(unit) for unit in units] == plain
    assert list(Path(str(compiler._precompiled["pch_dir"])).iterdir())


def test_ptx_needs_no_driver() -> None:
    binary = compile_unit(Unit(LAYOUT, "probe::fill<8>", "compute_80"))
    text = binary.code.decode()
    assert ".target sm_80" in text and f".entry {binary.symbol}(" in text
    assert len(text) < 100_000 and binary.usage is None


def test_name_expressions_pick_the_instance() -> None:
    symbols = {compile_unit(Unit(PLAIN, f"probe::twice<{name}>", "sm_80")).symbol for name in ("int", "float")}
    assert len(symbols) == 2


def test_project_headers_are_found_by_path() -> None:
    header = sorted(toolchain.KERNEL_HEADERS.rglob("*.cuh"))[0].relative_to(toolchain.KERNEL_HEADERS)
    source = f'#if !__has_include("{header}")\n#error not found\n#endif\n{PLAIN}'
    assert compile_unit(Unit(source, "probe::twice<int>", "sm_80")).code


def test_static_shared_memory_and_local_memory_are_reported() -> None:
    source = """
    __global__ void both(int* x) {
      __shared__ int tile[256];
      int local[64];
      for (int i = 0; i < 64; ++i) local[(i * x[0]) % 64] = i;
      tile[threadIdx.x] = local[x[1]];
      __syncthreads();
      x[threadIdx.x] = tile[255 - threadIdx.x];
    }"""
    binary = compile_unit(Unit(source, "both", "sm_80"))
    assert binary.usage is not None
    assert (binary.usage.shared_bytes, binary.usage.stack_bytes) == (1024, 256)
    with pytest.raises(AssertionError):
        lean_sass(binary)


@pytest.mark.parametrize(
    "source, kernel, words",
    [
        ("\n" + PLAIN + " int x = absent;", "probe::twice<int>", 'unit.cu(2): error: identifier "absent" is undefined'),
        (PLAIN, "probe::thrice<int>", 'has no member "thrice"'),
        ('#include "absent.cuh"\n' + PLAIN, "probe::twice<int>", "absent.cuh"),
    ],
)
def test_a_compile_error_has_the_log_of_the_compiler(source: str, kernel: str, words: str) -> None:
    unit = Unit(source, kernel, "sm_90a")
    with pytest.raises(CompileError) as caught:
        compile_unit(unit)
    assert words in caught.value.log and caught.value.unit == unit
    assert str(caught.value).startswith(f"{kernel} does not compile for sm_90a:")
    again = pickle.loads(pickle.dumps(caught.value))  # it comes back from other processes
    assert str(again) == str(caught.value) and again.unit == unit


@pytest.mark.parametrize("arch", ["sm_90", "sm_77", "compute_90a", ""])
def test_an_unknown_arch_names_the_known_ones(arch: str) -> None:
    with pytest.raises(ValueError, match=r"arch must be one of sm_80, .*sm_90a.*compute_80"):
        compile_unit(Unit(PLAIN, "probe::twice<int>", arch))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_machine_without_gpu_gets_one_line_and_no_deadlock() -> None:
    # In a process of its own: without a driver some calls of cuda.core never return.
    code = (
        "from cute_kernels.jit import DeviceError, get_kernel\n"
        "try: get_kernel(None)\n"
        "except DeviceError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.startswith("kernels need a CUDA device") and run.stdout.count("\n") == 1
    assert issubclass(DeviceError, RuntimeError)


def test_threads_may_compile_from_the_start() -> None:
    # In a process of its own, where nothing has imported cuda.core.
    code = (
        "import sys\n"
        "from threading import Thread\n"
        "from cute_kernels.jit.toolchain import cuda_core\n"
        "sys.setswitchinterval(1e-5)\n"
        "found = []\n"
        "def names():\n"
        "    core = cuda_core()\n"
        "    found.append((core.Linker, core.Program, core.ObjectCode, core.Device))\n"
        "threads = [Thread(target=names) for _ in range(32)]\n"
        "for each in threads: each.start()\n"
        "for each in threads: each.join()\n"
        "print(len(found))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert run.stdout == "32\n", run.stderr[-2000:]
