"""Kernels compiled for this machine: the source as it stands, a CTA as fibers; see ``cta_host.hpp``."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from cute_kernels.jit.codegen import KernelConfig

KERNELS = Path(__file__).resolve().parents[3] / "cute_kernels"
_EMPTY = ("device/warpgroup.cuh", "device/math.cuh", "device/mma_bytes.cuh", "device/packed_int.cuh", "device/copy.cuh", "cuda_bf16.h", "cuda_fp16.h", "cuda/std/cstdint",
          "cuda/std/type_traits", "cute/config.hpp")  # fmt: skip
_TYPES = {"float": np.float32, "double": np.float64}
_CTYPES = {"float": ctypes.c_float, "double": ctypes.c_double}


class HostKernels:
    """Kernels by config; those of one folder are compiled once."""

    def __init__(self, folder: Path, headers: tuple[str, ...]) -> None:
        self._folder = folder
        self._known: dict[KernelConfig, ctypes.CDLL] = {}
        self.seed, self.late = 0, False
        for name in _EMPTY:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("")
        for name in headers:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            text = (KERNELS / name).read_text().replace("extern __shared__", "extern")
            (folder / name).write_text(text)

    def parameters(self, config: KernelConfig) -> list[tuple[str, str]]:
        """Return type and name of each parameter of a kernel, from its source."""
        text = (KERNELS / config.kernel_header).read_text()
        found = re.search(rf"\n{config.kernel_entry}\((.*?)\) {{", text, re.S)
        assert found, config.kernel_entry
        pairs = [parameter.split() for parameter in found[1].split(",")]
        return [(" ".join(words[:-1]), words[-1]) for words in pairs]

    def library(self, config: KernelConfig) -> ctypes.CDLL:
        """Return the kernel as a library of this machine."""
        if config not in self._known:
            given = self.parameters(config)
            names = ", ".join(name for _, name in given)
            call = (
                f'extern "C" const char* run(int blocks, unsigned seed, int late, '
                f"{', '.join(f'{kind} {name}' for kind, name in given)}) {{\n"
                f"  return host::run(blocks, {config.threads}, seed, late, "
                f"[=] {{ magicube::{config.kernel_entry}<magicube::Config>({names}); }});\n}}\n"
            )
            source = self._folder / f"{config.name}.cpp"
            header = Path(__file__).with_name("cta_host.hpp")
            source.write_text(f'#include "{header}"\n{config.translation_unit("sm_90a").source}{call}')
            flags = [
                "-std=c++17",
                "-O1",
                "-ffp-contract=off",
                "-w",
                "-shared",
                "-fPIC",
                "-fno-gnu-unique",
                f"-I{self._folder}",
            ]
            target = source.with_suffix(".so")
            subprocess.run(["g++", *flags, str(source), "-o", str(target)], check=True)
            library = self._known[config] = ctypes.CDLL(str(target))
            library.run.restype = ctypes.c_char_p
        return self._known[config]

    def get(self, config: KernelConfig) -> HostKernel:
        """Return what stands in for a loaded kernel."""
        return HostKernel(self, config)


class HostKernel:
    """In place of a loaded kernel: launches run on the CPU before they return."""

    def __init__(self, kernels: HostKernels, config: KernelConfig) -> None:
        self._kernels, self._config = kernels, config

    def launch(
        self, grid: tuple[int, int, int], args: tuple[Any, ...], cluster: None = None, pdl: bool = False
    ) -> None:
        """Run the kernel; each argument must be of its parameter's type."""
        given = self._kernels.parameters(self._config)
        assert len(given) == len(args), (len(given), len(args))
        converted = []
        for (kind, name), arg in zip(given, args, strict=True):
            assert type(arg) is _TYPES.get(kind, int), (name, kind, type(arg))
            converted.append(_CTYPES[kind](arg) if kind in _CTYPES else ctypes.c_int64(arg))
        library = self._kernels.library(self._config)
        wrong = library.run(grid[0], ctypes.c_uint(self._kernels.seed), int(self._kernels.late), *converted)
        if wrong:
            raise RuntimeError(wrong.decode())


def has_compiler() -> bool:
    """Return whether kernels can be compiled for this machine."""
    return shutil.which("g++") is not None
