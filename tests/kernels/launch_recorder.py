"""Record the launches that a GPU would get, on a machine without one; CPU tensors stand in for those of the GPU.

Inside :meth:`Recorder.call` every tensor reports a CUDA device, torch operators run their CUDA implementation, and the
driver, cuda.core and torch.cuda are replaced at their own names, so that all host code above them runs as it is.  A line
of the log is one call: its launches in order, each with the config's name, grid, threads, dynamic shared memory,
cluster, attributes, and the arguments as they are packed.  A pointer is written as the tensor's name and a byte offset:
an argument of the call, ``out``, or ``temp<n>`` in order of appearance, with its bytes and, for integers that the host
made, a checksum.  Results are zeros, because no kernel runs.

``python -m tests.kernels.launch_recorder`` compares with ``launch_log.json``; ``--update`` rewrites it.
"""

from __future__ import annotations

import argparse
import ctypes
import difflib
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import cuda.bindings
import cuda.core
import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cute_kernels.jit import compiler, kernel
from residual.cuda import passes, sixteen_bit
from tests.kernels import launch_fakes
from tests.kernels.launch_fakes import ANSWERS, MACHINES, Answer, FakeCode, FakeDriver, Launch, Machine, Map, array

# All that is replaced or read of the library itself: the class of a loaded kernel and its method that takes a launch's
# arguments, the module that reads `build`, and the loaded kernels by (config, device).
KERNEL, LAUNCH = kernel.Kernel, "launch"
BUILD_READER, BUILD = kernel, "build"
LOADED = kernel._kernels

FIRST, ALIKE = "sm_90a", "as on sm_90a"
LOG = Path(__file__).with_name("launch_log.json")
_ADDRESSES = range(1 << 40, 1 << 47)  # addresses of CPU tensors, above all sizes


class Block(NamedTuple):
    """Memory of a tensor whose address was asked for."""

    start: int
    size: int
    owner: StorageWeakRef
    whole: bool  # it holds integers


class Recorder:
    """The log, and the context in which calls can be recorded."""

    def __init__(self) -> None:
        self.log: dict[str, list[str]] = {}
        self.launches: list[Launch] = []
        self._driver = FakeDriver(self)
        self._machine: Machine | None = None  # device of the tensors; None: the CPU
        self.arch = "sm_90a"
        self._answers: Mapping[str, Answer] = {}
        self._kinds: dict[int, tuple[str, list[Any]]] = {}  # handle -> name of its config, types of its arguments
        self._current: tuple[str, list[Any]] | None = None  # of the launch on its way to the driver
        self._blocks: dict[int, Block] = {}
        self._held: dict[int, Any] = {}  # storages that stay until the call ends, so that no address has two owners
        self._names: dict[int, str] = {}
        self._operators: list[torch.library.Library] = []
        self._sums: dict[int, int] = {}  # checksums of temporaries at their first launch

    @contextmanager
    def on(self, arch: str) -> Iterator[None]:
        """Calls are those of a GPU of this arch."""
        before, self.arch = self.arch, arch
        sixteen_bit._threads.records.clear()  # of another arch
        yield
        self.arch = before
        sixteen_bit._threads.records.clear()

    def call(
        self, key: str, function: Callable[[], Any], *, answers: Mapping[str, Answer] | None = None,
        **named: Tensor | None,
    ) -> Any:  # fmt: skip
        """Record the launches of ``function`` under the arch and ``key``; returns its result.

        ``answers``: the start of a config's name -> what writes the kernel's results, besides :data:`ANSWERS`.
        """
        key = f"{self.arch} {key}"
        if key in self.log:
            raise ValueError(f"key must be new, got {key!r}")
        if not self._operators:  # they are defined by now
            self._operators = launch_fakes.replace_operators()
        torch.default_generator.manual_seed(0)
        self._purge()
        for memory in passes._threads.known.values():  # of whichever call came before
            memory._kept = None
        self.launches, self._answers = [], {**ANSWERS, **(answers or {})}
        for name, tensor in named.items():
            if tensor is not None and tensor.numel():
                self._names.setdefault(self.track(tensor).start, name)
        self._machine = MACHINES[self.arch]
        try:
            result = function()
        finally:
            self._machine = None
        for number, tensor in enumerate(_tensors(result)):
            if tensor.numel():
                self._names.setdefault(self.track(tensor).start, f"out{number or ''}")
        shown: set[str] = set()
        self.log[key] = [self._line(launch, shown) for launch in self.launches]
        self._names.clear()
        self._held.clear()
        self._sums.clear()
        return result

    def run(self, function: Callable[[], Any]) -> Any:
        """The result of ``function``, which launches nothing, on the GPU."""
        self._machine = MACHINES[self.arch]
        try:
            return function()
        finally:
            self._machine = None

    def launched(self, handle: int, grid: Sequence[int], threads: int, shared: int, tags: str, arguments: int) -> None:
        """The driver was asked for a launch."""
        if self._current is not None:
            self._kinds.setdefault(handle, self._current)
        name, kinds = self._kinds[handle]
        pointers = (ctypes.c_void_p * len(kinds)).from_address(arguments)
        values = [self._value(kind, pointer or 0) for kind, pointer in zip(kinds, pointers, strict=True)]
        for value in values:
            self._sum_up(value.pointer if isinstance(value, Map) else value)
        size = "x".join(map(str, grid))
        self.launches.append(Launch(f"{name} grid {size} threads {threads} shared {shared}{tags}", values))
        for prefix, answer in self._answers.items():
            if name.startswith(prefix):
                answer(values)

    def _value(self, kind: Any, address: int) -> Any:
        if kind is int:
            return ctypes.c_int64.from_address(address).value
        if kind is bytes:
            return self._driver.map_of(ctypes.string_at(address, 128))
        return np.frombuffer(ctypes.string_at(address, np.dtype(kind).itemsize), kind)[0]

    def track(self, tensor: Tensor) -> Block:
        """The memory of ``tensor``, which stays until the call ends."""
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        block = self._blocks.get(start)
        if block is None or block.size != size or block.owner.expired():
            whole = not (tensor.is_floating_point() or tensor.is_complex())
            block = self._blocks[start] = Block(start, size, StorageWeakRef(storage), whole)
        self._held[start] = storage
        return block

    def _purge(self) -> None:
        for block in list(self._blocks.values()):
            if block.owner.expired():
                del self._blocks[block.start]

    def _block(self, address: Any) -> Block | None:
        """The memory at an address; None for numbers that are none."""
        if type(address) is not int or address not in _ADDRESSES:
            return None
        found = [each for each in self._blocks.values() if each.start <= address <= each.start + each.size]
        found = [each for each in found if not each.owner.expired()]
        inside = [each for each in found if address < each.start + each.size]
        if not found:
            raise ValueError(f"{address:#x} is an address of no tensor whose data_ptr() was asked for")
        return (inside or found)[0]

    def _sum_up(self, address: Any) -> None:
        block = self._block(address)
        if block is None or not block.whole or block.start in self._names or block.start in self._sums:
            return
        content = array(block.start, np.uint8, block.size)
        self._sums[block.start] = zlib.crc32(content.data) if content.any() else 0

    def _line(self, launch: Launch, shown: set[str]) -> str:
        return launch.text + ": " + " ".join(self._text(value, shown) for value in launch.values)

    def _text(self, value: Any, shown: set[str]) -> str:
        if isinstance(value, Map):
            return f"map({self._text(value.pointer, shown)} {value.text})"
        block = self._block(value)
        if block is None:
            return str(value) if type(value) is int else f"{value.dtype.str[1:]}:{value}"
        known = self._names.get(block.start)
        name = known or f"temp{sum(each.startswith('temp') for each in self._names.values())}"
        self._names[block.start] = name
        offset = value - block.start
        if known or name in shown:
            return f"{name}+{offset}"
        shown.add(name)
        total = self._sums.get(block.start)
        return f"{name}[{block.size}{f' {total:08x}' if total else ''}]+{offset}"

    @contextmanager
    def installed(self) -> Iterator[Recorder]:
        """Everything below the library replaced."""
        with ExitStack() as stack:

            def put(owner: Any, name: str, value: Any) -> None:
                stack.enter_context(patch.object(owner, name, value, create=True))

            put(os, "urandom", lambda count: bytes(count - 1) + b"\1")  # seeds
            put(cuda.bindings, "driver", self._driver)
            put(cuda.core, "ObjectCode", FakeCode)
            put(cuda.core, "Device", lambda _: SimpleNamespace(set_current=lambda: None))
            put(BUILD_READER, BUILD, lambda unit: compiler.Binary(b"none", "none", unit.arch, unit.title))
            put(KERNEL, LAUNCH, self._observed(getattr(KERNEL, LAUNCH)))
            launch_fakes.replace_torch_cuda(self, put)
            launch_fakes.replace_tensors(self, put)
            yield self
            self._operators.clear()

    def _observed(self, launch: Callable[..., None]) -> Callable[..., None]:
        """``launch``, whose kernel and types of arguments are noted for the driver's call inside."""
        names: dict[int, tuple[Any, str]] = {}  # kernel and name of its config, by the kernel's id

        def observed(one: Any, grid: Any, args: tuple[Any, ...], *rest: Any, **options: Any) -> None:
            if id(one) not in names:
                config = next(config for (config, _), loaded in LOADED.items() if loaded is one)
                names[id(one)] = one, config.name  # type: ignore[attr-defined]
            self._current = names[id(one)][1], [type(each) for each in args]
            try:
                launch(one, grid, args, *rest, **options)
            finally:
                self._current = None

        return observed

    @property
    def machine(self) -> Machine:
        """The GPU of the call that is recorded; ``RuntimeError`` outside of a call."""
        if self._machine is None:
            raise RuntimeError("no call is being recorded")
        return self._machine

    @property
    def is_recording(self) -> bool:
        """Whether tensors report a CUDA device."""
        return self._machine is not None


def _tensors(result: Any) -> Iterator[Tensor]:
    """The tensors of a call's result."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for each in result:
            yield from _tensors(each)
    elif hasattr(result, "__dict__"):
        yield from (each for each in vars(result).values() if isinstance(each, Tensor))


def write(log: Mapping[str, Sequence[str]]) -> str:
    """JSON, a line a call; what other archs launch as the first one does is :data:`ALIKE`."""
    lines = []
    for key, launches in log.items():
        first = f"{FIRST} {key.partition(' ')[2]}"
        alike = bool(launches) and first != key and log.get(first) == launches
        lines.append(f"{json.dumps(key)}: {json.dumps(ALIKE if alike else launches)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read(text: str) -> dict[str, list[str]]:
    """The log that :func:`write` wrote."""
    found = json.loads(text)
    return {key: found[f"{FIRST} {key.partition(' ')[2]}"] if each == ALIKE else each for key, each in found.items()}


def differences(before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines of a diff of two logs, call by call; none where they are equal."""
    lines = []
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        lines.append(f"@@ {key}" + (" (new call)" if old is None else " (no such call now)" if new is None else ""))
        changes = list(difflib.unified_diff(list(old or ()), list(new or ()), n=0, lineterm=""))[2:]
        lines += [change for change in changes if change[0] in "+-"]
    return lines


def main(arguments: Sequence[str]) -> int:
    """Record all cases and compare them with the log, or rewrite it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="rewrite launch_log.json")
    given = parser.parse_args(arguments)
    recorder = Recorder()
    with recorder.installed():
        from tests.kernels import launch_cases  # some modules take functions of torch.cuda where they are imported

        launch_cases.record(recorder)
    before = read(LOG.read_text()) if LOG.is_file() else {}
    changes = differences(before, recorder.log)
    launches = sum(map(len, recorder.log.values()))
    print(*changes, f"{len(recorder.log)} calls, {launches} launches", sep="\n")
    if given.update:
        LOG.write_text(write(recorder.log))
        return 0
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
