"""``magicube collect-env``: one report for a bug ticket."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from magicube_cutlass.cli.console import facts, output

PACKAGES = (
    "magicube-cutlass",
    "torch",
    "numpy",
    "scipy",
    "safetensors",
    "typer",
    "rich",
    "matplotlib",
    "cuda-core",
    "cuda-bindings",
)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def cpu_model() -> str:
    """Return the name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _engine() -> dict[str, str]:
    try:
        from cute_kernels.cpu import engine

        return {"engine path": engine.isa(), "engine paths usable": ", ".join(engine.isas())}
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # a report must come out of a broken install too
        return {"engine path": f"unavailable: {error}"}


def _jit() -> dict[str, str]:
    from cute_kernels.jit import cache, toolchain

    return {**toolchain.report(), "jit cache": f"{cache.directory()} ({len(cache.entries())} kernels)"}


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def environment() -> dict[str, str]:
    """Return versions, processor, instruction set of the engine, threads, GPUs and the toolchain, by name."""
    return {
        **{package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": str(os.cpu_count()),
        **_engine(),
        "MAGICUBE_CPU": os.environ.get("MAGICUBE_CPU", "not set"),
        "threads": str(torch.get_num_threads()),
        "cuda of torch": torch.version.cuda or "none",
        "gpu": _gpus(),
        **_jit(),
    }


def collect_env() -> None:
    """Print versions, processor, instruction set of the engine, threads and GPUs."""
    output().print(facts("magicube environment", environment()))
