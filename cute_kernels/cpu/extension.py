"""Loading of the compiled CPU engine, its instruction sets and threads."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from functools import cache
from types import ModuleType

import torch

_SERIAL_WORK = 1 << 21  # multiply-adds below which starting a thread costs more than it saves


@cache
def _extension() -> ModuleType | None:
    """The compiled module, None if it is not installed; `MAGICUBE_ENGINE` selects another build."""
    name, file = "cute_kernels.cpu._engine", os.environ.get("MAGICUBE_ENGINE")
    if file:
        loader = importlib.machinery.ExtensionFileLoader(name, file)
        spec = importlib.util.spec_from_file_location(name, file, loader=loader)
        if spec is None:
            raise ImportError(f"MAGICUBE_ENGINE must be an extension module, got {file!r}")
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def available() -> bool:
    """Whether the compiled engine is installed. Without it, products fall back to the int64 reference."""
    return _extension() is not None


def load_extension() -> ModuleType:
    """Return the compiled module.

    Raises
    ------
    RuntimeError
        If the extension is not installed.
    """
    module = _extension()
    if module is None:
        raise RuntimeError("the compiled CPU engine is missing; reinstall with a C++17 compiler: pip install .")
    return module


def isas() -> list[str]:
    """Return the instruction sets that this machine can run, fastest first; empty without the extension.

    Examples
    --------
    >>> set(isas()) <= {"avx512", "avx2", "portable"}
    True
    """
    return list(load_extension().paths()) if available() else []


def isa() -> str:
    """Return the instruction set in use, ``"reference"`` without the extension.

    Raises
    ------
    ValueError
        If the environment variable ``MAGICUBE_CPU`` names one that cannot run on this machine.

    Examples
    --------
    >>> isa() in [*isas(), "reference"]
    True
    """
    usable, forced = isas(), os.environ.get("MAGICUBE_CPU")
    if forced is None:
        return usable[0] if usable else "reference"
    if forced not in usable:
        raise ValueError(f"MAGICUBE_CPU must be one of {usable} on this machine, got {forced!r}")
    return forced


def run_options(work: int) -> tuple[ModuleType, str, int]:
    """Return the compiled module, the instruction set in use, and the threads for `work` multiply-adds."""
    return load_extension(), isa(), num_threads(work)


def num_threads(work: int) -> int:
    """Return the number of threads for `work` multiply-adds: one if starting threads costs more than it saves.

    Examples
    --------
    >>> num_threads(1000)
    1
    """
    return torch.get_num_threads() if work >= _SERIAL_WORK else 1
