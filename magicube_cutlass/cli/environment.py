"""``magicube collect-env``: one report for a bug ticket."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import magicube_cutlass
from magicube_cutlass.cli.arguments import Json, print_json
from magicube_cutlass.cli.console import facts, output

PACKAGES = (
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
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the commit of the library's tree, with a plus sign if a tracked file differs from it."""
    root = Path(magicube_cutlass.__file__).resolve().parents[1]
    if named := os.environ.get("MAGICUBE_COMMIT"):  # of a tree that was copied without its history
        return named
    if not (root / ".git").exists():
        return "unknown"
    import subprocess

    answers = []
    for command in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "-uno"]):
        try:
            done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
        answers.append(done.stdout.strip())
    commit, changes = answers
    return commit + ("+" if changes else "")


def _cpu_clock() -> str:
    """Return the largest clock of a core at this moment, as Linux reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return f"{max(clocks):.0f}" if clocks else "unknown"


def _engine() -> dict[str, str]:
    try:
        from cute_kernels.cpu import engine

        return {"engine path": engine.isa(), "engine paths usable": ", ".join(engine.isas())}
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # a report must come out of a broken install too
        return {"engine path": f"unavailable: {error}"}


def _jit() -> dict[str, str]:
    from cute_kernels.jit import cache, shipped, toolchain

    kept = f"{cache.directory()} ({len(cache.entries())} kernels)"
    return {**toolchain.describe(), "jit cache": kept, "jit wheel": shipped.describe_wheel()}


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def environment() -> dict[str, str]:
    """Return commit, versions, processor, instruction set of the engine, threads, GPUs and the toolchain, by name."""
    import torch

    from magicube_cutlass.dispatch.cpu_costs import processor

    return {
        "commit": _commit(),
        "magicube-cutlass": magicube_cutlass.__version__,
        **{package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": processor(),
        "cpu clock (MHz)": _cpu_clock(),
        "cores": str(os.cpu_count()),
        **_engine(),
        "MAGICUBE_CPU": os.environ.get("MAGICUBE_CPU", "not set"),
        "threads": str(torch.get_num_threads()),
        "cuda of torch": torch.version.cuda or "none",
        "gpu": _gpus(),
        **_jit(),
    }


def provenance() -> dict[str, str]:
    """Return the head of a results file: the date and :func:`environment` without folders of this machine."""
    from datetime import UTC, datetime

    found = {
        name: value for name, value in environment().items() if name not in ("jit cache", "jit wheel", "jit headers")
    }
    return {"date": datetime.now(UTC).strftime("%Y-%m-%d"), **found}


def collect_env(as_json: Json = False) -> None:
    """Print versions, processor, instruction set of the engine, threads and GPUs."""
    if as_json:
        print_json(environment())
        return
    output().print(facts("magicube environment", environment()))
