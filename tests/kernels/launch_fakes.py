"""What the launch recorder puts in the place of the driver, cuda.core, torch.cuda and tensors on a GPU."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from cuda.bindings import driver
from torch import Tensor
from torch.utils._device import _device_constructors

OPERATORS = ("magicube::", "residual::")  # namespaces of torch operators
SUCCESS = (driver.CUresult.CUDA_SUCCESS,)
STREAM = 7
_UNINITIALIZED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
_SHARED_BYTES, _THREADS = 233472, 2048  # of an SM


class Machine(NamedTuple):
    """A GPU that CPU tensors stand in for."""

    device: int
    capability: tuple[int, int]
    sms: int


MACHINES = {
    "sm_90a": Machine(0, (9, 0), 132),
    "sm_80": Machine(1, (8, 0), 108),
    "sm_100a": Machine(2, (10, 0), 148),
}


class Launch(NamedTuple):
    """A launch as the driver saw it; ``values``: of the arguments, tensor maps as :class:`Map`."""

    text: str
    values: list[Any]


class Map(NamedTuple):
    """Parameters of ``cuTensorMapEncodeTiled``."""

    pointer: int
    text: str


class Host(Protocol):
    """What the fakes ask of the recorder."""

    launches: list[Launch]

    @property
    def is_recording(self) -> bool:
        """Whether tensors report a CUDA device."""

    @property
    def machine(self) -> Machine:
        """The GPU of the call that is recorded."""

    def track(self, tensor: Tensor) -> object:
        """The library asks for the address of ``tensor``."""

    def launched(
        self, handle: int, grid: tuple[int, int, int], threads: int, shared: int, tags: str, arguments: int
    ) -> None:
        """The driver was asked for a launch."""


def array(address: int, dtype: Any, *shape: int) -> np.ndarray[Any, Any]:
    """Memory at an address."""
    size = int(np.prod(shape))
    memory: Any = (ctypes.c_uint8 * (size * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(memory, dtype, size).reshape(shape)


def _spread_slots(arguments: list[Any]) -> None:
    """Slots of a row's columns in their order: of zeros the copies made of them would depend on threads."""
    until, _, _, rows, tiles, _, _, slots = arguments
    lengths = array(until, np.int32, rows, tiles, 8)[:, -1].sum(1)
    array(slots, np.int64, lengths.sum())[:] = np.concatenate([np.arange(each) for each in lengths])


Answer = Callable[[list[Any]], None]  # of a kernel's arguments, whose results it writes
ANSWERS: dict[str, Answer] = {"spread_slots": _spread_slots}


class FakeDriver:
    """``cuda.bindings.driver`` with its types and enums, and calls that are recorded."""

    def __init__(self, recorder: Host) -> None:
        self._recorder = recorder
        self._maps: list[tuple[Map, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu") and name[2:3].isupper():
            raise NotImplementedError(f"the recorder has no {name}")
        return getattr(driver, name)

    def cuKernelSetAttribute(self, *_: Any) -> Any:
        return SUCCESS

    def cuKernelGetAttribute(self, *_: Any) -> Any:
        return (*SUCCESS, 0)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, _: Any, threads: int, shared: int) -> Any:
        return (*SUCCESS, max(1, min(_SHARED_BYTES // (shared + 1024), _THREADS // threads)))

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> Any:
        assert stream == STREAM
        self._recorder.launches.append(Launch(f"memset {value}", [address, size]))
        return SUCCESS

    def cuLaunchKernel(
        self, function: Any, x: int, y: int, z: int, *rest: int
    ) -> Any:  # threads in x, y, z; shared memory, stream, arguments, extra
        assert rest[1:3] == (1, 1) and rest[4] == STREAM
        self._recorder.launched(int(function), (x, y, z), rest[0], rest[3], "", rest[5])
        return SUCCESS

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: int, _: int) -> Any:
        assert (config.blockDimY, config.blockDimZ, int(config.hStream)) == (1, 1, STREAM)
        ids, tags = driver.CUlaunchAttributeID, []
        for each in config.attrs[: config.numAttrs]:
            if each.id == ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
                size = each.value.clusterDim
                tags.append(f" cluster {size.x}x{size.y}x{size.z}")
            else:
                assert each.id == ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                tags.append(f" early {each.value.programmaticStreamSerializationAllowed}")
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        shape = (config.blockDimX, config.sharedMemBytes)
        self._recorder.launched(int(function), grid, *shape, "".join(tags), arguments)
        return SUCCESS

    def cuTensorMapEncodeTiled(self, kind: Any, rank: int, pointer: int, *rest: Any) -> Any:
        shape, pitch, box, steps = ([int(each) for each in sizes] for sizes in rest[:4])
        assert rank == len(shape) == len(box) == len(pitch) + 1 and steps == [1] * rank
        interleave, swizzle, promotion, fill = (int(each) for each in rest[4:])
        name = kind.name.removeprefix("CU_TENSOR_MAP_DATA_TYPE_")
        text = f"{name} {shape} pitch {pitch} box {box} {interleave} {swizzle} {promotion} {fill}"
        memory = ctypes.create_string_buffer(f"map {len(self._maps)}".encode(), 128)
        self._maps.append((Map(int(pointer), text), memory))
        return (*SUCCESS, SimpleNamespace(getPtr=lambda: ctypes.addressof(memory)))

    def map_of(self, content: bytes) -> Map:
        return self._maps[int(content.rstrip(b"\0").removeprefix(b"map "))][0]


class FakeCode:
    """``cuda.core.ObjectCode``: each kernel gets a handle of its own."""

    handles = 0

    @classmethod
    def from_cubin(cls, _: bytes) -> FakeCode:
        return cls()

    def get_kernel(self, _: str) -> Any:
        FakeCode.handles += 1
        return FakeKernel(FakeCode.handles)


class FakeKernel:
    """``cuda.core.Kernel``."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    @property
    def arguments_info(self) -> Any:
        raise NotImplementedError  # as drivers before 12.4 do


class FakeStream:
    """A stream or event on which everything is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = STREAM

    def query(self) -> bool:
        return True

    def nothing(self, *_: Any) -> None:
        """Return at once."""

    synchronize = record = wait = wait_event = wait_stream = record_event = nothing


def replace_torch_cuda(recorder: Host, put: Callable[[Any, str, Any], None]) -> None:
    properties = SimpleNamespace
    replaced: dict[str, Any] = {
        "is_available": lambda: recorder.is_recording,
        "current_device": lambda: recorder.machine.device,
        "get_device_capability": lambda _=None: recorder.machine.capability,
        "get_device_name": lambda _=None: "recorder",
        "get_device_properties": lambda _: properties(multi_processor_count=recorder.machine.sms),
        "device": lambda _: nullcontext(),
        "current_stream": FakeStream,
        "synchronize": lambda _=None: None,
        "is_current_stream_capturing": lambda: False,
        "Event": FakeStream,
        "Stream": FakeStream,
    }
    for name, value in replaced.items():
        put(torch.cuda, name, value)
    put(torch._C, "_cuda_getDevice", lambda: recorder.machine.device)
    put(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM)


def replace_tensors(recorder: Host, put: Callable[[Any, str, Any], None]) -> None:
    """Devices, addresses, and everything that makes tensors; memory that is not written is zero."""
    true_device, address = torch.Tensor.device, torch.Tensor.data_ptr

    def device(x: Tensor) -> torch.device:
        return torch.device("cuda", recorder.machine.device) if recorder.is_recording else true_device.__get__(x)

    def data_ptr(x: Tensor) -> int:
        pointer = address(x)
        if pointer and recorder.is_recording:
            recorder.track(x)
        return pointer

    put(torch.Tensor, "device", property(device))
    put(torch.Tensor, "get_device", lambda _: recorder.machine.device if recorder.is_recording else -1)
    put(torch.Tensor, "is_cuda", property(lambda _: recorder.is_recording))
    put(torch.Tensor, "is_cpu", property(lambda _: not recorder.is_recording))
    put(torch.Tensor, "data_ptr", data_ptr)
    for name in ("cuda", "cpu", "pin_memory"):
        put(torch.Tensor, name, lambda x, *_, **__: x)
    put(torch.Tensor, "is_pinned", lambda *_: True)
    move = torch.Tensor.to

    def to(x: Tensor, *args: Any, **options: Any) -> Tensor:
        kept = [each for each in args if not isinstance(each, (str, torch.device))]
        options.pop("device", None)
        return move(x, *kept, **options) if kept or options else x

    put(torch.Tensor, "to", to)
    makers: set[Any] = _device_constructors()
    for make in makers:
        if hasattr(torch, make.__name__) and getattr(torch, make.__name__) is make:
            put(torch, make.__name__, _here(make))
    for name in ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor"):
        put(torch.Tensor, name, _here(getattr(torch.Tensor, name)))
    multiply = torch.mm

    def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        """The product; zeros of ``out_dtype``, which a CPU does not take."""
        if out_dtype is None:
            return multiply(a, b, **options)
        return a.new_zeros(a.shape[0], b.shape[1], dtype=out_dtype)

    put(torch, "mm", mm)
    plain = torch.Generator
    put(torch, "Generator", lambda *_, **__: plain())


def _here(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``make``, on the CPU wherever it is asked for."""

    def made(*args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Tensor:
        if device is not None and torch.device(device).type == "meta":
            return make(*args, device=device, **options)
        found = make(*args, **options)
        return found.zero_() if make.__name__ in _UNINITIALIZED else found

    return made


def replace_operators() -> list[torch.library.Library]:
    """Operators' implementations for a CPU are those for CUDA, as long as the result lives."""
    libraries = []
    cuda_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = name.partition("::")
        if not name.startswith(OPERATORS) or not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            continue
        operator, _, overload = rest.partition(".")
        found = getattr(getattr(getattr(torch.ops, space), operator), overload or "default")

        def run(*args: Any, found: Any = found, **options: Any) -> Any:
            return found.redispatch(cuda_keys, *args, **options)

        library = torch.library.Library(space, "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced
            library.impl(rest, run, "CPU", allow_override=True)
        libraries.append(library)
    return libraries
