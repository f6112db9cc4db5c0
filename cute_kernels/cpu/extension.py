"""Loading of the compiled CPU engine, and its instruction sets."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from types import ModuleType

import torch

MISSING = "the compiled CPU engine is missing; reinstall with a C++17 compiler: pip install ."


def _load() -> ModuleType | None:
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


ENGINE = _load()
if ENGINE is not None:
    ENGINE.read_tensors(torch.Tensor)


def available() -> bool:
    """Whether the compiled engine is installed. Without it, products fall back to the int64 reference."""
    return ENGINE is not None


def load_extension() -> ModuleType:
    """Return the compiled module.

    Raises
    ------
    RuntimeError
        If the extension is not installed.
    """
    if ENGINE is None:
        raise RuntimeError(MISSING)
    return ENGINE


def isas() -> list[str]:
    """Return the instruction sets that this machine can run, fastest first; empty without the extension.

    Examples
    --------
    >>> set(isas()) <= {"amx", "avx512", "avx_vnni", "avx2", "portable"}
    True
    """
    return [] if ENGINE is None else list(ENGINE.isas())


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
    return "reference" if ENGINE is None else str(ENGINE.isa())


def has_vnni() -> bool:
    """Return whether the instruction set in use multiplies and adds four bytes at once: VNNI, in 256 or 512 bits.

    Raises
    ------
    ValueError
        As :func:`isa`.

    Examples
    --------
    >>> has_vnni() == (isa() in ("amx", "avx512", "avx_vnni"))
    True
    """
    return isa() in ("amx", "avx512", "avx_vnni")
