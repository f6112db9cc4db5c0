"""Launches of a kernel, a graph and a memset while another device is the current one; the driver is a fake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels.jit import kernel as jit_kernel
from cute_kernels.jit.kernel import ArgBuffer, Kernel, LaunchRecord
from cute_kernels.jit.launch_graph import LaunchGraph

HERE, THERE = 0, 1


class Driver:
    """Notes the current device of each call, as the driver would use it."""

    CUresult = SimpleNamespace(CUDA_ERROR_INVALID_CONTEXT=201)

    def __init__(self) -> None:
        self.current, self.seen = HERE, list[tuple[str, int]]()

    def __getattr__(self, name: str) -> Any:
        def call(*_: object) -> tuple[int]:
            self.seen.append((name, self.current))
            return (0,)

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Two devices, of which the first is the current one."""
    found = Driver()

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, found.current = found.current, index
        yield
        found.current = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: found.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 10 + index, raising=False)
    monkeypatch.setattr(jit_kernel, "_driver", lambda: found)
    return found


def kernel_of(driver: Driver, device: int) -> Kernel:
    made = Kernel.__new__(Kernel)
    made.name, made.arch, made.device, made.threads, made.smem_bytes = "k", "sm_90a", device, 32, 0
    made._driver, made._function, made._waits, made._layout = driver, None, True, None
    made._configs = {((1, 1, 1), None, True, 10 + device): object()}
    return made


@pytest.mark.parametrize("device", [HERE, THERE])
@pytest.mark.parametrize("pdl", [False, True])
def test_a_launch_and_its_repetition_run_on_the_device_of_the_kernel(driver: Driver, device: int, pdl: bool) -> None:
    kernel = kernel_of(driver, device)
    kernel._layout = SimpleNamespace(fill=lambda args: ArgBuffer(8, [0]), frames=[])  # type: ignore[assignment]
    kernel.launch((1, 1, 1), (1,), pdl=pdl)
    record = LaunchRecord(kernel, (1, 1, 1), ArgBuffer(8, [0]), None, pdl)
    kernel.enqueue(record)
    assert driver.seen == [("cuLaunchKernelEx" if pdl else "cuLaunchKernel", device)] * 2
    assert driver.current == HERE


@pytest.mark.parametrize("device", [HERE, THERE])
def test_a_graph_runs_on_the_device_of_its_kernels(driver: Driver, device: int) -> None:
    graph = LaunchGraph.__new__(LaunchGraph)
    graph._driver, graph.device, graph._graph = driver, device, None
    graph.launch()
    assert (driver.seen, driver.current) == ([("cuGraphLaunch", device)], HERE)


@pytest.mark.parametrize("device", [HERE, THERE])
def test_memory_is_set_on_its_own_device(driver: Driver, device: int) -> None:
    jit_kernel.set_to_zero(4096, 16, device)
    assert (driver.seen, driver.current) == ([("cuMemsetD8Async", device)], HERE)
