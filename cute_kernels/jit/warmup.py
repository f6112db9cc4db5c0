"""Compile kernels ahead of their first use; needs no GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Protocol

from cute_kernels.jit import cache
from cute_kernels.jit.compiler import Binary, Unit, check_arch, compile_unit, keep_headers


class Source(Protocol):
    """The part of a kernel config that a compile needs."""

    def translation_unit(self, arch: str) -> Unit:
        """Return the C++ source for `arch`."""


@dataclass(frozen=True)
class WarmupResult:
    """One kernel in the cache: ``cached`` if it was there before, number ``done`` of ``total``.

    Examples
    --------
    >>> WarmupResult(Binary(b"", "_Z5scalePf", "sm_90a", "scale"), cached=True, done=1, total=1).cached
    True
    """

    binary: Binary
    cached: bool
    done: int
    total: int


def warmup(configs: Iterable[Source], arch: str, jobs: int = 1) -> Iterator[WarmupResult]:
    """Compile the kernels of `configs` for `arch` into the cache.

    Parameters
    ----------
    configs : iterable of KernelConfig
    arch : str
        One of :data:`~cute_kernels.jit.compiler.ARCHES`.
    jobs : int, default 1
        Processes; NVRTC serializes the threads of one process. A script with more than one needs
        ``if __name__ == "__main__":``.

    Yields
    ------
    WarmupResult
        Each kernel when it is in the cache.

    Raises
    ------
    ValueError
        At once, if `arch` is unknown or `jobs` below 1.
    ToolchainError, CompileError
        At the first kernel that fails.

    Examples
    --------
    >>> from cute_kernels.convert.pack import PackConfig
    >>> for result in warmup([PackConfig("pack_strided")], "sm_90a"):
    ...     print(f"{result.binary.title}: {result.done} of {result.total}")
    gemm-pack_strided: 1 of 1
    """
    check_arch(arch)
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    units = {cache.key(unit): unit for unit in (config.translation_unit(arch) for config in configs)}
    return _run(units, jobs)


def _run(units: dict[str, Unit], jobs: int) -> Iterator[WarmupResult]:
    done, absent = 0, {}
    for key, unit in units.items():
        binary = cache.load(key)
        if binary is None:
            absent[key] = unit
        else:
            done += 1
            yield WarmupResult(binary, True, done, len(units))
    for key, binary in _compile(absent, jobs):
        cache.save(key, binary)
        done += 1
        yield WarmupResult(binary, False, done, len(units))


def _compile(units: dict[str, Unit], jobs: int) -> Iterator[tuple[str, Binary]]:
    if min(jobs, len(units)) <= 1:
        yield from ((key, compile_unit(unit)) for key, unit in units.items())
        return
    # spawned, not forked: this process may have a GPU's context and threads
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(units)), mp_context=context, initializer=keep_headers) as pool:
        futures = {pool.submit(compile_unit, unit): key for key, unit in units.items()}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:  # an error, or a caller who stops listening, must not wait for the rest
            pool.shutdown(wait=False, cancel_futures=True)
