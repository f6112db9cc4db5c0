"""Kernels compiled at run time: NVRTC through cuda.core, a cache on disk, launch on torch's stream.

Compiling (``compiler``, ``cache``, ``toolchain``, :func:`warmup`) needs no GPU.  ``kernel`` does.
"""

from cute_kernels.jit.cache import build
from cute_kernels.jit.compiler import ARCHES, Binary, CompileError, Unit, Usage, compile_unit
from cute_kernels.jit.device import DeviceError, current_arch
from cute_kernels.jit.kernel import Kernel, get_kernel, occupancy
from cute_kernels.jit.launch_cache import LaunchCache
from cute_kernels.jit.tma import tensor_map
from cute_kernels.jit.toolchain import Toolchain, ToolchainError
from cute_kernels.jit.warmup import WarmupResult, warmup

__all__ = [
    "ARCHES",
    "Binary",
    "CompileError",
    "DeviceError",
    "Kernel",
    "LaunchCache",
    "Toolchain",
    "ToolchainError",
    "Unit",
    "Usage",
    "WarmupResult",
    "build",
    "compile_unit",
    "current_arch",
    "get_kernel",
    "occupancy",
    "tensor_map",
    "warmup",
]
