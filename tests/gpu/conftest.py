"""The kernels that the selected tests name are compiled first, in as many processes as there are cores.

A test names them as parameters or by the mark ``configs``; a kernel that it does not name is compiled at its first use.
They are kept in ``build``, so that the next run finds them.  Of several processes of one run the first compiles.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from cute_kernels.jit import current_arch, warmup
from cute_kernels.sddmm.config import SampleConfig
from cute_kernels.spmm.config import SpmmConfig


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "configs(list): kernels that the test will use")


def _configs(item: pytest.Item) -> Iterator[SpmmConfig | SampleConfig]:
    if any(True in mark.args for mark in item.iter_markers("skipif")):
        return  # its kernels may be no kernels of this GPU
    for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
        if isinstance(value, (SpmmConfig, SampleConfig)):
            yield value
    for mark in item.iter_markers("configs"):
        yield from mark.args[0]


@pytest.fixture(scope="session", autouse=True)
def compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "MAGICUBE_CACHE" not in os.environ:
            patch.setenv("MAGICUBE_CACHE", str(Path(__file__).resolve().parents[2] / "build" / "test-kernels"))
        if torch.cuda.is_available():
            wanted = {config for item in request.session.items for config in _configs(item)}
            start = time.perf_counter()
            with FileLock(Path(tempfile.gettempdir()) / f"magicube-test-kernels-{os.getuid()}.lock"):
                fresh = sum(not each.cached for each in warmup(wanted, current_arch(), os.cpu_count() or 1))
            request.config.stash[_TOLD] = (
                f"{len(wanted)} kernels, {fresh} compiled in {time.perf_counter() - start:.0f} s"
            )
        yield


_TOLD = pytest.StashKey[str]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if told := terminalreporter.config.stash.get(_TOLD, ""):
        terminalreporter.write_line(told)
