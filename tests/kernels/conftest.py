"""Kernels that tests compile without a GPU: one cache folder that outlives the run, one pool of processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cute_kernels.jit import Binary, Unit, build
from cute_kernels.jit.compiler import keep_headers

CACHE = Path(__file__).resolve().parents[2] / "build" / "test-kernels"

Compiled = Callable[[Mapping[Any, Unit]], dict[Any, Future[Binary]]]


@pytest.fixture(scope="module")
def kernel_cache() -> Iterator[None]:
    """Keep compiled kernels in ``build/test-kernels``, unless ``MAGICUBE_CACHE`` names another folder."""
    with pytest.MonkeyPatch.context() as patch:
        if "MAGICUBE_CACHE" not in os.environ:
            patch.setenv("MAGICUBE_CACHE", str(CACHE))
        yield


@pytest.fixture(scope="session")
def compilers() -> Iterator[ProcessPoolExecutor]:
    """Return the processes that compile, which start at the first kernel and keep the headers of all modules.

    They share the cores with those of the other processes of pytest-xdist: a process takes 2 s to start, and as long
    to parse the headers of each kind of kernel and arch.
    """
    testers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    cores = os.cpu_count() or 1
    # spawn: torch has threads, which a fork does not copy
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        max(2 if testers == 1 else 1, cores // testers), mp_context=context, initializer=keep_headers
    ) as pool:
        yield pool


@pytest.fixture(scope="module")
def compiled(kernel_cache: None, compilers: ProcessPoolExecutor) -> Iterator[Compiled]:
    """Return a function that compiles units in parallel: key -> unit to key -> future of the binary."""
    futures: list[Future[Binary]] = []

    def submit(units: Mapping[Any, Unit]) -> dict[Any, Future[Binary]]:
        found = {key: compilers.submit(build, unit) for key, unit in units.items()}
        futures.extend(found.values())
        return found

    yield submit
    for future in futures:  # of tests that did not run, as after the first failure under -x
        future.cancel()


@pytest.fixture(scope="module")
def compile_one(compiled: Compiled) -> Callable[[Unit], Binary]:
    """Return a function that compiles a unit in a process that has its headers; it waits for the units before."""
    return lambda unit: compiled({unit: unit})[unit].result()


@pytest.fixture(scope="module")
def binaries(request: pytest.FixtureRequest, compiled: Compiled) -> dict[Hashable, Future[Binary]]:
    """Compile the kernels of the selected tests of this module: (config, arch), their parameters, to a future."""
    wanted: dict[Hashable, Unit] = {}
    for item in request.session.items:
        if getattr(item, "module", None) is request.module and "binaries" in getattr(item, "fixturenames", ()):
            params = item.callspec.params
            wanted[params["config"], params["arch"]] = params["config"].translation_unit(params["arch"])
    return compiled(wanted)
