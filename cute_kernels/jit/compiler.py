"""Compile C++ source to machine code: NVRTC to LTO-IR, then nvJitLink.

A compile takes no tensors, launches nothing and needs no driver, so every kernel compiles on a machine without a GPU.
CuTe needs ``-default-device``, which makes every constant of its headers a device variable: 1 MB per kernel. The link
drops those that are not read; 8 KB remain. The headers take two thirds of NVRTC's time: a process that compiles many
kernels calls :func:`keep_headers`.
"""

from __future__ import annotations

import atexit
import io
import logging
import re
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from cute_kernels.jit import toolchain

log = logging.getLogger("magicube")

# "a": the tensor cores' own instructions (wgmma, tcgen05), which run on this very chip only.
# compute_80 is PTX, which the driver translates on load for any chip from 8.0 on.
ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "compute_80")
# Whatever is changed here changes the cache's keys: the cache reads these two.
COMPILE_OPTIONS = {"std": "c++17", "device_as_default_execution_space": True, "link_time_optimization": True}
# the linker's own cache gives code without a word of registers and spills, and ours stands before it
LINK_OPTIONS = {"link_time_optimization": True, "optimize_unused_variables": True, "no_cache": True}
_FILE = "unit.cu"  # how the compiler's messages call the source
_precompiled: dict[str, bool | str] = {}  # options that keep headers
_HEADER_HEAP = (
    1 << 29
)  # bytes: all of CuTe takes more than NVRTC's 256 MiB, and cuda.core 1.2 fails where it grows the heap


@dataclass(frozen=True)
class Unit:
    """One translation unit.

    Parameters
    ----------
    source : str
        C++ source. It includes the project's headers by path (``"spmm/panel.cuh"``) and CuTe's as ``<cute/...>``.
    kernel : str
        Name expression of one ``__global__`` function, such as ``magicube::copy<int, 4>``.
    arch : str
        One of :data:`ARCHES`.
    label : str, default ""
        Name in lists and messages; default: the name expression.

    Examples
    --------
    >>> Unit("template <int N> __global__ void scale(float* x) {}", "scale<2>", "sm_90a").title
    'scale<2>'
    """

    source: str
    kernel: str
    arch: str
    label: str = ""

    @property
    def title(self) -> str:
        """Label, or the name expression."""
        return self.label or self.kernel


@dataclass(frozen=True)
class Usage:
    """Registers per thread, and bytes of stack, spills and static shared memory, from ``ptxas``.

    Examples
    --------
    >>> unit = Unit("template <int N> __global__ void scale(float* x) { x[threadIdx.x] *= N; }", "scale<2>", "sm_90a")
    >>> compile_unit(unit).usage
    Usage(registers=..., stack_bytes=0, spill_bytes=0, shared_bytes=0)
    """

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: cubin, or PTX for ``compute_*``.

    ``symbol`` is the kernel's name in ``code``, ``title`` its unit's. ``usage`` is None for PTX, which the driver
    assembles.

    Examples
    --------
    >>> binary = Binary(b"", "_Z5scaleILi2EEvPf", "sm_90a", "scale<2>")
    >>> binary.title, binary.usage
    ('scale<2>', None)
    """

    code: bytes
    symbol: str
    arch: str
    title: str
    usage: Usage | None = None


class CompileError(RuntimeError):
    """NVRTC or nvJitLink refused a unit; ``unit`` is the unit and ``log`` the compiler's log.

    Examples
    --------
    >>> try:
    ...     compile_unit(Unit("__global__ void scale(float* x) { y = 1; }", "scale", "sm_90a"))
    ... except CompileError as error:
    ...     print('identifier "y" is undefined' in error.log)
    True
    """

    def __init__(self, unit: Unit, log: str) -> None:
        super().__init__(unit, log)  # both, so that the error can come back from another process
        self.unit = unit
        self.log = log

    def __str__(self) -> str:
        return f"{self.unit.title} does not compile for {self.unit.arch}:\n{self.log}"


def check_arch(arch: str) -> None:
    """Raise ``ValueError`` unless `arch` is one of :data:`ARCHES`."""
    if arch not in ARCHES:
        raise ValueError(f"arch must be one of {', '.join(ARCHES)}, got {arch!r}")


def _text(log_of_compiler: str) -> str:
    return log_of_compiler.replace("\0", "").strip()


def _usage(info: str) -> Usage | None:
    """The figures of ``ptxas -v``; the largest of each if it reports several functions."""

    def largest(pattern: str) -> int:
        return max((int(number) for number in re.findall(pattern, info)), default=0)

    if not re.search(r"Used \d+ registers", info):
        return None
    spilled = largest(r"(\d+) bytes spill stores") + largest(r"(\d+) bytes spill loads")
    return Usage(
        largest(r"Used (\d+) registers"), largest(r"(\d+) bytes stack frame"), spilled, largest(r"(\d+) bytes smem")
    )


def keep_headers() -> None:
    """Parse headers once for all compiles of this process that begin with the same ones; the code stays the same.

    For processes that compile many kernels for one arch: the first takes 0.4 s longer, others 0.8 s instead of 2.2.
    """
    if not _precompiled:
        folder = tempfile.TemporaryDirectory(prefix="magicube-headers-")
        atexit.register(folder.cleanup)  # NVRTC reads its files in the process that wrote them only
        _precompiled["pch_dir"] = folder.name


def _compile(unit: Unit, include_dirs: tuple[str, ...]) -> tuple[bytes, str, str]:
    """Machine code, symbol and the linker's log."""
    core = toolchain.cuda_core()
    if _precompiled and "pch" not in _precompiled:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcSetPCHHeapSize(_HEADER_HEAP)
        _precompiled["pch"] = True
    messages = io.StringIO()
    given: dict[str, Any] = {**COMPILE_OPTIONS, **_precompiled}
    options = core.ProgramOptions(name=_FILE, arch=unit.arch, include_path=list(include_dirs), **given)
    lto = core.Program(unit.source, "c++", options).compile("ltoir", name_expressions=[unit.kernel], logs=messages)
    if _text(messages.getvalue()):
        log.debug("messages for %s (%s): %s", unit.title, unit.arch, _text(messages.getvalue()))
    symbol = lto.symbol_mapping[unit.kernel]
    symbol = symbol.decode() if isinstance(symbol, bytes) else symbol
    ptx = unit.arch.startswith("compute_")
    # a unit's headers may define other kernels, which have no business in this binary
    options = core.LinkerOptions(
        arch=unit.arch, ptx=ptx or None, kernels_used=symbol, ptxas_options=None if ptx else ["-v"], **LINK_OPTIONS
    )
    linker = core.Linker(lto, options=options)
    code = bytes(linker.link("ptx" if ptx else "cubin").code)
    return code, symbol, _text(linker.get_info_log())


def compile_unit(unit: Unit) -> Binary:
    """Compile one kernel without the cache and without a GPU; log one line to the logger ``magicube``.

    Parameters
    ----------
    unit : Unit

    Returns
    -------
    Binary

    Raises
    ------
    ValueError
        If the arch is unknown.
    ToolchainError
        If the compiler or a header is missing.
    CompileError
        With the compiler's log.

    Examples
    --------
    >>> unit = Unit("template <int N> __global__ void scale(float* x) { x[threadIdx.x] *= N; }", "scale<2>", "sm_90a")
    >>> binary = compile_unit(unit)
    >>> binary.symbol, binary.code[1:4]
    ('_Z5scaleILi2EEvPf', b'ELF')
    """
    check_arch(unit.arch)
    found = toolchain.find()
    start = time.perf_counter()
    try:
        code, symbol, info = _compile(unit, found.include_dirs)
    except Exception as error:  # cuda.core's errors share no public base class
        raise CompileError(unit, _text(str(error))) from error
    if not code:  # seen with an arch that the compiler took without a word
        raise CompileError(unit, "the compiler returned no code and no message")
    binary = Binary(code, symbol, unit.arch, unit.title, _usage(info))
    taken = time.perf_counter() - start
    log.info("compiled %s for %s in %.1f s: %d bytes, %s", unit.title, unit.arch, taken, len(code), binary.usage)
    return binary
