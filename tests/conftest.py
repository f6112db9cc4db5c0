"""Tests run in random order; those marked ``gpu`` are skipped where torch has no CUDA device.

The summary names the seed of the order and counts the skipped tests. ``-p no:randomly`` keeps the order of the files.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

from cute_kernels.cpu import extension

hypothesis.settings.register_profile("patient", deadline=None)  # a busy machine takes its time
hypothesis.settings.load_profile("patient")

NO_DEVICE = "needs a CUDA device"
MANY_TESTS = {"test_cpu_few_columns.py", "test_ops.py", "test_paper_engine.py"}  # files that take half a minute


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files of few tests have the slowest ones. They begin, so that no process ends with one while the others wait, after
    # those that take as long by their number of tests.
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: item.path.name not in MANY_TESTS and tests[item.path])
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_DEVICE))


def pytest_configure() -> None:
    torch.set_num_threads(1)  # as `make test` has it: float products of torch depend on them in the last place


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(zlib.crc32(item.nodeid.partition("::")[0].encode()))  # data do not depend on the order


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seed = getattr(terminalreporter.config.option, "randomly_seed", None)
    if seed is not None:
        terminalreporter.write_line(f"order of the tests: --randomly-seed={seed}")
    # from the reports, which also those of other processes reach
    skipped = terminalreporter.stats.get("skipped", ())
    if count := sum(NO_DEVICE in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(f"{count} GPU tests skipped: torch has no CUDA device")


@pytest.fixture
def use_threads() -> Iterator[Callable[[int], None]]:
    """Set the threads of the engine, which then starts them however little there is to do."""
    engine, before = extension.load_extension(), torch.get_num_threads()
    serial_work = engine.set_serial_work(0)
    yield torch.set_num_threads
    engine.set_serial_work(serial_work)
    torch.set_num_threads(before)


@pytest.fixture(params=[True, False], ids=["openmp", "pool"])
def thread_source(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads of torch's OpenMP, or the engine's own."""
    engine = extension.load_extension()
    before = engine.want_openmp(request.param)
    yield
    engine.want_openmp(before)
