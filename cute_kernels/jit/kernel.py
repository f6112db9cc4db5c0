"""Load and launch kernels on a GPU. Only this file and ``tma`` call the driver.

A launch goes to torch's current stream. It packs its arguments into a buffer that is reused, so that it costs a few
microseconds of Python. It allocates nothing on the GPU and waits for nothing.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from cute_kernels.jit.cache import build
from cute_kernels.jit.compiler import Binary, Unit, Usage
from cute_kernels.jit.device import DeviceError, _device, current_arch, on_device
from cute_kernels.jit.toolchain import cuda_core

TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64
_CODES = {  # numpy type -> format of struct
    **{np.dtype(name).type: np.dtype(name).char for name in ("i1", "u1", "i2", "u2", "i4", "u4", "f2", "f4", "f8")},
    np.int64: "q",
    np.uint64: "Q",
    np.bool_: "?",
}

Grid = tuple[int, int, int]


class Config(Hashable, Protocol):
    """What :func:`get_kernel` needs of a kernel config; :class:`~cute_kernels.jit.codegen.KernelConfig` has it."""

    def translation_unit(self, arch: str) -> Unit:
        """Return the C++ source for `arch`."""

    @property
    def threads(self) -> int:
        """Threads per CTA."""

    @property
    def smem_bytes(self) -> int:
        """Bytes of dynamic shared memory per CTA."""

    @property
    def shared_carveout(self) -> int:
        """Percent of an SM's memory to set up as shared; -1: the driver's choice."""

    @property
    def wide_cluster(self) -> bool:
        """Whether a cluster has more CTAs than every GPU takes."""


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _check(what: str, result: Sequence[Any]) -> Any:
    """The value that the driver returned with its status; raises :class:`DeviceError` for a bad status."""
    if int(result[0]):
        raise DeviceError(f"{what}: {getattr(result[0], 'name', result[0])}")
    return result[1] if len(result) == 2 else result[1:]


class ArgBuffer:
    """Memory of one launch's arguments, and the address of each as the driver reads them."""

    def __init__(self, size: int, offsets: Sequence[int]) -> None:
        self.values = ctypes.create_string_buffer(size + _TENSOR_MAP_ALIGNMENT)
        base = ctypes.addressof(self.values)
        self.start = -base % _TENSOR_MAP_ALIGNMENT
        self.pointers = (ctypes.c_void_p * len(offsets))(*(base + self.start + offset for offset in offsets))
        self.address = ctypes.addressof(self.pointers)


class ArgLayout:
    """Widths and offsets of a kernel's arguments, taken from its first launch, and reusable buffers."""

    def __init__(self, args: Sequence[object], sizes: Sequence[int] | None) -> None:
        codes = [_code(index, arg) for index, arg in enumerate(args)]
        widths = [struct.calcsize("<" + code) for code in codes]
        if sizes is not None and list(sizes) != widths:
            raise TypeError(f"arguments are of {widths} bytes, the kernel's parameters of {list(sizes)}")
        text, offset, self.offsets = "<", 0, []
        for code, width in zip(codes, widths, strict=True):
            pad = -offset % min(width, _TENSOR_MAP_ALIGNMENT)
            text += f"{pad}x{code}"
            self.offsets.append(offset + pad)
            offset += pad + width
        self.format = struct.Struct(text)
        self.frames: list[ArgBuffer] = []  # pop and append are atomic, so that threads never share one

    def fill(self, args: Sequence[object]) -> ArgBuffer:
        """Pack `args` into a buffer and return it."""
        frame = self.frames.pop() if self.frames else ArgBuffer(self.format.size, self.offsets)
        self.format.pack_into(frame.values, frame.start, *args)
        return frame


def _code(index: int, arg: object) -> str:
    """The format of one argument."""
    if type(arg) is int:
        return "q"
    if isinstance(arg, bytes) and len(arg) == TENSOR_MAP_BYTES:
        return f"{TENSOR_MAP_BYTES}s"
    if isinstance(arg, np.generic) and type(arg) in _CODES:
        return _CODES[type(arg)]
    kinds = f"an int (64 bits), a scalar of numpy or the {TENSOR_MAP_BYTES} bytes of a tensor map"
    raise TypeError(f"argument {index} must be {kinds}, got {type(arg).__name__}")


class Kernel:
    """A kernel loaded on one device.

    Attributes
    ----------
    usage : Usage or None
        Registers, stack and spills from the assembler; None for PTX.
    num_regs : int
        Registers per thread, from the driver.
    local_bytes : int
        Bytes of stack and spills per thread.
    shared_bytes : int
        Bytes of static shared memory per CTA.
    max_dynamic_shared_bytes : int
        Bytes of dynamic shared memory per CTA that a launch may ask for.

    Examples
    --------
    >>> kernel = get_kernel(config)  # doctest: +SKIP
    >>> kernel.launch((1, 1, 1), (x.data_ptr(), np.int32(2)))  # doctest: +SKIP
    """

    def __init__(
        self, binary: Binary, threads: int, smem_bytes: int, device: int, carveout: int = -1, wide_cluster: bool = False
    ) -> None:
        driver = _driver()
        self.name, self.arch, self.device = binary.title, binary.arch, device
        self.usage: Usage | None = binary.usage
        self.threads, self.smem_bytes = threads, smem_bytes
        self.num_sms: int = torch.cuda.get_device_properties(device).multi_processor_count
        _bind_context(device)
        code = cuda_core().ObjectCode
        module = (code.from_ptx if binary.arch.startswith("compute_") else code.from_cubin)(binary.code)
        try:
            self._kernel = module.get_kernel(binary.symbol)
        except Exception as error:  # cuda.core's errors share no public base class
            raise DeviceError(f"{self.name} ({self.arch}) does not load on device {device}: {error}") from error
        self._handle = driver.CUkernel(int(self._kernel.handle))
        self._function = driver.CUfunction(int(self._kernel.handle))  # the driver takes a kernel under this name too
        self._driver = driver  # an import statement would be a tenth of a launch's time
        attribute = driver.CUfunction_attribute
        if smem_bytes:
            size = f"{smem_bytes} bytes of dynamic shared memory"
            self._set(attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes, size)
        if carveout >= 0:
            share = f"{carveout}% as shared memory"
            self._set(attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, carveout, share)
        if wide_cluster:
            self._set(attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, "clusters of up to 16 CTAs")
        self.num_regs = self._get(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS)
        self.local_bytes = self._get(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
        self.shared_bytes = self._get(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        self.max_dynamic_shared_bytes = self._get(attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        self._layout: ArgLayout | None = None
        self._threads = threading.local()
        self._configs: dict[tuple[Grid, Grid | None, bool, int], Any] = {}
        self._waits = int(re.sub(r"\D", "", binary.arch)) >= 90  # older code has no instruction for it

    def _get(self, attribute: Any) -> int:
        device = self._driver.CUdevice(self.device)
        return _check(f"attribute of {self.name}", self._driver.cuKernelGetAttribute(attribute, self._handle, device))

    def _set(self, attribute: Any, value: int, setting: str) -> None:
        what = f"{self.name} with {setting} on device {self.device}"
        device = self._driver.CUdevice(self.device)
        _check(what, self._driver.cuKernelSetAttribute(attribute, value, self._handle, device))

    def _parameter_sizes(self) -> list[int] | None:
        """Bytes of each parameter; None from drivers before 12.4, which do not report them."""
        try:
            return [parameter.size for parameter in self._kernel.arguments_info]
        except NotImplementedError:
            return None

    def launch(self, grid: Grid, args: tuple[Any, ...], cluster: Grid | None = None, pdl: bool = False) -> None:
        """Launch on torch's current stream of the kernel's device.

        Parameters
        ----------
        grid : tuple of int
            CTAs in x, y, z. With a 0 nothing is launched.
        args : tuple
            Kernel arguments: int (64 bits, also pointers), numpy scalars (other widths), the 128 bytes of a tensor map.
        cluster : tuple of int, optional
            CTAs per cluster in x, y, z.
        pdl : bool, default False
            Programmatic dependent launch: CTAs may start before the previous kernel ends. The kernel must call
            ``pdl_wait`` (``device/copy.cuh``). No effect before sm_90.

        Raises
        ------
        TypeError
            If the kernel does not take these arguments.
        DeviceError
            If the driver refuses the launch.
        """
        if 0 in grid:
            return
        layout, frame = self._fill(args)
        self.enqueue(LaunchRecord(self, grid, frame, cluster, pdl))
        if getattr(recording, "launches", None) is None:
            layout.frames.append(frame)  # the driver has copied the arguments

    def _fill(self, args: tuple[Any, ...]) -> tuple[ArgLayout, ArgBuffer]:
        layout = self._layout
        if layout is None:
            layout = self._layout = ArgLayout(args, self._parameter_sizes())
        try:
            return layout, layout.fill(args)
        except struct.error as error:
            raise TypeError(f"arguments of {self.name}: {error}") from None

    def enqueue(self, prepared: LaunchRecord) -> None:
        """Launch `prepared` again: same arguments, same attributes."""
        if torch._C._cuda_getDevice() != self.device:  # the driver would launch it on the current device
            with torch.cuda.device(self.device):
                self.enqueue(prepared)
            return
        _, grid, frame, cluster, pdl = prepared
        driver, stream = self._driver, torch._C._cuda_getCurrentRawStream(self.device)
        if cluster is None and not (pdl and self._waits):
            (status,) = driver.cuLaunchKernel(
                self._function, *grid, self.threads, 1, 1, self.smem_bytes, stream, frame.address, 0
            )
        else:
            config = self._configs.get((grid, cluster, pdl, stream))
            if config is None:
                config = self._configure(grid, cluster, pdl, stream)
            (status,) = driver.cuLaunchKernelEx(config, self._function, frame.address, 0)
        if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT and not self._bound_here():
            self.enqueue(prepared)
            return
        if status:
            shape = f"grid {grid}, {self.threads} threads, {self.smem_bytes} bytes of shared memory"
            raise DeviceError(f"{self.name} ({self.arch}) with {shape}: {status.name}")
        seen: list[LaunchRecord] | None = getattr(recording, "launches", None)
        if seen is not None:
            seen.append(prepared)

    def _bound_here(self) -> bool:
        """Whether this thread has the device's context; one that has not touched the GPU yet has none, and gets it."""
        if getattr(self._threads, "bound", False):
            return True
        _bind_context(self.device)
        self._threads.bound = True
        return False

    def _configure(self, grid: Grid, cluster: Grid | None, pdl: bool, stream: int) -> Any:
        driver, attributes = self._driver, []
        names = driver.CUlaunchAttributeID
        if cluster is not None:
            attribute = driver.CUlaunchAttribute()
            attribute.id = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimension = attribute.value.clusterDim
            dimension.x, dimension.y, dimension.z = cluster
            attributes.append(attribute)
        if pdl and self._waits:
            attribute = driver.CUlaunchAttribute()
            attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes, config.hStream = self.smem_bytes, stream
        config.attrs, config.numAttrs = attributes, len(attributes)
        if len(self._configs) >= 64:  # shapes may vary without end
            self._configs.clear()
        self._configs[grid, cluster, pdl, stream] = config
        return config

    def __repr__(self) -> str:
        return f"Kernel({self.name!r}, {self.arch}, device {self.device}, {self.num_regs} registers)"


def _bind_context(device: int) -> None:
    """Make torch's context of ``device`` the current one of this thread."""
    cuda_core().Device(device).set_current()


_kernels: dict[tuple[Config, int], Kernel] = {}
_loading = threading.Lock()


def get_kernel(config: Config) -> Kernel:
    """Return the kernel of `config` on torch's current device.

    It is compiled and loaded once per process and device. ``MAGICUBE_ARCH`` is read when it is loaded.

    Parameters
    ----------
    config : Config
        Hashable kernel config.

    Returns
    -------
    Kernel

    Raises
    ------
    DeviceError
        If there is no CUDA device or its compute capability is not supported.
    ToolchainError, CompileError
        As :func:`cute_kernels.jit.build`.

    Examples
    --------
    >>> from cute_kernels.convert.quantize import QuantizeConfig
    >>> get_kernel(QuantizeConfig("encode_rows", "float16"))  # doctest: +SKIP
    Kernel('quantize-encode_rows-float16-s8-s4', sm_90a, device 0, 40 registers)
    """
    device = _device()
    kernel = _kernels.get((config, device))
    if kernel is None:
        with _loading:
            kernel = _kernels.get((config, device))
            if kernel is None:
                binary = build(config.translation_unit(current_arch()))
                kernel = _kernels[config, device] = Kernel(
                    binary, config.threads, config.smem_bytes, device, config.shared_carveout, config.wide_cluster
                )
    return kernel


def set_to_zero(address: int, size: int, device: int) -> None:
    """Set `size` bytes at `address` to zero on torch's current stream; cheaper on the host than ``zero_``."""
    with on_device(device):
        (status,) = _driver().cuMemsetD8Async(address, 0, size, torch._C._cuda_getCurrentRawStream(device))
    if status:
        raise DeviceError(f"cuMemsetD8Async of {size} bytes: {status.name}")


def occupancy(kernel: Kernel) -> int:
    """Return how many CTAs of `kernel` one SM holds at a time.

    Examples
    --------
    >>> occupancy(get_kernel(config))  # doctest: +SKIP
    4
    """
    result = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel._function, kernel.threads, kernel.smem_bytes)
    return _check(f"occupancy of {kernel.name}", result)


class LaunchRecord(NamedTuple):
    """A launch with packed arguments: any thread may run it any number of times."""

    kernel: Kernel
    grid: tuple[int, int, int]
    frame: ArgBuffer
    cluster: tuple[int, int, int] | None
    pdl: bool


recording = threading.local()  # ``launches``: of the function that is being recorded in this thread, if any
