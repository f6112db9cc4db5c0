"""Where NVRTC, nvJitLink and the headers are: every path and every version of the JIT is decided here.

Headers come from wheels first (``nvidia-cutlass``, ``nvidia-cuda-cccl``, ``nvidia-cuda-runtime``), then from the
toolkit of ``CUDA_HOME``, ``CUDA_PATH`` or ``/usr/local/cuda``, which carries CCCL too.  One folder that holds both the
runtime's headers and CCCL goes before two folders that hold one each, because the two must fit each other.
"""

from __future__ import annotations

import os
import platform
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

CUTLASS_WHEEL = "nvidia-cutlass==4.2.0.0"
CCCL_BELOW = (3, 2)  # of the header's own numbering; CUTLASS 4.2 does not compile with this one and newer ones
KERNEL_HEADERS = Path(__file__).resolve().parents[1]  # the folder of the .cuh files

_CUTLASS_VERSION = "cutlass/version.h"
_CCCL_VERSION = "cuda/std/__cccl/version.h"
_RUNTIME_VERSION = "cuda_runtime_api.h"
LAUNCH_WHEELS = ("cuda-core>=1.2,<2", "cuda-bindings>=13.0,<14")


class ToolchainError(RuntimeError):
    """A part of the toolchain is missing; names it, where it was looked for, and the pip line that installs it.

    Examples
    --------
    >>> try:
    ...     found = find()
    ... except ToolchainError as error:
    ...     print(error)  # ends with the command that installs what is missing
    """


@dataclass(frozen=True)
class Toolchain:
    """What a compile needs.

    ``include_dirs`` are in search order, the kernels' own folder first. ``versions`` has one entry each for nvrtc,
    nvjitlink, cutlass, cccl and runtime.

    Examples
    --------
    >>> sorted(find().versions)
    ['cccl', 'cutlass', 'nvjitlink', 'nvrtc', 'runtime']
    """

    include_dirs: tuple[str, ...]
    versions: dict[str, str]


@dataclass(frozen=True)
class _Missing:
    what: str
    wheel: str


def _define(header: Path, name: str) -> int | None:
    """The number that ``header`` defines ``name`` as, or None."""
    try:
        found = re.search(rf"#\s*define\s+{name}\s+(\d+)", header.read_text(errors="replace"))
    except OSError:
        return None
    return int(found[1]) if found else None


def package_folders(name: str) -> list[Path]:
    """Return the folders of an importable package, found without importing it."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def _toolkits() -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if folder := os.environ.get(name):
            yield Path(folder)
    yield Path("/usr/local/cuda")


def header_folders() -> list[Path]:
    """Return folders that may hold the CUDA runtime headers and CCCL: of wheels, then of toolkits."""
    folders = [folder for root in package_folders("nvidia") for folder in sorted(root.glob("*/include"))]
    for toolkit in _toolkits():
        folders += [toolkit / "include", toolkit / "targets" / f"{platform.machine()}-linux" / "include"]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def cutlass_folders() -> list[Path]:
    """Return folders that may hold CUTLASS and CuTe, inside the wheel nvidia-cutlass."""
    return [folder / "source" / "include" for folder in package_folders("cutlass_library")]


def _wheel(name: str, major: int, below: str = "") -> str:
    return f"{name}-cu12>=12.8,<13" if major == 12 else f"{name}>=13.0,<{below or '14'}"


_importing = threading.Lock()


def cuda_core() -> ModuleType:
    """Return ``cuda.core``. Version 1.2 fills its module late: threads that import it at once find it without names."""
    with _importing:
        import cuda.core

        return cuda.core


def _nvrtc() -> tuple[tuple[int, int], str]:
    """Version of NVRTC, and the same as text with the size of its library, which differs between patch releases."""
    from cuda.bindings import nvrtc
    from cuda.pathfinder import load_nvidia_dynamic_lib

    status, major, minor = nvrtc.nvrtcVersion()
    if int(status):
        raise RuntimeError(f"nvrtcVersion returned {status}")
    return (major, minor), _identity(major, minor, load_nvidia_dynamic_lib("nvrtc").abs_path)


def _nvjitlink() -> tuple[tuple[int, int], str]:
    from cuda.bindings import nvjitlink
    from cuda.pathfinder import load_nvidia_dynamic_lib

    major, minor = nvjitlink.version()
    return (major, minor), _identity(major, minor, load_nvidia_dynamic_lib("nvJitLink").abs_path)


def _identity(major: int, minor: int, library: str | None) -> str:
    size = f" ({os.path.getsize(library)} bytes)" if library and os.path.isfile(library) else ""
    return f"{major}.{minor}{size}"


def _cutlass(missing: list[_Missing]) -> tuple[str, Path | None]:
    folders = cutlass_folders()
    for folder in folders:
        numbers = [_define(folder / _CUTLASS_VERSION, f"CUTLASS_{part}") for part in ("MAJOR", "MINOR", "PATCH")]
        if None not in numbers and (folder / "cute" / "tensor.hpp").is_file():
            return ".".join(map(str, numbers)), folder
    where = ", ".join(map(str, folders)) or "the package cutlass_library, which is not installed"
    missing.append(_Missing(f"CUTLASS headers (cute/tensor.hpp; looked in {where})", CUTLASS_WHEEL))
    return "", None


def _cccl(folder: Path) -> tuple[Path, str] | None:
    """CCCL's include folder in or below ``folder`` and its version, unless it is too new for CUTLASS."""
    for place in (folder / "cccl", folder):
        number = _define(place / _CCCL_VERSION, "CCCL_VERSION")
        if number is not None:
            version = (number // 1_000_000, number // 1000 % 1000, number % 1000)
            return (place, ".".join(map(str, version))) if version < CCCL_BELOW else None
    return None


def _runtime(folder: Path, major: int) -> str | None:
    """Version of the runtime's headers in ``folder`` if they are of NVRTC's major version."""
    number = _define(folder / _RUNTIME_VERSION, "CUDART_VERSION")
    return f"{number // 1000}.{number % 1000 // 10}" if number is not None and number // 1000 == major else None


def _cuda_headers(major: int, missing: list[_Missing]) -> tuple[dict[str, str], list[Path]]:
    folders = header_folders()
    runtimes = {folder: version for folder in folders if (version := _runtime(folder, major))}
    cccls = {folder: found for folder in folders if (found := _cccl(folder))}
    both = next((folder for folder in runtimes if folder in cccls), None)
    where = ", ".join(map(str, folders)) or "no wheel and no toolkit of CUDA_HOME, CUDA_PATH or /usr/local/cuda"
    if not runtimes:
        what = f"CUDA runtime headers of version {major} ({_RUNTIME_VERSION}; looked in {where})"
        missing.append(_Missing(what, _wheel("nvidia-cuda-runtime", major)))
    if not cccls:
        below = ".".join(map(str, CCCL_BELOW))
        what = f"CCCL headers below {below} ({_CCCL_VERSION}; looked in {where} and in cccl below these)"
        missing.append(_Missing(what, _wheel("nvidia-cuda-cccl", major, "13.2")))
    if not (runtimes and cccls):
        return {}, []
    runtime, holder = (both, both) if both else (next(iter(runtimes)), next(iter(cccls)))
    place, version = cccls[holder]
    # CCCL's folder first: it also has <nv/target>, which must be of the same version
    return {"cccl": version, "runtime": runtimes[runtime]}, list(dict.fromkeys([holder, place, runtime]))


def _compilers(missing: list[_Missing]) -> tuple[int, dict[str, str]]:
    """Major version of NVRTC (13 where it is missing) and the versions of both compilers."""
    if not find_spec("cuda") or not find_spec("cuda.bindings") or not find_spec("cuda.core"):
        missing += [_Missing(f"the package {wheel.partition('>')[0]}", wheel) for wheel in LAUNCH_WHEELS]
        return 13, {}
    found: dict[str, tuple[tuple[int, int], str]] = {}
    for name, wheel, probe in (
        ("nvrtc", "nvidia-cuda-nvrtc", _nvrtc),
        ("nvjitlink", "nvidia-nvjitlink", _nvjitlink),
    ):
        major = found["nvrtc"][0][0] if "nvrtc" in found else 13
        try:
            found[name] = probe()
        except (ImportError, OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            missing.append(_Missing(f"the library of {wheel} ({reason})", _wheel(wheel, major)))
    if len(found) == 2 and found["nvjitlink"][0] < found["nvrtc"][0]:
        (major, minor), _ = found["nvrtc"]
        what = f"an nvJitLink as new as NVRTC {major}.{minor} (found {found['nvjitlink'][1]})"
        name = "nvidia-nvjitlink-cu12" if major == 12 else "nvidia-nvjitlink"
        missing.append(_Missing(what, f"{name}=={major}.{minor}.*"))
    return found["nvrtc"][0][0] if "nvrtc" in found else 13, {name: text for name, (_, text) in found.items()}


@cache
def find() -> Toolchain:
    """Find the toolchain; cached for the process.

    Raises
    ------
    ToolchainError
        One error for all parts that are missing, too old or too new.
    """
    missing: list[_Missing] = []
    major, versions = _compilers(missing)
    cutlass, cutlass_folder = _cutlass(missing)
    headers, folders = _cuda_headers(major, missing)
    if missing or cutlass_folder is None:
        wheels = " ".join(f"'{wheel}'" for wheel in dict.fromkeys(item.wheel for item in missing))
        absent = "; ".join(item.what for item in missing)
        raise ToolchainError(f"kernels cannot be compiled, missing: {absent}; install with: pip install {wheels}")
    places = (KERNEL_HEADERS, cutlass_folder, *folders)
    return Toolchain(tuple(map(str, places)), {**versions, "cutlass": cutlass, **headers})


def describe() -> dict[str, str]:
    """Return the toolchain by name for a bug report; a missing one as its error text."""
    try:
        toolchain = find()
    except ToolchainError as error:
        return {"jit": str(error)}
    return {**toolchain.versions, "jit headers": ", ".join(toolchain.include_dirs[1:])}
