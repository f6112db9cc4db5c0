"""Launches as one CUDA graph: the host's time of one launch for all of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels.jit.device import DeviceError, on_device

if TYPE_CHECKING:
    from cute_kernels.jit.kernel import LaunchRecord


class LaunchGraph:
    """Launches of one device in their order, those allowed to start early included.

    Parameters
    ----------
    launches : sequence of LaunchRecord
        All of one device.

    Raises
    ------
    DeviceError
        If the driver refuses the graph.

    Examples
    --------
    >>> graph = LaunchGraph(launches)  # doctest: +SKIP
    >>> graph.launch()  # doctest: +SKIP
    """

    def __init__(self, launches: Sequence[LaunchRecord]) -> None:
        from cuda.bindings import driver

        self._driver, self.device = driver, launches[0].kernel.device
        beside = torch.cuda.Stream(self.device)  # the legacy default stream cannot be captured
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        with torch.cuda.stream(beside):
            self._do(driver.cuStreamBeginCapture(beside.cuda_stream, mode))
            try:
                for each in launches:
                    each.kernel.enqueue(each)
            finally:
                graph = self._do(driver.cuStreamEndCapture(beside.cuda_stream))
        self._graph = self._do(driver.cuGraphInstantiate(graph, 0))
        self._do(driver.cuGraphDestroy(graph))
        weakref.finalize(self, driver.cuGraphExecDestroy, self._graph)  # a running one is freed when it ends

    def launch(self) -> None:
        """Run the launches on torch's current stream of the device."""
        with on_device(self.device):
            self._do(self._driver.cuGraphLaunch(self._graph, torch._C._cuda_getCurrentRawStream(self.device)))

    def _do(self, result: tuple[Any, ...]) -> Any:
        if result[0]:
            raise DeviceError(f"a graph of launches on device {self.device}: {result[0].name}")
        return result[1] if len(result) > 1 else None
